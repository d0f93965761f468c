"""Load datasets by name or path.

Samples are selected, balanced over the labels and preprocessed as in the papers that published the attacks.

To add a dataset, write a function that takes a :class:`Request` and returns a :class:`Pool`. Then add the
function to ``DATASETS``.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from residuum.datasets.files import folder, npz
from residuum.datasets.selection import Pool, Request, Source, split_pool
from residuum.datasets.sources import cifar10, circle, digits, mnist, photos, sphere
from residuum.errors import DataError, did_you_mean
from residuum.records import Split

ROOT_VARIABLE = "RESIDUUM_DATA"


def load_dataset(
    name: str | Path,
    n: int | None = None,
    *,
    seed: int | None = None,
    root: str | Path | None = None,
    task: str = "binary",
    holdout: int | None = None,
    positive: Sequence[str | int] = (),
    center: bool = True,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Split:
    """Load training samples and a disjoint held-out set with the same preprocessing.

    Args:
        name: A key of ``DATASETS``, or the path of an .npz archive or of a folder of images.
        n: Number of training samples. The training set has the same number of samples of each label. By
            default, as many samples as possible are used, or half of them if the source has no test set.
        seed: Seed of the random selection of samples. If None, the first samples of each label in file order
            are used.
        root: Folder with the files of the named datasets, by default $RESIDUUM_DATA.
        task: "binary" (-1/+1), "multiclass" (0..C-1) or "regression" (-1.0/+1.0).
        holdout: Number of held-out samples, by default up to 2000. Held-out samples come from the test set if
            the source has a test set, otherwise from the remaining samples. Held-out samples are balanced if
            possible. No held-out sample is equal to a training sample.
        positive: The classes with label +1. By default, the source chooses these classes.
        center: Whether to subtract the mean of the training samples from training and held-out samples. The
            mean is stored in the attribute ``mean`` of both sets.
        dtype: Number format of the samples.
        **options: Options of one dataset only, such as ``dim`` of the dataset "sphere", or ``size`` and
            ``gray`` of a folder of images.

    Returns:
        Training samples and held-out samples.

    Raises:
        DataError: If the dataset does not exist, cannot be read or has too few samples.

    Example:
        >>> split = load_dataset("digits", 100)
        >>> len(split.train)
        100
    """
    load_samples = _find_loader(name)
    _check_options(str(name), load_samples, options)
    if n is not None and n < 2:
        raise DataError(f"A training set must have at least 2 samples; got n={n}.", "Pass n=100.")
    if holdout is not None and holdout < 1:
        raise DataError(
            f"A held-out set must have at least 1 sample; got holdout={holdout}.",
            "Pass holdout=100, or omit holdout to get up to 2000 held-out samples.",
        )
    if not dtype.is_floating_point:
        raise DataError(
            f"Samples must have a floating-point type; got dtype={dtype}.",
            "Pass dtype=torch.float64.",
        )
    data_folder = root if root is not None else os.environ.get(ROOT_VARIABLE) or None
    root = None if data_folder is None else Path(data_folder).expanduser()
    request = Request(n, seed, root, holdout)
    try:
        all_samples = load_samples(request, **options)
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise DataError(
            f"The files of the dataset {str(name)!r} must be readable; reading the file "
            f"{problem.filename!r} failed ({reason}).",
            "Check the permissions of the file.",
        ) from problem
    positive_classes = (positive,) if isinstance(positive, str | int) else tuple(positive)
    return split_pool(
        all_samples, request, task=task, positive=positive_classes, center=center, dtype=dtype
    )


def _find_loader(name: str | Path) -> Source:
    """Return the function that loads a dataset. ``name`` is a key of ``DATASETS`` or else a path."""
    if isinstance(name, str) and name in DATASETS:
        return DATASETS[name]
    path = Path(name).expanduser()
    if path.is_dir():
        return partial(folder, path=path.resolve())
    if path.suffix.lower() == ".npz":
        return partial(npz, path=path)
    if path.is_file():
        raise DataError(
            f"A dataset that is read from a file must be an .npz archive; got {str(name)!r}.",
            "Save it with numpy.savez(path, x=..., y=...), or pass a folder of images.",
        )
    if os.sep in str(name):
        raise DataError(
            f"A data file must exist; there is no file or folder at the path {str(name)!r}.",
            "Check the path.",
        )
    raise DataError(
        "A dataset must be the name of a built-in dataset, or the path of an .npz archive or a folder of "
        f"images; got {str(name)!r}.",
        did_you_mean(str(name), tuple(DATASETS)),
    )


def _check_options(name: str, source: Source, options: dict[str, Any]) -> None:
    source_parameters = inspect.signature(source).parameters.values()
    option_names = [
        p.name for p in source_parameters if p.kind is p.KEYWORD_ONLY and p.name != "path"
    ]
    for option in options.keys() - option_names:
        raise DataError(
            f"The dataset {name!r} does not have the option {option!r}.",
            did_you_mean(option, option_names) if option_names else "Omit the option.",
        )


DATASETS: dict[str, Source] = {
    source.__name__: source for source in (circle, cifar10, digits, mnist, photos, sphere)
}
