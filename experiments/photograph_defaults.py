"""Count the photographs that the default settings recover: ``python -m experiments.photograph_defaults``.

Networks are trained on 100 or 500 CIFAR images and attacked with the default settings for photographs.
Counts are one-to-one matches by NCC, and each is shown with the count for as many held-out images. The
rows "with equal margins" were measured with commit d3d1e40, the last one that had that term. The script
needs ``--root``, a folder with ``cifar10.npz``, and a GPU for the full size.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import residuum as rs
from experiments.counting import count_matches, name_held_out
from residuum.similarity import ncc

SIZES, SEEDS = (100, 500), (9601, 9602, 9603)
HIDDEN, TRAINING_STEPS, STEPS, HELD_OUT = "1000-1000", 5000, 6000, 1000
PRIORS = (("sparse-gradients", 60.0),)
ARM = "without"  # the defaults, without the term for equal margins


def run_case(n: int, seed: int, root: str, device: str, steps: int) -> dict[str, object]:
    """Train one network and attack it."""
    split = rs.load_dataset("cifar10", n, seed=seed, root=root, holdout=HELD_OUT)
    arch = f"mlp:3072-{HIDDEN}-1"
    config = rs.TrainingConfig(steps=TRAINING_STEPS, dtype="float32", seed=seed)
    state = rs.train(arch, split.train, config, device=device)
    shape = split.train.shape
    checkpoint = rs.Network(state.theta, arch, shape)
    knowledge = rs.Knowledge(shape=shape, sample_count=n)
    train, unseen = (subset.x.to(device).float() for subset in (split.train, split.holdout))
    attack = rs.attacks.Auto(restarts=1, steps=steps, seed=seed, device=device, priors=PRIORS)
    reconstruction = rs.attack(checkpoint, knowledge, attack)
    x = reconstruction.x.to(device).float()
    recovered, by_chance = (
        count_matches(x, samples, split.train.mean, ncc(x, samples))
        for samples in (train, unseen[:n])
    )
    counts = {**recovered, **name_held_out(by_chance), "seconds": reconstruction.seconds}
    return {"n": n, "seed": seed, "arm": ARM, **counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--out", type=Path, default=Path("experiments/results/photograph_defaults.jsonl")
    )
    options = parser.parse_args()
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = {(row["n"], row["seed"]) for row in map(json.loads, lines) if row["arm"] == ARM}
    for n in SIZES:
        for seed in SEEDS:
            if (n, seed) in done:
                continue
            row = run_case(n, seed, options.root, options.device, options.steps)
            with options.out.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(4)
    main()
