"""Default priors and learning rates, chosen from the appearance of the data in the first layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residuum.networks.network import Network, first_layer
from residuum.records import Knowledge
from residuum.settings import LR_LAM, StationaritySettings
from residuum.surfaces.surface import CHANGE, MOMENT, SURFACES

TYPED = 0.01  # weight of the columns' types
SPARSE, SLOW = 60.0, 0.003  # SLOW: the rate of multipliers beside a sparse prior
# Where multipliers have to find their sign first, with a rate as without prior: photographs, pen strokes.
SIGNED_SPARSE, SIGNED_STROKES = 6.0, 0.6
NEIGHBORS, STROKES = 0.5, 5.0  # half way between the rows of ``Appearance``
SIDE = 8  # pixels: in smaller frames neighbors say nothing of an image
LEADING = 0.1  # share of the largest singular value down to which vectors are looked at


def default_settings(
    network: Network,
    knowledge: Knowledge,
    settings: StationaritySettings,
    surface: str,
    is_signed: bool,
) -> dict[str, Any]:
    """Choose the priors and the rate of the multipliers that were not set.

    Images get a sparse prior. If the multipliers have a free sign, the prior is weaker, and weaker again
    for pen strokes. Its strength was chosen on images that no claim uses: with weight decay, 15 of 40
    photographs exceed NCC 0.9 (4 without a prior). With known initial weights, 167 of 180 digits are
    closer than 2.5 (140 with the prior for photographs). If column types are known, tables get a prior
    that pulls each column to its type.

    Args:
        network: The network that is attacked.
        knowledge: What the attacker knows.
        settings: Settings of the attack.
        surface: The attack surface.
        is_signed: True if the multipliers can have any sign.

    Returns:
        The chosen settings by name.
    """
    if None not in (settings.priors, settings.lr_lam):
        return {}
    rows, shape = shown_rows(network, knowledge, surface), network.sample_shape(knowledge)
    dense = rows.ndim == 2 and rows.shape[1] == math.prod(shape)
    seen = appearance(rows, shape) if dense else Appearance()
    free = SIGNED_SPARSE if seen.photographs else SIGNED_STROKES
    priors = (("sparse-gradients", free if is_signed else SPARSE),) if seen.images else ()
    if knowledge.columns is not None:
        priors = (("columns", TYPED),)
    chosen: dict[str, Any] = {
        "priors": priors,
        "lr_lam": SLOW if seen.images and settings.priors != () and not is_signed else LR_LAM,
    }
    return {name: value for name, value in chosen.items() if getattr(settings, name) is None}


def shown_rows(checkpoint: Network, knowledge: Knowledge, surface: str) -> Tensor:
    """First-layer rows that mix training samples: after a large start the weights themselves do not."""
    if surface == MOMENT:
        return first_layer({**checkpoint.theta, **(knowledge.moment or {})})
    if surface == CHANGE and knowledge.theta0 is not None:
        return first_layer(SURFACES[CHANGE](checkpoint, knowledge).target)
    return first_layer(checkpoint.theta)


@dataclass(frozen=True)
class Appearance:
    """What the training data looks like, read off the first layer alone; 0 for samples that are no images.

    Rows of a trained first layer are mixtures of training samples, and so are its leading right singular
    vectors. Laid out as images they show two things that survive mixing:

        neighbors  correlation of neighboring pixels, weighted by squared singular values
        strokes     fourth over squared second moment of their pixels: large where most of the frame stays
                    empty, as around a pen stroke, 3 for a normal density

    Measured on networks of two starts (small and torch's own), 20 to 200 samples:

    =======================  ===========  ===========
    data                     neighbors   strokes
    =======================  ===========  ===========
    never trained            0.00         3.0
    digits, 8 x 8            0.26-0.37    3.6-3.8
    MNIST                    0.65-0.78    6.7-7.4
    CIFAR-10, photographs    0.70-0.90    3.0-3.8
    =======================  ===========  ===========
    """

    neighbors: float = 0.0
    strokes: float = 0.0

    @property
    def images(self) -> bool:
        """Whether neighboring pixels belong together, as in images of any kind and size worth it."""
        return self.neighbors > NEIGHBORS

    @property
    def photographs(self) -> bool:
        """Images that fill their frame."""
        return self.images and self.strokes < STROKES


def appearance(rows: Tensor, shape: tuple[int, ...]) -> Appearance:
    """rows: (h, d) of the first layer; shape: of one sample."""
    if len(shape) < 2 or min(shape[-2:]) < SIDE or not bool(rows.isfinite().all()):
        return Appearance()
    _, s, vectors = torch.linalg.svd(rows.detach().float().cpu(), full_matrices=False)
    if not s[0] > 0:
        return Appearance()
    leading = s > LEADING * s[0]
    images, weight = vectors[leading].reshape(-1, *shape), s[leading].square()

    def mean(values: Tensor) -> float:
        return float((values * weight).sum() / weight.sum())

    def agree(axis: int) -> float:
        count = images.shape[axis] - 1
        a, b = (images.narrow(axis, start, count).flatten(1) for start in (0, 1))
        return mean(torch.cosine_similarity(a, b))

    squares = images.flatten(1).square()
    return Appearance(
        min(agree(-1), agree(-2)), mean(squares.square().mean(1) / squares.mean(1).square())
    )
