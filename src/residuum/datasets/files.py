"""Read the user's own data from an .npz archive, or from a folder of images with one subfolder per class."""

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

CHANNELS = (1, 3, 4)  # possible numbers of channels of an image
FORMATS = {
    **{".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP"},
    **{".tif": "TIFF", ".tiff": "TIFF", ".pgm": "PPM", ".ppm": "PPM"},
}
MAX_PIXELS = 20_000_000  # maximum number of pixels of an image; Pillow takes 200 MB to convert it
# Exceptions that Pillow raises if a file is not an image.
UNREADABLE = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, MemoryError)
GRAY_MODES = ("1", "L", "LA")
COLOR_MODES = ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


def npz(request: Request, path: Path) -> Pool:
    """Read samples and labels from an .npz archive with x and y, or x_train, y_train, x_test and y_test.

    uint8 images are converted to the shape (C, H, W) and values in [0, 1]. Other numbers do not change.
    Labels are integers or text. An optional array ``classes`` holds the names of the labels. An optional
    array ``mean`` holds the mean that was subtracted from x before the archive was saved.

    Args:
        request: Not used, but every function that loads a dataset has this parameter.
        path: The archive.

    Returns:
        The samples.

    Raises:
        DataError: If an array is missing, or if an array has an unsupported shape, type or value.
    """
    arrays = read_npz(path)
    array_suffixes: tuple[str, ...] = ("_train", "_test") if "x_test" in arrays else ("_train",)
    array_suffixes = ("",) if "x" in arrays else array_suffixes
    if missing := {f"{key}{suffix}" for key in "xy" for suffix in array_suffixes} - arrays.keys():
        raise DataError(
            "A data file must have the arrays 'x' and 'y'. If it also has held-out samples, the arrays are "
            f"'x_train', 'y_train', 'x_test' and 'y_test'. The file {str(path)!r} lacks {sorted(missing)}.",
            f"The file has the arrays {sorted(arrays)}. Save it with numpy.savez(path, x=..., y=...).",
        )
    images = [_convert_samples(arrays[f"x{suffix}"], path) for suffix in array_suffixes]
    if len({(x.dtype == torch.uint8, x.shape[1:]) for x in images}) > 1:
        raise DataError(
            f"Training and test samples must have the same shape and type; the file {str(path)!r} has "
            f"samples of {' and '.join(f'{tuple(x.shape)} {x.dtype}' for x in images)}.",
            "Save training and test samples with the same preprocessing.",
        )
    labels, classes = _convert_labels(
        [arrays[f"y{s}"] for s in array_suffixes], arrays.get("classes"), path
    )
    pixel_scale = 255.0 if images[0].dtype == torch.uint8 else 1.0
    mean = torch.from_numpy(arrays["mean"]).double() if "mean" in arrays else None
    if mean is not None and (mean.shape != images[0].shape[1:] or pixel_scale != 1.0):
        raise DataError(
            f"The array 'mean' must have the shape of one sample of a floating-point 'x'; got a mean of "
            f"shape {tuple(mean.shape)} and an 'x' of shape {tuple(images[0].shape)} and type "
            f"{images[0].dtype}.",
            "Remove the array 'mean'. Then the mean of the training samples is computed and subtracted.",
        )
    test_set = None
    if len(array_suffixes) == 2:
        test_set = Pool(
            path.stem, images[1].to(images[0].dtype), labels[1], classes, scale=pixel_scale
        )
    return Pool(
        path.stem, images[0], labels[0], classes, scale=pixel_scale, mean=mean, test=test_set
    )


def _convert_samples(array: np.ndarray, path: Path) -> Tensor:
    """Convert an array of samples to a tensor: uint8 images (N, C, H, W), or floating-point numbers."""
    if array.ndim < 2 or array.size == 0 or array.dtype.kind == "U":
        raise DataError(
            f"The array 'x' must hold numbers, one row per sample; in the file {str(path)!r}, 'x' has the "
            f"type {array.dtype} and the shape {array.shape}.",
            "Save 'x' as an array of numbers with the shape (n, ...) for n samples.",
        )
    if array.dtype != np.uint8:
        float_array = array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)
        if not np.isfinite(float_array).all():
            message = f"'x' must be finite; {str(path)!r} holds NaN or Inf."
            raise DataError(message, "Remove those rows.")
        return torch.from_numpy(float_array)
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[1] not in CHANNELS and array.shape[3] in CHANNELS:
        array = np.moveaxis(array, 3, 1)
    return torch.from_numpy(np.ascontiguousarray(array))


def _convert_labels(
    labels: list[np.ndarray], names: np.ndarray | None, path: Path
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Convert arrays of labels to class indices, and return the names of the classes in index order."""
    label_arrays = [y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y for y in labels]
    for y in label_arrays:
        if y.ndim != 1 or (y.dtype.kind == "f" and not np.array_equal(y, np.round(y))):
            raise DataError(
                "The array 'y' must hold one class per sample, as whole numbers or text; in the file "
                f"{str(path)!r}, 'y' has the type {y.dtype} and the shape {y.shape}.",
                "Save the class of each sample. If the targets are real numbers, read the file with "
                "Dataset.from_npz.",
            )
    class_labels = [y if y.dtype.kind == "U" else y.astype(np.int64) for y in label_arrays]
    if len({y.dtype.kind for y in class_labels}) > 1:
        raise DataError(
            f"All labels must be numbers, or all must be text; the file {str(path)!r} has labels of both "
            "kinds.",
            "Save all labels as numbers or all as text.",
        )
    distinct_labels, indices = np.unique(np.concatenate(class_labels), return_inverse=True)
    classes = tuple(map(str, distinct_labels.tolist()))
    stored_class_names = () if names is None else tuple(map(str, names.tolist()))
    if len(stored_class_names) == len(distinct_labels):
        classes = stored_class_names
    elif class_labels[0].dtype.kind != "U" and 0 <= distinct_labels[0] <= distinct_labels[-1] < len(
        stored_class_names
    ):
        classes = tuple(stored_class_names[value] for value in distinct_labels)
    if len(set(classes)) < len(classes):
        raise DataError(
            f"All class names must be different; in the file {str(path)!r}, two classes have the same name.",
            "Rename one of the two classes.",
        )
    array_starts = np.cumsum([len(y) for y in class_labels])[:-1]
    return [
        torch.from_numpy(class_indices.copy()) for class_indices in np.split(indices, array_starts)
    ], classes


def folder(
    request: Request, path: Path, *, size: tuple[int, int] | None = None, gray: bool | None = None
) -> Pool:
    """Read the images in ``path``/<class>/, or in ``path``/train/<class>/ and ``path``/test/<class>/.

    Classes are sorted by name, and the images of a class are sorted by file name. Transparency is removed.
    Files without the file extension of an image are ignored.

    Args:
        request: Not used, but every function that loads a dataset has this parameter.
        path: The folder.
        size: The (height, width) to which images are resized (bicubic), or None to keep their size.
        gray: True to convert images to gray, False to convert images to RGB, or None to keep gray images
            gray and color images RGB.

    Returns:
        The images.

    Raises:
        DataError: If the folder has no images, or if an image cannot be read.
    """
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise DataError(
            f"An image size must be (height, width); got {size}.", "Pass size=(32, 32)."
        )
    split_folders = [path]
    if (path / "train").is_dir() and _subfolders(path / "train"):
        split_folders = [sub for sub in (path / "train", path / "test") if sub.is_dir()]
    files_by_split = []
    for split_folder in split_folders:
        files_with_class = [
            (file, sub.name) for sub in _subfolders(split_folder) for file in sorted(sub.iterdir())
        ]
        image_files_with_class = [
            (f, name) for f, name in files_with_class if f.is_file() and f.suffix.lower() in FORMATS
        ]
        files_by_split.append(
            [(f, name) for f, name in image_files_with_class if not f.name.startswith(".")]
        )
    if not all(files_by_split):
        empty_folder = split_folders[files_by_split.index([])]
        raise DataError(
            f"A folder of images must hold one subfolder per class, as in CLASS/*.png; there are no "
            f"images in the subfolders of {str(empty_folder)!r}.",
            f"Supported formats are {' '.join(FORMATS)}.",
        )
    all_files_with_class = [pair for files_of_split in files_by_split for pair in files_of_split]
    classes = tuple(sorted({name for _, name in all_files_with_class}))
    x = _read_images([file for file, _ in all_files_with_class], size, gray)
    labels = torch.tensor([classes.index(name) for _, name in all_files_with_class])
    train_size = len(files_by_split[0])
    test_set = None
    if len(files_by_split) == 2:
        test_set = Pool(path.name, x[train_size:], labels[train_size:], classes, scale=255.0)
    return Pool(path.name, x[:train_size], labels[:train_size], classes, scale=255.0, test=test_set)


def _subfolders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _read_images(files: list[Path], size: tuple[int, int] | None, gray: bool | None) -> Tensor:
    """Read images into a uint8 tensor (N, C, H, W). All images must have the same size and channels."""
    first_image = _read_image(files[0], size, gray)
    if len(files) * first_image.size > MAX_BYTES:
        raise UnsafeFileError(
            f"All images together may take at most {MAX_BYTES} bytes of memory; {len(files)} images of "
            f"shape {first_image.shape} take more.",
            "Use fewer images, or pass a smaller size=(h, w).",
        )
    images = np.empty((len(files), *first_image.shape), np.uint8)
    for row, file in enumerate(files):
        image = _read_image(file, size, gray)
        if image.shape != first_image.shape:
            raise DataError(
                f"All images must have the same size and number of channels; the image {str(files[0])!r} "
                f"has the shape {first_image.shape}, and the image {str(file)!r} has the shape "
                f"{image.shape}.",
                "Pass size=(height, width) to resize the images. Pass gray=True or gray=False to convert "
                "the colors.",
            )
        images[row] = image
    return torch.from_numpy(images)


def _read_image(file: Path, size: tuple[int, int] | None, gray: bool | None) -> np.ndarray:
    """Read an image as a (C, H, W) uint8 array. An image that is too large is refused before decoding."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=sorted(set(FORMATS.values()))) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                if image.mode not in GRAY_MODES + COLOR_MODES:
                    raise DataError(
                        f"Images must have 8 bits per channel; the image {str(file)!r} has the Pillow mode "
                        f"{image.mode!r}.",
                        "Convert the image to 8 bits per channel.",
                    )
                is_gray = image.mode in GRAY_MODES if gray is None else gray
                converted_image = image.convert("L" if is_gray else "RGB")
        if size is not None:
            converted_image = converted_image.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as problem:
        raise UnsafeFileError(
            f"An image may have at most {MAX_PIXELS} pixels; the image {str(file)!r} has more.",
            "Remove the file, or reduce its size.",
        ) from problem
    except (*UNREADABLE, struct.error) as problem:
        raise DataError(
            f"The file {str(file)!r} has the name of an image, but it cannot be read as an image "
            f"({type(problem).__name__}).",
            "Remove the file, or save it again.",
        ) from problem
    return np.atleast_3d(np.asarray(converted_image)).transpose(2, 0, 1)
