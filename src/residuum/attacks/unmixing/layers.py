"""Find the layer that receives the input and check that its rows can be unmixed.

The rows of this layer, minus the initial weights, are mixtures of training samples (``ica.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from residuum.attacks.random_streams import stream
from residuum.attacks.unmixing.ica import COLUMNS, DOMAINS, ROUNDING, Effort, Layer, domain_of
from residuum.records import Knowledge
from residuum.surfaces.surface import WEIGHTS, Surface

# ---- the attack: which layer, what of it, how hard to look, and what a source is in pixels ----

MOST_BYTES = 16 * 2**30  # a layer that would take more memory is refused before it is read
MIN_WEIGHT, MAX_WEIGHT = (
    1e-12,
    1e12,
)  # of the largest weight: sums of squares stay finite in float32
VISIBLE = 0.1  # noise of a start that is too large to see samples through, as a share of S_1
TOO_FEW_DIRECTIONS = "fewer than two directions of the first layer stand out of the noise"
LARGE_INITIALIZATION = "the initial weights are neither small nor known"


@dataclass(frozen=True, eq=False)
class Mixed:
    """What is unmixed.

    rows: (h, d).
    bias: (h,), None where there is none.
    weight: (h, d) of the network itself.
    shape: of what the rows mix.
    whole: whether that is a sample, not a patch of one.
    kept: c.
    """

    rows: Tensor
    bias: Tensor | None
    weight: Tensor
    shape: tuple[int, ...]
    whole: bool
    rank: int
    kept: float


@lru_cache(maxsize=2)  # asked whether it applies, then run
def mixed(surface: Surface, knowledge: Knowledge, domain: str = "") -> Mixed | str:
    """The layer on the input, less its start; or the first condition that it does not meet.

    Conditions in order of cost: there is such a layer, it fits into memory, the start is small or
    known, and at least two directions stand out of its noise.
    """
    name, shape, whole = fed_by_input(surface.model(), surface.shape(knowledge))
    if not name:
        return "no dense layer meets the input, nor a convolution whose stride is its kernel"
    if name not in surface.equations:
        return f"the moment of {name}, which meets the input, is not there"
    theta, start = surface.checkpoint.theta, knowledge.theta0
    rows = surface.target[f"{name}.weight"].flatten(1).float()
    bias = surface.target.get(f"{name}.bias")
    values = DOMAINS[domain_of(domain, shape)](torch.zeros(1, *shape)).shape[1]
    if (needed := layer_bytes(*rows.shape)) > MOST_BYTES:
        return _too_large(needed)
    kept = 1.0
    if start is not None and surface.name == WEIGHTS:
        before = start[f"{name}.weight"].to(rows).flatten(1)
        kept, size = left_of(rows, before), rows.norm()
        rows = rows - kept * before
        if rows.norm() <= 10 * ROUNDING * size:
            return "the first layer is its start, but for a factor and rounding"
        bias = None if bias is None else bias - kept * start[f"{name}.bias"].to(bias)
    largest = float(rows.abs().max())
    if largest and not MIN_WEIGHT <= largest <= MAX_WEIGHT:
        return f"the largest weight of the first layer is {largest:.1g}: its squares would overflow or vanish"
    layer = Layer.of(rows) if bool(rows.any()) else None  # a frozen or dead layer
    if layer is None or layer.rank < 2:
        return TOO_FEW_DIRECTIONS
    if start is None and surface.name == WEIGHTS and layer.edge > VISIBLE:
        return (
            f"{LARGE_INITIALIZATION}: their noise reaches "
            f"{layer.edge:.0%} of the largest singular value"
        )
    full = Effort()
    needed = 12 * len(full.strengths) * full.starts * values * layer.rank
    if needed > MOST_BYTES:
        return _too_large(needed)
    weight = theta[f"{name}.weight"].flatten(1).to(rows)
    bias = None if bias is None else bias.to(rows)
    return Mixed(rows, bias, weight, shape, whole, layer.rank, kept)


def layer_bytes(h: int, d: int) -> int:
    """What ``Layer.of`` holds at a time: the rows, a part of them twice in float64, U and V."""
    part = 16 * min(h, d) * min(max(h, d), COLUMNS)
    return 8 * h * d + part + 24 * min(h, d) ** 2 + (8 * h * d if h > d else 0)


def _too_large(needed: int) -> str:
    return f"it would take about {needed / 2**30:.1f} GiB, above {MOST_BYTES / 2**30:.0f}"


def fed_by_input(model: nn.Module, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], bool]:
    """Name of the layer that meets samples of ``shape``, what its rows mix, and whether that is all.

    Dense, or a convolution whose stride is its kernel: each row is a sum over samples, or patches.
    "" where there is none. One random input shows it: what the layer is given equals the input.
    """
    probe = torch.randn(2, *shape, generator=stream("probe")).to(next(model.parameters()))
    found: dict[str, tuple[int, ...]] = {}

    def look(name: str, layer: nn.Linear | nn.Conv2d, given: tuple[Any, ...]) -> None:
        x = given[0]
        if x.numel() != probe.numel() or not torch.equal(x.flatten(), probe.flatten()):
            return
        if isinstance(layer, nn.Linear):
            found.setdefault(name, (layer.in_features,))
        elif layer.padding in ((0, 0), "valid") and (
            (layer.stride, layer.dilation, layer.groups) == (layer.kernel_size, (1, 1), 1)
        ):
            found.setdefault(name, tuple(layer.weight.shape[1:]))

    hooks = [
        layer.register_forward_pre_hook(partial(look, name))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    try:
        with torch.no_grad():
            model(probe)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        return "", (), False
    name, seen = next(iter(found.items()))
    whole = math.prod(seen) == math.prod(shape)
    return name, shape if whole else seen, whole


def left_of(rows: Tensor, before: Tensor) -> float:
    """c: how much of the start is left, fitted outside of what the samples span, a few times in turn.

    W = c W0 + sum of samples. The regression of W on W0 would count what of W0 lies along samples; the
    part of W0 orthogonal to the change found last does not, and the change needs c: so in turn.
    """
    apart, c = before, math.nan
    for _ in range(4):
        inner = (rows * apart).sum(dtype=torch.float64)
        square = apart.square().sum(dtype=torch.float64)
        last, c = c, float(inner / square.clamp(min=1e-30))
        change = rows - c * before
        if abs(c - last) < 1e-6 or change.norm() <= 10 * ROUNDING * rows.norm():
            break
        layer = Layer.of(change)
        V = layer.V[: min(layer.rank, len(layer.V) - 1)]
        apart = before - (before @ V.T) @ V
    return c
