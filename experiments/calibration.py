"""Fit the confidence of the selection without data, on networks of our own.

    python -m experiments.calibration pools DIR                    images that the networks are trained on
    python -m experiments.calibration collect DIR --device cuda    networks, attacks, groups, truth
    python -m experiments.calibration fit DIR                      src/residuum/attacks/calibration.json

The second step can run on a machine that has only a GPU. No image of MNIST or CIFAR is used. The images are
digits of 8 x 8 pixels, the same digits enlarged to 28 x 28, crops of two photographs and their mirror
images, and random fields with the spectrum of natural images. A group of candidates counts as true if its
consensus has NCC above 0.8 with a training sample.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residuum.attacks import Auto, attack
from residuum.attacks.selection import FEATURES
from residuum.datasets import load_dataset
from residuum.networks.network import Network
from residuum.records import Knowledge
from residuum.similarity import ncc
from residuum.training import TrainingConfig, train

TRUE_ABOVE = 0.8
SIZE = 600
TARGET = Path(__file__).parents[1] / "src" / "residuum" / "attacks" / "calibration.json"


@dataclass(frozen=True)
class Victim:
    """One kind of network that is attacked. No test uses its seeds."""

    pool: str
    n: int
    hidden: str
    seeds: tuple[int, ...]
    restarts: int
    steps: int
    boxes: tuple[bool, ...] = (False,)
    dtype: str = "float64"


BIG = {"restarts": 10, "steps": 6000, "dtype": "float32"}
VICTIMS = [
    Victim("digits8", 20, "200-200", (1000, 1001, 1002, 1003), 6, 2000, (False, True)),
    Victim("digits8", 40, "200-200", (1004, 1005, 1006), 6, 2000, (False, True)),
    Victim("digits8", 20, "200", (1007, 1008), 6, 2000, (False, True)),
    Victim("digits28", 50, "1000-1000", (1100, 1101, 1102), boxes=(False, True), **BIG),
    Victim("fields28", 50, "1000-1000", (1103, 1104), boxes=(False, True), **BIG),
    Victim("fields32", 50, "1000-1000", (1105, 1106, 1107), **BIG),
    Victim("photos32", 50, "1000-1000", (1108, 1109), **BIG),
    Victim("photos32", 300, "1000-1000", (1110, 1111), **BIG),  # more than come back
    Victim("digits28", 300, "1000-1000", (1112, 1113), **BIG),
]
POOLS = tuple(dict.fromkeys(victim.pool for victim in VICTIMS))


def fields(channels: int, side: int, seed: int = 0) -> Tensor:
    """Return SIZE random images in [0, 1] with power 1/f^2 and correlated channels."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(SIZE, channels, side, side, generator=generator)
    shared = torch.randn(SIZE, 1, side, side, generator=generator)
    frequency = torch.fft.fftfreq(side)
    radius = (frequency[:, None].square() + frequency[None].square()).sqrt().clamp(min=0.5 / side)
    mixed = torch.fft.ifft2(torch.fft.fft2(0.4 * noise + 0.6 * shared) / radius).real
    scale = mixed.flatten(1).std(1).view(-1, 1, 1, 1)
    return (0.5 + 0.2 * mixed / scale).clamp(0, 1)


def pools(folder: Path) -> None:
    """Write the images as .npz files, which need no library to read."""
    from sklearn.datasets import load_digits

    small = torch.tensor(load_digits().images / 16.0).float()[:, None]
    large = torch.nn.functional.interpolate(small, (28, 28), mode="bicubic").clamp(0, 1)
    digit = torch.tensor(load_digits().target) % 2
    label = torch.arange(SIZE) % 2
    split = load_dataset("photos", seed=0, center=False)
    crops = torch.cat([split.train.x, split.holdout.x]).float()
    crops = torch.cat([crops, crops.flip(-1), crops.flip(-2)])
    folder.mkdir(parents=True, exist_ok=True)
    for name, x, y in (
        ("digits8", small, digit),
        ("digits28", large, digit),
        ("fields28", fields(1, 28), label),
        ("fields32", fields(3, 32), label),
        ("photos32", crops, torch.arange(len(crops)) % 2),
    ):
        np.savez_compressed(folder / f"{name}.npz", x=x.numpy(), y=y.numpy())


def collect(folder: Path, device: str, names: list[str]) -> None:
    """Write features and truth of every group, one file for each pool, after each attack."""
    for name in names:
        rows: list[np.ndarray] = []
        truth: list[np.ndarray] = []
        for victim in (v for v in VICTIMS if v.pool == name):
            for seed in victim.seeds:
                for x, true, line in _attacks(victim, seed, folder, device):
                    rows.append(x)
                    truth.append(true)
                    print(json.dumps(line), flush=True)
                    source = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
                    np.savez(
                        folder / f"groups-{name}.npz",
                        x=np.concatenate(rows),
                        y=np.concatenate(truth),
                        source=source,
                    )


def _attacks(victim: Victim, seed: int, folder: Path, device: str) -> Any:
    """Yield the features and the truth of the groups of every attack on one network."""
    split = load_dataset(folder / f"{victim.pool}.npz", victim.n, seed=seed, holdout=100)
    arch = f"mlp:{split.train.x[0].numel()}-{victim.hidden}-1"
    steps = 2000 if victim.dtype == "float64" else 6000
    config = TrainingConfig(steps=steps, seed=seed, dtype=victim.dtype)
    where = device if victim.dtype == "float32" else "cpu"  # small ones are faster on the CPU
    state = train(arch, split.train, config, device=where)
    checkpoint = Network(dict(state.theta), arch, split.train.shape, (), "binary")
    for box in victim.boxes:
        start = time.time()
        knowledge = Knowledge(value_range=(0.0, 1.0), mean=split.train.mean) if box else Knowledge()
        settings = Auto(
            restarts=victim.restarts,
            steps=victim.steps,
            candidates=2 * victim.n,
            seed=seed,
            device=where,
        )
        chosen = attack(checkpoint, knowledge, settings).selection
        assert chosen is not None
        best = ncc(chosen.x.double(), split.train.x).amax(1)
        true = (best > TRUE_ABOVE).numpy()
        line = {
            "pool": victim.pool,
            "n": victim.n,
            "arch": arch,
            "seed": seed,
            "box": box,
            "groups": len(true),
            "true": float(true.mean()),
            "seconds": round(time.time() - start, 1),
        }
        yield chosen.features.double().numpy(), true, line


def fit(folder: Path) -> None:
    """Fit a logistic regression on all groups. Each half of the networks also checks the fit to the other."""
    from sklearn.linear_model import LogisticRegression

    archives = [np.load(folder / f"groups-{name}.npz") for name in POOLS]
    x, y, source = (
        np.concatenate([archive[key] for archive in archives]) for key in ("x", "y", "source")
    )
    model = LogisticRegression(C=1.0, max_iter=1000).fit(x, y)
    unseen = np.zeros(len(y))
    for half in (0, 1):
        rows = source % 2 == half
        other = LogisticRegression(C=1.0, max_iter=1000).fit(x[~rows], y[~rows])
        unseen[rows] = other.predict_proba(x[rows])[:, 1]
    constants = {
        "features": list(FEATURES),
        "intercept": float(model.intercept_[0]),
        "weights": [float(w) for w in model.coef_[0]],
        "base_rate": float(y.mean()),
        "provenance": {
            "command": "python -m experiments.calibration pools|collect|fit DIR",
            "victims": [asdict(victim) for victim in VICTIMS],
            "true_above_ncc": TRUE_ABOVE,
            "groups": len(y),
            "reliability_in_sample": reliability(model.predict_proba(x)[:, 1], y),
            "reliability_other_half": reliability(unseen, y),
        },
    }
    TARGET.write_text(json.dumps(constants, indent=2) + "\n")
    print(json.dumps(constants, indent=2))


def reliability(predicted: np.ndarray, true: np.ndarray, bins: int = 5) -> list[dict[str, Any]]:
    """Return the mean confidence and the share of true groups in equal bins of the confidence."""
    which = np.clip((predicted * bins).astype(int), 0, bins - 1)
    return [
        {
            "confidence": float(predicted[which == b].mean()),
            "true": float(true[which == b].mean()),
            "groups": int((which == b).sum()),
        }
        for b in range(bins)
        if (which == b).any()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("pools", "collect", "fit"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pools", nargs="*", choices=POOLS, default=POOLS)
    options = parser.parse_args()
    if options.step == "pools":
        pools(options.folder)
    elif options.step == "collect":
        collect(options.folder, options.device, options.pools)
    else:
        fit(options.folder)


if __name__ == "__main__":
    main()
