"""Everything the HTML report shows, as plain frozen dataclasses: text, numbers and small arrays.

The audit fills a ``Page``; ``html.render`` draws it. Nothing here computes or reads files, and no field
holds markup: every string is shown as text, whatever it contains. ``None`` means "not known" and is
shown as a dash; an empty tuple leaves its section out, or says why it is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LEAK, NO_LEAK_FOUND, INCONCLUSIVE = "leak", "no-leak-found", "inconclusive"
OUTCOMES = (LEAK, NO_LEAK_FOUND, INCONCLUSIVE)
# What the equal pairs in the place of a reconstruction keep of it; "" when no certificate was computed.
DETERMINED, PARTLY, FREE = "pairs keep it", "pairs keep a part", "pairs lose it"
CERTIFIED = (DETERMINED, PARTLY, FREE)


@dataclass(frozen=True)
class Verdict:
    """The outcome and its numbers; reasons: why this row of the decision table, one sentence each.

    outcome: one of ``OUTCOMES``; recovered of n training samples beat the held-out control, chance
    expects ``expected``; interval: naive 95% of that count, of independent trials, chance not
    subtracted; p_value: of the permutation test; rule: what a sample had to beat, "ncc > 0.83".
    """

    outcome: str
    n: int | None = None
    recovered: int | None = None
    expected: float | None = None
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    metric: str = ""
    reasons: tuple[str, ...] = ()
    rule: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"A verdict is one of {OUTCOMES}; got {self.outcome!r}.")

    @property
    def headline(self) -> str:
        """Three to six words."""
        return {
            LEAK: "Leak found",
            NO_LEAK_FOUND: "No leak found by these attacks",
            INCONCLUSIVE: "Inconclusive",
        }[self.outcome]

    @property
    def sentence(self) -> str:
        """One sentence with the numbers: evidence about attacks that were run, never a guarantee."""
        if self.recovered is None or self.n is None:
            return (
                "Nothing was compared with a held-out control, so these reconstructions are "
                "evidence for neither a leak nor its absence."
            )
        interval = self.interval
        low_high = f"naive 95% interval {interval[0]:.1f} to {interval[1]:.1f}" if interval else ""
        beside = "; ".join(filter(None, (self.rule, low_high)))
        p = f"; p {_p(self.p_value)}" if self.p_value is not None else ""
        count = f"{self.recovered} of {self.n} training samples{beside and f' ({beside})'}"
        chance = f"where chance alone explains {shown(self.expected)}{p}"
        if self.outcome == LEAK:
            return f"The attacks brought back {count}, {chance}."
        if self.outcome == NO_LEAK_FOUND:
            return f"The attacks that were run matched {count}, {chance}; others may still succeed."
        return (
            f"The attacks matched {count}, {chance}; under these conditions that supports neither "
            "a leak nor its absence."
        )


@dataclass(frozen=True)
class Item:
    """One card of the gallery: with data a training sample and its match, without data a candidate.

    number: how the card is called (index of the training sample, or rank of the candidate); found:
    the reconstruction and nearest: the training sample, both in sample shape, the mean added where
    known; scores: by metric name; recovered: beyond chance, None when nothing is calibrated; margin:
    y Phi(x); support: restarts that hold it, of ``restarts``; determined_energy (attained),
    determined_at_least (bound), radius, certificate (one of ``CERTIFIED``) and ambiguity (sample
    shape, 0 where pairs fix a value, 1 where they leave it free): of the uniqueness certificate;
    notes: anything else, one line each.
    """

    number: int
    found: Array | None
    nearest: Array | None = None
    label: str = ""
    attack: str = ""
    scores: Mapping[str, float | None] = field(default_factory=dict)
    recovered: bool | None = None
    margin: float | None = None
    output: float | None = None
    confidence: float | None = None
    support: int | None = None
    restarts: int | None = None
    multiplier: float | None = None
    determined_energy: float | None = None
    determined_at_least: float | None = None
    radius: float | None = None
    certificate: str = ""
    ambiguity: Array | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Control:
    """Values behind the slider, the histogram and the counts, in the metric's own direction.

    train: one value per training sample, NaN for no match; null: values of held-out matches pooled
    over ``null_sets`` sets of the training set's size (1 for a single reference set); threshold: the
    calibrated one (99% of chance); outputs: the network's output (or the margin, see
    ``output_name``) of every training sample; labels: per training sample, for the scatter's marks.
    """

    metric: str
    train: Array
    null: Array
    threshold: float
    null_sets: int = 1
    higher_is_better: bool = True
    outputs: Array | None = None
    output_name: str = "network output"
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricRow:
    """One row of the table of metrics; see ``records.scores.MetricScore``."""

    name: str
    description: str = ""
    deciding: bool = False
    recovered: int | None = None
    expected: float | None = None
    p_value: float | None = None
    threshold: float | None = None
    published_threshold: float | None = None
    above_published: int | None = None
    above_published_holdout: int | None = None
    best: float | None = None
    higher_is_better: bool = True


@dataclass(frozen=True)
class Residuals:
    """Relative residuals (norms, not squared) of one attack over its steps; drawn on a log scale.

    steps: (T,); layers: by layer name, (T,) or (R, T), of which the median and range are drawn.
    limit: the first layer's stated limit of convergence, drawn as a line.
    """

    attack: str
    steps: Array
    layers: Mapping[str, Array]
    limit: float | None = None


@dataclass(frozen=True)
class Granted:
    """A fact the attacker was told; provenance: "user", "train" or "holdout"."""

    fact: str
    value: str
    provenance: str


@dataclass(frozen=True)
class AttackRow:
    """An attack and what became of it; ran: False when it was not run, for ``reason``.

    recovered, expected, p_value: of its candidates alone; None without a held-out control; rule: what
    counts as recovered there.
    """

    name: str
    ran: bool
    reason: str
    restarts: int | None = None
    status: str = ""
    candidates: int | None = None
    residual: float | None = None
    seconds: float | None = None
    recovered: int | None = None
    expected: float | None = None
    p_value: float | None = None
    rule: str = ""


@dataclass(frozen=True)
class Figure:
    """A named number of the KKT certificate (or of anything else), and what it means in words."""

    name: str
    value: float | int | str | None
    meaning: str = ""


@dataclass(frozen=True)
class Page:
    """One report. Strings in settings, environment and hashes are shown as they are.

    subject: what was audited (a file name, an architecture); shape: of a sample, for arrays that
    come flat; items: best first, ``items_total`` of them in all when not all are given.
    """

    subject: str
    verdict: Verdict
    created: str = ""
    description: str = ""
    shape: tuple[int, ...] = ()
    items: tuple[Item, ...] = ()
    items_total: int | None = None
    control: Control | None = None
    metrics: tuple[MetricRow, ...] = ()
    residuals: tuple[Residuals, ...] = ()
    knowledge: tuple[Granted, ...] = ()
    attacks: tuple[AttackRow, ...] = ()
    certificate: tuple[Figure, ...] = ()
    assumptions: tuple[str, ...] = ()
    limitations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)


def shown(value: float | int | None, digits: int = 3) -> str:
    """A number for reading: integers whole, others to ``digits`` significant ones, a dash for none."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "–"
    return f"{value}" if isinstance(value, int) else f"{value:.{digits}g}"


def fixed(value: float | None) -> str:
    """A number for columns: three decimals where that is enough, a power of ten otherwise."""
    if value is None or np.isnan(value):
        return "–"
    if np.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def p_text(value: float | None) -> str:
    """A p value for a column."""
    return "< 0.001" if value is not None and value < 0.001 else shown(value)


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"
