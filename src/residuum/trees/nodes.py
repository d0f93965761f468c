"""Check and order the nodes of a decision tree."""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import NO_CHILD, Booleans, Integers, Tree


def forms_tree(left: Integers, right: Integers) -> bool:
    """Return True if every node except node 0 is the child of exactly one node, and node 0 of none.

    Args:
        left: Number of the left child of each node, -1 for a leaf.
        right: Number of the right child of each node, ignored for a leaf.

    Returns:
        Whether every node except node 0 has one parent. This does not exclude a cycle of nodes that cannot be
        reached from node 0.
    """
    inner: Booleans = left != NO_CHILD
    children = np.concatenate([left[inner], right[inner]])
    if not ((children > 0) & (children < len(left))).all():
        return False
    return len(children) == len(left) - 1 and bool((np.bincount(children) <= 1).all())


def order_nodes(left: Integers, right: Integers) -> Integers | None:
    """Order the nodes of a tree so that each parent comes before its children. Return their numbers.

    Args:
        left: Number of the left child of each node, -1 for a leaf. Node 0 is the root.
        right: Number of the right child of each node, ignored for a leaf.

    Returns:
        The numbers of the nodes, None if the nodes do not form a tree.
    """
    if not len(left) or not forms_tree(left, right):
        return None
    next_level, levels, count = np.zeros(1, dtype=np.int64), [], 0
    while len(next_level):
        levels.append(next_level)
        count += len(next_level)
        parents = next_level[left[next_level] != NO_CHILD]
        next_level = np.stack([left[parents], right[parents]], 1).ravel()
    return np.concatenate(levels) if count == len(left) else None


def node_depths(tree: Tree) -> Integers:
    """Return the depth of each node of a tree, 0 for the root."""
    depths = np.zeros(len(tree.left), dtype=np.int64)
    level, depth = np.zeros(1, dtype=np.int64), 0
    while len(level):
        depths[level] = depth
        parents = level[tree.left[level] != NO_CHILD]
        level, depth = np.concatenate([tree.left[parents], tree.right[parents]]), depth + 1
    return depths
