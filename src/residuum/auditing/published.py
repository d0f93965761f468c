"""Define the content of ``result.json``, the file with the result of an audit.

Most records of an audit are written to ``result.json`` unchanged. For records that hold more than a reader
needs, this module defines a shorter record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from residuum.auditing.applicability import Applies
from residuum.auditing.controls import Controls
from residuum.auditing.next_steps import NextStep
from residuum.auditing.outcomes import AttackOutcome, Findings
from residuum.auditing.plan import Batch
from residuum.auditing.power import PositiveControls
from residuum.auditing.result import AuditResult
from residuum.auditing.verdict import Verdict
from residuum.evaluation.adapting import Fit
from residuum.evaluation.targets import TargetTest
from residuum.records import Exposure, Record, Scores
from residuum.records.attribute_test import AttributeTest
from residuum.records.base import plain
from residuum.records.knowledge import Fact
from residuum.records.published import Count, SchemaRule, Share, Tool, this_tool
from residuum.records.recovered_table import TableSummary
from residuum.risk.membership import LossSeparation, MembershipTest
from residuum.risk.moved_rows import MovedRows

# Version of the fields of result.json. If fields are added that older readers may ignore, the minor version
# grows. After any other change of the fields, the major version grows.
SCHEMA_VERSION = "6.3"
# Largest number of candidates and of exposed samples in result.json. Other files of the run list all of them.
MAX_CANDIDATES, MAX_EXPOSED = 200, 20


@dataclass(frozen=True, eq=False)
class Suite(Record):
    """The set of attacks in residuum. If an attack is improved or added, ``version`` grows."""

    version: Count
    attacks: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class AuditTool(Tool):
    """The program that wrote an audit result: its name, its version, and the attacks that it has."""

    suite: Suite


@dataclass(frozen=True, eq=False)
class NetworkSummary(Record):
    """Properties of the audited network, measured from its weights.

    Attributes:
        first_layer_directions: number of singular values of the first layer's weights that exceed the values
            of a random initialization, so that their directions come from training samples; null if unknown
        first_layer_directions_of: the threshold above which these singular values were counted, or why
            ``first_layer_directions`` is null
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
    """The checks that decide whether an audit without a finding can rule out a leak.

    Attributes:
        level: the largest adjusted p-value that shows a leak
        told_apart: p-value of the test whether the losses of training and held-out samples differ
        positive_controls: the positive controls for membership and for reconstruction; empty if no positive
            controls were needed
        covered: the largest number of training samples at which the tests detect a leak in enough positive
            controls
        set_aside: rows of training samples that were not judged, because they also occur in the held-out
            set
        stopped: a sentence that says when the time limit stopped the audit; empty if the audit was not
            stopped
        restricted: why an audit with these settings cannot rule out a leak; empty if it can
        budget_needed: budget in reference seconds that would be large enough for all planned work; null if no
            work was left out
        displayed_attack: the strongest attack, whose candidates are in the scores and in the gallery of the
            report
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
    """A training sample that the test of membership names as a member.

    Attributes:
        row: row in the training set
        q: the smallest false discovery rate at which the sample is named
        boundaries: number of activation boundaries that pass through the sample
    """

    row: Count
    q: Share
    boundaries: Count


@dataclass(frozen=True, eq=False)
class MembershipSummary(Record):
    """The test of membership by activation boundaries, and how well losses distinguish training samples.

    Attributes:
        records: number of training samples
        holdout: number of held-out samples
        holdout_needed: number of held-out samples that a membership test of this training set needs
        neurons: number of neurons whose boundaries were used
        named_count: number of named training samples
        is_finding: whether the named samples count as a leak
        group_p: p-value of the test of all training samples together; null without held-out samples
        decoys_named: number of training samples that the test names if noisy copies of the training samples
            (decoys) replace the held-out samples
        reason: why the test of membership is inconclusive; empty if the test is conclusive
        signal: what distinguishes the named samples: activation boundaries or moved rows of an embedding
        loss: how well losses distinguish training from held-out samples
        named: the named training samples, in order of increasing false discovery rate
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
    signal: str
    loss: LossSeparation | None
    named: tuple[NamedMember, ...]


@dataclass(frozen=True, eq=False)
class Candidate(Record):
    """One candidate that an attack selected as a likely training sample, without seeing the data.

    Attributes:
        confidence: confidence of the selection, from 0 to 1; null if the attack reports no confidence
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
    """Counts of recovered samples by the metric that decides the verdict. scores.json holds all scores."""

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
        table: what was recovered of the training table of a forest; null if the release holds no forest
        targets: the test whether recovered values are those of the training samples; null if not run
        membership: the test whether training samples can be told from non-members; null if not run
        attributes: the test whether an attacker can infer missing values of training records; null if not run
        moved_rows: the embedding rows that training moved, compared with the tokens of the texts; null
            without a base or without an embedding
        applies: measured properties of the network, and for each attack and check, whether it was tried and
            why
        certificate_of: the samples for which the KKT certificate was computed, or why there is no certificate
        uniqueness_reason: why ``uniqueness`` is null; empty otherwise
        warnings: properties of the inputs that may mislead a reader
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
    attributes: AttributeTest | None
    moved_rows: MovedRows | None
    table: TableSummary | None
    targets: TargetTest | None
    exposure: Annotated[
        dict[str, Any] | None,
        SchemaRule(
            description=f"the {MAX_EXPOSED} training samples with the largest risk of a leak, with the "
            "fields of exposure.json. This ranking has no influence on the verdict of the audit"
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
        request: Settings and hashes of the inputs. If an interrupted audit is resumed, these values identify
            the audit.
        artifacts: SHA-256 of the other files of the run, by name.

    Returns:
        The published form of the audit, whose ``to_json`` gives the content of the file.
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
        table=None if result.table is None else result.table.summary(),
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
    most_significant_first = sorted(
        test.named.tolist(), key=lambda i: (float(test.q[i]), -float(test.statistic[i]))
    )
    return MembershipSummary.from_attributes(
        test,
        named_count=len(test.named),
        decoys_named=len(test.decoy_named),
        named=tuple(
            NamedMember(test.rows[i], float(test.q[i]), int(test.boundaries[i]))
            for i in most_significant_first[:MAX_CANDIDATES]
        ),
    )


def _exposure(exposure: Exposure | None) -> dict[str, Any] | None:
    """Return the risk ranking of training samples, only for the samples with the largest risk of a leak."""
    if exposure is None:
        return None
    riskiest_rows = exposure.rows(MAX_EXPOSED)
    return {
        **exposure.summary().to_json(),
        "lines": list(exposure.lines),
        "per_record": riskiest_rows,
    }


def _candidates(result: AuditResult) -> tuple[Candidate, ...]:
    """Return the candidates that the attacks selected as likely training samples, best first."""
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
    deciding_threshold = scores.metrics[scores.deciding].threshold_null99
    return ScoreSummary.from_attributes(scores, candidates=scores.m, threshold=deciding_threshold)
