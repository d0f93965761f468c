"""Measure what attacks on networks of any kind cost: time of a step, and memory.

    python -m benchmarks.generic [--only step,memory] [--device cuda] [--small]

step: A step of ``rs.attack`` is compared with eager double backward (``plain.residual``, the attack in one
file) in the same run. The networks are a convnet of 23,758 parameters with m = 40 candidates, a small ViT,
and a network whose forward pass asks the host, which no CUDA graph can hold. Four restarts are timed side by
side and one after another.

memory: The peak memory of an attack on ResNet-18 with 32 x 32 images and m = 100 candidates.

Both are written to ``benchmarks/results/generic-DEVICE.json``.
"""

from __future__ import annotations

import argparse
import resource
import sys
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import RESULTS
from experiments.networks import CNN, AsksHost, ViT, resnet
from experiments.programs import run_program
from experiments.report import device_name
from experiments.timing import clock
from residuum.attacks import Auto
from residuum.attacks.stationarity import plain
from residuum.attacks.stationarity.attack import Stationarity
from residuum.attacks.stationarity.objectives import MulticlassKKT
from residuum.io.checkpoints import as_network
from residuum.networks import SigmoidReLU, with_surrogate
from residuum.networks.probing import second_derivatives
from residuum.records import Knowledge, write_json
from residuum.records.rundir import environment, require_device
from residuum.stationarity import parameters

Row = dict[str, Any]
CANDIDATES, RATIO = 40, 3.0
RESNET_CANDIDATES, GIGABYTES = 100, 8.0


def solver(
    model: nn.Module, shape: tuple[int, ...], device: str, candidates: int, restarts: int
) -> Any:
    """Build the solver of an attack on a network."""
    config = Auto(
        steps=1000,
        restarts=restarts,
        candidates=candidates,
        device=device,
        dtype="float32" if device != "cpu" else "float64",
        layers="all",
        priors=(),
    )
    checkpoint, knowledge = as_network(model, shape=shape), Knowledge(shape=shape)
    attack = config.resolve_settings(checkpoint, knowledge)
    assert isinstance(attack, Stationarity)
    return attack.solver(checkpoint, knowledge)


def ours(
    model: nn.Module,
    shape: tuple[int, ...],
    device: str,
    m: int,
    restarts: int = 1,
    side_by_side: bool = True,
) -> float:
    """Return the milliseconds per step of ``rs.attack``, its update included."""
    attack = solver(model, shape, device, m, restarts)
    if attack.problem.generic.side_by_side or device == "cpu":
        attack.problem.generic.side_by_side = side_by_side
    state, count = attack.start(), 200 if device != "cpu" else 3
    if device == "cpu":
        x, lam, moments = state.x.clone(), state.lam.clone(), dict[str, Tensor]()

        def steps(n: int) -> None:
            for _ in range(n):
                attack.step(x, lam, moments, 0, state.moving)
    else:

        def steps(n: int) -> None:
            attack.advance(state, n, False)

    steps(3)
    steps(3)  # a graph is captured at the end of the first call
    return clock(lambda: steps(count), device)[1] / count * 1e3


@second_derivatives()
def eager(model: nn.Module, shape: tuple[int, ...], device: str, m: int) -> float:
    """Return the milliseconds per step of eager double backward and torch's Adam, as in ``plain.attack``."""
    real = torch.float32 if device != "cpu" else torch.float64
    net = model.to(device, real).eval()
    theta = parameters(net)
    thetas = [{name: t.clone().requires_grad_() for name, t in theta.items()}]
    objective = MulticlassKKT()
    y = objective.labels(m, 10, Knowledge()).to(device)
    # Drawn on the host: a capture that was given up leaves the device's generator unusable.
    x = (0.1 * torch.randn(m, *shape, dtype=real)).to(device).requires_grad_()
    lam = torch.rand(m, 10, dtype=real).to(device).requires_grad_()
    adam = torch.optim.Adam([x, lam], lr=0.01)
    smooth = with_surrogate(net, SigmoidReLU(10.0))

    def steps(n: int) -> None:
        for _ in range(n):
            r = plain.residual(smooth, thetas, theta, objective, x, y, lam)
            adam.zero_grad()
            plain.squares(r).sum().backward(inputs=[x, lam])
            adam.step()

    steps(5)
    count = 100 if device != "cpu" else 3
    return clock(lambda: steps(count), device)[1] / count * 1e3


def step(device: str) -> Row:
    """Compare the time of a step with that of eager double backward."""
    rows: Row = {}
    torch.manual_seed(0)
    cases = {
        "strided": (CNN(), (1, 28, 28)),
        "pooled": (CNN(pooled=True), (1, 28, 28)),
        "asks host": (AsksHost(), (1, 28, 28)),
        "vit": (ViT(), (1, 8, 8)),
    }
    for name, (model, shape) in cases.items():
        ms, reference = (f(model, shape, device, CANDIDATES) for f in (ours, eager))
        rows[name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "ms_per_step": ms,
            "eager_ms_per_step": reference,
            "ratio": reference / ms,
            **{
                f"ms_per_step_of_4_restarts_{order}": ours(
                    model, shape, device, CANDIDATES, 4, side_by_side
                )
                for order, side_by_side in (("side_by_side", True), ("one_after_another", False))
            },
        }
        print(f"{name}: {rows[name]}", flush=True)
    ratio = min(rows["strided"]["ratio"], rows["pooled"]["ratio"])
    return {"candidates": CANDIDATES, **rows, "ratio": ratio, "bar": RATIO, "met": ratio >= RATIO}


def memory(device: str, small: bool) -> Row:
    """Measure the peak bytes of an attack on ResNet-18, of the device or of this process."""
    torch.manual_seed(0)
    model = resnet((8, 16, 32, 64)) if small else resnet()
    m, shape = RESNET_CANDIDATES, (3, 32, 32)
    # Building the solver evaluates the network. The memory of the process is read before that.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    attack = solver(model, shape, device, m, 1)
    state = attack.start()
    if device == "cpu":
        _, seconds = clock(lambda: attack.gradients(state.x, state.lam, 0))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        steps = 1
    else:
        torch.cuda.reset_peak_memory_stats()
        steps = 20
        attack.advance(state, 2, False)
        _, seconds = clock(lambda: attack.advance(state, steps, False), device)
        peak = torch.cuda.max_memory_reserved()
    room = attack.problem.generic._chunk_size(attack.problem.points[0], state.x[0, :1])
    row = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "candidates": m,
        "peak_bytes": peak,
        "gigabytes": peak / 1e9,
        "bar": GIGABYTES,
        "chunk": room,
        "dtype": str(state.x.dtype),
        "saved_bytes_per_sample": attack.problem.generic.saved,
        "ms_per_step": seconds / steps * 1e3,
        "met": peak / 1e9 < GIGABYTES,
    }
    print(f"memory: {row}", flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results, and return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generic", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", default="step,memory", help="parts, separated by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--small", action="store_true", help="use small networks to try the script; write nothing"
    )
    options = parser.parse_args(arguments)
    require_device(options.device)
    rows: Row = {}
    for name in options.only.split(","):
        if name == "step":
            rows[name] = step(options.device)
        else:
            rows[name] = memory(options.device, options.small)
    if not options.small:
        path = RESULTS / f"generic-{device_name(options.device)}.json"
        write_json(path, {**rows, "environment": environment(options.device)})
        print(f"written: {path.name}")
    missed = [name for name, row in rows.items() if not row["met"]]
    print(f"bar missed: {', '.join(missed)}" if missed else "all bars met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(run_program(main))
