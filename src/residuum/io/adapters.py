"""Adapters: read as what they make of their base, W + (alpha / r) B A; the base is the start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from residuum.errors import CheckpointError
from residuum.io.checkpoints import load_checkpoint
from residuum.io.inert import Block
from residuum.io.release import Release
from residuum.io.tree import walk
from residuum.networks.network import Network

WRAPPER_PREFIX = re.compile(r"^(module\.|_orig_mod\.|base_model\.model\.|model\.)+")
LORA = re.compile(r"^(.*)\.lora_(A|B|embedding_A|embedding_B)(\.\w+)?(\.weight)?$")


def find_adapter_pairs(content: Any) -> dict[str, tuple[Block, Block]]:
    """A and B by the layer that they change."""
    found: dict[str, dict[str, Block]] = {}
    for place in walk(content):
        if isinstance(place.value, Block) and (match := LORA.match(place.path)):
            part = match[2].rpartition("_")[2] or match[2]
            found.setdefault(match[1], {})[part] = place.value
    return {name: (ab["A"], ab["B"]) for name, ab in found.items() if {*ab} == {"A", "B"}}


def compute_update(a: Block, b: Block, config: Mapping[str, Any]) -> Tensor:
    """B A times alpha / r (or its root, as the configuration says)."""
    A, B = a.tensor().double(), b.tensor().double()
    alpha, rank = config.get("lora_alpha"), A.shape[0]
    factor = 1.0
    if isinstance(alpha, int | float) and not isinstance(alpha, bool):
        factor = float(alpha) / (rank**0.5 if config.get("use_rslora") is True else rank)
    if A.ndim != 2 or B.ndim != 2 or B.shape[1] != rank:
        raise CheckpointError(
            f"An adapter's parts are (r, in) and (out, r); got {a.shape} and {b.shape}.",
            "Save the adapter again.",
        )
    return factor * (B @ A)


def load_tuned(release: Release, base: str | Path, arch: str | None = None) -> Network:
    """Return the network that an adapter makes of its base, or the tuned network itself."""
    if find_adapter_pairs(release.content):
        return merge_adapter(release, base, arch)
    return load_checkpoint(release, arch)


def merge_adapter(adapter: Release, base: str | Path, arch: str | None = None) -> Network:
    """W + (alpha / r) B A for every layer that the adapter names."""
    start = load_checkpoint(base, arch)
    ours = {WRAPPER_PREFIX.sub("", theirs): name for name, theirs in start.source_names.items()}
    theta = dict(start.theta)
    for name, (a, b) in find_adapter_pairs(adapter.content).items():
        target = ours.get(f"{WRAPPER_PREFIX.sub('', name)}.weight")
        if target is None:
            raise CheckpointError(
                f"An adapter changes layers of its base; this base has no {name[:80]!r}.",
                "Give the base that adapter_config.json names.",
            )
        change = compute_update(a, b, adapter.config)
        if change.shape != theta[target].shape:
            raise CheckpointError(
                f"An adapter fits the layers of its base; {name[:80]!r} is "
                f"{list(change.shape)} and the base has {list(theta[target].shape)}.",
                "Give the base that adapter_config.json names.",
            )
        theta[target] = (theta[target].double() + change).to(theta[target])
    if not all(bool(t.isfinite().all()) for t in theta.values()):
        raise CheckpointError(
            "Weights must be finite; with this adapter they are not.", "Check it."
        )
    said = "the adapter was added to its base"
    if not isinstance(adapter.config.get("lora_alpha"), int | float):
        said += ", with the factor 1, since adapter_config.json names no lora_alpha"
    return start.replace(theta=theta, assumptions=(*start.assumptions, said))
