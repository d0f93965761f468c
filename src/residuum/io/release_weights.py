"""Find the weights in a release, as blocks (arrays whose numbers are read on demand)."""

from __future__ import annotations

from typing import Any

from residuum.errors import CheckpointError
from residuum.io.inert import Block, InertObject
from residuum.io.optimizer_state import FIRST_MOMENTS, SECOND_MOMENTS
from residuum.io.release import Release
from residuum.io.state_dicts import MAX_DEPTH, WRAPPERS
from residuum.io.tree import AVERAGES


def find_weights(release: Release) -> dict[str, Any]:
    """Return the state dict of a release, or several state dicts by name. Tensors are not read yet.

    Training code often stores a state dict under a key such as "model" or "state_dict". Then the value of
    this key is returned. A pickled module is refused, because only its class knows its weights, and the class
    is not imported.

    Args:
        release: The release of a torch or safetensors file.

    Returns:
        Blocks, or dicts of blocks, by name.

    Raises:
        CheckpointError: If the release holds no state dict, or only optimizer state and averaged weights.
    """
    content = release.content
    if release.kind not in ("torch", "safetensors"):
        raise CheckpointError(
            "A state dict must be in a file of torch or safetensors; "
            f"{release.path.name!r} is a file of the kind {release.kind!r}.",
            "Save the weights first: torch.save(model.state_dict(), path).",
        )
    if isinstance(content, InertObject):
        raise CheckpointError(
            f"The file must hold a state dict; this file holds a pickled {content.class_name}.",
            "If you trust the file, run torch.save(torch.load(path, weights_only=False).state_dict(), new).",
        )
    for _ in range(MAX_DEPTH):
        content_dict = content if isinstance(content, dict) else {}
        wrapper_key = next((k for k in WRAPPERS if isinstance(content_dict.get(k), dict)), None)
        if wrapper_key is None:
            break
        content = content_dict[wrapper_key]
    weights = _select_weights(content)
    if not weights:
        raise CheckpointError(
            "A release must hold weights; this file holds no tensors except optimizer state and averaged "
            "weights.",
            "Pass the file of the network.",
        )
    return weights


def _select_weights(content: Any, depth: int = 0) -> dict[str, Any]:
    """Return the blocks (arrays) of nested dicts, without optimizer state and averaged weights."""
    if not isinstance(content, dict) or depth > MAX_DEPTH:
        return {}
    if "state" in content and "param_groups" in content:
        return {}
    weights: dict[str, Any] = {}
    for name, value in content.items():
        if not isinstance(name, str) or any(map(AVERAGES.match, name.split("."))):
            continue
        if name.rpartition(".")[2] in FIRST_MOMENTS | SECOND_MOMENTS:
            continue
        if isinstance(value, Block):
            weights[name] = value
        elif inner := _select_weights(value, depth + 1):
            weights[name] = inner
    return weights


def flatten_blocks(weights: dict[str, Any], prefix: str = "") -> dict[str, Block]:
    """Flatten nested dicts of blocks (arrays of a file) to one dict.

    Args:
        weights: The result of :func:`find_weights`.
        prefix: Path of the dict ``weights``, with which the new names begin. Empty for the outer dict.

    Returns:
        Blocks by path, such as ``generator/layer.weight``. Blocks of a single state dict keep their names.
    """
    blocks: dict[str, Block] = {}
    for name, value in weights.items():
        is_block = isinstance(value, Block)
        path = f"{prefix}{name}"
        blocks |= {path: value} if is_block else flatten_blocks(value, f"{path}/")
    return blocks
