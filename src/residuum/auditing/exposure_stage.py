"""Rank the training samples of an audit by their risk of a leak. The ranking does not change the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from residuum.auditing.controls import SampleSets
from residuum.errors import ResiduumError
from residuum.evaluation.scoring import all_candidates
from residuum.networks.network import Network
from residuum.records import Dataset, Exposure, Knowledge, Reconstruction
from residuum.risk.run import MIN_HOLDOUT, expose

MAX_SAMPLES = 2000  # largest number of training samples that an audit ranks
# Largest number of values in the gradients of all training samples (samples times parameters). Networks of
# dense layers have no such limit, because their gradients are not stored.
MAX_GRADIENTS = 2 * 10**8
TOO_MANY = "there are too many samples for an audit. Run residuum exposure, which has no time limit"


def rank_samples(
    network: Network,
    train: Dataset,
    sets: SampleSets,
    knowledge: Knowledge,
    reconstructions: Sequence[Reconstruction],
    displayed_attack: str,
) -> tuple[Exposure | None, str]:
    """Rank the training samples of an audit by the risk that they leak.

    Args:
        network: The audited network.
        train: The training samples.
        sets: Training and held-out samples without repeated samples.
        knowledge: What the attacker knows.
        reconstructions: Outputs of the deciding attacks, which are all attacks except baselines.
        displayed_attack: The attack whose candidates are shown with the samples.

    Returns:
        The ranking and an empty reason, or None and the reason why there is no ranking.
    """
    parameter_count = sum(t.numel() for t in network.theta.values())
    has_too_many_gradients = network.chain is None and len(train) * parameter_count > MAX_GRADIENTS
    if len(train) > MAX_SAMPLES or has_too_many_gradients:
        return None, TOO_MANY
    holdout = sets.holdout
    if holdout is not None and (
        len(holdout) < MIN_HOLDOUT or holdout.shape != train.shape or len(holdout.y.unique()) < 2
    ):
        holdout = None
    displayed_reconstructions = [
        result for result in reconstructions if result.attack == displayed_attack
    ]
    candidates = (
        all_candidates(displayed_reconstructions[0]).x if displayed_reconstructions else None
    )
    if candidates is not None and candidates.shape[1:] != train.x.shape[1:]:
        candidates = None
    try:
        return expose(network, train, holdout, knowledge, candidates=candidates), ""
    except ResiduumError as problem:
        return None, str(problem)
