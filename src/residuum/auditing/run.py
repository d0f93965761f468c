"""From a network to a verdict: inspect, attack, select, score, certify, decide.

The attack stage is handed the checkpoint and the granted knowledge. Data and held-out samples are
checked for fit before it, and compared with only after it has ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from residuum import plugins
from residuum.attacks import PRESETS, AttackConfig
from residuum.attacks.state import Watcher
from residuum.auditing.budget import LEAST_SCORE, SCORE_SHARE, Batch, seconds_of
from residuum.auditing.controls import evidence
from residuum.auditing.inputs import Data, as_dataset, check_fit, fit_of, scale_notes, task_of
from residuum.auditing.result import AuditResult, Evidence
from residuum.auditing.stages import Attacked, AttackStage, certified
from residuum.auditing.verdict import AttackOutcome, assumptions, decide, limitations, opening
from residuum.checkpoints import as_checkpoint, build_model, inspect_checkpoint
from residuum.errors import InputError, did_you_mean
from residuum.evaluation import score
from residuum.evaluation.scoring import DECIDING, CandidatePool, joined, selected_pool, whole_pool
from residuum.records import Checkpoint, Dataset, Knowledge, Reconstruction, Scores
from residuum.records.rundir import environment
from residuum.theory.kkt import evaluate

if TYPE_CHECKING:
    from residuum.auditing.artifacts import AuditRun


def audit(
    model: Checkpoint | nn.Module | str | Path,
    *,
    data: Data | None = None,
    holdout: Data | Tensor | None = None,
    knowledge: Knowledge | None = None,
    budget: str | float = "1min",
    preset: str = "residuum",
    steps: int | None = None,
    seed: int = 0,
    subsets: int = 500,
    device: str = "cpu",
    task: str = "auto",
    arch: str | None = None,
    baselines: bool = True,
    batches: Sequence[Batch] = (),
    store: AuditRun | None = None,
    watch: Callable[[str], Watcher] | None = None,
    hashes: dict[str, str] | None = None,
    stage: Callable[[str], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> AuditResult:
    """Attack ``model`` from its weights alone and say whether its training data came back.

    data: the training samples as (x, y), a Dataset, or the path of an .npz, as the network receives
    them; holdout: samples it never saw, likewise, labels optional, at least 100; without either
    the verdict is inconclusive; knowledge: what the attacker is told; budget: wall clock, such as
    "10min": as many batches of restarts as fit, at least one; batches: exactly these instead, as
    recorded by an earlier audit; store, watch: see ``AttackStage``; stage: called with the name of
    every stage as it begins; say: told, one line each, what is known before the attacks: accuracy
    of the network as read, what was assumed, how long it will take.
    """
    plugged = plugins.load()
    clock = _Clock(stage)
    knowledge = knowledge or Knowledge()
    train = None if data is None else as_dataset(data, "data")
    control = None if holdout is None else as_dataset(holdout, "holdout")
    shape = next((part.shape for part in (train, control) if part is not None), knowledge.shape)
    checkpoint = as_checkpoint(model, arch, shape)
    checkpoint = checkpoint.replace(task=task_of(checkpoint, task).replace("auto", ""))
    check_fit(checkpoint, train, control, task)
    contradictions = scale_notes(train, control, knowledge)
    with clock("inspect"):
        inspection = inspect_checkpoint(checkpoint)
        fit = fit_of(checkpoint, train, control, checkpoint.task)
    for line in opening(checkpoint, fit):
        (say or (lambda _: None))(line)
    config = attack_config(preset, steps, seed, device)
    seconds = seconds_of(budget)
    attacks = AttackStage(
        checkpoint,
        knowledge,
        config,
        seconds,
        store,
        watch,
        tuple(batches),
        baselines,
        say,
        exact=steps is not None,
        samples=0 if train is None else len(train),
    )
    with clock("attack"):
        attacked = attacks.run()
    faults = {one.name: f"failed on import: {one.error}" for one in plugged if one.error}
    faults |= {name: f"failed: {said}" for name, said in plugins.faults.items()}
    plugins.faults.clear()  # said once
    broken = tuple(AttackOutcome(name, True, True, False, said) for name, said in faults.items())
    attacked = replace(attacked, outcomes=(*attacked.outcomes, *broken))
    # Repeated batches have no clock: what was drawn then is drawn again.
    scoring = math.inf if batches else max(LEAST_SCORE, SCORE_SHARE * seconds)
    with clock("score"):
        judged = _judge(checkpoint, attacked, train, control, seed, subsets, scoring)
    with clock("certify"):
        certificates = certified(checkpoint, train, attacked.found, knowledge, seconds)
    verdict = decide(judged.scores, judged.attacks, checkpoint.assumptions)
    drawn = subsets if judged.scores is None else judged.scores.subsets or subsets
    return AuditResult(
        subject=checkpoint.arch, created=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict=verdict, checkpoint=checkpoint, inspection=inspection, knowledge=knowledge,
        reconstructions=attacked.found, batches=attacked.batches, seconds=clock.seconds,
        **vars(judged), **certificates,
        settings={
            "preset": preset, "seed": seed, "subsets": drawn, "device": device, "task": task,
            "budget": seconds, "steps": steps, "baselines": baselines, "arch": checkpoint.arch,
            "plugins": {one.name: one.version for one in plugged},
        },
        environment=environment(device), hashes=dict(hashes or {}),
        assumptions=assumptions(checkpoint, inspection),
        limitations=limitations(verdict, judged.scores, knowledge),
        fit=fit, notes=(*(fit.notes if fit else ()), *contradictions, *_notes(attacked, judged.scores)),
    )  # fmt: skip


@dataclass(frozen=True)
class _Judged:
    """Every attack by itself, the pool, the attacks' own choice: fields of ``AuditResult``."""

    attacks: tuple[AttackOutcome, ...]
    scores: Scores | None = None
    selected: Scores | None = None
    evidence: Evidence | None = None


def _judge(
    checkpoint: Checkpoint,
    attacked: Attacked,
    train: Dataset | None,
    control: Dataset | None,
    seed: int,
    subsets: int,
    seconds: float,
) -> _Judged:
    """Score what the attacks found; the pool of all deciding attacks is what the verdict rests on.

    It is scored whatever the clock says. Attacks by themselves and the attacks' own choice come
    after it, then the published metrics, as far as ``seconds`` reach.
    """
    if train is None or not attacked.found:
        return _Judged(attacked.outcomes)
    model = build_model(checkpoint)
    outputs = evaluate(model, train.x.to(next(model.parameters()).dtype))

    def judge(pool: CandidatePool, **options: Any) -> Scores:
        return score(
            pool.x, train, control, candidate_labels=pool.labels, multipliers=pool.lam,
            outputs=outputs, seed=seed, subsets=subsets, **options,
        )  # fmt: skip

    start = time.monotonic()
    pool = joined([whole_pool(part) for part in attacked.found])
    decided = judge(pool, metrics=[DECIDING], seconds=seconds / 2)
    took, left_out = time.monotonic() - start, []

    def alone(name: str, part: CandidatePool) -> Scores | None:
        """The deciding metric of some candidates, unless the clock forbids."""
        left = seconds - (time.monotonic() - start)
        if not len(part.x):
            return None
        if took * len(part.x) / len(pool.x) > left:
            left_out.append(name)
            return None
        return judge(part, metrics=[DECIDING], seconds=left)

    parts = {part.attack: whole_pool(part) for part in (*attacked.found, *attacked.baselines)}
    attacks = tuple(
        _with_counts(outcome, alone(outcome.name, parts[outcome.name]))
        if outcome.name in parts and (len(attacked.found) > 1 or not outcome.decides)
        else _with_counts(outcome, decided if outcome.ran else None)
        for outcome in attacked.outcomes
    )
    chosen = joined([selected_pool(part) for part in attacked.found])
    selected = alone("the attacks' own choice", chosen)
    left = seconds - (time.monotonic() - start)
    scores = judge(pool, before=decided, seconds=left)
    if left_out:
        note = f"not scored by itself, for want of time: {', '.join(left_out)}"
        scores = scores.replace(notes=(*scores.notes, note))
    shown = evidence(pool.x, train, control, scores, outputs, seed)
    return _Judged(attacks, scores, selected, shown)


def _with_counts(outcome: AttackOutcome, scores: Scores | None) -> AttackOutcome:
    if scores is None:
        return outcome
    return outcome.replace(
        recovered=scores.recovered,
        expected_by_chance=scores.expected_by_chance,
        p_value=scores.p_value,
        rule=scores.rule,
    )


def attack_config(preset: str, steps: int | None, seed: int, device: str) -> AttackConfig:
    """The preset with what was said to override it."""
    if preset not in PRESETS:
        raise InputError(f"No preset {preset!r}.", did_you_mean(preset, tuple(PRESETS)))
    config = replace(PRESETS[preset], seed=seed, device=device)
    return config if steps is None else replace(config, steps=steps)


def _notes(attacked: Attacked, scores: Scores | None) -> tuple[str, ...]:
    parts: list[Reconstruction] = [*attacked.found]
    notes = [note for part in parts for note in part.notes]
    return tuple(dict.fromkeys([*notes, *(scores.notes if scores is not None else ())]))


class _Clock:
    """Seconds of every stage; ``begun`` is told its name."""

    def __init__(self, begun: Callable[[str], None] | None) -> None:
        self.seconds: dict[str, float] = {}
        self.begun = begun

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.begun is not None:
            self.begun(stage)
        start = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - start, 3)
