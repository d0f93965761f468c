"""Compare reconstructed embeddings with training and held-out embeddings, by cosine.

A head on a frozen encoder is trained on embeddings, so its samples are rows of many columns without a meaning
of their own. A reader wants to know how near a reconstruction is to its sample, and whether the sample is
nearer than every sample that the head never saw. Then an attacker who embeds a pool of texts finds the
training text first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum import similarity
from residuum.records import Dataset, Record
from residuum.records.inputs import add_mean

MIN_COLUMNS = (
    64  # smallest number of columns of an embedding. The smallest common encoders have 128
)
# Largest relative deviation of the norms of embeddings, which most sentence encoders scale to norm 1. Images
# and tables deviate by more than a tenth.
MAX_NORM_DEVIATION = 1e-3
CHANCE_QUANTILE = 0.99  # share of held-out samples whose best cosine is below the chance level


@dataclass(frozen=True, eq=False)
class EmbeddingMatches(Record):
    """The cosines of reconstructed embeddings with their training samples and with held-out samples.

    Attributes:
        cosine: (k,) cosine of each reconstruction and the training sample that it matches. NaN without a
            match.
        holdout_cosine: (k,) largest cosine of each reconstruction and a held-out sample. NaN without a match.
        nearest_holdout: (k,) row of this held-out sample.
        chance: The 99th percentile over held-out samples of the largest cosine with any reconstruction. None
            without held-out samples.
        texts: Texts of the k training samples, () if they are unknown.
        holdout_texts: Texts of the k nearest held-out samples, () if they are unknown.
    """

    cosine: Tensor
    holdout_cosine: Tensor
    nearest_holdout: Tensor
    chance: float | None
    texts: tuple[str, ...] = ()
    holdout_texts: tuple[str, ...] = ()


def are_embeddings(samples: Dataset) -> bool:
    """Return True if samples are embeddings: rows of many unnamed columns with a text or with equal norms."""
    if samples.x.ndim != 2 or samples.x.shape[1] < MIN_COLUMNS or samples.features:
        return False
    if samples.texts:
        return True
    original_samples = add_mean(samples.x.double(), samples.mean)
    original_samples = (
        original_samples if samples.scale is None else original_samples * samples.scale.double()
    )
    original_samples = (
        original_samples if samples.offset is None else original_samples + samples.offset.double()
    )
    norms = original_samples.norm(dim=1)
    return len(original_samples) > 1 and bool(norms.std() <= MAX_NORM_DEVIATION * norms.mean())


def match_embeddings(
    candidates: Tensor,
    matched: list[int | None],
    train: Dataset,
    positions: Tensor,
    holdout: Dataset | None,
) -> EmbeddingMatches:
    """Compare the reconstructions that match training samples with these and with held-out samples.

    Args:
        candidates: (m, d) all reconstructions of an attack.
        matched: Position of the candidate that matches each of k training samples, None without a match.
        train: The training samples.
        positions: (k,) positions of the k samples in ``train``.
        holdout: The held-out samples, None if there are none.

    Returns:
        The cosines of the k samples.
    """
    candidates = candidates.double().flatten(1)
    has_match = torch.tensor([index is not None for index in matched])
    chosen = candidates[torch.tensor([index or 0 for index in matched])]
    samples = train.x[positions].double()
    cosine = torch.nn.functional.cosine_similarity(chosen, samples)
    holdout_cosine, nearest, chance = (
        torch.full_like(cosine, torch.nan),
        positions.new_zeros(0),
        None,
    )
    if holdout is not None and holdout.shape == train.shape:
        finite_candidates = candidates[candidates.isfinite().all(1)]
        similarities = similarity.cosine(finite_candidates, holdout.x.double())
        chance = float(similarities.amax(0).quantile(CHANCE_QUANTILE))
        holdout_cosine, nearest = similarity.cosine(chosen, holdout.x.double()).max(1)
    texts = train.texts and tuple(train.texts[i] for i in positions.tolist())
    holdout_texts: tuple[str, ...] = ()
    if holdout is not None and holdout.texts:
        holdout_texts = tuple(holdout.texts[i] for i in nearest.tolist())
    return EmbeddingMatches(
        torch.where(has_match, cosine, torch.nan),
        torch.where(has_match, holdout_cosine, torch.nan),
        nearest,
        chance,
        texts,
        holdout_texts,
    )
