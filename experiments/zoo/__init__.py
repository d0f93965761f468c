"""Artifacts as people release them, with the answer that residuum should give about each.

Each module makes artifacts of one kind. :mod:`experiments.artifact_zoo` runs all checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Check:
    """A command on an artifact, and what a true answer contains.

    Attributes:
        command: Command line or Python code. It runs in the folder of the artifact.
        truth: What is true about the artifact, in one or two sentences. Raters read it.
        exit_code: The expected exit code.
        says: Regular expressions. Each must match the answer.
        says_not: Regular expressions. None may match the answer.
    """

    command: str
    truth: str
    exit_code: int
    says: tuple[str, ...] = ()
    says_not: tuple[str, ...] = ()

    def problems(self, exit_code: int, answer: str) -> list[str]:
        """Return how an answer differs from the expected answer, [] if it does not."""
        text = " ".join(answer.split())
        problems = []
        if exit_code != self.exit_code:
            problems.append(f"exit code {exit_code} instead of {self.exit_code}")
        problems += [f"does not say {p!r}" for p in self.says if not re.search(p, text, re.I)]
        problems += [f"says {p!r}" for p in self.says_not if re.search(p, text, re.I)]
        return problems


@dataclass(frozen=True)
class Artifact:
    """A file or folder as people release it.

    Attributes:
        name: Name of the artifact and of its folder.
        description: What the artifact is. Raters read it.
        make: Function that writes the artifact into a folder.
        checks: Commands on it.
        library: Library that the maker needs beyond the development dependencies, "" for none.
    """

    name: str
    description: str
    make: Callable[[Path], None]
    checks: tuple[Check, ...]
    library: str = ""


ARTIFACTS: dict[str, Artifact] = {}


def artifact(
    description: str, *checks: Check, library: str = ""
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register the function that writes an artifact. Its name, with dashes, is the name of the artifact.

    Args:
        description: What the artifact is.
        *checks: Commands on it.
        library: Library that the function needs beyond the development dependencies.

    Returns:
        A decorator.
    """

    def register(make: Callable[[Path], None]) -> Callable[[Path], None]:
        name = make.__name__.replace("_", "-")
        assert name not in ARTIFACTS, name
        ARTIFACTS[name] = Artifact(name, description, make, checks, library)
        return make

    return register
