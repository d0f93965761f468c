"""From a bare state dict to a network: MLPs are recognised by the shapes of their tensors.

Layer names differ between projects and safetensors files lose the order, so the chain
d -> h_1 -> ... -> C is found from shapes: in the order of the names, in the order of the file, and
last by search, which must have one answer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from torch import Tensor

from residuum.errors import ArchitectureError, CheckpointError
from residuum.networks.architecture import Architecture
from residuum.networks.modules import BIAS_RULES

Named = tuple[str, Tensor]


def recognise_mlp(state: dict[str, Tensor]) -> tuple[Architecture, dict[str, str]]:
    """The MLP whose tensors these are, and for each of our parameter names the file's name."""
    weights = [(name, t) for name, t in state.items() if t.ndim == 2]
    biases = [(name, t) for name, t in state.items() if t.ndim == 1]
    if not weights or len(weights) + len(biases) != len(state):
        raise _unrecognised(state, "only matrices and bias vectors can form an MLP")
    for order in (sorted(weights, key=_natural), weights, *_chains(weights)):
        if _is_chain(order):
            names = _attach_biases(order, biases)
            if names is not None:
                widths = (order[0][1].shape[1], *(w.shape[0] for _, w in order))
                return Architecture("mlp", widths, bias=_bias_rule(names, len(order))), names
    raise _unrecognised(state, "the matrices and biases do not form one chain of layers")


def match_architecture(state: dict[str, Tensor], arch: Architecture) -> dict[str, str]:
    """For each parameter name of ``arch`` the name in ``state`` that holds it."""
    wanted = {name: tuple(t.shape) for name, t in arch.build().state_dict().items()}
    if {name: tuple(t.shape) for name, t in state.items()} == wanted:
        return {name: name for name in wanted}
    if arch.kind == "mlp":
        found, names = recognise_mlp(state)
        if found.widths == arch.widths and names.keys() == wanted.keys():
            return names
        got = str(found)
    else:
        ordered = sorted(((n, tuple(t.shape)) for n, t in state.items()), key=_natural)
        if [s for _, s in ordered] == list(wanted.values()):
            return dict(zip(wanted, (n for n, _ in ordered), strict=True))
        got = ", ".join(f"{name} {list(shape)}" for name, shape in ordered[:6])
    raise ArchitectureError(
        f"The weights must fit the architecture {arch}; they look like {got}.",
        "Correct --arch, or leave it out to have the shapes decide.",
    )


def _natural(item: tuple[str, object]) -> list[tuple[int, int, str]]:
    """Sort key in which layer10 comes after layer2."""
    parts = re.split(r"(\d+)", item[0])
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts]


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


def _attach_biases(order: list[Named], biases: list[Named]) -> dict[str, str] | None:
    """Our names to the file's names; a bias belongs to the weight of its stem, else of its size."""
    names = {f"layers.{i}.weight": name for i, (name, _) in enumerate(order)}
    rest = dict(biases)
    for i, (name, weight) in enumerate(order):
        stem = name.removesuffix("weight")
        fits = [n for n, b in rest.items() if len(b) == weight.shape[0]]
        own = [n for n in fits if stem != name and n == stem + "bias"]
        # By size only while nothing is left to doubt: as many biases as layers, or one bias in all.
        loose = fits if len(biases) == len(order) or (len(biases) == 1 and i == 0) else []
        if own or loose:
            chosen = own[0] if own else min(loose, key=lambda n: _natural((n, None)))
            names[f"layers.{i}.bias"] = chosen
            del rest[chosen]
    return None if rest else names


def _bias_rule(names: dict[str, str], depth: int) -> str:
    has = tuple(f"layers.{i}.bias" in names for i in range(depth))
    for rule, applies in BIAS_RULES.items():
        if has == tuple(applies(i, depth) for i in range(depth)):
            return rule
    raise ArchitectureError(
        f"Biases must follow one of the rules {', '.join(BIAS_RULES)}; this network has them in "
        f"layers {[i for i, b in enumerate(has) if b]} of {depth}.",
        "Pass the module itself through the Python API.",
    )


def _unrecognised(state: dict[str, Tensor], why: str) -> CheckpointError:
    shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in list(state.items())[:6])
    return CheckpointError(
        f"The network cannot be guessed from its weights: {why} ({shapes}).",
        "Name it: --arch mlp:784-1000-1000-1.",
    )
