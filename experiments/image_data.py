"""Split MNIST and CIFAR-10 into images for claims and images for tuning.

    python -m experiments.image_data SOURCE FOLDER

SOURCE holds ``mnist.npz`` and ``cifar10.npz`` with the arrays x_train, y_train, x_test and y_test.
FOLDER/claim gets rows 0 to 1999 of the training images and of the test images. FOLDER/tune gets rows 2000 to
2999 of the training images and rows 2000 to 3999 of the test images. No claim uses an image of FOLDER/tune.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from experiments.programs import parse_paths, run_program


def split_images(source: Path, folder: Path) -> None:
    """Write two archives of each data set."""
    for name in ("cifar10", "mnist"):
        images = np.load(source / f"{name}.npz", allow_pickle=False)
        for pool, train_rows, test_rows in (
            ("claim", slice(0, 2000), slice(0, 2000)),
            ("tune", slice(2000, 3000), slice(2000, 4000)),
        ):
            (folder / pool).mkdir(parents=True, exist_ok=True)
            rows = {"train": train_rows, "test": test_rows}
            arrays = {f"{a}_{b}": images[f"{a}_{b}"][rows[b]] for a in "xy" for b in rows}
            np.savez_compressed(folder / pool / f"{name}.npz", **arrays)


if __name__ == "__main__":
    source, folder = parse_paths(__doc__, "SOURCE", "FOLDER")
    sys.exit(run_program(lambda: split_images(source, folder)))
