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

The cost of one evaluation is that of its matrix products. Layer l maps a = h_{l-1} inputs to b = h_l
outputs; each of its products takes 2 R m a b operations.

=====================================  =======================================================
product                                when
=====================================  =======================================================
z_l = a_{l-1} W_l^T                    always
d_l W_l                                l > 1
T_l = d_l^T a_{l-1}                    w_l > 0, or the residual is measured
a_{l-1} E_l^T,  d_l E_l                w_l > 0
(dbar_{l-1} o s') W_l^T                l > 1
zbar_l W_l                             l < L, or u depends on the outputs
z_l and d_l W_l a second time          candidates whose products did not fit into the workspace
=====================================  =======================================================

The first layer always drives the loss. Elementwise work is left out: it is bound by memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor

from residuum.networks import MLP, Activation
from residuum.stationarity import Theta

Errors = list[tuple[Tensor, Tensor | None] | None]
Products = list[tuple[list[Tensor], list[Tensor]]]  # pre and ungated of every gradient point

WORKSPACE = 2 * 2**30  # bytes of intermediate results; what needs more goes through in chunks
CHUNK = WORKSPACE // 8  # bytes of one chunk's intermediate results
LIVE = 10  # tensors per hidden unit alive at once: five of the pass, five of its adjoint
COPIES = 10  # of the candidates: state, best, two moments, those at work, gradient, temporaries


class Covectors(Protocol):
    """What the engine asks of an objective."""

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """u of these candidates."""

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """From the derivative in u to those in the outputs (None: no dependence) and in lam."""


@dataclass(frozen=True)
class Candidates:
    """x: (R, m, d); lam: (R, m, ...) multipliers of the plain sum; labels: (m,) or (R, m)."""

    x: Tensor
    lam: Tensor
    labels: Tensor

    def __getitem__(self, rows: slice) -> Candidates:
        return Candidates(self.x[:, rows], self.lam[:, rows], self.labels[..., rows])

    def of_run(self, run: int) -> Candidates:
        """Those of one run alone: x (m, ...)."""
        labels = self.labels if self.labels.ndim == 1 else self.labels[run]
        return Candidates(self.x[run], self.lam[run], labels)


@dataclass(frozen=True)
class _Pass:
    """What one gradient point leaves for the adjoint. Lists run over layers, first to last.

    inputs: a_{l-1}, (R, m, h), the first being x.
    outputs: z_D, (R, m, C).
    slopes, curvatures: s'(z_l) and s''(z_l) of the hidden layers.
    ungated: d_{l+1} W_{l+1}, before the gate.
    signals: d_l, the last being u.
    """

    inputs: list[Tensor]
    outputs: Tensor
    slopes: list[Tensor]
    curvatures: list[Tensor]
    ungated: list[Tensor]
    signals: list[Tensor]


@dataclass(frozen=True)
class Chunks:
    """How m candidates go through: so many at a time, the products of so many chunks kept."""

    chunk: int
    kept: int
    chunks: int


class ExplicitEquation:
    """The objective at one or several gradient points (theta, theta0), each an MLP of one shape.

    layer_weights: w_l; a layer of weight zero is measured and drives nothing.
    workspace: bytes that intermediate results may take, chunk: those of one chunk of candidates.
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

    def plan(self, runs: int, candidates: int) -> Chunks:
        """All at once where that fits into the workspace, in chunks otherwise."""
        _, *hidden, outputs = self.widths
        one = runs * len(self.points) * self.target[0][0].element_size()  # bytes per unit
        if candidates * LIVE * one * (sum(hidden) + outputs) <= self.workspace:
            return Chunks(candidates, 1, 1)
        chunk = max(1, min(candidates, self.chunk // (LIVE * one * (sum(hidden) + outputs))))
        chunks = -(-candidates // chunk)
        chunk = -(-candidates // chunks)  # equal ones
        kept = self.workspace // (chunk * one * (2 * sum(hidden) + outputs))
        return Chunks(chunk, min(chunks, kept), chunks)

    def evaluate(
        self,
        at: Candidates,
        objective: Covectors,
        activation: Activation,
        measure: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (R, L) squared residuals of the layers, and the gradients in x and lam.

        If ``measure`` is False, the residuals are zeros, because a step needs only the gradients.
        """
        runs, candidates = at.x.shape[:2]
        plan = self.plan(runs, candidates)
        if plan.chunks == 1:
            passes = self._passes(at, objective, activation, self._no_products())
            errors, parts = self._finish(self._subtract(None, passes, measure), runs, measure)
            grad_x, grad_lam, _ = self._adjoints(passes, errors, at, objective)
            return parts, grad_x, grad_lam
        sums, kept = None, {}
        chunks = [slice(i, i + plan.chunk) for i in range(0, candidates, plan.chunk)]
        for i, rows in enumerate(chunks):
            products = self._no_products()
            passes = self._passes(at[rows], objective, activation, products)
            sums = self._subtract(sums, passes, measure)
            if i < plan.kept:
                kept[i] = products
        assert sums is not None
        errors, parts = self._finish(sums, runs, measure)
        grad_x, grad_lam = torch.empty_like(at.x), torch.empty_like(at.lam)
        for i, rows in enumerate(chunks):
            products = kept.pop(i, self._no_products())
            passes = self._passes(at[rows], objective, activation, products)
            grad_x[:, rows], grad_lam[:, rows], _ = self._adjoints(
                passes, errors, at[rows], objective
            )
        return parts, grad_x, grad_lam

    def pre_activations(self, x: Tensor, activation: Activation) -> list[Tensor]:
        """z_l of the hidden layers at theta; x: (..., d)."""
        found = []
        for weight, bias in self.points[0][:-1]:
            found.append(x @ weight.T if bias is None else x @ weight.T + bias)
            x = activation(found[-1])
        return found

    def errors(self, at: Candidates, objective: Covectors, activation: Activation) -> Errors:
        """E_l at these candidates, for ``pull`` with the residual held fixed."""
        sums: Errors | None = None
        chunk = self.plan(*at.x.shape[:2]).chunk
        for i in range(0, at.x.shape[1], chunk):
            part = at[i : i + chunk]
            passes = self._passes(part, objective, activation, self._no_products())
            sums = self._subtract(sums, passes, False)
        assert sums is not None
        return self._finish(sums, len(at.x), False)[0]

    def pull(
        self, at: Candidates, errors: Errors, objective: Covectors, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        """Gradient in x, and per candidate (R, m) the terms, of sum_l <E_l, T_l(x)> with E fixed."""
        passes = self._passes(at, objective, activation, self._no_products())
        grad_x, _, ubars = self._adjoints(passes, errors, at, objective)
        terms = [(one.signals[-1] * ubar).sum(-1) for one, ubar in zip(passes, ubars, strict=True)]
        return grad_x, torch.stack(terms).sum(0)

    def _no_products(self) -> Products:
        return [([], []) for _ in self.points]

    def _passes(
        self, at: Candidates, objective: Covectors, activation: Activation, products: Products
    ) -> list[_Pass]:
        """Forward and backward at every point.

        products: filled where they are empty, used again otherwise; the rest follows elementwise.
        """
        matmul = self._matmul()
        found = []
        for point, (layers, (pre, ungated)) in enumerate(zip(self.points, products, strict=True)):
            inputs, slopes, curvatures, known = [at.x], [], [], bool(pre)
            for i, (weight, bias) in enumerate(layers):
                if not known:
                    z = matmul(inputs[-1], weight.T)
                    pre.append(z if bias is None else z.add_(bias))
                if i < len(layers) - 1:
                    value, slope, curvature = activation.jet(pre[i])
                    inputs.append(value)
                    slopes.append(slope)
                    curvatures.append(curvature)
            signals = [objective.covectors(point, pre[-1], at.labels, at.lam)]
            for i in range(len(layers) - 1, 0, -1):
                if not known:
                    ungated.insert(0, matmul(signals[0], layers[i][0]))
                signals.insert(0, ungated[i - 1 if known else 0] * slopes[i - 1])
            found.append(_Pass(inputs, pre[-1], slopes, curvatures, ungated, signals))
        return found

    def _matmul(self) -> Callable[[Tensor, Tensor], Tensor]:
        return partial(times, half=True) if self.half else torch.matmul

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

    def _adjoints(
        self,
        passes: list[_Pass],
        errors: Errors,
        at: Candidates,
        objective: Covectors,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the gradients in x and lam, summed over gradient points, and in u at each point."""
        grad_x: Tensor | None = None
        grad_lam, ubars = torch.zeros_like(at.lam), []
        for point, one in enumerate(passes):
            # u = d_D is where the backward chain begins, so its derivative is the last dbar; through u
            # the loss reaches lam, and the outputs where the objective looks at them.
            ubar, zbars = self._upwards(point, one, errors)
            outbar, lambar = objective.pullback(point, one.outputs, at.labels, at.lam, ubar)
            part = self._downwards(point, one, errors, outbar, zbars)
            grad_x = part if grad_x is None else grad_x.add_(part)
            grad_lam.add_(lambar)
            ubars.append(ubar)
        assert grad_x is not None
        return grad_x, grad_lam, ubars

    def _upwards(
        self, point: int, one: _Pass, errors: Errors
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Along the backward chain: the derivative in u, and each zbar_l as far as dbar_l goes."""
        layers, matmul = self.points[point], self._matmul()
        dbar: Tensor | None = None
        zbars: list[Tensor | None] = []
        for i, error in enumerate(errors):
            # d_l made d_{l-1} = (d_l W_l) o s'(z_{l-1}), so dbar_{l-1} comes back through the gate and W_l^T.
            if dbar is not None:
                dbar = matmul(dbar * one.slopes[i - 1], layers[i][0].T)
            # d_l stands in T_l itself: a_{l-1} E_l^T for the weights, e_l for the bias.
            if error is not None:
                dbar = accumulate(dbar, one.inputs[i], error[0].transpose(1, 2), half=self.half)
                if error[1] is not None:
                    dbar = dbar.add_(error[1][:, None])
            # The gate s'(z_l) of the backward chain moves with z_l: that is where s'' comes in.
            if i < len(layers) - 1:
                zbars.append(None if dbar is None else dbar * one.ungated[i] * one.curvatures[i])
        assert dbar is not None
        return dbar, zbars

    def _downwards(
        self,
        point: int,
        one: _Pass,
        errors: Errors,
        zbar: Tensor | None,
        zbars: list[Tensor | None],
    ) -> Tensor:
        """Along the forward chain, from the derivative in the outputs to that in x."""
        layers, matmul = self.points[point], self._matmul()
        for i in range(len(layers) - 1, -1, -1):
            # a_{l-1} has two readers: z_l = a_{l-1} W_l^T, and T_l, where it meets d_l.
            abar = None if zbar is None else matmul(zbar, layers[i][0])
            if (error := errors[i]) is not None:
                abar = accumulate(abar, one.signals[i], error[0], half=self.half)
            if i == 0:
                break  # a_0 is x
            # z_{l-1} has two as well: the gate of the backward chain (``_upwards``), and s(z_{l-1}).
            zbar = zbars[i - 1]
            if abar is not None:
                above = abar * one.slopes[i - 1]
                zbar = above if zbar is None else zbar.add_(above)
        assert abar is not None
        return abar


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


@contextmanager
def matmul_precision(tf32: bool) -> Iterator[None]:
    """Matrix products of float32 numbers in TF32, or in full float32, inside this context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@lru_cache(maxsize=1)
def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 numbers itself; torch's own test, absent in old releases."""
    test = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return test is not None and bool(test())


@dataclass(frozen=True)
class EvaluationCost:
    """flops: per layer, of one evaluation; memory: peak bytes of an attack, by what they hold."""

    flops: tuple[int, ...]
    memory: dict[str, int]


def evaluation_cost(
    equation: ExplicitEquation,
    runs: int,
    candidates: int,
    *,
    follows_outputs: bool = False,
    measure: bool = False,
) -> EvaluationCost:
    """Cost of one evaluation of R runs with m candidates each.

    follows_outputs: whether the covectors u depend on the network's outputs.
    """
    plan, widths = equation.plan(runs, candidates), equation.widths
    again = max(0, candidates - plan.kept * plan.chunk) if plan.chunks > 1 else 0
    rows, points = runs * candidates, len(equation.points)
    flops = []
    for i, weight in enumerate(equation.layer_weights):
        once = _products(i, len(widths) - 1, bool(weight), follows_outputs, measure) * candidates
        twice = (2 if i else 1) * again
        flops.append(2 * points * runs * widths[i] * widths[i + 1] * (once + twice))
    size = equation.target[0][0].element_size()
    parameters = sum(a * b for a, b in itertools.pairwise(widths))
    live = size * points * runs * plan.chunk * LIVE * sum(widths[1:])
    kept = size * points * runs * plan.kept * plan.chunk * (2 * sum(widths[1:-1]) + widths[-1])
    memory = {
        "weights": size * parameters * (points + 1 + 2 * runs),  # points, target, two sums per run
        "candidates": size * rows * widths[0] * COPIES,
        "workspace": live + (kept if plan.chunks > 1 else 0),
    }
    return EvaluationCost(tuple(flops), memory)


def _products(layer: int, depth: int, weighted: bool, follows_outputs: bool, measure: bool) -> int:
    below, above = layer > 0, layer < depth - 1 or follows_outputs
    return 1 + 2 * below + (weighted or measure) + 2 * weighted + above
