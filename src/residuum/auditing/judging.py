"""The score stage: every deciding attack is a test of its own, and all tests are judged together.

The tests share one set of permuted subsets, so that the level of 1% holds over all of them
(``evaluation/null.py``). What is shown of it, pictures, histogram and slider, is of the strongest test.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residuum import similarity
from residuum.auditing.controls import Claim
from residuum.auditing.result import Evidence
from residuum.auditing.stages import Attacked
from residuum.auditing.verdict import CLASS_LIKE, NEAR_COPY, RESEMBLES, AttackOutcome, Findings
from residuum.checkpoints import build_model
from residuum.errors import InconclusiveError
from residuum.evaluation import Calibration, score
from residuum.evaluation.matching import Array, Field, greedy_in_sets, lay_out
from residuum.evaluation.metrics import METRICS
from residuum.evaluation.null import SIGNIFICANCE, count_interval, draw_sets, step_down
from residuum.evaluation.scoring import (
    DECIDING,
    CandidatePool,
    affordable,
    control_of,
    joined,
    label_name,
    margins,
    selected_pool,
    whole_pool,
)
from residuum.records import Checkpoint, Scores
from residuum.theory.kkt import evaluate

MOST_SETS, MOST_VALUES = 100, 5000  # held-out sets in the report, and values it carries of them
MOST_SHOWN = 300
# Of what a public picture leaves of a sample (1 - ncc), the most that a better one may leave. Fixed on
# digits: of two means of a class one is the nearer by chance, by a quarter in one case of a hundred.
NEARER = 0.75


@dataclass(frozen=True)
class OneTest:
    """The candidates of one attack against the training set; adjusted: p over all tests together."""

    field: Field
    gain: Array
    control: Calibration
    adjusted: float = 1.0

    @property
    def survives(self) -> bool:
        """Whether it found more than chance gives all tests together."""
        return self.adjusted <= SIGNIFICANCE

    @property
    def rule(self) -> str:
        """What counts as recovered here."""
        return f"{DECIDING} > {self.control.threshold:.3g}"


def run_tests(
    pools: dict[str, CandidatePool],
    claim: Claim,
    seed: int,
    subsets: int,
    seconds: float,
    *,
    must: bool = True,
) -> tuple[dict[str, OneTest], list[str]]:
    """Every pool of candidates as a test on common subsets; none without a control, and notes.

    Fewer subsets than asked for fit ``seconds``; where even the fewest do not, they are drawn all the
    same, unless they need not (``must``): then there are no tests.
    """
    metric, notes = METRICS[DECIDING], list[str]()
    laid: dict[str, tuple[Field, Array]] = {}
    for name, pool in pools.items():
        said: list[str] = []
        try:
            field = lay_out(
                pool.x,
                claim.train,
                claim.pool,
                candidate_labels=None,
                match_labels=True,
                same_label=False,
                seed=seed,
                notes=said,
            )
        except InconclusiveError as problem:
            if len(pools) == 1:
                raise
            notes.append(f"{name}: {problem.message}")
            continue
        notes += [note for note in said if note not in notes]
        if field.pool:
            laid[name] = field, field.gain(metric)
    drawn = affordable(
        [(metric, *part) for part in laid.values()], seed, subsets, seconds, fewest=must
    )
    if not drawn:
        return {}, [*notes, "not judged, for want of time"]
    if laid and drawn < subsets:
        notes.append(f"{drawn} of {subsets} subsets drawn, for want of time")
    controls = {name: control_of(metric, *part, seed, drawn) for name, part in laid.items()}
    if not controls:
        return {}, notes
    adjusted = step_down(np.stack([one.excess for one in controls.values()]))
    return {
        name: OneTest(*laid[name], one, float(p) if one.recovered.any() else 1.0)
        for (name, one), p in zip(controls.items(), adjusted, strict=True)
    }, notes


def findings(tests: dict[str, OneTest], n: int, graded: dict[int, str] | None = None) -> Findings:
    """What all tests found together. Without a survivor nothing is recovered, whatever one matched."""
    alive = {name: one for name, one in tests.items() if one.survives}
    recovered = np.any([one.control.recovered for one in alive.values()] or [np.zeros(n, bool)], 0)
    chance = np.any([one.control.chance for one in (alive or tests).values()], 0)
    expected, count = float(chance.sum() / len(chance)), int(recovered.sum())
    low, high = count_interval(count, n)
    grades = list((graded or {}).values())
    return Findings(
        n=n,
        recovered=count,
        expected_by_chance=expected,
        interval=(low - expected, high - expected),
        p_value=min(one.adjusted for one in tests.values()),
        metric=DECIDING,
        rule=", ".join(dict.fromkeys(one.rule for one in (alive or tests).values())),
        tests=len(tests),
        survivors=tuple(alive),
        samples=tuple(np.flatnonzero(recovered).tolist()),
        grades={grade: grades.count(grade) for grade in dict.fromkeys(grades)},
    )


def grades(test: OneTest, labels: Array | None) -> dict[int, str]:
    """How near each recovered sample came, by what public samples of its kind would give.

    near-copy: nearer to the sample, by a quarter, than any held-out sample and than the mean of its
    class among them; resembles: so much nearer than that mean; class-like: not even that. Nearness is
    the deciding metric.
    """
    field = test.field
    samples, pool = field.samples[: field.n], field.samples[field.n :]
    found: dict[int, str] = {}
    rows = np.flatnonzero(test.control.recovered)
    if not len(rows):
        return found
    nearest = similarity.ncc(samples[rows], pool).amax(1)
    for i, neighbour in zip(rows.tolist(), nearest.tolist(), strict=True):
        alike = pool if labels is None else pool[torch.from_numpy(labels[field.n :] == labels[i])]
        mean = (alike if len(alike) else pool).mean(0)
        typical = float(similarity.ncc(samples[i : i + 1], mean[None]))
        left = 1 - float(test.control.value[i])
        own = left <= NEARER * (1 - typical)
        near = own and left <= NEARER * (1 - neighbour)
        found[i] = NEAR_COPY if near else RESEMBLES if own else CLASS_LIKE
    return found


@dataclass(frozen=True)
class Judged:
    """Every attack by itself, all together, and what is shown: fields of ``AuditResult``."""

    attacks: tuple[AttackOutcome, ...]
    findings: Findings | None = None
    shown: str = ""
    scores: Scores | None = None
    selected: Scores | None = None
    evidence: Evidence | None = None


def judge(
    checkpoint: Checkpoint,
    attacked: Attacked,
    claim: Claim | None,
    seed: int,
    subsets: int,
    seconds: float,
) -> Judged:
    """Score what the attacks found.

    The tests are made whatever the clock says. Baselines and the attacks' own choice come after them,
    then the published metrics, as far as ``seconds`` reach.
    """
    if claim is None or not attacked.found:
        return Judged(attacked.outcomes)
    start, train = time.monotonic(), claim.train
    pools = {part.attack: whole_pool(part) for part in attacked.found}
    tests, notes = run_tests(pools, claim, seed, subsets, seconds / 2)
    took = time.monotonic() - start
    model = build_model(checkpoint)
    outputs = evaluate(model, train.x.to(next(model.parameters()).dtype))

    def left() -> float:
        return seconds - (time.monotonic() - start)

    def scored(pool: CandidatePool, **options: Any) -> Scores:
        return score(
            pool.x,
            train,
            claim.pool,
            candidate_labels=pool.labels,
            multipliers=pool.lam,
            outputs=outputs,
            seed=seed,
            subsets=subsets,
            **options,
        )

    def beside(name: str, pool: CandidatePool) -> Scores | None:
        """The deciding metric of candidates that do not decide, unless the clock forbids."""
        tested = sum(len(one.x) for one in pools.values())
        if len(pool.x) and took * len(pool.x) / tested <= left():
            return scored(pool, metrics=[DECIDING], seconds=left())
        if len(pool.x):
            notes.append(f"not scored by itself, for want of time: {name}")
        return None

    baselines = {part.attack: beside(part.attack, whole_pool(part)) for part in attacked.baselines}
    selected = beside(
        "the attacks' own choice", joined([selected_pool(part) for part in attacked.found])
    )
    rows = tuple(
        _with_counts(row, tests.get(row.name), baselines.get(row.name)) for row in attacked.outcomes
    )
    if not tests:
        scores = scored(pools[attacked.found[0].attack], seconds=left())
        scores = scores.replace(notes=tuple(dict.fromkeys((*notes, *scores.notes))))
        found = Findings(len(train), reason=scores.reason, metric=DECIDING)
        shown = evidence(claim, scores, outputs, None, seed)
        return Judged(rows, found, attacked.found[0].attack, scores, selected, shown)
    strongest = strongest_of(tests)
    graded: dict[int, str] = {}
    order = (CLASS_LIKE, RESEMBLES, NEAR_COPY)
    for one in tests.values():
        if one.survives:
            for i, grade in grades(one, one.field.strata).items():
                graded[i] = max(graded.get(i, CLASS_LIKE), grade, key=order.index)
    scores = scored(pools[strongest], before=tests[strongest].control, seconds=left())
    scores = scores.replace(notes=tuple(dict.fromkeys((*notes, *scores.notes))))
    shown = evidence(claim, scores, outputs, tests[strongest], seed)
    found = findings(tests, len(train), graded)
    return Judged(rows, found, strongest, scores, selected, shown)


def strongest_of(tests: dict[str, OneTest]) -> str:
    """The test with the least p; several share the least that there is: then the one with most to show."""

    def rank(name: str) -> tuple[float, float, int]:
        one = tests[name]
        return one.adjusted, one.control.p_value, -int(one.control.recovered.sum())

    return min(tests, key=rank)


def _with_counts(row: AttackOutcome, test: OneTest | None, beside: Scores | None) -> AttackOutcome:
    if test is not None:
        return row.replace(
            recovered=int(test.control.recovered.sum()),
            expected_by_chance=test.control.expected_by_chance,
            p_value=test.control.p_value,
            adjusted=test.adjusted,
            rule=test.rule,
        )
    if beside is None:
        return row
    return row.replace(
        recovered=beside.recovered,
        expected_by_chance=beside.expected_by_chance,
        p_value=beside.p_value,
        rule=beside.rule,
    )


def evidence(
    claim: Claim, scores: Scores, outputs: Tensor, test: OneTest | None, seed: int
) -> Evidence:
    """The samples worth showing, best first, and the values behind histogram and slider."""
    train = claim.train
    found = [row.matches[scores.deciding].score for row in scores.per_sample]
    values = torch.tensor([float("nan") if value is None else value for value in found])
    order = values.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
    shown = order[:MOST_SHOWN]
    single = outputs.shape[1] == 1
    flat = train.x.flatten(1).double()
    spread = (flat.quantile(0.95, 0) - flat.quantile(0.05, 0)).reshape(train.shape)
    near = None
    if claim.pool is not None and claim.pool.shape == train.shape:
        alike = similarity.ncc(flat[shown], claim.pool.x.flatten(1).double())
        near = claim.pool.x[alike.argmax(1)]
    return Evidence(
        index=shown,
        x=train.x[shown],
        values=values,
        null=torch.zeros(0) if test is None else null_values(test, seed),
        null_sets=null_sets(len(train)),
        mean=train.mean,
        outputs=outputs[:, 0] if single else margins(outputs, train.y),
        output_name="network output" if single else "margin",
        labels=tuple(
            "" if row.label is None else label_name(row.label, train) for row in scores.per_sample
        ),
        near=near,
        features=train.features,
        units=train.units,
        scale=train.scale,
        offset=train.offset,
        spread=spread if train.x.ndim == 2 else None,
    )


def null_sets(n: int) -> int:
    """How many held-out sets of n samples the report draws: as many as it can carry, at least 10."""
    return max(10, min(MOST_SETS, MOST_VALUES // n))


def null_values(test: OneTest, seed: int) -> Tensor:
    """Values of the matches of held-out sets of the training set's size. (sets * n,)."""
    field, gain, n = test.field, test.gain, test.field.n
    labels = np.zeros(gain.shape[1], dtype=int) if field.strata is None else field.strata
    rng = np.random.default_rng((seed, 2))  # a stream of its own: the test's draws stay as they are
    sets = n + draw_sets(labels[n:], labels[:n], null_sets(n), rng)
    candidate = greedy_in_sets(gain, sets)
    matched = candidate >= 0
    return torch.from_numpy(gain[candidate[matched], sets[matched]])
