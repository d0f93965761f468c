"""What positive controls show: how large a leak the tests of an audit would have noticed."""

from __future__ import annotations

from dataclasses import dataclass

from residuum.records import Record

NETWORKS = {"membership": 10, "reconstruction": 3}  # positive controls of each question
TESTS = {"membership": "The test of membership", "reconstruction": "The attacks"}
VERBS = {"membership": "named", "reconstruction": "recovered"}
NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
CONFIDENCE = 0.95  # of the lower limit of the power


@dataclass(frozen=True, eq=False)
class ControlSize(Record):
    """Positive controls with one number of samples.

    Attributes:
        samples: Number of samples that each network memorizes.
        counts: Samples that the tests found on each network. The list ends with the first network that
            was not noticed.
        noticed: Whether all networks were noticed.
        loss: The largest loss of these networks on their samples.
    """

    samples: int
    counts: tuple[int, ...]
    noticed: bool
    loss: float


@dataclass(frozen=True, eq=False)
class PositiveControls(Record):
    """The positive controls of one question.

    Attributes:
        question: "membership" or "reconstruction".
        sizes: The sizes that were tried, the largest first.
        made: How the networks were trained.
        tests: What was run on them.
        reason: Why no controls were run or why no smaller size was tried, "" otherwise.
        seconds: Time that they took.
    """

    derived = ("samples", "sentence", "power")

    question: str
    sizes: tuple[ControlSize, ...] = ()
    made: str = ""
    tests: tuple[str, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    @property
    def noticed(self) -> ControlSize | None:
        """The largest size at which all networks were noticed, None if there is none."""
        return next((size for size in self.sizes if size.noticed), None)

    @property
    def samples(self) -> int:
        """The largest number of samples at which all networks were noticed, 0 if there is none."""
        return 0 if self.noticed is None else self.noticed.samples

    @property
    def power(self) -> float | None:
        """Lower 95% confidence limit of the share of such networks that the tests notice."""
        if self.noticed is None:
            return None
        return float((1 - CONFIDENCE) ** (1 / len(self.noticed.counts)))

    @property
    def sentence(self) -> str:
        """What the controls show."""
        verb = VERBS[self.question]
        if (size := self.noticed) is not None:
            low, high = min(size.counts), max(size.counts)
            counts = f"{low}" if low == high else f"{low} to {high}"
            return (
                f"On {NUMBER_WORDS[len(size.counts)]} networks of the same architecture that memorize "
                f"{size.samples} samples, the tests {verb} {counts} of them."
            )
        if not self.sizes:
            return f"No positive controls of {self.question} were run: {self.reason}."
        tried = ", ".join(str(size.samples) for size in self.sizes)
        ending = f" Smaller numbers were not tried: {self.reason}." if self.reason else ""
        return (
            f"{TESTS[self.question]} did not notice networks of the same architecture that memorize {tried} "
            "samples, "
            f"so finding nothing says little about {self.question}.{ending}"
        )


def covered_samples(controls: tuple[PositiveControls, ...]) -> int:
    """Return the largest number of memorized samples that the tests of some question notice."""
    return max((control.samples for control in controls), default=0)
