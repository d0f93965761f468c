"""Model inversion: a baseline that finds inputs to which the network gives confident outputs."""

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
    """Base class of attacks that do not fit the weights. Their results are a comparison, and show no leak."""

    is_baseline: ClassVar[bool] = True

    def why_applies(self, surface: Surface) -> str:
        """Return why the attack applies: a baseline (an attack for comparison) applies to all networks."""
        return "baseline"


class ModelInversion(ModelInversionSettings, Baseline):
    """Find inputs that maximize the output of a label.

    If the network has a single output, half of the inputs maximize this output, and the others minimize it.

    Candidates start at random, with standard deviation ``sigma``, and move by gradient steps of ``lr_x``.
    Candidates stay inside the value range if the range is known. Otherwise candidates of d values stay inside
    a ball of radius sqrt(d) around the origin, because the output of a homogeneous network has no maximum.
    The weight of a candidate is the output of its label, but at least 0.
    """

    name: ClassVar[str] = "model-inversion"

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Change random inputs by gradient steps of fixed length that increase the output of their label.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The candidates.
        """
        shape, outputs, count = surface.sample_shape(knowledge), surface.outputs, self.candidates
        model = surface.copy_module().to(self.device, self.numbers).requires_grad_(False)
        generator = stream("baseline", self.seed)
        candidates = self.sigma * torch.randn(
            count, *shape, generator=generator, dtype=torch.float64
        )
        candidates = candidates.to(self.device, self.numbers)
        if outputs == 1:
            labels = torch.where(torch.arange(count) < count // 2, -1.0, 1.0).to(candidates)
        else:
            labels = (torch.arange(count) % outputs).to(candidates.device)

        def value(candidates: Tensor) -> Tensor:
            network_outputs = model(candidates)
            return (
                labels * network_outputs[:, 0]
                if outputs == 1
                else network_outputs.gather(1, labels[:, None])[:, 0]
            )

        max_norm, unit_axes = float(math.prod(shape)) ** 0.5, [1] * len(shape)
        for _ in range(self.steps):
            candidates = candidates.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(value(candidates).sum(), candidates)
            gradient_norm = gradient.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, *unit_axes)
            with torch.no_grad():
                candidates = candidates + self.lr_x * max_norm * gradient / gradient_norm
                if knowledge.value_range is not None:
                    candidates = candidates.clamp(*box(knowledge, candidates[None]))
                else:
                    candidates = (
                        candidates
                        * max_norm
                        / candidates.flatten(1).norm(dim=1).clamp(min=max_norm).view(-1, *unit_axes)
                    )
        with torch.no_grad():
            candidate_weights = value(candidates).clamp(min=0)
        return Reconstruction.from_candidates(
            self.name, candidates.detach().cpu(), labels.cpu(), candidate_weights.cpu(), knowledge
        )
