"""The certificate on exact points, against its naive reference, and on networks that are no KKT point."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from residuum.errors import DataError, InputError
from residuum.networks import Architecture, balance
from residuum.stationarity import (
    Rows,
    flatten,
    gram,
    jacobian,
    parameters,
    project,
    residual,
    weighted_gradient,
)
from residuum.theory import certify
from residuum.theory.kkt import compute_kink_columns, find_kinks, fit_multipliers
from residuum.theory.rows import constraint_rows, normalize_labels
from tests.cases import multiclass_point, relu_point
from tests.reference import dense_nnls, row_gradients, theta_vector

BINARY = [
    (depth, groups, size, seed)
    for depth in (2, 3, 4)
    for groups, size in ((2, 3), (2, 5), (4, 4))
    for seed in (0, 1)
]


def random_network(arch: str, n: int = 9, seed: int = 0):
    torch.manual_seed(seed)
    model = Architecture.parse(arch).build().double()
    x = torch.randn(n, Architecture.parse(arch).inputs, dtype=torch.float64)
    y = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).double()
    return model, x, y


def binary_rows(y):
    return Rows(torch.arange(len(y)), y[:, None])


@pytest.mark.parametrize(("depth", "groups", "size", "seed"), BINARY)
def test_exact_binary_points_are_certified(depth, groups, size, seed):
    point = relu_point(depth, groups, size, seed=seed, width=3)
    certificate = certify(point.model, point.x, point.y)
    assert certificate.residual_clarke <= 1e-9
    assert certificate.residual_clarke <= certificate.residual_plain
    assert certificate.margin == pytest.approx(1, abs=1e-9)
    assert torch.allclose(certificate.multipliers, point.lam, rtol=1e-7, atol=0)
    assert certificate.homogeneity_order == depth
    assert certificate.delta <= 1e-9
    assert certificate.balance <= 1e-9
    assert certificate.identity <= 1e-9
    assert certificate.status == "kkt"


@pytest.mark.parametrize("classes", [3, 4, 6])
@pytest.mark.parametrize("seed", [0, 1])
def test_exact_multiclass_points_need_one_multiplier_per_tied_rival(classes, seed):
    point = multiclass_point(classes, seed=seed)
    certificate = certify(point.model, point.x, point.y)
    assert certificate.residual_clarke <= 1e-9
    assert certificate.margin == pytest.approx(1, abs=1e-9)
    assert len(certificate.multipliers) == len(point.x) * (classes - 1)
    assert torch.allclose(certificate.multipliers, point.lam, rtol=1e-7, atol=0)
    best = certify(point.model, point.x, point.y, rivals="best")
    assert 0.3 < best.residual_plain < 0.6


def test_delta_is_the_largest_slack_in_use():
    """delta = max_r lam_r (m_r - p), one row at a time, where rows lie above the margin."""
    model, x, y = random_network("mlp:5-9-1", 8, seed=1)
    certificate = certify(model, x, y)
    margins = (y * model(x)[:, 0])[certificate.rows].tolist()
    slack = [
        lam * (m - min(margins))
        for lam, m in zip(certificate.multipliers.tolist(), margins, strict=True)
    ]
    assert certificate.delta == pytest.approx(max(slack), rel=1e-12)
    assert sum(value > 0 for value in slack) >= 3  # so that no other summary of them agrees


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_wrong_label_or_a_moved_sample_shows(depth):
    point = relu_point(depth)
    wrong = point.y.clone()
    wrong[0] *= -1
    assert certify(point.model, point.x, wrong).residual_clarke > 1e-2
    moved = point.x.clone()
    moved[0] += 0.3 * torch.linalg.qr(torch.eye(12, dtype=torch.float64) + moved[0])[0][:, 5]
    assert certify(point.model, moved, point.y).residual_clarke > 1e-3


@pytest.mark.parametrize("widths", ["6-7-1", "6-7-5-1", "6-8-7-5-3", "6-5-6-5-4-2"])
def test_gram_equals_the_dense_jacobian(widths):
    for bias in ["first", "hidden", "all", "none"]:
        model, x, _ = random_network(f"mlp:{widths},bias={bias}")
        outputs = model(x).detach()
        rows = constraint_rows(
            outputs, torch.zeros(len(x), 1), "regression"
        )  # every output of every sample
        dense = row_gradients(model, x, rows)
        assert torch.allclose(jacobian(model, x, rows), dense, rtol=1e-12, atol=1e-14)
        closed, naive = gram(model, x, rows), dense @ dense.T
        assert float((closed - naive).norm() / naive.norm()) <= 1e-10
        inner = project(model, x, rows, parameters(model))
        assert torch.allclose(inner, dense @ theta_vector(model), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("arch", ["convnet:1x6x6-3-4-2", "polynomial:6-7-1,coefficients=0/1/0/1"])
def test_the_equation_holds_for_other_networks(arch):
    model, x, _ = random_network(arch)
    outputs = model(x).detach()
    rows = constraint_rows(outputs, torch.zeros(len(x), 1), "regression")
    lam = torch.randn(len(rows), dtype=torch.float64)
    dense = row_gradients(model, x, rows)
    u = rows.combine(lam, len(x))
    assert torch.allclose(flatten(weighted_gradient(model, x, u)), lam @ dense, atol=1e-10)
    r = residual(model, parameters(model), x, u)
    assert torch.allclose(flatten(r), theta_vector(model) - lam @ dense, atol=1e-10)
    assert torch.allclose(gram(model, x, rows), dense @ dense.T, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), depth=st.integers(1, 3), n=st.integers(2, 12))
def test_multipliers_equal_the_dense_nnls(seed, depth, n):
    model, x, y = random_network("mlp:5-" + "6-" * depth + "1", n, seed)
    rows = binary_rows(y)
    assume(bool(row_gradients(model, x, rows).any()))  # a dead network has no multipliers
    lam, _, _ = fit_multipliers(model, x, rows)
    _, relative = dense_nnls(model, x, rows)
    r = residual(model, parameters(model), x, rows.combine(lam, n))
    assert float(flatten(r).norm() / theta_vector(model).norm()) == pytest.approx(
        relative, rel=1e-7
    )
    assert (lam >= 0).all()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), depth=st.integers(1, 2))
def test_clarke_never_exceeds_plain(seed, depth):
    model, x, y = random_network("mlp:5-" + "8-" * depth + "1", 8, seed)
    certificate = certify(model, x, y, kink_tolerance=0.2)  # many pairs count as kinks
    assert certificate.residual_clarke <= certificate.residual_plain
    assert certificate.kinks > 0


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_without_time_no_gate_is_freed_and_the_bound_is_called_one(seconds):
    model, x, y = random_network("mlp:5-8-1", 8, 3)
    short = certify(model, x, y, kink_tolerance=0.2, seconds=seconds)
    with_time = certify(model, x, y, kink_tolerance=0.2)
    assert short.kinks == with_time.kinks > short.kinks_freed == 0
    assert short.residual_clarke == short.residual_plain == with_time.residual_plain
    assert short.residual_plain > with_time.residual_clarke
    assert any("upper bound" in note for note in short.notes)


def test_clarke_finds_an_exact_point_that_the_plain_residual_misses():
    """One neuron, sample 1 exactly on its kink with half a gate.

    a = (x, 1); w = v (lam_0 a_0 - g lam_1 a_1), w . a_1 = 0, v = lam_0 w . a_0, margin of a_0 one.
    """
    a = torch.tensor([[1.0, 0.5, 1.0], [0.2, -0.4, 1.0]], dtype=torch.float64)
    gate, inner = 0.5, a[0] @ a[1]
    s = a[0] @ a[0] - inner**2 / (a[1] @ a[1])
    lam0 = s**-0.5
    lam1 = lam0 * inner / (gate * (a[1] @ a[1]))
    v = (lam0 * s) ** -0.5
    w = v * (lam0 * a[0] - gate * lam1 * a[1])
    w -= 1e-14 * a[1]  # far within the tolerance: rounding must not decide whether the gate is open
    model = Architecture.parse("mlp:2-1-1").build().double()
    with torch.no_grad():
        model.linears[0].weight.copy_(w[None, :2])
        model.linears[0].bias.copy_(w[2:])
        model.linears[1].weight.fill_(v)
    certificate = certify(model, a[:, :2], torch.tensor([1, -1]), kink_tolerance=1e-12)
    assert certificate.kinks == 1
    assert certificate.residual_plain > 0.05
    assert certificate.residual_clarke <= 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_the_clarke_programme_equals_nnls_over_all_ways_to_set_the_gates(seed):
    """lam_r (g_r + sum_j t_j e_rj) with t in [0, 1]^k is a cone over the corners of that cube.

    So the naive reference has one column per row and subset of its kinks. Without mu <= lam the columns
    are g_r and e_rj, each with a multiplier of its own, and the optimum lies strictly lower.
    """
    model, x, y = random_network("mlp:4-5-1", 6, seed)
    rows, trace = binary_rows(y), model.trace(x)
    pairs = find_kinks(model, trace, rows, 0, tolerance=0.25)
    (w, b), v = (p.detach() for p in model.linears[0].parameters()), model.linears[1].weight[0]
    corners, distances = [], []
    for i in range(len(x)):
        kinks = set(pairs.neuron[pairs.row == i].tolist())
        sure = {j for j in range(5) if trace.pre[0][i, j] > 0} - kinks
        for opened in itertools.product((False, True), repeat=len(kinks)):
            chosen = sure | {j for j, yes in zip(kinks, opened, strict=True) if yes}
            corners.append(gated_gradient(w, b, v, x[i], y[i], chosen))
        closed = gated_gradient(w, b, v, x[i], y[i], sure)
        added = [gated_gradient(w, b, v, x[i], y[i], sure | {j}) - closed for j in kinks]
        distances += [closed, *added]
    theta = theta_vector(model).numpy()
    naive, lower = (nnls(torch.stack(c).T.numpy(), theta)[1] for c in (corners, distances))
    certificate = certify(model, x, y, kink_tolerance=0.25)
    assert certificate.kinks == certificate.kinks_freed == len(pairs) > 4
    assert certificate.residual_clarke * certificate.theta_norm == pytest.approx(naive, rel=1e-6)
    assert lower < 0.999 * naive
    assert naive < 0.999 * certificate.eps


def gated_gradient(w, b, v, x, y, opened):
    """Gradient of y v . (gate (w x + b)) in (w, b, v), gates given, the activations' values true."""
    gate = torch.tensor([float(j in opened) for j in range(len(w))]).double()
    signal = y * v.detach() * gate
    gradients = torch.outer(signal, x), signal, y * torch.relu(w @ x + b)
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("layer", [0, 1])
def test_opened_gates_equal_a_naive_gradient(layer):
    """Columns of the Clarke programme against autograd with the gates written in by hand."""
    model, x, y = random_network("mlp:5-7-6-1,bias=hidden", 6)
    rows, trace = binary_rows(y), model.trace(x)
    pairs = find_kinks(model, trace, rows, layer, tolerance=0.1)
    assert 0 < len(pairs) < 42
    index, signals = compute_kink_columns(model, trace, rows, pairs)
    weights = torch.cat([torch.full((6,), 2.0), torch.rand(len(pairs))]).double()
    opened = torch.zeros(6, model.linears[layer].out_features, dtype=torch.float64)
    opened[pairs.row, pairs.neuron] = weights[6:] / 2

    total = 0
    h = x
    for i, linear in enumerate(model.linears):
        z = linear(h)
        gates = (z > 0).double()
        if i == layer:
            gates[pairs.row, pairs.neuron] = opened[pairs.row, pairs.neuron]
        h = (torch.relu(z) - gates * z).detach() + gates * z
        total = (2 * y * z[:, 0]).sum()
    naive = torch.autograd.grad(total, list(model.parameters()))
    ours = []
    for i, signal in enumerate(signals):
        weighted = weights[:, None] * signal
        ours.append(weighted.T @ trace.inputs[i][index])
        if model.linears[i].bias is not None:
            ours.append(weighted.sum(0))
    for a, b in zip(ours, naive, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_regression_multipliers_are_free():
    torch.manual_seed(0)
    model, x, _ = random_network("mlp:5-6-2", 4)
    rows = constraint_rows(model(x).detach(), torch.zeros(4, 2), "regression")
    dense = row_gradients(model, x, rows)
    theta = theta_vector(model)
    best = theta - dense.T @ torch.linalg.lstsq(dense.T, theta).solution
    certificate = certify(model, x, torch.zeros(4, 2), task="regression")
    assert certificate.residual_plain == pytest.approx(float(best.norm() / theta.norm()), rel=1e-9)
    assert certificate.margin is None
    assert (certificate.multipliers < 0).any()


def test_many_kinks_are_freed_up_to_the_limit_and_said_so():
    model, x, y = random_network("mlp:5-20-1", 12, seed=3)
    everything = certify(model, x, y, kink_tolerance=0.3)
    limited = certify(model, x, y, kink_tolerance=0.3, kink_limit=8)
    assert limited.kinks == everything.kinks > 8 >= limited.kinks_freed
    assert everything.residual_clarke <= limited.residual_clarke < limited.residual_plain
    assert any("upper bound" in note for note in limited.notes)


def test_labels_zero_one_equal_minus_plus_one():
    point = relu_point()
    a = certify(point.model, point.x, point.y)
    b = certify(point.model, point.x, (point.y > 0).long())
    assert a.to_json() == b.to_json()


def test_scaling_the_network_scales_the_margin_and_leaves_the_residual():
    point = relu_point(3)
    certificate = certify(point.model, point.x, point.y)
    with torch.no_grad():
        for p in point.model.parameters():
            p.mul_(2.0)
    scaled = certify(point.model, point.x, point.y)
    assert scaled.margin == pytest.approx(8 * certificate.margin)
    assert scaled.normalized_margin == pytest.approx(certificate.normalized_margin)
    assert scaled.residual_plain < 1e-9


def test_a_rewritten_bias_breaks_the_balance():
    point = relu_point(2)
    assert balance(point.model) < 1e-12
    with torch.no_grad():
        point.model.linears[0].bias += 0.3
    assert balance(point.model) > 0.01


@pytest.mark.parametrize(
    ("y", "task", "outputs", "error"),
    [
        (torch.ones(4), "binary", 1, "two classes"),
        (torch.tensor([0, 2, 1, 1]), "binary", 1, "-1 and \\+1, or 0 and 1"),
        (torch.tensor([0, 3, 1, 1]), "multiclass", 3, "0 to 2"),
        (torch.tensor([0.5, 1.0, 1, 1]), "multiclass", 3, "class numbers"),
        (torch.zeros(4, 3), "regression", 2, "one target for each output"),
        (torch.tensor([[0], [1], [1], [0]]), "binary", 1, "vector"),
    ],
)
def test_unusable_labels_are_refused(y, task, outputs, error):
    with pytest.raises(DataError, match=error):
        normalize_labels(y, task, outputs)


def test_wrong_shapes_and_tasks_are_refused():
    point = relu_point()
    with pytest.raises(DataError, match="shape that the network takes"):
        certify(point.model, point.x[:, :5], point.y)
    with pytest.raises(InputError, match="two or more outputs"):
        certify(point.model, point.x, point.y, task="multiclass")
    with pytest.raises(InputError, match="Did you mean 'regression'"):
        certify(point.model, point.x, point.y, task="regresion")


def test_the_certificate_is_deterministic():
    model, x, y = random_network("mlp:5-9-7-1", 10)
    a, b = certify(model, x, y), certify(model, x, y)
    assert np.array_equal(a.multipliers.numpy(), b.multipliers.numpy())
    assert a.to_json() == b.to_json()
