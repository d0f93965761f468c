"""Kinks through records: evidence that a record was trained on, valid whatever the neurons depend on.

Training moves the switching hyperplanes of ReLU neurons onto training samples. Of a record x the statistic
is the number of neurons of the first two hidden layers whose pre-activation is zero but for

    |w_j . a + b_j|  <=  1e-4 |(w_j, b_j)| |(a, 1)|        a: the input of the layer at x

Neurons are dependent, so no distribution is assumed: a record's p-value is its rank among N held-out
records, p = (1 + number of those with at least its count) / (N + 1). If the record is exchangeable with them,
P(p <= t) <= t. P-values that share one held-out set are positively dependent (PRDS, Bates et al. 2023,
"Testing for outliers with conformal p-values"), under which Benjamini and Hochberg's rule controls the
false discovery rate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from residuum.networks import MLP, ReLU
from residuum.risk.gradients import blocks

TOLERANCE = 1e-4
LAYERS = 2
LEVEL = 0.05


def has_kinks(chain: MLP | None) -> bool:
    """Whether the network is a chain of ReLU layers."""
    return chain is not None and chain.hidden > 0 and isinstance(chain.activation, ReLU | nn.ReLU)


@torch.no_grad()
def kinks(chain: MLP, x: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """(n, layers) switches of the first hidden layers that pass through each record."""
    layers = chain.linears[: min(LAYERS, chain.hidden)]
    width = sum(layer.in_features + layer.out_features for layer in chain.linears)
    lengths = []
    for layer in layers:
        squares = layer.weight.square().sum(1)
        lengths.append((squares if layer.bias is None else squares + layer.bias.square()).sqrt())
    found = []
    for some in blocks(len(x), width):
        trace, counts = chain.trace(x[some]), []
        for l, layer in enumerate(layers):
            size = trace.inputs[l].square().sum(1)
            size = (size if layer.bias is None else size + 1).sqrt()
            scale = size[:, None] * lengths[l]
            near = (trace.pre[l].abs() <= tolerance * scale) & (scale > 0)
            counts.append(near.sum(1))
        found.append(torch.stack(counts, 1))
    return torch.cat(found)


def ranked(statistic: Tensor, held_out: Tensor) -> Tensor:
    """(n,) p-values: ranks of records among held-out ones, large values being evidence."""
    order = held_out.double().sort().values
    below = torch.searchsorted(order, statistic.double().contiguous())  # held-out records below it
    return (1 + len(order) - below).double() / (len(order) + 1)


def discoveries(p: Tensor, level: float = LEVEL) -> Tensor:
    """(n,) which of the p-values Benjamini and Hochberg call at a false discovery rate of ``level``."""
    return adjusted(p) <= level


def adjusted(p: Tensor) -> Tensor:
    """(n,) least level at which each would be called: min over k >= rank of n p_(k) / k."""
    order = p.argsort()
    steps = p[order] * len(p) / torch.arange(1, len(p) + 1, dtype=p.dtype, device=p.device)
    least = steps.flip(0).cummin(0).values.flip(0).clamp(max=1)
    found = torch.empty_like(p)
    found[order] = least
    return found
