"""Select candidates on which several restarts agree, without the training data.

Two restarts have nothing in common but the weights. If both restarts arrive at the same image, the weights
probably store this image. Candidates with the same label are grouped greedily, heaviest first. A group is a
center and every ungrouped candidate whose cosine similarity to the center is at least ``similarity``.

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

SIMILARITY = 0.9  # minimum cosine similarity of a candidate and the center of its group
FEATURES = (
    "support share",
    "log relative multiplier",
    "tightness",
    "agreement",
    "agreement x log effective dimension",
)
BLOCK = 1024  # number of group centers that are compared at once, which bounds the memory
# Candidates with fewer than FEW_VALUES values are grouped by distance. The maximum distance is DUPLICATE
# times their median length, which is the duplicate radius of Haim et al. 2022 on the unit circle.
FEW_VALUES, DUPLICATE = 8, 0.03
# Minimum weight of a usable candidate, as a share of the largest weight in its restart.
WEIGHT_FLOOR = 1e-3


def select(
    reconstruction: Reconstruction, similarity: float = SIMILARITY, radius: float | None = None
) -> Selection:
    """Group the candidates of all restarts and sort the groups, best first.

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
    rows = _describe_groups(reconstruction, similarity, radius)
    heaviest = max((row["lam"] for row in rows), default=0.0)
    usable = find_usable_candidates(reconstruction)
    spread = math.log(effective_dimension(reconstruction.x[usable]))
    for row in rows:
        row["features"] = compute_features(row, reconstruction.restarts, heaviest, spread)
        row["confidence"] = estimate_confidence(row["features"], reconstruction.restarts)
    rows.sort(key=lambda row: (row["support"] < 2, -row["confidence"], -row["lam"]))
    return Selection(
        x=torch.stack([row["x"] for row in rows]) if rows else reconstruction.x[:0],
        labels=torch.stack([row["label"] for row in rows]) if rows else reconstruction.labels[:0],
        lam=torch.tensor([row["lam"] for row in rows]),
        support=torch.tensor([row["support"] for row in rows], dtype=torch.long),
        members=torch.tensor([row["members"] for row in rows], dtype=torch.long),
        confidence=torch.tensor([row["confidence"] for row in rows]),
        features=torch.tensor([row["features"] for row in rows]).reshape(-1, len(FEATURES)),
        index=torch.tensor([row["index"] for row in rows], dtype=torch.long),
    )


def _describe_groups(
    reconstruction: Reconstruction, similarity: float, radius: float | None
) -> list[dict[str, Any]]:
    """Group the usable candidates of each label, and return one description for each group."""
    usable, weight, rows = find_usable_candidates(reconstruction), reconstruction.weight, []
    for label in reconstruction.labels[usable].unique():
        index = (usable & (reconstruction.labels == label)).nonzero().flatten()
        groups = group_candidates(reconstruction.x[index], weight[index], similarity, radius)
        for group in groups:
            rows.append(_describe(reconstruction, index[group], weight[index[group]]))
    return rows


def find_usable_candidates(reconstruction: Reconstruction) -> Tensor:
    """Return the mask (N,) of candidates that are finite, nonzero and heavy enough in their restart."""
    x, weight = reconstruction.x, reconstruction.weight
    finite = torch.isfinite(x).flatten(1).all(1) & torch.isfinite(weight)
    norms = x.flatten(1).norm(dim=1)
    usable = finite & (norms > 0) & (weight > 0)
    for run in range(reconstruction.restarts):
        in_run = reconstruction.run == run
        if (in_run & usable).any():
            usable &= ~in_run | (weight >= WEIGHT_FLOOR * weight[in_run & usable].max())
    return usable


def group_candidates(
    x: Tensor, weight: Tensor, similarity: float, radius: float | None
) -> list[Tensor]:
    """Group candidates greedily, heaviest first. Every candidate is in exactly one group.

    The function compares BLOCK group centers at a time with all candidates, which bounds the memory.

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
    groups = []
    order = weight.argsort(descending=True)
    for block in order.split(BLOCK):
        block = block[is_ungrouped[block]]  # candidates in an earlier group cannot be centers
        if not len(block):
            continue
        close = cosine(x[block], x) >= similarity if radius is None else l2(x[block], x) <= radius
        for i, row in zip(block.tolist(), close.numpy(), strict=True):
            if ungrouped_mask[i]:
                members = row & ungrouped_mask
                members[i] = True
                ungrouped_mask ^= members
                groups.append(torch.from_numpy(members.nonzero()[0]))
    return groups


def _describe(reconstruction: Reconstruction, group: Tensor, weight: Tensor) -> dict[str, Any]:
    """Describe the group of the candidates with indices (k,) and weights (k,): mean, label, support."""
    x, support = reconstruction.x[group], len(reconstruction.run[group].unique())
    share, heaviest = weight / weight.sum(), group[weight.argmax()]
    mean = (share.view(-1, *[1] * (x.ndim - 1)) * x).sum(0)
    inner = cosine(mean[None], x)[0]
    return {
        "x": mean,
        "label": reconstruction.labels[heaviest],
        "lam": float(weight.sum()) / support,
        "support": support,
        "members": len(group),
        "index": int(heaviest),
        "tightness": float((share * inner).sum()),
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
    inner = cosine(subset, subset)
    return max(1.0, float(inner.diagonal().sum() ** 2 / inner.square().sum()))


def compute_features(
    row: dict[str, Any], restarts: int, heaviest: float, spread: float
) -> tuple[float, ...]:
    """Compute the features of a group from which the confidence is estimated.

    Args:
        row: Description of the group.
        restarts: Number of restarts.
        heaviest: Largest weight of all groups.
        spread: Logarithm of the effective dimension of all candidates.

    Returns:
        The features in the order of FEATURES.
    """
    weight = math.log(max(row["lam"], 1e-12 * heaviest) / heaviest) if heaviest > 0 else 0.0
    share, agreement = row["support"] / max(restarts, 1), float(row["support"] > 1)
    return share, weight, row["tightness"], agreement, agreement * spread


def estimate_confidence(features: tuple[float, ...], restarts: int) -> float:
    """Estimate the probability that a group is a true reconstruction, by calibrated logistic regression.

    Args:
        features: Features of the group, in the order of FEATURES.
        restarts: Number of restarts.

    Returns:
        The confidence. A single restart cannot agree with another one, so its confidence is the base rate.
    """
    constants = load_calibration()
    if restarts < 2:
        return constants["base_rate"]
    pairs = zip(constants["weights"], features, strict=True)
    return 1 / (1 + math.exp(-constants["intercept"] - sum(w * f for w, f in pairs)))


@lru_cache(maxsize=1)
def load_calibration() -> dict[str, Any]:
    """Return the fitted constants of the confidence, and the networks on which they were fitted."""
    return json.loads(files("residuum.attacks").joinpath("calibration.json").read_text())
