"""Exact KKT points, built in closed form: no training, no tolerance to argue about.

ReLU networks: G groups of samples; the neurons of group g are active on that group alone, and all
labels of a group agree. With xh = (x, 1), Gram matrix K of a group's xh, q = 1' K^-1 1, depth L:

    u = q^(1/2L),   lam = u^(2-2L) K^-1 1,   (w, b) = u^(L-1) sum_i lam_i xh_i,
    inner weights u,   output weight y u          -> every sample on margin 1

Two-layer groups may spread over several neurons: (c_j w, c_j b), output c_j y u, sum c_j^2 = 1.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from residuum.attacks.objectives import NTK, BinaryKKT, MulticlassKKT, Objective, WeightDecay
from residuum.attacks.problem import Problem
from residuum.networks import MLP, Polynomial, PolynomialNetwork
from residuum.records import Knowledge
from residuum.stationarity import weighted_gradient


@dataclass(frozen=True)
class ExactPoint:
    """A network and samples that satisfy the KKT conditions exactly; lam: one per row."""

    model: nn.Module
    x: Tensor
    y: Tensor
    lam: Tensor
    group: Tensor


def grouped_samples(
    groups: int, size: int, dim: int, seed: int, radius: float = 2.5, noise: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Samples around the corners of a simplex, in a random rotation. Returns x (n, d), group (n,)."""
    centres = torch.eye(groups, dtype=torch.float64) - 1 / groups
    centres = centres / centres.norm(dim=1, keepdim=True) * radius * math.sqrt(max(1, groups - 1))
    x = torch.zeros(groups * size, dim, dtype=torch.float64)
    group = torch.arange(groups).repeat_interleave(size)
    x[:, :groups] = centres[group]
    for i in range(size):
        x[i::size, groups + i] = noise * (1 + 0.5 * i)
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]
    return x @ rotation, group


def relu_point(
    depth: int = 2, groups: int = 2, size: int = 3, dim: int = 12, width: int = 1, seed: int = 0
) -> ExactPoint:
    """Binary exact point of a ``depth``-layer network with a first-layer bias."""
    x, group = grouped_samples(groups, size, dim, seed)
    y = torch.where(group % 2 == 0, 1.0, -1.0).double()
    augmented = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    generator = torch.Generator().manual_seed(seed)
    lam, first, inner, last = torch.zeros(len(x), dtype=x.dtype), [], [], []
    for g in range(groups):
        members = (group == g).nonzero()[:, 0]
        solved = torch.linalg.solve(
            augmented[members] @ augmented[members].T, torch.ones(size, dtype=x.dtype)
        )
        u = solved.sum() ** (1 / (2 * depth))
        lam[members] = u ** (2 - 2 * depth) * solved
        total = lam[members] @ augmented[members]
        spread = torch.rand(width if depth == 2 else 1, generator=generator).double() + 0.3
        for c in spread / spread.norm():
            first.append(c * u ** (depth - 1) * total)
            inner.append(u)
            last.append(c * y[members[0]] * u)
    assert (lam > 0).all()
    rows = torch.stack(first)
    hidden = len(rows)
    model = MLP((dim, *[hidden] * (depth - 1), 1)).double()
    with torch.no_grad():
        model.linears[0].weight.copy_(rows[:, :dim])
        model.linears[0].bias.copy_(rows[:, dim])
        for layer in model.linears[1:-1]:
            layer.weight.copy_(torch.diag(torch.stack(inner)))
        model.linears[-1].weight.copy_(torch.stack(last)[None])
    return ExactPoint(model, x, y, lam, group)


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
        model.load_state_dict({n: theta0[n] + sum(part[n] for part in change) for n in theta0})
    return model, theta0, x, lam


def polynomial_point(
    n: int, d: int, alpha: int, labels: str = "mixed", seed: int = 0, leading: float = 1.0
) -> ExactPoint:
    """Exact point of sum_j a_j c t^alpha on orthonormal samples, alpha >= 3; labels mixed or one.

    With k_i = lam_i^(-1/(alpha-2)), the neurons are s w for w = sum_{i in I} e_i k_i x_i over subsets
    I: for odd alpha singletons and pairs with e = y, for even alpha up to three samples of one label
    with every choice of signs. f(w) = mu w, s = (alpha |w|^2)^(-1/(2 alpha-2)), a = mu / (alpha
    s^(alpha-2)), and margin 1 reads k_i^alpha sum_{I with i} s_I^2 = alpha, a contraction in k.
    """
    rng = torch.Generator().manual_seed(seed)
    x = torch.linalg.qr(torch.randn(d, d, generator=rng, dtype=torch.float64))[0][:n]
    y = torch.ones(n, dtype=torch.float64)
    if labels == "mixed":
        y[::2] = -1
    signs, mu = _neuron_signs(alpha, y, 1 + torch.arange(n) % 3)
    member, k = signs.abs(), torch.ones(n, dtype=torch.float64)
    for _ in range(2000):
        s = (alpha * (member @ k**2)) ** (-1 / (2 * alpha - 2))
        k, before = ((alpha / (s**2 @ member)) ** (1 / alpha) * k).sqrt(), k
        if (k / before - 1).abs().max() < 1e-16:
            break
    scale = leading ** (-1 / (alpha + 1))
    model = PolynomialNetwork(d, len(mu), Polynomial((*[0.0] * alpha, leading))).double()
    with torch.no_grad():
        model.weight.copy_(scale * s[:, None] * (signs * k) @ x)
        model.coefficient.copy_(scale * mu / (alpha * s ** (alpha - 2)))
    lam = k ** (2 - alpha) / (leading * scale ** (alpha - 1))
    return ExactPoint(model, x, y, lam, torch.arange(n))


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


def _neuron_signs(alpha: int, y: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """Rows e (m, n) of signed subsets, singletons ``copies`` times, and their mu (m,)."""
    n, rows, mu = len(y), [], []
    for size in (1, 2) if alpha % 2 else (1, 2, 3):
        for subset in itertools.combinations(range(n), size):
            chosen = y[list(subset)]
            if alpha % 2 == 0 and (chosen != chosen[0]).any():
                continue
            flips = itertools.product((1.0, -1.0), repeat=size - 1) if alpha % 2 == 0 else [()]
            for flip in flips:
                row = torch.zeros(n, dtype=torch.float64)
                row[list(subset)] = chosen if alpha % 2 else torch.tensor((1.0, *flip)).double()
                repeat = int(copies[subset[0]]) if size == 1 else 1
                rows += [row] * repeat
                mu += [1.0 if alpha % 2 else float(chosen[0])] * repeat
    return torch.stack(rows), torch.tensor(mu, dtype=torch.float64)


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
        known = {"theta": dict(self.model.state_dict()), "theta0": self.knowledge.theta0}
        return [known[name] for name in self.objective.gradient_points()]

    @property
    def target(self) -> dict[str, Tensor]:
        """theta, or theta - theta0."""
        theta = dict(self.model.state_dict())
        if not isinstance(self.objective, NTK):
            return theta
        return {name: t - self.knowledge.theta0[name] for name, t in theta.items()}


def attack_case(
    model: nn.Module, objective: Objective, outputs: int, shape: tuple[int, ...], m: int = 4,
    seed: int = 0,
) -> AttackCase:  # fmt: skip
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
    return AttackCase(model, objective, knowledge, labels, x, lam)
