"""How far a reconstruction explains what the weights must equal: layer by layer, in float64.

    r_l = || target_l - sum_i grad_l <u_i, Phi(x_i)> || / || target_l ||

An attack that found nothing is evidence of absence only where it explains the layers that carry
information. With a start these are the layers that moved by more than rounding: a frozen layer has a
gradient that nobody followed, so no candidate can explain it and none has to. Where the first layer
itself was frozen, inputs are seen through fixed features only and many images share one feature:
explaining the layers above says little about images. Without a start only the first layer of a
network is known to have come far from its own; the others are measured, not judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from residuum.attacks.config import AttackConfig
from residuum.attacks.problem import Problem
from residuum.attacks.run import objective_of
from residuum.checkpoints import build_model
from residuum.records import Checkpoint, Reconstruction
from residuum.records.base import Record
from residuum.stationarity import by_layer, moved_layers, parameters

FROZEN_FIRST = (
    "the first layer did not move from its start, so images were seen through fixed features only"
)
NOTHING_MOVED = "no layer moved from its start"


@dataclass(frozen=True, eq=False)
class Explained(Record):
    """residuals: norm over norm of every layer, of the best restart; judged: the layers that count;
    worst: the largest of theirs, None where nothing could be measured; silent: why even a small
    residual would say nothing, "" where it speaks.
    """

    residuals: dict[str, float] = field(default_factory=dict)
    judged: tuple[str, ...] = ()
    silent: str = ""

    @property
    def worst(self) -> float | None:
        """Of the judged layers."""
        found = [self.residuals[name] for name in self.judged if name in self.residuals]
        return max(found) if len(found) == len(self.judged) and found else None


def explained(checkpoint: Checkpoint, found: Reconstruction) -> Explained:
    """The best restart that did not diverge, measured anew in float64 with its own surrogate."""
    judged, silent = judged_layers(checkpoint, found)
    best = _best_restart(found, judged)
    if best is None:
        return Explained({}, judged, silent)
    if not found.settings:  # recovered in closed form: its one residual is of all equations, exact
        return Explained({found.layer_names[0]: best[2]}, found.layer_names[:1], silent)
    run, step, _ = best
    config = AttackConfig.from_json(found.settings)
    mine = found.run == run
    problem = Problem(
        build_model(checkpoint), objective_of(config, found.knowledge), found.knowledge,
        found.labels[mine], surrogate=config.surrogate, layers="all", dtype=torch.float64,
    )  # fmt: skip
    x, lam = found.x[mine].double()[None], found.lam[mine].double()[None]
    squared = problem.evaluate(x, lam, config.sharpness_at(step)).layers[0].tolist()
    values = dict(zip(problem.layer_names, squared, strict=True))
    finite = {name: math.sqrt(max(v, 0.0)) for name, v in values.items() if math.isfinite(v)}
    return Explained(finite, judged, silent)


def judged_layers(checkpoint: Checkpoint, found: Reconstruction) -> tuple[tuple[str, ...], str]:
    """The layers that carry information, and why they say nothing where that is so."""
    theta0 = found.knowledge.theta0
    layers = tuple(by_layer(checkpoint.theta))
    if theta0 is None:
        return found.layer_names[:1], ""
    moved = moved_layers(parameters(build_model(checkpoint)), theta0)
    silent = "" if moved[:1] == layers[:1] else FROZEN_FIRST if moved else NOTHING_MOVED
    return moved, silent


def _best_restart(found: Reconstruction, judged: tuple[str, ...]) -> tuple[int, int, float] | None:
    """(restart, step, residual) of the kept point whose worst judged layer is least, as recorded."""
    wanted = [i for i, name in enumerate(found.layer_names) if name in judged] or [0]
    best: tuple[int, int, float] | None = None
    for run, status in enumerate(found.status):
        if status == "diverged" or not found.loss.shape[1]:
            continue
        loss = found.loss[run].nan_to_num(nan=math.inf)
        at = int(loss.argmin())
        worst = float(found.layers[run, at, wanted].max())
        if math.isfinite(worst) and (best is None or worst < best[2] ** 2):
            best = run, int(found.steps[at]), math.sqrt(max(worst, 0.0))
    return best
