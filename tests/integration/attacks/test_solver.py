"""The solver on small networks: updates, snapshots, divergence, clocks, resuming; and `attack`."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import pytest
import torch
from scipy.optimize import lsq_linear

from residuum.attacks import NTK as NTKAttack
from residuum.attacks import PRESETS, Auto, attack, attack_class, make_attack
from residuum.attacks import WeightDecay as WeightDecayAttack
from residuum.attacks.base import MAX_CANDIDATES, MIN_CANDIDATES
from residuum.attacks.random_streams import stream
from residuum.attacks.stationarity.attack import search
from residuum.attacks.stationarity.objectives import NTK, BinaryKKT, WeightDecay
from residuum.attacks.stationarity.priors import PRIORS
from residuum.attacks.stationarity.problem import Problem, fit_multipliers
from residuum.attacks.stationarity.solver import CHECK_EVERY, Solver, rate_at, sharpness_at
from residuum.errors import ArchitectureError, InputError
from residuum.networks import MLP, Architecture
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, same
from residuum.stationarity import Rows
from tests.cases import SPREAD, AllLayers, attack_case, relu_point
from tests.reference import row_gradients, theta_vector
from tests.unit.engine.test_engine import Wrapped

SHORT = Auto(
    restarts=2, steps=60, candidates=4, sigma=0.5, layers="all", anneal="none", sharpness=20.0
)
BOX = Knowledge(value_range=(-0.3, 0.4), mean=torch.full((5,), 0.1, dtype=torch.float64))


def solver(config=SHORT, knowledge=None, objective=None, outputs=1):
    torch.manual_seed(0)
    model = MLP((5, 8, outputs), "all").double()
    return Solver(
        model, objective or BinaryKKT(), knowledge or Knowledge(), config, (5,), outputs, 4
    )


def close(a, b, tolerance):
    return float((a - b).norm()) <= tolerance * float(b.norm())


# Restarts


def test_two_runs_are_identical_to_the_last_bit():
    assert same(search(solver()), search(solver()))
    assert not same(search(solver()).x, search(solver(SHORT.changed(seed=1))).x)


def test_every_restart_draws_from_a_seed_of_its_own():
    for distribution, draw in (("uniform", torch.rand), ("normal", torch.randn)):
        config = SHORT.changed(restarts=3, seed=2, lam_init=(0.5, 2.0))
        state = solver(config.changed(lam_distribution=distribution)).start()
        spread = 2.0 if distribution == "normal" else 1.5
        for run in range(3):
            generator = stream("candidates", 2, run)
            x = 0.5 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
            lam = 0.5 + spread * draw(4, generator=generator, dtype=torch.float64)
            assert torch.equal(state.x[run], x)
            assert torch.equal(state.lam[run], lam)


def test_no_attack_starts_at_the_numbers_that_data_are_made_of():
    """Datasets draw from generators of plain seeds; a shared stream would hand the data over."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(50)]
    data = torch.cat([torch.randn(4, 5, generator=g, dtype=torch.float64) for g in generators])
    for seed in range(5):
        start = solver(SHORT.changed(restarts=5, seed=seed)).start().x.flatten(0, 1)
        assert float(torch.cdist(start / SHORT.sigma, data).min()) > 1e-2


def test_restarts_do_not_see_each_other(tmp_path):
    together = solver(SHORT.changed(restarts=3))
    start, end = together.start(), search(together)
    for run in range(3):
        alone, path = solver(SHORT.changed(restarts=1)), tmp_path / str(run)
        start_of_run = {"x": start.x[[run]], "lam": start.lam[[run]]}
        alone.start().replace(**start_of_run).save(path)
        solution = search(alone, path)
        assert close(solution.x[0], end.x[run], 1e-9)
        assert close(solution.best_lam[0], end.best_lam[run], 1e-9)
        other_runs = [r for r in range(3) if r != run]
        assert not any(close(solution.x[0], end.x[r], 1e-2) for r in other_runs)


VARIED = [
    {"lr_x": 3e-3, "lr_lam": 2e-3, "sigma": 0.3, "sharpness": 5.0, "lam_min": 0.0},
    {"lr_x": 1e-3, "lr_lam": 9e-3, "sigma": 0.8, "sharpness": 30.0, "lam_min": 0.3},
    {"lr_x": 6e-3, "lr_lam": 4e-3, "sigma": 0.5, "sharpness": 60.0, "lam_min": 0.6},
]


@pytest.mark.parametrize(
    ("name", "settings_other"),
    [
        ("lr_x", {"lam_scale": "auto", "anneal": "geometric"}),
        ("lam_min", {"lam_scale": "mean", "optimizer": "sgd", "lam_every": 20}),
        (
            "sharpness",
            {"constraint": "penalty", "priors": (("multiplier-floor", 2.0),), "lam_scale": "auto"},
        ),
    ],
)
@pytest.mark.parametrize("settings_common", [False, True], ids=["alone", "with all others"])
def test_runs_with_settings_of_their_own_end_like_each_alone(
    name, settings_common, settings_other, tmp_path
):
    """Side by side in one program, each with its own rates, scale, sharpness and floor."""
    names = tuple(VARIED[0]) if settings_common else (name,)
    torch.manual_seed(0)
    for model in (MLP((5, 8, 1), "all"), Wrapped(MLP((5, 8, 1), "all"))):
        common = SHORT.changed(restarts=3, steps=40, **settings_other)
        runs = [common.changed(**{name: variant[name] for name in names}) for variant in VARIED]
        together = Solver(model, BinaryKKT(), Knowledge(), common, (5,), 1, 4, per_run=runs)
        start, end = together.start(), search(together)
        for run, config in enumerate(runs):
            alone = Solver(model, BinaryKKT(), Knowledge(), config.changed(restarts=1), (5,), 1, 4)
            first, path = alone.start(), tmp_path / f"{run}-{type(model).__name__}"
            if run == 0:
                assert close(first.x[0], start.x[0], 1e-15)
            first.replace(x=start.x[[run]], lam=start.lam[[run]]).save(path)
            solution = search(alone, path)
            assert close(solution.x[0], end.x[run], 1e-11)
            assert close(solution.lam[0], end.lam[run], 1e-11)
            assert close(
                alone.multipliers(solution.lam)[0], together.multipliers(end.lam)[run], 1e-11
            )
            assert close(solution.best_loss[0], end.best_loss[run], 1e-10)
        plain = search(Solver(model, BinaryKKT(), Knowledge(), common, (5,), 1, 4))
        assert not (close(plain.x, end.x, 1e-5) and close(plain.lam, end.lam, 1e-5))


def test_runs_may_have_priors_of_their_own(tmp_path):
    torch.manual_seed(0)
    model = MLP((5, 8, 1), "all")
    priors = [(), (("haim2022-box", 3.0),), (("haim2022-box", 0.5), ("multiplier-floor", 2.0))]
    common = SHORT.changed(restarts=3, steps=40, constraint="penalty", lam_min=0.3, sigma=2.0)
    runs = [common.changed(priors=run_priors) for run_priors in priors]
    together = Solver(model, BinaryKKT(), Knowledge(), common, (5,), 1, 4, per_run=runs)
    start, end = together.start(), search(together)
    for run, config in enumerate(runs):
        alone = Solver(model, BinaryKKT(), Knowledge(), config.changed(restarts=1), (5,), 1, 4)
        path = tmp_path / str(run)
        alone.start().replace(x=start.x[[run]], lam=start.lam[[run]]).save(path)
        assert close(search(alone, path).x[0], end.x[run], 1e-11)
    plain = search(Solver(model, BinaryKKT(), Knowledge(), common, (5,), 1, 4))
    assert close(plain.x[0], end.x[0], 1e-11)
    assert not close(plain.x[1], end.x[1], 1e-5)


def test_a_run_that_starts_near_zero_loss_has_not_diverged_when_it_leaves_it(tmp_path):
    """At an exact point the first loss is rounding error; any step away is a million times that."""
    point = relu_point(2)
    config = SHORT.changed(restarts=1, steps=50, surrogate="none", lam_scale="one", layers="all")
    solver = Solver(
        point.model, BinaryKKT(), Knowledge(), config, tuple(point.x.shape[1:]), 1, len(point.x)
    )
    solver.problem.labels = point.y
    path = tmp_path / "state"
    solver.start().replace(x=point.x[None], lam=point.lam[None]).save(path)
    end = search(solver, path)
    assert end.loss[0] < 1e-20
    assert float(end.loss[-1]) > 1e6 * float(end.loss[0])  # or the test would show nothing
    assert bool(end.alive.all())


def test_closed_form_multipliers_end_a_captured_chunk():
    """A CUDA graph cannot hold them, so its chunks end where they are due."""
    model = MLP((5, 8, 1)).double()
    config = SHORT.changed(steps=1000, lam_every=70)
    solver = Solver(model, BinaryKKT(), Knowledge(), config, (5,), 1, 4)
    solver.config, solver.check_every = config.changed(device="cuda"), 200
    ends, step = [], 0
    while step < config.steps:
        step = solver.next_evaluation_step(step)
        ends.append(step)
    assert ends == [*range(70, 1000, 70), 1000]


def test_settings_that_cannot_differ_between_runs_are_refused(tmp_path):
    model = MLP((5, 8, 1)).double()

    def build(runs):
        return Solver(model, BinaryKKT(), Knowledge(), SHORT, (5,), 1, 4, per_run=runs)

    with pytest.raises(InputError, match="each restart; got 1 configurations for 2"):
        build([SHORT])
    with pytest.raises(InputError, match="may differ only in the settings lr_x"):
        build([SHORT, SHORT.changed(optimizer="sgd")])
    search(build([SHORT, SHORT.changed(lr_x=0.5)]), tmp_path / "state")
    with pytest.raises(InputError, match="holds an attack with other settings"):
        search(build([SHORT, SHORT.changed(lr_x=0.4)]), tmp_path / "state")


def test_the_best_snapshot_is_kept(tmp_path):
    """Near an exact point, with steps that are far too long, the starting point stays the best."""
    point = relu_point(2, groups=2, size=1)
    config = SHORT.changed(restarts=1, lr_x=0.5, lr_lam=0.5, lr_decay=1.0, lam_scale="one")
    s = Solver(point.model, BinaryKKT(), Knowledge(), config, (12,), 1, 2)
    x, lam = point.x.flip(0)[None], 1.03 * point.lam.flip(0)[None]  # label -1 first
    s.start().replace(x=x, lam=lam).save(tmp_path / "state")
    end = search(s, tmp_path / "state")
    assert end.alive.all()
    assert end.loss[-1] > 10 * end.best_loss
    assert torch.equal(end.best_loss, torch.stack(end.loss, 1).min(1).values)
    assert torch.equal(end.best_x, x)
    assert torch.equal(end.best_lam, lam)
    assert not close(end.x, x, 0.1)


def test_the_loss_falls():
    end = search(solver(SHORT.changed(steps=300)))
    assert (end.best_loss < 0.2 * end.first_loss).all()
    assert end.steps == tuple(range(0, 301, CHECK_EVERY))


# Divergence


@pytest.mark.parametrize("lam_every", [0, 10])
@pytest.mark.parametrize("start", [1e200, math.nan, 1e9])
def test_a_diverging_run_is_stopped_and_the_others_finish(start, lam_every, tmp_path):
    config = SHORT.changed(lam_every=lam_every)
    s, path = solver(config), tmp_path / "state"
    state = s.start()
    x = state.x.clone()
    x[0] = start
    calm = torch.full((2,), 1.0, dtype=torch.float64)  # what was seen before things went wrong
    state.replace(x=x, first_loss=calm).save(path)
    end = search(s, path)
    assert end.alive.tolist() == [False, True]
    assert end.stopped == "finished"
    assert torch.equal(end.best_x[0], state.x[0])
    assert same(end.x[0].nan_to_num(), x[0].nan_to_num())  # it moved no more
    assert end.best_x.isfinite().all()
    calm_run = search(solver(config))
    assert close(end.best_x[1], calm_run.best_x[1], 1e-9)


def test_an_absurd_rate_diverges_and_keeps_what_it_had():
    reconstruction = attack(
        released(), attack=SHORT.changed(lr_x=1e200, optimizer="sgd", steps=500)
    )
    assert reconstruction.status == ("diverged", "diverged")
    assert reconstruction.x.isfinite().all()
    assert int(reconstruction.steps[-1]) < 500


# Clocks and resuming


def test_the_clock_stops_and_a_resumed_attack_ends_like_one_never_stopped(tmp_path):
    uninterrupted, path = search(solver()), tmp_path / "state"
    stopped = search(solver(SHORT.changed(seconds=1e-9)), path)
    assert (stopped.stopped, stopped.step) == ("time", 1)  # at once: no time for a whole interval
    assert (stopped.best_loss <= stopped.first_loss).all()  # the steps before the stop count
    path.unlink()

    def watch(progress):
        if progress.step == 2 * CHECK_EVERY:
            time.sleep(2.1)

    stopped = search(solver(SHORT.changed(seconds=2.0)), path, watch)
    assert (stopped.stopped, stopped.step) == ("time", 2 * CHECK_EVERY)
    end = search(solver(SHORT), path)
    assert end.stopped == "finished"
    assert same(end, uninterrupted)
    assert same(search(solver(), path), uninterrupted)  # finished: nothing is left to do


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_an_interrupt_saves_and_the_end_is_the_same(optimizer, tmp_path):
    config = SHORT.changed(optimizer=optimizer, lam_every=20, lr_x=1e-3, lr_lam=1e-3)
    path, seen = tmp_path / "state", []

    def watch(progress):
        seen.append(progress)
        if progress.step == 2 * CHECK_EVERY:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(solver(config), path, watch)
    assert [progress.step for progress in seen] == [25, 50]
    assert seen[0].layers.shape == (2, 2)
    assert seen[0].layer_names == ("layers.0", "layers.1")
    end = search(solver(config), path)
    assert same(end, search(solver(config)))
    assert end.alive.all()


def test_an_interrupt_between_looks_goes_back_to_the_last_one(tmp_path, monkeypatch):
    s, path = solver(), tmp_path / "state"
    one_step = s.step

    def interrupted(x, lam, moments, step, moving):
        one_step(x, lam, moments, step, moving)
        if step == 40:
            raise KeyboardInterrupt

    monkeypatch.setattr(s, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(s, path)
    assert same(search(solver(), path), search(solver()))


OTHERS = {
    "steps": (SHORT.changed(steps=61), None, None),
    "seed": (SHORT.changed(seed=3), None, None),
    "knowledge": (SHORT, BOX, None),
    "objective": (SHORT, None, WeightDecay()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_resuming_with_other_settings_is_refused(name, tmp_path):
    path = tmp_path / "state"
    search(solver(), path)
    with pytest.raises(InputError, match="holds an attack with other settings"):
        search(solver(*OTHERS[name]), path)


def test_resuming_on_other_weights_is_refused(tmp_path):
    config = SHORT.changed(steps=1)
    attack(released(), attack=config, state_path=tmp_path / "state")
    with pytest.raises(InputError, match="other settings or weights"):
        attack(released(seed=1), attack=config, state_path=tmp_path / "state")


# One step


@pytest.mark.parametrize("decay", [1.0, 0.1])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_updates_equal_those_of_torch(optimizer, decay):
    config = SHORT.changed(
        optimizer=optimizer,
        lr_x=3e-4,
        lr_lam=7e-4,
        lr_decay=decay,
        constraint="penalty",
        priors=(("haim2022-box", 0.5),),
        sigma=1.0,
    )
    s = solver(config)
    state = s.start()
    x, lam = state.x.clone().requires_grad_(), state.lam.clone().requires_grad_()
    groups = [{"params": [x], "lr": 3e-4}, {"params": [lam], "lr": 7e-4}]
    if optimizer == "adam":
        torchs = torch.optim.Adam(groups, eps=1e-12)
    else:
        torchs = torch.optim.SGD(groups, lr=0.0, momentum=0.9)
    for step in range(config.steps):
        share = (1 + math.cos(math.pi * step / config.steps)) / 2
        for group, rate in zip(torchs.param_groups, (3e-4, 7e-4), strict=True):
            group["lr"] = rate * (decay + (1 - decay) * share)
        _, _, x.grad, lam.grad = s.gradients(x.detach(), lam.detach(), step)
        torchs.step()
    end = search(s)
    assert close(end.x, x.detach(), 1e-12)
    assert close(end.lam, lam.detach(), 1e-12)
    assert end.alive.all()
    assert not close(end.x, state.x, 1e-3)


def test_priors_enter_the_loss_with_their_weights():
    priors = (("value-box", 3.0), ("multiplier-floor", 5.0))
    knowledge = BOX.replace(shape=(5,))
    s = solver(SHORT.changed(priors=priors, lam_min=0.8), knowledge)
    bare = solver(SHORT.changed(lam_min=0.8), knowledge)
    state = s.start()
    x, lam = state.x.requires_grad_(), state.lam.requires_grad_()
    total = 0.0
    for name, weight in priors:
        total = total + weight * PRIORS[name](1.0, 0.8, knowledge).penalty(x, lam)
    gx, gl = torch.autograd.grad(total.sum(), (x, lam))
    with_priors, without = s.gradients(x, lam, 0), bare.gradients(x, lam, 0)
    for with_prior, base, extra in zip(
        (with_priors[0], with_priors[2], with_priors[3]),
        (without[0], without[2], without[3]),
        (total.detach(), gx, gl),
        strict=True,
    ):
        assert torch.allclose(with_prior, base + extra, rtol=1e-12)
        assert float(extra.norm()) > 0.1


def test_projection_keeps_candidates_in_the_box_and_multipliers_above_the_floor():
    config = SHORT.changed(lr_x=0.1, lr_lam=0.2, lam_min=3.0)  # a floor above what fits
    for steps in (3, 60):
        end = search(solver(config.changed(steps=steps), BOX))
        images = end.x + 0.1
        assert images.min() >= -0.3 - 1e-12
        assert images.max() <= 0.4 + 1e-12
        assert 3.0 <= end.lam.min() < 3.1  # multipliers started below 1
        on_edge = torch.isclose(images.min(), torch.tensor(-0.3).double())
        assert on_edge or steps > 3  # what started outside was put on the edge
    loose = search(solver(config.changed(constraint="penalty"), BOX))
    assert (loose.x + 0.1).max() > 0.5
    assert loose.lam.max() < 3.0
    free = search(solver(config.changed(lam_init=(-1.0, 1.0)), BOX, WeightDecay()))
    assert free.lam.min() < -0.1


# Multipliers


def test_multipliers_are_stored_in_units_of_their_scale():
    for name, scale_expected in (("one", 1.0), ("mean", 0.25)):
        s = solver(SHORT.changed(lam_scale=name))
        assert s.scale == scale_expected
        state = s.start()
        loss, layers, gx, gl = s.gradients(state.x, state.lam, 0)
        plain = s.problem.evaluate(state.x, state.lam * scale_expected, 20.0)
        assert torch.equal(s.multipliers(state.lam), state.lam * scale_expected)
        assert torch.equal(loss, plain.loss)
        assert torch.equal(layers, plain.layers)
        assert torch.equal(gx, plain.grad_x)
        assert torch.allclose(gl, plain.grad_lam * scale_expected, rtol=1e-14)


@pytest.mark.parametrize("knowledge", [Knowledge(), BOX])
def test_the_automatic_scale_makes_the_sum_as_large_as_the_target(knowledge):
    s = solver(SHORT.changed(lam_scale="auto"), knowledge)
    spread = 0.7 / 4 if knowledge is BOX else 0.25
    generator = stream("scale")
    x = spread * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    model = MLP((5, 8, 1), "all").double()
    model.load_state_dict(s.problem.target)
    z = x @ model.linears[0].weight.T + model.linears[0].bias
    signal = s.problem.labels[:, None] * model.linears[1].weight * torch.sigmoid(20.0 * z)
    total = torch.cat([signal.T @ x, signal.sum(0)[:, None]], 1)
    target = torch.cat([model.linears[0].weight, model.linears[0].bias[:, None]], 1)
    assert s.scale == pytest.approx(float((target.norm() / total.norm()).detach()), rel=1e-9)


def weighted_dense(problem, model, x, rows):
    """Jacobian (P, R) and target (P,), each layer's rows times the root of its weight."""
    roots = torch.cat(
        [
            torch.full((p.numel(),), problem.layer_weights[int(name.split(".")[1])] ** 0.5)
            for name, p in model.named_parameters()
        ]
    ).double()
    return roots[:, None] * row_gradients(model, x, rows).T, roots * theta_vector(model)


@pytest.mark.parametrize("layers", ["all", "first"])
@pytest.mark.parametrize("floor", [None, 0.0, 0.15])
def test_closed_form_multipliers_equal_dense_least_squares(floor, layers):
    objective = WeightDecay() if floor is None else BinaryKKT()
    case = attack_case(MLP((9, 12, 5, 1), "all"), objective, 1, (9,), 6)
    problem = Problem(
        case.model, objective, case.knowledge, case.labels, surrogate="none", layers=layers
    )
    scale, y = 0.7, case.labels.double()[:, None]
    multipliers = fit_multipliers(problem, case.x, case.lam, floor, scale, 1.0)
    for run in range(2):
        covectors = torch.ones_like(y) if floor is None else y
        rows = Rows(torch.arange(6), covectors)
        dense, target = weighted_dense(problem, case.model, case.x[run], rows)
        if floor is None:
            expected = torch.linalg.lstsq(scale * dense, target[:, None]).solution[:, 0]
        else:
            bounds = (floor, math.inf)
            solution = lsq_linear((scale * dense).numpy(), target.numpy(), bounds, tol=1e-14)
            expected = torch.from_numpy(solution.x)
            assert (expected < floor + 1e-6).any()  # the constraint matters
        assert torch.allclose(multipliers[run].flatten(), expected, rtol=1e-5, atol=1e-6)
        if floor is not None:
            assert multipliers[run].min() >= floor


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_closed_form_multipliers_never_raise_the_loss(objective, outputs):
    for surrogate in ["sigmoid", "softplus"]:
        for seed in range(3):
            case = attack_case(MLP((5, 7, 4, outputs)), objective, outputs, (5,), 4, seed)
            problem = AllLayers(
                case.model, objective, case.knowledge, case.labels, surrogate=surrogate
            )
            floor = 0.05 if objective.nonnegative else None
            lam = case.lam.clamp(min=0.05)
            multipliers = fit_multipliers(problem, case.x, lam, floor, 0.5, 4.0)
            before = problem.evaluate(case.x, 0.5 * lam, 4.0).loss
            after = problem.evaluate(case.x, 0.5 * multipliers, 4.0)
            assert (after.loss < before).all()
            slope = after.grad_lam if floor is None else after.grad_lam[multipliers > floor + 1e-9]
            assert slope.abs().max() < 1e-8  # nothing is left to gain inside the constraint


def test_runs_without_a_closed_form_keep_their_multipliers():
    case = attack_case(MLP((5, 7, 1), "none"), BinaryKKT(), 1, (5,), 4)
    problem = AllLayers(case.model, case.objective, case.knowledge, case.labels, surrogate="none")
    x = case.x.clone()
    x[0] = math.nan
    multipliers = fit_multipliers(problem, x, case.lam, 0.0, 1.0, 1.0)
    assert torch.equal(multipliers[0], case.lam[0])
    assert not torch.equal(multipliers[1], case.lam[1])
    dead = fit_multipliers(problem, torch.zeros_like(x), case.lam, 0.0, 1.0, 1.0)
    assert torch.equal(dead, case.lam)


def test_the_solver_takes_closed_form_multipliers_on_their_steps(monkeypatch):
    """Where they were just taken, multipliers above the floor have no slope left."""
    s, slopes = solver(SHORT.changed(lam_every=10)), {}
    one_step = s.step

    def seen(x, lam, moments, step, moving):
        slopes[step] = float(s.gradients(x, lam, step)[3][lam > 1e-9].abs().max())
        one_step(x, lam, moments, step, moving)

    monkeypatch.setattr(s, "step", seen)
    search(s)
    assert all(slopes[step] < 1e-8 for step in (10, 20, 30, 40))
    assert all(slopes[step] > 1e-4 for step in (0, 9, 11, 19, 21))


# Schedules


def test_sharpness_is_annealed_as_published():
    loo = Auto(anneal="loo2024", steps=80_000)
    expected = {0: 11, 20_000: 20, 40_000: 110, 60_000: 200, 80_000: 200}
    for step, value in expected.items():
        assert sharpness_at(loo, step) == pytest.approx(value)
    geometric = Auto(anneal="geometric", steps=101, sharpness_from=2.0, sharpness=200.0)
    for step, value in {0: 2, 50: 20, 100: 200, 101: 200}.items():
        assert sharpness_at(geometric, step) == pytest.approx(value)
    fixed = geometric.changed(anneal="none")
    assert {sharpness_at(fixed, step) for step in (0, 50, 101)} == {200.0}


def test_rates_fall_along_a_cosine():
    config = Auto(steps=100, lr_decay=0.2)
    assert [rate_at(config, step) for step in (0, 50, 100)] == pytest.approx([1, 0.6, 0.2])
    assert {rate_at(config.changed(lr_decay=1.0), step) for step in range(101)} == {1.0}


def test_settings_survive_json_and_wrong_ones_are_refused():
    for preset in PRESETS:
        config = make_attack(preset=preset)
        assert type(config).from_json(config.to_json()) == config
    assert Auto.from_json({"seconds": 3}).seconds == 3
    with pytest.raises(InputError, match="Did you mean 'steps'"):
        Auto(stepz=3)
    for wrong in (
        {"optimizer": "adamw"},
        {"surrogate": "gelu"},
        {"layers": "last"},
        {"steps": 0},
        {"lr_x": math.nan},
        {"candidates": -1},
        {"sigma": -1.0},
    ):
        with pytest.raises(InputError):
            Auto(**wrong)
    with pytest.raises(
        InputError, match="Did you mean 'value-box'"
    ):  # known once plug-ins are read
        attack(released(), None, Auto(priors=(("value-bx", 1.0),)))


# attack()


def released(arch="mlp:5-8-1,bias=all", seed=0, **network_options):
    torch.manual_seed(seed)
    theta = dict(Architecture.parse(arch).build().state_dict())
    return Network(theta, arch, **network_options)


def test_what_an_attack_brings_back_adds_up():
    """The loss at the returned candidates and multipliers is the best one that was seen."""
    for scale in ("mean", "auto"):
        reconstruction = attack(released(), BOX, SHORT.changed(lam_scale=scale))
        assert reconstruction.x.shape == (8, 5)
        assert reconstruction.run.tolist() == [0] * 4 + [1] * 4
        assert reconstruction.labels.tolist() == [-1, -1, 1, 1] * 2
        assert reconstruction.status == ("finished", "finished")
        assert reconstruction.settings["attack"] == "binary-kkt"
        assert reconstruction.loss.shape == (2, len(reconstruction.steps))
        assert reconstruction.layers.shape == (2, len(reconstruction.steps), 2)
        model = released().copy_module().double()
        problem = AllLayers(model, BinaryKKT(), Knowledge(), reconstruction.labels[:4])
        loss_again = problem.evaluate(
            reconstruction.x.view(2, 4, 5), reconstruction.lam.view(2, 4), 20.0
        ).loss
        assert torch.allclose(loss_again, reconstruction.loss.min(1).values, rtol=1e-9)
        assert reconstruction.selection is not None
        assert 0 < len(reconstruction.selection) <= 8


def test_the_attack_sees_weights_and_knowledge_and_nothing_else(tmp_path, monkeypatch):
    """Other data in memory, on disk and in the random state: the result has the same bits."""
    config, results = SHORT.changed(lam_every=20), []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        torch.manual_seed(seed)
        data = Dataset(torch.rand(6, 5), torch.tensor([1, -1] * 3))
        data.to_npz(folder / "train.npz")
        monkeypatch.chdir(folder)
        checkpoint = released()
        torch.manual_seed(seed + 7)
        before = torch.get_rng_state()
        reconstruction = attack(checkpoint, BOX, config)
        assert torch.equal(torch.get_rng_state(), before)  # no draw outside the seed
        results.append(reconstruction.replace(seconds=0.0))
    assert same(*results)
    assert not same(results[0].x, attack(released(), Knowledge(), config).x)


def test_shapes_and_means_that_do_not_fit():
    with pytest.raises(InputError, match=r"must have 5 values, because .*; a sample of shape"):
        attack(released(), Knowledge(shape=(1, 2, 3)), SHORT)
    with pytest.raises(InputError, match=r"must be one number or have 5 values; got 4"):
        attack(released(), Knowledge(mean=torch.zeros(4)), SHORT)
    shaped = attack(released(input_shape=(1, 5, 1)), None, SHORT.changed(steps=1))
    assert shaped.x.shape == (8, 1, 5, 1)


def test_initial_weights_are_needed_and_must_fit():
    ntk = NTKAttack.like(SHORT, steps=2)
    with pytest.raises(InputError, match="needs the initial weights"):
        attack(released(), None, ntk)
    other = released("mlp:5-9-1,bias=all").theta
    short = {name: t for name, t in released().theta.items() if "bias" not in name}
    for theta0 in (other, short):
        with pytest.raises(InputError, match="have other names or shapes"):
            attack(released(), Knowledge(theta0=theta0), ntk)
    for gradients, sets in (("theta", 1), ("theta0", 1), ("both", 2)):
        config = ntk.changed(gradients=gradients)
        reconstruction = attack(released(), Knowledge(theta0=released(seed=1).theta), config)
        assert reconstruction.lam.shape == (8, sets, 1)


def test_the_objective_follows_the_network():
    def chosen(arch, name="auto", **knowledge_options):
        config = attack_class(name).like(SHORT, steps=1)
        return attack(released(arch, **knowledge_options), None, config).attack

    assert chosen("mlp:5-8-1") == "binary-kkt"
    assert chosen("mlp:5-8-3") == "multiclass-kkt"
    assert chosen("mlp:5-8-1", task="regression") == "weight-decay"
    assert chosen("polynomial:5-8-1") == "binary-kkt"
    with pytest.raises(InputError, match="Did you mean 'binary-kkt'"):
        chosen("mlp:5-8-1", "binary-ktk")
    with pytest.raises(InputError, match="needs one output; this network has 3"):
        chosen("mlp:5-8-3", "binary-kkt")
    with pytest.raises(InputError, match="needs at least 2 outputs; this network has 1"):
        chosen("mlp:5-8-1", "multiclass-kkt")


def test_the_number_of_candidates_follows_from_what_is_known():
    config = SHORT.changed(candidates=0, restarts=1, steps=1)

    def candidates(checkpoint, **knowledge_options):
        return len(attack(checkpoint, Knowledge(**knowledge_options), config).x)

    wide = released("mlp:40-60-1")
    assert candidates(wide) == 30
    assert candidates(wide, sample_count=25) == 50
    assert candidates(wide, sample_count=3) == MIN_CANDIDATES
    assert candidates(released()) == MIN_CANDIDATES
    assert candidates(released("mlp:1-2400-1")) == MAX_CANDIDATES
    assert candidates(released("mlp:1-2400-1"), sample_count=600) == 1200
    assert attack(wide, None, config).settings["candidates"] == 30


def test_weight_decay_is_tied_where_it_is_known():
    config = WeightDecayAttack.like(SHORT, steps=20)
    facts_known = {"loss": "logistic", "weight_decay": 0.01, "sample_count": 4}
    tied = attack(released(), Knowledge(**facts_known), config)
    free = attack(released(), None, config)
    assert not close(tied.x, free.x, 1e-3)
    with pytest.raises(InputError, match="got 'hinge'"):
        attack(released(), Knowledge(**{**facts_known, "loss": "hinge"}), config)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_convnet_on_digits_is_attacked(dtype):
    arch = "convnet:1x8x8-4-6-1"
    knowledge = Knowledge(shape=(1, 8, 8), value_range=(0.0, 1.0), sample_count=3)
    config = SHORT.changed(dtype=dtype, lr_x=0.02, layers="auto")
    reconstruction = attack(released(arch), knowledge, config)
    assert reconstruction.x.shape == (8, 1, 8, 8)
    assert reconstruction.x.dtype == getattr(torch, dtype)
    assert reconstruction.layer_names == ("convolutions.0", "convolutions.1", "head")
    assert reconstruction.status == ("finished",) * 2
    assert (reconstruction.loss.min(1).values < reconstruction.loss[:, 0]).all()
    assert 0 <= reconstruction.x.min() < reconstruction.x.max() <= 1
    with pytest.raises(ArchitectureError):
        attack(Network(released().theta, arch), knowledge, config)


def test_ntk_gradients_at_both_points_are_searched_together():
    torch.manual_seed(0)
    model = MLP((5, 8, 1)).double()
    theta0 = {name: t + 0.1 for name, t in model.state_dict().items()}
    config = SHORT.changed(steps=200, lam_init=(-0.5, 0.5))
    s = Solver(model, NTK("both"), Knowledge(theta0=theta0), config, (5,), 1, 4)
    end = search(s)
    assert end.lam.shape == (2, 4, 2, 1)
    assert (end.best_loss < 0.8 * end.first_loss).all()


def test_settings_are_finite_numbers():
    for name in ["lr_x", "lr_lam", "lr_decay", "sigma", "sharpness", "lam_min"]:
        for value in [float("nan"), float("inf")]:
            with pytest.raises(InputError, match=name):
                Auto(**{name: value})


# Reading it


def test_nothing_outside_the_solver_uses_its_private_names():
    private = "|".join(name for name in vars(Solver) if re.fullmatch(r"_[a-z]\w*", name))
    used = re.compile(rf"\b(?:solver|found|s|together|alone)\.(?:{private})\b")
    assert used.search("solver._direction(x)")
    root = Path(__file__).parents[3]
    for folder in ("src", "tests", "benchmarks", "experiments", "papers", "tools"):
        for path in (root / folder).rglob("*.py"):
            if path != Path(__file__):
                assert not used.search(path.read_text("utf-8")), path
