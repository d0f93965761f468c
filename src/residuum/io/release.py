r"""Open a release (a model file) without running any of its code.

==========================  =======================================================================
a file that begins with     is read as
==========================  =======================================================================
8 bytes, then ``{``         safetensors: its header, and ``adapter_config.json`` in the same folder
``PK\x03\x04``                torch.save or TorchScript: the pickle in the archive, as inert values.
                            With ``schema.json``: a file of skops, as inert values
``\x80``, or a known name   a pickle of torch, scikit-learn or anything else, as inert values
the mark of a compressor    compressed pickles of joblib, unpacked while they are read, up to a limit
anything, named ``.onnx``   the initializers of an ONNX graph (extra ``onnx``)
``tree``, ``CBM1``, ``{``   models of LightGBM, CatBoost and XGBoost: their trees (:mod:`.boosted_files`)
==========================  =======================================================================

Inert values are plain objects that describe the content of a pickle (:mod:`.inert`).

Every command reads a file once, with this reader. Numbers are read on demand, so that opening a large
checkpoint is fast.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.boosted_files import HEAD, detect_library, read_boosted_file
from residuum.io.folders import SAVE_SHARDS, is_shard_index, locate_weights, read_shard_index
from residuum.io.inert import Block
from residuum.io.onnx_files import read_onnx
from residuum.io.pickle_files import ZIP_MAGIC, PickleContent, read_archive, read_pickle
from residuum.io.pickle_reader import describe_unsafe
from residuum.io.safetensors_files import read_safetensors
from residuum.io.skops_files import is_skops, read_skops
from residuum.io.streams import UNPACKERS
from residuum.records.rundir import digest, sha256

# Largest size of a file in bytes. This can exceed the memory, because at first only headers and pickles are
# read.
DEFAULT_MAX_BYTES = 64 << 30
# Largest size in bytes of adapter_config.json, which holds the settings of an adapter (LoRA).
MAX_CONFIG = 1 << 20
PICKLE_MAGIC = b"\x80"
# Pickles of the protocols 0 and 1 have no magic number. Each of them begins with one of these bytes.
FIRST_BYTES = b"(]}cKIVSF"
SUFFIXES = (
    ".pt", ".pth", ".ckpt", ".bin", ".tar", ".pkl", ".pickle", ".p", ".sav", ".joblib", ".skops", ".gz",
    ".z", ".bz2", ".xz", ".lzma", ".model", ".safetensors", ".onnx", ".ts", ".jit", ".pth.tar", ".ubj",
    ".cbm", ".lgb", ".lgbm", ".xgb",
)  # fmt: skip
PICKLES = (".pkl", ".pickle", ".p", ".sav", ".joblib", ".model", ".bin", ".pt", ".pth")
ADAPTER_CONFIG = "adapter_config.json"
UNSUPPORTED_FORMATS = {
    b"\x89HDF": (
        "an HDF5 file (Keras)",
        "Save the weights as safetensors: safetensors.numpy.save_file(...).",
    ),
    b"GGUF": ("a GGUF file", "Scan the checkpoint from which the GGUF file was made."),
    b"\x04\x22\x4d\x18": (
        "packed with lz4",
        "Save the model again: joblib.dump(model, path, compress=('zlib', 3)).",
    ),
    b"\x28\xb5\x2f\xfd": ("packed with zstd", "Unpack the file first."),
}


# Kinds of data files in the folder of a release (:mod:`.data_files`).
TABLE, ARRAYS, TEXT, JSON, IMAGES = "table", "arrays", "text", "json", "images"
OTHER = "other"  # kind of a file or folder that a scan lists without reading it
DATA_KINDS = (TABLE, ARRAYS, TEXT, JSON, IMAGES, OTHER)
RELEASE_KINDS = (  # formats of files
    *("torch", "torchscript", "pickle", "skops", "safetensors", "onnx"),
    *("xgboost", "lightgbm", "catboost"),
    *DATA_KINDS,
)


@dataclass(frozen=True, eq=False)
class Release:
    """The content of a model file.

    Attributes:
        path: The file.
        kind: One of ``RELEASE_KINDS``.
        content: The tree of inert values (:mod:`.inert`), or the tensors by name.
        size: Size of the file in bytes.
        metadata: Texts that are stored in the file.
        config: Content of adapter_config.json in the folder of the file, {} if there is no such file.
        unsafe: Calls of unknown functions that loading the file would make, such as "call os.system".
        foreign: Classes and functions of other packages that the file names.
        graph: The graph of an ONNX file with its operators, None for other files.
        shards: The files that hold the weights if ``path`` is an index of shards.
        notes: What was not read, as with a large data file.
    """

    path: Path
    kind: str
    content: Any
    size: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    unsafe: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    graph: Any = None
    shards: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def sha256(self) -> str:
        """SHA-256 hash of the file. If the weights are in shards, the hash of the hashes of all files."""
        if not self.shards:
            return sha256(self.path)
        return digest(*(sha256(file) for file in (self.path, *self.shards)))


def open_release(path: str | Path | Release, max_bytes: int = DEFAULT_MAX_BYTES) -> Release:
    """Read a file, or the weights in a folder, and refuse a file that would run code.

    Nothing in the file is executed.

    Args:
        path: The file or folder, or a release, which is returned without reading it again.
        max_bytes: Largest size of the file in bytes.

    Returns:
        The release.

    Raises:
        UnsafeFileError: If loading the file would run code.
    """
    release = path if isinstance(path, Release) else read_release(locate_weights(path), max_bytes)
    if release.unsafe:
        raise UnsafeFileError(*describe_unsafe(release.unsafe))
    return release


def load(path: str | Path) -> Release:
    """Read a model file. Nothing in the file is executed.

    Args:
        path: A file of torch, safetensors, scikit-learn, ONNX, XGBoost, LightGBM or CatBoost, or a folder of
            Hugging Face, PEFT or ``residuum train``. Weights in several files (shards) are read as one
            release.

    Returns:
        The release, for attacks, audits and scans.

    Example:
        >>> import residuum as rs
        >>> release = rs.load("model.pt")  # doctest: +SKIP
    """
    return open_release(path)


def read_release(path: str | Path, max_bytes: int = DEFAULT_MAX_BYTES) -> Release:
    """Read a file, even if loading the file would run code.

    This code is listed in ``Release.unsafe``. Nothing in the file is executed.

    Args:
        path: The file, or the index of a model in several files.
        max_bytes: Largest size of the file in bytes.

    Returns:
        The release.

    Raises:
        CheckpointError: If the file cannot be read.
        UnsafeFileError: If the file is too large.
    """
    path = Path(path)
    if not path.is_file():
        defect = "is not a regular file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"A release (a published model) must be a file; the path {str(path)!r} {defect}.",
            "Check the path.",
        )
    if is_shard_index(path):
        return _read_shards(path, max_bytes)
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_bytes:
                raise UnsafeFileError(
                    f"A model file may have at most {max_bytes} bytes; the file {str(path)!r} has {size} "
                    "bytes.",
                    "If the model is this large, pass a larger limit max_bytes.",
                )
            return _choose_reader(path, stream, size)
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise CheckpointError(
            f"A model file must be readable; reading the file {str(path)!r} failed ({reason}).",
            "Check the file.",
        ) from problem


def pickle_in_memory(model: Any) -> Release:
    """Pickle an object in memory, and read the pickle like a file. Nothing in the pickle is executed.

    Args:
        model: A live model.

    Returns:
        The release. Its path is the name of the class.

    Raises:
        CheckpointError: If the object cannot be pickled.
    """
    name = type(model).__name__
    try:
        pickle_bytes = pickle.dumps(model)
    except Exception as problem:
        raise CheckpointError(
            "A model in memory must support pickle, because residuum searches what a pickle of the model "
            f"would store; pickling the {name} raised {type(problem).__name__}.",
            "Save the model to a file and audit the file.",
        ) from problem
    stream: Any = io.BufferedReader(io.BytesIO(pickle_bytes))
    release = _release_from_pickle(
        Path(name), len(pickle_bytes), read_pickle(Path(name), stream, len(pickle_bytes))
    )
    # A model in memory has no file that could be hashed, so store the hash of its pickle.
    vars(release)["sha256"] = hashlib.sha256(pickle_bytes).hexdigest()
    return release


def is_release(path: Path) -> bool:
    """Return True if the name of a file has an ending of model files, such as ".pt"."""
    return path.name.lower().endswith(SUFFIXES)


def _choose_reader(path: Path, stream: BufferedReader, size: int) -> Release:
    """Read a model file. Its first bytes decide the format, because the name of a file is not reliable."""
    first_bytes = stream.read(HEAD)
    stream.seek(0)
    if path.suffix == ".onnx":
        content, metadata, graph = read_onnx(path)
        return Release(path, "onnx", content, size, metadata, graph=graph)
    if first_bytes[8:9] == b"{":
        content, metadata = read_safetensors(path, stream, size)
        return Release(path, "safetensors", content, size, metadata, _read_adapter_config(path))
    if first_bytes.startswith(ZIP_MAGIC) and is_skops(stream):
        return _release_from_pickle(path, size, read_skops(path, stream, size))
    if first_bytes.startswith(ZIP_MAGIC):
        return _release_from_pickle(path, size, read_archive(path, stream, size))
    if library := detect_library(first_bytes):
        model, metadata = read_boosted_file(stream, size, library)
        return Release(path, library, model, size, metadata)
    for magic, (what, remedy) in UNSUPPORTED_FORMATS.items():
        if first_bytes.startswith(magic):
            raise CheckpointError(
                f"The file {path.name!r} is {what}, which residuum does not read.", remedy
            )
    unpacker: Callable[[], Any] | None = next(
        (make for magic, make in UNPACKERS.items() if first_bytes.startswith(magic)), None
    )
    is_old_pickle = (
        first_bytes[:1] != b"" and first_bytes[:1] in FIRST_BYTES and path.suffix in PICKLES
    )
    if first_bytes.startswith(PICKLE_MAGIC) or unpacker is not None or is_old_pickle:
        return _release_from_pickle(path, size, read_pickle(path, stream, size, unpacker))
    raise CheckpointError(
        "A model file must have the format of torch, safetensors, pickle, joblib, skops, ONNX, XGBoost, "
        f"LightGBM or CatBoost; the file {path.name!r} {'has another format' if size else 'is empty'}.",
        "Save the weights with torch.save(model.state_dict(), path), or as safetensors: "
        "safetensors.numpy.save_file({name: array, ...}, path).",
    )


def _read_shards(index: Path, max_bytes: int) -> Release:
    """Read all weight files that the index of a model lists, as one model."""
    tensor_names = read_shard_index(index)
    shard_releases: list[Release] = []
    content: dict[str, Any] = {}
    for file, names in tensor_names.items():
        shard = read_release(file, max_bytes - sum(previous.size for previous in shard_releases))
        shard_tensors = shard.content if isinstance(shard.content, dict) else {}
        missing = [name for name in names if not isinstance(shard_tensors.get(name), Block)]
        repeated = [*content.keys() & shard_tensors.keys()]
        if missing or repeated or (shard_releases and shard.kind != shard_releases[0].kind):
            defect = f"{file.name!r} is a file of another format"
            if missing:
                defect = f"{file.name!r} lacks the tensor {missing[0][:80]!r}"
            elif repeated:
                defect = f"{str(repeated[0])[:80]!r} is stored twice"
            raise CheckpointError(
                f"The weight files of a model must contain all tensors that the index {index.name!r} "
                f"lists; {defect}.",
                SAVE_SHARDS,
            )
        content |= shard_tensors
        shard_releases.append(shard)
    return Release(
        path=index,
        kind=shard_releases[0].kind,
        content=content,
        size=sum(shard.size for shard in shard_releases),
        metadata={name: text for shard in shard_releases for name, text in shard.metadata.items()},
        config=shard_releases[0].config,
        unsafe=tuple(dict.fromkeys(action for shard in shard_releases for action in shard.unsafe)),
        foreign=tuple(dict.fromkeys(name for shard in shard_releases for name in shard.foreign)),
        shards=tuple(tensor_names),
    )


def _release_from_pickle(path: Path, size: int, pickled: PickleContent) -> Release:
    return Release(
        path, pickled.kind, pickled.content, size, unsafe=pickled.unsafe, foreign=pickled.foreign
    )


def _read_adapter_config(path: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json in the folder of a file, or {} if it does not exist."""
    config_file = path.parent / ADAPTER_CONFIG
    if not config_file.is_file() or config_file.stat().st_size > MAX_CONFIG:
        return {}
    try:
        config = json.loads(config_file.read_text("utf-8"))
    except (ValueError, RecursionError, OSError):
        return {}
    return config if isinstance(config, dict) else {}
