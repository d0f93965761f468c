"""The stages of an exposure. Each stage takes one kind of measurement of all training records.

Measurements that do not apply are NaN, and a note gives the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from scipy.stats import false_discovery_control
from torch import Tensor, nn

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
from residuum.risk.conformal import rank_p_values
from residuum.risk.fit import Fit, compute_informed_ncc
from residuum.risk.gradients import Counter
from residuum.similarity import chunks
from residuum.stationarity import norm
from residuum.theory.rows import margins, normalize_labels

LEVEL = 0.05  # false discovery rate at which kinks flag a record
F = TypeVar("F", bound=Record)


@dataclass(frozen=True, eq=False)
class Measured(Record, Generic[F]):
    """The result of a stage. Finished stages are saved, so that an interrupted run can resume.

    Attributes:
        figures: The measurements of the records.
        notes: Remarks for the reader of the exposure.
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
    """Fit the multipliers of the records, and measure the informed estimate of each record.

    Args:
        case: The network, the records and the target.
        watch: Function that is called with the step, the number of steps, and a text.

    Returns:
        The measurements. If the weight on the input is fitted, the tensors are ``columns`` (multiplier times
        backward signal of each record, (n, h)) and ``residual`` (what the fit leaves of this weight, (h, d)).
    """
    x, n = case.records.x, len(case.data)
    fit = Fit.from_records(case, case.records, watch)
    lam, gap, notes = fit.multipliers.lam, fit.multipliers.gap, []
    target_norm = norm({name: case.target[name] for name in fit.residual})
    informed_ncc, tensors = not_applicable(n), {}
    if fit.weight:
        columns, residual = fit.gradients.columns(lam, fit.weight), fit.residual[fit.weight]
        informed_ncc = compute_informed_ncc(x, columns, residual, case.data.shape)
        tensors = {"columns": columns.cpu(), "residual": residual.cpu()}
    else:
        notes.append("no informed estimate: no dense layer on whole samples was fitted")
    if fit.multipliers.method == "descent":
        notes.append(
            f"{len(fit.rows)} rows: multipliers come from descent and violate the optimality conditions "
            f"by {gap:.1g}"
        )
    figures = FitFigures(
        multiplier=x.new_zeros(n).index_add_(0, fit.rows.index, lam.abs()).cpu(),
        own_over_misfit=fit.signal_to_residual.cpu(),
        misfit=norm(fit.residual) / max(target_norm, 1e-300),
        gap=gap,
        informed_ncc=informed_ncc.cpu(),
    )
    return Measured(figures, tuple(notes), tensors)


def read_row_space(case: Case) -> Measured[RowSpaceFigures]:
    """Measure how much of every training record the layer on the input contains."""
    space, x = case.row_space, case.records.x
    signal_share = reach = reach_ncc = dual = dual_p = not_applicable(len(case.data))
    notes = []
    if space is None:
        notes.append(f"no row space and no dual vector: {case.no_row_space}")
    else:
        signal_share, reach, reach_ncc = space.signal_share(x), space.reach(x), space.reach_ncc(x)
        if dense_chain(case.model) is None:
            notes.append("no dual vector: the network is not a chain of dense layers")
        else:
            dual = space.dual(x, case.signals(case.records))
            if case.holdout is not None:
                dual_p = rank_p_values(dual, space.dual(case.holdout.x, case.signals(case.holdout)))
    figures = RowSpaceFigures(
        rank=None if space is None else space.rank,
        heard=signal_share.cpu(),
        reach=reach.cpu(),
        reach_ncc=reach_ncc.cpu(),
        dual=dual.cpu(),
        dual_p=dual_p.cpu(),
    )
    return Measured(figures, tuple(notes))


def count_kinks(case: Case) -> Measured[KinkFigures]:
    """Count the activation boundaries through every record, and compare with held-out records."""
    n, x = len(case.data), case.records.x
    p, q = not_applicable(n), not_applicable(n)
    all_x = x if case.holdout is None else torch.cat([x, case.holdout.x])
    boundaries = ActivationBoundaries.measure(case.model, all_x)
    scores = boundaries.score(all_x)
    notes: tuple[str, ...] = ()
    if not boundaries.neurons:
        notes = ("no kinks: no dense layer with a piecewise linear activation changes the outputs",)
    elif case.holdout is None:
        notes = ("kinks have no chance level without held-out records",)
    else:
        p = rank_p_values(scores.statistic[:n], scores.statistic[n:])
        q = torch.from_numpy(false_discovery_control(p.numpy()))
    return Measured(KinkFigures(kinks=scores.boundaries[:n], kink_p=p, kink_q=q), notes)


@dataclass(frozen=True, eq=False)
class Canaries:
    """Canaries, and which of them were inserted into the training set.

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
        """The values that determine the bound: a hash of the canaries, the confidence and delta."""
        canaries = digest(self.data.x, self.data.y, self.inserted)
        return [canaries, self.confidence, self.delta]


def measure_canaries(case: Case, canaries: Canaries) -> dict[str, Tensor]:
    """Compute statistics that are larger for canaries that seem inserted.

    Omitted canaries are fitted together with the records, so that all canaries are treated in the same way.

    Args:
        case: The network, the records and the target.
        canaries: The canaries.

    Returns:
        One value per canary (m,) by name of the statistic.
    """
    records = case.records
    x = canaries.data.x.to(records.x).reshape(-1, *case.data.shape)
    is_inserted = canaries.inserted.to(x.device)
    index = locate_records(x, records.x)
    _check_inserted(index, is_inserted)
    outputs = case.outputs(x)
    y = normalize_labels(canaries.data.y, case.task, outputs.shape[1]).to(records.y)
    omitted = ~is_inserted
    index[omitted] = len(records.x) + torch.arange(int(omitted.sum()), device=index.device)
    joined = Samples(torch.cat([records.x, x[omitted]]), torch.cat([records.y, y[omitted]]))
    ratio = Fit.from_records(case, joined).signal_to_residual
    loss = margins_and_losses(outputs, y, case.task)[1]
    return {"loss": -loss.cpu(), "own part": ratio[index].cpu()}


def _check_inserted(index: Tensor, is_inserted: Tensor) -> None:
    """Check that inserted canaries are among the records, and that omitted canaries are not."""
    missing_count = int((index[is_inserted] < 0).sum())
    if missing_count:
        raise DataError(
            f"Inserted canaries must be among the records of --data; {missing_count} of them are not.",
            "List inserted canaries as the network received them, with the mean subtracted as in --data.",
        )
    extra_count = int((index[~is_inserted] >= 0).sum())
    if extra_count:
        raise DataError(
            f"Omitted canaries must not be among the records; {extra_count} of them are.",
            "Correct 'inserted', or remove records that occur twice from the file.",
        )


def locate_records(x: Tensor, records: Tensor) -> Tensor:
    """Find the record that equals each sample up to rounding to float32.

    Args:
        x: The samples, (m, *shape).
        records: The records, (n, *shape).

    Returns:
        The index of the equal record for each sample, (m,), -1 for a sample without an equal record.
    """
    a, b = x.flatten(1), records.flatten(1)
    index = torch.full((len(a),), -1, dtype=torch.long, device=records.device)
    squared_norms = b.square().sum(1)
    for block in chunks(len(a), len(b)):
        squares = a[block].square().sum(1)[:, None] + squared_norms - 2 * a[block] @ b.T
        nearest = squares.argmin(1)
        distance = (a[block] - b[nearest]).norm(dim=1)
        is_equal = distance <= 1e-5 * b[nearest].norm(dim=1).clamp(min=1e-30)
        index[block] = torch.where(is_equal, nearest, -1)
    return index
