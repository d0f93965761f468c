"""What is compared with what, by which metric, and who is matched with whom given the similarity of all.

Candidates, training samples and the held-out control are laid out once. Gains are (m, n): candidates
in rows, samples in columns, higher is better. Each matching returns, for every sample, a candidate
and its gain; a sample that gets none has candidate -1 and -inf, so that thresholds need no special
case. -inf in the matrix marks a pair that may not be matched.

A metric says how good a reconstruction is, with its direction and published threshold. It does two things:
``search`` compares all candidates with all samples and decides who is matched with whom; ``score`` says how
good a given match is. For NCC, L2 and PSNR they are the same quantity. SSIM costs too much for all pairs, so
it is searched by NCC, as published: at half resolution on color images.
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
MIN_POOL = 100  # held-out samples: one in a hundred of them is the threshold
MOST_CLASSES = 1000  # labels with more values are no classes to balance held-out sets by
MAX_POOL = 2000  # held-out samples used; more sharpen little and cost memory (m x pool)
STATE = 1 << 24  # candidates held in memory over all subsets that are matched at once
# SSIM holds five filtered maps of every pair at a time and runs fastest where these fit the caches.
PAIRS_CHUNK = 1 << 20
PSNR_CEILING = 100.0  # dB; a perfect copy would have infinitely many, which JSON cannot say


@dataclass(frozen=True)
class Matching:
    """candidate: (n,) index of each sample's candidate, -1 for none; value: (n,) of that pair."""

    candidate: Array
    value: Array


def nearest(gain: Array) -> Matching:
    """Each sample's best candidate; one candidate may serve several samples (as published)."""
    return _matching(gain, gain.argmax(0))


def greedy(gain: Array) -> Matching:
    """One-to-one: the best pair of all is matched, then the best of what is left, and so on."""
    return _matching(gain, greedy_in_sets(gain, np.arange(gain.shape[1])[None])[0])


def greedy_in_sets(gain: Array, sets: Array, floor: float = -np.inf) -> Array:
    """The greedy matching within each of many sets of samples. (s, n).

    gain: (m, N), higher is better.
    sets: (s, n) distinct columns per row.
    floor: pairs below it are left unmatched, which changes no pair above it, since the best are
        matched first.

    Greedy matching is the stable matching of a market whose two sides rank pairs by the same number,
    so deferred acceptance finds it: every free sample proposes to the best candidate that has not
    refused it, every candidate keeps its best proposal. All samples of all sets propose at once. Where
    samples outnumber candidates, candidates propose: the many would only be refused, by one after another.
    """
    if len(gain) < sets.shape[1]:
        return _by_candidates(gain, sets, floor)
    depth = min(len(gain), sets.shape[1])  # at most n - 1 candidates can be held by others
    if floor > -np.inf:
        depth = min(depth, max(1, int((gain >= floor).sum(0).max())))
    order, value = _preferences(gain, depth)
    value[value < floor] = -np.inf
    step = max(1, STATE // len(gain))
    parts = [
        _defer(order, value, sets[start : start + step], len(gain))
        for start in range(0, len(sets), step)
    ]
    return np.concatenate(parts)


def as_array(values: Tensor | Array) -> Array:
    """``values`` as a numpy array in main memory."""
    return values.numpy(force=True) if isinstance(values, Tensor) else np.asarray(values)


def _preferences(gain: Array, depth: int) -> tuple[Array, Array]:
    """For every sample its ``depth`` best candidates, best first, and their gains. (N, depth)."""
    worse = np.negative(gain.T, order="C")  # rows that lie together are sorted twice as fast
    top = np.argpartition(worse, depth - 1, axis=1)[:, :depth]
    value = np.take_along_axis(worse, top, axis=1)
    best_first = np.argsort(value, axis=1, kind="stable")
    return np.take_along_axis(top, best_first, 1), -np.take_along_axis(value, best_first, 1)


def _by_candidates(gain: Array, sets: Array, floor: float) -> Array:
    """:func:`greedy_in_sets` with candidates proposing to all samples; those outside the set refuse.

    One order of preferences serves all sets, where samples of a set alone would each need their own.
    """
    m, samples = gain.shape
    order, value = _preferences(gain.T, samples)
    value[value < floor] = -np.inf
    found, step = np.full(sets.shape, -1), max(1, STATE // samples)
    for start in range(0, len(sets), step):
        some = sets[start : start + step]
        row = np.arange(len(some))[:, None]
        place = np.full((len(some), samples), -1)
        place[row, some] = np.arange(some.shape[1])
        everyone = np.broadcast_to(np.arange(m), (len(some), m))
        taken = _defer(order, value, everyone, samples, (place < 0).ravel())
        seat, candidate = np.nonzero(taken >= 0)
        found[start + seat, place[seat, taken[seat, candidate]]] = candidate
    return found


def _defer(order: Array, value: Array, sets: Array, m: int, closed: Array | None = None) -> Array:
    """Deferred acceptance for :func:`greedy_in_sets`. Seats are (set, sample), slots (set, candidate).

    closed: (sets * m,) slots that refuse everyone.
    """
    s, n = sets.shape
    sample = sets.ravel()
    asked = np.zeros(s * n, dtype=np.int64)  # how many candidates each seat has proposed to
    holder = np.full(s * m, -1)
    held = np.full(s * m, -np.inf) if closed is None else np.where(closed, np.inf, -np.inf)
    free = np.arange(s * n)
    while len(free := free[asked[free] < order.shape[1]]):
        gain = value[sample[free], asked[free]]
        free, gain = free[gain > -np.inf], gain[gain > -np.inf]  # those seats stay empty
        slot = free // n * m + order[sample[free], asked[free]]
        asked[free] += 1
        better = np.flatnonzero(gain > held[slot])
        np.maximum.at(held, slot[better], gain[better])
        best = better[gain[better] == held[slot[better]]]  # several for a slot if gains are equal
        displaced = holder[slot[best]]
        holder[slot[best]] = free[best]  # the last of equal ones stays
        stays = holder[slot[best]] == free[best]
        best, displaced = best[stays], displaced[stays]
        refused = np.ones(len(free), dtype=bool)
        refused[best] = False
        displaced = displaced[np.argsort(slot[best])]  # a fixed order decides between equal gains
        free = np.concatenate([free[refused], displaced[displaced >= 0]])
    candidate = np.full(s * n, -1)
    taken = np.flatnonzero(holder >= 0)
    candidate[holder[taken]] = taken % m
    return candidate.reshape(s, n)


def _matching(gain: Array, candidate: Array) -> Matching:
    value = np.where(candidate >= 0, gain[candidate, np.arange(gain.shape[1])], -np.inf)
    return Matching(np.where(np.isneginf(value), -1, candidate), value)


MATCHINGS: dict[str, Callable[[Array], Matching]] = {"nearest": nearest, "greedy": greedy}


@dataclass(frozen=True)
class Field:
    """All that is compared, training samples first: columns 0..n-1, the held-out pool after them.

    kept: (m,) the candidates' indices as the caller knows them.
    strata: (n + N,) labels that subsets are matched by.
    reason: why there is no pool.
    """

    n: int
    kept: Array
    candidates: Tensor  # (m, *shape)
    samples: Tensor  # (n + N, *shape)
    mean: Tensor | None
    strata: Array | None
    reason: str

    @property
    def pool(self) -> int:
        """Held-out samples that serve as control."""
        return len(self.samples) - self.n

    def gain(self, metric: Metric) -> Array:
        """What candidates are matched by, oriented: higher is better. (m, n + N)."""
        gain = as_array(metric.search(self.candidates, self.samples))
        return gain if metric.higher_is_better else -gain

    def value(self, metric: Metric, candidate: Array, column: Array) -> Array:
        """Oriented scores of the given pairs. (k,)."""
        a, b = self.displayed if metric.needs_images else (self.candidates, self.samples)
        index = torch.from_numpy(np.stack([candidate, column], 1)).to(a.device)
        values = as_array(metric.pairs(a, b, index))
        return values if metric.higher_is_better else -values

    def value_of(self, metric: Metric) -> Callable[[Array, Array], Array] | None:
        """What scores matches; None where the gain they were matched by is the score."""
        return None if metric.search_is_score else partial(self.value, metric)

    def scored(
        self, metric: Metric, gain: Array, columns: Array, matching: Callable[[Array], Matching]
    ) -> Matching:
        """Match the given columns and score the matches, oriented."""
        found = matching(gain[:, columns])
        matched = found.candidate >= 0
        found.value[matched] = self.value(metric, found.candidate[matched], columns[matched])
        return found

    @cached_property
    def displayed(self) -> tuple[Tensor, Tensor]:
        """Candidates and samples as the published figures show them; float32 is theirs, and faster."""
        samples = self.samples if self.mean is None else self.samples + self.mean
        return display(self.candidates, self.mean).float(), samples.float()

    def original(self, candidate: int) -> int | None:
        """The caller's index of a candidate; None for -1."""
        return int(self.kept[candidate]) if candidate >= 0 else None


def lay_out(
    candidates: Tensor,
    train: Dataset,
    holdout: Dataset | None,
    notes: list[str],
    *,
    seed: int = 0,
    match_labels: bool = True,
) -> Field:
    """Check the inputs against each other and lay them out; what was left out goes into ``notes``.

    Training and held-out samples stand in one tensor, n of the former first: the permutation test draws
    from both alike. Candidates that are not finite are left out, held-out samples that repeat a
    training sample too; strata are the labels, where both sets have them.
    """
    kept = _finite(candidates, notes)
    pool, reason = _control(train, holdout, seed, notes)
    samples = [train.x] if pool is None else [train.x, pool.x]
    device = candidates.device
    return Field(
        n=len(train),
        kept=kept,
        candidates=_in_shape(candidates, train)[kept],
        samples=torch.cat([part.to(device, torch.float64) for part in samples]),
        mean=None if train.mean is None else train.mean.to(device, torch.float64),
        strata=_strata(train, pool, notes) if match_labels and pool is not None else None,
        reason=reason,
    )


def why_not_calibrated(n: int, pool: int | None) -> str:
    """Why a held-out pool of this size calibrates nothing; "" when it does."""
    if pool is None:
        return "nothing tells what chance gives: no held-out set was given"
    if pool == 0:  # a dataset has samples: none is left when all were trained on
        return (
            "nothing tells what chance gives: all samples of the held-out set are training samples"
        )
    if pool < max(MIN_POOL, n):
        most = n > MIN_POOL
        need = f"as many samples as were trained on ({n})" if most else f"{MIN_POOL} samples"
        return f"nothing tells what chance gives: the held-out set needs at least {need}; it has {pool}"
    return ""


def discrete(y: Tensor) -> bool:
    """Whether targets are class labels: whole numbers, few of them, one per sample."""
    whole = not y.is_floating_point() or bool((y == y.round()).all())
    return y.ndim == 1 and whole and len(y.unique()) <= MOST_CLASSES


def _finite(candidates: Tensor, notes: list[str]) -> Array:
    """Indices of the candidates that can be compared at all."""
    kept: Array = np.flatnonzero(as_array(torch.isfinite(candidates.flatten(1)).all(1)))
    if not len(kept):
        raise InconclusiveError(
            f"Scoring needs at least one finite candidate; none of {len(candidates)} is.",
            "If the attack diverged, lower its learning rate.",
        )
    if dropped := len(candidates) - len(kept):
        notes.append(f"{dropped} candidates are not finite and were left out")
    return kept


def _control(
    train: Dataset, holdout: Dataset | None, seed: int, notes: list[str]
) -> tuple[Dataset | None, str]:
    """The held-out pool fit for use, or None and the reason."""
    if holdout is None:
        return None, why_not_calibrated(len(train), None)
    _check_alike(train, holdout)
    seen = {row.tobytes() for row in as_array(train.x.double())}
    fresh = [i for i, row in enumerate(as_array(holdout.x.double())) if row.tobytes() not in seen]
    if repeats := len(holdout) - len(fresh):
        notes.append(f"{repeats} held-out samples are also training samples and were left out")
    if reason := why_not_calibrated(len(train), len(fresh)):
        return None, reason
    if len(fresh) > (limit := max(MAX_POOL, 4 * len(train))):
        notes.append(f"{limit} of {len(fresh)} held-out samples were drawn for the control")
        # Its own stream: the pool must not depend on what else the seed is used for.
        fresh = np.random.default_rng((seed, 1)).choice(fresh, limit, replace=False).tolist()
    return holdout.take(torch.as_tensor(fresh)), ""


def _check_alike(train: Dataset, holdout: Dataset) -> None:
    if holdout.shape != train.shape:
        raise DataError(
            f"Held-out samples must have the training samples' shape {train.shape}; "
            f"got {holdout.shape}.",
            "Preprocess both alike.",
        )
    means = [data.mean.double().cpu() for data in (train, holdout) if data.mean is not None]
    if len(means) == 2 and not torch.allclose(means[0], means[1], atol=1e-5):
        raise DataError(
            "Training and held-out samples must be centered by the same mean; theirs differ.",
            "Subtract the training mean from both: it is what the network was trained with.",
        )


def _in_shape(candidates: Tensor, train: Dataset) -> Tensor:
    """Candidates in the samples' shape, in float64."""
    if candidates[0].numel() != train.x[0].numel():
        raise DataError(
            f"Candidates must have the training samples' shape {train.shape}; "
            f"got {tuple(candidates.shape[1:])}.",
            "Score the reconstruction against the data its network was trained on.",
        )
    return candidates.detach().double().reshape(len(candidates), *train.shape)


def _strata(train: Dataset, pool: Dataset, notes: list[str]) -> Array | None:
    """Return the labels of all samples, by which subsets are matched.

    None for regression targets, and if the held-out set has too few samples of a label.
    """
    if not (discrete(train.y) and discrete(pool.y)):
        return None
    own, held_out = as_array(train.y), as_array(pool.y)
    values, wanted = np.unique(own, return_counts=True)
    if any((held_out == value).sum() < k for value, k in zip(values, wanted, strict=True)):
        notes.append("the held-out set lacks samples of some label: subsets are not label-matched")
        return None
    return np.concatenate([own, held_out])


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
    """NCC as the published code matches by: color images at bicubic half resolution. (m, n)."""
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
    return (similarity.standardize(a) * similarity.standardize(b)).sum(1).clamp(-1, 1)


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
        "added to both (which by itself favors the training set), candidate stretched to [0, 1]",
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
