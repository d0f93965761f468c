"""List, for the report, the training samples that a membership test identifies as members."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from residuum.records.inputs import add_mean
from residuum.report import drawing

if TYPE_CHECKING:
    from residuum.auditing.result import AuditResult

MAX_NAMED = 50  # largest number of samples in the table
MAX_BYTES = 400_000  # largest size of all pictures in the table


class NamedSample(NamedTuple):
    """A training sample that the membership test identifies as a member of the training set.

    Attributes:
        row: Row of the sample in the training data.
        record_id: The user's identifier of the sample, "" if the data has no identifiers.
        q: The smallest false discovery rate at which the sample is named.
        boundaries: Number of activation boundaries that pass through the sample.
        statistic: Statistic T of the membership test, which is large if many boundaries pass through.
        picture: The sample as a data URI, "" if it is no image or the audit did not store it.
    """

    row: int
    record_id: str
    q: float
    boundaries: int
    statistic: float
    picture: str


def named_samples(result: AuditResult, *, redact: bool = False) -> list[NamedSample]:
    """Return the training samples that the membership test identifies, at most ``MAX_NAMED``.

    Args:
        result: The audit.
        redact: Leave out pictures and identifiers.

    Returns:
        The samples, the most certain first as in ``result.json``. The list is empty without a test.
    """
    membership_test = result.membership
    if membership_test is None:
        return []
    ordered_positions = sorted(
        membership_test.named.tolist(),
        key=lambda i: (float(membership_test.q[i]), -float(membership_test.statistic[i])),
    )
    ordered_positions = ordered_positions[:MAX_NAMED]
    named_rows = {membership_test.rows[i] for i in ordered_positions}
    pictures = {} if redact else _pictures(result, named_rows)
    identifiers: dict[int, str] = {}
    if result.scores is not None and not redact:
        identifiers = {row.index: row.id for row in result.scores.per_sample}
    return [
        NamedSample(
            row=(row := membership_test.rows[i]),
            record_id=identifiers.get(row, ""),
            q=float(membership_test.q[i]),
            boundaries=int(membership_test.boundaries[i]),
            statistic=float(membership_test.statistic[i]),
            picture=pictures.get(row, ""),
        )
        for i in ordered_positions
    ]


def _pictures(result: AuditResult, rows: set[int]) -> dict[int, str]:
    """Return a picture of each sample in ``rows``, by row, if the audit stored the sample."""
    evidence, scores = result.evidence, result.scores
    if evidence is None or scores is None or not scores.per_sample:
        return {}
    pictures: dict[int, str] = {}
    remaining_bytes = MAX_BYTES
    for position, index in enumerate(evidence.index.tolist()):
        row = scores.per_sample[index].index
        if row not in rows:
            continue
        sample = add_mean(evidence.x[position].double(), evidence.mean).numpy()
        if np.prod(result.shape) == sample.size:
            sample = sample.reshape(result.shape)
        if not drawing.is_image(sample.shape):
            return {}
        uri, _ = drawing.draw_sample(np.nan_to_num(sample, posinf=0.0, neginf=0.0))
        remaining_bytes -= len(uri)
        if remaining_bytes < 0:
            break
        pictures[row] = uri
    return pictures
