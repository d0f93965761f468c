"""The stages of an audit, and the reasons why one of them is skipped.

Each stage takes an :class:`~residuum.auditing.run.Audit` and returns a copy with its own outputs filled in.
A skip reason is "" if the stage runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from residuum.auditing.certificates import Certificates, compute_certificates
from residuum.auditing.controls import machinery, run_controls, told_by_network
from residuum.auditing.exposure_stage import exposure_of_samples
from residuum.auditing.positive_control import train_and_test_controls
from residuum.auditing.power import NETWORKS, ControlSize, PositiveControls
from residuum.auditing.schedule import NO_TIME
from residuum.auditing.scores import score_attacks
from residuum.auditing.verdict import NO_LEAK_FOUND
from residuum.evaluation.matching import MIN_HOLDOUT
from residuum.risk.membership import measure_membership

if TYPE_CHECKING:
    from residuum.auditing.run import Audit

NO_NETWORK = "the file holds no network"
NO_RECORDS = "the release stores no records"
NO_SAMPLES = "there are no training samples to compare with"
NO_TRAINING_SAMPLES = "there are no training samples to look at"
DECIDED = "the verdict does not need it"
UNWANTED = "they were switched off (--no-positive-controls)"
OTHER_SHAPE = "training and held-out samples have different shapes"


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


def test_membership(audit: Audit) -> Audit:
    """Test whether training samples can be told from held-out samples by the weights.

    The stage also tests whether the losses tell them apart at all, which shows whether the network was
    trained on these samples.
    """
    case, seed = audit.case, audit.request.seed
    claim = case.comparison
    assert claim is not None
    if claim.pool is not None and claim.pool.shape != claim.train.shape:
        return audit.skip("membership", OTHER_SHAPE)
    membership = measure_membership(case.audited, claim.train, claim.pool, seed)
    audit.listener.message(membership.line)
    compared = case.compared
    assert compared is not None
    p_value = told_by_network(case.audited, compared.train, compared.pool, case.audited.task, seed)
    return replace(audit, membership=membership, p_value_of_losses=p_value)


def run_negative_controls(audit: Audit) -> Audit:
    """Score candidates that hold nothing of the network. They must not match the training samples."""
    case = audit.case
    machinery()  # imported before the clock is read
    assert case.compared is not None
    controls = run_controls(
        case.compared, case.knowledge, audit.request.seed, deadline=audit.deadline
    )
    return replace(audit, negative_controls=controls)


def score_reconstructions(audit: Audit) -> Audit:
    """Compare the candidates of all attacks with training and held-out samples."""
    case, request = audit.case, audit.request
    assert case.compared is not None
    scores = score_attacks(
        case.audited,
        audit.attacks,
        case.compared,
        request.seed,
        request.subsets,
        audit.deadline.left,
        audit.negative_controls.level,
    )
    return replace(audit, scores=scores)


def skip_if_decided(audit: Audit) -> str:
    """Return the reason to skip if no result of the positive controls would change the exit code."""
    if reason := skip_without_samples(audit):
        return reason
    claim = audit.case.comparison
    if claim is None or claim.pool is None or len(claim.pool) < MIN_HOLDOUT:
        return DECIDED
    n = len(claim.train)
    if_detected = tuple(
        PositiveControls(question, (ControlSize(n, (n,) * networks, networks, 0.0),))
        for question, networks in NETWORKS.items()
    )
    verdict = replace(audit, positive_controls=if_detected).verdict()
    return "" if verdict.outcome == NO_LEAK_FOUND or verdict.is_below_limit else DECIDED


def run_positive_controls(audit: Audit) -> Audit:
    """Test networks that are known to memorize their samples like the audited network."""
    if not audit.request.positive_controls:
        controls = tuple(PositiveControls(question, reason=UNWANTED) for question in NETWORKS)
    else:
        controls = train_and_test_controls(audit)
    return replace(audit, positive_controls=controls)


def skip_without_network_and_time(audit: Audit) -> str:
    """Return the reason to skip if there is no network, or if the time is over."""
    return skip_without_network(audit) or (NO_TIME if audit.deadline.is_over else "")


def certify(audit: Audit) -> Audit:
    """Measure how near the weights are to a KKT point, and how unique the candidates are."""
    case = audit.case
    certificates = compute_certificates(
        case.attacked,
        case.train,
        audit.attacks.reconstructions,
        case.knowledge,
        audit.deadline.left,
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
