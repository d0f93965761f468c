"""Matching of candidates with samples, and the metrics that score a match.

Candidates, training samples and held-out samples are stored in one :class:`ScoringData`. A gain is the
similarity of a candidate and a sample, with the sign such that higher is better. Gains are matrices (m, n):
candidates are rows, and samples are columns. A gain of -inf marks a pair that may not be matched. A matching
assigns a candidate to every sample. A sample without a candidate has candidate -1 and gain -inf, so
thresholds need no special case.

A metric says how good a reconstruction is. It says whether higher values are better. If the paper that
introduced the metric states a threshold, the metric has this threshold. A metric has two functions:

    search    compares all candidates with all samples, to decide which candidate is matched with which
              sample
    score     rates the pairs that were matched

For NCC (normalized cross-correlation), L2 and PSNR, search and score compute the same number. SSIM is too
expensive for all pairs. So candidates are matched by NCC, as in the published code: at half resolution on
color images.
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
# A held-out set needs this many samples, because one in a hundred may exceed the threshold by chance.
MIN_HOLDOUT = 100
MAX_CLASSES = 1000  # targets with more distinct values than this are not treated as class labels
# At most this many held-out samples are used, because more improve little and cost memory.
MAX_HOLDOUT = 2000
# Sets of samples are matched together as long as all their candidates are no more than this number.
MATCHING_CHUNK = 1 << 24
# A batch of pairs has this many pixels, because SSIM is fastest if its five filtered maps fit the caches.
PAIRS_CHUNK = 1 << 20
# The PSNR of a perfect copy is infinite, which JSON cannot represent. So it is limited to this many dB.
PSNR_CEILING = 100.0


@dataclass(frozen=True)
class Matching:
    """The candidates that were assigned to n samples.

    Attributes:
        candidate: (n,) index of each sample's candidate, -1 for a sample without a candidate.
        value: (n,) similarity of each sample and its candidate, -inf for a sample without a candidate. Higher
            is better.
    """

    candidate: Array
    value: Array


def nearest(gain: Array) -> Matching:
    """Match each sample with its best candidate, as published. A candidate may match several samples."""
    return _matching(gain, gain.argmax(0))


def greedy(gain: Array) -> Matching:
    """Match candidates and samples one-to-one: first the best pair, then the best remaining pair, etc."""
    return _matching(gain, match_greedily_in_sets(gain, np.arange(gain.shape[1])[None])[0])


def match_greedily_in_sets(gain: Array, sets: Array, floor: float = -np.inf) -> Array:
    """Match candidates one-to-one with the samples of each set, best pairs first, for many sets.

    Greedy matching is the stable matching of a market whose two sides rank pairs by the same number. So
    deferred acceptance finds it: every unmatched sample proposes to the best candidate that has not refused
    the sample yet, and every candidate keeps its best proposal. All samples of all sets propose at once. If
    there are fewer candidates than samples, the candidates propose instead, because most proposals of samples
    would be refused.

    Args:
        gain: (m, N) similarities of m candidates and N samples. Higher is better.
        sets: (s, n) columns of the samples of each set. The columns in a row differ.
        floor: Pairs with a similarity below this value stay unmatched. This does not change other pairs,
            because the best pairs are matched first.

    Returns:
        (s, n) candidate of each sample in each set, -1 for a sample without a candidate.
    """
    if len(gain) < sets.shape[1]:
        return _by_candidates(gain, sets, floor)
    list_length = min(
        len(gain), sets.shape[1]
    )  # n - 1 other samples of a set can take at most n - 1 candidates
    if floor > -np.inf:
        list_length = min(list_length, max(1, int((gain >= floor).sum(0).max())))
    candidate_order, gains = _preferences(gain, list_length)
    gains[gains < floor] = -np.inf
    sets_per_block = max(1, MATCHING_CHUNK // len(gain))
    blocks = [
        _defer(candidate_order, gains, sets[start : start + sets_per_block], len(gain))
        for start in range(0, len(sets), sets_per_block)
    ]
    return np.concatenate(blocks)


def as_array(values: Tensor | Array) -> Array:
    """Return ``values`` as a numpy array in main memory."""
    return values.numpy(force=True) if isinstance(values, Tensor) else np.asarray(values)


def _preferences(gain: Array, depth: int) -> tuple[Array, Array]:
    """Return the best candidates of every sample, best first, and their similarities.

    Args:
        gain: (m, N) similarities of m candidates and N samples. Higher is better.
        depth: Number of candidates for each sample.

    Returns:
        (N, depth) candidates, and (N, depth) similarities.
    """
    negative_gains = np.negative(gain.T, order="C")  # numpy sorts contiguous rows twice as fast
    best_candidates = np.argpartition(negative_gains, depth - 1, axis=1)[:, :depth]
    negative_gains_of_best = np.take_along_axis(negative_gains, best_candidates, axis=1)
    sorting = np.argsort(negative_gains_of_best, axis=1, kind="stable")
    return np.take_along_axis(best_candidates, sorting, 1), -np.take_along_axis(
        negative_gains_of_best, sorting, 1
    )


def _by_candidates(gain: Array, sets: Array, floor: float) -> Array:
    """Compute the greedy matching within sets of samples by proposals of candidates.

    Samples outside a set refuse all proposals. All sets share one order of samples for each candidate.

    Args:
        gain: (m, N) similarities of m candidates and N samples. Higher is better.
        sets: (s, n) columns of the samples of each set.
        floor: Pairs with a similarity below this value stay unmatched.

    Returns:
        (s, n) candidate of each sample in each set, -1 for a sample without a candidate.
    """
    m, samples = gain.shape
    sample_order, gains = _preferences(gain.T, samples)
    gains[gains < floor] = -np.inf
    candidates, sets_per_block = np.full(sets.shape, -1), max(1, MATCHING_CHUNK // samples)
    for start in range(0, len(sets), sets_per_block):
        set_block = sets[start : start + sets_per_block]
        row = np.arange(len(set_block))[:, None]
        sample_positions = np.full((len(set_block), samples), -1)
        sample_positions[row, set_block] = np.arange(set_block.shape[1])
        proposers = np.broadcast_to(np.arange(m), (len(set_block), m))
        matched_sample = _defer(
            sample_order, gains, proposers, samples, (sample_positions < 0).ravel()
        )
        seat, candidate = np.nonzero(matched_sample >= 0)
        candidates[start + seat, sample_positions[seat, matched_sample[seat, candidate]]] = (
            candidate
        )
    return candidates


def _defer(order: Array, value: Array, sets: Array, m: int, closed: Array | None = None) -> Array:
    """Match the samples of each set with candidates by deferred acceptance.

    Every unmatched sample proposes to its best candidate that has not refused yet, and every candidate keeps
    its best proposal. A seat is a sample in a set, and a slot is a candidate in a set.

    Args:
        order: (N, depth) best candidates of every sample, best first.
        value: (N, depth) similarities of every sample and these candidates.
        sets: (s, n) samples of every set.
        m: Number of candidates.
        closed: (s * m,) mask of the slots that refuse all proposals, or None.

    Returns:
        (s, n) candidate of each sample in each set, -1 for a sample without a candidate.
    """
    s, n = sets.shape
    sample = sets.ravel()
    proposal_counts = np.zeros(
        s * n, dtype=np.int64
    )  # number of candidates to which each seat has proposed
    seat_of_slot = np.full(s * m, -1)
    best_gain = np.full(s * m, -np.inf) if closed is None else np.where(closed, np.inf, -np.inf)
    open_seats = np.arange(s * n)
    while len(open_seats := open_seats[proposal_counts[open_seats] < order.shape[1]]):
        gains = value[sample[open_seats], proposal_counts[open_seats]]
        open_seats, gains = (
            open_seats[gains > -np.inf],
            gains[gains > -np.inf],
        )  # seats whose next gain is -inf stay empty
        slots = open_seats // n * m + order[sample[open_seats], proposal_counts[open_seats]]
        proposal_counts[open_seats] += 1
        improving = np.flatnonzero(gains > best_gain[slots])
        np.maximum.at(best_gain, slots[improving], gains[improving])
        accepted = improving[
            gains[improving] == best_gain[slots[improving]]
        ]  # a slot may have several proposals with equal gains
        displaced_seats = seat_of_slot[slots[accepted]]
        seat_of_slot[slots[accepted]] = open_seats[
            accepted
        ]  # numpy keeps the last of several equal proposals
        is_accepted = seat_of_slot[slots[accepted]] == open_seats[accepted]
        accepted, displaced_seats = accepted[is_accepted], displaced_seats[is_accepted]
        is_refused = np.ones(len(open_seats), dtype=bool)
        is_refused[accepted] = False
        displaced_seats = displaced_seats[
            np.argsort(slots[accepted])
        ]  # a fixed order breaks ties between equal gains
        open_seats = np.concatenate([open_seats[is_refused], displaced_seats[displaced_seats >= 0]])
    candidate = np.full(s * n, -1)
    filled_slots = np.flatnonzero(seat_of_slot >= 0)
    candidate[seat_of_slot[filled_slots]] = filled_slots % m
    return candidate.reshape(s, n)


def _matching(gain: Array, candidate: Array) -> Matching:
    value = np.where(candidate >= 0, gain[candidate, np.arange(gain.shape[1])], -np.inf)
    return Matching(np.where(np.isneginf(value), -1, candidate), value)


MATCHINGS: dict[str, Callable[[Array], Matching]] = {"nearest": nearest, "greedy": greedy}


@dataclass(frozen=True)
class ScoringData:
    """Candidates, training samples and held-out samples, prepared for comparison.

    Attributes:
        n: Number of training samples.
        original_index: (m,) index of each candidate in the reconstruction. Candidates with infinite or
            undefined values are left out.
        candidates: (m, *shape) candidates.
        samples: (n + N, *shape) training samples, followed by N held-out samples.
        mean: Mean of the training set that was subtracted from all samples, or None.
        strata: (n + N,) labels of the samples, or None. Random subsets have the label counts of the training
            set.
        reason: Why held-out samples cannot be used, or "" if they can.
    """

    n: int
    original_index: Array
    candidates: Tensor
    samples: Tensor
    mean: Tensor | None
    strata: Array | None
    reason: str

    @property
    def holdout_size(self) -> int:
        """The number of held-out samples."""
        return len(self.samples) - self.n

    def gain(self, metric: Metric) -> Array:
        """Return the (m, n + N) similarities of candidates and samples for matching. Higher is better."""
        similarities = as_array(metric.search(self.candidates, self.samples))
        return similarities if metric.higher_is_better else -similarities

    def value(self, metric: Metric, candidate: Array, column: Array) -> Array:
        """Score k pairs of a candidate and a sample, so that higher is better.

        Args:
            metric: The metric to score by.
            candidate: (k,) indices of the candidates.
            column: (k,) indices of the samples.

        Returns:
            (k,) scores. The sign of a metric is changed if its lower values are better.
        """
        a, b = self.displayed_images if metric.needs_images else (self.candidates, self.samples)
        index = torch.from_numpy(np.stack([candidate, column], 1)).to(a.device)
        values = as_array(metric.pairs(a, b, index))
        return values if metric.higher_is_better else -values

    def value_of(self, metric: Metric) -> Callable[[Array, Array], Array] | None:
        """Return the function that scores matches, or None if the similarity for matching is the score."""
        return None if metric.search_is_score else partial(self.value, metric)

    def match_and_score(
        self, metric: Metric, gain: Array, columns: Array, matching: Callable[[Array], Matching]
    ) -> Matching:
        """Match some samples with candidates, and score the matches.

        Args:
            metric: The metric to score by.
            gain: (m, n + N) similarities from :meth:`gain`.
            columns: (k,) indices of the samples to match.
            matching: Function that matches, an entry of ``MATCHINGS``.

        Returns:
            The matches with their scores. Higher is better.
        """
        result = matching(gain[:, columns])
        is_matched = result.candidate >= 0
        result.value[is_matched] = self.value(
            metric, result.candidate[is_matched], columns[is_matched]
        )
        return result

    @cached_property
    def displayed_images(self) -> tuple[Tensor, Tensor]:
        """The candidates and the samples as published figures show them: with the mean, in float32."""
        samples = self.samples if self.mean is None else self.samples + self.mean
        return display(self.candidates, self.mean).float(), samples.float()

    def find_original(self, candidate: int) -> int | None:
        """Return the index of a candidate in the reconstruction, or None if ``candidate`` is -1."""
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
    """Check that candidates, training set and held-out set fit together, and prepare them for matching.

    Training and held-out samples are stored in one tensor, because the permutation test draws from both sets.

    Args:
        candidates: (m, *shape) candidates. Candidates with infinite or undefined values are ignored.
        train: Training set.
        holdout: Held-out set, or None. Samples that are also training samples are ignored.
        notes: List to which a note is appended if candidates or samples are ignored.
        seed: Seed that selects held-out samples if there are too many.
        match_labels: Whether random subsets have the label counts of the training set, if both sets have
            class labels.

    Returns:
        The candidates and samples to compare.
    """
    finite_candidates = _finite(candidates, notes)
    usable_holdout, reason = _control(train, holdout, seed, notes)
    samples = [train.x] if usable_holdout is None else [train.x, usable_holdout.x]
    device = candidates.device
    return ScoringData(
        n=len(train),
        original_index=finite_candidates,
        candidates=_in_shape(candidates, train)[finite_candidates],
        samples=torch.cat([x.to(device, torch.float64) for x in samples]),
        mean=None if train.mean is None else train.mean.to(device, torch.float64),
        strata=_strata(train, usable_holdout, notes)
        if match_labels and usable_holdout is not None
        else None,
        reason=reason,
    )


def why_not_calibrated(n: int, holdout_size: int | None) -> str:
    """Return why a held-out set is too small to estimate the chance level, or "" if it is large enough.

    Args:
        n: Number of training samples.
        holdout_size: Number of usable held-out samples, or None if there is no held-out set.

    Returns:
        The reason, or "" if the held-out set is large enough.
    """
    if holdout_size is None:
        return "the chance level is unknown: no held-out set was given"
    if holdout_size == 0:  # datasets are never empty, so all held-out samples were training samples
        return "the chance level is unknown: all samples of the held-out set are training samples"
    if holdout_size < max(MIN_HOLDOUT, n):
        explanation = ", as many as the training set" if n > MIN_HOLDOUT else ""
        return (
            f"the chance level is unknown: the held-out set needs at least {max(MIN_HOLDOUT, n)} "
            f"samples{explanation}; it has {holdout_size}"
        )
    return ""


def are_class_labels(y: Tensor) -> bool:
    """Return True if the targets of samples are class labels.

    Class labels are whole numbers with few distinct values, one for each sample.
    """
    is_integral = not y.is_floating_point() or bool((y == y.round()).all())
    return y.ndim == 1 and is_integral and len(y.unique()) <= MAX_CLASSES


def _finite(candidates: Tensor, notes: list[str]) -> Array:
    """Return the indices of the candidates without infinite or undefined values."""
    finite_candidates: Array = np.flatnonzero(
        as_array(torch.isfinite(candidates.flatten(1)).all(1))
    )
    if not len(finite_candidates):
        raise InconclusiveError(
            "Scoring needs at least one finite candidate; all "
            f"{len(candidates)} candidates have infinite or undefined values.",
            "If the attack diverged, lower its learning rate.",
        )
    if dropped := len(candidates) - len(finite_candidates):
        notes.append(f"{dropped} candidates are not finite and were ignored")
    return finite_candidates


def _control(
    train: Dataset, holdout: Dataset | None, seed: int, notes: list[str]
) -> tuple[Dataset | None, str]:
    """Return the held-out samples that can be used, and "", or None and the reason.

    Held-out samples that are also training samples are left out. If there are too many, some are drawn.
    """
    if holdout is None:
        return None, why_not_calibrated(len(train), None)
    _check_alike(train, holdout)
    training_bytes = {row.tobytes() for row in as_array(train.x.double())}
    new_samples = [
        i
        for i, row in enumerate(as_array(holdout.x.double()))
        if row.tobytes() not in training_bytes
    ]
    if repeats := len(holdout) - len(new_samples):
        notes.append(f"{repeats} held-out samples are also training samples and were ignored")
    if reason := why_not_calibrated(len(train), len(new_samples)):
        return None, reason
    if len(new_samples) > (limit := max(MAX_HOLDOUT, 4 * len(train))):
        notes.append(f"{limit} of {len(new_samples)} held-out samples are used, drawn at random")
        # This random stream is separate, so that the choice does not depend on other uses of the seed.
        new_samples = (
            np.random.default_rng((seed, 1)).choice(new_samples, limit, replace=False).tolist()
        )
    return holdout.take(torch.as_tensor(new_samples)), ""


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
    """Return the candidates in the shape of the training samples, in float64."""
    if candidates[0].numel() != train.x[0].numel():
        raise DataError(
            f"Candidates must have the training samples' shape {train.shape}; "
            f"got {tuple(candidates.shape[1:])}.",
            "Score the reconstruction against the training data of the attacked network.",
        )
    return candidates.detach().double().reshape(len(candidates), *train.shape)


def _strata(train: Dataset, holdout: Dataset, notes: list[str]) -> Array | None:
    """Return the labels of all samples, so that random subsets can have the label counts of the training set.

    The result is None for regression targets, and if the held-out set has too few samples of a label.
    """
    if not (are_class_labels(train.y) and are_class_labels(holdout.y)):
        return None
    labels, holdout_labels = as_array(train.y), as_array(holdout.y)
    values, counts = np.unique(labels, return_counts=True)
    if any((holdout_labels == value).sum() < k for value, k in zip(values, counts, strict=True)):
        notes.append(
            "the held-out set has too few samples of a label: random subsets are not label-matched"
        )
        return None
    return np.concatenate([labels, holdout_labels])


@dataclass(frozen=True)
class Metric:
    """A number that says how well a candidate reconstructs a sample.

    Attributes:
        name: Key in ``METRICS``.
        higher_is_better: Whether a higher value is a better reconstruction.
        published_threshold: Value beyond which the paper that introduced the metric calls a match good, or
            None.
        score: Function that compares k candidates (k, *shape) with k samples (k, *shape), pair by pair, and
            returns (k,) values.
        search: Function that compares all candidates (m, *shape) with all samples (n, *shape) and returns
            (m, n) values, to match candidates with samples.
        description: A short description for tables.
        published_matching: Key of ``MATCHINGS``, the matching that this paper uses.
        needs_images: Whether ``score`` compares images as displayed (:func:`display`), not flat vectors.
        search_is_score: Whether ``search`` and ``score`` compute the same number.
        window: Side of the SSIM window in pixels, or 0 for other metrics.
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
        """Whether another package defines the metric."""
        function = getattr(
            self.score, "func", self.score
        )  # the function inside a functools.partial
        return not str(function.__module__).startswith("residuum.")

    def why_not(self, shape: tuple[int, ...]) -> str:
        """Return why the metric cannot score samples of this shape, or "" if it can."""
        if not self.needs_images:
            return ""
        if len(shape) not in (2, 3) or min(shape[-2:]) <= self.window // 2:
            min_side = self.window // 2 + 1
            return f"needs images (c, h, w) of at least {min_side} x {min_side}; samples have shape {shape}"
        return "" if find_spec("kornia") else "needs kornia, which is not installed"

    def pairs(self, candidates: Tensor, samples: Tensor, index: Tensor) -> Tensor:
        """Score k pairs of a candidate and a sample, in batches.

        Args:
            candidates: (m, *shape) candidates.
            samples: (n, *shape) samples.
            index: (k, 2) indices of the candidate and the sample of each pair.

        Returns:
            (k,) scores.

        Raises:
            InputError: If the metric cannot score samples of this shape.
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
    """Return candidates as published figures show them: with the mean added, and stretched to [0, 1].

    Args:
        candidates: (m, *shape) candidates.
        mean: Mean of the training set, or None.

    Returns:
        (m, *shape) images. A constant candidate cannot be stretched and is black.
    """
    images = candidates if mean is None else candidates + mean
    flat_images = images.flatten(1)
    low, high = flat_images.amin(1, keepdim=True), flat_images.amax(1, keepdim=True)
    stretched = torch.where(high > low, (flat_images - low) / (high - low), 0.0)
    return stretched.reshape(images.shape)


def published_search(a: Tensor, b: Tensor) -> Tensor:
    """Compute the normalized cross-correlation (NCC) by which the published code matches candidates.

    Color images are first scaled to half their resolution with bicubic interpolation.

    Args:
        a: (m, *shape) candidates.
        b: (n, *shape) samples.

    Returns:
        (m, n) correlations.
    """
    if a.ndim == 4 and a.shape[1] == 3:
        a, b = (interpolate(x, scale_factor=0.5, mode="bicubic") for x in (a, b))
    return similarity.ncc(a, b)


def ssim_score(a: Tensor, b: Tensor, window: int) -> Tensor:
    """Compute SSIM (Wang et al. 2004, eq. 13) of images in [0, 1], pair by pair.

        ((2 mu_a mu_b + C1)(2 s_ab + C2)) / ((mu_a^2 + mu_b^2 + C1)(s_a^2 + s_b^2 + C2))

    averaged over pixels. The local means mu, variances s^2 and the covariance s_ab are taken under a Gaussian
    window of ``window`` x ``window`` pixels with sigma 1.5, and borders are reflected. C1 = 0.01^2, C2 =
    0.03^2.

    Args:
        a: (k, *shape) first images of the pairs.
        b: (k, *shape) second images of the pairs.
        window: Side of the window in pixels.

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
    """Return the PSNR in dB of images with value range 1 and ``size`` pixels at a Euclidean distance."""
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
        description=f"{description}; candidates are matched by NCC and scored as displayed images: the "
        "training mean is added to candidate and sample (which favors the training set), and the candidate "
        "is stretched to [0, 1]",
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
            description="normalized cross-correlation per channel, of images as the network receives them",
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
            description="Euclidean distance of images as the network receives them; "
            "the threshold is for 28x28 digits",
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
