"""Settings that may differ from run to run while all runs share one program and one set of weights.

A setting that is the same in every run stays a plain number; one that differs is a tensor with one
value per run, shaped to broadcast against (R, m, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from residuum.attacks.config import AttackConfig
from residuum.errors import InputError

NUMBERS = ("lr_x", "lr_lam", "sigma", "sharpness", "lam_min")
VARIED = (*NUMBERS, "priors")


class PerRun:
    """The settings of R runs. runs: one configuration each, or none where all are alike."""

    def __init__(
        self,
        config: AttackConfig,
        runs: Sequence[AttackConfig] | None,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> None:
        self.runs = tuple(runs or ())
        self.config = config
        self._numbers: dict[str, Any] = {"dtype": dtype, "device": device}
        if self.runs:
            self._check()
        self._tensors = {
            name: torch.tensor(values, **self._numbers)
            for name in NUMBERS
            if len(set(values := [getattr(run, name) for run in self.runs])) > 1
        }

    def value(self, name: str, ndim: int = 1) -> float | Tensor:
        """One number for all runs, or a tensor (R, 1, ...) of ``ndim`` dimensions."""
        if name not in self._tensors:
            return getattr(self.runs[0] if self.runs else self.config, name)
        tensor = self._tensors[name]
        return tensor.view(-1, *[1] * (ndim - 1))

    def differs(self, *names: str) -> bool:
        """Whether any of these settings is not the same in all runs."""
        return any(name in self._tensors for name in names)

    def priors(self) -> list[tuple[str, float | Tensor]]:
        """Every prior that some run has, with its weight: a number, or (R,) with 0 where it is absent."""
        if len({run.priors for run in self.runs}) < 2:
            return list(self.one(0).priors)
        own = [dict(run.priors) for run in self.runs]
        names = dict.fromkeys(name for priors in own for name in priors)
        return [
            (name, torch.tensor([priors.get(name, 0.0) for priors in own], **self._numbers))
            for name in names
        ]

    def one(self, run: int) -> AttackConfig:
        """The settings of one run."""
        return self.runs[run] if self.runs else self.config

    def _check(self) -> None:
        if len(self.runs) != self.config.restarts:
            raise InputError(
                f"Settings per run must be as many as restarts; got {len(self.runs)} for "
                f"{self.config.restarts}.",
                "Give one configuration per restart.",
            )
        for run in self.runs:
            common = {name: getattr(self.config, name) for name in VARIED}
            if replace(run, **common) != self.config:
                raise InputError(
                    f"Runs side by side may differ in {', '.join(VARIED)} alone.",
                    "Run configurations that differ otherwise one after the other.",
                )
