"""Fit multipliers (weights) to the records, so that the weighted sum of their gradients gives the weights.

The target of the first layer is its weight matrix, weight update or optimizer state. This target is a
weighted sum over records x_i, up to the residual E. Record x_i has a multiplier lam_i. Its backward signal
delta(x_i) is the gradient of its margin (or negative loss) with respect to the layer's pre-activations:

target = sum_i c_i x_i^T + E,  c_i = lam_i delta(x_i)

signal-to-residual ratio   |c_i| |x_i| / |E|: above 1, the term of record i is larger than everything that the
                           records do not explain (in the results: ``own_over_misfit``)
informed estimate          x^_i = x_i + E^T c_i / |c_i|^2: the estimate of an attacker who knows all
                           other records, and the activation pattern and multiplier of record i
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
    """The multipliers with which the weighted sum of the records' gradients is closest to the target.

    The target is the weights, the weight update or the optimizer state in the fitted layers.

    Attributes:
        gradients: The gradients of the records in the fitted layers.
        rows: The record of each gradient, and the weights of the network's outputs in this gradient.
        multipliers: The fitted multipliers of the gradients.
        residual: The target minus the weighted sum of gradients, by parameter name.
        weight: Name of the first layer's weight if this weight is fitted, else "".
    """

    gradients: Gradients
    rows: Rows
    multipliers: Multipliers
    residual: Theta
    weight: str

    @classmethod
    def from_records(cls, case: Case, samples: Samples, watch: Counter | None = None) -> Fit:
        """Fit the multipliers (weights) with which the records' gradients add up to the target.

        The multipliers are nonnegative, except for a regression.

        Args:
            case: The network and the target.
            samples: The records.
            watch: Function that reports progress. It is called with the step, the number of steps, and a
                text.

        Returns:
            The fit.

        Raises:
            InconclusiveError: If PyTorch cannot compute the gradient of one record without the others.
        """
        rows = case.rows(samples)
        try:
            gradients = compute_gradients(case.model, samples.x, rows, case.layers)
            may_be_negative = case.task == "regression"
            multipliers = fit_multipliers(gradients, case.target, len(rows), may_be_negative, watch)
        # ``torch.func`` raises these exceptions if it cannot differentiate the network for single records.
        except (RuntimeError, NotImplementedError) as problem:
            raise InconclusiveError(
                "The network must allow PyTorch to compute the gradient of each record alone; got the error: "
                f"{str(problem).splitlines()[0][:200]}",
                "Call network.eval(). The output for a record must not depend on the other records, on "
                "random numbers or on buffers that change.",
            ) from problem
        weighted_sum = gradients.combine(multipliers.lam)
        residual = {name: case.target[name] - t for name, t in weighted_sum.items()}
        input_weight = case.input_weight if case.input_weight in residual else ""
        return cls(gradients, rows, multipliers, residual, input_weight)

    @property
    def signal_to_residual(self) -> Tensor:
        """Signal-to-residual ratio of each record, (n,).

        The signal is the norm of the record's gradient times its multiplier. The residual is the norm of the
        target minus the weighted sum of all gradients. Both norms are those of the first layer if this layer
        is fitted, and of all fitted layers otherwise.
        """
        residual_tensors = (
            {self.weight: self.residual[self.weight]} if self.weight else self.residual
        )
        signal_norms = self.gradients.sizes(self.multipliers.lam, self.weight)
        return signal_norms / max(norm(residual_tensors), 1e-300)


def compute_informed_ncc(
    x: Tensor, columns: Tensor, residual: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """Return the normalized cross-correlation (NCC) of each record with its informed estimate.

    The informed estimate of a record is the estimate of an attacker who knows all other records.

    Args:
        x: The records (n, *shape).
        columns: Column c of each record, (n, h): its multiplier times its backward signal.
        residual: Residual E of the first layer's weight, (h, d).
        shape: Shape of a record.

    Returns:
        The NCC (n,), NaN for a record with multiplier zero.
    """
    ncc_blocks = []
    for block in chunks(len(x), 4 * x[0].numel()):
        estimate = compute_informed_estimate(x[block], columns[block], residual)
        standardized_estimate, standardized_record = (
            standardize(images.reshape(-1, *shape)) for images in (estimate, x[block])
        )
        ncc_blocks.append((standardized_estimate * standardized_record).sum(1).clamp(-1, 1))
    return torch.cat(ncc_blocks)


def compute_informed_estimate(x: Tensor, columns: Tensor, residual: Tensor) -> Tensor:
    """Return the estimate of each record by an attacker who knows all other records: x + E^T c / |c|^2.

    Args:
        x: The records (k, *shape).
        columns: Column c of each record, (k, h): its multiplier times its backward signal.
        residual: Residual E of the first layer's weight, (h, d).

    Returns:
        The estimates (k, d), NaN if c = 0, because the layer then contains nothing of the record.
    """
    squared_norms = columns.square().sum(1, keepdim=True)
    estimate = x.flatten(1) + (columns @ residual) / squared_norms.clamp(min=1e-300)
    return torch.where(squared_norms > 0, estimate, torch.nan)
