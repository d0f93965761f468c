"""Test whether recovered targets are those of the training samples rather than of any samples.

A regression target is matched if it equals a recovered target within rounding. If training and held-out
samples are exchangeable, then the number of matched training samples has a hypergeometric distribution, given
the number of all matched samples. So its p-value is exact.

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

# Recovered targets equal a target of the table if they differ by at most this share of the range.
ROUNDING = 1e-6
DRAWS = 10_000  # random orders of the labels; the smallest p-value is 1 / (DRAWS + 1)


@dataclass(frozen=True, eq=False)
class TargetTest(Record):
    """How many training samples have a target that was recovered from the file.

    Attributes:
        what: "targets" or "labels".
        recovered: Number of training samples whose target was recovered.
        n: Number of training samples.
        expected_by_chance: Number of samples expected by chance.
        p_value: P-value of the number of recovered samples.
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
        """Return whether more targets were recovered than expected by chance."""
        return not self.reason and self.recovered > 0 and self.adjusted <= level

    @property
    def line(self) -> str:
        """The result of the test in one sentence."""
        if self.reason:
            return f"The {self.what} could not be tested: {self.reason}."
        order = ", row by row" if self.in_row_order else ""
        return (
            f"The file determines the {self.what} of {self.recovered} of {self.n} training samples{order} "
            f"({self.expected_by_chance:.3g} expected by chance)."
        )


def compare_targets(targets: Array, train: Array, holdout: Array, tests: int) -> TargetTest:
    """Compare recovered targets with those of training samples and held-out samples.

    Args:
        targets: (records,) recovered targets, NaN for unknown ones.
        train: (n,) targets of the training samples.
        holdout: (N,) targets of the held-out samples.
        tests: Number of tests of the audit, by which the p-value is multiplied.

    Returns:
        The test.
    """
    recovered = np.sort(targets[~np.isnan(targets)])
    if not len(recovered):
        return TargetTest("targets", n=len(train), reason="the file determines no target")
    scale = float(np.ptp(np.concatenate([train, holdout]))) or 1.0
    matched, matched_holdout = (
        _is_among(y, recovered, ROUNDING * scale) for y in (np.asarray(train), np.asarray(holdout))
    )
    n, total = len(train), len(train) + len(holdout)
    count, all_matched = int(matched.sum()), int(matched.sum() + matched_holdout.sum())
    p = float(hypergeom.sf(count - 1, total, all_matched, n))
    return TargetTest(
        what="targets",
        recovered=count,
        n=n,
        expected_by_chance=n * float(matched_holdout.mean()) if len(holdout) else 0.0,
        p_value=p,
        adjusted=min(1.0, tests * p),
    )


def compare_labels(labels: Array, train: Array, tests: int, seed: int) -> TargetTest:
    """Compare recovered labels with those of the training samples, row by row.

    Args:
        labels: (records,) recovered class numbers in row order, NaN for unknown ones.
        train: (n,) class numbers of the training samples, in the order of the user's file.
        tests: Number of tests of the audit, by which the p-value is multiplied.
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
    count = int((labels == train).sum())
    rng = np.random.default_rng((seed, 5))
    draws = np.array([(labels == rng.permutation(train)).sum() for _ in range(DRAWS)])
    p = float((1 + (draws >= count).sum()) / (DRAWS + 1))
    return TargetTest(
        what="labels",
        recovered=count,
        n=len(train),
        expected_by_chance=float(draws.mean()),
        p_value=p,
        adjusted=min(1.0, tests * p),
        in_row_order=True,
    )


def match_targets(table: RecoveredTable, y: Array) -> Array:
    """Return which targets of a training table were recovered.

    Args:
        table: The recovered table.
        y: (n,) targets or class numbers. Class numbers are compared row by row.

    Returns:
        (n,) whether the target was recovered.
    """
    recovered = table.targets[:, 0].numpy()
    if table.is_classifier:
        is_right: Array = recovered == y if len(recovered) == len(y) else np.zeros(len(y), bool)
        return is_right
    ordered = np.sort(recovered[~np.isnan(recovered)])
    if not len(ordered):
        return np.zeros(len(y), dtype=bool)
    return _is_among(y, ordered, ROUNDING * (float(np.ptp(y)) or 1.0))


def _is_among(values: Array, ordered: Array, tolerance: float) -> Array:
    """Return which values equal one of the ordered numbers within a tolerance."""
    after = np.searchsorted(ordered, values).clip(max=len(ordered) - 1)
    before = np.maximum(after - 1, 0)
    nearest = np.minimum(np.abs(ordered[after] - values), np.abs(ordered[before] - values))
    result: Array = nearest <= tolerance
    return result
