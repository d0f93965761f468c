"""Attacks as objects with their own settings: kept in JSON, in an audit's request and in config.toml."""

from __future__ import annotations

import math
import pickle
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import residuum as rs
from residuum.attacks import KKT, OBJECTIVES, Auto, BinaryKKT, Unmix, attack_class, every_attack
from residuum.attacks.registry import AUTOMATIC_ATTACKS, rebuild_attack
from residuum.attacks.stationarity import objectives
from residuum.attacks.stationarity.attack import Stationarity
from residuum.attacks.stationarity.objectives import Objective
from residuum.auditing.config import AuditConfig, write_config
from residuum.auditing.request import AuditRequest
from residuum.auditing.schedule import select_attacks
from residuum.errors import InputError
from residuum.records import Knowledge
from residuum.settings import choices_of

EVERY = {**AUTOMATIC_ATTACKS, **every_attack()}
SPECIAL: dict[str, Any] = {
    "seconds": 2.5,
    "device": "cuda",
    "lr_lam": 0.5,
    "lam_init": (0.25, 0.75),
    "priors": (("value-box", 2.0), ("multiplier-floor", 5.0)),
    "rank": 0.5,
}


def another(name: str, default: Any, choices: tuple[Any, ...]) -> Any:
    """A value that differs from the default of a setting."""
    if name in SPECIAL:
        return SPECIAL[name]
    if choices:
        return next(choice for choice in choices if choice != default)
    return not default if isinstance(default, bool) else default + 1


def all_changed(kind: type[rs.attacks.Attack]) -> rs.attacks.Attack:
    """An attack whose settings all differ from their defaults."""
    fields = kind.model_fields.items()
    return kind(**{name: another(name, f.default, choices_of(f)) for name, f in fields})


def through_toml(attacks: list[Any]) -> AuditRequest:
    """An audit's request that was written to config.toml and read again."""
    request = AuditRequest(attacks=attacks)
    text = write_config(request.changed_settings(), needs_code=False)
    return AuditRequest(**AuditConfig(**tomllib.loads(text)).options())


@pytest.mark.parametrize("name", EVERY)
def test_every_attack_survives_json_and_names_itself(name: str) -> None:
    kind = EVERY[name]
    assert attack_class(name) is kind
    for attack in (kind(), all_changed(kind)):
        stored = attack.to_json()
        assert stored["attack"] == name
        assert stored.keys() == {"attack", *kind.model_fields}
        restored = kind.from_json(stored)
        assert type(restored) is kind
        assert restored == attack
        assert restored.to_json() == stored
        assert pickle.loads(pickle.dumps(attack)) == attack
    changed, defaults = all_changed(kind), kind()
    assert all(getattr(changed, n) != getattr(defaults, n) for n in kind.model_fields)


@pytest.mark.parametrize("name", every_attack())
def test_every_attack_survives_a_request_and_a_configuration(name: str) -> None:
    attack = all_changed(EVERY[name])
    for request in (AuditRequest(attacks=[attack]), through_toml([attack])):
        selected = select_attacks(request, Knowledge())
        assert selected == {name: attack}
        assert type(selected[name]) is type(attack)
    assert select_attacks(through_toml([name]), Knowledge()).keys() == {name}


def test_values_that_json_does_not_have_survive_a_configuration() -> None:
    """An infinite time and an open rate are null in JSON, and TOML has no null."""
    endless = BinaryKKT(seconds=math.inf, lr_lam=None, priors=None, steps=7)
    assert endless.to_json()["seconds"] is None
    assert BinaryKKT.from_json(endless.to_json()) == endless
    selected = select_attacks(through_toml([endless]), Knowledge())
    assert selected == {"binary-kkt": endless}


def test_a_request_takes_attacks_names_and_entries_together() -> None:
    entries = [KKT(steps=7), "unmix", {"attack": "ntk", "gradients": "both"}]
    for request in (AuditRequest(attacks=entries, seed=3), through_toml(entries)):
        selected = select_attacks(request, Knowledge())
        assert selected.keys() == {"binary-kkt", "multiclass-kkt", "unmix", "ntk"}
        assert selected["binary-kkt"].steps == selected["multiclass-kkt"].steps == 7
        assert selected["ntk"].gradients == "both"
        assert {attack.seed for attack in selected.values()} == {request.seed}
    assert AuditRequest(attacks="unmix").attacks == ("unmix",)
    assert AuditRequest(attacks=Unmix(rank=0.5)).attacks == ({"attack": "unmix", "rank": 0.5},)


def test_settings_of_an_attack_win_over_those_of_the_request_and_these_over_the_preset() -> None:
    request = AuditRequest(
        attacks=[BinaryKKT(steps=7, seed=5), "ntk"], preset="shen2026", steps=9, seed=3
    )
    selected = select_attacks(request, Knowledge())
    assert (selected["binary-kkt"].steps, selected["binary-kkt"].seed) == (7, 5)
    assert (selected["ntk"].steps, selected["ntk"].seed) == (9, 3)
    assert {attack.split_every for attack in selected.values()} == {30_000}


@pytest.mark.parametrize(
    ("attacks", "message"),
    [
        (["unmixed"], "No attack 'unmixed'.*Did you mean 'unmix'"),
        ([{"attack": "unmixed"}], "No attack 'unmixed'"),
        ([{"steps": 3}], "No attack ''"),
        ([{"attack": "kkt", "stepz": 3}], "no setting 'stepz'.*Did you mean 'steps'"),
        ([{"attack": "unmix", "steps": 3}], "no setting 'steps'"),
        ([{"attack": "kkt", "steps": 0}], "steps must be positive; got 0"),
    ],
)
def test_unknown_attacks_and_settings_are_refused_with_exit_code_2(
    attacks: list[Any], message: str
) -> None:
    model = rs.Network({"layers.0.weight": torch.ones(3, 4)}, "mlp:4-3,bias=none")
    with pytest.raises(InputError, match=message) as refused:
        rs.audit(model, attacks=attacks, budget="1s")
    assert refused.value.exit_code == 2


def test_an_audit_runs_attacks_with_their_settings_and_its_configuration_repeats_it(
    tmp_path: Path,
) -> None:
    split = rs.load_dataset("digits", 20, holdout=200)
    state = rs.train("mlp:64-30-1", split.train, rs.TrainingConfig(steps=200))
    model = rs.save_checkpoint(
        rs.Network(state.theta, "mlp:64-30-1", split.train.shape), tmp_path / "m.safetensors"
    )
    result = rs.audit(
        model,
        data=split.train,
        holdout=split.holdout,
        attacks=[KKT(steps=7, sigma=0.3), "unmix"],
        effort="quick",
        subsets=200,
        baselines=False,
        out=tmp_path / "run",
    )
    settings = {
        reconstruction.attack: reconstruction.settings for reconstruction in result.reconstructions
    }
    assert settings.keys() == {"binary-kkt", "unmix"}
    assert (settings["binary-kkt"]["steps"], settings["binary-kkt"]["sigma"]) == (7, 0.3)
    assert isinstance(rebuild_attack(result.reconstructions[0]), BinaryKKT | Unmix)
    entry = {"attack": "kkt", "steps": 7, "sigma": 0.3}
    assert result.settings["attacks"] == [entry, "unmix"]
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["attacks"] == [entry, "unmix"]


def test_like_and_changed_keep_what_was_set_and_no_defaults() -> None:
    attack = Auto(steps=7, priors=(("value-box", 2.0),))
    assert attack.changed(seed=3).model_fields_set == {"steps", "priors", "seed"}
    assert BinaryKKT.like(attack, rivals="best") == BinaryKKT(
        steps=7, priors=(("value-box", 2.0),), rivals="best"
    )
    assert Unmix.like(attack) == Unmix()
    assert Unmix.like(Auto(seed=3, steps=7)).model_fields_set == {"seed"}
    with pytest.raises(InputError, match="no setting 'stepz'"):
        attack.changed(stepz=3)
    with pytest.raises(InputError, match="no setting 'rivals'"):
        Auto.like(attack, rivals="best")


@dataclass(frozen=True)
class Halved(Objective):
    """Half of every multiplier, as an objective of another package."""

    name: ClassVar[str] = "halved"

    def covectors(self, point: str, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        return (0.5 * lam * labels.to(lam.dtype))[..., None]


def test_an_attack_by_an_objective_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class is made while the program runs, and workers of a sweep receive it in a pickle."""
    attack = Stationarity.with_objective(Halved)(steps=7, restarts=2)
    restored = pickle.loads(pickle.dumps(attack))
    assert restored.to_json() == attack.to_json()
    assert restored.model_fields_set == {"steps", "restarts"}
    assert (restored.name, restored.surface, restored.objective) == ("halved", "weights", Halved)
    assert restored.is_plugin
    changed = BinaryKKT.with_objective(objectives.BinaryKKT)(rivals="best")
    assert pickle.loads(pickle.dumps(changed)).rivals == "best"
    monkeypatch.setitem(OBJECTIVES, "halved", Halved)
    model = rs.Network(
        {"layers.0.weight": torch.randn(9, 4), "layers.1.weight": torch.randn(1, 9)},
        "mlp:4-9-1,bias=none",
    )
    small = attack.changed(candidates=4)
    expected = small.run(model)
    assert expected.attack == expected.settings["attack"] == "halved"
    assert torch.equal(pickle.loads(pickle.dumps(small)).run(model).x, expected.x)
    assert (
        rebuild_attack(expected).to_json() == small.resolve_settings(model, Knowledge()).to_json()
    )


def test_an_attack_with_another_strategy_can_be_pickled() -> None:
    from papers.shen2026_controls import RandomPlaces

    kinds = (BinaryKKT, Stationarity.with_objective(Halved))
    for kind in kinds:
        attack = kind.with_strategy(RandomPlaces())(steps=7)
        restored = pickle.loads(pickle.dumps(attack))
        assert isinstance(restored.strategy, RandomPlaces)
        assert (restored.name, restored.objective, restored.steps) == (kind.name, kind.objective, 7)
