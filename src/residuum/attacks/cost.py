"""What an attack will cost before it is run: unknowns, operations, memory, and a measured time."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residuum.attacks.base import Attack
from residuum.attacks.stationarity.attack import Auto, Stationarity, make_grower
from residuum.attacks.stationarity.problem import MAX_UNKNOWNS
from residuum.attacks.stationarity.solver import CHECK_EVERY, Solver
from residuum.attacks.work import REFERENCE, counted
from residuum.engine.explicit import EvaluationCost, evaluation_cost
from residuum.errors import InputError
from residuum.networks.network import Network
from residuum.records import Knowledge
from residuum.settings import FAST, RestartSettings, SearchSettings
from residuum.surfaces.surface import Surface

MEASURED = 2.0  # seconds of steps that an estimate takes
SLOW = 3  # times the planned time for measuring: a step that takes longer is measured once
LEAST_STEPS = 2  # after the first, which also pays for memory and code that later ones find ready


@dataclass(frozen=True)
class Estimate:
    """One attack in figures.

    parameters: of the network.
    dimensions: numbers per candidate that are searched.
    unknowns: of all restarts, candidates and multipliers.
    flops_per_step, flops_by_layer: matrix products of one step.
    memory: peak bytes, by what they hold.
    step_seconds: measured.
    seconds: all steps, looks and closed forms, at most the configured wall clock.
    """

    arch: str
    device: str
    dtype: str
    parameters: int
    restarts: int
    candidates: int
    dimensions: int
    unknowns: int
    steps: int
    flops_per_step: int
    flops_by_layer: dict[str, int]
    memory: dict[str, int]
    step_seconds: float
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def flops_per_second(self) -> float:
        """The rate that the measured steps reached."""
        return self.flops_per_step / self.step_seconds

    def to_json(self) -> dict[str, Any]:
        """All fields and the two totals."""
        return {
            **dataclasses.asdict(self),
            "memory_bytes": sum(self.memory.values()),
            "flops_per_second": self.flops_per_second,
        }


def estimate(
    network: Network,
    knowledge: Knowledge | None = None,
    attack: Attack | None = None,
    *,
    measured: float | None = None,
) -> Estimate:
    """Estimate the cost of an attack: count its memory and measure the time of a step.

    The solver is built as for the attack itself, so that whatever it refuses is refused here. An evaluation
    of the loss costs a step. Closed-form multipliers cost one step for each of them and one more.

    Args:
        network: The network that is attacked.
        knowledge: What the attacker knows.
        attack: The attack, by default the stationarity attack that suits the network.
        measured: Seconds of steps to time, by default two.

    Returns:
        The cost.

    Raises:
        InputError: If the attack takes no steps, or does not fit the network.
    """
    knowledge = knowledge or Knowledge()
    config = (attack or Auto()).resolved(network, knowledge)
    if not isinstance(config, Stationarity):
        raise InputError(
            f"A dry run measures stationarity attacks; {config.name} is none of them.", "Run it."
        )
    solver = config.solver(network, knowledge)
    state = solver.start()
    per_run = state.x[0].numel() + state.lam[0].numel()
    found, notes = _cost(solver, state.x, state.lam)
    step_seconds = _measure(solver, MEASURED if measured is None else measured)
    names = solver.problem.layer_names
    if make_grower(solver) is not None:  # refuses what it cannot do
        notes += ("the time is that of the first candidates; growth adds",)
    return Estimate(
        network.arch,
        config.device,
        config.precision,
        sum(t.numel() for t in network.theta.values()),
        config.restarts,
        config.candidates,
        state.x[0, 0].numel(),
        config.restarts * per_run,
        config.steps,
        sum(found.flops),
        dict(zip(names, found.flops, strict=True)) if len(found.flops) == len(names) else {},
        found.memory,
        step_seconds,
        _seconds(solver, step_seconds),
        notes,
    )


def reference_seconds(attack: SearchSettings, surface: Surface, knowledge: Knowledge) -> float:
    """Return what one restart of an attack costs on the reference machine.

    The operations of one step are counted and multiplied by a fixed speed (``REFERENCE``). The result is the
    same on every machine and under every load, so that an audit can plan with it.

    Args:
        attack: An attack that takes steps.
        surface: The surface that is attacked.
        knowledge: What the attacker knows.

    Returns:
        Reference seconds of all steps of one restart.
    """
    assert isinstance(attack, Attack)
    speed = REFERENCE["cuda" if attack.device.startswith("cuda") else "cpu"]
    once: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    if isinstance(attack, RestartSettings):
        once["restarts"] = 1
    if not isinstance(attack, Stationarity):
        single = attack.changed(**attack.shared(once), steps=1, seconds=math.inf)
        single.run(surface, knowledge)  # measures facts about the network, which are kept
        return attack.steps * counted(lambda: single.run(surface, knowledge)).seconds(speed)
    resolved = attack.resolved(surface.checkpoint, knowledge)
    assert isinstance(resolved, Stationarity)
    solver = resolved.changed(**once).solver(surface.checkpoint, knowledge)
    state = solver.start()
    x, lam = state.x.clone(), state.lam.clone()
    with solver.precision(False):
        work = counted(lambda: solver.step(x, lam, {}, 0, state.moving))
    return _seconds(solver, work.seconds(speed))


def _seconds(solver: Solver, step_seconds: float) -> float:
    """Return the time of all steps, looks and closed-form multipliers."""
    config, unknowns = solver.config, solver.start().lam[0].numel()
    looks = 1 + 1 / solver.check_every
    if config.lam_every and unknowns <= MAX_UNKNOWNS:
        looks += (unknowns + 1) / config.lam_every
    return min(config.seconds, config.steps * looks * step_seconds)


def _cost(solver: Solver, x: Tensor, lam: Tensor) -> tuple[EvaluationCost, tuple[str, ...]]:
    """By formula for the explicit engine, counted for any other network."""
    problem, (runs, candidates) = solver.problem, solver.sizes
    if problem.explicit is not None:
        follows = problem.objective.follows_outputs
        return evaluation_cost(problem.explicit, runs, candidates, follows_outputs=follows), ()
    work = counted(lambda: problem.evaluate(x, lam * solver.scale))
    weights = sum(t.numel() for t in problem.target.values()) * x.element_size()
    passes = problem.generic.estimate_workspace(runs * candidates)
    memory = {
        "weights": 4 * weights,
        "candidates": 10 * x.numel() * x.element_size(),
        "passes": passes,
    }
    return EvaluationCost((work.flops,), memory), ()


def _measure(solver: Solver, budget: float) -> float:
    """Seconds per step: steps are taken for about ``budget`` seconds, the first not counted."""
    config, state = solver.config, solver.start()
    with solver.precision(config.precision in FAST):
        if config.device.startswith("cuda"):
            solver.advance(state, CHECK_EVERY, config.precision in FAST)

            def advance() -> int:
                solver.advance(state, 4 * CHECK_EVERY, config.precision in FAST)
                torch.cuda.synchronize()
                return 4 * CHECK_EVERY
        else:
            x, lam, moments = state.x.clone(), state.lam.clone(), dict[str, Tensor]()

            def advance() -> int:
                solver.step(x, lam, moments, 0, state.moving)
                return 1

        start = time.perf_counter()
        advance()
        first = time.perf_counter() - start
        if first > SLOW * budget:  # one more, because the first step may include a warm-up
            start = time.perf_counter()
            advance()
            return time.perf_counter() - start
        taken, start = 0, time.perf_counter()
        while taken < LEAST_STEPS or time.perf_counter() - start < budget - first:
            taken += advance()
        return (time.perf_counter() - start) / taken
