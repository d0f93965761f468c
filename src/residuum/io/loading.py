"""Load the network that a user names by a file and, if needed, its architecture, code or base weights."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from residuum.errors import InputError
from residuum.io.adapters import load_tuned
from residuum.io.checkpoints import load_checkpoint
from residuum.io.release import Release, open_release
from residuum.io.trusted_code import load_into_copy, load_with_code
from residuum.networks.network import Network

INIT_OWN = "own"  # the initial weights that a training directory holds
INIT_FILE = "init.safetensors"


def resolve_trained_and_base(
    checkpoint: str | Path, base: str | None, adapter: str | None
) -> tuple[Path, str | None]:
    """Return the file that was trained and the file of the weights that training began from.

    Args:
        checkpoint: The file that the user names first.
        base: The weights before fine-tuning.
        adapter: An adapter (LoRA) of ``checkpoint``, which is then the base.

    Raises:
        InputError: Both ``base`` and ``adapter`` are given.
    """
    if adapter is None:
        return Path(checkpoint), base
    if base is not None:
        raise InputError(
            "With --adapter the checkpoint is the base, so --base cannot be used.",
            "Leave one out.",
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
        arch: The architecture, if it cannot be read from the file.
        model: ``package.module:factory`` of the code that makes the network, in place of ``arch``.
        trust_code: Permit to run the code that ``model`` names.
        shape: Shape of one sample, for ``model``.
        base: If the file is an adapter, the weights that it is added to.

    Raises:
        InputError: Both ``arch`` and ``model`` are given, or the file and the network do not fit.
        UnsafeFileError: ``model`` is given without ``trust_code``, or reading the file is not safe.
    """
    if model is not None:
        if arch is not None:
            raise InputError(
                "--model makes the network, so --arch cannot be used.", "Leave one out."
            )
        return load_with_code(source, model, shape, trusted=trust_code)
    release = open_release(source)
    return load_checkpoint(release, arch) if base is None else load_tuned(release, base, arch)


def load_initial_weights(file: str | Path, release: Release, network: Network) -> dict[str, Tensor]:
    """Load the weights that the training of ``network`` began from.

    Args:
        file: The file of these weights, or "own" for the one in the training directory of ``release``.
        release: The release that holds the trained weights.
        network: The trained network.

    Raises:
        InputError: The file is missing, or its weights do not fit the network.
    """
    folder = release.path.parent
    if file == INIT_OWN:
        file = folder / INIT_FILE
        if not file.is_file():
            raise InputError(
                f"`--init own` needs {INIT_FILE} in a training directory; {str(folder)!r} has none.",
                "Name the file of the initial weights.",
            )
    if network.live is not None:
        return load_into_copy(file, network)
    return load_checkpoint(file, network.arch).theta
