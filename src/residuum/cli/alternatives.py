"""``residuum alternatives``: other training sets that explain the same weights.

Examples:
residuum alternatives runs/m --out alt

residuum alternatives model.safetensors --data train.npz --far 10 --out alt --json

residuum alternatives runs/m --merge --out alt
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import format_number, print_line, print_table, split_progress

# Default distance by which samples move, as a share of the largest distance at which the same neurons stay
# active.
SHARE = 0.9
MAX_BLOCKED = 5  # maximal number of printed lines about samples that cannot move


app = options.command_app("alternatives", __doc__)


@app.default
def _command(
    checkpoint: options.CheckpointPath,
    /,
    *,
    out: Annotated[
        Path,
        Parameter(
            help="Folder to write: the alternative training set (other samples that fit the "
            "same weights) and a picture of it."
        ),
    ],
    data: options.OwnData = None,
    distance: Annotated[
        float | None,
        Parameter(
            name="--far",
            help="Move every sample to at least this Euclidean distance from all true samples.",
        ),
    ] = None,
    budget_frac: Annotated[
        float | None,
        Parameter(
            help="Split every sample into two samples that move in opposite directions. The value is a "
            "share of the largest distance at which the same neurons stay active. By default, samples are "
            f"split with the value {SHARE}."
        ),
    ] = None,
    merge: Annotated[
        bool,
        Parameter(help="Merge samples that have the same label and activate the same neurons."),
    ] = False,
    task: options.TaskOption = "auto",
    output: options.Output = options.OUTPUT,
    direction: Annotated[
        Literal["softest", "largest", "weights", "data", "tangent"],
        Parameter(
            help="Name of the rule that chooses the direction in which each sample moves.",
            group=options.EXPERT,
            show_default=True,
        ),
    ] = "softest",
    arch: options.Arch = None,
) -> None:
    """Write another training set that gives the same weights, so no attack can tell it from the true one."""
    from residuum.errors import InputError
    from residuum.records import Dataset
    from residuum.records.inputs import find_training_samples
    from residuum.verbs.alternative import alternatives

    kind_options = {"--far": distance, "--budget-frac": budget_frac, "--merge": merge or None}
    passed_options = [name for name, value in kind_options.items() if value is not None]
    if len(passed_options) > 1:
        raise InputError(
            f"Only one kind of alternative training set (another set that fits the same weights) can be "
            f"chosen; got {' and '.join(passed_options)}.",
            f"Pass only {passed_options[0]}.",
        )
    samples = Dataset.from_npz(find_training_samples(checkpoint, data))
    with split_progress(output.visible) as watch:
        alternative_sets = alternatives(
            checkpoint,
            samples,
            distance=distance,
            share=budget_frac,
            merge=merge,
            direction=direction,
            task=task,
            arch=arch,
            out=out,
            watch=watch,
        )
    summary, title = alternative_sets.to_json(), f"{alternative_sets.arch}, {len(samples)} samples"
    output.print_result(summary, lambda: _show(summary, title, out))


def _show(summary: dict[str, Any], title: str, out: Path) -> None:
    texts: dict[str, Any] = {
        k: v if isinstance(v, list | str) else format_number(v) for k, v in summary.items()
    }
    kkt_status = (
        "the network is an exact KKT point"
        if summary["exact_kkt_point"]
        else "the network is nearly a KKT point"
    )
    sample_counts = f"{summary['in_use']} with a multiplier, {summary['changed']} changed"
    table_rows = [
        ("samples", f"{summary['n_before']} -> {summary['n_after']}", sample_counts),
        ("KKT residual", f"{texts['residual_before']} -> {texts['residual_after']}", kkt_status),
        ("smallest distance", texts["min_distance"], "from true to alternative samples"),
        (
            "margin",
            f"{texts['margin_before']} -> {texts['margin_after']}",
            "smallest over the samples",
        ),
        (
            "stationary set",
            str(summary["stationary_set"]),
            "fits the weights as well",
        ),
        ("full KKT set", str(summary["full_kkt_set"]), "also satisfies the margin conditions"),
        (
            "median budget",
            texts["budget_median"],
            f"{summary['budgets_unlimited']} samples have no limit",
        ),
    ]
    print_table(title, ("what", "value", "meaning"), table_rows)
    blocked_samples = summary["blocked"]
    blocked_template = "sample {sample} cannot move: blocked by {neurons} neurons, {names}"
    for sample in blocked_samples[:MAX_BLOCKED]:
        print_line(blocked_template.format(**sample))
    if len(blocked_samples) > MAX_BLOCKED:
        print_line(
            f"{len(blocked_samples) - MAX_BLOCKED} more blocked samples are in alternatives.json"
        )
    print_line(f"picture, true samples above alternative samples: {out / 'alternatives.png'}")
