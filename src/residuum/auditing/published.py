"""The published form of an audit: the records of which ``result.json`` is made.

Most records are published unchanged. Records that hold more than a reader needs have a summary here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from residuum.auditing.applicability import Applies
from residuum.auditing.controls import Controls
from residuum.auditing.inputs import Fit
from residuum.auditing.next_steps import NextStep
from residuum.auditing.outcomes import AttackOutcome, Findings
from residuum.auditing.plan import Batch
from residuum.auditing.power import PositiveControls
from residuum.auditing.result import AuditResult
from residuum.auditing.verdict import Verdict
from residuum.records import Exposure, Record, Scores
from residuum.records.base import plain
from residuum.records.knowledge import Fact
from residuum.records.published import Count, SchemaRule, Share, Tool, this_tool
from residuum.risk.membership import LossSeparation, MembershipTest

# The minor version grows with fields that older readers may ignore, the major version with any other change.
SCHEMA_VERSION = "6.0"
MAX_CANDIDATES, MAX_EXPOSED = 200, 20  # in result.json. Other files of the run hold all


@dataclass(frozen=True, eq=False)
class Suite(Record):
    """The attacks that an audit can choose from. The version grows when one of them gets stronger."""

    version: Count
    attacks: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class AuditTool(Tool):
    """The program that wrote a result, with its attacks."""

    suite: Suite


@dataclass(frozen=True, eq=False)
class NetworkSummary(Record):
    """What was audited, measured from its weights.

    Attributes:
        first_layer_directions_of: what the directions exceed, or why ``first_layer_directions`` is null
    """

    arch: str
    parameters: Count
    input_shape: tuple[int, ...]
    outputs: Count
    homogeneity_order: float | None
    first_layer_directions: Count | None
    first_layer_directions_of: str
    balance: float | None


@dataclass(frozen=True, eq=False)
class ChecksSummary(Record):
    """What decides whether an audit that found nothing can rule out a leak.

    Attributes:
        level: the largest adjusted p-value that shows a leak
        told_apart: p-value of the test whether losses tell training from held-out samples
        positive_controls: the positive controls of each question; empty if none were needed
        covered: the largest number of memorized samples that the tests notice
        set_aside: rows of training samples that were not judged, because they also occur in the held-out
            set
        stopped: why the clock stopped the audit; empty if it did not
        restricted: why this plan cannot rule out a leak; empty if it can
        budget_needed: reference seconds at which nothing would be left out; null if nothing is
        displayed_attack: the attack whose candidates are in the scores and in the gallery
    """

    level: Share
    told_apart: Share | None
    positive_controls: tuple[PositiveControls, ...]
    covered: Count
    set_aside: tuple[Count, ...]
    stopped: str
    restricted: str
    budget_needed: float | None
    displayed_attack: str


@dataclass(frozen=True, eq=False)
class NamedMember(Record):
    """A training sample that the membership test names.

    Attributes:
        row: row in the training set
        q: the smallest false discovery rate at which it is named
        boundaries: activation boundaries that pass through it
    """

    row: Count
    q: Share
    boundaries: Count


@dataclass(frozen=True, eq=False)
class MembershipSummary(Record):
    """The test of membership by activation boundaries, and the losses.

    Attributes:
        records: number of training samples
        holdout: number of held-out samples
        holdout_needed: held-out samples that are needed to name the smallest finding
        neurons: number of neurons whose boundaries were used
        named_count: number of named training samples
        is_finding: whether the named samples count as a leak
        group_p: p-value of the group test; null without held-out samples
        decoys_named: number of training samples that stand out from noisy copies of them
        reason: why the test shows neither members nor their absence; empty if it shows one of them
        loss: how well losses tell training from held-out samples
        named: the named samples, the surest first
    """

    records: Count
    holdout: Count
    holdout_needed: Count
    neurons: Count
    named_count: Count
    is_finding: bool
    group_p: Share | None
    decoys_named: Count
    reason: str
    loss: LossSeparation | None
    named: tuple[NamedMember, ...]


@dataclass(frozen=True, eq=False)
class Candidate(Record):
    """One reconstruction that an attack selected without the data.

    Attributes:
        confidence: confidence of the selection; null if the attack reports none
    """

    rank: Count
    attack: str
    label: float
    confidence: Share | None
    support: Count
    restarts: Count
    members: Count
    multiplier: float


@dataclass(frozen=True, eq=False)
class ScoreSummary(Record):
    """Counts under the deciding metric. Everything else is in scores.json."""

    n: Count
    candidates: Count
    calibrated: bool
    recovered: Count | None
    expected_by_chance: float | None
    p_value: Share | None
    threshold: float | None
    pool: Count


@dataclass(frozen=True, eq=False)
class PublishedAudit(Record):
    """Everything that ``result.json`` holds.

    Attributes:
        membership: the test whether training samples can be told from non-members; null if not run
        applies: what was measured, tried and not tried, and why
        certificate_of: what the certificate is of, or why there is none
        uniqueness_reason: why ``uniqueness`` is null; empty otherwise
        warnings: what in the inputs may mislead
        inputs: SHA-256 of the files that were read
        artifacts: SHA-256 of every other file of the run
    """

    schema_version: Annotated[str, SchemaRule(enum=[SCHEMA_VERSION])]
    tool: AuditTool
    created: str
    subject: str
    verdict: Verdict
    network: NetworkSummary
    fit: Fit | None
    findings: Findings | None
    controls: Controls
    checks: ChecksSummary
    membership: MembershipSummary | None
    exposure: Annotated[
        dict[str, Any] | None,
        SchemaRule(
            description="which samples are at risk, as in exposure.json, for the "
            f"{MAX_EXPOSED} most exposed samples. It does not enter the verdict"
        ),
    ]
    applies: tuple[Applies, ...]
    knowledge: tuple[Fact, ...]
    attacks: tuple[AttackOutcome, ...]
    scores: ScoreSummary | None
    selected: ScoreSummary | None
    candidates: tuple[Candidate, ...]
    certificate: dict[str, Any] | None
    certificate_of: str
    uniqueness: dict[str, Any] | None
    uniqueness_reason: str
    batches: tuple[Batch, ...]
    seconds: dict[str, float]
    settings: dict[str, Any]
    request: dict[str, Any] | None
    assumptions: tuple[str, ...]
    limitations: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    next_step: NextStep
    inputs: dict[str, str]
    artifacts: dict[str, str]


def publish(
    result: AuditResult, request: dict[str, Any] | None, artifacts: dict[str, str]
) -> PublishedAudit:
    """Return the content of ``result.json``.

    Args:
        result: A finished audit.
        request: What identifies the audit to the command that resumes it.
        artifacts: SHA-256 of the other files of the run, by name.

    Returns:
        The published form. Its ``to_json`` is the file.
    """
    return PublishedAudit.from_attributes(
        result,
        schema_version=SCHEMA_VERSION,
        tool=AuditTool(**vars(this_tool()), suite=Suite(result.suite, result.suite_attacks)),
        network=_network(result),
        checks=ChecksSummary.from_attributes(
            result.checks, displayed_attack=result.displayed_attack
        ),
        membership=_membership(result.membership),
        exposure=_exposure(result.exposure),
        knowledge=result.knowledge.known_facts,
        scores=_counts(result.scores),
        selected=_counts(result.selected),
        candidates=_candidates(result),
        certificate=plain(result.certificate),
        uniqueness=plain(result.uniqueness),
        request=request,
        next_step=result.screen.next,
        inputs=result.hashes,
        artifacts=artifacts,
    )


def _network(result: AuditResult) -> NetworkSummary:
    directions, directions_of = result.directions
    return NetworkSummary.from_attributes(
        result.inspection,
        first_layer_directions=directions,
        first_layer_directions_of=directions_of,
    )


def _membership(test: MembershipTest | None) -> MembershipSummary | None:
    if test is None:
        return None
    order = sorted(test.named.tolist(), key=lambda i: (float(test.q[i]), -float(test.statistic[i])))
    return MembershipSummary.from_attributes(
        test,
        named_count=len(test.named),
        decoys_named=len(test.decoy_named),
        named=tuple(
            NamedMember(test.rows[i], float(test.q[i]), int(test.boundaries[i]))
            for i in order[:MAX_CANDIDATES]
        ),
    )


def _exposure(exposure: Exposure | None) -> dict[str, Any] | None:
    """Return the exposure as in ``exposure.json``, with the most exposed samples only."""
    if exposure is None:
        return None
    rows = exposure.rows(MAX_EXPOSED)
    return {**exposure.summary().to_json(), "lines": list(exposure.lines), "per_record": rows}


def _candidates(result: AuditResult) -> tuple[Candidate, ...]:
    """Return the reconstructions that the attacks selected without the data, best first."""
    return tuple(
        Candidate(
            rank=rank,
            attack=reconstruction.attack,
            label=float(selection.labels[i]),
            confidence=selection.confidence_of(i),
            support=int(selection.support[i]),
            restarts=reconstruction.restarts,
            members=int(selection.members[i]),
            multiplier=float(selection.lam[i]),
        )
        for rank, (reconstruction, selection, i) in enumerate(result.ranked[:MAX_CANDIDATES])
    )


def _counts(scores: Scores | None) -> ScoreSummary | None:
    if scores is None:
        return None
    threshold = scores.metrics[scores.deciding].threshold_null99
    return ScoreSummary.from_attributes(scores, candidates=scores.m, threshold=threshold)
