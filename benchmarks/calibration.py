"""Fit the confidence of the data-free selection on victims of the project's own.

Run as ``python -m benchmarks.calibration``; writes src/residuum/attacks/calibration.json with its
provenance. A group counts as true when its consensus has NCC above 0.8 with a training sample.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from residuum.attacks import AttackConfig, attack
from residuum.datasets import load_dataset
from residuum.records import Checkpoint, Knowledge
from residuum.similarity import ncc
from residuum.training import TrainingConfig, train

TRUE_ABOVE = 0.8
VICTIMS = [
    # dataset, options, n, architecture, data seeds (disjoint from every test's seeds)
    ("digits", {}, 20, "mlp:64-200-200-1", (1000, 1001, 1002, 1003)),
    ("digits", {}, 40, "mlp:64-200-200-1", (1004, 1005, 1006)),
    ("digits", {}, 20, "mlp:64-200-1", (1007, 1008)),
    ("sphere", {"dim": 64}, 20, "mlp:64-200-200-1", (1009, 1010)),
]
RESTARTS, STEPS = 6, 2000
TARGET = Path(__file__).parents[1] / "src" / "residuum" / "attacks" / "calibration.json"


def collect() -> tuple[np.ndarray, np.ndarray]:
    """Features and truth of every group of every victim, with and without the value box."""
    rows, truth = [], []
    for name, options, n, arch, seeds in VICTIMS:
        for seed in seeds:
            split = load_dataset(name, n, seed=seed, **options)
            state = train(arch, split.train, TrainingConfig(steps=2000, seed=seed))
            checkpoint = Checkpoint(dict(state.theta), arch, split.train.shape, (), "binary")
            boxes = [Knowledge()]
            if name == "digits":
                boxes.append(Knowledge(value_range=(0.0, 1.0), mean=split.train.mean))
            for knowledge in boxes:
                config = AttackConfig(restarts=RESTARTS, steps=STEPS, candidates=2 * n, seed=seed)
                found = attack(checkpoint, knowledge, config)
                assert found.selection is not None
                best = ncc(found.selection.x, split.train.x).amax(1)
                rows.append(found.selection.features.numpy())
                truth.append((best > TRUE_ABOVE).numpy())
                share = float(truth[-1].mean())
                print(f"{name} n={n} {arch} seed {seed}: {len(rows[-1])} groups, {share:.0%} true")
    return np.concatenate(rows), np.concatenate(truth)


def main() -> None:
    torch.set_num_threads(1)
    x, y = collect()
    model = LogisticRegression(C=1.0).fit(x, y)
    predicted = model.predict_proba(x)[:, 1]
    bins = np.clip((predicted * 5).astype(int), 0, 4)
    reliability = [
        {
            "predicted": float(predicted[bins == b].mean()),
            "true": float(y[bins == b].mean()),
            "groups": int((bins == b).sum()),
        }
        for b in range(5)
        if (bins == b).any()
    ]
    constants = {
        "features": ["support share", "log relative multiplier", "tightness"],
        "intercept": float(model.intercept_[0]),
        "weights": [float(w) for w in model.coef_[0]],
        "base_rate": float(y.mean()),
        "provenance": {
            "command": "python -m benchmarks.calibration",
            "victims": [
                {"data": d, "options": o, "n": n, "arch": a, "seeds": list(s)}
                for d, o, n, a, s in VICTIMS
            ],
            "restarts": RESTARTS,
            "steps": STEPS,
            "true_above_ncc": TRUE_ABOVE,
            "groups": len(y),
            "reliability_in_sample": reliability,
        },
    }
    TARGET.write_text(json.dumps(constants, indent=2) + "\n")
    print(json.dumps(constants, indent=2))


if __name__ == "__main__":
    main()
