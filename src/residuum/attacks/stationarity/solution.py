"""What an attack brought back as one set that is to explain the target, and how well it does.

``selected``: the attack's own choice, those that several restarts hold where any do; each image with
the multiplier of the candidate that represents it. ``best``: all candidates of the restart with the least
loss, heaviest first, which together are one solution of the equation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from residuum.attacks.registry import rebuild_attack
from residuum.attacks.stationarity.attack import Stationarity
from residuum.attacks.stationarity.objectives import BinaryKKT, MulticlassKKT, Objective
from residuum.attacks.stationarity.problem import Problem
from residuum.attacks.stationarity.solver import sharpness_at
from residuum.errors import InputError, require_known
from residuum.records import Reconstruction, Record
from residuum.stationarity import parameters
from residuum.surfaces.surface import Surface
from residuum.theory.kkt import evaluate
from residuum.theory.kkt_sets import KKTSet

SETS = ("selected", "best")


@dataclass(frozen=True, eq=False)
class Solution:
    """kkt: the set; x: (k, *shape) its images; index: (k,) their rows in the reconstruction; support,
    confidence: (k,) if selected.
    """

    kkt: KKTSet
    index: Tensor
    support: Tensor | None = None
    confidence: Tensor | None = None

    @property
    def x(self) -> Tensor:
        """(k, *shape) as the network receives them."""
        return self.kkt.x


def solution(model: nn.Module, found: Reconstruction, which: str = "selected") -> Solution:
    """The set ``which`` of a reconstruction; candidates that are not finite are left out."""
    require_known(which, SETS, "No candidates")
    part = found.selection
    if which == "selected" and part is not None and len(part):
        agreed = part.support > 1
        keep = agreed if bool(agreed.any()) else torch.ones_like(agreed)
        rows = part.index[keep]
        kkt = kkt_set(model, found, part.x[keep], part.labels[keep], found.lam[rows])
        return Solution(kkt, rows, part.support[keep], part.confidence[keep])
    best = best_rows(found)
    if best is None:
        raise InputError(
            "No restart of the reconstruction converged to candidates.", "Attack again."
        )
    return Solution(kkt_set(model, found, found.x[best], found.labels[best], found.lam[best]), best)


def best_rows(found: Reconstruction) -> Tensor | None:
    """(k,) candidates of the restart with the least loss, heaviest first; None where there are none."""
    if (run := found.best_restart) is None:
        return None
    mine = (found.run == run) & found.x.flatten(1).isfinite().all(1) & (found.weight > 0)
    rows = mine.nonzero().flatten()
    return rows[found.weight[rows].argsort(descending=True, stable=True)] if len(rows) else None


def best_residual(model: nn.Module, found: Sequence[Reconstruction]) -> dict[str, float]:
    """Layer residuals of the best restart that explains the first layer best; {} without any."""
    best: dict[str, float] = {}
    for part in found:
        rows = best_rows(part)
        if rows is None or (objective := objective_of(model, part)).follows_outputs:
            continue
        kkt = kkt_set(model, part, part.x[rows], part.labels[rows], part.lam[rows])
        layer = next(iter(kkt.layer_residuals))
        comparable = objective.surface == BinaryKKT.surface
        if comparable and (not best or kkt.layer_residuals[layer] < best[layer]):
            best = kkt.layer_residuals
    return best


def objective_of(model: nn.Module, found: Reconstruction) -> Objective:
    """The objective as the attack was configured; by the number of outputs where nobody said."""
    attack = rebuild_attack(found)
    if isinstance(attack, Stationarity):
        return attack.objective.from_settings(attack, found.knowledge)
    outputs = evaluate(model, found.x[:1].to(next(model.parameters()))).shape[1]
    objective = BinaryKKT if outputs == 1 else MulticlassKKT
    return objective.from_settings(attack, found.knowledge)


def kkt_set(
    model: nn.Module, found: Reconstruction, x: Tensor, labels: Tensor, lam: Tensor
) -> KKTSet:
    """Candidates as a set that explains the objective's target, gradients where it takes them.

    In float64, with true activations: an attack's surrogate is for searching, a certificate is about
    the network. Multipliers that follow the outputs are refused, since other sets would have other
    ones.
    """
    objective, known = objective_of(model, found), found.knowledge
    if objective.follows_outputs:
        raise InputError(
            "Multipliers tied to the loss follow the candidates; the certificate holds them fixed.",
            "Attack without --weight-decay to have one.",
        )
    model = copy.deepcopy(model).double().requires_grad_(False)
    theta, x, lam = parameters(model), x.double(), lam.double()
    models = []
    for point in objective.gradient_points():
        there = copy.deepcopy(model)
        if point == "theta0":
            there.load_state_dict({k: t.clone() for k, t in (known.theta0 or {}).items()})
        models.append(there)
    u = torch.stack(
        [objective.covectors(p, evaluate(m, x), labels, lam) for p, m in enumerate(models)], 1
    )
    target = {k: t.double() for k, t in objective.create_surface(theta, known).target.items()}
    task = objective.task or ("binary" if u.shape[2] == 1 else "multiclass")
    return KKTSet.from_covectors(tuple(models), target, x, labels, u.detach(), task)


@dataclass(frozen=True, eq=False)
class Explained(Record):
    """residuals: norm over norm of every layer, of the best restart; judged: the layers that count;
    worst: the largest of theirs, None where nothing could be measured.
    """

    residuals: dict[str, float] = field(default_factory=dict)
    judged: tuple[str, ...] = ()

    @property
    def worst(self) -> float | None:
        """Of the judged layers."""
        found = [self.residuals[name] for name in self.judged if name in self.residuals]
        return max(found) if len(found) == len(self.judged) and found else None


def explained(surface: Surface, found: Reconstruction) -> Explained:
    """The best restart that did not diverge, measured anew in float64 with its own surrogate.

    r_l = || target_l - sum_i grad_l <u_i, Phi(x_i)> || / || target_l ||, layer by layer; the layers
    that count are the surface's.
    """
    judged = surface.layers
    best = _best_restart(found, judged)
    if best is None:
        return Explained({}, judged)
    attack = rebuild_attack(found)
    if not isinstance(attack, Stationarity):
        # Recovered in closed form: its one residual is of all equations, exact.
        return Explained({found.layer_names[0]: best[2]}, found.layer_names[:1])
    run, step, _ = best
    objective = attack.objective.from_settings(attack, found.knowledge)
    mine = found.run == run
    problem = Problem(
        surface.model(),
        objective,
        found.knowledge,
        found.labels[mine],
        surrogate=attack.surrogate,
        layers="all",
        dtype=torch.float64,
    )
    x, lam = found.x[mine].double()[None], found.lam[mine].double()[None]
    squared = problem.evaluate(x, lam, sharpness_at(attack, step)).layers[0].tolist()
    values = dict(zip(problem.layer_names, squared, strict=True))
    finite = {name: math.sqrt(max(v, 0.0)) for name, v in values.items() if math.isfinite(v)}
    return Explained(finite, judged)


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
