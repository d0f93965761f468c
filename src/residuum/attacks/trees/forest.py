"""The attack "forest": recover the training table of a random forest from its file.

The attack reads the trees of a release (:mod:`residuum.io.forests`), and computes the targets and the values
of the training records (:mod:`residuum.trees.recovery`). It needs no data and no queries. An attacker who
knows the smallest and the largest value of each column recovers more cells.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from residuum.errors import InputError
from residuum.io.forests import NamedForest, read_forests
from residuum.io.release import Release, open_release
from residuum.records import Knowledge
from residuum.records.recovered_table import RecoveredTable
from residuum.settings import AttackSettings
from residuum.trees.bootstrap import bootstrap_counts
from residuum.trees.forest import BOOSTING, ISOLATION, Floats, Forest
from residuum.trees.labels import find_labels
from residuum.trees.recovery import recover_table

NAME, SURFACE = "forest", "trees"


class ForestAttack(AttackSettings):
    """Recover the training table of a random forest from its trees."""

    def run(
        self,
        target: Release | NamedForest | str | Path,
        knowledge: Knowledge | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> RecoveredTable:
        """Recover the training table.

        Args:
            target: A release, the path of a release, or a forest that was read from a release.
            knowledge: What the attacker knows. The attack uses the ranges of the columns.
            progress: Function that receives a line of text in every round.

        Returns:
            The recovered table.

        Raises:
            InputError: If the attack does not apply to the forest.

        Example:
            >>> from residuum.attacks.trees.forest import ForestAttack
            >>> table = ForestAttack().run("forest.pkl")  # doctest: +SKIP
            >>> table.known_targets  # doctest: +SKIP
            442
        """
        model = target if isinstance(target, NamedForest) else read_forest(target)
        if reason := why_not(model.forest):
            raise InputError(
                f"The attack 'forest' does not apply: {reason}.",
                "To see what the trees in the file store, run `residuum scan FILE`.",
            )
        ranges = known_ranges(knowledge or Knowledge(), model.forest.columns)
        start_time = time.monotonic()
        if model.forest.is_classifier:
            table = recover_labels(model)
        else:
            table = recover_regression(model, ranges, progress)
        return table.replace(seconds=round(time.monotonic() - start_time, 3))


def read_forest(target: Release | str | Path) -> NamedForest:
    """Return the largest forest of a release.

    Args:
        target: The release, or its path.

    Returns:
        The forest.

    Raises:
        InputError: If the release holds no forest.
    """
    release = target if isinstance(target, Release) else open_release(target)
    forests = read_forests(release)
    if not forests:
        raise InputError(
            f"The attack 'forest' needs decision trees; {release.path.name!r} holds none.",
            "Pass the file of a random forest, or use another attack.",
        )
    return forests[0]


def why_not(forest: Forest) -> str:
    """Return why the attack does not apply to a forest, "" if it applies."""
    if forest.kind == BOOSTING:
        return (
            "trees of boosting are fitted to residuals, so their leaves do not store targets; the thresholds "
            "still show values of the columns"
        )
    if forest.kind == ISOLATION:
        return "trees of an isolation forest split at random and store no targets"
    return ""


def known_ranges(knowledge: Knowledge, columns: int) -> tuple[Floats, Floats] | None:
    """Return the smallest and the largest value of each column that the attacker knows.

    Args:
        knowledge: What the attacker knows.
        columns: Number of columns of the forest.

    Returns:
        (columns,) smallest and largest values, or None if the attacker knows no ranges.

    Raises:
        InputError: If the number of known ranges is not the number of columns.
    """
    if knowledge.column_ranges is not None:
        range_limits = knowledge.column_ranges.double().numpy()
        if range_limits.shape != (2, columns):
            raise InputError(
                f"The ranges of the columns must be two rows of {columns} numbers, as the forest has "
                f"{columns} columns; got shape {range_limits.shape}.",
                "Pass the smallest and the largest value of every column, in the order of the columns.",
            )
        return range_limits[0], range_limits[1]
    if knowledge.value_range is not None:
        low, high = knowledge.value_range
        return np.full(columns, low), np.full(columns, high)
    return None


def recover_regression(
    model: NamedForest,
    ranges: tuple[Floats, Floats] | None,
    progress: Callable[[str], None] = lambda text: None,
) -> RecoveredTable:
    """Recover the table of a regression forest.

    Args:
        model: The forest.
        ranges: Smallest and largest value of each column, if they are known to the attacker.
        progress: Function that receives a line of text in every round.

    Returns:
        The table.
    """
    table = recover_table(model.forest, ranges, progress)
    return RecoveredTable(
        model=model.name,
        trees=len(model.forest.trees),
        low=torch.from_numpy(table.low),
        high=torch.from_numpy(table.high),
        is_exact=torch.from_numpy(table.is_exact),
        is_likely=torch.from_numpy(table.is_likely),
        is_missing=torch.from_numpy(table.is_missing),
        targets=torch.from_numpy(table.y)[:, None],
        has_row_order=table.has_row_order,
        records_in_file=model.forest.records,
        names=model.forest.names,
    )


def recover_labels(model: NamedForest) -> RecoveredTable:
    """Recover the labels of a classification forest, if its seeds determine them.

    Args:
        model: The forest.

    Returns:
        A table without values of columns.
    """
    forest = model.forest
    sample_counts = bootstrap_counts(forest)
    labels = np.full(0, -1) if sample_counts is None else find_labels(forest, sample_counts)
    shape = (len(labels), forest.columns)
    no_cells = torch.zeros(shape, dtype=torch.bool)
    return RecoveredTable(
        model=model.name,
        trees=len(forest.trees),
        low=torch.full(shape, -torch.inf, dtype=torch.float64),
        high=torch.full(shape, torch.inf, dtype=torch.float64),
        is_exact=no_cells,
        is_likely=no_cells,
        is_missing=no_cells,
        targets=torch.from_numpy(np.where(labels < 0, np.nan, labels))[:, None],
        has_row_order=True,
        is_classifier=True,
        records_in_file=forest.records,
        names=forest.names,
    )
