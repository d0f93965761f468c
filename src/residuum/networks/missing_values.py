"""Read a missing value of a training record from the activation boundaries of a network.

The activation boundary of a neuron is the set of inputs at which its pre-activation is zero. Training moves
boundaries onto training records (:mod:`.kinks`). Suppose that an attacker knows all columns of a training
record except column c. If the value v of column c varies, the record moves along a line. Each neuron j
crosses zero on this line at certain values v_j. By chance these crossings are spread out. If several of them
agree, their common value is probably the true value.

Symbols: x(v) is the record with the value v in column c. z_j is the pre-activation of neuron j, s_j its root
mean square over a pool of records, and m_j the number of neurons that share its boundary. The likelihood
ratio llr and its constants are those of :mod:`.kinks`.

    g_j     = |d z_j(x(v)) / dv| / s_j at v_j               slope of neuron j at its crossing
    S(v)    = sum_j llr(g_j |v - v_j|) / m_j                 evidence for the value v
    v*      = argmax of S over all crossings v_j             the inferred value
    T       = S(v*) - log(exp(S_0) + sum of exp(S(v_j)) over crossings with |v_j - v*| > delta)

T compares the best value with all values that differ from it by more than delta. S_0 = h log(1 - pi) + log h
stands for values without a crossing, where h is the sum of all 1 / m_j.

The first layer has one crossing per neuron: v_j = -(z_j without column c) / w_jc. A pre-activation of a
deeper layer is linear between the crossings of the layers below, so its zeros follow exactly from its values
at these crossings.

For a column with few possible values, such as a binary column or a group of one-hot columns, S is computed
at every possible value, and T compares the best value with all other values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from residuum.errors import ArchitectureError
from residuum.networks.kinks import BACKGROUND, PI, R0, A, ActivationBoundaries, R
from residuum.networks.network import Network

# A crossing is compared with this number of crossings on either side. In the networks that we measured, no
# more crossings were close to each other, except those of neurons that do not depend on the column.
NEIGHBORS = 12
# Inferred values that differ by at most this share of the column's standard deviation count as equal.
EQUAL_VALUES = 0.02
# Largest number of values in a tensor. A block of cells is processed together.
MAX_BLOCK = 1 << 24
NO_EVIDENCE = -math.inf  # statistic of a cell on whose line no neuron crosses zero


class HiddenLayer(NamedTuple):
    """A hidden layer with h neurons and d inputs, in float64.

    Attributes:
        weight: Weights (h, d).
        bias: Biases (h,).
        inverse_scale: One over the root mean square of each pre-activation (h,), zero for unused neurons.
        share: One over the number of neurons with the same boundary (h,), zero for unused neurons.
    """

    weight: Tensor
    bias: Tensor
    inverse_scale: Tensor
    share: Tensor


class Crossings(NamedTuple):
    """Values at which neurons cross zero, for each of n cells.

    The K values of a cell are sorted. Cells with fewer crossings are padded with infinity.

    Attributes:
        value: The values (n, K).
        slope: Slope of the scaled pre-activation at the crossing, (n, K).
        share: Weight of the neuron in the evidence, (n, K).
    """

    value: Tensor
    slope: Tensor
    share: Tensor


class Evidence(NamedTuple):
    """What the boundaries say about a missing value, for each of n cells.

    Attributes:
        value: The inferred value (n,), NaN without any crossing. For a choice, the index of the choice.
        statistic: The evidence T for this value (n,).
    """

    value: Tensor
    statistic: Tensor


@dataclass(frozen=True, eq=False)
class RecordLines:
    """The hidden layers of a dense piecewise linear network, for inference of missing values.

    Attributes:
        layers: The hidden layers, first layer first.
        negative_slope: Slope of the activation for negative inputs, zero for ReLU.
    """

    layers: tuple[HiddenLayer, ...]
    negative_slope: float

    @classmethod
    def measure(cls, network: Network, pool: Tensor) -> RecordLines:
        """Read the hidden layers of a network, and measure the scales of their neurons on a pool of records.

        Args:
            network: A chain of dense layers with a piecewise linear activation.
            pool: Records (n, d) of the same kind as the training records.

        Returns:
            The hidden layers with their scales.

        Raises:
            ArchitectureError: If the network has another form, or no neuron depends on the records.
        """
        chain = network.chain
        boundaries = ActivationBoundaries.measure(network.double_module, pool.double())
        if chain is None or chain.hidden < 1 or len(boundaries.layers) < chain.hidden:
            raise ArchitectureError(
                "Missing values can be inferred from a chain of dense layers with ReLU or LeakyReLU; this "
                f"network is {network.arch[:80]}.",
                "Use the test of membership by losses for this network.",
            )
        if not boundaries.neurons:
            raise ArchitectureError(
                "Missing values can be inferred if neurons depend on the records; no neuron does.",
                "Check that the records are scaled as in the training.",
            )
        layers = []
        # The outputs are not hidden neurons, so the last layer has no partner in this loop.
        for linear, layer in zip(chain.linears[:-1], boundaries.layers, strict=False):
            weight = linear.weight.detach().double()
            bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()
            layers.append(HiddenLayer(weight, bias.double(), layer.inverse_scale, layer.weight))
        minus_one = torch.tensor([-1.0], dtype=torch.float64)
        return cls(tuple(layers), -float(chain.activation(minus_one)))

    @property
    def neurons(self) -> float:
        """Number of neurons, where neurons with the same boundary count as one."""
        return sum(float(layer.share.sum()) for layer in self.layers)

    def infer_values(
        self,
        x: Tensor,
        low: Tensor,
        high: Tensor,
        tolerance: Tensor,
        columns: Tensor | None = None,
    ) -> Evidence:
        """Infer continuous columns of every record, each from all other columns of the record.

        Args:
            x: Records (n, d). The value of a cell does not influence what is inferred for this cell.
            low: Smallest possible value of each column, (d,).
            high: Largest possible value of each column, (d,).
            tolerance: Difference up to which two values of a column count as equal, (d,).
            columns: Indices of the columns to infer, (c,). By default, all columns.

        Returns:
            The inferred values and their evidence, (n c,), with the cells of a record next to each other.
        """
        columns = torch.arange(x.shape[1]) if columns is None else columns
        cell_count = len(x) * len(columns)
        widths = [len(layer.bias) for layer in self.layers]
        breakpoint_count = 1 if len(self.layers) == 1 else sum(widths)
        block_size = max(1, MAX_BLOCK // (max(widths) * breakpoint_count + x.shape[1]))
        values, statistics = [], []
        for start in range(0, cell_count, block_size):
            cells = torch.arange(start, min(start + block_size, cell_count))
            column = columns[cells % len(columns)]
            rows = x[cells // len(columns)].double()
            crossings = self._cross(rows, column, low[column], high[column])
            evidence = self._best_crossing(crossings, tolerance[column])
            values.append(evidence.value)
            statistics.append(evidence.statistic)
        return Evidence(torch.cat(values), torch.cat(statistics))

    def infer_choices(self, x: Tensor, columns: Tensor, choices: Tensor) -> Evidence:
        """Infer which of several possible values some columns of each record have.

        Args:
            x: Records (n, d). The values of ``columns`` are not used.
            columns: Indices of the unknown columns, (g,), such as the columns of a one-hot group.
            choices: The k possible values of these columns, (k, g).

        Returns:
            The index of the best choice and its evidence, (n,).
        """
        n, k = len(x), len(choices)
        total = x.new_full((n, k), self.neurons * BACKGROUND, dtype=torch.float64)
        rows = x.double().clone()
        for index, choice in enumerate(choices.double()):
            rows[:, columns] = choice
            for layer, z in zip(self.layers, self._pre_activations(rows), strict=True):
                distance = z.abs() * layer.inverse_scale
                record, neuron = ((distance < R) & (layer.share > 0)).nonzero(as_tuple=True)
                evidence = gain(distance[record, neuron]) * layer.share[neuron]
                total[:, index].index_add_(0, record, evidence)
        best = total.argmax(1)
        rivals = total.scatter(1, best[:, None], NO_EVIDENCE)
        return Evidence(best, total.amax(1) - rivals.logsumexp(1))

    def _pre_activations(self, x: Tensor) -> list[Tensor]:
        pre_activations, inputs = [], x
        for layer in self.layers:
            pre_activations.append(inputs @ layer.weight.T + layer.bias)
            inputs = self._activate(pre_activations[-1])
        return pre_activations

    def _activate(self, z: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(z, self.negative_slope)

    def _cross(self, x: Tensor, column: Tensor, low: Tensor, high: Tensor) -> Crossings:
        """Return where neurons cross zero if the given column of each record varies from low to high.

        Args:
            x: Records (n, d).
            column: The unknown column of each record, (n,).
            low: Smallest value of this column, (n,).
            high: Largest value of this column, (n,).

        Returns:
            The crossings of all hidden layers.
        """
        first = self.layers[0]
        slope = first.weight.T[column]  # (n, h)
        without_column = x.scatter(1, column[:, None], 0.0) @ first.weight.T + first.bias
        value = -without_column / slope
        is_inside = (value > low[:, None]) & (value < high[:, None]) & (first.share > 0)
        value = torch.where(is_inside, value, torch.inf)
        share = first.share.expand_as(value)
        crossings = [Crossings(value, slope.abs() * first.inverse_scale, share)]
        for depth in range(1, len(self.layers)):
            # Between two neighboring breakpoints, all layers up to ``depth`` are linear in the value.
            bounds = [low[:, None], *(c.value for c in crossings), high[:, None]]
            breakpoints = torch.cat(bounds, 1).minimum(high[:, None]).sort(1).values
            inputs = without_column[:, None] + breakpoints[:, :, None] * slope[:, None]
            for layer in self.layers[1 : depth + 1]:
                inputs = self._activate(inputs) @ layer.weight.T + layer.bias
            crossings.append(_zeros_between(breakpoints, inputs, self.layers[depth]))
        merged = Crossings(*(torch.cat(tensors, 1) for tensors in zip(*crossings, strict=True)))
        order = merged.value.argsort(1)
        count = int((merged.value < torch.inf).sum(1).max())
        return Crossings(*(tensor.gather(1, order[:, :count]) for tensor in merged))

    def _best_crossing(self, crossings: Crossings, tolerance: Tensor) -> Evidence:
        """Return the crossing with the most evidence for each of n cells, and its statistic T."""
        value, _, share = crossings
        null = self.neurons * BACKGROUND
        if not value.shape[1]:
            shape = value.shape[:1]
            return Evidence(value.new_full(shape, torch.nan), value.new_full(shape, NO_EVIDENCE))
        total = null + share * gain(torch.zeros(1, dtype=torch.float64))
        for direction in (1, -1):
            add_neighbors(total, crossings, direction)
        total = torch.where(value < torch.inf, total, NO_EVIDENCE)
        best_total, best = total.max(1)
        best_value = value.gather(1, best[:, None])
        is_other = (value - best_value).abs() > tolerance[:, None]
        rivals = torch.where(is_other, total, NO_EVIDENCE).logsumexp(1)
        floor = total.new_full(rivals.shape, null + math.log(self.neurons))
        statistic = best_total - torch.logaddexp(rivals, floor)
        has_crossing = best_total > NO_EVIDENCE
        return Evidence(
            torch.where(has_crossing, best_value[:, 0], torch.nan),
            torch.where(has_crossing, statistic, NO_EVIDENCE),
        )


def add_neighbors(total: Tensor, crossings: Crossings, direction: int) -> None:
    """Add what each crossing says about the values of its neighbors.

    Args:
        total: The evidence for the value of each crossing, (n, K), which is changed in place.
        crossings: The sorted crossings.
        direction: 1 for neighbors with larger values, -1 for neighbors with smaller values.
    """
    value, slope, share = crossings
    count = value.shape[1]
    cell, position = (value < torch.inf).nonzero(as_tuple=True)
    for offset in range(1, min(NEIGHBORS + 1, count)):
        # Neighbors are sorted, so a crossing that is too far from one of them is too far from the next.
        neighbor = position + direction * offset
        has_neighbor = (neighbor >= 0) & (neighbor < count)
        cell, position = cell[has_neighbor], position[has_neighbor]
        neighbor = neighbor[has_neighbor]
        distance = slope[cell, position] * (value[cell, neighbor] - value[cell, position]).abs()
        is_close = distance < R
        cell, position, neighbor = cell[is_close], position[is_close], neighbor[is_close]
        evidence = gain(distance[is_close]) * share[cell, position]
        total.index_put_((cell, neighbor), evidence, accumulate=True)


def gain(distance: Tensor) -> Tensor:
    """Return how much more evidence boundaries at small distances add than distant boundaries.

    Args:
        distance: Distances of a record from boundaries, in units of the scales of the neurons. Any shape.

    Returns:
        The log likelihood ratios minus the log likelihood ratio of a distant boundary, in the same shape.
    """
    return torch.log(1 - PI + A / (distance + R0)) - BACKGROUND


def _zeros_between(breakpoints: Tensor, z: Tensor, layer: HiddenLayer) -> Crossings:
    """Return the zeros of functions that are linear between breakpoints.

    Args:
        breakpoints: Sorted breakpoints of each cell, (n, P).
        z: Pre-activations of h neurons at the breakpoints, (n, P, h).
        layer: The layer of these neurons.

    Returns:
        The zeros, padded with infinity.
    """
    before, after = z[:, :-1], z[:, 1:]
    width = (breakpoints[:, 1:] - breakpoints[:, :-1])[:, :, None]
    changes_sign = ((before > 0) != (after > 0)) & (width > 0) & (layer.share > 0)
    cell, segment, neuron = changes_sign.nonzero(as_tuple=True)
    step = width[cell, segment, 0]
    start, rise = (
        before[cell, segment, neuron],
        after[cell, segment, neuron] - before[cell, segment, neuron],
    )
    value = breakpoints[cell, segment] - step * start / rise
    slope = (rise / step).abs() * layer.inverse_scale[neuron]
    counts = cell.bincount(minlength=len(z))
    position = torch.arange(len(cell)) - (counts.cumsum(0) - counts)[cell]
    shape = (len(z), int(counts.max()) if len(cell) else 0)
    padded = Crossings(z.new_full(shape, torch.inf), z.new_zeros(shape), z.new_zeros(shape))
    for target, source in zip(padded, (value, slope, layer.share[neuron]), strict=True):
        target[cell, position] = source
    return padded
