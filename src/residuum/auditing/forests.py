"""The stages of an audit of a forest: recover its training table, and compare the table with the samples.

An audit of a forest has the stages of every audit (:mod:`.run`). These stages work on trees instead of a
network:

- membership: do training samples have smaller losses than held-out samples (:mod:`.losses`)?
- attacks: recover the training table (:mod:`residuum.attacks.trees.forest`). The attack never sees samples.
- negative controls: as in every audit. A leak needs an adjusted p-value of 0.1%. A forest reveals nearly all
  rows or none, so this strict level hides no leak.
- scores: two tests. Do recovered rows agree with training rows in more digits than with held-out rows
  (:mod:`residuum.evaluation.tables`)? Are more targets of training samples recovered than of held-out samples
  (:mod:`residuum.evaluation.targets`)?
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

# More training samples than this are not compared. A random subset of the training samples is used.
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
    """Return the row of the attack before it runs, which says whether the attack applies."""
    reason = why_not(model.forest)
    return AttackOutcome(NAME, True, not reason, not reason, reason or ITS_TREES, SURFACE)


def recover_tables(audit: Audit) -> Audit:
    """Run the attack on the forest. It sees the trees and the attacker's knowledge, never the samples."""
    case = audit.case
    assert case.forest is not None
    row = plan_attack(case.forest)
    if not row.ran:
        return replace(audit, attacks=AttackResults((row,)))
    attack = ForestAttack(seed=audit.request.seed, rows=False)
    table = attack.run(case.forest, case.knowledge, audit.listener.message)
    row = row.replace(
        reason=" ".join(table.lines),
        restarts=1,
        candidates=table.records,
        seconds=table.seconds,
    )
    return replace(audit, attacks=AttackResults((row,)), table=table)


def run_negative_controls(audit: Audit) -> Audit:
    """Run the negative controls of every audit, and set the strict significance level of forests."""
    audit = stages.run_negative_controls(audit)
    controls = audit.negative_controls
    return replace(audit, negative_controls=controls.replace(level=STRICT_LEVEL))


def score_table(audit: Audit) -> Audit:
    """Compare the recovered table with training and held-out samples."""
    table, sets = audit.table, audit.case.sample_sets
    forest = None if audit.case.forest is None else audit.case.forest.forest
    if forest is not None and forest.kind == BOOSTING and sets is not None:
        return replace(audit, targets=compare_with_stored_values(forest, sets))
    if table is None or sets is None:
        return audit
    targets = compare_with_targets(audit, table)
    audit = replace(audit, targets=targets)
    if table.is_classifier or not table.records or table.columns != sets.train.x[0].numel():
        rows = audit.attacks.outcomes
        reason = CLASSIFIER_ROWS if table.is_classifier else "no row was recovered"
        n = len(sets.train)
        return replace(audit, scores=AttackScores(rows, Findings(n, reason, metric=DIGITS.name)))
    comparison = RowComparison(table, _limited(sets), audit.request.seed, audit.request.subsets)
    reconstruction = comparison.reconstruction(audit.case.knowledge)
    audit = replace(audit, attacks=audit.attacks.replace(reconstructions=(reconstruction,)))
    scores = comparison.scores(
        audit.attacks.outcomes[0], audit.deadline.seconds_left, audit.negative_controls.level
    )
    return replace(audit, scores=scores)


def compare_with_stored_values(forest: Forest, sets: SampleSets) -> TargetTest:
    """Compare how many values of training samples and of held-out samples the trees of boosting store.

    Args:
        forest: The trees.
        sets: Training and held-out samples.

    Returns:
        The test.
    """
    train, holdout = sets.train.x.flatten(1).double().numpy(), sets.holdout
    if holdout is None or train.shape[1] != forest.columns:
        reason = "there are no held-out samples with the columns of the trees"
        return TargetTest(VALUES, n=train.size, reason=reason)
    held_out = holdout.x.flatten(1).double().numpy()
    return compare_stored_values(
        count_stored_values(forest, train),
        count_stored_values(forest, held_out),
        cells=train.size,
        tests=2 * QUESTIONS_OF_TESTS,
    )


def compare_with_targets(audit: Audit, table: RecoveredTable) -> TargetTest:
    """Compare the recovered targets with those of training and held-out samples.

    Args:
        audit: The audit.
        table: The recovered table.

    Returns:
        The test.
    """
    case = audit.case
    assert case.train is not None
    what = "labels" if table.is_classifier else "targets"
    train, holdout = case.train, case.holdout
    if not table.targets.shape[1] or not has_targets(train):
        return TargetTest(what, n=len(train), reason="there are no targets to compare")
    values = table.targets[:, 0].numpy()
    y = train.y.double().reshape(len(train), -1)[:, 0].numpy()
    tests = 2 * QUESTIONS_OF_TESTS  # the other half of the level belongs to the rows
    if table.is_classifier:
        return compare_labels(values, y, tests, audit.request.seed)
    if holdout is None or not has_targets(holdout):
        return TargetTest(what, n=len(train), reason="there are no held-out targets")
    held_out = holdout.y.double().reshape(len(holdout), -1)[:, 0].numpy()
    return compare_targets(values, y, held_out, tests)


def _limited(sets: SampleSets) -> SampleSets:
    """Return as many training and held-out samples as can be compared in a short time.

    The comparison needs at least as many held-out samples as training samples.
    """
    train, holdout = sets.train, sets.holdout
    if holdout is None:
        return replace(sets, train=_random_subset(train, MAX_COMPARED))
    holdout = _random_subset(holdout, MAX_HELD_OUT)
    limit = min(MAX_COMPARED, max(len(holdout), MIN_HOLDOUT))
    limited = _random_subset(train, limit)
    notes = sets.notes
    if len(limited) < len(train):
        notes = (*notes, f"A random {limit} of {len(train)} training samples were compared.")
    return replace(sets, train=limited, holdout=holdout, notes=notes)


def _random_subset(samples: Dataset, limit: int) -> Dataset:
    if len(samples) <= limit:
        return samples
    generator = torch.Generator().manual_seed(0)
    return samples.take(torch.randperm(len(samples), generator=generator)[:limit].sort().values)


class RowComparison:
    """Compares recovered rows with training and held-out samples, column by column.

    Args:
        table: The recovered table.
        sets: Training and held-out samples.
        seed: Seed of the random subsets.
        subsets: Number of random subsets, at least 2000, because the strict level needs so many.
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
            seconds: Time for the test.
            level: The largest adjusted p-value that shows a leak.

        Returns:
            The test, None without enough held-out samples, and notes for the reader.
        """
        multipliers = torch.ones(len(self.candidates))
        tests, notes = run_tests(
            {NAME: CandidatePool(self.candidates, multipliers)},
            self.sets,
            self.seed,
            self.subsets,
            seconds,
            level=level,
            metric=DIGITS,
        )
        return tests.get(NAME), notes

    def scores(self, row: AttackOutcome, seconds: float, level: float) -> AttackScores:
        """Score the recovered rows, with everything that the report shows.

        Args:
            row: The row of the attack in the table of attacks.
            seconds: Time for the scores.
            level: The largest adjusted p-value that shows a leak.

        Returns:
            The scores.
        """
        train = self.sets.train
        start = time.monotonic()
        test, notes = self.test(seconds / 2, level)
        scores = score(
            self.candidates,
            train,
            self.sets.holdout,
            metrics=(),
            seed=self.seed,
            subsets=self.subsets,
            seconds=seconds - (time.monotonic() - start),
            calibration=None if test is None else test.control,
            deciding=DIGITS,
        )
        scores = scores.replace(
            notes=tuple(dict.fromkeys((*self.sets.notes, *notes, *scores.notes)))
        )
        evidence = self.evidence(scores, test)
        if test is None:
            empty = Findings(len(train), reason=scores.reason, metric=DIGITS.name)
            return AttackScores((row,), empty, NAME, scores, None, evidence)
        summary = findings({NAME: test}, len(train), self.grades(test), train.rows)
        summary = summary.replace(metric=DIGITS.name)
        row = row.replace(
            recovered=int(test.control.recovered.sum()),
            expected_by_chance=test.control.expected_by_chance,
            p_value=test.control.p_value,
            adjusted=test.adjusted,
            level=test.level,
            rule=test.rule,
        )
        return AttackScores((row,), summary, NAME, scores, None, evidence)

    def grades(self, test: AttackTest) -> dict[int, str]:
        """Grade each recovered row by its columns.

        - near-copy: nine in ten columns are right within 1% of the range, and the recovered row is nearer to
          the sample, by a quarter, than any held-out sample.
        - resemblance: the recovered row is nearer to the sample, by a quarter, than the medians of all
          held-out samples.
        - class-level: it is not.

        Args:
            test: The test of the rows.

        Returns:
            The grade of every recovered sample, by position of the sample.
        """
        rows = np.flatnonzero(test.control.recovered)
        holdout = self.sets.holdout
        if not test.survives or not len(rows) or holdout is None:
            return {}
        samples = self.sets.train.x[rows]
        recovered = self.candidates[test.control.candidate[rows]]
        error = as_array((recovered - samples).abs().clamp(max=1.0).mean(1))
        nearest = mean_error(samples, holdout.x).min(1)
        typical = mean_error(samples, holdout.x.nanmedian(0).values[None])[:, 0]
        right = count_right_columns(recovered, samples, NEAR)
        is_copy = (right >= NEAR_COLUMNS * samples.shape[1]) & (
            error <= MAX_DISTANCE_RATIO * nearest
        )
        resembles = error <= MAX_DISTANCE_RATIO * typical
        return {
            int(i): NEAR_COPY if copy else RESEMBLANCE if like else CLASS_LEVEL
            for i, copy, like in zip(rows, is_copy, resembles, strict=True)
        }

    def evidence(self, scores: Scores, test: AttackTest | None) -> Evidence:
        """Collect the rows that the report displays, those with the most right digits first.

        Args:
            scores: The scores of the rows.
            test: The test of the rows, None without held-out samples.

        Returns:
            Samples and values for the report.
        """
        train, holdout = self.sets.train, self.sets.holdout
        digits = [row.matches[DIGITS.name].score for row in scores.per_sample]
        values = torch.tensor([float("nan") if value is None else value for value in digits])
        order = values.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)[:300]
        nearest = None
        if holdout is not None:
            nearest = holdout.x[torch.from_numpy(mean_error(train.x[order], holdout.x).argmin(1))]
        return Evidence(
            index=order,
            x=train.x[order],
            values=values,
            null=torch.zeros(0) if test is None else held_out_matches(test, self.seed),
            null_sets=count_sets(len(train)),
            labels=tuple(
                "" if row.label is None else label_name(row.label, train)
                for row in scores.per_sample
            ),
            nearest_holdout=nearest,
            features=train.features or self.table.names,
            units=train.units,
            scale=train.scale,
            offset=train.offset,
            spread=torch.ones(train.x.shape[1]),
        )

    def reconstruction(self, knowledge: Knowledge) -> Reconstruction:
        """Return the recovered rows in the form in which the report shows candidates."""
        labels = torch.zeros(len(self.candidates))
        return Reconstruction.from_candidates(
            NAME, self.candidates, labels, torch.ones_like(labels), knowledge
        )


def _flat(samples: Dataset) -> Dataset:
    return samples.replace(x=samples.x.flatten(1))


def control_samples(train: int, holdout: int) -> int:
    """Return the number of training samples of a positive control.

    Args:
        train: Number of training samples of the audit.
        holdout: Number of held-out samples, on some of which a control is trained.

    Returns:
        The number of samples. At least ``MIN_HOLDOUT`` held-out samples remain for the test of the control.
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
    """Attack forests that memorize held-out samples, and count how many of them are detected."""
    table, train, holdout = audit.table, audit.case.train, audit.case.holdout
    start = time.monotonic()
    question = "reconstruction"
    reason = why_no_controls(audit.case, audit.request)
    if reason or table is None:
        return replace(audit, positive_controls=(PositiveControls(question, reason=reason),))
    assert holdout is not None
    assert train is not None
    sizes = []
    samples = control_samples(len(train), len(holdout))
    while samples >= MIN_CONTROL_SAMPLES and not audit.deadline.is_over:
        size = _test_controls(audit, holdout, samples)
        sizes.append(size)
        if size.suffices:
            break
        samples //= 2
    seconds = round(time.monotonic() - start, 3)
    controls = PositiveControls(
        question,
        tuple(sizes),
        "fully grown trees with the settings of scikit-learn",
        (NAME,),
        reason,
        seconds,
        subject=CONTROL_SUBJECT,
    )
    return replace(audit, positive_controls=(controls,))


def _test_controls(audit: Audit, holdout: Dataset, samples: int) -> ControlSize:
    counts, detected = [], 0
    for number in range(NETWORKS["reconstruction"]):
        generator = torch.Generator().manual_seed(1000 * audit.request.seed + number)
        order = torch.randperm(len(holdout), generator=generator)
        members, outsiders = holdout.take(order[:samples]), holdout.take(order[samples:])
        count, is_leak = _test_control(audit, members, outsiders, number)
        counts.append(count)
        detected += is_leak
    return ControlSize(samples, tuple(counts), detected, 0.0)


def _test_control(
    audit: Audit, members: Dataset, outsiders: Dataset, seed: int
) -> tuple[int, bool]:
    """Train a forest on members, and return how many of them are recovered and whether this shows a leak."""
    assert audit.case.forest is not None
    model = train_control(audit.case.forest, members, seed)
    knowledge = _knowledge_of_control(audit.case.knowledge, members)
    table = ForestAttack(seed=audit.request.seed, rows=False).run(model, knowledge)
    level = audit.negative_controls.level
    if table.is_classifier:
        y = members.y.double().numpy()
        test = compare_labels(table.targets[:, 0].numpy(), y, 2 * QUESTIONS_OF_TESTS, seed)
        return test.recovered, test.is_finding(level)
    comparison = RowComparison(table, SampleSets(members, outsiders), seed, audit.request.subsets)
    row_test, _ = comparison.test(audit.deadline.seconds_left, level)
    if row_test is None:
        return 0, False
    return int(row_test.control.recovered.sum()), row_test.survives


def _knowledge_of_control(knowledge: Knowledge, members: Dataset) -> Knowledge:
    """Return what the attacker knows of a control: the ranges of its columns, if those of the audit."""
    if knowledge.column_ranges is None:
        return knowledge
    x = members.x.flatten(1).double()
    return knowledge.replace(column_ranges=torch.stack([x.amin(0), x.amax(0)]))


def train_control(model: NamedForest, members: Dataset, seed: int) -> NamedForest:
    """Train a forest with fully grown trees, and remove what the file of the audited forest lacks.

    Args:
        model: The audited forest.
        members: The training samples.
        seed: Seed of the training.

    Returns:
        The forest of the control.
    """
    from sklearn import ensemble

    kind: Any = ensemble.RandomForestRegressor
    if model.forest.is_classifier:
        kind = ensemble.RandomForestClassifier
    y = members.y.double().numpy()
    fitted = kind(len(model.forest.trees), random_state=seed)
    fitted.fit(
        members.x.flatten(1).double().numpy(), y.astype(int) if model.forest.is_classifier else y
    )
    (control, *_) = read_forests(pickle_in_memory(fitted))
    first = model.forest.trees[0]
    fields = ("seed", "count", "weight", "impurity")
    missing = [name for name in fields if getattr(first, name) is None]
    return NamedForest(control.name, control.forest.without(*missing))
