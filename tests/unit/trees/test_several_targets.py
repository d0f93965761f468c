"""All targets of a record are recovered from a regression forest with several targets."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import make_friedman1
from sklearn.ensemble import BaggingRegressor, RandomForestRegressor

from residuum.attacks.trees.forest import ForestAttack
from residuum.io.forests import read_forests
from residuum.io.release import open_release
from residuum.trees.forest import Forest
from residuum.trees.predict import predict
from residuum.trees.recovery import recover_table

RECORDS = 100


def table(records: int = RECORDS) -> tuple[np.ndarray, np.ndarray]:
    """Samples, and three targets of different scales. Many records have the same first target."""
    x, y = make_friedman1(records, n_features=5, noise=1.0, random_state=0)
    x = x.astype(np.float32).astype(np.float64)
    return x, np.stack([np.round(y), 1e4 * np.sin(y) + x[:, 0], 1e-3 * y], 1)


def write(model: Any, folder: Path) -> Path:
    path = folder / "model.pkl"
    path.write_bytes(pickle.dumps(model))
    return path


def forest_of(model: Any, folder: Path) -> Forest:
    (named,) = read_forests(open_release(write(model, folder)))
    return named.forest


@pytest.mark.parametrize("kind", [RandomForestRegressor, BaggingRegressor])
def test_all_targets_are_recovered_in_row_order(kind: Any, tmp_path: Path) -> None:
    x, y = table()
    assert len(np.unique(y[:, 0])) < RECORDS / 2
    model = kind(n_estimators=60, random_state=0).fit(x, y)
    forest = forest_of(model, tmp_path)
    assert np.allclose(predict(forest, x), model.predict(x))
    recovered = recover_table(forest, (x.min(0), x.max(0)))
    assert np.allclose(recovered.targets, y, rtol=1e-12)
    right = np.abs(recovered.x - x) <= 1e-5 * np.ptp(x, 0)
    assert recovered.is_exact.mean() > 0.95
    assert right[recovered.is_exact].all()
    attack = ForestAttack().run(write(model, tmp_path))
    assert attack.targets.shape == (RECORDS, 3)
    assert attack.known_targets == RECORDS


@pytest.mark.parametrize("is_bare", [False, True])
def test_without_seeds_all_targets_are_recovered(is_bare: bool, tmp_path: Path) -> None:
    x, y = table()
    forest = forest_of(RandomForestRegressor(60, random_state=0).fit(x, y), tmp_path)
    forest = forest.without("seed")
    if is_bare:
        forest = forest.without("weight", "count", "impurity").with_leaf_values_only()
    recovered = recover_table(forest, (x.min(0), x.max(0)))
    order = np.abs(y[:, 1] - recovered.targets[:, [1]]).argmin(1)
    assert len(set(order)) == len(order) >= 0.95 * RECORDS
    assert np.allclose(recovered.targets, y[order], rtol=1e-12)
    stated = recovered.is_exact | recovered.is_likely
    right = np.abs(recovered.x - x[order]) <= 1e-5 * np.ptp(x, 0)
    assert stated.mean() > 0.9
    assert right[stated].all()


def test_the_roots_determine_all_targets_at_any_depth(tmp_path: Path) -> None:
    x, y = table(50)
    for trees, is_determined in ((60, True), (40, False)):
        model = RandomForestRegressor(trees, min_samples_leaf=15, random_state=0).fit(x, y)
        recovered = recover_table(forest_of(model, tmp_path))
        if is_determined:
            assert np.allclose(recovered.targets, y, rtol=1e-6, atol=1e-9 * np.abs(y).max(0))
        else:
            assert np.isnan(recovered.targets).all()


def test_leaves_of_two_records_give_no_wrong_target(tmp_path: Path) -> None:
    x, y = table()
    model = RandomForestRegressor(60, min_samples_leaf=2, random_state=0).fit(x, y)
    recovered = recover_table(forest_of(model, tmp_path), (x.min(0), x.max(0)))
    is_known = ~np.isnan(recovered.targets).any(1)
    if recovered.has_row_order:
        assert np.allclose(recovered.targets[is_known], y[is_known], rtol=1e-6)
    assert not recovered.is_exact.any()
