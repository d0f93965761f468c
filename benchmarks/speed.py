"""Measure in one run on one GPU what takes time: a step, published quality, an audit, unmixing, a sweep.

    RESIDUUM_DATA=FOLDER python -m benchmarks speed --device cuda    FOLDER holds cifar10.npz; 2-3 minutes

The network is d-1000-1000-1, trained to the margin on n = 500 CIFAR images. Published quality is 17 images
above ssim3 0.4, as in two runs of Haim et al. 2022. The time is that of the shortest of a few attacks that
reaches it, with everything included.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

import residuum as rs
from benchmarks.step import SHAPES, floor, ours, published
from benchmarks.sweep import TINY_STEPS, TINY_TRIALS, victim
from experiments.report import Report, WrongDevice, only_on
from experiments.stationarity import MARGIN, measure_quick
from experiments.timing import clock, threads
from experiments.unmix import speed as time_unmix
from residuum.datasets import load_dataset
from residuum.errors import DataError
from residuum.sweeping import sweep
from residuum.training import train

N, SEED, ARCH = 500, 20, "mlp:3072-1000-1000-1"
PUBLISHED_COUNT, PUBLISHED_SECONDS = 17, 430.0  # seconds of two runs, published way, on one H200
BUDGET, RANK = "1min", 67
BAR = 14.0


def speed(device: str) -> Report:
    """Measure all figures in one run. The bar is that of a step."""
    only_on(device, "cuda")
    try:
        split = load_dataset("cifar10", N, seed=SEED, holdout=1000)
    except DataError as problem:
        raise WrongDevice(f"it needs CIFAR-10: {problem}") from problem
    row: dict[str, Any] = steps(device)
    state, row["training, s"] = clock(
        lambda: train(ARCH, split.train, MARGIN.changed(seed=SEED), device=device), device
    )
    row |= quality(state.theta, split, device)
    checkpoint = rs.Network(dict(state.theta), ARCH, split.train.shape)
    result, row["audit with a budget of a minute, s"] = clock(
        lambda: rs.audit(
            checkpoint, data=split.train, holdout=split.holdout, budget=BUDGET, device=device
        )
    )
    row["audit, recovered"] = result.verdict.recovered
    row["audit, by chance"] = result.verdict.expected_by_chance
    unmix_seconds = time_unmix(
        state.theta["layers.0.weight"].float().cpu(), split.train.shape, RANK
    )["one run"]
    row["one run of unmix, one core, s"] = unmix_seconds["unmix"]
    row["the same by scikit-learn's FastICA, s"] = unmix_seconds["scikit-learn"]
    row["sweep, seconds beside its trials"] = overhead()
    return Report(
        what="milliseconds per attack step, published way over ours, and what else takes time",
        settings={"arch": ARCH, "n": N, "published count": PUBLISHED_COUNT, "rank": RANK},
        seeds=(SEED,),
        figures=[{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}],
        ratio=row["published step, ms"] / row["step, ms"],
        bar=BAR,
        checks={"published quality reached": row["to published quality, steps"] > 0},
        also={"cores": os.cpu_count()},
    )


def steps(device: str) -> dict[str, Any]:
    """Return the milliseconds of a step with all layers, m = 1000."""
    d = SHAPES["cifar"]
    fast: dict[str, Any] = {"dtype": "bf16", "compile": True}
    return {
        "published step, ms": published(d, device, torch.float32, 40),
        "step, ms": ours(d, device, 500, layers="all", **fast),
        "step of the first layer, ms": ours(d, device, 500, layers="first", **fast),
        "its matrix products alone, ms": floor(d, device, 50),
    }


def quality(theta: Any, split: rs.Split, device: str) -> dict[str, Any]:
    """Return the shortest attack that recovers as many images as published."""
    target = {
        "arch": ARCH,
        "theta": dict(theta),
        "x": split.train.x.float(),
        "held": split.holdout.x.float(),
        "mean": split.train.mean,
    }
    runs = measure_quick(target, device)
    for count, run in runs.items():
        if run["ssim3"] >= PUBLISHED_COUNT:
            return {
                "to published quality, s": run["seconds"],
                "to published quality, steps": int(count),
                "images above ssim3 0.4 then": run["ssim3"],
                "the same of held-out images": run["ssim3 held out"],
                "published, s": PUBLISHED_SECONDS,
            }
    return {"to published quality, steps": 0}


def overhead() -> float:
    """Return the share of a sweep's wall-clock time that its trials do not take, on one core."""
    checkpoint, knowledge, _ = victim(40)
    attack = rs.attacks.Auto(restarts=2, steps=TINY_STEPS)
    with threads(1), tempfile.TemporaryDirectory() as place:
        done, wall = clock(
            lambda: sweep(
                checkpoint, knowledge, trials=TINY_TRIALS, attack=attack, out=Path(place) / "sweep"
            )
        )
    return wall / done.summary["session"]["compute_seconds"] - 1
