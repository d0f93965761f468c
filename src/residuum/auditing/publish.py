"""An audit as the plain values of ``result.json``."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from residuum.auditing.page import first_layer_directions, granted, verdict_of
from residuum.auditing.published import SCHEMA_VERSION, Result
from residuum.auditing.result import AuditResult
from residuum.auditing.verdict import RESIDUAL_LIMIT, AttackOutcome
from residuum.evaluation.null import SIGNIFICANCE
from residuum.records import Scores

MOST_CANDIDATES = 200


def publish(
    result: AuditResult, request: dict[str, Any] | None, artifacts: dict[str, str]
) -> Result:
    """Validated: what does not fit the schema is a fault of this program, found before writing."""
    return Result.model_validate(
        {
            "schema_version": SCHEMA_VERSION,
            "tool": {"name": "residuum", "version": version("residuum")},
            "created": result.created,
            "subject": result.subject,
            "verdict": _verdict(result),
            "network": _network(result),
            "fit": None if result.fit is None else vars(result.fit) | {"line": result.fit.line},
            "knowledge": [vars(fact) for fact in granted(result)],
            "attacks": [_attack(outcome) for outcome in result.attacks],
            "scores": _scores(result.scores),
            "selected": _scores(result.selected),
            "candidates": ranked(result),
            "certificate": result.certificate.to_json() if result.certificate else None,
            "certificate_of": result.certificate_of,
            "uniqueness": uniqueness_json(result),
            "uniqueness_reason": result.uniqueness_reason,
            "batches": [vars(batch) for batch in result.batches],
            "seconds": result.seconds,
            "settings": result.settings,
            "request": request,
            "assumptions": list(result.assumptions),
            "limitations": list(result.limitations),
            "notes": list(result.notes),
            "inputs": result.hashes,
            "artifacts": artifacts,
        }
    )


def ranked(result: AuditResult) -> list[dict[str, Any]]:
    """What the attacks chose without the data, most confident first."""
    rows: list[dict[str, Any]] = [
        {
            "attack": part.attack,
            "label": float(part.selection.labels[i]),
            "confidence": float(part.selection.confidence[i]),
            "support": int(part.selection.support[i]),
            "restarts": part.restarts,
            "members": int(part.selection.members[i]),
            "multiplier": float(part.selection.lam[i]),
        }
        for part in result.reconstructions
        if part.selection is not None
        for i in range(len(part.selection))
    ]
    rows.sort(key=lambda row: (row["support"] < 2, -row["confidence"]))
    return [{"rank": rank, **row} for rank, row in enumerate(rows[:MOST_CANDIDATES])]


def uniqueness_json(result: AuditResult) -> dict[str, Any] | None:
    """The uniqueness certificate's own published form."""
    return None if result.uniqueness is None else result.uniqueness.to_json()


def _verdict(result: AuditResult) -> dict[str, Any]:
    verdict = result.verdict
    return {
        **vars(verdict),
        "exit_code": verdict.exit_code,
        "sentence": verdict_of(result).sentence,
        "reasons": list(verdict.reasons),
        "significance": SIGNIFICANCE,
        "residual_limit": RESIDUAL_LIMIT,
    }


def _network(result: AuditResult) -> dict[str, Any]:
    network = result.inspection
    directions, of = first_layer_directions(result)
    return {
        "arch": network.arch,
        "parameters": network.parameters,
        "input_shape": list(network.input_shape),
        "outputs": network.outputs,
        "homogeneity_order": network.homogeneity_order,
        "first_layer_directions": directions,
        "first_layer_directions_of": of,
        "balance": network.balance,
    }


def _attack(outcome: AttackOutcome) -> dict[str, Any]:
    return {**vars(outcome), "judged": list(outcome.judged), "converged": outcome.converged}


def _scores(scores: Scores | None) -> dict[str, Any] | None:
    if scores is None:
        return None
    return {
        "n": scores.n,
        "candidates": scores.m,
        "calibrated": scores.calibrated,
        "recovered": scores.recovered,
        "expected_by_chance": scores.expected_by_chance,
        "p_value": scores.p_value,
        "threshold": scores.metrics[scores.deciding].threshold_null99,
        "pool": scores.pool,
    }
