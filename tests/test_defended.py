"""How defended networks are kept and told: what is missing is made, the strongest attack counts."""

from __future__ import annotations

import pytest
import torch
from benchmarks import defenses as benchmark
from benchmarks import tables_of_defenses as tables
from benchmarks.defenses import AFTER, CASES, Kept, groups

from papers.buzaglo2023 import WEIGHT_DECAY, gradients
from residuum.attacks.adaptive import Released
from residuum.defenses import DEFENSES, release, trial
from residuum.records import Checkpoint, Dataset
from tests.test_defenses import setting, undefended


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
    best, told = tables.best_of(row), tables.best_of(row, told=True)
    assert best is not None
    assert told is not None
    assert (best["name"], best["recovered"]) == ("unmix", 9)
    assert (best["p_value"], best["tried"]) == (2 * 0.004, 2)  # of two that ran; nothing was told
    assert tables.count(best) == r"9\*"
    assert tables.count(best | {"p_value": 3 * 0.004}) == "9"
    assert (told["name"], told["p_value"], told["tried"]) == ("told", 3 * 0.001, 3)
    row["attacks"]["told"] = attacked(2, 0.001)
    told = tables.best_of(row, told=True)
    assert told is not None
    assert (told["name"], told["recovered"]) == ("unmix", 9), "one who was told has every other way"


def test_a_table_tells_what_was_refused_and_where_a_secret_made_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = {"refused": "no"}
    attacks = [
        {"unaware": refused, "unmix": refused, "told": refused},
        {"unaware": refused, "unmix": attacked(9, 0.001), "told": attacked(3, 0.001)},
        {"unaware": attacked(1, 0.5), "unmix": attacked(2, 0.5), "told": attacked(7, 0.001)},
    ]
    made = [
        {"defense": "none", "seed": k, "held_out_accuracy": 0.5, "train_loss": 1.0, "attacks": one}
        for k, one in enumerate(attacks)
    ]
    assert tables.best_of(made[0]) is tables.best_of(made[0], told=True) is None
    monkeypatch.setattr(tables, "FILES", ["one"])
    monkeypatch.setattr(tables, "ordered", lambda: ["none"])
    monkeypatch.setattr(tables, "read", lambda file: {"data": "digits", "n": 10})
    monkeypatch.setattr(tables, "rows", lambda file, defense: made)
    cell = r"-,&nbsp;-,&nbsp;1<br>→&nbsp;-,&nbsp;9\*,&nbsp;2<br>told&nbsp;-,&nbsp;9\*,&nbsp;7\*"
    assert f"| {cell} | +0.0 | unmix 2 | 1 of 2 |" in tables.defenses()
    assert "| 11 of 20 (1)," in tables.intervals()
    monkeypatch.setattr(tables, "rows", lambda file, defense: made[:2])
    assert "told" not in tables.defenses(), "the secret was of no use"
    monkeypatch.setattr(tables, "rows", lambda file, defense: made[:1])
    assert "| - |" in tables.intervals()


def test_the_benchmark_attacks_as_the_command_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One implementation of the ways, and counts of unmixing that are equal to the last bit."""
    for name in ("attackers", "attempt", "either_sign"):
        assert getattr(benchmark, name) is getattr(trial, name)
    now = setting()
    monkeypatch.setattr(benchmark, "SUBSETS", now.subsets)
    checkpoint, _, secret, state, _, _ = release(now, "none", DEFENSES["noise"], None)
    facts = {"theta0": state.theta0, "large": False}
    handed = Released((checkpoint,), now.knowledge, now.attack, facts)
    theirs, _ = benchmark.scored(now, benchmark.attackers(handed, "", secret, rewritten=True))
    ours = {one.attacker: one for one in undefended()[1].attacks}
    assert list(theirs) == list(ours)
    assert theirs["unmix"]["recovered"] == ours["unmix"].recovered
    assert theirs["unmix"]["p_value"] == ours["unmix"].p_value
    assert theirs["unmix"]["rule"] == ours["unmix"].rule


def test_what_was_skipped_is_made_again_and_what_was_made_is_not(tmp_path) -> None:
    kept = Kept(tmp_path, "digits", "cpu")
    assert not kept.has(0, AFTER)
    kept.add([{"defense": "dp:8", "seed": 0, "skipped": "not installed"}])
    kept.add([{"defense": text, "seed": 0, "attacks": {}} for text in AFTER])
    again = Kept(tmp_path, "digits", "cpu")
    assert again.has(0, AFTER)
    assert not again.has(1, AFTER)
    assert not again.has(0, ("dp:8",))


def test_every_defense_of_a_table_is_one_that_is_run() -> None:
    for data in CASES:
        run = [text for group in groups(data) for text in group]
        assert len(run) == len(set(run))
    assert tables.ordered()[0] == "none"
    assert len(tables.ordered()) == 1 + sum(map(len, groups("digits")))


def left(w: float, b: float, v: float, data: Dataset) -> tuple[float, float]:
    """Relative gradients of one neuron, at once and in the mean of further steps."""
    given = {"layers.0.weight": [[w]], "layers.0.bias": [b], "layers.1.weight": [[v]]}
    theta = {name: torch.tensor(value, dtype=torch.float64) for name, value in given.items()}
    checkpoint = Checkpoint(theta, "mlp:1-1-1", (1,), task="regression")
    return gradients(checkpoint, data, 0.05, "cpu")


def test_a_stationary_point_of_the_decayed_loss_has_nothing_left_to_do() -> None:
    """One neuron on the sample 1 with target 1: w = b, v^2 = 2 w^2 and 1 - Phi = decay / sqrt(8)."""
    w = ((1 - WEIGHT_DECAY / 8**0.5) / 8**0.5) ** 0.5
    data = Dataset(torch.ones(1, 1).double(), torch.ones(1).double())
    assert max(left(w, w, 2**0.5 * w, data)) < 1e-10
    assert left(1.01 * w, 1.01 * w, 1.01 * 2**0.5 * w, data)[0] > 1


def test_a_stationary_point_at_a_kink_is_one_in_the_mean_of_steps_alone() -> None:
    """A second sample at 0 with target -0.01 holds b = 0, where its gate has to be decay / 0.01.

    w = v and 1 - Phi = decay; with that gate closed, as at 0, what is left is the pull on b, decay v.
    """
    w = (1 - WEIGHT_DECAY) ** 0.5
    data = Dataset(torch.tensor([[1.0], [0.0]]).double(), torch.tensor([1.0, -0.01]).double())
    at_once, mean = left(w, 0.0, w, data)
    assert at_once == pytest.approx(0.5**0.5, rel=1e-9)
    assert mean < 0.01
