"""How much of each candidate image all training sets have in common that fit the weights equally well.

We consider training sets with the same weighted sum of gradients as the candidates, so that they fit the
weights equally well. Every sample of such a set lies in the activation pattern of a candidate with the same
label and a positive multiplier.

A group has all candidates with the same pattern and label. The weights may determine the group's mass L,
which is its sum of multipliers, and its moment M, the sum of its images times multipliers
(residuum.theory.uniqueness.sums). Let K be the closed cell of the pattern within the value range. Then an
image x' can carry w = t lam_i, a share t of the multiplier of candidate i, if and only if

    x' in K   and   (M - w x') / (L - w) in K.

Every affine function r with r >= 0 on K (an activation boundary, or a margin above the smallest margin) then
obeys 0 <= r(x') <= sum_j lam_j r(x_j) / w. Splits of samples, exchanges between samples and shifted
multipliers are all included. For a group of one sample, t = 1/2 is the pair x +- a, and t -> 0 is the whole
cell. If the weights do not determine L and M, we only know that x' is in K. With several rival classes, L and
M are totals over the rivals. The condition is then necessary, and sufficient if multipliers are proportional.

    determined_at_least   |x'|^2 >= this |x_i|^2 for every such x' that carries t of lam_i: proved
    determined_energy     the smallest example found, for which the set and its residual are computed
    full_...              the same for sets that also keep the margins (full KKT, not only stationary)
    radius_most, pixels   how far x' can be at most: proved from the value range and the sums alone

Some sets are not covered and can beat the bounds: samples with new patterns, and canceling pairs of
opposite labels (docs/uniqueness.md).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residuum.errors import InconclusiveError, InputError
from residuum.networks import dense_chain
from residuum.records import Uniqueness
from residuum.stationarity import norm, weighted_gradient
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.patterns import compute_slope_matrix
from residuum.theory.uniqueness.polytope import Polytope, eliminates_rows, minimize_energy
from residuum.theory.uniqueness.sums import Groups, Pinned, across_patterns, find_pinned_sums

# An image counts as another sample if it carries at least this share of a candidate's multiplier.
SHARE = 0.1
MIN_MULTIPLIER = 1e-9  # candidates with less than this share of the largest multiplier are ignored
# An image counts as exactly on an activation boundary below this share of slope times (1 + |image|).
KINK_TOLERANCE = 1e-10
WIDE_GAP = 0.05  # a note tells how many candidates have a larger gap between bound and best example
PROPORTIONAL = (
    1e-9  # covectors are proportional if they differ by less than this share of their length
)
ENTRIES = {"cpu": 2**21, "cuda": 2**25}  # largest number of entries in the constraints of one batch
SIDE = 512  # number of rows of the square matrices whose product measures the speed of the machine
REPEATS = 3  # number of products that are timed to measure the speed of the machine
# The interior-point method takes about 13 steps per candidate without margins, and 13 with margins.
FACTORS = 26
OVERHEAD = 0.01  # seconds per candidate for everything except products and factorizations
Watch = Callable[[int, int], None]
Box = tuple[float | Tensor, float | Tensor]


def uniqueness(
    kkt_set: KKTSet,
    *,
    box: Box | None = None,
    share: float = SHARE,
    samples: int | None = None,
    seconds: float = math.inf,
    device: str = "cpu",
    watch: Watch | None = None,
) -> Uniqueness:
    """Certify how much of each candidate image all training sets share that fit the weights equally well.

    Args:
        kkt_set: Candidates, multipliers and network. Candidates without a positive multiplier are ignored.
        box: Lowest and highest value of a pixel as the network receives it, or None.
        share: Smallest share of a candidate's multiplier that another image must take over to replace it.
        samples: Number of candidates to certify, from the first one on. By default all candidates.
        seconds: Time limit. No further batch starts after this time, and finished batches are kept.
        device: Device to compute on.
        watch: Called before each batch with the number of finished candidates and their total.

    Returns:
        The certificate of the candidates that were finished.

    Raises:
        InputError: If the share is not between 0 and 1.
        InconclusiveError: If all weights are zero.
    """
    start_time = time.monotonic()
    if not 0 < share < 1:
        raise InputError(
            f"The share of a multiplier must lie between 0 and 1; got {share}.", "Pass --share 0.1."
        )
    if not norm(kkt_set.target):
        raise InconclusiveError(
            "A certificate needs a network with nonzero weights; all weights are zero.",
            "Check that the file contains the trained weights.",
        )
    used, active_index = _select_active(_move_to_device(kkt_set, device))
    cells = Cells.build(used, share, box)
    requested_count = len(used) if samples is None else min(samples, len(used))
    batches: list[dict[str, Tensor]] = []
    batch_size = max(1, ENTRIES[torch.device(device).type] // max(cells.entries, 1))
    for indices in torch.arange(requested_count, device=used.x.device).split(batch_size):
        if batches and time.monotonic() - start_time > seconds:
            break
        if watch is not None:
            watch(int(indices[0]), requested_count)
        batches.append(_certify(cells, indices, start_time + seconds))
    record = _collect(cells, batches, active_index)
    notes = _notes(kkt_set, record, cells, requested_count)
    return record.replace(notes=notes, seconds=time.monotonic() - start_time)


@dataclass(frozen=True)
class Cells:
    """The constraints that an image must meet to replace a candidate, for each of m candidates.

    A group has all candidates with the same activation pattern and label. Its sums are its total multiplier
    and its total of images times multipliers.

    Attributes:
        kkt_set: The candidates.
        groups: Candidates grouped by pattern and label.
        sums: Which sums of the groups are determined by the weights.
        pinned: (m,) whether the weights determine the sums of the candidate's group.
        share: Share of a candidate's multiplier that an image must take over to replace it.
        switches: Number of activation boundaries, which are the first columns of ``values``.
        values: (m, J) values at the candidates of J functions that must stay nonnegative: distances from
            activation boundaries, then margins above the smallest margin.
        moves_alone: (m,) whether an example moves this candidate alone, because the members of its group
            have different rivals.
        low: (m, d) lowest values of the pixels, widened to contain all candidates of the group.
        high: (m, d) highest values of the pixels, widened to contain all candidates of the group.
        beyond: Number of candidates outside the value range, for which the range was widened.
        boxed: Whether a value range is known.
    """

    kkt_set: KKTSet
    groups: Groups
    sums: Pinned
    pinned: Tensor
    share: float
    switches: int
    values: Tensor
    moves_alone: Tensor
    low: Tensor
    high: Tensor
    beyond: int
    boxed: bool

    @classmethod
    def build(cls, kkt_set: KKTSet, share: float, box: Box | None) -> Cells:
        """Group the candidates, and compute the sums and the value range of each group.

        The value range of a group is widened to contain all its members. Otherwise no image could replace a
        candidate outside the range. If the members of a group have different covectors, their weighted sum of
        gradients is not a multiple of one gradient.

        Args:
            kkt_set: The candidates.
            share: Share of a candidate's multiplier that an image must take over to replace it.
            box: Lowest and highest value of a pixel, or None.

        Returns:
            The constraints of all candidates.
        """
        groups, flat = Groups.build(kkt_set), kkt_set.x.flatten(1)
        sums = find_pinned_sums(kkt_set, groups)
        values = [kkt_set.switches.values.abs()]
        if kkt_set.margins is not None:
            values.append(kkt_set.margins - kkt_set.margins.min())
        covectors = kkt_set.covectors.flatten(1)
        has_other_covector = (covectors - covectors[groups.first][groups.index]).norm(dim=1)
        has_other_covector = (
            groups.total((has_other_covector > PROPORTIONAL * covectors.norm(dim=1)).double()) > 0
        )
        low, high = torch.full_like(flat, -torch.inf), torch.full_like(flat, torch.inf)
        outside_count = 0
        if box is not None:
            options: dict[str, Any] = {"dtype": flat.dtype, "device": flat.device}
            ends = [
                torch.as_tensor(end, **options).expand_as(kkt_set.x[0]).flatten() for end in box
            ]
            outside_count = int(((flat < ends[0]) | (flat > ends[1])).any(1).sum())
            index, first_rows = groups.index[:, None].expand_as(flat), flat[: len(groups)]
            lowest = first_rows.scatter_reduce(0, index, flat, "amin", include_self=False)
            highest = first_rows.scatter_reduce(0, index, flat, "amax", include_self=False)
            low = torch.minimum(lowest, ends[0])[groups.index]
            high = torch.maximum(highest, ends[1])[groups.index]
        return cls(
            kkt_set,
            groups,
            sums,
            sums.groups[groups.index],
            share,
            values[0].shape[1],
            torch.cat(values, 1),
            has_other_covector[groups.index],
            low,
            high,
            outside_count,
            box is not None,
        )

    @property
    def entries(self) -> int:
        """The number of entries in the constraint matrix of one candidate."""
        return self.values.shape[1] * self.low.shape[1]

    def rows(self, indices: Tensor) -> Tensor:
        """Return the (b, J, d) gradients, at b candidates, of the J functions that must stay nonnegative."""
        side = torch.where(self.kkt_set.switches.pattern[indices], 1.0, -1.0).to(self.values)
        slopes = torch.stack(
            [compute_slope_matrix(self.kkt_set.models, x) for x in self.kkt_set.x[indices]]
        )
        blocks = [side[:, :, None] * slopes]
        if self.kkt_set.margins is not None:
            blocks.append(self.kkt_set.margin_slopes[indices])
        return torch.cat(blocks, 1)

    def polytope(
        self, indices: Tensor, rows: Tensor, free: Tensor, moves_alone: Tensor
    ) -> Polytope:
        """Return the images that can replace a candidate, as polytopes around the candidates.

        Args:
            indices: (b,) numbers of the candidates.
            rows: (b, J, d) gradients of the functions that must stay nonnegative.
            free: (b,) whether the sums of the candidate's group are unknown, so that only its activation
                pattern and the value range limit an image.
            moves_alone: (b,) whether to use the sums of the candidate alone, without its group.

        Returns:
            A polytope for each candidate, in terms of the difference of image and candidate.
        """
        # For every function r that must stay nonnegative, 0 <= r(x') <= sum_j lam_j r(x_j) / w.
        # The image x' and the rest of the group, (M - w x') / (L - w), lie in the value range.
        count, lam = rows.shape[1], self.kkt_set.lam[:, None]
        r, x = self.values[indices, :count], self.kkt_set.x[indices].flatten(1)
        g, w = self.groups.index[indices], self.share * lam[indices]

        def total(values: Tensor) -> Tensor:
            group_total = self.groups.total(lam * values)[g]
            return torch.where(moves_alone[:, None], lam[indices] * values[indices], group_total)

        # With a = x' - x and rows of length 1, r(x') = r + <row, a>, so -r <= <row, a> <= total / w - r.
        # An activation boundary whose slope is zero gives no constraint.
        slopes = rows.norm(dim=2)
        has_slope = slopes > 0
        unit_lengths = torch.where(has_slope, slopes, 1.0)
        high = torch.where(free[:, None], torch.inf, total(self.values[:, :count]) / w)
        # The inequality low <= (M - w x') / (L - w) <= high is solved for x'.
        moment, remaining_weight = total(self.kkt_set.x.flatten(1)), total(torch.ones_like(lam)) - w
        low_x, high_x = self.low[indices], self.high[indices]
        lower = torch.where(
            free[:, None], low_x, torch.maximum(low_x, (moment - remaining_weight * high_x) / w)
        )
        upper = torch.where(
            free[:, None], high_x, torch.minimum(high_x, (moment - remaining_weight * low_x) / w)
        )
        return Polytope(
            rows / unit_lengths[..., None],
            x,
            torch.where(has_slope, -r / unit_lengths, -torch.inf),
            torch.where(has_slope, (high - r).clamp(min=0) / unit_lengths, torch.inf),
            (lower - x).clamp(max=0),
            (upper - x).clamp(min=0),
        )


def _certify(cells: Cells, indices: Tensor, end: float) -> dict[str, Tensor]:
    """Certify one batch of candidates.

    Args:
        cells: The constraints of all candidates.
        indices: (b,) numbers of the candidates in the batch.
        end: Value of the monotonic clock after which no moves across activation patterns are searched.

    Returns:
        Name and value of every field of the certificate, with flat images.
    """
    rows = cells.rows(indices)
    x = cells.kkt_set.x[indices].flatten(1)
    energy = x.square().sum(1).clamp(min=1e-300)
    free, moves_alone = ~cells.pinned[indices], cells.moves_alone[indices]
    none_selected = torch.zeros_like(free)

    def solve(count: int) -> tuple[Tensor, Tensor]:
        """Return a lower bound of the energy under the first constraints, and the best example image.

        The example belongs to a training set that exists.
        """
        bounds = minimize_energy(cells.polytope(indices, rows[:, :count], free, none_selected))
        special = (free | moves_alone).nonzero()[:, 0]
        if len(special):
            inner = cells.polytope(
                indices[special],
                rows[special, :count],
                none_selected[special],
                moves_alone[special],
            )
            bounds.example[special] = minimize_energy(inner).example
        return bounds.bound / energy, x + bounds.example

    bound, images = solve(cells.switches)
    widest_polytope = cells.polytope(indices, rows[:, :0], free, none_selected).widened()
    full_result = solve(rows.shape[1]) if rows.shape[1] > cells.switches else (bound, images)
    changes = [_relative_change(cells, int(i), x) for i, x in zip(indices, images, strict=True)]
    for k in free.nonzero()[:, 0].tolist():
        remaining = end - time.monotonic()
        example = across_patterns(cells, int(indices[k]), remaining) if remaining > 0 else None
        if example is not None and float(example[0].square().sum() - images[k].square().sum()) < 0:
            images[k], changes[k] = example
    slopes = rows[:, : cells.switches].norm(dim=2)
    is_kink = (
        cells.values[indices, : cells.switches]
        <= KINK_TOLERANCE * slopes * (1 + x.norm(dim=1))[:, None]
    )
    return {
        "determined_at_least": bound,
        "determined_energy": images.square().sum(1) / energy,
        "full_at_least": full_result[0],
        "full_energy": full_result[1].square().sum(1) / energy,
        "least": images,
        "change": x.new_tensor(changes),
        "radius": (images - x).norm(dim=1),
        "radius_most": torch.maximum(-widest_polytope.lower, widest_polytope.upper).norm(dim=1),
        "low": x + widest_polytope.lower,
        "high": x + widest_polytope.upper,
        "kinks": (is_kink & (slopes > 0)).sum(1),
    }


def _relative_change(cells: Cells, i: int, image: Tensor) -> float:
    """Return how much the sum of gradients changes if an image replaces a candidate. It is 0 up to rounding.

    The image takes over a share of the candidate's multiplier. A second image takes over everything else of
    the candidate's group.

    Args:
        cells: The constraints of all candidates.
        i: Number of the candidate.
        image: (d,) image that replaces the candidate.

    Returns:
        The norm of the change over the norm of the target, i.e. of the vector that the sum must equal.
    """
    kkt_set = cells.kkt_set
    group = cells.groups.members(int(cells.groups.index[i]))
    members = group[group == i] if bool(cells.moves_alone[i]) else group
    w, lam = cells.share * kkt_set.lam[i], kkt_set.lam[members]
    remainder = (lam @ kkt_set.x[members].flatten(1) - w * image) / (lam.sum() - w)
    images = torch.stack([image, remainder]).reshape(2, *kkt_set.x.shape[1:])
    weights = torch.stack([w, lam.sum() - w])[:, None, None] * kkt_set.covectors[[i, i]]
    samples, u = torch.cat([kkt_set.x[members], images]), torch.cat([-kkt_set.u[members], weights])
    terms = [weighted_gradient(model, samples, u[:, p]) for p, model in enumerate(kkt_set.models)]
    sum_change = {n: torch.stack([term[n] for term in terms]).sum(0) for n in kkt_set.target}
    return norm(sum_change) / norm(kkt_set.target)


def _select_active(kkt_set: KKTSet) -> tuple[KKTSet, Tensor]:
    """Return the set of candidates with a positive multiplier, and their numbers in the given set."""
    is_active = (
        kkt_set.lam > MIN_MULTIPLIER * kkt_set.lam.max() if len(kkt_set) else kkt_set.lam > 0
    )
    if not bool(is_active.any()):
        raise InputError(
            "A uniqueness certificate needs candidates with positive multipliers; got none.",
            "Check the reconstruction.",
        )
    active_index = is_active.nonzero()[:, 0]
    return dataclasses.replace(kkt_set.take(active_index), parent=None), active_index


def _move_to_device(kkt_set: KKTSet, device: str) -> KKTSet:
    if torch.device(device) == kkt_set.x.device:
        return kkt_set
    moved = {name: getattr(kkt_set, name).to(device) for name in ("x", "y", "lam", "covectors")}
    models = tuple(copy.deepcopy(model).to(device) for model in kkt_set.models)
    target = {name: t.to(device) for name, t in kkt_set.target.items()}
    return dataclasses.replace(kkt_set, models=models, target=target, parent=None, **moved)


def _notes(kkt_set: KKTSet, record: Uniqueness, cells: Cells, requested: int) -> tuple[str, ...]:
    ignored_count = len(kkt_set) - len(cells.kkt_set)
    wide_gap_count = int((record.determined_energy - record.determined_at_least > WIDE_GAP).sum())
    unpinned_count = int((~record.pinned).sum())
    kink_count = int((record.kinks > 0).sum())
    counts = {
        f"{ignored_count} candidates without a positive multiplier were ignored": ignored_count,
        f"time budget exhausted: {len(record)} of {requested} candidates certified": len(record)
        < requested,
        "no value range was given: only activation boundaries bound an image": not cells.boxed,
        f"{cells.beyond} candidates are outside the value range, which was widened": cells.beyond,
        f"{unpinned_count} candidates may exchange parts with other activation patterns: the bound only uses "
        "pattern and value range": unpinned_count,
        f"{kink_count} candidates lie on an activation boundary: rounding decides on which side": kink_count,
        f"the bound and the best example of {wide_gap_count} candidates differ by more than "
        f"{WIDE_GAP:g}": wide_gap_count,
    }
    return tuple(text for text, count in counts.items() if count)


def _collect(cells: Cells, batches: list[dict[str, Tensor]], active_index: Tensor) -> Uniqueness:
    """Join the results of all batches into a certificate on the CPU."""
    kkt_set, groups = cells.kkt_set, cells.groups
    fields: dict[str, Any] = {
        name: torch.cat([batch[name] for batch in batches]).cpu() for name in batches[0]
    }
    k = len(fields["least"])
    for name in ("least", "low", "high"):
        fields[name] = fields[name].reshape(k, *kkt_set.x.shape[1:])
    members = groups.total(torch.ones_like(kkt_set.lam))[groups.index].long()
    columns = {"labels": kkt_set.y, "lam": kkt_set.lam, "members": members, "pinned": cells.pinned}
    columns |= {"index": active_index, "size": kkt_set.x.flatten(1).norm(dim=1)}
    fields |= {name: value[:k].cpu() for name, value in columns.items()}
    return Uniqueness(
        task=kkt_set.task,
        samples=len(kkt_set),
        share=cells.share,
        box=cells.boxed,
        margins=kkt_set.margins is not None,
        sums=cells.sums.what,
        residual=kkt_set.layer_residuals,
        seconds=0.0,
        **fields,
    )


@dataclass(frozen=True)
class Cost:
    """Estimated cost of a uniqueness certificate.

    Attributes:
        samples: Number of candidates to certify.
        operations: Number of floating point operations in matrix products.
        seconds: Estimated time in seconds.
        memory: Estimated memory in bytes.
    """

    samples: int
    operations: float
    seconds: float
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.samples} candidates, {self.operations / 1e9:.3g} GFlop, about "
            f"{self.seconds:.2g} s, {self.memory / 2**20:.0f} MiB"
        )


def estimate_cost(
    kkt_set: KKTSet, *, box: Box | None = None, samples: int | None = None, device: str = "cpu"
) -> Cost:
    """Estimate the cost of a uniqueness certificate from the size of its problems and the machine's speed.

    Let K be the number of activation boundaries and k the number of pixels that can change. Let s = K if
    there are few boundaries, and s = k otherwise. Each candidate needs the gradients of the boundaries, then
    ``FACTORS`` steps with a product of K s^2 operations and a factorization of s^3 operations. If there are
    few boundaries, a basis of K^2 k operations is also needed: in every step if a value range limits the
    pixels, and once otherwise.

    Args:
        kkt_set: The candidates.
        box: Lowest and highest value of a pixel, or None.
        samples: Number of candidates to certify, by default all.
        device: Device to compute on.

    Returns:
        The estimated cost.
    """
    candidate_count = len(kkt_set) if samples is None else min(samples, len(kkt_set))
    d, rows = kkt_set.x[0].numel(), kkt_set.switches.values.shape[1]
    movable_pixels = d
    if box is not None:
        low, high = (torch.as_tensor(end).to(kkt_set.x).expand_as(kkt_set.x) for end in box)
        movable_pixels = (
            int(((kkt_set.x > low) & (kkt_set.x < high)).flatten(1).double().sum(1).mean()) + 1
        )
    chains = [chain for model in kkt_set.models if (chain := dense_chain(model)) is not None]
    widths = [[layer.out_features for layer in chain.linears[:-1]] for chain in chains]
    gradient_operations = (
        2.0 * d * sum(a * b for layer_widths in widths for a, b in itertools.pairwise(layer_widths))
    )
    eliminated = eliminates_rows(rows, movable_pixels, walled=box is not None)
    side, bases = (rows, 2 if box is None else FACTORS) if eliminated else (movable_pixels, 0)
    step_operations = (
        FACTORS * (2.0 * rows * side**2 + side**3) + bases * 4.0 * rows**2 * movable_pixels
    )
    operations = candidate_count * (gradient_operations + step_operations)
    speed = _speed(device)
    entries = max(ENTRIES[torch.device(device).type], rows * d)
    return Cost(
        candidate_count,
        operations,
        operations / speed + OVERHEAD * candidate_count,
        8 * 5 * entries,
    )


def _speed(device: str) -> float:
    """Time float64 matrix products for a few milliseconds, and return the operations per second."""
    a = torch.rand(SIDE, SIDE, dtype=torch.float64, device=device)
    least_seconds = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        a @ a
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        least_seconds = min(least_seconds, time.perf_counter() - start)
    return 2 * SIDE**3 / least_seconds
