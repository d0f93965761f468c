"""Load weights into a network that user code defines.

A file of weights has no ``forward``. If no architecture string describes the network, user code can define
the network: ``package.module:factory``. Importing this code runs it, so the caller must state that the code
is trusted.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from residuum.errors import CheckpointError, InputError, UnsafeFileError
from residuum.io.inert import Block
from residuum.io.modules import checkpoint_from_module
from residuum.io.release import Release, open_release
from residuum.io.state_dicts import find_state, strip_prefixes
from residuum.networks.network import Network

FACTORY_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def load_with_code(
    path: str | Path | Release, factory: str, shape: tuple[int, ...] | None, *, trusted: bool
) -> Network:
    """Load the weights of a file into the network that user code makes.

    Args:
        path: The file, or the release that was read from it.
        factory: ``package.module:name`` of a class or function without arguments, or of a network. Python
            searches the working folder first, then its usual path.
        shape: Shape of one sample, None if the first layer shows this shape.
        trusted: Whether the user trusts this code, which is imported and run.

    Returns:
        The network with the weights of the file.
    """
    network = build_network(factory, trusted=trusted)
    network.load_state_dict(_read_fitting_state(path, network))
    return checkpoint_from_module(network, fallback_shape=shape)


def read_live_weights(path: str | Path | Release, checkpoint: Network) -> dict[str, Tensor]:
    """Read weights for a network that runs a module in memory, from a file with the state dict of the module.

    Args:
        path: The file, or the release that was read from it.
        checkpoint: The network, which runs a live module (a module in memory).

    Returns:
        The weights in the file by parameter name.
    """
    assert checkpoint.live is not None
    network = copy.deepcopy(checkpoint.live)
    network.load_state_dict(_read_fitting_state(path, network))
    return {name: p.detach().cpu() for name, p in network.named_parameters()}


def build_network(factory: str, *, trusted: bool) -> nn.Module:
    """Import user code and return the network that it makes.

    Args:
        factory: ``package.module:name`` of a class or function without arguments, or of a network.
        trusted: Whether the user trusts this code.

    Returns:
        The network.

    Raises:
        InputError: If the code cannot be imported, fails, or makes no network.
        UnsafeFileError: If the code is not trusted.
    """
    if not FACTORY_NAME.fullmatch(factory):
        raise InputError(
            "The option --model takes the name of a function, as package.module:function; got "
            f"{factory[:80]!r}.",
            "Example: --model mynet.models:build --trust-code.",
        )
    if not trusted:
        raise UnsafeFileError(
            f"The option --model runs the code of {factory!r}; this needs the option --trust-code.",
            "Read the code. If you trust the code, add --trust-code.",
        )
    module_name, _, name = factory.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        imported_object: Any = importlib.import_module(module_name)
        for attribute in name.split("."):
            imported_object = getattr(imported_object, attribute)
        network = imported_object if isinstance(imported_object, nn.Module) else imported_object()
    except Exception as problem:  # user code may raise any exception
        raise InputError(
            f"The function that --model names ({factory}) must return a network; it raised "
            f"{type(problem).__name__}: {(str(problem) or 'no message').splitlines()[0][:200]}",
            "Name a function that can be called without arguments and returns the network.",
        ) from problem
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(network, nn.Module):
        raise InputError(
            f"The function that --model names ({factory}) must return a torch.nn.Module; it returned a "
            f"{type(network).__name__}.",
            "Change the function so that it returns the network.",
        )
    return network


def _read_fitting_state(path: str | Path | Release, network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a file, including buffers. Raise an error if they do not fit the network."""
    state = find_state(open_release(path).content)
    clean_names = strip_prefixes(list(state))
    tensors = {
        clean_names[name]: value.tensor() if isinstance(value, Block) else value
        for name, value in state.items()
    }
    expected = network.state_dict()
    missing = sorted(expected.keys() - tensors.keys())
    additional = sorted(tensors.keys() - expected.keys())
    common_names = sorted(expected.keys() & tensors.keys())
    misshapen = [name for name in common_names if tensors[name].shape != expected[name].shape]
    names_by_fault = {"lack": missing, "also hold": additional, "have another shape for": misshapen}
    for fault, names in names_by_fault.items():
        if names:
            raise CheckpointError(
                f"The weights must fit the network that the code of --model makes; these weights {fault} "
                f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}.",
                "Pass a function that makes the network with the same settings as in training.",
            )
    return tensors
