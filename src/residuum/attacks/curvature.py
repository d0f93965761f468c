"""The splitting matrix as an operator (Shen et al. 2026, section 5).

    S(x_i) = -2 sum_p w_p r_p Hess_x f_p(x_i),     f(x_i) = grad_theta <u_i, Phi(theta; x_i)>

r = target - sum_i f(x_i) is held fixed, w are the layers' weights in the loss, and u_i carries the
multiplier lam_i, so that no factor lam_i is written. Splitting x_i into x_i +- eta v, half the
multiplier each, keeps the loss even in eta and changes it by

    eta^2 / 2 v'S v + O(eta^4)

so a direction of negative curvature of S lowers it, also where the Hessian of the loss, which is S
plus the square 2 |sum_i f'(x_i)[v_i]|^2, has none. Tied multipliers move with the candidates'
outputs inside f; which rivals count in a multiclass objective is held fixed.

x, v: (R, m, *shape); lam: (R, m, ...); the products are forward-mode derivatives of the engine's
gradient for MLPs, and automatic differentiation three times over for any other network.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from residuum.attacks.problem import Problem
from residuum.networks import Polynomial


class Curvature:
    """Products with S at one point (x, lam), for all candidates at once; r is computed here."""

    def __init__(self, problem: Problem, x: Tensor, lam: Tensor, sharpness: float | Tensor) -> None:
        self.problem, self.x, self.lam, self.sharpness = problem, x, lam, sharpness
        if problem.explicit is not None:
            with torch.no_grad():
                self.errors = problem.explicit.errors(
                    problem.candidates(x, lam), problem.objective, problem.activation(sharpness)
                )
        else:
            self.residuals = [self._residual(run) for run in range(len(x))]

    def split(self, v: Tensor, rows: slice = slice(None)) -> Tensor:
        """S(x_i) v_i for these candidates; v: like x[:, rows]."""
        problem, x = self.problem, self.x[:, rows]
        if problem.explicit is None:
            found = [self._split_generic(run, x[run], v[run], rows) for run in range(len(x))]
            return torch.stack(found)
        at = problem.candidates(self.x, self.lam)[rows]
        # Gradients are enabled for the surrogate's own derivative rule; nothing requires any.
        with torch.enable_grad(), forward_ad.dual_level():
            at = replace(at, x=forward_ad.make_dual(at.x, v.flatten(2)))
            activation = problem.activation(self.sharpness)
            gradient, _ = problem.explicit.pull(at, self.errors, problem.objective, activation)
            return _tangent(gradient, at.x).view_as(x)

    def slope(self, x: Tensor, lam: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient in x and values (R, k) of sum_p -2 w_p r_p f_p for NEW candidates, r fixed.

        labels: (R, k). A value is the derivative of the loss along the candidate's multipliers.
        """
        problem = self.problem.with_labels(labels)
        if problem.explicit is None:
            pairs = [
                self._slope_generic(run, x[run], lam[run], labels[run]) for run in range(len(x))
            ]
            return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
        with torch.no_grad():
            gradient, value = problem.explicit.pull(
                problem.candidates(x, lam), self.errors, problem.objective,
                problem.activation(self.sharpness),
            )  # fmt: skip
        return gradient.view_as(x), value

    def full(self, v: Tensor) -> Tensor:
        """Hess_x L v, the whole Hessian of the loss: candidates influence each other through r."""
        problem, at = self.problem, self.problem.candidates(self.x, self.lam)
        if problem.explicit is None:
            return torch.stack([self._full_generic(run, v[run]) for run in range(len(v))])
        with torch.enable_grad(), forward_ad.dual_level():
            at = replace(at, x=forward_ad.make_dual(at.x, v.flatten(2)))
            activation = problem.activation(self.sharpness)
            found = problem.explicit.evaluate(at, problem.objective, activation, False)
            return _tangent(found.grad_x, at.x).view_as(self.x)

    def _labels(self, run: int) -> Tensor:
        labels = self.problem.labels
        return labels if labels.ndim == 1 else labels[run]

    def _sum(self, run: int, x: Tensor, lam: Tensor, labels: Tensor) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for i, model in enumerate(self.problem.models(self.sharpness, run)):
            for name, term in self.problem.sum_of_gradients(model, i, x, lam, labels).items():
                total[name] = total[name] + term if name in total else term
        return total

    @torch.enable_grad()
    def _residual(self, run: int) -> dict[str, Tensor]:
        """-2 w r of one run by parameter name."""
        total = self._sum(run, self.x[run].detach(), self.lam[run].detach(), self._labels(run))
        weights = zip(self.problem.groups.values(), self.problem.layer_weights, strict=True)
        return {
            name: (-2 * w * (self.problem.target[name] - total[name])).detach()
            for names, w in weights
            for name in names
        }

    @torch.enable_grad()
    def _slope_generic(
        self, run: int, x: Tensor, lam: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradient in x and per-candidate values of <-2 w r, f>; the values candidate by candidate."""
        xr = x.detach().requires_grad_()
        values = []
        for i in range(len(x)):
            total = self._sum(run, xr[i : i + 1], lam[i : i + 1].detach(), labels[i : i + 1])
            values.append(_inner(self.residuals[run], total))
        (gradient,) = torch.autograd.grad(torch.stack(values).sum(), xr)
        return gradient, torch.stack(values).detach()

    @torch.enable_grad()
    def _split_generic(self, run: int, x: Tensor, v: Tensor, rows: slice) -> Tensor:
        xr = x.detach().requires_grad_()
        total = self._sum(run, xr, self.lam[run, rows].detach(), self._labels(run)[rows])
        return _product(_inner(self.residuals[run], total), xr, v)

    @torch.enable_grad()
    def _full_generic(self, run: int, v: Tensor) -> Tensor:
        xr = self.x[run].detach().requires_grad_()
        total = self._sum(run, xr, self.lam[run].detach(), self._labels(run))
        loss = xr.new_zeros(())
        for names, w in zip(self.problem.groups.values(), self.problem.layer_weights, strict=True):
            for name in names:
                loss = loss + w * (self.problem.target[name] - total[name]).square().sum()
        return _product(loss, xr, v)


def residuals(problem: Problem, x: Tensor, lam: Tensor, sharpness: float | Tensor) -> Tensor:
    """(R, P) sqrt(w) r, so that the loss is the squared norm of a row (up to a constant outside)."""
    curvature = Curvature(problem, x, lam, sharpness)
    parts = []
    for i, (names, w) in enumerate(
        zip(problem.groups.values(), problem.layer_weights, strict=True)
    ):
        if w == 0:
            continue
        if problem.explicit is not None:
            error = curvature.errors[i]
            assert error is not None
            tensors = [t for t in error if t is not None]
        else:
            tensors = [torch.stack([r[n] for r in curvature.residuals]) for n in names]
        parts += [t.flatten(1) / (-2 * w**0.5) for t in tensors]
    return torch.cat(parts, 1)


def exact_degree(model: nn.Module) -> bool:
    """Whether f is a polynomial of degree at most 3 in x: then L is exactly quadratic in eta^2."""
    activation = getattr(model, "activation", None)
    one_layer = getattr(model, "hidden", 0) == 1
    return isinstance(activation, Polynomial) and activation.degree <= 3 and one_layer


def _product(value: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """Hessian of ``value`` in x times v; zero where x does not enter twice."""
    (gradient,) = torch.autograd.grad(value, x, create_graph=True, materialize_grads=True)
    if not gradient.requires_grad:
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad(gradient, x, v, allow_unused=True)
    return torch.zeros_like(x) if found is None else found


def _inner(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in b]).sum()


def _tangent(value: Tensor, like: Tensor) -> Tensor:
    tangent = forward_ad.unpack_dual(value).tangent
    return torch.zeros_like(forward_ad.unpack_dual(like).primal) if tangent is None else tangent
