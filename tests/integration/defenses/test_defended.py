"""How results of defended networks are stored and reported. The strongest attack counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from experiments import defenses as benchmark
from experiments.defenses import AFTER, CASES, ResultFile, groups
from experiments.pages import defenses as tables
from papers.buzaglo2023 import WEIGHT_DECAY, gradients
from residuum.attacks.defense_aware.strategies import Released
from residuum.defenses import parse_defense, release, run_trial, trial
from residuum.errors import InputError
from residuum.networks.network import Network
from residuum.records import Dataset, Reconstruction, Selection
from tests.integration.defenses.test_defenses import setting


def attacked(recovered: int, p: float) -> dict:
    return {"recovered": recovered, "p_value": p, "expected": 0.5}


def test_the_strongest_attack_counts_and_pays_for_the_others() -> None:
    row = {
        "attacks": {
            "unaware": attacked(1, 0.4),
            "unmix": attacked(9, 0.004),
            "start": {"refused": "no start"},
            "told": attacked(20, 0.001),
        }
    }
    best, informed = tables.best_of(row), tables.best_of(row, knows_secret=True)
    assert best is not None
    assert informed is not None
    assert (best["name"], best["recovered"]) == ("unmix", 9)
    assert (best["p_value"], best["tried"]) == (2 * 0.004, 2)  # of two that ran; nothing was told
    assert tables.count(best) == r"9\*"
    assert tables.count(best | {"p_value": 3 * 0.004}) == "9"
    assert (informed["name"], informed["p_value"], informed["tried"]) == ("told", 3 * 0.001, 3)
    row["attacks"]["told"] = attacked(2, 0.001)
    informed = tables.best_of(row, knows_secret=True)
    assert informed is not None
    assert (informed["name"], informed["recovered"]) == ("unmix", 9), (
        "one who was told has every other way"
    )


def test_a_table_tells_what_was_refused_and_where_a_secret_made_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = {"refused": "no"}
    attacks = [
        {"unaware": refused, "unmix": refused, "told": refused},
        {"unaware": refused, "unmix": attacked(9, 0.001), "told": attacked(3, 0.001)},
        {"unaware": attacked(1, 0.5), "unmix": attacked(2, 0.5), "told": attacked(7, 0.001)},
    ]
    rows_made = [
        {
            "defense": "none",
            "seed": k,
            "held_out_accuracy": 0.5,
            "train_loss": 1.0,
            "attacks": attacked,
        }
        for k, attacked in enumerate(attacks)
    ]
    assert tables.best_of(rows_made[0]) is tables.best_of(rows_made[0], knows_secret=True) is None
    monkeypatch.setattr(tables, "FILES", ["one"])
    monkeypatch.setattr(tables, "ordered", lambda: ["none"])
    monkeypatch.setattr(tables, "read", lambda file: {"data": "digits", "n": 10})
    monkeypatch.setattr(tables, "rows", lambda file, defense: rows_made)
    cell = r"-,&nbsp;-,&nbsp;1<br>→&nbsp;-,&nbsp;9\*,&nbsp;2<br>told&nbsp;-,&nbsp;9\*,&nbsp;7\*"
    assert f"| {cell} | +0.0 | unmix 2 | 1 of 2 |" in tables.defenses()
    assert "| 11 of 20 (1)," in tables.intervals()
    monkeypatch.setattr(tables, "rows", lambda file, defense: rows_made[:2])
    assert "told" not in tables.defenses(), "the secret was of no use"
    monkeypatch.setattr(tables, "rows", lambda file, defense: rows_made[:1])
    assert "| - |" in tables.intervals()


def test_the_benchmark_attacks_as_the_command_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One implementation of the ways, and counts of each that are equal to the last bit."""
    for name in ("make_attackers", "run_attacker", "add_negated"):
        assert getattr(benchmark, name) is getattr(trial, name)
    now = replace(setting(), certify=False)
    monkeypatch.setattr(benchmark, "SUBSETS", now.subsets)
    named = parse_defense("shift-retrain-vector:0.5")  # it has every way but start
    defended = release(now, *named)
    checkpoint, secret = defended.released, defended.secret
    settings_known = {"theta0": defended.state.theta0, "large": False}
    handed = Released((checkpoint,), now.knowledge, now.attack, settings_known)
    ways = benchmark.make_attackers(handed, named[1].adaptive, secret, in_biases=False)
    theirs, _ = benchmark.score_attacks(now, ways)
    ours = {attacked.attacker: attacked for attacked in run_trial(now, *named)[0].attacks}
    assert list(theirs) == list(ours)
    assert len(ours) == 6
    for name, ours_attacked in ours.items():
        for figure, value in (
            ("recovered", ours_attacked.recovered),
            ("expected", ours_attacked.expected_by_chance),
            ("p_value", ours_attacked.p_value),
            ("rule", ours_attacked.rule),
        ):
            assert theirs[name][figure] == value, (name, figure)


def test_means_of_groups_of_candidates_are_scored_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command pools them: an attack whose single candidates miss may agree on a sample."""
    now, n = setting(), len(setting().split.train)
    x = now.split.train.x.double()
    all_indices, ones = torch.arange(n), torch.ones(n)
    chosen = Selection.from_candidates(x, ones, all_indices, ones, members=torch.full((n,), 2))
    noise = torch.zeros(1, *now.split.train.shape, dtype=torch.float64)
    noise[..., 0, 0] = 1.0
    reconstruction = Reconstruction.from_candidates(
        "test", noise, torch.ones(1), torch.ones(1), now.knowledge
    )
    monkeypatch.setattr(benchmark, "SUBSETS", now.subsets)
    counts = []
    for result in (reconstruction, reconstruction.replace(selection=chosen)):
        monkeypatch.setattr(benchmark, "run_attacker", lambda way, shape, result=result: result)
        counts.append(
            benchmark.score_attacks(now, iter([("unaware", InputError("", ""))]))[0]["unaware"]
        )
    assert [attack_counts["candidates"] for attack_counts in counts] == [1, 1 + n]
    assert counts[0]["recovered"] < counts[1]["recovered"] == n


def test_what_was_skipped_is_made_again_and_what_was_made_is_not(tmp_path) -> None:
    store = ResultFile(tmp_path, "digits", "cpu")
    assert not store.has(0, AFTER)
    store.add([{"defense": "dp:8", "seed": 0, "skipped": "not installed"}])
    store.add([{"defense": text, "seed": 0, "attacks": {}} for text in AFTER])
    store_again = ResultFile(tmp_path, "digits", "cpu")
    assert store_again.has(0, AFTER)
    assert not store_again.has(1, AFTER)
    assert not store_again.has(0, ("dp:8",))


def test_a_row_of_other_settings_is_made_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResultFile(tmp_path, "digits", "cpu")
    today = {"seed": 0, "attacks": {}, "settings": benchmark.settings("digits")}
    store.add([{"defense": "cap:2"} | today, {"defense": "sgd:10", "seed": 0, "attacks": {}}])
    assert store.has(0, ("cap:2",))
    assert store.has(0, ("sgd:10",)), "an older row does not say its settings"
    monkeypatch.setattr(benchmark, "SUBSETS", 7)
    later = ResultFile(tmp_path, "digits", "cpu")
    assert not later.has(0, ("cap:2",))
    assert later.has(0, ("sgd:10",))
    assert benchmark.settings("digits") != benchmark.settings("mnist")


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as error:
        benchmark.main([*arguments])
    assert isinstance(error.value.code, int)
    return error.value.code


def test_what_cannot_be_run_is_refused(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RESIDUUM_DATA", raising=False)
    out = ("--out", str(tmp_path))
    assert ended("--only", "noize:1", *out) == 2
    assert "no such defense: noize:1; there are" in capsys.readouterr().err
    assert ended("--data", "mnist", "--root", ".", "--only", "cap:2", *out) == 2, "not on mnist"
    for data in ("mnist", "cifar10"):
        assert ended("--data", "digits", data, *out) == 2
        assert "--root" in capsys.readouterr().err
    with pytest.raises(InputError, match="The option --device must be cpu or cuda; got 'gpu'"):
        benchmark.main(["--data", "mnist", "--root", ".", "--device", "gpu", *out])
    assert not list(tmp_path.iterdir())


def test_finished_rows_are_listed_and_not_computed_again(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "ProcessPoolExecutor", None)  # nothing may be run
    store = ResultFile(tmp_path, "digits", "cpu")
    store.add([{"defense": "cap:2", "seed": 0, "attacks": {"unmix": attacked(9, 0.1)}}])
    before = store.path.read_bytes()
    call = ["--only", "cap:2", "--seeds", "0", "--out", str(tmp_path)]
    assert benchmark.main(call) == 0
    output = capsys.readouterr().out
    assert "there: digits cap:2 seed 0: {'unmix': 9}" in output
    assert "1 of 1 networks" in output
    assert "--out" in output
    assert store.path.read_bytes() == before


def test_every_defense_of_a_table_is_one_that_is_run() -> None:
    for data in CASES:
        run = [text for group in groups(data) for text in group]
        assert len(run) == len(set(run))
    assert tables.ordered()[0] == "none"
    assert len(tables.ordered()) == 1 + sum(map(len, groups("digits")))


def stationarity(w: float, b: float, v: float, data: Dataset) -> tuple[float, float]:
    """Relative gradients of one neuron, at once and in the mean of further steps."""
    weights = {"layers.0.weight": [[w]], "layers.0.bias": [b], "layers.1.weight": [[v]]}
    theta = {name: torch.tensor(value, dtype=torch.float64) for name, value in weights.items()}
    checkpoint = Network(theta, "mlp:1-1-1", (1,), task="regression")
    return gradients(checkpoint, data, 0.05, "cpu")


def test_a_stationary_point_of_the_decayed_loss_has_nothing_left_to_do() -> None:
    """One neuron on the sample 1 with target 1: w = b, v^2 = 2 w^2 and 1 - Phi = decay / sqrt(8)."""
    w = ((1 - WEIGHT_DECAY / 8**0.5) / 8**0.5) ** 0.5
    data = Dataset(torch.ones(1, 1).double(), torch.ones(1).double())
    assert max(stationarity(w, w, 2**0.5 * w, data)) < 1e-10
    assert stationarity(1.01 * w, 1.01 * w, 1.01 * 2**0.5 * w, data)[0] > 1


def test_a_stationary_point_at_a_kink_is_one_in_the_mean_of_steps_alone() -> None:
    """A second sample at 0 with target -0.01 holds b = 0, where its gate has to be decay / 0.01.

    w = v and 1 - Phi = decay; with that gate closed, as at 0, what is left is the pull on b, decay v.
    """
    w = (1 - WEIGHT_DECAY) ** 0.5
    data = Dataset(torch.tensor([[1.0], [0.0]]).double(), torch.tensor([1.0, -0.01]).double())
    at_once, mean = stationarity(w, 0.0, w, data)
    assert at_once == pytest.approx(0.5**0.5, rel=1e-9)
    assert mean < 0.01
