"""A finished sweep: ranked by the weights alone, scored by the data, shown.

Nothing here that reads the secret data can change the order of trials, which is fixed before: it puts
both rankings side by side and says what choosing without the data has lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from residuum.evaluation import score
from residuum.evaluation.scoring import CandidatePool, selected_pool, whole_pool
from residuum.records import Dataset, Reconstruction, Scores
from residuum.records.inputs import with_mean
from residuum.records.rundir import RunDir
from residuum.report.charts import Coordinate
from residuum.report.html import Item, render_sweep
from residuum.sweeping.executors import Task
from residuum.sweeping.pooling import Pool
from residuum.sweeping.space import COMPLETE, FAILED, PRUNED, Plan, Trial

SUBSETS = 200  # held-out subsets per trial, the least a control takes; the pooled result gets 500
TOP = 5  # of the ranking, among which the best by the data is named
SHOWN, CARDS = 12, 60  # rows and pictures of the page, which has all else in its files
HEADLINES = {"residual": "First-layer residual", "expected": "Sources expected to be real:"}


class SweepRun(RunDir):
    """An open directory of a sweep: one driver at a time, a file per trial."""

    what, own, summary = "a sweep", ("request.json",), "sweep.json"

    def trial(self, number: int) -> Path:
        """Where a finished trial's candidates are."""
        return self.path / "trials" / f"{number:06d}.safetensors"

    def state(self, number: int) -> Path:
        """Where a trial that successive halving paused goes on from."""
        return self.trial(number).with_suffix(".state.safetensors")

    def load(self, number: int) -> Reconstruction | None:
        """A finished trial's candidates; None where there are none, or none that can be read."""
        return Reconstruction.load_or_none(self.trial(number))


@dataclass(frozen=True, eq=False)
class Sweep:
    """A finished sweep. said: what ``sweep.json`` says; scored: both rankings, where data was given."""

    plan: Plan
    task: Task
    trials: tuple[Trial, ...]
    found: Reconstruction | None
    pool: Pool
    said: dict[str, Any]
    scored: Rankings | None = None

    @property
    def fresh(self) -> int:
        """Trials that ended in this session."""
        return self.said["session"]["trials"]

    @property
    def order(self) -> list[Trial]:
        """Complete trials, best first."""
        return ranked(self.trials)

    @property
    def front(self) -> list[Trial]:
        """Trials that none beats: one, or several where two objectives compete."""
        by_number = {trial.number: trial for trial in self.trials}
        return [by_number[number] for number in self.said["front"]]


def ranked(trials: Iterable[Trial]) -> list[Trial]:
    """Complete trials, least first-layer residual first, or of unmix most expected sources; the lower
    number breaks a tie.
    """
    done = (trial for trial in trials if trial.state == COMPLETE)
    return sorted(done, key=lambda trial: (trial.values[0], trial.number))


@dataclass(frozen=True)
class Rankings:
    """rows: per complete trial, in the order without the data: its residual and what it recovered;
    pooled, consensus: scores of all groups and of those that several runs hold.
    """

    rows: tuple[dict[str, Any], ...]
    pooled: Scores
    consensus: Scores | None
    n: int

    @property
    def by_data(self) -> list[dict[str, Any]]:
        """The same rows, most recovered first, then by the mean of the ten best matches."""
        return sorted(self.rows, key=lambda row: (-(row["recovered"] or 0), -(row["top10"] or 0)))

    @property
    def correlation(self) -> float | None:
        """Spearman's, of what ranks with many recovered; None where one of them is constant."""
        from scipy.stats import spearmanr

        ranked_by = [
            row["expected"] if row["residual"] is None else -row["residual"] for row in self.rows
        ]
        counts = [row["recovered"] or 0 for row in self.rows]
        if len(set(ranked_by)) < 2 or len(set(counts)) < 2:
            return None
        value = float(spearmanr(ranked_by, counts).statistic)
        return value if math.isfinite(value) else None

    def to_json(self) -> dict[str, Any]:
        """Both orders by trial number, and what the choice lost."""
        best, chosen = self.by_data[0], self.rows[0]
        return {
            "n": self.n,
            "without_data": [row["number"] for row in self.rows],
            "with_data": [row["number"] for row in self.by_data],
            "trials": list(self.rows),
            "chosen": chosen,
            "best_with_data": best,
            "best_of_top": max(self.rows[:TOP], key=lambda row: row["recovered"] or 0),
            "lost": (best["recovered"] or 0) - (chosen["recovered"] or 0),
            "spearman": self.correlation,
            "pooled": self.pooled.to_json()["metrics"],
            "consensus": None if self.consensus is None else self.consensus.to_json()["metrics"],
        }


def rankings(
    done: Sweep, out: Path, train: Dataset, holdout: Dataset | None, seed: int = 0
) -> Rankings:
    """Score every complete trial and the pooled result of a finished sweep."""

    def scores(pool: CandidatePool, subsets: int) -> Scores:
        return score(
            pool.x,
            train,
            holdout,
            multipliers=pool.lam,
            metrics=["ncc"],
            seed=seed,
            subsets=subsets,
        )

    assert done.found is not None
    folder, rows = SweepRun(out), []
    for trial in done.order:
        found = folder.load(trial.number)
        if found is None:
            continue
        part = scores(whole_pool(found), SUBSETS).metrics["ncc"]
        rows.append(
            {
                "number": trial.number,
                "residual": trial.residual,
                "expected": trial.expected,
                "recovered": part.recovered,
                "expected_by_chance": part.expected_by_chance,
                "p_value": part.p_value,
                "threshold": part.threshold_null99,
                "top10": part.top10_mean,
            }
        )
    chosen = selected_pool(done.found)
    agreed = len(chosen.x) and bool((done.found.selection.support > 1).any())  # type: ignore[union-attr]
    consensus = scores(chosen, 500) if agreed else None
    return Rankings(tuple(rows), scores(whole_pool(done.found), 500), consensus, len(train))


def page(done: Sweep, subject: str) -> str:
    """The report."""
    order, said, scored = done.order, done.said, done.scored
    counts, found, space = said["counts"], done.found, done.plan.space
    tried = {name: [trial.params[name] for trial in order] for name in space}
    coordinates = [Coordinate(name, tried[name], s.log, s.low, s.high) for name, s in space.items()]
    figure = done.plan.objectives[0]
    values = [getattr(trial, figure) for trial in order]
    coordinates.append(Coordinate(figure, values, figure == "residual"))
    per_hour = f"{3600 * done.fresh / said['session']['seconds']:.0f}" if done.fresh else "–"
    tiles = (
        ("trials complete", str(len(order))),
        ("runs pooled", str(done.pool.runs)),
        ("candidates pooled", str(done.pool.candidates)),
        ("trials per hour", per_hour),
    )
    columns = ("trial", "residual", "agreement", "expected", *space)
    return render_sweep(
        subject=subject,
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        headline=f"{HEADLINES[figure]} {values[0]:.3g} at best"
        if order
        else "No trial was complete",
        sentence=f"{len(done.trials)} of {done.plan.trials} trials ended: {counts[COMPLETE]} "
        f"complete, {counts[PRUNED]} stopped early, {counts[FAILED]} failed. Of the candidates of "
        f"{done.pool.runs} runs, {said['pooled']['consensus']} groups are held by several runs.",
        tiles=tiles,
        coordinates=coordinates if order else (),
        columns=(*columns, "recovered") if scored else columns,
        rows=_rows(done),
        choice=choice_lines(scored) if scored else (),
        scores=_scores(scored) if scored else (),
        items=_items(done),
        total=said["pooled"]["consensus"],
        shape=() if found is None else tuple(found.x.shape[1:]),
        knowledge=done.task.knowledge.facts,
        failures=tuple(said["failures"].items()),
        notes=() if found is None else found.notes,
        settings={k: v for k, v in said["plan"].items() if k != "space"},
        environment=said["environment"],
    )


def _rows(done: Sweep) -> list[tuple[str, ...]]:
    """Rank and figures of the best trials, and where two objectives compete all of the front."""
    ahead = {trial.number for trial in done.front} if len(done.plan.objectives) > 1 else set()
    shown = done.order[:SHOWN]
    shown += [t for t in done.front[:SHOWN] if t.number in ahead and t not in shown]
    rows = []
    for trial in shown:
        rank = f"{done.order.index(trial) + 1}{' front' if trial.number in ahead else ''}"
        values = (trial.residual, trial.agreement, trial.expected, *trial.params.values())
        cells = [str(trial.number), *("–" if v is None else f"{v:.3g}" for v in values)]
        if done.scored is not None:
            counts = {row["number"]: _count(row) for row in done.scored.rows}
            cells.append(counts.get(trial.number, "–"))
        rows.append((rank, *cells))
    return rows


def choice_lines(scored: Rankings) -> tuple[str, ...]:
    """What the ranking by the weights alone lost, in sentences."""
    said = scored.to_json()
    chosen, best, top = said["chosen"], said["best_with_data"], said["best_of_top"]
    what = "a low residual" if chosen["residual"] is not None else "many expected sources"
    if chosen["recovered"] is None:
        return ("Without a held-out control no count can be told from chance.",)
    rho = said["spearman"]
    return (
        f"Of {scored.n} training samples trial {chosen['number']}, best by the weights alone, recovered "
        f"{_count(chosen)}; trial {best['number']}, best by the data, {_count(best)}. Of the five best "
        f"without the data, trial {top['number']} recovered {_count(top)}.",
        f"Rank correlation of {what} with recovered samples: "
        + ("none, one of them is constant." if rho is None else f"{rho:.2f}."),
        "The data was read after the ranking was fixed and changed nothing in it.",
    )


def _count(row: dict[str, Any]) -> str:
    """Recovered samples of a trial, with what they had to beat."""
    if row["recovered"] is None:
        return "–"
    return f"{row['recovered']} (ncc > {row['threshold']:.3g})"


def _scores(scored: Rankings) -> tuple[tuple[str, str, str], ...]:
    parts = (("all groups", scored.pooled), ("consensus alone", scored.consensus))
    return tuple(
        (
            f"recovered of {scored.n}, {name}",
            f"{part.recovered} ({part.rule}; chance {part.expected_by_chance:.2g}, p {part.p_value:.2g})",
            "one-to-one matches beyond 99% of held-out ones",
        )
        for name, scores in parts
        if scores is not None and (part := scores.metrics["ncc"]).recovered is not None
    )


def score_lines(scored: Rankings) -> tuple[str, ...]:
    """The pooled result against chance, in lines."""
    return tuple(f"{name}: {value}" for name, value, _ in _scores(scored))


def _items(done: Sweep) -> list[Item]:
    if done.found is None or done.found.selection is None:
        return []
    chosen, mean = done.found.selection, done.task.knowledge.mean
    agreed = (chosen.support > 1).nonzero().flatten()[:CARDS].tolist()
    return [
        Item(
            number=place + 1,
            found=with_mean(chosen.x[i], mean).numpy(),
            label=f"label {chosen.labels[i].item():g}",
            confidence=chosen.confidence_of(i),
            support=int(chosen.support[i]),
            restarts=done.pool.runs,
        )
        for place, i in enumerate(agreed)
    ]
