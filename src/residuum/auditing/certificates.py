"""The two certificates of an audit: KKT residuals, and the uniqueness of a reconstruction.

With training samples, the KKT certificate is computed for the samples. Without them, it is computed for the
candidates of the best restart. Both certificates use the network that was attacked (``Case.attacked``),
because multipliers belong to its weights.
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
MAX_SAMPLES = 500  # of a KKT certificate, which solves a problem with one unknown per sample
MAX_BYTES = 2 << 30  # memory of its gradients
MAX_SECONDS = 5.0  # of each certificate, which then returns the bounds that it has reached
# Candidates of a uniqueness certificate, and values in them. They fit into the time of a certificate.
MAX_CERTIFIED, MAX_UNKNOWNS = 40, 400_000


@dataclass(frozen=True, eq=False)
class Certificates(Record):
    """Both certificates, or the reasons why there are none.

    Attributes:
        certificate: The KKT certificate.
        certificate_of: What it is of, or the reason why there is none.
        uniqueness: Which values of the best restart's candidates other training sets share.
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
    """Compute both certificates, which do not enter the verdict.

    Training samples that do not fit the network raise a ``ResiduumError``.

    Args:
        network: The attacked network.
        train: The training samples.
        reconstructions: Outputs of the deciding attacks.
        knowledge: What the attacker knows. It bounds the candidates.
        seconds: Time until the clock stops the audit.

    Returns:
        The certificates.
    """
    limit = max(0.1, min(MAX_SECONDS, seconds / 2))
    kkt, subject = kkt_certificate(network, train, reconstructions, limit)
    unique, reason = _uniqueness(network, reconstructions, knowledge, limit)
    return Certificates(kkt, subject, unique, reason)


def kkt_certificate(
    network: Network,
    train: Dataset | None,
    reconstructions: tuple[Reconstruction, ...],
    seconds: float,
    max_bytes: int = MAX_BYTES,
) -> tuple[Certificate | None, str]:
    """Compute the KKT certificate of the training samples, or of the best restart's candidates.

    Args:
        network: The attacked network.
        train: The training samples. Without them the candidates of the best restart are certified.
        reconstructions: Outputs of the deciding attacks.
        seconds: Time for choosing gates at kinks.
        max_bytes: Memory that per-sample gradients may take.

    Returns:
        The certificate and what it is of, or None and the reason why there is none.

    Raises:
        ResiduumError: If the training samples do not fit the network.
        RuntimeError: If the network fails, unless it is the user's own module.
    """
    if train is not None:
        x, y, subject = train.x, train.y, TRAINING
    else:
        rows = select_best_rows(reconstructions[0]) if reconstructions else None
        if rows is None:
            return None, NOT_CONVERGED
        x, y, subject = reconstructions[0].x[rows], reconstructions[0].labels[rows], CANDIDATES
    if len(x) > MAX_SAMPLES:
        return None, f"not computed for more than {MAX_SAMPLES} samples, and there are {len(x)}"
    model = network.module
    # MLPs have closed forms. For any other network the gradient of every sample is stored.
    size = 8 * len(x) * sum(t.numel() for t in network.theta.values())
    if dense_chain(model) is None and size > max_bytes:
        return None, (
            f"not computed, because the gradients of {len(x)} samples take {size / 2**30:.1f} GiB, more than "
            f"{max_bytes / 2**30:.0f}"
        )
    try:
        return certify(model, x, y, task=network.task or "auto", seconds=seconds), subject
    except ResiduumError as problem:
        # A dead network, or candidates that fit nothing, are no error of the user.
        if train is not None and not isinstance(problem, InconclusiveError):
            raise
        return None, f"the {subject} cannot be certified ({problem.message})"
    except RuntimeError as problem:  # torch cannot transform the forward of the user's own network
        if network.live is None:
            raise
        return None, f"not for this kind of network ({str(problem).splitlines()[0][:200]})"


def _uniqueness(
    network: Network,
    reconstructions: tuple[Reconstruction, ...],
    knowledge: Knowledge,
    seconds: float,
) -> tuple[Uniqueness | None, str]:
    """Return which values of the best restart's candidates other training sets share, or None and why not.

    ``index`` of the result counts the candidates of the first reconstruction, largest multiplier first.
    """
    if network.live is not None:
        reason = "the activation boundaries of a live module are unknown"
        return None, f"not for this kind of network: {reason}"
    if not reconstructions or (rows := select_best_rows(reconstructions[0])) is None:
        return None, NOT_CONVERGED
    best = reconstructions[0]
    if best.x[rows].numel() > MAX_UNKNOWNS:
        return None, f"not computed for more than {MAX_UNKNOWNS} unknown values"
    try:
        chosen = build_solution(network.module, best, "best")
        box = knowledge.box(chosen.x[0])
        unique = uniqueness(chosen.kkt, box=box, samples=MAX_CERTIFIED, seconds=seconds)
        unique = unique.replace(best_residual=find_best_residual(network.module, reconstructions))
    except ResiduumError as problem:  # candidates are not inputs of the user, so this is no error
        return None, f"not computed: {problem.message}"
    return unique.replace(index=rows[unique.index]), ""
