"""The plan of an audit against naive arithmetic, its independence of the clock, and the deadline."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np
import pytest
import torch

from residuum.attacks import Attack, make_attack
from residuum.attacks.base import OneShotAttack
from residuum.attacks.cost import estimate_reference_seconds
from residuum.attacks.inversion.gradient_matching import GradientMatching
from residuum.attacks.work import REFERENCE, count_work
from residuum.auditing.case import load_case
from residuum.auditing.controls import ControlRow, SampleSets, run_controls
from residuum.auditing.plan import (
    ATTACK_SHARE,
    BASELINE_SHARE,
    EFFORTS,
    MAX_CANDIDATES,
    MAX_RESTARTS,
    MIN_DEADLINE,
    OVERRUN,
    AttackPlan,
    Batch,
    Deadline,
    PlanError,
    budget_for_all,
    forecast,
    limit_of,
    plan_attack,
    plan_attacks,
)
from residuum.auditing.request import AuditRequest
from residuum.auditing.run import Audit
from residuum.auditing.schedule import NO_TIME, AttackSchedule, find_surfaces
from residuum.auditing.verdict import INCONCLUSIVE, decide
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Reconstruction
from residuum.settings import RestartSettings
from residuum.surfaces.surface import WEIGHTS, Surface, build_surfaces
from tests.verdict_inputs import SOUND, findings, membership, ran

SAMPLES = 20
KNOWN = Knowledge(value_range=(0.0, 1.0), sample_count=SAMPLES)


def network(arch: str = "mlp:64-30-1") -> Network:
    torch.manual_seed(0)
    return Network(dict(Architecture.parse(arch).build().state_dict()), arch)


def network_of_few_samples() -> Network:
    """A network whose first layer has the rank of eight samples, so that unmix applies too."""
    checkpoint, generator = network("mlp:64-100-1"), torch.Generator().manual_seed(0)
    mixing, inputs = (
        torch.randn(100, 8, generator=generator),
        torch.rand(8, 64, generator=generator),
    )
    theta = {**checkpoint.theta, "layers.0.weight": mixing @ inputs}
    theta["layers.0.bias"] = mixing.sum(1)
    return checkpoint.replace(theta=theta)


def samples(count: int, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 64, generator=generator, dtype=torch.float64)
    return Dataset(x, 2 * (torch.arange(count) % 2) - 1)


def schedule_of(
    checkpoint: Network | None = None, knowledge: Knowledge = KNOWN, **options: Any
) -> AttackSchedule:
    return AttackSchedule(checkpoint or network(), knowledge, AuditRequest(**options))


def plans_of(schedule: AttackSchedule) -> dict[str, AttackPlan]:
    return schedule.plan(schedule.skipped())


class Clock:
    """A clock that advances by ``tick`` whenever it is read."""

    def __init__(self, tick: float = 0.0) -> None:
        self.tick, self.now = tick, 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


# The arithmetic


def naive_restarts(
    seconds_each: float,
    planned: float,
    allowed: float,
    factor: float,
    preset: int,
    candidates: int,
    is_exact: bool = False,
) -> tuple[int, int]:
    """Add restarts one at a time: those that the effort gives, and those of them that the budget allows."""
    expected = preset if is_exact else max(1, math.ceil(factor * preset))
    restarts = 1
    while restarts < expected:
        restarts += 1
        is_too_long = restarts * seconds_each > planned and not is_exact
        if is_too_long or restarts > MAX_RESTARTS or restarts * candidates > MAX_CANDIDATES:
            restarts -= 1
            break
    fit = 0
    while fit < restarts and (fit + 1) * seconds_each <= allowed:
        fit += 1
    return restarts, fit


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize(("preset", "candidates"), [(4, 40), (1, 40), (100, 40), (30, 1500)])
def test_restarts_are_those_of_the_naive_loop(preset: int, candidates: int, is_exact: bool) -> None:
    checkpoint = network()
    surface = build_surfaces(checkpoint, KNOWN)[WEIGHTS]
    attack = make_attack("binary-kkt", restarts=preset, candidates=candidates, steps=10)
    seconds_each = estimate_reference_seconds(attack, surface, KNOWN)
    counts = set()
    for planned, allowed, factor in itertools.product(
        (0.5, 3.5, 9.5, 200.5), (0.5, 1.5, 5.5, 200.5), (0.25, 1.0, 2.0)
    ):
        plan = plan_attack(
            attack,
            surface,
            checkpoint,
            KNOWN,
            planned=planned * seconds_each,
            allowed=allowed * seconds_each,
            restart_factor=factor,
            is_exact=is_exact,
        )
        restarts, fit = naive_restarts(1.0, planned, allowed, factor, preset, candidates, is_exact)
        assert plan.restarts == fit
        assert plan.runs == (fit > 0)
        assert plan.seconds == pytest.approx(max(fit, 1) * seconds_each)
        assert bool(plan.left_out) == (fit < restarts)
        if 0 < fit < restarts:
            assert plan.left_out == f"{fit} of {restarts} restarts ran"
        if not fit:
            assert plan.left_out.startswith("a single restart takes about ")
        counts.add(fit)
    assert len(counts) > 1


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("budget", [None, "2s", "20s", "1min", "3h"])
def test_the_effort_is_shared_as_the_naive_sum_says(effort: str, budget: str | None) -> None:
    schedule = schedule_of(network_of_few_samples(), effort=effort, budget=budget)
    plans, limit = plans_of(schedule), limit_of(schedule.request)
    assert (
        limit == {None: EFFORTS[effort].budget, "2s": 2, "20s": 20, "1min": 60, "3h": 10800}[budget]
    )
    deciding = {n: schedule.attacks[n] for n in plans if not schedule.attacks[n].is_baseline}
    assert {*deciding} == {"binary-kkt", "unmix"}
    total = 0.0
    for attack in deciding.values():
        total += attack.effort_share
    for name, plan in plans.items():
        attack = schedule.attacks[name]
        if attack.is_baseline:
            assert plan.left_out == ""  # a baseline decides nothing
            assert plan.runs == (plan.seconds <= BASELINE_SHARE * limit)
            continue
        share = attack.effort_share / total
        planned = EFFORTS[effort].attack_seconds * share
        allowed = ATTACK_SHARE * limit * share
        assert plan.share == pytest.approx(share)
        if attack.pace == "sized":
            assert plan.seconds == pytest.approx(min(planned, allowed))
            cut = allowed / planned
            text = f"{cut:.0%} of the planned work ran" if cut < 1 else ""
            assert (plan.left_out, plan.runs) == (text, True)
            continue
        attack = attack.resolve_settings(schedule.network, KNOWN)
        assert isinstance(attack, RestartSettings)
        seconds_each = estimate_reference_seconds(attack, schedule.surfaces[name], KNOWN)
        factor = EFFORTS[effort].restarts
        _, fit = naive_restarts(
            seconds_each, planned, allowed, factor, attack.restarts, attack.candidates
        )
        assert (plan.restarts, plan.runs) == (fit, fit > 0)


def test_an_effort_fits_into_its_own_default_budget() -> None:
    for effort in EFFORTS.values():
        assert effort.attack_seconds <= ATTACK_SHARE * effort.budget
        assert ATTACK_SHARE + BASELINE_SHARE < 1
    for name in EFFORTS:
        assert not any(plan.left_out for plan in plans_of(schedule_of(effort=name)).values())


class Formula(OneShotAttack):
    """An attack that takes no time worth planning."""

    name = "formula"
    pace = "formula"

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        raise RuntimeError("not called")


def test_a_formula_takes_no_share() -> None:
    checkpoint = network()
    attacks: dict[str, Attack] = {"kkt": make_attack("binary-kkt", steps=10)}
    shares = []
    for selected in (attacks, {**attacks, "formula": Formula()}):
        surfaces_by_name = find_surfaces(selected, checkpoint, KNOWN)
        plans = plan_attacks(selected, surfaces_by_name, checkpoint, KNOWN, AuditRequest(), {})
        shares.append(plans["kkt"].share)
    assert shares == [1.0, 1.0]
    assert (plans["formula"].runs, plans["formula"].left_out) == (True, "")


def test_restarts_that_a_user_asks_for_are_planned_exactly() -> None:
    attacks = [{"attack": "kkt", "steps": 10, "restarts": 7}]
    assert plans_of(schedule_of(attacks=attacks))["binary-kkt"].restarts == 7
    assert plans_of(schedule_of(attacks=attacks, effort="quick"))["binary-kkt"].restarts == 7
    del attacks[0]["restarts"]
    quick = plans_of(schedule_of(attacks=attacks, effort="quick"))["binary-kkt"].restarts
    assert quick == math.ceil(0.25 * make_attack("binary-kkt").restarts)


def test_an_attack_that_fails_while_it_is_planned_is_named() -> None:
    class Broken(RestartSettings, Formula):
        name = "broken"
        pace = "once"

    attacks: dict[str, Attack] = {"broken": Broken()}
    surface = find_surfaces(attacks, network(), KNOWN)
    with pytest.raises(PlanError) as problem:
        plan_attacks(attacks, surface, network(), KNOWN, AuditRequest(), {})
    assert problem.value.name == "broken"


@pytest.mark.parametrize(("restarts", "together"), [(8, 8), (8, 3), (1, 1), (7, 2)])
def test_batches_hold_all_restarts_with_different_seeds(restarts: int, together: int) -> None:
    attack = make_attack("binary-kkt", steps=30, seed=5)
    batches = AttackPlan(restarts, batch_restarts=together).batches(attack)
    assert sum(batch.restarts for batch in batches) == restarts
    assert max(batch.restarts for batch in batches) == together
    assert [batch.seed for batch in batches] == [*range(5, 5 + len(batches))]
    batch_attack = batches[-1].apply_to(attack)
    assert (batch_attack.restarts, batch_attack.steps, batch_attack.seed) == (
        batches[-1].restarts,
        30,
        4 + len(batches),
    )


def test_restarts_that_search_many_numbers_run_in_several_batches() -> None:
    knowledge = KNOWN.replace(sample_count=100_000)
    attacks = [{"attack": "kkt", "steps": 1, "restarts": 5, "candidates": 4000}]
    plan = plans_of(schedule_of(network("mlp:1024-4-1"), knowledge, attacks=attacks))["binary-kkt"]
    assert plan.restarts == 5
    assert plan.batch_restarts == 20_000_000 // (4000 * 1024)


# The clock has no part in the plan


def test_the_plan_is_the_same_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plans_of(schedule_of(budget="20s"))
    rng = np.random.default_rng(0)
    for pace in (1e-9, 1e3, 1e9):  # a very fast machine, a slow one, and one that is busy elsewhere
        now = 0.0

        def clock(pace: float = pace) -> float:
            nonlocal now
            now += pace * rng.exponential()
            return now

        for name in ("monotonic", "perf_counter", "process_time", "time", "thread_time"):
            monkeypatch.setattr(time, name, clock)
        plans = plans_of(schedule_of(budget="20s"))
        monkeypatch.undo()
        assert {n: p.to_json() for n, p in plans.items()} == {
            n: p.to_json() for n, p in expected.items()
        }


def test_a_plan_depends_on_effort_network_and_knowledge() -> None:
    plans = [
        plans_of(schedule)["binary-kkt"]
        for schedule in (
            schedule_of(),
            schedule_of(effort="thorough"),
            schedule_of(network("mlp:64-300-1")),
            schedule_of(knowledge=KNOWN.replace(sample_count=200)),
        )
    ]
    figures = {(plan.restarts, round(plan.seconds, 6)) for plan in plans}
    assert len(figures) == len(plans)
    assert plans_of(schedule_of(seed=7))["binary-kkt"].restarts == plans[0].restarts


def test_work_is_counted_and_not_measured() -> None:
    a, b = torch.ones(30, 40), torch.ones(40, 50)
    work = count_work(lambda: (a @ b).relu())
    assert (work.calls, work.flops, work.numbers) == (2, 2 * 30 * 40 * 50, 30 * 50)
    cpu, cuda = REFERENCE["cpu"], REFERENCE["cuda"]
    assert work.seconds(cpu) == pytest.approx(2 / 5e4 + 120_000 / 2e10 + 1500 / 3e8)
    assert work.seconds(cuda) < work.seconds(cpu)


def test_reference_seconds_are_proportional_to_the_steps() -> None:
    surface = build_surfaces(network(), KNOWN)[WEIGHTS]
    seconds = [
        estimate_reference_seconds(
            make_attack("binary-kkt", steps=steps, restarts=r), surface, KNOWN
        )
        for steps, r in ((100, 1), (300, 1), (100, 8))
    ]
    assert seconds[1] == pytest.approx(3 * seconds[0])
    assert seconds[2] == seconds[0]  # of one restart


# What the budget leaves out


def test_a_budget_leaves_out_whole_restarts_and_names_them() -> None:
    full = plans_of(schedule_of())["binary-kkt"]
    schedule = schedule_of(budget=full.seconds)  # 0.4 of it are for the attacks
    plan = plans_of(schedule)["binary-kkt"]
    assert 0 < plan.restarts < full.restarts
    assert plan.seconds / plan.restarts == pytest.approx(full.seconds / full.restarts)
    assert plan.left_out == f"{plan.restarts} of {full.restarts} restarts ran"
    text = forecast(plans_of(schedule), schedule.request)
    assert f"binary-kkt: {plan.left_out}" in text
    assert "can show a leak and cannot rule one out" in text


def test_what_does_not_fit_at_all_is_not_run_and_keeps_the_verdict_open() -> None:
    schedule = schedule_of(attacks=["kkt"], budget="1s")
    results = schedule.run()
    (row,) = [row for row in results.outcomes if row.name == "binary-kkt"]
    assert (row.ran, row.status) == (False, "not run")
    assert row.unfinished.startswith("a single restart takes about ")
    assert row.reason == f"left out: {row.unfinished}"
    assert results.reconstructions == ()
    verdict = decide(findings(), (ran(), row), SOUND, membership())
    assert verdict.outcome == INCONCLUSIVE
    assert verdict.reasons[0].startswith(
        "the budget was too small for all work of binary-kkt: a single restart"
    )


def test_a_forecast_names_effort_budget_and_restarts() -> None:
    schedule = schedule_of()
    plans = plans_of(schedule)
    assert forecast(plans, schedule.request) == (
        "Effort standard, at most 10m of reference time. Attacks: binary-kkt, "
        f"{plans['binary-kkt'].restarts} restarts."
    )


@pytest.mark.parametrize("baselines", [False, True])
@pytest.mark.parametrize("arch", ["mlp:64-30-1", "mlp:784-300-10", "mlp:784-1000-1000-1"])
def test_at_the_advised_budget_nothing_is_left_out(arch: str, baselines: bool) -> None:
    checkpoint = network(arch)
    theta0 = {name: t - 0.1 * torch.randn_like(t) for name, t in checkpoint.theta.items()}
    knowledge = Knowledge(sample_count=50, theta0=theta0)
    for effort in ("quick",) if arch == "mlp:784-1000-1000-1" else ("quick", "standard"):
        options: dict[str, Any] = {"effort": effort, "baselines": baselines}
        schedule = schedule_of(checkpoint, knowledge, budget="2s", **options)
        plans = plans_of(schedule)
        advised = budget_for_all(plans, schedule.request)
        assert advised is not None
        larger = schedule_of(checkpoint, knowledge, budget=advised, **options)
        assert not any(plan.left_out for plan in plans_of(larger).values())
        assert budget_for_all(plans_of(larger), larger.request) is None
        default = EFFORTS[effort].budget
        if advised > default:  # no more than is needed, up to a minute
            smaller = schedule_of(checkpoint, knowledge, budget=advised - 60, **options)
            assert any(plan.left_out for plan in plans_of(smaller).values())


def test_the_advised_budget_counts_small_shares() -> None:
    """An attack with half a share needs twice the budget for one restart."""
    request = AuditRequest(effort="quick", budget="1s")
    plans = {
        "a": AttackPlan(runs=False, left_out="cut", seconds=100.0, share=2 / 3),
        "b": AttackPlan(runs=False, left_out="cut", seconds=80.0, share=1 / 3),
    }
    assert GradientMatching.effort_share == 0.5
    assert budget_for_all(plans, request) == 60 * math.ceil(80 * 3 / ATTACK_SHARE / 60)


# The deadline


def test_a_deadline_counts_from_its_creation() -> None:
    clock = Clock()
    clock.now = 100.0
    deadline = Deadline(10.0, clock)
    clock.now = 107.0
    assert (deadline.seconds_left, deadline.is_over) == (3.0, False)
    deadline.charge(2.0)  # an interrupted run of the same audit took so long
    assert deadline.seconds_left == 1.0
    clock.now = 108.0
    assert (deadline.seconds_left, deadline.is_over) == (0.0, True)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"budget": "100s"}, 100 * OVERRUN),
        ({"budget": "1s"}, MIN_DEADLINE),
        ({}, 600 * OVERRUN),
        ({"effort": "quick"}, 60 * OVERRUN),
        ({"effort": "thorough"}, 7200 * OVERRUN),
    ],
)
def test_the_clock_stops_an_audit_after_more_than_its_budget(
    options: dict[str, Any], seconds: float
) -> None:
    assert Deadline.for_request(AuditRequest(**options)).seconds == pytest.approx(seconds)


def test_an_audit_that_the_clock_stopped_stays_open() -> None:
    case = load_case(network(), samples(SAMPLES), samples(200, 1), KNOWN, AuditRequest())
    assert case is not None
    clock = Clock()
    audit = Audit(case, AuditRequest(), Deadline(13.0, clock))
    assert not audit.was_stopped
    assert audit.checks.stopped == ""
    clock.now = 13.0
    assert audit.was_stopped
    assert audit.checks.stopped == (
        "the time limit stopped the audit after 13s before all planned work was done"
    )


def test_batches_after_the_deadline_do_not_run() -> None:
    schedule = schedule_of(attacks=[{"attack": "kkt", "steps": 2, "restarts": 4}])
    plan = AttackPlan(restarts=4, batch_restarts=1)
    outcome = schedule.repeat("binary-kkt", plan)
    assert outcome is not None
    assert (outcome.restarts, outcome.status) == (4, ("finished",) * 4)

    class LastSecond(Deadline):
        """A deadline that passes after two batches."""

        looks = 0

        @property
        def is_over(self) -> bool:
            self.looks += 1
            return self.looks > 1

    cut = AttackSchedule(
        schedule.network, KNOWN, schedule.request, deadline=LastSecond(1e6)
    ).repeat("binary-kkt", plan)
    assert cut is not None
    assert (cut.restarts, cut.status) == (2, ("finished", "time"))
    assert torch.equal(cut.x, outcome.x[outcome.run < 2])


def test_attacks_after_the_deadline_are_named() -> None:
    clock = Clock()
    deadline = Deadline(1.0, clock)
    clock.now = 2.0
    schedule = schedule_of(attacks=[{"attack": "kkt", "steps": 2}])
    results = AttackSchedule(schedule.network, KNOWN, schedule.request, deadline=deadline).run()
    rows = {row.name: row.reason for row in results.outcomes}
    assert rows["binary-kkt"] == NO_TIME
    assert results.reconstructions == ()


# Negative controls and the deadline


def test_controls_are_tried_in_turn_until_the_time_is_over() -> None:
    train = samples(SAMPLES)
    knowledge = KNOWN.replace(mean=train.x.mean(0))
    claim = SampleSets(train, samples(300, 1))
    all_controls = run_controls(claim, knowledge, 0)
    assert len(all_controls.rows) == 4
    assert not all_controls.failures
    counts = []
    for seconds in (0.0, 8.0, 10.0, 30.0):  # only reading this clock takes time
        controls = run_controls(claim, knowledge, 0, deadline=Deadline(seconds, Clock(1.0)))
        counts.append((len(controls.rows), len(controls.failures)))
        assert all("time budget exhausted" in failure for failure in controls.failures)
    # Four controls and a classifier: each of them ran, or is a failure.
    assert [sum(count) for count in counts[:-1]] == [5, 5, 5]
    assert counts[0] == (0, 5)
    assert counts == sorted(counts)
    assert counts[-1] == (4, 0)


def test_a_control_is_cleared_by_few_subsets_or_judged_by_many() -> None:
    train, pool = samples(SAMPLES), samples(300, 1)
    (row,) = run_controls(SampleSets(train, pool), Knowledge(), 0).rows
    assert row.subsets == 200
    copies = pool.replace(x=torch.cat([train.x + 1e-4, pool.x]), y=torch.cat([train.y, pool.y]))
    order = np.random.default_rng((0, 5)).permutation(len(copies))  # as the control draws them
    place = np.argsort(order, kind="stable")
    copies = copies.replace(x=copies.x[place], y=copies.y[place])
    (row, *_) = run_controls(SampleSets(train, copies), Knowledge(), 0).rows
    assert row.subsets == 1000  # 200 cannot show a level of 0.1%
    assert row.has_failed
    assert row.p_value == pytest.approx(1 / 1001)
    assert ControlRow("few", 1, 1, 0.0, 1 / 201, subsets=200).is_undecided
    assert not ControlRow("few", 1, 1, 0.0, 2 / 201, subsets=200).is_undecided


def test_a_batch_is_saved_and_read_back(tmp_path: Any) -> None:
    batch = Batch("binary-kkt", 3, 40, 9)
    assert Batch.load(batch.save(tmp_path / "batch.safetensors")).to_json() == batch.to_json()
