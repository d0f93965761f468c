"""Records: frozen dataclasses that hold samples or results, such as a reconstruction, and can be saved.

A record is saved as a single safetensors file: its tensors as tensors, everything else as JSON in the
metadata of the file. The file is written atomically, so no process ever reads an incomplete record.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from residuum.errors import InputError, ResiduumError
from residuum.records.rundir import write_atomic

METADATA_KEY = "residuum"
# JSON text of at most this length is read from any file. Parsed JSON takes about forty times its length in
# memory, so longer text is read only if the tensors take at least half of the file.
SMALL_TEXT = 4 << 20
# Metadata of a dataclass field that ``save`` does not write. After ``load``, the field has its default value.
UNSAVED = {"saved": False}
_UNREADABLE = (OSError, SafetensorError, LookupError, ValueError, TypeError)
# Errors that reading a file raises if ``Record.save`` did not write its JSON.
_MALFORMED = (AttributeError, RecursionError)


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """Base class of records. Fields are tensors, numbers, strings, records, and dicts or tuples of them."""

    record_types: ClassVar[dict[str, type[Record]]] = {}  # all record classes by class name
    # Names of the properties that ``to_json`` returns in addition to the fields.
    derived: ClassVar[tuple[str, ...]] = ()
    unpublished: ClassVar[tuple[str, ...]] = ()  # names of the fields that ``to_json`` omits

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Record.record_types[cls.__name__] = cls

    def save(self, path: str | Path) -> Path:
        """Write the record atomically to ``path`` and return the path."""
        tensors: dict[str, Tensor] = {}
        encoded_record = _encode(self, "", tensors)
        return write_atomic(path, save(tensors, {METADATA_KEY: json.dumps(encoded_record)}))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a record of this class.

        Args:
            path: A file that ``save`` wrote.

        Returns:
            The record.

        Raises:
            InputError: If the file cannot be read or holds another record.
        """
        try:
            with safe_open(str(path), framework="pt") as archive:
                json_text = (archive.metadata() or {})[METADATA_KEY]
                _check_size(json_text, Path(path))
                tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
            record = _decode(json.loads(json_text), tensors)
        except (*_UNREADABLE, *_MALFORMED) as problem:
            raise InputError(
                f"The file {str(path)!r} must hold a record of the type {cls.__name__}; reading the file "
                f"failed "
                f"({type(problem).__name__}).",
                "Create the file again, or pass another file.",
            ) from problem
        if not isinstance(record, cls):
            raise InputError(
                f"The file {str(path)!r} must hold a record of the type {cls.__name__}; it holds a record "
                f"of the type {type(record).__name__}.",
                f"Pass a file with a record of the type {cls.__name__}.",
            )
        return record

    @classmethod
    def load_or_none(cls, path: str | Path) -> Self | None:
        """Return the record at ``path``, or None if the file is missing or cannot be read."""
        try:
            return cls.load(path) if Path(path).is_file() else None
        except ResiduumError:
            return None

    def replace(self, **changes: Any) -> Self:
        """Return a copy of the record with some fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_attributes(cls, source: Any, **values: Any) -> Self:
        """Make a record of this class from the attributes of another object.

        Args:
            source: An object with an attribute for every field that ``values`` does not contain.
            **values: Values of the fields that the object lacks or stores in another form.

        Returns:
            The record.
        """
        field_names = (field.name for field in dataclasses.fields(cls) if field.name not in values)
        return cls(**{name: getattr(source, name) for name in field_names}, **values)

    @classmethod
    def published_fields(cls) -> list[dataclasses.Field[Any]]:
        """Return the fields that ``to_json`` includes: all fields except the ``unpublished`` ones."""
        return [field for field in dataclasses.fields(cls) if field.name not in cls.unpublished]

    def to_json(self) -> dict[str, Any]:
        """Return the published fields and the ``derived`` properties by name, converted to JSON types."""
        return self.plain_values(*(field.name for field in self.published_fields()), *self.derived)

    def plain_values(self, *names: str) -> dict[str, Any]:
        """Return the fields and properties with the given names, converted to JSON types."""
        return {name: plain(getattr(self, name)) for name in names}


def table_rows(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert a table from columns to rows: return one dict per row, with the column names as keys."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def plain(value: Any) -> Any:
    """Convert a value to JSON types: tensors and tuples to lists, NaN and infinity to None."""
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Tensor | np.generic):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def same(a: Any, b: Any) -> bool:
    """Compare two records, or values in them, bit for bit.

    Args:
        a: A record or value.
        b: The record or value to compare with ``a``.

    Returns:
        True if types, dtypes and all values are equal. NaN equals NaN.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, Record):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def _encode(value: Any, location: str, tensors: dict[str, Tensor]) -> Any:
    """Return a field of a record as JSON types, with a name in place of each tensor.

    Args:
        value: The value to encode: a tensor, number, text or record, or a dict, tuple or list of them.
        location: Path of the value within the record, such as "/knowledge/mean". It names the tensor.
        tensors: Dict to which the tensors are added by name.

    Returns:
        The encoded value.

    Raises:
        TypeError: If the value has a type that a record cannot hold.
    """
    if isinstance(value, Tensor):
        tensor_name = location if location not in tensors else f"{location}#{len(tensors)}"
        # Safetensors refuses tensors that share memory.
        tensors[tensor_name] = value.detach().cpu().clone().contiguous()
        return {"$tensor": tensor_name}
    if isinstance(value, Record):
        encoded_fields = {
            f.name: _encode(getattr(value, f.name), f"{location}/{f.name}", tensors)
            for f in dataclasses.fields(value)
            if f.metadata.get("saved", True)
        }
        return {"$record": type(value).__name__, "fields": encoded_fields}
    if isinstance(value, dict):
        return {"$dict": [[k, _encode(v, f"{location}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, tuple | list):
        encoded_items = [_encode(v, f"{location}/{i}", tensors) for i, v in enumerate(value)]
        return {"$tuple": encoded_items} if isinstance(value, tuple) else encoded_items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"A record cannot hold a {type(value).__name__} (at {location!r}).")


def _check_size(text: str, path: Path) -> None:
    """Raise ``ValueError`` if a file has so much JSON text that parsing it could exhaust the memory."""
    if len(text) > max(SMALL_TEXT, path.stat().st_size // 2):
        raise ValueError("the file holds more text than tensors")


def _decode(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return tensors[tree["$tensor"]]
    if "$dict" in tree:
        return {_key(key): _decode(value, tensors) for key, value in tree["$dict"]}
    if "$tuple" in tree:
        return tuple(_decode(item, tensors) for item in tree["$tuple"])
    decoded_fields = {key: _decode(value, tensors) for key, value in tree["fields"].items()}
    return Record.record_types[tree["$record"]](**decoded_fields)


def _key(key: Any) -> Any:
    """Check a dictionary key read from a file. Raise ``ValueError`` for a large integer (slow to hash)."""
    # All multiples of 2^61 - 1 have the same hash. Filling a dict with such keys would take quadratic time.
    if isinstance(key, int) and abs(key) >= 2**60:
        raise ValueError("a key is too large an integer")
    return key
