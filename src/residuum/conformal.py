"""Compute p-values of records by their rank among held-out records, and test all records as a group.

The p-value of a record is its rank among N held-out records,

    p = (1 + number of held-out records with at least the statistic of this record) / (N + 1).

If the record is exchangeable with the held-out records, P(p <= t) <= t for any distribution of the statistic.
P-values that share one held-out set are positively dependent (PRDS, Bates et al. 2023, "Testing for outliers
with conformal p-values"). Under this dependence the rule of Benjamini and Hochberg controls the false
discovery rate.

The group test asks whether the n tested records as a group differ from the N held-out records. Let k =
floor(N / 100). The threshold is the (k+1)-th largest statistic of the held-out records, so at most 1% of them
exceed the threshold. The test counts the number C of tested records above the threshold. If all n + N records
are exchangeable and no two statistics are equal, C follows the negative hypergeometric distribution, which is

    C ~ BetaBinomial(n, k + 1, N - k).

The test equals the permutation test over all subsets of n records, but draws no subsets. Equal statistics can
only lower C, because a record whose statistic equals the threshold is not counted.
"""

from __future__ import annotations

import math

import torch
from scipy.stats import betabinom
from torch import Tensor

# The group test counts training records above a threshold that this share of the held-out records exceeds.
TAIL = 0.01


def rank_p_values(statistic: Tensor, holdout: Tensor) -> Tensor:
    """Compute the p-value of each record from its rank among held-out records.

    Args:
        statistic: Statistic of the records, (n,). Large values suggest membership.
        holdout: Statistic of the held-out records, (N,).

    Returns:
        P-values (n,), at least 1 / (N + 1). A held-out statistic that equals the record's counts as larger.
    """
    sorted_holdout = holdout.double().sort().values
    smaller_count = torch.searchsorted(sorted_holdout, statistic.double().contiguous())
    return (1 + len(sorted_holdout) - smaller_count).double() / (len(sorted_holdout) + 1)


def count_above_tail(statistic: Tensor, holdout: Tensor) -> int:
    """Return how many records lie above the 99th percentile of the held-out records.

    Args:
        statistic: Statistic of the records, (n,).
        holdout: Statistic of the held-out records, (N,). At most 1% of these records lie above the
            percentile. With fewer than 100 records, the percentile is the largest statistic.

    Returns:
        The number of records above the percentile, which is the statistic of the group test.
    """
    threshold = holdout.double().sort(descending=True).values[_count_tail(len(holdout))]
    return int((statistic.double() > threshold).sum())


def group_p_value(statistic: Tensor, holdout: Tensor) -> float:
    """Test whether more records exceed the 99th percentile of held-out records than expected by chance.

    Args:
        statistic: Statistic of the records, (n,).
        holdout: Statistic of the held-out records, (N,).

    Returns:
        The p-value. Suppose that the n tested records were drawn at random from all n + N records. The
        p-value is the probability that at least as many of them exceed the percentile of the other N records.
    """
    n, count, k = len(statistic), count_above_tail(statistic, holdout), _count_tail(len(holdout))
    return float(betabinom.sf(count - 1, n, k + 1, len(holdout) - k))


def _count_tail(holdout_count: int) -> int:
    """Return how many of N held-out records may exceed their 99th percentile: floor(N / 100)."""
    return math.floor(TAIL * holdout_count + 1e-9)
