"""A finding of a scan: something in a file that can reveal training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from residuum.records import Record
from residuum.records.published import Count, SchemaRule

STORED, STATE, START, STATISTICS = "stored", "optimizer-state", "start", "statistics"
TOUCHED, ADAPTER, PATHS = "touched-rows", "adapter", "paths"
CODE, CLASSES, UPDATE = "code", "classes", "update"
KINDS = (CODE, STORED, UPDATE, STATE, START, TOUCHED, ADAPTER, STATISTICS, PATHS, CLASSES)
Kind = Annotated[str, SchemaRule(enum=[*KINDS])]
SEVERITIES = ("high", "medium", "low")

DROP_STATE = "Remove the state before release: residuum strip FILE --out CLEAN."


@dataclass(frozen=True, eq=False)
class Finding(Record):
    """Something in a file that can reveal training data.

    Attributes:
        kind: A member of ``KINDS``.
        severity: "high", "medium" or "low".
        what: What was found, in a few words.
        where: The first place in the file where it was found.
        reason: What the finding reveals about the training data.
        remedy: What to do about the finding before the release.
        places: Number of places in the file where it was found.
        count: Number of records, rows, words or values that were found, or None if they were not counted.
        rows: Rows of an embedding that training changed, or numbers of the given samples or texts that were
            found.
        words: The tokens of these rows, or the tokens of a vocabulary that were found, the rarest first.
    """

    kind: Kind
    severity: Annotated[str, SchemaRule(enum=[*SEVERITIES])]
    what: str
    where: str
    reason: str
    remedy: str
    places: Count = 1
    count: Count | None = None
    rows: tuple[Count, ...] = ()
    words: tuple[str, ...] = ()


def printable(text: str) -> str:
    """Replace every unprintable character of a text by "?", because it could control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def list_examples(texts: Sequence[str], limit: int = 8) -> str:
    """Return the first texts of a list and the number of the others, such as "a, b and 3 more".

    Args:
        texts: The texts. Long texts are shortened.
        limit: Largest number of texts in the result.

    Returns:
        The examples.
    """
    examples = ", ".join(text[:40] for text in texts[:limit])
    return examples if len(texts) <= limit else f"{examples} and {len(texts) - limit} more"


def rank(finding: Finding) -> tuple[int, int]:
    """Return the key for sorting findings of a scan: first by severity, then by kind."""
    return SEVERITIES.index(finding.severity), KINDS.index(finding.kind)
