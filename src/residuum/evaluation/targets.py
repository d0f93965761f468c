"""Test whether values recovered from a model file are values of the training samples, not of any samples.

A regression target is matched if it equals a recovered target within rounding. If training and held-out
samples are exchangeable, then the number of matched training samples has a hypergeometric distribution, given
the number of all matched samples. So its p-value is exact.

Boosted trees store no targets, but some of their thresholds are values of the training table. A training
sample scores the number of its columns whose value is stored. The sum over the training samples is compared
with the sums over random subsets of all samples.

Class labels have few values, so every label equals some recovered label. Labels are compared in row order: a
sample is matched if the recovered label of the same row equals its label. Under a random order of the rows,
the number of matched samples has a known distribution, from which we draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.stats import hypergeom

from residuum.evaluation.matching import Array
from residuum.records.base import Record
from residuum.records.recovered_table import RecoveredTable

# A recovered target (regression value) counts as correct if its error is at most this share of the range of
# all targets.
ROUNDING = 1e-6
VALUES = "values of columns"
# Number of random orders or random subsets that a permutation test draws. The smallest
# possible p-value is 1 / (DRAWS + 1).
DRAWS = 10_000


@dataclass(frozen=True, eq=False)
class TargetTest(Record):
    """How many values of the training samples, such as their targets, were recovered from the model file.

    Attributes:
        what: "targets", "labels" or "values of columns".
        recovered: Number of recovered values of training samples.
        n: Number of values that were searched for: one for each training sample, or one for each cell.
        expected_by_chance: Number of recovered values expected by chance.
        p_value: P-value of the number of recovered values.
        adjusted: P-value adjusted over all tests of the audit.
        in_row_order: Whether the recovered targets were compared row by row.
        reason: Why there was no test, "" if there was one.
    """

    derived: ClassVar[tuple[str, ...]] = ("line",)

    what: str
    recovered: int = 0
    n: int = 0
    expected_by_chance: float = 0.0
    p_value: float = 1.0
    adjusted: float = 1.0
    in_row_order: bool = False
    reason: str = ""

    def is_finding(self, level: float) -> bool:
        """Return True if significantly more targets were recovered than expected by chance."""
        return not self.reason and self.recovered > 0 and self.adjusted <= level

    @property
    def line(self) -> str:
        """The result of the test in one sentence."""
        if self.reason:
            return f"The {self.what} could not be tested: {self.reason}."
        if self.what == VALUES:
            return (
                f"The file stores {self.recovered} of {self.n} values of the training samples as thresholds "
                f"({self.expected_by_chance:.4g} expected by chance)."
            )
        order_text = ", row by row" if self.in_row_order else ""
        return (
            f"The file determines the {self.what} of {self.recovered} of {self.n} training "
            f"samples{order_text} ({self.expected_by_chance:.3g} expected by chance)."
        )


def compare_targets(targets: Array, train: Array, holdout: Array, tests: int) -> TargetTest:
    """Compare recovered targets with those of training samples and held-out samples.

    Args:
        targets: (records,) recovered targets, NaN for unknown ones.
        train: (n,) targets of the training samples.
        holdout: (N,) targets of the held-out samples.
        tests: Number of tests of the audit, by which the p-value is multiplied (Bonferroni).

    Returns:
        The test.
    """
    sorted_recovered_targets = np.sort(targets[~np.isnan(targets)])
    if not len(sorted_recovered_targets):
        return TargetTest("targets", n=len(train), reason="the file determines no target")
    target_range = float(np.ptp(np.concatenate([train, holdout]))) or 1.0
    matched, matched_holdout = (
        _is_among(y, sorted_recovered_targets, ROUNDING * target_range)
        for y in (np.asarray(train), np.asarray(holdout))
    )
    n, total = len(train), len(train) + len(holdout)
    matched_count, all_matched = int(matched.sum()), int(matched.sum() + matched_holdout.sum())
    p_value = float(hypergeom.sf(matched_count - 1, total, all_matched, n))
    return TargetTest(
        what="targets",
        recovered=matched_count,
        n=n,
        expected_by_chance=n * float(matched_holdout.mean()) if len(holdout) else 0.0,
        p_value=p_value,
        adjusted=min(1.0, tests * p_value),
    )


def compare_labels(labels: Array, train: Array, tests: int, seed: int) -> TargetTest:
    """Compare recovered labels with those of the training samples, row by row.

    Args:
        labels: (records,) recovered class numbers in row order, NaN for unknown ones.
        train: (n,) class numbers of the training samples, in the order of the user's file.
        tests: Number of tests of the audit, by which the p-value is multiplied (Bonferroni).
        seed: Seed of the random orders.

    Returns:
        The test.
    """
    if len(labels) != len(train) or np.isnan(labels).all():
        reason = (
            "the file determines no label"
            if np.isnan(labels).all()
            else f"the file has {len(labels)} training records and the data has {len(train)}"
        )
        return TargetTest("labels", n=len(train), reason=reason)
    matched_count = int((labels == train).sum())
    rng = np.random.default_rng((seed, 5))
    counts_in_random_orders = np.array(
        [(labels == rng.permutation(train)).sum() for _ in range(DRAWS)]
    )
    p_value = float((1 + (counts_in_random_orders >= matched_count).sum()) / (DRAWS + 1))
    return TargetTest(
        what="labels",
        recovered=matched_count,
        n=len(train),
        expected_by_chance=float(counts_in_random_orders.mean()),
        p_value=p_value,
        adjusted=min(1.0, tests * p_value),
        in_row_order=True,
    )


def compare_stored_values(train: Array, holdout: Array, cells: int, tests: int) -> TargetTest:
    """Test whether a model file stores more values of the training samples than of held-out samples.

    Args:
        train: (n,) number of stored values of each training sample.
        holdout: (N,) number of stored values of each held-out sample.
        cells: Number of values of all training samples.
        tests: Number of tests of the audit, by which the p-value is multiplied (Bonferroni).

    Returns:
        The test.
    """
    n, counts_of_all_samples = len(train), np.concatenate([train, holdout])
    rng = np.random.default_rng(n)
    sums_of_random_subsets = np.array(
        [rng.permutation(counts_of_all_samples)[:n].sum() for _ in range(DRAWS)]
    )
    p_value = float((1 + (sums_of_random_subsets >= train.sum()).sum()) / (DRAWS + 1))
    return TargetTest(
        what=VALUES,
        recovered=int(train.sum()),
        n=cells,
        expected_by_chance=n * float(holdout.mean()),
        p_value=p_value,
        adjusted=min(1.0, tests * p_value),
    )


def match_targets(table: RecoveredTable, y: Array) -> Array:
    """Return which targets of a training table were recovered.

    Args:
        table: The recovered table.
        y: (n,) targets or class numbers. Class numbers are compared row by row.

    Returns:
        (n,) whether the target was recovered.
    """
    recovered_targets = table.targets[:, 0].numpy()
    if table.is_classifier:
        is_right: Array = (
            recovered_targets == y if len(recovered_targets) == len(y) else np.zeros(len(y), bool)
        )
        return is_right
    sorted_targets = np.sort(recovered_targets[~np.isnan(recovered_targets)])
    if not len(sorted_targets):
        return np.zeros(len(y), dtype=bool)
    return _is_among(y, sorted_targets, ROUNDING * (float(np.ptp(y)) or 1.0))


def _is_among(values: Array, sorted_numbers: Array, tolerance: float) -> Array:
    """Return a mask of the values that equal one of the sorted numbers within a tolerance."""
    indices_above = np.searchsorted(sorted_numbers, values).clip(max=len(sorted_numbers) - 1)
    indices_below = np.maximum(indices_above - 1, 0)
    smallest_distances = np.minimum(
        np.abs(sorted_numbers[indices_above] - values),
        np.abs(sorted_numbers[indices_below] - values),
    )
    result: Array = smallest_distances <= tolerance
    return result
