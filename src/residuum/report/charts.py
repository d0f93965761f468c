"""Draw the charts of the reports as SVG. matplotlib draws the shapes and the style sheet sets the colors.

A report follows the reader's light or dark scheme, and its content security policy refuses every style
that is not in its style sheet. Therefore :func:`render_svg` drops the styles that matplotlib writes. It turns
the name of a matplotlib artist (``gid``) into a class of the style sheet. Charts contain no names from
untrusted files. The template writes such names next to the drawing and escapes them. A chart is complete
without a script. The script only lets the reader move the threshold line.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup

from residuum.conformal import TAIL
from residuum.report.drawing import Array, mask_nonpositive, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from residuum.auditing.result import Evidence
    from residuum.records import Reconstruction
    from residuum.records.scores import MetricScore
    from residuum.risk.membership import MembershipTest

WIDTH, HEIGHT = 480, 280  # units of the SVG view box, equal to matplotlib's points
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 32, 44  # margins around the axes, in units of the view box
TEXT = 11.5  # font size in points
BINS = 36  # bins of a histogram, which are a few pixels wide
MAX_POINTS = 1500  # largest number of points in a scatter plot; more points would cover each other
MAX_STEPS = 240  # largest number of points of a curve over the steps of an attack
STOPS = 200  # number of positions of the slider with which readers choose a threshold
# Layout of parallel coordinates, in units of the view box: width and height of the drawing, left and right
# margin, and the heights at which the vertical axes begin and end.
WIDE, TALL, SIDE, UPPER, LOWER = 960, 330, 60, 46, 300
# Largest number of lines in parallel coordinates. More lines would only cover each other.
MAX_LINES = 400
BEST_SHARE = 0.1  # share of the trials of a sweep that is drawn in color
MAX_KINDS = 6  # number of marker shapes and of dash patterns that the style sheet defines
POINTS_PER_INCH = 72
TAG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Mark:
    """An entry of a chart's legend: ``look`` is its CSS class, ``value`` an optional number."""

    look: str
    name: str
    value: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart for the template of a report.

    Attributes:
        title: The title of the chart.
        drawing: Content of the SVG element.
        x_name: Name of the horizontal axis.
        y_name: Name of the vertical axis.
        marks: Entries of the legend.
        summary: The chart in words, for screen readers.
        note: A remark below the chart.
        threshold: What the script needs to move the threshold line: its axis, its value, and units of the
            view box per unit of the value. It is empty for a chart without a threshold line.
    """

    title: str
    drawing: Markup
    x_name: str
    y_name: str
    marks: tuple[Mark, ...]
    summary: str = ""
    note: str = ""
    threshold: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Coordinate:
    """An axis of parallel coordinates.

    Attributes:
        name: Name of the setting on the axis.
        values: The value of the setting in each trial, best trial first.
        log: Whether the axis has a log scale.
        low: Lower end of the search range, by default the smallest value.
        high: Upper end of the search range, by default the largest value.
    """

    name: str
    values: Sequence[float | None]
    log: bool = False
    low: float | None = None
    high: float | None = None


def draw_histogram(evidence: Evidence, metric: MetricScore) -> Chart | None:
    """Draw the distribution of the scores of training samples and held-out samples.

    Args:
        evidence: The scores of both kinds of samples.
        metric: The metric, with its threshold.

    Returns:
        The chart, None without scores.
    """
    train, null, threshold = (
        select_finite(evidence.values),
        select_finite(evidence.null),
        _threshold(metric),
    )
    if not len(train) and not len(null):
        return None
    figure, axes = _axes()
    low, high = _span(np.concatenate([train, null, select_finite([threshold])]))
    bin_edges = np.linspace(low, high, BINS + 1)
    for css_class, values in (("area k1", null), ("area k0", train)):
        share_per_bin = np.histogram(values, bin_edges)[0] / max(len(values), 1)
        axes.stairs(share_per_bin, bin_edges, fill=True, gid=css_class)
    axes.set_xlim(low, high)
    axes.yaxis.set_major_formatter(lambda share_per_bin, _: f"{100 * share_per_bin:.3g}%")
    threshold_for_script = _threshold_line(axes, threshold, "x")
    legend_marks = (
        Mark("area k1", "held-out samples (chance)"),
        Mark("area k0", "training samples"),
    )
    title = f"{metric.name} of training samples and held-out samples"
    medians_text = (
        f"{_format_median(train)} on training samples and {_format_median(null)} by chance"
    )
    summary_text = f"The median is {medians_text}."
    return Chart(
        title,
        render_svg(figure),
        metric.name,
        "share",
        legend_marks,
        summary_text,
        threshold=threshold_for_script,
    )


def membership_chart(test: MembershipTest) -> Chart | None:
    """Draw histograms of the statistic T of the membership test for training samples and held-out samples."""
    # The membership test counts the training samples whose statistic is above the 99th percentile of the
    # held-out samples. The chart shows this percentile as a line.
    train, holdout = select_finite(test.statistic), select_finite(test.holdout_statistic)
    if not len(train) or not len(holdout):
        return None
    figure, axes = _axes()
    low, high = _span(np.concatenate([train, holdout]))
    bin_edges = np.linspace(low, high, BINS + 1)
    for css_class, values in (("area k1", holdout), ("area k0", train)):
        axes.stairs(
            np.histogram(values, bin_edges)[0] / len(values), bin_edges, fill=True, gid=css_class
        )
    axes.set_xlim(low, high)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    axes.axvline(tail_threshold(holdout), gid="rule")
    legend_marks = (
        Mark("area k1", f"held-out samples ({len(holdout)})"),
        Mark("area k0", f"training samples ({len(train)})"),
        Mark("rule", "99th percentile of the held-out samples"),
    )
    summary_text = (
        f"{test.above_tail} of {test.records} training samples lie above the 99th percentile of the "
        f"held-out samples. About {TAIL * test.records:.2g} are expected by chance."
    )
    title = "Membership statistic T of training samples and held-out samples"
    return Chart(title, render_svg(figure), "T", "share", legend_marks, summary_text)


def tail_threshold(holdout: Array) -> float:
    """Return the 99th percentile of a membership statistic: at most 1% of held-out samples exceed it."""
    return float(np.sort(holdout)[::-1][math.floor(TAIL * len(holdout) + 1e-9)])


def draw_scatter(evidence: Evidence, metric: MetricScore) -> Chart | None:
    """Draw the score of each training sample against the network's output for the sample.

    Args:
        evidence: The scores and the outputs.
        metric: The metric, with its threshold.

    Returns:
        The chart, None without scores and outputs.
    """
    if evidence.outputs is None or len(evidence.outputs) != len(evidence.values):
        return None
    outputs, scores = np.asarray(evidence.outputs, float), np.asarray(evidence.values, float)
    finite_indices, threshold = (
        np.flatnonzero(np.isfinite(outputs) & np.isfinite(scores)),
        _threshold(metric),
    )
    if not len(finite_indices):
        return None
    drawn_indices = finite_indices[
        np.linspace(0, len(finite_indices) - 1, min(len(finite_indices), MAX_POINTS)).astype(int)
    ]
    has_labels = len(evidence.labels) == len(scores)
    labels = np.array(evidence.labels if has_labels else [""] * len(scores), dtype=object)
    label_names = sorted(set(labels[drawn_indices]))
    figure, axes = _axes()
    legend_marks = []
    for k, name in enumerate(label_names):
        indices_of_label = drawn_indices[labels[drawn_indices] == name]
        css_class = "dot k0" if len(label_names) > MAX_KINDS else f"dot k{k}"
        axes.plot(outputs[indices_of_label], scores[indices_of_label], "o", gid=css_class)
        legend_marks += [Mark(css_class, name)] if name and len(label_names) <= MAX_KINDS else []
    threshold_for_script = _threshold_line(axes, threshold, "y")
    return Chart(
        f"{metric.name} against the {evidence.output_name}",
        render_svg(figure),
        evidence.output_name,
        metric.name,
        tuple(legend_marks),
        f"{len(finite_indices)} training samples.",
        f"{len(drawn_indices)} of {len(finite_indices)} points drawn."
        if len(drawn_indices) < len(finite_indices)
        else "",
        threshold_for_script,
    )


def residual_chart(reconstruction: Reconstruction) -> Chart | None:
    """Draw the relative residual of each layer over the steps of an attack, on a log scale.

    A line shows the median over the restarts, and a band shows the range.

    Args:
        reconstruction: The candidates of the attack, with the residuals at each recorded step.

    Returns:
        The chart, None without finite residuals.
    """
    # The reconstruction stores squared residuals, and the chart shows their roots.
    residuals = mask_nonpositive(reconstruction.layers.double().clamp(min=0).sqrt()).numpy()
    recorded_steps = np.asarray(reconstruction.steps, float)  # residuals: (restarts, steps, layers)
    if not len(recorded_steps) or not np.isfinite(residuals).any():
        return None
    figure, axes = _axes()
    step_indices = np.unique(
        np.linspace(0, len(recorded_steps) - 1, min(len(recorded_steps), MAX_STEPS)).astype(int)
    )
    legend_marks = []
    for k, name in enumerate(reconstruction.layer_names):
        finite_step_indices = step_indices[np.isfinite(residuals[:, step_indices, k]).any(0)]
        x, values, kind = (
            recorded_steps[finite_step_indices],
            residuals[:, finite_step_indices, k],
            f"k{k % MAX_KINDS}",
        )
        median = np.nanmedian(values, 0)
        if len(values) > 1:
            axes.fill_between(x, np.nanmin(values, 0), np.nanmax(values, 0), gid=f"band {kind}")
        axes.plot(x, median, gid=f"line {kind}")
        legend_marks.append(Mark(f"line {kind}", name, f"{median[-1]:.2g}" if len(median) else "–"))
    # The axis ends at powers of ten. A value that exceeds such an end by at most a tenth of a power of ten
    # is cut off.
    log10_residuals = np.log10(select_finite(residuals))
    low, high = math.floor(log10_residuals.min() + 0.1), math.ceil(log10_residuals.max() - 0.1)
    axes.set(yscale="log", ylim=(10.0**low, 10.0 ** max(high, low + 1)), xmargin=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    title = f"Relative residual per layer, {reconstruction.attack}"
    return Chart(title, render_svg(figure), "step", "residual", tuple(legend_marks))


def threshold_table(evidence: Evidence, metric: MetricScore) -> dict[str, Any] | None:
    """Return how many samples count as recovered at each position of the slider for the threshold.

    A sample counts as recovered if its score is strictly better than the threshold. The count of held-out
    samples is a mean over sets of the size of the training set. One position is the threshold of the
    permutation test. At this position, both counts are taken from the test, which uses more held-out sets
    than this chart.

    Args:
        evidence: The scores of both kinds of samples.
        metric: The metric, with its threshold.

    Returns:
        The positions and counts for the script, None without scores of training samples.
    """
    train, null, threshold = (
        select_finite(evidence.values),
        select_finite(evidence.null),
        _threshold(metric),
    )
    if not len(train):
        return None
    sign_of_better = 1 if metric.higher_is_better else -1
    slider_values = make_slider_stops([*train, *null], threshold)
    # At this end of the slider, the threshold is so strict that no score is better.
    strictest_position = len(slider_values) - 1 if sign_of_better > 0 else 0
    start_position = (
        slider_values.index(threshold) if math.isfinite(threshold) else strictest_position
    )
    set_count = max(evidence.null_sets, 1)
    train_counts = [
        int((sign_of_better * train > sign_of_better * stop).sum()) for stop in slider_values
    ]
    chance_counts = [
        round(float((sign_of_better * null > sign_of_better * stop).sum() / set_count), 4)
        for stop in slider_values
    ]
    if metric.recovered is not None:
        train_counts[start_position] = metric.recovered
    if metric.expected_by_chance is not None:
        chance_counts[start_position] = round(metric.expected_by_chance, 4)
    return {
        "metric": metric.name,
        "values": slider_values,
        "start": start_position,
        "sign": sign_of_better,
        "texts": [f"{value:.4g}" for value in slider_values],
        "n": len(evidence.values),
        "train": train_counts,
        "null": chance_counts,
        "sets": set_count,
        "reachable": math.isfinite(threshold),
    }


def make_slider_stops(values: Sequence[float], threshold: float) -> list[float]:
    """Return the positions of a slider: evenly spaced values with three digits, and the threshold.

    Args:
        values: The values that the slider covers.
        threshold: The threshold.

    Returns:
        The sorted positions.
    """
    low, high = min(values), max(values)
    digits = max(3, 3 - math.floor(math.log10((high - low) or 1.0)))
    stops = {round(float(stop), digits) for stop in np.linspace(low, high, STOPS)}
    # Add a threshold below all scores and one above all scores, so that the slider can select all samples
    # or no sample.
    stops |= {(math.floor(low * 1000) - 1) / 1000, (math.ceil(high * 1000) + 1) / 1000}
    return sorted(stops | ({threshold} if math.isfinite(threshold) else set()))


def draw_parallel_coordinates(coordinates: Sequence[Coordinate]) -> Markup:
    """Draw the trials of a sweep in parallel coordinates: one axis per setting, one line per trial."""
    # matplotlib has no parallel coordinates, so this function scales each value to its axis.
    trial_count = len(coordinates[0].values) if coordinates else 0
    if not trial_count:
        return Markup("")
    figure = new_figure(WIDE / POINTS_PER_INCH, TALL / POINTS_PER_INCH, automatic=False)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDE), ylim=(TALL, 0))
    axes.axis("off")
    axis_positions = np.linspace(SIDE, WIDE - SIDE, max(2, len(coordinates)))[: len(coordinates)]
    heights = np.empty((trial_count, len(coordinates)))
    for k, (coordinate, x) in enumerate(zip(coordinates, axis_positions, strict=True)):
        heights[:, k], ticks = _place_on_axis(coordinate)
        axes.plot([x, x], [UPPER, LOWER], gid="upright", zorder=3)
        axes.text(x, UPPER - 24, coordinate.name, ha="center", gid="name")
        for y, text in ticks:
            axes.text(x - 6, y, text, fontsize=TEXT, ha="right", va="center_baseline", gid="tick")
    best_count = max(1, round(BEST_SHARE * trial_count))
    drawn_trials = sorted(
        {*range(best_count), *range(best_count, trial_count, -(-trial_count // MAX_LINES))},
        reverse=True,
    )
    for trial in drawn_trials:
        is_known = np.isfinite(heights[trial])
        css_class = "trial best" if trial < best_count else "trial"
        axes.plot(axis_positions[is_known], heights[trial, is_known], gid=css_class)
    return render_svg(figure)


def _place_on_axis(coordinate: Coordinate) -> tuple[Array, list[tuple[float, str]]]:
    """Return the heights at which the values of a setting lie on its axis, and three ticks of the axis.

    The ticks are at the ends and in the middle of the axis.
    """
    values = np.array(coordinate.values, float)  # None becomes NaN
    values[~np.isfinite(values) | (coordinate.log and values <= 0)] = np.nan
    low = coordinate.low if coordinate.low is not None else min(select_finite(values), default=0.0)
    high = (
        coordinate.high if coordinate.high is not None else max(select_finite(values), default=1.0)
    )
    is_log = coordinate.log and low > 0
    start, end = (math.log(low), math.log(high)) if is_log else (low, high)
    end = end if end > start else start + 1.0
    middle = (start + end) / 2
    scaled_values = np.log(values) if is_log else values
    tick_values = [math.exp(tick) if is_log else tick for tick in (start, middle, end)]
    tick_texts = [f"{tick:.0f}" if abs(tick) >= 100 else f"{tick:.2g}" for tick in tick_values]
    tick_heights = np.interp([start, middle, end], (start, end), (LOWER, UPPER))
    return np.interp(scaled_values, (start, end), (LOWER, UPPER)), list(
        zip(tick_heights, tick_texts, strict=True)
    )


def _axes() -> tuple[Figure, Axes]:
    """Create an empty figure with a background grid, a base line and ticks at round numbers."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(WIDTH / POINTS_PER_INCH, HEIGHT / POINTS_PER_INCH, automatic=False)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    axes = figure.add_axes((LEFT / WIDTH, BOTTOM / HEIGHT, width / WIDTH, height / HEIGHT))
    axes.grid(axis="y", gid="grid")
    axes.set_axisbelow(True)
    axes.tick_params(bottom=False, left=False, labelsize=TEXT)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_gid("base")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(lambda value, _: f"{value:.6g}")
    return figure, axes


def _threshold_line(axes: Axes, threshold: float, axis: str) -> dict[str, float | str]:
    """Draw a line at the threshold, and return what the script needs to move the line."""
    if not math.isfinite(threshold):
        return {}
    (axes.axvline if axis == "x" else axes.axhline)(threshold, gid="rule")
    low, high = axes.get_xlim() if axis == "x" else axes.get_ylim()
    # The length of the vertical axis is negative, because an SVG counts heights from the top.
    axis_length = WIDTH - LEFT - RIGHT if axis == "x" else TOP + BOTTOM - HEIGHT
    return {"axis": axis, "value": threshold, "scale": axis_length / (high - low)}


def render_svg(figure: Figure) -> Markup:
    """Return what matplotlib draws as SVG elements that have classes but no styles."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    # With font type "none", matplotlib writes text as characters, and the page chooses the font. The salt is
    # hashed into the names of markers and clip paths, so that each run gives the same names.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "residuum"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return Markup("\n").join(_elements(ElementTree.fromstring(buffer.getvalue())))


def _elements(parent: ElementTree.Element, css_class: str = "") -> Iterator[Markup]:
    """Yield the shapes and texts within an SVG element, with CSS classes in place of styles.

    Args:
        parent: The element of the SVG that matplotlib wrote.
        css_class: Class of the innermost group around the element that has a class, or "".

    Yields:
        SVG elements.
    """
    # Names of SVG groups become CSS classes, except names with an underscore such as "axes_1", which
    # matplotlib made. A marker (tag "use") refers to a shape that the page defines.
    for element in parent:
        tag, name = element.tag.removeprefix(TAG), element.get("id", "")
        # One decimal is enough, because nobody sees a tenth of a unit of the view box.
        x, y, path_text = (
            re.sub(r"(\.\d)\d+", r"\1", element.get(key, "").strip()) for key in "xyd"
        )
        # Leave out SVG groups whose names start with "patch", because they are backgrounds.
        if tag == "g" and not name.startswith("patch"):
            yield from _elements(element, css_class if "_" in name else name or css_class)
        elif tag == "path":
            path_data = re.sub(r"\s*([A-Z])\s*", r"\1", path_text)
            yield Markup('<path class="{}" d="{}"/>').format(css_class, path_data)
        elif tag == "use":
            template = Markup('<use class="{}" href="#mark{}" x="{}" y="{}"/>')
            yield template.format(css_class, css_class[-1], x, y)
        elif tag == "text":
            text_anchor = re.findall(r"text-anchor: (\w+)", element.get("style", ""))[0]
            template = Markup('<text class="{}" text-anchor="{}" x="{}" y="{}">{}</text>')
            yield template.format(css_class or "tick", text_anchor, x, y, element.text)


def _threshold(metric: MetricScore) -> float:
    return math.nan if metric.threshold_null99 is None else metric.threshold_null99


def _span(values: Array) -> tuple[float, float]:
    """Choose the limits of an axis: the smallest and the largest value, moved outward a little."""
    low, high = float(values.min()), float(values.max())
    padding = 0.03 * (high - low) or 0.5
    return low - padding, high + padding


def select_finite(values: Any) -> Array:
    """Return all finite values as a flat array, without NaN and infinity."""
    flat_values = np.asarray(values, dtype=float).ravel()
    return flat_values[np.isfinite(flat_values)]


def _format_median(values: Array) -> str:
    return f"{np.median(values):.3g}" if len(values) else "–"
