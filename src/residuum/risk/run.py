"""Measure which training records are at risk, from one network and its data, without an attack.

The exposure of a record is its risk to be reconstructed from the released network. It is measured from the
attack surface: the final weights, the weight update (if the initial weights are known), or the optimizer
state. There are five stages:

    outputs       the margin and the loss of each record
    multipliers   the weight of each record in the sum of gradients that equals the attack surface
    span          how well each record is a combination of the rows of the first layer's weight matrix
    kinks         the number of activation boundaries through each record
    canaries      a lower bound on the privacy loss epsilon, from samples that were inserted at random

The results of ``multipliers`` and ``span`` are combined into the score that ranks the records
(``probability.py``).

All numbers are float64. Records are processed in blocks, so memory grows with records times layer width, but
not with records times parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residuum.errors import DataError
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.records.exposure import (
    CanaryBound,
    Exposure,
    FitFigures,
    KinkFigures,
    OutputFigures,
    RowSpaceFigures,
    not_applicable,
)
from residuum.risk.canaries import find_best_bound
from residuum.risk.case import Case
from residuum.risk.fit import compute_informed_estimate
from residuum.risk.groups import name_groups, summarize_groups
from residuum.risk.probability import (
    ATTACKS,
    describe_row_space,
    explain_uncalibrated,
    score_records,
)
from residuum.risk.stages import (
    LEVEL,
    Canaries,
    F,
    Measured,
    count_kinks,
    fit_records,
    measure_canaries,
    measure_outputs,
    read_row_space,
)
from residuum.similarity import ncc
from residuum.surfaces.surface import WEIGHTS

# By default, the result contains the images of this number of records, those with the highest risk of being
# recovered.
MAX_SHOWN = 10
MIN_HOLDOUT = 100  # smallest number of held-out records; with fewer, no p-value is below 1%
STAGES = ("outputs", "multipliers", "span", "kinks", "canaries")
# A function that reports progress. It is called with the number of finished stages, the number of all stages,
# and the name of the stage.
Watcher = Callable[[int, int, str], None]


def expose(
    network: Network,
    data: Dataset,
    holdout: Dataset | None = None,
    knowledge: Knowledge | None = None,
    *,
    surface: str = "auto",
    task: str = "auto",
    groups: Sequence[str] = (),
    grouped_by: str = "",
    candidates: Tensor | None = None,
    canaries: Canaries | None = None,
    top: int = MAX_SHOWN,
    device: str = "cpu",
    work: Path | None = None,
    watch: Watcher | None = None,
) -> Exposure:
    """Measure the exposure of every record of ``data``, i.e. its risk to be reconstructed.

    Args:
        network: The released network.
        data: The training records.
        holdout: At least 100 records that the network never saw.
        knowledge: Initial weights or optimizer state known to the attacker.
        surface: The attack surface: "weights", "change" (the weight update), "moment" (the optimizer state),
            or "auto" for the last of these that the attacker knows.
        task: What the network predicts: "binary", "multiclass", "regression" or "auto".
        groups: A name for every record, by default its class.
        grouped_by: What ``groups`` describes.
        candidates: Images that an attack reconstructed. Each record is compared with its nearest candidate.
        canaries: Samples that were inserted into the training set with probability 1/2. They give a lower
            bound on the privacy loss epsilon.
        top: Number of most exposed records that are stored with their images.
        device: Device of the computation, such as "cpu".
        work: Folder for finished stages, so that an interrupted run can resume.
        watch: Function that is called with the number of finished stages, the number of all stages, and
            the name of the stage.

    Returns:
        The measurements of every record.
    """
    start_time = time.monotonic()
    _check_holdout(data, holdout)
    exposure_case = Case.create(
        network, data, holdout, knowledge or Knowledge(), surface, task, device
    )
    names = name_groups(data, exposure_case.task, tuple(groups))
    results = _run_stages(exposure_case, canaries, work, watch)
    values, row_space = data.x[0].numel(), results.row_space.figures
    log_odds_of_recovery = score_records(
        results.fit.figures.own_over_misfit,
        row_space.heard,
        row_space.reach_ncc,
        values,
        row_space.rank,
    )
    why_uncalibrated = explain_uncalibrated(exposure_case)
    probability = None if why_uncalibrated else torch.sigmoid(log_odds_of_recovery)
    most_exposed = log_odds_of_recovery.argsort(descending=True, stable=True)[:top]
    found_ncc, nearest = best_candidates(candidates, data.x.double(), most_exposed)
    return Exposure(
        **results.figures,
        arch=network.arch,
        surface=exposure_case.surface.name,
        task=exposure_case.task,
        holdout=0 if holdout is None else len(holdout),
        layers=exposure_case.layers,
        attacks=ATTACKS,
        level=LEVEL,
        labels=data.y,
        groups=names,
        grouped_by=(grouped_by or "group") if groups else "class" if names else "",
        score=log_odds_of_recovery,
        probability=not_applicable(len(data)) if probability is None else probability,
        uncalibrated=why_uncalibrated,
        by_group=summarize_groups(names, log_odds_of_recovery, probability, results.flagged),
        canaries=results.epsilon,
        top=most_exposed,
        images=data.x[most_exposed].double(),
        informed=_informed_images(exposure_case, results.fit.tensors, most_exposed),
        found_ncc=found_ncc,
        nearest=nearest,
        seconds=time.monotonic() - start_time,
        notes=(*results.notes, *_notes(exposure_case, row_space.rank)),
    )


@dataclass(frozen=True)
class Results:
    """The results of the steps (stages) of a risk measurement.

    Attributes:
        outputs: Margin and loss of each record.
        fit: The fit of the records to the attack surface.
        row_space: How well each record is a combination of the rows of the first layer's weight matrix.
        kinks: Activation boundaries through each record.
        epsilon: The lower bound on epsilon from canaries, None without canaries.
    """

    outputs: Measured[OutputFigures]
    fit: Measured[FitFigures]
    row_space: Measured[RowSpaceFigures]
    kinks: Measured[KinkFigures]
    epsilon: CanaryBound | None

    @property
    def figures(self) -> dict[str, Any]:
        """All measurements of the records, by name of the measurement."""
        results = (self.outputs, self.fit, self.row_space, self.kinks)
        return {name: value for result in results for name, value in vars(result.figures).items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all steps of the measurement for the reader of the result."""
        return (*self.fit.notes, *self.row_space.notes, *self.kinks.notes)

    @property
    def flagged(self) -> Tensor | None:
        """Mask of the records on significantly many activation boundaries, None without p-values."""
        q_values = self.kinks.figures.kink_q
        return None if q_values.isnan().all() else q_values <= LEVEL


def _run_stages(
    case: Case, canaries: Canaries | None, work: Path | None, watch: Watcher | None
) -> Results:
    """Run the steps of a risk measurement, or read their saved results from the folder ``work``."""

    def progress(done: int, text: str) -> None:
        if watch is not None:
            watch(done, len(STAGES), text)

    def stage(name: str, measure: Callable[[Case], Measured[F]]) -> Measured[F]:
        progress(STAGES.index(name), name)
        path = None if work is None else work / f"{name}.safetensors"
        measured: Measured[F] | None = None if path is None else Measured.load_or_none(path)
        if measured is None:
            measured = measure(case)
            if path is not None:
                measured.save(path)
        return measured

    def count(step: int, steps: int, text: str) -> None:
        progress(1, f"{text} {step} of {steps}")

    outputs = stage("outputs", measure_outputs)
    fit_result = stage("multipliers", partial(fit_records, watch=count))
    row_space = stage("span", read_row_space)
    kinks = stage("kinks", count_kinks)
    epsilon = None
    if canaries is not None:
        progress(STAGES.index("canaries"), "canaries")
        statistics = measure_canaries(case, canaries)
        epsilon = find_best_bound(
            statistics, canaries.inserted, canaries.confidence, canaries.delta
        )
    progress(len(STAGES), "")
    return Results(outputs, fit_result, row_space, kinks, epsilon)


def _check_holdout(data: Dataset, holdout: Dataset | None) -> None:
    if holdout is None:
        return
    if holdout.shape != data.shape:
        raise DataError(
            f"Held-out records must have the shape of the training records, {data.shape}; got "
            f"{holdout.shape}.",
            "Preprocess records and held-out records in the same way.",
        )
    if len(holdout) < MIN_HOLDOUT:
        raise DataError(
            f"Computing p-values needs at least {MIN_HOLDOUT} held-out records (records that were not "
            f"used for training); got {len(holdout)}.",
            "Pass more held-out records. To measure the exposure of records without p-values, omit "
            "--holdout.",
        )


def _informed_images(case: Case, fit: dict[str, Tensor], records: Tensor) -> Tensor:
    """Return estimates of k records by an attacker who knows all other records, (k, *shape).

    The informed estimate of a record is the estimate of an attacker who knows all other records. If the first
    layer was not fitted, the result is an empty tensor.
    """
    shape = tuple(case.data.shape)
    if not fit:
        return torch.zeros(0, *shape, dtype=torch.float64)
    chosen_records = case.records.x[records.to(case.records.x.device)].cpu()
    return compute_informed_estimate(
        chosen_records, fit["columns"][records], fit["residual"]
    ).reshape(-1, *shape)


def best_candidates(candidates: Tensor | None, x: Tensor, records: Tensor) -> tuple[Tensor, Tensor]:
    """Compare every record with its nearest candidate, i.e. with the most similar reconstructed image.

    Similarity is the absolute value of the normalized cross-correlation (NCC).

    Args:
        candidates: Images that an attack reconstructed, or None.
        x: The records, (n, *shape).
        records: Indices of the k records whose nearest candidates are returned.

    Returns:
        The similarity of every record and its nearest candidate (n,). Then the nearest candidates (k, *shape)
        of the chosen records, with the sign of the NCC.

    Raises:
        DataError: If candidates and records have different shapes.
    """
    if candidates is None:
        return not_applicable(len(x)), torch.zeros(0, *x.shape[1:], dtype=torch.float64)
    if candidates.shape[1:] != x.shape[1:]:
        raise DataError(
            f"The candidates of an attack (reconstructed images) must have the shape of the records, "
            f"{tuple(x.shape[1:])}; got {tuple(candidates.shape[1:])}.",
            "Pass the folder of an attack on this network.",
        )
    candidates = candidates.double()
    similarity = ncc(x, candidates)
    most_similar = similarity.abs().max(1)
    nearest_index = most_similar.indices[records]
    ncc_signs = similarity[records, nearest_index].sign().reshape(-1, *[1] * (x.ndim - 1))
    return most_similar.values.double(), ncc_signs * candidates[nearest_index]


def _notes(case: Case, rank: int | None) -> list[str]:
    """Return the notes that concern the whole risk measurement and not a single step of it."""
    notes, n = [], len(case.data)
    if case.surface.name != WEIGHTS:
        notes.append(f"attack surface: {case.surface.name}")
    notes += describe_row_space(rank, case.data.x[0].numel())
    if case.holdout is not None and (min_p := 1 / (len(case.holdout.x) + 1)) > LEVEL / n:
        notes.append(
            f"with {len(case.holdout.x)} held-out records, activation boundaries can flag either no record "
            f"or at least {math.ceil(min_p * n / LEVEL)} records"
        )
    return notes
