"""From a bare state dict to a network: which kind's tensors these are, or why they are of none.

A file holds no ``forward``. Pooling, activations and skip connections leave no tensor, so the obstacles
found here are what names and shapes show, not all that may be in the way.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.func import functional_call

from residuum.errors import ArchitectureError, CheckpointError
from residuum.networks import kinds
from residuum.networks.activations import ACTIVATIONS
from residuum.networks.kinds import Architecture, Named, bias_rule

READS = (
    "Networks that can be read from weights alone are fully connected, convnets (3x3 convolutions of "
    "stride 2, one linear layer, no pooling) or polynomial"
)
SAMPLES, SPREAD = 64, 3.0  # on which two networks are compared; half of them large, half small
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
    "An adapter changes another network and is none itself. Name its base: residuum audit adapter.pt "
    "--base base.pt; or merge them and audit that: merged = model.merge_and_unload(); "
    "torch.save(merged.state_dict(), 'merged.pt'); then residuum audit merged.pt --init base.pt."
)
GIVE_CODE = (
    "No --arch describes such a network. Give it as it is: rs.audit(model, data=..., holdout=...), or "
    "with its code: residuum audit weights.pt --model package.module:factory --trust-code."
)
IN_ORDER = (
    "If it is fully connected, save its weights and biases alone, named in the order of its layers: "
    "layers.0.weight, layers.0.bias, layers.1.weight, ..."
)


def recognize(state: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, str]]:
    """The network whose tensors these are, and for each of our parameter names the file's name."""
    known = kinds.recognized(state)
    if known is None:
        raise unreadable(state)
    return known


def same_function(
    model: nn.Module, shape: tuple[int, ...]
) -> tuple[Architecture, dict[str, Tensor]] | None:
    """The string that describes ``model`` where its weights form one and both compute the same.

    Whatever a forward is written as, a network is the function it computes: compared on random samples,
    of ``shape`` where it is known, in float64. The live parameters come under the string's names.
    """
    state = model.state_dict(keep_vars=True)
    if not state or state.keys() != dict(model.named_parameters()).keys():
        return None  # buffers take part
    own = copy.deepcopy(model).cpu().double().eval()
    for arch, names in _possible(state, shape):
        x = SPREAD * torch.randn(
            SAMPLES, arch.inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        x[: SAMPLES // 2] /= SPREAD**2
        wanted = _outputs(own, x, shape or arch.image_shape or (arch.inputs,))
        wanted = _outputs(own, x, (arch.inputs,)) if wanted is None else wanted  # images laid flat
        if not isinstance(wanted, Tensor):
            continue
        if wanted.ndim == 1 and arch.outputs == 1:  # one output without a dimension
            wanted = wanted[:, None]
        theta = {ours: state[theirs].detach().cpu().double() for ours, theirs in names.items()}
        for activation in ACTIVATIONS:
            said = replace(arch, options={**arch.options, "activation": activation})
            found = functional_call(said.build().double(), theta, (x,)).detach()
            if wanted.shape == found.shape and torch.allclose(wanted, found, rtol=1e-9, atol=1e-12):
                return said, {ours: state[theirs] for ours, theirs in names.items()}
    return None


def _outputs(model: nn.Module, x: Tensor, shape: tuple[int, ...]) -> Any:
    """None where it does not take samples of this shape."""
    try:
        with torch.no_grad():
            return model(x.reshape(len(x), *shape))
    except Exception:  # noqa: BLE001  a forward of somebody's own may raise anything
        return None


def _possible(
    state: Mapping[str, Tensor], shape: tuple[int, ...]
) -> Iterator[tuple[Architecture, dict[str, str]]]:
    """Layered networks that have these tensors."""
    for find in (recognize, partial(_convnet_on, shape=shape)):
        try:
            arch, names = find(state)
        except (ArchitectureError, CheckpointError):
            continue
        if "activation" in arch.options:
            yield arch, names


def _convnet_on(
    state: Mapping[str, Tensor], shape: tuple[int, ...]
) -> tuple[Architecture, dict[str, str]]:
    arch = convnet_of(state)
    if arch is None or len(shape) != 3:
        raise unreadable(state)
    arch = replace(arch, image_shape=shape)
    return arch, match_architecture(state, arch)


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
        found, _ = recognize(state)
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
    normalized = {name.rpartition(".")[0] for name in found[BATCH_NORM]}
    explained = {*found[ATTENTION], *found[EMBEDDING]}
    explained |= {name for name in state if name.rpartition(".")[0] in normalized}
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
    """What to do with weights that were not recognized."""
    found = obstacles(state).keys()
    if not found:
        return IN_ORDER
    if ADAPTER in found:
        return MERGE
    arch = convnet_of(state) if found == {CONVOLUTION} else None
    if arch is None or arch.image_shape is None:
        return GIVE_CODE
    side, halvings = arch.image_shape[1], len(arch.widths) - 1
    return (
        f"If its strides are 2, its padding is 1 and nothing pools, use --arch {arch}, or another side "
        f"from {side - 2**halvings + 1} to {side}, whose shapes are the same. A network with pooling "
        "can have these shapes too and is another function: give that as it is, rs.audit(model, "
        "...), or with its code, --model package.module:factory --trust-code."
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
