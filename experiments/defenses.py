"""Every defense against the strongest attack that knows of it, at which price; three seeds per dataset.

    python -m experiments.defenses --data digits --workers 2
    python -m experiments.defenses --data mnist cifar10 --root DATA --device cuda --workers 12

DATA holds mnist.npz and cifar10.npz. Written after every network into results/defended-DATA.json; the same
command again says what is there and makes what is missing or of other settings. A release is attacked in
every way that ``residuum.defenses.attackers`` has, each scored apart against held-out samples, and where the
optimizer's state was kept in two more:

moment         stationarity on that state
unmix-moment   that state taken apart

Settings were chosen on seeds 10 and 11 of digits, before the prior, margins and unmixing were there.
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
    """Victims and attacks of one dataset."""

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
    """Data, settings and knowledge; the attacker knows value range, mean and number of samples."""
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
    """sha256 of all that networks of a dataset are trained, attacked and scored with but for their seed."""
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


def tried(data: str, seed: int, group: tuple[str, ...], root: str | None, device: str) -> list[Row]:
    """The defenses of one trained network, each attacked in every way."""
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
        row = measured(setting, releases[0], secret) | {"defense": text, "seed": seed}
        row |= {"arch": setting.arch, "facts": public_facts, "train_seconds": round(trained, 2)}
        row |= {"settings": settings(data), "environment": environment(device)}
        ways = make_attackers(
            handed, "" if defense is None else defense.adaptive, secret, not named
        )
        row["attacks"], row["findings"] = scored(setting, ways)
        rows.append(row)
        if training.config.momentum and name == "plain-gd":
            with_state = {**row, "defense": f"{text}, {STATE}"}
            buffers = {k: v.cpu() for k, v in state.buffers.items()}
            moment = replace(handed, knowledge=handed.knowledge.replace(moment=buffers))
            scores, _ = scored(setting, moments(moment))
            with_state["attacks"] = row["attacks"] | scores
            rows.append(with_state)
    return rows


def moments(handed: Released) -> Iterator[Attacker]:
    """The optimizer's state beside the weights, attacked both ways."""
    for kind in (OptimizerState, UnmixOptimizerState):
        attack = kind.like(handed.attack)
        yield kind.name, Adapted(handed.checkpoints[0], handed.knowledge, attack)


def scored(setting: Conditions, ways: Iterator[Attacker]) -> tuple[dict[str, Row], Row]:
    """Counts of every attack beside chance, and what the adaptive one inferred."""
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


def measured(setting: Conditions, checkpoint: Network, secret: Secret) -> Row:
    """Accuracy on held-out samples, loss on training ones, as the defended network is given them."""
    model, figures = checkpoint.copy_module(torch.float64), {}
    for subset, data in (("train", setting.split.train), ("held_out", setting.split.holdout)):
        outputs = evaluate(model, secret.inputs(data.x.double()))
        y = normalize_labels(data.y, "binary", 1)
        figures[f"{subset}_loss"] = float(LOSSES["logistic"](outputs, y))
        figures[f"{subset}_accuracy"] = accuracy(outputs, y, "binary")
    return figures | {"first_layer_rank": first_layer_rank(checkpoint.theta)}


def groups(data: str) -> list[tuple[str, ...]]:
    """What is trained apart."""
    return [AFTER, *((text,) for text in (*ALONE, *CASES[data].more))]


def job(data: str, seed: int, group: tuple[str, ...], root: str | None, device: str) -> list[Row]:
    """As :func:`tried`; a network that cannot be had leaves a row that says why."""
    name = group[0].split(":")[0]
    if name in DEFENSES and not DEFENSES[name].is_available:
        return [{"defense": group[0], "seed": seed, "skipped": DEFENSES[name].install}]
    try:
        return tried(data, seed, group, root, device)
    except InconclusiveError as problem:
        return [{"defense": group[0], "seed": seed, "skipped": problem.message}]


class Kept:
    """The file of one dataset: what it holds, and what is still to be made."""

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
        """What is there of a network."""
        stored = (self.content["rows"].get(f"{text}/{seed}") for text in group)
        return [row for row in stored if row is not None]

    def has(self, seed: int, group: tuple[str, ...]) -> bool:
        """Whether a network was made and attacked with today's settings; older rows do not say theirs."""
        measured_rows = [
            row
            for row in self.rows(seed, group)
            if "attacks" in row and row.get("settings", self.settings) == self.settings
        ]
        return len(measured_rows) == len(group)

    def add(self, rows: list[Row]) -> None:
        """Keep rows, in place of those that were skipped before."""
        self.content["rows"] |= {f"{row['defense']}/{row['seed']}": row for row in rows}
        write_json(self.path, self.content)


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, and say what is not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", choices=tuple(CASES), nargs="+", default=["digits"])
    root = os.environ.get(DATA)
    parser.add_argument("--root", default=root, help=f"of mnist.npz, cifar10.npz; else ${DATA}")
    parser.add_argument("--device", default="cpu", help="of all but digits, which take a core")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="defenses; left out, all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.data != ["digits"] and not options.root:
        parser.error(
            f"mnist and cifar10 are read from files: name their folder with --root or ${DATA}"
        )
    defenses = {text for data in options.data for group in groups(data) for text in group}
    if unknown := sorted({*options.only} - defenses):
        parser.error(
            f"no such defense: {', '.join(unknown)}; there are {', '.join(sorted(defenses))}"
        )
    where = {data: "cpu" if data == "digits" else options.device for data in options.data}
    for device in where.values():
        require_device(device)
    files = {data: Kept(options.out, data, where[data]) for data in options.data}
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
