"""The verdict: one rule, one table, one exit code.

| held-out control     | attack                                  | count           | verdict       | exit |
|----------------------|-----------------------------------------|-----------------|---------------|------|
| missing or too small | any                                     | any             | inconclusive  | 3    |
| present              | none applies, diverged, or some judged  | not significant | inconclusive  | 3    |
|                      | layer's residual above RESIDUAL_LIMIT   |                 |               |      |
| present              | explains every judged layer             | not significant | no-leak-found | 0    |
| present              | any                                     | significant     | leak          | 1    |

Judged layers (``attacks/problem.py``): with a start those that moved, and none of them counts where
the first did not; without one the first. Residuals are recomputed in float64.

Significant: p <= 1% in ONE permutation test, on the candidates of all attacks pooled. Several
attacks, several metrics and the baselines give several counts; only this one decides, so the level
holds however many attacks were run. A baseline that is significant by itself without a leak is named
among the reasons and changes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from residuum.auditing.inputs import Fit
from residuum.checkpoints import Inspection
from residuum.evaluation.null import SIGNIFICANCE
from residuum.records import Checkpoint, Knowledge, Record, Scores

LEAK, NO_LEAK_FOUND, INCONCLUSIVE = "leak", "no-leak-found", "inconclusive"
EXIT_CODES = {NO_LEAK_FOUND: 0, LEAK: 1, INCONCLUSIVE: 3}
HEADLINES = {
    LEAK: "Leak found",
    NO_LEAK_FOUND: "No leak found by these attacks",
    INCONCLUSIVE: "Inconclusive",
}
# Norm of a layer's residual over the norm of its target. First layers of networks trained on 20-400
# digits were explained to between 0.001 and 0.1, random initialisations of 30 or more neurons to
# 0.25 to 0.85. Above the limit an attack that found nothing has not explained the weights either.
RESIDUAL_LIMIT = 0.1
BASELINE_MEANING = {
    "first-layer-weights": "rows of the first layer resemble training samples",
    "model-inversion": "inputs of extreme output resemble training samples",
}


@dataclass(frozen=True, eq=False)
class AttackOutcome(Record):
    """One attack and what became of it.

    decides: its candidates are part of the pool that is tested; a baseline's are not. ran, reason:
    whether it was run and why; residuals: of every layer, norm over norm, of the best restart that
    did not diverge; judged: the layers that count; residual: the worst of these; silent: why even a
    small one would say nothing; recovered, p_value: of this attack's candidates alone, never
    deciding; rule: what counts as recovered there, such as "ncc > 0.83".
    """

    name: str
    decides: bool
    applies: bool
    ran: bool
    reason: str
    restarts: int = 0
    steps: int = 0
    candidates: int = 0
    diverged: int = 0
    residual: float | None = None
    residuals: dict[str, float] = field(default_factory=dict)
    judged: tuple[str, ...] = ()
    silent: str = ""
    seconds: float = 0.0
    recovered: int | None = None
    expected_by_chance: float | None = None
    p_value: float | None = None
    rule: str = ""

    @property
    def converged(self) -> bool:
        """Some restart did not diverge and explains every judged layer to within the limit."""
        return not self.silent and self.residual is not None and self.residual <= RESIDUAL_LIMIT

    @property
    def status(self) -> str:
        """What became of it, in a word or two."""
        if not self.ran:
            return "not run" if self.applies else "not applicable"
        if not self.decides:
            return "baseline"
        return "converged" if self.converged else "not converged"

    @property
    def not_judged(self) -> tuple[str, ...]:
        """Layers whose residual was measured and does not count."""
        return tuple(name for name in self.residuals if name not in self.judged)


@dataclass(frozen=True, eq=False)
class Verdict(Record):
    """The outcome with the numbers it rests on; reasons: one sentence each.

    recovered of n training samples beat the held-out control; interval: naive 95% of that count, of
    independent trials, chance not subtracted; p_value: of the permutation test; rule: what a sample
    had to beat, such as "ncc > 0.83".
    """

    outcome: str
    reasons: tuple[str, ...] = ()
    n: int | None = None
    recovered: int | None = None
    expected_by_chance: float | None = None
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    metric: str = ""
    rule: str = ""
    residual_limit: ClassVar[float] = RESIDUAL_LIMIT

    def __post_init__(self) -> None:
        if self.outcome not in EXIT_CODES:
            raise ValueError(f"A verdict is one of {tuple(EXIT_CODES)}; got {self.outcome!r}.")

    @property
    def exit_code(self) -> int:
        """What ``residuum audit`` ends with."""
        return EXIT_CODES[self.outcome]

    @property
    def headline(self) -> str:
        """Three to six words."""
        return HEADLINES[self.outcome]

    @property
    def sentence(self) -> str:
        """One sentence with the numbers: evidence about attacks that were run, never a guarantee."""
        if self.recovered is None or self.n is None:
            return (
                "Nothing was compared with a held-out control, so these reconstructions are "
                "evidence for neither a leak nor its absence."
            )
        low_high = ""
        if self.interval is not None:
            low_high = f"naive 95% interval {self.interval[0]:.1f} to {self.interval[1]:.1f}"
        beside = "; ".join(filter(None, (self.rule, low_high)))
        count = f"{self.recovered} of {self.n} training samples{beside and f' ({beside})'}"
        expected, p = self.expected_by_chance, self.p_value
        chance = f"where chance alone explains {'–' if expected is None else f'{expected:.3g}'}"
        if p is not None:
            chance += "; p < 0.001" if p < 0.001 else f"; p = {p:.3f}"
        if self.outcome == LEAK:
            return f"The attacks brought back {count}, {chance}."
        if self.outcome == NO_LEAK_FOUND:
            return f"The attacks that were run matched {count}, {chance}; others may still succeed."
        return (
            f"The attacks matched {count}, {chance}; under these conditions that supports neither "
            "a leak nor its absence."
        )


def decide(
    scores: Scores | None, attacks: tuple[AttackOutcome, ...], assumed: tuple[str, ...] = ()
) -> Verdict:
    """The table's row, and what was assumed about the network beside its reasons.

    scores: of the pooled candidates, None without training data.
    """
    found = _row(scores, attacks)
    return found.replace(reasons=(*found.reasons, *assumed))


def _row(scores: Scores | None, attacks: tuple[AttackOutcome, ...]) -> Verdict:
    if scores is None:
        return Verdict(INCONCLUSIVE, ("no training data was given to compare candidates with",))
    if not scores.calibrated:
        return Verdict(INCONCLUSIVE, (scores.reason,), n=scores.n, metric=scores.deciding)
    assert scores.p_value is not None
    assert scores.recovered is not None
    if scores.recovered > 0 and scores.p_value <= SIGNIFICANCE:
        count = (
            f"{scores.recovered} of {scores.n} training samples beat the held-out control "
            f"({scores.rule})"
        )
        reason = f"{count}, p = {scores.p_value:.2g} in the permutation test at {SIGNIFICANCE:g}"
        return _verdict(LEAK, (reason,), scores)
    missing = (
        f"{scores.recovered} of {scores.n} samples beat the held-out control ({scores.rule}), which "
        f"is within chance (p = {scores.p_value:.2g})"
    )
    deciding = [attack for attack in attacks if attack.decides and attack.ran]
    if converged := [attack for attack in deciding if attack.converged]:
        reasons = (missing, *map(_explanation, converged), *_beside(scores, attacks))
        return _verdict(NO_LEAK_FOUND, reasons, scores)
    shortfalls = map(_shortfall, deciding) if deciding else ["no attack applies to this network"]
    return _verdict(INCONCLUSIVE, (missing, *shortfalls, *_beside(scores, attacks)), scores)


def _verdict(outcome: str, reasons: tuple[str, ...], scores: Scores) -> Verdict:
    row = scores.metrics[scores.deciding]
    return Verdict(
        outcome, reasons, n=scores.n, recovered=scores.recovered,
        expected_by_chance=scores.expected_by_chance, interval=row.interval,
        p_value=scores.p_value, metric=scores.deciding, rule=scores.rule,
    )  # fmt: skip


def _beside(scores: Scores, attacks: tuple[AttackOutcome, ...]) -> tuple[str, ...]:
    """Baselines that beat chance where no deciding attack did: said, never deciding."""
    return tuple(
        f"the baseline {attack.name} matches {attack.recovered} of {scores.n} "
        f"({attack.expected_by_chance:.2g} by chance, p = {attack.p_value:.2g}): "
        f"{BASELINE_MEANING.get(attack.name, 'its candidates resemble training samples')}, though "
        "no deciding attack found them"
        for attack in attacks
        if not attack.decides and attack.recovered and (attack.p_value or 1.0) <= SIGNIFICANCE
    )


def _shortfall(attack: AttackOutcome) -> str:
    if attack.residual is None and not attack.silent:
        return f"{attack.name} diverged in all {attack.restarts} restarts"
    if attack.silent:
        return f"{attack.name} cannot tell: {attack.silent}"
    worst = max(attack.judged, key=lambda name: attack.residuals.get(name, 0.0), default="")
    where = f" in {worst}" if worst else ""
    return (
        f"{attack.name} left a residual of {attack.residual:.2g}{where}, above "
        f"{RESIDUAL_LIMIT:g}: it has not explained these weights"
    )


def _explanation(attack: AttackOutcome) -> str:
    """What was explained, and which layers nobody judged."""
    others = ", ".join(attack.not_judged)
    beside = f"; not judged, for want of a start: {others}" if others else ""
    return (
        f"{attack.name} explains {', '.join(attack.judged) or 'the weights'} to within "
        f"{RESIDUAL_LIMIT:g} (residual {attack.residual:.2g}){beside}"
    )


def opening(checkpoint: Checkpoint, fit: Fit | None) -> tuple[str, ...]:
    """What an audit says before it attacks, the accuracy of the network as read first."""
    first = (
        "no training samples: the network as read cannot be checked" if fit is None else fit.line
    )
    return (first, *checkpoint.assumptions)


def assumptions(checkpoint: Checkpoint, inspection: Inspection) -> tuple[str, ...]:
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
    return (
        order,
        exchangeable,
        *(f"Read from the file: {note}" for note in checkpoint.assumptions),
    )


def limitations(verdict: Verdict, scores: Scores | None, knowledge: Knowledge) -> tuple[str, ...]:
    """What a reader must not conclude."""
    found = [
        "This is evidence about the attacks that were run, with the knowledge and the time they "
        "had. It is no guarantee of privacy.",
        "A sample counts as recovered when its match is closer than 99% of chance; whether a person "
        "would recognise it is for the pictures to show. The interval of the count is naive: "
        "Clopper-Pearson for independent samples, chance not subtracted.",
    ]
    if verdict.outcome == NO_LEAK_FOUND:
        found.append(
            f"A residual within {RESIDUAL_LIMIT:g} says that the candidates explain the layers that "
            "were judged, not that they are the only ones that would; a narrow layer is explained "
            "easily. Layers that were not judged may hold what no attack looked for."
        )
    if scores is not None and scores.smallest_significant is not None:
        found.append(
            f"With {scores.pool} held-out samples at least {scores.smallest_significant} recovered "
            "samples are needed for significance."
        )
    if "train" in knowledge.provenance.values():
        found.append(
            "Facts granted from the training set make the strongest attacker; a real one may know "
            "less."
        )
    return tuple(found)
