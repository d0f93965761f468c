"""``rs.exposure``: rank training records by their risk, from weights and data, without an attack.

During the computation, finished stages are kept in the folder ``work/``. ``exposure.json`` is written last.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from residuum.datasets.columns import check_columns, fit_columns
from residuum.datasets.given import locate_samples, read_train_and_holdout
from residuum.errors import DataError, InputError, require_known
from residuum.evaluation.adapting import adapt_samples
from residuum.evaluation.scoring import all_candidates
from residuum.io.attacker_knowledge import build_knowledge
from residuum.io.checkpoints import as_network
from residuum.io.loading import load_network
from residuum.io.release import Release, open_release
from residuum.io.release_knowledge import add_stored_knowledge
from residuum.networks.network import Network
from residuum.networks.probing import first_layer_inputs
from residuum.records import Dataset, Exposure, Knowledge, Reconstruction, read_npz
from residuum.records.exposure import PublishedExposure
from residuum.records.published import published_form
from residuum.records.rundir import RunDir, digest, environment, write_atomic, write_json
from residuum.report.exposure import histogram_figure, top_figure
from residuum.risk.attributes import find_sensitive_columns, measure_table
from residuum.risk.run import Watcher, expose
from residuum.risk.stages import Canaries
from residuum.settings import ExposureRequest
from residuum.verbs.attacking import load_run, write_figures

SUMMARY, TABLE, RECORD = "exposure.json", "exposure.csv", "exposure.safetensors"
PICTURE, HISTOGRAM, WORK = "exposed.png", "histogram.png", "work"


class ExposureRun(RunDir):
    """The folder of a risk ranking of training records, opened for writing."""

    what, files, summary, request_file = (
        "an exposure",
        (SUMMARY, WORK),
        SUMMARY,
        f"{WORK}/request.json",
    )

    @property
    def has_work(self) -> bool:
        """Whether at least one step of the computation is finished."""
        return any((self.path / WORK).glob("*.safetensors"))

    def finish(self, result: Exposure, data: Dataset, request: dict[str, Any], device: str) -> None:
        """Write the table, the pictures and the result of a risk ranking, the summary last.

        Args:
            result: The risk of every record.
            data: The training records.
            request: Values that identify this computation, with the hashes of its inputs.
            device: Device on which the result was computed.
        """
        write_atomic(self.path / TABLE, result.to_csv())
        pictures = {PICTURE: top_figure(result, data), HISTOGRAM: histogram_figure(result)}
        write_figures(self.path, pictures)
        result.save(self.path / RECORD)
        result_summary = {
            **result.to_json(),
            "request": request,
            "environment": environment(device),
        }
        published_form(PublishedExposure).model_validate(
            result_summary
        )  # refuse to write a summary of a wrong form
        write_json(self.path / SUMMARY, result_summary)
        shutil.rmtree(self.path / WORK, ignore_errors=True)


class ExposureOptions(TypedDict, total=False):
    """Names and types of the fields of :class:`ExposureRequest`, for editors and type checkers."""

    label: str
    drop: Sequence[str]
    sensitive: Sequence[str]
    surface: str
    task: str
    arch: str | None
    model_code: str | None
    grouped_by: str
    confidence: float
    delta: float
    attributes: bool
    top: int
    device: str


def exposure(
    model: Network | nn.Module | Release | str | Path,
    data: Any,
    holdout: Any = None,
    *,
    knowledge: Knowledge | Mapping[str, Any] | None = None,
    groups: Sequence[str] = (),
    reconstruction: Reconstruction | str | Path | None = None,
    canaries: tuple[Dataset, Tensor] | str | Path | None = None,
    out: str | Path | None = None,
    base: str | Path | None = None,
    trust_code: bool = False,
    watch: Watcher | None = None,
    **options: Unpack[ExposureOptions],
) -> Exposure:
    """Rank training records by their risk of being recovered, without an attack.

    Args:
        model: The released network, or the file of its weights, or this file as it was opened.
        data: The training records as the network receives them: (x, y), a Dataset, a DataFrame, a
            DataLoader, or the path of an .npz, a table such as a .csv, or a folder.
        holdout: At least 100 records that the network never saw, in a form that is also allowed for ``data``.
            The p-values of the tests need these records.
        knowledge: Initial weights (``theta0``) or optimizer state known to the attacker. Initial weights or
            an optimizer state in the file of the network are added. Or, for a file, a dictionary of facts as
            on the command line, such as ``{"init": "init.pt"}``.
        groups: Name of the group of every record. By default the group of a record is its value in the column
            ``grouped_by`` of a table, or else its class.
        reconstruction: The result of an attack, or the folder of the attack. The candidates of the attack
            that are nearest to a record are shown with the record.
        canaries: Records of which a random half was inserted into the training set. Pass all canaries, and
            for each canary True if it was inserted. Or pass an .npz with x, y and inserted.
        out: Folder to write. An interrupted computation in this folder is continued.
        base: File of the weights before fine-tuning, if ``model`` is the file of an adapter (LoRA).
        trust_code: Allow running the code that the setting ``model_code`` names.
        watch: Function that receives the number of finished stages, the number of all stages, and the name
            of the current stage.
        **options: Settings of :class:`ExposureRequest`, such as ``top=20`` or ``drop=("patient_id",)``.

    Returns:
        The risk of every record, with the measurements that the risk is computed from.

    Raises:
        InputError: If training records are missing, if held-out records are missing for a test of attributes,
            or if the inputs do not fit each other.

    Example:
        >>> rs.exposure("model.safetensors", "train.npz", "test.npz").rows(10)
    """
    request = ExposureRequest(**options)
    check_attribute_settings(request)
    data_path = locate_samples(data, "data") if isinstance(data, str | Path) else None
    data, holdout = read_train_and_holdout(data, holdout, request.label, request.drop)
    if data is None:
        raise InputError(
            "To rank training records by their risk, the training records are needed; got none.",
            "Pass data=(x, y).",
        )
    if not groups and request.grouped_by and (data_path is not None or data.table is not None):
        groups = read_groups(data, request.grouped_by, data_path)
    if request.attributes and holdout is None:
        raise InputError(
            "A test of attributes needs records that the network never saw; got none.",
            "Pass held-out records (--holdout).",
        )
    data, holdout = fit_columns(data, holdout, first_layer_inputs(model))
    release = open_release(model) if isinstance(model, str | Path | Release) else None
    if release is None:
        network = as_network(model, request.arch, shape=data.shape)
    else:
        network = load_network(
            release,
            arch=request.arch,
            model=request.model_code,
            trust_code=trust_code,
            shape=data.shape,
            base=None if base is None else str(base),
        )
    data, holdout = fit_columns(data, holdout, network.architecture.inputs)
    check_columns(data, holdout, network.architecture.inputs)
    if not isinstance(knowledge, Knowledge):
        attacker_facts = {**(knowledge or {}), "base": base}
        knowledge = (
            Knowledge() if release is None else build_knowledge(release, network, **attacker_facts)
        )
    elif release is not None:
        knowledge = add_stored_knowledge(release, network, knowledge)
    data, holdout = adapt_samples(network, data, holdout, knowledge, request.task)
    assert data is not None
    find_sensitive_columns(request.sensitive, data)  # refuse wrong names before the computation
    if isinstance(reconstruction, str | Path):
        reconstruction = load_run(Path(reconstruction))
    candidates = None if reconstruction is None else all_candidates(reconstruction).x
    canary_test = None
    if canaries is not None:
        canary_records = read_canaries(canaries) if isinstance(canaries, str | Path) else canaries
        canary_test = Canaries(*canary_records, request.confidence, request.delta)
    settings = request.model_dump(include={"surface", "task", "top"})
    run_identity = {
        **settings,
        "attributes": request.attributes,
        "version": version("residuum"),
        "arch": network.arch,
        "grouped_by": request.grouped_by,
        "sensitive": list(request.sensitive),
        "weights_sha256": digest(*network.theta.values()),
        "data_sha256": digest(data.x, data.y),
        "holdout_sha256": None if holdout is None else digest(holdout.x, holdout.y),
        "knowledge_sha256": knowledge.digest,
        "groups_sha256": digest(list(groups)),
        "found_sha256": None if candidates is None else digest(candidates),
        "canaries": None if canary_test is None else canary_test.identity,
    }
    with ExposureRun.open(out) if out is not None else nullcontext() as run:
        if run is not None:
            run.begin(run_identity)
            finished_result = Exposure.load_or_none(run.path / RECORD) if run.is_complete else None
            if finished_result is not None:
                return finished_result
        record_risks = expose(
            network,
            data,
            holdout,
            knowledge,
            **settings,
            groups=groups,
            grouped_by=request.grouped_by,
            candidates=candidates,
            canaries=canary_test,
            device=request.device,
            work=None if run is None else run.path / WORK,
            watch=watch,
        )
        record_risks = record_risks.replace(notes=(*record_risks.notes, *data.notes))
        if request.attributes:
            assert holdout is not None
            test = measure_table(network, data, holdout, sensitive=request.sensitive)
            record_risks = record_risks.replace(attributes=test)
        if run is not None:
            run.finish(record_risks, data, run_identity, request.device)
    return record_risks


def check_attribute_settings(request: ExposureRequest) -> None:
    """Check that sensitive columns are passed only with the test that uses them.

    Args:
        request: The settings.

    Raises:
        InputError: If sensitive columns are passed without the test of attributes.
    """
    if request.sensitive and not request.attributes:
        raise InputError(
            "Sensitive columns are used only by the test of attributes; this test was not requested.",
            "Pass --attributes.",
        )


def read_canaries(path: str | Path) -> tuple[Dataset, Tensor]:
    """Read canaries, which are records inserted into the training set at random, from an .npz.

    Args:
        path: File with the arrays x, y and inserted. The array ``inserted`` is 1 for a canary in the
            training set, and 0 for a canary that was left out.

    Returns:
        All canaries, and for each whether it was inserted into the training set.

    Raises:
        DataError: If the array ``inserted`` is missing or holds numbers other than 0 and 1.
    """
    data, arrays = Dataset.from_npz(path), read_npz(path)
    inserted = arrays.get("inserted")
    if inserted is None or inserted.shape != (len(data),) or set(np.unique(inserted)) - {0, 1}:
        raise DataError(
            f"A file of canaries (test records) needs an array 'inserted' of {len(data)} zeros and ones, "
            f"which says which canaries were used for training; {str(path)!r} has no such array.",
            "Save all canaries, including those that were left out: numpy.savez(path, x=..., y=..., "
            "inserted=...).",
        )
    return data, torch.from_numpy(inserted.astype(bool))


def read_groups(data: Dataset, column: str, path: Path | None = None) -> tuple[str, ...]:
    """Return the group of every record, from a column of its table or from an array of its file.

    Args:
        data: The records.
        column: Name of the column or array with the groups.
        path: The .npz from which the records were read, if they were not read from a table.

    Returns:
        The name of the group of every record.

    Raises:
        DataError: If there is no such column or array.
    """
    if data.table is not None:
        require_known(column, data.table.columns, f"{data.name!r} has no column", DataError)
        values = data.table.columns[column]
        return tuple(f"{v:g}" for v in values.tolist()) if isinstance(values, Tensor) else values
    assert path is not None
    arrays, n = read_npz(path), len(data)
    group_names = arrays.get(column)
    if group_names is None or group_names.shape != (n,):
        possible_columns = sorted(name for name, array in arrays.items() if array.shape == (n,))
        raise DataError(
            f"The names of the groups must be an array of {n} values, one for each record; the file "
            f"{str(path)!r} has no such array {column!r}.",
            f"Pass the name of an array of this length: "
            f"{', '.join(possible_columns) or 'the file has none'}.",
        )
    return tuple(
        f"{v:g}" if group_names.dtype.kind in "fiub" else str(v) for v in group_names.tolist()
    )
