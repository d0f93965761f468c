"""What every other training set of the same patterns and labels keeps of each image.

The class: training sets with the labels of the given candidates, every sample in the activation
pattern of a candidate of its label (one with a multiplier), that give the same sum of gradients, hence
explain the weights as well.

Where the weights pin a group's mass L and moment M (residuum.theory.uniqueness.sums), the samples of
such a set in that group are any measure with this mass and moment on K, the closed cell of
the pattern and the value range. An image x' may carry w = t lam_i exactly when

    x' in K   and   (M - w x') / (L - w) in K,

which for every affine r with r >= 0 on K (a switch, a margin above the least) reads 0 <= r(x') <=
sum_j lam_j r(x_j) / w: splits, exchanges and shifted multipliers are all in it, t = 1/2 with one sample is
the pair x +- a, t -> 0 the whole cell. Where the sums are not pinned, x' in K is all that is known.
With several rivals L and M are totals over them, which is necessary, and enough where multipliers
are proportional.

    determined_at_least   |x'|^2 >= this |x_i|^2 for every such x' that carries t of lam_i: proved
    determined_energy     the least example found, its set written out and its residual measured
    full_...              the same for sets that keep the margins too (full KKT, not only stationary)
    radius_most, pixels   how far x' can be at most: proved, from the value range and the sums alone

Not in the class, and able to beat the bounds: samples with new patterns, canceling pairs of
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
from residuum.theory.patterns import slope_matrix
from residuum.theory.uniqueness.programme import Polytope, few, least
from residuum.theory.uniqueness.sums import Groups, Pinned, across_patterns, pinned

# Least part of a candidate's weight that an image must carry to count as another sample.
SHARE = 0.1
IDLE = 1e-9  # of the largest multiplier: below, a candidate takes no part
# Of a switch's slope times (1 + |x|): nearer to zero, its side is a matter of rounding.
KINK = 1e-10
WIDE = 0.05  # a gap between bound and example that is worth a word
SAME = 1e-9  # of their length: covectors that differ by less are proportional
ENTRIES = {"cpu": 2**21, "cuda": 2**25}  # numbers in the rows of one batch
# What a certificate will cost: speed is that of REPEATS products of SIDE x SIDE matrices; per candidate
# FACTORS steps of the interior-point method (sets with and without margins kept, 13 steps each), and
OVERHEAD = 0.01  # seconds for what is neither product nor factorization
SIDE, REPEATS, FACTORS = 512, 3, 26
Watch = Callable[[int, int], None]
Box = tuple[float | Tensor, float | Tensor]


def uniqueness(
    given: KKTSet,
    *,
    box: Box | None = None,
    share: float = SHARE,
    samples: int | None = None,
    seconds: float = math.inf,
    device: str = "cpu",
    watch: Watch | None = None,
) -> Uniqueness:
    """Certificate of a set of candidates with positive multipliers.

    box: lowest and highest value of a pixel as the network receives it.
    share: least part t of a candidate's multiplier that another image takes over.
    samples: certify the first so many.
    seconds: start no further batch after that time, what is done is kept.
    """
    start = time.monotonic()
    if not 0 < share < 1:
        raise InputError(f"The share t lies between 0 and 1; got {share}.", "Use --share 0.1.")
    if not norm(given.target):
        raise InconclusiveError(
            "A certificate needs a network with weights; all weights are zero.",
            "Check that the file holds the trained weights.",
        )
    used, kept = _active(_on(given, device))
    cells = Cells.of(used, share, box)
    wanted = len(used) if samples is None else min(samples, len(used))
    found: list[dict[str, Tensor]] = []
    batch = max(1, ENTRIES[torch.device(device).type] // max(cells.entries, 1))
    for some in torch.arange(wanted, device=used.x.device).split(batch):
        if found and time.monotonic() - start > seconds:
            break
        if watch is not None:
            watch(int(some[0]), wanted)
        found.append(_certify(cells, some, start + seconds))
    record = _collect(cells, found, kept)
    notes = _notes(given, record, cells, wanted)
    return record.replace(notes=notes, seconds=time.monotonic() - start)


@dataclass(frozen=True)
class Cells:
    """K and the sums of every group, per candidate.

    values: (m, J) of all r >= 0, switches first, margins above the least after them.
    own: (m,) whether an example moves its candidate alone, the group's rivals differing.
    pinned: (m,).
    low, high: (m, d) the box, which holds all candidates of its group.
    beyond: those it had to be widened for.
    given: the candidates as a set.
    groups: those of one pattern and label.
    share: t.
    boxed: whether a value range is known.
    """

    given: KKTSet
    groups: Groups
    sums: Pinned
    pinned: Tensor
    share: float
    switches: int
    values: Tensor
    own: Tensor
    low: Tensor
    high: Tensor
    beyond: int
    boxed: bool

    @classmethod
    def of(cls, given: KKTSet, share: float, box: Box | None) -> Cells:
        """Groups, their sums and their boxes.

        The box of a group is widened to hold its own members: a candidate outside the value range would
        else leave nothing to bound. ``differ`` marks groups whose members have other covectors, where a
        sum over members is no multiple of one gradient.
        """
        groups, flat = Groups.of(given), given.x.flatten(1)
        sums = pinned(given, groups)
        values = [given.switches.values.abs()]
        if given.margins is not None:
            values.append(given.margins - given.margins.min())
        covectors = given.covectors.flatten(1)
        differ = (covectors - covectors[groups.first][groups.index]).norm(dim=1)
        differ = groups.total((differ > SAME * covectors.norm(dim=1)).double()) > 0
        low, high = torch.full_like(flat, -torch.inf), torch.full_like(flat, torch.inf)
        beyond = 0
        if box is not None:
            like: dict[str, Any] = {"dtype": flat.dtype, "device": flat.device}
            ends = [torch.as_tensor(e, **like).expand_as(given.x[0]).flatten() for e in box]
            beyond = int(((flat < ends[0]) | (flat > ends[1])).any(1).sum())
            index, none = groups.index[:, None].expand_as(flat), flat[: len(groups)]
            lowest = none.scatter_reduce(0, index, flat, "amin", include_self=False)
            highest = none.scatter_reduce(0, index, flat, "amax", include_self=False)
            low = torch.minimum(lowest, ends[0])[groups.index]
            high = torch.maximum(highest, ends[1])[groups.index]
        return cls(
            given,
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
        """Numbers in the rows of one candidate."""
        return self.values.shape[1] * self.low.shape[1]

    def rows(self, some: Tensor) -> Tensor:
        """(b, J, d) gradients of all r at some candidates."""
        side = torch.where(self.given.switches.pattern[some], 1.0, -1.0).to(self.values)
        slopes = torch.stack([slope_matrix(self.given.models, x) for x in self.given.x[some]])
        parts = [side[:, :, None] * slopes]
        if self.given.margins is not None:
            parts.append(self.given.margin_slopes[some])
        return torch.cat(parts, 1)

    def polytope(self, some: Tensor, rows: Tensor, free: Tensor, own: Tensor) -> Polytope:
        """Where x' may be, (b) problems side by side: bounds on a = x' - x along rows and pixels.

        free: (b,) nothing but K is known, so that only x' itself is bound.
        own: (b,) sums of the candidate alone, without the other members of its group.
        """
        # As in the head: 0 <= r(x') <= sum_j lam_j r(x_j) / w for every r, and both x' and
        # (M - w x') / (L - w) in the box.
        count, lam = rows.shape[1], self.given.lam[:, None]
        r, x = self.values[some, :count], self.given.x[some].flatten(1)
        g, w = self.groups.index[some], self.share * lam[some]

        def total(values: Tensor) -> Tensor:
            whole = self.groups.total(lam * values)[g]
            return torch.where(own[:, None], lam[some] * values[some], whole)

        # Rows of length one, in a = x' - x: r(x') = r + <row, a>, so -r <= <row, a> <= total / w - r. A
        # switch whose slope is zero says nothing.
        size = rows.norm(dim=2)
        seen = size > 0
        unit = torch.where(seen, size, 1.0)
        high = torch.where(free[:, None], torch.inf, total(self.values[:, :count]) / w)
        # low <= (M - w x') / (L - w) <= high, solved for x'.
        moment, rest = total(self.given.x.flatten(1)), total(torch.ones_like(lam)) - w
        low_x, high_x = self.low[some], self.high[some]
        left = torch.where(free[:, None], low_x, torch.maximum(low_x, (moment - rest * high_x) / w))
        right = torch.where(
            free[:, None], high_x, torch.minimum(high_x, (moment - rest * low_x) / w)
        )
        return Polytope(
            rows / unit[..., None],
            x,
            torch.where(seen, -r / unit, -torch.inf),
            torch.where(seen, (high - r).clamp(min=0) / unit, torch.inf),
            (left - x).clamp(max=0),
            (right - x).clamp(min=0),
        )


def _certify(cells: Cells, some: Tensor, end: float) -> dict[str, Tensor]:
    """Fields of the record for one batch; images flat. end: no moves are searched for after that."""
    rows = cells.rows(some)
    x = cells.given.x[some].flatten(1)
    energy = x.square().sum(1).clamp(min=1e-300)
    free, own = ~cells.pinned[some], cells.own[some]
    nobody = torch.zeros_like(free)

    def solve(count: int) -> tuple[Tensor, Tensor]:
        """Bound and example over the first so many rows; an example is a set that exists."""
        found = least(cells.polytope(some, rows[:, :count], free, nobody))
        apart = (free | own).nonzero()[:, 0]
        if len(apart):
            inner = cells.polytope(some[apart], rows[apart, :count], nobody[apart], own[apart])
            found.example[apart] = least(inner).example
        return found.bound / energy, x + found.example

    (bound, image), wide = solve(cells.switches), cells.polytope(some, rows[:, :0], free, nobody)
    full = solve(rows.shape[1]) if rows.shape[1] > cells.switches else (bound, image)
    change = [_change(cells, int(i), x) for i, x in zip(some, image, strict=True)]
    for k in free.nonzero()[:, 0].tolist():
        left = end - time.monotonic()
        found = across_patterns(cells, int(some[k]), left) if left > 0 else None
        if found is not None and float(found[0].square().sum() - image[k].square().sum()) < 0:
            image[k], change[k] = found
    wide = wide.widened()
    size = rows[:, : cells.switches].norm(dim=2)
    kinks = cells.values[some, : cells.switches] <= KINK * size * (1 + x.norm(dim=1))[:, None]
    return {
        "determined_at_least": bound,
        "determined_energy": image.square().sum(1) / energy,
        "full_at_least": full[0],
        "full_energy": full[1].square().sum(1) / energy,
        "least": image,
        "change": x.new_tensor(change),
        "radius": (image - x).norm(dim=1),
        "radius_most": torch.maximum(-wide.left, wide.right).norm(dim=1),
        "low": x + wide.left,
        "high": x + wide.right,
        "kinks": (kinks & (size > 0)).sum(1),
    }


def _change(cells: Cells, i: int, image: Tensor) -> float:
    """What the sum of gradients changes by, over the target's norm: 0 but for rounding.

    The set: the image with t lam_i, and one more with all the rest of what may be rearranged.
    """
    given = cells.given
    group = cells.groups.members(int(cells.groups.index[i]))
    members = group[group == i] if bool(cells.own[i]) else group
    w, lam = cells.share * given.lam[i], given.lam[members]
    rest = (lam @ given.x[members].flatten(1) - w * image) / (lam.sum() - w)
    images = torch.stack([image, rest]).reshape(2, *given.x.shape[1:])
    weights = torch.stack([w, lam.sum() - w])[:, None, None] * given.covectors[[i, i]]
    points, u = torch.cat([given.x[members], images]), torch.cat([-given.u[members], weights])
    parts = [weighted_gradient(model, points, u[:, p]) for p, model in enumerate(given.models)]
    total = {n: torch.stack([part[n] for part in parts]).sum(0) for n in given.target}
    return norm(total) / norm(given.target)


def _active(given: KKTSet) -> tuple[KKTSet, Tensor]:
    """Candidates that take part, and which those are."""
    part = given.lam > IDLE * given.lam.max() if len(given) else given.lam > 0
    if not bool(part.any()):
        raise InputError(
            "A uniqueness certificate needs candidates with multipliers; none has one.",
            "Check the reconstruction.",
        )
    kept = part.nonzero()[:, 0]
    return dataclasses.replace(given.take(kept), before=None), kept


def _on(given: KKTSet, device: str) -> KKTSet:
    """The set on a device."""
    if torch.device(device) == given.x.device:
        return given
    moved = {name: getattr(given, name).to(device) for name in ("x", "y", "lam", "covectors")}
    models = tuple(copy.deepcopy(model).to(device) for model in given.models)
    target = {name: t.to(device) for name, t in given.target.items()}
    return dataclasses.replace(given, models=models, target=target, before=None, **moved)


def _notes(given: KKTSet, record: Uniqueness, cells: Cells, wanted: int) -> tuple[str, ...]:
    idle = len(given) - len(cells.given)
    far = int((record.determined_energy - record.determined_at_least > WIDE).sum())
    loose = int((~record.pinned).sum())
    kinks = int((record.kinks > 0).sum())
    told = {
        f"{idle} candidates without a multiplier were left out": idle,
        f"time: {len(record)} of {wanted} candidates certified": len(record) < wanted,
        "no value range was given: only switches bound an image": not cells.boxed,
        f"{cells.beyond} candidates leave the value range, which was widened to hold them": cells.beyond,
        f"{loose} candidates: moves across patterns are not excluded, the bound is that of the cell": loose,
        f"{kinks} candidates sit on kinks: the side of a switch there is that of rounding": kinks,
        f"{far} candidates: bound and best example differ by more than {WIDE:g}": far,
    }
    return tuple(text for text, true in told.items() if true)


def _collect(cells: Cells, found: list[dict[str, Tensor]], kept: Tensor) -> Uniqueness:
    """The record, on the CPU."""
    given, groups = cells.given, cells.groups
    fields: dict[str, Any] = {
        name: torch.cat([part[name] for part in found]).cpu() for name in found[0]
    }
    k = len(fields["least"])
    for name in ("least", "low", "high"):
        fields[name] = fields[name].reshape(k, *given.x.shape[1:])
    members = groups.total(torch.ones_like(given.lam))[groups.index].long()
    own = {"labels": given.y, "lam": given.lam, "members": members, "pinned": cells.pinned}
    own |= {"index": kept, "size": given.x.flatten(1).norm(dim=1)}
    fields |= {name: value[:k].cpu() for name, value in own.items()}
    return Uniqueness(
        task=given.task,
        samples=len(given),
        share=cells.share,
        box=cells.boxed,
        margins=given.margins is not None,
        sums=cells.sums.what,
        residual=given.layer_residuals,
        seconds=0.0,
        **fields,
    )


@dataclass(frozen=True)
class Cost:
    """samples, floating point operations of matrix products, seconds, memory in bytes."""

    samples: int
    operations: float
    seconds: float
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.samples} candidates, {self.operations / 1e9:.3g} GFlop, about "
            f"{self.seconds:.2g} s, {self.memory / 2**20:.0f} MiB"
        )


def estimate(
    given: KKTSet, *, box: Box | None = None, samples: int | None = None, device: str = "cpu"
) -> Cost:
    """Cost of certifying ``samples`` of a set, from the sizes and from the speed of this machine.

    Per candidate, with K switches and k pixels that can move, s = K where switches are few and k else: the
    gradients of the deeper switches, then ``FACTORS`` steps, each a product of K s^2 and a factorization of
    s^3; few switches take a basis of K^2 k as well, in each step where pixels have walls and once where not.
    """
    count = len(given) if samples is None else min(samples, len(given))
    d, rows = given.x[0].numel(), given.switches.values.shape[1]
    free = d
    if box is not None:
        low, high = (torch.as_tensor(end).to(given.x).expand_as(given.x) for end in box)
        free = int(((given.x > low) & (given.x < high)).flatten(1).double().sum(1).mean()) + 1
    chains = [chain for model in given.models if (chain := dense_chain(model)) is not None]
    widths = [[layer.out_features for layer in chain.linears[:-1]] for chain in chains]
    deeper = 2.0 * d * sum(a * b for own in widths for a, b in itertools.pairwise(own))
    eliminated = few(rows, free, walled=box is not None)
    side, bases = (rows, 2 if box is None else FACTORS) if eliminated else (free, 0)
    steps = FACTORS * (2.0 * rows * side**2 + side**3) + bases * 4.0 * rows**2 * free
    operations = count * (deeper + steps)
    speed = _speed(device)
    entries = max(ENTRIES[torch.device(device).type], rows * d)
    return Cost(count, operations, operations / speed + OVERHEAD * count, 8 * 5 * entries)


def _speed(device: str) -> float:
    """Operations per second of float64 products, measured in a few milliseconds."""
    a = torch.rand(SIDE, SIDE, dtype=torch.float64, device=device)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        a @ a
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * SIDE**3 / best
