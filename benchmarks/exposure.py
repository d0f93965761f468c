"""Measure seconds and memory of one exposure: ``python -m benchmarks.exposure [--device cuda]``.

Two sizes: 500 records of a network 3072-1000-1000-1, and 50,000 records of a network 64-100-100-1. Results:
``benchmarks/results/exposure-DEVICE.json``.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any

import torch

from benchmarks import RESULTS
from experiments.exposure_common import run_cases
from experiments.programs import run_program
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.records.rundir import environment
from residuum.risk.run import expose
from residuum.training import TrainingConfig, initialize


def speed_case(n: int, arch: str, device: str, threads: int) -> dict[str, Any]:
    """Return the seconds and the peak memory of one exposure. Run it in a process of its own.

    The records lie near a few hundred patterns, as images do, and the first layer mixes them.
    """
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    d, h = (int(width) for width in arch.split(":")[1].split("-")[:2])
    patterns = torch.randn(min(d, 300), d, generator=generator)
    scale = torch.linspace(0, -2, len(patterns)).exp()
    x = (torch.randn(n + 1000, len(patterns), generator=generator) * scale) @ patterns / d**0.5
    y = torch.where(torch.randn(n + 1000, generator=generator) > 0, 1.0, -1.0)
    model = initialize(Architecture.parse(arch), TrainingConfig(dtype="float32"))
    theta = {name: p.detach().clone() for name, p in model.named_parameters()}
    mixed = torch.randn(h, min(n, 5000), generator=generator) @ x[: min(n, 5000)]
    theta["layers.0.weight"] += mixed / min(n, 5000)
    released, holdout = Network(theta, arch), Dataset(x[n:], y[n:])
    if device != "cpu":
        expose(released, holdout, holdout, device=device)  # the first products choose their kernels
    start = time.perf_counter()
    result = expose(released, Dataset(x[:n], y[:n]), holdout, device=device)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "n": n,
        "arch": arch,
        "device": device,
        "threads": threads,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(time.process_time(), 2),
        "peak_gb": round(peak / 2**20, 2),
        "gap": result.gap,
        "rank": result.rank,
    }


def main() -> int:
    """Measure the sizes that have no result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    device, threads = options.device, options.threads
    jobs = {
        "n=500, 3072-1000-1000-1": (500, "mlp:3072-1000-1000-1", device, threads),
        "n=50000, 64-100-100-1": (50_000, "mlp:64-100-100-1", device, threads),
    }
    head = {"device": device, "environment": environment(device)}
    run_cases(RESULTS / f"exposure-{device}.json", head, jobs, speed_case, 1)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
