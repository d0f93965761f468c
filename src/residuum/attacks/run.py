"""From a checkpoint and what the attacker knows to a reconstruction. The data is never seen."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residuum.attacks.baselines import first_layer_weights, model_inversion
from residuum.attacks.config import AttackConfig
from residuum.attacks.objectives import NTK, OBJECTIVES, MulticlassKKT, Objective, WeightDecay
from residuum.attacks.population import Population
from residuum.attacks.selection import select
from residuum.attacks.solver import Solver
from residuum.attacks.state import SolverState, Watcher
from residuum.checkpoints import as_checkpoint, build_model, first_layer
from residuum.errors import InputError, did_you_mean
from residuum.networks import Architecture
from residuum.records import Checkpoint, Knowledge, Reconstruction
from residuum.stationarity import moved_layers, parameters

BASELINES = ("model-inversion", "first-layer-weights")
FEWEST, MOST = 20, 1000  # candidates; the most bound memory, and only where no count is known


def attack(
    checkpoint: Checkpoint | nn.Module | str | Path,
    knowledge: Knowledge | None = None,
    config: AttackConfig | None = None,
    *,
    state_path: str | Path | None = None,
    watch: Watcher | None = None,
    per_run: Sequence[AttackConfig] | None = None,
) -> Reconstruction:
    """Reconstruct training samples of ``checkpoint``; see :class:`AttackConfig` for the settings.

    A live module or the path of a file is read first, as :func:`residuum.audit` does.
    per_run: settings of each restart where they differ, see ``variation.py``.
    """
    checkpoint = as_checkpoint(checkpoint)
    knowledge, config = knowledge or Knowledge(), config or AttackConfig()
    start = time.monotonic()
    config = resolve(checkpoint, knowledge, config)
    if config.objective in BASELINES:
        return _baseline(checkpoint, knowledge, config, start)
    solver = prepare(checkpoint, knowledge, config, per_run)
    state = solver.solve(Path(state_path) if state_path is not None else None, watch)
    runs = config.restarts
    status = tuple(state.stopped if alive else "diverged" for alive in state.alive.tolist())
    lam, x = solver.multipliers(state.best_lam), solver.pixels(state.best_x)
    population = state.population or Population.start(runs, solver.problem.labels)
    living = population.best_active.cpu().flatten()
    grown = grown_facts(solver, state)
    found = Reconstruction(
        attack=config.objective,
        x=_flat(x)[living],
        labels=population.best_labels.cpu().flatten()[living],
        lam=_flat(lam)[living],
        run=torch.arange(runs).repeat_interleave(x.shape[1])[living],
        steps=torch.tensor(state.steps),
        loss=torch.stack(state.loss, 1),
        layers=torch.stack(state.layers, 1),
        layer_names=solver.problem.layer_names,
        status=status,
        knowledge=knowledge,
        settings=config.to_json(),
        seconds=time.monotonic() - start,
        notes=(*solver.notes, *grown["notes"]),
        events=population.events,
        ident=population.best_ident.cpu().flatten()[living],
        second_order=grown["second_order"],
    )
    return found.replace(selection=select(found))


def grown_facts(solver: Solver, state: SolverState) -> dict[str, Any]:
    """What an attack that grew says of itself: stationarity of its end, notes."""
    if solver.grower is None or state.population is None:
        return {"notes": (), "second_order": ()}
    with solver.precision(False):
        found = solver.grower.verdict(state, solver._sharpness(state.step))
    notes = list(solver.grower.notes.values())
    kinds = {event["kind"] for event in state.population.events}
    if not kinds & {"split", "random", "frank-wolfe"}:
        why = "no candidate was unstable" if kinds else "no round was due within the steps"
        notes.append(f"growth: no candidate was added, {why}")
    for run, reason in enumerate(state.population.stopped):
        if reason == "limit":
            notes.append(f"growth: restart {run} stopped growing at its limit of candidates")
    return {"notes": tuple(notes), "second_order": tuple(found)}


def resolve(checkpoint: Checkpoint, knowledge: Knowledge, config: AttackConfig) -> AttackConfig:
    """The configuration with its objective named and its candidates counted."""
    arch = Architecture.parse(checkpoint.arch)
    build_model(checkpoint)  # refuses weights that do not fit before anything is read off them
    return replace(
        config,
        objective=_name(config.objective, arch, checkpoint.task),
        candidates=config.candidates or _estimate(checkpoint, knowledge),
    )


def prepare(
    checkpoint: Checkpoint,
    knowledge: Knowledge,
    config: AttackConfig,
    per_run: Sequence[AttackConfig] | None = None,
) -> Solver:
    """The attack that a resolved configuration describes, before its first step."""
    arch = Architecture.parse(checkpoint.arch)
    shape = _shape(checkpoint, knowledge, arch)
    objective = objective_of(config, knowledge)
    objective.check(arch.outputs, knowledge)
    if isinstance(objective, NTK):
        _check_initial(checkpoint, knowledge)
    model = build_model(checkpoint)
    return Solver(
        model, objective, knowledge, config, shape, arch.outputs, config.candidates, per_run
    )


def _flat(part: Tensor) -> Tensor:
    return part.detach().flatten(0, 1).cpu()


def _name(name: str, arch: Architecture, task: str) -> str:
    known = (*OBJECTIVES, *BASELINES)
    if name in ("auto", ""):
        if task == "regression":
            return "weight-decay"
        return "binary-kkt" if arch.outputs == 1 else "multiclass-kkt"
    if name not in known:
        raise InputError(f"No attack {name!r}.", did_you_mean(name, known))
    return name


def objective_of(config: AttackConfig, knowledge: Knowledge) -> Objective:
    """The objective that a resolved configuration names, with its options."""
    if config.objective == "multiclass-kkt":
        return MulticlassKKT(config.rivals)
    if config.objective == "ntk":
        return NTK(config.gradients)
    if config.objective == "weight-decay":
        return WeightDecay().tie(knowledge)
    return OBJECTIVES[config.objective]()


def _shape(checkpoint: Checkpoint, knowledge: Knowledge, arch: Architecture) -> tuple[int, ...]:
    """Shape of one sample; what the attacker says must fit the network."""
    shape = knowledge.shape or checkpoint.input_shape or (arch.image_shape or (arch.inputs,))
    if math.prod(shape) != arch.inputs:
        raise InputError(
            f"A sample must have the network's {arch.inputs} values; shape {tuple(shape)} has "
            f"{math.prod(shape)}.",
            "Correct --shape.",
        )
    mean = knowledge.mean
    if mean is not None and mean.numel() not in (1, arch.inputs):
        raise InputError(
            f"The mean must be one number or have {arch.inputs} values; got {mean.numel()}.",
            "Grant the mean image of the data.",
        )
    return tuple(shape)


def _check_initial(checkpoint: Checkpoint, knowledge: Knowledge) -> None:
    """The initial weights must be weights of the same network."""
    shapes = {name: tuple(t.shape) for name, t in checkpoint.theta.items()}
    if {name: tuple(t.shape) for name, t in (knowledge.theta0 or {}).items()} != shapes:
        raise InputError(
            f"The initial weights must be weights of {checkpoint.arch}; theirs have other names "
            "or shapes.",
            "Grant the initial weights of this very network.",
        )
    if not moved_layers(parameters(build_model(checkpoint)), knowledge.theta0 or {}):
        raise InputError(
            "`NTK` explains how far the weights moved; these equal the start that was granted.",
            "Grant the weights before training, not those after it.",
        )


def _estimate(checkpoint: Checkpoint, knowledge: Knowledge) -> int:
    """Twice the known sample count, or half the neurons of the first layer.

    h neurons and a first layer of rank r give about h r equations for m (r + 1) unknowns: m = h is
    the most that they could determine. Half of it found as many digits (``benchmarks/candidates.py``).
    """
    if knowledge.sample_count is not None:
        return max(FEWEST, 2 * knowledge.sample_count)
    return max(FEWEST, min(MOST, len(first_layer(checkpoint.theta)) // 2))


def _baseline(
    checkpoint: Checkpoint, knowledge: Knowledge, config: AttackConfig, start: float
) -> Reconstruction:
    arch = Architecture.parse(checkpoint.arch)
    shape, count = _shape(checkpoint, knowledge, arch), config.candidates
    model = build_model(checkpoint)
    if config.objective == "model-inversion":
        x, labels, weight = model_inversion(model, knowledge, config, shape, arch.outputs, count)
    else:
        weight_matrix = first_layer(checkpoint.theta)
        if weight_matrix.flatten(1).shape[1] != math.prod(shape):
            raise InputError(
                "The rows of the first layer are images only where it sees the whole input.",
                "Use another attack on a convolutional network.",
            )
        x, labels, weight = first_layer_weights(weight_matrix, shape)
    found = Reconstruction(
        attack=config.objective, x=x.cpu(), labels=labels.cpu(), lam=weight.cpu(),
        run=torch.zeros(len(x), dtype=torch.long), steps=torch.zeros(0, dtype=torch.long),
        loss=torch.zeros(1, 0), layers=torch.zeros(1, 0, 0), layer_names=(), status=("finished",),
        knowledge=knowledge, settings=config.to_json(), seconds=time.monotonic() - start,
    )  # fmt: skip
    return found.replace(selection=select(found))
