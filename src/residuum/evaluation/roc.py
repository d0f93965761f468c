"""ROC curve of a score that should be larger for members of the training set than for other samples."""

from __future__ import annotations

import numpy as np

from residuum.evaluation.matching import Array


def area_under_curve(scores: Array, is_member: Array) -> float:
    """Return the probability that a member has the larger score.

    Args:
        scores: (n,) scores.
        is_member: (n,) booleans.

    Returns:
        float: The area under the ROC curve. Ties count half.
    """
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(is_member, _finite(scores)))


def true_positive_rate(scores: Array, is_member: Array, false_positive_rate: float) -> float:
    """Return the largest share of members above a threshold with so few false positives.

    Args:
        scores: (n,) scores.
        is_member: (n,) booleans.
        false_positive_rate: The largest allowed share of the other samples above the threshold.

    Returns:
        float: The share of members above the best threshold.
    """
    from sklearn.metrics import roc_curve

    false, true, _ = roc_curve(is_member, _finite(scores), drop_intermediate=False)
    allowed = false <= false_positive_rate + 1e-12  # 2/200 may differ from 0.01 in the last bit
    return float(true[allowed].max())


def _finite(scores: Array) -> Array:
    """Replace what scikit-learn refuses: infinity by the largest number, NaN by the smallest."""
    return np.nan_to_num(scores.astype(float), nan=np.finfo(float).min)
