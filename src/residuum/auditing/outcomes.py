"""The results of the attacks of an audit: one row per attack, and all their tests together."""

from __future__ import annotations

from dataclasses import dataclass, field

from residuum.evaluation.null import SIGNIFICANCE
from residuum.records import Record

VERBATIM, NEAR_COPY, RESEMBLANCE = "verbatim", "near-copy", "resemblance"
CLASS_LEVEL, MEMBERSHIP = "class-level", "membership"
GRADES = {  # of a leak, the strongest first
    VERBATIM: "training records are stored in the file",
    NEAR_COPY: "the reconstruction is nearer to the training sample, by a quarter, than any held-out "
    "sample and than the mean of its class",
    RESEMBLANCE: "the reconstruction is nearer to the training sample, by a quarter, than the held-out "
    "mean of its class",
    CLASS_LEVEL: "the reconstruction is hardly nearer to the training sample than the held-out mean of its "
    "class, so public samples give as good a picture",
    MEMBERSHIP: "training samples can be told from non-members by the weights",
}
STORED = "records in the file"  # attack surface of records that are stored verbatim


@dataclass(frozen=True, eq=False)
class AttackOutcome(Record):
    """The result of one attack on its attack surface. A deciding attack is a test.

    Attributes:
        name: Name of the attack.
        decides: Whether its test can show a leak. A baseline does not decide.
        applies: Whether the attack works for this network and this knowledge.
        ran: Whether it was run.
        reason: Why it was run or not.
        surface: The attack surface.
        restarts: Restarts of all its batches.
        steps: Steps of each restart.
        candidates: Candidates of all restarts.
        diverged: Restarts that diverged.
        residual: The largest residual of the layers that count, of the best restart.
        residuals: Residuals of all layers, norm over norm.
        judged: Names of the layers that count.
        seconds: Time that it took.
        recovered: Training samples that this test alone recovers.
        expected_by_chance: Samples that it recovers of as many held-out samples.
        p_value: P-value of this test alone.
        adjusted: P-value over all tests of the audit.
        level: The largest adjusted p-value that shows a leak.
        rule: What counts as recovered, such as "ncc > 0.83".
        sample_count: Number of samples of this test, None if it is that of the audit.
        unfinished: What the budget left out of its plan, "" if nothing.
    """

    derived = ("status",)

    name: str
    decides: bool
    applies: bool
    ran: bool
    reason: str
    surface: str = ""
    restarts: int = 0
    steps: int = 0
    candidates: int = 0
    diverged: int = 0
    residual: float | None = None
    residuals: dict[str, float] = field(default_factory=dict)
    judged: tuple[str, ...] = ()
    seconds: float = 0.0
    recovered: int | None = None
    expected_by_chance: float | None = None
    p_value: float | None = None
    adjusted: float | None = None
    level: float = SIGNIFICANCE
    rule: str = ""
    sample_count: int | None = None
    unfinished: str = ""

    @property
    def survives(self) -> bool:
        """Whether the attack recovers more than expected by chance over all tests."""
        return self.decides and self.adjusted is not None and self.adjusted <= self.level

    @property
    def is_stored(self) -> bool:
        """Whether this row is the search for stored records, which needs no attack."""
        return self.decides and self.surface == STORED

    @property
    def status(self) -> str:
        """The result in one or two words."""
        if not self.ran:
            return "not run" if self.applies else "not applicable"
        if not self.decides:
            return "baseline"
        return "found" if self.survives or self.is_stored else "ran"

    @property
    def meaning(self) -> str:
        """What the count of this test means among all tests."""
        if self.is_stored:
            return "stored in the file, so no attack is needed"
        if self.survives:
            return "recovers more than chance gives all tests together"
        if (self.p_value or 1.0) <= self.level and self.recovered:
            return "recovers more than chance by itself, but not over all tests"
        return "recovers no more than chance"


@dataclass(frozen=True, eq=False)
class Findings(Record):
    """What the tests of all attacks recovered together.

    Attributes:
        n: Number of training samples.
        reason: Why nothing could be compared, "" if it could.
        recovered: Distinct samples that surviving tests recovered, 0 without a surviving test.
        expected_by_chance: Samples that the same tests recover of as many held-out samples.
        interval: How many of the recovered samples go beyond chance, with 99% confidence. It begins above 0
            if and only if a test survives.
        p_value: The smallest adjusted p-value.
        level: The largest adjusted p-value that shows a leak.
        metric: The metric that decides.
        rule: What a sample had to beat in the tests that count.
        tests: Number of tests.
        survivors: Names of the attacks whose tests survive.
        samples: Rows of the recovered samples.
        grades: Number of recovered samples of each grade.
        set_aside_matches: Rows of samples that were not judged and match a reconstruction.
    """

    n: int
    reason: str = ""
    recovered: int = 0
    expected_by_chance: float = 0.0
    interval: tuple[float, float] | None = None
    p_value: float = 1.0
    level: float = SIGNIFICANCE
    metric: str = ""
    rule: str = ""
    tests: int = 0
    survivors: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()
    grades: dict[str, int] = field(default_factory=dict)
    set_aside_matches: tuple[int, ...] = ()

    @property
    def grade(self) -> str:
        """The strongest grade that more samples reach than chance alone recovers, "" without a survivor."""
        reached = 0
        for grade in GRADES if self.survivors else ():
            reached += self.grades.get(grade, 0)
            if reached > self.expected_by_chance:
                return grade
        return CLASS_LEVEL if self.survivors else ""
