"""The figures of Refael et al. 2025 again: the sphere (2a) and shifted CIFAR (2b), with controls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from benchmarks.uniqueness_common import (
    FIRST,
    Scale,
    five_best,
    row_space,
    run,
    settings,
    squares,
    victim,
)
from residuum.checkpoints import build_model
from residuum.datasets import load_dataset
from residuum.networks import MLP
from residuum.records import Checkpoint, Reconstruction
from residuum.similarity import l2, ncc, standardise
from residuum.theory.kkt_sets import KKTSet


def sphere(scale: Scale, root: str, device: str) -> dict[str, Any]:
    """Refael et al. 2025, Fig. 2a: initial radius against the mean distance of the five best."""
    rows, victims = [], {}
    split = load_dataset("sphere", scale.n, seed=0, dim=scale.dim)
    for init in ("default", "small"):
        arch = f"mlp:{scale.dim}-{scale.width}-1"
        checkpoint, victims[init] = victim(arch, split.train, scale.training, device, init)
        basis = row_space(checkpoint.theta[FIRST])
        for radius in (0.5, 1.0, 2.0, 5.0, 10.0):
            # Gaussian candidates of this deviation lie on the sphere up to 1 / sqrt(2 d).
            config = settings(
                scale, device, sigma=radius / scale.dim**0.5, lr_x=0.003, layers="all", normalise=False
            )  # fmt: skip
            found = run(checkpoint, config, scale.n)
            for one in range(config.restarts):
                chosen = found.run == one
                row = {"init": init, "radius": radius, "run": one, "rank": basis.shape[1]}
                row |= layer_residuals(found, checkpoint, one)
                row |= components(found.x[chosen], found.lam[chosen], found.labels[chosen],
                                  checkpoint, basis)  # fmt: skip
                row |= five_best(found.x[chosen].double(), split, basis)
                rows.append(row)
    return {"victims": victims, "rows": rows}


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


def shift(scale: Scale, root: str, device: str) -> dict[str, Any]:
    """Refael et al. 2025, Fig. 2b: CIFAR shifted by rewriting biases, and by training again."""
    n = 2 * scale.images
    split = load_dataset("cifar10", n, root=root)
    dim = split.train.x[0].numel()
    arch = f"mlp:{dim}-{scale.width}-{scale.width}-1"
    plain, report = victim(arch, split.train, scale.training, device)
    cases = [("none", 0.0, plain, report)]
    for amount in (0.5, 5.0):
        moved = split.train.replace(x=split.train.x + amount)
        cases.append(("rewrite", amount, rewritten(plain, amount), report))
        cases.append(("retrain", amount, *victim(arch, moved, scale.training, device)))
    rows = []
    for kind, amount, checkpoint, said in cases:
        data = split.train.replace(x=split.train.x + amount)
        held = split.holdout.x[:n] + amount
        found = run(checkpoint, settings(scale, device, candidates=2 * n, restarts=2), n)
        row = {"shift": kind, "per_pixel": amount, "margin": said["margin"]}
        kkt = KKTSet.of(build_model(checkpoint), data.x, data.y)
        row["residual_at_data"] = kkt.residual
        row["first_layer_residual"] = found.layers[:, -1, 0].sqrt().tolist()
        row |= compare(found.x.double(), data.x, held)
        rows.append(row)
    return {"n": n, "rows": rows}


def rewritten(checkpoint: Checkpoint, amount: float) -> Checkpoint:
    """b -> b - <w, u> with u the same in every pixel: the network that sees x + u as x."""
    weight = checkpoint.theta[FIRST]
    bias = checkpoint.theta["layers.0.bias"] - amount * weight.sum(1)
    return checkpoint.replace(theta={**checkpoint.theta, "layers.0.bias": bias})


def compare(x: Tensor, train_x: Tensor, held: Tensor) -> dict[str, Any]:
    """Nearest samples, sparse nonnegative mixtures and duplicates, held-out images beside each."""
    row: dict[str, Any] = {}
    kept = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:100]
    for kind, samples in (("train", train_x), ("holdout", held)):
        distance, alike = l2(x, samples), ncc(x, samples)
        row[f"five_best_l2_{kind}"] = float(distance.amin(0).sort().values[:5].mean())
        row[f"five_best_ncc_{kind}"] = float(alike.amax(0).sort(descending=True).values[:5].mean())
        row[f"above_0.8_{kind}"] = int((alike.amax(0) > 0.8).sum())
        atoms = standardise(samples.double())
        fits = [mixture(one, atoms) for one in standardise(x[kept])]
        row[f"single_ncc_{kind}"] = float(np.median([single for single, _ in fits]))
        row[f"mixture_ncc_{kind}"] = float(np.median([mixed for _, mixed in fits]))
    best, which = ncc(x, train_x).max(1)
    matched = which[best > 0.8]
    distinct, n = len(matched.unique()), len(train_x)
    row["matched_candidates"], row["duplicates"] = len(matched), len(matched) - distinct
    row["duplicates_by_chance"] = len(matched) - n * (1 - (1 - 1 / n) ** len(matched))
    return row


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
