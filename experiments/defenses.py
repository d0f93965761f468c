"""Does a defense protect against the strongest attack that knows the defense, and what does it cost?

    python -m experiments.defenses --data digits --workers 2
    python -m experiments.defenses --data mnist cifar10 --root DATA --device cuda --workers 12

DATA holds ``mnist.npz`` and ``cifar10.npz``. Three seeds per data set are measured. Results are written to
``experiments/results/defenses-DATA.json`` after every network, and the same command measures what is
missing or has other settings. A release is attacked in every way of ``residuum.defenses.attackers``, and
each attack is scored against held-out samples. If the optimizer state was released, there are two more
attacks:

    moment         stationarity on the optimizer state
    unmix-moment   unmixing of the optimizer state

Settings were chosen on seeds 10 and 11 of digits, before the attack had the prior, margins and unmixing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from experiments import RESULTS
from experiments.networks import first_layer_rank
from experiments.programs import run_program
from residuum.attacks import OptimizerState, UnmixOptimizerState, make_attack
from residuum.attacks.defense_aware.strategies import Adapted, Released
from residuum.datasets import load_dataset
from residuum.defenses import (
    DEFENSES,
    Conditions,
    Secret,
    Training,
    parse_defense,
    release,
    with_seed,
)
from residuum.defenses.attackers import Attacker, add_negated, make_attackers, run_attacker
from residuum.errors import InconclusiveError
from residuum.evaluation import score
from residuum.evaluation.matching import greedy
from residuum.evaluation.scoring import all_candidates
from residuum.networks.network import Network
from residuum.records import Knowledge, write_json
from residuum.records.base import plain
from residuum.records.rundir import environment, require_device
from residuum.similarity import ncc
from residuum.theory.kkt import evaluate
from residuum.theory.rows import accuracy, normalize_labels
from residuum.training import TrainingConfig
from residuum.training.methods import LOSSES

HELD_OUT, SUBSETS, LEVELS = 600, 1000, (0.8, 0.9)
DATA = "RESIDUUM_DATA"  # the folder of data where --root names none
RELEASES = 16  # noisy ones that an attacker collects
STATE = "state kept"  # a release from which the optimizer's state was not stripped


@dataclass(frozen=True)
class Case:
    """Networks and attacks of one data set."""

    n: int
    hidden: str
    training: TrainingConfig
    descent: TrainingConfig
    attack: dict[str, Any]
    more: tuple[str, ...]


# What is made of one trained network; every other defense trains its own.
AFTER = ("none", "shift-rewrite:5", "shift-rewrite-vector:0.5", "noise:1")
ALONE = (
    "dp:1",
    "dp:8",
    "dp:50",
    "plain-gd:1",
    "early-stop:0.1",
    "shift-retrain:0.5",
    "shift-retrain-vector:0.5",
    "default-init:1",
    "label-smoothing:0.2",
    "sgd:10",
)
_GPU = Case(
    50,
    "1000-1000",
    TrainingConfig(steps=1500, dtype="float32"),
    TrainingConfig(method="gd", steps=3000, lr=0.05, momentum=0.9, dtype="float32"),
    {"restarts": 2, "steps": 3000},
    ("weight-decay:0.001",),
)
CASES = {
    "digits": Case(
        100,
        "100-100",
        TrainingConfig(steps=800),
        TrainingConfig(method="gd", steps=3000, lr=0.5, momentum=0.9),
        {"restarts": 2, "steps": 800},
        ("weight-decay:0.01", "without-top:10", "without-top:30", "cap:2", "cap:1.2"),
    ),
    "mnist": _GPU,
    "cifar10": _GPU,
}
Row = dict[str, Any]


def prepare(data: str, seed: int, root: str | None, device: str) -> Conditions:
    """Return data, settings and knowledge. The attacker knows value range, mean and number of samples."""
    case = CASES[data]
    split = load_dataset(data, case.n, seed=seed, root=root, holdout=HELD_OUT)
    knowledge = Knowledge(
        shape=split.train.shape,
        value_range=(0.0, 1.0),
        mean=split.train.mean,
        sample_count=case.n,
        provenance={"mean": "train"},
    )
    training = Training(case.training, case.descent, case.n)
    config = make_attack(device=device, **case.attack)
    arch = f"mlp:{split.train.x[0].numel()}-{case.hidden}-1"
    setting = Conditions(arch, split, "binary", training, config, knowledge, device=device)
    return with_seed(setting, seed)


def settings(data: str) -> str:
    """Return a hash of all settings of training, attack and scores, apart from the seed."""
    case = CASES[data]
    content = {
        "case": {
            **{name: value for name, value in asdict(case).items() if name != "more"},
            "training": case.training.to_json(),
            "descent": case.descent.to_json(),
        },
        "attack": make_attack(**case.attack).to_json(),
        "scored": (HELD_OUT, SUBSETS, LEVELS, RELEASES),
    }
    return hashlib.sha256(json.dumps(plain(content), sort_keys=True).encode()).hexdigest()


def attack_network(
    data: str, seed: int, group: tuple[str, ...], root: str | None, device: str
) -> list[Row]:
    """Train a network, apply the defenses of a group, and attack each release in every way."""
    torch.set_num_threads(1)
    setting, start = prepare(data, seed, root, device), time.monotonic()
    named = {} if group == AFTER else {"name": group[0].split(":")[0]}
    defense_and_strength = parse_defense(group[0]) if named else ("none", DEFENSES["noise"], None)
    defended = release(setting, *defense_and_strength)
    checkpoint, secret, state = defended.released, defended.secret, defended.state
    public_facts, training = defended.training_facts, defended.training
    trained = time.monotonic() - start
    public = {
        "theta0": state.theta0,
        "weight_decay": training.config.weight_decay,
        "loss": "logistic",
        "large": training.config.init != "small",
    }
    rows = []
    for text in group:
        name, defense, strength = parse_defense(text) if text != "none" else ("none", None, None)
        releases = [checkpoint]
        if not named and defense is not None and strength is not None and defense.release:
            secrets = [
                defense.draw(strength, setting.split.train.shape, seed + 7919 * k, name)
                for k in range(RELEASES if defense.releases_differ else 1)
            ]
            secret, releases = (
                secrets[0],
                [defense.release(checkpoint, strength, s) for s in secrets],
            )
        handed = Released(tuple(releases), setting.knowledge, setting.attack, dict(public))
        row = measure_network(setting, releases[0], secret) | {"defense": text, "seed": seed}
        row |= {"arch": setting.arch, "facts": public_facts, "train_seconds": round(trained, 2)}
        row |= {"settings": settings(data), "environment": environment(device)}
        ways = make_attackers(
            handed, "" if defense is None else defense.adaptive, secret, not named
        )
        row["attacks"], row["findings"] = score_attacks(setting, ways)
        rows.append(row)
        if training.config.momentum and name == "plain-gd":
            with_state = {**row, "defense": f"{text}, {STATE}"}
            buffers = {k: v.cpu() for k, v in state.buffers.items()}
            moment = replace(handed, knowledge=handed.knowledge.replace(moment=buffers))
            scores, _ = score_attacks(setting, state_attacks(moment))
            with_state["attacks"] = row["attacks"] | scores
            rows.append(with_state)
    return rows


def state_attacks(handed: Released) -> Iterator[Attacker]:
    """Yield the two attacks on the optimizer state that was released with the weights."""
    for kind in (OptimizerState, UnmixOptimizerState):
        attack = kind.like(handed.attack)
        yield kind.name, Adapted(handed.checkpoints[0], handed.knowledge, attack)


def score_attacks(setting: Conditions, ways: Iterator[Attacker]) -> tuple[dict[str, Row], Row]:
    """Return the counts of every attack with chance, and what the adaptive attack inferred."""
    scores: dict[str, Row] = {}
    inferred: Row = {}
    train, held = setting.split.train, setting.split.holdout
    for name, way in ways:
        inferred |= way.findings if isinstance(way, Adapted) else {}
        result = run_attacker(way, train.shape)
        if isinstance(result, str):
            scores[name] = {"refused": result}
            continue
        pool = all_candidates(result).x.double().cpu()
        x = add_negated(name, pool.reshape(-1, *train.shape))
        ours = score(x, train, held, metrics=["ncc"], seed=setting.seed, subsets=SUBSETS)
        scores[name] = {
            "recovered": ours.recovered,
            "expected": ours.expected_by_chance,
            "p_value": ours.p_value,
            "rule": ours.rule,
            "candidates": len(x),
            "seconds": round(result.seconds, 2),
        }
        for tag, samples in (("", train.x), (" held out", held.x[: len(train)])):
            value = greedy(ncc(x, samples.double()).numpy()).value
            scores[name] |= {f"{level}{tag}": int((value > level).sum()) for level in LEVELS}
    return scores, plain(inferred)


def measure_network(setting: Conditions, checkpoint: Network, secret: Secret) -> Row:
    """Return accuracy and loss on training samples and held-out samples."""
    model, figures = checkpoint.copy_module(torch.float64), {}
    for subset, data in (("train", setting.split.train), ("held_out", setting.split.holdout)):
        outputs = evaluate(model, secret.inputs(data.x.double()))
        y = normalize_labels(data.y, "binary", 1)
        figures[f"{subset}_loss"] = float(LOSSES["logistic"](outputs, y))
        figures[f"{subset}_accuracy"] = accuracy(outputs, y, "binary")
    return figures | {"first_layer_rank": first_layer_rank(checkpoint.theta)}


def groups(data: str) -> list[tuple[str, ...]]:
    """Return the groups of defenses that share a trained network."""
    return [AFTER, *((text,) for text in (*ALONE, *CASES[data].more))]


def job(data: str, seed: int, group: tuple[str, ...], root: str | None, device: str) -> list[Row]:
    """Call :func:`attack_network`. If a network cannot be trained, the row says why."""
    name = group[0].split(":")[0]
    if name in DEFENSES and not DEFENSES[name].is_available:
        return [{"defense": group[0], "seed": seed, "skipped": DEFENSES[name].install}]
    try:
        return attack_network(data, seed, group, root, device)
    except InconclusiveError as problem:
        return [{"defense": group[0], "seed": seed, "skipped": problem.message}]


class ResultFile:
    """The results of one data set."""

    def __init__(self, folder: Path, data: str, device: str) -> None:
        case = CASES[data]
        self.path, self.settings = folder / f"defenses-{data}.json", settings(data)
        self.content: Row = {
            "benchmark": "defenses",
            "data": data,
            "n": case.n,
            "attack": case.attack,
            "held_out": HELD_OUT,
            "environment": environment(device),
            "rows": {},  # by defense/seed
        }
        if self.path.exists():
            self.content = json.loads(self.path.read_text(encoding="utf-8"))

    def rows(self, seed: int, group: tuple[str, ...]) -> list[Row]:
        """Return the stored rows of a network."""
        stored = (self.content["rows"].get(f"{text}/{seed}") for text in group)
        return [row for row in stored if row is not None]

    def has(self, seed: int, group: tuple[str, ...]) -> bool:
        """Return True if a network was measured with the current settings. Old rows have no settings."""
        measured_rows = [
            row
            for row in self.rows(seed, group)
            if "attacks" in row and row.get("settings", self.settings) == self.settings
        ]
        return len(measured_rows) == len(group)

    def add(self, rows: list[Row]) -> None:
        """Store rows. They replace rows of skipped networks."""
        self.content["rows"] |= {f"{row['defense']}/{row['seed']}": row for row in rows}
        write_json(self.path, self.content)


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing, and list what is stored."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=tuple(CASES), nargs="+", default=["digits"])
    root = os.environ.get(DATA)
    parser.add_argument(
        "--root", default=root, help=f"folder of mnist.npz and cifar10.npz; default: ${DATA}"
    )
    parser.add_argument(
        "--device", default="cpu", help="device of MNIST and CIFAR-10; digits use the CPU"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="names of defenses; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.data != ["digits"] and not options.root:
        parser.error(f"mnist and cifar10 are read from files: pass --root or set {DATA}")
    defenses = {text for data in options.data for group in groups(data) for text in group}
    if unknown := sorted({*options.only} - defenses):
        parser.error(
            f"no such defense: {', '.join(unknown)}; there are {', '.join(sorted(defenses))}"
        )
    where = {data: "cpu" if data == "digits" else options.device for data in options.data}
    for device in where.values():
        require_device(device)
    files = {data: ResultFile(options.out, data, where[data]) for data in options.data}
    cases = [
        (data, seed, group)
        for seed in options.seeds
        for group in dict.fromkeys(group for data in options.data for group in groups(data))
        for data in options.data
        if group in groups(data) and (not options.only or {*group} & {*options.only})
    ]
    finished = [case for case in cases if files[case[0]].has(*case[1:])]
    missing = [case for case in cases if case not in finished]
    for data, seed, group in finished:
        for row in files[data].rows(seed, group):
            print(f"there: {_line(data, row)}")
    if finished:
        print(
            f"{len(finished)} of {len(cases)} networks are in {options.out} and are not made again; "
            "to measure them anew name another folder with --out",
            flush=True,
        )
    if not missing:
        return 0
    start = time.monotonic()
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        waiting = {
            pool.submit(job, data, seed, group, options.root, where[data]): data
            for data, seed, group in missing
        }
        for k, case in enumerate(as_completed(waiting), 1):
            data, rows = waiting[case], case.result()
            files[data].add(rows)
            for row in rows:
                print(
                    f"{time.monotonic() - start:5.0f} s {k}/{len(missing)} {_line(data, row)}",
                    flush=True,
                )
    return 0


def _line(data: str, row: Row) -> str:
    counts = {name: scores.get("recovered", "-") for name, scores in row.get("attacks", {}).items()}
    return f"{data} {row['defense']} seed {row['seed']}: {row.get('skipped') or counts}"


if __name__ == "__main__":
    sys.exit(run_program(main))
