"""What the attack recovers from networks trained on real images, with its chance level beside it.

Run as ``python -m benchmarks.reconstruction [NAME ...] --root DATA --device cuda --out DIR``. DATA
holds mnist.npz and cifar10.npz. Every experiment trains its victims, attacks them from the weights,
scores all candidates against a held-out control and writes one JSON file.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import first_layer_rank
from residuum.attacks import PRESETS, AttackConfig, attack
from residuum.datasets import load_dataset
from residuum.evaluation import score
from residuum.records import Checkpoint, Knowledge, Reconstruction, Split
from residuum.records.rundir import environment
from residuum.similarity import ncc
from residuum.training import TrainingConfig, train

BASELINES = ("first-layer-weights", "model-inversion")


@dataclass(frozen=True)
class Experiment:
    """One row of the results: a victim, what the attacker knows, an attack."""

    data: str
    n: int
    hidden: tuple[int, ...] = (1000, 1000)
    task: str = "binary"
    bias: str = "first"
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(steps=6000, dtype="float32")
    )
    attack: AttackConfig = field(default_factory=AttackConfig)
    box: bool = False
    init: bool = False
    seeds: tuple[int, ...] = (0,)
    metrics: tuple[str, ...] = ("ncc", "ssim3")
    baselines: bool = False


GPU = AttackConfig.of(dtype="tf32", steps=8000, restarts=2)
EXPERIMENTS = {
    "cifar-500": Experiment("cifar10", 500, attack=replace(GPU, candidates=400), baselines=True),
    "cifar-100": Experiment(
        "cifar10", 100, attack=replace(GPU, candidates=200, restarts=8, steps=16000)
    ),
    "cifar-50": Experiment(
        "cifar10",
        50,
        attack=replace(GPU, candidates=100, restarts=10, steps=16000),
        seeds=(0, 1, 2),
    ),
    "mnist-500": Experiment(
        "mnist", 500, attack=replace(GPU, candidates=1000), box=True, baselines=True
    ),
    "mnist-50": Experiment(
        "mnist",
        50,
        attack=replace(GPU, candidates=100, restarts=10, steps=16000),
        box=True,
        seeds=(0, 1, 2),
    ),
    "multiclass-cifar-500": Experiment(
        "cifar10", 500, task="multiclass", attack=replace(GPU, candidates=1000)
    ),
    "ntk-mnist-200": Experiment(
        "mnist",
        200,
        hidden=(2048, 2048),
        task="regression",
        bias="all",
        box=True,
        init=True,
        training=TrainingConfig(
            method="gd",
            loss="squared",
            lr=5e-4,
            momentum=0.9,
            steps=40000,
            init="lecun",
            dtype="float32",
            stop_loss=1e-9,
        ),
        attack=PRESETS["ntk"].changed(dtype="bf16", candidates=400),
        metrics=("ncc", "l2"),
    ),
}


def run(name: str, root: str, device: str) -> dict[str, Any]:
    """All seeds of one experiment."""
    spec = EXPERIMENTS[name]
    return {
        "experiment": name,
        "settings": json.loads(json.dumps(asdict(spec), default=str)),
        "seeds": [one(spec, seed, root, device) for seed in spec.seeds],
        "environment": environment(device),
    }


def one(spec: Experiment, seed: int, root: str, device: str) -> dict[str, Any]:
    """Train, attack, score."""
    data_seed = None if seed == 0 else seed  # seed 0: the first n samples, as the papers take them
    split = load_dataset(spec.data, spec.n, seed=data_seed, root=root, task=spec.task)
    outputs = 10 if spec.task == "multiclass" else 1
    arch = "mlp:" + "-".join(map(str, (split.train.x[0].numel(), *spec.hidden, outputs)))
    arch += f",bias={spec.bias}" if spec.bias != "first" else ""
    start = time.time()
    state = train(
        arch, split.train, replace(spec.training, seed=seed), task=spec.task, device=device
    )
    trained = time.time() - start
    checkpoint = Checkpoint(dict(state.theta), arch, split.train.shape, (), spec.task)
    knowledge = Knowledge(
        value_range=(0.0, 1.0) if spec.box else None,
        mean=split.train.mean if spec.box else None,
        theta0=state.theta0 if spec.init else None,
        shape=split.train.shape,
    )
    found = attack(checkpoint, knowledge, replace(spec.attack, device=device, seed=seed))
    row: dict[str, Any] = {
        "seed": seed,
        "victim": {
            "seconds": trained,
            "steps": state.step,
            "status": state.status,
            **state.history[-1],
        },
        "first_layer_rank": first_layer_rank(checkpoint.theta),
        "attack_seconds": found.seconds,
        "first_layer_residual": found.layers[:, -1, 0].sqrt().tolist(),
        "status": list(found.status),
        "scores": figures(found.x, split, spec),
        "selection": selection(found, split),
    }
    if spec.baselines and seed == spec.seeds[0]:
        for baseline in BASELINES:
            config = AttackConfig.of(
                objective=baseline,
                restarts=1,
                steps=200,
                candidates=1000,
                dtype="float32",
                device=device,
            )
            found = attack(checkpoint, knowledge, config)
            row[baseline] = figures(found.x.float(), split, spec)
    return row


def figures(x: torch.Tensor, split: Split, spec: Experiment) -> dict[str, Any]:
    scores = score(
        x.double(), split.train, split.holdout, metrics=spec.metrics, subsets=300
    ).to_json()
    best = ncc(x.double(), split.train.x).amax(0).sort(descending=True).values
    kept = {key: scores[key] for key in ("n", "m", "calibrated", "reason", "metrics")}
    return {
        **kept,
        "ncc_above_0.9": int((best > 0.9).sum()),
        "ncc_top30_median": float(best[:30].median()),
    }


def selection(found: Reconstruction, split: Split) -> dict[str, Any]:
    """How well agreement between restarts tells true from false, held-out images beside it."""
    chosen = found.selection
    assert chosen is not None
    if not len(chosen):
        return {}
    best, which = ncc(chosen.x.double(), split.train.x).max(1)
    control = ncc(chosen.x.double(), split.holdout.x[: len(split.train)]).amax(1)
    rows = []
    for support in (2, 3, 4, 6, 8):
        keep = chosen.support >= support
        rows.append(
            {
                "support": support,
                "clusters": int(keep.sum()),
                "true_ncc_0.8": float((best[keep] > 0.8).double().mean()) if keep.any() else None,
                "control_ncc_0.8": float((control[keep] > 0.8).double().mean())
                if keep.any()
                else None,
                "distinct_above_0.9": len(which[keep & (best > 0.9)].unique()),
            }
        )
    confidence = chosen.confidence.double()
    bins = (confidence * 5).long().clamp(max=4)
    reliability = [
        {
            "confidence": float(confidence[bins == b].mean()),
            "true": float((best[bins == b] > 0.8).double().mean()),
            "groups": int((bins == b).sum()),
        }
        for b in range(5)
        if (bins == b).any()
    ]
    return {"by_support": rows, "reliability": reliability}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*EXPERIMENTS, []], default=[])
    parser.add_argument("--root", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or EXPERIMENTS:
        start = time.time()
        result = run(name, options.root, options.device)
        (options.out / f"reconstruction-{name}.json").write_text(
            json.dumps(result, indent=1) + "\n"
        )
        for row in result["seeds"]:
            brief = {
                metric: (
                    v["recovered"],
                    v["threshold_null99"],
                    v["expected_by_chance"],
                    v["above_published_threshold"],
                    v["top10_mean"],
                )
                for metric, v in row["scores"]["metrics"].items()
            }
            print(
                f"{name} seed {row['seed']}: rank {row['first_layer_rank']}, {brief}, ncc>0.9 "
                f"{row['scores']['ncc_above_0.9']}, attack {row['attack_seconds']:.1f} s, "
                f"victim {row['victim']['seconds']:.1f} s, residual {row['first_layer_residual'][:2]}",
                flush=True,
            )
        print(f"{name}: {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
