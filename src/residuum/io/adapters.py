"""Add a low-rank adapter (LoRA) to its base network: the merged weights are W + (alpha / r) B A.

W are the weights of the base network. A and B are the matrices of the adapter, r is their rank, and alpha is
a scale. For attacks, W are the initial weights, and the adapter is the weight update.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from residuum.errors import CheckpointError
from residuum.io.checkpoints import load_checkpoint
from residuum.io.inert import Block
from residuum.io.release import Release
from residuum.io.tree import walk
from residuum.networks.network import Network

WRAPPER_PREFIX = re.compile(r"^(module\.|_orig_mod\.|base_model\.model\.|model\.)+")
LORA = re.compile(r"^(.*)\.lora_(A|B|embedding_A|embedding_B)(\.\w+)?(\.weight)?$")


def find_adapter_pairs(content: Any) -> dict[str, tuple[Block, Block]]:
    """Return the two matrices (A, B) of a LoRA adapter for every layer that it changes, by layer name."""
    matrices: dict[str, dict[str, Block]] = {}
    for place in walk(content):
        if isinstance(place.value, Block) and (match := LORA.match(place.path)):
            matrix_letter = match[2].rpartition("_")[2] or match[2]
            matrices.setdefault(match[1], {})[matrix_letter] = place.value
    return {name: (ab["A"], ab["B"]) for name, ab in matrices.items() if {*ab} == {"A", "B"}}


def compute_update(a: Block, b: Block, config: Mapping[str, Any]) -> Tensor:
    """Return the weight update of one layer of a LoRA adapter with the matrices A and B of rank r.

    The update is alpha / r B A, or alpha / sqrt(r) B A for rank-stabilized LoRA.

    Args:
        a: The matrix A, (r, in).
        b: The matrix B, (out, r).
        config: The content of adapter_config.json. If it has no ``lora_alpha``, the update is B A.

    Returns:
        The update, (out, in).

    Raises:
        CheckpointError: If the shapes of A and B do not fit each other.
    """
    A, B = a.tensor().double(), b.tensor().double()
    alpha, rank = config.get("lora_alpha"), A.shape[0]
    update_scale = 1.0
    if isinstance(alpha, int | float) and not isinstance(alpha, bool):
        update_scale = float(alpha) / (rank**0.5 if config.get("use_rslora") is True else rank)
    if A.ndim != 2 or B.ndim != 2 or B.shape[1] != rank:
        raise CheckpointError(
            "The matrices A and B of a LoRA adapter must have the shapes (rank, inputs) and (outputs, "
            f"rank); A has the shape {a.shape}, and B has the shape {b.shape}.",
            "Save the adapter again with PEFT.",
        )
    return update_scale * (B @ A)


def load_tuned(release: Release, base: str | Path, arch: str | None = None) -> Network:
    """Return a fine-tuned network. If the release is an adapter, add the adapter to its base network.

    Args:
        release: The model file, which holds an adapter or the fine-tuned network itself.
        base: File of the base network, which is used only for an adapter.
        arch: Architecture string, if the file does not show the architecture.

    Returns:
        The fine-tuned network.
    """
    if find_adapter_pairs(release.content):
        return merge_adapter(release, base, arch)
    return load_checkpoint(release, arch)


def merge_adapter(adapter: Release, base: str | Path, arch: str | None = None) -> Network:
    """Add an adapter to the layers of its base network, and return the merged network.

    Args:
        adapter: The release that holds the adapter.
        base: File of the base network.
        arch: Architecture string of the base network, if the file does not show the architecture.

    Returns:
        The merged network.

    Raises:
        CheckpointError: If the adapter does not fit the base network, or merged weights are not finite.
    """
    network = load_checkpoint(base, arch)
    parameter_names = {
        WRAPPER_PREFIX.sub("", source): name for name, source in network.source_names.items()
    }
    theta = dict(network.theta)
    for name, (a, b) in find_adapter_pairs(adapter.content).items():
        weight_name = parameter_names.get(f"{WRAPPER_PREFIX.sub('', name)}.weight")
        if weight_name is None:
            raise CheckpointError(
                "An adapter (LoRA) changes layers of a base network; the adapter changes the layer "
                f"{name[:80]!r}, which this base network does not have.",
                "Pass the base network that adapter_config.json names.",
            )
        weight_update = compute_update(a, b, adapter.config)
        weight = theta[weight_name]
        if weight_update.shape != weight.shape:
            raise CheckpointError(
                "An adapter (LoRA) must have the same shapes as its base network; the layer "
                f"{name[:80]!r} has the shape {list(weight_update.shape)} in the adapter and "
                f"{list(weight.shape)} in the base network.",
                "Pass the base network that adapter_config.json names.",
            )
        theta[weight_name] = (weight.double() + weight_update).to(weight)
    if not all(bool(t.isfinite().all()) for t in theta.values()):
        raise CheckpointError(
            "Weights must be finite; if this adapter is added to its base network, some weights are "
            "infinite or NaN.",
            "Check that the training of the adapter did not diverge.",
        )
    assumption = "the adapter was added to its base network"
    if not isinstance(adapter.config.get("lora_alpha"), int | float):
        assumption += " with the factor 1, because adapter_config.json names no lora_alpha"
    return network.replace(theta=theta, assumptions=(*network.assumptions, assumption))
