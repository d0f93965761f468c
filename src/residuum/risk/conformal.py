"""Compute p-values by rank among held-out records, and test a list of records as a group.

The p-value of a record is its rank among N held-out records,

    p = (1 + number of held-out records with at least the statistic of this record) / (N + 1).

If the record is exchangeable with the held-out records, P(p <= t) <= t for any distribution of the statistic.
P-values that share one held-out set are positively dependent (PRDS, Bates et al. 2023, "Testing for outliers
with conformal p-values"). Under this dependence the rule of Benjamini and Hochberg controls the false
discovery rate.

The group test asks whether the list as a group differs. Its statistic C is the number of records above the
(k+1)-th largest held-out record, k = floor(N / 100). If all n + N records are exchangeable and no two are
equal, C follows the negative hypergeometric distribution, which is

    C ~ BetaBinomial(n, k + 1, N - k).

This equals the permutation test over all subsets of n records, without drawing subsets. Equal statistics can
only lower C, because a record that equals the threshold is not above it.
"""

from __future__ import annotations

import math

import torch
from scipy.stats import betabinom
from torch import Tensor

TAIL = 0.01  # share of held-out records above the threshold of the group test


def rank_p_values(statistic: Tensor, holdout: Tensor) -> Tensor:
    """Return p-values by rank among held-out records.

    Args:
        statistic: Statistic of the records, (n,). Large values suggest membership.
        holdout: Statistic of the held-out records, (N,).

    Returns:
        P-values (n,), at least 1 / (N + 1). Equal held-out statistics count as larger.
    """
    order = holdout.double().sort().values
    smaller = torch.searchsorted(order, statistic.double().contiguous())
    return (1 + len(order) - smaller).double() / (len(order) + 1)


def count_above_tail(statistic: Tensor, holdout: Tensor) -> int:
    """Return how many records lie above the 99th percentile of the held-out records.

    Args:
        statistic: Statistic of the records, (n,).
        holdout: Statistic of the held-out records, (N,). At most 1% of these records lie above the
            percentile. With fewer than 100 records, the percentile is the largest statistic.

    Returns:
        The number of records above the percentile, which is the statistic of the group test.
    """
    threshold = holdout.double().sort(descending=True).values[_records_above(len(holdout))]
    return int((statistic.double() > threshold).sum())


def group_p_value(statistic: Tensor, holdout: Tensor) -> float:
    """Test whether more records exceed the 99th percentile of held-out records than expected by chance.

    Args:
        statistic: Statistic of the records, (n,).
        holdout: Statistic of the held-out records, (N,).

    Returns:
        The p-value: the share of all subsets of n of the n + N records in which at least as many records
        exceed the percentile.
    """
    n, count, k = len(statistic), count_above_tail(statistic, holdout), _records_above(len(holdout))
    return float(betabinom.sf(count - 1, n, k + 1, len(holdout) - k))


def _records_above(holdout: int) -> int:
    """Return how many of the held-out records may exceed the threshold of the group test."""
    return math.floor(TAIL * holdout + 1e-9)
