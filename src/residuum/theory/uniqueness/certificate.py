"""How much of each image is kept by every other training set with the same patterns and labels.

We consider training sets that have the labels of the given candidates and give the same sum of gradients,
so that they fit the weights as well. Every sample of such a set lies in the activation pattern of a
candidate with the same label and a positive multiplier.

The weights may pin a group's mass L and moment M (residuum.theory.uniqueness.sums). Then the samples of
such a set in that group are any measure with this mass and moment on K, the closed cell of the pattern
and the value range. An image x' can carry w = t lam_i if and only if

    x' in K   and   (M - w x') / (L - w) in K.

For every affine r with r >= 0 on K (a switch, or a margin above the smallest) this reads
0 <= r(x') <= sum_j lam_j r(x_j) / w. Splits, exchanges and shifted multipliers are all included. With one
sample, t = 1/2 is the pair x +- a, and t -> 0 is the whole cell. If the sums are not pinned, we only know
that x' is in K. With several rival classes, L and M are totals over them. This is necessary, and it is
sufficient if multipliers are proportional.

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
MIN_MULTIPLIER = 1e-9  # relative to the largest multiplier: candidates below it are ignored
# Relative to a switch's slope times (1 + |x|): closer to zero, rounding decides the side.
KINK_TOLERANCE = 1e-10
WIDE_GAP = 0.05  # a larger gap between bound and example gets a note
PROPORTIONAL = 1e-9  # relative length: covectors that differ by less are proportional
ENTRIES = {"cpu": 2**21, "cuda": 2**25}  # numbers in the rows of one batch
# The cost of a certificate is estimated from the measured speed of REPEATS products of SIDE x SIDE
# matrices. Every candidate takes FACTORS steps of the interior-point method: 13 for sets that keep the
# margins and 13 for sets that do not.
SIDE, REPEATS, FACTORS = 512, 3, 26
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
    """Certify how unique a set of candidates with positive multipliers is.

    Args:
        kkt_set: Candidates, multipliers and network.
        box: Lowest and highest value of a pixel as the network receives it.
        share: Smallest part t of a candidate's multiplier that another image takes over.
        samples: Certify only the first so many candidates.
        seconds: Start no further batch after this time. Finished batches are kept.
        device: Device to compute on.
        watch: Called with the number of finished candidates and their total before each batch.

    Returns:
        The certificate of the candidates that were finished.

    Raises:
        InputError: If the share is not between 0 and 1.
        InconclusiveError: If all weights are zero.
    """
    start = time.monotonic()
    if not 0 < share < 1:
        raise InputError(f"The share must lie between 0 and 1; got {share}.", "Pass --share 0.1.")
    if not norm(kkt_set.target):
        raise InconclusiveError(
            "A certificate needs a network with nonzero weights; all weights are zero.",
            "Check that the file contains the trained weights.",
        )
    used, active_index = _select_active(_move_to_device(kkt_set, device))
    cells = Cells.build(used, share, box)
    requested = len(used) if samples is None else min(samples, len(used))
    batches: list[dict[str, Tensor]] = []
    batch = max(1, ENTRIES[torch.device(device).type] // max(cells.entries, 1))
    for indices in torch.arange(requested, device=used.x.device).split(batch):
        if batches and time.monotonic() - start > seconds:
            break
        if watch is not None:
            watch(int(indices[0]), requested)
        batches.append(_certify(cells, indices, start + seconds))
    record = _collect(cells, batches, active_index)
    notes = _notes(kkt_set, record, cells, requested)
    return record.replace(notes=notes, seconds=time.monotonic() - start)


@dataclass(frozen=True)
class Cells:
    """The cell K and the sums of the group of every candidate.

    Attributes:
        kkt_set: The candidates.
        groups: Candidates grouped by pattern and label.
        sums: Which sums of the groups are pinned.
        pinned: (m,) whether the sums of the candidate's group are pinned.
        share: The share t.
        switches: Number of switches, which are the first columns of ``values``.
        values: (m, J) of all r >= 0: switches first, then margins above the smallest.
        moves_alone: (m,) whether an example moves this candidate alone, because the members of its group
            have different rivals.
        low: (m, d) lower end of the box, which contains all candidates of the group.
        high: (m, d) upper end of the box.
        beyond: Number of candidates outside the value range, for which the box was widened.
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
        """Compute groups, their sums and their boxes.

        The box of a group is widened to contain its members. Otherwise a candidate outside the value range
        would leave nothing to bound. ``differ`` marks groups whose members have different covectors. There a
        sum over members is not a multiple of one gradient.

        Args:
            kkt_set: The candidates.
            share: The share t.
            box: Lowest and highest value of a pixel, or None.

        Returns:
            The cells.
        """
        groups, flat = Groups.build(kkt_set), kkt_set.x.flatten(1)
        sums = find_pinned_sums(kkt_set, groups)
        values = [kkt_set.switches.values.abs()]
        if kkt_set.margins is not None:
            values.append(kkt_set.margins - kkt_set.margins.min())
        covectors = kkt_set.covectors.flatten(1)
        differ = (covectors - covectors[groups.first][groups.index]).norm(dim=1)
        differ = groups.total((differ > PROPORTIONAL * covectors.norm(dim=1)).double()) > 0
        low, high = torch.full_like(flat, -torch.inf), torch.full_like(flat, torch.inf)
        beyond = 0
        if box is not None:
            options: dict[str, Any] = {"dtype": flat.dtype, "device": flat.device}
            ends = [
                torch.as_tensor(end, **options).expand_as(kkt_set.x[0]).flatten() for end in box
            ]
            beyond = int(((flat < ends[0]) | (flat > ends[1])).any(1).sum())
            index, template = groups.index[:, None].expand_as(flat), flat[: len(groups)]
            lowest = template.scatter_reduce(0, index, flat, "amin", include_self=False)
            highest = template.scatter_reduce(0, index, flat, "amax", include_self=False)
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
            differ[groups.index],
            low,
            high,
            beyond,
            box is not None,
        )

    @property
    def entries(self) -> int:
        """The number of entries in the rows of one candidate."""
        return self.values.shape[1] * self.low.shape[1]

    def rows(self, indices: Tensor) -> Tensor:
        """Return the (b, J, d) gradients of all r at some candidates."""
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
        """Return where x' may be, as bounds on a = x' - x along rows and pixels.

        Args:
            indices: (b,) candidates, one problem for each.
            rows: (b, J, d) gradients of the constraints.
            free: (b,) the sums are unknown, so that only K bounds x'.
            moves_alone: (b,) use the sums of the candidate alone, without its group.

        Returns:
            The polytopes of all problems.
        """
        # As in the head of this file: 0 <= r(x') <= sum_j lam_j r(x_j) / w for every r, and both x'
        # and (M - w x') / (L - w) lie in the box.
        count, lam = rows.shape[1], self.kkt_set.lam[:, None]
        r, x = self.values[indices, :count], self.kkt_set.x[indices].flatten(1)
        g, w = self.groups.index[indices], self.share * lam[indices]

        def total(values: Tensor) -> Tensor:
            group_total = self.groups.total(lam * values)[g]
            return torch.where(moves_alone[:, None], lam[indices] * values[indices], group_total)

        # Rows of length one, in a = x' - x: r(x') = r + <row, a>, so -r <= <row, a> <= total / w - r.
        # A switch whose slope is zero gives no constraint.
        size = rows.norm(dim=2)
        seen = size > 0
        unit = torch.where(seen, size, 1.0)
        high = torch.where(free[:, None], torch.inf, total(self.values[:, :count]) / w)
        # low <= (M - w x') / (L - w) <= high, solved for x'.
        moment, remaining_weight = total(self.kkt_set.x.flatten(1)), total(torch.ones_like(lam)) - w
        low_x, high_x = self.low[indices], self.high[indices]
        lower = torch.where(
            free[:, None], low_x, torch.maximum(low_x, (moment - remaining_weight * high_x) / w)
        )
        upper = torch.where(
            free[:, None], high_x, torch.minimum(high_x, (moment - remaining_weight * low_x) / w)
        )
        return Polytope(
            rows / unit[..., None],
            x,
            torch.where(seen, -r / unit, -torch.inf),
            torch.where(seen, (high - r).clamp(min=0) / unit, torch.inf),
            (lower - x).clamp(max=0),
            (upper - x).clamp(min=0),
        )


def _certify(cells: Cells, indices: Tensor, end: float) -> dict[str, Tensor]:
    """Return the fields of the record for one batch, with flat images.

    Args:
        cells: The cells of all candidates.
        indices: (b,) candidates.
        end: Time after which no moves across patterns are searched.

    Returns:
        Name and value of every field.
    """
    rows = cells.rows(indices)
    x = cells.kkt_set.x[indices].flatten(1)
    energy = x.square().sum(1).clamp(min=1e-300)
    free, moves_alone = ~cells.pinned[indices], cells.moves_alone[indices]
    none_selected = torch.zeros_like(free)

    def solve(count: int) -> tuple[Tensor, Tensor]:
        """Return bound and example over the first rows. An example is a set that exists."""
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

    bound, image = solve(cells.switches)
    walls = cells.polytope(indices, rows[:, :0], free, none_selected).widened()
    full = solve(rows.shape[1]) if rows.shape[1] > cells.switches else (bound, image)
    change = [_relative_change(cells, int(i), x) for i, x in zip(indices, image, strict=True)]
    for k in free.nonzero()[:, 0].tolist():
        remaining = end - time.monotonic()
        example = across_patterns(cells, int(indices[k]), remaining) if remaining > 0 else None
        if example is not None and float(example[0].square().sum() - image[k].square().sum()) < 0:
            image[k], change[k] = example
    size = rows[:, : cells.switches].norm(dim=2)
    kinks = (
        cells.values[indices, : cells.switches]
        <= KINK_TOLERANCE * size * (1 + x.norm(dim=1))[:, None]
    )
    return {
        "determined_at_least": bound,
        "determined_energy": image.square().sum(1) / energy,
        "full_at_least": full[0],
        "full_energy": full[1].square().sum(1) / energy,
        "least": image,
        "change": x.new_tensor(change),
        "radius": (image - x).norm(dim=1),
        "radius_most": torch.maximum(-walls.lower, walls.upper).norm(dim=1),
        "low": x + walls.lower,
        "high": x + walls.upper,
        "kinks": (kinks & (size > 0)).sum(1),
    }


def _relative_change(cells: Cells, i: int, image: Tensor) -> float:
    """Return the change of the sum of gradients over the target's norm. It is 0 up to rounding.

    The set consists of the image with weight t lam_i, and of one more image with everything else that may be
    rearranged.

    Args:
        cells: The cells of all candidates.
        i: A candidate.
        image: (d,) image in its place.

    Returns:
        The relative change.
    """
    kkt_set = cells.kkt_set
    group = cells.groups.members(int(cells.groups.index[i]))
    members = group[group == i] if bool(cells.moves_alone[i]) else group
    w, lam = cells.share * kkt_set.lam[i], kkt_set.lam[members]
    remainder = (lam @ kkt_set.x[members].flatten(1) - w * image) / (lam.sum() - w)
    images = torch.stack([image, remainder]).reshape(2, *kkt_set.x.shape[1:])
    weights = torch.stack([w, lam.sum() - w])[:, None, None] * kkt_set.covectors[[i, i]]
    points, u = torch.cat([kkt_set.x[members], images]), torch.cat([-kkt_set.u[members], weights])
    terms = [weighted_gradient(model, points, u[:, p]) for p, model in enumerate(kkt_set.models)]
    total = {n: torch.stack([term[n] for term in terms]).sum(0) for n in kkt_set.target}
    return norm(total) / norm(kkt_set.target)


def _select_active(kkt_set: KKTSet) -> tuple[KKTSet, Tensor]:
    """Return the candidates with a multiplier, and their indices."""
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
    idle = len(kkt_set) - len(cells.kkt_set)
    wide_gaps = int((record.determined_energy - record.determined_at_least > WIDE_GAP).sum())
    unpinned = int((~record.pinned).sum())
    kinks = int((record.kinks > 0).sum())
    counts = {
        f"{idle} candidates without a multiplier were ignored": idle,
        f"time budget exhausted: {len(record)} of {requested} candidates certified": len(record)
        < requested,
        "no value range was given: only activation boundaries bound an image": not cells.boxed,
        f"{cells.beyond} candidates are outside the value range, which was widened": cells.beyond,
        f"{unpinned} candidates: moves across patterns are possible, the bound is that of the cell": unpinned,
        f"{kinks} candidates have kinks: rounding decides on which side of a boundary they are": kinks,
        f"{wide_gaps} candidates: bound and best example differ by more than {WIDE_GAP:g}": wide_gaps,
    }
    return tuple(text for text, count in counts.items() if count)


def _collect(cells: Cells, batches: list[dict[str, Tensor]], active_index: Tensor) -> Uniqueness:
    """Return the record, on the CPU."""
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
    """Estimated cost of a certificate.

    Attributes:
        samples: Number of candidates.
        operations: Floating point operations in matrix products.
        seconds: Estimated time.
        memory: Bytes.
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
    """Estimate the cost of a certificate from its sizes and the speed of this machine.

    Let K be the number of switches and k the number of pixels that can move. Let s = K if there are few
    switches, and s = k otherwise. Each candidate needs the gradients of the deeper switches, then
    ``FACTORS`` steps with a product of K s^2 and a factorization of s^3. Few switches also need a basis
    of K^2 k: in every step if pixels have walls, and once otherwise.

    Args:
        kkt_set: The candidates.
        box: Lowest and highest value of a pixel, or None.
        samples: Number of candidates to certify, by default all.
        device: Device to compute on.

    Returns:
        The estimated cost.
    """
    count = len(kkt_set) if samples is None else min(samples, len(kkt_set))
    d, rows = kkt_set.x[0].numel(), kkt_set.switches.values.shape[1]
    free = d
    if box is not None:
        low, high = (torch.as_tensor(end).to(kkt_set.x).expand_as(kkt_set.x) for end in box)
        free = int(((kkt_set.x > low) & (kkt_set.x < high)).flatten(1).double().sum(1).mean()) + 1
    chains = [chain for model in kkt_set.models if (chain := dense_chain(model)) is not None]
    widths = [[layer.out_features for layer in chain.linears[:-1]] for chain in chains]
    deeper = (
        2.0 * d * sum(a * b for layer_widths in widths for a, b in itertools.pairwise(layer_widths))
    )
    eliminated = eliminates_rows(rows, free, walled=box is not None)
    side, bases = (rows, 2 if box is None else FACTORS) if eliminated else (free, 0)
    steps = FACTORS * (2.0 * rows * side**2 + side**3) + bases * 4.0 * rows**2 * free
    operations = count * (deeper + steps)
    speed = _speed(device)
    entries = max(ENTRIES[torch.device(device).type], rows * d)
    return Cost(count, operations, operations / speed + OVERHEAD * count, 8 * 5 * entries)


def _speed(device: str) -> float:
    """Measure float64 products for a few milliseconds, and return the operations per second."""
    a = torch.rand(SIDE, SIDE, dtype=torch.float64, device=device)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        a @ a
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * SIDE**3 / best
