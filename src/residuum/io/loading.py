"""Load the network that a user names by a file and, if needed, its architecture, code or base weights."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from residuum.errors import InputError
from residuum.io.adapters import load_tuned
from residuum.io.checkpoints import load_checkpoint
from residuum.io.release import Release, open_release
from residuum.io.trusted_code import load_with_code, read_live_weights
from residuum.networks.network import Network

INIT_OWN = "own"  # value of --init that selects the initial weights in the training directory
INIT_FILE = "init.safetensors"


def resolve_trained_and_base(
    checkpoint: str | Path, base: str | None, adapter: str | None
) -> tuple[Path, str | None]:
    """Return the file of the trained weights and the file of the weights before training.

    Args:
        checkpoint: The file that the user passes as the model.
        base: File of the weights before fine-tuning.
        adapter: File of an adapter (LoRA) of ``checkpoint``, which is then the base.

    Returns:
        The trained file, and the base file or None.

    Raises:
        InputError: If both ``base`` and ``adapter`` are passed.
    """
    if adapter is None:
        return Path(checkpoint), base
    if base is not None:
        raise InputError(
            "The options --base and --adapter cannot be used together: with --adapter, the checkpoint "
            "itself is the base network of the adapter.",
            "Omit --base or --adapter.",
        )
    return Path(adapter), str(checkpoint)


def load_network(
    source: str | Path | Release,
    *,
    arch: str | None = None,
    model: str | None = None,
    trust_code: bool = False,
    shape: tuple[int, ...] | None = None,
    base: str | None = None,
) -> Network:
    """Load the network in a file.

    Args:
        source: The file, or the release that was read from it.
        arch: Architecture string, if the file does not show the architecture.
        model: ``package.module:factory`` of the code that makes the network, instead of ``arch``.
        trust_code: Whether the code of ``model`` may be run.
        shape: Shape of one sample, for ``model``.
        base: If the file is an adapter, the file of the base network to which the adapter is added.

    Returns:
        The network.

    Raises:
        InputError: If both ``arch`` and ``model`` are passed.
    """
    if model is not None:
        if arch is not None:
            raise InputError(
                "The options --arch and --model cannot be used together, because the code that --model "
                "names already defines the architecture.",
                "Omit --model or --arch.",
            )
        return load_with_code(source, model, shape, trusted=trust_code)
    release = open_release(source)
    return load_checkpoint(release, arch) if base is None else load_tuned(release, base, arch)


def load_initial_weights(file: str | Path, release: Release, network: Network) -> dict[str, Tensor]:
    """Load the initial weights of a network.

    Args:
        file: File of the initial weights, or "own" for ``init.safetensors`` in the training directory of
            ``release``.
        release: The release that holds the trained weights.
        network: The trained network.

    Returns:
        The initial weights by parameter name.

    Raises:
        InputError: If "own" is passed and the training directory has no initial weights.
    """
    folder = release.path.parent
    if file == INIT_OWN:
        file = folder / INIT_FILE
        if not file.is_file():
            raise InputError(
                f"With '--init own', the initial weights are read from the file {INIT_FILE!r} in the "
                f"directory of the model; the directory {str(folder)!r} does not contain this file.",
                "Pass the path of the initial weights, as in --init init.safetensors.",
            )
    if network.live is not None:
        return read_live_weights(file, network)
    return load_checkpoint(file, network.arch).theta
