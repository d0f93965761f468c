"""Find the layer that receives the input, and check that its rows can be unmixed.

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
from residuum.attacks.unmixing.ica import COLUMNS, DOMAINS, ROUNDING, Effort, Layer, choose_domain
from residuum.records import Knowledge
from residuum.surfaces.surface import MOMENT, WEIGHTS, Surface

MAX_BYTES = 16 * 2**30  # maximum memory in bytes; the attack rejects layers that need more
# The largest absolute weight must lie in this range, so that sums of squares stay finite in float32.
MIN_WEIGHT, MAX_WEIGHT = (1e-12, 1e12)
# Maximum singular value of unknown initial weights, as a share of the largest singular value of the layer.
# Larger initial weights hide the samples.
VISIBLE = 0.1
TOO_FEW_DIRECTIONS = "fewer than two directions of the first layer exceed the noise"
LARGE_INITIALIZATION = "the initial weights are neither small nor known"


@dataclass(frozen=True, eq=False)
class InputLayer:
    """The layer that receives the input, and whose rows are mixtures of training samples.

    Attributes:
        rows: (h, d) rows of the attacked weights or optimizer state, minus the initial weights.
        bias: (h,) bias, None if the layer has no bias.
        weight: (h, d) weights of the layer in the network, zero if they are not known.
        shape: Shape of a sample, or of a patch of a sample.
        is_sample: Whether each row mixes samples. Otherwise each row mixes patches of samples.
        rank: Number of singular values of ``rows`` that exceed the noise.
        initial_share: The share c of the initial weights that the trained weights still contain.
        exact: The weights and the bias as an exact sum of gradients: an update, an optimizer state, or the
            difference from known initial weights. None if the initial weights are not known.
    """

    rows: Tensor
    bias: Tensor | None
    weight: Tensor
    shape: tuple[int, ...]
    is_sample: bool
    rank: int
    initial_share: float
    exact: tuple[Tensor, Tensor] | None = None


@lru_cache(maxsize=2)  # an attack reads the layer twice: in ``why_not`` and in ``find``
def read_input_layer(surface: Surface, knowledge: Knowledge, domain: str = "") -> InputLayer | str:
    """Read the layer that receives the input and subtract its initial weights.

    The function checks four conditions, the cheapest first. The network has a layer that receives the input.
    The layer fits into memory. Its initial weights are small or known. At least two singular values of the
    weight matrix exceed the noise of the initial weights.

    Args:
        surface: The attack surface: the weights, the weight update or an optimizer state.
        knowledge: What the attacker knows.
        domain: Domain in which samples are sparse.

    Returns:
        The layer, or a text that names the first condition that fails.
    """
    name, shape, is_sample = find_input_layer(
        surface.copy_module(), surface.sample_shape(knowledge)
    )
    if not name:
        return (
            "no dense layer receives the input, and neither does a convolution with a stride equal to its "
            "kernel"
        )
    if name not in surface.equations:
        return f"the optimizer state lacks {name}, the layer that receives the input"
    theta, theta0 = surface.checkpoint.theta, knowledge.theta0
    rows = surface.target[f"{name}.weight"].flatten(1).float()
    bias = surface.target.get(f"{name}.bias")
    domain_values = DOMAINS[choose_domain(domain, shape)](torch.zeros(1, *shape)).shape[1]
    if (layer_bytes := estimate_layer_bytes(*rows.shape)) > MAX_BYTES:
        return _describe_excess(layer_bytes)
    initial_share, exact = 1.0, None
    if surface.name == MOMENT and bias is not None:
        exact = rows, bias
    if theta0 is not None and surface.name == WEIGHTS:
        if bias is not None:
            parameter_names = f"{name}.weight", f"{name}.bias"
            weight_change, bias_change = (
                theta[n].double() - theta0[n].double() for n in parameter_names
            )
            exact = weight_change.flatten(1), bias_change
        initial_weights = theta0[f"{name}.weight"].to(rows).flatten(1)
        initial_share, size = estimate_initial_share(rows, initial_weights), rows.norm()
        rows = rows - initial_share * initial_weights
        if rows.norm() <= 10 * ROUNDING * size:
            return "the first layer equals its initial weights up to a factor and rounding"
        bias = None if bias is None else bias - initial_share * theta0[f"{name}.bias"].to(bias)
    largest_weight = float(rows.abs().max())
    if largest_weight and not MIN_WEIGHT <= largest_weight <= MAX_WEIGHT:
        return (
            f"the largest weight of the first layer is {largest_weight:.1g}: its square would overflow or "
            "vanish"
        )
    layer = Layer.from_rows(rows) if bool(rows.any()) else None  # all rows of a frozen layer are 0
    # The gradient of a single sample has one direction: the sample itself.
    if layer is None or layer.rank < (2 if exact is None else 1):
        return TOO_FEW_DIRECTIONS
    if theta0 is None and surface.name == WEIGHTS and layer.edge > VISIBLE:
        return (
            f"{LARGE_INITIALIZATION}: their noise reaches "
            f"{layer.edge:.0%} of the largest singular value"
        )
    full_effort = Effort()
    needed_bytes = 12 * len(full_effort.strengths) * full_effort.starts * domain_values * layer.rank
    if needed_bytes > MAX_BYTES:
        return _describe_excess(needed_bytes)
    weight = theta[f"{name}.weight"].flatten(1).to(rows) * surface.has_weights
    bias = None if bias is None else bias.to(rows)
    return InputLayer(rows, bias, weight, shape, is_sample, layer.rank, initial_share, exact)


def estimate_layer_bytes(h: int, d: int) -> int:
    """Estimate the peak memory of the singular value decomposition in ``Layer.from_rows``.

    The memory holds the rows, two copies of a block of the rows in float64, and the singular vectors.

    Args:
        h: Number of rows.
        d: Number of columns.

    Returns:
        The number of bytes.
    """
    block_bytes = 16 * min(h, d) * min(max(h, d), COLUMNS)
    return 8 * h * d + block_bytes + 24 * min(h, d) ** 2 + (8 * h * d if h > d else 0)


def _describe_excess(needed: int) -> str:
    return (
        f"the attack would need about {needed / 2**30:.1f} GiB of memory; the limit is "
        f"{MAX_BYTES / 2**30:.0f} GiB"
    )


def find_input_layer(model: nn.Module, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], bool]:
    """Find the layer that receives the samples.

    The layer is dense, or a convolution with a stride equal to its kernel. Each row of the layer is then a
    sum over samples or patches. The function runs the model on random samples and looks for the layer
    that receives the same values.

    Args:
        model: The network.
        shape: Shape of a sample.

    Returns:
        The name of the layer, the shape of the samples or patches that its rows mix, and whether the rows
        mix complete samples. The name is "" if no layer receives the samples.
    """
    random_samples = torch.randn(2, *shape, generator=stream("probe")).to(next(model.parameters()))
    shapes: dict[str, tuple[int, ...]] = {}

    def compare_input(name: str, layer: nn.Linear | nn.Conv2d, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        if x.numel() != random_samples.numel() or not torch.equal(
            x.flatten(), random_samples.flatten()
        ):
            return
        if isinstance(layer, nn.Linear):
            shapes.setdefault(name, (layer.in_features,))
        elif layer.padding in ((0, 0), "valid") and (
            (layer.stride, layer.dilation, layer.groups) == (layer.kernel_size, (1, 1), 1)
        ):
            shapes.setdefault(name, tuple(layer.weight.shape[1:]))

    hooks = [
        layer.register_forward_pre_hook(partial(compare_input, name))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    try:
        with torch.no_grad():
            model(random_samples)
    finally:
        for hook in hooks:
            hook.remove()
    if not shapes:
        return "", (), False
    name, mixed_shape = next(iter(shapes.items()))
    is_sample = math.prod(mixed_shape) == math.prod(shape)
    return name, shape if is_sample else mixed_shape, is_sample


def estimate_initial_share(rows: Tensor, initial: Tensor) -> float:
    """Estimate the share c of the initial weights W0 in W = c W0 + (sum of samples).

    A regression of W on W0 is biased, because W0 has components along the samples. The estimate therefore
    uses only the component of W0 that is orthogonal to the weight update W - c W0. The weight update
    depends on c, so the estimate is repeated a few times.

    Args:
        rows: (h, d) weights W.
        initial: (h, d) initial weights W0.

    Returns:
        The share c.
    """
    orthogonal_part, c = initial, math.nan
    for _ in range(4):
        inner_product = (rows * orthogonal_part).sum(dtype=torch.float64)
        squared_norm = orthogonal_part.square().sum(dtype=torch.float64)
        last, c = c, float(inner_product / squared_norm.clamp(min=1e-30))
        weight_update = rows - c * initial
        if abs(c - last) < 1e-6 or weight_update.norm() <= 10 * ROUNDING * rows.norm():
            break
        layer = Layer.from_rows(weight_update)
        V = layer.V[: min(layer.rank, len(layer.V) - 1)]
        orthogonal_part = initial - (initial @ V.T) @ V
    return c
