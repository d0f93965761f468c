"""The stationarity attack with its new terms, one by one, beside chance and beside the attack without them.

    python -m benchmarks.unmix data SOURCE FOLDER                   images for claims, others for tuning
    python -m benchmarks.stationarity draw                          seeds, settings being committed
    python -m benchmarks.stationarity run FOLDER OUT --device cuda  victims, attacks, scores; resumable
    python -m benchmarks.stationarity table OUT                     means beside what was wanted

Settings are those of this file and of ``AttackConfig``; they were chosen on the images of FOLDER/tune
and seeds 9001-9006, which no claim uses. Arms: ``plain`` has neither prior nor margins; ``all`` is what
the attack chooses by itself; ``published`` has the settings of Haim et al. 2022 (ten classes: Buzaglo et
al. 2023) with as many candidates, restarts and steps, in tf32; the others name their terms. Counts are
one-to-one by NCC at full resolution; ``ssim3`` is the published rule; the same against as many held-out
images stands beside each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import RESULTS, clock, draw_seeds
from residuum.attacks import PRESETS, AttackConfig, attack
from residuum.attacks.kinks import polished
from residuum.attacks.objectives import OBJECTIVES
from residuum.attacks.run import MARGINS, SPARSE
from residuum.attacks.unmix import unmix
from residuum.checkpoints.surfaces import SURFACES, WEIGHTS
from residuum.datasets import load_dataset
from residuum.errors import InputError
from residuum.evaluation.matching import greedy
from residuum.evaluation.metrics import display, published_search, ssim_score
from residuum.evaluation.null import calibrate
from residuum.records import Checkpoint, Knowledge, Reconstruction, write_json
from residuum.records.rundir import environment
from residuum.similarity import ncc
from residuum.training import TrainingConfig, train

SEEDS_FILE = RESULTS / "stationarity-seeds.json"
TUNING_SEEDS = tuple(range(9001, 9100))
HELD_OUT, SUBSETS, LEVELS = 1000, 200, (0.7, 0.8, 0.9)
HIDDEN = "1000-1000"
PRIOR = (("sparse-gradients", SPARSE),)
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"priors": (), "margins": 0.0},
    "margins": {"priors": (), "margins": MARGINS},
    "prior": {"priors": PRIOR, "margins": 0.0},
    "both": {"priors": PRIOR, "margins": MARGINS},
    "patches": {"priors": (("patch-experts", SPARSE),), "margins": 0.0},
    "all": {},
}
PUBLISHED = {
    "cifar10": "haim2022-cifar-b9dfyspx",
    "mnist": "haim2022-mnist-rbijxft7",
    "multiclass": "buzaglo2023-multiclass",
}
SMALL: dict[str, Any] = {"restarts": 1, "steps": 6000}
MARGIN = TrainingConfig(steps=5000, dtype="float32")
EPOCHS = TrainingConfig(method="gd", steps=10_000, dtype="float32")


@dataclass(frozen=True)
class Row:
    """One kind of victim, how it is attacked, and what must be found, mean of the victims.

    arms: keys of ARMS; "kinks" polishes what the arm before it found, "with unmix" pools that with
    unmixed images.
    """

    data: str
    n: int
    training: TrainingConfig
    arms: tuple[str, ...] = ("published", "plain", "all")
    attack: dict[str, Any] = field(default_factory=lambda: SMALL)
    task: str = "binary"
    victims: int = 3
    wanted: dict[str, float] = field(default_factory=dict)


BIG = {"restarts": 4, "steps": 6000, "candidates": 1000}
ABLATION = ("published", "plain", "margins", "prior", "both", "kinks", "with unmix", "patches")
ROWS = {
    "cifar-500": Row(
        "cifar10", 500, MARGIN, ("all",), BIG, wanted={"ssim3": 65, "top10": 0.75, "0.8": 35}
    ),
    "mnist-500": Row("mnist", 500, MARGIN, attack={**BIG, "restarts": 2}, wanted={"0.9": 32}),
    "cifar-1000": Row(
        "cifar10",
        1000,
        MARGIN,
        attack={**BIG, "restarts": 2, "candidates": 2000},
        victims=2,
        wanted={"ssim3": 50},
    ),
    "cifar-500-ablation": Row("cifar10", 500, MARGIN, ABLATION),
    "cifar-100-ablation": Row("cifar10", 100, MARGIN, ABLATION),
    "cifar-200": Row("cifar10", 200, MARGIN, ("published", "plain", "all", "with unmix")),
    "cifar-100-gd": Row("cifar10", 100, EPOCHS),
    "cifar-100-batches": Row("cifar10", 100, replace(EPOCHS, method="sgd", batch=50, steps=4000)),
    "cifar-100-default": Row("cifar10", 100, replace(MARGIN, init="default")),
    "cifar-100-decay": Row("cifar10", 100, replace(EPOCHS, weight_decay=1e-3)),
    "cifar-100-ten": Row("cifar10", 100, MARGIN, task="multiclass"),
    "cifar-100-gd-long": Row("cifar10", 100, replace(EPOCHS, steps=100_000)),
}
SAME = {"cifar-500-ablation": "cifar-500"}  # victims of another row
QUICK = (300, 400, 500, 600, 1000, 1500)  # steps of one restart, for the time to published quality


def make(name: str, seed: int, root: str, device: str, path: str, tiny: bool) -> str:
    """Train a victim and keep it in ``path``."""
    if Path(path).exists():
        return path
    torch.set_num_threads(1)
    row, start = ROWS[name], time.time()
    n = 20 if tiny else row.n
    split = load_dataset(row.data, n, seed=seed, root=root, task=row.task, holdout=HELD_OUT)
    outputs = 1 if row.task == "binary" else len(split.train.classes)
    arch = f"mlp:{split.train.x[0].numel()}-{'30-30' if tiny else HIDDEN}-{outputs}"
    config = replace(row.training, seed=seed, **({"steps": 40} if tiny else {}))
    if tiny and config.batch:
        config = replace(config, batch=10)
    state = train(arch, split.train, config, device=device)
    victim = {
        "arch": arch,
        "theta": dict(state.theta),
        "x": split.train.x.float(),
        "held": split.holdout.x.float(),
        "mean": split.train.mean,
        "facts": {
            "seed": seed,
            "seconds": time.time() - start,
            "status": state.status,
            **state.history[-1],
        },
    }
    torch.save(victim, f"{path}.part")
    os.replace(f"{path}.part", path)
    return path


def figures(x: Tensor, victim: dict[str, Any], device: str) -> dict[str, Any]:
    """Counts above fixed levels, of the training set and of as many held-out images."""
    n, x = len(victim["x"]), x.to(device).float()
    found: dict[str, Any] = {"candidates": len(x)}
    for tag, samples in (("", victim["x"]), (" held out", victim["held"][:n])):
        samples = samples.to(device)
        similar = ncc(x, samples)
        value = greedy(similar.cpu().double().numpy()).value
        found |= {f"{level}{tag}": int((value > level).sum()) for level in LEVELS}
        if x.shape[1] == 3:
            mean = victim["mean"].to(device).float()
            nearest = published_search(x, samples).argmax(0)
            scores = ssim_score(display(x[nearest], mean), samples + mean, 3)
            found[f"ssim3{tag}"] = int((scores > 0.4).sum())
            found[f"top10{tag}"] = round(float(scores.topk(min(10, n)).values.mean()), 4)
    return found


def recovered(x: np.ndarray, true: np.ndarray, held: np.ndarray, seed: int) -> dict[str, Any]:
    """How many beat the 99th percentile of held-out sets, in a process of its own."""
    torch.set_num_threads(1)
    gain = ncc(torch.from_numpy(x), torch.from_numpy(np.concatenate([true, held]))).double().numpy()
    result = calibrate(gain, len(true), subsets=SUBSETS, rng=np.random.default_rng(seed))
    return {
        "recovered": int(result.recovered.sum()),
        "expected": result.expected_by_chance,
        "threshold": result.threshold,
    }


def arms(
    row: Row, victim: dict[str, Any], seed: int, device: str, tiny: bool, done: Any = ()
) -> Any:
    """(arm, candidates, facts) one after the other, but for those that are done."""
    shape = tuple(victim["x"].shape[1:])
    knowledge = Knowledge(shape=shape, sample_count=len(victim["x"]))
    checkpoint = Checkpoint(victim["theta"], victim["arch"], shape)
    found: Reconstruction | None = None
    missing = [arm not in done for arm in row.arms]
    for k, arm in enumerate(row.arms):
        later = row.arms[k + 1 :]
        needed = bool(later) and later[0] in ("kinks", "with unmix")  # these build on it
        if not missing[k] and not (needed and any(missing[k + 1 :])):
            continue
        if arm == "kinks":
            assert found is not None
            config = AttackConfig.from_json(found.settings)
            objective = OBJECTIVES[config.objective].configured(config, knowledge)
            surface = SURFACES[WEIGHTS](checkpoint, knowledge)
            before = found
            better, seconds = clock(
                lambda s=surface, o=objective, f=before, c=config: polished(s, o, f, c), device
            )
            yield arm, better.x, {"seconds": before.seconds + seconds, "note": better.notes[-1]}
            continue
        if arm == "with unmix":
            assert found is not None
            rows = victim["theta"]["layers.0.weight"].float().to(device)
            try:
                sources, seconds = clock(lambda r=rows: unmix(r, shape, seed=seed), device)
            except InputError as problem:
                yield arm, None, {"refused": str(problem)}
                continue
            x = sources.x[: 2 * len(victim["x"])].float().cpu().reshape(-1, *shape)
            yield "unmix", torch.cat([x, -x]), {"seconds": seconds}  # sign-free
            yield arm, torch.cat([found.x.float(), x, -x]), {"seconds": found.seconds + seconds}
            continue
        preset = PRESETS["residuum"]
        if arm == "published":
            key = row.data if row.task == "binary" else row.task
            preset = PRESETS[PUBLISHED[key]].changed(dtype=preset.numerics.dtype)
        settings = {**row.attack, **ARMS.get(arm, {}), "seed": seed % 1000, "device": device}
        if tiny:
            settings |= {"steps": 20, "candidates": 40}
        found = attack(checkpoint, knowledge, preset.changed(**settings))
        facts = {"seconds": found.seconds, "residual": float(found.layers[:, -1, 0].min())}
        yield arm, found.x, {**facts, "settings": found.settings}


def run(
    folder: Path,
    out: Path,
    device: str,
    pool: str,
    workers: int,
    names: list[str],
    tiny: bool,
    until: float,
) -> None:
    """Every victim and arm that is not in ``out`` yet, as long as the clock allows."""
    out.mkdir(parents=True, exist_ok=True)
    (cache := folder / "victims").mkdir(parents=True, exist_ok=True)
    seeds = _seeds(pool)
    record = out / "stationarity.json"
    done: dict[str, Any] = (
        json.loads(record.read_text())
        if record.exists()
        else {
            "pool": pool,
            "seeds": seeds,
            "tiny": tiny,
            "environment": environment(device),
            "arms": ARMS,
            "victims": {},
            "quick": {},
        }
    )
    start, context = time.time(), get_context("spawn")
    waiting: list[tuple[dict[str, Any], Future[dict[str, Any]]]] = []

    def keep() -> None:
        for entry, one in [pair for pair in waiting if pair[1].done()]:
            entry |= one.result()
            waiting.remove((entry, one))
        write_json(record, done)

    with ProcessPoolExecutor(workers, mp_context=context) as processes:
        made: dict[str, Future[str]] = {}
        for name in names:
            for k in range(ROWS[name].victims):
                own = SAME.get(name, name)
                if f"{own}/{k}" not in made:
                    path = cache / f"{pool}-{'tiny-' if tiny else ''}{own}-{k}.pt"
                    made[f"{own}/{k}"] = processes.submit(
                        make, own, seeds[own][k], str(folder / pool), device, str(path), tiny
                    )
        for name in names:
            row = ROWS[name]
            for k in range(row.victims):
                key = f"{name}/{k}"
                before = done["victims"].get(key, {}).get("arms", {})
                if set(row.arms) <= set(before) or time.time() - start > until:
                    continue
                own = SAME.get(name, name)
                victim = torch.load(made[f"{own}/{k}"].result(), weights_only=True)
                entry = done["victims"][key] = {"victim": victim["facts"], "arms": dict(before)}
                for arm, x, facts in arms(row, victim, seeds[own][k], device, tiny, before):
                    entry["arms"][arm] = dict(facts)
                    if x is None:
                        continue
                    entry["arms"][arm] |= figures(x, victim, device)
                    parts = (p.float().numpy() for p in (x, victim["x"], victim["held"]))
                    future = processes.submit(recovered, *parts, seeds[own][k])
                    waiting.append((entry["arms"][arm], future))
                    keep()
                print(f"{key} {time.time() - start:.0f} s", _line(entry["arms"]), flush=True)
                keep()
        for entry, one in waiting:
            entry |= one.result()
        waiting.clear()
        paths = {key: one.result() for key, one in made.items()}
        if "cifar-500/0" in made and "1" not in done["quick"]:  # when the trainings are over
            victim = torch.load(paths["cifar-500/0"], weights_only=True)
            done["quick"] = quick(ROWS["cifar-500"], victim, device, tiny)
        keep()
    print(f"{time.time() - start:.0f} s in all")


def quick(row: Row, victim: dict[str, Any], device: str, tiny: bool) -> dict[str, Any]:
    """Counts of one short restart, timed with its kernels chosen; "1" has little but the capture."""
    small = replace(row, arms=("all",))
    found = {}
    for steps in (QUICK[0], 1, *QUICK):  # the first one warms up
        short = replace(small, attack={"restarts": 1, "steps": steps, "candidates": 1000})
        ((_, x, facts),) = arms(short, victim, 0, device, tiny)
        found[str(steps)] = {"seconds": facts["seconds"], **figures(x, victim, device)}
    return found


def _line(arms: dict[str, Any]) -> str:
    keys = ("ssim3", "0.8", "0.9", "0.8 held out")
    return "; ".join(
        f"{arm} {one.get('seconds', 0):.1f} s "
        + " ".join(f"{k} {one[k]}" for k in keys if k in one)
        for arm, one in arms.items()
    )


def draw() -> None:
    """Of every victim."""
    draw_seeds(SEEDS_FILE, victims={name: row.victims for name, row in ROWS.items()})


def _seeds(pool: str) -> dict[str, list[int]]:
    if pool == "tune":
        return {name: list(TUNING_SEEDS[i : i + 3]) for i, name in enumerate(ROWS)}
    return json.loads(SEEDS_FILE.read_text())["victims"]


def table(out: Path) -> None:
    """Mean of the victims, row by row and arm by arm."""
    done = json.loads((out / "stationarity.json").read_text())
    for name, row in ROWS.items():
        entries = [v for key, v in done["victims"].items() if key.split("/")[0] == name]
        entries = [v["arms"] for v in entries]
        for arm in dict.fromkeys(arm for entry in entries for arm in entry):
            own = [e[arm] for e in entries if arm in e and "candidates" in e[arm]]
            if not own:
                continue
            means = {
                k: round(sum(e[k] for e in own) / len(own), 3)
                for k, v in own[0].items()
                if isinstance(v, int | float)
            }
            print(f"{name:20} {arm:11} {len(own)} victims", means)
            if arm == "all" and row.wanted:
                met = {k: means[k] >= least for k, least in row.wanted.items()}
                print(f"{'':20} wanted {row.wanted}: {met}")
    print("quick:", done["quick"])


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw")
    one = commands.add_parser("run")
    one.add_argument("folder", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--device", default="cpu")
    one.add_argument("--pool", choices=("claim", "tune"), default="claim")
    one.add_argument("--workers", type=int, default=6)
    one.add_argument("--tiny", action="store_true", help="the whole path, which measures nothing")
    one.add_argument(
        "--seconds", type=float, default=float("inf"), help="no new victim after these"
    )
    one.add_argument("--rows", nargs="*", choices=tuple(ROWS), default=tuple(ROWS))
    one = commands.add_parser("table")
    one.add_argument("out", type=Path)
    options = parser.parse_args()
    if options.command == "draw":
        draw()
    elif options.command == "table":
        table(options.out)
    else:
        run(
            options.folder,
            options.out,
            options.device,
            options.pool,
            options.workers,
            list(options.rows),
            options.tiny,
            options.seconds,
        )
        table(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
