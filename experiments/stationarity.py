"""Which term of the stationarity attack brings what, beside chance, and how soon it is as good as published.

    python -m experiments.image_data SOURCE FOLDER                images for claims, others for tuning
    python -m experiments.stationarity FOLDER OUT --device cuda   victims, attacks, scores; resumable

Settings are those of this file and of ``Attack``; they were chosen on the images of FOLDER/tune
and seeds 9001-9006, which no claim uses, and committed before ``stationarity-seeds.json`` was drawn. Arms:
``plain`` has no prior; ``prior`` has the sparse prior of the defaults; ``published`` has the settings of
Haim et al. 2022 with as many candidates and steps, in tf32; "with unmix" pools the candidates of ``prior``
with unmixed images. Counts are one-to-one by NCC at full resolution; ``ssim3`` is the
published rule; the same against as many held-out images stands beside each.
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
from experiments.counting import counted, held_out
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


def make(n: int, seed: int, root: str, device: str, path: str) -> str:
    """Train a victim and keep it in ``path``."""
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
    """Counts above fixed levels, of the training set and of as many held-out images."""
    n, x = len(victim["x"]), x.to(device).float()
    counts, by_chance = (
        counted(x, samples, victim["mean"], ncc(x, samples))
        for samples in (victim["x"].to(device), victim["held"][:n].to(device))
    )
    return {"candidates": len(x), **counts, **held_out(by_chance)}


def arms(
    victim: Victim, seed: int, device: str, done: Collection[str] = ()
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """(arm, candidates, facts) one after the other, but for those that are done."""
    for arm in ARMS:
        if arm in done:
            continue
        if arm == "with unmix":
            yield from with_unmix(victim, attacked(victim, "prior", seed, device), seed, device)
            continue
        reconstruction = attacked(victim, arm, seed, device)
        description = {"seconds": reconstruction.seconds, "settings": reconstruction.settings}
        yield arm, reconstruction.x, description


def attacked(
    victim: Victim, arm: str, seed: int, device: str, steps: int = STEPS, candidates: int = 0
) -> Reconstruction:
    """One restart."""
    sizes = {"restarts": 1, "steps": steps, "candidates": candidates, "dtype": "auto"}
    config = make_attack(
        preset=PUBLISHED if arm == "published" else "residuum",
        **sizes,
        **ARMS.get(arm, {}),
        seed=seed % 1000,
        device=device,
    )
    return attack(*granted(victim), config)


def granted(victim: Victim) -> tuple[Network, Knowledge]:
    """The weights, the shape of a sample and how many there were."""
    shape = tuple(victim["x"].shape[1:])
    knowledge = Knowledge(shape=shape, sample_count=len(victim["x"]))
    return Network(victim["theta"], victim["arch"], shape), knowledge


def with_unmix(
    victim: Victim, reconstruction: Reconstruction, seed: int, device: str
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Unmixed images by themselves, either way up, and pooled."""
    shape, rows = tuple(victim["x"].shape[1:]), victim["theta"]["layers.0.weight"]
    rows = rows.float().to(device)
    sources, seconds = clock(lambda: unmix(rows, shape, seed=seed), device)
    x = sources.x[: 2 * len(victim["x"])].float().cpu().reshape(-1, *shape)
    yield "unmix", torch.cat([x, -x]), {"seconds": seconds}
    pooled = torch.cat([reconstruction.x.float(), x, -x])
    yield "with unmix", pooled, {"seconds": reconstruction.seconds + seconds}


def run(folder: Path, out: Path, device: str, workers: int) -> None:
    """Every victim and arm that is not in ``out`` yet, most samples first."""
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
                victims[f"{name}/{k}"] = seed, processes.submit(make, *arguments)
        for key, (seed, path) in victims.items():
            victim = torch.load(path.result(), weights_only=True)
            entry = done["victims"].setdefault(key, {"victim": victim["facts"], "arms": {}})
            for arm, x, description in arms(victim, seed, device, [*entry["arms"]]):
                entry["arms"][arm] = description | figures(x, victim, device)
                write_json(record, done)
                print(
                    f"{time.strftime('%H:%M:%S')} {key} {arm}: {description['seconds']:.1f} s",
                    flush=True,
                )
    if not done["quick"]:  # when the trainings are over
        first = torch.load(victims["cifar-500-ablation/0"][1].result(), weights_only=True)
        done["quick"] = quick(first, device)
        write_json(record, done)


def quick(victim: Victim, device: str) -> dict[str, Any]:
    """Counts of one short restart, timed with its kernels chosen; "1" has little but the capture."""
    counts = {}
    for steps in (QUICK[0], 1, *QUICK):  # the first one warms up
        reconstruction = attacked(victim, "all", 0, device, steps, 1000)
        counts[str(steps)] = {
            "seconds": reconstruction.seconds,
            **figures(reconstruction.x, victim, device),
        }
    return counts


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
