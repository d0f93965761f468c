"""The tensors of a file as layers: each weight with its bias.

Names say which bias belongs to which weight; sorting them does not, for ``conv1.bias`` comes before
``conv1.weight`` and a file may hold either first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
