"""Defenses: identity at zero, nothing secret in a release, what each changes, what it is measured by."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from residuum.attacks import NTK, Auto
from residuum.attacks.defense_aware.shift import infer_mean, move_biases
from residuum.attacks.defense_aware.strategies import ADAPTIVE, Adapted, Released, remove_shift
from residuum.datasets import load_dataset
from residuum.defenses import (
    DEFENSES,
    Attacked,
    Conditions,
    Outcome,
    Secret,
    Training,
    parse_defense,
    release,
    run_trial,
    trial,
)
from residuum.defenses.attackers import add_negated, find_strongest, make_attackers, run_attacker
from residuum.defenses.catalog import add_noise
from residuum.defenses.loops import Job, compute_smoothed_losses, train_capped, train_privately
from residuum.defenses.trial import RETRAINED, REWRITTEN, measure_rewrite_residuals
from residuum.errors import InputError, MissingExtraError
from residuum.io.checkpoints import save_checkpoint
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Knowledge, Split, same
from residuum.report import defenses as report
from residuum.risk.run import expose
from residuum.stationarity import norm, parameters
from residuum.theory.rows import constraint_rows
from residuum.training import TrainingConfig, initialize, train
from tests.cases import relu_point
from tests.unit.attacks.test_defense_aware import checkpoint

ARCH = "mlp:64-20-1"
STRENGTHS = {
    "shift-rewrite": 5.0,
    "shift-rewrite-vector": 0.5,
    "shift-retrain": 0.5,
    "shift-retrain-vector": 0.5,
    "noise": 0.1,
    "early-stop": 0.5,
    "default-init": 1.0,
    "plain-gd": 1.0,
    "weight-decay": 0.01,
    "label-smoothing": 0.2,
    "sgd": 5.0,
    "dp": 8.0,
    "without-top": 3.0,
    "cap": 1.2,
}
needs_opacus = pytest.mark.skipif(  # in CI it must be there: a missing one fails
    find_spec("opacus") is None and os.environ.get("CI") != "true",
    reason="the extra dp is not installed",
)
EACH = [pytest.param(name, marks=needs_opacus if name == "dp" else ()) for name in DEFENSES]


@lru_cache(maxsize=1)
def setting() -> Conditions:
    split = load_dataset("digits", 20, seed=0, holdout=150)
    descent = TrainingConfig(method="gd", steps=100, lr=0.5, momentum=0.9)
    knowledge = Knowledge(
        shape=(1, 8, 8), value_range=(0.0, 1.0), mean=split.train.mean, sample_count=20
    )
    return Conditions(
        ARCH,
        split,
        "binary",
        Training(TrainingConfig(steps=120), descent, 20),
        Auto(steps=60, restarts=1),
        knowledge,
        subsets=200,
        releases=4,
        kinks=0,
    )


@lru_cache(maxsize=1)
def undefended() -> tuple[Network, Outcome]:
    outcome, released, _ = run_trial(setting())
    return released, outcome


@lru_cache(maxsize=2)
def tried(text: str) -> Outcome:
    return run_trial(setting(), *parse_defense(text))[0]


def defended(name: str, strength: float) -> Network:
    return release(setting(), name, DEFENSES[name], strength).released


@pytest.mark.parametrize("name", DEFENSES)
def test_off_is_the_identity_to_the_last_bit(name: str) -> None:
    off = defended(name, DEFENSES[name].off)
    assert same(off, undefended()[0])


@pytest.mark.parametrize("name", ["shift-rewrite", "shift-retrain", "noise"])
def test_off_leaves_the_counts(name: str) -> None:
    outcome, _, _ = run_trial(setting(), *parse_defense(f"{name}:0"))
    before = undefended()[1]
    assert outcome.theta_sha256 == before.theta_sha256
    assert outcome.unaware.recovered == before.unaware.recovered
    assert outcome.unaware.p_value == before.unaware.p_value
    assert torch.equal(outcome.unaware.images, before.unaware.images)


@pytest.mark.parametrize("name", EACH)
def test_every_defense_changes_the_release_repeatably_and_says_what_it_is(name: str) -> None:
    defense = DEFENSES[name]
    released = defended(name, STRENGTHS[name])
    assert not same(released, undefended()[0])
    assert same(released, defended(name, STRENGTHS[name]))
    assert defense.changes
    assert defense.secret
    assert defense.unit
    assert defense.adaptive in ADAPTIVE
    assert defense.data or defense.training or defense.release


@pytest.mark.parametrize("name", EACH)
def test_no_secret_is_in_the_released_file(name: str, tmp_path: Path) -> None:
    strength = 0.7310585786300049 if DEFENSES[name].shift or name == "noise" else STRENGTHS[name]
    defended_network = release(setting(), name, DEFENSES[name], strength)
    released, secret = defended_network.released, defended_network.secret
    save_checkpoint(released, tmp_path / "released.safetensors")
    content = (tmp_path / "released.safetensors").read_bytes()
    traces = [struct.pack(order + "Q", secret.seed) for order in "<>"] + [str(secret.seed).encode()]
    if secret.shift is not None:
        for value in {float(v) for v in secret.shift.flatten()[:20]}:
            traces += [struct.pack("<d", value), struct.pack("<f", value), repr(value).encode()]
    assert secret.seed > 2**20, "a seed this small would be found anywhere"
    assert not [trace for trace in traces if trace in content]
    # The scan does find what is there.
    planted = content + struct.pack("<Q", secret.seed)
    assert [trace for trace in traces if trace in planted]


@pytest.mark.parametrize("u", [0.1, 0.5, 5.0])
@pytest.mark.parametrize("depth", [2, 3])
def test_rewriting_biases_at_exact_points(u: float, depth: int) -> None:
    point = relu_point(depth, groups=3, seed=2)
    before = checkpoint(point.model)
    generator = torch.Generator().manual_seed(0)
    shift = torch.randn(12, generator=generator, dtype=torch.float64)
    shift = u * shift / shift.norm()
    after = move_biases(before, -shift)
    models = [
        release.copy_module(torch.float64).requires_grad_(False) for release in (before, after)
    ]
    inputs = torch.cat([point.x, 3 * torch.randn(50, 12, dtype=torch.float64)])
    assert float((models[1](inputs + shift) - models[0](inputs)).abs().max()) < 1e-6
    rows = constraint_rows(models[0](point.x), point.y, "binary")
    residuals = measure_rewrite_residuals(*models, point.x, point.y, point.lam, rows, shift)
    theta = parameters(models[0])
    w, b = theta["layers.0.weight"], theta["layers.0.bias"]
    naive = math.sqrt(float(b @ b) * u**2 + float((w @ shift) @ (w @ shift))) / norm(theta)
    assert residuals["before"] < 1e-12
    assert residuals["closed_form"] == pytest.approx(naive, rel=1e-12)
    assert residuals["original_multipliers"] == pytest.approx(naive, rel=1e-9)
    assert residuals["refitted"] <= residuals["original_multipliers"] * (1 + 1e-12)
    assert residuals["refitted"] > 0.01 * naive, "rewritten biases are no KKT point"


def test_predictions_of_a_trained_network_survive_rewriting() -> None:
    before = undefended()[0]
    for text in ("shift-rewrite:5", "shift-rewrite-vector:0.5"):
        network = release(setting(), *parse_defense(text))
        after, secret = network.released, network.secret
        x = setting().split.holdout.x
        assert secret.shift is not None
        change = after.copy_module()(secret.inputs(x)) - before.copy_module()(x)
        assert float(change.detach().abs().max()) < 1e-6


def test_the_two_kinds_of_shift_are_named_and_sized_both_ways() -> None:
    rewritten, retrained = tried("shift-rewrite:5"), tried("shift-retrain:0.5")
    assert rewritten.shift["kind"] == REWRITTEN != RETRAINED == retrained.shift["kind"]
    assert rewritten.shift["per_pixel"] == pytest.approx(5)
    assert rewritten.shift["norm"] == pytest.approx(40)
    assert rewritten.accuracy == undefended()[1].accuracy
    assert rewritten.rewrite["refitted"] <= rewritten.rewrite["original_multipliers"]
    assert not retrained.rewrite
    text = report.render_markdown([undefended()[1], rewritten, retrained])
    for line in text.splitlines():
        assert not ("biases changed" in line and "data shifted" in line)
    assert "5 per pixel, norm 40" in text
    assert "closed form" in text
    assert "refitted" in text
    assert REWRITTEN in text
    assert RETRAINED in text


def test_an_outcome_is_kept_whole_and_published_without_its_secret(tmp_path: Path) -> None:
    outcome, _, secret = run_trial(setting(), *parse_defense("shift-rewrite-vector:0.5"))
    assert same(Outcome.load(outcome.save(tmp_path / "o.safetensors")), outcome)
    published = json.dumps(outcome.to_json(), allow_nan=False)
    assert secret.shift is not None
    assert repr(float(secret.shift.flatten()[0])) not in published
    assert str(secret.seed) not in published
    assert outcome.informed is not None
    page = report.render_page(
        [undefended()[1], outcome], report.draw_comparison([undefended()[1], outcome])
    )
    assert "shift-rewrite-vector:0.5" in page
    assert "<script" not in page
    assert "data:image/png" in page


def test_counts_are_shown_with_their_threshold_and_shares_with_their_bound() -> None:
    outcome = undefended()[1]
    rule, least = outcome.unaware.rule, outcome.determined_at_least
    assert rule.startswith("ncc > 0.")
    assert outcome.to_json()["unaware"]["rule"] == rule
    assert outcome.determined_energy is not None
    assert least is not None
    assert 0 <= least <= outcome.determined_energy + 1e-9
    row = dict(zip(report.HEADER, report.make_rows([outcome])[0], strict=True))
    assert row["unaware"] == f"{outcome.unaware.recovered}/20 ({rule})"
    assert row["others keep"] == f"≥ {least:.3g} ({outcome.determined_energy:.3g})"
    before = outcome.replace(determined_at_least=None)  # a file that has no bound
    row = dict(zip(report.HEADER, report.make_rows([before])[0], strict=True))
    assert row["others keep"] == "-"  # figures of equal pairs are no such bound


def attacked(attacker: str, recovered: int, p: float) -> Attacked:
    return undefended()[1].unaware.replace(attacker=attacker, recovered=recovered, p_value=p)


def test_the_strongest_attack_counts_and_pays_for_the_others() -> None:
    refused = attacked("start", 50, 1e-9).replace(refused="no start")
    attacks = [attacked("unaware", 1, 0.4), attacked("adapted", 9, 0.02), refused]
    attacks += [
        attacked("unmix", 9, 0.004),
        attacked("told", 20, 0.001),
        attacked("told-unmix", 2, 0.3),
    ]
    outcome = undefended()[1].replace(attacks=tuple(attacks))
    best, informed = outcome.adaptive, outcome.informed
    assert best is not None
    assert informed is not None
    assert (best.attacker, best.recovered) == ("unmix", 9), "a tie goes to the smaller p"
    assert (best.p_value, best.tried) == (3 * 0.004, 3), "of those that ran and were told nothing"
    assert (informed.attacker, informed.p_value, informed.tried) == ("told", 5 * 0.001, 5), (
        "one who was told has all"
    )
    document = outcome.to_json()
    assert (document["adaptive"]["p_value"], document["told"]["p_value"]) == (3 * 0.004, 5 * 0.001)
    assert [attacked["p_value"] for attacked in document["attacks"]] == [
        attacked.p_value for attacked in attacks
    ]
    lucky = outcome.replace(attacks=(attacked("unaware", 1, 0.6), attacked("unmix", 0, 1.0)))
    assert lucky.adaptive is not None
    assert lucky.adaptive.p_value == 1, "no probability is larger"
    assert outcome.replace(attacks=(refused,)).adaptive is None
    assert outcome.replace(attacks=tuple(attacks[:4])).informed is None, "nobody was told anything"


def test_the_informed_attacker_is_shown_if_knowledge_made_a_difference() -> None:
    attacks = (attacked("unaware", 1, 0.4), attacked("unmix", 9, 0.004), attacked("told", 3, 0.05))
    outcome = undefended()[1].replace(attacks=attacks)
    informed, line = outcome.informed, "strongest attack that also knows the shift"
    assert informed is not None
    assert (informed.attacker, informed.recovered) == ("unmix", 9), "being told takes no way away"
    assert line not in report.render_markdown([outcome])
    better = outcome.replace(attacks=(*attacks[:2], attacked("told", 10, 0.001)))
    assert f"{line}: told, 10/20" in report.render_markdown([better])


def test_the_strongest_of_attacks_by_name() -> None:
    assert find_strongest({}) is None
    assert find_strongest({"a": (2, 0.3), "b": (3, 0.4), "c": (3, 0.2)}) == (
        "c",
        pytest.approx(0.6),
        3,
    )
    assert find_strongest({"a": (0, 1.0), "b": (0, 1.0)}) == ("a", 1.0, 2)
    assert find_strongest({"a": (3, 0.0), "b": (3, 0.5)}) == ("a", 0.0, 2)
    assert find_strongest({"a": (3, None), "b": (3, 0.5)}) == ("b", 1.0, 2), (
        "an unknown p is no small one"
    )
    assert find_strongest({"a": (3, None)}) == ("a", None, 1)


def test_what_a_strategy_spends_is_charged_to_no_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slow(handed: Released) -> Adapted:
        now[0] += 100
        return Adapted(
            handed.checkpoints[0], handed.knowledge, handed.attack, {"chosen": "unaware"}
        )

    def timed(way: Adapted | InputError, shape: tuple[int, ...]) -> Any:
        now[0] += 1
        return run_attacker(way, shape)

    monkeypatch.setitem(ADAPTIVE, "follow-mean", slow)
    # Only strategies and attackers move this clock, so each second belongs to one of them.
    monkeypatch.setattr(trial, "run_attacker", timed)
    monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=lambda: now[0]))
    outcome, _, _ = run_trial(setting(), *parse_defense("shift-retrain:0.5"))
    assert {attacked.seconds for attacked in outcome.attacks} == {1}
    assert outcome.seconds["strategy"] == 100
    assert (outcome.seconds["unaware"], outcome.seconds["adaptive"]) == (1, 3)


def test_what_unmixing_breaks_is_said_to_be_broken_by_it() -> None:
    outcomes = [undefended()[1], tried("shift-rewrite:5")]
    table = [dict(zip(report.HEADER, row, strict=True)) for row in report.make_rows(outcomes)]
    text, page = report.render_markdown(outcomes), report.render_page(outcomes)
    for outcome, row in zip(outcomes, table, strict=True):
        best = outcome.adaptive
        assert best is not None
        stationarity = [
            attacked for attacked in outcome.attacks if attacked.attacker in ("unaware", "adapted")
        ]
        assert best.recovered > max(attacked.recovered for attacked in stationarity)  # type: ignore[operator, type-var]
        assert (best.attacker, row["strongest"]) == ("unmix", "unmix")
        assert row["adaptive"] == f"{best.recovered}/20 ({best.rule})"
        for other in outcome.attacks:
            chance = f"{other.expected_by_chance:.2g} by chance, p {other.p_value:.2g}"
            assert f"{other.attacker} {other.recovered} ({chance})" in text
        line = f"{outcome.label}: strongest attack that knows the defense: unmix"
        assert line in text
        assert line in page


def test_strategies_are_ordered_and_listed_only_if_they_apply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, now = undefended()[0], setting()
    start = {name: torch.zeros_like(t) for name, t in weights.theta.items()}

    def ways(
        strategy: str, large: bool = False, shift: Tensor | None = None, rewritten: bool = True
    ) -> dict[str, Any]:
        conditions = {"theta0": start, "large": large}
        handed = Released((weights, weights), now.knowledge, now.attack, conditions)
        return dict(make_attackers(handed, strategy, Secret(1, shift), in_biases=rewritten))

    assert list(ways("")) == ["unaware", "unmix"]
    assert list(ways("", large=True)) == ["unaware", "start", "unmix"]
    strategies = ways("average-releases", large=True, shift=torch.ones(64))
    assert list(strategies) == ["unaware", "adapted", "start", "unmix", "told"], (
        "a shift in the biases is not in the rows that unmixing reads"
    )
    assert [way.knowledge.theta0 is start for way in strategies.values()] == [0, 0, 1, 1, 0]
    moved = move_biases(weights, torch.ones(64))
    assert same(strategies["told"].checkpoint, moved)
    strategies = ways("follow-mean-image", shift=torch.ones(64), rewritten=False)
    order = ["unaware", "adapted", "unmix", "adapted-unmix", "told", "told-unmix"]
    assert list(strategies) == order
    assert [strategies[name].knowledge.theta0 is start for name in order] == [0, 0, 1, 1, 0, 1]
    for name, u in (("adapted-unmix", infer_mean(weights)), ("told-unmix", torch.ones(64))):
        assert same(strategies[name].checkpoint, remove_shift(weights, start, u))
        assert not strategies[name].findings
    adapted = Adapted(moved, now.knowledge, now.attack, {"chosen": "unaware"})
    monkeypatch.setitem(ADAPTIVE, "test", lambda handed: adapted)
    chosen = ways("test")
    assert list(chosen) == ["unaware", "unmix"], "it chose what was tried already"
    assert same(chosen["unmix"].checkpoint, moved), "what the strategy made is unmixed"
    adapted = Adapted(moved, now.knowledge, NTK.like(now.attack))
    assert list(ways("test", large=True)) == ["unaware", "adapted", "unmix"], "it has the start"


def shifted_mixture(u: Tensor) -> tuple[Network, dict[str, Tensor], Tensor, Tensor]:
    """A first layer W0 + C (X + 1 u^T), b0 + C 1, its start, C and X."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    C, x = draw(20, 7), draw(7, 64)
    start = {name: draw(*t.shape) for name, t in undefended()[0].theta.items()}
    theta = {**start, "layers.0.weight": start["layers.0.weight"] + C @ (x + u)}
    theta["layers.0.bias"] = start["layers.0.bias"] + C.sum(1)
    return undefended()[0].replace(theta=theta), start, C, x


def test_a_shift_of_the_training_data_comes_off_the_rows_exactly() -> None:
    u = torch.linspace(-1, 2, 64, dtype=torch.float64)
    weights, start, C, x = shifted_mixture(u)

    def remaining_rows(shift: Tensor, begun: dict[str, Tensor] = start) -> Tensor:
        weights_left = remove_shift(weights, begun, shift)
        assert torch.equal(weights_left.theta["layers.0.bias"], weights.theta["layers.0.bias"])
        return weights_left.theta["layers.0.weight"] - start["layers.0.weight"] - C @ x

    assert float(remaining_rows(u).abs().max()) < 1e-12
    # What a wrong shift leaves is of rank one, and as large as it is wrong.
    wrong = torch.linalg.svdvals(remaining_rows(u + 0.01))
    assert float(wrong[0]) == pytest.approx(0.01 * 8 * float(C.sum(1).norm()), rel=1e-9)
    assert float(wrong[1]) < 1e-12
    nowhere = {name: torch.zeros_like(t) for name, t in start.items()}
    assert float(remaining_rows(u, nowhere).norm()) > 1, "the start's bias holds no samples"
    shaped = remove_shift(weights, start, u.reshape(1, 8, 8))
    assert same(shaped, remove_shift(weights, start, u)), "a shift may have the shape of a sample"


def test_what_unmixing_is_given_are_mixtures_of_samples_without_the_shift() -> None:
    """The strategies themselves: told-unmix has the span of the samples, plain unmix that of shifted ones."""
    u = torch.linspace(-1, 2, 64, dtype=torch.float64)
    weights, start, _, x = shifted_mixture(u)
    conditions = {"theta0": start, "large": True}
    handed = Released((weights,), setting().knowledge, setting().attack, conditions)
    ways = dict(make_attackers(handed, "follow-mean-image", Secret(1, u), in_biases=False))

    def outside(name: str, samples: Tensor) -> float:
        """Share of the rows of a way, less the start, that these samples do not span."""
        way = ways[name]
        assert isinstance(way, Adapted)
        assert way.knowledge.theta0 is not None
        names = (way.checkpoint.theta, way.knowledge.theta0)
        rows = torch.sub(*(state["layers.0.weight"] for state in names))
        basis = torch.linalg.qr(samples.T).Q
        return float((rows - rows @ basis @ basis.T).norm() / rows.norm())

    assert outside("told-unmix", x) < 1e-12
    assert outside("unmix", x + u) < 1e-12
    assert outside("unmix", x) > 0.1
    assert outside("told-unmix", x + u) > 0.1


def test_an_inferred_shift_leaves_the_same_rows_whatever_the_shift_was() -> None:
    """The mean of z = x + u moves with u, so C (Z - 1 m^T) does not; with the start in it it would."""

    def rows(u: Tensor) -> tuple[Tensor, Tensor]:
        weights, start, _, _ = shifted_mixture(u)
        conditions = {"theta0": start, "large": True}
        handed = Released((weights,), setting().knowledge, setting().attack, conditions)
        ways = dict(make_attackers(handed, "follow-mean-image", Secret(1, u), in_biases=False))
        way = ways["adapted-unmix"]
        assert isinstance(way, Adapted)
        blunt = remove_shift(weights, start, infer_mean(weights))
        return way.checkpoint.theta["layers.0.weight"], blunt.theta["layers.0.weight"]

    none, shifted_rows = (rows(k * torch.linspace(-1, 2, 64, dtype=torch.float64)) for k in (0, 3))
    assert float((shifted_rows[0] - none[0]).norm() / none[0].norm()) < 1e-12
    assert float((shifted_rows[1] - none[1]).norm() / none[1].norm()) > 0.1


def test_a_strategy_that_left_the_attack_as_it_was_is_said() -> None:
    outcome = undefended()[1].replace(strategy="known-start")
    sentence = "adapted attack known-start: short tries chose the unaware attack."
    assert sentence in report.render_markdown([outcome])
    assert "adapted" not in report.render_markdown([undefended()[1]])


def test_unmixed_sources_are_scored_with_both_signs() -> None:
    x = torch.ones(3, 1, 8, 8)
    assert torch.equal(add_negated("told-unmix", x), torch.cat([x, -x]))
    assert add_negated("adapted", x) is x


def test_a_way_that_is_refused_is_said_and_stops_no_other() -> None:
    shaped = replace(setting(), arch="convnet:1x8x8-4-1", certify=False)
    outcome, _, _ = run_trial(shaped, *parse_defense("shift-retrain:0.5"))
    refused = {
        attacked.attacker: attacked.refused for attacked in outcome.attacks if attacked.refused
    }
    assert set(refused) == {"adapted", "unmix", "adapted-unmix", "told", "told-unmix"}
    assert "the network must be an MLP with a bias in the first layer" in refused["adapted"]
    assert "no dense layer receives the input" in refused["unmix"]
    assert outcome.adaptive is not None
    assert (outcome.adaptive.attacker, outcome.adaptive.tried) == ("unaware", 1)
    assert outcome.informed is None
    text = report.render_markdown([outcome])
    for name, reason in refused.items():
        assert f"{name} refused: {reason}" in text
    assert report.draw_comparison([outcome]) is not None
    first = outcome.unaware.replace(refused="no", recovered=None, images=torch.zeros(0, 2, 1, 8, 8))
    blind = outcome.replace(attacks=(first, *outcome.attacks[1:]))
    assert report.make_rows([blind])[0][1:4] == ("refused", "-", "-")
    assert report.draw_comparison([blind]) is not None


def test_where_no_attack_applies_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some attack applies in this setting, so all attacks are refused by hand.
    monkeypatch.setattr(trial, "run_attacker", lambda way, shape: "the box is empty.")
    with pytest.raises(InputError, match="No attack applies: the box is empty"):
        run_trial(setting())


def test_names_in_a_report_are_text() -> None:
    outcome = undefended()[1].replace(name="<b>&|", strength=1.0)
    assert "<b>" not in report.render_page([outcome])
    assert "\\|" in report.render_markdown([outcome])


def test_noise_has_the_size_it_says() -> None:
    before = undefended()[0]
    after = add_noise(before, 0.1, Secret(123))
    for name, t in before.theta.items():
        ratio = float((after.theta[name] - t).norm() / t.norm())
        assert ratio == pytest.approx(0.1, rel=0.5 if t.numel() < 100 else 0.1)
    assert not same(add_noise(before, 0.1, Secret(124)), after)


def test_training_hooks() -> None:
    training = setting().training

    def hook(name: str, strength: float) -> TrainingConfig:
        change = DEFENSES[name].training
        assert change is not None
        return change(training, strength, 0).config

    assert hook("early-stop", 0.3).stop_loss == 0.3
    assert hook("default-init", 1).init == "default"
    assert hook("weight-decay", 0.01).weight_decay == 0.01
    assert (hook("sgd", 5).method, hook("sgd", 5).batch) == ("sgd", 5)
    stopped, trained_fully = (
        release(setting(), *parse_defense(f"early-stop:{s}")).state for s in (0.5, 0)
    )
    assert stopped.status == "loss"
    assert stopped.step < trained_fully.step


@pytest.mark.parametrize("outputs", [1, 3])
def test_smoothed_labels_are_the_expected_loss_over_labels(outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(5, outputs, generator=generator, dtype=torch.float64)
    y = torch.tensor([1.0, -1, 1, 1, -1]).double() if outputs == 1 else torch.arange(5) % 3
    s, naive = 0.2, 0.0
    for i in range(5):
        if outputs == 1:
            m = float(y[i] * out[i, 0])
            naive += (1 - s / 2) * math.log1p(math.exp(-m)) + s / 2 * math.log1p(math.exp(m))
        else:
            log = out[i] - out[i].logsumexp(0)
            share = [s / 3 + (1 - s) * (k == int(y[i])) for k in range(3)]
            naive -= sum(p * float(v) for p, v in zip(share, log, strict=True))
    assert float(compute_smoothed_losses(out, y, s).mean()) == pytest.approx(naive / 5, rel=1e-12)


def test_the_most_exposed_records_are_left_out_of_the_second_training() -> None:
    now = setting()
    network = release(now, *parse_defense("without-top:3"))
    after, facts_of_training = network.released, network.training_facts
    exposure = expose(undefended()[0], now.split.train)
    assert facts_of_training["left_out"] == sorted(exposure.order[:3].tolist())
    indices_kept = [i for i in range(20) if i not in facts_of_training["left_out"]]
    train_data = now.split.train
    data_left = train_data.replace(x=train_data.x[indices_kept], y=train_data.y[indices_kept])
    assert same(after.theta, train(ARCH, data_left, now.training.config).theta)
    assert facts_of_training["mean_score_of_left_out"] >= facts_of_training["mean_score_before"]
    for strength in (0.5, 2.5, 19):
        with pytest.raises(InputError, match="integer from 1 to 18"):
            release(now, *parse_defense(f"without-top:{strength}"))


@pytest.mark.parametrize("cap", [1.1, 1e9])
def test_a_record_beyond_the_cap_is_not_trained_on(cap: float) -> None:
    """One record at a time, against the loop; without a limit it is gradient descent."""
    data, config = setting().split.train, setting().training.descent.changed(steps=25)
    state, training_facts = train_capped(Job(ARCH, data, config, "binary"), cap=cap)
    model = initialize(Architecture.parse(ARCH), config)
    parameters_, speed = list(model.parameters()), None
    pulled, held = [0.0] * 20, 0
    for _ in range(25):
        moving = [p <= cap * sum(pulled) / 20 for p in pulled]
        held += moving.count(False)
        total = [torch.zeros_like(p) for p in parameters_]
        for i in range(20):
            margin = data.y[i] * model(data.x[i : i + 1])[0, 0]
            loss = torch.log1p(torch.exp(-margin))
            gradient = torch.autograd.grad(loss, parameters_)
            if moving[i]:
                total = [t + g / 20 for t, g in zip(total, gradient, strict=True)]
                pulled[i] += float(torch.sigmoid(-margin))
        speed = (
            total
            if speed is None
            else [config.momentum * v + t for v, t in zip(speed, total, strict=True)]
        )
        with torch.no_grad():
            for p, v in zip(parameters_, speed, strict=True):
                p -= config.lr * v
    for (name, p), _ in zip(model.named_parameters(), parameters_, strict=True):
        torch.testing.assert_close(state.theta[name], p.detach(), rtol=1e-6, atol=1e-9)
    assert training_facts["held_share"] == held / (25 * 20)
    assert (held > 0) == (cap < 2)


@needs_opacus
def test_the_accountant_says_what_was_spent() -> None:
    from opacus.accountants.analysis import rdp

    config = setting().training.descent.changed(steps=40, dtype="float32", init="default")
    _, training_facts = train_privately(
        Job(ARCH, setting().split.train, config, "binary"), epsilon=8.0
    )
    assert 7 < training_facts["epsilon"] <= 8
    assert training_facts["delta"] == pytest.approx(1 / 200)
    orders = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))
    steps = training_facts["epochs"] * 4
    spent = rdp.compute_rdp(
        q=0.25, noise_multiplier=training_facts["noise_multiplier"], steps=steps, orders=orders
    )
    epsilon, _ = rdp.get_privacy_spent(orders=orders, rdp=spent, delta=training_facts["delta"])
    assert training_facts["epsilon"] == pytest.approx(epsilon, rel=1e-6)
    _, more = train_privately(Job(ARCH, setting().split.train, config, "binary"), epsilon=1.0)
    assert more["noise_multiplier"] > training_facts["noise_multiplier"]


def test_without_its_extra_a_defense_names_the_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)  # as if it were not installed
    assert not DEFENSES["dp"].is_available
    assert DEFENSES["noise"].is_available
    with pytest.raises(MissingExtraError, match=r'pip install "\.\[dp\]"'):
        parse_defense("dp:8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("noize:1", "Did you mean 'noise'"),
        ("noise", "NAME:STRENGTH"),
        ("noise:x", "NAME:STRENGTH"),
        ("noise:-1", "Use a number above 0"),
        ("noise:nan", "NAME:STRENGTH"),
        ("noise:inf", "finite"),
        ("default-init:0.5", "Use 1"),
        ("label-smoothing:2", "at most 1"),
        ("dp:0", "Use a number above 0"),
    ],
)
def test_bad_names_and_strengths_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_defense(text)


def test_samples_that_are_no_images_are_not_drawn() -> None:
    split = setting().split
    flat = Split(
        *(
            dataset.replace(x=dataset.x.flatten(1), mean=dataset.mean.flatten())  # type: ignore[union-attr]
            for dataset in (split.train, split.holdout)
        )
    )
    knowledge = Knowledge(shape=(64,), sample_count=20)
    outcome, _, _ = run_trial(replace(setting(), split=flat, knowledge=knowledge))
    assert report.draw_comparison([outcome]) is None
    assert report.draw_comparison([]) is None
