"""Kinks: training moves switching hyperplanes onto its samples, and there a gate may be anything.

Where w_j x_i + b_j = 0 exactly, the gradient at the sample has no single value: at a KKT point the
gate of the pair is some number in [0, 1]. A few per cent of the pairs of sample and neuron sit there,
and with free gates the weights are explained several times better at the true samples. The polish
starts from candidates of the stationarity attack and descends on the first layer's residual over

    x, lam, and a gate  g_ij = clamp(sigmoid(alpha z_ij) + f_ij, 0, 1)   where |z_ij| is small,

with a pull of fractional gates towards z_ij = 0, which are then linear equations on the sample.
Dense ReLU chains; automatic differentiation; one restart after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from residuum.attacks.contract import Attack, select
from residuum.attacks.objectives import OBJECTIVES, Objective
from residuum.attacks.priors import PRIORS, Prior, penalty
from residuum.checkpoints.surfaces import Surface
from residuum.networks import dense_chain
from residuum.records import Knowledge, Reconstruction
from residuum.settings import AttackConfig


@dataclass(frozen=True)
class Polish:
    """steps of Adam with these rates; band: |z| / (|w| |x|) below which a gate is free; pull: weight
    of the distances of fractional gates to their hyperplanes.
    """

    steps: int = 1000
    rate: float = 1e-3
    gate_rate: float = 1e-2
    band: float = 0.02
    pull: float = 1e-2


class Gates:
    """A dense ReLU chain whose gates near kinks are variables; x: (m, d)."""

    def __init__(self, model: nn.Module, alpha: float, band: float, like: Tensor) -> None:
        chain = dense_chain(model)
        assert chain is not None
        self.alpha, self.band = alpha, band
        self.layers = [
            (p.weight.detach().to(like), None if p.bias is None else p.bias.detach().to(like))
            for p in chain.linears
        ]

    @property
    def widths(self) -> list[int]:
        """Of the hidden layers."""
        return [len(weight) for weight, _ in self.layers[:-1]]

    def forward(self, x: Tensor, free: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
        """Outputs (m, C), the gate of every hidden layer (m, h), and the mean pull of fractional ones.

        free: (m, h) per hidden layer, what is added to the gates. They count only within ``band`` of a
            kink, by the cosine of neuron and input, where training leaves the gate undetermined;
            elsewhere the surrogate's gate stands. A gate strictly between 0 and 1 is right only on the
            kink itself: the pull draws its sample there, in proportion to how undecided the gate is.
        """
        a, gates, pull = x, [], x.new_zeros(())
        for (weight, bias), f in zip(self.layers[:-1], free, strict=True):
            z = a @ weight.T if bias is None else a @ weight.T + bias
            size = weight.norm(dim=1) * a.norm(dim=1, keepdim=True).clamp(min=1e-12)
            distance = z / size.detach()
            near = (distance.detach().abs() < self.band).to(z)
            gate = (torch.sigmoid(self.alpha * z) + f * near).clamp(0, 1)
            between = (4 * gate * (1 - gate)).detach() * near
            pull = pull + (between * (distance / self.band).square()).mean()
            gates.append(gate)
            a = z.clamp(min=0)
        weight, bias = self.layers[-1]
        return (a @ weight.T if bias is None else a @ weight.T + bias), gates, pull

    def first_layer_sum(self, x: Tensor, u: Tensor, gates: list[Tensor]) -> tuple[Tensor, Tensor]:
        """sum_i d_i x_i^T and sum_i d_i, with d the signal that reaches the first layer."""
        d = u
        for (weight, _), gate in zip(self.layers[:0:-1], gates[::-1], strict=True):
            d = (d @ weight) * gate
        return d.T @ x, d.sum(0)


def polished(
    surface: Surface,
    objective: Objective,
    found: Reconstruction,
    config: AttackConfig,
    how: Polish | None = None,
) -> Reconstruction:
    """The candidates of every restart after the polish, and what the first layer's residual became.

    Where a sample sits on a kink no side of it explains the weights, and an attack with gates by sign
    stays away from the sample. Here Adam moves candidates, multipliers and gates together on the first
    layer's equation alone, from where the search ended. Multipliers are searched over their mean size,
    so that one rate suits all.
    """
    how = how or Polish()
    names = list(surface.target)
    device, numbers = config.device, config.numbers
    target = surface.target[names[0]].to(device, numbers)
    bias = names[1] if len(names) > 1 and names[1].endswith("bias") else ""
    wanted = surface.target[bias].to(device, numbers) if bias.startswith(names[0][:-6]) else None
    size = target.square().sum() + (0 if wanted is None else wanted.square().sum())
    xs, lams = found.x.clone(), found.lam.clone()
    losses = []
    for run in range(found.restarts):
        mine = found.run == run
        x = found.x[mine].to(device, numbers).flatten(1).requires_grad_()
        lam = found.lam[mine].to(device, numbers)
        scale = float(lam.abs().mean()) or 1.0
        mu = (lam / scale).requires_grad_()
        y = found.labels[mine].to(device)
        net = Gates(surface.model(), config.surrogate.sharpness, how.band, x)
        free = [x.new_zeros(len(x), h).requires_grad_() for h in net.widths]
        priors: list[Prior] = [
            PRIORS[name](weight, knowledge=found.knowledge) for name, weight in config.priors or ()
        ]
        rates = ([x], how.rate), ([mu], how.rate), (free, how.gate_rate)
        adam = torch.optim.Adam([{"params": own, "lr": rate} for own, rate in rates])
        for _ in range(how.steps):
            outputs, gates, pull = net.forward(x, free)
            u = objective.covectors(0, outputs, y, mu * scale)
            weights, biases = net.first_layer_sum(x, u, gates)
            residual = (target - weights).square().sum()
            if wanted is not None:
                residual = residual + (wanted - biases).square().sum()
            loss = residual / size + how.pull * pull
            images = x.view(1, len(x), *found.x.shape[1:])
            loss = loss + penalty(priors, images, mu[None])[0]
            adam.zero_grad()
            loss.backward(inputs=[x, mu, *free])
            adam.step()
            with torch.no_grad():
                if objective.nonnegative:
                    mu.clamp_(min=0)
        losses.append(float(residual.detach() / size))
        xs[mine] = x.detach().view(-1, *found.x.shape[1:]).to(xs)
        lams[mine] = (mu.detach() * scale).to(lams)
    note = (
        f"kinks: gates free within {how.band:g}, first layer's squared residual {min(losses):.2g}"
    )
    better = found.replace(x=xs, lam=lams, notes=(*found.notes, note))
    return better.replace(selection=select(better))


class Kinks(Attack):
    """The stationarity attack, its candidates polished with gates that are free at kinks."""

    name = "kinks"

    def __init__(self, first: Attack) -> None:
        self.first, self.surface = first, first.surface

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Dense ReLU chains alone."""
        chain = dense_chain(surface.model())
        if chain is None or not any(isinstance(part, nn.ReLU) for part in chain.modules()):
            return "needs a chain of dense layers with ReLU between them"
        return self.first.why_not(surface, knowledge)

    def left_out(self, surface: Surface, knowledge: Knowledge) -> str:
        """It finds what the stationarity attack finds."""
        return "polishes what the stationarity attack brings back, at more time; name it to run it"

    def run(
        self, surface: Surface, knowledge: Knowledge, config: AttackConfig, **kept: Any
    ) -> Reconstruction:
        """First the stationarity attack, then the polish."""
        found = self.first.run(surface, knowledge, config, **kept)
        objective = OBJECTIVES[self.first.name].configured(config, knowledge)
        return polished(surface, objective, found, config)
