"""Both rankings side by side: the one by weights alone, fixed before, and the one by the data.

Nothing here can change the order of trials: it reads a finished sweep and the secret data, and says
what choosing without the data has lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residuum.evaluation import score
from residuum.evaluation.scoring import CandidatePool, selected_pool, whole_pool
from residuum.records import Dataset, Scores
from residuum.sweeping.run import Sweep
from residuum.sweeping.study import SweepRun

SUBSETS = 200  # held-out subsets per trial, the least a control takes; the pooled result gets 500
TOP = 5


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
        """Spearman's, of low residual with many recovered; None where one of them is constant."""
        from scipy.stats import spearmanr

        residuals = [-row["residual"] for row in self.rows]
        counts = [row["recovered"] or 0 for row in self.rows]
        if len(set(residuals)) < 2 or len(set(counts)) < 2:
            return None
        value = float(spearmanr(residuals, counts).statistic)
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
    done: Sweep,
    out: Path,
    train: Dataset,
    holdout: Dataset | None,
    *,
    seed: int = 0,
    watch: Callable[[int, int], None] | None = None,
) -> Rankings:
    """Score every complete trial and the pooled result of a finished sweep."""
    assert done.found is not None
    folder, rows = SweepRun(out), []
    for place, trial in enumerate(done.order):
        found = folder.load(trial.number)
        if found is None:
            continue
        part = _score(whole_pool(found), train, holdout, seed, SUBSETS).metrics["ncc"]
        rows.append({
            "number": trial.number, "residual": trial.residual, "recovered": part.recovered,
            "expected_by_chance": part.expected_by_chance, "p_value": part.p_value,
            "threshold": part.threshold_null99, "top10": part.top10_mean,
        })  # fmt: skip
        if watch is not None:
            watch(place + 1, len(done.order))
    chosen = selected_pool(done.found)
    agreed = len(chosen.x) and bool((done.found.selection.support > 1).any())  # type: ignore[union-attr]
    return Rankings(
        tuple(rows), _score(whole_pool(done.found), train, holdout, seed, 500),
        _score(chosen, train, holdout, seed, 500) if agreed else None, len(train),
    )  # fmt: skip


def _score(
    pool: CandidatePool, train: Dataset, holdout: Dataset | None, seed: int, subsets: int
) -> Scores:
    return score(
        pool.x, train, holdout, candidate_labels=pool.labels, multipliers=pool.lam,
        metrics=["ncc"], seed=seed, subsets=subsets,
    )  # fmt: skip
