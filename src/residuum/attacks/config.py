"""Settings of runs that share one program, and the random numbers of all attacks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from residuum.errors import InputError
from residuum.settings.attack import NUMBERS, VARIED, AttackConfig

__all__ = ["AttackConfig", "PerRun", "stream"]


class PerRun:
    """Settings of R runs that share one program and one set of weights.

    runs: one configuration each, or none where all are alike. A setting that is the same in every
    run stays a plain number; one that differs is a tensor with one value per run, shaped to
    broadcast against (R, m, ...).
    """

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
            if len(set(values := [run.value(name) for run in self.runs])) > 1
        }

    def value(self, name: str, ndim: int = 1) -> float | Tensor:
        """One number for all runs, or a tensor (R, 1, ...) of ``ndim`` dimensions."""
        if name not in self._tensors:
            return self.one(0).value(name)
        tensor = self._tensors[name]
        return tensor.view(-1, *[1] * (ndim - 1))

    def priors(self) -> list[tuple[str, float | Tensor]]:
        """Every prior that some run has, with its weight: a number, or (R,) with 0 where it is absent."""
        if len({run.priors for run in self.runs}) < 2:
            return list(self.one(0).priors or ())
        own = [dict(run.priors or ()) for run in self.runs]
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
            common = {name: self.config.value(name) for name in VARIED}
            if run.changed(**common) != self.config:
                raise InputError(
                    f"Runs side by side may differ in {', '.join(VARIED)} alone.",
                    "Run configurations that differ otherwise one after the other.",
                )


def stream(*names: str | int) -> torch.Generator:
    """A generator of its own for these names: equal ones give equal numbers, on any machine.

    Datasets, initial weights and attacks all take small seeds. With one generator per plain seed an
    attack could start at the very numbers that synthetic data were made of, and find what it was given.
    """
    digest = hashlib.sha256(repr(("attack", *names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
