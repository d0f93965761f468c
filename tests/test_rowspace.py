"""Row-space mode: the reduced problem is the full one on lifted candidates, at any tolerance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from residuum.attacks import AttackConfig, attack
from residuum.attacks.objectives import BinaryKKT, WeightDecay
from residuum.attacks.problem import Problem
from residuum.attacks.rowspace import RowSpace
from residuum.attacks.run import search
from residuum.attacks.solver import Solver
from residuum.cli.main import main
from residuum.errors import InputError
from residuum.networks import MLP, Architecture
from residuum.records import Checkpoint, Knowledge, same
from tests.cases import SPREAD, attack_case, relu_point

SHARPNESS = 4.0
CONFIG = AttackConfig.of(restarts=2, steps=50, candidates=6, sigma=0.5, rank_tolerance=1e-12)


def close(found, wanted, tolerance=1e-10):
    return float((found - wanted).norm()) <= tolerance * float(wanted.norm())


def reduced(case, tolerance, shape, **settings):
    space = RowSpace.of(case.model, case.objective, case.knowledge, shape, tolerance)
    problem = Problem(
        space.reduce_model(case.model),
        case.objective,
        space.reduce_knowledge(case.knowledge),
        case.labels,
        outside=space.outside,
        **settings,
    )
    return space, problem


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_the_loss_of_coefficients_is_the_full_loss_of_what_they_stand_for(objective, outputs):
    for tolerance in [1e-12, 0.5, 0.7]:
        for layers in ("all", "first"):
            case = attack_case(MLP((6, 9, 5, outputs), "all"), objective, outputs, (2, 3), 5)
            full = Problem(case.model, objective, case.knowledge, case.labels, layers=layers)
            space, small = reduced(case, tolerance, (2, 3), layers=layers)
            first = case.target["layers.0.weight"]
            values = torch.linalg.eigvalsh(first.T @ first).sqrt()  # ascending
            assert space.rank == sum(v > tolerance * values[-1] for v in values)
            assert (space.rank == 6) == (tolerance < 0.1)
            c = space.reduce(case.x)
            found = small.evaluate(c, case.lam, SHARPNESS)
            wanted = full.evaluate(space.lift(c), case.lam, SHARPNESS)
            assert close(found.loss, wanted.loss)
            assert close(found.layers, wanted.layers)
            assert close(found.grad_lam, wanted.grad_lam)
            assert close(found.grad_x, space.reduce(wanted.grad_x))
            assert float(found.grad_x.norm()) > 1e-4
            if tolerance < 0.1:  # all directions: nothing is lost
                assert close(space.lift(c), case.x)
                assert close(space.lift(found.grad_x), wanted.grad_x)


def test_the_rank_follows_the_singular_values():
    torch.manual_seed(0)
    model = MLP((8, 5, 1)).double()
    left, right = torch.linalg.qr(torch.randn(5, 5))[0], torch.linalg.qr(torch.randn(8, 5))[0]
    values = torch.tensor([4.0, 2.0, 1.0, 0.1, 1e-9]).double()
    weight = left.double() @ torch.diag(values) @ right.double().T
    model.linears[0].weight = torch.nn.Parameter(weight)
    for tolerance, rank in ((1e-12, 5), (1e-3, 4), (0.1, 3), (0.4, 2), (0.6, 1)):
        space = RowSpace.of(model, BinaryKKT(), Knowledge(), (8,), tolerance)
        assert space.rank == rank
        assert close(space.basis.T @ space.basis, torch.eye(rank).double(), 1e-12)
        lost = weight - weight @ space.basis @ space.basis.T
        assert space.outside == pytest.approx(float(lost.square().sum()), abs=1e-12)
        assert space.total == pytest.approx(21.01)


def test_candidates_start_as_projections_of_full_ones():
    torch.manual_seed(0)
    model = MLP((8, 4, 1)).double()
    known = (BinaryKKT(), Knowledge())
    full = Solver(model, *known, CONFIG.changed(rank_tolerance=0.0), (8,), 1, 6).start()
    solver = Solver(model, *known, CONFIG, (8,), 1, 6)
    small = solver.start()
    assert small.x.shape == (2, 6, 4)
    row = torch.linalg.pinv(model.linears[0].weight.detach()) @ model.linears[0].weight.detach()
    assert close(solver.pixels(small.x), full.x @ row.T)
    assert torch.equal(small.lam, full.lam)


def test_gradients_of_priors_are_taken_in_pixels():
    torch.manual_seed(0)
    model, knowledge = MLP((8, 4, 1)).double(), Knowledge(value_range=(-0.1, 0.1), shape=(8,))
    config = replace(CONFIG, priors=(("value-box", 3.0),), constraint="penalty")
    solver = Solver(model, BinaryKKT(), knowledge, config, (8,), 1, 6)
    bare = Solver(model, BinaryKKT(), knowledge, replace(config, priors=()), (8,), 1, 6)
    state = solver.start()
    x = solver.pixels(state.x)
    over = x - x.clamp(-0.1, 0.1)
    found, base = (s.gradients(state.x, state.lam, 0) for s in (solver, bare))
    assert close(found[0] - base[0], 3 * over.square().flatten(1).sum(1))
    assert close(found[2] - base[2], solver.space.reduce(6 * over))


def test_samples_of_an_exact_point_come_back(tmp_path):
    """Fewer samples than pixels: the row space has the samples in it and little else."""
    point = relu_point(2, groups=3, size=1, width=2, seed=3)
    config = CONFIG.changed(
        restarts=1,
        steps=600,
        rank_tolerance=1e-6,
        sigma=1.0,
        layers="all",
        lam_scale="one",
        anneal="none",
        lr_x=1e-3,
        lr_lam=1e-3,
    )
    dim = point.x.shape[1]
    solver = Solver(point.model, BinaryKKT(), Knowledge(), config, (dim,), 1, 3)
    assert solver.space.rank == 3 < dim
    order = point.y.argsort()
    x, lam = point.x[order][None], point.lam[order][None]
    generator = torch.Generator().manual_seed(0)
    start = solver.space.reduce(x)
    assert close(solver.pixels(start), x)  # nothing of the samples lies outside
    start = start + 0.03 * torch.randn(start.shape, generator=generator, dtype=torch.float64)
    solver.problem.labels = point.y[order].double()
    solver.start().replace(x=start, lam=1.02 * lam, best_x=start).save(tmp_path / "state")
    end = search(solver, tmp_path / "state")
    before = (solver.pixels(start) - x).norm(dim=2)
    after = (solver.pixels(end.best_x) - x).norm(dim=2)
    assert (after < 0.3 * before).all()


def released(arch="mlp:8-6-1,bias=all", seed=0):
    torch.manual_seed(seed)
    return Checkpoint(dict(Architecture.parse(arch).build().state_dict()), arch)


def test_an_attack_says_what_the_mode_did(tmp_path):
    box = Knowledge(value_range=(-0.01, 0.01), shape=(2, 4))
    found = attack(released(), box, CONFIG.changed(rank_tolerance=0.5))
    assert found.x.shape == (12, 2, 4)
    assert "of 8 directions" in found.notes[0]
    assert "value range" in found.notes[1]
    assert found.x.abs().max() > 0.01  # the box is not enforced, as the note says
    assert len(attack(released(), None, CONFIG).notes) == 1
    assert attack(released(), box, CONFIG.changed(rank_tolerance=0.0)).notes == ()
    first, second = (attack(released(), box, CONFIG).replace(seconds=0.0) for _ in range(2))
    assert same(first, second)


def test_resuming_ends_like_one_never_stopped(tmp_path):
    config, path = CONFIG.changed(rank_tolerance=0.3), tmp_path / "state"
    attack(released(), None, replace(config, seconds=1e-9), state_path=path)
    resumed = attack(released(), None, config, state_path=path)
    assert same(resumed.x, attack(released(), None, config).x)


def test_what_row_space_mode_cannot_do():
    with pytest.raises(InputError, match="an MLP; this network is a ConvNet"):
        attack(released("convnet:1x8x8-4-1"), None, CONFIG)
    zero = released()
    zero.theta["layers.0.weight"].zero_()
    with pytest.raises(InputError, match="not zero everywhere"):
        attack(zero, None, replace(CONFIG, objective="weight-decay"))
    for wrong in (-0.1, 1.0):
        with pytest.raises(InputError, match="rank_tolerance must be at least 0 and below 1"):
            CONFIG.changed(rank_tolerance=wrong)


def test_multipliers_in_closed_form_work_in_the_row_space():
    config = CONFIG.changed(lam_every=10, rank_tolerance=0.3)
    solver = Solver(MLP((8, 6, 1)), WeightDecay(), Knowledge(), config, (8,), 1, 6)
    end = search(solver)
    assert (end.best_loss < 0.9 * end.first_loss).all()


def test_the_command_line_refuses_a_tolerance_out_of_range(tmp_path, capsys):
    from residuum.checkpoints import save_checkpoint

    save_checkpoint(released(), tmp_path / "m.safetensors")
    command = ["attack", str(tmp_path / "m.safetensors"), "--steps", "5", "--candidates", "4"]
    assert main([*command, "--rank-tolerance", "1.5", "--out", str(tmp_path / "r")]) == 2
    assert "--rank-tolerance" in capsys.readouterr().err
    assert main([*command, "--rank-tolerance", "0.2", "--out", str(tmp_path / "r")]) == 0
    assert "row-space mode" in capsys.readouterr().out
