"""A setting is declared once: checks, options, files and tables all come from its model."""

from __future__ import annotations

import importlib.util
import math
from typing import Any, Literal

import pytest
from cyclopts import App, CoercionError, Group
from pydantic import Field

from residuum.attacks import PRESETS, PRIORS, ForestAttack, attack_class, every_attack
from residuum.attacks.registry import AUTOMATIC_ATTACKS
from residuum.attacks.unmixing.ica import DOMAINS
from residuum.auditing.config import FACTS
from residuum.auditing.request import AuditRequest
from residuum.cli.attack import SUMMARIES
from residuum.cli.options import (
    KnowledgeOptions,
    format_default,
    make_from_options,
    option_name,
    options_from,
    with_options,
)
from residuum.errors import InputError
from residuum.networks import SURROGATES
from residuum.records.knowledge import PROVENANCES
from residuum.settings import (
    EXPERT,
    LOSSES,
    MODELS,
    PRIOR_NAMES,
    DefenseRequest,
    ExposureRequest,
    NTKSettings,
    Settings,
    StationaritySettings,
    SweepSettings,
    TrainingConfig,
    UnmixSettings,
    choices_of,
)
from residuum.training import methods
from tests.documents import ROOT
from tests.program import arguments_of, options_of

EVERY_MODEL = [*dict.fromkeys(MODELS.values()), TrainingConfig, ExposureRequest]
EVERY_MODEL += [DefenseRequest, SweepSettings]


class Toy(Settings):
    """A toy."""

    steps: int = Field(default=5, gt=0, description="How often.")
    seconds: float = Field(default=math.inf, gt=0, allow_inf_nan=True, description="How long.")
    ends: tuple[float, float] = Field(default=(0.0, 1.0), description="From and to.")
    kind: Literal["a", "b"] = Field(
        default="a", description="Which, see steps_after.", json_schema_extra=EXPERT
    )
    steps_after: float = Field(default=0.5, ge=0, lt=1, description="How much.")


def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_setting_declared_once_is_checked_offered_saved_and_documented() -> None:
    with pytest.raises(InputError, match="steps_after must be at least 0 and below 1; got 1"):
        Toy(steps_after=1.0)
    with pytest.raises(InputError, match="Known: a, b"):
        Toy(kind="c")  # type: ignore[arg-type]

    passed: list[dict[str, Any] | None] = []

    @with_options(settings=options_from(Toy, group=Group("Few")))
    def command(*, settings: dict[str, Any] | None = None) -> None:
        passed.append(settings)

    toy = App(result_action="return_value", exit_on_error=False, print_error=False)
    toy.default(command)
    arguments = toy.assemble_argument_collection()
    groups = {a.name: [group.name for group in a.parameter.group] for a in arguments[1:]}
    assert groups.pop("--kind") == ["Expert"]
    assert {*map(tuple, groups.values())} == {("Few",)}
    assert arguments["--kind"].parameter.help == "Which, see --steps-after."
    assert arguments["--ends"].show_default == "0 1"
    assert not arguments["--seconds"].show_default
    with pytest.raises(CoercionError):
        toy(["--kind", "c"])
    toy(["--kind", "b", "--ends", "1", "2"])
    toy([])
    assert passed == [{"kind": "b", "ends": (1.0, 2.0)}, None]
    with pytest.raises(InputError, match="--steps-after must be at least 0 and below 1; got 2"):
        make_from_options(Toy, {"steps_after": 2})

    assert Toy(steps_after=0.25).to_json() == {
        **{"steps": 5, "seconds": None, "ends": [0.0, 1.0]},
        **{"kind": "a", "steps_after": 0.25},
    }
    tables = hooks().settings_tables(Toy)
    assert "| `steps` | `5` | `--steps` positive | How often. |" in tables
    assert (
        "| `steps_after` | `0.5` | `--steps-after` at least 0 and below 1 | How much. |" in tables
    )


def test_a_default_is_shown_as_it_is_typed() -> None:
    assert [format_default(v) for v in (3, 0.1, 1e-6, True, (0.0, 1.0), "auto")] == [
        *("3", "0.1", "1e-06", "on", "0 1", "auto"),
    ]
    assert {format_default(v) for v in (None, False, "", math.inf, ())} == {None}


@pytest.mark.parametrize("model", EVERY_MODEL)
def test_every_setting_is_explained_and_survives_a_file(model: type[Settings]) -> None:
    for name, field in model.model_fields.items():
        assert (field.description or "").endswith("."), name
    settings = model()
    assert model.from_json(settings.to_json()) == settings


def test_the_tables_have_every_setting() -> None:
    module = hooks()
    page = module.settings_tables(*module.MODELS_OF["attack"])
    for model in MODELS.values():
        assert page.count(f"## {model.__name__}\n") == 1
        for name in model.model_fields:
            assert f"| `{name}` |" in page
    training = module.settings_tables(*module.MODELS_OF["training"])
    assert all(f"| `{name}` |" in training for name in TrainingConfig.model_fields)


def test_the_models_are_those_of_the_attacks() -> None:
    """Help texts read MODELS, because importing the attacks takes seconds."""
    names = {*every_attack(), *AUTOMATIC_ATTACKS, "forest"}
    assert {*MODELS} == names, "correct MODELS in settings/attack_settings.py"
    assert {*SUMMARIES} == names, "correct SUMMARIES in cli/attack.py"
    for name, model in MODELS.items():
        fields = {n: (f.default, f.description) for n, f in model.model_fields.items()}
        attack = (ForestAttack if name == "forest" else attack_class(name)).model_fields
        assert {n: (f.default, f.description) for n, f in attack.items()} == fields, name


def test_commands_offer_every_setting_of_their_model() -> None:
    for command, model, without in (
        ("audit", AuditRequest, set()),
        ("exposure", ExposureRequest, {"grouped_by"}),
        ("defend", DefenseRequest, set()),
        ("sweep", SweepSettings, set()),
        ("sweep", StationaritySettings, set()),
        ("sweep", UnmixSettings, set()),
        ("train", TrainingConfig, set()),
    ):
        settings = {option_name(name) for name in model.model_fields.keys() - without}
        assert settings <= options_of(command), command
        assert not {option_name(name) for name in without} & options_of(command)
    assert {*FACTS} == {*KnowledgeOptions.__dataclass_fields__}
    assert {"--no-positive-controls", "--no-baselines"} <= options_of("audit")


def test_settings_saved_by_an_older_release_are_read() -> None:
    old = {"steps": 10, "lam_init": [0.0, 1.0], "split_every": 40, "seconds": None}
    attack = StationaritySettings.from_json(old)
    assert (attack.lam_init, attack.split_every, attack.seconds) == ((0.0, 1.0), 40, math.inf)


def test_lists_that_must_not_need_torch_name_what_there_is() -> None:
    def words(model: type[Settings], name: str) -> set[str]:
        return {*choices_of(model.model_fields[name])}

    assert {*PRIOR_NAMES} == {*PRIORS}
    assert {*LOSSES} == {*methods.LOSSES}
    assert words(UnmixSettings, "domain") == {"auto", *DOMAINS}
    assert words(NTKSettings, "surrogate") == {"none", *SURROGATES}
    arguments = arguments_of("attack")
    assert arguments["--mean-provenance"].get_choices() == PROVENANCES
    assert arguments["--loss"].get_choices() == LOSSES
    assert {preset.attack for preset in PRESETS.values()} <= {*MODELS}
