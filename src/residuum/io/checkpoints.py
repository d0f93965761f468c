"""Checkpoints from files, state dicts and live networks, and back to files that anyone can read.

====================  ==================================================================
a file that begins    is read as
====================  ==================================================================
8 bytes, then ``{``   safetensors, header checked first
``PK\x03\x04``        torch.save's zip archive, claims checked first
``\x80``              torch.save's legacy format, likewise
====================  ==================================================================

Beside the weights residuum writes plain strings that any safetensors reader can show; FORMAT_KEY marks
a file as ours. Files come from strangers, who may be hostile: every claim is checked before anything is
believed. Safetensors is 8 bytes length n (little endian), n bytes JSON {name: {dtype, shape,
data_offsets}}, then the tensors' bytes without gaps; every entry must agree with the size of the file before
the library maps a byte. Of files of ``torch.save`` the checks allocate nothing that the file does not hold:
members of the archive are stored, not compressed, and do not overlap; the pickle is run over inert values
(:mod:`.pickles`); each storage must be there in full. Only then is ``torch.load(weights_only=True)`` called.
What was loaded becomes a clean state dict: unwrapped, dense, real, finite, owned.

A file of weights has no ``forward``. Where no architecture string can say it, the code that defines the
network can, ``package.module:factory``; importing it runs it, so whoever asks must say that it is trusted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from residuum.errors import ArchitectureError, CheckpointError, UnsafeFileError
from residuum.io.metadata import NOTHING_SAID, decode_metadata, encode_metadata
from residuum.io.modules import checkpoint_from_module, fitting_shape
from residuum.io.safetensors_files import read_safetensors, sort_header
from residuum.io.state_dicts import clean_state, find_state
from residuum.io.torch_files import PICKLE_MAGIC, ZIP_MAGIC, read_legacy, read_zip
from residuum.networks import (
    KINDS,
    Architecture,
    match_architecture,
    recognise,
)
from residuum.networks.kinds import ASSUMED_RELU
from residuum.networks.network import Network
from residuum.records import write_atomic
from residuum.records.rundir import sha256

DEFAULT_MAX_BYTES = 8 << 30  # of a file: what a machine with 16 GB can hold twice
RUN_FILE = "model.safetensors"


def load_checkpoint(
    path: str | Path,
    arch: str | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Network:
    """Read the weights in a file, or in ``model.safetensors`` of a run directory.

    arch: architecture string; without it the file's own metadata decide, then the shapes of the
        tensors.
    input_shape: shape of one sample.
    max_bytes: larger files and claims are refused.
    Nothing in the file is ever executed.
    """
    try:
        content, metadata, size = _read(locate(path), max_bytes)
    except (UnsafeFileError, CheckpointError) as problem:
        from residuum.io.estimators import network_in  # upon this file

        try:
            network = network_in(locate(path))
        except UnsafeFileError as unsafe:
            raise (problem if isinstance(problem, UnsafeFileError) else unsafe) from problem
        if network is None:
            raise
        return (
            network if arch is None else _checkpoint(dict(network.theta), NOTHING_SAID, arch=arch)
        )
    return _checkpoint(content, decode_metadata(metadata), size, arch, input_shape)


def as_checkpoint(
    model: Network | nn.Module | Mapping[str, Any] | str | Path | Any,
    arch: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Network:
    """A checkpoint as it is, of a live network, of a state dict, of an estimator, or read from a file.

    shape: of one sample, for a live network that is kept as given and does not show it.
    """
    if isinstance(model, Network):
        return model
    if isinstance(model, nn.Module):
        return checkpoint_from_module(model, shape_if_kept=shape)
    if isinstance(model, str | Path):
        return load_checkpoint(model, arch)
    if isinstance(model, Mapping):
        return _checkpoint(dict(model), NOTHING_SAID, arch=arch)
    if hasattr(model, "coefs_") and hasattr(model, "intercepts_"):
        from residuum.io.estimators import network_of  # upon this file

        return network_of(model)
    raise CheckpointError(
        "A network is a Network, a module, its state_dict(), a fitted MLPClassifier or MLPRegressor "
        f"of scikit-learn or the path of a file; got {type(model).__name__}.",
        "Give model.state_dict().",
    )


def save_checkpoint(checkpoint: Network, path: str | Path) -> Path:
    """Write a checkpoint as safetensors, atomically; equal checkpoints give equal bytes."""
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in checkpoint.theta.items()}
    return write_atomic(path, sort_header(save(tensors, encode_metadata(checkpoint))))


def locate(path: str | Path) -> Path:
    """The file of weights: a file, or that of a directory of ``residuum train``."""
    path = Path(path)
    file = path / RUN_FILE if path.is_dir() else path
    if not file.is_file():
        what = f"holds no {RUN_FILE}" if path.is_dir() else "does not exist"
        what = "is not a regular file" if file.exists() else what
        raise CheckpointError(
            f"A checkpoint is a file or a run directory; {str(path)!r} {what}.", "Check the path."
        )
    return file


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
            if head[8:9] == b"{":  # the JSON object behind its length
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
        "Save the weights with torch.save(model.state_dict(), path), or as safetensors: "
        "safetensors.numpy.save_file({name: array, ...}, path).",
    )


def _checkpoint(
    content: Any,
    known: Network,
    size: int | None = None,
    arch: str | None = None,
    input_shape: tuple[int, ...] | None = None,
) -> Network:
    """``content``: what a file held, of ``size`` bytes, or a dict that is in memory (None).

    known: what the file says of itself.
    """
    state, source, notes = clean_state(find_state(content), size)
    network, names, guesses = _identify(state, arch, known)
    shape = known.input_shape if input_shape is None else input_shape
    return known.replace(
        theta={ours: state[theirs] for ours, theirs in names.items()},
        arch=str(network),
        input_shape=fitting_shape(network, shape),
        assumptions=(*guesses, *notes),
        source_names={ours: source[theirs] for ours, theirs in names.items()},
    )


def _identify(
    state: dict[str, Tensor], arch: str | None, known: Network
) -> tuple[Architecture, dict[str, str], list[str]]:
    """The network, for each of its parameters (in its order) the name in ``state``, the guesses."""
    text = arch if arch is not None else known.arch
    try:
        with torch.device("meta"):  # a claimed architecture must not allocate its size
            said = Architecture.parse(text) if text else None
            network, names = (said, match_architecture(state, said)) if said else recognise(state)
            order = list(network.build().state_dict())
    except (RuntimeError, ValueError, OverflowError, TypeError) as problem:
        raise ArchitectureError(
            f"An architecture must be one that can be built; got {text[:80]!r}.",
            "Example: --arch mlp:784-1000-1000-1.",
        ) from problem
    notes = known.assumptions if known.arch else KINDS[network.kind].assumed(network)
    guesses = [note for note in notes if note != ASSUMED_RELU or "activation=" not in text]
    return network, {name: names[name] for name in order}, guesses
