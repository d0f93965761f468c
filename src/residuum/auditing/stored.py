"""Records that stand in the file itself: no attack is needed, and the first row of the verdict's table.

A nearest-neighbour model, a support vector machine or a Gaussian process is its training records; a
checkpoint may hold the arrays it was trained on. Where the auditor gives samples, each is looked for in
the file: equal to the last bit, or within rounding, as it is and as the file's own scalers hand it on;
held-out samples are looked for likewise, as control. Where the file holds no network at all, that is
the whole audit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from scipy.stats import hypergeom
from torch import Tensor

from residuum.auditing.dryrun import NO_DATA, REACHABLE, DryRun
from residuum.auditing.result import PLANNED, SUITE, AuditResult, tried
from residuum.auditing.verdict import (
    INCONCLUSIVE,
    LEAK,
    NO_LEAK_FOUND,
    STORED,
    AttackOutcome,
    decide,
    limitations,
)
from residuum.checkpoints import Inspection, locate
from residuum.checkpoints.contents import Kept, records_in
from residuum.checkpoints.estimators import scalings_in
from residuum.checkpoints.inert import Thing
from residuum.checkpoints.releases import open_release
from residuum.errors import ResiduumError
from residuum.evaluation.null import SIGNIFICANCE
from residuum.networks import Architecture
from residuum.records import Checkpoint, Dataset, Knowledge, Reconstruction, Selection
from residuum.records.rundir import environment

ROUNDING = 16 * torch.finfo(torch.float32).eps  # of a record's largest value
MOST_ALIKE = 64  # records on either side that are compared with one sample
CHUNK = 4096  # records that are taken to float64 at a time
MOST_SHOWN = 300  # records that the report is given: a page shows fewer
NAME = "stored outright"
NO_NETWORK = "the file holds no network"


@dataclass(frozen=True, eq=False)
class Stored:
    """What a file holds outright.

    model: the class of what it holds.
    scalings: of ``scalings_in``.
    inputs: of the network beside it.
    notes: why it is no network, where it is none.
    """

    model: str
    kept: tuple[Kept, ...]
    scalings: tuple[tuple[Tensor, Tensor], ...] = ()
    inputs: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def certain(self) -> bool:
        """Whether more than the name of an array says that these are records."""
        return any(one.certain for one in self.kept)

    @property
    def likely(self) -> bool:
        """Whether rows could be fed to the network beside them, where none are given to compare with."""
        widths = {one.records.shape[1] for one in self.kept if one.records is not None}
        return self.certain or self.inputs in widths

    @property
    def count(self) -> int:
        """Records, those that stand in two places (an array, and the tree made of it) once."""
        different = {
            one.finding.where if one.records is None else float(one.records.double().sum()): one
            for one in self.kept
        }
        return sum(one.finding.count or 0 for one in different.values())

    def without(self, checkpoint: Checkpoint) -> Stored | None:
        """Less what is a parameter of the network itself, whatever its name says."""
        own = tuple(checkpoint.source_names.values())
        kept = tuple(k for k in self.kept if k.certain or not k.finding.where.endswith(own))
        inputs = Architecture.parse(checkpoint.arch).inputs
        return replace(self, kept=kept, inputs=inputs) if kept else None

    def found(self, samples: Tensor) -> Tensor:
        """(n,) how far each sample is from the nearest record: 0 for the same bits, inf for none.

        Relative to its largest value, within ``ROUNDING``; the least over every place and every number
        of scalers.
        """
        flat = samples.flatten(1).double()
        least = torch.full((len(flat),), torch.inf, dtype=torch.float64)
        for one in self.kept:
            for x in _handed_on(flat, self.scalings):
                if one.records is not None and one.records.shape[1] == x.shape[1]:
                    least = torch.minimum(least, nearest(x, one.records))
        return least

    def row(self, train: Dataset | None, control: Dataset | None) -> AttackOutcome:
        """Its row in the table of tests.

        It decides where whatever wrote the file puts records there; where only a name says so, by the
        samples that stand there, or without any by the width.
        """
        where = "; ".join(
            f"{k.finding.what}{f' ({n})' if (n := k.finding.count) else ''}, at {k.finding.where}"
            for k in self.kept
        )
        silent = "what is stored beside the weights says nothing of what they hold"
        whole = AttackOutcome(NAME, self.likely, True, True, where, surface=STORED, silent=silent)
        whole = whole.replace(candidates=self.count)
        if train is None:
            return whole
        away = self.found(train.x)
        same, near = int((away == 0).sum()), int(away.isfinite().sum())
        n = len(train)
        row = whole.replace(
            decides=self.certain or near > 0,
            recovered=near,
            of=n,
            rule="stands in the file",
            reason=f"{where}; of {n} training samples {same} stand there bit for bit, "
            f"{near - same} more within rounding",
        )
        if control is None or control.shape != train.shape:
            return row.replace(expected_by_chance=None)
        others = int(self.found(control.x).isfinite().sum())
        p = float(hypergeom.sf(near - 1, n + len(control), near + others, n))
        return row.replace(
            decides=self.certain or p <= SIGNIFICANCE,
            reason=f"{row.reason}; of {len(control)} held-out samples {others}",
            expected_by_chance=n * others / len(control),
            p_value=p,
        )


def unconfirmed(rows: tuple[AttackOutcome, ...]) -> tuple[str, ...]:
    """What is to be said where an array's name alone speaks for records in it."""
    return tuple(f"not confirmed: {row.reason}" for row in rows if not row.stands)


def stored_in(path: str | Path) -> Stored | None:
    """What a file holds outright; None where it holds nothing, or cannot be looked through."""
    try:
        release = open_release(locate(path))
        kept = tuple(records_in(release))
        scalings = tuple(scalings_in(release)) if kept else ()
    except ResiduumError:
        return None
    if not kept:
        return None
    model = release.content.short if isinstance(release.content, Thing) else ""
    return Stored(model, kept, scalings)


def network_and_records(
    path: str | Path, load: Callable[[], Checkpoint]
) -> tuple[Checkpoint | None, Stored | None]:
    """The network that ``load`` reads, and what the file holds outright: one of them at least."""
    stored = stored_in(path)
    try:
        checkpoint = load()
    except ResiduumError as problem:
        if stored is None:
            raise
        return None, replace(stored, notes=(problem.message,))
    return checkpoint, None if stored is None else stored.without(checkpoint)


def foretold(run: DryRun, stored: Stored) -> DryRun:
    """A dry run of a file with records outright: how the audit will end, network or none."""
    row = stored.row(None, None)
    why = "the file itself holds records outright"
    other = f"cannot be reached: {why}"
    ends = {LEAK: f"certain: {why}", NO_LEAK_FOUND: other, INCONCLUSIVE: other}
    if not stored.certain:
        by_name = "an array is named as records: where samples stand in it, that is a leak"
        ends = {**run.verdicts, LEAK: f"{REACHABLE}: {by_name}"}
    return run.replace(
        doubts=tuple(d for d in run.doubts if not (stored.certain and d.startswith(NO_DATA))),
        applies=(*tried((row,), PLANNED), *run.applies),
        verdicts=run.verdicts if run.obstacles else ends,
    )


def _handed_on(x: Tensor, scalings: tuple[tuple[Tensor, Tensor], ...]) -> Iterator[Tensor]:
    """The samples as given, and after each scaler."""
    yield x
    for factor, shift in scalings:
        if factor.numel() in (1, x.shape[1]) and shift.numel() in (1, x.shape[1]):
            x = x * factor + shift
            yield x


def nearest(x: Tensor, records: Tensor) -> Tensor:
    """(n,) the largest difference to the nearest record over the sample's largest value; inf for none.

    Rows that agree have one place on any line: only neighbours on a random one are compared. Rounding is
    of either sign, so that places differ by its size times the length of the line.
    """
    line = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    at, order = torch.cat([part.to(x) @ line for part in records.split(CHUNK)]).sort()
    size = x.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    reach, place = 4 * ROUNDING * size * line.norm(), x @ line
    first, middle, last = torch.searchsorted(at, torch.stack([place - reach, place, place + reach]))
    first, last = first.clamp(min=middle - MOST_ALIKE), last.clamp(max=middle + MOST_ALIKE)
    found = torch.full((len(x),), torch.inf, dtype=x.dtype)
    for i in (first < last).nonzero().flatten().tolist():
        rows = records[order[first[i] : last[i]]].to(x)
        gap = (rows - x[i]).abs().amax(1).nan_to_num(torch.inf).min() / size[i]
        found[i] = gap if gap <= ROUNDING else torch.inf
    return found


def audit_records(
    stored: Stored,
    train: Dataset | None,
    control: Dataset | None,
    knowledge: Knowledge,
    settings: dict[str, Any],
    hashes: dict[str, str],
) -> AuditResult:
    """The audit of a file that is no network: what it stores outright, and nothing else to try."""
    row = stored.row(train, control)
    verdict = decide(None, (row,), assumed=unconfirmed((row,)))
    records = [one.records for one in stored.kept if one.records is not None]
    shape = _shape(records[0].shape[1], knowledge, train) if records else ()
    name = stored.model or "records"
    return AuditResult(
        subject=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict=verdict,
        checkpoint=Checkpoint({}, name, input_shape=shape),
        inspection=Inspection(name, shape, 0, (), 0, 0, "", None, None, NO_NETWORK, (), None),
        knowledge=knowledge,
        attacks=(row,),
        reconstructions=(_shown(records[0], shape, knowledge),) if records else (),
        certificate_of=NO_NETWORK,
        uniqueness_reason=NO_NETWORK,
        settings=settings,
        environment=environment(settings["device"]),
        hashes=hashes,
        limitations=limitations(verdict, None, knowledge)[:1],
        applies=tried((row,)),
        suite=SUITE,
        notes=(*stored.notes, stored.kept[0].finding.remedy),
    )


def _shape(width: int, knowledge: Knowledge, train: Dataset | None) -> tuple[int, ...]:
    """Of one record: as was granted, as the samples have it, or flat."""
    known = (knowledge.shape, None if train is None else train.shape)
    return next((tuple(s) for s in known if s and math.prod(s) == width), (width,))


def _shown(records: Tensor, shape: tuple[int, ...], knowledge: Knowledge) -> Reconstruction:
    """The first records as what came back."""
    x = records[:MOST_SHOWN].double().reshape(-1, *shape)
    ones, first = torch.ones(len(x), dtype=x.dtype), torch.arange(len(x))
    each, no_label = first.new_ones(len(x)), torch.zeros_like(ones)
    chosen = Selection(x, no_label, ones, each, each, ones, torch.zeros(len(x), 5), first)
    return Reconstruction.at_once(NAME, x, no_label, ones, knowledge, selection=chosen)
