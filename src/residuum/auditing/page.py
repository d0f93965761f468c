"""From an audit to the page that the HTML report draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from residuum.auditing.result import AuditResult
from residuum.auditing.standing import certified
from residuum.auditing.verdict import RESIDUAL_LIMIT
from residuum.evaluation.pools import joined, whole_pool
from residuum.records import Knowledge, Reconstruction
from residuum.report import page as shown
from residuum.similarity import cosine
from residuum.theory.kkt import EXACT, NEAR

MOST_CANDIDATES = 60  # cards without data
MOST_CURVE = 400  # points of a residual's curve
STATUS = {  # of a KKT certificate, in words
    "kkt": f"Clarke residual at most {EXACT:g}: a KKT point up to rounding",
    "near_kkt": f"Clarke residual at most {NEAR:g}: near a KKT point",
    "far_from_kkt": f"Clarke residual above {NEAR:g}: far from a KKT point, which the KKT attack "
    "assumes; the verdict does not rest on it",
    "not_separated": "some sample is on the wrong side of its margin: not a KKT point",
}
PLAIN = ("shape", "value_range", "sample_count", "label_balance", "loss", "weight_decay")


def page(result: AuditResult) -> shown.Page:
    """Everything the report shows."""
    scores = result.scores
    items = tuple(_matched(result) if result.evidence is not None else _ranked(result))
    return shown.Page(
        subject=result.subject,
        verdict=verdict_of(result),
        created=f"{result.created[:16].replace('T', ' ')} UTC",
        description=_description(result),
        shape=_shape(result),
        items=items,
        items_total=scores.n if scores is not None else _chosen(result),
        control=_control(result),
        metrics=tuple(_metric(row, scores.deciding) for row in scores.metrics.values())
        if scores is not None
        else (),
        residuals=tuple(_residuals(part) for part in result.reconstructions if part.loss.shape[1]),
        knowledge=granted(result),
        attacks=tuple(_attack(row) for row in result.attacks),
        certificate=_certificate(result),
        assumptions=result.assumptions,
        limitations=result.limitations,
        notes=result.notes,
        settings={
            **result.settings,
            "batches": ", ".join(
                f"{b.attack}: {b.restarts} restarts of {b.steps} steps, seed {b.seed}"
                for b in result.batches
            ),
        },
        environment=_flat(result.environment),
        hashes=result.hashes,
    )


def verdict_of(result: AuditResult) -> shown.Verdict:
    """The verdict as the page words it."""
    found = result.verdict
    return shown.Verdict(
        found.outcome, found.n, found.recovered, found.expected_by_chance, found.interval,
        found.p_value, found.metric, found.reasons,
        "" if result.scores is None else result.scores.rule,
    )  # fmt: skip


def granted(result: AuditResult) -> tuple[shown.Granted, ...]:
    """Every fact the attacker was told, in words."""
    knowledge = result.knowledge
    return tuple(
        shown.Granted(name, _fact(knowledge, name), knowledge.provenance[name])
        for name in knowledge.granted
    )


def first_layer_directions(result: AuditResult) -> tuple[int | None, str]:
    """Their number and what they are above, or None and why, given the samples the audit knows of."""
    return result.inspection.directions_given(result.verdict.n or result.knowledge.sample_count)


def _fact(knowledge: Knowledge, name: str) -> str:
    value = getattr(knowledge, name)
    if name in PLAIN:
        return ", ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else str(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return f"{float(value):g}"
    count = sum(t.numel() for t in value.values()) if isinstance(value, dict) else value.numel()
    return f"{count} values"


def _matched(result: AuditResult) -> Iterator[shown.Item]:
    """One card per training sample with a match, best first."""
    assert result.evidence is not None
    assert result.scores is not None
    pool = joined([whole_pool(part) for part in result.reconstructions])
    shape = _shape(result)
    for place, index in enumerate(result.evidence.index.tolist()):
        row = result.scores.per_sample[index]
        taken = row.matches[result.scores.deciding].candidate
        nearest = _image(result.evidence.x[place], result.evidence.mean, shape)
        if taken is None:
            continue
        yield shown.Item(
            number=index,
            found=_image(pool.x[taken], result.evidence.mean, shape),
            nearest=nearest,
            label=result.evidence.labels[index],
            scores={name: match.score for name, match in row.matches.items()},
            recovered=row.recovered,
            margin=row.margin,
            output=_output(result, index),
            multiplier=row.multiplier,
            **_standing(result, pool.x[taken]),
            **certified(result, pool.x[taken]),
        )


def _output(result: AuditResult, index: int) -> float | None:
    evidence = result.evidence
    if evidence is None or evidence.outputs is None or evidence.output_name != "network output":
        return None
    return float(evidence.outputs[index])


def _standing(result: AuditResult, x: Tensor) -> dict[str, Any]:
    """Confidence and support of the group that a candidate belongs to: the nearest chosen one."""
    best: tuple[float, dict[str, Any]] = (-1.0, {})
    for part in result.reconstructions:
        chosen = part.selection
        if chosen is None or not len(chosen):
            continue
        near = cosine(x[None].double(), chosen.x.double())[0]
        i = int(near.argmax())
        if float(near[i]) > best[0]:
            facts = {
                "attack": part.attack, "restarts": part.restarts,
                "confidence": float(chosen.confidence[i]), "support": int(chosen.support[i]),
            }  # fmt: skip
            best = float(near[i]), facts
    return best[1]


def _ranked(result: AuditResult) -> Iterator[shown.Item]:
    """Without data: one card per chosen candidate, most confident first."""
    rows = [
        (part, i)
        for part in result.reconstructions
        if part.selection is not None
        for i in range(len(part.selection))
    ]
    rows.sort(key=lambda row: _rank(*row))
    for number, (part, i) in enumerate(rows[:MOST_CANDIDATES]):
        chosen = part.selection
        assert chosen is not None
        yield shown.Item(
            number=number, found=_image(chosen.x[i], part.knowledge.mean, _shape(result)),
            label=f"{float(chosen.labels[i]):g}", attack=part.attack,
            confidence=float(chosen.confidence[i]), support=int(chosen.support[i]),
            restarts=part.restarts, multiplier=float(chosen.lam[i]),
            **certified(result, chosen.x[i]),
        )  # fmt: skip


def _chosen(result: AuditResult) -> int:
    """Candidates chosen in all attacks together."""
    chosen = (part.selection for part in result.reconstructions)
    return sum(len(one) for one in chosen if one is not None)


def _rank(part: Reconstruction, i: int) -> tuple[bool, float]:
    assert part.selection is not None
    return int(part.selection.support[i]) < 2, -float(part.selection.confidence[i])


def _control(result: AuditResult) -> shown.Control | None:
    evidence, scores = result.evidence, result.scores
    if evidence is None or scores is None or not scores.calibrated:
        return None
    row = scores.metrics[scores.deciding]
    if row.threshold_null99 is None:
        return None
    return shown.Control(
        metric=scores.deciding, train=evidence.values.numpy(), null=evidence.null.numpy(),
        threshold=row.threshold_null99, null_sets=evidence.null_sets,
        higher_is_better=row.higher_is_better,
        outputs=None if evidence.outputs is None else evidence.outputs.numpy(),
        output_name=evidence.output_name, labels=evidence.labels,
    )  # fmt: skip


def _metric(row: Any, deciding: str) -> shown.MetricRow:
    return shown.MetricRow(
        row.name, row.description, row.name == deciding, row.recovered, row.expected_by_chance,
        row.p_value, row.threshold_null99, row.published_threshold, row.above_published_threshold,
        row.above_published_threshold_holdout, row.best, row.higher_is_better,
    )  # fmt: skip


def _residuals(part: Reconstruction) -> shown.Residuals:
    keep = np.unique(np.linspace(0, part.loss.shape[1] - 1, MOST_CURVE).astype(int))
    values = part.layers.double().clamp(min=0).sqrt().numpy()[:, keep]
    layers = {name: values[:, :, i] for i, name in enumerate(part.layer_names)}
    return shown.Residuals(part.attack, part.steps.numpy()[keep], layers, RESIDUAL_LIMIT)


def _attack(row: Any) -> shown.AttackRow:
    if not row.ran:
        status = "not run" if row.applies else "not applicable"
        return shown.AttackRow(row.name, False, row.reason, status=status)
    status = "baseline" if not row.decides else "converged" if row.converged else "not converged"
    return shown.AttackRow(
        row.name, True, row.reason, row.restarts, status, row.candidates, row.residual, row.seconds,
        row.recovered, row.expected_by_chance, row.p_value, row.rule,
    )  # fmt: skip


def _certificate(result: AuditResult) -> tuple[shown.Figure, ...]:
    found = result.certificate
    directions = shown.Figure("directions of the first layer", *first_layer_directions(result))
    if found is None:
        return (shown.Figure("KKT certificate", None, result.certificate_of), directions)
    return (
        shown.Figure("samples", found.samples, result.certificate_of),
        shown.Figure("KKT residual, plain", found.residual_plain, "norm over the weights' norm"),
        shown.Figure("KKT residual, Clarke", found.residual_clarke,
                     f"gates free at {found.kinks_freed} of {found.kinks} kinks"),
        shown.Figure("margin", found.margin, "least y Phi(x)"),
        shown.Figure("normalised margin", found.normalized_margin, "over ||theta||^L"),
        shown.Figure("delta", found.delta, "complementary slackness"),
        shown.Figure("balance gap", found.balance, "0 at a KKT point"),
        directions,
        shown.Figure("status", found.status, "; ".join((STATUS[found.status], *found.notes))),
    )  # fmt: skip


def _description(result: AuditResult) -> str:
    """The network in a line."""
    return f"{result.checkpoint.arch}, {result.inspection.parameters} parameters"


def _shape(result: AuditResult) -> tuple[int, ...]:
    """Shape of one picture: granted, then the data's own, then the checkpoint's."""
    if result.knowledge.shape is not None:
        return result.knowledge.shape
    if result.evidence is not None:
        return tuple(result.evidence.x.shape[1:])
    return result.checkpoint.input_shape


def _image(x: Tensor, mean: Tensor | None, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    x = x.double()
    if mean is not None:
        x = x + (mean.double() if mean.numel() == 1 else mean.double().reshape(x.shape))
    return (x.reshape(shape) if shape else x).numpy()


def _flat(values: dict[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{at}{key}.")
        else:
            found[f"{at}{key}"] = value
    return found
