"""Loo et al. 2024, Understanding Reconstruction Attacks with the Neural Tangent Kernel (2302.01428)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from residuum.attacks import PRESETS
from residuum.reproduce.context import Context
from residuum.reproduce.figure import Figure, drawn
from residuum.reproduce.images import ImageRun, details, perform, prefixed, shown
from residuum.reproduce.outcome import Array, Outcome, Row
from residuum.reproduce.published import PUBLISHED

TRAINING = {
    "method": "gd",
    "loss": "squared",
    "lr": 5e-4,
    "momentum": 0.9,
    "steps": 40_000,
    "init": "lecun",
    "stop_loss": 1e-9,
}
MNIST = ImageRun(
    "MNIST",
    "mnist",
    200,
    hidden=(2048, 2048),
    bias="all",
    task="regression",
    training=TRAINING,
    attack=replace(PRESETS["ntk"], candidates=400),
    box=True,
    initial=True,
    metric="l2",
)
RUNS = {"MNIST": MNIST, "CIFAR": replace(MNIST, name="CIFAR", data="cifar10")}


def ntk(context: Context) -> Outcome:
    """Weights and initial weights known: L2 of one-to-one matches."""
    rows: list[Row] = []
    arrays: dict[str, Array] = {}
    said: dict[str, Any] = {}
    known = PUBLISHED["loo2024"]
    published = {
        "MNIST": (known["mnist_l2_below_2.5"], None),
        "CIFAR": (None, known["cifar_median_l2"]),
    }
    for name, run in RUNS.items():
        if context.scale.name == "tiny":
            run = replace(run, training={**TRAINING, "lr": 1e-3})
        done = perform(context, run)
        scores = done.scores["residuum"]
        l2, ncc = scores.metrics["l2"], scores.metrics["ncc"]
        below, median = published[name]
        rows += [
            Row(
                f"{name}: L2 below 2.5, one-to-one",
                l2.above_published_threshold,
                below,
                l2.above_published_threshold_holdout,
                note=f"of {scores.n}; meant for 28x28 pixels",
            ),
            Row(f"{name}: median L2", l2.median, median),
            Row(
                f"{name}: recovered (NCC beyond 99% of chance)",
                ncc.recovered,
                chance=ncc.expected_by_chance,
                note=ncc.rule,
            ),
        ]
        arrays |= prefixed(name, shown(done, "residuum"))
        said[name] = details(done)
    preset = PRESETS["loo2024"]
    notes = (
        f"gradients at both ends of training and {MNIST.attack.steps} steps; the released setting has those "
        f"at theta and {preset.steps}",
    )
    return Outcome(tuple(rows), arrays, {"runs": said}, notes)


FIGURES: dict[str, Figure] = {
    "ntk": Figure(
        "MNIST and CIFAR n=200 from weights and initial weights", ntk, drawn("images.grids")
    ),
}
