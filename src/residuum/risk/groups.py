"""Summarize the exposure of groups of records, such as classes or the values of a column."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import bootstrap
from torch import Tensor

from residuum.errors import DataError
from residuum.records import Dataset
from residuum.records.exposure import GroupExposure

# Largest number of different group names. A column with more values probably names single records.
MAX_GROUPS = 200
BOOTSTRAP_DRAWS = 1000  # number of resamples for a bootstrap confidence interval of a group's mean
# Largest group for which the confidence interval of the mean comes from the bootstrap. The mean of a larger
# group is nearly normally distributed.
MAX_BOOTSTRAP = 2000


def name_groups(data: Dataset, task: str, groups: tuple[str, ...]) -> tuple[str, ...]:
    """Return the name of every record's group: the user's name or the class.

    Args:
        data: The records.
        task: "binary", "multiclass" or "regression".
        groups: The user's name of each record's group, () if the user passed no names.

    Returns:
        The names, () for a regression without names.

    Raises:
        DataError: If the number of names differs from the number of records, or if there are too many
            different names.
    """
    if groups:
        if len(groups) != len(data):
            raise DataError(
                f"Each record needs the name of the group that it belongs to; got {len(groups)} names for "
                f"{len(data)} "
                "records.",
                "Pass one name for each record.",
            )
        if len(set(groups)) > MAX_GROUPS:
            raise DataError(
                f"Records may belong to at most {MAX_GROUPS} different groups; got {len(set(groups))}.",
                "Choose a column with fewer values.",
            )
        return groups
    if task == "regression":
        return ()
    classes = data.classes if task == "multiclass" else ()
    return tuple(
        classes[int(y)] if 0 <= int(y) < len(classes) else f"{float(y):g}" for y in data.y.tolist()
    )


def summarize_groups(
    names: tuple[str, ...], scores: Tensor, probability: Tensor | None, flagged: Tensor | None
) -> tuple[GroupExposure, ...]:
    """Return the mean risk of every group of records, most exposed group first.

    Groups are ordered by their mean probability, or by their mean score if probabilities are not calibrated.

    Args:
        names: Group of every record.
        scores: Log odds of being recovered, for every record.
        probability: Calibrated probability of being recovered for every record, or None.
        flagged: Which records lie on significantly many activation boundaries, or None if this was not
            tested.

    Returns:
        The summaries of the groups.
    """
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    group_summaries = []
    for name, rows in members.items():
        expected_recovered_count = mean_probability = probability_interval = None
        if probability is not None:
            probabilities = probability[rows]
            expected_recovered_count, mean_probability, probability_interval = (
                float(probabilities.sum()),
                float(probabilities.mean()),
                mean_interval(probabilities),
            )
        flagged_count = None if flagged is None else int(flagged[rows].sum())
        mean_score = float(scores[rows].mean())
        group_summaries.append(
            GroupExposure(
                name,
                len(rows),
                mean_score,
                expected_recovered_count,
                mean_probability,
                probability_interval,
                called=flagged_count,
            )
        )
    return tuple(
        sorted(
            group_summaries, key=lambda g: -(g.score if g.probability is None else g.probability)
        )
    )


def mean_interval(values: Tensor) -> tuple[float, float]:
    """Return a 95% confidence interval of the mean of the values.

    The interval comes from the bootstrap, or from the normal distribution if there are many values.
    """
    n, mean = len(values), float(values.mean())
    if n > MAX_BOOTSTRAP:
        half_width = 1.96 * float(values.std()) / math.sqrt(n)
        return mean - half_width, mean + half_width
    if n == 1:  # ``scipy.stats.bootstrap`` raises an error for a single value.
        return mean, mean
    bootstrap_result = bootstrap(
        (values.numpy(),), np.mean, n_resamples=BOOTSTRAP_DRAWS, method="percentile", rng=0
    )
    return float(bootstrap_result.confidence_interval.low), float(
        bootstrap_result.confidence_interval.high
    )
