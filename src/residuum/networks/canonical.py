"""Bring a network into a form that does not depend on the scale of its neurons.

A positively homogeneous activation has phi(a z) = a phi(z) for a > 0. A neuron j between two layers can
therefore be rescaled without changing the function of the network:

    w_j -> a_j w_j,    b_j -> a_j b_j,    v_j -> v_j / a_j,        a_j > 0,

where w_j and b_j are the incoming weights and the bias of the neuron, and v_j are its outgoing weights. An
attack that compares weights with gradients does depend on a_j, so rescaled neurons could hide a leak from it.
Every KKT point of the margin problem is balanced:

    ||w_j||^2 + b_j^2 = ||v_j||^2        for every hidden neuron j.

The balanced form is unique. With a_j = exp(s_j), balancing minimizes the sum of all squared weights, which is
strictly convex in s if every neuron has incoming and outgoing weights. Given the other layers, the
factors of one layer have a closed form, so the layers are balanced in turn until no factor changes.

In convolutional layers a channel takes the place of a neuron: all of its positions share one factor, which
pooling and flattening preserve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from residuum.networks.activations import Linear, ReLU
from residuum.networks.kinds import MLP, ConvNet
from residuum.networks.network import Network
from residuum.networks.probing import probe_inputs
from residuum.records import Knowledge

# Modules with f(a z) = a f(z) for a > 0 that treat all channels in the same way. Dropout layers belong to
# these modules, because they do nothing in evaluation mode.
HOMOGENEOUS = (
    *(ReLU, Linear, nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
POOLING = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Largest number of balancing sweeps over all layers. Networks with 2 hidden layers need about 20 sweeps,
# networks with 20 hidden layers about 1000.
MAX_SWEEPS = 10_000
CONVERGED = 1e-13  # balancing stops if no log factor changes by more than this in a sweep
UNCHANGED = 1e-10  # a float64 network is balanced already if no log factor exceeds this
# A network of a coarser number format is balanced already if no log factor exceeds this many rounding errors.
ROUNDINGS = 100
NOTABLE = 1.1  # a note tells the reader if a neuron was rescaled by a larger factor than this
SAME = (
    1e-9  # largest change of the outputs that counts as rounding, as a share of the largest output
)


@dataclass(frozen=True)
class _Layer:
    """Parameter names of a layer: of its weight, and of its bias (None for a layer without a bias)."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class _Tensors:
    """A layer of h neurons in float64: its weight (h, units, positions) and its bias (h,).

    The units are the neurons or channels of the layer below. The network input counts as a single unit. A
    dense layer behind a flattened image has several positions per channel. A missing bias is zero.
    """

    weight: Tensor
    bias: Tensor


def attacked_form(network: Network, knowledge: Knowledge) -> Network:
    """Return the network that attacks work on.

    If the attacker knows initial weights or optimizer state, the network is attacked without changes, because
    both fit only the unscaled weights. Any other network is attacked in its canonical form.

    Args:
        network: The network as it was read.
        knowledge: What the attacker knows about it.

    Returns:
        The network in its canonical form, or ``network`` itself.
    """
    may_rescale = knowledge.theta0 is None and knowledge.moment is None
    return canonical(network) if may_rescale else network


@torch.no_grad()
def canonical(network: Network) -> Network:
    """Return the balanced network that computes the same function, without dead neurons.

    Neurons are rescaled until the norms of their incoming weights (with the bias) and of their outgoing
    weights are equal. Neurons without incoming weights and bias, or without outgoing weights, are left out,
    and the architecture changes with them. This covers MLPs and convnets with ReLU, LeakyReLU or no
    activation, and live ``nn.Sequential`` modules of dense layers, ungrouped convolutions, these activations,
    pooling and flattening. In a live module, whose architecture cannot change, the weights of dead neurons
    become zero instead.

    Any other network is returned as it is: networks with smooth activations or normalization layers, modules
    with a forward of their own, and networks whose outputs do not depend on the input.

    Args:
        network: The network.

    Returns:
        The canonical form, which does not depend on the scales of the neurons of ``network``. It is
        ``network`` itself if nothing changes by more than rounding. If neurons were left out, or rescaled
        by a factor of more than 1.1, a sentence in ``assumptions`` says so.

    Example:
        >>> network = Network(theta, "mlp:64-100-100-1")  # doctest: +SKIP
        >>> canonical(network).architecture.widths  # 12 neurons were dead  # doctest: +SKIP
        (64, 95, 93, 1)
    """
    layers = _homogeneous_layers(network)
    if layers is None or len(layers) < 2:
        return network
    tensors = _read(network, layers)
    if tensors is None:
        return network
    alive = _alive(tensors)
    if not all(bool(mask.any()) for mask in alive):
        return network
    logs = _log_factors(_take(tensors, alive))
    if logs is None:
        return network
    dropped = sum(int((~mask).sum()) for mask in alive)
    largest = max(float(s.abs().max()) for s in logs)
    eps = max(torch.finfo(t.dtype).eps for t in network.theta.values())
    if not dropped and largest <= max(UNCHANGED, ROUNDINGS * eps):
        return network
    balanced = _rescale(_take(tensors, alive), logs)
    if network.live is None:
        notes = _note(dropped, largest, "left out")
        result = _with_fewer_neurons(network, layers, balanced, alive)
    else:
        notes = _note(dropped, largest, "set to zero")
        filled = _fill(tensors, balanced, alive)
        result = network.replace(theta=_theta(network, layers, filled))
        if not _computes_the_same(network, result):
            return network
    return result.replace(assumptions=(*network.assumptions, *notes))


def _homogeneous_layers(network: Network) -> list[_Layer] | None:
    """Return the layers with weights, first layer first, or None if their neurons cannot be rescaled."""
    if network.live is not None:
        return _layers_in_sequence(network)
    module = network.module
    if type(module) not in (MLP, ConvNet) or type(module.activation) not in HOMOGENEOUS:
        return None
    return [
        _Layer(f"{name}.weight", None if layer.bias is None else f"{name}.bias")
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]


def _layers_in_sequence(network: Network) -> list[_Layer] | None:
    """Return the layers with weights of a live ``nn.Sequential``, or None if a module is not supported.

    A layer that is used twice has parameters under its first name only, so it is not supported.
    """
    if network.live is None or type(network.live) is not nn.Sequential:
        return None
    layers: list[_Layer] = []
    is_flat = (
        True  # True while the last dimension of the activations holds neurons, not image positions
    )
    for name, module in network.live.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            is_flat = True
        elif isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            is_dense = type(module) is nn.Linear
            is_plain = is_dense or (type(module) in CONVOLUTIONS and module.groups == 1)
            layer = _Layer(f"{name}.weight", None if module.bias is None else f"{name}.bias")
            names = {layer.weight, layer.bias or layer.weight}
            if not is_plain or (layers and is_flat != is_dense) or names - network.theta.keys():
                return None
            layers.append(layer)
            is_flat = is_dense
        elif type(module) not in (nn.Sequential, *HOMOGENEOUS, *(() if is_flat else POOLING)):
            return None
    return layers


def _read(network: Network, layers: list[_Layer]) -> list[_Tensors] | None:
    """Return the layers in float64, or None if the inputs of a layer do not fit the units below."""
    tensors: list[_Tensors] = []
    for layer in layers:
        weight = network.theta[layer.weight].detach().double().cpu()
        h, units = len(weight), len(tensors[-1].bias) if tensors else 1
        if weight[0].numel() % units:
            return None
        bias = weight.new_zeros(h)
        if layer.bias is not None:
            bias = network.theta[layer.bias].detach().double().cpu()
        tensors.append(_Tensors(weight.reshape(h, units, -1), bias))
    return tensors


def _alive(tensors: list[_Tensors]) -> list[Tensor]:
    """Return for every hidden layer which neurons have incoming and outgoing weights.

    If a neuron is left out, its neighbors lose weights. So the search repeats until nothing changes.
    """
    alive = [torch.ones_like(layer.bias, dtype=torch.bool) for layer in tensors]
    masks = [torch.ones(1, dtype=torch.bool), *alive]  # masks of the input and of every layer
    nonzero = [layer.weight.ne(0).any(2) for layer in tensors]
    while True:
        before = sum(int(mask.sum()) for mask in masks)
        for i in range(1, len(tensors)):
            incoming = nonzero[i - 1][:, masks[i - 1]].any(1) | tensors[i - 1].bias.ne(0)
            masks[i] = masks[i] & incoming & nonzero[i][masks[i + 1]].any(0)
        if sum(int(mask.sum()) for mask in masks) == before:
            return masks[1:-1]


def _take(tensors: list[_Tensors], alive: list[Tensor]) -> list[_Tensors]:
    """Return the layers without the neurons that are not alive."""
    return [
        _Tensors(layer.weight[rows][:, columns], layer.bias[rows])
        for layer, rows, columns in zip(tensors, *_masks(tensors, alive), strict=True)
    ]


def _masks(tensors: list[_Tensors], alive: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return masks of the live rows and units of every layer. Network inputs and outputs are always alive."""
    inputs, outputs = (torch.ones(n, dtype=torch.bool) for n in (1, len(tensors[-1].bias)))
    return [*alive, outputs], [inputs, *alive]


def _log_factors(tensors: list[_Tensors]) -> list[Tensor] | None:
    """Return the logarithms of the factors that balance the neurons, one tensor (h,) per hidden layer.

    Return None if weights differ by so many orders of magnitude that squared norms overflow in float64.
    """
    ends = torch.ones(1, dtype=torch.float64), torch.ones_like(tensors[-1].bias)
    # The largest weights are balanced first, so that squares of extreme weights stay within range.
    sizes = [layer.weight.abs().amax(2) for layer in tensors]
    a = [ends[0], *(torch.ones_like(layer.bias) for layer in tensors[:-1]), ends[1]]
    for i in [*range(1, len(tensors))] * 2:
        into = torch.maximum((sizes[i - 1] / a[i - 1]).amax(1), tensors[i - 1].bias.abs())
        out = (sizes[i] * a[i + 1][:, None]).amax(0)
        a[i] = out.sqrt() / into.sqrt()
    logs = [factors.log() for factors in a[1:-1]]
    scaled = _rescale(tensors, logs)
    squares = [layer.weight.square().sum(2) for layer in scaled]
    biases = [layer.bias.square() for layer in scaled]
    # For a neuron with incoming weights w and outgoing weights v, the squared factor u solves
    # u ||w||^2 = ||v||^2 / u. The norms include the factors of the neighboring layers.
    u = [ends[0], *(torch.ones_like(s) for s in logs), ends[1]]
    for _ in range(MAX_SWEEPS):
        change = 0.0
        for i in range(1, len(tensors)):
            into = squares[i - 1] @ u[i - 1].reciprocal() + biases[i - 1]
            updated = (u[i + 1] @ squares[i] / into).sqrt()
            if not bool((updated.isfinite() & (updated > 0)).all()):
                return None
            change = max(change, float((updated / u[i]).log().abs().max()) / 2)
            u[i] = updated
        if change <= CONVERGED:
            break
    return [s + factors.log() / 2 for s, factors in zip(logs, u[1:-1], strict=True)]


def _rescale(tensors: list[_Tensors], logs: list[Tensor]) -> list[_Tensors]:
    """Return the layers with every hidden neuron rescaled by the exponential of its log factor."""
    ends = torch.zeros(1, dtype=torch.float64), torch.zeros_like(tensors[-1].bias)
    return [
        _Tensors(
            layer.weight * (log_a[:, None] - below).exp()[:, :, None],
            layer.bias * log_a.exp(),
        )
        for layer, log_a, below in zip(tensors, [*logs, ends[1]], [ends[0], *logs], strict=True)
    ]


def _with_fewer_neurons(
    network: Network, layers: list[_Layer], tensors: list[_Tensors], alive: list[Tensor]
) -> Network:
    """Return the network with the weights ``tensors``, which belong only to the neurons that are alive."""
    arch = network.architecture
    hidden = tuple(int(mask.sum()) for mask in alive)
    inputs = arch.widths[:1] if arch.image_shape is None else ()
    arch = replace(arch, widths=(*inputs, *hidden, arch.widths[-1]))
    return network.replace(theta=_theta(network, layers, tensors), arch=arch)


def _fill(tensors: list[_Tensors], balanced: list[_Tensors], alive: list[Tensor]) -> list[_Tensors]:
    """Return the balanced layers with all neurons. Weights and biases of dead neurons are zero."""
    filled = []
    layers = zip(tensors, balanced, *_masks(tensors, alive), strict=True)
    for before, layer, rows, columns in layers:
        weight, bias = torch.zeros_like(before.weight), torch.zeros_like(before.bias)
        weight[rows.nonzero(), columns.nonzero()[:, 0]] = layer.weight
        bias[rows] = layer.bias
        filled.append(_Tensors(weight, bias))
    return filled


def _theta(network: Network, layers: list[_Layer], tensors: list[_Tensors]) -> dict[str, Tensor]:
    """Return the weights by parameter name, in the number format of the network, at least float32."""
    theta = {n: t.to(torch.promote_types(t.dtype, torch.float32)) for n, t in network.theta.items()}
    for layer, values in zip(layers, tensors, strict=True):
        before = theta[layer.weight]
        shape = (len(values.bias), -1, *before.shape[2:])
        theta[layer.weight] = values.weight.reshape(shape).to(before)
        if layer.bias is not None:
            theta[layer.bias] = values.bias.to(theta[layer.bias])
    return theta


def _computes_the_same(network: Network, other: Network) -> bool:
    """Return True if two networks with a live module agree on random samples."""
    x = probe_inputs(network.architecture.inputs).reshape(-1, *network.input_shape)
    outputs, other_outputs = network.double_module(x), other.double_module(x)
    eps = max(torch.finfo(t.dtype).eps for t in network.theta.values())
    tolerance = max(SAME, ROUNDINGS * eps) * float(outputs.abs().max())
    return bool((outputs - other_outputs).abs().max() <= tolerance)


def _note(dropped: int, largest: float, action: str) -> tuple[str, ...]:
    """Return a sentence about removed and rescaled neurons, or () if nothing notable changed."""
    is_rescaled = largest > math.log(NOTABLE)
    if not dropped and not is_rescaled:
        return ()
    text = "neurons were rescaled"
    if dropped:
        neurons = "1 neuron" if dropped == 1 else f"{dropped} neurons"
        verb = "was" if dropped == 1 else "were"
        text = f"{neurons} without incoming or outgoing weights {verb} {action}"
        text += " and the others were rescaled" if is_rescaled else ""
    return (f"{text} before the attacks. The network computes the same function.",)
