"""Recognize the network to which a bare state dict belongs, or explain why it is not recognized.

A file holds tensors, but no ``forward``. Pooling, activations and skip connections leave no tensor. So this
module reports only obstacles that the names and shapes of tensors show. There can be other obstacles.
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

SUPPORTED = (
    "From weights alone, residuum can read fully connected networks, convnets (3x3 convolutions of stride 2, "
    "one linear layer, no pooling) and polynomial networks"
)
# Number of random samples on which two networks are compared, and the spread of the samples. Half of the
# samples have large values, and half have small values.
SAMPLES, SPREAD = 64, 3.0
ADAPTER, BATCH_NORM, CONVOLUTION = "an adapter", "batch norm", "convolutions"
ATTENTION, EMBEDDING = "attention", "an embedding"
NAME_PATTERNS = {  # kinds of layers that residuum cannot read, with a pattern of their tensor names
    ADAPTER: r"(^|[._])(lora|ia3_l|hada_w|lokr_w)",
    BATCH_NORM: r"(^|\.)(running_mean|running_var|num_batches_tracked)$",
    ATTENTION: r"attn|attention|in_proj_|[qkv]_proj|\bqkv\b",
    EMBEDDING: r"embed|\bw[tp]e\b|cls_token|position_ids",
    "a recurrent layer": r"weight_(ih|hh)",
    "skip connections": r"downsample|shortcut|skip",
}
MERGE_ADVICE = (
    "An adapter is a change of a base network. Pass the base too: residuum audit adapter.pt --base base.pt. "
    "Or audit the merged network: merged = model.merge_and_unload(); torch.save(merged.state_dict(), "
    "'merged.pt'); then residuum audit merged.pt --init base.pt."
)
CODE_ADVICE = (
    "No --arch describes such a network. Pass the network itself: rs.audit(model, data=..., "
    "holdout=...). Or pass its code: residuum audit weights.pt --model package.module:factory --trust-code."
)
ORDER_ADVICE = (
    "If the network is fully connected, save only its weights and biases, named in the order of its "
    "layers: layers.0.weight, layers.0.bias, layers.1.weight, ..."
)


def recognize(state: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, str]]:
    """Return the architecture that fits the tensors of a file, and the tensor of each parameter.

    Args:
        state: Tensors by name.

    Returns:
        The architecture and the name in ``state`` of each parameter of the network.

    Raises:
        CheckpointError: If no kind of network recognizes the tensors.
    """
    match = kinds.recognize_by_kind(state)
    if match is None:
        raise CheckpointError(*_explain_unreadable(state))
    return match


def same_function(
    model: nn.Module, shape: tuple[int, ...]
) -> tuple[Architecture, dict[str, Tensor]] | None:
    """Find an architecture string that computes the same function as a live network.

    Candidates come from the shapes of the weights. The two functions are compared on random samples in
    float64, so it does not matter how the forward is written.

    Args:
        model: The network.
        shape: Shape of one sample, () if it is not known.

    Returns:
        The architecture and the parameters of ``model`` under the names of the architecture. None if no
        candidate computes the same function.
    """
    state = model.state_dict(keep_vars=True)
    if not state or state.keys() != dict(model.named_parameters()).keys():
        return None  # the network has buffers
    network = copy.deepcopy(model).cpu().double().eval()
    for arch, names in _candidates(state, shape):
        x = SPREAD * torch.randn(
            SAMPLES, arch.inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        x[: SAMPLES // 2] /= SPREAD**2
        expected = _outputs(network, x, shape or arch.image_shape or (arch.inputs,))
        if expected is None:  # the network may accept only flattened images
            expected = _outputs(network, x, (arch.inputs,))
        if not isinstance(expected, Tensor):
            continue
        if expected.ndim == 1 and arch.outputs == 1:  # the network returns (n,) instead of (n, 1)
            expected = expected[:, None]
        theta = {name: state[source].detach().cpu().double() for name, source in names.items()}
        for activation in ACTIVATIONS:
            candidate = replace(arch, options={**arch.options, "activation": activation})
            outputs = functional_call(candidate.build().double(), theta, (x,)).detach()
            if expected.shape == outputs.shape and torch.allclose(
                expected, outputs, rtol=1e-9, atol=1e-12
            ):
                return candidate, {name: state[source] for name, source in names.items()}
    return None


def _outputs(model: nn.Module, x: Tensor, shape: tuple[int, ...]) -> Any:
    """Return the outputs of a network, or None if the network does not accept samples of this shape."""
    try:
        with torch.no_grad():
            return model(x.reshape(len(x), *shape))
    except Exception:  # noqa: BLE001  the forward of a user may raise anything
        return None


def _candidates(
    state: Mapping[str, Tensor], shape: tuple[int, ...]
) -> Iterator[tuple[Architecture, dict[str, str]]]:
    """Yield the architectures with layers that fit the tensors in ``state``, each with parameter names."""
    for find in (recognize, partial(_match_convnet, shape=shape)):
        try:
            arch, names = find(state)
        except (ArchitectureError, CheckpointError):
            continue
        if "activation" in arch.options:
            yield arch, names


def _match_convnet(
    state: Mapping[str, Tensor], shape: tuple[int, ...]
) -> tuple[Architecture, dict[str, str]]:
    arch = guess_convnet(state)
    if arch is None or len(shape) != 3:
        raise CheckpointError(*_explain_unreadable(state))
    arch = replace(arch, image_shape=shape)
    return arch, match_architecture(state, arch)


def match_architecture(state: Mapping[str, Tensor], arch: Architecture) -> dict[str, str]:
    """Find the tensor of every parameter of an architecture.

    Args:
        state: Tensors by name.
        arch: The architecture.

    Returns:
        The name in ``state`` of each parameter of the architecture.

    Raises:
        ArchitectureError: If the tensors do not fit the architecture.
    """
    expected = arch.build().state_dict()
    if {name: t.shape for name, t in state.items()} == {n: t.shape for n, t in expected.items()}:
        return {name: name for name in expected}
    layers = kinds.attach_vectors(*kinds.split_vectors(expected)) or []
    shapes = [expected[layer[0]].shape for layer in layers]
    weights, vectors = kinds.split_vectors(state)
    for order in (*kinds.likely_orders(weights), *_order_by_shape(weights, shapes)):
        fits = [w.shape for _, w in order] == shapes
        sources = kinds.attach_vectors(order, vectors) if fits else None
        if sources and [*map(len, layers)] == [*map(len, sources)]:
            return dict(zip(itertools.chain(*layers), itertools.chain(*sources), strict=True))
    raise ArchitectureError(*_explain_mismatch(state, arch))


def _explain_mismatch(state: Mapping[str, Tensor], arch: Architecture) -> tuple[str, str]:
    """Return the message and the remedy for tensors that do not fit an architecture."""
    try:
        recognized, _ = recognize(state)
    except CheckpointError:
        got, advice = f"hold {_list_obstacles(state)}", _advise(state)
    else:
        got, advice = f"fit {recognized}", f"Pass --arch {recognized} or omit --arch."
    return f"The weights must fit the architecture {arch}; they {got}.", advice


def _order_by_shape(weights: list[Named], shapes: list[Size]) -> list[list[Named]]:
    """Return the only order of the weights that has these shapes, or [] if two weights could be swapped."""
    of_shape = {w.shape: (name, w) for name, w in weights}
    if not len(of_shape) == len(weights) == len(shapes) or of_shape.keys() != {*shapes}:
        return []
    return [[of_shape[shape] for shape in shapes]]


def obstacles(state: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the kinds of layers in ``state`` that residuum cannot read, each with its tensor names."""
    patterns = {kind: re.compile(text, re.IGNORECASE) for kind, text in NAME_PATTERNS.items()}
    names_of = {kind: [*filter(pattern.search, state)] for kind, pattern in patterns.items()}
    normalized = {name.rpartition(".")[0] for name in names_of[BATCH_NORM]}
    explained = {*names_of[ATTENTION], *names_of[EMBEDDING]}
    explained |= {name for name in state if name.rpartition(".")[0] in normalized}
    unexplained = {name: t for name, t in state.items() if name not in explained}
    names_of[CONVOLUTION] = [name for name, t in unexplained.items() if t.ndim >= 3]
    scales = [n for n, t in unexplained.items() if t.ndim == 1 and n.endswith("weight")]
    names_of["scale vectors, as of layer norm"] = scales
    return {kind: names for kind, names in names_of.items() if names}


def refuse_by_name(state: Mapping[str, Tensor]) -> None:
    """Refuse adapters, batch norm and transformers by the names of their tensors.

    This check comes before the checks of shapes and values. The two matrices of an adapter have the shapes
    of an MLP. Batch norm and transformers have integer tensors, and an error about integers would not help.

    Args:
        state: Tensors by name.

    Raises:
        CheckpointError: If the names show an adapter, batch norm or a transformer.
    """
    present = obstacles(state).keys()
    has_integers = any(not t.is_floating_point() and not t.is_complex() for t in state.values())
    if present & {ADAPTER, BATCH_NORM} or (has_integers and present & {ATTENTION, EMBEDDING}):
        raise CheckpointError(*_explain_unreadable(state))


def _explain_unreadable(state: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return the message and the remedy for weights that no kind of network recognizes."""
    return f"{SUPPORTED}; these weights hold {_list_obstacles(state)}.", _advise(state)


def _list_obstacles(state: Mapping[str, Tensor]) -> str:
    """List the layers that residuum cannot read, or the first tensors if there are no such layers."""
    phrases = [
        f"{kind} ({names[0]!r} {list(state[names[0]].shape)}"
        + (f" and {len(names) - 1} more)" if len(names) > 1 else ")")
        for kind, names in obstacles(state).items()
    ]
    first = ", ".join(f"{name} {list(t.shape)}" for name, t in list(state.items())[:6])
    return ", ".join(phrases) or f"tensors that form no chain of layers ({first})"


def _advise(state: Mapping[str, Tensor]) -> str:
    """Return advice for a user whose weights were not recognized."""
    present = obstacles(state).keys()
    if not present:
        return ORDER_ADVICE
    if ADAPTER in present:
        return MERGE_ADVICE
    arch = guess_convnet(state) if present == {CONVOLUTION} else None
    if arch is None or arch.image_shape is None:
        return CODE_ADVICE
    side, halvings = arch.image_shape[1], len(arch.widths) - 1
    return (
        f"If all strides are 2, the padding is 1 and there is no pooling, pass --arch {arch}. Sides "
        f"from {side - 2**halvings + 1} to {side} have the same shapes. A network with pooling can have "
        "these shapes too, but computes another function. Pass such a network itself with rs.audit(model, "
        "...), or its code with --model package.module:factory --trust-code."
    )


def guess_convnet(state: Mapping[str, Tensor]) -> Architecture | None:
    """Return the architecture of a convnet for square images that fits the shapes of the tensors.

    Shapes do not show strides and pooling, so the tensors can also belong to another network.

    Args:
        state: Tensors by name.

    Returns:
        The architecture, or None if no convnet fits.
    """
    weights, vectors = kinds.split_vectors(state)
    for order in kinds.likely_orders(weights):
        *kernels, head = (weight.shape for _, weight in order)
        if not kernels or len(head) != 2 or any(kernel[2:] != (3, 3) for kernel in kernels):
            continue
        layers = kinds.attach_vectors(order, vectors)
        is_chain = all(lower[0] == upper[1] for lower, upper in itertools.pairwise(kernels))
        area, remainder = divmod(head[1], kernels[-1][0])
        if layers and is_chain and not remainder and math.isqrt(area) ** 2 == area:
            side = math.isqrt(area) * 2 ** len(kernels)
            widths = (*(kernel[0] for kernel in kernels), head[0])
            bias = bias_rule([len(layer) == 2 for layer in layers])
            return Architecture("convnet", widths, (kernels[0][1], side, side), {"bias": bias})
    return None
