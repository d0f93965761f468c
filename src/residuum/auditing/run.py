"""Run an audit: from a model, its samples and the attacker's knowledge to a verdict.

An audit is a list of stages (``STAGES``). A stage is a function that takes an :class:`Audit` and returns a
copy with its own outputs filled in. The attacks see the network and the attacker's knowledge only. Samples
are first compared with candidates in the stages after them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from residuum import plugins
from residuum.auditing import stages
from residuum.auditing.assembling import assemble_result
from residuum.auditing.budget import TimeBudget
from residuum.auditing.case import Case, Model, check_hashes, load_case
from residuum.auditing.certificates import Certificates
from residuum.auditing.controls import Controls, Membership, brought_by_grant
from residuum.auditing.durations import duration
from residuum.auditing.listener import SILENT, AuditListener
from residuum.auditing.request import AuditOptions, AuditRequest
from residuum.auditing.result import AuditResult
from residuum.auditing.schedule import AttackResults, run_attacks
from residuum.auditing.scores import AttackScores
from residuum.auditing.store import NO_STORE, AuditStore, open_run
from residuum.auditing.verdict import AttackOutcome, Checks, Twin, opening
from residuum.records import Exposure, Knowledge

STOPPED = "the audit ran out of its budget of {} and was stopped before its plan was finished"


@dataclass(frozen=True)
class Audit:
    """An audit in progress: its inputs and the outputs of every stage that has run."""

    case: Case  # release, network, samples and knowledge, loaded and checked against each other
    request: AuditRequest  # what the user asked for; the only list of audit settings
    budget: TimeBudget
    store: AuditStore = NO_STORE  # keeps outputs, so that an interrupted audit continues
    listener: AuditListener = SILENT
    stored_records: AttackOutcome | None = None
    attacks: AttackResults = field(default_factory=AttackResults)
    negative_controls: Controls = field(default_factory=Controls)
    scores: AttackScores | None = None
    membership: Membership | None = None
    p_value_of_losses: float | None = None  # that losses do not tell training from held-out samples
    positive_controls: tuple[Twin, ...] = ()
    certificates: Certificates = field(default_factory=Certificates)
    exposure: Exposure | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)  # stage name -> reason
    seconds: Mapping[str, float] = field(default_factory=dict)  # stage name -> time it took

    def skip(self, stage: str, reason: str) -> Audit:
        """Return the audit with the reason why a stage gave no output."""
        return replace(self, skipped={**self.skipped, stage: reason})

    @property
    def outcomes(self) -> tuple[AttackOutcome, ...]:
        """One row per test: stored records first, then the attacks."""
        attacks = self.attacks.outcomes if self.scores is None else self.scores.attacks
        return attacks if self.stored_records is None else (self.stored_records, *attacks)

    @property
    def checks(self) -> Checks:
        """What limits the meaning of finding nothing."""
        comparison, scores = self.case.comparison, self.scores
        findings = None if scores is None else scores.findings
        samples = () if findings is None else findings.samples
        controls = self.negative_controls
        return Checks(
            failures=(*controls.failures, *brought_by_grant(controls, samples)),
            fit=self.case.fit,
            told_apart=self.p_value_of_losses,
            vouched=self.request.vouch,
            twins=self.positive_controls,
            set_aside=() if comparison is None else comparison.repeats,
            stopped=STOPPED.format(duration(self.budget.seconds)) if self.was_stopped else "",
            budget_needed=self.attacks.budget_needed,
        )

    @property
    def was_stopped(self) -> bool:
        """Whether the clock ended the audit before its plan was finished."""
        cut = any("time" in result.status for result in self.attacks.reconstructions)
        return cut or self.budget.end.left <= 0


@dataclass(frozen=True)
class Stage:
    """One step of an audit. It runs if its skip reason is ""."""

    name: str
    run: Callable[[Audit], Audit]
    skip_reason: Callable[[Audit], str]


STAGES = (
    Stage("stored records", stages.find_stored_records, stages.without_records),
    Stage("attacks", run_attacks, stages.without_network),  # sees no samples
    Stage("negative controls", stages.run_negative_controls, stages.without_samples),
    Stage("scores", stages.score_reconstructions, stages.without_samples),
    Stage("membership", stages.measure_membership, stages.without_time_or_samples),
    Stage("permuted target", stages.attack_permuted_target, stages.unless_nothing_was_found),
    Stage("positive controls", stages.run_positive_controls, stages.unless_leak_can_be_ruled_out),
    Stage("certificates", stages.certify, stages.without_network_or_time),
    Stage("exposure", stages.rank_exposure, stages.unless_exposure_applies),
)


def audit(
    model: Model,
    *,
    data: Any = None,
    holdout: Any = None,
    knowledge: Knowledge | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    base: str | Path | None = None,
    adapter: str | Path | None = None,
    trust_code: bool = False,
    blur: bool = False,
    expected_hashes: Mapping[str, str] | None = None,
    listener: AuditListener = SILENT,
    **options: Unpack[AuditOptions],
) -> AuditResult:
    """Attack a model from what it releases and report whether its training data leaks.

    Args:
        model: A file, a release, a live network of any class, its ``state_dict()``, or a fitted
            MLPClassifier or MLPRegressor of scikit-learn (``docs/networks.md``).
        data: The training samples, used only to check the inputs and to score: (x, y), a Dataset, a
            DataFrame, a DataLoader, a dataset with items, or the path of an .npz, a .csv or a folder.
        holdout: At least 100 samples that the network never saw, likewise. One file may hold both sets.
            Without either, the verdict is inconclusive.
        knowledge: What the attacker knows besides the release: a Knowledge, a dictionary of facts
            such as ``{"value_range": (0, 1)}``, or the path of a saved Knowledge.
        out: Folder to write. An unfinished audit in it continues, a finished one is returned.
        base: File of the weights before fine-tuning.
        adapter: Adapter (LoRA) of ``model``, which is then the base.
        trust_code: Allow running the code that ``model_code`` names.
        blur: Blur the images of the report until the reader asks for them.
        expected_hashes: SHA-256 of checkpoint, data and holdout. Other files are refused.
        listener: Receives messages, stage names and the progress of attacks.
        **options: Fields of :class:`~residuum.auditing.request.AuditRequest`, such as
            ``budget="10min"``, ``preset``, ``steps``, ``seed`` or ``attacks``.

    Returns:
        AuditResult: The verdict and everything that it rests on.

    Raises:
        ResiduumError: If an input cannot be read, or if the inputs do not fit each other.

    Example:
        >>> import residuum as rs
        >>> result = rs.audit("model.pt", data="train.npz", holdout="test.npz")  # doctest: +SKIP
        >>> result.verdict.outcome  # doctest: +SKIP
        'leak'
    """
    plugins.load()
    request = AuditRequest(**options)
    budget = TimeBudget(request)
    case = load_case(
        model, data, holdout, knowledge, request, base=base, adapter=adapter, trust_code=trust_code
    )
    assert case is not None
    check_hashes(case, expected_hashes or {})
    with open_run(out, case, request) as store:
        if (finished := store.finished()) is not None:
            return finished
        for line in opening(case.network, case.fit) if case.network is not None else ():
            listener.message(line)
        state = run_stages(Audit(case, request, budget, store, listener), STAGES)
        result = assemble_result(state)
        store.write(result, blur=blur)
    return result


def run_stages(audit: Audit, plan: tuple[Stage, ...]) -> Audit:
    """Run the stages in order. A stage that finished before an interruption is read back."""
    for stage in plan:
        if reason := stage.skip_reason(audit):
            audit = audit.skip(stage.name, reason)
            continue
        audit.listener.stage(stage.name)
        start = time.monotonic()
        audit = audit.store.load_or_run(stage.name, stage.run, audit)
        seconds = audit.seconds.get(stage.name, round(time.monotonic() - start, 3))
        audit = replace(audit, seconds={**audit.seconds, stage.name: seconds})
    return audit
