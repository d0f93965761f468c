"""Reconstructions: the candidates of an attack, and the candidates that it selects."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residuum.records.base import Record, plain
from residuum.records.knowledge import Knowledge

# Fields and properties that the JSON holds unchanged.
PUBLISHED = (
    "attack",
    "restarts",
    "status",
    "seconds",
    "settings",
    "notes",
    "events",
    "second_order",
)


@dataclass(frozen=True, eq=False)
class Selection(Record):
    """Reconstructions that were selected without the data, best first.

    Candidates of several restarts (consensus) come before candidates of a single restart.

    Attributes:
        x: Reconstructions, (k, *shape).
        labels: Labels, (k,).
        lam: Total multipliers, (k,).
        support: Number of restarts with such a candidate, (k,).
        members: Number of candidates that were merged, (k,).
        confidence: Confidence in [0, 1], NaN if it is not available, (k,).
        features: The features from which the confidence was computed, (k, 5).
        index: Index of each reconstruction among the candidates, (k,).
    """

    x: Tensor
    labels: Tensor
    lam: Tensor
    support: Tensor
    members: Tensor
    confidence: Tensor
    features: Tensor
    index: Tensor

    @classmethod
    def from_candidates(
        cls, x: Tensor, labels: Tensor, index: Tensor, confidence: Tensor, **counts: Tensor
    ) -> Selection:
        """Select candidates of an attack without multipliers.

        Args:
            x: Candidates, (N, *shape).
            labels: Labels of the candidates, (N,).
            index: Indices of the selected candidates, (k,).
            confidence: Their confidence, (k,).
            **counts: ``support`` or ``members`` of the selected candidates, 1 by default.

        Returns:
            The selection.
        """
        ones = torch.ones_like(index)
        return cls(
            x=x[index],
            labels=labels[index],
            lam=torch.ones(len(index)),
            **{"support": ones, "members": ones, **counts},
            confidence=confidence,
            features=torch.zeros(len(index), 5),
            index=index,
        )

    def __len__(self) -> int:
        return len(self.x)

    def confidence_of(self, i: int) -> float | None:
        """Return the confidence of candidate ``i``, None if it is not available."""
        confidence = float(self.confidence[i])
        return None if math.isnan(confidence) else confidence


@dataclass(frozen=True, eq=False)
class Reconstruction(Record):
    """The candidates of R restarts of an attack, with its history, its settings and its selection.

    Attributes:
        attack: Name of the attack.
        x: Candidates as the network receives them, without the mean, (N, *shape).
        labels: Labels, (N,).
        lam: Multipliers of the plain sum, (N, ...).
        run: Restart of every candidate, (N,).
        steps: Steps of the history, (T,).
        loss: Losses, (R, T).
        layers: Relative SQUARED residuals of the layers, (R, T, L).
        layer_names: Names of the L layers.
        status: "finished", "time", "diverged" or "interrupted" for every restart.
        knowledge: What the attacker knew.
        settings: Settings of the attack.
        selection: The candidates that the attack selects without the data.
        seconds: Run time.
        notes: What a reader of the candidates should know.
        events: How the candidates grew: dicts with the step, the restart, and the numbers of the parent and
            its children (``attacks/stationarity/growth.py``).
        ident: Number of every candidate within its restart, (N,). None in files of older versions.
        second_order: For every restart of an attack that grows: whether its end point is second-order
            stationary, with both quantities.
        canonical: Whether the network was attacked in its canonical form (``networks/canonical.py``). The
            multipliers then belong to the weights of that form.
    """

    attack: str
    x: Tensor
    labels: Tensor
    lam: Tensor
    run: Tensor
    steps: Tensor
    loss: Tensor
    layers: Tensor
    layer_names: tuple[str, ...]
    status: tuple[str, ...]
    knowledge: Knowledge
    settings: dict[str, Any] = field(default_factory=dict)
    selection: Selection | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    ident: Tensor | None = None
    second_order: tuple[dict[str, Any], ...] = ()
    canonical: bool = False

    @classmethod
    def from_candidates(
        cls,
        attack: str,
        x: Tensor,
        labels: Tensor,
        lam: Tensor,
        knowledge: Knowledge,
        **fields: Any,
    ) -> Reconstruction:
        """Make a reconstruction of an attack that has no restarts and no steps.

        Args:
            attack: Name of the attack.
            x: Candidates, (N, *shape).
            labels: Labels, (N,).
            lam: Multipliers, (N, ...).
            knowledge: What the attacker knew.
            **fields: Other fields.

        Returns:
            The reconstruction, with a single restart and an empty history.
        """
        steps = torch.zeros(0, dtype=torch.long)
        return cls(
            attack,
            x,
            labels,
            lam,
            run=torch.zeros(len(x), dtype=torch.long),
            steps=steps,
            loss=torch.zeros(1, 0),
            layers=torch.zeros(1, 0, 0),
            layer_names=(),
            status=("finished",),
            knowledge=knowledge,
            **fields,
        )

    @property
    def restarts(self) -> int:
        """Number of independent runs."""
        return len(self.status)

    @property
    def weight(self) -> Tensor:
        """Total absolute multiplier of each candidate, (N,)."""
        return self.lam.abs().flatten(1).sum(1) if self.lam.ndim > 1 else self.lam.abs()

    @property
    def best_restart(self) -> int | None:
        """Restart with the smallest loss, None if all restarts diverged or there is no history."""
        is_valid = torch.tensor([status != "diverged" for status in self.status])
        if not self.loss.shape[1] or not is_valid.any():
            return None
        loss = self.loss.nan_to_num(nan=torch.inf).amin(1)
        return int(torch.where(is_valid, loss, torch.inf).argmin())

    def to_json(self) -> dict[str, Any]:
        """Return a summary without the candidates. Numbers that are not finite are None."""
        chosen = self.selection
        return self.plain_values(*PUBLISHED) | {
            "candidates": len(self.x),
            "final_loss": plain(self.loss[:, -1:].flatten()),
            "layer_residuals_squared": {
                name: plain(self.layers[:, -1:, i].flatten())
                for i, name in enumerate(self.layer_names)
            },
            "runs": [self._run(i) for i in range(self.restarts)],
            "selected": 0 if chosen is None else len(chosen),
            "consensus": 0 if chosen is None else int((chosen.support > 1).sum()),
            "knowledge": dict(self.knowledge.provenance),
        }

    def _run(self, i: int) -> dict[str, Any]:
        """Return the last loss of a restart, and its best loss with the step and the residual norms."""
        loss = plain(self.loss[i])
        finite = [(value, t) for t, value in enumerate(loss) if value is not None]
        best, t = min(finite) if finite else (None, None)
        layers = plain(self.layers[i, t]) if t is not None else [None] * len(self.layer_names)
        return {
            "status": self.status[i],
            "final_loss": loss[-1] if loss else None,
            "step": int(self.steps[t]) if t is not None else None,
            "loss": best,
            "residuals": {
                name: None if value is None else math.sqrt(max(value, 0.0))
                for name, value in zip(self.layer_names, layers, strict=True)
            },
        }
