"""Compute how often each training record was drawn for each tree of a random forest.

A random forest of scikit-learn stores one integer seed for each tree. The seed determines the bootstrap
sample, i.e. the number of times that the tree drew each record. So everybody who has the file can compute
these numbers, if the number of records and the number of draws are known. The root of a tree stores two
numbers: the sum of the weights of its records, which is the number of draws, and the number of distinct
records.
"""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import Forest, Integers

# The bootstrap samples of a forest are not computed if there are more records or more draws than this.
MAX_RECORDS = 1_000_000
# The bootstrap samples of a forest are not computed if the number of records times the number of trees
# exceeds this.
MAX_COUNTS = 100_000_000


def bootstrap_counts(forest: Forest) -> Integers | None:
    """Return how often each tree drew each training record, computed from the seeds of the trees.

    Args:
        forest: The forest.

    Returns:
        (trees, records) number of draws of each record for each tree. None if the trees were not trained on
        bootstrap samples, or if a tree stores no seed or no weights. None as well if the number of distinct
        records that the file stores for a tree is not the number in the computed sample.
    """
    if forest.bootstrap is not None:
        return forest.bootstrap
    seeds_and_weights = [
        (tree.seed, float(tree.weight[0])) for tree in forest.trees if tree.weight is not None
    ]
    if forest.has_bootstrap is False or forest.has_sample_weights:
        return None
    if len(seeds_and_weights) < len(forest.trees) or not seeds_and_weights:
        return None
    draws_per_tree = round(seeds_and_weights[0][1])
    records = draws_per_tree if forest.records is None else forest.records
    if not 1 <= draws_per_tree <= MAX_RECORDS or not 1 <= records <= MAX_RECORDS:
        return None
    if len(seeds_and_weights) * records > MAX_COUNTS:
        return None
    if any(abs(weight - draws_per_tree) > 1e-6 for _, weight in seeds_and_weights):
        return None
    draw_counts = np.zeros((len(seeds_and_weights), records), dtype=np.int64)
    for t, (seed, _) in enumerate(seeds_and_weights):
        if seed is None:
            return None
        draw_counts[t] = _draw(seed, records, draws_per_tree)
        node_counts = forest.trees[t].count
        if node_counts is not None and node_counts[0] != (draw_counts[t] > 0).sum():
            return None
    return draw_counts


def _draw(seed: int, records: int, draws: int) -> Integers:
    generator = np.random.RandomState(seed)
    drawn_records = generator.randint(0, records, draws, dtype=np.int32)
    return np.bincount(drawn_records, minlength=records).astype(np.int64)
