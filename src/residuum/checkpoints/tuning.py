"""Fine-tuned networks: an adapter on its base, and a head on layers that were frozen.

An adapter is read as what it makes of its base, W + (alpha / r) B A; its base is the start.

Where the layers next to the input kept their start, samples were seen through fixed features only: the
layers above are a network of its own (:class:`Head`), whose inputs are those features. Candidates live in
feature space, and are compared with the features of the data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residuum.checkpoints.inert import Block, walk
from residuum.checkpoints.reading import build_model, load_checkpoint, locate
from residuum.checkpoints.releases import Release, open_release
from residuum.errors import CheckpointError
from residuum.networks import Architecture, dense_chain
from residuum.networks.kinds import bias_rule
from residuum.records import Checkpoint, Dataset, Knowledge
from residuum.stationarity import by_layer, moved_layers

WRAPPED = re.compile(r"^(module\.|_orig_mod\.|base_model\.model\.|model\.)+")
LORA = re.compile(r"^(.*)\.lora_(A|B|embedding_A|embedding_B)(\.\w+)?(\.weight)?$")
FEATURES = (
    "{} kept their start, so samples were seen through fixed features only: candidates are features, "
    "compared with those of the data ({} numbers each); features are not samples, though inverting them "
    "may be possible; layers are counted from the first one that moved"
)
CHUNK = 1000


def adapter_pairs(content: Any) -> dict[str, tuple[Block, Block]]:
    """A and B by the layer that they change."""
    found: dict[str, dict[str, Block]] = {}
    for place in walk(content):
        if isinstance(place.value, Block) and (match := LORA.match(place.path)):
            part = match[2].rpartition("_")[2] or match[2]
            found.setdefault(match[1], {})[part] = place.value
    return {name: (ab["A"], ab["B"]) for name, ab in found.items() if {*ab} == {"A", "B"}}


def change_of(a: Block, b: Block, config: Mapping[str, Any]) -> Tensor:
    """B A times alpha / r (or its root, as the configuration says)."""
    A, B = a.tensor().double(), b.tensor().double()
    alpha, rank = config.get("lora_alpha"), A.shape[0]
    factor = 1.0
    if isinstance(alpha, int | float) and not isinstance(alpha, bool):
        factor = float(alpha) / (rank**0.5 if config.get("use_rslora") is True else rank)
    if A.ndim != 2 or B.ndim != 2 or B.shape[1] != rank:
        raise CheckpointError(
            f"An adapter's parts are (r, in) and (out, r); got {a.shape} and {b.shape}.",
            "Save the adapter again.",
        )
    return factor * (B @ A)


def adapter_in(path: str | Path) -> Release | None:
    """The adapter in a file, None where it is none."""
    release = open_release(locate(path))
    return release if adapter_pairs(release.content) else None


def load_tuned(path: str | Path, base: str | Path, arch: str | None = None) -> Checkpoint:
    """The network that an adapter makes of its base, or the tuned network itself."""
    adapter = adapter_in(path)
    return load_checkpoint(path, arch) if adapter is None else merged(adapter, base, arch)


def merged(adapter: Release, base: str | Path, arch: str | None = None) -> Checkpoint:
    """W + (alpha / r) B A for every layer that the adapter names."""
    start = load_checkpoint(base, arch)
    ours = {WRAPPED.sub("", theirs): name for name, theirs in start.source_names.items()}
    theta = dict(start.theta)
    for name, (a, b) in adapter_pairs(adapter.content).items():
        target = ours.get(f"{WRAPPED.sub('', name)}.weight")
        if target is None:
            raise CheckpointError(
                f"An adapter changes layers of its base; this base has no {name[:80]!r}.",
                "Give the base that adapter_config.json names.",
            )
        change = change_of(a, b, adapter.config)
        if change.shape != theta[target].shape:
            raise CheckpointError(
                f"An adapter fits the layers of its base; {name[:80]!r} is "
                f"{list(change.shape)} and the base has {list(theta[target].shape)}.",
                "Give the base that adapter_config.json names.",
            )
        theta[target] = (theta[target].double() + change).to(theta[target])
    if not all(bool(t.isfinite().all()) for t in theta.values()):
        raise CheckpointError(
            "Weights must be finite; with this adapter they are not.", "Check it."
        )
    said = "the adapter was added to its base"
    if not isinstance(adapter.config.get("lora_alpha"), int | float):
        said += ", with the factor 1, since adapter_config.json names no lora_alpha"
    return start.replace(theta=theta, assumptions=(*start.assumptions, said))


@dataclass(frozen=True, eq=False)
class Head:
    """The layers above those that were frozen, as a network: its weights, and what it is fed with."""

    checkpoint: Checkpoint
    body: nn.Module
    frozen: tuple[str, ...]

    @property
    def note(self) -> str:
        """What it means for candidates and scores."""
        inputs = Architecture.parse(self.checkpoint.arch).inputs
        return FEATURES.format(", ".join(self.frozen), inputs)

    @torch.no_grad()
    def features(self, data: Dataset) -> Dataset:
        """The same records as the head receives them."""
        kind = next(self.body.parameters()).dtype
        parts = [self.body(part.flatten(1).to(kind)) for part in data.x.split(CHUNK)]
        return data.replace(x=torch.cat(parts).to(data.x.dtype), mean=None)

    def knowledge(self, whole: Knowledge) -> Knowledge:
        """What is granted of the whole network, in the head's names; samples' shape and range are not."""
        first = len(self.frozen)

        def mine(theta: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
            return None if theta is None else renamed(theta, first)

        gone = ("shape", "value_range", "mean", "norms")
        facts = {"theta0": mine(whole.theta0), "moment": mine(whole.moment) or None}
        provenance = {k: v for k, v in whole.provenance.items() if k not in gone}
        if facts["moment"] is None:
            provenance.pop("moment", None)
        return whole.replace(**facts, **dict.fromkeys(gone), provenance=provenance)


def head_of(checkpoint: Checkpoint, knowledge: Knowledge) -> Head | None:
    """The head that was trained on frozen layers of an MLP, None where the first layer moved."""
    start = knowledge.theta0
    if start is None or checkpoint.module is not None:
        return None
    arch = Architecture.parse(checkpoint.arch)
    chain = dense_chain(build_model(checkpoint))
    if arch.kind != "mlp" or chain is None:
        return None
    layers = tuple(by_layer(checkpoint.theta))
    moved = moved_layers(checkpoint.theta, start)
    if not moved or layers[0] in moved:
        return None
    first = layers.index(moved[0])
    widths = [len(checkpoint.theta[f"{name}.weight"]) for name in layers]
    theta = renamed(checkpoint.theta, first)
    has_bias = [f"layers.{l}.bias" in theta for l in range(len(layers) - first)]
    options = {**arch.options, "bias": bias_rule(has_bias)}
    said = str(Architecture("mlp", tuple(widths[first - 1 :]), None, options))
    head = checkpoint.replace(theta=theta, arch=said, input_shape=(), source_names={})
    body = nn.Sequential()
    for linear in chain.linears[:first]:
        body.append(linear)
        body.append(chain.activation)
    return Head(head, body.eval(), layers[:first])


def renamed(theta: dict[str, Tensor], first: int) -> dict[str, Tensor]:
    """Layers from ``first`` on, counted anew."""
    found = {}
    for name, t in theta.items():
        match = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
        if match and int(match[1]) >= first:
            found[f"layers.{int(match[1]) - first}.{match[2]}"] = t
    return found
