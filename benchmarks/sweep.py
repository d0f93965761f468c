"""Measure the overhead of the engines of a sweep, and compare random search with the default preset.

Overhead: 200 trials of a fraction of a second each run on one core in this process, and on two workers of a
new Ray cluster. The overhead is everything but the trials: storage, files, transport, pooling, the report,
and the start of the cluster. It is the wall-clock time, multiplied by the number of workers, over the
seconds of the trials, less one.

Search: 32 random trials on a digits network are compared with 32 trials of the default preset that differ
only in their random initialization. All trials have the same length. The typical residual of the preset is
what one attack gets. The best of 32 is what the same time gets without changed settings. Both pools are
scored after their ranking is fixed. No other script uses the seeds.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from experiments.report import Report, only_on
from experiments.timing import clock, threads
from residuum.attacks import Attack, Auto
from residuum.datasets import load_dataset
from residuum.evaluation import score
from residuum.evaluation.scoring import selected_candidates
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction, Split
from residuum.sweeping import sweep
from residuum.sweeping.executors import Job, Task, judge_trial, run_job
from residuum.sweeping.pooling import pool_trials
from residuum.sweeping.scoring import score_rankings
from residuum.training import TrainingConfig, make_release, train

SEEDS = (40, 41)
ARCH, SAMPLES, TRAINING = "mlp:64-100-100-1", 40, 2000
TRIALS, STEPS = 32, 500
TINY_TRIALS, TINY_STEPS = 200, 100
LOCAL, RAY = 0.15, 0.40  # overheads allowed


def sweeps(device: str) -> Report:
    """Measure the overhead of both engines, and the search for every seed."""
    only_on(device, "cpu")
    with threads(1), tempfile.TemporaryDirectory() as place:
        victims = {seed: victim(seed) for seed in SEEDS}
        costs = measure_overheads(*victims[SEEDS[0]][:2], Path(place))
        figures = [measure_search(seed, *victims[seed], Path(place) / str(seed)) for seed in SEEDS]
    return Report(
        what="32 random trials against the default preset (first-layer residual), engine overhead",
        settings={
            "arch": ARCH,
            "samples": SAMPLES,
            "training steps": TRAINING,
            "trials": TRIALS,
            "steps": STEPS,
            "restarts": 2,
            "tiny trials": TINY_TRIALS,
            "tiny steps": TINY_STEPS,
        },
        seeds=SEEDS,
        figures=figures,
        ratio=min(row["preset residual"] / row["sweep residual"] for row in figures),
        bar=1.0,
        checks={
            f"overhead on local at most {LOCAL:.0%}": costs["local"]["overhead"] <= LOCAL,
            f"overhead on ray at most {RAY:.0%}": costs["ray"]["overhead"] <= RAY,
            "consensus beyond chance at 1%": all(row["consensus p"] < 0.01 for row in figures),
        },
        also={
            "engines": costs,
            "load average at the end": os.getloadavg()[0],
            "preset and search take the same time": "the better of the two is not the cheaper",
        },
    )


def victim(seed: int) -> tuple[Network, Knowledge, Split]:
    """Return a network trained on digits, what its attacker knows, and the data."""
    split = load_dataset("digits", SAMPLES, seed=seed, holdout=400)
    state = train(ARCH, split.train, TrainingConfig(steps=TRAINING, seed=seed))
    knowledge = Knowledge(
        value_range=(0.0, 1.0),
        mean=split.train.mean,
        sample_count=SAMPLES,
        provenance={"mean": "train", "sample_count": "train"},
    )
    return make_release(state, ARCH, split.train, "binary"), knowledge, split


def measure_overheads(checkpoint: Network, knowledge: Knowledge, place: Path) -> dict[str, Any]:
    """Compare the wall-clock time of 200 small trials with the seconds of the workers."""
    attack = Auto(restarts=2, steps=TINY_STEPS)
    costs: dict[str, Any] = {}
    for engine, workers in (("local", 1), ("ray", 2)):
        if engine == "ray" and importlib.util.find_spec("ray") is None:
            raise ModuleNotFoundError("this benchmark needs: pip install 'residuum[cluster]'")
        before = os.getloadavg()[0]
        done, wall = clock(
            lambda engine=engine, workers=workers: sweep(
                checkpoint,
                knowledge,
                trials=TINY_TRIALS,
                attack=attack,
                out=place / engine,
                engine=engine,
                workers=workers,
            )
        )
        costs[engine] = {
            "workers": workers,
            "wall seconds": wall,
            "compute seconds": (spent := done.summary["session"]["compute_seconds"]),
            "overhead": wall * workers / spent - 1,
            "trials": len(done.trials),
            "load average before": before,
        }
    return costs


def measure_search(
    seed: int, checkpoint: Network, knowledge: Knowledge, split: Split, out: Path
) -> dict[str, Any]:
    """Compare a sweep with as many trials of the preset, first by weights, then by the data."""
    attack = Auto(restarts=2, steps=STEPS)
    done = sweep(checkpoint, knowledge, trials=TRIALS, seed=seed, attack=attack, out=out)
    same = preset_trials(checkpoint, knowledge, attack, seed)
    values = [
        judge_trial(n, {}, trial, ("residual",)).residual or float("inf")
        for n, trial in enumerate(same)
    ]
    rankings = score_rankings(done, out, split.train, split.holdout)
    pool, _ = pool_trials(
        [same[i] for i in sorted(range(TRIALS), key=values.__getitem__)], knowledge, {}
    )
    assert pool is not None
    assert rankings.consensus is not None
    consensus, preset_consensus = rankings.consensus.metrics["ncc"], _score(pool, split)
    return {
        "seed": seed,
        "sweep residual": done.order[0].residual,
        "preset residual": statistics.median(values),
        "preset residual, best of 32": min(values),
        "rank correlation, residual with recovered": rankings.correlation,
        "recovered by the trial chosen without data": rankings.rows[0]["recovered"],
        "recovered by the trial chosen with data": rankings.by_data[0]["recovered"],
        "consensus recovered": consensus.recovered,
        "consensus threshold": consensus.threshold_null99,
        "consensus by chance": consensus.expected_by_chance,
        "consensus p": consensus.p_value,
        "preset's consensus recovered": preset_consensus.recovered,
        "best settings": {name: f"{value:.2g}" for name, value in done.order[0].params.items()},
    }


def preset_trials(
    checkpoint: Network, knowledge: Knowledge, attack: Attack, seed: int
) -> list[Reconstruction]:
    """Run trials that differ only in their random initialization."""
    task = Task(checkpoint, knowledge, attack.resolve_settings(checkpoint, knowledge))
    jobs = (Job({n: {}}, seed) for n in range(TRIALS))
    return [run_job(task, job).reconstructions[0] for job in jobs]


def _score(reconstruction: Reconstruction, split: Split) -> Any:
    pool = selected_candidates(reconstruction)
    return score(pool.x, split.train, split.holdout, metrics=["ncc"]).metrics["ncc"]
