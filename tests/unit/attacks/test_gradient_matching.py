"""Gradients matched for any module: the sum, both distances, an exact case and the floor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import residuum as rs
from residuum.attacks import every_attack
from residuum.attacks.inversion.gradient_matching import (
    DENSE,
    GEIPING,
    OURS,
    Problem,
    read_gradient_sum,
)
from residuum.errors import InputError
from residuum.io.checkpoints import as_network
from residuum.networks import Architecture
from residuum.similarity import ncc
from residuum.surfaces.surface import SURFACES, build_surfaces

SHAPE = (1, 8, 8)


def network() -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 6, 3, stride=2, padding=1)
    return nn.Sequential(
        conv, nn.Tanh(), nn.Flatten(), nn.Linear(96, 12), nn.Tanh(), nn.Linear(12, 3)
    )


def smooth(n: int, seed: int = 1) -> Tensor:
    """Images of one bright disc each."""
    generator = torch.Generator().manual_seed(seed)
    centers = 1 + 6 * torch.rand(n, 2, generator=generator)
    grid = torch.arange(8.0)
    squared_distance = (grid[:, None] - centers[:, 0, None, None]) ** 2 + (
        grid - centers[:, 1, None, None]
    ) ** 2
    return torch.exp(-squared_distance / 5)[:, None]


def granted(model: nn.Module, x: Tensor, y: Tensor) -> rs.Knowledge:
    """The gradient of the summed loss as a moment."""
    loss = F.cross_entropy(model(x), y, reduction="sum")
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    moment = dict(zip(dict(model.named_parameters()), gradients, strict=True))
    return rs.Knowledge(shape=SHAPE, value_range=(0, 1), moment=moment)


def problem(model: nn.Module, knowledge: rs.Knowledge, matching=GEIPING, m: int = 3) -> Problem:
    surface = SURFACES["moment"](as_network(model, shape=SHAPE), knowledge)
    return Problem(surface, knowledge, rs.attacks.Auto(candidates=m), matching)


def test_the_sum_is_the_gradient_of_the_loss_and_both_distances_vanish_there() -> None:
    model, x, y = network().double(), smooth(3).double(), torch.tensor([0, 1, 2])
    knowledge = granted(model, x, y)
    matching_problem = problem(model, knowledge)
    assert matching_problem.labels.tolist() == [0, 1, 2]
    total = {name: t.detach() for name, t in matching_problem.total(x, torch.ones(3, 3)).items()}
    assert knowledge.moment is not None
    for name, expected in knowledge.moment.items():
        assert torch.allclose(total[name], expected)
    for matching in (OURS, GEIPING, replace(OURS, distance="squared")):
        distances = matching.measure(matching_problem.target, total, matching_problem.groups)
        assert len(distances) == (3 if matching.per_layer else 1)
        assert float(distances.abs().max()) < 1e-9
    other = matching_problem.total(smooth(3, seed=2).double(), torch.ones(3, 3))
    assert (
        float(GEIPING.measure(matching_problem.target, other, matching_problem.groups).detach())
        > 0.05
    )
    half = {name: 0.5 * t for name, t in total.items()}
    assert float(OURS.measure(matching_problem.target, half, matching_problem.groups).max()) < 1e-9
    squared = replace(OURS, distance="squared").measure(
        matching_problem.target, half, matching_problem.groups
    )
    assert torch.allclose(squared, torch.full((3,), 0.25).double())


def test_the_change_of_the_weights_is_turned_into_a_gradient() -> None:
    model = network()
    start = {name: p.detach() + 0.1 for name, p in model.named_parameters()}
    surface = SURFACES["weights - start"](
        as_network(model, shape=SHAPE), rs.Knowledge(shape=SHAPE, theta0=start)
    )
    for gradient in read_gradient_sum(surface).values():
        assert torch.allclose(gradient, torch.full_like(gradient, 0.1), atol=1e-6)


@pytest.mark.parametrize("name", ["invert-moment", "geiping2020-moment"])
def test_a_sample_is_recovered_from_its_gradient(name: str) -> None:
    model, x, y = network(), smooth(1), torch.tensor([1])  # one candidate has the middle label
    knowledge = granted(model, x, y)
    config = rs.attacks.make_attack(name, candidates=1, restarts=2, steps=150, lr_x=0.03, seed=3)
    reconstruction = rs.attack(model, knowledge, config)
    assert float(ncc(reconstruction.x, x.double()).max()) > 0.9
    assert float(ncc(reconstruction.x, smooth(8, seed=9).double()).max()) < float(
        ncc(reconstruction.x, x.double()).max()
    )
    assert reconstruction.status == ("finished", "finished")
    assert float(reconstruction.loss[:, -1].min()) < 0.1 * float(reconstruction.loss[:, 0].min())


def test_a_chain_of_dense_layers_is_matched_as_one_and_gives_its_samples_back() -> None:
    torch.manual_seed(0)
    chain = Architecture.parse("mlp:64-40-3,bias=all").build()
    x, y = smooth(3), torch.tensor([0, 1, 2])
    knowledge = granted(chain, x.flatten(1), y)
    config = rs.attacks.OptimizerStateMatching(candidates=3, steps=300, lr_x=0.03, seed=3)
    reconstruction = rs.attack(chain, knowledge, config)
    assert "over the whole network, with multipliers by rivals" in reconstruction.notes[0]
    assert "the prior total-variation" in reconstruction.notes[0]
    images = reconstruction.x.reshape(-1, *SHAPE)
    assert float(ncc(images, x.double()).amax(0).min()) > 0.9
    assert float(ncc(images, smooth(3, seed=9).double()).amax(0).min()) < 0.9
    ours, floor = (every_attack()[name]() for name in ("invert-moment", "geiping2020-moment"))
    dense, trunk = (
        SURFACES["weights"](as_network(model, shape=SHAPE), rs.Knowledge(shape=SHAPE))
        for model in (chain, network())
    )
    assert (ours.choose_matching(dense), ours.choose_matching(trunk)) == (DENSE, OURS)
    assert (floor.choose_matching(dense), floor.choose_matching(trunk)) == (GEIPING, GEIPING)


def test_a_clock_shortens_it_and_says_so() -> None:
    model, x, y = network(), smooth(2), torch.tensor([0, 1])
    config = rs.attacks.OptimizerStateMatching(candidates=2, steps=10**6, seconds=0.5)
    seen = []
    reconstruction = rs.attack(model, granted(model, x, y), config, watch=seen.append)
    assert set(reconstruction.status) == {"time"}
    assert reconstruction.seconds < 5
    assert seen[0].layer_names == ("0", "3", "5")


def test_when_it_applies_and_what_an_audit_leaves_to_others() -> None:
    model, chain = network(), nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
    knowledge = granted(model, smooth(1), torch.tensor([0]))
    surface = build_surfaces(as_network(model, shape=SHAPE), knowledge)["moment"]
    weights = build_surfaces(as_network(model, shape=SHAPE), knowledge)["weights"]
    ours, floor = (every_attack()[name]() for name in ("invert-moment", "geiping2020-moment"))
    assert ours.why_not(surface, knowledge) == ours.why_skipped(surface, knowledge) == ""
    assert "optimizer" in ours.why_not(weights, knowledge)
    assert "a published attack" in floor.why_skipped(surface, knowledge)
    assert "theta0" in every_attack()["invert"]().why_not(weights, knowledge)
    dense = as_network(chain)
    assert "more accurate" in ours.why_skipped(
        build_surfaces(dense, rs.Knowledge())["weights"], rs.Knowledge()
    )
    with pytest.raises(InputError, match="initial weights"):
        rs.attack(model, knowledge, rs.attacks.GradientMatching())
