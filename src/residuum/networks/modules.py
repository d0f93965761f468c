"""The three network families: MLP, small convnet, polynomial network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from residuum.errors import ArchitectureError
from residuum.networks.activations import Activation, ReLU

BIAS_RULES = {
    "first": lambda layer, depth: layer == 0,  # homogeneous
    "hidden": lambda layer, depth: layer < depth - 1,
    "all": lambda layer, depth: True,
    "none": lambda layer, depth: False,
}


def bias_rule(has: Sequence[bool]) -> str:
    """The name of the rule by which layers have biases, first to last."""
    for rule, applies in BIAS_RULES.items():
        if list(has) == [applies(i, len(has)) for i in range(len(has))]:
            return rule
    raise ArchitectureError(
        f"Biases must follow one of the rules {', '.join(BIAS_RULES)}; this network has them in "
        f"layers {[i for i, b in enumerate(has) if b]} of {len(has)}.",
        "Train with biases in the first layer, in all but the last, in all, or in none.",
    )


@dataclass(frozen=True)
class Trace:
    """One forward pass of an MLP. inputs[l]: (n, h_l) into layer l; pre[l]: (n, h_{l+1}) out of it."""

    inputs: list[Tensor]
    pre: list[Tensor]

    @property
    def output(self) -> Tensor:
        """(n, C) network output."""
        return self.pre[-1]


class MLP(nn.Module):
    """Fully connected network d-h_1-...-C; the first-layer bias alone keeps it homogeneous."""

    def __init__(
        self, widths: tuple[int, ...], bias: str = "first", activation: nn.Module | None = None
    ) -> None:
        super().__init__()
        depth = len(widths) - 1
        if depth < 1 or min(widths) < 1:
            raise ArchitectureError(
                f"An MLP needs at least an input and an output width, all positive; got {widths}.",
                "Example: mlp:784-1000-1000-1.",
            )
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=BIAS_RULES[bias](i, depth))
            for i, (a, b) in enumerate(itertools.pairwise(widths))
        )
        self.activation = cast(Activation, ReLU() if activation is None else activation)

    @property
    def linears(self) -> list[nn.Linear]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    @property
    def hidden(self) -> int:
        """Number of hidden layers."""
        return len(self.layers) - 1

    def forward(self, x: Tensor) -> Tensor:
        """(n, ...) -> (n, C)."""
        return self.trace(x).output

    def trace(self, x: Tensor) -> Trace:
        """Forward pass that keeps every layer's input and pre-activation."""
        inputs, pre = [x.flatten(1)], []
        for layer in self.layers:
            pre.append(layer(inputs[-1]))
            inputs.append(self.activation(pre[-1]))
        return Trace(inputs[:-1], pre)

    def signals(self, trace: Trace, covectors: Tensor, index: Tensor | None = None) -> list[Tensor]:
        """Backward signals d_l = d<u_r, Phi(x_r)> / d pre_l, one (R, h_{l+1}) tensor per layer.

        covectors u: (R, C); index: (R,) which sample each row belongs to (row i is sample i if None).
        The gradient of row r in layer l's weight is the outer product d_l[r] inputs[l][r].
        """
        signals = [covectors]
        for layer in range(len(self.layers) - 1, 0, -1):
            weight = self.linears[layer].weight
            gates = self.activation.derivative(trace.pre[layer - 1])
            signals.append(signals[-1] @ weight * (gates if index is None else gates[index]))
        return signals[::-1]


def dense_chain(model: nn.Module) -> MLP | None:
    """The network where it offers what an MLP does: ``linears``, ``activation``, ``trace``, ``signals``.

    Closed forms, the explicit engine and the certificates that need them ask this, never the class.
    """
    offers = all(hasattr(type(model), name) for name in ("linears", "trace", "signals"))
    known = hasattr(getattr(model, "activation", None), "derivative")
    return cast(MLP, model) if offers and known else None


class ConvNet(nn.Module):
    """3x3 convolutions of stride 2, then one linear layer; bias rules as in the MLP."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        channels: tuple[int, ...],
        outputs: int,
        bias: str = "first",
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        depth = len(channels) + 1
        sizes = (input_shape[0], *channels)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1, bias=BIAS_RULES[bias](i, depth))
            for i, (a, b) in enumerate(itertools.pairwise(sizes))
        )
        height, width = input_shape[1:]
        for _ in channels:
            height, width = math.ceil(height / 2), math.ceil(width / 2)
        biased = BIAS_RULES[bias](depth - 1, depth)
        self.head = nn.Linear(channels[-1] * height * width, outputs, bias=biased)
        self.activation = activation if activation is not None else ReLU()
        self.input_shape = input_shape

    def forward(self, x: Tensor) -> Tensor:
        """(n, c, h, w) or flat -> (n, C)."""
        x = x.reshape(len(x), *self.input_shape)
        for convolution in self.convolutions:
            x = self.activation(convolution(x))
        return self.head(x.flatten(1))


class PolynomialNetwork(nn.Module):
    """Phi(x) = sum_j a_j sigma(w_j . x), no bias (Shen et al. 2026, section 4)."""

    hidden = 1  # layers

    def __init__(self, inputs: int, width: int, activation: Activation) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, inputs) / inputs**0.5)
        self.coefficient = nn.Parameter(torch.randn(width) / width**0.5)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """(n, ...) -> (n, 1)."""
        return (self.activation(x.flatten(1) @ self.weight.T) @ self.coefficient)[:, None]
