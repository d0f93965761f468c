"""The figures of Refael et al. 2025 again: the sphere (2a) and shifted CIFAR (2b), with controls."""

from __future__ import annotations

from typing import Any

from benchmarks.uniqueness_common import Scale, run, settings, victim
from residuum.checkpoints import build_model
from residuum.datasets import load_dataset
from residuum.records import Checkpoint, Split
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
    split, arch = shifted_data(scale, root)
    plain, report = victim(arch, split.train, scale.training, device)
    cases = [("none", 0.0, plain, report)]
    for amount in (0.5, 5.0):
        moved = split.train.replace(x=split.train.x + amount)
        cases.append(("rewrite", amount, rewritten(plain, amount), report))
        cases.append(("retrain", amount, *victim(arch, moved, scale.training, device)))
    rows = [shifted(*case, split, scale, device) for case in cases]
    return {"n": len(split.train), "rows": rows}


def unshifted(scale: Scale, root: str, device: str) -> dict[str, Any]:
    """The first case of ``shift`` alone, which is the one with repeats to count."""
    split, arch = shifted_data(scale, root)
    case = victim(arch, split.train, scale.training, device)
    return {"n": len(split.train), "rows": [shifted("none", 0.0, *case, split, scale, device)]}


def shifted_data(scale: Scale, root: str) -> tuple[Split, str]:
    """The first images of CIFAR, and the network trained on them."""
    split = load_dataset("cifar10", 2 * scale.images, root=root)
    return split, f"mlp:{split.train.x[0].numel()}-{scale.width}-{scale.width}-1"


def shifted(
    kind: str, amount: float, checkpoint: Checkpoint, said: dict[str, Any], split: Split,
    scale: Scale, device: str,
) -> dict[str, Any]:  # fmt: skip
    """Attack one network and compare with the images it is said to be trained on."""
    n = len(split.train)
    data = split.train.replace(x=split.train.x + amount)
    held = split.holdout.x[:n] + amount
    found = run(checkpoint, settings(scale, device, candidates=2 * n, restarts=2), n)
    row = {"shift": kind, "per_pixel": amount, "margin": said["margin"]}
    kkt = KKTSet.of(build_model(checkpoint), data.x, data.y)
    row["residual_at_data"] = kkt.residual
    row["first_layer_residual"] = found.layers[:, -1, 0].sqrt().tolist()
    return row | compare(found.x.double(), found.run, data.x, held)
