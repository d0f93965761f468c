"""``residuum score``: recovered training samples, compared with the number expected by chance.

Examples:

residuum score runs/a --data train.npz --holdout test.npz

residuum score runs/a --data runs/m --holdout runs/m --ckpt runs/m --json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import number, print_line, print_notes, print_table

if TYPE_CHECKING:
    from residuum.records import Reconstruction, Scores


app = options.command_app("score", __doc__)


@app.default
def command(
    run: Annotated[Path, Parameter(name="RUN", help="Folder of an attack.")],
    /,
    *,
    data: Annotated[
        Path, Parameter(help="Training samples: an .npz with x and y, or a training directory.")
    ],
    holdout: Annotated[
        Path | None,
        Parameter(help="At least 100 samples that the network never saw, in the same forms."),
    ] = None,
    ckpt: Annotated[Path | None, Parameter(help="The attacked checkpoint: adds margins.")] = None,
    candidates: Annotated[
        Literal["all", "selected"],
        Parameter(
            help="all: every candidate and consensus. selected: those that several restarts hold.",
            show_default=True,
        ),
    ] = "all",
    metrics: Annotated[
        str | None,
        Parameter(
            help="Any of ncc, ssim3, ssim, l2 and psnr, between commas.",
            metavar="NAME,...",
            completer=lambda _: ("ncc", "ssim3", "ssim", "l2", "psnr"),
        ),
    ] = None,
    seed: Annotated[int, Parameter(help="Seed of the held-out subsets.", show_default=True)] = 0,
    output: options.Output = options.OUTPUT,
    subsets: Annotated[
        int,
        Parameter(help="Held-out subsets that are drawn.", group=options.EXPERT, show_default=True),
    ] = 500,
) -> None:
    """Count recovered training samples, published and calibrated against held-out ones."""
    from residuum.auditing.artifacts import RESULT
    from residuum.auditing.store import WORK
    from residuum.errors import InputError
    from residuum.records import Dataset
    from residuum.records.inputs import find_samples_file
    from residuum.verbs.attacking import score_run

    if (run / RESULT).is_file() or (run / WORK).is_dir():  # ``result.json`` holds their hashes
        raise InputError(
            f"{str(run)!r} is the folder of an audit, which has scores of its own (scores.json).",
            "Name the folder of an attack; for other data audit again with another --out.",
        )
    if seed < 0:
        raise InputError(f"--seed must be at least 0; got {seed}.", "The default is 0.")
    train = Dataset.from_npz(find_samples_file(data, "train.npz"))
    control = Dataset.from_npz(find_samples_file(holdout, "holdout.npz")) if holdout else None
    names = None if metrics is None else [name.strip() for name in metrics.split(",")]
    summary, scores, selected, found = score_run(
        run, train, control, ckpt, candidates, metrics=names, subsets=subsets, seed=seed
    )
    output.result(summary, lambda: show(scores, selected, found, run))


def show(scores: Scores, selected: Scores | None, found: Reconstruction, run: Path) -> None:
    """Print the scores as a person reads them."""
    _table(f"{scores.n} training samples, {scores.m} candidates of {found.attack}", scores)
    if selected is not None:
        _table(f"of these the {selected.m} that the attack itself selected", selected)
    chance = f"the 99th percentile of chance, by {scores.pool} held-out samples"
    print_line(scores.reason or f"* decides; threshold: {chance}")
    print_line(f"known to the attacker: {found.knowledge.line}")
    print_notes(scores.notes)
    print_line(f"written to {run}")


def _table(title: str, scores: Scores) -> None:
    rows = []
    for name, part in scores.metrics.items():
        published = "-"
        if part.published_threshold is not None:
            sign = ">" if part.higher_is_better else "<"
            counts = (part.above_published_threshold, part.above_published_threshold_holdout)
            published = f"{sign} {part.published_threshold:g}: {' / '.join(map(number, counts))}"
        called = f"{name} *" if name == scores.deciding else name
        count = "not calibrated" if part.recovered is None else f"{part.recovered}/{scores.n}"
        chance = number(part.expected_by_chance, 3), number(part.p_value, 3)
        top = number(part.top10_mean, 3)
        rows.append((called, count, *chance, part.threshold, published, top))
    columns = ["metric", "recovered", "chance", "p", "threshold", "published:\ntrain/held-out"]
    columns += ["top 10"]
    print_table(title, columns, rows)
