"""What comes out: what an attack brings back, how much of it chance explains, what is certified of it.

:class:`Reconstruction`, and :class:`Selection` in it; :class:`Scores` against the training set;
:class:`Certificate` of the network, :class:`Uniqueness` of candidates; :class:`Identification` of the
samples of a polynomial network; :class:`Exposure`: which records are at risk, groups of them, and what
canaries prove.
"""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from residuum.records.base import Record, plain
from residuum.records.inputs import Knowledge
from residuum.records.published import OPTIONAL, Count, SchemaRule, Share

# What is published of each, by the names of its fields.
OF_RECONSTRUCTION = ["attack", "restarts", "status", "seconds", "settings", "notes"]
OF_RECONSTRUCTION += ["events", "second_order"]
OF_UNIQUENESS = ["task", "samples", "share", "box", "sums", "residual", "best_residual"]
OF_UNIQUENESS += ["seconds", "notes"]
OF_SAMPLE = ["index", "lam", "size", "determined_at_least", "determined_energy", "change", "radius"]
OF_SAMPLE += ["radius_most", "members", "pinned", "kinks"]
OF_FULL_SETS = ["full_at_least", "full_energy"]
RENAMED = {"n_r": "N_r", "rank_k": "rank_K", "cond_k": "cond_K"}
APART = ("input_shape", "dead", "carrying", "aggregate", "eigenvalues", "eigenvectors")
HEAD = ["metric", "recovered", "by chance", "p", "threshold"]  # against the held-out control
HEAD += ["published", "train", "held-out", "top 10", "best"]  # as published
HALF = 0.5  # of the exposure, that few records may carry
SCHEMA_VERSION = "2.0"  # of exposure.json
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes for one
NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, eq=False)
class Selection(Record):
    """Reconstructions chosen without the data, best first: consensus first, singletons after.

    x: (k, *shape).
    labels: (k,).
    lam: (k,) total multiplier.
    support: (k,) number of restarts that hold such a candidate.
    members: (k,) candidates merged into it.
    confidence: (k,) in [0, 1], NaN where it is withheld.
    features: (k, 5) what the confidence was computed from.
    index: (k,) the cluster's representative among the candidates.
    """

    x: Tensor
    labels: Tensor
    lam: Tensor
    support: Tensor
    members: Tensor
    confidence: Tensor
    features: Tensor
    index: Tensor

    @classmethod
    def plain(
        cls, x: Tensor, labels: Tensor, index: Tensor, confidence: Tensor, **known: Tensor
    ) -> Selection:
        """Candidates ``index`` of an attack without multipliers; support and members 1 unless known."""
        one, none = torch.ones_like(index), torch.zeros(len(index), 5)
        counts = {"support": one, "members": one, **known}
        parts = x[index], labels[index], torch.ones(len(index))
        return cls(*parts, **counts, confidence=confidence, features=none, index=index)

    def __len__(self) -> int:
        return len(self.x)

    def confidence_of(self, i: int) -> float | None:
        """Return the confidence of candidate ``i``, None where it is withheld."""
        confidence = float(self.confidence[i])
        return None if math.isnan(confidence) else confidence


@dataclass(frozen=True, eq=False)
class Reconstruction(Record):
    """Candidates of R restarts, how they came about, and what was chosen from them.

    x: (N, *shape) as the network receives them, no mean added.
    labels: (N,).
    lam: (N, ...) plain-sum multipliers.
    run: (N,) restart of each.
    steps: (T,) of the history.
    loss: (R, T).
    layers: (R, T, L), relative SQUARED residual per layer.
    status: per restart "finished", "time", "diverged", "interrupted".
    events: how the candidates grew, one dict each with the step, the restart, parent and children by
        number (``attacks/stationarity/growth.py``).
    ident: (N,) number of every candidate within its restart, None before there were such.
    second_order: per restart, of attacks that grew, whether its end point is second-order
        stationary, with both quantities.
    attack: its name.
    layer_names: of the L layers.
    knowledge, settings: what it was told, and how it ran.
    selection: its own choice, made without the data.
    notes: what a reader of the candidates should know.
    """

    attack: str
    x: Tensor
    labels: Tensor
    lam: Tensor
    run: Tensor
    steps: Tensor
    loss: Tensor
    layers: Tensor
    layer_names: tuple[str, ...]
    status: tuple[str, ...]
    knowledge: Knowledge
    settings: dict[str, Any] = field(default_factory=dict)
    selection: Selection | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    ident: Tensor | None = None
    second_order: tuple[dict[str, Any], ...] = ()

    @classmethod
    def at_once(
        cls, attack: str, x: Tensor, labels: Tensor, lam: Tensor, knowledge: Knowledge, **rest: Any
    ) -> Reconstruction:
        """Candidates of one restart that took no steps."""
        steps = torch.zeros(0, dtype=torch.long)
        return cls(
            attack,
            x,
            labels,
            lam,
            run=torch.zeros(len(x), dtype=torch.long),
            steps=steps,
            loss=torch.zeros(1, 0),
            layers=torch.zeros(1, 0, 0),
            layer_names=(),
            status=("finished",),
            knowledge=knowledge,
            **rest,
        )

    @property
    def restarts(self) -> int:
        """Number of independent runs."""
        return len(self.status)

    @property
    def weight(self) -> Tensor:
        """(N,) total absolute multiplier of each candidate."""
        return self.lam.abs().flatten(1).sum(1) if self.lam.ndim > 1 else self.lam.abs()

    @property
    def best_restart(self) -> int | None:
        """The restart with the least loss of those that did not diverge; None where there is none."""
        alive = torch.tensor([status != "diverged" for status in self.status])
        if not self.loss.shape[1] or not alive.any():
            return None
        loss = self.loss.nan_to_num(nan=torch.inf).amin(1)
        return int(torch.where(alive, loss, torch.inf).argmin())

    def to_json(self) -> dict[str, Any]:
        """Summary without the candidates themselves; what is not finite is null."""
        chosen = self.selection
        return {name: plain(getattr(self, name)) for name in OF_RECONSTRUCTION} | {
            "candidates": len(self.x),
            "final_loss": plain(self.loss[:, -1:].flatten()),
            "layer_residuals_squared": {
                name: plain(self.layers[:, -1:, i].flatten())
                for i, name in enumerate(self.layer_names)
            },
            "runs": [self._run(i) for i in range(self.restarts)],
            "selected": 0 if chosen is None else len(chosen),
            "consensus": 0 if chosen is None else int((chosen.support > 1).sum()),
            "knowledge": dict(self.knowledge.provenance),
        }

    def _run(self, i: int) -> dict[str, Any]:
        """One restart: its last loss, and step, loss and residuals (norms) of the best one, kept."""
        loss = plain(self.loss[i])
        known = [(value, t) for t, value in enumerate(loss) if value is not None]
        best, at = min(known) if known else (None, None)
        layers = plain(self.layers[i, at]) if at is not None else [None] * len(self.layer_names)
        return {
            "status": self.status[i],
            "final_loss": loss[-1] if loss else None,
            "step": int(self.steps[at]) if at is not None else None,
            "loss": best,
            "residuals": {
                name: None if value is None else math.sqrt(max(value, 0.0))
                for name, value in zip(self.layer_names, layers, strict=True)
            },
        }


@dataclass(frozen=True, eq=False)
class MetricScore(Record):
    """The counts under one metric.

    recovered: samples whose one-to-one match beats threshold_null99, the 99th percentile of chance.
    interval: naive 95% Clopper-Pearson of that count, as if samples were independent, chance not
        subtracted.
    p_value: permutation test against held-out samples.
    above_published_threshold: samples beyond published_threshold, matched as its source does.
    above_published_threshold_holdout: the same of one held-out set of equal size, its chance level.
    top10_mean, best, median: of the values under the published matching. What needs a held-out
        control is None without one.
    """

    name: str
    description: str
    higher_is_better: bool
    published_threshold: float | None
    above_published_threshold: int | None
    top10_mean: float | None
    best: float | None
    median: float | None
    recovered: int | None = None
    expected_by_chance: float | None = None
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    threshold_null99: float | None = None
    above_published_threshold_holdout: int | None = None

    @property
    def threshold(self) -> str:
        """What a recovered sample had to beat, such as "> 0.83"; a dash without a control."""
        if self.threshold_null99 is None:
            return "-"
        return f"{'>' if self.higher_is_better else '<'} {self.threshold_null99:.3g}"

    @property
    def rule(self) -> str:
        """What counts as recovered, to stand beside a count: "ncc > 0.83"; "" without a control."""
        return "" if self.threshold_null99 is None else f"{self.name} {self.threshold}"

    def to_json(self) -> dict[str, Any]:
        """The published form; the metric's name is the key it stands under."""
        return {k: v for k, v in super().to_json().items() if k != "name"}


@dataclass(frozen=True, eq=False)
class SampleMatch(Record):
    """One sample under one metric.

    score, candidate: of its one-to-one match, None when it got none.
    recovered: beyond chance.
    nearest, nearest_candidate: under the published matching, mostly with repeats.
    """

    score: float | None
    candidate: int | None
    recovered: bool | None
    nearest: float | None
    nearest_candidate: int | None


@dataclass(frozen=True, eq=False)
class SampleScore(Record):
    """One training sample: its margin, the multiplier of its candidate, its match by every metric.

    index: its row in the file that the user gave, counted from 0.
    id: the user's own identifier, "" if the data has no ID column.
    """

    index: int
    label: float | int | None
    margin: float | None
    multiplier: float | None
    recovered: bool | None
    matches: dict[str, SampleMatch]
    id: str = ""


@dataclass(frozen=True, eq=False)
class ScoreSlice(Record):
    """Recovered samples in a part of the training set: a class, or a range of margins."""

    name: str
    samples: int
    recovered: int | None
    rate: float | None
    median: float | None


@dataclass(frozen=True, eq=False)
class Scores(Record):
    """How many of n training samples the m candidates recover, beyond what chance explains.

    deciding: the metric of the verdict.
    reason: why nothing is calibrated, "" when it is.
    pool, subsets: size of the held-out control, and sets drawn from it.
    smallest_significant: the least count that this pool could call significant at 1%.
    margins: slices by quintile of the margin, smallest first.
    metrics: counts by metric.
    per_sample: each training sample with its match.
    classes: slices by label.
    notes: what was left out, or could not be measured.
    """

    n: int
    m: int
    calibrated: bool
    reason: str
    deciding: str
    metrics: dict[str, MetricScore]
    per_sample: tuple[SampleScore, ...]
    classes: tuple[ScoreSlice, ...] = ()
    margins: tuple[ScoreSlice, ...] = ()
    pool: int = 0
    subsets: int = 0
    smallest_significant: int | None = None
    seed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def recovered(self) -> int | None:
        """Recovered samples by the deciding metric; None when nothing is calibrated."""
        return self.metrics[self.deciding].recovered

    @property
    def rule(self) -> str:
        """What counts as recovered by the deciding metric: "ncc > 0.83"; "" without a control."""
        return self.metrics[self.deciding].rule

    @property
    def expected_by_chance(self) -> float | None:
        """Samples that chance recovers by the deciding metric."""
        return self.metrics[self.deciding].expected_by_chance

    @property
    def p_value(self) -> float | None:
        """Of the permutation test by the deciding metric."""
        return self.metrics[self.deciding].p_value

    def to_json(self) -> dict[str, Any]:
        """The published form (``residuum score --json``)."""
        counts = ("recovered", "expected_by_chance", "p_value")
        return super().to_json() | {name: getattr(self, name) for name in counts}

    def table(self) -> str:
        """Calibrated and published numbers side by side, one metric per row, as plain text."""
        rows = [HEAD]
        for name, metric in self.metrics.items():
            sign = ">" if metric.higher_is_better else "<"
            bar = metric.published_threshold
            above = metric.above_published_threshold, metric.above_published_threshold_holdout
            rows.append(
                [
                    f"{name} *" if name == self.deciding else name,
                    _cell(metric.recovered, f"/{self.n}"),
                    *map(_cell, (metric.expected_by_chance, metric.p_value)),
                    metric.threshold,
                    "-" if bar is None else f"{sign} {bar:g}",
                    *map(_cell, (*above, metric.top10_mean, metric.best)),
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "* decides", *([self.reason] if self.reason else [])])


def _cell(value: float | int | None, suffix: str = "") -> str:
    if value is None:
        return "-"
    return f"{value}{suffix}" if isinstance(value, int) else f"{value:.3g}{suffix}"


@dataclass(frozen=True, eq=False)
class LayerResidual(Record):
    """||r_l|| / ||theta_l|| for the parameters of one layer (plain residual)."""

    name: str
    residual: float


@dataclass(frozen=True, eq=False)
class Certificate(Record):
    """Approximate-KKT levels of a network on given samples. Residuals are norms over ||theta||.

    residual_plain: best multipliers with ReLU'(0) = 0.
    residual_clarke: gates at kinks free, never larger.
    eps: ||r||, not scale free.
    delta: max_i lam_i (m_i - p).
    margin: p = min_i m_i.
    normalized_margin: p / ||theta||^L.
    balance: gap between the neurons' incoming and outgoing squared norms, 0 at a KKT point.
    identity: relative gap of ||theta||^2 = L sum_i lam_i m_i.
    condition: of the Gram matrix.
    status: one word.
    notes: what limits the figures.
    layers: relative residual of each.
    rows: (R,) the sample that each multiplier belongs to.
    kinks_freed: gates that the Clarke residual was allowed to choose.
    homogeneity_order: L, None where the network is not homogeneous.
    theta_norm: ||theta||.
    """

    task: str
    samples: int
    residual_plain: float
    residual_clarke: float
    eps: float
    delta: float | None
    margin: float | None
    normalized_margin: float | None
    homogeneity_order: float | None
    kinks: int
    kinks_freed: int
    layers: tuple[LayerResidual, ...]
    multipliers: Tensor
    rows: Tensor
    balance: float | None
    identity: float | None
    condition: float
    theta_norm: float
    status: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The published form (``residuum certify --json``)."""
        lam = self.multipliers
        active = int((lam.abs() > 1e-9 * lam.abs().max()).sum()) if len(lam) else 0
        largest = float(lam.max()) if len(lam) else 0.0
        said = {name: value for name, value in super().to_json().items() if name != "rows"}
        return said | {"multipliers": {"active": active, "sum": float(lam.sum()), "max": largest}}


@dataclass(frozen=True, eq=False)
class Sums(Record):
    """Whether the weights fix mass and moment of every activation pattern, by the linear system.

    patterns: different patterns and labels of the candidates.
    pinned: those whose sums every set with these patterns shares.
    free: dimension of the moves across patterns, None where it was not counted.
    least: smallest singular value that counts as none of them, over the largest.
    method: how it is known.
    """

    patterns: int
    pinned: int
    free: int | None
    least: float | None
    method: str


@dataclass(frozen=True, eq=False)
class Uniqueness(Record):
    """The uniqueness certificate of k of m candidates, for a least share t of their multipliers.

    Every other training set with these patterns and labels that explains the weights as well, and in
    which an image takes over at least ``share`` of a sample's weight, keeps at least
    ``determined_at_least`` of the sample's energy in that image, and that image lies within
    ``radius_most`` and, pixel by pixel, between ``low`` and ``high``: proved. ``determined_energy``:
    the least found, attained by ``least`` (k, *shape) at distance ``radius``, in a set that changes the
    sum of gradients by ``change`` of the target's norm. full_at_least, full_energy: the same over sets
    that also keep every margin at or above the least (full KKT sets; equal where there are no margins).

    index: (k,) which candidates.
    lam: (k,) their multipliers, over all rivals.
    members: (k,) candidates of the same pattern and label.
    pinned: (k,) whether the weights fix the sums of that pattern: where they do not, the bound is
        that of the cell, whatever the share.
    kinks: (k,) switches at zero to rounding.
    residual, best_residual: of every layer, of this set and of the set that any attack explains the
        weights best with, {} where none was compared.

    Energies are of images as the network receives them.
    box: whether a value range was known.
    size: (k,) norms of the candidates as the network receives them.
    """

    task: str
    samples: int
    share: float
    box: bool
    margins: bool
    index: Tensor
    labels: Tensor
    lam: Tensor
    members: Tensor
    pinned: Tensor
    kinks: Tensor
    determined_at_least: Tensor
    determined_energy: Tensor
    full_at_least: Tensor
    full_energy: Tensor
    least: Tensor
    change: Tensor
    radius: Tensor
    radius_most: Tensor
    low: Tensor
    high: Tensor
    size: Tensor
    sums: Sums
    residual: dict[str, float]
    seconds: float
    best_residual: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.index)

    @property
    def claim(self) -> str:
        """What is certified, in one sentence."""
        return (
            "every other training set with these patterns and labels that explains the weights as well, "
            f"and in which an image takes over at least {self.share:.0%} of this sample's weight, "
            "keeps at least this much energy in that image"
        )

    @property
    def standing(self) -> tuple[str, ...]:
        """What a reader needs beside the figures: what is proved, for which sets, how well they explain."""
        pinned, free = int(self.pinned.sum()), self.sums.free
        moves = "not counted" if free is None else f"{free} dimensions"
        return (
            f"proved: {self.claim}",
            f"sums of {self.sums.pinned} of {self.sums.patterns} patterns are fixed by the weights, those of "
            f"{pinned} of {len(self)} samples; moves across patterns: {moves}",
            f"residual by layer of this set: {_by_layer(self.residual)}; of the best set an attack found: "
            f"{_by_layer(self.best_residual)}",
            "stationary sets; of full KKT sets, which keep every margin, at least "
            f"{float(self.full_at_least.mean()):.3g} on average"
            if self.margins
            else "multipliers have no sign here: nothing but the cell bounds an image",
            "not covered, and may keep less: samples with new patterns, cancelling pairs of opposite labels",
        )

    def to_json(self) -> dict[str, Any]:
        """The published form; what is unbounded is null."""
        rows = {name: plain(getattr(self, name)) for name in OF_SAMPLE}
        rows |= {"label": self.labels.double().tolist()}
        for name in OF_FULL_SETS:
            rows[name] = plain(getattr(self, name)) if self.margins else [None] * len(self)
        per_sample = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        said = {name: plain(getattr(self, name)) for name in OF_UNIQUENESS}
        return {"claim": self.claim, **said, "certified": len(self), "per_sample": per_sample}


def _by_layer(residuals: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2g}" for name, value in residuals.items()) or "not compared"


@dataclass(frozen=True, eq=False)
class Identification(Record):
    """Samples or aggregates of a polynomial network, and the conditions they rest on.

    order: alpha+1.
    r: dimension of the neurons' span.
    spectral_gap: s_(r+1) / s_r of W.
    n_r, rank_k, cond_k: coefficients of f, rank and condition of the neurons' kernel.
    balance_gap: max_j | |W_j|^2 - alpha a_j^2 | / max_j |W_j|^2.
    carrying: the fewest neurons that hold nearly all of |theta|^2.
    x: (k, d), none before they are recovered.
    weights: (k,) b = lam y.
    residuals: (k,) in the direction of each sample's dual vector, over the neurons.
    certified: (k,) rank condition held, |W|^2 = alpha a^2, nothing of W left out and residual
        small, any other sample is heuristic.
    method: diagonalisation or growth.
    residual: relative, over all equations.
    aggregate: (d,) for degree 1.
    eigenvalues, eigenvectors: (r,) and (d, r), of the moment matrix for degree 2.
    min_margin: on given samples.
    """

    arch: str
    input_shape: tuple[int, ...]
    order: int
    r: int
    spectral_gap: float
    outside: float
    n_r: int
    rank_k: int
    cond_k: float
    balance_gap: float
    neurons: int
    carrying: int
    dead: int
    theta_norm: float
    symmetry: str
    x: Tensor
    weights: Tensor
    residuals: Tensor
    certified: Tensor
    method: str = "none"
    residual: float | None = None
    scale: str = ""
    aggregate: Tensor | None = None
    eigenvalues: Tensor | None = None
    eigenvectors: Tensor | None = None
    min_margin: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether samples (rather than an aggregate) are determined."""
        return self.order > 3 and self.rank_k == self.n_r

    @property
    def checkable(self) -> bool:
        """Whether r samples leave equations over: most forms are then no sum of r powers.

        Two cubes fit any cubic form in two variables, one power any form in one.
        """
        return math.comb(self.r + self.order - 2, self.order - 1) > self.r**2

    @property
    def moment(self) -> Tensor | None:
        """sum_i b_i x_i x_i^T on the signal subspace: (d, d), for degree 2."""
        if self.eigenvalues is None or self.eigenvectors is None:
            return None
        return (self.eigenvectors * self.eigenvalues) @ self.eigenvectors.T

    def to_json(self) -> dict[str, Any]:
        """The published form (``residuum identify --json``)."""
        said = super().to_json()
        columns = [said.pop(name) for name in ("x", "weights", "residuals", "certified")]
        names = ("x", "weight", "residual", "certified")
        vectors = None if self.eigenvectors is None else self.eigenvectors.T
        known = {"sum": self.aggregate, "eigenvalues": self.eigenvalues, "eigenvectors": vectors}
        return {RENAMED.get(k, k): value for k, value in said.items() if k not in APART} | {
            "neurons": {"live": self.neurons, "dead": self.dead, "carrying": self.carrying},
            "normalized_margin": self.normalized_margin,
            "samples": [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)],
            "aggregates": {k: part.tolist() for k, part in known.items() if part is not None},
        }

    @property
    def normalized_margin(self) -> float | None:
        """min margin / ||theta||^order."""
        return None if self.min_margin is None else self.min_margin / self.theta_norm**self.order


@dataclass(frozen=True, eq=False)
class Operating(Record):
    """Canaries told apart at a false positive rate.

    false: canaries left out that may exceed the threshold, 0 where the list is too short for the rate;
    true_rate: share of the inserted ones that do, with its 95% interval.
    """

    rate: float
    false: int
    true_rate: float
    interval: tuple[float, float]

    @property
    def line(self) -> str:
        """In a few words."""
        low, high = self.interval
        few = "" if self.false else ", above all that were left out"
        return f"{self.true_rate:.0%} ({low:.0%} to {high:.0%}) at {self.rate:.1%} false ones{few}"


@dataclass(frozen=True, eq=False)
class CanaryBound(Record):
    """What canaries prove: training was not (epsilon, delta)-private, with this confidence.

    canaries, inserted: how many.
    guesses, right: of the share of guesses that gave the bound.
    statistic: by which inserted ones were told.
    points: operating points.
    auc: over all canaries.
    """

    canaries: int
    inserted: int
    epsilon: float
    confidence: float
    delta: float
    guesses: int
    right: int
    statistic: str
    points: tuple[Operating, ...]
    auc: float
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The bound, and the operating points."""
        return (
            f"canaries: epsilon at least {self.epsilon:.3g} at delta {self.delta:g} with confidence "
            f"{self.confidence:.0%}, by {self.right} of {self.guesses} guesses right ({self.statistic})",
            "canaries: true positives " + ", ".join(point.line for point in self.points),
            *(f"canaries: {note}" for note in self.notes),
        )


@dataclass(frozen=True, eq=False)
class GroupExposure(Record):
    """A class, or the records that share a value of a column.

    score: mean score of its records.
    expected: records of it expected to be recovered. None where the probability is not calibrated.
    probability: their mean probability, None likewise.
    interval: 95% bootstrap interval of that mean over records, None likewise.
    called: by their kinks, None where there are none.
    """

    name: str
    records: int
    score: float
    expected: float | None
    probability: float | None
    interval: tuple[float, float] | None
    called: int | None


@dataclass(frozen=True, eq=False)
class ExposedRecord(Record):
    """One row of the table and of the CSV. A figure that does not apply is null, and a note says why."""

    rank: Annotated[int, SchemaRule(minimum=1)]
    index: Annotated[Count, SchemaRule(description="of the record in the data, from 0")]
    group: str | None
    label: float | tuple[float, ...]
    probability: Annotated[
        Share | None,
        SchemaRule(
            description="of being recovered by the attacks named above; null where it is not calibrated"
        ),
    ]
    score: Annotated[float, SchemaRule(description="log odds, by which records are ranked")]
    heard: Share | None
    own_over_misfit: float
    multiplier: float
    reach: Annotated[
        Share | None, SchemaRule(description="largest cosine for attacks in the row space")
    ]
    reach_ncc: Annotated[
        Share | None, SchemaRule(description="largest NCC for attacks in the row space")
    ]
    informed_ncc: float | None
    kinks: Count | None
    kink_p: Share | None
    kink_q: Share | None
    kink_called: bool | None
    dual: Share | None
    dual_p: Share | None
    margin: float | None
    loss: float
    found_ncc: Annotated[Share | None, SchemaRule(description="of an attack that was handed over")]


COLUMNS = tuple(one.name for one in fields(ExposedRecord))


@dataclass(frozen=True, eq=False)
class ExposureSummary(Record):
    """What holds for all records of an exposure together."""

    schema_version: Annotated[str, SchemaRule(enum=[SCHEMA_VERSION])]
    arch: str
    surface: str
    task: str
    holdout: Count
    layers: tuple[str, ...]
    attacks: Annotated[
        str, SchemaRule(description="whose recoveries the probability is of, at which budget")
    ]
    rank: Count | None
    misfit: float
    gap: float
    records: Count
    level: Annotated[
        Share, SchemaRule(description="false discovery rate at which kinks call a record")
    ]
    expected: float | None
    carry_half: Count | None
    called: Count | None
    largest_probability: Share | None
    uncalibrated: Annotated[
        str, SchemaRule(description="why the score is no probability; empty where it is one")
    ]
    kink_layers: Count
    grouped_by: str
    groups: tuple[GroupExposure, ...]
    canaries: CanaryBound | None
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PublishedExposure(ExposureSummary):
    """Everything that ``exposure.json`` holds."""

    per_record: tuple[ExposedRecord, ...]
    request: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)
    environment: dict[str, Any] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, eq=False)
class Exposure(Record):
    """The exposure of n records in one network. What does not apply is NaN, and says why in the notes.

    probability: (n,) of being recovered by ``attacks``. NaN for a network unlike those on which it was
        checked; ``uncalibrated`` says why.
    score: (n,) log odds, by which records are ranked.
    uncalibrated: why the score is no probability here, "" where it is one.
    heard, own_over_misfit: (n,) what it is made of.
    multiplier: (n,) sum over the rows of a record.
    misfit: of the layers explained, over their norm.
    gap: how far the multipliers are from optimal.
    rank: clean directions of the layer on the input, None without one.
    reach, reach_ncc: (n,) most that an attack in their span can have as cosine and as NCC.
    informed_ncc: (n,) of the estimate of one who knows all other records.
    kinks: (n, layers).
    kink_p, kink_q: (n,) p-value and least false discovery rate at which it is called.
    dual, dual_p: (n,) statistic and its p-value by rank among held-out records.
    margin, loss: (n,).
    found_ncc: (n,) best candidate of an attack that was handed over.
    top: (k,) indices of the records shown, with their images, informed estimates and what the
        attack found, (k, *shape) each, none of which is in the JSON.
    surface: what of the release was looked at.
    holdout: how many held-out records there were.
    level: false discovery rate of the calls.
    groups, grouped_by, by_group: name of each record's group, by what, and the figures of each.
    canaries: the bound on epsilon that they give, None without any.
    """

    arch: str
    surface: str
    task: str
    holdout: int
    layers: tuple[str, ...]
    attacks: str
    rank: int | None
    misfit: float
    gap: float
    level: float
    labels: Tensor
    groups: tuple[str, ...]
    grouped_by: str
    probability: Tensor
    score: Tensor
    heard: Tensor
    own_over_misfit: Tensor
    multiplier: Tensor
    reach: Tensor
    reach_ncc: Tensor
    informed_ncc: Tensor
    kinks: Tensor
    kink_p: Tensor
    kink_q: Tensor
    dual: Tensor
    dual_p: Tensor
    margin: Tensor
    loss: Tensor
    found_ncc: Tensor
    by_group: tuple[GroupExposure, ...]
    canaries: CanaryBound | None
    top: Tensor
    images: Tensor
    informed: Tensor
    found: Tensor
    seconds: float
    uncalibrated: str
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.score)

    @property
    def order(self) -> Tensor:
        """(n,) records, most exposed first."""
        return self.score.argsort(descending=True, stable=True)

    @property
    def expected(self) -> float | None:
        """Return how many records are expected to be recovered, None where that is not calibrated."""
        return None if self.uncalibrated else float(self.probability.sum())

    @property
    def carry_half(self) -> int | None:
        """Return the fewest records that carry half of the expected number, None where there is none."""
        if self.uncalibrated:
            return None
        shares = self.probability.sort(descending=True).values.cumsum(0)
        return int((shares < HALF * shares[-1]).sum()) + 1

    @property
    def called(self) -> int | None:
        """Records whose kinks betray them at the level; None without kinks."""
        return None if bool(self.kink_q.isnan().all()) else int((self.kink_q <= self.level).sum())

    @property
    def lines(self) -> tuple[str, ...]:
        """What holds for all records together, one sentence each."""
        if self.uncalibrated:
            said = [
                "ranking only: scores are not probabilities here. "
                f"{self.uncalibrated[:1].upper()}{self.uncalibrated[1:]}"
            ]
        else:
            said = [
                f"expected to be recovered: {self.expected:.3g} of {len(self)}; {self.carry_half} "
                "records carry half of the exposure",
                f"probability: {self.attacks}",
            ]
        if self.called is not None:
            said.append(
                f"kinks call {self.called} of {len(self)} at a false discovery rate of {self.level:.0%} "
                f"(chance level: {self.holdout} held-out records)"
            )
        if self.canaries is not None:
            said += self.canaries.lines
        return (*said, "none of this is a guarantee: only differential privacy gives one")

    def rows(self, most: int | None = None) -> list[dict[str, Any]]:
        """One per record, most exposed first, with the names of ``COLUMNS``."""
        order = self.order[:most]
        columns: dict[str, Any] = {"rank": range(1, len(order) + 1), "index": order.tolist()}
        columns["group"] = [self.groups[i] if self.groups else None for i in order.tolist()]
        labels = self.labels[order]
        columns["label"] = plain(labels if labels.ndim == 1 else labels.squeeze(1))
        for name in COLUMNS[4:]:
            if name == "kinks":
                columns[name] = self.kinks[order].sum(1).tolist() if self.kinks.numel() else None
            elif name == "kink_called":
                q = self.kink_q[order]
                called = [None if v != v else v <= self.level for v in q.tolist()]
                columns[name] = called
            else:
                columns[name] = plain(getattr(self, name)[order])
            columns[name] = [None] * len(order) if columns[name] is None else columns[name]
        return [dict(zip(COLUMNS, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def summary(self) -> ExposureSummary:
        """Return what holds for all records together."""
        return ExposureSummary(
            schema_version=SCHEMA_VERSION,
            arch=self.arch,
            surface=self.surface,
            task=self.task,
            holdout=self.holdout,
            layers=self.layers,
            attacks=self.attacks,
            rank=self.rank,
            misfit=self.misfit,
            gap=self.gap,
            records=len(self),
            level=self.level,
            expected=self.expected,
            carry_half=self.carry_half,
            called=self.called,
            largest_probability=None if self.uncalibrated else float(self.probability.max()),
            uncalibrated=self.uncalibrated,
            kink_layers=self.kinks.shape[1] if self.kinks.numel() else 0,
            grouped_by=self.grouped_by,
            groups=self.by_group,
            canaries=self.canaries,
            seconds=self.seconds,
            notes=self.notes,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the published form (:class:`PublishedExposure`), without images."""
        return {**self.summary().to_json(), "per_record": self.rows()}

    def to_csv(self) -> str:
        """One line per record, most exposed first; an empty cell where a figure does not apply."""
        text = io.StringIO()
        table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        table.writeheader()
        for row in self.rows():
            named = str(row["group"] or "")
            # A spreadsheet would compute a formula; a label such as -1 is a number to it already.
            if named.startswith(FORMULAS) and not NUMBER.fullmatch(named):
                row["group"] = f"'{named}"
            table.writerow(row)
        return text.getvalue()


def missing(n: int) -> Tensor:
    """(n,) figures that do not apply."""
    return torch.full((n,), torch.nan, dtype=torch.float64)
