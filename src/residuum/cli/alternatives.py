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
from residuum.cli.output import number, print_line, print_table, split_progress

SHARE = 0.9  # of a budget
NAMED = 5  # blocked samples that are told by name


app = options.command_app("alternatives", __doc__)


@app.default
def command(
    checkpoint: options.CheckpointPath,
    /,
    *,
    out: Annotated[Path, Parameter(help="Folder for the alternative set and its picture.")],
    data: options.OwnData = None,
    far: Annotated[
        float | None, Parameter(help="Move every sample at least this far from all of them.")
    ] = None,
    budget_frac: Annotated[
        float | None,
        Parameter(help=f"Split every sample by this share of its budget. By default {SHARE}."),
    ] = None,
    merge: Annotated[
        bool, Parameter(help="Merge samples of one label and activation pattern.")
    ] = False,
    task: options.TaskOption = "auto",
    output: options.Output = options.OUTPUT,
    direction: Annotated[
        Literal["softest", "largest", "weights", "data", "tangent"],
        Parameter(
            help="How a sample's direction is found.", group=options.EXPERT, show_default=True
        ),
    ] = "softest",
    arch: options.Arch = None,
) -> None:
    """Write another training set that an attack on the weights cannot tell from the true one."""
    from residuum.errors import InputError
    from residuum.records import Dataset
    from residuum.records.inputs import find_training_samples
    from residuum.verbs.alternative import alternatives

    kinds = {"--far": far, "--budget-frac": budget_frac, "--merge": merge or None}
    asked = [name for name, value in kinds.items() if value is not None]
    if len(asked) > 1:
        raise InputError(
            f"One kind of alternative at a time; got {' and '.join(asked)}.", "Keep one of them."
        )
    samples = Dataset.from_npz(find_training_samples(checkpoint, data))
    with split_progress(output.visible) as watch:
        kind: dict[str, Any] = {"far": far, "share": budget_frac, "merge": merge}
        how: dict[str, Any] = {"direction": direction, "task": task, "arch": arch}
        found = alternatives(checkpoint, samples, **kind, **how, out=out, watch=watch)
    summary = found.to_json()
    output.result(summary, lambda: _show(summary, f"{found.arch}, {len(samples)} samples", out))


def _show(summary: dict[str, Any], title: str, out: Path) -> None:
    said: dict[str, Any] = {
        k: v if isinstance(v, list | str) else number(v) for k, v in summary.items()
    }
    point = "exact KKT point" if summary["exact_kkt_point"] else "an approximate KKT point"
    used = f"{summary['in_use']} in use, {summary['changed']} changed"
    rows = [
        ("samples", f"{summary['n_before']} -> {summary['n_after']}", used),
        ("KKT residual", f"{said['residual_before']} -> {said['residual_after']}", point),
        ("least distance", said["min_distance"], "between a true and an alternative sample"),
        ("margin", f"{said['margin_before']} -> {said['margin_after']}", ""),
        ("stationary set", str(summary["stationary_set"]), "explains the weights as well"),
        ("full KKT set", str(summary["full_kkt_set"]), "margins and slackness too"),
        ("budget, median", said["budget_median"], f"{summary['budgets_unlimited']} unlimited"),
    ]
    print_table(title, ("what", "value", "meaning"), rows)
    blocked = summary["blocked"]
    stays = "sample {sample} stays: {neurons} neurons in its way, {names}"
    for one in blocked[:NAMED]:
        print_line(stays.format(**one))
    if len(blocked) > NAMED:
        print_line(f"and {len(blocked) - NAMED} more, in alternatives.json")
    print_line(f"picture, true above and alternative below: {out / 'alternatives.png'}")
