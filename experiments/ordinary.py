"""Networks as people train them, and their audits: shared by the experiments on verdicts."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.kinks_power import SCALINGS, build, pool_of, rounded, train

SHAPES = {"mnist": (1, 28, 28)}


def draw(name: str, n: int, holdout: int, seed: int, label_noise: float = 0.0) -> dict[str, Any]:
    """Return training samples, held-out samples and test samples of a data set, drawn by seed.

    Args:
        name: "digits", "mnist" or "cancer".
        n: Number of training samples.
        holdout: Number of held-out samples.
        seed: Of the draw.
        label_noise: Share of training labels that are replaced by random ones.
    """
    import torch

    x, y = pool_of(name)
    rng = np.random.default_rng([seed, n, 40])
    order = rng.permutation(len(x))
    members, held_out, remaining = np.split(order, [n, n + holdout])
    if name in SCALINGS:
        x = SCALINGS[name](x)
    else:  # scikit-learn's StandardScaler, fitted on the training samples
        deviation = x[members].std(0)
        x = (x - x[members].mean(0)) / np.where(deviation > 0, deviation, 1)
    y = y.copy()
    wrong = members[rng.random(n) < label_noise]
    y[wrong] = rng.integers(0, y.max() + 1, len(wrong))
    test = remaining if len(remaining) else held_out
    subsets = {"members": members, "holdout": held_out, "test": test[:2000], "others": remaining}
    split = {
        subset: (torch.from_numpy(x[rows]).float(), torch.from_numpy(y[rows]).long())
        for subset, rows in subsets.items()
    }
    return {**split, "classes": int(y.max()) + 1}


def trained(case: dict[str, Any], data: dict[str, Any]) -> Any:
    """Train the network of a case.

    The case may hold: model ("mlp", "cnn", ...), epochs, seed, and ``change`` with settings of
    :func:`experiments.kinks_power.train` besides ``frozen`` (the first layer is not trained), ``rescale``
    (standard deviation of the logarithm of factors on the neurons), ``rounding`` (see
    :func:`experiments.kinks_power.rounded`) and ``fine_tune`` (start from a network of other samples).
    """
    change = dict(case.get("change", {}))
    model = build(case["model"], data, change)
    if change.pop("fine_tune", False):
        general = {"members": tuple(array[-1000:] for array in data["others"])}
        ((_, model),) = train(model, general, {"optimizer": "adam"}, (5,), case["seed"] + 1)
        change["keep"] = True
    is_frozen, scale = change.pop("frozen", False), change.pop("rescale", 0.0)
    rounding = change.pop("rounding", "")
    if is_frozen:
        first = next(m for m in model.modules() if hasattr(m, "weight"))
        first.requires_grad_(False)
    ((_, model),) = train(model, data, change, (case["epochs"],), case["seed"])
    if scale:
        rescale(model, scale, case["seed"])
    return rounded(model, rounding, case["seed"]) if rounding else model


def rescale(model: Any, scale: float, seed: int) -> None:
    """Multiply the input of every hidden neuron by a random factor and divide its output by it."""
    import torch
    from torch import nn

    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for before, after in pairwise(layers):
            factor = (scale * torch.randn(before.out_features, generator=generator)).exp()
            before.weight *= factor[:, None]
            before.bias *= factor
            after.weight /= factor


def accuracies(model: Any, data: dict[str, Any]) -> tuple[float, float]:
    """Return the accuracy on training samples and on test samples."""
    import torch

    with torch.no_grad():
        shares = [
            float((model(data[subset][0]).argmax(1) == data[subset][1]).float().mean())
            for subset in ("members", "test")
        ]
    return shares[0], shares[1]


def audit(
    model: Any, members: tuple[Any, Any], holdout: tuple[Any, Any], **options: Any
) -> dict[str, Any]:
    """Audit a network and return what the experiments record."""
    import residuum as rs

    start = time.monotonic()
    result = rs.audit(model, data=members, holdout=holdout, **options)
    membership = result.membership
    loss = None if membership is None else membership.loss
    return {
        "exit_code": result.exit_code,
        "headline": result.verdict.headline,
        "grades": result.verdict.grades,
        "named": result.verdict.named,
        "recovered": result.verdict.recovered,
        "p_value": result.verdict.p_value,
        "group_p": None if membership is None else membership.group_p,
        "auc": None if loss is None else [loss.auc, loss.auc_lower, loss.auc_upper],
        "tpr": None if loss is None else loss.true_positive_rate,
        "reasons": [reason[:300] for reason in result.verdict.reasons],
        "controls": {c.question: c.samples for c in result.checks.positive_controls},
        "stages": dict(result.seconds),
        "audit_seconds": round(time.monotonic() - start, 1),
    }
