"""Replace the kinks of any network with smooth surrogates while its ``forward`` runs.

Attacks descend on an objective that contains gradients, so they need second derivatives. A function with a
kink, such as ReLU, has the second derivative zero wherever it exists. ReLU and similar activations are a
smooth function plus a gate, and a maximum over a window is a gate with more than two sides:

    relu(z) = gate(z)     leaky(z) = a z + (1 - a) gate(z)     clip(z) = low + gate(z - low) - gate(z - high)

A surrogate (``activations.py``) replaces the gate and the maximum. Functions are intercepted by name while
the forward runs, whether they are called as modules, functions or methods, in place or not. All other
functions run unchanged.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from residuum.networks.activations import Surrogate

Size = int | tuple[int, ...] | list[int]


class Kinks(TorchFunctionMode):
    """A context in which a surrogate replaces every call of a function with a kink, such as ReLU.

    Args:
        surrogate: The smooth replacement for ReLU and for maxima.

    Attributes:
        seen: Number of replaced calls, by kind of function.
        unsmoothed: Number of calls of functions with kinks that have no replacement. They run unchanged.
    """

    def __init__(self, surrogate: Surrogate) -> None:
        super().__init__()
        self.surrogate = surrogate
        self.seen: Counter[str] = Counter()
        self.unsmoothed: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, called = kwargs or {}, getattr(func, "__name__", "")
        name = called.removesuffix("_")
        if name in RULES:
            kind, rule, position = RULES[name]
            default = len(args) > position and args[position]
            is_in_place = called != name or kwargs.get("inplace", default)
            named = {k: v for k, v in kwargs.items() if k not in ("input", "inplace")}
            z, *options = args[:position] or (kwargs["input"],)
            # Tensors of whole numbers are no activations. An in-place function overwrites values that the
            # backward pass needs, so they are copied.
            is_real = z.is_floating_point()
            copied = z.clone() if is_in_place else z
            smoothed = rule(self.surrogate, copied, *options, **named) if is_real else None
            if smoothed is not None:
                self.seen[kind] += 1
                return z.copy_(smoothed) if is_in_place else smoothed
        if (name in RULES and is_real) or name in UNSMOOTHED:
            self.unsmoothed[name] += 1
        return func(*args, **kwargs)


def with_surrogate(model: nn.Module, surrogate: Surrogate) -> nn.Module:
    """Return a network whose forward pass uses a smooth surrogate instead of ReLU and other kinks.

    Args:
        model: Any network, which does not change.
        surrogate: The smooth replacement.

    Returns:
        A copy that shares the weights with ``model``.
    """
    changed, forward = copy.copy(model), model.forward  # a shallow copy shares all submodules

    def smooth(*inputs: Any, **named: Any) -> Any:
        with Kinks(surrogate):
            return forward(*inputs, **named)

    changed.forward = smooth
    return changed


def _relu(gate: Surrogate, z: Tensor) -> Tensor:
    return gate(z)


def _leaky(gate: Surrogate, z: Tensor, negative_slope: float = 0.01) -> Tensor:
    return negative_slope * z + (1 - negative_slope) * gate(z)


def _prelu(gate: Surrogate, z: Tensor, weight: Tensor) -> Tensor:
    """Apply a PReLU with one slope per channel. The channels are the second dimension of z."""
    slope = weight.view(-1, *[1] * (z.ndim - 2)) if weight.numel() > 1 else weight
    return slope * z + (1 - slope) * gate(z)


def _rrelu(
    gate: Surrogate, z: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor | None:
    return None if training else _leaky(gate, z, (lower + upper) / 2)


def _clip(gate: Surrogate, z: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    return min_val + gate(z - min_val) - gate(z - max_val)


def _clamp(gate: Surrogate, z: Tensor, min: Any = None, max: Any = None) -> Tensor | None:
    """Smooth a clamp with the minimum 0, which is a ReLU. Return None for a clamp with other bounds."""
    is_relu = isinstance(min, int | float) and min == 0 and max is None
    return gate(z) if is_relu else None


def _pool(
    dims: int,
    gate: Surrogate,
    z: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """Return the smooth maximum over the windows of a pooling layer, or None for unsupported options.

    The padding is never the maximum.
    """
    kernel, pad = _repeat(kernel_size, dims), _repeat(padding, dims)
    step = kernel if stride is None or stride == [] else _repeat(stride, dims)
    if return_indices or _repeat(dilation, dims) != (1,) * dims:
        return None
    outside: list[int] = []
    for size, k, s, p in zip(z.shape[-dims:], kernel, step, pad, strict=True):
        room = size + 2 * p - k
        last = math.ceil(room / s) if ceil_mode else room // s
        last -= last * s >= size + p  # windows begin inside the image
        outside = [p, max(0, last * s + k - size - p), *outside]  # the last dimension first
    if any(outside):
        z = F.pad(z, outside, value=torch.finfo(z.dtype).min)
    # The entries of a window become the first dimension, which is faster, because a sum over the entries then
    # runs along whole images.
    first = z.ndim - dims
    for i, (k, s) in enumerate(zip(kernel, step, strict=True)):
        dim = first + 2 * i
        if k == s:  # windows that do not overlap need no unfold, which is slower
            z = z.narrow(dim, 0, z.shape[dim] // k * k).unflatten(dim, (-1, k))
        else:
            z = z.unfold(dim, k, s).movedim(-1, dim + 1)
    entries = tuple(range(first + 1, z.ndim, 2))
    return gate.maximum(z.movedim(entries, tuple(range(dims))).flatten(0, dims - 1))


def _adaptive(
    dims: int, gate: Surrogate, z: Tensor, output_size: Any, return_indices: bool = False
) -> Tensor | None:
    """Return the smooth maximum over windows of equal size, or None if the windows differ in size."""
    sizes = z.shape[-dims:]
    requested = output_size if isinstance(output_size, tuple | list) else (output_size,) * dims
    counts = [size if n is None else n for n, size in zip(requested, sizes, strict=True)]
    if return_indices or any(size % n for size, n in zip(sizes, counts, strict=True)):
        return None
    return _pool(dims, gate, z, tuple(size // n for size, n in zip(sizes, counts, strict=True)))


def _repeat(size: Size, dims: int) -> tuple[int, ...]:
    if isinstance(size, int):
        return (size,) * dims
    return tuple(size) * (dims if len(size) == 1 else 1)


Rule = Callable[..., Tensor | None]
# For each function with a kink: its kind, the rule that smooths it, and the position of its argument
# ``inplace``.
RULES: dict[str, tuple[str, Rule, int]] = {
    "relu": ("ReLU", _relu, 1),
    "leaky_relu": ("LeakyReLU", _leaky, 2),
    "prelu": ("PReLU", _prelu, 2),
    "rrelu": ("RReLU", _rrelu, 4),
    "hardtanh": ("Hardtanh", _clip, 3),
    "relu6": ("ReLU6", partial(_clip, min_val=0.0, max_val=6.0), 1),
    "clamp": ("ReLU", _clamp, 3),
    "clamp_min": ("ReLU", _clamp, 2),
    **{f"max_pool{n}d": ("max-pooling", partial(_pool, n), 7) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": ("max-pooling", partial(_adaptive, n), 3) for n in (1, 2, 3)},
}
UNSMOOTHED = {  # functions with kinks that no rule smooths
    "abs", "amax", "amin", "fractional_max_pool2d", "hardshrink", "hardsigmoid", "hardswish", "max",
    "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices", "maximum", "median",
    "min", "minimum", "sign", "softshrink", "sort", "threshold", "_threshold", "topk",
}  # fmt: skip
