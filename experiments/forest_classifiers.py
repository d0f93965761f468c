"""How much of its training table does a classification forest reveal?

Run ``python -m experiments.forest_classifiers``.

Each case fits a default ``RandomForestClassifier`` to a table, writes it as a pickle, reads the pickle
without running its code, recovers the labels, and estimates the rows. The attacker knows the smallest and the
largest value of each column. The error of a cell is the distance to the training value, divided by the range
of the column.

Three baselines estimate the same table, and all of them need data that the attacker does not have:

- class median: the median of the column in the record's class,
- class draw: a value of the column, drawn among the records of the class,
- column draw: a value of the column, drawn among all records.

No cell is exact, because many tables fit the same forest. A cell is settled if the tables of the walk allow
values in an interval of at most 5% of the range of the column, or the same binary value.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import Case, run_cases
from experiments.private_tables import Table, make_table

FITS = 3
FIRST_SEED = 407779  # drawn after the settings were committed
NEAR = 0.05  # of the range of a column
SECONDS = 60.0  # time of the search for rows
# For each setting: table, number of records, number of trees, whether rows are estimated, and its bar.
SETTINGS: dict[str, dict[str, Any]] = {
    "binarized digits 100, 100 trees": {"table": "digits-binary", "n": 100, "bar": "error 0.05"},
    "binarized digits 100, 300 trees": {
        "table": "digits-binary", "n": 100, "trees": 300, "bar": "error 0.02",
    },
    "breast cancer 100": {"table": "cancer", "n": 100},
    "wine 100": {"table": "wine", "n": 100},
    "iris 100": {"table": "iris", "n": 100},
    "breast cancer 200, labels": {
        "table": "cancer", "n": 200, "rows": False, "bar": "all labels",
    },
    "breast cancer 250, 125 trees, labels": {
        "table": "cancer", "n": 250, "trees": 125, "rows": False, "bar": "all labels",
    },
    "iris 150, labels": {"table": "iris", "n": 150, "rows": False, "bar": "all labels"},
    "wine 178, labels": {"table": "wine", "n": 178, "rows": False, "bar": "all labels"},
    "breast cancer 300, labels": {"table": "cancer", "n": 300, "rows": False},
}  # fmt: skip


def cases() -> list[Case]:
    return [{"setting": name, "seed": FIRST_SEED + k} for name in SETTINGS for k in range(FITS)]


def measure(case: Case) -> Case:
    from sklearn.ensemble import RandomForestClassifier

    from residuum.io.forest_files import find_forests
    from residuum.io.release import open_release
    from residuum.trees.bootstrap import bootstrap_counts
    from residuum.trees.class_tables import recover_class_table
    from residuum.trees.labels import find_labels

    setting, seed = SETTINGS[case["setting"]], case["seed"]
    table = make_table(setting["table"], setting["n"], seed)
    classes, y = np.unique(table.y, return_inverse=True)
    model = RandomForestClassifier(setting.get("trees", 100), random_state=seed).fit(table.x, y)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forest.pkl"
        path.write_bytes(pickle.dumps(model))
        ((_, forest),) = find_forests(open_release(path).content)
    start = time.process_time()
    counts = bootstrap_counts(forest)
    assert counts is not None
    labels = find_labels(forest, counts)
    seconds_of_labels = time.process_time() - start
    result: Case = {
        "records": len(y),
        "columns": table.x.shape[1],
        "classes": len(classes),
        "labels": int((labels == y).sum()),
        "wrong_labels": int(((labels != y) & (labels >= 0)).sum()),
        "label_seconds": round(seconds_of_labels, 2),
        "nodes_per_cell": round(len(forest.structure.tree) / table.x.size, 3),
    }
    if not setting.get("rows", True) or (labels < 0).any():
        return result
    start, wall = time.process_time(), time.monotonic()
    rows = recover_class_table(forest, counts, labels, table.ranges, SECONDS, seed)
    result["row_seconds"] = round(time.process_time() - start, 1)
    result["row_wall_seconds"] = round(time.monotonic() - wall, 1)
    if rows is not None:
        result |= {"tables": rows.tables, **compare(rows, table)}
    result |= baselines(table, y, seed)
    return result


def compare(rows: Any, table: Table) -> Case:
    """Compare the estimates with the training table and, as a control, with held-out rows."""
    low, high = table.ranges
    width = high - low
    slack = 1e-6 * width
    settled = np.isclose(rows.low, rows.high) | (rows.high - rows.low <= NEAR * width)
    error = np.abs(rows.values - table.x) / width
    inside = (table.x >= rows.low - slack) & (table.x <= rows.high + slack)
    return {
        **errors("walk", rows.values, table),
        "settled": round(float(settled.mean()), 4),
        "settled_near": round(float((error[settled] <= NEAR).mean()), 4) if settled.any() else None,
        "intervals_hold": round(float(inside.mean()), 4),
        "whole_rows": int((error <= NEAR).all(1).sum()),
        "nearest_holdout": nearest_holdout(table),
    }


def nearest_holdout(table: Table) -> float | None:
    """Return the mean error of each training row's nearest held-out row, None without held-out rows."""
    if not len(table.holdout):
        return None
    low, high = table.ranges
    distance = np.abs(table.x[:, None] - table.holdout[None]) / (high - low)
    return round(float(distance.mean(2).min(1).mean()), 5)


def baselines(table: Table, y: np.ndarray, seed: int) -> Case:
    """Return the errors of the three baselines."""
    rng = np.random.default_rng([seed, 17])
    median, class_draw, column_draw = (np.empty_like(table.x) for _ in range(3))
    for f in range(table.x.shape[1]):
        column_draw[:, f] = rng.choice(table.x[:, f], len(y))
        for k in np.unique(y):
            members = y == k
            median[members, f] = np.median(table.x[members, f])
            class_draw[members, f] = rng.choice(table.x[members, f], members.sum())
    return {
        **errors("class_median", median, table),
        **errors("class_draw", class_draw, table),
        **errors("column_draw", column_draw, table),
    }


def errors(name: str, values: np.ndarray, table: Table) -> Case:
    """Return the mean error of estimates, and the share of cells within 5% of the range."""
    low, high = table.ranges
    error = np.abs(values - table.x) / (high - low)
    return {
        f"{name}_error": round(float(error.mean()), 5),
        f"{name}_near": round(float((error <= NEAR).mean()), 4),
    }


def summarize(rows: list[Case]) -> str:
    lines = [
        "setting | labels (wrong) | s | error: walk | class median | class draw | column draw | "
        "within 5%: walk | class median | class draw | column draw | settled (within 5%) | tables | s | bar"
    ]
    columns = [
        "{labels}/{records} ({wrong_labels})", "{label_seconds}", "{walk_error:.4f}",
        "{class_median_error:.4f}", "{class_draw_error:.4f}", "{column_draw_error:.4f}",
        "{walk_near:.1%}", "{class_median_near:.1%}", "{class_draw_near:.1%}", "{column_draw_near:.1%}",
        "{settled:.1%} ({settled_near})", "{tables}", "{row_wall_seconds}",
    ]  # fmt: skip
    for name in SETTINGS:
        fits = [row for row in rows if row["case"]["setting"] == name]
        if fits:
            texts = [" ".join(_filled(column, fit) for fit in fits) for column in columns]
            lines.append(" | ".join([name, *texts]) + f" | {SETTINGS[name].get('bar', '')}")
    return "\n".join(lines)


def _filled(column: str, fit: Case) -> str:
    try:
        return column.format(**fit)
    except KeyError:
        return "-"


if __name__ == "__main__":
    run_cases("forest_classifiers", cases(), measure, summarize)
