"""The stages of an audit, and the reasons why one of them is skipped.

Each stage is a function that takes an :class:`~residuum.auditing.run.Audit` and returns a copy that also
holds the outputs of the stage. A function ``skip_...`` returns the reason to skip a stage, or "" if the stage
runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from residuum.auditing.certificates import Certificates, compute_certificates
from residuum.auditing.controls import compare_losses, import_classifier, run_controls
from residuum.auditing.exposure_stage import rank_samples
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
NO_PREDICTIONS = "the file holds no model that residuum evaluates"
NO_RECORDS = "the release stores no records"
NO_SAMPLES = "there are no training samples to compare with"
NO_TRAINING_SAMPLES = "there are no training samples to rank"
NO_CONTROLS = "there are no positive controls for updates"
NO_CERTIFICATE = "the file holds an update, which is no result of converged training"
DECIDED = "positive controls cannot change this verdict"
SWITCHED_OFF = "switched off with --no-positive-controls"
OTHER_SHAPE = "training and held-out samples have different shapes"


def skip_without_records(audit: Audit) -> str:
    """Return the reason to skip a stage if the release stores no records, "" otherwise."""
    return NO_RECORDS if audit.case.stored is None else ""


def find_stored_records(audit: Audit) -> Audit:
    """Return the audit with the result of the search for the samples in the release."""
    assert audit.case.stored is not None
    return replace(audit, stored_records=audit.case.stored.outcome())


def skip_without_network(audit: Audit) -> str:
    """Return the reason to skip a stage if there is no network, "" otherwise."""
    return NO_NETWORK if audit.case.network is None else ""


def skip_without_samples(audit: Audit) -> str:
    """Return the reason to skip a stage if there is no network or no training sample, "" otherwise."""
    return skip_without_network(audit) or skip_without_train(audit)


def skip_without_weights(audit: Audit) -> str:
    """Return the reason to skip a stage that tests the weights, "" if the samples trained these weights."""
    return skip_without_samples(audit) or audit.case.why_no_weights


def skip_without_train(audit: Audit) -> str:
    """Return the reason to skip a stage if there are no training samples, "" otherwise."""
    return NO_SAMPLES if audit.case.train is None else ""


def skip_without_predictions(audit: Audit) -> str:
    """Return the reason to skip a stage if the model cannot be evaluated or there are no training samples."""
    return NO_PREDICTIONS if audit.case.predictor is None else skip_without_train(audit)


def skip_without_texts_and_base(audit: Audit) -> str:
    """Return the reason to skip a stage if there are no training texts and no moved rows, "" otherwise."""
    tokens = audit.case.tokens
    has_moved_rows = tokens is not None and tokens.touched is not None
    return "" if has_moved_rows else skip_without_train(audit)


def skip_without_forest(audit: Audit) -> str:
    """Return the reason to skip a stage if there is no forest, "" otherwise."""
    if audit.case.forest is not None:
        return ""
    return audit.case.why_no_attack or NO_PREDICTIONS


def skip_without_table(audit: Audit) -> str:
    """Return the reason to skip a stage if there is no forest or no training sample, "" otherwise."""
    return skip_without_forest(audit) or skip_without_train(audit)


def test_membership(audit: Audit) -> Audit:
    """Return the audit with two tests: a test of membership, and a test of the losses.

    The test of membership uses activation boundaries, which depend on the weights. The test of the losses
    compares the losses of the network on training and held-out samples.
    """
    case, seed = audit.case, audit.request.seed
    sample_sets = case.sample_sets
    assert sample_sets is not None
    if sample_sets.holdout is not None and sample_sets.holdout.shape != sample_sets.train.shape:
        return audit.skip("membership", OTHER_SHAPE)
    membership = measure_membership(case.audited, sample_sets.train, sample_sets.holdout, seed)
    audit.listener.message(membership.line)
    balanced_sets = case.balanced_sets
    assert balanced_sets is not None
    p_value = compare_losses(
        case.audited, balanced_sets.train, balanced_sets.holdout, case.audited.task, seed
    )
    return replace(audit, membership=membership, p_value_of_losses=p_value)


def run_negative_controls(audit: Audit) -> Audit:
    """Return the audit with the results of the negative controls.

    A negative control scores candidates that do not depend on the network, so they must not match training
    samples.
    """
    case = audit.case
    # Import this slow module before the controls are timed, because the duration of one control decides
    # whether there is time for another.
    import_classifier()
    assert case.balanced_sets is not None
    controls = run_controls(
        case.balanced_sets, case.knowledge, audit.request.seed, deadline=audit.deadline
    )
    return replace(audit, negative_controls=controls)


def score_reconstructions(audit: Audit) -> Audit:
    """Return the audit with scores, which compare the candidates of all attacks with the samples."""
    case, request = audit.case, audit.request
    assert case.balanced_sets is not None
    scores = score_attacks(
        case.audited,
        audit.attacks,
        case.balanced_sets,
        request.seed,
        request.subsets,
        audit.deadline.seconds_left,
        audit.negative_controls.level,
    )
    return replace(audit, scores=scores)


def skip_if_decided(audit: Audit) -> str:
    """Return the reason to skip the positive controls if they cannot change the verdict, "" otherwise.

    Positive controls decide only whether an audit that shows no leak can rule out a leak. To find out, the
    verdict is computed as if the tests detected every positive control. The controls run if this verdict is
    "no leak found", or if its findings are weaker than the limit of ``--fail-on``.
    """
    if reason := skip_without_train(audit):
        return reason
    if audit.case.knowledge.update is not None:
        return NO_CONTROLS
    if audit.case.forest is None and (reason := skip_without_network(audit)):
        return audit.case.why_no_attack or reason
    sample_sets = audit.case.sample_sets
    if sample_sets is None or sample_sets.holdout is None or len(sample_sets.holdout) < MIN_HOLDOUT:
        return DECIDED
    train_count = len(sample_sets.train)
    fully_detected_controls = tuple(
        PositiveControls(
            question, (ControlSize(train_count, (train_count,) * networks, networks, 0.0),)
        )
        for question, networks in NETWORKS.items()
    )
    best_verdict = replace(audit, positive_controls=fully_detected_controls).verdict()
    return "" if best_verdict.outcome == NO_LEAK_FOUND or best_verdict.is_below_limit else DECIDED


def run_positive_controls(audit: Audit) -> Audit:
    """Return the audit with the results of its positive controls.

    A positive control is a network that is known to memorize its samples. The tests must detect a leak in it.
    """
    if not audit.request.positive_controls:
        controls = tuple(PositiveControls(question, reason=SWITCHED_OFF) for question in NETWORKS)
    else:
        controls = train_and_test_controls(audit)
    return replace(audit, positive_controls=controls)


def skip_without_network_and_time(audit: Audit) -> str:
    """Return the reason to skip a stage if there is no network or no time is left, "" otherwise."""
    if audit.case.knowledge.update is not None:
        return NO_CERTIFICATE
    return skip_without_network(audit) or (NO_TIME if audit.deadline.is_over else "")


def certify(audit: Audit) -> Audit:
    """Return the audit with two certificates: optimality (KKT residuals) and uniqueness."""
    case = audit.case
    certificates = compute_certificates(
        case.attacked,
        case.train,
        audit.attacks.reconstructions,
        case.knowledge,
        audit.deadline.seconds_left,
    )
    return replace(audit, certificates=certificates)


def skip_without_network_time_and_samples(audit: Audit) -> str:
    """Return the reason to skip a stage if there is no network, no time, or no training sample."""
    if reason := skip_without_network_and_time(audit):
        return reason
    return NO_TRAINING_SAMPLES if audit.case.train is None else ""


def rank_exposure(audit: Audit) -> Audit:
    """Return the audit with a ranking of the training samples by the risk that they leak."""
    case = audit.case
    assert case.train is not None
    assert case.sample_sets is not None
    displayed_attack = "" if audit.scores is None else audit.scores.displayed_attack
    exposure, reason = rank_samples(
        case.audited,
        case.train,
        case.sample_sets,
        case.knowledge,
        audit.attacks.reconstructions,
        displayed_attack,
    )
    return replace(audit, exposure=exposure) if exposure else audit.skip("exposure", reason)


def certificates_or_reason(audit: Audit) -> Certificates:
    """Return the certificates of an audit, or the reason why the stage "certificates" was skipped."""
    reason = audit.skipped.get("certificates", "")
    return Certificates(None, reason, None, reason) if reason else audit.certificates
