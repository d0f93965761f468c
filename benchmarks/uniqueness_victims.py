"""What decides how much leaks: training length, the data's spectrum, the part of the weights known."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import first_layer_rank
from benchmarks.uniqueness_common import Scale, counts, finite, run, settings, victim
from residuum.checkpoints import build_model
from residuum.datasets import load_dataset
from residuum.networks import MLP
from residuum.records import Checkpoint, Dataset, Split
from residuum.reproduce.refael2025.measures import FIRST, five_best, row_space
from residuum.stationarity import norm
from residuum.theory.budgets import budget_certificates
from residuum.theory.directions import data_direction
from residuum.theory.kkt_sets import KKTSet


def length(scale: Scale, root: str, device: str) -> dict[str, Any]:
    """Training length against recovered samples, KKT residual and budgets; MNIST, odd against even."""
    rows = []
    for seed in scale.seeds:
        split = load_dataset("mnist", scale.images, seed=seed + 100, root=root)
        arch = f"mlp:784-{scale.width}-{scale.width}-1"
        with tempfile.TemporaryDirectory() as folder:
            for steps in scale.lengths:
                path = Path(folder) / "state.safetensors"
                checkpoint, report = victim(arch, split.train, steps, device, seed=seed, path=path)
                rows.append({"seed": seed, "length": steps, "margin": report["margin"],
                             **judged(checkpoint, split, scale, device)})  # fmt: skip
    return {"n": scale.images, "rows": rows}


def judged(checkpoint: Checkpoint, split: Split, scale: Scale, device: str) -> dict[str, Any]:
    """Attack and score; the certificate and the budgets of the true samples."""
    n = len(split.train)
    found = run(checkpoint, settings(scale, device, candidates=2 * n), n)
    model = build_model(checkpoint)
    given = KKTSet.of(model, split.train.x, split.train.y)
    kkt = given.used()
    layers = sum(name.endswith("weight") for name in checkpoint.theta)  # the order of homogeneity
    budgets = kkt.budgets(kkt.directions("weights")).least / kkt.x.flatten(1).norm(dim=1)
    return {
        "residual_plain": given.residual,
        "normalized_margin": (given.margin or 0.0) / norm(given.target) ** layers,
        "budget_over_norm": finite(float(budgets.median())),
        "in_use": len(kkt),
        "first_layer_residual": float(found.layers[:, -1, 0].sqrt().min()),
        "first_layer_rank": first_layer_rank(checkpoint.theta),
        **counts(found.x, split),
    }


def spectrum(scale: Scale, root: str, device: str) -> dict[str, Any]:
    """Data whose lowest singular values are made smaller and smaller, down to a proper subspace."""
    rows, dim, n = [], max(20, scale.width // 10), max(30, scale.width // 5)
    for seed in scale.seeds[:2]:
        rng = torch.Generator().manual_seed(seed)
        full = torch.randn(2 * n, dim, generator=rng, dtype=torch.float64) / dim**0.5
        y = torch.where(full[:, 0] > 0, 1.0, -1.0)
        for factor in (1.0, 0.3, 0.1, 0.03, 0.0):
            x = full.clone()
            x[:, dim // 2 :] *= factor
            split = Split(Dataset(x[:n], y[:n]), Dataset(x[n:], y[n:]))
            arch = f"mlp:{dim}-{scale.width}-1"
            checkpoint, report = victim(
                arch, split.train, 2 * scale.training // 3, device, seed=seed
            )
            row = {"seed": seed, "factor": factor, "margin": report["margin"]}
            row |= flatness(checkpoint, split)
            found = run(checkpoint, settings(scale, device, candidates=2 * n, lr_x=0.003), n)
            row |= five_best(found.x.double(), split, row_space(checkpoint.theta[FIRST]))
            row["first_layer_residual"] = float(found.layers[:, -1, 0].sqrt().min())
            rows.append(row)
    return {"n": n, "dim": dim, "rows": rows}


def flat(scale: Scale, root: str, device: str) -> dict[str, Any]:
    """Images that an attack recovers, made flatter: who is recovered when the data span less?"""
    rows, kept = [], scale.images // 2
    for seed in scale.seeds[:2]:
        given = load_dataset("mnist", scale.images, seed=seed + 100, root=root)
        for factor in (1.0, 0.3, 0.1, 0.0):
            split = flattened(given, kept, factor)
            arch = f"mlp:784-{scale.width}-1"
            checkpoint, report = victim(arch, split.train, scale.training, device, seed=seed)
            rows.append({"seed": seed, "factor": factor, "margin": report["margin"],
                         **judged(checkpoint, split, scale, device)})  # fmt: skip
    return {"n": scale.images, "kept_directions": kept, "rows": rows}


def flattened(split: Split, kept: int, factor: float) -> Split:
    """Everything beyond the ``kept`` first principal directions times ``factor``.

    The directions are those of training and held-out samples together, which stay exchangeable.
    """
    pool = torch.cat([split.train.x, split.holdout.x]).double()
    basis = torch.linalg.svd(pool.flatten(1), full_matrices=False).Vh[:kept]
    flat = pool.flatten(1)
    main = flat @ basis.T @ basis
    moved = (main + factor * (flat - main)).reshape(pool.shape).to(split.train.x)
    n = len(split.train)
    return Split(split.train.replace(x=moved[:n]), split.holdout.replace(x=moved[n:]))


def flatness(checkpoint: Checkpoint, split: Split) -> dict[str, Any]:
    """sigma_d, gamma, and the budgets along the last singular vector: Theorem 8 and exact."""
    model = build_model(checkpoint).double()
    assert isinstance(model, MLP)
    kkt = KKTSet.of(model, split.train.x, split.train.y)
    nu, sigma, gamma = data_direction(split.train.x)
    eps = kkt.residual * norm(kkt.target)
    used = (kkt.lam > 0).nonzero()[:, 0].tolist()
    found = [budget_certificates(model, kkt.x, kkt.lam, i, nu, eps) for i in used]
    return {
        "sigma_d": sigma,
        "gamma": gamma,
        "residual_plain": kkt.residual,
        "theorem8_median": finite(np.median([one.theorem8 for one in found])),
        "exact_median": finite(np.median([one.exact for one in found])),
        "theorem5_printed_beyond_exact": sum("theorem5_printed" in one.invalid for one in found),
        "theorem8_beyond_exact": sum("theorem8" in one.invalid for one in found),
        "certified": len(found),
    }


def convnet(scale: Scale, root: str, device: str) -> dict[str, Any]:
    """Merge and split on trained convnets: residual inside the budget, and beyond it."""
    rows, n = [], min(20, scale.images)
    for seed in scale.seeds:
        split = load_dataset("mnist", n, seed=seed + 100, root=root)
        arch = "convnet:1x28x28-4-8-1"
        checkpoint, report = victim(arch, split.train, min(scale.training, 2000), device, seed=seed)
        kkt = KKTSet.of(build_model(checkpoint), split.train.x, split.train.y)
        some = (kkt.lam > 0).nonzero()[:3, 0]
        nu = kkt.directions("softest", some)
        least = kkt.budgets(nu, some).least
        row = {
            "seed": seed,
            "margin": report["margin"],
            "residual": kkt.residual,
            "budget_median": float(least.median()),
            "norm": float(kkt.x.flatten(1).norm(dim=1).mean()),
        }
        for share in (0.5, 0.9, 0.99, 1.1, 2.0, 5.0):
            after = kkt.split_all(nu, share * least, samples=some, check=False)
            row[f"change_at_{share}"] = abs(after.residual - kkt.residual)
        inside = kkt.split_all(nu, 0.9 * least, samples=some)
        first = int(some[0])
        back = inside.merge(first, first + 1)
        row["merge_error"] = float((back.x[first] - kkt.x[first]).norm())
        row["outputs_change"] = float((inside.margins.min() - kkt.margins.min()).abs())
        rows.append(row)
    return {"n": n, "rows": rows}


def partial(scale: Scale, root: str, device: str) -> dict[str, Any]:
    """What part of the weights suffices: a share of the neurons, or the first layer alone."""
    rows = []
    for seed in scale.seeds:
        split = load_dataset("mnist", scale.images, seed=seed + 100, root=root)
        arch = f"mlp:784-{scale.width}-1"
        whole, _ = victim(arch, split.train, scale.training, device, seed=seed)
        cases = [(f"{share:g} of the neurons", some_neurons(whole, share, seed))
                 for share in (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)]  # fmt: skip
        cases.append(("first layer, signs known", from_balance(whole, None)))
        cases.append(("first layer alone", from_balance(whole, seed)))
        n = len(split.train)
        for name, checkpoint in cases:
            found = run(checkpoint, settings(scale, device, candidates=2 * n, layers="first"), n)
            rows.append({"seed": seed, "access": name,
                         "neurons": len(checkpoint.theta[FIRST]),
                         "first_layer_rank": first_layer_rank(checkpoint.theta),
                         "first_layer_residual": float(found.layers[:, -1, 0].sqrt().min()),
                         **counts(found.x, split)})  # fmt: skip
    return {"n": scale.images, "rows": rows}


def some_neurons(checkpoint: Checkpoint, share: float, seed: int) -> Checkpoint:
    """The network of some hidden neurons: each one's equation stands without the others."""
    theta = checkpoint.theta
    width = len(theta[FIRST])
    keep = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    keep = keep[: max(1, round(share * width))].sort().values
    part = {FIRST: theta[FIRST][keep], "layers.0.bias": theta["layers.0.bias"][keep],
            "layers.1.weight": theta["layers.1.weight"][:, keep]}  # fmt: skip
    dim = theta[FIRST].shape[1]
    return checkpoint.replace(theta=part, arch=f"mlp:{dim}-{len(keep)}-1")


def from_balance(checkpoint: Checkpoint, guess: int | None) -> Checkpoint:
    """Output weights from |v_j|^2 = |w_j|^2 + b_j^2, with the true signs or guessed ones."""
    theta = checkpoint.theta
    size = (theta[FIRST].square().sum(1) + theta["layers.0.bias"].square()).sqrt()
    sign = theta["layers.1.weight"][0].sign()
    if guess is not None:
        rng = torch.Generator().manual_seed(guess)
        sign = torch.randint(0, 2, sign.shape, generator=rng).to(sign) * 2 - 1
    return checkpoint.replace(theta={**theta, "layers.1.weight": (size * sign)[None]})
