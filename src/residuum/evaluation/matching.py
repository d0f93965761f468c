"""Matching of candidates with samples, and the metrics that score a match.

Candidates, training samples and held-out samples are stored in one :class:`ScoringData`. A gain is the
similarity of a candidate and a sample, with the sign such that higher is better. Gains are matrices (m, n):
candidates are rows, and samples are columns. A gain of -inf marks a pair that may not be matched. A matching
assigns a candidate to every sample. A sample without a candidate has candidate -1 and gain -inf. So its gain
exceeds no threshold.

A metric says how good a reconstruction is, and whether higher values are better. If the paper that introduced
the metric states a threshold, the metric has this threshold. A metric has two functions:

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
# Smallest size of a held-out set. The chance level is the 99th percentile, and estimating the 99th percentile
# takes about a hundred samples.
MIN_HOLDOUT = 100
MAX_CLASSES = 1000  # targets with more distinct values than this are not treated as class labels
# Largest number of held-out samples that are used. More samples would hardly improve the estimate of the
# chance level, and they would take more memory.
MAX_HOLDOUT = 2000
# To limit the memory, sets of samples are matched with the candidates in blocks. The number of sets in a
# block times the number of candidates is at most this number.
MATCHING_CHUNK = 1 << 24
# Largest number of pixels in a batch of image pairs. SSIM filters five maps of the size of the batch, and it
# is fastest if these maps fit into the processor's cache.
PAIRS_CHUNK = 1 << 20
# The PSNR of a perfect copy is infinite, which JSON cannot represent. So it is limited to this many dB.
PSNR_CEILING = 100.0


@dataclass(frozen=True)
class Matching:
    """The result of matching: for each of n samples, the assigned reconstruction (candidate).

    Attributes:
        candidate: (n,) index of each sample's candidate, -1 for a sample without a candidate.
        value: (n,) similarity of each sample and its candidate, -inf for a sample without a candidate. Higher
            is better.
    """

    candidate: Array
    value: Array


def nearest(gain: Array) -> Matching:
    """Match each sample with its most similar reconstruction, which may match several samples."""
    return _matching(gain, gain.argmax(0))


def greedy(gain: Array) -> Matching:
    """Match reconstructions and samples one-to-one, always the best remaining pair first."""
    return _matching(gain, match_greedily_in_sets(gain, np.arange(gain.shape[1])[None])[0])


def match_greedily_in_sets(gain: Array, sets: Array, floor: float = -np.inf) -> Array:
    """Match candidates one-to-one with the samples of each set, best pairs first, for many sets.

    Candidates and samples rank their pairs by the same similarity. In this case greedy matching equals stable
    matching, which the deferred acceptance algorithm (Gale and Shapley) computes. Every unmatched sample
    proposes to the best candidate that has not refused the sample yet, and every candidate keeps its best
    proposal. The algorithm is fast, because all samples of all sets propose at once. If there are fewer
    candidates than samples, the candidates propose instead, because most proposals of samples would be
    refused.

    Args:
        gain: (m, N) similarities of m candidates and N samples. Higher is better.
        sets: (s, n) columns of the samples of each set. The columns in a row differ.
        floor: Pairs with a similarity below this value stay unmatched. This does not change other pairs,
            because the best pairs are matched first.

    Returns:
        (s, n) candidate of each sample in each set, -1 for a sample without a candidate.
    """
    if len(gain) < sets.shape[1]:
        return _match_if_fewer_candidates(gain, sets, floor)
    # In a set of n samples, each sample needs only its n best candidates, because the other n - 1 samples
    # take at most n - 1 of them.
    candidates_per_sample = min(len(gain), sets.shape[1])
    if floor > -np.inf:
        candidates_per_sample = min(
            candidates_per_sample, max(1, int((gain >= floor).sum(0).max()))
        )
    candidate_order, ordered_gains = _preferences(gain, candidates_per_sample)
    ordered_gains[ordered_gains < floor] = -np.inf
    sets_per_block = max(1, MATCHING_CHUNK // len(gain))
    matched_blocks = [
        _match_by_deferred_acceptance(
            candidate_order, ordered_gains, sets[start : start + sets_per_block], len(gain)
        )
        for start in range(0, len(sets), sets_per_block)
    ]
    return np.concatenate(matched_blocks)


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
    best_first = np.argsort(negative_gains_of_best, axis=1, kind="stable")
    return np.take_along_axis(best_candidates, best_first, 1), -np.take_along_axis(
        negative_gains_of_best, best_first, 1
    )


def _match_if_fewer_candidates(gain: Array, sets: Array, floor: float) -> Array:
    """Compute the greedy matching within sets of samples if there are fewer candidates than samples.

    The result is the same as in :func:`match_greedily_in_sets`, but here the candidates propose to samples.
    Each candidate ranks all N samples once, and this ranking is used for all sets. A sample that does not
    belong to a set refuses every proposal.

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
        set_rows = np.arange(len(set_block))[:, None]
        position_in_set = np.full((len(set_block), samples), -1)
        position_in_set[set_rows, set_block] = np.arange(set_block.shape[1])
        proposers = np.broadcast_to(np.arange(m), (len(set_block), m))
        matched_sample = _match_by_deferred_acceptance(
            sample_order, gains, proposers, samples, (position_in_set < 0).ravel()
        )
        set_row, candidate = np.nonzero(matched_sample >= 0)
        candidates[
            start + set_row, position_in_set[set_row, matched_sample[set_row, candidate]]
        ] = candidate
    return candidates


def _match_by_deferred_acceptance(
    order: Array, value: Array, sets: Array, m: int, closed: Array | None = None
) -> Array:
    """Match the samples of each set with candidates by deferred acceptance (Gale and Shapley).

    Every unmatched sample proposes to the best candidate that has not refused the sample yet, and every
    candidate keeps its best proposal. All sets are matched at once. So the samples of all sets are numbered
    together from 0 to s * n - 1, and these numbers are called proposers. Candidate j has the number i * m + j
    in set i.

    Args:
        order: (N, depth) best candidates of every sample, best first.
        value: (N, depth) similarities of every sample and these candidates.
        sets: (s, n) samples of every set.
        m: Number of candidates.
        closed: (s * m,) mask of the candidates that refuse all proposals, in each set, or None if no
            candidate refuses all proposals.

    Returns:
        (s, n) candidate of each sample in each set, -1 for a sample without a candidate.
    """
    s, n = sets.shape
    sample_of_proposer = sets.ravel()
    # Number of proposals that each proposer (sample of a set) has made.
    proposal_counts = np.zeros(s * n, dtype=np.int64)
    accepted_proposer = np.full(s * m, -1)
    best_gain = np.full(s * m, -np.inf) if closed is None else np.where(closed, np.inf, -np.inf)
    proposers = np.arange(s * n)
    while len(proposers := proposers[proposal_counts[proposers] < order.shape[1]]):
        gains = value[sample_of_proposer[proposers], proposal_counts[proposers]]
        # Each sample proposes to its most similar candidate that has not refused it. If the similarity
        # (gain) is -inf, no allowed candidate remains, and the sample stays unmatched.
        proposers, gains = proposers[gains > -np.inf], gains[gains > -np.inf]
        proposed_candidates = (
            proposers // n * m + order[sample_of_proposer[proposers], proposal_counts[proposers]]
        )
        proposal_counts[proposers] += 1
        # Only proposals that are better than the best earlier proposal to the same candidate can be accepted.
        improving_proposals = np.flatnonzero(gains > best_gain[proposed_candidates])
        np.maximum.at(
            best_gain, proposed_candidates[improving_proposals], gains[improving_proposals]
        )
        # Accept the best proposal to each candidate. Several best proposals with equal gains are reduced to
        # one proposal below.
        accepted_proposals = improving_proposals[
            gains[improving_proposals] == best_gain[proposed_candidates[improving_proposals]]
        ]
        displaced_proposers = accepted_proposer[proposed_candidates[accepted_proposals]]
        # If several best proposals have equal gains, this assignment keeps the last proposal.
        accepted_proposer[proposed_candidates[accepted_proposals]] = proposers[accepted_proposals]
        is_kept = (
            accepted_proposer[proposed_candidates[accepted_proposals]]
            == proposers[accepted_proposals]
        )
        accepted_proposals, displaced_proposers = (
            accepted_proposals[is_kept],
            displaced_proposers[is_kept],
        )
        is_refused = np.ones(len(proposers), dtype=bool)
        is_refused[accepted_proposals] = False
        # If two proposals have equal gains, the order of ``proposers`` decides which proposal is accepted. So
        # the displaced proposers are sorted by candidate, to make the result reproducible.
        displaced_proposers = displaced_proposers[
            np.argsort(proposed_candidates[accepted_proposals])
        ]
        proposers = np.concatenate(
            [proposers[is_refused], displaced_proposers[displaced_proposers >= 0]]
        )
    matched_candidate = np.full(s * n, -1)
    taken_candidates = np.flatnonzero(accepted_proposer >= 0)
    matched_candidate[accepted_proposer[taken_candidates]] = taken_candidates % m
    return matched_candidate.reshape(s, n)


def _matching(gain: Array, candidate: Array) -> Matching:
    value = np.where(candidate >= 0, gain[candidate, np.arange(gain.shape[1])], -np.inf)
    return Matching(np.where(np.isneginf(value), -1, candidate), value)


MATCHINGS: dict[str, Callable[[Array], Matching]] = {"nearest": nearest, "greedy": greedy}


@dataclass(frozen=True)
class ScoringData:
    """Reconstructions (candidates), training samples and held-out samples, prepared for comparison.

    Attributes:
        n: Number of training samples.
        original_index: (m,) index of each candidate in the reconstruction. Candidates with infinite or
            undefined values are left out.
        candidates: (m, *shape) candidates.
        samples: (n + N, *shape) training samples, followed by N held-out samples.
        mean: Mean of the training set that was subtracted from all samples, or None.
        strata: (n + N,) labels of the samples, or None. If there are labels, random subsets are drawn with
            the label counts of the training set.
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
        """Score k pairs of a reconstruction and a sample. Higher scores are better.

        Args:
            metric: The metric to score by.
            candidate: (k,) indices of the candidates.
            column: (k,) indices of the samples.

        Returns:
            (k,) scores. If lower values of the metric are better, the scores have the opposite sign.
        """
        candidates, samples = (
            self.displayed_images if metric.needs_images else (self.candidates, self.samples)
        )
        index_pairs = torch.from_numpy(np.stack([candidate, column], 1)).to(candidates.device)
        scores = as_array(metric.pairs(candidates, samples, index_pairs))
        return scores if metric.higher_is_better else -scores

    def value_of(self, metric: Metric) -> Callable[[Array, Array], Array] | None:
        """Return a function that scores pairs of a reconstruction and a sample by ``metric``.

        The result is None if the scores equal the similarities by which pairs are matched.
        """
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
        assigned_candidates = matching(gain[:, columns])
        is_matched = assigned_candidates.candidate >= 0
        assigned_candidates.value[is_matched] = self.value(
            metric, assigned_candidates.candidate[is_matched], columns[is_matched]
        )
        return assigned_candidates

    @cached_property
    def displayed_images(self) -> tuple[Tensor, Tensor]:
        """The reconstructions and the samples as displayed images: with the mean added, in float32."""
        samples = self.samples if self.mean is None else self.samples + self.mean
        return display(self.candidates, self.mean).float(), samples.float()

    def find_original(self, candidate: int) -> int | None:
        """Convert the index of a scored candidate to its index in the reconstruction, None for -1."""
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
    finite_indices = _finite(candidates, notes)
    usable_holdout, reason = _select_usable_holdout(train, holdout, seed, notes)
    sample_tensors = [train.x] if usable_holdout is None else [train.x, usable_holdout.x]
    device = candidates.device
    return ScoringData(
        n=len(train),
        original_index=finite_indices,
        candidates=_reshape_to_samples(candidates, train)[finite_indices],
        samples=torch.cat([x.to(device, torch.float64) for x in sample_tensors]),
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
    # No held-out sample can be used. So all of them must be copies of training samples.
    if holdout_size == 0:
        return "the chance level is unknown: all samples of the held-out set are training samples"
    if holdout_size < max(MIN_HOLDOUT, n):
        comparison_with_training_set = ", as many as the training set" if n > MIN_HOLDOUT else ""
        return (
            f"the chance level is unknown: the held-out set needs at least {max(MIN_HOLDOUT, n)} "
            f"samples{comparison_with_training_set}; it has {holdout_size}"
        )
    return ""


def are_class_labels(y: Tensor) -> bool:
    """Return True if the targets of samples are class labels.

    Class labels are whole numbers with few distinct values, one for each sample.
    """
    is_integral = not y.is_floating_point() or bool((y == y.round()).all())
    return y.ndim == 1 and is_integral and len(y.unique()) <= MAX_CLASSES


def _finite(candidates: Tensor, notes: list[str]) -> Array:
    """Return the indices of the reconstructions that have only finite values."""
    finite_indices: Array = np.flatnonzero(as_array(torch.isfinite(candidates.flatten(1)).all(1)))
    if not len(finite_indices):
        raise InconclusiveError(
            f"Scoring needs at least one reconstructed sample with finite values; all {len(candidates)} "
            f"candidates have infinite or undefined values.",
            "If the attack diverged, lower its learning rate.",
        )
    if dropped := len(candidates) - len(finite_indices):
        notes.append(f"{dropped} candidates are not finite and were ignored")
    return finite_indices


def _select_usable_holdout(
    train: Dataset, holdout: Dataset | None, seed: int, notes: list[str]
) -> tuple[Dataset | None, str]:
    """Return the held-out samples from which the chance level is estimated, and the reason if there are none.

    Held-out samples that are also training samples are left out. If too many held-out samples remain, a
    random selection is returned. If too few remain, None is returned with the reason. Otherwise the reason
    is "".
    """
    if holdout is None:
        return None, why_not_calibrated(len(train), None)
    _check_alike(train, holdout)
    bytes_of_training_samples = {row.tobytes() for row in as_array(train.x.double())}
    nontraining_indices = [
        i
        for i, row in enumerate(as_array(holdout.x.double()))
        if row.tobytes() not in bytes_of_training_samples
    ]
    if repeats := len(holdout) - len(nontraining_indices):
        notes.append(f"{repeats} held-out samples are also training samples and were ignored")
    if reason := why_not_calibrated(len(train), len(nontraining_indices)):
        return None, reason
    if len(nontraining_indices) > (limit := max(MAX_HOLDOUT, 4 * len(train))):
        notes.append(
            f"{limit} of {len(nontraining_indices)} held-out samples are used, drawn at random"
        )
        # This random stream is separate, so that the choice does not depend on other uses of the seed.
        nontraining_indices = (
            np.random.default_rng((seed, 1))
            .choice(nontraining_indices, limit, replace=False)
            .tolist()
        )
    return holdout.take(torch.as_tensor(nontraining_indices)), ""


def _check_alike(train: Dataset, holdout: Dataset) -> None:
    if holdout.shape != train.shape:
        raise DataError(
            f"Held-out samples must have the shape of the training samples, {train.shape}; got "
            f"{holdout.shape}.",
            "Preprocess both sets in the same way.",
        )
    subtracted_means = [
        data.mean.double().cpu() for data in (train, holdout) if data.mean is not None
    ]
    if len(subtracted_means) == 2 and not torch.allclose(
        subtracted_means[0], subtracted_means[1], atol=1e-5
    ):
        raise DataError(
            "Training and held-out samples must be centered by the same mean; their means differ.",
            "Subtract the training mean, which the network was trained with, from both sets.",
        )


def _reshape_to_samples(candidates: Tensor, train: Dataset) -> Tensor:
    """Reshape reconstructions (candidates) to the shape of the training samples, in float64."""
    if candidates[0].numel() != train.x[0].numel():
        raise DataError(
            f"Reconstructed samples must have the shape of the training samples, {train.shape}; got "
            f"{tuple(candidates.shape[1:])}.",
            "Pass the training samples of the network that was attacked.",
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
        published_threshold: Value beyond which a match is good according to the paper that introduced the
            metric, or None if the paper states no threshold.
        score: Function that compares k candidates (k, *shape) with k samples (k, *shape), pair by pair, and
            returns (k,) values.
        search: Function that compares all candidates (m, *shape) with all samples (n, *shape) and returns
            (m, n) values, to match candidates with samples.
        description: A short description for tables.
        published_matching: Key of ``MATCHINGS``. The matching in the paper that introduced the metric.
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
        # If ``score`` is a functools.partial, its attribute ``func`` is the scoring function.
        score_function = getattr(self.score, "func", self.score)
        return not str(score_function.__module__).startswith("residuum.")

    def why_not(self, shape: tuple[int, ...]) -> str:
        """Return why the metric cannot score samples of this shape, or "" if it can."""
        if not self.needs_images:
            return ""
        if len(shape) not in (2, 3) or min(shape[-2:]) <= self.window // 2:
            min_side = self.window // 2 + 1
            return f"needs images (c, h, w) of at least {min_side} x {min_side}; samples have shape {shape}"
        return "" if find_spec("kornia") else "needs kornia, which is not installed"

    def pairs(self, candidates: Tensor, samples: Tensor, index: Tensor) -> Tensor:
        """Score k pairs of a reconstruction and a sample, in batches that fit into memory.

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
            raise InputError(
                f"Each metric in the argument 'metrics' must suit the samples. The metric {self.name!r} "
                f"cannot be used: it {reason}.",
                "Pass metrics=('ncc', 'l2').",
            )
        scores = candidates.new_empty(len(index))
        for rows in similarity.chunks(len(index), 8 * samples[0].numel(), PAIRS_CHUNK):
            i, j = index[rows].unbind(1)
            scores[rows] = self.score(candidates[i], samples[j]).to(scores.dtype)
        return scores


def display(candidates: Tensor, mean: Tensor | None) -> Tensor:
    """Convert reconstructions to displayed images: with the mean added, and stretched to [0, 1].

    Args:
        candidates: (m, *shape) candidates.
        mean: Mean of the training set, or None.

    Returns:
        (m, *shape) images. A constant candidate cannot be stretched and is black.
    """
    images = candidates if mean is None else candidates + mean
    flat_images = images.flatten(1)
    low, high = flat_images.amin(1, keepdim=True), flat_images.amax(1, keepdim=True)
    stretched_images = torch.where(high > low, (flat_images - low) / (high - low), 0.0)
    return stretched_images.reshape(images.shape)


def published_search(a: Tensor, b: Tensor) -> Tensor:
    """Compute the normalized cross-correlation (NCC) by which candidates are matched before SSIM scores them.

    This is the matching in the code of Haim et al. (2022), who published counts of images by SSIM. Color
    images are first scaled to half their resolution with bicubic interpolation.

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
            "The metric SSIM (structural similarity) needs the package kornia, which is not installed.",
            "Run: pip install kornia",
        ) from problem
    a, b = (x[:, None] if x.ndim == 3 else x for x in (a, b))
    values: Tensor = ssim(a.contiguous(), b.contiguous(), window, max_val=1.0).mean((1, 2, 3))
    return values


def _ncc_score(a: Tensor, b: Tensor) -> Tensor:
    return (similarity.standardize(a) * similarity.standardize(b)).sum(1).clamp(-1, 1)


def _l2_score(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).flatten(1).norm(dim=1)


def _decibels(distance: Tensor, size: int) -> Tensor:
    """Convert the Euclidean distance of two images with ``size`` values in [0, 1] to PSNR in dB."""
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
        description=f"{description}. Each reconstruction is paired with the most similar sample by NCC "
        f"(normalized cross-correlation). Before images are compared, the mean of the training images is "
        f"added to both, and the reconstruction is stretched to the value range [0, 1]. Adding the mean "
        f"raises the scores of training samples",
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
            description="normalized cross-correlation of each channel. The images have the form that the "
            "network receives",
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
            description="Euclidean distance between images in the form that the network receives; the "
            "published threshold for a match holds for images of 28x28 pixels",
            published_matching="greedy",
        ),
        Metric(
            name="psnr",
            higher_is_better=True,
            published_threshold=None,
            score=_psnr_score,
            search=_psnr_search,
            description=f"peak signal-to-noise ratio in dB, for images whose value range has the width 1; "
            f"the largest possible value is {PSNR_CEILING:g}",
        ),
    )
}
METRICS = Table("metric", METRICS)
