"""A release beside its base: which rows and layers training moved, and what an adapter adds to each layer.

Tensors are compared under equal names, prefixes of wrappers left out. Whoever has both files has the
change, which is a sum over training samples; in a table of embeddings it names the tokens, users or items
that were seen: a row gets a gradient only when its token occurs. What happens to the others depends on
the optimizer alone, and to all of them alike:

=======================  ==========================================================================
optimizer                a row never seen
=======================  ==========================================================================
SGD, Adam                w = w0
SGD or AdamW, decay      w = c w0, one factor c
Adam with coupled decay  w = f(w0) element by element: its gradient is w times the decay, and Adam makes
                         of it steps of nearly equal length, so that small entries reach zero before
                         large ones; one odd, increasing curve for all entries
=======================  ==========================================================================

So a table is explained by the simplest of three rules that explains enough rows: equal to the last bit,
one factor, one curve. The factor is read off the rows that are most nearly multiples of their own start;
decay rounds at every step, so that they scatter about it, d entries of a row together within
1/sqrt(2d) of their common size. The curve is read off all entries in the order of |w0|: a median for each
``BIN`` of them, a line between; a row leaves it where a quarter of its entries lie ``BEYOND`` times their
neighbors' scatter away. In 16 bits entries of one start stay equal to the last bit, and the curve is a
list; where training had more bits than the file, ends of one start differ by units in the last place.
Where no rule explains enough rows, all moved: a tied output head gives every row a gradient at every
step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residuum.errors import CheckpointError
from residuum.io.adapters import WRAPPER_PREFIX, compute_update, find_adapter_pairs
from residuum.io.inert import Block
from residuum.io.release import Release
from residuum.io.release_weights import find_weights, flatten_blocks
from residuum.io.tree import MAX_PATH_LENGTH
from residuum.scanning.findings import ADAPTER, START, TOUCHED, Finding

TABLES = re.compile(r"(embed|wte|lookup|token|user|item|entit|vocab)", re.IGNORECASE)
LEAST_TABLE = 100  # rows: a smaller matrix is hardly a table of anything
MOST_VALUES = 400_000_000  # of a tensor that is compared
MOST_SHOWN = 10  # rows in the words of a finding; its JSON has all
LEAST_SHARE, LEAST_ROWS = 0.05, 20  # that a rule must explain: below them all moved
BEYOND = 8.0  # times the scatter of neighbors, which only training moves an entry
MOST_NOISE = 4e-5  # relative, that decay leaves by rounding float32 at each of 10^6 steps
MOST_SPREAD = 3e-4  # of the way that entries went: so far untouched rows may scatter about a curve
BIN = 64  # entries whose median is one point of the curve
LOOSE = 2.0  # units in the last place that rounding start and end apart can make of one end
FEWEST_ALIKE = 8  # entries of one start, of which most show where that start leads
NOTHING = "Nothing to do for this surface."
EQUAL, FACTOR, CURVE, NONE = "equal", "one factor", "one curve", "none"


def compared(release: Release, base: Release) -> list[Finding]:
    """What the two files tell together."""
    before = {
        WRAPPER_PREFIX.sub("", name): block for name, block in flatten_blocks(_state(base)).items()
    }
    pairs = find_adapter_pairs(release.content)
    if pairs:
        return list(_adapter(pairs, release.config, before))
    after = {
        WRAPPER_PREFIX.sub("", name): block
        for name, block in flatten_blocks(_state(release)).items()
    }
    both = {
        name: (block, before[name])
        for name, block in after.items()
        if name in before and _comparable(block, before[name])
    }
    if not both:
        raise CheckpointError(
            "A base holds tensors of the same names and shapes; these two files share none.",
            "Give the checkpoint that training began from.",
        )
    return [*_tables(both, after), *_change(both)]


def _state(release: Release) -> dict[str, Any]:
    if release.kind == "onnx":
        return dict(release.content)
    return find_weights(release)


def _comparable(block: Block, other: Block) -> bool:
    floats = all(b.kind.startswith(("float", "bfloat")) for b in (block, other))
    return floats and block.shape == other.shape and 0 < block.numel <= MOST_VALUES


def _tables(
    both: Mapping[str, tuple[Block, Block]], after: Mapping[str, Block]
) -> Iterator[Finding]:
    """Rows of embeddings that moved against the base, which names what was in the training data.

    Rows that nobody touched follow one rule (equal, shrunk by decay, on one curve); those off it were
    seen. A table tied to the output head moves as a whole: that nothing can be told is a finding too.
    """
    for name, (block, other) in both.items():
        if len(block.shape) != 2 or block.shape[0] < LEAST_TABLE or not TABLES.search(name):
            continue
        table, at = block.tensor(), name[:MAX_PATH_LENGTH]
        if tied := _tied(name, block, table, after):
            why = (
                f"it is also {tied[:60]}, the output head, which gives every row a gradient at every "
                "step: which rows were seen cannot be told"
            )
            yield Finding(TOUCHED, "low", f"the table {name[:60]} is tied", at, why, NOTHING)
            continue
        found = touched_rows(table, other.tensor())
        if found.rule == NONE:
            what = f"every row of {name[:60]} moved"
            yield Finding(TOUCHED, "low", what, at, found.said, NOTHING)
        elif found.rows:
            shown = ", ".join(map(str, found.rows[:MOST_SHOWN]))
            more = ", ..." if len(found.rows) > MOST_SHOWN else ""
            what = f"rows of {name[:60]} that training touched"
            why = f"{found.said}: tokens, users or items {shown}{more} were in the training data"
            remedy = "Freeze the table, or train it with differential privacy."
            rows = found.rows
            yield Finding(TOUCHED, "high", what, at, why, remedy, count=len(rows), rows=rows)


def _tied(name: str, block: Block, table: Tensor, after: Mapping[str, Block]) -> str:
    """The name of another tensor that is this one."""
    for other, candidate in after.items():
        if other == name or candidate.shape != block.shape or candidate.kind != block.kind:
            continue
        shared = bool(block.name) and candidate.name == block.name
        if shared or torch.equal(candidate.tensor(), table):
            return other
    return ""


def _change(both: Mapping[str, tuple[Block, Block]]) -> Iterator[Finding]:
    """That the base makes the change known, with the tensors that moved most."""
    moved = {}
    for name, (block, other) in both.items():
        now, then = block.tensor().double(), other.tensor().double()
        if not torch.equal(now, then):
            moved[name] = float((now - then).norm() / then.norm()) if then.any() else math.inf
    if moved:
        far = sorted(moved.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name[:40]} {_moved_by(share)}" for name, share in far[:3])
        what, at = "the weights before training", far[0][0][:MAX_PATH_LENGTH]
        why = (
            f"with the base, {len(moved)} of {len(both)} tensors are known to have moved, most of all "
            f"{shown}: the change is a sum over training samples"
        )
        remedy = "If the base is public, attack the change before release: "
        remedy += "residuum audit FILE --base BASE."
        yield Finding(START, "high", what, at, why, remedy, len(moved))


def _adapter(
    pairs: Mapping[str, tuple[Block, Block]], config: Mapping[str, Any], before: Mapping[str, Block]
) -> Iterator[Finding]:
    sizes = {}
    for name, (a, b) in pairs.items():
        key = f"{WRAPPER_PREFIX.sub('', name)}.weight"
        base = before.get(key)
        if base is None or len(base.shape) != 2:
            continue
        delta = compute_update(a, b, config)
        if tuple(delta.shape) == base.shape:
            size = base.tensor().double().norm()
            sizes[key] = float(delta.norm() / size) if size > 0 else math.inf
    if not sizes:
        raise CheckpointError(
            "An adapter belongs to a base with its layers; this base has none of them.",
            "Give the base that adapter_config.json names.",
        )
    far = sorted(sizes.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name[:40]} {_moved_by(share)}" for name, share in far[:3])
    what, at = "the change of each layer", far[0][0][:MAX_PATH_LENGTH]
    why = f"with the base the change of {len(sizes)} layers is known: {shown}"
    remedy = "Attack it before release: residuum audit BASE --adapter ADAPTER."
    yield Finding(ADAPTER, "high", what, at, why, remedy, len(sizes))


def _moved_by(share: float) -> str:
    """Return in words how far a tensor moved, relative to its norm before; inf: it was zero."""
    return "from zero" if share == math.inf else f"by {share:.2g} of its norm"


@dataclass(frozen=True, eq=False)
class Touched:
    """rows: numbers of those that moved; rule: what explains the others; of: rows in all.

    coarse: the numbers have so few digits that small steps are rounded away, so that rows may be missed.
    """

    rows: tuple[int, ...]
    rule: str
    of: int
    coarse: bool = False

    @property
    def said(self) -> str:
        """In words."""
        if self.rule == NONE:
            return "every row moved, as under a tied output head: which were seen cannot be told"
        how = {EQUAL: "equal to the base", FACTOR: "the base times one factor"}
        rest = how.get(self.rule, "one curve of the base")
        note = "; 16-bit numbers round small steps away, so that rows may be missed" * self.coarse
        return f"{len(self.rows)} of {self.of} rows moved, the others are {rest}{note}"


def touched_rows(table: Tensor, base: Tensor) -> Touched:
    """Which rows of ``table`` (V, d) training touched that began as ``base``."""
    unit = max(torch.finfo(table.dtype).eps, torch.finfo(base.dtype).eps)
    coarse = unit > 1e-4
    w, w0 = table.detach().double(), base.detach().double()
    least = max(LEAST_ROWS, LEAST_SHARE * len(w))
    rules: list[tuple[str, Callable[[], Tensor | None]]] = [
        (EQUAL, lambda: _unequal(table, base)),
        (FACTOR, lambda: None if coarse else _factor(w, w0, unit)),
        (CURVE, lambda: _list(w, w0) if coarse else _curve(w, w0)),
        (CURVE, lambda: _list(w, w0, LOOSE * unit) if coarse else None),  # trained in more bits
    ]
    for rule, look in rules:
        moved = look()
        if moved is not None and int((~moved).sum()) >= least:
            return Touched(tuple(moved.nonzero().flatten().tolist()), rule, len(w), coarse)
    return Touched((), NONE, len(w), coarse)


def _unequal(table: Tensor, base: Tensor) -> Tensor:
    """(V,) whether a row changed at all, in the coarser of both formats."""
    coarser = max(table.dtype, base.dtype, key=lambda kind: torch.finfo(kind).eps)
    return (table.to(coarser) != base.to(coarser)).any(1)


def _factor(w: Tensor, w0: Tensor, unit: float) -> Tensor | None:
    """(V,) whether a row is no multiple c w0; None where no factor explains any."""
    squares = w0.square().sum(1).clamp(min=1e-300)
    own = (w * w0).sum(1) / squares
    apart = (w - own[:, None] * w0).norm(dim=1) / squares.sqrt()
    nearest = apart.argsort()[: max(LEAST_ROWS, int(LEAST_SHARE * len(w)))]
    expected = own[nearest].median() * w0
    size = torch.maximum(w.abs(), w0.abs()).clamp(min=1e-300)
    far = ((w - expected) / size).square().mean(1).sqrt()  # (V,)
    noise = max(float(far[nearest].median()), unit)
    if noise > MOST_NOISE:
        return None
    scatter = (2 * w.shape[1]) ** -0.5
    return far > noise * (1 + 6 * scatter) / max(1 - 2 * scatter, 0.25)  # the nearest lie below


def _curve(w: Tensor, w0: Tensor) -> Tensor | None:
    """(V,) whether a row leaves the curve w = f(w0) of the others; None where there is no such curve."""
    V, d = w.shape
    if V * d < 4 * BIN:
        return None
    side = torch.where(w0 < 0, -1.0, 1.0).double()
    x, y = (w0 * side).flatten(), (w * side).flatten()
    row = torch.arange(V).repeat_interleave(d)
    kept = torch.ones(V, dtype=torch.bool)
    for _ in range(3):  # rows that lie far from the curve do not bend the next one
        mine = kept[row].nonzero().flatten()
        mine = mine[x[mine].argsort()]
        mine = mine[: len(mine) // BIN * BIN].reshape(-1, BIN)
        if len(mine) < 2:
            return None
        knots, values = x[mine].mean(1), y[mine].median(1).values
        values = _through(x[mine], y[mine], values)
        spread = (y[mine] - _between(x[mine], knots, values)).abs().median(1).values
        noise = _between(x, knots, spread).clamp(min=1e-12)
        far = ((y - _between(x, knots, values)).abs() / noise).reshape(V, d)
        middle = far.quantile(0.75, dim=1)
        kept = middle <= middle.median()
    way = (y - x).abs().median()
    clear = float(noise.median()) <= MOST_SPREAD * float(way)
    return middle > BEYOND if clear else None


def _through(x: Tensor, y: Tensor, middle: Tensor) -> Tensor:
    """(B,) values at the mean of x in each bin: the median, moved along the slope to the next bins."""
    center, median_x = x.mean(1), x.median(1).values
    slope = torch.gradient(middle, spacing=(center,))[0]
    return middle + slope.nan_to_num() * (center - median_x)


def _between(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Values at x on the lines between the knots, constant beyond them."""
    right = torch.searchsorted(knots, x.contiguous()).clamp(1, len(knots) - 1)
    left = right - 1
    share = ((x - knots[left]) / (knots[right] - knots[left]).clamp(min=1e-300)).clamp(0, 1)
    return values[left] + share * (values[right] - values[left])


def _list(w: Tensor, w0: Tensor, slack: float = 0.0) -> Tensor:
    """(V,) whether a row has an entry that went elsewhere than most entries of the same start did.

    slack: relative, within which two ends are one.
    """
    starts, which = w0.flatten().unique(return_inverse=True)
    ends, where = w.flatten().unique(return_inverse=True)
    pairs, count = (which * len(ends) + where).unique(return_counts=True)
    order = count.argsort(stable=True)  # the last of each start is its commonest end
    common = torch.zeros(len(starts), dtype=torch.long)
    common[pairs[order] // len(ends)] = order
    most, alike = count[common][which], which.bincount(minlength=len(starts))[which]
    known = (alike >= FEWEST_ALIKE) & (4 * most > alike)
    end = ends[pairs[common] % len(ends)][which]
    size = torch.maximum(torch.maximum(w.flatten().abs(), end.abs()), w0.flatten().abs())
    away = (w.flatten() - end).abs() > slack * size
    return (known & away).reshape(w.shape).any(1)
