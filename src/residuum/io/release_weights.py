"""Find the weights in a model file, as blocks (arrays whose numbers are read on demand)."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from residuum.errors import CheckpointError
from residuum.io.inert import Block, InertObject
from residuum.io.release import Release
from residuum.io.state_dicts import MAX_DEPTH, WRAPPERS
from residuum.io.tree import AVERAGES, walk

# Names under which training code stores the states of random generators, which are arrays of bytes.
GENERATOR_STATES = re.compile(r"^(cpu|cuda|npu|xpu|mps|hpu|mlu|musa|.*rng_states?)$", re.IGNORECASE)
# Names that only optimizers use. Other names of moments, such as "mu", can be parameters of a network.
MOMENT_NAMES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
DELETE = "Delete this file from the release. Users of the model do not need this file."


def find_weights(release: Release, place: str = "") -> dict[str, Any]:
    """Return the state dict of a model file, or several state dicts by name. Tensors are not read yet.

    Training code often stores a state dict under a key such as "model" or "state_dict". Then the value of
    this key is returned. A pickled module is refused, because only its class knows its weights, and the class
    is not imported.

    Args:
        release: The release of a torch or safetensors file.
        place: Path of the state dict in the file, such as "ema" or "ema.module". Empty for the state dict
            that training code stores under one of its usual keys, without averaged weights.

    Returns:
        Blocks, or dicts of blocks, by name.

    Raises:
        CheckpointError: If the release holds no state dict, or only optimizer state and averaged weights.
    """
    content = release.content
    if release.kind not in ("torch", "safetensors"):
        raise CheckpointError(
            "A state dict is read from a file of torch.save or safetensors; the file "
            f"{release.path.name!r} has the format {release.kind!r}.",
            "Save the weights first: torch.save(model.state_dict(), path).",
        )
    if isinstance(content, InertObject):
        if not any(isinstance(inner.value, Block) for inner in walk(content)):
            raise CheckpointError(
                f"A model file must contain weights; the file {release.path.name!r} contains only an "
                f"object of the class {content.class_name}, without any tensor.",
                DELETE,
            )
        raise CheckpointError(
            "The file must hold a state dict (tensors by name); this file holds a pickled object of the "
            f"class {content.class_name}.",
            "If you trust the file, run torch.save(torch.load(path, weights_only=False).state_dict(), new).",
        )
    if place:
        return _find_at(content, place, release.path.name)
    for _ in range(MAX_DEPTH):
        content_dict = content if isinstance(content, dict) else {}
        wrapper_key = next((k for k in WRAPPERS if isinstance(content_dict.get(k), dict)), None)
        if wrapper_key is None:
            break
        content = content_dict[wrapper_key]
    weights = _select_weights(content)
    if not weights:
        _refuse_without_weights(release)
    return weights


def _find_at(content: Any, place: str, file: str) -> dict[str, Any]:
    """Return the state dict (tensors by name) at a path in the content of a model file, such as "ema.module".

    Tensors whose names begin with the path and a dot are a state dict too, as in a safetensors file.

    Raises:
        CheckpointError: If there is no state dict at the path.
    """
    weights: dict[str, Any] = {}
    stack = [(content, f"{place}.")]
    while stack:
        value, remaining_place = stack.pop()
        if not remaining_place:
            weights |= _select_weights(value, may_be_average=True)
        elif isinstance(value, dict):
            for name, child in value.items():
                if not isinstance(name, str):
                    continue
                if isinstance(child, Block) and name.startswith(remaining_place):
                    weights[name.removeprefix(remaining_place)] = child
                elif remaining_place.startswith(f"{name}."):
                    stack.append((child, remaining_place[len(name) + 1 :]))
    if not weights:
        raise CheckpointError(
            f"The place that you name must hold a state dict (tensors by name); in the file {file!r}, "
            f"there is no state dict at {place!r}.",
            "Run residuum scan FILE to see the places in the file.",
        )
    # Averaged weights are often stored with their settings, as in {"module": {...}, "decay": 0.99}.
    inner_values = [*weights.values()]
    return (
        inner_values[0] if len(inner_values) == 1 and isinstance(inner_values[0], dict) else weights
    )


def _refuse_without_weights(release: Release) -> NoReturn:
    """Raise an error that says what a file without weights holds instead, such as optimizer state."""
    array_places = [place for place in walk(release.content) if isinstance(place.value, Block)]
    averages = [place for place in array_places if place.section == "average"]
    file, remedy = repr(release.path.name), DELETE
    if averages:
        path_names = averages[0].path.split(".")
        end_of_average = next(i for i, name in enumerate(path_names) if AVERAGES.match(name)) + 1
        contents_text = "only averaged copies of the weights"
        remedy = (
            f"To write the averaged weights, add --weights {'.'.join(path_names[:end_of_average])}."
        )
    elif any(place.section == "state" for place in array_places):
        contents_text = "only optimizer state"
    elif any(GENERATOR_STATES.match(place.name) for place in array_places):
        contents_text = "only states of random generators"
    elif array_places:
        contents_text = "arrays but no state dict"
        remedy = "Pass the file of the network."
    else:
        contents_text = "no tensors, only settings or counters of the training"
    raise CheckpointError(
        f"A model file must contain weights; the file {file} contains {contents_text}.", remedy
    )


def _select_weights(
    content: Any, depth: int = 0, *, may_be_average: bool = False
) -> dict[str, Any]:
    """Return the arrays of nested dicts, without optimizer state, random generators and averaged weights."""
    if not isinstance(content, dict) or depth > MAX_DEPTH:
        return {}
    if "state" in content and "param_groups" in content:
        return {}
    weights: dict[str, Any] = {}
    for name, value in content.items():
        if not isinstance(name, str):
            continue
        if not may_be_average and any(map(AVERAGES.match, name.split("."))):
            continue
        if name.rpartition(".")[2] in MOMENT_NAMES:
            continue
        if isinstance(value, Block):
            if not (value.kind == "uint8" and GENERATOR_STATES.match(name)):
                weights[name] = value
        elif inner := _select_weights(value, depth + 1, may_be_average=may_be_average):
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
