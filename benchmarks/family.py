"""Pictures of an attack that grows, on digits: its family tree, and one sample's story.

Run as ``python -m benchmarks.family DIR``. The sample followed is the first of the margin samples,
whatever becomes of it; both attacks start from the same candidates.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from residuum.attacks import GROWTH_PRESETS, AttackConfig, attack
from residuum.checkpoints import build_model
from residuum.datasets import load_dataset
from residuum.records import Checkpoint, Knowledge
from residuum.report.family import Follow, family_figure, story_figure
from residuum.training import TrainingConfig, train

ARCH, SAMPLES, SEED = "mlp:64-200-200-1", 20, 3000
STEPS, CANDIDATES = 4000, 10


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    split = load_dataset("digits", SAMPLES, seed=SEED)
    state = train(ARCH, split.train, TrainingConfig(steps=2000, seed=SEED))
    checkpoint = Checkpoint(dict(state.theta), ARCH, split.train.shape, (), "binary")
    with torch.no_grad():
        margins = build_model(checkpoint)(split.train.x)[:, 0] * split.train.y
    sample = split.train.x[int(margins.argmin())]
    knowledge = Knowledge(value_range=(0.0, 1.0), mean=split.train.mean)
    plain = AttackConfig(restarts=1, steps=STEPS, candidates=CANDIDATES, seed=SEED)
    grown = replace(plain, **{**GROWTH_PRESETS["auto"], "split_every": STEPS // 8})
    followed = {"no growth": Follow(sample), "splitting": Follow(sample)}
    attack(checkpoint, knowledge, plain, watch=followed["no growth"])
    found = attack(checkpoint, knowledge, grown, watch=followed["splitting"])
    tree = family_figure(found)
    if tree is None:
        sys.exit("no candidate was ever split")
    (out / "splitting-family.png").write_bytes(tree)
    (out / "splitting-story.png").write_bytes(story_figure(followed, split.train.mean))
    for name, one in followed.items():
        print(f"{name}: distance {one.distances[-1]:.3f} with {one.counts[-1]} candidates")


if __name__ == "__main__":
    main()
