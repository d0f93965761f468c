"""Haim et al. 2022 on images: which networks its figures and tables are about."""

from __future__ import annotations

from dataclasses import replace

from residuum.reproduce.images import OURS, ImageRun

_MANY = replace(OURS, restarts=10, steps=16_000)


def _cifar(name: str, n: int = 500, **changes: object) -> ImageRun:
    candidates = {10: 20, 50: 100, 100: 200, 500: 400, 1000: 800}[n]
    attack = replace(_MANY if n <= 100 else OURS, candidates=candidates)
    return ImageRun(name, "cifar10", n, attack=attack, **changes)  # type: ignore[arg-type]


# The rows of Table 1, in its order; Fig. 4 plots them.
TABLE1 = (
    _cifar("n=50", 50),
    _cifar("n=100", 100),
    _cifar("n=500"),
    _cifar("n=1000", 1000),
    _cifar("100-100", hidden=(100, 100)),
    _cifar("1000-500-100", hidden=(1000, 500, 100)),
    _cifar("1000-500-100-50", hidden=(1000, 500, 100, 50)),
    _cifar("bias in all hidden layers", bias="hidden"),
)
# Appendix C.3: standard initialisation, mini-batches, few epochs; Fig. 16 plots them.
TABLE2 = (
    _cifar("standard init n=10", 10, training={"init": "default"}),
    _cifar("standard init n=50", 50, training={"init": "default"}),
    _cifar("SGD batch 50", training={"method": "sgd", "batch": 50}),
    _cifar("1e4 epochs CIFAR", training={"method": "gd", "steps": 10_000}),
    ImageRun(
        "1e4 epochs MNIST",
        "mnist",
        500,
        training={"method": "gd", "steps": 10_000},
        attack=replace(OURS, candidates=1000),
        box=True,
        metric="ncc",
    ),
)
MNIST = ImageRun(
    "MNIST", "mnist", 500, attack=replace(OURS, candidates=1000), box=True, metric="ncc"
)
CIFAR = replace(TABLE1[2], name="CIFAR")
RUNS = {run.name: run for run in (*TABLE1, *TABLE2, MNIST, CIFAR)}
