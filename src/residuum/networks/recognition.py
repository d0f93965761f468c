"""From a bare state dict to a network: MLPs are recognised by the shapes of their tensors.

Layer names differ between projects and safetensors files lose the order, so the chain
d -> h_1 -> ... -> C is found from shapes: in the order of the names, in the order of the file, and
last by search, which must have one answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from torch import Size, Tensor

from residuum.errors import ArchitectureError, CheckpointError
from residuum.networks.architecture import Architecture
from residuum.networks.layers import Named, attach_vectors, orders, weights_and_vectors
from residuum.networks.modules import bias_rule
from residuum.networks.obstacles import holdings, remedy, unreadable


def recognise_mlp(state: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, str]]:
    """The MLP whose tensors these are, and for each of our parameter names the file's name."""
    weights, vectors = weights_and_vectors(state)
    if weights and all(w.ndim == 2 for _, w in weights):
        for order in (*orders(weights), *_chains(weights)):
            layers = attach_vectors(order, vectors) if _is_chain(order) else None
            if layers is not None:
                widths = (order[0][1].shape[1], *(w.shape[0] for _, w in order))
                bias = bias_rule([len(layer) == 2 for layer in layers])
                names = {
                    f"layers.{i}.{ours}": theirs
                    for i, layer in enumerate(layers)
                    for ours, theirs in zip(("weight", "bias"), layer, strict=False)
                }
                return Architecture("mlp", widths, bias=bias), names
    raise unreadable(state)


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
        found, _ = recognise_mlp(state)
    except CheckpointError:
        got, advice = f"hold {holdings(state)}", remedy(state)
    else:
        got, advice = f"are those of {found}", f"Use --arch {found}, or leave it out."
    return ArchitectureError(f"The weights must fit the architecture {arch}; they {got}.", advice)


def _is_chain(order: Iterable[Named]) -> bool:
    shapes = [w.shape for _, w in order]
    return all(a[0] == b[1] for a, b in itertools.pairwise(shapes))


def _by_shape(weights: list[Named], shapes: list[Size]) -> list[list[Named]]:
    """The one order of the weights that has these shapes; empty where two could be swapped."""
    of_shape = {w.shape: (name, w) for name, w in weights}
    if not len(of_shape) == len(weights) == len(shapes) or of_shape.keys() != {*shapes}:
        return []
    return [[of_shape[shape] for shape in shapes]]


def _chains(weights: list[Named], limit: int = 2) -> list[list[Named]]:
    """Every order of the weights that forms a chain; empty when there are several."""
    found: list[list[Named]] = []

    def extend(chain: list[Named], rest: list[Named]) -> None:
        if len(found) >= limit:
            return
        if not rest:
            found.append(chain)
        for i, candidate in enumerate(rest):
            if not chain or chain[-1][1].shape[0] == candidate[1].shape[1]:
                extend([*chain, candidate], rest[:i] + rest[i + 1 :])

    # Two weights of one shape can be swapped, so no order is the only one: nothing to search.
    if len(weights) <= 12 and len({w.shape for _, w in weights}) == len(weights):
        extend([], weights)
    return found if len(found) == 1 else []
