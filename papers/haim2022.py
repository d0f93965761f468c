"""Haim et al. 2022, Reconstructing Training Data from Trained Neural Networks (arXiv 2206.07758)."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import residuum as rs
from papers import drawing
from papers import runs as common
from papers.runs import (
    OURS,
    Context,
    Figure,
    ImageRun,
    Outcome,
    Performed,
    Settings,
    figures_of,
    mlp,
)
from residuum.attacks import make_attack
from residuum.attacks.selection import DUPLICATE, group_candidates
from residuum.similarity import l2

TRAINED = (
    "victims are trained to the margin in a few thousand steps (descent on the log-loss) instead of "
    "1e6 epochs of gradient descent, unless the row is about the way of training"
)
MNIST_NOTE = (
    "on MNIST ssim3 > 0.4 says little in either direction (a near-blank candidate plus the mean image "
    "passes it): NCC ranks there"
)
INVERTED = "the paper chooses among 40 000 inverted images, here one start per candidate"
SCALE_FREE = (
    "losses are not comparable across ways of training: margin training rescales the weights of a "
    "homogeneous network so that its margin stays between 10 and 20"
)
DESCENT = {"method": "gd", "steps": 10_000}
# The rows of Table 1, in its order, which Fig. 4 plots, and of Table 2 (appendix C.3), which Fig. 16
# plots: what differs from CIFAR, n = 500; published train loss, test accuracy, test loss.
TABLE1: dict[str, tuple[dict[str, Any], tuple[float, float, float]]] = {
    "n=50": ({"n": 50}, (1.5e-6, 0.72, 2.14)),
    "n=100": ({"n": 100}, (2.0e-6, 0.74, 2.41)),
    "n=500": ({}, (4.0e-6, 0.78, 2.09)),
    "n=1000": ({"n": 1000}, (5.5e-6, 0.79, 1.96)),
    "100-100": ({"hidden": (100, 100)}, (3.0e-7, 0.77, 2.72)),
    "1000-500-100": ({"hidden": (1000, 500, 100)}, (1.2e-7, 0.78, 3.14)),
    "1000-500-100-50": ({"hidden": (1000, 500, 100, 50)}, (8.4e-7, 0.77, 2.57)),
    "bias in all hidden layers": ({"bias": "hidden"}, (4.3e-6, 0.77, 2.12)),
}
TABLE2: dict[str, tuple[dict[str, Any], tuple[float, float, float]]] = {
    "standard init n=10": ({"n": 10, "training": {"init": "default"}}, (8.3e-7, 0.71, 1.68)),
    "standard init n=50": ({"n": 50, "training": {"init": "default"}}, (1.5e-6, 0.74, 1.72)),
    "SGD batch 50": (
        {"training": {"method": "sgd", "batch": 50, "steps": 30_000}},
        (4.0e-6, 0.77, 2.21),
    ),
    "1e4 epochs CIFAR": ({"training": DESCENT}, (0.0039, 0.77, 1.22)),
    "1e4 epochs MNIST": ({"training": DESCENT, "data": "mnist"}, (0.014, 0.87, 0.55)),
}


def _run(name: str, n: int = 500, data: str = "cifar10", **changes: Any) -> ImageRun:
    if data == "mnist":
        attack, changes = OURS.changed(candidates=1000), {"box": True, "metric": "ncc", **changes}
    else:
        attack = OURS.changed(candidates=2 * n, restarts={500: 2, 1000: 1}.get(n, 4))
    return ImageRun(name, data, n, attack=attack, **changes)


RUNS = {name: _run(name, **changes) for name, (changes, _) in {**TABLE1, **TABLE2}.items()}
RUNS |= {"CIFAR": _run("CIFAR"), "MNIST": _run("MNIST", data="mnist")}
# Published figures of the n = 500 networks, two released runs pooled.
Names = tuple[str, ...]
OWN, BOTH = ("residuum",), ("residuum", "published")
_CIFAR = {"ssim3 above 0.4": 17, "best ssim3": 0.636, "top-10 mean ssim3": 0.536}
_MNIST = {"best NCC": 0.943, "median NCC of the top 30": 0.815}
PUBLISHED = {("CIFAR", attack): _CIFAR for attack in BOTH}
PUBLISHED |= {("MNIST", attack): _MNIST for attack in BOTH}
PUBLISHED["CIFAR", "weights"] = {"ssim3 above 0.4": 4, "best ssim3": 0.611}
TEST_ACCURACY = {"CIFAR": 0.776, "MNIST": 0.880}


def images(context: Context, runs: Names, attacks: Names = OWN, show: str = "grid") -> Outcome:
    """Every run attacked and counted. show: the best images (grid), those of every attack (methods), or
    score against output (scatter).
    """
    out = Outcome(details={"runs": {}}, notes=[TRAINED])
    if context.scale.name != "paper":
        attacks = tuple(name for name in attacks if name != "published")
    for name in runs:
        done = RUNS[name].perform(context, *attacks)
        out.details["runs"][name] = done.details()
        count(out, done)
        if show == "grid":
            out.keep(name, done.best(attacks[-1]))
        elif show == "methods":
            for attack in attacks:
                out.keep(f"{name}/{attack}", done.best(attack, 30))
        else:
            points = done.against_output()
            out.keep(name, points)
            by_margin(out, done, points)
    out.notes += [INVERTED] if show == "methods" else []
    out.notes += [MNIST_NOTE] if any(RUNS[name].data == "mnist" for name in runs) else []
    return out


def count(out: Outcome, done: Performed) -> None:
    """Counts of every attack on one run, beside published ones and chance."""
    run = done.run.name
    for attack, arm in done.arms.items():
        head = run if len(done.arms) == 1 else f"{run}, {attack}"
        ncc, ssim = (arm.scores.metrics[name] for name in ("ncc", "ssim3"))
        nearest = [row.matches["ncc"].nearest for row in arm.scores.per_sample]
        top = sorted((v for v in nearest if v is not None), reverse=True)[:30]
        out.recovered(head, arm.scores)
        chance = {"ssim3 above 0.4": ssim.above_published_threshold_holdout}
        for what, value in {
            "ssim3 above 0.4": ssim.above_published_threshold,
            "best ssim3": ssim.best,
            "top-10 mean ssim3": ssim.top10_mean,
            "best NCC": ncc.best,
            "median NCC of the top 30": float(np.median(top)),
        }.items():
            published = PUBLISHED.get((run, attack), {}).get(what)
            out.row(f"{head}: {what}", value, published, chance.get(what))
    if run in TEST_ACCURACY:
        accuracy = figures_of(done.victim.checkpoint, done.split.holdout)["accuracy"]
        out.row(f"{run}: test accuracy", accuracy, TEST_ACCURACY[run], 0.5)


def by_margin(out: Outcome, done: Performed, points: dict[str, Any]) -> None:
    """Who is recovered: samples on the margin, not those far from it."""
    order = points["margin"].argsort()
    quarter = max(1, len(order) // 4)
    ends = {"nearest the margin": order[:quarter], "farthest from it": order[-quarter:]}
    for where, some in ends.items():
        what = f"{done.run.name}: median {done.run.metric}, quarter {where}"
        out.row(what, float(np.nanmedian(points["score"][some])))


def training_table(context: Context, table: dict[str, Any]) -> Outcome:
    """Loss and accuracy of every victim, as in Tables 1 and 2."""
    out = Outcome(details={"victims": {}}, notes=[TRAINED, SCALE_FREE])
    for name, (_, (train_loss, test_accuracy, test_loss)) in table.items():
        split, net = RUNS[name].trained(context)
        train, test = (figures_of(net.checkpoint, part) for part in (split.train, split.holdout))
        out.details["victims"][name] = net.summary
        all_right = None if name == "1e4 epochs MNIST" else 1.0
        out.row(f"{name}: train accuracy", train["accuracy"], all_right)
        out.row(f"{name}: train loss", train["loss"], train_loss)
        out.row(f"{name}: test accuracy", test["accuracy"], test_accuracy, 0.5)
        out.row(f"{name}: test loss", test["loss"], test_loss)
    return out


# Fig. 2: twenty points on a circle. Candidates are filtered by their multiplier, then near-duplicates
# are dropped. The published filter lambda < 5 holds for one network's scale (lambda is multiplied by
# c^(2-L) when theta is by c); here a candidate is dropped below a share of the heaviest one, the
# multipliers of its near-duplicates counted in: merged they are one candidate (Refael et al. 2025,
# Lemma 2), and ten that share a point would each be too light. Duplicates lie within 0.03, as
# published; a point counts as recovered when a candidate of its own lies within 0.05, this project's
# choice.
WITHIN = 0.05
LEAST = 0.2  # of the heaviest multiplier, near-duplicates counted in
POINTS, CANDIDATES = 20, 100
# By scale: hidden widths, training steps, attack steps, restarts.
CIRCLE = {
    "tiny": ((300,), 2500, 2500, 1),
    "small": ((400,), 4000, 5000, 4),
    "paper": ((1000, 1000), 20_000, 5000, 4),
}
FILTER_NOTE = (
    f"the published filter lambda < 5 belongs to one network's scale; here {LEAST:g} of the heaviest "
    "multiplier, those of near-duplicates summed"
)
START_NOTE = "first-layer init 0.1 instead of 1e-4, training to the margin instead of 1e6 epochs"


def circle(context: Context) -> Outcome:
    """Train on the circle, attack, filter, count; model inversion and a rotated circle beside."""
    hidden, training_steps, steps, restarts = CIRCLE[context.scale.name]
    data = rs.load_dataset("circle", POINTS, seed=context.seed).train
    options: dict[str, Any] = {"steps": training_steps, "init_scale": 0.1, "dtype": "float64"}
    net = context.train(mlp(data, hidden), data, **options)
    rates: Settings = {"sigma": 0.5, "lr_x": 0.02, "lr_lam": 0.02, "lr_decay": 0.02}
    base: Settings = {"candidates": CANDIDATES, "seed": context.seed}
    dtype = "float32" if context.device.startswith("cuda") else "auto"
    config = make_attack(restarts=restarts, steps=steps, dtype=dtype, **rates, **base)
    found = context.attack(net.checkpoint, rs.Knowledge(), config)
    inversion = make_attack("model-inversion", **base)
    inverted = context.attack(net.checkpoint, rs.Knowledge(), inversion).x.double()
    x, weight = found.x.double(), found.weight.double()
    heavy = heavy_enough(x, weight)
    groups = group_candidates(x[heavy], weight[heavy], 0.0, DUPLICATE)
    kept = x[heavy][[int(one[weight[heavy][one].argmax()]) for one in groups]]
    parts = {"train": data.x, "labels": data.y, "all": x, "weight": weight, "heavy": x[heavy]}
    parts |= {"kept": kept, "inverted": inverted}
    details = {"victim": net.summary, "attack": found.settings, "within": WITHIN}
    out = Outcome(details={**details, "least_share": LEAST}, notes=[FILTER_NOTE, START_NOTE])
    out.arrays = {name: part.numpy() for name, part in parts.items()}
    half = torch.tensor(math.pi / POINTS).double()  # chance: the circle turned by half a spacing
    turn = torch.stack([half.cos(), -half.sin(), half.sin(), half.cos()]).reshape(2, 2)
    for what, points, published, note in (
        ("recovered", kept, 20, f"of {POINTS}, one-to-one within {WITHIN:g}"),
        ("model inversion", inverted, 7, ""),
    ):
        chance = matched(points, data.x @ turn.T)
        out.row(what, matched(points, data.x), published, chance, note=note)
    out.row("candidates after both filters", len(kept))
    farthest = float(l2(kept, data.x).amin(0).max())
    out.row("largest distance of a true point to a candidate", farthest)
    out.row("first-layer residual", common.first_residual(found))
    return out


def heavy_enough(x: Tensor, weight: Tensor) -> Tensor:
    """Candidates whose multipliers, those of near-duplicates included, are no small share of the most."""
    mass = (l2(x, x) <= DUPLICATE).to(weight) @ weight
    return mass >= LEAST * mass.max()


def matched(points: Tensor, truth: Tensor) -> int:
    """Largest one-to-one matching of true points to candidates closer than ``WITHIN``."""
    near = (l2(points, truth) < WITHIN).numpy().astype(float)
    return int(np.sum(near[linear_sum_assignment(-near)]))


def _images(title: str, show: str, *runs: str, attacks: Names = OWN) -> Figure:
    draw = {"grid": drawing.grids, "methods": drawing.methods, "scatter": drawing.outputs}[show]
    return Figure(title, partial(images, runs=runs, attacks=attacks, show=show), draw)


def _table(number: int, table: dict[str, Any]) -> Figure:
    title = f"loss and accuracy of the networks of Fig. {number}"
    return Figure(title, partial(training_table, table=table))


_BEST, _OUTPUT = "best reconstructions", "score against output"
_BASELINES = ("model-inversion", "weights")
_INVERTED = "against model inversion and first-layer weights, CIFAR n=500"
FIGURES: dict[str, Figure] = {
    "fig1": _images(f"{_BEST}, CIFAR n=50", "grid", "n=50"),
    "fig2": Figure("20 points on a circle, with both filters", circle, drawing.circle),
    "fig3": _images(f"{_BEST}, CIFAR and MNIST n=500", "grid", "CIFAR", "MNIST"),
    "released": _images("the released settings, CIFAR n=500", "grid", "CIFAR", attacks=BOTH),
    "fig4": _images(f"{_OUTPUT} for four n and four architectures", "scatter", *TABLE1),
    "fig5": _images(_INVERTED, "methods", "CIFAR", attacks=("residuum", *_BASELINES)),
    "fig16": _images(f"{_OUTPUT}: standard init, mini-batches, few epochs", "scatter", *TABLE2),
    "table1": _table(4, TABLE1),
    "table2": _table(16, TABLE2),
}
# The runs of Fig. 4 that no earlier figure shows and those of Fig. 16, one grid each.
for i, run in enumerate(("n=100", "n=1000", *list(TABLE1)[4:])):
    FIGURES[f"fig{6 + i}"] = _images(f"best 45, CIFAR, {run}", "grid", run)
for i, run in enumerate(TABLE2):
    FIGURES[f"fig{17 + i}"] = _images(f"best 45, {run}", "grid", run)
for i, (attack, run) in enumerate(itertools.product(_BASELINES, ("CIFAR", "MNIST"))):
    FIGURES[f"fig{12 + i}"] = _images(f"{attack}, {run} n=500", "methods", run, attacks=(attack,))
