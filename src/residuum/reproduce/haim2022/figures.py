"""Figures 1 and 3 to 21 and both tables of Haim et al. 2022."""

from __future__ import annotations

from typing import Any

import numpy as np

from residuum.reproduce.context import Context
from residuum.reproduce.haim2022.runs import CIFAR, MNIST, RUNS
from residuum.reproduce.images import (
    Performed,
    against_output,
    details,
    losses,
    perform,
    prefixed,
    shown,
    trained,
)
from residuum.reproduce.outcome import Array, Outcome, Row
from residuum.reproduce.published import PUBLISHED
from residuum.reproduce.victims import figures_of

OURS = PUBLISHED["haim2022"]
TRAINED = (
    "victims are trained to the margin in a few thousand steps (descent on the log-loss) instead of "
    "1e6 epochs of gradient descent, unless the row is about the way of training"
)
MNIST_NOTE = (
    "on MNIST ssim3 > 0.4 says little in either direction (a near-blank candidate plus the mean image "
    "passes it): NCC ranks there"
)


def grids(context: Context, runs: tuple[str, ...], published: bool = False) -> Outcome:
    """Best matches of every run: reconstructions above their nearest training images."""
    attacks = ("residuum", *(("published",) if published and context.scale.published else ()))
    rows: list[Row] = []
    arrays: dict[str, Array] = {}
    said: dict[str, Any] = {}
    for name in runs:
        done = perform(context, RUNS[name], attacks)
        rows += count_rows(done)
        arrays |= prefixed(name, shown(done, done.best))
        said[name] = details(done)
    notes = (TRAINED, *((MNIST_NOTE,) if any(RUNS[r].data == "mnist" for r in runs) else ()))
    return Outcome(tuple(rows), arrays, {"runs": said}, notes)


def scatter(context: Context, runs: tuple[str, ...]) -> Outcome:
    """Score of every training sample against the network's output for it."""
    rows: list[Row] = []
    arrays: dict[str, Array] = {}
    said: dict[str, Any] = {}
    for name in runs:
        done = perform(context, RUNS[name])
        points = against_output(done, "residuum")
        arrays |= prefixed(name, points)
        said[name] = details(done)
        rows += count_rows(done)
        rows += margin_rows(done, points)
    return Outcome(tuple(rows), arrays, {"runs": said}, (TRAINED,))


def baselines(context: Context, runs: tuple[str, ...], attacks: tuple[str, ...]) -> Outcome:
    """The reconstruction beside model inversion and the first layer's weights."""
    rows: list[Row] = []
    arrays: dict[str, Array] = {}
    said: dict[str, Any] = {}
    for name in runs:
        done = perform(context, RUNS[name], attacks)
        for attack in attacks:
            arrays |= prefixed(f"{name}/{attack}", shown(done, attack, count=30))
        rows += count_rows(done, inverted=True)
        said[name] = details(done)
    note = "the paper chooses among 40 000 inverted images, here one start per candidate"
    return Outcome(tuple(rows), arrays, {"runs": said}, (TRAINED, note))


def training_table(context: Context, table: str) -> Outcome:
    """Loss and accuracy of every victim, as in Tables 1 and 2."""
    rows: list[Row] = []
    said: dict[str, Any] = {}
    for name, (train_loss, test_accuracy, test_loss) in OURS[table].items():
        run = RUNS[name]
        split, net = trained(context, run)
        train, test = (figures_of(net.checkpoint, part) for part in (split.train, split.holdout))
        said[name] = net.summary
        all_right = None if name.startswith("1e4 epochs MNIST") else 1.0
        rows += [
            Row(f"{name}: train accuracy", train["accuracy"], all_right),
            Row(f"{name}: train loss", train["loss"], train_loss),
            Row(f"{name}: test accuracy", test["accuracy"], test_accuracy, chance=0.5),
            Row(f"{name}: test loss", test["loss"], test_loss),
        ]
    scale_free = (
        "losses are not comparable across ways of training: margin training rescales the weights of a "
        "homogeneous network so that its margin stays between 10 and 20"
    )
    return Outcome(tuple(rows), {}, {"victims": said}, (TRAINED, scale_free))


def count_rows(done: Performed, inverted: bool = False) -> list[Row]:
    """Counts of every attack on one run, beside published ones and chance."""
    rows = []
    data, full = done.run.data, done.run.n == 500 and done.run.name in (CIFAR.name, MNIST.name)
    for attack, scores in done.scores.items():
        head = done.run.name if len(done.scores) == 1 else f"{done.run.name}, {attack}"
        ncc, ssim = scores.metrics["ncc"], scores.metrics["ssim3"]
        known = _known(data, attack) if full else {}
        rows += [
            Row(
                f"{head}: recovered (NCC beyond 99% of chance)",
                ncc.recovered,
                chance=ncc.expected_by_chance,
                note=f"{ncc.rule}; p {ncc.p_value:.2g}" if ncc.p_value else "",
            ),
            Row(
                f"{head}: ssim3 above 0.4",
                ssim.above_published_threshold,
                known.get("above"),
                ssim.above_published_threshold_holdout,
            ),
            Row(f"{head}: best ssim3", ssim.best, known.get("best")),
            Row(f"{head}: top-10 mean ssim3", ssim.top10_mean, known.get("top10")),
            Row(f"{head}: best NCC", ncc.best, known.get("ncc")),
            Row(f"{head}: median NCC of the top 30", _top30(done, attack), known.get("ncc30")),
        ]
    if full and not inverted:
        accuracy = losses(done)["test_accuracy"]
        known_accuracy = OURS["mnist_test_accuracy" if data == "mnist" else "cifar_test_accuracy"]
        rows.append(Row(f"{done.run.name}: test accuracy", accuracy, known_accuracy, chance=0.5))
    return rows


def margin_rows(done: Performed, points: dict[str, Any]) -> list[Row]:
    """Who is recovered: samples on the margin, not those far from it."""
    margin, score = points["margin"], points["score"]
    order = margin.argsort()
    quarter = max(1, len(order) // 4)
    near, far = score[order[:quarter]], score[order[-quarter:]]
    name = f"{done.run.name}: median {done.run.metric}"
    return [
        Row(f"{name}, quarter nearest the margin", float(np.nanmedian(near))),
        Row(f"{name}, quarter farthest from it", float(np.nanmedian(far))),
    ]


def _top30(done: Performed, attack: str) -> float:
    values = [row.matches["ncc"].nearest for row in done.scores[attack].per_sample]
    return float(np.median(sorted((v for v in values if v is not None), reverse=True)[:30]))


def _known(data: str, attack: str) -> dict[str, Any]:
    """Published figures of the n = 500 networks; two released runs pooled."""
    if data == "mnist":
        both = {"ncc": OURS["mnist_ncc_max"], "ncc30": OURS["mnist_ncc_top30_median"]}
        return both if attack in ("residuum", "published") else {}
    if attack == "weights":
        return {"above": OURS["cifar_weights_above_0.4"], "best": OURS["cifar_weights_best"]}
    if attack == "model-inversion":
        return {}
    return {
        "above": OURS["cifar_above_0.4"],
        "best": OURS["cifar_best"],
        "top10": OURS["cifar_top10"],
    }
