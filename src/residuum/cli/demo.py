"""``residuum demo``: the whole way on bundled data, from training to a scored reconstruction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from residuum.cli import certify as certify_command
from residuum.cli.granted import describe
from residuum.cli.options import Json, Quiet
from residuum.cli.output import (
    attack_progress,
    number,
    print_json,
    print_line,
    print_table,
    training_progress,
)
from residuum.cli.score import whole_pool

if TYPE_CHECKING:
    from torch import Tensor

    from residuum.records import Certificate, Checkpoint, Knowledge, Reconstruction, Scores, Split

EXAMPLES = """Examples:

residuum demo

residuum demo --out pictures --json
"""
ARCH, SAMPLES, STEPS = "mlp:64-200-200-1", 20, 5000
RESTARTS, ATTACK_STEPS = 4, 2000
PICTURE = "reconstructions.png"


class Attacked(NamedTuple):
    """What an attack found, all its candidates and their score."""

    found: Reconstruction
    candidates: Tensor
    scores: Scores


def command(
    out: Annotated[
        Path, typer.Option(help="Folder for the picture and demo.json.")
    ] = Path("runs/demo"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Train on bundled digits, certify, attack the weights, score what came back, draw it."""
    from residuum.datasets import load_dataset
    from residuum.records import Knowledge, make_directory
    from residuum.training import TrainingConfig, released, train

    make_directory(out)  # before the work, not after it
    spoken = not (json or quiet)
    split = load_dataset("digits", SAMPLES)
    knowledge = Knowledge(
        value_range=(0.0, 1.0), mean=split.train.mean, sample_count=SAMPLES,
        provenance={"mean": "train", "sample_count": "train"},
    )  # fmt: skip
    with _one_thread():
        with training_progress(spoken) as watch:
            state = train(ARCH, split.train, TrainingConfig(steps=STEPS), watch=watch)
        checkpoint = released(state, ARCH, split.train, "binary")
        certificates = _certify(checkpoint, split)
        if spoken:
            _show_certificates(*certificates)
        attacked = _attack(checkpoint, knowledge, split, spoken)
        control = _attack(_untrained(checkpoint), knowledge, split, spoken)
    summary = _write(out, split, certificates, attacked, control)
    if json:
        print_json(summary)
    elif spoken:
        _show_scores(attacked, control, knowledge)
        print_line(f"picture, found above and training digits below: {out / PICTURE}")


@contextmanager
def _one_thread() -> Iterator[None]:
    """The same figures whatever the number of cores; problems this small gain nothing by more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write(
    out: Path,
    split: Split,
    certificates: tuple[Certificate, Certificate],
    attacked: Attacked,
    control: Attacked,
) -> dict[str, Any]:
    """The picture, and every figure in ``demo.json``."""
    from residuum.records import write_atomic, write_json
    from residuum.report import compared_figure

    summary = {
        "certificate": certificates[0].to_json(),
        "certificate_holdout": certificates[1].to_json(),
        "attack": attacked.found.to_json(),
        "scores": attacked.scores.to_json(),
        "untrained": {"attack": control.found.to_json(), "scores": control.scores.to_json()},
        "picture": str(out / PICTURE),
    }
    bands = {
        "this network": (attacked.candidates, attacked.scores),
        "one never trained": (control.candidates, control.scores),
    }
    if figure := compared_figure(bands, split.train):
        write_atomic(out / PICTURE, figure)
    write_atomic(out / ".gitignore", "*\n")
    write_json(out / "demo.json", summary)
    return summary


def _certify(checkpoint: Checkpoint, split: Split) -> tuple[Certificate, Certificate]:
    """Of the training digits, and of as many that the network never saw."""
    from residuum.checkpoints import build_model
    from residuum.theory import certify

    model = build_model(checkpoint)
    return (
        certify(model, split.train.x, split.train.y),
        certify(model, split.holdout.x[:SAMPLES], split.holdout.y[:SAMPLES]),
    )


def _untrained(checkpoint: Checkpoint) -> Checkpoint:
    """The same architecture with random weights: whatever an attack finds there, it made up."""
    from residuum.networks import Architecture
    from residuum.stationarity import parameters
    from residuum.training import TrainingConfig, initialise

    model = initialise(Architecture.parse(ARCH), TrainingConfig(init="default"))
    return checkpoint.replace(theta=parameters(model))


def _attack(checkpoint: Checkpoint, knowledge: Knowledge, split: Split, spoken: bool) -> Attacked:
    """The default attack from the weights, and only then the data to score it by."""
    from dataclasses import replace

    from residuum.attacks import PRESETS, attack
    from residuum.checkpoints import first_layer, leak_capacity
    from residuum.evaluation import score

    config = replace(PRESETS["residuum"], restarts=RESTARTS, steps=ATTACK_STEPS)
    with attack_progress(spoken) as watch:
        found = attack(checkpoint, knowledge, config, watch=watch)
    candidates = whole_pool(found)[0]
    capacity = leak_capacity(first_layer(checkpoint.theta))
    scores = score(candidates, split.train, split.holdout, capacity=capacity)
    return Attacked(found, candidates, scores)


def _show_certificates(found: Certificate, control: Certificate) -> None:
    certify_command.show(found, f"{ARCH} trained on {SAMPLES} digits, odd against even")
    rows = [
        (name, number(mine), number(other))
        for name, mine, other in (
            ("KKT residual, plain", found.residual_plain, control.residual_plain),
            ("KKT residual, Clarke", found.residual_clarke, control.residual_clarke),
            ("margin", found.margin, control.margin),
        )
    ]
    columns = ("what", "training digits", "held-out digits")
    print_table("the same residuals on digits it never saw", columns, rows)


def _show_scores(attacked: Attacked, control: Attacked, knowledge: Knowledge) -> None:
    parts, scores = (attacked.scores, control.scores), attacked.scores
    rows = [
        ("digits recovered", *(f"{part.recovered} of {part.n}" for part in parts)),
        ("expected by chance", *(number(part.expected_by_chance, 2) for part in parts)),
        ("p, permutation test", *(number(part.p_value, 2) for part in parts)),
        ("first-layer residual", number(_residual(attacked)), number(_residual(control))),
    ]
    title = f"attack from the weights, {RESTARTS} restarts of {ATTACK_STEPS} steps"
    print_table(title, ("what", "this network", "one never trained"), rows)
    print_line(
        f"recovered: {scores.deciding.upper()} beyond the 99th percentile of {scores.pool} held-out digits"
    )
    print_line(
        f"{scores.recovered} recovered of a leak capacity of {scores.capacity} "
        f"({number(scores.capacity_share, 2)})"
    )
    print_line(f"granted to the attacker: {describe(knowledge)}")


def _residual(attacked: Attacked) -> float | None:
    """Relative residual of the first layer, of the best restart."""
    first = attacked.found.layer_names[0]
    values = [run["residuals"][first] for run in attacked.found.to_json()["runs"]]
    return min((value for value in values if value is not None), default=None)
