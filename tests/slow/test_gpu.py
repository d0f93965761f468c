"""The CUDA path against the CPU. Skipped where there is no GPU; nothing here is timed."""

from __future__ import annotations

import gc

import pytest
import torch

from residuum.attacks import Attack, Auto
from residuum.attacks.stationarity.attack import search
from residuum.attacks.stationarity.objectives import BinaryKKT, Objective
from residuum.attacks.stationarity.solver import Solver
from residuum.engine.graph import Repeater
from residuum.networks import MLP
from residuum.records import Dataset, Knowledge
from residuum.training import TrainingConfig, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONFIG = Auto(candidates=30, restarts=2, steps=300, dtype="float64", lr_x=1e-3, lr_lam=1e-3)


class WithoutPullback(BinaryKKT):
    """Binary KKT whose derivative is left to autograd."""

    pullback = Objective.pullback


def solved(config: Attack, objective: Objective | None = None) -> Solver:
    torch.manual_seed(0)
    knowledge = Knowledge(value_range=(-1.0, 1.0), mean=torch.zeros(12))
    objective = objective or BinaryKKT()
    solver = Solver(MLP((12, 40, 30, 1)), objective, knowledge, config, (12,), 1, 30)
    return search(solver)


@pytest.mark.parametrize("layers", ["first", "all"])
def test_replayed_graphs_equal_the_loop_on_the_cpu(layers):
    config = CONFIG.changed(layers=layers)
    here, on_gpu = solved(config), solved(config.changed(device="cuda"))
    assert torch.allclose(here.best_x, on_gpu.best_x.cpu(), rtol=1e-6, atol=1e-9)
    assert torch.allclose(here.best_loss, on_gpu.best_loss.cpu(), rtol=1e-6)


def test_graphs_hold_a_derivative_by_autograd_too():
    config = CONFIG.changed(device="cuda")
    by_hand, by_autograd = solved(config), solved(config, WithoutPullback())
    assert torch.allclose(by_hand.best_x, by_autograd.best_x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "tf32", "bf16"])
def test_faster_products_reach_the_same_loss(dtype):
    exact = solved(CONFIG).best_loss
    loss = solved(CONFIG.changed(device="cuda", dtype=dtype)).best_loss.cpu().double()
    assert torch.allclose(loss, exact, rtol=0.05)


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-5), ("tf32", 1e-4), ("bf16", 2e-3)])
def test_the_first_steps_agree_before_rounding_has_grown(dtype, within):
    short = CONFIG.changed(steps=3, polish=0.0)
    exact = solved(short).loss
    losses = solved(short.changed(device="cuda", dtype=dtype)).loss
    for loss, other in zip(exact, losses, strict=True):
        assert torch.allclose(other.cpu().double(), loss, rtol=within, atol=0)


@pytest.mark.parametrize("method", ["gd", "margin"])
def test_replayed_training_equals_the_loop_on_the_cpu(method):
    data = Dataset(torch.randn(10, 6).double(), torch.arange(10) % 2 * 2.0 - 1)
    config = TrainingConfig(method=method, steps=400, lr=0.05)
    here, on_gpu = (train("mlp:6-20-1", data, config, device=where) for where in ("cpu", "cuda"))
    assert here.step == on_gpu.step == 400
    assert here.scalars == pytest.approx(on_gpu.scalars, rel=1e-6)
    for name, value in here.theta.items():
        assert torch.allclose(value, on_gpu.theta[name], rtol=1e-6, atol=1e-9)


def counting() -> tuple[torch.Tensor, Repeater]:
    counted = torch.zeros((), device="cuda")

    def step() -> None:
        counted.add_(1)
        [[] for _ in range(100)]  # what the collector counts

    return counted, Repeater(step, "cuda", 10)


def test_a_graph_that_dies_during_the_next_capture_does_not_stop_it():
    def cycle() -> None:
        _, old = counting()
        old.run(10)
        assert old.graph is not None
        old.itself = old  # only the collector frees it, when it likes

    threshold = gc.get_threshold()
    cycle()
    counted, repeater = counting()
    try:
        gc.set_threshold(1)  # it likes to at once
        repeater.run(10)
    finally:
        gc.set_threshold(*threshold)
    assert repeater.graph is not None
    repeater.run(20)
    assert int(counted) == 30
