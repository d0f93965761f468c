"""Compare a release with its base: which rows and layers training changed, and what an adapter adds.

Tensors are matched by name, without the prefixes of wrappers. The difference of two matched tensors is a sum
over training samples. In an embedding table the difference shows which tokens, users or items were in the
training data, because a row receives a gradient only if its token occurs. The optimizer alone determines what
happens to all other rows. A row w0 of the base becomes w:

=======================  ==========================================================================
optimizer                a row that was never seen
=======================  ==========================================================================
SGD, Adam                w = w0
SGD or AdamW, decay      w = c w0, one factor c
Adam with coupled decay  w = f(w0) element by element. The gradient is w times the decay, and Adam turns
                         this gradient into steps of nearly equal length, so that small entries
                         reach zero before large entries. All entries share one odd, increasing curve
=======================  ==========================================================================

The simplest of three rules that fits enough rows is chosen: equal to the last bit, one factor, one curve.

Factor: The factor c is estimated from the rows that are closest to a multiple of their initial values. Decay
rounds at every step, so the rows scatter around the factor. The root mean square deviation of the d entries
of an untouched row varies from row to row by a share of about 1/sqrt(2d).

Curve: The curve is estimated from all entries in the order of |w0|, with one median per ``BIN`` entries and
lines in between. A row is off the curve if a quarter of its entries deviate by more than ``MAX_DEVIATION``
times the scatter of their neighbors. In 16 bits, entries with equal initial values stay equal to the last
bit, and the curve is a lookup table. If training used more bits than the file, their final values differ by
units in the last place.

If no rule fits enough rows, all rows changed. A tied output head gives every row a gradient at every step.
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
MIN_TABLE_ROWS = 100  # rows; a matrix with fewer rows is hardly an embedding table
MAX_VALUES = 400_000_000  # values; larger tensors are not compared
MAX_LISTED = 10  # rows in the text of a finding; the JSON of the finding lists all rows
MIN_SHARE, MIN_ROWS = (
    0.05,
    20,
)  # share and number of rows that a rule must fit; otherwise all rows changed
# Deviation of an entry over the scatter of its neighbors. Only training moves an entry farther.
MAX_DEVIATION = 8.0
MAX_NOISE = 4e-5  # largest relative error of weight decay that rounds to float32 in 10^6 steps
MAX_SPREAD = 3e-4  # largest scatter of untouched rows around a curve, relative to their change
BIN = 64  # entries whose median is one point of the curve
# Units in the last place by which rounding the values before and after training can change one final value.
ROUNDING_UNITS = 2.0
# Smallest number of entries with one initial value whose majority shows the final value of untouched rows.
MIN_EQUAL_STARTS = 8
NOTHING = "You need to do nothing about this finding."
EQUAL, FACTOR, CURVE, NONE = "equal", "one factor", "one curve", "none"


def compare_with_base(release: Release, base: Release) -> list[Finding]:
    """Return what a release and its base reveal together about the training data.

    Args:
        release: The released file.
        base: The file that training started from.

    Returns:
        The findings.

    Raises:
        CheckpointError: If the two files share no layers.
    """
    before = {
        WRAPPER_PREFIX.sub("", name): block for name, block in flatten_blocks(_state(base)).items()
    }
    pairs = find_adapter_pairs(release.content)
    if pairs:
        return list(_find_adapter_change(pairs, release.config, before))
    after = {
        WRAPPER_PREFIX.sub("", name): block
        for name, block in flatten_blocks(_state(release)).items()
    }
    shared = {
        name: (block, before[name])
        for name, block in after.items()
        if name in before and _is_comparable(block, before[name])
    }
    if not shared:
        raise CheckpointError(
            "A base must hold tensors with the same names and shapes as the release; these two files "
            "share no such tensor.",
            "Pass the checkpoint that training started from.",
        )
    return [*_find_touched_rows(shared, after), *_find_change(shared)]


def _state(release: Release) -> dict[str, Any]:
    if release.kind == "onnx":
        return dict(release.content)
    return find_weights(release)


def _is_comparable(block: Block, other: Block) -> bool:
    floats = all(b.kind.startswith(("float", "bfloat")) for b in (block, other))
    return floats and block.shape == other.shape and 0 < block.numel <= MAX_VALUES


def _find_touched_rows(
    shared: Mapping[str, tuple[Block, Block]], after: Mapping[str, Block]
) -> Iterator[Finding]:
    """Find rows of embedding tables that training changed. They show what was in the training data."""
    # A table that is tied to the output head gets a finding of low severity, because all its rows change.
    for name, (block, other) in shared.items():
        if len(block.shape) != 2 or block.shape[0] < MIN_TABLE_ROWS or not TABLES.search(name):
            continue
        table, where = block.tensor(), name[:MAX_PATH_LENGTH]
        if head := _find_tied_head(name, block, table, after):
            reason = (
                f"this table is also {head[:60]}, the output head, which gives every row a gradient at every "
                "step, so nobody can tell which rows were in the training data"
            )
            yield Finding(
                TOUCHED,
                "low",
                f"the table {name[:60]} is tied to the output head",
                where,
                reason,
                NOTHING,
            )
            continue
        touched = find_touched_rows(table, other.tensor())
        rows = touched.rows
        if touched.rule == NONE:
            what = f"every row of {name[:60]} changed"
            yield Finding(TOUCHED, "low", what, where, touched.sentence, NOTHING)
        elif rows:
            first = ", ".join(map(str, rows[:MAX_LISTED]))
            more = ", ..." if len(rows) > MAX_LISTED else ""
            what = f"rows of {name[:60]} that training changed"
            reason = f"{touched.sentence}: tokens, users or items {first}{more} were in the training data"
            remedy = "Freeze the table, or train it with differential privacy."
            yield Finding(TOUCHED, "high", what, where, reason, remedy, count=len(rows), rows=rows)


def _find_tied_head(name: str, block: Block, table: Tensor, after: Mapping[str, Block]) -> str:
    """Return the name of another tensor that equals this table, "" if no tensor does."""
    for other, candidate in after.items():
        if other == name or candidate.shape != block.shape or candidate.kind != block.kind:
            continue
        same_storage = bool(block.name) and candidate.name == block.name
        if same_storage or torch.equal(candidate.tensor(), table):
            return other
    return ""


def _find_change(shared: Mapping[str, tuple[Block, Block]]) -> Iterator[Finding]:
    """Report that the base reveals the weight update, and name the tensors that changed most."""
    changes = {}
    for name, (block, other) in shared.items():
        w, w0 = block.tensor().double(), other.tensor().double()
        if not torch.equal(w, w0):
            changes[name] = float((w - w0).norm() / w0.norm()) if w0.any() else math.inf
    if changes:
        largest = sorted(changes.items(), key=lambda item: -item[1])
        examples = ", ".join(f"{name[:40]} {_changed_by(share)}" for name, share in largest[:3])
        what, where = "the weights before training", largest[0][0][:MAX_PATH_LENGTH]
        reason = (
            f"the base shows that {len(changes)} of {len(shared)} tensors changed, most of all "
            f"{examples}: the change is a sum over training samples"
        )
        remedy = "If the base is public, attack the change before release: "
        remedy += "residuum audit FILE --base BASE."
        yield Finding(START, "high", what, where, reason, remedy, len(changes))


def _find_adapter_change(
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
            "The base of an adapter must have the layers that the adapter changes; this base has none of "
            "these layers.",
            "Pass the base that adapter_config.json names.",
        )
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    examples = ", ".join(f"{name[:40]} {_changed_by(share)}" for name, share in largest[:3])
    what, where = "the change of each layer", largest[0][0][:MAX_PATH_LENGTH]
    reason = f"the adapter and the base give the change of {len(sizes)} layers: {examples}"
    remedy = "Attack the adapter before release: residuum audit BASE --adapter ADAPTER."
    yield Finding(ADAPTER, "high", what, where, reason, remedy, len(sizes))


def _changed_by(share: float) -> str:
    """Return in words how much a tensor changed, relative to its norm before training.

    A share of infinity means that the tensor was zero before training.
    """
    return "from zero" if share == math.inf else f"by {share:.2g} of its norm"


@dataclass(frozen=True, eq=False)
class TouchedRows:
    """Rows of an embedding table that training changed.

    Attributes:
        rows: Indices of the rows that changed.
        rule: The rule that all other rows follow, such as "equal" or "one factor".
        total: Number of rows in the table.
        coarse: Whether the numbers have so few digits that small steps are lost in rounding. Then changed
            rows may be missed.
    """

    rows: tuple[int, ...]
    rule: str
    total: int
    coarse: bool = False

    @property
    def sentence(self) -> str:
        """How many rows changed and what happened to the other rows, in words."""
        if self.rule == NONE:
            return (
                "every row changed, as with a tied output head, so nobody can tell which rows were in the "
                "training data"
            )
        rules = {EQUAL: "equal the base", FACTOR: "are the base times one factor"}
        remaining = rules.get(self.rule, "follow one curve of the base")
        note = "; 16-bit numbers lose small steps in rounding, so rows may be missed" * self.coarse
        return (
            f"{len(self.rows)} of {self.total} rows changed, and the other rows {remaining}{note}"
        )


def find_touched_rows(table: Tensor, base: Tensor) -> TouchedRows:
    """Find the rows of an embedding table that training changed.

    Args:
        table: The trained table (V, d).
        base: The same table before training.

    Returns:
        The changed rows, and the rule that all other rows follow.
    """
    unit = max(torch.finfo(table.dtype).eps, torch.finfo(base.dtype).eps)
    coarse = unit > 1e-4
    w, w0 = table.detach().double(), base.detach().double()
    min_rows = max(MIN_ROWS, MIN_SHARE * len(w))
    rules: list[tuple[str, Callable[[], Tensor | None]]] = [
        (EQUAL, lambda: _is_unequal(table, base)),
        (FACTOR, lambda: None if coarse else _is_off_factor(w, w0, unit)),
        (CURVE, lambda: _is_off_lookup(w, w0) if coarse else _is_off_curve(w, w0)),
        # If training used more bits than the file, final values differ in the last place.
        (CURVE, lambda: _is_off_lookup(w, w0, ROUNDING_UNITS * unit) if coarse else None),
    ]
    for rule, is_off in rules:
        changed = is_off()
        if changed is not None and int((~changed).sum()) >= min_rows:
            return TouchedRows(tuple(changed.nonzero().flatten().tolist()), rule, len(w), coarse)
    return TouchedRows((), NONE, len(w), coarse)


def _is_unequal(table: Tensor, base: Tensor) -> Tensor:
    """Return for each of V rows whether it changed, in the coarser number format of the two tables."""
    coarser = max(table.dtype, base.dtype, key=lambda kind: torch.finfo(kind).eps)
    return (table.to(coarser) != base.to(coarser)).any(1)


def _is_off_factor(w: Tensor, w0: Tensor, unit: float) -> Tensor | None:
    """Return for each of V rows whether it is no multiple c w0; None if no factor c fits enough rows."""
    squares = w0.square().sum(1).clamp(min=1e-300)
    factors = (w * w0).sum(1) / squares
    misfit = (w - factors[:, None] * w0).norm(dim=1) / squares.sqrt()
    nearest = misfit.argsort()[: max(MIN_ROWS, int(MIN_SHARE * len(w)))]
    expected = factors[nearest].median() * w0
    size = torch.maximum(w.abs(), w0.abs()).clamp(min=1e-300)
    deviation = ((w - expected) / size).square().mean(1).sqrt()  # (V,)
    noise = max(float(deviation[nearest].median()), unit)
    if noise > MAX_NOISE:
        return None
    scatter = (2 * w.shape[1]) ** -0.5
    # The nearest rows, from which the noise is estimated, scatter less than all rows.
    return deviation > noise * (1 + 6 * scatter) / max(1 - 2 * scatter, 0.25)


def _is_off_curve(w: Tensor, w0: Tensor) -> Tensor | None:
    """Return for each of V rows whether it is off the curve w = f(w0) of the other rows; None without one."""
    V, d = w.shape
    if V * d < 4 * BIN:
        return None
    sign = torch.where(w0 < 0, -1.0, 1.0).double()
    x, y = (w0 * sign).flatten(), (w * sign).flatten()
    row = torch.arange(V).repeat_interleave(d)
    is_near = torch.ones(V, dtype=torch.bool)
    for _ in range(3):  # Rows that lie far from the curve are left out of the next fit.
        bins = is_near[row].nonzero().flatten()
        bins = bins[x[bins].argsort()]
        bins = bins[: len(bins) // BIN * BIN].reshape(-1, BIN)
        if len(bins) < 2:
            return None
        knots, values = x[bins].mean(1), y[bins].median(1).values
        values = _shift_to_mean(x[bins], values)
        spread = (y[bins] - _interpolate(x[bins], knots, values)).abs().median(1).values
        noise = _interpolate(x, knots, spread).clamp(min=1e-12)
        deviation = ((y - _interpolate(x, knots, values)).abs() / noise).reshape(V, d)
        upper_quartile = deviation.quantile(0.75, dim=1)
        is_near = upper_quartile <= upper_quartile.median()
    change = (y - x).abs().median()
    is_clear = float(noise.median()) <= MAX_SPREAD * float(change)
    return upper_quartile > MAX_DEVIATION if is_clear else None


def _shift_to_mean(x: Tensor, medians: Tensor) -> Tensor:
    """Return the median of each of B bins, moved along the slope to the mean of x in the bin, (B,)."""
    center, median_x = x.mean(1), x.median(1).values
    slope = torch.gradient(medians, spacing=(center,))[0]
    return medians + slope.nan_to_num() * (center - median_x)


def _interpolate(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Interpolate the values at the knots linearly at the positions x, constant beyond the ends."""
    upper = torch.searchsorted(knots, x.contiguous()).clamp(1, len(knots) - 1)
    lower = upper - 1
    share = ((x - knots[lower]) / (knots[upper] - knots[lower]).clamp(min=1e-300)).clamp(0, 1)
    return values[lower] + share * (values[upper] - values[lower])


def _is_off_lookup(w: Tensor, w0: Tensor, slack: float = 0.0) -> Tensor:
    """Find rows with an entry that differs from most entries with the same initial value.

    Args:
        w: The table after training.
        w0: The table before training.
        slack: Relative difference up to which two final values count as equal.

    Returns:
        For each of V rows whether it has such an entry.
    """
    initial_values, initial_index = w0.flatten().unique(return_inverse=True)
    final_values, final_index = w.flatten().unique(return_inverse=True)
    pairs, count = (initial_index * len(final_values) + final_index).unique(return_counts=True)
    # In this order, the last pair of each initial value has the most frequent final value.
    order = count.argsort(stable=True)
    majority_pair = torch.zeros(len(initial_values), dtype=torch.long)
    majority_pair[pairs[order] // len(final_values)] = order
    agreeing_count = count[majority_pair][initial_index]
    entry_count = initial_index.bincount(minlength=len(initial_values))[initial_index]
    has_majority = (entry_count >= MIN_EQUAL_STARTS) & (4 * agreeing_count > entry_count)
    final_value = final_values[pairs[majority_pair] % len(final_values)][initial_index]
    size = torch.maximum(torch.maximum(w.flatten().abs(), final_value.abs()), w0.flatten().abs())
    differs = (w.flatten() - final_value).abs() > slack * size
    return (has_majority & differs).reshape(w.shape).any(1)
