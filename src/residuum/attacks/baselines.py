"""Baselines every reconstruction must beat: model inversion, and the first layer's weights."""

from __future__ import annotations

import math
import time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from residuum.attacks.config import AttackConfig
from residuum.attacks.contract import Attack
from residuum.attacks.priors import box
from residuum.attacks.randomness import stream
from residuum.attacks.selection import select
from residuum.checkpoints import first_layer
from residuum.checkpoints.surfaces import Surface
from residuum.errors import InputError
from residuum.records import Knowledge, Reconstruction


class Baseline(Attack):
    """Candidates without an equation: nothing is explained, so nothing is decided."""

    baseline: ClassVar[bool] = True

    def why(self, surface: Surface) -> str:
        """It always does."""
        return "baseline"

    def candidates(
        self, surface: Surface, knowledge: Knowledge, config: AttackConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x, labels, and a weight for each."""
        raise NotImplementedError

    def run(
        self, surface: Surface, knowledge: Knowledge, config: AttackConfig, **_: Any
    ) -> Reconstruction:
        """One restart without steps."""
        start = time.monotonic()
        if why_not := self.why_not(surface, knowledge):
            raise InputError(f"{self.name} {why_not}.", "Use another attack.")
        x, labels, weight = (part.cpu() for part in self.candidates(surface, knowledge, config))
        none = torch.zeros(0, dtype=torch.long)
        found = Reconstruction(
            self.name, x, labels, weight, run=torch.zeros(len(x), dtype=torch.long), steps=none,
            loss=torch.zeros(1, 0), layers=torch.zeros(1, 0, 0), layer_names=(),
            status=("finished",), knowledge=knowledge, settings=config.to_json(),
            seconds=time.monotonic() - start,
        )  # fmt: skip
        return found.replace(selection=select(found))


class ModelInversion(Baseline):
    """Inputs of extreme output."""

    name = "model-inversion"

    def candidates(
        self, surface: Surface, knowledge: Knowledge, config: AttackConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By ascent."""
        shape, outputs = surface.shape(knowledge), surface.outputs
        model, count = surface.model(), config.candidates
        return model_inversion(model, knowledge, config, shape, outputs, count)


class FirstLayerWeights(Baseline):
    """Rows of the first layer."""

    name = "first-layer-weights"

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """The rows of a convolution are no images."""
        row, values = self._rows(surface).shape[1], math.prod(surface.shape(knowledge))
        whole = "needs a first layer that sees the whole input: its rows are images only then"
        return "" if row == values else whole

    def candidates(
        self, surface: Surface, knowledge: Knowledge, config: AttackConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As they are."""
        return first_layer_weights(self._rows(surface), surface.shape(knowledge))

    @staticmethod
    def _rows(surface: Surface) -> Tensor:
        return first_layer(surface.checkpoint.theta).flatten(1)


def model_inversion(
    model: nn.Module,
    knowledge: Knowledge,
    config: AttackConfig,
    shape: tuple[int, ...],
    outputs: int,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs that drive one output up (one output: half of them down). Returns x, labels, |output|.

    x starts at sigma N(0, 1) and climbs by gradient steps of ``lr_x``; with a known value range it
    is kept inside it, otherwise inside the unit ball around the origin scaled by sqrt(d), since the
    output of a homogeneous network has no maximum.
    """
    dtype = config.numbers
    model = model.to(config.device, dtype).requires_grad_(False)
    generator = stream("baseline", config.seed)
    x = config.sigma * torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    x = x.to(config.device, dtype)
    if outputs == 1:
        labels = torch.where(torch.arange(count) < count // 2, -1.0, 1.0).to(x)
    else:
        labels = (torch.arange(count) % outputs).to(x.device)
    limit = float(x[0].numel()) ** 0.5
    for _ in range(config.steps):
        x = x.detach().requires_grad_()
        out = model(x)
        value = labels * out[:, 0] if outputs == 1 else out.gather(1, labels[:, None])[:, 0]
        (slope,) = torch.autograd.grad(value.sum(), x)
        size = slope.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, *[1] * len(shape))
        with torch.no_grad():
            x = x + config.lr_x * limit * slope / size
            if knowledge.value_range is not None:
                low, high = box(knowledge, x[None])
                x = torch.maximum(torch.minimum(x, high), low)
            else:
                length = x.flatten(1).norm(dim=1).clamp(min=limit).view(-1, *[1] * len(shape))
                x = x * limit / length
    with torch.no_grad():
        out = model(x)
        value = out[:, 0] * labels if outputs == 1 else out.gather(1, labels[:, None])[:, 0]
    return x.detach(), labels, value.clamp(min=0)


def first_layer_weights(weight: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the first weight matrix as images, heaviest first; labels are unknown (0)."""
    rows = weight.detach().flatten(1).double()
    size = rows.norm(dim=1)
    order = size.argsort(descending=True)
    return rows[order].reshape(-1, *shape), torch.zeros(len(rows)), size[order]
