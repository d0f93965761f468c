"""The metrics: how good a reconstruction is, each with its direction and published threshold.

A metric does two things. ``search`` compares all candidates with all samples and decides who is
matched with whom; ``score`` says how good a given match is. For NCC, L2 and PSNR they are the same
quantity. SSIM costs too much for all pairs, so it is searched by NCC, as published: at half
resolution on colour images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from residuum import similarity
from residuum.errors import InputError, MissingExtraError
from residuum.plugins import Table

# SSIM holds five filtered maps of every pair at a time and runs fastest where these fit the caches.
PAIRS_CHUNK = 1 << 20
PSNR_CEILING = 100.0  # dB; a perfect copy would have infinitely many, which JSON cannot say


@dataclass(frozen=True)
class Metric:
    """One way to compare a candidate with a sample.

    score: (k, *shape), (k, *shape) -> (k,), pair by pair.
    search: (m, *shape), (n, *shape) -> (m, n), in the same direction as ``score``.
    published_threshold: beyond it the source calls a match good.
    published_matching: key of ``MATCHINGS`` the source uses.
    needs_images: ``score`` is defined on images as displayed (:func:`display`) and not on flat
        vectors.
    search_is_score: the two agree.
    window: side of the SSIM window, 0 without one.
    higher_is_better: its direction; there is no default.
    description: in a few words, for tables.
    """

    name: str
    higher_is_better: bool
    published_threshold: float | None
    score: Callable[[Tensor, Tensor], Tensor]
    search: Callable[[Tensor, Tensor], Tensor]
    description: str
    published_matching: str = "nearest"
    needs_images: bool = False
    search_is_score: bool = True
    window: int = 0

    @property
    def outside(self) -> bool:
        """Whether it comes from another package: then its faults are its own."""
        own = getattr(self.score, "func", self.score)  # of a partial
        return not str(own.__module__).startswith("residuum.")

    def why_not(self, shape: tuple[int, ...]) -> str:
        """Why samples of ``shape`` cannot be scored by this metric here; "" when they can."""
        if not self.needs_images:
            return ""
        if len(shape) not in (2, 3) or min(shape[-2:]) <= self.window // 2:
            side = self.window // 2 + 1
            return f"needs images (c, h, w) of at least {side} x {side}; samples are {shape}"
        return "" if find_spec("kornia") else "needs kornia, which is not installed"

    def pairs(self, candidates: Tensor, samples: Tensor, index: Tensor) -> Tensor:
        """Scores of the pairs (candidate, sample) in the rows of ``index`` (k, 2), chunked. (k,)."""
        similarity.check_alike(candidates, samples)
        if why := self.why_not(tuple(samples.shape[1:])):
            raise InputError(f"Metric {self.name!r} {why}.", "Choose metrics=('ncc', 'l2').")
        values = candidates.new_empty(len(index))
        for some in similarity.chunks(len(index), 8 * samples[0].numel(), PAIRS_CHUNK):
            i, j = index[some].unbind(1)
            values[some] = self.score(candidates[i], samples[j]).to(values.dtype)
        return values


def display(candidates: Tensor, mean: Tensor | None) -> Tensor:
    """Candidates as published figures show them: mean added, each stretched to [0, 1].

    A constant candidate has nothing to stretch and is shown black.
    """
    images = candidates if mean is None else candidates + mean
    flat = images.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    stretched = torch.where(high > low, (flat - low) / (high - low), 0.0)
    return stretched.reshape(images.shape)


def published_search(a: Tensor, b: Tensor) -> Tensor:
    """NCC as the published code matches by: colour images at bicubic half resolution. (m, n)."""
    if a.ndim == 4 and a.shape[1] == 3:
        a, b = (interpolate(x, scale_factor=0.5, mode="bicubic") for x in (a, b))
    return similarity.ncc(a, b)


def ssim_score(a: Tensor, b: Tensor, window: int) -> Tensor:
    """SSIM (Wang et al. 2004, eq. 13) of images in [0, 1], pair by pair, averaged over pixels. (k,).

    ((2 mu_a mu_b + C1)(2 s_ab + C2)) / ((mu_a^2 + mu_b^2 + C1)(s_a^2 + s_b^2 + C2)) with local
    moments under a Gaussian window of ``window`` x ``window`` taps, sigma 1.5, borders reflected;
    C1 = 0.01^2, C2 = 0.03^2.
    """
    try:
        from kornia.metrics import ssim
    except ImportError as problem:
        raise MissingExtraError(
            "SSIM is computed by kornia, which is not installed.", "Run: pip install kornia"
        ) from problem
    a, b = (x[:, None] if x.ndim == 3 else x for x in (a, b))
    values: Tensor = ssim(a.contiguous(), b.contiguous(), window, max_val=1.0).mean((1, 2, 3))
    return values


def _ncc_score(a: Tensor, b: Tensor) -> Tensor:
    return (similarity.standardise(a) * similarity.standardise(b)).sum(1).clamp(-1, 1)


def _l2_score(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).flatten(1).norm(dim=1)


def _decibels(distance: Tensor, size: int) -> Tensor:
    """PSNR of images with range 1 at this Euclidean distance: -10 log10(distance^2 / size)."""
    return -10 * (distance.square() / size).clamp(min=10 ** (-PSNR_CEILING / 10)).log10()


def _psnr_score(a: Tensor, b: Tensor) -> Tensor:
    return _decibels(_l2_score(a, b), a[0].numel())


def _psnr_search(a: Tensor, b: Tensor) -> Tensor:
    return _decibels(similarity.l2(a, b), a[0].numel())


def _ssim(name: str, threshold: float | None, window: int, description: str) -> Metric:
    return Metric(
        name=name,
        higher_is_better=True,
        published_threshold=threshold,
        score=partial(ssim_score, window=window),
        search=published_search,
        description=f"{description}; matched by NCC, then scored on displayed images: training mean "
        "added to both (which by itself favours the training set), candidate stretched to [0, 1]",
        needs_images=True,
        search_is_score=False,
        window=window,
    )


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="ncc",
            higher_is_better=True,
            published_threshold=None,
            score=_ncc_score,
            search=similarity.ncc,
            description="normalised cross-correlation per channel, on network inputs (no mean added)",
        ),
        _ssim("ssim3", 0.4, 3, "SSIM with a 3x3 window, as in the published counts"),
        _ssim(
            "ssim", None, 11, "SSIM with the 11x11 window of Wang et al. 2004, borders reflected"
        ),
        Metric(
            name="l2",
            higher_is_better=False,
            published_threshold=2.5,
            score=_l2_score,
            search=similarity.l2,
            description="Euclidean distance on network inputs; the threshold is one for 28x28 digits",
            published_matching="greedy",
        ),
        Metric(
            name="psnr",
            higher_is_better=True,
            published_threshold=None,
            score=_psnr_score,
            search=_psnr_search,
            description=f"peak signal-to-noise ratio for range 1, in dB, at most {PSNR_CEILING:g}",
        ),
    )
}
METRICS = Table("metric", METRICS)
