"""Run an audit, which tests whether the training samples of a model leak.

An audit is a list of stages (``STAGES``). A stage is a function that takes an :class:`Audit` and returns a
copy with some fields filled in:

==================  ===================================================  ====================================
stage               what it reads                                        fields that it fills in
==================  ===================================================  ====================================
stored records      records that the release stores, samples             stored_records
membership          network, samples                                     membership, p_value_of_losses
attributes          network, samples                                     attributes
attacks             network and attacker's knowledge, never the samples  attacks
negative controls   candidates made without the network, samples         negative_controls
scores              outputs of the attacks, samples                      scores
positive controls   networks trained on held-out samples                 positive_controls
certificates        network, training samples, outputs of the attacks    certificates
exposure            network, samples, outputs of the attacks             exposure
==================  ===================================================  ====================================

The attacks cannot read the samples: ``run_attacks`` gives them the network and the knowledge alone, and no
module of ``residuum.attacks`` may import data sets.

With ``out``, the outputs of every finished stage are saved. If an audit is interrupted and started again with
the same inputs and settings, the finished stages do not run again. Their saved outputs are read. Attacks
save their state, so that they continue where they stopped. All work is planned before the audit starts
(:mod:`.plan`), so an interruption does not change the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from residuum import plugins
from residuum.auditing import forests, losses, stages, token_models
from residuum.auditing.assembling import assemble_result
from residuum.auditing.attribute_stage import infer_attributes, skip_without_members
from residuum.auditing.case import Case, Model, check_hashes, load_case
from residuum.auditing.certificates import Certificates
from residuum.auditing.controls import Controls, explain_by_knowledge
from residuum.auditing.durations import duration
from residuum.auditing.listener import SILENT, AuditListener
from residuum.auditing.outcomes import AttackOutcome
from residuum.auditing.plan import Deadline, budget_for_all
from residuum.auditing.power import PositiveControls
from residuum.auditing.request import AuditOptions, AuditRequest
from residuum.auditing.result import AuditResult
from residuum.auditing.schedule import AttackResults, run_attacks
from residuum.auditing.scores import AttackScores
from residuum.auditing.store import NO_STORE, AuditStore, open_run
from residuum.auditing.stored_records import unconfirmed
from residuum.auditing.verdict import Checks, Verdict, decide, opening
from residuum.evaluation.matching import MIN_HOLDOUT
from residuum.evaluation.targets import TargetTest
from residuum.io.updates import resolve_update
from residuum.records import Exposure, Knowledge, RecoveredTable
from residuum.records.attribute_test import AttributeTest
from residuum.risk.membership import MembershipTest
from residuum.risk.moved_rows import MovedRows

STOPPED = "the time limit stopped the audit after {} before all planned work was done"
QUICK = "the effort quick can show a leak and cannot rule one out"
CHOSEN = "only the standard plan can rule out a leak, and these settings changed the plan: {}"
NO_SAMPLES = "there are no training samples to compare with (--data)"
NO_HOLDOUT = "there are no samples that the network never saw (--holdout)"
FEW_HELD_OUT = "at least {} samples that the network never saw are needed, and there are {}"


@dataclass(frozen=True)
class Audit:
    """An audit in progress: its inputs and the outputs of every stage that has run."""

    case: Case  # release, network, samples and knowledge, loaded and checked against each other
    request: AuditRequest  # the settings of the audit
    deadline: Deadline  # the time at which the audit must end
    store: AuditStore = (
        NO_STORE  # saves the outputs of stages, so that an interrupted audit can continue
    )
    listener: AuditListener = SILENT
    stored_records: AttackOutcome | None = None
    # whether the files of a folder were searched for training texts
    are_texts_searched: bool = False
    membership: MembershipTest | None = None
    # test whether an attacker can infer missing values of training records
    attributes: AttributeTest | None = None
    table: RecoveredTable | None = None  # the training table that the attack on a forest recovered
    # test whether the targets that an attack recovered from a forest are those of the training samples
    targets: TargetTest | None = None
    # p-value of the test whether the losses of training and held-out samples differ
    p_value_of_losses: float | None = None
    # comparison of the embedding rows that training moved with the tokens of the texts
    moved_rows: MovedRows | None = None
    attacks: AttackResults = field(default_factory=AttackResults)
    negative_controls: Controls = field(default_factory=Controls)
    scores: AttackScores | None = None
    positive_controls: tuple[PositiveControls, ...] = ()
    certificates: Certificates = field(default_factory=Certificates)
    exposure: Exposure | None = None
    # reason why each skipped stage did not run, by name of the stage
    skipped: Mapping[str, str] = field(default_factory=dict)
    # duration of each stage in seconds, by name of the stage
    seconds: Mapping[str, float] = field(default_factory=dict)

    def skip(self, stage: str, reason: str) -> Audit:
        """Return the audit with a note why a stage was skipped or had no output.

        Args:
            stage: Name of the stage.
            reason: The reason.

        Returns:
            A copy of the audit.
        """
        return replace(self, skipped={**self.skipped, stage: reason})

    @property
    def outcomes(self) -> tuple[AttackOutcome, ...]:
        """One row of the table of attacks for each attack, after a row about the search for stored records.

        If the release stores no records, there is no row about this search.
        """
        attacks = self.attacks.outcomes if self.scores is None else self.scores.attacks
        return attacks if self.stored_records is None else (self.stored_records, *attacks)

    @property
    def checks(self) -> Checks:
        """Checks that decide whether an audit without a finding can rule out a leak."""
        sample_sets, scores = self.case.sample_sets, self.scores
        findings = None if scores is None else scores.findings
        recovered_samples = () if findings is None else findings.samples
        controls = self.negative_controls
        return Checks(
            failures=(*controls.failures, *explain_by_knowledge(controls, recovered_samples)),
            level=controls.level,
            fit=self.case.fit,
            told_apart=self.p_value_of_losses,
            positive_controls=self.positive_controls,
            set_aside=() if sample_sets is None else sample_sets.repeats,
            stopped=STOPPED.format(duration(self.deadline.seconds)) if self.was_stopped else "",
            restricted=restriction(self.request),
            budget_needed=budget_for_all(self.attacks.plans, self.request),
            why_no_attack=self.case.why_no_attack,
        )

    @property
    def was_stopped(self) -> bool:
        """True if the time limit stopped an attack or the whole audit."""
        was_attack_stopped = any("time" in result.status for result in self.attacks.reconstructions)
        return was_attack_stopped or self.deadline.is_over

    @property
    def why_not_compared(self) -> str:
        """The reason why training and held-out samples cannot be compared, "" if they can."""
        if self.case.why_not_tested:
            return self.case.why_not_tested
        sample_sets = self.case.sample_sets
        if sample_sets is None:
            return NO_SAMPLES
        if sample_sets.holdout is None:
            return NO_HOLDOUT
        if len(sample_sets.holdout) < MIN_HOLDOUT:
            return FEW_HELD_OUT.format(MIN_HOLDOUT, len(sample_sets.holdout))
        return ""

    def verdict(self, assumed: tuple[str, ...] = ()) -> Verdict:
        """Decide the verdict from the outputs of the stages that have run.

        Args:
            assumed: Assumptions about network and samples, which are added to the reasons of the verdict.

        Returns:
            The verdict.
        """
        unconfirmed_notes = (
            () if self.stored_records is None else unconfirmed((self.stored_records,))
        )
        return decide(
            None if self.scores is None else self.scores.findings,
            self.outcomes,
            self.checks,
            self.membership,
            why_not_compared=self.why_not_compared,
            limit=self.request.fail_on,
            assumed=(*assumed, *unconfirmed_notes),
            targets=self.targets,
            nothing_stored=self.case.nothing_stored,
            moved_rows=self.moved_rows,
            attributes=self.attributes,
            why_not_searched=""
            if self.case.tokens is None or self.are_texts_searched
            else self.case.tokens.why_not_searched,
        )


def restriction(request: AuditRequest) -> str:
    """Return why an audit with these settings cannot rule out a leak, "" if it can."""
    if request.effort == "quick":
        return QUICK
    return CHOSEN.format(", ".join(request.chosen_by_user)) if request.chosen_by_user else ""


@dataclass(frozen=True)
class Stage:
    """A stage of an audit, such as the attacks. It runs only if ``skip_reason`` returns an empty text."""

    name: str
    run: Callable[[Audit], Audit]
    skip_reason: Callable[[Audit], str]


STAGES: tuple[
    Stage, ...
] = (  # for each stage: name, function to run, function that returns the reason to skip the stage
    Stage("stored records", stages.find_stored_records, stages.skip_without_records),
    Stage("membership", stages.test_membership, stages.skip_without_weights),
    Stage("attributes", infer_attributes, skip_without_members),
    Stage("attacks", run_attacks, stages.skip_without_network),
    Stage("negative controls", stages.run_negative_controls, stages.skip_without_samples),
    Stage("scores", stages.score_reconstructions, stages.skip_without_samples),
    Stage("positive controls", stages.run_positive_controls, stages.skip_if_decided),
    Stage("certificates", stages.certify, stages.skip_without_network_and_time),
    Stage("exposure", stages.rank_exposure, stages.skip_without_network_time_and_samples),
)

# The stages of an audit of a forest or of any other model that is no network.
PREDICTOR_STAGES: tuple[Stage, ...] = (
    Stage("stored records", stages.find_stored_records, stages.skip_without_records),
    Stage("membership", losses.measure_losses, stages.skip_without_predictions),
    Stage("attacks", forests.recover_tables, stages.skip_without_forest),
    Stage("negative controls", forests.run_negative_controls, stages.skip_without_predictions),
    Stage("scores", forests.score_table, stages.skip_without_table),
    Stage("positive controls", forests.test_positive_controls, stages.skip_if_decided),
)

# The stages of an audit of a token model, a network whose inputs are token ids.
TOKEN_STAGES: tuple[Stage, ...] = (
    Stage("stored records", token_models.find_stored_texts, token_models.skip_without_folder),
    Stage("membership", token_models.test_membership, stages.skip_without_texts_and_base),
    Stage("negative controls", token_models.run_negative_controls, stages.skip_without_predictions),
)


def audit(
    model: Model,
    *,
    data: Any = None,
    holdout: Any = None,
    knowledge: Knowledge | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    base: Any = None,
    adapter: str | Path | None = None,
    tokenizer: Any = None,
    update: str | Path | Mapping[str, Tensor] | None = None,
    trust_code: bool = False,
    blur: bool = False,
    expected_hashes: Mapping[str, str] | None = None,
    listener: AuditListener = SILENT,
    **options: Unpack[AuditOptions],
) -> AuditResult:
    """Attack a model from what it releases and report whether its training data leaks.

    If an input cannot be read, or if the inputs do not fit each other, a ``ResiduumError`` is raised.

    Args:
        model: A file, a release, a live network of any class, its ``state_dict()``, or a fitted model of
            scikit-learn, of xgboost or of your own with ``predict_proba`` or ``predict``
            (``docs/networks.md``). MLPs and trees of scikit-learn are attacked. For other models, stored
            records are searched and losses are compared.
        data: The training samples: (x, y), a Dataset, a DataFrame, a DataLoader, a map-style dataset of
            PyTorch, or the path of an .npz, a table (.csv, .tsv, .jsonl or .parquet) or a folder. The attacks
            never see them. A pipeline in memory receives the columns of a table that it was fitted to.
        holdout: At least 100 samples that the network never saw, in the same forms as ``data``. One
            file can hold training and held-out samples. If either is missing, the verdict is at best
            inconclusive.
        knowledge: What the attacker knows in addition to the release: a Knowledge, a dictionary of facts such
            as ``{"value_range": (0, 1)}``, or the path of a saved Knowledge.
        out: Folder for the report and all other files. If the folder holds an unfinished audit, this audit
            continues. If it holds a finished audit, its result is returned.
        base: File of the weights before fine-tuning. For a token model also a folder or a live module.
        adapter: File of an adapter (LoRA). ``model`` is then the network on which the adapter was trained.
        tokenizer: Tokenizer of a token model, as in transformers, or its folder. Then ``data`` and
            ``holdout`` are texts with labels. Without a tokenizer they are token ids.
        update: A gradient or weight difference, as a file or as tensors by name. ``model`` or ``base`` is
            then the network before the update, or None if it is not known.
        trust_code: Allow running the code that the setting ``model_code`` names.
        blur: Blur the images of the report until the reader asks for them.
        expected_hashes: SHA-256 of checkpoint, data and holdout. Files with other hashes are refused.
        listener: Receives messages, stage names and the progress of attacks.
        **options: Fields of :class:`~residuum.auditing.request.AuditRequest`, such as
            ``effort="quick"``, ``budget="10min"``, ``seed``, ``attacks``, or ``label`` and ``drop`` for
            the columns of a table.

    Returns:
        AuditResult: The verdict and the evidence for it.

    Example:
        >>> import residuum as rs
        >>> result = rs.audit("model.pt", data="train.npz", holdout="test.npz")  # doctest: +SKIP
        >>> result.verdict.outcome  # doctest: +SKIP
        'leak'
    """
    plugins.load()
    request = AuditRequest(**options)
    if update is not None:
        model, base, kind = resolve_update(update, model, base, adapter, request.update_kind)
        request = request.model_copy(update={"update_kind": kind})
    deadline = Deadline.for_request(request)
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
    )
    assert case is not None
    check_hashes(case, expected_hashes or {})
    with open_run(out, case, request) as store:
        if (finished := store.finished()) is not None:
            return finished
        opening_lines = () if case.network is None else opening(case.network, case.fit)
        # Leave out the accuracy (the first line) if the samples did not train these weights.
        for line in opening_lines[bool(case.why_no_weights) :]:
            listener.message(line)
        stage_list = PREDICTOR_STAGES if case.network is None else STAGES
        stage_list = stage_list if case.tokens is None else TOKEN_STAGES
        finished_audit = run_stages(Audit(case, request, deadline, store, listener), stage_list)
        audit_result = assemble_result(finished_audit)
        store.write(audit_result, blur=blur)
    return audit_result


def run_stages(audit: Audit, plan: tuple[Stage, ...]) -> Audit:
    """Run the stages of an audit in order.

    If a stage finished before the audit was interrupted, its outputs are read from files instead.

    Args:
        audit: The audit.
        plan: The stages, in the order in which they run.

    Returns:
        The audit with the outputs of all stages.
    """
    for stage in plan:
        if reason := stage.skip_reason(audit):
            audit = audit.skip(stage.name, reason)
            continue
        audit.listener.stage(stage.name)
        start_time = time.monotonic()
        audit = audit.store.load_or_run(stage.name, stage.run, audit)
        stage_seconds = audit.seconds.get(stage.name, round(time.monotonic() - start_time, 3))
        audit = replace(audit, seconds={**audit.seconds, stage.name: stage_seconds})
    return audit
