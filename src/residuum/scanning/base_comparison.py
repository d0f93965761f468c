"""Compare a release with its base: which rows and layers training changed, and what an adapter adds.

Tensors are matched by name, without the prefixes of wrappers. The difference of two matched tensors is a sum
over training samples. In an embedding table (one row for each token, user or item), the difference shows
which rows occurred in the training data, because only these rows receive a gradient. The optimizer alone
determines what happens to all other rows. A row w0 of the base becomes w:

=======================  ==========================================================================
optimizer                a row that was never seen
=======================  ==========================================================================
SGD, Adam                w = w0
SGD or AdamW, decay      w = c w0, one factor c
Adam with coupled decay  w = f(w0) element by element. The gradient is w times the decay, and Adam turns
                         this gradient into steps of nearly equal length, so that small entries
                         reach zero before large entries. All entries share one odd, increasing curve
=======================  ==========================================================================

We choose the first of three rules that fits enough rows: equal to the last bit, one factor, one curve.

Factor: The factor c is estimated from the rows that are closest to a multiple of their initial values. Weight
decay is rounded at every step, so the rows scatter around the factor. The root mean square deviation of the
d entries of an untouched row varies from row to row by a share of about 1/sqrt(2d).

Curve: The curve is estimated from all entries in the order of |w0|, with one median per ``BIN`` entries and
lines in between. A row is off the curve if a quarter of its entries deviate by more than ``MAX_DEVIATION``
times the scatter of their neighbors. In 16 bits, entries with equal initial values stay equal to the last
bit, and the curve is a lookup table. If training used more bits than the file, their final values differ by
units in the last place.

If no rule fits enough rows, all rows changed. One reason is an output head that is tied to the table (the
same tensor). Such a head gives every row a gradient at every step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residuum.errors import CheckpointError, ResiduumError
from residuum.io.adapters import WRAPPER_PREFIX, compute_update, find_adapter_pairs
from residuum.io.inert import Block
from residuum.io.release import Release
from residuum.io.release_weights import find_weights, flatten_blocks
from residuum.io.tree import MAX_PATH_LENGTH
from residuum.io.vocabularies import Vocabulary
from residuum.networks import recognize
from residuum.scanning.finding import (
    ADAPTER,
    START,
    TOUCHED,
    Finding,
    list_examples,
    printable,
)

# Names of embedding tables whose rows are positions or sentence types, and not tokens.
POSITIONS = re.compile(r"(position|pos_emb|\bwpe\b|token_type)", re.IGNORECASE)
TABLES = re.compile(r"(embed|wte|lookup|token|user|item|entit|vocab)", re.IGNORECASE)
MIN_TABLE_ROWS = 100  # smallest number of rows of a matrix that we treat as an embedding table
MAX_VALUES = 400_000_000  # largest number of values of a tensor that is compared with the base
MAX_LISTED = 10  # largest number of rows in the text of a finding (its JSON lists all rows)
# Smallest fraction and smallest number of the rows of a table that a rule must fit. If no rule fits so many
# rows, we report that all rows changed.
MIN_SHARE, MIN_ROWS = 0.05, 20
# Largest deviation of an entry from the curve f in w = f(w0) if training did not touch its row, relative to
# the typical deviation of entries with similar initial values.
MAX_DEVIATION = 8.0
# Largest relative rounding error of a row that was never in the training data, after 10^6 steps of weight
# decay in float32.
MAX_NOISE = 4e-5
# Largest median deviation of entries from the curve f in w = f(w0), relative to the median change of entries.
# If the deviation is larger, no curve fits the table.
MAX_SPREAD = 3e-4
CHUNK = 1 << 19  # number of entries that are converted to float64 at once
BIN = 64  # number of entries with similar initial values whose median gives one point of the curve
# Largest change of a final value by the rounding of the initial and final values in the files, in units in
# the last place.
ROUNDING_UNITS = 2.0
# We compare the final values of entries with the same initial value only if there are at least this many
# entries.
MIN_EQUAL_STARTS = 8
PROTECT_CHANGE = (
    "residuum audit cannot attack this kind of network from its weights alone. If the base is public, train "
    "with differential privacy, or round the weights."
)
NOTHING = "You need to do nothing about this finding."
EQUAL, FACTOR, CURVE, NONE = "equal", "one factor", "one curve", "none"


def compare_with_base(
    release: Release, base: Release, vocabulary: Vocabulary | None = None
) -> list[Finding]:
    """Return what a model and its base (weights before training) reveal together about the training data.

    The change of the weights is a finding of medium severity. Everybody who has the base knows the change, so
    it is what an attacker knows, and no evidence that the release reveals records. Rows of an embedding that
    changed are such evidence.

    Args:
        release: The released file.
        base: The file that training started from.
        vocabulary: The tokens of the rows of an embedding, if a tokenizer is known.

    Returns:
        The findings.

    Raises:
        CheckpointError: If the two files share no layers.
    """
    base_blocks = {
        WRAPPER_PREFIX.sub("", name): block for name, block in flatten_blocks(_state(base)).items()
    }
    adapter_pairs = find_adapter_pairs(release.content)
    if adapter_pairs:
        return list(_find_adapter_change(adapter_pairs, release.config, base_blocks))
    release_blocks = {
        WRAPPER_PREFIX.sub("", name): block
        for name, block in flatten_blocks(_state(release)).items()
    }
    shared_blocks = {
        name: (block, base_blocks[name])
        for name, block in release_blocks.items()
        if name in base_blocks and _is_comparable(block, base_blocks[name])
    }
    if not shared_blocks:
        raise CheckpointError(
            "The base (the weights before training) must have tensors with the same names and shapes as "
            "the scanned model; the two files have no such tensor in common.",
            "Pass the checkpoint from which the training started.",
        )
    touched_rows = _find_touched_rows(shared_blocks, release_blocks, vocabulary)
    is_auditable = release.kind != "onnx" and _is_auditable(release_blocks)
    return [*touched_rows, *_find_change(shared_blocks, is_auditable=is_auditable)]


def _state(release: Release) -> dict[str, Any]:
    if release.kind == "onnx":
        return dict(release.content)
    return find_weights(release)


def _is_comparable(block: Block, other: Block) -> bool:
    are_floats = all(tensor.kind.startswith(("float", "bfloat")) for tensor in (block, other))
    return are_floats and block.shape == other.shape and 0 < block.numel <= MAX_VALUES


def _find_touched_rows(
    shared: Mapping[str, tuple[Block, Block]],
    after: Mapping[str, Block],
    vocabulary: Vocabulary | None,
) -> Iterator[Finding]:
    """Find rows of embedding tables that training changed. Such rows show what was in the training data."""
    # If an embedding table is also the output head, every row changes in training. Such a table gets a
    # finding of low severity.
    for name, (block, other) in shared.items():
        if len(block.shape) != 2 or block.shape[0] < MIN_TABLE_ROWS or not TABLES.search(name):
            continue
        table, where = block.tensor(), name[:MAX_PATH_LENGTH]
        if tied_head := _find_tied_head(name, block, table, after):
            reason = (
                f"this table is also {tied_head[:60]}, the output head, which gives every row a gradient at "
                "every step, so nobody can tell which rows were in the training data"
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
        touched_rows = find_touched_rows(table, other.tensor())
        rows = touched_rows.rows
        if touched_rows.rule == NONE:
            finding_title = f"every row of {name[:60]} changed"
            yield Finding(TOUCHED, "low", finding_title, where, touched_rows.sentence, NOTHING)
        elif rows:
            is_named = vocabulary is not None and vocabulary.fits(len(table))
            is_named = is_named and not POSITIONS.search(name)
            words = vocabulary.words(rows) if vocabulary is not None and is_named else ()
            row_examples = words or tuple(map(str, rows))
            examples = list_examples(row_examples, MAX_LISTED)
            finding_title = f"rows of {name[:60]} that training changed"
            reason = f"{touched_rows.sentence}: tokens, users or items {examples} were in the training data"
            if words:
                reason = f"{touched_rows.sentence}. Words seen in training: {examples}"
            remedy = "Freeze the table, or train it with differential privacy."
            yield Finding(
                *(TOUCHED, "high", finding_title, where, printable(reason), remedy),
                count=len(rows),
                rows=rows,
                words=tuple(map(printable, words)),
            )


def _find_tied_head(name: str, block: Block, table: Tensor, after: Mapping[str, Block]) -> str:
    """Return the name of another tensor that equals this embedding table, or "" if there is none."""
    for other, candidate in after.items():
        if other == name or candidate.shape != block.shape or candidate.kind != block.kind:
            continue
        same_storage = bool(block.name) and candidate.name == block.name
        if same_storage or torch.equal(candidate.tensor(), table):
            return other
    return ""


def _find_change(
    shared: Mapping[str, tuple[Block, Block]], *, is_auditable: bool
) -> Iterator[Finding]:
    """Yield a finding that names the tensors that training changed most."""
    relative_changes = {}
    for name, (block, other) in shared.items():
        if (relative_change := _measure_change(block.tensor(), other.tensor())) > 0:
            relative_changes[name] = relative_change
    if relative_changes:
        largest_first = sorted(relative_changes.items(), key=lambda item: -item[1])
        examples = ", ".join(
            f"{name[:40]} {_describe_change(change)}" for name, change in largest_first[:3]
        )
        what, where = "the weights before training", largest_first[0][0][:MAX_PATH_LENGTH]
        reason = (
            f"the base shows that {len(relative_changes)} of {len(shared)} tensors changed, most of all "
            f"{examples}: the change is a sum over training samples"
        )
        remedy = "If the base is public, attack the change before release: "
        remedy += "residuum audit FILE --base BASE."
        if not is_auditable:
            remedy = PROTECT_CHANGE
        yield Finding(START, "medium", what, where, reason, remedy, len(relative_changes))


def _measure_change(w: Tensor, w0: Tensor) -> float:
    """Return the norm of w - w0 relative to the norm of w0, in float64. Infinite if w0 is zero."""
    if w.dtype == w0.dtype and torch.equal(w, w0):
        return 0.0
    # Convert the entries to float64 in chunks, because a table of words can have a gigabyte.
    chunk_pairs = zip(w.flatten().split(CHUNK), w0.flatten().split(CHUNK), strict=True)
    change_square = base_square = 0.0
    for w_chunk, w0_chunk in chunk_pairs:
        base_chunk = w0_chunk.double()
        base_square += float(base_chunk.square().sum())
        change_square += float((w_chunk.double() - base_chunk).square().sum())
    if change_square == 0:
        return 0.0
    return math.sqrt(change_square / base_square) if base_square > 0 else math.inf


def _find_adapter_change(
    pairs: Mapping[str, tuple[Block, Block]], config: Mapping[str, Any], before: Mapping[str, Block]
) -> Iterator[Finding]:
    relative_changes = {}
    for name, (a, b) in pairs.items():
        weight_name = f"{WRAPPER_PREFIX.sub('', name)}.weight"
        base_weight = before.get(weight_name)
        if base_weight is None or len(base_weight.shape) != 2:
            continue
        weight_update = compute_update(a, b, config)
        if tuple(weight_update.shape) == base_weight.shape:
            base_norm = base_weight.tensor().double().norm()
            relative_changes[weight_name] = (
                float(weight_update.norm() / base_norm) if base_norm > 0 else math.inf
            )
    if not relative_changes:
        raise CheckpointError(
            "The base network of an adapter (LoRA) must have the layers that the adapter changes; this "
            "base network has none of these layers.",
            "Pass the base that adapter_config.json names.",
        )
    largest_first = sorted(relative_changes.items(), key=lambda item: -item[1])
    examples = ", ".join(
        f"{name[:40]} {_describe_change(change)}" for name, change in largest_first[:3]
    )
    what, where = "the change of each layer", largest_first[0][0][:MAX_PATH_LENGTH]
    reason = (
        f"the adapter and the base give the change of {len(relative_changes)} layers: {examples}"
    )
    remedy = "Attack the adapter before release: residuum audit BASE --adapter ADAPTER."
    if not _is_auditable(before):
        remedy = PROTECT_CHANGE
    yield Finding(ADAPTER, "medium", what, where, reason, remedy, len(relative_changes))


def _is_auditable(blocks: Mapping[str, Block]) -> bool:
    """Return True if an audit can read the network with these weights. No weights are read."""
    try:
        state = {name: block.meta() for name, block in blocks.items()}
        recognize(state)
    except (ResiduumError, RuntimeError, ValueError):
        return False
    return True


def _describe_change(relative_change: float) -> str:
    """Return in words how much a tensor changed, relative to its norm before training.

    If the tensor was zero before training, ``relative_change`` is infinite.
    """
    return "from zero" if relative_change == math.inf else f"by {relative_change:.2g} of its norm"


@dataclass(frozen=True, eq=False)
class TouchedRows:
    """Rows of an embedding table that training changed.

    Attributes:
        rows: Indices of the rows that changed.
        rule: The rule that all other rows follow, such as "equal" (they equal the base) or "one factor" (they
            are the base times one factor).
        total: Number of rows in the table.
        coarse: Whether the numbers of the table have so few digits that rounding can hide small steps of
            training. Then changed rows may be missed.
    """

    rows: tuple[int, ...]
    rule: str
    total: int
    coarse: bool = False

    @property
    def sentence(self) -> str:
        """Sentence that says how many rows changed and what happened to the other rows."""
        if self.rule == NONE:
            return (
                "every row changed, as with a tied output head, so nobody can tell which rows were in the "
                "training data"
            )
        descriptions = {EQUAL: "equal the base", FACTOR: "are the base times one factor"}
        other_rows = descriptions.get(self.rule, "follow one curve of the base")
        rounding_note = (
            "; 16-bit numbers lose small steps in rounding, so rows may be missed" * self.coarse
        )
        return (
            f"{len(self.rows)} of {self.total} rows changed, and the other rows {other_rows}"
            f"{rounding_note}"
        )


def find_touched_rows(table: Tensor, base: Tensor) -> TouchedRows:
    """Find the rows of an embedding table that training changed.

    Args:
        table: The trained table (V, d).
        base: The same table before training.

    Returns:
        The changed rows, and the rule that all other rows follow.
    """
    relative_rounding_error = max(torch.finfo(table.dtype).eps, torch.finfo(base.dtype).eps)
    is_coarse = relative_rounding_error > 1e-4
    min_unchanged_rows = max(MIN_ROWS, MIN_SHARE * len(table))
    is_changed = _is_unequal(table, base)
    if int((~is_changed).sum()) >= min_unchanged_rows:
        rows = tuple(is_changed.nonzero().flatten().tolist())
        return TouchedRows(rows, EQUAL, len(table), is_coarse)
    w, w0 = table.detach().double(), base.detach().double()
    rules: list[tuple[str, Callable[[], Tensor | None]]] = [
        (FACTOR, lambda: None if is_coarse else _is_off_factor(w, w0, relative_rounding_error)),
        (CURVE, lambda: _is_off_lookup(w, w0) if is_coarse else _is_off_curve(w, w0)),
        # If training used more bits than the file, the final values of rows that training did not touch can
        # differ by rounding.
        (
            CURVE,
            lambda: (
                _is_off_lookup(w, w0, ROUNDING_UNITS * relative_rounding_error)
                if is_coarse
                else None
            ),
        ),
    ]
    for rule, test_rows in rules:
        is_off_rule = test_rows()
        if is_off_rule is not None and int((~is_off_rule).sum()) >= min_unchanged_rows:
            rows = tuple(is_off_rule.nonzero().flatten().tolist())
            return TouchedRows(rows, rule, len(w), is_coarse)
    return TouchedRows((), NONE, len(w), is_coarse)


def _is_unequal(table: Tensor, base: Tensor) -> Tensor:
    """Return for each row of a table whether it changed, in the less precise dtype of the two tables."""
    less_precise_dtype = max(table.dtype, base.dtype, key=lambda kind: torch.finfo(kind).eps)
    rows_at_once = max(1, CHUNK // max(table.shape[1], 1))
    chunk_pairs = zip(table.split(rows_at_once), base.split(rows_at_once), strict=True)
    return torch.cat(
        [(t.to(less_precise_dtype) != t0.to(less_precise_dtype)).any(1) for t, t0 in chunk_pairs]
    )


def _is_off_factor(w: Tensor, w0: Tensor, rounding_unit: float) -> Tensor | None:
    """Return for each row w of a trained table whether it differs from c w0, a multiple of the row w0 before.

    Args:
        w: The table after training, (V, d).
        w0: The table before training, (V, d).
        rounding_unit: Relative rounding error of a number of the tables.

    Returns:
        (V,) whether each row differs, or None if no factor c fits enough rows.
    """
    squared_norms = w0.square().sum(1).clamp(min=1e-300)
    factors = (w * w0).sum(1) / squared_norms
    relative_misfit = (w - factors[:, None] * w0).norm(dim=1) / squared_norms.sqrt()
    best_rows = relative_misfit.argsort()[: max(MIN_ROWS, int(MIN_SHARE * len(w)))]
    expected = factors[best_rows].median() * w0
    magnitude = torch.maximum(w.abs(), w0.abs()).clamp(min=1e-300)
    deviation = ((w - expected) / magnitude).square().mean(1).sqrt()  # (V,)
    noise = max(float(deviation[best_rows].median()), rounding_unit)
    if noise > MAX_NOISE:
        return None
    relative_scatter = (2 * w.shape[1]) ** -0.5
    # ``noise`` is the median deviation of the rows that fit best. The limit is larger, because other rows
    # that training did not touch deviate more.
    return deviation > noise * (1 + 6 * relative_scatter) / max(1 - 2 * relative_scatter, 0.25)


def _is_off_curve(w: Tensor, w0: Tensor) -> Tensor | None:
    """Return for each row w of a trained table whether it lies off one curve w = f(w0) for all entries.

    Args:
        w: The table after training, (V, d).
        w0: The table before training, (V, d).

    Returns:
        (V,) whether each row lies off the curve, or None if no curve fits the rows.
    """
    V, d = w.shape
    if V * d < 4 * BIN:
        return None
    sign = torch.where(w0 < 0, -1.0, 1.0).double()
    x, y = (w0 * sign).flatten(), (w * sign).flatten()
    row_of_entry = torch.arange(V).repeat_interleave(d)
    is_near_curve = torch.ones(V, dtype=torch.bool)
    # Fit the curve three times, each time without the rows that are far from the previous curve.
    for _ in range(3):
        near_entries = is_near_curve[row_of_entry].nonzero().flatten()
        sorted_entries = near_entries[x[near_entries].argsort()]
        bin_entries = sorted_entries[: len(sorted_entries) // BIN * BIN].reshape(-1, BIN)
        if len(bin_entries) < 2:
            return None
        knots, curve_values = x[bin_entries].mean(1), y[bin_entries].median(1).values
        curve_values = _shift_to_mean(x[bin_entries], curve_values)
        spread = (
            (y[bin_entries] - _interpolate(x[bin_entries], knots, curve_values))
            .abs()
            .median(1)
            .values
        )
        typical_deviation = _interpolate(x, knots, spread).clamp(min=1e-12)
        deviation = ((y - _interpolate(x, knots, curve_values)).abs() / typical_deviation).reshape(
            V, d
        )
        upper_quartile = deviation.quantile(0.75, dim=1)
        is_near_curve = upper_quartile <= upper_quartile.median()
    typical_change = (y - x).abs().median()
    does_curve_fit = float(typical_deviation.median()) <= MAX_SPREAD * float(typical_change)
    return upper_quartile > MAX_DEVIATION if does_curve_fit else None


def _shift_to_mean(x: Tensor, medians: Tensor) -> Tensor:
    """Return the values of a curve at the mean of x in each bin, from the median values in the bins.

    Args:
        x: (B, entries) positions of the entries in each of B bins.
        medians: (B,) median of the values of the curve in each bin.

    Returns:
        (B,) values of the curve.
    """
    # The median of the values is the value at the median of x. We move it along the slope to the mean of x.
    mean_x, median_x = x.mean(1), x.median(1).values
    curve_slope = torch.gradient(medians, spacing=(mean_x,))[0]
    return medians + curve_slope.nan_to_num() * (mean_x - median_x)


def _interpolate(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Interpolate linearly between values at knots. Outside, use the value of the nearest knot."""
    upper_knot = torch.searchsorted(knots, x.contiguous()).clamp(1, len(knots) - 1)
    lower_knot = upper_knot - 1
    fraction = (
        (x - knots[lower_knot]) / (knots[upper_knot] - knots[lower_knot]).clamp(min=1e-300)
    ).clamp(0, 1)
    return values[lower_knot] + fraction * (values[upper_knot] - values[lower_knot])


def _is_off_lookup(w: Tensor, w0: Tensor, slack: float = 0.0) -> Tensor:
    """Find rows with an entry that changed in another way than other entries with the same initial value.

    In rows that training did not touch, entries with the same initial value have the same final value.

    Args:
        w: The table after training, (V, d).
        w0: The table before training, (V, d).
        slack: Relative difference up to which two final values count as equal.

    Returns:
        (V,) whether each row has such an entry.
    """
    initial_values, initial_index = w0.flatten().unique(return_inverse=True)
    final_values, final_index = w.flatten().unique(return_inverse=True)
    pairs, pair_count = (initial_index * len(final_values) + final_index).unique(return_counts=True)
    # A pair is an initial value with a final value. The assignment keeps the last pair for each initial
    # value. We sort the pairs so that this is the most frequent pair.
    rare_pairs_first = pair_count.argsort(stable=True)
    majority_pair = torch.zeros(len(initial_values), dtype=torch.long)
    majority_pair[pairs[rare_pairs_first] // len(final_values)] = rare_pairs_first
    agreeing_count = pair_count[majority_pair][initial_index]
    entry_count = initial_index.bincount(minlength=len(initial_values))[initial_index]
    has_majority = (entry_count >= MIN_EQUAL_STARTS) & (4 * agreeing_count > entry_count)
    expected_value = final_values[pairs[majority_pair] % len(final_values)][initial_index]
    magnitude = torch.maximum(
        torch.maximum(w.flatten().abs(), expected_value.abs()), w0.flatten().abs()
    )
    differs = (w.flatten() - expected_value).abs() > slack * magnitude
    return (has_majority & differs).reshape(w.shape).any(1)
