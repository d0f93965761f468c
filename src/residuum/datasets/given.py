"""Samples as people have them: files, folders, tables, loaders; each becomes a Dataset, and says how.

    .npz            x and y, or x_train, y_train, x_test, y_test: training and held-out samples in one
    .csv            a header, one row per sample; the label is the column called label, target, class or
                    y, else the last; a column called id or ending in _id, all values different, holds
                    the record IDs that the report names and is no input; a unit may stand in brackets
                    after a name, as in "age [years]"
    folder          of images, CLASS/*.png, or train/CLASS and test/CLASS; or one that `train` wrote
    in Python       (x, y), a DataFrame, a TensorDataset, a DataLoader, anything with a length and items

What is read differently from how it was given is a note of the dataset.
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

LABELS = ("label", "target", "class", "y")  # names of a label's column
ID_COLUMN = re.compile(r"(?:.*[_ ])?ids?", re.IGNORECASE)  # id, patient_id, Record ID
MAX_TABLE = 256 << 20  # bytes of a .csv
UNIT = re.compile(r"\s*[\[(]([^\])]*)[\])]\s*$")
PRIVATE = {"data": "train.npz", "holdout": "holdout.npz"}  # in a training directory
KINDS = (
    "(x, y), a Dataset, a DataFrame, a DataLoader, a dataset with items, or the path of an .npz, a .csv "
    "or a folder"
)


def read_samples(path: str | Path) -> tuple[Dataset, Dataset | None]:
    """Training samples at ``path``, and the held-out ones where they stand in the same place."""
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
    beside = {name: array for name, array in arrays.items() if not name.startswith(split)}

    def part(suffix: str) -> Dataset:
        names = [name for name in ("x", "y", "id") if f"{name}_{suffix}" in arrays]
        own = {name: arrays[f"{name}_{suffix}"] for name in names}
        if "y" not in own:
            raise DataError(
                f"A data file with 'x_{suffix}' needs 'y_{suffix}' too; {str(path)!r} has none.",
                f"It holds {sorted(arrays)}.",
            )
        return Dataset.from_arrays({**beside, **own}, place)

    return part("train"), part("test") if "x_test" in arrays else None


def both(data: Any, holdout: Any) -> tuple[Dataset | None, Dataset | None]:
    """Training and held-out samples of what was given; one place may hold both."""
    train = held = control = None
    if isinstance(data, str | Path):
        train, held = read_samples(place_of(data, "data"))
        if held is None and (beside := place_of(data, "holdout")) != place_of(data, "data"):
            held = read_samples(beside)[0] if beside.is_file() else None
    elif data is not None:
        train = as_dataset(data, "data")
    if isinstance(holdout, str | Path):
        first, second = read_samples(place_of(holdout, "holdout"))
        control = first if second is None else second
    elif holdout is not None:
        control = as_dataset(holdout, "holdout")
    return train, held if control is None else control


def place_of(path: str | Path, name: str) -> Path:
    """Where ``data`` or ``holdout`` stand: a training directory keeps each in a file of its own."""
    place = Path(path).expanduser()
    return place / "private" / PRIVATE[name] if (place / "private").is_dir() else place


def hash_of(path: str | Path) -> str:
    """SHA-256 of a file, or of all files of a folder with their names."""
    place = Path(path).expanduser()
    if not place.is_dir():
        return sha256(place)
    files = sorted(file for file in place.rglob("*") if file.is_file())
    return digest([[file.relative_to(place).as_posix(), sha256(file)] for file in files])


def as_dataset(given: Any, name: str) -> Dataset:
    """A dataset of what was given; samples without labels get zeros, which match no class."""
    if isinstance(given, Dataset):
        return given
    if isinstance(given, str | Path):
        return read_samples(given)[0]
    x, y = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if hasattr(x, "columns") and hasattr(x, "to_numpy"):  # a table, whichever library made it
        return _frame(x, y, name)
    if y is None and not hasattr(x, "__array__") and not isinstance(x, Tensor | list | tuple):
        return _items(x, name)
    return _arrays(x, y, name)


def _arrays(x: Any, y: Any, name: str, **known: Any) -> Dataset:
    try:
        x = torch.as_tensor(x)
        y = torch.zeros(len(x), dtype=torch.long) if y is None else torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise _unknown_kind(name, x) from problem
    x = x.detach().cpu()
    x = x if x.is_floating_point() else x.double()
    if x.ndim < 2 or not torch.isfinite(x).all():
        raise DataError(
            f"{name} must hold finite numbers, one row per sample; got shape {tuple(x.shape)}.",
            "Give x as the network receives it.",
        )
    return Dataset(x, y.detach().cpu(), name=name, **known)


def _unknown_kind(name: str, value: Any) -> DataError:
    return DataError(
        f"{name} must be {KINDS}; got {type(value).__name__}.",
        f"Say audit(model, {name}=(x, y)).",
    )


def _items(given: Any, name: str) -> Dataset:
    """Read the dataset of a loader, or anything with items (x, y), in its own order."""
    source = getattr(given, "dataset", given) if hasattr(given, "batch_size") else given
    if hasattr(source, "tensors") and len(source.tensors) in (1, 2):  # TensorDataset
        x, y = (*source.tensors, None)[:2]
        return _arrays(x, y, name)
    try:
        rows = [source[i] for i in range(len(source))]
    except (TypeError, KeyError, NotImplementedError, AttributeError):
        try:
            rows = list(source)
        except TypeError as problem:
            raise _unknown_kind(name, given) from problem
    pairs = [
        row if isinstance(row, tuple | list) and len(row) == 2 else (row, None) for row in rows
    ]
    if not pairs:
        raise DataError("A dataset needs at least one sample; this one is empty.", "Check it.")
    try:
        x = torch.stack([torch.as_tensor(np.asarray(one)) for one, _ in pairs])
        labels = [label for _, label in pairs]
        y = None if labels[0] is None else torch.stack([torch.as_tensor(one) for one in labels])
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(
            f"Items of {name} must be (x, y) with arrays of one shape; got "
            f"{type(pairs[0][0]).__name__} ({str(problem)[:80]}).",
            "Give the transforms that the network was trained with, ToTensor among them.",
        ) from problem
    classes = tuple(map(str, getattr(source, "classes", ())))
    return _arrays(x, y, name, classes=classes)


def _frame(frame: Any, y: Any, name: str) -> Dataset:
    """A DataFrame, with its labels beside it or in a column of its own."""
    values = {str(column): np.asarray(frame[column]) for column in frame.columns}
    return table(values if y is None else {**values, "label": np.asarray(y)}, name)


def read_csv(path: Path) -> Dataset:
    """A table with a header."""
    if not path.is_file():
        raise DataError(f"No data file at {str(path)!r}.", "Check the path.")
    if (size := path.stat().st_size) > MAX_TABLE:
        raise UnsafeFileError(
            f"A table may have {MAX_TABLE} bytes; {str(path)!r} has {size}.",
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
            f"A table needs a header and rows of as many values; {str(path)!r} has {len(names)} names "
            f"and rows of {sorted(widths) or 'none'}.",
            "One row per sample, the label in a column of its own.",
        )
    if _numeric(np.array(names)):
        raise DataError(
            f"The first line of {str(path)!r} must name the columns; it holds numbers.",
            "Add a header, such as age,height,label.",
        )
    columns = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    if len(columns) < len(names):
        raise DataError(f"Columns of {str(path)!r} must have different names.", "Rename one.")
    return table(columns, path.stem)


def table(columns: dict[str, np.ndarray], name: str) -> Dataset:
    """A dataset of named columns, one of them the label.

    The label: the first column with a customary name (``LABELS``), else the last. Units in brackets
    behind a name are kept for the report. Text is refused but for the label: how it was encoded decides
    what the network saw.
    """
    called = {one.strip().lower(): one for one in columns}
    label = next((called[one] for one in LABELS if one in called), list(columns)[-1])
    ids = [one for one in columns if one != label and _identifies_rows(one, columns[one])][:1]
    features = [one for one in columns if one not in (label, *ids)]
    if not features:
        raise DataError(f"A table needs columns beside the label; {name!r} has none.", "Add them.")
    words = [one for one in features if not _numeric(columns[one])]
    if words:
        raise DataError(
            f"Columns must hold numbers, as the network receives them; {words[:5]} of {name!r} do not.",
            "Encode them as for the training, or leave them out; the label may be text.",
        )
    x = torch.from_numpy(np.stack([columns[one].astype(np.float64) for one in features], 1))
    if not torch.isfinite(x).all():
        raise DataError(f"A table must be complete; {name!r} has gaps.", "Fill or drop those rows.")
    y, classes = _labels(columns[label])
    brackets = [UNIT.search(feature) for feature in features]
    units = tuple(unit[1].strip() if unit else "" for unit in brackets)
    names = tuple(UNIT.sub("", feature).strip() for feature in features)
    notes = [f"the column {label!r} of {name!r} is taken as the label"]
    if ids:
        holds = "holds record IDs and is not an input of the network"
        notes.append(f"the column {ids[0]!r} of {name!r} {holds}")
    record_ids = tuple(map(str, columns[ids[0]])) if ids else ()
    units = units if any(units) else ()
    whole = Dataset(x, y, name=name, classes=classes, features=names, units=units)
    return whole.replace(notes=tuple(notes), record_ids=record_ids)


def _identifies_rows(name: str, values: np.ndarray) -> bool:
    """Return True for a column that is named as an ID and has a different value in every row."""
    text = values.astype(str)
    return bool(ID_COLUMN.fullmatch(name.strip())) and len(np.unique(text)) == len(text)


def _labels(values: np.ndarray) -> tuple[Tensor, tuple[str, ...]]:
    """Whole numbers as classes, others as targets; text as classes in the order of the alphabet."""
    if _numeric(values):
        numbers = values.astype(np.float64)
        whole = np.array_equal(numbers, np.round(numbers))
        return torch.from_numpy(numbers.astype(np.int64) if whole else numbers), ()
    classes, indices = np.unique(values.astype(str), return_inverse=True)
    return torch.from_numpy(indices.astype(np.int64)), tuple(map(str, classes))


def _numeric(values: np.ndarray) -> bool:
    try:
        values.astype(np.float64)
    except (TypeError, ValueError):
        return False
    return True


def _images(pool: Pool) -> Dataset:
    """Images of a folder with values from 0 to 1, channels first."""
    said = f"images of {pool.name!r} are read with channels first and values from 0 to 1"
    x = pool.images.double() / pool.scale
    return Dataset(x, pool.labels, name=pool.name, classes=pool.classes, notes=(said,))


def one_hot(y: Tensor) -> bool:
    """Whether every row of labels is one 1 among zeros."""
    if y.ndim != 2 or y.shape[1] < 2:
        return False
    values: Sequence[float] = y.unique().tolist()
    return set(values) <= {0, 1} and bool((y.sum(1) == 1).all())
