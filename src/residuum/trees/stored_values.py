"""Read values of the training table from the file of a model of decision trees. No data is needed.

A threshold splits a column between two values of the training table. By default (``tree_method="hist"``),
XGBoost builds histograms whose edges are values of the column, so its thresholds are values of the training
table. HistGradientBoosting stores the edges of its bins. If a column has at most 255 distinct values, each
edge is the midpoint of two neighboring values (:func:`values_between_edges`). If it has more, the edges are
254 quantiles. Scikit-learn 1.9 computes quantiles with the method ``averaged_inverted_cdf``. A quantile is
then a value of the table, except if its rank is an integer. In this case it is the mean of two values. The
other libraries store midpoints of two values. XGBoost does the same with ``tree_method="exact"``, but its
model files do not state the tree method. LightGBM also stores the smallest and the largest value of each
column.

The first tree is fitted to ``y - s``, where s is the first prediction. With squared error, learning rate eta
and regularization lambda, a leaf with n records stores ``v = eta (sum of y - n s) / (n + lambda)``. So the
file gives the number of records and the sum of the targets of every leaf of the first tree. If a leaf has one
record, this sum is the target of the record.

XGBoost does not write eta and lambda into its model files. But eta and lambda follow from the values of the
inner nodes, which XGBoost does not multiply by eta. Let G be the sum of the residuals of a node with n
records. The node stores ``u = G / (n + lambda)``. The values G of two children add up to the value G of their
parent:

    u n + lambda u = sum over children of (u' n' + lambda u')    with  u' = v / eta for a leaf.

This equation is linear in lambda, 1 / eta and lambda / eta.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from residuum.trees.boosting import is_squared_error
from residuum.trees.forest import BOOSTING, NO_CHILD, Booleans, Floats, Forest, Integers, Tree
from residuum.trees.leaf_equations import first_prediction, starts_in_first_tree

# LightGBM separates zero from other values with thresholds of at most this size. They show no value of a
# column.
ZERO_THRESHOLD = 1e-30
# Largest rounding error of the edge of a histogram bin, as a share of the largest absolute value of the
# column.
EDGE_ROUNDING = 1e-14
# The learning rate and the regularization are computed from the values of inner nodes, and only if there
# are at least this many inner nodes.
MIN_NODES = 10
# The learning rate and the regularization are computed from equations for the values of inner nodes. They
# are accepted only if the relative error of these equations is at most this.
MAX_MISFIT = 1e-4

# If a column has more than 255 distinct values, HistGradientBoosting uses this number of bin edges by
# default.
QUANTILE_EDGES = 254


@dataclass(frozen=True)
class StoredValues:
    """Values and sums of the training table that the file of decision trees stores.

    Attributes:
        thresholds: For each column, the distinct thresholds, ascending.
        holds_values: (columns,) whether the thresholds are values of the column. Otherwise they lie between
            two values.
        has_midpoints: Whether the thresholds of columns without ``holds_values`` are midpoints of two values.
        has_bins: Whether thresholds are edges of histogram bins of HistGradientBoosting. Then thresholds of
            columns without ``holds_values`` may also be values of the column.
        lowest: (columns,) stored smallest values of the columns, NaN if the file does not store them.
        highest: (columns,) stored largest values of the columns, NaN if the file does not store them.
        leaf_counts: (leaves,) number of records in each leaf of the first tree, () if unknown.
        leaf_sums: (leaves,) sum of the targets in each leaf of the first tree, () if unknown.
        smallest_leaf: Smallest number of records in a leaf of any tree, None if the file stores no numbers.
        learning_rate: Learning rate from which ``leaf_sums`` is computed, None if there are no sums.
        regularization: Regularization lambda from which ``leaf_sums`` is computed, None if there are no sums.
        has_assumed_settings: Whether the learning rate or the regularization is the default of the library,
            because the file does not determine it.
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
        """Number of distinct thresholds, added up over all columns."""
        return sum(map(len, self.thresholds))

    @property
    def targets(self) -> Floats:
        """Targets of the records that are alone in a leaf of the first tree."""
        return self.leaf_sums[self.leaf_counts == 1]

    @property
    def lines(self) -> tuple[str, ...]:
        """Sentences that say what the file stores."""
        sentences = []
        for is_value in (True, False):
            thresholds_by_column = [
                values
                for values, flag in zip(self.thresholds, self.holds_values, strict=True)
                if flag == is_value and len(values)
            ]
            column_count = len(thresholds_by_column)
            threshold_count = sum(map(len, thresholds_by_column))
            if threshold_count and is_value:
                sentences.append(
                    f"The file stores about {threshold_count:,} values of {column_count} columns of the "
                    "training table, because by default the library uses values of the table as thresholds."
                )
            elif threshold_count:
                relation = "the midpoint of" if self.has_midpoints else "a number between"
                relation = (
                    "a value or the midpoint of two values"
                    if self.has_bins
                    else f"{relation} two values"
                )
                sentences.append(
                    f"The file stores {threshold_count:,} thresholds of {column_count} columns. Each "
                    f"threshold is {relation} of the training table."
                )
        if ranges := int(np.isfinite(self.lowest).sum()):
            sentences.append(
                f"The file stores the smallest and the largest value of {ranges} columns."
            )
        if len(self.leaf_sums):
            sentences.append(
                f"The first tree stores the sum of the targets of {len(self.leaf_sums)} groups of records, "
                f"and {len(self.targets)} of these groups have a single record."
            )
            if self.has_assumed_settings:
                sentences.append(
                    "The sums were computed under the assumption that the learning rate is "
                    f"{self.learning_rate:g} and the regularization {self.regularization:g}, because the "
                    "file does not state both of them."
                )
        if self.smallest_leaf is not None:
            sentences.append(f"The smallest leaf of all trees has {self.smallest_leaf} records.")
        return tuple(sentences)


def find_stored_values(
    forest: Forest, learning_rate: float | None = None, regularization: float | None = None
) -> StoredValues:
    """Collect the values of the training table that the file of a model stores.

    Args:
        forest: The trees. Sums of targets are computed for boosting with squared error only.
        learning_rate: Learning rate, if known. If None, the function uses the learning rate that the file
            states or determines, or the default of the library.
        regularization: Regularization lambda of the leaf values, if known. If None, the function uses the
            regularization that the file states or determines, or the default of the library.

    Returns:
        The stored values.
    """
    no_values = np.full(forest.columns, np.nan)
    lowest, highest = forest.stored_ranges or (no_values, no_values)
    has_bins = bool(forest.bin_edges) and forest.library == "scikit-learn"
    if has_bins:
        holds_values = np.array([len(edges) == QUANTILE_EDGES for edges in forest.bin_edges])
    else:
        is_xgboost = forest.library.lower() == "xgboost" and not forest.has_midpoints
        holds_values = np.full(forest.columns, is_xgboost)
    leaf_counts_by_tree = [
        leaf_counts for tree in forest.trees if len(leaf_counts := _leaf_counts(tree))
    ]
    has_sums = forest.kind == BOOSTING and is_squared_error(forest) and bool(leaf_counts_by_tree)
    settings: tuple[float | None, float | None, bool] = (None, None, False)
    leaf_sums = np.zeros(0)
    if has_sums:
        rate, penalty, is_assumed = _settings(forest, learning_rate, regularization)
        settings = rate, penalty, is_assumed
        leaf_sums = _first_sums(forest, rate, penalty)
    return StoredValues(
        tuple(distinct_thresholds(forest)),
        holds_values,
        forest.has_midpoints,
        has_bins,
        lowest,
        highest,
        _leaf_counts(forest.trees[0]) if has_sums else np.zeros(0, dtype=np.int64),
        leaf_sums,
        min((int(leaf_counts.min()) for leaf_counts in leaf_counts_by_tree), default=None),
        *settings,
    )


def distinct_thresholds(forest: Forest) -> list[Floats]:
    """Return the distinct thresholds of each column, including the edges of histogram bins.

    Args:
        forest: The trees.

    Returns:
        For each column, ascending thresholds. The tiny thresholds with which LightGBM separates zero from
        other values are left out, because they do not depend on the data.
    """
    structure = forest.structure
    thresholds = []
    for column in range(forest.columns):
        column_thresholds = structure.threshold[structure.feature == column]
        if forest.bin_edges:
            column_thresholds = np.concatenate([column_thresholds, forest.bin_edges[column]])
        if forest.library.lower() == "lightgbm":
            column_thresholds = column_thresholds[np.abs(column_thresholds) > ZERO_THRESHOLD]
        thresholds.append(np.unique(column_thresholds[np.isfinite(column_thresholds)]))
    return thresholds


def count_stored_values(forest: Forest, x: Floats) -> Integers:
    """Count for each record the columns in which the file stores the value of the record.

    A value counts as stored if it equals a threshold of its column, or the stored smallest or largest value
    of the column. Values are compared as float32 numbers. If thresholds are values of the training table, as
    in files of XGBoost, training records have more stored values than other records.

    Args:
        forest: The trees.
        x: (records, columns) values.

    Returns:
        (records,) numbers of columns.
    """
    stored_counts = np.zeros(len(x), dtype=np.int64)
    for column, thresholds in enumerate(distinct_thresholds(forest)):
        stored_extremes = [side[column] for side in forest.stored_ranges or ()]
        stored_numbers = np.concatenate([thresholds, stored_extremes]).astype(np.float32)
        stored_counts += np.isin(
            np.asarray(x[:, column], dtype=np.float32), stored_numbers[~np.isnan(stored_numbers)]
        )
    return stored_counts


def values_between_edges(edges: Floats, lowest: float, highest: float) -> Floats | None:
    """Compute all distinct values of a column from the edges of its histogram bins.

    If a column has at most 255 distinct values (``max_bins``), HistGradientBoosting gives every value its own
    bin. Then each edge t is the midpoint of two neighboring values. So the values follow from the smallest
    value: the next value is 2 t minus the value before. If the last computed value is not ``highest``, the
    edges are not such midpoints.

    Args:
        edges: Edges of the bins, ascending.
        lowest: Smallest value of the column.
        highest: Largest value of the column.

    Returns:
        The distinct values, ascending. None if the edges are not midpoints of neighboring values.
    """
    column_values = np.concatenate([[lowest], np.zeros(len(edges))])
    for k, edge in enumerate(edges.tolist()):
        column_values[k + 1] = 2 * edge - column_values[k]
    encloses_edges = bool((column_values[:-1] < edges).all() and (edges < column_values[1:]).all())
    tolerance = EDGE_ROUNDING * max(abs(lowest), abs(highest)) * len(column_values)
    return (
        column_values if encloses_edges and abs(column_values[-1] - highest) <= tolerance else None
    )


def _leaf_counts(tree: Tree) -> Integers:
    """Return the number of records in each leaf of a tree, () if the file does not store integers."""
    stored_counts = tree.weight if tree.count is None else tree.count
    if stored_counts is None:
        return np.zeros(0, dtype=np.int64)
    leaf_counts = np.asarray(stored_counts, dtype=np.float64)[tree.left == NO_CHILD]
    rounded = np.rint(leaf_counts).astype(np.int64)
    return rounded if np.allclose(rounded, leaf_counts, atol=1e-3) else np.zeros(0, dtype=np.int64)


def _first_sums(forest: Forest, learning_rate: float, regularization: float) -> Floats:
    """Return the sum of the targets of the records in each leaf of the first tree."""
    tree = forest.trees[0]
    leaf_counts = _leaf_counts(tree)
    if not len(leaf_counts):
        return np.zeros(0)
    leaf_values = tree.value[tree.left == NO_CHILD, 0]
    if starts_in_first_tree(forest):
        # The leaf values of the first tree include the first prediction, which is the mean target. It follows
        # from the leaf values, because the residuals of the mean target add up to zero.
        base_prediction = float(
            ((leaf_counts + regularization) * leaf_values).sum()
            / (leaf_counts + regularization).sum()
        )
        leaf_values = leaf_values - base_prediction
    else:
        base_prediction = first_prediction(forest)
    return (
        leaf_values * (leaf_counts + regularization) / learning_rate + leaf_counts * base_prediction
    )


def _settings(
    forest: Forest, learning_rate: float | None, regularization: float | None
) -> tuple[float, float, bool]:
    """Return learning rate and regularization, and whether one of them is the library's default.

    A known value is used first, then the value in the file, then the value computed from the inner nodes.
    """
    if learning_rate is None:
        learning_rate = forest.learning_rate
    if regularization is None:
        regularization = forest.regularization
    computed_settings = settings_of_inner_nodes(forest)
    is_assumed = computed_settings is None and None in (learning_rate, regularization)
    is_xgboost = forest.library.lower() == "xgboost"
    default_settings = (0.3, 1.0) if is_xgboost else (0.1, 0.0)
    rate, penalty = computed_settings or default_settings
    return (
        rate if learning_rate is None else learning_rate,
        penalty if regularization is None else regularization,
        is_assumed,
    )


def settings_of_inner_nodes(forest: Forest) -> tuple[float, float] | None:
    """Compute the learning rate and the regularization from the values of inner nodes.

    The residuals of two children add up to those of their parent. This gives one linear equation per inner
    node.

    Args:
        forest: Boosted trees whose inner nodes store values that are not multiplied by the learning rate, as
            in files of XGBoost.

    Returns:
        Learning rate and regularization. None if the inner nodes store no values, or if their values do not
        determine the learning rate and the regularization.
    """
    rows, sides = [], []
    for tree in forest.trees[1:] if starts_in_first_tree(forest) else forest.trees:
        weight = tree.count if tree.weight is None else tree.weight
        if weight is None:
            return None
        # Leave out nodes with the value 0, because HistGradientBoosting does not store the values of roots
        # and writes 0 instead.
        parents = np.flatnonzero((tree.left != NO_CHILD) & (tree.value[:, 0] != 0))
        children = np.stack([tree.left[parents], tree.right[parents]], 1)
        is_leaf = tree.left[children] == NO_CHILD
        u, n = tree.value[:, 0], weight.astype(np.float64)
        weighted_values = u * n
        weighted_inner_children = np.where(is_leaf, 0.0, weighted_values[children]).sum(1)
        inner_children = np.where(is_leaf, 0.0, u[children]).sum(1)
        weighted_leaf_children = np.where(is_leaf, weighted_values[children], 0.0).sum(1)
        leaf_children = np.where(is_leaf, u[children], 0.0).sum(1)
        sides.append(weighted_values[parents] - weighted_inner_children)
        rows.append(
            np.stack([weighted_leaf_children, inner_children - u[parents], leaf_children], 1)
        )
    matrix, side = np.concatenate(rows), np.concatenate(sides)
    if len(side) < MIN_NODES or not np.isfinite(matrix).all() or not np.isfinite(side).all():
        return None
    column_norms = np.linalg.norm(matrix, axis=0)
    if not (column_norms > 0).all():
        return None
    solution, _, rank, _ = np.linalg.lstsq(matrix / column_norms, side, rcond=None)
    a, regularization, c = solution / column_norms
    misfit = np.linalg.norm(matrix @ (solution / column_norms) - side) / np.linalg.norm(side)
    agrees_with_ratio = abs(c - a * regularization) <= 0.01 * (1 + abs(c))
    if rank < 3 or a <= 0 or not misfit <= MAX_MISFIT or not agrees_with_ratio:
        return None
    return float(1 / a), float(regularization)
