"""Find records that a file stores: in attributes of estimators, in search trees, in tables, or by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from residuum.io.inert import InertObject
from residuum.io.release import Release
from residuum.io.tree import Place, walk
from residuum.scanning.finding import STORED, Finding
from residuum.scanning.record_arrays import FRAME, FRAME_PART, read_records, rows_of

# Attributes of scikit-learn estimators that hold training records, each with the classes in which it holds
# records. An empty tuple stands for all classes.
RECORDS: dict[str, tuple[str, ...]] = {
    "_fit_X": (),
    "support_vectors_": (),
    "X_train_": (),
    "X_fit_": (),
    "training_data_": (),
    "_raw_data": (),
    "X_": ("LabelPropagation", "LabelSpreading"),
    "components_": ("DBSCAN", "Nystroem"),
    "cluster_centers_": ("AffinityPropagation",),
}
RECORD_NAMES = re.compile(
    r"(^|[._])(x_?train|train_?x|train(ing)?_(data|images|samples|inputs|set)|raw_data|"
    r"replay_buffer|exemplars?|support_set|dataset)([._]|$)",
    re.IGNORECASE,
)
PROTOTYPES = re.compile(r"(^|[._])(prototypes?|memory_bank|queue)([._]|$)", re.IGNORECASE)
TREES = re.compile(r"(KDTree|BallTree)(32|64)?$")
FRAMES = re.compile(r"^(pandas|polars|pyarrow|PIL|datasets)\.")
_TABLES = {"DataFrame", "Series", "Table", "Image", "Dataset", "PngImageFile", "JpegImageFile"}
NAMED = "the name of the array says that it holds training data"
KEEP_NONE = "Release an estimator that stores no records, or release only predictions."


@dataclass(frozen=True, eq=False)
class RecordArray:
    """An array of training records that a file stores verbatim.

    Attributes:
        finding: What the scan reports about the array.
        records: The records (N, d), or None if they cannot be read as numbers.
        certain: Whether the library that wrote the file stores records at this place. If not, only the name
            of the array suggests training records.
    """

    finding: Finding
    records: Tensor | None
    certain: bool


def records_in(release: Release) -> list[RecordArray]:
    """Return every array in a file whose rows are training records."""
    return [
        RecordArray(finding, read_records(place.value), finding.reason != NAMED)
        for place in walk(release.content)
        for finding in find_stored(place)
        if finding.severity == "high"
    ]


def find_stored(place: Place) -> Iterator[Finding]:
    """Find stored records: in attributes of estimators, in search trees, in tables, or by name."""
    value, rows, where, name = place.value, rows_of(place.value), place.path, place.name[:40]
    # The name of an array alone is weak evidence that it holds records. So we ignore names in optimizer state
    # and in averaged weights.
    searched_path = where[-60:] if rows and not place.section else ""
    if isinstance(value, InertObject) and TREES.search(value.class_name) and rows:
        what = f"records in the {value.class_name} of {place.owner}"
        reason = "the tree holds every training record that it was built from"
        yield Finding(STORED, "high", what, where, reason, KEEP_NONE, count=rows)
    elif (
        isinstance(value, InertObject) and FRAMES.match(value.name) and value.class_name in _TABLES
    ):
        what = f"a {value.class_name} of {value.name.split('.')[0]}"
        reason = "the file contains a table or picture of data"
        remedy = "Remove the data from the file. Save only the fitted numbers."
        records = read_records(value) if value.class_name == FRAME else None
        count = None if records is None else len(records)
        yield Finding(STORED, "high", what, where, reason, remedy, count=count)
    elif rows and place.owner and place.name in RECORDS:
        owner_classes = RECORDS[place.name]
        if not owner_classes or place.owner in owner_classes:
            what = f"training records in {place.owner}.{place.name}"
            reason = "the rows of this array are the training records that were passed to fit"
            yield Finding(STORED, "high", what, where, reason, KEEP_NONE, count=rows)
    # A DataFrame has its own finding, so we report no finding for its columns.
    elif RECORD_NAMES.search(searched_path) and place.owner != FRAME_PART:
        what, remedy = f"an array named {name}", "Do not save this array with the model."
        yield Finding(STORED, "high", what, where, NAMED, remedy, count=rows)
    elif PROTOTYPES.search(searched_path):
        reason = "prototypes and memory banks are records, or features of records"
        remedy = "Save prototypes only if predictions need them."
        yield Finding(STORED, "medium", f"prototypes in {name}", where, reason, remedy, count=rows)
