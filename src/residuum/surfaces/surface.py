"""Attack surfaces: tensors of a release that equal a sum over the training samples.

    target = sum_i grad_theta <u_i, Phi(theta; x_i)>

===============  ===============  =================================================================
surface          target           why the target is such a sum
===============  ===============  =================================================================
weights          theta            in the limit: training has converged (KKT, weight decay)
weights - start  theta - theta0   every training step added gradients at the samples
moment           m                momentum and Adam store a mean of recent gradients
===============  ===============  =================================================================

If an attack finds nothing, this is evidence of absence only if the attack fits the layers that carry
information. If the initial weights are known, these are the layers that moved by more than rounding.
Training did not follow the gradient of a frozen layer, so no candidate has to fit it. If the first layer
was frozen, the network saw the inputs only through fixed features, and many images share one feature.
Fitting the layers above then says little about images. If the initial weights are not known, only the first
layer is known to have moved far. The other layers are measured, but not judged.
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
    """An attack surface of one release.

    Attributes:
        name: A key of ``SURFACES``.
        checkpoint: The network, with the weights at which gradients are taken.
        target: The target of the sum by parameter name, in the dtype of the weights.
        layers: Names of the layers that carry information.
    """

    name: str
    checkpoint: Network
    target: Theta
    layers: tuple[str, ...]

    @property
    def equations(self) -> tuple[str, ...]:
        """Layers in which the sum must equal the target: those that moved or have a moment."""
        if self.name == MOMENT:
            layers = by_layer(self.target).items()
            return tuple(
                layer for layer, names in layers if any(self.target[n].any() for n in names)
            )
        return self.layers if self.name == CHANGE else tuple(by_layer(self.target))

    @property
    def chain(self) -> MLP | None:
        """The network as a chain of dense layers, None if it is not such a chain."""
        return self.checkpoint.chain

    def copy_module(self) -> nn.Module:
        """Return a copy of the network with these weights. The caller may change it."""
        return self.checkpoint.copy_module()

    @property
    def outputs(self) -> int:
        """Number of outputs of the network."""
        return self.checkpoint.architecture.outputs

    @property
    def task(self) -> str:
        """Task of the network, such as "multiclass"."""
        return self.checkpoint.inferred_task

    def sample_shape(self, knowledge: Knowledge) -> tuple[int, ...]:
        """Return the shape of one sample."""
        return self.checkpoint.sample_shape(knowledge)


def build_weights_surface(checkpoint: Network, knowledge: Knowledge) -> Surface:
    """Build the surface of the weights themselves.

    Args:
        checkpoint: The network.
        knowledge: What the attacker knows. The initial weights determine which layers moved.

    Returns:
        The surface.
    """
    target = {name: t.detach() for name, t in checkpoint.theta.items()}
    # For a network that is run as it is, we do not know which layer receives the input, so we take all.
    first = tuple(by_layer(target))[: 1 if checkpoint.live is None else None]
    if knowledge.theta0 is None:
        return Surface(WEIGHTS, checkpoint, target, first)
    moved = _find_moved_layers(checkpoint, knowledge.theta0)
    return Surface(WEIGHTS, checkpoint, target, moved)


def build_update_surface(checkpoint: Network, knowledge: Knowledge) -> Surface:
    """Build the surface of the weight update W - W0.

    Args:
        checkpoint: The network.
        knowledge: What the attacker knows, with the initial weights.

    Returns:
        The surface.

    Raises:
        InputError: If the initial weights are not known, do not fit, or equal the weights.
    """
    if (theta0 := knowledge.theta0) is None:
        raise InputError(
            "The weight update needs the initial weights theta0; they are not known to the attacker.",
            "Pass --init init.safetensors, or use another attack.",
        )
    surface = build_weights_surface(checkpoint, knowledge)
    if not surface.layers:
        raise InputError(
            "An attack on the weight update needs weights that moved; these equal the initial weights.",
            "Pass the weights before training, not those after it.",
        )
    target = {name: t - theta0[name].to(t) for name, t in surface.target.items()}
    return Surface(CHANGE, checkpoint, target, surface.layers)


def build_moment_surface(checkpoint: Network, knowledge: Knowledge) -> Surface:
    """Build the surface of the mean of recent gradients that the optimizer stores.

    Args:
        checkpoint: The network.
        knowledge: What the attacker knows, with the optimizer state.

    Returns:
        The surface.

    Raises:
        InputError: If the optimizer state is not known, or does not fit the network.
    """
    if (moments := knowledge.moment) is None:
        raise InputError(
            "This attack needs optimizer state, from the file or as attacker knowledge; there is none.",
            "Pass the training checkpoint, or Knowledge(moment=rs.read_moment(optimizer, model)).",
        )
    shapes = {name: t.shape for name, t in checkpoint.theta.items()}
    if wrong := [name for name, t in moments.items() if t.shape != shapes.get(name)]:
        raise InputError(
            f"A moment must have the names and shapes of the weights; {wrong[0]!r} does not.",
            "Pass the state of the optimizer that trained this network.",
        )
    # A parameter without state was frozen. Its target is zero.
    padded = {name: moments.get(name, torch.zeros(())).expand(shapes[name]) for name in shapes}
    target = {name: t.detach().to(checkpoint.theta[name]) for name, t in padded.items()}
    layers = tuple(layer for layer, names in by_layer(target).items() if {*names} & {*moments})
    # Only the first layer of a network is judged, as for weights without known initial weights.
    return Surface(MOMENT, checkpoint, target, layers[: 1 if checkpoint.live is None else None])


SURFACES: dict[str, Callable[[Network, Knowledge], Surface]] = {
    WEIGHTS: build_weights_surface,
    CHANGE: build_update_surface,
    MOMENT: build_moment_surface,
}


SURFACE_CHOICES = {"weights": WEIGHTS, "change": CHANGE, "moment": MOMENT}  # names that users type


def resolve_surface(name: str, knowledge: Knowledge) -> str:
    """Return the surface that a user names.

    Args:
        name: A key of ``SURFACE_CHOICES``.
        knowledge: What the attacker knows.

    Returns:
        The key of ``SURFACES``.

    Raises:
        InputError: If there is no such surface, or the attacker does not know enough for it.
    """
    require_known(name, SURFACE_CHOICES, "No surface")
    missing = {"change": knowledge.theta0, "moment": knowledge.moment}
    if name in missing and missing[name] is None:
        what = "initial weights (--init, --base)" if name == "change" else "optimizer state"
        raise InputError(
            f"--surface {name} needs {what}; none are known to the attacker.", "Omit --surface."
        )
    return SURFACE_CHOICES[name]


def build_surfaces(checkpoint: Network, knowledge: Knowledge) -> dict[str, Surface]:
    """Build every surface of a release for which the attacker knows enough.

    Args:
        checkpoint: The network.
        knowledge: What the attacker knows.

    Returns:
        The surfaces by name, in the order of ``SURFACES``.
    """
    needs = {CHANGE: knowledge.theta0, MOMENT: knowledge.moment}
    names = [name for name in SURFACES if name not in needs or needs[name] is not None]
    return {name: SURFACES[name](checkpoint, knowledge) for name in names}


def _find_moved_layers(checkpoint: Network, theta0: Theta) -> tuple[str, ...]:
    """Return the layers whose weights differ from the initial weights ``theta0``."""
    shapes = {name: t.shape for name, t in checkpoint.theta.items()}
    if {name: t.shape for name, t in theta0.items()} != shapes:
        raise InputError(
            f"The initial weights must be weights of {checkpoint.arch or 'the same network'}; "
            "these have other names or shapes.",
            "Pass the initial weights of this network.",
        )
    return moved_layers(checkpoint.theta, theta0)
