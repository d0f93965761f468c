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
    measure_loss_and_accuracy,
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
# The rows of Table 1 (plotted in Fig. 4) and of Table 2 (appendix C.3, plotted in Fig. 16): the differences
# from CIFAR with n = 500, then the published train loss, test accuracy and test loss.
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
# Published figures of the networks with n = 500, for two released runs together.
Names = tuple[str, ...]
OURS_ONLY, OURS_AND_PUBLISHED = ("residuum",), ("residuum", "published")
_CIFAR = {"ssim3 above 0.4": 17, "best ssim3": 0.636, "top-10 mean ssim3": 0.536}
_MNIST = {"best NCC": 0.943, "median NCC of the top 30": 0.815}
PUBLISHED = {("CIFAR", attack): _CIFAR for attack in OURS_AND_PUBLISHED}
PUBLISHED |= {("MNIST", attack): _MNIST for attack in OURS_AND_PUBLISHED}
PUBLISHED["CIFAR", "weights"] = {"ssim3 above 0.4": 4, "best ssim3": 0.611}
TEST_ACCURACY = {"CIFAR": 0.776, "MNIST": 0.880}


def images(
    context: Context, runs: Names, attacks: Names = OURS_ONLY, show: str = "grid"
) -> Outcome:
    """Attack runs and count recovered samples.

    Args:
        context: Where and how to run.
        runs: Keys of ``RUNS``.
        attacks: Names of attacks.
        show: What to draw: the best images ("grid"), the images of every attack ("methods"), or the score
            against the output ("scatter").

    Returns:
        The rows and images of the figure.
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
    """Add the counts of every attack on a run, with published counts and the chance level.

    Args:
        out: The rows of the figure.
        done: The run.
    """
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
        accuracy = measure_loss_and_accuracy(done.victim.checkpoint, done.split.holdout)["accuracy"]
        out.row(f"{run}: test accuracy", accuracy, TEST_ACCURACY[run], 0.5)


def by_margin(out: Outcome, done: Performed, points: dict[str, Any]) -> None:
    """Add the scores of the samples nearest to the margin and farthest from it.

    Args:
        out: The rows of the figure.
        done: The run.
        points: Margins and scores of the samples.
    """
    order = points["margin"].argsort()
    quarter = max(1, len(order) // 4)
    ends = {"nearest the margin": order[:quarter], "farthest from it": order[-quarter:]}
    for where, samples in ends.items():
        what = f"{done.run.name}: median {done.run.metric}, quarter {where}"
        out.row(what, float(np.nanmedian(points["score"][samples])))


def training_table(context: Context, table: dict[str, Any]) -> Outcome:
    """Measure loss and accuracy of every victim, as in Tables 1 and 2.

    Args:
        context: Where and how to run.
        table: Published values by run.

    Returns:
        The rows of the table.
    """
    out = Outcome(details={"victims": {}}, notes=[TRAINED, SCALE_FREE])
    for name, (_, (train_loss, test_accuracy, test_loss)) in table.items():
        split, net = RUNS[name].trained(context)
        train, test = (
            measure_loss_and_accuracy(net.checkpoint, data) for data in (split.train, split.holdout)
        )
        out.details["victims"][name] = net.summary
        all_right = None if name == "1e4 epochs MNIST" else 1.0
        out.row(f"{name}: train accuracy", train["accuracy"], all_right)
        out.row(f"{name}: train loss", train["loss"], train_loss)
        out.row(f"{name}: test accuracy", test["accuracy"], test_accuracy, 0.5)
        out.row(f"{name}: test loss", test["loss"], test_loss)
    return out


# Fig. 2: twenty points on a circle. Candidates are filtered by their multiplier, and then near-duplicates
# are dropped. The published filter lambda < 5 depends on the scale of the network, because lambda is
# multiplied by c^(2-L) if theta is multiplied by c. So we drop a candidate if its multiplier is below a share
# of the largest one. The multipliers of near-duplicates are added first, because merged they are a single
# candidate (Refael et al. 2025, Lemma 2). Duplicates are closer than 0.03, as published. A point counts as
# recovered if its candidate in a one-to-one matching is closer than 0.05, which is our choice.
WITHIN = 0.05
MIN_SHARE = 0.2  # of the largest multiplier
POINTS, CANDIDATES = 20, 100
# By scale: hidden widths, training steps, attack steps, restarts.
CIRCLE = {
    "tiny": ((300,), 2500, 2500, 1),
    "small": ((400,), 4000, 5000, 4),
    "paper": ((1000, 1000), 20_000, 5000, 4),
}
FILTER_NOTE = (
    f"the published filter lambda < 5 depends on the scale of the network; here the threshold is "
    f"{MIN_SHARE:g} of the largest multiplier, where multipliers of near-duplicates are added"
)
START_NOTE = "first-layer init 0.1 instead of 1e-4, training to the margin instead of 1e6 epochs"


def circle(context: Context) -> Outcome:
    """Train on the circle, attack, filter and count, and compare with model inversion and chance."""
    hidden, training_steps, steps, restarts = CIRCLE[context.scale.name]
    data = rs.load_dataset("circle", POINTS, seed=context.seed).train
    options: dict[str, Any] = {"steps": training_steps, "init_scale": 0.1, "dtype": "float64"}
    net = context.train(mlp(data, hidden), data, **options)
    rates: Settings = {"sigma": 0.5, "lr_x": 0.02, "lr_lam": 0.02, "lr_decay": 0.02}
    base: Settings = {"candidates": CANDIDATES, "seed": context.seed}
    dtype = "float32" if context.device.startswith("cuda") else "auto"
    config = make_attack(restarts=restarts, steps=steps, dtype=dtype, **rates, **base)
    reconstruction = context.attack(net.checkpoint, rs.Knowledge(), config)
    inversion = make_attack("model-inversion", **base)
    inverted = context.attack(net.checkpoint, rs.Knowledge(), inversion).x.double()
    x, weight = reconstruction.x.double(), reconstruction.weight.double()
    heavy = heavy_enough(x, weight)
    groups = group_candidates(x[heavy], weight[heavy], 0.0, DUPLICATE)
    heaviest = [int(group[weight[heavy][group].argmax()]) for group in groups]
    selected = x[heavy][heaviest]
    arrays = {"train": data.x, "labels": data.y, "all": x, "weight": weight, "heavy": x[heavy]}
    arrays |= {"kept": selected, "inverted": inverted}
    details = {"victim": net.summary, "attack": reconstruction.settings, "within": WITHIN}
    out = Outcome(details={**details, "least_share": MIN_SHARE}, notes=[FILTER_NOTE, START_NOTE])
    out.arrays = {name: array.numpy() for name, array in arrays.items()}
    half = torch.tensor(math.pi / POINTS).double()  # chance: the circle turned by half a spacing
    turn = torch.stack([half.cos(), -half.sin(), half.sin(), half.cos()]).reshape(2, 2)
    for what, points, published, note in (
        ("recovered", selected, 20, f"of {POINTS}, one-to-one within {WITHIN:g}"),
        ("model inversion", inverted, 7, ""),
    ):
        chance = matched(points, data.x @ turn.T)
        out.row(what, matched(points, data.x), published, chance, note=note)
    out.row("candidates after both filters", len(selected))
    farthest = float(l2(selected, data.x).amin(0).max())
    out.row("largest distance of a true point to a candidate", farthest)
    out.row("first-layer residual", common.first_residual(reconstruction))
    return out


def heavy_enough(x: Tensor, weight: Tensor) -> Tensor:
    """Return which candidates have a large multiplier, after adding those of near-duplicates.

    Args:
        x: Candidates.
        weight: Their multipliers.

    Returns:
        A mask of the candidates.
    """
    mass = (l2(x, x) <= DUPLICATE).to(weight) @ weight
    return mass >= MIN_SHARE * mass.max()


def matched(points: Tensor, truth: Tensor) -> int:
    """Return the size of the largest one-to-one matching of true points to candidates within ``WITHIN``.

    Args:
        points: Candidates.
        truth: True points.

    Returns:
        The number of matched points.
    """
    is_close = (l2(points, truth) < WITHIN).numpy().astype(float)
    return int(np.sum(is_close[linear_sum_assignment(-is_close)]))


def _images(title: str, show: str, *runs: str, attacks: Names = OURS_ONLY) -> Figure:
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
    "released": _images(
        "the released settings, CIFAR n=500", "grid", "CIFAR", attacks=OURS_AND_PUBLISHED
    ),
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
