"""The one equation of every attack and every certificate.

    r = target - sum_i grad_theta <u_i, Phi(theta; x_i)>,      u_i = sum_{rows r of sample i} lam_r c_r

A *row* is one term of the sum: a sample, and a covector c_r on the network's outputs (+-1 for a
binary label, e_y - e_c for a class against a rival, e_k for a regression output). The gradient is
linear in the covector, so the residual needs one backward pass whatever the number of rows.

theta, target: dicts of tensors by parameter name; x: (n, ...); u: (n, C); lam: (R,).
Everything here holds for any ``nn.Module``; MLPs have closed forms for the Gram matrix

    G = sum_l (d_l d_l^T) o (A_l A_l^T [+ 1 with a bias])

(d_l backward signals of the rows, A_l inputs of layer l, o elementwise), which never forms the
P x R Jacobian.
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
    """Terms of the sum. index: (R,) sample of each row; covectors: (R, C) on the outputs."""

    index: Tensor
    covectors: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def combine(self, lam: Tensor, samples: int) -> Tensor:
        """u: (samples, C), the multiplier-weighted covector of each sample."""
        u = self.covectors.new_zeros(samples, self.covectors.shape[1])
        return u.index_add(0, self.index, lam[:, None] * self.covectors)

    def values(self, outputs: Tensor) -> Tensor:
        """(R,) <c_r, Phi(x_r)>: a row's margin."""
        return (self.covectors * outputs[self.index]).sum(1)


def parameters(model: nn.Module) -> Theta:
    """The model's parameters, detached."""
    return {name: p.detach() for name, p in model.named_parameters()}


def weighted_gradient(model: nn.Module, x: Tensor, u: Tensor) -> Theta:
    """sum_i grad_theta <u_i, Phi(theta; x_i)> at the model's own theta, by one backward pass."""

    def inner_product(theta: Theta) -> Tensor:
        return (u * functional_call(model, theta, (x,))).sum()

    return grad(inner_product)(parameters(model))


def residual(model: nn.Module, target: Theta, x: Tensor, u: Tensor) -> Theta:
    """target - sum_i grad_theta <u_i, Phi(theta; x_i)>."""
    total = weighted_gradient(model, x, u)
    return {name: target[name] - total[name] for name in target}


def project(model: nn.Module, x: Tensor, rows: Rows, direction: Theta) -> Tensor:
    """(R,) inner products of every row's gradient with ``direction``, by one forward-mode pass."""
    theta = parameters(model)
    change = jvp(lambda t: functional_call(model, t, (x,)), (theta,), (direction,))[1]
    return rows.values(change)


def jacobian(model: nn.Module, x: Tensor, rows: Rows, chunk: int = 64) -> Tensor:
    """(R, P) gradients of every row, parameters in the order of ``model.named_parameters()``."""
    theta = parameters(model)

    def row_gradient(sample: Tensor, covector: Tensor) -> Theta:
        def value(t: Theta) -> Tensor:
            return (covector * functional_call(model, t, (sample[None],))[0]).sum()

        return grad(value)(theta)

    parts = vmap(row_gradient, chunk_size=chunk)(x[rows.index], rows.covectors)
    return torch.cat([parts[name].flatten(1) for name in theta], dim=1)


@torch.no_grad()
def gram(model: nn.Module, x: Tensor, rows: Rows) -> Tensor:
    """(R, R) inner products of the rows' gradients: closed form for MLPs, dense otherwise."""
    if (chain := dense_chain(model)) is not None:
        trace = chain.trace(x)
        return mlp_gram(chain, trace, rows.index, chain.signals(trace, rows.covectors, rows.index))
    dense = jacobian(model, x, rows)
    return dense @ dense.T


def mlp_gram(model: MLP, trace: Trace, index: Tensor, signals: list[Tensor]) -> Tensor:
    """Gram matrix of gradients given by backward signals; index says which sample each is of."""
    total: Tensor | None = None
    for layer, inputs, signal in zip(model.linears, trace.inputs, signals, strict=True):
        inner = inputs @ inputs.T
        if layer.bias is not None:
            inner = inner + 1
        part = (signal @ signal.T).mul_(inner[index][:, index])
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def flatten(theta: Theta) -> Tensor:
    """(P,) all tensors in their order."""
    return torch.cat([t.reshape(-1) for t in theta.values()])


def norm(theta: Theta) -> float:
    """||theta||, the Euclidean norm over all tensors."""
    return float(
        torch.stack([t.detach().double().square().sum() for t in theta.values()]).sum().sqrt()
    )


def by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameter names grouped into layers: the part before the last dot."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return layers


def layer_squares(theta: Theta, groups: Iterable[Iterable[str]]) -> Tensor:
    """(L,) squared norm of every layer; groups: names of its parameters."""
    return torch.stack(
        [torch.stack([theta[n].square().sum() for n in names]).sum() for names in groups]
    )


def moved_layers(theta: Theta, theta0: Theta) -> tuple[str, ...]:
    """Layers in which some entry left its start by more than rounding to the coarser of both formats.

    Half a unit in the last place on either side makes one; two leave room for a conversion between.
    """
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
    """||r_l|| / ||theta_l|| for each layer; a layer whose weights are all zero counts absolutely."""
    parts = {}
    for layer, names in by_layer(theta).items():
        scale = norm({n: theta[n] for n in names})
        parts[layer] = norm({n: r[n] for n in names}) / (scale if scale > 0 else 1.0)
    return parts
