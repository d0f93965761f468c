"""Steps of the solver on buffers that never move, so that a CUDA graph can replay them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from residuum.attacks.config import AttackConfig, Step
from residuum.attacks.state import SolverState
from residuum.engine import Repeater

Moments = dict[str, Tensor]
OneStep = Callable[[Tensor, Tensor, Moments, Step, Tensor], None]


class StaticSteps:
    """step: changes x, lam and moments in place; chunk: steps that one captured graph holds.

    A captured graph keeps the shapes it was captured with: after growth a new object is needed.
    """

    def __init__(self, step: OneStep, config: AttackConfig, dtype: torch.dtype, chunk: int) -> None:
        self.step, self.config, self.dtype, self.chunk = step, config, dtype, chunk
        self.live: dict[str, Tensor] = {}
        self.moments: Moments = {}
        self.repeaters: dict[bool, Repeater] = {}

    def run(self, state: SolverState, count: int, fast: bool) -> tuple[Tensor, Tensor, Moments]:
        """``count`` steps from this state: candidates, multipliers and moments after them."""
        live, moments = self.live, self.moments
        now = {"x": state.x, "lam": state.lam, "moving": state.moving}
        if not live:
            for name, tensor in now.items():
                live[name] = torch.empty_like(tensor)
            live["step"] = torch.zeros((), dtype=self.dtype, device=self.config.device)
        if fast not in self.repeaters:  # a captured graph keeps the precision it was captured in
            body = torch.compile(self.step) if self.config.compile else self.step

            def one() -> None:
                body(live["x"], live["lam"], moments, live["step"], live["moving"])
                live["step"].add_(1)

            self.repeaters[fast] = Repeater(one, self.config.device, self.chunk)
        for name, tensor in now.items():
            live[name].copy_(tensor)
        live["step"].fill_(state.step)
        for name, moment in state.moments.items():
            moments.setdefault(name, torch.empty_like(moment)).copy_(moment)
        self.repeaters[fast].run(count)
        kept = {name: moment.clone() for name, moment in moments.items()}
        return live["x"].clone(), live["lam"].clone(), kept
