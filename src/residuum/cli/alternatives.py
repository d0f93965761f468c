"""``residuum alternatives``: other training sets that explain the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from residuum.cli.options import Arch, CheckpointPath, Json, OwnData, Quiet, Task
from residuum.cli.output import number, print_json, print_line, print_table, split_progress
from residuum.cli.paths import own_data

if TYPE_CHECKING:
    from residuum.records import Dataset
    from residuum.theory.alternatives import Alternative
    from residuum.theory.kkt_sets import KKTSet

EXAMPLES = """Examples:

residuum alternatives runs/m --out alt

residuum alternatives model.safetensors --data train.npz --far 10 --out alt --json

residuum alternatives runs/m --merge --out alt
"""
SUMMARY, SAMPLES, PICTURE = "alternatives.json", "alternative.npz", "alternatives.png"
SHARE = 0.9
NAMED = 5


def command(
    checkpoint: CheckpointPath,
    out: Annotated[Path, typer.Option(help="Folder for the alternative set and its picture.")],
    data: OwnData = None,
    far: Annotated[
        float | None,
        typer.Option(help="Move every sample at least this far from all of them.", show_default=False),
    ] = None,
    budget_frac: Annotated[
        float | None,
        typer.Option(
            help=f"Split every sample by this share of its budget (default {SHARE}).", show_default=False
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge samples of one label and activation pattern.")
    ] = False,
    direction: Annotated[
        str, typer.Option(help="How a sample's direction is found: softest, largest, weights, data, tangent.")
    ] = "softest",
    arch: Arch = None,
    task: Task = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Write another training set that an attack on the weights cannot tell from the true one."""
    from residuum.checkpoints import build_model, load_checkpoint
    from residuum.errors import InputError, did_you_mean
    from residuum.records import Dataset
    from residuum.records.folders import refuse_foreign
    from residuum.theory.directions import DIRECTIONS
    from residuum.theory.kkt_sets import KKTSet

    asked = [
        o
        for o, v in (("--far", far), ("--budget-frac", budget_frac), ("--merge", merge or None))
        if v is not None
    ]
    if len(asked) > 1:
        raise InputError(
            f"One kind of alternative at a time; got {' and '.join(asked)}.", "Keep one of them."
        )
    if direction not in DIRECTIONS:
        raise InputError(f"No direction {direction!r}.", did_you_mean(direction, tuple(DIRECTIONS)))
    refuse_foreign(out, "alternatives", {SUMMARY})
    released = load_checkpoint(checkpoint, arch)
    samples = Dataset.from_npz(own_data(checkpoint, data))
    wanted = released.task if task == "auto" and released.task else task
    given = KKTSet.of(build_model(released), samples.x, samples.y, task=wanted)
    with split_progress(not (json or quiet)) as watch:
        found = _find(given, far, budget_frac, merge, direction, watch)
    summary = _summary(given, found, direction)
    _write(out, samples, given, found, summary)
    if json:
        print_json(summary)
    elif not quiet:
        _show(summary, f"{released.arch}, {len(samples)} samples", out)


def _find(
    given: KKTSet,
    far: float | None,
    share: float | None,
    merge: bool,
    direction: str,
    watch: Any,
) -> Alternative:
    from residuum.theory.alternatives import budget_alternative, far_alternative, merge_alternative

    if merge:
        return merge_alternative(given)
    if far is not None:
        return far_alternative(given, far, direction, watch)
    return budget_alternative(given, SHARE if share is None else share, direction, watch)


def _summary(given: KKTSet, found: Alternative, direction: str) -> dict[str, Any]:
    """What alternatives.json holds; distances and residuals measured, not derived."""
    after = found.after
    limited = found.budgets[found.budgets.isfinite()]
    return {
        "residual_before": given.residual,
        "residual_after": after.residual,
        "min_distance": after.distance(given),
        "on_margin": after.on_margin,
        "stationary_set": after.stationary_set,
        "full_kkt_set": after.full_kkt_set,
        "n_before": len(given),
        "n_after": len(after),
        "kind": found.kind,
        "direction": None if found.kind == "merge" else direction,
        "in_use": len(found.before),
        "changed": found.changed,
        "exact_kkt_point": given.exact,
        "margin_before": given.margin,
        "margin_after": after.margin,
        "delta_before": given.delta,
        "delta_after": after.delta,
        "budget_median": float(limited.median()) if len(limited) else None,
        "budgets_unlimited": int(found.budgets.isinf().sum()),
        "blocked": [vars(one) for one in found.blocked],
    }


def _write(
    out: Path, samples: Dataset, given: KKTSet, found: Alternative, summary: dict[str, Any]
) -> None:
    """The set, the picture, and the summary last."""
    import io

    import numpy as np

    from residuum.records import write_atomic, write_json
    from residuum.report.alternatives import alternatives_figure

    after = found.after
    y = after.y
    if given.task == "binary" and bool((samples.y >= 0).all()):
        y = (y + 1) / 2  # labels as the file had them
    arrays = {"x": after.x.numpy(), "y": y.to(samples.y.dtype).numpy(), "lam": after.lam.numpy()}
    if samples.mean is not None:
        arrays["mean"] = samples.mean.numpy()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_atomic(out / ".gitignore", "*\n")
    write_atomic(out / SAMPLES, buffer.getvalue())
    figure = alternatives_figure(found.before.x, after.x, found.parents, samples.mean)
    if figure is not None:
        write_atomic(out / PICTURE, figure)
    write_json(out / SUMMARY, summary)


def _show(summary: dict[str, Any], title: str, out: Path) -> None:
    rows = [
        ("samples", f"{summary['n_before']} -> {summary['n_after']}",
         f"{summary['in_use']} in use, {summary['changed']} changed"),
        ("KKT residual", f"{number(summary['residual_before'])} -> {number(summary['residual_after'])}",
         "exact KKT point" if summary["exact_kkt_point"] else "an approximate KKT point"),
        ("least distance", number(summary["min_distance"]), "between a true and an alternative sample"),
        ("margin", f"{number(summary['margin_before'])} -> {number(summary['margin_after'])}", ""),
        ("stationary set", str(summary["stationary_set"]), "explains the weights as well"),
        ("full KKT set", str(summary["full_kkt_set"]), "margins and slackness too"),
        ("budget, median", number(summary["budget_median"]), f"{summary['budgets_unlimited']} unlimited"),
    ]  # fmt: skip
    print_table(title, ("what", "value", "meaning"), rows)
    blocked = summary["blocked"]
    for one in blocked[:NAMED]:
        print_line(
            f"sample {one['sample']} stays: {one['neurons']} neurons in its way, {one['names']}"
        )
    if len(blocked) > NAMED:
        print_line(f"and {len(blocked) - NAMED} more, in {SUMMARY}")
    print_line(f"picture, true above and alternative below: {out / PICTURE}")
