"""The power of an audit: how often its tests detect a leak in networks that memorize their samples."""

from __future__ import annotations

from dataclasses import dataclass

from scipy.stats import binomtest

from residuum.records import Record

# Number of positive controls (networks that memorize their samples) that are trained for each question.
NETWORKS = {"membership": 10, "reconstruction": 3}
TESTS = {"membership": "The test of membership", "reconstruction": "The attacks"}
VERBS = {"membership": "named", "reconstruction": "recovered"}
NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
# Names of the reasons why a positive control has fewer training samples than the audited network.
BUDGET, HOLDOUT = "budget", "held-out samples"
CONFIDENCE = 0.95  # confidence level of the lower confidence limit of the power
# The power is the probability that the audit detects a leak in a positive control. Its lower confidence
# limit must be at least MIN_POWER. The limit is 37% if three of three controls are detected, 39% for seven
# of ten, and 30% for six of ten.
MIN_POWER = 1 / 3


def power_limit(detected: int, networks: int) -> float:
    """Return the lower 95% confidence limit of the share of networks in which a leak is detected.

    This is the Clopper-Pearson limit.

    Args:
        detected: Number of networks in which a leak was detected.
        networks: Number of networks that were tested.

    Returns:
        The confidence limit, 0 if no network was tested.
    """
    if not networks:
        return 0.0
    binomial_test = binomtest(detected, networks, alternative="greater")
    return float(binomial_test.proportion_ci(CONFIDENCE).low)


def networks_needed(networks: int) -> int:
    """Return the number of networks with a detected leak that shows a power of at least 1/3.

    The power is the share of networks in which the tests detect a leak. ``networks`` networks are tested.
    """
    return next(k for k in range(networks + 2) if k > networks or _suffices(k, networks))


def _suffices(detected: int, networks: int) -> bool:
    return power_limit(detected, networks) >= MIN_POWER


@dataclass(frozen=True, eq=False)
class ControlSize(Record):
    """The results of positive controls that all have the same number of training samples.

    Attributes:
        samples: Number of samples that each network memorizes.
        counts: Number of samples that the tests detected in each network. If the tests miss a leak in too
            many networks, no further networks are tested.
        detected: Number of networks in which a leak was detected.
        loss: The largest training loss of the networks.
    """

    derived = ("power", "suffices")

    samples: int
    counts: tuple[int, ...]
    detected: int
    loss: float

    @property
    def power(self) -> float:
        """Lower 95% confidence limit of the power: the share of networks in which the tests detect a leak."""
        return power_limit(self.detected, len(self.counts))

    @property
    def suffices(self) -> bool:
        """Whether a leak was detected in enough networks to show that the power is at least 1/3."""
        return _suffices(self.detected, len(self.counts))


@dataclass(frozen=True, eq=False)
class PositiveControls(Record):
    """The positive controls for one question of an audit: membership or reconstruction.

    A positive control is a network that is known to memorize its training samples.

    Attributes:
        question: "membership" or "reconstruction".
        sizes: Results for each number of training samples that was tried, the largest number first.
        training: How the networks were trained.
        tests: Names of the tests that were run on the networks.
        reason: Why no controls were run or why no smaller number of samples was tried, "" otherwise.
        limited_by: What prevents controls with as many samples as the training set: "budget" or "held-out
            samples". "" if nothing prevents them.
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
        """Results at the largest number of training samples at which enough leaks are detected.

        None if the tests miss too many leaks at every number of samples.
        """
        return next((size for size in self.sizes if size.suffices), None)

    @property
    def samples(self) -> int:
        """Largest number of training samples at which the tests detect a leak in enough networks, or 0."""
        return 0 if self.largest is None else self.largest.samples

    @property
    def power(self) -> float | None:
        """Lower 95% confidence limit of the power, None if the tests miss too many leaks at every size.

        The power is the share of networks in which the tests detect a leak. It is taken at the largest number
        of samples at which the tests detect a leak in enough networks.
        """
        return None if self.largest is None else self.largest.power

    @property
    def sentence(self) -> str:
        """The result of the positive controls (networks that memorize their samples), as text."""
        verb, size = VERBS[self.question], self.largest
        if size is not None:
            network_text = f"{NUMBER_WORDS[len(size.counts)]} {self.subject}"
            low, high = min(size.counts), max(size.counts)
            count_text = f"{low}" if low == high else f"{low} to {high}"
            memorizing_networks = f"{network_text} that memorize {size.samples} samples"
            count_sentence = f"On {memorizing_networks}, the tests {verb} {count_text} of them"
            if size.detected == len(size.counts):
                return f"{count_sentence}."
            subject_noun = self.subject.split()[0]
            detected_text = f"{NUMBER_WORDS[size.detected]} {subject_noun}"
            return f"{count_sentence} and detected a leak in {detected_text}."
        if not self.sizes:
            return f"No positive controls of {self.question} were run: {self.reason}."
        result_text = ", ".join(
            f"{size.detected} of {len(size.counts)} with {size.samples} samples"
            for size in self.sizes
        )
        planned_networks = NETWORKS[self.question]
        needed_text = (
            f"{NUMBER_WORDS[networks_needed(planned_networks)]} of {NUMBER_WORDS[planned_networks]}"
        )
        reason_text = f" Smaller numbers were not tried: {self.reason}." if self.reason else ""
        return (
            f"{TESTS[self.question]} must detect a leak in at least {needed_text} networks that memorize "
            f"held-out samples. A leak was detected in too few of them ({result_text}), so finding nothing "
            f"says little about {self.question}.{reason_text}"
        )


def covered_samples(controls: tuple[PositiveControls, ...]) -> int:
    """Return the largest number of samples of positive controls in which leaks are detected, or 0."""
    return max((control.samples for control in controls), default=0)
