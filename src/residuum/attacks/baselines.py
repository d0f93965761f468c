"""Baselines every reconstruction must beat: model inversion, and the first layer's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from residuum.attacks.config import AttackConfig
from residuum.attacks.priors import box
from residuum.attacks.randomness import stream
from residuum.records import Knowledge


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
