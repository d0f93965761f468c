"""How many training images does unmixing of one weight matrix reconstruct?

    python -m experiments.image_data SOURCE FOLDER            images for claims, others for tuning
    python -m experiments.unmix draw                          seeds, after the settings are committed
    python -m experiments.unmix draw --rows cifar-500         new seeds after a change of settings
    python -m experiments.unmix run FOLDER OUT --device cuda  networks, attacks, scores
    python -m experiments.unmix table OUT                     counts with the bars
    python -m experiments.unmix picture PICTURES.npz PNG      the best of some networks above their images
    python -m experiments.unmix reliability OUT               confidence against truth, of the committed claim

The stationarity attack runs on the same networks for the same time. The settings of this file and of
``attacks/unmixing/ica.py`` were chosen on the images of FOLDER/tune and seeds 9001-9099, which no claim
uses. A claim uses FOLDER/claim, with seeds that ``draw`` takes from the entropy of the system after the
settings are committed.

A sample counts as recovered if its match, one-to-one by NCC up to sign at full resolution, exceeds the 99th
percentile of the same value over random held-out sets. At most 3n candidates count. An interrupted run
continues with the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import RESULTS
from experiments.programs import run_program
from experiments.seeds import draw_seeds
from experiments.timing import clock, threads
from residuum.attacks import Auto, attack
from residuum.attacks.random_streams import stream
from residuum.attacks.unmixing.attack import CONFIDENT_VALUES, confidence_by_share
from residuum.attacks.unmixing.ica import Effort, Sources, fastica, unmix, whiten
from residuum.datasets import load_dataset
from residuum.errors import InputError
from residuum.evaluation.matching import greedy
from residuum.evaluation.null import calibrate
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Knowledge, Split, write_json
from residuum.records.rundir import environment, require_device
from residuum.similarity import ncc
from residuum.training import TrainingConfig, initialize, train

SEEDS_FILE, AGAIN_FILE = RESULTS / "unmix-seeds.json", RESULTS / "unmix-seeds-again.json"
TUNING_SEEDS = tuple(range(9001, 9100))
VICTIMS = 3
HELD_OUT, SUBSETS, SIGNIFICANT = 1000, 500, 0.01
LEVELS = (0.7, 0.8, 0.9, 0.95)
SHOWN = 12  # best pairs kept for pictures
SHOWN_VICTIMS = (
    "cifar-100-0",
    "cifar-500-0",
    "mnist-100-0",
    "cifar-100-momentum-0",
    "sklearn-100-0",
)
CONTROLS = 20  # audits of each kind
FORCED_RANK = 60  # of networks never trained, which have no clean direction


@dataclass(frozen=True)
class Row:
    """One kind of network and its bars, mean of three.

    Attributes:
        data: Data set.
        n: Number of images.
        training: "margin", "gd", "momentum" (the buffer of SGD is unmixed), "sklearn" (Adam's first moment of
            an MLPClassifier) or "sklearn-raw" (the same with pixels that are not centered).
        bars: Least counts by "recovered" or by level of NCC.
    """

    data: str
    n: int
    training: str
    bars: dict[str, float]


ROWS = {
    "cifar-50": Row("cifar10", 50, "margin", {"recovered": 32, "0.9": 26}),
    "cifar-100": Row("cifar10", 100, "margin", {"recovered": 57, "0.9": 42}),
    "mnist-100": Row("mnist", 100, "margin", {"recovered": 40, "0.9": 20}),
    "cifar-200": Row("cifar10", 200, "margin", {"recovered": 50, "0.8": 45}),
    "cifar-500": Row("cifar10", 500, "margin", {"0.8": 12}),
    "cifar-100-gd": Row("cifar10", 100, "gd", {"recovered": 36}),
    "cifar-100-momentum": Row("cifar10", 100, "momentum", {"recovered": 48, "0.9": 40}),
    "sklearn-100": Row("cifar10", 100, "sklearn", {"0.8": 40}),
    "sklearn-100-raw": Row("cifar10", 100, "sklearn-raw", {}),
}
TRAININGS = {
    "margin": TrainingConfig(steps=5000, dtype="float32"),
    "gd": TrainingConfig(method="gd", steps=10_000, dtype="float32"),
    "momentum": TrainingConfig(method="sgd", batch=50, momentum=0.9, steps=4000, dtype="float32"),
}
HIDDEN, UNITS = "1000-1000", 200


@dataclass(frozen=True)
class Scale:
    """Full or tiny. Tiny runs all code in a minute on one core and measures nothing."""

    tiny: bool = False

    def row(self, row: Row) -> Row:
        """Return the row with the number of samples of this scale."""
        return replace(row, n=20) if self.tiny else row

    def training(self, name: str, seed: int) -> TrainingConfig:
        """Return the training with the number of steps of this scale."""
        config = TRAININGS[name].changed(seed=seed)
        return config.changed(steps=60, batch=min(config.batch, 10)) if self.tiny else config

    @property
    def hidden(self) -> str:
        """Return the widths of the hidden layers."""
        return "60-60" if self.tiny else HIDDEN

    @property
    def setting(self) -> Effort:
        """Return the settings of the attack."""
        if not self.tiny:
            return Effort()
        return Effort(
            ranks=(0.8, 0.6), strengths=(4.0,), starts=2, rounds=2, iterations=5, partitions=(2,)
        )


@dataclass(frozen=True)
class Victim:
    """A network of one row: weights, the rows that are unmixed, training images and held-out images."""

    name: str
    arch: str
    theta: dict[str, Tensor]
    rows: Tensor
    x: Tensor
    held: Tensor
    unseen: Tensor
    training: dict[str, Any]


def train_victim(name: str, seed: int, root: str, device: str, path: str, scale: Scale) -> str:
    """Train a network and store it in ``path``."""
    if Path(path).exists():
        return path
    torch.set_num_threads(1)
    row, start = scale.row(ROWS[name]), time.time()
    task = "multiclass" if row.training.startswith("sklearn") else "binary"
    center = row.training != "sklearn-raw"
    split = load_dataset(
        row.data, row.n, seed=seed, root=root, task=task, holdout=HELD_OUT, center=center
    )
    if task == "multiclass":
        arch, theta, rows, training = _estimator(split, seed)
    else:
        arch = f"mlp:{split.train.x[0].numel()}-{scale.hidden}-1"
        state = train(arch, split.train, scale.training(row.training, seed), device=device)
        theta, first = dict(state.theta), "layers.0.weight"
        rows = state.buffers[first] if row.training == "momentum" else theta[first]
        training = {"status": state.status, **state.history[-1]}
    victim = Victim(
        name,
        arch,
        theta,
        rows.float(),
        split.train.x.float(),
        split.holdout.x.float(),
        _unseen_images(row, split, root, task),
        {"seed": seed, "seconds": time.time() - start, **training},
    )
    torch.save(vars(victim), f"{path}.part")
    os.replace(f"{path}.part", path)
    return path


def _estimator(split: Split, seed: int) -> tuple[str, dict[str, Tensor], Tensor, dict[str, Any]]:
    """Return an MLPClassifier with its defaults, and its first moment without the weight decay."""
    from sklearn.neural_network import MLPClassifier

    x, y = split.train.x.flatten(1).float().numpy(), split.train.y.numpy()
    model = MLPClassifier((UNITS,), random_state=seed % 2**32, max_iter=1000).fit(x, y)
    W = model.coefs_[0]
    moment = model._optimizer.ms[0] - model.alpha * W / len(x)
    theta = {}
    for l, (weight, bias) in enumerate(zip(model.coefs_, model.intercepts_, strict=True)):
        theta[f"layers.{l}.weight"] = torch.tensor(weight.T).float()
        theta[f"layers.{l}.bias"] = torch.tensor(bias).float()
    training = {
        "accuracy": float(model.score(x, y)),
        "loss": float(model.loss_),
        "epochs": model.n_iter_,
    }
    arch = f"mlp:{x.shape[1]}-{UNITS}-{len(split.train.classes)},bias=all"
    return arch, theta, torch.tensor(moment.T).float(), training


def _unseen_images(row: Row, split: Split, root: str, task: str) -> Tensor:
    """Return images of the training pool that the network never saw, with labels in turn."""
    images = load_dataset(row.data, seed=1, root=root, task=task, holdout=1, center=False).train
    seen = split.train.x if split.train.mean is None else split.train.x + split.train.mean
    # In float64: a distance by way of products loses half of the digits, and equal images seem apart.
    distant = torch.cdist(images.x.flatten(1).double(), seen.flatten(1).double()).amin(1) > 1e-2
    fresh = distant.nonzero().flatten()
    fresh = fresh[torch.randperm(len(fresh), generator=stream("others", row.n))]
    place = torch.zeros(len(fresh))
    for label in images.y.unique():
        of_label = images.y[fresh] == label
        place[of_label] = torch.arange(int(of_label.sum())).float()
    x = images.x[fresh[place.argsort(stable=True)]].float()
    return x if split.train.mean is None else x - split.train.mean.float()


def judge(x: np.ndarray, true: np.ndarray, held: np.ndarray, seed: int) -> dict[str, Any]:
    """Count the matches of candidates ``x`` at their chance level. Run it in a process of its own."""
    torch.set_num_threads(1)
    candidates, samples, pool = (torch.from_numpy(array) for array in (x, true, held))
    gain = ncc(candidates, torch.cat([samples, pool])).abs().double().numpy()
    n = len(true)
    result = calibrate(gain, n, subsets=SUBSETS, rng=np.random.default_rng(seed))
    value, chance = result.value, greedy(gain[:, n : 2 * n]).value
    return {
        "candidates": len(x),
        "recovered": int(result.recovered.sum()),
        "expected": result.expected_by_chance,
        "threshold": result.threshold,
        "p": result.p_value,
        **{f"{level}": int((value > level).sum()) for level in LEVELS},
        **{f"{level} held out": int((chance > level).sum()) for level in LEVELS},
    }


def support_figures(sources: Sources, victim: Victim) -> list[list[float]]:
    """Return the shares of runs and partitions of each source, and NCC and index of its match."""
    first = torch.tensor(np.unique(sources.group, return_index=True)[1])
    x = sources.x.cpu()[first].reshape(-1, *victim.x.shape[1:])
    similarity, nearest = ncc(x, victim.x).abs().max(1)
    columns = sources.support[first], sources.cluster_support[first], similarity, nearest
    return [[round(float(v), 4) for v in row] for row in zip(*columns, strict=True)]


def pictures(x: Tensor, victim: Victim) -> np.ndarray:
    """Return (2, SHOWN, *shape) the best candidates and the training images that they match."""
    similarity = ncc(x, victim.x)
    match = greedy(similarity.abs().numpy())
    best = np.argsort(-match.value)[:SHOWN]
    matches = x[match.candidate[best]]
    sign = similarity[match.candidate[best], best].sign().reshape(-1, *[1] * (x.ndim - 1))
    return torch.stack([matches * sign, victim.x[best]]).half().numpy()


def run_stationarity(
    victim: Victim, n: int, seconds: float, device: str, seed: int
) -> tuple[Tensor, dict[str, Any]]:
    """Run the stationarity attack on the same network for the same seconds."""
    checkpoint = Network(victim.theta, victim.arch, tuple(victim.x.shape[1:]))
    config = Auto(
        candidates=2 * n,
        restarts=1,
        device=device,
        seed=seed,
        dtype="tf32" if device.startswith("cuda") else "float32",
    )
    probe = 60
    attack(checkpoint, Knowledge(), config.changed(steps=probe))  # compiles and allocates
    _, short = clock(lambda: attack(checkpoint, Knowledge(), config.changed(steps=probe)), device)
    steps = max(probe, int(probe * seconds / short))
    reconstruction, took = clock(
        lambda: attack(checkpoint, Knowledge(), config.changed(steps=steps)), device
    )
    return reconstruction.x.float(), {"steps": steps, "seconds": took}


def run(
    folder: Path, out: Path, device: str, scale: Scale, pool: str, workers: int, names: list[str]
) -> None:
    """Measure every network that ``out`` does not have."""
    out.mkdir(parents=True, exist_ok=True)
    (cache := folder / "victims").mkdir(parents=True, exist_ok=True)
    seeds = _seeds(pool)
    record = out / "unmix.json"
    done: dict[str, Any] = (
        json.loads(record.read_text())
        if record.exists()
        else {
            "pool": pool,
            "seeds": seeds,
            "setting": asdict(scale.setting),
            "tiny": scale.tiny,
            "hidden": scale.hidden,
            "trainings": {k: v.to_json() for k, v in TRAININGS.items()},
            "environment": environment(device),
            "victims": {},
            "controls": {},
            "cpu": {},
        }
    )
    if done["seeds"] != seeds or done["tiny"] != scale.tiny:
        raise InputError(f"{record} has results of another run.", "Pass another folder.")

    def keep() -> None:
        write_json(record, done)

    jobs = {
        f"{name}/{k}": (name, seeds["victims"][name][k], cache / f"{pool}-{name}-{k}.pt")
        for name in names
        for k in range(VICTIMS)
        if not {"stationarity", "refused"} & set(done["victims"].get(f"{name}/{k}", {}))
    }
    root = str(folder / ("tune" if pool == "tune" else "claim"))
    context = get_context("spawn")
    start = time.time()
    with ProcessPoolExecutor(workers, mp_context=context) as processes:
        trainings = [
            processes.submit(train_victim, name, seed, root, device, str(path), scale)
            for name, seed, path in sorted(jobs.values(), key=lambda job: -ROWS[job[0]].n)
        ]
        for training in trainings:
            training.result()
        print(f"{len(trainings)} victims in {time.time() - start:.0f} s", flush=True)
        waiting: dict[str, dict[str, Future[dict[str, Any]]]] = {}
        shown_images: dict[str, np.ndarray] = {}
        warm = True
        for key, (_, seed, path) in jobs.items():
            victim = Victim(**torch.load(path, weights_only=True))
            shape, n = tuple(victim.x.shape[1:]), len(victim.x)
            rows = victim.rows.to(device)

            def look(
                rows: Tensor = rows, shape: tuple[int, ...] = shape, seed: int = seed
            ) -> Sources:
                return unmix(rows, shape, scale.setting, seed=seed)

            if warm:  # the first products on a device choose their kernels
                look()
                warm = False
            entry: dict[str, Any] = {"victim": victim.training}
            waiting[key] = {}
            try:
                sources, seconds = clock(look, device)
            except InputError as problem:
                done["victims"][key] = {**entry, "refused": str(problem)}
                keep()
                continue
            x = sources.x[: 3 * n].float().cpu().reshape(-1, *shape)
            entry |= {
                "seconds": seconds,
                "rank": sources.rank,
                "edge": sources.edge,
                "runs": sources.runs,
                "sources": support_figures(sources, victim),
            }
            shown_images[key.replace("/", "-")] = pictures(x, victim)
            candidates, true, held = (array.numpy() for array in (x, victim.x, victim.held))
            waiting[key]["unmix"] = processes.submit(judge, candidates, true, held, seed)
            for c, claim in enumerate(_claims(victim, key)):
                waiting[key][f"control {c}"] = processes.submit(
                    judge, candidates, claim, held, seed
                )
            other, effort = run_stationarity(victim, n, seconds, device, seed)
            waiting[key]["stationarity"] = processes.submit(judge, other.numpy(), true, held, seed)
            entry["rival"] = effort
            done["victims"][key] = entry
            print(f"{key}: {seconds:.1f} s, {time.time() - start:.0f} s in all", flush=True)
            _collect(waiting, done, wait=False)
            keep()
        _collect(waiting, done, wait=True)
        keep()
        if shown_images:
            np.savez_compressed(
                out / f"pictures-{int(start)}.npz", allow_pickle=False, **shown_images
            )
        if pool != "again" and not done["controls"].get("never trained"):
            done["controls"]["never trained"] = [
                training.result()
                for training in _untrained(processes, folder / pool, seeds, device, scale)
            ]
        keep()
    done["cpu"] = done["cpu"] or _on_cpu(cache, pool, scale)
    keep()
    print(f"{time.time() - start:.0f} s in all")


def _collect(
    waiting: dict[str, dict[str, Future[dict[str, Any]]]], done: dict[str, Any], wait: bool
) -> None:
    """Move finished scores, or all scores, into the record."""
    for key, futures in waiting.items():
        for name in [name for name, future in futures.items() if wait or future.done()]:
            done["victims"][key][name] = futures.pop(name).result()


def _claims(victim: Victim, key: str) -> list[np.ndarray]:
    """Return sets of images that the network never saw, three for an optimizer state and two otherwise."""
    n = len(victim.x)
    count = 3 if "momentum" in key or "sklearn" in key else 2
    return [images.numpy() for images in victim.unseen.split(n)[:count] if len(images) == n]


def _untrained(
    processes: ProcessPoolExecutor, root: Path, seeds: dict[str, Any], device: str, scale: Scale
) -> list[Future[dict[str, Any]]]:
    """Unmix networks that were never trained, with a forced rank."""
    futures = []
    for k, seed in enumerate(seeds["victims"]["never trained"]):
        n = 20 if scale.tiny else 100
        split = load_dataset("cifar10", n, seed=seed, root=root, holdout=HELD_OUT)
        start = TrainingConfig(init=("default", "small")[k % 2], seed=seed, dtype="float32")
        arch = Architecture.parse(f"mlp:3072-{scale.hidden}-1")
        rows = next(initialize(arch, start).parameters()).detach().to(device)
        rank = min(FORCED_RANK, len(rows) // 2)
        sources = unmix(rows, split.train.shape, scale.setting, seed=seed, rank=rank)
        x = sources.x[: 3 * n].cpu().reshape(-1, *split.train.shape)
        candidates, true, held = (p.float().numpy() for p in (x, split.train.x, split.holdout.x))
        futures.append(processes.submit(judge, candidates, true, held, seed))
    return futures


def _on_cpu(cache: Path, pool: str, scale: Scale) -> dict[str, Any]:
    """Time the whole attack on two cores, and one run against scikit-learn's FastICA."""
    path = cache / f"{pool}-cifar-100-0.pt"
    if not path.exists():
        return {}
    victim = Victim(**torch.load(path, weights_only=True))
    shape = tuple(victim.x.shape[1:])
    with threads(2):
        sources, seconds = clock(lambda: unmix(victim.rows, shape, scale.setting))
    figures = {"seconds on two cores": seconds, "runs": sources.runs}
    try:
        return figures | speed(victim.rows, shape, 20 if scale.tiny else 67)
    except ImportError as problem:
        return figures | {"scikit-learn": str(problem)}


def speed(rows: Tensor, shape: tuple[int, ...], r: int, iterations: int = 50) -> dict[str, Any]:
    """Time one run with float32 and equal iterations, and scikit-learn's FastICA, on one core each."""
    import warnings

    from sklearn.decomposition import FastICA

    from residuum.attacks.unmixing.ica import Layer, differences

    with threads(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it did not converge: that is not asked here
        V = Layer.from_rows(rows).V[:r].reshape(r, *shape)
        Z, _ = whiten(V, differences)
        Q = torch.linalg.qr(torch.randn(r, r, generator=stream("speed")))[0]
        a = torch.tensor([2.0])

        def theirs() -> None:
            FastICA(
                r,
                fun_args={"alpha": 2.0},
                max_iter=iterations,
                tol=0.0,
                whiten=False,
                w_init=Q.numpy(),
            ).fit(Z.numpy())

        def ours() -> None:
            fastica(Z[None], Q[None, None], a, iterations, tolerance=0.0)

        ours()
        times = {"unmix": min(clock(ours)[1] for _ in range(3))}
        times["scikit-learn"] = min(clock(theirs)[1] for _ in range(3))
    return {"one run": times, "rank": r, "iterations": iterations}


def draw(names: list[str]) -> None:
    """Draw the seeds of every network, or of some rows for a claim that is made again."""
    if names:
        return draw_seeds(AGAIN_FILE, victims=dict.fromkeys(names, VICTIMS))
    draw_seeds(SEEDS_FILE, victims=dict.fromkeys(ROWS, VICTIMS) | {"never trained": CONTROLS})


def _seeds(pool: str) -> dict[str, Any]:
    if pool != "tune":
        return dict(json.loads((SEEDS_FILE if pool == "claim" else AGAIN_FILE).read_text()))
    seeds = iter(TUNING_SEEDS)
    counts = dict.fromkeys(ROWS, VICTIMS) | {"never trained": CONTROLS}
    victims = {name: [next(seeds) for _ in range(k)] for name, k in counts.items()}
    return {"commit": "", "victims": victims}


def table(out: Path) -> None:
    """Print the means of the networks with the bars."""
    done = json.loads((out / "unmix.json").read_text())
    for name, row in ROWS.items():
        entries = [
            v for key, v in done["victims"].items() if key.split("/")[0] == name and "unmix" in v
        ]
        if not entries:
            continue
        for arm in ("unmix", "stationarity"):
            keys = (
                "recovered",
                "expected",
                "threshold",
                *map(str, LEVELS),
                "0.8 held out",
                "0.9 held out",
            )
            means = {k: sum(e[arm][k] for e in entries) / len(entries) for k in keys}
            print(f"{name:20} {arm:13}", " ".join(f"{k} {v:.4g}" for k, v in means.items()))
            if arm == "unmix":
                met = all(means[k] >= least for k, least in row.bars.items())
                print(
                    f"{'':20} wanted {row.bars}: {'met' if met else 'MISSED'};",
                    "seconds",
                    [round(e["seconds"], 1) for e in entries],
                    "training",
                    [round(e["victim"]["seconds"]) for e in entries],
                    "rank",
                    [e["rank"] for e in entries],
                )
        backed = [s for e in entries for s in e["sources"] if s[0] >= 0.5]
        if backed:
            true = [sum(s[2] > level for s in backed) / len(backed) for level in (0.8, 0.7)]
            print(
                f"{'':20} backed by half: {len(backed)}, above 0.8 {true[0]:.3f}, above 0.7 {true[1]:.3f}"
            )
    controls = {
        f"{key} {name}": v[name]
        for key, v in done["victims"].items()
        for name in v
        if name.startswith("control")
    }
    plain = [v for k, v in controls.items() if "momentum" not in k and "sklearn" not in k]
    moments = [v for k, v in controls.items() if "momentum" in k or "sklearn" in k]
    never = done["controls"].get("never trained", [])
    for name, scores in {
        "never trained": never,
        "other images": plain,
        "other images, moment": moments,
    }.items():
        alarms = sum(control["p"] <= SIGNIFICANT for control in scores)
        print(f"{name}: {alarms} of {len(scores)} beyond chance at 1%")
    print("cpu:", done["cpu"])


KINDS = {  # of victims, whose sources are counted together
    "CIFAR n=50, 100": ("cifar-50", "cifar-100", "cifar-100-gd"),
    "CIFAR n=100, momentum": ("cifar-100-momentum",),
    "MNIST n=100": ("mnist-100",),
    "CIFAR n=200": ("cifar-200",),
    "MLPClassifier": ("sklearn-100",),
    "MLPClassifier, raw pixels": ("sklearn-100-raw",),
    "CIFAR n=500": ("cifar-500",),
}
TRUE = 0.8  # NCC with a training image


def judge_sources(entry: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidence, confidence by agreement alone, and truth of each source of a network."""
    shares, cluster_shares, similarity, _ = torch.tensor(entry["sources"]).T
    full_runs, clusters = entry["runs"]
    runs = full_runs + clusters
    share = (full_runs * shares + clusters * cluster_shares) / runs
    confidence = confidence_by_share(share, runs, CONFIDENT_VALUES, entry["rank"])
    return confidence, confidence_by_share(share, runs, CONFIDENT_VALUES), similarity > TRUE


def reliability(out: Path, least: int = 10) -> None:
    """Draw confidence against truth for networks of the claim, and print a table of fifths."""
    from matplotlib.figure import Figure

    victims = json.loads((RESULTS / "unmix-h200.json").read_text())["victims"]
    figure = Figure(figsize=(8.2, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="gray", linewidth=1, linestyle=":", label="calibrated")
    edges = torch.linspace(0, 1, 6)
    print("| victims | " + " | ".join(f"{low:.1f}-{low + 0.2:.1f}" for low in edges[:-1]) + " |")
    print("|---|" + 5 * "---|")
    for (kind, rows), marker in zip(KINDS.items(), "osD^v*x", strict=True):
        entries = [v for key, v in victims.items() if key.split("/")[0] in rows]
        confidence, agreed, true = map(torch.cat, zip(*map(judge_sources, entries), strict=True))
        cells, points = [], []
        for low, high in pairwise(edges.tolist()):
            in_bin = (confidence >= low) & (confidence < high)
            if count := int(in_bin.sum()):
                mean, share = float(confidence[in_bin].mean()), float(true[in_bin].float().mean())
                cells.append(f"{mean:.2f}: {share:.2f} of {count}")
                points += [(mean, share, count)] if count >= least else []
            else:
                cells.append("")
        print(f"| {kind} | " + " | ".join(cells) + " |")
        if not torch.equal(confidence, agreed):
            backed = agreed >= 0.2
            print(
                f"  withheld; by agreement alone {float(agreed[backed].mean()):.2f} of {int(backed.sum())} "
                f"would stand for {float(true[backed].float().mean()):.2f}"
            )
        x, y, counts = zip(*points, strict=True)
        error = [1.96 * (max(t * (1 - t), 0.25 / n) / n) ** 0.5 for _, t, n in points]
        axes.errorbar(x, y, error, marker=marker, capsize=3, label=f"{kind} ({sum(counts)})")
    axes.set(xlabel="confidence, without the data", ylabel=f"share of sources with NCC > {TRUE}")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, title="victims (sources)")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "unmix-reliability.png", dpi=110)


def picture(archive: Path, out: Path, names: Sequence[str] = SHOWN_VICTIMS) -> None:
    """Draw the best sources of each network above the training images that they match."""
    from PIL import Image

    size = 64
    canvas = np.full((len(names) * (2 * size + 12), SHOWN * (size + 2), 3), 255, np.uint8)
    for k, name in enumerate(names):
        pairs = np.load(archive)[name].astype(np.float32)  # (2, SHOWN, *shape)
        for line, images in enumerate(pairs):
            for column, image in enumerate(images):
                low, high = np.quantile(image, (0.005, 0.995))
                gray = ((image - low) / (high - low)).clip(0, 1).transpose(1, 2, 0) * 255
                color = np.repeat(gray, 3 // gray.shape[2], axis=2).astype(np.uint8)
                large = Image.fromarray(color).resize((size, size), Image.Resampling.NEAREST)
                top, column_offset = k * (2 * size + 12) + line * (size + 1), column * (size + 2)
                canvas[top : top + size, column_offset : column_offset + size] = np.asarray(large)
    Image.fromarray(canvas).quantize(256).save(out, optimize=True)


def main() -> int:
    """Run a command of the head of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("draw")
    command.add_argument("--rows", nargs="*", choices=tuple(ROWS), default=[])
    command = commands.add_parser("run")
    command.add_argument("folder", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("--device", default="cpu")
    command.add_argument("--pool", choices=("claim", "again", "tune"), default="claim")
    command.add_argument("--workers", type=int, default=6)
    command.add_argument("--tiny", action="store_true")
    command.add_argument("--rows", nargs="*", choices=tuple(ROWS), default=tuple(ROWS))
    command = commands.add_parser("picture")
    command.add_argument("archive", type=Path)
    command.add_argument("out", type=Path)
    command = commands.add_parser("reliability")
    command.add_argument("out", type=Path)
    command = commands.add_parser("table")
    command.add_argument("out", type=Path)
    options = parser.parse_args()
    require_device(getattr(options, "device", "cpu"))
    if options.command == "draw":
        draw(options.rows)
    elif options.command == "picture":
        picture(options.archive, options.out)
    elif options.command == "reliability":
        reliability(options.out)
    elif options.command == "table":
        table(options.out)
    else:
        scale = Scale(options.tiny)
        run(
            options.folder,
            options.out,
            options.device,
            scale,
            options.pool,
            options.workers,
            list(options.rows),
        )
        table(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
