"""Does exposure flag training images by the activation boundaries that they cause?

    python -m experiments.exposure_kinks FOLDER --device cuda

20 networks are trained on 100 CIFAR images each. Exposure is measured for the training images, for a set of
which half are training images, and for images that the network never saw. FOLDER is made by ``python -m
experiments.image_data SOURCE FOLDER``. Results: ``experiments/results/exposure_kinks.json``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from experiments import RESULTS
from experiments.exposure_common import SEEDS_FILE, load_split, read_seeds, run_cases
from experiments.programs import run_program
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.records.rundir import environment
from residuum.risk.run import expose
from residuum.training import TrainingConfig, train

KINKED, KINK_RECORDS, KINK_HIDDEN = 20, 100, "1000-1000"
KINK_TRAINING = TrainingConfig(steps=5000, dtype="float32")


def measure_network(
    seed: int, folder: str, pool: str, device: str, hidden: str, steps: int
) -> dict[str, Any]:
    """Train a network on 100 CIFAR images and count the flagged images of three sets.

    Args:
        seed: Of the images and of the training.
        folder: Folder of the images.
        pool: "claim" or "tune".
        device: Device of the training and of exposure.
        hidden: Widths of the hidden layers.
        steps: Training steps.

    Returns:
        Counts for training images (members), for other images (strangers), and for both in one set (half).
    """
    torch.set_num_threads(1)
    # Twice as many images are drawn. One half is trained on. The other half has the same labels.
    split = load_split("cifar10", 2 * KINK_RECORDS, seed, folder, pool, center=False, holdout=2000)
    y = split.train.y
    order = torch.cat([(y == label).nonzero()[:, 0] for label in y.unique()])
    members = order.reshape(2, -1)[:, : KINK_RECORDS // 2].flatten()
    non_members = order.reshape(2, -1)[:, KINK_RECORDS // 2 :].flatten()
    mean = split.train.x[members].mean(0)
    x, holdout = split.train.x - mean, Dataset(split.holdout.x - mean, split.holdout.y)
    arch = f"mlp:{x[0].numel()}-{hidden}-1"
    config = KINK_TRAINING.changed(seed=seed, steps=steps)
    start = time.time()
    state = train(arch, Dataset(x[members], y[members]), config, device=device)
    train_seconds = time.time() - start
    released = Network(state.theta, arch, tuple(x.shape[1:]))
    sets = {
        "members": members,
        "half": torch.cat([members, non_members]),
        "strangers": non_members,
    }
    start = time.time()
    exposures = {
        name: expose(released, Dataset(x[rows], y[rows]), holdout, device=device)
        for name, rows in sets.items()
    }
    flagged = {name: exposure.kink_q <= exposure.level for name, exposure in exposures.items()}
    dual = exposures["half"].dual_p <= 0.01
    n = KINK_RECORDS
    return {
        "seed": seed,
        "loss": state.history[-1]["loss"],
        "train_seconds": round(train_seconds, 1),
        "expose_seconds": round((time.time() - start) / 3, 2),
        "rank": exposures["members"].rank,
        "members called": int(flagged["members"].sum()),
        "strangers called": int(flagged["strangers"].sum()),
        "half: members called": int(flagged["half"][:n].sum()),
        "half: strangers called": int(flagged["half"][n:].sum()),
        "kinks of members": float(exposures["members"].kinks.sum(1).double().mean()),
        "kinks of strangers": float(exposures["strangers"].kinks.sum(1).double().mean()),
        "dual p <= 0.01: members": int(dual[:n].sum()),
        "dual p <= 0.01: strangers": int(dual[n:].sum()),
        "median reach_ncc: members": float(exposures["members"].reach_ncc.median()),
        "median reach_ncc: strangers": float(exposures["strangers"].reach_ncc.median()),
    }


def run(folder: Path, pool: str, device: str, workers: int, hidden: str, steps: int) -> None:
    """Measure twenty networks. Other settings than those of the claim go to a file of their own."""
    seeds = read_seeds(SEEDS_FILE)["kinks"] if pool == "claim" else [9901, 9902]
    jobs = {
        f"{k:02}": (seed, str(folder), pool, device, hidden, steps) for k, seed in enumerate(seeds)
    }
    head = {
        "pool": pool,
        "seeds": seeds,
        "hidden": hidden,
        "steps": steps,
        "environment": environment(device),
    }
    is_claim = (pool, hidden, steps) == ("claim", KINK_HIDDEN, KINK_TRAINING.steps)
    name = "exposure_kinks" if is_claim else "exposure_kinks-tuning"
    run_cases(RESULTS / f"{name}.json", head, jobs, measure_network, workers)


def main() -> int:
    """Measure the networks that have no result."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("folder", type=Path, help="folder of the images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--pool", choices=("claim", "tune"), default="claim")
    parser.add_argument("--hidden", default=KINK_HIDDEN, help="widths of the hidden layers")
    parser.add_argument("--steps", type=int, default=KINK_TRAINING.steps, help="training steps")
    options = parser.parse_args()
    run(
        options.folder,
        options.pool,
        options.device,
        options.jobs,
        options.hidden,
        options.steps,
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
