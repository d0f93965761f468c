"""The uniqueness certificate against naive references, at exact points, on random and on trained networks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import clarabel
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.falsifier import (
    BEYOND,
    Falsifier,
    canceling_pair,
    exact_points,
    old_bound_breaks,
    pair_bound,
    project,
    train_network,
    two_groups,
)
from papers.points import relu_point, steep_point
from residuum.attacks.stationarity.solution import build_solution, find_best_residual
from residuum.cli.main import main
from residuum.datasets import load_dataset
from residuum.errors import InputError
from residuum.networks import MLP, ConvNet, Linear
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction, Selection, Uniqueness
from residuum.report.figures import ambiguity_figure
from residuum.theory.kkt import certify
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.patterns import compute_slope_matrix, compute_switches
from residuum.theory.uniqueness import estimate_cost, uniqueness
from residuum.theory.uniqueness.polytope import InteriorPoint, Polytope, minimize_energy
from residuum.theory.uniqueness.sums import Groups, find_pinned_sums
from residuum.training import TrainingConfig, train
from tests.cases import multiclass_point, ntk_point


def naive_sum(model: nn.Module, x: Tensor, u: Tensor) -> Tensor:
    """sum_i grad <u_i, Phi(x_i)>, one sample at a time: (P,)."""
    total, theta = 0, [p.requires_grad_() for p in model.parameters()]
    for sample, covector in zip(x, u, strict=True):
        value = (model(sample[None])[0] * covector).sum()
        gradients = torch.autograd.grad(value, theta)
        total = total + torch.cat([g.flatten() for g in gradients])
    return total


def random_set(widths: tuple[int, ...], m: int, seed: int = 0, clamp: float = 9.0) -> KKTSet:
    """Random weights, candidates and multipliers: one sample per pattern, no KKT point."""
    torch.manual_seed(seed)
    model = MLP(widths).double()
    x = torch.randn(m, widths[0], dtype=torch.float64)
    y = torch.where(torch.arange(m) % 2 == 0, 1.0, -1.0).double()
    return KKTSet.from_samples(model, x.clamp(-clamp, clamp), y, torch.rand(m).double() + 0.5)


NETWORKS = {
    "two layers": lambda: random_set((6, 20, 1), 5),
    "three layers": lambda: random_set((6, 14, 11, 1), 5, 1),
    "four layers": lambda: random_set((5, 9, 9, 9, 1), 4, 2),
}
# What the certificate of equal pairs said before there were other moves, its solver stopping at 1e-3;
# without a box and with -3..3.
PAIRS = {
    "two layers": (
        [0.168, 0.3513, 0.5882, 0.2828, 0.3437],
        [0.168, 0.3513, 0.5882, 0.2828, 0.3437],
    ),
    "three layers": (
        [0.1549, 0.1303, 0.3632, 0.206, 0.0937],
        [0.1549, 0.2135, 0.3632, 0.206, 0.0937],
    ),
    "four layers": ([0.222, 0.3706, 0.5564, 0.201], [0.3929, 0.3706, 0.5564, 0.201]),
}


# The programme and its bound


def polytope(seed: int, d: int = 5, rows: int = 7) -> Polytope:
    rng = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float64)

    b = draw(1, rows, d)
    low, high = -draw(1, rows).abs() * 0.3, draw(1, rows).abs()
    lower, right = -draw(1, d).abs(), draw(1, d).abs() * 0.5
    return Polytope(b / b.norm(dim=2, keepdim=True), 2 * draw(1, d), low, high, lower, right)


def truth(p: Polytope) -> float:
    """The least |x|^2 by NNLS."""
    eye = np.eye(p.x0.shape[1])
    rows = np.concatenate([p.rows[0].numpy(), eye])
    low = torch.cat([p.low, p.lower], 1)[0].numpy() + rows @ p.x0[0].numpy()
    high = torch.cat([p.high, p.upper], 1)[0].numpy() + rows @ p.x0[0].numpy()
    x = project(np.concatenate([rows, -rows]), np.concatenate([low, -high]), np.zeros(len(eye)))
    return float(x @ x)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.floats(1e-3, 10))
def test_any_dual_vector_gives_a_lower_bound(seed: int, size: float) -> None:
    p = polytope(seed)
    nu = size * torch.randn(1, 7, generator=torch.Generator().manual_seed(seed + 1)).double()
    assert float(p.bound(nu)) <= truth(p) + 1e-9


@pytest.mark.parametrize(("d", "rows"), [(5, 7), (9, 4)])
def test_bound_and_example_meet_at_the_least_image(d: int, rows: int) -> None:
    for seed in range(12):
        p = polytope(seed, d, rows)
        minimum = minimize_energy(p)
        energy = float(p.x0.square().sum())
        assert float(minimum.bound) == pytest.approx(truth(p), abs=2e-6 * energy)
        assert float(minimum.bound) <= truth(p) + 1e-9 * energy
        assert float((p.x0 + minimum.example).square().sum()) == pytest.approx(
            truth(p), abs=2e-6 * energy
        )
        assert float(p.room(minimum.example)) > 1  # strictly inside


def test_the_best_dual_vector_is_tight_so_no_factor_may_be_lost() -> None:
    """One wall, by hand: least |x|^2 with x_1 >= 1 from (2, 0) is 1, at nu = -1."""
    rows, ends = torch.tensor([[[1.0, 0.0]]]).double(), torch.full((1, 2), torch.inf).double()
    p = Polytope(
        rows,
        torch.tensor([[2.0, 0.0]]).double(),
        torch.tensor([[-1.0]]).double(),
        torch.tensor([[torch.inf]]).double(),
        -ends,
        ends,
    )
    assert float(p.bound(torch.tensor([[-1.0]]).double())) == pytest.approx(1, abs=1e-9)
    for other in (-0.5, -2.0):
        assert float(p.bound(torch.tensor([[other]]).double())) < 0.8


def test_batches_do_not_depend_on_each_other() -> None:
    polytopes = [polytope(seed) for seed in range(4)]
    together = minimize_energy(
        Polytope(
            *(
                torch.cat([getattr(p, f.name) for p in polytopes])
                for f in dataclasses.fields(Polytope)
            )
        )
    )
    for k, p in enumerate(polytopes):
        energy = float(p.x0.square().sum())
        assert float(together.bound[k]) == pytest.approx(
            float(minimize_energy(p).bound), abs=1e-5 * energy
        )


# What is certified


@pytest.mark.parametrize("box", [None, (-3.0, 3.0)])
@pytest.mark.parametrize("name", NETWORKS)
def test_half_the_weight_of_a_group_of_one_is_the_pair_of_before(name: str, box) -> None:
    kkt = NETWORKS[name]()
    kkt = dataclasses.replace(kkt, x=kkt.x.clamp(-3, 3))
    certificate, judge = uniqueness(kkt, box=box, share=0.5), Falsifier(kkt, box)
    assert certificate.members.tolist() == [1] * len(kkt)
    old = PAIRS[name][box is not None]
    assert torch.allclose(certificate.determined_at_least, torch.tensor(old).double(), atol=2e-3)
    for i in range(len(kkt)):
        assert float(certificate.determined_at_least[i]) == pytest.approx(
            pair_bound(judge, i), abs=1e-5
        )


@pytest.mark.parametrize("share", [0.5, 0.3, 0.1, 0.02])
@pytest.mark.parametrize("name", NETWORKS)
def test_least_image_against_another_solver(name: str, share: float) -> None:
    kkt = NETWORKS[name]()
    for box in (None, (kkt.x.min() - 0.1, kkt.x.max() + 0.1)):
        certificate, judge = uniqueness(kkt, box=box, share=share), Falsifier(kkt, box)
        for i in range(len(kkt)):
            x = project(*judge.carriers(i, share), np.zeros(kkt.x.shape[1]))
            best = float(x @ x) / float(kkt.x[i] @ kkt.x[i])
            assert float(certificate.determined_at_least[i]) <= best + 1e-9
            assert float(certificate.determined_at_least[i]) == pytest.approx(best, abs=1e-5)
            assert float(certificate.determined_energy[i]) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("case", ["two layers", "point", "classes"])
def test_examples_are_sets_that_exist(case: str) -> None:
    """Written out by hand: same sum, same patterns, inside the box, the share carried."""
    if case == "point":
        kkt = relu_point(2, 3, 3, 10).set
    elif case == "classes":
        point = multiclass_point(3, 2, 9)
        kkt = KKTSet.from_samples(point.model, point.x, point.y, point.lam)
    else:
        kkt = NETWORKS[case]()
    model, u = kkt.models[0], kkt.u[:, 0]
    certificate = uniqueness(kkt, box=(kkt.x.min() - 1, kkt.x.max() + 1), share=0.2)
    assert float(certificate.change.max()) < 1e-12
    before = naive_sum(model, kkt.x, u)
    pattern = kkt.switches.pattern
    for i in range(len(kkt)):
        same = (pattern == pattern[i]).all(1) & (kkt.y == kkt.y[i])
        w, mass = 0.2 * kkt.lam[i], kkt.lam[same].sum()
        rest_mean = (kkt.lam[same] @ kkt.x[same] - w * certificate.least[i]) / (mass - w)
        images = torch.stack([certificate.least[i], rest_mean])
        assert (compute_switches([model], images).pattern == pattern[i]).all()
        assert float(images.min()) >= float(kkt.x.min()) - 1 - 1e-9
        weights = torch.stack([w, mass - w])[:, None] * kkt.covectors[i, 0]
        after = naive_sum(model, torch.cat([kkt.x[~same], images]), torch.cat([u[~same], weights]))
        assert float((after - before).detach().norm()) < 1e-9 * float(before.detach().norm())
        distance = float((certificate.least[i] - kkt.x[i]).norm())
        assert distance == pytest.approx(float(certificate.radius[i]), abs=1e-9)
        assert distance <= float(certificate.radius_most[i]) + 1e-9


def test_samples_of_one_pattern_can_exchange_what_one_alone_cannot() -> None:
    point = relu_point(2, 2, 3, 8)
    box = (point.x.min() - 0.2, point.x.max() + 0.2)
    together = uniqueness(point.set, box=box, share=0.5)
    assert together.members.tolist() == [3] * 6
    judge = Falsifier(point.set, box)
    alone = [pair_bound(judge, i) for i in range(6)]
    assert (together.determined_at_least < torch.tensor(alone).double() - 1e-3).any()


def test_less_weight_allows_more_and_a_range_allows_less() -> None:
    kkt = NETWORKS["three layers"]()
    box = (kkt.x.min() - 0.1, kkt.x.max() + 0.1)
    bounds = [uniqueness(kkt, box=box, share=t).determined_at_least for t in (0.5, 0.3, 0.1, 0.02)]
    for more, fewer in itertools.pairwise(bounds):
        assert (fewer <= more + 2e-6).all()
    assert float((bounds[0] - bounds[-1]).max()) > 0.01
    assert (uniqueness(kkt).determined_at_least <= bounds[2] + 2e-6).all()


def test_a_known_mean_moves_the_box() -> None:
    """Pixels at the end of the range only because of the mean cannot move."""
    kkt = NETWORKS["two layers"]()
    mean = 0.5 + torch.linspace(0, 1, 6).double()
    low, high = float((kkt.x[0] + mean).min()), float((kkt.x + mean).max()) + 1
    x = kkt.x.clone()
    x[0, 2] = low - mean[2]
    kkt = dataclasses.replace(kkt, x=x)
    knowledge = Knowledge(shape=(6,), value_range=(low, high), mean=mean)
    box = knowledge.box(kkt.x[0])
    certificate = uniqueness(kkt, box=box)
    assert float(certificate.high[0, 2] - certificate.low[0, 2]) < 1e-9
    assert float(certificate.least[0, 2]) == pytest.approx(low - float(mean[2]), abs=1e-9)
    assert float((certificate.high[0] - certificate.low[0]).max()) > 0.1
    without = Knowledge(shape=(6,), value_range=(low, high)).box(kkt.x[0])
    assert not torch.allclose(certificate.high, uniqueness(kkt, box=without).high)
    judge = Falsifier(kkt, box)
    assert judge.check(certificate, range(2)).worst <= BEYOND


def test_pixels_are_bounded_by_range_and_moment() -> None:
    kkt = NETWORKS["two layers"]()
    low, high, share = float(kkt.x.min()) - 0.05, float(kkt.x.max()) + 0.3, 0.4
    certificate = uniqueness(kkt, box=(low, high), share=share)
    for i in range(len(kkt)):
        most = torch.minimum(
            torch.tensor(high, dtype=torch.float64), (kkt.x[i] - (1 - share) * low) / share
        )
        least_value = torch.maximum(
            torch.tensor(low, dtype=torch.float64), (kkt.x[i] - (1 - share) * high) / share
        )
        assert torch.allclose(certificate.high[i], most, atol=1e-9)
        assert torch.allclose(certificate.low[i], least_value, atol=1e-9)
        corner = torch.maximum(most - kkt.x[i], kkt.x[i] - least_value).norm()
        assert float(certificate.radius_most[i]) == pytest.approx(float(corner), abs=1e-9)
    free = uniqueness(kkt)
    assert free.radius_most.isinf().all()
    assert free.high.isinf().all()
    assert any("no value range" in note for note in free.notes)


def test_candidates_beyond_the_range_widen_it() -> None:
    kkt = NETWORKS["two layers"]()
    certificate = uniqueness(kkt, box=(-0.5, 0.5))
    assert any("outside the value range" in note for note in certificate.notes)
    assert ((certificate.low <= kkt.x + 1e-9) & (certificate.high >= kkt.x - 1e-9)).all()
    assert (certificate.determined_at_least <= 1 + 1e-9).all()


# Which sums are fixed


def test_sums_of_independent_patterns_are_fixed() -> None:
    for point in (relu_point(2, 4, 3), relu_point(4, 2, 2)):
        pinned = find_pinned_sums(point.set, Groups.build(point.set))
        assert pinned.what.free == 0
        assert pinned.groups.all()
        groups = Groups.build(point.set)
        assert len(groups) == len(set(point.group.tolist()))
        assert torch.allclose(
            groups.total(point.lam)[groups.index[0]], point.lam[point.group == 0].sum()
        )


class Wrapped(nn.Module):
    """A network that is no chain of dense layers, so that no layer of it is analyzed on its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def test_dense_and_first_layer_agree() -> None:
    for point in (relu_point(3, 3, 2), multiclass_point(3, 2, 9)):
        fast, dense = (
            KKTSet.from_samples(model, point.x, point.y, point.lam)
            for model in (point.model, Wrapped(point.model))
        )
        fast_result, dense_result = (
            find_pinned_sums(kkt, Groups.build(kkt)) for kkt in (fast, dense)
        )
        assert dense_result.what.method == "dense"
        assert fast_result.what.method == "first layer"
        assert torch.equal(dense_result.groups, fast_result.groups)
    assert (dense_result.what.free or 0) > 0  # rivals of one class exchange, totals stay


def test_without_a_bias_mass_is_free_and_the_bound_is_that_of_the_cell() -> None:
    """(x, lam) and (s x, lam / s) give the same gradient: nothing is kept, and the search finds it."""
    point = steep_point()
    certificate = uniqueness(point.set)
    assert not certificate.pinned.any()
    assert (certificate.sums.free or 0) > 0
    assert float(certificate.determined_at_least.max()) < 1e-6
    boxed = uniqueness(point.set, box=(point.x.min() - 1, point.x.max() + 1))
    assert float(boxed.determined_energy.max()) < 0.5
    assert float(boxed.change.max()) < 1e-9


@pytest.mark.parametrize("rows", [3, 20])
def test_few_rows_and_many_are_eliminated_alike(rows: int) -> None:
    """Against the dense matrix; stiffness from none to that of a wall that has been reached."""
    generator = torch.Generator().manual_seed(rows)
    d, wide = 9, torch.full((1, 9), 50.0).double()
    matrix = torch.randn(1, rows, d, generator=generator, dtype=torch.float64)
    walls = torch.ones(1, rows).double()
    state = InteriorPoint(Polytope(matrix, wide / 50, -walls, walls, -wide, wide))
    stiff = 10 ** (12 * torch.rand(1, rows + d, generator=generator, dtype=torch.float64) - 4)
    stiff[:, 0] = stiff[:, -1] = 0.0
    assert int(state.factorize(stiff)) == 0
    dense = matrix[0].T @ torch.diag(stiff[0, :rows]) @ matrix[0] + torch.diag(1 + stiff[0, rows:])
    right = torch.randn(1, d, generator=generator, dtype=torch.float64)
    residual = dense @ state.apply_inverse(right)[0] - right[0]
    assert float(residual.norm() / right.norm()) < 1e-7
    assert state.factor.shape[-1] == min(rows, d)


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, every programme is solved by the matrix of all pixels."""

    def factorize(state: InteriorPoint, stiff: Tensor) -> Tensor:
        k = state.rows.shape[1]
        matrix = state.rows.mT @ (stiff[:, :k, None] * state.rows)
        matrix.diagonal(dim1=1, dim2=2).add_(1 + stiff[:, k:])
        state.factor, failed = torch.linalg.cholesky_ex(matrix)
        return failed

    def inverse(state: InteriorPoint, right: Tensor) -> Tensor:
        return torch.cholesky_solve(right[..., None], state.factor)[..., 0]

    # No argument of a certificate chooses the way of solving, so the methods of the solver are replaced.
    def turn() -> None:
        monkeypatch.setattr(InteriorPoint, "factorize", factorize)
        monkeypatch.setattr(InteriorPoint, "apply_inverse", inverse)

    return turn


@pytest.mark.parametrize(
    ("architecture", "n", "steps"), [("mlp:64-20-1", 20, 300), ("mlp:64-50-1", 10, 5000)]
)
def test_few_rows_prove_as_much_as_the_dense_matrix(
    architecture: str, n: int, steps: int, dense: Callable[[], None]
) -> None:
    """A trained network, whose samples lie near walls: there an elimination by rows alone cancels."""
    split = load_dataset("digits", n, seed=1, holdout=60)
    theta = dict(train(architecture, split.train, TrainingConfig(steps=steps)).theta)
    model = Network(theta, architecture, split.train.shape).copy_module(torch.float64)
    x, y = split.train.x.double(), split.train.y
    lam = certify(model, x, y).multipliers
    heaviest = lam.argsort(descending=True)[:10]
    kkt = KKTSet.from_samples(model, x[heaviest], y[heaviest], lam[heaviest], task="binary")
    certificate = uniqueness(kkt)
    dense()
    dense_certificate = uniqueness(kkt)
    for kind in ("determined", "full"):
        for name, better in ((f"{kind}_at_least", 1), (f"{kind}_energy", -1)):
            gained = better * (getattr(certificate, name) - getattr(dense_certificate, name))
            assert float(gained.min()) > -1e-7, name


@pytest.mark.parametrize(("closeness", "box"), [(1e-10, math.inf), (1e-8, 1e-2)])
def test_few_rows_may_be_nearly_parallel(
    closeness: float, box: float, dense: Callable[[], None]
) -> None:
    """Three rows each of four directions, alike to 1e-6, with walls as near as 1e-10: none is lost."""
    generator = torch.Generator().manual_seed(1)
    b, k, d = 64, 12, 30

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    def ends(nearest: float, *size: int) -> Tensor:
        return nearest ** torch.rand(*size, generator=generator, dtype=torch.float64)

    rows = draw(b, 4, d).repeat(1, k // 4, 1) + 1e-6 * draw(b, k, d)
    rows = rows / rows.norm(dim=2, keepdim=True)
    walls = [ends(closeness, b, k), ends(closeness, b, k), ends(box, b, d), ends(box, b, d)]
    polytope_given = Polytope(rows, draw(b, d), -walls[0], walls[1], -walls[2], walls[3])
    minimum = minimize_energy(polytope_given)
    dense()
    lost = (minimize_energy(polytope_given).bound - minimum.bound) / polytope_given.x0.square().sum(
        1
    )
    assert float(lost.max()) < 1e-5


def dependent_patterns() -> KKTSet:
    """Patterns a, b, ab and neither: their gradients are dependent, so weight moves between them."""
    torch.manual_seed(0)
    model = MLP((4, 3, 1)).double()
    with torch.no_grad():
        model.linears[0].weight.copy_(
            torch.tensor([[2.0, 0, 0, 0.1], [0, 2.0, 0, 0.1], [0, 0, 1.0, 0.1]])
        )
        model.linears[0].bias.copy_(torch.tensor([0.1, 0.1, 5.0]))
        model.linears[1].weight.copy_(torch.tensor([[1.0, 1.5, 1.0]]))
    signs = torch.tensor([[1.0, -1], [-1, 1], [1, 1], [-1, -1]]).double()
    x = torch.cat([signs, 0.5 + torch.rand(4, 2).double()], 1)
    kkt = KKTSet.from_samples(
        model, x, torch.tensor([1.0, 1, 1, -1]).double(), torch.ones(4).double()
    )
    ones = torch.ones(4).double()
    return dataclasses.replace(kkt, y=ones, covectors=ones.view(4, 1, 1))


def test_moves_across_patterns_are_found_where_the_system_allows_them() -> None:
    kkt = dependent_patterns()
    certificate = uniqueness(kkt, box=(-2.0, 2.0), share=0.5)
    assert not certificate.pinned.any()
    assert certificate.sums.free == 5  # one dependence, times mass and moment
    assert any(
        "may exchange parts with other activation patterns" in note for note in certificate.notes
    )
    judge = Falsifier(kkt, (torch.tensor(-2.0), torch.tensor(2.0)))
    alone = [project(*judge.carriers(i, 0.5), np.zeros(4)) for i in range(4)]
    shares = [float(z @ z / (judge.x[i] @ judge.x[i])) for i, z in enumerate(alone)]
    assert (
        min(float(e) - s for e, s in zip(certificate.determined_energy, shares, strict=True))
        < -1e-3
    )
    assert float(certificate.change.max()) < 1e-9
    assert (certificate.determined_at_least <= certificate.determined_energy + 1e-9).all()
    assert judge.check(certificate).worst <= BEYOND


def test_linear_networks_determine_only_the_sums() -> None:
    torch.manual_seed(0)
    model = MLP((5, 4, 1), activation=Linear()).double()
    x, y = torch.randn(6, 5).double(), torch.tensor([1.0, -1] * 3).double()
    kkt = KKTSet.from_samples(model, x, y, torch.rand(6).double() + 0.5)
    certificate = uniqueness(kkt)
    assert certificate.sums.patterns == 2  # by label
    assert float(certificate.determined_at_least.max()) == 0
    assert float(certificate.determined_energy.max()) < 1e-9


def test_multipliers_without_a_sign_leave_the_cell_alone() -> None:
    model, theta0, x, lam = ntk_point("both")
    two_outputs = MLP((7, 9, 2)).double()
    two_outputs.load_state_dict(theta0)
    target = {n: t - theta0[n] for n, t in model.state_dict().items()}
    kkt = KKTSet.from_covectors((model, two_outputs), target, x, x.new_zeros(len(x)), lam, "ntk")
    wide, narrow = (uniqueness(kkt, share=t) for t in (0.5, 0.02))
    assert not wide.pinned.any()
    assert torch.allclose(wide.determined_at_least, narrow.determined_at_least, atol=1e-5)
    assert (wide.determined_at_least <= wide.determined_energy + 1e-9).all()
    assert float(wide.change.max()) < 1e-10
    assert wide.to_json()["per_sample"][0]["full_at_least"] is None


# Kinks, margins, several classes


def test_samples_on_a_kink_are_named_and_bounded() -> None:
    kkt = NETWORKS["two layers"]()
    model = kkt.models[0]
    with torch.no_grad():
        model.linears[0].weight[:3] = torch.eye(3, 6)
        model.linears[0].bias[:3] = 0
    x = kkt.x.clone()
    x[0, :3] = 0
    kkt = KKTSet.from_samples(model, x, kkt.y, kkt.lam)
    certificate = uniqueness(kkt)
    assert certificate.kinks.tolist() == [3, 0, 0, 0, 0]
    assert any("lie on an activation boundary" in note for note in certificate.notes)
    # Both sides of each of these switches are bounded by zero: those pixels stay, whatever the rest does.
    judge = Falsifier(kkt, None)
    a, b = judge.carriers(0, 0.1)
    z = project(a, b, np.zeros(6))
    assert np.abs(z[:3]).max() < 1e-9
    best = float(z @ z) / float(x[0] @ x[0])
    assert best - 1e-5 <= float(certificate.determined_at_least[0]) <= best + 1e-9


def test_full_sets_keep_more_and_their_bound_holds() -> None:
    point = relu_point(2, 3, 3, 10)
    certificate = uniqueness(point.set, share=0.3)
    assert (certificate.full_at_least > certificate.determined_at_least + 0.1).all()
    judge = Falsifier(point.set, None)
    for i in range(3):  # on the margin: the walls of the carriers, and y Phi >= p for both images
        a, b = judge.carriers(i, 0.3)
        grad = float(point.y[i]) * slope_of_output(point.model, point.x[i]).numpy()
        z = project(
            np.concatenate([a, grad[None], -grad[None]]),
            np.concatenate([b, [grad @ judge.x[i]], [-grad @ judge.x[i]]]),
            0 * grad,
        )
        best = float(z @ z) / float(judge.x[i] @ judge.x[i])
        assert best - 1e-5 <= float(certificate.full_at_least[i]) <= best + 1e-9
        assert float(certificate.full_energy[i]) >= best - 1e-9


def slope_of_output(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x[None]).sum(), x)[0]


def test_margin_slopes_are_those_of_the_margins() -> None:
    point = multiclass_point(4, 2, 9)
    kkt = KKTSet.from_samples(point.model, point.x, point.y, point.lam)
    assert kkt.margins is not None
    step = 1e-6 * torch.randn(kkt.x.shape, generator=torch.Generator().manual_seed(0)).double()
    moved = dataclasses.replace(kkt, x=kkt.x + step)
    assert moved.margins is not None
    change = (kkt.margin_slopes * step[:, None]).sum(2)
    torch.testing.assert_close(moved.margins - kkt.margins, change, rtol=1e-6, atol=1e-12)


def test_rivals_that_differ_bound_the_totals_and_move_one_candidate() -> None:
    point = multiclass_point(3, 2, 9)
    kkt = KKTSet.from_samples(point.model, point.x, point.y, point.lam)
    u = kkt.u.clone()
    shift = torch.tensor([0.0, 0.2, -0.2]).double() * kkt.lam[0]
    u[0, 0] += shift  # label 0: multipliers of the two rivals now differ from those of sample 1
    kkt = KKTSet.from_covectors(kkt.models, kkt.target, kkt.x, kkt.y, u, "multiclass")
    certificate = uniqueness(kkt, share=0.3)
    assert certificate.members[0] == 2
    assert float(certificate.change.max()) < 1e-12
    assert (certificate.determined_at_least <= certificate.determined_energy + 1e-9).all()
    judge = Falsifier(kkt, None)
    assert judge.members(0).tolist() == [0]
    assert judge.check(certificate).worst <= BEYOND


def test_convnets_have_certificates_too() -> None:
    torch.manual_seed(3)
    model = ConvNet((1, 4, 4), (8,), 1).double()
    x, y = torch.randn(3, 1, 4, 4).double(), torch.tensor([1.0, -1.0, 1.0]).double()
    kkt = KKTSet.from_samples(model, x, y, torch.ones(3).double())
    certificate = uniqueness(kkt)
    assert certificate.pinned.all()
    assert float(certificate.change.max()) < 1e-12
    assert torch.allclose(certificate.determined_at_least, certificate.determined_energy, atol=1e-4)
    for i in range(3):
        slope, value = compute_slope_matrix([model], x[i]).numpy(), kkt.switches.values[i].numpy()
        side = np.where(value > 0, 1.0, -1.0)
        a, b = side[:, None] * slope, side * (slope @ x[i].flatten().numpy() - value)
        size = np.linalg.norm(a, axis=1)
        a, b = a[size > 0] / size[size > 0, None], b[size > 0] / size[size > 0]
        high = a @ x[i].flatten().numpy() + 9 * (a @ x[i].flatten().numpy() - b)
        z = project(np.concatenate([a, -a]), np.concatenate([b, -high]), np.zeros(16))
        best = float(z @ z) / float(x[i].square().sum())
        assert float(certificate.determined_at_least[i]) == pytest.approx(best, abs=1e-5)


# The falsifier


@pytest.mark.parametrize("number", [0, 1, 2, 20])
def test_nothing_inside_the_class_breaks_a_claim(number: int) -> None:
    _, kkt, boxes = list(exact_points())[number]
    for box in boxes.values():
        certificate = uniqueness(kkt, box=box, share=0.1)
        outcome = Falsifier(kkt, box).check(certificate, range(2))
        assert outcome.tried > 50
        assert outcome.refused <= 0.05 * outcome.tried
        assert outcome.worst <= BEYOND
        assert max(outcome.gaps) < 1e-4


def test_nothing_breaks_a_claim_about_a_trained_network() -> None:
    kkt, boxes = train_network(2, samples=12, steps=300)
    for box in boxes.values():
        for share in (0.3, 0.1):
            certificate = uniqueness(kkt, box=box, share=share, samples=2)
            outcome = Falsifier(kkt, box).check(certificate)
            assert outcome.worst <= BEYOND
            assert max(outcome.gaps) < 0.05


def test_the_pair_bound_put_back_is_caught_on_every_exact_point() -> None:
    for name, kkt, boxes in exact_points():
        if name == "relu":
            assert old_bound_breaks(kkt, boxes["box"])


def test_a_claim_that_says_a_little_too_much_is_caught() -> None:
    _, kkt, boxes = next(exact_points())
    certificate = uniqueness(kkt, box=boxes["mean"])
    judge = Falsifier(kkt, boxes["mean"])
    for change in (
        {"determined_at_least": certificate.determined_at_least + 1e-4},
        {"radius_most": 0.5 * certificate.radius_most},
        {"high": certificate.high - 0.05 * (certificate.high - certificate.low)},
        {"full_at_least": certificate.full_at_least + 10},
    ):
        assert judge.check(certificate.replace(**change), range(2)).worst > BEYOND, list(change)


def test_new_patterns_and_opposite_labels_lie_outside_the_class_and_break_the_bound() -> None:
    """The limit of the claim: 0.0084 of its energy where the class keeps 0.0248, residual unchanged."""
    point = relu_point(2, 4, 3, 12, seed=7)
    judge, certificate = Falsifier(point.set, None), uniqueness(point.set)
    outside = two_groups(judge, 0.1)
    assert outside is not None
    outside_set, i, other = outside
    assert not judge.in_class(other)
    assert judge.same_sum(other)
    assert (other.lam > 0).all()
    assert outside_set < 0.01 < 0.02 < float(certificate.determined_at_least[i])
    assert judge.margins(other.x, other.labels).min() < 0.99  # stationary, not full KKT
    alone = relu_point(2, 4, 1, 12).set
    box = (alone.x.min(), alone.x.max())
    judge, certificate = Falsifier(alone, box), uniqueness(alone, box=box, share=0.9)
    outside_set, pair = canceling_pair(judge, 0)
    assert judge.same_sum(pair)
    assert not judge.in_class(pair)
    assert pair.lam[1] == float(alone.lam[0])  # all of the weight, anywhere in the cell
    assert outside_set < 0.5 * float(certificate.determined_at_least[0])


# Records, costs, attacks, command line


def test_limits_idle_candidates_and_refusals() -> None:
    kkt = NETWORKS["two layers"]()
    kkt.lam[1] = 0
    certificate = uniqueness(kkt, samples=2)
    assert certificate.index.tolist() == [0, 2]
    assert any("without a positive multiplier" in note for note in certificate.notes)
    seen: list[tuple[int, int]] = []
    uniqueness(kkt, watch=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 4)
    with pytest.raises(InputError, match="multiplier"):
        uniqueness(dataclasses.replace(kkt, lam=0 * kkt.lam))
    for share in (0, 1, -0.1):
        with pytest.raises(InputError, match="share"):
            uniqueness(kkt, share=share)
    with pytest.raises(InputError, match="the network is piecewise linear"):
        KKTSet.from_samples(
            nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1)), kkt.x, kkt.y
        )


def test_time_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    from residuum.theory.uniqueness import certificate

    # One candidate at a time: all candidates of a network of this size fit into one batch.
    monkeypatch.setitem(certificate.ENTRIES, "cpu", 1)
    late = uniqueness(NETWORKS["two layers"](), seconds=0)
    assert len(late) == 1
    assert any(note.startswith("time budget exhausted: 1 of 5") for note in late.notes)
    together = uniqueness(NETWORKS["two layers"]())
    assert torch.allclose(late.determined_at_least, together.determined_at_least[:1], atol=1e-5)


def test_a_search_across_patterns_keeps_to_its_time_and_stays_an_example(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits, solver = [], clarabel.DefaultSolver

    def hurried(*problem: Any) -> Any:
        limits.append(problem[-1].time_limit)
        problem[-1].max_iter = 2  # as one that was stopped by the clock
        return solver(*problem)

    kkt, box = dependent_patterns(), (-2.0, 2.0)
    complete = uniqueness(kkt, box=box, share=0.5)
    monkeypatch.setattr(clarabel, "DefaultSolver", hurried)
    cut = uniqueness(kkt, box=box, share=0.5, seconds=5.0)
    assert limits
    assert all(0.1 <= limit <= 5.0 for limit in limits)
    assert torch.equal(cut.determined_at_least, complete.determined_at_least)
    assert (cut.determined_energy >= complete.determined_energy - 1e-9).all()
    assert (cut.determined_energy >= cut.determined_at_least - 1e-9).all()
    assert float(cut.change.max()) < 1e-9


def test_same_answer_twice_and_round_trip(tmp_path) -> None:
    kkt = NETWORKS["three layers"]()
    first, second = (uniqueness(kkt, samples=2, box=(-3.0, 3.0)) for _ in range(2))
    assert torch.equal(first.determined_at_least, second.determined_at_least)
    assert torch.equal(first.least, second.least)
    first.save(tmp_path / "u.safetensors")
    restored = Uniqueness.load(tmp_path / "u.safetensors")
    assert restored.to_json() == first.to_json()
    json.dumps(uniqueness(kkt).to_json(), allow_nan=False)
    assert "takes over at least 10%" in first.claim
    assert first.residual == pytest.approx(kkt.layer_residuals)


def test_a_gap_is_reported() -> None:
    kkt = steep_point().set
    certificate = uniqueness(kkt, box=(kkt.x.min() - 1, kkt.x.max() + 1))
    wide = int((certificate.determined_energy - certificate.determined_at_least > 0.05).sum())
    assert any("differ by more than 0.05" in note for note in certificate.notes) == (wide > 0)


def test_estimate_grows_with_the_work() -> None:
    small, large = random_set((20, 50, 1), 4), random_set((200, 400, 400, 1), 4)
    a, b = (estimate_cost(kkt) for kkt in (small, large))
    assert b.operations > 10 * a.operations
    assert b.seconds > a.seconds
    assert estimate_cost(large, samples=1).operations < b.operations
    assert "GFlop" in str(b)


def reconstruction(kkt: KKTSet, **settings: str) -> Reconstruction:
    """Two restarts that hold the same candidates, the second with the smaller loss."""
    x, y, lam, n = kkt.x, kkt.y, kkt.lam, len(kkt)
    chosen = Selection(
        x,
        y,
        lam,
        torch.full((n,), 2),
        torch.full((n,), 2),
        torch.linspace(1, 0.5, n),
        torch.zeros(n, 3),
        torch.arange(n),
    )
    return Reconstruction(
        "binary-kkt",
        torch.cat([x, x + 0.01]),
        torch.cat([y, y]),
        torch.cat([lam, lam]),
        torch.arange(2).repeat_interleave(n),
        torch.tensor([1]),
        torch.tensor([[2.0], [1.0]]),
        torch.zeros(2, 1, 2),
        ("layers.0", "layers.1"),
        ("finished", "finished"),
        Knowledge(value_range=(-4.0, 4.0)),
        {"attack": "binary-kkt", **settings},
        chosen,
    )


def test_a_solution_is_the_selection_or_the_best_restart() -> None:
    kkt = NETWORKS["two layers"]()
    model, rec = kkt.models[0], reconstruction(kkt)
    selected, best = build_solution(model, rec), build_solution(model, rec, "best")
    assert torch.equal(selected.x, kkt.x)
    assert selected.kkt.residual == pytest.approx(kkt.residual)
    order = kkt.lam.argsort(descending=True)
    assert torch.equal(best.index, 5 + order)
    assert torch.equal(best.x, (kkt.x + 0.01)[order])
    other = find_best_residual(model, [rec])
    assert other == pytest.approx(best.kkt.layer_residuals)
    with pytest.raises(InputError, match="No candidates"):
        build_solution(model, rec, "all")
    diverged = dataclasses.replace(rec, status=("diverged",) * 2, selection=None)
    with pytest.raises(InputError, match="finite candidate whose multiplier"):
        build_solution(model, diverged)


def test_tied_multipliers_are_refused_and_negative_ones_left_out() -> None:
    kkt = NETWORKS["two layers"]()
    rec = reconstruction(kkt, attack="weight-decay")
    knowledge = dataclasses.replace(
        rec.knowledge, weight_decay=0.1, sample_count=5, loss="logistic"
    )
    with pytest.raises(InputError, match="that are fixed; this attack computes"):
        build_solution(kkt.models[0], dataclasses.replace(rec, knowledge=knowledge))
    rec = reconstruction(kkt)
    lam = rec.lam.clone()
    lam[2] = -1
    chosen = build_solution(kkt.models[0], dataclasses.replace(rec, lam=lam)).kkt
    assert float(chosen.lam[2]) == 0
    assert uniqueness(chosen).index.tolist() == [0, 1, 3, 4]


def test_rivals_of_an_attack_are_those_of_its_objective() -> None:
    point = multiclass_point(3, 2, 9)
    lam = torch.zeros(len(point.x), 3, dtype=torch.float64)
    for i, label in enumerate(point.y.tolist()):
        lam[i, [c for c in range(3) if c != label]] = point.lam[2 * i : 2 * i + 2]
    reconstruction_part = Reconstruction(
        "multiclass-kkt",
        point.x,
        point.y,
        lam,
        torch.zeros(len(lam)).long(),
        torch.tensor([1]),
        torch.tensor([[1.0]]),
        torch.zeros(1, 1, 2),
        ("layers.0", "layers.1"),
        ("finished",),
        Knowledge(),
        {"objective": "multiclass-kkt"},
    )
    chosen = build_solution(point.model, reconstruction_part, "best")
    assert chosen.kkt.residual < 1e-12
    assert torch.allclose(chosen.kkt.lam, lam.sum(1)[chosen.index])
    assert uniqueness(chosen.kkt).task == "multiclass"


def test_figure_of_images_and_of_vectors() -> None:
    kkt = random_set((16, 12, 1), 3)
    images = dataclasses.replace(kkt, x=kkt.x.reshape(3, 1, 4, 4))
    certificate = uniqueness(images)
    png = b"\x89PNG"
    assert ambiguity_figure(images.x, certificate, agreement=["2/2"] * 3)[:4] == png
    assert ambiguity_figure(kkt.x, uniqueness(kkt, box=(-4.0, 4.0)))[:4] == png


def test_certify_a_run(tmp_path, capsys) -> None:
    def run(*arguments):
        code = main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    kkt = NETWORKS["two layers"]()
    save_file(dict(kkt.models[0].state_dict()), tmp_path / "m.safetensors")
    (tmp_path / "run").mkdir()
    reconstruction(kkt).save(tmp_path / "run" / "reconstruction.safetensors")
    arguments = ["certify", tmp_path / "m.safetensors", "--reconstruction", tmp_path / "run"]
    out = tmp_path / "out"
    code, text, _ = run(*arguments, "--out", out, "--json")
    assert code == 0
    summary = json.loads(text)
    assert summary["certified"] == 5
    assert summary["share"] == 0.1
    assert summary["per_sample"][0]["support"] == 2
    assert summary["sums"]["pinned"] == 5
    assert summary["best_residual"].keys() == summary["residual"].keys()
    assert json.loads((out / "uniqueness.json").read_text()) == summary
    assert Uniqueness.load(out / "uniqueness.safetensors").samples == 5
    assert (out / "ambiguity.png").is_file()
    code, text, _ = run(*arguments, "--samples", 2, "--candidates", "best", "--share", "0.3")
    assert code == 0
    assert text.startswith("expected cost of the certificate: 2 candidates")
    assert "others keep at least ┃ least found ┃ distance at most" in text  # one line at 80 columns
    words = " ".join(text.split())
    assert "takes over at least 30% of the multiplier of this sample" in words
    assert "keeps at least this much of its energy" in words
    assert "proved: in every other training set with these patterns and labels" in words
    assert "residual by layer of this set: layers.0" in words
    assert "not covered, and may keep less: samples with new patterns" in words
    code, _, error = run(*arguments, "--data", "train.npz")
    assert code == 2
    assert "two different certificates" in error
    assert math.isfinite(summary["per_sample"][0]["radius_most"])


def test_samples_that_no_neuron_hears_pin_nothing_and_stop_nothing() -> None:
    model = MLP((3, 4, 1)).double()
    with torch.no_grad():
        model.linears[0].weight.fill_(-1.0)
        model.linears[0].bias.fill_(-1.0)
    x, lam = torch.rand(2, 3, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    kkt = KKTSet.from_samples(model, x, torch.tensor([1.0, -1.0], dtype=torch.float64), lam)
    pinned = find_pinned_sums(kkt, Groups.build(kkt))
    assert not bool(pinned.groups.any())
    assert not bool(uniqueness(kkt, box=(0.0, 1.0)).determined_at_least.isnan().any())
