"""The named datasets: the digits and photographs of scikit-learn, MNIST, CIFAR-10, and synthetic points.

Two datasets are synthetic. The dataset "circle" is from Haim et al. (2022), and the dataset "sphere" is from
Refael et al. (2025).
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from residuum.datasets.files import npz
from residuum.datasets.formats import read_cifar_batch, read_idx
from residuum.datasets.selection import (
    DEFAULT_HOLDOUT,
    Pool,
    Request,
    check_divisible,
    make_generator,
)
from residuum.errors import DataError

DIGITS = tuple("0123456789")
ODD = tuple("13579")
PARITY = ("even", "odd")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ANIMALS = CIFAR10[2:8]
KINDS = ("vehicle", "animal")

MNIST_FOLDER = Path("MNIST", "raw")
CIFAR10_FOLDER = Path("cifar-10-batches-py")
SIGNS = ("-1", "+1")
PHOTOS = ("china", "flower")
CROP = 32  # height and width of a crop in pixels
# A crop is omitted if its neighboring pixels (with values 0 to 255) differ by at most this number on average.
SMOOTH = 4.0


def digits(request: Request) -> Pool:
    """Return the 1797 digits of scikit-learn with shape (1, 8, 8) and values in [0, 1].

    Odd digits have label +1, and even digits have label -1.
    """
    from sklearn.datasets import load_digits

    sklearn_digits = load_digits()
    images = torch.from_numpy(sklearn_digits.images.astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(sklearn_digits.target.astype(np.int64))
    return Pool("digits", images, labels, DIGITS, ODD, PARITY, scale=16.0)


def photos(request: Request) -> Pool:
    """Return crops of the two photographs of scikit-learn with shape (3, 32, 32) and values in [0, 1].

    Crops of the photograph of a flower have label +1. Crops of the photograph of China have label -1.

    Crops do not share pixels. Smooth crops, such as crops of the sky, are omitted. All smooth crops look
    similar, so a reconstructed image would match a smooth crop even if the network never saw this crop.

    Args:
        request: Not used.

    Returns:
        The crops.
    """
    from sklearn.datasets import load_sample_images

    crops, labels = [], []
    for label, photo in enumerate(load_sample_images().images):  # an array (427, 640, 3) of bytes
        rows, columns = (size // CROP for size in photo.shape[:2])
        photo_crops = torch.from_numpy(photo[: rows * CROP, : columns * CROP].copy())
        photo_crops = (
            photo_crops.reshape(rows, CROP, columns, CROP, 3).permute(0, 2, 4, 1, 3).flatten(0, 1)
        )
        mean_differences = [
            photo_crops.float().diff(dim=axis).abs().mean((1, 2, 3)) for axis in (-1, -2)
        ]
        crops.append(photo_crops[sum(mean_differences) / 2 > SMOOTH])
        labels += [label] * len(crops[-1])
    return Pool(
        "photos", torch.cat(crops), torch.tensor(labels), PHOTOS, PHOTOS[1:], PHOTOS, scale=255.0
    )


def mnist(request: Request) -> Pool:
    """Read MNIST from torchvision's folder or ``mnist.npz``. Odd digits have label +1, others label -1."""
    dataset_path = _locate_dataset("mnist", request, MNIST_FOLDER)
    if dataset_path.suffix == ".npz":
        return _read_published_npz("mnist", request, dataset_path)

    def read_set(prefix: str, test: Pool | None = None) -> Pool:
        file_name_by_ndim = {3: f"{prefix}-images-idx3-ubyte", 1: f"{prefix}-labels-idx1-ubyte"}
        arrays = (
            read_idx(_find_first_file(dataset_path, file_name, f"{file_name}.gz"), ndim)
            for ndim, file_name in file_name_by_ndim.items()
        )
        images, labels = arrays
        return _make_published_pool("mnist", images[:, None], labels, test)

    return read_set("train", read_set("t10k"))


def cifar10(request: Request) -> Pool:
    """Read CIFAR-10 from python batches or ``cifar10.npz``. Animals have label +1, vehicles label -1."""
    dataset_path = _locate_dataset("cifar10", request, CIFAR10_FOLDER)
    if dataset_path.suffix == ".npz":
        return _read_published_npz("cifar10", request, dataset_path)

    def read_set(file_names: list[str], test: Pool | None = None) -> Pool:
        batches = [
            read_cifar_batch(_find_first_file(dataset_path, file_name)) for file_name in file_names
        ]
        images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        return _make_published_pool("cifar10", images, labels, test)

    return read_set([f"data_batch_{i}" for i in range(1, 6)], read_set(["test_batch"]))


def _make_published_pool(
    name: str, images: np.ndarray, labels: np.ndarray, test: Pool | None
) -> Pool:
    """Check the images and the labels 0..9 of MNIST or CIFAR-10, and return them as a pool."""
    shape, classes, positive, sides = PUBLISHED[name]
    if images.shape[1:] != shape:
        raise DataError(
            f"The images of the dataset {name!r} must have the shape {shape}; the images in the files "
            f"have the shape {images.shape[1:]}.",
            "Download the dataset again.",
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < len(classes):
        raise DataError(
            f"The labels of the dataset {name!r} must be from 0 to 9; the labels in the files are from "
            f"{labels.min()} to {labels.max()}.",
            "Download the dataset again.",
        )
    x, y = torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))
    return Pool(name, x, y, classes, positive, sides, scale=255.0, test=test)


def _read_published_npz(name: str, request: Request, path: Path) -> Pool:
    """Read MNIST or CIFAR-10 from an .npz archive of uint8 images and labels 0..9."""
    pool = npz(request, path)
    if pool.images.dtype != torch.uint8 or not set(pool.classes) <= set(DIGITS):
        raise DataError(
            f"The file {path.name!r} must contain images of type uint8 and labels from 0 to 9; it "
            f"contains images of type {pool.images.dtype} and the labels {', '.join(pool.classes[:12])}.",
            "Save the original images of the dataset, which have the type uint8. To load other data, "
            f"pass the path of the file in place of the name {name!r}.",
        )
    label_of_class = np.array([int(c) for c in pool.classes])

    def convert(archive: Pool, test: Pool | None = None) -> Pool:
        return _make_published_pool(
            name, archive.images.numpy(), label_of_class[archive.labels.numpy()], test
        )

    return convert(pool, None if pool.test is None else convert(pool.test))


def _locate_dataset(name: str, request: Request, layout: Path) -> Path:
    """Return the path of a dataset in the data folder: the folder ``layout`` or the file ``<name>.npz``."""
    root = request.root
    if root is not None:
        folder, archive = root / layout, root / f"{name}.npz"
        if folder.is_dir() and (any(folder.iterdir()) or not archive.is_file()):
            return folder
        if archive.is_file():
            return archive
    failure = "no data folder was given" if root is None else f"{str(root)!r} holds neither"
    raise DataError(
        f"The data folder must hold the dataset {name!r} as the folder '{layout.as_posix()}/' of torchvision "
        f"or as the file '{name}.npz' with x_train, y_train, x_test and y_test; {failure}.",
        "Pass the data folder with root= or --data-root, or set RESIDUUM_DATA.",
    )


def _find_first_file(folder: Path, *names: str) -> Path:
    """Return the path of the first of the named files that exists in the folder, or raise ``DataError``."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"The folder of a dataset must contain all of its files; the folder {str(folder)!r} has no "
        f"{' or '.join(names)}.",
        "Download the dataset again, or pass another folder with root=, --data-root or RESIDUUM_DATA.",
    )


PUBLISHED = {
    "mnist": ((1, 28, 28), DIGITS, ODD, PARITY),
    "cifar10": ((3, 32, 32), CIFAR10, ANIMALS, KINDS),
}


def circle(request: Request) -> Pool:
    """Return n equally spaced points x_i on the unit circle with alternating labels y_i. By default n is 20.

        x_i = (cos a_i, sin a_i),   a_i = a + 2 pi i / n,   y_i = (-1)^i,   a ~ U[0, 2 pi)

    The seed determines the angle a. A held-out point is halfway between two neighboring training points:
    x_{i + 1/2} with label y_i.

    Args:
        request: Number of points and seed.

    Returns:
        The points.
    """
    n = 20 if request.n is None else request.n
    check_divisible(n, 2)
    generator = make_generator(request.seed)
    start_angle = 2 * math.pi * torch.rand((), dtype=torch.float64, generator=generator)
    positions = torch.arange(n, dtype=torch.float64)

    def points(position: Tensor) -> Tensor:
        angle = start_angle + 2 * math.pi * position / n
        return torch.stack((angle.cos(), angle.sin()), dim=1)

    labels = (positions.long() + 1) % 2
    holdout = Pool("circle", points(positions + 0.5), labels, SIGNS)
    return Pool("circle", points(positions), labels, SIGNS, center=False, test=holdout)


def sphere(request: Request, *, dim: int = 784) -> Pool:
    """Return random points on the unit sphere. The label of a point is the sign of its first coordinate.

    The points are uniformly distributed, and their number is 500 by default. Half of the points have a
    positive first coordinate: if the first coordinate of a point has the wrong sign, the point is reflected.
    Held-out points are drawn in the same way.

    Args:
        request: Number of points and seed.
        dim: Number of coordinates of a point.

    Returns:
        The points.

    Raises:
        DataError: If ``dim`` is less than 2.
    """
    n = 500 if request.n is None else request.n
    check_divisible(n, 2)
    if dim < 2:
        raise DataError(
            f"Points on a sphere must have at least 2 coordinates; got dim={dim}.", "Pass dim=784."
        )
    generator = make_generator(request.seed)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, dim, dtype=torch.float64, generator=generator)
        x /= x.norm(dim=1, keepdim=True)
        labels = (torch.arange(count) + 1) % 2
        x[:, 0] = x[:, 0].abs() * (2 * labels - 1)
        return x, labels

    x, labels = draw(n)
    holdout = Pool("sphere", *draw(request.holdout or DEFAULT_HOLDOUT), SIGNS)
    return Pool("sphere", x, labels, SIGNS, center=False, test=holdout)
