"""Gradients of many records in some layers, never all of them in memory, and what they explain.

Rows r have covectors c_r on the outputs (``stationarity.Rows``), g_r = grad <c_r, Phi(x_r)> in the layers
that are looked at:

    gram()         G = (<g_r, g_s>)            (R, R), by blocks
    combine(lam)   sum_r lam_r g_r             one tensor per parameter
    project(t)     (<g_r, t>)                  (R,)
    squares()      <g_r, g_r>                  (R,)
    sizes(lam, W)  |sum_{r of i} lam_r g_r|    (n,), in parameter W, or in all if W is ""
    columns(lam, W)  c_i                       (n, h), each record adds c_i x_i^T to the weight W

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


def gradients_of(model: nn.Module, x: Tensor, rows: Rows, layers: tuple[str, ...]) -> Gradients:
    """Return the gradients of ``rows`` of samples x in ``layers``, in closed form for a dense chain."""
    if (chain := dense_chain(model)) is not None:
        return ChainGradients(chain, x, rows, layers)
    return AnyGradients(model, x, rows, layers)


def blocks(count: int, each: int, most: int = BLOCK_BYTES) -> Iterator[slice]:
    """Yield slices that cover ``count`` records of ``each`` numbers in float64."""
    step = max(1, most // max(1, 8 * each))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


@dataclass(frozen=True, eq=False)
class _Layer:
    """inputs (n, d) and signals (R, h) of a layer; weight, bias: names, bias "" if there is none."""

    inputs: Tensor
    signals: Tensor
    weight: str
    bias: str

    @property
    def squares(self) -> Tensor:
        """|a|^2 + 1 with a bias, (n,)."""
        return self.inputs.square().sum(1) + bool(self.bias)


class ChainGradients:
    """Gradients in a chain of dense layers, from the signals and inputs of the chosen layers."""

    def __init__(self, chain: MLP, x: Tensor, rows: Rows, layers: tuple[str, ...]) -> None:
        self.x, self.rows, self.layers = x, rows, []
        width = sum(layer.in_features + layer.out_features for layer in chain.linears)
        inputs: list[list[Tensor]] = [[] for _ in chain.linears]
        signals = [x.new_zeros(len(rows), layer.out_features) for layer in chain.linears]
        chosen = [l for l in range(len(chain.linears)) if f"layers.{l}" in layers]
        for block in blocks(len(x), width):
            in_block = (rows.index >= block.start) & (rows.index < block.stop)
            index = rows.index[in_block] - block.start
            trace = chain.trace(x[block])
            backward = chain.signals(trace, rows.covectors[in_block], index)
            for l in chosen:
                inputs[l].append(trace.inputs[l])
                signals[l][in_block] = backward[l]
        for l in chosen:
            weight = f"layers.{l}.weight"
            bias = "" if chain.linears[l].bias is None else f"layers.{l}.bias"
            self.layers.append(_Layer(torch.cat(inputs[l]), signals[l], weight, bias))

    def squares(self) -> Tensor:
        """|d|^2 (|a|^2 + 1 with a bias), over the layers."""
        total = self.x.new_zeros(len(self.rows))
        for layer in self.layers:
            total += layer.signals.square().sum(1) * layer.squares[self.rows.index]
        return total

    def gram(self) -> Tensor:
        """sum_l (d d^T) o (A A^T + 1 with a bias)."""
        total, index = self.x.new_zeros(len(self.rows), len(self.rows)), self.rows.index
        for layer in self.layers:
            inner = layer.inputs @ layer.inputs.T + bool(layer.bias)
            total += (layer.signals @ layer.signals.T).mul_(inner[index][:, index])
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
            change = layer.inputs @ t[layer.weight].T
            if layer.bias:
                change = change + t[layer.bias]
            total += (layer.signals * change[self.rows.index]).sum(1)
        return total

    def columns(self, lam: Tensor, name: str) -> Tensor:
        """Signals (n, h) of the records' weighted covectors."""
        return self._columns(next(layer for layer in self.layers if layer.weight == name), lam)

    def sizes(self, lam: Tensor, name: str) -> Tensor:
        """|c_i||a_i| in a weight, or over all layers."""
        total = self.x.new_zeros(len(self.x))
        for layer in self.layers:
            if name in ("", layer.weight):
                squares = layer.inputs.square().sum(1) if name else layer.squares
                total += self._columns(layer, lam).square().sum(1) * squares
        return total.sqrt()

    def _columns(self, layer: _Layer, lam: Tensor) -> Tensor:
        columns = layer.signals.new_zeros(len(self.x), layer.signals.shape[1])
        return columns.index_add_(0, self.rows.index, lam[:, None] * layer.signals)


class AnyGradients:
    """Gradients in any network, by automatic differentiation of a block of records at a time."""

    def __init__(self, model: nn.Module, x: Tensor, rows: Rows, layers: tuple[str, ...]) -> None:
        self.model, self.x, self.rows = model, x, rows
        theta = parameters(model)
        groups = by_layer(theta)
        names = {name for layer in layers for name in groups[layer]}
        self.chosen = {name: t for name, t in theta.items() if name in names}
        self.frozen = {name: t for name, t in theta.items() if name not in names}
        self.size = sum(t.numel() for t in self.chosen.values())
        self.activations = 32 * x[0].numel() + 4096  # numbers that one record takes, at most

    def _outputs(self, chosen: Theta, x: Tensor) -> Tensor:
        return functional_call(self.model, {**self.frozen, **chosen}, (x,))

    def _of_rows(self, block: slice) -> Tensor:
        """Return the gradients (b, P) of some rows."""
        return self._flat(self.x[self.rows.index[block]], self.rows.covectors[block])

    def _flat(self, x: Tensor, covectors: Tensor, name: str = "") -> Tensor:
        def gradient(sample: Tensor, covector: Tensor) -> Theta:
            def value(chosen: Theta) -> Tensor:
                return (covector * self._outputs(chosen, sample[None])[0]).sum()

            return grad(value)(self.chosen)

        gradients = vmap(gradient)(x, covectors)
        return torch.cat([t.flatten(1) for n, t in gradients.items() if name in ("", n)], 1)

    def squares(self) -> Tensor:
        """<g_r, g_r>, (R,), block by block."""
        row_blocks = blocks(len(self.rows), self.size)
        return torch.cat([self._of_rows(block).square().sum(1) for block in row_blocks])

    def gram(self) -> Tensor:
        """Return G with two blocks in memory; later blocks are differentiated again for each earlier one."""
        row_blocks = list(blocks(len(self.rows), self.size))
        total = self.x.new_zeros(len(self.rows), len(self.rows))
        for k, block in enumerate(row_blocks):
            gradients = self._of_rows(block)
            total[block, block] = gradients @ gradients.T
            for later in row_blocks[k + 1 :]:
                total[block, later] = gradients @ self._of_rows(later).T
                total[later, block] = total[block, later].T
        return total

    def combine(self, lam: Tensor) -> Theta:
        """sum_r lam_r g_r, by one backward pass per block."""
        u = self.rows.combine(lam, len(self.x))
        total = {name: torch.zeros_like(t) for name, t in self.chosen.items()}
        for block in blocks(len(self.x), self.activations):

            def value(chosen: Theta, block: slice = block) -> Tensor:
                return (u[block] * self._outputs(chosen, self.x[block])).sum()

            for name, gradient in grad(value)(self.chosen).items():
                total[name] += gradient
        return total

    def project(self, t: Theta) -> Tensor:
        """<g_r, t>, (R,), by one forward-mode pass per block."""
        direction = {name: t[name] for name in self.chosen}
        changes = []
        for block in blocks(len(self.x), self.activations):

            def outputs(chosen: Theta, block: slice = block) -> Tensor:
                return self._outputs(chosen, self.x[block])

            changes.append(jvp(outputs, (self.chosen,), (direction,))[1])
        return self.rows.values(torch.cat(changes))

    def sizes(self, lam: Tensor, name: str) -> Tensor:
        """Norms (n,), block by block."""
        u = self.rows.combine(lam, len(self.x))
        sizes = blocks(len(self.x), self.size)
        return torch.cat([self._flat(self.x[b], u[b], name).norm(dim=1) for b in sizes])

    def columns(self, lam: Tensor, name: str) -> Tensor:
        """c_i = (c_i x_i^T) x_i / |x_i|^2, block by block."""
        u, columns = self.rows.combine(lam, len(self.x)), []
        for block in blocks(len(self.x), self.size):
            x = self.x[block].flatten(1)
            gradients = self._flat(self.x[block], u[block], name).reshape(len(x), -1, x.shape[1])
            squares = x.square().sum(1, keepdim=True).clamp(min=1e-300)
            columns.append((gradients @ x[:, :, None])[..., 0] / squares)
        return torch.cat(columns)


Gradients = ChainGradients | AnyGradients


@dataclass(frozen=True, eq=False)
class Multipliers:
    """lam: (R,); gap: violation of the optimality conditions, relative; method: "exact" or "descent"."""

    lam: Tensor
    gap: float
    method: str


def explained(
    gradients: Gradients, target: Theta, rows: int, free: bool, watch: Counter | None = None
) -> Multipliers:
    """Return the multipliers that explain ``target`` best, nonnegative unless ``free``.

    They are exact if the Gram matrix is small. Otherwise they come from descent, and ``gap`` says how
    far from optimal it ended: the largest violation of the optimality conditions.
    """
    inner = gradients.project(target)
    if rows <= EXACT:
        gram = gradients.gram()
        factor = factor_gram(gram.cpu(), inner.cpu())
        lam = solve(factor, free).to(inner)
        return Multipliers(lam, _gap(lam, inner - gram @ lam, inner, free), "exact")
    lam = descend(gradients, inner, free, watch)
    slope = inner - gradients.project(gradients.combine(lam))
    return Multipliers(lam, _gap(lam, slope, inner, free), "descent")


def descend(
    gradients: Gradients, inner: Tensor, free: bool, watch: Counter | None = None
) -> Tensor:
    """Descend by accelerated projected gradients without the Gram matrix, records scaled to equal size.

    n records would need an (n, n) matrix; here two passes over the records give a product with it. The
    step is one over the largest eigenvalue, found by the power method, with a margin because that
    estimate is too small. Momentum restarts when it points uphill (O'Donoghue and Candes), which keeps
    it stable under projection.

    Args:
        gradients: Of the rows.
        inner: <g_r, target>, (R,).
        free: Multipliers may be negative.
        watch: Receives the step, the number of steps, and a text.

    Returns:
        The multipliers, (R,).
    """
    size = gradients.squares().sqrt()
    scale = torch.where(size > 1e-12 * size.max(), 1 / size.clamp(min=1e-300), 0.0)

    def product(z: Tensor) -> Tensor:
        return scale * gradients.project(gradients.combine(scale * z))

    goal = scale * inner
    eigenvector, eigenvalue = torch.ones_like(goal) / len(goal) ** 0.5, goal.new_ones(())
    for _ in range(POWER):
        eigenvector = product(eigenvector)
        eigenvalue = eigenvector.norm()
        eigenvector = eigenvector / eigenvalue.clamp(min=1e-300)
    step = 1 / (1.1 * eigenvalue.clamp(min=1e-300))
    z = previous = torch.zeros_like(goal)
    momentum, tolerance = 1.0, TOLERANCE * float(goal.abs().max())
    for k in range(ITERATIONS):
        if watch is not None and k % 10 == 0:
            watch(k, ITERATIONS, "multipliers")
        next_momentum = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = z + (momentum - 1) / next_momentum * (z - previous)
        slope = goal - product(ahead)
        moved = ahead + step * slope
        moved = moved if free else moved.clamp(min=0)
        if float((slope * (moved - z)).sum()) < 0:  # momentum points uphill: restart it
            next_momentum = 1.0
        previous, z, momentum = z, moved, next_momentum
        if _violation(z, slope, free) <= tolerance:
            break
    return scale * z


def _violation(lam: Tensor, slope: Tensor, free: bool) -> float:
    """Return the largest violation of slope = 0 where lam > 0 (everywhere if free), and <= 0 elsewhere."""
    violation = slope.abs() if free else torch.where(lam > 0, slope.abs(), slope.clamp(min=0))
    return float(violation.max())


def _gap(lam: Tensor, slope: Tensor, inner: Tensor, free: bool) -> float:
    """Return the violation of the optimality conditions over the largest <g_r, target>."""
    return _violation(lam, slope, free) / max(float(inner.abs().max()), 1e-300)
