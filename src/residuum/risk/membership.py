"""Test whether activation boundaries of a network distinguish training records from held-out records.

For each record, :mod:`residuum.networks.kinks` computes a statistic T and the number of activation boundaries
on which the record lies. This module compares these values between training records and held-out records.
Named records are the records that the test lists as members of the training set. A finding is the result that
the network reveals membership.

1. The p-value of a record is its rank among the held-out records (:mod:`residuum.conformal`).
2. The group test counts the records above the 99th percentile of the held-out records.
3. A record is named if three conditions hold. The group test rejects. The rule of Benjamini and Hochberg
   accepts the record at a false discovery rate of 5%. The record lies on at least two activation boundaries.
4. A finding needs at least three named records. They must be at least 5% of all training records.
5. The comparison is repeated with decoys (noisy copies of the training records) in place of held-out records.
   A finding needs at least three records that this comparison accepts.

With N held-out records the smallest p-value is 1 / (N + 1). To name k of n records at the rate q, the rule of
Benjamini and Hochberg needs 1 / (N + 1) <= q k / n, so N >= n / (q k) - 1. For example, 399 held-out records
are needed to name 5% of the records.

Decoys are always of the same kind as the training records, but held-out records may be of another kind. If
rule 5 is omitted, non-members that differ from the held-out records (a single class, half the contrast) lead
to findings (``experiments/kinks_power.py``, part ``shift``). If there are no held-out records, records are
compared only with decoys.

The module also measures how well a small loss distinguishes members. A small loss identifies other records
than activation boundaries do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self, TypeGuard

import numpy as np
import torch
from scipy.stats import false_discovery_control, norm
from torch import Tensor

from residuum.conformal import count_above_tail, group_p_value, rank_p_values
from residuum.errors import DataError
from residuum.evaluation.roc import area_under_curve, true_positive_rate
from residuum.networks.kinks import ActivationBoundaries, make_decoys
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.records.base import Record
from residuum.risk.stages import margins_and_losses
from residuum.theory.kkt import evaluate
from residuum.theory.rows import choose_task, normalize_labels

LEVEL = 0.05  # false discovery rate: expected share of wrong records among those listed as members
# If there are just as many held-out records as needed, the smallest q-value equals LEVEL exactly. This
# tolerance prevents that a rounding error makes the q-value exceed LEVEL.
ROUNDING = 1e-12
# Significance level of the group test. An audit tests membership and reconstruction. Each of the two tests
# shows a false leak in at most 0.5% of audits, so both together show one in at most 1%.
GROUP_LEVEL = 0.005
# A membership finding must list at least this number of records as members. One or two records could be
# near-copies of other data.
MIN_NAMED = 3
# A membership finding must list at least this share of the training records as members.
MIN_SHARE = 0.05
# A record that is listed as a member must lie on at least this number of activation boundaries. One boundary
# is no evidence: with 256 neurons per layer, a third of the held-out records lie on one by chance.
MIN_BOUNDARIES = 2
MAX_DECOYS = 20_000  # largest number of decoys (noisy copies of training records) in a test
DECOY_BLOCK = 2000  # number of decoys (noisy copies of training records) per forward pass
# Decoys are noisy copies of training records. With 20 decoys for each of n records, the smallest p-value is
# 1 / (20 n + 1). It is below 0.05 / n, so the rule of Benjamini and Hochberg can accept a single record.
DECOYS_PER_RECORD = 20
# The true positive rate is the share of members below a threshold of the loss. At most this share of the
# held-out records lies below the threshold.
FALSE_POSITIVE_RATE = 0.01
CONFIDENCE = 0.95  # confidence of the one-sided limits of the AUC
# A network counts as memorizing if small losses identify its training records with an AUC or a true positive
# rate above these limits. Both limits were chosen before any measurement.
MAX_AUC = 0.65
MAX_TRUE_POSITIVE_RATE = 0.05
SHOWN, ABSENT, UNCLEAR = "shown", "absent", "unclear"
BOUNDARIES, MOVED_ROWS = (
    "activation boundaries",
    "moved rows",
)  # values of ``MembershipTest.signal``


@dataclass(frozen=True, eq=False)
class LossSeparation(Record):
    """How well a small loss distinguishes training records from held-out records.

    Attributes:
        auc: Probability that a training record has a smaller loss than a held-out record (0.5 by chance).
        auc_lower: One-sided lower 95% confidence limit of the AUC (DeLong et al. 1988).
        auc_upper: One-sided upper 95% confidence limit of the AUC.
        true_positive_rate: Share of training records with a loss below the 1% quantile of the held-out
            records. None with fewer than 100 held-out records.
        tail_p: P-value of the number of training records with a loss below the 1% quantile.
    """

    derived: ClassVar[tuple[str, ...]] = ("memorization", "line")

    auc: float
    auc_lower: float
    auc_upper: float
    true_positive_rate: float | None
    tail_p: float

    @property
    def memorization(self) -> str:
        """Whether the losses show that the network memorizes: "shown", "absent" or "unclear".

        The network is compared with two limits: an AUC of 0.65, and a true positive rate of 5% at a false
        positive rate of 1%. The value is "shown" if the lower confidence limit of the AUC is above 0.65. The
        value is also "shown" if the true positive rate is at least 5% and significantly above chance. The
        value is "absent" if the upper confidence limit of the AUC and the true positive rate are below their
        limits. Otherwise the value is "unclear".
        """
        true_positive_rate = self.true_positive_rate
        has_high_rate = (
            true_positive_rate is not None and true_positive_rate >= MAX_TRUE_POSITIVE_RATE
        )
        if self.auc_lower > MAX_AUC or (has_high_rate and self.tail_p <= GROUP_LEVEL):
            return SHOWN
        if self.auc_upper < MAX_AUC and true_positive_rate is not None and not has_high_rate:
            return ABSENT
        return UNCLEAR

    @property
    def line(self) -> str:
        """A sentence that says how well the losses separate training records (members) from other records."""
        auc_text = (
            f"By their losses, members are separated from non-members with an AUC of {self.auc:.2f} "
            f"(95% limits {self.auc_lower:.2f} and {self.auc_upper:.2f}, chance: 0.5)"
        )
        if self.true_positive_rate is None:
            return f"{auc_text}."
        return f"{auc_text}, and {self.true_positive_rate:.1%} of them are found (chance: 1%)."


@dataclass(frozen=True, eq=False)
class MembershipTest(Record):
    """The result of a membership test of n training records against N held-out records.

    A record is named if the test lists it as a member of the training set. A finding is the result that the
    network reveals membership.

    Attributes:
        records: Number n of training records.
        rows: Row of every training record in the user's data.
        holdout: Number N of held-out records, 0 if there are none.
        holdout_needed: The smallest number of held-out records with which a finding is possible.
        layers: Number of dense piecewise linear layers.
        neurons: Number of neurons in these layers that change the output.
        statistic: Statistic T of the training records, (n,). T is large for a record on many activation
            boundaries.
        holdout_statistic: Statistic T of the held-out records, (N,).
        boundaries: Number of activation boundaries that each training record lies on, (n,).
        holdout_boundaries: Number of activation boundaries that each held-out record lies on, (N,).
        p: P-values by rank among held-out records, (n,). NaN without held-out records.
        q: The smallest false discovery rate at which each training record is named, (n,).
        above_tail: Number of training records above the 99th percentile of the held-out records.
        group_p: P-value of ``above_tail`` among all subsets of n of the n + N records. NaN without held-out
            records.
        named: Indices of the named records.
        is_finding: Whether the named records are a membership finding.
        reason: Why the test is inconclusive, "" if the test is conclusive.
        decoy_p: P-values by rank among decoys, which are noisy copies of the training records, (n,).
        decoy_named: Indices of the records that would be named if decoys replaced the held-out records. No
            group test is applied.
        loss: How well losses separate members from non-members, None without labeled held-out records.
        signal: What distinguishes the named records: "activation boundaries" of a network, or "moved rows" of
            an embedding, whose count is then the number of different tokens of a text.
    """

    derived: ClassVar[tuple[str, ...]] = ("line",)

    records: int
    rows: tuple[int, ...]
    holdout: int
    holdout_needed: int
    layers: int
    neurons: int
    statistic: Tensor
    holdout_statistic: Tensor
    boundaries: Tensor
    holdout_boundaries: Tensor
    p: Tensor
    q: Tensor
    above_tail: int
    group_p: float
    named: Tensor
    is_finding: bool
    reason: str
    decoy_p: Tensor
    decoy_named: Tensor
    loss: LossSeparation | None
    signal: str = BOUNDARIES

    @classmethod
    def by_loss_alone(
        cls, train: Dataset, holdout: Dataset | None, loss: LossSeparation | None, reason: str
    ) -> Self:
        """Return the result for a model without activation boundaries, of which only losses are compared.

        Args:
            train: The training records.
            holdout: Records that the model never saw.
            loss: How well losses separate members from non-members.
            reason: Why there is no test by activation boundaries.

        Returns:
            The result, which names no record.
        """
        n, held_out = len(train), 0 if holdout is None else len(holdout)
        nothing, indices = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.long)
        nan_values = torch.full((n,), torch.nan, dtype=torch.float64)
        return cls(
            records=n,
            rows=tuple(train.rows),
            holdout=held_out,
            holdout_needed=0,
            layers=0,
            neurons=0,
            statistic=nan_values,
            holdout_statistic=nothing,
            boundaries=torch.zeros(n, dtype=torch.long),
            holdout_boundaries=indices,
            p=nan_values,
            q=nan_values,
            above_tail=0,
            group_p=math.nan,
            named=indices,
            is_finding=False,
            reason=reason,
            decoy_p=nan_values,
            decoy_named=indices,
            loss=loss,
        )

    @property
    def adjusted_p(self) -> float:
        """P-value of the group test times 2, because an audit has two tests (Bonferroni correction).

        The two tests of an audit are the membership test and the reconstruction test.
        """
        return math.nan if math.isnan(self.group_p) else min(1.0, 2 * self.group_p)

    @property
    def line(self) -> str:
        """A sentence for the user: how many records are named as members, or why the test is inconclusive."""
        if self.reason:
            return f"Membership could not be tested: {self.reason}"
        rate_text = f"at a false discovery rate of {LEVEL:.0%}"
        if self.is_finding:
            return f"{len(self.named)} of {self.records} training records are named as members {rate_text}."
        if len(self.named):
            return (
                f"{len(self.named)} of {self.records} training records are named {rate_text}; a finding "
                f"needs {min_named(self.records)}."
            )
        return f"No training record of {self.records} is named as a member {rate_text}."


def measure_membership(
    network: Network, train: Dataset, holdout: Dataset | None = None, seed: int = 0
) -> MembershipTest:
    """Test whether the weights distinguish training records from held-out records.

    Args:
        network: The released network.
        train: The training records, as the network receives them.
        holdout: Records of the same kind that the network never saw. Without held-out records, the records
            are compared only with decoys (noisy copies of the records), and the test is inconclusive.
        seed: Seed of the noise in decoys.

    Returns:
        The statistics and p-values, and the records that the test lists as members.

    Raises:
        DataError: If training records and held-out records have different shapes.

    Example:
        >>> from residuum.risk.membership import measure_membership
        >>> result = measure_membership(network, split.train, split.holdout)
        >>> result.line
        '41 of 60 training records are named as members at a false discovery rate of 5%.'
    """
    if holdout is not None and holdout.shape != train.shape:
        raise DataError(
            f"Held-out records must have the same shape as training records, {train.shape}; the held-out "
            f"records have the shape {holdout.shape}.",
            "Prepare training records and held-out records in the same way.",
        )
    n = len(train)
    all_records = train.x if holdout is None else torch.cat([train.x, holdout.x])
    boundaries = ActivationBoundaries.measure(network.double_module, all_records)
    scores = boundaries.score(all_records)
    boundary_counts = scores.boundaries.sum(1)
    statistic, holdout_statistic = scores.statistic[:n], scores.statistic[n:]
    p_values = torch.full((n,), torch.nan, dtype=torch.float64)
    above_tail_count, group_p = 0, math.nan
    if len(holdout_statistic):
        p_values = rank_p_values(statistic, holdout_statistic)
        above_tail_count = count_above_tail(statistic, holdout_statistic)
        group_p = group_p_value(statistic, holdout_statistic)
    accepted_records, q_values = accept_members(p_values, boundary_counts[:n])
    named_records = accepted_records if group_p <= GROUP_LEVEL else accepted_records[:0]
    decoy_p = rank_p_values(statistic, _score_decoys(boundaries, train.x, seed))
    decoy_named, _ = accept_members(decoy_p, boundary_counts[:n])
    is_named, is_confirmed = len(named_records) >= min_named(n), len(decoy_named) >= MIN_NAMED
    reason = _explain_untestable(n, len(holdout_statistic), boundaries.neurons)
    if is_named:
        reason = (
            "" if is_confirmed else _explain_unconfirmed(len(named_records), n, len(decoy_named))
        )
    return MembershipTest(
        records=n,
        rows=tuple(train.rows),
        holdout=len(holdout_statistic),
        holdout_needed=holdout_needed(n),
        layers=scores.boundaries.shape[1],
        neurons=boundaries.neurons,
        statistic=statistic,
        holdout_statistic=holdout_statistic,
        boundaries=boundary_counts[:n],
        holdout_boundaries=boundary_counts[n:],
        p=p_values,
        q=q_values,
        above_tail=above_tail_count,
        group_p=group_p,
        named=named_records,
        is_finding=is_named and is_confirmed,
        reason=reason,
        decoy_p=decoy_p,
        decoy_named=decoy_named,
        loss=separate_by_loss(network, train, holdout) if _has_labels(holdout, train) else None,
    )


def min_named(n: int) -> int:
    """Return how many of n training records the test must name as members before it reports a leak."""
    return max(MIN_NAMED, math.ceil(MIN_SHARE * n - 1e-9))


def holdout_needed(n: int) -> int:
    """Return the smallest number of held-out records with which the test of n records can show a leak."""
    return math.ceil(n / (LEVEL * min_named(n)) - 1e-9) - 1


def separate_by_loss(network: Network, train: Dataset, holdout: Dataset) -> LossSeparation:
    """Measure how well a small loss distinguishes training records from held-out records.

    Args:
        network: The released network.
        train: The training records.
        holdout: Records of the same kind that the network never saw.

    Returns:
        The AUC with its 95% limits, and the true positive rate at 1% false positives.
    """
    outputs = evaluate(network.double_module, torch.cat([train.x, holdout.x]).double())
    task = choose_task(network.task, outputs.shape[1])
    normalized_labels = normalize_labels(torch.cat([train.y, holdout.y]), task, outputs.shape[1])
    score = -margins_and_losses(outputs, normalized_labels, task)[1].numpy()
    return separate_by_scores(score, np.arange(len(score)) < len(train))


def separate_by_scores(score: np.ndarray, is_member: np.ndarray) -> LossSeparation:
    """Measure how well a score distinguishes training records from held-out records.

    Args:
        score: (n + N,) scores, such as negative losses. Training records should have larger scores.
        is_member: (n + N,) which records are training records.

    Returns:
        The AUC with its 95% limits, and the true positive rate at 1% false positives.
    """
    auc, true_positive_share = area_under_curve(score, is_member), None
    if FALSE_POSITIVE_RATE * (~is_member).sum() >= 1 - 1e-9:
        true_positive_share = true_positive_rate(score, is_member, FALSE_POSITIVE_RATE)
    members, nonmembers = score[is_member], score[~is_member]
    tail_p_value = group_p_value(torch.from_numpy(members), torch.from_numpy(nonmembers))
    return LossSeparation(
        auc, *_auc_limits(members, nonmembers, auc), true_positive_share, tail_p_value
    )


def _has_labels(holdout: Dataset | None, train: Dataset) -> TypeGuard[Dataset]:
    """Return whether the held-out records have labels.

    If the held-out records were loaded without labels, all their labels are the same placeholder.
    """
    # Placeholder labels are wrong for most held-out records. Their losses would be large for that reason
    # alone.
    if holdout is None or holdout.y.shape[1:] != train.y.shape[1:]:
        return False
    return len(holdout.y.unique()) > 1


def _auc_limits(members: np.ndarray, holdout: np.ndarray, auc: float) -> tuple[float, float]:
    """Return the lower and the upper confidence limit of an AUC (DeLong et al. 1988)."""
    # DeLong's variance of the AUC. Members and held-out records are two groups. The placement of a record is
    # the share of the other group's records with a smaller score. Let V be the variance of the placements in
    # a group. The variance of the AUC is the sum of V / (size of the group) over both groups.
    if min(len(members), len(holdout)) < 2:
        return 0.0, 1.0

    def placements(values: np.ndarray, reference: np.ndarray) -> np.ndarray:
        sorted_reference = np.sort(reference)
        # Twice the number of smaller scores, where an equal score counts as half. Doubling avoids fractions.
        twice_smaller_count = np.searchsorted(sorted_reference, values) + np.searchsorted(
            sorted_reference, values, side="right"
        )
        return twice_smaller_count / (2 * len(sorted_reference))

    variance = sum(
        placements(a, b).var(ddof=1) / len(a) for a, b in ((members, holdout), (holdout, members))
    )
    half_width = float(norm.ppf(CONFIDENCE)) * math.sqrt(variance)
    return max(0.0, auc - half_width), min(1.0, auc + half_width)


def accept_members(p: Tensor, boundary_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Select the records that the rule of Benjamini and Hochberg accepts as members.

    Args:
        p: P-values of the records, (n,).
        boundary_counts: Number of activation boundaries on which each record lies, (n,).

    Returns:
        The indices of the records with a q-value of at most 5% that lie on at least two activation
        boundaries. Then the q-values of all records.
    """
    if p.isnan().any():
        return torch.zeros(0, dtype=torch.long), p
    q_values = torch.from_numpy(false_discovery_control(p.numpy()))
    is_accepted = (q_values <= LEVEL + ROUNDING) & (boundary_counts >= MIN_BOUNDARIES)
    return is_accepted.nonzero()[:, 0], q_values


def _score_decoys(boundaries: ActivationBoundaries, x: Tensor, seed: int) -> Tensor:
    """Return the membership statistic of decoys (noisy copies of the training records x)."""
    generator, deviation = torch.Generator().manual_seed(seed), x.std(0, correction=0)
    copies_per_record = max(1, min(DECOYS_PER_RECORD, MAX_DECOYS // len(x)))
    records = x[torch.randperm(len(x), generator=generator)[:MAX_DECOYS]]
    return torch.cat(
        [
            boundaries.score(make_decoys(block, deviation, generator)).statistic
            for _ in range(copies_per_record)
            for block in records.split(DECOY_BLOCK)
        ]
    )


def _explain_untestable(n: int, holdout: int, neurons: int) -> str:
    """Return the reason why the data or the network do not allow a membership test, "" if they do."""
    if not neurons:
        return (
            "the network has no dense layer with a piecewise linear activation, so no record can lie on "
            "an activation boundary."
        )
    if n < MIN_NAMED:
        return f"a finding must name at least {MIN_NAMED} training records, and there are {n}."
    if holdout < (needed := holdout_needed(n)):
        return (
            f"naming {min_named(n)} of {n} records needs {needed} held-out records, and there are "
            f"{holdout}."
        )
    return ""


def _explain_unconfirmed(named: int, n: int, decoys: int) -> str:
    return (
        f"{named} of {n} records stand out from the held-out records, but only {decoys} stand out from noisy "
        "copies of the records. Either the held-out records are of another kind, or the activation "
        "boundaries are blurred, for example by few epochs or weight noise."
    )
