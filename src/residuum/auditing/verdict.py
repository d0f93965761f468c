"""The verdict: one table, first row that holds, one exit code.

| case                                                                     | verdict       | exit |
|--------------------------------------------------------------------------|---------------|------|
| records stand in the file outright (``run.Stored``)                      | leak          | 1    |
| held-out control missing or too small; a control fails                   | inconclusive  | 3    |
| a test survives                                                          | leak, graded  | 1    |
| no attack that could acquit explained its surface; an attack that could  | inconclusive  | 3    |
| did not finish its plan; the clock stopped the audit; the network does   |               |      |
| not know these samples (unless vouched for); a sample that was set aside |               |      |
| matches a reconstruction; a positive control was not noticed             |               |      |
| otherwise                                                                | no-leak-found | 0    |

Every deciding attack is a test of its own; a test survives when its p, adjusted over all of them, is at
most 1% (``evaluation/null.py``). Explained: the residual of the judged layers, in float64, is at most
half of what the same attack leaves on a target whose entries were permuted layer by layer: there is
nothing to explain there. Judged layers (``attacks/stationarity/problem.py``): with a start those that
moved, and none of them counts where the first did not; without one the first.

A pipeline may set its own condition of failure: a leak, one of a grade, or a comparison such as
``recovered>=5``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from residuum.auditing.budget import Batch
from residuum.auditing.inputs import Fit
from residuum.errors import InputError, require_known
from residuum.evaluation.null import SIGNIFICANCE, format_p
from residuum.io.metadata import METADATA_SAYS
from residuum.networks.network import Network
from residuum.records import Knowledge, Record, Scores
from residuum.records.published import SchemaRule, Share
from residuum.surfaces.inspection import Inspection

LEAK, NO_LEAK_FOUND, INCONCLUSIVE = "leak", "no-leak-found", "inconclusive"
EXIT_CODES = {NO_LEAK_FOUND: 0, LEAK: 1, INCONCLUSIVE: 3}
HEADLINES = {
    LEAK: "Leak found",
    NO_LEAK_FOUND: "No leak found by these attacks",
    INCONCLUSIVE: "Inconclusive",
}
WHAT_IT_MEANS = {  # that nothing was found
    NO_LEAK_FOUND: "Attacks that were not run may still succeed.",
    INCONCLUSIVE: "That shows neither a leak nor that there is none.",
}
NEAR_COPY, RESEMBLES, CLASS_LIKE = "near-copy", "resembles", "class-like"
GRADES = {  # of a leak, the worst first
    NEAR_COPY: "what came back is nearer to the training sample, by a quarter, than any held-out sample "
    "and than the mean of its class",
    RESEMBLES: "what came back is nearer to the training sample, by a quarter, than the held-out mean of "
    "its class",
    CLASS_LIKE: "what came back is hardly nearer to the training sample than the held-out mean of its "
    "class: public samples give as good a picture",
}
COUNTED = ("n", "recovered", "expected_by_chance", "interval", "p_value", "metric", "rule", "tests")
VOUCHED = "the auditor vouches that network and records were read rightly (--vouch)"
HURRIED = "no time was left for it"
MIN_CONTROLS = 3  # positive controls, all of which must be noticed: one may be lucky
MIN_NOTICED = 3  # recovered samples of a positive control: fewer may be luck
EXPLAINED = 0.5  # of the residual that the same attack leaves on the permuted target
BASELINE_MEANING = {
    "first-layer-weights": "rows of the first layer look like training samples",
    "model-inversion": "inputs that the network is surest of look like training samples",
}

STATE_THERE = (
    "the file holds optimizer state, for which there is no positive control, so finding nothing there "
    "proves nothing"
)
STORED = "records in the file"  # a surface that needs no attack
SURFACES_SAID = {
    STORED: "what is stored in it",
    "weights": "the weights",
    "weights - start": "the change from the start",
    "moment": "the optimiser state in this file",
}
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_COMPARISON = re.compile(rf"\s*([a-z_]+)\s*(>=|<=|==|>|<)\s*({_NUMBER})\s*")
_COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq}
_COMPARE |= {">": operator.gt, "<": operator.lt}


@dataclass(frozen=True, eq=False)
class AttackOutcome(Record):
    """One attack on its surface and what became of it: a test, where it decides.

    decides: a baseline does not.
    ran, reason: whether it was run and why.
    residuals: of every layer, norm over norm, of the best restart that did not diverge.
    judged: the layers that count.
    residual: the worst of these.
    permuted: the same on the permuted target, None where it was not needed or, for the reason
        ``unasked``, is not known.
    silent: why even a small residual would say nothing.
    recovered, expected_by_chance, p_value: of this test alone.
    adjusted: its p over all tests.
    rule: what counts as recovered there, such as "ncc > 0.83".
    of: how many samples, where the test has its own.
    applies: whether the network and what is granted fit it.
    unfinished: what of its planned steps and restarts did not run, "" if all did.
    restarts, steps, candidates: of all its batches; diverged: restarts that did.
    """

    derived = ("status", "explained", "limit")

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
    permuted: float | None = None
    unasked: str = ""
    residuals: dict[str, float] = field(default_factory=dict)
    judged: tuple[str, ...] = ()
    silent: str = ""
    seconds: float = 0.0
    recovered: int | None = None
    expected_by_chance: float | None = None
    p_value: float | None = None
    adjusted: float | None = None
    rule: str = ""
    of: int | None = None
    unfinished: str = ""

    @property
    def limit(self) -> float | None:
        """The most that an explained surface leaves of its judged layers; None where nobody asked."""
        return None if self.permuted is None else EXPLAINED * self.permuted

    @property
    def explained(self) -> bool:
        """Some restart did not diverge and leaves at most half of what the permuted target keeps."""
        if self.silent or self.residual is None or self.limit is None:
            return False
        return self.residual <= self.limit

    @property
    def survives(self) -> bool:
        """Whether it found more than chance gives all tests together."""
        return self.decides and self.adjusted is not None and self.adjusted <= SIGNIFICANCE

    @property
    def stands(self) -> bool:
        """Whether it is no attack but what stands in the file."""
        return self.decides and self.surface == STORED

    @property
    def status(self) -> str:
        """What became of it, in a word or two."""
        if not self.ran:
            return "not run" if self.applies else "not applicable"
        if not self.decides:
            return "baseline"
        if self.survives or self.stands:
            return "found"
        if self.permuted is None:
            return "ran"
        return "explained" if self.explained else "not explained"

    @property
    def meaning(self) -> str:
        """What its count says, as a test of its own among all."""
        if self.stands:
            return "stands in the file: nothing has to be found"
        if self.survives:
            return "finds more than chance gives all tests together"
        if (self.p_value or 1.0) <= SIGNIFICANCE and self.recovered:
            return "finds more than chance by itself, and not over all tests"
        found = "finds no more than chance"
        if self.silent:
            return f"{found}; {self.silent}"
        if self.unasked:
            return f"{found}; whether it explains these weights is not known: {self.unasked}"
        if self.permuted is None:
            return found
        if self.explained:
            return f"{found}, and explains these weights: that says something"
        return f"{found}, and does not explain these weights: that says nothing"


@dataclass(frozen=True, eq=False)
class Findings(Record):
    """What all tests of an audit found together; reason: why nothing could be compared.

    recovered: distinct samples of n that surviving tests recovered, none without one; expected: of
        as many held-out samples by the same tests (by all of them where none survives).
    interval: how many of the recovered samples go beyond chance, with 99% confidence. It begins
        above 0 if and only if a test survives.
    p_value: the smallest adjusted one.
    samples: which were recovered.
    grades: how many of them have each grade.
    metric, rule: what decides, and what a sample had to beat in the tests that count.
    survivors: names of the attacks whose tests survive.
    set_aside_matches: rows of samples that were not judged and match a reconstruction.
    """

    n: int
    reason: str = ""
    recovered: int = 0
    expected_by_chance: float = 0.0
    interval: tuple[float, float] | None = None
    p_value: float = 1.0
    metric: str = ""
    rule: str = ""
    tests: int = 0
    survivors: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()
    grades: dict[str, int] = field(default_factory=dict)
    set_aside_matches: tuple[int, ...] = ()

    @property
    def grade(self) -> str:
        """The worst grade that more samples reach than chance alone recovers; "" without a survivor."""
        reached = 0
        for grade in GRADES if self.survivors else ():
            reached += self.grades.get(grade, 0)
            if reached > self.expected_by_chance:
                return grade
        return CLASS_LIKE if self.survivors else ""


@dataclass(frozen=True, eq=False)
class Twin(Record):
    """A positive control: a network that is known to memorize its data, attacked like the audited one.

    recovered of n came back, where chance gives expected_by_chance, by all tests together.
    made: how it was trained.
    attacked: what was run on it, batches: its restarts and steps, left_out: what was run on the
        audited network alone, and why.
    reason: why the control was not run, "" if it was.
    p_value: the smallest adjusted one of the tests on it.
    rule: what one of its samples had to beat.
    """

    n: int = 0
    recovered: int = 0
    expected_by_chance: float = 0.0
    p_value: float = 1.0
    rule: str = ""
    made: str = ""
    attacked: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    batches: tuple[Batch, ...] = ()
    seconds: float = 0.0
    reason: str = ""

    @property
    def noticed(self) -> bool:
        """Whether this audit notices what the control memorized."""
        significant = not self.reason and self.p_value <= SIGNIFICANCE
        return significant and self.recovered >= MIN_NOTICED

    @property
    def sentence(self) -> str:
        """The result of the control, and how it was trained and attacked."""
        if self.reason:
            return f"the positive control was not run: {self.reason}"
        without = f" (not by {'; '.join(self.left_out)})" if self.left_out else ""
        return (
            f"a positive control was {'' if self.noticed else 'not '}noticed: {self.recovered} of {self.n} "
            f"samples were recovered ({self.rule}; {self.expected_by_chance:.2g} expected by chance, "
            f"{format_p(self.p_value)}), attacked by {' and '.join(self.attacked)}{without}; {self.made}"
        )


def summarize_positive_controls(controls: tuple[Twin, ...]) -> str:
    """Return the outcome of all positive controls in one sentence."""
    noticed = [control for control in controls if control.noticed]
    counts = ", ".join(f"{one.recovered} of {one.n}" for one in controls if not one.reason)
    said = f"{len(noticed)} of {len(controls)} networks that are known to memorize their data were noticed"
    if counts:
        said += f" (recovered: {counts}; at least {MIN_NOTICED} are needed each)"
    missing = [control.reason for control in controls if control.reason]
    return said + (f"; one was not run: {missing[0]}" if missing else "")


@dataclass(frozen=True, eq=False)
class Checks(Record):
    """What stands between "nothing was found" and "no leak found".

    failures: controls that failed.
    fit: of the network as read.
    told_apart: p that its losses do not tell training from held-out samples, None where nobody
        could ask.
    vouched: the auditor's word that reading and samples are right.
    twins: the positive controls, () if none was needed.
    set_aside: rows of training samples that were not judged, because the held-out set holds them too.
    stopped: why the clock stopped the audit, "" if it did not.
    budget_needed: seconds that an audit with the full plan would take, None if not estimated.
    """

    failures: tuple[str, ...] = ()
    fit: Fit | None = None
    told_apart: float | None = None
    vouched: bool = False
    twins: tuple[Twin, ...] = ()
    set_aside: tuple[int, ...] = ()
    stopped: str = ""
    budget_needed: float | None = None

    @property
    def has_power(self) -> bool:
        """Whether all positive controls were run and noticed."""
        enough = len(self.twins) >= MIN_CONTROLS
        return enough and all(control.noticed for control in self.twins)

    @property
    def hurried(self) -> bool:
        """Whether there was no time for a positive control."""
        return any(control.reason == HURRIED for control in self.twins)

    @property
    def strangers(self) -> tuple[str, ...]:
        """Why nothing shows that this network was trained on these samples."""
        found = []
        if self.fit is not None and self.fit.doubtful:
            found.append(f"it hardly fits them ({self.fit.line})")
        if self.told_apart is None:
            found.append("there are no labels or samples to compare its losses with")
        elif self.told_apart > SIGNIFICANCE:
            p = format_p(self.told_apart)
            found.append(f"its losses do not tell them from held-out samples ({p})")
        said = "nothing shows that this network was trained on these records"
        return tuple(f"{said}: {why}" for why in found)


@dataclass(frozen=True, eq=False)
class Verdict(Record):
    """The outcome with the numbers it rests on; reasons: one sentence each.

    recovered of n training samples beat the held-out control in tests that survive.
    not_judged: training samples beyond these n that also occur in the held-out set.
    interval: how many of the recovered samples go beyond chance, with 99% confidence.
    p_value: adjusted over all tests.
    rule: what a sample had to beat, such as "ncc > 0.83".
    grade: of a leak, how near what came back is.
    tests: how many there were.
    stored: what the file holds outright.
    """

    derived = ("exit_code", "sentence", "significance")

    outcome: Annotated[str, SchemaRule(enum=[*EXIT_CODES])]
    reasons: tuple[str, ...] = ()
    n: int | None = None
    recovered: int | None = None
    expected_by_chance: float | None = None
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    metric: str = ""
    rule: str = ""
    grade: str = ""
    tests: int = 0
    stored: str = ""
    not_judged: int = 0

    def __post_init__(self) -> None:
        if self.outcome not in EXIT_CODES:
            raise ValueError(f"A verdict is one of {tuple(EXIT_CODES)}; got {self.outcome!r}.")

    @property
    def exit_code(self) -> Annotated[int, SchemaRule(enum=[*EXIT_CODES.values()])]:
        """What ``residuum audit`` ends with."""
        return EXIT_CODES[self.outcome]

    @property
    def significance(self) -> Share:
        """The largest adjusted p-value that shows a leak."""
        return SIGNIFICANCE

    @property
    def headline(self) -> str:
        """The outcome in a few words, and how many records it does not cover."""
        text = HEADLINES[self.outcome] + (f": {self.grade}" if self.grade else "")
        return f"{text} ({self.coverage})" if self.coverage else text

    @property
    def coverage(self) -> str:
        """How many training samples the verdict does not cover, "" if it covers all."""
        if not self.not_judged or self.n is None:
            return ""
        given = self.n + self.not_judged
        return f"{self.not_judged} of {given} records were not judged"

    @property
    def sentence(self) -> str:
        """The result with its numbers: evidence about attacks that were run, never a guarantee."""
        missing = " The records that were not judged also occur in the held-out set."
        return self._result + (missing if self.coverage else "")

    @property
    def _result(self) -> str:
        if self.stored:
            said = (
                f"The file itself holds {self.stored} outright: no attack is needed to read them."
            )
            if self.recovered is None:
                return said
            others = self.expected_by_chance
            control = "" if others is None else f", of as many held-out samples {others:.3g}"
            return f"{said} Of {self.n} training samples {self.recovered} stand in it{control}."
        if self.recovered is None or self.n is None:
            return (
                "Nothing was compared with samples the network never saw, so what came back shows "
                "neither a leak nor that there is none."
            )
        chance = "–" if self.expected_by_chance is None else f"{self.expected_by_chance:.2g}"
        if self.outcome == LEAK:
            did = "were matched closely" if self.grade == CLASS_LIKE else "came back"
            graded = f" Grade {self.grade}: {GRADES[self.grade]}." if self.grade else ""
            return (
                f"{self.recovered} of {self.n} training samples {did}; chance alone gives {chance}."
                f"{graded}"
            )
        single, several = "The attack did not bring", f"None of {self.tests} attacks brought"
        return (
            f"{single if self.tests == 1 else several} back more of the {self.n} training samples than "
            f"chance does, which gives {chance}. {WHAT_IT_MEANS[self.outcome]}"
        )

    @property
    def sure(self) -> str:
        """Threshold, p and interval of the count; empty where nothing was counted."""
        if self.recovered is None or self.p_value is None or self.stored:
            return ""
        tests = f" over {self.tests} attacks" if self.tests > 1 else ""
        said = f"{format_p(self.p_value)}{tests}; a leak needs {SIGNIFICANCE:g} or less"
        if self.outcome == LEAK and self.interval is not None:
            low, high = self.interval
            said += (
                f". At least {low:.0f} of the {high:.0f} recovered samples "
                f"{'goes' if low == 1 else 'go'} beyond chance (99% confidence)"
            )
        if not self.rule:
            return said
        least = sorted({float(rule.partition(" > ")[2]) for rule in self.rule.split(", ")})
        above = f"{least[0]:g}" + (f" to {least[-1]:g}, by attack" if len(least) > 1 else "")
        return f"{said}. A match counts with {self.metric.upper()} above {above}"


def decide(
    found: Findings | None,
    attacks: tuple[AttackOutcome, ...],
    checks: Checks | None = None,
    assumed: tuple[str, ...] = (),
) -> Verdict:
    """The table's row, and what was assumed about the network beside its reasons.

    found: None without training data.
    """
    checks = checks or Checks()
    verdict = _row(found, attacks, checks)
    not_judged = 0 if found is None or verdict.stored else len(checks.set_aside)
    return verdict.replace(reasons=(*verdict.reasons, *assumed), not_judged=not_judged)


def open_question(found: Findings, checks: Checks) -> bool:
    """Whether it is still to be asked what finding nothing is worth."""
    return not (found.reason or found.survivors or checks.failures)


def acquitting(attacks: tuple[AttackOutcome, ...]) -> list[AttackOutcome]:
    """Deciding attacks that explain their surface: where they find nothing, that says something."""
    return [attack for attack in attacks if attack.decides and attack.ran and attack.explained]


def _row(found: Findings | None, attacks: tuple[AttackOutcome, ...], checks: Checks) -> Verdict:
    """The decision table, first row that holds.

    The order is the rule: records in the file, then what forbids any statement (no data, no control, a
    control that failed), then a leak, and only then the conditions under which finding nothing means
    something. "No leak found" is what is left, never a default.
    """
    if outright := [attack for attack in attacks if attack.stands]:
        return _outright(outright[0], attacks, found)
    if found is None:
        return Verdict(INCONCLUSIVE, ("no training data was given to compare candidates with",))
    if found.reason:
        return Verdict(INCONCLUSIVE, (found.reason,), n=found.n, metric=found.metric)
    beside = (*_by_surface(attacks, found.n), *_beside(attacks, found.n))
    if checks.failures:
        return _verdict(INCONCLUSIVE, (*checks.failures, *beside), found)
    if not open_question(found, checks):
        return _verdict(LEAK, (*_survivors(attacks, found), *beside), found)
    explained = acquitting(attacks)
    reasons: list[str] = []
    if not explained:
        deciding = [attack for attack in attacks if attack.decides and attack.ran]
        reasons += map(_shortfall, deciding) if deciding else ["no attack applies to this network"]
    reasons += unfinished(attacks, checks)
    if found.set_aside_matches:
        reasons.append(_matches_among_set_aside(found, checks))
    if any(attack.ran and attack.surface == "moment" for attack in attacks):
        reasons.append(STATE_THERE)
    if not checks.vouched:
        reasons += checks.strangers
    if explained and not reasons and not checks.has_power:
        failed = next(
            (control for control in checks.twins if not control.noticed),
            Twin(reason=f"{MIN_CONTROLS} are needed, {len(checks.twins)} were run"),
        )
        reasons.append(
            f"nothing shows that this audit would have noticed a leak: {failed.sentence}"
        )
    if reasons:
        return _verdict(INCONCLUSIVE, (*reasons, *beside), found)
    vouched = tuple(f"vouched for by the auditor, though {why}" for why in checks.strangers)
    noticed = (control.sentence for control in checks.twins)
    said = (*map(_explanation, explained), *noticed, *vouched, *beside)
    return _verdict(NO_LEAK_FOUND, said, found)


def unfinished(attacks: tuple[AttackOutcome, ...], checks: Checks) -> list[str]:
    """Return why finding nothing proves nothing: attacks that were cut short, one sentence each.

    Only attacks that could rule out a leak matter. The others can show one and never rule one out.
    """
    cut_short = [
        f"{attack.name} did not finish its plan: {attack.unfinished}"
        for attack in attacks
        if attack.decides and attack.ran and not attack.silent and attack.unfinished
    ]
    return cut_short + ([checks.stopped] if checks.stopped else [])


def _matches_among_set_aside(found: Findings, checks: Checks) -> str:
    rows = ", ".join(map(str, found.set_aside_matches[:20]))
    count = len(found.set_aside_matches)
    return (
        f"{count} of the {len(checks.set_aside)} records that were not judged, because the held-out set "
        f"holds them too, {'matches' if count == 1 else 'match'} a reconstruction (rows {rows})"
    )


def _outright(
    row: AttackOutcome, attacks: tuple[AttackOutcome, ...], found: Findings | None
) -> Verdict:
    """Records that stand in the file are a leak whatever the attacks on the weights found."""
    beside: tuple[str, ...] = ()
    if found is not None and found.survivors:
        beside = (*_survivors(attacks, found), *_by_surface(attacks, found.n))
    return Verdict(
        LEAK,
        (row.reason, *beside),
        n=row.of,
        recovered=row.recovered,
        expected_by_chance=row.expected_by_chance,
        p_value=row.p_value,
        rule=row.rule,
        grade=NEAR_COPY,
        tests=1,
        stored=f"{row.candidates} records" if row.candidates else "records",
    )


def _verdict(outcome: str, reasons: tuple[str, ...], found: Findings) -> Verdict:
    numbers = {name: getattr(found, name) for name in COUNTED}
    return Verdict(outcome, reasons, **numbers, grade=found.grade if outcome == LEAK else "")


def _survivors(attacks: tuple[AttackOutcome, ...], found: Findings) -> tuple[str, ...]:
    counts = ", ".join(f"{count} {grade}" for grade, count in found.grades.items())
    return tuple(
        f"{attack.name} recovers {attack.recovered} of {found.n} training samples ({attack.rule}; "
        f"{attack.expected_by_chance:.2g} by chance), adjusted {format_p(attack.adjusted or 0.0)} over "
        f"{found.tests} test{'' if found.tests == 1 else 's'} at {SIGNIFICANCE:g}"
        for attack in attacks
        if attack.survives
    ) + ((f"of what came back: {counts}",) if counts else ())


def _by_surface(attacks: tuple[AttackOutcome, ...], n: int) -> tuple[str, ...]:
    """What each surface gives back by its best test, where there are several."""
    best: dict[str, AttackOutcome] = {}
    for attack in attacks:
        if attack.decides and attack.ran and attack.recovered is not None:
            other = best.get(attack.surface)
            if other is None or attack.recovered > (other.recovered or 0):
                best[attack.surface] = attack
    if len(best) < 2:
        return ()
    order = sorted(best.items(), key=lambda item: -(item[1].recovered or 0))
    said = [
        f"{SURFACES_SAID.get(name, name)} {one.recovered} ({one.expected_by_chance:.2g} by chance)"
        for name, one in order
    ]
    return (f"of {n} training samples each surface gives back: {', '.join(said)}",)


def _beside(attacks: tuple[AttackOutcome, ...], n: int) -> list[str]:
    """Findings of single attacks and baselines that the verdict does not rest on: said, all of them."""
    said = []
    for attack in attacks:
        by_chance = not attack.recovered or (attack.p_value or 1.0) > SIGNIFICANCE
        if by_chance or attack.stands or attack.survives:
            continue
        figures = (
            f"{attack.name} matches {attack.recovered} of {n} ({attack.expected_by_chance:.2g} by "
            f"chance, {format_p(attack.p_value or 0.0)})"
        )
        meaning = BASELINE_MEANING.get(attack.name, "its candidates resemble training samples")
        said.append(
            f"{figures} by itself, not over all tests (adjusted {format_p(attack.adjusted or 0.0)})"
            if attack.decides
            else f"the baseline {figures}: {meaning}, which decides nothing"
        )
    return said


def _shortfall(attack: AttackOutcome) -> str:
    """Why a deciding attack that found nothing does not acquit: what it lacked, with its figures."""
    if attack.silent:
        return f"{attack.name} cannot tell: {attack.silent}"
    if attack.residual is None:
        return f"{attack.name} diverged in all {attack.restarts} restarts"
    if attack.unasked:
        return (
            f"{attack.name} left a residual of {attack.residual:.2g}, and what it leaves on a permuted "
            f"target is not known: {attack.unasked}"
        )
    worst = max(attack.judged, key=lambda name: attack.residuals.get(name, 0.0), default="")
    where = f" in {'layer ' if worst.isdigit() else ''}{worst}" if worst else ""
    against = "" if attack.permuted is None else f", on a permuted target {attack.permuted:.2g}"
    return (
        f"{attack.name} left a residual of {attack.residual:.2g}{where}{against}: more than half of "
        "that, so it has not explained these weights"
    )


def _explanation(attack: AttackOutcome) -> str:
    """What was explained, and which layers nobody judged, though their residual was measured."""
    others = ", ".join(name for name in attack.residuals if name not in attack.judged)
    beside = f"; not judged, for want of a start: {others}" if others else ""
    return (
        f"{attack.name} explains {', '.join(attack.judged) or 'the weights'}: residual "
        f"{attack.residual:.2g}, on a permuted target {attack.permuted:.2g}{beside}"
    )


def opening(checkpoint: Network, fit: Fit | None) -> tuple[str, ...]:
    """What an audit says before it attacks, the accuracy of the network as read first."""
    unchecked = "no training samples: the network as read cannot be checked"
    return (unchecked if fit is None else fit.line, *checkpoint.assumptions)


def assumptions(checkpoint: Network, inspection: Inspection) -> tuple[str, ...]:
    """What the attacks take for granted about this network."""
    if inspection.homogeneity_order is None:
        order = (
            "The network is not homogeneous: the theorem behind the KKT attack does not cover it."
        )
    else:
        order = (
            f"The network is homogeneous of order {inspection.homogeneity_order:g}; the KKT attack "
            "assumes that training came near a KKT point of its margin problem."
        )
    exchangeable = (
        "The held-out samples come from the distribution of the training samples, and were "
        "preprocessed alike: the control compares the one with the other."
    )
    noted = (
        note if note.startswith(METADATA_SAYS) else f"Assumed when the file was read: {note}"
        for note in checkpoint.assumptions
    )
    return (order, exchangeable, *noted)


def limitations(verdict: Verdict, scores: Scores | None, knowledge: Knowledge) -> tuple[str, ...]:
    """What a reader must not conclude."""
    found = [
        "This is evidence about the attacks that were run, with the knowledge and the time they "
        "had. It is no guarantee of privacy.",
        "A sample counts as recovered when its match is closer than 99% of chance; the grade says how "
        "much closer than public samples of its kind.",
    ]
    if verdict.outcome == NO_LEAK_FOUND:
        found.append(
            "A residual far below that of a permuted target says that the candidates explain the layers "
            "that were judged, not that they are the only ones that would. Layers that were not judged "
            "may hold what no attack looked for."
        )
    if scores is not None and scores.smallest_significant is not None:
        found.append(
            f"With {scores.pool} held-out samples at least {scores.smallest_significant} recovered "
            "samples are needed for significance."
        )
    if "train" in knowledge.provenance.values():
        strongest = "Facts granted from the training set make the strongest attacker"
        found.append(f"{strongest}; a real one may know less.")
    return tuple(found)


@dataclass(frozen=True)
class Condition:
    """One condition of failure; a quantity that is not known fulfils none.

    text: ``leak``, a grade (a leak of that grade or a worse one), or a comparison; nothing is evaluated.
    """

    text: str
    name: str = ""
    compare: Callable[[float, float], bool] | None = None
    bound: float = 0.0

    def holds(self, verdict: Verdict) -> bool:
        """Whether the verdict fulfils it."""
        if self.compare is None:
            worst_first = [*GRADES]  # those at least as bad; all of them for any leak
            least = len(GRADES) if self.text == LEAK else worst_first.index(self.text) + 1
            return verdict.outcome == LEAK and verdict.grade in (*worst_first[:least], "")
        value = QUANTITIES[self.name](verdict)
        return value is not None and self.compare(value, self.bound)


def read_condition(text: str) -> Condition:
    """``leak``, a grade of one, or NAME with >=, >, <=, < or == and a number."""
    if text.strip() in (LEAK, *GRADES):
        return Condition(text.strip())
    comparison = _COMPARISON.fullmatch(text)
    if comparison is None or not math.isfinite(bound := float(comparison[3])):
        raise InputError(
            f"--fail-on takes leak, a grade or a comparison such as recovered>=5; got {text[:60]!r}.",
            f"Grades: {', '.join(GRADES)}; quantities: {', '.join(QUANTITIES)}.",
        )
    name, sign, _ = comparison.groups()
    require_known(name[:40], QUANTITIES, "--fail-on knows no")
    return Condition(text.strip(), name, _COMPARE[sign], bound)


def exit_code(verdict: Verdict, conditions: list[Condition]) -> int:
    """1 when a condition holds, else 3 when the verdict is inconclusive, else 0."""
    if any(condition.holds(verdict) for condition in conditions):
        return EXIT_CODES[LEAK]
    return verdict.exit_code if verdict.outcome == INCONCLUSIVE else EXIT_CODES[NO_LEAK_FOUND]


def _share(verdict: Verdict) -> float | None:
    return verdict.recovered / verdict.n if verdict.recovered is not None and verdict.n else None


def _excess(verdict: Verdict) -> float | None:
    if verdict.recovered is None or verdict.expected_by_chance is None:
        return None
    return verdict.recovered - verdict.expected_by_chance


QUANTITIES: dict[str, Callable[[Verdict], float | None]] = {
    "recovered": lambda verdict: verdict.recovered,
    "expected": lambda verdict: verdict.expected_by_chance,
    "excess": _excess,
    "share": _share,
    "p_value": lambda verdict: verdict.p_value,
}
