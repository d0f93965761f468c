"""Messages for errors in the arguments of a command: the rule, what was passed, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from cyclopts import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from residuum.errors import did_you_mean

KINDS = {int: "a whole number", float: "a number"}  # the words for a type in an error message


def usage_message(problem: CycloptsError, commands: Sequence[str]) -> str:
    """Return the error message for arguments that the parser cyclopts refused.

    Args:
        problem: The error that cyclopts raised.
        commands: Names of all commands.

    Returns:
        The rule, the value that was passed and a remedy, on one line.
    """
    command = " ".join(["residuum", *(problem.command_chain or ())])
    return f"{_describe(problem, command, commands)} See '{command} --help'."


def _describe(problem: CycloptsError, command: str, commands: Sequence[str]) -> str:
    unused_tokens = problem.unused_tokens or []
    if isinstance(problem, UnknownCommandError) or (
        isinstance(problem, UnusedCliTokensError) and command == "residuum"
    ):
        return f"There is no command {unused_tokens[0]!r}. {did_you_mean(unused_tokens[0], tuple(commands))}"
    if isinstance(problem, UnusedCliTokensError):
        return f"{command} does not take the argument {unused_tokens[0]!r}."
    if isinstance(problem, UnknownOptionError):
        unknown_option = problem.token.keyword or problem.token.value
        option_names = [n for argument in problem.argument_collection for n in argument.names]
        return f"{command} has no option {unknown_option}.{_suggest(unknown_option, option_names)}"
    if isinstance(problem, MissingArgumentError):
        return _describe_missing(problem, command)
    if isinstance(problem, CoercionError):
        return _describe_invalid(problem)
    return " ".join(str(problem).split())


def _suggest(unknown_name: str, names: Sequence[str]) -> str:
    from difflib import get_close_matches

    similar_names = get_close_matches(unknown_name, names, n=1)
    return f" Did you mean {similar_names[0]}?" if similar_names else ""


def _describe_missing(problem: MissingArgumentError, command: str) -> str:
    argument = problem.argument
    assert argument is not None
    argument_name = problem.keyword or argument.name
    if not argument.tokens and problem.keyword is None:
        return f"{command} needs {argument_name}."
    count, _ = argument.token_count()
    return f"{argument_name} needs {'a value' if count == 1 else f'{count} values'}."


def _describe_invalid(problem: CoercionError) -> str:
    token, argument, kind = problem.token, problem.argument, problem.target_type
    argument_name = argument.name if argument is not None else "the argument"
    if token is None:
        return f"The value of {argument_name} is not valid. {problem}"
    argument_name = token.keyword or argument_name
    if choices := _choices(kind):
        suggestion = did_you_mean(token.value, tuple(map(str, choices)))
        return f"{argument_name} cannot be {token.value!r}. {suggestion}"
    expected_type = next(
        (words for k, words in KINDS.items() if kind is k), "a value of another type"
    )
    return f"{argument_name} takes {expected_type}; got {token.value!r}."


def _choices(kind: Any) -> tuple[Any, ...]:
    annotations = (kind, *get_args(kind))
    return next((get_args(k) for k in annotations if get_origin(k) is Literal), ())
