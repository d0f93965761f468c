"""Networks that leak, trained on digits, and their audits: shared by several experiments."""

from __future__ import annotations

import time
from typing import Any

import torch

import residuum as rs


def train_digits(arch: str, samples: int, seed: int, noise: float = 0.0) -> tuple[Any, Any]:
    """Train a network on digits until it memorizes them, and return it with its samples.

    Args:
        arch: Such as ``mlp:64-100-100-1``. Ten outputs are trained on ten classes, one on odd or even.
        samples: Number of training samples. There are 500 held-out ones.
        seed: Of the samples and of the training.
        noise: Standard deviation of noise that is added to the weights, over that of each tensor.
    """
    labels = {"labels": "classes"} if arch.endswith("-10") else {}
    split = rs.load_dataset("digits", samples, seed=seed, holdout=500, **labels)
    state = rs.train(arch, split.train, rs.TrainingConfig(steps=1500, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    theta = {
        name: t
        + noise * t.std(correction=0) * torch.randn(t.shape, generator=generator, dtype=t.dtype)
        for name, t in state.theta.items()
    }
    return rs.Network(theta, arch), split


def audit(checkpoint: Any, split: Any, holdout: Any, budget: float, **options: Any) -> Any:
    """Audit with the value range and the mean of the training samples known to the attacker."""
    knowledge = {"shape": (1, 8, 8), "value_range": (0, 1), "mean": split.train.mean}
    torch.set_num_threads(1)
    return rs.audit(
        checkpoint,
        data=split.train,
        holdout=holdout,
        knowledge=knowledge,
        budget=budget,
        baselines=False,
        **options,
    )


def row_of(result: Any, start: float) -> dict[str, Any]:
    """Return what an experiment records of an audit."""
    controls = [(c.question, c.samples, c.reason) for c in result.checks.positive_controls]
    return {
        "exit_code": result.exit_code,
        "headline": result.verdict.headline,
        "recovered": result.verdict.recovered,
        "p_value": result.verdict.p_value,
        "reasons": [reason[:200] for reason in result.verdict.reasons],
        "positive_controls": controls,
        "audit_seconds": round(time.monotonic() - start, 2),
    }
