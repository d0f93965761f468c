"""Load the samples of the exposure experiments, read their seeds, and measure cases without a result."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from experiments import RESULTS
from residuum.datasets import load_dataset
from residuum.errors import InputError
from residuum.records import Split, write_json

SEEDS_FILE = RESULTS / "exposure-seeds.json"  # of kinks and epsilon
AGAIN_FILE = RESULTS / "exposure-seeds-again.json"  # of ranking and records left out


def bundled_table(name: str, folder: Path) -> str:
    """Return the path of an .npz file with a table of scikit-learn and two classes.

    Args:
        name: "cancer" has 30 standardized columns. "diabetes" has 10 columns, each cut at its quintiles, and
            thus 50 columns of 0 and 1.
        folder: Folder of the file. The file is written if it does not exist.

    Returns:
        The path as text.
    """
    from sklearn import datasets

    path = folder / f"{name}.npz"
    if not path.exists():
        table = getattr(datasets, f"load_{ {'cancer': 'breast_cancer'}.get(name, name) }")()
        x, y = table.data, table.target
        if name == "cancer":
            x = (x - x.mean(0)) / x.std(0)
        else:
            quintiles = [np.quantile(column, (0.2, 0.4, 0.6, 0.8)) for column in x.T]
            bins = [
                np.searchsorted(edges, column) for edges, column in zip(quintiles, x.T, strict=True)
            ]
            x, y = np.eye(5)[np.stack(bins, 1)].reshape(len(x), -1), (y > np.median(y)).astype(int)
        np.savez(path, x=x, y=y)
    return str(path)


def load_split(data: str, n: int, seed: int, folder: str, pool: str, **more: Any) -> Split:
    """Load the samples of a victim from the pool of claims or of tuning."""
    if data in ("cancer", "diabetes"):
        data = bundled_table(data, Path(folder))
    return load_dataset(data, n, seed=seed, root=str(Path(folder) / pool), **more)


def run_cases(
    path: Path,
    head: dict[str, Any],
    jobs: dict[str, tuple[Any, ...]],
    work: Callable[..., dict[str, Any]],
    workers: int,
) -> dict[str, Any]:
    """Measure all cases that the file does not have, in parallel, and write the file after each.

    Args:
        path: File of the results.
        head: What the file says about the whole run. It must not change between two runs.
        jobs: Arguments of ``work`` by the name of the case.
        work: Returns the result of a case.
        workers: Number of processes.

    Returns:
        The content of the file.
    """
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {**head, "cases": {}}
    if {k: done.get(k) for k in head if k != "environment"} != {
        k: json.loads(json.dumps(v)) for k, v in head.items() if k != "environment"
    }:
        raise InputError(f"{path.name} has results of another run.", "Move the file away.")
    missing = {key: job for key, job in jobs.items() if key not in done["cases"]}
    start = time.time()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as processes:
        waiting = {processes.submit(work, *job): key for key, job in missing.items()}
        for finished in as_completed(waiting):
            done["cases"][waiting[finished]] = finished.result()
            done["cases"] = dict(sorted(done["cases"].items()))
            write_json(path, done)
            print(
                f"{waiting[finished]}: {len(done['cases'])} done, {time.time() - start:.0f} s",
                flush=True,
            )
    return done


def read_seeds(path: Path = AGAIN_FILE) -> dict[str, list[int]]:
    """Return the seeds of a claim by name."""
    return dict(json.loads(path.read_text())["seeds"])


def rounded(values: Tensor) -> list[float | None]:
    """Return values with five digits, None for those that are not finite."""
    return [round(v, 5) if math.isfinite(v) else None for v in values.double().tolist()]
