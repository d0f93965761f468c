"""``rs.exposure``: rank records by their risk, from weights and data, without an attack.

During a run, the folder keeps finished stages in ``work/``. ``exposure.json`` is written last.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from residuum.datasets.given import read_train_and_holdout
from residuum.errors import DataError, InputError
from residuum.evaluation.scoring import all_candidates
from residuum.io.checkpoints import as_network
from residuum.io.release import Release, open_release
from residuum.io.release_knowledge import add_stored_knowledge
from residuum.networks.network import Network
from residuum.records import Dataset, Exposure, Knowledge, Reconstruction, read_npz
from residuum.records.exposure import PublishedExposure
from residuum.records.published import published_form
from residuum.records.rundir import RunDir, digest, environment, write_atomic, write_json
from residuum.report.exposure import histogram_figure, top_figure
from residuum.risk.run import Watcher, expose
from residuum.risk.stages import Canaries
from residuum.settings import ExposureRequest
from residuum.verbs.attacking import load_run, write_figures

SUMMARY, TABLE, RECORD = "exposure.json", "exposure.csv", "exposure.safetensors"
PICTURE, HISTOGRAM, WORK = "exposed.png", "histogram.png", "work"


class ExposureRun(RunDir):
    """The open folder of an exposure."""

    what, files, summary, request_file = (
        "an exposure",
        (SUMMARY, WORK),
        SUMMARY,
        f"{WORK}/request.json",
    )

    @property
    def has_work(self) -> bool:
        """True if a stage is finished."""
        return any((self.path / WORK).glob("*.safetensors"))

    def finish(self, result: Exposure, data: Dataset, request: dict[str, Any], device: str) -> None:
        """Write the table, the pictures, the record, and last the summary, which completes the run.

        Args:
            result: The exposure.
            data: The training records.
            request: The request of this run.
            device: Where it was computed.
        """
        write_atomic(self.path / TABLE, result.to_csv())
        pictures = {PICTURE: top_figure(result, data), HISTOGRAM: histogram_figure(result)}
        write_figures(self.path, pictures)
        result.save(self.path / RECORD)
        summary = {**result.to_json(), "request": request, "environment": environment(device)}
        published_form(PublishedExposure).model_validate(summary)  # catch a bug before writing
        write_json(self.path / SUMMARY, summary)
        shutil.rmtree(self.path / WORK, ignore_errors=True)


class ExposureOptions(TypedDict, total=False):
    """The names of :class:`ExposureRequest`, for editors and type checkers."""

    surface: str
    task: str
    arch: str | None
    grouped_by: str
    confidence: float
    delta: float
    top: int
    device: str


def exposure(
    model: Network | nn.Module | str | Path,
    data: Any,
    holdout: Any = None,
    *,
    knowledge: Knowledge | None = None,
    groups: Sequence[str] = (),
    reconstruction: Reconstruction | str | Path | None = None,
    canaries: tuple[Dataset, Tensor] | str | Path | None = None,
    out: str | Path | None = None,
    watch: Watcher | None = None,
    **options: Unpack[ExposureOptions],
) -> Exposure:
    """Rank the records of ``data`` by their risk of being recovered, without an attack.

    Args:
        model: The released network, or its file.
        data: The training records as the network receives them: (x, y), a Dataset, a DataFrame, a
            DataLoader, or the path of an .npz, a .csv or a folder.
        holdout: At least 100 records that the network never saw, in the same forms. They are needed for
            the p-values of kinks and dual vectors.
        knowledge: Initial weights (``theta0``) or optimizer state known to the attacker. If the file of
            the weights holds them too, they are added.
        groups: A name for every record, by default its class.
        reconstruction: The result of an attack, or its folder. Its nearest candidates are shown with the
            records.
        canaries: All canary records, and for each whether it was inserted into the training set (True) or
            left out, as a coin toss decided. Or an .npz with x, y and inserted.
        out: Folder to write. An interrupted run is continued there.
        watch: Receives the number of finished stages, the number of all stages, and the name of the stage.
        **options: Settings of :class:`ExposureRequest`, such as ``top=20``.

    Returns:
        The risk of every record, with the figures that it is computed from.

    Raises:
        InputError: If the training records are missing, or if the inputs do not fit each other.

    Example:
        >>> rs.exposure("model.safetensors", "train.npz", "test.npz").rows(10)
    """
    request = ExposureRequest(**options)
    data, holdout = read_train_and_holdout(data, holdout)
    if data is None:
        raise InputError("Exposure needs the training records; got none.", "Pass data=(x, y).")
    release = open_release(model) if isinstance(model, str | Path | Release) else None
    network = as_network(release or model, request.arch, shape=data.shape)
    knowledge = knowledge or Knowledge()
    if release is not None:
        knowledge = add_stored_knowledge(release, network, knowledge)
    if isinstance(reconstruction, str | Path):
        reconstruction = load_run(Path(reconstruction))
    candidates = None if reconstruction is None else all_candidates(reconstruction).x
    inserted = None
    if canaries is not None:
        samples = read_canaries(canaries) if isinstance(canaries, str | Path) else canaries
        inserted = Canaries(*samples, request.confidence, request.delta)
    settings = request.model_dump(include={"surface", "task", "top"})
    identity = {
        **settings,
        "version": version("residuum"),
        "arch": network.arch,
        "grouped_by": request.grouped_by,
        "weights_sha256": digest(*network.theta.values()),
        "data_sha256": digest(data.x, data.y),
        "holdout_sha256": None if holdout is None else digest(holdout.x, holdout.y),
        "knowledge_sha256": knowledge.digest,
        "groups_sha256": digest(list(groups)),
        "found_sha256": None if candidates is None else digest(candidates),
        "canaries": None if inserted is None else inserted.identity,
    }
    with ExposureRun.open(out) if out is not None else nullcontext() as run:
        if run is not None:
            run.begin(identity)
            finished = Exposure.load_or_none(run.path / RECORD) if run.is_complete else None
            if finished is not None:
                return finished
        result = expose(
            network,
            data,
            holdout,
            knowledge,
            **settings,
            groups=groups,
            grouped_by=request.grouped_by,
            candidates=candidates,
            canaries=inserted,
            device=request.device,
            work=None if run is None else run.path / WORK,
            watch=watch,
        )
        if run is not None:
            run.finish(result, data, identity, request.device)
    return result


def read_canaries(path: str | Path) -> tuple[Dataset, Tensor]:
    """Read canaries from an .npz.

    Args:
        path: File with x, y and inserted: 1 if the canary is in the training set, 0 if it was left out.

    Returns:
        The canaries, and whether each was inserted.

    Raises:
        DataError: If ``inserted`` is missing or holds other numbers.
    """
    data, arrays = Dataset.from_npz(path), read_npz(path)
    inserted = arrays.get("inserted")
    if inserted is None or inserted.shape != (len(data),) or set(np.unique(inserted)) - {0, 1}:
        raise DataError(
            f"A file of canaries needs an array 'inserted' of {len(data)} zeros and ones; {str(path)!r} "
            "has none.",
            "Save all canaries, also those that were left out: numpy.savez(path, x=..., y=..., "
            "inserted=...).",
        )
    return data, torch.from_numpy(inserted.astype(bool))


def read_groups(path: str | Path, column: str, n: int) -> tuple[str, ...]:
    """Read the group of every record from a data file.

    Args:
        path: The data file.
        column: Name of the array with the groups.
        n: Number of records.

    Returns:
        The name of the group of every record.

    Raises:
        DataError: If the file has no such array.
    """
    arrays = read_npz(path)
    values = arrays.get(column)
    if values is None or values.shape != (n,):
        columns = sorted(name for name, array in arrays.items() if array.shape == (n,))
        raise DataError(
            f"Groups are read from an array of {n} values; {str(path)!r} has no such {column!r}.",
            f"Choose one of its arrays of that length: {', '.join(columns) or 'it has none'}.",
        )
    return tuple(f"{v:g}" if values.dtype.kind in "fiub" else str(v) for v in values.tolist())
