"""The network families, as modules and as small strings; one record per kind: all that is known of it.

mlp:784-1000-1000-1            widths; bias in the first layer only
mlp:784-100-10,bias=hidden     bias: first | hidden | all | none; activation=relu | gelu | tanh | ...
convnet:1x8x8-16-32-1          input shape, channels, outputs
polynomial:12-36-1,coefficients=0/0/0/1     sum_j a_j sigma(w_j . x), c_0 first
module:1x8x8-10,class=Net      a live module that no string describes: input shape, outputs

A new kind is a :class:`Kind` under its name in ``KINDS``; nothing else has to know it. What is fast or
provable for some networks alone asks the module itself what it offers, see :func:`dense_chain`.

A kind may know its own from the tensors of a file: each weight with its bias, and the order they are
applied in. Names say which bias belongs to which weight; sorting them does not, for ``conv1.bias``
comes before ``conv1.weight`` and a file may hold either first.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from residuum import plugins
from residuum.errors import ArchitectureError, did_you_mean, require_known
from residuum.networks.activations import (
    ACTIVATIONS,
    OTHERS_REFUSED,
    Activation,
    Polynomial,
    ReLU,
    canonical,
    is_other,
)

EXAMPLE = (
    "Example: --arch mlp:784-1000-1000-1, convnet:1x8x8-16-32-1 or "
    "polynomial:12-36-1,coefficients=0/0/0/1."
)
# An architecture is text of a stranger's: what is built from it stays bounded.
MAX_PARAMETERS = 10**9
MAX_LENGTH = 2000  # characters of that text
# What a bare file leaves open: at most metadata.MAX_TEXT characters, for it is saved with the weights.
ASSUMED_RELU = (
    "the activation is taken to be ReLU, for the weights do not say; with another this result is void: "
    "name it then, --arch ...,activation=gelu (or silu, tanh, leaky_relu, ...)"
)
ASSUMED_STRIDES = (
    "strides are taken to be 2, without pooling: the shapes can be the same; for a network with pooling "
    "this result is void"
)
Named = tuple[str, Tensor]
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


@dataclass(frozen=True)
class Architecture:
    """A parsed architecture string; ``str()`` gives the string back in its canonical form.

    image_shape: of one input where the kind reads shapes; otherwise the first width is the input's.
    """

    kind: str
    widths: tuple[int, ...]
    image_shape: tuple[int, ...] | None = None
    options: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", {**KINDS[self.kind].options, **self.options})

    @classmethod
    def parse(cls, text: str) -> Architecture:
        """Read an architecture string, or say which rule it breaks."""
        text = text.strip()

        def wrong(rule: str, got: object) -> ArchitectureError:
            return ArchitectureError(f"{rule}; got {got}.", EXAMPLE)

        if len(text) > MAX_LENGTH:
            raise wrong(f"An architecture has at most {MAX_LENGTH} characters", len(text))
        match = re.fullmatch(r"(\w+):([0-9]+(?:x[0-9]+)*(?:-[0-9]+)+)((?:,\w+=[^,]+)*)", text)
        if match is None:
            raise wrong("An architecture reads kind:width-width-...[,option=value]", repr(text))
        name, sizes, rest = match.groups()
        if name not in KINDS:
            raise ArchitectureError(
                f"No network kind {name!r}.", f"{did_you_mean(name, tuple(KINDS))} {EXAMPLE}"
            )
        kind, options = KINDS[name], dict(part.split("=", 1) for part in rest.split(",") if part)
        first, *others = sizes.split("-")
        shape, widths = tuple(map(int, first.split("x"))), tuple(map(int, others))
        if not all(0 < size <= MAX_PARAMETERS for size in shape + widths):
            raise wrong(f"Widths lie between 1 and {MAX_PARAMETERS}", repr(text[:80]))
        if kind.rank not in (None, len(shape)):
            wanted = "one input width" if kind.rank == 1 else "CxHxW"
            raise ArchitectureError(
                f"{name} needs {wanted} first; got {first!r}.", f"Example: --arch {kind.example}."
            )
        for option in options:
            require_known(option, kind.options, f"{name} has no option", ArchitectureError)
        if kind.rank == 1:
            return kind.check(cls(name, (*shape, *widths), None, options))
        return kind.check(cls(name, widths, shape, options))

    def __str__(self) -> str:
        sizes = "-".join(map(str, self.widths))
        if self.image_shape is not None:
            sizes = "x".join(map(str, self.image_shape)) + "-" + sizes
        usual = KINDS[self.kind].options
        said = [f",{name}={value}" for name, value in self.options.items() if value != usual[name]]
        return f"{self.kind}:{sizes}" + "".join(said)

    @property
    def inputs(self) -> int:
        """Number of input values."""
        return self.widths[0] if self.image_shape is None else math.prod(self.image_shape)

    @property
    def outputs(self) -> int:
        """Number of output values."""
        return self.widths[-1]

    def build(self) -> nn.Module:
        """A freshly initialized network (torch's default initialization)."""
        return KINDS[self.kind].build(self)


class Kind:
    """What is to be known of one kind of network; subclass it and put it into ``KINDS``.

    module: the class of its networks.
    example: an architecture string.
    rank: dimensions of the input that strings begin with, 1 for a width, 3 for CxHxW, None for any.
    options: of the string, each with the value that goes unsaid.
    """

    module: type[nn.Module] | None = None
    example: str
    rank: int | None = 1
    options: Mapping[str, str] = {}

    def check(self, arch: Architecture) -> Architecture:
        """The architecture in its canonical form, or the rule it breaks."""
        return arch

    def build(self, arch: Architecture) -> nn.Module:
        """A freshly initialized network."""
        raise NotImplementedError

    def describe(self, model: Any) -> Architecture | None:
        """The string of a live network of class ``module``; None where no string can say it."""
        return None

    def recognize(self, state: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, str]] | None:
        """The network whose tensors these must be, and for each of its parameters the name in ``state``.

        None for a kind whose shapes leave room for doubt: its files need ``--arch``.
        """
        return None

    def assumed(self, arch: Architecture) -> tuple[str, ...]:
        """What the weights alone do not say about a network of this kind."""
        return ()


class _Layered(Kind):
    """Layers whose biases follow a rule, with one activation between them."""

    options: Mapping[str, str] = {"bias": "first", "activation": "relu"}

    def check(self, arch: Architecture) -> Architecture:
        """Both options name one of the known choices."""
        bias, activation = arch.options["bias"], canonical(arch.options["activation"])
        if is_other(activation):
            raise ArchitectureError(f"No string says activation={activation}.", OTHERS_REFUSED)
        for got, known in ((bias, BIAS_RULES), (activation, ACTIVATIONS)):
            require_known(got, known, "No choice", ArchitectureError)
        return replace(arch, options={**arch.options, "activation": activation})

    def assumed(self, arch: Architecture) -> tuple[str, ...]:
        """The activation, where there is a hidden layer."""
        return (ASSUMED_RELU,) if arch.image_shape or len(arch.widths) > 2 else ()

    def _options(self, layers: list[Any], activation: nn.Module) -> dict[str, str]:
        """Those of a live network; an activation that has no name is refused."""
        kinds: dict[type, str] = {kind: name for name, kind in ACTIVATIONS.items()}
        name = kinds.get(type(activation))
        if name is None:
            raise ArchitectureError(f"No string says {type(activation).__name__}.", OTHERS_REFUSED)
        return {"bias": bias_rule([layer.bias is not None for layer in layers]), "activation": name}


class _MLP(_Layered):
    module, example = MLP, "mlp:784-1000-1000-1"

    def build(self, arch: Architecture) -> nn.Module:
        size = sum(a * b for a, b in itertools.pairwise(arch.widths))
        if size > MAX_PARAMETERS:
            raise ArchitectureError(
                f"A network may have {MAX_PARAMETERS} parameters; {arch} has {size}.",
                "Check the widths.",
            )
        return MLP(arch.widths, arch.options["bias"], ACTIVATIONS[arch.options["activation"]]())

    def describe(self, model: MLP) -> Architecture | None:
        options = self._options(model.linears, model.activation)
        widths = (model.linears[0].in_features, *(len(layer.weight) for layer in model.linears))
        return Architecture("mlp", widths, None, options)

    def recognize(self, state: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, str]] | None:
        layers = find_chain(state)
        if layers is None:
            return None
        weights = [state[layer[0]] for layer in layers]
        bias = bias_rule([len(layer) == 2 for layer in layers])
        names = {
            f"layers.{i}.{ours}": theirs
            for i, layer in enumerate(layers)
            for ours, theirs in zip(("weight", "bias"), layer, strict=False)
        }
        widths = (weights[0].shape[1], *map(len, weights))
        return Architecture("mlp", widths, None, {"bias": bias}), names


class _ConvNet(_Layered):
    module, example, rank = ConvNet, "convnet:1x8x8-16-32-1", 3

    def check(self, arch: Architecture) -> Architecture:
        if len(arch.widths) < 2:
            raise ArchitectureError(
                "A convnet needs at least one convolution before its outputs.",
                f"Example: --arch {self.example}.",
            )
        return super().check(arch)

    def build(self, arch: Architecture) -> nn.Module:
        assert arch.image_shape is not None
        activation = ACTIVATIONS[arch.options["activation"]]()
        *channels, outputs = arch.widths
        return ConvNet(arch.image_shape, tuple(channels), outputs, arch.options["bias"], activation)

    def describe(self, model: ConvNet) -> Architecture | None:
        layers = [*model.convolutions, model.head]
        options = self._options(layers, model.activation)
        widths = tuple(len(layer.weight) for layer in layers)
        return Architecture("convnet", widths, model.input_shape, options)

    def assumed(self, arch: Architecture) -> tuple[str, ...]:
        return (*super().assumed(arch), ASSUMED_STRIDES)


class _Polynomial(Kind):
    module, example = PolynomialNetwork, "polynomial:12-36-1,coefficients=0/0/0/1"
    options: Mapping[str, str] = {"coefficients": ""}  # always said

    def check(self, arch: Architecture) -> Architecture:
        if len(arch.widths) != 3 or arch.widths[2] != 1:
            raise ArchitectureError(
                f"A polynomial network reads polynomial:d-width-1; got widths {arch.widths[1:]}.",
                f"Example: --arch {self.example}.",
            )
        return replace(arch, options={"coefficients": _text(self.coefficients(arch))})

    def coefficients(self, arch: Architecture) -> tuple[float, ...]:
        """c_0 first."""
        text = arch.options["coefficients"] or "0/0/0/1"
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

    def build(self, arch: Architecture) -> nn.Module:
        inputs, width, _ = arch.widths
        return PolynomialNetwork(inputs, width, Polynomial(self.coefficients(arch)))

    def describe(self, model: PolynomialNetwork) -> Architecture | None:
        if not isinstance(model.activation, Polynomial):
            return None
        width, inputs = model.weight.shape
        options = {"coefficients": _text(model.activation.coefficients)}
        return Architecture("polynomial", (inputs, width, 1), None, options)


class _Kept(Kind):
    example, rank = "module:1x8x8-10,class=Net", None
    options: Mapping[str, str] = {"class": ""}

    def build(self, arch: Architecture) -> nn.Module:
        raise ArchitectureError(
            f"{arch} stands for a live network that was kept as given; a file holds its weights, not the "
            "code of its forward.",
            "Load the weights into the module and give the module itself to rs.audit or rs.attack.",
        )


def _text(coefficients: tuple[float, ...]) -> str:
    """Each number as the shortest text that reads back as the same one."""
    return "/".join(str(int(c)) if c == int(c) and abs(c) < 1e15 else repr(c) for c in coefficients)


BUILT_IN = {"mlp": _MLP(), "convnet": _ConvNet(), "polynomial": _Polynomial(), "module": _Kept()}
KINDS: dict[str, Kind] = plugins.Table("network kind", BUILT_IN)


def recognized(state: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, str]] | None:
    """By the first kind that knows its own; one from outside that raises knows nothing."""
    for name, kind in KINDS.items():
        try:
            if (found := kind.recognize(state)) is not None:
                arch, names = found
                return arch, names
        except Exception as problem:
            if type(kind).__module__.startswith("residuum."):
                raise
            plugins.faults[name] = plugins.describe(problem)
    return None


def kind_of(model: nn.Module) -> Kind | None:
    """The kind whose class this very network has."""
    return next((kind for kind in KINDS.values() if type(model) is kind.module), None)


def weights_and_vectors(state: Mapping[str, Tensor]) -> tuple[list[Named], list[Named]]:
    """Tensors of two or more dimensions, and all others."""
    weights = [(name, t) for name, t in state.items() if t.ndim >= 2]
    return weights, [(name, t) for name, t in state.items() if t.ndim < 2]


def orders(weights: list[Named]) -> tuple[list[Named], list[Named]]:
    """The weights in the order of their names, matrices behind convolutions, and as in the file."""
    return sorted(weights, key=lambda named: (-named[1].ndim, natural(named[0]))), weights


def attach_vectors(order: list[Named], vectors: list[Named]) -> list[tuple[str, ...]] | None:
    """Per layer the names of its weight and its vector; None where a vector has no place.

    A vector belongs to the weight of its stem, else to that of its size.
    """
    layers: list[tuple[str, ...]] = []
    rest = dict(vectors)
    for i, (name, weight) in enumerate(order):
        stem = name.removesuffix("weight")
        fits = [n for n, b in rest.items() if b.shape == weight.shape[:1]]
        own = [n for n in fits if stem != name and n == stem + "bias"]
        # By size only while nothing is left to doubt: as many as layers, or one in all.
        loose = fits if len(vectors) == len(order) or (len(vectors) == 1 and i == 0) else []
        chosen = own or sorted(loose, key=natural)[:1]
        for vector in chosen:
            del rest[vector]
        layers.append((name, *chosen))
    return None if rest else layers


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key in which layer10 comes after layer2."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts]


def find_chain(state: Mapping[str, Tensor]) -> list[tuple[str, ...]] | None:
    """The layers of an MLP, each by the names of its weight and its bias; None for other tensors.

    Layer names differ between projects and safetensors files lose the order, so the chain
    d -> h_1 -> ... -> C is found from shapes: in the order of the names, in the order of the file, and
    last by search, which must have one answer.
    """
    weights, vectors = weights_and_vectors(state)
    if weights and all(w.ndim == 2 for _, w in weights):
        for order in (*orders(weights), *_chains(weights)):
            layers = attach_vectors(order, vectors) if _is_chain(order) else None
            if layers is not None:
                return layers
    return None


def _is_chain(order: Iterable[Named]) -> bool:
    shapes = [w.shape for _, w in order]
    return all(a[0] == b[1] for a, b in itertools.pairwise(shapes))


def _chains(weights: list[Named], limit: int = 2) -> list[list[Named]]:
    """Every order of the weights that forms a chain; empty when there are several."""
    found: list[list[Named]] = []

    def extend(chain: list[Named], rest: list[Named]) -> None:
        if len(found) >= limit:
            return
        if not rest:
            found.append(chain)
        for i, candidate in enumerate(rest):
            if not chain or chain[-1][1].shape[0] == candidate[1].shape[1]:
                extend([*chain, candidate], rest[:i] + rest[i + 1 :])

    # Two weights of one shape can be swapped, so no order is the only one: nothing to search.
    if len(weights) <= 12 and len({w.shape for _, w in weights}) == len(weights):
        extend([], weights)
    return found if len(found) == 1 else []
