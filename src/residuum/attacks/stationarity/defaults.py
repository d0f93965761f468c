"""Default penalties on candidates (priors) and learning rates for photographs, pen strokes or tables.

The first layer of a trained network shows whether the data are images (:class:`Appearance`).
"""

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

# Weight of the penalty that pulls integer columns to integers and one-hot columns to 0 and 1.
TYPED = 0.01
# Weight of the sparse prior (a penalty on differences of neighboring pixels), and the learning rate of the
# multipliers (weights of the candidates) if this prior is used.
SPARSE, SLOW = 60.0, 0.003
# Weights of the sparse prior (a penalty on differences of neighboring pixels) for photographs and for pen
# strokes, if the multipliers (weights of the candidates) can be negative.
SIGNED_SPARSE, SIGNED_STROKES = 6.0, 0.6
# Thresholds for two measured properties of images, which tell photographs, drawings and other data apart.
# They are about half way between the values of typical data.
NEIGHBORS, STROKES = 0.5, 5.0
# Images with a shorter side (in pixels) are too small to tell how similar neighboring pixels are.
MIN_SIDE = 8
# A singular vector is used if its singular value is at least this share of the largest one.
LEADING = 0.1


def default_settings(
    network: Network,
    knowledge: Knowledge,
    settings: StationaritySettings,
    surface: str,
    is_signed: bool,
) -> dict[str, Any]:
    """Choose the penalties on candidates (priors) and the learning rate of their multipliers, if not set.

    Images get a sparse prior. If the multipliers can have any sign, the sparse prior gets a smaller weight:
    the smallest weight for pen strokes (such as digits), and a larger weight for photographs. If the
    types of a table's columns are known, a prior pulls integer columns to integers and one-hot columns to 0
    and 1.

    We chose the weights of the sparse prior on images that no other measurement uses. For networks with
    weight decay, 15 of 40 reconstructed photographs have a normalized cross-correlation (NCC) above 0.9 with
    a training sample. Without a prior, 4 do. With known initial weights, 167 of 180 reconstructed digits have
    a distance below 2.5 to a training sample. With the weight for photographs, 140 do.

    Args:
        network: The network that is attacked.
        knowledge: What the attacker knows.
        settings: Settings of the attack.
        surface: Name of the attack surface, such as the weights or the weight update.
        is_signed: True if the multipliers can have any sign.

    Returns:
        The chosen settings by name.
    """
    if None not in (settings.priors, settings.lr_lam):
        return {}
    rows, shape = mixture_rows(network, knowledge, surface), network.sample_shape(knowledge)
    rows_have_sample_size = rows.ndim == 2 and rows.shape[1] == math.prod(shape)
    appearance = measure_appearance(rows, shape) if rows_have_sample_size else Appearance()
    signed_prior_weight = SIGNED_SPARSE if appearance.are_photographs else SIGNED_STROKES
    priors = (
        (("sparse-gradients", signed_prior_weight if is_signed else SPARSE),)
        if appearance.are_images
        else ()
    )
    if knowledge.columns is not None:
        priors = (("columns", TYPED),)
    uses_sparse_prior = appearance.are_images and settings.priors != () and not is_signed
    default_values: dict[str, Any] = {
        "priors": priors,
        "lr_lam": SLOW if uses_sparse_prior else LR_LAM,
    }
    return {
        name: value for name, value in default_values.items() if getattr(settings, name) is None
    }


def mixture_rows(checkpoint: Network, knowledge: Knowledge, surface: str) -> Tensor:
    """Return the tensor of the first layer whose rows are mixtures of training samples.

    The tensor is the weights, the weight update or the optimizer state.

    If the initial weights are large, the trained weights are not mixtures of training samples, but the weight
    update is.

    Args:
        checkpoint: The network that is attacked.
        knowledge: What the attacker knows.
        surface: Name of the attack surface, such as the weights or the weight update.

    Returns:
        The first layer of the tensors that the attack surface uses.
    """
    if surface == MOMENT:
        return first_layer({**checkpoint.theta, **(knowledge.moment or {})})
    if surface == CHANGE and knowledge.theta0 is not None:
        return first_layer(SURFACES[CHANGE](checkpoint, knowledge).target)
    return first_layer(checkpoint.theta)


@dataclass(frozen=True)
class Appearance:
    """Appearance of the training data, estimated from the first layer of a network.

    The values are 0 if the samples are not images.

    Rows of a trained first layer are mixtures of training samples, and so are its leading right singular
    vectors. If these vectors are viewed as images, they have two properties that survive mixing:

        neighbors   correlation of neighboring pixels, weighted by squared singular values
        strokes     kurtosis of the pixels: fourth over squared second moment. Kurtosis is large
                    if most of the image is empty, as around a pen stroke, and 3 for a normal
                    distribution.

    We measured networks with two initializations (small and the default of torch) and 20 to 200 samples:

    =======================  ===========  ===========
    data                     neighbors    strokes
    =======================  ===========  ===========
    never trained            0.00         3.0
    digits, 8 x 8            0.26-0.37    3.6-3.8
    MNIST                    0.65-0.78    6.7-7.4
    CIFAR-10, photographs    0.70-0.90    3.0-3.8
    =======================  ===========  ===========

    Attributes:
        neighbors: Correlation of neighboring pixels in the mixtures.
        strokes: Kurtosis of the pixels in the mixtures.
    """

    neighbors: float = 0.0
    strokes: float = 0.0

    @property
    def are_images(self) -> bool:
        """Whether the data are images: neighboring pixels are correlated."""
        return self.neighbors > NEIGHBORS

    @property
    def are_photographs(self) -> bool:
        """Whether the data are images without large empty areas."""
        return self.are_images and self.strokes < STROKES


def measure_appearance(rows: Tensor, shape: tuple[int, ...]) -> Appearance:
    """Measure the appearance of the training data from the weights of the first layer.

    Args:
        rows: Weights (h, d) of the first layer with h neurons and d inputs.
        shape: Shape of one sample.

    Returns:
        The appearance. Its values are 0 unless the samples are images with sides of at least MIN_SIDE pixels.
    """
    if len(shape) < 2 or min(shape[-2:]) < MIN_SIDE or not bool(rows.isfinite().all()):
        return Appearance()
    _, s, vectors = torch.linalg.svd(rows.detach().float().cpu(), full_matrices=False)
    if not s[0] > 0:
        return Appearance()
    is_leading = s > LEADING * s[0]
    images, weight = vectors[is_leading].reshape(-1, *shape), s[is_leading].square()

    def mean(values: Tensor) -> float:
        return float((values * weight).sum() / weight.sum())

    def correlate(axis: int) -> float:
        pair_count = images.shape[axis] - 1
        a, b = (images.narrow(axis, start, pair_count).flatten(1) for start in (0, 1))
        return mean(torch.cosine_similarity(a, b))

    squares = images.flatten(1).square()
    return Appearance(
        min(correlate(-1), correlate(-2)), mean(squares.square().mean(1) / squares.mean(1).square())
    )
