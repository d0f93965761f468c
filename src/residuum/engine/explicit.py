"""Loss of an attack on an MLP and its gradients, by explicit forward, backward and double backward passes.

An attack searches candidates x_i (guesses of training samples) whose gradients add up to a known target. All
R runs of the attack are evaluated together. The loss of a run is

    L = sum_l w_l || target_l - T_l ||^2,    T_l = sum_i d_l(x_i) (a_{l-1}(x_i), 1)^T

T_l is the weighted sum of the candidates' gradients in the weight matrix W_l and the bias b_l of layer l, and
w_l is the weight of this layer in the loss. The pre-activations are z_l, and the activations are a_l with
a_0 = x. The last layer is D, so z_D are the outputs of the network. A candidate contributes the gradient of
<u, z_D> to the sum. Its covector u has one coefficient for each output. The backward signal d_l is the
derivative of <u, z_D> in z_l. A bar marks a derivative of the loss, such as dbar_l = dL/dd_l.

Forward        z_l = a_{l-1} W_l^T + b_l,  a_l = s(z_l)
Backward       d_D = u,  d_{l-1} = (d_l W_l) o s'(z_{l-1})
Adjoints       with E_l = dL/dT_l = -2 w_l (target_l - T_l), and e_l for its column of the bias:
  of d         dbar_l = a_{l-1} E_l^T + 1 e_l^T + (dbar_{l-1} o s'(z_{l-1})) W_l^T       (l increasing)
  of z         zbar_l = dbar_l o (d_{l+1} W_{l+1}) o s''(z_l) + abar_l o s'(z_l)
  of a         abar_{l-1} = d_l E_l + zbar_l W_l                                          (l decreasing)

Shapes: x is (R, m, d) and u is (R, m, C) for C outputs. All runs share the weights. The activation is s, and
o is the elementwise product. If the activation has a smooth surrogate, s' and s'' are the derivatives of the
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
# Results of a forward and a backward pass for a chunk of candidates. The first list holds the
# pre-activations of the layers. The second list holds the derivatives of the output in the inputs of the
# layers. There is one pair of lists for the trained and one for the initial weights.
Products = list[tuple[list[Tensor], list[Tensor]]]

# Memory in bytes for intermediate results. If they do not fit, candidates are processed in chunks.
WORKSPACE = 2 * 2**30
CHUNK = WORKSPACE // 8  # memory in bytes for the intermediate results of one chunk of candidates
# Number of values for each candidate and hidden unit that are in memory at the same time: five for the
# backward pass, and five for the second backward pass through it.
LIVE_TENSORS = 10
# Number of tensors in memory that are as large as all candidates together. They hold the current candidates,
# the best candidates so far, the optimizer state, the gradient, and temporary values.
CANDIDATE_COPIES = 10


class Covectors(Protocol):
    """Protocol of an object that computes the covector of every candidate.

    A candidate contributes the gradient of <u, z> to a sum of gradients, where z are the network's outputs
    for this candidate. So its covector u has one coefficient for each output.
    """

    def covectors(self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor) -> Tensor:
        """Return the covector u of every candidate, with one coefficient for each network output.

        Args:
            point: Index of the set of weights (theta or theta0) at which the gradients are taken.
            outputs: Outputs of the network for the candidates (R, m, C).
            labels: Labels of the candidates, (m,) or (R, m).
            lam: Multipliers (weights) of the candidates (R, m, ...).

        Returns:
            The covectors u, with the shape of the outputs.
        """

    def pullback(
        self, point: int, outputs: Tensor, labels: Tensor, lam: Tensor, ubar: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Differentiate the loss in the outputs and in the multipliers, given its derivative in covectors.

        The covector u of a candidate is a function of the outputs and of the candidate's multipliers.

        Args:
            point: Index of the set of weights (theta or theta0) at which the gradients are taken.
            outputs: Outputs of the network for the candidates (R, m, C).
            labels: Labels of the candidates, (m,) or (R, m).
            lam: Multipliers (weights) of the candidates (R, m, ...).
            ubar: Derivative of the loss in the covectors u.

        Returns:
            The derivative in the outputs and the derivative in lam. The derivative in the outputs is None
            if u does not depend on the outputs.
        """


@dataclass(frozen=True)
class Candidates:
    """Candidates for training samples, with their multipliers and labels.

    Attributes:
        x: Candidates (R, m, d): m flattened samples in each of R runs.
        lam: Multipliers (weights) of the candidates (R, m, ...) as they enter the loss. Solvers store them
            divided by a scale, so solvers must multiply them by this scale first.
        labels: Labels, (m,) if all runs have the same labels, otherwise (R, m).
    """

    x: Tensor
    lam: Tensor
    labels: Tensor

    def __getitem__(self, rows: slice) -> Candidates:
        return Candidates(self.x[:, rows], self.lam[:, rows], self.labels[..., rows])

    def select_run(self, run: int) -> Candidates:
        """Select the candidates (guesses of samples) of one run, without the dimension of the runs."""
        labels_of_run = self.labels if self.labels.ndim == 1 else self.labels[run]
        return Candidates(self.x[run], self.lam[run], labels_of_run)


@dataclass(frozen=True)
class _RecordedPasses:
    """Intermediate results of an MLP's forward and backward pass, which the double backward pass needs.

    All lists are in the order of the layers.

    Attributes:
        inputs: Inputs of the layers, of shape (R, m, h). The first input is the candidates x.
        outputs: Outputs of the network, of shape (R, m, C).
        slopes: First derivatives of the activation at the pre-activations of the hidden layers.
        curvatures: Second derivatives of the activation at the pre-activations of the hidden layers.
        ungated: For each hidden layer the product of the backward signal and the weight matrix of the layer
            above. Multiplied by the slope, this product becomes the backward signal of the hidden layer.
        signals: Backward signals of the layers. The last element holds the covectors u.
    """

    inputs: list[Tensor]
    outputs: Tensor
    slopes: list[Tensor]
    curvatures: list[Tensor]
    ungated: list[Tensor]
    signals: list[Tensor]


@dataclass(frozen=True)
class ChunkPlan:
    """A plan that divides the candidates into chunks, which are evaluated one after another.

    Attributes:
        size: Number of candidates in a chunk.
        cached: Number of chunks whose matrix products are stored. Every chunk is evaluated twice, and the
            second evaluation of these chunks uses the stored products.
        count: Number of chunks.
    """

    size: int
    cached: int
    count: int


class ExplicitEquation:
    """Loss of an attack on an MLP, and its gradients, by explicit formulas.

    The gradients of the MLP are taken at the released weights theta, at the initial weights theta0, or at
    both.

    Args:
        points: Copies of the network with the weights at which gradients are taken.
        target: For each parameter name the tensor that the weighted sum of gradients must equal.
        layer_weights: Weight w_l of every layer in the loss. A layer with weight zero does not enter the
            loss, but its residual can be measured.
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
        # Whether the factors of matrix products are rounded to bfloat16. Solvers set this attribute.
        self.half = False
        self.points = [
            [(p.weight.detach(), _bias(p.bias)) for p in point.linears] for point in points
        ]
        layer_count = len(self.points[0])
        self.target = [
            (target[f"layers.{i}.weight"].detach(), _bias(target.get(f"layers.{i}.bias")))
            for i in range(layer_count)
        ]
        self.layer_weights = tuple(layer_weights)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of inputs, widths of the hidden layers, and number of outputs of the MLP."""
        weight_matrices = [weight for weight, _ in self.points[0]]
        return (weight_matrices[0].shape[1], *(len(weight) for weight in weight_matrices))

    def plan(self, runs: int, candidates: int) -> ChunkPlan:
        """Divide the candidates into chunks that fit into the workspace.

        Args:
            runs: Number of runs R.
            candidates: Number of candidates m of each run.

        Returns:
            A plan with a single chunk if all candidates fit into the workspace, otherwise with several chunks
            of about equal size.
        """
        _, *hidden_widths, outputs = self.widths
        bytes_per_unit = runs * len(self.points) * self.target[0][0].element_size()
        if (
            candidates * LIVE_TENSORS * bytes_per_unit * (sum(hidden_widths) + outputs)
            <= self.workspace
        ):
            return ChunkPlan(candidates, 1, 1)
        candidate_bytes = LIVE_TENSORS * bytes_per_unit * (sum(hidden_widths) + outputs)
        chunk_size = max(1, min(candidates, self.chunk // candidate_bytes))
        chunk_count = -(-candidates // chunk_size)
        # All chunks have the same size, but the last chunk can be smaller.
        chunk_size = -(-candidates // chunk_count)
        cached_chunks = self.workspace // (
            chunk_size * bytes_per_unit * (2 * sum(hidden_widths) + outputs)
        )
        return ChunkPlan(chunk_size, min(chunk_count, cached_chunks), chunk_count)

    def evaluate(
        self,
        candidates: Candidates,
        objective: Covectors,
        activation: Activation,
        measure: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate the squared residual ||target_l - T_l||^2 of every layer l and the gradients of the loss.

        T_l is the weighted sum of the candidates' gradients in layer l.

        Args:
            candidates: The candidates for training samples, with their multipliers (weights) and labels.
            objective: Computes the covector u of every candidate (one coefficient for each network output).
            activation: Activation of the network, with the derivatives of its smooth surrogate.
            measure: Whether to compute the residuals of the layers. A step of the solver needs only the
                gradients.

        Returns:
            The squared residuals of the L layers for R runs (R, L), and the gradients of the loss in the
            candidates x and in their multipliers lam. The squared residuals are zero if ``measure`` is
            False.
        """
        runs, candidate_count = candidates.x.shape[:2]
        plan = self.plan(runs, candidate_count)
        if plan.count == 1:
            recorded_passes = self._run_passes(
                candidates, objective, activation, self._no_products()
            )
            errors, squares = self._finish_residuals(
                self._subtract_gradients(None, recorded_passes, measure), runs, measure
            )
            grad_x, grad_lam, _ = self._differentiate(
                recorded_passes, errors, candidates, objective
            )
            return squares, grad_x, grad_lam
        residuals, cache = None, {}
        chunks = [slice(i, i + plan.size) for i in range(0, candidate_count, plan.size)]
        for i, rows in enumerate(chunks):
            matrix_products = self._no_products()
            recorded_passes = self._run_passes(
                candidates[rows], objective, activation, matrix_products
            )
            residuals = self._subtract_gradients(residuals, recorded_passes, measure)
            if i < plan.cached:
                cache[i] = matrix_products
        assert residuals is not None
        errors, squares = self._finish_residuals(residuals, runs, measure)
        grad_x, grad_lam = torch.empty_like(candidates.x), torch.empty_like(candidates.lam)
        for i, rows in enumerate(chunks):
            matrix_products = cache.pop(i, self._no_products())
            recorded_passes = self._run_passes(
                candidates[rows], objective, activation, matrix_products
            )
            grad_x[:, rows], grad_lam[:, rows], _ = self._differentiate(
                recorded_passes, errors, candidates[rows], objective
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
        pre_activations = []
        for weight, bias in self.points[0][:-1]:
            pre_activations.append(x @ weight.T if bias is None else x @ weight.T + bias)
            x = activation(pre_activations[-1])
        return pre_activations

    def compute_errors(
        self, candidates: Candidates, objective: Covectors, activation: Activation
    ) -> Errors:
        """Compute the derivative E_l = dL/dT_l of the loss L in the sum of gradients T_l, for each layer l.

        T_l is the weighted sum of the candidates' gradients in layer l. :meth:`pull_back` takes these
        derivatives as constants.

        Args:
            candidates: The candidates for training samples, with their multipliers (weights) and labels.
            objective: Computes the covector u of every candidate (one coefficient for each network output).
            activation: Activation of the network, with the derivatives of its smooth surrogate.

        Returns:
            For every layer the derivative E_l in the weight matrix and in the bias, or None if the layer is
            not in the loss.
        """
        residuals: Errors | None = None
        chunk_size = self.plan(*candidates.x.shape[:2]).size
        for i in range(0, candidates.x.shape[1], chunk_size):
            chunk = candidates[i : i + chunk_size]
            recorded_passes = self._run_passes(chunk, objective, activation, self._no_products())
            residuals = self._subtract_gradients(residuals, recorded_passes, False)
        assert residuals is not None
        return self._finish_residuals(residuals, len(candidates.x), False)[0]

    def pull_back(
        self,
        candidates: Candidates,
        errors: Errors,
        objective: Covectors,
        activation: Activation,
    ) -> tuple[Tensor, Tensor]:
        """Differentiate sum_l <E_l, T_l(x)> in the candidates x, where the derivatives E_l are constants.

        T_l is the weighted sum of gradients in layer l, and E_l is the derivative of the loss in T_l.

        Args:
            candidates: The candidates for training samples, with their multipliers (weights) and labels.
            errors: Derivatives E_l of every layer, from :meth:`compute_errors`.
            objective: Computes the covector u of every candidate (one coefficient for each network output).
            activation: Activation of the network, with the derivatives of its smooth surrogate.

        Returns:
            The gradient in x, and for every candidate i its contribution sum_l <E_l, T_l(x_i)> (R, m).
        """
        recorded_passes = self._run_passes(candidates, objective, activation, self._no_products())
        grad_x, _, ubars = self._differentiate(recorded_passes, errors, candidates, objective)
        contributions = [
            (recorded.signals[-1] * ubar).sum(-1)
            for recorded, ubar in zip(recorded_passes, ubars, strict=True)
        ]
        return grad_x, torch.stack(contributions).sum(0)

    def _no_products(self) -> Products:
        return [([], []) for _ in self.points]

    def _run_passes(
        self,
        candidates: Candidates,
        objective: Covectors,
        activation: Activation,
        products: Products,
    ) -> list[_RecordedPasses]:
        """Run the forward and backward passes of the MLP with every set of weights (theta, theta0).

        Args:
            candidates: The candidates for training samples, with their multipliers (weights) and labels.
            objective: Computes the covector u of every candidate (one coefficient for each network output).
            activation: Activation of the network, with the derivatives of its smooth surrogate.
            products: Matrix products for each set of weights. If the lists are empty, this method computes
                the products and stores them in the lists. Otherwise it uses the stored products.

        Returns:
            The intermediate results for every set of weights.
        """
        matmul = self._matmul()
        recorded_passes = []
        for point, (layers, (pre, ungated)) in enumerate(zip(self.points, products, strict=True)):
            inputs, slopes, curvatures, is_cached = [candidates.x], [], [], bool(pre)
            for i, (weight, bias) in enumerate(layers):
                if not is_cached:
                    pre_activation = matmul(inputs[-1], weight.T)
                    pre.append(pre_activation if bias is None else pre_activation.add_(bias))
                if i < len(layers) - 1:
                    value, slope, curvature = activation.jet(pre[i])
                    inputs.append(value)
                    slopes.append(slope)
                    curvatures.append(curvature)
            backward_signals = [
                objective.covectors(point, pre[-1], candidates.labels, candidates.lam)
            ]
            for i in range(len(layers) - 1, 0, -1):
                if not is_cached:
                    ungated.insert(0, matmul(backward_signals[0], layers[i][0]))
                backward_signals.insert(0, ungated[i - 1 if is_cached else 0] * slopes[i - 1])
            recorded_passes.append(
                _RecordedPasses(inputs, pre[-1], slopes, curvatures, ungated, backward_signals)
            )
        return recorded_passes

    def _matmul(self) -> Callable[[Tensor, Tensor], Tensor]:
        return partial(multiply, half=True) if self.half else torch.matmul

    def _subtract_gradients(
        self, residuals: Errors | None, recorded_passes: list[_RecordedPasses], measure: bool
    ) -> Errors:
        """Subtract the gradients of a chunk of candidates from the error (residual) of every layer.

        The residual is target_l - T_l, where T_l is the sum of the gradients of all candidates so far.

        If the layer weight w_l is positive, the residual of the weight matrix is multiplied by -2 w_l. After
        the last chunk, the multiplied residual is the derivative E_l = dL/dT_l of the loss L.

        Args:
            residuals: Residuals after the earlier chunks, None before the first chunk.
            recorded_passes: Intermediate results of the candidates of this chunk, for each set of weights.
            measure: Whether the residuals of layers with weight zero are needed.

        Returns:
            The new residuals of the layers, None for layers whose residual is not needed.
        """
        runs = len(recorded_passes[0].inputs[0])
        new_residuals: Errors = []
        for i, (weight, bias) in enumerate(self.target):
            layer_weight = self.layer_weights[i]
            if not (layer_weight or measure):
                new_residuals.append(None)
                continue
            factor = -2 * layer_weight if layer_weight else 1.0
            earlier_residual = None if residuals is None else residuals[i]
            weight_residual = (
                weight.expand(runs, *weight.shape)
                if earlier_residual is None
                else earlier_residual[0]
            )
            for k, recorded in enumerate(recorded_passes):
                earlier_factor = factor if earlier_residual is None and k == 0 else 1.0
                backward_signals = recorded.signals[i].transpose(1, 2)
                weight_residual = accumulate(
                    weight_residual,
                    backward_signals,
                    recorded.inputs[i],
                    earlier_factor,
                    -factor,
                    self.half,
                    cancels=True,
                )
            bias_residual = bias if earlier_residual is None else earlier_residual[1]
            if bias_residual is not None:
                signal_sum = recorded_passes[0].signals[i].sum(1)
                for recorded in recorded_passes[1:]:
                    signal_sum = signal_sum + recorded.signals[i].sum(1)
                bias_residual = bias_residual - signal_sum
            new_residuals.append((weight_residual, bias_residual))
        return new_residuals

    def _finish_residuals(
        self, residuals: Errors, runs: int, measure: bool
    ) -> tuple[Errors, Tensor]:
        """Return for each layer l the derivative E_l = dL/dT_l of the loss, and the squared error (R, L).

        T_l is the weighted sum of gradients in layer l. E_l is None if the layer has weight zero in the loss.
        """
        squared_residuals = self.target[0][0].new_zeros(runs, len(self.target))
        errors: Errors = []
        for i, residual in enumerate(residuals):
            layer_weight = self.layer_weights[i]
            factor = -2 * layer_weight if layer_weight else 1.0
            if residual is None:
                errors.append(None)
                continue
            e, e_bias = residual[0], None if residual[1] is None else factor * residual[1]
            if measure:
                squared_residuals[:, i] = e.square().sum((1, 2)) / factor**2
                if e_bias is not None:
                    squared_residuals[:, i] += e_bias.square().sum(1) / factor**2
            errors.append((e, e_bias) if layer_weight else None)
        return errors, squared_residuals

    def _differentiate(
        self,
        recorded_passes: list[_RecordedPasses],
        errors: Errors,
        candidates: Candidates,
        objective: Covectors,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the derivatives of the loss in the candidates, in their multipliers, and in their covectors.

        The derivatives in the covectors are a list with one tensor for each set of weights (theta, theta0).
        """
        grad_x: Tensor | None = None
        grad_lam, ubars = torch.zeros_like(candidates.lam), []
        for point, recorded in enumerate(recorded_passes):
            # The multipliers affect the loss only through the covectors (weights of the outputs), with
            # which the backward pass begins. So the derivative in the covectors gives the derivative in the
            # multipliers.
            ubar, zbars = self._propagate_up(point, recorded, errors)
            outbar, lambar = objective.pullback(
                point, recorded.outputs, candidates.labels, candidates.lam, ubar
            )
            grad_x_of_point = self._propagate_down(point, recorded, errors, outbar, zbars)
            grad_x = grad_x_of_point if grad_x is None else grad_x.add_(grad_x_of_point)
            grad_lam.add_(lambar)
            ubars.append(ubar)
        assert grad_x is not None
        return grad_x, grad_lam, ubars

    def _propagate_up(
        self, point: int, recorded: _RecordedPasses, errors: Errors
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Differentiate the loss through the backward pass of the network.

        The layers are visited from the first to the last. The backward pass multiplies by the slope of the
        activation at each pre-activation, so the backward pass depends on the pre-activations.

        Args:
            point: Index of the set of weights (theta or theta0).
            recorded: Intermediate results of the forward and backward pass with these weights.
            errors: For every layer the derivative of the loss in its weighted sum of gradients.

        Returns:
            The derivative of the loss in the covectors. For each hidden layer the derivative of the loss in
            the pre-activations, as far as it comes from the slopes in the backward pass.
        """
        layers, matmul = self.points[point], self._matmul()
        dbar: Tensor | None = None
        zbars: list[Tensor | None] = []
        for i, error in enumerate(errors):
            # ``dbar`` is the derivative of the loss in the backward signal of a layer. The signal of the
            # layer below was computed from this signal, so ``dbar`` of the layer below adds a term by the
            # chain rule.
            if dbar is not None:
                dbar = matmul(dbar * recorded.slopes[i - 1], layers[i][0].T)
            # The backward signal of the layer also gives the gradients of its weight matrix and its bias.
            # So ``dbar`` gets one term from each of them.
            if error is not None:
                dbar = accumulate(
                    dbar, recorded.inputs[i], error[0].transpose(1, 2), half=self.half
                )
                if error[1] is not None:
                    dbar = dbar.add_(error[1][:, None])
            # The backward pass multiplies by the slope of the activation. The derivative of the slope in the
            # pre-activation is the curvature, which is the second derivative of the activation.
            if i < len(layers) - 1:
                zbars.append(
                    None if dbar is None else dbar * recorded.ungated[i] * recorded.curvatures[i]
                )
        assert dbar is not None
        return dbar, zbars

    def _propagate_down(
        self,
        point: int,
        recorded: _RecordedPasses,
        errors: Errors,
        zbar: Tensor | None,
        zbars: list[Tensor | None],
    ) -> Tensor:
        """Differentiate the loss through the forward pass of the network.

        The layers are visited from the last to the first.

        Args:
            point: Index of the set of weights (theta or theta0).
            recorded: Intermediate results of the forward and backward pass with these weights.
            errors: For every layer the derivative of the loss in its weighted sum of gradients.
            zbar: Derivative of the loss in the outputs, None for zero.
            zbars: Derivatives of the loss in the pre-activations, from :meth:`_propagate_up`.

        Returns:
            The derivative of the loss in the candidates.
        """
        layers, matmul = self.points[point], self._matmul()
        for i in range(len(layers) - 1, -1, -1):
            # ``abar`` is the derivative of the loss in the input of a layer. It has two terms, because the
            # input is used twice: in the pre-activation of the layer, and in the gradient of its weight
            # matrix.
            abar = None if zbar is None else matmul(zbar, layers[i][0])
            if (error := errors[i]) is not None:
                abar = accumulate(abar, recorded.signals[i], error[0], half=self.half)
            if i == 0:
                break  # the input of the first layer is the candidate, so ``abar`` is the result
            # ``zbar`` is the derivative of the loss in the pre-activation of the layer below. It has two
            # terms, because the pre-activation is used twice: for the slope in the backward pass, and for the
            # activation in the forward pass.
            zbar = zbars[i - 1]
            if abar is not None:
                from_forward_pass = abar * recorded.slopes[i - 1]
                zbar = from_forward_pass if zbar is None else zbar.add_(from_forward_pass)
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
    flat_product = torch.mm(a.flatten(0, -2), weight, out_dtype=torch.float32)
    return flat_product.view(*a.shape[:-1], -1)


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
        cancels: Whether ``total`` and the product nearly cancel. If True, nothing is rounded on a CPU.

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
    """Allow TF32 for products of float32 matrices inside this context if ``tf32`` is True, else forbid it."""
    previous_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous_precision)


@lru_cache(maxsize=1)
def cpu_has_bf16() -> bool:
    """Return True if this CPU has bfloat16 instructions, False if not or if torch cannot tell."""
    check_support = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return check_support is not None and bool(check_support())


@dataclass(frozen=True)
class EvaluationCost:
    """The cost of computing the loss of an attack and its gradients once.

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
        equation: The loss of the attack on an MLP.
        runs: Number of runs R.
        candidates: Number of candidates m of each run.
        follows_outputs: Whether the covectors of the candidates (one coefficient for each network output)
            depend on the outputs.
        measure: Whether the evaluation computes the residuals of all layers.

    Returns:
        The number of operations and the memory.
    """
    plan, widths = equation.plan(runs, candidates), equation.widths
    recomputed_candidates = max(0, candidates - plan.cached * plan.size) if plan.count > 1 else 0
    rows, points = runs * candidates, len(equation.points)
    flops = []
    for i, weight in enumerate(equation.layer_weights):
        product_count = _count_products(i, len(widths) - 1, bool(weight), follows_outputs, measure)
        products_of_first_pass = product_count * candidates
        recomputed_products = (2 if i else 1) * recomputed_candidates
        flops.append(
            2
            * points
            * runs
            * widths[i]
            * widths[i + 1]
            * (products_of_first_pass + recomputed_products)
        )
    element_bytes = equation.target[0][0].element_size()
    parameter_count = sum(a * b for a, b in itertools.pairwise(widths))
    live_bytes = element_bytes * points * runs * plan.size * LIVE_TENSORS * sum(widths[1:])
    cached_values = 2 * sum(widths[1:-1]) + widths[-1]
    cached_bytes = element_bytes * points * runs * plan.cached * plan.size * cached_values
    memory = {
        # Memory for the sets of weights, for the target of the fit, and for two sums of gradients per run.
        "weights": element_bytes * parameter_count * (points + 1 + 2 * runs),
        "candidates": element_bytes * rows * widths[0] * CANDIDATE_COPIES,
        "workspace": live_bytes + (cached_bytes if plan.count > 1 else 0),
    }
    return EvaluationCost(tuple(flops), memory)


def _count_products(
    layer: int, depth: int, weighted: bool, follows_outputs: bool, measure: bool
) -> int:
    has_layer_below, needs_output_adjoint = layer > 0, layer < depth - 1 or follows_outputs
    return 1 + 2 * has_layer_below + (weighted or measure) + 2 * weighted + needs_output_adjoint
