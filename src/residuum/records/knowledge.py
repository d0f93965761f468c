"""The attacker's knowledge: facts known in addition to the model file, with the source of each fact."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple

from torch import Tensor

from residuum.errors import InputError
from residuum.records.base import Record
from residuum.records.published import SchemaRule
from residuum.records.rundir import digest

# What an update file holds: a gradient at known weights, a difference from known weights, or either of them
# at unknown weights.
UPDATES = ("gradient", "difference", "alone")
PROVENANCES = ("user", "train", "holdout", "release")  # possible sources of a known fact
TENSORS = (
    "mean",
    "theta0",
    "norms",
    "moment",
    "column_ranges",
    "partial",
    "reference",
)  # names of the facts that are tensors
TYPED = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?:(onehot|integer)(?:/([0-9.eE+-]+))?")


@dataclass(frozen=True, eq=False)
class Fact(Record):
    """A fact that the attacker knows, in words, with its source."""

    fact: str
    value: str
    provenance: Annotated[str, SchemaRule(enum=[*PROVENANCES])]


class Columns(NamedTuple):
    """Neighboring columns of a table that have the same type.

    The network receives value / scale - mean.
    """

    first: int
    last: int
    kind: str
    scale: float


@dataclass(frozen=True, eq=False)
class Knowledge(Record):
    """Facts that the attacker knows. A fact that the attacker does not know is None.

    Attributes:
        shape: Shape of one sample.
        value_range: Smallest and largest value of a sample before the mean was subtracted.
        mean: The mean that was subtracted from the samples, (*shape) or a single number.
        sample_count: Number of training samples.
        label_balance: Share of each label among the training samples.
        theta0: Initial weights by parameter name.
        loss: Loss of the training.
        weight_decay: Weight decay of the training.
        norms: Norms of the n training samples, (n,).
        moment: Optimizer state by parameter name: a momentum buffer or Adam's first moment
            (``checkpoints.read_moment``).
        update: If the file holds an update in place of weights, what it is (``UPDATES``). ``moment`` is then
            the sum of gradients in the update.
        columns: Types of the columns of a table, such as ``0-2:onehot,3:integer/9``. Columns count from 0,
            and the last column is included. A number after a slash is the divisor that was applied before a
            mean was subtracted.
        column_ranges: Smallest value (first row) and largest value (second row) of each column of a table,
            (2, columns), for attacks on forests.
        partial: Records of the training set with missing values as NaN, (n, columns), for the attack "fill".
        reference: Records of the same kind that need not be training records, (N, columns), as an estimate
            of the ranges of the columns. They can have missing values.
        provenance: Source of every known fact: "user" (passed by the user), "train" (computed from the
            training set, which is the strongest attacker), "holdout", or "release" (stored in the file).
    """

    shape: tuple[int, ...] | None = None
    value_range: tuple[float, float] | None = None
    mean: Tensor | None = None
    sample_count: int | None = None
    label_balance: tuple[float, ...] | None = None
    theta0: dict[str, Tensor] | None = None
    loss: str | None = None
    weight_decay: float | None = None
    norms: Tensor | None = None
    moment: dict[str, Tensor] | None = None
    update: str | None = None
    columns: str | None = None
    column_ranges: Tensor | None = None
    partial: Tensor | None = None
    reference: Tensor | None = None
    provenance: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown_names = set(self.provenance) - set(self.known_names)
        invalid_sources = set(self.provenance.values()) - set(PROVENANCES)
        if unknown_names or invalid_sources:
            raise InputError(
                f"The source of a fact that an attacker knows must be one of {PROVENANCES}; got "
                f"{self.provenance}.",
                f"The facts that are known are {self.known_names}.",
            )
        if self.value_range is not None and not self.value_range[0] < self.value_range[1]:
            raise InputError(
                f"A value range must be a smaller number and a larger number; got {self.value_range}.",
                "For images in [0, 1], pass value_range=(0, 1).",
            )
        if self.update is not None and (self.update not in UPDATES or self.moment is None):
            raise InputError(
                f"Knowledge of an update must be one of {UPDATES}, with the gradients as moment; got "
                f"{self.update!r}.",
                "Pass the file of the update as rs.audit(base, update=FILE).",
            )
        _ = self.typed_columns  # raises an error if ``columns`` is malformed
        sources = {name: self.provenance.get(name, "user") for name in self.known_names}
        object.__setattr__(self, "provenance", sources)

    @property
    def known_names(self) -> tuple[str, ...]:
        """Names of the facts that the attacker knows."""
        names = (f.name for f in fields(self) if f.name != "provenance")
        return tuple(name for name in names if getattr(self, name) is not None)

    @property
    def typed_columns(self) -> tuple[Columns, ...]:
        """Types of the table columns, parsed from ``columns``, or () if ``columns`` is None."""
        if self.columns is None:
            return ()
        column_matches = [TYPED.fullmatch(text.strip()) for text in self.columns.split(",")]
        try:
            column_groups = [
                Columns(int(m[1]), int(m[2] or m[1]), m[3], float(m[4] or 1))
                for m in column_matches
                if m
            ]
        except ValueError:  # the scale of a column is not a number
            column_groups = []
        column_numbers = [
            column for group in column_groups for column in range(group.first, group.last + 1)
        ]
        if (
            len(column_groups) < len(column_matches)
            or len({*column_numbers}) < len(column_numbers)
            or any(group.last < group.first + (group.kind == "onehot") for group in column_groups)
            or not all(0 < group.scale < math.inf for group in column_groups)
        ):
            raise InputError(
                "Columns must be a comma-separated list of FIRST-LAST:onehot and FIRST-LAST:integer. A "
                "column must not appear twice, and a one-hot group must have at least two columns; got "
                f"{self.columns[:60]!r}.",
                "Example: 0-2:onehot,3:integer/9, where column 3 was divided by 9.",
            )
        return tuple(column_groups)

    def box(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the smallest and largest values of a sample as the network receives the sample.

        If the attacker does not know the mean, the bounds assume a mean of 0.

        Args:
            like: A sample with the shape and type of the bounds.

        Returns:
            The bounds, each a single number or in the shape of ``like``. None if the attacker does not know
            the value range.
        """
        if self.value_range is None:
            return None
        mean = like.new_zeros(()) if self.mean is None else self.mean.to(like)
        mean = mean.reshape(like.shape) if mean.numel() == like.numel() else mean
        low, high = self.value_range
        return low - mean, high - mean

    @property
    def digest(self) -> str:
        """Hash of all facts that the attacker knows, by which two knowledge records are compared."""
        moments_by_name = {f"moment of {name}": t for name, t in (self.moment or {}).items()}
        tensors_or_none = {
            **(self.theta0 or {}),
            **moments_by_name,
            "mean": self.mean,
            "norms": self.norms,
        }
        for name in ("column_ranges", "partial", "reference"):
            if getattr(self, name) is not None:
                tensors_or_none[name] = getattr(self, name)
        tensors = {name: t for name, t in tensors_or_none.items() if t is not None}
        plain_facts = [
            [name, getattr(self, name)] for name in self.known_names if name not in TENSORS
        ]
        shapes = [[name, list(t.shape)] for name, t in tensors.items()]
        return digest([plain_facts, self.provenance, shapes], *tensors.values())

    @property
    def line(self) -> str:
        """All facts that the attacker knows, with their sources, on a single line."""
        phrases = []
        for fact in self.known_facts:
            value_text = "" if fact.fact in TENSORS else f" {fact.value.replace(', ', ',')}"
            phrases.append(f"{fact.fact}{value_text} ({fact.provenance})")
        return ", ".join(phrases) or "nothing but the weights"

    @property
    def known_facts(self) -> tuple[Fact, ...]:
        """All facts that the attacker knows, in words. A tensor is described by its number of values."""
        sources = self.provenance
        return tuple(Fact(k, _in_words(getattr(self, k)), sources[k]) for k in self.known_names)


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{float(value):g}" if value.numel() == 1 else f"{value.numel()} values"
    if isinstance(value, dict):
        return f"{sum(tensor.numel() for tensor in value.values())} values"
    return ", ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else str(value)
