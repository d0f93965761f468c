"""Activations with explicit derivatives, and the surrogates that attacks put in place of ReLU.

=================  =======================  ==========================  =======================
class              forward                  derivative used backward    second derivative
=================  =======================  ==========================  =======================
ReLU               max(z, 0)                1[z > 0]                    0
SigmoidReLU        max(z, 0)                sigmoid(alpha z)            alpha s (1 - s)
Softplus           softplus(beta z) / beta  sigmoid(beta z)             beta s (1 - s)
Polynomial         sum_k c_k z^k            its derivative              its second derivative
Linear             z                        1                           0
GELU, SiLU, Tanh,  their own                the true one                the true one
Sigmoid, ELU
=================  =======================  ==========================  =======================

SigmoidReLU is the surrogate of Haim et al. 2022: forward and backward do not belong to one
function, so its "gradient" is a formal derivative. Softplus is that of Loo et al. 2024.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from residuum.errors import ArchitectureError


class Activation(nn.Module, ABC):
    """A module that also knows the derivatives its backward pass uses."""

    @abstractmethod
    def derivative(self, z: Tensor) -> Tensor:
        """What the backward pass multiplies by."""

    def second_derivative(self, z: Tensor) -> Tensor:
        """What the double backward pass multiplies by: zero almost everywhere, unless said otherwise."""
        return torch.zeros_like(z)

    def jet(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Value, derivative and second derivative."""
        return self(z), self.derivative(z), self.second_derivative(z)


class ReLU(nn.ReLU, Activation):
    """max(z, 0) with derivative 1[z > 0]: zero at the kink, as torch has it."""

    def derivative(self, z: Tensor) -> Tensor:
        """1[z > 0] in the dtype of z."""
        return (z > 0).to(z.dtype)


class _SmoothBackward(torch.autograd.Function):
    """A function of z whose derivatives, backward and in forward mode, are those of sharpness alpha."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        z, ctx.alpha = inputs
        ctx.save_for_backward(z)
        ctx.save_for_forward(z)


class _SigmoidBackward(_SmoothBackward):
    """Forward relu(z); backward and forward-mode derivative sigmoid(alpha z)."""

    @staticmethod
    def forward(z: Tensor, alpha: float) -> Tensor:
        return z.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        return grad * torch.sigmoid(ctx.alpha * z), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _alpha: None) -> Tensor:
        (z,) = ctx.saved_tensors
        return tangent * torch.sigmoid(ctx.alpha * z)


class _SoftmaxBackward(_SmoothBackward):
    """Forward max over the first dimension; backward and forward-mode derivative softmax(alpha z)."""

    @staticmethod
    def forward(z: Tensor, alpha: float) -> Tensor:
        return z.amax(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        return grad * torch.softmax(ctx.alpha * z, 0), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _alpha: None) -> Tensor:
        (z,) = ctx.saved_tensors
        return (tangent * torch.softmax(ctx.alpha * z, 0)).sum(0)


class Surrogate(Activation):
    """Stands for a kink: its backward rule is the sigmoid of z times its sharpness.

    The same for a maximum of several values, of which max(z, 0) has two: softmax in place of sigmoid.
    """

    usual: float

    def __init__(self, sharpness: float | Tensor | None = None) -> None:
        super().__init__()
        self.sharpness = self.usual if sharpness is None else sharpness

    def derivative(self, z: Tensor) -> Tensor:
        """s = sigmoid(sharpness z)."""
        return torch.sigmoid(self.sharpness * z)

    def second_derivative(self, z: Tensor) -> Tensor:
        """sharpness s (1 - s), the derivative of the backward rule."""
        s = self.derivative(z)
        return self.sharpness * s * (1 - s)

    @abstractmethod
    def largest(self, z: Tensor) -> Tensor:
        """The maximum over the first dimension."""


class SigmoidReLU(Surrogate):
    """ReLU forward, sigmoid(alpha z) in place of 1[z > 0] backward (Haim et al. 2022)."""

    usual = 150.0

    def forward(self, z: Tensor) -> Tensor:
        """max(z, 0)."""
        if not torch.is_grad_enabled():  # nobody asks for the backward rule
            return z.clamp_min(0)
        return _SigmoidBackward.apply(z, self.sharpness)

    def largest(self, z: Tensor) -> Tensor:
        """The maximum; softmax(alpha z) backward."""
        return _SoftmaxBackward.apply(z, self.sharpness) if torch.is_grad_enabled() else z.amax(0)


class Softplus(Surrogate):
    """softplus(beta z) / beta, forward and backward (Loo et al. 2024)."""

    usual = 50.0

    def forward(self, z: Tensor) -> Tensor:
        """softplus(beta z) / beta without a linear cut-off, so that derivatives stay consistent."""
        return torch.logaddexp(self.sharpness * z, torch.zeros_like(z)) / self.sharpness

    def largest(self, z: Tensor) -> Tensor:
        """log sum exp(beta z) / beta, forward and backward."""
        return torch.logsumexp(self.sharpness * z, 0) / self.sharpness


class Polynomial(Activation):
    """sum_k c_k z^k with c_0 first; t^3 is ``Polynomial((0, 0, 0, 1))``."""

    def __init__(self, coefficients: tuple[float, ...]) -> None:
        super().__init__()
        if len(coefficients) < 2 or coefficients[-1] == 0:
            raise ArchitectureError(
                f"A polynomial activation needs degree >= 1 and a nonzero leading coefficient; "
                f"got {coefficients}.",
                "For t^3 say 0/0/0/1.",
            )
        self.coefficients = tuple(map(float, coefficients))

    @property
    def degree(self) -> int:
        """The highest power."""
        return len(self.coefficients) - 1

    def forward(self, z: Tensor) -> Tensor:
        """Horner's rule."""
        return _horner(self.coefficients, z)

    def derivative(self, z: Tensor) -> Tensor:
        """sum_k k c_k z^(k-1)."""
        return _horner(_differentiate(self.coefficients), z)

    def second_derivative(self, z: Tensor) -> Tensor:
        """sum_k k (k-1) c_k z^(k-2)."""
        return _horner(_differentiate(_differentiate(self.coefficients)), z)


class Linear(nn.Identity, Activation):
    """No activation."""

    def derivative(self, z: Tensor) -> Tensor:
        """One."""
        return torch.ones_like(z)


class GELU(nn.GELU, Activation):
    """z F(z), F the normal distribution function and f its density."""

    def derivative(self, z: Tensor) -> Tensor:
        """F + z f."""
        return torch.special.ndtr(z) + z * _density(z)

    def second_derivative(self, z: Tensor) -> Tensor:
        """(2 - z^2) f."""
        return (2 - z.square()) * _density(z)


class SiLU(nn.SiLU, Activation):
    """z s, s = sigmoid(z)."""

    def derivative(self, z: Tensor) -> Tensor:
        """s (1 + z (1 - s))."""
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))

    def second_derivative(self, z: Tensor) -> Tensor:
        """s (1 - s) (2 + z (1 - 2 s))."""
        s = torch.sigmoid(z)
        return s * (1 - s) * (2 + z * (1 - 2 * s))


class Tanh(nn.Tanh, Activation):
    """t = tanh(z)."""

    def derivative(self, z: Tensor) -> Tensor:
        """1 - t^2."""
        return 1 - torch.tanh(z).square()

    def second_derivative(self, z: Tensor) -> Tensor:
        """-2 t (1 - t^2)."""
        t = torch.tanh(z)
        return -2 * t * (1 - t.square())


class Sigmoid(nn.Sigmoid, Activation):
    """s = 1 / (1 + exp(-z))."""

    def derivative(self, z: Tensor) -> Tensor:
        """s (1 - s)."""
        s = torch.sigmoid(z)
        return s * (1 - s)

    def second_derivative(self, z: Tensor) -> Tensor:
        """s (1 - s) (1 - 2 s)."""
        s = torch.sigmoid(z)
        return s * (1 - s) * (1 - 2 * s)


class ELU(nn.ELU, Activation):
    """z above zero, exp(z) - 1 below."""

    def derivative(self, z: Tensor) -> Tensor:
        """1, or exp(z)."""
        return z.clamp(max=0).exp()

    def second_derivative(self, z: Tensor) -> Tensor:
        """0, or exp(z)."""
        return torch.where(z > 0, 0.0, z.clamp(max=0).exp())


def _density(z: Tensor) -> Tensor:
    return torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)


def canonical(name: str) -> str:
    """An activation's name as ``ACTIVATIONS`` has it: LeakyReLU, leaky-relu and swish are known too."""
    plain = re.sub(r"[-_ ]", "", name.lower())
    return {"leakyrelu": "leaky_relu", "swish": "silu", "logistic": "sigmoid"}.get(plain, plain)


def is_other(name: str) -> bool:
    """Whether ``name`` (Mish, hardswish, relu6) is an activation that no string covers."""
    return OTHERS.fullmatch(canonical(name)) is not None


def _horner(coefficients: tuple[float, ...], z: Tensor) -> Tensor:
    value = torch.zeros_like(z)
    for c in reversed(coefficients):
        value = value * z + c
    return value


def _differentiate(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(k * c for k, c in enumerate(coefficients))[1:]


# LeakyReLU has no derivative of its own here: it is smoothed where it is called (``surrogates.py``).
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": ReLU,
    "linear": Linear,
    "gelu": GELU,
    "silu": SiLU,
    "tanh": Tanh,
    "sigmoid": Sigmoid,
    "elu": ELU,
    "leaky_relu": nn.LeakyReLU,
}
SURROGATES: dict[str, type[Surrogate]] = {"sigmoid": SigmoidReLU, "softplus": Softplus}
OTHERS = re.compile(
    "celu|hardsigmoid|hardswish|hardtanh|mish|prelu|relu6|rrelu|selu|softplus|softsign"
)
OTHERS_REFUSED = (
    f"Strings know {', '.join(ACTIVATIONS)}; read as one of these, this would be another network. Give "
    "the network itself: rs.audit(model, ...), or --model package.module:factory --trust-code."
)
