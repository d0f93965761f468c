"""The explicit engine against the naive per-sample loop and against automatic differentiation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from residuum.attacks import Auto
from residuum.attacks.stationarity.attack import search
from residuum.attacks.stationarity.objectives import NTK, BinaryKKT, MulticlassKKT
from residuum.attacks.stationarity.problem import Problem
from residuum.attacks.stationarity.solver import Solver
from residuum.engine.explicit import ExplicitEquation, accumulate, multiply
from residuum.networks import MLP, Linear, Polynomial
from residuum.records import Knowledge
from tests.cases import SPREAD, AllLayers, attack_case
from tests.reference import mlp_forward, naive_objective

SHARPNESS = 4.0  # low enough that every gate has slope and curvature
NETWORKS = [
    ((5, 6), "first"),
    ((5, 6), "all"),
    ((5, 6, 4), "none"),
    ((5, 6, 4), "hidden"),
    ((5, 4, 6, 3), "all"),
    ((5, 4, 6, 3, 5), "hidden"),
    ((5, 4, 4, 4, 4), "first"),
]


def close(actual, expected, tolerance=1e-10):
    return float((actual - expected).norm()) <= tolerance * max(1e-3, float(expected.norm()))


def naive(case, problem, surrogate, normalize=True, layers="all", forward=mlp_forward):
    """The naive loop, every run on its own; layer weights worked out afresh."""
    target, chosen = case.target, {}
    for i, (layer, names) in enumerate(problem.groups.items()):
        size = sum(float((target[n] ** 2).sum()) for n in names)
        weight = 1 / size if normalize else 1.0
        chosen[layer] = (weight if layers == "all" or i == 0 else 0.0, names)
    runs = [
        naive_objective(
            forward,
            case.points,
            target,
            chosen,
            case.objective,
            case.labels,
            case.x[r],
            case.lam[r],
            surrogate,
            SHARPNESS,
        )
        for r in range(len(case.x))
    ]
    sizes = [sum(float((target[n] ** 2).sum()) for n in names) for _, names in chosen.values()]
    loss, layer_losses, grad_x, grad_lam = (
        torch.stack(tensors) for tensors in zip(*runs, strict=True)
    )
    return loss, layer_losses / torch.tensor(sizes, dtype=layer_losses.dtype), grad_x, grad_lam


def assert_same(actual, expected, tolerance=1e-10):
    names = ("loss", "layers", "grad_x", "grad_lam")
    for name, b in zip(names, expected, strict=True):
        a = getattr(actual, name)
        assert a.shape == b.shape
        assert close(a, b, tolerance), (name, float((a - b).norm() / b.norm()))


class Wrapped(nn.Module):
    """The same network under the same parameter names, but no MLP: takes the generic path."""

    def __init__(self, model: MLP) -> None:
        super().__init__()
        self.layers, self.activation = model.layers, model.activation

    def forward(self, x):
        return MLP.forward(self, x)

    trace = MLP.trace


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_the_engine_equals_the_naive_loop(objective, outputs):
    for surrogate in ["sigmoid", "softplus", "none"]:
        for seed, (hidden, bias) in enumerate(NETWORKS):
            case = attack_case(MLP((*hidden, outputs), bias), objective, outputs, (5,), 4, seed)
            problem = AllLayers(
                case.model, objective, case.knowledge, case.labels, surrogate=surrogate
            )
            assert problem.explicit is not None
            evaluation = problem.evaluate(case.x, case.lam, SHARPNESS)
            assert_same(evaluation, naive(case, problem, surrogate))
            assert float(evaluation.grad_x.norm()) > 1e-4  # agreement on zeros would say nothing


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_the_generic_path_equals_the_engine(objective, outputs):
    for surrogate in ["sigmoid", "softplus"]:
        for seed, (hidden, bias) in enumerate(NETWORKS):
            case = attack_case(MLP((*hidden, outputs), bias), objective, outputs, (5,), 4, seed)
            inputs = (objective, case.knowledge, case.labels)
            generic = AllLayers(Wrapped(case.model), *inputs, surrogate=surrogate)
            assert generic.explicit is None
            explicit = AllLayers(case.model, *inputs, surrogate=surrogate)
            generic_result = generic.evaluate(case.x, case.lam, SHARPNESS)
            explicit_result = explicit.evaluate(case.x, case.lam, SHARPNESS)
            assert_same(
                explicit_result,
                (
                    generic_result.loss,
                    generic_result.layers,
                    generic_result.grad_x,
                    generic_result.grad_lam,
                ),
            )
            assert explicit.layer_names == generic.layer_names


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_an_update_of_the_engine_is_one_of_the_generic_path(optimizer):
    objective = MulticlassKKT()
    case = attack_case(MLP((5, 6, 4, 3)), objective, 3, (5,), 4)
    config = Auto(
        steps=40,
        restarts=2,
        optimizer=optimizer,
        layers="all",
        lr_x=1e-3,
        lr_lam=1e-3,
        sigma=1.0,
        sharpness=4.0,
    )
    solvers = [
        Solver(model, objective, Knowledge(), config, (5,), 3, 4)
        for model in (case.model, Wrapped(case.model))
    ]
    ends = [search(solver) for solver in solvers]
    assert close(ends[0].x, ends[1].x)
    assert close(ends[0].lam, ends[1].lam)
    assert not close(ends[0].x, solvers[0].start().x, 1e-6)


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped])
def test_layer_weights(wrap):
    """Both paths, each layer over its own size or not, all layers or the first alone."""
    for normalize in [True, False]:
        for layers in ["all", "first"]:
            for surrogate in ["sigmoid", "softplus"]:
                for objective, outputs in ((BinaryKKT(), 1), (NTK("both"), 2)):
                    case = attack_case(MLP((5, 6, 4, outputs), "hidden"), objective, outputs, (5,))
                    problem = AllLayers(
                        wrap(case.model),
                        objective,
                        case.knowledge,
                        case.labels,
                        surrogate=surrogate,
                        normalize=normalize,
                        layers=layers,
                    )
                    evaluation = problem.evaluate(case.x, case.lam, SHARPNESS)
                    assert_same(evaluation, naive(case, problem, surrogate, normalize, layers))
                    assert (
                        evaluation.layers > 0
                    ).all()  # a layer that drives nothing is reported all the same


def test_by_default_an_mlp_is_attacked_through_its_first_layer_and_others_through_all():
    case = attack_case(MLP((5, 6, 4, 1)), BinaryKKT(), 1, (5,))
    for model, expected in ((case.model, "first"), (Wrapped(case.model), "all")):
        inputs = (model, case.objective, case.knowledge, case.labels)
        weights = Problem(*inputs).layer_weights
        assert weights == Problem(*inputs, layers=expected).layer_weights
        assert [weight > 0 for weight in weights] == [True, expected == "all", expected == "all"]


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_runs_together_equal_each_alone(objective, outputs):
    case = attack_case(MLP((5, 6, 4, outputs)), objective, outputs, (5,), 6)
    for model in (case.model, Wrapped(case.model)):
        problem = AllLayers(model, objective, case.knowledge, case.labels)
        together = problem.evaluate(case.x, case.lam, SHARPNESS)
        for run in range(2):
            alone = problem.evaluate(case.x[[run]], case.lam[[run]], SHARPNESS)
            expected = (together.loss, together.layers, together.grad_x, together.grad_lam)
            assert_same(alone, [tensor[[run]] for tensor in expected], 1e-12)


def test_images_go_through_the_engine_flat():
    case = attack_case(MLP((6, 5, 1)), BinaryKKT(), 1, (1, 2, 3))
    problem = AllLayers(case.model, case.objective, case.knowledge, case.labels)
    evaluation = problem.evaluate(case.x, case.lam, SHARPNESS)
    assert evaluation.grad_x.shape == (2, 4, 1, 2, 3)
    flat = problem.evaluate(case.x.flatten(2), case.lam, SHARPNESS)
    assert torch.equal(evaluation.grad_x.flatten(2), flat.grad_x)


@pytest.mark.parametrize("activation", [Linear(), Polynomial((0.0, 1.0, 0.5))])
def test_a_surrogate_replaces_only_relu(activation):
    """Other activations have derivatives of their own, and keep them."""
    case = attack_case(MLP((5, 6, 4, 1), activation=activation), BinaryKKT(), 1, (5,))
    inputs = (case.objective, case.knowledge, case.labels)
    for model in (case.model, Wrapped(case.model)):
        without_surrogate = AllLayers(model, *inputs, surrogate="none").evaluate(case.x, case.lam)
        with_surrogate = AllLayers(model, *inputs, surrogate="sigmoid").evaluate(case.x, case.lam)
        assert_same(
            with_surrogate,
            (
                without_surrogate.loss,
                without_surrogate.layers,
                without_surrogate.grad_x,
                without_surrogate.grad_lam,
            ),
            1e-15,
        )
        relu = AllLayers(MLP((5, 6, 4, 1)).double(), *inputs, surrogate="sigmoid")
        relu.explicit = AllLayers(case.model, *inputs).explicit
        assert not close(relu.evaluate(case.x, case.lam).grad_x, without_surrogate.grad_x)


def test_single_precision_stays_near_double():
    case = attack_case(MLP((5, 6, 4, 1)), BinaryKKT(), 1, (5,))
    inputs = (case.objective, case.knowledge, case.labels)
    double = AllLayers(case.model, *inputs).evaluate(case.x, case.lam, SHARPNESS)
    single = AllLayers(case.model, *inputs, dtype=torch.float32).evaluate(
        case.x.float(), case.lam.float(), SHARPNESS
    )
    assert single.grad_x.dtype == torch.float32
    assert close(single.grad_x.double(), double.grad_x, 1e-5)
    assert not close(single.grad_x.double(), double.grad_x, 1e-10)


@pytest.mark.parametrize("half", [False, True])
def test_products_round_their_factors_and_never_the_running_total(half):
    """bf16: factors of 8 bits, the running total in full precision, as are sums that cancel."""
    generator = torch.Generator().manual_seed(0)
    total, a, b = (torch.randn(2, *s, generator=generator) for s in ((4, 6), (4, 5), (5, 6)))
    exact = 0.5 * total.double() + 3 * (a.double() @ b.double())
    rounded = accumulate(total, a, b, 0.5, 3.0, half).double()
    error = float((rounded - exact).norm() / exact.norm())
    assert (1e-4 < error < 1e-2) if half else error < 1e-6
    rounded_canceling = accumulate(total, a, b, 0.5, 3.0, half, cancels=True).double()
    assert (
        float((rounded_canceling - exact).norm() / exact.norm()) < 1e-6
    )  # on a CPU; a GPU keeps sums anyway
    alone = multiply(a, b[0], half).double()
    error = float((alone - a.double() @ b[0].double()).norm() / alone.norm())
    assert (1e-4 < error < 1e-2) if half else error < 1e-6
    zero = torch.zeros(2, 4, 5)
    assert torch.equal(accumulate(total, zero, b, 1.0, 1.0, half), total)


# Chunks of candidates


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_chunks_of_candidates_give_the_same_results(objective, outputs):
    for measure in [True, False]:
        for surrogate in ["sigmoid", "softplus"]:
            for hidden, bias in (((5, 6), "all"), ((5, 6, 4), "none"), ((5, 4, 6, 3), "hidden")):
                for layers in ("all", "first"):
                    case = attack_case(MLP((*hidden, outputs), bias), objective, outputs, (5,), 11)
                    problem = Problem(
                        case.model,
                        objective,
                        case.knowledge,
                        case.labels,
                        surrogate=surrogate,
                        layers=layers,
                    )
                    assert problem.explicit.plan(2, 11).count == 1
                    unchunked = problem.evaluate(case.x, case.lam, SHARPNESS, measure)
                    expected = (
                        unchunked.loss,
                        unchunked.layers,
                        unchunked.grad_x,
                        unchunked.grad_lam,
                    )
                    plans = set()
                    for chunk, workspace in ((1, 1), (9000, 1), (9000, 9000), (20_000, 9000)):
                        problem.explicit.chunk, problem.explicit.workspace = chunk, workspace
                        plan = problem.explicit.plan(2, 11)
                        plans.add((plan.size, plan.cached))
                        chunked = problem.evaluate(case.x, case.lam, SHARPNESS, measure)
                        assert_same(chunked, expected, 1e-12)
                    assert (1, 0) in plans
                    assert any(kept_count > 0 for _, kept_count in plans)


def test_chunks_cover_all_candidates_and_keep_to_the_workspace():
    with torch.device("meta"):
        model = MLP((784, 1000, 1000, 1))
    target = dict(model.state_dict())
    equation = ExplicitEquation([model], target, [1.0, 1.0, 1.0])
    per_candidate = 4 * (2 * 2000 + 1)
    for runs, m in ((1, 1000), (16, 200), (1, 26_000), (1, 100_000), (4, 77_777), (1, 10**7)):
        plan = equation.plan(runs, m)
        assert plan.size * (plan.count - 1) < m <= plan.size * plan.count
        assert 0 <= plan.cached <= plan.count
        if plan.count > 1:
            assert plan.cached * plan.size * runs * per_candidate <= equation.workspace
    assert [equation.plan(1, m).count == 1 for m in (1000, 26_000, 30_000)] == [True, True, False]
    kept_count = equation.plan(1, 100_000)
    assert kept_count.cached == kept_count.count > 1  # nothing is computed twice
    assert equation.plan(1, 10**7).cached < equation.plan(1, 10**7).count


def test_an_attack_in_chunks_is_the_attack_at_once():
    case = attack_case(MLP((5, 6, 4, 3)), MulticlassKKT(), 3, (5,), 4)
    config = Auto(
        steps=40, restarts=2, layers="all", lr_x=1e-3, lr_lam=1e-3, sigma=1.0, sharpness=4.0
    )
    ends = []
    for workspace in (2**30, 2000):
        solver = Solver(case.model, MulticlassKKT(), Knowledge(), config, (5,), 3, 9)
        solver.problem.explicit.workspace = solver.problem.explicit.chunk = workspace
        ends.append(search(solver))
    assert solver.problem.explicit.plan(2, 9).count > 1
    assert close(ends[1].x, ends[0].x, 1e-10)
    assert close(ends[1].lam, ends[0].lam, 1e-10)
