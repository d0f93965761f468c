"""What the published objective of the sphere attack (Refael et al. 2025, 330 to 332) is made of.

Victims start from torch's default first layer. Gradient descent leaves theta = theta_0 + what the
samples added; an attack that explains the second part alone ends at |theta_0|^2. So beside the
objective: |theta_0|^2, and the cosine between what is left and theta_0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.uniqueness_common import Scale, run, settings
from residuum.attacks import PRESETS
from residuum.checkpoints import build_model
from residuum.datasets import load_dataset
from residuum.records import Checkpoint, Reconstruction
from residuum.reproduce.refael2025.measures import layer_residuals, squares
from residuum.stationarity import flatten, residual
from residuum.training import TrainingConfig, released, train

RELEASED = "haim2022-mnist-kcf9bhbi"
# Heavy-ball descent follows the flow of plain descent at ten times this rate, 300 times the published.
DESCENT = TrainingConfig(method="gd", lr=0.3, momentum=0.9, init="default", dtype="float32")


def objective(scale: Scale, root: str, device: str) -> dict[str, Any]:
    """Default-init victims by descent to two losses and by the margin method, two attacks on each."""
    split = load_dataset("sphere", scale.n, seed=0, dim=scale.dim)
    arch = f"mlp:{scale.dim}-{scale.width}-1"
    rows, steps = [], scale.steps // 6
    sigma = 1 / scale.dim**0.5  # radius 1
    attacks = {
        "published": replace(PRESETS[RELEASED], steps=steps, candidates=2 * scale.n, sigma=sigma,
                             dtype="float32", device=device),
        "residuum": settings(scale, device, steps=steps, restarts=1, sigma=sigma, lr_x=0.003,
                             layers="all", normalise=False),
    }  # fmt: skip
    for name, training in victims(scale).items():
        state = train(arch, split.train, training, task="binary", device=device)
        checkpoint = released(state, arch, split.train, "binary")
        last = state.history[-1]
        for attack, config in attacks.items():
            found = run(checkpoint, config, scale.n)
            rows.append({
                "victim": name, "attack": attack, "training_steps": state.step,
                "training_loss": last["loss"], "margin": last["margin"],
                "initial_squared_norms": squares(state.theta0),
                "squared_norms": squares(state.theta),
                **layer_residuals(found, checkpoint, 0), "history": history(found, checkpoint),
                **left(found, checkpoint, state.theta0),
            })  # fmt: skip
    return {"steps": steps, "rows": rows}


def victims(scale: Scale) -> dict[str, TrainingConfig]:
    """Descent stops at its loss, ten times as many steps as the margin method allowed."""
    return {
        **{
            f"descent to loss {loss:g}": replace(DESCENT, steps=10 * scale.training, stop_loss=loss)
            for loss in (1e-2, 1e-3)
        },
        "margin": TrainingConfig(steps=scale.training, init="default", dtype="float32"),
    }


def history(found: Reconstruction, checkpoint: Checkpoint) -> list[tuple[int, float]]:
    """(step, objective) at about ten moments."""
    sizes = squares(checkpoint.theta)
    scales = torch.tensor([sizes[name] for name in found.layer_names], dtype=torch.float64)
    totals = (found.layers[0].double() @ scales).tolist()
    pairs = list(zip(found.steps.tolist(), totals, strict=True))
    return pairs[:: max(1, len(pairs) // 10)]


def left(
    found: Reconstruction, checkpoint: Checkpoint, theta0: dict[str, Tensor]
) -> dict[str, float]:
    """What the candidates leave of theta, with the network's own gates, against theta_0."""
    model = build_model(checkpoint).double()
    theta = {name: t.double() for name, t in checkpoint.theta.items()}
    u = (found.lam.double() * found.labels.double())[:, None]
    rest = flatten(residual(model, theta, found.x.double(), u))
    start = flatten({name: theta0[name].double() for name in theta})
    return {
        "left_squared": float(rest @ rest),
        "cosine_with_initial": float(rest @ start / (rest.norm() * start.norm())),
        "multipliers": float(found.lam.sum()),
    }
