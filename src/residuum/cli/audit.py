"""``residuum audit``: from a checkpoint to a verdict.

Examples:

residuum audit model.safetensors --data train.npz --holdout test.npz --mean train --value-range 0,1 --out a

residuum audit runs/m --data runs/m --holdout runs/m --budget 10min --fail-on "recovered>=5" --out runs/b

residuum audit weights.pt --model mynet:build --trust-code --data train.npz --holdout test.npz --dry-run

residuum audit --config a/config.toml --out again
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from residuum.auditing.durations import duration, seconds_of
from residuum.cli import options
from residuum.cli.options import Granted, Tuned, option
from residuum.cli.output import (
    columns,
    number,
    print_line,
    print_notes,
    print_table,
    print_wrapped,
    progress,
)
from residuum.errors import InputError
from residuum.settings.presets import PRESETS

if TYPE_CHECKING:
    from residuum.attacks.base import AttackProgress
    from residuum.auditing.dryrun import DryRun
    from residuum.auditing.listener import AuditListener
    from residuum.auditing.result import AuditResult

ALREADY_SAID = ("network",)  # before the attacks began
STAGE_MESSAGES = {
    "negative controls": "running negative controls",
    "scores": "scoring against held-out samples",
    "membership": "measuring membership",
    "permuted target": "attacking a permuted target",
    "positive controls": "training and attacking positive controls",
    "certificates": "computing certificates",
    "exposure": "ranking the samples by their risk",
}


@dataclass(frozen=True)
class Compared:
    """What the network is compared with, and for how long it is attacked."""

    data: str | None = option(
        "Training samples: an .npz, a .csv with a header, a folder of images or a training directory.",
        metavar="DATA",
    )
    holdout: str | None = option(
        "Samples the network never saw, likewise, at least 100; need not be said where DATA holds a "
        "test part.",
        metavar="DATA",
    )
    budget: str | None = option(
        "Time it may take, as 90s, 1m30s or 1h (default: 1min).", metavar="TIME"
    )


@dataclass(frozen=True)
class Asked:
    """Everything else that ``AuditSettings`` holds too, under the same names."""

    preset: str | None = option("Settings of the attack.", choices=PRESETS, place="expert")
    steps: int | None = option("Steps of every restart.", min=1, place="expert")
    seed: int | None = options.SEED_OR_NONE
    subsets: int | None = option("Held-out subsets drawn.", min=200, max=100_000, place="expert")
    device: str | None = options.DEVICE_OR_NONE
    baselines: bool | None = option("Run the baselines beside the attacks.", place="expert")
    vouch: bool | None = option(
        "Your word that network and records were read rightly, where it does not show: for networks "
        "that generalise or were trained privately. It stands in every artifact.",
        None,
        "--vouch",
        place="expert",
    )
    twin: bool | None = option(
        "Train and attack a network known to hold its data; without it the verdict is at best "
        "inconclusive."
    )
    recipe: str | None = option(
        "How the network was trained, for its twin: any of optimiser=sgd,rate=0.01,epochs=100,"
        "batch=50,start=default,frozen=LAYER+LAYER.",
        metavar="KEY=VALUE,...",
        place="expert",
    )
    arch: str | None = options.ARCH
    model_code: str | None = option(
        "Where no --arch can say it: package.module:factory, which makes the network. That code is run: "
        "needs --trust-code.",
        None,
        "--model",
        metavar="CODE",
        place="expert",
    )
    knowledge: str | None = option(
        "A file with everything that the attacker knows, such as knowledge.safetensors of an audit, in "
        "place of the other facts.",
        metavar="FILE",
        place="granted",
    )
    task: str | None = option("What the network was trained for.", choices=options.TASKS)
    shape: str | None = Granted.shape
    value_range: str | None = Granted.value_range
    mean: str | None = option(
        "train or holdout (the mean stored in that file), a number, or a file.",
        metavar="MEAN",
        suggested=("train", "holdout"),
        place="granted",
    )
    mean_provenance: str | None = option(
        "Where a number or file given as --mean is from (default: user).",
        choices=options.PROVENANCES,
        place="granted",
    )
    sample_count: int | None = Granted.sample_count
    label_balance: str | None = Granted.label_balance
    init: str | None = Granted.init
    base: str | None = Tuned.base
    adapter: str | None = Tuned.adapter
    surface: str | None = option(
        "Attack only this: weights, change (from the start), moment (optimiser state), or all.",
        choices=("weights", "change", "moment", "all"),
        place="expert",
    )
    loss: str | None = Granted.loss
    weight_decay: float | None = Granted.weight_decay
    columns: str | None = Granted.columns


def command(
    checkpoint: options.CheckpointPathOrNone = None,
    *,
    out: Path | None = option("Folder to write; an interrupted audit there is continued."),
    compared: Compared,
    fail_on: list[str] | None = option(
        "Exit code 1 when this holds: leak (default), a leak of at least a grade (near-copy, "
        "resembles, class-like), or a comparison of recovered, expected, excess, share or p_value "
        "with a number; repeatable, any of them.",
        metavar="CONDITION",
    ),
    exit_zero: bool = option("Exit code 0 whatever the verdict is.", False, "--exit-zero"),
    asked: Asked,
    config: Path | None = option(
        "A config.toml: repeats that audit; options given here override it.", place="expert"
    ),
    trust_code: bool = options.TRUST_CODE,
    dry_run: bool = option(
        "List all that is in the way, what would be tried, what it costs and which verdicts can be "
        "reached; no attack.",
        False,
        "--dry-run",
    ),
    blur: bool = option("Images of the report are blurred until asked for.", False, "--blur"),
    explain: bool = option(
        "Print every figure too, with what it means, and the words used.", False, "--explain"
    ),
    open_report: bool = option("Open the report in a browser.", False, "--open"),
    no_plugins: bool = options.NO_PLUGINS,  # seen by ``main`` before anything is read
    voice: options.Voice,
) -> None:
    """Attack a checkpoint, score what came back, certify it, and give a verdict."""
    from residuum.auditing import dryrun
    from residuum.auditing.artifacts import read_result
    from residuum.auditing.config import AuditConfig, read_config
    from residuum.auditing.run import audit
    from residuum.auditing.verdict import exit_code, read_condition

    conditions = [read_condition(text) for text in fail_on or ["leak"]]
    given = {"checkpoint": checkpoint and str(checkpoint), **vars(compared), **vars(asked)}
    given = {name: value for name, value in given.items() if value is not None}
    base = AuditConfig() if config is None else read_config(config)
    settings = AuditConfig.of(**{**base.model_dump(exclude_defaults=True), **given})
    if settings.checkpoint is None:
        raise InputError("An audit needs a checkpoint.", "Run residuum audit model.safetensors.")
    inputs: dict[str, Any] = {
        **{name: getattr(settings, name) for name in ("data", "holdout", "base", "adapter")},
        "knowledge": settings.knowledge_or_facts(),
        "trust_code": trust_code,
    }
    if dry_run:
        plan = dryrun.dry_run(settings.checkpoint, **inputs, **settings.options())
        voice.answer(plan.to_json(), lambda: _show_dry_run(plan))
        raise typer.Exit(plan.exit_code)
    if out is None:
        raise InputError("An audit needs a folder to write.", "Pass --out runs/a.")
    options.check_device(settings.device)
    with listener_for(voice.spoken, settings.budget) as listener:
        result = audit(
            settings.checkpoint,
            **inputs,
            **settings.options(),
            out=out,
            blur=blur,
            expected_hashes=settings.sha256,
            listener=listener,
        )
    voice.answer(read_result(out), lambda: show(result, out, explain))
    if open_report:
        import webbrowser

        webbrowser.open((out / "report.html").resolve().as_uri())
    raise typer.Exit(0 if exit_zero else exit_code(result.verdict, conditions))


def show(result: AuditResult, out: Path, explain: bool = False) -> None:
    """The first screen; the last line says where the rest is."""
    print_line(result.screen.text(columns(), ALREADY_SAID))
    print_notes(result.warnings)
    if explain:
        _explain(result)
    else:
        print_line("--explain prints every figure and the words used here.")
    print_line(f"report: {out / 'report.html'}")


def _explain(result: AuditResult) -> None:
    """Every figure of the audit, each with what it means, then the words."""
    from residuum.report.glossary import GLOSSARY, used

    print_line("")
    for reason in result.verdict.reasons:
        print_wrapped(reason, "because ")
    show_applies([vars(row) for row in result.applies])
    rows = []
    for row in result.attacks:
        if row.ran:
            count = f"{row.recovered} ({number(row.expected_by_chance, 2)})"
            p = number(row.p_value if row.adjusted is None else row.adjusted, 2)
            ran = row.name, str(row.restarts), number(row.residual, 2)
            rows.append((*ran, "-" if row.recovered is None else count, row.rule or "-", p))
    heads = ("attack", "restarts", "residual", "recovered\n(chance)", "counts with", "p")
    print_table("attacks: what each brought back by itself", heads, rows)
    if result.controls.rows:
        checked = []
        for one in result.controls.rows:
            count = f"{one.recovered} ({number(one.expected_by_chance, 2)})"
            checked.append((one.name, str(one.candidates), count, number(one.p_value, 2)))
        title = "controls: candidates that hold nothing of the network"
        print_table(title, ("control", "candidates", "recovered\n(chance)", "p"), checked)
    for control in result.checks.twins:
        print_wrapped(control.sentence, "positive control: ", "  ")
    if (found := result.certificate) is not None:
        print_wrapped(
            f"certificate of the {result.certificate_of}: they leave {found.residual_plain:.4g} of the "
            f"weights unexplained, {found.residual_clarke:.4g} where a neuron that switches exactly at a "
            "sample may count as half on",
            rest="  ",
        )
    for title in ("membership", "exposure"):
        beside = getattr(result, title)
        for line in beside.lines if beside else ():
            print_wrapped(line, f"{title}: ", "  ")
    print_notes(result.notes)
    said = " ".join([result.screen.text(), *result.verdict.reasons, "residual restart control"])
    print_line("words:")
    for word in used(said):
        print_wrapped(GLOSSARY[word], f"  {word}: ", "    ")


def show_applies(rows: list[dict[str, Any]]) -> None:
    """The table of what applies: the same words as in the report."""
    cells = [(row["what"], row["status"], row["why"]) for row in rows]
    print_table("what applies, what was tried, and why", ("what", "status", "why"), cells)


def _show_dry_run(found: DryRun) -> None:
    print_notes(found.obstacles, "obstacle")
    if found.applies:
        show_applies([vars(row) for row in found.applies])
    print_notes(found.doubts)
    if found.cost:
        print_line(found.cost)
    print_table("how it can end", ("verdict", ""), list(found.verdicts.items()))
    print_line("dry run: nothing was attacked")


@contextmanager
def listener_for(visible: bool, budget: str | float) -> Iterator[AuditListener]:
    """Yield a listener that prints messages, the progress of attacks and the stages after them."""
    from residuum.auditing.listener import SILENT, AuditListener

    with ExitStack() as shown:
        begun, allowed = time.monotonic(), duration(seconds_of(budget))

        def state(
            attack: str, done: int, restarts: int, at: AttackProgress
        ) -> tuple[int, int, str]:
            side_by_side = len(at.loss)
            which = f"{done + 1}" if side_by_side == 1 else f"{done + 1}-{done + side_by_side}"
            spent = duration(time.monotonic() - begun)
            text = f"{attack}  restart {which} of {restarts}  step {at.step} of {at.steps}"
            return at.step, at.steps, f"{text}  {spent} of {allowed}"

        watch = shown.enter_context(progress("attacking", state, visible))
        if watch is None:
            yield SILENT
            return
        from rich.console import Console

        class Terminal(AuditListener):
            def message(self, text: str) -> None:
                print_wrapped(text)

            def stage(self, name: str) -> None:
                if name not in STAGE_MESSAGES:
                    return
                shown.close()  # the attacks' bar, or the stage before
                console = Console(stderr=True)
                if console.is_terminal:
                    shown.enter_context(console.status(STAGE_MESSAGES[name]))
                else:
                    spent = duration(time.monotonic() - begun)
                    sys.stderr.write(f"{STAGE_MESSAGES[name]}, {spent}\n")

            def watch_attack(self, attack: str, restarts_done: int, restarts: int) -> Any:
                return partial(watch, attack, restarts_done, restarts)

        yield Terminal()
