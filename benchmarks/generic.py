"""Networks of any kind: what a step costs, what it holds in memory, and claims that are not true.

    python -m benchmarks.generic [--only step,memory,strangers] [--device cuda] [--jobs 8] [--small]

step: a convnet of 23 758 parameters, m = 40, against eager double backward (``plain.residual``, the
attack in one file) in the same run; also four restarts side by side and one after another, a small ViT,
and a forward that asks the host, which no CUDA graph can hold. memory: ResNet-18 on 32 x 32 images,
m = 100, the peak of an attack. Both into results/generic-<device>.json. strangers: 20 audits of networks
(CNN with batch norm, small ResNet, GELU MLP, small ViT) that claim data they never saw, into
results/generic-strangers.json, row by row.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import residuum as rs
from benchmarks.harness import RESULTS, clock, device_name, ended, threads
from residuum.attacks import Auto
from residuum.attacks.stationarity import plain
from residuum.attacks.stationarity.attack import Stationarity
from residuum.attacks.stationarity.objectives import MulticlassKKT
from residuum.io.checkpoints import as_network
from residuum.networks import SigmoidReLU, with_surrogate
from residuum.networks.probing import second_derivatives
from residuum.records import Dataset, Knowledge, write_json
from residuum.records.rundir import environment, require_device
from residuum.stationarity import parameters

Row = dict[str, Any]
CANDIDATES, RATIO = 40, 3.0
RESNET_CANDIDATES, GIGABYTES = 100, 8.0
MOST_LEAKS, BETWEEN = 1, (0.4, 0.6)
STRANGERS = RESULTS / "generic-strangers.json"


class CNN(nn.Module):
    """What people train on digits."""

    def __init__(self, pooled: bool = False, shape: tuple[int, int, int] = (1, 28, 28)) -> None:
        super().__init__()
        stride = 1 if pooled else 2
        self.pooled, side = pooled, shape[1] // 4
        self.c1 = nn.Conv2d(shape[0], 16, 3, stride, padding=1)
        self.c2 = nn.Conv2d(16, 32, 3, stride, padding=1)
        self.f1, self.f2 = nn.Linear(32 * side * side, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.c1, self.c2):
            x = F.relu(layer(x))
            x = F.max_pool2d(x, 2) if self.pooled else x
        return self.f2(F.relu(self.f1(x.flatten(1))))


class AsksHost(CNN):
    """A branch on a value: no CUDA graph can hold it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if float(x.detach().abs().max()) < 1e9 else 2.0)


class Residual(nn.Module):
    """Two convolutions and a way around them (He et al. 2015)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.c2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.n1, self.n2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.around = nn.Sequential()
        if stride > 1 or inputs != width:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        z = self.relu(self.n1(self.c1(x)))
        return self.relu(self.n2(self.c2(z)) + self.around(x))


def resnet(
    widths: tuple[int, ...] = (64, 128, 256, 512),
    blocks: int = 2,
    channels: int = 3,
    outputs: int = 10,
) -> nn.Module:
    """ResNet-18 for small images: 3 x 3 stem, no pooling before the blocks."""
    stem = [
        nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(True),
    ]
    layers, inputs = [], widths[0]
    for i, width in enumerate(widths):
        for k in range(blocks):
            layers.append(Residual(inputs, width, 2 if i and not k else 1))
            inputs = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, outputs)]
    return nn.Sequential(*stem, *layers, *head)


class ViT(nn.Module):
    """Patches of 2 x 2, two layers of attention, the mean of all places."""

    def __init__(self, channels: int = 1, side: int = 8, width: int = 24) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, width, 2, stride=2)
        self.place = nn.Parameter(0.02 * torch.randn((side // 2) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.patch(x).flatten(2).transpose(1, 2) + self.place).mean(1))


# what a step costs


def solver(
    model: nn.Module, shape: tuple[int, ...], device: str, candidates: int, restarts: int
) -> Any:
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
    """Milliseconds per step of ``rs.attack``, its update included."""
    found = solver(model, shape, device, m, restarts)
    if found.problem.generic.side_by_side or device == "cpu":
        found.problem.generic.side_by_side = side_by_side
    state, count = found.start(), 200 if device != "cpu" else 3
    if device == "cpu":
        x, lam, moments = state.x.clone(), state.lam.clone(), dict[str, Tensor]()

        def steps(n: int) -> None:
            for _ in range(n):
                found.step(x, lam, moments, 0, state.moving)
    else:

        def steps(n: int) -> None:
            found.advance(state, n, False)

    steps(3)
    steps(3)  # a graph is captured at the end of the first call
    return clock(lambda: steps(count), device)[1] / count * 1e3


@second_derivatives()
def eager(model: nn.Module, shape: tuple[int, ...], device: str, m: int) -> float:
    """Milliseconds per step of eager double backward and torch's Adam, as in ``plain.attack``."""
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
    found: Row = {}
    torch.manual_seed(0)
    cases = {
        "strided": (CNN(), (1, 28, 28)),
        "pooled": (CNN(pooled=True), (1, 28, 28)),
        "asks host": (AsksHost(), (1, 28, 28)),
        "vit": (ViT(), (1, 8, 8)),
    }
    for name, (model, shape) in cases.items():
        ms, reference = (f(model, shape, device, CANDIDATES) for f in (ours, eager))
        found[name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "ms_per_step": ms,
            "eager_ms_per_step": reference,
            "ratio": reference / ms,
            **{
                f"ms_per_step_of_4_restarts_{how}": ours(
                    model, shape, device, CANDIDATES, 4, beside
                )
                for how, beside in (("side_by_side", True), ("one_after_another", False))
            },
        }
        print(f"{name}: {found[name]}", flush=True)
    ratio = min(found["strided"]["ratio"], found["pooled"]["ratio"])
    return {"candidates": CANDIDATES, **found, "ratio": ratio, "bar": RATIO, "met": ratio >= RATIO}


def memory(device: str, small: bool) -> Row:
    """Peak bytes of an attack on ResNet-18: of the device, or of this process."""
    torch.manual_seed(0)
    model = resnet((8, 16, 32, 64)) if small else resnet()
    m, shape = RESNET_CANDIDATES, (3, 32, 32)
    # Making the solver evaluates already: the process is looked at before that.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = solver(model, shape, device, m, 1)
    state = found.start()
    if device == "cpu":
        _, seconds = clock(lambda: found.gradients(state.x, state.lam, 0))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        steps = 1
    else:
        torch.cuda.reset_peak_memory_stats()
        steps = 20
        found.advance(state, 2, False)
        _, seconds = clock(lambda: found.advance(state, steps, False), device)
        peak = torch.cuda.max_memory_reserved()
    room = found.problem.generic._chunk_size(found.problem.points[0], state.x[0, :1])
    row = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "candidates": m,
        "peak_bytes": peak,
        "gigabytes": peak / 1e9,
        "bar": GIGABYTES,
        "chunk": room,
        "dtype": str(state.x.dtype),
        "saved_bytes_per_sample": found.problem.generic.saved,
        "ms_per_step": seconds / steps * 1e3,
        "met": peak / 1e9 < GIGABYTES,
    }
    print(f"memory: {row}", flush=True)
    return row


# claims that are not true


def stranger(kind: str) -> nn.Module:
    return {
        "cnn": lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64, 10),
        ),
        "resnet": lambda: resnet((6, 12), 1, 1),
        "gelu": lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 60), nn.GELU(), nn.Linear(60, 10)
        ),
        "vit": ViT,
    }[kind]()


KINDS = ("cnn", "resnet", "gelu", "vit")


def fitted(kind: str, data: Dataset, seed: int, epochs: int = 60) -> nn.Module:
    """As people train: Adam, batches of 32, cross entropy."""
    torch.manual_seed(seed)
    model = stranger(kind).train()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    x, y = data.x.float(), data.y.long()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            if len(rows) > 1:
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
    return model.eval()


def claim(kind: str, seed: int, small: bool = False) -> Row:
    """A network of 150 digits is said to have had 100 others."""
    start = time.monotonic()
    with threads(1):
        split = rs.load_dataset(
            "digits", 150, seed=seed, holdout=1500, task="multiclass", center=False
        )
        model = fitted(kind, split.train, seed, 5 if small else 60)
        others = split.holdout
        claimed, rest = (
            others.replace(x=others.x[rows], y=others.y[rows])
            for rows in (slice(0, 100), slice(100, None))
        )
        result = rs.audit(
            model,
            data=claimed,
            holdout=rest,
            knowledge=Knowledge(shape=(1, 8, 8), value_range=(0, 1)),
            effort="quick" if small else "standard",
            steps=20 if small else None,
            seed=seed,
            task="multiclass",
        )
    own = result.membership
    return {
        "kind": kind,
        "seed": seed,
        "outcome": result.verdict.outcome,
        "recovered": result.verdict.recovered,
        "expected_by_chance": result.verdict.expected_by_chance,
        "p_value": result.verdict.p_value,
        "membership_auc": None if own is None or own.loss is None else own.loss.auc,
        "ran": [row.name for row in result.attacks if row.ran],
        "seconds": round(time.monotonic() - start, 1),
    }


def strangers(jobs: int, small: bool, each: int = 5) -> Row:
    wanted = [(kind, seed) for seed in range(1 if small else each) for kind in KINDS]
    rows: list[Row] = []
    if STRANGERS.is_file() and not small:  # go on
        rows = json.loads(STRANGERS.read_text())["rows"]
    done = {(row["kind"], row["seed"]) for row in rows}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(claim, *one, small) for one in wanted if one not in done]
        for finished in as_completed(waiting):
            rows.append(finished.result())
            print(rows[-1], flush=True)
            if not small:
                write_json(STRANGERS, _summary(rows))
    return _summary(rows)


def _summary(rows: list[Row]) -> Row:
    leaks = sum(row["outcome"] == "leak" for row in rows)
    areas = [row["membership_auc"] for row in rows if row["membership_auc"] is not None]
    mean = sum(areas) / len(areas) if areas else None
    inside = bool(areas) and all(BETWEEN[0] <= area <= BETWEEN[1] for area in areas)
    return {
        "claims": len(rows),
        "leaks": leaks,
        "most_leaks": MOST_LEAKS,
        "mean_membership_auc": mean,
        "least_membership_auc": min(areas, default=None),
        "most_membership_auc": max(areas, default=None),
        "met": leaks <= MOST_LEAKS and inside,
        "rows": rows,
        "environment": environment("cpu"),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generic")
    parser.add_argument("--only", default="step,memory", help="of step, memory, strangers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument(
        "--small", action="store_true", help="to see that it runs; nothing is written"
    )
    options = parser.parse_args(arguments)
    require_device(options.device)
    found: Row = {}
    for name in options.only.split(","):
        if name == "strangers":
            found[name] = strangers(options.jobs, options.small)
        else:
            found[name] = (
                step(options.device) if name == "step" else memory(options.device, options.small)
            )
    measured = {name: row for name, row in found.items() if name != "strangers"}
    if measured and not options.small:
        path = RESULTS / f"generic-{device_name(options.device)}.json"
        write_json(path, {**measured, "environment": environment(options.device)})
        print(f"written: {path.name}")
    missed = [name for name, row in found.items() if not row["met"]]
    print(f"bar missed: {', '.join(missed)}" if missed else "all bars met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(ended(main))
