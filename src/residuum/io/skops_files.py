"""Read skops files as plain descriptions of objects, without importing what the file names.

A file of skops is a zip archive. Its member ``schema.json`` describes the model as nested nodes. Each node
names a class and a loader, which says how the class is built from the content of the node. Arrays are
members in the format of numpy (``.npy``).

We build stand-ins (:mod:`.inert`), as for a pickle. Names of classes and functions are classified in the
same way (:mod:`.pickle_names`). skops itself asks the user before it builds such an object.
"""

from __future__ import annotations

import io
import json
import math
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.inert import Block, GlobalName, InertObject
from residuum.io.numpy_arrays import MAX_ITEM_BYTES, NumpyDtype, read_array
from residuum.io.pickle_files import PickleContent
from residuum.io.pickle_names import FOREIGN, UNLISTED, classify_name
from residuum.io.safetensors_files import COPY_AGAIN
from residuum.io.streams import MAX_PICKLE_BYTES
from residuum.records.inputs import is_size, max_memory, open_zip

SCHEMA = "schema.json"
MAX_SCHEMA = 64 << 20  # largest size of schema.json in bytes
# Largest header of an .npy array, in characters. The header of an array of tree nodes has about 400.
MAX_HEADER = 10_000
MAX_NESTING = 200  # largest nesting depth of nodes in schema.json
MAX_NAME = 300  # largest length of the name of a class, in characters
DICTS = ("DictNode", "_DictWithDeprecatedKeysNode")
LISTS = ("ListNode", "TupleNode", "SetNode")
NAMES = ("TypeNode", "FunctionNode", "MethodNode", "OperatorFuncNode")
# Exceptions that a damaged archive or schema can raise.
DAMAGED = (
    ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError, EOFError, SyntaxError,
    NotImplementedError, zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip


def is_skops(stream: BinaryIO) -> bool:
    """Return True if a zip archive is a file of skops. Afterwards the stream is at its beginning.

    Args:
        stream: The open file.

    Returns:
        True if the archive has a member ``schema.json``, False for any other archive or a damaged archive.
    """
    try:
        with open_zip(stream) as archive:
            return SCHEMA in archive.namelist()
    except (*DAMAGED, UnsafeFileError):
        return False
    finally:
        stream.seek(0)


def read_skops(path: Path, stream: BinaryIO, size: int) -> PickleContent:
    """Read a file of skops.

    Args:
        path: The file.
        stream: The same file, open.
        size: Size of the file in bytes.

    Returns:
        The content.

    Raises:
        CheckpointError: If the file is damaged.
        UnsafeFileError: If the file claims too much memory.
    """
    try:
        with open_zip(stream) as archive:
            members = {member.filename: member for member in archive.infolist()}
            unpacked_bytes = sum(member.file_size for member in archive.infolist())
            schema_bytes = members[SCHEMA].file_size
            if (
                unpacked_bytes > min(MAX_PICKLE_BYTES, max_memory(size))
                or schema_bytes > MAX_SCHEMA
            ):
                raise UnsafeFileError(
                    f"A skops file may unpack to at most {min(MAX_PICKLE_BYTES, max_memory(size))} "
                    f"bytes, and the file {SCHEMA} inside of it to {MAX_SCHEMA} bytes; the file "
                    f"{path.name!r} unpacks to {unpacked_bytes} bytes, with {schema_bytes} bytes for its "
                    f"{SCHEMA}.",
                    "Save the model in several files.",
                )
            schema = json.loads(archive.read(members[SCHEMA]))
            reader = SkopsReader(archive, members)
            content = reader.read(schema)
    except (*DAMAGED, RecursionError) as problem:
        raise CheckpointError(
            f"The file {path.name!r} must be a complete file of skops; the file is damaged "
            f"({type(problem).__name__}: {str(problem)[:100]}).",
            COPY_AGAIN,
        ) from problem
    return PickleContent("skops", content, tuple(reader.unsafe), tuple(reader.foreign))


class SkopsReader:
    """Converts the nodes in ``schema.json`` of a skops file to values and plain descriptions of objects.

    Args:
        archive: The archive of the file.
        members: The members of the archive by name.

    Attributes:
        unsafe: Names that are not known to be harmless, such as "use os.system": the keys of a dict.
        foreign: Names in packages that are neither part of Python nor common: the keys of a dict.
    """

    def __init__(self, archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo]) -> None:
        self.unsafe: dict[str, None] = {}
        self.foreign: dict[str, None] = {}
        self._archive, self._members = archive, members
        self._arrays: dict[str, Block] = {}

    def read(self, node: Any, depth: int = 0) -> Any:
        """Return the value that a node of ``schema.json`` describes. An object becomes a plain description.

        Args:
            node: The node, a JSON object that describes a part of the model.
            depth: Nesting depth of the node.

        Returns:
            The value, or the stand-in.

        Raises:
            ValueError: If the node is malformed or nested too deeply.
        """
        if depth > MAX_NESTING or not isinstance(node, dict):
            raise ValueError("a node must be a JSON object, and may not be nested too deeply")
        loader: Any = node["__loader__"]
        content: Any = node.get("content")
        name = self._check_name(node["__module__"], node["__class__"])
        if loader == "JsonNode":
            return json.loads(content)
        if loader == "NdArrayNode":
            return self._read_array(node, name, depth)
        if loader in NAMES:
            # Versions of skops before 0.8 store the names of a module and a function.
            if isinstance(content, dict) and "module_path" in content:
                return GlobalName(self._check_name(content["module_path"], content["function"]))
            self._read_values(content, depth)
            return GlobalName(name)
        if loader in DICTS:
            return {key: self.read(value, depth + 1) for key, value in content.items()}
        if loader in LISTS:
            return [self.read(value, depth + 1) for value in content]
        arguments = node.get("__reduce__", {}).get("args")
        return InertObject(
            name,
            tuple(self.read(arguments, depth + 1)) if arguments is not None else (),
            self._read_values(content, depth),
        )

    def _read_values(self, content: Any, depth: int) -> Any:
        """Return the content of a node of ``schema.json``: one value, or several values by name."""
        if isinstance(content, dict) and "__loader__" in content:
            return self.read(content, depth + 1)
        if isinstance(content, dict):
            values = content.items()
            return {
                key: self.read(value, depth + 1)
                if isinstance(value, dict) and "__loader__" in value
                else value
                for key, value in values
            }
        return content

    def _check_name(self, module: Any, attribute: Any) -> str:
        """Return the full name of a class or function, and record it if it is unsafe or foreign."""
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise ValueError("a node must name its class")
        full_name = f"{module}.{attribute}"
        if len(full_name) > MAX_NAME:
            raise ValueError("the name of a class is too long")
        match classify_name(module, attribute):
            case kind if kind == UNLISTED:
                self.unsafe[f"use {full_name}"] = None
            case kind if kind == FOREIGN:
                self.foreign[full_name] = None
        return full_name

    def _read_array(self, node: dict[str, Any], name: str, depth: int) -> Any:
        """Return the array of a node. For an array without dimensions, return its number."""
        if node["type"] == "json":
            entries = [self.read(entry, depth + 1) for entry in node["content"]]
            shape = self.read(node["shape"], depth + 1)
            if not isinstance(shape, list) or not all(map(is_size, shape)):
                raise ValueError("the shape of an array must consist of integers")
            is_nested = len(shape) > 1 and all(isinstance(entry, list) for entry in entries)
            flat_entries = [value for row in entries for value in row] if is_nested else entries
            if math.prod(shape) != len(flat_entries):
                raise ValueError("the shape of an array must fit its entries")
            return Block(tuple(shape), "object", objects=flat_entries)
        member_name = node["file"]
        if member_name not in self._arrays:
            self._arrays[member_name] = self._read_member(member_name)
        block = self._arrays[member_name]
        if name != "numpy.ndarray" and not block.shape and block.read is not None:
            return block.tensor().item()
        return block

    def _read_member(self, file: str) -> Block:
        member_bytes = self._archive.read(self._members[file])
        stream = io.BytesIO(member_bytes)
        is_version_1 = npy.read_magic(stream) == (1, 0)
        read_header = npy.read_array_header_1_0 if is_version_1 else npy.read_array_header_2_0
        shape, is_fortran, dtype = read_header(stream, max_header_size=MAX_HEADER)
        if dtype.hasobject or not 0 < dtype.itemsize <= MAX_ITEM_BYTES:
            raise ValueError("an array must consist of numbers or texts")
        content = member_bytes[stream.tell() :]
        byte_order = ">" if dtype.byteorder == ">" else "<"
        dtype_code = f"V{dtype.itemsize}" if dtype.kind == "V" else np.dtype(dtype).str[1:]
        return read_array(content, NumpyDtype(dtype_code, byte_order), tuple(shape), is_fortran)
