"""Look up reconstructed embeddings in a public pool of records.

A head on a frozen encoder is trained on embeddings, so attacks on it reconstruct embeddings. An attacker
with a pool of records can embed the pool with the same encoder, and find the records that are closest to a
candidate:

    c_k = max_j cos(x_k - mean, p_j - mean)

The mean is that of the pool, which all embeddings share. Every candidate has a nearest record. It counts
as a match if it is closer than records of the pool are to each other, i.e. if c_k exceeds the quantile
``LEVEL`` of the similarities of nearest neighbors within the pool. The signs of unmixed sources are
unknown, so the larger similarity of both signs is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.errors import InputError
from residuum.records import Record
from residuum.similarity import chunks, cosine

LEVEL = 0.99  # quantile of chance, the same as for images


@dataclass(frozen=True, eq=False)
class Lookup(Record):
    """The nearest records of k candidates.

    Attributes:
        index: (k,) nearest record.
        similarity: (k,) cosine with that record.
        threshold: Quantile of the similarities of nearest neighbors within the pool.
        match: (k,) whether the similarity exceeds the threshold.
    """

    index: Tensor
    similarity: Tensor
    threshold: float
    match: Tensor


def lookup(candidates: Tensor, pool: Tensor) -> Lookup:
    """Return the nearest record of ``pool`` for each candidate.

    Args:
        candidates: (k, ...) embeddings.
        pool: (N, ...) embeddings of the records.

    Returns:
        The nearest records and which of them count as a match.

    Raises:
        InputError: If the pool has fewer than two embeddings or another shape.
    """
    if len(pool) < 2 or candidates.shape[1:] != pool.shape[1:]:
        raise InputError(
            f"A pool needs at least two embeddings of the candidates' shape {tuple(candidates.shape[1:])}; "
            f"got {len(pool)} of shape {tuple(pool.shape[1:])}.",
            "Embed the records with the frozen encoder of the network.",
        )
    mean = pool.double().mean(0)
    centered, pool_centered = candidates.double() - mean, pool.double() - mean
    negated = -candidates.double() - mean
    similarities = torch.maximum(cosine(centered, pool_centered), cosine(negated, pool_centered))
    similarity, index = similarities.max(1)
    neighbor_similarities = []
    for rows in chunks(len(pool_centered), len(pool_centered)):
        block = cosine(pool_centered[rows], pool_centered)
        block[torch.arange(len(block)), torch.arange(len(pool_centered))[rows]] = -1.0
        neighbor_similarities.append(block.amax(1))
    threshold = float(torch.cat(neighbor_similarities).quantile(LEVEL))
    return Lookup(index, similarity, threshold, similarity > threshold)
