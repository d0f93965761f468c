"""Between checkpoints and live networks."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from residuum.checkpoints.states import clean_state
from residuum.errors import ArchitectureError, CheckpointError
from residuum.networks import Architecture, kind_of, recognise
from residuum.records import Checkpoint

PASSED_OVER = (  # parts that do nothing in evaluation
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.Identity,
)
KEPT = (
    "a {} is kept as given: what its forward does is not read; surrogates replace its nn.ReLU modules, a "
    "ReLU called as a function stays as it is"
)


def build_model(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> nn.Module:
    """The network of a checkpoint with its weights, in evaluation mode.

    dtype: the checkpoint's own when None. The parameters are copies; no random number is drawn.
    """
    model, kept = copy.deepcopy(checkpoint.module), checkpoint.module is not None
    if model is None:
        with torch.device("meta"):
            model = Architecture.parse(checkpoint.arch).build()
    theta = {name: t.to(dtype or t.dtype, copy=True) for name, t in checkpoint.theta.items()}
    own = dict(model.named_parameters()) if kept else model.state_dict()
    if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in theta.items()}:
        raise ArchitectureError(
            f"The weights must fit {checkpoint.arch}; they are "
            f"{', '.join(f'{name} {list(t.shape)}' for name, t in list(theta.items())[:6])}.",
            "Read the file with load_checkpoint, which matches the names.",
        )
    if kept:
        model.to(next(iter(theta.values())).dtype)  # buffers too
        theta = {**model.state_dict(), **theta}
    model.load_state_dict(theta, strict=True, assign=not kept)
    return model.eval()


def checkpoint_from_module(
    model: nn.Module,
    *,
    input_shape: tuple[int, ...] = (),
    labels: tuple[str, ...] = (),
    task: str = "",
    shape_if_kept: tuple[int, ...] | None = None,
) -> Checkpoint:
    """A checkpoint of a live network, its weights copied to the CPU.

    A network of a class in ``KINDS`` and a plain nn.Sequential become what their string describes. A
    Sequential may hold Linear layers with ReLU between all of them or none, leading Flatten layers,
    and anywhere Dropout and Identity, which do nothing in evaluation. Any other module is kept as
    given and runs in evaluation mode; the shape of one sample must be said unless its first layer
    is Linear and takes the input as it is.
    """
    try:
        found = _describe(model)
    except (ArchitectureError, CheckpointError):  # no string describes these biases or shapes
        found = None
    if found is None:
        kept = _keep(model, tuple(input_shape or shape_if_kept or ()))
        return kept.replace(labels=tuple(labels), task=task)
    arch, state = found
    theta, _, notes = clean_state(state)
    own_names = {id(t): name for name, t in model.state_dict(keep_vars=True).items()}
    source = {name: own_names[id(t)] for name, t in state.items()}
    shape = fitting_shape(arch, input_shape)
    return Checkpoint(theta, str(arch), shape, tuple(labels), task, tuple(notes), source)


def fitting_shape(arch: Architecture, shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` of one sample, known to fit; () becomes the image shape of a convnet."""
    shape = tuple(shape) or arch.image_shape or ()
    if shape and (min(shape) < 1 or math.prod(shape) != arch.inputs):
        raise ArchitectureError(
            f"An input of {arch} has {arch.inputs} values; got the shape {shape}.",
            "Correct the input shape, or leave it out.",
        )
    return shape


def _describe(model: nn.Module) -> tuple[Architecture, dict[str, Tensor]] | None:
    """The architecture, and the live parameters under its names in its order; None without any."""
    if type(model) is nn.Sequential:
        return _describe_sequential(model)
    kind = kind_of(model)
    arch = None if kind is None else kind.describe(model)
    return None if arch is None else (arch, model.state_dict(keep_vars=True))


def _describe_sequential(model: nn.Sequential) -> tuple[Architecture, dict[str, Tensor]] | None:
    leaves = (part for part in _leaves(model) if type(part) not in PASSED_OVER)
    parts = list(itertools.dropwhile(lambda part: type(part) is nn.Flatten, leaves))
    linear = len(parts) > 1 and all(type(part) is nn.Linear for part in parts)
    layers, between = (parts, []) if linear else (parts[::2], parts[1::2])
    dense = all(type(part) is nn.Linear for part in layers)
    if not (
        dense and all(isinstance(part, nn.ReLU) for part in between) and (linear or len(parts) % 2)
    ):
        return None
    state = {
        f"layers.{i}.{name}": parameter
        for i, layer in enumerate(layers)
        for name, parameter in layer.state_dict(keep_vars=True).items()
    }
    found, _ = recognise(state)
    activation = "linear" if linear else "relu"
    return replace(found, options={**found.options, "activation": activation}), state


def _leaves(model: nn.Sequential) -> Iterator[nn.Module]:
    for module in model._modules.values():  # children() leaves out a ReLU used twice
        assert module is not None
        if type(module) is nn.Sequential:
            yield from _leaves(module)
        else:
            yield module


def _keep(model: nn.Module, shape: tuple[int, ...]) -> Checkpoint:
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
    outputs = _outputs(model, shape)
    model.register_forward_pre_hook(functools.partial(_as_samples, shape))
    arch = Architecture("module", (outputs,), shape, {"class": name[:80]})
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    names = {n: n for n in theta}
    return Checkpoint(
        theta,
        str(arch),
        shape,
        assumptions=(KEPT.format(name[:40]),),
        source_names=names,
        module=model,
    )


def _outputs(model: nn.Module, shape: tuple[int, ...]) -> int:
    """How many, known from two samples."""
    probe = torch.zeros(2, *shape, dtype=next(model.parameters()).dtype)
    try:
        with torch.no_grad():
            outputs = model(probe)
    except Exception as problem:  # a forward of somebody's own may raise anything
        raise ArchitectureError(
            f"The network must take samples of shape {shape}; the forward of {type(model).__name__} says: "
            f"{(str(problem) or type(problem).__name__).splitlines()[0][:200]}",
            "Grant the shape of one sample as the network receives it, or correct the data.",
        ) from problem
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(probe):
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ArchitectureError(
            f"A network returns (n, outputs); for {len(probe)} samples this one returned {got}.",
            "Give a module whose forward returns one row of outputs per sample.",
        )
    return outputs.shape[1]


def _as_samples(
    shape: tuple[int, ...], model: nn.Module, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Before the forward of a kept network: flat samples get their shape."""
    x, *others = inputs
    return (x.reshape(len(x), *shape), *others)
