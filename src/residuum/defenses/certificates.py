"""Certificates of a defended network: KKT residuals, those of rewritten biases, determined energy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from residuum.checkpoints import build_model
from residuum.defenses.base import Secret
from residuum.errors import ResiduumError
from residuum.records import Certificate, Checkpoint, Dataset, Knowledge
from residuum.stationarity import Rows, norm, parameters, residual
from residuum.theory import certify
from residuum.theory.rows import constraint_rows, normalise_labels
from residuum.theory.uniqueness import uniqueness

CERTIFIED, CERTIFYING = 4, 3.0  # samples of the uniqueness certificate, and its seconds
NO_KINKS = -1.0  # a distance that nothing is within


def certificate_of(model: nn.Module, data: Dataset, task: str, kinks: int = 0) -> Certificate:
    """KKT certificate; without kinks to free, none is looked for and no programme is solved."""
    if kinks:
        return certify(model, data.x, data.y, task=task, kink_limit=kinks)
    return certify(model, data.x, data.y, task=task, kink_tolerance=NO_KINKS)


def rewrite_residuals(
    before: nn.Module, after: nn.Module, x: Tensor, y: Tensor, lam: Tensor, rows: Rows, u: Tensor
) -> dict[str, float]:
    """Residuals of rewritten biases over the norm of the weights before: measured, closed form, refitted.

    At the original multipliers the first layer keeps b u^T and the bias W u, all else is zero at a KKT
    point: sqrt(|b|^2 |u|^2 + |W u|^2) / |theta|. Other multipliers can only do better.
    """
    theta, z = parameters(before), x + u
    size = norm(theta)
    weight, bias = theta["layers.0.weight"], theta["layers.0.bias"]
    flat = u.flatten().to(weight)
    left = norm(residual(after, parameters(after), z, rows.combine(lam, len(z))))
    closed = math.sqrt(
        float(bias.square().sum() * flat.square().sum() + (weight @ flat).square().sum())
    )
    refitted = certificate_of(after, Dataset(z, y), "auto")
    return {
        "original_multipliers": left / size,
        "closed_form": closed / size,
        "refitted": refitted.eps / size,
        "before": norm(residual(before, theta, x, rows.combine(lam, len(x)))) / size,
    }


def rewritten_certificate(
    before: Checkpoint, after: Checkpoint, train: Dataset, task: str, shift: Tensor
) -> dict[str, float]:
    """:func:`rewrite_residuals` at the best multipliers of the network before."""
    old, new = (build_model(part, torch.float64).requires_grad_(False) for part in (before, after))
    x = train.x.double()
    certificate = certificate_of(old, train, task)
    outputs = old(x)
    y = normalise_labels(train.y, task, outputs.shape[1])
    rows = constraint_rows(outputs, y, task)
    return rewrite_residuals(old, new, x, train.y, certificate.multipliers, rows, shift)


def determined(
    model: nn.Module, train: Dataset, certificate: Certificate, knowledge: Knowledge, secret: Secret
) -> dict[str, Any]:
    """Mean energy that pairs keep of the heaviest samples, attained and at least; or why none."""
    if certificate.task != "binary":
        return {"determined_energy": None, "uniqueness_note": "computed for one output only"}
    lam = certificate.multipliers
    order = lam.argsort(descending=True)
    box = knowledge.box(train.x[0].double())  # as the defended network receives it
    try:
        found = uniqueness(
            model, train.x[order], train.y[order], lam[order], task="binary",
            box=box and (secret.inputs(box[0]), secret.inputs(box[1])), samples=CERTIFIED, seconds=CERTIFYING,
        )  # fmt: skip
    except ResiduumError as problem:
        return {"determined_energy": None, "uniqueness_note": f"not computed: {problem.message}"}
    return {
        "determined_energy": float(found.determined_energy.mean()),
        "determined_at_least": float(found.determined_at_least.mean()),
        "uniqueness_note": f"mean of {len(found)} samples, heaviest first",
    }
