"""Is the lower bound of epsilon below the epsilon that DP-SGD guarantees?

    python -m experiments.exposure_epsilon --jobs 2

20 networks each are trained with DP-SGD at epsilon 1, 4 and 8 and without privacy, with 400 canaries. Needs
opacus. Results: ``experiments/results/exposure_epsilon.json``.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import numpy as np
import torch

from experiments import RESULTS
from experiments.exposure_common import SEEDS_FILE, read_seeds, run_cases
from experiments.programs import run_program
from residuum.datasets import load_dataset
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.records.rundir import environment
from residuum.risk.run import expose
from residuum.risk.stages import Canaries
from residuum.training import TrainingConfig, train

EPSILONS, EPSILON_RUNS, CANARIES = (1.0, 4.0, 8.0, math.inf), 20, 400


def measure_network(epsilon: float, seed: int) -> dict[str, Any]:
    """Train on digits with random canaries by DP-SGD, and bound epsilon. Infinity is plain training."""
    from residuum.defenses import Training
    from residuum.defenses.catalog import use_dp_sgd
    from residuum.defenses.loops import Job, train_privately

    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    split = load_dataset("digits", 500 + CANARIES, seed=seed, holdout=100)
    order = torch.from_numpy(rng.permutation(500 + CANARIES))
    x, y = split.train.x[order], split.train.y[order]
    is_flipped = torch.from_numpy(rng.random(CANARIES) < 0.5)  # random labels of the canaries
    inserted = torch.from_numpy(rng.random(CANARIES) < 0.5)
    labels = torch.where(is_flipped, -y[:CANARIES], y[:CANARIES])
    canaries = Dataset(x[:CANARIES], labels)
    data = Dataset(
        torch.cat([x[:CANARIES][inserted], x[CANARIES:]]),
        torch.cat([labels[inserted], y[CANARIES:]]),
    )
    arch = "mlp:64-100-100-1"
    descent = TrainingConfig(method="gd", steps=3000, lr=0.5, momentum=0.9, seed=seed)
    privacy: dict[str, Any] = {}
    delta = 1 / (10 * len(data))
    if math.isinf(epsilon):
        theta = train(arch, data, descent).theta
    else:
        training = use_dp_sgd(Training(descent, descent, len(data)), epsilon, seed)
        state, privacy = train_privately(
            Job(arch, data, training.config, "binary"), epsilon=epsilon
        )
        theta = state.theta
    result = expose(
        Network(theta, arch), data, canaries=Canaries(canaries, inserted, 0.95, delta)
    ).canaries
    assert result is not None
    pure = expose(Network(theta, arch), data, canaries=Canaries(canaries, inserted)).canaries
    assert pure is not None
    return {
        "seed": seed,
        "delta": delta,
        "spent": privacy.get("epsilon"),
        "bound": result.epsilon,
        "bound at delta 0": pure.epsilon,
        "auc": result.auc,
        "statistic": result.statistic,
        "guesses": result.guesses,
        "right": result.right,
        "true positives": {f"{p.rate:g}": p.true_rate for p in result.points},
    }


def run(workers: int, pool: str) -> None:
    """Measure twenty networks for every epsilon."""
    jobs, used = {}, {}
    for value in EPSILONS:
        seeds = read_seeds(SEEDS_FILE)[f"epsilon-{value:g}"] if pool == "claim" else [9701, 9702]
        used[f"{value:g}"] = seeds
        jobs |= {f"{value:g}/{k:02}": (value, seed) for k, seed in enumerate(seeds)}
    head = {"pool": pool, "seeds": used, "canaries": CANARIES, "environment": environment("cpu")}
    name = "exposure_epsilon" if pool == "claim" else "exposure_epsilon-tuning"
    run_cases(RESULTS / f"{name}.json", head, jobs, measure_network, workers)


def main() -> int:
    """Measure the networks that have no result."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--pool", choices=("claim", "tune"), default="claim")
    options = parser.parse_args()
    run(options.jobs, options.pool)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
