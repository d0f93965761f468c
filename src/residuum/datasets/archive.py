"""A user's own data in one .npz archive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from residuum.datasets.pool import Pool, Request
from residuum.errors import DataError
from residuum.records import read_npz

CHANNELS = (1, 3, 4)


def npz(request: Request, path: Path) -> Pool:
    """The arrays x, y or x_train, y_train (and x_test, y_test) of an .npz archive.

    uint8 images are brought to (C, H, W) and [0, 1]; other numbers are taken as they are. Labels are
    integers or text; ``classes`` may name them. Where a ``mean`` is stored, x already lacks it.
    """
    arrays = read_npz(path)
    suffixes = (
        ("",) if "x" in arrays else ("_train", "_test") if "x_test" in arrays else ("_train",)
    )
    if missing := {f"{key}{suffix}" for key in "xy" for suffix in suffixes} - arrays.keys():
        raise DataError(
            f"A data file needs arrays 'x' and 'y', or 'x_train', 'y_train' and for held-out samples "
            f"'x_test', 'y_test'; {str(path)!r} lacks {sorted(missing)}.",
            f"It holds {sorted(arrays)}; save it with numpy.savez(path, x=..., y=...).",
        )
    images = [_samples(arrays[f"x{suffix}"], path) for suffix in suffixes]
    if len({(x.dtype == torch.uint8, x.shape[1:]) for x in images}) > 1:
        raise DataError(
            f"Training and test samples must be of one kind; {str(path)!r} holds "
            f"{' and '.join(f'{tuple(x.shape)} {x.dtype}' for x in images)}.",
            "Save both from the same preprocessing.",
        )
    labels, classes = _labels([arrays[f"y{s}"] for s in suffixes], arrays.get("classes"), path)
    scale = 255.0 if images[0].dtype == torch.uint8 else 1.0
    mean = torch.from_numpy(arrays["mean"]).double() if "mean" in arrays else None
    if mean is not None and (mean.shape != images[0].shape[1:] or scale != 1.0):
        raise DataError(
            f"A stored mean has the shape of one sample and belongs to floating samples; got "
            f"{tuple(mean.shape)} beside {tuple(images[0].shape)} {images[0].dtype}.",
            "Leave 'mean' out to have it computed.",
        )
    test = None
    if len(suffixes) == 2:
        test = Pool(path.stem, images[1].to(images[0].dtype), labels[1], classes, scale=scale)
    return Pool(path.stem, images[0], labels[0], classes, scale=scale, mean=mean, test=test)


def _samples(array: np.ndarray, path: Path) -> Tensor:
    """x as (N, ...) numbers: uint8 images channels first, everything else floating and finite."""
    if array.ndim < 2 or array.size == 0 or array.dtype.kind == "U":
        raise DataError(
            f"'x' must hold numbers, one row per sample; {str(path)!r} has {array.dtype} of shape "
            f"{array.shape}.",
            "Save it as (n, ...).",
        )
    if array.dtype != np.uint8:
        floating = array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)
        if not np.isfinite(floating).all():
            raise DataError(
                f"'x' must be finite; {str(path)!r} holds NaN or Inf.", "Drop those rows."
            )
        return torch.from_numpy(floating)
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[1] not in CHANNELS and array.shape[3] in CHANNELS:
        array = np.moveaxis(array, 3, 1)
    return torch.from_numpy(np.ascontiguousarray(array))


def _labels(
    parts: list[np.ndarray], names: np.ndarray | None, path: Path
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Class indices of each part, and the names of the classes in the order of the labels."""
    columns = [y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y for y in parts]
    for y in columns:
        if y.ndim != 1 or (y.dtype.kind == "f" and not np.array_equal(y, np.round(y))):
            raise DataError(
                f"'y' must be one class per sample, whole numbers or text; {str(path)!r} has "
                f"{y.dtype} of shape {y.shape}.",
                "Save the class of each sample; real-valued targets are read by Dataset.from_npz.",
            )
    whole = [y if y.dtype.kind == "U" else y.astype(np.int64) for y in columns]
    if len({y.dtype.kind for y in whole}) > 1:
        raise DataError(f"Labels of {str(path)!r} mix numbers and text.", "Save one kind.")
    values, indices = np.unique(np.concatenate(whole), return_inverse=True)
    classes = tuple(map(str, values.tolist()))
    if names is not None and len(names) == len(values):
        classes = tuple(map(str, names.tolist()))
    elif (
        names is not None
        and whole[0].dtype.kind != "U"
        and 0 <= values[0] <= values[-1] < len(names)
    ):
        classes = tuple(str(names[value]) for value in values)
    if len(set(classes)) < len(classes):
        raise DataError(f"Class names must differ; {str(path)!r} repeats one.", "Rename it.")
    ends = np.cumsum([len(y) for y in whole])[:-1]
    return [torch.from_numpy(part.copy()) for part in np.split(indices, ends)], classes
