"""Read the user's own samples from a file, a folder or a Python object, and return them as a Dataset.

    .npz            x and y, or x_train, y_train, x_test and y_test for training and held-out samples
    .npy            x without labels
    table           .csv, .tsv, .json, .jsonl or .parquet with named columns (:mod:`.tables`). The module
                    :mod:`.columns` decides which columns are the label, record IDs and inputs. A column name
                    may end with a unit in brackets, such as "age [years]"
    folder          images in CLASS/*.png, or in train/CLASS/*.png and test/CLASS/*.png. The output folder of
                    `residuum train` is supported too
    Python object   (x, y), a DataFrame, a TensorDataset, a DataLoader, any object with a length and items

The attribute ``notes`` of the returned dataset lists how the data was converted.
"""

from __future__ import annotations

import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residuum.datasets.columns import LABELS, read_columns
from residuum.datasets.files import folder
from residuum.datasets.selection import Pool, Request
from residuum.datasets.tables import is_table, make_column, read_table, refuse_other_format
from residuum.errors import DataError, InputError, UnsafeFileError
from residuum.records import Dataset, read_npz
from residuum.records.inputs import MAX_HEADER
from residuum.records.rundir import digest, sha256

MAX_ARRAY = 4 << 30  # largest .npy file in bytes
# The output folder of ``residuum train`` has a subfolder ``private``. These are the names of the files in
# this subfolder that hold the training samples and the held-out samples.
PRIVATE = {"data": "train.npz", "holdout": "holdout.npz"}
# Arrays that a data file may hold separately for training and held-out samples, such as x_train.
SPLIT_ARRAYS = ("x", "y", "id", "text")
KINDS = (
    "(x, y), a Dataset, a DataFrame, a DataLoader, a dataset with items, or the path of an .npz, an .npy, a "
    "table (.csv, .tsv, .json, .jsonl, .parquet) or a folder"
)


def read_samples(
    path: str | Path, label: str = "", drop: Sequence[str] = (), is_holdout: bool = False
) -> tuple[Dataset, Dataset | None]:
    """Read training samples, and held-out samples (or None), from a file or folder.

    Args:
        path: The file or folder.
        label: Name of the column of a table with the labels, "" to find it.
        drop: Names of columns of a table that are not inputs of the model.
        is_holdout: Whether the held-out samples are read, which may lack the named columns.

    Returns:
        The training samples, and the held-out samples if the file or folder also has these.

    Raises:
        DataError: If the file is missing or cannot be read.
        InputError: If ``label`` or ``drop`` is passed and the file is no table.
    """
    source_path = Path(path).expanduser()
    if is_table(source_path):
        columns = read_table(source_path)
        return read_columns(columns, source_path.stem, label, drop, is_holdout), None
    if (label or drop) and not is_holdout:
        raise InputError(
            f"The options --label and --drop name columns of a table; {str(path)!r} is not a table with "
            "named columns.",
            "Omit --label and --drop.",
        )
    if source_path.is_dir():
        folder_images = folder(Request(), source_path)
        test_images = folder_images.test
        holdout = None if test_images is None else _convert_images(test_images)
        return _convert_images(folder_images), holdout
    refuse_other_format(source_path)
    if source_path.suffix.lower() == ".npy":
        return _read_npy(source_path), None
    if source_path.is_file() and source_path.suffix.lower() != ".npz":
        with source_path.open("rb") as stream:
            is_archive = stream.read(2) == b"PK"
        if not is_archive:
            raise DataError(
                f"The path of samples must be {KINDS}; the path {str(path)!r} is none of these.",
                "Save the samples with numpy.savez(path, x=..., y=...).",
            )
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
                f"A data file with the array 'x_{suffix}' must also have the array 'y_{suffix}'; the "
                f"file {str(path)!r} has only the arrays {sorted(arrays)}.",
                f"Save the labels as 'y_{suffix}'.",
            )
        return Dataset.from_arrays({**shared_arrays, **split_arrays}, source_path)

    return read_set("train"), read_set("test") if "x_test" in arrays else None


def read_train_and_holdout(
    data: Any, holdout: Any, label: str = "", drop: Sequence[str] = ()
) -> tuple[Dataset | None, Dataset | None]:
    """Read training samples and held-out samples.

    Args:
        data: Training samples in any supported form. A file or folder may also contain held-out samples.
        holdout: Held-out samples in any supported form. They replace the held-out samples in ``data``.
        label: Name of the column of a table with the labels, "" to find it.
        drop: Names of columns of a table that are not inputs of the model.

    Returns:
        Training samples, or None if there are none, and held-out samples, or None if there are none.
    """
    train_samples = included_holdout = separate_holdout = None
    if isinstance(data, str | Path):
        train_samples, included_holdout = read_samples(locate_samples(data, "data"), label, drop)
        holdout_path = locate_samples(data, "holdout")
        if included_holdout is None and holdout_path != locate_samples(data, "data"):
            included_holdout = read_samples(holdout_path)[0] if holdout_path.is_file() else None
    elif data is not None:
        train_samples = as_dataset(data, "data", label, drop)
    if isinstance(holdout, str | Path):
        first_set, second_set = read_samples(
            locate_samples(holdout, "holdout"), label, drop, is_holdout=True
        )
        separate_holdout = first_set if second_set is None else second_set
    elif holdout is not None:
        separate_holdout = as_dataset(holdout, "holdout", label, drop, is_holdout=True)
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
    inner_files = sorted(file for file in source_path.rglob("*") if file.is_file())
    return digest(
        [[file.relative_to(source_path).as_posix(), sha256(file)] for file in inner_files]
    )


def as_dataset(
    samples: Any, name: str, label: str = "", drop: Sequence[str] = (), is_holdout: bool = False
) -> Dataset:
    """Convert samples in any supported form to a dataset.

    Args:
        samples: The samples. If the samples have no labels, all labels are set to zero.
        name: Name of the dataset, which error messages show.
        label: Name of the column of a table with the labels, "" to find it.
        drop: Names of columns of a table that are not inputs of the model.
        is_holdout: Whether the samples are the held-out samples, which may lack the named columns.

    Returns:
        The dataset.

    Raises:
        InputError: If ``label`` or ``drop`` is passed and the samples have no named columns.
    """
    if isinstance(samples, Dataset):
        return samples
    if isinstance(samples, str | Path):
        return read_samples(samples, label, drop, is_holdout)[0]
    x, y = samples if isinstance(samples, tuple) and len(samples) == 2 else (samples, None)
    if hasattr(x, "columns") and hasattr(x, "to_numpy"):  # a DataFrame of pandas or another library
        return _read_frame(x, y, name, label=label, drop=drop, is_holdout=is_holdout)
    if (label or drop) and not is_holdout:
        raise InputError(
            f"The arguments label and drop name columns of a table; the samples {name!r} have no named "
            "columns.",
            "Pass a DataFrame, or omit label and drop.",
        )
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
            f"The samples {name!r} must be an array of finite numbers with one row per sample; got an "
            f"array of shape {tuple(x.shape)} or values that are not finite.",
            "Pass the preprocessed samples that are the inputs of the network.",
        )
    return Dataset(x, y.detach().cpu(), name=name, **fields)


def _read_npy(path: Path) -> Dataset:
    """Read an .npy array of samples without labels. The array is never unpickled."""
    if not path.is_file():
        raise DataError(
            f"A data file must exist; there is no file at the path {str(path)!r}.",
            "Check the path.",
        )
    if (size := path.stat().st_size) > MAX_ARRAY:
        raise UnsafeFileError(
            f"A file with an array of samples may have at most {MAX_ARRAY:,} bytes; the file "
            f"{str(path)!r} has {size:,} bytes.",
            "Save fewer samples.",
        )
    try:
        # A header can claim any size. Mapping the file fails if the claimed size exceeds the file.
        array = np.lib.format.open_memmap(path, mode="r", max_header_size=MAX_HEADER)
    except (
        ValueError,
        EOFError,
        OSError,
        OverflowError,
        SyntaxError,
        tokenize.TokenError,
    ) as problem:
        raise DataError(
            f"The file {str(path)!r} must be an .npy array of numbers; reading the file failed "
            f"({' '.join(str(problem).split())[:120]}).",
            "Save it with numpy.save(path, x).",
        ) from problem
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"An array of samples must hold numbers; the array in the file {str(path)!r} has the type "
            f"{array.dtype}.",
            "Save it with numpy.save(path, x).",
        )
    return _read_arrays(np.array(array), None, path.stem)


def _explain_unknown(name: str, value: Any) -> tuple[str, str]:
    """Return the error message and the advice for samples in an unsupported form."""
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
        samples_and_targets = [dataset[i] for i in range(len(dataset))]
    except (TypeError, KeyError, NotImplementedError, AttributeError):
        try:
            samples_and_targets = list(dataset)
        except TypeError as problem:
            raise DataError(*_explain_unknown(name, samples)) from problem
    samples_and_labels = [
        item if isinstance(item, tuple | list) and len(item) == 2 else (item, None)
        for item in samples_and_targets
    ]
    if not samples_and_labels:
        raise DataError(
            f"A dataset must have at least one sample; the dataset {name!r} has no samples.",
            "Pass more samples.",
        )
    try:
        x = torch.stack([torch.as_tensor(np.asarray(sample)) for sample, _ in samples_and_labels])
        labels = [label for _, label in samples_and_labels]
        has_labels = labels[0] is not None
        y = torch.stack([torch.as_tensor(label) for label in labels]) if has_labels else None
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(
            "The items of a dataset must be pairs (x, y), and all x must be arrays of the same shape; "
            f"in {name!r}, x has the type {type(samples_and_labels[0][0]).__name__} ({str(problem)[:80]}).",
            "Give the dataset the same transforms as in the training, such as ToTensor.",
        ) from problem
    classes = tuple(map(str, getattr(dataset, "classes", ())))
    return _read_arrays(x, y, name, classes=classes)


def _read_frame(frame: Any, y: Any, name: str, **roles: Any) -> Dataset:
    """Read a DataFrame with labels ``y``. If ``y`` is None, a column of the DataFrame holds the labels."""
    columns = {str(c): make_column(str(c), np.asarray(frame[c]).tolist()) for c in frame.columns}
    if y is not None:
        label = next(name for name in (*LABELS, "the label") if name not in columns)
        columns[label] = make_column(label, np.asarray(y).tolist())
        roles["label"] = label
    return read_columns(columns, name, **roles)


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
