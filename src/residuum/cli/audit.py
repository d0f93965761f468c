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
import os
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

# Lines of the summary that an audit prints before the attacks begin, and not again at the end.
ALREADY_PRINTED = ("network",)
INPUTS = (
    "data",
    "holdout",
    "base",
    "adapter",
    "tokenizer",
)  # inputs of an audit other than the model
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
            "label": Annotated[str, Parameter(metavar="COLUMN")],
            "drop": Annotated[list[str], Parameter(metavar="COLUMN")],
            "sensitive": Annotated[list[str], Parameter(metavar="COLUMN")],
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
            help="Training samples: an .npz, a table with a header (.csv, .tsv, .jsonl or .parquet), a "
            "folder of images, or a directory that `residuum train` wrote. For a language model or "
            "another model of texts: texts as .csv, .jsonl or .txt, or token ids as .npz.",
            metavar="DATA",
        ),
    ] = None,
    holdout: Annotated[
        str | None,
        Parameter(
            help="At least 100 samples that the network never saw, in the same formats as for --data. "
            "Omit this option if the file or folder of --data also holds test samples.",
            metavar="DATA",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(
            help="Folder for the results of the audit. If the folder holds an interrupted audit "
            "with the same settings, the audit continues."
        ),
    ] = None,
    settings: dict[str, Any] | None = None,
    fail_on: Annotated[
        list[str] | None,
        Parameter(
            help="Exit with code 1 if this condition holds. The condition is a grade of a leak or a "
            "comparison. The grades, the worst first, are verbatim, near-copy, resemblance, "
            "attribute, class-level and membership. A grade holds for a leak that is at least as bad. "
            "The default is membership. A comparison has a name and a number, such as recovered>=5. The "
            "names are recovered (recovered samples), expected (samples expected by chance), excess "
            "(recovered minus expected), share (recovered samples divided by all samples), p_value, "
            "named (samples named as members) and inferred (records with a missing value that can be inferred). "
            "If you repeat the option, code 1 needs only one of the conditions.",
            metavar="CONDITION",
        ),
    ] = None,
    exit_zero: Annotated[
        bool, Parameter(help="Exit with code 0 even if the audit finds a leak or is inconclusive.")
    ] = False,
    dry_run: Annotated[
        bool,
        Parameter(
            help="Only preview the audit, without running an attack. Print problems with the inputs, the "
            "attacks that would run, their cost, and the verdicts that the audit could reach."
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
            "folder of a finished audit. If you pass this file, omit the other options about attacker "
            "knowledge, such as --init and --mean.",
            metavar="FILE",
            group=options.ATTACKER,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        Parameter(
            help="The file config.toml in the folder of an earlier audit, to repeat that audit. Other "
            "options that you pass override the settings in the file.",
            group=options.EXPERT,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        Parameter(
            help="Folder with the tokenizer of a language model. The default is the folder of the model.",
            metavar="DIR",
        ),
    ] = None,
    trust_code: options.TrustCode = False,
    # ``main`` reads the option --no-plugins before this function runs. The parameter is only for the help.
    no_plugins: options.NoPlugins = False,
) -> int:
    """Attack a checkpoint, count the recovered training samples, and give a verdict on a leak."""
    from residuum.auditing import dryrun
    from residuum.auditing.artifacts import read_result
    from residuum.auditing.conditions import exit_code, read_conditions
    from residuum.auditing.config import AuditConfig, read_config
    from residuum.auditing.run import audit

    grade, comparisons = read_conditions(fail_on or [])
    passed_settings: dict[str, Any] = {
        **{"checkpoint": checkpoint and str(checkpoint), "data": data, "holdout": holdout},
        "tokenizer": tokenizer,
        **{
            **vars(knowledge_options),
            **vars(fine_tuning),
            "knowledge": knowledge,
            **(settings or {}),
        },
        "fail_on": grade or None,
    }
    if (update := passed_settings.pop("update")) is not None:
        from residuum.io.updates import resolve_update

        names = ("checkpoint", "base", "update_kind")
        passed_settings |= zip(
            names,
            resolve_update(
                update,
                passed_settings["checkpoint"],
                passed_settings["base"],
                passed_settings["adapter"],
                passed_settings.get("update_kind", "auto"),
            ),
            strict=True,
        )
    passed_settings = {name: value for name, value in passed_settings.items() if value is not None}
    if "attacks" in passed_settings:
        passed_settings["attacks"] = [read_attack(text) for text in passed_settings["attacks"]]
    base_config = AuditConfig() if config is None else read_config(config)
    audit_request = options.make_from_options(base_config.changed, passed_settings)
    if audit_request.checkpoint is None:
        raise InputError(
            "An audit needs a checkpoint; no checkpoint was passed.",
            "Run residuum audit model.safetensors.",
        )
    inputs: dict[str, Any] = {
        **{name: getattr(audit_request, name) for name in INPUTS},
        "knowledge": audit_request.knowledge_or_facts(),
        "trust_code": trust_code,
    }
    if dry_run:
        dry_run_plan = dryrun.dry_run(audit_request.checkpoint, **inputs, **audit_request.options())
        output.print_result(dry_run_plan.to_json(), lambda: _show_dry_run(dry_run_plan))
        return dry_run_plan.exit_code
    if out is None:
        raise InputError(
            "An audit needs a folder for its results; the option --out is missing.",
            "Pass --out runs/a.",
        )
    options.check_device(audit_request.device)
    # An audit needs no internet. This variable stops the library of Hugging Face from downloading files.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with listener_for(output.visible) as listener:
        audit_result = audit(
            audit_request.checkpoint,
            **inputs,
            **audit_request.options(),
            out=out,
            blur=blur,
            expected_hashes=audit_request.sha256,
            listener=listener,
        )
    output.print_result(read_result(out), lambda: show(audit_result, out, explain))
    if open_report:
        import webbrowser

        webbrowser.open((out / "report.html").resolve().as_uri())
    fails_on_comparisons_only = bool(comparisons) and not grade
    return (
        0
        if exit_zero
        else exit_code(audit_result.verdict, comparisons, only=fails_on_comparisons_only)
    )


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
            "--attacks must be the name of an attack, or a JSON object with the name and settings of an "
            f"attack; got {text[:60]!r}.",
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
    """Print the measured values of the audit with their meaning, then a glossary of technical terms."""
    from residuum.report.glossary import GLOSSARY, find_used_words

    print_line("")
    for reason in result.verdict.reasons:
        print_wrapped(reason, "because ")
    show_applies([vars(row) for row in result.applies])
    attack_rows = []
    for row in result.attacks:
        if row.ran:
            recovered_cell = f"{row.recovered} ({format_number(row.expected_by_chance, 2)})"
            p_value_cell = format_number(row.p_value if row.adjusted is None else row.adjusted, 2)
            attack_cells = row.name, str(row.restarts), format_number(row.residual, 2)
            attack_rows.append(
                (
                    *attack_cells,
                    "-" if row.recovered is None else recovered_cell,
                    row.rule or "-",
                    p_value_cell,
                )
            )
    columns = ("attack", "restarts", "residual", "recovered\n(chance)", "counts with", "p")
    print_table("attacks: training samples that each attack recovered", columns, attack_rows)
    if result.controls.rows:
        control_rows = []
        for negative in result.controls.rows:
            recovered_cell = (
                f"{negative.recovered} ({format_number(negative.expected_by_chance, 2)})"
            )
            p_value_cell = format_number(negative.p_value, 2)
            control_rows.append(
                (negative.name, str(negative.candidates), recovered_cell, p_value_cell)
            )
        control_title = "negative controls: candidates that were not reconstructed from the network"
        print_table(
            control_title, ("control", "candidates", "recovered\n(chance)", "p"), control_rows
        )
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
    printed_text = " ".join(
        [result.screen.text(), *result.verdict.reasons, "residual restart control"]
    )
    print_line("glossary:")
    for word in find_used_words(printed_text):
        print_wrapped(GLOSSARY[word], f"  {word}: ", "    ")


def show_applies(rows: list[dict[str, Any]]) -> None:
    """Print a table with each attack and test, whether it applies, and why.

    Args:
        rows: Plain values of the rows: ``what``, ``status`` and ``reason``.
    """
    table_rows = [(row["what"], row["status"], row["reason"]) for row in rows]
    print_table("what applies, what was tried, and why", ("what", "status", "why"), table_rows)


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
    """Yield a listener that prints the messages of an audit and the progress of its attacks.

    After the attacks, the listener prints the name of each further stage, such as the report.
    """
    from residuum.auditing.listener import SILENT, AuditListener

    with ExitStack() as stack:
        start_time = time.monotonic()

        def describe(
            attack: str, done: int, restarts: int, progress: AttackProgress
        ) -> tuple[int, int, str]:
            parallel_restarts = len(progress.loss)
            restart_numbers = (
                f"{done + 1}"
                if parallel_restarts == 1
                else f"{done + 1}-{done + parallel_restarts}"
            )
            elapsed = duration(time.monotonic() - start_time)
            state_line = (
                f"{attack}  restart {restart_numbers} of {restarts}  "
                f"step {progress.step} of {progress.steps}"
            )
            return progress.step, progress.steps, f"{state_line}  {elapsed}"

        show_attack_progress = stack.enter_context(show_progress("attacking", describe, visible))
        if show_attack_progress is None:
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
                    elapsed = duration(time.monotonic() - start_time)
                    sys.stderr.write(f"{STAGE_MESSAGES[name]}, {elapsed}\n")

            def watch_attack(self, attack: str, restarts_done: int, restarts: int) -> Any:
                return partial(show_attack_progress, attack, restarts_done, restarts)

        yield Terminal()
