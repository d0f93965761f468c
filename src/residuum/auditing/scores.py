"""Score the attacks of an audit by statistical tests.

Each attack except baselines is tested: does it recover more training samples than held-out samples? All tests
use the same random subsets of the held-out set. Therefore the probability that any of the tests shows a leak
by chance can be limited to 1% (``evaluation/null.py``). The report shows the strongest attack.
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

# The distance of two images is 1 - NCC (normalized cross-correlation). A reconstruction counts as closer to
# a sample than another image only if its distance is at most this share of the other image's distance. For
# two mean images of a class of digits, this happens by chance in 1% of the cases.
MAX_DISTANCE_RATIO = 0.75


@dataclass(frozen=True)
class AttackTest:
    """The test of one attack: its reconstructions, compared with training and held-out samples.

    Attributes:
        field: The training samples, the held-out samples and the candidates (reconstructed samples).
        gain: Similarity of each candidate to each sample.
        control: Number of training samples that the candidates recover, and the same number for random
            subsets of the held-out set.
        adjusted: P-value adjusted for all tests of the audit, including the test of membership.
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
        """Whether the test shows a leak, with a p-value that is adjusted for all tests of the audit."""
        return self.adjusted <= self.level

    @property
    def rule(self) -> str:
        """The condition under which a sample counts as recovered, such as "ncc > 0.83"."""
        return f"{self.metric} > {self.control.threshold:.3g}"


@dataclass(frozen=True, eq=False)
class AttackScores(Record):
    """The scores of all attacks.

    Attributes:
        attacks: One row per attack, with the number of samples that the attack recovers.
        findings: The number of samples that all attacks together recovered, with its tests. None if there are
            no samples.
        displayed_attack: Name of the strongest attack, which the report displays.
        scores: Scores of the strongest attack.
        selected: Scores of the candidates that the attacks selected as likely training samples.
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
    """Test the reconstructions of every attack, with the same random subsets of held-out samples.

    Args:
        pools: Candidates (reconstructed samples) of each attack, by name of the attack.
        sets: Training and held-out samples.
        seed: Seed that draws the held-out subsets.
        subsets: Number of held-out subsets. If the time is short, fewer subsets are drawn.
        seconds: Time limit of the tests in seconds. At least 200 subsets are drawn, even if this takes
            longer.
        level: The largest adjusted p-value that shows a leak.
        metric: The metric by which a sample counts as recovered.

    Returns:
        The tests by name of the attack, and notes for the reader. There are no tests without held-out
        samples.

    Raises:
        InconclusiveError: If there is only one attack and its candidates cannot be compared with the samples.
    """
    notes = list[str]()
    data_and_similarity: dict[str, tuple[ScoringData, Array]] = {}
    for name, pool in pools.items():
        messages: list[str] = []
        try:
            scoring_data = prepare_scoring_data(
                pool.x, sets.train, sets.holdout, messages, seed=seed
            )
        except InconclusiveError as problem:
            if len(pools) == 1:
                raise
            notes.append(f"{name}: {problem.message}")
            continue
        notes += [message for message in messages if message not in notes]
        if scoring_data.holdout_size:
            data_and_similarity[name] = scoring_data, scoring_data.gain(metric)
    calibration_inputs = [(metric, *pair) for pair in data_and_similarity.values()]
    subset_count = count_affordable_subsets(calibration_inputs, seed, subsets, seconds)
    if data_and_similarity and subset_count < subsets:
        notes.append(f"{subset_count} of {subsets} subsets drawn: time budget exhausted")
    calibrations = {
        name: calibrate_metric(metric, *pair, seed, subset_count)
        for name, pair in data_and_similarity.items()
    }
    if not calibrations:
        return {}, notes
    p_values = step_down(np.stack([c.excess for c in calibrations.values()]))
    adjusted_p_values = np.minimum(1.0, QUESTIONS_OF_TESTS * p_values)
    return {
        name: AttackTest(
            *data_and_similarity[name],
            calibration,
            float(p) if calibration.recovered.any() else 1.0,
            level,
            metric.name,
        )
        for (name, calibration), p in zip(calibrations.items(), adjusted_p_values, strict=True)
    }, notes


def findings(
    tests: dict[str, AttackTest],
    n: int,
    graded: dict[int, str] | None = None,
    row_numbers: Sequence[int] | None = None,
) -> Findings:
    """Count the training samples that all attacks together recovered, from the tests of the attacks.

    Only attacks whose test shows a leak count. If several attacks recover the same sample, this sample counts
    once, both in the training set and in the held-out subsets. If no test shows a leak, no sample counts as
    recovered, and the number expected by chance is computed from all attacks together.

    Args:
        tests: The test of each attack, by name of the attack.
        n: Number of training samples.
        graded: Grade of every recovered sample, by position of the sample.
        row_numbers: Row of each sample in the user's file. By default the position of the sample.

    Returns:
        The number of recovered samples, with the number expected by chance, the confidence interval and the
        p-value.
    """
    sample_rows = range(n) if row_numbers is None else row_numbers
    significant_tests = {name: test for name, test in tests.items() if test.survives}
    recovered_masks = [test.control.recovered for test in significant_tests.values()]
    recovered = np.any(recovered_masks or [np.zeros(n, bool)], 0)
    recovered_by_chance = np.any(
        [test.control.chance for test in (significant_tests or tests).values()], 0
    )
    expected, count = (
        float(recovered_by_chance.sum() / len(recovered_by_chance)),
        int(recovered.sum()),
    )
    test_statistics = np.stack([test.control.excess for test in tests.values()])
    significance_level = next((test.level for test in tests.values()), SIGNIFICANCE)
    lower_limits = [
        fewest_beyond_chance(
            test_statistics, test.control.own_excess, i, significance_level / QUESTIONS_OF_TESTS
        )
        for i, (name, test) in enumerate(tests.items())
        if name in significant_tests
    ]
    sample_grades = list((graded or {}).values())
    return Findings(
        n=n,
        recovered=count,
        expected_by_chance=expected,
        interval=(float(min(max(lower_limits, default=0), count)), float(count)),
        p_value=min(test.adjusted for test in tests.values()),
        level=significance_level,
        metric=DECIDING,
        rule=", ".join(dict.fromkeys(test.rule for test in (significant_tests or tests).values())),
        tests=len(tests),
        survivors=tuple(significant_tests),
        samples=tuple(sample_rows[int(i)] for i in np.flatnonzero(recovered)),
        grades={grade: sample_grades.count(grade) for grade in dict.fromkeys(sample_grades)},
    )


def grades(test: AttackTest, labels: Array | None) -> dict[int, str]:
    """Grade each recovered sample by how much closer its reconstruction is than held-out samples.

    The distance of two samples is 1 - NCC. The class mean is the mean of the held-out samples of the same
    class.

    - near-copy: the distance of the reconstruction is at most 3/4 of two distances: that of the nearest
      held-out sample, and that of the class mean.
    - resemblance: the distance of the reconstruction is at most 3/4 of the distance of the class mean.
    - class-level: the distance of the reconstruction is more than 3/4 of the distance of the class mean.

    Args:
        test: The test of one attack.
        labels: Labels of training and held-out samples.

    Returns:
        The grade of every recovered sample, by position of the sample.
    """
    scoring_data = test.field
    samples, holdout_samples = (
        scoring_data.samples[: scoring_data.n],
        scoring_data.samples[scoring_data.n :],
    )
    grade_by_position: dict[int, str] = {}
    recovered_positions = np.flatnonzero(test.control.recovered)
    if not len(recovered_positions):
        return grade_by_position
    nearest_similarities = similarity.ncc(samples[recovered_positions], holdout_samples).amax(1)
    for i, nearest_similarity in zip(
        recovered_positions.tolist(), nearest_similarities.tolist(), strict=True
    ):
        class_samples = (
            holdout_samples
            if labels is None
            else holdout_samples[torch.from_numpy(labels[scoring_data.n :] == labels[i])]
        )
        class_mean = (class_samples if len(class_samples) else holdout_samples).mean(0)
        mean_similarity = float(similarity.ncc(samples[i : i + 1], class_mean[None]))
        distance = 1 - float(test.control.value[i])
        resembles = distance <= MAX_DISTANCE_RATIO * (1 - mean_similarity)
        is_copy = resembles and distance <= MAX_DISTANCE_RATIO * (1 - nearest_similarity)
        grade_by_position[i] = NEAR_COPY if is_copy else RESEMBLANCE if resembles else CLASS_LEVEL
    return grade_by_position


def score_attacks(
    network: Network,
    results: AttackResults,
    sets: SampleSets,
    seed: int,
    subsets: int,
    seconds: float,
    level: float = SIGNIFICANCE,
) -> AttackScores:
    """Compare the reconstructions of all attacks with training and held-out samples.

    The tests are run first, because they decide the verdict. Then baselines and self-selected candidates
    (candidates that an attack selected as likely training samples) are scored. The metrics of published
    papers are computed last. If the time is short, scores that do not decide the verdict are left out.

    Args:
        network: The audited network.
        results: Outputs of the attacks.
        sets: Training and held-out samples.
        seed: Seed that draws the held-out subsets.
        subsets: Number of held-out subsets.
        seconds: Seconds that are left until the time limit of the audit.
        level: The largest adjusted p-value that shows a leak.

    Returns:
        The scores of all attacks.
    """
    reconstructions = results.reconstructions
    if not reconstructions:
        return AttackScores(results.outcomes)
    start, train = time.monotonic(), sets.train
    pools = {result.attack: all_candidates(result) for result in reconstructions}
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
        """Score reconstructions that do not decide the verdict. Return None if too little time is left."""
        candidate_count = sum(len(tested_pool.x) for tested_pool in pools.values())
        if len(pool.x) and test_seconds * len(pool.x) / candidate_count <= remaining():
            return scored(pool, metrics=[DECIDING], seconds=remaining())
        if len(pool.x):
            notes.append(f"not scored separately, because the time budget is exhausted: {name}")
        return None

    baselines = {b.attack: score_if_time(b.attack, all_candidates(b)) for b in results.baselines}
    selected_pool = join_pools([selected_candidates(result) for result in reconstructions])
    selected_scores = score_if_time("self-selected candidates", selected_pool)
    outcomes_with_counts = tuple(
        _with_counts(row, tests.get(row.name), baselines.get(row.name)) for row in results.outcomes
    )
    if not tests:
        scores = scored(pools[reconstructions[0].attack], seconds=remaining())
        scores = scores.replace(notes=tuple(dict.fromkeys((*notes, *scores.notes))))
        untested_findings = Findings(len(train), reason=scores.reason, metric=DECIDING)
        evidence = collect_evidence(
            sets, scores, pools[reconstructions[0].attack].x, outputs, None, seed
        )
        return AttackScores(
            outcomes_with_counts,
            untested_findings,
            reconstructions[0].attack,
            scores,
            selected_scores,
            evidence,
        )
    strongest_attack = strongest_test(tests)
    scores = scored(
        pools[strongest_attack], calibration=tests[strongest_attack].control, seconds=remaining()
    )
    scores = scores.replace(notes=tuple(dict.fromkeys((*notes, *scores.notes))))
    evidence = collect_evidence(
        sets, scores, pools[strongest_attack].x, outputs, tests[strongest_attack], seed
    )
    combined_findings = findings(tests, len(train), _strongest_grades(tests), train.rows)
    set_aside_matches = match_set_aside(sets.set_aside, pools, tests)
    combined_findings = combined_findings.replace(set_aside_matches=set_aside_matches)
    return AttackScores(
        outcomes_with_counts, combined_findings, strongest_attack, scores, selected_scores, evidence
    )


def _strongest_grades(tests: dict[str, AttackTest]) -> dict[int, str]:
    """Return the grade of each training sample that attacks recovered, by position of the sample.

    Only attacks whose tests show a leak count. If several of these attacks recovered a sample, the strongest
    grade is returned.
    """
    grades_weakest_first = (CLASS_LEVEL, RESEMBLANCE, NEAR_COPY)
    graded: dict[int, str] = {}
    for test in tests.values():
        if test.survives:
            for i, grade in grades(test, test.field.strata).items():
                graded[i] = max(graded.get(i, CLASS_LEVEL), grade, key=grades_weakest_first.index)
    return graded


def match_set_aside(
    samples: Dataset | None, pools: dict[str, CandidatePool], tests: dict[str, AttackTest]
) -> tuple[int, ...]:
    """Return the set-aside samples (training samples that were not judged) that match some candidate.

    Args:
        samples: Training samples that were set aside because they also occur in the held-out set, None if
            there are none.
        pools: Candidates of each attack, by name of the attack.
        tests: The test of each attack. A candidate matches a sample if their similarity exceeds the threshold
            of the test.

    Returns:
        Row numbers of the matched samples.
    """
    if samples is None:
        return ()
    is_matched = torch.zeros(len(samples), dtype=torch.bool)
    for name, test in tests.items():
        candidates = pools[name].x.double()
        candidates = candidates[candidates.flatten(1).isfinite().all(1)]
        nearest_similarities = similarity.ncc(
            samples.x.double(), candidates.reshape(-1, *samples.shape)
        ).amax(1)
        is_matched |= nearest_similarities > test.control.threshold
    return tuple(samples.take(is_matched).rows) if bool(is_matched.any()) else ()


def strongest_test(tests: dict[str, AttackTest]) -> str:
    """Return the name of the attack with the smallest adjusted p-value.

    If adjusted p-values are equal, the attack with the smallest unadjusted p-value is returned. If these are
    also equal, it is the attack that recovers most samples.
    """

    def rank(name: str) -> tuple[float, float, int]:
        ranked_test = tests[name]
        return (
            ranked_test.adjusted,
            ranked_test.control.p_value,
            -int(ranked_test.control.recovered.sum()),
        )

    return min(tests, key=rank)


def _with_counts(
    row: AttackOutcome, test: AttackTest | None, baseline: Scores | None
) -> AttackOutcome:
    """Return the table row of an attack, extended by the number of samples that it recovers.

    The number comes from ``test``, or from the scores ``baseline`` if the attack is a baseline.
    """
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
