"""The stationarity equation: weights, or a weight update, are a weighted sum of gradients of the samples.

    residual = target - sum_i grad_theta <u_i, Phi(theta; x_i)>,      u_i = sum_{rows r of sample i} lam_r c_r

The target is the vector that the weighted sum of gradients must equal: the weights theta, or the weight
update. A *row* r is a term of this sum. Row r has a sample x_i, a multiplier lam_r and a covector c_r, i.e.
weights of the outputs Phi of the network. The covector is +-1 for a binary label. For a class y and a rival
class c (another class) it is the difference e_y - e_c of unit vectors. For output k of a regression it is
e_k. The gradient is linear in the covector, so the residual needs a single backward pass for any number of
rows.

theta and target are dicts of tensors by parameter name. The shapes are x: (n, ...), u: (n, C), lam: (R,).
All functions work for any ``nn.Module``. For MLPs, the Gram matrix has a closed form

    G = sum_l (d_l d_l^T) o (A_l A_l^T [+ 1 with a bias])

with the backward signals d_l of the rows, the inputs A_l of layer l, and the elementwise product o. This form
does not need the P x R Jacobian.
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
    """The R terms (rows) of a weighted sum of gradients, each with a sample and a covector.

    A covector has the weights of the network's outputs whose weighted sum is differentiated.

    Attributes:
        index: Index of the sample of each row, (R,).
        covectors: Covector of each row on the C outputs of the network, (R, C).
    """

    index: Tensor
    covectors: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def combine(self, lam: Tensor, samples: int) -> Tensor:
        """Compute, for each sample, the weighted sum of its covectors (weights of the outputs).

        Args:
            lam: Multipliers of the rows, by which their covectors are weighted, (R,).
            samples: Number of samples.

        Returns:
            The sums, one for each sample, (samples, C).
        """
        weighted_covectors = self.covectors.new_zeros(samples, self.covectors.shape[1])
        return weighted_covectors.index_add(0, self.index, lam[:, None] * self.covectors)

    def values(self, outputs: Tensor) -> Tensor:
        """Return for each term of the sum the inner product of its covector with the network's outputs."""
        return (self.covectors * outputs[self.index]).sum(1)


def parameters(model: nn.Module) -> Theta:
    """Return the detached parameters of a model by name."""
    return {name: p.detach() for name, p in model.named_parameters()}


def weighted_gradient(model: nn.Module, x: Tensor, u: Tensor) -> Theta:
    """Return the weighted sum of the gradients of all samples, by one backward pass.

    The sum is sum_i grad_theta <u_i, Phi(theta; x_i)> with weights theta, outputs Phi and samples x_i. Row
    u_i of ``u`` has the weights of the outputs for sample i.

    Args:
        model: The network Phi, with weights theta.
        x: Samples, (n, ...).
        u: Weights of the outputs for each sample, (n, C).

    Returns:
        The sum of gradients by parameter name.
    """

    def inner_product(theta: Theta) -> Tensor:
        return (u * functional_call(model, theta, (x,))).sum()

    return grad(inner_product)(parameters(model))


def residual(model: nn.Module, target: Theta, x: Tensor, u: Tensor) -> Theta:
    """Compute the error of the stationarity equation, target - sum_i grad_theta <u_i, Phi(theta; x_i)>.

    Args:
        model: The network Phi, with weights theta.
        target: The vector that the weighted sum of gradients must equal, by parameter name.
        x: Samples, (n, ...).
        u: Covectors on the outputs, weighted with multipliers, (n, C).

    Returns:
        The residual by parameter name.
    """
    weighted_sum = weighted_gradient(model, x, u)
    return {name: target[name] - weighted_sum[name] for name in target}


def project(model: nn.Module, x: Tensor, rows: Rows, direction: Theta) -> Tensor:
    """Compute the inner product of each term's gradient with a direction, in one forward-mode pass.

    Args:
        model: The network.
        x: Samples, (n, ...).
        rows: Terms of a weighted sum of gradients, each with a sample and weights of the outputs.
        direction: A direction in the space of the weights, i.e. one tensor by parameter name.

    Returns:
        Inner products, (R,).
    """
    weights_by_name = parameters(model)
    output_changes = jvp(
        lambda t: functional_call(model, t, (x,)), (weights_by_name,), (direction,)
    )[1]
    return rows.values(output_changes)


def jacobian(model: nn.Module, x: Tensor, rows: Rows, chunk: int = 64) -> Tensor:
    """Compute the gradient of each term (row) of the sum with respect to the weights.

    Args:
        model: The network.
        x: Samples, (n, ...).
        rows: Terms of a weighted sum of gradients, each with a sample and weights of the outputs.
        chunk: Number of rows that are computed together.

    Returns:
        Gradients (R, P), with parameters in the order of ``model.named_parameters()``.
    """
    weights_by_name = parameters(model)

    def row_gradient(sample: Tensor, covector: Tensor) -> Theta:
        def value(t: Theta) -> Tensor:
            return (covector * functional_call(model, t, (sample[None],))[0]).sum()

        return grad(value)(weights_by_name)

    gradients = vmap(row_gradient, chunk_size=chunk)(x[rows.index], rows.covectors)
    return torch.cat([gradients[name].flatten(1) for name in weights_by_name], dim=1)


@torch.no_grad()
def gram(model: nn.Module, x: Tensor, rows: Rows) -> Tensor:
    """Compute the inner products of the gradients of all terms (rows), in closed form for MLPs.

    Args:
        model: The network.
        x: Samples, (n, ...).
        rows: Terms of a weighted sum of gradients, each with a sample and weights of the outputs.

    Returns:
        Gram matrix, (R, R).
    """
    if (chain := dense_chain(model)) is not None:
        activations = chain.trace(x)
        return mlp_gram(
            chain, activations, rows.index, chain.signals(activations, rows.covectors, rows.index)
        )
    gradients = jacobian(model, x, rows)
    return gradients @ gradients.T


def mlp_gram(model: MLP, trace: Trace, index: Tensor, signals: list[Tensor]) -> Tensor:
    """Compute the matrix of inner products (Gram matrix) of the gradients of an MLP.

    Args:
        model: The network.
        trace: Inputs and pre-activations of every layer for all samples.
        index: Index of the sample of each row, (R,).
        signals: Backward signals of the rows (gradients with respect to pre-activations) by layer.

    Returns:
        Gram matrix, (R, R).
    """
    gram_matrix: Tensor | None = None
    for layer, inputs, signal in zip(model.linears, trace.inputs, signals, strict=True):
        input_products = inputs @ inputs.T
        # The bias is treated as the weight of an additional input with value 1.
        if layer.bias is not None:
            input_products = input_products + 1
        layer_gram = (signal @ signal.T).mul_(input_products[index][:, index])
        gram_matrix = layer_gram if gram_matrix is None else gram_matrix.add_(layer_gram)
    assert gram_matrix is not None
    return gram_matrix


def flatten(theta: Theta) -> Tensor:
    """Concatenate all tensors of a dictionary, in its order, into one vector of P numbers."""
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
    """Return the squared Euclidean norm of the tensors of every layer.

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
    # A weight and its initial value may be stored in different number formats, such as float32 and bfloat16.
    # Rounding to the less precise format changes a number by at most its machine epsilon. The tolerance is
    # twice this epsilon, because a conversion between formats rounds again.
    moved_names = []
    for layer, names in by_layer(theta).items():
        for name in names:
            weight, initial_weight = theta[name].detach(), theta0[name].detach()
            epsilon = max(torch.finfo(weight.dtype).eps, torch.finfo(initial_weight.dtype).eps)
            weight, initial_weight = weight.double().cpu(), initial_weight.double().cpu()
            magnitude = torch.maximum(weight.abs(), initial_weight.abs())
            if bool(((weight - initial_weight).abs() > 2 * epsilon * magnitude).any()):
                moved_names.append(layer)
                break
    return tuple(moved_names)


def layer_residuals(r: Theta, theta: Theta) -> dict[str, float]:
    """Return the relative error ||r_l|| / ||theta_l|| of every layer l (||r_l|| if theta_l is zero).

    Args:
        r: Residual r by parameter name.
        theta: Weights theta by parameter name.

    Returns:
        Relative residual by layer.
    """
    residuals = {}
    for layer, names in by_layer(theta).items():
        weight_norm = norm({n: theta[n] for n in names})
        residuals[layer] = norm({n: r[n] for n in names}) / (
            weight_norm if weight_norm > 0 else 1.0
        )
    return residuals
