"""Activation patterns of piecewise linear networks, and the switches that define them.

A *switch* is a function s_k(x) of the network's input. It is the pre-activation of a ReLU neuron, or the
difference between the largest entry of a pooling window and another entry. The activation pattern of a sample
is the signs of all switches. As long as the pattern does not change, the switches and all gradients with
respect to the weights are affine in x. This is all that merging and splitting of samples need, for any
objective and any depth.

Samples x have shape (n, *shape). Values and slopes have shape (n, K) for the K switches of all layers. If
gradients are taken at several weight vectors, K counts the switches of the networks with all these weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional as F

from residuum.errors import InputError
from residuum.networks import MLP, Linear, dense_chain

# A derivative below this share of the largest derivative in its layer is a rounding error.
ROUNDING = 1e-13
CHUNK = 256  # number of directions along which the network is differentiated at once
MAX_NAMED = 4  # largest number of neurons that an error message names individually
_PIECEWISE = (nn.ReLU, nn.LeakyReLU)
_AFFINE = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Flatten,
    nn.Unflatten,
    nn.Identity,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.ZeroPad2d,
    nn.Upsample,
)


class HypothesisError(InputError):
    """Raised if samples or a network violate a condition of the theorems about merging and splitting.

    Attributes:
        hypothesis: Name of the condition: label, pattern, multiplier, direction, kink, budget, or subspace.
    """

    def __init__(self, message: str, remedy: str = "", hypothesis: str = "") -> None:
        super().__init__(message, remedy)
        self.hypothesis = hypothesis

    def __reduce__(self) -> tuple[type[HypothesisError], tuple[str, str, str]]:  # type: ignore[override]
        return type(self), (self.message, self.remedy, self.hypothesis)


@dataclass(frozen=True)
class Switches:
    """The values of all switches of a network at n samples.

    A switch is a function whose sign belongs to the activation pattern, for example the input of a ReLU. It
    is zero on an activation boundary.

    Attributes:
        layers: Name of each layer and number of its switches, in the order of ``values``.
        values: (n, K) values of the K switches.
    """

    layers: tuple[tuple[str, int], ...]
    values: Tensor

    @property
    def pattern(self) -> Tensor:
        """The activation patterns of n samples: an (n, K) mask of the switches with a positive value.

        The mask is False for a switch with value 0, because PyTorch's derivative of a ReLU at 0 is 0.
        """
        return self.values > 0

    def name(self, k: int) -> str:
        """Return the name of switch ``k`` (such as a neuron): its layer and its number in this layer."""
        for layer, size in self.layers:
            if k < size:
                return f"{layer}[{k}]"
            k -= size
        raise IndexError(k)

    def names(self, chosen: Tensor) -> str:
        """Name the switches (such as inputs of ReLUs) that a (K,) mask selects, at most four of them."""
        positions = chosen.nonzero()[:, 0].tolist()
        listed_names = ", ".join(self.name(k) for k in positions[:MAX_NAMED])
        return listed_names + (
            f" and {len(positions) - MAX_NAMED} more" if len(positions) > MAX_NAMED else ""
        )


def compute_switches(models: Sequence[nn.Module], x: Tensor) -> Switches:
    """Compute the values of all switches (such as inputs of ReLUs) at samples.

    A switch is a function whose sign belongs to the activation pattern, for example the input of a ReLU.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (n, *shape) samples.

    Returns:
        The switches of all copies.
    """
    layers, values = [], []
    for i, model in enumerate(models):
        # The name of a switch (input of a ReLU) is made of its copy of the network ("point"), its layer and
        # its number in the layer.
        copy_name = f"point {i}: " if len(models) > 1 else ""
        for name, value in record_switches(model, x):
            layers.append((copy_name + name, value.shape[1]))
            values.append(value)
    return Switches(tuple(layers), torch.cat([x.new_zeros(len(x), 0), *values], 1).detach())


def compute_slopes(models: Sequence[nn.Module], x: Tensor, direction: Tensor) -> Tensor:
    """Differentiate every switch (such as the input of a ReLU) at each sample along a direction.

    A switch is a function whose sign belongs to the activation pattern, for example the input of a ReLU.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (n, *shape) samples.
        direction: (n, *shape) directions, one for each sample, or (*shape) for all samples.

    Returns:
        (n, K) slopes of the K switches.
    """

    def values(z: Tensor) -> Tensor:
        switch_values = [value for model in models for _, value in record_switches(model, z)]
        return torch.cat([z.new_zeros(len(z), 0), *switch_values], 1)

    return jvp(values, (x,), (direction.expand_as(x).contiguous(),))[1].detach()


def compute_slope_matrix(models: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Compute the gradients of all switches (such as inputs of ReLUs) at one sample.

    A switch is a function whose sign belongs to the activation pattern, for example the input of a ReLU.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (*shape) a sample with d entries.

    Returns:
        (K, d) gradients of the K switches with respect to the sample.
    """
    chains = [chain for model in models if (chain := dense_chain(model)) is not None]
    if len(chains) == len(models):
        return torch.cat([_chain_slopes(chain, x) for chain in chains])
    entry_count = x.numel()
    unit_directions = torch.eye(entry_count, dtype=x.dtype, device=x.device).reshape(
        entry_count, *x.shape
    )
    slope_blocks = [
        compute_slopes(models, x.expand(len(directions), *x.shape).contiguous(), directions)
        for directions in unit_directions.split(CHUNK)
    ]
    return torch.cat(slope_blocks).T


@torch.no_grad()
def _chain_slopes(chain: MLP, x: Tensor) -> Tensor:
    """Return the gradients of all hidden pre-activations of an MLP with respect to one sample x.

    Pre-activations are the inputs of activation functions. The gradients of the first layer's pre-activations
    are W_1, those of the second layer are W_2 diag(gates_1) W_1, and so on. W_l is the weight of layer l, and
    gates_l are the derivatives of its activation.
    """
    layer_slopes, slopes_below = [x.new_zeros(0, x.numel())], chain.linears[0].weight
    if not isinstance(chain.activation, Linear):
        for layer, pre in zip(chain.linears[1:], chain.trace(x[None]).pre, strict=False):
            layer_slopes.append(slopes_below)
            is_active = pre[0] > 0
            slopes_below = layer.weight[:, is_active] @ slopes_below[is_active]
    return torch.cat(layer_slopes)


def estimate_slope_sizes(
    models: Sequence[nn.Module], x: Tensor, layers: Sequence[tuple[str, int]]
) -> Tensor:
    """Estimate how large the slopes of switches (inputs of ReLUs, for example) are in each layer.

    The estimate is the largest slope in the layer along a direction with random entries -1 and +1. It is used
    to recognize rounding errors: slopes below 1e-13 times the estimate count as zero.

    Args:
        models: Copies of the network, one for each weight vector at which gradients are taken.
        x: (n, *shape) samples.
        layers: Name of each layer and number of its switches.

    Returns:
        (n, K) sizes, equal for all switches of a layer.
    """
    sign_direction = (
        torch.randint(0, 2, x.shape[1:], generator=torch.Generator().manual_seed(0)) * 2 - 1
    )
    all_slopes = compute_slopes(models, x, sign_direction.to(x.dtype)).abs()
    slopes_by_layer = all_slopes.split([size for _, size in layers], 1) if layers else ()
    return torch.cat(
        [
            all_slopes[:, :0],
            *(
                layer_slopes.amax(1, keepdim=True).expand_as(layer_slopes)
                for layer_slopes in slopes_by_layer
                if layer_slopes.shape[1]
            ),
        ],
        1,
    )


def check_piecewise_linear(model: nn.Module) -> None:
    """Raise an error if a module of the network is not piecewise linear."""
    supported_types = (*_PIECEWISE, *_AFFINE, nn.MaxPool2d)
    leaf_modules = [m for m in model.modules() if not list(m.children()) and m is not model]
    unsupported = [m for m in leaf_modules if not isinstance(m, supported_types)]
    unsupported += [
        m for m in leaf_modules if isinstance(m, nn.MaxPool2d) and (m.padding or m.dilation != 1)
    ]
    if not unsupported and (leaf_modules or isinstance(model, supported_types)):
        return
    module_name = str(unsupported[0]) if unsupported else type(model).__name__
    raise HypothesisError(
        "Training samples can be merged and split only if the network is piecewise linear and has only "
        f"supported modules; got the unsupported module {module_name}.",
        "Write ReLU and max pooling as separate modules of the network.",
        hypothesis="pattern",
    )


def record_switches(model: nn.Module, x: Tensor) -> list[tuple[str, Tensor]]:
    """Record the values of all switches (activation boundaries) in a forward pass.

    Args:
        model: The network.
        x: (n, *shape) samples.

    Returns:
        Each layer's name and the (n, units) values of its switches, first layer first.
    """
    if (chain := dense_chain(model)) is not None:
        if isinstance(chain.activation, Linear):
            return []
        return [(f"layers.{i}", z) for i, z in enumerate(chain.trace(x).pre[:-1])]
    records: list[tuple[str, Tensor]] = []

    def hook(name: str, module: nn.Module, z: Tensor) -> None:
        switch_values = (
            _compute_distances_to_maximum(module, z)
            if isinstance(module, nn.MaxPool2d)
            else z.flatten(1)
        )
        earlier_calls = sum(other.partition("#")[0] == name for other, _ in records)
        records.append((f"{name}#{earlier_calls}" if earlier_calls else name, switch_values))

    handles = [
        module.register_forward_hook(lambda m, inputs, _, name=name: hook(name, m, inputs[0]))
        for name, module in model.named_modules()
        if isinstance(module, (*_PIECEWISE, nn.MaxPool2d))
    ]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return records


def _compute_distances_to_maximum(module: nn.MaxPool2d, z: Tensor) -> Tensor:
    """Compute how much smaller each entry of a pooling window is than the largest entry, (n, units)."""
    windows = F.unfold(z, module.kernel_size, stride=module.stride)
    window_entries = windows.reshape(len(z), z.shape[1], -1, windows.shape[-1])
    return (window_entries.max(2, keepdim=True).values - window_entries).flatten(1)
