"""Between checkpoints and live networks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from residuum.checkpoints.states import clean_state
from residuum.errors import ArchitectureError
from residuum.networks import Architecture, kind_of, recognise
from residuum.networks.activations import OTHERS_REFUSED, is_other
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


def build_model(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> nn.Module:
    """The network of a checkpoint with its weights, in evaluation mode.

    dtype: the checkpoint's own when None. The parameters are copies; no random number is drawn.
    """
    with torch.device("meta"):
        model = Architecture.parse(checkpoint.arch).build()
    theta = {name: t.to(dtype or t.dtype, copy=True) for name, t in checkpoint.theta.items()}
    wanted = {name: t.shape for name, t in model.state_dict().items()}
    if wanted != {name: t.shape for name, t in theta.items()}:
        raise ArchitectureError(
            f"The weights must fit {checkpoint.arch}; they are "
            f"{', '.join(f'{name} {list(t.shape)}' for name, t in list(theta.items())[:6])}.",
            "Read the file with load_checkpoint, which matches the names.",
        )
    model.load_state_dict(theta, strict=True, assign=True)
    return model.eval()


def checkpoint_from_module(
    model: nn.Module,
    *,
    input_shape: tuple[int, ...] = (),
    labels: tuple[str, ...] = (),
    task: str = "",
) -> Checkpoint:
    """A checkpoint of a live network: MLP, ConvNet, PolynomialNetwork or a plain nn.Sequential.

    A Sequential may hold Linear layers with ReLU between all of them or none, leading Flatten
    layers, and anywhere Dropout and Identity, which do nothing in evaluation. Weights are copied to
    the CPU.
    """
    arch, state = _describe(model)
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


def _describe(model: nn.Module) -> tuple[Architecture, dict[str, Tensor]]:
    """The architecture, and the live parameters under its names in its order."""
    if type(model) is nn.Sequential:
        return _describe_sequential(model)
    kind = kind_of(model)
    arch = None if kind is None else kind.describe(model)
    if arch is None:
        raise _unreadable(model)
    return arch, model.state_dict(keep_vars=True)


def _describe_sequential(model: nn.Sequential) -> tuple[Architecture, dict[str, Tensor]]:
    leaves = ((name, part) for name, part in _leaves(model) if type(part) not in PASSED_OVER)
    parts = list(itertools.dropwhile(lambda part: type(part[1]) is nn.Flatten, leaves))
    linear = len(parts) > 1 and all(type(part) is nn.Linear for _, part in parts)
    if not linear and (problem := _in_the_way(parts)):
        raise ArchitectureError(
            "A Sequential is read as Flatten layers, then Linear layers with ReLU between all of them "
            f"or none; {problem}.",
            _remedy(parts),
        )
    layers = [part for _, part in (parts if linear else parts[::2])]
    state = {
        f"layers.{i}.{name}": parameter
        for i, layer in enumerate(layers)
        for name, parameter in layer.state_dict(keep_vars=True).items()
    }
    found, _ = recognise(state)
    activation = "linear" if linear else "relu"
    return replace(found, options={**found.options, "activation": activation}), state


def _leaves(model: nn.Sequential, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, module in model._modules.items():  # named_children leaves out a ReLU used twice
        assert module is not None
        if type(module) is nn.Sequential:
            yield from _leaves(module, f"{prefix}{name}.")
        else:
            yield prefix + name, module


def _in_the_way(parts: list[tuple[str, nn.Module]]) -> str:
    """What keeps ``parts`` from being Linear, ReLU, Linear, ...; "" for nothing."""
    odd = [f"part {name!r} is a {type(part).__name__}" for name, part in parts if not _plain(part)]
    if odd:  # a part of another kind shifts all places behind it: asked first
        return ", ".join(odd)
    for place, (name, part) in enumerate(parts):
        wanted = nn.ReLU if place % 2 else nn.Linear
        if not isinstance(part, wanted):
            return f"part {name!r} is a {type(part).__name__} where a {wanted.__name__} belongs"
    if not parts:
        return "this one holds no Linear"
    return "" if len(parts) % 2 else f"part {parts[-1][0]!r} is a ReLU at the end"


def _plain(part: nn.Module) -> bool:
    return type(part) is nn.Linear or isinstance(part, nn.ReLU)


def _unreadable(model: nn.Module) -> ArchitectureError:
    """A class of somebody's own: what its forward does cannot be read off its layers."""
    leaves = [(name, part) for name, part in model.named_modules() if not list(part.children())]
    odd = [
        (name, part)
        for name, part in leaves
        if name and type(part) not in (nn.Flatten, *PASSED_OVER) and not _plain(part)
    ]
    named = ", ".join(f"{name!r} ({type(part).__name__})" for name, part in odd)
    return ArchitectureError(
        "A network is read from nn.Sequential of Flatten, Linear and ReLU, or from residuum's MLP, "
        f"ConvNet or PolynomialNetwork; got {type(model).__name__}"
        + (f", and of its parts these cannot be read: {named}." if odd else "."),
        _remedy(odd)
        if odd
        else "Wrap the layers in nn.Sequential, or give model.state_dict(): ReLU is then assumed.",
    )


def _remedy(parts: list[tuple[str, nn.Module]]) -> str:
    """What to do about ``parts`` that cannot be read; other activations come with their reason."""
    if any(is_other(type(part).__name__) for _, part in parts):
        return OTHERS_REFUSED
    return (
        "Leaving out a part that was trained with makes another network: audit one of Flatten, Linear "
        "and ReLU, or build it with residuum.networks.MLP or ConvNet."
    )
