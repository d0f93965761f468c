"""Which records are at risk, beside the verdict: the exposure of the data, with what the attacks found.

Computed after the attacks and from the data, so it never reaches them; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from residuum.auditing.controls import Claim
from residuum.checkpoints import build_model
from residuum.errors import ResiduumError
from residuum.evaluation.scoring import whole_pool
from residuum.networks import dense_chain
from residuum.records import Checkpoint, Dataset, Knowledge, Reconstruction
from residuum.records.exposure import Exposure
from residuum.risk.run import FEWEST_HELD_OUT, expose

MOST = 2000  # records, and, for networks that are no chain, records times parameters
MOST_GRADIENTS = 2 * 10**8
ELSEWHERE = "residuum exposure takes as long as it needs"


def exposed(
    checkpoint: Checkpoint,
    data: Dataset | None,
    claim: Claim | None,
    knowledge: Knowledge,
    found: Sequence[Reconstruction],
    shown: str,
) -> tuple[Exposure | None, str]:
    """The exposure of ``data``, or None and why not; shown: the attack whose candidates stand beside."""
    if data is None or claim is None:
        return None, "there are no training samples to look at"
    parameters = sum(t.numel() for t in checkpoint.theta.values())
    chain = dense_chain(build_model(checkpoint)) is not None
    if len(data) > MOST or (not chain and len(data) * parameters > MOST_GRADIENTS):
        return None, f"too many samples for an audit: {ELSEWHERE}"
    pool = claim.pool
    if pool is not None and (
        len(pool) < FEWEST_HELD_OUT or pool.shape != data.shape or len(pool.y.unique()) < 2
    ):
        pool = None
    parts = [part for part in found if part.attack == shown]
    candidates = whole_pool(parts[0]).x if parts else None
    if candidates is not None and candidates.shape[1:] != data.x.shape[1:]:
        candidates = None
    try:
        return expose(checkpoint, data, pool, knowledge, found=candidates), ""
    except ResiduumError as problem:
        return None, str(problem)
