"""The exceptions of residuum. Every class has an exit code, and every exception says what the user can do.

The message of an exception states the rule and the value that breaks the rule. Its attribute ``remedy``
says what the user can do, if possible as code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ResiduumError(Exception):
    """Base class of all errors that residuum reports.

    An error of this class itself, and not of a subclass, is an internal error (exit code 70).

    Args:
        message: The rule, and the value that breaks the rule.
        remedy: What the user can do.
    """

    exit_code = 70

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()

    def __reduce__(self) -> tuple[type[ResiduumError], tuple[str, str]]:
        return type(self), (self.message, self.remedy)


class InputError(ResiduumError):
    """An input of the user cannot be used (exit code 2)."""

    exit_code = 2


class ArchitectureError(InputError):
    """An architecture string or a module describes no valid network, or does not fit the weights."""


class CheckpointError(InputError):
    """A checkpoint is missing, truncated, or holds no usable weights."""


class DataError(InputError):
    """A dataset is missing or empty, or has a wrong shape or unusable labels."""


class OutputError(InputError):
    """A result cannot be written to the requested path."""


class MissingExtraError(InputError):
    """A feature needs an optional dependency. The remedy is the command that installs it."""


class PluginError(InputError):
    """A plug-in failed. Other plug-ins are not affected."""


class InconclusiveError(ResiduumError):
    """All computations finished, but their result supports no conclusion (exit code 3)."""

    exit_code = 3


class UnsafeFileError(ResiduumError):
    """Loading a file would run code, or reading it would exhaust memory (exit code 4).

    A file in a format that residuum does not read is a :class:`CheckpointError` (exit code 2).
    """

    exit_code = 4


def require_known(
    got: str, choices: Iterable[str], what: str, error: type[ResiduumError] = InputError
) -> None:
    """Check that a name is one of the choices, and raise an error otherwise.

    Args:
        got: The name to check.
        choices: Valid names.
        what: Text before the name in the error message. For example, "No task" gives "No task 'x'.".
        error: Class of the error that is raised if the name is not valid.
    """
    if got not in (names := tuple(choices)):
        raise error(f"{what} {got!r}.", did_you_mean(got, names))


def did_you_mean(got: str, choices: list[str] | tuple[str, ...]) -> str:
    """Return a remedy text for an invalid name: the most similar valid name, and all valid names.

    Args:
        got: The invalid name.
        choices: Valid names.

    Returns:
        The remedy text.
    """
    from difflib import get_close_matches

    similar_names = get_close_matches(got, choices, n=1)
    suggestion = f"Did you mean {similar_names[0]!r}? " if similar_names else ""
    return f"{suggestion}Known: {', '.join(sorted(choices))}."
