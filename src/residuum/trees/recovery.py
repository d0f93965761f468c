"""Recover the training table of a forest from its structure.

1. The seeds of the trees determine how often each tree drew each record (:mod:`.bootstrap`).
2. The values of leaves and roots determine the targets (:mod:`.targets`).
3. The target of a record tells which leaf of every tree holds this record (:mod:`.links`).
4. The thresholds of nodes give intervals and equations for the values of the columns (:mod:`.midpoints`).
   Narrower intervals link more records with leaves, so steps 3 and 4 are repeated until nothing changes.
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

MAX_ROUNDS = 200  # maximum number of rounds, each of which links records and narrows the columns
MAX_PASSES = 50  # maximum number of passes over the nodes of a column in one round
# The values of a column count as a lattice if there is at least this number of thresholds per lattice step.
MIN_FILL = 0.3


@dataclass(frozen=True)
class RecoveredTable:
    """The training table of a forest, as far as the file determines it.

    Attributes:
        y: (records,) targets, NaN for a target that is not determined.
        low: (records, columns) lower ends of the intervals that hold the values.
        high: (records, columns) upper ends of these intervals.
        is_exact: (records, columns) whether the value is determined exactly.
        is_likely: (records, columns) whether the value is determined if every leaf value was attributed to
            the right number of records. This number is an estimate if the file stores neither seeds nor
            counts, so no value of such a file is exact.
        is_missing: (records, columns) whether the value is missing in the training table.
        is_contradictory: (columns,) whether equations for the values of the column contradict each other.
        has_row_order: Whether the records are in the order of the training table.
        rounds: Number of rounds that the search took.
    """

    y: Floats
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
        """(records, columns) estimates of the values: exact values, or else the middle of the interval."""
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
    counts = bootstrap_counts(forest)
    leaves = group_leaves(forest)
    records = (
        records_without_seeds(leaves) if counts is None else find_records(forest, leaves, counts)
    )
    if records.has_row_order and np.isnan(records.y).all():  # the seeds may have been overwritten
        records = records_without_seeds(leaves)
    if not len(records.y):
        return _empty_table(forest.columns)
    progress(f"{int((records.group >= 0).sum())} of {len(records.y)} targets are known")
    while True:
        search = Search.begin(forest, leaves, records, ranges)
        mistaken_records = search.run(progress)
        if records.has_row_order or not len(mistaken_records):
            return search.table()
        # Without seeds a value that seemed to belong to one record may belong to several.
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
        lattices: For each column, origin and step of the lattice on which its values lie, or (0, 0).
        edges: For each column, equations x_a + x_b = total between records, as total by pair (a, b).
        rounds: Number of rounds so far.
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
        """Begin a search: link records with leaves as far as their targets determine the links.

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
            The records that were linked with contradictory leaves. The search stops at the first of them.
        """
        has_changed = True
        while has_changed and self.rounds < MAX_ROUNDS:
            self.rounds += 1
            members = Members.build(self.linker, len(self.low))
            nodes = [members.column_nodes(self.forest, f) for f in range(self.forest.columns)]
            if not self.records.has_row_order:
                mistaken_records = self._without_common_box(nodes)
                if len(mistaken_records):
                    return mistaken_records
            for f, column_nodes in enumerate(nodes):
                if column_nodes is None:
                    continue
                if self.forest.has_midpoints:
                    self._narrow(f, column_nodes, members.unknown)
                else:
                    low, high = column_nodes.boxes(len(self.low))
                    self.low[:, f] = np.maximum(self.low[:, f], low)
                    self.high[:, f] = np.minimum(self.high[:, f], high)
            has_changed = not self.linker.is_settled and self.linker.update(self.low, self.high) > 0
            progress(f"round {self.rounds}: {self.is_exact.mean():.1%} of all values are exact")
        return np.zeros(0, dtype=np.int64)

    def _without_common_box(self, nodes: list[ColumnNodes | None]) -> Integers:
        """Return the records that are linked with leaves whose boxes have no point in common."""
        is_empty = np.zeros(len(self.low), dtype=bool)
        for column_nodes in nodes:
            if column_nodes is not None:
                low, high = column_nodes.boxes(len(self.low))
                missing, _ = column_nodes.missing_values(len(self.low))
                is_empty |= (low >= high) & ~missing
        return np.flatnonzero(is_empty)

    def _narrow(self, column: int, nodes: ColumnNodes, unknown: int) -> None:
        """Narrow the intervals of a column by its nodes, until nothing changes.

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
        is_sure = ~is_doubtful[:records]  # a value that may be missing is never exact
        self.is_exact[:, column] = column_values.is_exact & is_sure
        self.is_contradictory[column] |= column_values.is_contradictory

    def table(self) -> RecoveredTable:
        """Return the recovered table. Columns with contradictory equations have no exact values."""
        is_determined = self.is_exact & ~self.is_contradictory & ~self.is_missing
        knows_counts = self.records.has_row_order or self.linker.leaves.count is not None
        return RecoveredTable(
            y=self.records.y,
            low=self.low,
            high=self.high,
            is_exact=is_determined & knows_counts,
            is_likely=is_determined & (not knows_counts),
            is_missing=self.is_missing,
            is_contradictory=self.is_contradictory,
            has_row_order=self.records.has_row_order,
            rounds=self.rounds,
        )


def _empty_table(columns: int) -> RecoveredTable:
    """Return a table without records, for a forest whose records cannot be told apart."""
    values, flags = np.zeros((0, columns)), np.zeros((0, columns), dtype=bool)
    no_column = np.zeros(columns, dtype=bool)
    return RecoveredTable(
        np.zeros(0), values, values, flags, flags, flags, no_column, has_row_order=False, rounds=0
    )


def _initial_intervals(
    shape: tuple[int, int], ranges: tuple[Floats, Floats] | None
) -> tuple[Floats, Floats]:
    if ranges is None:
        return np.full(shape, -np.inf), np.full(shape, np.inf)
    # Trees compare float32 values with thresholds.
    ends = (np.asarray(end, dtype=np.float32).astype(np.float64) for end in ranges)
    low, high = (np.repeat(end[None], shape[0], axis=0) for end in ends)
    return low, high


def _lattice(
    forest: Forest, column: int, ranges: tuple[Floats, Floats] | None
) -> tuple[float, float]:
    """Return the origin and the step of the lattice on which the values of a column lie, or (0, 0).

    The column counts as a lattice if all thresholds are midpoints of lattice values, and if there are enough
    thresholds per lattice step.
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
    for tried in (
        threshold_positions[:: max(1, len(threshold_positions) // 16)],
        threshold_positions,
    ):  # 16 thresholds exclude most step sizes
        threshold_half_steps = np.outer(step_counts, tried)
        step_counts = step_counts[
            np.abs(threshold_half_steps - np.rint(threshold_half_steps)).max(1) <= LATTICE_ERROR
        ][:100]
    return (origin, (end - origin) / int(step_counts[0])) if len(step_counts) else (0.0, 0.0)


@dataclass(frozen=True)
class Members:
    """The known records of all leaves of a forest, from left to right.

    A leaf whose records are not all known has one more entry, which stands for its unknown records.

    Attributes:
        member: Numbers of records. Entries for unknown records have numbers from the number of records on.
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
        members = np.concatenate([linked, records + np.arange(len(incomplete_leaves))])
        by_leaf = np.argsort(leaves, kind="stable")
        starts = np.searchsorted(leaves[by_leaf], np.arange(len(linker.is_complete) + 1))
        return cls(members[by_leaf], starts, len(incomplete_leaves))

    def column_nodes(self, forest: Forest, column: int) -> ColumnNodes | None:
        """Collect the nodes that split a column, with the records below each node.

        Args:
            forest: The forest.
            column: Number of the column.

        Returns:
            The nodes, or None if no node splits the column.
        """
        structure = forest.structure
        nodes = np.flatnonzero(structure.feature == column)
        if not len(nodes):
            return None
        first, middle, last = (
            self.starts[ends[nodes]] for ends in (structure.first, structure.middle, structure.last)
        )
        side_sizes = np.stack([middle - first, last - middle], 1).ravel()
        side_starts = np.concatenate([[0], np.cumsum(side_sizes)])
        offsets = np.repeat(first - side_starts[:-1:2], last - first)
        sides = np.repeat(np.arange(2 * len(nodes)), side_sizes)
        return ColumnNodes(
            threshold=structure.threshold[nodes],
            members=self.member[np.arange(side_starts[-1]) + offsets],
            starts=side_starts[:-1],
            side=sides,
            missing_left=structure.missing_left[nodes],
        )
