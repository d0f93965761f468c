"""Find boosted trees of XGBoost, LightGBM and CatBoost in a model file.

These libraries save a model as a model file or inside a pickle. We represent a model file by a stand-in (an
:class:`.InertObject`) for the model object that a pickle would hold. So later code handles a model file and a
pickle in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from typing import Any

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io import catboost_files, lightgbm_files
from residuum.io.boosted_trees import describe_damage
from residuum.io.catboost_files import is_catboost_json, read_catboost
from residuum.io.inert import InertObject
from residuum.io.lightgbm_files import read_lightgbm, read_parameters
from residuum.io.xgboost_files import is_xgboost_json, is_xgboost_ubjson, read_xgboost
from residuum.trees.forest import Forest

MAX_BYTES = 512 << 20  # largest model file of boosted trees, which is read completely into memory
HEAD = 64  # number of bytes at the start of a file that show which library wrote it
XGBOOST, LIGHTGBM, CATBOOST = "xgboost", "lightgbm", "catboost"
# For each library, the name of the class that represents a model file.
CLASSES = {
    XGBOOST: "xgboost.core.Booster",
    LIGHTGBM: "lightgbm.basic.Booster",
    CATBOOST: "catboost.core.CatBoost",
}
FOREST = "forest"  # attribute that holds the trees of a model that was read from a file
# For each library, the attribute of a pickled model that holds the text or the bytes of the model.
XGBOOST_MODEL, LIGHTGBM_MODEL, CATBOOST_MODEL = "handle", "_handle", "__model"
OLD_LIGHTGBM_MODEL = "handle"  # attribute with the text of a pickled model before LightGBM 4


def detect_library(head: bytes) -> str:
    """Return the library of boosted trees that wrote a model file, or "" for any other file.

    Args:
        head: The first ``HEAD`` = 64 bytes of the file, or all bytes of a shorter file.

    Returns:
        "xgboost", "lightgbm", "catboost" or "".
    """
    if is_xgboost_json(head) or is_xgboost_ubjson(head) or head.startswith(b"binf"):
        return XGBOOST
    if head.replace(b"\r", b"").startswith(lightgbm_files.MAGIC):
        return LIGHTGBM
    if is_catboost_json(head) or head.startswith(catboost_files.MAGIC):
        return CATBOOST
    return ""


def read_boosted_file(
    stream: BufferedReader, size: int, library: str
) -> tuple[InertObject, dict[str, str]]:
    """Read a model file of XGBoost, LightGBM or CatBoost.

    Args:
        stream: The open file.
        size: Size of the file in bytes.
        library: Name of the library that wrote the file.

    Returns:
        An object that represents the model and holds its trees in the attribute ``forest``, and the texts
        that the file stores, by name.

    Raises:
        UnsafeFileError: If the file is too large.
    """
    if size > MAX_BYTES:
        raise UnsafeFileError(
            f"A model file of {library} may have at most {MAX_BYTES >> 20} MB; this file has "
            f"{size >> 20} MB.",
            "Save the model with fewer trees.",
        )
    raw, metadata = stream.read(), {}
    if library == LIGHTGBM:
        text = _decode(raw)
        forest, metadata = read_lightgbm(text), read_parameters(text)
    else:
        forest = read_xgboost(raw) if library == XGBOOST else read_catboost(raw)
    return InertObject(CLASSES[library], state={FOREST: forest}), metadata


def find_boosted_forests(content: Any) -> Iterator[tuple[str, Forest]]:
    """Yield the class name and the trees of every XGBoost, LightGBM or CatBoost model in a model file.

    Args:
        content: The content of a model file.

    Yields:
        The class name, such as "XGBRegressor", and the trees.
    """
    visited_ids: set[int] = set()
    stack: list[tuple[Any, str]] = [(content, "")]
    while stack:
        value, owner_class = stack.pop()
        if id(value) in visited_ids:
            continue
        visited_ids.add(id(value))
        if isinstance(value, InertObject):
            if (forest := _read_model(value)) is not None:
                yield owner_class or value.class_name, forest
                continue
            package = value.name.partition(".")[0]
            inner_owner_class = value.class_name if package in CLASSES else ""
            inner_values = [*value.attributes.values(), *value.items, *value.entries.values()]
            stack += [(member, inner_owner_class) for member in inner_values]
        elif isinstance(value, dict):
            stack += [(member, owner_class) for member in value.values()]
        elif isinstance(value, list | tuple):
            stack += [(member, owner_class) for member in value]


def _read_model(value: InertObject) -> Forest | None:
    """Return the trees of an object of XGBoost, LightGBM or CatBoost, or None if it is no fitted model."""
    attributes = value.attributes
    if isinstance(forest := attributes.get(FOREST), Forest):
        return forest
    package = value.name.partition(".")[0]
    is_booster = value.class_name == "Booster"
    if package == XGBOOST and is_booster:
        model = attributes.get(XGBOOST_MODEL)
        return None if model is None else read_xgboost(_as_bytes(model, package))
    if package == LIGHTGBM and is_booster:
        model = attributes.get(LIGHTGBM_MODEL, attributes.get(OLD_LIGHTGBM_MODEL))
        return None if model is None else read_lightgbm(_as_text(model))
    if package == CATBOOST:
        model = attributes.get(CATBOOST_MODEL)
        return None if model is None else read_catboost(_as_bytes(model, package))
    return None


def _as_bytes(model: Any, library: str) -> bytes:
    if not isinstance(model, bytes | bytearray):
        raise CheckpointError(*describe_damage(library, "the model as bytes"))
    return bytes(model)


def _as_text(model: Any) -> str:
    if not isinstance(model, str):
        raise CheckpointError(*describe_damage(LIGHTGBM, "the model as text"))
    return model


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise CheckpointError(
            *describe_damage(lightgbm_files.LIBRARY, "a text in UTF-8")
        ) from problem
