"""Compare multipliers by the Gram matrix with NNLS on the dense matrix of gradients.

    lam = argmin_{lam >= 0} || theta - sum_i lam_i y_i grad Phi(theta; x_i) ||

The published way forms the P x n matrix of gradients and solves there. Both ways run in float64 on the same
trained network, and their answers are compared.
"""

from __future__ import annotations

import torch
from scipy.optimize import nnls
from torch import Tensor

from experiments.report import Report, only_on
from experiments.timing import median_time
from residuum.datasets import load_dataset
from residuum.networks import MLP
from residuum.stationarity import Rows, flatten, jacobian, norm, parameters, residual
from residuum.theory.kkt import evaluate, fit_multipliers
from residuum.theory.rows import constraint_rows, normalize_labels
from residuum.training import TrainingConfig, make_release, train

ARCH, SAMPLES, STEPS, SEED = "mlp:64-300-1", 500, 500, 0
GRAM_REPEATS, DENSE_REPEATS = 15, 3
BAR = 20.0
AGREEMENT = 1e-9  # largest relative difference that still counts as the same answer


def certificate(device: str) -> Report:
    """Compare the seconds of the dense way with those of the Gram way, n = 500, P = 19,800."""
    only_on(device, "cpu")
    model, x, rows = _trained()
    theta = parameters(model)

    def gradients() -> Tensor:
        return jacobian(model, x, rows).T.contiguous()  # (P, n)

    def dense(matrix: Tensor) -> Tensor:
        return torch.from_numpy(nnls(matrix.numpy(), flatten(theta).numpy(), maxiter=10**5)[0])

    (fast, condition, _), gram_seconds = median_time(
        lambda: fit_multipliers(model, x, rows), GRAM_REPEATS
    )
    matrix, form_seconds = median_time(gradients, DENSE_REPEATS)
    slow, solve_seconds = median_time(lambda: dense(matrix), DENSE_REPEATS, warmups=0)

    def relative_residual(lam: Tensor) -> float:
        return norm(residual(model, theta, x, rows.combine(lam, len(x)))) / norm(theta)

    values = relative_residual(fast), relative_residual(slow)
    row = {
        "seed": SEED,
        "parameters": sum(t.numel() for t in theta.values()),
        "active multipliers": int((fast > 0).sum()),
        "condition of the Gram matrix": condition,
        "gram seconds": gram_seconds,
        "dense form seconds": form_seconds,
        "dense solve seconds": solve_seconds,
        "ratio": (form_seconds + solve_seconds) / gram_seconds,
        "residual gram": values[0],
        "residual dense": values[1],
        "residual difference": abs(values[0] - values[1]) / values[1],
        "multiplier difference": float((fast - slow).norm() / slow.norm()),
    }
    differences = row["residual difference"], row["multiplier difference"]
    return Report(
        what="seconds by the dense matrix / seconds by the Gram matrix, same multipliers",
        settings={
            "data": "digits",
            "samples": SAMPLES,
            "arch": ARCH,
            "training": f"margin, {STEPS} steps",
            "gram_repeats": GRAM_REPEATS,
            "dense_repeats": DENSE_REPEATS,
            "dtype": "float64",
        },
        seeds=(SEED,),
        figures=[row],
        ratio=row["ratio"],
        bar=BAR,
        checks={f"same answer to {AGREEMENT:g}": max(differences) <= AGREEMENT},
    )


def _trained() -> tuple[MLP, Tensor, Rows]:
    data = load_dataset("digits", SAMPLES, seed=SEED).train
    state = train(ARCH, data, TrainingConfig(steps=STEPS, seed=SEED))
    model = make_release(state, ARCH, data, "binary").copy_module().double().requires_grad_(False)
    assert isinstance(model, MLP)
    outputs = evaluate(model, data.x)
    return model, data.x, constraint_rows(outputs, normalize_labels(data.y, "binary", 1), "binary")
