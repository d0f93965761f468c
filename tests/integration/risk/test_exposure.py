"""Exposure: every figure against its definition, exact points, and what must not be called."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, false_discovery_control
from torch import Tensor, nn

import residuum as rs
from papers.points import relu_point
from residuum.cli.main import main
from residuum.conformal import rank_p_values
from residuum.errors import DataError, InputError
from residuum.io.modules import checkpoint_from_module
from residuum.networks import MLP, Architecture, ConvNet
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.records.exposure import COLUMNS, Exposure
from residuum.risk import canaries, gradients
from residuum.risk.canaries import compute_epsilon_bound, count_guesses, find_best_bound
from residuum.risk.case import Case, compute_covectors
from residuum.risk.fit import compute_informed_estimate
from residuum.risk.gradients import AnyGradients, ChainGradients, compute_gradients
from residuum.risk.groups import MAX_GROUPS, mean_interval
from residuum.risk.probability import score_records
from residuum.risk.row_space import RIDGE, SOFT, RowSpace
from residuum.risk.run import expose
from residuum.risk.stages import LEVEL, fit_records, locate_records
from residuum.similarity import ncc
from residuum.stationarity import Rows, weighted_gradient
from tests import reference, schemas
from tests.cases import multiclass_point
from tests.victims import tight

DOUBLE = torch.float64


class Residual(nn.Module):
    """A network of no known kind whose first layer meets the input."""

    def __init__(self, d: int, h: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(d, h), nn.Linear(h, h)
        self.last = nn.Linear(h, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.first(x.flatten(1)))
        return self.last(a + torch.relu(self.second(a)))


def random_rows(n: int, outputs: int, seed: int = 0) -> Rows:
    """Rows in no order, some records with several, one with none."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.tensor([2, 0, *range(1, n), 1])
    return Rows(index, torch.randn(len(index), outputs, generator=generator, dtype=DOUBLE))


# Gradients


@pytest.mark.parametrize("kind", ["chain", "chain, all biases", "any", "convolutions"])
@pytest.mark.parametrize("block", [gradients.BLOCK_BYTES, 4000])
def test_gradients_are_those_of_one_backward_pass_per_row(
    kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    # Gradients that fill more than one block of the real size take more than 128 MiB.
    split_blocks = gradients.split_blocks
    monkeypatch.setattr(gradients, "split_blocks", lambda n, width: split_blocks(n, width, block))
    shape: tuple[int, ...] = (1, 4, 4) if kind == "convolutions" else (7,)
    model: nn.Module = {
        "chain": MLP((7, 5, 6, 2)),
        "chain, all biases": MLP((7, 5, 2), "all"),
        "any": Residual(7, 5, 2),
        "convolutions": ConvNet((1, 4, 4), (3, 2), 2),
    }[kind].double()
    x = torch.randn(6, *shape, dtype=DOUBLE)
    rows = random_rows(len(x), 2)
    names = [name for name, _ in model.named_parameters()]
    layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))
    dense = reference.row_gradients(model, x, rows)
    computed = compute_gradients(model.requires_grad_(False), x, rows, layers)
    assert isinstance(computed, ChainGradients if kind.startswith("chain") else AnyGradients)
    lam = torch.rand(len(rows), dtype=DOUBLE)
    total = lam @ dense
    flat = torch.cat([computed.combine(lam)[name].flatten() for name in names])
    torch.testing.assert_close(computed.gram(), dense @ dense.T)
    torch.testing.assert_close(computed.squares(), dense.square().sum(1))
    torch.testing.assert_close(flat, total)
    torch.testing.assert_close(computed.project(computed.combine(lam)), dense @ total)
    per_record = torch.zeros(len(x), dense.shape[1], dtype=DOUBLE)
    per_record.index_add_(0, rows.index, lam[:, None] * dense)
    torch.testing.assert_close(computed.sizes(lam, ""), per_record.norm(dim=1))


@pytest.mark.parametrize("kind", ["chain", "any"])
def test_a_record_adds_its_column_times_itself_to_the_layer_on_the_input(kind: str) -> None:
    torch.manual_seed(1)
    model = (MLP((7, 5, 6, 2)) if kind == "chain" else Residual(7, 5, 2)).double()
    name = "layers.0.weight" if kind == "chain" else "first.weight"
    x, rows = torch.randn(6, 7, dtype=DOUBLE), random_rows(6, 2)
    lam = torch.rand(len(rows), dtype=DOUBLE)
    dense = reference.row_gradients(model, x, rows)[:, :35]  # the weight comes first
    per_record = torch.zeros(6, 35, dtype=DOUBLE).index_add_(0, rows.index, lam[:, None] * dense)
    computed = compute_gradients(model.requires_grad_(False), x, rows, (name.rpartition(".")[0],))
    columns = computed.columns(lam, name)
    torch.testing.assert_close((columns[:, :, None] * x[:, None]).flatten(1), per_record)
    torch.testing.assert_close(computed.sizes(lam, name), per_record.norm(dim=1))


# Multipliers, own part, informed estimate


@pytest.mark.parametrize("depth", [2, 3])
def test_an_exact_point_reveals_its_multipliers_and_every_record(depth: int) -> None:
    point = relu_point(depth, groups=3, size=2)
    case = case_of(point.model, point.x, point.y)
    figures = fit_records(case).figures
    torch.testing.assert_close(figures.multiplier, point.lam, rtol=1e-8, atol=1e-10)
    assert figures.misfit < 1e-7
    torch.testing.assert_close(figures.informed_ncc, torch.ones(6, dtype=DOUBLE))


def test_a_record_that_was_moved_or_relabeled_leaves_a_misfit() -> None:
    point = relu_point(2, groups=3, size=2)
    moved, other = point.x.clone(), point.y.clone()
    moved[0] += 0.3
    other[0] *= -1
    for x, y in ((moved, point.y), (point.x, other)):
        figures = fit_records(case_of(point.model, x, y)).figures
        assert figures.misfit > 1e-2
        assert figures.informed_ncc.nan_to_num().min() < 0.999


def test_several_classes_have_a_multiplier_per_tied_rival() -> None:
    point = multiclass_point()
    figures = fit_records(case_of(point.model, point.x, point.y)).figures
    sums = torch.zeros(len(point.x), dtype=DOUBLE)
    sums.index_add_(0, torch.arange(len(point.x)).repeat_interleave(2), point.lam)
    torch.testing.assert_close(figures.multiplier, sums, rtol=1e-6, atol=1e-8)
    assert figures.misfit < 1e-6


@pytest.mark.parametrize("free", [False, True])
def test_descent_without_a_gram_matrix_finds_the_exact_multipliers(free: bool) -> None:
    torch.manual_seed(2)
    model = MLP((12, 30, 1)).double().requires_grad_(False)
    x = torch.randn(15, 12, dtype=DOUBLE)
    rows = Rows(torch.arange(15), torch.ones(15, 1, dtype=DOUBLE))
    target = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    computed = compute_gradients(model, x, rows, ("layers.0", "layers.1"))
    exact = gradients.fit_multipliers(computed, target, 15, free)
    too_many = gradients.MAX_EXACT_ROWS + 1  # rows are said to be so many that descent is chosen
    descent = gradients.fit_multipliers(computed, target, too_many, free)
    assert (exact.method, descent.method) == ("exact", "descent")
    assert exact.gap < 1e-10
    assert descent.gap < 1e-3
    torch.testing.assert_close(
        descent.lam, exact.lam, rtol=1e-2, atol=1e-3 * float(exact.lam.max())
    )
    assert free == bool((exact.lam < 0).any())


def test_a_weight_update_and_an_optimizer_state_are_fitted_like_weights() -> None:
    torch.manual_seed(3)
    model = MLP((9, 20, 12, 3)).double().requires_grad_(False)
    x, y = torch.randn(8, 9, dtype=DOUBLE), torch.arange(8) % 3
    lam = torch.rand(8, dtype=DOUBLE) + 0.1
    u = lam[:, None] * compute_covectors(model(x), y, "multiclass")
    gradient = weighted_gradient(model, x, u)
    theta = {n: p.detach() for n, p in model.named_parameters()}
    start = {n: t - gradient[n] for n, t in theta.items()}
    granted = {
        "weights - start": Knowledge(theta0=start),
        "moment": Knowledge(moment={n: -g for n, g in gradient.items()}),
    }
    for name, knowledge in granted.items():
        case = case_of(model, x, y, knowledge=knowledge)
        assert case.surface.name == name
        figures = fit_records(case).figures
        torch.testing.assert_close(figures.multiplier, lam, rtol=1e-4, atol=1e-6)
        assert figures.misfit < 1e-5


def test_the_informed_estimate_is_what_is_left_after_all_others_are_taken_away() -> None:
    torch.manual_seed(4)
    x, columns = torch.randn(5, 6, dtype=DOUBLE), torch.randn(5, 4, dtype=DOUBLE)
    weight = torch.randn(4, 6, dtype=DOUBLE)
    misfit = weight - columns.T @ x
    estimate = compute_informed_estimate(x, columns, misfit)
    for i in range(5):
        sum_of_others = sum(torch.outer(columns[j], x[j]) for j in range(5) if j != i)
        naive = (weight - sum_of_others).T @ columns[i] / columns[i].square().sum()
        torch.testing.assert_close(estimate[i], naive)
    columns[2] = 0
    assert compute_informed_estimate(x, columns, misfit)[2].isnan().all()


def test_covectors_point_where_the_loss_pulls() -> None:
    outputs = torch.randn(6, 4, dtype=DOUBLE, requires_grad=True)
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    loss = nn.functional.cross_entropy(outputs, y, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, outputs)
    covectors = compute_covectors(outputs.detach(), y, "multiclass")
    torch.testing.assert_close(
        nn.functional.normalize(covectors, dim=1), nn.functional.normalize(-gradient, dim=1)
    )
    sure = torch.tensor([[900.0, 0, 0, 1]], dtype=DOUBLE)  # the gradient itself underflows
    assert compute_covectors(sure, torch.tensor([0]), "multiclass").abs().sum() == pytest.approx(2)


# Row space and dual vector


def layer_of(c: Tensor, x: Tensor) -> RowSpace:
    """The span of rows c x."""
    rows = c @ x.flatten(1)
    return RowSpace.from_rows(rows, tuple(x.shape[1:]), noise=False)


@pytest.mark.parametrize("shape", [(40,), (1, 7, 7), (3, 5, 5)])
def test_no_candidate_in_the_clean_directions_exceeds_the_reach(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(5)
    inside = torch.randn(6, *shape, generator=generator, dtype=DOUBLE)
    span = layer_of(torch.randn(30, 6, generator=generator, dtype=DOUBLE), inside)
    assert span.rank == 6
    outside = torch.randn(9, *shape, generator=generator, dtype=DOUBLE) + 0.5
    mixtures = torch.randn(4000, 6, generator=generator, dtype=DOUBLE) @ inside.flatten(1)
    best = span.layer.V[:6].double()
    mixtures = torch.cat([mixtures, (outside.flatten(1) @ best.T) @ best]).reshape(-1, *shape)
    cosines = nn.functional.cosine_similarity(
        outside.flatten(1)[:, None], mixtures.flatten(1)[None], dim=2
    )
    assert (cosines.amax(1) <= span.reach(outside) + 1e-6).all()
    torch.testing.assert_close(cosines.amax(1), span.reach(outside), rtol=1e-5, atol=1e-6)
    assert (ncc(outside, mixtures).abs().amax(1) <= span.reach_ncc(outside) + 1e-6).all()
    assert (span.reach_ncc(outside) < 0.95).all()
    torch.testing.assert_close(span.reach(inside), torch.ones(6, dtype=DOUBLE), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        span.reach_ncc(inside), torch.ones(6, dtype=DOUBLE), atol=1e-5, rtol=0
    )


def test_a_cliff_in_the_spectrum_hides_no_direction_of_weights() -> None:
    """Clusters of neurons have cliffs elsewhere: what unmixing leaves out may be recovered from one."""
    generator = torch.Generator().manual_seed(13)
    x = torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=DOUBLE)).Q[:6]
    size = torch.tensor([1, 0.5, 0.3, 0.01, 0.01, 0.01], dtype=DOUBLE)
    rows = torch.randn(60, 6, generator=generator, dtype=DOUBLE) @ (size[:, None] * x)
    rows += 5e-4 * torch.randn(60, 40, generator=generator, dtype=DOUBLE)
    assert RowSpace.from_rows(rows, (40,), noise=False).rank == 3
    assert RowSpace.from_rows(rows, (40,), noise=True).rank == 6


def test_heard_and_dual_are_their_definitions() -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(5, 1, 4, 4, generator=generator, dtype=DOUBLE)
    c = torch.randn(25, 5, generator=generator, dtype=DOUBLE) * torch.logspace(0, -3, 5).double()
    span = layer_of(c, x)
    rows = (c @ x.flatten(1)).numpy()
    U, S, Vt = np.linalg.svd(rows, full_matrices=False)
    signals = c.T.contiguous() + 0.1
    heard, dual = span.signal_share(x), span.dual(x, signals)
    for i in range(5):
        flat = x[i].flatten().numpy()
        shares = [
            (v @ flat) ** 2 / (flat @ flat) * s**2 / (s**2 + (SOFT * S[0]) ** 2)
            for v, s in zip(Vt, S, strict=True)
        ]
        assert float(heard[i]) == pytest.approx(sum(shares), abs=1e-5)
        inverse = np.diag(S / (S**2 + (RIDGE * S[0]) ** 2))
        estimate = Vt.T @ inverse @ U.T @ signals[i].numpy()
        assert float(dual[i]) == pytest.approx(abs(np.corrcoef(estimate, flat)[0, 1]), abs=1e-4)


def test_the_dual_vector_of_an_orthogonal_training_sample_is_the_sample() -> None:
    x = torch.linalg.qr(torch.randn(20, 20, dtype=DOUBLE)).Q[:8]
    x = x - x.mean(1, keepdim=True)
    c = torch.randn(40, 8, dtype=DOUBLE)
    span = layer_of(c, x)
    assert (span.dual(x, c.T.contiguous()) > 0.85).all()
    assert (span.dual(x, torch.randn(8, 40, dtype=DOUBLE)) < 0.85).any()


# Kinks


def test_kinks_call_records_by_the_rule_of_benjamini_and_hochberg(
    digits: tuple[Network, rs.Split, dict[str, Tensor]],
) -> None:
    checkpoint, split, _ = digits
    exposure = expose(checkpoint, split.train, split.holdout)
    ordered = sorted(exposure.kink_p.tolist())
    passing = [k for k in range(30) if ordered[k] <= 0.05 * (k + 1) / 30]
    called = [value <= ordered[max(passing)] for value in exposure.kink_p.tolist()]
    assert (exposure.kink_q <= 0.05).tolist() == called
    assert exposure.called == sum(called) >= 5


def test_intervals_of_a_mean_hold_it_as_often_as_they_say() -> None:
    generator = torch.Generator().manual_seed(12)
    draws = torch.rand(300, 40, generator=generator, dtype=DOUBLE) ** 2
    intervals = [mean_interval(row) for row in draws]
    assert sum(low <= 1 / 3 <= high for low, high in intervals) >= 270
    many = torch.rand(3000, generator=generator, dtype=DOUBLE)
    assert mean_interval(many) == pytest.approx(mean_interval(many[:2000]), abs=0.02)
    assert mean_interval(torch.tensor([0.25], dtype=DOUBLE)) == (0.25, 0.25)


def test_records_that_are_no_members_are_hardly_ever_called() -> None:
    generator = torch.Generator().manual_seed(9)
    calls = 0
    for _ in range(400):
        counts = torch.poisson(torch.full((260,), 0.6), generator=generator)
        p_values = rank_p_values(counts[:60], counts[60:])
        calls += bool((false_discovery_control(p_values) <= LEVEL).any())
    assert calls <= 32  # 5% of 400, and three deviations


# Canaries


def test_the_pure_bound_is_a_binomial_tail() -> None:
    for r, v, epsilon in ((20, 15, 0.5), (100, 80, 1.0), (10, 0, 0.0)):
        q = math.exp(epsilon) / (1 + math.exp(epsilon))
        tail = sum(math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(v, r + 1))
        assert canaries.compute_p_value(200, r, v, epsilon) == pytest.approx(tail)


def test_delta_adds_the_steepest_part_of_the_tail_below() -> None:
    m, r, v, epsilon, delta = 50, 30, 24, 1.0, 1e-3
    q = 1 / (1 + math.exp(-epsilon))
    steepest = max(
        (binom.cdf(v - 1, r, q) - binom.cdf(v - 1 - i, r, q)) / i for i in range(1, v + 1)
    )
    expected = binom.sf(v - 1, r, q) + 2 * m * delta * steepest
    assert canaries.compute_p_value(m, r, v, epsilon, delta) == pytest.approx(expected)
    assert canaries.compute_epsilon_bound(m, r, v, 0.95, delta) < canaries.compute_epsilon_bound(
        m, r, v, 0.95
    )


def test_the_bound_is_where_the_p_value_crosses_the_level() -> None:
    for r, v in ((40, 38), (100, 70), (200, 199)):
        epsilon = canaries.compute_epsilon_bound(r, r, v, 0.95)
        assert canaries.compute_p_value(r, r, v, epsilon) == pytest.approx(0.05, rel=1e-6)
    assert canaries.compute_epsilon_bound(40, 40, 20, 0.95) == 0


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_randomized_response_is_not_said_to_leak_more_than_it_does(epsilon: float) -> None:
    """Every canary answers truly with probability q: exactly epsilon-private, the worst case."""
    generator = torch.Generator().manual_seed(int(10 * epsilon))
    q, above, bounds = 1 / (1 + math.exp(-epsilon)), 0, []
    for _ in range(60):
        inserted = torch.rand(200, generator=generator) < 0.5
        truly = torch.rand(200, generator=generator) < q
        answer = torch.where(truly, inserted, ~inserted).double()
        answer += 1e-3 * torch.rand(200, generator=generator)
        bound = canaries.find_best_bound({"answer": answer}, inserted, 0.95, 0.0)
        bounds.append(bound.epsilon)
        above += bound.epsilon > epsilon
    assert above <= 7  # 5% of 60, and two and a half deviations
    assert epsilon == 0 or sum(bounds) / len(bounds) > epsilon / 2


def test_operating_points_and_the_area_are_counted() -> None:
    inserted = torch.arange(300) < 100
    statistic = torch.arange(300).flip(0).double()
    statistic[150] = 1000  # one of those left out beats all
    bound = canaries.find_best_bound({"s": statistic}, inserted, 0.95, 0.0)
    rates = {point.rate: (point.false, point.true_rate) for point in bound.points}
    assert rates == {0.01: (2, 1.0), 0.001: (0, 0.0)}
    assert bound.auc == pytest.approx(199 / 200)
    pairs = [(statistic[i] > statistic[j]) for i in range(100) for j in range(100, 300)]
    assert bound.auc == pytest.approx(sum(map(float, pairs)) / len(pairs))


def test_few_canaries_of_a_kind_and_uneven_coins_are_said() -> None:
    with pytest.raises(DataError, match=r"at least 10 canaries .* at least 10 canaries"):
        canaries.find_best_bound({"s": torch.rand(30)}, torch.arange(30) < 5, 0.95, 0.0)
    bound = canaries.find_best_bound({"s": torch.rand(200)}, torch.arange(200) < 150, 0.95, 0.0)
    assert "fair coins" in bound.notes[0]


# The whole


def case_of(
    model: nn.Module, x: Tensor, y: Tensor, holdout: Dataset | None = None, **more: Any
) -> Case:
    checkpoint = checkpoint_from_module(model)
    knowledge = more.pop("knowledge", Knowledge())
    return Case.create(checkpoint, Dataset(x, y), holdout, knowledge, "auto", "auto", "cpu")


@pytest.fixture(scope="module")
def digits() -> tuple[Network, rs.Split, dict[str, Tensor]]:
    split = rs.load_dataset("digits", 30, seed=5, holdout=400)
    config = rs.TrainingConfig(steps=800, seed=5)
    state = rs.train("mlp:64-60-60-1", split.train, config)
    return Network(state.theta, "mlp:64-60-60-1", (1, 8, 8)), split, state.theta0


def test_exposure_of_digits_fits_its_schema_and_its_table(
    digits: tuple[Network, rs.Split, dict[str, Tensor]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint, split, _ = digits
    exposure = rs.exposure(checkpoint, split.train, split.holdout, top=4)
    document = exposure.to_json()
    schemas.check("exposure", document)
    rows = list(csv.DictReader(io.StringIO(exposure.to_csv())))
    assert tuple(rows[0]) == COLUMNS
    assert [int(row["index"]) for row in rows] == exposure.order.tolist()
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert exposure.images.shape == exposure.informed.shape == (4, 1, 8, 8)
    assert "samples with at least 3072 values each, and yours have 64" in exposure.uncalibrated
    assert exposure.probability.isnan().all()
    assert (exposure.expected, exposure.carry_half, document["largest_probability"]) == (
        None,
        None,
        None,
    )
    assert exposure.by_group == tuple(sorted(exposure.by_group, key=lambda group: -group.score))
    assert "expected" not in " ".join(exposure.lines)
    monkeypatch.setenv("COLUMNS", "80")
    many = exposure.replace(kinks=exposure.kinks + 1000, found_ncc=exposure.reach)
    many.show()
    text = capsys.readouterr().out
    assert all(f" {count} " in text for count in many.kinks.sum(1)[many.order[:4]].tolist())
    assert all(head in text for head in ("record", "informed", "margin"))  # none is broken in two


@pytest.fixture(scope="module")
def large_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network like those on which the probability was checked, and its data."""
    folder = tmp_path_factory.mktemp("large")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(140, 3, 32, 32, generator=generator, dtype=torch.float64)
    y = torch.where(torch.arange(140) % 2 == 0, 1.0, -1.0).double()
    np.savez(folder / "train.npz", x=x[:40].numpy(), y=y[:40].numpy())
    np.savez(folder / "test.npz", x=x[40:].numpy(), y=y[40:].numpy())
    data = Dataset(x[:40], y[:40])
    config = rs.TrainingConfig(steps=100, seed=3, dtype="float32")
    state = rs.train("mlp:3072-200-1", data, config)
    rs.save_checkpoint(
        Network(state.theta, "mlp:3072-200-1", (3, 32, 32)), folder / "m.safetensors"
    )
    return folder


def test_a_probability_is_given_where_it_was_checked(
    large_images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exposure = rs.exposure(large_images / "m.safetensors", large_images / "train.npz")
    schemas.check("exposure", exposure.to_json())
    assert exposure.uncalibrated == ""
    torch.testing.assert_close(exposure.probability, torch.sigmoid(exposure.score))
    shares = exposure.probability.sort(descending=True).values
    k = exposure.carry_half
    assert float(shares[:k].sum()) >= exposure.expected / 2 > float(shares[: k - 1].sum())
    assert sum(group.expected for group in exposure.by_group) == pytest.approx(exposure.expected)
    for group in exposure.by_group:
        assert group.interval[0] <= group.probability <= group.interval[1]
    arguments = ["exposure", str(large_images / "m.safetensors")]
    arguments += ["--data", str(large_images / "train.npz")]
    largest = exposure.to_json()["largest_probability"]
    assert main([*arguments, "--fail-above", str(largest * 0.99)]) == 1
    text = capsys.readouterr().out
    assert "carry half of the exposure" in text
    assert "records are above" in text
    assert main([*arguments, "--fail-above", str(min(1.0, largest * 1.01)), "--quiet"]) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"knowledge": True}, "without known initial weights"),
        ({"rows": 39}, "40 to 100 records, and you passed 39"),
        ({"arch": "mlp:3072-200-2"}, "with one output"),
        ({"arch": "mlp:3072-200-1,activation=tanh"}, "ReLU networks"),
        ({"arch": "mlp:3072-150-1"}, "200 to 400 neurons"),
        ({"arch": "mlp:3072-200-200-200-1"}, "one or two hidden layers"),
        ({"scale": 1.0}, "mix whole samples"),
    ],
)
def test_a_probability_is_withheld_elsewhere(change: dict[str, Any], reason: str) -> None:
    generator = torch.Generator().manual_seed(4)
    arch, rows = change.get("arch", "mlp:3072-200-1"), change.get("rows", 40)
    x = torch.randn(rows, 3, 32, 32, generator=generator, dtype=torch.float64)
    y = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0).double()
    y = (y > 0).long() if arch.endswith("-2") else y
    model = Architecture.parse(arch).build().double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(0 if "bias" in name else 1e-3)
        first = next(model.parameters())
        mixture = torch.randn(len(first), rows, generator=generator, dtype=torch.float64)
        mixture = mixture @ x.flatten(1)
        first.add_(0 * mixture if change.get("scale") else mixture)
    checkpoint = Network(dict(model.state_dict()), arch, (3, 32, 32))
    knowledge = Knowledge(theta0=dict(Architecture.parse(arch).build().double().state_dict()))
    exposure = expose(
        checkpoint, Dataset(x, y), knowledge=knowledge if change.get("knowledge") else None
    )
    assert reason in exposure.uncalibrated
    assert exposure.probability.isnan().all()
    assert exposure.score.isfinite().all()


def test_records_in_another_order_have_the_same_exposure(
    digits: tuple[Network, rs.Split, dict[str, Tensor]],
) -> None:
    checkpoint, split, _ = digits
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    train = split.train
    exposure = expose(checkpoint, train, split.holdout)
    other = expose(checkpoint, train.replace(x=train.x[order], y=train.y[order]), split.holdout)
    for name in ("score", "reach", "kink_p", "dual", "margin", "informed_ncc"):
        first_values, theirs = getattr(exposure, name)[order], getattr(other, name)
        torch.testing.assert_close(theirs, first_values, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_members_stand_out_of_held_out_records(
    digits: tuple[Network, rs.Split, dict[str, Tensor]],
) -> None:
    """The same formulas for held-out records in the place of members: the negative control."""
    checkpoint, split, _ = digits
    held = split.holdout
    control = Dataset(held.x[100:], held.y[100:])
    members = expose(checkpoint, split.train, control)
    strangers = expose(checkpoint, Dataset(held.x[:30], held.y[:30]), control)
    assert members.called is not None
    assert members.called >= 5
    assert strangers.called == 0
    assert members.misfit < 0.7 * strangers.misfit
    assert float(members.score.sigmoid().sum()) > float(strangers.score.sigmoid().sum()) + 3
    assert float(members.kink_p.median()) < 0.3 < float(strangers.kink_p.median())


def test_other_networks_have_scores_and_baselines_and_say_what_they_lack() -> None:
    torch.manual_seed(10)
    split = rs.load_dataset("digits", 20, seed=1, holdout=120)
    convolutions = ConvNet((1, 8, 8), (4, 8), 1)
    exposure = rs.exposure(convolutions, split.train, split.holdout)
    assert exposure.called is None
    assert exposure.reach.isnan().all()
    assert exposure.score.isfinite().all()
    assert {note.partition(":")[0] for note in exposure.notes} >= {"no activation boundaries"}
    schemas.check("exposure", exposure.to_json())


def test_a_network_of_any_class_has_its_row_space() -> None:
    """Trained from a small start in a loop of its own; figures equal those of their definitions."""
    torch.manual_seed(11)
    model = Residual(20, 40, 1).double()
    with torch.no_grad():
        model.first.weight.mul_(1e-4)
        model.first.bias.mul_(1e-4)
    x, y = torch.randn(10, 20, dtype=DOUBLE), torch.where(torch.arange(10) % 2 == 0, 1.0, -1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.softplus(-y[:, None] * model(x)).mean().backward()
        optimizer.step()
    exposure = rs.exposure(model, Dataset(x, y))
    assert exposure.rank == 10
    assert exposure.layers == ("first",)
    assert (exposure.reach > 0.999).all()
    assert exposure.informed_ncc.nan_to_num().max() > 0.8
    rows = Rows(torch.arange(10), y.double()[:, None])
    dense = reference.row_gradients(model, x, rows)[:, : 40 * 21]
    target = torch.cat([model.first.weight.detach().flatten(), model.first.bias.detach()])
    lam, residual = reference.nnls(dense.T.numpy(), target.numpy())
    torch.testing.assert_close(exposure.multiplier, torch.from_numpy(lam), rtol=1e-6, atol=1e-9)
    assert exposure.misfit == pytest.approx(residual / float(target.norm()), rel=1e-6)


def test_a_regression_has_no_margin_and_no_groups() -> None:
    torch.manual_seed(12)
    x = torch.randn(12, 6, dtype=DOUBLE)
    exposure = rs.exposure(
        MLP((6, 20, 2)).double(), Dataset(x, torch.randn(12, 2)), task="regression"
    )
    assert exposure.margin.isnan().all()
    assert exposure.by_group == ()
    schemas.check("exposure", exposure.to_json())


def test_groups_of_another_number_and_too_many_are_refused_before_any_work(
    digits: tuple[Network, rs.Split, dict[str, Tensor]],
) -> None:
    checkpoint, split, _ = digits

    def fail(*_: object) -> None:
        pytest.fail("work was done")

    with pytest.raises(DataError, match="Each record needs the name of the group"):
        expose(checkpoint, split.train, groups=["a"] * 29, watch=fail)
    names = [str(i) for i in range(MAX_GROUPS + 1)]
    records = split.holdout.take(torch.arange(len(names)))
    with pytest.raises(DataError, match=f"{MAX_GROUPS} different groups"):
        expose(checkpoint, records, groups=names, watch=fail)


def test_candidates_of_an_attack_are_shown_with_the_records(
    digits: tuple[Network, rs.Split, dict[str, Tensor]],
) -> None:
    checkpoint, split, _ = digits
    x = split.train.x
    planted = torch.cat([-2 * x[3:4], torch.randn(2, 1, 8, 8, dtype=DOUBLE)])
    exposure = expose(checkpoint, split.train, candidates=planted, top=30)
    assert float(exposure.found_ncc[3]) == pytest.approx(1)
    assert float(exposure.found_ncc.max()) == pytest.approx(1)
    place = exposure.top.tolist().index(3)
    torch.testing.assert_close(exposure.nearest[place], 2 * x[3])  # its sign is that of the record


def test_records_are_found_again_but_for_rounding() -> None:
    x = torch.randn(6, 3, 2, dtype=DOUBLE)
    candidates = torch.cat([x[4:5].float().double(), x[1:2] + 1e-2, x[:1]])
    assert locate_records(candidates, x).tolist() == [4, -1, 0]


def test_canaries_are_treated_alike_whether_inserted_or_left_out(tmp_path: Path) -> None:
    split = rs.load_dataset("digits", 60, seed=6, holdout=100)
    inserted = torch.rand(60, generator=torch.Generator().manual_seed(1)) < 0.5
    wrong = torch.rand(60, generator=torch.Generator().manual_seed(2)) < 0.5  # labels of a coin
    y = torch.where(wrong, -split.train.y, split.train.y)
    data_inserted = Dataset(split.train.x[inserted], y[inserted])
    state = rs.train("mlp:64-60-1", data_inserted, rs.TrainingConfig(steps=400))
    checkpoint = Network(state.theta, "mlp:64-60-1")
    all_canaries = Dataset(split.train.x, y)
    result = rs.exposure(checkpoint, data_inserted, canaries=(all_canaries, inserted)).canaries
    assert result is not None
    assert (result.canaries, result.inserted) == (60, int(inserted.sum()))
    assert result.epsilon > 0.5
    assert result.right <= result.guesses <= 60
    order = torch.randperm(60, generator=torch.Generator().manual_seed(3))
    mixed = Dataset(all_canaries.x[order], all_canaries.y[order])
    repeated = rs.exposure(checkpoint, data_inserted, canaries=(mixed, inserted[order])).canaries
    assert repeated is not None
    assert repeated.epsilon == pytest.approx(result.epsilon)
    with pytest.raises(DataError, match="must be among the records"):
        rs.exposure(checkpoint, data_inserted, canaries=(all_canaries, ~inserted))
    other = torch.zeros(60, dtype=torch.bool)
    other[inserted.nonzero()[:12, 0]] = True
    with pytest.raises(DataError, match="must not be among the records"):
        rs.exposure(checkpoint, data_inserted, canaries=(all_canaries, other))


def test_an_audit_shows_the_exposure_with_its_verdict(
    digits: tuple[Network, rs.Split, dict[str, Tensor]],
) -> None:
    checkpoint, split, _ = digits
    result = rs.audit(
        checkpoint,
        data=split.train,
        holdout=split.holdout,
        effort="quick",
        steps=5,
        baselines=False,
    )
    alone = expose(checkpoint, split.train, split.holdout)
    exposure = result.exposure
    assert exposure is not None
    torch.testing.assert_close(exposure.score, alone.score)
    assert exposure.found_ncc.isfinite().all()  # with what the attack found
    page, hidden = result.html(), result.html(redact=True)
    for text in (page, hidden):
        assert "Exposure of the training samples" in text
        assert "scores are not probabilities here" in text
    without_samples = rs.audit(checkpoint, effort="quick", steps=5, baselines=False)
    assert without_samples.exposure is None
    rows = {row.what: row.reason for row in without_samples.applies}
    assert rows["exposure"] == "there are no training samples to rank"


def test_a_network_whose_records_see_each_other_is_inconclusive() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).train()

    class Together(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            self.inner.train()  # whatever eval() says
            return self.inner(x)

    x, y = torch.randn(12, 6), torch.arange(12) % 2
    with pytest.raises(rs.ResiduumError) as refused:
        rs.exposure(Together(), Dataset(x, y))
    assert refused.value.exit_code in (2, 3)


def test_the_optimizer_state_in_the_file_is_examined(tmp_path: Path) -> None:
    torch.manual_seed(14)
    x, y = torch.randn(12, 6), torch.where(torch.arange(12) % 2 == 0, 1.0, -1.0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.softplus(-y[:, None] * model(x)).mean().backward()
        optimizer.step()
    file = tmp_path / "m.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    data = Dataset(x, y)
    exposure = rs.exposure(file, data)
    assert exposure.surface == "moment"
    assert "calibrated only for final weights" in exposure.uncalibrated
    knowledge = Knowledge(moment=rs.read_moment(optimizer, model))
    torch.testing.assert_close(exposure.score, rs.exposure(model, data, knowledge=knowledge).score)
    assert exposure.misfit < 0.3  # gates as they are, and gradients of the last steps
    assert rs.exposure(file, data, surface="weights").surface == "weights"
    with pytest.raises(InputError, match="No surface"):
        rs.exposure(file, data, surface="gradient")


# The folder and the command


def test_an_interrupted_run_goes_on_after_its_finished_stages(
    digits: tuple[Network, rs.Split, dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    checkpoint, split, _ = digits
    uninterrupted = rs.exposure(checkpoint, split.train, split.holdout)
    inputs, out = (checkpoint, split.train, split.holdout), tmp_path / "e"
    multipliers, written = out / "work" / "multipliers.safetensors", []

    def interrupt(done: int, total: int, stage: str) -> None:
        if stage == "kinks":
            raise KeyboardInterrupt

    def observe(done: int, total: int, stage: str) -> None:
        if stage == "kinks":
            written.append(multipliers.stat().st_mtime_ns)

    with pytest.raises(KeyboardInterrupt):
        rs.exposure(*inputs, out=out, watch=interrupt)
    assert (out / "work" / "span.safetensors").is_file()
    assert not (out / "exposure.json").exists()
    before = multipliers.stat().st_mtime_ns
    resumed = rs.exposure(*inputs, out=out, watch=observe)
    assert written == [before], "the multipliers are not computed a second time"
    repeated = rs.exposure(*inputs, out=out, watch=lambda *_: pytest.fail("computed again"))
    assert torch.equal(resumed.score, uninterrupted.score)
    assert resumed.to_json() == repeated.to_json()
    files = {path.name for path in (tmp_path / "e").iterdir()}
    assert files == {
        ".gitignore",
        ".lock",
        "exposed.png",
        "exposure.csv",
        "exposure.json",
        "exposure.safetensors",
        "histogram.png",
    }
    with pytest.raises(InputError, match="other settings"):
        rs.exposure(checkpoint, split.train, None, out=tmp_path / "e")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exposure") / "m"
    train = ["train", "--data", "digits", "--n", "20", "--arch", "mlp:64-30-1", "--steps", "300"]
    assert main([*train, "--out", str(out), "--quiet"]) == 0
    return out


def test_the_command_ranks_records_and_refuses_a_limit_on_probabilities(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(trained)
    arguments = ["exposure", model, "--data", model, "--holdout", model]
    assert main([*arguments, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    schemas.check("exposure", output)
    assert main([*arguments, "--fail-above", "0.5", "--quiet"]) == 2
    assert (
        "--fail-above needs the probability that each record is recovered"
        in capsys.readouterr().err
    )
    assert main([*arguments, "--init", "own", "--out", str(tmp_path / "e")]) == 0
    text = capsys.readouterr().out
    assert "ranking only: scores are not probabilities here" in text
    assert "prob." not in text
    assert "only differential privacy" in text
    assert max(map(len, text.splitlines())) <= 200


def test_groups_are_a_column_of_the_data_file(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load(trained / "private" / "train.npz") as arrays:
        named = {**arrays, "site": np.array(["=north", "south", "-1", "-1+1"] * 5)}
    np.savez(tmp_path / "t.npz", **named)
    arguments = ["exposure", str(trained), "--data", str(tmp_path / "t.npz")]
    assert main([*arguments, "--group-by", "site", "--out", str(tmp_path / "e"), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert {group["name"]: group["records"] for group in output["groups"]} == {
        "=north": 5,
        "south": 5,
        "-1": 5,
        "-1+1": 5,
    }
    rows = list(csv.DictReader((tmp_path / "e" / "exposure.csv").open()))
    # No formula for a spreadsheet; a number stays one.
    assert {row["group"] for row in rows} == {"'=north", "south", "-1", "'-1+1"}
    assert main([*arguments, "--group-by", "nothing"]) == 2
    assert "no such array 'nothing'" in capsys.readouterr().err


def test_wrong_inputs_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(trained)
    arguments = ["exposure", model, "--data", model]
    few = rs.load_dataset("digits", 20, holdout=50).holdout
    few.to_npz(tmp_path / "few.npz")
    Dataset(torch.randn(20, 9), torch.arange(20) % 2).to_npz(tmp_path / "other.npz")
    for more, words in (
        (["--holdout", str(tmp_path / "few.npz")], "100 held-out records"),
        (["--holdout", str(tmp_path / "other.npz")], "shape of the training records"),
        (["--canaries", str(tmp_path / "few.npz")], "'inserted'"),
        (["--confidence", "0.9"], "--canaries"),
        (["--fail-above", "2"], "--fail-above"),
    ):
        assert main([*arguments, *more]) == 2
        assert words in capsys.readouterr().err
    assert main(["exposure", model, "--data", str(tmp_path / "other.npz")]) == 2


def test_a_refused_request_blocks_no_later_request(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = rs.load_dataset("digits", 20, holdout=150).holdout
    held.to_npz(tmp_path / "held.npz")
    Dataset(held.x, torch.arange(150) % 10).to_npz(tmp_path / "classes.npz")
    arguments = ["exposure", str(trained), "--data", str(trained), "--out", str(tmp_path / "e")]
    assert main([*arguments, "--holdout", str(tmp_path / "classes.npz")]) == 2
    assert "Held-out samples: For a network with one output, the labels" in capsys.readouterr().err
    assert main([*arguments, "--holdout", str(tmp_path / "held.npz"), "--quiet"]) == 0


def test_the_record_is_read_again(
    digits: tuple[Network, rs.Split, dict[str, Tensor]], tmp_path: Path
) -> None:
    checkpoint, split, _ = digits
    exposure = expose(checkpoint, split.train, split.holdout)
    exposure.save(tmp_path / "e.safetensors")
    read = Exposure.load(tmp_path / "e.safetensors")
    assert read.to_json() == exposure.to_json()
    assert torch.equal(read.informed, exposure.informed)


def test_the_score_rises_with_what_it_is_made_of() -> None:
    signal_share = torch.tensor([0.1, 0.2], dtype=DOUBLE)
    same = torch.full((2,), 0.9, dtype=DOUBLE)
    reach = torch.tensor([0.5, 0.99], dtype=DOUBLE)
    for arguments in ((signal_share, same, same), (same, reach, same), (same, same, reach)):
        odds = score_records(*arguments, 784, 30)
        assert float(odds[0]) < float(odds[1])
    alone = score_records(signal_share, None, None, 784, None)
    assert float(alone[0]) < float(alone[1])
    # Where every record lies in the clean directions, they say nothing.
    assert score_records(signal_share, reach, reach, 10, 9).tolist() == pytest.approx(
        score_records(signal_share, None, None, 10, None).tolist()
    )


def test_the_score_is_its_formula() -> None:
    signal_share, heard, reach = 0.7, 0.95, 0.999
    odds = [
        -5.081 - 2.230 * math.log(0.05 + 1e-4) + 0.254 * math.log(0.7 + 1e-4),
        -9.267
        - 0.755 * math.log(1 - reach**2 + 1e-4)
        + 0.361 * math.log(0.7 + 1e-4)
        + 2.109 * math.log(784 / 1)
        + 2.835 * math.log(1 / 30),
    ]
    neither = math.prod(1 - 1 / (1 + math.exp(-value)) for value in odds)
    expected = -0.486 + 0.923 * math.log((1 - neither) / neither)
    figures = (torch.tensor([value], dtype=DOUBLE) for value in (signal_share, heard, reach))
    assert float(score_records(*figures, 784, 30)) == pytest.approx(expected)


# Ties between canaries


def listed(first: bool, m: int = 100) -> Tensor:
    """Which canaries were inserted, in a file that lists those first, or last."""
    inserted = torch.arange(m) < m // 2
    return inserted if first else ~inserted


@pytest.mark.parametrize("first", [True, False])
def test_a_statistic_that_tells_nothing_gives_no_bound_in_any_order(first: bool) -> None:
    bound = find_best_bound({"constant": torch.zeros(100)}, listed(first), 0.95, 0.0)
    assert bound.epsilon == 0.0


def test_ties_do_not_raise_the_rate_of_false_alarms() -> None:
    """Half of the statistics are 0, as multipliers are. Of 400 networks that saw no canary at most 5%
    may get a bound; more than 33 has a chance of 0.3% at that level.
    """
    alarms = 0
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        values = torch.rand(100, generator=generator)
        values[torch.rand(100, generator=generator) < 0.5] = 0.0
        alarms += find_best_bound({"own part": values}, listed(False), 0.95, 0.0).epsilon > 0
    assert alarms <= 33


def test_a_statistic_without_ties_is_sorted_and_gives_the_same_bound() -> None:
    inserted = listed(False)
    values = torch.arange(100.0)
    assert count_guesses(values, inserted, 1.0) == (100, 100)
    assert find_best_bound({"perfect": values}, inserted, 0.95, 0.0).epsilon > 2
    assert count_guesses(values, ~inserted, 0.5) == (50, 0)


def test_the_level_is_shared_over_the_statistics() -> None:
    inserted, values = listed(False), torch.arange(100.0)
    values[45], values[55] = 55.0, 45.0
    alone = find_best_bound({"a": values}, inserted, 0.95, 0.0)
    three = find_best_bound({"a": values, "b": values, "c": values}, inserted, 0.95, 0.0)
    assert three.epsilon < alone.epsilon
    level = 1 - 0.05 / (4 * 3)  # four shares of guesses, three statistics
    assert three.epsilon == compute_epsilon_bound(100, three.guesses, three.right, level)


def test_exposure_takes_what_an_audit_takes(tmp_path: Path) -> None:
    checkpoint, split = tight()
    rs.save_checkpoint(checkpoint, tmp_path / "m.safetensors")
    x, y = split.train.x, split.train.y
    split.train.to_npz(tmp_path / "train.npz")
    expected = rs.exposure(checkpoint, split.train)
    for data in ((x, y), (x.numpy(), y.numpy()), str(tmp_path / "train.npz")):
        exposure = rs.exposure(tmp_path / "m.safetensors", data)
        assert torch.allclose(exposure.score, expected.score, atol=1e-6)
    names = [f"pixel{i}" for i in range(64)]
    rows = [",".join([*names, "label"])]
    rows += [
        ",".join([*map(repr, row), str(int(label))])
        for row, label in zip(x.flatten(1).tolist(), y.tolist(), strict=True)
    ]
    (tmp_path / "train.csv").write_text("\n".join(rows))
    command = ["exposure", str(tmp_path / "m.safetensors"), "--data", str(tmp_path / "train.csv")]
    assert main([*command, "--quiet"]) == 0
    with pytest.raises(InputError, match="training records"):
        rs.exposure(checkpoint, None)
