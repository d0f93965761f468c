"""What a sweep varies: ranges, draws, plans that are refused, ranks of made-up trials."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest

from residuum.attacks import PRESETS, Auto, ModelInversion, make_attack
from residuum.errors import InputError
from residuum.settings import FALLBACKS
from residuum.sweeping import SAMPLERS, SPACE, Range
from residuum.sweeping.scoring import rank_trials
from residuum.sweeping.space import COMPLETE, FAILED, PRUNED, Params, Trial, list_numeric_settings
from residuum.sweeping.study import Study
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
    assert set(SPACE) <= set(list_numeric_settings(Auto))
    for preset in PRESETS:
        attack = make_attack(preset=preset)
        for name, setting in SPACE.items():
            chosen = getattr(attack, name)
            value = FALLBACKS[name] if chosen is None else chosen
            assert setting.low <= value <= setting.high, (preset, name)


def draw_rows(count: int, **changes: Any) -> list[Params]:
    return list(Study(plan(count, **changes)).ask(range(count)).values())


def shares(name: str, rows: list[Params], space: Mapping[str, Range] = SPACE) -> list[float]:
    return [share(space[name], row[name]) for row in rows]


def test_ranges_are_tried_evenly_in_their_own_measure() -> None:
    space = {
        "lr_x": Range(1e-5, 3, log=True),
        "lr_decay": Range(0, 0.5),
        "split_every": Range(2, 5, integer=True),
    }
    rows = draw_rows(400, space=space)
    for name in ("lr_x", "lr_decay"):
        fifths = [int(5 * share) for share in shares(name, rows, space)]
        assert {fifth: 50 < fifths.count(fifth) < 110 for fifth in fifths} == dict.fromkeys(
            range(5), True
        )
    split_values = [row["split_every"] for row in rows]
    assert {value: 70 < split_values.count(value) < 130 for value in split_values} == dict.fromkeys(
        range(2, 6), True
    )
    assert all(isinstance(value, int) for value in split_values)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_draw_depends_on_the_seed_and_the_number_alone(sampler: str) -> None:
    all_rows = draw_rows(16, sampler=sampler, seed=5)
    assert draw_rows(6, sampler=sampler, seed=5) == all_rows[:6]
    for other in (6, 2**31 - 1):
        assert draw_rows(16, sampler=sampler, seed=other) != all_rows
    assert all(0 <= share <= 1 for name in SPACE for share in shares(name, all_rows))


def test_sobol_points_fill_every_slice() -> None:
    for name in SPACE:
        slices = {int(32 * share) for share in shares(name, draw_rows(32, sampler="sobol"))}
        assert len(slices) == 32, name
    assert len({int(32 * share) for share in shares("lr_x", draw_rows(32))}) < 32


def test_tpe_learns_where_the_residual_is_low() -> None:
    space = {"lr_x": Range(1e-5, 1.0, log=True)}
    sweep_plan = plan(56, sampler="tpe", wave=40, space=space)

    def off(row: Params) -> float:
        return abs(math.log10(row["lr_x"]) + 2)

    def second_wave(backwards: bool) -> list[Params]:
        study = Study(sweep_plan)
        first = list(study.ask(sweep_plan.waves[0]).items())
        for number, row in reversed(first) if backwards else first:
            study.tell(Trial(number, row, COMPLETE, (off(row),)))
        return list(study.ask(sweep_plan.waves[1]).values())

    learnt, blind = second_wave(False), draw_rows(16, space=space)
    assert sum(map(off, learnt)) < 0.6 * sum(map(off, blind))
    assert second_wave(True) == learnt, "whoever ends first"


def test_fronts_and_ranks_of_made_up_trials() -> None:
    rows = [(0.3, 0.9), (0.1, 0.2), (0.2, 0.1), (0.2, 0.5), (0.1, 0.2)]
    trials = [Trial(n, {}, COMPLETE, values) for n, values in enumerate(rows)]
    trials += [Trial(5, {}, FAILED), Trial(6, {}, PRUNED)]
    assert [t.number for t in rank_trials(trials)] == [1, 4, 2, 3, 0]
    for count, expected in ((2, [1, 4, 3, 0]), (1, [1, 4])):
        study = Study(plan(7, objectives=("residual", "agreement")[:count]))
        for trial, params in zip(trials, study.ask(range(7)).values(), strict=True):
            study.tell(dataclasses.replace(trial, params=params, values=trial.values[:count]))
        assert study.front == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": {"lr_y": Range(0, 1)}}, "cannot vary 'lr_y'"),
        ({"space": {"lr_x": Range(1, 0.1)}}, "from a smaller to a larger number"),
        ({"space": {"lr_x": Range(-1, 1)}}, "lr_x must be positive"),
        ({"space": {}}, "must vary at least one setting"),
        ({"sampler": "grid"}, "There is no sampler 'grid'"),
        ({"batch": 2, "rungs": 1}, "Successive halving"),
        ({"batch": 2, "space": {"lr_decay": Range(0, 1)}}, "the sweep also varies lr_decay"),
        ({"objectives": ("recovered",)}, "--rank-by must be 'residual'"),
        ({"objectives": ("residual", "agreement"), "attack": Auto(restarts=1)}, "restarts"),
        (
            {"attack": ModelInversion()},
            "such as 'kkt'; got 'model-inversion'",
        ),
    ],
)
def test_plans_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(**changes)
