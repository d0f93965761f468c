"""How often each training record was drawn for each tree.

A random forest of scikit-learn stores one integer seed for each tree. The seed determines the bootstrap
sample, i.e. how often (``c_ti`` times) tree t drew record i. So these counts are public if the number of
records and the number of draws are known. The root of a tree stores the sum of the weights of its records,
which is the number of draws, and the number of distinct records.
"""

from __future__ import annotations

import numpy as np

from residuum.trees.forest import Forest, Integers

MAX_RECORDS = 1_000_000  # bootstrap samples of more records or draws than this are not computed
MAX_COUNTS = (
    100_000_000  # bootstrap samples with more counts, records times trees, are not computed
)


def bootstrap_counts(forest: Forest) -> Integers | None:
    """Return how often each tree drew each training record, computed from the seeds of the trees.

    Args:
        forest: The forest.

    Returns:
        (trees, records) counts. None if the trees were not trained on bootstrap samples, if a tree stores no
        seed or no weights, or if the seeds do not lead to the stored numbers of distinct records.
    """
    if forest.bootstrap is not None:
        return forest.bootstrap
    roots = [(tree.seed, float(tree.weight[0])) for tree in forest.trees if tree.weight is not None]
    if forest.has_bootstrap is False or forest.has_sample_weights:
        return None
    if len(roots) < len(forest.trees) or not roots:
        return None
    draws = round(roots[0][1])
    records = draws if forest.records is None else forest.records
    if not 1 <= draws <= MAX_RECORDS or not 1 <= records <= MAX_RECORDS:
        return None
    if len(roots) * records > MAX_COUNTS:
        return None
    if any(abs(weight - draws) > 1e-6 for _, weight in roots):
        return None
    counts = np.zeros((len(roots), records), dtype=np.int64)
    for t, (seed, _) in enumerate(roots):
        if seed is None:
            return None
        counts[t] = _draw(seed, records, draws)
        distinct = forest.trees[t].count
        if distinct is not None and distinct[0] != (counts[t] > 0).sum():
            return None
    return counts


def _draw(seed: int, records: int, draws: int) -> Integers:
    generator = np.random.RandomState(seed)
    drawn_records = generator.randint(0, records, draws, dtype=np.int32)
    return np.bincount(drawn_records, minlength=records).astype(np.int64)
