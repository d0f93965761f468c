"""``residuum exposure``: which records are at risk, from weights and data, without attacking.

Examples:

residuum exposure model.safetensors --data train.npz --holdout test.npz --out runs/e

residuum exposure runs/m --data runs/m --holdout runs/m --init own --json

residuum exposure model.pt --data train.npz --holdout test.npz --group-by site

residuum exposure model.pt --data train.npz --canaries canaries.npz --delta 1e-5
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from residuum.cli import options
from residuum.cli.options import option
from residuum.cli.output import exposure_progress, number, print_line, print_notes, print_table
from residuum.errors import InputError

if TYPE_CHECKING:
    from residuum.records import Exposure
    from residuum.records.exposure import GroupExposure

GROUPS = 20  # of a table


def command(
    checkpoint: options.CheckpointPath,
    *,
    data: Path = option(
        "Training records: an .npz with x and y, a .csv with a header, or a training directory.",
        ...,
    ),
    holdout: Path | None = option(
        "Records the network never saw, likewise; at least 100. Without them kinks and dual vectors "
        "have no p-values."
    ),
    init: str | None = option(
        "Initial weights: looks at what training added to them; own: those in the training "
        "directory.",
        metavar="FILE",
        suggested=("own",),
    ),
    surface: str = option(
        "Look at this: weights, change (from the start), moment (optimiser state); auto: the last of "
        "these that there is.",
        "auto",
        choices=("auto", "weights", "change", "moment"),
    ),
    group_by: str | None = option(
        "Array of the data file with a name per record (default: the class).", metavar="NAME"
    ),
    attack: Path | None = option(
        "Folder of an attack: what it found stands beside.", metavar="RUN"
    ),
    canaries: Path | None = option(
        "An .npz with x, y and inserted (1: in the training set, 0: left out), both kinds listed: "
        "gives a lower bound on epsilon.",
        metavar="FILE",
    ),
    confidence: float = option("Of that bound.", 0.95, place="expert"),
    delta: float = option("Of that bound: 0 for pure differential privacy.", 0.0, place="expert"),
    top: int = option("Records shown.", 10, min=0),
    fail_above: float | None = option(
        "Exit code 1 when a record's probability of being recovered is above this. Refused where "
        "the probability is not calibrated.",
        min=0,
        max=1,
    ),
    weight_decay: float | None = option("Weight decay of the training, where it is known."),
    arch: str | None = options.ARCH,
    task: str = options.TASK,
    device: str = options.DEVICE,
    out: Path | None = option("Folder to write; an interrupted run there goes on."),
    voice: options.Voice,
) -> None:
    """Rank records by their risk of being recovered: scores, bounds, evidence, groups, canaries."""
    from residuum.datasets.given import place_of, read_samples
    from residuum.io.attacker_knowledge import attacker_knowledge
    from residuum.io.checkpoints import load_checkpoint
    from residuum.io.release import open_release
    from residuum.verbs.exposing import exposure, read_groups

    options.check_device(device)
    if canaries is None and (confidence, delta) != (0.95, 0.0):
        raise InputError("--confidence and --delta are of canaries.", "Say --canaries FILE.")
    release = open_release(checkpoint)
    released = load_checkpoint(release, arch)
    file = place_of(data, "data")
    records, _ = read_samples(file)
    control = read_samples(place_of(holdout, "holdout"))[0] if holdout else None
    knowledge = attacker_knowledge(release, released, init=init, weight_decay=weight_decay)
    with exposure_progress(voice.spoken) as watch:
        how: dict[str, Any] = {"surface": surface, "task": task, "top": top, "device": device}
        how |= {"canaries": canaries, "confidence": confidence, "delta": delta, "found": attack}
        groups = read_groups(file, group_by, len(records)) if group_by else ()
        how |= {"groups": groups, "grouped_by": group_by or "", "out": out, "watch": watch}
        found = exposure(released, records, control, knowledge=knowledge, **how)
    if fail_above is not None and found.uncalibrated:
        raise InputError(
            f"--fail-above needs a probability. There is none here: {found.uncalibrated}.",
            "Leave --fail-above out and read the ranking, or use the exit code of residuum audit.",
        )
    above = 0 if fail_above is None else int((found.probability > fail_above).sum())

    def say() -> None:
        show(found, out)
        if above:
            print_line(f"exit code 1: {above} of {len(found)} records are above {fail_above:g}")

    voice.answer(found.to_json(), say)
    if above:
        raise typer.Exit(1)


def show(found: Exposure, out: Path | None) -> None:
    """The exposure as a person reads it."""
    attacked = not bool(found.found_ncc.isnan().all())
    figures = {  # as many as 80 columns hold
        **({"score": "score"} if found.uncalibrated else {"prob.": "probability"}),
        **({"found": "found_ncc"} if attacked else {"heard": "heard"}),
        "own": "own_over_misfit",
        "informed": "informed_ncc",
        "kinks": "kinks",
        "q": "kink_q",
        "margin": "margin",
    }
    heads = ("record", found.grouped_by or "group", *figures)
    shown = []
    for row in found.rows(len(found.top)):
        values = map(row.get, figures.values())
        said = [str(v) if isinstance(v, int) else number(v, 2) for v in values]
        shown.append((str(row["index"]), row["group"] or "-", *said))
    if shown:
        print_table(f"{found.arch}: most exposed of {len(found)} records", heads, shown)
    groups = [_group_row(group) for group in found.by_group[:GROUPS]]
    if groups:
        columns = ("expected", "mean prob.", "95% interval")
        means = ("mean score",) if found.uncalibrated else columns
        print_table("groups", (found.grouped_by, "records", *means, "called"), groups)
    for line in found.lines:
        print_line(line)
    print_notes(found.notes)
    if out is not None:
        print_line(f"written to {out}")


def _group_row(group: GroupExposure) -> tuple[str, ...]:
    """Return the cells of a group: its mean score, or its probabilities where there are some."""
    called = "-" if group.called is None else str(group.called)
    if group.interval is None:
        return group.name, str(group.records), number(group.score, 2), called
    low, high = group.interval
    interval = f"{low:.2f} to {high:.2f}"
    means = (number(group.expected, 3), number(group.probability, 2), interval)
    return (group.name, str(group.records), *means, called)
