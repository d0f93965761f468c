"""The attack "fill": infer missing values of training records from the weights.

An attacker has records of the training set in which some values are missing. The activation boundaries of
the network pass through training records, so they determine a missing value (:mod:`.missing_values` for one
unknown column, :mod:`.several_missing_values` for two or three). The attack reads no training data. It needs

- the partial records, with NaN in the missing cells,
- at least ``MIN_KNOWN`` known values of every column, in the partial records and in a reference sample
  together. They give the scales of the neurons and the ranges of the columns.

All missing cells of a record are inferred together, as one question. The answer to a question has a statistic
T, which becomes a p-value by its rank among decoys. A decoy is a copy of a partial record with noise in every
column, which is not a training record. Questions of the same kind share their decoys: all questions about
one continuous column, all questions about two (or three) columns, and the questions about each column with
few values. The rule of Benjamini and Hochberg turns the p-values of all questions into false discovery rates
q. The attack fills

- the cells with q <= 5%, if there are at least 10 such questions,
- otherwise the cells with q <= 1%. A false discovery rate is a mean over many answers and says little about
  a few. If the attacker has no training record at all, the attack fills a cell in about 1% of such files.

Questions about two or three columns need half of these rates. Their answers were wrong more often. Other
cells stay empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from scipy.stats import false_discovery_control
from torch import Tensor

from residuum.attacks.random_streams import stream
from residuum.conformal import rank_p_values
from residuum.errors import InputError
from residuum.networks.inferred_cells import (
    LEVEL,
    MARGIN,
    MIN_REPORTED,
    Variable,
    find_variables,
)
from residuum.networks.kinks import make_decoys
from residuum.networks.missing_values import EQUAL_VALUES, RecordLines
from residuum.networks.network import Network
from residuum.networks.several_missing_values import MAX_UNKNOWN, infer_several
from residuum.records.filled_records import FilledRecords
from residuum.records.knowledge import Knowledge

NAME = "fill"
# Ranges, standard deviations and few possible values of a column need this number of known values.
MIN_KNOWN = 30
LEVEL_OF_FEW = 0.01  # false discovery rate if fewer than MIN_REPORTED questions are answered
SHARE_OF_SEVERAL = 0.5  # share of the false discovery rate for questions about several columns
# Decoys of each record, and smallest number of decoys of each kind of question. With 2,000 decoys, p-values
# can be as small as 0.0005.
DECOYS_PER_RECORD, MIN_DECOYS = 4, 2000
# Questions about several columns take longer: two cores examine about 4 million intersections per second.
# A question may have MAX_POINTS intersections, and its decoys MAX_DECOY_POINTS.
MAX_POINTS, MAX_DECOY_POINTS, MIN_DECOYS_OF_SEVERAL = 1 << 22, 1 << 26, 200
# A missing value is replaced by the value of the most similar of so many records while scales are measured.
MAX_DONORS = 1000
CONSTANT = "a column with a missing value has only one value in all known records"
INCOMPLETE_GROUP = "only some columns of a group of one-hot columns are empty; empty all or none"
NOT_CONTINUOUS = (
    "several values are missing, and one of them belongs to a column with few values; such a value can only "
    "be inferred alone"
)
TOO_MANY = f"more than {MAX_UNKNOWN} values are missing"
TOO_WIDE = "several values are missing, and the first layer has too many neurons for this"


@dataclass
class Question:
    """The same missing columns of several records.

    Attributes:
        variables: The missing variables (columns, or groups of one-hot columns).
        rows: Indices of the records.
        value: Inferred values of the columns of all variables, (rows, columns).
        statistic: Evidence for these values, (rows,).
        p: P-values of this evidence, (rows,).
    """

    variables: tuple[Variable, ...]
    rows: list[int] = field(default_factory=list)
    value: Tensor = field(default_factory=lambda: torch.zeros(0))
    statistic: Tensor = field(default_factory=lambda: torch.zeros(0))
    p: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def columns(self) -> list[int]:
        """Indices of the missing columns."""
        return [column for variable in self.variables for column in variable.columns]

    @property
    def kind(self) -> object:
        """Questions of the same kind share their decoys."""
        is_choice = self.variables[0].choices is not None
        return self.variables[0].columns if is_choice else len(self.variables)


def why_not(network: Network, knowledge: Knowledge) -> str:
    """Return why the attack does not apply, "" if it applies.

    Args:
        network: The network.
        knowledge: What the attacker knows.

    Returns:
        The reason.
    """
    partial, reference = knowledge.partial, knowledge.reference
    if partial is None:
        return "needs records with missing values; pass --partial FILE"
    count = network.architecture.inputs
    for name, records in (("partial records", partial), ("reference records", reference)):
        if records is not None and (records.ndim != 2 or records.shape[1] != count):
            return f"the {name} must have one value for each of the {count} inputs of the network"
        if records is not None and bool(records.isinf().any()):
            return f"the {name} must not have infinite values"
    if not len(partial) or not bool(partial.isnan().any()):
        return "no value is missing in the partial records; leave the cells to infer empty"
    counts = _join(partial, reference).isfinite().sum(0)
    if int(counts.min()) < MIN_KNOWN:
        return (
            f"needs at least {MIN_KNOWN} known values of every column, in the partial and the reference "
            f"records together; column {int(counts.argmin())} has {int(counts.min())}. Pass more records of "
            "the same kind with --reference FILE"
        )
    return ""


def fill(network: Network, knowledge: Knowledge, *, seed: int = 0) -> FilledRecords:
    """Infer missing values of training records from the weights of a network.

    Args:
        network: A chain of dense layers with ReLU or LeakyReLU.
        knowledge: What the attacker knows. ``partial`` has the records with missing values as NaN, and
            ``reference`` other records of the same kind, both as the network receives them. ``columns`` names
            one-hot groups. Without ``columns``, they are recognized.
        seed: Seed of the decoys.

    Returns:
        The filled records.

    Raises:
        InputError: If the attack does not apply.

    Example:
        >>> import residuum as rs
        >>> knowledge = rs.Knowledge(partial=partial, reference=reference)  # doctest: +SKIP
        >>> filled = rs.attacks.fill(network, knowledge)  # doctest: +SKIP
        >>> filled.line  # doctest: +SKIP
        '11 of 60 missing cells were filled (60 were tested).'
    """
    if reason := why_not(network, knowledge):
        raise InputError(
            f"The attack '{NAME}' does not apply: {reason}.",
            "Run residuum attack fill model.pkl --partial records.csv --out filled.csv.",
        )
    assert knowledge.partial is not None
    partial = knowledge.partial.double()
    pool = borrow_values(_join(partial, knowledge.reference))
    groups = [
        range(group.first, group.last + 1)
        for group in knowledge.typed_columns
        if group.kind == "onehot"
    ]
    lines = RecordLines.measure(network, pool)
    neurons = int((lines.layers[0].share > 0).sum())
    questions, reasons = list_questions(partial, find_variables(pool, groups or None), neurons)
    answer = _Answer(lines, pool, seed)
    for kind in dict.fromkeys(question.kind for question in questions):
        answer.add_p_values([q for q in questions if q.kind == kind], pool[: len(partial)], neurons)
    return _fill(partial, questions, reasons)


def borrow_values(x: Tensor) -> Tensor:
    """Fill missing values by the values of the most similar record in which they are known.

    These values only serve to measure the scales of neurons. They are no inferred values.

    Args:
        x: Records (n, d) with missing values as NaN. Every column has a known value.

    Returns:
        Records (n, d) without missing values.
    """
    is_known, filled = x.isfinite(), x.clone()
    center = x.nanmean(0)
    deviation = (x - center).square().nanmean(0).sqrt()
    scaled = ((x - center) / deviation.clamp(min=1e-300)).nan_to_num()
    for column in (~is_known).any(0).nonzero()[:, 0]:
        is_empty = ~is_known[:, column]
        donors = is_known[:, column].nonzero()[:MAX_DONORS, 0]
        similar = torch.cdist(scaled[is_empty], scaled[donors]).argmin(1)
        filled[is_empty, column] = x[donors[similar], column]
    return filled


def list_questions(
    partial: Tensor, variables: Sequence[Variable], neurons: int
) -> tuple[list[Question], list[str]]:
    """Return which missing columns can be inferred for which records.

    Args:
        partial: Records (n, d) with missing values as NaN.
        variables: The variables of the table.
        neurons: Number of neurons of the first layer.

    Returns:
        The questions, and for each record why its missing values cannot be inferred, "" if they can.
    """
    variable_of = {column: variable for variable in variables for column in variable.columns}
    questions: dict[tuple[int, ...], Question] = {}
    reasons = [""] * len(partial)
    for row, is_missing in enumerate(partial.isnan()):
        missing = is_missing.nonzero()[:, 0].tolist()
        if not missing:
            continue
        named = {variable_of[column].columns for column in missing if column in variable_of}
        columns = sorted(column for columns in named for column in columns)
        question = questions.get(tuple(columns))
        if question is None:
            asked_about = tuple(variable_of[columns[0]] for columns in sorted(named))
            question = Question(asked_about)
        if not {*missing} <= variable_of.keys():
            reasons[row] = CONSTANT
        elif columns != missing:
            reasons[row] = INCOMPLETE_GROUP
        elif reason := _why_unanswered(question, neurons):
            reasons[row] = reason
        else:
            questions[tuple(columns)] = question
            question.rows.append(row)
    return [*questions.values()], reasons


def _why_unanswered(question: Question, neurons: int) -> str:
    count = len(question.variables)
    if count > MAX_UNKNOWN:
        return TOO_MANY
    if count == 1:
        return ""
    if any(variable.choices is not None for variable in question.variables):
        return NOT_CONTINUOUS
    return TOO_WIDE if _count_points(neurons, count) > MAX_POINTS else ""


def _count_points(neurons: int, count: int) -> int:
    """Return the number of intersections that are examined for a question about several columns."""
    return math.comb(neurons, count - 1) * neurons


class _Answer:
    """Answers questions and compares them with decoys."""

    def __init__(self, lines: RecordLines, pool: Tensor, seed: int) -> None:
        self.lines = lines
        self.deviation = pool.std(0, correction=0)
        self.low = pool.amin(0) - MARGIN * self.deviation
        self.high = pool.amax(0) + MARGIN * self.deviation
        self.generator = stream(NAME, seed)

    def add_p_values(self, questions: Sequence[Question], x: Tensor, neurons: int) -> None:
        """Answer questions of the same kind, which share their decoys.

        Args:
            questions: The questions. Their values, statistics and p-values are set.
            x: The records (n, d).
            neurons: Number of neurons of the first layer.
        """
        count = len(questions[0].variables)
        min_decoys = MIN_DECOYS
        if count > 1:
            affordable = MAX_DECOY_POINTS // max(1, _count_points(neurons, count))
            min_decoys = min(MIN_DECOYS, max(MIN_DECOYS_OF_SEVERAL, affordable))
        records = sum(len(question.rows) for question in questions)
        per_record = max(DECOYS_PER_RECORD, math.ceil(min_decoys / records))
        decoy_statistics = []
        for question in questions:
            rows = x[question.rows]
            question.value, question.statistic = self.infer(question, rows)
            decoys = make_decoys(rows.repeat(per_record, 1), self.deviation, self.generator)
            decoy_statistics.append(self.infer(question, decoys)[1])
        decoy_statistic = torch.cat(decoy_statistics)
        for question in questions:
            question.p = rank_p_values(question.statistic, decoy_statistic)

    def infer(self, question: Question, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values (n, columns) that answer a question for n records, and their evidence (n,)."""
        columns, choices = torch.tensor(question.columns), question.variables[0].choices
        if choices is not None:
            evidence = self.lines.infer_choices(x, columns, choices)
            return choices[evidence.value], evidence.statistic
        if len(columns) == 1:
            evidence = self.lines.infer_values(
                x, self.low, self.high, EQUAL_VALUES * self.deviation, columns
            )
            return evidence.value[:, None], evidence.statistic
        evidence = infer_several(
            self.lines,
            x,
            columns,
            self.low[columns],
            self.high[columns],
            EQUAL_VALUES * self.deviation[columns],
        )
        return evidence.value, evidence.statistic


def _fill(partial: Tensor, questions: Sequence[Question], reasons: Sequence[str]) -> FilledRecords:
    """Return the records with the answers whose false discovery rate is small enough."""
    x, p, q = partial.clone(), *torch.full((2, *partial.shape), torch.nan, dtype=torch.float64)
    if questions:
        p_values = torch.cat([question.p for question in questions])
        rates = torch.from_numpy(false_discovery_control(p_values.numpy()))
        limits = torch.cat(
            [
                torch.full_like(question.p, 1 if len(question.variables) == 1 else SHARE_OF_SEVERAL)
                for question in questions
            ]
        )
        is_answered = rates <= LEVEL * limits
        if int(is_answered.sum()) < MIN_REPORTED:
            is_answered = rates <= LEVEL_OF_FEW * limits
        counts = [len(question.rows) for question in questions]
        for question, rate, answered in zip(
            questions, rates.split(counts), is_answered.split(counts), strict=True
        ):
            rows, columns = torch.tensor(question.rows)[:, None], torch.tensor(question.columns)
            p[rows, columns], q[rows, columns] = question.p[:, None], rate[:, None]
            x[rows[answered], columns] = question.value[answered]
    return FilledRecords(x, partial.isnan(), p, q, tuple(reasons), _describe(reasons))


def _describe(reasons: Sequence[str]) -> tuple[str, ...]:
    """Return a note for each reason why records were not tested."""
    return tuple(
        f"{reasons.count(reason)} records were not tested: {reason}"
        for reason in _distinct(reasons)
    )


def _distinct(texts: Sequence[str]) -> Iterator[str]:
    return (text for text in dict.fromkeys(texts) if text)


def _join(partial: Tensor, reference: Tensor | None) -> Tensor:
    return partial.double() if reference is None else torch.cat([partial, reference]).double()
