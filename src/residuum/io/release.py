"""Open the file of a release without running any of it.

==========================  =======================================================================
a file that begins with     is read as
==========================  =======================================================================
8 bytes, then ``{``         safetensors: its header, and ``adapter_config.json`` in the same folder
``PK\x03\x04``                torch.save or TorchScript: the pickle in the archive, as inert values
``\x80``, or a known name   a pickle of torch, scikit-learn or anything else, as inert values
a packer's mark             joblib's compressed pickles, unpacked as they are read, up to a limit
any, named ``.onnx``        the initializers of an ONNX graph (extra ``onnx``)
==========================  =======================================================================

Every command reads a file once, with this reader. Numbers are read when they are asked for, so that a large
checkpoint is looked through in no time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.onnx_files import read_onnx
from residuum.io.pickle_files import ZIP_MAGIC, PickleContent, read_archive, read_pickle
from residuum.io.pickle_reader import make_unsafe_error
from residuum.io.safetensors_files import read_safetensors
from residuum.io.streams import UNPACKERS
from residuum.records.rundir import sha256

DEFAULT_MAX_BYTES = 64 << 30  # only headers and pickles are read until numbers are asked for
MAX_CONFIG = 1 << 20  # bytes of adapter_config.json
RUN_FILE = "model.safetensors"  # the weights in a directory of ``residuum train``
PICKLE_MAGIC = b"\x80"
FIRST_BYTES = b"(]}cKIVSF"  # of pickles in protocols 0 and 1, which have no magic number
SUFFIXES = (
    ".pt", ".pth", ".ckpt", ".bin", ".tar", ".pkl", ".pickle", ".p", ".sav", ".joblib", ".gz", ".z",
    ".bz2", ".xz", ".lzma", ".model", ".safetensors", ".onnx", ".ts", ".jit", ".pth.tar",
)  # fmt: skip
PICKLES = (".pkl", ".pickle", ".p", ".sav", ".joblib", ".model", ".bin", ".pt", ".pth")
ADAPTER_CONFIG = "adapter_config.json"
UNSUPPORTED_FORMATS = {
    b"\x89HDF": (
        "an HDF5 file (Keras)",
        "Save the weights as safetensors: safetensors.numpy.save_file(...).",
    ),
    b"GGUF": ("a GGUF file", "Scan the checkpoint that it was made from."),
    b"\x04\x22\x4d\x18": (
        "packed with lz4",
        "Save it again: joblib.dump(model, path, compress=('zlib', 3)).",
    ),
    b"\x28\xb5\x2f\xfd": ("packed with zstd", "Unpack it first."),
}


@dataclass(frozen=True, eq=False)
class Release:
    """What one file holds.

    Attributes:
        path: The file.
        kind: torch, torchscript, pickle, safetensors or onnx.
        content: The tree of :mod:`.inert`, or the tensors by name.
        size: Bytes of the file.
        metadata: Texts that are stored in the file.
        config: Configuration of the adapter, if the file is one.
        unsafe: What loading the file would do besides making values, such as "call os.system".
        foreign: Classes and functions of other packages that the file names.
    """

    path: Path
    kind: str
    content: Any
    size: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    unsafe: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @cached_property
    def sha256(self) -> str:
        """Hash of the file."""
        return sha256(self.path)


def open_release(path: str | Path | Release, max_bytes: int = DEFAULT_MAX_BYTES) -> Release:
    """Read a file, or the weights in a run directory. Nothing in it is executed.

    Args:
        path: The file. A release that was read before is returned as it is.
        max_bytes: Larger files are refused.

    Raises:
        UnsafeFileError: If loading the file would run code, or if it asks for too much memory.
        CheckpointError: If the file cannot be read.
    """
    release = path if isinstance(path, Release) else read_release(locate_weights(path), max_bytes)
    if release.unsafe:
        raise make_unsafe_error(release.unsafe)
    return release


def load(path: str | Path) -> Release:
    """Read the file of a release. Nothing in it is executed.

    Args:
        path: A file of torch, safetensors, scikit-learn or ONNX, or a directory of ``residuum train``.

    Returns:
        The release, for attacks, audits and scans.

    Raises:
        CheckpointError: If the file cannot be read.
        UnsafeFileError: If loading the file would run code, or if it asks for too much memory.

    Example:
        >>> import residuum as rs
        >>> release = rs.load("model.pt")  # doctest: +SKIP
    """
    return open_release(path)


def read_release(path: str | Path, max_bytes: int = DEFAULT_MAX_BYTES) -> Release:
    """Read a file as :func:`open_release` does, and list what loading it would run instead of refusing."""
    path = Path(path)
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise CheckpointError(f"A release is a file; {str(path)!r} {what}.", "Check the path.")
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_bytes:
                raise UnsafeFileError(
                    f"A release may have {max_bytes} bytes; {str(path)!r} has {size}.",
                    "Raise max_bytes for a large model.",
                )
            return _choose_reader(path, stream, size)
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise CheckpointError(
            f"A release must be readable; {str(path)!r} is not ({reason}).", "Check the file."
        ) from problem


def locate_weights(path: str | Path) -> Path:
    """Return the file of weights: the path itself, or the file in a directory of ``residuum train``.

    Raises:
        CheckpointError: If there is no such file.
    """
    path = Path(path)
    file = path / RUN_FILE if path.is_dir() else path
    if not file.is_file():
        what = f"holds no {RUN_FILE}" if path.is_dir() else "does not exist"
        what = "is not a regular file" if file.exists() else what
        raise CheckpointError(
            f"A checkpoint is a file or a run directory; {str(path)!r} {what}.", "Check the path."
        )
    return file


def is_release(path: Path) -> bool:
    """Return True if the file has a name that model files usually have."""
    return path.name.lower().endswith(SUFFIXES)


def _choose_reader(path: Path, stream: BufferedReader, size: int) -> Release:
    """Choose the reader by the first bytes, because people name files as they like."""
    head = stream.read(16)
    stream.seek(0)
    if path.suffix == ".onnx":
        content, metadata = read_onnx(path)
        return Release(path, "onnx", content, size, metadata)
    if head[8:9] == b"{":
        content, metadata = read_safetensors(path, stream, size)
        return Release(path, "safetensors", content, size, metadata, _read_adapter_config(path))
    if head.startswith(ZIP_MAGIC):
        return _release_from_pickle(path, size, read_archive(path, stream, size))
    for magic, (what, remedy) in UNSUPPORTED_FORMATS.items():
        if head.startswith(magic):
            raise CheckpointError(f"{path.name!r} is {what}, which is not read.", remedy)
    unpacker: Callable[[], Any] | None = next(
        (make for magic, make in UNPACKERS.items() if head.startswith(magic)), None
    )
    has_first_byte = head[:1] != b"" and head[:1] in FIRST_BYTES and path.suffix in PICKLES
    if head.startswith(PICKLE_MAGIC) or unpacker is not None or has_first_byte:
        return _release_from_pickle(path, size, read_pickle(path, stream, size, unpacker))
    raise CheckpointError(
        f"A release is a file of torch, safetensors, pickle, joblib or ONNX; {path.name!r} "
        f"{'is none of them' if size else 'is empty'}.",
        "Save the weights with torch.save(model.state_dict(), path), or as safetensors: "
        "safetensors.numpy.save_file({name: array, ...}, path).",
    )


def _release_from_pickle(path: Path, size: int, found: PickleContent) -> Release:
    return Release(
        path, found.kind, found.content, size, unsafe=found.unsafe, foreign=found.foreign
    )


def _read_adapter_config(path: Path) -> dict[str, Any]:
    """Return the content of the adapter_config.json in the folder of the file, {} if there is none."""
    file = path.parent / ADAPTER_CONFIG
    if not file.is_file() or file.stat().st_size > MAX_CONFIG:
        return {}
    try:
        config = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError, OSError):
        return {}
    return config if isinstance(config, dict) else {}
