"""Training records of a forest without seeds, told apart by their targets.

Without seeds the bootstrap samples are not known, and neither is the order of the training table. But a
record lies in one leaf of each tree that drew it, and fully grown trees store its target there. So a
value that belongs to one record links this record over all trees.

A value may belong to several records. With counts their number is the largest number of records that a
tree has with this value. Without counts a value belongs to one record if no tree has two leaves with it,
and if it occurs in no more trees than a bootstrap of one record explains. Several records are told apart
in the tree that puts each of them into a leaf of its own. Other leaves are linked with them where boxes
overlap (:mod:`.links`).
"""

from __future__ import annotations

import numpy as np
from scipy.stats import binom

from residuum.trees.forest import Integers
from residuum.trees.leaves import Leaves
from residuum.trees.links import UNKNOWN, Records

IN_BAG = 1 - np.exp(-1)  # probability that a bootstrap sample of n draws holds a record
MAX_DOUBT = 0.01  # odds of two records at which a value still counts as that of one
MAX_ANCHORS = 6  # records with the same target


def records_without_seeds(leaves: Leaves) -> Records:
    """Return the records of a forest whose bootstrap samples are not known.

    Args:
        leaves: The leaves of the forest.

    Returns:
        Records in the order of their targets.
    """
    trees = leaves.numbers.shape[1]
    sizes = _group_sizes(leaves)
    y, group, counts = [], [], []
    links: list[tuple[int, int, int]] = []
    present = leaves.numbers if leaves.weight is None else leaves.weights
    for number, size in enumerate(sizes.tolist()):
        if size == 1:
            y.append(leaves.values[number])
            group.append(number)
            counts.append(present[number])
        elif 1 < size <= MAX_ANCHORS:
            tree = int(leaves.numbers[number].argmax())
            anchors = leaves.select(tree, number)
            if len(anchors) < size:
                continue
            links += [(tree, len(y) + k, leaf) for k, leaf in enumerate(anchors)]
            y += [leaves.values[number]] * size
            group += [number] * size
            counts += [np.where(present[number] > 0, UNKNOWN, 0)] * size
    columns = np.stack(counts, 1) if counts else np.zeros((trees, 0), dtype=np.int64)
    return Records(
        y=np.array(y),
        group=np.array(group, dtype=np.int64),
        counts=columns,
        has_row_order=False,
        links=tuple(links),
    )


def _group_sizes(leaves: Leaves) -> Integers:
    """Return how many records have each value, 0 if this cannot be told."""
    numbers = leaves.numbers
    if leaves.count is not None:
        totals = leaves.sum_by_group(leaves.count)
        return totals.max(1)
    trees = numbers.shape[1]
    if leaves.weight is not None and (leaves.weights == 1).all():
        return numbers.max(1)
    most = numbers.max(1)
    occurs = (numbers > 0).sum(1)
    if (occurs == trees).mean() > 0.9:  # no bootstrap: every tree has every record
        return most
    # Bayes' rule for one record against two. Two records always share a leaf only if they are neighbors.
    pairs = max((most > 1).mean(), 0.5 / len(most))
    single = (1 - pairs) * binom.pmf(occurs, trees, IN_BAG)
    double = pairs * binom.pmf(occurs, trees, 1 - (1 - IN_BAG) ** 2)
    return np.where((most == 1) & (double > MAX_DOUBT * single), 0, most)
