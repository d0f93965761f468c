"""The stages of an audit of a forest: recover its training table, and compare the table with the samples.

An audit of a forest has the stages of every audit (:mod:`.run`). These stages work on trees instead of a
network:

- membership: do training samples have smaller losses than held-out samples (:mod:`.losses`)?
- attacks: recover the training table (:mod:`residuum.attacks.trees.forest`). The attack never sees samples.
- negative controls: as in every audit. A leak needs an adjusted p-value of 0.1%. A regression forest reveals
  nearly all rows or none, so this strict level hides no leak.
- scores: two tests. Do recovered rows agree with training rows in more digits than with held-out rows
  (:mod:`residuum.evaluation.tables`)? Are more targets of training samples recovered than of held-out samples
  (:mod:`residuum.evaluation.targets`)? The labels of a classifier are compared row by row with the samples
  instead. Boosted trees have one test: do they store more values of training than of held-out samples?
- positive controls: forests with as many fully grown trees, trained on held-out samples.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from residuum.attacks.trees.forest import NAME, SURFACE, ForestAttack, why_not
from residuum.auditing import stages
from residuum.auditing.controls import STRICT_LEVEL, SampleSets
from residuum.auditing.evidence import count_sets, held_out_matches
from residuum.auditing.losses import has_targets
from residuum.auditing.outcomes import (
    CLASS_LEVEL,
    NEAR_COPY,
    RESEMBLANCE,
    AttackOutcome,
    Findings,
)
from residuum.auditing.power import NETWORKS, ControlSize, PositiveControls
from residuum.auditing.questions import QUESTIONS_OF_TESTS
from residuum.auditing.result import Evidence
from residuum.auditing.schedule import AttackResults
from residuum.auditing.scores import (
    MAX_DISTANCE_RATIO,
    AttackScores,
    AttackTest,
    findings,
    run_tests,
)
from residuum.evaluation import score
from residuum.evaluation.matching import MIN_HOLDOUT, as_array
from residuum.evaluation.null import SUBSETS
from residuum.evaluation.scoring import CandidatePool, label_name
from residuum.evaluation.tables import (
    DIGITS,
    column_ranges,
    count_right_columns,
    mean_error,
    scale_columns,
)
from residuum.evaluation.targets import (
    VALUES,
    TargetTest,
    compare_labels,
    compare_stored_values,
    compare_targets,
)
from residuum.io.forests import NamedForest, read_forests
from residuum.io.release import pickle_in_memory
from residuum.records import Dataset, Knowledge, Reconstruction, RecoveredTable, Scores
from residuum.trees.forest import BOOSTING, Forest
from residuum.trees.stored_values import count_stored_values

if TYPE_CHECKING:
    from residuum.auditing.case import Case
    from residuum.auditing.request import AuditRequest
    from residuum.auditing.run import Audit

# Largest number of training samples that are compared. If there are more, a random subset is compared.
MAX_COMPARED = 2000
MAX_HELD_OUT = 4000  # largest number of held-out samples that are compared
NEAR_COLUMNS, NEAR = (
    0.9,
    0.01,
)  # a near-copy has this share of its columns right within this tolerance
MIN_CONTROL_SAMPLES = 20  # a positive control has at least this many training samples
ITS_TREES = "the file holds the trees, from which the training table is computed"
CONTROL_SUBJECT = "forests of as many fully grown trees"
CLASSIFIER_ROWS = (
    "an audit compares the labels of classification forests, as their rows are estimates"
)


def plan_attack(model: NamedForest) -> AttackOutcome:
    """Return the table row of the attack on the forest, before the attack runs.

    The row says whether the attack can recover the training table of this forest, and why or why not.
    """
    reason = why_not(model.forest)
    return AttackOutcome(NAME, True, not reason, not reason, reason or ITS_TREES, SURFACE)


def recover_tables(audit: Audit) -> Audit:
    """Return the audit, extended by the training table that the attack recovers from the forest.

    The attack reads the trees and the attacker's knowledge. The attack never reads the samples.
    """
    audit_inputs = audit.case
    assert audit_inputs.forest is not None
    outcome = plan_attack(audit_inputs.forest)
    if not outcome.ran:
        return replace(audit, attacks=AttackResults((outcome,)))
    attack = ForestAttack(seed=audit.request.seed, rows=False)
    recovered_table = attack.run(
        audit_inputs.forest, audit_inputs.knowledge, audit.listener.message
    )
    outcome = outcome.replace(
        reason=" ".join(recovered_table.lines),
        restarts=1,
        candidates=recovered_table.records,
        seconds=recovered_table.seconds,
    )
    return replace(audit, attacks=AttackResults((outcome,)), table=recovered_table)


def run_negative_controls(audit: Audit) -> Audit:
    """Run the negative controls (tests that must find nothing), and set the significance level to 0.1%."""
    audit = stages.run_negative_controls(audit)
    controls = audit.negative_controls
    return replace(audit, negative_controls=controls.replace(level=STRICT_LEVEL))


def score_table(audit: Audit) -> Audit:
    """Return the audit, extended by tests whether the recovered table agrees with the training samples.

    The tests compare the rows and the targets of the recovered table with training and held-out samples. For
    a boosting model, the values that its trees store are compared instead.
    """
    table, sets = audit.table, audit.case.sample_sets
    forest = None if audit.case.forest is None else audit.case.forest.forest
    if forest is not None and forest.kind == BOOSTING and sets is not None:
        return replace(audit, targets=compare_with_stored_values(forest, sets))
    if table is None or sets is None:
        return audit
    target_test = compare_with_targets(audit, table)
    audit = replace(audit, targets=target_test)
    if table.is_classifier or not table.records or table.columns != sets.train.x[0].numel():
        outcomes = audit.attacks.outcomes
        reason = CLASSIFIER_ROWS if table.is_classifier else "no row was recovered"
        train_count = len(sets.train)
        return replace(
            audit, scores=AttackScores(outcomes, Findings(train_count, reason, metric=DIGITS.name))
        )
    comparison = RowComparison(table, _limited(sets), audit.request.seed, audit.request.subsets)
    reconstruction = comparison.reconstruction(audit.case.knowledge)
    audit = replace(audit, attacks=audit.attacks.replace(reconstructions=(reconstruction,)))
    scores = comparison.scores(
        audit.attacks.outcomes[0], audit.deadline.seconds_left, audit.negative_controls.level
    )
    return replace(audit, scores=scores)


def compare_with_stored_values(forest: Forest, sets: SampleSets) -> TargetTest:
    """Test whether a boosting model stores more values of training samples than of held-out samples.

    Args:
        forest: The trees of the boosting model.
        sets: Training and held-out samples.

    Returns:
        The test, with the number of values of training samples that the trees store.
    """
    train_values, holdout = sets.train.x.flatten(1).double().numpy(), sets.holdout
    if holdout is None or train_values.shape[1] != forest.columns:
        reason = "there are no held-out samples with the columns of the trees"
        return TargetTest(VALUES, n=train_values.size, reason=reason)
    holdout_values = holdout.x.flatten(1).double().numpy()
    return compare_stored_values(
        count_stored_values(forest, train_values),
        count_stored_values(forest, holdout_values),
        cells=train_values.size,
        tests=2 * QUESTIONS_OF_TESTS,
    )


def compare_with_targets(audit: Audit, table: RecoveredTable) -> TargetTest:
    """Test whether the recovered targets agree better with training samples than expected by chance.

    Args:
        audit: The audit.
        table: The training table that the attack recovered, with one target per row.

    Returns:
        The test of the recovered targets.
    """
    audit_inputs = audit.case
    assert audit_inputs.train is not None
    target_name = "labels" if table.is_classifier else "targets"
    train, holdout = audit_inputs.train, audit_inputs.holdout
    if not table.targets.shape[1] or not has_targets(train):
        return TargetTest(target_name, n=len(train), reason="there are no targets to compare")
    recovered_targets = table.targets[:, 0].numpy()
    train_targets = train.y.double().reshape(len(train), -1)[:, 0].numpy()
    # An audit tests reconstruction and membership, each with half of the significance level. For a forest,
    # two tests share the half of reconstruction: the test of the targets and the test of the rows.
    test_count = 2 * QUESTIONS_OF_TESTS
    if table.is_classifier:
        return compare_labels(recovered_targets, train_targets, test_count, audit.request.seed)
    if holdout is None or not has_targets(holdout):
        return TargetTest(target_name, n=len(train), reason="there are no held-out targets")
    holdout_targets = holdout.y.double().reshape(len(holdout), -1)[:, 0].numpy()
    return compare_targets(recovered_targets, train_targets, holdout_targets, test_count)


def _limited(sets: SampleSets) -> SampleSets:
    """Return random subsets of training and held-out samples that can be compared in a short time.

    At most as many training samples are compared as there are held-out samples, or ``MIN_HOLDOUT`` if there
    are fewer held-out samples.
    """
    train, holdout = sets.train, sets.holdout
    if holdout is None:
        return replace(sets, train=_random_subset(train, MAX_COMPARED))
    holdout = _random_subset(holdout, MAX_HELD_OUT)
    max_train = min(MAX_COMPARED, max(len(holdout), MIN_HOLDOUT))
    train_subset = _random_subset(train, max_train)
    notes = sets.notes
    if len(train_subset) < len(train):
        notes = (*notes, f"A random {max_train} of {len(train)} training samples were compared.")
    return replace(sets, train=train_subset, holdout=holdout, notes=notes)


def _random_subset(samples: Dataset, limit: int) -> Dataset:
    if len(samples) <= limit:
        return samples
    generator = torch.Generator().manual_seed(0)
    return samples.take(torch.randperm(len(samples), generator=generator)[:limit].sort().values)


class RowComparison:
    """Compares the rows that an attack recovered from a forest with training and held-out samples.

    Rows and samples are compared column by column, after each column is scaled by its range.

    Args:
        table: The training table that the attack recovered.
        sets: Training and held-out samples.
        seed: Seed of the random subsets.
        subsets: Number of random subsets of the held-out samples. At least 2000 subsets are drawn, because
            the significance level of 0.1% needs so many.
    """

    def __init__(self, table: RecoveredTable, sets: SampleSets, seed: int, subsets: int) -> None:
        low, width = column_ranges(sets.train, sets.holdout)
        self.table, self.seed, self.subsets = table, seed, max(subsets, SUBSETS)
        train = scale_columns(_flat(sets.train), low, width)
        holdout = None if sets.holdout is None else scale_columns(_flat(sets.holdout), low, width)
        self.sets = replace(sets, train=train, holdout=holdout)
        candidates = Dataset(table.estimate(low, width), torch.zeros(table.records))
        self.candidates = scale_columns(candidates, low, width).x

    def test(self, seconds: float, level: float) -> tuple[AttackTest | None, list[str]]:
        """Test whether recovered rows agree better with training samples than with held-out samples.

        Args:
            seconds: Time limit of the test in seconds.
            level: The largest adjusted p-value that shows a leak.

        Returns:
            The test, or None if there are too few held-out samples, and notes for the reader.
        """
        equal_weights = torch.ones(len(self.candidates))
        tests, notes = run_tests(
            {NAME: CandidatePool(self.candidates, equal_weights)},
            self.sets,
            self.seed,
            self.subsets,
            seconds,
            level=level,
            metric=DIGITS,
        )
        return tests.get(NAME), notes

    def scores(self, row: AttackOutcome, seconds: float, level: float) -> AttackScores:
        """Score the recovered rows, and collect everything that the report shows about them.

        Args:
            row: The row of the attack in the table of all attacks.
            seconds: Time limit of the scoring in seconds.
            level: The largest adjusted p-value that shows a leak.

        Returns:
            The scores of the attack, with its test and the samples that the report displays.
        """
        train = self.sets.train
        start_time = time.monotonic()
        test, notes = self.test(seconds / 2, level)
        row_scores = score(
            self.candidates,
            train,
            self.sets.holdout,
            metrics=(),
            seed=self.seed,
            subsets=self.subsets,
            seconds=seconds - (time.monotonic() - start_time),
            calibration=None if test is None else test.control,
            deciding=DIGITS,
        )
        row_scores = row_scores.replace(
            notes=tuple(dict.fromkeys((*self.sets.notes, *notes, *row_scores.notes)))
        )
        evidence = self.evidence(row_scores, test)
        if test is None:
            untested_findings = Findings(len(train), reason=row_scores.reason, metric=DIGITS.name)
            return AttackScores((row,), untested_findings, NAME, row_scores, None, evidence)
        row_findings = findings({NAME: test}, len(train), self.grades(test), train.rows)
        row_findings = row_findings.replace(metric=DIGITS.name)
        row = row.replace(
            recovered=int(test.control.recovered.sum()),
            expected_by_chance=test.control.expected_by_chance,
            p_value=test.control.p_value,
            adjusted=test.adjusted,
            level=test.level,
            rule=test.rule,
        )
        return AttackScores((row,), row_findings, NAME, row_scores, None, evidence)

    def grades(self, test: AttackTest) -> dict[int, str]:
        """Grade how exactly each training sample was recovered, by the error of its recovered row.

        The error of a row is the mean absolute difference to the sample, after each column is scaled by its
        range. The median row holds the median of all held-out samples in each column.

        - near-copy: at least 90% of the columns are right within 1% of their range. The error of the
          recovered row is at most 3/4 of the error of the nearest held-out sample.
        - resemblance: the error of the recovered row is at most 3/4 of the error of the median row.
        - class-level: the error of the recovered row is more than 3/4 of the error of the median row.

        Args:
            test: The test of the recovered rows.

        Returns:
            The grade of every recovered sample, by position of the sample. Empty if the test shows no leak.
        """
        recovered_positions = np.flatnonzero(test.control.recovered)
        holdout = self.sets.holdout
        if not test.survives or not len(recovered_positions) or holdout is None:
            return {}
        samples = self.sets.train.x[recovered_positions]
        recovered_rows = self.candidates[test.control.candidate[recovered_positions]]
        row_error = as_array((recovered_rows - samples).abs().clamp(max=1.0).mean(1))
        nearest_holdout_error = mean_error(samples, holdout.x).min(1)
        median_row_error = mean_error(samples, holdout.x.nanmedian(0).values[None])[:, 0]
        right_column_count = count_right_columns(recovered_rows, samples, NEAR)
        is_copy = (right_column_count >= NEAR_COLUMNS * samples.shape[1]) & (
            row_error <= MAX_DISTANCE_RATIO * nearest_holdout_error
        )
        is_resemblance = row_error <= MAX_DISTANCE_RATIO * median_row_error
        return {
            int(i): NEAR_COPY if copy else RESEMBLANCE if like else CLASS_LEVEL
            for i, copy, like in zip(recovered_positions, is_copy, is_resemblance, strict=True)
        }

    def evidence(self, scores: Scores, test: AttackTest | None) -> Evidence:
        """Collect the training samples that the report displays with their recovered rows.

        Samples whose recovered rows agree with them in the most digits come first.

        Args:
            scores: The scores of the recovered rows.
            test: The test of the recovered rows, None if there are too few held-out samples.

        Returns:
            The training samples and their numbers of right digits.
        """
        train, holdout = self.sets.train, self.sets.holdout
        digit_counts = [row.matches[DIGITS.name].score for row in scores.per_sample]
        digit_values = torch.tensor(
            [float("nan") if value is None else value for value in digit_counts]
        )
        best_positions = digit_values.nan_to_num(nan=-torch.inf).argsort(
            descending=True, stable=True
        )[:300]
        nearest_holdout = None
        if holdout is not None:
            nearest_holdout = holdout.x[
                torch.from_numpy(mean_error(train.x[best_positions], holdout.x).argmin(1))
            ]
        return Evidence(
            index=best_positions,
            x=train.x[best_positions],
            values=digit_values,
            null=torch.zeros(0) if test is None else held_out_matches(test, self.seed),
            null_sets=count_sets(len(train)),
            labels=tuple(
                "" if row.label is None else label_name(row.label, train)
                for row in scores.per_sample
            ),
            nearest_holdout=nearest_holdout,
            features=train.features or self.table.names,
            units=train.units,
            scale=train.scale,
            offset=train.offset,
            spread=torch.ones(train.x.shape[1]),
        )

    def reconstruction(self, knowledge: Knowledge) -> Reconstruction:
        """Convert the recovered rows to a ``Reconstruction``, so that the report can show them."""
        labels = torch.zeros(len(self.candidates))
        return Reconstruction.from_candidates(
            NAME, self.candidates, labels, torch.ones_like(labels), knowledge
        )


def _flat(samples: Dataset) -> Dataset:
    return samples.replace(x=samples.x.flatten(1))


def control_samples(train: int, holdout: int) -> int:
    """Return the number of samples on which a positive control (a memorizing forest) is trained.

    Args:
        train: Number of training samples of the audit.
        holdout: Number of held-out samples. A positive control is trained on some of them.

    Returns:
        The number of samples. At least ``MIN_HOLDOUT`` other held-out samples remain for the test of the
        control.
    """
    return min(train, MAX_COMPARED, holdout // 2, holdout - MIN_HOLDOUT)


def why_no_controls(case: Case, request: AuditRequest) -> str:
    """Return why no positive control can be trained for an audit of a forest, "" if one can.

    Args:
        case: The inputs of the audit.
        request: Settings of the audit.

    Returns:
        The reason.
    """
    if not request.positive_controls:
        return "switched off with --no-positive-controls"
    train, holdout = case.train, case.holdout
    if train is None or holdout is None or not has_targets(holdout):
        return "there are no held-out samples with targets"
    if control_samples(len(train), len(holdout)) < MIN_CONTROL_SAMPLES:
        return f"a control needs {MIN_CONTROL_SAMPLES} held-out samples and {MIN_HOLDOUT} others"
    return ""


def test_positive_controls(audit: Audit) -> Audit:
    """Return the audit, extended by the results of its positive controls.

    A positive control is a forest that is trained to memorize some held-out samples. The positive controls
    are attacked. The test of rows must detect a leak in them, or the test of labels for a classifier.
    """
    table, train, holdout = audit.table, audit.case.train, audit.case.holdout
    start_time = time.monotonic()
    question = "reconstruction"
    reason = why_no_controls(audit.case, audit.request)
    if not reason and table is None:
        reason = "the attack does not apply to the audited model"
    if reason or table is None:
        return replace(audit, positive_controls=(PositiveControls(question, reason=reason),))
    assert holdout is not None
    assert train is not None
    results_by_size = []
    sample_count = control_samples(len(train), len(holdout))
    while sample_count >= MIN_CONTROL_SAMPLES and not audit.deadline.is_over:
        size_result = _test_controls(audit, holdout, sample_count)
        results_by_size.append(size_result)
        if size_result.suffices:
            break
        sample_count //= 2
    seconds = round(time.monotonic() - start_time, 3)
    controls = PositiveControls(
        question,
        tuple(results_by_size),
        "fully grown trees with the settings of scikit-learn",
        (NAME,),
        reason,
        seconds,
        subject=CONTROL_SUBJECT,
    )
    return replace(audit, positive_controls=(controls,))


def _test_controls(audit: Audit, holdout: Dataset, samples: int) -> ControlSize:
    recovered_counts, detected_count = [], 0
    for number in range(NETWORKS["reconstruction"]):
        generator = torch.Generator().manual_seed(1000 * audit.request.seed + number)
        shuffled_rows = torch.randperm(len(holdout), generator=generator)
        members, outsiders = (
            holdout.take(shuffled_rows[:samples]),
            holdout.take(shuffled_rows[samples:]),
        )
        count, is_leak = _test_control(audit, members, outsiders, number)
        recovered_counts.append(count)
        detected_count += is_leak
    return ControlSize(samples, tuple(recovered_counts), detected_count, 0.0)


def _test_control(
    audit: Audit, members: Dataset, outsiders: Dataset, seed: int
) -> tuple[int, bool]:
    """Return how many samples an attack recovers from a forest that was trained on ``members``.

    Also return whether this number shows a leak.

    The forest is trained on the samples ``members``. It never sees the samples ``outsiders``.
    """
    assert audit.case.forest is not None
    control = train_control(audit.case.forest, members, seed)
    knowledge = _knowledge_of_control(audit.case.knowledge, members)
    recovered_table = ForestAttack(seed=audit.request.seed, rows=False).run(control, knowledge)
    significance_level = audit.negative_controls.level
    if recovered_table.is_classifier:
        member_targets = members.y.double().numpy()
        label_test = compare_labels(
            recovered_table.targets[:, 0].numpy(), member_targets, 2 * QUESTIONS_OF_TESTS, seed
        )
        return label_test.recovered, label_test.is_finding(significance_level)
    comparison = RowComparison(
        recovered_table, SampleSets(members, outsiders), seed, audit.request.subsets
    )
    row_test, _ = comparison.test(audit.deadline.seconds_left, significance_level)
    if row_test is None:
        return 0, False
    return int(row_test.control.recovered.sum()), row_test.survives


def _knowledge_of_control(knowledge: Knowledge, members: Dataset) -> Knowledge:
    """Return what an attacker knows about a forest that was trained on the samples ``members``.

    If the attacker knows column ranges in the audit, the attacker knows the column ranges of ``members``.
    Otherwise the knowledge stays unchanged.
    """
    if knowledge.column_ranges is None:
        return knowledge
    member_values = members.x.flatten(1).double()
    return knowledge.replace(
        column_ranges=torch.stack([member_values.amin(0), member_values.amax(0)])
    )


def train_control(model: NamedForest, members: Dataset, seed: int) -> NamedForest:
    """Train a positive control: a forest with fully grown trees, which memorizes its training samples.

    If the file of the audited forest does not store some field of the trees, such as seeds or sample counts,
    this field is removed from the control as well.

    Args:
        model: The audited forest.
        members: The training samples of the control.
        seed: Seed of the training.

    Returns:
        The trained control.
    """
    from sklearn import ensemble

    forest_class: Any = ensemble.RandomForestRegressor
    if model.forest.is_classifier:
        forest_class = ensemble.RandomForestClassifier
    targets = members.y.double().numpy()
    fitted_forest = forest_class(len(model.forest.trees), random_state=seed)
    fitted_forest.fit(
        members.x.flatten(1).double().numpy(),
        targets.astype(int) if model.forest.is_classifier else targets,
    )
    (control, *_) = read_forests(pickle_in_memory(fitted_forest))
    first_audited_tree = model.forest.trees[0]
    optional_fields = ("seed", "count", "weight", "impurity")
    missing_fields = [name for name in optional_fields if getattr(first_audited_tree, name) is None]
    return NamedForest(control.name, control.forest.without(*missing_fields))
