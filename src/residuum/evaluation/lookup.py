"""Find the public records whose embeddings are most similar to reconstructed embeddings.

A head on a frozen encoder is trained on embeddings, so attacks on it reconstruct embeddings. An attacker
with a pool of records can embed the pool with the same encoder, and find the records that are closest to a
candidate:

    c_k = max_j cos(x_k - mean, p_j - mean)

Here x_k is candidate k, p_j is record j, and the mean is taken over the pool. Every candidate has a nearest
record. This record counts as a match if it is closer to the candidate than records of the pool are to each
other: c_k must exceed the quantile ``LEVEL`` of the similarities of nearest neighbors within the pool. An
attack may reconstruct an embedding up to its sign, so the larger similarity of x_k and -x_k is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.errors import InputError
from residuum.records import Record
from residuum.similarity import chunks, cosine

# A pool is a set of public records. A candidate matches its nearest record of the pool if they are more
# similar than this share of the records is to their own nearest neighbors in the pool.
LEVEL = 0.99


@dataclass(frozen=True, eq=False)
class Lookup(Record):
    """The records of a public pool that are nearest to k reconstructed candidates.

    Attributes:
        index: (k,) number of the nearest record of each candidate.
        similarity: (k,) centered cosine similarity of each candidate and its nearest record.
        threshold: 99th percentile of the similarities of nearest neighbors within the pool.
        match: (k,) whether the similarity of a candidate exceeds the threshold.
    """

    index: Tensor
    similarity: Tensor
    threshold: float
    match: Tensor


def lookup(candidates: Tensor, pool: Tensor) -> Lookup:
    """Return the nearest record of ``pool`` for each candidate.

    Args:
        candidates: (k, ...) reconstructed embeddings.
        pool: (N, ...) embeddings of the public records.

    Returns:
        The nearest records and which of them count as a match.

    Raises:
        InputError: If the pool has fewer than two embeddings, or if their shape differs from the candidates.
    """
    if len(pool) < 2 or candidates.shape[1:] != pool.shape[1:]:
        raise InputError(
            f"The argument 'pool' (embeddings of public records) must hold at least two embeddings of "
            f"shape {tuple(candidates.shape[1:])}, the shape of a candidate; got {len(pool)} of shape "
            f"{tuple(pool.shape[1:])}.",
            "Embed the records with the frozen encoder of the network.",
        )
    pool_mean = pool.double().mean(0)
    centered_candidates, centered_pool = candidates.double() - pool_mean, pool.double() - pool_mean
    centered_negated_candidates = -candidates.double() - pool_mean
    similarities = torch.maximum(
        cosine(centered_candidates, centered_pool),
        cosine(centered_negated_candidates, centered_pool),
    )
    similarity, index = similarities.max(1)
    neighbor_similarities = []
    for rows in chunks(len(centered_pool), len(centered_pool)):
        block_similarities = cosine(centered_pool[rows], centered_pool)
        block_similarities[
            torch.arange(len(block_similarities)), torch.arange(len(centered_pool))[rows]
        ] = -1.0
        neighbor_similarities.append(block_similarities.amax(1))
    threshold = float(torch.cat(neighbor_similarities).quantile(LEVEL))
    return Lookup(index, similarity, threshold, similarity > threshold)
