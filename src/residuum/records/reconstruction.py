"""The result of an attack: its candidates (guesses of training samples), and those that it selects."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residuum.records.base import Record, plain
from residuum.records.knowledge import Knowledge

# Fields and properties of a reconstruction that its JSON contains unchanged.
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
    """The k candidates that an attack selects as reconstructions without knowing the data, best first.

    Candidates of several restarts (consensus) come before candidates of a single restart.

    Attributes:
        x: Selected candidates, (k, *shape).
        labels: Labels of the selected candidates, (k,).
        lam: Sum of the multipliers of the merged candidates, (k,).
        support: Number of restarts that found nearly the same candidate, (k,).
        members: Number of candidates that were merged into each selected candidate, (k,).
        confidence: Confidence in [0, 1] that each selected candidate is a training sample, (k,). It is NaN if
            no confidence is available.
        features: Features from which the confidence was computed, (k, 5).
        index: Index of each selected candidate among all candidates, (k,).
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
            confidence: Confidence of the selected candidates, (k,).
            **counts: Fields ``support`` and ``members`` of the selected candidates. The default is 1.

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
        """Return the confidence that selected candidate ``i`` is a training sample, None if unknown."""
        confidence = float(self.confidence[i])
        return None if math.isnan(confidence) else confidence


@dataclass(frozen=True, eq=False)
class Reconstruction(Record):
    """The candidates of R restarts of an attack, with its history, its settings and its selection.

    Attributes:
        attack: Name of the attack.
        x: Candidates as the network receives them, without the mean, (N, *shape).
        labels: Labels of the candidates, (N,).
        lam: Multipliers of the gradients of the candidates, (N, ...).
        run: Index of the restart of each candidate, (N,).
        steps: The T steps at which losses and residuals were recorded, (T,).
        loss: Loss of each restart at the recorded steps, (R, T).
        layers: Relative SQUARED residual of each layer at the recorded steps, (R, T, L).
        layer_names: Names of the L layers.
        status: "finished", "time", "diverged" or "interrupted" for every restart.
        knowledge: Facts that the attacker knew.
        settings: Settings of the attack.
        selection: The candidates that the attack selects without knowing the data.
        seconds: Run time in seconds.
        notes: Remarks for the reader of the candidates.
        events: Additions of candidates during the search: dicts with the step, the restart, and the numbers
            of the parent candidate and its children (``attacks/stationarity/growth.py``).
        ident: Number of each candidate within its restart, (N,), or None in files of older versions.
        second_order: For each restart of an attack that adds candidates: whether its end point is
            second-order stationary, with the two numbers that decide this.
        canonical: Whether the attack rescaled the network to its canonical form first
            (``networks/canonical.py``). The multipliers then belong to the weights of the canonical form.
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
        """Make a reconstruction from the candidates of an attack without restarts and steps.

        Args:
            attack: Name of the attack.
            x: Candidates, (N, *shape).
            labels: Labels of the candidates, (N,).
            lam: Multipliers (weights) of the candidates, (N, ...).
            knowledge: Facts that the attacker knew.
            **fields: Values of other fields of the reconstruction.

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
        """Number of restarts (independent runs) of the attack."""
        return len(self.status)

    @property
    def weight(self) -> Tensor:
        """Weight of each of N candidates: the sum of its absolute multipliers."""
        return self.lam.abs().flatten(1).sum(1) if self.lam.ndim > 1 else self.lam.abs()

    @property
    def best_restart(self) -> int | None:
        """Index of the restart (run) with the smallest loss, None if all diverged or no loss was recorded."""
        is_valid = torch.tensor([status != "diverged" for status in self.status])
        if not self.loss.shape[1] or not is_valid.any():
            return None
        smallest_losses = self.loss.nan_to_num(nan=torch.inf).amin(1)
        return int(torch.where(is_valid, smallest_losses, torch.inf).argmin())

    def to_json(self) -> dict[str, Any]:
        """Return a summary of the reconstruction as JSON types, without the reconstructed samples."""
        selection = self.selection
        return self.plain_values(*PUBLISHED) | {
            "candidates": len(self.x),
            "final_loss": plain(self.loss[:, -1:].flatten()),
            "layer_residuals_squared": {
                name: plain(self.layers[:, -1:, i].flatten())
                for i, name in enumerate(self.layer_names)
            },
            "runs": [self._summarize_restart(i) for i in range(self.restarts)],
            "selected": 0 if selection is None else len(selection),
            "consensus": 0 if selection is None else int((selection.support > 1).sum()),
            "knowledge": dict(self.knowledge.provenance),
        }

    def _summarize_restart(self, i: int) -> dict[str, Any]:
        """Summarize restart (run) ``i``: last loss, best loss, and the step and errors of the best loss."""
        losses = plain(self.loss[i])
        finite_losses = [(value, index) for index, value in enumerate(losses) if value is not None]
        best_loss, best_index = min(finite_losses) if finite_losses else (None, None)
        squared_residuals = (
            plain(self.layers[i, best_index])
            if best_index is not None
            else [None] * len(self.layer_names)
        )
        return {
            "status": self.status[i],
            "final_loss": losses[-1] if losses else None,
            "step": int(self.steps[best_index]) if best_index is not None else None,
            "loss": best_loss,
            "residuals": {
                name: None if value is None else math.sqrt(max(value, 0.0))
                for name, value in zip(self.layer_names, squared_residuals, strict=True)
            },
        }
