"""How close is a network to a KKT point of the margin problem on given samples?

    min ||theta||^2 / 2  s.t.  m_r(theta) >= 1      (rows r: residuum.theory.rows)
    KKT: theta = sum_r lam_r grad m_r,  lam >= 0,  lam_r (m_r - 1) = 0

Refael et al. 2025, Definition 3: eps = ||theta - sum lam_r grad m_r|| (a norm), delta =
max_r lam_r (m_r - p) with p = min_r m_r. eps is not scale free, so residuals are eps / ||theta||.
All of it in float64.
"""

from __future__ import annotations

import copy
import math
import time

import torch
from torch import Tensor, nn

from residuum import stationarity
from residuum.errors import DataError
from residuum.networks import balance, dense_chain, homogeneity_order
from residuum.networks.probing import second_derivatives
from residuum.records import Certificate, LayerResidual
from residuum.stationarity import Rows, layer_residuals, norm, parameters, project, residual
from residuum.theory import multipliers as mult
from residuum.theory.clarke import clarke_residual
from residuum.theory.rows import choose_task, constraint_rows, normalise_labels

KINK_TOLERANCE = 1e-3
KINK_LIMIT = 1200
EXACT, NEAR = 1e-6, 0.1
MOST_VALUES = 1 << 22  # of samples that go through a network at once


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
    """Certificate of ``model`` on samples ``x`` (as the network receives them) with labels ``y``.

    seconds: no further gates are freed after that time; the Clarke residual is then an upper bound.
    """
    end = time.monotonic() + seconds
    model, x, y, outputs, task, rows = posed(model, x, y, task, rivals)
    theta, notes = parameters(model), []
    lam, condition, note = fit_multipliers(model, x, rows, free=task == "regression")
    notes += [note] if note else []
    r = residual(model, theta, x, rows.combine(lam, len(x)))
    eps, size = norm(r), norm(theta)
    clarke, kinks, freed = eps, 0, 0
    if (chain := dense_chain(model)) is not None:
        sign = torch.where(lam < 0, -1.0, 1.0).double()  # free multipliers: gates at the plain sign
        signed = Rows(rows.index, rows.covectors * sign[:, None])
        found = clarke_residual(chain, x, signed, r, kink_tolerance, kink_limit, end)
        clarke, kinks, freed, solved = found
        if freed < kinks:
            notes.append(f"{freed} of {kinks} kinks freed: residual_clarke is an upper bound")
        if not solved:
            notes.append("the Clarke programme did not reach its tolerance: an upper bound")
    else:
        notes.append("kinks are examined for MLPs only: residual_clarke equals residual_plain")
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


def posed(
    model: nn.Module, x: Tensor, y: Tensor, task: str = "auto", rivals: str = "tied"
) -> tuple[nn.Module, Tensor, Tensor, Tensor, str, Rows]:
    """The margin problem in float64 on the CPU: a copy of the network, samples, labels as the
    mathematics has them, outputs, task and rows.
    """
    model, x = copy.deepcopy(model).cpu().double().requires_grad_(False), x.detach().cpu().double()
    outputs = evaluate(model, x)
    task = choose_task(task, outputs.shape[1])
    y = normalise_labels(y.cpu(), task, outputs.shape[1])
    return model, x, y, outputs, task, constraint_rows(outputs, y, task, rivals)


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    """(n, C) outputs, or a data error when the samples do not fit the network."""
    chunk = max(1, MOST_VALUES // max(1, x[0].numel() if len(x) else 1))
    try:
        with torch.no_grad():
            parts = [model(part) for part in x.split(chunk)] if len(x) > chunk else [model(x)]
        outputs = torch.cat(parts) if len(parts) > 1 else parts[0]
    except RuntimeError as problem:
        raise DataError(
            f"Samples must fit the network's input; got shape {tuple(x.shape[1:])}.",
            f"The network says: {str(problem).splitlines()[0]}",
        ) from problem
    if outputs.ndim != 2:
        raise DataError(
            f"A network returns (n, outputs); this one returned {tuple(outputs.shape)}.",
            "Flatten its output.",
        )
    return outputs


def fit_multipliers(
    model: nn.Module, x: Tensor, rows: Rows, free: bool = False, method: str = "auto"
) -> tuple[Tensor, float, str]:
    """Best multipliers, the condition number of the Gram matrix, and a note where digits are lost.

    method: "gram", "dense", or "auto": the Gram matrix unless its condition exceeds 1e12.
    """
    theta = parameters(model)
    matrix = stationarity.gram(model, x, rows)
    factor, note = mult.factor_gram(matrix, project(model, x, rows, theta)), ""
    fits = len(rows) * sum(t.numel() for t in theta.values()) * 8 <= mult.DENSE_BYTES
    poor = factor.condition > mult.MAX_CONDITION
    if method == "dense" or (method == "auto" and poor and fits):
        dense = stationarity.jacobian(model, x, rows)
        factor = mult.factor_dense(dense, stationarity.flatten(theta))
    elif poor:
        note = f"Gram matrix of condition {factor.condition:.1e}: multipliers have few digits"
    lam = mult.solve(factor, free)

    def correlate(lam: Tensor) -> Tensor:
        return project(model, x, rows, residual(model, theta, x, rows.combine(lam, len(x))))

    return mult.refine(lam, matrix, correlate, free), factor.condition, note


def identity_gap(lam: Tensor, margins: Tensor, order: float | None, size: float) -> float | None:
    """Relative gap of ||theta||^2 = L sum_r lam_r m_r, which homogeneity implies at a KKT point."""
    if order is None:
        return None
    return abs(float(order * (lam * margins).sum()) / size**2 - 1)


def _status(relative: float, margin: float | None) -> str:
    if margin is not None and margin <= 0:
        return "not_separated"
    return "kkt" if relative <= EXACT else "near_kkt" if relative <= NEAR else "far_from_kkt"
