"""Embeddings that came back, looked up in a public pool: which records are they of?

A head on a frozen encoder is trained on embeddings, so that is what attacks on it bring back. Whoever has
a pool of records can embed it with the same encoder and ask which of them lie next to a candidate:

    c_k = max_j cos(x_k - mean, p_j - mean)      mean: of the pool, which all embeddings share

Any candidate has a nearest record. One counts as a match where it is nearer than records of the pool are
to each other: c_k beyond the share ``LEVEL`` of the pool's own nearest neighbors. Signs of unmixed sources
are not known, so the larger of both is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.errors import InputError
from residuum.records import Record
from residuum.similarity import chunks, cosine

LEVEL = 0.99  # the quantile of chance, as everywhere


@dataclass(frozen=True, eq=False)
class Lookup(Record):
    """index: (k,) of the nearest record; similarity: (k,) its cosine; threshold: of the pool's own
    neighbors; match: (k,) whether it is beyond that.
    """

    index: Tensor
    similarity: Tensor
    threshold: float
    match: Tensor


def lookup(candidates: Tensor, pool: Tensor) -> Lookup:
    """The nearest of ``pool`` (N, ...) for each of ``candidates`` (k, ...), both as embeddings."""
    if len(pool) < 2 or candidates.shape[1:] != pool.shape[1:]:
        raise InputError(
            f"A pool holds at least two embeddings of the candidates' shape {tuple(candidates.shape[1:])}; "
            f"got {len(pool)} of shape {tuple(pool.shape[1:])}.",
            "Embed the records with the encoder that the network was trained behind.",
        )
    mean = pool.double().mean(0)
    found, records = candidates.double() - mean, pool.double() - mean
    flipped = -candidates.double() - mean
    near = torch.maximum(cosine(found, records), cosine(flipped, records))
    similarity, index = near.max(1)
    own = []
    for rows in chunks(len(records), len(records)):
        among = cosine(records[rows], records)
        among[torch.arange(len(among)), torch.arange(len(records))[rows]] = -1.0
        own.append(among.amax(1))
    threshold = float(torch.cat(own).quantile(LEVEL))
    return Lookup(index, similarity, threshold, similarity > threshold)
