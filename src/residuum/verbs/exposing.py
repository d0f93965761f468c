"""``rs.exposure``: which records are at risk, told from weights and data without an attack.

The folder keeps finished stages in ``work/`` while a run lasts, and is completed by ``exposure.json``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from residuum.datasets.given import both
from residuum.errors import DataError, InputError
from residuum.evaluation.scoring import whole_pool
from residuum.io.checkpoints import as_network
from residuum.io.release import Release, open_release
from residuum.io.release_knowledge import with_release
from residuum.networks.network import Network
from residuum.records import Dataset, Exposure, Knowledge, Reconstruction, read_npz
from residuum.records.exposure import PublishedExposure
from residuum.records.published import published_form
from residuum.records.rundir import RunDir, digest, environment, write_atomic, write_json
from residuum.report.exposure import histogram_figure, top_figure
from residuum.risk.run import AUTO, TOP, Inserted, Part, Watcher, expose
from residuum.verbs.attacking import load_run, write_figures

SUMMARY, TABLE, RECORD = "exposure.json", "exposure.csv", "exposure.safetensors"
PICTURE, HISTOGRAM, WORK = "exposed.png", "histogram.png", "work"


class ExposureRun(RunDir):
    """An open directory of an exposure."""

    what, own, summary, asked = "an exposure", (SUMMARY, WORK), SUMMARY, f"{WORK}/request.json"

    @property
    def started(self) -> bool:
        """Whether a stage was finished."""
        return any((self.path / WORK).glob("*.safetensors"))

    def part(self, name: str, make: Callable[[], Part]) -> Part:
        """A stage that was finished before, or finished now; a damaged file is made again."""
        path = self.path / WORK / f"{name}.safetensors"
        found = Part.load_or_none(path)
        if found is None:
            found = make()
            found.save(path)
        return found

    def finish(self, found: Exposure, data: Dataset, request: dict[str, Any], device: str) -> None:
        """Table, pictures, record, and the summary, which completes the run."""
        write_atomic(self.path / TABLE, found.to_csv())
        pictures = {PICTURE: top_figure(found, data), HISTOGRAM: histogram_figure(found)}
        write_figures(self.path, pictures)
        found.save(self.path / RECORD)
        said = {**found.to_json(), "request": request, "environment": environment(device)}
        published_form(PublishedExposure).model_validate(
            said
        )  # a bug is noticed before it is written
        write_json(self.path / SUMMARY, said)
        shutil.rmtree(self.path / WORK, ignore_errors=True)


def exposure(
    model: Network | nn.Module | str | Path,
    data: Any,
    holdout: Any = None,
    *,
    knowledge: Knowledge | None = None,
    surface: str = AUTO,
    task: str = "auto",
    arch: str | None = None,
    groups: Sequence[str] = (),
    grouped_by: str = "",
    found: Reconstruction | str | Path | None = None,
    canaries: tuple[Dataset, Tensor] | str | Path | None = None,
    confidence: float = 0.95,
    delta: float = 0.0,
    top: int = TOP,
    device: str = "cpu",
    out: str | Path | None = None,
    watch: Watcher | None = None,
) -> Exposure:
    """Which records of ``data`` are at risk, from the weights and the data, without attacking.

    data: the training records as the network receives them: (x, y), a Dataset, a DataFrame, a
        DataLoader, or the path of an .npz, a .csv or a folder.
    holdout: likewise, records it never saw, at least 100, which give kinks and dual vectors their p-values.
    knowledge: a start (theta0) or a moment of the optimiser makes that the surface looked at,
        unless ``surface`` names another of weights, change and moment; what the file of the weights
        holds of them is granted.
    groups: a name per record, by default its class.
    found: an attack, or its folder, to show what it found beside.
    canaries: records of a coin each, with which were inserted (True) and which left out, or an .npz
        with x, y and inserted.
    confidence, delta: of the bound on epsilon that they give.
    top: records shown.
    out: folder to write, in which an interrupted run goes on.
    """
    if not 0.5 <= confidence < 1 or not 0 <= delta < 1 or top < 0:
        raise InputError(
            "Confidence lies in [0.5, 1), delta in [0, 1), and the number shown is not negative; got "
            f"{confidence}, {delta} and {top}.",
            "Use confidence=0.95, delta=1e-5.",
        )
    knowledge = knowledge or Knowledge()
    records, holdout = both(data, holdout)
    if records is None:
        raise InputError("Exposure needs the training records; got none.", "Pass data=(x, y).")
    data = records
    release = open_release(model) if isinstance(model, str | Path | Release) else None
    released = as_network(release or model, arch, shape=data.shape)
    if release is not None:
        knowledge = with_release(release, released, knowledge)
    attack = load_run(Path(found)) if isinstance(found, str | Path) else found
    candidates = None if attack is None else whole_pool(attack).x
    if isinstance(canaries, str | Path):
        canaries = read_canaries(canaries)
    inserted = None if canaries is None else Inserted(*canaries, confidence, delta)
    how: dict[str, Any] = {"surface": surface, "task": task, "top": top}
    request = {
        "version": version("residuum"),
        **how,
        "arch": released.arch,
        "grouped_by": grouped_by,
        "weights_sha256": digest(*released.theta.values()),
        "data_sha256": digest(data.x, data.y),
        "holdout_sha256": None if holdout is None else digest(holdout.x, holdout.y),
        "knowledge_sha256": knowledge.digest,
        "groups_sha256": digest(list(groups)),
        "found_sha256": None if candidates is None else digest(candidates),
        "canaries": None
        if inserted is None
        else [digest(inserted.data.x, inserted.data.y, inserted.inserted), confidence, delta],
    }
    with ExposureRun.open(out) if out is not None else nullcontext() as run:
        if run is not None:
            run.claim(request)
            kept = Exposure.load_or_none(run.path / RECORD) if run.complete else None
            if kept is not None:
                return kept
        how |= {"groups": groups, "grouped_by": grouped_by, "found": candidates}
        how |= {"inserted": inserted, "device": device, "store": run, "watch": watch}
        result = expose(released, data, holdout, knowledge, **how)
        if run is not None:
            run.finish(result, data, request, device)
    return result


def read_canaries(path: str | Path) -> tuple[Dataset, Tensor]:
    """An .npz with x, y and inserted: 1 for canaries in the training set, 0 for those left out."""
    data, arrays = Dataset.from_npz(path), read_npz(path)
    inserted = arrays.get("inserted")
    if inserted is None or inserted.shape != (len(data),) or set(np.unique(inserted)) - {0, 1}:
        raise DataError(
            f"A file of canaries needs an array 'inserted' of {len(data)} zeros and ones; {str(path)!r} "
            "has none.",
            "Save all canaries, those left out too: numpy.savez(path, x=..., y=..., inserted=...).",
        )
    return data, torch.from_numpy(inserted.astype(bool))


def read_groups(path: str | Path, column: str, n: int) -> tuple[str, ...]:
    """The names in array ``column`` of a data file, one per record."""
    arrays = read_npz(path)
    values = arrays.get(column)
    if values is None or values.shape != (n,):
        known = sorted(name for name, array in arrays.items() if array.shape == (n,))
        raise DataError(
            f"Groups are read from an array of {n} values; {str(path)!r} has no such {column!r}.",
            f"It has {', '.join(known) or 'none'}.",
        )
    return tuple(f"{v:g}" if values.dtype.kind in "fiub" else str(v) for v in values.tolist())
