"""Convert a torch module in memory (a live module) to a network."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from residuum.errors import ArchitectureError, CheckpointError
from residuum.io.state_dicts import clean_state
from residuum.networks import (
    Architecture,
    kind_of,
    same_function,
)
from residuum.networks.network import Network
from residuum.networks.probing import add_output_dimension, probe, unwrap

RUN_AS_IS = (
    "a {} is run as it is: its forward pass is not analyzed, so only structure-free attacks apply"
)


def checkpoint_from_module(
    model: nn.Module,
    *,
    input_shape: tuple[int, ...] = (),
    labels: tuple[str, ...] = (),
    task: str = "",
    fallback_shape: tuple[int, ...] | None = None,
) -> Network:
    """Return the network of a live module, with a copy of its weights on the CPU.

    If the module computes the same function as a known architecture (``KINDS``), the network has an
    architecture string. Any other module is run as it is: in evaluation mode, without analyzing its forward
    pass. Such a module needs the shape of a sample, unless its first layer is Linear and receives the input.

    Args:
        model: The module.
        input_shape: Shape of one sample, which must fit the architecture.
        labels: Names of the classes.
        task: The task, such as "multiclass". An empty task is inferred later.
        fallback_shape: Shape of one sample, used only if no architecture string describes the module.

    Returns:
        The network.

    Example:
        >>> import residuum as rs
        >>> network = rs.checkpoint_from_module(model)  # doctest: +SKIP
    """
    model, sample_shape = unwrap(model), tuple(input_shape or fallback_shape or ())
    try:
        description = _describe(model, sample_shape)
    except (ArchitectureError, CheckpointError):  # an architecture that residuum does not know
        description = None
    if description is None:
        wrapped = wrap_module(model, sample_shape)
        return wrapped.replace(labels=tuple(labels), task=task)
    arch, state = description
    theta, _, notes = clean_state(state)
    name_by_tensor_id = {id(t): name for name, t in model.state_dict(keep_vars=True).items()}
    source_names = {name: name_by_tensor_id[id(t)] for name, t in state.items()}
    shape = check_input_shape(arch, input_shape)
    return Network(theta, str(arch), shape, tuple(labels), task, tuple(notes), source_names)


def check_input_shape(arch: Architecture, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one sample after checking that it fits the architecture.

    Args:
        arch: The architecture.
        shape: Shape of one sample. For an empty shape, the image shape of a convnet is used.

    Returns:
        The shape, or () if the shape is not known.

    Raises:
        ArchitectureError: If a sample of this shape does not have as many values as the network has inputs.
    """
    shape = tuple(shape) or arch.image_shape or ()
    if shape and (min(shape) < 1 or math.prod(shape) != arch.inputs):
        raise ArchitectureError(
            f"A sample of the network {str(arch)!r} must have {arch.inputs} values; the input shape "
            f"{shape} has another number of values.",
            "Correct the input shape, or omit the input shape.",
        )
    return shape


def _describe(
    model: nn.Module, shape: tuple[int, ...]
) -> tuple[Architecture, dict[str, Tensor]] | None:
    """Return the architecture of a torch module, and its parameters by their names in this architecture.

    Return None if no architecture string describes the module.
    """
    kind = kind_of(model)
    arch = None if kind is None else kind.describe(model)
    if arch is not None:
        return arch, model.state_dict(keep_vars=True)
    return same_function(model, shape)


def wrap_module(model: nn.Module, shape: tuple[int, ...]) -> Network:
    """Return a network that runs a copy of a module of any class.

    Args:
        model: The module.
        shape: Shape of one sample, or () if the first layer is Linear and receives the input.

    Returns:
        The network, without an architecture string that describes its layers.

    Raises:
        ArchitectureError: If the module has no weights, or if its samples have another shape.
        CheckpointError: If a weight is not a finite real number.
    """
    class_name = type(model).__name__
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    if not any(p.ndim > 1 for p in parameters.values()):
        raise ArchitectureError(
            f"A network needs a layer with weights; this module of the class {class_name} has no weights.",
            "Pass the module that holds the weights.",
        )
    is_finite = {
        n: p.is_floating_point() and bool(p.isfinite().all()) for n, p in parameters.items()
    }
    if invalid_names := [n for n, finite in is_finite.items() if not finite]:
        raise CheckpointError(
            f"Weights must be finite real numbers; the weights {invalid_names[0]!r} of this {class_name} "
            "are not.",
            "Use a network whose training did not diverge.",
        )
    has_doubles = any(p.dtype == torch.float64 for p in parameters.values())
    model = copy.deepcopy(model).cpu().to(torch.float64 if has_doubles else torch.float32).eval()
    first_layer = next(m for m in model.modules() if list(m.parameters(recurse=False)))
    if not shape and isinstance(first_layer, nn.Linear):
        shape = (first_layer.in_features,)
    if not shape:
        raise ArchitectureError(
            "To read a module of an unknown architecture, residuum needs the shape of a sample; the "
            f"layers of this {class_name} do not determine the shape.",
            "Pass Knowledge(shape=(3, 32, 32)), or pass the data.",
        )
    try:
        probe_result = probe(model, shape)
    except ArchitectureError:
        flat_shape = (math.prod(shape),)  # try flattened samples, because a network may expect them
        if (
            shape == flat_shape
            or not isinstance(first_layer, nn.Linear)
            or (first_layer.in_features,) != flat_shape
        ):
            raise
        shape, probe_result = flat_shape, probe(model, flat_shape)
    model.register_forward_pre_hook(functools.partial(_as_samples, shape))
    if probe_result.is_flat:
        model.register_forward_hook(add_output_dimension)
    arch = Architecture("module", (probe_result.outputs,), shape, {"class": class_name[:80]})
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    notes, names = (
        (RUN_AS_IS.format(class_name[:40]), *probe_result.notes),
        {n: n for n in parameters},
    )
    return Network(parameters, str(arch), shape, assumptions=notes, source_names=names, live=model)


def _as_samples(shape: tuple[int, ...], _: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Reshape flattened samples to ``shape`` before the forward pass of a module."""
    x, *remaining = inputs
    return (x.reshape(len(x), *shape), *remaining)
