"""Images behind a backbone: which layer, what it spans, an exact case and its control."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import residuum as rs
from residuum.attacks import every_attack
from residuum.attacks.stationarity.priors import SparseGradients
from residuum.attacks.unmixing import backbone
from residuum.attacks.unmixing.backbone import (
    Backbone,
    BackboneLayer,
    Descent,
    distance_from_span,
    find_dense_layer,
    invert_features,
    read_backbone_layer,
    select_images,
)
from residuum.errors import InputError
from residuum.io.checkpoints import as_network
from residuum.similarity import ncc
from residuum.surfaces.surface import SURFACES
from tests.unit.attacks.test_unmix import QUICK, SHAPE, blocks


class Pooling(nn.Module):
    """A convolution and a pooling that are functions, then two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 3, padding=1)
        self.dense, self.head = nn.Linear(24 * 12 * 12, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        maps = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.head(F.relu(self.dense(maps.flatten(1))))


def network() -> nn.Module:
    torch.manual_seed(3)
    return Pooling()


def planted(n: int = 6) -> tuple[nn.Module, rs.Knowledge, Tensor]:
    """A network, a moment whose dense layer mixes the features of ``n`` images, and these."""
    model, x = network(), blocks(n)
    x = x / x.abs().amax((1, 2, 3), keepdim=True)
    C = torch.relu(torch.randn(64, n, generator=torch.Generator().manual_seed(5)))
    moment = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with torch.no_grad():
        moment["dense.weight"] = C @ Backbone(model, "dense")(x)
        moment["dense.bias"] = C.sum(1)
    return model, rs.Knowledge(shape=SHAPE, value_range=(-1, 1), moment=moment), x


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> rs.attacks.Attack:
    """Few sources, and enough steps that rounding does not decide.

    The setting ``seconds`` would shorten the descents so far that rounding decides, so the constants of the
    attack are replaced.
    """
    monkeypatch.setattr(backbone, "choose_effort", lambda *_: QUICK)
    monkeypatch.setattr(backbone, "CANDIDATES", 8)
    monkeypatch.setattr(backbone, "INVERT", replace(backbone.INVERT, steps=300))
    monkeypatch.setattr(backbone, "SETTLE", replace(backbone.SETTLE, steps=250))
    return rs.attacks.BehindBackboneOptimizerState(seed=1)


def why_not(model: nn.Module, knowledge: rs.Knowledge, name: str) -> str:
    checkpoint = as_network(model, shape=SHAPE)
    attack = every_attack()[name]()
    kind = "weights" if knowledge.moment is None else attack.surface
    return attack.why_not(SURFACES[kind](checkpoint, knowledge), knowledge)


def layer_of(model: nn.Module, knowledge: rs.Knowledge) -> BackboneLayer:
    surface = SURFACES["moment"](as_network(model, shape=SHAPE), knowledge)
    layer = read_backbone_layer(surface, knowledge)
    assert isinstance(layer, BackboneLayer)
    return layer


def test_features_are_what_the_first_dense_layer_is_given_maps_and_all() -> None:
    model, x = network(), blocks(3)
    assert find_dense_layer(model, SHAPE) == ("dense", (24, 12, 12))
    by_hand = F.max_pool2d(F.relu(model.conv(x)), 2).flatten(1)
    assert torch.equal(Backbone(model, "dense")(x), by_hand)
    assert find_dense_layer(nn.Sequential(nn.Flatten(), nn.Linear(1728, 4)), SHAPE) == ("", ())
    pooled = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    assert find_dense_layer(pooled, SHAPE) == ("3", (8,))


def test_the_share_outside_is_that_of_a_projection() -> None:
    generator = torch.Generator().manual_seed(0)
    V, f = (torch.randn(k, 40, generator=generator).double() for k in (5, 7))
    V = torch.linalg.qr(V.T)[0].T
    fit = torch.linalg.lstsq(V.T, f.T).solution
    naive = (f.T - V.T @ fit).square().sum(0) / f.square().sum(1)
    assert torch.allclose(distance_from_span(V)(f), naive)


def test_training_images_lie_in_the_span_and_others_do_not() -> None:
    model, knowledge, x = planted()
    layer = layer_of(model, knowledge)
    features = Backbone(model, "dense")
    with torch.no_grad():
        assert float(distance_from_span(layer.span)(features(x)).max()) < 1e-5
        assert float(distance_from_span(layer.span)(features(blocks(6, seed=7))).min()) > 0.02


def test_images_are_recovered_from_the_optimizer_state_of_a_layer_behind_a_backbone(
    quick: rs.attacks.Attack,
) -> None:
    model, knowledge, x = planted()
    reconstruction = rs.attack(model, knowledge, quick)
    similarity = ncc(reconstruction.x, x.double()).amax(0)
    assert int((similarity > 0.9).sum()) >= 3
    assert float(similarity.min()) > 0.7
    assert float(ncc(reconstruction.x, blocks(6, seed=7).double()).max()) < 0.5
    assert reconstruction.selection is not None
    assert (
        float(ncc(reconstruction.selection.x[:4], x.double()).amax(1).min()) > 0.7
    )  # least outside first
    assert "span 6 directions" in reconstruction.notes[0]


def test_a_moment_of_nothing_gives_no_confidence(quick: rs.attacks.Attack) -> None:
    model, knowledge, _ = planted()
    noise = torch.randn(64, 8, generator=torch.Generator().manual_seed(2)) @ torch.randn(
        8, 3456, generator=torch.Generator().manual_seed(3)
    )
    assert knowledge.moment is not None
    empty = knowledge.replace(moment={**knowledge.moment, "dense.weight": noise})
    chosen = rs.attack(model, empty, quick).selection
    assert chosen is not None
    assert float(chosen.confidence.max()) < 0.01


def test_the_share_outside_orders_what_is_chosen() -> None:
    x = blocks(3).double()
    chosen = select_images(
        torch.cat([x, x]), torch.zeros(6), torch.tensor([1e-5, 5e-4, 1e-2] * 2).double()
    )
    assert chosen.members.tolist() == [2, 2, 2]
    assert chosen.confidence[0] > 0.9 > chosen.confidence[1] > 0.5 > chosen.confidence[2]


def test_a_descent_takes_its_steps() -> None:
    seen: list[int] = []

    def features(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x.flatten(1)

    x, descent = blocks(2), Descent(50, 0.01, 0.0)
    prior = SparseGradients(1.0, knowledge=rs.Knowledge(shape=SHAPE))
    missed = distance_from_span(torch.eye(1728)[:4])
    invert_features(features, x, missed, descent, prior, None)
    assert len(seen) == 51  # and once more for what is left


@pytest.mark.parametrize(("seconds", "all_steps"), [(1e-9, False), (1e9, True)])
def test_few_seconds_of_a_reference_machine_shorten_both_descents(
    seconds: float, all_steps: bool, quick: rs.attacks.Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are counted in operations, so that they do not depend on the load of this machine."""
    steps: list[int] = []

    def spy(
        _: Backbone, x: Tensor, __: object, descent: Descent, *___: object
    ) -> tuple[Tensor, Tensor]:
        steps.append(descent.steps)
        return x, torch.ones(len(x))

    # The descent is replaced, so that its steps can be counted.
    monkeypatch.setattr(backbone, "invert_features", spy)
    model, knowledge, _ = planted()
    rs.attack(model, knowledge, quick.changed(seconds=seconds))
    assert steps == ([300, 250] if all_steps else [1, 1])


def test_what_it_refuses() -> None:
    model, knowledge, _ = planted()
    assert why_not(model, knowledge, "trunk-moment") == ""
    assert "optimizer" in why_not(model, rs.Knowledge(shape=SHAPE), "trunk-moment")
    assert "neither small nor known" in why_not(model, rs.Knowledge(shape=SHAPE), "trunk")
    start = {name: p.detach() for name, p in model.named_parameters()}
    still = rs.Knowledge(shape=SHAPE, theta0=start)
    assert "equals its initial weights" in why_not(model, still, "trunk")
    dense = nn.Sequential(nn.Flatten(), nn.Linear(1728, 8), nn.Tanh(), nn.Linear(8, 2))
    assert "no dense layer lies behind" in why_not(dense, rs.Knowledge(shape=SHAPE), "trunk")
    assert knowledge.moment is not None
    full = torch.randn(64, 3456, generator=torch.Generator().manual_seed(2))
    wide = knowledge.replace(moment={**knowledge.moment, "dense.weight": full})
    assert "the 64 neurons of dense use" in why_not(model, wide, "trunk-moment")
    with pytest.raises(
        InputError, match="does not apply to this network: the initial weights of dense"
    ):
        rs.attack(model, rs.Knowledge(shape=SHAPE), rs.attacks.BehindBackbone())


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, knowledge, _ = planted()
    # A layer beyond the real limit takes gigabytes.
    monkeypatch.setattr(backbone, "MAX_BYTES", 2**18)
    assert "the limit is 0 GiB" in why_not(model, knowledge, "trunk-moment")


def test_the_moment_of_a_module_that_does_not_show_its_shape_has_its_own_names() -> None:
    model = network()
    adam = torch.optim.Adam(model.parameters())
    model(blocks(2)).sum().backward()
    adam.step()
    moment = rs.read_moment(adam, model)
    assert {*moment} == {*dict(model.named_parameters())}
    assert torch.allclose(moment["dense.weight"], 0.1 * model.dense.weight.grad)
