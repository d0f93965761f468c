"""The named sets: digits and photos that scikit-learn brings, MNIST and CIFAR-10 as people have them on
disk, and points drawn on purpose.

The circle is that of Haim et al. (2022), the sphere that of Refael et al. (2025).
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from residuum.datasets.files import npz
from residuum.datasets.formats import read_cifar_batch, read_idx
from residuum.datasets.selection import DEFAULT_HOLDOUT, Pool, Request, check_divisible, seeded
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
CROP = 32  # pixels
SMOOTH = 4.0  # of 255: mean difference of neighboring pixels up to which a crop is left out


def digits(request: Request) -> Pool:
    """scikit-learn's bundled 1797 digits, (1, 8, 8) in [0, 1]; odd +1, even -1."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    return Pool("digits", images, labels, DIGITS, ODD, PARITY, scale=16.0)


def photos(request: Request) -> Pool:
    """32 x 32 crops of scikit-learn's two bundled photographs, (3, 32, 32) in [0, 1]; flower +1.

    Crops lie side by side and share no pixel. Smooth ones, sky and what is out of focus, are left
    out: any of them looks like any other, and would match a candidate without having been seen.
    """
    from sklearn.datasets import load_sample_images

    crops, labels = [], []
    for label, photo in enumerate(load_sample_images().images):  # (427, 640, 3) bytes each
        rows, columns = (size // CROP for size in photo.shape[:2])
        tiles = torch.from_numpy(photo[: rows * CROP, : columns * CROP].copy())
        tiles = tiles.reshape(rows, CROP, columns, CROP, 3).permute(0, 2, 4, 1, 3).flatten(0, 1)
        steps = [tiles.float().diff(dim=axis).abs().mean((1, 2, 3)) for axis in (-1, -2)]
        crops.append(tiles[sum(steps) / 2 > SMOOTH])
        labels += [label] * len(crops[-1])
    return Pool(
        "photos", torch.cat(crops), torch.tensor(labels), PHOTOS, PHOTOS[1:], PHOTOS, scale=255.0
    )


def mnist(request: Request) -> Pool:
    """MNIST from torchvision's folder or ``mnist.npz``, (1, 28, 28) in [0, 1]; odd +1, even -1."""
    place = _locate("mnist", request, MNIST_FOLDER)
    if place.suffix == ".npz":
        return _from_npz("mnist", request, place)

    def part(prefix: str, test: Pool | None = None) -> Pool:
        names = {3: f"{prefix}-images-idx3-ubyte", 1: f"{prefix}-labels-idx1-ubyte"}
        files = (read_idx(_existing(place, n, f"{n}.gz"), ndim) for ndim, n in names.items())
        images, labels = files
        return _ten_classes("mnist", images[:, None], labels, test)

    return part("train", part("t10k"))


def cifar10(request: Request) -> Pool:
    """CIFAR-10 from its python batches or ``cifar10.npz``, (3, 32, 32); animals +1, vehicles -1."""
    place = _locate("cifar10", request, CIFAR10_FOLDER)
    if place.suffix == ".npz":
        return _from_npz("cifar10", request, place)

    def part(names: list[str], test: Pool | None = None) -> Pool:
        batches = [read_cifar_batch(_existing(place, name)) for name in names]
        images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        return _ten_classes("cifar10", images, labels, test)

    return part([f"data_batch_{i}" for i in range(1, 6)], part(["test_batch"]))


def _ten_classes(name: str, images: np.ndarray, labels: np.ndarray, test: Pool | None) -> Pool:
    """The pool of a published set from its bytes (N, *shape) and its labels 0..9."""
    shape, classes, positive, sides = PUBLISHED[name]
    if images.shape[1:] != shape:
        raise DataError(
            f"Images of {name!r} have shape {shape}; got {images.shape[1:]}.",
            "Check that the files are the published ones.",
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < len(classes):
        raise DataError(
            f"Labels of {name!r} run from 0 to 9; got {labels.min()} to {labels.max()}.",
            "Check that the files are the published ones.",
        )
    x, y = torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))
    return Pool(name, x, y, classes, positive, sides, scale=255.0, test=test)


def _from_npz(name: str, request: Request, path: Path) -> Pool:
    """The same from an archive of uint8 images and labels 0..9."""
    pool = npz(request, path)
    if pool.images.dtype != torch.uint8 or not set(pool.classes) <= set(DIGITS):
        raise DataError(
            f"{path.name!r} must hold uint8 images and labels 0 to 9; it holds "
            f"{pool.images.dtype} and the labels {', '.join(pool.classes[:12])}.",
            "Save the published bytes, or give the file's path instead of the name.",
        )
    values = np.array([int(c) for c in pool.classes])

    def part(found: Pool, test: Pool | None = None) -> Pool:
        return _ten_classes(name, found.images.numpy(), values[found.labels.numpy()], test)

    return part(pool, None if pool.test is None else part(pool.test))


def _locate(name: str, request: Request, layout: Path) -> Path:
    """The folder ``layout`` or the archive ``<name>.npz`` in the data folder, whichever is there."""
    root = request.root
    if root is not None:
        folder, archive = root / layout, root / f"{name}.npz"
        if folder.is_dir() and (any(folder.iterdir()) or not archive.is_file()):
            return folder
        if archive.is_file():
            return archive
    where = "no data folder was given" if root is None else f"{str(root)!r} holds neither"
    raise DataError(
        f"Dataset {name!r} is read from '{layout.as_posix()}/' (torchvision's layout) or "
        f"'{name}.npz' (x_train, y_train, x_test, y_test) in the data folder; {where}.",
        "Give the folder with root= or --data-root, or set RESIDUUM_DATA.",
    )


def _existing(folder: Path, *names: str) -> Path:
    """The first of ``names`` that is a file in ``folder``."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"The files of a dataset must be complete; {str(folder)!r} has no {' or '.join(names)}.",
        "Download it again, or name another folder with root=, --data-root or RESIDUUM_DATA.",
    )


PUBLISHED = {
    "mnist": ((1, 28, 28), DIGITS, ODD, PARITY),
    "cifar10": ((3, 32, 32), CIFAR10, ANIMALS, KINDS),
}


def circle(request: Request) -> Pool:
    """n equally spaced points of the unit circle with alternating labels (20 unless told).

        x_i = (cos a_i, sin a_i),   a_i = a + 2 pi i / n,   y_i = (-1)^i,   a ~ U[0, 2 pi) by seed

    Held out are the n points half a spacing further, x_{i + 1/2} with label y_i: the points of the
    circle farthest from every training point.
    """
    n = 20 if request.n is None else request.n
    check_divisible(n, 2)
    start = 2 * math.pi * torch.rand((), dtype=torch.float64, generator=seeded(request.seed))
    steps = torch.arange(n, dtype=torch.float64)

    def at(step: Tensor) -> Tensor:
        angle = start + 2 * math.pi * step / n
        return torch.stack((angle.cos(), angle.sin()), dim=1)

    labels = (steps.long() + 1) % 2
    held = Pool("circle", at(steps + 0.5), labels, SIGNS)
    return Pool("circle", at(steps), labels, SIGNS, center=False, test=held)


def sphere(request: Request, *, dim: int = 784) -> Pool:
    """n points uniform on S^{dim-1}, labeled by the sign of the first coordinate (500 unless told).

    Half of the points have each sign: a uniform point given its sign is a uniform point reflected
    to that side. Held-out points are drawn the same way.
    """
    n = 500 if request.n is None else request.n
    check_divisible(n, 2)
    if dim < 2:
        raise DataError(f"A sphere needs dim >= 2; got dim={dim}.", "Use dim=784.")
    generator = seeded(request.seed)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, dim, dtype=torch.float64, generator=generator)
        x /= x.norm(dim=1, keepdim=True)
        labels = (torch.arange(count) + 1) % 2
        x[:, 0] = x[:, 0].abs() * (2 * labels - 1)
        return x, labels

    x, labels = draw(n)
    held = Pool("sphere", *draw(request.holdout or DEFAULT_HOLDOUT), SIGNS)
    return Pool("sphere", x, labels, SIGNS, center=False, test=held)
