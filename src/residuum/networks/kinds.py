"""The kinds of networks, such as MLPs, as PyTorch modules and as strings that describe them.

mlp:784-1000-1000-1            widths; bias in the first layer only
mlp:784-100-10,bias=hidden     bias: first | hidden | all | none; activation=relu | gelu | tanh | ...
convnet:1x8x8-16-32-1          input shape, channels, outputs
polynomial:12-36-1,coefficients=0/0/0/1     sum_j a_j sigma(w_j . x) for sigma(z) = c_0 + c_1 z + ...
module:1x8x8-10,class=Net      a live module (a Python object) of another kind: input shape, outputs

To add a kind, add an instance of a :class:`Kind` subclass to ``KINDS``. No other code has to change. Code
that works only for chains of dense layers checks the module itself, see :func:`dense_chain`.

A kind can recognize its networks from the tensors of a file. To do so, it finds out which bias belongs to
which weight, and the order of the layers. The names of the tensors show which bias belongs to which weight.
The order of the tensors does not show this, because files store either ``conv1.bias`` or ``conv1.weight``
first.
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
    UNSUPPORTED_ADVICE,
    Activation,
    Polynomial,
    ReLU,
    canonical,
    is_unsupported,
)

EXAMPLE = (
    "Example: --arch mlp:784-1000-1000-1, convnet:1x8x8-16-32-1 or "
    "polynomial:12-36-1,coefficients=0/0/0/1."
)
# An architecture string can come from an untrusted file, so the network that it describes is limited.
MAX_PARAMETERS = 10**9
MAX_LENGTH = 2000  # largest length of an architecture string in characters
# Notes about assumptions for weights from a file without metadata. They are saved with the weights, where a
# text has at most metadata.MAX_TEXT characters.
ASSUMED_RELU = (
    "the activation is assumed to be ReLU, because weights do not show it. If it differs, this result is "
    "invalid: pass --arch ...,activation=gelu (or silu, tanh, leaky_relu, ...)"
)
ASSUMED_STRIDES = (
    "strides are assumed to be 2, without pooling. A network with pooling can have the same shapes. "
    "For such a network this result is invalid"
)
Named = tuple[str, Tensor]
BIAS_RULES = {
    # With biases only in the first layer, scaling all parameters of a ReLU network by a factor scales its
    # outputs by a power of this factor.
    "first": lambda layer, depth: layer == 0,
    "hidden": lambda layer, depth: layer < depth - 1,
    "all": lambda layer, depth: True,
    "none": lambda layer, depth: False,
}


def bias_rule(has_bias: Sequence[bool]) -> str:
    """Return the name of the rule that describes which layers of a network have biases.

    Args:
        has_bias: Whether each layer has a bias, first layer first.

    Returns:
        A key of ``BIAS_RULES``, such as "first" if only the first layer has a bias.

    Raises:
        ArchitectureError: If no rule fits.
    """
    for rule, applies in BIAS_RULES.items():
        if list(has_bias) == [applies(i, len(has_bias)) for i in range(len(has_bias))]:
            return rule
    raise ArchitectureError(
        f"The layers that have biases must follow one of the rules {', '.join(BIAS_RULES)}; this network "
        f"has biases in the layers {[i for i, is_biased in enumerate(has_bias) if is_biased]} of "
        f"{len(has_bias)}.",
        "Train with biases in the first layer, in all but the last, in all, or in none.",
    )


@dataclass(frozen=True)
class Trace:
    """The intermediate values of one forward pass of an MLP.

    Attributes:
        inputs: The inputs of every layer, (n, inputs of the layer) for n samples.
        pre: The pre-activations of every layer, (n, neurons of the layer).
    """

    inputs: list[Tensor]
    pre: list[Tensor]

    @property
    def output(self) -> Tensor:
        """The C outputs of the network for n samples, (n, C)."""
        return self.pre[-1]


class MLP(nn.Module):
    """A fully connected network (multilayer perceptron).

    With ReLU and a bias in the first layer only, the network is homogeneous in its parameters.

    Args:
        widths: Number of inputs, number of neurons of every hidden layer, and number of outputs.
        bias: A key of ``BIAS_RULES``.
        activation: The activation, ReLU by default.
    """

    def __init__(
        self, widths: tuple[int, ...], bias: str = "first", activation: nn.Module | None = None
    ) -> None:
        super().__init__()
        depth = len(widths) - 1
        if depth < 1 or min(widths) < 1:
            raise ArchitectureError(
                f"The widths of an MLP must be positive, and at least an input width and an output width "
                f"are needed; got "
                f"{widths}.",
                "Example: mlp:784-1000-1000-1.",
            )
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=BIAS_RULES[bias](i, depth))
            for i, (a, b) in enumerate(itertools.pairwise(widths))
        )
        self.activation = cast(Activation, ReLU() if activation is None else activation)

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layers, first layer first."""
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    @property
    def hidden(self) -> int:
        """Number of hidden layers."""
        return len(self.layers) - 1

    def forward(self, x: Tensor) -> Tensor:
        """Return the C outputs (n, C) for n inputs x (n, ...)."""
        return self.trace(x).output

    def trace(self, x: Tensor) -> Trace:
        """Run a forward pass and return every layer's input and pre-activation."""
        inputs, pre = [x.flatten(1)], []
        for layer in self.layers:
            pre.append(layer(inputs[-1]))
            inputs.append(self.activation(pre[-1]))
        return Trace(inputs[:-1], pre)

    def signals(self, trace: Trace, covectors: Tensor, index: Tensor | None = None) -> list[Tensor]:
        """Return the backward signals of every layer: derivatives of weighted outputs in its pre-activations.

        A covector u_r has one coefficient for each output. Let x_r be the sample of row r, and Phi(x_r) the
        outputs for this sample. The backward signal of a layer is the derivative of <u_r, Phi(x_r)> in the
        layer's pre-activations. The gradient of <u_r, Phi(x_r)> in the layer's weight is the outer product of
        the backward signal and the layer's input.

        Args:
            trace: The values of the forward pass.
            covectors: The covectors u_r, (R, C) for C outputs.
            index: For each row r the index of the sample x_r, (R,). If None, row r belongs to sample r.

        Returns:
            One tensor (R, neurons of the layer) per layer, first layer first.
        """
        backward_signals = [covectors]
        for layer in range(len(self.layers) - 1, 0, -1):
            weight = self.linears[layer].weight
            slopes = self.activation.derivative(trace.pre[layer - 1])
            backward_signals.append(
                backward_signals[-1] @ weight * (slopes if index is None else slopes[index])
            )
        return backward_signals[::-1]


def dense_chain(model: nn.Module) -> MLP | None:
    """Return the network if it is a chain of dense layers such as :class:`MLP`, else None.

    A chain of dense layers has ``linears``, ``activation``, ``trace`` and ``signals``. Code that works only
    for such networks calls this function instead of testing for a class.

    Args:
        model: Any module.

    Returns:
        ``model`` itself, or None.
    """
    has_methods = all(hasattr(type(model), name) for name in ("linears", "trace", "signals"))
    has_derivative = hasattr(getattr(model, "activation", None), "derivative")
    return cast(MLP, model) if has_methods and has_derivative else None


class ConvNet(nn.Module):
    """A network of 3x3 convolutions with stride 2, followed by one linear layer.

    Args:
        input_shape: Shape of one image, (channels, height, width).
        channels: Number of output channels of every convolution.
        outputs: Number of outputs.
        bias: A key of ``BIAS_RULES``.
        activation: The activation, ReLU by default.
    """

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
        channel_counts = (input_shape[0], *channels)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1, bias=BIAS_RULES[bias](i, depth))
            for i, (a, b) in enumerate(itertools.pairwise(channel_counts))
        )
        height, width = input_shape[1:]
        for _ in channels:
            height, width = math.ceil(height / 2), math.ceil(width / 2)
        head_has_bias = BIAS_RULES[bias](depth - 1, depth)
        self.head = nn.Linear(channels[-1] * height * width, outputs, bias=head_has_bias)
        self.activation = activation if activation is not None else ReLU()
        self.input_shape = input_shape

    def forward(self, x: Tensor) -> Tensor:
        """Return the C outputs (n, C) for n images x, which may be flattened."""
        x = x.reshape(len(x), *self.input_shape)
        for convolution in self.convolutions:
            x = self.activation(convolution(x))
        return self.head(x.flatten(1))


class PolynomialNetwork(nn.Module):
    """The network Phi(x) = sum_j a_j sigma(w_j . x) without biases (Shen et al. 2026, section 4).

    The neurons j of the hidden layer have incoming weights w_j and outgoing weights a_j.

    Args:
        inputs: Number of input values.
        width: Number of neurons.
        activation: The activation sigma.
    """

    hidden = 1  # number of hidden layers

    def __init__(self, inputs: int, width: int, activation: Activation) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, inputs) / inputs**0.5)
        self.coefficient = nn.Parameter(torch.randn(width) / width**0.5)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, 1) for n inputs x (n, ...)."""
        return (self.activation(x.flatten(1) @ self.weight.T) @ self.coefficient)[:, None]


@dataclass(frozen=True)
class Architecture:
    """The architecture of a network, parsed from a string such as ``mlp:784-1000-1``.

    Attributes:
        kind: A key of ``KINDS``.
        widths: Widths of the layers. If ``image_shape`` is None, the first element is the number of inputs.
        image_shape: Shape of one input, None for a kind whose string starts with the number of inputs.
        options: Values of the options of the string, by option name.
    """

    kind: str
    widths: tuple[int, ...]
    image_shape: tuple[int, ...] | None = None
    options: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", {**KINDS[self.kind].options, **self.options})

    @classmethod
    def parse(cls, text: str) -> Architecture:
        """Parse an architecture string.

        Args:
            text: Architecture string, such as ``mlp:784-1000-1000-1``.

        Returns:
            The architecture in its canonical form.

        Raises:
            ArchitectureError: If the string is malformed.
        """
        text = text.strip()
        if len(text) > MAX_LENGTH:
            raise ArchitectureError(
                f"A string that describes an architecture must have at most {MAX_LENGTH} characters; got "
                f"{len(text)}.",
                EXAMPLE,
            )
        string_match = re.fullmatch(
            r"(\w+):([0-9]+(?:x[0-9]+)*(?:-[0-9]+)+)((?:,\w+=[^,]+)*)", text
        )
        if string_match is None:
            raise ArchitectureError(
                "A string that describes an architecture must have the form "
                "kind:width-width-...[,option=value]; got "
                f"{text!r}.",
                EXAMPLE,
            )
        name, sizes, settings = string_match.groups()
        if name not in KINDS:
            raise ArchitectureError(
                f"A string that describes an architecture must begin with a known kind of network, such "
                f"as mlp; got {name!r}.",
                f"{did_you_mean(name, tuple(KINDS))} {EXAMPLE}",
            )
        kind = KINDS[name]
        options = dict(setting.split("=", 1) for setting in settings.split(",") if setting)
        first, *last = sizes.split("-")
        shape, widths = tuple(map(int, first.split("x"))), tuple(map(int, last))
        if not all(0 < size <= MAX_PARAMETERS for size in shape + widths):
            raise ArchitectureError(
                f"In a string that describes an architecture, the widths must be between 1 and "
                f"{MAX_PARAMETERS}; got "
                f"{text[:80]!r}.",
                EXAMPLE,
            )
        if kind.rank not in (None, len(shape)):
            expected_start = "one input width" if kind.rank == 1 else "the input shape CxHxW"
            raise ArchitectureError(
                f"In a string that describes an architecture, {name + ':'!r} must be followed by "
                f"{expected_start}; got {first!r}.",
                f"Example: --arch {kind.example}.",
            )
        for option in options:
            require_known(
                option, kind.options, f"The architecture {name} has no option", ArchitectureError
            )
        if kind.rank == 1:
            return kind.check(cls(name, (*shape, *widths), None, options))
        return kind.check(cls(name, widths, shape, options))

    def __str__(self) -> str:
        widths_text = "-".join(map(str, self.widths))
        if self.image_shape is not None:
            widths_text = "x".join(map(str, self.image_shape)) + "-" + widths_text
        defaults = KINDS[self.kind].options
        option_texts = [
            f",{n}={value}" for n, value in self.options.items() if value != defaults[n]
        ]
        return f"{self.kind}:{widths_text}" + "".join(option_texts)

    @property
    def inputs(self) -> int:
        """Number of input values."""
        return self.widths[0] if self.image_shape is None else math.prod(self.image_shape)

    @property
    def outputs(self) -> int:
        """Number of output values."""
        return self.widths[-1]

    def build(self) -> nn.Module:
        """Return a new network with PyTorch's default initialization."""
        return KINDS[self.kind].build(self)


class Kind:
    """Base class of a kind of network, such as MLPs. Subclass it and add an instance to ``KINDS``.

    Attributes:
        module: Class of the networks.
        example: Example of an architecture string.
        rank: How many numbers describe the input at the start of an architecture string: 1 for an input width
            such as 784, 3 for an input shape such as 1x28x28, None for any number.
        options: Options of the string with their default values.
    """

    module: type[nn.Module] | None = None
    example: str
    rank: int | None = 1
    options: Mapping[str, str] = {}

    def check(self, arch: Architecture) -> Architecture:
        """Return the architecture in its canonical form, or raise ``ArchitectureError`` if it is invalid."""
        return arch

    def build(self, arch: Architecture) -> nn.Module:
        """Return a new network with PyTorch's default initialization."""
        raise NotImplementedError

    def describe(self, model: Any) -> Architecture | None:
        """Return the architecture of the module ``model``, or None if no architecture string describes it."""
        return None

    def recognize(self, state: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, str]] | None:
        """Return the architecture of this kind that fits the tensors of a file, or None.

        A kind returns None if several of its architectures have tensors with the same shapes. Users have to
        pass ``--arch`` for files of such a kind.

        Args:
            state: Tensors by name.

        Returns:
            The architecture and the name in ``state`` of each parameter of the network, or None.
        """
        return None

    def assumptions(self, arch: Architecture) -> tuple[str, ...]:
        """Return sentences about assumed properties of a network, which its weights do not show."""
        return ()


class _Layered(Kind):
    """A kind of network with a rule for biases, and one activation function for all hidden layers."""

    options: Mapping[str, str] = {"bias": "first", "activation": "relu"}

    def check(self, arch: Architecture) -> Architecture:
        """Return the architecture with the canonical name of its activation.

        Args:
            arch: The parsed architecture.

        Returns:
            The architecture in its canonical form.

        Raises:
            ArchitectureError: If the bias rule or the activation is not supported.
        """
        bias, activation = arch.options["bias"], canonical(arch.options["activation"])
        if is_unsupported(activation):
            raise ArchitectureError(
                f"In a string that describes an architecture, the option 'activation' must name a "
                f"supported activation function; got "
                f"{activation!r}.",
                UNSUPPORTED_ADVICE,
            )
        require_known(bias, BIAS_RULES, "No bias rule", ArchitectureError)
        require_known(activation, ACTIVATIONS, "No activation", ArchitectureError)
        return replace(arch, options={**arch.options, "activation": activation})

    def assumptions(self, arch: Architecture) -> tuple[str, ...]:
        """State the assumption that the activation function is ReLU, if there is a hidden layer."""
        return (ASSUMED_RELU,) if arch.image_shape or len(arch.widths) > 2 else ()

    def _options(self, layers: list[Any], activation: nn.Module) -> dict[str, str]:
        """Describe a module's bias rule and activation function as options of an architecture string."""
        names: dict[type, str] = {
            kind: activation_name for activation_name, kind in ACTIVATIONS.items()
        }
        activation_name = names.get(type(activation))
        if activation_name is None:
            raise ArchitectureError(
                "The network must have an activation function that residuum supports; got "
                f"{type(activation).__name__!r}.",
                UNSUPPORTED_ADVICE,
            )
        return {
            "bias": bias_rule([layer.bias is not None for layer in layers]),
            "activation": activation_name,
        }


class _MLP(_Layered):
    module, example = MLP, "mlp:784-1000-1000-1"

    def build(self, arch: Architecture) -> nn.Module:
        parameter_count = sum(a * b for a, b in itertools.pairwise(arch.widths))
        if parameter_count > MAX_PARAMETERS:
            raise ArchitectureError(
                f"A network must have at most {MAX_PARAMETERS} parameters; {arch} has {parameter_count}.",
                "Reduce the widths.",
            )
        return MLP(arch.widths, arch.options["bias"], ACTIVATIONS[arch.options["activation"]]())

    def describe(self, model: MLP) -> Architecture | None:
        options = self._options(model.linears, model.activation)
        widths = (model.linears[0].in_features, *(len(layer.weight) for layer in model.linears))
        return Architecture("mlp", widths, None, options)

    def recognize(self, state: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, str]] | None:
        layer_names = find_chain(state)
        if layer_names is None:
            return None
        weights = [state[names[0]] for names in layer_names]
        bias = bias_rule([len(names) == 2 for names in layer_names])
        tensor_name_by_parameter = {
            f"layers.{i}.{suffix}": tensor_name
            for i, names in enumerate(layer_names)
            for suffix, tensor_name in zip(("weight", "bias"), names, strict=False)
        }
        widths = (weights[0].shape[1], *map(len, weights))
        return Architecture("mlp", widths, None, {"bias": bias}), tensor_name_by_parameter


class _ConvNet(_Layered):
    module, example, rank = ConvNet, "convnet:1x8x8-16-32-1", 3

    def check(self, arch: Architecture) -> Architecture:
        if len(arch.widths) < 2:
            raise ArchitectureError(
                f"A convolutional network must have at least one convolution before its outputs; got the "
                f"widths {arch.widths}.",
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

    def assumptions(self, arch: Architecture) -> tuple[str, ...]:
        return (*super().assumptions(arch), ASSUMED_STRIDES)


class _Polynomial(Kind):
    module, example = PolynomialNetwork, "polynomial:12-36-1,coefficients=0/0/0/1"
    # The text form of an architecture omits options with their default value. No network has the value "",
    # so the coefficients are always written.
    options: Mapping[str, str] = {"coefficients": ""}

    def check(self, arch: Architecture) -> Architecture:
        if len(arch.widths) != 3 or arch.widths[2] != 1:
            raise ArchitectureError(
                "A polynomial network must have one hidden layer and one output, as in "
                f"polynomial:64-36-1; got the widths {arch.widths[1:]}.",
                f"Example: --arch {self.example}.",
            )
        return replace(arch, options={"coefficients": _coefficients_text(self.coefficients(arch))})

    def coefficients(self, arch: Architecture) -> tuple[float, ...]:
        """Return the coefficients of the polynomial, constant term first, or raise an error."""
        coefficients_text = arch.options["coefficients"] or "0/0/0/1"
        try:
            coefficient_values = tuple(float(number) for number in coefficients_text.split("/"))
        except ValueError:
            coefficient_values = (math.nan,)
        if not all(map(math.isfinite, coefficient_values)):
            raise ArchitectureError(
                f"The option 'coefficients' of a polynomial network must be finite numbers c0/c1/...; got "
                f"{coefficients_text!r}.",
                "For z^3, pass coefficients=0/0/0/1.",
            )
        return coefficient_values

    def build(self, arch: Architecture) -> nn.Module:
        inputs, width, _ = arch.widths
        return PolynomialNetwork(inputs, width, Polynomial(self.coefficients(arch)))

    def describe(self, model: PolynomialNetwork) -> Architecture | None:
        if not isinstance(model.activation, Polynomial):
            return None
        width, inputs = model.weight.shape
        options = {"coefficients": _coefficients_text(model.activation.coefficients)}
        return Architecture("polynomial", (inputs, width, 1), None, options)


class _LiveModule(Kind):
    example, rank = "module:1x8x8-10,class=Net", None
    options: Mapping[str, str] = {"class": ""}

    def build(self, arch: Architecture) -> nn.Module:
        raise ArchitectureError(
            "To build a network from a file, its architecture must be known; the file holds the weights of "
            f"a PyTorch module ({arch}), but not its code.",
            "Load the weights into the module, and pass the module to residuum.audit or residuum.attack.",
        )


def _coefficients_text(coefficients: tuple[float, ...]) -> str:
    """Return the coefficients of a polynomial as text, such as "0/0/0/1".

    Each coefficient has the shortest form that parses to the same number.
    """
    return "/".join(str(int(c)) if c == int(c) and abs(c) < 1e15 else repr(c) for c in coefficients)


BUILT_IN = {
    "mlp": _MLP(),
    "convnet": _ConvNet(),
    "polynomial": _Polynomial(),
    "module": _LiveModule(),
}
KINDS: dict[str, Kind] = plugins.Table("network kind", BUILT_IN)


def recognize_by_kind(state: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, str]] | None:
    """Return the architecture of the first network kind that recognizes the tensors, with parameter names.

    If a plug-in kind raises an exception, the kind is skipped and the exception is recorded.

    Args:
        state: Tensors by name.

    Returns:
        The architecture and the name in ``state`` of each parameter of the network, or None.
    """
    for name, kind in KINDS.items():
        try:
            if (match := kind.recognize(state)) is not None:
                arch, names = match
                return arch, names
        except Exception as problem:
            if type(kind).__module__.startswith("residuum."):
                raise
            plugins.faults[name] = plugins.describe(problem)
    return None


def kind_of(model: nn.Module) -> Kind | None:
    """Return the network kind whose class is exactly the class of ``model``, or None."""
    return next((kind for kind in KINDS.values() if type(model) is kind.module), None)


def split_vectors(state: Mapping[str, Tensor]) -> tuple[list[Named], list[Named]]:
    """Split a state dict into weights (two or more dimensions) and vectors, such as biases."""
    named_weights = [(name, t) for name, t in state.items() if t.ndim >= 2]
    return named_weights, [(name, t) for name, t in state.items() if t.ndim < 2]


def likely_orders(weights: list[Named]) -> tuple[list[Named], list[Named]]:
    """Return two likely orders of the layers' weights: by name, convolutions first, and as in the file."""
    return sorted(weights, key=lambda named: (-named[1].ndim, natural_key(named[0]))), weights


def attach_vectors(order: list[Named], vectors: list[Named]) -> list[tuple[str, ...]] | None:
    """Assign every bias to the weight of its layer, by its name or else by its size.

    Args:
        order: Names and weights in the order of the layers.
        vectors: Names and values of the biases.

    Returns:
        For every layer the names of its weight and its bias. None if a bias fits no layer.
    """
    layer_names: list[tuple[str, ...]] = []
    unassigned_biases = dict(vectors)
    for i, (name, weight) in enumerate(order):
        name_prefix = name.removesuffix("weight")
        biases_of_right_size = [
            n for n, b in unassigned_biases.items() if b.shape == weight.shape[:1]
        ]
        biases_of_same_name = [
            n for n in biases_of_right_size if name_prefix != name and n == name_prefix + "bias"
        ]
        # If no bias has the name of this layer, the bias is searched by its size. If some layers have no
        # bias, a bias of this size could belong to another layer. So the search by size is only done if every
        # layer has a bias, or for a single bias, which is assumed to belong to the first layer.
        may_use_size = len(vectors) == len(order) or (len(vectors) == 1 and i == 0)
        biases_by_size = biases_of_right_size if may_use_size else []
        assigned_biases = biases_of_same_name or sorted(biases_by_size, key=natural_key)[:1]
        for vector in assigned_biases:
            del unassigned_biases[vector]
        layer_names.append((name, *assigned_biases))
    return None if unassigned_biases else layer_names


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key for names with numbers, by which layer10 comes after layer2."""
    digits_and_text = re.split(r"(\d+)", name)
    return [
        (0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in digits_and_text
    ]


def find_chain(state: Mapping[str, Tensor]) -> list[tuple[str, ...]] | None:
    """Find the layers of an MLP from the shapes of its tensors.

    Weights form a chain if every layer has as many inputs as the layer before it has outputs. Layer names
    differ between projects, and safetensors files lose the order of the tensors. So this function first tries
    the order of the names, then the order of the file, and then all other orders. If several of the other
    orders form a chain, the function does not choose one of them and returns None.

    Args:
        state: Tensors by name.

    Returns:
        For every layer the names of its weight and its bias. None if the tensors form no chain.
    """
    weights, vectors = split_vectors(state)
    if weights and all(w.ndim == 2 for _, w in weights):
        for order in (*likely_orders(weights), *_find_unique_chain(weights)):
            layer_names = attach_vectors(order, vectors) if _is_chain(order) else None
            if layer_names is not None:
                return layer_names
    return None


def _is_chain(order: Iterable[Named]) -> bool:
    shapes = [w.shape for _, w in order]
    return all(a[0] == b[1] for a, b in itertools.pairwise(shapes))


def _find_unique_chain(weights: list[Named], limit: int = 2) -> list[list[Named]]:
    """Return the only order in which the weights form a chain of layers, or [] if there is not exactly one.

    Weights form a chain if every layer has as many inputs as the layer before it has outputs.
    """
    chains: list[list[Named]] = []

    def extend(chain: list[Named], remaining: list[Named]) -> None:
        if len(chains) >= limit:
            return
        if not remaining:
            chains.append(chain)
        for i, candidate in enumerate(remaining):
            if not chain or chain[-1][1].shape[0] == candidate[1].shape[1]:
                extend([*chain, candidate], remaining[:i] + remaining[i + 1 :])

    # The order of the layers is found from the shapes of their weights. Two weights of the same shape could
    # be swapped, so the order would not be unique.
    if len(weights) <= 12 and len({w.shape for _, w in weights}) == len(weights):
        extend([], weights)
    return chains if len(chains) == 1 else []
