"""Infer missing cells of records from a network, and say which of the inferred values can be trusted.

A cell is the value of one variable of one record. A variable is a column of a table, or a group of one-hot
columns. For every cell, :mod:`.missing_values` returns a value and a statistic T, which is large if the
boundaries of the network agree on this value. This module turns T into an error rate without any other data:

1. A decoy is a copy of a record with noise in every column. Training moved no boundary onto a decoy, so the
   statistics of decoys show what happens by chance.
2. The p-value of a cell is the rank of its statistic among the decoys (:mod:`residuum.conformal`). Cells of
   columns with many values share their decoys. Every variable with few values has decoys of its own.
3. The rule of Benjamini and Hochberg selects the cells whose values are reported, at a false discovery rate.

A cell is reported only if at least ``MIN_REPORTED`` cells are. With fewer cells, an error rate means little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import false_discovery_control
from torch import Tensor

from residuum.conformal import rank_p_values
from residuum.networks.kinks import make_decoys
from residuum.networks.missing_values import EQUAL_VALUES, NO_EVIDENCE, RecordLines
from residuum.networks.network import Network

LEVEL = 0.05  # false discovery rate of the reported cells
MIN_REPORTED = 10
# Decoys of each record. With few records, there are at least MIN_DECOYS decoys in all, so that p-values can
# be small.
DECOYS_OF_VALUES, DECOYS_OF_CHOICES, MIN_DECOYS = 4, 20, 400
# A missing value is searched up to this many standard deviations beyond the values of the pool.
MARGIN = 0.5
# A column with at most this many different values, all equally spaced, has few possible values.
MAX_CHOICES = 100
# A column needs this many records for each of its values to count as a column with few values.
RECORDS_PER_CHOICE = 1.5
ROUNDING = 1e-4  # relative difference up to which spaces between values count as equal


@dataclass(frozen=True, eq=False)
class Variable:
    """A column of a table, or a group of one-hot columns.

    Attributes:
        columns: Indices of the columns.
        choices: The possible values (k, columns), None if the column is continuous.
    """

    columns: tuple[int, ...]
    choices: Tensor | None = None


@dataclass(frozen=True, eq=False)
class InferredCells:
    """What a network says about every cell of n records with V variables.

    Attributes:
        variables: The variables.
        value: Inferred value of each cell, (n, V). For a variable with choices, the index of the choice. NaN
            if nothing was inferred.
        statistic: Evidence T for this value, (n, V).
        q: The smallest false discovery rate at which the cell is reported, (n, V).
    """

    variables: tuple[Variable, ...]
    value: Tensor
    statistic: Tensor
    q: Tensor

    @property
    def is_reported(self) -> Tensor:
        """Whether the value of each cell is reported, (n, V)."""
        is_selected = self.q <= LEVEL
        return is_selected if int(is_selected.sum()) >= MIN_REPORTED else is_selected & False

    def fill(self, x: Tensor) -> Tensor:
        """Return records with the inferred values in the columns, whether they are reported or not.

        Args:
            x: Records (n, d).

        Returns:
            The filled records (n, d) in float64.
        """
        filled = x.double().clone()
        for index, variable in enumerate(self.variables):
            has_value = self.value[:, index].isfinite()
            if variable.choices is None:
                filled[has_value, variable.columns[0]] = self.value[has_value, index]
            else:
                choice = self.value[has_value, index].long()
                rows = has_value.nonzero()
                filled[rows, torch.tensor(variable.columns)] = variable.choices[choice]
        return filled


def find_variables(
    pool: Tensor, one_hot: Sequence[Sequence[int]] | None = None
) -> tuple[Variable, ...]:
    """Find out which columns of a table have few possible values, and which columns are one-hot groups.

    Columns that are constant in the pool are left out, because nothing can be inferred about them.

    Args:
        pool: Records (n, d) as the network receives them.
        one_hot: Groups of one-hot columns, by index. If None, adjacent columns with two values form a group
            if exactly one of them has its larger value in every record.

    Returns:
        The variables.
    """
    pool = pool.double()
    low, high = pool.amin(0), pool.amax(0)
    is_high = pool == high
    is_binary = ((pool == low) | is_high).all(0) & (low < high)
    groups = _find_one_hot(is_binary, is_high) if one_hot is None else [*map(tuple, one_hot)]
    grouped = {column for group in groups for column in group}
    variables = []
    for group in groups:
        columns = torch.tensor(group)
        choices = torch.where(torch.eye(len(group), dtype=torch.bool), high[columns], low[columns])
        variables.append(Variable(tuple(group), choices))
    for column in range(pool.shape[1]):
        if column in grouped or not low[column] < high[column]:
            continue
        values = _possible_values(pool[:, column])
        variables.append(Variable((column,), None if values is None else values[:, None]))
    return tuple(sorted(variables, key=lambda variable: variable.columns))


def infer_cells(
    network: Network, x: Tensor, pool: Tensor, variables: Sequence[Variable], seed: int = 0
) -> InferredCells:
    """Infer every variable of every record from the other columns of the record.

    Args:
        network: A chain of dense layers with ReLU or LeakyReLU.
        x: Records (n, d) as the network receives them. The value of a cell does not influence what is
            inferred for this cell.
        pool: Records of the same kind, which give the scales of neurons and columns.
        variables: The variables to infer.
        seed: Seed of the decoys.

    Returns:
        The inferred values with their error rates.
    """
    x, pool = x.double(), pool.double()
    lines = RecordLines.measure(network, pool)
    deviation = pool.std(0, correction=0)
    generator = torch.Generator().manual_seed(seed)
    value = x.new_full((len(x), len(variables)), torch.nan)
    statistic = x.new_full(value.shape, NO_EVIDENCE)
    p = x.new_ones(value.shape)
    continuous = [i for i, variable in enumerate(variables) if variable.choices is None]
    if continuous:
        columns = torch.tensor([variables[i].columns[0] for i in continuous])
        bounds = (
            pool.amin(0) - MARGIN * deviation,
            pool.amax(0) + MARGIN * deviation,
            EQUAL_VALUES * deviation,
        )

        def infer(records: Tensor) -> tuple[Tensor, Tensor]:
            evidence = lines.infer_values(records, *bounds, columns=columns)
            shape = (len(records), len(columns))
            return evidence.value.reshape(shape), evidence.statistic.reshape(shape)

        value[:, continuous], statistic[:, continuous] = infer(x)
        count = max(DECOYS_OF_VALUES, math.ceil(MIN_DECOYS / (len(x) * len(columns))))
        decoys = [infer(make_decoys(x, deviation, generator))[1] for _ in range(count)]
        ranks = rank_p_values(statistic[:, continuous].flatten(), torch.cat(decoys).flatten())
        p[:, continuous] = ranks.reshape(len(x), -1)
    count = max(DECOYS_OF_CHOICES, math.ceil(MIN_DECOYS / len(x)))
    has_choices = [i for i in range(len(variables)) if i not in continuous]
    if has_choices:
        decoys_of_choices = make_decoys(x.repeat(count, 1), deviation, generator)
    for i in has_choices:
        columns, choices = torch.tensor(variables[i].columns), variables[i].choices
        assert choices is not None
        evidence = lines.infer_choices(x, columns, choices)
        value[:, i], statistic[:, i] = evidence.value.double(), evidence.statistic
        decoy_evidence = lines.infer_choices(decoys_of_choices, columns, choices)
        p[:, i] = rank_p_values(evidence.statistic, decoy_evidence.statistic)
    q = torch.from_numpy(false_discovery_control(p.flatten().numpy())).reshape(p.shape)
    return InferredCells(tuple(variables), value, statistic, q)


def _find_one_hot(is_binary: Tensor, is_high: Tensor) -> list[tuple[int, ...]]:
    """Return the groups of adjacent binary columns of which exactly one is high in every record."""
    groups, start = [], 0
    d = len(is_binary)
    while start < d:
        high_count = torch.zeros(len(is_high), dtype=torch.long)
        stop = start
        while stop < d and is_binary[stop] and bool((high_count + is_high[:, stop] <= 1).all()):
            high_count += is_high[:, stop]
            stop += 1
        if stop - start >= 2 and bool((high_count == 1).all()):
            groups.append(tuple(range(start, stop)))
            start = stop
        else:
            start += 1
    return groups


def _possible_values(column: Tensor) -> Tensor | None:
    """Return all possible values of a column with few, equally spaced values, None for other columns."""
    values = column.unique()
    if len(values) == 2:
        return values
    if len(values) > MAX_CHOICES or len(column) < RECORDS_PER_CHOICE * len(values):
        return None
    gaps = values.diff()
    steps = gaps / gaps.min()
    if not bool(((steps - steps.round()).abs() <= ROUNDING * steps).all()):
        return None
    count = int(steps.round().sum()) + 1
    if count > MAX_CHOICES:
        return None
    return torch.linspace(float(values[0]), float(values[-1]), count, dtype=torch.float64)
