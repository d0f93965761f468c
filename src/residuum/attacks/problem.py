"""One attack as a function of (x, lam): loss, per-layer residuals and gradients.

MLPs go through the explicit engine, any other ``nn.Module`` through automatic differentiation of
the same equation. x: (R, m, *shape) for R independent runs; lam: (R, m, *multiplier_shape).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from residuum.attacks.objectives import Objective
from residuum.checkpoints.surfaces import CHANGE
from residuum.engine import Candidates, ExplicitEquation
from residuum.errors import InputError
from residuum.networks import SURROGATES, Activation, dense_chain, with_surrogate
from residuum.records import Knowledge
from residuum.stationarity import Theta, by_layer, parameters


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

    normalise: each layer's squared residual is divided by ||target_l||^2; layers: "all", "first"
    for the first layer's terms alone, or "auto": first for MLPs, all for other networks; a change of
    the weights is explained in every layer that moved, and never in a frozen one, where a gradient
    was there and nobody followed it; outside: constant part of the first layer's squared residual
    and target, see ``rowspace.py``.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        knowledge: Knowledge,
        labels: Tensor,
        *,
        surrogate: str = "sigmoid",
        normalise: bool = True,
        layers: str = "auto",
        outside: float = 0.0,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> None:
        if surrogate not in (*SURROGATES, "none"):
            raise InputError(
                f"No surrogate {surrogate!r}.", f"Use one of {', '.join(SURROGATES)} or none."
            )
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
        kinked = any(isinstance(part, nn.ReLU) for part in base.modules())
        self.surrogate = surrogate if kinked else "none"  # a surrogate stands for ReLU alone
        self.labels = labels.to(device)
        # The target in the numbers of the search; what moved, in those of the release.
        surface = objective.surface_of(parameters(model), knowledge)
        self.target = objective.surface_of(parameters(base), knowledge).target
        self.groups = by_layer(self.target)
        self.scales = [_squared(self.target, names) for names in self.groups.values()]
        self.scales[0] += outside
        # Of weights, a chain's layers above the first are near their start and say little.
        still = surface.name != CHANGE and dense_chain(base) is not None
        first_only = layers == "first" or (layers == "auto" and still)
        chosen = [
            (i == 0 or not first_only) and name in surface.equations
            for i, name in enumerate(self.groups)
        ]
        if not any(chosen):
            raise InputError("The first layer did not move.", 'Explain the others: layers="all".')
        self.layer_weights = [
            (1 / scale if normalise and scale > 0 else 1.0) if on else 0.0
            for on, scale in zip(chosen, self.scales, strict=True)
        ]
        scales = [scale if scale > 0 else 1.0 for scale in self.scales]
        self._scales = torch.tensor(scales, dtype=dtype, device=device)
        self._weights = torch.tensor(self.layer_weights, dtype=dtype, device=device)
        self._outside = torch.zeros_like(self._scales)
        self._outside[0] = outside
        self.explicit: ExplicitEquation | None = None
        chains = [chain for point in points if (chain := dense_chain(point)) is not None]
        if chains:
            self.explicit = ExplicitEquation(chains, self.target, self.layer_weights)
            self.true_activation = chains[0].activation
        else:
            self.points = points

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers, in the order of :attr:`Evaluation.layers`."""
        return tuple(self.groups)

    @property
    def empty_loss(self) -> float:
        """The loss without any candidate: the weighted squares of the target."""
        return sum(w * scale for w, scale in zip(self.layer_weights, self.scales, strict=True))

    def evaluate(
        self, x: Tensor, lam: Tensor, sharpness: float | Tensor = 150.0, measure: bool = True
    ) -> Evaluation:
        """Loss and gradients; ``sharpness`` is the surrogate's alpha or beta.

        measure=False: gradients alone, loss and residuals may be zero.
        """
        if self.explicit is None:
            return self._evaluate_generic(x, lam, sharpness)
        at, activation = self.candidates(x, lam), self.activation(sharpness)
        with torch.no_grad():
            found = self.explicit.evaluate(at, self.objective, activation, measure)
        gradients = found.grad_x.view_as(x), found.grad_lam
        if not measure:
            return Evaluation(found.parts[:, 0], found.parts, *gradients)
        parts = found.parts + self._outside
        return Evaluation(parts @ self._weights, parts / self._scales, *gradients)

    def with_labels(self, labels: Tensor) -> Problem:
        """The same problem for other candidates; everything else is shared."""
        other = copy.copy(self)
        other.labels = labels.to(self.labels.device)
        return other

    def of_run(self, run: int, there: slice | Tensor) -> Problem:
        """The problem of some candidates of one run."""
        return self.with_labels((self.labels if self.labels.ndim == 1 else self.labels[run])[there])

    def activation(self, sharpness: float | Tensor) -> Activation:
        """That of an MLP, or what stands for it."""
        if self.surrogate == "none":
            return self.true_activation
        return SURROGATES[self.surrogate](sharpness)

    def candidates(self, x: Tensor, lam: Tensor) -> Candidates:
        """As the engine takes them."""
        return Candidates(x.flatten(2), lam, self.labels)

    @torch.enable_grad()
    def _evaluate_generic(self, x: Tensor, lam: Tensor, sharpness: float | Tensor) -> Evaluation:
        """Automatic differentiation, one run after the other."""
        parts, grads_x, grads_lam = [], [], []
        varied = isinstance(sharpness, Tensor) and sharpness.ndim > 0
        for run in range(len(x)):
            if run == 0 or varied:
                models = self.models(sharpness, run)
            labels = self.labels if self.labels.ndim == 1 else self.labels[run]
            xr, lr = x[run].detach().requires_grad_(), lam[run].detach().requires_grad_()
            residual = dict(self.target)
            for i, model in enumerate(models):
                for name, term in self.sum_of_gradients(model, i, xr, lr, labels).items():
                    residual[name] = residual[name] - term
            squares = [
                torch.stack([residual[n].square().sum() for n in names]).sum()
                for names in self.groups.values()
            ]
            part = torch.stack(squares)
            gx, gl = torch.autograd.grad(part @ self._weights, (xr, lr), allow_unused=True)
            parts.append(part.detach())
            grads_x.append(torch.zeros_like(xr) if gx is None else gx)
            grads_lam.append(torch.zeros_like(lr) if gl is None else gl)
        stacked = torch.stack(parts)
        grad_x, grad_lam = torch.stack(grads_x), torch.stack(grads_lam)
        return Evaluation(stacked @ self._weights, stacked / self._scales, grad_x, grad_lam)

    def models(self, sharpness: float | Tensor, run: int) -> list[nn.Module]:
        """The network at every gradient point, with the surrogate that this run has."""
        if self.surrogate == "none":
            return self.points
        if isinstance(sharpness, Tensor) and sharpness.ndim > 0:
            sharpness = sharpness.flatten()[run]
        return [with_surrogate(point, self.activation(sharpness)) for point in self.points]

    def sum_of_gradients(
        self, model: nn.Module, point: int, x: Tensor, lam: Tensor, labels: Tensor
    ) -> Theta:
        """sum_i grad <u_i, Phi(x_i)>, differentiable in x and lam."""
        fixed = parameters(model)
        leaves = {name: t.clone().requires_grad_() for name, t in fixed.items()}
        # u is evaluated at weights without gradient: the sum differentiates Phi alone, never u.
        u = self.objective.covectors(point, functional_call(model, fixed, (x,)), labels, lam)
        inner = (u * functional_call(model, leaves, (x,))).sum()
        grads = torch.autograd.grad(
            inner, list(leaves.values()), create_graph=True, materialize_grads=True
        )
        return dict(zip(leaves, grads, strict=True))


def _squared(theta: Theta, names: list[str]) -> float:
    return float(torch.stack([theta[n].square().sum() for n in names]).sum())
