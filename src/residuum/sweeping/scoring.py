"""A finished sweep: its ranking without training data, its scores on the training data, and its report.

The order of the trials is fixed before the private data is read. The private data gives a second ranking. The
comparison shows how many more samples the best trial of the second ranking recovered.
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

# Number of random subsets of held-out samples that show how many samples all trials together match by
# chance.
SUBSETS = 500
# Number of random subsets of held-out samples that show how many samples one trial matches by chance. It is
# the smallest allowed number.
TRIAL_SUBSETS = 200
# Of this number of best-ranked trials, the report names the trial that recovered most samples.
TOP = 5
# Maximal numbers of table rows and of pictures in the report of a sweep.
MAX_ROWS, MAX_CARDS = 12, 60
HEADLINES = {"residual": "First-layer residual", "expected": "Reconstructions expected to be real:"}


class SweepRun(RunDir):
    """The open folder of a sweep, with one file for each trial. Only one process can open the folder."""

    what, files, summary = "a sweep", ("request.json",), "sweep.json"

    def trial(self, number: int) -> Path:
        """Return the path of the file with the reconstruction of a finished trial (one attack)."""
        return self.path / "trials" / f"{number:06d}.safetensors"

    def state(self, number: int) -> Path:
        """Return the path of the file with the saved state of a paused trial (one attack)."""
        return self.trial(number).with_suffix(".state.safetensors")

    def load(self, number: int) -> Reconstruction | None:
        """Load the reconstruction of a finished trial (one attack), None if it cannot be read."""
        return Reconstruction.load_or_none(self.trial(number))


@dataclass(frozen=True, eq=False)
class Sweep:
    """The result of a sweep, in which an attack was run with many settings.

    Attributes:
        request: The settings of the sweep.
        task: The inputs that all trials shared.
        trials: All trials, sorted by their number.
        reconstruction: The pooled reconstruction, None if no trial was complete.
        pool: Groups of similar candidates of all trials.
        summary: The content of ``sweep.json``.
        scored: The rankings with and without the training data, None if no data was passed.
    """

    request: SweepRequest
    task: Task
    trials: tuple[Trial, ...]
    reconstruction: Reconstruction | None
    pool: Pool
    summary: dict[str, Any]
    scored: Rankings | None = None

    @property
    def fresh(self) -> int:
        """Number of trials (attacks) that finished since the sweep was started or continued."""
        return self.summary["session"]["trials"]

    @property
    def order(self) -> list[Trial]:
        """The completed trials (attacks), ranked without the training data, best first."""
        return rank_trials(self.trials)

    @property
    def front(self) -> list[Trial]:
        """Trials that no other trial beats in all objectives.

        If there is one objective, only the best trial.
        """
        by_number = {trial.number: trial for trial in self.trials}
        return [by_number[number] for number in self.summary["front"]]


def rank_trials(trials: Iterable[Trial]) -> list[Trial]:
    """Sort the completed trials of a sweep by their first objective, best first, and then by number."""
    complete = (trial for trial in trials if trial.state == COMPLETE)
    return sorted(complete, key=lambda trial: (trial.values[0], trial.number))


@dataclass(frozen=True)
class Rankings:
    """Two rankings of a sweep's trials: with and without the training data.

    Attributes:
        rows: Statistics and number of recovered samples of each complete trial. The rows are sorted by the
            ranking without the training data, the best trial first.
        pooled: Scores of all groups of similar candidates.
        consensus: Scores of the groups that several runs found, None if there are no such groups.
        n: Number of training samples.
    """

    rows: tuple[dict[str, Any], ...]
    pooled: Scores
    consensus: Scores | None
    n: int

    @property
    def by_data(self) -> list[dict[str, Any]]:
        """The statistics of each trial (attack), sorted by the number of recovered samples."""
        return sorted(self.rows, key=lambda row: (-(row["recovered"] or 0), -(row["top10"] or 0)))

    @property
    def correlation(self) -> float | None:
        """Rank correlation between a good fit (small residual) and many recovered samples, None if undefined.

        If the attack has no residual, the number ``expected`` of real reconstructions replaces the residual.
        """
        from scipy.stats import spearmanr

        ranking_values = [
            row["expected"] if row["residual"] is None else -row["residual"] for row in self.rows
        ]
        recovered_counts = [row["recovered"] or 0 for row in self.rows]
        if len(set(ranking_values)) < 2 or len(set(recovered_counts)) < 2:
            return None
        spearman = float(spearmanr(ranking_values, recovered_counts).statistic)
        return spearman if math.isfinite(spearman) else None

    def to_json(self) -> dict[str, Any]:
        """Return both rankings as trial numbers, with the statistics of the best trials.

        The value ``lost`` is how many more samples the best trial by the data recovered than the best trial
        without the data.
        """
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


def score_rankings(done: Sweep, out: Path, train: Dataset, holdout: Dataset | None) -> Rankings:
    """Score every complete trial and the pooled result of a finished sweep.

    Args:
        done: The finished sweep, with at least one complete trial.
        out: Folder of the sweep.
        train: Training samples.
        holdout: Held-out samples, to calibrate the scores. None if there are no held-out samples.

    Returns:
        The rankings of the trials with and without the training data.
    """

    def score_pool(pool: CandidatePool, subsets: int) -> Scores:
        return score(
            pool.x,
            train,
            holdout,
            multipliers=pool.lam,
            metrics=["ncc"],
            seed=0,
            subsets=subsets,
        )

    assert done.reconstruction is not None
    folder, rows = SweepRun(out), []
    for trial in done.order:
        if (reconstruction := folder.load(trial.number)) is None:
            continue
        ncc_score = score_pool(all_candidates(reconstruction), TRIAL_SUBSETS).metrics["ncc"]
        rows.append(
            {
                "number": trial.number,
                "residual": trial.residual,
                "expected": trial.expected,
                "recovered": ncc_score.recovered,
                "expected_by_chance": ncc_score.expected_by_chance,
                "p_value": ncc_score.p_value,
                "threshold": ncc_score.threshold_null99,
                "top10": ncc_score.top10_mean,
            }
        )
    pooled_groups = done.reconstruction.selection
    has_consensus = pooled_groups is not None and bool((pooled_groups.support > 1).any())
    consensus = (
        score_pool(selected_candidates(done.reconstruction), SUBSETS) if has_consensus else None
    )
    pooled = score_pool(all_candidates(done.reconstruction), SUBSETS)
    return Rankings(tuple(rows), pooled, consensus, len(train))


def render_report(done: Sweep, subject: str) -> str:
    """Render the report of a sweep.

    Args:
        done: The finished sweep.
        subject: Name of the attacked network.

    Returns:
        The report as HTML.
    """
    order, summary, scored = done.order, done.summary, done.scored
    counts, space, objective = summary["counts"], done.request.space, done.request.objectives[0]
    plot_coordinates = [
        Coordinate(name, [trial.params[name] for trial in order], s.log, s.low, s.high)
        for name, s in space.items()
    ]
    objective_values = [getattr(trial, objective) for trial in order]
    plot_coordinates.append(Coordinate(objective, objective_values, objective == "residual"))
    trials_per_hour = (
        f"{3600 * done.fresh / summary['session']['seconds']:.0f}" if done.fresh else "–"
    )
    columns = ("trial", "residual", "agreement", "expected", *space)
    return render_sweep(
        subject=subject,
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        headline=f"{HEADLINES[objective]} {objective_values[0]:.3g} in the best trial"
        if order
        else "No trial was complete",
        sentence=f"{len(done.trials)} of {done.request.trials} trials ended: {counts[COMPLETE]} "
        f"complete, {counts[PRUNED]} stopped early, {counts[FAILED]} failed. The candidates of "
        f"{done.pool.runs} runs form groups, and {summary['pooled']['consensus']} groups were found by "
        "several runs.",
        tiles=(
            ("trials complete", str(len(order))),
            ("runs pooled", str(done.pool.runs)),
            ("candidates pooled", str(done.pool.candidates)),
            ("trials per hour", trials_per_hour),
        ),
        coordinates=plot_coordinates if order else (),
        columns=(*columns, "recovered") if scored else columns,
        rows=_table_rows(done),
        choice=choice_lines(scored) if scored else (),
        scores=_scores(scored) if scored else (),
        items=_items(done),
        total=summary["pooled"]["consensus"],
        shape=() if done.reconstruction is None else tuple(done.reconstruction.x.shape[1:]),
        knowledge=done.task.knowledge.known_facts,
        failures=tuple(summary["failures"].items()),
        notes=() if done.reconstruction is None else done.reconstruction.notes,
        settings={k: v for k, v in summary["plan"].items() if k != "space"},
        environment=summary["environment"],
    )


def _table_rows(done: Sweep) -> list[tuple[str, ...]]:
    """Return the table rows of the best trials (attacks with different settings) of a sweep."""
    ranked_trials = done.order
    front = done.front[:MAX_ROWS] if len(done.request.objectives) > 1 else []
    trials = ranked_trials[:MAX_ROWS] + [
        trial for trial in front if trial not in ranked_trials[:MAX_ROWS]
    ]
    recovered_cells = (
        {row["number"]: _format_count(row) for row in done.scored.rows} if done.scored else {}
    )
    table_rows = []
    for trial in trials:
        rank_text = f"{ranked_trials.index(trial) + 1}{' front' if trial in front else ''}"
        trial_values = (trial.residual, trial.agreement, trial.expected, *trial.params.values())
        table_cells = [str(trial.number), *("–" if v is None else f"{v:.3g}" for v in trial_values)]
        if done.scored:
            table_cells.append(recovered_cells.get(trial.number, "–"))
        table_rows.append((rank_text, *table_cells))
    return table_rows


def choice_lines(scored: Rankings) -> tuple[str, ...]:
    """Return sentences that compare the rankings with and without the training data."""
    rankings_json = scored.to_json()
    chosen, best, top = (
        rankings_json["chosen"],
        rankings_json["best_with_data"],
        rankings_json["best_of_top"],
    )
    if chosen["recovered"] is None:
        return (
            "Recovered samples cannot be counted, because there are no held-out samples to compare with.",
        )
    ranking_reason = (
        "a low residual" if chosen["residual"] is not None else "many expected reconstructions"
    )
    spearman = rankings_json["spearman"]
    correlation = (
        "undefined, because one of these numbers is equal in all trials."
        if spearman is None
        else f"{spearman:.2f}."
    )
    return (
        f"Trial {chosen['number']}, the best trial by the weights alone, recovered {_format_count(chosen)} "
        f"of {scored.n} training samples. Trial {best['number']}, the best trial by the data, recovered "
        f"{_format_count(best)}. Of the five best trials by the weights alone, trial {top['number']} "
        f"recovered most: {_format_count(top)}.",
        f"Rank correlation of {ranking_reason} with recovered samples: {correlation}",
        "The data was read after the ranking was fixed, and did not change the ranking.",
    )


def _format_count(row: dict[str, Any]) -> str:
    """Describe how many samples a trial (one attack) recovered, and which NCC a match must exceed."""
    if row["recovered"] is None:
        return "–"
    return f"{row['recovered']} (ncc > {row['threshold']:.3g})"


def _scores(scored: Rankings) -> tuple[tuple[str, str, str], ...]:
    """Return the name, value and meaning of each score of the combined reconstruction."""
    scores_by_name = (("all groups", scored.pooled), ("consensus only", scored.consensus))
    return tuple(
        (
            f"recovered of {scored.n}, {name}",
            f"{ncc.recovered} ({ncc.rule}; chance {ncc.expected_by_chance:.2g}, p {ncc.p_value:.2g})",
            "one-to-one matches with a score above the 99% chance level of held-out samples",
        )
        for name, scores in scores_by_name
        if scores is not None and (ncc := scores.metrics["ncc"]).recovered is not None
    )


def score_lines(scored: Rankings) -> tuple[str, ...]:
    """Return a line of text for each attack: how many samples it recovers, and how many chance recovers."""
    return tuple(f"{name}: {value}" for name, value, _ in _scores(scored))


def _items(done: Sweep) -> list[Item]:
    """Return the pictures of the report: one for each sample that several runs reconstructed."""
    if done.reconstruction is None or done.reconstruction.selection is None:
        return []
    groups, mean = done.reconstruction.selection, done.task.knowledge.mean
    group_indices = (groups.support > 1).nonzero().flatten()[:MAX_CARDS].tolist()
    return [
        Item(
            number=rank,
            reconstruction=add_mean(groups.x[i], mean).numpy(),
            label=f"label {groups.labels[i].item():g}",
            confidence=groups.confidence_of(i),
            support=int(groups.support[i]),
            restarts=done.pool.runs,
        )
        for rank, i in enumerate(group_indices, 1)
    ]
