"""How much of its training table does a regression forest reveal? ``python -m experiments.forest_tables``.

Each case fits a forest to a table, writes it as a pickle, reads the pickle without running its code, and
recovers the table. The attacker knows the smallest and the largest value of each column. A cell is right if
it is within 1e-5 of the range of its column, compared with the float32 value that the trees saw.

A file without seeds has no row order. A recovered row is then compared with a training row of the same
target, namely the row with which it agrees in most columns. Each training row is used once.

Two controls use held-out rows, which no tree saw: the number of held-out rows that equal a recovered row in
all columns, without duplicates of training rows, and the share of cells of a held-out row that equal the
nearest recovered row.
"""

from __future__ import annotations

import pickle
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import Case, run_cases
from experiments.private_tables import Table, make_table, with_missing

TOLERANCE = 1e-5  # of the range of a column
FITS = 3
FIRST_SEED = 86910
BARE = ("seed", "count", "weight", "impurity")
# For each setting: table, number of records, what changes the defaults of the model, and its bar.
SETTINGS: dict[str, dict[str, Any]] = {
    "diabetes": {"table": "diabetes", "n": 342, "bar": "rows 96%"},
    "diabetes, all 442": {"table": "diabetes", "n": 442, "bar": "rows 96%"},
    "friedman1, 500": {"table": "friedman1", "n": 500, "bar": "rows 96%"},
    "friedman1, 1000": {"table": "friedman1", "n": 1000, "bar": "rows 96%"},
    "friedman2, 500": {"table": "friedman2", "n": 500, "bar": "rows 96%"},
    "mixed, 500": {"table": "mixed", "n": 500, "bar": "rows 96%"},
    "regression 300 x 30": {"table": "regression", "n": 300, "bar": "cells 94%"},
    "breast cancer 469 x 29": {"table": "cancer-radius", "n": 469, "bar": "cells 65%"},
    "digits 300 x 63": {"table": "digits-sum", "n": 300, "bar": "cells 70%"},
    "bare, friedman1 500": {"table": "friedman1", "n": 500, "without": BARE, "bar": "rows 98%"},
    "bare, friedman1 1000": {"table": "friedman1", "n": 1000, "without": BARE, "bar": "rows 98%"},
    "bare, friedman2 500": {"table": "friedman2", "n": 500, "without": BARE, "bar": "rows 98%"},
    "bare, diabetes": {"table": "diabetes", "n": 342, "without": BARE, "bar": "rows 90%"},
    "bare, mixed, four decimals": {"table": "mixed-4", "n": 500, "without": BARE, "bar": "rows 94%"},
    "bare, breast cancer": {"table": "cancer-radius", "n": 469, "without": BARE},
    "no seeds, diabetes": {"table": "diabetes", "n": 342, "without": ("seed",)},
    "no seeds, mixed": {"table": "mixed", "n": 500, "without": ("seed",)},
    "30 trees, friedman1": {
        "table": "friedman1", "n": 500, "model": {"n_estimators": 30}, "bar": "cells 90%",
    },
    "30 trees, diabetes": {
        "table": "diabetes", "n": 342, "model": {"n_estimators": 30}, "bar": "cells 90%",
    },
    "5% missing": {"table": "friedman1", "n": 500, "missing": 0.05, "bar": "rows 97%"},
    "20% missing": {"table": "friedman1", "n": 500, "missing": 0.2, "bar": "rows 97%"},
    "max_depth=10": {
        "table": "friedman1", "n": 500, "model": {"max_depth": 10}, "bar": "cells 90%",
    },
    "extra trees": {
        "table": "friedman1", "n": 500, "kind": "ExtraTreesRegressor", "bar": "near 95%",
    },
    "extra trees, bootstrap": {
        "table": "friedman1", "n": 500, "kind": "ExtraTreesRegressor", "model": {"bootstrap": True},
        "bar": "near 95%",
    },
    "min_samples_leaf=2": {
        "table": "friedman1", "n": 500, "model": {"min_samples_leaf": 2},
        "bar": "targets 98%, cells 80%",
    },
    "min_samples_leaf=3, 250 trees": {
        "table": "friedman1", "n": 200, "model": {"min_samples_leaf": 3, "n_estimators": 250},
    },
    "500 trees, leaf 20, depth 4": {
        "table": "diabetes", "n": 442, "bar": "targets 100%",
        "model": {"n_estimators": 500, "min_samples_leaf": 20, "max_depth": 4},
    },
    "min_samples_leaf=5, 100 trees": {
        "table": "friedman1", "n": 500, "model": {"min_samples_leaf": 5}, "bar": "targets 0%",
    },
    "targets with 20 values": {"table": "friedman1", "n": 500, "levels": 20},
    "max_features=0.34": {"table": "friedman1", "n": 500, "model": {"max_features": 0.34}},
    "max_samples=0.5": {"table": "friedman1", "n": 500, "model": {"max_samples": 0.5}},
    "bootstrap=False, max_features=0.34": {
        "table": "friedman1", "n": 500, "model": {"bootstrap": False, "max_features": 0.34},
    },
    "bagging": {"table": "friedman1", "n": 500, "kind": "BaggingRegressor"},
    "sample weights": {"table": "friedman1", "n": 500, "weights": True},
    "two targets": {"table": "friedman1", "n": 500, "targets": 2},
    "duplicate rows": {"table": "friedman1", "n": 500, "duplicates": 0.1},
}  # fmt: skip
# Tables that were chosen after the algorithm was final: name and number of records.
FRESH = {
    "housing": 400,
    "swiss-roll": 400,
    "friedman3": 400,
    "wine-alcohol": 150,
    "cancer-area": 469,
}
FILES = {"": (), "no seeds, ": ("seed",), "bare, ": BARE}
SETTINGS |= {
    f"fresh: {prefix}{table}": {"table": table, "n": n, "without": fields}
    for table, n in FRESH.items()
    for prefix, fields in FILES.items()
}


def cases() -> list[Case]:
    return [{"setting": name, "seed": FIRST_SEED + k} for name in SETTINGS for k in range(FITS)]


def measure(case: Case) -> Case:
    from residuum.io.forest_files import find_forests
    from residuum.io.release import open_release
    from residuum.trees.recovery import recover_table

    setting, seed = SETTINGS[case["setting"]], case["seed"]
    table = draw_table(setting, seed)
    model = fit(setting, table, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forest.pkl"
        path.write_bytes(pickle.dumps(model))
        ((_, forest),) = find_forests(open_release(path).content)
    forest = forest.without(*setting.get("without", ()))
    if setting.get("without") == BARE:
        forest = forest.with_leaf_values_only()
    start = time.process_time()
    recovered = recover_table(forest, table.ranges)
    seconds = time.process_time() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {**compare(recovered, table), "cpu_seconds": round(seconds, 2), "gib": round(memory, 2)}


def draw_table(setting: dict[str, Any], seed: int) -> Table:
    table = make_table(setting["table"], setting["n"], seed)
    rng = np.random.default_rng([seed, 11])
    if "missing" in setting:
        table = with_missing(table, setting["missing"], seed)
    if "levels" in setting:
        edges = np.quantile(table.y, np.linspace(0, 1, setting["levels"] + 1)[1:-1])
        table = replace(table, y=np.digitize(table.y, edges).astype(float))
    if "duplicates" in setting:
        copies = rng.permutation(len(table.x))[: 2 * int(setting["duplicates"] * len(table.x))]
        x = table.x.copy()
        x[copies[::2]] = x[copies[1::2]]
        table = replace(table, x=x)
    if "targets" in setting:
        second = table.x @ rng.normal(size=table.x.shape[1]) + rng.normal(size=len(table.x))
        table = replace(table, y=np.stack([table.y, second], 1))
    return table


def fit(setting: dict[str, Any], table: Table, seed: int) -> Any:
    from sklearn import ensemble

    kind = getattr(ensemble, setting.get("kind", "RandomForestRegressor"))
    options = {"n_estimators": 100, **setting.get("model", {})}
    weights = {}
    if setting.get("weights"):
        rng = np.random.default_rng([seed, 13])
        weights = {"sample_weight": rng.random(len(table.y)) + 0.5}
    return kind(**options, random_state=seed).fit(table.x, table.y, **weights)


def compare(recovered: Any, table: Table) -> Case:
    """Compare a recovered table with the training table and the held-out rows.

    Args:
        recovered: The recovered table.
        table: The training table.

    Returns:
        Counts and shares of right targets, rows and cells.
    """
    y = table.y if table.y.ndim == 1 else table.y[:, 0]
    width = np.nanmax(table.x, 0) - np.nanmin(table.x, 0)
    order = row_order(recovered, table.x, y, width)
    is_matched = order >= 0
    x = np.full(recovered.low.shape, np.nan)
    x[is_matched] = table.x[order[is_matched]]
    error = np.abs(recovered.x - x) / width
    is_missing = np.isnan(x) & is_matched[:, None]
    stated = recovered.is_exact | recovered.is_likely
    is_right = (stated & (error <= TOLERANCE)) | (recovered.is_missing & is_missing)
    is_wrong = (stated & ~(error <= TOLERANCE)) | (recovered.is_missing & ~is_missing)
    misses = (recovered.low - x > TOLERANCE * width) | (x - recovered.high > TOLERANCE * width)
    n, cells = len(table.x), table.x.size
    whole_rows = is_right.all(1)
    scale = np.ptp(y)
    return {
        "records": n,
        "columns": table.x.shape[1],
        "in_row_order": bool(recovered.has_row_order),
        "targets": int(
            (np.abs(recovered.y[is_matched] - y[order[is_matched]]) <= 1e-6 * scale).sum()
        ),
        "rows": int(whole_rows.sum()),
        "cells": round(float(is_right.sum() / cells), 5),
        "near_cells": round(float(((error <= 0.05) | (is_right & is_missing)).sum() / cells), 5),
        "false_exact": int((is_wrong & (recovered.is_exact | recovered.is_missing)).sum()),
        "false_likely": int((is_wrong & recovered.is_likely).sum()),
        "likely": int(recovered.is_likely.sum()),
        "missed_intervals": int((misses & is_matched[:, None] & ~stated).sum()),
        **held_out_matches(recovered, stated, table, width),
    }


def row_order(recovered: Any, x: np.ndarray, y: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Return the training row of each recovered row, -1 for none.

    Args:
        recovered: The recovered table.
        x: Training values.
        y: Targets.
        width: Range of each column.

    Returns:
        (recovered rows,) numbers of training rows.
    """
    if recovered.has_row_order:
        return np.arange(len(recovered.y))
    stated = recovered.is_exact | recovered.is_likely
    pairs = []
    for i, target in enumerate(recovered.y):
        for row in np.flatnonzero(np.abs(y - target) <= 1e-9 * max(1.0, np.abs(y).max())):
            agrees = stated[i] & (np.abs(recovered.x[i] - x[row]) <= TOLERANCE * width)
            pairs.append((-int(agrees.sum()), i, int(row)))
    order = np.full(len(recovered.y), -1)
    used: set[int] = set()
    for _, i, row in sorted(pairs):
        if order[i] < 0 and row not in used:
            order[i] = row
            used.add(row)
    return order


def held_out_matches(
    recovered: Any, stated: np.ndarray, table: Table, width: np.ndarray
) -> dict[str, float]:
    """Return how many held-out rows and cells match recovered rows.

    Args:
        recovered: The recovered table.
        stated: Whether the recovered table states the value of a cell.
        table: The training table with the held-out rows.
        width: Range of each column.

    Returns:
        Number of held-out rows that match in all columns, and the largest share of matching cells of a
        held-out row with one recovered row, averaged over the held-out rows.
    """
    rows, shares = 0, []
    for row in table.holdout if len(stated) else ():
        agrees = stated & (np.abs(recovered.x - row) <= TOLERANCE * width)
        is_duplicate = (np.abs(table.x - row) <= TOLERANCE * width).all(1).any()
        rows += bool(agrees.all(1).any()) and not is_duplicate
        distance = np.nan_to_num(np.abs(recovered.x - row) / width, nan=1.0).mean(1)
        shares.append(float(agrees[distance.argmin()].mean()))
    return {
        "held_out_rows": int(rows),
        "held_out": len(table.holdout),
        "held_out_cells": round(float(np.mean(shares)) if shares else 0.0, 5),
    }


def summarize(rows: list[Case]) -> str:
    lines = [
        "setting | targets | rows | cells % | within 5% | false exact | likely, wrong | missed intervals | "
        "held-out rows | held-out cells % | s | GiB"
    ]
    for name in SETTINGS:
        fits = [row for row in rows if row["case"]["setting"] == name]
        if fits:
            columns = [
                "{targets}/{records}", "{rows}", "{cells:.1%}", "{near_cells:.1%}", "{false_exact}",
                "{likely}, {false_likely}", "{missed_intervals}", "{held_out_rows}/{held_out}",
                "{held_out_cells:.1%}", "{cpu_seconds}", "{gib}",
            ]  # fmt: skip
            texts = [" ".join(column.format(**fit) for fit in fits) for column in columns]
            lines.append(" | ".join([name, *texts]) + f" | {SETTINGS[name].get('bar', '')}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_cases("forest_tables", cases(), measure, summarize)
