"""Training images from convnets, beside chance, the published floor and claims that are not true.

    python -m experiments.convnets draw                       seeds of rows that have none, settings committed
    python -m experiments.convnets run FOLDER OUT --jobs 16   victims, attacks, scores; resumable

FOLDER is made by ``python -m experiments.image_data SOURCE FOLDER``; settings were chosen on FOLDER/tune
with seeds 9001-9099, which no claim uses. Every attack on a victim has the same seconds of one core and is
granted the shape of a sample, the start or the optimizer's state where its name says so, and the matching
attacks the number of samples.

A sample counts as recovered when its match, one-to-one by sign-free NCC, beats the 99th percentile of the
same over random held-out sets; beside counts above fixed NCC stand those of as many held-out images.
OUT/convnets.json goes to benchmarks/results; ``tables_of_convnets`` shows it.
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


def pooling(shape: tuple[int, int, int]) -> nn.Module:
    """conv 32 - pool - conv 64 - pool - dense 128 - 10."""
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
    """Patches of 4 x 4, one layer of attention, the mean of all places."""

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
    "cnn": pooling,
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
    """A kind of victim: network, data, number of samples, victims."""

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
    """A trained network, its start and optimizer state by parameter, the images it had and others."""

    model: nn.Module
    start: dict[str, Tensor]
    moment: dict[str, Tensor]
    x: Tensor
    held: Dataset
    training: dict[str, Any]


def train_victim(row: Row, seed: int, root: str, device: str) -> Victim:
    """SGD with momentum 0.9 and rate 0.01, Adam for the ViT, batches of 10, to a mean loss of 5e-4."""
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
        model, start, moment = folded(model), {}, {}  # neither start nor moment fits it any more
    return Victim(model, start, moment, x.cpu(), split.holdout, training)


def load_victim(name: str, seed: int, root: str, cache: str, device: str = "cpu") -> Victim:
    """A victim of the cache, trained on ``device`` where it is not there yet."""
    path = Path(cache) / f"{name}-{seed}.pt"
    if not path.exists():
        with threads(1):
            victim = train_victim(ROWS[name], seed, root, device)
        partial_path = path.with_suffix(f".{os.getpid()}")
        torch.save(victim, partial_path)
        os.replace(partial_path, path)
    return torch.load(path, weights_only=False)  # our own file, made above


def folded(model: nn.Module) -> nn.Module:
    """Batch norms of evaluation in the convolutions before them, which get a bias by that."""
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


def granted(victim: Victim, attack: str, task_shape: tuple[int, ...]) -> Knowledge:
    """The shape, and the start or the moment where the attack is on it."""
    if attack.endswith("-moment"):
        return Knowledge(shape=task_shape, moment=victim.moment)
    on_start = attack in ("trunk", "unmix", "invert", "geiping2020")
    return Knowledge(shape=task_shape, theta0=victim.start if on_start else None)


def attacked(
    name: str, seed: int, root: str, cache: str, attack: str, seconds: float
) -> dict[str, Any]:
    """One attack on one victim."""
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
            reconstruction = rs.attack(victim.model, granted(victim, attack, shape), config)
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
    """(n k, channels, side, side) of (n, channels, height, width)."""
    cut = F.unfold(x, side, stride=side).transpose(1, 2)
    return cut.reshape(-1, x.shape[1], side, side)


def claimant(model: str, seed: int) -> str:
    """The row that a network with this seed is of."""
    return f"{model}-{'mnist' if seed % 2 else 'cifar10'}-20"


def claimed(network: str, seed: int, root: str, cache: str, budget: str) -> dict[str, Any]:
    """An audit of a network with start and optimizer state on images that it never saw."""
    row = ROWS[claimant(network, seed)]
    with threads(1):
        victim = load_victim(claimant(network, seed), seed, root, cache)
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
    """Of every victim that has none, and first of the networks that claim images they never saw."""
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
    """What is neither in OUT nor committed yet: the rows of the bar, then claims, then the others."""
    seeds, root, path = _seeds(pool), str(folder / pool), out / "convnets.json"
    done: dict[str, Any] = {"victims": {}, "strangers": {}}
    for earlier in (COMMITTED, path) if pool == "claim" else (path,):
        if earlier.exists():
            done = json.loads(earlier.read_text())
    cache = out / "victims"
    cache.mkdir(parents=True, exist_ok=True)
    folders = (root, str(cache))
    cases = [
        ("victims", f"{name}/{seed}/{attack}", (attacked, name, seed, *folders, attack, seconds))
        for name, row in ROWS.items()
        for seed in seeds["victims"][name]
        for attack in ATTACKS[row.model]
    ]
    first = [case for case in cases if case[1].startswith(BAR)]
    later_cases = [case for case in cases if case not in first]
    claims = [
        ("strangers", f"{model}/{seed}", (claimed, model, seed, *folders, BUDGET))
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
            (call[1] if kind == "victims" else claimant(call[1], call[2]), call[2])
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
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw")
    command = commands.add_parser("run")
    command.add_argument("folder", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("--pool", choices=("claim", "tune"), default="claim")
    command.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    command.add_argument("--seconds", type=float, default=SECONDS, help="of every attack")
    command.add_argument("--only", nargs="*", default=[], help="parts of names")
    command.add_argument("--device", default="cpu", help="that victims are trained on")
    options = parser.parse_args()
    if options.command == "draw":
        draw()
    else:
        settings = {k: v for k, v in vars(options).items() if k != "command"}
        run(**settings)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
