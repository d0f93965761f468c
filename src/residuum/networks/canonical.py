"""Bring a network into a form that does not depend on the scale of its neurons.

A positively homogeneous activation has phi(a z) = a phi(z) for a > 0. A neuron j between two layers can
therefore be rescaled without changing the function of the network:

    w_j -> a_j w_j,    b_j -> a_j b_j,    v_j -> v_j / a_j,        a_j > 0,

where w_j and b_j are the incoming weights and the bias of the neuron, and v_j are its outgoing weights. The
result of an attack that compares weights with gradients depends on the factors a_j. So an attack could miss a
leak if somebody rescaled the neurons. To prevent this, attacks work on the balanced form of the network:

    ||w_j||^2 + b_j^2 = ||v_j||^2        for every hidden neuron j.

Attacks that use the KKT conditions of the max-margin problem lose nothing, because every KKT point is
balanced.

The balanced form is unique. With a_j = exp(s_j), balancing minimizes the sum of all squared weights. This sum
is strictly convex in s if every neuron has incoming and outgoing weights. If the other layers are fixed, the
factors of one layer have a closed form. So the layers are balanced in turn until no factor changes.

In convolutional layers, channels take the place of neurons. All positions of a channel share one factor, and
pooling and flattening do not change this factor.
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

# Modules that are positively homogeneous, f(a z) = a f(z) for a > 0, and act on each channel separately.
# Dropout is among them, because it does nothing in evaluation mode.
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
# Neurons are rescaled layer by layer until the norms of their incoming and outgoing weights are equal. This
# is the largest number of passes over all layers. Networks with 2 hidden layers need about 20 passes,
# networks with 20 hidden layers about 1000.
MAX_PASSES = 10_000
# Rescaling stops after a pass in which the logarithm of every neuron's factor changes by at most this limit.
CONVERGED = 1e-13
# Rescaling multiplies the weights of each neuron by a factor. A float64 network stays unchanged if the
# logarithms of all factors are at most this limit.
UNCHANGED = 1e-10
# Rescaling multiplies the weights of each neuron by a factor. A less precise network stays unchanged if the
# logarithms of all factors are at most ROUNDINGS times the eps of its number format.
ROUNDINGS = 100
# Results mention that neurons were rescaled if the factor of a neuron exceeds this limit.
NOTABLE = 1.1
# The outputs of two networks count as equal if they differ by at most this share of the largest output.
SAME = 1e-9


@dataclass(frozen=True)
class _LayerNames:
    """Names of the parameters of a layer. ``bias`` is None if the layer has no bias."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class _LayerTensors:
    """The weight (h, k, p) and the bias (h,) of a layer with h neurons, in float64.

    The layer below has k neurons, or k channels if its activations are images. Each of the h neurons has p
    weights for each of the k neurons or channels. In a dense layer, p is 1. In a convolution, p is the number
    of entries of a kernel. In a dense layer behind a flattened image, p is the number of pixels. In the first
    layer, k is 1 and p is the number of all weights of a neuron. A missing bias is zero.
    """

    weight: Tensor
    bias: Tensor


def attacked_form(network: Network, knowledge: Knowledge) -> Network:
    """Return the form of a network that attacks work on.

    If the attacker knows the initial weights or the optimizer state, the network is attacked without changes,
    because the initial weights and the optimizer state do not fit rescaled weights. Otherwise the network is
    attacked in its canonical form: neurons are rescaled so that the norms of their incoming and outgoing
    weights are equal. This does not change the function of the network.

    Args:
        network: The network as it was read.
        knowledge: What the attacker knows about the network.

    Returns:
        The network in its canonical form, or ``network`` itself.
    """
    may_rescale = knowledge.theta0 is None and knowledge.moment is None
    return canonical(network) if may_rescale else network


@torch.no_grad()
def canonical(network: Network) -> Network:
    """Return a network with the same function, with rescaled neurons and without dead neurons.

    Neurons are rescaled until the norms of their incoming weights (with the bias) and of their outgoing
    weights are equal. A neuron is dead if it has no outgoing weights, or neither incoming weights nor a bias.
    Dead neurons are removed, so the widths in the architecture change.

    This function supports MLPs and convnets with ReLU, LeakyReLU or no activation. It also supports live
    ``nn.Sequential`` modules (passed as Python objects) of dense layers, ungrouped convolutions, these
    activations, pooling and flattening. The architecture of a live module cannot change, so the weights of
    its dead neurons are set to zero instead.

    Any other network is returned unchanged: networks with smooth activations or normalization layers, modules
    with their own forward method, and networks whose outputs do not depend on the input.

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
    tensors = _read_layers(network, layers)
    if tensors is None:
        return network
    alive_masks = _find_alive(tensors)
    if not all(bool(mask.any()) for mask in alive_masks):
        return network
    log_factors = _balancing_log_factors(_remove_dead(tensors, alive_masks))
    if log_factors is None:
        return network
    dead_count = sum(int((~mask).sum()) for mask in alive_masks)
    largest_log_factor = max(float(s.abs().max()) for s in log_factors)
    eps = max(torch.finfo(t.dtype).eps for t in network.theta.values())
    if not dead_count and largest_log_factor <= max(UNCHANGED, ROUNDINGS * eps):
        return network
    balanced_layers = _rescale(_remove_dead(tensors, alive_masks), log_factors)
    if network.live is None:
        notes = _describe_changes(dead_count, largest_log_factor, "left out")
        balanced_network = _with_fewer_neurons(network, layers, balanced_layers, alive_masks)
    else:
        notes = _describe_changes(dead_count, largest_log_factor, "set to zero")
        balanced_with_dead = _restore_dead(tensors, balanced_layers, alive_masks)
        balanced_network = network.replace(
            theta=_collect_theta(network, layers, balanced_with_dead)
        )
        if not _computes_the_same(network, balanced_network):
            return network
    return balanced_network.replace(assumptions=(*network.assumptions, *notes))


def _homogeneous_layers(network: Network) -> list[_LayerNames] | None:
    """Return the layers with weights, first layer first, or None if their neurons cannot be rescaled."""
    if network.live is not None:
        return _layers_in_sequence(network)
    module = network.module
    if type(module) not in (MLP, ConvNet) or type(module.activation) not in HOMOGENEOUS:
        return None
    return [
        _LayerNames(f"{name}.weight", None if layer.bias is None else f"{name}.bias")
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]


def _layers_in_sequence(network: Network) -> list[_LayerNames] | None:
    """Return the layers with weights of a live ``nn.Sequential``, or None if a module is not supported.

    A layer that is used twice is not supported, because its parameters have names only for the first use.
    """
    if network.live is None or type(network.live) is not nn.Sequential:
        return None
    layers: list[_LayerNames] = []
    # Whether the layer's outputs are vectors of neurons (True), or images with channels and positions
    # (False).
    is_vector = True
    for name, module in network.live.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            is_vector = True
        elif isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            is_dense = type(module) is nn.Linear
            is_supported = is_dense or (type(module) in CONVOLUTIONS and module.groups == 1)
            layer = _LayerNames(f"{name}.weight", None if module.bias is None else f"{name}.bias")
            names = {layer.weight, layer.bias or layer.weight}
            if (
                not is_supported
                or (layers and is_vector != is_dense)
                or names - network.theta.keys()
            ):
                return None
            layers.append(layer)
            is_vector = is_dense
        elif type(module) not in (nn.Sequential, *HOMOGENEOUS, *(() if is_vector else POOLING)):
            return None
    return layers


def _read_layers(network: Network, layers: list[_LayerNames]) -> list[_LayerTensors] | None:
    """Return weights and biases of layers in float64, or None if a weight does not fit the layer below."""
    tensors: list[_LayerTensors] = []
    for layer in layers:
        weight = network.theta[layer.weight].detach().double().cpu()
        h, units = len(weight), len(tensors[-1].bias) if tensors else 1
        if weight[0].numel() % units:
            return None
        bias = weight.new_zeros(h)
        if layer.bias is not None:
            bias = network.theta[layer.bias].detach().double().cpu()
        tensors.append(_LayerTensors(weight.reshape(h, units, -1), bias))
    return tensors


def _find_alive(tensors: list[_LayerTensors]) -> list[Tensor]:
    """Return for every hidden layer a mask of the neurons that have incoming and outgoing weights.

    If a neuron is removed, its neighbors lose weights and may become dead too. So the search repeats until
    nothing changes.
    """
    alive_masks = [torch.ones_like(layer.bias, dtype=torch.bool) for layer in tensors]
    masks = [torch.ones(1, dtype=torch.bool), *alive_masks]  # masks of the input and of every layer
    has_weights = [layer.weight.ne(0).any(2) for layer in tensors]
    while True:
        alive_count = sum(int(mask.sum()) for mask in masks)
        for i in range(1, len(tensors)):
            has_incoming = has_weights[i - 1][:, masks[i - 1]].any(1) | tensors[i - 1].bias.ne(0)
            masks[i] = masks[i] & has_incoming & has_weights[i][masks[i + 1]].any(0)
        if sum(int(mask.sum()) for mask in masks) == alive_count:
            return masks[1:-1]


def _remove_dead(tensors: list[_LayerTensors], alive_masks: list[Tensor]) -> list[_LayerTensors]:
    """Remove dead neurons from layers. In ``alive_masks``, dead neurons are False."""
    return [
        _LayerTensors(layer.weight[rows][:, columns], layer.bias[rows])
        for layer, rows, columns in zip(tensors, *_live_masks(tensors, alive_masks), strict=True)
    ]


def _live_masks(
    tensors: list[_LayerTensors], alive_masks: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return for every layer a mask of its neurons, and of its inputs, that are not dead.

    The inputs and outputs of the network are always alive.
    """
    inputs, outputs = (torch.ones(n, dtype=torch.bool) for n in (1, len(tensors[-1].bias)))
    return [*alive_masks, outputs], [inputs, *alive_masks]


def _balancing_log_factors(tensors: list[_LayerTensors]) -> list[Tensor] | None:
    """Return the logarithms of the factors by which to rescale the hidden neurons.

    After rescaling, the incoming weights and the outgoing weights of a neuron have equal norms. The list has
    one tensor (h,) for each hidden layer of h neurons. Return None instead of the list if weights differ so
    much in magnitude that their squared norms overflow in float64.
    """
    input_factor = torch.ones(1, dtype=torch.float64)
    output_factors = torch.ones_like(tensors[-1].bias)
    # The largest weights are balanced first, so that squares of extreme weights stay within range.
    max_weights = [layer.weight.abs().amax(2) for layer in tensors]
    # The factors of the network input, of the neurons of every hidden layer, and of the outputs.
    factors_by_layer = [
        input_factor,
        *(torch.ones_like(layer.bias) for layer in tensors[:-1]),
        output_factors,
    ]
    for i in [*range(1, len(tensors))] * 2:
        max_incoming = torch.maximum(
            (max_weights[i - 1] / factors_by_layer[i - 1]).amax(1), tensors[i - 1].bias.abs()
        )
        max_outgoing = (max_weights[i] * factors_by_layer[i + 1][:, None]).amax(0)
        factors_by_layer[i] = max_outgoing.sqrt() / max_incoming.sqrt()
    log_factors = [factors.log() for factors in factors_by_layer[1:-1]]
    scaled_layers = _rescale(tensors, log_factors)
    squared_weights = [layer.weight.square().sum(2) for layer in scaled_layers]
    squared_biases = [layer.bias.square() for layer in scaled_layers]
    # The squares of the factors by which neurons are rescaled. A neuron with incoming weights w (and bias),
    # outgoing weights v and squared factor u is balanced if u ||w||^2 = ||v||^2 / u.
    squared_factors = [input_factor, *(torch.ones_like(s) for s in log_factors), output_factors]
    for _ in range(MAX_PASSES):
        largest_change = 0.0
        for i in range(1, len(tensors)):
            squared_norms = (
                squared_weights[i - 1] @ squared_factors[i - 1].reciprocal() + squared_biases[i - 1]
            )
            new_squared_factors = (
                squared_factors[i + 1] @ squared_weights[i] / squared_norms
            ).sqrt()
            if not bool((new_squared_factors.isfinite() & (new_squared_factors > 0)).all()):
                return None
            largest_change = max(
                largest_change,
                float((new_squared_factors / squared_factors[i]).log().abs().max()) / 2,
            )
            squared_factors[i] = new_squared_factors
        if largest_change <= CONVERGED:
            break
    return [
        s + factors.log() / 2 for s, factors in zip(log_factors, squared_factors[1:-1], strict=True)
    ]


def _rescale(tensors: list[_LayerTensors], logs: list[Tensor]) -> list[_LayerTensors]:
    """Multiply the weights of every hidden neuron by a factor. ``logs`` are the logarithms of the factors."""
    input_log = torch.zeros(1, dtype=torch.float64)
    output_logs = torch.zeros_like(tensors[-1].bias)
    return [
        _LayerTensors(
            layer.weight * (log_a[:, None] - below).exp()[:, :, None],
            layer.bias * log_a.exp(),
        )
        for layer, log_a, below in zip(
            tensors, [*logs, output_logs], [input_log, *logs], strict=True
        )
    ]


def _with_fewer_neurons(
    network: Network,
    layers: list[_LayerNames],
    tensors: list[_LayerTensors],
    alive_masks: list[Tensor],
) -> Network:
    """Build the network without its dead neurons, from the weights ``tensors`` of the other neurons."""
    arch = network.architecture
    hidden_widths = tuple(int(mask.sum()) for mask in alive_masks)
    input_widths = arch.widths[:1] if arch.image_shape is None else ()
    arch = replace(arch, widths=(*input_widths, *hidden_widths, arch.widths[-1]))
    return network.replace(theta=_collect_theta(network, layers, tensors), arch=arch)


def _restore_dead(
    tensors: list[_LayerTensors], balanced_layers: list[_LayerTensors], alive_masks: list[Tensor]
) -> list[_LayerTensors]:
    """Bring layers back to their original shapes, with zero weights for the removed dead neurons."""
    filled_layers = []
    layers_and_masks = zip(
        tensors, balanced_layers, *_live_masks(tensors, alive_masks), strict=True
    )
    for original, layer, rows, columns in layers_and_masks:
        weight, bias = torch.zeros_like(original.weight), torch.zeros_like(original.bias)
        weight[rows.nonzero(), columns.nonzero()[:, 0]] = layer.weight
        bias[rows] = layer.bias
        filled_layers.append(_LayerTensors(weight, bias))
    return filled_layers


def _collect_theta(
    network: Network, layers: list[_LayerNames], tensors: list[_LayerTensors]
) -> dict[str, Tensor]:
    """Return all weights of the network by name, with new weights ``tensors`` of ``layers``.

    float16 and bfloat16 weights become float32.
    """
    weights_by_name = {
        n: t.to(torch.promote_types(t.dtype, torch.float32)) for n, t in network.theta.items()
    }
    for layer, values in zip(layers, tensors, strict=True):
        original_weight = weights_by_name[layer.weight]
        shape = (len(values.bias), -1, *original_weight.shape[2:])
        weights_by_name[layer.weight] = values.weight.reshape(shape).to(original_weight)
        if layer.bias is not None:
            weights_by_name[layer.bias] = values.bias.to(weights_by_name[layer.bias])
    return weights_by_name


def _computes_the_same(network: Network, other: Network) -> bool:
    """Return True if two networks with live modules have the same outputs for random samples."""
    random_inputs = probe_inputs(network.architecture.inputs).reshape(-1, *network.input_shape)
    outputs, other_outputs = (
        network.double_module(random_inputs),
        other.double_module(random_inputs),
    )
    eps = max(torch.finfo(t.dtype).eps for t in network.theta.values())
    tolerance = max(SAME, ROUNDINGS * eps) * float(outputs.abs().max())
    return bool((outputs - other_outputs).abs().max() <= tolerance)


def _describe_changes(dead_count: int, largest_log_factor: float, action: str) -> tuple[str, ...]:
    """Return a sentence for the user about removed and rescaled neurons, or () if no neuron changed much."""
    is_rescaled = largest_log_factor > math.log(NOTABLE)
    if not dead_count and not is_rescaled:
        return ()
    sentence = "neurons were rescaled"
    if dead_count:
        neurons_text = "1 neuron" if dead_count == 1 else f"{dead_count} neurons"
        verb = "was" if dead_count == 1 else "were"
        sentence = f"{neurons_text} without incoming or outgoing weights {verb} {action}"
        sentence += " and the others were rescaled" if is_rescaled else ""
    return (f"{sentence} before the attacks. The network computes the same function.",)
