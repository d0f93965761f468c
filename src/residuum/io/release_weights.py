"""Find the weights in a release, as blocks whose numbers are read on demand."""

from __future__ import annotations

from typing import Any

from residuum.errors import CheckpointError
from residuum.io.inert import Block, InertObject
from residuum.io.optimizer_state import FIRST_MOMENTS, SECOND_MOMENTS
from residuum.io.release import Release
from residuum.io.state_dicts import MAX_DEPTH, WRAPPERS
from residuum.io.tree import AVERAGES


def find_weights(release: Release) -> dict[str, Any]:
    """The state dict of a release, or several under their names, as blocks.

    Trainers wrap it (``model``, ``state_dict``, ...): wrappers are opened as long as there is one. A
    pickled module is refused: its weights are known only to its class, which is not imported.
    """
    content = release.content
    if release.kind not in ("torch", "safetensors"):
        raise CheckpointError(
            f"Only files of torch and safetensors hold a state dict; {release.path.name!r} is "
            f"{release.kind}.",
            "Save its weights first: torch.save(model.state_dict(), path).",
        )
    if isinstance(content, InertObject):
        raise CheckpointError(
            f"Weights are stripped from a state dict; this file holds a whole {content.class_name}.",
            "If it is your own: torch.save(torch.load(path, weights_only=False).state_dict(), new).",
        )
    for _ in range(MAX_DEPTH):
        inside = content if isinstance(content, dict) else {}
        wrapper = next((k for k in WRAPPERS if isinstance(inside.get(k), dict)), None)
        if wrapper is None:
            break
        content = inside[wrapper]
    kept = _select_weights(content)
    if not kept:
        raise CheckpointError(
            "A release holds weights; this file holds none beside what is to be left out.",
            "Name the file of the network.",
        )
    return kept


def _select_weights(content: Any, depth: int = 0) -> dict[str, Any]:
    """Blocks of a dict, and of dicts in it, without optimizers and averages."""
    if not isinstance(content, dict) or depth > MAX_DEPTH:
        return {}
    if "state" in content and "param_groups" in content:
        return {}
    kept: dict[str, Any] = {}
    for name, value in content.items():
        if not isinstance(name, str) or any(map(AVERAGES.match, name.split("."))):
            continue
        if name.rpartition(".")[2] in FIRST_MOMENTS | SECOND_MOMENTS:
            continue
        if isinstance(value, Block):
            kept[name] = value
        elif inner := _select_weights(value, depth + 1):
            kept[name] = inner
    return kept


def flatten_blocks(kept: dict[str, Any], at: str = "") -> dict[str, Block]:
    """Blocks of nested dicts by their path; those of one state dict keep their names."""
    found: dict[str, Block] = {}
    for name, value in kept.items():
        one = isinstance(value, Block)
        found |= {f"{at}{name}": value} if one else flatten_blocks(value, f"{at}{name}/")
    return found
