"""From a bare state dict to a network: which kind's tensors these are, and which is which."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import Size, Tensor

from residuum.errors import ArchitectureError, CheckpointError
from residuum.networks.kinds import KINDS, Architecture
from residuum.networks.layers import Named, attach_vectors, orders, weights_and_vectors
from residuum.networks.obstacles import holdings, remedy, unreadable


def recognise(state: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, str]]:
    """The network whose tensors these are, and for each of our parameter names the file's name."""
    found = (kind.recognise(state) for kind in KINDS.values())
    known = next((one for one in found if one is not None), None)
    if known is None:
        raise unreadable(state)
    return known


def match_architecture(state: Mapping[str, Tensor], arch: Architecture) -> dict[str, str]:
    """For each parameter name of ``arch`` the name in ``state`` that holds it."""
    wanted = arch.build().state_dict()
    if {name: t.shape for name, t in state.items()} == {n: t.shape for n, t in wanted.items()}:
        return {name: name for name in wanted}
    ours = attach_vectors(*weights_and_vectors(wanted)) or []
    shapes = [wanted[layer[0]].shape for layer in ours]
    weights, vectors = weights_and_vectors(state)
    for order in (*orders(weights), *_by_shape(weights, shapes)):
        theirs = attach_vectors(order, vectors) if [w.shape for _, w in order] == shapes else None
        if theirs and [*map(len, ours)] == [*map(len, theirs)]:
            return dict(zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True))
    raise _misfit(state, arch)


def _misfit(state: Mapping[str, Tensor], arch: Architecture) -> ArchitectureError:
    try:
        found, _ = recognise(state)
    except CheckpointError:
        got, advice = f"hold {holdings(state)}", remedy(state)
    else:
        got, advice = f"are those of {found}", f"Use --arch {found}, or leave it out."
    return ArchitectureError(f"The weights must fit the architecture {arch}; they {got}.", advice)


def _by_shape(weights: list[Named], shapes: list[Size]) -> list[list[Named]]:
    """The one order of the weights that has these shapes; empty where two could be swapped."""
    of_shape = {w.shape: (name, w) for name, w in weights}
    if not len(of_shape) == len(weights) == len(shapes) or of_shape.keys() != {*shapes}:
        return []
    return [[of_shape[shape] for shape in shapes]]
