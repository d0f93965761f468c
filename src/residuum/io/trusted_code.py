"""Load weights into a network that user code defines.

A file of weights has no ``forward``. If no architecture string describes the network, user code can
define it: ``package.module:factory``. Importing that code runs it, so the caller must say that it is trusted.
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
    """The weights in a file, in the network that ``factory`` makes.

    factory: ``package.module:name`` of a class or function that needs no arguments, or of a
        network, found as Python finds modules, from the working folder first.
    shape: of one sample.
    """
    network = build_network(factory, trusted=trusted)
    network.load_state_dict(_read_fitting_state(path, network))
    return checkpoint_from_module(network, fallback_shape=shape)


def load_into_copy(path: str | Path | Release, checkpoint: Network) -> dict[str, Tensor]:
    """Initial weights of a network that is kept as given, from a file of its state dict."""
    assert checkpoint.live is not None
    network = copy.deepcopy(checkpoint.live)
    network.load_state_dict(_read_fitting_state(path, network))
    return {name: p.detach().cpu() for name, p in network.named_parameters()}


def build_network(factory: str, *, trusted: bool) -> nn.Module:
    """What the factory makes."""
    if not FACTORY_NAME.fullmatch(factory):
        raise InputError(
            f"--model names code as package.module:factory; got {factory[:80]!r}.",
            "Example: --model mynet.models:build --trust-code.",
        )
    if not trusted:
        raise UnsafeFileError(
            f"--model imports and runs the code of {factory!r}, and nobody said that it is trusted.",
            "Read it, then add --trust-code.",
        )
    place, _, name = factory.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(place)
        for part in name.split("."):
            found = getattr(found, part)
        network = found if isinstance(found, nn.Module) else found()
    except Exception as problem:  # code of somebody's own may raise anything
        raise InputError(
            f"--model {factory} must make a network; it says: {type(problem).__name__}: "
            f"{(str(problem) or 'nothing').splitlines()[0][:200]}",
            "Name a function that needs no arguments and returns the network.",
        ) from problem
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(network, nn.Module):
        raise InputError(
            f"--model {factory} must make a torch.nn.Module; it made a {type(network).__name__}.",
            "Return the network itself.",
        )
    return network


def _read_fitting_state(path: str | Path | Release, network: nn.Module) -> dict[str, Tensor]:
    """The file's tensors under the network's names, buffers too, or what does not fit."""
    state = find_state(open_release(path).content)
    short = strip_prefixes(list(state))
    own = {
        short[name]: value.tensor() if isinstance(value, Block) else value
        for name, value in state.items()
    }
    wanted = network.state_dict()
    missing, beyond = sorted(wanted.keys() - own.keys()), sorted(own.keys() - wanted.keys())
    both = sorted(wanted.keys() & own.keys())
    other = [name for name in both if own[name].shape != wanted[name].shape]
    faults = {"lack": missing, "hold besides": beyond, "have another shape of": other}
    for what, names in faults.items():
        if names:
            raise CheckpointError(
                f"The weights must be those of the network that --model makes; they {what} "
                f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}.",
                "Name the factory with the settings that the network was trained with.",
            )
    return own
