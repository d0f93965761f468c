"""What a certificate will cost, said before the work starts.

Per candidate, with K switches and k pixels that can move: the gradients of the deeper switches, then
``FACTORS`` steps of the interior-point method, each a product of k x K x k and a factorisation of k^3.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import torch

from residuum.networks import dense_chain
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.uniqueness.certificate import ENTRIES, Box

SIDE, REPEATS, FACTORS = 512, 3, 26  # sets with and without margins kept, 13 steps each
OVERHEAD = 0.01  # seconds per candidate for what is neither product nor factorisation


@dataclass(frozen=True)
class Cost:
    """samples, floating point operations of matrix products, seconds, memory in bytes."""

    samples: int
    operations: float
    seconds: float
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.samples} candidates, {self.operations / 1e9:.3g} GFlop, about "
            f"{self.seconds:.2g} s, {self.memory / 2**20:.0f} MiB"
        )


def estimate(
    given: KKTSet, *, box: Box | None = None, samples: int | None = None, device: str = "cpu"
) -> Cost:
    """Cost of certifying ``samples`` of a set, from the sizes and from the speed of this machine."""
    count = len(given) if samples is None else min(samples, len(given))
    d, rows = given.x[0].numel(), given.switches.values.shape[1]
    free = d
    if box is not None:
        low, high = (torch.as_tensor(end).to(given.x).expand_as(given.x) for end in box)
        free = int(((given.x > low) & (given.x < high)).flatten(1).double().sum(1).mean()) + 1
    chains = [chain for model in given.models if (chain := dense_chain(model)) is not None]
    widths = [[layer.out_features for layer in chain.linears[:-1]] for chain in chains]
    deeper = 2.0 * d * sum(a * b for own in widths for a, b in itertools.pairwise(own))
    operations = count * (deeper + FACTORS * (2.0 * rows * free**2 + free**3))
    speed = _speed(device)
    entries = max(ENTRIES[torch.device(device).type], rows * d)
    return Cost(count, operations, operations / speed + OVERHEAD * count, 8 * 5 * entries)


def _speed(device: str) -> float:
    """Operations per second of float64 products, measured in a few milliseconds."""
    a = torch.rand(SIDE, SIDE, dtype=torch.float64, device=device)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        a @ a
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * SIDE**3 / best
