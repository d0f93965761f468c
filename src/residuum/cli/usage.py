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
    tokens = problem.unused_tokens or []
    if isinstance(problem, UnknownCommandError) or (
        isinstance(problem, UnusedCliTokensError) and command == "residuum"
    ):
        return f"There is no command {tokens[0]!r}. {did_you_mean(tokens[0], tuple(commands))}"
    if isinstance(problem, UnusedCliTokensError):
        return f"{command} does not take the argument {tokens[0]!r}."
    if isinstance(problem, UnknownOptionError):
        unknown_option = problem.token.keyword or problem.token.value
        option_names = [n for argument in problem.argument_collection for n in argument.names]
        return f"{command} has no option {unknown_option}.{_suggest(unknown_option, option_names)}"
    if isinstance(problem, MissingArgumentError):
        return _describe_missing(problem, command)
    if isinstance(problem, CoercionError):
        return _describe_invalid(problem)
    return " ".join(str(problem).split())


def _suggest(got: str, names: Sequence[str]) -> str:
    from difflib import get_close_matches

    matches = get_close_matches(got, names, n=1)
    return f" Did you mean {matches[0]}?" if matches else ""


def _describe_missing(problem: MissingArgumentError, command: str) -> str:
    argument = problem.argument
    assert argument is not None
    name = problem.keyword or argument.name
    if not argument.tokens and problem.keyword is None:
        return f"{command} needs {name}."
    count, _ = argument.token_count()
    return f"{name} needs {'a value' if count == 1 else f'{count} values'}."


def _describe_invalid(problem: CoercionError) -> str:
    token, argument, kind = problem.token, problem.argument, problem.target_type
    name = argument.name if argument is not None else "the argument"
    if token is None:
        return f"The value of {name} is not valid. {problem}"
    name = token.keyword or name
    if choices := _choices(kind):
        suggestion = did_you_mean(token.value, tuple(map(str, choices)))
        return f"{name} cannot be {token.value!r}. {suggestion}"
    expected_value = next(
        (words for k, words in KINDS.items() if kind is k), "a value of another type"
    )
    return f"{name} takes {expected_value}; got {token.value!r}."


def _choices(kind: Any) -> tuple[Any, ...]:
    annotations = (kind, *get_args(kind))
    return next((get_args(k) for k in annotations if get_origin(k) is Literal), ())
