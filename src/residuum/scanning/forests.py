"""Find what the trees of a model file determine about its training table, by recovering the table.

A scan has no data. It recovers the table of a forest (:mod:`residuum.trees.recovery`) and reports how many
targets, cells and rows the file determines. An attacker who knows the ranges of the columns recovers more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from residuum.trees.bootstrap import bootstrap_counts
from residuum.trees.forest import AVERAGE, BOOSTING, Forest
from residuum.trees.labels import find_labels
from residuum.trees.recovery import recover_table
from residuum.trees.stored_values import find_stored_values

# Largest number of nodes of a forest whose training table a scan recovers. This takes some seconds.
MAX_NODES = 500_000
# Largest product of the numbers of trees and records for which a scan recovers labels. Recovering labels
# solves a linear program, which takes long for large forests.
MAX_LABEL_WORK = 100_000
ADVICE = (
    "Do not release this file. Train again with at least 5 records in every leaf (min_samples_leaf=5) and "
    "with fewer trees than records, and remove the seeds (random_state) and impurities of the trees before "
    "saving. Removing seeds, counts, impurities or inner values alone does not help."
)
LIMIT_LEAVES = (
    "Train with at least 5 records in every leaf (min_samples_leaf=5) and with fewer trees than records. "
    "Bagging and removing the counts do not help."
)


@dataclass(frozen=True)
class TreeFinding:
    """What the trees of a model determine about its training table.

    Attributes:
        reveals_records: Whether the trees determine targets or values of training records.
        what: What was found, in a few words.
        reason: What the trees reveal.
        count: Number of records with a determined target, None if it was not measured.
    """

    reveals_records: bool
    what: str
    reason: str
    count: int | None = None


def describe_trees(name: str, forest: Forest) -> Iterator[TreeFinding]:
    """Yield findings about the training table that follow from the trees of a model.

    Args:
        name: Class of the model.
        forest: The trees.

    Yields:
        One finding, or none if the forest is too large for a scan.
    """
    node_count = sum(len(tree.left) for tree in forest.trees)
    if forest.kind == BOOSTING:
        stored_values = find_stored_values(forest)
        reason = " ".join(line.rstrip(".") + "." for line in stored_values.lines).rstrip(".")
        yield TreeFinding(
            False,
            f"decision trees of {name}",
            reason,
            stored_values.threshold_count,
        )
        return
    if forest.kind != AVERAGE or node_count > MAX_NODES:
        return
    if forest.is_classifier:
        yield _describe_classifier(name, forest)
    else:
        yield _describe_regressor(name, forest)


def _describe_regressor(name: str, forest: Forest) -> TreeFinding:
    recovered_table = recover_table(forest)
    target_count = int((~np.isnan(recovered_table.y)).sum())
    if not target_count:
        return TreeFinding(
            False,
            f"decision trees of {name}",
            "Thresholds lie between two values of training records. The targets of single records could not "
            "be recovered",
        )
    is_cell_known = (
        recovered_table.is_exact | recovered_table.is_likely | recovered_table.is_missing
    )
    certainty = "likely" if recovered_table.is_likely.any() else "exact"
    record_count = forest.records or len(recovered_table.y)
    order_note = " in the order of the training table" if recovered_table.has_row_order else ""
    reason = (
        f"The file determines the targets of {target_count} of {record_count} training records"
        f"{order_note}"
    )
    if is_cell_known.any():
        known_rows = int(is_cell_known.all(1).sum())
        reason += (
            f". {is_cell_known.mean():.1%} of all cells of the training table follow from the thresholds "
            f"({certainty} values), and {known_rows} rows are known in every column. An attacker who knows "
            "the smallest and largest value of each column recovers more"
        )
    return TreeFinding(True, f"the training table in the trees of {name}", reason, target_count)


def _describe_classifier(name: str, forest: Forest) -> TreeFinding:
    draw_counts = bootstrap_counts(forest)
    known_labels = 0
    if draw_counts is not None and draw_counts.size <= MAX_LABEL_WORK:
        known_labels = int((find_labels(forest, draw_counts) >= 0).sum())
    if known_labels:
        assert draw_counts is not None
        return TreeFinding(
            True,
            f"training labels in the roots of {name}",
            f"The seeds and the roots of the trees determine the labels of {known_labels} of "
            f"{draw_counts.shape[1]} training records, in the order of the training table",
            known_labels,
        )
    return TreeFinding(
        False,
        f"decision trees of {name}",
        "Thresholds lie between two values of training records, and leaves count their records",
    )
