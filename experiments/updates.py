"""Updates of federated learning: what is recognized, and whether more knowledge ever recovers less.

    python -m experiments.updates recognition
    python -m experiments.updates knowledge

Part "recognition": no trained network may be taken for an update, with any of the file names below. Updates
should be recognized with and without their base.

Part "knowledge": the attack on the first layer gets an update of MNIST images with more and more knowledge:
the file alone, the value range, the base, base and value range. The same images are attacked as local weights
with their base. A sample counts as recovered if the NCC of a candidate exceeds 0.9. The same count over 400
held-out images, scaled to the number of samples, is the chance level.

Seeds below 100 were used for development. Results: ``experiments/results/updates.json``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments import RESULTS
from residuum.attacks.unmixing.attack import Unmix, UnmixOptimizerState
from residuum.io.updates import read_update, recognize_update
from residuum.networks.network import Network
from residuum.records import Knowledge
from residuum.similarity import cosine

RESULT = RESULTS / "updates.json"
RECOGNITION_SEEDS, KNOWLEDGE_SEEDS = range(100, 105), range(100, 106)
NAMES = ("model.pt", "model_update.pt", "weights.safetensors")
RECOVERED, HELD_OUT, SECONDS = 0.9, 400, 20.0
SHAPE = (1, 28, 28)
Theta = dict[str, Tensor]


def draw(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return n training images with labels, and held-out images."""
    arrays = np.load(Path(os.environ["RESIDUUM_DATA"]) / "mnist.npz")
    generator = np.random.default_rng(seed)
    rows = generator.choice(len(arrays["x_train"]), n, replace=False)
    test_rows = generator.choice(len(arrays["x_test"]), HELD_OUT, replace=False)
    x, y, z = arrays["x_train"][rows], arrays["y_train"][rows], arrays["x_test"][test_rows]
    images = (torch.tensor(pixels).float().reshape(-1, *SHAPE) / 255 for pixels in (x, z))
    return next(images), torch.tensor(y).long(), next(images)


def make_mlp(seed: int, *widths: int, bias: bool = True) -> nn.Sequential:
    """Return an MLP with the default initialization of torch."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for i in range(len(widths) - 1):
        layers += [nn.Linear(widths[i], widths[i + 1], bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_cnn(seed: int) -> nn.Sequential:
    """Return a small convolutional network."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def fit(
    model: nn.Module, x: Tensor, y: Tensor, steps: int, optimizer: torch.optim.Optimizer
) -> nn.Module:
    """Train a model on the full batch with the cross-entropy, or the squared error for one output."""
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(x)
        one_output = outputs.shape[1] == 1
        loss = (
            F.mse_loss(outputs[:, 0], y % 2 * 2.0 - 1)
            if one_output
            else F.cross_entropy(outputs, y)
        )
        loss.backward()
        optimizer.step()
    return model


def state(model: nn.Module) -> Theta:
    """Return a copy of the weights."""
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def subtract(after: Theta, before: Theta) -> Theta:
    """Return the weight difference."""
    return {name: after[name] - before[name] for name in after}


def trained_networks(seed: int) -> Iterator[tuple[str, Theta]]:
    """Yield trained networks of many kinds, none of which is an update."""
    x, y, _ = draw(seed, 200)
    few = x[:20], y[:20]

    def sgd(model: nn.Module, **options: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})

    def adam(model: nn.Module, **options: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), **{"lr": 1e-3, **options})

    def change(model: nn.Sequential, work: Callable[[nn.Sequential], None]) -> nn.Sequential:
        with torch.no_grad():
            work(model)
        return model

    def zero_head(model: nn.Sequential) -> None:
        model[-1].weight.zero_(), model[-1].bias.zero_()

    def zero_biases(model: nn.Sequential) -> None:
        for name, t in model.named_parameters():
            if name.endswith("bias"):
                t.zero_()

    def low_rank(model: nn.Sequential) -> None:
        u, s, v = torch.linalg.svd(model[1].weight, full_matrices=False)
        model[1].weight.copy_(u[:, :8] * s[:8] @ v[:8])

    def shrink(share: float) -> Callable[[nn.Sequential], None]:
        def work(model: nn.Sequential) -> None:
            for t in model.parameters():
                t.mul_(share)

        return work

    def prune(model: nn.Sequential) -> None:
        weight = model[1].weight
        weight.mul_(weight.abs() > weight.abs().quantile(0.9))

    def prune_neurons(model: nn.Sequential) -> None:
        for t in (model[1].weight, model[1].bias):
            t[::2] = 0

    shapes = {"wide": (784, 256, 10), "narrow": (784, 8, 10), "deep": (784, 64, 64, 64, 10)}
    for name, widths in shapes.items():
        for trainer in (sgd, adam):
            model = make_mlp(seed, *widths)
            yield f"{name} {trainer.__name__}", state(fit(model, x, y, 100, trainer(model)))
    model = make_mlp(seed, 784, 256, 10)
    yield "untrained", state(model)
    yield "weight decay", state(fit(model, x, y, 300, sgd(model, weight_decay=0.05)))
    model = make_mlp(seed, 784, 64, 1)
    yield "one output", state(fit(model, x, y, 100, sgd(model)))
    model = make_mlp(seed, 784, 64, 10, bias=False)
    yield "no bias", state(fit(model, x, y, 100, sgd(model)))
    model = make_cnn(seed)
    yield "convolutions", state(fit(model, x, y, 100, adam(model)))
    starts = {"zero head": zero_head, "zero biases": zero_biases, "low-rank start": low_rank}
    starts |= {f"start times {share:g}": shrink(share) for share in (0.1, 1e-2, 1e-3, 1e-4)}
    for name, work in starts.items():
        for samples in ((x, y), few):
            model = change(make_mlp(seed, 784, 128, 10), work)
            yield f"{name}, {len(samples[0])} samples", state(fit(model, *samples, 200, sgd(model)))
    model = change(change(make_mlp(seed, 784, 128, 10), low_rank), zero_head)
    yield "low-rank start and zero head", state(fit(model, *few, 200, sgd(model)))
    for name, work in {
        "low rank after training": low_rank,
        "low rank and zero head": lambda m: (low_rank(m), zero_head(m)),
        "pruned weights": prune,
        "pruned neurons": prune_neurons,
    }.items():
        model = make_mlp(seed, 784, 128, 10)
        fit(model, x, y, 100, adam(model))
        yield name, state(change(model, work))
    model = change(make_mlp(seed, 784, 128, 10), zero_head)
    frozen = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    yield "trained head only", state(fit(model, *few, 5, frozen))
    linear = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    change(linear, zero_head)
    yield "linear model from zero", state(fit(linear, *few, 100, sgd(linear)))


def updates(seed: int) -> Iterator[tuple[str, Theta, Theta]]:
    """Yield updates with the weights before."""
    makers = {"mlp": lambda: make_mlp(seed, 784, 256, 10), "cnn": lambda: make_cnn(seed)}
    for network, make in makers.items():
        for n in (1, 8, 20, 64):
            x, y, _ = draw(seed, n)
            model = make()
            before = state(model)
            F.cross_entropy(model(x), y).backward()
            gradient = {name: t.grad.clone() for name, t in model.named_parameters()}
            yield f"{network} gradient of {n}", gradient, before
            for name, steps, make_optimizer in (
                ("sgd, 1 step", 1, lambda m: torch.optim.SGD(m.parameters(), 0.1)),
                ("sgd, 5 steps", 5, lambda m: torch.optim.SGD(m.parameters(), 0.1)),
                ("momentum, 5 steps", 5, lambda m: torch.optim.SGD(m.parameters(), 0.05, 0.9)),
                ("adam, 5 steps", 5, lambda m: torch.optim.Adam(m.parameters(), 1e-3)),
            ):
                model = make()
                fit(model, x, y, steps, make_optimizer(model))
                yield f"{network} difference of {n}, {name}", subtract(state(model), before), before


def measure_recognition(seeds: range) -> dict[str, Any]:
    """Return which networks were taken for updates, and how many updates were recognized."""
    false_alarms, networks = [], 0
    recognized: dict[str, list[int]] = {}
    for seed in seeds:
        for kind, theta in trained_networks(seed):
            for name in NAMES:
                networks += 1
                if signs := recognize_update(theta, name):
                    false_alarms.append([kind, name, seed, *signs])
        for kind, update, before in updates(seed):
            counts = recognized.setdefault(kind, [0, 0, 0])
            counts[0] += bool(recognize_update(update, "round-3.pt"))
            counts[1] += bool(recognize_update(update, "delta.pt"))
            counts[2] += bool(recognize_update(update, "round-3.pt", before))
            local = {name: before[name] + update[name] for name in before}
            networks += 1
            if "difference" in kind and (signs := recognize_update(local, "local.pt", before)):
                false_alarms.append([f"local weights, {kind}", "local.pt", seed, *signs])
    return {
        "networks": networks,
        "false_alarms": false_alarms,
        "seeds": len(seeds),
        "recognized_unnamed_named_with_base": recognized,
    }


def count(x: Tensor, candidates: Tensor) -> int:
    """Return how many images have a candidate with an NCC above the limit."""
    if not len(candidates):
        return 0
    first, second = (t.flatten(1).double() for t in (x, candidates))
    ncc = cosine(first - first.mean(1, keepdim=True), second - second.mean(1, keepdim=True))
    return int((ncc.amax(1) > RECOVERED).sum())


def measure_knowledge(seed: int) -> dict[str, Any]:
    """Return how many samples of each update are recovered with each knowledge."""
    rows: dict[str, Any] = {"seed": seed}
    cases = {"gradient": (8, 0), "difference, 1 step": (20, 1), "difference, 5 steps": (20, 5)}
    for case, (n, steps) in cases.items():
        x, y, held_out = draw(seed, n)
        model = make_mlp(seed, 784, 256, 10)
        before = state(model)
        if steps:
            fit(model, x, y, steps, torch.optim.SGD(model.parameters(), 0.1))
            update = subtract(state(model), before)
        else:
            F.cross_entropy(model(x), y).backward()
            update = {name: t.grad.clone() for name, t in model.named_parameters()}
        arch = "mlp:784-256-10,bias=all"
        rename = {f"{1 + 2 * i}.{k}": f"layers.{i}.{k}" for i in (0, 1) for k in ("weight", "bias")}
        base = Network({rename[name]: t for name, t in before.items()}, arch)
        update = {rename[name]: t for name, t in update.items()}
        kind = "difference" if steps else "gradient"
        entry: dict[str, list[float]] = {}
        for level, has_base, has_range in (
            ("alone", False, False),
            ("range", False, True),
            ("base", True, False),
            ("base and range", True, True),
        ):
            knowledge = Knowledge(shape=SHAPE, value_range=(0.0, 1.0) if has_range else None)
            read = read_update(update, base if has_base else None, kind, arch)
            attack = UnmixOptimizerState(seconds=SECONDS)
            result = attack.run(read.network, read.add_to(knowledge)).x
            chance = n * count(held_out, result) / HELD_OUT
            entry[level] = [count(x, result), round(chance, 2)]
        if steps:
            local = Network({rename[name]: t for name, t in state(model).items()}, arch)
            knowledge = Knowledge(shape=SHAPE, theta0=base.theta)
            result = Unmix(seconds=SECONDS).run(local, knowledge).x
            entry["local weights and base"] = [
                count(x, result),
                round(n * count(held_out, result) / HELD_OUT, 2),
            ]
        rows[case] = {"n": n, **entry}
    return rows


def write(result: dict[str, Any], first_seed: int) -> None:
    """Write the results so far, unless the seeds are those of development."""
    if first_seed >= 100:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Run one part and write its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("recognition", "knowledge"))
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=0)
    options = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    default = RECOGNITION_SEEDS if options.part == "recognition" else KNOWLEDGE_SEEDS
    seeds = range(options.first_seed, options.first_seed + (options.seeds or len(default)))
    if options.part == "recognition":
        result["recognition"] = measure_recognition(seeds)
    else:
        rows = {row["seed"]: row for row in result.get("knowledge", [])}
        for seed in seeds:
            rows[seed] = rows.get(seed) or measure_knowledge(seed)
            result["knowledge"] = [*rows.values()]
            write(result, options.first_seed)
    write(result, options.first_seed)
    print(json.dumps(result[options.part], indent=1))


if __name__ == "__main__":
    main()
