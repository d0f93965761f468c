"""A dataset as the network receives it, and the pair of sets every audit needs."""

from __future__ import annotations

import io
import lzma
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from residuum.errors import DataError, UnsafeFileError
from residuum.records.base import Record
from residuum.records.files import write_atomic

MAX_BYTES = 4 << 30
_UNREADABLE = (
    OSError, ValueError, EOFError, MemoryError, RuntimeError, SyntaxError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError,
)  # fmt: skip
TASKS = ("binary", "multiclass", "regression")


@dataclass(frozen=True, eq=False)
class Dataset(Record):
    """Samples exactly as the network receives them.

    x: (n, *shape) floating; y: (n,) labels -1/+1, class indices, or regression targets (n,) / (n, k);
    mean: (*shape) what was subtracted, to be added back for display; None when nothing was.
    """

    x: Tensor
    y: Tensor
    mean: Tensor | None = None
    name: str = ""
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.x) == 0:
            raise DataError("A dataset needs at least one sample; this one is empty.", "Check n.")
        if len(self.x) != len(self.y):
            raise DataError(
                f"x and y must have equally many rows; got {len(self.x)} and {len(self.y)}.",
                "Save them from the same arrays.",
            )

    def __len__(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def images(self) -> Tensor:
        """Samples as a person would look at them: the mean added back."""
        return self.x if self.mean is None else self.x + self.mean

    def to_npz(self, path: str | Path) -> Path:
        """Write ``x``, ``y`` and, where known, ``mean`` and ``classes`` to an .npz archive."""
        arrays = {"x": self.x.numpy(force=True), "y": self.y.numpy(force=True)}
        if self.mean is not None:
            arrays["mean"] = self.mean.numpy(force=True)
        if self.classes:
            arrays["classes"] = np.array(self.classes)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        return write_atomic(path, buffer.getvalue())

    @classmethod
    def from_npz(cls, path: str | Path) -> Self:
        """Read what :meth:`to_npz` wrote, or any .npz with ``x`` and ``y``; never unpickles."""
        arrays = read_npz(path)
        if missing := {"x", "y"} - arrays.keys():
            raise DataError(
                f"A data file needs arrays 'x' and 'y'; {str(path)!r} lacks {sorted(missing)}.",
                f"It holds {sorted(arrays)}; save it with numpy.savez(path, x=..., y=...).",
            )
        for name in filter(arrays.__contains__, ("x", "y", "mean")):
            if arrays[name].dtype.kind == "U" or not np.isfinite(arrays[name]).all():
                raise DataError(
                    f"{name!r} must hold finite numbers; in {str(path)!r} it holds text, NaN or Inf.",
                    "Drop such rows; save class indices as y, and their names as classes.",
                )
        x = torch.from_numpy(arrays["x"])
        x = x if x.is_floating_point() else x.double()
        if x.ndim < 2 or arrays["y"].ndim < 1:
            raise DataError(
                f"'x' must be (n, ...) and 'y' (n,); got shapes {tuple(x.shape)} and "
                f"{arrays['y'].shape} in {str(path)!r}.",
                "One row per sample.",
            )
        mean = torch.from_numpy(arrays["mean"]).to(x.dtype) if "mean" in arrays else None
        if mean is not None and mean.shape not in ((), x.shape[1:]):
            raise DataError(
                f"'mean' must have the shape of a sample, {tuple(x.shape[1:])}; got {tuple(mean.shape)}.",
                "Save the mean image that was subtracted.",
            )
        classes = tuple(map(str, arrays["classes"].ravel())) if "classes" in arrays else ()
        return cls(x, torch.from_numpy(arrays["y"]), mean, Path(path).stem, classes)


@dataclass(frozen=True, eq=False)
class Split(Record):
    """Training samples and a disjoint held-out set, preprocessed alike.

    available: samples of the source that the training samples were chosen from; 0 when not known.
    """

    train: Dataset
    holdout: Dataset
    available: int = 0


def read_npz(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, np.ndarray]:
    """Numeric and string arrays of an .npz archive, sizes checked before anything is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > max_bytes:
            raise UnsafeFileError(
                f"A data file may unpack to {max_bytes} bytes; {str(path)!r} claims {size}.",
                "Save fewer samples.",
            )
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: np.asarray(archive[name]) for name in archive.files}
    except FileNotFoundError as problem:
        raise DataError(f"No data file at {str(path)!r}.", "Check the path.") from problem
    except _UNREADABLE as problem:
        raise DataError(
            f"{str(path)!r} must be an .npz archive of plain arrays; reading it failed ({problem}).",
            "Save it with numpy.savez(path, x=..., y=...).",
        ) from problem
    if bad := [name for name, a in arrays.items() if a.dtype.kind not in "fiubU"]:
        raise DataError(
            f"Arrays of a data file must be real numbers or text; {bad[0]!r} is {arrays[bad[0]].dtype}.",
            "Convert it before saving.",
        )
    return {name: _native(array) for name, array in arrays.items()}


def _native(array: np.ndarray) -> np.ndarray:
    """The array in this machine's byte order, and no wider than torch can take."""
    kind = array.dtype.newbyteorder("=")
    return array.astype(np.float64 if kind == np.longdouble else kind, copy=False)
