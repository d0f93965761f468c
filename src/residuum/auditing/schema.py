"""``result.json``: the published form of an audit, versioned, with a JSON Schema.

The minor version grows with fields that older readers may ignore, the major one with any other
change. ``residuum schema`` prints the schema of this version.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from residuum.auditing.applies import Applies
from residuum.auditing.budget import Batch
from residuum.auditing.controls import Controls, Membership
from residuum.auditing.inputs import Fit
from residuum.auditing.verdict import AttackOutcome, Findings, Twin, Verdict
from residuum.evaluation.null import SIGNIFICANCE

if TYPE_CHECKING:
    from residuum.auditing.result import AuditResult
    from residuum.records import Scores
    from residuum.records.exposure import Exposure

SCHEMA_VERSION = "3.2"
SCHEMA_ID = f"urn:residuum:result:{SCHEMA_VERSION}"
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
MOST_CANDIDATES = 200
MOST_EXPOSED = 20


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Suite(_Model):
    """The attacks that the audit could choose from; version: grows when one of them gets stronger."""

    version: Count
    attacks: list[str]


class Tool(_Model):
    """What wrote the result."""

    name: Literal["residuum"]
    version: str
    suite: Suite | None = None


class Step(_Model):
    """What to do next, and the commands for it."""

    text: str
    commands: list[str]


@dataclass(frozen=True, eq=False)
class PublishedVerdict(Verdict):
    """The row of the decision table and its numbers; counts are null without a control."""

    exit_code: Literal[0, 1, 3] = 3
    sentence: str = ""
    significance: Share = SIGNIFICANCE


class Network(_Model):
    """What was audited, measured from its weights."""

    arch: str
    parameters: Count
    input_shape: list[int]
    outputs: Count
    homogeneity_order: float | None
    first_layer_directions: Count | None
    first_layer_directions_of: str = Field(description="above what, or why it is null")
    balance: float | None


@dataclass(frozen=True, eq=False)
class FitRow(Fit):
    """How well the network as read does: accuracy, or R^2; base: of the commonest class, the mean."""

    line: str = ""


class Fact(_Model):
    """Something the attacker was told, and where it came from."""

    fact: str
    value: str
    provenance: Literal["user", "train", "holdout", "release"]


@dataclass(frozen=True, eq=False)
class AttackRow(AttackOutcome):
    """An attack that was run, which is a test where it decides, or the reason why not.

    residuals: of every layer, norm over norm; judged: the layers that count; residual: their worst;
    limit: the most that an explained surface leaves, half of ``permuted``.
    """

    status: str = ""
    explained: bool = False
    limit: float | None = None


class Candidate(_Model):
    """One reconstruction chosen without the data, by confidence."""

    rank: Count
    attack: str
    label: float
    confidence: Share
    support: Count
    restarts: Count
    members: Count
    multiplier: float


class ScoreSummary(_Model):
    """Counts under the deciding metric; everything else is in scores.json."""

    n: Count
    candidates: Count
    calibrated: bool
    recovered: Count | None
    expected_by_chance: float | None
    p_value: Share | None
    threshold: float | None
    pool: Count


class PublishedChecks(_Model):
    """What stands between "nothing was found" and "no leak found"."""

    told_apart: Share | None = Field(description="p that losses do not tell data from held-out")
    vouched: bool
    twin: Twin | None = Field(description="null where it was not needed")
    shown: str = Field(description="the attack whose candidates scores and gallery show")


class Result(_Model):
    """The whole of ``result.json``."""

    schema_version: Literal["3.1", "3.2"]
    tool: Tool
    created: str
    subject: str
    verdict: PublishedVerdict
    network: Network
    fit: FitRow | None
    findings: Findings | None
    controls: Controls
    checks: PublishedChecks
    membership: Membership | None = Field(
        description="does the network tell its training samples from others: beside the verdict; null "
        "without held-out samples and labels"
    )
    exposure: dict[str, Any] | None = Field(
        description="which samples are at risk: beside the verdict; as in exposure.json, of the samples the "
        f"{MOST_EXPOSED} most exposed"
    )
    applies: list[Applies] = Field(description="measured, tried, not tried, and why")
    knowledge: list[Fact]
    attacks: list[AttackRow]
    scores: ScoreSummary | None
    selected: ScoreSummary | None
    candidates: list[Candidate]
    certificate: dict[str, Any] | None
    certificate_of: str = Field(description="what it is of, or why there is none")
    uniqueness: dict[str, Any] | None
    uniqueness_reason: str = Field(description="why it is null; empty otherwise")
    batches: list[Batch]
    seconds: dict[str, float]
    settings: dict[str, Any]
    request: dict[str, Any] | None
    assumptions: list[str]
    limitations: list[str]
    warnings: list[str] = Field(default=[], description="what in the input may mislead")
    notes: list[str]
    next_step: Step | None = Field(default=None, description="since 3.2")
    inputs: dict[str, str] = Field(description="sha256 of what was read")
    artifacts: dict[str, str] = Field(description="sha256 of every other file of the run")


def publish(
    result: AuditResult, request: dict[str, Any] | None, artifacts: dict[str, str]
) -> Result:
    """The result's records as plain values.

    Validated: what does not fit the schema is a fault of this program, found before writing.
    """
    verdict, network = result.verdict, result.inspection
    directions, directions_of = result.directions
    same = (
        "created",
        "subject",
        "certificate_of",
        "uniqueness_reason",
        "seconds",
        "settings",
        "assumptions",
        "limitations",
        "warnings",
        "notes",
    )
    measured = ("arch", "parameters", "input_shape", "outputs", "homogeneity_order", "balance")
    return Result.model_validate(
        {
            **{name: getattr(result, name) for name in same},
            "schema_version": SCHEMA_VERSION,
            "tool": {
                "name": "residuum",
                "version": version("residuum"),
                "suite": {"version": result.suite, "attacks": result.suite_attacks},
            },
            "next_step": vars(result.screen.next),
            "verdict": {
                **vars(verdict),
                "exit_code": verdict.exit_code,
                "sentence": verdict.sentence,
            },
            "network": {
                **{name: getattr(network, name) for name in measured},
                "first_layer_directions": directions,
                "first_layer_directions_of": directions_of,
            },
            "fit": None if result.fit is None else vars(result.fit) | {"line": result.fit.line},
            "knowledge": [fact._asdict() for fact in result.knowledge.facts],
            "findings": result.findings,
            "controls": result.controls,
            "checks": {
                "told_apart": result.checks.told_apart,
                "vouched": result.checks.vouched,
                "twin": result.checks.twin,
                "shown": result.shown,
            },
            "membership": result.membership,
            "exposure": _exposure(result.exposure),
            "applies": result.applies,
            "attacks": [
                vars(row) | {"status": row.status, "explained": row.explained, "limit": row.limit}
                for row in result.attacks
            ],
            "scores": _scores(result.scores),
            "selected": _scores(result.selected),
            "candidates": _candidates(result),
            "certificate": None if result.certificate is None else result.certificate.to_json(),
            "uniqueness": None if result.uniqueness is None else result.uniqueness.to_json(),
            "batches": result.batches,
            "request": request,
            "inputs": result.hashes,
            "artifacts": artifacts,
        }
    )


def _candidates(result: AuditResult) -> list[dict[str, Any]]:
    """What the attacks chose without the data, best first."""
    rows = []
    for rank, (part, i) in enumerate(result.ranked[:MOST_CANDIDATES]):
        chosen = part.selection
        assert chosen is not None
        rows.append(
            {
                "rank": rank,
                "attack": part.attack,
                "label": float(chosen.labels[i]),
                "confidence": float(chosen.confidence[i]),
                "support": int(chosen.support[i]),
                "restarts": part.restarts,
                "members": int(chosen.members[i]),
                "multiplier": float(chosen.lam[i]),
            }
        )
    return rows


def _exposure(found: Exposure | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {**found.summary(), "lines": list(found.lines), "per_record": found.rows(MOST_EXPOSED)}


def _scores(scores: Scores | None) -> dict[str, Any] | None:
    if scores is None:
        return None
    names = ("n", "calibrated", "recovered", "expected_by_chance", "p_value", "pool")
    return {name: getattr(scores, name) for name in names} | {
        "candidates": scores.m,
        "threshold": scores.metrics[scores.deciding].threshold_null99,
    }


def result_schema() -> dict[str, Any]:
    """The JSON Schema of ``result.json``."""
    schema = Result.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **schema}
