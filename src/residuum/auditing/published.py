"""The published form of an audit: the records of which ``result.json`` is made.

Records are published as they are. Those that hold more than a reader needs have a summary here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from residuum.auditing.applicability import Applies
from residuum.auditing.budget import Batch
from residuum.auditing.controls import Controls, Membership
from residuum.auditing.inputs import Fit
from residuum.auditing.result import AuditResult
from residuum.auditing.summary import NextStep
from residuum.auditing.verdict import AttackOutcome, Findings, Twin, Verdict
from residuum.records import Exposure, Record, Scores
from residuum.records.base import plain
from residuum.records.knowledge import Fact
from residuum.records.published import Count, SchemaRule, Share, Tool, this_tool

# The minor version grows with fields that older readers may ignore, the major one with any other change.
SCHEMA_VERSION = "4.0"
MOST_CANDIDATES, MOST_EXPOSED = 200, 20  # in result.json; other files of the run hold all of them


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
        first_layer_directions_of: above what, or why it is null
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
    """What decides whether finding nothing means that there is no leak.

    Attributes:
        told_apart: p that losses do not tell data from held-out
        positive_controls: empty if none was needed
        set_aside: rows of training samples that were not judged, because the held-out set holds them
            too
        stopped: why the clock stopped the audit; empty if it did not
        budget_needed: seconds that the full plan takes; null if not known
        shown: the attack whose candidates scores and gallery show
    """

    told_apart: Share | None
    vouched: bool
    positive_controls: tuple[Twin, ...]
    set_aside: tuple[Count, ...]
    stopped: str
    budget_needed: float | None
    shown: str


@dataclass(frozen=True, eq=False)
class Candidate(Record):
    """One reconstruction, chosen without the data by its confidence.

    Attributes:
        confidence: null if the attack withholds it
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
        membership: whether the network tells its training samples from others. It does not enter the
            verdict. Null without held-out samples and labels
        applies: what was measured, tried and not tried, and why
        certificate_of: what it certifies, or why there is none
        uniqueness_reason: why it is null; empty otherwise
        warnings: what in the input may mislead
        inputs: sha256 of what was read
        artifacts: sha256 of every other file of the run
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
    membership: Membership | None
    exposure: Annotated[
        dict[str, Any] | None,
        SchemaRule(
            description="which samples are at risk, as in exposure.json, for the "
            f"{MOST_EXPOSED} most exposed samples. It does not enter the verdict"
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
    """Return what ``result.json`` holds.

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
            result.checks, positive_controls=result.checks.twins, shown=result.shown
        ),
        exposure=_exposure(result.exposure),
        knowledge=result.knowledge.facts,
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


def _exposure(exposure: Exposure | None) -> dict[str, Any] | None:
    """Return the exposure as in ``exposure.json``, with the most exposed samples only."""
    if exposure is None:
        return None
    rows = exposure.rows(MOST_EXPOSED)
    return {**exposure.summary().to_json(), "lines": list(exposure.lines), "per_record": rows}


def _candidates(result: AuditResult) -> tuple[Candidate, ...]:
    """Return the reconstructions that the attacks chose without the data, best first."""
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
        for rank, (reconstruction, selection, i) in enumerate(result.ranked[:MOST_CANDIDATES])
    )


def _counts(scores: Scores | None) -> ScoreSummary | None:
    if scores is None:
        return None
    threshold = scores.metrics[scores.deciding].threshold_null99
    return ScoreSummary.from_attributes(scores, candidates=scores.m, threshold=threshold)
