"""Knowledge: what the attacker knows in addition to the release, and where each fact came from."""

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

PROVENANCES = ("user", "train", "holdout", "release")  # where a known fact may come from
TENSORS = ("mean", "theta0", "norms", "moment")  # facts that are not written as text
TYPED = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?:(onehot|integer)(?:/([0-9.eE+-]+))?")


@dataclass(frozen=True, eq=False)
class Fact(Record):
    """A fact that the attacker knows, in words, and where it came from."""

    fact: str
    value: str
    provenance: Annotated[str, SchemaRule(enum=[*PROVENANCES])]


class Columns(NamedTuple):
    """Neighboring columns of one type; the network receives a value over ``scale``, less the mean."""

    first: int
    last: int
    kind: str
    scale: float


@dataclass(frozen=True, eq=False)
class Knowledge(Record):
    """Facts granted to the attacker, each absent (None) unless the auditor grants it.

    provenance: for every granted fact where it came from: "user" (said on the command line),
        "train" (computed from the training set: the strongest attacker), "holdout", or "release":
        the file itself holds it.
    moment: what the optimizer kept of the gradients, by parameter (``checkpoints.read_moment``).
    shape: of one sample.
    value_range: least and largest value of a sample before a mean was subtracted.
    mean: (*shape) what was subtracted, or one number.
    sample_count: how many samples the network was trained on.
    label_balance: share of each label.
    theta0: the weights that training began from, by parameter name.
    loss, weight_decay: of the training.
    norms: (n,) of the samples.
    columns: types of a table's columns, as ``0-2:onehot,3:integer/9``: counted from 0, the last one
        given; behind a stroke what they were divided by before a mean was subtracted.
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
    columns: str | None = None
    provenance: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.provenance) - set(self.granted)
        wrong = set(self.provenance.values()) - set(PROVENANCES)
        if unknown or wrong:
            raise InputError(
                f"Provenance names granted facts with one of {PROVENANCES}; got {self.provenance}.",
                f"Granted are {self.granted}.",
            )
        if self.value_range is not None and not self.value_range[0] < self.value_range[1]:
            raise InputError(
                f"A value range runs from low to high; got {self.value_range}.",
                "For images in [0, 1] say value_range=(0, 1).",
            )
        _ = self.typed_columns  # refuses what it cannot read
        source = {name: self.provenance.get(name, "user") for name in self.granted}
        object.__setattr__(self, "provenance", source)

    @property
    def granted(self) -> tuple[str, ...]:
        """Names of the facts the attacker has."""
        names = (f.name for f in fields(self) if f.name != "provenance")
        return tuple(name for name in names if getattr(self, name) is not None)

    @property
    def typed_columns(self) -> tuple[Columns, ...]:
        """``columns`` as read; none where no types are granted."""
        if self.columns is None:
            return ()
        parts = [TYPED.fullmatch(part.strip()) for part in self.columns.split(",")]
        try:
            found = [
                Columns(int(m[1]), int(m[2] or m[1]), m[3], float(m[4] or 1)) for m in parts if m
            ]
        except ValueError:  # a scale that is no number
            found = []
        counted = [column for one in found for column in range(one.first, one.last + 1)]
        if (
            len(found) < len(parts)
            or len({*counted}) < len(counted)
            or any(one.last < one.first + (one.kind == "onehot") for one in found)
            or not all(0 < one.scale < math.inf for one in found)
        ):
            raise InputError(
                "Columns are FIRST-LAST:onehot or FIRST-LAST:integer between commas, none of them "
                f"twice, a one-hot group of two or more; got {self.columns[:60]!r}.",
                "Example: 0-2:onehot,3:integer/9, the last one for numbers divided by 9.",
            )
        return tuple(found)

    def box(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Bounds of a sample ``like`` this one as the network receives it, one number where they are equal.

        None without a granted range; a mean that is not granted is taken as 0.
        """
        if self.value_range is None:
            return None
        mean = like.new_zeros(()) if self.mean is None else self.mean.to(like)
        mean = mean.reshape(like.shape) if mean.numel() == like.numel() else mean
        low, high = self.value_range
        return low - mean, high - mean

    @property
    def digest(self) -> str:
        """What tells two grants apart."""
        moment = {f"moment of {name}": t for name, t in (self.moment or {}).items()}
        found = {**(self.theta0 or {}), **moment, "mean": self.mean, "norms": self.norms}
        tensors = {name: t for name, t in found.items() if t is not None}
        plain = [[name, getattr(self, name)] for name in self.granted if name not in TENSORS]
        shapes = [[name, list(t.shape)] for name, t in tensors.items()]
        return digest([plain, self.provenance, shapes], *tensors.values())

    @property
    def line(self) -> str:
        """Every granted fact with where it came from, on one line."""
        said = []
        for known in self.facts:
            shown = "" if known.fact in TENSORS else f" {known.value.replace(', ', ',')}"
            said.append(f"{known.fact}{shown} ({known.provenance})")
        return ", ".join(said) or "nothing but the weights"

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Every granted fact in words; of tensors the number of values."""
        source = self.provenance
        return tuple(Fact(k, _in_words(getattr(self, k)), source[k]) for k in self.granted)


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{float(value):g}" if value.numel() == 1 else f"{value.numel()} values"
    if isinstance(value, dict):
        return f"{sum(part.numel() for part in value.values())} values"
    return ", ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else str(value)
