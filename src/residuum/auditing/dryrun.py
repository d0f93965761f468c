"""An audit before it is run: all that is in its way at once, what it would cost, how it can end.

Every check that a run would stop at is made and its refusal kept, so that one dry run shows them all.
Nothing is attacked; one step of each attack is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from residuum.attacks import AttackConfig, every_attack
from residuum.auditing.budget import ATTACK_SHARE, first_batch, forecast
from residuum.auditing.controls import run_controls, told_by_network, without_repeats
from residuum.auditing.inputs import Fit, check_fit, fit_of, scale_notes, suited, task_of
from residuum.auditing.result import PLANNED, Applies, facts, tried
from residuum.auditing.verdict import INCONCLUSIVE, LEAK, NO_LEAK_FOUND, AttackOutcome, Checks
from residuum.errors import ResiduumError
from residuum.evaluation.matching import why_not_calibrated
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Record
from residuum.surfaces.inspection import inspect_network
from residuum.surfaces.surface import WEIGHTS, surfaces

REACHABLE = "can be reached"
NO_DATA = "no training samples (--data)"
NONE = dict.fromkeys((LEAK, NO_LEAK_FOUND, INCONCLUSIVE), "the audit would stop at an obstacle")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class DryRun(Record):
    """obstacles: what a run would stop at, with the remedy; doubts: what would leave it inconclusive or
    weaken it; applies: what would be tried; cost: in a sentence; verdicts: by name, whether each can be
    reached, or why not; exit_code: that of a run which stops, 0 where none would.
    """

    obstacles: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    applies: tuple[Applies, ...] = ()
    cost: str = ""
    verdicts: dict[str, str] = field(default_factory=dict)
    exit_code: int = 0


def dry_run(
    network: Callable[[], Network | None],
    data: Callable[[], Dataset | None],
    holdout: Callable[[], Dataset | None],
    knowledge: Callable[[Network], Knowledge],
    config: AttackConfig,
    seconds: float,
    *,
    task: str = "auto",
    exact: bool = False,
    baselines: bool = True,
    twin: bool = True,
    vouch: bool = False,
) -> DryRun:
    """What an audit would stop at, try and cost, without attacking.

    network, data, holdout, knowledge: functions, so that an input that is refused does not hide the
        others.
    config, seconds: as the audit would have them.
    exact: the steps of ``config`` were asked for. Returns all obstacles at once, with the exit code of
        the run that would stop.
    """
    obstacles: list[str] = []
    codes = [0]

    def attempt(work: Callable[[], T]) -> T | None:
        try:
            return work()
        except ResiduumError as problem:
            if str(problem) not in obstacles:  # one file may be read for both sets
                obstacles.append(str(problem))
            codes.append(problem.exit_code)
            return None

    train, control, checkpoint = attempt(data), attempt(holdout), attempt(network)
    granted = None if checkpoint is None else attempt(partial(knowledge, checkpoint))
    doubts: list[str] = []
    if train is None and not obstacles:
        doubts.append(f"{NO_DATA}: nothing can be compared, the verdict is inconclusive")
    if checkpoint is None or granted is None:
        return DryRun(tuple(obstacles), tuple(doubts), verdicts=NONE, exit_code=max(codes))
    checkpoint = checkpoint.replace(task=task_of(checkpoint, task).replace("auto", ""))
    before = len(obstacles)
    train, control = attempt(lambda: suited(checkpoint, train, control, granted, task)) or (
        train,
        control,
    )
    attempt(lambda: check_fit(checkpoint, train, control, task))
    doubts += attempt(lambda: scale_notes(train, control, granted)) or ()
    inspection = inspect_network(checkpoint)
    fits = len(obstacles) == before
    fit = fit_of(checkpoint, train, control, checkpoint.task) if fits else None
    rows = _attacks(checkpoint, granted, baselines)
    open_ = [row.name for row in rows if row.ran and row.decides]
    # The first batch of every attack that takes its time in batches.
    batched = [name for name in open_ if every_attack()[name].pace == "batches" and not obstacles]
    share = ATTACK_SHARE * seconds / max(1, len(batched))
    plans = [
        first_batch(checkpoint, granted, replace(config, objective=name), share, exact)
        for name in batched
    ]
    to_leak, to_pass = _conditions(
        checkpoint, granted, train if fits else None, control, fit, rows, twin, vouch
    )
    return DryRun(
        tuple(obstacles),
        (*doubts, *checkpoint.assumptions, *(fit.notes if fit else ())),
        (*facts(checkpoint, inspection, granted, fit), *tried(rows, PLANNED)),
        forecast(seconds, plans, 0 if train is None else len(train)) if plans else "",
        NONE if obstacles else _verdicts(to_leak, to_pass),
        max(codes),
    )


def _attacks(
    checkpoint: Network, knowledge: Knowledge, baselines: bool
) -> tuple[AttackOutcome, ...]:
    """Every attack as it would stand in the table."""
    there, rows = surfaces(checkpoint, knowledge), []
    for name, one in every_attack().items():
        if one.baseline and not baselines:
            continue
        surface = there.get(one.surface, there[WEIGHTS])
        why_not = one.why_not(surface, knowledge)
        reason = why_not or one.left_out(surface, knowledge)
        run = "a baseline: reported, never deciding" if one.baseline else one.why(surface)
        silent = surface.silent if one.acquits else "it leaves no residual"
        row = AttackOutcome(name, not one.baseline, not why_not, not reason, reason or run)
        rows.append(row.replace(silent=silent))
    return tuple(rows)


def _conditions(
    checkpoint: Network,
    knowledge: Knowledge,
    train: Dataset | None,
    control: Dataset | None,
    fit: Fit | None,
    rows: tuple[AttackOutcome, ...],
    twin: bool,
    vouch: bool,
) -> tuple[list[str], list[str]]:
    """Why a leak could not be called, and, beyond that, why "no leak found" could not be said."""
    to_leak: list[str] = []
    to_pass: list[str] = []
    if train is None:
        return ["there are no training samples to compare with"], []
    claim = without_repeats(train, control)
    if reason := why_not_calibrated(len(train), None if claim.pool is None else len(claim.pool)):
        return [reason], []
    to_leak += run_controls(claim, knowledge, 0).failures
    if not any(row.ran and row.decides for row in rows):
        to_leak.append("no deciding attack applies")
    if not any(row.ran and row.decides and not row.silent for row in rows):
        to_pass.append("no attack that could explain the weights applies")
    apart = told_by_network(checkpoint, claim.train, claim.pool, checkpoint.task, 0)
    to_pass += () if vouch else Checks(fit=fit, told_apart=apart).strangers
    if not twin:
        to_pass.append("no positive controls are wanted (--no-twin)")
    elif control is not None and len(control.y.unique()) < 2:
        to_pass.append(
            "the held-out samples have no labels, so no positive control can be trained on them"
        )
    return to_leak, to_pass


def _verdicts(to_leak: list[str], to_pass: list[str]) -> dict[str, str]:
    def said(reasons: list[str], when: str) -> str:
        return "; ".join(dict.fromkeys(reasons)) if reasons else f"{REACHABLE}: {when}"

    return {
        LEAK: said(to_leak, "where a test finds more than chance gives all tests together"),
        NO_LEAK_FOUND: said(
            [*to_leak, *to_pass],
            "if no test does, an attack fits the weights with its full plan, and all positive controls are "
            "noticed",
        ),
        INCONCLUSIVE: f"{REACHABLE}: in every other case",
    }
