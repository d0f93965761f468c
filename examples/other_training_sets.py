"""Another training set that explains the same weights: why a small residual is no proof.

    python examples/other_training_sets.py

Every sample is split into two, moved apart along a direction in which no neuron changes its mind. What an
attack can see, the residual, stays as it was; the samples do not.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

import residuum as rs
from residuum.theory import KKTSet

ARCH = "mlp:64-100-1"


@dataclass(frozen=True)
class Found:
    """Residuals of the true and the other set, and of one moved beyond its budget; distances."""

    true: float
    other: float
    beyond: float
    distance: float
    sizes: tuple[int, int]


def main(arguments: list[str] | None = None) -> Found:
    """Train, split every sample by a share of its budget, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000, help="steps of training")
    options = parser.parse_args(arguments)

    split = rs.load_dataset("digits", options.samples)
    state = rs.train(ARCH, split.train, rs.TrainingConfig(steps=options.steps))
    checkpoint = rs.Network(state.theta, ARCH, input_shape=split.train.shape)
    kkt = KKTSet.from_samples(
        checkpoint.copy_module(torch.float64), split.train.x, split.train.y
    ).used()

    direction = kkt.directions("softest")  # no neuron sees it, as far as possible
    budget = kkt.budgets(direction).least  # how far a sample may go, exactly
    step = 0.9 * budget.clamp(max=100.0)
    other = kkt.split_all(direction, step)
    generator = torch.Generator().manual_seed(0)
    anywhere = torch.randn(direction.shape, generator=generator, dtype=torch.float64)
    anywhere = anywhere / anywhere.norm(dim=1, keepdim=True)
    pushed = _moved(kkt, anywhere.view_as(kkt.x) * step.mean())

    found = Found(
        kkt.residual, other.residual, pushed, kkt.distance(other), (len(kkt.x), len(other.x))
    )
    print(f"{found.sizes[0]} true samples: relative residual {found.true:.4f}")
    print(f"{found.sizes[1]} others: {found.other:.4f}, at least {found.distance:.1f} away")
    print(f"the true ones moved as far in random directions: {found.beyond:.4f}")
    return found


def _moved(kkt: KKTSet, by: torch.Tensor) -> float:
    """Residual of the samples moved, with the best multipliers they can have."""
    return KKTSet.from_samples(kkt.models[0], kkt.x + by, kkt.y).residual


if __name__ == "__main__":
    main()
