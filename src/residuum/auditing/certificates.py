"""The two certificates (proved statements) of an audit: about the training, and about a reconstruction.

The KKT certificate says how exactly the weights solve the KKT equation of margin maximization for some
samples. If there are training samples, the certificate is computed for them. Otherwise it is computed for
candidates: the samples that the best restart of an attack reconstructed. Both certificates use the network
that was attacked (``Case.attacked``), because the KKT multipliers of a reconstruction are valid only for its
weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from residuum.attacks.stationarity.solution import (
    build_solution,
    find_best_residual,
    select_best_rows,
)
from residuum.errors import InconclusiveError, ResiduumError
from residuum.networks import dense_chain
from residuum.networks.network import Network
from residuum.records import Certificate, Dataset, Knowledge, Reconstruction, Record, Uniqueness
from residuum.theory import certify
from residuum.theory.uniqueness import uniqueness

TRAINING, CANDIDATES = "training samples", "candidates of the best restart"
NOT_CONVERGED = "no restart converged to candidates that could be certified"
# A KKT certificate (a measure of how well training samples explain the weights) solves a problem with one
# unknown per sample, so the number of samples is limited.
MAX_SAMPLES = 500
MAX_BYTES = 2 << 30  # memory limit for the gradients that a KKT certificate needs: 2 GiB
MAX_SECONDS = 5.0  # time limit in seconds, after which a certificate returns the best bounds so far
# A uniqueness certificate (a proof of how unique a reconstruction is) takes at most MAX_CERTIFIED
# reconstructed samples, with at most MAX_UNKNOWNS values in total, to limit its time.
MAX_CERTIFIED, MAX_UNKNOWNS = 40, 400_000


@dataclass(frozen=True, eq=False)
class Certificates(Record):
    """The two certificates of an audit, or the reasons why there are none.

    Attributes:
        certificate: KKT certificate: how exactly the weights solve the KKT equation (of margin maximization)
            for the samples.
        certificate_of: The samples of the KKT certificate, or the reason why there is no KKT certificate.
        uniqueness: Uniqueness certificate. Several training sets may fit the weights equally well. The
            certificate says which part of each candidate (reconstructed sample) all these sets share.
        uniqueness_reason: The reason why there is no ``uniqueness``.
    """

    certificate: Certificate | None = None
    certificate_of: str = ""
    uniqueness: Uniqueness | None = None
    uniqueness_reason: str = ""


def compute_certificates(
    network: Network,
    train: Dataset | None,
    reconstructions: tuple[Reconstruction, ...],
    knowledge: Knowledge,
    seconds: float,
) -> Certificates:
    """Compute the KKT certificate and the uniqueness certificate. Both do not affect the verdict.

    Training samples that do not fit the network raise a ``ResiduumError``.

    Args:
        network: The attacked network.
        train: The training samples.
        reconstructions: Outputs of the deciding attacks, which are all attacks except baselines.
        knowledge: What the attacker knows. The known value range bounds the candidates.
        seconds: Seconds that are left until the time limit of the audit.

    Returns:
        The two certificates, or the reasons why there are none.
    """
    certificate_seconds = max(0.1, min(MAX_SECONDS, seconds / 2))
    kkt, subject = kkt_certificate(network, train, reconstructions, certificate_seconds)
    uniqueness_certificate, reason = _uniqueness(
        network, reconstructions, knowledge, certificate_seconds
    )
    return Certificates(kkt, subject, uniqueness_certificate, reason)


def kkt_certificate(
    network: Network,
    train: Dataset | None,
    reconstructions: tuple[Reconstruction, ...],
    seconds: float,
    max_bytes: int = MAX_BYTES,
) -> tuple[Certificate | None, str]:
    """Compute how exactly the weights solve the KKT equation of margin maximization for some samples.

    Args:
        network: The attacked network.
        train: The training samples, None to certify the candidates of the best restart instead.
        reconstructions: Outputs of the deciding attacks, which are all attacks except baselines.
        seconds: Time limit in seconds of the search for derivatives. If the input of a ReLU is zero at a
            sample, the derivative of the ReLU is not unique, and the search chooses 0 or 1.
        max_bytes: Largest memory in bytes that the per-sample gradients may take.

    Returns:
        The certificate and the kind of its samples in words, or None and the reason why there is no
        certificate.

    Raises:
        ResiduumError: If the training samples do not fit the network.
        RuntimeError: If the network raises an error. If the network is a module of the user, the error is
            returned as the reason instead.
    """
    if train is not None:
        x, y, subject = train.x, train.y, TRAINING
    else:
        best_rows = select_best_rows(reconstructions[0]) if reconstructions else None
        if best_rows is None:
            return None, NOT_CONVERGED
        x, y, subject = (
            reconstructions[0].x[best_rows],
            reconstructions[0].labels[best_rows],
            CANDIDATES,
        )
    if len(x) > MAX_SAMPLES:
        return None, f"not computed for more than {MAX_SAMPLES} samples; there are {len(x)} samples"
    model = network.module
    # For MLPs the certificate is computed by formulas. For any other network, the gradient of every sample is
    # stored in memory.
    gradient_bytes = 8 * len(x) * sum(t.numel() for t in network.theta.values())
    if dense_chain(model) is None and gradient_bytes > max_bytes:
        return None, (
            f"not computed, because the gradients of {len(x)} samples take {gradient_bytes / 2**30:.1f} GiB, "
            f"more than {max_bytes / 2**30:.0f}"
        )
    try:
        return certify(model, x, y, task=network.task or "auto", seconds=seconds), subject
    except ResiduumError as problem:
        # An error is raised only for training samples that do not fit the network. The user cannot correct a
        # network with constant outputs or wrong candidates, so these cases return a reason.
        if train is not None and not isinstance(problem, InconclusiveError):
            raise
        return None, f"the {subject} cannot be certified ({problem.message})"
    except RuntimeError as problem:  # torch.func cannot differentiate some modules
        if network.live is None:
            raise
        return None, f"not for this kind of network ({str(problem).splitlines()[0][:200]})"


def _uniqueness(
    network: Network,
    reconstructions: tuple[Reconstruction, ...],
    knowledge: Knowledge,
    seconds: float,
) -> tuple[Uniqueness | None, str]:
    """Compute the uniqueness certificate of the samples that the best run of an attack reconstructed.

    Several training sets may fit the weights equally well. The certificate says which part of each candidate
    (reconstructed sample) all these training sets share.

    Args:
        network: The attacked network.
        reconstructions: Outputs of the deciding attacks, which are all attacks except baselines.
        knowledge: What the attacker knows. The known value range bounds the candidates.
        seconds: Time limit of the certificate.

    Returns:
        The certificate and "", or None and the reason why there is no certificate. The ``index`` of the
        certificate lists positions of candidates in the first reconstruction. The candidate with the
        largest KKT multiplier comes first.
    """
    if network.live is not None:
        why_no_boundaries = "the activation boundaries of a live module are unknown"
        return None, f"not for this kind of network: {why_no_boundaries}"
    if not reconstructions or (rows := select_best_rows(reconstructions[0])) is None:
        return None, NOT_CONVERGED
    best_reconstruction = reconstructions[0]
    if best_reconstruction.x[rows].numel() > MAX_UNKNOWNS:
        return None, f"not computed for more than {MAX_UNKNOWNS} unknown values"
    try:
        kkt_solution = build_solution(network.module, best_reconstruction, "best")
        value_box = knowledge.box(kkt_solution.x[0])
        certificate = uniqueness(
            kkt_solution.kkt, box=value_box, samples=MAX_CERTIFIED, seconds=seconds
        )
        certificate = certificate.replace(
            best_residual=find_best_residual(network.module, reconstructions)
        )
    # The candidates are not an input of the user. If they cannot be certified, return a reason, not an error.
    except ResiduumError as problem:
        return None, f"not computed: {problem.message}"
    return certificate.replace(index=rows[certificate.index]), ""
