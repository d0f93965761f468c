"""Which leaf of each tree holds a training record.

A record i that tree t drew lies in a leaf whose value is the target of the record. Usually this is one leaf. If several
leaves have this value, the leaf must have room for the weight ``c_ti`` of the record, and its box must overlap what is
known about the columns of the record. A leaf is complete if its known records account for its whole weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from residuum.trees.forest import Booleans, Floats, Forest, Integers, Structure
from residuum.trees.targets import LeafValues, Targets, leaf_arrays


@dataclass
class Links:
    """The leaf of each record in each tree.

    Attributes:
        counts: (trees, records) how often each tree drew each record.
        leaf: (trees, records) number of the leaf, -1 if the tree did not draw the record, or if it is not known.
        is_complete: (leaves,) whether the known records of a leaf are all its records.
    """

    counts: Integers
    leaf: Integers
    is_complete: Booleans

    @property
    def is_settled(self) -> bool:
        """Whether the leaf of every drawn record is known."""
        return not ((self.counts > 0) & (self.leaf < 0)).any()


class Linker:
    """Find the leaves of the records of a forest, as far as their columns are known.

    Args:
        forest: The forest.
        counts: (trees, records) how often each tree drew each record.
        targets: Targets of the records.
        leaves: The leaves, grouped by value.
    """

    def __init__(self, forest: Forest, counts: Integers, targets: Targets, leaves: LeafValues) -> None:
        self.structure = forest.structure
        _, weight, _ = leaf_arrays(forest)
        assert weight is not None
        self.weight = np.rint(weight).astype(np.int64)
        self.targets, self.counts = targets, counts
        self.group = leaves.group
        order = np.lexsort((self.group, self.structure.leaf_tree))
        self.order = order[self.group[order] >= 0]
        size = len(leaves.values)
        self.key = self.structure.leaf_tree[self.order] * size + self.group[self.order]
        self.size = size
        self.links = Links(
            counts, np.full(counts.shape, -1), np.zeros(len(weight), dtype=bool)
        )

    def update(self, low: Floats, high: Floats) -> Links:
        """Link what can be linked with these intervals of the columns, (records, columns) each."""
        trees, records = np.nonzero((self.counts > 0) & (self.links.leaf < 0))
        known = self.targets.group[records] >= 0
        trees, records = trees[known], records[known]
        key = trees * self.size + self.targets.group[records]
        begin, end = np.searchsorted(self.key, key), np.searchsorted(self.key, key, side="right")
        single = end - begin == 1
        self.links.leaf[trees[single], records[single]] = self.order[begin[single]]
        for t, i, a, b in zip(
            trees[~single], records[~single], begin[~single], end[~single], strict=True
        ):
            fitting = [
                leaf for leaf in self.order[a:b] if self._may_hold(leaf, t, i, low[i], high[i])
            ]
            if len(fitting) == 1:
                self.links.leaf[t, i] = fitting[0]
        self._complete()
        return self.links

    def _may_hold(self, leaf: int, tree: int, record: int, low: Floats, high: Floats) -> bool:
        """Return whether a leaf has room for a record and a box that overlaps its intervals."""
        if self.counts[tree, record] > self.weight[leaf] or self.links.is_complete[leaf]:
            return False
        for column, below, above in leaf_box(self.structure, leaf):
            if high[column] < below or low[column] > above:
                return False
        return True

    def _complete(self) -> None:
        trees, records = np.nonzero(self.links.leaf >= 0)
        linked = np.bincount(
            self.links.leaf[trees, records],
            weights=self.counts[trees, records],
            minlength=len(self.weight),
        )
        self.links.is_complete = np.rint(linked).astype(np.int64) == self.weight


def leaf_box(structure: Structure, leaf: int) -> list[tuple[int, float, float]]:
    """Return (column, lower end, upper end) of the box of a leaf."""
    first = np.searchsorted(structure.tree, structure.leaf_tree[leaf])
    last = np.searchsorted(structure.tree, structure.leaf_tree[leaf], side="right")
    nodes = np.arange(first, last)
    nodes = nodes[(structure.first[nodes] <= leaf) & (leaf < structure.last[nodes])]
    box: dict[int, tuple[float, float]] = {}
    for node in nodes:
        column, threshold = int(structure.feature[node]), float(structure.threshold[node])
        below, above = box.get(column, (-np.inf, np.inf))
        if leaf < structure.middle[node]:
            box[column] = (below, min(above, threshold))
        else:
            box[column] = (max(below, threshold), above)
    return [(column, *ends) for column, ends in box.items()]
