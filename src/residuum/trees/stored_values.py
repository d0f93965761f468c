"""Values of the training table that the file of boosted trees stores. Nothing but the file is needed.

A threshold splits a column between two values of the training table. XGBoost builds its histograms from
values of the column (``tree_method="hist"``, the default), so a threshold is itself a value of the training
table. HistGradientBoosting stores the edges of its bins. If a column has at most 255 distinct values, the
edges are the midpoints of neighbors (:func:`values_between_edges`). Otherwise they are 254 quantiles, which
scikit-learn 1.9 copies from the table (``averaged_inverted_cdf``: a quantile is the mean of two values only
if its rank is an integer). The other libraries store the midpoint of two values, as does XGBoost with
``tree_method="exact"``, which its model files do not state. LightGBM also stores the smallest and the largest
value of each column.

The first tree is fitted to ``y - s``, where s is the first prediction. With squared error, learning rate eta
and regularization lambda, a leaf with n records stores ``v = eta (sum of y - n s) / (n + lambda)``. So the
file gives the number of records and the sum of the targets of every leaf of the first tree. If a leaf has one
record, this sum is the target of the record.

XGBoost does not write eta and lambda into its model files. They follow from the inner nodes, which store
their values without eta. Let G be the sum of the residuals of a node with n records, and let its value be
``u = G / (n + lambda)``. The sums of two children add up to that of their parent:

    u n + lambda u = sum over children of (u' n' + lambda u')    with  u' = v / eta for a leaf.

This equation is linear in lambda, 1 / eta and lambda / eta.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from residuum.trees.boosting import is_squared_error
from residuum.trees.forest import BOOSTING, NO_CHILD, Booleans, Floats, Forest, Integers, Tree
from residuum.trees.leaf_equations import first_prediction, starts_in_first_tree

# LightGBM separates zero from other values with thresholds of this size, whatever values the column has.
ZERO_THRESHOLD = 1e-30
EDGE_ROUNDING = 1e-14  # an edge of a bin is a midpoint up to this share of the largest value
MIN_NODES = 10  # settings are computed from at least this many inner nodes
MAX_MISFIT = (
    1e-4  # largest relative misfit of computed settings; inner values of LightGBM have six digits
)

# Number of edges of a column with more than 255 distinct values, with the default settings of
# HistGradientBoosting. A column with fewer distinct values has fewer edges or as many midpoints.
QUANTILE_EDGES = 254


@dataclass(frozen=True)
class StoredValues:
    """What boosted trees store about their training table.

    Attributes:
        thresholds: For each column, the distinct thresholds, ascending.
        holds_values: (columns,) whether the thresholds are values of the column. Otherwise they lie between
            two values.
        has_midpoints: Whether the thresholds of the other columns are midpoints of two values.
        has_bins: Whether thresholds are edges of bins of HistGradientBoosting. Quantiles of a column with
            repeated values may have fewer edges than bins, so the other columns may hold values as well.
        lowest: (columns,) stored smallest values of the columns, NaN if the file does not store them.
        highest: (columns,) stored largest values of the columns, NaN if the file does not store them.
        leaf_counts: (leaves,) number of records in each leaf of the first tree, () if unknown.
        leaf_sums: (leaves,) sum of the targets in each leaf of the first tree, () if unknown.
        smallest_leaf: Smallest number of records in a leaf of any tree, None if the file stores no numbers.
        learning_rate: Learning rate that the sums depend on, None if there are no sums.
        regularization: Regularization lambda that the sums depend on, None if there are no sums.
        has_assumed_settings: Whether the file does not determine the settings, so that defaults were assumed.
    """

    thresholds: tuple[Floats, ...]
    holds_values: Booleans
    has_midpoints: bool
    has_bins: bool
    lowest: Floats
    highest: Floats
    leaf_counts: Integers
    leaf_sums: Floats
    smallest_leaf: int | None
    learning_rate: float | None
    regularization: float | None
    has_assumed_settings: bool

    @property
    def threshold_count(self) -> int:
        """Number of distinct thresholds of all columns."""
        return sum(map(len, self.thresholds))

    @property
    def targets(self) -> Floats:
        """Targets of the records that are alone in a leaf of the first tree."""
        return self.leaf_sums[self.leaf_counts == 1]

    @property
    def lines(self) -> tuple[str, ...]:
        """What the file stores, in sentences."""
        lines = []
        for is_value in (True, False):
            columns = [
                values
                for values, flag in zip(self.thresholds, self.holds_values, strict=True)
                if flag == is_value and len(values)
            ]
            number = sum(map(len, columns))
            if number and is_value:
                lines.append(
                    f"The file stores about {number:,} values of {len(columns)} columns of the training "
                    "table, because these thresholds are copied from the table by default."
                )
            elif number:
                place = "the midpoint of" if self.has_midpoints else "a number between"
                place = (
                    "a value or the midpoint of two values"
                    if self.has_bins
                    else f"{place} two values"
                )
                lines.append(
                    f"The file stores {number:,} thresholds of {len(columns)} columns. Each one is {place} "
                    "of the training table."
                )
        if ranges := int(np.isfinite(self.lowest).sum()):
            lines.append(f"The file stores the smallest and the largest value of {ranges} columns.")
        if len(self.leaf_sums):
            lines.append(
                f"The first tree stores the sum of the targets of {len(self.leaf_sums)} groups of records, "
                f"and {len(self.targets)} of these groups are a single record."
            )
            if self.has_assumed_settings:
                lines.append(
                    f"These sums assume the learning rate {self.learning_rate:g} and the regularization "
                    f"{self.regularization:g}, which the file does not state."
                )
        if self.smallest_leaf is not None:
            lines.append(f"The smallest leaf of all trees has {self.smallest_leaf} records.")
        return tuple(lines)


def find_stored_values(
    forest: Forest, learning_rate: float | None = None, regularization: float | None = None
) -> StoredValues:
    """Collect the values of the training table that the file of a model stores.

    Args:
        forest: The trees. Sums of targets are computed for boosting with squared error only.
        learning_rate: Learning rate, if known. Otherwise the one that the file states or determines, or the
            default of the library.
        regularization: Regularization lambda of the leaf values, if known. Otherwise the one that the file
            determines, or the default of the library.

    Returns:
        The stored values.
    """
    unknown = np.full(forest.columns, np.nan)
    lowest, highest = forest.stored_ranges or (unknown, unknown)
    has_bins = bool(forest.bin_edges) and forest.library == "scikit-learn"
    if has_bins:
        holds_values = np.array([len(edges) == QUANTILE_EDGES for edges in forest.bin_edges])
    else:
        is_xgboost = forest.library.lower() == "xgboost" and not forest.has_midpoints
        holds_values = np.full(forest.columns, is_xgboost)
    counts = [leaf_counts for tree in forest.trees if len(leaf_counts := _leaf_counts(tree))]
    has_sums = forest.kind == BOOSTING and is_squared_error(forest) and bool(counts)
    settings: tuple[float | None, float | None, bool] = (None, None, False)
    sums = np.zeros(0)
    if has_sums:
        rate, shrinkage, is_assumed = _settings(forest, learning_rate, regularization)
        settings = rate, shrinkage, is_assumed
        sums = _first_sums(forest, rate, shrinkage)
    return StoredValues(
        tuple(distinct_thresholds(forest)),
        holds_values,
        forest.has_midpoints,
        has_bins,
        lowest,
        highest,
        _leaf_counts(forest.trees[0]) if has_sums else np.zeros(0, dtype=np.int64),
        sums,
        min((int(leaf_counts.min()) for leaf_counts in counts), default=None),
        *settings,
    )


def distinct_thresholds(forest: Forest) -> list[Floats]:
    """Return the distinct thresholds of each column, with the edges of histogram bins.

    Args:
        forest: The trees.

    Returns:
        For each column, ascending thresholds. Thresholds that LightGBM has for every column are left out.
    """
    structure = forest.structure
    thresholds = []
    for column in range(forest.columns):
        values = structure.threshold[structure.feature == column]
        if forest.bin_edges:
            values = np.concatenate([values, forest.bin_edges[column]])
        if forest.library.lower() == "lightgbm":
            values = values[np.abs(values) > ZERO_THRESHOLD]
        thresholds.append(np.unique(values[np.isfinite(values)]))
    return thresholds


def count_stored_values(forest: Forest, x: Floats) -> Integers:
    """Count the columns of each record whose value the file stores.

    A value is stored if it equals a threshold of its column, or the stored smallest or largest value of the
    column. Values are compared as float32 numbers. Training records have more stored values than others if
    thresholds are values of the training table, as in files of XGBoost.

    Args:
        forest: The trees.
        x: (records, columns) values.

    Returns:
        (records,) numbers of columns.
    """
    counts = np.zeros(len(x), dtype=np.int64)
    for column, thresholds in enumerate(distinct_thresholds(forest)):
        ends = [side[column] for side in forest.stored_ranges or ()]
        stored = np.concatenate([thresholds, ends]).astype(np.float32)
        counts += np.isin(np.asarray(x[:, column], dtype=np.float32), stored[~np.isnan(stored)])
    return counts


def values_between_edges(edges: Floats, lowest: float, highest: float) -> Floats | None:
    """Compute all distinct values of a column from the edges of its histogram bins.

    HistGradientBoosting gives every distinct value of a column a bin if there are at most 255 of them
    (``max_bins``). Then each edge t is the midpoint of two neighbors, and the values follow from the smallest
    one: the next value is 2 t minus the value before. The computed largest value is a check, because edges
    that are no midpoints of neighbors lead to another number.

    Args:
        edges: Edges of the bins, ascending.
        lowest: Smallest value of the column.
        highest: Largest value of the column.

    Returns:
        The distinct values, ascending. None if the edges are not midpoints of neighbors.
    """
    values = np.concatenate([[lowest], np.zeros(len(edges))])
    for k, edge in enumerate(edges.tolist()):
        values[k + 1] = 2 * edge - values[k]
    is_between = bool((values[:-1] < edges).all() and (edges < values[1:]).all())
    tolerance = EDGE_ROUNDING * max(abs(lowest), abs(highest)) * len(values)
    return values if is_between and abs(values[-1] - highest) <= tolerance else None


def _leaf_counts(tree: Tree) -> Integers:
    """Return the number of records in each leaf, () if the file does not store integers."""
    stored = tree.weight if tree.count is None else tree.count
    if stored is None:
        return np.zeros(0, dtype=np.int64)
    counts = np.asarray(stored, dtype=np.float64)[tree.left == NO_CHILD]
    rounded = np.rint(counts).astype(np.int64)
    return rounded if np.allclose(rounded, counts, atol=1e-3) else np.zeros(0, dtype=np.int64)


def _first_sums(forest: Forest, learning_rate: float, regularization: float) -> Floats:
    """Return the sum of the targets in each leaf of the first tree."""
    tree = forest.trees[0]
    n = _leaf_counts(tree)
    if not len(n):
        return np.zeros(0)
    v = tree.value[tree.left == NO_CHILD, 0]
    if starts_in_first_tree(forest):
        # The first prediction is the mean target, and the residuals add up to zero.
        start = float(((n + regularization) * v).sum() / (n + regularization).sum())
        v = v - start
    else:
        start = first_prediction(forest)
    return v * (n + regularization) / learning_rate + n * start


def _settings(
    forest: Forest, learning_rate: float | None, regularization: float | None
) -> tuple[float, float, bool]:
    """Return the learning rate, the regularization, and whether a default was assumed."""
    if learning_rate is None:
        learning_rate = forest.learning_rate
    if regularization is None:
        regularization = forest.regularization
    computed = settings_of_inner_nodes(forest)
    is_assumed = computed is None and None in (learning_rate, regularization)
    is_xgboost = forest.library.lower() == "xgboost"
    default = (0.3, 1.0) if is_xgboost else (0.1, 0.0)
    rate, shrinkage = computed or default
    return (
        rate if learning_rate is None else learning_rate,
        shrinkage if regularization is None else regularization,
        is_assumed,
    )


def settings_of_inner_nodes(forest: Forest) -> tuple[float, float] | None:
    """Compute the learning rate and the regularization from the values of inner nodes.

    Args:
        forest: Boosted trees. Files of XGBoost store the values of inner nodes without the learning rate.

    Returns:
        Learning rate and regularization. None if the inner nodes store no values, or do not determine them.
    """
    rows, sides = [], []
    for tree in forest.trees[1:] if starts_in_first_tree(forest) else forest.trees:
        weight = tree.count if tree.weight is None else tree.weight
        if weight is None:
            return None
        # HistGradientBoosting stores 0 in its roots instead of their values.
        parents = np.flatnonzero((tree.left != NO_CHILD) & (tree.value[:, 0] != 0))
        children = np.stack([tree.left[parents], tree.right[parents]], 1)
        is_leaf = tree.left[children] == NO_CHILD
        u, n = tree.value[:, 0], weight.astype(np.float64)
        products = u * n
        inner_products = np.where(is_leaf, 0.0, products[children]).sum(1)
        inner_values = np.where(is_leaf, 0.0, u[children]).sum(1)
        leaf_products = np.where(is_leaf, products[children], 0.0).sum(1)
        leaf_values = np.where(is_leaf, u[children], 0.0).sum(1)
        sides.append(products[parents] - inner_products)
        rows.append(np.stack([leaf_products, inner_values - u[parents], leaf_values], 1))
    matrix, side = np.concatenate(rows), np.concatenate(sides)
    if len(side) < MIN_NODES or not np.isfinite(matrix).all() or not np.isfinite(side).all():
        return None
    scale = np.linalg.norm(matrix, axis=0)
    if not (scale > 0).all():
        return None
    solution, _, rank, _ = np.linalg.lstsq(matrix / scale, side, rcond=None)
    a, regularization, c = solution / scale
    misfit = np.linalg.norm(matrix @ (solution / scale) - side) / np.linalg.norm(side)
    is_consistent = abs(c - a * regularization) <= 0.01 * (1 + abs(c))
    if rank < 3 or a <= 0 or not misfit <= MAX_MISFIT or not is_consistent:
        return None
    return float(1 / a), float(regularization)
