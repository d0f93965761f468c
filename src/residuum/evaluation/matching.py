"""Matching of candidates with samples, and the metrics that score a match.

Candidates, training samples and the held-out set are put into one :class:`ScoringData`. Gains are
matrices (m, n): candidates are rows, samples are columns, and higher is better. A gain of -inf marks a
pair that may not be matched. Each matching returns a candidate and a gain for every sample. A sample
without a candidate has candidate -1 and gain -inf, so thresholds need no special case.

A metric measures how good a reconstruction is. It has a direction and, if the source states it, a
threshold. It does two things:

    search    compares all candidates with all samples, to decide which candidate is matched with which
              sample
    score     rates a given match

For NCC, L2 and PSNR both are the same quantity. SSIM is too expensive for all pairs. So candidates are
matched by NCC, as in the published code: at half resolution on color images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from residuum import similarity
from residuum.errors import DataError, InconclusiveError, InputError, MissingExtraError
from residuum.plugins import Table
from residuum.records.inputs import Dataset

Array: TypeAlias = np.ndarray[Any, Any]
MIN_HOLDOUT = 100  # held-out samples: the threshold is exceeded by one sample in a hundred
MAX_CLASSES = 1000  # targets with more distinct values are not treated as class labels
MAX_HOLDOUT = (
    2000  # held-out samples used: more improve little and cost memory (m x held-out samples)
)
MATCHING_CHUNK = 1 << 24  # candidates in memory, over all subsets that are matched at once
# SSIM holds five filtered maps of every pair, and is fastest if these maps fit the caches.
PAIRS_CHUNK = 1 << 20
PSNR_CEILING = 100.0  # dB; the PSNR of a perfect copy is infinite, which JSON cannot represent


@dataclass(frozen=True)
class Matching:
    """The candidate of every sample.

    Attributes:
        candidate: (n,) index of the candidate, -1 for none.
        value: (n,) gain of that pair, -inf for none.
    """

    candidate: Array
    value: Array


def nearest(gain: Array) -> Matching:
    """Match each sample with its best candidate. A candidate may serve several samples (as published)."""
    return _matching(gain, gain.argmax(0))


def greedy(gain: Array) -> Matching:
    """Match one-to-one: first the best pair of all, then the best of the remaining pairs, and so on."""
    return _matching(gain, match_greedily_in_sets(gain, np.arange(gain.shape[1])[None])[0])


def match_greedily_in_sets(gain: Array, sets: Array, floor: float = -np.inf) -> Array:
    """Compute the greedy matching within each of many sets of samples.

    Greedy matching is the stable matching of a market whose two sides rank pairs by the same number. So
    deferred acceptance finds it: every free sample proposes to the best candidate that has not refused it
    yet, and every candidate keeps its best proposal. All samples of all sets propose at once. If there are
    fewer candidates than samples, the candidates propose instead, because most proposals of samples would
    be refused.

    Args:
        gain: (m, N), higher is better.
        sets: (s, n) distinct columns per row.
        floor: Pairs with a gain below this value stay unmatched. This changes no pair above it, because the
            best pairs are matched first.

    Returns:
        (s, n) the candidate of every sample, -1 for none.
    """
    if len(gain) < sets.shape[1]:
        return _by_candidates(gain, sets, floor)
    depth = min(len(gain), sets.shape[1])  # other samples hold at most n - 1 candidates
    if floor > -np.inf:
        depth = min(depth, max(1, int((gain >= floor).sum(0).max())))
    order, value = _preferences(gain, depth)
    value[value < floor] = -np.inf
    step = max(1, MATCHING_CHUNK // len(gain))
    blocks = [
        _defer(order, value, sets[start : start + step], len(gain))
        for start in range(0, len(sets), step)
    ]
    return np.concatenate(blocks)


def as_array(values: Tensor | Array) -> Array:
    """Return ``values`` as a numpy array in main memory."""
    return values.numpy(force=True) if isinstance(values, Tensor) else np.asarray(values)


def _preferences(gain: Array, depth: int) -> tuple[Array, Array]:
    """Return the ``depth`` best candidates of every sample, best first, and their gains. (N, depth)."""
    worse = np.negative(gain.T, order="C")  # contiguous rows are sorted twice as fast
    top = np.argpartition(worse, depth - 1, axis=1)[:, :depth]
    value = np.take_along_axis(worse, top, axis=1)
    best_first = np.argsort(value, axis=1, kind="stable")
    return np.take_along_axis(top, best_first, 1), -np.take_along_axis(value, best_first, 1)


def _by_candidates(gain: Array, sets: Array, floor: float) -> Array:
    """Compute the same by proposals of candidates, which samples outside a set refuse."""
    # All sets share one order of preferences. If samples proposed, every set would need its own order.
    m, samples = gain.shape
    order, value = _preferences(gain.T, samples)
    value[value < floor] = -np.inf
    candidates, step = np.full(sets.shape, -1), max(1, MATCHING_CHUNK // samples)
    for start in range(0, len(sets), step):
        block = sets[start : start + step]
        row = np.arange(len(block))[:, None]
        position = np.full((len(block), samples), -1)
        position[row, block] = np.arange(block.shape[1])
        proposers = np.broadcast_to(np.arange(m), (len(block), m))
        matched_sample = _defer(order, value, proposers, samples, (position < 0).ravel())
        seat, candidate = np.nonzero(matched_sample >= 0)
        candidates[start + seat, position[seat, matched_sample[seat, candidate]]] = candidate
    return candidates


def _defer(order: Array, value: Array, sets: Array, m: int, closed: Array | None = None) -> Array:
    """Run deferred acceptance. Seats are (set, sample), slots are (set, candidate).

    Args:
        order: (N, depth) candidates of every sample, best first.
        value: (N, depth) their gains.
        sets: (s, n) samples of every set.
        m: Number of candidates.
        closed: (s * m,) mask of the slots that refuse everyone.

    Returns:
        (s, n) the candidate of every sample, -1 for none.
    """
    s, n = sets.shape
    sample = sets.ravel()
    proposals = np.zeros(s * n, dtype=np.int64)  # how many candidates each seat has proposed to
    seat_of_slot = np.full(s * m, -1)
    best_gain = np.full(s * m, -np.inf) if closed is None else np.where(closed, np.inf, -np.inf)
    free = np.arange(s * n)
    while len(free := free[proposals[free] < order.shape[1]]):
        gain = value[sample[free], proposals[free]]
        free, gain = free[gain > -np.inf], gain[gain > -np.inf]  # seats without a gain stay empty
        slot = free // n * m + order[sample[free], proposals[free]]
        proposals[free] += 1
        better = np.flatnonzero(gain > best_gain[slot])
        np.maximum.at(best_gain, slot[better], gain[better])
        best = better[gain[better] == best_gain[slot[better]]]  # several per slot if gains tie
        displaced = seat_of_slot[slot[best]]
        seat_of_slot[slot[best]] = free[best]  # the last of several equal proposals stays
        stays = seat_of_slot[slot[best]] == free[best]
        best, displaced = best[stays], displaced[stays]
        refused = np.ones(len(free), dtype=bool)
        refused[best] = False
        displaced = displaced[np.argsort(slot[best])]  # a fixed order breaks ties
        free = np.concatenate([free[refused], displaced[displaced >= 0]])
    candidate = np.full(s * n, -1)
    filled = np.flatnonzero(seat_of_slot >= 0)
    candidate[seat_of_slot[filled]] = filled % m
    return candidate.reshape(s, n)


def _matching(gain: Array, candidate: Array) -> Matching:
    value = np.where(candidate >= 0, gain[candidate, np.arange(gain.shape[1])], -np.inf)
    return Matching(np.where(np.isneginf(value), -1, candidate), value)


MATCHINGS: dict[str, Callable[[Array], Matching]] = {"nearest": nearest, "greedy": greedy}


@dataclass(frozen=True)
class ScoringData:
    """Everything that is compared. Columns 0..n-1 are the training samples, the held-out set follows.

    Attributes:
        n: Number of training samples.
        original_index: (m,) the caller's index of each candidate.
        candidates: (m, *shape).
        samples: (n + N, *shape).
        mean: Mean of the training set, or None.
        strata: (n + N,) labels that subsets are matched by, or None.
        reason: Why there is no held-out set, or "".
    """

    n: int
    original_index: Array
    candidates: Tensor  # (m, *shape)
    samples: Tensor  # (n + N, *shape)
    mean: Tensor | None
    strata: Array | None
    reason: str

    @property
    def holdout_size(self) -> int:
        """The number of held-out samples."""
        return len(self.samples) - self.n

    def gain(self, metric: Metric) -> Array:
        """Return the (m, n + N) matrix that candidates are matched by. Higher is better."""
        gain = as_array(metric.search(self.candidates, self.samples))
        return gain if metric.higher_is_better else -gain

    def value(self, metric: Metric, candidate: Array, column: Array) -> Array:
        """Score given pairs, oriented so that higher is better.

        Args:
            metric: The metric to score by.
            candidate: (k,) rows of candidates.
            column: (k,) columns of samples.

        Returns:
            (k,) oriented scores.
        """
        a, b = self.displayed_images if metric.needs_images else (self.candidates, self.samples)
        index = torch.from_numpy(np.stack([candidate, column], 1)).to(a.device)
        values = as_array(metric.pairs(a, b, index))
        return values if metric.higher_is_better else -values

    def value_of(self, metric: Metric) -> Callable[[Array, Array], Array] | None:
        """Return the function that scores matches, or None if their gain is already the score."""
        return None if metric.search_is_score else partial(self.value, metric)

    def match_and_score(
        self, metric: Metric, gain: Array, columns: Array, matching: Callable[[Array], Matching]
    ) -> Matching:
        """Match some columns and score the matches.

        Args:
            metric: The metric to score by.
            gain: (m, n + N) matrix of :meth:`gain`.
            columns: (k,) columns to match.
            matching: An entry of ``MATCHINGS``.

        Returns:
            The matching with oriented scores.
        """
        result = matching(gain[:, columns])
        matched = result.candidate >= 0
        result.value[matched] = self.value(metric, result.candidate[matched], columns[matched])
        return result

    @cached_property
    def displayed_images(self) -> tuple[Tensor, Tensor]:
        """Candidates and samples as the published figures show them, in float32 as published."""
        samples = self.samples if self.mean is None else self.samples + self.mean
        return display(self.candidates, self.mean).float(), samples.float()

    def find_original(self, candidate: int) -> int | None:
        """Return the caller's index of a candidate, or None for -1."""
        return int(self.original_index[candidate]) if candidate >= 0 else None


def prepare_scoring_data(
    candidates: Tensor,
    train: Dataset,
    holdout: Dataset | None,
    notes: list[str],
    *,
    seed: int = 0,
    match_labels: bool = True,
) -> ScoringData:
    """Check that the inputs fit together, and prepare them for matching.

    Training and held-out samples are stored in one tensor, because the permutation test draws from both.

    Args:
        candidates: (m, *shape). Candidates that are not finite are ignored.
        train: Training set.
        holdout: Held-out set. Samples that repeat a training sample are ignored.
        notes: List to which a note is appended for everything that is ignored.
        seed: Seed that selects held-out samples if there are too many.
        match_labels: Use labels as strata, if both sets have class labels.

    Returns:
        The data to compare.
    """
    finite = _finite(candidates, notes)
    usable_holdout, reason = _control(train, holdout, seed, notes)
    samples = [train.x] if usable_holdout is None else [train.x, usable_holdout.x]
    device = candidates.device
    return ScoringData(
        n=len(train),
        original_index=finite,
        candidates=_in_shape(candidates, train)[finite],
        samples=torch.cat([x.to(device, torch.float64) for x in samples]),
        mean=None if train.mean is None else train.mean.to(device, torch.float64),
        strata=_strata(train, usable_holdout, notes)
        if match_labels and usable_holdout is not None
        else None,
        reason=reason,
    )


def why_not_calibrated(n: int, holdout_size: int | None) -> str:
    """Return why a held-out set of this size cannot calibrate a test, or "" if it can.

    Args:
        n: Number of training samples.
        holdout_size: Number of usable held-out samples, or None if no held-out set was given.

    Returns:
        The reason, or "".
    """
    if holdout_size is None:
        return "the chance level is unknown: no held-out set was given"
    if holdout_size == 0:  # a dataset is never empty, so all its samples were training samples
        return "the chance level is unknown: all samples of the held-out set are training samples"
    if holdout_size < max(MIN_HOLDOUT, n):
        reason = ", as many as the training set" if n > MIN_HOLDOUT else ""
        return (
            f"the chance level is unknown: the held-out set needs at least {max(MIN_HOLDOUT, n)} "
            f"samples{reason}; it has {holdout_size}"
        )
    return ""


def are_class_labels(y: Tensor) -> bool:
    """Return True if targets are class labels: whole numbers, few of them, one per sample."""
    is_integral = not y.is_floating_point() or bool((y == y.round()).all())
    return y.ndim == 1 and is_integral and len(y.unique()) <= MAX_CLASSES


def _finite(candidates: Tensor, notes: list[str]) -> Array:
    """Return the indices of the candidates without infinite or undefined values."""
    finite: Array = np.flatnonzero(as_array(torch.isfinite(candidates.flatten(1)).all(1)))
    if not len(finite):
        raise InconclusiveError(
            f"Scoring needs at least one finite candidate; none of {len(candidates)} is.",
            "If the attack diverged, lower its learning rate.",
        )
    if dropped := len(candidates) - len(finite):
        notes.append(f"{dropped} candidates are not finite and were ignored")
    return finite


def _control(
    train: Dataset, holdout: Dataset | None, seed: int, notes: list[str]
) -> tuple[Dataset | None, str]:
    """Return the usable held-out samples, or None and the reason."""
    if holdout is None:
        return None, why_not_calibrated(len(train), None)
    _check_alike(train, holdout)
    seen = {row.tobytes() for row in as_array(train.x.double())}
    fresh = [i for i, row in enumerate(as_array(holdout.x.double())) if row.tobytes() not in seen]
    if repeats := len(holdout) - len(fresh):
        notes.append(f"{repeats} held-out samples are also training samples and were ignored")
    if reason := why_not_calibrated(len(train), len(fresh)):
        return None, reason
    if len(fresh) > (limit := max(MAX_HOLDOUT, 4 * len(train))):
        notes.append(f"{limit} of {len(fresh)} held-out samples are used, drawn at random")
        # A separate stream: the choice must not depend on other uses of the seed.
        fresh = np.random.default_rng((seed, 1)).choice(fresh, limit, replace=False).tolist()
    return holdout.take(torch.as_tensor(fresh)), ""


def _check_alike(train: Dataset, holdout: Dataset) -> None:
    if holdout.shape != train.shape:
        raise DataError(
            f"Held-out samples must have the training samples' shape {train.shape}; "
            f"got {holdout.shape}.",
            "Preprocess both sets in the same way.",
        )
    means = [data.mean.double().cpu() for data in (train, holdout) if data.mean is not None]
    if len(means) == 2 and not torch.allclose(means[0], means[1], atol=1e-5):
        raise DataError(
            "Training and held-out samples must be centered by the same mean; their means differ.",
            "Subtract the training mean, which the network was trained with, from both sets.",
        )


def _in_shape(candidates: Tensor, train: Dataset) -> Tensor:
    """Return the candidates in the samples' shape, in float64."""
    if candidates[0].numel() != train.x[0].numel():
        raise DataError(
            f"Candidates must have the training samples' shape {train.shape}; "
            f"got {tuple(candidates.shape[1:])}.",
            "Score the reconstruction against the training data of its network.",
        )
    return candidates.detach().double().reshape(len(candidates), *train.shape)


def _strata(train: Dataset, holdout: Dataset, notes: list[str]) -> Array | None:
    """Return the labels of all samples, by which subsets are matched.

    None for regression targets, and if the held-out set has too few samples of a label.
    """
    if not (are_class_labels(train.y) and are_class_labels(holdout.y)):
        return None
    labels, holdout_labels = as_array(train.y), as_array(holdout.y)
    values, counts = np.unique(labels, return_counts=True)
    if any((holdout_labels == value).sum() < k for value, k in zip(values, counts, strict=True)):
        notes.append(
            "the held-out set has too few samples of a label: subsets are not label-matched"
        )
        return None
    return np.concatenate([labels, holdout_labels])


@dataclass(frozen=True)
class Metric:
    """A way to compare a candidate with a sample.

    Attributes:
        name: Key in ``METRICS``.
        higher_is_better: The direction. There is no default.
        published_threshold: The source calls a match good beyond this value.
        score: (k, *shape), (k, *shape) -> (k,), pair by pair.
        search: (m, *shape), (n, *shape) -> (m, n), in the same direction as ``score``.
        description: A few words for tables.
        published_matching: Key of ``MATCHINGS`` that the source uses.
        needs_images: ``score`` is defined on images as displayed (:func:`display`), not on flat vectors.
        search_is_score: ``search`` and ``score`` agree.
        window: Side of the SSIM window, or 0.
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
    def is_plugin(self) -> bool:
        """Whether the metric comes from another package."""
        function = getattr(self.score, "func", self.score)  # unwraps a partial
        return not str(function.__module__).startswith("residuum.")

    def why_not(self, shape: tuple[int, ...]) -> str:
        """Return why this metric cannot score samples of ``shape`` here, or "" if it can."""
        if not self.needs_images:
            return ""
        if len(shape) not in (2, 3) or min(shape[-2:]) <= self.window // 2:
            side = self.window // 2 + 1
            return f"needs images (c, h, w) of at least {side} x {side}; samples have shape {shape}"
        return "" if find_spec("kornia") else "needs kornia, which is not installed"

    def pairs(self, candidates: Tensor, samples: Tensor, index: Tensor) -> Tensor:
        """Score pairs of a candidate and a sample, in chunks.

        Args:
            candidates: (m, *shape).
            samples: (n, *shape).
            index: (k, 2) pairs (candidate, sample).

        Returns:
            (k,) scores.

        Raises:
            InputError: If the metric does not apply to these samples.
        """
        similarity.check_shapes(candidates, samples)
        if reason := self.why_not(tuple(samples.shape[1:])):
            raise InputError(f"Metric {self.name!r} {reason}.", "Pass metrics=('ncc', 'l2').")
        values = candidates.new_empty(len(index))
        for rows in similarity.chunks(len(index), 8 * samples[0].numel(), PAIRS_CHUNK):
            i, j = index[rows].unbind(1)
            values[rows] = self.score(candidates[i], samples[j]).to(values.dtype)
        return values


def display(candidates: Tensor, mean: Tensor | None) -> Tensor:
    """Return candidates as published figures show them: with the mean, and each stretched to [0, 1].

    Args:
        candidates: (m, *shape).
        mean: Mean of the training set, or None.

    Returns:
        (m, *shape). A constant candidate cannot be stretched and is black.
    """
    images = candidates if mean is None else candidates + mean
    flat = images.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    stretched = torch.where(high > low, (flat - low) / (high - low), 0.0)
    return stretched.reshape(images.shape)


def published_search(a: Tensor, b: Tensor) -> Tensor:
    """Compute NCC as the published matching does: at bicubic half resolution on color images.

    Args:
        a: (m, *shape).
        b: (n, *shape).

    Returns:
        (m, n) correlations.
    """
    if a.ndim == 4 and a.shape[1] == 3:
        a, b = (interpolate(x, scale_factor=0.5, mode="bicubic") for x in (a, b))
    return similarity.ncc(a, b)


def ssim_score(a: Tensor, b: Tensor, window: int) -> Tensor:
    """Compute SSIM (Wang et al. 2004, eq. 13) of images in [0, 1], pair by pair.

        ((2 mu_a mu_b + C1)(2 s_ab + C2)) / ((mu_a^2 + mu_b^2 + C1)(s_a^2 + s_b^2 + C2))

    averaged over pixels. Local moments are taken under a Gaussian window of ``window`` x ``window`` taps
    with sigma 1.5, and borders are reflected. C1 = 0.01^2, C2 = 0.03^2.

    Args:
        a: (k, *shape).
        b: (k, *shape).
        window: Side of the window.

    Returns:
        (k,) similarities.

    Raises:
        MissingExtraError: If kornia is not installed.
    """
    try:
        from kornia.metrics import ssim
    except ImportError as problem:
        raise MissingExtraError(
            "SSIM needs kornia, which is not installed.", "Run: pip install kornia"
        ) from problem
    a, b = (x[:, None] if x.ndim == 3 else x for x in (a, b))
    values: Tensor = ssim(a.contiguous(), b.contiguous(), window, max_val=1.0).mean((1, 2, 3))
    return values


def _ncc_score(a: Tensor, b: Tensor) -> Tensor:
    return (similarity.standardize(a) * similarity.standardize(b)).sum(1).clamp(-1, 1)


def _l2_score(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).flatten(1).norm(dim=1)


def _decibels(distance: Tensor, size: int) -> Tensor:
    """Return the PSNR of images with range 1 at this Euclidean distance: -10 log10(distance^2 / size)."""
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
        description=f"{description}; matched by NCC, then scored on displayed images: the training mean "
        "is added to both (which favors the training set), the candidate is stretched to [0, 1]",
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
            description="normalized cross-correlation per channel, on network inputs (no mean added)",
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
            description="Euclidean distance on network inputs; the threshold is meant for 28x28 digits",
            published_matching="greedy",
        ),
        Metric(
            name="psnr",
            higher_is_better=True,
            published_threshold=None,
            score=_psnr_score,
            search=_psnr_search,
            description=f"peak signal-to-noise ratio in dB for value range 1, at most {PSNR_CEILING:g}",
        ),
    )
}
METRICS = Table("metric", METRICS)
