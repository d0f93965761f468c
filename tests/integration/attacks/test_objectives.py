"""The contract every objective keeps, whatever the network: a new row of OBJECTIVES is tried here."""

from __future__ import annotations

import copy

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn import functional as F

from residuum import attacks
from residuum.attacks import Auto
from residuum.attacks.stationarity.attack import search
from residuum.attacks.stationarity.objectives import (
    NTK,
    OBJECTIVES,
    BinaryKKT,
    MulticlassKKT,
    Objective,
    WeightDecay,
)
from residuum.attacks.stationarity.problem import fit_multipliers
from residuum.attacks.stationarity.solver import Solver, SolverState
from residuum.errors import InputError
from residuum.networks import MLP, ConvNet, Polynomial, PolynomialNetwork
from residuum.records import Knowledge
from tests.cases import (
    SPREAD,
    VARIANTS,
    AllLayers,
    attack_case,
    multiclass_point,
    ntk_point,
    relu_point,
    weight_decay_point,
)
from tests.reference import convnet_forward, cubic_forward
from tests.unit.engine.test_engine import SHARPNESS, assert_same, close, naive

CUBIC = (0.0, 0.5, 0.0, 1.0)


def test_every_objective_is_tried():
    assert set(VARIANTS) == set(OBJECTIVES)
    for name, variants in VARIANTS.items():
        assert variants
        assert all(isinstance(objective, OBJECTIVES[name]) for objective, _ in variants)
        assert OBJECTIVES[name].name == name
        assert OBJECTIVES[name].paper


class Loss(torch.autograd.Function):
    """A problem's loss with the gradients it claims, for gradcheck."""

    @staticmethod
    def forward(ctx, x, lam, problem, sharpness):
        evaluation = problem.evaluate(x, lam, sharpness)
        ctx.save_for_backward(evaluation.grad_x, evaluation.grad_lam)
        return evaluation.loss

    @staticmethod
    def backward(ctx, g):
        gx, gl = ctx.saved_tensors
        spread = [g.view(-1, *[1] * (gradient.ndim - 1)) * gradient for gradient in (gx, gl)]
        return (*spread, None, None)


def gradients_check(case, surrogate):
    problem = AllLayers(
        case.model, case.objective, case.knowledge, case.labels, surrogate=surrogate
    )
    inputs = (case.x.clone().requires_grad_(), case.lam.clone().requires_grad_())
    return torch.autograd.gradcheck(
        lambda x, lam: Loss.apply(x, lam, problem, SHARPNESS), inputs, raise_exception=False
    )


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_gradients_are_those_of_the_loss(objective, outputs):
    mlp = attack_case(MLP((4, 5, 3, outputs), "all"), objective, outputs, (4,), 3)
    assert gradients_check(mlp, "softplus")
    smooth = MLP((4, 5, 3, outputs), activation=Polynomial((0.0, 1.0, 0.3)))
    assert gradients_check(attack_case(smooth, objective, outputs, (4,), 3), "none")
    if outputs == 1 or not isinstance(objective, MulticlassKKT):
        shape = PolynomialNetwork(4, 5, Polynomial(CUBIC))
        assert gradients_check(attack_case(shape, objective, 1, (4,), 3), "none")


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_a_pullback_written_by_hand_is_that_of_the_covectors(objective, outputs):
    case = attack_case(MLP((4, 5, outputs)), objective, outputs, (4,), 3)
    z, ubar = (torch.randn(2, 3, outputs, dtype=torch.float64) for _ in range(2))
    for point in range(len(objective.gradient_points())):
        inputs = (point, z, case.labels, case.lam, ubar)
        by_hand, by_autograd = objective.pullback(*inputs), Objective.pullback(objective, *inputs)
        assert close(by_hand[1], by_autograd[1], 1e-14)
        assert close(
            torch.zeros_like(z) if by_hand[0] is None else by_hand[0], by_autograd[0], 1e-14
        )
        assert objective.follows_outputs == bool(by_autograd[0].any())


def test_the_sigmoid_surrogate_is_no_gradient():
    case = attack_case(MLP((4, 5, 3, 1)), BinaryKKT(), 1, (4,), 3)
    assert not gradients_check(case, "sigmoid")


def sequential(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(9, 6),
        nn.ReLU(),
        nn.Linear(6, 4, bias=False),
        nn.ReLU(),
        nn.Linear(4, outputs),
    )


def sequential_forward(theta, x, activation):
    h = activation(theta["1.weight"] @ x.flatten() + theta["1.bias"])
    h = activation(theta["3.weight"] @ h)
    return theta["5.weight"] @ h + theta["5.bias"]


class Functional(nn.Module):
    """Kinks called as functions, methods and in place; a pool that overlaps, one beyond the edge."""

    def __init__(self, outputs):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 2), nn.Linear(12, outputs)

    def forward(self, x):
        z = F.leaky_relu(self.conv(x), 0.2, inplace=True)
        z = F.max_pool2d(z, 2, stride=1, padding=1)
        z = torch.max_pool2d(z, (2, 2), ceil_mode=True)
        z.relu_()
        return self.head(z.flatten(1))


def functional_forward(theta, x, activation):
    """One image (1, 3, 3), its windows written out."""
    largest = getattr(activation, "largest", lambda entries: entries.amax(0))
    weight, bias = theta["conv.weight"][:, 0], theta["conv.bias"]

    def layer(i, j):
        z = (weight * x[0, i : i + 2, j : j + 2]).sum((1, 2)) + bias
        return 0.2 * z + 0.8 * activation(z)

    def pooled(z, rows, columns):
        return largest(torch.stack([z[i, j] for i in rows for j in columns if (i, j) in z]))

    z = {(i, j): layer(i, j) for i in range(2) for j in range(2)}
    z = {(i, j): pooled(z, (i - 1, i), (j - 1, j)) for i in range(3) for j in range(3)}
    z = [pooled(z, (i, i + 1), (j, j + 1)) for i in (0, 2) for j in (0, 2)]
    return theta["head.weight"] @ activation(torch.stack(z, 1).flatten()) + theta["head.bias"]


ANY = {
    "convnet": (lambda c: ConvNet((1, 3, 3), (3, 4), c, "hidden"), convnet_forward, (1, 3, 3)),
    "sequential": (sequential, sequential_forward, (9,)),
    "functional": (Functional, functional_forward, (1, 3, 3)),
}


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_any_network_equals_the_naive_loop(objective, outputs):
    for name in ANY:
        for surrogate in ["sigmoid", "softplus", "none"]:
            build, forward, shape = ANY[name]
            case = attack_case(build(outputs), objective, outputs, shape)
            problem = AllLayers(
                case.model, objective, case.knowledge, case.labels, surrogate=surrogate
            )
            assert problem.explicit is None
            evaluation = problem.evaluate(case.x, case.lam, SHARPNESS)
            assert_same(evaluation, naive(case, problem, surrogate, forward=forward))
            first = AllLayers(
                case.model,
                objective,
                case.knowledge,
                case.labels,
                surrogate=surrogate,
                normalize=False,
                layers="first",
            )
            evaluation = first.evaluate(case.x, case.lam, SHARPNESS)
            assert_same(evaluation, naive(case, first, surrogate, False, "first", forward))


@pytest.mark.parametrize("objective", [BinaryKKT(), WeightDecay(tied=0.7, loss="squared"), NTK()])
def test_polynomial_networks_equal_the_naive_loop(objective):
    case = attack_case(PolynomialNetwork(4, 5, Polynomial(CUBIC)), objective, 1, (4,))
    for surrogate in ("none", "sigmoid"):  # no ReLU, so nothing for a surrogate to stand for
        problem = AllLayers(case.model, objective, case.knowledge, case.labels, surrogate=surrogate)
        evaluation = problem.evaluate(case.x, case.lam)
        assert_same(evaluation, naive(case, problem, "none", forward=cubic_forward))


def test_a_surrogate_has_a_name():
    case = attack_case(nn.Linear(4, 1), BinaryKKT(), 1, (4,))
    with pytest.raises(InputError, match="No surrogate 'gelu'"):
        AllLayers(case.model, case.objective, case.knowledge, case.labels, surrogate="gelu")


# Invariances


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_the_order_of_candidates_does_not_matter(objective, outputs):
    case = attack_case(MLP((5, 6, 4, outputs)), objective, outputs, (5,), 6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    inputs = (case.model, objective, case.knowledge)
    before = AllLayers(*inputs, case.labels).evaluate(case.x, case.lam, SHARPNESS)
    after = AllLayers(*inputs, case.labels[order]).evaluate(
        case.x[:, order], case.lam[:, order], SHARPNESS
    )
    expected = (before.loss, before.layers, before.grad_x[:, order], before.grad_lam[:, order])
    assert_same(after, expected, 1e-12)
    assert not close(before.grad_x, before.grad_x[:, order], 1e-2)


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_a_sample_may_be_split_into_two_that_share_its_multiplier(objective, outputs):
    case = attack_case(MLP((5, 6, 4, outputs)), objective, outputs, (5,), 4)
    inputs = (case.model, objective, case.knowledge)
    evaluation = AllLayers(*inputs, case.labels).evaluate(case.x, case.lam, SHARPNESS)
    twice, share = torch.tensor([0, 0, 1, 2, 3]), 0.3
    lam = case.lam[:, twice].clone()
    lam[:, 0] *= share
    lam[:, 1] *= 1 - share
    split = AllLayers(*inputs, case.labels[twice]).evaluate(case.x[:, twice], lam, SHARPNESS)
    grad_x = evaluation.grad_x[:, twice].clone()
    grad_x[:, 0] *= share
    grad_x[:, 1] *= 1 - share
    assert_same(
        split, (evaluation.loss, evaluation.layers, grad_x, evaluation.grad_lam[:, twice]), 1e-12
    )
    lam[:, 1] *= 2
    more = AllLayers(*inputs, case.labels[twice]).evaluate(case.x[:, twice], lam, SHARPNESS)
    assert not close(more.loss, evaluation.loss, 1e-4)


# Zero at exact points with true gates


def squared_residual(model, objective, knowledge, labels, x, lam):
    """Relative squared residual of the whole target, from true gates; lam: one run."""
    problem = AllLayers(model, objective, knowledge, labels, surrogate="none", normalize=False)
    return float(problem.evaluate(x[None], lam[None]).loss) / sum(problem.scales)


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize(("groups", "size"), [(2, 3), (4, 2)])
def test_zero_at_exact_binary_points(depth, groups, size):
    point = relu_point(depth, groups, size, width=2)
    inputs = (point.model, BinaryKKT(), Knowledge(), point.y, point.x)
    assert squared_residual(*inputs, point.lam) < 1e-24
    assert squared_residual(*inputs, 1.1 * point.lam) > 1e-3
    free = (point.lam * point.y)[:, None]
    assert squared_residual(point.model, WeightDecay(), *inputs[2:], free) < 1e-24


def rival_multipliers(point, classes):
    """(n, C) from one per row: rivals in order, zero at the sample's own class."""
    lam = point.x.new_zeros(len(point.x), classes)
    rivals = torch.stack([torch.arange(classes)[torch.arange(classes) != y] for y in point.y])
    return lam.scatter(1, rivals, point.lam.view(len(point.x), -1))


@pytest.mark.parametrize("classes", [3, 4, 6])
def test_zero_at_exact_multiclass_points_for_tied_rivals_alone(classes):
    point = multiclass_point(classes)
    lam = rival_multipliers(point, classes)
    inputs = (Knowledge(), point.y, point.x)
    assert squared_residual(point.model, MulticlassKKT("tied"), *inputs, lam) < 1e-24
    assert squared_residual(point.model, MulticlassKKT("tied"), *inputs, 1.1 * lam) > 1e-3
    best = MulticlassKKT("best")
    problem = AllLayers(point.model, best, *inputs[:2], surrogate="none", normalize=False)
    ones = torch.ones(1, len(point.x), dtype=torch.float64)
    multipliers = fit_multipliers(problem, point.x[None], ones, 0.0, 1.0, 1.0)
    assert 0.3 < squared_residual(point.model, best, *inputs, multipliers[0]) ** 0.5 < 0.6


@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_zero_at_a_minimum_with_weight_decay(loss):
    point, decay = weight_decay_point(loss)
    knowledge = Knowledge(loss=loss, weight_decay=decay, sample_count=len(point.x))
    objective = WeightDecay.from_settings(Auto(), knowledge)
    assert objective.tied == pytest.approx(1 / (2 * decay))
    ones = torch.ones(len(point.x), 1, dtype=torch.float64)
    inputs = (knowledge, point.y, point.x, ones)
    assert squared_residual(point.model, objective, *inputs) < 1e-24
    off = WeightDecay.from_settings(Auto(), knowledge.replace(weight_decay=1.1 * decay))
    assert squared_residual(point.model, off, *inputs) > 1e-3


@pytest.mark.parametrize("gradients", ["theta", "theta0", "both"])
def test_zero_at_exact_ntk_points(gradients):
    model, theta0, x, lam = ntk_point(gradients)
    inputs = (NTK(gradients), Knowledge(theta0=theta0), torch.zeros(len(x)), x)
    assert squared_residual(model, *inputs, lam) < 1e-24
    assert squared_residual(model, *inputs, 1.1 * lam) > 1e-3


# Descent


def perturbed_solver(point, model, surrogate, tmp_path, scale=0.02):
    """A solver about to start near the exact point: its state is laid where it resumes from."""
    config = Auto(
        restarts=1,
        steps=1200,
        lr_x=0.01,
        lr_lam=0.01,
        lr_decay=1e-4,
        lam_scale="one",
        layers="all",
        anneal="none",
        surrogate=surrogate,
        sharpness=300.0,
        candidates=len(point.x),
    )
    objective = PlantedLabels(point.y)
    n, dim = point.x.shape
    solver = Solver(model, objective, Knowledge(), config, (dim,), 1, n)
    generator = torch.Generator().manual_seed(1)
    x = point.x + scale * torch.randn(n, dim, generator=generator, dtype=torch.float64)
    lam = point.lam * (1 + scale * torch.randn(n, generator=generator, dtype=torch.float64))
    path = tmp_path / f"{id(model)}.safetensors"
    solver.start().replace(x=x[None], lam=lam[None]).save(path)
    return solver, path


class PlantedLabels(BinaryKKT):
    """Binary KKT with labels given."""

    def __init__(self, y):
        object.__setattr__(self, "y", y)

    def labels(self, count, outputs, knowledge):
        return self.y


def matched_errors(multipliers, truth):
    distance = torch.cdist(multipliers, truth).numpy()
    return torch.tensor(distance[linear_sum_assignment(distance)])


@pytest.mark.parametrize("n", [3, 4, 5, 6])
@pytest.mark.parametrize(("depth", "surrogate"), [(2, "sigmoid"), (3, "none")])
def test_descent_returns_to_an_exact_point_unless_weights_are_shuffled(
    n, depth, surrogate, tmp_path
):
    """Deeper points have inner pre-activations of exactly zero, where only true gates are shut."""
    point = relu_point(depth, groups=n, size=1, width=2, seed=n)
    solver, path = perturbed_solver(point, point.model, surrogate, tmp_path)
    start = matched_errors(SolverState.load(path).x[0], point.x)
    end = search(solver, path)
    assert start.min() > 1e-2
    assert matched_errors(end.best_x[0], point.x).max() < 1e-4
    assert end.best_loss[0] < 1e-8

    shuffled = copy.deepcopy(point.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in shuffled.parameters():
            p.copy_(p.flatten()[torch.randperm(p.numel(), generator=generator)].view_as(p))
    solver, path = perturbed_solver(point, shuffled, surrogate, tmp_path)
    end = search(solver, path)
    assert matched_errors(end.best_x[0], point.x).max() > 0.1
    assert end.best_loss[0] > 1e-3


# Labels, knowledge, refusals


def test_labels_follow_the_known_balance():
    def counts(objective, outputs, m=8, balance=None):
        knowledge = Knowledge(label_balance=balance)
        labels = objective.labels(m, outputs, knowledge)
        assert len(labels) == m
        return [int((labels == value).sum()) for value in labels.unique()]

    assert counts(BinaryKKT(), 1) == [4, 4]
    assert counts(BinaryKKT(), 1, balance=(0.25, 0.75)) == [2, 6]
    assert counts(BinaryKKT(), 1, balance=(30.0, 10.0)) == [6, 2]
    assert BinaryKKT().labels(3, 1, Knowledge(label_balance=(1.0, 2.0))).tolist() == [-1, 1, 1]
    assert counts(MulticlassKKT(), 4) == [2, 2, 2, 2]
    assert counts(MulticlassKKT(), 3, m=10) == [3, 4, 3]
    assert counts(MulticlassKKT(), 3, balance=(1.0, 2.0, 1.0)) == [2, 4, 2]


REFUSED = [
    (BinaryKKT(), 3, Knowledge(), "it needs one output; this network has 3"),
    (MulticlassKKT(), 1, Knowledge(), "it needs at least 2 outputs"),
    (NTK(), 1, Knowledge(), "needs the initial weights theta0"),
]


@pytest.mark.parametrize(("objective", "outputs", "knowledge", "words"), REFUSED)
def test_what_an_objective_cannot_work_with(objective, outputs, knowledge, words):
    with pytest.raises(InputError, match=words) as caught:
        objective.check(outputs, knowledge)
    assert caught.value.remedy


def test_options_of_an_objective_are_checked_when_it_is_made():
    with pytest.raises(InputError, match="Did you mean 'best'"):
        MulticlassKKT("beest")
    with pytest.raises(InputError, match="No gradient point 'theta1'"):
        NTK("theta1")


def test_settings_of_an_attack_reach_the_options_of_the_same_name():
    multiclass = attacks.MulticlassKKT(rivals="best")
    assert MulticlassKKT.from_settings(multiclass, Knowledge()) == MulticlassKKT("best")
    assert NTK.from_settings(attacks.NTK(gradients="both"), Knowledge()) == NTK("both")
    assert BinaryKKT.from_settings(attacks.BinaryKKT(rivals="best"), Knowledge()) == BinaryKKT()


def test_what_an_objective_can_work_with():
    for objective, outputs in (case_parameters.values for case_parameters in SPREAD):
        objective.check(outputs, Knowledge(theta0={}, moment={}))
        assert isinstance(objective, Objective)
        assert objective.task in ("", "binary", "multiclass", "regression")


def test_multipliers_are_tied_only_by_all_three_facts():
    facts_known = {"loss": "logistic", "weight_decay": 0.01, "sample_count": 20}
    assert WeightDecay.from_settings(Auto(), Knowledge(**facts_known)) == WeightDecay(
        tied=5.0, loss="logistic"
    )
    for name in facts_known:
        incomplete = {key: value for key, value in facts_known.items() if key != name}
        assert WeightDecay.from_settings(Auto(), Knowledge(**incomplete)) == WeightDecay()
    with pytest.raises(InputError, match="got 'hinge'"):
        WeightDecay.from_settings(Auto(), Knowledge(**{**facts_known, "loss": "hinge"}))
