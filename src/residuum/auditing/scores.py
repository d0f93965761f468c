"""Score the attacks of an audit: every deciding attack is one test, and all tests are judged together.

All tests share the same random held-out subsets, so that the significance level of 1% holds over all tests
(``evaluation/null.py``). The pictures, histogram and slider of the report show the strongest test.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from residuum import similarity
from residuum.auditing.controls import SampleSets
from residuum.auditing.evidence import collect_evidence
from residuum.auditing.outcomes import (
    CLASS_LEVEL,
    NEAR_COPY,
    RESEMBLANCE,
    AttackOutcome,
    Findings,
)
from residuum.auditing.questions import QUESTIONS_OF_TESTS
from residuum.auditing.result import Evidence
from residuum.auditing.schedule import AttackResults
from residuum.errors import InconclusiveError
from residuum.evaluation import Calibration, score
from residuum.evaluation.matching import METRICS, Array, Metric, ScoringData, prepare_scoring_data
from residuum.evaluation.null import SIGNIFICANCE, fewest_beyond_chance, step_down
from residuum.evaluation.scoring import (
    DECIDING,
    CandidatePool,
    all_candidates,
    calibrate_metric,
    count_affordable_subsets,
    join_pools,
    selected_candidates,
)
from residuum.networks.network import Network
from residuum.records import Dataset, Record, Scores
from residuum.theory.kkt import evaluate

# A reconstruction is closer to a sample than a public image is if its 1 - NCC is at most this share of the
# 1 - NCC of the public image. We chose the value on digits: of two means of a class, one is closer by a
# quarter in one of a hundred cases, by chance.
MAX_DISTANCE_RATIO = 0.75


@dataclass(frozen=True)
class AttackTest:
    """The candidates of one attack, compared with the training set.

    Attributes:
        field: The training samples, the held-out samples and the candidates.
        gain: Similarity of each candidate to each sample.
        control: Number of samples that the candidates recover, compared with held-out subsets.
        adjusted: P-value adjusted over all tests of the audit, including the test of membership.
        level: The largest adjusted p-value that shows a leak.
        metric: Name of the metric of the similarity.
    """

    field: ScoringData
    gain: Array
    control: Calibration
    adjusted: float = 1.0
    level: float = SIGNIFICANCE
    metric: str = DECIDING

    @property
    def survives(self) -> bool:
        """Whether the attack recovers more samples than expected by chance over all tests."""
        return self.adjusted <= self.level

    @property
    def rule(self) -> str:
        """The condition under which a sample counts as recovered, such as "ncc > 0.83"."""
        return f"{self.metric} > {self.control.threshold:.3g}"


@dataclass(frozen=True, eq=False)
class AttackScores(Record):
    """The scores of all attacks.

    Attributes:
        attacks: One row per attack, with its counts.
        findings: What the tests of all attacks recovered together, None without samples.
        displayed_attack: Name of the strongest attack, which the report displays.
        scores: Scores of the strongest attack.
        selected: Scores of the candidates that the attacks selected themselves.
        evidence: Samples and values that the report displays.
    """

    attacks: tuple[AttackOutcome, ...]
    findings: Findings | None = None
    displayed_attack: str = ""
    scores: Scores | None = None
    selected: Scores | None = None
    evidence: Evidence | None = None


def run_tests(
    pools: dict[str, CandidatePool],
    sets: SampleSets,
    seed: int,
    subsets: int,
    seconds: float,
    *,
    level: float = SIGNIFICANCE,
    metric: Metric = METRICS[DECIDING],
) -> tuple[dict[str, AttackTest], list[str]]:
    """Test the candidates of every attack on common held-out subsets.

    Args:
        pools: Candidates of each attack, by name of the attack.
        sets: Training and held-out samples.
        seed: Seed that draws the held-out subsets.
        subsets: Number of held-out subsets. Fewer are drawn if the time is short.
        seconds: Time for the tests. A minimum number of subsets is drawn even if this takes longer.
        level: The largest adjusted p-value that shows a leak.
        metric: The metric by which a sample counts as recovered.

    Returns:
        The tests by name of the attack, and notes for the reader. There are no tests without held-out
        samples.

    Raises:
        InconclusiveError: If there is only one attack and its candidates cannot be compared with the samples.
    """
    notes = list[str]()
    problems: dict[str, tuple[ScoringData, Array]] = {}
    for name, pool in pools.items():
        messages: list[str] = []
        try:
            field = prepare_scoring_data(pool.x, sets.train, sets.holdout, messages, seed=seed)
        except InconclusiveError as problem:
            if len(pools) == 1:
                raise
            notes.append(f"{name}: {problem.message}")
            continue
        notes += [message for message in messages if message not in notes]
        if field.holdout_size:
            problems[name] = field, field.gain(metric)
    work = [(metric, *problem) for problem in problems.values()]
    subset_count = count_affordable_subsets(work, seed, subsets, seconds)
    if problems and subset_count < subsets:
        notes.append(f"{subset_count} of {subsets} subsets drawn: time budget exhausted")
    controls = {
        name: calibrate_metric(metric, *problem, seed, subset_count)
        for name, problem in problems.items()
    }
    if not controls:
        return {}, notes
    p_values = step_down(np.stack([control.excess for control in controls.values()]))
    adjusted = np.minimum(1.0, QUESTIONS_OF_TESTS * p_values)
    return {
        name: AttackTest(
            *problems[name],
            control,
            float(p) if control.recovered.any() else 1.0,
            level,
            metric.name,
        )
        for (name, control), p in zip(controls.items(), adjusted, strict=True)
    }, notes


def findings(
    tests: dict[str, AttackTest],
    n: int,
    graded: dict[int, str] | None = None,
    row_numbers: Sequence[int] | None = None,
) -> Findings:
    """Combine the tests of all attacks. If no test shows a leak, no sample counts as recovered.

    A sample counts once even if several attacks recover it, in the training set and in the held-out subsets
    alike. Only attacks whose test shows a leak are combined. If there are none, the number expected by chance
    is that of all attacks together.

    Args:
        tests: The test of each attack, by name of the attack.
        n: Number of training samples.
        graded: Grade of every recovered sample, by position of the sample.
        row_numbers: Row of each sample in the user's file. By default the position of the sample.

    Returns:
        The number of recovered samples, with its chance level, interval and p-value.
    """
    numbers = range(n) if row_numbers is None else row_numbers
    surviving = {name: test for name, test in tests.items() if test.survives}
    matched = [test.control.recovered for test in surviving.values()]
    recovered = np.any(matched or [np.zeros(n, bool)], 0)
    chance = np.any([test.control.chance for test in (surviving or tests).values()], 0)
    expected, count = float(chance.sum() / len(chance)), int(recovered.sum())
    excess = np.stack([test.control.excess for test in tests.values()])
    level = next((test.level for test in tests.values()), SIGNIFICANCE)
    beyond = [
        fewest_beyond_chance(excess, test.control.own_excess, i, level / QUESTIONS_OF_TESTS)
        for i, (name, test) in enumerate(tests.items())
        if name in surviving
    ]
    grades = list((graded or {}).values())
    return Findings(
        n=n,
        recovered=count,
        expected_by_chance=expected,
        interval=(float(min(max(beyond, default=0), count)), float(count)),
        p_value=min(test.adjusted for test in tests.values()),
        level=level,
        metric=DECIDING,
        rule=", ".join(dict.fromkeys(test.rule for test in (surviving or tests).values())),
        tests=len(tests),
        survivors=tuple(surviving),
        samples=tuple(numbers[int(i)] for i in np.flatnonzero(recovered)),
        grades={grade: grades.count(grade) for grade in dict.fromkeys(grades)},
    )


def grades(test: AttackTest, labels: Array | None) -> dict[int, str]:
    """Grade each recovered sample: how much closer is its reconstruction than held-out samples?

    - near-copy: the reconstruction is closer to the sample, by a quarter, than any held-out sample and than
      the held-out mean of the class of the sample.
    - resemblance: the reconstruction is closer, by a quarter, than the held-out mean of the class.
    - class-level: the reconstruction is not closer, by a quarter, than the held-out mean of the class.

    Args:
        test: The test of one attack.
        labels: Labels of training and held-out samples.

    Returns:
        The grade of every recovered sample, by position of the sample.
    """
    field = test.field
    samples, pool = field.samples[: field.n], field.samples[field.n :]
    graded: dict[int, str] = {}
    rows = np.flatnonzero(test.control.recovered)
    if not len(rows):
        return graded
    nearest = similarity.ncc(samples[rows], pool).amax(1)
    for i, neighbor in zip(rows.tolist(), nearest.tolist(), strict=True):
        same_class = (
            pool if labels is None else pool[torch.from_numpy(labels[field.n :] == labels[i])]
        )
        mean = (same_class if len(same_class) else pool).mean(0)
        typical = float(similarity.ncc(samples[i : i + 1], mean[None]))
        missing = 1 - float(test.control.value[i])
        resembles = missing <= MAX_DISTANCE_RATIO * (1 - typical)
        is_copy = resembles and missing <= MAX_DISTANCE_RATIO * (1 - neighbor)
        graded[i] = NEAR_COPY if is_copy else RESEMBLANCE if resembles else CLASS_LEVEL
    return graded


def score_attacks(
    network: Network,
    results: AttackResults,
    sets: SampleSets,
    seed: int,
    subsets: int,
    seconds: float,
    level: float = SIGNIFICANCE,
) -> AttackScores:
    """Score the candidates of all attacks against training and held-out samples.

    The tests, which decide the verdict, come first. Baselines and self-selected candidates follow, then the
    metrics of published papers. If the time is short, scores that do not decide are left out.

    Args:
        network: The audited network.
        results: Outputs of the attacks.
        sets: Training and held-out samples.
        seed: Seed that draws the held-out subsets.
        subsets: Number of held-out subsets.
        seconds: Time until the clock stops the audit.
        level: The largest adjusted p-value that shows a leak.

    Returns:
        The scores of all attacks.
    """
    attacked = results.reconstructions
    if not attacked:
        return AttackScores(results.outcomes)
    start, train = time.monotonic(), sets.train
    pools = {result.attack: all_candidates(result) for result in attacked}
    tests, notes = run_tests(pools, sets, seed, subsets, seconds / 2, level=level)
    test_seconds = time.monotonic() - start
    model = network.module
    outputs = evaluate(model, train.x.to(next(model.parameters()).dtype))

    def remaining() -> float:
        return seconds - (time.monotonic() - start)

    def scored(pool: CandidatePool, **options: Any) -> Scores:
        options |= {"multipliers": pool.lam, "outputs": outputs}
        return score(pool.x, train, sets.holdout, seed=seed, subsets=subsets, **options)

    def score_if_time(name: str, pool: CandidatePool) -> Scores | None:
        """Score candidates that do not decide the verdict. Return None if the time is too short."""
        tested = sum(len(tested.x) for tested in pools.values())
        if len(pool.x) and test_seconds * len(pool.x) / tested <= remaining():
            return scored(pool, metrics=[DECIDING], seconds=remaining())
        if len(pool.x):
            notes.append(f"not scored separately, because the time budget is exhausted: {name}")
        return None

    baselines = {b.attack: score_if_time(b.attack, all_candidates(b)) for b in results.baselines}
    chosen = join_pools([selected_candidates(result) for result in attacked])
    selected = score_if_time("self-selected candidates", chosen)
    rows = tuple(
        _with_counts(row, tests.get(row.name), baselines.get(row.name)) for row in results.outcomes
    )
    if not tests:
        scores = scored(pools[attacked[0].attack], seconds=remaining())
        scores = scores.replace(notes=tuple(dict.fromkeys((*notes, *scores.notes))))
        empty = Findings(len(train), reason=scores.reason, metric=DECIDING)
        evidence = collect_evidence(sets, scores, outputs, None, seed)
        return AttackScores(rows, empty, attacked[0].attack, scores, selected, evidence)
    strongest = strongest_test(tests)
    scores = scored(pools[strongest], calibration=tests[strongest].control, seconds=remaining())
    scores = scores.replace(notes=tuple(dict.fromkeys((*notes, *scores.notes))))
    evidence = collect_evidence(sets, scores, outputs, tests[strongest], seed)
    summary = findings(tests, len(train), _worst_grades(tests), train.rows)
    matches = match_set_aside(sets.set_aside, pools, tests)
    summary = summary.replace(set_aside_matches=matches)
    return AttackScores(rows, summary, strongest, scores, selected, evidence)


def _worst_grades(tests: dict[str, AttackTest]) -> dict[int, str]:
    """Return the strongest grade that each sample has in any test that shows a leak."""
    order = (CLASS_LEVEL, RESEMBLANCE, NEAR_COPY)
    graded: dict[int, str] = {}
    for test in tests.values():
        if test.survives:
            for i, grade in grades(test, test.field.strata).items():
                graded[i] = max(graded.get(i, CLASS_LEVEL), grade, key=order.index)
    return graded


def match_set_aside(
    samples: Dataset | None, pools: dict[str, CandidatePool], tests: dict[str, AttackTest]
) -> tuple[int, ...]:
    """Return the set-aside samples that a candidate of some attack matches.

    Args:
        samples: Training samples that were set aside because they also occur in the held-out set, None if
            there are none.
        pools: Candidates of each attack, by name of the attack.
        tests: The test of each attack, whose threshold decides what matches.

    Returns:
        Row numbers of the matched samples.
    """
    if samples is None:
        return ()
    matched = torch.zeros(len(samples), dtype=torch.bool)
    for name, test in tests.items():
        candidates = pools[name].x.double()
        candidates = candidates[candidates.flatten(1).isfinite().all(1)]
        nearest = similarity.ncc(samples.x.double(), candidates.reshape(-1, *samples.shape)).amax(1)
        matched |= nearest > test.control.threshold
    return tuple(samples.take(matched).rows) if bool(matched.any()) else ()


def strongest_test(tests: dict[str, AttackTest]) -> str:
    """Return the attack with the smallest adjusted p-value. Ties: smallest p-value, then most samples."""

    def rank(name: str) -> tuple[float, float, int]:
        test = tests[name]
        return test.adjusted, test.control.p_value, -int(test.control.recovered.sum())

    return min(tests, key=rank)


def _with_counts(
    row: AttackOutcome, test: AttackTest | None, baseline: Scores | None
) -> AttackOutcome:
    """Return the row of an attack with the counts of its test, or the row of a baseline with its counts."""
    if test is not None:
        return row.replace(
            recovered=int(test.control.recovered.sum()),
            expected_by_chance=test.control.expected_by_chance,
            p_value=test.control.p_value,
            adjusted=test.adjusted,
            level=test.level,
            rule=test.rule,
        )
    if baseline is None:
        return row
    return row.replace(
        recovered=baseline.recovered,
        expected_by_chance=baseline.expected_by_chance,
        p_value=baseline.p_value,
        rule=baseline.rule,
    )
