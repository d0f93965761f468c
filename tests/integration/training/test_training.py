"""Training: published descent against hand-written loops, the margin method, stopping, resuming."""

from __future__ import annotations

import copy
import itertools
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import residuum.training.loop as loop
from residuum.datasets import load_dataset
from residuum.errors import DataError, InputError, OutputError
from residuum.networks import Architecture
from residuum.records import Dataset, same
from residuum.stationarity import flatten, norm, parameters, residual
from residuum.theory import certify
from residuum.training import (
    TrainingConfig,
    TrainingProgress,
    TrainingState,
    initialize,
    make_release,
    train,
)
from residuum.training.methods import (
    LOSSES,
    GradientDescent,
    MarginMaximization,
    choose_loss,
    margins,
)
from tests.reference import row_gradients

ARCH = "mlp:4-6-1"


def toy(n: int = 10, d: int = 4, classes: int = 0, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = torch.arange(n) % classes if classes else 2 * (torch.arange(n) % 2) - 1
    return Dataset(x, y)


def orthogonal(n: int = 4) -> Dataset:
    return Dataset(torch.eye(n, dtype=torch.float64), 2 * (torch.arange(n) % 2) - 1)


# Losses


def test_losses_are_their_formulas() -> None:
    outputs = torch.tensor([[3.0], [-25.0], [0.0], [21.0], [-700.0]], dtype=torch.float64)
    y = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    z = [float(a) * float(b) for a, b in zip(outputs[:, 0], y, strict=True)]
    expected = [math.log1p(math.exp(-m)) if m > -700 else -m for m in z]
    assert float(LOSSES["logistic"](outputs, y)) == pytest.approx(sum(expected) / 5, rel=1e-14)
    exponential = sum(math.exp(-m) for m in z[:4]) / 4
    assert float(LOSSES["exponential"](outputs[:4], y[:4])) == pytest.approx(exponential, rel=1e-14)
    squared = sum((float(a) - float(b)) ** 2 for a, b in zip(outputs[:, 0], y, strict=True)) / 5
    assert float(LOSSES["squared"](outputs, y)) == pytest.approx(squared, rel=1e-14)
    two = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)
    targets = torch.tensor([[0.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    assert float(LOSSES["squared"](two, targets)) == pytest.approx((1 + 9 + 0.25 + 16) / 2)
    scores = torch.tensor([[1.0, 2.0, -3.0], [0.0, 0.5, 0.25]], dtype=torch.float64)
    chosen = [1, 2]
    entropy = 0.0
    for row, c in zip(scores.tolist(), chosen, strict=True):
        entropy -= math.log(math.exp(row[c]) / sum(map(math.exp, row))) / 2
    assert float(LOSSES["cross_entropy"](scores, torch.tensor(chosen))) == pytest.approx(entropy)


def test_single_logistic_losses_are_exact_over_the_whole_range() -> None:
    for m in (-50.0, -30.0, -21.0, -19.0, 0.0, 19.0, 21.0, 300.0, 700.0):
        got = float(LOSSES["logistic"](torch.tensor([[m]]).double(), torch.ones(1).double()))
        exact = math.log1p(math.exp(-m)) if m > 0 else -m + math.log1p(math.exp(m))
        assert got == pytest.approx(exact, rel=1e-14)


def test_margins() -> None:
    outputs = torch.tensor([[1.0, 2.0, -3.0], [0.0, 0.5, 0.25]])
    values = margins(outputs, torch.tensor([1, 2]))
    assert values.tolist() == [[1.0, math.inf, 5.0], [0.25, -0.25, math.inf]]
    assert margins(outputs[:, :1], torch.tensor([-1, 1])).tolist() == [[-1.0], [0.0]]


def test_losses_must_fit_the_task() -> None:
    assert [choose_loss("", task) for task in ("binary", "multiclass", "regression")] == [
        "logistic",
        "cross_entropy",
        "squared",
    ]
    assert choose_loss("exponential", "binary") == "exponential"
    for name, task in (
        ("cross_entropy", "binary"),
        ("logistic", "multiclass"),
        ("exponential", "regression"),
    ):
        with pytest.raises(InputError, match="The training loss must suit the task"):
            choose_loss(name, task)


# Settings


def test_settings_are_checked() -> None:
    for settings in [
        {"method": "adam"},
        {"loss": "hinge"},
        {"init": "large"},
        {"dtype": "float16"},
        {"steps": 0},
        {"lr": 0},
        {"lr": math.nan},
        {"lr": math.inf},
        {"momentum": 1.0},
        {"momentum": math.nan},
        {"weight_decay": -1, "method": "gd"},
        {"weight_decay": math.nan, "method": "gd"},
        {"method": "sgd"},
        {"weight_decay": 0.1},
        {"loss": "squared"},
        {"seconds": -1},
        {"seed": -1},
        {"seed": 2**63},
        {"init_scale": -1},
        {"init_scale": math.inf},
        {"stop_margin": math.nan},
        {"stop_loss": math.nan},
        {"stop_residual": math.inf},
    ]:
        with pytest.raises(InputError) as caught:
            TrainingConfig(**settings)
        assert caught.value.remedy


def test_settings_as_json() -> None:
    settings = TrainingConfig().to_json()
    assert settings["seconds"] is None
    assert settings["stop_margin"] is None
    assert settings["steps"] == 5000


def test_initial_weights() -> None:
    arch = Architecture.parse("mlp:50-40-1")
    state = torch.get_rng_state()
    small = initialize(arch, TrainingConfig(init_scale=1e-3))
    assert torch.equal(state, torch.get_rng_state())
    first = torch.cat([p.detach().flatten() for p in list(small.parameters())[:2]])
    assert first.dtype == torch.float64
    assert float(first.std()) == pytest.approx(1e-3, rel=0.1)
    default = initialize(arch, TrainingConfig(init="default"))
    assert float(default.layers[0].weight.detach().abs().max()) == pytest.approx(50**-0.5, rel=0.01)
    assert torch.equal(small.layers[1].weight, default.layers[1].weight)
    assert not torch.equal(
        small.layers[1].weight, initialize(arch, TrainingConfig(seed=1)).layers[1].weight
    )
    lecun = initialize(arch, TrainingConfig(init="lecun"))
    assert float(lecun.layers[0].weight.detach().std()) == pytest.approx(50**-0.5, rel=0.05)
    assert not lecun.layers[0].bias.detach().any()


# Gradient descent as published


def test_gd_equals_a_hand_written_loop() -> None:
    """One sample, one parameter at a time, derivatives written out: no autograd on our side."""
    data = toy(6)
    for steps in (1, 2, 7):
        config = TrainingConfig(method="gd", lr=0.3, steps=steps, init_scale=0.5)
        model = initialize(Architecture.parse(ARCH), config)
        w, b, v = (p.detach().clone() for p in model.parameters())
        for _ in range(steps):
            dw, db, dv = torch.zeros_like(w), torch.zeros_like(b), torch.zeros_like(v)
            for x, y in zip(data.x, data.y, strict=True):
                z = w @ x + b
                h = z.clamp_min(0)
                m = float(y) * float(v[0] @ h)
                c = -float(y) / (1 + math.exp(m)) / len(data)
                dv[0] += c * h
                db += c * v[0] * (z > 0)
                dw += torch.outer(c * v[0] * (z > 0), x)
            w, b, v = w - 0.3 * dw, b - 0.3 * db, v - 0.3 * dv
        theta = train(ARCH, data, config).theta
        for ours, naive in zip(theta.values(), (w, b, v), strict=True):
            torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.05)])
def test_momentum_and_decay_equal_those_of_torch(momentum: float, decay: float) -> None:
    for loss in ["logistic", "exponential", "squared"]:
        data = toy(6)
        config = TrainingConfig(
            method="gd",
            loss=loss,
            lr=0.05,
            momentum=momentum,
            weight_decay=decay,
            steps=12,
            init="default",
        )
        model = initialize(Architecture.parse(ARCH), config)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=momentum, weight_decay=decay
        )
        for _ in range(12):
            optimizer.zero_grad()
            LOSSES[loss](model(data.x), data.y.double()).backward()
            optimizer.step()
        theta = train(ARCH, data, config).theta
        for name, p in model.named_parameters():
            torch.testing.assert_close(theta[name], p.detach(), rtol=1e-12, atol=1e-14)


def descent(n: int, batch: int, seed: int = 0) -> GradientDescent:
    x = torch.arange(float(n)).double()[:, None]
    config = TrainingConfig(method="sgd", batch=batch, seed=seed)
    return GradientDescent(torch.nn.Linear(1, 1).double(), x, x[:, 0], "squared", config)


def test_batches_cover_every_sample_once_an_epoch() -> None:
    method = descent(10, 4)
    epochs = []
    for epoch in range(3):
        batches = [method.select_batch(3 * epoch + i) for i in range(3)]
        assert [len(x) for x, _ in batches] == [4, 4, 2]
        assert all(torch.equal(x[:, 0], y) for x, y in batches)
        epochs.append(torch.cat([y for _, y in batches]))
        assert sorted(epochs[-1].tolist()) == list(range(10))
    assert not torch.equal(epochs[0], epochs[1])
    repeated, other = descent(10, 4), descent(10, 4, seed=1)
    assert torch.equal(repeated.select_batch(5)[1], method.select_batch(5)[1])
    assert not torch.equal(torch.cat([other.select_batch(i)[1] for i in range(3)]), epochs[0])
    assert torch.equal(descent(4, 9).select_batch(3)[1], torch.arange(4.0).double())


def test_batches_are_the_same_in_every_process() -> None:
    code = (
        "from tests.integration.training.test_training import descent;"
        "print([descent(10, 4, seed=3).select_batch(i)[1].tolist() for i in range(7)])"
    )
    here = str([descent(10, 4, seed=3).select_batch(i)[1].tolist() for i in range(7)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "123", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.strip() == here


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_weight_decay_leads_to_its_own_stationary_point(loss: str) -> None:
    """theta = sum_i lam_i grad Phi(x_i) with lam_i = -l'_i / (n w)."""
    arch, data, decay = "mlp:3-5-1,activation=linear", toy(4, 3), 0.05
    config = TrainingConfig(
        method="gd", loss=loss, lr=0.2, weight_decay=decay, steps=2500, init="default"
    )
    state = train(arch, data, config, task="regression" if loss == "squared" else "binary")
    model, y = _model(state, arch), data.y.double()
    outputs = model(data.x).detach()[:, 0]
    slopes = 2 * (y - outputs) if loss == "squared" else y * torch.sigmoid(-y * outputs)
    lam = slopes / (len(data) * decay)
    gap = residual(model, parameters(model), data.x, lam[:, None])
    assert norm(parameters(model)) > 0.5
    assert norm(gap) / norm(parameters(model)) < 1e-8
    assert certify(model, data.x, data.y, task="regression").residual_plain < 1e-8


# Margin maximization


def method_on(data: Dataset, arch: str, config: TrainingConfig) -> MarginMaximization:
    architecture = Architecture.parse(arch)
    model = initialize(architecture, config)
    kind = getattr(torch, config.dtype)
    y = data.y if architecture.outputs > 1 else data.y.to(kind)
    order = None if "hidden" in arch else float(len(architecture.widths) - 1)
    return MarginMaximization(model, data.x.to(kind), y, order)


def naive_objective(method: MarginMaximization) -> float:
    """log sum exp(-tau m), one margin at a time, scaled by the largest term."""
    outputs = method.model(method.x).detach()
    terms = [
        -method.scalars["tau"] * float(m)
        for m in margins(outputs, method.y).flatten()
        if math.isfinite(m)
    ]
    top = max(terms)
    return top + math.log(sum(math.exp(t - top) for t in terms))


CASES = [
    ("mlp:10-20-1", 0),
    ("mlp:10-20-10-1", 0),
    ("mlp:10-20-3", 3),
    ("mlp:10-20-10-1,bias=hidden", 0),
]


@pytest.mark.parametrize(("arch", "classes"), CASES)
def test_the_log_loss_falls(arch: str, classes: int) -> None:
    method = method_on(toy(9, 10, classes), arch, TrainingConfig(init_scale=0.1))
    values = [naive_objective(method)]
    for count in range(400):
        method.step(count)
        values.append(naive_objective(method))
        assert values[-1] <= values[-2] + method.SLACK + 1e-9
    assert all(b < a for a, b in itertools.pairwise(values[:6]))
    windows = [min(values[i : i + 50]) for i in range(0, 400, 50)]
    assert all(later < earlier for earlier, later in itertools.pairwise(windows))
    assert values[-1] < -10


def test_a_dead_network_stays_where_it_is() -> None:
    method = method_on(toy(6), ARCH, TrainingConfig(init_scale=0.1))
    with torch.no_grad():
        method.model.layers[0].weight.zero_()
        method.model.layers[0].bias.fill_(-1.0)
    theta = flatten(parameters(method.model)).clone()
    for count in range(3):
        method.step(count)
    assert torch.equal(flatten(parameters(method.model)), theta)


def test_rescaling_changes_neither_direction_nor_objective() -> None:
    method = method_on(orthogonal(), "mlp:4-6-5-1", TrainingConfig(init="default"))
    with torch.no_grad():
        for p in method.model.parameters():
            p.copy_(p.abs() * 5)
        method.y = torch.ones_like(method.y)  # positive weights: every margin is positive
    lowest = float(method.model(method.x).detach().min())
    assert lowest > method.MARGIN_CAP
    theta, before = flatten(parameters(method.model)).clone(), naive_objective(method)
    method.rescale(lowest)
    scaled = flatten(parameters(method.model))
    torch.testing.assert_close(scaled / scaled.norm(), theta / theta.norm(), rtol=1e-14, atol=1e-16)
    assert scaled.norm() < theta.norm()
    assert float(method.model(method.x).detach().min()) == pytest.approx(
        method.MARGIN_BACK_TO, rel=1e-12
    )
    assert naive_objective(method) == pytest.approx(before, rel=1e-12)
    method.rescale(5.0)
    assert torch.equal(flatten(parameters(method.model)), scaled)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("arch", "classes"),
    [("mlp:4-1,bias=none", 0), ("mlp:4-5,bias=none", 5), ("mlp:4-6-5-1,bias=hidden", 0)],
)
def test_a_long_run_never_overflows(arch: str, classes: int, dtype: str) -> None:
    """The sharpest case: nothing but growth is left once the direction has settled."""
    data = toy(5, classes=5) if classes else orthogonal()
    task = "multiclass" if classes else "binary"
    config = TrainingConfig(steps=1200, dtype=dtype, init_scale=0.1, seed=1)
    state = train(arch, data, config, task=task)
    assert state.status == "steps"
    assert all(torch.isfinite(p).all() for p in state.theta.values())
    assert all(math.isfinite(v) for point in state.history for v in point.values())
    assert all(math.isfinite(v) for v in state.scalars.values())
    assert state.history[-1]["margin"] > 0
    assert norm(state.theta) < 1e3


def test_the_largest_margin_of_orthogonal_samples_is_found() -> None:
    """Linear network on an orthonormal basis: the best normalized margin is 1 / sqrt(n)."""
    state = train("mlp:4-1,bias=none", orthogonal(), TrainingConfig(steps=400, init_scale=0.1))
    best = state.history[-1]["margin"] / norm(state.theta)
    assert best == pytest.approx(0.5, rel=1e-4)


def test_margin_method_beats_gd_at_equal_cost() -> None:
    arch, data = "mlp:10-40-1", toy(20, 10)
    margin = train(arch, data, TrainingConfig(steps=1000, seed=2))
    cost = int(margin.scalars["evaluations"])
    assert cost >= 1000

    def normalized(state: TrainingState) -> float:
        return state.history[-1]["margin"] / norm(state.theta) ** 2

    best = max(
        normalized(train(arch, data, TrainingConfig(method="gd", lr=lr, steps=cost, seed=2)))
        for lr in (0.1, 0.3, 1.0)
    )
    assert normalized(margin) > 1.1 * best > 0


def test_margin_method_comes_near_a_kkt_point() -> None:
    data = toy(6, 10)
    early, late = (
        certify(
            _model(train("mlp:10-20-1", data, TrainingConfig(steps=steps)), "mlp:10-20-1"),
            data.x,
            data.y,
        )
        for steps in (20, 1500)
    )
    assert late.residual_clarke < 0.3 * early.residual_clarke
    assert late.normalized_margin > early.normalized_margin


def _model(state: TrainingState, arch: str) -> torch.nn.Module:
    model = Architecture.parse(arch).build().double()
    model.load_state_dict(state.theta)
    return model


# Stopping


def test_stop_by_steps_and_history() -> None:
    state = train(ARCH, toy(), TrainingConfig(steps=37))
    assert (state.status, state.step) == ("steps", 37)
    assert [point["step"] for point in state.history] == list(range(1, 38))
    last = state.history[-1]
    outputs = _model(state, ARCH)(toy().x).detach()
    y = toy().y.double()
    assert last["loss"] == float(LOSSES["logistic"](outputs, y))
    assert last["margin"] == float((y * outputs[:, 0]).min())
    assert last["norm"] == norm(state.theta)


def test_stop_by_time_measures_the_end() -> None:
    state = train(ARCH, toy(), TrainingConfig(steps=10**6, seconds=0.2))
    assert state.status == "time"
    assert 0 < state.step < 10**6
    assert state.history[-1]["step"] == state.step


def test_stop_by_margin_loss_and_residual() -> None:
    data = toy(6, 10)

    def run(**goal: float) -> TrainingState:
        return train("mlp:10-20-1", data, TrainingConfig(steps=3000, **goal))

    state = run(stop_margin=0.2)
    assert state.status == "margin"
    assert state.history[-1]["margin"] / norm(state.theta) ** 2 >= 0.2
    assert state.history[-2]["margin"] / state.history[-2]["norm"] ** 2 < 0.2
    state = run(stop_loss=1e-3)
    assert state.status == "loss"
    assert state.history[-1]["loss"] <= 1e-3 < state.history[-2]["loss"]
    state = run(stop_residual=0.5)
    assert state.status == "residual"
    assert state.history[-1]["residual"] <= 0.5
    certificate = certify(_model(state, "mlp:10-20-1"), data.x, data.y)
    assert certificate.residual_plain == pytest.approx(state.history[-1]["residual"], rel=1e-9)


def test_a_loss_of_zero_is_no_goal() -> None:
    """In float32 the logistic loss is exactly 0 from a margin of 104 on; training goes on."""
    config = TrainingConfig(steps=300, dtype="float32", init_scale=0.1, seed=1)
    state = train("mlp:4-6-5-1,bias=hidden", orthogonal(), config)
    assert state.history[-1]["loss"] == 0
    assert (state.status, state.step) == ("steps", 300)


@pytest.mark.parametrize("loss", ["logistic", "squared", "exponential"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_diverging_run_says_so_and_leaves_no_state(loss: str, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    config = TrainingConfig(
        method="gd", loss=loss, lr=1e4, steps=400, dtype=dtype, init="default", weight_decay=0.1
    )
    state = train("mlp:4-6-6-1", toy(), config, state_path=path)
    assert state.status == "diverged"
    assert all(math.isfinite(v) for point in state.history for v in point.values())
    assert not path.exists()
    calm = TrainingConfig(method="gd", loss=loss, steps=5, init="default")
    assert train("mlp:4-6-6-1", toy(), calm, state_path=path).status == "steps"


# Watching, interrupting, resuming

RUNS = {
    "margin": TrainingConfig(steps=60, init_scale=0.1),
    "gd": TrainingConfig(method="gd", lr=0.1, steps=60, momentum=0.9, init="default"),
    "sgd": TrainingConfig(method="sgd", lr=0.1, steps=60, batch=3, momentum=0.5, weight_decay=0.01),
}


@pytest.mark.parametrize("name", RUNS)
def test_two_runs_are_equal_and_ignore_the_global_generator(name: str) -> None:
    torch.manual_seed(1)
    first = train(ARCH, toy(), RUNS[name])
    torch.manual_seed(2)
    assert same(train(ARCH, toy(), RUNS[name]), first)


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_goes_on_to_the_same_weights(name: str, tmp_path: Path) -> None:
    uninterrupted = train(ARCH, toy(), RUNS[name])
    path = tmp_path / "state"

    def stop_at(step: int) -> Any:
        def watch(progress: TrainingProgress) -> None:
            if progress.step == step:
                raise KeyboardInterrupt

        return watch

    for step in (1, 23, 40):
        with pytest.raises(KeyboardInterrupt):
            train(ARCH, toy(), RUNS[name], state_path=path, watch=stop_at(step))
        saved = TrainingState.load(path)
        assert (saved.step, saved.status) == (step, "running")
    resumed = train(ARCH, toy(), RUNS[name], state_path=path)
    assert same(resumed.theta, uninterrupted.theta)
    assert same(resumed.theta0, uninterrupted.theta0)
    assert same(resumed.history, uninterrupted.history)
    assert (resumed.step, resumed.status) == (uninterrupted.step, uninterrupted.status)
    assert same(TrainingState.load(path), resumed)


def test_ctrl_c_in_the_middle_of_a_step_waits_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path = RUNS["gd"], tmp_path / "state"
    uninterrupted = train(ARCH, toy(), config)
    step = GradientDescent.step

    def half_step(self: GradientDescent, count: int) -> None:
        if count == 10:
            loop.signal.raise_signal(loop.signal.SIGINT)
        step(self, count)

    monkeypatch.setattr(GradientDescent, "step", half_step)
    handler = loop.signal.getsignal(loop.signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(ARCH, toy(), config, state_path=path)
    assert loop.signal.getsignal(loop.signal.SIGINT) is handler
    assert TrainingState.load(path).step == 11
    monkeypatch.undo()
    assert same(train(ARCH, toy(), config, state_path=path).theta, uninterrupted.theta)


def test_training_in_a_thread() -> None:
    thread_results = []
    thread = threading.Thread(target=lambda: thread_results.append(train(ARCH, toy(), RUNS["gd"])))
    thread.start()
    thread.join()
    assert same(thread_results[0], train(ARCH, toy(), RUNS["gd"]))


def test_a_state_saved_on_the_way_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed goes on from its last checkpoint."""
    # A state is saved every 20 seconds, and no run of a test is as long.
    monkeypatch.setattr(loop, "SAVE_EVERY", -1.0)
    path = tmp_path / "state"

    def die(progress: TrainingProgress) -> None:
        if progress.step == 30:
            raise SystemExit

    with pytest.raises(SystemExit):
        train(ARCH, toy(), RUNS["margin"], state_path=path, watch=die)
    assert TrainingState.load(path).step == 29
    resumed = train(ARCH, toy(), RUNS["margin"], state_path=path)
    assert same(resumed.theta, train(ARCH, toy(), RUNS["margin"]).theta)


def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    path = tmp_path / "state"
    config = TrainingConfig(steps=500, stop_loss=0.3)
    first = train("mlp:10-20-1", toy(6, 10), config, state_path=path)
    assert first.status == "loss"
    assert same(train("mlp:10-20-1", toy(6, 10), config, state_path=path), first)


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    path = tmp_path / "state"
    longer = TrainingConfig(
        **{**RUNS["gd"].to_json(), "steps": 90, "seconds": 1e9, "stop_margin": math.inf}
    )
    train(ARCH, toy(), RUNS["gd"], state_path=path)
    trained = train(ARCH, toy(), longer, state_path=path)
    assert trained.step == 90
    assert same(trained.theta, train(ARCH, toy(), longer).theta)


def test_other_settings_or_data_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    train(ARCH, toy(), RUNS["gd"], state_path=path)
    saved = path.read_bytes()
    flipped = toy().replace(y=-toy().y)
    settings = {**RUNS["gd"].to_json(), "seconds": math.inf, "stop_margin": math.inf}
    for arch, data, change in (
        (ARCH, toy(), {"lr": 0.2}),
        (ARCH, toy(), {"seed": 1}),
        (ARCH, toy(seed=1), {}),
        (ARCH, flipped, {}),
        ("mlp:4-7-1", toy(), {}),
    ):
        with pytest.raises(InputError, match="other settings or data") as caught:
            train(arch, data, TrainingConfig(**{**settings, **change}), state_path=path)
        assert "--out" in caught.value.remedy
    assert path.read_bytes() == saved


def test_a_damaged_state_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"nonsense")
    with pytest.raises(InputError, match="TrainingState"):
        train(ARCH, toy(), RUNS["gd"], state_path=path)


def test_an_unwritable_place_shows_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    seen: list[TrainingProgress] = []
    with pytest.raises(OutputError):
        train(ARCH, toy(), RUNS["gd"], state_path=tmp_path / "file" / "s", watch=seen.append)
    assert seen == []


def test_watchers_see_the_margin() -> None:
    seen: list[TrainingProgress] = []
    state = train(ARCH, toy(), TrainingConfig(steps=800), watch=seen.append)
    assert [p.step for p in seen] == list(range(2, 801, 2))
    assert seen[-1].margin == state.history[-1]["margin"]
    assert seen[-1].normalized == pytest.approx(seen[-1].margin / norm(state.theta) ** 2, rel=1e-12)
    train("mlp:4-6-5-1,bias=hidden", toy(), TrainingConfig(steps=2), watch=seen.append)
    assert seen[-1].normalized is None
    train(ARCH, toy(), TrainingConfig(method="gd", steps=2), task="regression", watch=seen.append)
    assert seen[-1].margin is None


# What does not fit


def test_bad_combinations(tmp_path: Path) -> None:
    path = tmp_path / "run" / "state"
    wrong = toy().replace(y=torch.ones(10).long())
    for arch, data, task, error in (
        ("mlp:5-6-1", toy(), "auto", DataError),
        (ARCH, wrong, "auto", DataError),
        ("mlp:4-6-3", toy(), "auto", DataError),
        (ARCH, toy(), "multiclass", InputError),
        (ARCH, toy(), "tri", InputError),
        (ARCH, toy().replace(y=torch.randn(10, 2)), "regression", DataError),
    ):
        with pytest.raises(error) as caught:
            train(arch, data, RUNS["gd"], task=task, state_path=path)
        assert caught.value.remedy
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("arch", "task"),
    [
        ("convnet:1x8x8-4-1", "binary"),
        ("mlp:64-16-10", "multiclass"),
        ("polynomial:64-6-1", "binary"),
    ],
)
def test_every_family_trains_on_digits(arch: str, task: str) -> None:
    data = load_dataset("digits", 20, task=task).train
    state = train(arch, data, TrainingConfig(steps=60, init="default"), task=task)
    assert state.history[-1]["margin"] > state.history[0]["margin"]
    checkpoint = make_release(state, arch, data, task)
    assert (checkpoint.input_shape, checkpoint.labels) == ((1, 8, 8), data.classes)
    assert same(checkpoint.theta, state.theta)


def test_gradient_of_the_margin_objective() -> None:
    """The first margin step moves along sum_i softmax(-m)_i y_i grad Phi(x_i)."""
    method = method_on(toy(6), ARCH, TrainingConfig(init_scale=0.3))
    from residuum.stationarity import Rows

    y: Tensor = method.y
    rows = Rows(torch.arange(6), y[:, None])
    m = rows.values(method.model(method.x).detach())
    direction = torch.softmax(-m, 0) @ row_gradients(copy.deepcopy(method.model), method.x, rows)
    before = flatten(parameters(method.model)).clone()
    method.step(0)
    moved = flatten(parameters(method.model)) - before
    cosine = float(moved @ direction / (moved.norm() * direction.norm()))
    assert cosine == pytest.approx(1, abs=1e-10)
