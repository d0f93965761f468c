"""Fit the multipliers of the records to the target, and compute the residual.

target = sum_i c_i x_i^T + E,  c_i = lam_i delta(x_i)

signal-to-residual ratio   |c_i| |x_i| / |E|: a record above 1 stands out by itself
                           (in the results: ``own_over_misfit``)
informed estimate          x^_i = x_i + E^T c_i / |c_i|^2: the estimate of an attacker who knows all
                           other records, and the activation pattern and multiplier of this one
                           (the adversary of Balle et al. 2022)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.errors import InconclusiveError
from residuum.risk.case import Case, Samples
from residuum.risk.gradients import (
    Counter,
    Gradients,
    Multipliers,
    compute_gradients,
    fit_multipliers,
)
from residuum.similarity import chunks, standardize
from residuum.stationarity import Rows, Theta, norm


@dataclass(frozen=True, eq=False)
class Fit:
    """Records fitted to the target of a case.

    Attributes:
        gradients: The gradients of the records.
        rows: The rows of the equation.
        multipliers: The fitted multipliers.
        residual: E in the fitted layers.
        weight: The weight on the input if it is fitted, else "".
    """

    gradients: Gradients
    rows: Rows
    multipliers: Multipliers
    residual: Theta
    weight: str

    @classmethod
    def from_records(cls, case: Case, samples: Samples, watch: Counter | None = None) -> Fit:
        """Fit nonnegative multipliers, or unconstrained ones for a regression.

        Args:
            case: The case.
            samples: The records.
            watch: Receives the step, the number of steps, and a text.

        Returns:
            The fit.

        Raises:
            InconclusiveError: If the network has no gradients of single records.
        """
        rows = case.rows(samples)
        try:
            gradients = compute_gradients(case.model, samples.x, rows, case.layers)
            free = case.task == "regression"
            multipliers = fit_multipliers(gradients, case.target, len(rows), free, watch)
        except (RuntimeError, NotImplementedError) as problem:  # from the forward of a user
            raise InconclusiveError(
                "The gradients of single records cannot be computed in this network: "
                f"{str(problem).splitlines()[0][:200]}",
                "Use eval mode. Records must not affect each other, and the network must have no random "
                "numbers and no state.",
            ) from problem
        total = gradients.combine(multipliers.lam)
        residual = {name: case.target[name] - t for name, t in total.items()}
        weight = case.input_weight if case.input_weight in residual else ""
        return cls(gradients, rows, multipliers, residual, weight)

    @property
    def signal_to_residual(self) -> Tensor:
        """The ratio (n,), in the layer on the input if it is fitted, else in all layers."""
        residual = {self.weight: self.residual[self.weight]} if self.weight else self.residual
        sizes = self.gradients.sizes(self.multipliers.lam, self.weight)
        return sizes / max(norm(residual), 1e-300)


def compute_informed_ncc(
    x: Tensor, columns: Tensor, residual: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """Return the NCC of informed estimates with their records.

    Args:
        x: The records (n, *shape).
        columns: c of each record, (n, h).
        residual: E, (h, d).
        shape: Shape of a record.

    Returns:
        The NCC (n,), NaN if the multiplier is zero.
    """
    similarities = []
    for block in chunks(len(x), 4 * x[0].numel()):
        estimate = compute_informed_estimate(x[block], columns[block], residual)
        a, b = (standardize(images.reshape(-1, *shape)) for images in (estimate, x[block]))
        similarities.append((a * b).sum(1).clamp(-1, 1))
    return torch.cat(similarities)


def compute_informed_estimate(x: Tensor, columns: Tensor, residual: Tensor) -> Tensor:
    """Return the informed estimates x + E^T c / |c|^2.

    Args:
        x: The records (k, *shape).
        columns: c of each record, (k, h).
        residual: E, (h, d).

    Returns:
        The estimates (k, d), NaN if c = 0, because the layer then contains nothing of the record.
    """
    squares = columns.square().sum(1, keepdim=True)
    estimate = x.flatten(1) + (columns @ residual) / squares.clamp(min=1e-300)
    return torch.where(squares > 0, estimate, torch.nan)
