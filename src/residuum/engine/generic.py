"""Loss of an attack and its gradients for any network, without storing a gradient per candidate.

An attack searches candidates x_i (guesses of training samples) whose gradients add up to a known target:

    L = sum_l w_l || target_l - T_l ||^2,    T = sum_i grad_theta <u_i, Phi(theta; x_i)>

Phi is the network with weights theta. The covector u_i of candidate i has one coefficient for each output of
the network. It is computed from the multiplier lam_i and the outputs. T_l is the part of T in layer l, and
w_l is the weight of layer l in the loss L.

The gradient is linear in the covectors u_i, so one backward pass computes the sum T over all candidates. A
second backward pass, through the graph of the first one, computes the gradients of L in x and lam. No
Jacobian with a row per candidate and a column per weight is formed. If the graph does not fit into the
workspace, the candidates are divided into chunks, and every chunk is evaluated twice:

1. T is summed over the chunks without a graph. Then v_l = dL/dT_l = -2 w_l (target_l - T_l).
2. dL = d <v, T> is a sum over candidates, so each chunk gives the gradients of its own candidates.

Shapes: x is (R, m, *shape) for R runs. u is (m, C) for C outputs. theta, target and v are dictionaries by
parameter name.

On a CPU, runs are evaluated one after another, because evaluating them together is not faster
(``benchmarks/generic.py``). On a GPU, which small networks do not fill, ``vmap`` evaluates them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, vjp, vmap

from residuum.engine.explicit import Candidates, Covectors
from residuum.errors import ArchitectureError
from residuum.networks.probing import second_derivatives
from residuum.stationarity import Theta, layer_squares, parameters

# Memory in bytes that a chunk of candidates may take, for its forward and backward passes and their graphs.
WORKSPACE = 2 * 2**30
# An evaluation of the loss is a forward pass, a backward pass, and a second backward pass through both. Its
# memory is estimated as this multiple of the memory that the forward pass saves for autograd.
GRAPH_FACTOR = 8

# Squared errors of the fit, their gradient in the candidates x, and their gradient in the multipliers lam.
Derivatives = tuple[Tensor, Tensor, Tensor]


class GenericEquation:
    """Loss of an attack on any network, and its gradients, by automatic differentiation.

    The gradients of the network are taken at the released weights theta, the initial weights theta0, or both.

    Args:
        points: Copies of the network with the weights at which gradients are taken.
        target: For each parameter name the tensor that the weighted sum of gradients must equal.
        groups: For each layer the names of its parameters.
        layer_weights: Weight w_l of every layer in the loss.
        workspace: Memory in bytes that the evaluation of one chunk of candidates may take.

    Attributes:
        side_by_side: Whether all runs are evaluated together in one pass.
        saved: Memory in bytes that a forward pass saves per candidate, 0 before the first evaluation.
    """

    def __init__(
        self,
        points: Sequence[nn.Module],
        target: Theta,
        groups: Sequence[Sequence[str]],
        layer_weights: Tensor,
        workspace: int = WORKSPACE,
    ) -> None:
        self.target, self.groups, self.weights = target, groups, layer_weights
        self.workspace, self.saved = workspace, 0
        self.thetas = [parameters(point) for point in points]
        self.side_by_side = layer_weights.is_cuda
        # cuDNN has no second derivatives of recurrent layers, but PyTorch's own kernels have them.
        self.is_recurrent = any(isinstance(module, nn.RNNBase) for module in points[0].modules())

    def evaluate(
        self, models: Sequence[nn.Module], objective: Covectors, candidates: Candidates
    ) -> Derivatives:
        """Evaluate the squared residual ||target_l - T_l||^2 of every layer l and the gradients of the loss.

        T_l is the weighted sum of the candidates' gradients in layer l.

        Args:
            models: One copy of the network for each set of weights at which gradients are taken. The ReLUs
                of the copies are replaced by smooth surrogates.
            objective: Computes the covector u of every candidate (one coefficient for each network output).
            candidates: The candidates, with x of shape (R, m, *shape).

        Returns:
            The squared residuals of the L layers for R runs (R, L), and the gradients of the loss in the
            candidates x and in their multipliers lam.
        """
        runs, m = candidates.x.shape[:2]
        cudnn_setting = (
            torch.backends.cudnn.flags(enabled=False) if self.is_recurrent else nullcontext()
        )
        with second_derivatives(), cudnn_setting:
            chunk_size = self._chunk_size(models[0], candidates.x[0, :1])
            if self.side_by_side and runs > 1 and runs * m <= chunk_size:
                try:
                    return self._evaluate_together(models, objective, candidates)
                except (RuntimeError, ValueError):
                    # ``vmap`` cannot transform the forward method of this network.
                    self.side_by_side = False
            results_by_run = [
                self._evaluate_run(models, objective, candidates.select_run(run), chunk_size)
                for run in range(runs)
            ]
        squares, grad_x, grad_lam = (
            torch.stack(tensors) for tensors in zip(*results_by_run, strict=True)
        )
        return squares, grad_x, grad_lam

    @torch.enable_grad()
    def _evaluate_run(
        self,
        models: Sequence[nn.Module],
        objective: Covectors,
        candidates: Candidates,
        chunk_size: int,
    ) -> Derivatives:
        """Evaluate the loss and the gradients of one run, in chunks of candidates.

        T is the weighted sum of gradients. If all candidates fit into one chunk, T is computed with its
        autograd graph. One backward pass through this graph gives the gradients of the loss L.

        Otherwise every chunk is evaluated twice, so that only the graph of one chunk is in memory. The first
        evaluation sums T over the chunks without a graph and computes the derivative v = dL/dT. The second
        evaluation computes the part of T that comes from the chunk, and differentiates the inner product of
        this part and v. As v is constant, this gives the gradients of L in the candidates of the chunk.

        Args:
            models: One copy of the network for each set of weights at which gradients are taken.
            objective: Computes the covector u of every candidate (one coefficient for each network output).
            candidates: The candidates of the run, with x of shape (m, *shape).
            chunk_size: Number of candidates in a chunk.

        Returns:
            The squared residuals of the L layers (L,), and the gradients of the loss in the candidates x and
            in their multipliers lam.
        """
        x, lam = candidates.x.detach().requires_grad_(), candidates.lam.detach().requires_grad_()
        labels = candidates.labels

        def sum_gradients(rows: slice, keep_graph: bool) -> Theta:
            """Return the weighted sum of the gradients of some candidates, with a graph if ``keep_graph``."""
            gradient_sums: Theta = {}
            for k, (model, theta) in enumerate(zip(models, self.thetas, strict=True)):
                differentiable_theta = {
                    name: t.detach().requires_grad_() for name, t in theta.items()
                }
                chunk = x[rows] if keep_graph else x[rows].detach()
                outputs = functional_call(model, differentiable_theta, (chunk,))
                # The outputs are weighted with numbers u that depend on the candidates. Gradients in the
                # weights treat u as constant, and gradients in the candidates do not.
                output_weights = objective.covectors(k, outputs, labels[rows], lam[rows])
                gradients_by_tensor = torch.autograd.grad(
                    outputs,
                    list(differentiable_theta.values()),
                    output_weights if keep_graph else output_weights.detach(),
                    create_graph=keep_graph,
                    materialize_grads=True,
                )
                for name, term in zip(differentiable_theta, gradients_by_tensor, strict=True):
                    gradient_sums[name] = (
                        gradient_sums[name] + term if name in gradient_sums else term
                    )
            return gradient_sums

        def gradients(value: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(value, (x, lam), allow_unused=True, materialize_grads=True)

        chunks = [slice(start, start + chunk_size) for start in range(0, len(x), chunk_size)]
        if len(chunks) == 1:
            gradient_sums = sum_gradients(chunks[0], True)
            residual_by_name = {name: t - gradient_sums[name] for name, t in self.target.items()}
            squared_residuals = layer_squares(residual_by_name, self.groups)
            grad_x, grad_lam = gradients(squared_residuals @ self.weights)
            return squared_residuals.detach(), grad_x, grad_lam
        residual_by_name = dict(self.target)
        for rows in chunks:
            for name, term in sum_gradients(rows, False).items():
                residual_by_name[name] = residual_by_name[name] - term
        weighted_groups = zip(self.groups, self.weights.unbind(), strict=True)
        loss_derivatives = {
            name: -2 * weight * residual_by_name[name]
            for names, weight in weighted_groups
            for name in names
        }
        grad_x, grad_lam = torch.zeros_like(x), torch.zeros_like(lam)
        for rows in chunks:
            inner_product = torch.stack(
                [(loss_derivatives[n] * t).sum() for n, t in sum_gradients(rows, True).items()]
            ).sum()
            chunk_x, chunk_lam = gradients(inner_product)
            grad_x[rows], grad_lam[rows] = chunk_x[rows], chunk_lam[rows]
        return layer_squares(residual_by_name, self.groups), grad_x, grad_lam

    def _evaluate_together(
        self, models: Sequence[nn.Module], objective: Covectors, candidates: Candidates
    ) -> Derivatives:
        """Evaluate the loss and the gradients of all runs in one pass by ``vmap``.

        The results are the same as if the runs were evaluated one after another.

        On a GPU, most of the time for a small network is spent on launching many small kernels, so R runs
        take hardly longer than one run. All runs share the weights of the network. ``vmap`` maps over the
        candidates and their multipliers. If the labels differ between runs, ``vmap`` also maps over the
        labels.

        Args:
            models: One copy of the network for each set of weights at which gradients are taken.
            objective: Computes the covector u of every candidate (one coefficient for each network output).
            candidates: The candidates of all runs.

        Returns:
            The squared residuals of the L layers for R runs (R, L), and the gradients of the loss in the
            candidates x and in their multipliers lam.
        """

        def evaluate_run(x: Tensor, lam: Tensor, labels: Tensor) -> Derivatives:
            def loss(x: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
                residual_by_name = dict(self.target)
                for k, (model, theta) in enumerate(zip(models, self.thetas, strict=True)):
                    outputs, pull, *_ = vjp(partial(_outputs, model, x), theta)
                    (gradient_sums,) = pull(objective.covectors(k, outputs, labels, lam))
                    residual_by_name = {
                        name: t - gradient_sums[name] for name, t in residual_by_name.items()
                    }
                squared_residuals = layer_squares(residual_by_name, self.groups)
                return squared_residuals @ self.weights, squared_residuals

            (grad_x, grad_lam), squared_residuals = grad(loss, argnums=(0, 1), has_aux=True)(x, lam)
            return squared_residuals, grad_x, grad_lam

        label_dim = None if candidates.labels.ndim == 1 else 0
        evaluate_runs = vmap(evaluate_run, in_dims=(0, 0, label_dim))
        return evaluate_runs(candidates.x, candidates.lam, candidates.labels)

    def estimate_workspace(self, candidates: int) -> int:
        """Return the estimated memory of one evaluation in bytes, or 0 if nothing was evaluated yet."""
        candidate_bytes = GRAPH_FACTOR * self.saved
        return min(candidates * candidate_bytes, max(candidate_bytes, self.workspace))

    def _chunk_size(self, model: nn.Module, x: Tensor) -> int:
        """Return the number of candidates that are evaluated at once, so that they fit into memory.

        The first call runs the network on one sample and on two samples, to measure the memory that a forward
        pass saves. These are the first runs on this device and in this number format, so they can fail.

        Args:
            model: The network that is attacked.
            x: One sample (1, *shape).

        Returns:
            The number of candidates, at least 1.

        Raises:
            ArchitectureError: If the network does not run on this device or in this number format.
            OutOfMemoryError: If a forward pass of two samples does not fit into memory.
        """
        if not self.saved:
            try:
                bytes_of_one, bytes_of_two = (
                    count_saved_bytes(model, self.thetas[0], x.expand(n, *x.shape[1:]))
                    for n in (1, 2)
                )
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as problem:  # for example because a tensor is on another device
                raise ArchitectureError(
                    f"The network must run on the device {x.device.type!r} with numbers of the type "
                    f"{str(x.dtype).removeprefix('torch.')}; its forward method raised: "
                    f"{str(problem).splitlines()[0][:200]}",
                    "Register the network's tensors as buffers and create new tensors with the device and "
                    "dtype of the input, or use --device cpu.",
                ) from problem
            # Autograd saves the weights once for any number of samples. So the difference is the memory of
            # one sample.
            self.saved = max(1, bytes_of_two - bytes_of_one)
        return max(1, self.workspace // (GRAPH_FACTOR * self.saved))


def _outputs(model: nn.Module, x: Tensor, theta: Theta) -> Tensor:
    return functional_call(model, theta, (x,))


@torch.enable_grad()
def count_saved_bytes(model: nn.Module, theta: Theta, x: Tensor) -> int:
    """Count the bytes that a forward pass saves for the backward pass.

    Args:
        model: The network that is attacked.
        theta: Parameters of the network by name.
        x: Samples (n, *shape).

    Returns:
        The number of bytes.
    """
    saved_bytes = 0

    def count(t: Tensor) -> Tensor:
        nonlocal saved_bytes
        saved_bytes += t.numel() * t.element_size()
        return t

    differentiable_theta = {name: t.detach().requires_grad_() for name, t in theta.items()}
    with saved_tensors_hooks(count, lambda t: t):
        functional_call(model, differentiable_theta, (x.detach(),))
    return saved_bytes
