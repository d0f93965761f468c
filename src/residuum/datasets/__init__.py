"""Datasets by name or path, chosen, balanced and preprocessed the way the papers do it.

A new one is a function from a :class:`Request` to a :class:`Pool` and one line in ``DATASETS``.
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
    """n training samples and a disjoint held-out set, preprocessed alike.

    name: a key of ``DATASETS``, or the path of an .npz archive or of a folder of images.
    n: training samples, equally many of each label; by default all there are, or half of them where
        the source has no test part.
    seed: without one the first samples of each label in file order, with one a random choice.
    root: folder of the named sets' files, by default $RESIDUUM_DATA.
    task: "binary" (-1/+1), "multiclass" (0..C-1) or "regression" (-1.0/+1.0).
    holdout: held-out samples, by default up to 2000, from the test part where there is one and from
        the remaining samples otherwise, balanced where possible, never equal to a training image.
    positive: the classes called +1, where the source's own grouping is not wanted or not there.
    center: subtract the mean of the training samples from both sets (recorded in ``mean``).
    options: the source's own, such as ``dim`` of the sphere or ``size`` and ``gray`` of a folder.
    """
    source = _find(name)
    _check_options(str(name), source, options)
    if n is not None and n < 2:
        raise DataError(f"A training set needs at least 2 samples; got n={n}.", "Use n=100.")
    if holdout is not None and holdout < 1:
        raise DataError(
            f"A held-out control needs at least 1 sample; got holdout={holdout}.",
            "Leave holdout out to have as many as there are.",
        )
    if not dtype.is_floating_point:
        raise DataError(f"Samples are floating numbers; got dtype={dtype}.", "Use torch.float64.")
    where = root if root is not None else os.environ.get(ROOT_VARIABLE) or None
    request = Request(n, seed, None if where is None else Path(where).expanduser(), holdout)
    try:
        pool = source(request, **options)
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise DataError(
            f"The files of {str(name)!r} must be readable; {problem.filename!r} is not ({reason}).",
            "Check its permissions.",
        ) from problem
    names = (positive,) if isinstance(positive, str | int) else tuple(positive)
    return split_pool(pool, request, task=task, positive=names, center=center, dtype=dtype)


def _find(name: str | Path) -> Source:
    """The source called ``name``; a name wins over a file of the same name."""
    if isinstance(name, str) and name in DATASETS:
        return DATASETS[name]
    path = Path(name).expanduser()
    if path.is_dir():
        return partial(folder, path=path.resolve())
    if path.suffix.lower() == ".npz":
        return partial(npz, path=path)
    if path.is_file():
        raise DataError(
            f"A data file must be an .npz archive; got {str(name)!r}.",
            "Save it with numpy.savez(path, x=..., y=...), or give a folder of images.",
        )
    if os.sep in str(name):
        raise DataError(f"No data file or folder at {str(name)!r}.", "Check the path.")
    raise DataError(
        f"No dataset {str(name)!r}, nor an .npz archive or folder of that name.",
        did_you_mean(str(name), tuple(DATASETS)),
    )


def _check_options(name: str, source: Source, options: dict[str, Any]) -> None:
    parameters = inspect.signature(source).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "path"]
    for option in options.keys() - known:
        raise DataError(
            f"Dataset {name!r} takes no option {option!r}.",
            did_you_mean(option, known) if known else "Leave it out.",
        )


DATASETS: dict[str, Source] = {
    source.__name__: source for source in (circle, cifar10, digits, mnist, photos, sphere)
}
