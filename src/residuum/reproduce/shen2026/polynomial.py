"""Shen et al. 2026, section 4: exact recovery from cubic networks, aggregates below degree 3."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from residuum.attacks.identify import identify
from residuum.attacks.polynomial import recover
from residuum.checkpoints import checkpoint_from_module
from residuum.networks import PolynomialNetwork
from residuum.records import Dataset
from residuum.reproduce.context import Context
from residuum.reproduce.exact import PolynomialPoint, polynomial_point
from residuum.reproduce.outcome import Outcome, Row
from residuum.reproduce.victims import victim
from residuum.similarity import cosine
from residuum.stationarity import norm, parameters, residual
from residuum.theory.polynomial import form_coefficients, identifiability
from residuum.training import TrainingConfig

SIZES = {
    "tiny": ((3, 5), (5, 8)),
    "small": ((3, 5), (8, 12), (15, 20)),
    "paper": ((3, 5), (8, 12), (15, 20), (30, 40)),
}
NOISE = 1e-6
COLLAPSE = (
    "a local minimum of the max-margin problem has at most one neuron per margin sample, so a trained "
    "cubic network does not meet the rank condition: the theorem speaks of KKT points that training does "
    "not end in"
)
TRAINED = {"tiny": 1500, "small": 5000, "paper": 20_000}


def theorem41(context: Context) -> Outcome:
    """Rank condition and error of the recovery at exact points, under noise, and after training."""
    sizes = SIZES[context.scale.name]
    rows = [row for n, d in sizes for row in exact_rows(n, d, context.seed)]
    return Outcome((*rows, *trained_rows(context)), {}, {"sizes": sizes}, (COLLAPSE,))


def exact_rows(n: int, d: int, seed: int) -> list[Row]:
    """One exact point: the condition as printed and in the neurons' span, errors with and without noise."""
    point = polynomial_point(n, d, 3, seed=seed)
    stated = identifiability(point.model)
    name = f"cubic, n={n}, d={d}"
    noisy = recover(_noisy(point.model, NOISE), rank=n).x
    return [
        Row(
            f"{name}: rank of K over the coefficients of f",
            f"{stated.rank} of {stated.coefficients}",
            f"needs {form_coefficients(d, 3)}",
            corrected=f"needs {stated.coefficients}",
            note="printed in the input space, where it fails whenever n < d; here in span of the neurons",
        ),
        Row(
            f"{name}: largest error of a sample",
            errors(point, recover(point.model).x),
            0.0,
            corrected=0.0,
        ),
        Row(
            f"{name}: the same with noise of {NOISE:g} in the weights",
            errors(point, noisy),
            note="an error in proportion to the noise",
        ),
    ]


def trained_rows(context: Context) -> list[Row]:
    """A cubic network trained to the margin: its neurons collapse and the condition fails."""
    n, d, width = 6, 10, 40
    generator = torch.Generator().manual_seed(context.seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    data = Dataset(
        x / x.norm(dim=1, keepdim=True), torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)
    )
    config = TrainingConfig(steps=TRAINED[context.scale.name], seed=context.seed)
    net = victim(context, f"polynomial:{d}-{width}-1,coefficients=0/0/0/1", data, config)
    found = identify(net.checkpoint)
    name = f"cubic, trained, n={n}, width {width}"
    return [
        Row(
            f"{name}: rank of K over the coefficients of f",
            f"{found.rank_k} of {found.n_r}",
            "full rank",
        ),
        Row(
            f"{name}: neurons that carry the weight",
            found.carrying,
            corrected=f"at most {n} at a local minimum",
        ),
        Row(
            f"{name}: samples certified",
            int(found.certified.sum()),
            n,
            note=f"method {found.method}, balance gap {found.balance_gap:.2g}",
        ),
    ]


def aggregates(context: Context) -> Outcome:
    """What degree 1 and 2 determine, exactly, and another training set with the same weights."""
    n, d = SIZES[context.scale.name][-1]
    linear, quadratic = (polynomial_point(n, d, alpha, seed=context.seed) for alpha in (1, 2))
    sums = identify(checkpoint_from_module(linear.model)).aggregate
    stated = identifiability(quadratic.model)
    assert sums is not None
    assert stated.moment is not None
    moment = (quadratic.x.T * quadratic.b) @ quadratic.x
    true = linear.b @ linear.x
    rows = [
        Row(
            "linear: error of sum_i lam_i y_i x_i",
            float((sums - true).norm() / true.norm()),
            0.0,
            corrected=0.0,
        ),
        Row(
            "quadratic: error of sum_i lam_i y_i x_i x_i^T",
            float((stated.moment - moment).norm() / moment.norm()),
            0.0,
            corrected=0.0,
        ),
    ]
    rows += other_rows("linear", linear, other_linear(linear))
    rows += other_rows("quadratic", quadratic, other_quadratic(quadratic))
    wrong = quadratic.x + 0.1 * quadratic.x.flip(0)
    rows.append(
        Row(
            "quadratic: residual where the aggregate differs",
            _residual(quadratic, wrong, quadratic.b),
        )
    )
    return Outcome(tuple(rows), {}, {"n": n, "d": d})


def other_rows(name: str, point: PolynomialPoint, other: tuple[Tensor, Tensor]) -> list[Row]:
    """Residuals at the training set and at another one with the same aggregate."""
    moved = float((other[0] - point.x).norm(dim=1).max())
    return [
        Row(f"{name}: residual at the training set", _residual(point, point.x, point.b), 0.0),
        Row(
            f"{name}: residual at another training set",
            _residual(point, *other),
            0.0,
            note=f"its samples moved by up to {moved:.3g}",
        ),
    ]


def other_linear(point: PolynomialPoint) -> tuple[Tensor, Tensor]:
    """Samples moved against each other: sum_i b_i x_i stays."""
    x = point.x.clone()
    step = torch.ones(x.shape[1], dtype=torch.float64)
    x[0] += step / point.b[0]
    x[1] -= step / point.b[1]
    return x, point.b


def other_quadratic(point: PolynomialPoint) -> tuple[Tensor, Tensor]:
    """Two samples of one label, scaled by the roots of their multipliers and rotated into each other."""
    x, i, k = point.x.clone(), 0, 2
    root = point.b.abs().sqrt()
    c, s = math.cos(0.7), math.sin(0.7)
    turn = torch.tensor([[c, s], [-s, c]], dtype=torch.float64)
    pair = turn @ torch.stack([root[i] * x[i], root[k] * x[k]])
    x[i], x[k] = pair[0] / root[i], pair[1] / root[k]
    return x, point.b


def errors(point: PolynomialPoint, found: Tensor) -> float:
    """Largest sine of the angle between a sample and the recovered one nearest to it, sign aside."""
    inner = cosine(found, point.x).abs().amax(0).clamp(max=1)
    nearest = found[cosine(found, point.x).abs().argmax(0)]
    unit = nearest / nearest.norm(dim=1, keepdim=True)
    unit = unit * (unit * point.x).sum(1, keepdim=True).sign()
    assert len(inner) == len(unit)
    return float((unit - point.x).norm(dim=1).max())


def _residual(point: PolynomialPoint, x: Tensor, b: Tensor) -> float:
    theta = parameters(point.model)
    return norm(residual(point.model, theta, x, b[:, None])) / norm(theta)


def _noisy(model: PolynomialNetwork, size: float) -> PolynomialNetwork:
    generator = torch.Generator().manual_seed(7)
    state: dict[str, Any] = model.state_dict()
    moved = {
        name: t
        + size
        * t.norm()
        / t.numel() ** 0.5
        * torch.randn(t.shape, generator=generator, dtype=t.dtype)
        for name, t in state.items()
    }
    width, d = model.weight.shape
    copy = PolynomialNetwork(d, width, model.activation).double()
    copy.load_state_dict(moved)
    return copy
