"""``residuum audit``: from a checkpoint to a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from residuum.cli import options
from residuum.cli.options import Granted, option
from residuum.cli.output import attack_progress, number, print_line, print_notes, print_table

EXAMPLES = """Examples:

residuum audit model.safetensors --data train.npz --holdout test.npz --mean train --value-range 0,1 --out a

residuum audit runs/m --data runs/m --holdout runs/m --budget 10min --fail-on "recovered>=5" --out runs/b

residuum audit --config a/config.toml --out again
"""
AFTER = {"score": "scoring against the held-out control", "certify": "certifying"}


@dataclass(frozen=True)
class Compared:
    """What the network is compared with, and for how long it is attacked."""

    data: str | None = option("Training samples: an .npz with x and y, or a training directory.")
    holdout: str | None = option("Samples the network never saw, likewise; at least 100.")
    budget: str | None = option("Wall clock, such as 90s, 10min or 1h (default: 1min).")


@dataclass(frozen=True)
class Asked:
    """Everything else that ``AuditSettings`` holds too, under the same names."""

    preset: str | None = option("Settings of the attack.")
    steps: int | None = option("Steps of every restart.", min=1)
    seed: int | None = options.SEED_OR_NONE
    subsets: int | None = option("Held-out subsets drawn.", min=200, max=100_000)
    device: str | None = options.DEVICE_OR_NONE
    baselines: bool | None = option("Run the baselines beside the attacks.")
    arch: str | None = options.ARCH
    task: str | None = option("auto, binary, multiclass or regression.")
    shape: str | None = Granted.shape
    value_range: str | None = Granted.value_range
    mean: str | None = option(
        "Granted: train or holdout (the mean stored in that file), a number, or a file.",
        metavar="MEAN",
    )
    sample_count: int | None = Granted.sample_count
    label_balance: str | None = Granted.label_balance
    init: str | None = Granted.init
    loss: str | None = Granted.loss
    weight_decay: float | None = Granted.weight_decay


def command(
    checkpoint: options.CheckpointPathOrNone = None,
    *,
    out: Path | None = option("Folder to write; an interrupted audit there is continued."),
    compared: Compared,
    fail_on: list[str] | None = option(
        "Exit code 1 when this holds: leak (default), or a comparison of recovered, "
        "expected, excess, share or p_value with a number; repeatable, any of them.",
        metavar="CONDITION",
    ),
    exit_zero: bool = option("Exit code 0 whatever the verdict is.", False, "--exit-zero"),
    asked: Asked,
    config: Path | None = option(
        "A config.toml: repeats that audit; options given here override it."
    ),
    blur: bool = option("Images of the report are blurred until asked for.", False, "--blur"),
    no_plugins: bool = options.NO_PLUGINS,  # seen by ``main`` before anything is read
    voice: options.Voice,
) -> None:
    """Attack a checkpoint, score what came back, certify it, and give a verdict."""
    from residuum.auditing.artifacts import AuditSettings, read_settings
    from residuum.auditing.gate import exit_code, read_condition
    from residuum.cli.audited import audit_into
    from residuum.errors import InputError

    conditions = [read_condition(text) for text in fail_on or ["leak"]]
    given = {"checkpoint": checkpoint and str(checkpoint), **vars(compared), **vars(asked)}
    settings = read_settings(config) if config is not None else AuditSettings()
    settings = settings.model_copy(update={k: v for k, v in given.items() if v is not None})
    if settings.checkpoint is None:
        raise InputError("An audit needs a checkpoint.", "Say residuum audit model.safetensors.")
    if out is None:
        raise InputError("An audit needs a folder to write.", "Say --out runs/a.")
    options.check_device(settings.device or "cpu")
    with _progress(voice.spoken) as (watch, stage):
        say = print_line if voice.spoken else None
        summary, verdict = audit_into(out, settings, watch=watch, stage=stage, say=say, blur=blur)
    voice.answer(summary, lambda: show(summary, out))
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
    print_notes(summary["notes"])
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
