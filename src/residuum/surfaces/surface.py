"""Attack surfaces: tensors of a model file that equal a sum of gradients at the training samples x_i.

    target = sum_i grad_theta <u_i, Phi(theta; x_i)>

Phi(theta; x) are the outputs of the network with weights theta. The vector u_i holds one factor for each
output of sample i. <., .> is the inner product, and grad_theta is the gradient for the weights.

===============  ===============  =================================================================
surface          target           why the target is such a sum
===============  ===============  =================================================================
weights          theta            holds in the limit of converged training (KKT, weight decay)
weights - start  theta - theta0   every training step added gradients at the samples
moment           mean gradient    momentum and Adam store a mean of recent gradients
update           gradient         a client of federated learning sends a gradient or a weight difference
===============  ===============  =================================================================

``theta0`` are the initial weights. KKT stands for the optimality conditions that long training approaches.
"weights - start" is the name of the weight update in result files. An update is attacked like a moment, so
its surface has the name "moment" and the label "update".

If an attack finds nothing, this is evidence of absence only if the attack fits the layers that carry
information. If the initial weights are known, these are the layers that moved by more than rounding.
Training did not follow the gradient of a frozen layer, so candidates need not fit a frozen layer. If the
first layer was frozen, the network saw the inputs only through fixed features, and many images share one
feature. Fitting the layers above then says little about images. If the initial weights are not known, only
the first layer is known to have moved far. The fit of the other layers is measured, but it is not required.
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
# Attacks treat an update like the mean gradient of an optimizer. In results, it has its own name.
UPDATE = "update"


@dataclass(frozen=True, eq=False)
class Surface:
    """An attack surface of a model file: tensors that equal a weighted sum of gradients at training samples.

    Attributes:
        name: Name of the attack surface, a key of ``SURFACES``.
        checkpoint: The network. Gradients are computed at its weights.
        target: The tensors that the weighted sum of gradients must equal, by parameter name, in the dtype of
            the weights.
        layers: Names of the layers in which the sum of gradients of an attack must equal the target. If an
            attack does not reach this in these layers, its failure does not show that the release is safe.
        label: Name of the attack surface in results, if it differs from ``name``.
        has_weights: Whether the weights of ``checkpoint`` are known. If only an update is known, they hold
            the update itself.
    """

    name: str
    checkpoint: Network
    target: Theta
    layers: tuple[str, ...]
    label: str = ""
    has_weights: bool = True

    @property
    def equations(self) -> tuple[str, ...]:
        """Names of the layers in which the weighted sum of gradients must equal the target.

        These are the layers that training moved or, for optimizer state, that have a mean gradient.
        """
        if self.name == MOMENT:
            layers = by_layer(self.target).items()
            return tuple(
                layer for layer, names in layers if any(self.target[n].any() for n in names)
            )
        return self.layers if self.name == CHANGE else tuple(by_layer(self.target))

    @property
    def chain(self) -> MLP | None:
        """The network as a chain of dense layers, or None for other networks."""
        return self.checkpoint.chain

    def copy_module(self) -> nn.Module:
        """Return a copy of the module, which the caller may change."""
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
        """Return the shape of one sample, from the attacker's knowledge or else from the network."""
        return self.checkpoint.sample_shape(knowledge)


def build_weights_surface(checkpoint: Network, knowledge: Knowledge) -> Surface:
    """Build the attack surface whose target is the weights themselves.

    Args:
        checkpoint: The network.
        knowledge: What the attacker knows. Known initial weights show which layers moved.

    Returns:
        The attack surface.
    """
    target = {name: t.detach() for name, t in checkpoint.theta.items()}
    # Without initial weights, we know only of the first layer that training moved it, so an attack must fit
    # this layer. In a live module, we do not know which layer is the first, so the attack must fit all
    # layers.
    required_layers = tuple(by_layer(target))[: 1 if checkpoint.live is None else None]
    if knowledge.theta0 is None:
        return Surface(WEIGHTS, checkpoint, target, required_layers)
    layers_that_moved = _find_moved_layers(checkpoint, knowledge.theta0)
    return Surface(WEIGHTS, checkpoint, target, layers_that_moved)


def build_update_surface(checkpoint: Network, knowledge: Knowledge) -> Surface:
    """Build the attack surface whose target is the weight update, trained weights minus initial weights.

    Args:
        checkpoint: The network.
        knowledge: What the attacker knows, which must include the initial weights.

    Returns:
        The attack surface.

    Raises:
        InputError: If the initial weights are not known, do not fit the network, or equal its weights.
    """
    if (theta0 := knowledge.theta0) is None:
        raise InputError(
            "An attack on the weight update (trained weights minus initial weights) needs the initial "
            "weights. The attacker does not know the initial weights.",
            "Pass --init init.safetensors, or use another attack.",
        )
    surface = build_weights_surface(checkpoint, knowledge)
    if not surface.layers:
        raise InputError(
            "An attack on the weight update needs weights that training changed; the trained weights equal "
            "the initial weights.",
            "As --init or --base, pass the weights before training.",
        )
    target = {name: t - theta0[name].to(t) for name, t in surface.target.items()}
    if knowledge.update is not None and knowledge.moment is not None:
        # The update itself has no rounding error of the trained weights. A gradient has the opposite sign.
        target |= {name: -t.to(target[name]) for name, t in knowledge.moment.items()}
    return Surface(CHANGE, checkpoint, target, surface.layers)


def build_moment_surface(checkpoint: Network, knowledge: Knowledge) -> Surface:
    """Build the attack surface whose target is the mean of recent gradients in the optimizer state.

    Args:
        checkpoint: The network.
        knowledge: What the attacker knows, which must include the optimizer state.

    Returns:
        The attack surface.

    Raises:
        InputError: If the optimizer state is not known, or does not fit the network.
    """
    if (moments := knowledge.moment) is None:
        raise InputError(
            "This attack needs the optimizer state (mean gradients of Adam or momentum); neither the model "
            "file nor the attacker's knowledge contains an optimizer state.",
            "Pass the training checkpoint, or Knowledge(moment=rs.read_moment(optimizer, model)).",
        )
    shapes = {name: t.shape for name, t in checkpoint.theta.items()}
    if misfits := [name for name, t in moments.items() if t.shape != shapes.get(name)]:
        raise InputError(
            "The optimizer state must have an entry with the same name and shape for every weight; the "
            f"entry {misfits[0]!r} does not match.",
            "Pass the state of the optimizer that trained this network.",
        )
    # A parameter without a mean gradient was frozen in training, so we set its mean gradient to zero.
    moment_of_all_parameters = {
        name: moments.get(name, torch.zeros(())).expand(shapes[name]) for name in shapes
    }
    target = {
        name: t.detach().to(checkpoint.theta[name]) for name, t in moment_of_all_parameters.items()
    }
    layers = tuple(layer for layer, names in by_layer(target).items() if {*names} & {*moments})
    # An attack must fit only the first layer with a mean gradient.
    # In a live module, we do not know which layer is the first, so the attack must fit all layers.
    required_layers = layers[: 1 if checkpoint.live is None else None]
    label = MOMENT if knowledge.update is None else UPDATE
    return Surface(
        MOMENT, checkpoint, target, required_layers, label, has_weights=knowledge.update != "alone"
    )


SURFACES: dict[str, Callable[[Network, Knowledge], Surface]] = {
    WEIGHTS: build_weights_surface,
    CHANGE: build_update_surface,
    MOMENT: build_moment_surface,
}


# The attack surfaces by the names that users pass with --surface.
SURFACE_CHOICES = {"weights": WEIGHTS, "change": CHANGE, "moment": MOMENT}


def resolve_surface(name: str, knowledge: Knowledge) -> str:
    """Return the internal name of an attack surface for the name that a user passes.

    Args:
        name: A key of ``SURFACE_CHOICES``.
        knowledge: What the attacker knows.

    Returns:
        The key of ``SURFACES``.

    Raises:
        InputError: If the name is not known, or the attacker does not know enough for this attack surface.
    """
    require_known(name, SURFACE_CHOICES, "No attack surface")
    required_knowledge = {"change": knowledge.theta0, "moment": knowledge.moment}
    if name in required_knowledge and required_knowledge[name] is None:
        requirement = "initial weights (--init, --base)" if name == "change" else "optimizer state"
        raise InputError(
            f"The option --surface {name} needs {requirement}; the attacker does not know this.",
            "Omit --surface, or pass what is missing, with --init for initial weights.",
        )
    return SURFACE_CHOICES[name]


def build_surfaces(checkpoint: Network, knowledge: Knowledge) -> dict[str, Surface]:
    """Build every attack surface of a model file for which the attacker knows enough.

    Args:
        checkpoint: The network.
        knowledge: What the attacker knows.

    Returns:
        The attack surfaces by name, in the order of ``SURFACES``.
    """
    return {name: SURFACES[name](checkpoint, knowledge) for name in list_surfaces(knowledge)}


def list_surfaces(knowledge: Knowledge) -> tuple[str, ...]:
    """Return the names of the attack surfaces for which the attacker knows enough.

    Samples of an update did not train the weights at which it was computed, so these weights are no attack
    surface.

    Args:
        knowledge: What the attacker knows.

    Returns:
        The names, in the order of ``SURFACES``.
    """
    if knowledge.update is not None:
        return (CHANGE, MOMENT) if knowledge.update == "difference" else (MOMENT,)
    required_knowledge = {CHANGE: knowledge.theta0, MOMENT: knowledge.moment}
    return tuple(
        name
        for name in SURFACES
        if name not in required_knowledge or required_knowledge[name] is not None
    )


def _find_moved_layers(checkpoint: Network, theta0: Theta) -> tuple[str, ...]:
    """Return the names of the layers whose weights differ from the initial weights ``theta0``."""
    shapes = {name: t.shape for name, t in checkpoint.theta.items()}
    if {name: t.shape for name, t in theta0.items()} != shapes:
        raise InputError(
            "The initial weights must belong to the same network as the trained weights "
            f"({checkpoint.arch or 'architecture unknown'}). The tensors in the file of initial weights have "
            "other names or shapes.",
            "Pass the initial weights of this network.",
        )
    return moved_layers(checkpoint.theta, theta0)
