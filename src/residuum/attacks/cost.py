"""Estimate the cost of an attack before it runs: number of unknowns, operations, memory and time."""

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
from residuum.attacks.work import REFERENCE, count_work
from residuum.engine.explicit import EvaluationCost, evaluation_cost
from residuum.errors import InputError
from residuum.networks.network import Network
from residuum.records import Knowledge
from residuum.settings import FAST_PRECISIONS, RestartSettings, SearchSettings
from residuum.surfaces.surface import Surface

MEASURING_SECONDS = 2.0  # seconds for which steps of the attack are run to measure their duration
# If the first step of an attack takes longer than this multiple of the planned measuring time, only one
# more step is measured.
SLOW = 3
# Minimum number of steps that are measured after the first step, which is slower than the others.
MIN_STEPS = 2


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of one attack.

    Attributes:
        arch: Architecture of the network.
        device: Device of the attack.
        dtype: Number format of the attack.
        parameters: Number of parameters of the network.
        restarts: Number of restarts (independent runs of the attack).
        candidates: Number of candidates (guesses of training samples) of each restart.
        dimensions: Number of values of each candidate.
        unknowns: Number of values that all restarts optimize: the values of the candidates and the
            multipliers.
        steps: Number of steps of each restart.
        flops_per_step: Number of floating-point operations of the matrix products in one step.
        flops_by_layer: Number of floating-point operations in one step, for each layer.
        memory: Peak memory in bytes, for each kind of tensor (such as weights or candidates).
        step_seconds: Measured seconds of one step.
        seconds: Estimated seconds of the whole attack, at most the time limit of the attack. The estimate
            includes the evaluations of the loss and the closed-form solutions for the multipliers.
        notes: Notes for the user.
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
        """Number of floating-point operations per second in the measured steps of the attack."""
        return self.flops_per_step / self.step_seconds

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain values, with the total memory and the operations per second."""
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
    """Estimate the cost of an attack: compute the memory, and measure the time of a step.

    The function builds the solver of the attack, so invalid settings raise the same errors as in the attack.
    In the estimate, an evaluation of the loss takes as long as one step. If the attack fits k multipliers
    (the weights of the candidates in the equation) in closed form, the fit takes as long as k + 1 steps.

    Args:
        network: The network to attack.
        knowledge: What the attacker knows.
        attack: The attack, which must solve a stationarity equation. By default, the attack on the KKT
            equation for classifiers, and the attack on the equation of weight decay for regressions.
        measured: Total duration of the measured steps in seconds. The default is 2 seconds.

    Returns:
        The cost.

    Raises:
        InputError: If the attack has no steps, or does not fit the network.
    """
    knowledge = knowledge or Knowledge()
    resolved_attack = (attack or Auto()).resolve_settings(network, knowledge)
    if not isinstance(resolved_attack, Stationarity):
        raise InputError(
            "A dry run can measure only the cost of attacks that solve a stationarity equation (an "
            "equation that the weights satisfy after training); got "
            f"'{resolved_attack.name}'.",
            f"Run '{resolved_attack.name}' without --dry-run, or choose an attack such as 'kkt'.",
        )
    solver = resolved_attack.solver(network, knowledge)
    state = solver.start()
    unknowns_per_run = state.x[0].numel() + state.lam[0].numel()
    cost, notes = _cost(solver, state.x, state.lam)
    step_seconds = _measure(solver, MEASURING_SECONDS if measured is None else measured)
    layer_names = solver.problem.layer_names
    # A grower is an object that adds candidates during the search. If the settings ask for one and the
    # network does not allow it, make_grower raises an error.
    if make_grower(solver) is not None:
        notes += (
            "the time covers the first candidates only. Candidates that the search adds later take more time",
        )
    return Estimate(
        network.arch,
        resolved_attack.device,
        resolved_attack.precision,
        sum(t.numel() for t in network.theta.values()),
        resolved_attack.restarts,
        resolved_attack.candidates,
        state.x[0, 0].numel(),
        resolved_attack.restarts * unknowns_per_run,
        resolved_attack.steps,
        sum(cost.flops),
        dict(zip(layer_names, cost.flops, strict=True))
        if len(cost.flops) == len(layer_names)
        else {},
        cost.memory,
        step_seconds,
        _seconds(solver, step_seconds),
        notes,
    )


def estimate_reference_seconds(
    attack: SearchSettings, surface: Surface, knowledge: Knowledge
) -> float:
    """Return the time of one restart of an attack on a reference machine with a fixed speed.

    The function counts the operations of one step and divides them by a fixed speed (``REFERENCE``). The
    result is the same on every machine and under every load, so an audit can plan with it.

    Args:
        attack: An attack with steps.
        surface: The attack surface: the weights, the weight update or an optimizer state.
        knowledge: What the attacker knows.

    Returns:
        Seconds on the reference machine for all steps of one restart.
    """
    assert isinstance(attack, Attack)
    speed = REFERENCE["cuda" if attack.device.startswith("cuda") else "cpu"]
    single_run: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    if isinstance(attack, RestartSettings):
        single_run["restarts"] = 1
    if not isinstance(attack, Stationarity):
        one_step_attack = attack.changed(
            **attack.select_settings(single_run), steps=1, seconds=math.inf
        )
        # The first run fills caches of the network. So only the second run shows the operations of the
        # attack.
        one_step_attack.run(surface, knowledge)
        step_work = count_work(lambda: one_step_attack.run(surface, knowledge))
        return attack.steps * step_work.seconds(speed)
    resolved_attack = attack.resolve_settings(surface.checkpoint, knowledge)
    assert isinstance(resolved_attack, Stationarity)
    solver = resolved_attack.changed(**single_run).solver(surface.checkpoint, knowledge)
    state = solver.start()
    x, lam = state.x.clone(), state.lam.clone()
    with solver.precision(False):
        step_work = count_work(lambda: solver.step(x, lam, {}, 0, state.moving))
    return _seconds(solver, step_work.seconds(speed))


def _seconds(solver: Solver, step_seconds: float) -> float:
    """Return an estimate of how many seconds the search of an attack takes, at most its time limit.

    The search takes steps, evaluates the loss and, if the settings say so, fits multipliers in closed form.
    """
    config, unknowns = solver.config, solver.start().lam[0].numel()
    evaluations_per_step = 1 + 1 / solver.check_every
    if config.lam_every and unknowns <= MAX_UNKNOWNS:
        evaluations_per_step += (unknowns + 1) / config.lam_every
    return min(config.seconds, config.steps * evaluations_per_step * step_seconds)


def _cost(solver: Solver, x: Tensor, lam: Tensor) -> tuple[EvaluationCost, tuple[str, ...]]:
    """Return the number of operations and the memory of one step of an attack.

    For dense networks, both numbers come from formulas. For other networks, the function evaluates the loss
    once and counts the operations.
    """
    problem, (runs, candidates) = solver.problem, solver.sizes
    if problem.explicit is not None:
        depends_on_outputs = problem.objective.follows_outputs
        return evaluation_cost(
            problem.explicit, runs, candidates, follows_outputs=depends_on_outputs
        ), ()
    work = count_work(lambda: problem.evaluate(x, lam * solver.scale))
    weight_bytes = sum(t.numel() for t in problem.target.values()) * x.element_size()
    workspace_bytes = problem.generic.estimate_workspace(runs * candidates)
    memory = {
        "weights": 4 * weight_bytes,
        "candidates": 10 * x.numel() * x.element_size(),
        "passes": workspace_bytes,
    }
    return EvaluationCost((work.flops,), memory), ()


def _measure(solver: Solver, budget: float) -> float:
    """Return the measured duration of one step of an attack in seconds.

    After a first step as a warm-up, the function takes steps for about ``budget`` seconds in total.
    """
    config, state = solver.config, solver.start()
    with solver.precision(config.precision in FAST_PRECISIONS):
        if config.device.startswith("cuda"):
            solver.advance(state, CHECK_EVERY, config.precision in FAST_PRECISIONS)

            def advance() -> int:
                solver.advance(state, 4 * CHECK_EVERY, config.precision in FAST_PRECISIONS)
                torch.cuda.synchronize()
                return 4 * CHECK_EVERY
        else:
            x, lam, moments = state.x.clone(), state.lam.clone(), dict[str, Tensor]()

            def advance() -> int:
                solver.step(x, lam, moments, 0, state.moving)
                return 1

        start_time = time.perf_counter()
        advance()
        first_seconds = time.perf_counter() - start_time
        # If the first step is slow, measure one more step, because the first step includes a warm-up.
        if first_seconds > SLOW * budget:
            start_time = time.perf_counter()
            advance()
            return time.perf_counter() - start_time
        steps, start_time = 0, time.perf_counter()
        while steps < MIN_STEPS or time.perf_counter() - start_time < budget - first_seconds:
            steps += advance()
        return (time.perf_counter() - start_time) / steps
