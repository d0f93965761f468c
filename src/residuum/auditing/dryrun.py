"""Preview an audit: what would stop it, what it would cost, and how it can end.

A dry run makes every check that could stop an audit and reports all problems at once. No attack runs. The
table of attacks is made by the same functions as in an audit, so both tables agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from residuum import plugins
from residuum.auditing.applicability import PLANNED, Applies, list_attacks
from residuum.auditing.assembling import describe_case, describe_losses, describe_predictor
from residuum.auditing.case import Case, Model, Obstacles, load_case
from residuum.auditing.controls import run_controls
from residuum.auditing.forests import plan_attack, why_no_controls
from residuum.auditing.outcomes import AttackOutcome
from residuum.auditing.plan import AttackPlan, Deadline, forecast
from residuum.auditing.request import AuditOptions, AuditRequest
from residuum.auditing.run import Audit, restriction
from residuum.auditing.schedule import AttackSchedule, reason_to_run
from residuum.auditing.stages import SWITCHED_OFF
from residuum.auditing.verdict import INCONCLUSIVE, LEAK, NO_LEAK_FOUND
from residuum.io.updates import resolve_update
from residuum.records import Knowledge, Record
from residuum.risk.membership import holdout_needed

REACHABLE = "can be reached"
NO_DATA = "no training samples (--data)"
STOPPED = dict.fromkeys((LEAK, NO_LEAK_FOUND, INCONCLUSIVE), "the audit would stop at an obstacle")


@dataclass(frozen=True, eq=False)
class DryRun(Record):
    """The result of a dry run: what an audit of the same inputs would do.

    Attributes:
        obstacles: Problems that would stop the audit, with the remedy.
        doubts: Reasons why the audit would be inconclusive, or why its result would be less certain.
        applies: The attacks and checks that would be tried, those that would not, and why.
        cost: The planned attacks and the time limit, in a sentence.
        verdicts: For each of the three verdicts, whether an audit can reach the verdict, or why not.
        exit_code: Exit code of an audit that stops at an obstacle, 0 if there is none.
    """

    obstacles: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    applies: tuple[Applies, ...] = ()
    cost: str = ""
    verdicts: dict[str, str] = field(default_factory=dict)
    exit_code: int = 0


def dry_run(
    model: Model,
    *,
    data: Any = None,
    holdout: Any = None,
    knowledge: Knowledge | Mapping[str, Any] | str | Path | None = None,
    base: Any = None,
    adapter: str | Path | None = None,
    tokenizer: Any = None,
    update: str | Path | Mapping[str, Tensor] | None = None,
    trust_code: bool = False,
    **options: Unpack[AuditOptions],
) -> DryRun:
    """Preview an audit without running an attack.

    An option that is not valid raises an ``InputError``, as in an audit.

    Args:
        model: The model. :func:`residuum.audit` describes all arguments.
        data: The training samples.
        holdout: Samples that the network never saw.
        knowledge: What the attacker knows.
        base: File of the weights before fine-tuning.
        adapter: File of an adapter (LoRA) of ``model``.
        tokenizer: Tokenizer of a token model.
        update: A gradient or weight difference, as a file or as tensors by name.
        trust_code: Allow running the code that ``model_code`` names.
        **options: Fields of :class:`~residuum.auditing.request.AuditRequest`.

    Returns:
        All obstacles at once, what would be tried, and which verdicts can be reached.
    """
    plugins.load()
    request, obstacles = AuditRequest(**options), Obstacles()
    if update is not None:
        model, base, kind = resolve_update(update, model, base, adapter, request.update_kind)
        request = request.model_copy(update={"update_kind": kind})
    case = load_case(
        model,
        data,
        holdout,
        knowledge,
        request,
        base=base,
        adapter=adapter,
        tokenizer=tokenizer,
        trust_code=trust_code,
        obstacles=obstacles,
    )
    if case is None:
        inconclusive_reasons = _without_data(obstacles) if data is None else ()
        return DryRun(
            tuple(obstacles.messages),
            inconclusive_reasons,
            verdicts=STOPPED,
            exit_code=obstacles.exit_code,
        )
    if case.network is not None:
        preview = _plan(case, request, obstacles)
    elif case.predictor is not None:
        preview = _plan_without_network(case, request, obstacles)
    else:
        preview = _dry_run_of_records(case, obstacles)
    return preview if case.stored is None else _with_stored_records(preview, case)


def attack_rows(case: Case, request: AuditRequest) -> tuple[AttackOutcome, ...]:
    """Return one table row for every attack, with the reason why an audit would run the attack or not.

    Args:
        case: The inputs of the audit.
        request: Settings of the audit, which may name the attacks.

    Returns:
        The rows of the table of attacks.
    """
    schedule = AttackSchedule(case.attacked, case.knowledge, request)
    return _rows_of(schedule, schedule.skipped(), {})


def _rows_of(
    schedule: AttackSchedule, skipped: dict[str, AttackOutcome], plans: dict[str, AttackPlan]
) -> tuple[AttackOutcome, ...]:
    """Return one table row for every attack of a plan, with the reason why the attack would run or not."""
    attack_outcomes = []
    for name, attack in schedule.attacks.items():
        skip_reason = schedule.reason_to_skip(name, plans[name]) if name in plans else ""
        reason = skip_reason or reason_to_run(attack, schedule.surfaces[name])
        outcome = AttackOutcome(name, not attack.is_baseline, True, not skip_reason, reason)
        attack_outcomes.append(skipped.get(name, outcome))
    return tuple(attack_outcomes)


def _without_data(obstacles: Obstacles) -> tuple[str, ...]:
    if obstacles.messages:
        return ()
    return (f"{NO_DATA}: nothing can be compared, so the verdict would be inconclusive",)


def _dry_run_of_records(case: Case, obstacles: Obstacles) -> DryRun:
    inconclusive_reasons = _without_data(obstacles) if case.train is None else ()
    return DryRun(
        tuple(obstacles.messages),
        inconclusive_reasons,
        verdicts=STOPPED,
        exit_code=obstacles.exit_code,
    )


def _plan(case: Case, request: AuditRequest, obstacles: Obstacles) -> DryRun:
    """Preview an audit of a network: problems, planned attacks, cost and possible verdicts."""
    inconclusive_reasons = [
        *(_without_data(obstacles) if case.train is None else ()),
        *case.warnings,
    ]
    has_no_obstacle = not obstacles.messages
    schedule = AttackSchedule(case.attacked, case.knowledge, request)
    skipped = schedule.skipped()
    attack_plans = schedule.plan(skipped) if has_no_obstacle else {}
    attack_outcomes = _rows_of(schedule, skipped, attack_plans)
    fit_to_samples = case.fit if has_no_obstacle else None
    reasons_against_leak, reasons_against_no_leak = (
        _conditions(case, request, attack_outcomes) if has_no_obstacle else ([], [])
    )
    reasons_against_no_leak += [
        f"{name}: {plan.left_out}" for name, plan in attack_plans.items() if plan.left_out
    ]
    return DryRun(
        tuple(obstacles.messages),
        (
            *inconclusive_reasons,
            *case.audited.assumptions,
            *(fit_to_samples.notes if fit_to_samples else ()),
        ),
        (
            *describe_case(case),
            *list_attacks(attack_outcomes, PLANNED),
        ),
        forecast(attack_plans, request) if attack_plans else "",
        _verdicts(reasons_against_leak, reasons_against_no_leak) if has_no_obstacle else STOPPED,
        obstacles.exit_code,
    )


def _plan_without_network(case: Case, request: AuditRequest, obstacles: Obstacles) -> DryRun:
    """Return the preview of an audit of a forest, or of another model that is no network."""
    has_no_obstacle = not obstacles.messages
    attack_outcomes = () if case.forest is None else (plan_attack(case.forest),)
    reasons_against_leak, reasons_against_no_leak = (
        _conditions(case, request, attack_outcomes) if has_no_obstacle else ([], [])
    )
    if case.tokens is not None and case.tokens.touched is not None:
        reasons_against_no_leak = [case.why_no_attack]
    elif case.why_no_attack:
        reasons_against_leak.append(f"{case.why_no_attack}, and losses alone do not show a leak")
    elif (reason := why_no_controls(case, request)) and not reasons_against_leak:
        reasons_against_no_leak.append(f"positive controls: {reason}")
    return DryRun(
        tuple(obstacles.messages),
        (*(_without_data(obstacles) if case.train is None else ()), *case.warnings),
        (
            *describe_predictor(case),
            *list_attacks(attack_outcomes, PLANNED),
            describe_losses(case, PLANNED),
        ),
        verdicts=_verdicts(reasons_against_leak, reasons_against_no_leak)
        if has_no_obstacle
        else STOPPED,
        exit_code=obstacles.exit_code,
    )


def _with_stored_records(plan: DryRun, case: Case) -> DryRun:
    """Return the preview with a table row about the stored records of the file, and with changed verdicts.

    Records that are certainly stored verbatim make the verdict "leak" certain.
    """
    assert case.stored is not None
    stored_records = case.stored
    verbatim_text = "records are stored verbatim in the file"
    unreachable_text = f"cannot be reached: {verbatim_text}"
    verdicts = {
        LEAK: f"certain: {verbatim_text}",
        NO_LEAK_FOUND: unreachable_text,
        INCONCLUSIVE: unreachable_text,
    }
    if not stored_records.is_certain:
        condition = "if samples are stored in the array whose name suggests records"
        if stored_records.places:
            condition = f"training samples are stored in {stored_records.places[0].where}"
        verdicts = {**plan.verdicts, LEAK: f"{REACHABLE}: {condition}"}
    return plan.replace(
        doubts=tuple(
            d for d in plan.doubts if not (stored_records.is_certain and d.startswith(NO_DATA))
        ),
        applies=(*list_attacks((stored_records.outcome(),), PLANNED), *plan.applies),
        verdicts=plan.verdicts if plan.obstacles else verdicts,
    )


def _conditions(
    case: Case, request: AuditRequest, rows: tuple[AttackOutcome, ...]
) -> tuple[list[str], list[str]]:
    """Return why an audit of this case could not show a leak, and why the audit could not rule out a leak.

    The first list is empty if the audit can show a leak. The second list is empty if the audit can rule out a
    leak.
    """
    if reason := Audit(case, request, Deadline.for_request(request)).why_not_compared:
        return [reason], []
    balanced_sets = case.balanced_sets
    assert balanced_sets is not None
    assert balanced_sets.holdout is not None
    if case.tokens is not None:
        return [], [case.why_no_attack]
    reasons_against_leak = [*run_controls(balanced_sets, case.knowledge, 0).failures]
    if case.fit is not None and case.fit.is_doubtful:
        reasons_against_leak.append(
            f"the network as read hardly fits these samples ({case.fit.line})"
        )
    reasons_against_no_leak = [restriction(request)] if restriction(request) else []
    if case.network is None:
        return reasons_against_leak, reasons_against_no_leak
    if not any(row.ran and row.decides for row in rows):
        reasons_against_no_leak.append("no deciding attack applies")
    if len(balanced_sets.holdout) < (needed := holdout_needed(len(balanced_sets.train))):
        reasons_against_no_leak.append(
            f"a test of membership needs {needed} held-out samples, and there are "
            f"{len(balanced_sets.holdout)}"
        )
    if not request.positive_controls:
        reasons_against_no_leak.append(f"positive controls: {SWITCHED_OFF}")
    return reasons_against_leak, reasons_against_no_leak


def _verdicts(
    reasons_against_leak: list[str], reasons_against_no_leak: list[str]
) -> dict[str, str]:
    """Return a text for each of the three verdicts.

    The text says under which condition an audit would reach the verdict, or why it cannot reach the verdict.
    """

    def reachable(reasons: list[str], condition: str) -> str:
        return "; ".join(dict.fromkeys(reasons)) if reasons else f"{REACHABLE}: {condition}"

    return {
        LEAK: reachable(
            reasons_against_leak, "if a test finds more than expected by chance over all tests"
        ),
        NO_LEAK_FOUND: reachable(
            [*reasons_against_leak, *reasons_against_no_leak],
            "if no test finds more, the losses show no memorization, and the tests detect positive controls",
        ),
        INCONCLUSIVE: f"{REACHABLE}: in every other case",
    }
