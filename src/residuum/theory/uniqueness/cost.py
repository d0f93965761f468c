"""What a certificate will cost, said before the work starts.

Per candidate, with K switches and k coordinates (free pixels with a box, rank(W1) without one):
gradients of the deeper switches, H = B^T B, three factorisations of k^3, B H^-1 for the pixels, and
ADMM steps of two products with B each, bound by memory rather than by arithmetic; once, the singular
values of the Jacobian where it is dense.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.networks import dense_chain
from residuum.theory.patterns import switches
from residuum.theory.uniqueness.cell import CLIMB_STEPS, CLIMBS, STEPS
from residuum.theory.uniqueness.nullspace import choose_method

SIDE, REPEATS = 512, 3
OVERHEAD = 0.02  # seconds per candidate for what is neither product nor factorisation


@dataclass(frozen=True)
class Cost:
    """samples, floating point operations of matrix products, bytes read by ADMM, seconds, memory."""

    samples: int
    operations: float
    traffic: float
    seconds: float
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.samples} candidates, {self.operations / 1e9:.3g} GFlop, about "
            f"{self.seconds:.2g} s, {self.memory / 2**20:.0f} MiB"
        )


def estimate(
    model: nn.Module, x: Tensor, *, box: tuple[float | Tensor, float | Tensor] | None = None,
    samples: int | None = None, device: str = "cpu",
) -> Cost:  # fmt: skip
    """Cost of certifying ``samples`` of x, from the sizes and from the speed of this machine."""
    count = len(x) if samples is None else min(samples, len(x))
    chain = dense_chain(model)
    d, layers = x[0].numel(), chain.linears if chain else []
    k = d if box is not None or not layers else min(d, layers[0].out_features)
    if box is not None:
        low, high = (torch.as_tensor(end).to(x).expand_as(x) for end in box)
        k = int(((x > low) & (x < high)).flatten(1).double().sum(1).mean()) + 1
    widths = [layer.out_features for layer in layers[:-1]]
    rows = (
        sum(widths)
        if layers
        else switches([model], x[:1].to(next(model.parameters()))).values.shape[1]
    )
    deeper = sum(a * b for a, b in itertools.pairwise(widths)) * d
    operations = count * (deeper + 4.0 * rows * k**2 * 2 + 5.0 * k**3 + 2.0 * rows * d)
    unknowns = len(x) * (d + 1)
    if choose_method(model, unknowns) == "dense":
        operations += 6.0 * unknowns**2 * sum(t.numel() for t in model.parameters())
    steps = STEPS / 2 + CLIMBS * CLIMB_STEPS / 2
    traffic = count * steps * 8.0 * (2 * (rows + (k if box is not None else 0)) * k + k * k)
    speed, bandwidth = _speed(device)
    seconds = operations / speed + traffic / bandwidth + OVERHEAD * count
    return Cost(count, operations, traffic, seconds, 8 * (3 * rows * d + 6 * k * k))


def _speed(device: str) -> tuple[float, float]:
    """Operations and bytes per second of float64 products, measured in a few milliseconds."""
    a = torch.rand(SIDE, SIDE, dtype=torch.float64, device=device)
    tall = torch.rand(8 * SIDE, SIDE, dtype=torch.float64, device=device)
    v = tall[0].clone()

    def clock(work: Callable[[], Tensor]) -> float:
        best = float("inf")
        for _ in range(REPEATS):
            start = time.perf_counter()
            work()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    return 2 * SIDE**3 / clock(lambda: a @ a), tall.numel() * 8 / clock(lambda: tall @ v)
