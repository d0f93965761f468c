"""The attack "forest": recover the training table of a random forest from its file.

The attack reads the trees of a release (:mod:`residuum.io.forests`), and computes the targets and the values
of the training records (:mod:`residuum.trees.recovery`). The attack needs no data and no queries. An attacker
who knows the smallest and the largest value of each column recovers more cells of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from residuum.errors import InputError, MissingExtraError
from residuum.io.forests import NamedForest, read_forests
from residuum.io.release import Release, open_release
from residuum.records import Knowledge
from residuum.records.recovered_table import RecoveredTable
from residuum.settings.attack_settings import ForestSettings
from residuum.trees.bootstrap import bootstrap_counts
from residuum.trees.class_tables import SECONDS, ClassTable, recover_class_table, why_no_rows
from residuum.trees.forest import BOOSTING, ISOLATION, Floats, Forest, Integers
from residuum.trees.labels import find_labels
from residuum.trees.recovery import recover_table

NAME, SURFACE = "forest", "trees"
MANY_TABLES = (
    "Many tables fit the same forest, so the values are estimates. Each estimate is the mean over {} tables "
    "that fit the forest. The interval of each value contains its values in these tables."
)


class ForestAttack(ForestSettings):
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
                f"The attack 'forest' does not apply to these trees: {reason}.",
                "To see what the trees in the file store, run `residuum scan FILE`.",
            )
        ranges = known_ranges(knowledge or Knowledge(), model.forest.columns)
        start_time = time.monotonic()
        if model.forest.is_classifier:
            seconds = min(self.seconds, SECONDS) if self.rows else 0.0
            recovered_table = recover_labels(model, ranges, seconds, self.seed, progress)
        else:
            recovered_table = recover_regression(model, ranges, progress)
        return recovered_table.replace(seconds=round(time.monotonic() - start_time, 3))


def read_forest(target: Release | str | Path) -> NamedForest:
    """Return the largest forest of decision trees in a model file.

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
            f"The attack 'forest' needs a file with decision trees; {release.path.name!r} holds none.",
            "Pass the file of a random forest, or use another attack.",
        )
    return forests[0]


def why_not(forest: Forest) -> str:
    """Return why the training table cannot be recovered from a forest, "" if it can."""
    if forest.kind == BOOSTING:
        return (
            "trees of boosting are fitted to residuals, so their leaves do not store targets, but their "
            "thresholds still show values of the columns"
        )
    if forest.kind == ISOLATION:
        return "the trees of an isolation forest split at random and store no targets"
    return ""


def known_ranges(knowledge: Knowledge, columns: int) -> tuple[Floats, Floats] | None:
    """Return the value ranges of the columns that the attacker knows.

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
                f"The ranges of the columns must be an array of shape (2, {columns}), because the forest "
                f"has {columns} columns; got shape {range_limits.shape}.",
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
    """Recover the training table of a regression forest.

    Args:
        model: The forest.
        ranges: Smallest and largest value of each column, if they are known to the attacker.
        progress: Function that receives a line of text in every round.

    Returns:
        The table.
    """
    recovered_table = recover_table(model.forest, ranges, progress)
    return RecoveredTable(
        model=model.name,
        trees=len(model.forest.trees),
        low=torch.from_numpy(recovered_table.low),
        high=torch.from_numpy(recovered_table.high),
        is_exact=torch.from_numpy(recovered_table.is_exact),
        is_likely=torch.from_numpy(recovered_table.is_likely),
        is_missing=torch.from_numpy(recovered_table.is_missing),
        targets=torch.from_numpy(recovered_table.targets),
        has_row_order=recovered_table.has_row_order,
        records_in_file=model.forest.records,
        names=model.forest.names,
    )


def recover_labels(
    model: NamedForest,
    ranges: tuple[Floats, Floats] | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> RecoveredTable:
    """Recover the labels of a classification forest, if its seeds determine them, and estimate its rows.

    Args:
        model: The forest.
        ranges: Smallest and largest value of each column, if they are known to the attacker.
        seconds: Maximum wall-clock time of the search for rows. If 0, only the labels are recovered.
        seed: Seed of the search for rows.
        progress: Function that receives lines of text.

    Returns:
        A table with the labels and without exact values. Its values are estimates, or unknown if the search
        found no table that fits the forest.
    """
    forest = model.forest
    draw_counts = bootstrap_counts(forest)
    labels = np.full(0, -1) if draw_counts is None else find_labels(forest, draw_counts)
    progress(f"{int((labels >= 0).sum())} of {len(labels)} labels are known")
    rows, note = None, ""
    if draw_counts is not None and seconds > 0:
        rows, note = _estimate_rows(forest, draw_counts, labels, ranges, seconds, seed, progress)
    shape = (len(labels), forest.columns)
    no_flags = torch.zeros(shape, dtype=torch.bool)
    low, high = torch.full(shape, -torch.inf), torch.full(shape, torch.inf)
    return RecoveredTable(
        model=model.name,
        trees=len(forest.trees),
        low=low.double() if rows is None else torch.from_numpy(rows.low),
        high=high.double() if rows is None else torch.from_numpy(rows.high),
        is_exact=no_flags,
        is_likely=no_flags,
        is_missing=no_flags,
        targets=torch.from_numpy(np.where(labels < 0, np.nan, labels))[:, None],
        has_row_order=True,
        is_classifier=True,
        records_in_file=forest.records,
        names=forest.names,
        notes=(note,) if note else (),
        values=None if rows is None else torch.from_numpy(rows.values),
    )


def _estimate_rows(
    forest: Forest,
    counts: Integers,
    labels: Integers,
    ranges: tuple[Floats, Floats] | None,
    seconds: float,
    seed: int,
    progress: Callable[[str], None],
) -> tuple[ClassTable | None, str]:
    """Return estimates of the rows of a classification forest, and a note that explains them to the user.

    If the rows cannot be estimated, the estimates are None and the note states the reason.
    """
    if reason := why_no_rows(forest, labels):
        return None, f"The values of the columns were not estimated: {reason}."
    try:
        estimated_table = recover_class_table(
            forest, counts, labels, ranges, seconds, seed, progress
        )
    except MissingExtraError as problem:
        return None, f"The values of the columns were not estimated. {problem}"
    if estimated_table is None:
        return None, (
            "The values of the columns were not estimated: the search found no table that fits the forest "
            f"within {seconds:.3g} seconds."
        )
    return estimated_table, MANY_TABLES.format(estimated_table.tables)
