"""Infer missing values of training records from the weights, as a stage of an audit of a table.

The stage runs only if the group test of membership rejects. So attributes show no false leak in an audit in
which membership shows none, and they need no part of the significance level.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from residuum.auditing.schedule import NO_TIME
from residuum.errors import InputError
from residuum.records import Dataset, Knowledge
from residuum.risk.attributes import MAX_COLUMNS, measure_table
from residuum.risk.membership import GROUP_LEVEL

if TYPE_CHECKING:
    from residuum.auditing.case import Case
    from residuum.auditing.run import Audit

NOT_MEMBERS = (
    "activation boundaries do not distinguish training from held-out samples (membership), which a leak of "
    "values needs"
)
NO_TABLE = "the samples are no rows of a table with at most {} named columns"
FROZEN = "the trained layers receive features of frozen layers, which are no columns of a table"
# Largest number of records times columns times neurons in an audit, which takes about 20 seconds on one core.
MAX_WORK = 10**7


def is_table(samples: Dataset, knowledge: Knowledge, is_requested: bool = False) -> bool:
    """Return True if samples are rows of a table with few columns, and no images or embeddings of texts.

    The columns of a table have names. Arrays without names can be images that the network receives flat, so
    they count as tables only if the user asks for a test of columns.

    Args:
        samples: The samples.
        knowledge: What the attacker knows, such as the shape of an image that the network receives flat.
        is_requested: Whether the user named columns to test (``--sensitive``).

    Returns:
        Whether the samples are rows of a table.
    """
    shape = knowledge.shape or samples.shape
    has_few_columns = len(shape) == len(samples.shape) == 1 and samples.shape[0] <= MAX_COLUMNS
    return has_few_columns and (is_requested or bool(samples.features)) and not samples.texts


def one_hot_groups(knowledge: Knowledge, columns: int) -> list[list[int]] | None:
    """Return the groups of one-hot columns that the user passed, None if no types were passed.

    Args:
        knowledge: What the attacker knows, such as the types of columns.
        columns: Number of columns of the table.

    Returns:
        The indices of the columns of each group.

    Raises:
        InputError: If a group has a column that the table lacks.
    """
    if knowledge.columns is None:
        return None
    last_column = max(group.last for group in knowledge.typed_columns)
    if last_column >= columns:
        raise InputError(
            f"The types of columns must be those of the table, whose last column has the number "
            f"{columns - 1}; got column {last_column}.",
            "Count columns from 0 (--columns).",
        )
    return [
        list(range(group.first, group.last + 1))
        for group in knowledge.typed_columns
        if group.kind == "onehot"
    ]


def skip_without_members(audit: Audit) -> str:
    """Return the reason to skip the test of attributes, "" if it runs."""
    case, membership = audit.case, audit.membership
    if membership is None:
        return audit.skipped.get("membership", NOT_MEMBERS)
    if reason := _why_no_table(case, is_requested=bool(audit.request.sensitive)):
        return reason
    # The p-value is NaN if there are no held-out samples.
    if not membership.group_p <= GROUP_LEVEL:
        return NOT_MEMBERS
    return NO_TIME if audit.deadline.is_over else ""


def _why_no_table(case: Case, is_requested: bool) -> str:
    if case.train is None or not is_table(case.train, case.knowledge, is_requested):
        return NO_TABLE.format(MAX_COLUMNS)
    return "" if case.head is None else FROZEN


def infer_attributes(audit: Audit) -> Audit:
    """Return the audit with the test whether an attacker can infer missing values of training records."""
    case, membership = audit.case, audit.membership
    sample_sets = case.sample_sets
    assert sample_sets is not None
    assert sample_sets.holdout is not None
    assert membership is not None
    work_per_record = sample_sets.train.shape[0] * max(1, membership.neurons)
    test = measure_table(
        case.audited,
        sample_sets.train,
        sample_sets.holdout,
        sensitive=audit.request.sensitive,
        one_hot=one_hot_groups(case.knowledge, sample_sets.train.shape[0]),
        max_records=max(1, MAX_WORK // work_per_record),
        seed=audit.request.seed,
    )
    if test.reason:
        return audit.skip("attributes", test.reason)
    return replace(audit, attributes=test)
