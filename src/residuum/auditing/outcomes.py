"""The results of the attacks of an audit, for each attack and for all attacks together."""

from __future__ import annotations

from dataclasses import dataclass, field

from residuum.evaluation.null import SIGNIFICANCE
from residuum.records import Record

VERBATIM, NEAR_COPY, RESEMBLANCE = "verbatim", "near-copy", "resemblance"
ATTRIBUTE, CLASS_LEVEL, MEMBERSHIP = "attribute", "class-level", "membership"
GRADES = {  # grades of a leak by how much it reveals of a training sample, the strongest first
    VERBATIM: "training records are stored in the file",
    NEAR_COPY: "the reconstruction is nearer to the training sample, by a quarter, than any held-out "
    "sample and than the mean of its class",
    RESEMBLANCE: "the reconstruction is nearer to the training sample, by a quarter, than the held-out "
    "mean of its class",
    ATTRIBUTE: "single values of training samples, such as their targets, can be recovered from the file",
    CLASS_LEVEL: "the reconstruction is hardly nearer to the training sample than the held-out mean of its "
    "class, so public samples give as good a picture",
    MEMBERSHIP: "training samples can be told from non-members by the weights",
}
# Name of the part of the file in which the search for stored records looks.
STORED = "records in the file"


@dataclass(frozen=True, eq=False)
class AttackOutcome(Record):
    """The result of one attack: one row of the table of attacks.

    Attributes:
        name: Name of the attack.
        decides: Whether the attack can show a leak. A baseline cannot show a leak.
        applies: Whether the attack works for this network and this knowledge.
        ran: Whether the attack was run.
        reason: Why the attack was run or not.
        surface: Attack surface, which is the part of the release that the attack works on.
        restarts: Number of restarts (runs from different random candidates).
        steps: Number of optimization steps of each restart.
        candidates: Number of candidates (reconstructed samples) of all restarts together.
        diverged: Number of restarts that diverged.
        residual: The largest value in ``residuals`` among the layers in ``judged``.
        residuals: By name of the layer, the share of its weights that the best restart does not fit. It is
            the norm of the residual, divided by the norm of the tensor that the attack fits.
        judged: Names of the layers whose residuals show whether the attack fits the weights.
        seconds: Duration of the attack in seconds.
        recovered: Number of training samples that this attack recovers.
        expected_by_chance: Mean number of samples that the attack recovers from a held-out subset as large as
            the training set.
        p_value: P-value of this attack alone.
        adjusted: P-value adjusted over all tests of the audit.
        level: The largest adjusted p-value that shows a leak.
        rule: The condition under which a sample counts as recovered, such as "ncc > 0.83".
        sample_count: Number of samples that were searched for among the stored records. None for an attack.
        unfinished: Planned work that was not done because the budget was too small, in words. "" if all
            planned work was done.
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
        """Whether the attack recovers significantly more samples than expected by chance.

        The p-value is adjusted for all tests of the audit.
        """
        return self.decides and self.adjusted is not None and self.adjusted <= self.level

    @property
    def is_stored(self) -> bool:
        """Whether this row is about stored records, and shows that the file stores training records."""
        return self.decides and self.surface == STORED

    @property
    def status(self) -> str:
        """The result of the attack in one or two words, such as "recovered" or "not run"."""
        if not self.ran:
            return "not run" if self.applies else "not applicable"
        if not self.decides:
            return "baseline"
        return "found" if self.survives or self.is_stored else "ran"

    @property
    def meaning(self) -> str:
        """A sentence that says what the number of samples that this attack recovered means."""
        if self.is_stored:
            return "stored in the file, so no attack is needed"
        if self.survives:
            return "recovers more than expected by chance over all tests"
        if (self.p_value or 1.0) <= self.level and self.recovered:
            return "recovers more than chance by itself, but not over all tests"
        return "recovers no more than chance"


@dataclass(frozen=True, eq=False)
class Findings(Record):
    """The number of training samples that all attacks together recovered, with the tests of this number.

    Attributes:
        n: Number of training samples.
        reason: Why candidates and samples could not be compared, "" if they could.
        recovered: Number of distinct training samples that the attacks in ``survivors`` recovered.
        expected_by_chance: Mean number of samples that the same attacks recover from a held-out subset as
            large as the training set.
        interval: 99% confidence interval of the number of recovered samples in excess of chance. The interval
            begins above 0 if and only if ``survivors`` is not empty.
        p_value: The smallest adjusted p-value.
        level: The largest adjusted p-value that shows a leak.
        metric: The similarity by which the tests decide, such as "ncc".
        rule: The condition under which a sample counts as recovered, such as "ncc > 0.83".
        tests: Number of attacks that were tested.
        survivors: Names of the attacks that recover significantly more samples than expected by chance, after
            adjustment for all tests.
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
        """Grade of the leak of all recovered samples together, "" if no leak was found.

        This is the strongest grade for which the number of samples with this grade or a stronger grade
        exceeds the number expected by chance.
        """
        samples_of_grade_or_stronger = 0
        for grade in GRADES if self.survivors else ():
            samples_of_grade_or_stronger += self.grades.get(grade, 0)
            if samples_of_grade_or_stronger > self.expected_by_chance:
                return grade
        return CLASS_LEVEL if self.survivors else ""
