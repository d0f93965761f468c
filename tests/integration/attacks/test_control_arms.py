"""Control arms of Shen et al. 2026: candidates that grow without looking at the curvature."""

from __future__ import annotations

import pytest
import torch

from papers.shen2026_controls import CONTROLS, Gain, attack
from residuum.attacks.stationarity.attack import make_grower, search
from residuum.attacks.stationarity.objectives import BinaryKKT
from residuum.attacks.stationarity.solver import Solver
from residuum.records import Knowledge
from tests.cases import SPREAD, AllLayers
from tests.integration.attacks.test_growth import (
    CUBIC,
    OBJECTIVES,
    SMALL,
    check_rounds,
    check_runs_of_a_batch,
    cubic,
    living,
    recovered,
    released,
    small_solver,
)
from tests.unit.attacks.test_splitting import SHARPNESS, case_of, close
from tests.unit.engine.test_engine import Wrapped


def grown(solver, arm):
    return search(solver, grower=make_grower(solver, CONTROLS[arm]))


def test_they_recover_the_exact_instance_too():
    """The curvature direction is not what makes the difference there."""
    point, model = cubic(10, 12, 0)
    for arm in CONTROLS:
        config = CUBIC.changed(split="curvature")
        state = grown(Solver(model, BinaryKKT(), Knowledge(), config, (12,), 1, 3), arm)
        assert recovered(living(state, 0), point.x) == 10
        assert {e["kind"] for e in state.population.events} <= {arm, "merge", "prune", "stable"}


@pytest.mark.parametrize("arm", CONTROLS)
@pytest.mark.parametrize(("objective", "outputs"), OBJECTIVES)
def test_every_objective_grows_and_no_round_raises_the_loss(arm, objective, outputs):
    solver = small_solver(SMALL.changed(surrogate="softplus"), objective, outputs)
    check_rounds(grown(solver, arm), arm)


def test_each_run_of_a_batch_ends_as_it_does_alone(tmp_path):
    """Closed-form multipliers come from a Gram matrix, which magnifies rounding: 1e-5."""
    check_runs_of_a_batch(tmp_path, 1e-5, CONTROLS["random"], lam_every=40)


def test_they_need_no_curvature_and_the_result_names_the_arm():
    for arm, strategy in CONTROLS.items():
        reconstruction = attack(released(), Knowledge(), SMALL.changed(surrogate="none"), strategy)
        assert any(event["kind"] == arm for event in reconstruction.events)
        assert reconstruction.settings["split"] == arm


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_the_gain_is_the_same_by_the_engine_and_by_automatic_differentiation(objective, outputs):
    for surrogate in ["sigmoid", "softplus"]:
        case, explicit = case_of(objective, outputs, surrogate)
        inputs = (objective, case.knowledge, case.labels)
        generic = AllLayers(Wrapped(case.model), *inputs, surrogate=surrogate)
        labels = case.labels.expand(2, -1)
        by_engine, by_autograd = (
            Gain(problem, case.x, case.lam, SHARPNESS).slope(case.x, case.lam, labels)
            for problem in (explicit, generic)
        )
        for a, b in zip(by_engine, by_autograd, strict=True):
            assert close(a, b, 1e-10)


def test_the_gain_is_the_derivative_along_the_multiplier():
    case, problem = case_of(BinaryKKT(), 1)
    evaluation = problem.evaluate(case.x, case.lam, SHARPNESS)
    gain = Gain(problem, case.x, case.lam, SHARPNESS)
    gradient, value = gain.slope(case.x, torch.ones_like(case.lam), case.labels.expand(2, -1))
    assert close(value, evaluation.grad_lam, 1e-10)
    assert close(gradient * case.lam[..., None], evaluation.grad_x, 1e-10)
