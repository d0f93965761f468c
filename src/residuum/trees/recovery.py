"""Recover the training table of a forest from its structure.

1. The seeds of the trees determine how often each tree drew each record (:mod:`.bootstrap`).
2. The values of leaves and roots determine the targets (:mod:`.targets`).
3. The target and the known values of a record tell which leaf of each tree holds it (:mod:`.links`).
4. The thresholds of nodes give intervals and equations for the values of the columns (:mod:`.midpoints`).
   Narrower intervals exclude more leaves in step 3. So steps 3 and 4 are repeated until nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from residuum.trees.anonymous import records_without_seeds
from residuum.trees.bootstrap import bootstrap_counts
from residuum.trees.forest import Booleans, Floats, Forest, Integers
from residuum.trees.leaves import Leaves, group_leaves
from residuum.trees.links import UNKNOWN, Linker, Records
from residuum.trees.midpoints import LATTICE_ERROR, ROUNDING, Column, ColumnNodes
from residuum.trees.targets import find_records

MAX_ROUNDS = (
    # Maximum number of rounds, which link records with leaves and narrow the intervals of values.
    200
)
MAX_PASSES = (
    # Maximum number of times, in one round, that the nodes of a column narrow the intervals of its values.
    50
)
# The values of a column can be exact only if their rounding error is at most this share of the column's
# range.
MAX_ERROR = 1e-5
# The values of a column are taken to lie on a lattice (equally spaced numbers) only if the number of distinct
# thresholds is at least this share of the number of lattice steps.
MIN_FILL = 0.3


@dataclass(frozen=True)
class RecoveredTable:
    """The training table of a forest, as far as the file determines it.

    Attributes:
        y: (records,) first target, NaN for a target that is not determined.
        targets: (records, targets) all targets.
        low: (records, columns) lower ends of the intervals that hold the values.
        high: (records, columns) upper ends of these intervals.
        is_exact: (records, columns) whether the value is determined exactly.
        is_likely: (records, columns) whether the value is determined under an assumption. If the file stores
            neither seeds nor numbers of records, the number of records that share a target is an estimate.
            The value is right if this estimate is right. Such a file has no exact values.
        is_missing: (records, columns) whether the value is missing in the training table.
        is_contradictory: (columns,) whether equations for the values of the column contradict each other.
        has_row_order: Whether the records are in the order of the training table.
        rounds: Number of rounds that the search took.
    """

    y: Floats
    targets: Floats
    low: Floats
    high: Floats
    is_exact: Booleans
    is_likely: Booleans
    is_missing: Booleans
    is_contradictory: Booleans
    has_row_order: bool
    rounds: int

    @property
    def x(self) -> Floats:
        """Estimates of the values (records, columns): the middle of the interval of each value."""
        return (self.low + self.high) / 2


def recover_table(
    forest: Forest,
    ranges: tuple[Floats, Floats] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> RecoveredTable:
    """Recover the training table of a regression forest.

    Args:
        forest: The forest.
        ranges: Smallest and largest value of each column, if they are known to the attacker.
        progress: Function that is called with a line of text in every round.

    Returns:
        The table. Its records are in the order of the training table if the file stores seeds and weights.
    """
    draw_counts = bootstrap_counts(forest)
    leaves = group_leaves(forest)
    records = (
        records_without_seeds(leaves)
        if draw_counts is None
        else find_records(forest, leaves, draw_counts)
    )
    # If no target can be recovered with the random seeds in the file, the seeds may be wrong, so continue
    # without them.
    if records.has_row_order and np.isnan(records.y).all():
        records = records_without_seeds(leaves)
    if not len(records.y):
        return _empty_table(forest.columns, leaves.all_targets.shape[1])
    progress(f"{int((records.group >= 0).sum())} of {len(records.y)} targets are known")
    while True:
        search = Search.begin(forest, leaves, records, ranges)
        mistaken_records = search.run(progress)
        if records.has_row_order or not len(mistaken_records):
            return search.table()
        # Without random seeds, a target that was assigned to one record may belong to several records. Then
        # the leaves of this record contradict each other, so the search begins again without this target.
        records = records.without_groups(np.unique(records.group[mistaken_records]))


@dataclass
class Search:
    """The state of the search for the values of training records.

    Attributes:
        forest: The forest.
        records: The training records with their targets.
        linker: Finds the leaves that hold each record.
        low: (records, columns) lower ends of the intervals that hold the values.
        high: (records, columns) upper ends of these intervals.
        is_exact: (records, columns) whether the value is determined exactly.
        is_missing: (records, columns) whether the value is missing in the training table.
        is_contradictory: (columns,) whether equations for the values of the column contradict each other.
        lattices: For each column, origin and step if all values have the form origin + k step with integers
            k, or (0, 0). These numbers are called a lattice.
        edges: For each column, equations x_a + x_b = total between records: the total for each pair (a, b).
        rounds: Number of rounds so far. A round links records with leaves and narrows the intervals.
    """

    forest: Forest
    records: Records
    linker: Linker
    low: Floats
    high: Floats
    is_exact: Booleans
    is_missing: Booleans
    is_contradictory: Booleans
    lattices: list[tuple[float, float]]
    edges: list[dict[tuple[int, int], float]]
    rounds: int = 0

    @classmethod
    def begin(
        cls,
        forest: Forest,
        leaves: Leaves,
        records: Records,
        ranges: tuple[Floats, Floats] | None,
    ) -> Search:
        """Begin a search, and link the records with the leaves that their targets determine.

        Args:
            forest: The forest.
            leaves: The leaves of the forest.
            records: The training records with their targets.
            ranges: Smallest and largest value of each column, if known to the attacker.

        Returns:
            A search whose intervals are the ranges of the columns.
        """
        shape = (len(records.y), forest.columns)
        low, high = _initial_intervals(shape, ranges)
        return cls(
            forest=forest,
            records=records,
            linker=Linker(forest, leaves, records),
            low=low,
            high=high,
            is_exact=np.zeros(shape, dtype=bool),
            is_missing=np.zeros(shape, dtype=bool),
            is_contradictory=np.zeros(forest.columns, dtype=bool),
            lattices=[_lattice(forest, f, ranges) for f in range(forest.columns)],
            edges=[{} for _ in range(forest.columns)],
        )

    def run(self, progress: Callable[[str], None]) -> Integers:
        """Narrow the intervals of values and link records with leaves, until nothing changes.

        Args:
            progress: Function that is called with a line of text in every round.

        Returns:
            Numbers of the records that were linked with leaves that contradict each other. If there are any,
            the search stops.
        """
        has_changed = True
        while has_changed and self.rounds < MAX_ROUNDS:
            self.rounds += 1
            leaf_members = Members.build(self.linker, len(self.low))
            nodes_by_column = [
                leaf_members.column_nodes(self.forest, f) for f in range(self.forest.columns)
            ]
            if not self.records.has_row_order:
                mistaken_records = self._without_common_box(nodes_by_column)
                if len(mistaken_records):
                    return mistaken_records
            for f, column_nodes in enumerate(nodes_by_column):
                if column_nodes is None:
                    continue
                if self.forest.has_midpoints:
                    self._narrow(f, column_nodes, leaf_members.unknown)
                else:
                    low, high = column_nodes.boxes(len(self.low))
                    self.low[:, f] = np.maximum(self.low[:, f], low)
                    self.high[:, f] = np.minimum(self.high[:, f], high)
            has_changed = not self.linker.is_settled and self.linker.update(self.low, self.high) > 0
            progress(f"round {self.rounds}: {self.is_exact.mean():.1%} of all values are exact")
        return np.zeros(0, dtype=np.int64)

    def _without_common_box(self, nodes: list[ColumnNodes | None]) -> Integers:
        """Return the records that are linked with leaves that contradict each other.

        In some column, no value leads to all leaves with which such a record is linked.
        """
        has_no_common_value = np.zeros(len(self.low), dtype=bool)
        for column_nodes in nodes:
            if column_nodes is not None:
                low, high = column_nodes.boxes(len(self.low))
                missing, _ = column_nodes.missing_values(len(self.low))
                has_no_common_value |= (low >= high) & ~missing
        return np.flatnonzero(has_no_common_value)

    def _narrow(self, column: int, nodes: ColumnNodes, unknown: int) -> None:
        """Narrow the intervals of the values of a column with the nodes that split it, until nothing changes.

        Args:
            column: Number of the column.
            nodes: The nodes that split the column.
            unknown: Number of leaves whose records are not all known.
        """
        low, high, records = self.low[:, column], self.high[:, column], len(self.low)
        missing, doubtful = nodes.missing_values(records)
        has_missing = bool(missing.any())
        self.is_missing[:, column] = missing
        nodes_without_missing = nodes.without(missing)
        if nodes_without_missing is None:
            return
        nodes = nodes_without_missing
        is_doubtful = np.concatenate([doubtful, np.ones(unknown, dtype=bool)]) & has_missing
        origin, step = self.lattices[column]
        column_values = Column(
            nodes=nodes,
            records=records,
            low=np.concatenate([low, np.full(unknown, low.min(initial=np.inf))]),
            high=np.concatenate([high, np.full(unknown, high.max(initial=-np.inf))]),
            origin=origin,
            step=step,
            tolerance=ROUNDING * float(np.abs(nodes.threshold).max()),
            is_exact=self.is_exact[:, column].copy(),
            is_doubtful=is_doubtful,
            edges=self.edges[column],
        )
        pass_count = 0
        while pass_count < MAX_PASSES and column_values.narrow():
            pass_count += 1
        self.low[:, column], self.high[:, column] = (
            column_values.low[:records],
            column_values.high[:records],
        )
        # If a value may be missing, it does not count as exact.
        is_sure = ~is_doubtful[:records]
        self.is_exact[:, column] = column_values.is_exact & is_sure
        self.is_contradictory[column] |= column_values.is_contradictory

    def table(self) -> RecoveredTable:
        """Make the recovered table. Columns with contradictory equations have no exact values."""
        is_determined = self.is_exact & ~self.is_contradictory & ~self.is_missing
        low, high = self.low, self.high
        if self.forest.has_rounded_thresholds:
            error, is_coarse = self._rounding_errors()
            is_determined &= ~is_coarse
            low = np.where(is_determined, low, low - error)
            high = np.where(is_determined, high, high + error)
        knows_counts = self.records.has_row_order or self.linker.leaves.count is not None
        return RecoveredTable(
            y=self.records.y,
            targets=self.records.all_targets,
            low=low,
            high=high,
            is_exact=is_determined & knows_counts,
            is_likely=is_determined & (not knows_counts),
            is_missing=self.is_missing,
            is_contradictory=self.is_contradictory,
            has_row_order=self.records.has_row_order,
            rounds=self.rounds,
        )

    def _rounding_errors(self) -> tuple[Floats, Booleans]:
        """Estimate the rounding errors of recovered values, and which columns cannot be exact.

        If the thresholds in the file are rounded, the values computed from them have rounding errors. If the
        error is more than ``MAX_ERROR`` times the range of a column, the column has no exact values.

        Returns:
            (columns,) errors, and (columns,) whether the error is too large for exact values.
        """
        structure = self.forest.structure
        error, is_coarse = np.zeros(len(self.edges)), np.zeros(len(self.edges), dtype=bool)
        for f, (_, step) in enumerate(self.lattices):
            threshold = structure.threshold[structure.feature == f]
            threshold = threshold[np.isfinite(threshold)]
            if len(threshold):
                error[f] = ROUNDING * np.abs(threshold).max()
                is_coarse[f] = error[f] > max(MAX_ERROR * np.ptp(threshold), LATTICE_ERROR * step)
        return error, is_coarse


def _empty_table(columns: int, targets: int) -> RecoveredTable:
    """Return a table without records, for a forest whose file identifies no record."""
    values, flags = np.zeros((0, columns)), np.zeros((0, columns), dtype=bool)
    no_flags = np.zeros(columns, dtype=bool)
    return RecoveredTable(
        y=np.zeros(0),
        targets=np.zeros((0, targets)),
        low=values,
        high=values,
        is_exact=flags,
        is_likely=flags,
        is_missing=flags,
        is_contradictory=no_flags,
        has_row_order=False,
        rounds=0,
    )


def _initial_intervals(
    shape: tuple[int, int], ranges: tuple[Floats, Floats] | None
) -> tuple[Floats, Floats]:
    if ranges is None:
        return np.full(shape, -np.inf), np.full(shape, np.inf)
    # Round the known ranges to float32, because trees compare float32 values with thresholds.
    range_ends = (np.asarray(end, dtype=np.float32).astype(np.float64) for end in ranges)
    low, high = (np.repeat(end[None], shape[0], axis=0) for end in range_ends)
    return low, high


def _lattice(
    forest: Forest, column: int, ranges: tuple[Floats, Floats] | None
) -> tuple[float, float]:
    """Return the origin and the step of the lattice on which the values of a column lie, or (0, 0).

    A lattice is a set of numbers origin + k step with integers k. The values are taken to lie on a lattice if
    all thresholds are midpoints of lattice numbers, and if the lattice has few steps for the number of
    thresholds.
    """
    structure = forest.structure
    thresholds = structure.threshold[structure.feature == column]
    thresholds = np.unique(thresholds[np.isfinite(thresholds)])
    if ranges is None or not len(thresholds):
        return 0.0, 0.0
    origin, end = (float(np.float32(limit[column])) for limit in ranges)
    if not end > origin:
        return 0.0, 0.0
    step_counts = np.arange(1, int(len(thresholds) / MIN_FILL) + 1)
    threshold_positions = 2 * (thresholds - origin) / (end - origin)
    for positions in (
        threshold_positions[:: max(1, len(threshold_positions) // 16)],
        threshold_positions,
    ):  # 16 thresholds exclude most step sizes
        threshold_half_steps = np.outer(step_counts, positions)
        step_counts = step_counts[
            np.abs(threshold_half_steps - np.rint(threshold_half_steps)).max(1) <= LATTICE_ERROR
        ][:100]
    return (origin, (end - origin) / int(step_counts[0])) if len(step_counts) else (0.0, 0.0)


@dataclass(frozen=True)
class Members:
    """The known records of every leaf of a forest.

    A leaf whose records are not all known has one more entry, which represents its unknown records.

    Attributes:
        member: Numbers of the records, leaf after leaf. An entry that represents unknown records has a number
            that is no record number: the number of records, the next integer, and so on.
        starts: Position in ``member`` of the first entry of each leaf, then the number of all entries.
        unknown: Number of leaves with unknown records.
    """

    member: Integers
    starts: Integers
    unknown: int

    @classmethod
    def build(cls, linker: Linker, records: int) -> Members:
        """Collect the known records of each leaf.

        Args:
            linker: The links of records with leaves.
            records: Number of records.

        Returns:
            The records of all leaves, with an entry for the unknown records of a leaf.
        """
        trees, linked = np.nonzero(linker.leaf != UNKNOWN)
        incomplete_leaves = np.flatnonzero(~linker.is_complete)
        leaves = np.concatenate([linker.leaf[trees, linked], incomplete_leaves])
        member_numbers = np.concatenate([linked, records + np.arange(len(incomplete_leaves))])
        leaf_order = np.argsort(leaves, kind="stable")
        starts = np.searchsorted(leaves[leaf_order], np.arange(len(linker.is_complete) + 1))
        return cls(member_numbers[leaf_order], starts, len(incomplete_leaves))

    def column_nodes(self, forest: Forest, column: int) -> ColumnNodes | None:
        """Collect the nodes of all trees that split one column, with the records below each node.

        Args:
            forest: The forest.
            column: Number of the column.

        Returns:
            The nodes, or None if no node splits the column.
        """
        structure = forest.structure
        split_nodes = np.flatnonzero(structure.feature == column)
        if not len(split_nodes):
            return None
        first, middle, last = (
            self.starts[ends[split_nodes]]
            for ends in (structure.first, structure.middle, structure.last)
        )
        side_sizes = np.stack([middle - first, last - middle], 1).ravel()
        side_starts = np.concatenate([[0], np.cumsum(side_sizes)])
        position_shifts = np.repeat(first - side_starts[:-1:2], last - first)
        side_of_entry = np.repeat(np.arange(2 * len(split_nodes)), side_sizes)
        return ColumnNodes(
            threshold=structure.threshold[split_nodes],
            members=self.member[np.arange(side_starts[-1]) + position_shifts],
            starts=side_starts[:-1],
            side=side_of_entry,
            missing_left=structure.missing_left[split_nodes],
        )
