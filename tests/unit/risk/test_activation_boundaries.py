"""Activation boundaries: a naive reference, exact cases, invariances, and a test that holds its level."""

from __future__ import annotations

import copy
import itertools
import json
import math
import time

import numpy as np
import pytest
import torch
from scipy.stats import false_discovery_control
from torch import Tensor, nn
from torch.nn import functional as F

from residuum.conformal import count_above_tail, group_p_value, rank_p_values
from residuum.errors import ArchitectureError, DataError
from residuum.io.estimators import convert_estimator
from residuum.io.modules import checkpoint_from_module
from residuum.networks import MLP
from residuum.networks.kinks import ActivationBoundaries, make_decoys
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.risk.membership import (
    MembershipTest,
    holdout_needed,
    measure_membership,
    min_named,
    separate_by_loss,
)
from tests import reference

DOUBLE = torch.float64


def dense(*widths: int, activation: type[nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths[:-1]):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1])).double()


def linears(model: nn.Module) -> list[nn.Linear]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


def weights_of(model: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    return [(layer.weight.detach(), layer.bias.detach()) for layer in linears(model)]


def put_on_boundary(layer: nn.Linear, neuron: int, a: Tensor, distance: float = 0.0) -> None:
    with torch.no_grad():
        layer.bias[neuron] -= layer.weight[neuron] @ a + layer.bias[neuron] - distance


# The statistic


@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_statistic_and_boundaries_are_those_of_a_naive_loop(slope: float) -> None:
    model = dense(5, 9, 7, 3, activation=lambda: nn.LeakyReLU(slope) if slope else nn.ReLU())
    first, second, last = linears(model)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 5, generator=generator, dtype=DOUBLE)
    with torch.no_grad():
        put_on_boundary(first, 2, x[3])
        put_on_boundary(first, 4, x[3], 2e-4)
        put_on_boundary(first, 5, x[8], 4e-3)
        first.weight[6], first.bias[6] = -2 * first.weight[2], -2 * first.bias[2]  # a bundle
        put_on_boundary(second, 1, model[1](first(x[3])))
        last.weight[:, 3] = 0  # no effect
    pool, records = x, x[:12]
    scores = ActivationBoundaries.measure(model, pool).score(records)
    statistic, boundaries = reference.naive_kinks(weights_of(model), records, pool, slope)
    assert scores.statistic.tolist() == pytest.approx(statistic, rel=1e-10)
    assert scores.boundaries.tolist() == boundaries
    assert boundaries[3] == [2, 1]
    assert scores.statistic.argmax() == 3


def test_a_record_put_on_three_boundaries_lies_on_three() -> None:
    model = dense(6, 20, 2)
    x = torch.randn(50, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    for neuron in (0, 7, 19):
        put_on_boundary(linears(model)[0], neuron, x[4])
    scores = ActivationBoundaries.measure(model, x).score(x)
    assert int(scores.boundaries[4, 0]) == 3
    assert int(scores.boundaries.sum()) < 8
    assert scores.statistic.argmax() == 4


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense(6, 20, 8, 2)
    x = torch.randn(40, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    unblocked = ActivationBoundaries.measure(model, x).score(x)
    # Records that fill more than one block of the real size take more than 128 MiB.
    monkeypatch.setattr("residuum.networks.kinks.BLOCK_BYTES", 8 * 500 * 7)
    blocked = ActivationBoundaries.measure(model, x).score(x)
    torch.testing.assert_close(blocked.statistic, unblocked.statistic)
    assert torch.equal(blocked.boundaries, unblocked.boundaries)


def test_rescaled_neurons_have_the_same_statistic() -> None:
    model = dense(6, 20, 12, 3)
    x = torch.randn(60, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    put_on_boundary(linears(model)[0], 5, x[9])
    rescaled, generator = copy.deepcopy(model), torch.Generator().manual_seed(4)
    layers = linears(rescaled)
    with torch.no_grad():
        for lower, upper in itertools.pairwise(layers):
            c = torch.randn(len(lower.weight), generator=generator, dtype=DOUBLE).exp()
            lower.weight *= c[:, None]
            lower.bias *= c
            upper.weight /= c
    torch.testing.assert_close(rescaled(x), model(x))
    before, after = (ActivationBoundaries.measure(m, x).score(x) for m in (model, rescaled))
    torch.testing.assert_close(after.statistic, before.statistic)
    assert torch.equal(after.boundaries, before.boundaries)


def test_neurons_without_outgoing_weights_weigh_nothing() -> None:
    model = dense(6, 20, 3)
    x = torch.randn(60, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    wide = dense(6, 500, 3, seed=9)
    with torch.no_grad():
        for name in ("weight", "bias"):
            getattr(wide[0], name)[:20] = getattr(model[0], name)
        wide[2].weight[:] = 0
        wide[2].weight[:, :20] = model[2].weight
        wide[2].weight[:, 20:40] = 1e-12  # lost in rounding
        wide[2].bias[:] = model[2].bias
    narrow, padded = (ActivationBoundaries.measure(m, x) for m in (model, wide))
    assert narrow.neurons == padded.neurons == 20
    torch.testing.assert_close(padded.score(x).statistic, narrow.score(x).statistic)
    assert torch.equal(padded.score(x).boundaries, narrow.score(x).boundaries)


def test_equal_neurons_vote_once() -> None:
    model = dense(6, 10, 2)
    x = torch.randn(60, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))
    put_on_boundary(model[0], 2, x[0])
    doubled = dense(6, 30, 2)
    with torch.no_grad():
        doubled[0].weight[:] = model[0].weight.repeat(3, 1)
        doubled[0].bias[:] = model[0].bias.repeat(3)
    single, triple = (ActivationBoundaries.measure(m, x).score(x) for m in (model, doubled))
    torch.testing.assert_close(triple.statistic, single.statistic)
    assert torch.equal(triple.boundaries, single.boundaries)


def test_a_silent_layer_has_no_boundaries() -> None:
    model = dense(4, 8, 8, 2)
    with torch.no_grad():
        model[0].bias[:] = -50
        model[2].bias[:] = 0
    x = torch.randn(20, 4, dtype=DOUBLE)
    x[0] = 100
    scores = ActivationBoundaries.measure(model, x).score(x)
    assert scores.boundaries[1:].sum() == 0


class Functional(nn.Module):
    """Activations called as functions, methods and in place, behind a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        z = self.norm(self.b(x))
        z.relu_()
        return self.out(self.c(x + z).clamp(min=0))


def test_functional_and_in_place_activations_are_seen() -> None:
    model = Functional().double().eval()
    x = torch.randn(30, 5, dtype=DOUBLE)
    outputs = model(x)
    z = model.norm(model.b(F.relu(model.a(x))))
    with torch.no_grad():
        model.norm.bias[3] -= z[7, 3]
    scores = ActivationBoundaries.measure(model, x).score(x)
    assert scores.boundaries.shape == (30, 3)
    assert scores.boundaries[7, 1] >= 1
    assert outputs.isfinite().all()


@pytest.mark.parametrize(
    ("activation", "layers"),
    [(nn.ReLU6, 2), (nn.Hardtanh, 2), (nn.PReLU, 1), (nn.GELU, 0), (nn.Tanh, 0)],
)
def test_every_bend_of_an_activation_is_a_layer(activation: type[nn.Module], layers: int) -> None:
    model = dense(5, 8, 2, activation=activation)
    x = torch.randn(30, 5, dtype=DOUBLE)
    boundaries = ActivationBoundaries.measure(model, x)
    assert boundaries.score(x).boundaries.shape == (30, layers)
    assert (boundaries.neurons == 0) == (layers == 0)
    if activation is nn.ReLU6:
        with torch.no_grad():
            model[0].bias[1] += 6 - model[0](x[2])[1]
        assert ActivationBoundaries.measure(model, x).score(x).boundaries[2, 1] == 1


def test_only_the_dense_layers_behind_convolutions_count() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.ReLU(),
        nn.Linear(12, 2),
    ).double()
    x = torch.randn(30, 1, 8, 8, dtype=DOUBLE)
    put_on_boundary(model[3], 4, model[:3](x[6:7])[0])
    boundaries = ActivationBoundaries.measure(model, x)
    assert boundaries.neurons == 12
    assert boundaries.score(x).boundaries[6].item() >= 1


def test_constant_columns_stay_constant_in_decoys() -> None:
    x = torch.randn(400, 3)
    x[:, 1] = 0.3
    decoys = make_decoys(x, x.std(0, correction=0), torch.Generator().manual_seed(0))
    noise = (decoys - x) / x.std(0, correction=0)
    assert torch.equal(decoys[:, 1], x[:, 1].double())
    assert noise[:, [0, 2]].std() == pytest.approx(0.1, rel=0.1)


# Ranks and the group test


def test_p_values_are_ranks_and_ties_count_against_a_record() -> None:
    held, statistic = torch.tensor([0, 0, 1, 3, 3, 8]), torch.tensor([0, 1, 2, 3, 8, 9])
    naive = [(1 + sum(int(h) >= int(s) for h in held)) / 7 for s in statistic]
    assert rank_p_values(statistic, held).tolist() == pytest.approx(naive)


def test_the_group_test_counts_records_above_the_tail() -> None:
    held = torch.arange(200).double()
    assert count_above_tail(torch.tensor([197.0, 197.5, 198.0, 500.0]), held) == 3
    assert count_above_tail(torch.tensor([8.0, 9.0, 9.5]), torch.arange(10.0)) == 1
    ties = torch.zeros(50)
    assert count_above_tail(ties, torch.zeros(300)) == 0
    assert group_p_value(ties, torch.zeros(300)) == 1


@pytest.mark.parametrize(("n", "held"), [(12, 250), (60, 99), (5, 100)])
def test_the_group_test_is_the_permutation_test_over_all_subsets(n: int, held: int) -> None:
    generator = torch.Generator().manual_seed(6)
    values = torch.arange(float(n + held))
    counts = [
        count_above_tail(values[order[:n]], values[order[n:]])
        for order in (torch.randperm(n + held, generator=generator) for _ in range(4000))
    ]
    for member_count in {0, 1, 2, 3}:
        share = sum(count >= member_count for count in counts) / 4000
        threshold = values[:held][-1 - held // 100]
        statistic = torch.where(torch.arange(n) < member_count, threshold + 0.5, -1.0)
        p = group_p_value(statistic, values[:held])
        assert p == pytest.approx(share, abs=4 * math.sqrt(p * (1 - p) / 4000) + 1e-9)


def test_equal_statistics_do_not_make_the_group_test_reject() -> None:
    generator = torch.Generator().manual_seed(6)
    counts = torch.poisson(torch.full((1000, 340), 0.1), generator=generator)
    p_values = [group_p_value(row[:40], row[40:]) for row in counts]
    assert sum(p <= 0.05 for p in p_values) <= 71  # 5% of 1000, and three deviations


@pytest.mark.parametrize(("n", "needed"), [(60, 399), (1000, 399), (3, 19), (10, 66), (61, 304)])
def test_the_held_out_records_needed_suffice_exactly(n: int, needed: int) -> None:
    assert holdout_needed(n) == needed
    k = min_named(n)
    for held, accepted in ((needed, k), (needed - 1, 0)):
        p = torch.ones(n, dtype=DOUBLE)
        p[:k] = 1 / (held + 1)
        assert int((false_discovery_control(p.numpy()) <= 0.05 + 1e-12).sum()) == accepted


# The test of membership


def fit(model: nn.Module, data: Dataset, epochs: int = 200) -> Network:
    """Train as many people do, and return the network."""
    torch.manual_seed(0)
    model = model.float()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x, y = data.x.float(), data.y
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return checkpoint_from_module(model.eval(), input_shape=data.shape)


def digits(n: int = 60, holdout: int = 500, seed: int = 0) -> tuple[Dataset, Dataset, Dataset]:
    """Training, held-out and never-seen records."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x = (x - x[order[:n]].mean(0)) / (x[order[:n]].std(0) + 0.1)
    x, y = torch.from_numpy(x[order]).float(), torch.from_numpy(y[order])
    cuts = (slice(0, n), slice(n, n + holdout), slice(n + holdout, 2 * n + holdout))
    return tuple(Dataset(x[cut], y[cut]) for cut in cuts)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def trained() -> tuple[Network, Dataset, Dataset, Dataset]:
    train, holdout, fresh = digits()
    return fit(dense(64, 256, 10), train), train, holdout, fresh


def test_members_are_named_and_others_are_not(
    trained: tuple[Network, Dataset, Dataset, Dataset],
) -> None:
    network, train, holdout, fresh = trained
    result = measure_membership(network, train, holdout)
    assert result.is_finding
    assert len(result.named) >= 25
    assert result.group_p < 1e-6
    assert (result.boundaries[result.named] >= 2).all()
    assert (result.q[result.named] <= 0.05).all()
    assert len(result.decoy_named) >= 20
    assert "of 60 training records are named" in result.line
    nobody = measure_membership(network, fresh, holdout)
    assert not nobody.is_finding
    assert len(nobody.named) == len(nobody.decoy_named) == 0
    assert (
        nobody.line
        == "No training record of 60 is named as a member at a false discovery rate of 5%."
    )


def test_an_untrained_network_names_nobody() -> None:
    train, holdout, _ = digits()
    network = checkpoint_from_module(dense(64, 256, 10).float())
    result = measure_membership(network, train, holdout)
    assert not result.is_finding
    assert len(result.named) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rounded_weights_still_name_members(
    dtype: torch.dtype, trained: tuple[Network, Dataset, Dataset, Dataset]
) -> None:
    network, train, holdout, _ = trained
    rounded = network.replace(theta={name: t.to(dtype) for name, t in network.theta.items()})
    result = measure_membership(rounded, train, holdout)
    assert result.is_finding
    assert result.statistic.dtype == DOUBLE
    pool = torch.cat([train.x, holdout.x])
    weights = list(rounded.theta.values())
    pairs = list(zip(weights[::2], weights[1::2], strict=True))
    first = slice(0, 3)
    if dtype != torch.float64:
        return
    naive, _ = reference.naive_kinks(
        [(w[:20], b[:20]) if i == 0 else (w[:, :20], b) for i, (w, b) in enumerate(pairs)],
        pool[first],
        pool[:40],
    )
    narrow = MLP((64, 20, 10), "all").double()
    with torch.no_grad():
        narrow.linears[0].weight[:], narrow.linears[0].bias[:] = pairs[0][0][:20], pairs[0][1][:20]
        narrow.linears[1].weight[:], narrow.linears[1].bias[:] = pairs[1][0][:, :20], pairs[1][1]
    scores = ActivationBoundaries.measure(narrow, pool[:40]).score(pool[first])
    assert scores.statistic.tolist() == pytest.approx(naive, rel=1e-9)


def test_leaky_relu_and_scikit_learn_networks_name_members() -> None:
    from sklearn.neural_network import MLPClassifier

    train, holdout, fresh = digits()
    leaky = fit(dense(64, 256, 10, activation=nn.LeakyReLU), train)
    estimator = MLPClassifier(max_iter=2000, tol=0, random_state=0)
    estimator.fit(train.x.double().numpy(), train.y.numpy())
    for network in (leaky, convert_estimator(estimator)):
        assert measure_membership(network, train, holdout).is_finding
        assert not measure_membership(network, fresh, holdout).is_finding


def test_a_convolutional_network_of_any_class_is_tested_behind_its_convolutions() -> None:
    train, holdout, fresh = (
        data.replace(x=data.x.reshape(-1, 1, 8, 8)) for data in digits(holdout=450)
    )
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, 128), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(128, 10),
    )  # fmt: skip
    network = fit(model, train, epochs=400)
    assert network.live is not None
    result = measure_membership(network, train, holdout)
    assert result.is_finding
    assert result.layers == 1
    assert not measure_membership(network, fresh, holdout).is_finding


def test_a_smooth_network_cannot_be_tested(
    trained: tuple[Network, Dataset, Dataset, Dataset],
) -> None:
    _, train, holdout, _ = trained
    smooth = checkpoint_from_module(dense(64, 20, 10, activation=nn.GELU).float())
    result = measure_membership(smooth, train, holdout)
    assert (result.neurons, result.layers) == (0, 0)
    assert "no dense layer with a piecewise linear activation" in result.line
    assert not result.is_finding


def test_too_few_held_out_records_are_said_with_the_number_needed(
    trained: tuple[Network, Dataset, Dataset, Dataset],
) -> None:
    network, train, holdout, fresh = trained
    few = Dataset(holdout.x[:100], holdout.y[:100])
    result = measure_membership(network, fresh, few)
    assert result.line == (
        "Membership could not be tested: naming 3 of 60 records needs 399 held-out records, and there are "
        "100."
    )
    without = measure_membership(network, train)
    assert "there are 0" in without.line
    assert without.p.isnan().all()
    assert math.isnan(without.group_p)
    assert without.loss is None
    assert len(without.decoy_named) >= 20


def test_held_out_records_of_another_kind_make_no_finding(
    trained: tuple[Network, Dataset, Dataset, Dataset],
) -> None:
    network, _, holdout, fresh = trained
    results = [
        measure_membership(network, fresh.replace(x=share * fresh.x), holdout)
        for share in (0.3, 0.5)
    ]
    assert any(len(result.named) >= 3 for result in results)  # by held-out records alone
    for result in results:
        assert not result.is_finding
        if len(result.named) >= 3:
            assert "held-out records are of another kind" in result.line


def test_ties_are_no_evidence() -> None:
    train, holdout, _ = digits()
    same = torch.ones(1, 64)
    result = measure_membership(
        checkpoint_from_module(dense(64, 32, 10).float()),
        Dataset(same.repeat(60, 1), train.y),
        Dataset(same.repeat(500, 1), holdout.y),
    )
    assert (result.p == 1).all()
    assert result.group_p == 1


def test_wrong_inputs_are_refused(trained: tuple[Network, Dataset, Dataset, Dataset]) -> None:
    network, train, holdout, _ = trained
    theta = dict(network.theta)
    name = next(iter(theta))
    theta[name] = theta[name].clone()
    theta[name][0, 0] = math.nan
    with pytest.raises(ArchitectureError, match="finite"):
        measure_membership(network.replace(theta=theta), train, holdout)
    broken = train.x.clone()
    broken[0, 0] = math.inf
    with pytest.raises(DataError, match="finite"):
        measure_membership(network, Dataset(broken, train.y), holdout)
    with pytest.raises(DataError, match="shape"):
        measure_membership(network, train, Dataset(holdout.x[:, :9], holdout.y))


def test_the_loss_rule_is_counted() -> None:
    train, holdout, _ = digits(20, 200)
    network = fit(dense(64, 64, 10), train, epochs=60)
    separation = separate_by_loss(network, train, holdout)
    losses = [
        F.cross_entropy(network.double_module(d.x.double()), d.y, reduction="none").tolist()
        for d in (train, holdout)
    ]
    pairs = [(a < b) + 0.5 * (a == b) for a in losses[0] for b in losses[1]]
    assert separation.auc == pytest.approx(sum(pairs) / len(pairs))
    placements = np.array(pairs).reshape(20, 200)
    variance = placements.mean(1).var(ddof=1) / 20 + placements.mean(0).var(ddof=1) / 200
    upper = min(1.0, separation.auc + 1.6448536 * math.sqrt(variance))
    assert separation.auc_upper == pytest.approx(upper)
    threshold = sorted(losses[1])[2]  # two of 200 are below
    assert separation.true_positive_rate == pytest.approx(
        sum(a < threshold for a in losses[0]) / 20
    )


def test_the_result_is_saved_and_is_plain_json(
    trained: tuple[Network, Dataset, Dataset, Dataset], tmp_path: object
) -> None:
    network, train, holdout, _ = trained
    result = measure_membership(network, train, holdout, seed=3)
    restored = MembershipTest.load(result.save(f"{tmp_path}/m.safetensors"))
    assert json.dumps(restored.to_json()) == json.dumps(result.to_json())
    assert result.to_json()["line"] == result.line
    assert measure_membership(network, train, holdout, seed=3).to_json() == result.to_json()


def test_scoring_is_fast() -> None:
    network = checkpoint_from_module(dense(784, 256, 10))
    pool = torch.randn(810, 784, dtype=DOUBLE)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        ActivationBoundaries.measure(network.double_module, pool).score(pool)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1
