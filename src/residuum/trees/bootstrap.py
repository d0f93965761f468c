"""How often each training record was drawn for each tree.

A random forest of scikit-learn stores one integer seed per tree. The seed gives the bootstrap sample: tree t draws
record i ``c_ti`` times. So these counts are public if the number n of records and the number of draws are known.
The root of a tree stores the sum of its weights, which is the number of draws, and the number of distinct records.
"""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import Forest, Integers

MAX_RECORDS = 1_000_000


def bootstrap_counts(forest: Forest) -> Integers | None:
    """Return how often tree t drew record i, from the seeds of the trees.

    Args:
        forest: The forest.

    Returns:
        (trees, records) counts. None if the forest has no bootstrap, if a tree has no seed or no counts, or if the
        seeds do not give the stored number of distinct records (the training had sample weights).
    """
    seeds = [tree.seed for tree in forest.trees]
    weights = [None if tree.weight is None else tree.weight[0] for tree in forest.trees]
    if forest.has_bootstrap is False or None in seeds or None in weights or not seeds:
        return None
    draws = round(float(weights[0]))
    if not 1 <= draws <= MAX_RECORDS or any(abs(weight - draws) > 1e-6 for weight in weights):
        return None
    records = _number_of_records(forest, draws)
    if records is None:
        return None
    counts = np.zeros((len(seeds), records), dtype=np.int64)
    for t, seed in enumerate(seeds):
        counts[t] = _draw(seed, records, draws)
        distinct = forest.trees[t].count
        if distinct is not None and distinct[0] != (counts[t] > 0).sum():
            return None
    return counts


def _draw(seed: int, records: int, draws: int) -> Integers:
    generator = np.random.RandomState(seed)
    drawn = generator.randint(0, records, draws, dtype=np.int32)
    return np.bincount(drawn, minlength=records).astype(np.int64)


def _number_of_records(forest: Forest, draws: int) -> int | None:
    """Return the number of records for which this number of draws is made, None if it is not determined."""
    share = forest.max_samples
    if share is None:
        return draws
    if isinstance(share, int):
        candidates = np.arange(draws, MAX_RECORDS)[: 50 * draws]
    else:
        estimate = draws / share
        width = 1 + 1 / share
        candidates = np.arange(max(1, int(estimate - width)), int(estimate + width) + 1)
        candidates = candidates[[max(round(n * share), 1) == draws for n in candidates]]
    distinct = [None if tree.count is None else int(tree.count[0]) for tree in forest.trees]
    if None in distinct:
        return int(candidates[0]) if len(candidates) == 1 else None
    fitting = [n for n in candidates if _gives_distinct(forest, int(n), draws, distinct)]
    return int(fitting[0]) if len(fitting) == 1 else None


def _gives_distinct(forest: Forest, records: int, draws: int, distinct: list[int]) -> bool:
    """Return whether the seeds give the stored numbers of distinct records."""
    return all(
        (_draw(tree.seed or 0, records, draws) > 0).sum() == number
        for tree, number in zip(forest.trees, distinct, strict=True)
    )
