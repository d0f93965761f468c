"""Choose what the user should do after an audit, from a table of conditions, texts and commands.

The first row whose condition holds gives the next step. The commands name the file that was audited, so the
user can copy them. A test of residuum runs every command, so that no command is wrong.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from residuum.auditing.commands import audit_command
from residuum.auditing.durations import duration
from residuum.auditing.outcomes import ATTRIBUTE, MEMBERSHIP
from residuum.auditing.plan import limit_of
from residuum.auditing.power import BUDGET
from residuum.auditing.request import AuditRequest
from residuum.auditing.stored_records import ONLY_STORED
from residuum.auditing.token_models import NO_ATTACK
from residuum.auditing.verdict import INCONCLUSIVE, LEAK, NO_LEAK_FOUND
from residuum.evaluation.matching import MIN_HOLDOUT
from residuum.records import Record
from residuum.risk.membership import MOVED_ROWS, SHOWN

if TYPE_CHECKING:
    from residuum.auditing.result import AuditResult

MOMENT = "moment"
# If the time budget was too small for large positive controls, we advise this multiple of the budget.
BUDGET_FACTOR = 4
# The largest time budget that we advise, in seconds of computing time on a reference machine.
MAX_BUDGET = 4 * 3600.0
STRIPPED_SUFFIXES = (
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".safetensors",
)  # suffixes of the files that ``residuum strip`` can write
STRIPPED = "stripped.pt"  # name of the file that the advised ``residuum strip`` command writes


@dataclass(frozen=True, eq=False)
class NextStep(Record):
    """The next step after an audit: what to do, and the commands to do it.

    Attributes:
        text: What to do.
        commands: Commands that can be copied.
    """

    text: str
    commands: tuple[str, ...] = ()


class Row(NamedTuple):
    """A row of the table of next steps.

    Attributes:
        applies: Function that takes an audit and returns True if this row suits the audit.
        text: What to do, with placeholders for ``str.format``. ``budget`` is a budget that is large enough
            for all planned work. ``larger_budget`` is a budget that allows larger positive controls.
            ``needed`` and ``holdout`` are the required and the actual number of held-out samples.
            ``not_covered`` lists what the audit did not test.
        commands: Functions that return a command, or "" if the command would not work after this audit.
    """

    applies: Callable[[AuditResult], bool]
    text: str
    commands: tuple[Callable[[AuditResult], str], ...] = ()


def next_step(result: AuditResult) -> NextStep:
    """Return the next step after an audit: the first row of the table whose condition holds."""
    first_matching_row = next(
        first_matching_row
        for first_matching_row in TABLE[result.verdict.outcome]
        if first_matching_row.applies(result)
    )
    commands = tuple(filter(None, (command(result) for command in first_matching_row.commands)))
    advice = first_matching_row.text.format(
        budget=duration(result.checks.budget_needed or 600.0),
        needed=_holdout_needed(result),
        holdout=_holdout_count(result),
        not_covered=_not_covered(result),
        larger_budget=duration(_budget_for_larger_controls(result)),
    )
    is_shareable = redacted_report in first_matching_row.commands and redacted_report(result)
    return NextStep(advice + (REDACTED_NOTE if is_shareable else ""), commands)


def strip_file(result: AuditResult) -> str:
    """Return the command that writes a copy of the audited file with only the weights.

    If the format of the file has no such copy, return "".
    """
    checkpoint_path = result.files.get("checkpoint", "")
    has_weights = bool(result.checkpoint.theta)
    if not has_weights or Path(checkpoint_path).suffix not in STRIPPED_SUFFIXES:
        return ""
    return shlex.join(["residuum", "strip", checkpoint_path, "--out", STRIPPED])


def redacted_report(result: AuditResult) -> str:
    """Return the command that writes a report without samples, "" if the audit was not saved."""
    run_directory = result.files.get("out", "")
    return shlex.join(["residuum", "report", run_directory, "--redact"]) if run_directory else ""


def scan_file(result: AuditResult) -> str:
    """Return the command that scans the audited file, "" if the audit read no file."""
    checkpoint_path = result.files.get("checkpoint", "")
    return shlex.join(["residuum", "scan", checkpoint_path]) if checkpoint_path else ""


def audit_stripped_file(result: AuditResult) -> str:
    """Return the command that audits the file that :func:`strip_file` writes."""
    return audit_command(result, checkpoint=STRIPPED, out="-stripped", surface="all")


def audit_again(result: AuditResult) -> str:
    """Return the command that repeats this audit in another folder."""
    return audit_command(result)


def audit_with_larger_budget(result: AuditResult) -> str:
    """Return the command that repeats this audit with a time budget that suffices for all planned work."""
    return audit_command(result, budget=result.checks.budget_needed or 600.0)


def audit_with_standard_plan(result: AuditResult) -> str:
    """Return the command that repeats this audit with the default attacks and the effort "standard".

    With other settings an audit may not be able to rule out a leak.
    """
    standard: dict[str, Any] = {"effort": "standard", "budget": None, "preset": "residuum"}
    standard |= {"attacks": (), "steps": None, "surface": "all"}
    return audit_command(result, **standard)


def audit_with_controls(result: AuditResult) -> str:
    """Return the command that repeats this audit with positive controls (networks that memorize)."""
    return audit_command(result, positive_controls=True)


def audit_with_larger_controls(result: AuditResult) -> str:
    """Return the command that repeats this audit with a larger budget, for larger positive controls.

    The budget limits the number of samples on which positive controls are trained.
    """
    return audit_command(result, budget=_budget_for_larger_controls(result))


def _budget_for_larger_controls(result: AuditResult) -> float:
    requested_settings = result.settings.get("requested", {})
    budget_settings = {
        name: requested_settings[name]
        for name in ("effort", "budget")
        if name in requested_settings
    }
    return BUDGET_FACTOR * limit_of(AuditRequest(**budget_settings))


def _leaking_surfaces(result: AuditResult) -> set[str]:
    return {row.surface for row in result.attacks if row.survives}


def _has_strippable_state(result: AuditResult) -> bool:
    was_state_attacked = any(row.ran and row.surface == MOMENT for row in result.attacks)
    return was_state_attacked and bool(strip_file(result))


def _holdout_needed(result: AuditResult) -> int:
    needed_for_membership = (
        MIN_HOLDOUT if result.membership is None else result.membership.holdout_needed
    )
    if _needs_few_held_out(result):
        return MIN_HOLDOUT
    return max(MIN_HOLDOUT, needed_for_membership, result.verdict.n or 0)


def _needs_few_held_out(result: AuditResult) -> bool:
    """Return True if the tests work with fewer held-out samples than training samples."""
    # The test of losses works with any number of held-out samples. The rows that are recovered from a forest
    # are compared with a subset of the training samples, which is no larger than the held-out set.
    has_only_losses = bool(result.checks.why_no_attack) and result.moved_rows is None
    return result.table is not None or has_only_losses


def _holdout_count(result: AuditResult) -> int:
    return 0 if result.membership is None else result.membership.holdout


def _has_too_few_held_out(result: AuditResult) -> bool:
    if _needs_few_held_out(result) and _holdout_count(result) >= MIN_HOLDOUT:
        return False
    return _holdout_count(result) < _holdout_needed(result) and (
        result.membership is None
        or bool(result.membership.reason)
        or bool(result.findings and result.findings.reason)
    )


def _memorizes(result: AuditResult) -> bool:
    loss_test = None if result.membership is None else result.membership.loss
    return loss_test is not None and loss_test.memorization == SHOWN


def _has_left_out_work(result: AuditResult) -> bool:
    return any(row.decides and row.unfinished for row in result.attacks)


def _not_covered(result: AuditResult) -> str:
    """Name the attacks and attackers that the audit did not test, because they may still find a leak."""
    skipped_attacks = [
        row.name for row in result.attacks if row.decides and row.applies and not row.ran
    ]
    if result.table is not None:
        range_attacker_text = (
            ""
            if result.knowledge.known_names
            else "an attacker who knows the ranges of the columns; "
        )
        return (
            f"{range_attacker_text}attackers who query the model; other content of this release "
            "(residuum scan)"
        )
    text_by_fact = {
        "theta0": "the initial weights (--init)",
        "mean": "the mean of the samples (--mean train)",
        "value_range": "the range of values (--value-range)",
    }
    unknown_fact_texts = [
        text for name, text in text_by_fact.items() if name not in result.knowledge.known_names
    ]
    uncovered_texts = (
        [f"an attacker who knows {' or '.join(unknown_fact_texts)}"] if unknown_fact_texts else []
    )
    uncovered_texts += (
        [f"attacks that were not run ({', '.join(skipped_attacks)})"] if skipped_attacks else []
    )
    uncovered_texts += ["attackers with shadow networks"]
    uncovered_texts += ["other content of this release (residuum scan)"]
    return "; ".join(uncovered_texts)


REDACTED_NOTE = " The last command writes this report without any sample, so that you can share it."
HOLDS_RECORDS = "Do not release this file, because it contains training records."
RETRAIN = (
    "Do not release this file. The weights themselves leak, so only another training helps. Retrain with "
    "differential privacy (DP-SGD) and audit the result. On images, DP-SGD was the only defense that "
    "held in our measurements. Weight noise, early stopping, weight decay, label smoothing and "
    "mini-batches did not."
)
FEWER_EPOCHS = (
    "Train for fewer epochs. In our measurements none of 9 networks that were trained on 60 samples for 10 "
    "epochs had a membership finding. After 200 epochs all 9 had one. This cost 1 to 14 points of test "
    "accuracy. Rounding the weights, mini-batches and weight decay did not help."
)
PROTECT_UPDATE = (
    "Do not send or store this update in the clear, because anyone who has it can reconstruct training "
    "samples. Use secure aggregation, so that nobody sees the update of one client, or differential "
    "privacy, which clips the gradient of every sample and adds noise. Larger batches leave fewer samples"
    " to reconstruct, but they protect no sample for sure. Then audit an update of the new protocol."
)
PROTECT_ATTRIBUTES = (
    "Do not release this file if its records must stay secret. In our measurements, three changes removed "
    "this leak: noise of 10% of the rms of each weight matrix (check the accuracy), GELU instead of ReLU, or "
    "at most 20 epochs. Rounding (bf16, int8), mini-batches and weight decay do not protect. Only "
    "differential privacy gives a guarantee. Audit the new file."
)
CHECK_READING = (
    "Check that architecture, preprocessing, labels and samples are those of the training."
)

LEAK_ROWS = (
    # An update holds no weights, so there is nothing to strip or to retrain.
    Row(
        lambda result: result.knowledge.update is not None,
        PROTECT_UPDATE,
        (redacted_report,),
    ),
    Row(
        lambda result: bool(result.verdict.stored and strip_file(result)),
        f"{HOLDS_RECORDS} The first command writes only the weights. Audit the result before you release "
        "it.",
        (strip_file, redacted_report),
    ),
    Row(
        lambda result: bool(result.verdict.stored) and result.checks.why_no_attack == NO_ATTACK,
        "Do not release this folder, because its files hold training texts. Delete these files, or remove "
        "the texts from them. Then audit the folder again.",
        (scan_file, redacted_report),
    ),
    Row(
        lambda result: bool(result.verdict.stored),
        f"{HOLDS_RECORDS} If the model is made of its records, such as nearest neighbors, it cannot work "
        "without them. Train another kind of model, or save the model without the records, and audit it "
        "again.",
        (redacted_report,),
    ),
    Row(
        lambda result: result.verdict.is_below_limit,
        "The findings are weaker than your limit (--fail-on). Decide whether you accept this leak before "
        "you release this file.",
        (redacted_report,),
    ),
    Row(
        lambda result: (
            result.membership is not None
            and result.membership.is_finding
            and result.membership.signal == MOVED_ROWS
        ),
        "Do not release this model if the words of its training texts must stay secret. Everyone with the "
        "base can read these words from the rows of the embedding that moved. Train again with a frozen "
        "embedding, or with differential privacy (DP-SGD), which moves all rows. Then audit the new model.",
        (redacted_report,),
    ),
    Row(
        lambda result: result.verdict.grade == MEMBERSHIP,
        "Do not release this file if it must stay secret who is in the training set. An attacker with a "
        f"sample can tell that it was trained on. {FEWER_EPOCHS} Then audit the new file.",
        (redacted_report,),
    ),
    Row(
        lambda result: result.verdict.grade == ATTRIBUTE and result.attributes is not None,
        PROTECT_ATTRIBUTES,
        (redacted_report,),
    ),
    Row(
        lambda result: result.table is None and result.targets is not None,
        "Do not release this file, because its thresholds are values of training records. Round the columns "
        "before training, so that no value identifies a record, or use a library whose thresholds lie "
        "between two values. Then audit the new file.",
        (redacted_report,),
    ),
    Row(
        lambda result: result.table is not None,
        "Do not release this file, because its trees determine values of training records. Train again with "
        "at least 5 records in every leaf (min_samples_leaf=5) and with fewer trees than records. Remove the "
        "seeds and the impurities of the trees before you save the model: residuum strip prints a script for "
        "this. Removing them alone does not help. Audit the new file.",
        (redacted_report,),
    ),
    Row(
        lambda result: _leaking_surfaces(result) == {MOMENT} and bool(strip_file(result)),
        "Do not release this file as it is. Its optimizer state leaks training samples and is not needed to "
        "use the network. Strip it and audit what remains.",
        (strip_file, audit_stripped_file, redacted_report),
    ),
    Row(
        lambda result: MOMENT in _leaking_surfaces(result),
        f"{RETRAIN} Also remove the optimizer state from the file.",
        (redacted_report,),
    ),
    Row(lambda result: True, RETRAIN, (redacted_report,)),
)
# Rows about wrong inputs come first. If the inputs are wrong, a larger budget would not help.
INCONCLUSIVE_ROWS = (
    Row(
        lambda result: any(note.startswith(ONLY_STORED) for note in result.notes),
        "Pass samples that the model can receive, with the columns encoded as in the training, or pass the "
        "model in memory to rs.audit. Until then, only stored records were searched.",
    ),
    Row(
        lambda result: result.verdict.n is None and result.membership is None,
        "Pass the training samples (--data) and samples that the network never saw (--holdout). Without "
        "them only stored records can be found.",
    ),
    Row(
        lambda result: (
            result.knowledge.update is not None
            and result.verdict.n is not None
            and not result.checks.failures
        ),
        "Treat this update as if it revealed its samples. Residuum has no positive controls for updates, so "
        "finding nothing proves nothing. Send updates only with secure aggregation, or clip gradients and "
        "add noise (differential privacy).",
        (redacted_report,),
    ),
    Row(
        lambda result: result.membership is not None and not result.membership.holdout,
        "Pass samples that the network never saw (--holdout), at least {needed} of them, from the same "
        "source and prepared in the same way: a test set, a validation set, or samples collected later. "
        "Stored records were searched without them.",
    ),
    Row(
        lambda result: bool(result.checks.failures),
        "Pass other held-out samples (--holdout): from the same source as the training samples, prepared in "
        "the same way, and none of them trained on.",
    ),
    Row(lambda result: result.fit is not None and result.fit.is_doubtful, CHECK_READING),
    Row(
        _has_too_few_held_out,
        "Pass more held-out samples (--holdout): at least {needed}, and there are {holdout}. They must come "
        "from the same source and be prepared in the same way.",
    ),
    Row(
        lambda result: bool(result.checks.why_no_attack) and _memorizes(result),
        "Do not release this model if it must stay secret who is in its training set. An attacker with a "
        "sample and its label can tell better than chance whether the model was trained on it. Train again "
        "with more regularization, so that training and held-out samples have the same losses. Then audit "
        "the new model.",
        (redacted_report,),
    ),
    Row(
        lambda result: result.checks.why_no_attack == NO_ATTACK,
        "No audit by residuum can rule out a leak of a token model. Pass the weights before fine-tuning "
        "(--base), because moved rows of the embedding name words of the training texts. If only a head was "
        "trained on frozen embeddings, audit the head with these embeddings as samples. An attacker with "
        "shadow models may find more members.",
        (scan_file, redacted_report),
    ),
    Row(
        lambda result: bool(result.checks.why_no_attack),
        "No audit by residuum can rule out a leak of this kind of model. Residuum searched stored records "
        "and compared losses. Look at these results before you release the model. Do not take them for a "
        "proof. An attacker with shadow models may find more members.",
        (scan_file, redacted_report),
    ),
    Row(
        lambda result: bool(result.checks.restricted),
        "Run the standard plan, which can rule out a leak.",
        (audit_with_standard_plan,),
    ),
    Row(
        lambda result: bool(result.findings and result.findings.set_aside_matches),
        "Remove the training samples from the held-out file and audit again. Some of them match a "
        "reconstruction, so this file may leak.",
    ),
    Row(
        _has_strippable_state,
        "Strip the optimizer state, which is not needed to use the network, and audit what remains.",
        (strip_file, audit_stripped_file),
    ),
    Row(
        lambda result: (
            _has_left_out_work(result) and (result.checks.budget_needed or 0) > MAX_BUDGET
        ),
        "All attacks on this network would take about {budget} of reference time on a CPU. Run the audit on "
        "a GPU (--device cuda). Until then, assume that this file may leak.",
    ),
    Row(
        _has_left_out_work,
        "Raise the budget. At {budget} no work is left out.",
        (audit_with_larger_budget,),
    ),
    Row(
        lambda result: bool(result.checks.stopped),
        "Run the audit again on an idle machine, or with a larger budget. The time limit stopped this audit.",
        (audit_again,),
    ),
    Row(
        lambda result: _memorizes(result) and result.table is not None,
        "The model fits its training samples better than other samples, so an audit cannot rule out a leak, "
        "even though nothing was recovered. Train again with more records in every leaf, for example twice "
        "min_samples_leaf, and with shallower trees (max_depth). Then audit the new file.",
        (redacted_report,),
    ),
    Row(
        _memorizes,
        "The network memorizes its training samples, so an audit cannot rule out a leak, even though no "
        f"sample is named or reconstructed. {FEWER_EPOCHS} Then audit the new file.",
        (redacted_report,),
    ),
    Row(
        lambda result: any(
            "--no-positive-controls" in c.reason for c in result.checks.positive_controls
        ),
        "Let the audit train its positive controls.",
        (audit_with_controls,),
    ),
    Row(
        lambda result: result.table is not None,
        "Pass more held-out samples with targets (--holdout), so that the positive controls have as many "
        "records as the forest.",
    ),
    Row(
        lambda result: result.membership is not None and bool(result.membership.reason),
        CHECK_READING + " Held-out samples must be of the same kind as the training samples.",
    ),
    Row(
        lambda result: (
            any(control.limited_by == BUDGET for control in result.checks.positive_controls)
            and _budget_for_larger_controls(result) <= MAX_BUDGET
        ),
        "Raise the budget to {larger_budget}. The positive controls then have more samples, which makes "
        "a leak easier to detect in them.",
        (audit_with_larger_controls,),
    ),
    Row(
        lambda result: True,
        "Pass more held-out samples with labels (--holdout), or describe how the network was trained, so "
        "that the positive controls are trained in the same way. For example: --recipe "
        "optimizer=adam,rate=0.001,epochs=100.",
    ),
)
NO_LEAK_ROWS = (
    Row(
        lambda result: True,
        "These tests give no reason to hold this file back. Not covered: {not_covered}.",
        (scan_file,),
    ),
)
TABLE = {LEAK: LEAK_ROWS, INCONCLUSIVE: INCONCLUSIVE_ROWS, NO_LEAK_FOUND: NO_LEAK_ROWS}
