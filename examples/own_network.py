"""Audit a network of your own: plain PyTorch, trained by a plain loop.

    python examples/own_network.py --out runs/example-own

Replace ``samples`` and ``train`` by yours. This network is far from a KKT point, since plain gradient
descent from PyTorch's own initial weights stays near them, and some of its digits come back all the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import residuum as rs


def samples() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training samples (n, 1, 8, 8), labels -1 and +1, other samples, and the mean that was subtracted."""
    split = rs.load_dataset("digits", 30)
    assert split.train.mean is not None
    return split.train.x, split.train.y.double(), split.holdout.x, split.train.mean


def train(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """Full-batch gradient descent on the logistic loss."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 1, bias=False)
    ).double()
    descent = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(steps):
        descent.zero_grad()
        nn.functional.softplus(-y * model(x)[:, 0]).mean().backward()
        descent.step()
    return model


def main(arguments: list[str] | None = None) -> rs.AuditResult:
    """The audit of the network, printed and saved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/example-own"))
    parser.add_argument("--training-steps", type=int, default=3000)
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--steps", type=int, default=1000, help="steps of every attack")
    options = parser.parse_args(arguments)

    x, y, others, mean = samples()
    model = train(x, y, options.training_steps)
    result = rs.audit(
        model,
        data=(x, y),
        holdout=others,
        effort=options.effort,
        steps=options.steps,
        knowledge=rs.Knowledge(shape=(1, 8, 8), value_range=(0, 1), mean=mean),
    )
    print(f"recognized as {result.checkpoint.arch}")
    assert result.certificate is not None
    print(f"KKT residual of the training samples: {result.certificate.residual_plain:.3f}")
    print(f"verdict: {result.verdict.outcome}")
    for reason in result.verdict.reasons:
        print(f"  {reason}")
    print("report:", result.save(options.out) / "report.html")
    return result


if __name__ == "__main__":
    main()
