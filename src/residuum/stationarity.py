"""The stationarity equation, which all attacks and certificates use.

    r = target - sum_i grad_theta <u_i, Phi(theta; x_i)>,      u_i = sum_{rows r of sample i} lam_r c_r

Here r is the residual, target is the vector that the weighted sum of gradients must equal (the weights
theta, or the weight update), and lam_r are the multipliers. A *row* is a term of the sum: a sample x_i with a
covector c_r on the outputs Phi of the network (+-1 for a binary label, e_y - e_c for a class and a rival
class, e_k for a regression output). The gradient is linear in the covector, so the residual needs a single
backward pass for any number of rows.

theta and target are dicts of tensors by parameter name. The shapes are x: (n, ...), u: (n, C), lam: (R,).
All functions work for any ``nn.Module``. For MLPs, the Gram matrix has a closed form

    G = sum_l (d_l d_l^T) o (A_l A_l^T [+ 1 with a bias])

with the backward signals d_l of the rows, the inputs A_l of layer l, and the elementwise product o. It does
not need the P x R Jacobian.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from residuum.networks import MLP, Trace, dense_chain

Theta = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """Rows: the R terms of a weighted sum of gradients, each a sample with a covector on the outputs.

    Attributes:
        index: Index of the sample of each row, (R,).
        covectors: Covector of each row on the C outputs of the network, (R, C).
    """

    index: Tensor
    covectors: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def combine(self, lam: Tensor, samples: int) -> Tensor:
        """Return the sum of the covectors of each sample, weighted with the multipliers.

        Args:
            lam: Multipliers of the rows, (R,).
            samples: Number of samples.

        Returns:
            The weighted sums u, (samples, C).
        """
        u = self.covectors.new_zeros(samples, self.covectors.shape[1])
        return u.index_add(0, self.index, lam[:, None] * self.covectors)

    def values(self, outputs: Tensor) -> Tensor:
        """Return the margin of each row, the inner product of covector and output, (R,)."""
        return (self.covectors * outputs[self.index]).sum(1)


def parameters(model: nn.Module) -> Theta:
    """Return the detached parameters of a model by name."""
    return {name: p.detach() for name, p in model.named_parameters()}


def weighted_gradient(model: nn.Module, x: Tensor, u: Tensor) -> Theta:
    """Return the weighted sum of gradients, sum_i grad_theta <u_i, Phi(theta; x_i)>, by one backward pass.

    Args:
        model: The network Phi, with weights theta.
        x: Samples, (n, ...).
        u: Covectors on the outputs, weighted with multipliers, (n, C).

    Returns:
        The sum of gradients by parameter name.
    """

    def inner_product(theta: Theta) -> Tensor:
        return (u * functional_call(model, theta, (x,))).sum()

    return grad(inner_product)(parameters(model))


def residual(model: nn.Module, target: Theta, x: Tensor, u: Tensor) -> Theta:
    """Return the residual, target - sum_i grad_theta <u_i, Phi(theta; x_i)>.

    Args:
        model: The network Phi, with weights theta.
        target: The vector that the weighted sum of gradients must equal, by parameter name.
        x: Samples, (n, ...).
        u: Covectors on the outputs, weighted with multipliers, (n, C).

    Returns:
        The residual by parameter name.
    """
    total = weighted_gradient(model, x, u)
    return {name: target[name] - total[name] for name in target}


def project(model: nn.Module, x: Tensor, rows: Rows, direction: Theta) -> Tensor:
    """Return the inner products of the gradients of all rows with a direction, by a forward-mode pass.

    Args:
        model: The network.
        x: Samples, (n, ...).
        rows: Rows: samples with covectors on the outputs.
        direction: A direction in weight space, by parameter name.

    Returns:
        Inner products, (R,).
    """
    theta = parameters(model)
    change = jvp(lambda t: functional_call(model, t, (x,)), (theta,), (direction,))[1]
    return rows.values(change)


def jacobian(model: nn.Module, x: Tensor, rows: Rows, chunk: int = 64) -> Tensor:
    """Return the gradient of each row with respect to the weights.

    Args:
        model: The network.
        x: Samples, (n, ...).
        rows: Rows: samples with covectors on the outputs.
        chunk: Number of rows that are computed together.

    Returns:
        Gradients (R, P), with parameters in the order of ``model.named_parameters()``.
    """
    theta = parameters(model)

    def row_gradient(sample: Tensor, covector: Tensor) -> Theta:
        def value(t: Theta) -> Tensor:
            return (covector * functional_call(model, t, (sample[None],))[0]).sum()

        return grad(value)(theta)

    gradients = vmap(row_gradient, chunk_size=chunk)(x[rows.index], rows.covectors)
    return torch.cat([gradients[name].flatten(1) for name in theta], dim=1)


@torch.no_grad()
def gram(model: nn.Module, x: Tensor, rows: Rows) -> Tensor:
    """Return the inner products of the gradients of all rows, in closed form for MLPs.

    Args:
        model: The network.
        x: Samples, (n, ...).
        rows: Rows: samples with covectors on the outputs.

    Returns:
        Gram matrix, (R, R).
    """
    if (chain := dense_chain(model)) is not None:
        trace = chain.trace(x)
        return mlp_gram(chain, trace, rows.index, chain.signals(trace, rows.covectors, rows.index))
    dense = jacobian(model, x, rows)
    return dense @ dense.T


def mlp_gram(model: MLP, trace: Trace, index: Tensor, signals: list[Tensor]) -> Tensor:
    """Return the Gram matrix of the gradients of an MLP.

    Args:
        model: The network.
        trace: Activations of a forward pass of all samples.
        index: Index of the sample of each row, (R,).
        signals: Backward signals of the rows (gradients with respect to pre-activations) by layer.

    Returns:
        Gram matrix, (R, R).
    """
    total: Tensor | None = None
    for layer, inputs, signal in zip(model.linears, trace.inputs, signals, strict=True):
        inner = inputs @ inputs.T
        if layer.bias is not None:
            inner = inner + 1
        layer_gram = (signal @ signal.T).mul_(inner[index][:, index])
        total = layer_gram if total is None else total.add_(layer_gram)
    assert total is not None
    return total


def flatten(theta: Theta) -> Tensor:
    """Concatenate all tensors of a dict, in the order of the dict, into a vector (P,)."""
    return torch.cat([t.reshape(-1) for t in theta.values()])


def norm(theta: Theta) -> float:
    """Return the Euclidean norm over all tensors of a dict."""
    return float(
        torch.stack([t.detach().double().square().sum() for t in theta.values()]).sum().sqrt()
    )


def by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parameter names by layer. The name of a layer is the parameter name before the last dot."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return layers


def layer_squares(theta: Theta, groups: Iterable[Iterable[str]]) -> Tensor:
    """Return the squared norm of every layer.

    Args:
        theta: Tensors by parameter name.
        groups: Parameter names of every layer.

    Returns:
        Squared norms, (L,).
    """
    return torch.stack(
        [torch.stack([theta[n].square().sum() for n in names]).sum() for names in groups]
    )


def moved_layers(theta: Theta, theta0: Theta) -> tuple[str, ...]:
    """Return the layers in which a weight differs from its initial value by more than rounding.

    Args:
        theta: Weights by parameter name.
        theta0: Initial weights by parameter name.

    Returns:
        Names of the layers.
    """
    # The rounding errors of weight and initial value can differ by a unit in the last place of the coarser
    # number format. The tolerance is two units, because a conversion between formats rounds again.
    moved = []
    for layer, names in by_layer(theta).items():
        for name in names:
            now, then = theta[name].detach(), theta0[name].detach()
            unit = max(torch.finfo(now.dtype).eps, torch.finfo(then.dtype).eps)
            now, then = now.double().cpu(), then.double().cpu()
            size = torch.maximum(now.abs(), then.abs())
            if bool(((now - then).abs() > 2 * unit * size).any()):
                moved.append(layer)
                break
    return tuple(moved)


def layer_residuals(r: Theta, theta: Theta) -> dict[str, float]:
    """Return ||r_l|| / ||theta_l|| of every layer, or ||r_l|| if all weights of the layer are zero.

    Args:
        r: Residual r by parameter name.
        theta: Weights theta by parameter name.

    Returns:
        Relative residual by layer.
    """
    residuals = {}
    for layer, names in by_layer(theta).items():
        scale = norm({n: theta[n] for n in names})
        residuals[layer] = norm({n: r[n] for n in names}) / (scale if scale > 0 else 1.0)
    return residuals
