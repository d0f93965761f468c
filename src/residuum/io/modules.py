"""Read a live module as a network."""

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
    """A checkpoint of a live network, its weights copied to the CPU.

    A network of a class in ``KINDS``, and any that computes what one of them does, becomes what its
    string describes. Any other module is kept as given and runs in evaluation mode; the shape of one
    sample must be said unless its first layer is Linear and takes the input as it is.
    """
    model, shown = unwrap(model), tuple(input_shape or fallback_shape or ())
    try:
        found = _describe(model, shown)
    except (ArchitectureError, CheckpointError):  # no string describes these biases or shapes
        found = None
    if found is None:
        kept = _wrap_module(model, shown)
        return kept.replace(labels=tuple(labels), task=task)
    arch, state = found
    theta, _, notes = clean_state(state)
    own_names = {id(t): name for name, t in model.state_dict(keep_vars=True).items()}
    source = {name: own_names[id(t)] for name, t in state.items()}
    shape = check_input_shape(arch, input_shape)
    return Network(theta, str(arch), shape, tuple(labels), task, tuple(notes), source)


def check_input_shape(arch: Architecture, shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` of one sample, known to fit; () becomes the image shape of a convnet."""
    shape = tuple(shape) or arch.image_shape or ()
    if shape and (min(shape) < 1 or math.prod(shape) != arch.inputs):
        raise ArchitectureError(
            f"An input of {arch} has {arch.inputs} values; got the shape {shape}.",
            "Correct the input shape, or leave it out.",
        )
    return shape


def _describe(
    model: nn.Module, shape: tuple[int, ...]
) -> tuple[Architecture, dict[str, Tensor]] | None:
    """The architecture, and the live parameters under its names in its order; None without any."""
    kind = kind_of(model)
    arch = None if kind is None else kind.describe(model)
    if arch is not None:
        return arch, model.state_dict(keep_vars=True)
    return same_function(model, shape)


def _wrap_module(model: nn.Module, shape: tuple[int, ...]) -> Network:
    """A network of any class, which takes samples of ``shape``, or of its first Linear layer."""
    name = type(model).__name__
    theta = {n: p.detach() for n, p in model.named_parameters()}
    if not any(p.ndim > 1 for p in theta.values()):
        raise ArchitectureError(
            f"A network needs a layer with weights; this {name} has none.", "Check the module."
        )
    if bad := [n for n, p in theta.items() if not (p.is_floating_point() and p.isfinite().all())]:
        raise CheckpointError(
            f"Weights must be finite real numbers; {bad[0]!r} of this {name} are not.",
            "Use a network whose training did not diverge.",
        )
    double = any(p.dtype == torch.float64 for p in theta.values())
    model = copy.deepcopy(model).cpu().to(torch.float64 if double else torch.float32).eval()
    first = next(part for part in model.modules() if list(part.parameters(recurse=False)))
    if not shape and isinstance(first, nn.Linear):
        shape = (first.in_features,)
    if not shape:
        raise ArchitectureError(
            f"The shape of one sample must be said for a network that is kept as given; this {name} does "
            "not show it.",
            "Grant it: Knowledge(shape=(3, 32, 32)), or give the data.",
        )
    try:
        found = probe(model, shape)
    except ArchitectureError:
        flat = (math.prod(shape),)  # images may be given to a network that takes them laid flat
        if shape == flat or not isinstance(first, nn.Linear) or (first.in_features,) != flat:
            raise
        shape, found = flat, probe(model, flat)
    model.register_forward_pre_hook(functools.partial(_as_samples, shape))
    if found.is_flat:
        model.register_forward_hook(add_output_dimension)
    arch = Architecture("module", (found.outputs,), shape, {"class": name[:80]})
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    notes, names = (RUN_AS_IS.format(name[:40]), *found.notes), {n: n for n in theta}
    return Network(theta, str(arch), shape, assumptions=notes, source_names=names, live=model)


def _as_samples(shape: tuple[int, ...], _: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Before the forward of a kept network: flat samples get their shape."""
    x, *others = inputs
    return (x.reshape(len(x), *shape), *others)
