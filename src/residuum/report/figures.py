"""Draw figures of reconstructions, of the training samples that they match, and of the attack.

Each function returns a PNG as bytes. The mean of the data is added back to images if the mean is known, and
each image is scaled to its own range like published figures. Points in the plane are drawn as points, other
vectors as curves.
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
from residuum.records.inputs import add_mean
from residuum.records.reconstruction import Selection
from residuum.records.scores import MetricScore, SampleMatch, SampleScore
from residuum.report import drawing
from residuum.report.drawing import MAX_IMAGES, Cell, mask_nonpositive

MAX_COMPARED = 10  # images per attack in a figure that compares attacks
# Largest number of candidates in a tree that shows which candidates were split in two.
MAX_LINES = 80
Matched = tuple[SampleScore, SampleMatch]


def selected_figure(reconstruction: Reconstruction) -> bytes | None:
    """Draw the best selected reconstructions, and the number of restarts that found each reconstruction.

    Args:
        reconstruction: The reconstruction of an attack, with its selection.

    Returns:
        A PNG, None if no reconstruction is selected.
    """
    selection = reconstruction.selection
    if selection is None or not len(selection):
        return None
    count_text = f"the best {min(MAX_IMAGES, len(selection))} of {len(selection)} reconstructions"
    title = f"{reconstruction.attack}, {count_text}: restarts that contain it, confidence"
    if reconstruction.x.shape[1:] == (2,):
        title = f"{reconstruction.attack}: {len(selection)} reconstructions"
        return _selected_points(reconstruction, title)
    is_image = drawing.is_image(reconstruction.x.shape[1:])
    images = add_mean(selection.x[:MAX_IMAGES], reconstruction.knowledge.mean if is_image else None)
    grid_cells = [
        Cell(
            (image,),
            f"{int(selection.support[i])}/{reconstruction.restarts}{_confidence(selection, i)}",
        )
        for i, image in enumerate(images)
    ]
    return drawing.draw_cells(title, grid_cells, ("",), ("reconstruction",))


def _confidence(selection: Selection, i: int) -> str:
    confidence = selection.confidence_of(i)
    return "" if confidence is None else f"   {confidence:.2f}"


def matches_figure(candidates: Tensor, train: Dataset, scores: Scores) -> bytes | None:
    """Draw reconstructions above the training samples that they match one-to-one, best first.

    The matches are those of the metric that decides the verdict. Points in the plane are an exception: if the
    scores contain the Euclidean distance, the matches are those of the distance.

    Args:
        candidates: The candidates of the attack.
        train: The training samples.
        scores: The scores of the training samples.

    Returns:
        A PNG, None without matches.
    """
    match_by_distance = train.shape == (2,) and "l2" in scores.metrics
    metric = scores.metrics["l2" if match_by_distance else scores.deciding]
    matched_pairs = _matched(scores, metric)
    if not matched_pairs:
        return None
    matched_pairs = matched_pairs if train.shape == (2,) else matched_pairs[:MAX_IMAGES]
    is_image = drawing.is_image(train.shape)
    title = f"Best {len(matched_pairs)} of {scores.n} training samples, by {metric.name.upper()}; "
    count_text = f"{metric.recovered} beyond 99% of chance, {metric.threshold}"
    title += "not calibrated" if metric.recovered is None else count_text + " (framed)" * is_image
    if train.shape == (2,):
        return _matched_points(candidates, *_pairs(candidates, train, matched_pairs), title)
    grid_cells = _cells(candidates, train, matched_pairs, train.mean if is_image else None)
    rows, lines = ("found", "training"), ("reconstruction", "training sample")
    return drawing.draw_cells(title, grid_cells, rows, lines)


def compared_figure(attacks: dict[str, tuple[Tensor, Scores]], train: Dataset) -> bytes | None:
    """Draw the best matches of several attacks on the same images, with one row of images for each attack.

    Args:
        attacks: Candidates and scores of each attack. The key is the name of the attack in the figure.
        train: The training samples.

    Returns:
        A PNG, None if an attack has no match.
    """
    best_matches = [
        _matched(scores, scores.metrics[scores.deciding]) for _, scores in attacks.values()
    ]
    columns = min(MAX_COMPARED, *map(len, best_matches))
    if not columns:
        return None
    grid_cells = [
        cell
        for matched, (candidates, _) in zip(best_matches, attacks.values(), strict=True)
        for cell in _cells(candidates, train, matched[:columns], train.mean)
    ]
    count_texts = [
        f"{name}, {scores.recovered} of {scores.n} ({scores.rule})"
        for name, (_, scores) in attacks.items()
    ]
    title = f"Best {columns}; framed: recovered. From the top: {'; '.join(count_texts)}"
    return drawing.draw_image_grid(title, grid_cells, ("found", "training"), columns)


def output_figure(
    scores: Scores, outputs: Tensor, metrics: tuple[str, ...] = ("ncc", "ssim3")
) -> bytes:
    """Draw the score of each training sample against the network's output (Haim et al. 2022, Fig. 4).

    Args:
        scores: The scores.
        outputs: Outputs of the network, (n,) or (n, k). For k > 1 outputs the margin is drawn instead.
        metrics: Names of the metrics, each of which gets a panel.

    Returns:
        A PNG.
    """
    metric_names = [name for name in metrics if name in scores.metrics] or [scores.deciding]
    flat_outputs = outputs.detach().cpu().double().reshape(len(outputs), -1)
    margins = [row.margin for row in scores.per_sample]
    uses_margin = flat_outputs.shape[1] > 1 and None not in margins
    horizontal_values = torch.tensor(
        margins if uses_margin else flat_outputs[:, 0].tolist(), dtype=torch.float64
    )
    figure = drawing.new_figure(4.2 * len(metric_names) + 0.4, 3.4)
    panels = figure.subplots(1, len(metric_names), squeeze=False)[0]
    for axes, name in zip(panels, metric_names, strict=True):
        _scatter(axes, horizontal_values, scores, name)
        axes.set_xlabel("margin" if uses_margin else "network output", fontsize=8.5)
    marks, labels = panels[0].get_legend_handles_labels()
    if 0 < len(labels) <= len(drawing.MARKERS):
        drawing.add_legend_below(figure, marks, labels)
    return drawing.encode_png(figure)


def loss_figure(reconstruction: Reconstruction) -> bytes | None:
    """Draw how the loss and the errors of an attack's runs change over the steps, None without steps."""
    if not len(reconstruction.steps):
        return None
    figure = drawing.new_figure(8.6, 3.3)
    loss_axes, residual_axes = figure.subplots(1, 2)
    for run, status in enumerate(reconstruction.status):
        has_diverged = status == "diverged"
        color, style = (drawing.ORANGE, "--") if has_diverged else (drawing.BLUE, "-")
        loss = mask_nonpositive(reconstruction.loss[run])
        loss_axes.plot(reconstruction.steps, loss, style, color=color, lw=1, alpha=0.8)
    diverged_count = sum(status == "diverged" for status in reconstruction.status)
    diverged_note = f", {diverged_count} diverged (dashed)" if diverged_count else ""
    plural_ending = "" if reconstruction.restarts == 1 else "s"
    loss_axes.set_title(
        f"loss, {reconstruction.restarts} restart{plural_ending}{diverged_note}", fontsize=9
    )
    residuals = reconstruction.layers.clamp(min=0).sqrt()  # (R, T, L)
    for i, name in enumerate(reconstruction.layer_names):
        middle, low, high = _summarize_restarts(mask_nonpositive(residuals[:, :, i]))
        color, style = drawing.CYCLE[i % len(drawing.CYCLE)], ("-", "--", "-.", ":")[i % 4]
        residual_axes.plot(reconstruction.steps, middle, color=color, lw=1.4, label=name, ls=style)
        residual_axes.fill_between(reconstruction.steps, low, high, color=color, alpha=0.15, lw=0)
    residual_axes.set_title("relative residual per layer, median and range", fontsize=9)
    residual_axes.legend(fontsize=7.5, frameon=False)
    for axes, values in ((loss_axes, reconstruction.loss), (residual_axes, residuals)):
        if bool(mask_nonpositive(values).isfinite().any()):
            axes.set_yscale("log")
        axes.set_xlabel("step", fontsize=8.5)
        drawing.tidy(axes)
    return drawing.encode_png(figure)


def ambiguity_figure(
    x: Tensor,
    uniqueness: Uniqueness,
    mean: Tensor | None = None,
    agreement: Sequence[str] | None = None,
) -> bytes | None:
    """Draw how much each reconstruction can change in other training sets that give the same weights.

    Two images are below each reconstruction. The first image is the least similar alternative that a search
    found. The second image is the range in which each pixel can lie.

    Args:
        x: The certified candidates (m, *shape).
        uniqueness: The uniqueness certificate of the candidates.
        mean: The mean of the data, which is added to the images.
        agreement: Agreement of restarts for each candidate, such as "3/4".

    Returns:
        A PNG, None without reconstructions.
    """
    if not len(uniqueness):
        return None
    candidate_indices = uniqueness.index[:MAX_IMAGES].tolist()
    captions = [
        f"≥ {float(uniqueness.determined_at_least[k]):.2f} ({float(uniqueness.determined_energy[k]):.2f})"
        f"{f'  {agreement[i]}' if agreement is not None else ''}"
        for k, i in enumerate(candidate_indices)
    ]
    title = (
        f"{len(candidate_indices)} of {len(uniqueness)} reconstructions: energy that others keep at "
        f"{uniqueness.share:.0%} of the weight, proved (least found)"
    )
    pixel_ranges = (uniqueness.high - uniqueness.low)[:MAX_IMAGES]
    if drawing.is_image(x.shape[1:]):
        finite_ranges = pixel_ranges[pixel_ranges.isfinite()]
        largest_range = (
            float(finite_ranges.max())
            if len(finite_ranges) and float(finite_ranges.max()) > 0
            else 1.0
        )
        pixel_ranges, free_note = (
            (pixel_ranges / largest_range).clamp(max=1),
            "" if len(finite_ranges) == pixel_ranges.numel() else " or free",
        )
        title += (
            f"{', restarts' if agreement else ''}; pixels within {largest_range:.2g}{free_note}"
        )
    images, least_similar = (
        add_mean(x[candidate_indices].double(), mean),
        add_mean(uniqueness.least[:MAX_IMAGES], mean),
    )
    image_columns = zip(images, least_similar, pixel_ranges, strict=True)
    grid_cells = [Cell(group, text) for group, text in zip(image_columns, captions, strict=True)]
    rows, lines = ("found", "least found", "free"), ("reconstruction", "least found")
    return drawing.draw_cells(title, grid_cells, rows, lines)


def alternatives_figure(
    true: Tensor,
    alternative: Tensor,
    parents: Sequence[tuple[int, ...]],
    mean: Tensor | None = None,
) -> bytes | None:
    """Draw true samples and the alternative samples that replace them, the largest changes first.

    An alternative training set either splits each sample into two samples (halves), or merges several samples
    into one sample. A column shows one true sample and its halves, or two true samples and the merged sample.

    Args:
        true: The true samples (n, *shape).
        alternative: The alternative samples (k, *shape).
        parents: Rows of ``true`` that each alternative sample replaces.
        mean: The mean of the data, which is added to the images.

    Returns:
        A PNG, None if nothing was changed.
    """
    has_merged_samples = any(len(rows) > 1 for rows in parents)
    if has_merged_samples:
        merged_groups = [(j, rows) for j, rows in enumerate(parents) if len(rows) > 1]
        columns = [(true[rows[0]], true[rows[1]], alternative[j]) for j, rows in merged_groups]
        subject = "merged groups: two of the samples, and the one that replaces all"
        row_names, curve_names = ("true", "true", "merged"), ("true", "", "merged")
    else:
        split_pairs = [
            (j, rows[0]) for j, rows in enumerate(parents[:-1]) if rows == parents[j + 1]
        ]
        columns = [(true[i], alternative[j], alternative[j + 1]) for j, i in split_pairs]
        subject = "samples, and the two that replace each"
        # A sample can be split into two halves. If samples are drawn as curves, only one half is drawn,
        # because the other is its mirror image.
        row_names, curve_names = ("true", "half", "half"), ("true", "", "one half")
    if not columns:
        return None

    def measure_change(column: tuple[Tensor, ...]) -> float:
        """Return the largest Euclidean distance between the first and any other image of a column."""
        return max(float((other - column[0]).norm()) for other in column[1:])

    columns.sort(key=lambda column: -measure_change(column))
    drawn_count = min(len(columns), 10 if drawing.is_image(true.shape[1:]) else 8)
    title = f"{drawn_count} of {len(columns)} {subject}; both fit the weights equally well"
    grid_cells = [
        Cell(
            tuple(add_mean(image, mean) for image in column), f"moved {measure_change(column):.3g}"
        )
        for column in columns[:drawn_count]
    ]
    return drawing.draw_cells(title, grid_cells, row_names, curve_names)


def identified_figure(identification: Identification, truth: Tensor | None = None) -> bytes | None:
    """Draw identified samples, each with its residual and whether it is certified, or eigenvectors.

    Args:
        identification: The samples or eigenvectors that were identified.
        truth: True samples (n, d). Below each identified sample, the sample nearest in direction is drawn.

    Returns:
        A PNG, None if nothing was identified.
    """
    vectors, captions, subject = _vectors_to_draw(identification)
    if vectors is None or not len(vectors):
        return None
    vector_pairs = [
        (vector,) if truth is None else _pair_with_nearest(vector, truth) for vector in vectors
    ]
    rank_text = f"rank K {identification.rank_k} of {identification.n_r}"
    title = f"{subject}; degree {identification.order - 1}, {rank_text}"
    dimension = vectors.shape[1]
    shape = next(
        s for s in (identification.input_shape, (dimension,)) if math.prod(s or (0,)) == dimension
    )
    shaped_pairs = (tuple(vector.reshape(shape) for vector in pair) for pair in vector_pairs)
    grid_cells = [Cell(pair, text) for pair, text in zip(shaped_pairs, captions, strict=True)]
    row_names = ("found", "truth")
    return drawing.draw_cells(title, grid_cells, ("",) if truth is None else row_names, row_names)


def family_figure(reconstruction: Reconstruction) -> bytes | None:
    """Draw when candidates of the first run of an attack were split or merged, None if none were."""
    first_restart_events = [
        event for event in reconstruction.events if event["run"] == 0 and event["kind"] != "stable"
    ]
    if not first_restart_events:
        return None
    lifetimes = trace_candidates(first_restart_events, int(reconstruction.settings["candidates"]))
    drawing_order = _order(lifetimes)
    row_of_candidate = {number: k for k, number in enumerate(drawing_order)}
    last_step = int(reconstruction.steps[-1])
    figure = drawing.new_figure(8.0, min(12.0, 1.5 + 0.11 * len(drawing_order)))
    axes = figure.subplots()
    for number in drawing_order:
        life, y = lifetimes[number], row_of_candidate[number]
        end_step = last_step if life.died is None else life.died
        color = drawing.GREY if life.died is not None and not life.children else drawing.BLUE
        axes.plot([life.born, end_step], [y, y], color=color, linewidth=1.1)
        for child in life.children:
            if child in row_of_candidate:
                axes.plot(
                    [end_step, end_step],
                    [y, row_of_candidate[child]],
                    color=drawing.ORANGE,
                    linewidth=0.9,
                )
        if life.died is not None and not life.children:
            axes.plot([end_step], [y], "x", color=drawing.INK, markersize=4)
    alive_count = sum(life.died is None for life in lifetimes.values())
    axes.set(xlabel="step", yticks=[], xlim=(0, last_step))
    all_drawn = len(drawing_order) == len(lifetimes)
    drawn_note = "" if all_drawn else f"; {len(drawing_order)} of {len(lifetimes)} lines drawn"
    axes.set_title(
        f"restart 0: {int(reconstruction.settings['candidates'])} candidates at the start, {alive_count} at "
        f"the end{drawn_note}\n"
        "orange fork: split; cross: merged or dropped",
        fontsize=9,
    )
    return drawing.encode_png(figure)


def _scatter(axes: Any, x: Tensor, scores: Scores, name: str) -> None:
    sample_scores = scores.per_sample
    labels = sorted({row.label for row in sample_scores if row.label is not None})
    labels_or_none: list[float | int | None] = [*labels] or [None]
    for k, label in enumerate(labels_or_none):
        indices_of_label = [i for i, row in enumerate(sample_scores) if row.label == label]
        vertical_values = [
            _nan_if_none(sample_scores[i].matches[name].nearest) for i in indices_of_label
        ]
        name_in_legend = None if label is None else f"label {label:g}"
        axes.scatter(
            x[indices_of_label],
            vertical_values,
            s=20,
            alpha=0.75,
            lw=0,
            **drawing.get_point_style(k),
            label=name_in_legend,
        )
    _draw_thresholds(axes, scores.metrics[name])
    axes.set_title(f"best {name} of every training sample", fontsize=9)
    axes.set_ylabel(name, fontsize=8.5)
    drawing.tidy(axes)


def _draw_thresholds(axes: Any, figures: MetricScore) -> None:
    """Draw a line at each threshold of a metric, with the name of the threshold at the right edge."""
    for value, text, style in (
        (figures.threshold_null99, "99% of chance", "--"),
        (figures.published_threshold, "published", ":"),
    ):
        if value is not None:
            axes.axhline(value, color=drawing.INK, lw=0.9, ls=style)
            text_style = {"ha": "right", "va": "bottom", "fontsize": 7, "color": drawing.INK}
            edge_transform = axes.get_yaxis_transform()
            axes.text(1, value, f"{text} {value:.2f}", transform=edge_transform, **text_style)


def _selected_points(reconstruction: Reconstruction, title: str) -> bytes:
    selection = reconstruction.selection
    assert selection is not None
    figure = drawing.new_figure(4.6, 4.6)
    axes = figure.subplots()
    for k, label in enumerate(selection.labels.unique().tolist()):
        has_label = selection.labels == label
        point_style = {
            "alpha": 0.7,
            "lw": 0,
            "label": f"label {label:g}",
            **drawing.get_point_style(k),
        }
        x, size = selection.x[has_label], 18 + 18 * selection.support[has_label]
        axes.scatter(x[:, 0], x[:, 1], s=size, **point_style)
    return _plane(figure, axes, f"{title}; larger: in more restarts")


def _matched_points(candidates: Tensor, matches: Tensor, samples: Tensor, title: str) -> bytes:
    figure = drawing.new_figure(4.8, 4.8)
    axes = figure.subplots()
    candidate_points, match_points, sample_points = (
        points.double().unbind(1) for points in (candidates.reshape(-1, 2), matches, samples)
    )
    axes.scatter(
        candidate_points[0], candidate_points[1], s=8, color=drawing.GREY, lw=0, label="candidates"
    )
    rings: dict[str, Any] = {"facecolors": "none", "edgecolors": drawing.BLUE}
    axes.scatter(sample_points[0], sample_points[1], s=46, label="training samples", **rings)
    for line in torch.stack([matches, samples], 1):
        axes.plot(line[:, 0], line[:, 1], color=drawing.ORANGE, lw=0.8)
    axes.scatter(
        match_points[0],
        match_points[1],
        s=24,
        color=drawing.ORANGE,
        marker="x",
        lw=1.2,
        label="matches",
    )
    return _plane(figure, axes, title)


def _plane(figure: Any, axes: Any, title: str) -> bytes:
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_title(title, fontsize=8.5)
    marks, names = axes.get_legend_handles_labels()
    drawing.add_legend_below(figure, marks, names, columns=3)
    drawing.tidy(axes)
    return drawing.encode_png(figure)


def _matched(scores: Scores, metric: MetricScore) -> list[Matched]:
    """Return the training samples that match a reconstruction, with their matches, best first."""
    matched_pairs = [(row, row.matches[metric.name]) for row in scores.per_sample]
    matched_pairs = [(row, match) for row, match in matched_pairs if match.candidate is not None]
    return sorted(
        matched_pairs, key=lambda pair: _nan_if_none(pair[1].score), reverse=metric.higher_is_better
    )


def _pairs(candidates: Tensor, train: Dataset, matched: list[Matched]) -> tuple[Tensor, Tensor]:
    """Return k matched reconstructions and the k training samples that they match, each (k, *shape)."""
    matched_candidates = candidates.reshape(-1, *train.shape).double()[
        [match.candidate for _, match in matched]
    ]
    position_by_row = {number: i for i, number in enumerate(train.rows)}
    return matched_candidates, train.x[[position_by_row[row.index] for row, _ in matched]].double()


def _cells(
    candidates: Tensor, train: Dataset, matched: list[Matched], mean: Tensor | None
) -> list[Cell]:
    """Return a column of the figure for each match: two images, their score, and a frame if recovered."""
    matches, samples = _pairs(candidates, train, matched)
    images = zip(add_mean(matches, mean), add_mean(samples, mean), strict=True)
    image_pairs = zip(images, (match for _, match in matched), strict=True)
    return [Cell(pair, f"{match.score:.3f}", bool(match.recovered)) for pair, match in image_pairs]


def _nan_if_none(score: float | None) -> float:
    return float("nan") if score is None else score


def _summarize_restarts(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Summarize restarts (runs) of an attack: median, minimum and maximum at each of T steps."""
    low = values.nan_to_num(nan=torch.inf).amin(0)
    high = values.nan_to_num(nan=-torch.inf).amax(0)
    return values.nanmedian(0).values, mask_nonpositive(low), mask_nonpositive(high)


def _vectors_to_draw(identification: Identification) -> tuple[Tensor | None, list[str], str]:
    """Return the vectors that the weights determine, a caption for each vector, and a title.

    The vectors are the sum of all samples, or eigenvectors of the moment matrix, or the samples themselves.
    """
    if identification.aggregate is not None:
        return identification.aggregate[None], ["sum of lam y x"], "aggregate of all samples"
    if identification.eigenvectors is not None and identification.eigenvalues is not None:
        largest_first = identification.eigenvalues.abs().argsort(descending=True)
        captions = [f"eigenvalue {float(identification.eigenvalues[i]):.2g}" for i in largest_first]
        return (
            identification.eigenvectors.T[largest_first],
            captions,
            "eigenvectors of the moment matrix",
        )
    captions = [
        f"{float(residual):.0e} {'cert.' if is_certified else 'heur.'}"
        for residual, is_certified in zip(
            identification.residuals, identification.certified, strict=True
        )
    ]
    certified_count = int(identification.certified.sum())
    subject = f"{len(identification.x)} samples, {certified_count} certified (residual and flag above each)"
    return identification.x, captions, subject


def _pair_with_nearest(vector: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return a recovered vector and the true sample (row of ``truth``) nearest in direction.

    If their inner product is negative, the sign of the recovered vector is changed.
    """
    cosine = truth @ vector / truth.norm(dim=1).clamp_min(1e-300)
    nearest_index = int(cosine.abs().argmax())
    return torch.where(cosine[nearest_index] < 0, -1.0, 1.0) * vector, truth[nearest_index]


@dataclass
class _Lifetime:
    """The steps at which a candidate of an attack appeared and disappeared, and its parent and children.

    If a candidate splits, it is the parent of the new candidates. Candidates are identified by numbers.
    """

    born: int
    parent: int | None = None
    died: int | None = None
    children: tuple[int, ...] = ()


def trace_candidates(events: Sequence[dict[str, Any]], first: int) -> dict[int, _Lifetime]:
    """Return at which steps each candidate of a restart appeared and disappeared.

    Args:
        events: The splits, merges and removals of candidates in the restart.
        first: Number of candidates at the start of the restart.

    Returns:
        The lifetime of each candidate by its number.
    """
    lifetimes = {number: _Lifetime(0) for number in range(first)}
    for event in events:
        step, kind, children = event["step"], event["kind"], tuple(event.get("children", ()))
        if kind == "split":
            lifetimes[event["parent"]].died = step
            lifetimes[event["parent"]].children = children
            lifetimes.update({child: _Lifetime(step, event["parent"]) for child in children})
        if kind in ("merge", "prune"):
            lifetimes[event["parent"]].died = step
    return lifetimes


def _order(lifetimes: dict[int, _Lifetime]) -> list[int]:
    """Return the candidates in drawing order: families together, children around their parent.

    If not all families fit into the figure, the smallest families are left out.
    """

    def family(number: int) -> list[int]:
        children = lifetimes[number].children
        middle_child = len(children) // 2
        numbers_above = [n for child in children[:middle_child] for n in family(child)]
        return [
            *numbers_above,
            number,
            *(n for child in children[middle_child:] for n in family(child)),
        ]

    roots = [number for number, life in lifetimes.items() if life.parent is None]
    families = [family(root) for root in roots]
    while sum(map(len, families)) > MAX_LINES and len(families) > 1:
        families.remove(min(families, key=len))
    return [number for members in families for number in members]
