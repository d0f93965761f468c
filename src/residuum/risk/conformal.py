"""P-values by rank among held-out records, and a test of a whole list of records.

The p-value of a record is its rank among N held-out records,

    p = (1 + number of held-out records with at least its statistic) / (N + 1).

If the record is exchangeable with them, P(p <= t) <= t, whatever the distribution of the statistic is.
P-values that share one held-out set are positively dependent (PRDS, Bates et al. 2023, "Testing for outliers
with conformal p-values"). Under this dependence the rule of Benjamini and Hochberg controls the false
discovery rate.

The group test asks whether the list as a whole differs: it counts the records above the 99th percentile of
the held-out ones, and compares the count with that of random subsets of the same size.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

TAIL = 0.01  # share of held-out records above the threshold of the group test
PERMUTATIONS = 1999  # random subsets: the smallest p-value is 0.0005
BLOCK_VALUES = 1 << 22  # of permuted statistics in memory


def rank_p_values(statistic: Tensor, holdout: Tensor) -> Tensor:
    """Return p-values by rank among held-out records.

    Args:
        statistic: Of the records, (n,). Large values are evidence.
        holdout: Of the held-out records, (N,).

    Returns:
        P-values (n,), at least 1 / (N + 1). Ties count against the record.
    """
    order = holdout.double().sort().values
    smaller = torch.searchsorted(order, statistic.double().contiguous())
    return (1 + len(order) - smaller).double() / (len(order) + 1)


def count_above_tail(statistic: Tensor, holdout: Tensor) -> int:
    """Return how many records lie above the 99th percentile of the held-out ones.

    Args:
        statistic: Of the records, (n,).
        holdout: Of the held-out records, (N,). At most 1% of them lie above the percentile, so with fewer
            than 100 it is the largest.

    Returns:
        The statistic of the group test.
    """
    pooled = torch.cat([statistic, holdout]).double().numpy()[None]
    return int(_count_above(pooled, len(statistic))[0])


def group_p_value(
    statistic: Tensor, holdout: Tensor, seed: int, permutations: int = PERMUTATIONS
) -> float:
    """Test whether more records lie in the tail of the held-out ones than in random subsets.

    Args:
        statistic: Of the records, (n,).
        holdout: Of the held-out records, (N,).
        seed: Of the random subsets.
        permutations: Number of random subsets of n of the n + N records.

    Returns:
        The p-value (1 + number of subsets with at least this count) / (permutations + 1).
    """
    n, observed = len(statistic), count_above_tail(statistic, holdout)
    pooled = torch.cat([statistic, holdout]).double().numpy()
    generator = np.random.default_rng(seed)
    step, reached = max(1, BLOCK_VALUES // len(pooled)), 0
    for start in range(0, permutations, step):
        count = min(step, permutations - start)
        subsets = generator.permuted(np.broadcast_to(pooled, (count, len(pooled))), axis=1)
        reached += int((_count_above(subsets, n) >= observed).sum())
    return (1 + reached) / (permutations + 1)


def _count_above(pooled: np.ndarray, n: int) -> np.ndarray:
    """Return how many of the first n values of each row lie above the percentile of the rest."""
    holdout = pooled[:, n:]
    k = holdout.shape[1] - 1 - math.floor(TAIL * holdout.shape[1])
    threshold = np.partition(holdout, k, axis=1)[:, k]
    return (pooled[:, :n] > threshold[:, None]).sum(1)
