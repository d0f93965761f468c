"""A release beside its base: which rows and layers training moved, and what an adapter adds to each layer.

Tensors are compared under equal names, prefixes of wrappers left out. Whoever has both files has the
change, which is a sum over training samples; in a table of embeddings it names the tokens, users or items
that were seen (:mod:`.touched`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from residuum.checkpoints.beside import flat, weights_of
from residuum.checkpoints.contents import ADAPTER, START, TOUCHED, Finding
from residuum.checkpoints.inert import LONGEST, Block
from residuum.checkpoints.releases import Release
from residuum.checkpoints.touched import NONE, touched_rows
from residuum.checkpoints.tuning import WRAPPED, adapter_pairs, change_of
from residuum.errors import CheckpointError

TABLES = re.compile(r"(embed|wte|lookup|token|user|item|entit|vocab)", re.IGNORECASE)
LEAST_TABLE = 100  # rows
MOST_VALUES = 400_000_000  # of a tensor that is compared
MOST_SHOWN = 10


def compared(release: Release, base: Release) -> list[Finding]:
    """What the two files tell together."""
    before = {WRAPPED.sub("", name): block for name, block in flat(_state(base)).items()}
    pairs = adapter_pairs(release.content)
    if pairs:
        return list(_adapter(pairs, release.config, before))
    after = {WRAPPED.sub("", name): block for name, block in flat(_state(release)).items()}
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
    return weights_of(release)


def _comparable(block: Block, other: Block) -> bool:
    floats = all(b.kind.startswith(("float", "bfloat")) for b in (block, other))
    return floats and block.shape == other.shape and 0 < block.numel <= MOST_VALUES


def _tables(
    both: Mapping[str, tuple[Block, Block]], after: Mapping[str, Block]
) -> Iterator[Finding]:
    for name, (block, other) in both.items():
        if len(block.shape) != 2 or block.shape[0] < LEAST_TABLE or not TABLES.search(name):
            continue
        table = block.tensor()
        if tied := _tied(name, block, table, after):
            yield Finding(
                TOUCHED,
                "low",
                f"the table {name[:60]} is tied",
                name[:LONGEST],
                f"it is also {tied[:60]}, the output head, which gives every row a gradient at every "
                "step: which rows were seen cannot be told",
                "Nothing to do for this surface.",
            )
            continue
        found = touched_rows(table, other.tensor())
        if found.rule == NONE:
            yield Finding(
                TOUCHED,
                "low",
                f"every row of {name[:60]} moved",
                name[:LONGEST],
                found.said,
                "Nothing to do for this surface.",
            )
        elif found.rows:
            shown = ", ".join(map(str, found.rows[:MOST_SHOWN]))
            more = ", ..." if len(found.rows) > MOST_SHOWN else ""
            yield Finding(
                TOUCHED,
                "high",
                f"rows of {name[:60]} that training touched",
                name[:LONGEST],
                f"{found.said}: tokens, users or items {shown}{more} were in the training data",
                "Freeze the table, or train it with differential privacy.",
                count=len(found.rows),
                rows=found.rows,
            )


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
    moved = {}
    for name, (block, other) in both.items():
        now, then = block.tensor().double(), other.tensor().double()
        if not torch.equal(now, then):
            moved[name] = float((now - then).norm() / then.norm().clamp(min=1e-300))
    if moved:
        far = sorted(moved.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name[:40]} by {share:.2g}" for name, share in far[:3])
        yield Finding(
            START,
            "high",
            "the weights before training",
            far[0][0][:LONGEST],
            f"with the base, {len(moved)} of {len(both)} tensors are known to have moved, most of all "
            f"{shown} of its norm: the change is a sum over training samples",
            "If the base is public, attack the change before release: residuum audit FILE --base BASE.",
            places=len(moved),
        )


def _adapter(
    pairs: Mapping[str, tuple[Block, Block]], config: Mapping[str, Any], before: Mapping[str, Block]
) -> Iterator[Finding]:
    sizes = {}
    for name, (a, b) in pairs.items():
        key = f"{WRAPPED.sub('', name)}.weight"
        base = before.get(key)
        if base is None or len(base.shape) != 2:
            continue
        delta = change_of(a, b, config)
        if tuple(delta.shape) == base.shape:
            sizes[key] = float(delta.norm() / base.tensor().double().norm().clamp(min=1e-300))
    if not sizes:
        raise CheckpointError(
            "An adapter belongs to a base with its layers; this base has none of them.",
            "Give the base that adapter_config.json names.",
        )
    far = sorted(sizes.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name[:40]} {share:.2g}" for name, share in far[:3])
    yield Finding(
        ADAPTER,
        "high",
        "the change of each layer",
        far[0][0][:LONGEST],
        f"with the base the change of {len(sizes)} layers is known, relative to their norm: {shown}",
        "Attack it before release: residuum audit BASE --adapter ADAPTER.",
        places=len(sizes),
    )
