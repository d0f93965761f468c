"""A user's own data: one .npz archive, or a folder with one subfolder of images per class."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from residuum.datasets.selection import Pool, Request
from residuum.errors import DataError, UnsafeFileError
from residuum.records import read_npz
from residuum.records.inputs import MAX_BYTES

CHANNELS = (1, 3, 4)
FORMATS = {
    **{".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP"},
    **{".tif": "TIFF", ".tiff": "TIFF", ".pgm": "PPM", ".ppm": "PPM"},
}
MAX_PIXELS = 20_000_000  # 200 MB with the copies that a conversion makes
# What Pillow raises on files that are no images.
UNREADABLE = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, MemoryError)
GRAY_MODES = ("1", "L", "LA")
COLOR_MODES = ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


def npz(request: Request, path: Path) -> Pool:
    """The arrays x, y or x_train, y_train (and x_test, y_test) of an .npz archive.

    uint8 images are brought to (C, H, W) and [0, 1]; other numbers are taken as they are. Labels are
    integers or text; ``classes`` may name them. Where a ``mean`` is stored, x already lacks it.
    """
    arrays = read_npz(path)
    parts = ("_train", "_test") if "x_test" in arrays else ("_train",)
    suffixes = ("",) if "x" in arrays else parts
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
            said = f"'x' must be finite; {str(path)!r} holds NaN or Inf."
            raise DataError(said, "Drop those rows.")
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
    named = () if names is None else tuple(map(str, names.tolist()))
    if len(named) == len(values):
        classes = named
    elif whole[0].dtype.kind != "U" and 0 <= values[0] <= values[-1] < len(named):
        classes = tuple(named[value] for value in values)
    if len(set(classes)) < len(classes):
        raise DataError(f"Class names must differ; {str(path)!r} repeats one.", "Rename it.")
    ends = np.cumsum([len(y) for y in whole])[:-1]
    return [torch.from_numpy(part.copy()) for part in np.split(indices, ends)], classes


def folder(
    request: Request, path: Path, *, size: tuple[int, int] | None = None, gray: bool | None = None
) -> Pool:
    """Images in ``path``/<class>/, or ``path``/train/<class>/ and ``path``/test/<class>/, sorted.

    size: (height, width) to resize to (bicubic).
    gray: one channel (True) or three (False), by default as the files are.
    Transparency is dropped; files that are no images are ignored.
    """
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise DataError(f"An image size is (height, width); got {size}.", "Use size=(32, 32).")
    parts = [path]
    if (path / "train").is_dir() and _subfolders(path / "train"):
        parts = [part for part in (path / "train", path / "test") if part.is_dir()]
    files = []
    for part in parts:
        shown = [(file, sub.name) for sub in _subfolders(part) for file in sorted(sub.iterdir())]
        known = [(f, name) for f, name in shown if f.is_file() and f.suffix.lower() in FORMATS]
        files.append([(f, name) for f, name in known if not f.name.startswith(".")])
    if not all(files):
        empty = parts[files.index([])]
        raise DataError(
            f"A folder of images holds one subfolder per class, as in CLASS/*.png; there are no "
            f"images in the subfolders of {str(empty)!r}.",
            f"Read are {' '.join(FORMATS)}.",
        )
    classes = tuple(sorted({name for part in files for _, name in part}))
    images = _read_images([file for part in files for file, _ in part], size, gray)
    labels = torch.tensor([classes.index(name) for part in files for _, name in part])
    count = len(files[0])
    test = None
    if len(files) == 2:
        test = Pool(path.name, images[count:], labels[count:], classes, scale=255.0)
    return Pool(path.name, images[:count], labels[:count], classes, scale=255.0, test=test)


def _subfolders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _read_images(files: list[Path], size: tuple[int, int] | None, gray: bool | None) -> Tensor:
    """Files as one (N, C, H, W) uint8 tensor; all must agree in size and channels."""
    first = _read_image(files[0], size, gray)
    if len(files) * first.size > MAX_BYTES:
        raise UnsafeFileError(
            f"Images may fill {MAX_BYTES} bytes; {len(files)} of shape {first.shape} fill more.",
            "Use fewer images, or a smaller size=(h, w).",
        )
    images = np.empty((len(files), *first.shape), np.uint8)
    for row, file in enumerate(files):
        image = _read_image(file, size, gray)
        if image.shape != first.shape:
            raise DataError(
                f"Images must agree in channels and size; {str(files[0])!r} has {first.shape}, "
                f"{str(file)!r} {image.shape}.",
                "Use size=(h, w), and gray=True or gray=False.",
            )
        images[row] = image
    return torch.from_numpy(images)


def _read_image(file: Path, size: tuple[int, int] | None, gray: bool | None) -> np.ndarray:
    """One image as (C, H, W) uint8; its size is checked before it is unpacked."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=sorted(set(FORMATS.values()))) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                if image.mode not in GRAY_MODES + COLOR_MODES:
                    raise DataError(
                        f"Images must have 8 bits per channel; {str(file)!r} has mode "
                        f"{image.mode!r}.",
                        "Convert it first.",
                    )
                one = image.mode in GRAY_MODES if gray is None else gray
                plain = image.convert("L" if one else "RGB")
        if size is not None:
            plain = plain.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as problem:
        raise UnsafeFileError(
            f"An image may have {MAX_PIXELS} pixels; {str(file)!r} claims more.",
            "Leave it out, or make it smaller.",
        ) from problem
    except (*UNREADABLE, struct.error) as problem:
        raise DataError(
            f"{str(file)!r} must be an image; reading it failed ({type(problem).__name__}).",
            "Leave it out, or save it again.",
        ) from problem
    return np.atleast_3d(np.asarray(plain)).transpose(2, 0, 1)
