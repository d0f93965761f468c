"""How far a reconstruction explains what the weights must equal: layer by layer, in float64.

    r_l = || target_l - sum_i grad_l <u_i, Phi(x_i)> || / || target_l ||

The layers that count are the surface's (``checkpoints/surfaces.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from residuum.attacks.config import AttackConfig
from residuum.attacks.objectives import OBJECTIVES
from residuum.attacks.problem import Problem
from residuum.checkpoints.surfaces import Surface
from residuum.records import Reconstruction
from residuum.records.base import Record


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


def explained(surface: Surface, found: Reconstruction) -> Explained:
    """The best restart that did not diverge, measured anew in float64 with its own surrogate."""
    judged, silent = surface.layers, surface.silent
    best = _best_restart(found, judged)
    if best is None:
        return Explained({}, judged, silent)
    if not found.settings:  # recovered in closed form: its one residual is of all equations, exact
        return Explained({found.layer_names[0]: best[2]}, found.layer_names[:1], silent)
    run, step, _ = best
    config = AttackConfig.from_json(found.settings)
    objective = OBJECTIVES[config.objective].configured(config, found.knowledge)
    mine = found.run == run
    problem = Problem(
        surface.model(), objective, found.knowledge, found.labels[mine],
        surrogate=config.surrogate, layers="all", dtype=torch.float64,
    )  # fmt: skip
    x, lam = found.x[mine].double()[None], found.lam[mine].double()[None]
    squared = problem.evaluate(x, lam, config.sharpness_at(step)).layers[0].tolist()
    values = dict(zip(problem.layer_names, squared, strict=True))
    finite = {name: math.sqrt(max(v, 0.0)) for name, v in values.items() if math.isfinite(v)}
    return Explained(finite, judged, silent)


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
