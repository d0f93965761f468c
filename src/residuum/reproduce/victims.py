"""Victims: networks trained for a figure, kept by the hash of what they were trained with."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residuum.attacks import AttackConfig, attack
from residuum.checkpoints import build_model
from residuum.records import Checkpoint, Dataset, Knowledge, Reconstruction, Record
from residuum.reproduce.cache import digest
from residuum.reproduce.context import Context
from residuum.training import TrainingConfig, released, train
from residuum.training.losses import LOSSES, choose_loss


@dataclass(frozen=True, eq=False)
class Victim(Record):
    """A trained network with its initial weights and how training went."""

    checkpoint: Checkpoint
    theta0: dict[str, Tensor]
    steps: int
    status: str
    seconds: float
    last: dict[str, float]

    @property
    def summary(self) -> dict[str, Any]:
        """What a table says of its training."""
        return {
            "arch": self.checkpoint.arch,
            "steps": self.steps,
            "status": self.status,
            "seconds": self.seconds,
            **self.last,
        }


def victim(
    context: Context, arch: str, data: Dataset, config: TrainingConfig, task: str = "binary"
) -> Victim:
    """Train on ``data``, or take the network that was trained on just that before."""
    key = digest("victim", arch, task, config.to_json(), data.x, data.y)

    def make(partial: Path) -> Victim:
        start = time.monotonic()
        with context.training() as watch:
            state = train(
                arch,
                data,
                config,
                task=task,
                device=context.device,
                state_path=partial,
                watch=watch,
            )
        return Victim(
            checkpoint=released(state, arch, data, task),
            theta0=state.theta0,
            steps=state.step,
            status=state.status,
            seconds=time.monotonic() - start,
            last=dict(state.history[-1]) if state.history else {},
        )

    return context.cache.fetch("victims", key, Victim, make)


def attacked(
    context: Context, checkpoint: Checkpoint, knowledge: Knowledge, config: AttackConfig
) -> Reconstruction:
    """Attack, or take what the same attack brought back before; what is known is not kept with it."""
    config = replace(config, device=context.device)
    settings = {k: v for k, v in config.to_json().items() if k != "device"}
    key = digest("attack", checkpoint.theta, checkpoint.arch, knowledge, settings)

    def make(partial: Path) -> Reconstruction:
        with context.attacking() as watch:
            found = attack(checkpoint, knowledge, config, state_path=partial, watch=watch)
        return found.replace(knowledge=Knowledge())

    return context.cache.fetch("attacks", key, Reconstruction, make)


@torch.no_grad()
def figures_of(checkpoint: Checkpoint, data: Dataset, loss: str = "") -> dict[str, float]:
    """Loss and accuracy of a network on labelled samples; regression counts signs."""
    task = checkpoint.task
    outputs = build_model(checkpoint).double()(data.x.double())
    if task == "multiclass":
        right = outputs.argmax(1) == data.y.long()
        y = data.y.long()
    else:
        y = data.y.double().reshape(-1)
        right = outputs[:, 0].sign() == y.sign()
    return {
        "loss": float(LOSSES[choose_loss(loss, task)](outputs, y)),
        "accuracy": float(right.double().mean()),
    }
