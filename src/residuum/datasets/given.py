"""Read the user's own samples from a file, a folder or a Python object, and return them as a Dataset.

    .npz            x and y, or x_train, y_train, x_test and y_test for training and held-out samples
    .csv            a header with column names, then one row per sample. The label is the column named label,
                    target, class or y. If there is no such column, the label is the last column. A column
                    named id, or with a name that ends in _id, holds record IDs if all its values differ.
                    Reports show the record IDs, but record IDs are not inputs of the network. A column name
                    may end with a unit in brackets, such as "age [years]"
    folder          images in CLASS/*.png, or in train/CLASS/*.png and test/CLASS/*.png. The output folder of
                    `residuum train` is supported too
    Python object   (x, y), a DataFrame, a TensorDataset, a DataLoader, any object with a length and items

The attribute ``notes`` of the returned dataset lists how the data was converted.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residuum.datasets.files import folder
from residuum.datasets.selection import Pool, Request
from residuum.errors import DataError, UnsafeFileError
from residuum.records import Dataset, read_npz
from residuum.records.rundir import digest, sha256

LABELS = ("label", "target", "class", "y")  # column names that mark the labels of a table
# Matches column names such as id, patient_id and Record ID.
ID_COLUMN = re.compile(r"(?:.*[_ ])?ids?", re.IGNORECASE)
MAX_TABLE = 256 << 20  # largest .csv file in bytes
UNIT = re.compile(r"\s*[\[(]([^\])]*)[\])]\s*$")
# The output folder of ``residuum train`` has a subfolder ``private``. These are the names of the files in
# this subfolder that hold the training samples and the held-out samples.
PRIVATE = {"data": "train.npz", "holdout": "holdout.npz"}
# Arrays that a data file may hold separately for training and held-out samples, such as x_train.
SPLIT_ARRAYS = ("x", "y", "id", "text")
KINDS = (
    "(x, y), a Dataset, a DataFrame, a DataLoader, a dataset with items, or the path of an .npz, a .csv "
    "or a folder"
)


def read_samples(path: str | Path) -> tuple[Dataset, Dataset | None]:
    """Read training samples, and held-out samples (or None), from a file or folder."""
    source_path = Path(path).expanduser()
    if source_path.is_dir():
        folder_images = folder(Request(), source_path)
        test_images = folder_images.test
        holdout = None if test_images is None else _convert_images(test_images)
        return _convert_images(folder_images), holdout
    if source_path.suffix.lower() == ".csv":
        return read_csv(source_path), None
    arrays = read_npz(source_path) if source_path.is_file() else {}
    if "x" in arrays or "x_train" not in arrays:
        return Dataset.from_npz(source_path), None
    # Arrays without one of these prefixes, such as the names of the classes, belong to training and test set.
    split_prefixes = tuple(f"{name}_" for name in SPLIT_ARRAYS)
    shared_arrays = {
        name: array for name, array in arrays.items() if not name.startswith(split_prefixes)
    }

    def read_set(suffix: str) -> Dataset:
        array_names = [name for name in SPLIT_ARRAYS if f"{name}_{suffix}" in arrays]
        split_arrays = {name: arrays[f"{name}_{suffix}"] for name in array_names}
        if "y" not in split_arrays:
            raise DataError(
                f"A data file with the array 'x_{suffix}' must have 'y_{suffix}' too; {str(path)!r} has only "
                f"{sorted(arrays)}.",
                f"Save the labels as 'y_{suffix}'.",
            )
        return Dataset.from_arrays({**shared_arrays, **split_arrays}, source_path)

    return read_set("train"), read_set("test") if "x_test" in arrays else None


def read_train_and_holdout(data: Any, holdout: Any) -> tuple[Dataset | None, Dataset | None]:
    """Read training samples and held-out samples.

    Args:
        data: Training samples in any supported form. A file or folder may also contain held-out samples.
        holdout: Held-out samples in any supported form. They replace the held-out samples in ``data``.

    Returns:
        Training samples, or None if there are none, and held-out samples, or None if there are none.
    """
    train_samples = included_holdout = separate_holdout = None
    if isinstance(data, str | Path):
        train_samples, included_holdout = read_samples(locate_samples(data, "data"))
        holdout_path = locate_samples(data, "holdout")
        if included_holdout is None and holdout_path != locate_samples(data, "data"):
            included_holdout = read_samples(holdout_path)[0] if holdout_path.is_file() else None
    elif data is not None:
        train_samples = as_dataset(data, "data")
    if isinstance(holdout, str | Path):
        first_set, second_set = read_samples(locate_samples(holdout, "holdout"))
        separate_holdout = first_set if second_set is None else second_set
    elif holdout is not None:
        separate_holdout = as_dataset(holdout, "holdout")
    return train_samples, included_holdout if separate_holdout is None else separate_holdout


def locate_samples(path: str | Path, name: str) -> Path:
    """Return the path from which to read samples.

    The output folder of ``residuum train`` holds its samples in files of its subfolder ``private``. Any other
    path is returned unchanged.

    Args:
        path: A file or folder of samples, or the output folder of ``residuum train``.
        name: "data" for training samples or "holdout" for held-out samples.

    Returns:
        The path of the samples.
    """
    source_path = Path(path).expanduser()
    return (
        source_path / "private" / PRIVATE[name]
        if (source_path / "private").is_dir()
        else source_path
    )


def hash_path(path: str | Path) -> str:
    """Return the SHA-256 hash of a file, or of the names and contents of all files in a folder."""
    source_path = Path(path).expanduser()
    if not source_path.is_dir():
        return sha256(source_path)
    files = sorted(file for file in source_path.rglob("*") if file.is_file())
    return digest([[file.relative_to(source_path).as_posix(), sha256(file)] for file in files])


def as_dataset(samples: Any, name: str) -> Dataset:
    """Convert samples in any supported form to a dataset.

    Args:
        samples: The samples. If the samples have no labels, all labels are set to zero.
        name: Name of the dataset, which error messages show.

    Returns:
        The dataset.
    """
    if isinstance(samples, Dataset):
        return samples
    if isinstance(samples, str | Path):
        return read_samples(samples)[0]
    x, y = samples if isinstance(samples, tuple) and len(samples) == 2 else (samples, None)
    if hasattr(x, "columns") and hasattr(x, "to_numpy"):  # a DataFrame of any library
        return _read_frame(x, y, name)
    if y is None and not hasattr(x, "__array__") and not isinstance(x, Tensor | list | tuple):
        return _read_items(x, name)
    return _read_arrays(x, y, name)


def _read_arrays(x: Any, y: Any, name: str, **fields: Any) -> Dataset:
    try:
        x = torch.as_tensor(x)
        y = torch.zeros(len(x), dtype=torch.long) if y is None else torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(*_explain_unknown(name, x)) from problem
    x = x.detach().cpu()
    x = x if x.is_floating_point() else x.double()
    if x.ndim < 2 or not torch.isfinite(x).all():
        raise DataError(
            f"{name!r} must be an array of finite numbers with one row per sample; got shape "
            f"{tuple(x.shape)}.",
            "Pass the preprocessed samples that are the inputs of the network.",
        )
    return Dataset(x, y.detach().cpu(), name=name, **fields)


def _explain_unknown(name: str, value: Any) -> tuple[str, str]:
    """Return the error message and the advice to the user if the form of the samples is not supported."""
    message = f"{name!r} must be {KINDS}; got {type(value).__name__}."
    return message, f"Pass {name}=(x, y)."


def _read_items(samples: Any, name: str) -> Dataset:
    """Read all samples of a dataset with items (x, y), or of a DataLoader, in the order of the dataset."""
    is_loader = hasattr(samples, "batch_size")
    dataset = getattr(samples, "dataset", samples) if is_loader else samples
    if hasattr(dataset, "tensors") and len(dataset.tensors) in (1, 2):  # TensorDataset
        x, y = (*dataset.tensors, None)[:2]
        return _read_arrays(x, y, name)
    try:
        items = [dataset[i] for i in range(len(dataset))]
    except (TypeError, KeyError, NotImplementedError, AttributeError):
        try:
            items = list(dataset)
        except TypeError as problem:
            raise DataError(*_explain_unknown(name, samples)) from problem
    samples_and_labels = [
        item if isinstance(item, tuple | list) and len(item) == 2 else (item, None)
        for item in items
    ]
    if not samples_and_labels:
        raise DataError(
            f"A dataset must have at least one sample; {name!r} is empty.", "Pass more samples."
        )
    try:
        x = torch.stack([torch.as_tensor(np.asarray(sample)) for sample, _ in samples_and_labels])
        labels = [label for _, label in samples_and_labels]
        has_labels = labels[0] is not None
        y = torch.stack([torch.as_tensor(label) for label in labels]) if has_labels else None
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(
            f"Items of {name!r} must be pairs (x, y), and every x must be an array of the same shape; got x "
            f"of type {type(samples_and_labels[0][0]).__name__} ({str(problem)[:80]}).",
            "Apply the transforms that the training used, including ToTensor.",
        ) from problem
    classes = tuple(map(str, getattr(dataset, "classes", ())))
    return _read_arrays(x, y, name, classes=classes)


def _read_frame(frame: Any, y: Any, name: str) -> Dataset:
    """Read a DataFrame with labels ``y``. If ``y`` is None, a column of the DataFrame holds the labels."""
    values_by_column = {str(column): np.asarray(frame[column]) for column in frame.columns}
    return read_columns(
        values_by_column if y is None else {**values_by_column, "label": np.asarray(y)}, name
    )


def read_csv(path: Path) -> Dataset:
    """Read a .csv table whose first line names the columns.

    Args:
        path: A .csv file.

    Returns:
        The dataset.

    Raises:
        DataError: If the file is missing or is not a table with a header.
        UnsafeFileError: If the file is too large.
    """
    if not path.is_file():
        raise DataError(f"No data file at {str(path)!r}.", "Check the path.")
    if (size := path.stat().st_size) > MAX_TABLE:
        raise UnsafeFileError(
            f"A table must have at most {MAX_TABLE} bytes; {str(path)!r} has {size}.",
            "Save it with numpy.savez(path, x=..., y=...).",
        )
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            names, *rows = [row for row in csv.reader(stream) if row]
    except (ValueError, UnicodeDecodeError, csv.Error) as problem:
        raise DataError(
            f"{str(path)!r} must be a .csv table in UTF-8 with a header; reading the file failed.",
            "Save the table with a header and one row per sample.",
        ) from problem
    row_lengths = {len(row) for row in rows}
    if not rows or row_lengths != {len(names)} or len(names) < 2:
        raise DataError(
            "Every row of a table must have as many values as the header has names, at least two; "
            f"{str(path)!r} has {len(names)} names and rows with {sorted(row_lengths) or 'no'} values.",
            "Save one row per sample, with the label in a separate column.",
        )
    if _is_numeric(np.array(names)):
        raise DataError(
            f"The first line of {str(path)!r} must name the columns; it holds numbers.",
            "Add a header, such as age,height,label.",
        )
    columns = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    if len(columns) < len(names):
        raise DataError(
            f"All columns must have different names; {str(path)!r} has two columns with the same name.",
            "Rename one of the two columns.",
        )
    return read_columns(columns, path.stem)


def read_columns(columns: dict[str, np.ndarray], name: str) -> Dataset:
    """Make a dataset from the named columns of a table.

    The label is the column whose name comes first in ``LABELS``. If no column has such a name, the label is
    the last column. Units in brackets after a column name are stored, so that reports can show them. Only the
    label may be text, because it is not known how the training encoded other text as numbers.

    Args:
        columns: Values by the name of the column.
        name: Name of the dataset.

    Returns:
        The dataset.

    Raises:
        DataError: If a column other than the label is not numeric or has missing values.
    """
    column_by_lower_name = {column.strip().lower(): column for column in columns}
    label_columns = (
        column_by_lower_name[column] for column in LABELS if column in column_by_lower_name
    )
    label_column = next(label_columns, list(columns)[-1])
    id_columns = [c for c in columns if c != label_column and _identifies_rows(c, columns[c])][:1]
    features = [column for column in columns if column not in (label_column, *id_columns)]
    if not features:
        raise DataError(
            f"A table must have at least one column in addition to the label; {name!r} has none.",
            "Add the columns that are inputs of the network.",
        )
    text_columns = [column for column in features if not _is_numeric(columns[column])]
    if text_columns:
        raise DataError(
            f"All columns except the label must hold numbers; {text_columns[:5]} of {name!r} hold text.",
            "Encode these columns in the same way as for the training, or remove these columns.",
        )
    x = torch.from_numpy(np.stack([columns[column].astype(np.float64) for column in features], 1))
    if not torch.isfinite(x).all():
        raise DataError(
            f"A table must not have missing or infinite values; {name!r} has some.",
            "Fill in these values, or remove their rows.",
        )
    y, classes = convert_labels(columns[label_column])
    unit_matches = [UNIT.search(feature) for feature in features]
    units = tuple(match[1].strip() if match else "" for match in unit_matches)
    feature_names = tuple(UNIT.sub("", feature).strip() for feature in features)
    notes = [f"the column {label_column!r} of {name!r} is the label"]
    if id_columns:
        id_description = "holds record IDs and is not an input of the network"
        notes.append(f"the column {id_columns[0]!r} of {name!r} {id_description}")
    record_ids = tuple(map(str, columns[id_columns[0]])) if id_columns else ()
    units = units if any(units) else ()
    dataset = Dataset(x, y, name=name, classes=classes, features=feature_names, units=units)
    return dataset.replace(notes=tuple(notes), record_ids=record_ids)


def _identifies_rows(name: str, values: np.ndarray) -> bool:
    """Return True if a column is named like an ID and has a different value in every row."""
    values_as_text = values.astype(str)
    return bool(ID_COLUMN.fullmatch(name.strip())) and len(np.unique(values_as_text)) == len(
        values_as_text
    )


def convert_labels(values: np.ndarray) -> tuple[Tensor, tuple[str, ...]]:
    """Convert a column of labels: whole numbers and text become classes, other numbers become targets."""
    if _is_numeric(values):
        numeric_labels = values.astype(np.float64)
        has_integers = np.array_equal(numeric_labels, np.round(numeric_labels))
        return torch.from_numpy(
            numeric_labels.astype(np.int64) if has_integers else numeric_labels
        ), ()
    classes, indices = np.unique(values.astype(str), return_inverse=True)
    return torch.from_numpy(indices.astype(np.int64)), tuple(map(str, classes))


def _is_numeric(values: np.ndarray) -> bool:
    try:
        values.astype(np.float64)
    except (TypeError, ValueError):
        return False
    return True


def _convert_images(pool: Pool) -> Dataset:
    """Convert the images of a folder to a dataset of images with shape (C, H, W) and values in [0, 1]."""
    note = f"images of {pool.name!r} are read with channels first and values from 0 to 1"
    x = pool.images.double() / pool.scale
    return Dataset(x, pool.labels, name=pool.name, classes=pool.classes, notes=(note,))


def is_one_hot(y: Tensor) -> bool:
    """Return True if labels are one-hot: every row has a single 1 and otherwise zeros."""
    if y.ndim != 2 or y.shape[1] < 2:
        return False
    values: Sequence[float] = y.unique().tolist()
    return set(values) <= {0, 1} and bool((y.sum(1) == 1).all())
