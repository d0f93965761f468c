"""The exception tree: every class owns its exit code, every instance says what the user can do.

A message states the rule and what was got; ``remedy`` says what to do, in call form where it can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ResiduumError(Exception):
    """Anything residuum reports on purpose. A bare one is an internal error (exit code 70)."""

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
    """Something the user gave cannot be used as it is (exit code 2)."""

    exit_code = 2


class ArchitectureError(InputError):
    """A network description is malformed or does not fit the weights."""


class CheckpointError(InputError):
    """A checkpoint is missing, truncated, or holds no usable weights."""


class DataError(InputError):
    """A dataset is missing, empty, of the wrong shape, or has unusable labels."""


class OutputError(InputError):
    """A result cannot be written where it was asked for."""


class MissingExtraError(InputError):
    """A feature needs an optional dependency; the remedy is the exact install line."""


class PluginError(InputError):
    """A part that another package brought failed; it harms no other."""


class InconclusiveError(ResiduumError):
    """The work ran and its outcome supports no statement (exit code 3)."""

    exit_code = 3


class UnsafeFileError(ResiduumError):
    """Loading a file would run code, or reading it would exhaust memory (exit code 4).

    A file in a format that residuum does not read is a :class:`CheckpointError` (exit code 2).
    """

    exit_code = 4


def require_known(
    got: str, known: Iterable[str], what: str, error: type[ResiduumError] = InputError
) -> None:
    """Refuse a name that is not among the known ones; ``what``: such as "No task"."""
    if got not in (names := tuple(known)):
        raise error(f"{what} {got!r}.", did_you_mean(got, names))


def did_you_mean(got: str, known: list[str] | tuple[str, ...]) -> str:
    """A remedy for a name that is not known: the nearest one, and the whole list."""
    from difflib import get_close_matches

    close = get_close_matches(got, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(sorted(known))}."
