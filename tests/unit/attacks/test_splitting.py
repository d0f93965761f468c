"""The splitting matrix, its least eigenpair, and joint steps, against dense and exact references."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from residuum.attacks.stationarity.curvature import (
    Curvature,
    find_lowest_pairs,
    lanczos,
    weighted_residuals,
)
from residuum.attacks.stationarity.objectives import BinaryKKT
from residuum.attacks.stationarity.splitting import has_exact_degree, joint_step, split_candidates
from residuum.networks import MLP
from residuum.records import Knowledge
from tests.cases import SPREAD, AllLayers, attack_case, polynomial_point
from tests.reference import mlp_forward, naive_activation, naive_covector
from tests.unit.engine.test_engine import Wrapped

SHARPNESS = 4.0


def random_like(x: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    return float((actual - expected).norm()) <= tolerance * max(1e-6, float(expected.norm()))


def case_of(objective, outputs, surrogate="softplus", hidden=(5, 6, 4), bias="all", seed=0):
    case = attack_case(MLP((*hidden, outputs), bias), objective, outputs, (hidden[0],), 4, seed)
    inputs = (objective, case.knowledge, case.labels)
    return case, AllLayers(case.model, *inputs, surrogate=surrogate)


def naive_scalar(case, problem, run, surrogate):
    """-2 sum_p w_p r_p f_p(x_i) of one candidate as a function of x_i, r of the run held fixed."""
    activation = naive_activation(surrogate, SHARPNESS)

    def f(i: int, x: Tensor) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for k, theta in enumerate(case.points):
            fixed = {n: t.detach() for n, t in theta.items()}
            leaves = {n: t.clone().requires_grad_() for n, t in fixed.items()}
            u = naive_covector(
                case.objective,
                k,
                mlp_forward(fixed, x, activation),
                case.labels[i],
                case.lam[run, i],
            )
            value = (u * mlp_forward(leaves, x, activation)).sum()
            grads = torch.autograd.grad(value, list(leaves.values()), create_graph=True)
            for name, g in zip(leaves, grads, strict=True):
                total[name] = total.get(name, 0) + g
        return total

    r = {n: t.clone() for n, t in case.target.items()}
    for i in range(case.x.shape[1]):
        for name, g in f(i, case.x[run, i].clone().requires_grad_()).items():
            r[name] = r[name] - g.detach()
    weight = {
        n: w
        for names, w in zip(problem.groups.values(), problem.layer_weights, strict=True)
        for n in names
    }
    return lambda i, x: sum((-2 * weight[n] * r[n] * g).sum() for n, g in f(i, x).items())


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_the_operator_equals_the_dense_hessian(objective, outputs):
    for surrogate in ["sigmoid", "softplus"]:
        case, problem = case_of(objective, outputs, surrogate)
        curvature, d = Curvature(problem, case.x, case.lam, SHARPNESS), 5
        columns = [
            curvature.multiply_splitting(e.expand_as(case.x).contiguous())
            for e in torch.eye(d).double()
        ]
        actual = torch.stack(columns, -1)  # (R, m, d, d)
        scalar = naive_scalar(case, problem, 1, surrogate)
        for i in range(case.x.shape[1]):
            expected = torch.autograd.functional.hessian(partial(scalar, i), case.x[1, i])
            assert float(expected.norm()) > 1e-6
            assert close(actual[1, i], expected, 1e-8)
            assert close(actual[1, i], actual[1, i].T, 1e-10)


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_the_engine_and_the_generic_path_agree(objective, outputs):
    for surrogate in ["sigmoid", "softplus"]:
        case, explicit = case_of(objective, outputs, surrogate)
        inputs = (objective, case.knowledge, case.labels)
        generic = AllLayers(Wrapped(case.model), *inputs, surrogate=surrogate)
        v, results = random_like(case.x), []
        for problem in (explicit, generic):
            curvature = Curvature(problem, case.x, case.lam, SHARPNESS)
            results.append(
                (
                    curvature.multiply_splitting(v),
                    curvature.multiply_hessian(v),
                    curvature.multiply_splitting(v[:, 1:3], slice(1, 3)),
                    weighted_residuals(problem, case.x, case.lam, SHARPNESS),
                )
            )
        for a, b in zip(*results, strict=True):
            assert close(a, b, 1e-10)
        assert close(results[0][2], results[0][0][:, 1:3], 1e-12)
        loss = explicit.evaluate(case.x, case.lam, SHARPNESS).loss
        assert close(results[0][3].square().sum(1), loss, 1e-12)


def test_chunks_change_nothing():
    case, problem = case_of(BinaryKKT(), 1)
    curvature = Curvature(problem, case.x, case.lam, SHARPNESS)
    assert problem.explicit is not None
    complete, noise = find_lowest_pairs(curvature, random_like(case.x)), random_like(case.x)
    small = find_lowest_pairs(curvature, noise, workspace=1)
    assert close(small.values, complete.values, 1e-10)
    v = random_like(case.x)
    full = curvature.multiply_hessian(v)
    problem.explicit.workspace = problem.explicit.chunk = 1
    assert close(Curvature(problem, case.x, case.lam, SHARPNESS).multiply_hessian(v), full, 1e-10)


@pytest.mark.parametrize("d", [1, 6, 20])
def test_lanczos_finds_the_least_pair(d):
    generator = torch.Generator().manual_seed(d)
    a = torch.randn(3, 4, d, d, generator=generator, dtype=torch.float64)
    a = a + a.transpose(-1, -2)
    a[0, 0] = torch.eye(d).double()  # one step exhausts the space
    a[0, 1] = 0
    start = torch.randn(3, 4, d, generator=generator, dtype=torch.float64)
    values, vectors = lanczos(lambda v: (a @ v[..., None])[..., 0], start, 20)
    expected = torch.linalg.eigvalsh(a)[..., 0]
    assert (values - expected).abs().max() < 1e-6
    assert (vectors.norm(dim=-1) - 1).abs().max() < 1e-9
    assert ((a @ vectors[..., None])[..., 0] - values[..., None] * vectors).norm() < 1e-5


def test_a_split_of_length_zero_changes_nothing_and_gains_are_second_order():
    for objective, outputs in [case_parameters.values for case_parameters in SPREAD]:
        case, problem = case_of(objective, outputs)
        curvature = Curvature(problem, case.x, case.lam, SHARPNESS)
        v = random_like(case.x)
        v = v / v.norm(dim=2, keepdim=True)
        before = problem.evaluate(case.x, case.lam, SHARPNESS).loss
        bend = (curvature.multiply_splitting(v) * v).sum(2)
        for eta, share in ((0.0, 0.0), (1e-2, 0.02), (1e-3, 1e-3)):
            steps = torch.full(case.x.shape[:2], eta, dtype=torch.float64)
            steps[:, 1:] = 0
            x, lam, wide = split_candidates(problem, case.x, case.lam, v, steps)
            if eta == 0:  # halves at the same place, said with both slots in use
                x, lam, wide = split_candidates(problem, case.x, case.lam, 0 * v, steps + 1)
            gain = wide.evaluate(x, lam, SHARPNESS).loss - before
            expected = eta**2 / 2 * bend[:, 0]
            if eta == 0:
                assert (gain.abs() <= 1e-14 * before).all()
            else:
                assert ((gain - expected).abs() <= share * expected.abs() + 1e-13).all(), objective


def cubic_problem(n=4, d=6, m=3, seed=0):
    point = polynomial_point(n, d, 3, seed=seed)
    labels = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])[:m]
    problem = AllLayers(point.model, BinaryKKT(), Knowledge(), labels)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, m, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    lam = torch.rand(2, m, generator=generator, dtype=torch.float64)
    return point, problem, x, lam


def test_one_cubic_split_takes_the_closed_form_step():
    for seed in range(3):
        point, problem, x, lam = cubic_problem(seed=seed)
        assert has_exact_degree(point.model)
        curvature = Curvature(problem, x, lam, 1.0)
        low = find_lowest_pairs(curvature, random_like(x))
        chosen = torch.zeros(2, 3, dtype=torch.bool)
        chosen[:, 1] = low.values[:, 1] < 0
        assert chosen.any()
        infinity = torch.full((2,), torch.inf, dtype=torch.float64)
        step = joint_step(curvature, low.vectors, low.values, chosen, infinity, exact=True)
        alone = problem.with_labels(problem.labels[1:2])
        for run in chosen[:, 1].nonzero()[:, 0].tolist():
            losses = [
                weighted_residuals(
                    alone, (x + t * low.vectors)[run : run + 1, 1:2], lam[run : run + 1, 1:2], 1.0
                )
                for t in (-0.5, 0.0, 0.5)
            ]
            second = -(losses[0] + losses[2] - 2 * losses[1])[0] / 0.25  # f''[v, v], lam inside
            r = weighted_residuals(problem, x, lam, 1.0)[run]
            eta = (-low.values[run, 1] / second.square().sum()).sqrt()
            cosine = (r @ second) / r.norm() / second.norm()
            assert abs(float(step.eta[run, 1] / eta) - 1) < 1e-8
            assert abs(float((1 - step.after[run] / step.before[run]) - cosine**2)) < 1e-8


def test_joint_cubic_steps_are_the_best_and_never_raise_the_loss():
    """No step lengths near the joint ones do better; separate closed forms together may do harm."""
    for seed in range(4):
        _, problem, x, lam = cubic_problem(m=5, seed=seed)
        curvature = Curvature(problem, x, lam, 1.0)
        low = find_lowest_pairs(curvature, random_like(x))
        chosen = low.values < 0
        infinity = torch.full((2,), torch.inf, dtype=torch.float64)
        step = joint_step(curvature, low.vectors, low.values, chosen, infinity, exact=True)
        assert (step.after < step.before)[chosen.any(1)].all()
        for k in range(8):
            nudge = 1 + 0.05 * random_like(step.eta, k)
            pair = split_candidates(problem, x, lam, low.vectors, (step.eta * nudge).clamp(min=0))
            assert (pair[2].evaluate(pair[0], pair[1], 1.0).loss >= step.after - 1e-12).all()


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_joint_steps_never_raise_the_loss(objective, outputs):
    """Sigmoid gates are a formal derivative: there a negative eigenvalue is no promise of a gain."""
    for surrogate in ["sigmoid", "softplus"]:
        for seed in range(3):
            case, problem = case_of(objective, outputs, surrogate, seed=seed)
            curvature = Curvature(problem, case.x, case.lam, SHARPNESS)
            low = find_lowest_pairs(curvature, random_like(case.x))
            chosen = low.values < 0
            for longest in (0.01, 10.0):
                bound = torch.full((2,), longest, dtype=torch.float64)
                step = joint_step(curvature, low.vectors, low.values, chosen, bound)
                assert (step.after <= step.before).all()
                if surrogate == "softplus":
                    assert (step.after < step.before)[chosen.any(1)].all()
                assert (step.eta[~chosen] == 0).all()
                assert (step.eta <= longest).all()
                pair = split_candidates(problem, case.x, case.lam, low.vectors, step.eta)
                assert close(pair[2].evaluate(pair[0], pair[1], SHARPNESS).loss, step.after, 1e-12)
            uphill = joint_step(curvature, low.vectors, -low.values.abs(), low.values > 1e-3, bound)
            assert (uphill.after <= uphill.before).all()
