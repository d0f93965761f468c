"""ROC curve of a score that should be larger for members of the training set than for other samples."""

from __future__ import annotations

import numpy as np

from residuum.evaluation.matching import Array


def area_under_curve(scores: Array, is_member: Array) -> float:
    """Return the probability that a member of the training set has a larger score than a non-member.

    Args:
        scores: (n,) scores of samples.
        is_member: (n,) whether a sample is a member.

    Returns:
        float: The area under the ROC curve. Ties count half.
    """
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(is_member, _replace_nonfinite(scores)))


def true_positive_rate(scores: Array, is_member: Array, false_positive_rate: float) -> float:
    """Return the share of members that a threshold detects at a given false positive rate.

    Args:
        scores: (n,) scores of samples.
        is_member: (n,) whether a sample is a member of the training set.
        false_positive_rate: The largest permitted share of non-members above the threshold.

    Returns:
        float: The share of members above the best threshold.
    """
    from sklearn.metrics import roc_curve

    false_positive_rates, true_positive_rates, _ = roc_curve(
        is_member, _replace_nonfinite(scores), drop_intermediate=False
    )
    # A computed rate such as 2/200 may exceed 0.01 by a rounding error, so a small tolerance is added.
    is_permitted = false_positive_rates <= false_positive_rate + 1e-12
    return float(true_positive_rates[is_permitted].max())


def _replace_nonfinite(scores: Array) -> Array:
    """Replace infinite and undefined scores by the largest or the most negative float64 number."""
    return np.nan_to_num(scores.astype(float), nan=np.finfo(float).min)
