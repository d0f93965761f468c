"""Settings are said in one place: checks, options, ``--set``, files and tables all come from there."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from residuum.attacks import GROWTH_PRESETS, PRESETS, PRIORS, every_attack
from residuum.attacks.unmixing.ica import DOMAINS
from residuum.cli import options
from residuum.errors import InputError
from residuum.networks import SURROGATES
from residuum.records.knowledge import PROVENANCES
from residuum.settings import (
    ATTACKS,
    LOSSES,
    PLACES,
    PRIOR_NAMES,
    AttackConfig,
    Growth,
    Settings,
    TrainingConfig,
    setting,
    settings_of,
)
from residuum.training import methods
from tests.documents import ROOT

CONFIGS = (AttackConfig, TrainingConfig)


@dataclass(frozen=True)
class Inner(Settings):
    """Two that belong together."""

    kind: str = setting("a", "Which.", name="inner", place="expert", choices=("a", "b"))
    share: float = setting(0.5, "How much.", name="inner_share", least=0, below=1)


@dataclass(frozen=True)
class Outer(Settings):
    """A toy."""

    steps: int = setting(5, "How often.", place="basic", above=0)
    seconds: float = setting(math.inf, "How long.", above=0, endless=True)
    ends: tuple[float, float] = setting((0.0, 1.0), "From and to.")
    inner: Inner = Inner()


def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_setting_said_once_is_checked_offered_saved_and_documented() -> None:
    with pytest.raises(InputError, match="inner_share must be at least 0 and below 1; got 1"):
        Inner(share=1.0)
    with pytest.raises(InputError, match="Known: a, b"):
        Outer.of(inner="c")

    seen: dict[str, Any] = {}

    def command(*, settings: Annotated[dict[str, Any], options.Generated(Outer)]) -> None:
        """Do it."""
        seen.update(settings)

    app = typer.Typer(rich_markup_mode=None)
    app.command(cls=options.Grouped)(options.flat(command))
    shown = CliRunner().invoke(app, ["--help"]).output
    basic, expert = (shown.index(f"{PLACES[place]}:") for place in ("basic", "expert"))
    assert basic < shown.index("--steps") < expert < shown.index("--inner <a|b>")
    assert CliRunner().invoke(app, ["--inner", "c"]).exit_code == 2
    assert CliRunner().invoke(app, ["--inner", "b"]).exit_code == 0
    assert seen == {"steps": None, "inner": "b"}

    assert Outer.of(inner_share=0.25).to_json() == {
        **{"steps": 5, "seconds": None, "ends": [0.0, 1.0]},
        **{"inner": "a", "inner_share": 0.25},
    }
    tables = hooks().settings_tables(Outer)
    assert "| `steps` | `5` | `--steps` positive | How often. |" in tables
    assert "| `inner_share` | `0.5` | at least 0 and below 1 | How much. |" in tables


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_is_explained_and_survives_a_file(config: type[Settings]) -> None:
    page = hooks().settings_tables(config)
    for name, one in settings_of(config).items():
        assert one.rule.help.endswith("."), name
        assert one.rule.place in ("", *PLACES), name
        assert f"| `{name}` |" in page
        one.check(one.default)
    made = config()
    assert config.from_json(made.to_json()) == made


def test_flat_names_reach_into_groups() -> None:
    config = AttackConfig.of(steps=7, split="curvature", split_every=9, surrogate="softplus")
    assert (config.steps, config.growth) == (7, Growth(how="curvature", every=9))
    assert config.changed(lam_min=0.2).multipliers.least == 0.2
    assert AttackConfig.from_json(config.to_json()) == config
    assert config.value("split_every") == 9
    with pytest.raises(InputError, match="Did you mean 'split_every'"):
        AttackConfig.of(split_evry=3)
    with pytest.raises(InputError, match=r"AttackConfig.of\(surrogate='softplus'\)"):
        AttackConfig(surrogate="softplus")  # type: ignore[arg-type]


def test_settings_saved_by_an_older_release_are_read() -> None:
    old = {
        "steps": 10,
        "lam_init": [0.0, 1.0],
        "split_every": 40,
        "seconds": None,
        "dtype": "float32",
    }
    config = AttackConfig.from_json(old)
    assert (config.multipliers.init, config.growth.every, config.seconds) == (
        (0.0, 1.0),
        40,
        math.inf,
    )
    assert config.numerics.dtype == "float32"


def test_lists_that_must_not_need_torch_name_what_there_is() -> None:
    def words(config: type[Settings], name: str) -> set[str]:
        return {*settings_of(config)[name].rule.choices}

    assert {*ATTACKS} == {*every_attack()}
    assert {*PRIOR_NAMES} == {*PRIORS}
    assert {*LOSSES} == {*methods.LOSSES}
    assert words(AttackConfig, "domain") == {"auto", *DOMAINS}
    assert words(AttackConfig, "surrogate") == {"none", *SURROGATES}
    assert options.PROVENANCES == PROVENANCES
    assert options.PRESET.choices == (*PRESETS,)
    assert {*GROWTH_PRESETS} == {"none", "paper", "auto"}
