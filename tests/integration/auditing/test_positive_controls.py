"""Positive controls: which sizes are tried, what counts as detected, what they are made of, their words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from residuum.auditing import stages
from residuum.auditing.case import load_case
from residuum.auditing.control_training import VANISHED, TrainedControl
from residuum.auditing.plan import NO_DEADLINE, Deadline
from residuum.auditing.positive_control import (
    MEMORIZED,
    MIN_SAMPLES,
    TOO_SMALL_BUDGET,
    AttacksOnControl,
    Control,
    ControlFactory,
    MembershipOnControl,
    train_and_test_controls,
)
from residuum.auditing.power import (
    BUDGET,
    HOLDOUT,
    NETWORKS,
    ControlSize,
    PositiveControls,
    covered_samples,
    networks_needed,
)
from residuum.auditing.request import AuditRequest
from residuum.auditing.run import Audit
from residuum.auditing.schedule import AttackResults, AttackSchedule
from residuum.auditing.stages import SWITCHED_OFF, run_positive_controls, skip_if_decided
from residuum.auditing.verdict import INCONCLUSIVE, NO_LEAK_FOUND, decide
from residuum.errors import InputError
from residuum.evaluation.matching import MIN_HOLDOUT
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.risk.membership import holdout_needed, measure_membership
from tests.verdict_inputs import SOUND, findings, membership, ran
from tests.victims import knowledge, leaky

ATTACK = {"attack": "kkt", "steps": 2, "restarts": 1}


def network(arch: str = "mlp:6-12-1") -> Network:
    torch.manual_seed(0)
    return Network(dict(Architecture.parse(arch).build().state_dict()), arch)


def samples(count: int, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    outputs = network().copy_module(torch.float64)(x)[:, 0]
    return Dataset(x, 2 * (outputs > 0).long() - 1)  # the network fits its samples


def audit_of(
    train: int = 80,
    holdout: int = 400,
    *,
    checkpoint: Network | None = None,
    deadline: Deadline = NO_DEADLINE,
    attack: bool = True,
    pool: Dataset | None = None,
    **options: Any,
) -> Audit:
    """An audit whose attacks and test of membership have run and found nothing."""
    options.setdefault("attacks", [ATTACK])
    request = AuditRequest(**options)
    pool = samples(holdout, 1) if pool is None else pool
    case = load_case(checkpoint or network(), samples(train), pool, Knowledge(), request)
    assert case is not None
    results = AttackSchedule(case.attacked, case.knowledge, request).run() if attack else None
    return Audit(
        case,
        request,
        deadline,
        membership=membership(records=train),
        attacks=results or AttackResults(),
    )


Rule = Callable[[int, int], bool]  # whether control ``number`` with so many samples is detected


@pytest.fixture
def controls(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Controls that are not trained: their loss and whether they are detected can be set."""
    settings = SimpleNamespace(
        detected=lambda samples, number: True, loss=lambda samples, number: 1e-4, made=[], tested=[]
    )

    def make(_: ControlFactory, count: int, number: int) -> Control:
        settings.made.append((count, number))
        trained = TrainedControl({}, {}, settings.loss(count, number), "trained by hand")
        return Control(network(), trained, samples(count, number), samples(100))

    def test(question: str) -> Callable[..., tuple[int, bool]]:
        def run(_: Any, control: Control) -> tuple[int, bool]:
            count, number = settings.made[-1]
            settings.tested.append((question, count, number))
            return count - number, settings.detected(count, number)

        return run

    # Training and testing real controls takes minutes, and their detection cannot be set.
    monkeypatch.setattr(ControlFactory, "make", make)
    monkeypatch.setattr(MembershipOnControl, "run", test("membership"))
    monkeypatch.setattr(AttacksOnControl, "run", test("reconstruction"))
    return settings


def reconstruction_of(audit: Audit) -> PositiveControls:
    (control,) = (c for c in train_and_test_controls(audit) if c.question == "reconstruction")
    return control


def test_the_number_of_samples_is_halved_until_enough_networks_are_detected(
    controls: SimpleNamespace,
) -> None:
    controls.detected = lambda samples, number: samples <= 20
    result = reconstruction_of(audit_of(80))
    assert [(size.samples, size.detected, size.suffices) for size in result.sizes] == [
        (80, 0, False),
        (40, 0, False),
        (20, 3, True),
    ]
    assert result.sizes[-1].counts == (20, 19, 18)  # of three networks
    assert result.samples == 20
    assert result.training == "trained by hand"
    assert result.tests == ("binary-kkt",)
    assert result.reason == ""


def test_a_size_ends_when_too_few_networks_can_be_detected(controls: SimpleNamespace) -> None:
    controls.detected = lambda samples, number: samples < 80 or number < 1
    result = reconstruction_of(audit_of(80))
    tested = [case[1:] for case in controls.tested if case[0] == "reconstruction"]
    assert tested == [(80, 0), (80, 1), (40, 0), (40, 1), (40, 2)]
    assert result.sizes[0].counts == (80, 79)
    assert [size.suffices for size in result.sizes] == [False, True]


@pytest.mark.parametrize(("missed", "networks"), [(3, 10), (4, 4)])
def test_seven_of_ten_networks_are_enough(
    controls: SimpleNamespace, missed: int, networks: int
) -> None:
    controls.detected = lambda samples, number: samples < 80 or number >= missed
    size, *smaller = train_and_test_controls(audit_of(80, 600))[0].sizes
    assert len(size.counts) == networks
    assert (size.detected, size.suffices) == (networks - missed, networks == 10)
    assert len(smaller) == (networks != 10)


def test_every_question_has_its_number_of_networks(controls: SimpleNamespace) -> None:
    results = train_and_test_controls(audit_of(80, 600))
    assert [result.question for result in results] == ["membership", "reconstruction"]
    for result in results:
        assert len(result.sizes) == 1
        assert len(result.sizes[0].counts) == NETWORKS[result.question]
    assert NETWORKS == {"membership": 10, "reconstruction": 3}


@pytest.mark.parametrize(("loss", "detected"), [(MEMORIZED, True), (1.001 * MEMORIZED, False)])
def test_a_network_that_did_not_memorize_never_counts(
    controls: SimpleNamespace, loss: float, detected: bool
) -> None:
    controls.loss = lambda samples, number: loss if number == 1 else 1e-4
    result = reconstruction_of(audit_of(80))
    assert result.sizes[0].suffices == detected
    assert result.samples == (80 if detected else 0)
    assert result.sizes[0].loss == loss
    if not detected:  # it is so at every size
        assert [size.samples for size in result.sizes] == [80, 40, 20, 10]
        assert len(result.sizes[0].counts) == 2


def test_no_control_has_fewer_than_ten_samples(controls: SimpleNamespace) -> None:
    controls.detected = lambda samples, number: False
    result = reconstruction_of(audit_of(78))
    assert [size.samples for size in result.sizes] == [78, 39, 19]
    assert MIN_SAMPLES == 10
    assert result.samples == 0
    assert result.sentence == (
        "The attacks must detect a leak in at least three of three networks that memorize held-out samples. "
        "A leak was detected in too few of them (0 of 1 with 78 samples, 0 of 1 with 39 samples, 0 of 1 with "
        "19 samples), so finding nothing says little about reconstruction."
    )


@pytest.mark.parametrize(
    ("train", "holdout"), [(80, 400), (80, 150), (80, 119), (300, 400), (30, 104)]
)
def test_attacks_on_controls_need_held_out_samples_of_their_own(
    controls: SimpleNamespace, train: int, holdout: int
) -> None:
    result = reconstruction_of(audit_of(train, holdout))
    expected = 0
    for count in range(1, train + 1):  # the control's own training set, then its held-out samples
        if holdout - count >= max(count, MIN_HOLDOUT):
            expected = count
    if expected < MIN_SAMPLES:
        assert result.sizes == ()
        assert "the held-out file has too few" in result.sentence
    else:
        assert [size.samples for size in result.sizes] == [expected]


@pytest.mark.parametrize(("train", "holdout"), [(80, 600), (80, 400), (20, 400), (80, 200)])
def test_controls_of_membership_are_as_large_as_the_held_out_file_allows(
    controls: SimpleNamespace, train: int, holdout: int
) -> None:
    sizes = train_and_test_controls(audit_of(train, holdout))[0].sizes
    expected = 0
    for count in range(MIN_SAMPLES, train + 1):
        if holdout - count >= holdout_needed(count):
            expected = max(expected, count)
    assert [size.samples for size in sizes] == ([expected] if expected else [])


def test_controls_of_membership_fit_into_the_budget(controls: SimpleNamespace) -> None:
    counts = []
    for budget in ("1s", "20s", "1h"):
        sizes = train_and_test_controls(audit_of(80, 600, budget=budget))[0].sizes
        counts.append(sizes[0].samples if sizes else 0)
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[2] == 80


@pytest.mark.parametrize(
    ("train", "holdout", "budget", "limited_by"),
    [(20, 600, "1h", ""), (80, 200, "1h", HOLDOUT), (80, 600, "20s", BUDGET)],
)
def test_what_limits_the_size_of_the_controls_is_named(
    controls: SimpleNamespace, train: int, holdout: int, budget: str, limited_by: str
) -> None:
    membership_controls, _ = train_and_test_controls(audit_of(train, holdout, budget=budget))
    assert membership_controls.limited_by == limited_by
    assert (membership_controls.samples == train) == (limited_by == "")


def test_a_network_without_activation_boundaries_has_no_controls_of_membership(
    controls: SimpleNamespace,
) -> None:
    audit = replace(audit_of(80), membership=membership(neurons=0, reason="smooth"))
    assert [result.question for result in train_and_test_controls(audit)] == ["reconstruction"]


def test_the_clock_ends_the_controls(controls: SimpleNamespace) -> None:
    now = 0.0
    deadline = Deadline(1.0, lambda: now)
    audit = audit_of(80, deadline=deadline)
    now = 2.0
    result = reconstruction_of(audit)
    assert (result.sizes, result.reason) == ((), "the time limit stopped the audit")
    assert result.sentence == (
        "No positive controls of reconstruction were run: the time limit stopped the audit."
    )
    assert controls.tested == []

    now = 0.0

    def detected(samples: int, number: int) -> bool:
        nonlocal now
        now = 2.0 if samples == 40 else 0.0
        return False

    controls.detected = detected
    result = reconstruction_of(audit_of(80, deadline=deadline))
    assert [size.samples for size in result.sizes] == [80, 40]
    assert result.reason == "the time limit stopped the audit"
    assert "Smaller numbers were not tried: the time limit stopped the audit." in result.sentence


@pytest.mark.parametrize("problem", [InputError("It cannot be trained.", "x"), RuntimeError("bad")])
def test_a_network_that_cannot_be_trained_is_named(
    monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def make(*_: Any) -> Control:
        raise problem

    # The training of these networks succeeds, so the error is raised by hand.
    monkeypatch.setattr(ControlFactory, "make", make)
    result = reconstruction_of(audit_of(80))
    assert result.sizes == ()
    assert str(problem).rstrip(".")[:10] in result.reason


def test_without_an_attack_there_is_nothing_to_control(controls: SimpleNamespace) -> None:
    result = reconstruction_of(audit_of(80, attack=False))
    assert result.reason == "no attack ran on the audited network"
    assert controls.tested == [("membership", *case) for case in controls.made]


# What follows for the verdict


def verdict_of(*controls: PositiveControls) -> str:
    checks = SOUND.replace(positive_controls=controls)
    return decide(findings(), (ran(),), checks, membership()).outcome


def test_a_verdict_without_detected_controls_is_inconclusive() -> None:
    size = ControlSize(40, (1,), 0, 1e-4)
    assert verdict_of() == INCONCLUSIVE
    assert verdict_of(PositiveControls("reconstruction", (size,))) == INCONCLUSIVE
    assert verdict_of(PositiveControls("reconstruction", reason="none")) == INCONCLUSIVE
    detected = ControlSize(40, (40, 39, 40), 3, 1e-4)
    assert verdict_of(PositiveControls("reconstruction", (size, detected))) == NO_LEAK_FOUND
    assert verdict_of(PositiveControls("membership", (detected,))) == NO_LEAK_FOUND


def scored(audit: Audit, **changes: Any) -> Audit:
    """The audit with tests that found nothing."""
    scores = SimpleNamespace(findings=findings(**changes), attacks=(ran(),))
    return replace(audit, scores=scores)  # type: ignore[arg-type]


def test_controls_run_only_if_their_result_changes_the_exit_code() -> None:
    audit = scored(audit_of(80, attacks=(), attack=False))
    audit = replace(audit, membership=membership(records=80))
    assert skip_if_decided(audit) == ""
    assert skip_if_decided(replace(audit, request=AuditRequest(effort="quick"))) == stages.DECIDED
    assert skip_if_decided(replace(audit, request=AuditRequest(steps=7))) == stages.DECIDED
    assert skip_if_decided(scored(audit, recovered=3)) == stages.DECIDED
    limit = AuditRequest(fail_on="verbatim")
    assert skip_if_decided(replace(scored(audit, recovered=3), request=limit)) == ""
    no_samples = replace(audit, case=replace(audit.case, train=None))
    assert skip_if_decided(no_samples) == stages.NO_SAMPLES


def test_an_audit_without_positive_controls_is_inconclusive() -> None:
    audit = scored(audit_of(80, attacks=(), attack=False, positive_controls=False))
    audit = run_positive_controls(audit)
    assert [c.reason for c in audit.positive_controls] == [SWITCHED_OFF, SWITCHED_OFF]
    verdict = audit.verdict()
    assert (verdict.outcome, verdict.exit_code) == (INCONCLUSIVE, 3)
    assert "--no-positive-controls" in verdict.reasons[0]
    detected = tuple(
        PositiveControls(q, (ControlSize(80, (80,) * k, k, 0.0),)) for q, k in NETWORKS.items()
    )
    assert replace(audit, positive_controls=detected).verdict().outcome == NO_LEAK_FOUND


# The figures and their words


def test_the_power_is_the_exact_lower_limit() -> None:
    """At the limit, detecting at least k of m networks has a probability of 5%."""
    for networks, detected in ((1, 1), (3, 3), (10, 10), (10, 7), (10, 1)):
        power = ControlSize(40, (40,) * networks, detected, 0.0).power
        probability = sum(
            math.comb(networks, k) * power**k * (1 - power) ** (networks - k)
            for k in range(detected, networks + 1)
        )
        assert probability == pytest.approx(0.05)
    assert ControlSize(40, (0,), 0, 0.0).power == 0
    assert PositiveControls("membership").power is None


def test_a_power_of_one_third_is_needed() -> None:
    assert [networks_needed(m) for m in (1, 2, 3, 10)] == [2, 3, 3, 7]
    assert not ControlSize(40, (1, 1), 2, 0.0).suffices
    assert ControlSize(40, (1,) * 3, 3, 0.0).suffices
    assert not ControlSize(40, (1,) * 10, 6, 0.0).suffices


def test_the_sentence_states_the_largest_detected_size() -> None:
    sizes = (ControlSize(80, (0,), 0, 0.0), ControlSize(40, (9, 30, 12), 3, 0.0))
    assert PositiveControls("reconstruction", sizes).sentence == (
        "On three networks of the same architecture that memorize 40 samples, the tests recovered 9 to 30 "
        "of them."
    )
    sizes = (ControlSize(40, (7,) * 10, 10, 0.0),)
    assert PositiveControls("membership", sizes).sentence == (
        "On ten networks of the same architecture that memorize 40 samples, the tests named 7 of them."
    )
    sizes_of_some = (ControlSize(40, (0, 2, *(7,) * 8), 8, 0.0),)
    assert PositiveControls("membership", sizes_of_some).sentence == (
        "On ten networks of the same architecture that memorize 40 samples, the tests named 0 to 7 of them "
        "and detected a leak in eight networks."
    )
    pair = (PositiveControls("membership", sizes), PositiveControls("reconstruction"))
    assert covered_samples(pair) == 40
    assert covered_samples(()) == 0


# What a control is made of


def trained_controls(**options: Any) -> tuple[Audit, ControlFactory]:
    audit = audit_of(30, 300, recipe="optimizer=adam,rate=0.02,epochs=60", **options)
    return audit, ControlFactory(audit)


def rows_of(data: Dataset) -> set[tuple[float, ...]]:
    return {tuple(row) for row in data.x.flatten(1).tolist()}


def test_a_control_memorizes_held_out_samples_and_keeps_the_others() -> None:
    audit, factory = trained_controls()
    train, pool = audit.case.train, audit.case.holdout
    assert train is not None
    assert pool is not None
    control = factory.make(20, 0)
    assert (len(control.data), len(control.holdout)) == (20, 280)
    assert rows_of(control.data).isdisjoint(rows_of(control.holdout))
    assert rows_of(control.data) | rows_of(control.holdout) == rows_of(pool)
    assert rows_of(control.data).isdisjoint(rows_of(train))
    model = control.network.double_module
    y = control.data.y.double()
    loss = torch.nn.functional.softplus(-y * model(control.data.x.double())[:, 0]).mean()
    assert control.trained.loss == pytest.approx(float(loss.detach()), rel=1e-3)
    assert {n: t.shape for n, t in control.network.theta.items()} == {
        n: t.shape for n, t in audit.case.audited.theta.items()
    }


def test_a_control_of_full_size_has_the_labels_of_the_training_set() -> None:
    audit, factory = trained_controls()
    assert audit.case.train is not None
    control = factory.make(30, 0)
    assert sorted(control.data.y.tolist()) == sorted(audit.case.train.y.tolist())


def test_controls_differ_and_can_be_repeated() -> None:
    audit, factory = trained_controls()
    controls_made = [factory.make(20, number) for number in range(3)]
    weights = [next(iter(control.trained.theta.values())) for control in controls_made]
    for a, b in itertools.combinations(range(3), 2):
        assert not torch.equal(weights[a], weights[b])
        assert rows_of(controls_made[a].data) != rows_of(controls_made[b].data)
    assert factory.make(20, 1) is controls_made[1]  # both questions test the same network
    repeated = ControlFactory(audit).make(20, 1)
    for name, t in controls_made[1].trained.theta.items():
        assert torch.equal(repeated.trained.theta[name], t)
    other = ControlFactory(replace(audit, request=audit.request.changed(seed=1))).make(20, 1)
    assert rows_of(other.data) != rows_of(controls_made[1].data)


def test_held_out_samples_without_labels_get_those_of_the_network() -> None:
    pool = samples(300, 1)
    _, factory = trained_controls(pool=pool.replace(y=torch.zeros(300)))
    outputs = network().copy_module(torch.float64)(pool.x)[:, 0]
    assert factory.holdout.y.tolist() == (2 * (outputs > 0).long() - 1).tolist()


def test_attacks_on_controls_stop_at_their_share_of_the_budget() -> None:
    _, factory = trained_controls()
    control = factory.make(20, 0)
    seconds = sum(plan.seconds for plan in AttacksOnControl(factory, 1e9).plans.values())
    test = AttacksOnControl(factory, 2.5 * seconds)
    test.run(control)
    test.run(control)
    with pytest.raises(
        Exception, match="the time budget is too small for more attacks on positive controls"
    ):
        test.run(control)


def test_controls_get_a_quarter_of_the_restarts() -> None:
    for restarts, expected in ((1, 1), (3, 1), (4, 1), (8, 2), (13, 3)):
        audit = audit_of(30, 300, attacks=[{**ATTACK, "restarts": restarts}])
        plan = AttacksOnControl(ControlFactory(audit), 1e9).plans["binary-kkt"]
        assert plan.restarts == expected
        full_plan = audit.attacks.plans["binary-kkt"]
        assert plan.seconds == pytest.approx(full_plan.seconds * expected / restarts)


# The real tests on real controls


def digits(count: int, holdout: int) -> tuple[Dataset, Dataset]:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    images, labels = torch.from_numpy(x[order] / 8 - 1), torch.from_numpy(y[order])
    return tuple(  # type: ignore[return-value]
        Dataset(images[rows], labels[rows])
        for rows in (slice(0, count), slice(count, count + holdout))
    )


def test_the_test_of_membership_notices_a_control_and_no_other_samples() -> None:
    train, pool = digits(40, 560)
    request = AuditRequest()
    case = load_case(network("mlp:64-256-10"), train, pool, Knowledge(), request)
    assert case is not None
    audit = Audit(case, request, NO_DEADLINE)
    control = ControlFactory(audit).make(40, 0)
    assert control.trained.loss <= MEMORIZED
    test = MembershipOnControl(ControlFactory(audit), 1e9)
    count, is_detected = test.run(control)
    result = measure_membership(control.network, control.data, control.holdout, request.seed)
    assert (count, is_detected) == (len(result.named), True)
    strangers = replace(control, data=train)  # the control never saw the training samples
    assert test.run(strangers)[1] is False
    strict = replace(
        audit, negative_controls=audit.negative_controls.replace(level=0.9 * result.adjusted_p)
    )
    assert MembershipOnControl(ControlFactory(strict), 1e9).run(control)[1] is False


def test_a_budget_that_trains_no_control_is_not_blamed_on_the_held_out_file() -> None:
    factory = ControlFactory(audit_of(80))
    for allowed, reason in ((1e9, ""), (1e-9, TOO_SMALL_BUDGET)):
        test = MembershipOnControl(factory, allowed)
        assert (test.largest_size() == 0) is bool(reason)
        assert test.reason == reason


def test_the_attacks_notice_a_control_and_no_other_samples() -> None:
    checkpoint, split = leaky()
    attacks = [{"attack": "kkt", "steps": 600, "restarts": 2}]
    request = AuditRequest(attacks=attacks, recipe="start=small,epochs=800", baselines=False)
    case = load_case(checkpoint, split.train, split.holdout, knowledge(split), request)
    assert case is not None
    schedule = AttackSchedule(case.attacked, case.knowledge, request)
    rows = schedule.skipped()
    plans = {name: p.replace(restarts=8) for name, p in schedule.plan(rows).items() if p.restarts}
    reconstructions = tuple(SimpleNamespace(attack=name) for name in plans)
    results = AttackResults(reconstructions=reconstructions, plans=plans)  # type: ignore[arg-type]
    factory = ControlFactory(Audit(case, request, NO_DEADLINE, attacks=results))
    control = factory.make(40, 0)
    test = AttacksOnControl(factory, 1e9)
    count, is_detected = test.run(control)
    assert is_detected
    assert count >= 3
    assert control.trained.loss <= max(MEMORIZED, VANISHED)
    strangers = replace(control, data=split.train)
    assert test.run(strangers)[1] is False
