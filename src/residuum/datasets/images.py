"""A user's own images: a folder with one subfolder per class."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from residuum.datasets.pool import Pool, Request
from residuum.errors import DataError, UnsafeFileError
from residuum.records.data import MAX_BYTES

FORMATS = {
    ".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP",
    ".tif": "TIFF", ".tiff": "TIFF", ".pgm": "PPM", ".ppm": "PPM",
}  # fmt: skip
MAX_PIXELS = 20_000_000  # 200 MB with the copies that a conversion makes
GRAY_MODES = ("1", "L", "LA")
COLOUR_MODES = ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


def folder(
    request: Request, path: Path, *, size: tuple[int, int] | None = None, gray: bool | None = None
) -> Pool:
    """Images in ``path``/<class>/, or ``path``/train/<class>/ and ``path``/test/<class>/, sorted.

    size: (height, width) to resize to (bicubic); gray: one channel (True) or three (False), by
    default as the files are. Transparency is dropped; files that are no images are ignored.
    """
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise DataError(f"An image size is (height, width); got {size}.", "Use size=(32, 32).")
    parts = [path]
    if (path / "train").is_dir() and _subfolders(path / "train"):
        parts = [part for part in (path / "train", path / "test") if part.is_dir()]
    files = [
        [(file, sub.name) for sub in _subfolders(part) for file in _image_files(sub)]
        for part in parts
    ]
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


def _image_files(path: Path) -> list[Path]:
    return sorted(
        p
        for p in path.iterdir()
        if p.suffix.lower() in FORMATS and not p.name.startswith(".") and p.is_file()
    )


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
                if image.mode not in GRAY_MODES + COLOUR_MODES:
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
    except (
        OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, MemoryError, struct.error
    ) as problem:  # fmt: skip
        raise DataError(
            f"{str(file)!r} must be an image; reading it failed ({type(problem).__name__}).",
            "Leave it out, or save it again.",
        ) from problem
    return np.atleast_3d(np.asarray(plain)).transpose(2, 0, 1)
