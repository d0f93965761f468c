"""The tensors of a file as layers: each weight with its bias, and the order they are applied in.

Names say which bias belongs to which weight; sorting them does not, for ``conv1.bias`` comes before
``conv1.weight`` and a file may hold either first.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

from torch import Tensor

Named = tuple[str, Tensor]


def weights_and_vectors(state: Mapping[str, Tensor]) -> tuple[list[Named], list[Named]]:
    """Tensors of two or more dimensions, and all others."""
    weights = [(name, t) for name, t in state.items() if t.ndim >= 2]
    return weights, [(name, t) for name, t in state.items() if t.ndim < 2]


def orders(weights: list[Named]) -> tuple[list[Named], list[Named]]:
    """The weights in the order of their names, matrices behind convolutions, and as in the file."""
    return sorted(weights, key=lambda named: (-named[1].ndim, natural(named[0]))), weights


def attach_vectors(order: list[Named], vectors: list[Named]) -> list[tuple[str, ...]] | None:
    """Per layer the names of its weight and its vector; None where a vector has no place.

    A vector belongs to the weight of its stem, else to that of its size.
    """
    layers: list[tuple[str, ...]] = []
    rest = dict(vectors)
    for i, (name, weight) in enumerate(order):
        stem = name.removesuffix("weight")
        fits = [n for n, b in rest.items() if b.shape == weight.shape[:1]]
        own = [n for n in fits if stem != name and n == stem + "bias"]
        # By size only while nothing is left to doubt: as many as layers, or one in all.
        loose = fits if len(vectors) == len(order) or (len(vectors) == 1 and i == 0) else []
        chosen = own or sorted(loose, key=natural)[:1]
        for vector in chosen:
            del rest[vector]
        layers.append((name, *chosen))
    return None if rest else layers


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key in which layer10 comes after layer2."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts]


def find_chain(state: Mapping[str, Tensor]) -> list[tuple[str, ...]] | None:
    """The layers of an MLP, each by the names of its weight and its bias; None for other tensors.

    Layer names differ between projects and safetensors files lose the order, so the chain
    d -> h_1 -> ... -> C is found from shapes: in the order of the names, in the order of the file, and
    last by search, which must have one answer.
    """
    weights, vectors = weights_and_vectors(state)
    if weights and all(w.ndim == 2 for _, w in weights):
        for order in (*orders(weights), *_chains(weights)):
            layers = attach_vectors(order, vectors) if _is_chain(order) else None
            if layers is not None:
                return layers
    return None


def _is_chain(order: Iterable[Named]) -> bool:
    shapes = [w.shape for _, w in order]
    return all(a[0] == b[1] for a, b in itertools.pairwise(shapes))


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
