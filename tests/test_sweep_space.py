"""What a sweep varies: ranges, draws, plans that are refused, ranks of made-up trials."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from residuum.attacks import PRESETS, AttackConfig
from residuum.attacks.config import LEFT_OPEN
from residuum.errors import InputError
from residuum.sweeping import SPACE, Setting
from residuum.sweeping.scoring import front, ranked
from residuum.sweeping.space import COMPLETE, FAILED, Trial, draw, numeric
from tests.sweeps import plan, share

RELEASED = {
    "lr_x": (1e-5, 1.0),
    "sigma": (1e-6, 0.1),
    "lam_min": (0.01, 0.5),
    "sharpness": (10, 500),
}


def test_the_space_is_wider_than_the_published_box_and_made_of_the_attacks_settings() -> None:
    for name, (low, high) in RELEASED.items():
        assert SPACE[name].low <= low
        assert SPACE[name].high >= high
        assert (SPACE[name].low, SPACE[name].high) != (low, high)
    assert set(SPACE) <= set(numeric())
    for preset in PRESETS.values():
        for name, setting in SPACE.items():
            said = getattr(preset, name)
            value = LEFT_OPEN[name] if said is None else said
            assert setting.low <= value <= setting.high, (preset, name)


@pytest.mark.parametrize("setting", [Setting(1e-5, 3, log=True), Setting(-1, 2)])
def test_a_setting_spans_its_range_evenly(setting: Setting) -> None:
    assert setting.at(0) == pytest.approx(setting.low)
    assert setting.at(1) == pytest.approx(setting.high)
    for part in (0.1, 0.5, 0.77):
        assert share(setting, setting.at(part)) == pytest.approx(part)
    middle = (
        math.sqrt(setting.low * setting.high) if setting.log else (setting.low + setting.high) / 2
    )
    assert setting.at(0.5) == pytest.approx(middle)


def test_whole_numbers_are_drawn_evenly() -> None:
    drawn = [Setting(2, 5, whole=True).at((i + 0.5) / 400) for i in range(400)]
    assert {value: drawn.count(value) for value in drawn} == {2: 100, 3: 100, 4: 100, 5: 100}
    assert all(isinstance(value, int) for value in drawn)


@pytest.mark.parametrize("sampler", ["random", "sobol"])
def test_a_draw_depends_on_the_seed_and_the_number_alone(sampler: str) -> None:
    whole = draw(sampler, SPACE, range(16), 5, ())
    assert draw(sampler, SPACE, range(6, 9), 5, ()) == whole[6:9]
    assert draw(sampler, SPACE, range(16), 6, ()) != whole
    values = [(SPACE[name], value) for row in whole for name, value in row.items()]
    assert all(setting.low <= value <= setting.high for setting, value in values)


def test_sobol_points_fill_every_slice() -> None:
    drawn = draw("sobol", SPACE, range(32), 0, ())
    for name, setting in SPACE.items():
        slices = {int(32 * share(setting, row[name])) for row in drawn}
        assert len(slices) == 32, name
    chance = draw("random", SPACE, range(32), 0, ())
    assert len({int(32 * share(SPACE["lr_x"], row["lr_x"])) for row in chance}) < 32


def test_tpe_learns_where_the_residual_is_low() -> None:
    space = {"lr_x": Setting(1e-5, 1.0, log=True)}
    told = [
        Trial(n, row, COMPLETE, (abs(math.log10(row["lr_x"]) + 2),))
        for n, row in enumerate(draw("random", space, range(40), 1, ()))
    ]
    learnt = draw("tpe", space, range(40, 56), 1, told)
    blind = draw("random", space, range(56), 1, ())[40:]
    distance = [sum(abs(math.log10(row["lr_x"]) + 2) for row in part) for part in (learnt, blind)]
    assert distance[0] < 0.6 * distance[1]
    assert draw("tpe", space, range(40, 56), 1, told[::-1]) == learnt


def test_fronts_and_ranks_of_made_up_trials() -> None:
    rows = [(0.3, 0.9), (0.1, 0.2), (0.2, 0.1), (0.2, 0.5), (0.1, 0.2)]
    made = [Trial(n, {}, COMPLETE, values) for n, values in enumerate(rows)]
    made.append(Trial(9, {}, FAILED))
    assert [t.number for t in ranked(made)] == [1, 4, 2, 3, 0]
    assert [t.number for t in front(made)] == [1, 3, 0]
    single = [dataclasses.replace(t, values=t.values[:1]) for t in made]
    assert [t.number for t in front(single)] == [1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": {"lr_y": Setting(0, 1)}}, "cannot vary 'lr_y'"),
        ({"space": {"lr_x": Setting(1, 0.1)}}, "from low to high"),
        ({"space": {"lr_x": Setting(-1, 1)}}, "lr_x must be positive"),
        ({"space": {}}, "must vary a setting"),
        ({"sampler": "grid"}, "No sampler 'grid'"),
        ({"batch": 2, "rungs": 1}, "Successive halving"),
        ({"batch": 2, "space": {"lr_decay": Setting(0, 1)}}, "lr_decay is varied too"),
        ({"objectives": ("recovered",)}, "ranks by residual"),
        ({"objectives": ("residual", "agreement"), "config": AttackConfig(restarts=1)}, "restarts"),
        ({"config": PRESETS["model-inversion"]}, "takes no steps"),
    ],
)
def test_plans_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(**changes)
