"""Explicit forward, backward and double backward of the one equation, for MLPs and R runs at once.

    L = sum_l w_l || target_l - T_l ||^2,    T_l = sum_i d_l(x_i) (a_{l-1}(x_i), 1)^T

Forward        z_l = a_{l-1} W_l^T + b_l,  a_l = s(z_l)
Backward       d_D = u,  d_{l-1} = (d_l W_l) o s'(z_{l-1})
Adjoints       with E_l = dL/dT_l = -2 w_l (target_l - T_l):
  of d         dbar_l = a_{l-1} E_l^T + 1 e_l^T + (dbar_{l-1} o s'(z_{l-1})) W_l^T       (l upwards)
  of z         zbar_l = dbar_l o (d_{l+1} W_{l+1}) o s''(z_l) + abar_l o s'(z_l)
  of a         abar_{l-1} = d_l E_l + zbar_l W_l                                          (l downwards)

x: (R, m, d); u: (R, m, C); weights are shared by all runs. s' is the surrogate's backward rule
wherever a derivative of s appears, as automatic differentiation of the surrogate has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.networks import MLP, Activation
from residuum.stationarity import Theta

# covectors(point, outputs) returns u and a function that takes ubar, the derivative in u, and
# returns the derivative in the outputs (None where u does not depend on them).
Pullback = Callable[[Tensor], Tensor | None]
Covectors = Callable[[int, Tensor], tuple[Tensor, Pullback]]


@dataclass(frozen=True)
class Residual:
    """loss: (R,); parts: (R, L) squared residual of each layer; grad_x: like x."""

    loss: Tensor
    parts: Tensor
    grad_x: Tensor


@dataclass
class _Pass:
    """What one gradient point leaves for the adjoint. Lists run over layers, first to last."""

    inputs: list[Tensor]
    pre: list[Tensor]
    slopes: list[Tensor]
    ungated: list[Tensor]
    signals: list[Tensor]
    pullback: Pullback


class ExplicitEquation:
    """The objective at one or several gradient points (theta, theta0), each an MLP of one shape.

    layer_weights: w_l; a layer of weight zero is measured and drives nothing.
    """

    def __init__(
        self, points: Sequence[MLP], target: Theta, layer_weights: Sequence[float]
    ) -> None:
        self.points = [
            [(p.weight.detach(), _bias(p.bias)) for p in point.linears] for point in points
        ]
        depth = len(self.points[0])
        self.target = [
            (target[f"layers.{i}.weight"].detach(), _bias(target.get(f"layers.{i}.bias")))
            for i in range(depth)
        ]
        self.layer_weights = tuple(layer_weights)
        first = self.target[0][0]
        self._weights = torch.tensor(self.layer_weights, dtype=first.dtype, device=first.device)

    def evaluate(
        self, x: Tensor, activation: Activation, covectors: Covectors, measure: bool = True
    ) -> Residual:
        """Loss, per-layer squared residuals and the gradient in x; covectors get their own.

        measure=False leaves out what only a reader needs, loss and residuals, and returns zeros.
        """
        passes = [
            self._pass(point, x, activation, lambda outputs, i=i: covectors(i, outputs))  # type: ignore[misc]
            for i, point in enumerate(self.points)
        ]
        errors, parts = self._errors(passes, measure)
        grad_x: Tensor | None = None
        for point, one in zip(self.points, passes, strict=True):
            part = self._adjoint(point, one, errors, activation)
            grad_x = part if grad_x is None else grad_x.add_(part)
        assert grad_x is not None
        return Residual(parts @ self._weights, parts, grad_x)

    def _pass(
        self,
        layers: list[tuple[Tensor, Tensor | None]],
        x: Tensor,
        activation: Activation,
        covectors: Callable[[Tensor], tuple[Tensor, Pullback]],
    ) -> _Pass:
        inputs, pre = [x], []
        for i, (weight, bias) in enumerate(layers):
            z = inputs[-1] @ weight.T
            pre.append(z if bias is None else z.add_(bias))
            if i < len(layers) - 1:
                inputs.append(activation(pre[-1]))
        slopes = [activation.derivative(z) for z in pre[:-1]]
        u, pullback = covectors(pre[-1])
        signals, ungated = [u], []
        for i in range(len(layers) - 1, 0, -1):
            ungated.append(signals[-1] @ layers[i][0])
            signals.append(ungated[-1] * slopes[i - 1])
        return _Pass(inputs, pre, slopes, ungated[::-1], signals[::-1], pullback)

    def _errors(
        self, passes: list[_Pass], measure: bool
    ) -> tuple[list[tuple[Tensor, Tensor | None] | None], Tensor]:
        """E_l for weight and bias of each layer (None where w_l = 0), and (R, L) squared norms."""
        errors: list[tuple[Tensor, Tensor | None] | None] = []
        runs = len(passes[0].inputs[0])
        parts = passes[0].inputs[0].new_zeros(runs, len(self.target))
        for i, (weight, bias) in enumerate(self.target):
            w = self.layer_weights[i]
            if not (w or measure):
                errors.append(None)
                continue
            scale = -2 * w if w else 1.0  # products with the factor of E_l folded in
            e: Tensor = weight.expand(runs, *weight.shape)
            for k, one in enumerate(passes):
                beta = scale if k == 0 else 1.0
                e = torch.baddbmm(
                    e, one.signals[i].transpose(1, 2), one.inputs[i], beta=beta, alpha=-scale
                )
            e_bias = None
            if bias is not None:
                e_bias = scale * (bias - sum(one.signals[i].sum(1) for one in passes))
            if measure:
                parts[:, i] = e.square().sum((1, 2)) / scale**2
                if e_bias is not None:
                    parts[:, i] += e_bias.square().sum(1) / scale**2
            errors.append((e, e_bias) if w else None)
        return errors, parts

    def _adjoint(
        self,
        layers: list[tuple[Tensor, Tensor | None]],
        one: _Pass,
        errors: list[tuple[Tensor, Tensor | None] | None],
        activation: Activation,
    ) -> Tensor:
        depth = len(layers)
        dbar: Tensor | None = None
        zbars: list[Tensor | None] = []
        for i in range(depth):  # up the backward chain
            below = dbar
            dbar = None
            if below is not None:
                dbar = (below * one.slopes[i - 1]) @ layers[i][0].T
            if (error := errors[i]) is not None:
                dbar = _accumulate(dbar, one.inputs[i], error[0].transpose(1, 2))
                if error[1] is not None:
                    dbar = dbar.add_(error[1][:, None])
            if i < depth - 1:
                curvature = activation.second_derivative(one.pre[i])
                zbars.append(None if dbar is None else dbar * one.ungated[i] * curvature)
        assert dbar is not None
        zbar = one.pullback(dbar)
        for i in range(depth - 1, -1, -1):  # down the forward chain
            abar = None if zbar is None else zbar @ layers[i][0]
            if (error := errors[i]) is not None:
                abar = _accumulate(abar, one.signals[i], error[0])
            if i == 0:
                assert abar is not None
                return abar
            from_above = None if abar is None else abar * one.slopes[i - 1]
            own = zbars[i - 1]
            zbar = (
                from_above if own is None else own if from_above is None else own.add_(from_above)
            )
        raise AssertionError("an MLP has at least one layer")


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _accumulate(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b for batches of matrices, in one product."""
    return a @ b if total is None else torch.baddbmm(total, a, b)
