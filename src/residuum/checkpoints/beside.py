"""Weights in a release, and what lies beside them that an attack can use: a moment, a start.

The state of a torch optimiser is kept by the number of each parameter, in the order in which the
optimiser was given them, or by name. Numbers are matched with the tensors of the state dict in their
order where all shapes agree, fewer with the last ones (a head), otherwise shape by shape.

    moment   a mean of the last gradients, weight decay taken out (``surfaces.moment_of``)
    start    of a scikit-learn network, proved by the weights (:mod:`.estimators`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from residuum.checkpoints.contents import FIRST, SECOND
from residuum.checkpoints.estimators import moment_and_start
from residuum.checkpoints.inert import AVERAGES, Block, Thing, walk
from residuum.checkpoints.reading import locate
from residuum.checkpoints.releases import Release, open_release
from residuum.checkpoints.safe import MAX_DEPTH, WRAPPERS
from residuum.checkpoints.surfaces import without_decay
from residuum.errors import CheckpointError, ResiduumError
from residuum.records import Checkpoint, Knowledge

RELEASE = "release"  # where a fact comes from that the file itself holds
MOMENTS = ("exp_avg", "momentum_buffer")


@dataclass(frozen=True, eq=False)
class Beside:
    """What a file holds beside the weights, by our parameter names; notes: how it was matched."""

    moment: dict[str, Tensor] | None = None
    theta0: dict[str, Tensor] | None = None
    notes: tuple[str, ...] = ()


def with_release(path: str | Path, checkpoint: Checkpoint, knowledge: Knowledge) -> Knowledge:
    """The knowledge, and what the file itself grants: whoever has the weights has that as well."""
    found = beside(path, checkpoint)
    facts: dict[str, Any] = {}
    if found.moment is not None and knowledge.moment is None:
        facts["moment"] = found.moment
    if found.theta0 is not None and knowledge.theta0 is None:
        facts["theta0"] = found.theta0
    provenance = {**knowledge.provenance, **dict.fromkeys(facts, RELEASE)}
    return knowledge.replace(**facts, provenance=provenance) if facts else knowledge


def beside(path: str | Path, checkpoint: Checkpoint) -> Beside:
    """What lies beside the weights in the file that ``checkpoint`` was read from."""
    try:
        release = open_release(locate(path))
    except ResiduumError:  # what could be read as weights and no further has nothing to add
        return Beside()
    if release.kind == "pickle":
        return Beside(*moment_and_start(release))
    if release.kind != "torch":
        return Beside()
    moment, notes = _of_optimiser(release, checkpoint)
    return Beside(moment or None, None, notes)


def _of_optimiser(
    release: Release, checkpoint: Checkpoint
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Moments of every parameter that an optimiser in the file keeps one of."""
    ours = {theirs: name for name, theirs in checkpoint.source_names.items()}
    try:
        own = [name for name in flat(weights_of(release)) if name in ours]
    except CheckpointError:
        return {}, ()
    found: dict[str, Tensor] = {}
    notes: list[str] = []
    for place in walk(release.content):
        value = place.value
        if not (isinstance(value, dict) and {"state", "param_groups"} <= {*value}):
            continue
        matched, how = _matched(value, own, checkpoint, ours)
        for name, (kept, group) in matched.items():
            weight = checkpoint.theta[ours[name]]
            tensors = {k: kept[k].tensor().to(weight) for k in MOMENTS if k in kept}
            part = without_decay(tensors, group, weight, decoupled(group))
            if part is not None and bool(part.isfinite().all()):
                found[ours[name]] = part
        notes += how if matched else []
    return found, tuple(notes)


def decoupled(group: Mapping[str, Any]) -> bool:
    """Whether decay stayed out of the gradients: as torch says since 2.7, AdamW where nobody says."""
    said = group.get("decoupled_weight_decay")
    return bool(said) if isinstance(said, bool) else "betas" in group


def _matched(
    optimiser: dict[str, Any], own: list[str], checkpoint: Checkpoint, ours: dict[str, str]
) -> tuple[dict[str, tuple[dict[str, Block], dict[str, Any]]], list[str]]:
    """State and group of the parameters, by the names in the file."""
    shapes = {name: tuple(checkpoint.theta[ours[name]].shape) for name in own}
    state, groups = optimiser["state"], optimiser["param_groups"]
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
        return next((blocks[k].shape for k in MOMENTS if k in blocks), None)

    by_name = {n: (b, g) for _, n, b, g in entries if n in shapes and shape(b) == shapes[n]}
    if by_name:
        return by_name, []
    count = len(entries)
    for first in reversed(range(len(own) - count + 1)):  # all, or else the last that fit: a head
        pairs = list(zip(own[first : first + count], entries, strict=True))
        if pairs and all(shape(b) in (None, shapes[n]) for n, (_, _, b, _) in pairs):
            note = f"optimiser state of {count} parameters was taken as that of the last which fit"
            found = {n: (b, g) for n, (_, _, b, g) in pairs if shape(b) is not None}
            return found, [note] if count < len(own) else []
    free, found = list(own), dict[str, tuple[dict[str, Block], dict[str, Any]]]()
    for _, _, blocks, group in entries:
        name = next((n for n in free if shapes[n] == shape(blocks)), None)
        if name is not None:
            free.remove(name)
            found[name] = (blocks, group)
    return found, ["optimiser state was matched with the weights by shape"]


def weights_of(release: Release) -> dict[str, Any]:
    """The state dict of a release, or several under their names, as blocks."""
    content = release.content
    if release.kind not in ("torch", "safetensors"):
        raise CheckpointError(
            f"Only files of torch and safetensors hold a state dict; {release.path.name!r} is "
            f"{release.kind}.",
            "Save its weights first: torch.save(model.state_dict(), path).",
        )
    if isinstance(content, Thing):
        raise CheckpointError(
            f"Weights are stripped from a state dict; this file holds a whole {content.short}.",
            "If it is your own: torch.save(torch.load(path, weights_only=False).state_dict(), new).",
        )
    for _ in range(MAX_DEPTH):
        inside = content if isinstance(content, dict) else {}
        wrapper = next((k for k in WRAPPERS if isinstance(inside.get(k), dict)), None)
        if wrapper is None:
            break
        content = inside[wrapper]
    kept = _weights(content)
    if not kept:
        raise CheckpointError(
            "A release holds weights; this file holds none beside what is to be left out.",
            "Name the file of the network.",
        )
    return kept


def _weights(content: Any, depth: int = 0) -> dict[str, Any]:
    """Blocks of a dict, and of dicts in it, without optimisers and averages."""
    if not isinstance(content, dict) or depth > MAX_DEPTH:
        return {}
    if "state" in content and "param_groups" in content:
        return {}
    kept: dict[str, Any] = {}
    for name, value in content.items():
        if not isinstance(name, str) or any(map(AVERAGES.match, name.split("."))):
            continue
        if name.rpartition(".")[2] in FIRST | SECOND:
            continue
        if isinstance(value, Block):
            kept[name] = value
        elif inner := _weights(value, depth + 1):
            kept[name] = inner
    return kept


def flat(kept: dict[str, Any], at: str = "") -> dict[str, Block]:
    """Blocks of nested dicts by their path; those of one state dict keep their names."""
    found: dict[str, Block] = {}
    for name, value in kept.items():
        one = isinstance(value, Block)
        found |= {f"{at}{name}": value} if one else flat(value, f"{at}{name}/")
    return found
