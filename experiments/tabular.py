"""How many rows of tables are reconstructed from weights?

    python -m experiments.tabular draw                    seeds, after the settings are committed
    python -m experiments.tabular run OUT --jobs 2        networks, attacks, counts

A row counts if some candidate lies within TOLERANCE of the range of every column. The chance level is the
count for as many rows of the same kind that the network never saw. Synthetic rows are uniform in [0, 1]^d
with random labels. Of mixed rows, three columns are one-hot and one is a whole number up to 9, over 9.
Attacks with and without knowledge of these types take equal steps. Heads are MLPs on a frozen encoder of
digits with random weights. Their embeddings are scored by NCC with held-out ones, and looked up in a public
pool, half of which was trained on. breast_cancer, wine, diabetes and digits are those of scikit-learn with
standardized columns.

The attacker knows range and mean of the columns, and nothing about heads. Settings were chosen with seeds
9001-9099, which no claim uses. Rows of a later claim have seeds of their own. An interrupted run continues
with the same command. Copy OUT/tabular.json to ``experiments/results``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
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
from experiments.programs import run_program
from experiments.seeds import draw_seeds
from experiments.timing import threads
from experiments.unmix import HELD_OUT, TUNING_SEEDS, judge
from residuum.errors import InputError
from residuum.evaluation import lookup
from residuum.records import Dataset, Knowledge, write_json
from residuum.records.rundir import environment
from residuum.training import TrainingConfig, train

SEEDS_FILES = tuple(RESULTS / f"tabular-seeds{suffix}.json" for suffix in ("", "-more"))
LATER = ("mixed-6-40", "heads-64-40")  # rows of the second file
WITH = " with columns"  # an attack that is granted their types
TOLERANCE, SECONDS, STEPS = 0.05, 20.0, 5000


@dataclass(frozen=True)
class Row:
    """One kind of network: data, columns d, rows n, hidden widths, attacks, and how many networks."""

    data: str
    d: int
    n: int
    hidden: str
    attacks: tuple[str, ...]
    victims: int = 3


GRANTED = ("unmix", "unmix-moment", "moment")  # the start, then the optimizer's state
ROWS = {
    f"{row.data}-{row.d}-{row.n}": row
    for row in (
        Row("uniform", 5, 80, "400-400", ("corners", "binary-kkt")),
        Row("uniform", 5, 10, "400-400", ("corners", "binary-kkt")),
        Row("uniform", 8, 80, "400-400", ("corners", "binary-kkt")),
        Row("breast_cancer", 30, 60, "64-64", ("binary-kkt", *GRANTED)),
        Row("wine", 13, 60, "64-64", ("multiclass-kkt", *GRANTED)),
        Row("diabetes", 10, 60, "64-64", ("corners", *GRANTED)),
        Row("digits", 64, 60, "64-64", ("multiclass-kkt", *GRANTED)),
        Row("mixed", 6, 40, "200-200", ("binary-kkt", f"binary-kkt{WITH}")),
        Row("heads", 64, 40, "200", ("unmix", "binary-kkt")),
    )
}


@dataclass(frozen=True)
class Victim:
    """A network, what the attacker knows, its rows, and rows that it never saw."""

    network: rs.Network
    knowledge: Knowledge
    start: dict[str, Tensor] | None
    x: Tensor
    unseen: Tensor
    training: dict[str, Any]


def make_victim(row: Row, seed: int) -> Victim:
    """Train on uniform rows to the margin from small initial weights, and on others in the usual way."""
    generator = torch.Generator().manual_seed(seed)
    if row.data == "heads":
        return make_head(row, seed)
    if row.data in ("uniform", "mixed"):
        x = torch.rand(11 * row.n, row.d, generator=generator).double()
        if row.data == "mixed":
            x[:, :3] = F.one_hot(x[:, :3].argmax(1), 3)
            x[:, 3] = (10 * x[:, 3]).floor() / 9
        y = torch.where(torch.rand(row.n, generator=generator) < 0.5, -1.0, 1.0)
        x, unseen = x[: row.n], x[row.n :]
        mean = x.mean(0)
        arch = f"mlp:{row.d}-{row.hidden}-1"
        state = train(arch, Dataset(x - mean, y), TrainingConfig(steps=STEPS, seed=seed))
        types = "0-2:onehot,3:integer/9" if row.data == "mixed" else None
        knowledge = Knowledge(
            value_range=(0.0, 1.0), mean=mean, columns=types, provenance={"mean": "train"}
        )
        network = rs.Network(dict(state.theta), arch)
        return Victim(network, knowledge, None, x - mean, unseen - mean, dict(state.history[-1]))
    return fit_network(row, seed, generator)


def make_head(row: Row, seed: int) -> Victim:
    """Train a head on embeddings of digits by a frozen random encoder, standardized by public embeddings."""
    split = rs.load_dataset("digits", row.n, seed=seed % 2**31, holdout=HELD_OUT)
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, row.d)).double()
    embeddings = torch.cat([split.train.x, split.holdout.x]).double().flatten(1)
    with torch.no_grad():
        embeddings = encoder(embeddings)
    public = embeddings[row.n :]
    embeddings = (embeddings - public.mean(0)) / public.std(0)
    x, unseen = embeddings[: row.n], embeddings[row.n :]
    arch = f"mlp:{row.d}-{row.hidden}-1"
    config = TrainingConfig(steps=STEPS, seed=seed)
    state = train(arch, Dataset(x, split.train.y.double()), config)
    network = rs.Network(dict(state.theta), arch)
    return Victim(network, Knowledge(), None, x, unseen, dict(state.history[-1]))


def count_named(candidates: Tensor, victim: Victim) -> dict[str, int]:
    """Count the records of a public pool that candidates name. Half of the pool was trained on."""
    n = len(victim.x)
    answer = lookup(candidates, torch.cat([victim.x, victim.unseen[-n:]]))
    names = {int(index) for index in answer.index[answer.match]}
    return {"named": len(names), "named rightly": sum(name < n for name in names)}


def fit_network(row: Row, seed: int, generator: torch.Generator) -> Victim:
    """Train with the default initialization and Adam in batches of 10, to a loss of 1e-5."""
    from sklearn import datasets

    table = getattr(datasets, f"load_{row.data}")()
    samples, label = torch.tensor(table.data).double(), torch.tensor(table.target)
    samples = (samples - samples.mean(0)) / samples.std(0).clamp(min=1e-9)
    order = torch.randperm(len(samples), generator=generator)
    samples, label = samples[order], label[order]
    x, y = samples[: row.n].float(), label[: row.n]
    classes = {"breast_cancer": 1, "diabetes": 1}.get(row.data, int(label.max()) + 1)
    torch.manual_seed(seed)
    wide = [int(w) for w in row.hidden.split("-")]
    sizes = [row.d, *wide, classes]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(
        *[module for layer in layers[:-1] for module in (layer, nn.ReLU())], layers[-1]
    )
    start = dict(rs.checkpoint_from_module(model).theta)
    adam, loss = optim.Adam(model.parameters(), 3e-3), torch.zeros(())
    for _ in range(600):
        mean = 0.0
        for rows in torch.randperm(row.n).split(10):
            adam.zero_grad()
            out = model(x[rows])
            if row.data == "diabetes":
                loss = F.mse_loss(out[:, 0], (y[rows].float() - 152) / 77)
            elif classes == 1:
                loss = F.binary_cross_entropy_with_logits(out[:, 0], y[rows].float())
            else:
                loss = F.cross_entropy(out, y[rows].long())
            loss.backward()
            adam.step()
            mean += float(loss.detach()) * len(rows) / row.n
        if mean < 1e-5:
            break
    task = "regression" if row.data == "diabetes" else ""
    network = rs.checkpoint_from_module(model, task=task)
    low, high = float(samples.min()), float(samples.max())
    knowledge = Knowledge(value_range=(low, high), moment=rs.read_moment(adam, model))
    return Victim(network, knowledge, start, x.double(), samples[row.n :], {"loss": mean})


def count_rows(candidates: Tensor, rows: Tensor, width: Tensor) -> int:
    """Count the rows with a candidate within the tolerance in all columns."""
    distances = torch.stack([((candidates - row).abs() / width).amax(1).amin() for row in rows])
    return int((distances < TOLERANCE).sum())


def attack_victim(name: str, seed: int, attacks: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Train one network and run all attacks on it."""
    with threads(1):
        victim = make_victim(ROWS[name], seed)
        return {attack: run_attack(ROWS[name], victim, attack, seed) for attack in attacks}


def run_attack(row: Row, victim: Victim, attack: str, seed: int) -> dict[str, Any]:
    """Count the rows that an attack reconstructs. At most 3n candidates count."""
    by_steps = row.data in ("mixed", "heads")
    config = attack_with(
        attack.removesuffix(WITH),
        candidates=2 * row.n,
        restarts=1,
        steps=2000,
        seconds=math.inf if by_steps and attack != "unmix" else SECONDS,
        seed=seed % 2**31,
    )
    knowledge = victim.knowledge.replace(theta0=victim.start if attack == "unmix" else None)
    if not attack.endswith(WITH):
        sources = {fact: where for fact, where in knowledge.provenance.items() if fact != "columns"}
        knowledge = knowledge.replace(columns=None, provenance=sources)
    try:
        reconstruction = rs.attack(victim.network, knowledge, config)
    except InputError as problem:
        return {"victim": victim.training, "refused": problem.message}
    chosen = (
        reconstruction.selection.x if reconstruction.selection is not None else reconstruction.x
    )
    x = chosen[: 3 * row.n].double().flatten(1)
    if row.data == "heads":
        held = victim.unseen[: -row.n]
        scores = judge(x.numpy(), victim.x.numpy(), held.numpy(), seed % 2**31)
        description = {
            "victim": victim.training,
            "seconds": reconstruction.seconds,
            "notes": reconstruction.notes,
        }
        return {**description, **scores, **count_named(x, victim)}
    low, high = (torch.cat([victim.x, victim.unseen]).quantile(q, dim=0) for q in (0.0, 1.0))
    width = (high - low).clamp(min=1e-9)
    n = min(row.n, len(victim.unseen))
    chance = [
        count_rows(x, group, width) for group in victim.unseen.split(n)[:10] if len(group) == n
    ]
    return {
        "victim": victim.training,
        "seconds": reconstruction.seconds,
        "candidates": len(x),
        "recovered": count_rows(x, victim.x, width),
        "others": sum(chance) / max(1, len(chance)),
        "others at most": max(chance, default=0),
        "notes": reconstruction.notes,
    }


def draw() -> None:
    """Draw the seeds of every network. Rows of a later claim have a file of their own."""
    for path, later in zip(SEEDS_FILES, (False, True), strict=True):
        if not path.exists():
            rows = {name: row.victims for name, row in ROWS.items() if (name in LATER) == later}
            draw_seeds(path, victims=rows)


def _seeds(pool: str) -> dict[str, list[int]]:
    if pool == "claim":
        files = [json.loads(path.read_text())["victims"] for path in SEEDS_FILES]
        return {name: seeds for file in files for name, seeds in file.items()}
    seeds = iter(TUNING_SEEDS)
    return {name: [next(seeds) for _ in range(row.victims)] for name, row in ROWS.items()}


def run(out: Path, pool: str, jobs: int, only: list[str]) -> None:
    """Measure what OUT does not have."""
    path, seeds = out / "tabular.json", _seeds(pool)
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"victims": {}}
    waiting = {
        (name, seed): tuple(
            attack for attack in row.attacks if f"{name}/{seed}/{attack}" not in done["victims"]
        )
        for name, row in ROWS.items()
        for seed in seeds[name]
        if not only or any(word in f"{name}/{seed}" for word in only)
    }
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as processes:
        futures = {
            processes.submit(attack_victim, *key, attacks): key
            for key, attacks in waiting.items()
            if attacks
        }
        for count, finished in enumerate(as_completed(futures), 1):
            name, seed = futures[finished]
            for attack, counts in finished.result().items():
                done["victims"][f"{name}/{seed}/{attack}"] = counts
                figures = {k: v for k, v in counts.items() if k not in ("notes", "victim")}
                print(f"{count}/{len(futures)} {name}/{seed}/{attack}", figures, flush=True)
            done["settings"] = {"tolerance": TOLERANCE, "seconds": SECONDS, "pool": pool}
            done["environment"] = environment("cpu")
            done["written"] = time.strftime("%Y-%m-%d")
            write_json(path, done)


def main() -> int:
    """Run a command of the head of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw")
    command = commands.add_parser("run")
    command.add_argument("out", type=Path)
    command.add_argument("--pool", choices=("claim", "tune"), default="claim")
    command.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    command.add_argument("--only", nargs="*", default=[], help="measure names with these parts")
    options = parser.parse_args()
    if options.command == "draw":
        draw()
    else:
        run(options.out, options.pool, options.jobs, options.only)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
