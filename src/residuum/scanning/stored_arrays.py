"""Every array in a file that holds training records, or that may hold training records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from residuum.io.release import Release
from residuum.io.tree import walk
from residuum.scanning.cluster_rules import find_single_records
from residuum.scanning.finding import Finding
from residuum.scanning.onnx_rules import find_onnx_records, find_onnx_weights
from residuum.scanning.record_arrays import read_records
from residuum.scanning.sample_rules import find_samples
from residuum.scanning.stored_rules import StoredArray, find_stored
from residuum.scanning.survey import Survey, survey_release

RULES = (find_stored, find_single_records, find_samples)


@dataclass(frozen=True, eq=False)
class RecordArray:
    """An array of training records that a file stores verbatim.

    Attributes:
        finding: What the scan reports about the array.
        records: The records (N, d), or None if they cannot be read as numbers.
        certain: Whether the library that wrote the file stores records at this place. If not, only the name
            and the shape of the array suggest training records.
    """

    finding: Finding
    records: Tensor | None
    certain: bool


def records_in(release: Release) -> list[RecordArray]:
    """Return every array in a file whose rows are training records."""
    return [
        RecordArray(array.finding, read_records(array.value), array.is_certain)
        for array in find_stored_arrays(release, survey_release(release))
        if array.finding.severity == "high"
    ]


def find_stored_arrays(release: Release, survey: Survey) -> Iterator[StoredArray]:
    """Find every array in a file that holds training records, or that may hold training records.

    Args:
        release: The model file that was opened.
        survey: Facts about the model, such as the number of values of a sample.

    Yields:
        The arrays with their findings.
    """
    # The other rules judge an array by its name and shape. An ONNX graph also shows which are weights.
    decided_ids = find_onnx_weights(release)
    for array in find_onnx_records(release):
        decided_ids.add(id(array.value))
        yield array
    for place in walk(release.content):
        if id(place.value) in decided_ids:
            continue
        for rule in RULES:
            yield from rule(place, survey)
