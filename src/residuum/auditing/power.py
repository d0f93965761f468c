"""The power of an audit: how large a leak its tests detect in positive controls."""

from __future__ import annotations

from dataclasses import dataclass

from scipy.stats import binomtest

from residuum.records import Record

# Number of positive controls that are trained for each question.
NETWORKS = {"membership": 10, "reconstruction": 3}
TESTS = {"membership": "The test of membership", "reconstruction": "The attacks"}
VERBS = {"membership": "named", "reconstruction": "recovered"}
NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
BUDGET, HOLDOUT = "budget", "held-out samples"  # possible limits of a control's sample count
CONFIDENCE = 0.95  # confidence of the lower limit of the power
# The lower confidence limit of the power must be at least this. It is 37% if three of three networks are
# detected, 39% for seven of ten, and 30% for six of ten. It is not adjusted for sizes that were tried before.
MIN_POWER = 1 / 3


def power_limit(detected: int, networks: int) -> float:
    """Return the lower 95% confidence limit of the share of networks that are detected (Clopper-Pearson).

    Args:
        detected: Number of networks whose leak was detected.
        networks: Number of networks that were tested.

    Returns:
        The confidence limit, 0 if no network was tested.
    """
    if not networks:
        return 0.0
    test = binomtest(detected, networks, alternative="greater")
    return float(test.proportion_ci(CONFIDENCE).low)


def networks_needed(networks: int) -> int:
    """Return how many of ``networks`` positive controls must be detected to show a power of at least 1/3."""
    return next(k for k in range(networks + 2) if k > networks or _suffices(k, networks))


def _suffices(detected: int, networks: int) -> bool:
    return power_limit(detected, networks) >= MIN_POWER


@dataclass(frozen=True, eq=False)
class ControlSize(Record):
    """The results of positive controls that all have the same number of training samples.

    Attributes:
        samples: Number of samples that each network memorizes.
        counts: Number of samples that the tests detected on each network. Testing stops early if too many
            networks were missed.
        detected: Number of networks whose leak was detected.
        loss: The largest training loss of these networks.
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
        """Whether enough networks were detected to show a power of at least 1/3."""
        return _suffices(self.detected, len(self.counts))


@dataclass(frozen=True, eq=False)
class PositiveControls(Record):
    """The positive controls of membership or of reconstruction.

    Attributes:
        question: "membership" or "reconstruction".
        sizes: Results for each number of samples that was tried, the largest number first.
        training: How the networks were trained.
        tests: Names of the tests that were run on the networks.
        reason: Why no controls were run or why no smaller number of samples was tried, "" otherwise.
        limited_by: What prevents controls with as many samples as the training set: :data:`BUDGET`,
            :data:`HOLDOUT`, or "" for nothing.
        seconds: Duration of training and tests in seconds.
        subject: What was trained, in the plural, such as "networks of the same architecture".
    """

    derived = ("samples", "sentence", "power")

    question: str
    sizes: tuple[ControlSize, ...] = ()
    training: str = ""
    tests: tuple[str, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    limited_by: str = ""
    subject: str = "networks of the same architecture"

    @property
    def largest(self) -> ControlSize | None:
        """The controls with the most samples of which enough were detected, None if there are none."""
        return next((size for size in self.sizes if size.suffices), None)

    @property
    def samples(self) -> int:
        """The largest number of samples at which the tests detect enough controls, 0 if there is none."""
        return 0 if self.largest is None else self.largest.samples

    @property
    def power(self) -> float | None:
        """Lower 95% confidence limit of the share of such networks that the tests detect."""
        return None if self.largest is None else self.largest.power

    @property
    def sentence(self) -> str:
        """The result of the positive controls in one or two sentences."""
        verb, size = VERBS[self.question], self.largest
        if size is not None:
            networks = f"{NUMBER_WORDS[len(size.counts)]} {self.subject}"
            low, high = min(size.counts), max(size.counts)
            counts = f"{low}" if low == high else f"{low} to {high}"
            memorized = f"{networks} that memorize {size.samples} samples"
            sentence = f"On {memorized}, the tests {verb} {counts} of them"
            if size.detected == len(size.counts):
                return f"{sentence}."
            return f"{sentence} and detected a leak in {NUMBER_WORDS[size.detected]} of them."
        if not self.sizes:
            return f"No positive controls of {self.question} were run: {self.reason}."
        results = ", ".join(
            f"{size.detected} of {len(size.counts)} with {size.samples} samples"
            for size in self.sizes
        )
        planned = NETWORKS[self.question]
        needed = f"{NUMBER_WORDS[networks_needed(planned)]} of {NUMBER_WORDS[planned]}"
        ending = f" Smaller numbers were not tried: {self.reason}." if self.reason else ""
        return (
            f"{TESTS[self.question]} must detect a leak in at least {needed} networks that memorize held-out "
            f"samples. A leak was detected in too few of them ({results}), so finding nothing says little "
            f"about {self.question}.{ending}"
        )


def covered_samples(controls: tuple[PositiveControls, ...]) -> int:
    """Return the largest number of memorized samples at which a test detects a leak."""
    return max((control.samples for control in controls), default=0)
