"""Find records that a file stores: in attributes of estimators, in search trees, in tables, or by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from residuum.io.inert import Block, InertObject
from residuum.io.tree import Place, join_path
from residuum.scanning.finding import STORED, Finding
from residuum.scanning.record_arrays import FRAME, FRAME_PART, read_records, rows_of
from residuum.scanning.survey import LAYER_WEIGHTS, Survey

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
MEMORIES = re.compile(r"(^|[._])(memory_bank|queue)([._]|$)", re.IGNORECASE)
TREES = re.compile(r"(KDTree|BallTree)(32|64)?$")
FRAMES = re.compile(r"^(pandas|polars|pyarrow|PIL|datasets)\.")
_TABLES = {"DataFrame", "Series", "Table", "Image", "Dataset", "PngImageFile", "JpegImageFile"}
# Packages that explain predictions, and the attributes in which their objects store records for comparison.
EXPLAINERS = re.compile(r"^(shap|alibi|lime|captum|dice_ml|aix360|interpret)\.")
BACKGROUNDS = (
    *("data", "_data", "background", "background_data", "train_data", "d_train_data", "X_train"),
    *("training_data", "reference", "X_ref"),
)
NAMED = "the name of the array says that it holds training data"
KEEP_NONE = "Release an estimator that stores no records, or release only predictions."
DELETE_ARRAY = "Do not save this array with the model."


class StoredArray(NamedTuple):
    """An array in a file that holds training records, or that may hold training records.

    Attributes:
        finding: What the scan reports about the array.
        value: The array, table or search tree.
        is_certain: Whether the library that wrote the file stores records at this place.
    """

    finding: Finding
    value: Any
    is_certain: bool = True


def find_stored(place: Place, survey: Survey) -> Iterator[StoredArray]:
    """Find stored records: in attributes of estimators, in search trees, in tables, or by name.

    Args:
        place: A value in the model file, with its path.
        survey: Facts about the model, such as the number of values of a sample.

    Yields:
        The arrays with their findings.
    """
    value, rows, where, name = place.value, rows_of(place.value), place.path, place.name[:40]
    # The name of an array alone is weak evidence that it holds records. So we ignore names in optimizer state
    # and in averaged weights, and the weights of a layer whose path has such a name.
    is_weight = bool(LAYER_WEIGHTS.search(place.leaf)) or place.leaf == "bias"
    searched_path = where[-60:] if rows and not place.section and not is_weight else ""
    if isinstance(value, InertObject) and TREES.search(value.class_name) and rows:
        finding_title = f"records in the {value.class_name} of {place.owner}"
        reason = "the tree holds every training record that it was built from"
        yield StoredArray(
            Finding(STORED, "high", finding_title, where, reason, KEEP_NONE, count=rows), value
        )
    elif (
        isinstance(value, InertObject) and FRAMES.match(value.name) and value.class_name in _TABLES
    ):
        finding_title = f"a {value.class_name} of {value.name.split('.')[0]}"
        reason = "the file contains a table or picture of data"
        remedy = "Remove the data from the file. Save only the fitted numbers."
        records = read_records(value) if value.class_name == FRAME else None
        record_count = None if records is None else len(records)
        yield StoredArray(
            Finding(STORED, "high", finding_title, where, reason, remedy, count=record_count), value
        )
    elif isinstance(value, InertObject) and EXPLAINERS.match(value.name):
        yield from _find_backgrounds(place)
    elif rows and place.owner and place.name in RECORDS:
        owner_classes = RECORDS[place.name]
        if not owner_classes or place.owner in owner_classes:
            finding_title = f"training records in {place.owner}.{place.name}"
            reason = "the rows of this array are the training records that were passed to fit"
            finding = Finding(STORED, "high", finding_title, where, reason, KEEP_NONE, count=rows)
            yield StoredArray(finding, value)
    # A DataFrame has its own finding, so we report no finding for its columns.
    elif RECORD_NAMES.search(searched_path) and place.owner != FRAME_PART:
        finding_title = f"an array named {name}"
        finding = Finding(STORED, "high", finding_title, where, NAMED, DELETE_ARRAY, count=rows)
        yield StoredArray(finding, value, is_certain=False)
    elif MEMORIES.search(searched_path):
        reason = "memory banks and queues hold features of single records, or the records"
        remedy = "Save the memory only if predictions need it."
        finding_title = f"a memory of records named {name}"
        finding = Finding(STORED, "medium", finding_title, where, reason, remedy, count=rows)
        yield StoredArray(finding, value, is_certain=False)


def _find_backgrounds(place: Place) -> Iterator[StoredArray]:
    """Find the records that an object of an explanation package compares with."""
    explainer: InertObject = place.value
    for name in BACKGROUNDS:
        value = explainer.attributes.get(name)
        arrays = value if isinstance(value, list | tuple) else [value]
        for array in arrays:
            if isinstance(array, Block) and len(array.shape) >= 2 and array.numel:
                package = explainer.name.split(".")[0]
                finding_title = f"background records in {explainer.class_name} of {package}"
                reason = "the explainer compares every sample with these records"
                remedy = (
                    "Do not release the explainer, or give it a background of artificial records."
                )
                finding = Finding(
                    STORED,
                    "high",
                    finding_title,
                    join_path(place.path, name),
                    reason,
                    remedy,
                    count=array.shape[0],
                )
                yield StoredArray(finding, array)
