"""Three sizes of every experiment: the paper's, one for a CPU in minutes, one for a test in seconds.

Experiments are written down at the paper's size; a scale says what each of their numbers becomes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residuum.datasets import load_dataset
from residuum.errors import DataError, InputError, did_you_mean
from residuum.records import Split

TEST_SAMPLES = {"mnist": 10_000, "cifar10": 8_000}  # the balanced test sets of Haim et al. 2022
HIGH_DIGITS = ("5", "6", "7", "8", "9")


@dataclass(frozen=True)
class Scale:
    """samples: training samples by the paper's number, the nearest given one counts; width: share of a
    hidden layer; training, descent: margin steps, and gradient steps at most, with lr times ``rate``;
    steps: share of an attack's steps; restarts: at most; bundled: digits stand for MNIST and CIFAR
    unless a data folder is given ("always": even then); published: whether the published settings are
    run beside residuum's.
    """

    name: str
    samples: dict[int, int]
    width: float
    training: int
    descent: int
    rate: float
    steps: float
    restarts: int
    bundled: str
    published: bool

    def n(self, paper: int) -> int:
        """Training samples where the paper has so many."""
        return self.samples.get(paper, paper)

    def hidden(self, paper: tuple[int, ...]) -> tuple[int, ...]:
        """Widths where the paper has these."""
        return tuple(max(24, round(self.width * h)) for h in paper)

    def attack_steps(self, paper: int) -> int:
        """Steps of an attack where the paper's has so many."""
        return max(100, round(self.steps * paper))

    def source(self, data: str, root: Path | None) -> tuple[str, dict[str, Any]]:
        """The dataset that stands for ``data``, with its options."""
        if self.bundled == "never" or (self.bundled == "without data" and root is not None):
            return data, {"root": root, "holdout": TEST_SAMPLES.get(data)}
        # Two different tasks on the digits, so that two datasets stay two.
        return "digits", {"positive": HIGH_DIGITS} if data == "cifar10" else {}

    def split(
        self, data: str, paper: int, root: Path | None, seed: int, task: str = "binary"
    ) -> Split:
        """Training and held-out samples of an experiment; seed 0 takes the first of each label."""
        name, options = self.source(data, root)
        n = self.n(paper)
        if task == "multiclass":
            n = max(10, n - n % 10)
            options.pop("positive", None)
        wanted = options.pop("holdout", None)
        if wanted is not None:
            # Files may hold part of the test set only; then the default number is taken.
            with suppress(DataError):
                return load_dataset(
                    name, n, seed=seed or None, task=task, holdout=wanted, **options
                )
        return load_dataset(name, n, seed=seed or None, task=task, **options)


def scale_named(name: str) -> Scale:
    """The scale of this name."""
    if name not in SCALES:
        raise InputError(f"No scale {name!r}.", did_you_mean(name, tuple(SCALES)))
    return SCALES[name]


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "tiny",
            {10: 8, 50: 10, 100: 12, 200: 12, 500: 16, 1000: 24},
            0.08,
            400,
            1500,
            20.0,
            0.1,
            2,
            "always",
            False,
        ),
        Scale(
            "small",
            {10: 10, 50: 20, 100: 30, 200: 40, 500: 60, 1000: 100},
            0.2,
            2000,
            10_000,
            5.0,
            0.2,
            3,
            "without data",
            False,
        ),
        Scale("paper", {}, 1.0, 6000, 100_000, 1.0, 1.0, 16, "never", True),
    )
}
