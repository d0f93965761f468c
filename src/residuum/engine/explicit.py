"""Loss of an attack on an MLP and its gradients, by explicit forward, backward and double backward passes.

All R runs are evaluated together. The loss of a run is

    L = sum_l w_l || target_l - T_l ||^2,    T_l = sum_i d_l(x_i) (a_{l-1}(x_i), 1)^T

Forward        z_l = a_{l-1} W_l^T + b_l,  a_l = s(z_l)
Backward       d_D = u,  d_{l-1} = (d_l W_l) o s'(z_{l-1})
Adjoints       with E_l = dL/dT_l = -2 w_l (target_l - T_l):
  of d         dbar_l = a_{l-1} E_l^T + 1 e_l^T + (dbar_{l-1} o s'(z_{l-1})) W_l^T       (l upwards)
  of z         zbar_l = dbar_l o (d_{l+1} W_{l+1}) o s''(z_l) + abar_l o s'(z_l)
  of a         abar_{l-1} = d_l E_l + zbar_l W_l                                          (l downwards)

Shapes: x is (R, m, d) and u is (R, m, C). All runs share the weights. The activation is s, and o is the
elementwise product. If the activation has a smooth surrogate, s' and s'' are the derivatives of the
surrogate.

If the intermediate results of all candidates do not fit into the workspace, the candidates are processed in
chunks, in two passes. The first pass sums T_l over the chunks. The second pass computes the adjoints of each
chunk. It reuses the matrix products of the first pass as far as the workspace allows (``plan``).

With half=True, both factors of a product are rounded to bfloat16:

- On a GPU with bf16 matrix units this is the fastest mode. Sums and results are in float32.
- On a CPU with bf16 instructions this is twice as fast as float32. The results are rounded too, so sums that
  nearly cancel (``cancels``) stay in float32.
- On any other CPU only the factors are rounded, to allow comparisons.

Otherwise products are not rounded. In float32 they use TF32 if ``matmul_precision`` enables it.

Matrix products dominate the cost of one evaluation. Layer l maps a = h_{l-1} inputs to b = h_l
outputs, and each of its products takes 2 R m a b operations.

=====================================  =======================================================
product                                when
=====================================  =======================================================
z_l = a_{l-1} W_l^T                    always
d_l W_l                                l > 1
T_l = d_l^T a_{l-1}                    w_l > 0, or the residual is measured
a_{l-1} E_l^T,  d_l E_l                w_l > 0
(dbar_{l-1} o s') W_l^T                l > 1
zbar_l W_l                             l < L, or u depends on the outputs
z_l and d_l W_l a second time          for candidates whose products did not fit into the workspace
=====================================  =======================================================

The first layer is always part of the loss. Elementwise operations are not counted, because memory bandwidth
limits them.
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
# Matrix products of one chunk, for each set of weights: pre-activations z_l, and backward products d_l W_l.
Products = list[tuple[list[Tensor], list[Tensor]]]

# Memory in bytes for intermediate results. If they do not fit, candidates are processed in chunks.
WORKSPACE = 2 * 2**30
CHUNK = WORKSPACE // 8  # memory in bytes for the intermediate results of one chunk of candidates
# Numbers stored at once per candidate and hidden unit: five each for backward and double backward.
LIVE_TENSORS = 10
# Number of tensors as large as all candidates: state, best point, optimizer, gradient, temporaries.
CANDIDATE_COPIES = 10


class Covectors(Protocol):
    """Protocol of the methods that the engine calls to weight the gradients of candidates."""

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """Return the covectors u of the candidates, which weight the gradients of the outputs.

        Args:
            point: Index of the weights at which the gradients are taken (theta or theta0).
            outputs: Outputs of the network for the candidates (R, m, C).
            labels: Labels of the candidates, (m,) or (R, m).
            lam: Multipliers of the candidates (R, m, ...).

        Returns:
            The covectors u, with the shape of the outputs.
        """

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Map the derivative of the loss in u to its derivatives in the outputs and in lam.

        Args:
            point: Index of the weights at which the gradients are taken (theta or theta0).
            outputs: Outputs of the network for the candidates (R, m, C).
            labels: Labels of the candidates, (m,) or (R, m).
            lam: Multipliers of the candidates (R, m, ...).
            ubar: Derivative of the loss with respect to the covectors u.

        Returns:
            The derivative in the outputs, or None if u does not depend on the outputs, and the derivative in
            lam.
        """


@dataclass(frozen=True)
class Candidates:
    """Candidates for training samples, with their multipliers and labels.

    Attributes:
        x: Candidates (R, m, d): m flattened samples in each of R runs.
        lam: Multipliers of the candidates (R, m, ...), not divided by the solver's scale.
        labels: Labels, (m,) if all runs have the same labels, otherwise (R, m).
    """

    x: Tensor
    lam: Tensor
    labels: Tensor

    def __getitem__(self, rows: slice) -> Candidates:
        return Candidates(self.x[:, rows], self.lam[:, rows], self.labels[..., rows])

    def select_run(self, run: int) -> Candidates:
        """Return the candidates of one run, without the dimension of the runs."""
        labels = self.labels if self.labels.ndim == 1 else self.labels[run]
        return Candidates(self.x[run], self.lam[run], labels)


@dataclass(frozen=True)
class _Tape:
    """Intermediate results of an MLP's forward and backward pass, which the double backward pass needs.

    All lists are in the order of the layers.

    Attributes:
        inputs: Inputs a_{l-1} of the layers, of shape (R, m, h). The first input is x.
        outputs: Outputs z_D of the network, of shape (R, m, C).
        slopes: First derivatives s'(z_l) of the activation in the hidden layers.
        curvatures: Second derivatives s''(z_l) of the activation in the hidden layers.
        ungated: Backward signals d_{l+1} W_{l+1} before the multiplication by s'(z_l).
        signals: Backward signals d_l of the layers. The last signal is the covectors u.
    """

    inputs: list[Tensor]
    outputs: Tensor
    slopes: list[Tensor]
    curvatures: list[Tensor]
    ungated: list[Tensor]
    signals: list[Tensor]


@dataclass(frozen=True)
class ChunkPlan:
    """Division of the candidates into chunks that are evaluated one after another.

    Attributes:
        size: Number of candidates in a chunk.
        cached: Number of chunks whose matrix products are stored for the second pass.
        count: Number of chunks.
    """

    size: int
    cached: int
    count: int


class ExplicitEquation:
    """Loss of an attack on an MLP, and its gradients, by explicit formulas.

    The gradients of the MLP are taken at the released weights theta, the initial weights theta0, or both.

    Args:
        points: Copies of the network with the weights at which gradients are taken.
        target: Tensors by parameter name that the weighted sum of gradients must equal.
        layer_weights: Weight w_l of every layer in the loss. A layer with weight zero can be measured but
            does not enter the loss.
        workspace: Memory in bytes that the intermediate results of all candidates may take.
        chunk: Memory in bytes that the intermediate results of one chunk of candidates may take.
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
        # If True, factors of matrix products are rounded to bfloat16. The solver sets this during its search.
        self.half = False
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
        """Number of inputs, widths of the hidden layers, and number of outputs of the MLP."""
        weights = [weight for weight, _ in self.points[0]]
        return (weights[0].shape[1], *(len(weight) for weight in weights))

    def plan(self, runs: int, candidates: int) -> ChunkPlan:
        """Divide the candidates into chunks that fit into the workspace.

        Args:
            runs: Number of runs R.
            candidates: Number of candidates m of each run.

        Returns:
            A plan with a single chunk if all candidates fit into the workspace, otherwise with several chunks
            of about equal size.
        """
        _, *hidden, outputs = self.widths
        unit_bytes = runs * len(self.points) * self.target[0][0].element_size()
        if candidates * LIVE_TENSORS * unit_bytes * (sum(hidden) + outputs) <= self.workspace:
            return ChunkPlan(candidates, 1, 1)
        candidate_bytes = LIVE_TENSORS * unit_bytes * (sum(hidden) + outputs)
        size = max(1, min(candidates, self.chunk // candidate_bytes))
        count = -(-candidates // size)
        size = -(-candidates // count)  # all chunks have this size, but the last one can be smaller
        cached = self.workspace // (size * unit_bytes * (2 * sum(hidden) + outputs))
        return ChunkPlan(size, min(count, cached), count)

    def evaluate(
        self,
        candidates: Candidates,
        objective: Covectors,
        activation: Activation,
        measure: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate the squared residuals of the layers, and the gradients of the loss in x and lam.

        Args:
            candidates: The candidates, with their multipliers and labels.
            objective: Computes the covectors u, which weight the gradients of the outputs.
            activation: Activation of the network, with the derivatives of its smooth surrogate.
            measure: Whether to compute the residuals of the layers. A step of the solver needs only the
                gradients.

        Returns:
            The squared residuals of the layers (R, L), which are zero if ``measure`` is False, and the
            gradients of the loss in x and lam.
        """
        runs, count = candidates.x.shape[:2]
        plan = self.plan(runs, count)
        if plan.count == 1:
            tapes = self._record(candidates, objective, activation, self._no_products())
            errors, squares = self._finish(self._subtract(None, tapes, measure), runs, measure)
            grad_x, grad_lam, _ = self._adjoints(tapes, errors, candidates, objective)
            return squares, grad_x, grad_lam
        sums, cache = None, {}
        chunks = [slice(i, i + plan.size) for i in range(0, count, plan.size)]
        for i, rows in enumerate(chunks):
            products = self._no_products()
            tapes = self._record(candidates[rows], objective, activation, products)
            sums = self._subtract(sums, tapes, measure)
            if i < plan.cached:
                cache[i] = products
        assert sums is not None
        errors, squares = self._finish(sums, runs, measure)
        grad_x, grad_lam = torch.empty_like(candidates.x), torch.empty_like(candidates.lam)
        for i, rows in enumerate(chunks):
            products = cache.pop(i, self._no_products())
            tapes = self._record(candidates[rows], objective, activation, products)
            grad_x[:, rows], grad_lam[:, rows], _ = self._adjoints(
                tapes, errors, candidates[rows], objective
            )
        return squares, grad_x, grad_lam

    def pre_activations(self, x: Tensor, activation: Activation) -> list[Tensor]:
        """Return the pre-activations of the hidden layers, with the released weights theta.

        Args:
            x: Samples (..., d).
            activation: Activation of the network.

        Returns:
            The pre-activations z_l of each hidden layer (..., h).
        """
        hidden = []
        for weight, bias in self.points[0][:-1]:
            hidden.append(x @ weight.T if bias is None else x @ weight.T + bias)
            x = activation(hidden[-1])
        return hidden

    def compute_errors(
        self, candidates: Candidates, objective: Covectors, activation: Activation
    ) -> Errors:
        """Compute the derivative E_l of the loss in the sum of gradients T_l, for each layer l.

        With these derivatives, :meth:`pull_back` differentiates the sum while the residual is held fixed.

        Args:
            candidates: The candidates, with their multipliers and labels.
            objective: Computes the covectors u, which weight the gradients of the outputs.
            activation: Activation of the network, with the derivatives of its smooth surrogate.

        Returns:
            E_l for the weight matrix and the bias of every layer, None for layers that are not in the loss.
        """
        sums: Errors | None = None
        size = self.plan(*candidates.x.shape[:2]).size
        for i in range(0, candidates.x.shape[1], size):
            chunk = candidates[i : i + size]
            tapes = self._record(chunk, objective, activation, self._no_products())
            sums = self._subtract(sums, tapes, False)
        assert sums is not None
        return self._finish(sums, len(candidates.x), False)[0]

    def pull_back(
        self,
        candidates: Candidates,
        errors: Errors,
        objective: Covectors,
        activation: Activation,
    ) -> tuple[Tensor, Tensor]:
        """Differentiate sum_l <E_l, T_l(x)> in the candidates x, with the derivatives E_l held fixed.

        T_l is the weighted sum of gradients in layer l, and E_l is the derivative of the loss in T_l.

        Args:
            candidates: The candidates, with their multipliers and labels.
            errors: Derivatives E_l of every layer, from :meth:`compute_errors`.
            objective: Computes the covectors u, which weight the gradients of the outputs.
            activation: Activation of the network, with the derivatives of its smooth surrogate.

        Returns:
            The gradient in x, and the term of every candidate in the sum (R, m).
        """
        tapes = self._record(candidates, objective, activation, self._no_products())
        grad_x, _, ubars = self._adjoints(tapes, errors, candidates, objective)
        terms = [(tape.signals[-1] * ubar).sum(-1) for tape, ubar in zip(tapes, ubars, strict=True)]
        return grad_x, torch.stack(terms).sum(0)

    def _no_products(self) -> Products:
        return [([], []) for _ in self.points]

    def _record(
        self,
        candidates: Candidates,
        objective: Covectors,
        activation: Activation,
        products: Products,
    ) -> list[_Tape]:
        """Run the forward and backward passes of the MLP with every set of weights (theta, theta0).

        Args:
            candidates: The candidates, with their multipliers and labels.
            objective: Computes the covectors u, which weight the gradients of the outputs.
            activation: Activation of the network, with the derivatives of its smooth surrogate.
            products: Matrix products for each set of weights. Empty lists are filled, and filled lists are
                reused.

        Returns:
            The intermediate results for every set of weights.
        """
        matmul = self._matmul()
        tapes = []
        for point, (layers, (pre, ungated)) in enumerate(zip(self.points, products, strict=True)):
            inputs, slopes, curvatures, is_cached = [candidates.x], [], [], bool(pre)
            for i, (weight, bias) in enumerate(layers):
                if not is_cached:
                    z = matmul(inputs[-1], weight.T)
                    pre.append(z if bias is None else z.add_(bias))
                if i < len(layers) - 1:
                    value, slope, curvature = activation.jet(pre[i])
                    inputs.append(value)
                    slopes.append(slope)
                    curvatures.append(curvature)
            signals = [objective.covectors(point, pre[-1], candidates.labels, candidates.lam)]
            for i in range(len(layers) - 1, 0, -1):
                if not is_cached:
                    ungated.insert(0, matmul(signals[0], layers[i][0]))
                signals.insert(0, ungated[i - 1 if is_cached else 0] * slopes[i - 1])
            tapes.append(_Tape(inputs, pre[-1], slopes, curvatures, ungated, signals))
        return tapes

    def _matmul(self) -> Callable[[Tensor, Tensor], Tensor]:
        return partial(multiply, half=True) if self.half else torch.matmul

    def _subtract(self, sums: Errors | None, tapes: list[_Tape], measure: bool) -> Errors:
        """Subtract the gradients of a chunk of candidates from the residual of every layer.

        The residual is target_l - T_l, with the sum T_l over the candidates of earlier chunks.

        If the layer weight w_l is positive, the residual of the weight matrix is multiplied by -2 w_l, so
        that it equals the derivative E_l at the end.

        Args:
            sums: Residuals after the earlier chunks, None before the first chunk.
            tapes: Intermediate results of the candidates of this chunk.
            measure: Whether the residuals of layers with weight zero are needed.

        Returns:
            The new residuals, None for layers that are not needed.
        """
        runs = len(tapes[0].inputs[0])
        differences: Errors = []
        for i, (weight, bias) in enumerate(self.target):
            w = self.layer_weights[i]
            if not (w or measure):
                differences.append(None)
                continue
            scale = -2 * w if w else 1.0
            earlier_difference = None if sums is None else sums[i]
            e = (
                weight.expand(runs, *weight.shape)
                if earlier_difference is None
                else earlier_difference[0]
            )
            for k, tape in enumerate(tapes):
                beta = scale if earlier_difference is None and k == 0 else 1.0
                signals = tape.signals[i].transpose(1, 2)
                e = accumulate(e, signals, tape.inputs[i], beta, -scale, self.half, cancels=True)
            e_bias = bias if earlier_difference is None else earlier_difference[1]
            if e_bias is not None:
                total = tapes[0].signals[i].sum(1)
                for tape in tapes[1:]:
                    total = total + tape.signals[i].sum(1)
                e_bias = e_bias - total
            differences.append((e, e_bias))
        return differences

    def _finish(self, sums: Errors, runs: int, measure: bool) -> tuple[Errors, Tensor]:
        """Return the derivative of the loss in each layer's sum, and the squared residuals (R, L).

        The derivative is None for layers with weight zero.
        """
        squares = self.target[0][0].new_zeros(runs, len(self.target))
        errors: Errors = []
        for i, difference in enumerate(sums):
            w = self.layer_weights[i]
            scale = -2 * w if w else 1.0
            if difference is None:
                errors.append(None)
                continue
            e, e_bias = difference[0], None if difference[1] is None else scale * difference[1]
            if measure:
                squares[:, i] = e.square().sum((1, 2)) / scale**2
                if e_bias is not None:
                    squares[:, i] += e_bias.square().sum(1) / scale**2
            errors.append((e, e_bias) if w else None)
        return errors, squares

    def _adjoints(
        self,
        tapes: list[_Tape],
        errors: Errors,
        candidates: Candidates,
        objective: Covectors,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the gradients of the loss in x and lam, and in u for each set of weights (theta, theta0)."""
        grad_x: Tensor | None = None
        grad_lam, ubars = torch.zeros_like(candidates.lam), []
        for point, tape in enumerate(tapes):
            # The backward pass begins at u = d_D, so the derivative in u is the last dbar. The loss depends
            # on lam through u. If u depends on the outputs, the loss depends on the outputs through u too.
            ubar, zbars = self._propagate_up(point, tape, errors)
            outbar, lambar = objective.pullback(
                point, tape.outputs, candidates.labels, candidates.lam, ubar
            )
            point_grad = self._propagate_down(point, tape, errors, outbar, zbars)
            grad_x = point_grad if grad_x is None else grad_x.add_(point_grad)
            grad_lam.add_(lambar)
            ubars.append(ubar)
        assert grad_x is not None
        return grad_x, grad_lam, ubars

    def _propagate_up(
        self, point: int, tape: _Tape, errors: Errors
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the derivative of the loss in u, and the terms of dL/dz_l that come from the backward pass.

        The layers are visited from the first to the last.
        """
        layers, matmul = self.points[point], self._matmul()
        dbar: Tensor | None = None
        zbars: list[Tensor | None] = []
        for i, error in enumerate(errors):
            # Since d_{l-1} = (d_l W_l) o s'(z_{l-1}), dbar_{l-1} gets the factors s'(z_{l-1}) and W_l^T.
            if dbar is not None:
                dbar = matmul(dbar * tape.slopes[i - 1], layers[i][0].T)
            # The sum T_l also depends on d_l. This adds a_{l-1} E_l^T for the weights and e_l for the bias.
            if error is not None:
                dbar = accumulate(dbar, tape.inputs[i], error[0].transpose(1, 2), half=self.half)
                if error[1] is not None:
                    dbar = dbar.add_(error[1][:, None])
            # The slope s'(z_l) in the backward pass depends on z_l, which contributes the factor s''(z_l).
            if i < len(layers) - 1:
                zbars.append(None if dbar is None else dbar * tape.ungated[i] * tape.curvatures[i])
        assert dbar is not None
        return dbar, zbars

    def _propagate_down(
        self,
        point: int,
        tape: _Tape,
        errors: Errors,
        zbar: Tensor | None,
        zbars: list[Tensor | None],
    ) -> Tensor:
        """Return the derivative of the loss in x, from the derivative ``zbar`` in the outputs.

        The layers are visited from the last to the first.
        """
        layers, matmul = self.points[point], self._matmul()
        for i in range(len(layers) - 1, -1, -1):
            # The input a_{l-1} is used twice: in z_l = a_{l-1} W_l^T, and in T_l = d_l^T a_{l-1}.
            abar = None if zbar is None else matmul(zbar, layers[i][0])
            if (error := errors[i]) is not None:
                abar = accumulate(abar, tape.signals[i], error[0], half=self.half)
            if i == 0:
                break  # a_0 is the candidate x, so abar is the result
            # The pre-activation z_{l-1} is used in the slope s'(z_{l-1}) and in the activation s(z_{l-1}).
            zbar = zbars[i - 1]
            if abar is not None:
                from_activation = abar * tape.slopes[i - 1]
                zbar = from_activation if zbar is None else zbar.add_(from_activation)
        assert abar is not None
        return abar


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def multiply(a: Tensor, weight: Tensor, half: bool = False) -> Tensor:
    """Multiply a batch of matrices by one shared matrix.

    Args:
        a: Matrices (..., k).
        weight: The shared matrix (k, n).
        half: Whether to round both factors to bfloat16.

    Returns:
        The products (..., n).
    """
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
    """Return beta * total + alpha * (a @ b) for batches of matrices.

    Args:
        total: Matrices (R, m, n) to which the product is added, None for zero.
        a: Matrices (R, m, k).
        b: Matrices (R, k, n).
        beta: Factor of ``total``.
        alpha: Factor of the matrix product.
        half: Whether to round a and b to bfloat16.
        cancels: Whether total and product nearly cancel. The product is then not rounded on a CPU.

    Returns:
        The result (R, m, n).
    """
    if total is None:
        total, beta = a.new_zeros(()), 0.0
    if not half or (cancels and not a.is_cuda):
        return torch.baddbmm(total, a, b, beta=beta, alpha=alpha)
    a, b = a.bfloat16(), b.bfloat16()
    if a.is_cuda:
        # The product is computed in float32, and the total is never rounded to bfloat16.
        product = torch.bmm(a, b, out_dtype=torch.float32)
    elif cpu_has_bf16():
        product = torch.bmm(a, b).float()
    else:
        return torch.baddbmm(total, a.float(), b.float(), beta=beta, alpha=alpha)
    return alpha * product if beta == 0 else torch.add(beta * total, product, alpha=alpha)


@contextmanager
def matmul_precision(tf32: bool) -> Iterator[None]:
    """Use TF32 if ``tf32``, otherwise full float32, for products of float32 matrices inside this context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@lru_cache(maxsize=1)
def cpu_has_bf16() -> bool:
    """Return True if this CPU has bfloat16 instructions, False if not or if torch cannot tell."""
    test = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return test is not None and bool(test())


@dataclass(frozen=True)
class EvaluationCost:
    """Cost of evaluating the loss of an attack and its gradients once.

    Attributes:
        flops: Number of floating-point operations of one evaluation, by layer.
        memory: Peak memory in bytes, by purpose (weights, candidates, workspace).
    """

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
    """Estimate the operations and the memory of one evaluation of the loss and its gradients.

    Args:
        equation: The explicit equation of the attacked MLP.
        runs: Number of runs R.
        candidates: Number of candidates m of each run.
        follows_outputs: Whether the covectors u depend on the network's outputs.
        measure: Whether the evaluation computes the residuals of all layers.

    Returns:
        The number of operations and the memory.
    """
    plan, widths = equation.plan(runs, candidates), equation.widths
    repeated_candidates = max(0, candidates - plan.cached * plan.size) if plan.count > 1 else 0
    rows, points = runs * candidates, len(equation.points)
    flops = []
    for i, weight in enumerate(equation.layer_weights):
        product_count = _count_products(i, len(widths) - 1, bool(weight), follows_outputs, measure)
        first_products = product_count * candidates
        repeated_products = (2 if i else 1) * repeated_candidates
        flops.append(
            2 * points * runs * widths[i] * widths[i + 1] * (first_products + repeated_products)
        )
    element_bytes = equation.target[0][0].element_size()
    parameters = sum(a * b for a, b in itertools.pairwise(widths))
    live_bytes = element_bytes * points * runs * plan.size * LIVE_TENSORS * sum(widths[1:])
    cached_width = 2 * sum(widths[1:-1]) + widths[-1]
    cached_bytes = element_bytes * points * runs * plan.cached * plan.size * cached_width
    memory = {
        "weights": element_bytes
        * parameters
        * (points + 1 + 2 * runs),  # weights, target, two sums of gradients per run
        "candidates": element_bytes * rows * widths[0] * CANDIDATE_COPIES,
        "workspace": live_bytes + (cached_bytes if plan.count > 1 else 0),
    }
    return EvaluationCost(tuple(flops), memory)


def _count_products(
    layer: int, depth: int, weighted: bool, follows_outputs: bool, measure: bool
) -> int:
    has_layer_below, needs_output_adjoint = layer > 0, layer < depth - 1 or follows_outputs
    return 1 + 2 * has_layer_below + (weighted or measure) + 2 * weighted + needs_output_adjoint
