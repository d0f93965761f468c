"""Settings that may differ from run to run while all runs share one program and one set of weights.

A setting that is the same in every run stays a plain number; one that differs is a tensor with one
value per run, shaped to broadcast against (R, m, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from residuum.attacks.config import AttackConfig
from residuum.errors import InputError

VARIED = ("lr_x", "lr_lam", "sigma", "sharpness", "lam_min")


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
        if self.runs:
            self._check()
        self._tensors = {
            name: torch.tensor(values, dtype=dtype, device=device)
            for name in VARIED
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
