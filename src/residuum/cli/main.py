"""The commands and the exit codes of the command line.

Exit codes:
    0: The command succeeded. In an audit: no leak was found.
    1: There is a finding. In an audit: a leak. In a scan: a finding that --fail-on names. In an
        exposure: a record whose probability of being recovered is above --fail-above.
    2: The usage or an input is wrong.
    3: The result is inconclusive.
    4: The input was refused, because reading the input is not safe.
    70: There was an internal error.
    130: The command was interrupted.

Commands are registered by the names of their modules, so that ``residuum --help`` imports none of them.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import App, CycloptsError, Group, Parameter

from residuum import plugins
from residuum.cli.output import print_json, print_line
from residuum.cli.usage import usage_message
from residuum.errors import InputError, ResiduumError

# Exit codes for wrong usage, internal errors, and interruption by the user.
USAGE, INTERNAL, INTERRUPTED = 2, 70, 130
COMMANDS = {  # each help text fits on one line of a terminal with 80 columns
    "audit": "Attack a checkpoint and give a verdict on leaks.",
    "scan": "List what in a release can reveal training data.",
    "strip": "Copy a release with only what its users need.",
    "attack": "Reconstruct training samples from weights.",
    "score": "Count recovered samples, compared with chance.",
    "exposure": "Rank your records by their risk of being recovered.",
    "certify": "Measure how well samples explain the weights.",
    "alternatives": "Write another training set for the same weights.",
    "identify": "Recover the samples of a polynomial network.",
    "defend": "Attack a network with and without defenses.",
    "sweep": "Run an attack with many settings; rank the results.",
    "report": "Write a report of an audit again, or compare audits.",
    "train": "Train a small network to try attacks on.",
    "demo": "Train and audit a network on bundled data in a minute.",
}
# Commands that load installed plug-ins before they read an architecture.
USE_PLUGINS = ("scan", "attack", "score", "exposure", "certify", "defend", "audit", "sweep")

app = App(
    name="residuum",
    help="Find out what the weights of a trained network reveal about its training data.",
    help_format="plaintext",
    version_flags=[],
    group_commands=Group("Commands", sort_key=0),
    group_parameters=Group("Basic", sort_key=1),
    default_parameter=Parameter(
        negative_bool=(), negative_iterable=(), allow_repeating=True, show_default=False
    ),
    exit_on_error=False,
    print_error=False,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
for index, (name, help_text) in enumerate(COMMANDS.items()):
    app.command(f"residuum.cli.{name}:app", name=name, help=help_text, sort_key=index)
app.register_install_completion_command(
    help="Install the tab completion of commands and options in your shell.", sort_key=len(COMMANDS)
)


@app.default
def _show_version(
    *,
    version: Annotated[bool, Parameter(help="Print the version and exit.")] = False,
    verbose: Annotated[
        bool,
        Parameter(
            help="With --version: also print the versions of dependencies, the device, the installed "
            "extras, the available datasets and a self-test."
        ),
    ] = False,
) -> None:
    """Print the version."""
    if not version:
        if verbose:
            raise InputError(
                "The option --verbose can only be used with --version.",
                "Run residuum --version --verbose.",
            )
        raise InputError("A command is missing.", "Run residuum --help, which lists the commands.")
    from importlib.metadata import version as installed

    print_line(installed("residuum"))
    if verbose:
        from residuum.cli.versions import show_versions

        show_versions()


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The command line arguments. By default the arguments of the program.

    Returns:
        The exit code.
    """
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        exit_code = _run(arguments)
    except ResiduumError as problem:
        _report(str(problem), problem.exit_code, arguments)
        exit_code = problem.exit_code
    except CycloptsError as problem:
        _report(usage_message(problem, tuple(COMMANDS)), USAGE, arguments)
        exit_code = USAGE
    except KeyboardInterrupt:
        _report(
            "The command was interrupted. Finished work is kept.",
            INTERRUPTED,
            arguments,
        )
        exit_code = INTERRUPTED
    except Exception as problem:
        if os.environ.get("RESIDUUM_DEBUG"):
            raise
        error_text = f"{type(problem).__name__}: {problem}"
        _report(
            f"Internal error ({error_text}). Set RESIDUUM_DEBUG=1 to see more.", INTERNAL, arguments
        )
        exit_code = INTERNAL
    return exit_code


def _run(arguments: list[str]) -> int:
    if arguments[0] == "--verbose" and "--version" not in arguments:
        arguments = arguments[:1]
    if arguments[0] in USE_PLUGINS and not {"-h", "--help"} & {*arguments}:
        plugins.load("--no-plugins" not in arguments)
    if arguments[0] == "attack":
        from residuum.cli.attack import add_command_of_plugin

        add_command_of_plugin(arguments[1:])
    return_value = app(arguments)
    return return_value if isinstance(return_value, int) else 0


def _report(text: str, code: int, arguments: list[str]) -> None:
    one_line = " ".join(text.split())
    if "--json" in arguments:
        print_json({"error": one_line, "exit_code": code})
    sys.stderr.write(f"residuum: {one_line}\n")
