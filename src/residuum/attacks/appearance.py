"""What the training data looks like, read off the first layer alone.

Rows of a trained first layer are mixtures of training samples, and so are its leading right singular
vectors. Laid out as images they show two things that survive mixing:

    neighbours  correlation of neighbouring pixels, weighted by squared singular values
    strokes     fourth over squared second moment of their pixels: large where most of the frame stays
                empty, as around a pen stroke, 3 for a normal density

Measured on networks of two starts (small and torch's own), 20 to 200 samples:

=======================  ===========  ===========
data                     neighbours   strokes
=======================  ===========  ===========
never trained            0.00         3.0
digits, 8 x 8            0.26-0.37    3.6-3.8
MNIST                    0.65-0.78    6.7-7.4
CIFAR-10, photographs    0.70-0.90    3.0-3.8
=======================  ===========  ===========
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEIGHBOURS, STROKES = 0.5, 5.0  # half way between the rows above
SIDE = 8  # pixels: in smaller frames neighbours say nothing of an image
LEADING = 0.1  # share of the largest singular value down to which vectors are looked at


@dataclass(frozen=True)
class Appearance:
    """neighbours, strokes: see above; both 0 for samples that are no images."""

    neighbours: float = 0.0
    strokes: float = 0.0

    @property
    def images(self) -> bool:
        """Whether neighbouring pixels belong together, as in images of any kind and size worth it."""
        return self.neighbours > NEIGHBOURS

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
