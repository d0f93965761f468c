"""Choose among the candidates of several restarts by their agreement, without the training data.

If two restarts share only the weights and arrive at the same image, the image is probably in the
weights. Candidates of one label are grouped greedily, heaviest first. A group is a center and every
ungrouped candidate whose cosine similarity to the center is at least ``similarity``.

    support     = number of different restarts in the group
    consensus   = multiplier-weighted mean of the group
    confidence  = sigmoid(a + b support share + c log(relative weight) + d tightness
                          + e agreement + f agreement * log(effective dimension))

``agreement`` is 1 if at least two restarts are in the group. In few dimensions restarts can agree by
accident, so agreement counts more if the candidates span many dimensions. The constants of the confidence
were fitted on networks that no claim uses (``calibration.json`` lists them). Groups of several restarts
come first, single candidates after them.
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

SIMILARITY = 0.9  # cosine of a candidate and the center of its group
FEATURES = (
    "support share",
    "log relative multiplier",
    "tightness",
    "agreement",
    "agreement x log effective dimension",
)
BLOCK = 1024  # centers compared at once: bounds memory for any number of candidates
FEW_VALUES, DUPLICATE = 8, 0.03  # 0.03: the duplicate radius of Haim et al. 2022 on the unit circle
WEIGHT_FLOOR = 1e-3  # candidates lighter than this share of the heaviest of their run carry nothing


def select(
    found: Reconstruction, similarity: float = SIMILARITY, radius: float | None = None
) -> Selection:
    """Groups of all restarts' candidates, best first.

    radius: group by Euclidean distance instead of cosine; the default for samples of fewer than
    FEW_VALUES values, where most directions are similar and length matters (points in a plane), is
    DUPLICATE of the median length.
    """
    if radius is None and 0 < found.x[0].numel() < FEW_VALUES:
        radius = DUPLICATE * float(found.x.flatten(1).norm(dim=1).nanmedian())
    rows = _rows(found, similarity, radius)
    heaviest = max((row["lam"] for row in rows), default=0.0)
    spread = math.log(effective_dimension(found.x[alive(found)]))
    for row in rows:
        row["features"] = features_of(row, found.restarts, heaviest, spread)
        row["confidence"] = confidence_of(row["features"], found.restarts)
    rows.sort(key=lambda row: (row["support"] < 2, -row["confidence"], -row["lam"]))
    return Selection(
        x=torch.stack([row["x"] for row in rows]) if rows else found.x[:0],
        labels=torch.stack([row["label"] for row in rows]) if rows else found.labels[:0],
        lam=torch.tensor([row["lam"] for row in rows]),
        support=torch.tensor([row["support"] for row in rows], dtype=torch.long),
        members=torch.tensor([row["members"] for row in rows], dtype=torch.long),
        confidence=torch.tensor([row["confidence"] for row in rows]),
        features=torch.tensor([row["features"] for row in rows]).reshape(-1, len(FEATURES)),
        index=torch.tensor([row["index"] for row in rows], dtype=torch.long),
    )


def _rows(found: Reconstruction, similarity: float, radius: float | None) -> list[dict[str, Any]]:
    """One description per group."""
    keep, weight, rows = alive(found), found.weight, []
    for label in found.labels[keep].unique():
        mine = (keep & (found.labels == label)).nonzero().flatten()
        for group in groups_of(found.x[mine], weight[mine], similarity, radius):
            rows.append(_describe(found, mine[group], weight[mine[group]]))
    return rows


def alive(found: Reconstruction) -> Tensor:
    """(N,) candidates that are finite, not zero, and carry weight within their own restart."""
    finite = torch.isfinite(found.x).flatten(1).all(1) & torch.isfinite(found.weight)
    norms = found.x.flatten(1).norm(dim=1)
    keep = finite & (norms > 0) & (found.weight > 0)
    for run in range(found.restarts):
        mine = found.run == run
        if (mine & keep).any():
            keep &= ~mine | (found.weight >= WEIGHT_FLOOR * found.weight[mine & keep].max())
    return keep


def groups_of(x: Tensor, weight: Tensor, similarity: float, radius: float | None) -> list[Tensor]:
    """Greedy grouping, heaviest candidate first; every candidate is in exactly one group.

    Similarities are computed for BLOCK centers at a time: memory stays bounded for any number of
    candidates.
    """
    free = torch.ones(len(x), dtype=torch.bool)
    left = free.numpy()  # the same memory: small steps cost a tenth in NumPy
    groups = []
    order = weight.argsort(descending=True)
    for block in order.split(BLOCK):
        block = block[free[block]]  # what an earlier block took needs no row of its own
        if not len(block):
            continue
        near = cosine(x[block], x) >= similarity if radius is None else l2(x[block], x) <= radius
        for i, row in zip(block.tolist(), near.numpy(), strict=True):
            if left[i]:
                members = row & left
                members[i] = True
                left ^= members
                groups.append(torch.from_numpy(members.nonzero()[0]))
    return groups


def _describe(found: Reconstruction, group: Tensor, weight: Tensor) -> dict[str, Any]:
    """group, weight: (k,) its candidates and what each of them weighs."""
    x, support = found.x[group], len(found.run[group].unique())
    share, heaviest = weight / weight.sum(), group[weight.argmax()]
    mean = (share.view(-1, *[1] * (x.ndim - 1)) * x).sum(0)
    inner = cosine(mean[None], x)[0]
    return {
        "x": mean,
        "label": found.labels[heaviest],
        "lam": float(weight.sum()) / support,
        "support": support,
        "members": len(group),
        "index": int(heaviest),
        "tightness": float((share * inner).sum()),
    }


def effective_dimension(x: Tensor) -> float:
    """(sum s^2)^2 / sum s^4 over the singular values s of the candidates' directions; at least 1.

    The number of directions a cloud of candidates spreads over; at most BLOCK of them are looked at.
    """
    if not len(x):
        return 1.0
    some = x[:: -(-len(x) // BLOCK)].flatten(1).double()
    inner = cosine(some, some)
    return max(1.0, float(inner.diagonal().sum() ** 2 / inner.square().sum()))


def features_of(
    row: dict[str, Any], restarts: int, heaviest: float, spread: float
) -> tuple[float, ...]:
    """What the confidence looks at, in the order of FEATURES."""
    weight = math.log(max(row["lam"], 1e-12 * heaviest) / heaviest) if heaviest > 0 else 0.0
    share, agreement = row["support"] / max(restarts, 1), float(row["support"] > 1)
    return share, weight, row["tightness"], agreement, agreement * spread


def confidence_of(features: tuple[float, ...], restarts: int) -> float:
    """The calibrated logistic of the features."""
    constants = calibration()
    # One restart cannot agree with anybody: without agreement confidence stays at the base rate.
    if restarts < 2:
        return constants["base_rate"]
    pairs = zip(constants["weights"], features, strict=True)
    return 1 / (1 + math.exp(-constants["intercept"] - sum(w * f for w, f in pairs)))


@lru_cache(maxsize=1)
def calibration() -> dict[str, Any]:
    """The shipped constants and their provenance."""
    return json.loads(files("residuum.attacks").joinpath("calibration.json").read_text())
