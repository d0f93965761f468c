"""Merge, split and far sets on exact KKT points, and what refuses them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from residuum.errors import InputError
from residuum.networks import MLP, ConvNet, Linear, Polynomial
from residuum.stationarity import Rows, weighted_gradient
from residuum.theory.directions import DIRECTIONS
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.patterns import (
    HypothesisError,
    compute_slope_matrix,
    compute_switches,
    record_switches,
)
from tests.cases import multiclass_point, ntk_point, relu_point
from tests.reference import row_gradients, theta_vector

POINTS = [
    *(
        pytest.param(relu_point, {"depth": d, "seed": s}, id=f"{d} layers, {s}")
        for d in (2, 3, 4)
        for s in (0, 1)
    ),
    pytest.param(relu_point, {"width": 3, "groups": 4, "dim": 16}, id="several neurons"),
    pytest.param(multiclass_point, {"classes": 3}, id="3 classes"),
    pytest.param(multiclass_point, {"classes": 4}, id="4 classes"),
]


def kkt_set(build, options) -> KKTSet:
    point = build(**options)
    return KKTSet.from_samples(point.model, point.x, point.y, point.lam)


def naive_residual(s: KKTSet) -> float:
    """One backward pass per sample, summed in a loop."""
    rows = Rows(torch.arange(len(s)), s.covectors[:, 0])
    model = copy.deepcopy(s.models[0]).requires_grad_()
    theta = theta_vector(model)
    return float((theta - s.lam @ row_gradients(model, s.x, rows)).norm() / theta.norm())


def direction(dim: int, seed: int = 0) -> torch.Tensor:
    nu = torch.randn(dim, generator=torch.Generator().manual_seed(seed)).double()
    return nu / nu.norm()


def assert_exact(s: KKTSet) -> None:
    assert s.residual < 1e-9
    assert (s.margins - 1).abs().max() < 1e-9
    assert s.is_stationary_set
    assert s.is_full_kkt_set
    assert naive_residual(s) < 1e-9


@pytest.mark.parametrize(("build", "options"), POINTS)
def test_merging_keeps_an_exact_point(build, options):
    point = build(**options)
    s = KKTSet.from_samples(point.model, point.x, point.y, point.lam)
    merged = s.merge(0, 1)
    assert len(merged) == len(s) - 1
    assert merged.lam[0] == s.lam[0] + s.lam[1]
    assert_exact(merged)
    everything, _ = s.merge_all()
    assert len(everything) == len(point.group.unique())  # one sample per activation pattern
    assert_exact(everything)


@pytest.mark.parametrize(("build", "options"), POINTS)
def test_tangent_splits_of_all_samples_keep_an_exact_point(build, options):
    for name in DIRECTIONS:
        s = kkt_set(build, options)
        nu = s.directions(name)
        assert torch.allclose(nu.norm(dim=1), torch.ones(len(s)).double(), atol=1e-12)
        assert torch.einsum("igd,id->ig", s.gradients, nu).abs().max() < 1e-10
        lengths = 0.99 * s.budgets(nu).least.clamp(max=30)
        after = s.split_all(nu, lengths)
        assert len(after) == 2 * len(s)
        assert 0 < after.distance(s) <= float(lengths.min()) * (1 + 1e-9)
        assert_exact(after)


@pytest.mark.parametrize(("build", "options"), POINTS)
def test_far_sets_are_as_far_as_asked_and_exact(build, options):
    for r in [1.0, 1e6]:
        s = kkt_set(build, options)
        far_set = s.far_set(r)
        assert far_set.distance(s) >= r
        assert len(far_set) == 2 * len(s)
        assert_exact(far_set)


@pytest.mark.parametrize(("build", "options"), POINTS)
def test_a_generic_split_is_stationary_and_no_full_kkt_set(build, options):
    s = kkt_set(build, options)
    nu = direction(s.x.shape[1], 3)
    length = 0.9 * float(s.budgets(nu).least[0])
    after = s.split(0, nu, length, 0.5 * length)
    assert after.is_stationary_set
    assert after.residual < 1e-9
    assert not after.is_full_kkt_set
    assert not after.is_on_margin
    assert after.margin < 1 - 1e-3
    # Slack moves between the halves and is conserved: lam+ (m+ - p) + lam- (m- - p) = lam (m - p).
    assert after.slack[:2].sum() == pytest.approx(float(s.slack[0]), abs=1e-12)
    assert after.parent is s


@pytest.mark.parametrize(("build", "options"), POINTS)
def test_just_inside_the_exact_budget_and_just_beyond(build, options):
    s = kkt_set(build, options)
    tried = 0
    for seed in range(6):
        nu = direction(s.x.shape[1], seed)
        budgets = s.budgets(nu)
        for side, way in ((budgets.alpha, 1.0), (budgets.beta, -1.0)):
            edge = float(side[0])
            if edge > 100:
                continue
            tried += 1
            other = 0.5 * float(torch.minimum(budgets.least[0], torch.tensor(1.0)))
            assert s.split(0, way * nu, edge * (1 - 1e-9), other).residual < 1e-9
            with pytest.raises(
                HypothesisError,
                match=r"both halves activate the same neurons as the sample.*layers\.\d\[",
            ):
                s.split(0, way * nu, edge * 1.001, other)
            beyond = s.split(0, way * nu, edge * 1.001, other, check=False)
            assert beyond.residual > 1e-4
            assert not beyond.is_stationary_set
    assert tried >= 3


def test_budgets_equal_a_walk_along_the_line():
    """The naive reference: walk in small steps until the pattern changes, on random deep networks."""
    torch.manual_seed(0)
    model = MLP((5, 9, 8, 1), bias="all").double().requires_grad_(False)
    s = KKTSet.from_samples(model, torch.randn(4, 5), torch.tensor([1, -1, 1, -1]), torch.ones(4))
    nu = direction(5)
    budgets = s.budgets(nu)
    for i in range(4):
        for way, budget in ((1, budgets.alpha[i]), (-1, budgets.beta[i])):
            t = torch.linspace(0, 20, 40001).double()[1:]
            pattern = compute_switches((model,), s.x[i] + way * t[:, None] * nu).pattern
            same = (pattern == s.switches.pattern[i]).all(1)
            first = float(t[~same][0]) if (~same).any() else float("inf")
            assert (
                first == pytest.approx(float(budget), abs=6e-4) or min(first, float(budget)) > 19.9
            )


@given(
    st.integers(0, 10**6), st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.sampled_from([2, 3, 4])
)
@settings(max_examples=30, deadline=None)
def test_split_then_merge_is_the_identity(seed, a, b, depth):
    s = kkt_set(relu_point, {"depth": depth, "seed": seed % 7})
    i, nu = seed % len(s), direction(12, seed)
    budgets = s.budgets(nu)
    after = s.split(
        i, nu, a * min(float(budgets.alpha[i]), 9.0), b * min(float(budgets.beta[i]), 9.0)
    )
    back = after.merge(i, i + 1)
    assert torch.allclose(back.x, s.x, atol=1e-12)
    assert torch.allclose(back.lam, s.lam, rtol=1e-12)
    assert torch.equal(back.y, s.y)
    assert back.is_full_kkt_set


def refused(hypothesis: str, call, *words: str) -> None:
    with pytest.raises(HypothesisError) as caught:
        call()
    assert caught.value.hypothesis == hypothesis
    assert caught.value.exit_code == InputError.exit_code
    for word in words:
        assert word in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_failing_hypotheses_are_refused_by_name():
    s = kkt_set(relu_point, {"groups": 4, "dim": 16})
    nu = direction(16)
    refused("label", lambda: s.merge(0, 3), "labels are equal", "samples 0 and 3")
    refused("label", lambda: s.merge(0, 0), "Only two different samples")
    refused("pattern", lambda: s.merge(0, 6), "2 neurons", "layers.0[0]", "layers.0[2]")
    refused("direction", lambda: s.split(0, torch.zeros(16), 0.1), "positive finite length")
    refused("budget", lambda: s.split(0, nu, 0.0), "positive finite")
    refused("budget", lambda: s.split(0, nu, 1e9), "layers.0[")
    refused("budget", lambda: s.far_set(-1.0))
    gradient = s.gradients[0, 0]
    from residuum.theory.directions import project_onto_margin

    refused(
        "direction",
        lambda: project_onto_margin(gradient, s.gradients[0]),
        "must not be a combination of the gradients",
    )
    point = relu_point()
    zero = KKTSet.from_samples(
        point.model, point.x, point.y, point.lam * torch.tensor([0, 1, 1, -1, 1, 1])
    )
    refused("multiplier", lambda: zero.merge(0, 1), "sample 0")
    refused("multiplier", lambda: zero.split(3, direction(12), 0.1), "sample 3")
    assert not zero.is_stationary_set  # a negative multiplier


def test_merging_across_patterns_would_not_be_stationary():
    """The control for the refusal: the residual of the forbidden merge, with its best multiplier."""
    s = kkt_set(relu_point, {"groups": 4, "dim": 16})
    keep = [k for k in range(len(s)) if k not in (0, 6)]
    x = (s.lam[0] * s.x[0] + s.lam[6] * s.x[6]) / (s.lam[0] + s.lam[6])
    merged = KKTSet.from_samples(
        s.models[0], torch.cat([s.x[keep], x[None]]), torch.cat([s.y[keep], s.y[:1]])
    )
    assert merged.residual > 1e-2


def test_a_kink_is_named_and_a_direction_along_it_is_free():
    point = relu_point(width=2)
    s = KKTSet.from_samples(point.model, point.x, point.y, point.lam)
    model = s.models[0]
    w, b = model.linears[0].weight[2], model.linears[0].bias[2]
    x = s.x.clone()
    x[0] -= (x[0] @ w + b) / w.square().sum() * w  # onto the hyperplane of neuron 2
    on_kink = KKTSet.from_samples(model, x, s.y, s.lam)
    nu = direction(12)
    budgets = on_kink.budgets(nu)
    assert budgets.alpha[0] == budgets.beta[0] == 0
    assert budgets.kinks[0].sum() == 2  # neurons 2 and 3 share their hyperplane
    refused(
        "kink",
        lambda: on_kink.split(0, nu, 1e-3),
        "at sample 0, the inputs of 2 neurons are zero",
        "layers.0[2], layers.0[3]",
    )
    flat = nu - w * (nu @ w) / w.square().sum()
    assert on_kink.budgets(flat / flat.norm()).least[0] > 0.01


def test_a_full_rank_first_layer_has_no_far_set():
    torch.manual_seed(0)
    s = KKTSet.from_samples(MLP((3, 20, 1)), torch.randn(4, 3), torch.tensor([1, -1, 1, -1]))
    refused("subspace", lambda: s.far_set(1.0), "full rank 3")


def test_samples_of_multiplier_zero_are_left_out_of_a_far_set():
    point = relu_point()
    model, extra = point.model, 1.2 * point.x[:1]
    x, y = torch.cat([point.x, extra]), torch.cat([point.y, point.y[:1]])
    s = KKTSet.from_samples(model, x, y, torch.cat([point.lam, torch.zeros(1)]))
    assert s.is_full_kkt_set
    far_set = s.far_set(5.0)
    assert len(far_set) == 2 * len(point.x)
    assert far_set.is_full_kkt_set
    assert far_set.distance(s) >= 5


@pytest.mark.parametrize("gradients", ["theta", "theta0", "both"])
def test_ntk_sets_merge_and_split(gradients):
    model, theta0, x, lam = ntk_point(gradients)
    start = MLP((7, 9, 2)).double()
    start.load_state_dict(theta0)
    points = {"theta": (model,), "theta0": (start,), "both": (model, start)}[gradients]
    target = {name: t - theta0[name] for name, t in model.state_dict().items()}
    s = KKTSet.from_covectors(points, target, x, x.new_zeros(len(x)), lam, "ntk")
    assert s.residual < 1e-12
    nu = direction(7)
    after = s.split_all(nu[None], 0.99 * s.budgets(nu).least.clamp(max=5))
    assert after.is_stationary_set
    assert after.residual < 1e-12
    assert after.merge(0, 1).residual < 1e-12
    beyond = s.split(0, nu, 1.5 * float(s.budgets(nu).least[0]), check=False)
    assert beyond.residual > 1e-6
    refused("multiplier", lambda: s.merge(0, 1), "proportional")


def test_regression_sets_merge_and_split():
    torch.manual_seed(1)
    model, x = MLP((6, 8, 3), bias="all").double(), torch.randn(5, 6).double()
    targets = torch.randn(5, 3).double()
    s = KKTSet.from_samples(model, x, targets, torch.randn(15), task="regression")
    nu = direction(6)
    after = s.split_all(nu[None], 0.99 * s.budgets(nu).least.clamp(max=5))
    assert after.residual == pytest.approx(s.residual, rel=1e-12)
    assert after.is_stationary_set
    assert after.margins is None
    assert after.merge(2, 3).residual == pytest.approx(s.residual, rel=1e-12)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(1, 3, 3, padding=1), nn.ReLU()
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(3 * 9, 1, bias=False)

    def forward(self, x):
        return self.head(self.pool(self.relu(self.conv(x))).flatten(1))


@pytest.mark.parametrize("build", [Pooled, lambda: ConvNet((1, 6, 6), (4, 5), 1)])
def test_convnets_split_inside_their_pooling_and_activation_patterns(build):
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(6, 1, 6, 6).double()
    s = KKTSet.from_samples(model, x, torch.tensor([1, -1] * 3), torch.rand(6) + 0.1)
    nu = s.directions("softest")
    budgets = s.budgets(nu)
    assert (budgets.least > 1e-4).all()
    after = s.split_all(nu, 0.999 * budgets.least)
    explained = [weighted_gradient(model, k.x, k.u[:, 0]) for k in (s, after)]
    for name, value in explained[0].items():
        assert torch.allclose(explained[1][name], value, atol=1e-13)
    assert (after.margins[::2] - s.margins).abs().max() < 1e-12
    back = after.merge(0, 1)
    assert torch.allclose(back.x[0], s.x[0], atol=1e-13)
    beyond = s.split(
        0, nu[0], 3 * float(budgets.alpha[0]), 0.5 * float(budgets.beta[0]), check=False
    )
    assert abs(beyond.residual - s.residual) > 1e-7
    assert {name.split("#")[0] for name, _ in s.switches.layers} <= {"relu", "pool", "activation"}


@pytest.mark.parametrize("build", [Pooled, lambda: MLP((36, 7, 9, 8, 1), bias="all")])
def test_the_slope_matrix_is_the_jacobian_of_the_switches(build):
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(1, 6, 6).double()
    naive = torch.autograd.functional.jacobian(lambda z: _values(model, z), x).flatten(1)
    assert torch.allclose(compute_slope_matrix((model,), x), naive, atol=1e-12)


def _values(model, z):
    return torch.cat([v for _, v in record_switches(model, z[None])], 1)[0]


def test_linear_networks_can_be_split_without_end_and_polynomial_ones_not_at_all():
    torch.manual_seed(0)
    x, y = torch.randn(4, 5), torch.tensor([1, -1, 1, -1])
    s = KKTSet.from_samples(MLP((5, 3, 1), activation=Linear()), x, y)
    assert torch.isinf(s.budgets(direction(5)).least).all()
    assert len(s.used().merge_all()[0]) <= 2
    cubic = MLP((5, 3, 1), activation=Polynomial((0, 0, 0, 1)))
    refused("pattern", lambda: KKTSet.from_samples(cubic, x, y), "Polynomial")
    refused(
        "pattern",
        lambda: KKTSet.from_samples(nn.Sequential(nn.Linear(5, 1), nn.Sigmoid()), x, y),
        "Sigmoid",
    )
