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

Where the intermediate results of all candidates would not fit into the workspace, candidates go
through in chunks, twice: T_l is summed over chunks, then each chunk's adjoints are taken. Matrix
products of the first time are kept for the second as far as the workspace reaches (``plan``).

half=True rounds both factors of a product to bfloat16: on a GPU with bf16 matrix units the fastest mode,
sums and results in float32; on a CPU with bf16 instructions twice as fast as float32, where results are
rounded too, so that sums which cancel (``cancels``) stay in float32; on any other CPU the factors'
rounding alone, for comparison. Otherwise products are plain, in float32 as TF32 where
``matmul_precision`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from residuum.networks import MLP, Activation
from residuum.stationarity import Theta

# covectors(point, outputs, rows) returns u of these candidates and a function that takes ubar, the
# derivative in u, and returns the derivative in the outputs (None where u does not depend on them).
Pullback = Callable[[Tensor], Tensor | None]
Covectors = Callable[[int, Tensor, slice], tuple[Tensor, Pullback]]
Layers = list[tuple[Tensor, Tensor | None]]
Errors = list[tuple[Tensor, Tensor | None] | None]

WORKSPACE = 2 * 2**30  # bytes of intermediate results; what needs more goes through in chunks
CHUNK = WORKSPACE // 8  # bytes of one chunk's intermediate results
LIVE = 10  # tensors per hidden unit alive at once: five of the pass, five of its adjoint


@dataclass(frozen=True)
class Residual:
    """parts: (R, L) squared residual of each layer; grad_x: like x."""

    parts: Tensor
    grad_x: Tensor


@dataclass
class _Pass:
    """What one gradient point leaves for the adjoint. Lists run over layers, first to last.

    pre and ungated are matrix products; the rest follows from them elementwise.
    """

    inputs: list[Tensor]
    pre: list[Tensor]
    slopes: list[Tensor]
    ungated: list[Tensor]
    signals: list[Tensor]
    pullback: Pullback


@dataclass(frozen=True)
class Plan:
    """How m candidates go through: so many at a time, the products of so many chunks kept."""

    chunk: int
    kept: int
    chunks: int


class ExplicitEquation:
    """The objective at one or several gradient points (theta, theta0), each an MLP of one shape.

    layer_weights: w_l; a layer of weight zero is measured and drives nothing; workspace: bytes that
    intermediate results may take, chunk: those of one chunk of candidates.
    """

    def __init__(
        self,
        points: Sequence[MLP],
        target: Theta,
        layer_weights: Sequence[float],
        workspace: int = WORKSPACE,
        chunk: int = CHUNK,
    ) -> None:
        self.workspace, self.chunk = workspace, chunk
        self.half = False  # matrix products of bfloat16 factors; the solver sets it for its search
        self.points = [
            [(p.weight.detach(), _bias(p.bias)) for p in point.linears] for point in points
        ]
        depth = len(self.points[0])
        self.target = [
            (target[f"layers.{i}.weight"].detach(), _bias(target.get(f"layers.{i}.bias")))
            for i in range(depth)
        ]
        self.layer_weights = tuple(layer_weights)

    @property
    def widths(self) -> tuple[int, ...]:
        """d, hidden widths, outputs."""
        weights = [weight for weight, _ in self.points[0]]
        return (weights[0].shape[1], *(len(weight) for weight in weights))

    def plan(self, runs: int, candidates: int) -> Plan:
        """All at once where that fits into the workspace, in chunks otherwise."""
        _, *hidden, outputs = self.widths
        one = runs * len(self.points) * self.target[0][0].element_size()  # bytes per unit
        if candidates * LIVE * one * (sum(hidden) + outputs) <= self.workspace:
            return Plan(candidates, 1, 1)
        chunk = max(1, min(candidates, self.chunk // (LIVE * one * (sum(hidden) + outputs))))
        chunks = -(-candidates // chunk)
        chunk = -(-candidates // chunks)  # equal ones
        kept = self.workspace // (chunk * one * (2 * sum(hidden) + outputs))
        return Plan(chunk, min(chunks, kept), chunks)

    def evaluate(
        self, x: Tensor, activation: Activation, covectors: Covectors, measure: bool = True
    ) -> Residual:
        """Per-layer squared residuals and the gradient in x; covectors get their own.

        measure=False leaves out what only a reader needs, the residuals, and returns zeros.
        """
        runs, candidates = x.shape[:2]
        plan = self.plan(runs, candidates)
        if plan.chunks == 1:
            passes = self._passes(x, activation, covectors, slice(0, candidates))
            errors, parts = self._finish(self._subtract(None, passes, measure), runs, measure)
            return Residual(parts, self._adjoints(passes, errors, activation))
        sums, kept = None, {}
        chunks = [slice(i, i + plan.chunk) for i in range(0, candidates, plan.chunk)]
        for i, rows in enumerate(chunks):
            passes = self._passes(x[:, rows], activation, covectors, rows)
            sums = self._subtract(sums, passes, measure)
            if i < plan.kept:
                kept[i] = [(one.pre, one.ungated) for one in passes]
        assert sums is not None
        errors, parts = self._finish(sums, runs, measure)
        grad_x = torch.empty_like(x)
        for i, rows in enumerate(chunks):
            passes = self._passes(x[:, rows], activation, covectors, rows, kept.pop(i, None))
            grad_x[:, rows] = self._adjoints(passes, errors, activation)
        return Residual(parts, grad_x)

    def errors(self, x: Tensor, activation: Activation, covectors: Covectors) -> Errors:
        """E_l at these candidates, for ``pull`` with the residual held fixed."""
        sums: Errors | None = None
        chunk = self.plan(*x.shape[:2]).chunk
        for i in range(0, x.shape[1], chunk):
            rows = slice(i, i + chunk)
            passes = self._passes(x[:, rows], activation, covectors, rows)
            sums = self._subtract(sums, passes, False)
        assert sums is not None
        return self._finish(sums, len(x), False)[0]

    def pull(
        self, x: Tensor, errors: Errors, activation: Activation, covectors: Covectors, rows: slice
    ) -> Tensor:
        """Gradient in x of sum_l <E_l, T_l(x)> with E fixed; rows: which candidates x are."""
        return self._adjoints(self._passes(x, activation, covectors, rows), errors, activation)

    def _passes(
        self, x: Tensor, activation: Activation, covectors: Covectors, rows: slice,
        products: list[tuple[list[Tensor], list[Tensor]]] | None = None,
    ) -> list[_Pass]:  # fmt: skip
        """Forward and backward at every point; ``products`` of an earlier time are used again."""
        if products is None:
            products = [([], []) for _ in self.points]
        return [
            self._pass(point, x, activation, lambda z, i=i: covectors(i, z, rows), *products[i])  # type: ignore[misc]
            for i, point in enumerate(self.points)
        ]

    def _pass(
        self, layers: Layers, x: Tensor, activation: Activation,
        covectors: Callable[[Tensor], tuple[Tensor, Pullback]],
        pre: list[Tensor], ungated: list[Tensor],
    ) -> _Pass:  # fmt: skip
        """pre, ungated: filled where they are empty, taken as they are otherwise."""
        inputs, known = [x], bool(pre)
        for i, (weight, bias) in enumerate(layers):
            if not known:
                z = times(inputs[-1], weight.T, self.half)
                pre.append(z if bias is None else z.add_(bias))
            if i < len(layers) - 1:
                inputs.append(activation(pre[i]))
        slopes = [activation.derivative(z) for z in pre[:-1]]
        u, pullback = covectors(pre[-1])
        signals = [u]
        for i in range(len(layers) - 1, 0, -1):
            if not known:
                ungated.insert(0, times(signals[0], layers[i][0], self.half))
            signals.insert(0, ungated[i - 1 if known else 0] * slopes[i - 1])
        return _Pass(inputs, pre, slopes, ungated, signals, pullback)

    def _subtract(self, sums: Errors | None, passes: list[_Pass], measure: bool) -> Errors:
        """target_l - T_l over the candidates so far, the weight's part times -2 w_l where w_l > 0.

        None where nobody needs it.
        """
        runs = len(passes[0].inputs[0])
        found: Errors = []
        for i, (weight, bias) in enumerate(self.target):
            w = self.layer_weights[i]
            if not (w or measure):
                found.append(None)
                continue
            scale = -2 * w if w else 1.0  # products with the factor of E_l folded in
            before = None if sums is None else sums[i]
            e = weight.expand(runs, *weight.shape) if before is None else before[0]
            for k, one in enumerate(passes):
                beta = scale if before is None and k == 0 else 1.0
                signals = one.signals[i].transpose(1, 2)
                e = accumulate(e, signals, one.inputs[i], beta, -scale, self.half, cancels=True)
            rest = bias if before is None else before[1]
            if rest is not None:
                total = passes[0].signals[i].sum(1)
                for one in passes[1:]:
                    total = total + one.signals[i].sum(1)
                rest = rest - total
            found.append((e, rest))
        return found

    def _finish(self, sums: Errors, runs: int, measure: bool) -> tuple[Errors, Tensor]:
        """E_l for weight and bias of each layer (None where w_l = 0), and (R, L) squared norms."""
        parts = self.target[0][0].new_zeros(runs, len(self.target))
        errors: Errors = []
        for i, one in enumerate(sums):
            w = self.layer_weights[i]
            scale = -2 * w if w else 1.0
            if one is None:
                errors.append(None)
                continue
            e, e_bias = one[0], None if one[1] is None else scale * one[1]
            if measure:
                parts[:, i] = e.square().sum((1, 2)) / scale**2
                if e_bias is not None:
                    parts[:, i] += e_bias.square().sum(1) / scale**2
            errors.append((e, e_bias) if w else None)
        return errors, parts

    def _adjoints(self, passes: list[_Pass], errors: Errors, activation: Activation) -> Tensor:
        """The gradient in x, summed over gradient points."""
        grad_x: Tensor | None = None
        for point, one in zip(self.points, passes, strict=True):
            part = self._adjoint(point, one, errors, activation)
            grad_x = part if grad_x is None else grad_x.add_(part)
        assert grad_x is not None
        return grad_x

    def _adjoint(
        self,
        layers: Layers,
        one: _Pass,
        errors: Errors,
        activation: Activation,
    ) -> Tensor:
        depth = len(layers)
        dbar: Tensor | None = None
        zbars: list[Tensor | None] = []
        for i in range(depth):  # up the backward chain
            below = dbar
            dbar = None
            if below is not None:
                dbar = times(below * one.slopes[i - 1], layers[i][0].T, self.half)
            if (error := errors[i]) is not None:
                dbar = accumulate(dbar, one.inputs[i], error[0].transpose(1, 2), half=self.half)
                if error[1] is not None:
                    dbar = dbar.add_(error[1][:, None])
            if i < depth - 1:
                curvature = activation.second_derivative(one.pre[i])
                zbars.append(None if dbar is None else dbar * one.ungated[i] * curvature)
        assert dbar is not None
        zbar = one.pullback(dbar)
        for i in range(depth - 1, -1, -1):  # down the forward chain
            abar = None if zbar is None else times(zbar, layers[i][0], self.half)
            if (error := errors[i]) is not None:
                abar = accumulate(abar, one.signals[i], error[0], half=self.half)
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


def times(a: Tensor, weight: Tensor, half: bool = False) -> Tensor:
    """a (..., k) times a shared weight (k, n)."""
    if not half:
        return a @ weight
    a, weight = a.bfloat16(), weight.bfloat16()
    if not a.is_cuda:
        return (a @ weight).float() if cpu_has_bf16() else a.float() @ weight.float()
    flat = torch.mm(a.flatten(0, -2), weight, out_dtype=torch.float32)
    return flat.view(*a.shape[:-1], -1)


def accumulate(
    total: Tensor | None,
    a: Tensor,
    b: Tensor,
    beta: float = 1.0,
    alpha: float = 1.0,
    half: bool = False,
    cancels: bool = False,
) -> Tensor:
    """beta total + alpha a b for batches of matrices (R, m, k) and (R, k, n), in one product.

    cancels: total and product nearly cancel, so the product may not be rounded.
    """
    if total is None:
        total, beta = a.new_zeros(()), 0.0
    if not half or (cancels and not a.is_cuda):
        return torch.baddbmm(total, a, b, beta=beta, alpha=alpha)
    a, b = a.bfloat16(), b.bfloat16()
    if a.is_cuda:
        # The product comes out in float32; total never passes through bfloat16.
        product = torch.bmm(a, b, out_dtype=torch.float32)
    elif cpu_has_bf16():
        product = torch.bmm(a, b).float()
    else:
        return torch.baddbmm(total, a.float(), b.float(), beta=beta, alpha=alpha)
    return alpha * product if beta == 0 else torch.add(beta * total, product, alpha=alpha)


@lru_cache(maxsize=1)
def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 numbers itself; torch's own test, absent in old releases."""
    test = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return test is not None and bool(test())
