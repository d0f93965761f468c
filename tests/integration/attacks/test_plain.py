"""The attack in one file: `residuum.attack` is its equal, and any module can be attacked by it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import residuum as rs
from residuum.attacks.stationarity import plain
from residuum.attacks.stationarity.objectives import (
    NTK,
    OBJECTIVES,
    BinaryKKT,
    MulticlassKKT,
    Objective,
    WeightDecay,
)
from residuum.errors import InputError
from residuum.stationarity import by_layer
from tests import victims
from tests.cases import polynomial_point
from tests.reference import naive_objective

M, STEPS, TIGHT = 6, 50, 1e-12
NETWORKS = {
    "mlp": ("mlp:6-20-15-{}", (6,), "first"),
    "mlp-all-layers": ("mlp:6-20-{},bias=all", (6,), "all"),
    "mlp-wide": ("mlp:9-20-15-{}", (9,), "first"),
    "convnet": ("convnet:1x5x5-4-5-{}", (1, 5, 5), "all"),
    "polynomial": ("polynomial:6-15-{},coefficients=0/0.5/0/1", (6,), "all"),
}


@dataclass(frozen=True)
class Case:
    """An objective, and the outputs, settings and knowledge with which `residuum.attack` has it."""

    objective: Objective
    outputs: int
    settings: dict
    granted: dict = field(default_factory=dict)


CASES = {
    "binary": Case(BinaryKKT(), 1, {"name": "binary-kkt"}),
    "tied-rivals": Case(MulticlassKKT(), 3, {"name": "multiclass-kkt"}),
    "best-rival": Case(MulticlassKKT("best"), 3, {"name": "multiclass-kkt", "rivals": "best"}),
    "decay-free": Case(WeightDecay(), 1, {"name": "weight-decay"}),
    "decay-free-many": Case(WeightDecay(), 3, {"name": "weight-decay"}),
    **{
        f"decay-{loss}": Case(
            WeightDecay(1 / 0.09, loss),
            1,
            {"name": "weight-decay"},
            {"loss": loss, "weight_decay": 0.01, "sample_count": 9},
        )
        for loss in ("logistic", "squared")
    },
    **{
        f"ntk-{place}": Case(NTK(place), 1, {"name": "ntk", "gradients": place})
        for place in ("theta", "theta0", "both")
    },
}
PAIRS = [
    (case, network)
    for network in NETWORKS
    for case in CASES
    if (network != "mlp-wide" and network != "polynomial") or CASES[case].outputs == 1
]


def close(a, b, tolerance=TIGHT):
    return a.shape == b.shape and float((a - b).norm()) <= tolerance * float(b.norm())


def assert_same(actual, expected, tolerance=TIGHT):
    """found: one restart; wanted: the same restart of `residuum.attack`."""
    assert actual.steps.tolist() == expected.steps.tolist()
    assert actual.layer_names == expected.layer_names
    assert actual.attack == expected.attack
    assert torch.equal(actual.labels, expected.labels)
    for name in ("x", "lam", "loss", "layers"):
        assert close(getattr(actual, name), getattr(expected, name), tolerance), name


def one_restart(actual, restart):
    mask = actual.run == restart
    fields = {name: getattr(actual, name)[mask] for name in ("x", "lam", "labels")}
    return actual.replace(loss=actual.loss[[restart]], layers=actual.layers[[restart]], **fields)


def attack_both_ways(network, case, restarts=1, theta0=None, **settings):
    """Every restart in plain, and the same ones of `residuum.attack`."""
    arch, shape, layers = NETWORKS[network]
    arch = arch.format(case.outputs)
    model = build(arch)
    start = {name: t + 0.3 * torch.randn_like(t) for name, t in model.state_dict().items()}
    knowledge = rs.Knowledge(
        shape=shape,
        value_range=(-0.4, 0.5),
        mean=torch.full(shape, 0.1),
        theta0={**start, **(theta0 or {})},
        **case.granted,
    )
    common = {"candidates": M, "steps": STEPS, "layers": layers, "seed": 3, **settings}
    config = rs.attacks.make_attack(restarts=restarts, dtype="float64", **common, **case.settings)
    engine_result = rs.attack(rs.Network(dict(model.state_dict()), arch), knowledge, config)
    plain_results = [
        plain.attack(model, case.objective, knowledge, restart=i, **common) for i in range(restarts)
    ]
    return plain_results, [one_restart(engine_result, i) for i in range(restarts)]


def build(arch):
    torch.manual_seed(0)
    return rs.Architecture.parse(arch).build()


@pytest.mark.parametrize(("case", "network"), PAIRS)
def test_the_engine_equals_the_plain_attack(case, network):
    (actual,), (expected,) = attack_both_ways(network, CASES[case])
    assert_same(actual, expected)
    assert actual.steps.tolist() == [0, 25, 50]
    assert float(actual.loss.min()) < float(actual.loss[0, 0])  # something was found, and kept


def test_restarts_rates_and_priors_are_the_same():
    settings = {
        "lr_x": 0.02,
        "lr_lam": 0.005,
        "lr_decay": 0.3,
        "sigma": 0.4,
        "priors": (("haim2022-box", 0.3), ("multiplier-floor", 2.0), ("total-variation", 0.01)),
    }
    actual, expected = attack_both_ways("convnet", CASES["binary"], restarts=2, **settings)
    for a, b in zip(actual, expected, strict=True):
        assert_same(a, b)
    assert not close(actual[0].x, actual[1].x, 0.1)
    for name in settings:
        other_settings = {key: value for key, value in settings.items() if key != name}
        (other,), _ = attack_both_ways("convnet", CASES["binary"], **other_settings)
        assert not close(other.lam, actual[0].lam, 1e-6), f"{name} changes nothing"


@pytest.mark.parametrize("case", ["binary", "tied-rivals", "best-rival"])
def test_the_sparse_prior_is_the_same(case):
    actual, expected = attack_both_ways(
        "convnet", CASES[case], restarts=2, priors=(("sparse-gradients", 0.5),)
    )
    for a, b in zip(actual, expected, strict=True):
        assert_same(a, b)
    (without,), _ = attack_both_ways("convnet", CASES[case], priors=())
    assert not close(without.lam, actual[0].lam, 1e-6)


def test_sharpness_is_the_same():
    model, knowledge = build("mlp:6-9-1"), rs.Knowledge(shape=(6,))
    common = {"candidates": M, "steps": STEPS, "layers": "all"}
    config = rs.attacks.Auto(restarts=1, sharpness_from=3, sharpness=30, **common)
    engine_result = rs.attack(model, knowledge, config)
    plain_result = plain.attack(model, BinaryKKT(), knowledge, sharpness=(3, 30), **common)
    assert_same(plain_result, engine_result)
    assert not close(plain.attack(model, BinaryKKT(), knowledge, **common).x, engine_result.x, 1e-3)


def test_layers_that_never_moved_are_measured_and_not_explained():
    theta = build("mlp:6-20-1,bias=all").state_dict()
    for layer in ("layers.0", "layers.1"):
        frozen = {name: t for name, t in theta.items() if name.startswith(layer)}
        (actual,), (expected,) = attack_both_ways(
            "mlp-all-layers", CASES["ntk-theta"], theta0=frozen
        )
        assert_same(actual, expected)
        still = actual.layer_names.index(layer)
        assert close(actual.loss, actual.layers[:, :, 1 - still])
        assert (actual.layers[:, :, still] > 0).all()


def test_a_frozen_first_layer_alone_cannot_be_explained():
    model, start = build("mlp:6-20-1"), dict(build("mlp:6-20-1").state_dict())
    start["layers.1.weight"] = start["layers.1.weight"] + 1
    knowledge = rs.Knowledge(shape=(6,), theta0=start)
    with pytest.raises(InputError, match="training did not change the first layer"):
        plain.attack(model, NTK(), knowledge, candidates=M, layers="first")
    with pytest.raises(InputError, match="training did not change the first layer"):
        rs.attack(model, knowledge, rs.attacks.NTK(candidates=M, layers="first"))


# An objective without a derivative of its own


@dataclass(frozen=True)
class Pulled(Objective):
    """u_i = lam_i y_i sigmoid(-y_i Phi_i), of which nobody has written down the derivative."""

    name: ClassVar[str] = "pulled"

    def covectors(self, point, outputs, labels, lam):
        y = labels.to(lam.dtype)[..., None]
        return y * lam[..., None] * torch.sigmoid(-y * outputs)


def test_an_objective_of_covectors_alone_runs_on_the_engine_and_in_plain(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "pulled", Pulled)
    for network in ("mlp", "convnet"):
        (actual,), (expected,) = attack_both_ways(network, Case(Pulled(), 1, {"name": "pulled"}))
        assert_same(actual, expected)
        (binary,), _ = attack_both_ways(network, CASES["binary"])
        assert not close(actual.x, binary.x, 1e-6)


# Any module


class Skip(nn.Module):
    """A network with a connection past a layer, its forward its own."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(6, 9), nn.Linear(9, 9, bias=False)
        self.last, self.gate = nn.Linear(9, 2), nn.ReLU()

    def forward(self, x):
        h = self.gate(self.first(x))
        return self.last(h + self.gate(self.inner(h)))


def skip_forward(theta, x, activation):
    h = activation(theta["first.weight"] @ x + theta["first.bias"])
    h = h + activation(theta["inner.weight"] @ h)
    return theta["last.weight"] @ h + theta["last.bias"]


@pytest.mark.parametrize("objective", [MulticlassKKT(), NTK("both")])
def test_a_module_of_ones_own_has_the_loss_of_the_naive_loop(objective):
    torch.manual_seed(0)
    model, start = Skip(), Skip()
    theta0 = {name: p.detach() for name, p in start.named_parameters()}
    before = copy.deepcopy(model.state_dict())
    knowledge = rs.Knowledge(shape=(6,), theta0=theta0)
    reconstruction = plain.attack(
        model, objective, knowledge, candidates=M, steps=100, sharpness=(4.0, 4.0), lr_x=0.03
    )
    assert float(reconstruction.loss[0, -1]) < 0.8 * float(reconstruction.loss[0, 0])
    theta = {name: t.double() for name, t in before.items()}
    points = [
        theta if place == "theta" else {name: t.double() for name, t in theta0.items()}
        for place in objective.gradient_points()
    ]
    target = objective.create_surface(theta, knowledge).target
    layers = {
        layer: (1 / sum(float(target[n].square().sum()) for n in names), names)
        for layer, names in by_layer(target).items()
    }
    loss, _, _, _ = naive_objective(
        skip_forward,
        points,
        target,
        layers,
        objective,
        reconstruction.labels,
        reconstruction.x,
        reconstruction.lam,
        "sigmoid",
        4.0,
    )
    assert float(loss) == pytest.approx(float(reconstruction.loss.min()), rel=1e-12)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.training  # the caller's own module is left as it was
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


class Cubes(nn.Module):
    """a . (W x)^3 + b . (V x)^3: the neurons of a cubic network in two branches."""

    def __init__(self, weight, coefficient):
        super().__init__()
        half = len(coefficient) // 2
        self.w, self.v = (nn.Parameter(tensor.clone()) for tensor in (weight[:half], weight[half:]))
        self.a, self.b = (
            nn.Parameter(tensor.clone()) for tensor in (coefficient[:half], coefficient[half:])
        )

    def forward(self, x):
        return ((x @ self.w.T) ** 3 @ self.a + (x @ self.v.T) ** 3 @ self.b)[:, None]


def test_samples_of_an_exact_point_are_recovered_unless_its_weights_are_shuffled():
    """Directions, since an odd power leaves the length to the multiplier and the sign to the label."""
    point = polynomial_point(3, 8, 3)
    weight, coefficient = point.model.weight.detach(), point.model.coefficient.detach()
    generator = torch.Generator().manual_seed(0)
    mixed = weight.flatten()[torch.randperm(weight.numel(), generator=generator)].view_as(weight)
    rates = {"lr_x": 0.03, "lr_lam": 0.03, "lr_decay": 0.01, "sigma": 0.3}
    knowledge = rs.Knowledge(shape=(8,), label_balance=(2.0, 1.0))
    ends = []
    for model in (Cubes(weight, coefficient), Cubes(mixed, coefficient)):
        reconstruction = plain.attack(
            model, BinaryKKT(), knowledge, candidates=3, steps=400, **rates
        )
        similarity = F.cosine_similarity(point.x[:, None], reconstruction.x[None], dim=-1).abs()
        ends.append((float(reconstruction.loss.min()), float(similarity.max(1).values.min())))
    (loss, least), (other_loss, other_least) = ends
    assert loss < 1e-12
    assert least > 1 - 1e-10
    assert other_loss > 0.1
    assert other_least < 0.9


def test_digits_are_recovered_from_a_trained_network_and_not_from_an_untrained_one():
    recovered = {}
    for name in ("leaky", "untrained"):
        checkpoint, split = victims.VICTIMS[name]()
        knowledge = rs.Knowledge(shape=(1, 8, 8), value_range=(0, 1), mean=split.train.mean)
        reconstruction = plain.attack(
            checkpoint.copy_module(),
            BinaryKKT(),
            knowledge,
            candidates=80,
            steps=300,
            layers="first",
        )
        recovered[name] = rs.score(reconstruction.x, split.train, split.holdout).metrics["ncc"]
    assert recovered["leaky"].recovered >= 3
    assert recovered["leaky"].p_value < 0.01
    assert recovered["untrained"].p_value > 0.1


def test_the_shape_of_a_sample_must_be_known():
    with pytest.raises(InputError, match="shape of one training sample"):
        plain.attack(Skip(), MulticlassKKT(), rs.Knowledge(), candidates=M)
    with pytest.raises(InputError, match="needs one output"):
        plain.attack(Skip(), BinaryKKT(), rs.Knowledge(shape=(6,)), candidates=M)
