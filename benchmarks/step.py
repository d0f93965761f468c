"""Compare the time of one attack step with the published way and with its own matrix products.

The network is d-1000-1000-1 with m = 1000 candidates. The floor is the time of the twelve matrix products
of a step with all layers: five forward and backward, and seven of the double backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.published import PublishedAttack
from experiments.report import Report
from experiments.timing import clock
from residuum.attacks import Auto
from residuum.attacks.stationarity.objectives import BinaryKKT
from residuum.attacks.stationarity.solver import Solver
from residuum.engine.explicit import cpu_has_bf16, matmul_precision
from residuum.networks import MLP
from residuum.records import Knowledge
from residuum.settings import FAST_PRECISIONS

SHAPES = {"cifar": 3072, "mnist": 784}
WIDTH, M = 1000, 1000
BAR = {"cuda": 14.0, "cpu": 1.8}


def network(d: int, width: int = WIDTH) -> MLP:
    """Return a network d-width-width-1 with fixed weights."""
    torch.manual_seed(0)
    return MLP((d, width, width, 1))


def ours(d: int, device: str, steps: int, width: int = WIDTH, **settings: Any) -> float:
    """Return the milliseconds per step, without capture and compilation."""
    config = Auto(
        candidates=settings.pop("m", M),
        restarts=settings.pop("restarts", 1),
        steps=10**6,
        device=device,
        anneal="none",
        **settings,
    )
    model = network(d, width)
    torch.compiler.reset()  # every case is compiled for its own shapes
    solver = Solver(model, BinaryKKT(), Knowledge(), config, (d,), 1, config.candidates)
    state = solver.start()
    fast = config.precision in FAST_PRECISIONS
    with solver.precision(fast):
        if device == "cpu":
            moments: dict[str, Tensor] = {}
            x, lam = state.x.clone(), state.lam.clone()

            def run() -> None:
                for i in range(steps):
                    solver.step(x, lam, moments, i, state.alive)

            solver.step(x, lam, moments, 0, state.alive)
            return 1e3 * min(clock(run)[1] for _ in range(2)) / steps
        solver.advance(state, 25, fast)
        seconds = [clock(lambda: solver.advance(state, steps, fast), device)[1] for _ in range(3)]
    return 1e3 * sorted(seconds)[1] / steps


def published(d: int, device: str, dtype: torch.dtype, steps: int) -> float:
    """Return the milliseconds per step of the published attack."""
    attack = PublishedAttack(network(d).to(device, dtype), M)
    attack.step()

    def run() -> None:
        for _ in range(steps):
            attack.step()

    return 1e3 * clock(run, device)[1] / steps


def floor(d: int, device: str, repeats: int) -> float:
    """Return the milliseconds of the twelve products of a step, on a GPU in one CUDA graph."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    x, w1, w2, a, b = (
        random(M, d),
        random(WIDTH, d),
        random(WIDTH, WIDTH),
        random(M, WIDTH),
        random(M, WIDTH),
    )

    def products() -> None:
        x @ w1.T, a @ w2.T, b @ w2, b.T @ x, b.T @ a  # z1 z2 d1 T1 T2
        x @ w1.T, a @ w2.T, b @ w2.T, b @ w2, b @ w2, b @ w1, b @ w1  # adjoints

    with matmul_precision(device != "cpu"):
        products()
        if device == "cpu":
            return 1e3 * clock(products)[1]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                products()
        return (
            1e3
            * clock(lambda: [graph.replay() for _ in range(repeats)], device)[1]
            / (10 * repeats)
        )


def step(device: str) -> Report:
    """Measure a step of all kinds on both shapes."""
    gpu = device.startswith("cuda")
    steps, eager = (500, 40) if gpu else (3, 2)
    rows = []
    for name, d in SHAPES.items():
        row: dict[str, Any] = {"shape": name}
        row["published float64"] = published(d, device, torch.float64, eager)
        row["published float32"] = published(d, device, torch.float32, eager)
        row["float32"] = ours(d, device, steps, dtype="float32", layers="all")
        row["first layer, float32"] = ours(d, device, steps, dtype="float32", layers="first")
        if gpu:
            row["tf32"] = ours(d, device, steps, dtype="tf32", layers="all")
            row["tf32 compiled"] = ours(d, device, steps, dtype="tf32", layers="all", compile=True)
            row["first layer, tf32 compiled"] = ours(
                d, device, steps, dtype="tf32", layers="first", compile=True
            )
            row["bf16 compiled"] = ours(d, device, steps, dtype="bf16", layers="all", compile=True)
            row["first layer, bf16 compiled"] = ours(
                d, device, steps, dtype="bf16", layers="first", compile=True
            )
        elif cpu_has_bf16():
            row["bf16"] = ours(d, device, steps, dtype="bf16", layers="all")
            row["first layer, bf16"] = ours(d, device, steps, dtype="bf16", layers="first")
        row["floor"] = floor(d, device, 50)
        best = min(
            v
            for k, v in row.items()
            if k in ("float32", "tf32", "tf32 compiled", "bf16", "bf16 compiled")
        )
        row["ratio"] = row["published float32"] / best
        row["share of floor"] = row["floor"] / best
        rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    return Report(
        what="milliseconds per attack step, published way over ours (all layers, Adam)",
        settings={"width": WIDTH, "m": M, "network": "d-1000-1000-1"},
        seeds=(0,),
        figures=rows,
        ratio=rows[0]["ratio"],
        bar=BAR["cuda" if gpu else "cpu"],
    )
