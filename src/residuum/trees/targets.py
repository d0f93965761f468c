"""The targets of the training records, in the order of the training table.

Let ``c_ti`` be how often tree t drew record i (:mod:`.bootstrap`), and let a leaf be pure if its impurity is zero. A
pure leaf stores the target of all its records. Let ``w_t(v)`` be the weight of the pure leaves of tree t with value v.
If all leaves are pure, then for every value v

    w_t(v) = sum of c_ti over the records i with target v,   for all t.

A value that one record has is found by comparing the columns of c with w(v). Equal targets need an exact cover: a set
of columns that adds up to w(v). It is accepted only if it is the only one.

At any depth the root of tree t stores the mean target, so

    sum_i c_ti y_i = (weight of the root) x (value of the root),

which determines all targets if there are as many trees as records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from residuum.trees.forest import Floats, Forest, Integers

ROUNDING = 256 * np.finfo(np.float64).eps  # of a mean of equal targets, times their size
PURE = 1e-12  # impurity of a pure leaf, times the variance of all targets
MAX_STEPS = 20_000  # of the search for one exact cover
MIN_RANK_RATIO = 1e-9  # smallest singular value of the counts over the largest


@dataclass(frozen=True)
class LeafValues:
    """Leaves grouped by their value.

    Attributes:
        values: (groups,) distinct values of pure leaves, ascending.
        group: Group of each leaf, -1 for a leaf that is not pure.
        weights: (groups, trees) weight of the leaves of each group in each tree.
    """

    values: Floats
    group: Integers
    weights: Integers


def leaf_arrays(forest: Forest) -> tuple[Floats, Floats | None, Floats | None]:
    """Return value, weight and impurity of all leaves; None for what the file does not hold."""
    structure = forest.structure
    starts = structure.leaf_starts

    def gather(name: str) -> Floats | None:
        arrays = [getattr(tree, name) for tree in forest.trees]
        if any(array is None for array in arrays):
            return None
        return np.concatenate(
            [
                array[structure.leaf_node[a:b]]
                for array, a, b in zip(arrays, starts[:-1], starts[1:], strict=True)
            ]
        )

    values = gather("value")
    assert values is not None
    return values[:, 0], gather("weight"), gather("impurity")


def group_leaves(forest: Forest) -> LeafValues:
    """Group the pure leaves of a regressor by their value."""
    value, weight, impurity = leaf_arrays(forest)
    assert weight is not None
    is_pure = np.ones(len(value), dtype=bool)
    if impurity is not None:
        is_pure = impurity <= PURE * max(value.var(), np.finfo(float).tiny)
    group = np.full(len(value), -1)
    pure = np.flatnonzero(is_pure)
    order = pure[np.argsort(value[pure], kind="stable")]
    gap = np.diff(value[order], prepend=-np.inf) > ROUNDING * np.abs(value).max(initial=0.0)
    group[order] = np.cumsum(gap) - 1
    groups = int(gap.sum())
    weights = np.zeros((groups, len(forest.trees)), dtype=np.int64)
    leaf_tree = forest.structure.leaf_tree
    np.add.at(weights, (group[pure], leaf_tree[pure]), np.rint(weight[pure]).astype(np.int64))
    return LeafValues(_most_common(value[order], group[order], groups), group, weights)


def _most_common(value: Floats, group: Integers, groups: int) -> Floats:
    """Return the most common value of each group: means of equal targets differ by their rounding."""
    result = np.zeros(groups)
    for number, part in enumerate(np.split(value, np.flatnonzero(np.diff(group)) + 1)):
        distinct, counts = np.unique(part, return_counts=True)
        result[number] = distinct[counts.argmax()]
    return result


@dataclass(frozen=True)
class Targets:
    """Targets of the training records.

    Attributes:
        y: (records,) target, NaN if it was not found.
        group: (records,) group of the target among the leaf values, -1 if there is none.
    """

    y: Floats
    group: Integers


def find_targets(forest: Forest, counts: Integers, leaves: LeafValues) -> Targets:
    """Find the targets of the training records of a regressor.

    Args:
        forest: The forest.
        counts: (trees, records) how often each tree drew each record.
        leaves: Its leaves, grouped by value.

    Returns:
        The targets, in the order of the training table.
    """
    records = counts.shape[1]
    group = _match_groups(counts, leaves)
    y = np.where(group >= 0, leaves.values[group], np.nan) if len(leaves.values) else group * np.nan
    if (group < 0).any() and len(counts) >= records:
        y = np.where(group >= 0, y, _solve(forest, counts))
        group = np.where(group >= 0, group, _nearest_group(y, leaves.values))
    return Targets(y, group)


def _match_groups(counts: Integers, leaves: LeafValues) -> Integers:
    """Return the group of leaf values of each record, by matching columns of the counts."""
    records = counts.shape[1]
    group = np.full(records, -1)
    by_column: dict[bytes, list[int]] = {}
    for i in range(records):
        by_column.setdefault(counts[:, i].tobytes(), []).append(i)
    remaining = []
    for number, weight in enumerate(leaves.weights):
        match by_column.get(weight.tobytes(), []):
            case [record]:
                group[record] = number
            case _:
                remaining.append(number)
    progress = True
    while progress and remaining:
        progress = False
        for number in list(remaining):
            free = np.flatnonzero(group < 0)
            cover = find_cover(counts[:, free], leaves.weights[number])
            if cover is not None:
                group[free[cover]] = number
                remaining.remove(number)
                progress = True
    return group


def find_cover(counts: Integers, weight: Integers) -> Integers | None:
    """Return the only set of columns of ``counts`` that adds up to ``weight``.

    Args:
        counts: (trees, records) non-negative integers.
        weight: (trees,) non-negative integers.

    Returns:
        The columns, or None if there is no such set, more than one, or if the search takes too long.
    """
    candidates = np.flatnonzero((counts <= weight[:, None]).all(0))
    columns = counts[:, candidates]
    covers: list[list[int]] = []
    steps = 0

    def search(remaining: Integers, chosen: list[int], allowed: Integers) -> bool:
        """Extend the chosen columns. Return False if the search must stop."""
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            return False
        if not remaining.any():
            covers.append(chosen)
            return len(covers) < 2
        allowed = allowed[(columns[:, allowed] <= remaining[:, None]).all(0)]
        reachable = columns[:, allowed].sum(1)
        if (reachable < remaining).any():
            return True
        open_rows = np.flatnonzero(remaining)
        choices = (columns[np.ix_(open_rows, allowed)] > 0).sum(1)
        row = open_rows[choices.argmin()]
        for k in allowed[columns[row, allowed] > 0]:
            allowed = allowed[allowed != k]  # covers with this column are all found in this branch
            if not search(remaining - columns[:, k], [*chosen, int(k)], allowed):
                return False
        return True

    if not len(candidates) or not search(weight, [], np.arange(len(candidates))):
        return None
    return candidates[covers[0]] if len(covers) == 1 else None


def _solve(forest: Forest, counts: Integers) -> Floats:
    """Return the targets that the means in the roots determine, NaN if they do not."""
    sums = np.array([tree.value[0, 0] * tree.weight[0] for tree in forest.trees])  # type: ignore[index]
    solution, _, _, singular = np.linalg.lstsq(counts.astype(np.float64), sums, rcond=None)
    if singular.min(initial=np.inf) < MIN_RANK_RATIO * singular.max(initial=0.0):
        return np.full(counts.shape[1], np.nan)
    return solution


def _nearest_group(y: Floats, values: Floats) -> Integers:
    """Return the leaf value that equals each target up to the error of a linear solve, else -1."""
    if not len(values):
        return np.full(len(y), -1)
    right = np.searchsorted(values, y).clip(1, max(len(values) - 1, 1)).clip(max=len(values) - 1)
    left = np.maximum(right - 1, 0)
    nearest = np.where(np.abs(values[left] - y) <= np.abs(values[right] - y), left, right)
    tolerance = 1e-9 * max(np.abs(values).max(), np.ptp(values))
    return np.where(np.abs(values[nearest] - y) <= tolerance, nearest, -1)
