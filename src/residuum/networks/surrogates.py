"""Make the activation functions of any network smooth while its ``forward`` method runs.

Attacks minimize an objective that contains gradients, so they need second derivatives. A function with a
kink, such as ReLU, has the second derivative zero wherever this derivative exists. ReLU and similar
activations can be written with the function gate(z) = max(z, 0):

    relu(z) = gate(z)     leaky(z) = a z + (1 - a) gate(z)     clip(z) = low + gate(z - low) - gate(z - high)

A surrogate (``activations.py``) replaces the gate by a smooth function. It also replaces the maximum over a
window of max-pooling. Calls are intercepted by the name of the function while the forward method runs.
Modules, functions and methods are intercepted, in place or not. All other functions run unchanged.
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
    """A context in which a smooth surrogate replaces every call of a function with a kink, such as ReLU.

    Args:
        surrogate: The smooth replacement for ReLU and for maxima.

    Attributes:
        seen: Number of replaced calls, by kind of function.
        unsmoothed: Number of calls that were not replaced, by name of a function with kinks.
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
        function_name = called.removesuffix("_")
        if function_name in RULES:
            kind, rule, position = RULES[function_name]
            inplace_argument = len(args) > position and args[position]
            is_in_place = called != function_name or kwargs.get("inplace", inplace_argument)
            keyword_options = {k: v for k, v in kwargs.items() if k not in ("input", "inplace")}
            z, *options = args[:position] or (kwargs["input"],)
            # The smooth function that replaces an activation function needs its input in the backward pass.
            # An in-place function overwrites its input, so a copy is used. Integer tensors are left
            # unchanged.
            is_floating = z.is_floating_point()
            z_or_copy = z.clone() if is_in_place else z
            smoothed = (
                rule(self.surrogate, z_or_copy, *options, **keyword_options)
                if is_floating
                else None
            )
            if smoothed is not None:
                self.seen[kind] += 1
                return z.copy_(smoothed) if is_in_place else smoothed
        if (function_name in RULES and is_floating) or function_name in UNSMOOTHED:
            self.unsmoothed[function_name] += 1
        return func(*args, **kwargs)


def with_surrogate(model: nn.Module, surrogate: Surrogate) -> nn.Module:
    """Return a network whose forward pass uses a smooth surrogate instead of ReLU and other kinks.

    Args:
        model: Any network, which does not change.
        surrogate: The smooth replacement.

    Returns:
        A copy that shares the weights with ``model``.
    """
    smoothed_model = copy.copy(model)  # a shallow copy shares all submodules and weights
    forward = model.forward

    def smooth(*inputs: Any, **named: Any) -> Any:
        with Kinks(surrogate):
            return forward(*inputs, **named)

    smoothed_model.forward = smooth
    return smoothed_model


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
    """Apply a smooth ReLU in place of a clamp with the minimum 0. Return None for other clamps."""
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
    """Return the smooth maximum over the windows of a max-pooling layer, None for unsupported options.

    Padded values are the lowest finite number, so they are never the maximum of a window.
    """
    kernel, pad = _repeat(kernel_size, dims), _repeat(padding, dims)
    strides = kernel if stride is None or stride == [] else _repeat(stride, dims)
    if return_indices or _repeat(dilation, dims) != (1,) * dims:
        return None
    paddings: list[int] = []
    for size, k, s, p in zip(z.shape[-dims:], kernel, strides, pad, strict=True):
        last_start = size + 2 * p - k
        last_window_index = math.ceil(last_start / s) if ceil_mode else last_start // s
        # No window may begin in the padding after the last pixel of the image.
        last_window_index -= last_window_index * s >= size + p
        # F.pad expects the paddings of the last dimension first.
        paddings = [p, max(0, last_window_index * s + k - size - p), *paddings]
    if any(paddings):
        z = F.pad(z, paddings, value=torch.finfo(z.dtype).min)
    # Make the entries of a pooling window the first dimension of z. The maximum over the first dimension is
    # faster, because it processes whole images at a time.
    first_window_dim = z.ndim - dims
    for i, (k, s) in enumerate(zip(kernel, strides, strict=True)):
        window_dim = first_window_dim + 2 * i
        if k == s:  # the windows do not overlap, so the slower ``unfold`` is not needed
            z = z.narrow(window_dim, 0, z.shape[window_dim] // k * k).unflatten(window_dim, (-1, k))
        else:
            z = z.unfold(window_dim, k, s).movedim(-1, window_dim + 1)
    dims_in_window = tuple(range(first_window_dim + 1, z.ndim, 2))
    return gate.maximum(z.movedim(dims_in_window, tuple(range(dims))).flatten(0, dims - 1))


def _adaptive(
    dims: int, gate: Surrogate, z: Tensor, output_size: Any, return_indices: bool = False
) -> Tensor | None:
    """Apply smooth max-pooling with windows of equal size. Return None if the sizes of windows differ."""
    input_sizes = z.shape[-dims:]
    requested_sizes = (
        output_size if isinstance(output_size, tuple | list) else (output_size,) * dims
    )
    output_sizes = [
        size if n is None else n for n, size in zip(requested_sizes, input_sizes, strict=True)
    ]
    if return_indices or any(size % n for size, n in zip(input_sizes, output_sizes, strict=True)):
        return None
    return _pool(
        dims, gate, z, tuple(size // n for size, n in zip(input_sizes, output_sizes, strict=True))
    )


def _repeat(size: Size, dims: int) -> tuple[int, ...]:
    if isinstance(size, int):
        return (size,) * dims
    return tuple(size) * (dims if len(size) == 1 else 1)


Rule = Callable[..., Tensor | None]
# For each function with a kink: its kind, the function that smooths it, and the position of its argument
# ``inplace`` (or the number of its arguments if it has no such argument).
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
UNSMOOTHED = {  # names of functions with kinks for which there is no smooth replacement
    "abs", "amax", "amin", "fractional_max_pool2d", "hardshrink", "hardsigmoid", "hardswish", "max",
    "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices", "maximum", "median",
    "min", "minimum", "sign", "softshrink", "sort", "threshold", "_threshold", "topk",
}  # fmt: skip
