"""Loo et al. 2024, Understanding Reconstruction Attacks with the Neural Tangent Kernel (2302.01428)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import residuum as rs
from papers import drawing
from papers.runs import Context, Figure, ImageRun, Outcome, Scale

ATTACK = rs.attacks.NTK(**{**rs.PRESETS["ntk"].settings, "candidates": 400})
VICTIM = ImageRun("MNIST", "mnist", 200, (2048, 2048), "all", "regression", metric="l2")
VICTIM = replace(VICTIM, attack=ATTACK, box=True, initial=True)
PUBLISHED = {"MNIST": (142, None), "CIFAR": (None, 5.2)}  # L2 below 2.5, median L2
NOTE = f"gradients at both ends of training and {ATTACK.steps} steps; the released setting has those at "
NOTE += f"theta and {rs.PRESETS['loo2024'].settings['steps']}"


def training(scale: Scale) -> dict[str, Any]:
    """Return the settings of a training to a squared loss of 1e-9, from weights of variance 1/fan_in."""
    # Digits have a hundredth of the inputs, so they allow larger steps.
    lr = 5e-4 if scale.name == "paper" else 1e-3
    descent = {"method": "gd", "loss": "squared", "lr": lr, "momentum": 0.9, "steps": 40_000}
    return {**descent, "init": "lecun", "stop_loss": 1e-9}


def ntk(context: Context) -> Outcome:
    """Attack networks with known initial weights, and measure L2 distances of one-to-one matches."""
    out = Outcome(details={"runs": {}}, notes=[NOTE])
    for name, data in (("MNIST", "mnist"), ("CIFAR", "cifar10")):
        run = replace(VICTIM, name=name, data=data, training=training(context.scale))
        done = run.perform(context)
        scores = done.arms["residuum"].scores
        l2, (below, median) = scores.metrics["l2"], PUBLISHED[name]
        count, chance = l2.above_published_threshold, l2.above_published_threshold_holdout
        note = f"of {scores.n}; meant for 28x28 pixels"
        out.row(f"{name}: L2 below 2.5, one-to-one", count, below, chance, note=note)
        out.row(f"{name}: median L2", l2.median, median)
        out.recovered(name, scores)
        out.keep(name, done.best())
        out.details["runs"][name] = done.details()
    return out


_TITLE = "MNIST and CIFAR n=200 from weights and initial weights"
FIGURES = {"ntk": Figure(_TITLE, ntk, drawing.grids)}
