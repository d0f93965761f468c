"""Compute gradients of many records in chosen layers, and fit their weighted sum to a target.

The weighted sum has R terms, which are called rows. Row r has a record x_r and a covector c_r, i.e. weights
of the network's outputs Phi (``stationarity.Rows``). The gradient of row r in the chosen layers is g_r = grad
<c_r, Phi(x_r)>, and lam_r is its multiplier. A record can have several rows. The following methods keep only
one block of gradients in memory:

    gram()         G = (<g_r, g_s>)            (R, R), by blocks
    combine(lam)   sum_r lam_r g_r             one tensor per parameter
    project(t)     (<g_r, t>)                  (R,)
    squares()      <g_r, g_r>                  (R,)
    sizes(lam, W)  |sum lam_r g_r|             (n,), summed over the rows of each record, in parameter W (all
                                               parameters if W is "")
    columns(lam, W)  c_i                       (n, h), record i contributes c_i x_i^T to the weight W

A chain of dense layers has closed forms. In layer l a gradient is the outer product of a backward signal and
an input, so R x h numbers represent R x h x d. Gradients of any other network come from automatic
differentiation of one block of records at a time.

The multipliers are fitted to the target, i.e. to the weights, weight update or optimizer state of these
layers:

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
# With more gradients than this, the weights of the records are fitted without the Gram matrix (all inner
# products of gradients), which would need much memory.
MAX_EXACT_ROWS = 1500
# Largest number of steps of the gradient descent, and number of steps of the power method that finds its
# step size.
ITERATIONS, POWER_ITERATIONS = 400, 20
# The gradient descent under constraints stops if no entry of the projected gradient, which is zero at the
# optimum, exceeds this share of the largest gradient entry at the start.
TOLERANCE = 1e-4
# A function that reports progress. It is called with the step, the number of steps, and a text.
Counter = Callable[[int, int, str], None]


def compute_gradients(
    model: nn.Module, x: Tensor, rows: Rows, layers: tuple[str, ...]
) -> Gradients:
    """Return the gradients of samples in chosen layers, in closed form for a chain of dense layers.

    Args:
        model: The network.
        x: The samples (n, *shape).
        rows: For each gradient the index of its sample, and a covector (weights of the outputs).
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
    block_size = max(1, max_bytes // max(1, 8 * width))
    return (slice(start, min(start + block_size, count)) for start in range(0, count, block_size))


@dataclass(frozen=True, eq=False)
class _Layer:
    """The inputs and backward signals of a dense layer, which determine the gradients of its weight and bias.

    Attributes:
        inputs: Inputs of the layer for each record, (n, d).
        signals: Backward signals (gradients with respect to the pre-activations) of each row, (R, h).
        weight: Name of the weight.
        bias: Name of the bias, "" if the layer has no bias.
    """

    inputs: Tensor
    signals: Tensor
    weight: str
    bias: str

    @property
    def squares(self) -> Tensor:
        """Squared norm of the layer's input for each record, (n,). A bias counts as an input of value 1."""
        return self.inputs.square().sum(1) + bool(self.bias)


class ChainGradients:
    """Gradients of records in a chain of dense layers.

    The gradient of a row (a record and weights of the outputs) in a weight matrix is an outer product. One
    factor is the backward signal, i.e. the gradient with respect to the layer's pre-activations. The other
    factor is the layer's input. Only these factors are stored.
    """

    def __init__(self, chain: MLP, x: Tensor, rows: Rows, layers: tuple[str, ...]) -> None:
        self.x, self.rows, self.layers = x, rows, []
        values_per_sample = sum(layer.in_features + layer.out_features for layer in chain.linears)
        inputs_by_layer: list[list[Tensor]] = [[] for _ in chain.linears]
        signals_by_layer = [x.new_zeros(len(rows), layer.out_features) for layer in chain.linears]
        layer_indices = [
            layer_index
            for layer_index in range(len(chain.linears))
            if f"layers.{layer_index}" in layers
        ]
        for block in split_blocks(len(x), values_per_sample):
            in_block = (rows.index >= block.start) & (rows.index < block.stop)
            index_in_block = rows.index[in_block] - block.start
            activations = chain.trace(x[block])
            block_signals = chain.signals(activations, rows.covectors[in_block], index_in_block)
            for layer_index in layer_indices:
                inputs_by_layer[layer_index].append(activations.inputs[layer_index])
                signals_by_layer[layer_index][in_block] = block_signals[layer_index]
        for layer_index in layer_indices:
            weight_name = f"layers.{layer_index}.weight"
            bias_name = (
                "" if chain.linears[layer_index].bias is None else f"layers.{layer_index}.bias"
            )
            self.layers.append(
                _Layer(
                    torch.cat(inputs_by_layer[layer_index]),
                    signals_by_layer[layer_index],
                    weight_name,
                    bias_name,
                )
            )

    def squares(self) -> Tensor:
        """Return the squared norm of every gradient, (R,).

        A layer with backward signal d and input a adds |d|^2 |a|^2. If the layer has a bias, it adds |d|^2
        (|a|^2 + 1).
        """
        squared_norms = self.x.new_zeros(len(self.rows))
        for layer in self.layers:
            squared_norms += layer.signals.square().sum(1) * layer.squares[self.rows.index]
        return squared_norms

    def gram(self) -> Tensor:
        """Return the inner products of all pairs of gradients, (R, R).

        A layer adds the elementwise product of D D^T and A A^T. D has the backward signals of the layer as
        rows, and A has its inputs as rows. If the layer has a bias, A A^T + 1 takes the place of A A^T.
        """
        gram_matrix, index = self.x.new_zeros(len(self.rows), len(self.rows)), self.rows.index
        for layer in self.layers:
            input_products = layer.inputs @ layer.inputs.T + bool(layer.bias)
            gram_matrix += (layer.signals @ layer.signals.T).mul_(input_products[index][:, index])
        return gram_matrix

    def combine(self, lam: Tensor) -> Theta:
        """Return the sum of all gradients, weighted with the numbers ``lam``, by parameter name."""
        weighted_sum: Theta = {}
        for layer in self.layers:
            columns = self._columns(layer, lam)
            weighted_sum[layer.weight] = columns.T @ layer.inputs
            if layer.bias:
                weighted_sum[layer.bias] = columns.sum(0)
        return weighted_sum

    def project(self, t: Theta) -> Tensor:
        """Return the inner product (R,) of every gradient with a direction ``t`` of the parameters."""
        inner_products = self.x.new_zeros(len(self.rows))
        for layer in self.layers:
            pre_activation_changes = layer.inputs @ t[layer.weight].T
            if layer.bias:
                pre_activation_changes = pre_activation_changes + t[layer.bias]
            inner_products += (layer.signals * pre_activation_changes[self.rows.index]).sum(1)
        return inner_products

    def columns(self, lam: Tensor, name: str) -> Tensor:
        """Return the vector c_i of each record x_i.

        The record's gradient times its multiplier is c_i x_i^T.

        Args:
            lam: Multipliers (weights) of the R terms of the sum.
            name: Name of a weight matrix that is multiplied with the records.

        Returns:
            The vectors c_i, (n, h).
        """
        return self._columns(next(layer for layer in self.layers if layer.weight == name), lam)

    def sizes(self, lam: Tensor, name: str) -> Tensor:
        """Return the norm of each record's gradient times its multipliers (weights).

        Args:
            lam: Multipliers (weights) of the R terms of the sum.
            name: Name of the weight whose gradient is measured, "" for all layers.

        Returns:
            The norms, (n,).
        """
        squared_norms = self.x.new_zeros(len(self.x))
        for layer in self.layers:
            if name in ("", layer.weight):
                squared_input_norms = layer.inputs.square().sum(1) if name else layer.squares
                squared_norms += self._columns(layer, lam).square().sum(1) * squared_input_norms
        return squared_norms.sqrt()

    def _columns(self, layer: _Layer, lam: Tensor) -> Tensor:
        columns = layer.signals.new_zeros(len(self.x), layer.signals.shape[1])
        return columns.index_add_(0, self.rows.index, lam[:, None] * layer.signals)


class AnyGradients:
    """Gradients of records in any network, by automatic differentiation of one block of records at a time."""

    def __init__(self, model: nn.Module, x: Tensor, rows: Rows, layers: tuple[str, ...]) -> None:
        self.model, self.x, self.rows = model, x, rows
        weights_by_name = parameters(model)
        names_by_layer = by_layer(weights_by_name)
        chosen_names = {name for layer in layers for name in names_by_layer[layer]}
        self.chosen = {name: t for name, t in weights_by_name.items() if name in chosen_names}
        self.frozen = {name: t for name, t in weights_by_name.items() if name not in chosen_names}
        self.size = sum(t.numel() for t in self.chosen.values())
        # Assumed upper limit of the float64 values that a pass through the network stores for one record.
        self.activations = 32 * x[0].numel() + 4096

    def _outputs(self, chosen: Theta, x: Tensor) -> Tensor:
        return functional_call(self.model, {**self.frozen, **chosen}, (x,))

    def _row_gradients(self, block: slice) -> Tensor:
        """Return the gradients (b, P) of b rows with respect to all P chosen parameters.

        A row is a record with weights of the network's outputs. The slice ``block`` chooses the rows.
        """
        return self._flat(self.x[self.rows.index[block]], self.rows.covectors[block])

    def _flat(self, x: Tensor, covectors: Tensor, name: str = "") -> Tensor:
        def gradient(sample: Tensor, covector: Tensor) -> Theta:
            def value(chosen: Theta) -> Tensor:
                return (covector * self._outputs(chosen, sample[None])[0]).sum()

            return grad(value)(self.chosen)

        gradients = vmap(gradient)(x, covectors)
        return torch.cat([t.flatten(1) for n, t in gradients.items() if name in ("", n)], 1)

    def squares(self) -> Tensor:
        """Return the squared norm of every gradient, (R,), with one block of gradients in memory."""
        row_blocks = split_blocks(len(self.rows), self.size)
        return torch.cat([self._row_gradients(block).square().sum(1) for block in row_blocks])

    def gram(self) -> Tensor:
        """Return the inner products of all pairs of gradients, (R, R)."""
        # Only the gradients of two blocks of records fit into memory. So the gradients of a block are
        # computed again for each other block.
        row_blocks = list(split_blocks(len(self.rows), self.size))
        gram_matrix = self.x.new_zeros(len(self.rows), len(self.rows))
        for k, block in enumerate(row_blocks):
            gradients = self._row_gradients(block)
            gram_matrix[block, block] = gradients @ gradients.T
            for later in row_blocks[k + 1 :]:
                gram_matrix[block, later] = gradients @ self._row_gradients(later).T
                gram_matrix[later, block] = gram_matrix[block, later].T
        return gram_matrix

    def combine(self, lam: Tensor) -> Theta:
        """Return the sum of all gradients, weighted with the numbers ``lam``, by parameter name.

        Each block of records needs one backward pass.
        """
        weighted_covectors = self.rows.combine(lam, len(self.x))
        weighted_sum = {name: torch.zeros_like(t) for name, t in self.chosen.items()}
        for block in split_blocks(len(self.x), self.activations):

            def value(chosen: Theta, block: slice = block) -> Tensor:
                return (weighted_covectors[block] * self._outputs(chosen, self.x[block])).sum()

            for name, gradient in grad(value)(self.chosen).items():
                weighted_sum[name] += gradient
        return weighted_sum

    def project(self, t: Theta) -> Tensor:
        """Return the inner product (R,) of every gradient with a direction ``t`` of the parameters.

        Each block of records needs one forward-mode pass.
        """
        direction = {name: t[name] for name in self.chosen}
        output_changes = []
        for block in split_blocks(len(self.x), self.activations):

            def outputs(chosen: Theta, block: slice = block) -> Tensor:
                return self._outputs(chosen, self.x[block])

            output_changes.append(jvp(outputs, (self.chosen,), (direction,))[1])
        return self.rows.values(torch.cat(output_changes))

    def sizes(self, lam: Tensor, name: str) -> Tensor:
        """Return the norm of each record's gradient times its multipliers (weights).

        Args:
            lam: Multipliers (weights) of the R terms of the sum.
            name: Name of the weight whose gradient is measured, "" for all parameters.

        Returns:
            The norms, (n,).
        """
        weighted_covectors = self.rows.combine(lam, len(self.x))
        sample_blocks = split_blocks(len(self.x), self.size)
        return torch.cat(
            [self._flat(self.x[b], weighted_covectors[b], name).norm(dim=1) for b in sample_blocks]
        )

    def columns(self, lam: Tensor, name: str) -> Tensor:
        """Return the vector c_i of each record x_i.

        The record's gradient times its multiplier is c_i x_i^T.

        Args:
            lam: Multipliers (weights) of the R terms of the sum.
            name: Name of a weight matrix that is multiplied with the records.

        Returns:
            The vectors c_i, (n, h).
        """
        weighted_covectors, columns = self.rows.combine(lam, len(self.x)), []
        for block in split_blocks(len(self.x), self.size):
            flat_records = self.x[block].flatten(1)
            gradients = self._flat(self.x[block], weighted_covectors[block], name).reshape(
                len(flat_records), -1, flat_records.shape[1]
            )
            squared_norms = flat_records.square().sum(1, keepdim=True).clamp(min=1e-300)
            columns.append((gradients @ flat_records[:, :, None])[..., 0] / squared_norms)
        return torch.cat(columns)


Gradients = ChainGradients | AnyGradients


@dataclass(frozen=True, eq=False)
class Multipliers:
    """The multipliers (weights) with which a sum of gradients is closest to a target.

    Attributes:
        lam: One multiplier per row, (R,).
        gap: Largest entry of the projected gradient of the fit, relative to the largest gradient entry at
            zero multipliers. At the optimum, the gap is 0.
        method: How the multipliers were computed: "exact" or "descent".
    """

    lam: Tensor
    gap: float
    method: str


def fit_multipliers(
    gradients: Gradients, target: Theta, rows: int, free: bool, watch: Counter | None = None
) -> Multipliers:
    """Fit the multipliers with which the weighted sum of gradients is closest to a target.

    For up to ``MAX_EXACT_ROWS`` gradients the fit is exact. For more gradients, projected gradient descent
    computes it.

    Args:
        gradients: Gradients of the rows.
        target: The tensors that the weighted sum should equal, by parameter name.
        rows: Number of rows, i.e. of gradients.
        free: Whether multipliers may be negative.
        watch: Function that reports progress. It is called with the step, the number of steps, and a text.

    Returns:
        The multipliers, with a measure of how far they are from the optimum.
    """
    inner_products = gradients.project(target)
    if rows <= MAX_EXACT_ROWS:
        gram_matrix = gradients.gram()
        least_squares_problem = factor_gram(gram_matrix.cpu(), inner_products.cpu())
        multipliers = solve(least_squares_problem, free).to(inner_products)
        return Multipliers(
            multipliers,
            _relative_violation(
                multipliers, inner_products - gram_matrix @ multipliers, inner_products, free
            ),
            "exact",
        )
    multipliers = descend(gradients, inner_products, free, watch)
    descent_direction = inner_products - gradients.project(gradients.combine(multipliers))
    return Multipliers(
        multipliers,
        _relative_violation(multipliers, descent_direction, inner_products, free),
        "descent",
    )


def descend(
    gradients: Gradients, inner: Tensor, free: bool, watch: Counter | None = None
) -> Tensor:
    """Fit the weights (multipliers) of many gradients by projected gradient descent.

    The (R, R) Gram matrix is too large to store. Each product with this matrix is computed by two passes over
    the records instead. Gradients are first scaled to equal norms. The step size is 1 / (1.1 s), where s is
    the power method's estimate of the matrix's largest eigenvalue. The factor 1.1 is needed because the power
    method underestimates the eigenvalue. If a step with momentum increases the error, the momentum restarts
    at zero (O'Donoghue and Candes 2015).

    Args:
        gradients: Gradients of the rows.
        inner: Inner product of each gradient with the target, (R,).
        free: Whether multipliers may be negative.
        watch: Function that reports progress. It is called with the step, the number of steps, and a text.

    Returns:
        The multipliers, (R,).
    """
    gradient_norms = gradients.squares().sqrt()
    # If the gradient of a record is zero up to rounding, the weight (multiplier) of the record stays 0.
    inverse_norms = torch.where(
        gradient_norms > 1e-12 * gradient_norms.max(), 1 / gradient_norms.clamp(min=1e-300), 0.0
    )

    def product(scaled_lam: Tensor) -> Tensor:
        return inverse_norms * gradients.project(gradients.combine(inverse_norms * scaled_lam))

    scaled_inner_products = inverse_norms * inner
    eigenvector, eigenvalue = (
        torch.ones_like(scaled_inner_products) / len(scaled_inner_products) ** 0.5,
        scaled_inner_products.new_ones(()),
    )
    for _ in range(POWER_ITERATIONS):
        eigenvector = product(eigenvector)
        eigenvalue = eigenvector.norm()
        eigenvector = eigenvector / eigenvalue.clamp(min=1e-300)
    step_size = 1 / (1.1 * eigenvalue.clamp(min=1e-300))
    scaled_lam = previous_scaled_lam = torch.zeros_like(scaled_inner_products)
    momentum, tolerance = 1.0, TOLERANCE * float(scaled_inner_products.abs().max())
    for k in range(ITERATIONS):
        if watch is not None and k % 10 == 0:
            watch(k, ITERATIONS, "multipliers")
        next_momentum = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        lookahead = scaled_lam + (momentum - 1) / next_momentum * (scaled_lam - previous_scaled_lam)
        descent_direction = scaled_inner_products - product(lookahead)
        next_scaled_lam = lookahead + step_size * descent_direction
        next_scaled_lam = next_scaled_lam if free else next_scaled_lam.clamp(min=0)
        # If a step with momentum points against the descent direction, the momentum is set to zero.
        if float((descent_direction * (next_scaled_lam - scaled_lam)).sum()) < 0:
            next_momentum = 1.0
        previous_scaled_lam, scaled_lam, momentum = scaled_lam, next_scaled_lam, next_momentum
        if _largest_projected_entry(scaled_lam, descent_direction, free) <= tolerance:
            break
    return inverse_norms * scaled_lam


def _largest_projected_entry(lam: Tensor, descent_direction: Tensor, free: bool) -> float:
    """Return the largest entry of the projected gradient, which is 0 if the multipliers are optimal.

    ``descent_direction`` is the negative gradient of half the squared error of the fit. The optimum has two
    conditions. If a multiplier is positive or may be negative, its entry of ``descent_direction`` is 0.
    Otherwise its entry is at most 0.
    """
    violation = (
        descent_direction.abs()
        if free
        else torch.where(lam > 0, descent_direction.abs(), descent_direction.clamp(min=0))
    )
    return float(violation.max())


def _relative_violation(lam: Tensor, descent_direction: Tensor, inner: Tensor, free: bool) -> float:
    """Return how far fitted multipliers (weights) are from the optimum: the largest projected gradient.

    The entry is relative to the gradient at zero multipliers.
    """
    return _largest_projected_entry(lam, descent_direction, free) / max(
        float(inner.abs().max()), 1e-300
    )
