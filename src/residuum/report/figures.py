"""Figures: what came back, what it matches, who is recovered, and how the attack went.

Each returns a PNG as bytes. Images have the mean added back where it is known and are stretched one
by one, as published figures are; points in the plane are drawn as points, other vectors as curves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residuum.records import Dataset, Reconstruction, Scores
from residuum.records.scores import MetricScore, SampleMatch, SampleScore
from residuum.report import drawing
from residuum.report.drawing import BLUE, CYCLE, GREY, INK, MARKERS, ORANGE, Cell

SHOWN = 30
PANELS = 12
Matched = tuple[SampleScore, SampleMatch]


def selected_figure(found: Reconstruction) -> bytes | None:
    """The best selected reconstructions, each with its support and confidence; None without any."""
    chosen = found.selection
    if chosen is None or not len(chosen):
        return None
    restarts = found.restarts
    captions = [
        f"{int(s)}/{restarts}   {float(c):.2f}"
        for s, c in zip(chosen.support, chosen.confidence, strict=True)
    ]
    shown = f"the best {min(SHOWN, len(chosen))} of {len(chosen)} reconstructions"
    title = f"{found.attack}, {shown}: restarts that hold it, confidence"
    shape = tuple(found.x.shape[1:])
    if drawing.is_image(shape):
        images = _with_mean(chosen.x[:SHOWN], found.knowledge.mean)
        cells = [Cell((x,), text) for x, text in zip(images, captions, strict=False)]
        return drawing.image_grid(title, cells, ("",))
    if shape == (2,):
        return _selected_points(found, f"{found.attack}: {len(chosen)} reconstructions")
    panels = [
        (text, {"reconstruction": x.numpy()})
        for x, text in zip(chosen.x[:PANELS], captions, strict=False)
    ]
    return drawing.line_panels(title, panels)


def matches_figure(candidates: Tensor, train: Dataset, scores: Scores) -> bytes | None:
    """Reconstructions above the training samples they match one-to-one, best first.

    Matched by the deciding metric; points in the plane by distance, where it was computed.
    """
    flat = train.shape == (2,) and "l2" in scores.metrics
    metric = scores.metrics["l2" if flat else scores.deciding]
    matched = _matched(scores, metric)
    if not matched:
        return None
    matched = matched if train.shape == (2,) else matched[:SHOWN]
    found, samples = _pairs(candidates, train, matched)
    title = _matches_title(scores, metric, len(matched), drawing.is_image(train.shape))
    if train.shape == (2,):
        return _matched_points(candidates, found, samples, title)
    if not drawing.is_image(train.shape):
        captions = [f"{match.score:.3f}" for _, match in matched]
        panels = [
            (text, {"reconstruction": a.flatten().numpy(), "training sample": b.flatten().numpy()})
            for a, b, text in zip(found[:PANELS], samples, captions, strict=False)
        ]
        return drawing.line_panels(title, panels)
    return drawing.image_grid(title, _cells(candidates, train, matched), ("found", "training"))


def compared_figure(
    attacks: dict[str, tuple[Tensor, Scores]], train: Dataset, columns: int = 10
) -> bytes | None:
    """The best matches of several attacks on the same images, a band each, from top to bottom.

    attacks: by what was attacked, all candidates and their scores; None where one has no match.
    """
    best = [_matched(scores, scores.metrics[scores.deciding]) for _, scores in attacks.values()]
    columns = min(columns, *map(len, best))
    if not columns:
        return None
    cells = [
        cell
        for matched, (candidates, _) in zip(best, attacks.values(), strict=True)
        for cell in _cells(candidates, train, matched[:columns])
    ]
    counts = [f"{name}, {s.recovered} of {s.n} ({s.rule})" for name, (_, s) in attacks.items()]
    title = f"Best {columns}; framed: recovered. From the top: {'; '.join(counts)}"
    return drawing.image_grid(title, cells, ("found", "training"), columns)


def output_figure(
    scores: Scores, outputs: Tensor, metrics: tuple[str, ...] = ("ncc", "ssim3")
) -> bytes:
    """Score of every training sample against the network's output for it (Haim et al. 2022, Fig. 4).

    outputs: (n,) or (n, k); with several outputs the margin stands in for the output.
    """
    names = [name for name in metrics if name in scores.metrics] or [scores.deciding]
    flat = outputs.detach().cpu().double().reshape(len(outputs), -1)
    margins = [row.margin for row in scores.per_sample]
    by_margin = flat.shape[1] > 1 and None not in margins
    x = torch.tensor(margins if by_margin else flat[:, 0].tolist(), dtype=torch.float64)
    figure = drawing.new_figure(4.2 * len(names) + 0.4, 3.4)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        _scatter(axes, x, scores, name)
        axes.set_xlabel("margin" if by_margin else "network output", fontsize=8.5)
    marks, labels = panels[0].get_legend_handles_labels()
    if 0 < len(labels) <= len(MARKERS):
        figure.legend(marks, labels, loc="outside lower center", ncols=len(labels), fontsize=7.5,
                      frameon=False)  # fmt: skip
    return drawing.png(figure)


def loss_figure(found: Reconstruction) -> bytes | None:
    """Loss of every restart and residual of every layer over the steps; None without a history."""
    if not len(found.steps):
        return None
    figure = drawing.new_figure(8.6, 3.3)
    left, right = figure.subplots(1, 2)
    for run, status in enumerate(found.status):
        lost = status == "diverged"
        style: dict[str, Any] = {"color": ORANGE, "ls": "--"} if lost else {"color": BLUE}
        left.plot(found.steps, _positive(found.loss[run]), lw=1, alpha=0.8, **style)
    lost_runs = sum(status == "diverged" for status in found.status)
    note = f", {lost_runs} diverged (dashed)" if lost_runs else ""
    plural = "" if found.restarts == 1 else "s"
    left.set_title(f"loss, {found.restarts} restart{plural}{note}", fontsize=9)
    residuals = found.layers.clamp(min=0).sqrt()  # (R, T, L)
    for i, name in enumerate(found.layer_names):
        middle, low, high = _band(_positive(residuals[:, :, i]))
        right.plot(found.steps, middle, color=CYCLE[i % len(CYCLE)], lw=1.4, label=name,
                   ls=("-", "--", "-.", ":")[i % 4])  # fmt: skip
        right.fill_between(found.steps, low, high, color=CYCLE[i % len(CYCLE)], alpha=0.15, lw=0)
    right.set_title("relative residual per layer, median and range", fontsize=9)
    right.legend(fontsize=7.5, frameon=False)
    for axes, values in ((left, found.loss), (right, residuals)):
        if bool(_positive(values).isfinite().any()):
            axes.set_yscale("log")
        axes.set_xlabel("step", fontsize=8.5)
        drawing.tidy(axes)
    return drawing.png(figure)


def _scatter(axes: Any, x: Tensor, scores: Scores, name: str) -> None:
    rows = scores.per_sample
    known = sorted({row.label for row in rows if row.label is not None})
    kinds: list[float | int | None] = [*known] or [None]
    for k, kind in enumerate(kinds):
        mine = [i for i, row in enumerate(rows) if row.label == kind]
        y = [_value(rows[i].matches[name].nearest) for i in mine]
        axes.scatter(
            x[mine], y, s=20, alpha=0.75, lw=0, color=CYCLE[k % len(CYCLE)],
            marker=MARKERS[k % len(MARKERS)], label=None if kind is None else f"label {kind:g}",
        )  # fmt: skip
    _thresholds(axes, scores.metrics[name])
    axes.set_title(f"best {name} of every training sample", fontsize=9)
    axes.set_ylabel(name, fontsize=8.5)
    drawing.tidy(axes)


def _thresholds(axes: Any, figures: MetricScore) -> None:
    """Lines named where they end, at the right edge."""
    for value, text, style in (
        (figures.threshold_null99, "99% of chance", "--"),
        (figures.published_threshold, "published", ":"),
    ):
        if value is not None:
            axes.axhline(value, color=INK, lw=0.9, ls=style)
            axes.text(1, value, f"{text} {value:.2f}", transform=axes.get_yaxis_transform(),
                      ha="right", va="bottom", fontsize=7, color=INK)  # fmt: skip


def _selected_points(found: Reconstruction, title: str) -> bytes:
    chosen = found.selection
    assert chosen is not None
    figure = drawing.new_figure(4.6, 4.6)
    axes = figure.subplots()
    for k, label in enumerate(chosen.labels.unique().tolist()):
        mine = chosen.labels == label
        axes.scatter(
            chosen.x[mine, 0], chosen.x[mine, 1], s=18 + 18 * chosen.support[mine],
            color=CYCLE[k % len(CYCLE)], alpha=0.7, lw=0, marker=MARKERS[k % len(MARKERS)],
            label=f"label {label:g}",
        )  # fmt: skip
    return _plane(figure, axes, f"{title}; larger: held by more restarts")


def _matched_points(candidates: Tensor, found: Tensor, samples: Tensor, title: str) -> bytes:
    figure = drawing.new_figure(4.8, 4.8)
    axes = figure.subplots()
    rest, a, b = (part.double().unbind(1) for part in (candidates.reshape(-1, 2), found, samples))
    axes.scatter(rest[0], rest[1], s=8, color=GREY, lw=0, label="candidates")
    axes.scatter(b[0], b[1], s=46, facecolors="none", edgecolors=BLUE, label="training samples")
    for line in torch.stack([found, samples], 1):
        axes.plot(line[:, 0], line[:, 1], color=ORANGE, lw=0.8)
    axes.scatter(a[0], a[1], s=24, color=ORANGE, marker="x", lw=1.2, label="matches")
    return _plane(figure, axes, title)


def _plane(figure: Any, axes: Any, title: str) -> bytes:
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_title(title, fontsize=8.5)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  fontsize=7.5, frameon=False)  # fmt: skip
    drawing.tidy(axes)
    return drawing.png(figure)


def _matched(scores: Scores, metric: MetricScore) -> list[Matched]:
    """Training samples that got a candidate, best first."""
    rows = [(row, row.matches[metric.name]) for row in scores.per_sample]
    rows = [(row, match) for row, match in rows if match.candidate is not None]
    return sorted(rows, key=lambda pair: _value(pair[1].score), reverse=metric.higher_is_better)


def _pairs(candidates: Tensor, train: Dataset, matched: list[Matched]) -> tuple[Tensor, Tensor]:
    """Candidates and the samples they are matched with. (k, *shape) each."""
    found = candidates.reshape(-1, *train.shape).double()[[m.candidate for _, m in matched]]
    return found, train.x[[row.index for row, _ in matched]].double()


def _cells(candidates: Tensor, train: Dataset, matched: list[Matched]) -> list[Cell]:
    """A pair of images each, captioned by its score, framed where recovered."""
    found, samples = _pairs(candidates, train, matched)
    images = zip(_with_mean(found, train.mean), _with_mean(samples, train.mean), strict=True)
    return [
        Cell(pair, f"{match.score:.3f}", bool(match.recovered))
        for pair, (_, match) in zip(images, matched, strict=True)
    ]


def _matches_title(scores: Scores, metric: MetricScore, shown: int, framed: bool) -> str:
    title = f"Best {shown} of {scores.n} training samples, by {metric.name.upper()}"
    if metric.recovered is None:
        return f"{title}; not calibrated"
    where = " (framed)" if framed else ""
    return f"{title}; {metric.recovered} beyond 99% of chance, {metric.threshold}{where}"


def _with_mean(images: Tensor, mean: Tensor | None) -> Tensor:
    if mean is None:
        return images
    return images + (
        mean.to(images) if mean.numel() == 1 else mean.to(images).reshape(images[0].shape)
    )


def _value(score: float | None) -> float:
    return float("nan") if score is None else score


def _positive(values: Tensor) -> Tensor:
    """What a logarithmic axis can show; the rest is left out of the curve."""
    values = values.double()
    return torch.where(torch.isfinite(values) & (values > 0), values, torch.nan)


def _band(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Median, least and greatest over the restarts, missing values left out. (T,) each."""
    low = values.nan_to_num(nan=torch.inf).amin(0)
    high = values.nan_to_num(nan=-torch.inf).amax(0)
    return values.nanmedian(0).values, _positive(low), _positive(high)
