"""Activations with explicit derivatives, and surrogates that attacks use instead of ReLU.

=================  =======================  ==========================  =======================
class              forward                  derivative used backward    second derivative
=================  =======================  ==========================  =======================
ReLU               max(z, 0)                1[z > 0]                    0
SigmoidReLU        max(z, 0)                sigmoid(alpha z)            alpha s (1 - s)
Softplus           softplus(beta z) / beta  sigmoid(beta z)             beta s (1 - s)
Polynomial         sum_k c_k z^k            its derivative              its second derivative
Linear             z                        1                           0
GELU, SiLU, Tanh,  usual definition         its derivative              its second derivative
Sigmoid, ELU
=================  =======================  ==========================  =======================

SigmoidReLU is the surrogate of Haim et al. 2022. Its backward pass is not the derivative of its forward
pass, so its "gradient" is a formal derivative. Softplus is the surrogate of Loo et al. 2024.
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
    """An activation module with the first two derivatives of its backward pass."""

    @abstractmethod
    def derivative(self, z: Tensor) -> Tensor:
        """Return the factor that the backward pass uses as the derivative at z."""

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return the derivative of ``derivative`` at z, which is zero unless a subclass overrides this."""
        return torch.zeros_like(z)

    def jet(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the value, the derivative and the second derivative at z."""
        return self(z), self.derivative(z), self.second_derivative(z)


class ReLU(nn.ReLU, Activation):
    """The function max(z, 0) with derivative 1[z > 0], which is zero at the kink as in PyTorch."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return 1[z > 0] in the dtype of z."""
        return (z > 0).to(z.dtype)


class _SmoothBackward(torch.autograd.Function):
    """A function of z with a smooth derivative of sharpness alpha, in backward and forward mode."""

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
    """A smooth replacement for a kink, with the derivative sigmoid(sharpness z).

    For a maximum of several values, softmax takes the place of sigmoid. ReLU is the maximum of z and 0.
    """

    default_sharpness: float

    def __init__(self, sharpness: float | Tensor | None = None) -> None:
        super().__init__()
        self.sharpness = self.default_sharpness if sharpness is None else sharpness

    def derivative(self, z: Tensor) -> Tensor:
        """Return s = sigmoid(sharpness z)."""
        return torch.sigmoid(self.sharpness * z)

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return sharpness s (1 - s), the derivative of the backward rule."""
        s = self.derivative(z)
        return self.sharpness * s * (1 - s)

    @abstractmethod
    def maximum(self, z: Tensor) -> Tensor:
        """Return the maximum over the first dimension, smoothed in the backward pass."""


class SigmoidReLU(Surrogate):
    """ReLU with the derivative sigmoid(alpha z) instead of 1[z > 0] (Haim et al. 2022)."""

    default_sharpness = 150.0

    def forward(self, z: Tensor) -> Tensor:
        """Return max(z, 0)."""
        if not torch.is_grad_enabled():  # there will be no backward pass
            return z.clamp_min(0)
        return _SigmoidBackward.apply(z, self.sharpness)

    def maximum(self, z: Tensor) -> Tensor:
        """Return the exact maximum, whose derivative is softmax(alpha z)."""
        return _SoftmaxBackward.apply(z, self.sharpness) if torch.is_grad_enabled() else z.amax(0)


class Softplus(Surrogate):
    """The function softplus(beta z) / beta with its true derivative (Loo et al. 2024)."""

    default_sharpness = 50.0

    def forward(self, z: Tensor) -> Tensor:
        """Return softplus(beta z) / beta, without the linear cut-off of PyTorch.

        The cut-off would make the derivatives inconsistent.

        Args:
            z: Pre-activations.

        Returns:
            The activations, in the shape of ``z``.
        """
        return torch.logaddexp(self.sharpness * z, torch.zeros_like(z)) / self.sharpness

    def maximum(self, z: Tensor) -> Tensor:
        """Return log sum exp(beta z) / beta with its true derivative."""
        return torch.logsumexp(self.sharpness * z, 0) / self.sharpness


class Polynomial(Activation):
    """The polynomial sum_k c_k z^k, with c_0 first: ``Polynomial((0, 0, 0, 1))`` is z^3."""

    def __init__(self, coefficients: tuple[float, ...]) -> None:
        super().__init__()
        if len(coefficients) < 2 or coefficients[-1] == 0:
            raise ArchitectureError(
                f"A polynomial activation needs degree >= 1 and a nonzero leading coefficient; "
                f"got {coefficients}.",
                "For z^3, pass coefficients=0/0/0/1.",
            )
        self.coefficients = tuple(map(float, coefficients))

    @property
    def degree(self) -> int:
        """Degree of the polynomial."""
        return len(self.coefficients) - 1

    def forward(self, z: Tensor) -> Tensor:
        """Return sum_k c_k z^k, computed with Horner's rule."""
        return _horner(self.coefficients, z)

    def derivative(self, z: Tensor) -> Tensor:
        """Return sum_k k c_k z^(k-1)."""
        return _horner(_differentiate(self.coefficients), z)

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return sum_k k (k-1) c_k z^(k-2)."""
        return _horner(_differentiate(_differentiate(self.coefficients)), z)


class Linear(nn.Identity, Activation):
    """The identity."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return ones."""
        return torch.ones_like(z)


class GELU(nn.GELU, Activation):
    """The function z F(z) with the normal distribution function F, whose density is f."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return F + z f."""
        return torch.special.ndtr(z) + z * _density(z)

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return (2 - z^2) f."""
        return (2 - z.square()) * _density(z)


class SiLU(nn.SiLU, Activation):
    """The function z s with s = sigmoid(z)."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return s (1 + z (1 - s))."""
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return s (1 - s) (2 + z (1 - 2 s))."""
        s = torch.sigmoid(z)
        return s * (1 - s) * (2 + z * (1 - 2 * s))


class Tanh(nn.Tanh, Activation):
    """The function t = tanh(z)."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return 1 - t^2."""
        return 1 - torch.tanh(z).square()

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return -2 t (1 - t^2)."""
        t = torch.tanh(z)
        return -2 * t * (1 - t.square())


class Sigmoid(nn.Sigmoid, Activation):
    """The function s = 1 / (1 + exp(-z))."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return s (1 - s)."""
        s = torch.sigmoid(z)
        return s * (1 - s)

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return s (1 - s) (1 - 2 s)."""
        s = torch.sigmoid(z)
        return s * (1 - s) * (1 - 2 * s)


class ELU(nn.ELU, Activation):
    """The function that is z for z > 0 and exp(z) - 1 for z <= 0."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return 1 for z > 0 and exp(z) for z <= 0."""
        return z.clamp(max=0).exp()

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return 0 for z > 0 and exp(z) for z <= 0."""
        return torch.where(z > 0, 0.0, z.clamp(max=0).exp())


def _density(z: Tensor) -> Tensor:
    return torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)


def canonical(name: str) -> str:
    """Return the key in ``ACTIVATIONS`` for a name such as LeakyReLU, leaky-relu or swish."""
    plain = re.sub(r"[-_ ]", "", name.lower())
    return {"leakyrelu": "leaky_relu", "swish": "silu", "logistic": "sigmoid"}.get(plain, plain)


def is_unsupported(name: str) -> bool:
    """Return True if ``name`` is an activation that no string supports, such as Mish or relu6."""
    return UNSUPPORTED.fullmatch(canonical(name)) is not None


def _horner(coefficients: tuple[float, ...], z: Tensor) -> Tensor:
    value = torch.zeros_like(z)
    for c in reversed(coefficients):
        value = value * z + c
    return value


def _differentiate(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(k * c for k, c in enumerate(coefficients))[1:]


# LeakyReLU needs no explicit derivative. It is smoothed where a forward calls it (``surrogates.py``).
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
UNSUPPORTED = re.compile(
    "celu|hardsigmoid|hardswish|hardtanh|mish|prelu|relu6|rrelu|selu|softplus|softsign"
)
UNSUPPORTED_ADVICE = (
    f"An architecture string supports {', '.join(ACTIVATIONS)}. Pass the network itself with "
    "rs.audit(model, ...) or --model package.module:factory --trust-code."
)
