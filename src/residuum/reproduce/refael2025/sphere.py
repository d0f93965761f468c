"""Refael et al. 2025, Fig. 2a: how far reconstructions are when candidates start on a sphere of a radius.

Beside the published quantity: the same after projecting candidates on row(W1), since what lies outside
is not seen by the network, and held-out points as control.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from residuum.attacks import AttackConfig
from residuum.datasets import load_dataset
from residuum.records import Knowledge
from residuum.reproduce.context import Context
from residuum.reproduce.outcome import Outcome, Row
from residuum.reproduce.published import PUBLISHED
from residuum.reproduce.refael2025.measures import (
    FIRST,
    components,
    five_best,
    layer_residuals,
    row_space,
    squares,
)
from residuum.reproduce.victims import attacked, victim
from residuum.training import TrainingConfig

INITS = ("default", "small")


@dataclass(frozen=True)
class Setting:
    """Sizes; the paper has n = 500 on S^783, width 1000."""

    n: int
    dim: int
    width: int
    training: int
    steps: int
    candidates: int
    restarts: int
    radii: tuple[float, ...]


SETTINGS = {
    "tiny": Setting(20, 40, 50, 150, 150, 30, 1, (0.5, 10.0)),
    "small": Setting(60, 100, 150, 1500, 1500, 90, 3, (0.5, 1.0, 2.0, 5.0, 10.0)),
    "paper": Setting(500, 784, 1000, 3000, 3000, 600, 3, (0.5, 1.0, 2.0, 5.0, 10.0)),
}


def sphere(context: Context) -> Outcome:
    """Initial radius against the mean distance of the five best, for two ways to start training."""
    own = SETTINGS[context.scale.name]
    split = load_dataset("sphere", own.n, seed=context.seed, dim=own.dim)
    found: list[dict[str, Any]] = []
    victims = {}
    for init in INITS:
        config = TrainingConfig(steps=own.training, init=init, dtype="float32", seed=context.seed)
        net = victim(context, f"mlp:{own.dim}-{own.width}-1", split.train, config)
        basis = row_space(net.checkpoint.theta[FIRST])
        victims[init] = {
            **net.summary,
            "initial_squared_norms": squares(net.theta0),
            "squared_norms": squares(net.checkpoint.theta),
        }
        for radius in own.radii:
            attack = attacked(
                context, net.checkpoint, Knowledge(shape=(own.dim,)), _attack(context, own, radius)
            )
            for run in range(own.restarts):
                mine = attack.run == run
                x, lam, labels = attack.x[mine].double(), attack.lam[mine], attack.labels[mine]
                found.append(
                    {"init": init, "radius": radius, "run": run, "rank": basis.shape[1]}
                    | layer_residuals(attack, net.checkpoint, run)
                    | components(x, lam, labels, net.checkpoint, basis)
                    | five_best(x, split, basis)
                )
    return Outcome(
        tuple(row for init in INITS for row in rows(found, init, own)),
        arrays(found, own),
        {"victims": victims, "rows": found},
        (
            "a default first layer of width 1000 has a squared norm of 333 before training, near the "
            "published objective: compare it with initial_squared_norms in the details, and read "
            "the residual of each layer",
        ),
    )


def _attack(context: Context, own: Setting, radius: float) -> AttackConfig:
    """Gaussian candidates of this deviation lie on the sphere up to 1 / sqrt(2 d)."""
    base = AttackConfig(
        steps=own.steps,
        restarts=own.restarts,
        candidates=own.candidates,
        lr_x=0.003,
        layers="all",
        normalise=False,
        dtype=context.fast,
        seed=context.seed,
    )
    return replace(base, sigma=radius / own.dim**0.5)


def rows(found: list[dict[str, Any]], init: str, own: Setting) -> list[Row]:
    """Distances at the smallest and the largest radius, and how much of the growth is seen."""
    result = []
    for kind in ("raw", "projected"):
        for radius in own.radii:
            mine = [row for row in found if row["init"] == init and row["radius"] == radius]
            result.append(
                Row(
                    f"{init} init, radius {radius:g}: mean distance of the five best, {kind}",
                    float(np.mean([row[f"five_best_{kind}_train"] for row in mine])),
                    PUBLISHED["refael2025"]["radii"]
                    if kind == "raw" and radius == own.radii[-1]
                    else None,
                    float(np.mean([row[f"five_best_{kind}_holdout"] for row in mine])),
                )
            )
    objective = [row["objective"] for row in found if row["init"] == init]
    result.append(
        Row(
            f"{init} init: total objective at the end",
            [float(np.min(objective)), float(np.max(objective))],
            PUBLISHED["refael2025"]["objective"] if own.width == 1000 else None,
        )
    )
    return result


def arrays(found: list[dict[str, Any]], own: Setting) -> dict[str, Any]:
    """(inits, radii, runs) of every distance."""
    shape = (len(INITS), len(own.radii), own.restarts)
    names = [f"five_best_{a}_{b}" for a in ("raw", "projected") for b in ("train", "holdout")]
    values = {name: np.array([row[name] for row in found]).reshape(shape) for name in names}
    return {**values, "radii": np.array(own.radii), "inits": np.array(INITS)}
