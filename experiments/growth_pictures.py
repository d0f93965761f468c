"""Draw an attack on digits that grows its candidate set: its family tree, and the story of one sample.

    python -m experiments.growth_pictures DIR

The sample is the one with the least margin, whatever the attack makes of it. Both attacks start from the
same candidates.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.programs import parse_paths
from residuum.attacks import Auto, attack
from residuum.attacks.base import AttackProgress
from residuum.datasets import load_dataset
from residuum.networks.network import Network
from residuum.records import Knowledge
from residuum.records.inputs import add_mean
from residuum.report import drawing
from residuum.report.drawing import CYCLE
from residuum.report.figures import family_figure
from residuum.training import TrainingConfig, train

ARCH, SAMPLES, SEED = "mlp:64-200-200-1", 20, 3000
STEPS, CANDIDATES = 4000, 10


FRAMES = 7


@dataclass
class Follow:
    """Record the candidate nearest to one sample at every evaluation step of one restart."""

    sample: Tensor
    run: int = 0
    steps: list[int] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def __call__(self, progress: AttackProgress) -> None:
        """Record one evaluation step. The solver calls this."""
        assert progress.current_candidates is not None
        x = progress.current_candidates()[self.run].detach().cpu().double()
        distance = (x.flatten(1) - self.sample.double().flatten()).norm(dim=1)
        best = int(distance.argmin())
        self.steps.append(progress.step)
        self.distances.append(float(distance[best]))
        self.images.append(x[best].clone())
        self.counts.append(len(x))


def story_figure(followed: dict[str, Follow], mean: Tensor | None = None) -> bytes:
    """Draw the distance to one sample over the steps, and the nearest candidates, for each attack.

    A dotted line marks a step at which a run got candidates.
    """
    sample = next(iter(followed.values())).sample
    has_images = drawing.is_image(tuple(sample.shape))
    figure = drawing.new_figure(9.0, 3.2 + (1.15 * len(followed) if has_images else 0.0))
    heights = [2.4, *[1.0] * len(followed)] if has_images else [1.0]
    grid = figure.add_gridspec(len(heights), FRAMES + 1, height_ratios=heights)
    axes = figure.add_subplot(grid[0, :])
    for (name, track), color in zip(followed.items(), CYCLE, strict=False):
        axes.plot(track.steps, track.distances, color=color, label=name)
        pairs = zip(track.steps[1:], track.counts, track.counts[1:], strict=False)
        for step in [step for step, before, after in pairs if after > before]:
            axes.axvline(step, color=color, linestyle=":", linewidth=0.8)
    axes.set(xlabel="step", ylabel="distance to the sample", ylim=(0, None))
    axes.legend(fontsize=8)
    if has_images:
        for row, (name, track) in enumerate(followed.items(), 1):
            picks = torch.linspace(0, len(track.steps) - 1, FRAMES).round().long().tolist()
            frames = [(track.images[k], f"{name}\nstep {track.steps[k]}") for k in picks]
            for column, (image, text) in enumerate([*frames, (sample, "the sample")]):
                _show(figure.add_subplot(grid[row, column]), image, mean, text)
    return drawing.encode_png(figure)


def _show(axes: Any, image: Tensor, mean: Tensor | None, text: str) -> None:
    axes.imshow(drawing.to_pixels(add_mean(image, mean)), cmap="gray", interpolation="nearest")
    axes.set_title(text, fontsize=6)
    axes.set_axis_off()


def main(out: Path) -> None:
    """Train a network, attack it with and without growth, and draw both."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    split = load_dataset("digits", SAMPLES, seed=SEED)
    state = train(ARCH, split.train, TrainingConfig(steps=2000, seed=SEED))
    checkpoint = Network(dict(state.theta), ARCH, split.train.shape, (), "binary")
    with torch.no_grad():
        margins = checkpoint.copy_module()(split.train.x)[:, 0] * split.train.y
    sample = split.train.x[int(margins.argmin())]
    knowledge = Knowledge(value_range=(0.0, 1.0), mean=split.train.mean)
    plain = Auto(restarts=1, steps=STEPS, candidates=CANDIDATES, seed=SEED)
    grown = plain.changed(split="curvature", split_every=STEPS // 8)
    followed = {"no growth": Follow(sample), "splitting": Follow(sample)}
    attack(checkpoint, knowledge, plain, watch=followed["no growth"])
    reconstruction = attack(checkpoint, knowledge, grown, watch=followed["splitting"])
    tree = family_figure(reconstruction)
    if tree is None:
        sys.exit("no candidate was ever split")
    (out / "splitting-family.png").write_bytes(tree)
    (out / "splitting-story.png").write_bytes(story_figure(followed, split.train.mean))
    for name, track in followed.items():
        print(f"{name}: distance {track.distances[-1]:.3f} with {track.counts[-1]} candidates")


if __name__ == "__main__":
    main(*parse_paths(__doc__, "DIR"))
