"""The command line: commands, and what every exit code means.

0 the command did its work (audit: no leak found), 1 a finding (audit: leak; scan: what must not be
there; exposure: --fail-above), 2 usage or bad input, 3 inconclusive, 4 refused for safety, 70 internal
error, 130 interrupted.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module

import typer

from residuum import plugins
from residuum.cli.options import Grouped, flat
from residuum.cli.output import print_json
from residuum.errors import InputError, ResiduumError, did_you_mean

USAGE, INTERNAL, INTERRUPTED = 2, 70, 130
# Some releases of typer bring their own click, others import it: this base class is right for both.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
_NOT_A_CHOICE = re.compile("'(?P<option>-[^']*)'.*'(?P<got>[^']*)' is not one of (?P<known>.*)")

app = typer.Typer(
    name="residuum",
    help="What remains of the training data in a trained network's weights?",
    rich_markup_mode=None,  # plain help: opens in a fraction of the time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    verbose: bool = typer.Option(
        False,
        "--verbose",
        help="With --version: also print the versions of dependencies, the device, the extras, the data "
        "that are found and a self-test.",
    ),
) -> None:
    if not version:
        if verbose:
            raise InputError(
                "--verbose can only be used with --version.", "Run residuum --version --verbose."
            )
        if context.invoked_subcommand is None:
            raise InputError("A command is missing.", "Run residuum --help, which lists them.")
        return
    from importlib.metadata import version as installed

    typer.echo(installed("residuum"))
    if verbose:
        from residuum.cli.versions import show_versions

        show_versions()
    raise typer.Exit


COMMANDS_IN_WORDS = {  # short enough for a line of 80 columns
    "audit": "Attack a checkpoint, count what comes back, give a verdict.",
    "scan": "List what in a release can give training data away.",
    "strip": "Write the weights of a checkpoint alone.",
    "attack": "Reconstruct training samples from weights.",
    "score": "Count recovered samples against held-out ones.",
    "exposure": "Rank your records by their risk of being recovered.",
    "certify": "Measure how well samples explain the weights.",
    "alternatives": "Write another training set for the same weights.",
    "identify": "Recover the samples of a polynomial network.",
    "defend": "Try defenses: what comes back before and after.",
    "sweep": "Try many settings of an attack; rank and pool them.",
    "report": "Write the report of an audit again, or compare two audits.",
    "train": "Train a network to try things on.",
    "demo": "Train, attack and audit on bundled data, in a minute.",
}
COMMANDS = {name: import_module(f"residuum.cli.{name}") for name in COMMANDS_IN_WORDS}
# Installed plug-ins take part in these, from the reading of the architecture on.
PLUGGED = ("scan", "attack", "score", "exposure", "certify", "defend", "audit", "sweep")
for name, module in COMMANDS.items():
    _, heading, examples = (module.__doc__ or "").partition("Examples:")
    short = COMMANDS_IN_WORDS[name]
    add = app.command(name, cls=Grouped, epilog=heading + examples, short_help=short)
    add(flat(module.command))


def main(arguments: list[str] | None = None) -> int:
    """Run a command and turn whatever happens into its exit code."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = _run(arguments)
    except ResiduumError as problem:
        _report(str(problem), problem.exit_code, arguments)
        code = problem.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _report("Interrupted; what was finished is kept.", INTERRUPTED, arguments)
        code = INTERRUPTED
    except Exception as problem:
        if os.environ.get("RESIDUUM_DEBUG"):
            raise
        text = f"Internal error ({type(problem).__name__}: {problem}). Set RESIDUUM_DEBUG=1 for the trace."
        _report(text, INTERNAL, arguments)
        code = INTERNAL
    return code


def _run(arguments: list[str]) -> int:
    if arguments[0] in PLUGGED and not {"-h", "--help"} & {*arguments}:
        plugins.load("--no-plugins" not in arguments)
    try:
        result = app(args=arguments, standalone_mode=False, prog_name="residuum")
    except typer.Exit as leave:
        return leave.exit_code
    except _USAGE_ERROR as problem:
        context = getattr(problem, "ctx", None)
        hint = f" See '{context.command_path} --help'." if context is not None else ""
        message = getattr(problem, "format_message", problem.__str__)()
        if wrong := _NOT_A_CHOICE.search(message):
            known = did_you_mean(wrong["got"], re.findall("'([^']+)'", wrong["known"]))
            message = f"{wrong['option']} has no {wrong['got']!r}. {known}"
        _report(message.rstrip(".") + "." + hint, USAGE, arguments)
        return USAGE
    if result == INTERRUPTED:  # some releases of typer swallow Ctrl-C
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def _report(text: str, code: int, arguments: list[str]) -> None:
    line = " ".join(text.split())
    if "--json" in arguments:
        print_json({"error": line, "exit_code": code})
    sys.stderr.write(f"residuum: {line}\n")
