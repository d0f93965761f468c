"""What does each term of the stationarity attack contribute, and how soon is it as good as published?

    python -m experiments.image_data SOURCE FOLDER                images for claims, others for tuning
    python -m experiments.stationarity FOLDER OUT --device cuda   networks, attacks, scores

The settings of this file and of ``Attack`` were chosen on the images of FOLDER/tune and seeds 9001-9006,
which no claim uses, and committed before ``stationarity-seeds.json`` was drawn. ``plain`` has no prior.
``prior`` has the sparse prior of the defaults. ``published`` has the settings of Haim et al. 2022 with as
many candidates and steps, in tf32. "with unmix" adds unmixed images to the candidates of ``prior``. Counts
are one-to-one by NCC at full resolution, and ``ssim3`` is the published rule. Every count is stored with
that of as many held-out images. An interrupted run continues with the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import RESULTS
from experiments.counting import count_matches, name_held_out
from experiments.programs import run_program
from experiments.timing import clock
from residuum.attacks import attack, make_attack
from residuum.attacks.stationarity.defaults import SPARSE
from residuum.attacks.unmixing.ica import unmix
from residuum.datasets import load_dataset
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction, write_json
from residuum.records.rundir import environment, require_device
from residuum.similarity import ncc
from residuum.training import TrainingConfig, train

SEEDS_FILE = RESULTS / "stationarity-seeds.json"
HELD_OUT, HIDDEN, STEPS = 1000, "1000-1000", 6000
PRIOR = (("sparse-gradients", SPARSE),)
ARMS: dict[str, dict[str, Any]] = {
    "published": {},
    "plain": {"priors": ()},
    "prior": {"priors": PRIOR},
    "with unmix": {},
}
PUBLISHED = "haim2022-cifar-b9dfyspx"
MARGIN = TrainingConfig(steps=5000, dtype="float32")
ROWS = {"cifar-500-ablation": 500, "cifar-100-ablation": 100}  # samples
SEEDS = {"cifar-500-ablation": "cifar-500"}  # under another name in the file
QUICK = (300, 400, 500, 600, 1000, 1500)  # steps of one restart, for the time to published quality
Victim = dict[str, Any]


def train_victim(n: int, seed: int, root: str, device: str, path: str) -> str:
    """Train a network and store it in ``path``."""
    if Path(path).exists():
        return path
    torch.set_num_threads(1)
    split = load_dataset("cifar10", n, seed=seed, root=root, holdout=HELD_OUT)
    arch = f"mlp:{split.train.x[0].numel()}-{HIDDEN}-1"
    state = train(arch, split.train, MARGIN.changed(seed=seed), device=device)
    victim = {
        "arch": arch,
        "theta": dict(state.theta),
        "x": split.train.x.float(),
        "held": split.holdout.x.float(),
        "mean": split.train.mean,
        "facts": {"seed": seed, "status": state.status, **state.history[-1]},
    }
    torch.save(victim, f"{path}.part")
    os.replace(f"{path}.part", path)
    return path


def figures(x: Tensor, victim: Victim, device: str) -> dict[str, Any]:
    """Count matches above fixed levels, of the training set and of as many held-out images."""
    n, x = len(victim["x"]), x.to(device).float()
    counts, by_chance = (
        count_matches(x, samples, victim["mean"], ncc(x, samples))
        for samples in (victim["x"].to(device), victim["held"][:n].to(device))
    )
    return {"candidates": len(x), **counts, **name_held_out(by_chance)}


def run_arms(
    victim: Victim, seed: int, device: str, done: Collection[str] = ()
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yield (arm, candidates, description) of all arms that are not done."""
    for arm in ARMS:
        if arm in done:
            continue
        if arm == "with unmix":
            yield from run_with_unmix(
                victim, run_attack(victim, "prior", seed, device), seed, device
            )
            continue
        reconstruction = run_attack(victim, arm, seed, device)
        description = {"seconds": reconstruction.seconds, "settings": reconstruction.settings}
        yield arm, reconstruction.x, description


def run_attack(
    victim: Victim, arm: str, seed: int, device: str, steps: int = STEPS, candidates: int = 0
) -> Reconstruction:
    """Run one restart of an arm."""
    sizes = {"restarts": 1, "steps": steps, "candidates": candidates, "dtype": "auto"}
    config = make_attack(
        preset=PUBLISHED if arm == "published" else "residuum",
        **sizes,
        **ARMS.get(arm, {}),
        seed=seed % 1000,
        device=device,
    )
    return attack(*release_of(victim), config)


def release_of(victim: Victim) -> tuple[Network, Knowledge]:
    """Return the weights, and the knowledge of the shape and the number of samples."""
    shape = tuple(victim["x"].shape[1:])
    knowledge = Knowledge(shape=shape, sample_count=len(victim["x"]))
    return Network(victim["theta"], victim["arch"], shape), knowledge


def run_with_unmix(
    victim: Victim, reconstruction: Reconstruction, seed: int, device: str
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yield unmixed images with both signs, and then all candidates together."""
    shape, rows = tuple(victim["x"].shape[1:]), victim["theta"]["layers.0.weight"]
    rows = rows.float().to(device)
    sources, seconds = clock(lambda: unmix(rows, shape, seed=seed), device)
    x = sources.x[: 2 * len(victim["x"])].float().cpu().reshape(-1, *shape)
    yield "unmix", torch.cat([x, -x]), {"seconds": seconds}
    pooled = torch.cat([reconstruction.x.float(), x, -x])
    yield "with unmix", pooled, {"seconds": reconstruction.seconds + seconds}


def run(folder: Path, out: Path, device: str, workers: int) -> None:
    """Measure every network and arm that ``out`` does not have, most samples first."""
    out.mkdir(parents=True, exist_ok=True)
    (cache := folder / "victims").mkdir(parents=True, exist_ok=True)
    seeds, record = json.loads(SEEDS_FILE.read_text())["victims"], out / "stationarity.json"
    done: dict[str, Any] = (
        json.loads(record.read_text())
        if record.exists()
        else {"seeds": seeds, "environment": environment(device), "victims": {}, "quick": {}}
    )
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as processes:
        victims: dict[str, tuple[int, Future[str]]] = {}
        for name, n in ROWS.items():
            for k, seed in enumerate(seeds[SEEDS.get(name, name)]):
                path = str(cache / f"{name}-{k}.pt")
                arguments = (n, seed, str(folder / "claim"), device, path)
                victims[f"{name}/{k}"] = seed, processes.submit(train_victim, *arguments)
        for key, (seed, path) in victims.items():
            victim = torch.load(path.result(), weights_only=True)
            entry = done["victims"].setdefault(key, {"victim": victim["facts"], "arms": {}})
            for arm, x, description in run_arms(victim, seed, device, [*entry["arms"]]):
                entry["arms"][arm] = description | figures(x, victim, device)
                write_json(record, done)
                print(
                    f"{time.strftime('%H:%M:%S')} {key} {arm}: {description['seconds']:.1f} s",
                    flush=True,
                )
    if not done["quick"]:  # when the trainings are over
        first = torch.load(victims["cifar-500-ablation/0"][1].result(), weights_only=True)
        done["quick"] = measure_quick(first, device)
        write_json(record, done)


def measure_quick(victim: Victim, device: str) -> dict[str, Any]:
    """Count matches of one short restart after kernels are chosen. "1" has little but the capture."""
    counts = {}
    for steps in (QUICK[0], 1, *QUICK):  # the first one warms up
        reconstruction = run_attack(victim, "all", 0, device, steps, 1000)
        counts[str(steps)] = {
            "seconds": reconstruction.seconds,
            **figures(reconstruction.x, victim, device),
        }
    return counts


def main() -> int:
    """Measure the networks and arms that have no result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=6)
    options = parser.parse_args()
    require_device(options.device)
    run(options.folder, options.out, options.device, options.workers)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
