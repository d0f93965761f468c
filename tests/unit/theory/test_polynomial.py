"""Polynomial networks: exact samples from exact points, aggregates below degree 3, honest flags."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from residuum.attacks.exact.polynomial import recover
from residuum.errors import InputError
from residuum.networks import MLP, Polynomial, PolynomialNetwork, ReLU
from residuum.records.identification import Identification
from residuum.theory import certify
from residuum.theory.polynomial import (
    estimate_signal_subspace,
    find_live_neurons,
    interpolate,
    measure_identifiability,
)
from tests.cases import ExactPoint, coherent_point, polynomial_point


def network(weight: Tensor, coefficient: Tensor, coefficients: tuple[float, ...]) -> nn.Module:
    model = PolynomialNetwork(weight.shape[1], len(weight), Polynomial(coefficients)).double()
    model.load_state_dict({"weight": weight, "coefficient": coefficient})
    return model


def orthonormal(n: int, d: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, d, generator=rng, dtype=torch.float64))[0][:n]


def errors(point: ExactPoint, identification: Identification, alpha: int) -> tuple[float, float]:
    """Worst relative error of a sample and of a weight, up to order and the sign symmetry."""
    assert identification.x.shape == point.x.shape
    order = (identification.x @ point.x.T).abs().argmax(0)
    assert sorted(order.tolist()) == list(range(len(point.x)))
    x, b = identification.x[order], identification.weights[order]
    sign = (x * point.x).sum(1).sign()
    truth = point.lam * point.y
    relative = (sign[:, None] * x - point.x).norm(dim=1) / point.x.norm(dim=1)
    weights = (b * sign**alpha - truth).abs() / truth.abs()
    return float(relative.max()), float(weights.max())


def residual_by_hand(point: ExactPoint, alpha: int, c: float) -> float:
    """Both stationarity equations and the margins, written out."""
    w, a = point.model.weight.detach(), point.model.coefficient.detach()
    p, b = w @ point.x.T, point.lam * point.y
    weight = w - alpha * c * a[:, None] * ((p ** (alpha - 1) * b) @ point.x)
    margins = point.y * c * (a @ p**alpha) - 1
    return float(max(weight.abs().max(), (a - c * p**alpha @ b).abs().max(), margins.abs().max()))


@pytest.mark.parametrize(
    ("n", "alpha", "labels", "c"),
    [
        (5, 3, "mixed", 1.0),
        (6, 3, "mixed", 2.5),
        (4, 4, "one", 1.0),
        (4, 4, "mixed", 0.5),
        (4, 5, "mixed", 1.0),
    ],
)
def test_planted_points_are_exact(n: int, alpha: int, labels: str, c: float) -> None:
    point = polynomial_point(n, 9, alpha, labels, leading=c)
    assert residual_by_hand(point, alpha, c) <= 1e-9
    assert point.lam.max() / point.lam.min() > 1.01
    if labels == "mixed":
        assert certify(point.model, point.x, point.y).residual_plain <= 1e-9


@pytest.mark.parametrize("n", [3, 5, 8, 12, 20, 30])
def test_cubic_recovery_on_orthonormal_samples(n: int) -> None:
    point = polynomial_point(n, 784 if n == 30 else 2 * n, 3)
    identification = recover(point.model)
    sample, weight = errors(point, identification, 3)
    assert sample <= 1e-9
    assert weight <= 1e-8
    assert (identification.r, identification.rank_k, identification.n_r) == (
        n,
        math.comb(n + 1, 2),
        n * (n + 1) // 2,
    )
    assert identification.certified.all()
    assert identification.residuals.max() <= 1e-9
    assert identification.notes == ()


@pytest.mark.parametrize("n", [3, 8])
def test_recovery_is_exact_before_refinement(n: int) -> None:
    point = polynomial_point(n, n + 3, 3, seed=1)
    assert max(errors(point, recover(point.model, steps=0), 3)) <= 1e-11


@pytest.mark.parametrize(("n", "coherence"), [(5, 0.1), (4, 0.2)])
def test_samples_that_are_not_orthogonal_need_dual_vectors(n: int, coherence: float) -> None:
    point = coherent_point(n, 9, coherence)
    assert certify(point.model, point.x, point.y).residual_plain <= 1e-9
    identification = recover(point.model)
    assert max(errors(point, identification, 3)) <= 1e-7
    neurons = find_live_neurons(point.model)
    signal = estimate_signal_subspace(neurons)
    x = identification.x @ signal.basis
    printed = (x * interpolate(neurons, signal)(x)).sum(1)  # T(x_k, ..., x_k), as in the paper
    assert (printed / identification.weights - 1).abs().max() > 1e-3


def test_the_subspace_is_smaller_than_the_input_space() -> None:
    point = polynomial_point(6, 784, 3)
    identification = recover(point.model)
    assert identification.r == 6
    assert identification.spectral_gap < 1e-12
    assert identification.certified.all()
    assert max(errors(point, identification, 3)) <= 1e-9


def test_quartic_with_one_label() -> None:
    point = polynomial_point(5, 8, 4, "one")
    identification = recover(point.model)
    assert identification.samples
    assert identification.certified.all()
    assert max(errors(point, identification, 4)) <= 1e-9
    assert identification.symmetry.startswith("x ~ -x")


@pytest.mark.parametrize("alpha", [4, 5])
def test_rank_deficiency_is_reported(alpha: int) -> None:
    point = polynomial_point(4, 6, alpha, "mixed")
    identification = recover(point.model)
    assert identification.rank_k < identification.n_r
    assert not identification.samples
    assert not identification.certified.any()
    assert "rank deficient" in identification.notes[0]
    assert identification.residuals.isfinite().all()


@pytest.mark.parametrize("lower", [(0.0, 0.0, 0.0), (0.1, -0.2, 0.3)])
def test_the_leading_coefficient_counts(lower: tuple[float, ...]) -> None:
    point = polynomial_point(5, 8, 3, leading=2.5)
    weight, coefficient = point.model.weight.detach(), point.model.coefficient.detach()
    identification = recover(network(weight, coefficient, (*lower, 2.5)))
    assert max(errors(point, identification, 3)) <= 1e-9
    assert any("lower powers" in note for note in identification.notes) == any(lower)
    wrong = recover(network(weight, coefficient, (*lower, 1.0)))
    assert errors(point, wrong, 3)[1] > 1


def test_balance_is_reported() -> None:
    point = polynomial_point(4, 6, 3)
    assert measure_identifiability(point.model).balance_gap <= 1e-12
    weight, coefficient = point.model.weight.detach(), point.model.coefficient.detach()
    off = recover(network(weight, 1.1 * coefficient, (0, 0, 0, 1)))
    assert 0.01 < off.balance_gap < 1
    assert not off.certified.any()
    assert "not a KKT point" in off.notes[0]


def test_scale_from_a_norm_or_a_constant_coordinate() -> None:
    point = polynomial_point(4, 6, 3)
    plain, scaled = recover(point.model), recover(point.model, norm=2.0)
    assert "up to scale" in plain.scale
    torch.testing.assert_close(scaled.x, 2 * plain.x)
    torch.testing.assert_close(scaled.weights, plain.weights / 8)
    augmented = recover(point.model, augmented=True)
    factor = 1 / point.x[:, -1]
    order = (plain.x @ point.x.T).abs().argmax(0)
    torch.testing.assert_close(augmented.x[order], point.x * factor[:, None])
    torch.testing.assert_close(augmented.weights[order], point.lam * point.y / factor**3)


def test_noise_is_not_amplified_when_the_rank_is_given() -> None:
    point = polynomial_point(8, 20, 3)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in point.model.parameters():
            noise = torch.randn(p.shape, generator=rng, dtype=p.dtype)
            p.add_(1e-4 * p.norm() / noise.norm() * noise)
    residual = certify(point.model, point.x, point.y).residual_plain
    identification = recover(point.model, rank=8)
    assert errors(point, identification, 3)[0] <= 20 * residual
    assert (
        measure_identifiability(point.model).r == 20
    )  # what noise does to a rank that is not given


def test_single_precision_keeps_the_rank() -> None:
    point = polynomial_point(8, 20, 3)
    identification = recover(point.model.float())
    assert identification.r == 8
    assert identification.certified.all()
    assert max(errors(point, identification, 3)) <= 1e-5


def test_a_random_network_is_not_certified() -> None:
    torch.manual_seed(0)
    for width, inputs in [(1, 3), (40, 6), (12, 30)]:
        identification = recover(PolynomialNetwork(inputs, width, Polynomial((0, 0, 0, 1))))
        assert not identification.certified.any()
        assert identification.notes


def test_recovery_is_deterministic() -> None:
    point = polynomial_point(5, 8, 3)
    assert torch.equal(recover(point.model, seed=3).x, recover(point.model, seed=3).x)


def linear_network(aggregate: Tensor, n: int, spread: Tensor) -> nn.Module:
    """W_j = a_j S, |S| = 1, sum a_j^2 = sqrt(n): a KKT point for any x with S.x_i = y_i / sqrt(n)."""
    a = spread / spread.norm() * n**0.25
    return network(a[:, None] * aggregate, a, (0, 1))


def test_degree_one_gives_the_sum() -> None:
    x, y = orthonormal(4, 7), torch.tensor([1.0, -1, 1, -1]).double()
    s = (y / 2) @ x  # lam = 1 / sqrt(n)
    across = orthonormal(7, 7, seed=1)[:2]
    across = across - (across @ s)[:, None] * s
    other = y[:, None] * s / 2 + torch.cat([across, -across])  # y = (1, -1, 1, -1): they cancel
    other_sum = (y / 2) @ other
    for data in (x, other):
        assert (y * (data @ s) * 2 - 1).abs().max() <= 1e-12
    first = measure_identifiability(linear_network(s, 4, torch.tensor([1.0, -2, 0.5]).double()))
    second = measure_identifiability(linear_network(other_sum, 4, torch.tensor([0.3, 1]).double()))
    assert first.aggregate is not None
    assert second.aggregate is not None
    assert (first.aggregate - s).abs().max() <= 1e-10
    assert (first.aggregate - second.aggregate).abs().max() <= 1e-10
    assert not first.samples
    assert "and not the samples x_i" in first.notes[0]


def quadratic_network(x: Tensor, y: Tensor, copies: Tensor) -> tuple[nn.Module, Tensor]:
    """Orthonormal x: neurons x_i / (sqrt(2) |b_i|), a = 1 / (2 b_i), |b_i|^3 = copies_i / 4."""
    b = y * (copies.double() / 4) ** (1 / 3)
    index = torch.arange(len(x)).repeat_interleave(copies)
    weight = x / (math.sqrt(2) * b.abs())[:, None]
    return network(weight[index], (1 / (2 * b))[index], (0, 0, 1)), b


def test_degree_two_gives_the_moment_matrix() -> None:
    x, y = orthonormal(4, 7), torch.tensor([1.0, 1, -1, -1]).double()
    copies = torch.tensor([2, 2, 1, 3])
    turned = x.clone()
    turned[:2] = torch.tensor([[0.6, 0.8], [-0.8, 0.6]], dtype=x.dtype) @ x[:2]
    stated = []
    for data in (x, turned):
        model, b = quadratic_network(data, y, copies)
        assert residual_by_hand(ExactPoint(model, data, y, b.abs(), y), 2, 1.0) <= 1e-10
        stated.append(measure_identifiability(model))
        moment = stated[-1].moment
        assert moment is not None
        assert (moment - (data.T * b) @ data).abs().max() <= 1e-10
        assert (stated[-1].eigenvalues - b.sort().values).abs().max() <= 1e-10
        assert "and not the samples x_i" in stated[-1].notes[0]
    assert (stated[0].moment - stated[1].moment).abs().max() <= 1e-10
    with pytest.raises(InputError, match="cannot be recovered from its weights"):
        recover(model)


def cubic(width: int, fill: float) -> nn.Module:
    return network(torch.ones(width, 4).double(), torch.full((width,), fill).double(), (0, 0, 0, 1))


def test_bad_input_is_refused() -> None:
    point = polynomial_point(3, 5, 3)
    for model, message in [
        (MLP((4, 3, 1)), "got a MLP"),
        (PolynomialNetwork(4, 3, ReLU()), "PolynomialNetwork with ReLU"),
        (cubic(0, 1.0), "got a network of width 0"),
        (cubic(3, 0.0), "zero output weight"),
        (cubic(3, math.nan), "got infinite or NaN weights"),
    ]:
        with pytest.raises(InputError, match=message):
            recover(model)
    for rank in (0, 6, 100):
        with pytest.raises(InputError, match="between 1 and 5"):
            recover(point.model, rank=rank)
    with pytest.raises(InputError, match="rank is lower"):
        recover(point.model, rank=4)
    with pytest.raises(InputError, match="cannot be combined"):
        recover(point.model, norm=1.0, augmented=True)
    with pytest.raises(InputError, match="positive and finite"):
        recover(point.model, norm=-1.0)
    with pytest.raises(InputError, match="at least one random pair of matrices"):
        recover(point.model, pairs=0)
