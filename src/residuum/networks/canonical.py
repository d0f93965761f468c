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

# Modules with f(a z) = a f(z) for a > 0 that treat every channel alike. Dropout does nothing in evaluation.
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
MAX_SWEEPS = 10_000  # over all layers; 2 hidden layers need about 20, 10 about 300, 20 about 1000
CONVERGED = 1e-13  # largest change of a log factor in the last sweep
UNCHANGED = 1e-10  # largest log factor of a network that is balanced already, in float64
ROUNDINGS = 100  # the same for coarser number formats, in units of their rounding
NOTABLE = 1.1  # factor from which on the reader is told that neurons were rescaled
SAME = 1e-9  # share of the largest output by which rounding may change the outputs of a module


@dataclass(frozen=True)
class _Layer:
    """Names of the weight (h, n, ...) and of the bias (h,) of a layer, None without a bias."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class _Tensors:
    """A layer in float64: its weight as (h, units, positions) and its bias (h,), zero without one.

    The units are the neurons or channels of the layer below, a single one for the input. A dense layer
    behind a flattened image has several positions per channel.
    """

    weight: Tensor
    bias: Tensor


def attacked_form(network: Network, knowledge: Knowledge) -> Network:
    """Return the network that attacks work on.

    Initial weights and an optimizer state belong to the weights as they are, so a network of which the
    attacker knows either is attacked as it is. Any other network is attacked in its canonical form.

    Args:
        network: The network as it was read.
        knowledge: What the attacker knows about it.

    Returns:
        The network in its canonical form, or ``network`` itself.
    """
    is_free = knowledge.theta0 is None and knowledge.moment is None
    return canonical(network) if is_free else network


@torch.no_grad()
def canonical(network: Network) -> Network:
    """Return the balanced network that computes the same function, without dead neurons.

    Neurons are rescaled until the norms of their incoming weights (with the bias) and of their outgoing
    weights are equal. Neurons without incoming weights and bias, or without outgoing weights, are left out,
    and the architecture changes with them. This covers MLPs and convnets with ReLU, LeakyReLU or no
    activation, and live ``nn.Sequential`` modules of dense layers, ungrouped convolutions, such activations,
    pooling and flattening. In a live module, whose architecture cannot change, the weights of dead neurons
    become zero instead.

    Any other network is returned as it is: smooth activations, normalization layers and modules with a
    forward of their own. So are networks of which no output depends on the input.

    Args:
        network: The network.

    Returns:
        The canonical form, the same one however the neurons of ``network`` were rescaled. It is
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
    """Return the layers with weights, first to last, None if their neurons cannot be rescaled."""
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
    """Return the layers with weights of a live ``nn.Sequential``, None if any part does not fit.

    A layer that is used twice has parameters under its first name only, so it does not fit.
    """
    if network.live is None or type(network.live) is not nn.Sequential:
        return None
    layers: list[_Layer] = []
    is_flat = True  # the last dimension holds the neurons, not the positions of channels
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
    """Return the layers in float64, None if the inputs of one are no multiple of the units below."""
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

    A neuron that is left out takes weights of its neighbors with it, so this repeats until nothing changes.
    """
    alive = [torch.ones_like(layer.bias, dtype=torch.bool) for layer in tensors]
    masks = [torch.ones(1, dtype=torch.bool), *alive]  # of the input, and of every layer
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
    """Return for every layer which of its rows and units are alive. Inputs and outputs always are."""
    inputs, outputs = (torch.ones(n, dtype=torch.bool) for n in (1, len(tensors[-1].bias)))
    return [*alive, outputs], [inputs, *alive]


def _log_factors(tensors: list[_Tensors]) -> list[Tensor] | None:
    """Return log a_j of the neurons of every hidden layer that balance the network.

    None if weights differ by so many orders of magnitude that squared norms are no numbers in float64.
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
    # u_j = a_j^2 solves u_j ||w_j||^2 = ||v_j||^2 / u_j, with the factors of both neighbors in the norms.
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
    """Return the network with these weights, and with as many neurons as they have."""
    arch = network.architecture
    hidden = tuple(int(mask.sum()) for mask in alive)
    inputs = arch.widths[:1] if arch.image_shape is None else ()
    arch = replace(arch, widths=(*inputs, *hidden, arch.widths[-1]))
    return network.replace(theta=_theta(network, layers, tensors), arch=arch)


def _fill(tensors: list[_Tensors], balanced: list[_Tensors], alive: list[Tensor]) -> list[_Tensors]:
    """Return all neurons, with zero for the weights and biases of those that are not alive."""
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
    """Return the sentence for the reader, none if nothing notable changed."""
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
