"""Test whether activation boundaries of a network distinguish training records from held-out records.

The statistic T of a record and the number of boundaries that it lies on come from
:mod:`residuum.networks.kinks`. This module compares training records with held-out records.

1. The p-value of a record is its rank among the held-out records (:mod:`residuum.risk.conformal`).
2. The group test counts the records above the 99th percentile of the held-out records.
3. A record is named if three conditions hold. The group test rejects. The rule of Benjamini and Hochberg
   accepts the record at a false discovery rate of 5%. The record lies on at least two activation boundaries.
4. A finding needs at least three named records that are at least 5% of all records.
5. A comparison with decoys must name at least three records too.

With N held-out records the smallest p-value is 1 / (N + 1). To name k of n records at the rate q, the rule of
Benjamini and Hochberg needs 1 / (N + 1) <= q k / n, so N >= n / (q k) - 1: 399 records to name 5%.

Decoys are noisy copies of the training records. They are always of the same kind as the records, but held-out
records may be of another kind. Without rule 5, lists of non-members that differed from the held-out records
(a single class, half the contrast) became findings (``experiments/kinks_power.py``, part ``shift``). Without
held-out records, the null distribution comes only from decoys.

A rule that names records with a small loss is measured as well. It identifies other records than the
boundaries do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self, TypeGuard

import numpy as np
import torch
from scipy.stats import false_discovery_control, norm
from torch import Tensor

from residuum.errors import DataError
from residuum.evaluation.roc import area_under_curve, true_positive_rate
from residuum.networks.kinks import ActivationBoundaries, make_decoys
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.records.base import Record
from residuum.risk.conformal import count_above_tail, group_p_value, rank_p_values
from residuum.risk.stages import margins_and_losses
from residuum.theory.kkt import evaluate
from residuum.theory.rows import choose_task, normalize_labels

LEVEL = 0.05  # false discovery rate of the named records
# Rounding error of a q-value. With exactly as many held-out records as needed, the q-value is 0.05.
ROUNDING = 1e-12
# Significance level of the group test: half of the 1% of audits that may show a false leak.
GROUP_LEVEL = 0.005
MIN_NAMED = 3  # records; a finding about one or two records could come from near-copies in the data
MIN_SHARE = 0.05  # share of the records that a finding must name
# A record may lie on one boundary by chance: at width 256, a third of held-out records do.
MIN_BOUNDARIES = 2
MAX_DECOYS = 20_000  # decoys in a test
DECOY_BLOCK = 2000  # decoys that are scored at once
DECOYS_PER_RECORD = 20  # 1 / (20 n + 1) < 0.05 / n: enough to name a single record
FALSE_POSITIVE_RATE = 0.01  # share of held-out records that the loss-based rule may identify
CONFIDENCE = 0.95  # confidence of the one-sided limits of the AUC
# Separation by the loss above which a network memorizes. Both limits were fixed before any measurement.
MAX_AUC = 0.65
MAX_TRUE_POSITIVE_RATE = 0.05
SHOWN, ABSENT, UNCLEAR = "shown", "absent", "unclear"


@dataclass(frozen=True, eq=False)
class LossSeparation(Record):
    """How well a small loss distinguishes training records from held-out records.

    Attributes:
        auc: Probability that a training record has a smaller loss than a held-out record. Chance is 0.5.
        auc_lower: One-sided lower 95% confidence limit of the AUC (DeLong et al. 1988).
        auc_upper: One-sided upper 95% confidence limit of the AUC.
        true_positive_rate: Share of training records with a loss below the 1% quantile of the held-out
            records. None with fewer than 100 held-out records.
        tail_p: P-value of the number of training records with a loss below that 1% quantile.
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

        It is "shown" if the lower limit of the AUC is above 0.65. It is also "shown" if at least 5% of the
        training records are identified at 1% false positives, and more than expected by chance. It is
        "absent" if the upper limit of the AUC is below 0.65 and fewer than 5% of the training records are
        identified.
        """
        rate = self.true_positive_rate
        has_tail = rate is not None and rate >= MAX_TRUE_POSITIVE_RATE
        if self.auc_lower > MAX_AUC or (has_tail and self.tail_p <= GROUP_LEVEL):
            return SHOWN
        if self.auc_upper < MAX_AUC and rate is not None and not has_tail:
            return ABSENT
        return UNCLEAR

    @property
    def line(self) -> str:
        """How well the losses separate members from non-members, in one sentence."""
        text = (
            f"By their losses, members are separated from non-members with an AUC of {self.auc:.2f} "
            f"(95% limits {self.auc_lower:.2f} and {self.auc_upper:.2f}, chance: 0.5)"
        )
        if self.true_positive_rate is None:
            return f"{text}."
        return f"{text}, and {self.true_positive_rate:.1%} of them are found (chance: 1%)."


@dataclass(frozen=True, eq=False)
class MembershipTest(Record):
    """The result of a test of n training records against N held-out records.

    Attributes:
        records: Number n of training records.
        rows: Row of every training record in the user's data.
        holdout: Number N of held-out records, 0 if there are none.
        holdout_needed: The smallest number of held-out records with which a finding is possible.
        layers: Number of dense piecewise linear layers.
        neurons: Number of neurons in these layers that change the output.
        statistic: Statistic T of the training records, (n,). It is large if many activation boundaries pass
            through a record.
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
        reason: Why the test is inconclusive, "" if it is not.
        decoy_p: P-values by rank among decoys, which are noisy copies of the training records, (n,).
        decoy_named: Indices of the records that the comparison with decoys names, without a group test.
        loss: How well losses separate members from non-members, None without labeled held-out records.
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
        unknown = torch.full((n,), torch.nan, dtype=torch.float64)
        return cls(
            records=n,
            rows=tuple(train.rows),
            holdout=held_out,
            holdout_needed=0,
            layers=0,
            neurons=0,
            statistic=unknown,
            holdout_statistic=nothing,
            boundaries=torch.zeros(n, dtype=torch.long),
            holdout_boundaries=indices,
            p=unknown,
            q=unknown,
            above_tail=0,
            group_p=math.nan,
            named=indices,
            is_finding=False,
            reason=reason,
            decoy_p=unknown,
            decoy_named=indices,
            loss=loss,
        )

    @property
    def adjusted_p(self) -> float:
        """Twice the p-value of the group test, because an audit tests reconstruction as well."""
        return math.nan if math.isnan(self.group_p) else min(1.0, 2 * self.group_p)

    @property
    def line(self) -> str:
        """How many records are named, or why the test is inconclusive, in one sentence."""
        if self.reason:
            return f"Membership could not be tested: {self.reason}"
        rate = f"at a false discovery rate of {LEVEL:.0%}"
        if self.is_finding:
            return (
                f"{len(self.named)} of {self.records} training records are named as members {rate}."
            )
        if len(self.named):
            return (
                f"{len(self.named)} of {self.records} training records are named {rate}; a finding needs "
                f"{min_named(self.records)}."
            )
        return f"No training record of {self.records} is named as a member {rate}."


def measure_membership(
    network: Network, train: Dataset, holdout: Dataset | None = None, seed: int = 0
) -> MembershipTest:
    """Test whether the weights distinguish training records from held-out records.

    Args:
        network: The released network.
        train: The training records, as the network receives them.
        holdout: Records of the same kind that the network never saw. Without them the records are compared
            only with decoys, and there is no finding.
        seed: Seed of the noise in decoys.

    Returns:
        The statistics, p-values and named records of the test.

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
            f"Held-out records must have the shape of the training records, {train.shape}; got "
            f"{holdout.shape}.",
            "Prepare training records and held-out records in the same way.",
        )
    n = len(train)
    pool = train.x if holdout is None else torch.cat([train.x, holdout.x])
    boundaries = ActivationBoundaries.measure(network.double_module, pool)
    scores = boundaries.score(pool)
    on_boundaries = scores.boundaries.sum(1)
    statistic, holdout_statistic = scores.statistic[:n], scores.statistic[n:]
    p = torch.full((n,), torch.nan, dtype=torch.float64)
    above_tail, group_p = 0, math.nan
    if len(holdout_statistic):
        p = rank_p_values(statistic, holdout_statistic)
        above_tail = count_above_tail(statistic, holdout_statistic)
        group_p = group_p_value(statistic, holdout_statistic)
    accepted, q = _accept(p, on_boundaries[:n])
    named = accepted if group_p <= GROUP_LEVEL else accepted[:0]
    decoy_p = rank_p_values(statistic, _score_decoys(boundaries, train.x, seed))
    decoy_named, _ = _accept(decoy_p, on_boundaries[:n])
    is_named, is_confirmed = len(named) >= min_named(n), len(decoy_named) >= MIN_NAMED
    reason = _why_untestable(n, len(holdout_statistic), boundaries.neurons)
    if is_named:
        reason = "" if is_confirmed else _why_unconfirmed(len(named), n, len(decoy_named))
    return MembershipTest(
        records=n,
        rows=tuple(train.rows),
        holdout=len(holdout_statistic),
        holdout_needed=holdout_needed(n),
        layers=scores.boundaries.shape[1],
        neurons=boundaries.neurons,
        statistic=statistic,
        holdout_statistic=holdout_statistic,
        boundaries=on_boundaries[:n],
        holdout_boundaries=on_boundaries[n:],
        p=p,
        q=q,
        above_tail=above_tail,
        group_p=group_p,
        named=named,
        is_finding=is_named and is_confirmed,
        reason=reason,
        decoy_p=decoy_p,
        decoy_named=decoy_named,
        loss=separate_by_loss(network, train, holdout) if _has_labels(holdout, train) else None,
    )


def min_named(n: int) -> int:
    """Return the smallest number of records that a finding about n records must name."""
    return max(MIN_NAMED, math.ceil(MIN_SHARE * n - 1e-9))


def holdout_needed(n: int) -> int:
    """Return the smallest number of held-out records with which a finding about n records is possible."""
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
    y = normalize_labels(torch.cat([train.y, holdout.y]), task, outputs.shape[1])
    score = -margins_and_losses(outputs, y, task)[1].numpy()
    return separate_by_scores(score, np.arange(len(score)) < len(train))


def separate_by_scores(score: np.ndarray, is_member: np.ndarray) -> LossSeparation:
    """Measure how well a score distinguishes training records from held-out records.

    Args:
        score: (n + N,) scores, such as negative losses. Training records should have larger scores.
        is_member: (n + N,) which records are training records.

    Returns:
        The AUC with its 95% limits, and the true positive rate at 1% false positives.
    """
    auc, rate = area_under_curve(score, is_member), None
    if FALSE_POSITIVE_RATE * (~is_member).sum() >= 1 - 1e-9:
        rate = true_positive_rate(score, is_member, FALSE_POSITIVE_RATE)
    members, nonmembers = score[is_member], score[~is_member]
    tail_p = group_p_value(torch.from_numpy(members), torch.from_numpy(nonmembers))
    return LossSeparation(auc, *_auc_limits(members, nonmembers, auc), rate, tail_p)


def _has_labels(holdout: Dataset | None, train: Dataset) -> TypeGuard[Dataset]:
    """Return whether held-out records have labels. Without labels, they all have the same value."""
    # Losses for meaningless labels would distinguish held-out records from training records.
    if holdout is None or holdout.y.shape[1:] != train.y.shape[1:]:
        return False
    return len(holdout.y.unique()) > 1


def _auc_limits(members: np.ndarray, holdout: np.ndarray, auc: float) -> tuple[float, float]:
    """Return the lower and the upper confidence limit of an AUC (DeLong et al. 1988)."""
    # The placement of a record is the share of the other group that it beats. The variance of the AUC is
    # var(placements of members) / n + var(placements of held-out records) / N.
    if min(len(members), len(holdout)) < 2:
        return 0.0, 1.0

    def placements(values: np.ndarray, reference: np.ndarray) -> np.ndarray:
        order = np.sort(reference)
        below = np.searchsorted(order, values) + np.searchsorted(order, values, side="right")
        return below / (2 * len(order))

    variance = sum(
        placements(a, b).var(ddof=1) / len(a) for a, b in ((members, holdout), (holdout, members))
    )
    margin = float(norm.ppf(CONFIDENCE)) * math.sqrt(variance)
    return max(0.0, auc - margin), min(1.0, auc + margin)


def _accept(p: Tensor, on_boundaries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of records on two or more boundaries with a small q-value, and all q-values."""
    if p.isnan().any():
        return torch.zeros(0, dtype=torch.long), p
    q = torch.from_numpy(false_discovery_control(p.numpy()))
    accepted = (q <= LEVEL + ROUNDING) & (on_boundaries >= MIN_BOUNDARIES)
    return accepted.nonzero()[:, 0], q


def _score_decoys(boundaries: ActivationBoundaries, x: Tensor, seed: int) -> Tensor:
    """Return the membership statistic of decoys, which are noisy copies of the records x."""
    generator, deviation = torch.Generator().manual_seed(seed), x.std(0, correction=0)
    copies = max(1, min(DECOYS_PER_RECORD, MAX_DECOYS // len(x)))
    records = x[torch.randperm(len(x), generator=generator)[:MAX_DECOYS]]
    return torch.cat(
        [
            boundaries.score(make_decoys(block, deviation, generator)).statistic
            for _ in range(copies)
            for block in records.split(DECOY_BLOCK)
        ]
    )


def _why_untestable(n: int, holdout: int, neurons: int) -> str:
    """Return why no membership finding is possible, "" if a finding is possible."""
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


def _why_unconfirmed(named: int, n: int, decoys: int) -> str:
    return (
        f"{named} of {n} records stand out from the held-out records, but only {decoys} stand out from noisy "
        "copies of the records. Either the held-out records are of another kind, or the activation "
        "boundaries are blurred, for example by few epochs or weight noise."
    )
