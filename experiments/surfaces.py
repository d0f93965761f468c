"""What is reconstructed from files as people save them, by their attack surfaces?

    python -m experiments.image_data SOURCE FOLDER                images for claims, others for tuning
    python -m experiments.surfaces variants FOLDER OUT            attack settings, tune pool
    python -m experiments.surfaces draw                           seeds, after the settings are committed
    python -m experiments.surfaces run FOLDER OUT --device cuda   files, attacks, scores
    python -m experiments.surfaces table OUT                      counts with the bars
    python -m experiments.surfaces picture PICTURES.npz PNG       the best of each file above their images
    python -m experiments.surfaces gates FOLDER                   why raw pixels give less

A file is ``torch.save({"model_state_dict": ..., "optimizer_state_dict": ...})`` after a plain loop with
torch.optim, or ``joblib.dump`` of an MLPClassifier with its defaults. ``rs.attack(file)`` attacks every
surface of the file. After ``residuum strip``, the file is attacked with the attacks that still apply, for
the same time. Pools, seeds and counting are those of ``unmix.py``. Settings were chosen on FOLDER/tune with
seeds from 9101 on. A sample counts by its one-to-one match over all candidates, by NCC up to sign at full
resolution. Counts of as many held-out images are stored with them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import residuum as rs
from experiments import RESULTS
from experiments.programs import run_program
from experiments.seeds import draw_seeds
from experiments.timing import clock
from experiments.unmix import HELD_OUT, LEVELS, SHOWN, VICTIMS, judge, picture
from residuum.attacks import OptimizerState, Unmix, UnmixOptimizerState, attack_class
from residuum.datasets import load_dataset
from residuum.errors import InputError
from residuum.evaluation.matching import greedy
from residuum.io.release import open_release
from residuum.io.release_knowledge import add_stored_knowledge, read_stored_knowledge
from residuum.records import Split, write_json
from residuum.records.rundir import environment, require_device
from residuum.similarity import ncc
from residuum.training import TrainingConfig, initialize

SEEDS_FILE = RESULTS / "surfaces-seeds.json"
TUNING_SEEDS = tuple(range(9101, 9200))


@dataclass(frozen=True)
class Row:
    """One kind of file and its bars, mean of three.

    Attributes:
        n: Number of images.
        training: "momentum" (SGD, binary, small first layer), "adam" (ten classes, torch's initialization) or
            "sklearn" (MLPClassifier).
        widths: Widths of the hidden layers.
        centered: Whether the training mean is subtracted.
        bars: Least number of images by level of NCC.
    """

    n: int
    training: str
    widths: tuple[int, ...]
    centered: bool
    bars: dict[str, float]


ROWS = {
    "momentum-500": Row(500, "momentum", (1000, 1000), True, {"0.9": 25}),
    "sklearn-100": Row(100, "sklearn", (200,), True, {"0.8": 40}),
    "sklearn-100-raw": Row(100, "sklearn", (200,), False, {}),
    "adam-100": Row(100, "adam", (1000,), True, {"0.8": 40}),
    "adam-100-raw": Row(100, "adam", (1000,), False, {}),
}
BATCH = {"momentum": 50, "adam": 32}
RATE = {"momentum": 0.01, "adam": 1e-3}
STEPS = {"momentum": 4000, "adam": 5000}
ENOUGH = {"momentum": 0.0, "adam": 1e-3}  # mean loss at which training ends
# Candidates in multiples of n; restarts and steps of the stationarity attacks, twice as many restarts where
# the weights are all there is; seconds that unmix is sized by.
CANDIDATES, RESTARTS, ATTACK_STEPS, UNMIX_SECONDS = 2, 1, 6000, 600.0
# A neuron tells samples apart that is on for this share of them and off for it; ways of mixing are counted
# above this share of the strongest.
TELLS, WAYS = 0.05, 0.01
sizes = {"unmix": UNMIX_SECONDS}  # less where one core is all there is: --seconds


def make_file(name: str, seed: int, root: str, device: str, folder: Path, tiny: bool) -> Path:
    """Write the file of a network, and its images into an ``.npz`` file next to it."""
    row = ROWS[name]
    row = replace(row, n=20, widths=tuple(60 for _ in row.widths)) if tiny else row
    task = "binary" if row.training == "momentum" else "multiclass"
    split = load_dataset(
        "cifar10", row.n, seed=seed, root=root, task=task, holdout=HELD_OUT, center=row.centered
    )
    suffix = "joblib" if row.training == "sklearn" else "pt"
    path = folder / f"{name}-{seed}.{suffix}"
    if row.training == "sklearn":
        x, y = split.train.x.flatten(1).float().numpy(), split.train.y.numpy()
        from sklearn.neural_network import MLPClassifier

        model = MLPClassifier(row.widths, random_state=seed % 2**32, max_iter=1000)
        joblib.dump(model.fit(x, y), path)
    else:
        torch.save(train_checkpoint(row, split, seed, device, tiny), path)
    held = split.holdout.x.float().numpy()
    np.savez(path.with_suffix(".npz"), x=split.train.x.float().numpy(), held=held)
    return path


def train_checkpoint(row: Row, split: Split, seed: int, device: str, tiny: bool) -> dict[str, Any]:
    """Train in a plain loop, and return the checkpoint with the optimizer state."""
    x, y = split.train.x.flatten(1).float().to(device), split.train.y.to(device)
    outputs = 1 if row.training == "momentum" else len(split.train.classes)
    sizes = "-".join(map(str, (x.shape[1], *row.widths, outputs)))
    start = TrainingConfig(
        init="small" if row.training == "momentum" else "default", seed=seed, dtype="float32"
    )
    bias = "hidden" if row.training == "momentum" else "all"
    model = initialize(rs.Architecture.parse(f"mlp:{sizes},bias={bias}"), start).to(device)
    rate, batch = RATE[row.training], min(BATCH[row.training], len(x))
    if row.training == "momentum":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), rate)
    order = torch.Generator().manual_seed(seed)
    steps, losses = 60 if tiny else STEPS[row.training], list[float]()
    for _ in range(steps * batch // len(x)):
        losses = []
        for rows in torch.randperm(len(x), generator=order).split(batch):
            optimizer.zero_grad()
            loss = loss_of(model(x[rows.to(device)]), y[rows.to(device)])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if np.mean(losses) < ENOUGH[row.training]:
            break
    return {
        "model_state_dict": {k: t.cpu() for k, t in model.state_dict().items()},
        "optimizer_state_dict": optimizer.state_dict(),
        "loss": float(np.mean(losses)),
    }


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the logistic loss of labels -1 and 1, or the cross-entropy of classes."""
    if outputs.shape[1] == 1:
        return F.softplus(-y.float() * outputs[:, 0]).mean()
    return F.cross_entropy(outputs, y.long())


def applicable_attacks(
    path: Path, n: int, device: str, seed: int, tiny: bool, restarts: int
) -> list[Any]:
    """Return every attack that applies to the attack surfaces of the file, weights first."""
    released = rs.load_checkpoint(path)
    outputs = released.architecture.outputs
    dtype = "tf32" if device.startswith("cuda") else "float32"
    common = rs.attacks.Auto(
        candidates=CANDIDATES * n,
        restarts=restarts,
        steps=30 if tiny else ATTACK_STEPS,
        device=device,
        seed=seed,
        dtype=dtype,
    )
    sized = common.changed(seconds=1.0 if tiny else sizes["unmix"])
    kkt = "binary-kkt" if outputs == 1 else "multiclass-kkt"
    applicable_attacks = [Unmix.like(sized), attack_class(kkt).like(common)]
    if read_stored_knowledge(open_release(path), released).moment is not None:
        applicable_attacks += [UnmixOptimizerState.like(sized), OptimizerState.like(common)]
    return applicable_attacks


def run_attacks(
    path: Path, n: int, device: str, seed: int, tiny: bool, restarts: int, only: list[str]
) -> dict[str, Any]:
    """Return candidates and seconds of every attack on a file, or why it does not apply."""
    shape = (3, 32, 32)
    results: dict[str, Any] = {}
    for attack in applicable_attacks(path, n, device, seed, tiny, restarts):
        if only and attack.name not in only:
            continue
        try:
            result, seconds = clock(
                lambda attack=attack: attack.run(path, rs.Knowledge(shape=shape)), device
            )
        except InputError as problem:
            results[attack.name] = {"why not": problem.message}
            continue
        x = result.x.float()[: 3 * n] if "unmix" in attack.name else result.x.float()
        results[attack.name] = {"seconds": seconds, "x": x.reshape(-1, *shape).numpy()}
    return results


def run(
    folder: Path,
    out: Path,
    device: str,
    pool: str,
    workers: int,
    names: list[str],
    tiny: bool,
    only: list[str],
) -> None:
    """Measure every file that ``out`` does not have."""
    out.mkdir(parents=True, exist_ok=True)
    (cache := folder / "files").mkdir(parents=True, exist_ok=True)
    seeds, record = _seeds(pool), out / f"surfaces-{pool}.json"
    done: dict[str, Any] = (
        json.loads(record.read_text())
        if record.exists()
        else {
            "pool": pool,
            "seeds": seeds,
            "tiny": tiny,
            "environment": environment(device),
            "settings": {
                "candidates": CANDIDATES,
                "restarts": RESTARTS,
                "steps": ATTACK_STEPS,
                "unmix seconds": sizes["unmix"],
                "batch": BATCH,
                "rate": RATE,
                "steps of training": STEPS,
                "enough": ENOUGH,
            },
            "victims": {},
        }
    )
    if done["seeds"] != seeds or done["tiny"] != tiny:
        raise InputError(f"{record} has results of another run.", "Pass another folder.")
    start = time.time()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as processes:
        for name in names:
            for k in range(1 if tiny else VICTIMS):
                if (key := f"{name}/{k}") in done["victims"]:
                    continue
                seed = seeds["victims"][name][k]
                path = make_file(name, seed, str(folder / pool), device, cache, tiny)
                with np.load(path.with_suffix(".npz")) as images:
                    true, held = images["x"], images["held"]
                entry: dict[str, Any] = {}
                saved = run_attacks(path, len(true), device, seed, tiny, RESTARTS, only)
                entry["as saved"] = _judged(processes, saved, true, held, seed)
                keep_pictures(out, f"{name} as saved", saved, true)
                bare = cache / f"bare-{path.stem}.pt"
                bare.unlink(missing_ok=True)
                if path.suffix == ".pt":
                    entry["loss"] = torch.load(path, weights_only=True)["loss"]
                    rs.strip(path, bare)
                    entry["bits"] = same_bits(path, bare)
                else:
                    torch.save(rs.load_checkpoint(path).theta, bare)
                alone = run_attacks(bare, len(true), device, seed, tiny, 2 * RESTARTS, only)
                if any("x" in result for result in alone.values()):
                    entry["weights alone"] = _judged(processes, alone, true, held, seed)
                    keep_pictures(out, f"{name} weights alone", alone, true)
                done["victims"][key] = entry
                write_json(record, done)
                print(f"{key}: {time.time() - start:.0f} s in all", flush=True)


def keep_pictures(out: Path, name: str, results: dict[str, Any], true: np.ndarray) -> None:
    """Store (2, SHOWN, ...) the best candidates on the first file of a kind, and their matches."""
    path = out / "surfaces-pictures.npz"
    with np.load(path) if path.exists() else nullcontext({}) as before:
        pictures = dict(before)
    if name in pictures:
        return
    x = torch.from_numpy(
        np.concatenate([result["x"] for result in results.values() if "x" in result])
    )
    similarity = ncc(x, torch.from_numpy(true))
    match = greedy(similarity.abs().numpy())
    best = np.argsort(-match.value)[:SHOWN]
    sign = similarity[match.candidate[best], best].sign().reshape(-1, 1, 1, 1)
    pairs = torch.stack([x[match.candidate[best]] * sign, torch.from_numpy(true)[best]])
    np.savez_compressed(path, **pictures, **{name: pairs.half().numpy()})


def same_bits(path: Path, bare: Path) -> bool:
    """Return True if the stripped file holds the weights of the other file, bit for bit."""
    saved = torch.load(path, weights_only=True)["model_state_dict"]
    stripped = torch.load(bare, weights_only=True)
    return {*saved} == {*stripped} and all(torch.equal(saved[n], t) for n, t in stripped.items())


def _judged(
    processes: ProcessPoolExecutor,
    results: dict[str, Any],
    true: np.ndarray,
    held: np.ndarray,
    seed: int,
) -> dict[str, Any]:
    """Count the matches of every attack, and of the candidates of all attacks."""
    ran = {name: result for name, result in results.items() if "x" in result}
    pools = {name: result["x"] for name, result in ran.items()}
    pools["all"] = np.concatenate(list(pools.values()))
    futures = {
        name: processes.submit(judge, x, true, held, seed)
        for name, x in pools.items()
        if len(held) >= len(true)
    }
    rows = {name: future.result() for name, future in futures.items()}
    for name, result in ran.items():
        rows[name]["seconds"] = result["seconds"]
    rows["all"]["seconds"] = sum(result["seconds"] for result in ran.values())
    return rows | {name: result for name, result in results.items() if name not in ran}


VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no prior": {"priors": (), "lr_lam": 0.01},
    "no prior, slow": {"priors": (), "lr_lam": 0.003},
    "1 x n": {"candidates": 1},
    "4 x n": {"candidates": 4},
    "15000 steps": {"steps": 15000},
    "3 restarts": {"restarts": 3},
    "rate 0.003": {"lr_x": 0.003},
    "quick multipliers": {"lr_lam": 0.01},
    **{f"sparse {w:g}": {"priors": (("sparse-gradients", w),)} for w in (6.0, 20.0, 200.0)},
}


def variants(folder: Path, out: Path, device: str, names: list[str], tiny: bool) -> None:
    """Run the attack on the optimizer state of the first tuning file with one setting after another."""
    out.mkdir(parents=True, exist_ok=True)
    (cache := folder / "files").mkdir(parents=True, exist_ok=True)
    record = out / "surfaces-variants.json"
    done: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    dtype = "tf32" if device.startswith("cuda") else "float32"
    for row in names:
        seed = _seeds("tune")["victims"][row][0]
        path = make_file(row, seed, str(folder / "tune"), device, cache, tiny)
        with np.load(path.with_suffix(".npz")) as images:
            true, held = images["x"], images["held"]
        for name, changes in VARIANTS.items():
            if f"{row}: {name}" in done:
                continue
            settings = {"steps": ATTACK_STEPS, "restarts": 1, **changes}
            settings["candidates"] = changes.get("candidates", CANDIDATES) * len(true)
            settings["steps"] = 20 if tiny else settings["steps"]
            config = rs.attacks.OptimizerState(device=device, seed=seed, dtype=dtype, **settings)
            knowledge = rs.Knowledge(shape=(3, 32, 32))
            reconstruction, seconds = clock(
                lambda c=config, p=path, k=knowledge: rs.attack(p, k, c), device
            )
            x = reconstruction.x.float().reshape(-1, 3, 32, 32).numpy()
            last = reconstruction.layers[0, -1].clamp(min=0).sqrt().tolist()
            counts = judge(x, true, held, seed) | {"seconds": seconds, "residuals": last}
            done[f"{row}: {name}"] = counts
            write_json(record, done)
            print(f"{row}: {name}:", json.dumps(counts), flush=True)


def gates(folder: Path) -> None:
    """Measure how many ways of mixing samples an optimizer state shows: singular values of C, C X = M.

    A neuron that is active for all samples, or for none, mixes them all alike, whatever its weights are.
    """
    (cache := folder / "files").mkdir(parents=True, exist_ok=True)
    figures: dict[str, list[dict[str, float]]] = {}
    for name, row in ROWS.items():
        for seed in _seeds("claim")["victims"][name] if row.training != "momentum" else ():
            paths = [p for p in cache.glob(f"{name}-{seed}.*") if p.suffix != ".npz"]
            path = (
                paths[0]
                if paths
                else make_file(name, seed, str(folder / "claim"), "cpu", cache, False)
            )
            released = rs.load_checkpoint(path)
            with np.load(path.with_suffix(".npz")) as images:
                x = torch.from_numpy(images["x"]).flatten(1).double()
            moment = add_stored_knowledge(open_release(path), released, rs.Knowledge()).moment
            assert moment is not None
            theta, rows = released.theta, moment["layers.0.weight"].double()
            on = (x @ theta["layers.0.weight"].double().T + theta["layers.0.bias"]) > 0  # (n, h)
            share = on.double().mean(0)
            ways = torch.linalg.svdvals(
                rows @ torch.linalg.pinv(x, rtol=1e-4)
            )  # centered: rank n - 1
            mean = F.normalize(x.mean(0), dim=0)
            figures.setdefault(name, []).append(
                {
                    "silent": float((share == 0).double().mean()),
                    "telling": float(((share > TELLS) & (share < 1 - TELLS)).double().mean()),
                    "ways": int((ways > WAYS * ways[0]).sum()),
                    "along the mean": float((rows @ mean).norm() / rows.norm()) ** 2,
                }
            )
            print(name, seed, figures[name][-1], flush=True)
    write_json(
        RESULTS / "surfaces-gates.json", {"victims": figures, "environment": environment("cpu")}
    )


def draw() -> None:
    """Draw the seeds of every file."""
    draw_seeds(SEEDS_FILE, victims=dict.fromkeys(ROWS, VICTIMS))


def _seeds(pool: str) -> dict[str, Any]:
    if pool == "claim":
        return dict(json.loads(SEEDS_FILE.read_text()))
    seeds = iter(TUNING_SEEDS)
    return {"commit": "", "victims": {name: [next(seeds) for _ in range(VICTIMS)] for name in ROWS}}


def table(out: Path, pool: str) -> None:
    """Print the means of the files with the bars."""
    done = json.loads((out / f"surfaces-{pool}.json").read_text())
    for name, row in ROWS.items():
        entries = [v for key, v in done["victims"].items() if key.split("/")[0] == name]
        for arm in ("as saved", "weights alone") if entries else ():
            for attack in entries[0].get(arm, ()):
                rows = [e[arm][attack] for e in entries if "0.9" in e[arm].get(attack, {})]
                if not rows:
                    print(f"{name:16} {arm:14} {attack:15} {entries[0][arm][attack]}")
                    continue
                keys = (
                    "recovered",
                    "expected",
                    "threshold",
                    *map(str, LEVELS),
                    "0.8 held out",
                    "0.9 held out",
                    "seconds",
                )
                means = {k: sum(r[k] for r in rows) / len(rows) for k in keys}
                text = " ".join(f"{k} {v:.4g}" for k, v in means.items())
                print(f"{name:16} {arm:14} {attack:15} {text}")
                if (arm, attack) == ("as saved", "all"):
                    met = all(means[k] >= least for k, least in row.bars.items())
                    print(f"{'':16} wanted {row.bars}: {'met' if met else 'MISSED'}")


def main() -> int:
    """Run a command of the head of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw")
    command = commands.add_parser("run")
    command.add_argument("folder", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("--device", default="cpu")
    command.add_argument("--pool", choices=("claim", "tune"), default="claim")
    command.add_argument("--workers", type=int, default=4)
    command.add_argument("--tiny", action="store_true")
    command.add_argument("--rows", nargs="*", choices=tuple(ROWS), default=tuple(ROWS))
    command.add_argument("--seconds", type=float, default=UNMIX_SECONDS, help="time of unmixing")
    command.add_argument("--attacks", nargs="*", default=(), help="run only these attacks")
    command = commands.add_parser("variants")
    command.add_argument("folder", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("--device", default="cpu")
    command.add_argument("--tiny", action="store_true")
    command.add_argument("--rows", nargs="*", choices=tuple(ROWS), default=("momentum-500",))
    command = commands.add_parser("picture")
    command.add_argument("archive", type=Path)
    command.add_argument("out", type=Path)
    command = commands.add_parser("gates")
    command.add_argument("folder", type=Path)
    command = commands.add_parser("table")
    command.add_argument("out", type=Path)
    command.add_argument("--pool", choices=("claim", "tune"), default="claim")
    options = parser.parse_args()
    require_device(getattr(options, "device", "cpu"))
    if options.command == "draw":
        draw()
    elif options.command == "variants":
        variants(options.folder, options.out, options.device, list(options.rows), options.tiny)
    elif options.command == "gates":
        gates(options.folder)
    elif options.command == "picture":
        picture(options.archive, options.out, np.load(options.archive).files)
    elif options.command == "table":
        table(options.out, options.pool)
    else:
        sizes["unmix"] = options.seconds
        run(
            options.folder,
            options.out,
            options.device,
            options.pool,
            options.workers,
            list(options.rows),
            options.tiny,
            list(options.attacks),
        )
        table(options.out, options.pool)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
