"""Read the network in a release, and write networks to files that anyone can read.

Files come from strangers, who may be hostile: every claim is checked before anything is believed
(:mod:`.release`). The weights that were read become a clean state dict: unwrapped, dense, real, finite and
in memory of their own.

Next to the weights residuum writes plain strings that any safetensors reader can show. FORMAT_KEY marks a
file as ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from residuum.errors import ArchitectureError, CheckpointError, UnsafeFileError
from residuum.io.estimators import convert_estimator, read_estimator
from residuum.io.metadata import NO_METADATA, decode_metadata, encode_metadata
from residuum.io.modules import check_input_shape, checkpoint_from_module
from residuum.io.release import Release, open_release
from residuum.io.safetensors_files import sort_header
from residuum.io.state_dicts import clean_state, find_state
from residuum.networks import (
    KINDS,
    Architecture,
    match_architecture,
    recognize,
)
from residuum.networks.kinds import ASSUMED_RELU
from residuum.networks.network import Network
from residuum.records import write_atomic

DEFAULT_MAX_BYTES = 8 << 30  # of a file: what a machine with 16 GB can hold twice
SAVE_WEIGHTS = (
    "Save the weights with torch.save(model.state_dict(), path), or as safetensors: "
    "safetensors.numpy.save_file({name: array, ...}, path)."
)
# Kinds of files that can be scanned but whose network is not read: what they are, and what to do.
NOT_READ = {
    "torchscript": (
        "a TorchScript program",
        "If you trust it, save its weights alone: "
        "torch.save(torch.jit.load(path).state_dict(), 'weights.pt').",
    ),
    "onnx": ("an ONNX graph", SAVE_WEIGHTS),
    "pickle": ("a pickle of something else", SAVE_WEIGHTS),
}


def load_checkpoint(
    path: str | Path | Release,
    arch: str | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Network:
    """Read the network in a file, or in ``model.safetensors`` of a run directory.

    Nothing in the file is ever executed.

    Args:
        path: The file, or a release that was opened before.
        arch: Architecture string. Without it the file's own metadata decide, then the shapes of the
            tensors.
        input_shape: Shape of one sample.
        max_bytes: Larger files and claims are refused.

    Returns:
        The network with its weights.

    Raises:
        CheckpointError: If the file holds no network that residuum can read.
        UnsafeFileError: If loading the file would run code, or if it asks for too much memory.
    """
    release = open_release(path, max_bytes)
    if release.size > max_bytes:
        raise UnsafeFileError(
            f"A network may have {max_bytes} bytes; {release.path.name!r} has {release.size}.",
            "Raise max_bytes for a large model.",
        )
    if release.kind == "pickle" and (network := read_estimator(release)) is not None:
        return network if arch is None else _network(dict(network.theta), NO_METADATA, arch=arch)
    if release.kind not in ("torch", "safetensors"):
        what, remedy = NOT_READ.get(release.kind, NOT_READ["pickle"])
        raise CheckpointError(
            f"A checkpoint is a safetensors file or one of torch.save; {release.path.name!r} is {what}.",
            remedy,
        )
    said = decode_metadata(release.metadata)
    return _network(release.content, said, release.size, arch, input_shape)


def as_network(
    model: Network | nn.Module | Mapping[str, Any] | str | Path | Any,
    arch: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Network:
    """Return the network of whatever a user gives.

    Args:
        model: A network, a live module, a state dict, a fitted MLP of scikit-learn, a release, or the
            path of a file.
        arch: Architecture string for a file or a state dict.
        shape: Shape of one sample, for a live module that does not show it.

    Raises:
        CheckpointError: If it is none of these.
    """
    if isinstance(model, Network):
        return model
    if isinstance(model, nn.Module):
        return checkpoint_from_module(model, fallback_shape=shape)
    if isinstance(model, str | Path | Release):
        return load_checkpoint(model, arch)
    if isinstance(model, Mapping):
        return _network(dict(model), NO_METADATA, arch=arch)
    if hasattr(model, "coefs_") and hasattr(model, "intercepts_"):
        return convert_estimator(model)
    raise CheckpointError(
        "A network is a Network, a module, its state_dict(), a fitted MLPClassifier or MLPRegressor "
        f"of scikit-learn or the path of a file; got {type(model).__name__}.",
        "Give model.state_dict().",
    )


def save_checkpoint(checkpoint: Network, path: str | Path) -> Path:
    """Write a checkpoint as safetensors, atomically; equal checkpoints give equal bytes."""
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in checkpoint.theta.items()}
    return write_atomic(path, sort_header(save(tensors, encode_metadata(checkpoint))))


def _network(
    content: Any,
    known: Network,
    size: int | None = None,
    arch: str | None = None,
    input_shape: tuple[int, ...] | None = None,
) -> Network:
    """Return the network whose weights ``content`` holds.

    Args:
        content: What a file held, or a dict that is in memory.
        known: What the file says about itself.
        size: Bytes of the file, None for a dict that is in memory.
        arch: Architecture string, if the user gave one.
        input_shape: Shape of one sample, if the user gave it.
    """
    state, source, notes = clean_state(find_state(content), size)
    architecture, names, guesses = _identify(state, arch, known)
    shape = known.input_shape if input_shape is None else input_shape
    return known.replace(
        theta={ours: state[theirs] for ours, theirs in names.items()},
        arch=architecture,
        input_shape=check_input_shape(architecture, shape),
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
            network, names = (said, match_architecture(state, said)) if said else recognize(state)
            order = list(network.build().state_dict())
    except (RuntimeError, ValueError, OverflowError, TypeError) as problem:
        raise ArchitectureError(
            f"An architecture must be one that can be built; got {text[:80]!r}.",
            "Example: --arch mlp:784-1000-1000-1.",
        ) from problem
    notes = known.assumptions if known.arch else KINDS[network.kind].assumptions(network)
    guesses = [note for note in notes if note != ASSUMED_RELU or "activation=" not in text]
    return network, {name: names[name] for name in order}, guesses
