"""Is Phi(c theta; x) = c^L Phi(theta; x)? Measured, not assumed; and what follows for the weights."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call

from residuum.networks.modules import dense_chain

SCALES = (0.7, 0.9, 1.1, 1.4)
TOLERANCE = 1e-6


def homogeneity_order(model: nn.Module, x: Tensor) -> float | None:
    """The order L, or None when the network is not homogeneous in its parameters.

    For every scale c and every output that is not tiny, L = log(Phi(c theta) / Phi(theta)) / log c;
    homogeneous means that all of them agree to 1e-6. Float64 whatever the model's dtype.
    """
    theta = {name: p.detach().double() for name, p in model.named_parameters()}
    base = functional_call(model, theta, (x.double(),))
    usable = base.abs() > 1e-9 * base.abs().max()
    if not usable.any() or not torch.isfinite(base).all():
        return None
    orders = []
    for c in SCALES:
        scaled = functional_call(model, {n: c * p for n, p in theta.items()}, (x.double(),))
        ratio = scaled[usable] / base[usable]
        if not (ratio > 0).all():
            return None
        orders.append(ratio.log() / math.log(c))
    found = torch.cat(orders)
    order = float(found.mean())
    if float((found - order).abs().max()) > TOLERANCE * max(1.0, abs(order)):
        return None
    return float(round(order)) if abs(order - round(order)) < TOLERANCE else order


def probe_inputs(inputs: int, count: int = 8) -> Tensor:
    """Fixed Gaussian inputs for measurements that need no data."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, inputs, generator=generator, dtype=torch.float64)


def balance(model: nn.Module) -> float | None:
    """sum_j |in_j - out_j| / sum_j max(in_j, out_j) over the hidden neurons of an MLP, else None.

    in_j = ||w_j||^2 + b_j^2 and out_j = ||v_j||^2 are a neuron's incoming and outgoing squared norm.
    They are equal at every KKT point of a ReLU network, so this is a data-free sign of distance from
    one, and of weights that were rewritten after training.
    """
    chain, gap, total = dense_chain(model), 0.0, 0.0
    for lower, upper in pairwise(chain.linears if chain else ()):
        incoming = lower.weight.detach().double().square().sum(1)
        if lower.bias is not None:
            incoming = incoming + lower.bias.detach().double().square()
        outgoing = upper.weight.detach().double().square().sum(0)
        gap += float((incoming - outgoing).abs().sum())
        total += float(torch.maximum(incoming, outgoing).sum())
    return gap / total if 0 < total < math.inf else None
