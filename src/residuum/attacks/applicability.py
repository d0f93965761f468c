"""Which attacks fit a network, and why the others do not. Needs no data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """What decides: the kind of network, its outputs, its homogeneity order, theta0 at hand or not."""

    kind: str
    outputs: int
    order: float | None
    has_init: bool
    task: str = ""


@dataclass(frozen=True)
class Applicability:
    """One attack's answer; the reason is filled either way."""

    attack: str
    applies: bool
    reason: str


def applicability(facts: Facts) -> tuple[Applicability, ...]:
    """One answer per attack, in the order of ``RULES``."""
    return tuple(Applicability(name, *rule(facts)) for name, rule in RULES.items())


Answer = tuple[bool, str]


def _binary(facts: Facts) -> Answer:
    if facts.outputs != 1:
        return False, f"needs one output; this network has {facts.outputs}"
    if facts.task == "regression":
        return False, "needs a classifier; this network is a regression"
    return True, _homogeneity(facts)


def _multiclass(facts: Facts) -> Answer:
    if facts.outputs < 2:
        return False, f"needs two or more outputs; this network has {facts.outputs}"
    if facts.task == "regression":
        return False, "needs a classifier; this network is a regression"
    return True, _homogeneity(facts)


def _homogeneity(facts: Facts) -> str:
    if facts.order is None:
        return "not homogeneous: the KKT theorem does not cover it, published attacks still worked"
    return f"homogeneous of order {facts.order:g}: training to zero loss leads to a KKT point"


def _regression(facts: Facts) -> Answer:
    return True, "sound when the network was trained with weight decay"


def _ntk(facts: Facts) -> Answer:
    if not facts.has_init:
        return False, "needs the initial weights; grant them with --init"
    return True, "initial weights are at hand"


def _polynomial(facts: Facts) -> Answer:
    if facts.kind != "polynomial":
        return False, f"needs a polynomial network, not {facts.kind}"
    return True, "`residuum identify`: exact where its rank condition holds, which it reports"


def _always(facts: Facts) -> Answer:
    return True, "baseline"


RULES: dict[str, Callable[[Facts], Answer]] = {
    "binary-kkt": _binary,
    "multiclass-kkt": _multiclass,
    "weight-decay": _regression,
    "ntk": _ntk,
    "polynomial": _polynomial,
    "model-inversion": _always,
    "first-layer-weights": _always,
}
