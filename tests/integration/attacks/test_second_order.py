"""The whole Hessian of the loss against the splitting matrices, and where splitting goes beyond it."""

from __future__ import annotations

import torch

from residuum.attacks.stationarity.curvature import (
    Curvature,
    find_lowest_pairs,
    measure_stationarity,
    weighted_residuals,
)
from residuum.attacks.stationarity.objectives import BinaryKKT
from residuum.attacks.stationarity.splitting import joint_step
from residuum.networks import Polynomial, PolynomialNetwork
from residuum.records import Knowledge
from tests.cases import AllLayers
from tests.unit.attacks.test_splitting import SHARPNESS, case_of, close, random_like


def full_hessian(problem, x, lam):
    curvature, size = Curvature(problem, x, lam, SHARPNESS), x[0].numel()
    columns = [
        curvature.multiply_hessian(e.view(1, *x.shape[1:]).expand_as(x).contiguous()).flatten(1)
        for e in torch.eye(size).double()
    ]
    return torch.stack(columns, -1)


def test_the_full_hessian_is_that_of_the_loss_and_bounded_below_by_s():
    """Hess = S + a positive semidefinite part: its least eigenvalue is no less than any S's."""
    strict = 0
    for seed in range(5):
        case, problem = case_of(BinaryKKT(), 1, seed=seed)
        hessian = full_hessian(problem, case.x, case.lam)
        step = 1e-5
        for e in (random_like(case.x, 1), random_like(case.x, 2)):
            ends = [problem.evaluate(case.x + s * step * e, case.lam, SHARPNESS) for s in (-1, 1)]
            expected = (ends[1].grad_x - ends[0].grad_x) / (2 * step)
            actual = (hessian @ e.flatten(1)[..., None])[..., 0].view_as(e)
            assert close(actual, expected, 1e-6)
        low = find_lowest_pairs(
            Curvature(problem, case.x, case.lam, SHARPNESS), random_like(case.x)
        )
        least = torch.linalg.eigvalsh((hessian + hessian.transpose(1, 2)) / 2)[:, 0]
        assert (least >= low.values.amin(1) - 1e-10).all()
        strict += int((least > low.values.amin(1) + 1e-6).sum())
        gradient, actual = measure_stationarity(
            problem, case.x, case.lam, SHARPNESS, random_like(case.x)
        )
        assert (actual - least).abs().max() < 1e-6
        ends = problem.evaluate(case.x, case.lam, SHARPNESS)
        assert close(gradient, ends.grad_x.flatten(1).norm(dim=1), 1e-12)
    assert strict > 0


def test_splitting_helps_where_the_hessian_is_positive_definite():
    """The target is the sum of two samples' gradients, and one candidate lies between them.

    At its best place the Hessian of the loss is positive definite, so no step of it helps; S is
    negative all the same, and two halves fit better.
    """
    model = PolynomialNetwork(2, 3, Polynomial((0.0, 0.0, 0.0, 1.0))).double()
    torch.manual_seed(1)
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 2))
        model.coefficient.copy_(torch.randn(3).abs())
    problem = AllLayers(model, BinaryKKT(), Knowledge(), torch.ones(1), normalize=False)
    samples = torch.tensor([[[1.0, 0.35], [1.0, -0.35]]]).double()
    two = problem.with_labels(torch.ones(2))
    residuals_of_rest = weighted_residuals(two, samples, torch.full((1, 2), 0.5).double(), 1.0)
    goal = weighted_residuals(two, samples, torch.zeros(1, 2).double(), 1.0) - residuals_of_rest
    names = [n for group in problem.groups.values() for n in group]
    sizes = [problem.target[n].numel() for n in names]
    for name, tensor in zip(names, goal[0].split(sizes), strict=True):
        problem.target[name] = tensor.view_as(
            problem.target[name]
        )  # the sum itself: two explain it
    x = samples.mean(1, keepdim=True).requires_grad_()
    lam = torch.ones(1, 1).double()
    for _ in range(50):  # Newton to the best place of one candidate at this multiplier
        gradient = problem.evaluate(x.detach(), lam).grad_x
        curvature = Curvature(problem, x.detach(), lam, 1.0)
        columns = [
            curvature.multiply_hessian(e.view(1, 1, 2)).flatten() for e in torch.eye(2).double()
        ]
        hessian = torch.stack(columns, 1)
        x = x.detach() - torch.linalg.solve(hessian, gradient.flatten()).view_as(x)
    assert float(problem.evaluate(x, lam).grad_x.norm()) < 1e-10
    assert float(torch.linalg.eigvalsh(hessian)[0]) > 1e-3
    curvature = Curvature(problem, x, lam, 1.0)
    low = find_lowest_pairs(curvature, random_like(x))
    assert float(low.values) < -1e-3
    step = joint_step(
        curvature, low.vectors, low.values, low.values < 0, torch.ones(1).double(), exact=True
    )
    assert float(step.after) < 0.95 * float(step.before)
