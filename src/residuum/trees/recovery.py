"""Recover the training table of a forest from its structure.

1. The seeds give the counts ``c_ti`` (:mod:`.bootstrap`).
2. The values of leaves and roots give the targets (:mod:`.targets`).
3. A target links its record with a leaf in every tree (:mod:`.links`).
4. The nodes give intervals and equations for the columns (:mod:`.midpoints`). Narrower intervals allow more links, so
   3 and 4 are repeated until nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from residuum.trees.anonymous import records_without_seeds
from residuum.trees.bootstrap import bootstrap_counts
from residuum.trees.forest import Booleans, Floats, Forest, Integers
from residuum.trees.leaves import group_leaves
from residuum.trees.links import UNKNOWN, Linker
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
        is_contradictory: (columns,) whether equations of a column disagree.
        has_row_order: Whether the records are in the order of the training table.
        rounds: Rounds of links and columns.
    """

    y: Floats
    low: Floats
    high: Floats
    is_exact: Booleans
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
    if counts is None:
        records = records_without_seeds(leaves)
    else:
        records = find_records(forest, leaves, counts)
    progress(f"{int((records.group >= 0).sum())} of {len(records.y)} targets")
    linker = Linker(forest, leaves, records)
    shape = (len(records.y), forest.columns)
    low, high = _initial_intervals(shape, ranges)
    is_exact = np.zeros(shape, dtype=bool)
    is_contradictory = np.zeros(forest.columns, dtype=bool)
    lattices = [_lattice(forest, f, ranges) for f in range(forest.columns)]
    edges: list[dict[tuple[int, int], float]] = [{} for _ in range(forest.columns)]
    rounds, changed = 0, True
    while changed and rounds < MAX_ROUNDS:
        changed, rounds = False, rounds + 1
        members = Members.build(linker, shape[0])
        for f in range(forest.columns):
            nodes = members.column_nodes(forest, f)
            if nodes is None:
                continue
            origin, step = lattices[f]
            column = Column(
                nodes=nodes,
                records=shape[0],
                low=np.concatenate([low[:, f], np.full(members.unknown, low[:, f].min())]),
                high=np.concatenate([high[:, f], np.full(members.unknown, high[:, f].max())]),
                origin=origin,
                step=step,
                tolerance=ROUNDING * float(np.abs(nodes.threshold).max()),
                is_exact=is_exact[:, f].copy(),
                edges=edges[f],
            )
            passes = 0
            while passes < MAX_PASSES and column.narrow():
                passes += 1
            low[:, f], high[:, f] = column.low[: shape[0]], column.high[: shape[0]]
            is_exact[:, f] |= column.is_exact
            is_contradictory[f] |= column.is_contradictory
        changed = not linker.is_settled and linker.update(low, high) > 0
        progress(f"round {rounds}: {is_exact.mean():.1%} of all cells are exact")
    return RecoveredTable(
        y=records.y,
        low=low,
        high=high,
        is_exact=is_exact,
        is_contradictory=is_contradictory,
        has_row_order=records.has_row_order,
        rounds=rounds,
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
    thresholds = np.unique(structure.threshold[structure.feature == column])
    if ranges is None or not len(thresholds):
        return 0.0, 0.0
    origin, end = (float(np.float32(limit[column])) for limit in ranges)
    for steps in range(1, int(len(thresholds) / MIN_FILL) + 1):
        step = (end - origin) / steps
        half_steps = 2 * (thresholds - origin) / step
        if step > 0 and np.abs(half_steps - np.rint(half_steps)).max() <= LATTICE_ERROR:
            return origin, step
    return 0.0, 0.0


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
        """Collect the members of each leaf."""
        trees, linked = np.nonzero(linker.leaf != UNKNOWN)
        incomplete = np.flatnonzero(~linker.is_complete)
        leaf = np.concatenate([linker.leaf[trees, linked], incomplete])
        member = np.concatenate([linked, records + np.arange(len(incomplete))])
        order = np.argsort(leaf, kind="stable")
        starts = np.searchsorted(leaf[order], np.arange(len(linker.is_complete) + 1))
        return cls(member[order], starts, len(incomplete))

    def column_nodes(self, forest: Forest, column: int) -> ColumnNodes | None:
        """Return the nodes that split on a column, None if there is none."""
        structure = forest.structure
        nodes = np.flatnonzero(structure.feature == column)
        if not len(nodes):
            return None
        first, middle, last = (
            self.starts[ends[nodes]]
            for ends in (structure.first, structure.middle, structure.last)
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
        )
