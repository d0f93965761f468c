"""The contract that every attack of the registry must meet. A new attack is tested here without a change.

If your attack applies to none of the networks below, add one to ``TARGETS``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import residuum as rs
from residuum.attacks import Attack, every_attack
from residuum.attacks.base import MAX_RETURNED
from residuum.errors import InputError
from residuum.io.modules import checkpoint_from_module
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction
from residuum.stationarity import parameters
from residuum.surfaces.surface import SURFACES, Surface
from residuum.training import TrainingConfig, train

CHEAP = {"steps": 3, "restarts": 1, "candidates": 4}
CHEAP_SEARCH = {"corners": {"seconds": 0.5}}  # of attacks that adapt to reference seconds


class Target(NamedTuple):
    """A trained network and what the attacker knows about it."""

    network: Network
    knowledge: Knowledge


def trained(
    arch: str, shape: tuple[int, ...], classes: int = 2, **knowledge_options: Any
) -> Target:
    """Return a small network that was trained on random samples, with its initial weights and momentum."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6, *shape, generator=generator, dtype=torch.float64)
    y = torch.arange(6) % classes if classes > 2 else 2 * (torch.arange(6) % 2) - 1
    state = train(arch, rs.Dataset(x, y), TrainingConfig(init="default", steps=20))
    network = Network(dict(state.theta), arch, input_shape=shape)
    moment = {name: theta - state.theta0[name] for name, theta in state.theta.items()}
    return Target(
        network,
        Knowledge(
            theta0=dict(state.theta0), moment=moment, value_range=(0.0, 1.0), **knowledge_options
        ),
    )


def behind_a_backbone() -> Target:
    """Return a network with a convolution before its dense layers, and a random weight update."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )
    theta0 = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.rand(6, 3, 6, 6) - 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        F.softplus(-model(x)[:, 0] * torch.tensor([1, -1] * 3)).mean().backward()
        optimizer.step()
    moment = rs.read_moment(optimizer, model)
    network = checkpoint_from_module(model, input_shape=(3, 6, 6))
    return Target(network, Knowledge(theta0=theta0, moment=moment, value_range=(-0.5, 0.5)))


def planes_through_samples() -> Target:
    """Return a layer of which twelve hyperplanes go through each of three points."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    bias = -(weight * x[torch.arange(60) // 20]).sum(1)
    last = torch.ones(1, 60, dtype=torch.float64)
    theta = {"layers.0.weight": weight, "layers.0.bias": bias, "layers.1.weight": last}
    theta0 = {name: torch.zeros_like(t) for name, t in theta.items()}
    knowledge = Knowledge(theta0=theta0, moment=dict(theta), value_range=(0.0, 1.0))
    return Target(Network(theta, "mlp:5-60-1"), knowledge)


TARGETS: dict[str, Callable[[], Target]] = {
    "mlp": lambda: trained("mlp:12-16-1", (12,)),
    "classes": lambda: trained("mlp:12-16-3", (12,), 3),
    "convolutions": lambda: trained("convnet:1x8x8-4-1", (1, 8, 8)),
    "backbone": behind_a_backbone,
    "table": planes_through_samples,
    "polynomial": lambda: trained("polynomial:4-12-1,coefficients=0/0/0/1", (4,)),
}


@cache
def target(name: str) -> Target:
    return TARGETS[name]()


def cheap(kind: type[Attack]) -> Attack:
    """The attack with little work."""
    settings = {name: value for name, value in CHEAP.items() if name in kind.model_fields}
    return kind(**settings, **CHEAP_SEARCH.get(kind.name, {}))


@cache
def surfaces(kind: type[Attack]) -> dict[str, Surface]:
    """The attack surfaces to which an attack applies, by the name of the network."""
    applicable = {}
    for name in TARGETS:
        network, knowledge = target(name)
        surface = SURFACES[kind.surface](network, knowledge)
        reason = cheap(kind).why_not(surface, knowledge)
        assert isinstance(reason, str)
        if not reason:
            applicable[name] = surface
    return applicable


def refusal(attack: Attack, surface: Surface, knowledge: Knowledge) -> str:
    """What an attack advises when it refuses a surface, "" if it does not refuse."""
    try:
        attack.run(surface, knowledge)
    except InputError as problem:
        return problem.remedy
    return ""


EVERY = pytest.mark.parametrize("name", every_attack())


@EVERY
def test_an_attack_has_a_name_a_docstring_and_settings_that_survive_json(name: str) -> None:
    kind = every_attack()[name]
    attack = cheap(kind)
    assert kind.name == name
    assert kind.__doc__
    assert kind.surface in SURFACES
    assert kind.from_json(attack.to_json()).to_json() == attack.to_json()


@EVERY
def test_an_attack_applies_to_some_network(name: str) -> None:
    assert surfaces(every_attack()[name]), f"add a network to TARGETS to which {name} applies"


@EVERY
def test_an_attack_says_why_it_does_not_apply_and_refuses(name: str) -> None:
    kind = every_attack()[name]
    for other in TARGETS.keys() - surfaces(kind).keys():
        network, knowledge = target(other)
        surface = SURFACES[kind.surface](network, knowledge)
        reason = cheap(kind).why_not(surface, knowledge)
        assert reason
        advice = f"{name} must refuse {other}: call require_applicable, or use OneShotAttack"
        assert refusal(cheap(kind), surface, knowledge), advice


@EVERY
def test_an_attack_returns_finite_candidates_and_repeats_itself(name: str) -> None:
    kind = every_attack()[name]
    for network_name, surface in list(surfaces(kind).items())[:1]:
        network, knowledge = target(network_name)
        before = copy.deepcopy(network.theta)
        results = [cheap(kind).run(surface, knowledge) for _ in range(2)]
        for result in results:
            assert isinstance(result, Reconstruction)
            assert result.attack == name
            assert result.x.shape[1:] == surface.sample_shape(knowledge)
            assert len(result.x) <= MAX_RETURNED
            assert result.x.isfinite().all()
            assert result.settings, "return settings=self.to_json(), or use OneShotAttack"
        assert torch.equal(results[0].x, results[1].x)
        for layer, weights in parameters(network.double_module).items():
            assert torch.equal(weights, before[layer].double())
