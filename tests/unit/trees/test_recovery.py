"""The training table of a forest: exact if the file determines it, and nothing else is reported."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, make_friedman1
from sklearn.ensemble import ExtraTreesRegressor, RandomForestClassifier, RandomForestRegressor
from sklearn.tree import DecisionTreeRegressor

from residuum.errors import CheckpointError
from residuum.io.forest_files import find_forests
from residuum.io.release import open_release
from residuum.trees.bootstrap import bootstrap_counts
from residuum.trees.forest import Forest
from residuum.trees.labels import find_labels
from residuum.trees.midpoints import EquationGraph
from residuum.trees.predict import predict
from residuum.trees.recovery import RecoveredTable, recover_table
from residuum.trees.targets import find_cover

RECORDS, TREES = 120, 60


def friedman(records: int = RECORDS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x, y = make_friedman1(records, n_features=5, noise=1.0, random_state=seed)
    return x.astype(np.float32).astype(np.float64), y


def forest_of(model: Any, folder: Path) -> Forest:
    """The forest that a pickle of a fitted model holds."""
    path = folder / "forest.pkl"
    path.write_bytes(pickle.dumps(model))
    ((_, forest),) = find_forests(open_release(path).content)
    return forest


def ranges(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.nanmin(x, 0), np.nanmax(x, 0)


def matches(table: RecoveredTable, x: np.ndarray) -> np.ndarray:
    """(records, columns) whether an exact cell is that of the training table."""
    width = np.nanmax(x, 0) - np.nanmin(x, 0)
    return table.is_exact & (np.abs(table.x - x) <= 1e-5 * width)


def contains(table: RecoveredTable, x: np.ndarray) -> np.ndarray:
    slack = 1e-5 * (np.nanmax(x, 0) - np.nanmin(x, 0))
    return (table.low <= x + slack) & (table.high >= x - slack)


def test_seeds_give_the_bootstrap_samples(tmp_path: Path) -> None:
    x, y = friedman()
    for max_samples in (None, 0.4, 30):
        model = RandomForestRegressor(8, max_samples=max_samples, random_state=0).fit(x, y)
        counts = bootstrap_counts(forest_of(model, tmp_path))
        assert counts is not None
        for row, samples in zip(counts, model.estimators_samples_, strict=True):
            assert np.array_equal(row, np.bincount(samples, minlength=len(x)))


def test_sample_weights_change_the_bootstrap_samples(tmp_path: Path) -> None:
    x, y = friedman()
    weights = np.random.default_rng(0).random(len(x)) + 0.5
    model = RandomForestRegressor(8, random_state=0).fit(x, y, sample_weight=weights)
    assert bootstrap_counts(forest_of(model, tmp_path)) is None


def test_a_default_forest_gives_its_table_in_row_order(tmp_path: Path) -> None:
    x, y = friedman()
    model = RandomForestRegressor(TREES, random_state=0).fit(x, y)
    table = recover_table(forest_of(model, tmp_path), ranges(x))
    assert table.has_row_order
    assert np.allclose(table.y, y, rtol=1e-12)
    right = matches(table, x)
    assert right.mean() > 0.97
    assert right.sum() == table.is_exact.sum()
    assert contains(table, x).all()


def test_a_table_that_was_not_trained_on_does_not_match(tmp_path: Path) -> None:
    x, y = friedman()
    other, other_y = friedman(seed=1)
    table = recover_table(
        forest_of(RandomForestRegressor(TREES, random_state=0).fit(x, y), tmp_path), ranges(x)
    )
    assert matches(table, other).sum() == 0
    assert np.isclose(table.y, other_y, rtol=1e-9).sum() == 0


@pytest.mark.parametrize("has_counts", [True, False])
def test_without_seeds_the_records_come_in_another_order(has_counts: bool, tmp_path: Path) -> None:
    x, y = friedman()
    forest = forest_of(RandomForestRegressor(TREES, random_state=0).fit(x, y), tmp_path)
    if has_counts:
        table = recover_table(forest.without("seed"), ranges(x))
    else:
        bare = forest.without("seed", "count", "weight", "impurity").with_leaf_values_only()
        table = recover_table(bare, ranges(x))
    assert not table.has_row_order
    order = np.array([np.abs(y - target).argmin() for target in table.y])
    assert len(set(order)) == len(table.y) >= 0.95 * len(y)
    # Without counts, the number of records of a leaf value is an estimate, so no cell is exact.
    stated, other = (
        (table.is_exact, table.is_likely) if has_counts else (table.is_likely, table.is_exact)
    )
    assert not other.any()
    right = np.abs(table.x - x[order]) <= 1e-5 * np.ptp(x, 0)
    assert (stated & right).mean() > 0.95
    assert right[stated].all()


def test_equal_targets_and_repeated_values(tmp_path: Path) -> None:
    x, y = load_diabetes(return_X_y=True)
    x, y = x[:150].astype(np.float32).astype(np.float64), y[:150]
    table = recover_table(
        forest_of(RandomForestRegressor(100, random_state=0).fit(x, y), tmp_path), ranges(x)
    )
    assert len(set(y)) < len(y)
    assert np.array_equal(table.y, y)
    right = matches(table, x)
    assert right.mean() > 0.9
    assert right.sum() == table.is_exact.sum()


def test_missing_values_are_found(tmp_path: Path) -> None:
    x, y = friedman()
    x[np.random.default_rng(0).random(x.shape) < 0.1] = np.nan
    table = recover_table(
        forest_of(RandomForestRegressor(100, random_state=0).fit(x, y), tmp_path), ranges(x)
    )
    assert np.array_equal(table.is_missing, np.isnan(x))
    assert (matches(table, x) | table.is_missing).mean() > 0.97


def test_random_thresholds_give_intervals_and_no_exact_cell(tmp_path: Path) -> None:
    x, y = friedman()
    model = ExtraTreesRegressor(TREES, bootstrap=True, random_state=0).fit(x, y)
    table = recover_table(forest_of(model, tmp_path), ranges(x))
    assert not table.is_exact.any()
    assert contains(table, x).all()
    assert (np.abs(table.x - x) <= 0.1 * np.ptp(x, 0)).mean() > 0.9


def test_leaves_of_two_records_do_not_protect(tmp_path: Path) -> None:
    x, y = friedman()
    model = RandomForestRegressor(100, min_samples_leaf=2, random_state=0).fit(x, y)
    table = recover_table(forest_of(model, tmp_path), ranges(x))
    assert np.isclose(table.y, y, rtol=1e-6).mean() > 0.95
    right = matches(table, x)
    assert right.mean() > 0.6
    assert right.sum() == table.is_exact.sum()


def test_as_many_trees_as_records_give_all_targets_at_any_depth(tmp_path: Path) -> None:
    x, y = friedman(60)
    model = RandomForestRegressor(70, min_samples_leaf=20, max_depth=2, random_state=0).fit(x, y)
    forest = forest_of(model, tmp_path)
    assert np.allclose(recover_table(forest, ranges(x)).y, y, atol=1e-6)
    fewer = replace(forest, trees=forest.trees[:50])
    assert np.isnan(recover_table(fewer, ranges(x)).y).all()


def test_one_tree_gives_targets_and_intervals(tmp_path: Path) -> None:
    x, y = friedman()
    table = recover_table(forest_of(DecisionTreeRegressor(random_state=0).fit(x, y), tmp_path))
    assert np.array_equal(np.sort(table.y), np.sort(y))
    assert not table.is_exact.any()


@pytest.mark.parametrize(("records", "trees"), [(60, 70), (60, 40)])
def test_a_classifier_gives_all_labels(records: int, trees: int, tmp_path: Path) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))[:records]
    model = RandomForestClassifier(trees, random_state=0).fit(x[rows], y[rows])
    forest = forest_of(model, tmp_path)
    counts = bootstrap_counts(forest)
    assert counts is not None
    assert np.array_equal(find_labels(forest, counts), y[rows])
    few = replace(forest, trees=forest.trees[:10])
    counts = bootstrap_counts(few)
    assert counts is not None
    assert (find_labels(few, counts) == -1).all()


def covers_by_definition(counts: np.ndarray, weight: np.ndarray) -> list[tuple[int, ...]]:
    columns = range(counts.shape[1])
    subsets = itertools.chain.from_iterable(
        itertools.combinations(columns, size) for size in range(1, counts.shape[1] + 1)
    )
    return [subset for subset in subsets if (counts[:, subset].sum(1) == weight).all()]


def test_an_exact_cover_is_found_if_it_is_the_only_one() -> None:
    rng = np.random.default_rng(0)
    outcomes = set()
    for trees in (2, 3, 6):
        for _ in range(60):
            counts = rng.integers(0, 3, (trees, 8))
            weight = counts[:, rng.permutation(8)[: rng.integers(1, 5)]].sum(1)
            covers = covers_by_definition(counts, weight)
            cover = find_cover(counts, weight)
            nonzero = [c for c in covers if counts[:, c].any(0).all()]
            outcomes.add(len(covers) == 1)
            if counts.any(0).all():
                assert (cover is not None) == (len(nonzero) == 1)
            if cover is not None:
                assert (counts[:, cover].sum(1) == weight).all()
    assert outcomes == {True, False}


def test_the_graph_of_equations_agrees_with_linear_algebra() -> None:
    rng = np.random.default_rng(0)
    solved = 0
    for _ in range(40):
        records = 9
        x = rng.normal(size=records)
        pairs = {tuple(sorted(rng.permutation(records)[:2].tolist())) for _ in range(8)}
        edges = {(a, b): float(x[a] + x[b]) for a, b in pairs}
        graph = EquationGraph.build(edges, records)
        low, high = graph.odd_cycles()
        matrix = np.zeros((len(edges), records))
        for row, pair in enumerate(edges):
            matrix[row, list(pair)] = 1
        # A record is determined if its unit vector lies in the row space of the equations.
        projection = np.linalg.pinv(matrix) @ matrix
        determined = np.isclose(np.diag(projection), 1.0)[graph.records]
        is_odd = np.isfinite(low)[graph.component]
        assert np.array_equal(determined, is_odd)
        z = np.where(np.isfinite(low), low, 0.0)[graph.component]
        values = graph.sign * z + graph.constant
        assert np.allclose(values[is_odd], x[graph.records][is_odd])
        assert np.allclose(low[np.isfinite(low)], high[np.isfinite(low)])
        assert graph.even_cycles_agree(1e-9).all()
        solved += int(is_odd.sum())
    assert solved > 0


def test_equations_that_disagree_are_noticed() -> None:
    two_triangles = {(0, 1): 1.0, (1, 2): 2.0, (0, 2): 3.0, (0, 3): 4.0, (1, 3): 6.0}
    graph = EquationGraph.build(two_triangles, 4)
    low, high = graph.odd_cycles()
    assert high[0] - low[0] > 0.1 or not graph.even_cycles_agree(1e-9).all()
    square = {(0, 1): 1.0, (1, 2): 2.0, (2, 3): 3.0, (0, 3): 9.0}
    assert not EquationGraph.build(square, 4).even_cycles_agree(1e-9).any()


@pytest.mark.parametrize("damage", ["cycle", "column", "child", "nan"])
def test_a_damaged_tree_is_refused(damage: str, tmp_path: Path) -> None:
    x, y = friedman(20)
    model = RandomForestRegressor(2, random_state=0).fit(x, y)
    state = model.estimators_[0].tree_.__getstate__()
    nodes = state["nodes"]
    match damage:
        case "cycle":
            nodes["left_child"][1] = 1 if nodes["left_child"][1] != -1 else 2
            nodes["right_child"][0] = 0
        case "column":
            nodes["feature"][0] = 77
        case "child":
            nodes["right_child"][0] = 10_000
        case "nan":
            nodes["threshold"][0] = np.nan
    model.estimators_[0].tree_.__setstate__(state)
    with pytest.raises(CheckpointError, match="form one connected tree"):
        forest_of(model, tmp_path)


def stripped(model: Any) -> Any:
    """A forest whose seeds, counts, impurities and inner values were overwritten by zeros."""
    for tree in model.estimators_:
        tree.random_state = None
        state = tree.tree_.__getstate__()
        for name in ("impurity", "n_node_samples", "weighted_n_node_samples"):
            state["nodes"][name] = 0
        state["values"][state["nodes"]["left_child"] != -1] = 0
        tree.tree_.__setstate__(state)
    return model


def test_overwritten_fields_do_not_hide_the_table(tmp_path: Path) -> None:
    x, y = friedman()
    table = recover_table(
        forest_of(stripped(RandomForestRegressor(TREES, random_state=0).fit(x, y)), tmp_path),
        ranges(x),
    )
    assert np.isin(y, table.y).mean() > 0.95
    assert table.is_likely.mean() > 0.9
    assert not table.is_exact.any()


@pytest.mark.parametrize("depth", [None, 3])
def test_overwritten_seeds_give_no_wrong_target(depth: int | None, tmp_path: Path) -> None:
    x, y = friedman(60)
    model = RandomForestRegressor(70, max_depth=depth, random_state=0).fit(x, y)
    for number, tree in enumerate(model.estimators_):
        tree.random_state = number
    for has_counts in (True, False):
        forest = forest_of(model, tmp_path)
        table = recover_table(forest if has_counts else forest.without("count"), ranges(x))
        assert not table.has_row_order
        assert np.isin(table.y, y).all()
        assert (len(table.y) > 50) == (depth is None)


@pytest.mark.parametrize("classifier", [False, True])
def test_predictions_are_those_of_scikit_learn(classifier: bool, tmp_path: Path) -> None:
    x, y = friedman()
    x[np.random.default_rng(0).random(x.shape) < 0.1] = np.nan
    kind = RandomForestClassifier if classifier else RandomForestRegressor
    model = kind(10, random_state=0).fit(x[:80], (y > y.mean())[:80] if classifier else y[:80])
    expected = model.predict_proba(x) if classifier else model.predict(x)[:, None]
    assert np.allclose(predict(forest_of(model, tmp_path), x), expected)


def test_targets_far_from_zero_are_found_too(tmp_path: Path) -> None:
    """The impurity of a leaf with one record is not exactly zero if the targets are large."""
    x, y = friedman()
    y = np.round(y, 1) + 1000.7
    model = RandomForestRegressor(TREES, random_state=0).fit(x, y)
    leaf_impurities = [t.tree_.impurity[t.tree_.children_left == -1] for t in model.estimators_]
    assert max(impurity.max() for impurity in leaf_impurities) > 1e-12 * y.var()
    table = recover_table(forest_of(model, tmp_path), ranges(x))
    stated = ~np.isnan(table.y)
    assert stated.mean() > 0.9
    assert np.array_equal(table.y[stated], y[stated])
    assert matches(table, x).sum() == table.is_exact.sum()
