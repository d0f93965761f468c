"""The stages of an exposure measurement, i.e. of the risk of each record to be reconstructed.

Each stage takes one kind of measurement of all training records. If a measurement does not apply to the
network, its values are NaN, and a note gives the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from scipy.stats import false_discovery_control
from torch import Tensor, nn

from residuum.conformal import rank_p_values
from residuum.errors import DataError
from residuum.networks import dense_chain
from residuum.networks.kinks import ActivationBoundaries
from residuum.records import Dataset, Record
from residuum.records.exposure import (
    FitFigures,
    KinkFigures,
    OutputFigures,
    RowSpaceFigures,
    not_applicable,
)
from residuum.records.rundir import digest
from residuum.risk.case import Case, Samples
from residuum.risk.fit import Fit, compute_informed_ncc
from residuum.risk.gradients import Counter
from residuum.similarity import chunks
from residuum.stationarity import norm
from residuum.theory.rows import margins, normalize_labels

LEVEL = 0.05  # false discovery rate of the records that are flagged because of their activation boundaries
F = TypeVar("F", bound=Record)


@dataclass(frozen=True, eq=False)
class Measured(Record, Generic[F]):
    """The result of one step of a risk measurement, saved so that an interrupted run can resume.

    Attributes:
        figures: The measurements of the records.
        notes: Remarks for the reader of the result.
        tensors: Other values that later stages need, by name.
    """

    figures: F
    notes: tuple[str, ...] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)


def measure_outputs(case: Case) -> Measured[OutputFigures]:
    """Measure the margin and the loss of the network at every training record."""
    margin, loss = margins_and_losses(case.outputs(case.records.x), case.records.y, case.task)
    return Measured(OutputFigures(margin=margin.cpu(), loss=loss.cpu()))


def margins_and_losses(outputs: Tensor, y: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """Return the margin and the loss of every record.

    Args:
        outputs: Outputs of the network, (n, C).
        y: Labels of the records.
        task: What the network predicts: "binary", "multiclass" or "regression".

    Returns:
        The margins (n,), NaN for a regression, and the losses (n,).
    """
    if task == "regression":
        return not_applicable(len(y)).to(outputs), (outputs - y).square().sum(1)
    margin = margins(outputs, y).amin(1)
    if task == "binary":
        return margin, nn.functional.softplus(-margin, threshold=40)
    return margin, nn.functional.cross_entropy(outputs, y, reduction="none")


def fit_records(case: Case, watch: Counter | None = None) -> Measured[FitFigures]:
    """Fit the weights (multipliers) of the records, and estimate each record from the others.

    The multipliers weight the gradients of the records in a sum that equals the target. The informed estimate
    of a record is the estimate of an attacker who knows all other records.

    Args:
        case: The network, the records and the target.
        watch: Function that reports progress. It is called with the step, the number of steps, and a text.

    Returns:
        The measurements. If the first layer's weight is fitted, the tensors are ``columns`` (multiplier times
        backward signal of each record, (n, h)) and ``residual`` (the target minus the fit, (h, d)).
    """
    x, n = case.records.x, len(case.data)
    record_fit = Fit.from_records(case, case.records, watch)
    lam, gap, notes = record_fit.multipliers.lam, record_fit.multipliers.gap, []
    target_norm = norm({name: case.target[name] for name in record_fit.residual})
    informed_ncc, tensors = not_applicable(n), {}
    if record_fit.weight:
        columns, residual = (
            record_fit.gradients.columns(lam, record_fit.weight),
            record_fit.residual[record_fit.weight],
        )
        informed_ncc = compute_informed_ncc(x, columns, residual, case.data.shape)
        tensors = {"columns": columns.cpu(), "residual": residual.cpu()}
    else:
        notes.append("no informed estimate: no dense layer on whole samples was fitted")
    if record_fit.multipliers.method == "descent":
        notes.append(
            f"the multipliers of {len(record_fit.rows)} gradients were fitted by descent and violate the "
            f"optimality conditions by {gap:.1g}"
        )
    figures = FitFigures(
        multiplier=x.new_zeros(n).index_add_(0, record_fit.rows.index, lam.abs()).cpu(),
        own_over_misfit=record_fit.signal_to_residual.cpu(),
        misfit=norm(record_fit.residual) / max(target_norm, 1e-300),
        gap=gap,
        informed_ncc=informed_ncc.cpu(),
    )
    return Measured(figures, tuple(notes), tensors)


def read_row_space(case: Case) -> Measured[RowSpaceFigures]:
    """Measure how well each record is a combination of the rows of the first layer's weight matrix."""
    space, x = case.row_space, case.records.x
    signal_share = reach = reach_ncc = dual_ncc = dual_p_values = not_applicable(len(case.data))
    notes = []
    if space is None:
        notes.append(f"no row space and no dual vector: {case.no_row_space}")
    else:
        signal_share, reach, reach_ncc = space.signal_share(x), space.reach(x), space.reach_ncc(x)
        if dense_chain(case.model) is None:
            notes.append("no dual vector: the network is not a chain of dense layers")
        else:
            dual_ncc = space.dual(x, case.signals(case.records))
            if case.holdout is not None:
                dual_p_values = rank_p_values(
                    dual_ncc, space.dual(case.holdout.x, case.signals(case.holdout))
                )
    figures = RowSpaceFigures(
        rank=None if space is None else space.rank,
        heard=signal_share.cpu(),
        reach=reach.cpu(),
        reach_ncc=reach_ncc.cpu(),
        dual=dual_ncc.cpu(),
        dual_p=dual_p_values.cpu(),
    )
    return Measured(figures, tuple(notes))


def count_kinks(case: Case) -> Measured[KinkFigures]:
    """Count the activation boundaries through every record, and compare the counts with held-out records."""
    n, x = len(case.data), case.records.x
    p_values, q_values = not_applicable(n), not_applicable(n)
    all_x = x if case.holdout is None else torch.cat([x, case.holdout.x])
    boundaries = ActivationBoundaries.measure(case.model, all_x)
    scores = boundaries.score(all_x)
    notes: tuple[str, ...] = ()
    if not boundaries.neurons:
        notes = (
            "no activation boundaries: no dense layer with a piecewise linear activation changes the outputs",
        )
    elif case.holdout is None:
        notes = ("without held-out records, the counts of activation boundaries have no p-values",)
    else:
        p_values = rank_p_values(scores.statistic[:n], scores.statistic[n:])
        q_values = torch.from_numpy(false_discovery_control(p_values.numpy()))
    return Measured(
        KinkFigures(kinks=scores.boundaries[:n], kink_p=p_values, kink_q=q_values), notes
    )


@dataclass(frozen=True, eq=False)
class Canaries:
    """Canaries: samples that were inserted into the training set with probability 1/2.

    Attributes:
        data: All canaries as samples.
        inserted: Which canaries were inserted, (m,) bool.
        confidence: Probability with which the lower bound on epsilon holds.
        delta: Delta of the (epsilon, delta)-differential privacy.
    """

    data: Dataset
    inserted: Tensor
    confidence: float = 0.95
    delta: float = 0.0

    @property
    def identity(self) -> list[Any]:
        """The inputs of the lower bound on epsilon: a hash of the canaries, the confidence and delta."""
        canary_hash = digest(self.data.x, self.data.y, self.inserted)
        return [canary_hash, self.confidence, self.delta]


def measure_canaries(case: Case, canaries: Canaries) -> dict[str, Tensor]:
    """Compute statistics that are larger for canaries that seem inserted into the training set.

    Inserted canaries are among the records. Omitted canaries are added to the records before the multipliers
    are fitted, so that the fit treats all canaries in the same way.

    Args:
        case: The network, the records and the target.
        canaries: The canaries.

    Returns:
        One value per canary (m,) by name of the statistic.
    """
    records = case.records
    canary_samples = canaries.data.x.to(records.x).reshape(-1, *case.data.shape)
    is_inserted = canaries.inserted.to(canary_samples.device)
    record_index = locate_records(canary_samples, records.x)
    _check_inserted(record_index, is_inserted)
    outputs = case.outputs(canary_samples)
    canary_labels = normalize_labels(canaries.data.y, case.task, outputs.shape[1]).to(records.y)
    omitted = ~is_inserted
    record_index[omitted] = len(records.x) + torch.arange(
        int(omitted.sum()), device=record_index.device
    )
    all_samples = Samples(
        torch.cat([records.x, canary_samples[omitted]]),
        torch.cat([records.y, canary_labels[omitted]]),
    )
    signal_to_residual = Fit.from_records(case, all_samples).signal_to_residual
    loss = margins_and_losses(outputs, canary_labels, case.task)[1]
    return {"loss": -loss.cpu(), "own part": signal_to_residual[record_index].cpu()}


def _check_inserted(index: Tensor, is_inserted: Tensor) -> None:
    """Check that inserted canaries are among the records, and that omitted canaries are not."""
    missing_count = int((index[is_inserted] < 0).sum())
    if missing_count:
        raise DataError(
            f"Canaries (test records) that are marked as inserted must be among the records of --data; "
            f"{missing_count} of them are missing.",
            "Save the canaries as the network received them. Subtract the mean from the canaries if it "
            "was subtracted from --data.",
        )
    extra_count = int((index[~is_inserted] >= 0).sum())
    if extra_count:
        raise DataError(
            f"Canaries (test records) that are marked as left out must not be among the records of "
            f"--data; {extra_count} of them are.",
            "Correct the array 'inserted' in the file of canaries, or remove duplicates of records from it.",
        )


def locate_records(samples: Tensor, records: Tensor) -> Tensor:
    """Find the record that equals each sample. A difference by rounding to float32 is ignored.

    Args:
        samples: The samples, (m, *shape).
        records: The records, (n, *shape).

    Returns:
        The index of the equal record for each sample, (m,), -1 for a sample without an equal record.
    """
    flat_samples, flat_records = samples.flatten(1), records.flatten(1)
    record_index = torch.full((len(flat_samples),), -1, dtype=torch.long, device=records.device)
    squared_norms = flat_records.square().sum(1)
    for block in chunks(len(flat_samples), len(flat_records)):
        squared_distances = (
            flat_samples[block].square().sum(1)[:, None]
            + squared_norms
            - 2 * flat_samples[block] @ flat_records.T
        )
        nearest_record = squared_distances.argmin(1)
        distance = (flat_samples[block] - flat_records[nearest_record]).norm(dim=1)
        is_equal = distance <= 1e-5 * flat_records[nearest_record].norm(dim=1).clamp(min=1e-30)
        record_index[block] = torch.where(is_equal, nearest_record, -1)
    return record_index
