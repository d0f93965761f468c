"""Small convnets attacked for real, and who is recovered: the samples on the margin, or others too?

Run as ``python -m benchmarks.convnet``; writes results/convnet-cpu.json. No ratio and no bar: it
reports counts with their chance level, whatever they are. The settings were chosen on data seed 9.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import RESULTS, threads
from residuum.attacks import AttackConfig, attack
from residuum.checkpoints import build_model
from residuum.datasets import load_dataset
from residuum.evaluation import score
from residuum.networks import Architecture
from residuum.records import Checkpoint, Knowledge, Reconstruction, Scores, Split, write_json
from residuum.records.rundir import environment
from residuum.stationarity import parameters
from residuum.theory import certify
from residuum.training import TrainingConfig, initialise, train

TRAINING_STEPS = 3000
NARROW, WIDE, MLP = "convnet:1x8x8-8-16-1", "convnet:1x8x8-32-64-1", "mlp:64-200-200-1"
ON_MARGIN = 1.05  # a margin up to this many times the smallest one counts as on it


@dataclass(frozen=True)
class Case:
    """A kind of victim, its seeds (of samples and initial weights) and the attack on it."""

    arch: str
    n: int
    seeds: tuple[int, ...]
    attack: AttackConfig
    trained: bool = True


def _all_layers(steps: int) -> AttackConfig:
    return AttackConfig(layers="all", restarts=2, steps=steps)


CONVNETS = (
    Case(NARROW, 10, (4000, 4001), _all_layers(3000)),
    Case(NARROW, 20, (4000, 4001), _all_layers(3000)),
    Case(WIDE, 10, (4000, 4001), _all_layers(1500)),
    Case(WIDE, 20, (4000, 4001), _all_layers(1500)),
    Case(NARROW, 10, (4000,), _all_layers(3000), trained=False),
    Case(WIDE, 10, (4000,), _all_layers(1500), trained=False),
)
MARGINS = (
    Case(MLP, 20, (3000, 3001, 3002), AttackConfig(steps=2000)),
    Case(MLP, 100, (3000, 3001, 3002), AttackConfig(steps=1500, restarts=2)),
)


def one(case: Case, seed: int) -> dict[str, Any]:
    """Train, certify, attack, score."""
    split = load_dataset("digits", case.n, seed=seed)
    checkpoint, victim = _victim(case, split, seed)
    knowledge = Knowledge(
        value_range=(0.0, 1.0),
        mean=split.train.mean,
        sample_count=case.n,
        provenance={"mean": "train", "sample_count": "train"},
    )
    start = time.process_time()
    found = attack(checkpoint, knowledge, case.attack)
    seconds = time.process_time() - start
    scores = score(
        found.x,
        split.train,
        split.holdout,
        metrics=("ncc", "ssim3"),
        outputs=build_model(checkpoint)(split.train.x).detach(),
    )
    return {
        "arch": case.arch,
        "n": case.n,
        "seed": seed,
        "trained": case.trained,
        **victim,
        **_counts(scores),
        "residuals": _residuals(found),
        "steps": case.attack.steps,
        "restarts": case.attack.restarts,
        "attack_cpu_seconds": seconds,
        "margin_bins": [dict(vars(part)) for part in scores.margins],
        "by_margin": _on_and_off(scores),
    }


def _victim(case: Case, split: Split, seed: int) -> tuple[Checkpoint, dict[str, Any]]:
    """A network, and how far it got: its certificate's residual and margin."""
    if case.trained:
        theta = train(case.arch, split.train, TrainingConfig(steps=TRAINING_STEPS, seed=seed)).theta
    else:
        config = TrainingConfig(init="default", seed=seed)
        theta = parameters(initialise(Architecture.parse(case.arch), config))
    checkpoint = Checkpoint(dict(theta), case.arch, split.train.shape, (), "binary")
    model = build_model(checkpoint)
    found = certify(
        model, split.train.x, split.train.y, kink_tolerance=0.0
    )  # the plain one is read
    return checkpoint, {
        "parameters": sum(t.numel() for t in theta.values()),
        "kkt_residual_plain": found.residual_plain,
        "margin": found.margin,
    }


def _counts(scores: Scores) -> dict[str, Any]:
    ncc = scores.metrics["ncc"]
    return {
        "recovered": ncc.recovered,
        "expected_by_chance": ncc.expected_by_chance,
        "p_value": ncc.p_value,
        "threshold_null99": ncc.threshold_null99,
        "best_ncc": ncc.best,
        "top10_mean_ncc": ncc.top10_mean,
        "ssim3_above_0.4": scores.metrics["ssim3"].above_published_threshold,
        "ssim3_above_0.4_holdout": scores.metrics["ssim3"].above_published_threshold_holdout,
        "candidates": scores.m,
    }


def _residuals(found: Reconstruction) -> dict[str, float]:
    """Relative residual of every layer, of the restart with the least loss."""
    runs = found.to_json()["runs"]
    return min(runs, key=lambda run: run["loss"])["residuals"]


def _on_and_off(scores: Scores) -> dict[str, Any]:
    """Recovered samples on the margin and off it, those off it in two halves."""
    rows = sorted(scores.per_sample, key=lambda row: row.margin or 0.0)
    least = rows[0].margin or 0.0
    if least <= 0:
        return {"separated": False}
    on = [row for row in rows if (row.margin or 0.0) <= ON_MARGIN * least]
    off = rows[len(on) :]
    parts = {"on": on, "off_near": off[: len(off) // 2], "off_far": off[len(off) // 2 :]}
    return {
        "separated": True,
        **{
            name: {
                "samples": len(part),
                "recovered": sum(bool(row.recovered) for row in part),
                "margin_over_least": [(row.margin or 0.0) / least for row in (part[0], part[-1])]
                if part
                else [],
            }
            for name, part in parts.items()
        },
    }


def _show(row: dict[str, Any]) -> None:
    residuals = ", ".join(f"{name} {value:.3f}" for name, value in row["residuals"].items())
    print(
        f"{row['arch']} n={row['n']} seed {row['seed']}{'' if row['trained'] else ', untrained'}: "
        f"{row['recovered']} recovered, {row['expected_by_chance']:.2f} by chance, "
        f"p {row['p_value']:.3f}; best NCC {row['best_ncc']:.2f}, null {row['threshold_null99']:.2f}; "
        f"{residuals}; {row['attack_cpu_seconds']:.0f} s",
        flush=True,
    )


def main() -> None:
    """All victims, a line each, and the file."""
    start = time.time()
    result: dict[str, Any] = {
        "benchmark": "convnet",
        "settings": {
            "data": "digits",
            "training_steps": TRAINING_STEPS,
            "granted": {"value_range": "user", "mean": "train", "sample_count": "train"},
            "on_margin": ON_MARGIN,
            "convnet_attack": CONVNETS[0].attack.to_json(),
            "mlp_attack": MARGINS[0].attack.to_json(),
            "threads": 1,
        },
    }
    with threads(1):
        for name, cases in (("convnets", CONVNETS), ("mlp_by_margin", MARGINS)):
            result[name] = []
            for case in cases:
                for seed in case.seeds:
                    result[name].append(one(case, seed))
                    _show(result[name][-1])
    result["seconds"] = round(time.time() - start, 1)
    result["environment"] = environment("cpu")
    write_json(RESULTS / "convnet-cpu.json", result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
