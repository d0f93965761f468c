"""Which changes of a forest protect its training table? ``python -m experiments.forest_defenses``.

Each case trains a forest on 500 rows of Friedman-1 with a change, attacks it, and counts targets and cells of
the training table. The attacker knows the ranges of the columns, and knows of the change:

- removed or overwritten fields: the attack compares what remains with itself, and uses other fields
- rounded thresholds: the attacker uses boxes instead of equations
- noise on leaf values: the attacker compares the noisy values of all trees with the draws of each record

The last line shows what chance gives: the share of cells within 5% of the range if every cell is guessed as
the middle of its column, and the number of targets within 2% of their standard deviation if every target is
guessed as the target of a random record.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import Case, run_cases
from experiments.forest_tables import TOLERANCE, row_order
from experiments.private_tables import make_table

RECORDS, FITS = 500, 3
FIRST_SEED = 332463
NOISE = 0.01  # standard deviation of the noise on leaf values, as a share of that of the targets
DECIMALS = 3  # decimals of rounded thresholds, in columns from 0 to 1
NEAR_TARGET = (
    0.02  # a target counts as near within this share of the standard deviation of the targets
)
# For each defense: settings of the model, and the change of its file.
DEFENSES: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, ""),
    "seeds removed": ({}, "seeds"),
    "seeds, counts, impurities and inner values removed": ({}, "bare"),
    "the same fields overwritten by zeros": ({}, "zeros"),
    "wrong seeds": ({}, "wrong seeds"),
    "max_features=0.34": ({"max_features": 0.34}, ""),
    "max_samples=0.5": ({"max_samples": 0.5}, ""),
    "max_depth=10": ({"max_depth": 10}, ""),
    "max_depth=6": ({"max_depth": 6}, ""),
    "10 trees": ({"n_estimators": 10}, ""),
    "min_samples_leaf=2": ({"min_samples_leaf": 2}, ""),
    "min_samples_leaf=3": ({"min_samples_leaf": 3}, ""),
    "min_samples_leaf=5": ({"min_samples_leaf": 5}, ""),
    "min_samples_leaf=5, 600 trees": ({"min_samples_leaf": 5, "n_estimators": 600}, ""),
    "min_samples_leaf=5, 600 trees, seeds removed": (
        {"min_samples_leaf": 5, "n_estimators": 600},
        "bare",
    ),
    "min_samples_leaf=5, fields removed": ({"min_samples_leaf": 5}, "bare"),
    "thresholds with three decimals": ({}, "thresholds"),
    "leaf values rounded to integers": ({}, "integers"),
    "leaf values with 1% noise": ({}, "noise"),
    "leaf values with 1% noise, seeds removed": ({}, "noise, no seeds"),
}


def cases() -> list[Case]:
    return [
        {"defense": name, "seed": FIRST_SEED + number}
        for name in DEFENSES
        for number in range(FITS)
    ]


def measure(case: Case) -> Case:
    from sklearn.ensemble import RandomForestRegressor

    from residuum.trees.recovery import recover_table

    settings, change = DEFENSES[case["defense"]]
    table = make_table("friedman1", RECORDS, case["seed"])
    model = RandomForestRegressor(random_state=case["seed"], **settings).fit(table.x, table.y)
    r2 = float(model.score(table.holdout, table.holdout_y))
    rng = np.random.default_rng([case["seed"], 23])
    forest = released(model, change, float(table.y.std()), rng)
    scale = float(table.y.std())
    if "noise" in change:
        targets = targets_from_noisy_leaves(forest, NOISE * scale)
        result = {"targets": 0, "cells": 0.0, "near_cells": 0.0}
        ordered = table.y
    else:
        recovered = recover_table(forest, table.ranges)
        width = np.ptp(table.x, 0)
        order = row_order(recovered, table.x, table.y, width)
        matched = order >= 0
        error = np.abs(recovered.x[matched] - table.x[order[matched]]) / width
        stated = (recovered.is_exact | recovered.is_likely)[matched]
        targets, ordered = recovered.y[matched], table.y[order[matched]]
        result = {
            "targets": int((np.abs(targets - ordered) <= 1e-6 * np.ptp(table.y)).sum()),
            "cells": round(float((stated & (error <= TOLERANCE)).sum() / table.x.size), 4),
            "near_cells": round(float((error <= 0.05).sum() / table.x.size), 4),
        }
    is_near = np.abs(targets - ordered) <= NEAR_TARGET * scale
    return {
        **result,
        "near_targets": int(is_near.sum()),
        "guessed_near_cells": round(guess_cells(table.x), 4),
        "guessed_near_targets": int(
            (np.abs(rng.permutation(table.y) - table.y) <= NEAR_TARGET * scale).sum()
        ),
        "r2": round(r2, 3),
    }


def released(model: Any, change: str, scale: float, rng: np.random.Generator) -> Any:
    """Return the forest as an attacker reads it from the changed file."""
    from residuum.io.forests import read_forests
    from residuum.io.release import open_release

    if change == "wrong seeds":
        for number, tree in enumerate(model.estimators_):
            tree.random_state = number
    if change == "zeros":
        overwrite_fields(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forest.pkl"
        path.write_bytes(pickle.dumps(model))
        forest = read_forests(open_release(path))[0].forest
    fields = ("seed", "count", "weight", "impurity")
    if change in ("seeds", "noise, no seeds"):
        return change_values(forest.without("seed"), change, scale, rng)
    if change == "bare":
        return forest.without(*fields).with_leaf_values_only()
    return change_values(forest, change, scale, rng)


def change_values(forest: Any, change: str, scale: float, rng: np.random.Generator) -> Any:
    """Return a forest with rounded thresholds, rounded leaf values or noisy leaf values."""
    changes: dict[str, Callable[[Any], Any]] = {
        "thresholds": lambda tree: replace(tree, threshold=np.round(tree.threshold, DECIMALS)),
        "integers": lambda tree: replace(tree, value=np.round(tree.value)),
        "noise": lambda tree: replace(
            tree, value=tree.value + rng.normal(0, NOISE * scale, tree.value.shape)
        ),
    }
    apply = changes.get(change.partition(",")[0])
    if apply is None:
        return forest
    forest = replace(forest, trees=tuple(apply(tree) for tree in forest.trees))
    return replace(forest, has_midpoints=False) if change == "thresholds" else forest


def overwrite_fields(model: Any) -> None:
    """Overwrite the fields that predictions do not need, as ``residuum strip`` advises."""
    for tree in model.estimators_:
        tree.random_state = None
        state = tree.tree_.__getstate__()
        for name in ("impurity", "n_node_samples", "weighted_n_node_samples"):
            state["nodes"][name] = 0
        state["values"][state["nodes"]["left_child"] != -1] = 0
        tree.tree_.__setstate__(state)


def targets_from_noisy_leaves(forest: Any, deviation: float) -> np.ndarray:
    """Estimate targets from leaf values with noise, by the draws of each record.

    Tree t puts record i, which it drew c times, into a leaf of weight c. So among the leaves of weight c of
    tree t, one has the target of record i plus noise. The estimate is the value with the largest likelihood
    over all trees.

    Args:
        forest: The forest.
        deviation: Standard deviation of the noise.

    Returns:
        (records,) targets, NaN without seeds.
    """
    from residuum.trees.bootstrap import bootstrap_counts
    from residuum.trees.forest import NO_CHILD

    counts = bootstrap_counts(forest)
    if counts is None:
        return np.full(RECORDS, np.nan)
    is_leaf = [tree.left == NO_CHILD for tree in forest.trees]
    values = [tree.value[leaf, 0] for tree, leaf in zip(forest.trees, is_leaf, strict=True)]
    everything = np.concatenate(values)
    grid = np.arange(everything.min(), everything.max(), deviation / 2)
    likelihood = np.zeros((counts.shape[1], len(grid)))
    for t, (tree, leaf) in enumerate(zip(forest.trees, is_leaf, strict=True)):
        weights = np.rint(tree.weight[leaf])
        for weight in np.unique(weights):
            centers = values[t][weights == weight]
            density = np.exp(-0.5 * ((grid - centers[:, None]) / deviation) ** 2).sum(0) + 1e-3
            likelihood[counts[t] == weight] += np.log(density / density.mean())
    return grid[likelihood.argmax(1)]


def guess_cells(x: np.ndarray) -> float:
    """Return the share of cells within 5% of the range if each is guessed as the middle of its column."""
    middle = (x.min(0) + x.max(0)) / 2
    return float((np.abs(x - middle) <= 0.05 * np.ptp(x, 0)).mean())


def summarize(rows: list[Case]) -> str:
    lines = [
        "defense | exact targets of 500 | targets within 2% of their deviation | exact cells % | cells "
        "within 5% of the range % | R2 on held-out rows"
    ]
    for name in DEFENSES:
        fits = [row for row in rows if row["case"]["defense"] == name]
        if fits:
            columns = ("{targets}", "{near_targets}", "{cells:.1%}", "{near_cells:.1%}", "{r2}")
            texts = [" ".join(column.format(**fit) for fit in fits) for column in columns]
            lines.append(" | ".join([name, *texts]))
    if rows:
        chance = [
            np.mean([row[key] for row in rows])
            for key in ("guessed_near_targets", "guessed_near_cells")
        ]
        lines.append(f"expected by chance | 0 | {chance[0]:.0f} | 0% | {chance[1]:.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_cases("forest_defenses", cases(), measure, summarize)
