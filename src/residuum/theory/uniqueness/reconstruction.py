"""The uniqueness certificate of what an attack brought back.

``selected``: the attack's own choice, those that several restarts hold where any do; each image with
the multiplier of the candidate that represents it. ``best``: all candidates of the restart with the least
loss, which together are one solution of the equation. The null space is that of the set chosen.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from residuum.errors import InputError, did_you_mean
from residuum.records import Knowledge, Reconstruction
from residuum.records.certificate import Uniqueness
from residuum.theory.uniqueness.certificate import TOLERANCE, Watch, uniqueness
from residuum.theory.uniqueness.cost import Cost, estimate

SETS = ("selected", "best")


@dataclass(frozen=True)
class Candidates:
    """What is certified. x: (k, *shape); lam: (k,) or (k, C); support, confidence: (k,) if selected."""

    x: Tensor
    labels: Tensor
    lam: Tensor
    support: Tensor | None
    confidence: Tensor | None
    restarts: int

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Question:
    """A certificate that can be asked for: its cost first, then the work."""

    model: nn.Module
    candidates: Candidates
    task: str
    box: tuple[Tensor, Tensor] | None

    def cost(self, samples: int | None = None, device: str = "cpu") -> Cost:
        """What :meth:`answer` will take."""
        return estimate(self.model, self.candidates.x, box=self.box, samples=samples, device=device)

    def answer(
        self, tolerance: float = TOLERANCE, samples: int | None = None, seconds: float = math.inf,
        device: str = "cpu", watch: Watch | None = None,
    ) -> Uniqueness:  # fmt: skip
        """The certificate."""
        part = self.candidates
        return uniqueness(
            self.model, part.x, part.labels, part.lam, task=self.task, box=self.box,
            tolerance=tolerance, samples=samples, seconds=seconds, device=device, watch=watch,
        )  # fmt: skip


def question(
    model: nn.Module, found: Reconstruction, which: str = "selected", task: str = "auto"
) -> Question:
    """The candidates of an attack, the network its gradients were taken at, and the granted box."""
    objective = str(found.settings.get("objective", ""))
    chosen = candidates(found, which)
    known = found.knowledge
    if objective == "weight-decay" and known.weight_decay and known.sample_count and known.loss:
        raise InputError(
            "Multipliers tied to the loss follow the candidates; the certificate holds them fixed.",
            "Attack without --weight-decay to have one.",
        )
    if objective == "ntk":
        model, chosen = _gradient_point(model, chosen, known, found.settings)
    return Question(model, chosen, task, known.box(chosen.x[0].double()))


def candidates(found: Reconstruction, which: str) -> Candidates:
    """The set ``which`` of a reconstruction; candidates that are not finite are left out."""
    if which not in SETS:
        raise InputError(f"No candidates {which!r}.", did_you_mean(which, SETS))
    part = found.selection
    if which == "selected" and part is not None and len(part):
        agreed = part.support > 1
        keep = agreed if bool(agreed.any()) else torch.ones_like(agreed)
        lam = found.lam[part.index]
        return Candidates(part.x[keep], part.labels[keep], lam[keep], part.support[keep],
                          part.confidence[keep], found.restarts)  # fmt: skip
    finite = found.x.flatten(1).isfinite().all(1)
    if not finite.any():
        raise InputError("The reconstruction holds no finite candidate.", "Attack again.")
    run = found.best_restart
    mine = finite if run is None else finite & (found.run == run)
    return Candidates(
        found.x[mine], found.labels[mine], found.lam[mine], None, None, found.restarts
    )


def _gradient_point(
    model: nn.Module, chosen: Candidates, known: Knowledge, settings: dict[str, Any]
) -> tuple[nn.Module, Candidates]:
    """NTK: the weights at which gradients were taken, and their multipliers (k, C)."""
    point = settings.get("gradients", "theta")
    if point == "both" or (point == "theta0" and known.theta0 is None):
        raise InputError(
            f"A certificate looks at one set of weights; this attack took gradients at {point}.",
            "Attack with --gradients theta.",
        )
    if point == "theta0":
        model = copy.deepcopy(model)
        model.load_state_dict({name: t.clone() for name, t in (known.theta0 or {}).items()})
    part = Candidates(chosen.x, chosen.labels, chosen.lam[:, 0], chosen.support, chosen.confidence,
                      chosen.restarts)  # fmt: skip
    return model, part
