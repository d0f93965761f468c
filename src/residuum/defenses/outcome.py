"""What one defense did: figures before and after, and pictures of what came back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residuum.records import Dataset, Scores
from residuum.records.base import Record

SHOWN = 8


@dataclass(frozen=True, eq=False)
class Attacked(Record):
    """One attack on the released weights, scored; images (k, 2, *shape): found, and its sample.

    attacker: "unaware" or the name of the adaptive strategy; values: (k,) score of each pair;
    rule: what a recovered sample had to beat, such as "ncc > 0.83"; findings: what the adaptive
    attacker inferred, plain values.
    """

    attacker: str
    recovered: int | None
    expected_by_chance: float | None
    p_value: float | None
    first_layer_residual: float | None
    seconds: float
    images: Tensor
    values: Tensor
    beyond_chance: tuple[bool, ...] = ()
    findings: dict[str, Any] = field(default_factory=dict)
    rule: str = ""

    def to_json(self) -> dict[str, Any]:
        """Everything but the images."""
        left_out = ("images", "values", "beyond_chance")
        return {name: value for name, value in vars(self).items() if name not in left_out}


@dataclass(frozen=True, eq=False)
class Outcome(Record):
    """A defense at one strength. name "none" is the undefended network, the "before" of all others.

    changes, secret: as the defense states them; shift: of the inputs, its kind (rewritten into the
    biases, or there during training), per pixel and as a norm; accuracy, loss: on held-out samples,
    as the defended network is given them; kkt: relative residuals at the training samples as the
    network is given them; rewrite: the three residuals of bias rewriting; determined_energy: mean
    share of a training sample's energy that every equal pair in its place keeps, attained, and
    determined_at_least the lower bound; facts: of the training.
    """

    name: str
    strength: float | None
    n: int
    changes: str
    secret: str
    shift: dict[str, Any]
    accuracy: float | None
    loss: float
    train_loss: float
    kkt_plain: float
    kkt_clarke: float
    margin: float | None
    rewrite: dict[str, float]
    determined_energy: float | None
    uniqueness_note: str
    attacks: tuple[Attacked, ...]
    seconds: dict[str, float]
    facts: dict[str, Any] = field(default_factory=dict)
    theta_sha256: str = ""
    determined_at_least: float | None = None

    @property
    def label(self) -> str:
        """NAME:STRENGTH, as it was asked for."""
        return self.name if self.strength is None else f"{self.name}:{self.strength:g}"

    @property
    def unaware(self) -> Attacked:
        """The attacker who does not know of the defense."""
        return self.attacks[0]

    @property
    def adaptive(self) -> Attacked | None:
        """The attacker who does; None for the undefended network."""
        return self.attacks[1] if len(self.attacks) > 1 else None

    @property
    def told(self) -> Attacked | None:
        """The attacker who was told the shift; None where there is none."""
        return self.attacks[2] if len(self.attacks) > 2 else None

    def to_json(self) -> dict[str, Any]:
        """The published form, without images and without the secret's value."""
        rows = {k: v for k, v in vars(self).items() if k not in ("attacks", "strength", "name")}
        known = {"adaptive": self.adaptive, "told": self.told}
        return {
            "defense": self.label, "name": self.name, "strength": _json_number(self.strength),
            **rows, "unaware": self.unaware.to_json(),
            **{key: None if part is None else part.to_json() for key, part in known.items()},
        }  # fmt: skip


def attacked(
    attacker: str, candidates: Tensor, train: Dataset, scores: Scores, residual: float | None,
    seconds: float, findings: dict[str, Any] | None = None,
) -> Attacked:  # fmt: skip
    """The record of an attack: counts, and the best pairs of candidate and training sample."""
    rows = [(row.index, row.matches[scores.deciding]) for row in scores.per_sample]
    matched = [(i, m) for i, m in rows if m.score is not None and m.candidate is not None]
    best = sorted(matched, key=lambda pair: -float(pair[1].score or 0.0))[:SHOWN]
    pairs = [torch.stack([candidates[m.candidate].double(), train.x[i].double()])
             for i, m in best]  # fmt: skip
    mean = 0.0 if train.mean is None else train.mean.double()
    images = torch.stack(pairs) + mean if pairs else torch.zeros(0, 2, *train.shape)
    return Attacked(
        attacker, scores.recovered, scores.expected_by_chance, scores.p_value, residual, seconds,
        images, torch.tensor([float(m.score or 0.0) for _, m in best]),
        tuple(bool(m.recovered) for _, m in best), dict(findings or {}), scores.rule,
    )  # fmt: skip


def _json_number(value: float | None) -> float | str | None:
    return "inf" if value == float("inf") else value
