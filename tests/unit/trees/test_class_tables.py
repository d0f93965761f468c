"""The rows of classification forests: every table of the walk fits, and no cell is exact."""

from __future__ import annotations

import itertools
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_iris
from sklearn.ensemble import RandomForestClassifier

from residuum.attacks.trees.forest import ForestAttack, recover_labels
from residuum.io.forests import NamedForest, read_forests
from residuum.io.release import open_release
from residuum.records import Knowledge
from residuum.trees.assignment import (
    UNPLACED,
    Choices,
    ClassLeaves,
    Effort,
    Segments,
    solve,
    to_intervals,
)
from residuum.trees.bootstrap import bootstrap_counts
from residuum.trees.class_tables import (
    MAX_ASSIGNMENTS,
    Scales,
    Walk,
    recover_class_table,
    why_no_rows,
)
from residuum.trees.forest import NO_CHILD, Forest
from residuum.trees.labels import Equations, find_labels

QUICK = Effort(seconds=10.0, work=10.0, seed=0)


def named_forest(model: Any, folder: Path) -> NamedForest:
    path = folder / "forest.pkl"
    path.write_bytes(pickle.dumps(model))
    (forest,) = read_forests(open_release(path))
    return forest


def counts_of(forest: Forest) -> np.ndarray:
    counts = bootstrap_counts(forest)
    assert counts is not None
    return counts


def tiny(folder: Path) -> tuple[Forest, np.ndarray, np.ndarray]:
    """A forest of three trees on six records, its values and its labels."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, 2)).astype(np.float32).astype(np.float64)
    y = np.array([0, 0, 0, 1, 1, 1])
    model = RandomForestClassifier(3, random_state=6).fit(x, y)
    return named_forest(model, folder).forest, x, y


def fits_by_definition(
    forest: Forest, counts: np.ndarray, x: np.ndarray, y: np.ndarray, members: np.ndarray
) -> bool:
    """Whether the leaves hold the stored weights of the members' classes, record by record and in float64."""
    for tree, draws in zip(forest.trees, counts, strict=True):
        assert tree.weight is not None
        assert tree.count is not None
        weight = np.zeros_like(tree.value)
        size = np.zeros(len(tree.left))
        for i in members:
            if draws[i]:
                node = 0
                while tree.left[node] != NO_CHILD:
                    goes_left = x[i, tree.feature[node]] <= tree.threshold[node]
                    node = tree.left[node] if goes_left else tree.right[node]
                weight[node, y[i]] += draws[i]
                size[node] += 1
        for node in np.flatnonzero(tree.left == NO_CHILD):
            stored = tree.value[node] / tree.value[node].sum() * tree.weight[node]
            classes = np.unique(y[members])
            if not np.allclose(weight[node, classes], stored[classes]):
                return False
            if len(members) == len(y) and size[node] != tree.count[node]:
                return False
            if len(members) < len(y) and size[node] not in (0, tree.count[node]):
                return False
    return True


def values_of(intervals: np.ndarray, thresholds: tuple[np.ndarray, ...]) -> np.ndarray:
    """A table with these intervals."""
    points = [np.concatenate([t, [t[-1] + 1]]) if len(t) else np.zeros(1) for t in thresholds]
    return np.stack([points[f][intervals[:, f]] for f in range(len(points))], 1)


def test_the_model_agrees_with_an_enumeration_of_all_tables(tmp_path: Path) -> None:
    forest, x, y = tiny(tmp_path)
    counts = counts_of(forest)
    leaves = ClassLeaves.build(forest, counts, y)
    assert leaves is not None
    truth = to_intervals(x, leaves.thresholds)
    assert leaves.fits(truth)
    assert len(leaves.groups) == 2
    members = leaves.groups[0]
    cells = [range(len(t) + 1) for t in leaves.thresholds]
    fitting, refused = [], 0
    for rows in itertools.product(itertools.product(*cells), repeat=len(members)):
        table = truth.copy()
        table[members] = np.array(rows)
        fits = fits_by_definition(forest, counts, values_of(table, leaves.thresholds), y, members)
        assert fits == leaves.fits(table)
        refused += not fits
        if fits:
            fitting.append(table[members])
    assert len(fitting) > 1
    assert refused > 0

    places = leaves.place(truth)
    choices = Choices.build(leaves, members, places)
    segments = Segments.build(choices, choices.cuts())
    rng = np.random.default_rng(0)
    solutions = set()
    for _ in range(25):
        costs = rng.integers(0, 50, len(segments.first)).astype(float)

        def total(table: np.ndarray, costs: np.ndarray = costs) -> float:
            value = table[segments.member, segments.column]
            return float(costs[(segments.first <= value) & (value <= segments.last)].sum())

        segment = solve(choices, segments, costs, QUICK)
        assert segment is not None
        table = truth.copy()
        table[members] = segments.first[segment]
        assert leaves.fits(table)
        assert costs[segment].sum() == total(table[members]) == min(map(total, fitting))
        solutions.add(table.tobytes())
    assert len(solutions) > 1


def test_a_forest_that_no_table_fits_is_refused(tmp_path: Path) -> None:
    forest, x, y = tiny(tmp_path)
    counts = counts_of(forest)
    leaves = ClassLeaves.build(forest, counts, y)
    assert leaves is not None
    assert recover_class_table(forest, counts, y, sweeps=2) is not None
    wrong = to_intervals(x, leaves.thresholds)[::-1]
    assert not leaves.fits(wrong)
    assert recover_class_table(forest, counts, 1 - y, sweeps=2) is None
    other_draws = counts[:, np.roll(np.arange(6), 1)]
    assert recover_class_table(forest, other_draws, y, sweeps=2) is None
    damaged = replace(forest.trees[0], value=np.full_like(forest.trees[0].value, np.nan))
    broken = replace(forest, trees=(damaged, *forest.trees[1:]))
    assert recover_class_table(broken, counts, y, sweeps=2) is None


@pytest.mark.parametrize("max_depth", [None, 2])
def test_all_tables_of_the_walk_fit(max_depth: int | None, tmp_path: Path) -> None:
    x, y = load_iris(return_X_y=True)
    rows = np.random.default_rng(0).permutation(150)[:24]
    x, y = x[rows].astype(np.float32).astype(np.float64), y[rows]
    model = RandomForestClassifier(8, max_depth=max_depth, random_state=0).fit(x, y)
    forest = named_forest(model, tmp_path).forest
    counts = counts_of(forest)
    leaves = ClassLeaves.build(forest, counts, y)
    assert leaves is not None
    assert len(leaves.groups) == (3 if max_depth is None else 1)
    scales = Scales.build(leaves.thresholds, None)
    deadline = time.monotonic() + 10
    walk = Walk.begin(leaves, scales, 0, deadline, lambda text: None)
    assert walk is not None
    assert (walk.places != UNPLACED).all()
    tables = [walk.intervals.copy()]
    for _ in range(3):
        for start in range(0, 24, 3):
            assert walk.place(np.arange(start, start + 3), deadline)
        tables.append(walk.intervals.copy())
    for table in tables:
        values = values_of(table, leaves.thresholds)
        assert fits_by_definition(forest, counts, values, y, np.arange(24))
    assert len({table.tobytes() for table in tables}) == len(tables)
    densities = np.zeros_like(walk.densities)
    for i, label in enumerate(y):
        densities[label] += walk.bumps[walk.bins[i]]
    assert np.allclose(densities, walk.densities)


def test_the_result_depends_on_the_seed_alone(tmp_path: Path) -> None:
    forest, _, y = tiny(tmp_path)
    counts = counts_of(forest)
    first, second, other = (
        recover_class_table(forest, counts, y, seconds=60, seed=seed, sweeps=8)
        for seed in (0, 0, 1)
    )
    assert first is not None
    assert second is not None
    assert other is not None
    assert first.tables == second.tables == 6
    assert np.array_equal(first.values, second.values)
    assert not np.array_equal(first.values, other.values)
    assert (first.low <= first.values).all()
    assert (first.high >= first.values).all()


def test_binary_rows_are_nearer_than_class_medians(tmp_path: Path) -> None:
    x, y = load_digits(n_class=3, return_X_y=True)
    x = (x[:30] > 8).astype(float)
    y = y[:30]
    x = x[:, np.ptp(x, 0) > 0]
    model = named_forest(RandomForestClassifier(200, random_state=0).fit(x, y), tmp_path)
    ends = torch.tensor(np.stack([x.min(0), x.max(0)]))
    lines: list[str] = []
    table = ForestAttack(seconds=2).run(model, Knowledge(column_ranges=ends), lines.append)
    assert table.values is not None
    values = table.estimate(ends[0], ends[1] - ends[0]).numpy()
    is_split = np.isin(np.arange(x.shape[1]), model.forest.structure.feature)
    assert set(np.unique(values[:, is_split])) == {0.0, 1.0}
    medians = np.stack([np.median(x[y == k], 0) for k in range(3)])[y]
    assert np.abs(values - x).mean() < 0.8 * np.abs(medians - x).mean()
    assert not table.is_exact.any()
    assert not table.is_likely.any()
    assert np.array_equal(table.targets[:, 0].numpy(), y)
    assert "Many tables fit the same forest" in table.notes[0]
    assert any("records fit" in line for line in lines)


def test_rows_that_are_not_searched_have_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, x, y = tiny(tmp_path)
    model = named_forest(RandomForestClassifier(8, random_state=0).fit(x, y), tmp_path)
    assert recover_labels(model, seconds=0.5).values is not None
    assert recover_labels(model, seconds=0).notes == ()
    few = NamedForest(model.name, replace(model.forest, trees=model.forest.trees[:1]))
    assert "does not determine all labels" in recover_labels(few).notes[0]
    many = np.zeros(MAX_ASSIGNMENTS, dtype=np.int64)
    assert f"has {8 * len(many)}" in why_no_rows(model.forest, many)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    table = recover_labels(model)
    assert table.values is None
    assert 'pip install ".[trees]"' in table.notes[0]
    assert table.known_targets == 6


def test_half_as_many_trees_as_records_determine_the_labels(tmp_path: Path) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    x, y = x[:60], y[:60]
    model = RandomForestClassifier(30, random_state=0, max_depth=1).fit(x, y)
    forest = named_forest(model, tmp_path).forest
    counts = counts_of(forest)
    assert np.array_equal(find_labels(forest, counts), y)
    few = replace(forest, trees=forest.trees[:20])
    assert (find_labels(few, counts_of(few)) == -1).all()


def test_labels_of_an_integer_program_are_accepted_only_if_no_others_agree() -> None:
    rng = np.random.default_rng(0)
    outcomes = set()
    for trees in (1, 2, 3, 5):
        counts = rng.integers(0, 3, (trees, 8))
        labels = rng.integers(0, 2, 8)
        totals = counts @ np.eye(2)[labels]
        agreeing = [
            candidate
            for candidate in itertools.product([0, 1], repeat=8)
            if np.array_equal(counts @ np.eye(2)[list(candidate)], totals)
        ]
        equations = Equations.build(counts.astype(float), totals)
        solution = equations.solve_integer_program(None)
        assert solution is not None
        assert tuple(solution) in agreeing
        assert equations.is_unique(solution) == (len(agreeing) == 1)
        outcomes.add(len(agreeing) == 1)
    assert outcomes == {True, False}
