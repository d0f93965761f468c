"""``residuum exposure``: which records are at risk, from weights and data, without attacking.

Examples:

residuum exposure model.safetensors --data train.npz --holdout test.npz --out runs/e

residuum exposure runs/m --data runs/m --holdout runs/m --init own --json

residuum exposure model.pt --data train.npz --holdout test.npz --group-by site

residuum exposure model.pt --data train.npz --canaries canaries.npz --delta 1e-5
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.options import options_from, with_options
from residuum.cli.output import exposure_progress, number, print_line, print_notes, print_table
from residuum.errors import InputError
from residuum.settings import ExposureRequest

if TYPE_CHECKING:
    from residuum.records import Exposure
    from residuum.records.exposure import GroupExposure

GROUPS = 20  # of a table


app = options.command_app("exposure", __doc__)


@app.default
@with_options(settings=options_from(ExposureRequest, skip=("grouped_by",)))
def command(
    checkpoint: options.CheckpointPath,
    /,
    *,
    data: Annotated[
        Path,
        Parameter(
            help="Training records: an .npz with x and y, a .csv with a header, or a training directory."
        ),
    ],
    holdout: Annotated[
        Path | None,
        Parameter(
            help="At least 100 records that the network never saw, in the same forms. Without them kinks "
            "and dual vectors have no p-values."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(help="Folder to write. An interrupted run there is continued."),
    ] = None,
    settings: dict[str, Any] | None = None,
    group_by: Annotated[
        str | None,
        Parameter(
            help="Array of the data file with a name for each record. By default the class.",
            metavar="NAME",
        ),
    ] = None,
    attack: Annotated[
        Path | None,
        Parameter(
            help="Folder of an attack whose nearest candidates are shown with the records.",
            metavar="RUN",
        ),
    ] = None,
    canaries: Annotated[
        Path | None,
        Parameter(
            help="An .npz with x, y and inserted (1 if in the training set, 0 if left out), with both "
            "kinds. Gives a lower bound on epsilon.",
            metavar="FILE",
        ),
    ] = None,
    fail_above: Annotated[
        float | None,
        Parameter(
            help="Exit with code 1 if a record's probability of being recovered is above this number from "
            "0 to 1. Refused if the probability is not calibrated."
        ),
    ] = None,
    output: options.Output = options.OUTPUT,
    init: Annotated[
        str | None,
        Parameter(
            help="Initial weights: explains the weight update. own takes those in the training directory.",
            metavar="FILE",
            group=options.ATTACKER,
            completer=lambda _: ("own",),
        ),
    ] = None,
    weight_decay: Annotated[
        float | None, Parameter(help="Weight decay of the training.", group=options.ATTACKER)
    ] = None,
) -> int:
    """Rank records by their risk of being recovered: scores, bounds, evidence, groups, canaries."""
    from residuum.datasets.given import place_of, read_samples
    from residuum.io.attacker_knowledge import attacker_knowledge
    from residuum.io.checkpoints import load_checkpoint
    from residuum.io.release import open_release
    from residuum.verbs.exposing import exposure, read_groups

    settings = settings or {}
    request = options.made_from_options(ExposureRequest, settings)
    options.check_device(request.device)
    if canaries is None and settings.keys() & {"confidence", "delta"}:
        raise InputError(
            "--confidence and --delta are settings of canaries.", "Pass --canaries FILE."
        )
    if fail_above is not None and not 0 <= fail_above <= 1:
        raise InputError(
            f"--fail-above must be from 0 to 1; got {fail_above:g}.", "Example: --fail-above 0.5."
        )
    release = open_release(checkpoint)
    network = load_checkpoint(release, request.arch)
    file = place_of(data, "data")
    records, _ = read_samples(file)
    held_out = read_samples(place_of(holdout, "holdout"))[0] if holdout else None
    knowledge = attacker_knowledge(release, network, init=init, weight_decay=weight_decay)
    with exposure_progress(output.visible) as watch:
        found = exposure(
            network,
            records,
            held_out,
            knowledge=knowledge,
            groups=read_groups(file, group_by, len(records)) if group_by else (),
            grouped_by=group_by or "",
            found=attack,
            canaries=canaries,
            out=out,
            watch=watch,
            **settings,
        )
    if fail_above is not None and found.uncalibrated:
        raise InputError(
            f"--fail-above needs a probability. There is none here: {found.uncalibrated}.",
            "Leave --fail-above out and read the ranking, or use the exit code of residuum audit.",
        )
    above = 0 if fail_above is None else int((found.probability > fail_above).sum())

    def show_all() -> None:
        show(found, out)
        if above:
            print_line(f"exit code 1: {above} of {len(found)} records are above {fail_above:g}")

    output.result(found.to_json(), show_all)
    return 1 if above else 0


def show(found: Exposure, out: Path | None) -> None:
    """Print the exposure as a person reads it."""
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
