"""Walk through all values of a model file, which form a tree of dicts, lists and objects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from residuum.errors import UnsafeFileError
from residuum.io.inert import Block, InertObject

MAX_DEPTH = 5000  # largest nesting depth of values, which is deeper than in any file of pickle.dump
MAX_PATH_LENGTH = 120  # largest length of the path of a value in messages, in characters
# For each optimizer class of scikit-learn, the attributes that hold its state.
OPTIMIZERS = {"AdamOptimizer": ("ms", "vs"), "SGDOptimizer": ("velocities",)}
# Names of dict entries and tensors that hold averaged weights, such as an EMA.
AVERAGES = re.compile(
    r"^(model_?)?(ema|swa|shadow|averaged)(_?(model|state_dict|params|weights|shadow))?$|"
    r"^(state_dict_ema|shadow_params)$",
    re.IGNORECASE,
)


class Place(NamedTuple):
    """A value in a model file, with its path in the nested dicts, lists and objects of the file.

    Attributes:
        path: Path of the value in the tree, such as "state.0.exp_avg".
        name: The last key of the path.
        owner: Class name of the object that holds the value, "" if no object holds the value.
        value: The value.
        section: What the value is part of: "state" (optimizer state), "step" (step count of an optimizer),
            "average" (averaged weights), or "" (anything else).
    """

    path: str
    name: str
    owner: str
    value: Any
    section: str = ""

    @property
    def leaf(self) -> str:
        """The part of the name after its last dot, such as ``running_mean`` of ``bn.running_mean``."""
        return self.name.rpartition(".")[2]


def walk(tree: Any) -> Iterator[Place]:
    """Yield each value in nested dicts, lists and objects with its path, containers first.

    Args:
        tree: The content of a model file.

    Yields:
        The places of the values.

    Raises:
        UnsafeFileError: If the values are nested too deeply.
    """
    iterator_stack = [iter((Place("", "", "", tree),))]
    visited_ids: set[int] = set()
    while iterator_stack:
        place = next(iterator_stack[-1], None)
        if place is None:
            iterator_stack.pop()
            continue
        value = place.value
        if isinstance(value, dict | list | tuple | InertObject | Block):
            if id(value) in visited_ids:
                continue
            visited_ids.add(id(value))
            if len(iterator_stack) > MAX_DEPTH:
                raise UnsafeFileError(
                    f"Lists and dicts in a file may be nested at most {MAX_DEPTH} levels deep; in this "
                    "file, they are nested deeper.",
                    "Save the model in several files and scan each of them.",
                )
            iterator_stack.append(_iterate_children(place))
        yield place


def _iterate_children(place: Place) -> Iterator[Place]:
    """Yield the place of each value that the value at ``place`` contains directly."""
    # A value is in the same section of the checkpoint as its container, such as "state" (optimizer state).
    # A new section begins at a dict with ``state`` and ``param_groups``, at an optimizer of scikit-learn,
    # and at a name such as ``ema``.
    value, section = place.value, place.section
    if isinstance(value, InertObject):
        owner = value.class_name
        if owner in OPTIMIZERS:
            section = "state"
        for name, child in value.attributes.items():
            yield Place(join_path(place.path, name), name, owner, child, section)
        children = [value.entries, value.items, value.arguments]
        if not isinstance(value.state, dict):
            children.append(value.state)
        for child in children:
            if child:
                yield Place(place.path, place.name, owner, child, section)
    elif isinstance(value, dict):
        if "state" in value and "param_groups" in value:
            section = "state"
        for key, child in value.items():
            name = str(key)[:200] if isinstance(key, str | int) else "?"
            is_average = any(map(AVERAGES.match, name.split(".")))
            child_section = "average" if is_average else section
            if section == "state" and name == "step":
                child_section = "step"
            yield Place(join_path(place.path, name), name, place.owner, child, child_section)
    elif isinstance(value, list | tuple):
        for i, child in enumerate(value):
            path = f"{place.path}[{i}]"[:MAX_PATH_LENGTH]
            yield Place(path, place.name, place.owner, child, section)


def join_path(path: str, name: str) -> str:
    """Return the path of a value in a tree, shortened for messages.

    Args:
        path: Path of the parent of the value, "" for the root.
        name: Name of the value.

    Returns:
        The path of the value.
    """
    return (f"{path}.{name}" if path else name)[:MAX_PATH_LENGTH]
