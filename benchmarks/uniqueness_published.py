"""The figures of Refael et al. 2025 again: the sphere (2a) and shifted CIFAR (2b), with controls."""

from __future__ import annotations

from typing import Any

from benchmarks.uniqueness_common import Scale, run, settings, victim
from residuum.checkpoints import build_model
from residuum.datasets import load_dataset
from residuum.reproduce.refael2025.measures import (
    FIRST,
    compare,
    components,
    five_best,
    layer_residuals,
    rewritten,
    row_space,
)
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
