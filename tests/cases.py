"""Cases that tests share: more exact KKT points (the first are in ``papers/points.py``), attack cases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from papers.points import ExactPoint, grouped_samples, polynomial_point, relu_point
from residuum.attacks.stationarity.objectives import (
    NTK,
    BinaryKKT,
    Moment,
    MulticlassKKT,
    Objective,
    WeightDecay,
)
from residuum.attacks.stationarity.problem import Problem
from residuum.networks import MLP, Polynomial, PolynomialNetwork
from residuum.records import Knowledge
from residuum.stationarity import weighted_gradient


def multiclass_point(classes: int = 3, size: int = 2, dim: int = 14, seed: int = 0) -> ExactPoint:
    """Two-layer exact point with one group per class, where all rivals of every sample tie.

    kappa = C/(C-1), V = (q/kappa^3)^(1/4), lam_i = (K^-1 1)_i / (V kappa)^2, shared equally by the
    C-1 rivals; neuron (w, b) = V kappa sum_i lam_i xh_i; output V for its class, -V/(C-1) for others.
    """
    x, group = grouped_samples(classes, size, dim, seed)
    augmented = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    kappa = classes / (classes - 1)
    model = MLP((dim, classes, classes)).double()
    lam = torch.zeros(len(x), dtype=x.dtype)
    with torch.no_grad():
        for g in range(classes):
            members = (group == g).nonzero()[:, 0]
            solved = torch.linalg.solve(
                augmented[members] @ augmented[members].T, torch.ones(size, dtype=x.dtype)
            )
            v = (solved.sum() / kappa**3) ** 0.25
            lam[members] = solved / (v * kappa) ** 2
            neuron = v * kappa * (lam[members] @ augmented[members])
            model.linears[0].weight[g], model.linears[0].bias[g] = neuron[:dim], neuron[dim]
            model.linears[1].weight[:, g] = -v / (classes - 1)
            model.linears[1].weight[g, g] = v
    assert (lam > 0).all()
    per_rival = (lam / (classes - 1)).repeat_interleave(classes - 1)
    return ExactPoint(model, x, group, per_rival, group)


def weight_decay_point(loss: str, shrink: float = 0.9, seed: int = 0) -> tuple[ExactPoint, float]:
    """A two-layer network and the decay w for which theta = -(1/(n w)) sum_i l'_i grad Phi(x_i).

    One sample per group, so that all multipliers agree; theta shrunk by c has Phi_i = c^2 y_i and
    keeps lam, hence w = -y_i l'_i / (n lam).
    """
    point = relu_point(2, groups=2, size=1, seed=seed)
    with torch.no_grad():
        for p in point.model.parameters():
            p.mul_(shrink)
    margin = shrink**2
    pull = 1 / (1 + math.exp(margin)) if loss == "logistic" else 2 * (1 - margin)
    return point, pull / (len(point.x) * float(point.lam[0]))


def ntk_point(gradients: str, widths: tuple[int, ...] = (7, 9, 2), n: int = 4, seed: int = 0):
    """theta, theta0, x, lam with theta - theta0 = sum_i lam_i grad Phi(x_i) at theta, theta0 or both.

    theta = theta0 + S(theta) is a contraction for small multipliers and is iterated to rounding.
    """
    torch.manual_seed(seed)
    model = MLP(widths).double().requires_grad_(False)
    theta0 = {name: t.clone() for name, t in model.state_dict().items()}
    x = torch.randn(n, widths[0], dtype=torch.float64)
    points = ("theta", "theta0") if gradients == "both" else (gradients,)
    lam = 0.03 * torch.randn(n, len(points), widths[-1], dtype=torch.float64)
    start = MLP(widths).double()
    start.load_state_dict(theta0)
    for _ in range(60):
        change = [
            weighted_gradient(model if name == "theta" else start, x, lam[:, k])
            for k, name in enumerate(points)
        ]
        model.load_state_dict({n: theta0[n] + sum(term[n] for term in change) for n in theta0})
    return model, theta0, x, lam


def coherent_point(n: int, d: int, coherence: float, seed: int = 0) -> ExactPoint:
    """Exact cubic point on unit samples with |x_i.x_k| <= coherence, equality for some pair.

    From the orthonormal point the Gram matrix moves to the wanted one in small steps; after each,
    Newton's method on the KKT system corrects (W, a, lam), all in coordinates of span{x_i}.
    """
    start = polynomial_point(n, d, 3, "mixed", seed)
    rng = torch.Generator().manual_seed(seed)
    tilt = torch.randn(n, n, generator=rng, dtype=torch.float64).triu(1)
    tilt = coherence * (tilt + tilt.T) / tilt.abs().max()
    m = len(start.model.coefficient)
    theta = [start.model.weight.detach() @ start.x.T, start.model.coefficient.detach(), start.lam]
    unknown = torch.cat([t.flatten() for t in theta])

    def equations(unknown: Tensor, x: Tensor) -> Tensor:
        w, a, lam = unknown[: m * n].reshape(m, n), unknown[m * n : -n], unknown[-n:]
        p, b = w @ x.T, lam * start.y
        force = 3 * a[:, None] * ((p**2 * b) @ x)
        return torch.cat([(w - force).flatten(), a - p**3 @ b, start.y * (a @ p**3) - 1])

    for t in torch.linspace(0.05, 1, 20):
        x = torch.linalg.cholesky(torch.eye(n, dtype=torch.float64) + float(t) * tilt)
        for _ in range(6):
            slope = torch.func.jacrev(equations)(unknown, x)
            unknown = unknown - torch.linalg.solve(slope, equations(unknown, x))
    assert equations(unknown, x).norm() < 1e-11, "the path folds: take another seed"
    model = PolynomialNetwork(d, m, Polynomial((0, 0, 0, 1))).double()
    with torch.no_grad():
        model.weight.copy_(unknown[: m * n].reshape(m, n) @ start.x)
        model.coefficient.copy_(unknown[m * n : -n])
    return ExactPoint(model, x @ start.x, start.y, unknown[-n:], start.group)


AllLayers = partial(Problem, layers="all")

# Every objective with its options, by its key in OBJECTIVES, and the outputs it is tried with.
VARIANTS: dict[str, tuple[tuple[Objective, int], ...]] = {
    "binary-kkt": ((BinaryKKT(), 1),),
    "multiclass-kkt": (
        (MulticlassKKT("tied"), 3),
        (MulticlassKKT("tied", tolerance=2.0), 3),
        (MulticlassKKT("best"), 3),
    ),
    "weight-decay": (
        (WeightDecay(), 2),
        (WeightDecay(tied=0.7, loss="logistic"), 1),
        (WeightDecay(tied=0.7, loss="squared"), 1),
    ),
    "ntk": tuple((NTK(gradients), 2) for gradients in ("theta", "theta0", "both")),
    "moment": ((Moment(), 1), (Moment(), 3)),
}
SPREAD = [
    pytest.param(objective, outputs, id=f"{name}-{i}")
    for name, variants in VARIANTS.items()
    for i, (objective, outputs) in enumerate(variants)
]


@dataclass(frozen=True)
class AttackCase:
    """A random network, what is known, and R = 2 runs of candidates with their multipliers."""

    model: nn.Module
    objective: Objective
    knowledge: Knowledge
    labels: Tensor
    x: Tensor
    lam: Tensor

    @property
    def points(self) -> list[dict[str, Tensor]]:
        """Weights at the objective's gradient points."""
        known_tensors = {"theta": dict(self.model.state_dict()), "theta0": self.knowledge.theta0}
        return [known_tensors[name] for name in self.objective.gradient_points()]

    @property
    def target(self) -> dict[str, Tensor]:
        """theta, theta - theta0, or the moment."""
        theta = dict(self.model.state_dict())
        if isinstance(self.objective, Moment):
            return self.knowledge.moment
        if not isinstance(self.objective, NTK):
            return theta
        return {name: t - self.knowledge.theta0[name] for name, t in theta.items()}


def attack_case(
    model: nn.Module,
    objective: Objective,
    outputs: int,
    shape: tuple[int, ...],
    m: int = 4,
    seed: int = 0,
) -> AttackCase:
    """Random weights, initial weights, candidates and multipliers in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    model = model.double()
    fill = {n: 0.6 * draw(*t.shape) for n, t in model.state_dict().items()}
    model.load_state_dict(fill)
    theta0 = {name: t + 0.3 * draw(*t.shape) for name, t in fill.items()}
    knowledge = Knowledge(shape=shape, theta0=theta0)
    labels = objective.labels(m, outputs, knowledge)
    x, lam = draw(2, m, *shape), draw(2, m, *objective.multiplier_shape(outputs)).abs() / m
    if isinstance(objective, Moment):
        knowledge = knowledge.replace(moment={n: draw(*t.shape) for n, t in fill.items()})
    return AttackCase(model, objective, knowledge, labels, x, lam)
