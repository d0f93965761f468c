"""Activation patterns of piecewise linear networks: which switches there are and how they move.

A *switch* is a function s_k(x), affine inside a pattern, whose sign is part of the pattern: the
pre-activation of a ReLU neuron, or what the winner of a pooling window is ahead of another entry.
Inside a pattern every gradient in the parameters is affine in x, which is all that merging and
splitting need, for any objective and any depth.

x: (n, *shape); values, slopes: (n, K) over all switches of all layers, of every gradient point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional as F

from residuum.errors import InputError
from residuum.networks import MLP, Linear, dense_chain

ROUNDING = 1e-13  # of a switch's size: what is smaller is not told from zero
CHUNK = 256  # directions differentiated at once
NAMED = 4  # switches an error message names one by one
_PIECEWISE = (nn.ReLU, nn.LeakyReLU)
_AFFINE = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Flatten,
    nn.Unflatten,
    nn.Identity,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.ZeroPad2d,
    nn.Upsample,
)


class HypothesisError(InputError):
    """A statement about KKT sets was asked for where one of its hypotheses fails.

    hypothesis: which one, in one word: label, pattern, multiplier, direction, kink, budget, subspace.
    """

    def __init__(self, hypothesis: str, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.hypothesis = hypothesis

    def __reduce__(self) -> tuple[type[HypothesisError], tuple[str, str, str]]:  # type: ignore[override]
        return type(self), (self.hypothesis, self.message, self.remedy)


@dataclass(frozen=True)
class Switches:
    """All switches at some samples. layers: name and number of switches, in the order of values."""

    layers: tuple[tuple[str, int], ...]
    values: Tensor

    @property
    def pattern(self) -> Tensor:
        """(n, K) which switches are on: the derivative torch takes at 0 is that of the off side."""
        return self.values > 0

    def name(self, k: int) -> str:
        """A switch as a person finds it again: layer and unit."""
        for layer, size in self.layers:
            if k < size:
                return f"{layer}[{k}]"
            k -= size
        raise IndexError(k)

    def names(self, chosen: Tensor) -> str:
        """The switches of a (K,) mask, the first few by name."""
        found = chosen.nonzero()[:, 0].tolist()
        shown = ", ".join(self.name(k) for k in found[:NAMED])
        return shown + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")


def switches(models: Sequence[nn.Module], x: Tensor) -> Switches:
    """The switches of every gradient point at samples x."""
    layers, values = [], []
    for i, model in enumerate(models):
        prefix = f"point {i}: " if len(models) > 1 else ""
        for name, value in _record(model, x):
            layers.append((prefix + name, value.shape[1]))
            values.append(value)
    return Switches(tuple(layers), torch.cat([x.new_zeros(len(x), 0), *values], 1).detach())


def slopes(models: Sequence[nn.Module], x: Tensor, direction: Tensor) -> Tensor:
    """(n, K) derivative of every switch at x[i] along direction[i]."""

    def values(z: Tensor) -> Tensor:
        parts = [value for model in models for _, value in _record(model, z)]
        return torch.cat([z.new_zeros(len(z), 0), *parts], 1)

    return jvp(values, (x,), (direction.expand_as(x).contiguous(),))[1].detach()


def slope_matrix(models: Sequence[nn.Module], x: Tensor) -> Tensor:
    """(K, d) gradients in x of all switches at one sample x: (*shape)."""
    chains = [chain for model in models if (chain := dense_chain(model)) is not None]
    if len(chains) == len(models):
        return torch.cat([_chain_slopes(chain, x) for chain in chains])
    d = x.numel()
    basis = torch.eye(d, dtype=x.dtype, device=x.device).reshape(d, *x.shape)
    parts = [
        slopes(models, x.expand(len(some), *x.shape).contiguous(), some)
        for some in basis.split(CHUNK)
    ]
    return torch.cat(parts).T


@torch.no_grad()
def _chain_slopes(chain: MLP, x: Tensor) -> Tensor:
    """W_1, W_2 diag(gates_1) W_1, ... in one matrix."""
    parts, below = [x.new_zeros(0, x.numel())], chain.linears[0].weight
    if not isinstance(chain.activation, Linear):
        for layer, pre in zip(chain.linears[1:], chain.trace(x[None]).pre, strict=False):
            parts.append(below)
            on = pre[0] > 0
            below = layer.weight[:, on] @ below[on]
    return torch.cat(parts)


def sizes(models: Sequence[nn.Module], x: Tensor, layers: Sequence[tuple[str, int]]) -> Tensor:
    """(n, K) the size of a switch's gradient: the largest slope of its layer along random signs.

    A yardstick for rounding, not a bound: what is 1e-13 of it is zero computed in float64.
    """
    signs = torch.randint(0, 2, x.shape[1:], generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = slopes(models, x, signs.to(x.dtype)).abs()
    parts = found.split([size for _, size in layers], 1) if layers else ()
    return torch.cat(
        [found[:, :0], *(p.amax(1, keepdim=True).expand_as(p) for p in parts if p.shape[1])], 1
    )


def check_piecewise_linear(model: nn.Module) -> None:
    """Refuse networks that are not affine inside a pattern, as far as their modules show it."""
    known = (*_PIECEWISE, *_AFFINE, nn.MaxPool2d)
    leaves = [m for m in model.modules() if not list(m.children()) and m is not model]
    odd = [m for m in leaves if not isinstance(m, known)]
    odd += [m for m in leaves if isinstance(m, nn.MaxPool2d) and (m.padding or m.dilation != 1)]
    if not odd and (leaves or isinstance(model, known)):
        return
    bad = str(odd[0]) if odd else type(model).__name__
    raise HypothesisError(
        "pattern",
        f"Merging and splitting need a network that is affine in x inside an activation pattern; "
        f"{bad} is not known to be.",
        "Use ReLU and max pooling as modules of their own.",
    )


def _record(model: nn.Module, x: Tensor) -> list[tuple[str, Tensor]]:
    """Name and (n, units) values of every layer's switches, first layer first."""
    if (chain := dense_chain(model)) is not None:
        if isinstance(chain.activation, Linear):
            return []
        return [(f"layers.{i}", z) for i, z in enumerate(chain.trace(x).pre[:-1])]
    found: list[tuple[str, Tensor]] = []

    def hook(name: str, module: nn.Module, z: Tensor) -> None:
        value = _lead(module, z) if isinstance(module, nn.MaxPool2d) else z.flatten(1)
        calls = sum(known.partition("#")[0] == name for known, _ in found)
        found.append((f"{name}#{calls}" if calls else name, value))

    handles = [
        module.register_forward_hook(lambda m, inputs, _, name=name: hook(name, m, inputs[0]))
        for name, module in model.named_modules()
        if isinstance(module, (*_PIECEWISE, nn.MaxPool2d))
    ]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _lead(module: nn.MaxPool2d, z: Tensor) -> Tensor:
    """(n, units) winner minus entry, for every entry of every pooling window; 0 for the winner."""
    windows = F.unfold(z, module.kernel_size, stride=module.stride)
    entries = windows.reshape(len(z), z.shape[1], -1, windows.shape[-1])
    return (entries.max(2, keepdim=True).values - entries).flatten(1)
