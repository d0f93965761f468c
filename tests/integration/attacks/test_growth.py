"""Attacks whose candidate set grows: exact recovery, batches, resuming, merging, what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

import residuum as rs
from residuum.attacks import PRESETS, Auto, attack, make_attack
from residuum.attacks.stationarity.attack import SPLITTING, make_grower, search
from residuum.attacks.stationarity.objectives import NTK, BinaryKKT, MulticlassKKT, WeightDecay
from residuum.attacks.stationarity.solver import Solver
from residuum.cli.main import main
from residuum.errors import InputError
from residuum.networks import MLP
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction, same
from residuum.similarity import cosine
from tests.cases import polynomial_point

CUBIC = rs.attacks.BinaryKKT(
    restarts=1,
    steps=2800,
    lr_x=0.01,
    lr_lam=0.01,
    lr_decay=1.0,
    sigma=0.3,
    layers="all",
    split_every=200,
)
SMALL = rs.attacks.BinaryKKT(
    restarts=2,
    steps=120,
    candidates=4,
    layers="all",
    sigma=0.5,
    sharpness=6.0,
    anneal="none",
    split="curvature",
    split_trigger="period",
    split_every=30,
    split_threshold=0.0,
    split_cap=0.3,
)


def cubic(n: int, d: int, seed: int):
    """The exact cubic instance, as an MLP with a cubic activation: the fast path."""
    point = polynomial_point(n, d, 3, seed=seed)
    weight, last = point.model.weight.data, point.model.coefficient.data
    model = MLP((d, len(weight), 1), "none", point.model.activation).double()
    model.linears[0].weight.data, model.linears[1].weight.data = weight.clone(), last[None].clone()
    return point, model


def recovered(x: Tensor, truth: Tensor) -> int:
    """Samples with a candidate at |cosine| > 0.99; the sign is not determined."""
    return int((cosine(x, truth).abs().amax(0) > 0.99).sum())


def small_solver(config=SMALL, objective=None, outputs=1, seed=0, knowledge=None):
    torch.manual_seed(seed)
    model = MLP((5, 8, outputs)).double()
    if isinstance(objective, NTK):
        theta0 = {name: t + 0.2 for name, t in model.state_dict().items()}
        knowledge = Knowledge(theta0=theta0)
    return Solver(
        model, objective or BinaryKKT(), knowledge or Knowledge(), config, (5,), outputs, 4
    )


def living(state, run):
    return state.x[run][state.population.active[run]]


@pytest.mark.parametrize("k", [3, 5])
def test_the_grown_attack_recovers_every_sample_and_the_fixed_one_does_not(k):
    for seed in range(3):
        point, model = cubic(10, 12, seed)
        counts = {}
        for split in ("curvature", "none"):
            config = CUBIC.changed(
                split=split, seed=seed, steps=3000 - 300 * k if split != "none" else 600
            )
            state = search(Solver(model, BinaryKKT(), Knowledge(), config, (12,), 1, k))
            x = living(state, 0) if state.population else state.best_x[0]
            counts[split] = recovered(x, point.x)
        assert counts["curvature"] == 10
        assert counts["none"] <= k


def test_a_candidate_that_is_known_to_be_unstable_is_followed_through_its_events():
    _, model = cubic(4, 6, 0)
    config = CUBIC.changed(split="curvature", steps=900, split_trigger="period")
    state = search(Solver(model, BinaryKKT(), Knowledge(), config, (6,), 1, 2))
    splits = [e for e in state.population.events if e["kind"] == "split"]
    assert len(splits) >= 2
    candidates_seen = set(range(2))
    for event in splits:
        assert event["step"] % 200 == 0
        assert event["parent"] in candidates_seen
        candidates_seen |= set(event["children"])
        assert event["eigenvalue"] < 0
        assert event["eta"] > 0
        assert event["predicted"] < 0
        assert event["obtained"] == event["loss_after"] - event["loss_before"] < 0
        # one split a round here: L = L0 + 2g (eta/eta*)^2 - g (eta/eta*)^4 at its minimum, half of it
        assert event["obtained"] / event["predicted"] == pytest.approx(0.5, abs=1e-6)
    assert set(state.population.ident[0][state.population.active[0]].tolist()) <= candidates_seen


OBJECTIVES = [
    (BinaryKKT(), 1),
    (MulticlassKKT(), 3),
    (WeightDecay(), 1),
    (NTK("both"), 1),
    (WeightDecay(tied=0.7, loss="squared"), 1),
]


def check_rounds(state, event):
    """Check a small attack whose new candidates have events of this kind: no round raised the loss."""
    events = [e for e in state.population.events if "loss_after" in e]
    assert any(e["kind"] == event for e in events)
    assert all(e["loss_after"] <= e["loss_before"] for e in events)
    active = state.population.active
    assert state.x.shape[1] == active.shape[1] >= active.sum(1).max() > 4
    assert torch.isfinite(state.best_loss).all()
    assert (state.x[~active] == 0).all()
    assert (state.lam[~active] == 0).all()
    for moment in state.moments.values():
        assert (moment[~active] == 0).all()


@pytest.mark.parametrize(("objective", "outputs"), OBJECTIVES)
def test_every_objective_grows_and_no_round_raises_the_loss(objective, outputs):
    s = small_solver(SMALL.changed(surrogate="softplus"), objective, outputs)
    check_rounds(search(s), "split")


def check_runs_of_a_batch(folder, tolerance, strategy=SPLITTING, **settings):
    """Check that each run of a batch ends as it does alone, although it has empty slots in the batch."""
    config = SMALL.changed(
        surrogate="softplus",
        split_trigger="stagnation",
        split_tolerance=0.3,
        split_every=25,
        **settings,
    )
    together = small_solver(config)
    start = together.start()
    end = search(together, grower=make_grower(together, strategy))
    sizes = end.population.active.sum(1).tolist()
    assert sizes[0] != sizes[1]
    for run in range(2):
        alone = small_solver(config.changed(restarts=1))
        # the second restart's random numbers are those of its own place in the batch
        grower, own_numbers = (
            make_grower(alone, strategy),
            make_grower(together, strategy).create_generator,
        )
        grower.create_generator = lambda step, _, f=own_numbers, run=run: f(step, run)
        start_state = alone.start()
        x, lam = start.x[[run]], start.lam[[run]]
        path = folder / f"{run}-{'-'.join(settings)}"
        start_state.replace(x=x, lam=lam, best_x=x, best_lam=lam).save(path)
        separate_end = search(alone, path, grower=grower)
        assert int(separate_end.population.active.sum()) == sizes[run]
        actual = end.x[run][end.population.active[run]]
        expected = separate_end.x[0][separate_end.population.active[0]]
        assert torch.allclose(actual, expected, atol=tolerance)
        history = torch.stack(end.loss)[:, run], torch.stack(separate_end.loss)[:, 0]
        assert torch.allclose(*history, rtol=tolerance)


def test_each_run_of_a_batch_ends_as_it_does_alone(tmp_path):
    """Runs grow apart, so one has empty slots: they must not matter, priors included.

    Closed-form multipliers come from a Gram matrix, which magnifies rounding: 1e-5 there.
    """
    check_runs_of_a_batch(tmp_path, 1e-10, lam_min=0.05)
    priors = (("haim2022-box", 0.1), ("multiplier-floor", 1.0))
    check_runs_of_a_batch(tmp_path, 1e-10, priors=priors, constraint="penalty")
    check_runs_of_a_batch(tmp_path, 1e-5, lam_every=40)


def test_a_grown_attack_goes_on_from_where_it_was_stopped(tmp_path):
    uninterrupted = search(small_solver())
    paused = search(small_solver(), tmp_path / "state", until=70)
    assert paused.population.events
    assert not paused.stopped
    assert 70 <= paused.step < uninterrupted.step
    resumed = search(small_solver(), tmp_path / "state")
    assert same(resumed, uninterrupted)
    changed = SMALL.changed(split_every=31)
    with pytest.raises(InputError, match="other settings"):
        search(small_solver(changed), tmp_path / "state")


def test_without_growth_nothing_is_different():
    config = SMALL.changed(split="none", split_every=7, split_cap=0.9)
    plain = small_solver(config.changed(split_cap=0.1, split_every=300))
    a, b = search(small_solver(config)), search(plain)
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.lam, b.lam)
    assert a.population is None


def released(seed=0):
    torch.manual_seed(seed)
    theta = {name: t.clone() for name, t in MLP((5, 8, 1)).double().state_dict().items()}
    return Network(theta, "mlp:5-8-1")


def test_true_relu_is_refused_and_a_sharp_surrogate_is_named():
    with pytest.raises(InputError, match="needs second derivatives"):
        attack(released(), None, SMALL.changed(surrogate="none"))
    sharp = attack(released(), None, SMALL.changed(sharpness=1e5))
    assert any("cannot split" in note for note in sharp.notes)
    assert not any("cannot split" in note for note in attack(released(), None, SMALL).notes)


def test_the_reconstruction_holds_the_living_alone_and_says_how_it_ended(tmp_path):
    config = SMALL.changed(
        surrogate="softplus",
        split_trigger="stagnation",
        split_tolerance=0.3,
        split_every=25,
        split_eps=1e-9,
    )
    reconstruction = attack(released(1), None, config)
    assert (
        len(reconstruction.x)
        == len(reconstruction.labels)
        == len(reconstruction.lam)
        == len(reconstruction.run)
        == len(reconstruction.ident)
    )
    assert (reconstruction.lam.abs() > 0).any()
    assert len(reconstruction.x) > 8
    for run in range(2):
        identities = reconstruction.ident[reconstruction.run == run]
        assert len(identities.unique()) == len(identities)
    assert len(reconstruction.second_order) == 2
    for row in reconstruction.second_order:
        assert row["gradient"] > 0
        expected = row["gradient"] <= 1e-9 and row["lowest_curvature"] >= -(1e-9**0.5)
        assert row["stationary"] == expected
    loose = attack(released(1), None, config.changed(split_eps=1e9))
    assert all(group["stationary"] for group in loose.second_order)
    assert same(Reconstruction.load(reconstruction.save(tmp_path / "r")), reconstruction)
    summary = reconstruction.to_json()
    assert summary["events"] == [dict(event) for event in reconstruction.events]
    assert summary["candidates"] == len(reconstruction.x)


def test_growth_stops_at_its_limit_and_says_when_no_round_was_due():
    reconstruction = attack(released(), None, SMALL.changed(split_limit=5))
    assert all(int((reconstruction.run == run).sum()) <= 5 for run in range(2))
    assert any("limit of candidates" in note for note in reconstruction.notes)
    quiet = attack(released(), None, SMALL.changed(split_every=500))
    assert any("no round was due" in note for note in quiet.notes)
    assert len(quiet.x) == 8


def test_the_gradient_triggers_a_round_too():
    low = SMALL.changed(split_trigger="gradient", split_tolerance=0.0)
    assert not search(small_solver(low)).population.events
    high = search(small_solver(low.changed(split_tolerance=1e9))).population.events
    assert {event["step"] for event in high} == {50, 100}


def test_settings_of_growth_are_checked_and_kept():
    for name in PRESETS:
        config = make_attack(preset=name)
        assert type(config).from_json(config.to_json()) == config
        assert (config.split == "none") == (name != "shen2026")
    paper = make_attack(preset="shen2026")
    assert 20_000 <= paper.split_every <= 40_000
    assert (paper.split_threshold, paper.split_cap, paper.split_eta) == (0.1, 0.5, 0.01)
    for wrong in (
        {"split": "yes"},
        {"split_trigger": "x"},
        {"split_every": 0},
        {"split_cap": -1.0},
        {"split_eta": float("nan")},
        {"split_limit": -1},
    ):
        with pytest.raises(InputError):
            Auto(**wrong)


def test_the_command_line_grows_and_says_so(tmp_path, capsys):
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    from safetensors.torch import save_file

    save_file({n: t.contiguous() for n, t in MLP((5, 8, 1)).state_dict().items()}, path)
    common = ["attack", str(path), "--steps", "120", "--restarts", "2", "--candidates", "4"]
    grow = ["--split", "curvature", "--split-every", "25", "--split-threshold", "0", "--sharpness"]
    code = main([*common, *grow, "10", "--out", str(tmp_path / "a"), "--json"])
    output = json.loads(capsys.readouterr().out)
    assert code == 0
    assert output["settings"]["split"] == "curvature"
    assert {event["kind"] for event in output["events"]} & {"split", "stable"}
    assert len(output["second_order"]) == 2
    assert (tmp_path / "a" / "family.png").read_bytes().startswith(b"\x89PNG")
    assert main([*common, "--preset", "shen2026", "--out", str(tmp_path / "b")]) == 0
    assert not (tmp_path / "b" / "family.png").exists()  # nothing changed, so there is no tree
    assert "no round was due within the steps" in " ".join(capsys.readouterr().out.split())
    assert main([*common, "--split", "curvatur", "--out", str(tmp_path / "c")]) == 2
    assert "Did you mean 'curvature'" in capsys.readouterr().err
