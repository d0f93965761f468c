"""Measure how exactly a network solves the KKT equation of margin maximization for given samples.

    min ||theta||^2 / 2  s.t.  m_r(theta) >= 1      (constraints r, also called rows: residuum.theory.rows)
    KKT: theta = sum_r lam_r grad m_r,  lam >= 0,  lam_r (m_r - 1) = 0

The vector theta has all weights, m_r are the margins, and lam_r are the multipliers. Refael et al. 2025,
Definition 3, measure two distances: eps = ||theta - sum lam_r grad m_r|| and delta = max_r lam_r (m_r - p),
with the smallest margin p. The distance eps depends on the scale of theta, so the residual is eps /
||theta||. All numbers are float64.

A kink is a sample at which a ReLU's input is exactly zero. The gate of a ReLU is its derivative. At a kink,
the gate may be any number in [0, 1]. Trained ReLU networks have many kinks. If all gates at kinks are set to
0, a residual remains even after perfect training. The Clarke residual is the smallest residual over all
choices of these gates. For every kink of a constraint r and a neuron j, the product mu_rj of the multiplier
and the gate is a variable:

    min || theta - sum_r lam_r g_r - sum_(r,j) mu_rj e_rj ||   s.t.  lam >= 0,  0 <= mu_rj <= lam_r

Here g_r is the gradient of margin r if all gates at kinks are 0, and e_rj is the change of this gradient if
gate j is 1. This is a convex quadratic program. The program has an explicit error variable, because solvers
stall on the normal equations. With several hidden layers, the gates of different layers multiply. So only the
gates of one layer at a time are variables, and the result is an upper bound. If there are too many kinks,
only the most useful gates are variables, which also gives an upper bound.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

from residuum.errors import DataError, InconclusiveError
from residuum.networks import MLP, ReLU, Trace, balance, dense_chain, homogeneity_order
from residuum.networks.probing import second_derivatives
from residuum.records import Certificate, LayerResidual
from residuum.stationarity import (
    Rows,
    Theta,
    flatten,
    gram,
    jacobian,
    layer_residuals,
    mlp_gram,
    norm,
    parameters,
    project,
    residual,
)
from residuum.theory import multipliers as mult
from residuum.theory.rows import choose_task, constraint_rows, normalize_labels

# The pre-activation of a ReLU counts as zero below this share of the norm of the neuron's weights times the
# norm of the layer's input.
KINK_TOLERANCE = 1e-3
# If the input of a ReLU is zero, its derivative (gate) may be any number in [0, 1]. A quadratic program
# optimizes at most this number of gates, because its cost grows with the cube of their number.
KINK_LIMIT = 1200
# If there are more gates (derivatives of ReLUs at zero) than KINK_LIMIT, the gates to optimize are chosen
# in this number of rounds. Each round chooses those that reduce the error most.
ROUNDS = 4
# Largest relative error in the KKT equation for a network that counts as an exact solution (KKT point), and
# for a network that counts as near a solution.
EXACT_KKT, NEAR_KKT = 1e-6, 0.1
# Samples are evaluated in batches. All samples of a batch together have at most this many numbers.
MAX_VALUES = 1 << 22


@second_derivatives()
def certify(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    task: str = "auto",
    rivals: str = "tied",
    kink_tolerance: float = KINK_TOLERANCE,
    kink_limit: int = KINK_LIMIT,
    seconds: float = math.inf,
) -> Certificate:
    """Measure how exactly a network solves the KKT equation of margin maximization for given samples.

    Args:
        model: The network.
        x: (n, *shape) samples as the network receives them.
        y: Labels of the samples.
        task: binary, multiclass, regression, or auto to choose by the number of outputs.
        rivals: Which other classes of a sample get a constraint: ``tied`` for all classes whose margin is
            close to the smallest margin, ``best`` for the class with the smallest margin.
        kink_tolerance: Relative size below which a pre-activation counts as zero.
        kink_limit: Maximum number of gates (derivatives of ReLUs at zero) in one layer that may be chosen
            freely.
        seconds: Time limit for choosing gates. If the limit is reached, the Clarke residual is an upper
            bound.

    Returns:
        The certificate with residuals, margins and multipliers.

    Raises:
        InconclusiveError: If all weights are zero.
    """
    deadline = time.monotonic() + seconds
    model, x, y, outputs, task, rows = pose_problem(model, x, y, task, rivals)
    theta, notes = parameters(model), []
    if not norm(theta) > 0:
        raise InconclusiveError(
            "At least one weight of the network must not be zero; all weights are zero.",
            "Check that the file contains the trained weights.",
        )
    lam, condition, condition_note = fit_multipliers(model, x, rows, free=task == "regression")
    notes += [condition_note] if condition_note else []
    residual_by_parameter = residual(model, theta, x, rows.combine(lam, len(x)))
    eps, theta_norm = norm(residual_by_parameter), norm(theta)
    clarke, kinks, freed_kinks = eps, 0, 0
    if (chain := dense_chain(model)) is not None:
        # The solver needs nonnegative multipliers, but the multipliers ``lam`` of a regression may be
        # negative. So the sign of each multiplier is moved to the weights of the outputs (the covector).
        signs = torch.where(lam < 0, -1.0, 1.0).double()
        signed_rows = Rows(rows.index, rows.covectors * signs[:, None])
        clarke, kinks, freed_kinks, is_solved = clarke_residual(
            chain, x, signed_rows, residual_by_parameter, kink_tolerance, kink_limit, deadline
        )
        if freed_kinks < kinks:
            notes.append(
                f"the derivatives of ReLUs were optimized at only {freed_kinks} of {kinks} kinks: "
                "residual_clarke is an upper bound"
            )
        if not is_solved:
            notes.append(
                "the quadratic solver did not reach its tolerance: residual_clarke is an upper bound"
            )
    else:
        notes.append(
            "kinks are examined only in networks of dense layers: residual_clarke equals residual_plain"
        )
    homogeneity = homogeneity_order(model, x)
    margins = rows.values(outputs) if task != "regression" else None
    margin = float(margins.min()) if margins is not None else None
    normalized_margin = (
        margin / theta_norm**homogeneity if margin is not None and homogeneity is not None else None
    )
    return Certificate(
        task=task,
        samples=len(x),
        residual_plain=eps / theta_norm,
        residual_clarke=clarke / theta_norm,
        eps=eps,
        delta=float((lam * (margins - margins.min())).max()) if margins is not None else None,
        margin=margin,
        normalized_margin=normalized_margin,
        homogeneity_order=homogeneity,
        kinks=kinks,
        kinks_freed=freed_kinks,
        layers=tuple(
            LayerResidual(k, v) for k, v in layer_residuals(residual_by_parameter, theta).items()
        ),
        multipliers=lam,
        rows=rows.index,
        balance=balance(model),
        identity=identity_gap(lam, rows.values(outputs), homogeneity, theta_norm),
        condition=condition if condition != float("inf") else 1e300,
        theta_norm=theta_norm,
        status=_status(clarke / theta_norm, margin),
        notes=tuple(notes),
    )


def pose_problem(
    model: nn.Module, x: Tensor, y: Tensor, task: str = "auto", rivals: str = "tied"
) -> tuple[nn.Module, Tensor, Tensor, Tensor, str, Rows]:
    """Convert a network and samples to float64 on the CPU, and set up the constraints of the margin problem.

    Args:
        model: The network, which is copied.
        x: (n, *shape) samples as the network receives them.
        y: Labels of the samples.
        task: binary, multiclass, regression, or auto to choose by the number of outputs.
        rivals: Which other classes of a sample get a constraint: tied or best (see :func:`certify`).

    Returns:
        The copy of the network, the samples, the labels from :func:`normalize_labels`, the outputs, the task,
        and the constraints.
    """
    model, x = copy.deepcopy(model).cpu().double().requires_grad_(False), x.detach().cpu().double()
    outputs = evaluate(model, x)
    task = choose_task(task, outputs.shape[1])
    y = normalize_labels(y.cpu(), task, outputs.shape[1])
    return model, x, y, outputs, task, constraint_rows(outputs, y, task, rivals)


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of a network, computed in batches.

    Args:
        model: The network.
        x: (n, *shape) samples.

    Returns:
        (n, C) outputs.

    Raises:
        DataError: If the samples do not fit the network, or if the network does not return a matrix.
    """
    batch_size = max(1, MAX_VALUES // max(1, x[0].numel() if len(x) else 1))
    try:
        with torch.no_grad():
            outputs = torch.cat([model(batch) for batch in x.split(batch_size)])
    except RuntimeError as problem:
        raise DataError(
            f"Samples must have the shape that the network takes as input; got samples of shape "
            f"{tuple(x.shape[1:])}.",
            f"Check the shape of the samples. The network raised: {str(problem).splitlines()[0]}",
        ) from problem
    if outputs.ndim != 2:
        raise DataError(
            f"A network must return outputs of shape (n, outputs); got {tuple(outputs.shape)}.",
            "Flatten the output of the network.",
        )
    return outputs


def fit_multipliers(
    model: nn.Module, x: Tensor, rows: Rows, free: bool = False
) -> tuple[Tensor, float, str]:
    """Fit the multipliers with which the gradients of all margins come closest to the weights.

    Multipliers are computed from the Gram matrix of the gradients. If the condition number of this matrix
    exceeds 1e12 and the gradients fit into memory, multipliers are computed from the gradients.

    Args:
        model: The network.
        x: (n, *shape) samples.
        rows: The constraints, each of which has a multiplier.
        free: Whether multipliers may be negative.

    Returns:
        The multipliers, the condition number of the Gram matrix, and a note. The note is "" unless rounding
        errors leave few correct digits.
    """
    weights_by_name = parameters(model)
    gram_matrix = gram(model, x, rows)
    least_squares_problem, note = (
        mult.factor_gram(gram_matrix, project(model, x, rows, weights_by_name)),
        "",
    )
    fits_into_memory = (
        len(rows) * sum(t.numel() for t in weights_by_name.values()) * 8 <= mult.DENSE_BYTES
    )
    is_ill_conditioned = least_squares_problem.condition > mult.MAX_CONDITION
    if is_ill_conditioned and fits_into_memory:
        least_squares_problem = mult.factor_dense(
            jacobian(model, x, rows), flatten(weights_by_name)
        )
    elif is_ill_conditioned:
        note = (
            "the Gram matrix has condition number "
            f"{least_squares_problem.condition:.1e}: multipliers have few correct digits"
        )
    multipliers = mult.solve(least_squares_problem, free)

    def correlate(multipliers: Tensor) -> Tensor:
        return project(
            model, x, rows, residual(model, weights_by_name, x, rows.combine(multipliers, len(x)))
        )

    return (
        mult.refine(multipliers, gram_matrix, correlate, free),
        least_squares_problem.condition,
        note,
    )


def identity_gap(lam: Tensor, margins: Tensor, order: float | None, size: float) -> float | None:
    """Measure how far a network violates the identity ||theta||^2 = L sum_r lam_r m_r.

    The weights theta of a network that is homogeneous of order L obey this identity at a KKT point with
    multipliers lam_r and margins m_r.

    Args:
        lam: (R,) multipliers.
        margins: (R,) margins.
        order: The order L, or None if the network is not homogeneous.
        size: The norm of theta.

    Returns:
        The difference of both sides of the identity relative to ||theta||^2, or None if the network is not
        homogeneous.
    """
    if order is None:
        return None
    return abs(float(order * (lam * margins).sum()) / size**2 - 1)


def _status(relative: float, margin: float | None) -> str:
    if margin is not None and margin <= 0:
        return "not_separated"
    return (
        "kkt" if relative <= EXACT_KKT else "near_kkt" if relative <= NEAR_KKT else "far_from_kkt"
    )


@dataclass(frozen=True)
class KinkPairs:
    """Pairs of a constraint (on a sample's margin) and a neuron whose input is zero at this sample.

    Attributes:
        layer: Number of the hidden layer of all neurons.
        row: (k,) number of the constraint of each pair.
        neuron: (k,) number of the neuron of each pair.
    """

    layer: int
    row: Tensor
    neuron: Tensor

    def __len__(self) -> int:
        return len(self.row)

    def take(self, chosen: Tensor) -> KinkPairs:
        """Select pairs of a constraint and a neuron by a mask or by indices."""
        return KinkPairs(self.layer, self.row[chosen], self.neuron[chosen])


@torch.no_grad()
def clarke_residual(
    model: MLP, x: Tensor, rows: Rows, plain: Theta, tolerance: float, limit: int, end: float
) -> tuple[float, int, int, bool]:
    """Minimize the KKT residual over the derivatives of ReLUs at zero, one hidden layer at a time.

    The KKT residual is the weights minus the weighted sum of the gradients of all margins. At a kink, a
    ReLU's input is zero, so its derivative (the gate) may be any number in [0, 1].

    Args:
        model: The network.
        x: (n, d) samples.
        rows: The constraints of margin maximization: margins that must be at least 1.
        plain: KKT residual if all gates at kinks are 0.
        tolerance: Relative size of a pre-activation that counts as zero.
        limit: Maximum number of gates in one layer that may be chosen freely.
        end: Value of ``time.monotonic()`` after which no further gates are chosen.

    Returns:
        The smallest norm, which is at most the norm of ``plain``. Then the number of kinks, the number of
        gates that were chosen freely, and whether every quadratic program was solved.
    """
    smallest_norm, kinks, freed_gates, is_solved = norm(plain), 0, 0, True
    activations = model.trace(x)
    for layer in range(len(model.linears) - 1 if isinstance(model.activation, ReLU) else 0):
        kink_pairs = find_kinks(model, activations, rows, layer, tolerance)
        kinks += len(kink_pairs)
        if len(kink_pairs):
            layer_norm, freed_here, layer_solved = _free_layer(
                model, activations, rows, kink_pairs, plain, limit, end
            )
            is_solved = is_solved and layer_solved
            freed_gates += freed_here
            smallest_norm = min(smallest_norm, layer_norm)
    return smallest_norm, kinks, freed_gates, is_solved


def find_kinks(model: MLP, trace: Trace, rows: Rows, layer: int, tolerance: float) -> KinkPairs:
    """Find the samples and neurons with a pre-activation of zero up to a tolerance.

    Let a_i be the input of the layer for sample i, and let w_j and b_j be the weights and the bias of neuron
    j. The pre-activation pre_ij counts as zero if |pre_ij| <= tolerance |(w_j, b_j)| |(a_i, 1)|.

    Args:
        model: The network.
        trace: Activations of the network at the samples.
        rows: The constraints of the margin problem, each of which belongs to a sample.
        layer: Number of the hidden layer.
        tolerance: Relative size of a pre-activation that counts as zero.

    Returns:
        Pairs of a constraint and a neuron. Neurons with zero weights are ignored.
    """
    linear, inputs = model.linears[layer], trace.inputs[layer]
    weight, bias = linear.weight.detach(), linear.bias
    squared_weight_norms, squared_input_norms = weight.square().sum(1), inputs.square().sum(1)
    if bias is not None:
        squared_weight_norms, squared_input_norms = (
            squared_weight_norms + bias.detach().square(),
            squared_input_norms + 1,
        )
    norm_products = squared_input_norms.sqrt()[:, None] * squared_weight_norms.sqrt()
    is_kink = (trace.pre[layer].abs() <= tolerance * norm_products) & (
        squared_weight_norms > 1e-24 * squared_weight_norms.max()
    )
    row, neuron_index = is_kink[rows.index].nonzero(as_tuple=True)
    return KinkPairs(layer, row, neuron_index)


def _free_layer(
    model: MLP, trace: Trace, rows: Rows, pairs: KinkPairs, plain: Theta, limit: int, end: float
) -> tuple[float, int, bool]:
    """Minimize the KKT residual over the derivatives of one layer's ReLUs at zero.

    The KKT residual is the weights minus the weighted sum of the gradients of all margins. A gate is the
    derivative of a ReLU. At a kink (input zero) the gate may be any number in [0, 1]. If there are more
    than ``limit`` kinks, only some gates become variables of the quadratic program. Three steps are
    repeated: estimate how much each gate reduces the residual, make the best gates variables, and solve.

    Args:
        model: The network.
        trace: Activations of the network at the samples.
        rows: The constraints of margin maximization: margins that must be at least 1.
        pairs: Kinks of the layer.
        plain: KKT residual if all gates at kinks are 0.
        limit: Maximum number of gates that may be chosen freely.
        end: Value of ``time.monotonic()`` after which no further gates are chosen.

    Returns:
        The norm of the residual, the number of freely chosen gates, and whether the last quadratic program
        was solved.
    """
    gates_are_open = (trace.pre[pairs.layer] > 0)[rows.index][pairs.row, pairs.neuron]
    gates_are_free = torch.zeros(len(pairs), dtype=torch.bool)
    residual, smallest_norm, is_solved = plain, norm(plain), True
    for _ in range(ROUNDS if len(pairs) > limit else 1):
        if (room := limit - int(gates_are_free.sum())) <= 0:
            break
        gates_to_free = torch.arange(len(pairs))
        if len(pairs) > limit:
            residual_reductions = _first_order_gain(model, trace, rows, pairs, residual)
            residual_reductions = torch.where(
                gates_are_open, -residual_reductions, residual_reductions
            ).masked_fill(gates_are_free, -torch.inf)
            # Each round chooses only half of the number of gates that are still allowed. Later rounds can
            # choose better gates, because the remaining error is smaller.
            gates_to_free = residual_reductions.topk(max(1, room // 2)).indices
            gates_to_free = gates_to_free[
                residual_reductions[gates_to_free] > 1e-12 * norm(plain) ** 2
            ]
        if not len(gates_to_free):
            break
        if time.monotonic() >= end:
            is_solved = False
            break
        gates_are_free[gates_to_free] = True
        freed_residual, is_solved = _solve_freed(
            model, trace, rows, pairs.take(gates_are_free), end
        )
        if norm(freed_residual) < smallest_norm:
            residual, smallest_norm = freed_residual, norm(freed_residual)
    return smallest_norm, int(gates_are_free.sum()), is_solved


def _first_order_gain(
    model: MLP, trace: Trace, rows: Rows, pairs: KinkPairs, residual: Theta
) -> Tensor:
    """Estimate how much the KKT residual shrinks if the derivative of a ReLU at zero changes from 0 to 1.

    A gate is the derivative of a ReLU. If the gate changes from 0 to 1, a vector is added to the gradient
    of the constraint. The gain of the gate is the inner product of the residual with this vector. The inner
    product is a product of two numbers. The first is the derivative of the constraint's margin with respect
    to the neuron's activation. The second is the change of the neuron's pre-activation if the residual is
    added to the weights. So one forward pass computes the gains of all K gates. The K gradients would not
    fit into memory.

    Args:
        model: The network.
        trace: Activations of the network at the samples.
        rows: The constraints of margin maximization: margins that must be at least 1.
        pairs: K kinks of a layer.
        residual: The KKT residual.

    Returns:
        (K,) gains, positive if opening the gate reduces the residual.
    """
    # How the pre-activations of layer ``pairs.layer`` change, to first order, if the residual is added to
    # the weights.
    pre_activation_changes = torch.zeros((), dtype=torch.float64)
    for i, layer in enumerate(model.linears[: pairs.layer + 1]):
        if i:
            pre_activation_changes = (
                pre_activation_changes
                * model.activation.derivative(trace.pre[i - 1])
                @ layer.weight.T
            )
        pre_activation_changes = (
            pre_activation_changes + trace.inputs[i] @ residual[f"layers.{i}.weight"].T
        )
        if layer.bias is not None:
            pre_activation_changes = pre_activation_changes + residual[f"layers.{i}.bias"]
    output_slopes = _output_slopes(model, trace, rows, pairs.layer)
    return (output_slopes * pre_activation_changes[rows.index])[pairs.row, pairs.neuron]


def _output_slopes(model: MLP, trace: Trace, rows: Rows, layer: int) -> Tensor:
    """Compute the derivatives (R, h) of R margins with respect to the h activations of a layer."""
    signals = model.signals(trace, rows.covectors, rows.index)
    return signals[layer + 1] @ model.linears[layer + 1].weight.detach()


def compute_kink_columns(
    model: MLP, trace: Trace, rows: Rows, pairs: KinkPairs
) -> tuple[Tensor, list[Tensor]]:
    """Return the columns of the quadratic program over multipliers and gates at kinks, as backward signals.

    A gate is the derivative of a ReLU, a kink is a sample at which a ReLU's input is zero, and mu_j is the
    product of gate j and the multiplier of its constraint. The weighted gradient of a constraint is the sum
    of two terms. The first is lam times the gradient with all gates at kinks closed (0). The second is the
    sum of mu_j times the change of the gradient if gate j alone is open (1). The sum is linear in (lam, mu),
    so each of these variables has one column. A column is a gradient, i.e. an outer product of a backward
    signal and the layer's input in each layer. Only the backward signals are returned. An open gate does not
    change the gradients above the layer of the kinks, so its backward signal is zero there.

    Args:
        model: The network.
        trace: Activations of the network at the samples.
        rows: R constraints of the margin problem.
        pairs: K kinks of a layer.

    Returns:
        The sample of each column (R + K,), and for every layer the backward signals (R + K, h) at its h
        neurons. The constraints come first, then the gates.
    """
    layer = pairs.layer
    output_slopes = _output_slopes(model, trace, rows, layer)
    gates_at_kinks = model.activation.derivative(trace.pre[layer])[rows.index]
    gates_at_kinks = gates_at_kinks.index_put(
        (pairs.row, pairs.neuron), torch.zeros((), dtype=gates_at_kinks.dtype)
    )
    gate_signals = torch.zeros(len(pairs), output_slopes.shape[1], dtype=output_slopes.dtype)
    gate_signals[torch.arange(len(pairs)), pairs.neuron] = output_slopes[pairs.row, pairs.neuron]
    sample_index = torch.cat([rows.index, rows.index[pairs.row]])
    signals_by_layer = [torch.cat([output_slopes * gates_at_kinks, gate_signals])]
    for below in range(layer, 0, -1):
        gates_below = model.activation.derivative(trace.pre[below - 1])[sample_index]
        signals_by_layer.append(
            signals_by_layer[-1] @ model.linears[below].weight.detach() * gates_below
        )
    signals_above = model.signals(trace, rows.covectors, rows.index)[layer + 1 :]
    padded_signals = [torch.cat([s, s.new_zeros(len(pairs), s.shape[1])]) for s in signals_above]
    return sample_index, signals_by_layer[::-1] + padded_signals


def _solve_freed(
    model: MLP, trace: Trace, rows: Rows, pairs: KinkPairs, end: float
) -> tuple[Theta, bool]:
    """Minimize the KKT residual over multipliers and gates (derivatives of ReLUs at zero).

    The residual is computed again from the gradients, because the solver's value has rounding errors.

    Returns:
        The residual, and whether the quadratic program was solved.
    """
    index, signals = compute_kink_columns(model, trace, rows, pairs)
    weights_by_name = parameters(model)
    least_squares_problem = _factor(model, trace, index, signals)
    z, is_solved = _solve_quadratic_program(
        least_squares_problem, len(rows), pairs.row, end - time.monotonic()
    )
    residual: Theta = {}
    for i, (layer, signal) in enumerate(zip(model.linears, signals, strict=True)):
        weighted_signal = z[:, None] * signal
        name = f"layers.{i}"
        residual[f"{name}.weight"] = (
            weights_by_name[f"{name}.weight"] - weighted_signal.T @ trace.inputs[i][index]
        )
        if layer.bias is not None:
            residual[f"{name}.bias"] = weights_by_name[f"{name}.bias"] - weighted_signal.sum(0)
    return residual, is_solved


def _factor(model: MLP, trace: Trace, index: Tensor, signals: list[Tensor]) -> mult.Factor:
    """Factorize the columns of the quadratic program over multipliers and gates.

    Each column has as many entries as the network has weights. If all columns fit into memory, they are
    factorized by QR. Otherwise the Gram matrix of the columns is factorized. The Gram matrix squares the
    condition number. But it is computed without the columns, from products of backward signals and products
    of layer inputs.

    Args:
        model: The network.
        trace: Activations of the network at the samples.
        index: (k,) sample of each column.
        signals: For every layer the (k, h) backward signals of the columns at its h neurons.

    Returns:
        The factorized least-squares problem.
    """
    weights_by_name = parameters(model)
    parameter_count = sum(t.numel() for t in weights_by_name.values())
    if len(index) * parameter_count * 8 > mult.DENSE_BYTES // 2:
        inner_products = torch.zeros(len(index), dtype=torch.float64)
        for i, signal in enumerate(signals):
            # The inner product of a gradient with the weights needs only pre-activations. If a layer has
            # backward signal d, input a, weight W and bias b, then <d a^T, W> + <d, b> = <d, W a + b>.
            inner_products += (signal * trace.pre[i][index]).sum(1)
        return mult.factor_gram(mlp_gram(model, trace, index, signals), inner_products)
    columns = []
    for i, (layer, signal) in enumerate(zip(model.linears, signals, strict=True)):
        columns.append((signal[:, :, None] * trace.inputs[i][index][:, None, :]).flatten(1))
        columns += [signal] if layer.bias is not None else []
    return mult.factor_dense(torch.cat(columns, 1), flatten(weights_by_name))


def _solve_quadratic_program(
    factor: mult.Factor, rows: int, owner: Tensor, seconds: float = math.inf
) -> tuple[Tensor, bool]:
    """Find the multipliers and the gates (derivatives of ReLUs at zero) with the smallest KKT residual.

    Minimize ||e||^2 s.t. F z + e = h, lam >= 0, 0 <= mu <= lam[owner], with z = (lam, mu). A gate is a number
    in [0, 1]. Its product mu with a multiplier is a variable, because the problem is then convex. The error e
    is also a variable, because the solver can then use F and not F^T F, whose condition number is squared.

    Args:
        factor: The matrix F (k, rows + kinks) and the vector h (k,).
        rows: Number of multipliers, which are the first columns of F.
        owner: (kinks,) for each gate, the index of its multiplier.
        seconds: Time limit in seconds.

    Returns:
        The solution z, which obeys all bounds to the last bit, and whether the solver reports an optimum.
    """
    import clarabel

    matrix, target = factor.matrix.numpy(), factor.target.numpy()
    # The columns of F and the vector h are scaled to length 1. So in the bounds mu <= lam, each variable is
    # divided by the norm of its column.
    column_norms = np.linalg.norm(matrix, axis=0)
    column_norms = np.where(column_norms > 0, column_norms, 1.0)
    target_norm = max(float(np.linalg.norm(target)), 1e-300)
    equation_count, columns = matrix.shape
    kinks, owner_rows = columns - rows, owner.numpy()
    upper_bounds = sparse.csc_matrix(
        (
            np.concatenate([1 / column_norms[rows:], -1 / column_norms[owner_rows]]),
            (np.tile(np.arange(kinks), 2), np.concatenate([rows + np.arange(kinks), owner_rows])),
        ),
        shape=(kinks, columns),
    )
    equality_constraints = sparse.hstack(
        [sparse.csc_matrix(matrix / column_norms), sparse.identity(equation_count)]
    )
    inequality_constraints = sparse.hstack(
        [
            sparse.vstack([-sparse.identity(columns), upper_bounds]),
            sparse.csc_matrix((columns + kinks, equation_count)),
        ]
    )
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.time_limit = max(seconds, 0.1)
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    solver = clarabel.DefaultSolver(
        sparse.block_diag(
            [sparse.csc_matrix((columns, columns)), 2 * sparse.identity(equation_count)], "csc"
        ),
        np.zeros(columns + equation_count),
        sparse.vstack([equality_constraints, inequality_constraints], "csc"),
        np.concatenate([target / target_norm, np.zeros(columns + kinks)]),
        [clarabel.ZeroConeT(equation_count), clarabel.NonnegativeConeT(columns + kinks)],
        settings,
    )
    solution = solver.solve()
    multipliers_and_gates = np.asarray(solution.x)[:columns] * target_norm / column_norms
    # The solver may violate the bounds of its variables by rounding errors. The solution is moved onto the
    # bounds, because only then is its residual a valid upper bound.
    multipliers_and_gates = np.maximum(np.nan_to_num(multipliers_and_gates), 0)
    multipliers_and_gates[rows:] = np.minimum(
        multipliers_and_gates[rows:], multipliers_and_gates[owner_rows]
    )
    is_solved = str(solution.status) in ("Solved", "AlmostSolved")
    return torch.from_numpy(multipliers_and_gates), is_solved
