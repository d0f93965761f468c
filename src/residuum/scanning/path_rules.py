"""Find names of files and folders, which tell what a model was trained on."""

from __future__ import annotations

import re
from collections.abc import Iterator

from residuum.io.tree import Place
from residuum.scanning.finding import PATHS, Finding

PATH = re.compile(
    r"^(~|\.{0,2}/|[A-Za-z]:[\\/]|\\\\|s3://|gs://|hdfs://|abfss?://|file://).*[\w-]{2}|"
    r"^[\w ./\\-]+\.(csv|tsv|jsonl?|npz|npy|parquet|txt|jpe?g|png|dcm|wav|mp3|h5|hdf5|tfrecord|arrow|xlsx?"
    r"|sqlite|db)$",
    re.IGNORECASE,
)


def find_paths(place: Place) -> Iterator[Finding]:
    """Find texts that look like file names, except the names of base models and architecture strings."""
    text = place.value
    if isinstance(text, str) and 4 <= len(text) <= 1000 and PATH.match(text):
        if place.name in ("base_model_name_or_path", "architecture"):
            return
        example = repr(text if len(text) <= 40 else f"{text[:18]}...{text[-18:]}")
        reason = f"names of folders and files such as {example} tell what the model was trained on"
        remedy = "Remove the names before release: residuum strip FILE --out CLEAN."
        yield Finding(PATHS, "medium", "names of files", place.path, reason, remedy)
