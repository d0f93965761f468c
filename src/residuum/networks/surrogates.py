"""Surrogates for kinks wherever a ``forward`` calls them, whoever wrote it.

A descent on gradients needs the derivative of a gate, which for a true kink is zero wherever it
exists. ReLU and its relatives are a smooth part and a gate; a window's maximum is a gate with more
than two sides:

    relu(z) = gate(z)     leaky(z) = a z + (1 - a) gate(z)     clip(z) = low + gate(z - low) - gate(z - high)

gate and maximum are the surrogate's (``activations.py``). The functions are caught by name while the
forward runs, as modules, functions or methods, in place or not; all others run as they are.
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
    """Inside, every kink that is called is the surrogate's.

    seen: how often which kind was called; left: kinks that have no surrogate and stay as they are.
    """

    def __init__(self, surrogate: Surrogate) -> None:
        super().__init__()
        self.surrogate = surrogate
        self.seen: Counter[str] = Counter()
        self.left: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, called = kwargs or {}, getattr(func, "__name__", "")
        name = called.removesuffix("_")
        if name in RULES:
            kind, rule, at = RULES[name]
            inplace = called != name or kwargs.get("inplace", len(args) > at and args[at])
            named = {k: v for k, v in kwargs.items() if k not in ("input", "inplace")}
            z, *options = args[:at] or (kwargs["input"],)
            # Whole numbers are no activations. What is saved for the backward pass must not be what is
            # overwritten.
            real = z.is_floating_point()
            copied = z.clone() if inplace else z
            found = rule(self.surrogate, copied, *options, **named) if real else None
            if found is not None:
                self.seen[kind] += 1
                return z.copy_(found) if inplace else found
        if (name in RULES and real) or name in LEFT:
            self.left[name] += 1
        return func(*args, **kwargs)


def with_surrogate(model: nn.Module, surrogate: Surrogate) -> nn.Module:
    """``model`` with ``surrogate`` in place of every kink that its forward calls; weights are shared."""
    changed, forward = copy.copy(model), model.forward  # of which the copy shares every part

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
    """The slopes are of channels, the second dimension."""
    slope = weight.view(-1, *[1] * (z.ndim - 2)) if weight.numel() > 1 else weight
    return slope * z + (1 - slope) * gate(z)


def _rrelu(
    gate: Surrogate, z: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor | None:
    return None if training else _leaky(gate, z, (lower + upper) / 2)


def _clip(gate: Surrogate, z: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    return min_val + gate(z - min_val) - gate(z - max_val)


def _clamp(gate: Surrogate, z: Tensor, min: Any = None, max: Any = None) -> Tensor | None:
    """A ReLU where it cuts at zero; other bounds keep numbers in range and are no activation."""
    zero = isinstance(min, int | float) and min == 0
    return gate(z) if zero and max is None else None


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
    """The maximum over windows (k_1 k_2, ..., out_1, out_2), what lies outside being least of all."""
    kernel, pad = _each(kernel_size, dims), _each(padding, dims)
    step = kernel if stride is None or stride == [] else _each(stride, dims)
    if return_indices or _each(dilation, dims) != (1,) * dims:
        return None
    outside: list[int] = []
    for size, k, s, p in zip(z.shape[-dims:], kernel, step, pad, strict=True):
        room = size + 2 * p - k
        last = math.ceil(room / s) if ceil_mode else room // s
        last -= last * s >= size + p  # a window begins inside
        outside = [p, max(0, last * s + k - size - p), *outside]  # the last dimension first
    if any(outside):
        z = F.pad(z, outside, value=torch.finfo(z.dtype).min)
    # Entries of a window first: sums over them then run along whole images.
    first = z.ndim - dims
    for i, (k, s) in enumerate(zip(kernel, step, strict=True)):
        at = first + 2 * i
        if k == s:  # the same as below, and faster
            z = z.narrow(at, 0, z.shape[at] // k * k).unflatten(at, (-1, k))
        else:
            z = z.unfold(at, k, s).movedim(-1, at + 1)
    entries = tuple(range(first + 1, z.ndim, 2))
    return gate.largest(z.movedim(entries, tuple(range(dims))).flatten(0, dims - 1))


def _adaptive(
    dims: int, gate: Surrogate, z: Tensor, output_size: Any, return_indices: bool = False
) -> Tensor | None:
    """Windows of one size alone."""
    sizes = z.shape[-dims:]
    wanted = output_size if isinstance(output_size, tuple | list) else (output_size,) * dims
    parts = [size if n is None else n for n, size in zip(wanted, sizes, strict=True)]
    if return_indices or any(size % n for size, n in zip(sizes, parts, strict=True)):
        return None
    return _pool(dims, gate, z, tuple(size // n for size, n in zip(sizes, parts, strict=True)))


def _each(size: Size, dims: int) -> tuple[int, ...]:
    if isinstance(size, int):
        return (size,) * dims
    return tuple(size) * (dims if len(size) == 1 else 1)


Rule = Callable[..., Tensor | None]
RULES: dict[str, tuple[str, Rule, int]] = {  # by function: kind, what it is, place of ``inplace``
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
LEFT = {
    "abs", "amax", "amin", "fractional_max_pool2d", "hardshrink", "hardsigmoid", "hardswish", "max",
    "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices", "maximum", "median",
    "min", "minimum", "sign", "softshrink", "sort", "threshold", "_threshold", "topk",
}  # fmt: skip
