"""Compute gradients of many records in chosen layers, and fit their weighted sum to a target.

Row r pairs a record x_r with a covector c_r on the network's outputs Phi (``stationarity.Rows``). Its
gradient in the chosen layers is g_r = grad <c_r, Phi(x_r)>. The gradients are weighted by multipliers lam.
Memory holds one block of gradients at a time:

    gram()         G = (<g_r, g_s>)            (R, R), by blocks
    combine(lam)   sum_r lam_r g_r             one tensor per parameter
    project(t)     (<g_r, t>)                  (R,)
    squares()      <g_r, g_r>                  (R,)
    sizes(lam, W)  |sum_{r of i} lam_r g_r|    (n,), in parameter W, or in all parameters if W is ""
    columns(lam, W)  c_i                       (n, h), each record adds c_i x_i^T to the weight W

A chain of dense layers has closed forms. In layer l a gradient is the outer product of a backward signal and
an input, so R x h numbers represent R x h x d. Gradients of any other network come from automatic
differentiation of one block of records at a time.

The multipliers are fitted to the target, which is what training left in these layers:

    lam = argmin_{lam >= 0} || target - sum_r lam_r g_r ||

The exact solution comes from the Gram matrix and active-set NNLS (``theory.multipliers``). With more than
``MAX_EXACT_ROWS`` rows the Gram matrix does not fit into memory. Then accelerated projected gradients (Beck
and Teboulle 2009; restarts: O'Donoghue and Candes 2015) on lam_r |g_r| solve the same problem without this
matrix. The descent starts from zero. If several multipliers fit equally well (more rows than parameters), the
result is therefore near the smallest solution.
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

BLOCK_BYTES = 1 << 27  # bytes of the gradients or activations of one block of records
MAX_EXACT_ROWS = 1500  # largest number of rows whose Gram matrix is computed
ITERATIONS, POWER_ITERATIONS = 400, 20  # of the descent, and of the power method for its step size
TOLERANCE = 1e-4  # violation at which the descent stops, relative to the largest gradient at zero
# A function of this type is called with the step, the number of steps, and a text.
Counter = Callable[[int, int, str], None]


def compute_gradients(
    model: nn.Module, x: Tensor, rows: Rows, layers: tuple[str, ...]
) -> Gradients:
    """Return the gradients of samples in chosen layers, in closed form for a chain of dense layers.

    Args:
        model: The network.
        x: The samples (n, *shape).
        rows: For each gradient the index of its sample and a covector on the outputs.
        layers: Names of the layers.

    Returns:
        An object that computes sums and products of the gradients block by block.
    """
    if (chain := dense_chain(model)) is not None:
        return ChainGradients(chain, x, rows, layers)
    return AnyGradients(model, x, rows, layers)


def split_blocks(count: int, width: int, max_bytes: int = BLOCK_BYTES) -> Iterator[slice]:
    """Return slices that cover all records in blocks of limited size.

    Args:
        count: Number of records.
        width: Number of float64 values per record.
        max_bytes: Largest size of a block in bytes.

    Returns:
        One slice for each block.
    """
    step = max(1, max_bytes // max(1, 8 * width))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


@dataclass(frozen=True, eq=False)
class _Layer:
    """Inputs (n, d) and backward signals (R, h) of a layer, and the names of its weight and bias.

    The name of the bias is "" if the layer has no bias.
    """

    inputs: Tensor
    signals: Tensor
    weight: str
    bias: str

    @property
    def squares(self) -> Tensor:
        """Squared norm |a|^2 of each input a, plus 1 if the layer has a bias, (n,)."""
        return self.inputs.square().sum(1) + bool(self.bias)


class ChainGradients:
    """Gradients in a chain of dense layers, from inputs and backward signals of the chosen layers.

    In each layer the gradient of a row is the outer product of its backward signal d and its input a.
    """

    def __init__(self, chain: MLP, x: Tensor, rows: Rows, layers: tuple[str, ...]) -> None:
        self.x, self.rows, self.layers = x, rows, []
        width = sum(layer.in_features + layer.out_features for layer in chain.linears)
        inputs: list[list[Tensor]] = [[] for _ in chain.linears]
        signals = [x.new_zeros(len(rows), layer.out_features) for layer in chain.linears]
        layer_indices = [l for l in range(len(chain.linears)) if f"layers.{l}" in layers]
        for block in split_blocks(len(x), width):
            in_block = (rows.index >= block.start) & (rows.index < block.stop)
            index = rows.index[in_block] - block.start
            trace = chain.trace(x[block])
            backward = chain.signals(trace, rows.covectors[in_block], index)
            for l in layer_indices:
                inputs[l].append(trace.inputs[l])
                signals[l][in_block] = backward[l]
        for l in layer_indices:
            weight = f"layers.{l}.weight"
            bias = "" if chain.linears[l].bias is None else f"layers.{l}.bias"
            self.layers.append(_Layer(torch.cat(inputs[l]), signals[l], weight, bias))

    def squares(self) -> Tensor:
        """Return the squared norm of every gradient: |d|^2 (|a|^2 + 1 with a bias) over all layers, (R,)."""
        total = self.x.new_zeros(len(self.rows))
        for layer in self.layers:
            total += layer.signals.square().sum(1) * layer.squares[self.rows.index]
        return total

    def gram(self) -> Tensor:
        """Return the inner products of all pairs of gradients, (R, R).

        A layer with signals D and inputs A adds (D D^T) o (A A^T), with A A^T + 1 if the layer has a bias.
        """
        total, index = self.x.new_zeros(len(self.rows), len(self.rows)), self.rows.index
        for layer in self.layers:
            inner = layer.inputs @ layer.inputs.T + bool(layer.bias)
            total += (layer.signals @ layer.signals.T).mul_(inner[index][:, index])
        return total

    def combine(self, lam: Tensor) -> Theta:
        """Return the sum of all gradients weighted by the multipliers lam, by parameter name."""
        total: Theta = {}
        for layer in self.layers:
            columns = self._columns(layer, lam)
            total[layer.weight] = columns.T @ layer.inputs
            if layer.bias:
                total[layer.bias] = columns.sum(0)
        return total

    def project(self, t: Theta) -> Tensor:
        """Return the inner product of every gradient with the tensors t, (R,)."""
        total = self.x.new_zeros(len(self.rows))
        for layer in self.layers:
            change = layer.inputs @ t[layer.weight].T
            if layer.bias:
                change = change + t[layer.bias]
            total += (layer.signals * change[self.rows.index]).sum(1)
        return total

    def columns(self, lam: Tensor, name: str) -> Tensor:
        """Return the column c_i that each record x_i adds as c_i x_i^T to the weighted sum of gradients.

        Args:
            lam: Multipliers of the rows, (R,).
            name: Name of a weight.

        Returns:
            The columns, (n, h).
        """
        return self._columns(next(layer for layer in self.layers if layer.weight == name), lam)

    def sizes(self, lam: Tensor, name: str) -> Tensor:
        """Return the norm of each record's weighted gradient.

        Args:
            lam: Multipliers of the rows, (R,).
            name: Name of a weight, "" for all layers.

        Returns:
            The norms, (n,).
        """
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
    """Gradients in any network, by automatic differentiation of one block of records at a time."""

    def __init__(self, model: nn.Module, x: Tensor, rows: Rows, layers: tuple[str, ...]) -> None:
        self.model, self.x, self.rows = model, x, rows
        theta = parameters(model)
        groups = by_layer(theta)
        names = {name for layer in layers for name in groups[layer]}
        self.chosen = {name: t for name, t in theta.items() if name in names}
        self.frozen = {name: t for name, t in theta.items() if name not in names}
        self.size = sum(t.numel() for t in self.chosen.values())
        self.activations = 32 * x[0].numel() + 4096  # float64 values per record, at most

    def _outputs(self, chosen: Theta, x: Tensor) -> Tensor:
        return functional_call(self.model, {**self.frozen, **chosen}, (x,))

    def _of_rows(self, block: slice) -> Tensor:
        """Return the gradients of a block of b rows with respect to all P chosen parameters, (b, P)."""
        return self._flat(self.x[self.rows.index[block]], self.rows.covectors[block])

    def _flat(self, x: Tensor, covectors: Tensor, name: str = "") -> Tensor:
        def gradient(sample: Tensor, covector: Tensor) -> Theta:
            def value(chosen: Theta) -> Tensor:
                return (covector * self._outputs(chosen, sample[None])[0]).sum()

            return grad(value)(self.chosen)

        gradients = vmap(gradient)(x, covectors)
        return torch.cat([t.flatten(1) for n, t in gradients.items() if name in ("", n)], 1)

    def squares(self) -> Tensor:
        """Return the squared norm of every gradient, (R,), computed block by block."""
        row_blocks = split_blocks(len(self.rows), self.size)
        return torch.cat([self._of_rows(block).square().sum(1) for block in row_blocks])

    def gram(self) -> Tensor:
        """Return the inner products of all pairs of gradients, (R, R), with two blocks in memory."""
        # To save memory, the gradients of later blocks are computed again for each earlier block.
        row_blocks = list(split_blocks(len(self.rows), self.size))
        total = self.x.new_zeros(len(self.rows), len(self.rows))
        for k, block in enumerate(row_blocks):
            gradients = self._of_rows(block)
            total[block, block] = gradients @ gradients.T
            for later in row_blocks[k + 1 :]:
                total[block, later] = gradients @ self._of_rows(later).T
                total[later, block] = total[block, later].T
        return total

    def combine(self, lam: Tensor) -> Theta:
        """Return the sum of all gradients weighted by lam, by one backward pass per block of records."""
        u = self.rows.combine(lam, len(self.x))
        total = {name: torch.zeros_like(t) for name, t in self.chosen.items()}
        for block in split_blocks(len(self.x), self.activations):

            def value(chosen: Theta, block: slice = block) -> Tensor:
                return (u[block] * self._outputs(chosen, self.x[block])).sum()

            for name, gradient in grad(value)(self.chosen).items():
                total[name] += gradient
        return total

    def project(self, t: Theta) -> Tensor:
        """Return the inner product of every gradient with t, (R,), by one forward-mode pass per block."""
        direction = {name: t[name] for name in self.chosen}
        changes = []
        for block in split_blocks(len(self.x), self.activations):

            def outputs(chosen: Theta, block: slice = block) -> Tensor:
                return self._outputs(chosen, self.x[block])

            changes.append(jvp(outputs, (self.chosen,), (direction,))[1])
        return self.rows.values(torch.cat(changes))

    def sizes(self, lam: Tensor, name: str) -> Tensor:
        """Return the norm of each record's weighted gradient.

        Args:
            lam: Multipliers of the rows, (R,).
            name: Name of a weight, "" for all parameters.

        Returns:
            The norms, (n,).
        """
        u = self.rows.combine(lam, len(self.x))
        blocks = split_blocks(len(self.x), self.size)
        return torch.cat([self._flat(self.x[b], u[b], name).norm(dim=1) for b in blocks])

    def columns(self, lam: Tensor, name: str) -> Tensor:
        """Return the column c_i of each record x_i, whose weighted gradient is c_i x_i^T.

        Args:
            lam: Multipliers of the rows, (R,).
            name: Name of the weight on the input.

        Returns:
            The columns, (n, h).
        """
        u, columns = self.rows.combine(lam, len(self.x)), []
        for block in split_blocks(len(self.x), self.size):
            x = self.x[block].flatten(1)
            gradients = self._flat(self.x[block], u[block], name).reshape(len(x), -1, x.shape[1])
            squares = x.square().sum(1, keepdim=True).clamp(min=1e-300)
            columns.append((gradients @ x[:, :, None])[..., 0] / squares)
        return torch.cat(columns)


Gradients = ChainGradients | AnyGradients


@dataclass(frozen=True, eq=False)
class Multipliers:
    """Multipliers with which the weighted sum of gradients is closest to a target.

    Attributes:
        lam: One multiplier per row, (R,).
        gap: Relative violation of the optimality conditions of the fit.
        method: How the multipliers were computed: "exact" or "descent".
    """

    lam: Tensor
    gap: float
    method: str


def fit_multipliers(
    gradients: Gradients, target: Theta, rows: int, free: bool, watch: Counter | None = None
) -> Multipliers:
    """Fit a weighted sum of gradients to a target, exactly if there are few rows, else by descent.

    Args:
        gradients: Gradients of the rows.
        target: The tensors that the weighted sum should equal, by parameter name.
        rows: Number of rows.
        free: Whether multipliers may be negative.
        watch: Function that is called with the step, the number of steps, and a text.

    Returns:
        The multipliers and the violation of the optimality conditions.
    """
    inner = gradients.project(target)
    if rows <= MAX_EXACT_ROWS:
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
    """Fit multipliers by accelerated projected gradients without the Gram matrix.

    Two passes over the records replace a product with the (n, n) Gram matrix. Gradients are scaled to equal
    norms. The step size is one over the largest eigenvalue of the Gram matrix. The power method
    underestimates this eigenvalue, so the step size has a margin. Momentum restarts if it points uphill
    (O'Donoghue and Candes), which keeps the descent stable under projection.

    Args:
        gradients: Gradients of the rows.
        inner: Inner product of each gradient with the target, (R,).
        free: Whether multipliers may be negative.
        watch: Function that is called with the step, the number of steps, and a text.

    Returns:
        The multipliers, (R,).
    """
    gradient_norms = gradients.squares().sqrt()
    scale = torch.where(
        gradient_norms > 1e-12 * gradient_norms.max(), 1 / gradient_norms.clamp(min=1e-300), 0.0
    )

    def product(z: Tensor) -> Tensor:
        return scale * gradients.project(gradients.combine(scale * z))

    scaled_inner = scale * inner
    eigenvector, eigenvalue = (
        torch.ones_like(scaled_inner) / len(scaled_inner) ** 0.5,
        scaled_inner.new_ones(()),
    )
    for _ in range(POWER_ITERATIONS):
        eigenvector = product(eigenvector)
        eigenvalue = eigenvector.norm()
        eigenvector = eigenvector / eigenvalue.clamp(min=1e-300)
    step = 1 / (1.1 * eigenvalue.clamp(min=1e-300))
    z = previous = torch.zeros_like(scaled_inner)
    momentum, tolerance = 1.0, TOLERANCE * float(scaled_inner.abs().max())
    for k in range(ITERATIONS):
        if watch is not None and k % 10 == 0:
            watch(k, ITERATIONS, "multipliers")
        next_momentum = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        lookahead = z + (momentum - 1) / next_momentum * (z - previous)
        slope = scaled_inner - product(lookahead)
        next_z = lookahead + step * slope
        next_z = next_z if free else next_z.clamp(min=0)
        if float((slope * (next_z - z)).sum()) < 0:  # Momentum points uphill.
            next_momentum = 1.0
        previous, z, momentum = z, next_z, next_momentum
        if _violation(z, slope, free) <= tolerance:
            break
    return scale * z


def _violation(lam: Tensor, slope: Tensor, free: bool) -> float:
    """Return the largest violation of the optimality conditions of multipliers.

    The slope must be 0 for multipliers that are positive or may be negative, and at most 0 for the others.
    """
    violation = slope.abs() if free else torch.where(lam > 0, slope.abs(), slope.clamp(min=0))
    return float(violation.max())


def _gap(lam: Tensor, slope: Tensor, inner: Tensor, free: bool) -> float:
    """Return the violation of the optimality conditions relative to the slope at zero multipliers."""
    return _violation(lam, slope, free) / max(float(inner.abs().max()), 1e-300)
