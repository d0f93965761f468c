"""Positive controls: would the tests of this audit detect a leak?

A positive control is a network of the audited architecture that is known to memorize its samples. It is
trained on held-out samples until its loss vanishes (:mod:`.control_training`), and tested in the same way as
the audited network. We know which samples each control memorizes. No control sees the remaining held-out
samples.

The test of membership asks whether the network treats training samples differently from other samples. This
test is run on ten controls, and the attacks are run on three controls. Controls are trained on as many
samples as the audited network, or on as many as the held-out file and the budget allow. The tests must detect
a leak in seven of ten controls, or in three of three. With a confidence of 95%, the tests then detect a leak
in at least 1/3 of such networks (:mod:`.power`). If the tests detect a leak in too few controls, the number
of samples is halved and new controls are trained. The result is the largest number of samples at which a leak
is detected in enough controls.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from residuum.auditing.control_training import ControlTraining, TrainedControl
from residuum.auditing.controls import SampleSets
from residuum.auditing.outcomes import MEMBERSHIP
from residuum.auditing.plan import CONTROL_SHARE, AttackPlan, limit_of
from residuum.auditing.power import (
    BUDGET,
    HOLDOUT,
    NETWORKS,
    ControlSize,
    PositiveControls,
    networks_needed,
)
from residuum.auditing.schedule import AttackSchedule
from residuum.auditing.scores import findings, run_tests
from residuum.errors import InputError, ResiduumError
from residuum.evaluation.matching import MIN_HOLDOUT, are_class_labels, as_array
from residuum.evaluation.null import SIGNIFICANCE, SUBSETS, draw_sets
from residuum.evaluation.scoring import CandidatePool, all_candidates
from residuum.networks.canonical import attacked_form
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.risk.membership import holdout_needed, measure_membership
from residuum.theory.kkt import evaluate
from residuum.theory.rows import choose_task

if TYPE_CHECKING:
    from residuum.auditing.run import Audit

RECONSTRUCTION = "reconstruction"
# Positive control number k uses the seed of the audit plus k times SEED_STEP. Within a control, consecutive
# seeds are used. The step is so large that two controls never use the same seed.
SEED_STEP = 1000
# A positive control is trained on at least this many samples. A leak that is detected in a network with fewer
# samples would say little about the audited network.
MIN_SAMPLES = 10
# Attacks show a leak in a positive control only if they recover at least this many of its samples. Fewer
# recovered samples may be due to chance.
MIN_RECOVERED = 3
# On a positive control, an attack runs a quarter of its usual number of restarts.
RESTART_DIVISOR = 4
MEMORIZED = 0.05  # largest training loss of a network that counts as memorizing its samples
# Number of random subsets of the held-out set for each test on a control. With 400 subsets, the smallest
# possible p-value is 1/401, well below the significance level of 1%.
CONTROL_SUBSETS = 400
TOO_SMALL_BUDGET = f"the budget is too small to train networks on {MIN_SAMPLES} samples"
# Share of the positive controls' time budget that the controls for the membership test may use.
MEMBERSHIP_SHARE = 0.6


@dataclass(frozen=True)
class Control:
    """A positive control: a trained network, the samples that it memorizes, and samples that it never saw."""

    network: Network
    trained: TrainedControl
    data: Dataset
    holdout: Dataset


@dataclass
class ControlFactory:
    """Trains the positive controls of an audit and keeps them for reuse.

    Attributes:
        audit: The audit that the controls belong to.
        controls: The trained controls. A key is the number of training samples and the number of the control.
    """

    audit: Audit
    controls: dict[tuple[int, int], Control] = field(default_factory=dict)

    @cached_property
    def sets(self) -> SampleSets:
        """The training and held-out samples of the audit."""
        assert self.audit.case.sample_sets is not None
        return self.audit.case.sample_sets

    @cached_property
    def holdout(self) -> Dataset:
        """The held-out samples. Missing labels are replaced by predictions of the audited network."""
        holdout = self.sets.holdout
        assert holdout is not None
        if len(holdout.y.unique()) > 1:
            return holdout
        outputs = evaluate(self.audit.case.audited.double_module, holdout.x.double())
        task = choose_task(self.audit.case.audited.task, outputs.shape[1])
        if task == "regression":
            return holdout.replace(y=outputs)
        predicted_labels = (
            outputs.argmax(1) if task == "multiclass" else 2 * (outputs[:, 0] > 0).long() - 1
        )
        return holdout.replace(y=predicted_labels)

    def make(self, samples: int, number: int) -> Control:
        """Return a trained positive control. Each control is trained only once.

        Args:
            samples: Number of samples that the control memorizes.
            number: Number of the control, which sets its seed.

        Returns:
            The trained control.
        """
        if (samples, number) in self.controls:
            return self.controls[samples, number]
        case, seed = self.audit.case, self.audit.request.seed + SEED_STEP * number
        rng = np.random.default_rng((seed, 9))
        matched_train_rows = torch.from_numpy(rng.permutation(len(self.sets.train))[:samples])
        data, holdout = split_holdout(self.holdout, self.sets.train.take(matched_train_rows), seed)
        trained_control = self.training(number).train(data)
        network = case.audited.replace(theta=trained_control.theta)
        self.controls[samples, number] = Control(network, trained_control, data, holdout)
        return self.controls[samples, number]

    def training(self, number: int) -> ControlTraining:
        """Return the settings for training one of the positive controls (networks that memorize)."""
        audit_inputs = self.audit.case
        return ControlTraining(
            network=audit_inputs.audited,
            knowledge=audit_inputs.knowledge,
            inspection=audit_inputs.inspection,
            recipe=self.audit.request.training_recipe,
            seconds=max(self.audit.deadline.seconds_left, 0.0),
            seed=self.audit.request.seed + SEED_STEP * number,
        )


def train_and_test_controls(audit: Audit) -> tuple[PositiveControls, ...]:
    """Train positive controls (networks that memorize their samples) and run the tests of the audit on them.

    Args:
        audit: The audit. Its attacks must have run.

    Returns:
        The results of the positive controls for the test of membership, then for the attacks. If membership
        cannot be tested on this network, only the results for the attacks.
    """
    factory = ControlFactory(audit)
    control_results = []
    allowed_seconds = CONTROL_SHARE * limit_of(audit.request)
    if audit.membership is not None and audit.membership.neurons:
        membership_test = MembershipOnControl(factory, MEMBERSHIP_SHARE * allowed_seconds)
        control_results.append(_find_detected_size(audit, MEMBERSHIP, factory, membership_test))
    attack_test = AttacksOnControl(factory, allowed_seconds)
    control_results.append(_find_detected_size(audit, RECONSTRUCTION, factory, attack_test))
    return tuple(control_results)


class ControlTest:
    """Base class of tests that are run on positive controls (networks that memorize their samples).

    Attributes:
        reason: Why no control can be tested, "" if controls can be tested.
        limited_by: What limits the number of training samples of a control, "" if nothing limits it.
        names: Names of the tests: "membership", or the names of the attacks.
    """

    reason = ""
    limited_by = ""
    names: tuple[str, ...] = ()

    def largest_size(self) -> int:
        """Return the largest number of samples on which a positive control can be trained.

        Also set ``limited_by`` to what limits this number.
        """
        raise NotImplementedError

    def run(self, control: Control) -> tuple[int, bool]:
        """Return how many training samples of a positive control the test detects.

        Also return whether the detected samples show a leak.
        """
        raise NotImplementedError


class OutOfBudgetError(Exception):
    """Raised if no time is left to test another positive control (a network that memorizes its samples)."""


def _find_detected_size(
    audit: Audit, question: str, factory: ControlFactory, test: ControlTest
) -> PositiveControls:
    """Test positive controls on fewer and fewer samples until a leak is detected, and return the results."""
    start_time, results_by_size, training_description = time.monotonic(), list[ControlSize](), ""
    sample_count, reason = test.largest_size(), test.reason
    network_count = NETWORKS[question]
    max_missed = network_count - networks_needed(network_count)
    while sample_count >= MIN_SAMPLES and not reason:
        detected_samples: list[int] = []
        training_losses: list[float] = []
        detected_networks = 0
        try:
            for number in range(network_count):
                if audit.deadline.is_over:
                    raise OutOfBudgetError("the time limit stopped the audit")
                control = factory.make(sample_count, number)
                training_description = control.trained.description
                training_losses.append(control.trained.loss)
                count, is_leak = test.run(control)
                detected_samples.append(count)
                detected_networks += is_leak and control.trained.loss <= MEMORIZED
                if len(detected_samples) - detected_networks > max_missed:
                    break
        except OutOfBudgetError as problem:
            reason = str(problem)
            break
        except (ResiduumError, RuntimeError) as problem:
            # A network that the user wrote may raise an error in training. The audit then goes on without
            # positive controls.
            reason = str(problem).splitlines()[0][:200].rstrip(".")
            break
        results_by_size.append(
            ControlSize(
                sample_count, tuple(detected_samples), detected_networks, max(training_losses)
            )
        )
        audit.listener.message(_progress(question, results_by_size[-1]))
        if results_by_size[-1].suffices:
            break
        sample_count //= 2
    if not results_by_size and not reason:
        reason = (
            f"a control needs at least {MIN_SAMPLES} samples, and the held-out file has too few"
        )
    elapsed_seconds = round(time.monotonic() - start_time, 3)
    return PositiveControls(
        question,
        tuple(results_by_size),
        training_description,
        test.names,
        reason,
        elapsed_seconds,
        test.limited_by,
    )


def _progress(question: str, size: ControlSize) -> str:
    return (
        f"positive controls of {question} with {size.samples} samples: {size.detected} of "
        f"{len(size.counts)} networks detected"
    )


class MembershipOnControl(ControlTest):
    """Runs the membership test on positive controls (networks that memorize their samples).

    Args:
        factory: Trains the positive controls.
        allowed: Time in which all positive controls must be trained, in reference seconds (computing time on
            a fixed machine).
    """

    names = ("membership",)

    def __init__(self, factory: ControlFactory, allowed: float) -> None:
        self.factory, self.allowed = factory, allowed

    def largest_size(self) -> int:
        """Return the largest number of samples on which a positive control can be trained.

        Controls are trained on held-out samples, so the held-out file and the budget limit the number.
        """
        holdout_size = len(self.factory.holdout)
        possible_sizes = [
            m
            for m in range(MIN_SAMPLES, len(self.factory.sets.train) + 1)
            if holdout_size - m >= holdout_needed(m)
        ]
        seconds_per_sample = self.factory.training(0).reference_seconds_per_sample(
            self.factory.holdout
        )
        affordable_size = int(self.allowed / max(NETWORKS[MEMBERSHIP] * seconds_per_sample, 1e-12))
        if possible_sizes and affordable_size < MIN_SAMPLES:
            self.reason = TOO_SMALL_BUDGET
        if max(possible_sizes, default=0) < len(self.factory.sets.train):
            self.limited_by = HOLDOUT
        if affordable_size < max(possible_sizes, default=0):
            self.limited_by = BUDGET
        return max((m for m in possible_sizes if m <= affordable_size), default=0)

    def run(self, control: Control) -> tuple[int, bool]:
        """Return how many training samples of a positive control are identified, and if this shows a leak."""
        seed, significance_level = (
            self.factory.audit.request.seed,
            self.factory.audit.negative_controls.level,
        )
        membership_test = measure_membership(control.network, control.data, control.holdout, seed)
        return len(
            membership_test.named
        ), membership_test.is_finding and membership_test.adjusted_p <= significance_level


class AttacksOnControl(ControlTest):
    """Runs the attacks of an audit on positive controls (networks that memorize their samples).

    The attacks run with fewer restarts than in the audit.

    Args:
        factory: Trains the positive controls.
        allowed: Time for all attacks on all positive controls, in reference seconds (computing time on a
            fixed machine).
    """

    def __init__(self, factory: ControlFactory, allowed: float) -> None:
        audit = factory.audit
        self.factory, self.seconds_left = factory, allowed
        attacks_that_ran = {result.attack for result in audit.attacks.reconstructions}
        self.plans = {
            n: _with_fewer_restarts(p)
            for n, p in audit.attacks.plans.items()
            if n in attacks_that_ran
        }
        self.names = tuple(self.plans)
        if not self.plans:
            self.reason = "no attack ran on the audited network"

    def largest_size(self) -> int:
        """Return the largest number of samples on which a positive control can be trained.

        Controls are trained on held-out samples, so the held-out file limits the number.
        """
        holdout_size, train_count = len(self.factory.holdout), len(self.factory.sets.train)
        largest_sample_count = min(train_count, holdout_size - MIN_HOLDOUT, holdout_size // 2)
        self.limited_by = HOLDOUT if largest_sample_count < train_count else ""
        return largest_sample_count

    def run(self, control: Control) -> tuple[int, bool]:
        """Return how many training samples of a positive control are recovered, and if this shows a leak."""
        audit = self.factory.audit
        self.seconds_left -= sum(plan.seconds for plan in self.plans.values() if plan.restarts)
        if self.seconds_left < 0:
            raise OutOfBudgetError(
                "the time budget is too small for more attacks on positive controls "
                "(networks that are known to memorize their samples)"
            )
        knowledge = _knowledge_of_control(audit.case.knowledge, control)
        schedule = AttackSchedule(
            network=attacked_form(control.network, knowledge),
            knowledge=knowledge,
            request=audit.request,
            deadline=audit.deadline,
        )
        pools: dict[str, CandidatePool] = {}
        for name, plan in self.plans.items():
            try:
                reconstruction = schedule.repeat(name, plan)
            except Exception as problem:
                if not (schedule.attacks[name].is_plugin or isinstance(problem, ResiduumError)):
                    raise
                continue
            if reconstruction is not None:
                pools[name] = all_candidates(reconstruction)
        sets, seed = SampleSets(control.data, control.holdout), audit.request.seed
        significance_level = audit.negative_controls.level
        subset_count = SUBSETS if significance_level < SIGNIFICANCE else CONTROL_SUBSETS
        tests, _ = run_tests(
            pools, sets, seed, subset_count, audit.deadline.seconds_left, level=significance_level
        )
        if not tests:
            return 0, False
        control_findings = findings(tests, len(control.data))
        return control_findings.recovered, bool(
            control_findings.survivors
        ) and control_findings.recovered >= MIN_RECOVERED


def _with_fewer_restarts(plan: AttackPlan) -> AttackPlan:
    """Return a plan with a quarter of the restarts (runs), for an attack on a positive control."""
    if not plan.restarts:
        return plan
    restarts = max(1, plan.restarts // RESTART_DIVISOR)
    seconds = plan.seconds * restarts / plan.restarts
    return plan.replace(
        restarts=restarts, seconds=seconds, batch_restarts=min(restarts, plan.batch_restarts)
    )


def _knowledge_of_control(knowledge: Knowledge, control: Control) -> Knowledge:
    """Return what the attacker knows about a positive control.

    The attacker knows the same facts about the control as about the audited network, such as the initial
    weights. The values of these facts are those of the control. Norms of samples and the optimizer state are
    not known.
    """
    unknown_facts = ("norms", "moment")
    return knowledge.replace(
        theta0=None if knowledge.theta0 is None else control.trained.theta0,
        norms=None,
        moment=None,
        sample_count=None if knowledge.sample_count is None else len(control.data),
        provenance={k: v for k, v in knowledge.provenance.items() if k not in unknown_facts},
    )


def split_holdout(holdout: Dataset, like: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Split the held-out samples into a training set as large as ``like``, and the remaining samples.

    The training set has the label counts of ``like`` if there are enough held-out samples of each label.

    Args:
        holdout: The held-out samples.
        like: Samples that give the size, the label counts and the mean of the training set.
        seed: Seed of the random choice.

    Returns:
        The training set and the remaining samples.

    Raises:
        InputError: If there are not more held-out samples than samples in ``like``.
    """
    if len(holdout) <= len(like):
        raise InputError(
            f"To train a positive control (a network that is known to memorize its samples) on "
            f"{len(like)} samples, more than {len(like)} held-out samples are needed; got {len(holdout)}.",
            "Pass more held-out samples.",
        )
    rng = np.random.default_rng((seed, 7))
    labels, target_labels = as_array(holdout.y), as_array(like.y)
    are_classes = are_class_labels(holdout.y) and are_class_labels(like.y)
    count_by_label = zip(*np.unique(target_labels, return_counts=True), strict=True)
    if not (
        are_classes and all((labels == label).sum() >= count for label, count in count_by_label)
    ):
        labels, target_labels = np.zeros(len(holdout), dtype=int), np.zeros(len(like), dtype=int)
    training_rows = torch.from_numpy(draw_sets(labels, target_labels, 1, rng)[0])
    is_remaining = torch.ones(len(holdout), dtype=torch.bool)
    is_remaining[training_rows] = False
    return (
        holdout.take(training_rows).replace(mean=like.mean),
        holdout.take(is_remaining).replace(mean=like.mean),
    )
