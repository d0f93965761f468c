"""Figures: what came back, what it matches, who is recovered, and how the attack went.

Each returns a PNG as bytes. Images have the mean added back where it is known and are stretched one
by one, as published figures are; points in the plane are drawn as points, other vectors as curves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residuum.records import Dataset, Reconstruction, Scores, Uniqueness
from residuum.records.identification import Identification
from residuum.records.inputs import with_mean
from residuum.records.reconstruction import Selection
from residuum.records.scores import MetricScore, SampleMatch, SampleScore
from residuum.report import drawing
from residuum.report.drawing import SHOWN, Cell, positive

COMPARED = 10  # images of each attack, where several are compared
LINES = 80  # of a family tree; a larger one shows the families with the most descendants
Matched = tuple[SampleScore, SampleMatch]


def selected_figure(found: Reconstruction) -> bytes | None:
    """The best selected reconstructions, each with its support and confidence; None without any."""
    chosen = found.selection
    if chosen is None or not len(chosen):
        return None
    shown = f"the best {min(SHOWN, len(chosen))} of {len(chosen)} reconstructions"
    title = f"{found.attack}, {shown}: restarts that hold it, confidence"
    if found.x.shape[1:] == (2,):
        return _selected_points(found, f"{found.attack}: {len(chosen)} reconstructions")
    image = drawing.is_image(found.x.shape[1:])
    x = with_mean(chosen.x[:SHOWN], found.knowledge.mean if image else None)
    cells = [
        Cell((image,), f"{int(chosen.support[i])}/{found.restarts}{_confidence(chosen, i)}")
        for i, image in enumerate(x)
    ]
    return drawing.side_by_side(title, cells, ("",), ("reconstruction",))


def _confidence(chosen: Selection, i: int) -> str:
    confidence = chosen.confidence_of(i)
    return "" if confidence is None else f"   {confidence:.2f}"


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
    image = drawing.is_image(train.shape)
    title = f"Best {len(matched)} of {scores.n} training samples, by {metric.name.upper()}; "
    counted = f"{metric.recovered} beyond 99% of chance, {metric.threshold}"
    title += "not calibrated" if metric.recovered is None else counted + " (framed)" * image
    if train.shape == (2,):
        return _matched_points(candidates, *_pairs(candidates, train, matched), title)
    cells = _cells(candidates, train, matched, train.mean if image else None)
    rows, lines = ("found", "training"), ("reconstruction", "training sample")
    return drawing.side_by_side(title, cells, rows, lines)


def compared_figure(attacks: dict[str, tuple[Tensor, Scores]], train: Dataset) -> bytes | None:
    """The best matches of several attacks on the same images, a band each, from top to bottom.

    attacks: by what was attacked, all candidates and their scores; None where one has no match.
    """
    best = [_matched(scores, scores.metrics[scores.deciding]) for _, scores in attacks.values()]
    columns = min(COMPARED, *map(len, best))
    if not columns:
        return None
    cells = [
        cell
        for matched, (candidates, _) in zip(best, attacks.values(), strict=True)
        for cell in _cells(candidates, train, matched[:columns], train.mean)
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
    if 0 < len(labels) <= len(drawing.MARKERS):
        drawing.legend_below(figure, marks, labels)
    return drawing.png(figure)


def loss_figure(found: Reconstruction) -> bytes | None:
    """Loss of every restart and residual of every layer over the steps; None without a history."""
    if not len(found.steps):
        return None
    figure = drawing.new_figure(8.6, 3.3)
    left, right = figure.subplots(1, 2)
    for run, status in enumerate(found.status):
        lost = status == "diverged"
        color, style = (drawing.ORANGE, "--") if lost else (drawing.BLUE, "-")
        left.plot(found.steps, positive(found.loss[run]), style, color=color, lw=1, alpha=0.8)
    lost_runs = sum(status == "diverged" for status in found.status)
    note = f", {lost_runs} diverged (dashed)" if lost_runs else ""
    plural = "" if found.restarts == 1 else "s"
    left.set_title(f"loss, {found.restarts} restart{plural}{note}", fontsize=9)
    residuals = found.layers.clamp(min=0).sqrt()  # (R, T, L)
    for i, name in enumerate(found.layer_names):
        middle, low, high = _band(positive(residuals[:, :, i]))
        color, style = drawing.CYCLE[i % len(drawing.CYCLE)], ("-", "--", "-.", ":")[i % 4]
        right.plot(found.steps, middle, color=color, lw=1.4, label=name, ls=style)
        right.fill_between(found.steps, low, high, color=color, alpha=0.15, lw=0)
    right.set_title("relative residual per layer, median and range", fontsize=9)
    right.legend(fontsize=7.5, frameon=False)
    for axes, values in ((left, found.loss), (right, residuals)):
        if bool(positive(values).isfinite().any()):
            axes.set_yscale("log")
        axes.set_xlabel("step", fontsize=8.5)
        drawing.tidy(axes)
    return drawing.png(figure)


def ambiguity_figure(
    x: Tensor, found: Uniqueness, mean: Tensor | None = None, agreement: Sequence[str] | None = None
) -> bytes | None:
    """Per reconstruction: the image, the least that was found in its place, what each pixel may be.

    x: (m, *shape) the candidates certified.
    agreement: per candidate, such as "3/4" restarts.
    """
    if not len(found):
        return None
    index = found.index[:SHOWN].tolist()
    captions = [
        f"≥ {float(found.determined_at_least[k]):.2f} ({float(found.determined_energy[k]):.2f})"
        f"{f'  {agreement[i]}' if agreement is not None else ''}"
        for k, i in enumerate(index)
    ]
    title = (
        f"{len(index)} of {len(found)} reconstructions: energy that others keep at {found.share:.0%} of the "
        "weight, proved (least found)"
    )
    moves = (found.high - found.low)[:SHOWN]
    if drawing.is_image(x.shape[1:]):
        known = moves[moves.isfinite()]
        top = float(known.max()) if len(known) and float(known.max()) > 0 else 1.0
        moves, free = (moves / top).clamp(max=1), "" if len(known) == moves.numel() else " or free"
        title += f"{', restarts' if agreement else ''}; pixels within {top:.2g}{free}"
    images, least = with_mean(x[index].double(), mean), with_mean(found.least[:SHOWN], mean)
    groups = zip(images, least, moves, strict=True)
    cells = [Cell(group, text) for group, text in zip(groups, captions, strict=True)]
    rows, lines = ("found", "least found", "free"), ("reconstruction", "least found")
    return drawing.side_by_side(title, cells, rows, lines)


def alternatives_figure(
    true: Tensor,
    alternative: Tensor,
    parents: Sequence[tuple[int, ...]],
    mean: Tensor | None = None,
) -> bytes | None:
    """Columns of one true sample and its two halves, or of two true samples and their mean.

    true: (n, *shape).
    alternative: (k, *shape); parents[j]: rows of ``true`` behind alternative j.
    The columns moved farthest come first; None where nothing was changed.
    """
    merged = any(len(rows) > 1 for rows in parents)
    if merged:
        groups = [(j, rows) for j, rows in enumerate(parents) if len(rows) > 1]
        columns = [(true[rows[0]], true[rows[1]], alternative[j]) for j, rows in groups]
        what = "merged groups: two of the samples, and the one that stands for all"
        names, lines = ("true", "true", "merged"), ("true", "", "merged")
    else:
        pairs = [(j, rows[0]) for j, rows in enumerate(parents[:-1]) if rows == parents[j + 1]]
        columns = [(true[i], alternative[j], alternative[j + 1]) for j, i in pairs]
        what = "samples, and the two that stand for each"
        # Of two halves one is the other's mirror image.
        names, lines = ("true", "half", "half"), ("true", "", "one half")
    if not columns:
        return None

    def moved(column: tuple[Tensor, ...]) -> float:
        """Largest distance of the others from the first image."""
        return max(float((other - column[0]).norm()) for other in column[1:])

    columns.sort(key=lambda column: -moved(column))
    count = min(len(columns), 10 if drawing.is_image(true.shape[1:]) else 8)
    title = f"{count} of {len(columns)} {what}; both fit the weights equally well"
    cells = [
        Cell(tuple(with_mean(image, mean) for image in column), f"moved {moved(column):.3g}")
        for column in columns[:count]
    ]
    return drawing.side_by_side(title, cells, names, lines)


def identified_figure(found: Identification, truth: Tensor | None = None) -> bytes | None:
    """Recovered samples or eigenvectors, with weight, residual and flag; None where there is none.

    truth: (n, d) drawn below, each under the sample nearest to it in direction, sign included.
    """
    vectors, captions, what = _identified(found)
    if vectors is None or not len(vectors):
        return None
    images = [(v,) if truth is None else _beside(v, truth) for v in vectors]
    title = f"{what}; degree {found.order - 1}, rank K {found.rank_k} of {found.n_r}"
    width = vectors.shape[1]
    shape = next(s for s in (found.input_shape, (width,)) if math.prod(s or (0,)) == width)
    shaped = (tuple(v.reshape(shape) for v in pair) for pair in images)
    cells = [Cell(pair, text) for pair, text in zip(shaped, captions, strict=True)]
    names = ("found", "truth")
    return drawing.side_by_side(title, cells, ("",) if truth is None else names, names)


def family_figure(found: Reconstruction) -> bytes | None:
    """The family tree of the first restart; None where its candidates never changed."""
    events = [event for event in found.events if event["run"] == 0 and event["kind"] != "stable"]
    if not events:
        return None
    known = lives(events, int(found.settings["candidates"]))
    order = _order(known)
    place = {number: k for k, number in enumerate(order)}
    last = int(found.steps[-1])
    figure = drawing.new_figure(8.0, min(12.0, 1.5 + 0.11 * len(order)))
    axes = figure.subplots()
    for number in order:
        life, y = known[number], place[number]
        end = last if life.died is None else life.died
        color = drawing.GREY if life.died is not None and not life.children else drawing.BLUE
        axes.plot([life.born, end], [y, y], color=color, linewidth=1.1)
        for child in life.children:
            if child in place:
                axes.plot([end, end], [y, place[child]], color=drawing.ORANGE, linewidth=0.9)
        if life.died is not None and not life.children:
            axes.plot([end], [y], "x", color=drawing.INK, markersize=4)
    alive = sum(life.died is None for life in known.values())
    axes.set(xlabel="step", yticks=[], xlim=(0, last))
    axes.set_title(
        f"restart 0: {int(found.settings['candidates'])} candidates at the start, {alive} at the "
        f"end{'' if len(order) == len(known) else f'; {len(order)} of {len(known)} lines drawn'}\n"
        "orange fork: split; cross: merged or dropped",
        fontsize=9,
    )
    return drawing.png(figure)


def _scatter(axes: Any, x: Tensor, scores: Scores, name: str) -> None:
    rows = scores.per_sample
    known = sorted({row.label for row in rows if row.label is not None})
    kinds: list[float | int | None] = [*known] or [None]
    for k, kind in enumerate(kinds):
        mine = [i for i, row in enumerate(rows) if row.label == kind]
        y = [_value(rows[i].matches[name].nearest) for i in mine]
        name_of = None if kind is None else f"label {kind:g}"
        axes.scatter(x[mine], y, s=20, alpha=0.75, lw=0, **drawing.kind(k), label=name_of)
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
            axes.axhline(value, color=drawing.INK, lw=0.9, ls=style)
            look = {"ha": "right", "va": "bottom", "fontsize": 7, "color": drawing.INK}
            at_edge = axes.get_yaxis_transform()
            axes.text(1, value, f"{text} {value:.2f}", transform=at_edge, **look)


def _selected_points(found: Reconstruction, title: str) -> bytes:
    chosen = found.selection
    assert chosen is not None
    figure = drawing.new_figure(4.6, 4.6)
    axes = figure.subplots()
    for k, label in enumerate(chosen.labels.unique().tolist()):
        mine = chosen.labels == label
        look = {"alpha": 0.7, "lw": 0, "label": f"label {label:g}", **drawing.kind(k)}
        x, size = chosen.x[mine], 18 + 18 * chosen.support[mine]
        axes.scatter(x[:, 0], x[:, 1], s=size, **look)
    return _plane(figure, axes, f"{title}; larger: held by more restarts")


def _matched_points(candidates: Tensor, found: Tensor, samples: Tensor, title: str) -> bytes:
    figure = drawing.new_figure(4.8, 4.8)
    axes = figure.subplots()
    rest, a, b = (part.double().unbind(1) for part in (candidates.reshape(-1, 2), found, samples))
    axes.scatter(rest[0], rest[1], s=8, color=drawing.GREY, lw=0, label="candidates")
    rings: dict[str, Any] = {"facecolors": "none", "edgecolors": drawing.BLUE}
    axes.scatter(b[0], b[1], s=46, label="training samples", **rings)
    for line in torch.stack([found, samples], 1):
        axes.plot(line[:, 0], line[:, 1], color=drawing.ORANGE, lw=0.8)
    axes.scatter(a[0], a[1], s=24, color=drawing.ORANGE, marker="x", lw=1.2, label="matches")
    return _plane(figure, axes, title)


def _plane(figure: Any, axes: Any, title: str) -> bytes:
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_title(title, fontsize=8.5)
    marks, names = axes.get_legend_handles_labels()
    drawing.legend_below(figure, marks, names, columns=3)
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
    position = {number: i for i, number in enumerate(train.rows)}
    return found, train.x[[position[row.index] for row, _ in matched]].double()


def _cells(
    candidates: Tensor, train: Dataset, matched: list[Matched], mean: Tensor | None
) -> list[Cell]:
    """A pair of images each, captioned by its score, framed where recovered."""
    found, samples = _pairs(candidates, train, matched)
    images = zip(with_mean(found, mean), with_mean(samples, mean), strict=True)
    pairs = zip(images, (match for _, match in matched), strict=True)
    return [Cell(pair, f"{match.score:.3f}", bool(match.recovered)) for pair, match in pairs]


def _value(score: float | None) -> float:
    return float("nan") if score is None else score


def _band(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Median, least and greatest over the restarts, missing values left out. (T,) each."""
    low = values.nan_to_num(nan=torch.inf).amin(0)
    high = values.nan_to_num(nan=-torch.inf).amax(0)
    return values.nanmedian(0).values, positive(low), positive(high)


def _identified(found: Identification) -> tuple[Tensor | None, list[str], str]:
    """Vectors to draw, a caption for each, and what they are."""
    if found.aggregate is not None:
        return found.aggregate[None], ["sum of lam y x"], "aggregate of all samples"
    if found.eigenvectors is not None and found.eigenvalues is not None:
        order = found.eigenvalues.abs().argsort(descending=True)
        captions = [f"eigenvalue {float(found.eigenvalues[i]):.2g}" for i in order]
        return found.eigenvectors.T[order], captions, "eigenvectors of the moment matrix"
    captions = [
        f"{float(residual):.0e} {'cert.' if sure else 'heur.'}"
        for residual, sure in zip(found.residuals, found.certified, strict=True)
    ]
    certified = int(found.certified.sum())
    what = f"{len(found.x)} samples, {certified} certified (residual and flag above each)"
    return found.x, captions, what


def _beside(vector: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """The vector and the row of ``truth`` nearest in direction; the free sign is the truth's."""
    cosine = truth @ vector / truth.norm(dim=1).clamp_min(1e-300)
    nearest = int(cosine.abs().argmax())
    return torch.where(cosine[nearest] < 0, -1.0, 1.0) * vector, truth[nearest]


@dataclass
class _Life:
    """One candidate: when it came and went, and why."""

    born: int
    parent: int | None = None
    died: int | None = None
    children: tuple[int, ...] = ()


def lives(events: Sequence[dict[str, Any]], first: int) -> dict[int, _Life]:
    """Every candidate of one run by its number; first: how many there were at the start."""
    known = {number: _Life(0) for number in range(first)}
    for event in events:
        step, kind, children = event["step"], event["kind"], tuple(event.get("children", ()))
        if kind == "split":
            known[event["parent"]].died = step
            known[event["parent"]].children = children
            known.update({child: _Life(step, event["parent"]) for child in children})
        if kind in ("merge", "prune"):
            known[event["parent"]].died = step
    return known


def _order(known: dict[int, _Life]) -> list[int]:
    """Families one below the other, children around their parent; the largest where not all fit."""

    def family(number: int) -> list[int]:
        children = known[number].children
        half = len(children) // 2
        before = [n for child in children[:half] for n in family(child)]
        return [*before, number, *(n for child in children[half:] for n in family(child))]

    roots = [number for number, life in known.items() if life.parent is None]
    families = [family(root) for root in roots]
    while sum(map(len, families)) > LINES and len(families) > 1:
        families.remove(min(families, key=len))
    return [number for members in families for number in members]
