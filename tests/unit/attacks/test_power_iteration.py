"""Where the rank condition fails: growth by power iteration, noise, and what must not be certified."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from residuum.attacks.exact.polynomial import recover
from residuum.attacks.exact.power import Completion, misfit, normal_equations
from residuum.records.identification import Identification
from residuum.theory import certify
from residuum.theory.polynomial import estimate_signal_subspace, find_live_neurons, interpolate
from tests.cases import ExactPoint, polynomial_point
from tests.unit.theory.test_polynomial import errors, network


def distinct(point: ExactPoint) -> list[int]:
    """One index per neuron direction: copies of a neuron say nothing new."""
    rows = {tuple(row): j for j, row in enumerate(point.model.weight.detach().tolist())}
    return sorted(rows.values())


def subnetwork(point: ExactPoint, index: list[int]) -> nn.Module:
    weight, coefficient = point.model.weight.detach(), point.model.coefficient.detach()
    return network(weight[index], coefficient[index], point.model.activation.coefficients)


def recovered(point: ExactPoint, identification: Identification, tolerance: float) -> int:
    """Samples with a recovered one within ``tolerance``, up to sign."""
    signed_errors = torch.stack([identification.x, -identification.x])[:, :, None] - point.x
    return int(
        (signed_errors.norm(dim=3).amin(dim=(0, 1)) <= tolerance * point.x.norm(dim=1)).sum()
    )


@pytest.mark.parametrize("draw", range(5))
def test_sixteen_of_thirty_six_neurons(draw: int) -> None:
    point = polynomial_point(8, 20, 3)
    neurons = distinct(point)
    assert len(neurons) == 36
    order = torch.randperm(36, generator=torch.Generator().manual_seed(draw))[:16]
    identification = recover(subnetwork(point, [neurons[i] for i in order]))
    assert recovered(point, identification, 1e-9) >= 7
    assert identification.rank_k == 16
    assert identification.method == "growth"
    assert not identification.certified.any()
    assert identification.residuals.max() <= 1e-9


def test_a_random_guess_recovers_nothing() -> None:
    """Chance level of the counts above."""
    point = polynomial_point(8, 20, 3)
    identification = recover(point.model)
    guess = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double() @ point.x
    guess = guess / guess.norm(dim=1, keepdim=True)
    assert recovered(point, identification, 1e-9) == 8
    assert recovered(point, dataclasses.replace(identification, x=guess), 0.1) == 0


@pytest.mark.parametrize("alpha", [4, 5])
def test_growth_finds_what_the_deficient_rank_leaves(alpha: int) -> None:
    point = polynomial_point(4, 6, alpha, "mixed")
    identification = recover(point.model)
    assert max(errors(point, identification, alpha)) <= 1e-8
    assert not identification.certified.any()


@pytest.mark.parametrize("seed", range(3))
def test_noise_at_a_stated_residual(seed: int) -> None:
    point = polynomial_point(8, 20, 3, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    exact = {name: p.detach().clone() for name, p in point.model.named_parameters()}
    noise = {n: torch.randn(p.shape, generator=rng, dtype=p.dtype) for n, p in exact.items()}
    size = 1e-4
    for _ in range(3):  # to a relative KKT residual of 1e-4
        point.model.load_state_dict({n: p + size * noise[n] for n, p in exact.items()})
        residual = certify(point.model, point.x, point.y).residual_plain
        size *= 1e-4 / residual
    assert residual == pytest.approx(1e-4, rel=0.01)
    identification = recover(point.model, rank=8)
    assert errors(point, identification, 3)[0] <= 20 * residual


@pytest.mark.parametrize("alpha", [3, 4])
def test_normal_equations_against_autograd(alpha: int) -> None:
    point = polynomial_point(5, 7, alpha, "one", seed=2)
    neurons = find_live_neurons(point.model)
    f = interpolate(neurons, estimate_signal_subspace(neurons))
    rng = torch.Generator().manual_seed(0)
    g = torch.randn(3, 5, generator=rng, dtype=torch.float64)
    sign = torch.tensor([1.0, -1, 1]).double()
    error = misfit(f, g, sign)
    jacobian = -torch.func.jacrev(lambda g: misfit(f, g, sign).flatten())(g).flatten(1)
    normal, slope = normal_equations(f, g, sign, error)
    torch.testing.assert_close(normal, jacobian.T @ jacobian)
    torch.testing.assert_close(slope.flatten(), jacobian.T @ error.flatten())


@pytest.mark.parametrize("alpha", [3, 4])
def test_completed_forms_have_the_known_gradients(alpha: int) -> None:
    point = polynomial_point(4, 6, alpha, "one", seed=1)
    neurons = find_live_neurons(subnetwork(point, distinct(point)[:6]))
    f = interpolate(neurons, estimate_signal_subspace(neurons))
    form = Completion(f).complete(f.sizes[:, None] * f.values)
    w = f.directions.clone().requires_grad_()
    p = ((w @ form.directions.T) ** (alpha - 1) * (w @ form.coefficients.T)).sum()
    (gradient,) = torch.autograd.grad(p, w)
    torch.testing.assert_close(gradient / alpha, f.values)
    torch.testing.assert_close(form.gradient(f.directions), f.values)


@pytest.mark.parametrize(("alpha", "leading"), [(3, 2.5), (4, 1.0), (4, 0.5)])
def test_negative_leading_coefficients(alpha: int, leading: float) -> None:
    """-a and -c are the same function, hence the same samples and weights."""
    point = polynomial_point(5, 8, alpha, "one", leading=leading)
    weight, coefficient = point.model.weight.detach(), -point.model.coefficient.detach()
    lower = [0.0] * alpha
    identification = recover(network(weight, coefficient, (*lower, -leading)))
    assert max(errors(point, identification, alpha)) <= 1e-9
    assert identification.certified.all()
    wrong = recover(network(weight, coefficient, (*lower, leading)))
    assert errors(point, wrong, alpha)[1] > 1


def test_samples_outside_the_span_of_the_neurons_are_merged() -> None:
    """x +- nu with half the weight each, nu across all neurons: the same network, other samples."""
    point = polynomial_point(4, 9, 3)
    basis = torch.linalg.svd(point.x)[2]
    nu = 3 * basis[4:8]  # as far away as one likes
    x = torch.cat([point.x + nu, point.x - nu])
    assert certify(point.model, x, point.y.repeat(2)).residual_plain <= 1e-9
    assert "count as one" in recover(point.model).symmetry
    assert max(errors(point, recover(point.model), 3)) <= 1e-9


def test_few_variables_certify_nothing() -> None:
    """One power fits every form in one variable, two cubes every cubic form in two."""
    for n in (1, 2):
        point = polynomial_point(n, 5, 3)
        identification = recover(point.model)
        assert max(errors(point, identification, 3)) <= 1e-9
        assert not identification.certified.any()
        assert any("does not confirm the samples" in note for note in identification.notes)


def test_small_neurons_cannot_buy_a_certificate() -> None:
    """Three neurons of an exact point and tiny ones at random, balanced: rank K is full, no more."""
    point = polynomial_point(3, 5, 3)
    rng = torch.Generator().manual_seed(0)
    tiny = 1e-4 * torch.randn(8, 3, generator=rng, dtype=torch.float64) @ point.x
    big = distinct(point)[:3]
    weight = torch.cat([point.model.weight.detach()[big], tiny])
    coefficient = torch.cat([point.model.coefficient.detach()[big], tiny.norm(dim=1) / 3**0.5])
    identification = recover(network(weight, coefficient, (0, 0, 0, 1)))
    assert identification.samples
    assert identification.balance_gap <= 1e-2
    assert not identification.certified.any()
