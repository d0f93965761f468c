"""Is the exposure score of a record higher if the network was trained on the record?

    python -m experiments.exposure_left_out FOLDER --jobs 16

For 20 records of each of three networks, the same network is trained without the record. FOLDER is made by
``python -m experiments.image_data SOURCE FOLDER``. Results: ``experiments/results/exposure_left_out.json``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import RESULTS
from experiments.exposure_common import load_split, read_seeds, rounded, run_cases
from experiments.programs import run_program
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.records.exposure import Exposure
from residuum.records.rundir import environment
from residuum.risk.run import expose
from residuum.training import TrainingConfig, train

LEFT_OUT = {"digits": ("digits", 40, "100-100"), "mnist": ("mnist", 50, "200-200")}
LEFT_RECORDS, LEFT_SEEDS, LEFT_STEPS = 20, 3, 1500


def without(data: Dataset, index: int) -> tuple[Dataset, Dataset]:
    """Return the records without one of them, and all records with that one as the last."""
    order = [i for i in range(len(data)) if i != index]
    smaller = Dataset(data.x[order], data.y[order])
    order = [*order, index]
    return smaller, Dataset(data.x[order], data.y[order])


def measure_network(case: str, seed: int, folder: str, pool: str) -> dict[str, Any]:
    """Return the exposure of records that were trained on, and of the same records left out of training."""
    torch.set_num_threads(1)
    name, n, hidden = LEFT_OUT[case]
    split = load_split(name, n, seed, folder, pool)
    arch = f"mlp:{split.train.x[0].numel()}-{hidden}-1"
    config = TrainingConfig(steps=LEFT_STEPS, dtype="float32", seed=seed)

    def exposed(data: Dataset, records: Dataset) -> Exposure:
        return expose(Network(train(arch, data, config).theta, arch), records)

    inside = exposed(split.train, split.train)
    indices = np.random.default_rng(seed).choice(n, LEFT_RECORDS, replace=False).tolist()
    names = ("score", "own_over_misfit", "multiplier", "heard", "reach", "margin", "dual")
    entry: dict[str, Any] = {"seed": seed, "n": n, "records": indices, "in": {}, "out": {}}
    outside = [exposed(*without(split.train, i)) for i in indices]
    for name in names:
        entry["in"][name] = rounded(getattr(inside, name)[indices])
        entry["out"][name] = rounded(torch.stack([getattr(row, name)[-1] for row in outside]))
    return entry


def run(folder: Path, pool: str, workers: int) -> None:
    """Measure twenty records of three networks of each kind."""
    seeds = read_seeds()["leftout"] if pool == "claim" else [9801]
    jobs = {
        f"{case}/{k}": (case, seed, str(folder), pool)
        for case in LEFT_OUT
        for k, seed in enumerate(seeds)
    }
    head = {"pool": pool, "seeds": seeds, "environment": environment("cpu")}
    name = "exposure_left_out" if pool == "claim" else "exposure_left_out-tuning"
    run_cases(RESULTS / f"{name}.json", head, jobs, measure_network, workers)


def main() -> int:
    """Measure the networks that have no result."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("folder", type=Path, help="folder of the images")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--pool", choices=("claim", "tune"), default="claim")
    options = parser.parse_args()
    run(options.folder, options.pool, options.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
