"""Model inversion: inputs to which the network gives confident outputs. A baseline."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from residuum.attacks.base import OneShotAttack
from residuum.attacks.random_streams import stream
from residuum.attacks.stationarity.priors import box
from residuum.records import Knowledge, Reconstruction
from residuum.settings import ModelInversionSettings
from residuum.surfaces.surface import Surface


class Baseline(OneShotAttack):
    """Candidates without an equation: nothing is explained, so nothing is decided."""

    baseline: ClassVar[bool] = True

    def why_applies(self, surface: Surface) -> str:
        """Return why the attack applies."""
        return "baseline"


class ModelInversion(ModelInversionSettings, Baseline):
    """Inputs that drive one output up (one output: half of them down), weighted by |output|.

    x starts at sigma N(0, 1) and climbs by gradient steps of ``lr_x``; with a known value range it
    is kept inside it, otherwise inside the unit ball around the origin scaled by sqrt(d), since the
    output of a homogeneous network has no maximum.
    """

    name: ClassVar[str] = "model-inversion"

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Climb the output that each label asks for, in steps relative to the candidates' size.

        Without a known range the norm is bounded instead, because an output grows with its input without
        end.
        """
        shape, outputs, count = surface.shape(knowledge), surface.outputs, self.candidates
        model = surface.model().to(self.device, self.numbers).requires_grad_(False)
        generator = stream("baseline", self.seed)
        x = self.sigma * torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        x = x.to(self.device, self.numbers)
        if outputs == 1:
            labels = torch.where(torch.arange(count) < count // 2, -1.0, 1.0).to(x)
        else:
            labels = (torch.arange(count) % outputs).to(x.device)

        def value(x: Tensor) -> Tensor:
            out = model(x)
            return labels * out[:, 0] if outputs == 1 else out.gather(1, labels[:, None])[:, 0]

        limit, ones = float(math.prod(shape)) ** 0.5, [1] * len(shape)
        for _ in range(self.steps):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(value(x).sum(), x)
            size = slope.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, *ones)
            with torch.no_grad():
                x = x + self.lr_x * limit * slope / size
                if knowledge.value_range is not None:
                    x = x.clamp(*box(knowledge, x[None]))
                else:
                    x = x * limit / x.flatten(1).norm(dim=1).clamp(min=limit).view(-1, *ones)
        with torch.no_grad():
            weight = value(x).clamp(min=0)
        return Reconstruction.from_candidates(
            self.name, x.detach().cpu(), labels.cpu(), weight.cpu(), knowledge
        )
