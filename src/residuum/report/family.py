"""Pictures of an attack that grows: the family tree of its candidates, and one sample's story.

The tree has a line per candidate from its birth to its end; a split forks one line into two, a merge
ends a line at the one it joined. The story follows the candidate nearest to one sample, with and
without growth (as in Figs. 4, 6 and 14 of Shen et al. 2026).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residuum.attacks.state import Progress
from residuum.records import Reconstruction
from residuum.report import drawing
from residuum.report.drawing import BLUE, CYCLE, GREEN, GREY, INK, ORANGE

LINES = 80  # candidates drawn; a larger tree shows the families with the most descendants
GROWN = ("split", "random", "frank-wolfe")
FRAMES = 7


@dataclass
class _Life:
    """One candidate: when it came and went, and why."""

    born: int
    parent: int | None = None
    died: int | None = None
    children: tuple[int, ...] = ()
    joined: int | None = None


def lives(events: Sequence[dict[str, Any]], first: int) -> dict[int, _Life]:
    """Every candidate of one run by its number; first: how many there were at the start."""
    known = {number: _Life(0) for number in range(first)}
    for event in events:
        step, kind, children = event["step"], event["kind"], tuple(event.get("children", ()))
        if kind == "split":
            known[event["parent"]].died = step
            known[event["parent"]].children = children
        if kind in GROWN:
            known.update({child: _Life(step, event.get("parent")) for child in children})
        if kind in ("merge", "prune"):
            known[event["parent"]].died = step
            known[event["parent"]].joined = children[0] if children else None
    return known


def family_figure(found: Reconstruction, run: int = 0) -> bytes | None:
    """The family tree of one restart; None where its candidates never changed."""
    events = [event for event in found.events if event["run"] == run and event["kind"] != "stable"]
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
        colour = GREY if life.died is not None and not life.children else BLUE
        axes.plot([life.born, end], [y, y], color=colour, linewidth=1.1)
        if life.parent is None and life.born > 0:
            axes.plot([life.born], [y], "o", color=GREEN, markersize=3.5)
        for child in life.children:
            if child in place:
                axes.plot([end, end], [y, place[child]], color=ORANGE, linewidth=0.9)
        if life.died is not None and not life.children:
            axes.plot([end], [y], "x", color=INK, markersize=4)
    alive = sum(life.died is None for life in known.values())
    axes.set(xlabel="step", yticks=[], xlim=(0, last))
    axes.set_title(
        f"restart {run}: {int(found.settings['candidates'])} candidates at the start, {alive} at the "
        f"end{'' if len(order) == len(known) else f'; {len(order)} of {len(known)} lines drawn'}\n"
        "orange fork: split; dot: new candidate; cross: merged or dropped",
        fontsize=9,
    )
    return drawing.png(figure)


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


@dataclass
class Follow:
    """A watcher that keeps the candidate nearest to one sample at every look, of one restart."""

    sample: Tensor
    run: int = 0
    steps: list[int] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def __call__(self, progress: Progress) -> None:
        """Called by the solver."""
        assert progress.living is not None
        x = progress.living()[self.run].detach().cpu().double()
        distance = (x.flatten(1) - self.sample.double().flatten()).norm(dim=1)
        best = int(distance.argmin())
        self.steps.append(progress.step)
        self.distances.append(float(distance[best]))
        self.images.append(x[best].clone())
        self.counts.append(len(x))


def story_figure(followed: dict[str, Follow], mean: Tensor | None = None) -> bytes:
    """Distance to one sample over the steps, and the nearest candidate at some of them, per attack.

    Steps at which a run got candidates are dotted.
    """
    sample = next(iter(followed.values())).sample
    shown = drawing.is_image(tuple(sample.shape))
    figure = drawing.new_figure(9.0, 3.2 + (1.15 * len(followed) if shown else 0.0))
    heights = [2.4, *[1.0] * len(followed)] if shown else [1.0]
    grid = figure.add_gridspec(len(heights), FRAMES + 1, height_ratios=heights)
    axes = figure.add_subplot(grid[0, :])
    for (name, one), colour in zip(followed.items(), CYCLE, strict=False):
        axes.plot(one.steps, one.distances, color=colour, label=name)
        pairs = zip(one.steps[1:], one.counts, one.counts[1:], strict=False)
        for step in [step for step, before, after in pairs if after > before]:
            axes.axvline(step, color=colour, linestyle=":", linewidth=0.8)
    axes.set(xlabel="step", ylabel="distance to the sample", ylim=(0, None))
    axes.legend(fontsize=8)
    if shown:
        for row, (name, one) in enumerate(followed.items(), 1):
            picks = torch.linspace(0, len(one.steps) - 1, FRAMES).round().long().tolist()
            frames = [(one.images[k], f"{name}\nstep {one.steps[k]}") for k in picks]
            for column, (image, text) in enumerate([*frames, (sample, "the sample")]):
                _show(figure.add_subplot(grid[row, column]), image, mean, text)
    return drawing.png(figure)


def _show(axes: Any, image: Tensor, mean: Tensor | None, text: str) -> None:
    image = image if mean is None else image + mean.reshape(image.shape)
    low, high = image.min(), image.max()
    stretched = (image - low) / (high - low).clamp(min=1e-12)
    if stretched.ndim == 3:
        stretched = stretched.movedim(0, 2).squeeze(2)
    axes.imshow(stretched.numpy(), cmap="gray", interpolation="nearest")
    axes.set_title(text, fontsize=6)
    axes.set_axis_off()
