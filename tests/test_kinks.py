"""Gates free at kinks: the first layer's sum, an exact case, and the polish."""

from __future__ import annotations

import torch
from torch import nn

import residuum as rs
from residuum.attacks.kinks import Gates, Polish, polished
from residuum.attacks.objectives import BinaryKKT
from residuum.checkpoints.surfaces import SURFACES, WEIGHTS
from residuum.networks import Architecture

ARCH, SHAPE, M = "mlp:9-12-7-1,bias=all", (9,), 4


def network():
    torch.manual_seed(0)
    return Architecture.parse(ARCH).build().double()


def test_without_freedom_the_sum_is_the_gradient_of_the_network():
    model = network()
    x = torch.randn(M, 9).double()
    u = torch.randn(M, 1).double()
    net = Gates(model, alpha=1e9, band=1e-9, like=x)
    free = [torch.ones(M, h).double() for h in net.widths]  # nowhere near a kink, so unused
    outputs, gates, pull = net.forward(x, free)
    weights, biases = net.first_layer_sum(x, u, gates)
    first = next(part for part in model.modules() if isinstance(part, nn.Linear))
    (u * model(x)).sum().backward()
    assert torch.allclose(outputs, model(x))
    assert torch.allclose(weights, first.weight.grad)
    assert torch.allclose(biases, first.bias.grad)
    assert pull == 0


def on_a_kink():
    """A network whose first neuron switches exactly at the one sample, and weights it half."""
    torch.manual_seed(1)
    x, w = torch.randn(9).double(), torch.randn(12, 9).double()
    w[0] -= (w[0] @ x) / (x @ x) * x
    gate = (w @ x > 0).double()
    gate[0] = 0.5
    v = torch.randn(1, 12).double()
    return x, w, v, torch.outer(v[0] * gate, x)


def test_a_half_open_gate_explains_what_neither_side_of_the_kink_does():
    x, w, v, target = on_a_kink()
    net = Gates.__new__(Gates)
    net.layers, net.alpha, net.band = [(w, None), (v, None)], 1e9, 0.02
    left = []
    for f in (-1.0, 0.0, 1.0):
        free = torch.zeros(1, 12).double()
        free[0, 0] = f
        _, gates, _ = net.forward(x[None], [free])
        found, _ = net.first_layer_sum(x[None], torch.ones(1, 1).double(), gates)
        left.append(float((found - target).norm() / target.norm()))
    assert left[0] > 0.05  # closed
    assert left[2] > 0.05  # open
    assert left[1] < 1e-7  # the sigmoid of zero


def test_the_polish_lowers_the_residual_and_moves_nothing_without_steps():
    model = network()
    checkpoint = rs.Checkpoint(dict(model.state_dict()), ARCH, SHAPE)
    knowledge = rs.Knowledge(shape=SHAPE)
    config = rs.AttackConfig.of(candidates=M, restarts=2, steps=30, priors=(), margins=0.0)
    found = rs.attack(checkpoint, knowledge, config)
    surface = SURFACES[WEIGHTS](checkpoint, knowledge)

    def left(how):
        after = polished(surface, BinaryKKT(), found, config, how)
        return after, float(after.notes[-1].split()[-1])

    still, before = left(Polish(steps=1, rate=0.0, gate_rate=0.0))
    assert torch.allclose(still.x, found.x)
    moved, after = left(Polish(steps=800))
    assert after < 0.9 * before
    assert not torch.allclose(moved.x, found.x, atol=1e-3)
    assert (moved.lam >= 0).all()
