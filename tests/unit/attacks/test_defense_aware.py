"""Adaptive attacks: shifts inferred from weights, at exact points and after training; noise removed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from residuum.attacks import Auto, attack
from residuum.attacks.defense_aware.shift import (
    EXACT_BALANCE,
    fit_shift,
    infer_constant_shift,
    infer_mean,
    infer_vector_shift,
    move_biases,
    shift_residual,
)
from residuum.attacks.defense_aware.strategies import (
    ADAPTIVE,
    Released,
    cut_singular_values,
    told_the_shift,
)
from residuum.datasets import load_dataset
from residuum.errors import InputError
from residuum.networks import MLP
from residuum.networks.network import Network
from residuum.records import Knowledge, same
from residuum.stationarity import residual, weighted_gradient
from residuum.training import TrainingConfig, make_release, train
from tests.cases import ExactPoint, multiclass_point, relu_point

SHIFTS = (0.05, 0.5, 5.0)
BIAS = "layers.0.bias"


def checkpoint(model: MLP, task: str = "binary") -> Network:
    widths = (model.linears[0].in_features, *(layer.out_features for layer in model.linears))
    theta = {name: t.detach().clone() for name, t in model.state_dict().items()}
    return Network(theta, "mlp:" + "-".join(map(str, widths)), (widths[0],), (), task)


def with_bias(released: Network, bias: Tensor) -> Network:
    return released.replace(theta={**released.theta, BIAS: bias})


@pytest.mark.parametrize(("groups", "width"), [(2, 1), (2, 3), (3, 1), (5, 4)])
def test_a_constant_shift_is_read_off_an_exact_point(groups: int, width: int) -> None:
    for c in SHIFTS:
        for seed in [0, 1, 2]:
            point = relu_point(2, groups=groups, width=width, seed=seed)
            inferred = infer_constant_shift(move_biases(checkpoint(point.model), -c))
            assert inferred.consensus, inferred.reason
            assert inferred.shift == pytest.approx(c, abs=1e-6)
            assert inferred.imbalance <= EXACT_BALANCE < inferred.before


@pytest.mark.parametrize("c", SHIFTS)
def test_several_outputs_and_deeper_networks(c: float) -> None:
    many = infer_constant_shift(move_biases(checkpoint(multiclass_point().model, "multiclass"), -c))
    assert many.consensus
    assert many.shift == pytest.approx(c, abs=1e-6)
    deep = infer_constant_shift(move_biases(checkpoint(relu_point(3, groups=4).model), -c))
    assert deep.consensus
    assert deep.shift == pytest.approx(c, abs=1e-6)


@pytest.mark.parametrize(("groups", "width"), [(2, 1), (3, 1), (5, 4)])
def test_permuted_biases_have_no_consensus(groups: int, width: int) -> None:
    for c in SHIFTS:
        shifted = move_biases(checkpoint(relu_point(2, groups=groups, width=width).model), -c)
        inferred = infer_constant_shift(with_bias(shifted, shifted.theta[BIAS].roll(width)))
        assert not inferred.consensus
        assert inferred.reason.startswith("no consensus")
        assert inferred.imbalance > 1e3 * EXACT_BALANCE


def test_one_neuron_and_its_multiples_are_no_consensus() -> None:
    model = relu_point(2, groups=2, width=3).model
    multiples = MLP((12, 3, 1)).double()
    with torch.no_grad():
        multiples.linears[0].weight.copy_(model.linears[0].weight[:3])
        multiples.linears[0].bias.copy_(model.linears[0].bias[:3])
        multiples.linears[1].weight.copy_(model.linears[1].weight[:, :3])
    inferred = infer_constant_shift(move_biases(checkpoint(multiples), -0.5))
    assert inferred.imbalance <= EXACT_BALANCE, "its root is there"
    assert not inferred.consensus, "and says nothing"


@pytest.mark.parametrize("seed", range(5))
def test_the_minimum_of_the_quartic_is_the_global_one(seed: int) -> None:
    torch.manual_seed(seed)
    model = MLP((6, 9, 1)).double()
    released = checkpoint(model)
    inferred = infer_constant_shift(released)
    w, b = released.theta["layers.0.weight"].numpy(), released.theta[BIAS].numpy()
    v = released.theta["layers.1.weight"].numpy()[0]

    def naive(c: float) -> float:
        terms = [(w[j] @ w[j] + (b[j] + c * w[j].sum()) ** 2 - v[j] ** 2) ** 2 for j in range(9)]
        return float(np.sqrt(sum(terms) / sum(v**4)))

    values = [naive(c) for c in np.linspace(-20, 20, 8001)]
    assert inferred.imbalance == pytest.approx(naive(float(inferred.shift)), rel=1e-9)
    assert inferred.imbalance <= min(values) + 1e-12
    assert min(values) == pytest.approx(inferred.imbalance, rel=1e-2)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_trained_network_gives_its_shift_away(seed: int) -> None:
    split = load_dataset("digits", 40, seed=seed, holdout=100)
    arch = "mlp:64-100-1"
    state = train(arch, split.train, TrainingConfig(steps=600, seed=seed))
    before = make_release(state, arch, split.train, "binary")
    errors = []
    for c in SHIFTS:
        inferred = infer_constant_shift(move_biases(before, -c))
        assert inferred.consensus, inferred.reason
        errors.append(float(inferred.shift) - c)
    assert max(map(abs, errors)) < 0.02
    assert np.ptp(errors) < 1e-8, "the error is the network's own and does not depend on c"
    generator = torch.Generator().manual_seed(seed)
    bias = move_biases(before, -0.5).theta[BIAS]
    permuted = bias[torch.randperm(len(bias), generator=generator)]
    assert not infer_constant_shift(with_bias(before, permuted)).consensus


def test_a_vector_needs_more_neurons_than_directions() -> None:
    torch.manual_seed(0)
    balanced = MLP((6, 40, 1)).double()
    with torch.no_grad():
        first = balanced.linears[0]
        size = (first.weight.square().sum(1) + first.bias.square()).sqrt()
        balanced.linears[1].weight.copy_(size[None])
    u = torch.randn(6, dtype=torch.float64)
    inferred = infer_vector_shift(move_biases(checkpoint(balanced), -u))
    assert inferred.consensus, inferred.reason
    assert isinstance(inferred.shift, Tensor)
    assert float((inferred.shift - u).norm()) < 1e-6
    few = infer_vector_shift(move_biases(checkpoint(relu_point(2, groups=3).model), -0.5))
    assert few.imbalance <= EXACT_BALANCE
    assert not few.consensus, "every choice of signs balances as many neurons as directions"


@pytest.fixture(params=[2, 3])
def rewritten(request: pytest.FixtureRequest) -> tuple[ExactPoint, Network, Tensor]:
    point = relu_point(request.param, groups=3, seed=1)
    u = torch.randn(12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return point, move_biases(checkpoint(point.model), -u), u


def test_stationarity_gives_any_shift_at_the_right_candidates(
    rewritten: tuple[ExactPoint, Network, Tensor],
) -> None:
    point, shifted, u = rewritten
    z = point.x + u
    shift_fitted, residual = fit_shift(shifted, z, point.y, point.lam, torch.eye(12))
    assert float((shift_fitted - u).norm()) < 1e-9
    assert residual < 1e-12
    assert shift_residual(shifted, z, point.y, point.lam, 0.0) > 0.01
    constant = move_biases(checkpoint(point.model), -0.5)
    shift_fitted, residual = fit_shift(constant, point.x + 0.5, point.y, point.lam)
    assert torch.allclose(shift_fitted, torch.full((12,), 0.5, dtype=torch.float64))
    curve = [
        shift_residual(constant, point.x + 0.5, point.y, point.lam, c)
        for c in (0, 0.4, 0.5, 0.6, 1)
    ]
    assert curve.index(min(curve)) == 2
    assert curve[2] == pytest.approx(residual, abs=1e-12)


def test_the_residual_is_that_of_the_moved_network(
    rewritten: tuple[ExactPoint, Network, Tensor],
) -> None:
    point, shifted, _ = rewritten
    generator = torch.Generator().manual_seed(2)
    z, u = point.x + 0.3, torch.randn(12, generator=generator, dtype=torch.float64)
    moved = move_biases(shifted, u).copy_module(torch.float64).requires_grad_(False)
    theta = {name: p.detach() for name, p in moved.named_parameters()}
    r = residual(moved, theta, z - u, (point.lam * point.y)[:, None])
    first = [name for name in theta if name.startswith("layers.0")]
    naive = sum(float(r[name].square().sum()) for name in first)
    naive /= sum(float(theta[name].square().sum()) for name in first)
    assert shift_residual(shifted, z, point.y, point.lam, u) == pytest.approx(naive**0.5, rel=1e-9)


def test_the_mean_leaves_least_of_the_first_layer() -> None:
    released = checkpoint(relu_point(2, groups=3, width=2).model)
    w, b = released.theta["layers.0.weight"], released.theta[BIAS]
    mean = infer_mean(released)
    best = float((w - torch.outer(b, mean)).norm())
    for step in (1e-3 * torch.eye(12, dtype=torch.float64)).unbind():
        assert float((w - torch.outer(b, mean + step)).norm()) > best
    with pytest.raises(InputError, match="zero"):
        infer_mean(with_bias(released, torch.zeros_like(b)))


def test_told_the_shift_of_the_data_the_equation_is_that_of_unshifted_samples() -> None:
    point = relu_point(3, groups=3, seed=4)  # its samples play z = x + u
    u = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    handed = Released(
        (checkpoint(point.model),), Knowledge(), Auto(), {"shift": u, "rewritten": False}
    )
    adapted = told_the_shift(handed)
    model = adapted.checkpoint.copy_module(torch.float64).requires_grad_(False)
    total = weighted_gradient(model, point.x - u, (point.lam * point.y)[:, None])
    assert adapted.knowledge.theta0 is not None
    for name, t in adapted.checkpoint.theta.items():
        target = t - adapted.knowledge.theta0[name]
        assert float((target - total[name]).norm()) < 1e-9 * (1 + float(t.norm()))


def test_moving_biases_by_nothing_changes_no_bit_and_back_is_where_it_was() -> None:
    released = checkpoint(relu_point(2, groups=3).model)
    assert same(move_biases(released, 0.0), released)
    u = torch.randn(12, dtype=torch.float64)
    back = move_biases(move_biases(released, u), -u)
    assert torch.allclose(back.theta[BIAS], released.theta[BIAS], atol=1e-12)
    with pytest.raises(InputError, match="an MLP with a bias in the first layer"):
        move_biases(released.replace(theta={"layers.0.weight": torch.zeros(2, 3)}), 1.0)


def noisy(released: Network, size: float, seed: int) -> Network:
    generator = torch.Generator().manual_seed(seed)
    theta = {
        name: t + size * torch.randn(t.shape, generator=generator, dtype=t.dtype)
        for name, t in released.theta.items()
    }
    return released.replace(theta=theta)


def test_noise_is_averaged_away_and_cut_off() -> None:
    torch.manual_seed(0)
    model = MLP((40, 60, 1)).double()
    with torch.no_grad():
        rows = torch.randn(60, 2).double() @ torch.randn(2, 40).double()
        model.linears[0].weight.copy_(rows)
    clean = checkpoint(model)
    releases = tuple(noisy(clean, 0.2, seed) for seed in range(16))

    def error(network: Network) -> float:
        return float((network.theta["layers.0.weight"] - clean.theta["layers.0.weight"]).norm())

    config = Auto(steps=8, restarts=1, candidates=4)
    handed = Released(releases, Knowledge(), config)
    mean = ADAPTIVE["average-releases"](handed)
    assert error(mean.checkpoint) == pytest.approx(error(releases[0]) / 4, rel=0.1)
    cut, rank_kept, rank_full = cut_singular_values(releases[0])
    assert (rank_kept, rank_full) == (2, 40)
    assert error(cut) < 0.4 * error(releases[0])
    single_release = ADAPTIVE["average-releases"](Released(releases[:1], Knowledge(), config))
    assert single_release.findings["kept_directions"] == 2, (
        "a single release is not averaged but cut"
    )


@pytest.mark.parametrize("name", ["undo-constant-shift", "undo-vector-shift"])
def test_without_consensus_short_attacks_decide(name: str) -> None:
    shifted = move_biases(checkpoint(relu_point(2, groups=3).model), -0.5)
    permuted = with_bias(shifted, shifted.theta[BIAS].roll(1))
    config = Auto(steps=40, restarts=2, candidates=6)
    adapted = ADAPTIVE[name](Released((permuted,), Knowledge(), config))
    tried = adapted.findings["first_layer_residual_by_guess"]
    joint = {"fitted to candidates"} if name == "undo-constant-shift" else set()
    assert set(tried) == {"released as it is", "balance"} | joint
    assert adapted.findings["chosen"] == min(tried, key=lambda guess: tried[guess])
    assert not adapted.findings["balance"]["consensus"]
    assert adapted.attack == config, "the attack itself keeps its budget"


@pytest.mark.parametrize("name", ADAPTIVE)
def test_every_strategy_attacks_with_the_budget_it_was_given(name: str) -> None:
    released = checkpoint(relu_point(2, groups=3, width=2).model)
    theta0 = {key: torch.zeros_like(t) for key, t in released.theta.items()}
    config = Auto(steps=20, restarts=2, candidates=6)
    knowledge_facts = {
        "weight_decay": 0.1,
        "loss": "logistic",
        "theta0": theta0,
        "shift": torch.full((12,), 0.5),
        "rewritten": True,
    }
    knowledge = Knowledge(shape=(12,), sample_count=9)
    adapted = ADAPTIVE[name](Released((released,), knowledge, config, knowledge_facts))
    reconstruction = attack(adapted.checkpoint, adapted.knowledge, adapted.attack)
    assert reconstruction.restarts == 2
    assert reconstruction.settings["steps"] == 20
    assert torch.isfinite(reconstruction.x).all()
    assert all(isinstance(key, str) for key in adapted.findings)
