"""Attack surfaces: things in a release on which a sum over training samples must equal a target.

    target = sum_i grad_theta <u_i, Phi(theta; x_i)>

===============  ===============  =================================================================
surface          target           why the target is such a sum
===============  ===============  =================================================================
weights          theta            in the limit: training has converged (KKT, weight decay)
weights - start  theta - theta0   every training step added gradients at the samples
moment           m                momentum and Adam keep a mean of the last gradients
===============  ===============  =================================================================

An attack that finds nothing is evidence of absence only if it fits the layers that carry information.
If the initial weights are known, these are the layers that moved by more than rounding. A frozen layer
has a gradient that training did not follow, so no candidate has to fit it. If the first layer itself was
frozen, the network saw the inputs only through fixed features, and many images share one feature. Fitting
the layers above then says little about images. If the initial weights are not known, only the first layer
is known to have moved far. The other layers are measured and not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from residuum.errors import InputError, require_known
from residuum.networks import MLP
from residuum.networks.network import Network
from residuum.records import Knowledge
from residuum.stationarity import Theta, by_layer, moved_layers

WEIGHTS, CHANGE, MOMENT = "weights", "weights - start", "moment"


@dataclass(frozen=True, eq=False)
class Surface:
    """One thing in a release that training samples left their trace in.

    checkpoint: the weights at which gradients are taken, and the network they belong to.
    target: by parameter name, in their numbers.
    layers: those that carry information.
    """

    name: str
    checkpoint: Network
    target: Theta
    layers: tuple[str, ...]

    @property
    def equations(self) -> tuple[str, ...]:
        """Layers in which the sum must equal the target: those that moved, or that kept a moment."""
        if self.name == MOMENT:
            own = by_layer(self.target).items()
            return tuple(layer for layer, names in own if any(self.target[n].any() for n in names))
        return self.layers if self.name == CHANGE else tuple(by_layer(self.target))

    @property
    def chain(self) -> MLP | None:
        """The network if it is a chain of dense layers, else None."""
        return self.checkpoint.chain

    def model(self) -> nn.Module:
        """Return a copy of the network with these weights. The caller may change it."""
        return self.checkpoint.copy_module()

    @property
    def outputs(self) -> int:
        """Of the network."""
        return self.checkpoint.architecture.outputs

    @property
    def task(self) -> str:
        """Of the network."""
        return self.checkpoint.inferred_task

    def shape(self, knowledge: Knowledge) -> tuple[int, ...]:
        """Of one sample."""
        return self.checkpoint.sample_shape(knowledge)


def build_weights_surface(checkpoint: Network, knowledge: Knowledge) -> Surface:
    """The weights themselves."""
    target = {name: t.detach() for name, t in checkpoint.theta.items()}
    # Which layer of a network kept as given meets the input is not known: none may be left out.
    first = tuple(by_layer(target))[: 1 if checkpoint.live is None else None]
    if knowledge.theta0 is None:
        return Surface(WEIGHTS, checkpoint, target, first)
    moved = _find_moved_layers(checkpoint, knowledge.theta0)
    return Surface(WEIGHTS, checkpoint, target, moved)


def build_update_surface(checkpoint: Network, knowledge: Knowledge) -> Surface:
    """What training added to the start that was granted."""
    if (start := knowledge.theta0) is None:
        raise InputError(
            "The change of the weights needs the initial weights theta0; none were granted.",
            "Pass --init init.safetensors, or use another attack.",
        )
    whole = build_weights_surface(checkpoint, knowledge)
    if not whole.layers:
        raise InputError(
            "An attack on the change of the weights explains how far they moved; these equal the "
            "start that was granted.",
            "Grant the weights before training, not those after it.",
        )
    target = {name: t - start[name].to(t) for name, t in whole.target.items()}
    return Surface(CHANGE, checkpoint, target, whole.layers)


def build_moment_surface(checkpoint: Network, knowledge: Knowledge) -> Surface:
    """What the optimizer kept of the gradients."""
    if (kept := knowledge.moment) is None:
        raise InputError(
            "The moment of an optimizer must be in the file or handed over; there is none.",
            "Give the training checkpoint, or Knowledge(moment=rs.read_moment(optimizer, model)).",
        )
    shapes = {name: t.shape for name, t in checkpoint.theta.items()}
    if wrong := [name for name, t in kept.items() if t.shape != shapes.get(name)]:
        raise InputError(
            f"A moment has the names and shapes of the weights; {wrong[0]!r} has others.",
            "Grant that of the optimizer of this very network.",
        )
    # A parameter without state was frozen: nothing is asked of it.
    there = {name: kept.get(name, torch.zeros(())).expand(shapes[name]) for name in shapes}
    target = {name: t.detach().to(checkpoint.theta[name]) for name, t in there.items()}
    layers = tuple(name for name, own in by_layer(target).items() if {*own} & {*kept})
    # As of weights without a start, only the first layer of a network is judged.
    return Surface(MOMENT, checkpoint, target, layers[: 1 if checkpoint.live is None else None])


SURFACES: dict[str, Callable[[Network, Knowledge], Surface]] = {
    WEIGHTS: build_weights_surface,
    CHANGE: build_update_surface,
    MOMENT: build_moment_surface,
}


SURFACE_CHOICES = {"weights": WEIGHTS, "change": CHANGE, "moment": MOMENT}  # as a user names them


def resolve_surface(name: str, knowledge: Knowledge) -> str:
    """The surface that a user names, which must be there."""
    require_known(name, SURFACE_CHOICES, "No surface")
    missing = {"change": knowledge.theta0, "moment": knowledge.moment}
    if name in missing and missing[name] is None:
        what = "a start (--init, --base)" if name == "change" else "the state of an optimizer"
        raise InputError(f"--surface {name} needs {what}; there is none.", "Leave --surface out.")
    return SURFACE_CHOICES[name]


def build_surfaces(checkpoint: Network, knowledge: Knowledge) -> dict[str, Surface]:
    """All that a release has, with what is granted."""
    needs = {CHANGE: knowledge.theta0, MOMENT: knowledge.moment}
    names = [name for name in SURFACES if name not in needs or needs[name] is not None]
    return {name: SURFACES[name](checkpoint, knowledge) for name in names}


def _find_moved_layers(checkpoint: Network, start: Theta) -> tuple[str, ...]:
    """Layers that left a start of the same network."""
    shapes = {name: t.shape for name, t in checkpoint.theta.items()}
    if {name: t.shape for name, t in start.items()} != shapes:
        raise InputError(
            f"The initial weights must be weights of {checkpoint.arch or 'the same network'}; "
            "theirs have other names or shapes.",
            "Grant the initial weights of this very network.",
        )
    return moved_layers(checkpoint.theta, start)
