"""Treat the layers above the frozen layers of an MLP as a network of their own: the head.

The inputs of the head are the features that the frozen layers compute. So the candidates (guesses of training
samples) of an attack on the head are features. These candidates are compared with the features of the data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.networks import Architecture
from residuum.networks.kinds import bias_rule
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.stationarity import by_layer, moved_layers

FEATURES_NOTE = (
    "the layers {} were frozen, so training saw samples only through fixed features: candidates are features "
    "({} numbers each), compared with the features of the data; features are not samples, but inverting "
    "features may be possible; layers are numbered from the first layer that moved"
)


@dataclass(frozen=True, eq=False)
class Head:
    """The trained layers above the frozen layers of an MLP, as a network of their own.

    Attributes:
        checkpoint: The network of the trained layers.
        body: The frozen layers, which compute the inputs of ``checkpoint``.
        frozen: Names of the frozen layers.
    """

    checkpoint: Network
    body: nn.Module
    frozen: tuple[str, ...]

    @property
    def note(self) -> str:
        """Sentence for users: the reconstructions and scores describe features, not samples."""
        feature_count = self.checkpoint.architecture.inputs
        return FEATURES_NOTE.format(", ".join(self.frozen), feature_count)

    @torch.no_grad()
    def compute_features(self, data: Dataset) -> Dataset:
        """Replace samples by their features, which the frozen layers compute."""
        dtype = next(self.body.parameters()).dtype
        features = [self.body(batch.flatten(1).to(dtype)) for batch in data.x.split(1000)]
        return data.replace(x=torch.cat(features).to(data.x.dtype), mean=None)

    def translate_knowledge(self, knowledge: Knowledge) -> Knowledge:
        """Translate knowledge about the full network to the head.

        Layers are renumbered as in the head. Facts about samples, such as their shape and value range, are
        removed, because features have another shape and range.

        Args:
            knowledge: What the attacker knows about the full network.

        Returns:
            The knowledge about the head.
        """
        frozen_count = len(self.frozen)

        def select(theta: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
            return None if theta is None else renumber_layers(theta, frozen_count)

        removed_names = ("shape", "value_range", "mean", "norms", "columns")
        translated = {
            "theta0": select(knowledge.theta0),
            "moment": select(knowledge.moment) or None,
        }
        provenance = {k: v for k, v in knowledge.provenance.items() if k not in removed_names}
        if translated["moment"] is None:
            provenance.pop("moment", None)
        return knowledge.replace(
            **translated, **dict.fromkeys(removed_names), provenance=provenance
        )


def extract_head(checkpoint: Network, knowledge: Knowledge) -> Head | None:
    """Return the head of an MLP whose first layers were frozen.

    The frozen layers compute features of the samples, and training used only these features. The layers above
    the frozen layers are the head: a network whose samples are the features. An attack on the head
    reconstructs features.

    Args:
        checkpoint: The full network.
        knowledge: What the attacker knows. The initial weights show which layers were frozen.

    Returns:
        The head, or None if training changed the first layer or the network is not an MLP.
    """
    initial_weights = knowledge.theta0
    if initial_weights is None or checkpoint.live is not None:
        return None
    architecture = checkpoint.architecture
    chain = checkpoint.chain
    if architecture.kind != "mlp" or chain is None:
        return None
    layers = tuple(by_layer(checkpoint.theta))
    trained_layers = moved_layers(checkpoint.theta, initial_weights)
    if not trained_layers or layers[0] in trained_layers:
        return None
    first_trained = layers.index(trained_layers[0])
    widths = [len(checkpoint.theta[f"{name}.weight"]) for name in layers]
    head_theta = renumber_layers(checkpoint.theta, first_trained)
    layers_have_bias = [
        f"layers.{l}.bias" in head_theta for l in range(len(layers) - first_trained)
    ]
    options = {**architecture.options, "bias": bias_rule(layers_have_bias)}
    head_architecture = str(Architecture("mlp", tuple(widths[first_trained - 1 :]), None, options))
    head_network = checkpoint.replace(
        theta=head_theta, arch=head_architecture, input_shape=(), source_names={}
    )
    frozen_layers = nn.Sequential()
    for linear in chain.linears[:first_trained]:
        frozen_layers.append(linear)
        frozen_layers.append(chain.activation)
    return Head(head_network, frozen_layers.eval(), layers[:first_trained])


def renumber_layers(theta: dict[str, Tensor], first: int) -> dict[str, Tensor]:
    """Return the parameters of layer ``first`` and of all later layers, with layers renumbered from 0.

    Args:
        theta: Parameters by name, such as "layers.2.weight".
        first: Number of the first layer to return, which becomes layer 0.

    Returns:
        The parameters by their new names.
    """
    renumbered = {}
    for name, t in theta.items():
        name_match = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
        if name_match and int(name_match[1]) >= first:
            renumbered[f"layers.{int(name_match[1]) - first}.{name_match[2]}"] = t
    return renumbered
