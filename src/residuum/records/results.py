"""What comes out: what an attack brings back, how much of it chance explains, what is certified of it.

:class:`Reconstruction`, and :class:`Selection` in it; :class:`Scores` against the training set;
:class:`Certificate` of the network, :class:`Uniqueness` of candidates; :class:`Identification` of the
samples of a polynomial network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residuum.records.base import Record, plain
from residuum.records.knowledge import Knowledge

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


@dataclass(frozen=True, eq=False)
class Selection(Record):
    """Reconstructions chosen without the data, best first: consensus first, singletons after.

    x: (k, *shape).
    labels: (k,).
    lam: (k,) total multiplier.
    support: (k,) number of restarts that hold such a candidate.
    members: (k,) candidates merged into it.
    confidence: (k,) in [0, 1].
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

    def __len__(self) -> int:
        return len(self.x)


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
        number (``attacks/growth.py``).
    ident: (N,) number of every candidate within its restart, None before there were such.
    second_order: per restart, of attacks that grew, whether its end point is second-order
        stationary, with both quantities.
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
    """One training sample: its margin, the multiplier of its candidate, its match by every metric."""

    index: int
    label: float | int | None
    margin: float | None
    multiplier: float | None
    recovered: bool | None
    matches: dict[str, SampleMatch]


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

    Every other training set with these patterns and labels that explains the weights as well, and in which
    an image takes over at least ``share`` of a sample's weight, keeps at least ``determined_at_least``
    of the sample's energy in that image, and that image lies within ``radius_most`` and, pixel by
    pixel, between ``low`` and ``high``: proved. ``determined_energy``: the least found, attained by
    ``least`` (k, *shape) at distance ``radius``, in a set that changes the sum of gradients by
    ``change`` of the target's norm. full_at_least, full_energy: the same over sets that also keep
    every margin at or above the least (full KKT sets; equal where there are no margins).

    index: (k,) which candidates.
    lam: (k,) their multipliers, over all rivals.
    members: (k,) candidates of the same pattern and label.
    pinned: (k,) whether the weights fix the sums of that pattern: where they do not, the bound is
        that of the cell, whatever the share.
    kinks: (k,) switches at zero to rounding.
    residual, best_residual: of every layer, of this set and of the set that any attack explains the
        weights best with, {} where none was compared.

    Energies are of images as the network receives them.
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
