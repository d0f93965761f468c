"""Rank the training samples of an audit by their risk. The ranking decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from residuum.auditing.controls import Claim
from residuum.errors import ResiduumError
from residuum.evaluation.scoring import all_candidates
from residuum.networks.network import Network
from residuum.records import Dataset, Exposure, Knowledge, Reconstruction
from residuum.risk.run import MIN_HOLDOUT, expose

MAX_SAMPLES = 2000  # that an audit ranks
MAX_GRADIENTS = (
    2 * 10**8
)  # samples times parameters, for networks that are no chain of dense layers
TOO_MANY = "too many samples for an audit: residuum exposure takes as long as it needs"


def exposure_of_samples(
    network: Network,
    train: Dataset,
    claim: Claim,
    knowledge: Knowledge,
    reconstructions: Sequence[Reconstruction],
    shown: str,
) -> tuple[Exposure | None, str]:
    """Rank the training samples by their risk.

    Args:
        network: The audited network.
        train: The training samples.
        claim: Training and held-out set without repeated samples.
        knowledge: What the attacker knows.
        reconstructions: Of the deciding attacks.
        shown: The attack whose candidates are shown with the samples.

    Returns:
        The ranking, or None and the reason why there is none.
    """
    parameters = sum(t.numel() for t in network.theta.values())
    has_gradients = network.chain is None and len(train) * parameters > MAX_GRADIENTS
    if len(train) > MAX_SAMPLES or has_gradients:
        return None, TOO_MANY
    holdout = claim.pool
    if holdout is not None and (
        len(holdout) < MIN_HOLDOUT or holdout.shape != train.shape or len(holdout.y.unique()) < 2
    ):
        holdout = None
    strongest = [result for result in reconstructions if result.attack == shown]
    candidates = all_candidates(strongest[0]).x if strongest else None
    if candidates is not None and candidates.shape[1:] != train.x.shape[1:]:
        candidates = None
    try:
        return expose(network, train, holdout, knowledge, candidates=candidates), ""
    except ResiduumError as problem:
        return None, str(problem)
