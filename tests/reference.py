"""Naive twins: the definitions transcribed in float64, one sample at a time, no cleverness."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from residuum.stationarity import Rows


def row_gradients(model: nn.Module, x: Tensor, rows: Rows) -> Tensor:
    """(R, P): one backward pass per row."""
    model = model.double()
    parameters = list(model.parameters())
    gradients = []
    for i, covector in zip(rows.index.tolist(), rows.covectors, strict=True):
        value = (covector * model(x[i : i + 1].double())[0]).sum()
        parts = torch.autograd.grad(value, parameters, allow_unused=True)
        gradients.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).flatten()
                    for p, g in zip(parameters, parts, strict=True)
                ]
            )
        )
    return torch.stack(gradients).detach()


def theta_vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def dense_nnls(model: nn.Module, x: Tensor, rows: Rows) -> tuple[np.ndarray, float]:
    """Multipliers and relative residual from the full P x R matrix."""
    theta = theta_vector(model)
    lam, distance = nnls(row_gradients(model, x, rows).T.numpy(), theta.numpy(), maxiter=10**5)
    return lam, distance / float(theta.norm())
