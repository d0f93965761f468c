"""What boosted trees reveal: targets of known rows, and values that the file stores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, make_friedman1
from sklearn.ensemble import GradientBoostingRegressor, HistGradientBoostingRegressor

from experiments.live_boosting import describe
from residuum.errors import InputError
from residuum.trees.boosting import recover_targets, why_not
from residuum.trees.forest import ISOLATION, Forest
from residuum.trees.stored_values import (
    count_stored_values,
    distinct_thresholds,
    find_stored_values,
    settings_of_inner_nodes,
    values_between_edges,
)

RECORDS, HELD_OUT = 150, 60
SETTINGS = {"gradient": {"max_depth": 5}, "histogram": {"min_samples_leaf": 10}}
LIBRARIES = ("gradient", "histogram", "xgboost", "lightgbm")


def make(library: str, trees: int, **options: Any) -> Any:
    if library == "gradient":
        return GradientBoostingRegressor(n_estimators=trees, random_state=0, **options)
    if library == "histogram":
        return HistGradientBoostingRegressor(max_iter=trees, **options)
    if library == "xgboost":
        xgboost = pytest.importorskip("xgboost")
        return xgboost.XGBRegressor(n_estimators=trees, n_jobs=1, **options)
    lightgbm = pytest.importorskip("lightgbm")
    return lightgbm.LGBMRegressor(n_estimators=trees, n_jobs=1, verbose=-1, **options)


def table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows and targets of training records, and rows of held-out records."""
    x, y = load_diabetes(return_X_y=True)
    x = x.astype(np.float32).astype(np.float64)
    return x[:RECORDS], y[:RECORDS], x[RECORDS : RECORDS + HELD_OUT]


def continuous(records: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = make_friedman1(records, n_features=5, noise=1.0, random_state=0)
    return x.astype(np.float32).astype(np.float64), y


def naive_leaf(tree: Any, row: np.ndarray) -> int:
    node = 0
    while tree.left[node] >= 0:
        is_left = row[tree.feature[node]] <= tree.threshold[node]
        node = int(tree.left[node] if is_left else tree.right[node])
    return node


def naive_equations(forest: Forest, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return A and b of the equations A y = b for lambda = 0, one row for each leaf, without any scaling."""
    assert forest.offset is not None
    assert forest.learning_rate is not None
    prediction = np.full(len(x), forest.offset[0])
    rows, sides = [], []
    for tree in forest.trees:
        leaf = np.array([naive_leaf(tree, row) for row in x])
        for node in set(leaf.tolist()):
            is_member = leaf == node
            rows.append(is_member.astype(float))
            mean_residual = tree.value[node, 0] / forest.learning_rate
            sides.append(is_member.sum() * mean_residual + prediction[is_member].sum())
        prediction += tree.value[leaf, 0]
    return np.array(rows), np.array(sides)


@pytest.mark.parametrize("trees", [8, 60])
def test_targets_equal_a_naive_dense_solution(trees: int) -> None:
    x, y, _ = table()
    x, y = x[:50], y[:50]
    forest = describe(make("gradient", trees, max_depth=2).fit(x, y))
    A, b = naive_equations(forest, x)
    assert np.allclose(A @ y, b, rtol=1e-9)
    _, singular, right = np.linalg.svd(A)
    rank = int((singular > 1e-9).sum())
    is_fixed = np.linalg.norm(right[rank:], axis=0) < 1e-6
    solved = recover_targets(forest, x, regularization=0.0)
    assert solved.rank == rank
    assert solved.equations == len(A)
    assert np.array_equal(solved.is_determined, is_fixed)
    naive = np.linalg.lstsq(A, b, rcond=None)[0]
    assert np.allclose(solved.y[is_fixed], naive[is_fixed], rtol=1e-9)
    assert np.allclose(solved.y[is_fixed], y[is_fixed], rtol=1e-9)
    assert is_fixed.all() == (trees == 60)


@pytest.mark.parametrize("library", LIBRARIES)
def test_known_rows_give_all_targets(library: str) -> None:
    x, y, held_out = table()
    forest = describe(make(library, 150, **SETTINGS.get(library, {})).fit(x, y))
    solved = recover_targets(forest, x)
    assert solved.is_determined.all()
    assert np.abs(solved.y - y).max() <= 1e-5 * np.ptp(y)
    assert solved.learning_rate == pytest.approx(0.3 if library == "xgboost" else 0.1, rel=1e-6)
    assert solved.regularization == pytest.approx(float(library == "xgboost"), abs=1e-5)
    assert "150 of 150 records" in solved.lines[0]
    rng = np.random.default_rng(0)
    shuffled = np.stack([rng.permutation(column) for column in x.T], 1)
    for wrong_rows in (held_out, shuffled, shuffled[:100]):
        assert not recover_targets(forest, wrong_rows).is_determined.any()


def test_iteration_finds_the_same_targets() -> None:
    x, y, held_out = table()
    x, y = x[:80], y[:80]
    for trees in (25, 50):
        forest = describe(make("gradient", trees).fit(x, y))
        solved, iterated = (recover_targets(forest, x, max_dense=limit) for limit in (80, 0))
        assert np.array_equal(iterated.is_determined, solved.is_determined)
        assert solved.is_determined.sum() > 0
        assert solved.is_determined.all() == (trees == 50)
        difference = np.abs(iterated.y - solved.y)[solved.is_determined]
        assert difference.max() <= 1e-6 * np.ptp(y)
        assert abs(iterated.rank - solved.rank) <= 8
        assert not recover_targets(forest, held_out, max_dense=0).is_determined.any()


def test_values_that_differ_in_float64_only_are_distinguished() -> None:
    x, y, _ = table()
    x = 1000 + 1e-5 * x
    forest = describe(make("histogram", 150, min_samples_leaf=10).fit(x, y))
    assert recover_targets(forest, x).is_determined.all()
    assert not recover_targets(forest, x.astype(np.float32)).is_determined.any()


def test_settings_that_a_file_does_not_state_are_computed() -> None:
    x, y, _ = table()
    model = make("xgboost", 100, learning_rate=0.05, reg_lambda=2.5).fit(x, y)
    forest = describe(model)
    solved = recover_targets(forest, x)
    assert solved.learning_rate == pytest.approx(0.05, rel=1e-5)
    assert solved.regularization == pytest.approx(2.5, rel=1e-5)
    assert np.abs(solved.y - y).max() <= 1e-5 * np.ptp(y)
    assert recover_targets(forest, x, regularization=2.5).is_determined.all()
    assert not recover_targets(forest, x, regularization=1.0).is_determined.any()
    assert not recover_targets(forest, x, learning_rate=0.3).is_determined.any()
    computed = settings_of_inner_nodes(forest)
    assert computed == pytest.approx((0.05, 2.5), rel=1e-4)
    without_inner = forest.with_leaf_values_only()
    assert settings_of_inner_nodes(without_inner) is None
    assert find_stored_values(without_inner).has_assumed_settings


def test_members_are_distinguished_from_held_out_rows() -> None:
    x, y, held_out = table()
    forest = describe(make("xgboost", 100).fit(x, y))
    solved = recover_targets(forest, np.concatenate([x, held_out]))
    members = solved.is_determined[:RECORDS]
    assert members.mean() > 0.9
    assert np.abs(solved.y[:RECORDS] - y)[members].max() <= 1e-5 * np.ptp(y)
    assert not solved.is_determined[RECORDS:].any()
    assert "left out" in solved.lines[1]
    some_rows = recover_targets(forest, x[15:])
    assert some_rows.is_determined.mean() > 0.9
    assert np.abs(some_rows.y - y[15:])[some_rows.is_determined].max() <= 1e-5 * np.ptp(y)


def test_leaves_whose_records_are_all_in_the_subsample_give_equations() -> None:
    x, y, held_out = table()
    forest = describe(make("gradient", 100, subsample=0.5).fit(x, y))
    solved = recover_targets(forest, x)
    assert 0 < solved.is_determined.sum() < len(y)
    assert np.allclose(solved.y[solved.is_determined], y[solved.is_determined], rtol=1e-9)
    assert not recover_targets(forest, held_out).is_determined.any()
    # A file without counts does not show which leaves these are, and the equations contradict each other.
    assert not recover_targets(forest.without("count", "weight"), x).is_determined.any()


def test_other_models_are_refused() -> None:
    x, y, _ = table()
    forest = describe(make("gradient", 5).fit(x, y))
    assert why_not(forest) == ""
    for other, text in (
        (replace(forest, kind=ISOLATION), "isolation"),
        (replace(forest, objective="huber"), "huber"),
        (replace(forest, is_classifier=True, objective=""), "classifier"),
        (replace(forest, outputs=np.arange(5)), "one output"),
        (replace(forest, has_sample_weights=True), "same weight"),
    ):
        with pytest.raises(InputError, match=text):
            recover_targets(other, x)
    for rows in (x[:, 1:], x[:0], x[0]):
        with pytest.raises(InputError, match="10 columns"):
            recover_targets(forest, rows)


def are_midpoints_of_neighbors(thresholds: np.ndarray, column: np.ndarray) -> bool:
    distinct = np.unique(column)
    middles = (distinct[1:] + distinct[:-1]) / 2
    return bool((np.abs(thresholds[:, None] - middles).min(1) <= 1e-12).all())


def test_thresholds_of_xgboost_are_data_values_and_others_are_midpoints() -> None:
    x, y = continuous(300)
    x, y, held_out = x[:200], y[:200], x[200:]
    for library in LIBRARIES:
        forest = describe(make(library, 30).fit(x, y))
        thresholds = distinct_thresholds(forest)
        are_values = all(np.isin(t, c).all() for t, c in zip(thresholds, x.T, strict=True))
        are_values_of_others = any(
            np.isin(t, c).any() for t, c in zip(thresholds, held_out.T, strict=True)
        )
        assert are_values == (library == "xgboost")
        assert not are_values_of_others
        stored = find_stored_values(forest)
        assert stored.holds_values.all() == stored.holds_values.any() == are_values
        if library in ("histogram", "lightgbm"):
            columns = zip(thresholds, x.T, strict=True)
            assert all(are_midpoints_of_neighbors(t, c) for t, c in columns)


def test_stored_values_of_records_are_counted() -> None:
    x, y = continuous(300)
    x, y, held_out = x[:200], y[:200], x[200:]
    forest = describe(make("xgboost", 30).fit(x, y))
    counts = count_stored_values(forest, x)
    thresholds = distinct_thresholds(forest)
    naive = [sum(row[j] in thresholds[j].tolist() for j in range(5)) for row in x]
    assert counts.tolist() == naive
    assert counts.mean() > 1
    assert count_stored_values(forest, held_out).sum() == 0
    forest = describe(make("lightgbm", 5).fit(x, y))
    assert count_stored_values(forest, x).sum() == 2 * 5  # the ends of five columns


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_first_tree_stores_counts_and_sums_of_targets(library: str) -> None:
    x, y, _ = table()
    options = {"l2_regularization": 3.0} if library == "histogram" else {}
    forest = describe(make(library, 30, **options).fit(x, y))
    stored = find_stored_values(forest)
    tree = forest.trees[0]
    goes_left = np.less if forest.is_strict else np.less_equal
    node = np.zeros(len(x), dtype=int)
    for record, row in enumerate(x):
        while tree.left[node[record]] >= 0:
            k = node[record]
            is_left = goes_left(row[tree.feature[k]], tree.threshold[k])
            node[record] = tree.left[k] if is_left else tree.right[k]
    leaves = np.flatnonzero(tree.left < 0)
    assert stored.leaf_counts.tolist() == [int((node == leaf).sum()) for leaf in leaves]
    sums = [y[node == leaf].sum() for leaf in leaves]
    assert np.allclose(stored.leaf_sums, sums, rtol=1e-5)
    assert not stored.has_assumed_settings or library == "lightgbm"
    assert len(stored.targets) == (stored.leaf_counts == 1).sum()
    if library == "xgboost":
        assert len(stored.targets) > 0
        assert np.isin(stored.targets.round(2), y).all()
        wrong = find_stored_values(forest, regularization=0.0)
        assert not np.isin(wrong.targets.round(2), y).any()
    if library == "lightgbm":
        assert np.allclose(stored.lowest, x.min(0), rtol=1e-12)
        assert np.allclose(stored.highest, x.max(0), rtol=1e-12)
    assert any("first tree" in line for line in stored.lines)
    other_loss = find_stored_values(replace(forest, objective="huber"))
    assert len(other_loss.leaf_sums) == 0
    assert other_loss.threshold_count == stored.threshold_count


def test_bin_edges_give_all_distinct_values() -> None:
    x, y, _ = table()
    forest = describe(make("histogram", 2).fit(x, y))
    (line,) = find_stored_values(forest).lines[:1]
    assert line.endswith(
        "Each threshold is a value or the midpoint of two values of the training table."
    )
    for column, edges in zip(x.T, forest.bin_edges, strict=True):
        low, high = column.min(), column.max()
        values = values_between_edges(edges, low, high)
        assert values is not None
        assert np.allclose(values, np.unique(column), rtol=0, atol=1e-12)
        if len(edges) > 2:
            assert values_between_edges(edges[1:], low, high) is None
            assert values_between_edges(edges, low - 1e-3, high) is None
            assert values_between_edges(edges, low, high + 1e-3) is None


def test_bin_edges_of_columns_with_many_values_are_data_values() -> None:
    x, y = continuous(401)
    forest = describe(make("histogram", 2).fit(x, y))
    stored = find_stored_values(forest)
    assert stored.holds_values.all()
    assert "about 1,270 values of 5 columns" in stored.lines[0]
    assert all(np.isin(t, c).all() for t, c in zip(stored.thresholds, x.T, strict=True))
    assert count_stored_values(forest, x).mean() > 3
    assert values_between_edges(forest.bin_edges[0], x[:, 0].min(), x[:, 0].max()) is None
