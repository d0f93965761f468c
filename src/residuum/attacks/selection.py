"""Select the candidates that several restarts of an attack found. No training data is used.

Two restarts have nothing in common but the weights. If both restarts arrive at the same image, the weights
probably store this image. The weight of a candidate is the size of its multipliers. Candidates with the same
label are grouped greedily, in the order of decreasing weight. A group is a center and every ungrouped
candidate whose cosine similarity to the center is at least ``similarity``.

    support     = number of different restarts in the group
    consensus   = multiplier-weighted mean of the group
    confidence  = sigmoid(a + b support share + c log(relative weight) + d tightness
                          + e agreement + f agreement * log(effective dimension))

``support share`` is the support divided by the number of restarts. ``relative weight`` is the weight of the
group divided by the largest weight of all groups. ``tightness`` is the mean cosine of members and consensus.
``agreement`` is 1 if at least two restarts are in the group, and 0 otherwise. In few dimensions, restarts can
agree by chance, so agreement counts more if the candidates span many dimensions. The constants a to f were
fitted on networks that appear in no published result (``calibration.json`` lists these networks).

Groups with several restarts come first. Groups with a single restart follow.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from residuum.records import Reconstruction, Selection
from residuum.similarity import cosine, l2

# Minimum cosine similarity between a candidate and the center of its group of similar candidates.
SIMILARITY = 0.9
FEATURES = (
    "support share",
    "log relative multiplier",
    "tightness",
    "agreement",
    "agreement x log effective dimension",
)
BLOCK = 1024  # number of group centers that are compared at once, to limit the memory
# Candidates (reconstructed samples) with fewer than FEW_VALUES values are grouped by distance. Two of them
# are in one group if their distance is at most DUPLICATE times the median norm, as in Haim et al. 2022.
FEW_VALUES, DUPLICATE = 8, 0.03
# A candidate is dropped if its weight is below this share of the largest weight in the same run.
WEIGHT_FLOOR = 1e-3


def select(
    reconstruction: Reconstruction, similarity: float = SIMILARITY, radius: float | None = None
) -> Selection:
    """Group similar candidates from all restarts of an attack, and sort the groups, best first.

    Args:
        reconstruction: The candidates.
        similarity: Minimum cosine similarity of a candidate and the center of its group.
        radius: Maximum Euclidean distance of a candidate and the center of its group. If the radius is set,
            it replaces the similarity. Samples with fewer than FEW_VALUES values, such as points in a plane,
            need a radius, because most of their directions are similar. For such samples, the default
            radius is DUPLICATE times the median length.

    Returns:
        The selection, with one entry for each group.
    """
    if radius is None and 0 < reconstruction.x[0].numel() < FEW_VALUES:
        radius = DUPLICATE * float(reconstruction.x.flatten(1).norm(dim=1).nanmedian())
    descriptions = _describe_groups(reconstruction, similarity, radius)
    largest_weight = max((row["lam"] for row in descriptions), default=0.0)
    is_usable = find_usable_candidates(reconstruction)
    log_dimension = math.log(effective_dimension(reconstruction.x[is_usable]))
    for row in descriptions:
        row["features"] = compute_features(
            row, reconstruction.restarts, largest_weight, log_dimension
        )
        row["confidence"] = estimate_confidence(row["features"], reconstruction.restarts)
    descriptions.sort(key=lambda row: (row["support"] < 2, -row["confidence"], -row["lam"]))
    return Selection(
        x=torch.stack([row["x"] for row in descriptions]) if descriptions else reconstruction.x[:0],
        labels=torch.stack([row["label"] for row in descriptions])
        if descriptions
        else reconstruction.labels[:0],
        lam=torch.tensor([row["lam"] for row in descriptions]),
        support=torch.tensor([row["support"] for row in descriptions], dtype=torch.long),
        members=torch.tensor([row["members"] for row in descriptions], dtype=torch.long),
        confidence=torch.tensor([row["confidence"] for row in descriptions]),
        features=torch.tensor([row["features"] for row in descriptions]).reshape(-1, len(FEATURES)),
        index=torch.tensor([row["index"] for row in descriptions], dtype=torch.long),
    )


def _describe_groups(
    reconstruction: Reconstruction, similarity: float, radius: float | None
) -> list[dict[str, Any]]:
    """Group the candidates of each label, and return one description for each group.

    Candidates that are not finite, zero, or of small weight are left out (:func:`find_usable_candidates`).

    Returns:
        The descriptions of the groups.
    """
    is_usable, weight = find_usable_candidates(reconstruction), reconstruction.weight
    descriptions: list[dict[str, Any]] = []
    for label in reconstruction.labels[is_usable].unique():
        candidate_index = (is_usable & (reconstruction.labels == label)).nonzero().flatten()
        candidate_groups = group_candidates(
            reconstruction.x[candidate_index], weight[candidate_index], similarity, radius
        )
        for group in candidate_groups:
            descriptions.append(
                _describe(reconstruction, candidate_index[group], weight[candidate_index[group]])
            )
    return descriptions


def find_usable_candidates(reconstruction: Reconstruction) -> Tensor:
    """Return a mask (N,) of the candidates that are finite, not zero, and of sufficient weight.

    The smallest permitted weight is the share WEIGHT_FLOOR of the largest weight in the same restart.

    Args:
        reconstruction: The candidates.

    Returns:
        The mask of the usable candidates.
    """
    x, weight = reconstruction.x, reconstruction.weight
    is_finite = torch.isfinite(x).flatten(1).all(1) & torch.isfinite(weight)
    norms = x.flatten(1).norm(dim=1)
    is_usable = is_finite & (norms > 0) & (weight > 0)
    for run in range(reconstruction.restarts):
        in_run = reconstruction.run == run
        if (in_run & is_usable).any():
            is_usable &= ~in_run | (weight >= WEIGHT_FLOOR * weight[in_run & is_usable].max())
    return is_usable


def group_candidates(
    x: Tensor, weight: Tensor, similarity: float, radius: float | None
) -> list[Tensor]:
    """Group candidates greedily, largest weight first. Every candidate is in exactly one group.

    To limit the memory, the function compares BLOCK group centers at a time with all candidates.

    Args:
        x: (n, *shape) candidates.
        weight: (n,) weight of each candidate.
        similarity: Minimum cosine similarity of a candidate and the center of its group.
        radius: Maximum Euclidean distance of a candidate and the center of its group. If the radius is set,
            it replaces the similarity.

    Returns:
        Indices of the candidates in each group.
    """
    is_ungrouped = torch.ones(len(x), dtype=torch.bool)
    # The NumPy array shares the memory of the tensor. The loop below is ten times as fast in NumPy.
    ungrouped_mask = is_ungrouped.numpy()
    index_groups = []
    order_by_weight = weight.argsort(descending=True)
    for block in order_by_weight.split(BLOCK):
        # Candidates that already belong to a group cannot become centers of groups.
        block = block[is_ungrouped[block]]
        if not len(block):
            continue
        is_close = (
            cosine(x[block], x) >= similarity if radius is None else l2(x[block], x) <= radius
        )
        for i, row in zip(block.tolist(), is_close.numpy(), strict=True):
            if ungrouped_mask[i]:
                is_member = row & ungrouped_mask
                is_member[i] = True
                ungrouped_mask ^= is_member
                index_groups.append(torch.from_numpy(is_member.nonzero()[0]))
    return index_groups


def _describe(reconstruction: Reconstruction, group: Tensor, weight: Tensor) -> dict[str, Any]:
    """Return the mean, the label, the number of restarts and other properties of a group of candidates.

    The arguments hold the indices (k,) and the weights (k,) of the candidates in the group.

    Returns:
        The properties by name.
    """
    x, support = reconstruction.x[group], len(reconstruction.run[group].unique())
    share, heaviest = weight / weight.sum(), group[weight.argmax()]
    weighted_mean = (share.view(-1, *[1] * (x.ndim - 1)) * x).sum(0)
    cosines = cosine(weighted_mean[None], x)[0]
    return {
        "x": weighted_mean,
        "label": reconstruction.labels[heaviest],
        "lam": float(weight.sum()) / support,
        "support": support,
        "members": len(group),
        "index": int(heaviest),
        "tightness": float((share * cosines).sum()),
    }


def effective_dimension(x: Tensor) -> float:
    """Return the effective number of directions over which candidates spread, at least 1.

    The number is (sum s^2)^2 / sum s^4, where s are the singular values of the matrix of candidates, scaled
    to length 1. The function uses at most BLOCK candidates.

    Args:
        x: (n, *shape) candidates.

    Returns:
        The effective number of dimensions.
    """
    if not len(x):
        return 1.0
    subset = x[:: -(-len(x) // BLOCK)].flatten(1).double()
    cosines = cosine(subset, subset)
    return max(1.0, float(cosines.diagonal().sum() ** 2 / cosines.square().sum()))


def compute_features(
    row: dict[str, Any], restarts: int, heaviest: float, spread: float
) -> tuple[float, ...]:
    """Compute the features of a group of candidates from which its confidence is estimated.

    Args:
        row: Description of the group.
        restarts: Number of restarts.
        heaviest: Largest weight of any group.
        spread: Logarithm of the effective dimension of all candidates.

    Returns:
        The features in the order of FEATURES.
    """
    log_weight = math.log(max(row["lam"], 1e-12 * heaviest) / heaviest) if heaviest > 0 else 0.0
    share, agreement = row["support"] / max(restarts, 1), float(row["support"] > 1)
    return share, log_weight, row["tightness"], agreement, agreement * spread


def estimate_confidence(features: tuple[float, ...], restarts: int) -> float:
    """Estimate the probability that a group is a true reconstruction, by calibrated logistic regression.

    Args:
        features: Features of the group, in the order of FEATURES.
        restarts: Number of restarts.

    Returns:
        The confidence. With a single restart, there is no agreement, so the confidence is the base rate: the
        share of true reconstructions among all groups of the networks used for calibration.
    """
    constants = load_calibration()
    if restarts < 2:
        return constants["base_rate"]
    weighted_features = zip(constants["weights"], features, strict=True)
    return 1 / (1 + math.exp(-constants["intercept"] - sum(w * f for w, f in weighted_features)))


@lru_cache(maxsize=1)
def load_calibration() -> dict[str, Any]:
    """Load the constants of the confidence formula, and the names of the networks that they come from."""
    return json.loads(files("residuum.attacks").joinpath("calibration.json").read_text())
