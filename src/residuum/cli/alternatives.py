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

SHARE = 0.9  # default share of a sample's budget
MAX_BLOCKED = 5  # blocked samples that are printed


app = options.command_app("alternatives", __doc__)


@app.default
def _command(
    checkpoint: options.CheckpointPath,
    /,
    *,
    out: Annotated[Path, Parameter(help="Folder for the alternative set and its picture.")],
    data: options.OwnData = None,
    distance: Annotated[
        float | None,
        Parameter(name="--far", help="Move every sample at least this far from all true samples."),
    ] = None,
    budget_frac: Annotated[
        float | None,
        Parameter(help=f"Split every sample by this share of its budget. By default {SHARE}."),
    ] = None,
    merge: Annotated[
        bool, Parameter(help="Merge samples that have the same label and activation pattern.")
    ] = False,
    task: options.TaskOption = "auto",
    output: options.Output = options.OUTPUT,
    direction: Annotated[
        Literal["softest", "largest", "weights", "data", "tangent"],
        Parameter(
            help="How the direction of a sample is found.", group=options.EXPERT, show_default=True
        ),
    ] = "softest",
    arch: options.Arch = None,
) -> None:
    """Write another training set that an attack on the weights cannot tell from the true one."""
    from residuum.errors import InputError
    from residuum.records import Dataset
    from residuum.records.inputs import find_training_samples
    from residuum.verbs.alternative import alternatives

    kinds = {"--far": distance, "--budget-frac": budget_frac, "--merge": merge or None}
    passed = [name for name, value in kinds.items() if value is not None]
    if len(passed) > 1:
        raise InputError(
            f"Only one kind of alternative can be chosen; got {' and '.join(passed)}.",
            "Pass one of these options.",
        )
    samples = Dataset.from_npz(find_training_samples(checkpoint, data))
    with split_progress(output.visible) as watch:
        result = alternatives(
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
    summary, title = result.to_json(), f"{result.arch}, {len(samples)} samples"
    output.print_result(summary, lambda: _show(summary, title, out))


def _show(summary: dict[str, Any], title: str, out: Path) -> None:
    texts: dict[str, Any] = {
        k: v if isinstance(v, list | str) else format_number(v) for k, v in summary.items()
    }
    point = "exact KKT point" if summary["exact_kkt_point"] else "an approximate KKT point"
    used = f"{summary['in_use']} in use, {summary['changed']} changed"
    rows = [
        ("samples", f"{summary['n_before']} -> {summary['n_after']}", used),
        ("KKT residual", f"{texts['residual_before']} -> {texts['residual_after']}", point),
        ("smallest distance", texts["min_distance"], "between a true and an alternative sample"),
        ("margin", f"{texts['margin_before']} -> {texts['margin_after']}", ""),
        ("stationary set", str(summary["stationary_set"]), "explains the weights as well"),
        ("full KKT set", str(summary["full_kkt_set"]), "margins and slackness hold too"),
        ("budget, median", texts["budget_median"], f"{summary['budgets_unlimited']} unlimited"),
    ]
    print_table(title, ("what", "value", "meaning"), rows)
    blocked = summary["blocked"]
    blocked_line = "sample {sample} cannot move: blocked by {neurons} neurons, {names}"
    for sample in blocked[:MAX_BLOCKED]:
        print_line(blocked_line.format(**sample))
    if len(blocked) > MAX_BLOCKED:
        print_line(f"and {len(blocked) - MAX_BLOCKED} more, in alternatives.json")
    print_line(f"picture, true above and alternative below: {out / 'alternatives.png'}")
