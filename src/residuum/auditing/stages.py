"""The stages of an audit, and the reasons why one of them is skipped.

Each stage takes an :class:`~residuum.auditing.run.Audit` and returns a copy with its own outputs filled in.
A skip reason is "" if the stage runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from residuum.auditing.certificates import Certificates, compute_certificates
from residuum.auditing.controls import machinery, membership, run_controls, told_by_network
from residuum.auditing.exposure_stage import exposure_of_samples
from residuum.auditing.positive_control import train_and_attack_controls
from residuum.auditing.schedule import OUT_OF_TIME, AttackSchedule
from residuum.auditing.scores import score_attacks
from residuum.auditing.verdict import AttackOutcome, Twin, acquitting, open_question

if TYPE_CHECKING:
    from residuum.auditing.run import Audit

NO_NETWORK = "the file holds no network"
NO_RECORDS = "the release stores no records"
NO_SAMPLES = "there are no training samples to compare with"
NO_TRAINING_SAMPLES = "there are no training samples to look at"
NO_HOLDOUT = "there are no held-out samples with labels to compare with"
DECIDED = "the verdict does not need it"
UNWANTED = "it was not wanted (--no-twin)"


def skip_without_records(audit: Audit) -> str:
    """Return the reason to skip if the release stores no records."""
    return NO_RECORDS if audit.case.stored is None else ""


def find_stored_records(audit: Audit) -> Audit:
    """Search the given samples among the records that the release stores."""
    assert audit.case.stored is not None
    whole = audit.case.whole or audit.case
    return replace(audit, stored_records=audit.case.stored.outcome(whole.train, whole.holdout))


def skip_without_network(audit: Audit) -> str:
    """Return the reason to skip if there is no network."""
    return NO_NETWORK if audit.case.network is None else ""


def skip_without_samples(audit: Audit) -> str:
    """Return the reason to skip if there are no training samples to compare with."""
    return skip_without_network(audit) or (NO_SAMPLES if audit.case.train is None else "")


def run_negative_controls(audit: Audit) -> Audit:
    """Score candidates that hold nothing of the network. They must not match the training samples."""
    case = audit.case
    machinery()  # imported before the clock starts
    with audit.budget.checks:
        assert case.comparison is not None
        controls = run_controls(
            case.comparison, case.knowledge, audit.request.seed, allowance=audit.budget.checks
        )
    return replace(audit, negative_controls=controls)


def score_reconstructions(audit: Audit) -> Audit:
    """Compare the candidates of all attacks with training and held-out samples."""
    case, request = audit.case, audit.request
    assert case.comparison is not None
    scores = score_attacks(
        case.audited,
        audit.attacks,
        case.comparison,
        request.seed,
        request.subsets,
        audit.budget.scoring,
    )
    return replace(audit, scores=scores)


def skip_without_time_and_holdout(audit: Audit) -> str:
    """Return the reason to skip if the time is over, or if there are no held-out samples."""
    if reason := skip_without_network(audit):
        return reason
    if audit.budget.is_spent:
        return OUT_OF_TIME
    return NO_HOLDOUT if audit.case.comparison is None else ""


def measure_membership(audit: Audit) -> Audit:
    """Measure how well losses tell training samples from held-out samples."""
    result = membership(audit.case.audited, audit.case.comparison)
    audit = replace(audit, membership=result)
    return audit if result is not None else audit.skip("membership", NO_HOLDOUT)


def skip_if_decided(audit: Audit) -> str:
    """Return the reason to skip if the verdict does not depend on what finding nothing proves."""
    if reason := skip_without_samples(audit):
        return reason
    stored = audit.stored_records is not None and audit.stored_records.stands
    findings = None if audit.scores is None else audit.scores.findings
    if stored or findings is None or not open_question(findings, audit.checks):
        return DECIDED
    return ""


def attack_permuted_target(audit: Audit) -> Audit:
    """Measure what the attacks leave on a target that holds nothing.

    If an attack leaves about as much of the real weights, it did not fit them, and finding nothing
    proves nothing. The stage also tests whether the network knows the samples at all.
    """
    case, budget = audit.case, audit.budget
    claim, scores = case.comparison, audit.scores
    assert claim is not None
    assert scores is not None
    budget.checks.limit(budget.end.left)
    with budget.checks:
        p_value = told_by_network(
            case.audited, claim.train, claim.pool, case.audited.task, audit.request.seed
        )
        rows = tuple(_with_permuted_residual(audit, row) for row in scores.attacks)
    return replace(audit, p_value_of_losses=p_value, scores=scores.replace(attacks=rows))


def _with_permuted_residual(audit: Audit, row: AttackOutcome) -> AttackOutcome:
    """Return the row with the residual on the permuted target, if it matters and the time allows."""
    if not (row.decides and row.ran and not row.silent and row.residual is not None):
        return row
    # Restarts side by side cost a CPU what they cost one after another. On a GPU, one alone may take as
    # long as its whole batch.
    on_gpu = audit.request.device.startswith("cuda")
    batches = sum(batch.attack == row.name for batch in audit.attacks.batches)
    expected = row.seconds / max(1, batches if on_gpu else row.restarts)
    left, residual = audit.budget.checks.left, None
    if expected < left:
        residual = AttackSchedule.of(audit).residual_on_permuted(row.name, row.steps, left)
    reason = f"no time was left for it, about {expected:.1f} s" if residual is None else ""
    return row.replace(permuted=residual, unasked=reason)


def skip_if_no_pass_is_possible(audit: Audit) -> str:
    """Return the reason to skip if the verdict cannot be "no leak found", with or without controls."""
    if reason := skip_if_decided(audit):
        return reason
    assert audit.scores is not None
    trusted = audit.request.vouch or not audit.checks.strangers
    return "" if acquitting(audit.scores.attacks) and trusted else DECIDED


def run_positive_controls(audit: Audit) -> Audit:
    """Attack networks that are known to memorize their samples, with the plan of this audit."""
    if not audit.request.twin:
        return replace(audit, positive_controls=(Twin(reason=UNWANTED),))
    with audit.budget.checks:
        controls = train_and_attack_controls(audit)
    return replace(audit, positive_controls=controls)


def skip_without_network_and_time(audit: Audit) -> str:
    """Return the reason to skip if there is no network, or if the time is over."""
    return skip_without_network(audit) or (OUT_OF_TIME if audit.budget.is_spent else "")


def certify(audit: Audit) -> Audit:
    """Measure how near the weights are to a KKT point, and how unique the candidates are."""
    case = audit.case
    certificates = compute_certificates(
        case.attacked,
        case.train,
        audit.attacks.reconstructions,
        case.knowledge,
        audit.request.seconds,
    )
    return replace(audit, certificates=certificates)


def skip_without_network_time_and_samples(audit: Audit) -> str:
    """Return the reason to skip if there is no network, no time, or no training sample."""
    if reason := skip_without_network_and_time(audit):
        return reason
    return NO_TRAINING_SAMPLES if audit.case.train is None else ""


def rank_exposure(audit: Audit) -> Audit:
    """Rank the training samples by their risk, from weights and samples."""
    case = audit.case
    assert case.train is not None
    assert case.comparison is not None
    shown = "" if audit.scores is None else audit.scores.shown
    exposure, reason = exposure_of_samples(
        case.audited,
        case.train,
        case.comparison,
        case.knowledge,
        audit.attacks.reconstructions,
        shown,
    )
    return replace(audit, exposure=exposure) if exposure else audit.skip("exposure", reason)


def certificates_or_reason(audit: Audit) -> Certificates:
    """Return the certificates, or the reason why they were skipped in their place."""
    reason = audit.skipped.get("certificates", "")
    return Certificates(None, reason, None, reason) if reason else audit.certificates
