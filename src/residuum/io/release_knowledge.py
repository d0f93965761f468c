"""Knowledge that a release itself holds next to the weights: optimizer state and initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from residuum.errors import CheckpointError
from residuum.io.estimators import read_training_state
from residuum.io.inert import Block
from residuum.io.optimizer_state import TORCH_MOMENTS, remove_weight_decay
from residuum.io.release import Release
from residuum.io.release_weights import find_weights, flatten_blocks
from residuum.io.tree import walk
from residuum.networks.network import Network
from residuum.records import Knowledge

RELEASE = "release"  # where a fact comes from that the file itself holds


@dataclass(frozen=True, eq=False)
class StoredKnowledge:
    """What a file holds beside the weights, by our parameter names; notes: how it was matched."""

    moment: dict[str, Tensor] | None = None
    theta0: dict[str, Tensor] | None = None
    notes: tuple[str, ...] = ()


def add_stored_knowledge(release: Release, checkpoint: Network, knowledge: Knowledge) -> Knowledge:
    """Return the knowledge together with what the release itself holds.

    Everybody who has the weights also has the optimizer state and the initial weights in the same file.
    """
    found = read_stored_knowledge(release, checkpoint)
    facts: dict[str, Any] = {}
    if found.moment is not None and knowledge.moment is None:
        facts["moment"] = found.moment
    if found.theta0 is not None and knowledge.theta0 is None:
        facts["theta0"] = found.theta0
    provenance = {**knowledge.provenance, **dict.fromkeys(facts, RELEASE)}
    return knowledge.replace(**facts, provenance=provenance) if facts else knowledge


def remove_stored_knowledge(knowledge: Knowledge) -> Knowledge:
    """Return the knowledge without the facts that the release itself holds.

    Reading the release again adds them (:func:`add_stored_knowledge`), if it still holds them.
    """
    names = [name for name, source in knowledge.provenance.items() if source == RELEASE]
    provenance = {k: v for k, v in knowledge.provenance.items() if k not in names}
    return knowledge.replace(**dict.fromkeys(names), provenance=provenance)


def read_stored_knowledge(release: Release, checkpoint: Network) -> StoredKnowledge:
    """Return what the release of ``checkpoint`` holds next to the weights."""
    if release.kind == "pickle":
        return StoredKnowledge(*read_training_state(release))
    if release.kind != "torch":
        return StoredKnowledge()
    moment, notes = _read_optimizer_state(release, checkpoint)
    return StoredKnowledge(moment or None, None, notes)


def _read_optimizer_state(
    release: Release, checkpoint: Network
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Moments of every parameter that an optimizer in the file keeps one of."""
    ours = {theirs: name for name, theirs in checkpoint.source_names.items()}
    try:
        own = [name for name in flatten_blocks(find_weights(release)) if name in ours]
    except CheckpointError:
        return {}, ()
    found: dict[str, Tensor] = {}
    notes: list[str] = []
    for place in walk(release.content):
        value = place.value
        if not (isinstance(value, dict) and {"state", "param_groups"} <= {*value}):
            continue
        matched, how = _match_parameters(value, own, checkpoint, ours)
        for name, (kept, group) in matched.items():
            weight = checkpoint.theta[ours[name]]
            tensors = {k: kept[k].tensor().to(weight) for k in TORCH_MOMENTS if k in kept}
            # As torch says since 2.7; where nobody says, AdamW, whose decay stays out of the gradients.
            said = group.get("decoupled_weight_decay")
            apart = said if isinstance(said, bool) else "betas" in group
            part = remove_weight_decay(tensors, group, weight, apart)
            if part is not None and bool(part.isfinite().all()):
                found[ours[name]] = part
        notes += how if matched else []
    return found, tuple(notes)


def _match_parameters(
    optimizer: dict[str, Any], own: list[str], checkpoint: Network, ours: dict[str, str]
) -> tuple[dict[str, tuple[dict[str, Block], dict[str, Any]]], list[str]]:
    """State and group of the parameters, by the names in the file."""
    shapes = {name: tuple(checkpoint.theta[ours[name]].shape) for name in own}
    state, groups = optimizer["state"], optimizer["param_groups"]
    state = state if isinstance(state, dict) else {}
    entries: list[tuple[Any, str, dict[str, Block], dict[str, Any]]] = []
    for group in groups if isinstance(groups, list) else ():
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            continue
        names = group.get("param_names")
        named = names if isinstance(names, list) and len(names) == len(group["params"]) else None
        for i, number in enumerate(group["params"]):
            kept = state.get(number) if isinstance(number, str | int) else None
            kept = kept if isinstance(kept, dict) else {}
            blocks = {k: b for k, b in kept.items() if isinstance(b, Block)}
            name = named[i] if named else number
            entries.append((number, name if isinstance(name, str) else "", blocks, group))

    def shape(blocks: dict[str, Block]) -> tuple[int, ...] | None:
        return next((blocks[k].shape for k in TORCH_MOMENTS if k in blocks), None)

    by_name = {n: (b, g) for _, n, b, g in entries if n in shapes and shape(b) == shapes[n]}
    if by_name:
        return by_name, []
    count = len(entries)
    for first in reversed(range(len(own) - count + 1)):  # all, or else the last that fit: a head
        pairs = list(zip(own[first : first + count], entries, strict=True))
        if pairs and all(shape(b) in (None, shapes[n]) for n, (_, _, b, _) in pairs):
            note = f"optimizer state of {count} parameters was taken as that of the last which fit"
            found = {n: (b, g) for n, (_, _, b, g) in pairs if shape(b) is not None}
            return found, [note] if count < len(own) else []
    free, found = list(own), dict[str, tuple[dict[str, Block], dict[str, Any]]]()
    for _, _, blocks, group in entries:
        name = next((n for n in free if shapes[n] == shape(blocks)), None)
        if name is not None:
            free.remove(name)
            found[name] = (blocks, group)
    return found, ["optimizer state was matched with the weights by shape"]
