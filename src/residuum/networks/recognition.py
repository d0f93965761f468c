"""Recognize the network to which a bare state dict belongs, or explain why it is not recognized.

A state dict holds tensors, but not the forward method. Pooling, activations and skip connections have no
tensors, so they are invisible. This module reports only obstacles that the names and shapes of tensors show.
There can be other obstacles.
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
# Two networks are compared on SAMPLES random samples. One half of the samples have the standard deviation
# SPREAD, the other half 1 / SPREAD.
SAMPLES, SPREAD = 64, 3.0
ADAPTER, BATCH_NORM, CONVOLUTION = "an adapter", "batch norm", "convolutions"
ATTENTION, EMBEDDING = "attention", "an embedding"
# For each kind of layer that residuum cannot read, a regular expression that matches the names of its
# tensors.
NAME_PATTERNS = {
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
SCAN_ADVICE = (
    "Without code, residuum scan MODEL --base BASE works on these weights. It names the layers and the "
    "rows of embeddings that training changed."
)
ORDER_ADVICE = (
    "If the network is fully connected, save only its weights and biases, named in the order of its "
    "layers: layers.0.weight, layers.0.bias, layers.1.weight, ..."
)


def recognize(state: Mapping[str, Tensor]) -> tuple[Architecture, dict[str, str]]:
    """Return the architecture that fits the tensors of a file, and the tensor name of each parameter.

    Args:
        state: Tensors by name.

    Returns:
        The architecture and the name in ``state`` of each parameter of the network.

    Raises:
        CheckpointError: If no kind of network recognizes the tensors.
    """
    recognized = kinds.recognize_by_kind(state)
    if recognized is None:
        raise CheckpointError(*_explain_unreadable(state))
    return recognized


def same_function(
    model: nn.Module, shape: tuple[int, ...]
) -> tuple[Architecture, dict[str, Tensor]] | None:
    """Find an architecture string that describes the same function as a module.

    The shapes of the weights suggest candidate architectures. The outputs of a candidate and of the module
    are compared on random samples in float64. The code of the module's forward method is not read.

    Args:
        model: The module.
        shape: Shape of one sample, () if it is not known.

    Returns:
        The architecture and the parameters of ``model`` under the names of the architecture. None if no
        candidate computes the same function.
    """
    state_dict = model.state_dict(keep_vars=True)
    if not state_dict or state_dict.keys() != dict(model.named_parameters()).keys():
        # No architecture string describes a network with buffers, such as the statistics of batch norm.
        return None
    double_model = copy.deepcopy(model).cpu().double().eval()
    for arch, names in _candidates(state_dict, shape):
        random_samples = SPREAD * torch.randn(
            SAMPLES, arch.inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        random_samples[: SAMPLES // 2] /= SPREAD**2
        outputs_of_model = _outputs(
            double_model, random_samples, shape or arch.image_shape or (arch.inputs,)
        )
        if outputs_of_model is None:  # the network may accept flattened images instead
            outputs_of_model = _outputs(double_model, random_samples, (arch.inputs,))
        if not isinstance(outputs_of_model, Tensor):
            continue
        # Some networks with one output return a tensor of shape (n,) instead of (n, 1).
        if outputs_of_model.ndim == 1 and arch.outputs == 1:
            outputs_of_model = outputs_of_model[:, None]
        renamed_weights = {
            name: state_dict[tensor].detach().cpu().double() for name, tensor in names.items()
        }
        for activation in ACTIVATIONS:
            candidate_arch = replace(arch, options={**arch.options, "activation": activation})
            outputs_of_candidate = functional_call(
                candidate_arch.build().double(), renamed_weights, (random_samples,)
            ).detach()
            if outputs_of_model.shape == outputs_of_candidate.shape and torch.allclose(
                outputs_of_model, outputs_of_candidate, rtol=1e-9, atol=1e-12
            ):
                return candidate_arch, {name: state_dict[tensor] for name, tensor in names.items()}
    return None


def _outputs(model: nn.Module, x: Tensor, shape: tuple[int, ...]) -> Any:
    """Return the outputs of a network, or None if the network does not accept samples of this shape."""
    try:
        with torch.no_grad():
            return model(x.reshape(len(x), *shape))
    except Exception:  # noqa: BLE001  the user's forward method may raise any exception
        return None


def _candidates(
    state: Mapping[str, Tensor], shape: tuple[int, ...]
) -> Iterator[tuple[Architecture, dict[str, str]]]:
    """Yield architectures that fit the tensors in ``state``, each with the tensor names of its parameters."""
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
    """Find for every parameter of an architecture the tensor of a file that holds its value.

    Args:
        state: Tensors by name.
        arch: The architecture.

    Returns:
        The name in ``state`` of each parameter of the architecture.

    Raises:
        ArchitectureError: If the tensors do not fit the architecture.
    """
    expected_tensors = arch.build().state_dict()
    if {name: t.shape for name, t in state.items()} == {
        n: t.shape for n, t in expected_tensors.items()
    }:
        return {name: name for name in expected_tensors}
    expected_names = kinds.attach_vectors(*kinds.split_vectors(expected_tensors)) or []
    expected_shapes = [expected_tensors[names[0]].shape for names in expected_names]
    weights, vectors = kinds.split_vectors(state)
    for order in (*kinds.likely_orders(weights), *_order_by_shape(weights, expected_shapes)):
        has_same_shapes = [w.shape for _, w in order] == expected_shapes
        matched_names = kinds.attach_vectors(order, vectors) if has_same_shapes else None
        if matched_names and [*map(len, expected_names)] == [*map(len, matched_names)]:
            return dict(
                zip(itertools.chain(*expected_names), itertools.chain(*matched_names), strict=True)
            )
    raise ArchitectureError(*_explain_mismatch(state, arch))


def _explain_mismatch(state: Mapping[str, Tensor], arch: Architecture) -> tuple[str, str]:
    """Return the error message and the advice to the user if tensors do not fit an architecture."""
    try:
        recognized, _ = recognize(state)
    except CheckpointError:
        got, advice = f"hold {_list_obstacles(state)}", _advise(state)
    else:
        got, advice = f"fit {recognized}", f"Pass --arch {recognized} or omit --arch."
    return f"The weights must fit the architecture {arch}; they {got}.", advice


def _order_by_shape(weights: list[Named], shapes: list[Size]) -> list[list[Named]]:
    """Return the order in which the weights have these shapes, or [] if there is not exactly one order."""
    weight_by_shape = {w.shape: (name, w) for name, w in weights}
    if not len(weight_by_shape) == len(weights) == len(shapes) or weight_by_shape.keys() != {
        *shapes
    }:
        return []
    return [[weight_by_shape[shape] for shape in shapes]]


def obstacles(state: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of the tensors in ``state`` that residuum cannot read, by the kind of their layer."""
    patterns = {kind: re.compile(text, re.IGNORECASE) for kind, text in NAME_PATTERNS.items()}
    names_by_kind = {kind: [*filter(pattern.search, state)] for kind, pattern in patterns.items()}
    batch_norm_modules = {name.rpartition(".")[0] for name in names_by_kind[BATCH_NORM]}
    explained_names = {*names_by_kind[ATTENTION], *names_by_kind[EMBEDDING]}
    explained_names |= {name for name in state if name.rpartition(".")[0] in batch_norm_modules}
    remaining_tensors = {name: t for name, t in state.items() if name not in explained_names}
    names_by_kind[CONVOLUTION] = [name for name, t in remaining_tensors.items() if t.ndim >= 3]
    scale_vectors = [
        n for n, t in remaining_tensors.items() if t.ndim == 1 and n.endswith("weight")
    ]
    names_by_kind["scale vectors, as of layer norm"] = scale_vectors
    return {kind: names for kind, names in names_by_kind.items() if names}


def refuse_by_name(state: Mapping[str, Tensor]) -> None:
    """Raise an error if the names of tensors show an adapter, batch norm or a transformer.

    Call this function before the checks of shapes and values. Otherwise an adapter would be read as an MLP,
    because its two matrices have the shapes of an MLP. Batch norm and transformers would be refused because
    of their integer tensors, and this error would not tell the user the real reason.

    Args:
        state: Tensors by name.

    Raises:
        CheckpointError: If the names show an adapter, batch norm or a transformer.
    """
    obstacle_kinds = obstacles(state).keys()
    has_integers = any(not t.is_floating_point() and not t.is_complex() for t in state.values())
    if obstacle_kinds & {ADAPTER, BATCH_NORM} or (
        has_integers and obstacle_kinds & {ATTENTION, EMBEDDING}
    ):
        raise CheckpointError(*_explain_unreadable(state))


def _explain_unreadable(state: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return the error message and the advice to the user if no network kind recognizes the weights."""
    return f"{SUPPORTED}; these weights hold {_list_obstacles(state)}.", _advise(state)


def _list_obstacles(state: Mapping[str, Tensor]) -> str:
    """Return a text that names the layers that residuum cannot read, or else the first tensors."""
    descriptions = [
        f"{kind} ({names[0]!r} {list(state[names[0]].shape)}"
        + (f" and {len(names) - 1} more)" if len(names) > 1 else ")")
        for kind, names in obstacles(state).items()
    ]
    # Tensors that are neither weights nor biases come first, because a network without them may be readable.
    names = sorted(state, key=lambda name: name.endswith((".weight", ".bias")))
    first_tensors = ", ".join(f"{name} {list(state[name].shape)}" for name in names[:6])
    return ", ".join(descriptions) or f"tensors that form no chain of layers ({first_tensors})"


def _advise(state: Mapping[str, Tensor]) -> str:
    """Return advice for a user whose weights were not recognized."""
    obstacle_kinds = obstacles(state).keys()
    if not obstacle_kinds:
        return ORDER_ADVICE
    if obstacle_kinds & {ATTENTION, EMBEDDING}:
        return f"{CODE_ADVICE} {SCAN_ADVICE}"
    if ADAPTER in obstacle_kinds:
        return MERGE_ADVICE
    arch = guess_convnet(state) if obstacle_kinds == {CONVOLUTION} else None
    if arch is None or arch.image_shape is None:
        return CODE_ADVICE
    image_side, halvings = arch.image_shape[1], len(arch.widths) - 1
    return (
        f"If all strides are 2, the padding is 1 and there is no pooling, pass --arch {arch}. Sides "
        f"from {image_side - 2**halvings + 1} to {image_side} have the same shapes. A network with "
        "pooling can have these shapes too, but computes another function. Pass such a network itself with "
        "rs.audit(model, ...), or its code with --model package.module:factory --trust-code."
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
        layer_names = kinds.attach_vectors(order, vectors)
        is_chain = all(lower[0] == upper[1] for lower, upper in itertools.pairwise(kernels))
        area, remainder = divmod(head[1], kernels[-1][0])
        if layer_names and is_chain and not remainder and math.isqrt(area) ** 2 == area:
            image_side = math.isqrt(area) * 2 ** len(kernels)
            widths = (*(kernel[0] for kernel in kernels), head[0])
            bias = bias_rule([len(names) == 2 for names in layer_names])
            return Architecture(
                "convnet", widths, (kernels[0][1], image_side, image_side), {"bias": bias}
            )
    return None
