"""``residuum score``: count the training samples that an attack recovered, compared with chance.

Examples:
residuum score runs/a --data train.npz --holdout test.npz

residuum score runs/a --data runs/m --holdout runs/m --ckpt runs/m --json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import format_number, print_line, print_notes, print_table

if TYPE_CHECKING:
    from residuum.records import Reconstruction, Scores


app = options.command_app("score", __doc__)


@app.default
def _command(
    run: Annotated[Path, Parameter(name="RUN", help="Folder of a finished attack.")],
    /,
    *,
    data: Annotated[
        Path,
        Parameter(
            help="Training samples: an .npz file with the arrays x and y, or the folder that "
            "residuum train wrote."
        ),
    ],
    holdout: Annotated[
        Path | None,
        Parameter(
            help="Held-out samples: at least 100 samples that the network was not trained on, in a form "
            "that --data takes."
        ),
    ] = None,
    ckpt: Annotated[
        Path | None,
        Parameter(
            help="File of the attacked network. The scores then include the margin of every "
            "training sample."
        ),
    ] = None,
    candidates: Annotated[
        Literal["all", "selected"],
        Parameter(
            help="Which candidates (reconstructed samples) to score. all: all candidates, and separately "
            "the candidates that the attack selected. selected: only the candidates that the attack "
            "selected.",
            show_default=True,
        ),
    ] = "all",
    metrics: Annotated[
        str | None,
        Parameter(
            help="Metrics that compare reconstructions with training samples, separated by commas: ncc, "
            "ssim3, ssim, l2 and psnr.",
            metavar="NAME,...",
            completer=lambda _: ("ncc", "ssim3", "ssim", "l2", "psnr"),
        ),
    ] = None,
    seed: Annotated[
        int,
        Parameter(
            help="Seed of the random subsets of held-out samples. These subsets show how many samples are "
            "matched by chance.",
            show_default=True,
        ),
    ] = 0,
    output: options.Output = options.OUTPUT,
    subsets: Annotated[
        int,
        Parameter(
            help="Number of random subsets of held-out samples. These subsets show how many samples are "
            "matched by chance.",
            group=options.EXPERT,
            show_default=True,
        ),
    ] = 500,
) -> None:
    """Count the training samples that an attack recovered, and compare the count with chance."""
    from residuum.auditing.artifacts import RESULT
    from residuum.auditing.store import WORK
    from residuum.errors import InputError
    from residuum.records import Dataset
    from residuum.records.inputs import find_samples_file
    from residuum.verbs.attacking import score_run

    # An audit stores hashes of its scores in ``result.json``, so its scores must not be overwritten.
    if (run / RESULT).is_file() or (run / WORK).is_dir():
        raise InputError(
            f"The argument RUN must be the folder of an attack; {str(run)!r} is the folder of an audit, "
            f"which already has scores (scores.json).",
            "Pass the folder of an attack. For other data, run residuum audit with another --out.",
        )
    if seed < 0:
        raise InputError(f"--seed must be at least 0; got {seed}.", "Pass --seed 0, the default.")
    train = Dataset.from_npz(find_samples_file(data, "train.npz"))
    holdout_data = Dataset.from_npz(find_samples_file(holdout, "holdout.npz")) if holdout else None
    metric_names = None if metrics is None else [name.strip() for name in metrics.split(",")]
    summary, scores, selected, reconstruction = score_run(
        run, train, holdout_data, ckpt, candidates, metrics=metric_names, subsets=subsets, seed=seed
    )
    output.print_result(summary, lambda: show(scores, selected, reconstruction, run))


def show(
    scores: Scores, selected: Scores | None, reconstruction: Reconstruction, run: Path
) -> None:
    """Print the scores as tables.

    Args:
        scores: Scores of the candidates.
        selected: Scores of the candidates that the attack selected. None if they were not scored separately.
        reconstruction: The result of the attack.
        run: Folder of the attack.
    """
    _table(f"{scores.n} training samples, {scores.m} candidates of {reconstruction.attack}", scores)
    if selected is not None:
        _table(f"only the {selected.m} candidates that the attack selected", selected)
    threshold_text = f"the 99% chance level, estimated with {scores.pool} held-out samples"
    print_line(scores.reason or f"* is the deciding metric; threshold: {threshold_text}")
    print_line(f"known to the attacker: {reconstruction.knowledge.line}")
    print_notes(scores.notes)
    print_line(f"written to {run}")


def _table(title: str, scores: Scores) -> None:
    metric_rows = []
    for name, metric in scores.metrics.items():
        published_cell = "-"
        if metric.published_threshold is not None:
            comparison_sign = ">" if metric.higher_is_better else "<"
            counts_above_threshold = (
                metric.above_published_threshold,
                metric.above_published_threshold_holdout,
            )
            counts_text = " / ".join(map(format_number, counts_above_threshold))
            published_cell = f"{comparison_sign} {metric.published_threshold:g}: {counts_text}"
        metric_cell = f"{name} *" if name == scores.deciding else name
        recovered_cell = (
            "not calibrated" if metric.recovered is None else f"{metric.recovered}/{scores.n}"
        )
        chance_cells = format_number(metric.expected_by_chance, 3), format_number(metric.p_value, 3)
        top10_cell = format_number(metric.top10_mean, 3)
        metric_rows.append(
            (
                metric_cell,
                recovered_cell,
                *chance_cells,
                metric.threshold,
                published_cell,
                top10_cell,
            )
        )
    columns = ["metric", "recovered", "chance", "p", "threshold", "published:\ntrain/held-out"]
    columns += ["mean of\ntop 10"]
    print_table(title, columns, metric_rows)
