"""What every defense does, at which price, against an attacker who knows of it and one who does not.

Run as ``python -m benchmarks.defenses [table] [shift] [length] --data digits --out DIR``; for MNIST and
CIFAR-10 add ``--data mnist --root DATA --device cuda``. DATA holds mnist.npz and cifar10.npz. Written
after every trial, so that a run that is stopped keeps what it has.

table    every defense, unaware and adaptive attack, accuracy and loss on held-out samples
shift    a constant c rewritten into the biases of two-layer networks: error of the inferred c, counts
length   training steps against KKT residual and recovered samples
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import first_layer_rank, threads
from residuum.attacks import PRESETS
from residuum.datasets import load_dataset
from residuum.defenses import DEFENSES, Conditions, Outcome, Training, at_seed, find, run_trial
from residuum.errors import InconclusiveError
from residuum.records import Knowledge, write_json
from residuum.records.rundir import environment
from residuum.training import TrainingConfig


@dataclass(frozen=True)
class Case:
    """Victims and attacks of one dataset. two_layer: the network of the shift part."""

    n: int
    hidden: str
    two_layer: str
    steps: int
    descent: TrainingConfig
    attack: dict[str, Any]
    lengths: tuple[int, ...]
    defenses: tuple[str, ...]
    dtype: str = "float64"
    certify: bool = True


_COMMON = (
    "shift-rewrite:0.05",
    "shift-rewrite:0.5",
    "shift-rewrite:5",
    "shift-rewrite-vector:0.5",
    "shift-retrain:0.5",
    "shift-retrain:5",
    "shift-retrain-vector:0.5",
    "noise:0.1",
    "noise:0.5",
    "noise:1",
    "early-stop:0.1",
    "default-init:1",
    "plain-gd:1",
    "label-smoothing:0.2",
    "sgd:10",
    "dp:8",
)
_GPU = Case(
    50,
    "1000-1000",
    "1000",
    1500,
    TrainingConfig(method="gd", steps=3000, lr=0.05, momentum=0.9, dtype="float32"),
    {"restarts": 2, "steps": 5000},
    (50, 150, 500, 1500, 4500),
    (*_COMMON, "weight-decay:0.001"),
    "float32",
    False,
)
CASES = {
    "digits": Case(
        100,
        "100-100",
        "200",
        800,
        TrainingConfig(method="gd", steps=3000, lr=0.5, momentum=0.9),
        {"restarts": 2, "steps": 800},
        (25, 50, 100, 200, 400, 800, 1600),
        (*_COMMON, "weight-decay:0.01"),
    ),
    "mnist": _GPU,
    "cifar10": _GPU,
}
SHIFTS = (0.05, 0.5, 5.0)


class Run:
    """Results so far, written after every trial; no trial starts after ``seconds``."""

    def __init__(self, path: Path, head: dict[str, Any], seconds: float) -> None:
        self.path, self.start, self.limit = path, time.monotonic(), seconds
        self.content: dict[str, Any] = {**head, "skipped": []}

    def add(
        self, part: str, label: str, setting: Conditions, text: str | None, **more: Any
    ) -> None:
        """One trial; ``text``: NAME:STRENGTH, None for the undefended network."""
        if time.monotonic() - self.start > self.limit:
            self.content["skipped"].append(f"{part} {label}: out of time")
            return
        if text is not None and not DEFENSES[text.split(":")[0]].available:
            install = DEFENSES[text.split(":")[0]].install
            self.content["skipped"].append(f"{part} {label}: unavailable, {install}")
            return
        try:
            outcome, checkpoint, _ = run_trial(setting, *(find(text) if text else ()))
        except InconclusiveError as problem:
            self.content["skipped"].append(f"{part} {label}: {problem.message}")
            return
        row = {**more, "arch": setting.arch, "seed": setting.seed, **outcome.to_json()}
        row["first_layer_rank"] = first_layer_rank(checkpoint.theta)
        self.content.setdefault(part, []).append(row)
        self.content["seconds"] = round(time.monotonic() - self.start, 1)
        write_json(self.path, self.content)
        print(_line(part, label, outcome), flush=True)


def table(run: Run, case: Case, setting: Conditions) -> None:
    """Every defense on the same network."""
    for text in (None, *case.defenses):
        run.add("table", f"seed {setting.seed} {text or 'none'}", setting, text)


def shift(run: Run, case: Case, setting: Conditions) -> None:
    """Constant shifts, and one random vector, of a two-layer network, inferred and undone."""
    inputs = setting.split.train.x[0].numel()
    two = replace(setting, arch=f"mlp:{inputs}-{case.two_layer}-1", certify=False)
    constant = (f"shift-rewrite:{c}" for c in SHIFTS)
    for text in (None, *constant, "shift-rewrite-vector:0.5"):
        run.add("shift", f"seed {setting.seed} {text or 'none'}", two, text)


def length(run: Run, case: Case, setting: Conditions) -> None:
    """The undefended network after so many steps of training."""
    for steps in case.lengths:
        training = replace(setting.training, config=replace(setting.training.config, steps=steps))
        longer = replace(setting, training=training, certify=False)
        run.add("length", f"seed {setting.seed} {steps} steps", longer, None, steps=steps)


def prepare(name: str, case: Case, seed: int, root: str | None, device: str) -> Conditions:
    """Data, settings and knowledge; the attacker knows value range, mean and number of samples."""
    split = load_dataset(name, case.n, seed=seed, root=root, holdout=600)
    inputs = split.train.x[0].numel()
    knowledge = Knowledge(
        shape=split.train.shape,
        value_range=(0.0, 1.0),
        mean=split.train.mean,
        sample_count=case.n,
        provenance={"mean": "train"},
    )
    training = Training(TrainingConfig(steps=case.steps, dtype=case.dtype), case.descent, case.n)
    attack = PRESETS["residuum"].changed(device=device, **case.attack)
    setting = Conditions(
        f"mlp:{inputs}-{case.hidden}-1",
        split,
        "binary",
        training,
        attack,
        knowledge,
        device=device,
        certify=case.certify,
        kinks=0,
    )
    return at_seed(setting, seed)


def _line(part: str, label: str, outcome: Outcome) -> str:
    def count(attacked: Any) -> str:
        if attacked is None:
            return "-"
        chance = f"{attacked.expected_by_chance:.2g} by chance"
        return f"{attacked.recovered} ({attacked.rule}, {chance}, p {attacked.p_value:.3g})"

    return (
        f"{part} {label}: unaware {count(outcome.unaware)}, adaptive {count(outcome.adaptive)}, told "
        f"{count(outcome.told)}, accuracy {outcome.accuracy}, kkt {outcome.kkt_plain:.3g}"
    )


def main() -> None:
    """Run the parts asked for on one dataset."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--data", choices=tuple(CASES), default="digits")
    parser.add_argument("--root", help="folder of mnist.npz and cifar10.npz")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    case = CASES[options.data]
    place = "cpu" if options.device == "cpu" else options.data
    path = options.out / f"{options.name or f'defenses-{place}'}.json"
    head = {
        "benchmark": "defenses",
        "data": options.data,
        "n": case.n,
        "steps": case.steps,
        "attack": case.attack,
        "seeds": options.seeds,
        "environment": environment(options.device),
    }
    run = Run(path, head, options.seconds)
    with threads(1 if options.device == "cpu" else torch.get_num_threads()):
        for seed in options.seeds:
            setting = prepare(options.data, case, seed, options.root, options.device)
            for part in options.parts or PARTS:
                PARTS[part](run, case, setting)
    write_json(path, run.content)
    print(f"written: {path.name}; skipped: {run.content['skipped']}")


PARTS = {"table": table, "shift": shift, "length": length}

if __name__ == "__main__":
    main()
