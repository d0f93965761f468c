"""Which leaf of each tree holds a training record.

A record i that tree t drew lies in a leaf of t whose value is the target of the record. If only one such
leaf is left, it holds the record. If only one such record is left for a leaf, the leaf holds this record.
A leaf and a record fit if the leaf has room for the weight ``c_ti`` of the record, and if the box of the
leaf overlaps the intervals of the record.

A leaf is complete if its known records are all its records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from residuum.trees.forest import Floats, Forest, Integers, Structure
from residuum.trees.leaves import MIXED, Leaves
from residuum.trees.subsets import find_members

MANY_LEAVES = 1000  # from here on all trees are looked at together
UNKNOWN = -1  # count of a record in a tree, or number of a leaf


@dataclass(frozen=True)
class Records:
    """Training records with their targets.

    Attributes:
        y: (records,) targets, NaN if not known.
        group: (records,) group of the target among the values of leaves, -1 if there is none.
        counts: (trees, records) how often each tree drew each record, -1 if not known.
        has_row_order: Whether the records are in the order of the training table.
        links: (tree, record, leaf) that are known from the start.
    """

    y: Floats
    group: Integers
    counts: Integers
    has_row_order: bool
    links: tuple[tuple[int, int, int], ...] = ()

    def without_groups(self, groups: Integers) -> Records:
        """Return the records whose targets are in none of these groups."""
        stays = ~np.isin(self.group, groups)
        number = np.cumsum(stays) - 1
        links = tuple((t, int(number[i]), leaf) for t, i, leaf in self.links if stays[i])
        return Records(
            self.y[stays], self.group[stays], self.counts[:, stays], self.has_row_order, links
        )


class Linker:
    """Links records with leaves, as far as the columns of the records are known.

    Args:
        forest: The forest.
        leaves: Its leaves.
        records: The records.

    Attributes:
        leaf: (trees, records) leaf of each record, -1 if the tree did not draw it, or if it is not known.
        is_complete: (leaves,) whether the known records of a leaf are all its records.
    """

    def __init__(self, forest: Forest, leaves: Leaves, records: Records) -> None:
        self.structure, self.leaves, self.records = forest.structure, leaves, records
        self.leaf = np.full(records.counts.shape, UNKNOWN)
        self.is_complete = np.zeros(len(leaves.group), dtype=bool)
        self.boxes: dict[int, list[tuple[int, float, float]]] = {}
        by_group: dict[int, list[int]] = {}
        for i, group in enumerate(records.group.tolist()):
            by_group.setdefault(group, []).append(i)
        self.by_group = {group: np.array(rows) for group, rows in by_group.items()}
        for tree, record, leaf in records.links:
            self.leaf[tree, record] = leaf
        self._mark_complete(np.array([leaf for _, _, leaf in records.links], dtype=np.int64))
        self._link_single_records()
        self.open = self._open_leaves()

    @property
    def is_settled(self) -> bool:
        """Whether no leaf is left that could be linked."""
        mixed = self.records.has_row_order and self.leaves.has_mixed
        return not len(self.open) and not (mixed and not self.is_complete.all())

    def update(self, low: Floats, high: Floats) -> int:
        """Link what can be linked.

        Args:
            low: (records, columns) lower ends of the intervals of the records.
            high: (records, columns) upper ends.

        Returns:
            The number of new links.
        """
        before = int((self.leaf != UNKNOWN).sum())
        if self.records.has_row_order and self.leaves.has_mixed:
            self._link_subsets(low, high)
        for tree, group in sorted({(self._tree(v), self._group(v)) for v in self.open}):
            self._link_group(tree, group, low, high)
        self.open = self._open_leaves()
        return int((self.leaf != UNKNOWN).sum()) - before

    def _tree(self, leaf: int) -> int:
        return int(self.structure.leaf_tree[leaf])

    def _group(self, leaf: int) -> int:
        return int(self.leaves.group[leaf])

    def _link_single_records(self) -> None:
        """Link the only record of each group with the only leaf of this group in each tree."""
        group, leaf_tree = self.leaves.group, self.structure.leaf_tree
        size = len(self.leaves.values)
        pure = np.flatnonzero(group >= 0)
        per_tree = np.bincount(
            leaf_tree[pure] * size + group[pure], minlength=size * len(self.leaf)
        )
        record_of = np.full(size, UNKNOWN)
        for number, rows in self.by_group.items():
            if number >= 0 and len(rows) == 1:
                record_of[number] = rows[0]
        record = record_of[group[pure]]
        single = (per_tree[leaf_tree[pure] * size + group[pure]] == 1) & (record != UNKNOWN)
        is_drawn = self.records.counts[leaf_tree[pure], record] != 0
        chosen = pure[single & is_drawn]
        self.leaf[leaf_tree[chosen], record_of[group[chosen]]] = chosen
        self._mark_complete(chosen)

    def _open_leaves(self) -> list[int]:
        has_records = np.isin(self.leaves.group, list(self.by_group))
        return np.flatnonzero(has_records & (self.leaves.group >= 0) & ~self.is_complete).tolist()

    def _link_group(self, tree: int, group: int, low: Floats, high: Floats) -> None:
        """Link the records of one group with the leaves of one tree, until nothing changes."""
        rows, counts = self.by_group[group], self.records.counts[tree]
        changed = True
        while changed:
            changed = False
            leaves = [v for v in self.leaves.select(tree, group) if not self.is_complete[v]]
            free = [i for i in rows.tolist() if self.leaf[tree, i] == UNKNOWN and counts[i] != 0]
            fits = {
                (v, i): self._may_hold(v, tree, i, low[i], high[i]) for v in leaves for i in free
            }
            for i in free:
                fitting = [v for v in leaves if fits[v, i]]
                if len(fitting) == 1 and counts[i] != UNKNOWN:
                    self.leaf[tree, i] = fitting[0]
                    changed = True
            for v in leaves:
                fitting = [i for i in free if fits[v, i] and self.leaf[tree, i] == UNKNOWN]
                if len(fitting) == 1 and self._needs_one(v, tree, fitting[0]):
                    self.leaf[tree, fitting[0]] = v
                    changed = True
            self._mark_complete(np.array(leaves, dtype=np.int64))

    def _link_subsets(self, low: Floats, high: Floats) -> None:
        """Link mixed leaves with the only records that have their mean."""
        if self.leaves.count is None or self.leaves.weight is None or self.leaves.impurity is None:
            return
        y = self.records.y
        spread = float(np.nanstd(y)) if not np.isnan(y).all() else 0.0
        small = (self.leaves.group == MIXED) & (self.leaves.count <= 3) & ~self.is_complete
        for leaf in np.flatnonzero(small).tolist():
            tree = self._tree(leaf)
            counts = self.records.counts[tree]
            free = np.flatnonzero((counts > 0) & (self.leaf[tree] == UNKNOWN) & ~np.isnan(y))
            for column, below, above in self._box(leaf):
                free = free[(high[free, column] >= below) & (low[free, column] <= above)]
            members = find_members(self.leaves, leaf, y[free], counts[free], spread)
            if members is not None:
                self.leaf[tree, free[members]] = leaf
                self.is_complete[leaf] = True

    def _needs_one(self, leaf: int, tree: int, record: int) -> bool:
        """Return whether the leaf has exactly one record that is not linked yet."""
        linked = int((self.leaf[tree] == leaf).sum())
        if self.leaves.count is not None:
            return int(self.leaves.count[leaf]) == linked + 1
        return linked == 0

    def _may_hold(self, leaf: int, tree: int, record: int, low: Floats, high: Floats) -> bool:
        """Return whether a leaf has room for a record, and a box that overlaps its intervals."""
        count = self.records.counts[tree, record]
        weight = self.leaves.weight
        if weight is not None and count != UNKNOWN:
            used = self.records.counts[tree, self.leaf[tree] == leaf].sum()
            if count > weight[leaf] - used:
                return False
        return all(
            high[column] >= below and low[column] <= above
            for column, below, above in self._box(leaf)
        )

    def _box(self, leaf: int) -> list[tuple[int, float, float]]:
        if leaf not in self.boxes:
            self.boxes[leaf] = leaf_box(self.structure, leaf)
        return self.boxes[leaf]

    def _mark_complete(self, leaves: Integers) -> None:
        """Update ``is_complete`` of some leaves of one tree, or of all leaves."""
        if not len(leaves):
            return
        same_tree = len(leaves) < MANY_LEAVES and len(set(self.structure.leaf_tree[leaves])) == 1
        rows = slice(self._tree(leaves[0]), self._tree(leaves[0]) + 1) if same_tree else slice(None)
        linked = self.leaf[rows][self.leaf[rows] != UNKNOWN]
        counts = self.records.counts[rows][self.leaf[rows] != UNKNOWN]
        size = len(self.is_complete)
        number = np.bincount(linked, minlength=size)[leaves]
        if self.leaves.count is not None:
            complete = number == self.leaves.count[leaves]
        elif self.leaves.weight is not None and (counts != UNKNOWN).all():
            weight = np.bincount(linked, weights=counts, minlength=size)[leaves]
            complete = np.rint(weight) == self.leaves.weight[leaves]
        else:
            complete = number > 0
        self.is_complete[leaves] = complete


def leaf_box(structure: Structure, leaf: int) -> list[tuple[int, float, float]]:
    """Return the box of a leaf: the thresholds on its path.

    Args:
        structure: Nodes and leaves of the forest.
        leaf: Number of the leaf.

    Returns:
        Column, lower end and upper end for each column that is split on the path.
    """
    begin, end = np.searchsorted(
        structure.tree, [structure.leaf_tree[leaf], structure.leaf_tree[leaf] + 1]
    )
    first, last = structure.first[begin:end], structure.last[begin:end]
    box: dict[int, tuple[float, float]] = {}
    for node in begin + np.flatnonzero((first <= leaf) & (leaf < last)):
        column, threshold = int(structure.feature[node]), float(structure.threshold[node])
        below, above = box.get(column, (-np.inf, np.inf))
        if leaf < structure.middle[node]:
            box[column] = (below, min(above, threshold))
        else:
            box[column] = (max(below, threshold), above)
    return [(column, *ends) for column, ends in box.items()]
