"""Walk through the tree of values that a release holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from residuum.errors import UnsafeFileError
from residuum.io.inert import Block, InertObject

MAX_DEPTH = 5000  # of values inside each other: no pickler writes as many
MAX_PATH_LENGTH = 120  # characters of a path, as it is shown
# Parts of a checkpoint whose values mean something else than elsewhere: optimizers, averaged copies.
OPTIMIZERS = {"AdamOptimizer": ("ms", "vs"), "SGDOptimizer": ("velocities",)}
AVERAGES = re.compile(
    r"^(model_?)?(ema|swa|shadow|averaged)(_?(model|state_dict|params|weights|shadow))?$|"
    r"^(state_dict_ema|shadow_params)$",
    re.IGNORECASE,
)


class Place(NamedTuple):
    """A value in the tree: its path, its own name, the class of the object it belongs to."""

    path: str
    name: str
    owner: str
    value: Any
    section: str = (
        ""  # the part of a checkpoint that it lies in: "state" of an optimizer, "average"
    )

    @property
    def leaf(self) -> str:
        """The last part of the name: that of ``layer1.0.bn.running_mean`` is ``running_mean``."""
        return self.name.rpartition(".")[2]


def walk(tree: Any) -> Iterator[Place]:
    """Yield every place of a tree once, parents first, however often a value is shared."""
    waiting = [iter((Place("", "", "", tree),))]
    seen: set[int] = set()
    while waiting:
        place = next(waiting[-1], None)
        if place is None:
            waiting.pop()
            continue
        value = place.value
        if isinstance(value, dict | list | tuple | InertObject | Block):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if len(waiting) > MAX_DEPTH:
                raise UnsafeFileError(
                    f"Values may lie {MAX_DEPTH} deep in each other; in this file they lie deeper.",
                    "Scan the parts of this model one by one.",
                )
            waiting.append(_iterate_children(place))
        yield place


def _iterate_children(place: Place) -> Iterator[Place]:
    """The places directly below one, with what they are inside of: optimizer state, an average, a step
    count.

    That is inherited downwards, and told by the shape of what trainers save: ``state`` beside
    ``param_groups``, an optimizer's class, names such as ``ema``.
    """
    value, inside = place.value, place.section
    if isinstance(value, InertObject):
        owner = value.class_name
        if owner in OPTIMIZERS:
            inside = "state"
        for name, part in value.attributes.items():
            yield Place(join_path(place.path, name), name, owner, part, inside)
        rest = [value.entries, value.items, value.arguments]
        if not isinstance(value.state, dict):
            rest.append(value.state)
        for part in rest:
            if part:
                yield Place(place.path, place.name, owner, part, inside)
    elif isinstance(value, dict):
        if "state" in value and "param_groups" in value:
            inside = "state"
        for key, part in value.items():
            name = str(key)[:200] if isinstance(key, str | int) else "?"
            within = "average" if any(map(AVERAGES.match, name.split("."))) else inside
            within = "step" if inside == "state" and name == "step" else within
            yield Place(join_path(place.path, name), name, place.owner, part, within)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield Place(
                f"{place.path}[{i}]"[:MAX_PATH_LENGTH], place.name, place.owner, part, inside
            )


def join_path(path: str, name: str) -> str:
    """The path of a part, as it is shown."""
    return (f"{path}.{name}" if path else name)[:MAX_PATH_LENGTH]
