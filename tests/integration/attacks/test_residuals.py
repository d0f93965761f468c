"""Residuals of attacks: measured in float64, on the layers that moved. They decide nothing."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import residuum as rs
from residuum.attacks import attack, make_attack
from residuum.attacks.stationarity.objectives import NTK, BinaryKKT
from residuum.attacks.stationarity.problem import Problem
from residuum.attacks.stationarity.solution import measure_fit
from residuum.attacks.stationarity.solver import sharpness_at
from residuum.auditing.verdict import NO_LEAK_FOUND, decide
from residuum.errors import InputError
from residuum.io.checkpoints import as_network
from residuum.networks.network import Network
from residuum.records import Knowledge
from residuum.stationarity import by_layer, moved_layers, parameters
from residuum.surfaces.surface import CHANGE, SURFACES, WEIGHTS, build_surfaces
from tests.reference import mlp_forward, naive_objective
from tests.verdict_inputs import SOUND, findings, membership, ran

LAYERS = {"head": (4,), "two heads": (2, 4), "first": (0,), "all": (0, 2, 4)}


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def fine_tuned(seed: int, trained: str) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A base trained on some digits, then some of its layers on 50 others."""
    torch.manual_seed(seed)
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.data))
    x = torch.tensor(digits.data[order] / 16, dtype=torch.float32)
    y = torch.tensor(digits.target[order])

    def fit(
        net: nn.Module, rows: slice, steps: int, parameters: list[nn.Parameter], lr: float
    ) -> None:
        optimizer = torch.optim.Adam(parameters, lr=lr)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()

    base = network()
    fit(base, slice(800, 1797), 100, list(base.parameters()), 3e-3)
    tuned = copy.deepcopy(base)
    trained_parameters = [p for i in LAYERS[trained] for p in tuned[i].parameters()]
    fit(tuned, slice(0, 50), 400, trained_parameters, 1e-2)
    return base, tuned, x[:750], y[:750]


@pytest.mark.parametrize(
    ("seed", "trained"), [(0, "head"), (1, "head"), (0, "two heads"), (0, "first")]
)
def test_residuals_of_a_fine_tuned_network_are_those_of_the_layers_that_moved(
    seed: int, trained: str
) -> None:
    base, tuned, x, y = fine_tuned(seed, trained)
    knowledge = Knowledge(
        value_range=(0.0, 1.0),
        sample_count=50,
        theta0=as_network(base).theta,
        provenance={"theta0": "user"},
    )
    result = rs.audit(
        tuned,
        data=(x[:50], y[:50]),
        holdout=(x[50:], y[50:]),
        knowledge=knowledge,
        effort="quick",
        attacks=[{"attack": name, "steps": 50, "restarts": 1} for name in ("kkt", "ntk")],
        baselines=False,
        subsets=200,
    )
    assert result.exit_code != 0
    assert result.verdict.outcome != NO_LEAK_FOUND
    # Above frozen layers candidates are features, and the layers that moved are a network of their own.
    judged = tuple(f"layers.{i}" for i in range(len(LAYERS[trained])))
    rows = [row for row in result.attacks if row.ran and row.residual is not None]
    assert {row.name for row in rows} == {"multiclass-kkt", "ntk"}
    assert {row.judged for row in rows} == {judged}
    assert all(row.residual == max(row.residuals[name] for name in judged) for row in rows)
    features = any("candidates are features" in reason for reason in result.verdict.reasons)
    assert features == (trained != "first")


@pytest.mark.parametrize("residual", [1e-9, 0.3, 5.0, None])
def test_a_residual_decides_nothing(residual: float | None) -> None:
    row = ran(residual=residual, residuals={"layers.0": residual or 0.0}, judged=("layers.0",))
    expected = decide(findings(), (ran(),), SOUND, membership())
    verdict = decide(findings(), (row,), SOUND, membership())
    assert (verdict.outcome, verdict.reasons) == (expected.outcome, expected.reasons)
    assert expected.outcome == NO_LEAK_FOUND


def small(seed: int = 0) -> Network:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layers.0.weight": (7, 5), "layers.0.bias": (7,), "layers.1.weight": (1, 7)}
    theta = {n: torch.randn(s, generator=generator).float() for n, s in shapes.items()}
    return Network(theta, "mlp:5-7-1")


@pytest.mark.parametrize("objective", ["binary-kkt", "ntk"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_residuals_are_those_of_the_naive_loop_in_float64(objective: str, dtype: str) -> None:
    checkpoint = small()
    start = {n: t - 0.1 * torch.randn_like(t) for n, t in checkpoint.theta.items()}
    knowledge = Knowledge(theta0=start) if objective == "ntk" else Knowledge()
    config = make_attack(objective, candidates=6, restarts=3, steps=40, dtype=dtype)
    reconstruction = attack(checkpoint, knowledge, config)
    surface = build_surfaces(checkpoint, knowledge)[CHANGE if objective == "ntk" else WEIGHTS]
    residuals = measure_fit(surface, reconstruction)

    theta = {n: t.double() for n, t in checkpoint.theta.items()}
    target = (
        theta if objective == "binary-kkt" else {n: theta[n] - start[n].double() for n in theta}
    )
    layers = {layer: (1.0, names) for layer, names in by_layer(theta).items()}
    best_candidates = [int(reconstruction.loss[run].argmin()) for run in range(3)]
    judged = slice(0, 1) if objective == "binary-kkt" else slice(None)
    worst = [
        float(reconstruction.layers[run, best_candidates[run], judged].max()) for run in range(3)
    ]
    best = int(np.argmin(worst))
    mask = reconstruction.run == best
    objective_of_run = BinaryKKT() if objective == "binary-kkt" else NTK()
    sharpness = sharpness_at(config, int(reconstruction.steps[best_candidates[best]]))
    squared = naive_objective(
        mlp_forward,
        [theta],
        target,
        layers,
        objective_of_run,
        reconstruction.labels[mask].double(),
        reconstruction.x[mask].double(),
        reconstruction.lam[mask].double(),
        "sigmoid",
        sharpness,
    )[1]
    for value, (layer, (_, names)) in zip(squared, layers.items(), strict=True):
        size = sum(float((target[name] ** 2).sum()) for name in names)
        assert residuals.residuals[layer] == pytest.approx(
            math.sqrt(float(value) / size), rel=1e-10
        )
    assert residuals.judged == (("layers.0",) if objective == "binary-kkt" else tuple(layers))
    assert residuals.worst == max(residuals.residuals[name] for name in residuals.judged)


def test_a_layer_moves_by_more_than_rounding_or_not_at_all() -> None:
    theta = parameters(small().copy_module())
    assert moved_layers(theta, {n: t.clone() for n, t in theta.items()}) == ()
    assert moved_layers(theta, {n: t.half() for n, t in theta.items()}) == ()
    assert moved_layers(theta, {n: t.bfloat16() for n, t in theta.items()}) == ()
    # Half precision kept in wider numbers looks like a move: the careful side.
    assert moved_layers(theta, {n: t.half().double() for n, t in theta.items()}) != ()
    other = {n: t.clone() for n, t in theta.items()}
    other["layers.1.weight"][0, 3] *= 1.0001
    assert moved_layers(theta, other) == ("layers.1",)


def test_frozen_layers_have_no_say_in_what_a_change_must_equal() -> None:
    checkpoint = small()
    start = {n: t.clone() for n, t in checkpoint.theta.items()}
    start["layers.1.weight"] += 1.0
    knowledge, labels = Knowledge(theta0=start), torch.zeros(4)
    problem = Problem(checkpoint.copy_module(), NTK(), knowledge, labels)
    assert problem.layer_weights[0] == 0
    assert problem.layer_weights[1] > 0
    problem_all_layers = Problem(checkpoint.copy_module(), BinaryKKT(), knowledge, torch.ones(4))
    assert [weight > 0 for weight in problem_all_layers.layer_weights] == [
        True,
        False,
    ]  # first layer of an MLP


def test_weights_that_equal_their_start_leave_nothing_to_explain() -> None:
    checkpoint = small()
    with pytest.raises(InputError, match="equal the initial weights"):
        attack(checkpoint, Knowledge(theta0=dict(checkpoint.theta)), rs.attacks.NTK())


def test_surfaces_follow_from_the_release_and_attacker_knowledge() -> None:
    checkpoint = small()
    alone = build_surfaces(checkpoint, Knowledge())
    assert list(alone) == [WEIGHTS]
    assert alone[WEIGHTS].layers == ("layers.0",)
    start = {n: t.clone() for n, t in checkpoint.theta.items()}
    start["layers.1.weight"] += 1.0
    surfaces = build_surfaces(checkpoint, Knowledge(theta0=start))
    for surface in surfaces.values():
        assert surface.layers == ("layers.1",)
    for name, t in checkpoint.theta.items():
        assert torch.equal(surfaces[WEIGHTS].target[name], t)
        assert torch.equal(surfaces[CHANGE].target[name], t - start[name])
    same = SURFACES[WEIGHTS](checkpoint, Knowledge(theta0=dict(checkpoint.theta)))
    assert same.layers == ()
    del start["layers.1.weight"]
    with pytest.raises(InputError, match="other names or shapes"):
        build_surfaces(checkpoint, Knowledge(theta0=start))
