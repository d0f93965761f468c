"""``residuum audit``: attack a checkpoint, count recovered samples and give a verdict.

Examples:
residuum audit model.safetensors --data train.npz --holdout test.npz --mean train --value-range 0,1 --out a

residuum audit runs/m --data runs/m --holdout runs/m --budget 10min --fail-on "recovered>=5" --out runs/b

residuum audit weights.pt --model mynet:build --trust-code --data train.npz --holdout test.npz --dry-run

residuum audit model.safetensors --attacks kkt --attacks unmix --data train.npz --out runs/c

residuum audit --config a/config.toml --out again
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from residuum.auditing.durations import duration
from residuum.auditing.request import AuditRequest
from residuum.cli import options
from residuum.cli.options import options_from, with_options
from residuum.cli.output import (
    format_number,
    print_line,
    print_notes,
    print_table,
    print_wrapped,
    show_progress,
    terminal_width,
)
from residuum.errors import InputError
from residuum.settings import MODELS, PRESETS

if TYPE_CHECKING:
    from residuum.attacks.base import AttackProgress
    from residuum.auditing.dryrun import DryRun
    from residuum.auditing.listener import AuditListener
    from residuum.auditing.result import AuditResult

# Lines of the printed summary that were already printed before the attacks began.
ALREADY_PRINTED = ("network",)
STAGE_MESSAGES = {
    "negative controls": "running negative controls",
    "scores": "scoring against held-out samples",
    "membership": "testing membership",
    "positive controls": "training and testing positive controls",
    "certificates": "computing certificates",
    "exposure": "ranking the samples by their risk",
}

app = options.command_app("audit", __doc__)


@app.default
@with_options(
    settings=options_from(
        AuditRequest,
        skip=("fail_on",),
        changes={
            "budget": Annotated[str, Parameter(metavar="TIME")],
            "preset": Annotated[str, Parameter(choices=tuple(PRESETS), show_choices=False)],
            "attacks": Annotated[
                list[str], Parameter(metavar="NAME", completer=lambda _: tuple(MODELS))
            ],
            "arch": Annotated[str, Parameter(metavar="ARCH")],
            "model_code": Annotated[str, Parameter(metavar="CODE")],
            "recipe": Annotated[str, Parameter(metavar="KEY=VALUE,...")],
        },
    )
)
def _command(
    checkpoint: options.OptionalCheckpointPath = None,
    /,
    *,
    data: Annotated[
        str | None,
        Parameter(
            help="Training samples: an .npz, a .csv with a header, a folder of images or a training "
            "directory.",
            metavar="DATA",
        ),
    ] = None,
    holdout: Annotated[
        str | None,
        Parameter(
            help="At least 100 samples that the network never saw, in a form that --data takes. Not needed "
            "if the files of --data also hold test samples.",
            metavar="DATA",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(help="Folder to write. An interrupted audit in this folder is continued."),
    ] = None,
    settings: dict[str, Any] | None = None,
    fail_on: Annotated[
        list[str] | None,
        Parameter(
            help="Exit with code 1 if this condition holds. A grade (verbatim, near-copy, resemblance, "
            "class-level or membership, the default) means a leak of at least this grade. Or pass a "
            "comparison of recovered, expected, excess, share, p_value or named with a number, such as "
            "recovered>=5. Repeat the option for several conditions, of which one must hold.",
            metavar="CONDITION",
        ),
    ] = None,
    exit_zero: Annotated[
        bool, Parameter(help="Exit with code 0, whatever the verdict is.")
    ] = False,
    dry_run: Annotated[
        bool,
        Parameter(
            help="Do not attack. List what prevents an audit, the attacks that would run, their cost and the "
            "possible verdicts."
        ),
    ] = False,
    blur: Annotated[
        bool, Parameter(help="Blur the images of the report until a reader asks for them.")
    ] = False,
    explain: Annotated[
        bool, Parameter(help="Also print all measured values with their meaning, and a glossary.")
    ] = False,
    open_report: Annotated[
        bool, Parameter(name="--open", help="Open the report in a browser.")
    ] = False,
    output: options.Output = options.OUTPUT,
    knowledge_options: options.KnowledgeOptions = options.KNOWLEDGE_OPTIONS,
    fine_tuning: options.FineTuning = options.FINE_TUNING,
    knowledge: Annotated[
        str | None,
        Parameter(
            help="A file with everything that the attacker knows, such as knowledge.safetensors in the "
            "folder of an audit. It replaces the other options about attacker knowledge.",
            metavar="FILE",
            group=options.ATTACKER,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        Parameter(
            help="The file config.toml of an audit, to repeat this audit. The other options override the "
            "settings in the file.",
            group=options.EXPERT,
        ),
    ] = None,
    trust_code: options.TrustCode = False,
    no_plugins: options.NoPlugins = False,  # ``main`` reads this option before the command is imported
) -> int:
    """Attack a checkpoint, score the reconstructions, certify them, and give a verdict."""
    from residuum.auditing import dryrun
    from residuum.auditing.artifacts import read_result
    from residuum.auditing.conditions import exit_code, read_conditions
    from residuum.auditing.config import AuditConfig, read_config
    from residuum.auditing.run import audit

    grade, comparisons = read_conditions(fail_on or [])
    passed: dict[str, Any] = {
        **{"checkpoint": checkpoint and str(checkpoint), "data": data, "holdout": holdout},
        **{
            **vars(knowledge_options),
            **vars(fine_tuning),
            "knowledge": knowledge,
            **(settings or {}),
        },
        "fail_on": grade or None,
    }
    passed = {name: value for name, value in passed.items() if value is not None}
    if "attacks" in passed:
        passed["attacks"] = [read_attack(text) for text in passed["attacks"]]
    base = AuditConfig() if config is None else read_config(config)
    request = options.make_from_options(base.changed, passed)
    if request.checkpoint is None:
        raise InputError("An audit needs a checkpoint.", "Run residuum audit model.safetensors.")
    inputs: dict[str, Any] = {
        **{name: getattr(request, name) for name in ("data", "holdout", "base", "adapter")},
        "knowledge": request.knowledge_or_facts(),
        "trust_code": trust_code,
    }
    if dry_run:
        plan = dryrun.dry_run(request.checkpoint, **inputs, **request.options())
        output.print_result(plan.to_json(), lambda: _show_dry_run(plan))
        return plan.exit_code
    if out is None:
        raise InputError("An audit needs a folder to write.", "Pass --out runs/a.")
    options.check_device(request.device)
    with listener_for(output.visible) as listener:
        result = audit(
            request.checkpoint,
            **inputs,
            **request.options(),
            out=out,
            blur=blur,
            expected_hashes=request.sha256,
            listener=listener,
        )
    output.print_result(read_result(out), lambda: show(result, out, explain))
    if open_report:
        import webbrowser

        webbrowser.open((out / "report.html").resolve().as_uri())
    only_comparisons = bool(comparisons) and not grade
    return 0 if exit_zero else exit_code(result.verdict, comparisons, only=only_comparisons)


def read_attack(text: str) -> str | dict[str, Any]:
    """Read the value of ``--attacks``: a name, or a JSON object with a name and settings.

    Args:
        text: The text that the user passed, such as ``kkt`` or ``{"attack": "kkt", "steps": 3000}``.

    Returns:
        The name of the attack, or the JSON object as a dictionary.

    Raises:
        InputError: If the text starts with "{" and is not a valid JSON object.
    """
    if not text.startswith("{"):
        return text
    try:
        entry: dict[str, Any] = json.loads(text)
    except ValueError as problem:
        raise InputError(
            f"--attacks takes a name or a JSON object; got {text[:60]!r}.",
            """Example: --attacks '{"attack": "kkt", "steps": 3000}'.""",
        ) from problem
    return entry


def show(result: AuditResult, out: Path, explain: bool = False) -> None:
    """Print the summary of an audit, and the path of its report.

    Args:
        result: The result of the audit.
        out: Folder of the audit.
        explain: Whether to also print all measured values with their meaning, and a glossary.
    """
    print_line(result.screen.text(terminal_width(), ALREADY_PRINTED))
    print_notes(result.warnings)
    if explain:
        _explain(result)
    else:
        print_line("Pass --explain to print all measured values and a glossary.")
    print_line(f"report: {out / 'report.html'}")


def _explain(result: AuditResult) -> None:
    """Print the measured values of the audit with their meaning, then a glossary of the words used."""
    from residuum.report.glossary import GLOSSARY, find_used_words

    print_line("")
    for reason in result.verdict.reasons:
        print_wrapped(reason, "because ")
    show_applies([vars(row) for row in result.applies])
    rows = []
    for row in result.attacks:
        if row.ran:
            count = f"{row.recovered} ({format_number(row.expected_by_chance, 2)})"
            p = format_number(row.p_value if row.adjusted is None else row.adjusted, 2)
            attack_cells = row.name, str(row.restarts), format_number(row.residual, 2)
            rows.append(
                (*attack_cells, "-" if row.recovered is None else count, row.rule or "-", p)
            )
    heads = ("attack", "restarts", "residual", "recovered\n(chance)", "counts with", "p")
    print_table("attacks: training samples that each attack recovered", heads, rows)
    if result.controls.rows:
        control_cells = []
        for negative in result.controls.rows:
            count = f"{negative.recovered} ({format_number(negative.expected_by_chance, 2)})"
            p = format_number(negative.p_value, 2)
            control_cells.append((negative.name, str(negative.candidates), count, p))
        title = "negative controls: candidates that were not reconstructed from the network"
        print_table(title, ("control", "candidates", "recovered\n(chance)", "p"), control_cells)
    for control in result.checks.positive_controls:
        print_wrapped(control.sentence, "positive controls: ", "  ")
    if (certificate := result.certificate) is not None:
        print_wrapped(
            f"certificate of the {result.certificate_of}: these samples leave "
            f"{certificate.residual_plain:.4g} of the norm of the weights unexplained, or "
            f"{certificate.residual_clarke:.4g} if a neuron whose input is exactly zero at a sample may "
            "count as partly active",
            later_indent="  ",
        )
    for line in result.exposure.lines if result.exposure else ():
        print_wrapped(line, "exposure: ", "  ")
    print_notes(result.notes)
    text = " ".join([result.screen.text(), *result.verdict.reasons, "residual restart control"])
    print_line("glossary:")
    for word in find_used_words(text):
        print_wrapped(GLOSSARY[word], f"  {word}: ", "    ")


def show_applies(rows: list[dict[str, Any]]) -> None:
    """Print a table with each attack and test, whether it applies, and why.

    Args:
        rows: Plain values of the rows: ``what``, ``status`` and ``reason``.
    """
    cells = [(row["what"], row["status"], row["reason"]) for row in rows]
    print_table("what applies, what was tried, and why", ("what", "status", "why"), cells)


def _show_dry_run(plan: DryRun) -> None:
    print_notes(plan.obstacles, "obstacle")
    if plan.applies:
        show_applies([vars(row) for row in plan.applies])
    print_notes(plan.doubts)
    if plan.cost:
        print_line(plan.cost)
    print_table("possible verdicts", ("verdict", ""), list(plan.verdicts.items()))
    print_line("dry run: nothing was attacked")


@contextmanager
def listener_for(visible: bool) -> Iterator[AuditListener]:
    """Yield a listener that prints the messages of an audit, the progress of attacks and later stages."""
    from residuum.auditing.listener import SILENT, AuditListener

    with ExitStack() as stack:
        start = time.monotonic()

        def describe(
            attack: str, done: int, restarts: int, progress: AttackProgress
        ) -> tuple[int, int, str]:
            parallel = len(progress.loss)
            numbers = f"{done + 1}" if parallel == 1 else f"{done + 1}-{done + parallel}"
            elapsed = duration(time.monotonic() - start)
            text = f"{attack}  restart {numbers} of {restarts}  step {progress.step} of {progress.steps}"
            return progress.step, progress.steps, f"{text}  {elapsed}"

        watch = stack.enter_context(show_progress("attacking", describe, visible))
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
                stack.close()  # remove the progress bar of the attacks, or the message of the previous stage
                console = Console(stderr=True)
                if console.is_terminal:
                    stack.enter_context(console.status(STAGE_MESSAGES[name]))
                else:
                    elapsed = duration(time.monotonic() - start)
                    sys.stderr.write(f"{STAGE_MESSAGES[name]}, {elapsed}\n")

            def watch_attack(self, attack: str, restarts_done: int, restarts: int) -> Any:
                return partial(watch, attack, restarts_done, restarts)

        yield Terminal()
