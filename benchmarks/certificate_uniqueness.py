"""The uniqueness certificate of every sample of a large network, each radius tried by a real split.

A 784-1000-1000-1 network trained on 500 MNIST digits; the training samples with their fitted
multipliers stand for a reconstruction, those with none get the smallest one fitted (candidates of an
attack all carry one). Twenty samples, drawn by seed before anything is certified, are split along the
reported direction: the residual of ALL candidates, computed from scratch by one backward pass, must
change by less than the tolerance at 0.9 of the radius and by more at 1.5 of it. With a box, only where
a switch rather than the box is in the way is there anything to see at 1.5.

MNIST is read from the folder RESIDUUM_DATA names.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Report, WrongDevice, clock
from residuum.checkpoints import build_model
from residuum.datasets import load_dataset
from residuum.networks import MLP
from residuum.records import Dataset
from residuum.records.certificate import Uniqueness
from residuum.stationarity import by_layer, norm, parameters, residual
from residuum.theory.kkt import evaluate, fit_multipliers
from residuum.theory.rows import constraint_rows, normalise_labels
from residuum.theory.uniqueness import estimate, uniqueness
from residuum.training import TrainingConfig, released, train

ARCH, SAMPLES, STEPS, SEED = "mlp:784-1000-1000-1", 500, 250, 0
TRIED = 20
SECONDS = {"cpu": 300.0, "cuda": 30.0}
Box = tuple[Tensor, Tensor] | None


def certificate_uniqueness(device: str) -> Report:
    """Seconds allowed over seconds taken, the radii of twenty samples confirmed."""
    model, data, lam = _victim()
    x = data.x.double()
    mean = torch.zeros(x.shape[1:]) if data.mean is None else data.mean.reshape(x.shape[1:])
    boxes: dict[str, Box] = {"none": None, "0..1": (0 - mean.double(), 1 - mean.double())}
    rows = [_row(model, x, data.y, lam, name, box, device) for name, box in boxes.items()]
    allowed = SECONDS[device.split(":")[0]]
    return Report(
        what="seconds allowed / seconds taken, certificate of all samples",
        settings={
            "data": "mnist", "samples": SAMPLES, "arch": ARCH, "tried": TRIED,
            "training": f"margin, {STEPS} steps, float32", "dtype": "float64",
            "threads": torch.get_num_threads(),
        },
        seeds=(SEED,),
        figures=rows,
        ratio=min(allowed / row["seconds"] for row in rows),
        bar=1.0,
        checks={
            "0.9 of the radius: below the tolerance, all tried":
                all(row["below at 0.9"] == TRIED for row in rows),
            "1.5 of the radius: above the tolerance, all that a switch stops":
                all(row["above at 1.5"] == row["stopped by a switch"] for row in rows),
            "no box: a switch stops every one tried": rows[0]["stopped by a switch"] == TRIED,
        },
    )  # fmt: skip


def _row(
    model: MLP, x: Tensor, y: Tensor, lam: Tensor, name: str, box: Box, device: str
) -> dict[str, Any]:
    cost = estimate(model, x, box=box, device=device)
    print(f"box {name}: {cost}", flush=True)
    start = time.process_time()
    found, seconds = clock(lambda: uniqueness(model, x, y, lam, box=box, device=device), device)
    busy = time.process_time() - start
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))[:TRIED].tolist()
    tried = [_split(model, x, y, lam, found, i) for i in chosen]
    switch = [i for i in chosen if found.blocked_by[i] not in ("box", "nothing")]
    above = sum(
        change > found.tolerance
        for i, (_, change) in zip(chosen, tried, strict=True)
        if i in switch
    )
    relative = found.radius / found.size
    return {
        "seed": SEED, "box": name, "certified": len(found), "seconds": seconds,
        "processor seconds": busy,
        "estimated seconds": cost.seconds, "tolerance": found.tolerance,
        "tried": TRIED, "below at 0.9": sum(low <= found.tolerance for low, _ in tried),
        "stopped by a switch": len(switch), "above at 1.5": above,
        "largest change at 0.9": max(low for low, _ in tried),
        "smallest change at 1.5": min((high for i, (_, high) in zip(chosen, tried, strict=True)
                                      if i in switch), default=None),
        "radius / |x|, median": float(relative.median()),
        "radius / its upper bound, median": float((found.radius / found.radius_most).median()),
        "determined energy, median": float(found.determined_energy.median()),
        "determined at least, median": float(found.determined_at_least.median()),
        "largest duality gap": float((found.determined_energy - found.determined_at_least).max()),
        "null space undoubled": found.null_space.undoubled_most,
        "null space doubled": found.null_space.doubled_most,
    }  # fmt: skip


def _split(
    model: MLP, x: Tensor, y: Tensor, lam: Tensor, found: Uniqueness, i: int
) -> tuple[float, float]:
    """Change of the whole residual when sample i is split by 0.9 and by 1.5 of its radius."""
    theta = parameters(model)
    weight = (lam * torch.where(y > 0, 1.0, -1.0))[:, None]
    before = residual(model, theta, x, weight)
    changes = []
    for share in (0.9, 1.5):
        a = share * found.radius[i] * found.direction[i]
        points = torch.cat([x, (x[i] + a)[None], (x[i] - a)[None]])
        split = torch.cat([weight, weight[[i, i]] / 2])
        split[i] = 0
        after = residual(model, theta, points, split)
        change = sum(
            norm({n: after[n] - before[n] for n in names}) ** 2
            / norm({n: theta[n] for n in names}) ** 2
            for names in by_layer(theta).values()
        )
        changes.append(change**0.5)
    return changes[0], changes[1]


def _victim() -> tuple[MLP, Dataset, Tensor]:
    root = os.environ.get("RESIDUUM_DATA")
    if not root:
        raise WrongDevice("RESIDUUM_DATA does not name the folder of mnist.npz")
    data = load_dataset("mnist", SAMPLES, root=root).train
    state = train(ARCH, data, TrainingConfig(steps=STEPS, seed=SEED, dtype="float32"))
    model = build_model(released(state, ARCH, data, "binary")).double().requires_grad_(False)
    assert isinstance(model, MLP)
    outputs = evaluate(model, data.x.double())
    rows = constraint_rows(outputs, normalise_labels(data.y, "binary", 1), "binary")
    lam = fit_multipliers(model, data.x.double(), rows)[0]
    return model, data, lam.clamp(min=float(lam[lam > 0].min()))
