"""The layers above frozen layers of an MLP, as a network of their own.

The inputs of this network are the features that the frozen layers compute. Candidates are features, and
they are compared with the features of the data.
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

FEATURES = (
    "{} kept their start, so samples were seen through fixed features only: candidates are features, "
    "compared with those of the data ({} numbers each); features are not samples, though inverting them "
    "may be possible; layers are counted from the first one that moved"
)


@dataclass(frozen=True, eq=False)
class Head:
    """The layers above those that were frozen, as a network: its weights, and what it is fed with."""

    checkpoint: Network
    body: nn.Module
    frozen: tuple[str, ...]

    @property
    def note(self) -> str:
        """What it means for candidates and scores."""
        inputs = self.checkpoint.architecture.inputs
        return FEATURES.format(", ".join(self.frozen), inputs)

    @torch.no_grad()
    def features(self, data: Dataset) -> Dataset:
        """The same records as the head receives them."""
        kind = next(self.body.parameters()).dtype
        parts = [self.body(part.flatten(1).to(kind)) for part in data.x.split(1000)]
        return data.replace(x=torch.cat(parts).to(data.x.dtype), mean=None)

    def knowledge(self, whole: Knowledge) -> Knowledge:
        """What is granted of the whole network, in the head's names; samples' shape and range are not."""
        first = len(self.frozen)

        def mine(theta: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
            return None if theta is None else renumber_layers(theta, first)

        gone = ("shape", "value_range", "mean", "norms", "columns")
        facts = {"theta0": mine(whole.theta0), "moment": mine(whole.moment) or None}
        provenance = {k: v for k, v in whole.provenance.items() if k not in gone}
        if facts["moment"] is None:
            provenance.pop("moment", None)
        return whole.replace(**facts, **dict.fromkeys(gone), provenance=provenance)


def extract_head(checkpoint: Network, knowledge: Knowledge) -> Head | None:
    """The head that was trained on frozen layers of an MLP, None where the first layer moved.

    Samples were then seen through fixed features only: the layers above are a network of their own,
    whose samples are the outputs of ``body``. Anything an attack finds lives in that space.
    """
    start = knowledge.theta0
    if start is None or checkpoint.live is not None:
        return None
    arch = checkpoint.architecture
    chain = checkpoint.chain
    if arch.kind != "mlp" or chain is None:
        return None
    layers = tuple(by_layer(checkpoint.theta))
    moved = moved_layers(checkpoint.theta, start)
    if not moved or layers[0] in moved:
        return None
    first = layers.index(moved[0])
    widths = [len(checkpoint.theta[f"{name}.weight"]) for name in layers]
    theta = renumber_layers(checkpoint.theta, first)
    has_bias = [f"layers.{l}.bias" in theta for l in range(len(layers) - first)]
    options = {**arch.options, "bias": bias_rule(has_bias)}
    said = str(Architecture("mlp", tuple(widths[first - 1 :]), None, options))
    head = checkpoint.replace(theta=theta, arch=said, input_shape=(), source_names={})
    body = nn.Sequential()
    for linear in chain.linears[:first]:
        body.append(linear)
        body.append(chain.activation)
    return Head(head, body.eval(), layers[:first])


def renumber_layers(theta: dict[str, Tensor], first: int) -> dict[str, Tensor]:
    """Layers from ``first`` on, counted anew."""
    found = {}
    for name, t in theta.items():
        match = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
        if match and int(match[1]) >= first:
            found[f"layers.{int(match[1]) - first}.{match[2]}"] = t
    return found
