"""The power of an audit: how large a leak its tests detect in positive controls."""

from __future__ import annotations

from dataclasses import dataclass

from scipy.stats import binomtest

from residuum.records import Record

NETWORKS = {"membership": 10, "reconstruction": 3}  # positive controls of each question
TESTS = {"membership": "The test of membership", "reconstruction": "The attacks"}
VERBS = {"membership": "named", "reconstruction": "recovered"}
NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
BUDGET, HOLDOUT = "budget", "held-out samples"  # what limits the number of samples of a control
CONFIDENCE = 0.95  # of the lower limit of the power
# Three of three networks have a lower limit of 37%, seven of ten 39%, six of ten 30%.
MIN_POWER = 1 / 3


def power_limit(detected: int, networks: int) -> float:
    """Return the lower 95% confidence limit of the power (Clopper and Pearson 1934).

    Args:
        detected: Number of networks whose leak was detected.
        networks: Number of networks that were tested.

    Returns:
        The limit, 0 without networks.
    """
    if not networks:
        return 0.0
    test = binomtest(detected, networks, alternative="greater")
    return float(test.proportion_ci(CONFIDENCE).low)


def networks_needed(networks: int) -> int:
    """Return how many of these networks must be detected, so that the power is at least 1/3."""
    return next(k for k in range(networks + 2) if k > networks or _suffices(k, networks))


def _suffices(detected: int, networks: int) -> bool:
    return power_limit(detected, networks) >= MIN_POWER


@dataclass(frozen=True, eq=False)
class ControlSize(Record):
    """Positive controls with one number of samples.

    Attributes:
        samples: Number of samples that each network memorizes.
        counts: Number of samples that the tests detected on each network. The list is shorter if too many
            networks were missed.
        detected: Number of networks whose leak was detected.
        loss: The largest loss of these networks on their samples.
    """

    derived = ("power", "suffices")

    samples: int
    counts: tuple[int, ...]
    detected: int
    loss: float

    @property
    def power(self) -> float:
        """Lower 95% confidence limit of the share of such networks that the tests detect."""
        return power_limit(self.detected, len(self.counts))

    @property
    def suffices(self) -> bool:
        """Whether the power is at least 1/3."""
        return _suffices(self.detected, len(self.counts))


@dataclass(frozen=True, eq=False)
class PositiveControls(Record):
    """The positive controls of one question.

    Attributes:
        question: "membership" or "reconstruction".
        sizes: The sizes that were tried, the largest first.
        training: How the networks were trained.
        tests: What was run on them.
        reason: Why no controls were run or why no smaller size was tried, "" otherwise.
        limited_by: :data:`BUDGET` or :data:`HOLDOUT` if it does not allow controls with as many samples as
            the training set, otherwise "".
        seconds: Time that they took.
    """

    derived = ("samples", "sentence", "power")

    question: str
    sizes: tuple[ControlSize, ...] = ()
    training: str = ""
    tests: tuple[str, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    limited_by: str = ""

    @property
    def largest(self) -> ControlSize | None:
        """The largest size at which enough networks were detected, None if there is none."""
        return next((size for size in self.sizes if size.suffices), None)

    @property
    def samples(self) -> int:
        """The largest number of samples at which enough networks were detected, 0 if there is none."""
        return 0 if self.largest is None else self.largest.samples

    @property
    def power(self) -> float | None:
        """Lower 95% confidence limit of the share of such networks that the tests detect."""
        return None if self.largest is None else self.largest.power

    @property
    def sentence(self) -> str:
        """The result of the controls in a sentence."""
        verb, size = VERBS[self.question], self.largest
        if size is not None:
            networks = f"{NUMBER_WORDS[len(size.counts)]} networks of the same architecture"
            low, high = min(size.counts), max(size.counts)
            counts = f"{low}" if low == high else f"{low} to {high}"
            memorized = f"{networks} that memorize {size.samples} samples"
            sentence = f"On {memorized}, the tests {verb} {counts} of them"
            if size.detected == len(size.counts):
                return f"{sentence}."
            return f"{sentence} and detected a leak in {NUMBER_WORDS[size.detected]} networks."
        if not self.sizes:
            return f"No positive controls of {self.question} were run: {self.reason}."
        results = ", ".join(
            f"{size.detected} of {len(size.counts)} with {size.samples}" for size in self.sizes
        )
        ending = f" Smaller numbers were not tried: {self.reason}." if self.reason else ""
        return (
            f"{TESTS[self.question]} detected a leak in too few networks that memorize their samples "
            f"({results} samples), so finding nothing says little about {self.question}.{ending}"
        )


def covered_samples(controls: tuple[PositiveControls, ...]) -> int:
    """Return the largest number of memorized samples at which the tests of some question detect a leak."""
    return max((control.samples for control in controls), default=0)
