"""Naive references: the definitions transcribed in float64, one sample at a time, no cleverness."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn import functional as F

from residuum.attacks.stationarity.objectives import (
    NTK,
    BinaryKKT,
    Moment,
    MulticlassKKT,
    Objective,
    WeightDecay,
)
from residuum.stationarity import Rows

Forward = Callable[[dict[str, Tensor], Tensor, Callable[[Tensor], Tensor]], Tensor]


def row_gradients(model: nn.Module, x: Tensor, rows: Rows) -> Tensor:
    """(R, P): one backward pass per row."""
    model = model.double()
    parameters = list(model.parameters())
    gradients = []
    for i, covector in zip(rows.index.tolist(), rows.covectors, strict=True):
        value = (covector * model(x[i : i + 1].double())[0]).sum()
        gradients_by_parameter = torch.autograd.grad(value, parameters, allow_unused=True)
        gradients.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).flatten()
                    for p, g in zip(parameters, gradients_by_parameter, strict=True)
                ]
            )
        )
    return torch.stack(gradients).detach()


def theta_vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def dense_nnls(model: nn.Module, x: Tensor, rows: Rows) -> tuple[np.ndarray, float]:
    """Multipliers and relative residual from the full P x R matrix."""
    theta = theta_vector(model)
    lam, distance = nnls(row_gradients(model, x, rows).T.numpy(), theta.numpy(), maxiter=10**5)
    return lam, distance / float(theta.norm())


def naive_activation(surrogate: str, sharpness: float) -> Callable[[Tensor], Tensor]:
    """ReLU, softplus, or ReLU whose formal derivative is that of softplus: straight-through.

    Each with its maximum over the first dimension: ``largest``, of which max(z, 0) has two entries.
    """

    def smooth(z: Tensor) -> Tensor:
        return torch.logsumexp(torch.stack([sharpness * z, torch.zeros_like(z)]), 0) / sharpness

    def straight_through(z: Tensor) -> Tensor:
        formal = smooth(z)
        return torch.relu(z).detach() + formal - formal.detach()

    def smooth_largest(z: Tensor) -> Tensor:
        return torch.logsumexp(sharpness * z, 0) / sharpness

    def straight_through_largest(z: Tensor) -> Tensor:
        formal = smooth_largest(z)
        return z.amax(0).detach() + formal - formal.detach()

    smooth.largest, straight_through.largest = smooth_largest, straight_through_largest
    return {"none": torch.relu, "softplus": smooth, "sigmoid": straight_through}[surrogate]


def mlp_forward(theta: dict[str, Tensor], x: Tensor, activation: Callable) -> Tensor:
    """(C,) outputs of one sample; parameters are named layers.i.weight and layers.i.bias."""
    h, depth = x.flatten(), sum(name.endswith("weight") for name in theta)
    for i in range(depth):
        h = theta[f"layers.{i}.weight"] @ h
        if f"layers.{i}.bias" in theta:
            h = h + theta[f"layers.{i}.bias"]
        h = activation(h) if i < depth - 1 else h
    return h


def convnet_forward(theta: dict[str, Tensor], x: Tensor, activation: Callable) -> Tensor:
    """(C,) outputs of one image: 3x3 convolutions of stride 2, then a linear layer."""
    h = x[None]
    for i in range(sum(name.startswith("conv") and name.endswith("weight") for name in theta)):
        weight, bias = (theta.get(f"convolutions.{i}.{suffix}") for suffix in ("weight", "bias"))
        h = activation(F.conv2d(h, weight, bias, stride=2, padding=1))
    return theta["head.weight"] @ h.flatten() + theta.get("head.bias", 0)


def cubic_forward(theta: dict[str, Tensor], x: Tensor, activation: Callable) -> Tensor:
    """(1,) sum_j a_j ((w_j . x)^3 + (w_j . x) / 2)."""
    z = theta["weight"] @ x.flatten()
    return (theta["coefficient"] @ (z**3 + z / 2))[None]


def naive_covector(
    objective: Objective, point: int, output: Tensor, label: Tensor, lam: Tensor
) -> Tensor:
    """(C,) u of one sample, rule by rule from the table of the objectives."""
    match objective:
        case BinaryKKT():
            return (lam * label)[None]
        case MulticlassKKT():
            own_class, values = int(label), output.tolist()
            rivals = [c for c in range(len(values)) if c != own_class]
            best = max(rivals, key=lambda c: values[c])
            if objective.rivals == "tied":
                slack = objective.tolerance * abs(values[own_class] - values[best])
                active = {c: lam[c] for c in rivals if values[c] >= values[best] - slack}
            else:
                active = {best: lam}
            u = torch.zeros_like(output)
            for c, weight in active.items():
                sign = torch.zeros_like(output)
                sign[own_class], sign[c] = 1, -1
                u = u + weight * sign
            return u
        case WeightDecay(tied=0.0):
            return lam
        case WeightDecay(loss="logistic"):
            return objective.tied * lam * label / (1 + torch.exp(label * output))
        case WeightDecay(loss="squared"):
            return objective.tied * lam * 2 * (label - output)
        case NTK():
            return lam[point]
        case Moment() if len(output) == 1:
            return (-lam * label)[None]
        case Moment():
            u = torch.zeros_like(output)
            for c in range(len(output)):
                if c != int(label):
                    u[int(label)], u[c] = u[int(label)] - lam[c], u[c] + lam[c]
            return u
    raise AssertionError(objective)


def naive_objective(
    forward: Forward,
    points: Sequence[dict[str, Tensor]],
    target: dict[str, Tensor],
    layers: dict[str, tuple[float, list[str]]],
    objective: Objective,
    labels: Tensor,
    x: Tensor,
    lam: Tensor,
    surrogate: str,
    sharpness: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, squared residual per layer, and the loss's gradients in x and lam, of one run.

    One sample, one gradient point at a time; layers: weight and parameter names of each.
    """
    activation = naive_activation(surrogate, sharpness)
    x, lam = x.detach().requires_grad_(), lam.detach().requires_grad_()
    total = {name: t.detach().clone() for name, t in target.items()}
    for k, theta in enumerate(points):
        fixed = {name: t.detach() for name, t in theta.items()}
        for i in range(len(x)):
            leaves = {name: t.clone().requires_grad_() for name, t in fixed.items()}
            u = naive_covector(objective, k, forward(fixed, x[i], activation), labels[i], lam[i])
            value = (u * forward(leaves, x[i], activation)).sum()
            gradients = torch.autograd.grad(value, list(leaves.values()), create_graph=True)
            for name, gradient in zip(leaves, gradients, strict=True):
                total[name] = total[name] - gradient
    squares = {
        layer: sum((total[name] ** 2).sum() for name in names)
        for layer, (_, names) in layers.items()
    }
    loss = sum(weight * squares[layer] for layer, (weight, _) in layers.items())
    grads = torch.autograd.grad(loss, (x, lam), allow_unused=True)
    gx, gl = (torch.zeros_like(v) if g is None else g for g, v in zip(grads, (x, lam), strict=True))
    return loss.detach(), torch.stack(list(squares.values())).detach(), gx, gl


def naive_kinks(
    layers: Sequence[tuple[Tensor, Tensor | None]],
    records: Tensor,
    pool: Tensor,
    negative_slope: float = 0.0,
) -> tuple[list[float], list[list[int]]]:
    """T, and B by layer, of every record: one record, one neuron, one pair of neurons at a time."""
    a, log_odds = 0.03 / (0.8 * math.log(1e-2 / 3e-5)), math.log(0.97)

    def pre_activations(x: Tensor) -> list[list[float]]:
        values, a_in = [], x.flatten().double().tolist()
        for weight, bias in layers:
            z = []
            for j in range(len(weight)):
                b = 0.0 if bias is None else float(bias[j].double())
                w = weight[j].double().tolist()
                z.append(sum(w_k * a_k for w_k, a_k in zip(w, a_in, strict=True)) + b)
            values.append(z)
            a_in = [v if v > 0 else negative_slope * v for v in z]
        return values[:-1]

    in_pool = [pre_activations(x) for x in pool]
    statistics, boundaries = [], []
    for x in records:
        total, counts = 0.0, []
        for l, z in enumerate(pre_activations(x)):
            columns = [[row[l][j] for row in in_pool] for j in range(len(z))]
            sizes = [math.sqrt(sum(v * v for v in column)) for column in columns]
            used = [
                j
                for j in range(len(z))
                if sizes[j] > 0 and any(float(v) != 0 for v in layers[l + 1][0][:, j])
            ]

            def is_parallel(j: int, k: int, columns=columns, sizes=sizes) -> bool:
                product = sum(p * q for p, q in zip(columns[j], columns[k], strict=True))
                return abs(product) > 0.9999 * sizes[j] * sizes[k]

            is_silent, on = all(v == 0 for v in z), []
            for j in used:
                size = sum(k == j or is_parallel(j, k) for k in used)
                r = abs(z[j]) / (sizes[j] / math.sqrt(len(pool)))
                is_near = r < 1e-2 and not is_silent
                total += (math.log(0.97 + a / (r + 3e-5)) if is_near else log_odds) / size
                if r < 2e-3 and not is_silent:
                    on.append(j)
            counts.append(sum(not any(k < j and is_parallel(j, k) for k in on) for j in on))
        statistics.append(total)
        boundaries.append(counts)
    return statistics, boundaries
