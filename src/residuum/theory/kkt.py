"""How close a network is to a KKT point of the margin problem on given samples.

    min ||theta||^2 / 2  s.t.  m_r(theta) >= 1      (rows r: residuum.theory.rows)
    KKT: theta = sum_r lam_r grad m_r,  lam >= 0,  lam_r (m_r - 1) = 0

Refael et al. 2025, Definition 3: eps = ||theta - sum lam_r grad m_r|| (a norm), delta =
max_r lam_r (m_r - p) with p = min_r m_r. eps depends on the scale of theta, so residuals are
eps / ||theta||. All numbers are float64.

The Clarke residual is the same residual with free gates at kinks. A kink is a sample at which a ReLU's
input is exactly zero. Trained ReLU networks have many samples at the kinks of their neurons, where the
derivative is any number in [0, 1]. The choice 0 leaves a residual that no training removes. On kink pairs
(row r, neuron j) the gate is a variable:

    min || theta - sum_r lam_r g_r - sum_(r,j) mu_rj e_rj ||   s.t.  lam >= 0,  0 <= mu_rj <= lam_r

Here g_r is the gradient with those gates closed, and e_rj is what opening gate j adds. This is a convex
quadratic program. It is solved with an explicit error variable, because the form with normal equations
stalls. With several hidden layers, the gates of different layers multiply. So one layer is freed at a time,
while the gates of the others keep their sign, and the result is an upper bound. If there are too many kinks,
only the most useful ones are freed, which also gives an upper bound.
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

KINK_TOLERANCE = 1e-3  # relative to |w_j| |x_i|, see find_kinks
KINK_LIMIT = 1200  # gates freed in one quadratic program, whose cost grows with their cube
ROUNDS = 4  # rounds of choosing gates to free, each by the residual of the round before
EXACT_KKT, NEAR_KKT = 1e-6, 0.1  # largest relative residual of a KKT point, and of a point near one
MAX_VALUES = 1 << 22  # numbers in the samples that a network evaluates at once


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
    """Measure how close a network is to a KKT point on given samples.

    Args:
        model: The network.
        x: (n, *shape) samples as the network receives them.
        y: Labels.
        task: binary, multiclass, regression, or auto.
        rivals: Which rival classes get a constraint: tied or best.
        kink_tolerance: Relative size of a pre-activation that counts as zero.
        kink_limit: Maximum number of gates that are freed in one layer.
        seconds: Time after which no further gates are freed. The Clarke residual is then an upper bound.

    Returns:
        The certificate.

    Raises:
        InconclusiveError: If all weights are zero.
    """
    end = time.monotonic() + seconds
    model, x, y, outputs, task, rows = pose_problem(model, x, y, task, rivals)
    theta, notes = parameters(model), []
    if not norm(theta) > 0:
        raise InconclusiveError(
            "A certificate needs a network with nonzero weights; all weights are zero.",
            "Check that the file contains the trained weights.",
        )
    lam, condition, note = fit_multipliers(model, x, rows, free=task == "regression")
    notes += [note] if note else []
    r = residual(model, theta, x, rows.combine(lam, len(x)))
    eps, size = norm(r), norm(theta)
    clarke, kinks, freed = eps, 0, 0
    if (chain := dense_chain(model)) is not None:
        # If multipliers are free, each row keeps the sign of its plain multiplier.
        sign = torch.where(lam < 0, -1.0, 1.0).double()
        signed = Rows(rows.index, rows.covectors * sign[:, None])
        clarke, kinks, freed, solved = clarke_residual(
            chain, x, signed, r, kink_tolerance, kink_limit, end
        )
        if freed < kinks:
            notes.append(f"{freed} of {kinks} kinks freed: residual_clarke is an upper bound")
        if not solved:
            notes.append(
                "the solver did not reach its tolerance: residual_clarke is an upper bound"
            )
    else:
        notes.append("kinks are only examined for MLPs: residual_clarke equals residual_plain")
    order = homogeneity_order(model, x)
    margins = rows.values(outputs) if task != "regression" else None
    margin = float(margins.min()) if margins is not None else None
    normalized = margin / size**order if margin is not None and order is not None else None
    return Certificate(
        task=task,
        samples=len(x),
        residual_plain=eps / size,
        residual_clarke=clarke / size,
        eps=eps,
        delta=float((lam * (margins - margins.min())).max()) if margins is not None else None,
        margin=margin,
        normalized_margin=normalized,
        homogeneity_order=order,
        kinks=kinks,
        kinks_freed=freed,
        layers=tuple(LayerResidual(k, v) for k, v in layer_residuals(r, theta).items()),
        multipliers=lam,
        rows=rows.index,
        balance=balance(model),
        identity=identity_gap(lam, rows.values(outputs), order, size),
        condition=condition if condition != float("inf") else 1e300,
        theta_norm=size,
        status=_status(clarke / size, margin),
        notes=tuple(notes),
    )


def pose_problem(
    model: nn.Module, x: Tensor, y: Tensor, task: str = "auto", rivals: str = "tied"
) -> tuple[nn.Module, Tensor, Tensor, Tensor, str, Rows]:
    """Pose the margin problem in float64 on the CPU.

    Args:
        model: The network, which is copied.
        x: (n, *shape) samples as the network receives them.
        y: Labels.
        task: binary, multiclass, regression, or auto.
        rivals: Which rival classes get a constraint: tied or best.

    Returns:
        The copy of the network, samples, labels as in the mathematics, outputs, task and rows.
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
        DataError: If the samples do not fit the network, or if it does not return a matrix.
    """
    chunk = max(1, MAX_VALUES // max(1, x[0].numel() if len(x) else 1))
    try:
        with torch.no_grad():
            outputs = torch.cat([model(batch) for batch in x.split(chunk)])
    except RuntimeError as problem:
        raise DataError(
            f"Samples must fit the network's input; got shape {tuple(x.shape[1:])}.",
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
    """Fit the multipliers of all rows.

    They are computed from the Gram matrix. If its condition exceeds 1e12 and the dense gradients fit into
    memory, they are computed from the gradients.

    Args:
        model: The network.
        x: (n, *shape) samples.
        rows: Rows of the problem.
        free: Multipliers may be negative.

    Returns:
        The multipliers, the condition number of the Gram matrix, and a note if digits are lost.
    """
    theta = parameters(model)
    matrix = gram(model, x, rows)
    factor, note = mult.factor_gram(matrix, project(model, x, rows, theta)), ""
    fits = len(rows) * sum(t.numel() for t in theta.values()) * 8 <= mult.DENSE_BYTES
    poor = factor.condition > mult.MAX_CONDITION
    if poor and fits:
        factor = mult.factor_dense(jacobian(model, x, rows), flatten(theta))
    elif poor:
        note = (
            f"Gram matrix of condition {factor.condition:.1e}: multipliers have few correct digits"
        )
    lam = mult.solve(factor, free)

    def correlate(lam: Tensor) -> Tensor:
        return project(model, x, rows, residual(model, theta, x, rows.combine(lam, len(x))))

    return mult.refine(lam, matrix, correlate, free), factor.condition, note


def identity_gap(lam: Tensor, margins: Tensor, order: float | None, size: float) -> float | None:
    """Return the relative gap of ||theta||^2 = L sum_r lam_r m_r.

    Homogeneity of order L implies this identity at a KKT point.

    Args:
        lam: (R,) multipliers.
        margins: (R,) margins.
        order: The order L, or None if the network is not homogeneous.
        size: The norm of theta.

    Returns:
        The relative gap, or None if there is no order.
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
    """Pairs (row, neuron) of hidden layer ``layer`` whose pre-activation is zero up to a tolerance."""

    layer: int
    row: Tensor
    neuron: Tensor

    def __len__(self) -> int:
        return len(self.row)

    def take(self, chosen: Tensor) -> KinkPairs:
        """Return the chosen pairs."""
        return KinkPairs(self.layer, self.row[chosen], self.neuron[chosen])


@torch.no_grad()
def clarke_residual(
    model: MLP, x: Tensor, rows: Rows, plain: Theta, tolerance: float, limit: int, end: float
) -> tuple[float, int, int, bool]:
    """Minimize the norm of the residual over free gates, one hidden layer at a time.

    Args:
        model: The network.
        x: (n, d) samples.
        rows: Rows of the problem.
        plain: Residual without free gates.
        tolerance: Relative size of a pre-activation that counts as zero.
        limit: Maximum number of gates that are freed in one layer.
        end: Value of the monotonic clock after which no further gates are freed.

    Returns:
        The norm, which is at most that of ``plain``. Then the number of kinks, the number of freed gates, and
        whether every quadratic program was solved.
    """
    best, kinks, freed, solved = norm(plain), 0, 0, True
    trace = model.trace(x)
    for layer in range(len(model.linears) - 1 if isinstance(model.activation, ReLU) else 0):
        pairs = find_kinks(model, trace, rows, layer, tolerance)
        kinks += len(pairs)
        if len(pairs):
            value, freed_here, layer_solved = _free_layer(
                model, trace, rows, pairs, plain, limit, end
            )
            solved = solved and layer_solved
            freed += freed_here
            best = min(best, value)
    return best, kinks, freed, solved


def find_kinks(model: MLP, trace: Trace, rows: Rows, layer: int, tolerance: float) -> KinkPairs:
    """Find the pairs with |pre_ij| <= tolerance |(w_j, b_j)| |(a_i, 1)|.

    Args:
        model: The network.
        trace: Its activations at the samples.
        rows: Rows of the problem.
        layer: Hidden layer.
        tolerance: Relative size of a pre-activation that counts as zero.

    Returns:
        The pairs. Neurons without weights are ignored.
    """
    linear, inputs = model.linears[layer], trace.inputs[layer]
    weight, bias = linear.weight.detach(), linear.bias
    neuron, sample = weight.square().sum(1), inputs.square().sum(1)
    if bias is not None:
        neuron, sample = neuron + bias.detach().square(), sample + 1
    scale = sample.sqrt()[:, None] * neuron.sqrt()
    is_kink = (trace.pre[layer].abs() <= tolerance * scale) & (neuron > 1e-24 * neuron.max())
    row, neuron_index = is_kink[rows.index].nonzero(as_tuple=True)
    return KinkPairs(layer, row, neuron_index)


def _free_layer(
    model: MLP, trace: Trace, rows: Rows, pairs: KinkPairs, plain: Theta, limit: int, end: float
) -> tuple[float, int, bool]:
    """Free all pairs, or the ``limit`` most useful pairs by column generation.

    Column generation repeats three steps: compute first-order gains, free the pairs of the largest gain, and
    solve.

    Args:
        model: The network.
        trace: Its activations at the samples.
        rows: Rows of the problem.
        pairs: Kinks of the layer.
        plain: Residual without free gates.
        limit: Maximum number of freed gates.
        end: Value of the monotonic clock after which no further gates are freed.

    Returns:
        The norm of the residual, the number of freed gates, and whether the last program was solved.
    """
    gates = (trace.pre[pairs.layer] > 0)[rows.index][pairs.row, pairs.neuron]
    chosen = torch.zeros(len(pairs), dtype=torch.bool)
    residual, value, solved = plain, norm(plain), True
    for _ in range(ROUNDS if len(pairs) > limit else 1):
        if (room := limit - int(chosen.sum())) <= 0:
            break
        best = torch.arange(len(pairs))
        if len(pairs) > limit:
            gain = _first_order_gain(model, trace, rows, pairs, residual)
            gain = torch.where(gates, -gain, gain).masked_fill(chosen, -torch.inf)
            # Use half of the room per round, so that later rounds choose by a better residual.
            best = gain.topk(max(1, room // 2)).indices
            best = best[gain[best] > 1e-12 * norm(plain) ** 2]
        if not len(best):
            break
        if time.monotonic() >= end:
            solved = False
            break
        chosen[best] = True
        freed_residual, solved = _solve_freed(model, trace, rows, pairs.take(chosen), end)
        if norm(freed_residual) < value:
            residual, value = freed_residual, norm(freed_residual)
    return value, int(chosen.sum()), solved


def _first_order_gain(
    model: MLP, trace: Trace, rows: Rows, pairs: KinkPairs, residual: Theta
) -> Tensor:
    """Return <e_rj, r>, which is positive if opening gate j for row r reduces the residual.

    e_rj is what the gate lets through. This column is never formed. Its inner product with r is the
    derivative of the row's output in that activation, times the change of the pre-activation if theta
    moved by r. One forward pass computes this for all K gates, while K columns would not fit into memory.

    Args:
        model: The network.
        trace: Its activations at the samples.
        rows: Rows of the problem.
        pairs: Kinks of a layer.
        residual: The residual r.

    Returns:
        (K,) gains.
    """
    # The change of the layer's pre-activations if theta moved by r.
    change = torch.zeros((), dtype=torch.float64)
    for i, layer in enumerate(model.linears[: pairs.layer + 1]):
        if i:
            change = change * model.activation.derivative(trace.pre[i - 1]) @ layer.weight.T
        change = change + trace.inputs[i] @ residual[f"layers.{i}.weight"].T
        if layer.bias is not None:
            change = change + residual[f"layers.{i}.bias"]
    strength = _strength(model, trace, rows, pairs.layer)
    return (strength * change[rows.index])[pairs.row, pairs.neuron]


def _strength(model: MLP, trace: Trace, rows: Rows, layer: int) -> Tensor:
    """Return (R, h) derivatives of each row's output in the activations of a layer."""
    signals = model.signals(trace, rows.covectors, rows.index)
    return signals[layer + 1] @ model.linears[layer + 1].weight.detach()


def _columns(model: MLP, trace: Trace, rows: Rows, pairs: KinkPairs) -> tuple[Tensor, list[Tensor]]:
    """Return sample index and backward signals of all columns: rows with closed gates, then opened gates.

    If the gates of a row are free at kinks, its gradient is lam (g with those gates closed) + sum_j mu_j
    (what gate j alone lets through). This is linear in (lam, mu), with one column for each. Above the
    layer of the kinks an opened gate changes nothing, so its signal there is zero.

    Args:
        model: The network.
        trace: Its activations at the samples.
        rows: Rows of the problem.
        pairs: Kinks of a layer.

    Returns:
        The index (R + K,), and signals (R + K, h) for every layer.
    """
    layer = pairs.layer
    strength = _strength(model, trace, rows, layer)
    gate = model.activation.derivative(trace.pre[layer])[rows.index]
    gate = gate.index_put((pairs.row, pairs.neuron), torch.zeros((), dtype=gate.dtype))
    opened = torch.zeros(len(pairs), strength.shape[1], dtype=strength.dtype)
    opened[torch.arange(len(pairs)), pairs.neuron] = strength[pairs.row, pairs.neuron]
    index = torch.cat([rows.index, rows.index[pairs.row]])
    signals = [torch.cat([strength * gate, opened])]
    for below in range(layer, 0, -1):
        gates = model.activation.derivative(trace.pre[below - 1])[index]
        signals.append(signals[-1] @ model.linears[below].weight.detach() * gates)
    above = model.signals(trace, rows.covectors, rows.index)[layer + 1 :]
    padded = [torch.cat([s, s.new_zeros(len(pairs), s.shape[1])]) for s in above]
    return index, signals[::-1] + padded


def _solve_freed(
    model: MLP, trace: Trace, rows: Rows, pairs: KinkPairs, end: float
) -> tuple[Theta, bool]:
    """Solve the quadratic program, and recompute the residual explicitly from its solution."""
    index, signals = _columns(model, trace, rows, pairs)
    theta = parameters(model)
    factor = _factor(model, trace, index, signals)
    z, solved = _solve_quadratic_program(factor, len(rows), pairs.row, end - time.monotonic())
    residual: Theta = {}
    for i, (layer, signal) in enumerate(zip(model.linears, signals, strict=True)):
        weighted = z[:, None] * signal
        name = f"layers.{i}"
        residual[f"{name}.weight"] = theta[f"{name}.weight"] - weighted.T @ trace.inputs[i][index]
        if layer.bias is not None:
            residual[f"{name}.bias"] = theta[f"{name}.bias"] - weighted.sum(0)
    return residual, solved


def _factor(model: MLP, trace: Trace, index: Tensor, signals: list[Tensor]) -> mult.Factor:
    """Return the QR factorization of the dense columns if they fit into memory, or the Gram matrix.

    The Gram matrix squares the condition number, but it needs no column of the size of theta. It is computed
    from products of signals and of layer inputs. <column, theta> is the sum of <signal, pre-activation> over
    layers.

    Args:
        model: The network.
        trace: Its activations at the samples.
        index: (k,) sample of every column.
        signals: (k, h) backward signals for every layer.

    Returns:
        The factor.
    """
    theta = parameters(model)
    size = sum(t.numel() for t in theta.values())
    if len(index) * size * 8 > mult.DENSE_BYTES // 2:
        inner = torch.zeros(len(index), dtype=torch.float64)
        for i, signal in enumerate(signals):
            inner += (signal * trace.pre[i][index]).sum(1)  # <d a^T, W> + <d, b> = <d, pre>
        return mult.factor_gram(mlp_gram(model, trace, index, signals), inner)
    columns = []
    for i, (layer, signal) in enumerate(zip(model.linears, signals, strict=True)):
        columns.append((signal[:, :, None] * trace.inputs[i][index][:, None, :]).flatten(1))
        columns += [signal] if layer.bias is not None else []
    return mult.factor_dense(torch.cat(columns, 1), flatten(theta))


def _solve_quadratic_program(
    factor: mult.Factor, rows: int, owner: Tensor, seconds: float = math.inf
) -> tuple[Tensor, bool]:
    """Minimize ||e||^2 s.t. F z + e = h, lam >= 0, 0 <= mu <= lam[owner], with z = (lam, mu).

    The product of the multiplier lam_i and a gate in [0, 1] is a separate variable mu. This makes the problem
    convex. e is also a variable, so that the solver uses F once, as an equality, and never the squared F^T F.

    Args:
        factor: F (k, rows + kinks) and h (k,).
        rows: Number of columns that are multipliers.
        owner: (kinks,) row whose multiplier bounds each gate.
        seconds: Time limit.

    Returns:
        z, feasible to the last bit, and whether the solver reports an optimum.
    """
    import clarabel

    matrix, target = factor.matrix.numpy(), factor.target.numpy()
    # Columns and target have unit size. The bounds mu <= lam carry the scales.
    scale = np.linalg.norm(matrix, axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    size = max(float(np.linalg.norm(target)), 1e-300)
    k, columns = matrix.shape
    kinks, owners = columns - rows, owner.numpy()
    upper = sparse.csc_matrix(
        (
            np.concatenate([1 / scale[rows:], -1 / scale[owners]]),
            (np.tile(np.arange(kinks), 2), np.concatenate([rows + np.arange(kinks), owners])),
        ),
        shape=(kinks, columns),
    )
    equality = sparse.hstack([sparse.csc_matrix(matrix / scale), sparse.identity(k)])
    bounds = sparse.hstack(
        [sparse.vstack([-sparse.identity(columns), upper]), sparse.csc_matrix((columns + kinks, k))]
    )
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.time_limit = max(seconds, 0.1)
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    solver = clarabel.DefaultSolver(
        sparse.block_diag([sparse.csc_matrix((columns, columns)), 2 * sparse.identity(k)], "csc"),
        np.zeros(columns + k),
        sparse.vstack([equality, bounds], "csc"),
        np.concatenate([target / size, np.zeros(columns + kinks)]),
        [clarabel.ZeroConeT(k), clarabel.NonnegativeConeT(columns + kinks)],
        settings,
    )
    solution = solver.solve()
    z = np.asarray(solution.x)[:columns] * size / scale
    z = np.maximum(np.nan_to_num(z), 0)  # exactly feasible, so that the residual is one that exists
    z[rows:] = np.minimum(z[rows:], z[owners])
    solved = str(solution.status) in ("Solved", "AlmostSolved")
    return torch.from_numpy(z), solved
