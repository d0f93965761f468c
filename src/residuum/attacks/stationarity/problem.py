"""One attack as a function of (x, lam): loss, per-layer residuals and gradients.

MLPs go through the explicit engine, any other ``nn.Module`` through automatic differentiation of
the same equation. x: (R, m, *shape) for R independent runs; lam: (R, m, *multiplier_shape).

For fixed candidates the best multipliers are a (nonnegative) least-squares problem:

    min_{lam >= floor} sum_l w_l || target_l - sum_i lam_i g_i,l ||^2

A floor is a shift: lam = floor + nu with nu >= 0 and the right side lessened by G floor. The g_i are
read off the problem itself: its gradient in lam at lam = 0 and along lam gives the right side and the
products with the Gram matrix, so every objective that is linear in lam is covered.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from residuum.attacks.stationarity.objectives import Objective
from residuum.engine.explicit import Candidates, ExplicitEquation
from residuum.engine.generic import GenericEquation
from residuum.errors import InputError, require_known
from residuum.networks import SURROGATES, Activation, dense_chain, with_surrogate
from residuum.records import Knowledge
from residuum.stationarity import Theta, by_layer, layer_squares, parameters
from residuum.surfaces.surface import CHANGE
from residuum.theory.multipliers import factor_gram, solve

MAX_UNKNOWNS = 2000  # multipliers of a run: the Gram matrix takes an evaluation for each of them


@dataclass(frozen=True)
class Evaluation:
    """loss: (R,); layers: (R, L) squared residual over squared target of each layer."""

    loss: Tensor
    layers: Tensor
    grad_x: Tensor
    grad_lam: Tensor


class Problem:
    """A network under attack: objective, target, layer weights, labels of the candidates.

    labels: (m,), or (R, m) where runs have candidates of their own.

    normalize: each layer's squared residual is divided by ||target_l||^2.
    layers: "all", "first" for the first layer's terms alone, or "auto": first for MLPs, all for
        other networks; a change of the weights is explained in every layer that moved, and never in
        a frozen one, where a gradient was there and nobody followed it.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        knowledge: Knowledge,
        labels: Tensor,
        *,
        surrogate: str = "sigmoid",
        normalize: bool = True,
        layers: str = "auto",
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> None:
        require_known(surrogate, (*SURROGATES, "none"), "No surrogate")
        base = copy.deepcopy(model).to(device, dtype).requires_grad_(False)
        points = []
        for name in objective.gradient_points():
            point = copy.deepcopy(base)
            if name == "theta0":
                assert knowledge.theta0 is not None
                start = {n: t.to(device, dtype) for n, t in knowledge.theta0.items()}
                point.load_state_dict({**point.state_dict(), **start})  # buffers stay
            points.append(point)
        self.objective = objective
        chain = dense_chain(base)
        smooth = chain is not None and not isinstance(chain.activation, nn.ReLU)
        self.surrogate = "none" if smooth else surrogate  # a surrogate stands for kinks alone
        self.labels = labels.to(device)
        # The target in the numbers of the search; what moved, in those of the release.
        surface = objective.surface_of(parameters(model), knowledge)
        self.target = objective.surface_of(parameters(base), knowledge).target
        self.groups = by_layer(self.target)
        self.scales = self.squares(self.target).tolist()
        # Of weights, a chain's layers above the first are near their start and say little.
        still = surface.name != CHANGE and chain is not None
        first_only = layers == "first" or (layers == "auto" and still)
        chosen = [
            (i == 0 or not first_only) and name in surface.equations
            for i, name in enumerate(self.groups)
        ]
        if not any(chosen):
            raise InputError("The first layer did not move.", 'Explain the others: layers="all".')
        self.layer_weights = [
            (1 / scale if normalize and scale > 0 else 1.0) if on else 0.0
            for on, scale in zip(chosen, self.scales, strict=True)
        ]
        scales = [scale if scale > 0 else 1.0 for scale in self.scales]
        self._scales = torch.tensor(scales, dtype=dtype, device=device)
        self.weights = torch.tensor(self.layer_weights, dtype=dtype, device=device)
        self.explicit: ExplicitEquation | None = None
        chains = [chain for point in points if (chain := dense_chain(point)) is not None]
        if chains:
            self.explicit = ExplicitEquation(chains, self.target, self.layer_weights)
            self.true_activation = chains[0].activation
        else:
            self.points = points
            groups = list(self.groups.values())
            self.generic = GenericEquation(points, self.target, groups, self.weights)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers, in the order of :attr:`Evaluation.layers`."""
        return tuple(self.groups)

    @property
    def empty_loss(self) -> float:
        """The loss without any candidate: the weighted squares of the target."""
        return sum(w * scale for w, scale in zip(self.layer_weights, self.scales, strict=True))

    def evaluate(
        self,
        x: Tensor,
        lam: Tensor,
        sharpness: float | Tensor = 150.0,
        measure: bool = True,
    ) -> Evaluation:
        """Loss (R,), relative squared residuals (R, L) and gradients.

        x: (R, m, *shape), lam: (R, m, ...) of the plain sum.
        sharpness: the surrogate's alpha or beta, (R, 1, 1) where runs differ in it.
        measure: False for gradients alone; loss and residuals may then be zero.
        """
        if self.explicit is None:
            return self._evaluate_generic(x, lam, sharpness)
        at, activation = self.candidates(x, lam), self.activation(sharpness)
        with torch.no_grad():
            parts, grad_x, grad_lam = self.explicit.evaluate(
                at, self.objective, activation, measure
            )
        grad_x = grad_x.view_as(x)
        if not measure:
            return Evaluation(parts[:, 0], parts, grad_x, grad_lam)
        return Evaluation(parts @ self.weights, parts / self._scales, grad_x, grad_lam)

    def with_labels(self, labels: Tensor) -> Problem:
        """The same problem for other candidates; everything else is shared."""
        other = copy.copy(self)
        other.labels = labels.to(self.labels.device)
        return other

    def labels_of(self, run: int) -> Tensor:
        """(m,) of the candidates of one run."""
        return self.labels if self.labels.ndim == 1 else self.labels[run]

    def activation(self, sharpness: float | Tensor) -> Activation:
        """That of an MLP, or what stands for it."""
        if self.surrogate == "none":
            return self.true_activation
        return SURROGATES[self.surrogate](sharpness)

    def candidates(self, x: Tensor, lam: Tensor) -> Candidates:
        """As the engine takes them."""
        return Candidates(x.flatten(2), lam, self.labels)

    def _evaluate_generic(self, x: Tensor, lam: Tensor, sharpness: float | Tensor) -> Evaluation:
        """Automatic differentiation; runs of different sharpness one after the other."""
        varied = isinstance(sharpness, Tensor) and sharpness.ndim > 0
        found = []
        for run in range(len(x)) if varied else (0,):
            own = slice(run, run + 1) if varied else slice(None)
            labels = self.labels if self.labels.ndim == 1 else self.labels[own]
            at = Candidates(x[own], lam[own], labels)
            found.append(self.generic.evaluate(self.models(sharpness, run), self.objective, at))
        parts, *gradients = (torch.cat(each) for each in zip(*found, strict=True))
        return Evaluation(parts @ self.weights, parts / self._scales, *gradients)

    def models(self, sharpness: float | Tensor, run: int) -> list[nn.Module]:
        """The network at every gradient point, with the surrogate that this run has."""
        if self.surrogate == "none":
            return self.points
        if isinstance(sharpness, Tensor) and sharpness.ndim > 0:
            sharpness = sharpness.flatten()[run]
        surrogate = SURROGATES[self.surrogate](sharpness)
        return [with_surrogate(point, surrogate) for point in self.points]

    def residual(self, models: list[nn.Module], x: Tensor, lam: Tensor, labels: Tensor) -> Theta:
        """target - sum_i grad <u_i, Phi(x_i)>, differentiable in x and lam."""
        found = dict(self.target)
        for i, model in enumerate(models):
            for name, term in self.sum_of_gradients(model, i, x, lam, labels).items():
                found[name] = found[name] - term
        return found

    def squares(self, residual: Theta) -> Tensor:
        """(L,) squared norm of every layer, weight and bias together."""
        return layer_squares(residual, self.groups.values())

    def sum_of_gradients(
        self, model: nn.Module, point: int, x: Tensor, lam: Tensor, labels: Tensor
    ) -> Theta:
        """sum_i grad <u_i, Phi(x_i)>, differentiable in x and lam; the same names as theta.

        One backward pass of sum_i <u_i, Phi(x_i)>: no gradient of a single candidate is ever formed.
        """
        fixed = parameters(model)
        leaves = {name: t.clone().requires_grad_() for name, t in fixed.items()}
        # u is evaluated at weights without gradient: the sum differentiates Phi alone, never u.
        u = self.objective.covectors(point, functional_call(model, fixed, (x,)), labels, lam)
        inner = (u * functional_call(model, leaves, (x,))).sum()
        grads = torch.autograd.grad(
            inner, list(leaves.values()), create_graph=True, materialize_grads=True
        )
        return dict(zip(leaves, grads, strict=True))


def best_multipliers(
    problem: Problem,
    x: Tensor,
    lam: Tensor,
    floor: float | None,
    scale: float,
    sharpness: float | Tensor,
) -> Tensor:
    """Stored multipliers (R, m, ...) that minimize the loss at x, each run on its own.

    floor: the least value allowed; None leaves them free. A run that has left the finite numbers,
    or none of whose gradients is alive, keeps the multipliers it has.
    """
    unknowns, solved = lam[0].numel(), []
    if unknowns > MAX_UNKNOWNS:
        return lam
    units = torch.eye(unknowns, dtype=x.dtype, device=x.device)
    for here, own in zip(x[:, None], lam[:, None], strict=True):

        def gradient(values: Tensor, here: Tensor = here, own: Tensor = own) -> Tensor:
            found = problem.evaluate(here, values.view_as(own) * scale, sharpness)
            return found.grad_lam.flatten().double() * scale

        # The loss is |target - G lam|^2 in the layers' weights, so its gradient is 2 (G'G lam - G'target):
        # at lam = 0 it gives the right side, at the i-th unit vector the i-th column of the Gram matrix.
        right = -gradient(torch.zeros_like(own)) / 2  # <g_i, target>_w
        gram, shift = torch.stack([gradient(e) / 2 + right for e in units]).cpu(), floor or 0.0
        if not bool(gram.isfinite().all()) or float(gram.trace()) <= 0:
            solved.append(own)
            continue
        # lam = floor + nu: what the floor explains already is taken off the right side.
        factor = factor_gram(gram, right.cpu() - shift * gram.sum(1))
        solved.append((shift + solve(factor, free=floor is None)).to(lam).view_as(own))
    return torch.cat(solved)


def balancing_scale(problem: Problem, x: Tensor, shape: tuple[int, ...], sharpness: float) -> float:
    """The common multiplier that makes the first explained layer's sum over x as large as its target.

    x: (1, m, ...).
    shape: of one candidate's multipliers.
    """
    ones = torch.ones(*x.shape[:2], *shape, dtype=x.dtype, device=x.device)
    # residual(s) = target - s T: from three values of s the size of T follows.
    first = next((i for i, weight in enumerate(problem.layer_weights) if weight > 0), 0)
    at = [problem.evaluate(x, s * ones, sharpness).layers[0, first] for s in (-1.0, 0.0, 1.0)]
    squared = float((at[0] + at[2]) / 2 - at[1])  # ||T||^2 / ||target||^2
    return 1 / math.sqrt(squared) if squared > 0 else 1.0
