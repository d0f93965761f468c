"""Find the leaf of each tree that holds a training record.

If tree t drew record i, the record lies in a leaf of this tree. In a fully grown tree, the value of this leaf
is the target of the record. Let ``c_ti`` be how often tree t drew record i. A leaf of tree t can hold record
i if two conditions hold. The weight of the leaf minus the weights of its known records is at least ``c_ti``.
And the box of the leaf (the intervals of values that lead from the root to the leaf) overlaps the intervals
that contain the values of the record. If only one leaf of a tree can hold a record, the record is linked with
this leaf. If a leaf can hold only one record, the leaf is linked with this record.

A leaf is complete if all its records are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from residuum.trees.forest import Floats, Forest, Integers, Structure
from residuum.trees.leaves import MIXED, Leaves
from residuum.trees.subsets import find_members

# A link is a record that may lie in a leaf. If at least this number of leaves has changed, the links of all
# trees are counted again in one step.
MANY_LEAVES = 1000
UNKNOWN = -1  # this number stands for an unknown leaf, group, or number of draws


@dataclass(frozen=True)
class Records:
    """The training records of a forest with their targets.

    Attributes:
        y: (records,) targets, NaN for an unknown target.
        group: (records,) number of the group of leaves that store the target, -1 if no leaf stores it.
        counts: (trees, records) how often each tree drew each record, -1 if this is unknown.
        has_row_order: Whether the records are in the order of the training table.
        links: Triples (tree, record, leaf) for records whose leaf in a tree is known before the search.
        targets: (records, targets) all targets, if the model has several targets. Then ``y`` holds the first
            target. None for one target.
    """

    y: Floats
    group: Integers
    counts: Integers
    has_row_order: bool
    links: tuple[tuple[int, int, int], ...] = ()
    targets: Floats | None = None

    @property
    def all_targets(self) -> Floats:
        """All targets of each record, (records, targets)."""
        return self.y[:, None] if self.targets is None else self.targets

    def without_groups(self, groups: Integers) -> Records:
        """Return a copy without the records whose target is stored by some groups of leaves."""
        is_kept = ~np.isin(self.group, groups)
        new_numbers = np.cumsum(is_kept) - 1
        links = tuple((t, int(new_numbers[i]), leaf) for t, i, leaf in self.links if is_kept[i])
        return Records(
            self.y[is_kept],
            self.group[is_kept],
            self.counts[:, is_kept],
            self.has_row_order,
            links,
            None if self.targets is None else self.targets[is_kept],
        )


class Linker:
    """Finds the leaves that hold each training record, from the known targets and values of the records.

    Args:
        forest: The forest.
        leaves: The leaves of the forest.
        records: The training records.

    Attributes:
        leaf: (trees, records) number of the leaf that holds each record in each tree. -1 if the tree did not
            draw the record, or if the leaf is unknown.
        is_complete: (leaves,) whether all records of each leaf are known.
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
        """Whether all possible links are found, so that narrower intervals cannot add any."""
        can_link_mixed_leaves = self.records.has_row_order and self.leaves.has_mixed
        return not len(self.open) and not (can_link_mixed_leaves and not self.is_complete.all())

    def update(self, low: Floats, high: Floats) -> int:
        """Link more records with leaves, after the intervals of the records' values have become narrower.

        Args:
            low: (records, columns) lower ends of the intervals that hold the values of the records.
            high: (records, columns) upper ends of these intervals.

        Returns:
            The number of new links.
        """
        links_before = int((self.leaf != UNKNOWN).sum())
        if self.records.has_row_order and self.leaves.has_mixed:
            self._link_subsets(low, high)
        for tree, group in sorted({(self._tree(v), self._group(v)) for v in self.open}):
            self._link_group(tree, group, low, high)
        self.open = self._open_leaves()
        return int((self.leaf != UNKNOWN).sum()) - links_before

    def _tree(self, leaf: int) -> int:
        return int(self.structure.leaf_tree[leaf])

    def _group(self, leaf: int) -> int:
        return int(self.leaves.group[leaf])

    def _link_single_records(self) -> None:
        """Link records with leaves by targets that are unique.

        A target is unique if no other record has it, and no other leaf of the tree stores it.
        """
        group, leaf_tree = self.leaves.group, self.structure.leaf_tree
        group_count = len(self.leaves.values)
        pure_leaves = np.flatnonzero(group >= 0)
        leaves_per_tree = np.bincount(
            leaf_tree[pure_leaves] * group_count + group[pure_leaves],
            minlength=group_count * len(self.leaf),
        )
        record_of_group = np.full(group_count, UNKNOWN)
        for number, rows in self.by_group.items():
            if number >= 0 and len(rows) == 1:
                record_of_group[number] = rows[0]
        records_of_leaves = record_of_group[group[pure_leaves]]
        links_one_to_one = (
            leaves_per_tree[leaf_tree[pure_leaves] * group_count + group[pure_leaves]] == 1
        ) & (records_of_leaves != UNKNOWN)
        is_drawn_by_tree = self.records.counts[leaf_tree[pure_leaves], records_of_leaves] != 0
        linked_leaves = pure_leaves[links_one_to_one & is_drawn_by_tree]
        self.leaf[leaf_tree[linked_leaves], record_of_group[group[linked_leaves]]] = linked_leaves
        self._mark_complete(linked_leaves)

    def _open_leaves(self) -> list[int]:
        has_group_with_records = np.isin(self.leaves.group, list(self.by_group))
        return np.flatnonzero(
            has_group_with_records & (self.leaves.group >= 0) & ~self.is_complete
        ).tolist()

    def _link_group(self, tree: int, group: int, low: Floats, high: Floats) -> None:
        """Link records that have the same target with the leaves of a tree that store this target."""
        rows, counts = self.by_group[group], self.records.counts[tree]
        has_changed = True
        while has_changed:
            has_changed = False
            incomplete_leaves = [
                leaf for leaf in self.leaves.select(tree, group) if not self.is_complete[leaf]
            ]
            open_records = [
                record
                for record in rows.tolist()
                if self.leaf[tree, record] == UNKNOWN and counts[record] != 0
            ]
            can_hold = {
                (leaf, record): self._may_hold(leaf, tree, record, low[record], high[record])
                for leaf in incomplete_leaves
                for record in open_records
            }
            for record in open_records:
                possible_leaves = [leaf for leaf in incomplete_leaves if can_hold[leaf, record]]
                if len(possible_leaves) == 1 and counts[record] != UNKNOWN:
                    self.leaf[tree, record] = possible_leaves[0]
                    has_changed = True
            for leaf in incomplete_leaves:
                possible_records = [
                    record
                    for record in open_records
                    if can_hold[leaf, record] and self.leaf[tree, record] == UNKNOWN
                ]
                if len(possible_records) == 1 and self._needs_one(leaf, tree, possible_records[0]):
                    self.leaf[tree, possible_records[0]] = leaf
                    has_changed = True
            self._mark_complete(np.array(incomplete_leaves, dtype=np.int64))

    def _link_subsets(self, low: Floats, high: Floats) -> None:
        """Find the records in each leaf that holds two or three records with different targets.

        A leaf is linked if only one set of records has the weight, the mean target and the variance of the
        leaf.
        """
        if self.leaves.count is None or self.leaves.weight is None or self.leaves.impurity is None:
            return
        # If the model has several targets, the impurity of a leaf is not the variance of one target.
        if self.leaves.targets is not None:
            return
        targets = self.records.y
        target_deviation = float(np.nanstd(targets)) if not np.isnan(targets).all() else 0.0
        is_small_mixed_leaf = (
            (self.leaves.group == MIXED) & (self.leaves.count <= 3) & ~self.is_complete
        )
        for leaf in np.flatnonzero(is_small_mixed_leaf).tolist():
            tree = self._tree(leaf)
            draw_counts = self.records.counts[tree]
            open_records = np.flatnonzero(
                (draw_counts > 0) & (self.leaf[tree] == UNKNOWN) & ~np.isnan(targets)
            )
            for column, below, above in self._box(leaf):
                open_records = open_records[
                    (high[open_records, column] >= below) & (low[open_records, column] <= above)
                ]
            leaf_records = find_members(
                self.leaves,
                leaf,
                targets[open_records],
                draw_counts[open_records],
                target_deviation,
            )
            if leaf_records is not None:
                self.leaf[tree, open_records[leaf_records]] = leaf
                self.is_complete[leaf] = True

    def _needs_one(self, leaf: int, tree: int, record: int) -> bool:
        """Return True if all records of a leaf are known except one."""
        linked_count = int((self.leaf[tree] == leaf).sum())
        if self.leaves.count is not None:
            return int(self.leaves.count[leaf]) == linked_count + 1
        return linked_count == 0

    def _may_hold(self, leaf: int, tree: int, record: int, low: Floats, high: Floats) -> bool:
        """Return True if a leaf can hold a record, by its weight and the intervals that lead to it."""
        draw_count = self.records.counts[tree, record]
        weight = self.leaves.weight
        if weight is not None and draw_count != UNKNOWN:
            used_weight = self.records.counts[tree, self.leaf[tree] == leaf].sum()
            if draw_count > weight[leaf] - used_weight:
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
        """Update ``is_complete`` (whether all records are known) for some leaves."""
        if not len(leaves):
            return
        is_one_tree = len(leaves) < MANY_LEAVES and len(set(self.structure.leaf_tree[leaves])) == 1
        tree_range = (
            slice(self._tree(leaves[0]), self._tree(leaves[0]) + 1) if is_one_tree else slice(None)
        )
        linked_leaves = self.leaf[tree_range][self.leaf[tree_range] != UNKNOWN]
        draw_counts = self.records.counts[tree_range][self.leaf[tree_range] != UNKNOWN]
        leaf_count = len(self.is_complete)
        record_counts = np.bincount(linked_leaves, minlength=leaf_count)[leaves]
        if self.leaves.count is not None:
            is_complete = record_counts == self.leaves.count[leaves]
        elif self.leaves.weight is not None and (draw_counts != UNKNOWN).all():
            linked_weights = np.bincount(linked_leaves, weights=draw_counts, minlength=leaf_count)[
                leaves
            ]
            is_complete = np.rint(linked_weights) == self.leaves.weight[leaves]
        else:
            is_complete = record_counts > 0
        self.is_complete[leaves] = is_complete


def leaf_box(structure: Structure, leaf: int) -> list[tuple[int, float, float]]:
    """Return the intervals of values that lead from the root to a leaf, which are called the box of the leaf.

    Args:
        structure: Nodes and leaves of the forest.
        leaf: Number of the leaf.

    Returns:
        Triples of a column, a lower end and an upper end. There is one for each column that a node above the
        leaf splits.
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
