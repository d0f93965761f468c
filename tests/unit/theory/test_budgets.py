"""Published budgets compared with the exact ones, Theorem 9 and its inverse, directions, the KKT loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from papers.points import relu_point_on, steep_point
from papers.refael2025 import budget_certificates, kkt_loss, largest_split, split_levels
from residuum.networks import MLP
from residuum.stationarity import norm
from residuum.theory.budgets import compute_exact_budgets
from residuum.theory.directions import (
    find_data_direction,
    find_largest_direction,
    find_softest_direction,
    find_weight_direction,
)
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.patterns import HypothesisError
from tests.cases import multiclass_point, relu_point


def direction(dim: int, seed: int = 0) -> torch.Tensor:
    nu = torch.randn(dim, generator=torch.Generator().manual_seed(seed)).double()
    return nu / nu.norm()


def test_the_printed_theorem_5_promises_too_much_where_an_output_weight_exceeds_one():
    point = steep_point(0.05)
    s = KKTSet.from_samples(point.model, point.x, point.y, point.lam)
    assert s.is_exact
    assert point.model.linears[1].weight.abs().min() > 1
    broken = 0
    along = [*point.model.linears[0].weight.detach(), *(direction(12, seed) for seed in range(5))]
    for nu in along:
        for i in range(len(s)):
            certificates = budget_certificates(point.model, s.x, s.lam, i, nu)
            assert certificates.valid("theorem5_corrected")
            assert certificates.valid("theorem8")
            if "theorem5_printed" in certificates.invalid:
                broken += 1
                length = 0.99 * certificates.theorem5_printed
                assert length > certificates.exact
                beyond = s.split(i, nu, length, check=False)
                assert beyond.residual > 1e-3  # what the printed theorem says cannot happen
                inside = s.split(i, nu, 0.99 * certificates.theorem5_corrected)
                assert inside.residual < 1e-12
    assert broken > 0


def test_the_printed_theorem_5_holds_where_output_weights_are_small():
    point = relu_point()
    assert point.model.linears[1].weight.abs().max() < 1
    for seed in range(10):
        certificates = budget_certificates(point.model, point.x, point.lam, 0, direction(12, seed))
        assert certificates.invalid in ((), ("one_sided",))


def test_a_one_sided_gamma_gives_a_false_budget():
    point = relu_point()
    nu = -point.x[point.y > 0].mean(0) - point.x[point.y < 0].mean(0)
    shifted = point.x - 0.2 * nu / nu.norm()  # all <nu, x_i> below zero would make gamma negative
    certificates = [
        budget_certificates(point.model, shifted, point.lam, i, direction(12, seed))
        for i in range(6)
        for seed in range(20)
    ]
    assert any("one_sided" in certificate.invalid for certificate in certificates)
    assert all(certificate.gamma >= 0 for certificate in certificates)


@given(st.integers(0, 10**6), st.floats(0.05, 3.0), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_corrected_certificates_never_exceed_the_exact_budget(seed, shrink, i):
    point = steep_point(shrink)
    s = KKTSet.from_samples(point.model, point.x, point.y, point.lam)
    assert s.is_exact
    certificates = budget_certificates(point.model, s.x, s.lam, i, direction(12, seed))
    assert certificates.theorem5_corrected <= certificates.exact * (1 + 1e-9)
    assert certificates.theorem8 <= certificates.exact * (1 + 1e-9)


@given(st.integers(0, 10**6), st.floats(0.0, 0.3), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_theorem_8_holds_off_exact_points(seed, noise, i):
    """Lemma 14 too: |<w_j, nu>| <= eps + gamma |v_j| sum lam on perturbed networks."""
    point, rng = relu_point(width=2), torch.Generator().manual_seed(seed)
    model = point.model
    with torch.no_grad():
        for p in model.parameters():
            p.add_(
                noise * torch.randn(p.shape, generator=rng).double() * p.norm() / p.numel() ** 0.5
            )
    s = KKTSet.from_samples(model, point.x, point.y, point.lam)
    eps, nu = s.residual * norm(s.target), direction(12, seed)
    certificates = budget_certificates(model, s.x, s.lam, i, nu, eps)
    assert certificates.theorem8 <= certificates.exact * (1 + 1e-9)
    w, v = model.linears[0].weight.detach(), model.linears[1].weight.detach()[0]
    assert ((w @ nu).abs() <= eps + certificates.gamma * v.abs() * s.lam.sum() + 1e-12).all()


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_the_lowest_singular_vector_attains_what_theorem_15_says(seed, n, d):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).double()
    nu, sigma, gamma = find_data_direction(x)
    assert nu.norm() == pytest.approx(1)
    assert sigma / math.sqrt(n) - 1e-12 <= gamma <= sigma + 1e-12
    other = direction(d, seed + 1)  # no direction does better than sigma_d / sqrt(n)
    assert float((x @ other).abs().max()) >= sigma / math.sqrt(n) - 1e-12


def test_the_weights_direction_is_what_the_first_layer_hardly_sees():
    torch.manual_seed(0)
    model = MLP((6, 20, 1)).double()
    nu, sigma = find_weight_direction(model)
    w = model.linears[0].weight.detach()
    assert float((w @ nu).norm()) == pytest.approx(sigma)
    assert sigma == pytest.approx(float(torch.linalg.svdvals(w)[-1]))


def test_direction_finders_rank_as_their_names_say():
    """On random deep networks the linear programmes beat the softest, and that beats random ones."""
    wins, gains = 0, []
    for seed in range(8):
        torch.manual_seed(seed)
        model = MLP((8, 15, 12, 1), bias="all").double().requires_grad_(False)
        x, y = torch.randn(3, 8).double(), torch.tensor([1, -1, 1])
        s = KKTSet.from_samples(model, x, y, torch.ones(3))
        soft = find_softest_direction(s.models, s.x[0], s.gradients[0])
        large = find_largest_direction(s.models, s.x[0], s.gradients[0])
        random = s.directions("tangent")[0]
        reach = [
            float(compute_exact_budgets(s.models, s.x[:1], nu[None]).least[0])
            for nu in (random, soft, large)
        ]
        assert reach[2] >= reach[1]
        wins += reach[1] > reach[0]
        gains.append(reach[2] / reach[1])
        assert s.split(0, large, 0.999 * reach[2]).is_stationary_set
    assert wins >= 7
    assert max(gains) > 1.05


@given(st.integers(0, 10**6), st.floats(0.05, 0.95), st.floats(0.05, 0.95), st.floats(0.1, 2.0))
@settings(max_examples=60, deadline=None)
def test_levels_after_a_split_are_exact_and_inside_the_corrected_bound(seed, a, b, shrink):
    point = steep_point(shrink)
    s = KKTSet.from_samples(point.model, point.x, point.y, point.lam)
    assert s.is_exact
    i, nu = seed % len(s), direction(12, seed)
    budgets = s.budgets(nu)
    alpha, beta = a * min(float(budgets.alpha[i]), 3), b * min(float(budgets.beta[i]), 3)
    levels = split_levels(s, i, nu, alpha, beta)
    slope = float(s.y[i] * s.gradients[i, 0] @ nu)
    margins = torch.cat(
        [s.margins[:, 0], s.margins[i] + torch.tensor([alpha, -beta], dtype=torch.float64) * slope]
    )
    weights = torch.cat(
        [s.lam, s.lam[i] * torch.tensor([beta, alpha], dtype=torch.float64) / (alpha + beta)]
    )
    weights[i], margins[i] = 0, math.inf
    assert levels.margin_after == pytest.approx(float(margins.min()), rel=1e-9)
    margins[i] = 1
    naive = float((weights * (margins - levels.margin_after)).max())
    assert levels.delta_after == pytest.approx(naive, rel=1e-7, abs=1e-12)
    assert levels.delta_after <= levels.bound * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.3), (0.1, 0.4)])
@pytest.mark.parametrize("i", [0, 1])
def test_the_corrected_bound_of_theorem_9_is_all_but_attained(i, alpha, beta):
    """Along w of a neuron all its samples go equally far; a long sample elsewhere weighs little.

    |s| = v^2 |sum lam_i <x_i, nu>| = v^2 gamma sum lam = C then, and the other sample, still on the
    old margin, or the half that moved outwards, has the slack max(lam) beta C.
    """
    x = torch.tensor([[1, 0.2, 0], [1, -0.4, 0], [-0.1, 0, 99]]).double()
    point = relu_point_on(x, torch.tensor([0, 0, 1]), bias=False)
    s = KKTSet.from_samples(point.model, point.x, point.y, point.lam)
    assert s.is_exact
    levels = split_levels(s, i, torch.tensor([1.0, 0, 0]).double(), alpha, beta)
    assert 1 / 1.1 < levels.delta_after / levels.bound <= 1


def test_the_printed_theorem_9_fails_at_the_same_margin():
    point = steep_point(0.5)
    s = KKTSet.from_samples(point.model, point.x, point.y, point.lam)
    nu = s.gradients[0, 0]
    length = 0.05 * float(s.budgets(nu / nu.norm()).least[0])
    levels = split_levels(s, 0, nu, length, length)
    assert levels.printed is not None  # its condition Dd < p is met
    assert levels.margin_after < levels.margin_before - 1e-3  # and the margin is not kept


@pytest.mark.parametrize("seed", range(6))
def test_the_inverse_of_theorem_9_is_tight(seed):
    point = relu_point(groups=4, dim=16, seed=seed)
    s = KKTSet.from_samples(point.model, point.x, point.y, point.lam)
    nu, i = direction(16, seed), seed % len(s)
    budget = float(s.budgets(nu).least[i])
    for delta in (1e-4, 1e-2, 1e-1):
        length = largest_split(s, i, nu, delta)
        assert 0 < length <= budget * (1 + 1e-12)
        if length < 0.999 * budget:
            assert s.split(i, nu, length).delta == pytest.approx(delta, rel=1e-9)
            assert s.split(i, nu, 1.0005 * length).delta > delta
    assert (
        largest_split(s, i, s.directions("tangent")[i], 0.0) > 0
    )  # on the margin: no slack at all
    assert largest_split(s, i, nu, 0.0) == pytest.approx(0)


def test_the_kkt_loss_in_both_forms():
    point = relu_point()
    lam = point.lam + torch.tensor([0.1, -1, 0, 0, 0, 0])
    s = KKTSet.from_samples(point.model, point.x, point.y, lam)
    size, negative = s.residual * norm(s.target), float((-lam).clamp(min=0).sum())
    assert kkt_loss(s, 1, 2, 3) == pytest.approx(2 * size + 3 * negative)
    assert kkt_loss(s, 2, 2, 3) == pytest.approx(2 * size**2 + 3 * negative)


def test_printed_theorems_refuse_other_networks():
    deep, many = relu_point(3), multiclass_point()
    with pytest.raises(HypothesisError, match="two-layer"):
        budget_certificates(deep.model, deep.x, deep.lam, 0, direction(12))
    s = KKTSet.from_samples(many.model, many.x, many.y, many.lam)
    for call in (
        lambda: split_levels(s, 0, direction(14), 0.01, 0.01),
        lambda: largest_split(s, 0, direction(14), 1.0),
    ):
        with pytest.raises(HypothesisError, match="binary"):
            call()
    levels = split_levels(
        KKTSet.from_samples(deep.model, deep.x, deep.y, deep.lam), 0, direction(12), 0.1, 0.1
    )
    assert levels.printed is None
    assert levels.bound is None
