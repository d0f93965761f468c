"""Networks of others: a kind registered from outside, and live modules that no string describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import residuum as rs
from residuum.attacks.stationarity.objectives import OBJECTIVES
from residuum.attacks.stationarity.problem import Problem
from residuum.errors import ArchitectureError
from residuum.io.modules import wrap_module
from residuum.networks import KINDS, MLP, Architecture, Kind, dense_chain
from residuum.records import Dataset


class Skip(nn.Module):
    """What people write: a skip connection, dropout and batch norm, registered in an odd order."""

    def __init__(self, inputs: int = 12, width: int = 30) -> None:
        super().__init__()
        self.head = nn.Linear(width, 1, bias=False)
        self.inner, self.around = nn.Linear(inputs, width), nn.Linear(inputs, width, bias=False)
        self.norm, self.drop, self.act = nn.BatchNorm1d(width), nn.Dropout(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(self.drop(self.act(self.norm(self.inner(x))) + self.around(x)))


class Wide(nn.Module):
    """An MLP without its closed forms: relu called as a module, layers of other names."""

    def __init__(self, like: MLP) -> None:
        super().__init__()
        self.first, self.second = like.linears
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x.flatten(1))))


class Gated(nn.Module):
    """Phi(x) = v . (relu(W x) * relu(U x)): homogeneous of order 3."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gate, self.value = (nn.Linear(inputs, width, bias=False) for _ in range(2))
        self.head, self.act = nn.Linear(width, 1, bias=False), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(self.act(self.gate(x)) * self.act(self.value(x)))


class GatedKind(Kind):
    """All that has to be written for one."""

    module, example = Gated, "gated:12-20-1"

    def build(self, arch: Architecture) -> nn.Module:
        return Gated(arch.widths[0], arch.widths[1])

    def describe(self, model: Gated) -> Architecture:
        width, inputs = model.gate.weight.shape
        return Architecture("gated", (inputs, width, 1))


@pytest.fixture
def gated() -> Iterator[None]:
    KINDS["gated"] = GatedKind()
    yield
    del KINDS["gated"]


def samples(seed: int = 0, count: int = 120, inputs: int = 12) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, inputs, generator=generator)
    return Dataset(x, torch.where(torch.rand(count, generator=generator) > 0.5, 1.0, -1.0))


def trained(model: nn.Module, data: Dataset, steps: int = 300) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    model.eval()
    for _ in range(steps):
        optimizer.zero_grad()
        F.softplus(-data.y * model(data.x)[:, 0]).mean().backward()
        optimizer.step()
    return model


def split_data(data: Dataset, count: int = 8) -> tuple[Dataset, Dataset]:
    return (
        data.replace(x=data.x[:count], y=data.y[:count]),
        data.replace(x=data.x[count:], y=data.y[count:]),
    )


KNOWN = rs.Knowledge(value_range=(0.0, 1.0))
GRANTED = KNOWN.replace(shape=(12,))
SHORT = rs.attacks.Auto(steps=20, restarts=1, candidates=8)


@pytest.mark.usefixtures("gated")
def test_a_kind_registered_from_outside_is_attacked_and_audited_by_its_string(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    data, control = split_data(samples())
    model = trained(Gated(12, 20), data)
    checkpoint = rs.checkpoint_from_module(model)
    assert checkpoint.arch == "gated:12-20-1"
    assert checkpoint.live is None
    path = rs.save_checkpoint(checkpoint, tmp_path / "gated.safetensors")
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    assert rs.load_checkpoint(tmp_path / "bare.pt", "gated:12-20-1").arch == checkpoint.arch
    reconstruction = rs.attack(path, KNOWN, SHORT)
    assert reconstruction.layer_names == ("gate", "value", "head")
    assert torch.isfinite(reconstruction.loss).all()
    result = rs.audit(path, data=data, holdout=control, knowledge=KNOWN, steps=20, subsets=200)
    assert result.subject == "gated:12-20-1"
    assert result.inspection.homogeneity_order == 3
    assert {a.name for a in result.attacks if a.ran} >= {"binary-kkt", "model-inversion"}
    assert result.certificate is not None
    assert result.verdict.outcome in ("leak", "inconclusive")


def test_a_kind_that_is_not_registered_is_not_known() -> None:
    with pytest.raises(
        ArchitectureError, match="a known kind of network, such as mlp; got 'gated'"
    ):
        Architecture.parse("gated:12-20-1")


def test_a_live_module_with_a_forward_of_its_own_is_audited_to_a_verdict(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data, control = split_data(samples())
    model = trained(Skip(), data)
    result = rs.audit(
        model, data=data, holdout=control, knowledge=KNOWN, budget=10, steps=20, subsets=200
    )
    assert result.subject == "module:12-1,class=Skip"
    assert result.fit is not None
    assert result.fit.train == 1
    outcome = next(a for a in result.attacks if a.name == "binary-kkt")
    assert outcome.ran
    assert set(outcome.judged) == {
        "head",
        "inner",
        "around",
        "norm",
    }  # the first is not the input's
    assert result.verdict.outcome == "inconclusive"  # so few steps explain nothing
    assert any("is run as it is" in reason for reason in result.verdict.reasons)
    assert result.certificate is not None
    assert 0 < result.certificate.residual_plain < 1
    assert result.uniqueness is None
    assert "not for this kind" in result.uniqueness_reason
    assert result.inspection.directions is None
    folder = result.save(tmp_path / "run")
    assert type(result).load(folder).subject == result.subject
    with pytest.raises(ArchitectureError, match=r"pass the module to residuum\.audit"):
        rs.audit(folder)


def test_a_live_module_is_the_network_it_computes() -> None:
    """The generic path on a kept module against the explicit engine on the same function."""
    torch.manual_seed(0)
    chain = MLP((12, 9, 1)).double()
    wrapped = wrap_module(Wide(chain), (12,))
    assert dense_chain(wrapped.copy_module()) is None
    config = rs.attacks.Auto(steps=100, restarts=2, candidates=6, layers="all", dtype="float64")
    wrapped_result, other = (
        rs.attack(network, KNOWN, config) for network in (wrapped, rs.checkpoint_from_module(chain))
    )
    torch.testing.assert_close(wrapped_result.loss, other.loss, rtol=1e-8, atol=0)
    torch.testing.assert_close(wrapped_result.x, other.x, rtol=0, atol=1e-8)


def test_the_shape_of_a_sample_is_known_or_taken_from_the_data() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3, 2)
    )
    with pytest.raises(ArchitectureError, match="needs the shape of a sample"):
        rs.attack(model, KNOWN, SHORT)
    reconstruction = rs.attack(model, KNOWN.replace(shape=(1, 4, 4)), SHORT)
    assert reconstruction.x.shape[1:] == (1, 4, 4)
    images = Dataset(torch.rand(110, 1, 4, 4), torch.arange(110) % 2)
    data, control = split_data(images)
    result = rs.audit(model, data=data, holdout=control, budget=5, steps=5, subsets=200)
    assert result.reconstructions[0].x.shape[1:] == (1, 4, 4)
    wrong = images.replace(x=images.x[..., :2])
    with pytest.raises(ArchitectureError, match="forward method of Sequential raised"):
        rs.audit(model, data=split_data(wrong)[0])


def test_a_start_of_a_kept_module_is_its_weights_and_buffers_stay() -> None:
    torch.manual_seed(0)
    model = Skip()
    start = rs.checkpoint_from_module(model, input_shape=(12,)).theta
    model(samples().x)  # in training mode: the running mean moves, the weights do not
    trained(model, split_data(samples())[0], 30)
    knowledge = GRANTED.replace(theta0=start)
    config = rs.attacks.NTK(gradients="theta0", steps=5, restarts=1, candidates=4)
    assert torch.isfinite(rs.attack(model, knowledge, config).loss).all()
    objective = OBJECTIVES["ntk"].from_settings(config, knowledge)
    built = rs.checkpoint_from_module(model, input_shape=(12,)).copy_module()
    point = Problem(built, objective, knowledge, torch.ones(4)).points[0]
    assert torch.equal(point.head.weight, start["head.weight"].double())
    assert torch.equal(point.norm.running_mean, model.norm.running_mean.double())  # type: ignore[union-attr]


@pytest.mark.parametrize("activation", [F.relu, F.gelu, torch.tanh])
def test_an_activation_called_as_a_function_runs(activation: object) -> None:
    class Functional(Skip):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(activation(self.inner(x.flatten(1))))  # type: ignore[operator]

    torch.manual_seed(0)
    model = Functional()
    del model.act
    reconstruction = rs.attack(model, GRANTED, SHORT)
    assert torch.isfinite(reconstruction.loss).all()
    assert float(reconstruction.loss[0, -1]) < float(reconstruction.loss[0, 0])


def test_closed_forms_are_for_what_a_network_offers_whatever_its_class() -> None:
    class Chain(nn.Module):
        linears, trace, signals, forward = MLP.linears, MLP.trace, MLP.signals, MLP.forward

        def __init__(self, like: MLP) -> None:
            super().__init__()
            self.layers, self.activation = like.layers, like.activation

    model = MLP((5, 4, 1))
    assert dense_chain(Chain(model)) is not None
    model.activation = nn.GELU()  # type: ignore[assignment]
    assert dense_chain(model) is None  # no derivative is offered
    assert torch.isfinite(rs.attack(model, KNOWN, SHORT).loss).all()
