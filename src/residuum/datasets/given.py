"""Read samples of users from files, folders, tables and loaders as a Dataset.

    .npz            x and y, or x_train, y_train, x_test and y_test for training and held-out samples
    .csv            a header, and one row per sample. The label is the column named label, target, class or
                    y, else the last column. A column named id or ending in _id with different values in all
                    rows holds record IDs, which the report names. Record IDs are not inputs of the
                    network. A column name may end with a unit in brackets, such as "age [years]"
    folder          images in CLASS/*.png, or in train/CLASS and test/CLASS; or a folder of `train`
    in Python       (x, y), a DataFrame, a TensorDataset, a DataLoader, any object with a length and items

The notes of the returned dataset list the conversions.
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
# Files in the folder ``private`` of a training directory.
PRIVATE = {"data": "train.npz", "holdout": "holdout.npz"}
KINDS = (
    "(x, y), a Dataset, a DataFrame, a DataLoader, a dataset with items, or the path of an .npz, a .csv "
    "or a folder"
)


def read_samples(path: str | Path) -> tuple[Dataset, Dataset | None]:
    """Read training samples, and held-out samples (or None), from a file or folder."""
    place = Path(path).expanduser()
    if place.is_dir():
        pool = folder(Request(), place)
        return _images(pool), None if pool.test is None else _images(pool.test)
    if place.suffix.lower() == ".csv":
        return read_csv(place), None
    arrays = read_npz(place) if place.is_file() else {}
    if "x" in arrays or "x_train" not in arrays:
        return Dataset.from_npz(place), None
    split = ("x_", "y_", "id_")
    shared = {name: array for name, array in arrays.items() if not name.startswith(split)}

    def read_set(suffix: str) -> Dataset:
        names = [name for name in ("x", "y", "id") if f"{name}_{suffix}" in arrays]
        specific = {name: arrays[f"{name}_{suffix}"] for name in names}
        if "y" not in specific:
            raise DataError(
                f"A data file with 'x_{suffix}' must have 'y_{suffix}' too; {str(path)!r} lacks it.",
                f"It holds {sorted(arrays)}.",
            )
        return Dataset.from_arrays({**shared, **specific}, place)

    return read_set("train"), read_set("test") if "x_test" in arrays else None


def read_train_and_holdout(data: Any, holdout: Any) -> tuple[Dataset | None, Dataset | None]:
    """Read training samples and held-out samples.

    Args:
        data: Training samples in any supported form. A file or folder may also contain held-out samples.
        holdout: Held-out samples in any supported form. They replace the held-out samples in ``data``.

    Returns:
        Training samples and held-out samples. A set that is not available is None.
    """
    train = included = control = None
    if isinstance(data, str | Path):
        train, included = read_samples(locate_samples(data, "data"))
        path = locate_samples(data, "holdout")
        if included is None and path != locate_samples(data, "data"):
            included = read_samples(path)[0] if path.is_file() else None
    elif data is not None:
        train = as_dataset(data, "data")
    if isinstance(holdout, str | Path):
        first, second = read_samples(locate_samples(holdout, "holdout"))
        control = first if second is None else second
    elif holdout is not None:
        control = as_dataset(holdout, "holdout")
    return train, included if control is None else control


def locate_samples(path: str | Path, name: str) -> Path:
    """Return the path of a file of samples. In a training directory, the file is in the folder private.

    Args:
        path: A file of samples or a training directory.
        name: "data" for training samples or "holdout" for held-out samples.

    Returns:
        The path of the samples.
    """
    place = Path(path).expanduser()
    return place / "private" / PRIVATE[name] if (place / "private").is_dir() else place


def hash_path(path: str | Path) -> str:
    """Return the SHA-256 hash of a file, or of all files of a folder with their names."""
    place = Path(path).expanduser()
    if not place.is_dir():
        return sha256(place)
    files = sorted(file for file in place.rglob("*") if file.is_file())
    return digest([[file.relative_to(place).as_posix(), sha256(file)] for file in files])


def as_dataset(samples: Any, name: str) -> Dataset:
    """Convert samples in any supported form to a dataset.

    Args:
        samples: The samples. If labels are missing, all labels are set to zero, which matches no class.
        name: Name of the dataset, for messages.

    Returns:
        The dataset.
    """
    if isinstance(samples, Dataset):
        return samples
    if isinstance(samples, str | Path):
        return read_samples(samples)[0]
    x, y = samples if isinstance(samples, tuple) and len(samples) == 2 else (samples, None)
    if hasattr(x, "columns") and hasattr(x, "to_numpy"):  # a DataFrame of any library
        return _frame(x, y, name)
    if y is None and not hasattr(x, "__array__") and not isinstance(x, Tensor | list | tuple):
        return _items(x, name)
    return _arrays(x, y, name)


def _arrays(x: Any, y: Any, name: str, **fields: Any) -> Dataset:
    try:
        x = torch.as_tensor(x)
        y = torch.zeros(len(x), dtype=torch.long) if y is None else torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(*_explain_unknown(name, x)) from problem
    x = x.detach().cpu()
    x = x if x.is_floating_point() else x.double()
    if x.ndim < 2 or not torch.isfinite(x).all():
        raise DataError(
            f"{name} must hold finite numbers, one row per sample; got shape {tuple(x.shape)}.",
            "Pass x as the network receives it.",
        )
    return Dataset(x, y.detach().cpu(), name=name, **fields)


def _explain_unknown(name: str, value: Any) -> tuple[str, str]:
    """Return the error message and the remedy for samples in an unsupported form."""
    message = f"{name} must be {KINDS}; got {type(value).__name__}."
    return message, f"Pass {name}=(x, y)."


def _items(samples: Any, name: str) -> Dataset:
    """Read all samples of a DataLoader, or of an object with items (x, y), in the order of the dataset."""
    is_loader = hasattr(samples, "batch_size")
    source = getattr(samples, "dataset", samples) if is_loader else samples
    if hasattr(source, "tensors") and len(source.tensors) in (1, 2):  # TensorDataset
        x, y = (*source.tensors, None)[:2]
        return _arrays(x, y, name)
    try:
        rows = [source[i] for i in range(len(source))]
    except (TypeError, KeyError, NotImplementedError, AttributeError):
        try:
            rows = list(source)
        except TypeError as problem:
            raise DataError(*_explain_unknown(name, samples)) from problem
    pairs = [
        row if isinstance(row, tuple | list) and len(row) == 2 else (row, None) for row in rows
    ]
    if not pairs:
        raise DataError(
            f"A dataset must have at least one sample; {name} is empty.", "Pass more samples."
        )
    try:
        x = torch.stack([torch.as_tensor(np.asarray(sample)) for sample, _ in pairs])
        labels = [label for _, label in pairs]
        has_labels = labels[0] is not None
        y = torch.stack([torch.as_tensor(label) for label in labels]) if has_labels else None
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(
            f"Items of {name} must be (x, y) with arrays of the same shape; got "
            f"{type(pairs[0][0]).__name__} ({str(problem)[:80]}).",
            "Use the transforms of the training, including ToTensor.",
        ) from problem
    classes = tuple(map(str, getattr(source, "classes", ())))
    return _arrays(x, y, name, classes=classes)


def _frame(frame: Any, y: Any, name: str) -> Dataset:
    """Read a DataFrame with labels ``y``, or with a column of labels if ``y`` is None."""
    values = {str(column): np.asarray(frame[column]) for column in frame.columns}
    return read_columns(values if y is None else {**values, "label": np.asarray(y)}, name)


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
            f"{str(path)!r} must be a table of text in UTF-8 with a header; reading it failed.",
            "Save it with a header and one row per sample.",
        ) from problem
    widths = {len(row) for row in rows}
    if not rows or widths != {len(names)} or len(names) < 2:
        raise DataError(
            "Every row of a table must have as many values as the header has names; "
            f"{str(path)!r} has {len(names)} names and rows of {sorted(widths) or 'none'}.",
            "Save one row per sample, with the label in a separate column.",
        )
    if _numeric(np.array(names)):
        raise DataError(
            f"The first line of {str(path)!r} must name the columns; it holds numbers.",
            "Add a header, such as age,height,label.",
        )
    columns = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    if len(columns) < len(names):
        raise DataError(
            f"Columns must have different names; {str(path)!r} repeats one.", "Rename that column."
        )
    return read_columns(columns, path.stem)


def read_columns(columns: dict[str, np.ndarray], name: str) -> Dataset:
    """Make a dataset from the named columns of a table.

    The label is the first column with a name in ``LABELS``, else the last column. Units in brackets after a
    column name are stored for the report. Only the label may be text, because residuum cannot know how the
    training encoded text as numbers.

    Args:
        columns: Values by the name of the column.
        name: Name of the dataset.

    Returns:
        The dataset.

    Raises:
        DataError: If a column other than the label is not numeric or has gaps.
    """
    by_lower_case = {column.strip().lower(): column for column in columns}
    label_columns = (by_lower_case[column] for column in LABELS if column in by_lower_case)
    label = next(label_columns, list(columns)[-1])
    ids = [c for c in columns if c != label and _identifies_rows(c, columns[c])][:1]
    features = [column for column in columns if column not in (label, *ids)]
    if not features:
        raise DataError(
            f"A table must have columns in addition to the label; {name!r} has none.",
            "Add columns.",
        )
    text_columns = [column for column in features if not _numeric(columns[column])]
    if text_columns:
        raise DataError(
            f"Columns must hold numbers, as the network receives them; {text_columns[:5]} of {name!r} "
            "do not.",
            "Encode these columns as in the training, or remove them. The label may be text.",
        )
    x = torch.from_numpy(np.stack([columns[column].astype(np.float64) for column in features], 1))
    if not torch.isfinite(x).all():
        raise DataError(
            f"A table must be complete; {name!r} has gaps.", "Fill the gaps or remove those rows."
        )
    y, classes = _labels(columns[label])
    brackets = [UNIT.search(feature) for feature in features]
    units = tuple(unit[1].strip() if unit else "" for unit in brackets)
    names = tuple(UNIT.sub("", feature).strip() for feature in features)
    notes = [f"the column {label!r} of {name!r} is the label"]
    if ids:
        description = "holds record IDs and is not an input of the network"
        notes.append(f"the column {ids[0]!r} of {name!r} {description}")
    record_ids = tuple(map(str, columns[ids[0]])) if ids else ()
    units = units if any(units) else ()
    dataset = Dataset(x, y, name=name, classes=classes, features=names, units=units)
    return dataset.replace(notes=tuple(notes), record_ids=record_ids)


def _identifies_rows(name: str, values: np.ndarray) -> bool:
    """Return True if a column is named like an ID and has a different value in every row."""
    text = values.astype(str)
    return bool(ID_COLUMN.fullmatch(name.strip())) and len(np.unique(text)) == len(text)


def _labels(values: np.ndarray) -> tuple[Tensor, tuple[str, ...]]:
    """Convert a column of labels: whole numbers and text become classes, other numbers become targets."""
    if _numeric(values):
        numbers = values.astype(np.float64)
        is_integer = np.array_equal(numbers, np.round(numbers))
        return torch.from_numpy(numbers.astype(np.int64) if is_integer else numbers), ()
    classes, indices = np.unique(values.astype(str), return_inverse=True)
    return torch.from_numpy(indices.astype(np.int64)), tuple(map(str, classes))


def _numeric(values: np.ndarray) -> bool:
    try:
        values.astype(np.float64)
    except (TypeError, ValueError):
        return False
    return True


def _images(pool: Pool) -> Dataset:
    """Convert the images of a folder to a dataset with channels first and values from 0 to 1."""
    note = f"images of {pool.name!r} are read with channels first and values from 0 to 1"
    x = pool.images.double() / pool.scale
    return Dataset(x, pool.labels, name=pool.name, classes=pool.classes, notes=(note,))


def is_one_hot(y: Tensor) -> bool:
    """Return True if labels are one-hot: every row has a single 1 and otherwise zeros."""
    if y.ndim != 2 or y.shape[1] < 2:
        return False
    values: Sequence[float] = y.unique().tolist()
    return set(values) <= {0, 1} and bool((y.sum(1) == 1).all())
