"""Networks as small strings.

mlp:784-1000-1000-1            widths; bias in the first layer only
mlp:784-100-10,bias=hidden     bias: first | hidden | all | none; activation=relu | linear
convnet:1x8x8-16-32-1          input shape, channels, outputs
polynomial:12-36-1,coefficients=0/0/0/1     sum_j a_j sigma(w_j . x), c_0 first
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from torch import nn

from residuum.errors import ArchitectureError, did_you_mean
from residuum.networks.activations import ACTIVATIONS, OTHERS_REFUSED, Polynomial, is_other
from residuum.networks.modules import BIAS_RULES, MLP, ConvNet, PolynomialNetwork

KINDS = ("mlp", "convnet", "polynomial")
EXAMPLE = (
    "Example: --arch mlp:784-1000-1000-1, convnet:1x8x8-16-32-1 or "
    "polynomial:12-36-1,coefficients=0/0/0/1."
)
MAX_PARAMETERS = 10**9
MAX_LENGTH = 2000


@dataclass(frozen=True)
class Architecture:
    """A parsed architecture string; ``str()`` gives the string back in its canonical form."""

    kind: str
    widths: tuple[int, ...]
    image_shape: tuple[int, int, int] | None = None
    bias: str = "first"
    activation: str = "relu"
    coefficients: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Architecture:
        """Read an architecture string, or say which rule it breaks."""
        text = text.strip()
        if len(text) > MAX_LENGTH:
            raise ArchitectureError(
                f"An architecture has at most {MAX_LENGTH} characters; got {len(text)}.", EXAMPLE
            )
        match = re.fullmatch(r"(\w+):([0-9]+(?:x[0-9]+)*(?:-[0-9]+)+)((?:,\w+=[^,]+)*)", text)
        if match is None:
            raise ArchitectureError(
                f"An architecture reads kind:width-width-...[,option=value]; got {text!r}.", EXAMPLE
            )
        kind, sizes, rest = match.groups()
        if kind not in KINDS:
            raise ArchitectureError(
                f"No network kind {kind!r}.", f"{did_you_mean(kind, KINDS)} {EXAMPLE}"
            )
        options = dict(part.split("=", 1) for part in rest.split(",") if part)
        first, *others = sizes.split("-")
        shape, widths = tuple(map(int, first.split("x"))), tuple(map(int, others))
        if not all(0 < size <= MAX_PARAMETERS for size in shape + widths):
            raise ArchitectureError(
                f"Widths lie between 1 and {MAX_PARAMETERS}; got {text[:80]!r}.", EXAMPLE
            )
        if (len(shape) != 3) if kind == "convnet" else (len(shape) != 1):
            raise ArchitectureError(
                f"{kind} needs {'CxHxW' if kind == 'convnet' else 'one input width'} first; "
                f"got {first!r}.",
                "Example: --arch convnet:1x8x8-16-32-1." if kind == "convnet" else EXAMPLE,
            )
        return cls._with_options(kind, shape, widths, options)

    @classmethod
    def _with_options(
        cls, kind: str, shape: tuple[int, ...], widths: tuple[int, ...], options: dict[str, str]
    ) -> Architecture:
        allowed = ("coefficients",) if kind == "polynomial" else ("bias", "activation")
        if unknown := [name for name in options if name not in allowed]:
            raise ArchitectureError(
                f"{kind} has no option {unknown[0]!r}.", did_you_mean(unknown[0], allowed)
            )
        bias, activation = options.get("bias", "first"), options.get("activation", "relu")
        if is_other(activation):
            raise ArchitectureError(f"activation={activation} cannot be attacked.", OTHERS_REFUSED)
        for got, known in ((bias, BIAS_RULES), (activation, ACTIVATIONS)):
            if got not in known:
                raise ArchitectureError(f"No choice {got!r}.", did_you_mean(got, tuple(known)))
        if kind == "polynomial":
            if len(widths) != 2 or widths[1] != 1:
                raise ArchitectureError(
                    f"A polynomial network reads polynomial:d-width-1; got widths {widths}.",
                    "Example: --arch polynomial:12-36-1,coefficients=0/0/0/1.",
                )
            return cls(
                kind, (*shape, *widths), bias="none", activation="polynomial",
                coefficients=_numbers(options.get("coefficients", "0/0/0/1")),
            )  # fmt: skip
        if kind == "convnet":
            if len(widths) < 2:
                raise ArchitectureError(
                    "A convnet needs at least one convolution before its outputs.",
                    "Example: --arch convnet:1x8x8-16-32-1.",
                )
            image = (shape[0], shape[1], shape[2])
            return cls(kind, widths, image_shape=image, bias=bias, activation=activation)
        return cls(kind, (*shape, *widths), bias=bias, activation=activation)

    def __str__(self) -> str:
        sizes = "-".join(map(str, self.widths))
        if self.image_shape is not None:
            sizes = "x".join(map(str, self.image_shape)) + "-" + sizes
        text = f"{self.kind}:{sizes}"
        if self.kind == "polynomial":
            return text + ",coefficients=" + "/".join(map(_shortest, self.coefficients))
        text += f",bias={self.bias}" if self.bias != "first" else ""
        return text + (f",activation={self.activation}" if self.activation != "relu" else "")

    @property
    def inputs(self) -> int:
        """Number of input values."""
        if self.image_shape is not None:
            channels, height, width = self.image_shape
            return channels * height * width
        return self.widths[0]

    @property
    def outputs(self) -> int:
        """Number of output values."""
        return self.widths[-1]

    def build(self) -> nn.Module:
        """A freshly initialised network (torch's default initialisation)."""
        if self.kind == "mlp":
            size = sum(a * b for a, b in zip(self.widths[:-1], self.widths[1:], strict=True))
            if size > MAX_PARAMETERS:
                raise ArchitectureError(
                    f"A network may have {MAX_PARAMETERS} parameters; {self} has {size}.",
                    "Check the widths.",
                )
            return MLP(self.widths, self.bias, ACTIVATIONS[self.activation]())
        if self.kind == "convnet":
            assert self.image_shape is not None
            return ConvNet(
                self.image_shape, self.widths[:-1], self.widths[-1],
                self.bias, ACTIVATIONS[self.activation](),
            )  # fmt: skip
        return PolynomialNetwork(self.widths[0], self.widths[1], Polynomial(self.coefficients))


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split("/"))
    except ValueError:
        numbers = (math.nan,)
    if not all(map(math.isfinite, numbers)):
        raise ArchitectureError(
            f"Coefficients read c0/c1/..., all finite; got {text!r}.",
            "For t^3 say coefficients=0/0/0/1.",
        )
    return numbers


def _shortest(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
