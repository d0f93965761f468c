"""How many training images are reconstructed from convolutional networks?

    python -m experiments.convnets draw                       seeds of rows that have none
    python -m experiments.convnets run FOLDER OUT --jobs 16   networks, attacks, scores

FOLDER is made by ``python -m experiments.image_data SOURCE FOLDER``. Settings were chosen on FOLDER/tune
with seeds 9001-9099, which no claim uses. Every attack on a network has the same seconds of one core. The
attacker knows the shape of a sample, and the initial weights or the optimizer state if the name of the
attack says so. Attacks by gradient matching also know the number of samples.

A sample counts as recovered if its match, one-to-one by NCC up to sign, exceeds the 99th percentile of the
same value over random held-out sets. Counts above fixed levels of NCC are stored with the counts of as many
held-out images. An interrupted run continues with the same command. Copy OUT/convnets.json to
``experiments/results/convnets-cpu.json``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import residuum as rs
from experiments import RESULTS
from experiments.attack_options import attack_with
from experiments.networks import resnet
from experiments.programs import run_program
from experiments.seeds import draw_seeds
from experiments.timing import threads
from experiments.unmix import HELD_OUT, TUNING_SEEDS, judge
from residuum.datasets import load_dataset
from residuum.errors import InputError
from residuum.records import Dataset, Knowledge, write_json
from residuum.records.rundir import environment

SEEDS_FILES = RESULTS / "convnets-seeds.json", RESULTS / "convnets-seeds-more.json"
COMMITTED = RESULTS / "convnets-cpu.json"
SECONDS, EPOCHS, LOSS = 20.0, 200, 5e-4
CLAIMED, BUDGET = 40, "30s"
BAR = (
    "cnn-cifar10-20"  # of 20 at least 4 above NCC 0.7, held out at most 1, beyond chance on 3 of 4
)


def pooling_network(shape: tuple[int, int, int]) -> nn.Module:
    """Return conv 32 - pool - conv 64 - pool - dense 128 - 10."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class ViT(nn.Module):
    """Patches of 4 x 4, one layer of attention, and the mean of all places."""

    def __init__(self, shape: tuple[int, int, int], width: int = 48) -> None:
        super().__init__()
        self.patch = nn.Conv2d(shape[0], width, 4, stride=4)
        self.place = nn.Parameter(0.02 * torch.randn((shape[1] // 4) * (shape[2] // 4), width))
        self.layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.patch(x).flatten(2).transpose(1, 2) + self.place).mean(1))


MODELS: dict[str, Callable[[tuple[int, int, int]], nn.Module]] = {
    "cnn": pooling_network,
    "resnet": lambda shape: resnet((16, 32, 64), 1, shape[0]),
    "vit": ViT,
}
MATCHED = ("invert", "geiping2020", "invert-moment", "geiping2020-moment")
ATTACKS = {
    "cnn": ("trunk-moment", "trunk", *MATCHED, "multiclass-kkt"),
    "resnet": (*MATCHED, "multiclass-kkt"),
    "resnet-folded": ("multiclass-kkt",),
    "vit": ("unmix", "unmix-moment", *MATCHED, "multiclass-kkt"),
}


@dataclass(frozen=True)
class Row:
    """One kind of network: architecture, data, number of samples, and how many networks."""

    model: str
    data: str
    n: int
    victims: int = 3


ROWS = {
    f"{row.model}-{row.data}-{row.n}": row
    for row in (
        Row("cnn", "cifar10", 20, 4),
        Row("cnn", "cifar10", 10),
        Row("cnn", "cifar10", 50),
        *(Row("cnn", "mnist", n) for n in (20, 50, 10)),
        *(
            Row(model, data, n)
            for data in ("cifar10", "mnist")
            for n in (20, 10, 50)
            for model in ("resnet", "vit", "resnet-folded")
        ),
    )
}  # the most wanted first: a run may be stopped
STRANGERS = {"cnn": 10, "resnet": 5, "vit": 5}  # networks that claim images they never saw


@dataclass(frozen=True)
class Victim:
    """A trained network with its initial weights and optimizer state, its images, and held-out images."""

    model: nn.Module
    start: dict[str, Tensor]
    moment: dict[str, Tensor]
    x: Tensor
    held: Dataset
    training: dict[str, Any]


def train_victim(row: Row, seed: int, root: str, device: str) -> Victim:
    """Train by SGD with momentum 0.9 and rate 0.01, the ViT by Adam, to a mean loss of 5e-4."""
    split = load_dataset(
        row.data, row.n, seed=seed, root=root, task="multiclass", holdout=HELD_OUT, center=True
    )
    x, y = split.train.x.float().to(device), split.train.y.long().to(device)
    torch.manual_seed(seed % 2**31)
    model = MODELS[row.model.removesuffix("-folded")](tuple(x.shape[1:]))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.to(device)
    optimizer: optim.Optimizer = optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if row.model == "vit":
        optimizer = optim.Adam(model.parameters(), 1e-3)
    begun, mean, epochs = time.time(), 1.0, 0
    while mean >= LOSS and epochs < EPOCHS:
        mean, epochs = 0.0, epochs + 1
        for rows in torch.randperm(row.n).split(10):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            mean += float(loss.detach()) * len(rows) / row.n
    moment = {name: m.cpu() for name, m in rs.read_moment(optimizer, model).items()}
    model.cpu().eval()
    training = {"loss": mean, "epochs": epochs, "seconds": time.time() - begun, "seed": seed}
    if row.model == "resnet-folded":
        model, start, moment = (
            fold_norms(model),
            {},
            {},
        )  # neither start nor moment fits it any more
    return Victim(model, start, moment, x.cpu(), split.holdout, training)


def load_victim(name: str, seed: int, root: str, cache: str, device: str = "cpu") -> Victim:
    """Load a network from the cache. If it is not there, train it on ``device``."""
    path = Path(cache) / f"{name}-{seed}.pt"
    if not path.exists():
        with threads(1):
            victim = train_victim(ROWS[name], seed, root, device)
        partial_path = path.with_suffix(f".{os.getpid()}")
        torch.save(victim, partial_path)
        os.replace(partial_path, path)
    return torch.load(path, weights_only=False)  # our own file, made above


def fold_norms(model: nn.Module) -> nn.Module:
    """Fold batch norms into the convolutions before them, which get a bias."""
    model = copy.deepcopy(model)
    for owner in list(model.modules()):
        modules = list(owner.named_children())
        pairs = list(itertools.pairwise(modules))
        if hasattr(owner, "c1"):
            pairs = [
                ((c, getattr(owner, c)), (n, getattr(owner, n)))
                for c, n in (("c1", "n1"), ("c2", "n2"))
            ]
        for (name, conv), (other, norm) in pairs:
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(owner, name, torch.nn.utils.fuse_conv_bn_eval(conv, norm))
                setattr(owner, other, nn.Identity())
    return model.eval()


def knowledge_for(victim: Victim, attack: str, task_shape: tuple[int, ...]) -> Knowledge:
    """Return the shape, and the initial weights or the optimizer state if the attack needs them."""
    if attack.endswith("-moment"):
        return Knowledge(shape=task_shape, moment=victim.moment)
    on_start = attack in ("trunk", "unmix", "invert", "geiping2020")
    return Knowledge(shape=task_shape, theta0=victim.start if on_start else None)


def run_attack(
    name: str, seed: int, root: str, cache: str, attack: str, seconds: float
) -> dict[str, Any]:
    """Run one attack on one network and count its matches."""
    row = ROWS[name]
    with threads(1):
        victim = load_victim(name, seed, root, cache)
        shape = tuple(victim.x.shape[1:])
        config = attack_with(
            attack,
            candidates=row.n,
            restarts=1,
            steps=3000,
            seconds=seconds,
            lr_x=0.05 if attack in MATCHED else 0.01,
            layers="all",
            dtype="float32",
            seed=seed % 2**31,
        )
        try:
            reconstruction = rs.attack(victim.model, knowledge_for(victim, attack, shape), config)
        except InputError as problem:
            return {"victim": victim.training, "refused": problem.message}
        x, true, held = reconstruction.x.float(), victim.x, victim.held.x.float()
        if x.shape[1:] != true.shape[1:]:  # patches are scored against patches
            true, held = (patches(images, x.shape[-1]) for images in (true, held[: 5 * row.n]))
        figures = judge(x[: 3 * len(true)].numpy(), true.numpy(), held.numpy(), seed)
        return {
            "victim": victim.training,
            "seconds": reconstruction.seconds,
            "notes": reconstruction.notes,
            **figures,
        }


def patches(x: Tensor, side: int) -> Tensor:
    """Cut (n, channels, height, width) into (n k, channels, side, side)."""
    cut = F.unfold(x, side, stride=side).transpose(1, 2)
    return cut.reshape(-1, x.shape[1], side, side)


def non_member_row(model: str, seed: int) -> str:
    """Return the row of a network that is audited with images that it never saw."""
    return f"{model}-{'mnist' if seed % 2 else 'cifar10'}-20"


def audit_non_members(
    network: str, seed: int, root: str, cache: str, budget: str
) -> dict[str, Any]:
    """Audit a network, with initial weights and optimizer state, on images that it never saw."""
    row = ROWS[non_member_row(network, seed)]
    with threads(1):
        victim = load_victim(non_member_row(network, seed), seed, root, cache)
        tested, holdout = (
            victim.held.replace(x=victim.held.x[rows], y=victim.held.y[rows])
            for rows in (slice(0, CLAIMED), slice(CLAIMED, None))
        )
        shape = tuple(victim.x.shape[1:])
        result = rs.audit(
            victim.model,
            data=tested,
            holdout=holdout,
            knowledge=Knowledge(shape=shape, theta0=victim.start, moment=victim.moment),
            budget=budget,
            seed=seed % 2**31,
            task="multiclass",
        )
    return {
        "kind": f"{row.model}-{row.data}",
        "outcome": result.verdict.outcome,
        "recovered": result.verdict.recovered,
        "expected_by_chance": result.verdict.expected_by_chance,
        "p_value": result.verdict.p_value,
        "ran": [attack.name for attack in result.attacks if attack.ran],
    }


def draw() -> None:
    """Draw seeds of all rows that have none."""
    first, more = SEEDS_FILES
    if not first.exists():
        victims = {name: row.victims for name, row in ROWS.items()}
        draw_seeds(first, victims=victims, strangers=STRANGERS)
    else:
        have = _seeds("claim")["victims"]
        draw_seeds(more, victims={k: row.victims for k, row in ROWS.items() if k not in have})


def _seeds(pool: str) -> dict[str, Any]:
    if pool == "claim":
        files = [json.loads(path.read_text()) for path in SEEDS_FILES if path.exists()]
        victims = {name: seeds for file in files for name, seeds in file["victims"].items()}
        return {"victims": victims, "strangers": files[0]["strangers"]}
    seeds = iter(TUNING_SEEDS)
    victims = {name: [next(seeds) for _ in range(row.victims)] for name, row in ROWS.items()}
    return {"victims": victims, "strangers": {name: [9090 + i] for i, name in enumerate(STRANGERS)}}


def run(
    folder: Path,
    out: Path,
    pool: str,
    jobs: int,
    seconds: float,
    only: list[str],
    device: str = "cpu",
) -> None:
    """Measure what neither OUT nor the committed file has: rows of the bar, then non-members, then others."""
    seeds, root, path = _seeds(pool), str(folder / pool), out / "convnets.json"
    done: dict[str, Any] = {"victims": {}, "strangers": {}}
    for earlier in (COMMITTED, path) if pool == "claim" else (path,):
        if earlier.exists():
            done = json.loads(earlier.read_text())
    cache = out / "victims"
    cache.mkdir(parents=True, exist_ok=True)
    folders = (root, str(cache))
    cases = [
        ("victims", f"{name}/{seed}/{attack}", (run_attack, name, seed, *folders, attack, seconds))
        for name, row in ROWS.items()
        for seed in seeds["victims"][name]
        for attack in ATTACKS[row.model]
    ]
    first = [case for case in cases if case[1].startswith(BAR)]
    later_cases = [case for case in cases if case not in first]
    claims = [
        ("strangers", f"{model}/{seed}", (audit_non_members, model, seed, *folders, BUDGET))
        for model, model_seeds in seeds["strangers"].items()
        for seed in model_seeds
    ]
    waiting = [
        case
        for case in [*first, *claims, *later_cases]
        if case[1] not in done[case[0]] and (not only or any(word in case[1] for word in only))
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as processes:
        needed = {
            (call[1] if kind == "victims" else non_member_row(call[1], call[2]), call[2])
            for kind, _, call in waiting
        }
        for trained in [
            processes.submit(load_victim, *case, *folders, device) for case in sorted(needed)
        ]:
            trained.result()
        begun = time.monotonic()
        print(f"{len(needed)} victims, {len(waiting)} attacks", flush=True)
        futures = {processes.submit(*call): (kind, key) for kind, key, call in waiting}
        for count, finished in enumerate(as_completed(futures), 1):
            kind, key = futures[finished]
            done[kind][key] = finished.result()
            figures = {
                k: v for k, v in done[kind][key].items() if k not in ("notes", "victim", "ran")
            }
            clock = f"{count}/{len(futures)} {time.monotonic() - begun:.0f}s"
            print(clock, key, figures, flush=True)
            done["settings"] = {"seconds": seconds, "pool": pool, "budget": BUDGET, "loss": LOSS}
            done["environment"] = environment("cpu")
            write_json(path, done)


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
    command.add_argument("--pool", choices=("claim", "tune"), default="claim")
    command.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    command.add_argument(
        "--seconds", type=float, default=SECONDS, help="time limit of every attack"
    )
    command.add_argument("--only", nargs="*", default=[], help="measure names with these parts")
    command.add_argument("--device", default="cpu", help="device of the training")
    options = parser.parse_args()
    if options.command == "draw":
        draw()
    else:
        settings = {k: v for k, v in vars(options).items() if k != "command"}
        run(**settings)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
