"""Gradients of many records in some layers, never all of them in memory, and what they explain.

Rows r have covectors c_r on the outputs (``stationarity.Rows``), g_r = grad <c_r, Phi(x_r)> in the layers
that are looked at:

    gram()         G = (<g_r, g_s>)            (R, R), by blocks
    combine(lam)   sum_r lam_r g_r             one tensor per parameter
    project(t)     (<g_r, t>)                  (R,)
    sizes(lam)     |sum_{r of i} lam_r g_r|    (n,)

A chain of dense layers has closed forms: in layer l a gradient is the outer product of a backward signal
and an input, so that R x h numbers stand for R x h x d. Any other network goes through automatic
differentiation, a block of records at a time.

They explain what training left in those layers:

    lam = argmin_{lam >= 0} || target - sum_r lam_r g_r ||

The exact answer comes from the Gram matrix and active-set NNLS (``theory.multipliers``). Past ``EXACT``
rows, whose Gram matrix would not fit, the same problem is descended without it: accelerated projected
gradients (Beck and Teboulle 2009; restarts: O'Donoghue and Candes 2015) on lam_r |g_r|. From zero, so
that where several multipliers explain the target equally well (more rows than parameters) the answer is
near the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from residuum.networks import MLP, dense_chain
from residuum.stationarity import Rows, Theta, by_layer, parameters
from residuum.theory.multipliers import factor_gram, solve

BLOCK_BYTES = 1 << 27  # of gradients or activations of a block of records
EXACT = 1500  # rows
ITERATIONS, POWER = 400, 20
TOLERANCE = 1e-4  # of the largest projected gradient at zero
Counter = Callable[[int, int, str], None]


class Gradients(Protocol):
    """What both kinds offer; lam: (R,) multipliers, t: one tensor per parameter."""

    def squares(self) -> Tensor:
        """(R,) <g_r, g_r>."""

    def gram(self) -> Tensor:
        """(R, R) inner products."""

    def combine(self, lam: Tensor) -> Theta:
        """sum_r lam_r g_r."""

    def project(self, t: Theta) -> Tensor:
        """(R,) <g_r, t>."""

    def sizes(self, lam: Tensor, name: str) -> Tensor:
        """(n,) norms of what each record adds to parameter ``name``, or to all where it is ""."""

    def columns(self, lam: Tensor, name: str) -> Tensor:
        """(n, h) c_i of the weight ``name`` on the input: each record adds c_i x_i^T to it."""


def gradients_of(model: nn.Module, x: Tensor, rows: Rows, layers: tuple[str, ...]) -> Gradients:
    """Of ``rows`` of samples x in ``layers``: closed forms where the network is a chain."""
    if (chain := dense_chain(model)) is not None:
        return ChainGradients(chain, x, rows, layers)
    return AnyGradients(model, x, rows, layers)


def blocks(count: int, each: int, most: int = BLOCK_BYTES) -> Iterator[slice]:
    """Slices that cover ``count`` records of ``each`` numbers in float64."""
    step = max(1, most // max(1, 8 * each))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


@dataclass(frozen=True, eq=False)
class _Layer:
    """inputs (n, d), signals (R, h) of the rows; weight, bias: names, "" where there is none."""

    inputs: Tensor
    signals: Tensor
    weight: str
    bias: str


class ChainGradients:
    """Of a chain of dense layers: signals and inputs of the layers that are looked at, and no others."""

    def __init__(self, chain: MLP, x: Tensor, rows: Rows, layers: tuple[str, ...]) -> None:
        self.x, self.rows = x, rows
        chosen = [l for l in range(len(chain.linears)) if f"layers.{l}" in layers]
        width = sum(layer.in_features + layer.out_features for layer in chain.linears)
        order = torch.argsort(rows.index, stable=True)
        inputs: list[list[Tensor]] = [[] for _ in chosen]
        signals: list[list[Tensor]] = [[] for _ in chosen]
        starts = torch.searchsorted(rows.index[order], torch.arange(len(x) + 1).to(rows.index))
        for some in blocks(len(x), width):
            mine = order[int(starts[some.start]) : int(starts[some.stop])]
            trace = chain.trace(x[some])
            found = chain.signals(trace, rows.covectors[mine], rows.index[mine] - some.start)
            for k, l in enumerate(chosen):
                inputs[k].append(trace.inputs[l])
                signals[k].append(found[l])
        back = torch.argsort(order)
        self.layers = [
            _Layer(
                torch.cat(inputs[k]),
                torch.cat(signals[k])[back],
                f"layers.{l}.weight",
                f"layers.{l}.bias" if chain.linears[l].bias is not None else "",
            )
            for k, l in enumerate(chosen)
        ]

    def squares(self) -> Tensor:
        """|d|^2 (|a|^2 + 1 with a bias), over the layers."""
        return sum(
            layer.signals.square().sum(1)
            * (layer.inputs.square().sum(1) + bool(layer.bias))[self.rows.index]
            for layer in self.layers
        )  # type: ignore[return-value]

    def gram(self) -> Tensor:
        """sum_l (d d^T) o (A A^T + 1 with a bias)."""
        total = self.x.new_zeros(len(self.rows), len(self.rows))
        for layer in self.layers:
            inner = layer.inputs @ layer.inputs.T + bool(layer.bias)
            total += (layer.signals @ layer.signals.T).mul_(
                inner[self.rows.index][:, self.rows.index]
            )
        return total

    def combine(self, lam: Tensor) -> Theta:
        """sum_r lam_r d_r a_r^T."""
        total: Theta = {}
        for layer in self.layers:
            columns = self._columns(layer, lam)
            total[layer.weight] = columns.T @ layer.inputs
            if layer.bias:
                total[layer.bias] = columns.sum(0)
        return total

    def project(self, t: Theta) -> Tensor:
        """d_r . (T a_r + t_b), over the layers."""
        total = self.x.new_zeros(len(self.rows))
        for layer in self.layers:
            moved = layer.inputs @ t[layer.weight].T
            if layer.bias:
                moved = moved + t[layer.bias]
            total += (layer.signals * moved[self.rows.index]).sum(1)
        return total

    def columns(self, lam: Tensor, name: str) -> Tensor:
        """(n, h) signals of the records' weighted covectors."""
        layer = next(layer for layer in self.layers if layer.weight == name)
        return self._columns(layer, lam)

    def sizes(self, lam: Tensor, name: str) -> Tensor:
        """|c_i||a_i| in a weight, or over all layers."""
        total = self.x.new_zeros(len(self.x))
        for layer in self.layers:
            if name in ("", layer.weight):
                squares = layer.inputs.square().sum(1) + (not name and bool(layer.bias))
                total += self._columns(layer, lam).square().sum(1) * squares
        return total.sqrt()

    def _columns(self, layer: _Layer, lam: Tensor) -> Tensor:
        found = layer.signals.new_zeros(len(self.x), layer.signals.shape[1])
        return found.index_add_(0, self.rows.index, lam[:, None] * layer.signals)


class AnyGradients:
    """Of any network, by automatic differentiation of a block of records at a time."""

    def __init__(self, model: nn.Module, x: Tensor, rows: Rows, layers: tuple[str, ...]) -> None:
        self.model, self.x, self.rows = model, x, rows
        theta = parameters(model)
        groups = by_layer(theta)
        names = {name for layer in layers for name in groups[layer]}
        self.chosen = {name: t for name, t in theta.items() if name in names}
        self.rest = {name: t for name, t in theta.items() if name not in names}
        self.size = sum(t.numel() for t in self.chosen.values())

    def _outputs(self, chosen: Theta, x: Tensor) -> Tensor:
        return functional_call(self.model, {**self.rest, **chosen}, (x,))

    def _each(self, some: slice) -> Tensor:
        """(b, P) gradients of some rows."""
        return self._flat(self.x[self.rows.index[some]], self.rows.covectors[some])

    def _flat(self, x: Tensor, covectors: Tensor, name: str = "") -> Tensor:
        def gradient(sample: Tensor, covector: Tensor) -> Theta:
            def value(chosen: Theta) -> Tensor:
                return (covector * self._outputs(chosen, sample[None])[0]).sum()

            return grad(value)(self.chosen)

        found = vmap(gradient)(x, covectors)
        return torch.cat([t.flatten(1) for n, t in found.items() if name in ("", n)], 1)

    def squares(self) -> Tensor:
        """Block by block."""
        parts = [self._each(some).square().sum(1) for some in blocks(len(self.rows), self.size)]
        return torch.cat(parts)

    def gram(self) -> Tensor:
        """Two blocks in memory at a time; later blocks are differentiated anew for every earlier one."""
        parts = list(blocks(len(self.rows), self.size))
        total = self.x.new_zeros(len(self.rows), len(self.rows))
        for k, some in enumerate(parts):
            mine = self._each(some)
            total[some, some] = mine @ mine.T
            for other in parts[k + 1 :]:
                total[some, other] = mine @ self._each(other).T
                total[other, some] = total[some, other].T
        return total

    def combine(self, lam: Tensor) -> Theta:
        """One backward pass per block."""
        u = self.rows.combine(lam, len(self.x))
        total = {name: torch.zeros_like(t) for name, t in self.chosen.items()}
        for some in blocks(len(self.x), self._activations()):

            def value(chosen: Theta, some: slice = some) -> Tensor:
                return (u[some] * self._outputs(chosen, self.x[some])).sum()

            for name, part in grad(value)(self.chosen).items():
                total[name] += part
        return total

    def project(self, t: Theta) -> Tensor:
        """One forward-mode pass per block."""
        direction = {name: t[name] for name in self.chosen}
        parts = []
        for some in blocks(len(self.x), self._activations()):

            def outputs(chosen: Theta, some: slice = some) -> Tensor:
                return self._outputs(chosen, self.x[some])

            parts.append(jvp(outputs, (self.chosen,), (direction,))[1])
        return self.rows.values(torch.cat(parts))

    def sizes(self, lam: Tensor, name: str) -> Tensor:
        """Block by block."""
        u = self.rows.combine(lam, len(self.x))
        return torch.cat(
            [
                self._flat(self.x[some], u[some], name).norm(dim=1)
                for some in blocks(len(self.x), self.size)
            ]
        )

    def columns(self, lam: Tensor, name: str) -> Tensor:
        """c_i = (c_i x_i^T) x_i / |x_i|^2, block by block."""
        u, flat = self.rows.combine(lam, len(self.x)), self.x.flatten(1)
        found = []
        for some in blocks(len(self.x), self.size):
            each = self._flat(self.x[some], u[some], name).reshape(
                len(flat[some]), -1, flat.shape[1]
            )
            squares = flat[some].square().sum(1, keepdim=True).clamp(min=1e-300)
            found.append((each @ flat[some][:, :, None])[..., 0] / squares)
        return torch.cat(found)

    def _activations(self) -> int:
        """Numbers that one record takes on its way, on the cautious side: 32 times its input."""
        return 32 * self.x[0].numel() + 4096


@dataclass(frozen=True, eq=False)
class Multipliers:
    """lam: (R,); gap: what is left of the optimality conditions, relative; method: how it was found."""

    lam: Tensor
    gap: float
    method: str


def explained(
    gradients: Gradients, target: Theta, rows: int, free: bool, watch: Counter | None = None
) -> Multipliers:
    """The multipliers that explain ``target`` best, nonnegative unless ``free``.

    Exact where the Gram matrix is small. Above, by descent, with how far from optimal it ended: the
    largest violation of the optimality conditions, so that nobody has to trust it.
    """
    inner = gradients.project(target)
    if rows <= EXACT:
        gram = gradients.gram()
        factor = factor_gram(gram.cpu(), inner.cpu())
        lam = solve(factor, free).to(inner)
        return Multipliers(lam, _gap(lam, inner - gram @ lam, inner, free), "exact")
    lam = descend(gradients, inner, free, watch)
    left = inner - gradients.project(gradients.combine(lam))
    return Multipliers(lam, _gap(lam, left, inner, free), "descent")


def descend(
    gradients: Gradients, inner: Tensor, free: bool, watch: Counter | None = None
) -> Tensor:
    """Accelerated projected gradients without the Gram matrix, records scaled to equal size.

    n records would need an (n, n) matrix; here two passes over the records give a product with it.
    Step: one over the largest eigenvalue, by the power method, with a margin since that stays below.
    Momentum is begun anew whenever it points uphill (O'Donoghue and Candes), which makes it safe under
    projection.
    inner: (n,) <g_i, target>. Returns (n,) multipliers.
    """
    size = gradients.squares().sqrt()
    scale = torch.where(size > 1e-12 * size.max(), 1 / size.clamp(min=1e-300), 0.0)

    def product(z: Tensor) -> Tensor:
        return scale * gradients.project(gradients.combine(scale * z))

    goal = scale * inner
    top = torch.ones_like(goal) / len(goal) ** 0.5
    largest = goal.new_ones(())
    for _ in range(POWER):
        top = product(top)
        largest = top.norm()
        top = top / largest.clamp(min=1e-300)
    step = 1 / (1.1 * largest.clamp(min=1e-300))  # the power method stays below the largest
    z = before = torch.zeros_like(goal)
    momentum, floor = 1.0, TOLERANCE * float(goal.abs().max())
    for k in range(ITERATIONS):
        if watch is not None and k % 10 == 0:
            watch(k, ITERATIONS, "multipliers")
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = z + (momentum - 1) / following * (z - before)
        slope = goal - product(ahead)
        moved = ahead + step * slope
        moved = moved if free else moved.clamp(min=0)
        if float((slope * (moved - z)).sum()) < 0:  # momentum points uphill: begin it anew
            following = 1.0
        before, z, momentum = z, moved, following
        active = slope.abs() if free else torch.where(z > 0, slope.abs(), slope.clamp(min=0))
        if float(active.max()) <= floor:
            break
    return scale * z


def _gap(lam: Tensor, left: Tensor, inner: Tensor, free: bool) -> float:
    """Largest violation of <g_r, r> = 0 on the support and <= 0 off it, over the largest <g_r, target>."""
    off = left.abs() if free else torch.where(lam > 0, left.abs(), left.clamp(min=0))
    return float(off.max() / inner.abs().max().clamp(min=1e-300))
