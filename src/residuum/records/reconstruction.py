"""Reconstructions: the candidates of an attack, and its own choice among them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residuum.records.base import Record, plain
from residuum.records.knowledge import Knowledge

# Fields and properties that the JSON holds as they are.
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
    """Reconstructions chosen without the data, best first: consensus first, singletons after.

    x: (k, *shape).
    labels: (k,).
    lam: (k,) total multiplier.
    support: (k,) number of restarts that hold such a candidate.
    members: (k,) candidates merged into it.
    confidence: (k,) in [0, 1], NaN where it is withheld.
    features: (k, 5) what the confidence was computed from.
    index: (k,) the cluster's representative among the candidates.
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
    def plain(
        cls, x: Tensor, labels: Tensor, index: Tensor, confidence: Tensor, **known: Tensor
    ) -> Selection:
        """Candidates ``index`` of an attack without multipliers; support and members 1 unless known."""
        one, none = torch.ones_like(index), torch.zeros(len(index), 5)
        counts = {"support": one, "members": one, **known}
        parts = x[index], labels[index], torch.ones(len(index))
        return cls(*parts, **counts, confidence=confidence, features=none, index=index)

    def __len__(self) -> int:
        return len(self.x)

    def confidence_of(self, i: int) -> float | None:
        """Return the confidence of candidate ``i``, None where it is withheld."""
        confidence = float(self.confidence[i])
        return None if math.isnan(confidence) else confidence


@dataclass(frozen=True, eq=False)
class Reconstruction(Record):
    """Candidates of R restarts, how they came about, and what was chosen from them.

    x: (N, *shape) as the network receives them, no mean added.
    labels: (N,).
    lam: (N, ...) plain-sum multipliers.
    run: (N,) restart of each.
    steps: (T,) of the history.
    loss: (R, T).
    layers: (R, T, L), relative SQUARED residual per layer.
    status: per restart "finished", "time", "diverged", "interrupted".
    events: how the candidates grew, one dict each with the step, the restart, parent and children by
        number (``attacks/stationarity/growth.py``).
    ident: (N,) number of every candidate within its restart, None before there were such.
    second_order: per restart, of attacks that grew, whether its end point is second-order
        stationary, with both quantities.
    attack: its name.
    layer_names: of the L layers.
    knowledge, settings: what it was told, and how it ran.
    selection: its own choice, made without the data.
    canonical: whether the network was attacked in its canonical form (``networks/canonical.py``), to
        whose weights the multipliers then belong.
    notes: what a reader of the candidates should know.
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
    def at_once(
        cls, attack: str, x: Tensor, labels: Tensor, lam: Tensor, knowledge: Knowledge, **rest: Any
    ) -> Reconstruction:
        """Candidates of one restart that took no steps."""
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
            **rest,
        )

    @property
    def restarts(self) -> int:
        """Number of independent runs."""
        return len(self.status)

    @property
    def weight(self) -> Tensor:
        """(N,) total absolute multiplier of each candidate."""
        return self.lam.abs().flatten(1).sum(1) if self.lam.ndim > 1 else self.lam.abs()

    @property
    def best_restart(self) -> int | None:
        """The restart with the least loss of those that did not diverge; None where there is none."""
        alive = torch.tensor([status != "diverged" for status in self.status])
        if not self.loss.shape[1] or not alive.any():
            return None
        loss = self.loss.nan_to_num(nan=torch.inf).amin(1)
        return int(torch.where(alive, loss, torch.inf).argmin())

    def to_json(self) -> dict[str, Any]:
        """Summary without the candidates themselves; what is not finite is null."""
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
        """One restart: its last loss, and step, loss and residuals (norms) of the best one, kept."""
        loss = plain(self.loss[i])
        known = [(value, t) for t, value in enumerate(loss) if value is not None]
        best, at = min(known) if known else (None, None)
        layers = plain(self.layers[i, at]) if at is not None else [None] * len(self.layer_names)
        return {
            "status": self.status[i],
            "final_loss": loss[-1] if loss else None,
            "step": int(self.steps[at]) if at is not None else None,
            "loss": best,
            "residuals": {
                name: None if value is None else math.sqrt(max(value, 0.0))
                for name, value in zip(self.layer_names, layers, strict=True)
            },
        }
