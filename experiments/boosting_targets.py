"""What do boosted trees reveal about their training table? ``python -m experiments.boosting_targets``.

Each case fits boosted trees with squared error and the default settings of a library, apart from the number
of trees.

Targets: an attacker knows rows and computes their targets from the leaf values. A target is right if it is
within 1e-5 of the range of the targets. Predictions for the same rows are the baseline: they need no attack.
Five attackers are compared, who know

- all training rows,
- a random 90% of them,
- all of them, mixed with the held-out rows,
- the held-out rows only (negative control),
- all training rows with every column shuffled (negative control).

Stored values: a threshold is a data value if it equals a float32 value of its column. It is the midpoint of
two neighbors or of two arbitrary values up to float32 rounding. Held-out rows give the chance level. Data
values are also counted for as many training rows as there are held-out rows. The edges of the histogram bins
of HistGradientBoosting give all distinct values of a column to an attacker who knows the smallest and the
largest one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.common import Case, run_cases
from experiments.live_boosting import describe
from experiments.private_tables import Table, make_table

TOLERANCE = 1e-5  # of the range of the targets
ROUNDING = 2e-7  # of the largest absolute value of a column, for midpoints
DRAWS = 3
FIRST_SEED = 457411
LIBRARIES = ("GradientBoosting", "HistGradientBoosting", "XGBoost", "LightGBM")
TABLES = {"diabetes, all 442": ("diabetes", 442), "diabetes": ("diabetes", 342),
          "friedman1": ("friedman1", 400)}  # fmt: skip
TREES = (500, 100)


def cases() -> list[Case]:
    return [
        {"library": library, "table": table, "trees": trees, "seed": FIRST_SEED + k}
        for trees in TREES
        for table in TABLES
        for library in LIBRARIES
        for k in range(DRAWS)
    ]


def fit(library: str, trees: int, x: np.ndarray, y: np.ndarray, seed: int) -> Any:
    from sklearn import ensemble

    if library == "GradientBoosting":
        model: Any = ensemble.GradientBoostingRegressor(n_estimators=trees, random_state=seed)
    elif library == "HistGradientBoosting":
        model = ensemble.HistGradientBoostingRegressor(max_iter=trees, random_state=seed)
    elif library == "XGBoost":
        from xgboost import XGBRegressor

        model = XGBRegressor(n_estimators=trees, random_state=seed, n_jobs=1)
    else:
        from lightgbm import LGBMRegressor

        model = LGBMRegressor(n_estimators=trees, random_state=seed, n_jobs=1, verbose=-1)
    return model.fit(x, y)


def measure(case: Case) -> Case:
    table = make_table(*TABLES[case["table"]], case["seed"])
    forest = describe(fit(case["library"], case["trees"], table.x, table.y, case["seed"]))
    rng = np.random.default_rng([case["seed"], 17])
    return {
        "records": len(table.x),
        "held_out": len(table.holdout),
        **targets(forest, table, rng),
        **stored(forest, table, rng),
    }


def targets(forest: Any, table: Table, rng: np.random.Generator) -> Case:
    from residuum.trees.boosting import recover_targets
    from residuum.trees.predict import predict

    x, y = table.x, table.y
    tolerance = TOLERANCE * np.ptp(y)
    solved = recover_targets(forest, x)
    is_right = np.abs(solved.y - y) <= tolerance
    prediction = predict(forest, x)[:, 0]
    row = {
        "targets": int((solved.is_determined & is_right).sum()),
        "false_targets": int((solved.is_determined & ~is_right).sum()),
        "right_but_not_stated": int((~solved.is_determined & is_right).sum()),
        "largest_error": float(np.abs(solved.y - y)[solved.is_determined].max(initial=0.0)),
        "correlation": float(np.corrcoef(solved.y, y)[0, 1]),
        "rank": solved.rank,
        "equations": solved.equations,
        "learning_rate": solved.learning_rate,
        "regularization": solved.regularization,
        "predictions_right": int((np.abs(prediction - y) <= tolerance).sum()),
        "prediction_correlation": float(np.corrcoef(prediction, y)[0, 1]),
    }
    known_rows = np.sort(rng.permutation(len(x))[: round(0.9 * len(x))])
    solved = recover_targets(forest, x[known_rows])
    is_right = np.abs(solved.y - y[known_rows]) <= tolerance
    row |= {
        "known_90": len(known_rows),
        "targets_90": int((solved.is_determined & is_right).sum()),
        "false_targets_90": int((solved.is_determined & ~is_right).sum()),
    }
    shuffled = np.stack([rng.permutation(column) for column in x.T], 1)
    row["targets_shuffled"] = int(recover_targets(forest, shuffled).is_determined.sum())
    if len(table.holdout):
        held_out = recover_targets(forest, table.holdout)
        mixed = recover_targets(forest, np.concatenate([x, table.holdout]))
        members = mixed.is_determined[: len(x)]
        is_right = np.abs(mixed.y[: len(x)] - y) <= tolerance
        row |= {
            "targets_held_out": int(held_out.is_determined.sum()),
            "targets_mixed": int((members & is_right).sum()),
            "false_targets_mixed": int((members & ~is_right).sum()),
            "held_out_determined_mixed": int(mixed.is_determined[len(x) :].sum()),
        }
    return row


def stored(forest: Any, table: Table, rng: np.random.Generator) -> Case:
    from residuum.trees.predict import find_leaf_nodes
    from residuum.trees.stored_values import count_stored_values, find_stored_values

    x, held_out = table.x, table.holdout
    content = find_stored_values(forest)
    same_size = x[rng.permutation(len(x))[: len(held_out)]]
    row = {
        "distinct_values": sum(len(np.unique(column)) for column in x.T),
        "thresholds": content.threshold_count,
        "node_thresholds": sum(
            len(np.unique(forest.structure.threshold[forest.structure.feature == j]))
            for j in range(forest.columns)
        ),
        "data_values": data_values(content.thresholds, x),
        "data_values_same_size": data_values(content.thresholds, same_size),
        "data_values_held_out": data_values(content.thresholds, held_out),
        "neighbors": midpoints(content.thresholds, x, is_neighbor=True),
        "neighbors_held_out": midpoints(content.thresholds, held_out, is_neighbor=True),
        "midpoints": midpoints(content.thresholds, x, is_neighbor=False),
        "midpoints_same_size": midpoints(content.thresholds, same_size, is_neighbor=False),
        "midpoints_held_out": midpoints(content.thresholds, held_out, is_neighbor=False),
        "stored_per_record": float(count_stored_values(forest, x).mean()),
        "smallest_leaf": content.smallest_leaf,
        "right_ranges": int(
            (
                (np.float32(content.lowest) == np.float32(x.min(0)))
                & (np.float32(content.highest) == np.float32(x.max(0)))
            ).sum()
        ),
    }
    if len(held_out):
        row["stored_per_held_out"] = float(count_stored_values(forest, held_out).mean())
    tree = forest.trees[0]
    leaves = np.flatnonzero(tree.left < 0)
    node = find_leaf_nodes(tree, x, forest.is_strict)
    counts = np.bincount(node, minlength=len(tree.left))[leaves]
    sums = np.bincount(node, weights=table.y, minlength=len(tree.left))[leaves]
    is_right = np.abs(content.leaf_sums - sums) <= TOLERANCE * np.ptp(table.y) * counts
    return {
        **row,
        **bin_values(forest, x),
        "first_leaves": len(leaves),
        "right_counts": int((content.leaf_counts == counts).sum()),
        "right_sums": int(is_right.sum()),
        "single_leaves": int((counts == 1).sum()),
        "right_single_targets": int((is_right & (counts == 1)).sum()),
    }


def bin_values(forest: Any, x: np.ndarray) -> Case:
    """Return how many distinct values of columns follow from bin edges and ranges, and how many are false."""
    from residuum.trees.stored_values import values_between_edges

    right = false = 0
    for column, edges in zip(x.T, forest.bin_edges, strict=False):
        values = values_between_edges(edges, column.min(), column.max())
        if values is not None:
            is_right = np.isin(values.astype(np.float32), column.astype(np.float32))
            right, false = right + int(is_right.sum()), false + int((~is_right).sum())
    return {"bin_values": right, "false_bin_values": false}


def data_values(thresholds: tuple[np.ndarray, ...], x: np.ndarray) -> int:
    """Return how many thresholds are values of their column."""
    pairs = zip(thresholds, x.T, strict=True)
    return sum(int(np.isin(t.astype(np.float32), c.astype(np.float32)).sum()) for t, c in pairs)


def midpoints(thresholds: tuple[np.ndarray, ...], x: np.ndarray, is_neighbor: bool) -> int:
    """Return how many thresholds are the midpoint of two different values of their column."""
    total = 0
    for values, column in zip(thresholds, x.T, strict=True):
        distinct = np.unique(column)
        if len(distinct) < 2:
            continue
        if is_neighbor:
            middles = (distinct[1:] + distinct[:-1]) / 2
        else:
            a, b = np.triu_indices(len(distinct), 1)
            middles = np.sort((distinct[a] + distinct[b]) / 2)
        limit = ROUNDING * np.abs(column).max()
        first = np.searchsorted(middles, values - limit)
        total += int((np.searchsorted(middles, values + limit, side="right") > first).sum())
    return total


def summarize(rows: list[Case]) -> str:
    target_columns = [
        "{targets}/{records}", "{false_targets}", "{predictions_right}",
        "{prediction_correlation:.5f}", "{targets_90}/{known_90}", "{false_targets_90}",
        "{targets_mixed}, {held_out_determined_mixed}/{held_out}", "{targets_held_out}",
        "{targets_shuffled}", "{largest_error:.0e}",
    ]  # fmt: skip
    value_columns = [
        "{thresholds}/{distinct_values}", "{data_values}",
        "{data_values_same_size} {data_values_held_out}",
        "{bin_values}, {false_bin_values}", "{neighbors} {neighbors_held_out}",
        "{midpoints}", "{midpoints_same_size} {midpoints_held_out}",
        "{stored_per_record:.2f} {stored_per_held_out:.2f}",
        "{right_counts} {right_sums}/{first_leaves}", "{right_single_targets}/{single_leaves}",
        "{smallest_leaf}", "{right_ranges}",
    ]  # fmt: skip
    none = {"targets_mixed": "-", "held_out_determined_mixed": "-", "targets_held_out": "-",
            "stored_per_held_out": float("nan")}  # fmt: skip
    lines = []
    heads = (
        "targets | false | predictions right | prediction correlation | 90% of rows known | false | mixed: "
        "members, held-out | held-out rows only | shuffled columns | largest error",
        "thresholds/distinct values | data values | same-size training, held-out | values from bin edges, "
        "false | midpoints of neighbors: training, held-out | midpoints of two values | same-size training, "
        "held-out | stored values per record: training, held-out | first tree: counts, sums | single targets "
        "| smallest leaf | ranges",
    )
    for head, columns in zip(heads, (target_columns, value_columns), strict=True):
        lines.append("setting | " + head)
        for trees in TREES:
            for table in TABLES:
                for library in LIBRARIES:
                    setting = {"library": library, "table": table, "trees": trees}
                    fits = [none | r for r in rows if setting.items() <= r["case"].items()]
                    if not fits:
                        continue
                    texts = ["; ".join(column.format(**r) for r in fits) for column in columns]
                    lines.append(" | ".join([f"{table}, {library} {trees}", *texts]))
    return "\n".join(lines)


if __name__ == "__main__":
    run_cases("boosting_targets", cases(), measure, summarize)
