"""``residuum audit``: from a checkpoint to a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from residuum.cli import options
from residuum.cli.output import attack_progress, number, print_json, print_line, print_table

EXAMPLES = """Examples:

residuum audit model.safetensors --data train.npz --holdout test.npz --mean train --value-range 0,1 --out a

residuum audit runs/m --data runs/m --holdout runs/m --budget 10min --fail-on "recovered>=5" --out runs/b

residuum audit --config a/config.toml --out again
"""
AFTER = {"score": "scoring against the held-out control", "certify": "certifying"}


def command(
    checkpoint: options.CheckpointPathOrNone = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write; an interrupted audit there is continued.", show_default=False
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Training samples: an .npz with x and y, or a training directory."),
    ] = None,
    holdout: Annotated[
        str | None, typer.Option(help="Samples the network never saw, likewise; at least 100.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Wall clock, such as 90s, 10min or 1h (default: 1min).")
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Exit code 1 when this holds: leak (default), or a comparison of recovered, "
            "expected, excess, share or p_value with a number; repeatable, any of them.",
        ),
    ] = None,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit code 0 whatever the verdict is.")
    ] = False,
    preset: Annotated[str | None, typer.Option(help="Settings of the attack.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of every restart.")] = None,
    seed: options.SeedOrNone = None,
    subsets: Annotated[
        int | None, typer.Option(min=200, max=100_000, help="Held-out subsets drawn.")
    ] = None,
    device: options.DeviceOrNone = None,
    baselines: Annotated[
        bool | None, typer.Option(help="Run the baselines beside the attacks.", show_default=False)
    ] = None,
    arch: options.Arch = None,
    task: Annotated[
        str | None, typer.Option(help="auto, binary, multiclass or regression.")
    ] = None,
    shape: options.Shape = None,
    value_range: options.ValueRange = None,
    mean: Annotated[
        str | None,
        typer.Option(
            metavar="MEAN",
            help="Granted: train or holdout (the mean stored in that file), a number, or a file.",
        ),
    ] = None,
    sample_count: options.SampleCount = None,
    label_balance: options.LabelBalance = None,
    init: options.InitialWeights = None,
    loss: options.TrainingLoss = None,
    weight_decay: options.WeightDecay = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A config.toml: repeats that audit; options given here override it."),
    ] = None,
    blur: Annotated[
        bool, typer.Option("--blur", help="Images of the report are blurred until asked for.")
    ] = False,
    no_plugins: options.NoPlugins = False,  # seen by ``main`` before anything is read
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Attack a checkpoint, score what came back, certify it, and give a verdict."""
    from residuum.auditing.artifacts import AuditSettings, read_settings
    from residuum.auditing.gate import exit_code, read_condition
    from residuum.cli.audited import audit_into
    from residuum.errors import InputError

    conditions = [read_condition(text) for text in fail_on or ["leak"]]
    given = {
        "checkpoint": None if checkpoint is None else str(checkpoint), "data": data,
        "holdout": holdout, "budget": budget, "preset": preset, "steps": steps, "seed": seed,
        "subsets": subsets, "device": device, "baselines": baselines, "arch": arch, "task": task,
        "shape": shape, "value_range": value_range, "mean": mean, "sample_count": sample_count,
        "label_balance": label_balance, "init": init, "loss": loss, "weight_decay": weight_decay,
    }  # fmt: skip
    settings = read_settings(config) if config is not None else AuditSettings()
    settings = settings.model_copy(update={k: v for k, v in given.items() if v is not None})
    if settings.checkpoint is None:
        raise InputError("An audit needs a checkpoint.", "Say residuum audit model.safetensors.")
    if out is None:
        raise InputError("An audit needs a folder to write.", "Say --out runs/a.")
    options.check_device(settings.device or "cpu")
    with _progress(not (json or quiet)) as (watch, stage):
        say = None if json or quiet else print_line
        summary, verdict = audit_into(out, settings, watch=watch, stage=stage, say=say, blur=blur)
    if json:
        print_json(summary)
    elif not quiet:
        show(summary, out)
    raise typer.Exit(0 if exit_zero else exit_code(verdict, conditions))


def show(summary: dict[str, Any], out: Path) -> None:
    """The audit as a person reads it; the last line says where the report is."""
    verdict = summary["verdict"]
    rows = [
        (row["name"], "yes" if row["ran"] else "no", str(row["restarts"]) if row["ran"] else "-",
         number(row["residual"], 2),
         "-" if row["recovered"] is None
         else f"{row['recovered']}, {row['rule']} ({number(row['expected_by_chance'], 2)})",
         number(row["p_value"], 2), row["reason"])
        for row in summary["attacks"]
    ]  # fmt: skip
    columns = ("attack", "run", "restarts", "residual", "recovered, rule\n(chance)", "p", "why")
    print_table(f"{summary['network']['arch']}: attacks", columns, rows)
    certificate = summary["certificate"]
    if certificate is not None:
        print_line(
            f"KKT residual of the {summary['certificate_of']}: plain "
            f"{number(certificate['residual_plain'])}, Clarke {number(certificate['residual_clarke'])}"
        )
    granted = ", ".join(f"{fact['fact']} ({fact['provenance']})" for fact in summary["knowledge"])
    print_line(f"granted to the attacker: {granted or 'nothing but the weights'}")
    for note in summary["notes"]:
        print_line(f"note: {note}")
    print_line(f"verdict: {verdict['outcome']}. {verdict['sentence']}")
    for reason in verdict["reasons"]:
        print_line(f"  {reason}")
    print_line(f"report: {out / 'report.html'}")


@contextmanager
def _progress(visible: bool) -> Iterator[tuple[Any, Any]]:
    """A watcher per attack, one bar at a time, and what to tell of the stages after the attacks."""
    with ExitStack() as shown:
        watch = shown.enter_context(attack_progress(visible))
        if watch is None:
            yield None, None
            return
        from rich.console import Console

        def stage(name: str) -> None:
            if name in AFTER:
                shown.close()  # the attacks' bar, or the stage before
                shown.enter_context(Console(stderr=True).status(AFTER[name]))

        yield lambda _name: watch, stage
