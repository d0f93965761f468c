"""Read the network in a model file, and write networks as safetensors files.

A file may come from a hostile author, so everything that the file claims is checked (:mod:`.release`). The
weights become a clean state dict: names without the prefixes of wrappers such as DataParallel, and tensors
that are dense, real and finite and share no memory.

Written files also describe the network in their metadata: plain strings that any safetensors reader can show.
The metadata key ``FORMAT_KEY`` marks files that residuum wrote.
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

# Largest size of a file in bytes. A machine with 16 GB of memory can hold a file of this size twice.
DEFAULT_MAX_BYTES = 8 << 30
SAVE_WEIGHTS = (
    "Save the weights with torch.save(model.state_dict(), path), or as safetensors: "
    "safetensors.numpy.save_file({name: array, ...}, path)."
)
USE_TREES = "Run residuum scan on the file, which reports what its trees store."
# Kinds of files that residuum can scan but not load as a network, each with a description and a remedy.
UNREADABLE_KINDS = {
    "torchscript": (
        "a TorchScript program",
        "If you trust the program, save its weights alone: "
        "torch.save(torch.jit.load(path).state_dict(), 'weights.pt').",
    ),
    "onnx": ("an ONNX graph", SAVE_WEIGHTS),
    "xgboost": ("a model of XGBoost, which has trees and no network", USE_TREES),
    "lightgbm": ("a model of LightGBM, which has trees and no network", USE_TREES),
    "catboost": ("a model of CatBoost, which has trees and no network", USE_TREES),
    "pickle": ("a pickle that was not written by torch.save", SAVE_WEIGHTS),
    "skops": ("a file of skops without a neural network", SAVE_WEIGHTS),
}


def load_checkpoint(
    path: str | Path | Release,
    arch: str | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Network:
    """Read the network in a file, or in ``model.safetensors`` of a run directory.

    Nothing in the file is executed.

    Args:
        path: The file or run directory, or a release (a model file that was opened before).
        arch: Architecture string. If it is None, the metadata of the file determine the architecture, or
            else the shapes of the tensors.
        input_shape: Shape of one sample.
        max_bytes: Largest size of the file, and of the memory that it claims, in bytes.

    Returns:
        The network with its weights.

    Raises:
        CheckpointError: If the file holds no network that residuum can read.
        UnsafeFileError: If loading the file would run code, or if it asks for too much memory.
    """
    release = open_release(path, max_bytes)
    if release.size > max_bytes:
        raise UnsafeFileError(
            f"A file with a network may have at most {max_bytes} bytes; the file {release.path.name!r} "
            f"has {release.size} bytes.",
            "If the model is this large, pass a larger limit max_bytes.",
        )
    if release.kind in ("pickle", "skops") and (network := read_estimator(release)) is not None:
        return (
            network if arch is None else _read_network(dict(network.theta), NO_METADATA, arch=arch)
        )
    if release.kind not in ("torch", "safetensors"):
        what, remedy = UNREADABLE_KINDS.get(release.kind, UNREADABLE_KINDS["pickle"])
        raise CheckpointError(
            "A network is read from a safetensors file or a file of torch.save; the file "
            f"{release.path.name!r} is {what}.",
            remedy,
        )
    metadata = decode_metadata(release.metadata)
    return _read_network(release.content, metadata, release.size, arch, input_shape)


def as_network(
    model: Network | nn.Module | Mapping[str, Any] | str | Path | Any,
    arch: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Network:
    """Convert a model in any supported form to a network.

    Args:
        model: A network, a live module, a state dict, a fitted MLP of scikit-learn, a release, or the
            path of a file.
        arch: Architecture string for a file or a state dict.
        shape: Shape of one sample, for a live module that does not show this shape.

    Returns:
        The network.

    Raises:
        CheckpointError: If the model has none of these forms.
    """
    if isinstance(model, Network):
        return model
    if isinstance(model, nn.Module):
        return checkpoint_from_module(model, fallback_shape=shape)
    if isinstance(model, str | Path | Release):
        return load_checkpoint(model, arch)
    if isinstance(model, Mapping):
        return _read_network(dict(model), NO_METADATA, arch=arch)
    if hasattr(model, "coefs_") and hasattr(model, "intercepts_"):
        return convert_estimator(model)
    raise CheckpointError(
        "A model must be a Network of residuum, a torch module, its state_dict(), a fitted MLPClassifier "
        "or MLPRegressor of scikit-learn, or the path of a file; got an object of type "
        f"{type(model).__name__}.",
        "If the model is a torch module, pass model.state_dict().",
    )


def save_checkpoint(checkpoint: Network, path: str | Path) -> Path:
    """Write a network as a safetensors file. Equal networks produce identical files.

    The file is written atomically, so an interruption leaves no incomplete file.

    Args:
        checkpoint: The network.
        path: The file to write.

    Returns:
        The path.

    Example:
        >>> import residuum as rs
        >>> rs.save_checkpoint(network, "model.safetensors")  # doctest: +SKIP
    """
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in checkpoint.theta.items()}
    return write_atomic(path, sort_header(save(tensors, encode_metadata(checkpoint))))


def _read_network(
    content: Any,
    metadata: Network,
    size: int | None = None,
    arch: str | None = None,
    input_shape: tuple[int, ...] | None = None,
) -> Network:
    """Return the network whose weights are stored in ``content``.

    Args:
        content: The content of a file, or a state dict in memory.
        metadata: What the metadata of the file say, as a network without weights.
        size: Size of the file in bytes, None for a state dict in memory.
        arch: Architecture string that the user passed, or None.
        input_shape: Shape of one sample that the user passed, or None.

    Returns:
        The network.
    """
    state, file_names, conversion_notes = clean_state(find_state(content), size)
    architecture, names, assumptions = _identify(state, arch, metadata)
    shape = metadata.input_shape if input_shape is None else input_shape
    return metadata.replace(
        theta={name: state[clean_name] for name, clean_name in names.items()},
        arch=architecture,
        input_shape=check_input_shape(architecture, shape),
        assumptions=(*assumptions, *conversion_notes),
        source_names={name: file_names[clean_name] for name, clean_name in names.items()},
    )


def _identify(
    state: dict[str, Tensor], arch: str | None, metadata: Network
) -> tuple[Architecture, dict[str, str], list[str]]:
    """Return the architecture of a state dict, the tensor of each parameter, and notes on assumptions."""
    arch_text = arch if arch is not None else metadata.arch
    try:
        # A hostile file can claim a huge architecture. On the device "meta", building it allocates no memory.
        with torch.device("meta"):
            claimed_architecture = Architecture.parse(arch_text) if arch_text else None
            architecture_and_names = (
                (claimed_architecture, match_architecture(state, claimed_architecture))
                if claimed_architecture
                else recognize(state)
            )
            architecture, names = architecture_and_names
            parameter_names = list(architecture.build().state_dict())
    except (RuntimeError, ValueError, OverflowError, TypeError) as problem:
        raise ArchitectureError(
            "An architecture string must describe a network that residuum can build; got "
            f"{arch_text[:80]!r}.",
            "Example: --arch mlp:784-1000-1000-1.",
        ) from problem
    all_assumptions = (
        metadata.assumptions
        if metadata.arch
        else KINDS[architecture.kind].assumptions(architecture)
    )
    assumptions = [
        note for note in all_assumptions if note != ASSUMED_RELU or "activation=" not in arch_text
    ]
    return architecture, {name: names[name] for name in parameter_names}, assumptions
