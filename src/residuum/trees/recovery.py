"""Recover the training table of a forest from its structure.

1. The seeds give the counts ``c_ti`` (:mod:`.bootstrap`).
2. The values of leaves and roots give the targets (:mod:`.targets`).
3. A target links its record with a leaf in every tree (:mod:`.links`).
4. The nodes give intervals and equations for the columns (:mod:`.midpoints`). Narrower intervals allow more
   links, so 3 and 4 are repeated until nothing changes.
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

MAX_ROUNDS = 200  # of links and columns
MAX_PASSES = 50  # over the nodes of a column in one round
MIN_FILL = 0.3  # thresholds per step at which the values of a column are taken for a lattice


@dataclass(frozen=True)
class RecoveredTable:
    """The training table of a forest, as far as the file determines it.

    Attributes:
        y: (records,) targets in the order of the training table, NaN if not determined.
        low: (records, columns) lower ends of the intervals that hold the values.
        high: (records, columns) upper ends.
        is_exact: (records, columns) whether a value is determined.
        is_missing: (records, columns) whether a value is missing in the table.
        is_contradictory: (columns,) whether equations of a column disagree.
        has_row_order: Whether the records are in the order of the training table.
        rounds: Rounds of links and columns.
    """

    y: Floats
    low: Floats
    high: Floats
    is_exact: Booleans
    is_missing: Booleans
    is_contradictory: Booleans
    has_row_order: bool
    rounds: int

    @property
    def x(self) -> Floats:
        """(records, columns) the exact values, and the middle of the other intervals."""
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
        progress: Is called with a line of progress.

    Returns:
        The table. Its records are in the order of the training table if the file holds seeds and weights.
    """
    counts = bootstrap_counts(forest)
    leaves = group_leaves(forest)
    records = (
        records_without_seeds(leaves) if counts is None else find_records(forest, leaves, counts)
    )
    progress(f"{int((records.group >= 0).sum())} of {len(records.y)} targets")
    while True:
        search = Search.begin(forest, leaves, records, ranges)
        mistaken = search.run(progress)
        if records.has_row_order or not len(mistaken):
            return search.table()
        # Without seeds a value that seemed to belong to one record may belong to several.
        records = records.without_groups(np.unique(records.group[mistaken]))


@dataclass
class Search:
    """The search for the columns of some records.

    Attributes:
        forest: The forest.
        records: The records.
        linker: Links the records with leaves.
        low: (records, columns) lower ends of the intervals of the values.
        high: (records, columns) upper ends.
        is_exact: (records, columns) whether a value is determined.
        is_missing: (records, columns) whether a value is missing in the table.
        is_contradictory: (columns,) whether equations of a column disagree.
        lattices: Origin and step of the lattice of each column.
        edges: Equations of each column.
        rounds: Rounds of links and columns.
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
        """Link records with leaves as far as targets alone allow.

        Args:
            forest: The forest.
            leaves: Its leaves.
            records: The records.
            ranges: Smallest and largest value of each column, if known to the attacker.

        Returns:
            A search that knows the leaves, and of the columns only the ranges.
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
        """Use links, intervals and equations until nothing changes.

        Args:
            progress: Is called with a line of progress.

        Returns:
            The records whose leaves have no common box. The search ends as soon as there are some.
        """
        changed = True
        while changed and self.rounds < MAX_ROUNDS:
            self.rounds += 1
            members = Members.build(self.linker, len(self.low))
            nodes = [members.column_nodes(self.forest, f) for f in range(self.forest.columns)]
            if not self.records.has_row_order:
                mistaken = self._without_common_box(nodes)
                if len(mistaken):
                    return mistaken
            for f, column_nodes in enumerate(nodes):
                if column_nodes is None:
                    continue
                if self.forest.has_midpoints:
                    self._narrow(f, column_nodes, members.unknown)
                else:
                    low, high = column_nodes.boxes(len(self.low))
                    self.low[:, f] = np.maximum(self.low[:, f], low)
                    self.high[:, f] = np.minimum(self.high[:, f], high)
            changed = not self.linker.is_settled and self.linker.update(self.low, self.high) > 0
            progress(f"round {self.rounds}: {self.is_exact.mean():.1%} of all cells are exact")
        return np.zeros(0, dtype=np.int64)

    def _without_common_box(self, nodes: list[ColumnNodes | None]) -> Integers:
        """Return the records whose linked leaves have no point in common."""
        is_empty = np.zeros(len(self.low), dtype=bool)
        for column_nodes in nodes:
            if column_nodes is not None:
                low, high = column_nodes.boxes(len(self.low))
                missing, _ = column_nodes.missing_values(len(self.low))
                is_empty |= (low >= high) & ~missing
        return np.flatnonzero(is_empty)

    def _narrow(self, column: int, nodes: ColumnNodes, unknown: int) -> None:
        """Use the nodes of a column until nothing changes."""
        low, high, records = self.low[:, column], self.high[:, column], len(self.low)
        missing, doubtful = nodes.missing_values(records)
        has_missing = bool(missing.any())
        self.is_missing[:, column] = missing
        remaining = nodes.without(missing)
        if remaining is None:
            return
        nodes = remaining
        is_doubtful = np.concatenate([doubtful, np.ones(unknown, dtype=bool)]) & has_missing
        origin, step = self.lattices[column]
        values = Column(
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
        passes = 0
        while passes < MAX_PASSES and values.narrow():
            passes += 1
        self.low[:, column], self.high[:, column] = values.low[:records], values.high[:records]
        is_sure = ~is_doubtful[:records]  # a value that may be missing is never exact
        self.is_exact[:, column] = values.is_exact & is_sure
        self.is_contradictory[column] |= values.is_contradictory

    def table(self) -> RecoveredTable:
        """Return what was recovered. A contradictory column has no exact value."""
        return RecoveredTable(
            y=self.records.y,
            low=self.low,
            high=self.high,
            is_exact=self.is_exact & ~self.is_contradictory & ~self.is_missing,
            is_missing=self.is_missing,
            is_contradictory=self.is_contradictory,
            has_row_order=self.records.has_row_order,
            rounds=self.rounds,
        )


def _initial_intervals(
    shape: tuple[int, int], ranges: tuple[Floats, Floats] | None
) -> tuple[Floats, Floats]:
    if ranges is None:
        return np.full(shape, -np.inf), np.full(shape, np.inf)
    # Trees see float32 values.
    ends = (np.asarray(end, dtype=np.float32).astype(np.float64) for end in ranges)
    low, high = (np.repeat(end[None], shape[0], axis=0) for end in ends)
    return low, high


def _lattice(
    forest: Forest, column: int, ranges: tuple[Floats, Floats] | None
) -> tuple[float, float]:
    """Return the origin and the step of the values of a column if they form a lattice, else (0, 0).

    All thresholds must be midpoints of the lattice, and there must be enough of them for its length.
    """
    structure = forest.structure
    thresholds = structure.threshold[structure.feature == column]
    thresholds = np.unique(thresholds[np.isfinite(thresholds)])
    if ranges is None or not len(thresholds):
        return 0.0, 0.0
    origin, end = (float(np.float32(limit[column])) for limit in ranges)
    if not end > origin:
        return 0.0, 0.0
    steps = np.arange(1, int(len(thresholds) / MIN_FILL) + 1)
    positions = 2 * (thresholds - origin) / (end - origin)
    for tried in (positions[:: max(1, len(positions) // 16)], positions):  # most steps fail early
        half_steps = np.outer(steps, tried)
        steps = steps[np.abs(half_steps - np.rint(half_steps)).max(1) <= LATTICE_ERROR][:100]
    return (origin, (end - origin) / int(steps[0])) if len(steps) else (0.0, 0.0)


@dataclass(frozen=True)
class Members:
    """The members of all leaves, from left to right.

    Attributes:
        member: Records, and numbers from the number of records on for leaves with unknown records.
        starts: First entry of each leaf, and the number of entries.
        unknown: Number of leaves with unknown records.
    """

    member: Integers
    starts: Integers
    unknown: int

    @classmethod
    def build(cls, linker: Linker, records: int) -> Members:
        """Collect the members of each leaf.

        Args:
            linker: Links of records with leaves.
            records: Number of records.

        Returns:
            The members of all leaves.
        """
        trees, linked = np.nonzero(linker.leaf != UNKNOWN)
        incomplete = np.flatnonzero(~linker.is_complete)
        leaf = np.concatenate([linker.leaf[trees, linked], incomplete])
        member = np.concatenate([linked, records + np.arange(len(incomplete))])
        order = np.argsort(leaf, kind="stable")
        starts = np.searchsorted(leaf[order], np.arange(len(linker.is_complete) + 1))
        return cls(member[order], starts, len(incomplete))

    def column_nodes(self, forest: Forest, column: int) -> ColumnNodes | None:
        """Collect the nodes that split on a column, with the members below them.

        Args:
            forest: The forest.
            column: Number of the column.

        Returns:
            The nodes, None if no node splits on the column.
        """
        structure = forest.structure
        nodes = np.flatnonzero(structure.feature == column)
        if not len(nodes):
            return None
        first, middle, last = (
            self.starts[ends[nodes]] for ends in (structure.first, structure.middle, structure.last)
        )
        lengths = np.stack([middle - first, last - middle], 1).ravel()
        starts = np.concatenate([[0], np.cumsum(lengths)])
        offset = np.repeat(first - starts[:-1:2], last - first)
        side = np.repeat(np.arange(2 * len(nodes)), lengths)
        return ColumnNodes(
            threshold=structure.threshold[nodes],
            members=self.member[np.arange(starts[-1]) + offset],
            starts=starts[:-1],
            side=side,
            missing_left=structure.missing_left[nodes],
        )
