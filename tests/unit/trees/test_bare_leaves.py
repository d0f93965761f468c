"""Without impurities, means of several targets are not taken for targets."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import make_friedman1
from sklearn.ensemble import RandomForestRegressor

from residuum.io.forests import read_forests
from residuum.io.release import open_release
from residuum.trees.forest import Forest
from residuum.trees.recovery import recover_table

RECORDS = 150


def bare_forest(folder: Path, has_counts: bool = False, **options: Any) -> tuple[Any, Any, Forest]:
    x, y = make_friedman1(RECORDS, n_features=5, noise=1.0, random_state=0)
    x = x.astype(np.float32).astype(np.float64)
    model = RandomForestRegressor(random_state=0, **options).fit(x, y)
    path = folder / "model.pkl"
    path.write_bytes(pickle.dumps(model))
    ((forest),) = (named.forest for named in read_forests(open_release(path)))
    forest = forest.without("seed", "impurity").with_leaf_values_only()
    return x, y, forest if has_counts else forest.without("weight", "count")


@pytest.mark.parametrize("has_counts", [False, True])
@pytest.mark.parametrize("trees", [3, 10, 60])
@pytest.mark.parametrize("leaf", [2, 3, 20])
def test_means_of_large_leaves_are_no_targets(
    leaf: int, trees: int, has_counts: bool, tmp_path: Path
) -> None:
    _, _, forest = bare_forest(
        tmp_path, has_counts, n_estimators=trees, min_samples_leaf=leaf, max_features=0.5
    )
    recovered = recover_table(forest)
    assert np.isnan(recovered.y).all()
    assert not (recovered.is_exact | recovered.is_likely).any()


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"n_estimators": 60}, 0.95),
        ({"n_estimators": 10}, 0.85),
        ({"n_estimators": 3}, 0.6),
        ({"n_estimators": 60, "max_samples": 0.5}, 0.95),
        ({"n_estimators": 60, "max_samples": 0.1}, 0.95),
        ({"n_estimators": 60, "max_depth": 8}, 0.5),
        ({"n_estimators": 60, "max_leaf_nodes": 30}, 0.0),
    ],
)
def test_pure_leaves_still_give_their_targets(
    options: dict[str, Any], share: float, tmp_path: Path
) -> None:
    _, y, forest = bare_forest(tmp_path, **options)
    recovered = recover_table(forest)
    right = np.isclose(recovered.y[:, None], y, rtol=1e-9).any(1)
    assert right.all()
    assert len(right) >= share * RECORDS
