"""Activation functions with explicit derivatives, and smooth replacements (surrogates) of ReLU.

Attacks need second derivatives, so they replace ReLU with a surrogate. In this table, alpha and beta are the
sharpness of a surrogate, and s is its derivative:

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

SigmoidReLU is the surrogate of Haim et al. 2022. Its backward pass does not compute the derivative of its
forward pass, so its "gradient" is not a true gradient. Softplus is the surrogate of Loo et al. 2024.
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
    """An activation function (module) with explicit formulas for its first and second derivative."""

    @abstractmethod
    def derivative(self, z: Tensor) -> Tensor:
        """Return the first derivative at the pre-activations z, as the backward pass uses it."""

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return the second derivative at z: zero, unless a subclass overrides this method."""
        return torch.zeros_like(z)

    def jet(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the activation function's value, first derivative and second derivative at z."""
        return self(z), self.derivative(z), self.second_derivative(z)


class ReLU(nn.ReLU, Activation):
    """The function max(z, 0). Its derivative is 1 for z > 0 and 0 elsewhere, as in PyTorch."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return the derivative in the dtype of z: 1 for z > 0 and 0 elsewhere."""
        return (z > 0).to(z.dtype)


class _SmoothBackward(torch.autograd.Function):
    """Base class of autograd functions of a tensor z, whose derivative is smooth and has sharpness alpha."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        z, ctx.alpha = inputs
        ctx.save_for_backward(z)
        ctx.save_for_forward(z)


class _SigmoidBackward(_SmoothBackward):
    """Compute relu(z). Autograd uses the derivative sigmoid(alpha z) in backward and forward mode."""

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
    """Compute the maximum of z over its first dimension. Autograd uses the derivative softmax(alpha z)."""

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
    """A smooth replacement for ReLU, with the derivative sigmoid(sharpness z).

    The method ``maximum`` is a smooth replacement for the maximum of several values. The derivative of
    ``maximum`` is softmax(sharpness z).
    """

    default_sharpness: float

    def __init__(self, sharpness: float | Tensor | None = None) -> None:
        super().__init__()
        self.sharpness = self.default_sharpness if sharpness is None else sharpness

    def derivative(self, z: Tensor) -> Tensor:
        """Return the derivative sigmoid(sharpness z) that the backward pass uses."""
        return torch.sigmoid(self.sharpness * z)

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return the second derivative sharpness s (1 - s), where s = sigmoid(sharpness z)."""
        first_derivative = self.derivative(z)
        return self.sharpness * first_derivative * (1 - first_derivative)

    @abstractmethod
    def maximum(self, z: Tensor) -> Tensor:
        """Return the maximum of z over its first dimension. Its derivative is smooth."""


class SigmoidReLU(Surrogate):
    """ReLU, but the backward pass uses the derivative sigmoid(alpha z) (Haim et al. 2022).

    alpha is the sharpness.
    """

    default_sharpness = 150.0

    def forward(self, z: Tensor) -> Tensor:
        """Return max(z, 0). The gradient is that of a smooth function close to max(z, 0)."""
        if not torch.is_grad_enabled():  # there will be no backward pass
            return z.clamp_min(0)
        return _SigmoidBackward.apply(z, self.sharpness)

    def maximum(self, z: Tensor) -> Tensor:
        """Return the exact maximum of z over its first dimension, with the derivative softmax(alpha z)."""
        return _SoftmaxBackward.apply(z, self.sharpness) if torch.is_grad_enabled() else z.amax(0)


class Softplus(Surrogate):
    """The function softplus(beta z) / beta of sharpness beta, with its true derivative (Loo et al. 2024)."""

    default_sharpness = 50.0

    def forward(self, z: Tensor) -> Tensor:
        """Return softplus(beta z) / beta, where beta is the sharpness.

        PyTorch returns z instead of softplus for large z. This method does not, because its value would then
        not agree with its derivatives.

        Args:
            z: Pre-activations.

        Returns:
            The activations, in the shape of ``z``.
        """
        return torch.logaddexp(self.sharpness * z, torch.zeros_like(z)) / self.sharpness

    def maximum(self, z: Tensor) -> Tensor:
        """Return log(sum exp(beta z)) / beta, a smooth maximum over the first dimension of z.

        beta is the sharpness.
        """
        return torch.logsumexp(self.sharpness * z, 0) / self.sharpness


class Polynomial(Activation):
    """The polynomial sum_k c_k z^k with coefficients c_k: ``Polynomial((0, 0, 0, 1))`` is z^3."""

    def __init__(self, coefficients: tuple[float, ...]) -> None:
        super().__init__()
        if len(coefficients) < 2 or coefficients[-1] == 0:
            raise ArchitectureError(
                f"A polynomial activation function needs a degree of at least 1, and its last coefficient "
                f"must not be zero; got {coefficients}.",
                "For z^3, pass coefficients=0/0/0/1.",
            )
        self.coefficients = tuple(map(float, coefficients))

    @property
    def degree(self) -> int:
        """Degree of the polynomial."""
        return len(self.coefficients) - 1

    def forward(self, z: Tensor) -> Tensor:
        """Return the polynomial sum_k c_k z^k, computed with Horner's rule."""
        return _horner(self.coefficients, z)

    def derivative(self, z: Tensor) -> Tensor:
        """Return the derivative sum_k k c_k z^(k-1) of the polynomial."""
        return _horner(_differentiate(self.coefficients), z)

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return the second derivative sum_k k (k-1) c_k z^(k-2) of the polynomial."""
        return _horner(_differentiate(_differentiate(self.coefficients)), z)


class Linear(nn.Identity, Activation):
    """The identity function, as the activation of a linear network."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return the derivative of the identity, which is 1 everywhere, in the shape of z."""
        return torch.ones_like(z)


class GELU(nn.GELU, Activation):
    """The function z F(z), where F is the distribution function of the standard normal distribution."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return the derivative F(z) + z f(z) with the normal distribution F and its density f."""
        return torch.special.ndtr(z) + z * _density(z)

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return the second derivative (2 - z^2) f(z) with the standard normal density f."""
        return (2 - z.square()) * _density(z)


class SiLU(nn.SiLU, Activation):
    """The function z sigmoid(z)."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return the derivative s (1 + z (1 - s)), where s = sigmoid(z)."""
        sigmoid_values = torch.sigmoid(z)
        return sigmoid_values * (1 + z * (1 - sigmoid_values))

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return the second derivative s (1 - s) (2 + z (1 - 2 s)), where s = sigmoid(z)."""
        first_derivative = torch.sigmoid(z)
        return first_derivative * (1 - first_derivative) * (2 + z * (1 - 2 * first_derivative))


class Tanh(nn.Tanh, Activation):
    """The hyperbolic tangent tanh(z)."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return the derivative 1 - tanh(z)^2."""
        return 1 - torch.tanh(z).square()

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return the second derivative -2 t (1 - t^2), where t = tanh(z)."""
        tanh_values = torch.tanh(z)
        return -2 * tanh_values * (1 - tanh_values.square())


class Sigmoid(nn.Sigmoid, Activation):
    """The logistic function 1 / (1 + exp(-z))."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return the derivative s (1 - s), where s = sigmoid(z)."""
        sigmoid_values = torch.sigmoid(z)
        return sigmoid_values * (1 - sigmoid_values)

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return the second derivative s (1 - s) (1 - 2 s), where s = sigmoid(z)."""
        first_derivative = torch.sigmoid(z)
        return first_derivative * (1 - first_derivative) * (1 - 2 * first_derivative)


class ELU(nn.ELU, Activation):
    """The function that is z for z > 0 and exp(z) - 1 for z <= 0."""

    def derivative(self, z: Tensor) -> Tensor:
        """Return the derivative: 1 for z > 0 and exp(z) for z <= 0."""
        return z.clamp(max=0).exp()

    def second_derivative(self, z: Tensor) -> Tensor:
        """Return the second derivative: 0 for z > 0 and exp(z) for z <= 0."""
        return torch.where(z > 0, 0.0, z.clamp(max=0).exp())


def _density(z: Tensor) -> Tensor:
    return torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)


def canonical(name: str) -> str:
    """Normalize the name of an activation function, such as LeakyReLU or leaky-relu."""
    normalized_name = re.sub(r"[-_ ]", "", name.lower())
    return {"leakyrelu": "leaky_relu", "swish": "silu", "logistic": "sigmoid"}.get(
        normalized_name, normalized_name
    )


def is_unsupported(name: str) -> bool:
    """Return True if architecture strings do not support the activation ``name``, such as Mish or relu6."""
    return UNSUPPORTED.fullmatch(canonical(name)) is not None


def _horner(coefficients: tuple[float, ...], z: Tensor) -> Tensor:
    polynomial_value = torch.zeros_like(z)
    for c in reversed(coefficients):
        polynomial_value = polynomial_value * z + c
    return polynomial_value


def _differentiate(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(k * c for k, c in enumerate(coefficients))[1:]


# LeakyReLU is not in this table of activation functions with explicit derivatives. The module
# ``surrogates.py`` treats it.
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
