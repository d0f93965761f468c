"""Checkpoints from files that may be hostile, and back to files that anyone can read.

====================  ==================================================================
a file that begins    is read as
====================  ==================================================================
8 bytes, then ``{``   safetensors, header checked first (:mod:`.headers`)
``PK\\x03\\x04``        torch.save's zip archive, claims checked first (:mod:`.archives`)
``\\x80``              torch.save's legacy format, likewise
====================  ==================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from residuum.checkpoints.archives import PICKLE_MAGIC, ZIP_MAGIC, read_legacy, read_zip
from residuum.checkpoints.headers import is_safetensors, read_safetensors
from residuum.checkpoints.metadata import Metadata, decode_metadata, encode_metadata
from residuum.checkpoints.modules import checkpoint_from_module, fitting_shape
from residuum.checkpoints.states import clean_state, find_state
from residuum.errors import ArchitectureError, CheckpointError, UnsafeFileError
from residuum.networks import KINDS, Architecture, match_architecture, recognise
from residuum.networks.kinds import ASSUMED_RELU
from residuum.records import Checkpoint, write_atomic
from residuum.records.environment import sha256

DEFAULT_MAX_BYTES = 8 << 30
RUN_FILE = "model.safetensors"


def load_checkpoint(
    path: str | Path,
    arch: str | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Checkpoint:
    """Read the weights in a file, or in ``model.safetensors`` of a run directory.

    arch: architecture string; without it the file's own metadata decide, then the shapes of the
    tensors. input_shape: shape of one sample. max_bytes: larger files and claims are refused.
    Nothing in the file is ever executed.
    """
    content, metadata, size = _read(locate(path), max_bytes)
    return _checkpoint(content, decode_metadata(metadata), size, arch, input_shape)


def as_checkpoint(
    model: Checkpoint | nn.Module | Mapping[str, Any] | str | Path,
    arch: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Checkpoint:
    """A checkpoint as it is, of a live network, of a state dict, or read from a file.

    shape: of one sample, for a live network that is kept as given and does not show it.
    """
    if isinstance(model, Checkpoint):
        return model
    if isinstance(model, nn.Module):
        return checkpoint_from_module(model, shape_if_kept=shape)
    if isinstance(model, str | Path):
        return load_checkpoint(model, arch)
    if isinstance(model, Mapping):
        return _checkpoint(dict(model), Metadata(), arch=arch)
    raise CheckpointError(
        "A network is a Checkpoint, a module, its state_dict() or the path of a file; got "
        f"{type(model).__name__}.",
        "Give model.state_dict().",
    )


def save_checkpoint(checkpoint: Checkpoint, path: str | Path) -> Path:
    """Write a checkpoint as safetensors, atomically; equal checkpoints give equal bytes."""
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in checkpoint.theta.items()}
    return write_atomic(path, _sort_header(save(tensors, encode_metadata(checkpoint))))


def locate(path: str | Path) -> Path:
    """The file of weights: a file, or that of a directory of ``residuum train``."""
    path = Path(path)
    if path.is_dir():
        if not (path / RUN_FILE).is_file():
            raise CheckpointError(
                f"A run directory must hold {RUN_FILE}; {str(path)!r} does not.",
                "Name the checkpoint file itself.",
            )
        return path / RUN_FILE
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"A checkpoint is a file or a run directory; {str(path)!r} {what}.", "Check the path."
        )
    return path


def weights_hash(path: str | Path) -> str:
    """What tells two checkpoints apart."""
    return sha256(locate(path))


def _read(path: Path, max_bytes: int) -> tuple[Any, dict[str, str], int]:
    """What the file holds, its metadata, its size in bytes."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_bytes:
                raise UnsafeFileError(
                    f"A checkpoint may have {max_bytes} bytes; {str(path)!r} has {size}.",
                    "Raise max_bytes for a large model.",
                )
            head = stream.read(16)
            if is_safetensors(head):
                return *read_safetensors(path, stream, size, max_bytes), size
            if head.startswith(ZIP_MAGIC):
                return read_zip(stream, size), {}, size
            if head.startswith(PICKLE_MAGIC):
                return read_legacy(stream, size, max_bytes), {}, size
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise CheckpointError(
            f"A checkpoint must be readable; {str(path)!r} is not ({reason}).", "Check the file."
        ) from problem
    what = "is neither" if size else "is empty"
    if path.suffix == ".onnx":
        what = "is an ONNX graph"
    raise CheckpointError(
        f"A checkpoint is a safetensors file or one of torch.save; {str(path)!r} {what}.",
        "Save the PyTorch network's weights with torch.save(model.state_dict(), path).",
    )


def _checkpoint(
    content: Any,
    known: Metadata,
    size: int | None = None,
    arch: str | None = None,
    input_shape: tuple[int, ...] | None = None,
) -> Checkpoint:
    """``content``: what a file held, of ``size`` bytes, or a dict that is in memory (None)."""
    state, source, notes = clean_state(find_state(content), size)
    network, names, guesses = _identify(state, arch, known)
    return Checkpoint(
        theta={ours: state[theirs] for ours, theirs in names.items()},
        arch=str(network),
        input_shape=fitting_shape(
            network, known.input_shape if input_shape is None else input_shape
        ),
        labels=known.labels,
        task=known.task,
        assumptions=(*guesses, *notes),
        source_names={ours: source[theirs] for ours, theirs in names.items()},
    )


def _identify(
    state: dict[str, Tensor], arch: str | None, known: Metadata
) -> tuple[Architecture, dict[str, str], list[str]]:
    """The network, for each of its parameters (in its order) the name in ``state``, the guesses."""
    text = arch if arch is not None else known.architecture
    try:
        with torch.device("meta"):  # a claimed architecture must not allocate its size
            network, names = _named(text, state) if text else recognise(state)
            order = list(network.build().state_dict())
    except (RuntimeError, ValueError, OverflowError, TypeError) as problem:
        raise ArchitectureError(
            f"An architecture must be one that can be built; got {text[:80]!r}.",
            "Example: --arch mlp:784-1000-1000-1.",
        ) from problem
    guesses = [*known.assumptions]
    if not known.architecture:
        guesses += KINDS[network.kind].assumed(network)
    if "activation=" in text:
        guesses = [note for note in guesses if note != ASSUMED_RELU]
    return network, {name: names[name] for name in order}, guesses


def _named(text: str, state: dict[str, Tensor]) -> tuple[Architecture, dict[str, str]]:
    network = Architecture.parse(text)
    return network, match_architecture(state, network)


def _sort_header(content: bytes) -> bytes:
    """The same file with its header's keys sorted: the library orders metadata at random."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(
        json.loads(content[8:start]), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()
    header += b" " * (-len(header) % 8)  # tensors stay aligned
    return len(header).to_bytes(8, "little") + header + content[start:]
