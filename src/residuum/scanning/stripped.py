"""The result of stripping a model: writing a copy that holds only what users of the model need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from residuum.records import Record
from residuum.records.published import SchemaRule
from residuum.scanning.finding import Finding


@dataclass(frozen=True, eq=False)
class Stripped(Record):
    """The result of stripping a file or a folder.

    Attributes:
        file: The original file or folder.
        out: The new file or folder. For a pickle, the file that ``script`` writes.
        tensors: Number of tensors in the new files, 0 for a pickle.
        bytes: Size of the new files, 0 for a pickle.
        dropped: Findings of the original that the new file does not have.
        remaining: Findings that the new file still has.
        script: For a pickle, the script that the owner of the file runs to write the new file. For other
            files, "".
        copied: Names of the files of a folder that were copied unchanged.
        changed: Names of the files of a folder that were written without some of their content, each with
            the change.
        left_out: Names of the files of a folder that the new folder does not have, each with the reason.
    """

    derived = ("exit_code",)

    file: str
    out: str
    tensors: int
    bytes: int
    dropped: tuple[Finding, ...]
    remaining: tuple[Finding, ...]
    script: str = ""
    copied: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def exit_code(self) -> Annotated[int, SchemaRule(enum=[0, 1])]:
        """The exit code of ``residuum strip``: 1 if a finding of severity high remains, else 0."""
        return int(any(finding.severity == "high" for finding in self.remaining))


def removed_findings(before: list[Finding], after: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings of a model file that its stripped copy does not have.

    Args:
        before: The findings of the original.
        after: The findings of the copy.

    Returns:
        The findings that are gone.
    """
    remaining = {(finding.kind, finding.what) for finding in after}
    return tuple(finding for finding in before if (finding.kind, finding.what) not in remaining)
