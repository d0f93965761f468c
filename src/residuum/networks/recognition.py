"""From a bare state dict to a network: which kind's tensors these are, or why they are of none.

A file holds no ``forward``. Pooling, activations and skip connections leave no tensor, so the obstacles
found here are what names and shapes show, not all that may be in the way.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping

from torch import Size, Tensor

from residuum.errors import ArchitectureError, CheckpointError
from residuum.networks import kinds
from residuum.networks.kinds import Architecture, Named
from residuum.networks.modules import bias_rule

READS = (
    "Networks that can be read are fully connected with ReLU, convnets (3x3 convolutions of stride 2, "
    "one linear layer, no pooling) or polynomial"
)
ADAPTER, BATCH_NORM, CONVOLUTION = "an adapter", "batch norm", "convolutions"
ATTENTION, EMBEDDING = "attention", "an embedding"
BY_NAME = {
    ADAPTER: r"(^|[._])(lora|ia3_l|hada_w|lokr_w)",
    BATCH_NORM: r"(^|\.)(running_mean|running_var|num_batches_tracked)$",
    ATTENTION: r"attn|attention|in_proj_|[qkv]_proj|\bqkv\b",
    EMBEDDING: r"embed|\bw[tp]e\b|cls_token|position_ids",
    "a recurrent layer": r"weight_(ih|hh)",
    "skip connections": r"downsample|shortcut|skip",
}
MERGE = (
    "An adapter changes another network and is none itself. Merge it into its base and audit that: "
    "merged = model.merge_and_unload(); torch.save(merged.state_dict(), 'merged.pt'); then residuum "
    "audit merged.pt --init base.pt."
)
FOLD = (
    "Fold each batch norm into the layer before it with torch.nn.utils.fusion.fuse_linear_bn_eval or "
    "fuse_conv_bn_eval, and save that state_dict. The folded weights are not those that were trained, "
    "so the attacks may not explain them; a network trained without batch norm is the better test."
)
NEVER = (
    "No --arch describes such a network. Membership inference, which needs no architecture, still "
    "applies to it."
)
IN_ORDER = (
    "If it is fully connected, save its weights and biases alone, named in the order of its layers: "
    "layers.0.weight, layers.0.bias, layers.1.weight, ..."
)


def recognise(state: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, str]]:
    """The network whose tensors these are, and for each of our parameter names the file's name."""
    known = kinds.recognised(state)
    if known is None:
        raise unreadable(state)
    return known


def match_architecture(state: Mapping[str, Tensor], arch: Architecture) -> dict[str, str]:
    """For each parameter name of ``arch`` the name in ``state`` that holds it."""
    wanted = arch.build().state_dict()
    if {name: t.shape for name, t in state.items()} == {n: t.shape for n, t in wanted.items()}:
        return {name: name for name in wanted}
    ours = kinds.attach_vectors(*kinds.weights_and_vectors(wanted)) or []
    shapes = [wanted[layer[0]].shape for layer in ours]
    weights, vectors = kinds.weights_and_vectors(state)
    for order in (*kinds.orders(weights), *_by_shape(weights, shapes)):
        fits = [w.shape for _, w in order] == shapes
        theirs = kinds.attach_vectors(order, vectors) if fits else None
        if theirs and [*map(len, ours)] == [*map(len, theirs)]:
            return dict(zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True))
    raise _misfit(state, arch)


def _misfit(state: Mapping[str, Tensor], arch: Architecture) -> ArchitectureError:
    try:
        found, _ = recognise(state)
    except CheckpointError:
        got, advice = f"hold {holdings(state)}", remedy(state)
    else:
        got, advice = f"are those of {found}", f"Use --arch {found}, or leave it out."
    return ArchitectureError(f"The weights must fit the architecture {arch}; they {got}.", advice)


def _by_shape(weights: list[Named], shapes: list[Size]) -> list[list[Named]]:
    """The one order of the weights that has these shapes; empty where two could be swapped."""
    of_shape = {w.shape: (name, w) for name, w in weights}
    if not len(of_shape) == len(weights) == len(shapes) or of_shape.keys() != {*shapes}:
        return []
    return [[of_shape[shape] for shape in shapes]]


def obstacles(state: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Kinds of parts that cannot be read, each with the names of its tensors."""
    known = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in BY_NAME.items()}
    found = {kind: [*filter(pattern.search, state)] for kind, pattern in known.items()}
    normalised = {name.rpartition(".")[0] for name in found[BATCH_NORM]}
    explained = {*found[ATTENTION], *found[EMBEDDING]}
    explained |= {name for name in state if name.rpartition(".")[0] in normalised}
    others = {name: t for name, t in state.items() if name not in explained}
    found[CONVOLUTION] = [name for name, t in others.items() if t.ndim >= 3]
    scales = [name for name, t in others.items() if t.ndim == 1 and name.endswith("weight")]
    found["scale vectors, as of layer norm"] = scales
    return {kind: names for kind, names in found.items() if names}


def refuse_by_name(state: Mapping[str, Tensor]) -> None:
    """Raise for what no architecture can describe, before shapes and values are looked at.

    The two matrices of an adapter have the shapes of an MLP. Batch norm and transformers bring
    integer tensors, of which the user would hear first and to no use.
    """
    found = obstacles(state).keys()
    integers = any(not t.is_floating_point() and not t.is_complex() for t in state.values())
    if found & {ADAPTER, BATCH_NORM} or (integers and found & {ATTENTION, EMBEDDING}):
        raise unreadable(state)


def unreadable(state: Mapping[str, Tensor]) -> CheckpointError:
    """The refusal: what can be read, everything that was found instead, what to do."""
    return CheckpointError(f"{READS}; these weights hold {holdings(state)}.", remedy(state))


def holdings(state: Mapping[str, Tensor]) -> str:
    """All obstacles, each by its first tensor; without any, the first tensors."""
    parts = [
        f"{kind} ({names[0]!r} {list(state[names[0]].shape)}"
        + (f" and {len(names) - 1} more)" if len(names) > 1 else ")")
        for kind, names in obstacles(state).items()
    ]
    first = ", ".join(f"{name} {list(t.shape)}" for name, t in list(state.items())[:6])
    return ", ".join(parts) or f"tensors that form no chain of layers ({first})"


def remedy(state: Mapping[str, Tensor]) -> str:
    """What to do with weights that were not recognised."""
    found = obstacles(state).keys()
    if not found:
        return IN_ORDER
    if ADAPTER in found:
        return MERGE
    if BATCH_NORM in found and found <= {BATCH_NORM, CONVOLUTION}:
        return FOLD
    arch = convnet_of(state) if found == {CONVOLUTION} else None
    if arch is None or arch.image_shape is None:
        return NEVER
    side, halvings = arch.image_shape[1], len(arch.widths) - 1
    return (
        f"If its strides are 2, its padding is 1 and nothing pools, use --arch {arch}, or another side "
        f"from {side - 2**halvings + 1} to {side}, whose shapes are the same. A network with pooling "
        "can have these shapes too; it is another function and cannot be read."
    )


def convnet_of(state: Mapping[str, Tensor]) -> Architecture | None:
    """The convnet for square images that would have these shapes; its strides are a guess."""
    weights, vectors = kinds.weights_and_vectors(state)
    for order in kinds.orders(weights):
        *kernels, head = (weight.shape for _, weight in order)
        if not kernels or len(head) != 2 or any(kernel[2:] != (3, 3) for kernel in kernels):
            continue
        layers = kinds.attach_vectors(order, vectors)
        chained = all(lower[0] == upper[1] for lower, upper in itertools.pairwise(kernels))
        area, left = divmod(head[1], kernels[-1][0])
        if layers and chained and not left and math.isqrt(area) ** 2 == area:
            side = math.isqrt(area) * 2 ** len(kernels)
            widths = (*(kernel[0] for kernel in kernels), head[0])
            bias = bias_rule([len(layer) == 2 for layer in layers])
            return Architecture("convnet", widths, (kernels[0][1], side, side), {"bias": bias})
    return None
