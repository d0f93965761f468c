"""Compare time per candidate and peak memory at m = 100,000 with m = 1000.

The network is 784-1000-1000-1 in float32, with Adam. Each case is an attack in a process of its own:
initial candidates, one evaluation step, a warm-up step, timed steps and a last evaluation step. The peak is
thus that of a whole attack. The ratio is the time per candidate at the small m over that at the large m.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

from experiments.report import Report
from residuum.attacks import Auto
from residuum.attacks.stationarity.objectives import BinaryKKT
from residuum.attacks.stationarity.solver import Solver
from residuum.engine.explicit import evaluation_cost
from residuum.networks import MLP
from residuum.records import Knowledge

WIDTHS = (784, 1000, 1000, 1)
SMALL, LARGE = 1000, 100_000
SLOWER = 1.2  # at most, per candidate
MEMORY = {"cpu": 8.0, "cuda": 16.0}  # GB


def scaling(device: str) -> Report:
    """Compare many candidates with few, for the first layer alone and for all layers."""
    figures = []
    for layers in ("first", "all"):
        # The small case before and after the large one: a machine that slows down shows.
        costs = [_alone(m, layers, device) for m in (SMALL, LARGE, SMALL)]
        small = min(costs[0], costs[2], key=lambda case: case["us per candidate"])
        large = costs[1]
        figures.append(
            {
                "layers": layers,
                "us per candidate, m=1000": small["us per candidate"],
                "us per candidate, m=1000, other run": max(
                    costs[0]["us per candidate"], costs[2]["us per candidate"]
                ),
                "us per candidate, m=100000": large["us per candidate"],
                "slower": large["us per candidate"] / small["us per candidate"],
                "GB at m=100000": large["GB"],
                "GB estimated": large["GB estimated"],
            }
        )
    kind = device.split(":")[0]
    return Report(
        what="time per candidate and peak memory, 100 000 candidates against 1000",
        settings={"network": "784-1000-1000-1", "dtype": "float32", "optimizer": "adam"},
        seeds=(0,),
        figures=figures,
        ratio=min(1 / row["slower"] for row in figures),
        bar=1 / SLOWER,
        checks={
            f"peak memory below {MEMORY[kind]:g} GB": all(
                row["GB at m=100000"] < MEMORY[kind] for row in figures
            )
        },
    )


def _alone(m: int, layers: str, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.scaling", str(m), layers, device]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def case(m: int, layers: str, device: str) -> dict[str, Any]:
    """Time the first steps of one attack, and measure the peak memory of this process."""
    torch.manual_seed(0)
    config = Auto(
        restarts=1, steps=10**6, dtype="float32", layers=layers, device=device, lam_scale="mean"
    )
    solver = Solver(MLP(WIDTHS), BinaryKKT(), Knowledge(), config, WIDTHS[:1], 1, m)
    state = solver.solve(solver.start(), 0)
    steps = max(2, 20_000 // m)
    if device.startswith("cuda"):
        x, lam, seconds = _on_gpu(solver, state, steps)
    else:
        x, lam, seconds = _on_cpu(solver, state, steps)
    solver.gradients(x, lam, steps)  # the last look
    assert solver.problem.explicit is not None
    expected = sum(evaluation_cost(solver.problem.explicit, 1, m).memory.values())
    return {
        "us per candidate": 1e6 * seconds / m,
        "GB": _peak(device),
        "GB estimated": expected / 1e9,
    }


def _on_cpu(solver: Solver, state: Any, steps: int) -> tuple[Tensor, Tensor, float]:
    x, lam, moments = state.x.clone(), state.lam.clone(), dict[str, Tensor]()
    solver.step(x, lam, moments, 0, state.alive)
    times = []
    for step in range(1, steps + 1):
        start = time.perf_counter()
        solver.step(x, lam, moments, step, state.alive)
        times.append(time.perf_counter() - start)
    return x, lam, min(times)


def _on_gpu(solver: Solver, state: Any, steps: int) -> tuple[Tensor, Tensor, float]:
    solver.advance(state, 25, False)
    torch.cuda.synchronize()
    start = time.perf_counter()
    x, lam, _ = solver.advance(state, 25 * steps, False)
    torch.cuda.synchronize()
    return x, lam, (time.perf_counter() - start) / (25 * steps)


def _peak(device: str) -> float:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure one case, in a process of its own.")
    parser.add_argument("m", type=int, help="number of candidates")
    parser.add_argument("layers", help="first or all")
    parser.add_argument("device")
    options = parser.parse_args()
    sys.stdout.write(json.dumps(case(options.m, options.layers, options.device)))
