"""A finished sweep: ranked by the weights alone, scored by the data, shown.

The order of trials is fixed before the secret data is read. The data adds a second ranking, which shows
what the choice without it lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from residuum.evaluation import score
from residuum.evaluation.scoring import CandidatePool, all_candidates, selected_candidates
from residuum.records import Dataset, Reconstruction, Scores
from residuum.records.inputs import add_mean
from residuum.records.rundir import RunDir
from residuum.report.charts import Coordinate
from residuum.report.html import Item, render_sweep
from residuum.sweeping.executors import Task
from residuum.sweeping.pooling import Pool
from residuum.sweeping.space import COMPLETE, FAILED, PRUNED, SweepRequest, Trial

SUBSETS = 500  # held-out subsets for the pooled result
TRIAL_SUBSETS = 200  # for each trial: the fewest that a control takes
TOP = 5  # of the ranking, among which the best by the data is named
SHOWN, CARDS = 12, 60  # rows and pictures of the report
HEADLINES = {"residual": "First-layer residual", "expected": "Sources expected to be real:"}


class SweepRun(RunDir):
    """An open directory of a sweep: one driver at a time, a file per trial."""

    what, files, summary = "a sweep", ("request.json",), "sweep.json"

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
    """A finished sweep.

    found: the pooled reconstruction, None if no trial was complete.
    said: the content of ``sweep.json``.
    scored: both rankings, if data was given.
    """

    request: SweepRequest
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
        """Trials that no other one beats: one, or several if two objectives compete."""
        by_number = {trial.number: trial for trial in self.trials}
        return [by_number[number] for number in self.said["front"]]


def ranked(trials: Iterable[Trial]) -> list[Trial]:
    """Return the complete trials, lowest first value first; the lower number breaks a tie."""
    complete = (trial for trial in trials if trial.state == COMPLETE)
    return sorted(complete, key=lambda trial: (trial.values[0], trial.number))


@dataclass(frozen=True)
class Rankings:
    """Both rankings of a sweep.

    rows: figures of each complete trial and what it recovered, in the order without the data.
    pooled, consensus: scores of all groups, and of those that several runs hold.
    n: training samples.
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
        """Spearman's correlation of the ranking figure with the recovered samples; None if one of them
        is constant.
        """
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
        """Return both orders by trial number, and what the choice lost."""
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


def rankings(done: Sweep, out: Path, train: Dataset, holdout: Dataset | None) -> Rankings:
    """Score every complete trial and the pooled result of a finished sweep."""

    def scores(pool: CandidatePool, subsets: int) -> Scores:
        return score(
            pool.x,
            train,
            holdout,
            multipliers=pool.lam,
            metrics=["ncc"],
            seed=0,
            subsets=subsets,
        )

    assert done.found is not None
    folder, rows = SweepRun(out), []
    for trial in done.order:
        if (reconstruction := folder.load(trial.number)) is None:
            continue
        ncc = scores(all_candidates(reconstruction), TRIAL_SUBSETS).metrics["ncc"]
        rows.append(
            {
                "number": trial.number,
                "residual": trial.residual,
                "expected": trial.expected,
                "recovered": ncc.recovered,
                "expected_by_chance": ncc.expected_by_chance,
                "p_value": ncc.p_value,
                "threshold": ncc.threshold_null99,
                "top10": ncc.top10_mean,
            }
        )
    groups = done.found.selection
    agreed = groups is not None and bool((groups.support > 1).any())
    consensus = scores(selected_candidates(done.found), SUBSETS) if agreed else None
    return Rankings(tuple(rows), scores(all_candidates(done.found), SUBSETS), consensus, len(train))


def page(done: Sweep, subject: str) -> str:
    """Return the report as HTML."""
    order, summary, scored = done.order, done.said, done.scored
    counts, space, figure = summary["counts"], done.request.space, done.request.objectives[0]
    coordinates = [
        Coordinate(name, [trial.params[name] for trial in order], s.log, s.low, s.high)
        for name, s in space.items()
    ]
    values = [getattr(trial, figure) for trial in order]
    coordinates.append(Coordinate(figure, values, figure == "residual"))
    per_hour = f"{3600 * done.fresh / summary['session']['seconds']:.0f}" if done.fresh else "–"
    columns = ("trial", "residual", "agreement", "expected", *space)
    return render_sweep(
        subject=subject,
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        headline=f"{HEADLINES[figure]} {values[0]:.3g} at best"
        if order
        else "No trial was complete",
        sentence=f"{len(done.trials)} of {done.request.trials} trials ended: {counts[COMPLETE]} "
        f"complete, {counts[PRUNED]} stopped early, {counts[FAILED]} failed. Of the candidates of "
        f"{done.pool.runs} runs, {summary['pooled']['consensus']} groups are held by several runs.",
        tiles=(
            ("trials complete", str(len(order))),
            ("runs pooled", str(done.pool.runs)),
            ("candidates pooled", str(done.pool.candidates)),
            ("trials per hour", per_hour),
        ),
        coordinates=coordinates if order else (),
        columns=(*columns, "recovered") if scored else columns,
        rows=_rows(done),
        choice=choice_lines(scored) if scored else (),
        scores=_scores(scored) if scored else (),
        items=_items(done),
        total=summary["pooled"]["consensus"],
        shape=() if done.found is None else tuple(done.found.x.shape[1:]),
        knowledge=done.task.knowledge.known_facts,
        failures=tuple(summary["failures"].items()),
        notes=() if done.found is None else done.found.notes,
        settings={k: v for k, v in summary["plan"].items() if k != "space"},
        environment=summary["environment"],
    )


def _rows(done: Sweep) -> list[tuple[str, ...]]:
    """Rank and figures of the best trials, and of the front if two objectives compete."""
    order = done.order
    front = done.front[:SHOWN] if len(done.request.objectives) > 1 else []
    shown = order[:SHOWN] + [trial for trial in front if trial not in order[:SHOWN]]
    counts = {row["number"]: _count(row) for row in done.scored.rows} if done.scored else {}
    rows = []
    for trial in shown:
        rank = f"{order.index(trial) + 1}{' front' if trial in front else ''}"
        values = (trial.residual, trial.agreement, trial.expected, *trial.params.values())
        cells = [str(trial.number), *("–" if v is None else f"{v:.3g}" for v in values)]
        if done.scored:
            cells.append(counts.get(trial.number, "–"))
        rows.append((rank, *cells))
    return rows


def choice_lines(scored: Rankings) -> tuple[str, ...]:
    """Return sentences about what the ranking by the weights alone lost."""
    summary = scored.to_json()
    chosen, best, top = summary["chosen"], summary["best_with_data"], summary["best_of_top"]
    if chosen["recovered"] is None:
        return ("Without a held-out control no count can be told from chance.",)
    figure = "a low residual" if chosen["residual"] is not None else "many expected sources"
    rho = summary["spearman"]
    correlation = "none, one of them is constant." if rho is None else f"{rho:.2f}."
    return (
        f"Of {scored.n} training samples trial {chosen['number']}, best by the weights alone, recovered "
        f"{_count(chosen)}; trial {best['number']}, best by the data, {_count(best)}. Of the five best "
        f"without the data, trial {top['number']} recovered {_count(top)}.",
        f"Rank correlation of {figure} with recovered samples: {correlation}",
        "The data was read after the ranking was fixed and changed nothing in it.",
    )


def _count(row: dict[str, Any]) -> str:
    """Recovered samples of a trial, with their threshold."""
    if row["recovered"] is None:
        return "–"
    return f"{row['recovered']} (ncc > {row['threshold']:.3g})"


def _scores(scored: Rankings) -> tuple[tuple[str, str, str], ...]:
    """Name, value and meaning of the pooled scores."""
    pools = (("all groups", scored.pooled), ("consensus alone", scored.consensus))
    return tuple(
        (
            f"recovered of {scored.n}, {name}",
            f"{ncc.recovered} ({ncc.rule}; chance {ncc.expected_by_chance:.2g}, p {ncc.p_value:.2g})",
            "one-to-one matches beyond 99% of held-out ones",
        )
        for name, scores in pools
        if scores is not None and (ncc := scores.metrics["ncc"]).recovered is not None
    )


def score_lines(scored: Rankings) -> tuple[str, ...]:
    """Return the pooled result compared with chance, in lines."""
    return tuple(f"{name}: {value}" for name, value, _ in _scores(scored))


def _items(done: Sweep) -> list[Item]:
    """Cards of the groups that several runs hold."""
    if done.found is None or done.found.selection is None:
        return []
    groups, mean = done.found.selection, done.task.knowledge.mean
    agreed = (groups.support > 1).nonzero().flatten()[:CARDS].tolist()
    return [
        Item(
            number=rank,
            reconstruction=add_mean(groups.x[i], mean).numpy(),
            label=f"label {groups.labels[i].item():g}",
            confidence=groups.confidence_of(i),
            support=int(groups.support[i]),
            restarts=done.pool.runs,
        )
        for rank, i in enumerate(agreed, 1)
    ]
