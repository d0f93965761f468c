"""What an attacker has: what is released, and what is told.

Everything else about the data stays unknown to the attack.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor, nn

from residuum.errors import InputError
from residuum.records.base import UNSAVED, Record
from residuum.records.rundir import digest

PROVENANCES = ("user", "train", "holdout", "release")
TENSORS = ("mean", "theta0", "norms", "moment")


@dataclass(frozen=True, eq=False)
class Checkpoint(Record):
    """Weights under the parameter names of the network that ``arch`` describes.

    arch: description such as ``mlp:784-1000-1000-1``.
    input_shape: shape of one sample, () when it is not known.
    labels: class names by output.
    task: "binary", "multiclass" or "regression" where the releaser said so.
    assumptions: what had to be guessed while reading.
    module: a live network that no string describes, kept as given. It is code and is never saved:
        only its weights are.
    """

    theta: dict[str, Tensor]
    arch: str
    input_shape: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    task: str = ""
    assumptions: tuple[str, ...] = ()
    source_names: dict[str, str] = field(default_factory=dict)
    module: nn.Module | None = field(default=None, metadata=UNSAVED)


class Fact(NamedTuple):
    """A granted fact in words."""

    fact: str
    value: str
    provenance: str


@dataclass(frozen=True, eq=False)
class Knowledge(Record):
    """Facts granted to the attacker, each absent (None) unless the auditor grants it.

    provenance: for every granted fact where it came from: "user" (said on the command line),
        "train" (computed from the training set: the strongest attacker), "holdout", or "release":
        the file itself holds it.
    moment: what the optimiser kept of the gradients, by parameter (``checkpoints.moment_of``).
    shape: of one sample.
    value_range: least and largest value of a sample before a mean was subtracted.
    mean: (*shape) what was subtracted, or one number.
    sample_count: how many samples the network was trained on.
    label_balance: share of each label.
    theta0: the weights that training began from, by parameter name.
    loss, weight_decay: of the training.
    norms: (n,) of the samples.
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
        source = {name: self.provenance.get(name, "user") for name in self.granted}
        object.__setattr__(self, "provenance", source)

    @property
    def granted(self) -> tuple[str, ...]:
        """Names of the facts the attacker has."""
        names = (f.name for f in fields(self) if f.name != "provenance")
        return tuple(name for name in names if getattr(self, name) is not None)

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
        for fact, value, source in self.facts:
            shown = "" if fact in TENSORS else f" {value.replace(', ', ',')}"
            said.append(f"{fact}{shown} ({source})")
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
