"""Is a leak reported for a table that a forest never saw? ``python -m experiments.forest_level``.

40 forests are trained on a table each. Then the audit gets another table from the same source as the alleged
training table, with held-out rows from this source. The attacker knows the ranges of the columns of the given
table. The bar: no audit ends in exit code 1.

As a positive control, the same forests are audited with their own training tables.
"""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import Case, run_cases

FORESTS = 40
FIRST_SEED = 232228
# Source, number of training rows, class of the model, and its settings.
KINDS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("diabetes", 120, "RandomForestRegressor", {}),
    ("diabetes", 120, "RandomForestRegressor", {"n_estimators": 150, "min_samples_leaf": 20}),
    ("friedman1", 200, "RandomForestRegressor", {}),
    ("friedman1", 200, "RandomForestRegressor", {"min_samples_leaf": 5}),
    ("mixed", 200, "RandomForestRegressor", {}),
    ("mixed", 200, "ExtraTreesRegressor", {}),
    ("cancer", 120, "RandomForestClassifier", {}),
    ("cancer", 120, "RandomForestClassifier", {"n_estimators": 150, "max_depth": 3}),
)
PARTS = ("never seen", "own table")


def cases() -> list[Case]:
    return [
        {"part": name, "kind": number % len(KINDS), "seed": FIRST_SEED + number}
        for name in PARTS
        for number in range(FORESTS)
    ]


def measure(case: Case) -> Case:
    import torch
    from sklearn import ensemble

    import residuum as rs

    torch.set_num_threads(1)
    source, n, kind, settings = KINDS[case["kind"]]
    x, y = rows_of(source, 3 * n + 100, case["seed"])
    train, other = (x[:n], y[:n]), (x[n : 2 * n], y[n : 2 * n])
    holdout = (x[2 * n :], y[2 * n :])
    model = getattr(ensemble, kind)(random_state=case["seed"], **settings).fit(*train)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forest.pkl"
        path.write_bytes(pickle.dumps(model))
        result = rs.audit(
            path,
            data=other if case["part"] == "never seen" else train,
            holdout=holdout,
            knowledge={"column_ranges": "train"},
            seed=case["seed"],
        )
    return {
        "exit_code": result.exit_code,
        "grades": result.verdict.grades,
        "p_value": None if result.findings is None else result.findings.p_value,
        "target_p_value": None if result.targets is None else result.targets.p_value,
    }


def rows_of(source: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of a source in random order, with targets."""
    from experiments.private_tables import SOURCES

    rng = np.random.default_rng([seed, 17])
    x, y = SOURCES[source](count, rng)
    order = rng.permutation(len(x))[:count]
    x = np.asarray(x, dtype=np.float32).astype(np.float64)[order]
    return x, np.asarray(y, float if source != "cancer" else int)[order]


def summarize(rows: list[Case]) -> str:
    lines = ["part | kind | audits | exit 0, 1, 3"]
    for name in PARTS:
        for number, (source, _, kind, settings) in enumerate(KINDS):
            codes = [
                row["exit_code"]
                for row in rows
                if row["case"]["part"] == name and row["case"]["kind"] == number
            ]
            counts = ", ".join(str(codes.count(code)) for code in (0, 1, 3))
            lines.append(f"{name} | {source} {kind} {settings or ''} | {len(codes)} | {counts}")
        leaks = [r for r in rows if r["case"]["part"] == name and r["exit_code"] == 1]
        audits = [r for r in rows if r["case"]["part"] == name]
        lines.append(f"{name} | all | {len(audits)} | {len(leaks)} in exit 1")
    return "\n".join(lines)


if __name__ == "__main__":
    run_cases("forest_level", cases(), measure, summarize)
