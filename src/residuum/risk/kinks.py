"""Count activation boundaries that pass through records, and rank counts among held-out records.

Training moves the activation boundaries of ReLU neurons onto training samples. The statistic is the
number of neurons of the first two hidden layers whose pre-activation is zero up to

    |w_j . a + b_j|  <=  1e-4 |(w_j, b_j)| |(a, 1)|        a: the input of the layer at x

Neurons are dependent, so no distribution is assumed. The p-value of a record is its rank among N held-out
records, p = (1 + number of those with at least its count) / (N + 1). If the record is exchangeable with
them, P(p <= t) <= t. P-values that share one held-out set are positively dependent (PRDS, Bates et al.
2023, "Testing for outliers with conformal p-values"). Under this dependence the rule of Benjamini and
Hochberg controls the false discovery rate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residuum.networks import MLP
from residuum.risk.gradients import blocks

TOLERANCE, LAYERS = 1e-4, 2  # of a kink, and the hidden layers that are measured


@torch.no_grad()
def kinks(chain: MLP, x: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """Count the activation boundaries of the first hidden layers that pass through each record.

    Args:
        chain: The network.
        x: Records, (n, *shape).
        tolerance: Bound on the sine of the angle between record and boundary. Rescaling the record or
            the neuron does not change that angle.

    Returns:
        Counts, (n, layers).
    """
    layers = chain.linears[: min(LAYERS, chain.hidden)]
    width = sum(layer.in_features + layer.out_features for layer in chain.linears)
    lengths = []
    for layer in layers:
        squares = layer.weight.square().sum(1)
        lengths.append((squares if layer.bias is None else squares + layer.bias.square()).sqrt())
    counts = []
    for block in blocks(len(x), width):
        trace, by_layer = chain.trace(x[block]), []
        for l, layer in enumerate(layers):
            size = trace.inputs[l].square().sum(1)
            size = (size if layer.bias is None else size + 1).sqrt()
            scale = size[:, None] * lengths[l]
            is_kink = (trace.pre[l].abs() <= tolerance * scale) & (scale > 0)
            by_layer.append(is_kink.sum(1))
        counts.append(torch.stack(by_layer, 1))
    return torch.cat(counts)


def rank_p_values(statistic: Tensor, holdout: Tensor) -> Tensor:
    """Return p-values (n,): ranks among held-out records, where large values are evidence."""
    order = holdout.double().sort().values
    smaller = torch.searchsorted(order, statistic.double().contiguous())
    return (1 + len(order) - smaller).double() / (len(order) + 1)
