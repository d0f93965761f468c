"""Measure which activation boundaries of a network pass through which records of a dataset.

The activation boundary of a ReLU neuron is the set of inputs at which its pre-activation is zero. Training
moves activation boundaries onto training samples, where they stay until the end of training. A training
sample at which a ReLU's input is exactly zero is called a kink. Records on many boundaries are therefore
likely members (records of the training set).

Symbols: z_j(x) is the pre-activation of neuron j at record x, where j counts the neurons of all dense
piecewise linear layers. P is the pool of all records, that is, members and non-members together. Neurons with
the same boundary form a bundle.

    s_j   = sqrt(mean over x in P of z_j(x)^2)                  scale of a neuron
    r_j   = |z_j(x)| / s_j                                       distance to its boundary, free of scale
    m_j   = number of neurons k of the layer with |cos(z_j, z_k)| > 0.9999 over P   size of its bundle
    llr(r) = log(1 - pi + a / (r + r0))  if r < R,  else  log(1 - pi),      a = pi / (0.8 log(R / r0))
    T(x)  = sum_j llr(r_j(x)) / m_j                              the statistic: evidence that x is a member
    B(x)  = number of neurons with r_j(x) < 2e-3, where a bundle counts once

llr is the logarithm of a likelihood ratio. If x was not in training, we assume that r has the density 0.8 at
zero, like |N(0, 1)|. If x was in training, then with probability pi training moved r close to zero, to a
density proportional to 1/(r + r0) on [0, R]. This density is nearly uniform in log r, so no tolerance has to
be chosen.

T and B do not change if the weights of a neuron are multiplied by c > 0 and its outgoing weights by 1/c.
Neurons that do not change the output are left out. The scales s_j, the bundle sizes m_j and the choice of
neurons are symmetric functions of the pool. So if the members are exchangeable with held-out records, their
statistics are exchangeable too, and ranks are valid p-values.

Weight decay makes several neurons share a boundary. Without the weights 1 / m_j, each of these neurons would
add evidence, for non-members too. On breast cancer data with weight decay 1e-2, the weights raised the share
of members that the test identifies from 12% to 16%.

Convolutional layers are left out, because every position of every channel has its own boundary. On six small
convolutional networks, the test identified 23% of the members with the dense layer behind the convolutions,
and 11% with all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from residuum.errors import ArchitectureError, DataError

# The three constants PI, R and R0 below are guesses. Their influence is small: changing each by a factor of
# three changed the share of identified training records by -3 to +1 percentage points on 39 networks.
PI = 0.03  # share of neurons whose boundary training moved onto a training record
R = 1e-2  # a neuron carries information about a record if its boundary is at most this far from the record
# Smaller distances from an activation boundary are not exact, because of rounding and the last training
# steps.
R0 = 3e-5
NULL_DENSITY = 0.8  # density of |N(0, 1)| at zero, sqrt(2 / pi)
A = PI / (NULL_DENSITY * math.log(R / R0))
# If the boundary of a neuron is far from a record, the neuron adds this log likelihood ratio to the evidence
# that the record was in the training set.
BACKGROUND = math.log(1 - PI)
# A record counts as lying on the activation boundary of a neuron if its distance is below ON_BOUNDARY.
# Rounding weights to bfloat16 changes distances by 1e-3 (root mean square), so a limit of 1e-3 would be too
# small: an eighth of the identified training records would lie on fewer than two boundaries. With the limit
# 2e-3, 6% of the held-out records lie on two boundaries of a network of width 256.
ON_BOUNDARY = 2e-3
# Two neurons share a boundary if the absolute cosine between their pre-activations on all records exceeds
# PARALLEL. Their normalized pre-activations then differ by at most sqrt(2e-4), which is about the distance R.
PARALLEL = 0.9999
# The membership test ignores neurons whose effect on the output is at most this share of the largest effect
# in their layer. Rounding to float32 hides such a small effect.
NEGLIGIBLE = 1e-7
# A decoy is a copy of a record with noise. In each column, the standard deviation of the noise is DECOY_NOISE
# times the standard deviation of the column.
DECOY_NOISE = 0.1
# Largest number of neurons for which all pairwise cosines are computed, which need half a gigabyte.
MAX_BUNDLED = 8192
# Memory in bytes for the activations of a block of records. The records of a block are processed together.
BLOCK_BYTES = 1 << 27
DIVERGED = "Use a network whose training did not diverge."


@dataclass(frozen=True, eq=False)
class KinkScores:
    """The evidence, for each of n records, that training moved activation boundaries onto the record.

    Attributes:
        statistic: For each record the evidence that it was in the training set, (n,). This is the sum of the
            log likelihood ratios of all neurons.
        boundaries: For each record and each layer the number of boundaries on which the record lies,
            (n, layers).
    """

    statistic: Tensor
    boundaries: Tensor


@dataclass(frozen=True, eq=False)
class Layer:
    """The properties of the h neurons of one layer that the membership test uses.

    Attributes:
        inverse_scale: For each neuron one over the root mean square of its pre-activations, (h,). Zero if the
            statistic ignores the neuron.
        weight: Weight of each neuron in the statistic, (h,): one over the number of neurons that share its
            boundary. Zero if the statistic ignores the neuron.
        parallel: Mask (h, h) of pairs of neurons that share a boundary, with the smaller index first. None
            if every neuron has its own boundary.
    """

    inverse_scale: Tensor
    weight: Tensor
    parallel: Tensor | None


@dataclass(frozen=True, eq=False)
class ActivationBoundaries:
    """The activation boundaries of a network, with the scales of its neurons.

    The scales are measured on a pool of records (records of the training set and other records together).
    """

    module: nn.Module
    layers: tuple[Layer, ...]
    numbers_per_record: int

    @classmethod
    def measure(cls, module: nn.Module, pool: Tensor) -> ActivationBoundaries:
        """Measure the scale of every neuron, its effect on the outputs, and which neurons share a boundary.

        Weights, pre-activations and records must be finite.

        Args:
            module: A network in evaluation mode and in float64, such as ``Network.double_module``.
            pool: Records of the training set and other records together, (n, *shape).

        Returns:
            The boundaries. ``neurons`` is 0 if the network has no dense piecewise linear layer.
        """
        _check_finite(module, pool)
        numbers_per_record = _numbers_per_record(module, pool)
        sums_by_layer: list[_Sums] = []
        for block in _blocks(len(pool), numbers_per_record):
            values_by_layer = _record_layers(module, pool[block], with_effects=True)
            sums_by_layer = sums_by_layer or [_Sums.zeros(z) for z, _ in values_by_layer]
            for layer_sums, (z, effect) in zip(sums_by_layer, values_by_layer, strict=True):
                layer_sums.add(z, effect)
        # The effect of a neuron is its influence on the outputs. If the outputs are saturated, all effects
        # are zero, and no neuron is ignored.
        if not any(layer_sums.effects.any() for layer_sums in sums_by_layer):
            for layer_sums in sums_by_layer:
                layer_sums.effects += 1
        layers = tuple(layer_sums.layer(len(pool)) for layer_sums in sums_by_layer)
        return cls(module, layers, numbers_per_record)

    @property
    def neurons(self) -> int:
        """Number of neurons that the membership test uses."""
        return sum(int((layer.weight > 0).sum()) for layer in self.layers)

    @torch.no_grad()
    def score(self, x: Tensor) -> KinkScores:
        """Score records by their distances from the activation boundaries.

        Args:
            x: Records, (n, *shape).

        Returns:
            For each record the evidence that it was in the training set, and the number of boundaries on
            which it lies.
        """
        statistic, boundaries = [], []
        for block in _blocks(len(x), self.numbers_per_record):
            values_by_layer = _record_layers(self.module, x[block], with_effects=False)
            scores_by_layer = [
                _score_layer(z, layer)
                for (z, _), layer in zip(values_by_layer, self.layers, strict=True)
            ]
            record_count = len(x[block])
            statistic.append(
                sum(
                    (layer_statistic for layer_statistic, _ in scores_by_layer),
                    torch.zeros(record_count, dtype=torch.float64),
                )
            )
            boundary_counts = [
                layer_count
                for (_, layer_count), layer in zip(scores_by_layer, self.layers, strict=True)
                if layer.weight.any()
            ]
            empty_counts = torch.zeros(record_count, 0, dtype=torch.long)
            boundaries.append(torch.stack(boundary_counts, 1) if boundary_counts else empty_counts)
        return KinkScores(torch.cat(statistic), torch.cat(boundaries))


def make_decoys(x: Tensor, deviation: Tensor, generator: torch.Generator) -> Tensor:
    """Return a decoy of every record: a copy with noise, which moves it away from activation boundaries.

    Args:
        x: Records, (n, *shape).
        deviation: Standard deviation of every column, (*shape). Columns with deviation zero do not change.
        generator: Random generator of the noise.

    Returns:
        The decoys (n, *shape) in float64.
    """
    gaussian_noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return x.double() + DECOY_NOISE * deviation.double() * gaussian_noise


@dataclass(eq=False)
class _Sums:
    """Sums over all records for one layer of h neurons with pre-activations z.

    products: sum of z z^T (h, h). If the layer is too wide to compare all pairs of neurons, sum of z^2 (h,).
    effects: sum of squared effects, (h,). The effect of a neuron is the derivative of the network's output in
        the activation of the neuron.
    """

    products: Tensor
    effects: Tensor

    @classmethod
    def zeros(cls, z: Tensor) -> _Sums:
        neuron_count = z.shape[1]
        return cls(
            z.new_zeros(
                (neuron_count, neuron_count) if neuron_count <= MAX_BUNDLED else neuron_count
            ),
            z.new_zeros(neuron_count),
        )

    def add(self, z: Tensor, effect: Tensor) -> None:
        self.products += z.T @ z if self.products.ndim == 2 else z.square().sum(0)
        self.effects += effect.square().sum(0)

    def layer(self, n: int) -> Layer:
        has_products = self.products.ndim == 2
        squared_sums = self.products.diagonal() if has_products else self.products
        root_mean_square = (squared_sums / n).sqrt()
        # If the incoming weights of a neuron are multiplied by c > 0 and its outgoing weights by 1/c, this
        # product does not change.
        scaled_effect = self.effects.sqrt() * root_mean_square
        is_used = scaled_effect > NEGLIGIBLE * scaled_effect.max()
        inverse_scale = torch.where(is_used, 1 / root_mean_square.where(is_used, 1), 0)
        if not has_products:
            return Layer(inverse_scale, is_used.double(), None)
        inverse_norm = squared_sums.rsqrt().where(is_used, 0)
        parallel = (inverse_norm[:, None] * self.products * inverse_norm).abs() > PARALLEL
        parallel.fill_diagonal_(False)
        neuron_weight = torch.where(is_used, 1 / (1 + parallel.sum(1)).double(), 0)
        return Layer(inverse_scale, neuron_weight, parallel.triu() if parallel.any() else None)


def _score_layer(z: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """Return the evidence that one layer gives for each record that training used it.

    Also return on how many activation boundaries each record lies.
    """
    distance = z.abs() * layer.inverse_scale
    # If all inputs of the layer's activation functions are zero for a record, the record does not count as
    # lying on activation boundaries.
    is_silent = (z == 0).all(1)
    is_close = (distance < R) & (layer.weight > 0) & ~is_silent[:, None]
    record, neuron = is_close.nonzero(as_tuple=True)
    evidence = torch.log(1 - PI + A / (distance[record, neuron] + R0)) - BACKGROUND
    statistic = z.new_full((len(z),), BACKGROUND * float(layer.weight.sum()))
    statistic.index_add_(0, record, evidence * layer.weight[neuron])
    is_on_boundary = is_close & (distance < ON_BOUNDARY)
    if layer.parallel is not None:  # a boundary that several neurons share counts once
        is_on_boundary &= is_on_boundary.double() @ layer.parallel.double() == 0
    return statistic.cpu(), is_on_boundary.sum(1).cpu()


class _Recorder(TorchFunctionMode):
    """A context that records the inputs of all piecewise linear activations during a forward pass.

    layers: for each activation a pair of tensors (n, h). The first tensor is the input of the activation
        minus the point where the activation bends. The second tensor is zero and is added to the output of
        the activation. The derivative of the network's output in the second tensor is the effect of a neuron.
    numbers: total number of elements of the tensors that the forward pass computed.
    """

    def __init__(self, n: int, with_effects: bool) -> None:
        super().__init__()
        self.n, self.with_effects = n, with_effects
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.numbers = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        function_input = args[0] if args else kwargs.get("input")
        bend_points = _bends(getattr(func, "__name__", ""), args, kwargs)
        if (
            not bend_points
            or not isinstance(function_input, Tensor)
            or not self._counts(function_input)
        ):
            output = func(*args, **kwargs)
            self.numbers += output.numel() if isinstance(output, Tensor) else 0
            return output
        z_before, z_copy = function_input.detach().clone(), function_input.clone()
        args, kwargs = (z_copy, *args[1:]), {k: v for k, v in kwargs.items() if k != "input"}
        output = func(*args, **kwargs)
        is_in_place = output is z_copy
        zero_offset = torch.zeros_like(output, requires_grad=self.with_effects)
        if self.with_effects:
            output = output + zero_offset
        # Autograd saved the copy of the input, so an in-place function may overwrite the input itself.
        if is_in_place:
            output = function_input.copy_(output)
        self.layers += [
            (z_before - bend_point if bend_point else z_before, zero_offset)
            for bend_point in bend_points
        ]
        # Later computations need memory for about six more tensors of the size of the input z.
        self.numbers += 6 * function_input.numel()
        return output

    def _counts(self, z: Tensor) -> bool:
        return z.is_floating_point() and z.ndim == 2 and len(z) == self.n


def _bends(called: str, args: Any, kwargs: dict[str, Any]) -> tuple[float, ...]:
    """Return the inputs at which a piecewise linear function bends, () for any other function."""
    function_name = called.partition(".")[0].removesuffix("_")
    if function_name in ("relu", "leaky_relu", "prelu", "rrelu"):
        return (0.0,)
    if function_name == "relu6":
        return (0.0, 6.0)
    if function_name == "hardtanh":
        minimum = _argument(args, kwargs, 1, "min_val", -1.0)
        return (minimum, _argument(args, kwargs, 2, "max_val", 1.0))
    if function_name in ("clamp", "clamp_min"):  # a clamp with the minimum 0 is a ReLU
        minimum, maximum = _argument(args, kwargs, 1, "min"), _argument(args, kwargs, 2, "max")
        return (
            (0.0,) if isinstance(minimum, int | float) and minimum == 0 and maximum is None else ()
        )
    return ()


def _argument(args: Any, kwargs: dict[str, Any], index: int, name: str, default: Any = None) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def _record_layers(module: nn.Module, x: Tensor, with_effects: bool) -> list[tuple[Tensor, Tensor]]:
    """Record for every layer the pre-activations (n, h) of its neurons and their effects on the output."""
    # If ``with_effects`` is True, the outputs are combined to one number with random coefficients. The effect
    # of a neuron is the derivative of this number in the neuron's activation. Otherwise all effects are zero.
    recorder = _Recorder(len(x), with_effects)
    # Detached weights save time and memory, because no derivatives in the weights are computed.
    detached_weights = {name: p.detach() for name, p in module.named_parameters()}
    with torch.set_grad_enabled(with_effects), recorder:
        outputs = functional_call(module, detached_weights, (_as_input(module, x),))
    offsets = [offset for _, offset in recorder.layers]
    effects: list[Tensor | None] = [None] * len(offsets)
    if with_effects and outputs.requires_grad and offsets:
        generator = torch.Generator().manual_seed(0)
        coefficients = torch.randn(outputs[0].numel(), generator=generator, dtype=torch.float64)
        combined_output = (outputs.flatten(1) @ coefficients.to(outputs)).sum()
        effects = list(torch.autograd.grad(combined_output, offsets, allow_unused=True))
    values_by_layer = []
    for (z, _), effect in zip(recorder.layers, effects, strict=True):
        if not z.isfinite().all():
            raise ArchitectureError(
                "The inputs of all activation functions of a network must be finite; some inputs are NaN "
                "or infinite.",
                DIVERGED,
            )
        values_by_layer.append((z.double(), torch.zeros_like(z) if effect is None else effect))
    return values_by_layer


def _as_input(module: nn.Module, x: Tensor) -> Tensor:
    parameter = next(module.parameters())
    return x.to(parameter.device, parameter.dtype)


def _check_finite(module: nn.Module, x: Tensor) -> None:
    for name, weight in module.named_parameters():
        if not weight.isfinite().all():
            raise ArchitectureError(
                f"All weights must be finite numbers; some weights of {name!r} are NaN or infinite.",
                DIVERGED,
            )
    if not x.isfinite().all():
        raise DataError(
            "All values of the records must be finite numbers; some values are NaN or infinite.",
            "Remove or impute the missing values.",
        )


@torch.no_grad()
def _numbers_per_record(module: nn.Module, x: Tensor) -> int:
    """Estimate how many numbers must be in memory for a forward and a backward pass of one record."""
    with _Recorder(1, with_effects=False) as recorder:
        module(_as_input(module, x[:1]))
    return x[0].numel() + 2 * recorder.numbers + 1


def _blocks(count: int, numbers_per_record: int) -> Iterator[slice]:
    records_per_block = max(1, BLOCK_BYTES // (8 * numbers_per_record))
    return (
        slice(start, min(start + records_per_block, count))
        for start in range(0, count, records_per_block)
    )
