"""What the figures of Refael et al. 2025 are measured by: distances, free components, mixtures."""

from __future__ import annotations

from math import comb
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from residuum.checkpoints import build_model
from residuum.networks import MLP
from residuum.records import Checkpoint, Reconstruction, Split
from residuum.similarity import l2, ncc, standardise

FIRST = "layers.0.weight"
SEEN = 1e-3  # singular values of W1 below this share of the largest span what it does not see
MATCHED = 0.8  # NCC


def row_space(weight: Tensor) -> Tensor:
    """(d, r) right singular vectors of W1 above ``SEEN`` of the largest singular value."""
    _, sigma, rows = torch.linalg.svd(weight.double(), full_matrices=False)
    return rows[sigma > SEEN * sigma[0]].T


def squares(theta: dict[str, Tensor]) -> dict[str, float]:
    """Squared norm of every layer, weight and bias together."""
    found: dict[str, float] = {}
    for name, t in theta.items():
        layer = name.rpartition(".")[0]
        found[layer] = found.get(layer, 0.0) + float(t.double().square().sum())
    return found


def five_best(x: Tensor, split: Split, basis: Tensor) -> dict[str, float]:
    """Mean distance of the five best, raw and on row(W1), each beside held-out points."""
    found = {}
    parts = {"raw": x, "projected": x @ basis @ basis.T}
    held = split.holdout.x[: len(split.train)]
    for name, part in parts.items():
        for kind, samples in (("train", split.train.x), ("holdout", held)):
            nearest = l2(part, samples.double()).amin(0)
            found[f"five_best_{name}_{kind}"] = float(nearest.sort().values[:5].mean())
    found["mean_norm_raw"] = float(x.norm(dim=1).mean())
    found["mean_norm_projected"] = float(parts["projected"].norm(dim=1).mean())
    return found


def components(
    x: Tensor, lam: Tensor, labels: Tensor, checkpoint: Checkpoint, basis: Tensor
) -> dict[str, float]:
    """What lies outside row(W1): its share of the candidates, and ||D^T U|| over ||W1||."""
    model = build_model(checkpoint).double()
    assert isinstance(model, MLP)
    x = x.double()
    with torch.no_grad():
        u = (lam.double() * labels.double())[:, None]
        d = model.signals(model.trace(x), u)[0]
    outside = x - x @ basis @ basis.T
    weight = checkpoint.theta[FIRST].double()
    return {
        "outside_share": float(outside.norm() / x.norm()),
        "dtu_over_w1": float((d.T @ outside).norm() / weight.norm()),
    }


def layer_residuals(found: Reconstruction, checkpoint: Checkpoint, one: int) -> dict[str, Any]:
    """Squared residual of every layer at the end, absolute and over its squared target."""
    relative = found.layers[one, -1].tolist()
    sizes, names = squares(checkpoint.theta), found.layer_names
    total = sum(r * sizes[name] for r, name in zip(relative, names, strict=True))
    return {
        "relative_squared": dict(zip(names, relative, strict=True)),
        "objective": total,
    }


def rewritten(checkpoint: Checkpoint, amount: float) -> Checkpoint:
    """b -> b - <w, u> with u the same in every pixel: the network that sees x + u as x."""
    weight = checkpoint.theta[FIRST]
    bias = checkpoint.theta["layers.0.bias"] - amount * weight.sum(1)
    return checkpoint.replace(theta={**checkpoint.theta, "layers.0.bias": bias})


def compare(x: Tensor, run: Tensor, train_x: Tensor, held: Tensor) -> dict[str, Any]:
    """Nearest samples, sparse nonnegative mixtures and repeats, held-out images beside each.

    run: (m,) restart of every candidate; repeats are counted inside each one.
    """
    row: dict[str, Any] = {}
    kept = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:100]
    for kind, samples in (("train", train_x), ("holdout", held)):
        distance, alike = l2(x, samples), ncc(x, samples)
        row[f"five_best_l2_{kind}"] = float(distance.amin(0).sort().values[:5].mean())
        row[f"five_best_ncc_{kind}"] = float(alike.amax(0).sort(descending=True).values[:5].mean())
        row[f"above_0.8_{kind}"] = int((alike.amax(0) > MATCHED).sum())
        atoms = standardise(samples.double())
        fits = [mixture(one, atoms) for one in standardise(x[kept])]
        row[f"single_ncc_{kind}"] = float(np.median([single for single, _ in fits]))
        row[f"mixture_ncc_{kind}"] = float(np.median([mixed for _, mixed in fits]))
    best, which = ncc(x, train_x).max(1)
    matched = best > MATCHED
    return row | repeats(which[matched], run[matched], len(train_x))


def repeats(which: Tensor, run: Tensor, n: int) -> dict[str, Any]:
    """Matched candidates whose sample another candidate of the same restart matched before.

    which, run: (k,) sample and restart of every matched candidate. Two chance levels, each summed
    over restarts: every match hits one of all n samples alike, or which restart made a match is
    exchangeable. The second keeps the samples that were found and how often, so a sample easily
    found is no evidence against it; it says nothing (None) where fewer than two restarts matched.
    """
    groups = [which[run == one] for one in run.unique()]
    sizes = [len(group) for group in groups]
    times = which.unique(return_counts=True)[1].tolist()
    total = sum(sizes)
    return {
        "matched_per_restart": sizes,
        "repeats": sum(len(group) - len(group.unique()) for group in groups),
        "repeats_by_chance": sum(1 - (1 - 1 / n) ** j for size in sizes for j in range(size)),
        "repeats_if_exchanged": sum(
            size - sum(1 - comb(total - c, size) / comb(total, size) for c in times)
            for size in sizes
        )
        if len(sizes) > 1
        else None,
    }


def mixture(x: Tensor, atoms: Tensor, size: int = 5) -> tuple[float, float]:
    """NCC of x with its best single atom, and with its best mixture of up to ``size`` atoms.

    x: (d,), atoms: (n, d), both standardised, so that a constant shift drops out. Atoms are taken
    greedily by their correlation with what is left and fitted by NNLS.
    """
    target, matrix = x.numpy(), atoms.numpy()
    chosen: list[int] = []
    left, single, value = target, 0.0, 0.0
    for k in range(size):
        gains = matrix @ left
        gains[chosen] = -np.inf
        if gains.max() <= 0:
            break
        chosen.append(int(gains.argmax()))
        weights, _ = nnls(matrix[chosen].T, target)
        fit = matrix[chosen].T @ weights
        left = target - fit
        value = float(fit @ target / max(float(np.linalg.norm(fit)), 1e-12))
        single = value if k == 0 else single
    return single, value
