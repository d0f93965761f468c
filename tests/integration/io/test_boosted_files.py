r"""Models of XGBoost, LightGBM and CatBoost: our predictions are those of the library.

CatBoost needs 280 MB and is no dependency. Its models in ``tests/data/catboost`` were written by version
1.2.10 with this script::

    import json
    from pathlib import Path

    import catboost
    import numpy as np

    folder = Path("tests/data/catboost")
    generator = np.random.default_rng(7)
    x = generator.normal(size=(80, 4)).astype(np.float32)
    x[:, 3] = generator.integers(0, 3, 80)
    y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 3]
    x[generator.random(x.shape) < 0.1] = np.nan
    classes = np.digitize(y, [-0.5, 0.5])
    rows = [[*row, c] for row, c in zip(x.tolist(), classes.tolist())]
    settings = {"iterations": 5, "depth": 3, "verbose": 0, "allow_writing_files": False}
    shape = {"grow_policy": "Lossguide", "max_leaves": 6, "min_data_in_leaf": 8}
    categories = {"cat_features": [4], "one_hot_max_size": 5}
    models = {
        "regression": catboost.CatBoostRegressor(**settings).fit(x, y),
        "binary": catboost.CatBoostClassifier(**settings, nan_mode="Max").fit(x, y > 0),
        "classes": catboost.CatBoostClassifier(**settings).fit(x, classes),
        "lossguide": catboost.CatBoostRegressor(**settings, **shape).fit(x, y),
        "categorical": catboost.CatBoostRegressor(**settings, **categories).fit(rows, y),
    }
    predictions = {"x": np.where(np.isnan(x), None, x.astype(float)).tolist()}
    kept = ("boosting_options", "loss_function", "tree_learner_options")
    for name, model in models.items():
        model.save_model(folder / f"{name}.cbm")
        model.save_model(folder / f"{name}.json", format="json")
        content = json.loads((folder / f"{name}.json").read_text())
        params = content["model_info"]["params"]
        content["model_info"] = {"params": {key: params[key] for key in kept}}
        (folder / f"{name}.json").write_text(json.dumps(content))
        if name != "categorical":
            predictions[name] = model.predict(x, prediction_type="RawFormulaVal").tolist()
    (folder / "predictions.json").write_text(json.dumps(predictions))
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost

import residuum as rs
from residuum.errors import CheckpointError
from residuum.io.forests import read_forests
from residuum.io.release import read_release
from residuum.io.xgboost_files import estimate_settings
from residuum.trees.forest import AVERAGE, BOOSTING, NO_CHILD
from residuum.trees.predict import find_leaf_nodes, predict
from tests.integration.io.boosted_models import (
    CATBOOST,
    ROWS,
    TASKS,
    catboost_predictions,
    fit_lightgbm,
    fit_xgboost,
    forest_of,
    saved,
    table,
)

ROUNDING = 1e-5  # XGBoost adds float32 numbers


@pytest.mark.parametrize("missing", [0.0, 0.15])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("suffix", [".json", ".ubj", ".pkl2", ".pkl"])
def test_xgboost_predictions(tmp_path: Path, task: str, missing: float, suffix: str) -> None:
    x, targets = table(missing)
    new, _ = table(0.3, seed=1)
    model = fit_xgboost(task, x, targets[task])
    forest = forest_of(saved(model, tmp_path, suffix))
    samples = np.concatenate([x, new])
    margins = model.predict(samples, output_margin=True).reshape(len(samples), -1)
    assert np.allclose(predict(forest, samples), margins, atol=ROUNDING)
    assert forest.kind == BOOSTING
    assert forest.library == "xgboost"
    assert forest.columns == 5
    # Thresholds are values of the table, so an equal value must go to the right child.
    assert not np.allclose(predict(replace(forest, is_strict=False), x), margins[:ROWS], atol=0.01)


@pytest.mark.parametrize(
    "objective",
    ["count:poisson", "reg:gamma", "reg:tweedie", "reg:logistic", "binary:logitraw", "binary:hinge",
     "reg:absoluteerror", "reg:squaredlogerror", "reg:pseudohubererror", "rank:pairwise"],
)  # fmt: skip
def test_xgboost_base_scores(tmp_path: Path, objective: str) -> None:
    x, targets = table()
    y = targets["binary"] + (0.5 if objective == "reg:gamma" else 0.0)
    groups = {"qid": np.arange(ROWS) // 20} if objective.startswith("rank") else {}
    data = xgboost.DMatrix(x, label=y, **groups)
    model = xgboost.train({"objective": objective, "max_depth": 3}, data, 3)
    forest = forest_of(saved(model, tmp_path, ".json"))
    assert forest.objective == objective
    margins = model.predict(data, output_margin=True)
    assert np.allclose(predict(forest, x)[:, 0], margins, atol=ROUNDING)


def test_an_unknown_objective_has_no_offset(tmp_path: Path) -> None:
    x, targets = table()
    path = saved(fit_xgboost("regression", x, targets["regression"]), tmp_path, ".json")
    path.write_text(path.read_text().replace("reg:squarederror", "reg:unheardof"))
    assert forest_of(path).offset is None


def test_several_targets_have_several_outputs(tmp_path: Path) -> None:
    x, targets = table()
    y = np.stack([targets["regression"], x[:, 0] ** 2], 1)
    model = fit_xgboost("regression", x, y)
    forest = forest_of(saved(model, tmp_path, ".ubj"))
    assert np.allclose(predict(forest, x), model.predict(x), atol=ROUNDING)


def test_pruned_nodes_are_left_out(tmp_path: Path) -> None:
    x, targets = table()
    model = fit_xgboost(
        "regression", x, targets["regression"], tree_method="exact", gamma=5.0, max_depth=6
    )
    path = saved(model, tmp_path, ".json")
    entries = json.loads(path.read_text())["learner"]["gradient_booster"]["model"]["trees"]
    stored = sum(len(entry["left_children"]) for entry in entries)
    forest = forest_of(path)
    assert np.allclose(predict(forest, x)[:, 0], model.predict(x), atol=ROUNDING)
    assert sum(len(tree.left) for tree in forest.trees) <= stored


@pytest.mark.parametrize("missing", [0.0, 0.15])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("suffix", [".txt", ".pkl2", ".pkl"])
def test_lightgbm_predictions(tmp_path: Path, task: str, missing: float, suffix: str) -> None:
    x, targets = table(missing)
    new, _ = table(0.3, seed=1)
    model = fit_lightgbm(task, x, targets[task])
    forest = forest_of(saved(model, tmp_path, suffix))
    samples = np.concatenate([x, new])
    margins = model.predict(samples, raw_score=True).reshape(len(samples), -1)
    assert np.allclose(predict(forest, samples), margins, atol=1e-12)
    assert forest.kind == BOOSTING
    assert forest.library == "lightgbm"
    assert forest.stored_ranges is not None
    low, high = forest.stored_ranges
    assert np.array_equal(low, np.nanmin(x, 0))
    assert np.array_equal(high, np.nanmax(x, 0))


def test_lightgbm_compares_doubles(tmp_path: Path) -> None:
    x, targets = table()
    model = fit_lightgbm("regression", x, targets["regression"])
    forest = forest_of(saved(model, tmp_path, ".txt"))
    threshold = forest.trees[0].threshold[0]
    column = forest.trees[0].feature[0]
    samples = np.repeat(x[:1], 2, 0)
    samples[:, column] = threshold, np.nextafter(threshold, np.inf)
    margins = model.predict(samples, raw_score=True)
    assert margins[0] != margins[1]
    assert np.allclose(predict(forest, samples)[:, 0], margins, atol=1e-12)
    rounded = predict(replace(forest, compares_doubles=False), samples)[:, 0]
    assert rounded[0] == rounded[1]


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_stored_counts_are_those_of_the_table(tmp_path: Path, library: str) -> None:
    x, targets = table(missing=0.1)
    fit = {"xgboost": fit_xgboost, "lightgbm": fit_lightgbm}[library]
    suffix = {"xgboost": ".json", "lightgbm": ".txt"}[library]
    forest = forest_of(saved(fit("regression", x, targets["regression"]), tmp_path, suffix))
    for tree in forest.trees:
        leaf = find_leaf_nodes(tree, x, forest.is_strict, forest.compares_doubles)
        counts = np.bincount(leaf, minlength=len(tree.left))
        is_leaf = tree.left == NO_CHILD
        assert tree.weight is not None
        assert np.allclose(tree.weight[is_leaf], counts[is_leaf])
        assert tree.weight[0] == pytest.approx(ROWS)
        if library == "lightgbm":
            assert tree.count is not None
            assert np.array_equal(tree.count[is_leaf], counts[is_leaf])


@pytest.mark.parametrize("task", TASKS)
def test_learning_rate_and_penalty_of_xgboost_follow_from_the_nodes(
    tmp_path: Path, task: str
) -> None:
    x, targets = table()
    settings = {"learning_rate": 0.07, "reg_lambda": 2.5}
    model = fit_xgboost(task, x, targets[task], **settings)
    for suffix in (".json", ".ubj", ".pkl"):  # a pickle states the settings
        forest = forest_of(saved(model, tmp_path, suffix))
        assert forest.learning_rate == pytest.approx(0.07, rel=1e-4)
        assert forest.regularization == pytest.approx(2.5, rel=1e-4)


def test_an_l1_penalty_contradicts_the_equations(tmp_path: Path) -> None:
    x, targets = table()
    model = fit_xgboost("regression", x, targets["regression"], reg_alpha=1.0)
    forest = forest_of(saved(model, tmp_path, ".json"))
    assert estimate_settings(forest.trees) is None
    assert forest.learning_rate is None


def test_settings_of_lightgbm(tmp_path: Path) -> None:
    x, targets = table()
    model = fit_lightgbm("regression", x, targets["regression"], learning_rate=0.03, reg_lambda=2.0)
    forest = forest_of(saved(model, tmp_path, ".txt"))
    assert (forest.learning_rate, forest.regularization) == (0.03, 2.0)
    assert forest.objective == "regression"
    model = fit_lightgbm("regression", x, targets["regression"], boosting_type="dart")
    assert forest_of(saved(model, tmp_path, ".txt")).learning_rate is None


def test_random_forest_of_lightgbm_stores_mean_targets(tmp_path: Path) -> None:
    x, targets = table()
    y = targets["regression"]
    settings = {
        "boosting_type": "rf",
        "subsample": 0.6,
        "subsample_freq": 1,
        "min_child_samples": 1,
    }
    model = fit_lightgbm("regression", x, y, num_leaves=150, **settings)
    forest = forest_of(saved(model, tmp_path, ".txt"))
    assert forest.kind == AVERAGE
    assert np.allclose(predict(forest, x)[:, 0], model.predict(x), atol=1e-12)
    tree = forest.trees[0]
    assert tree.count is not None
    singles = tree.value[(tree.left == NO_CHILD) & (tree.count == 1), 0]
    assert len(singles) > 50
    assert np.abs(singles[:, None] - y).min(1).max() < 1e-5  # leaves of one record store its target
    other = table(seed=5)[1]["regression"]
    assert np.abs(singles[:, None] - other).min(1).max() > 1e-3
    penalized = fit_lightgbm("regression", x, y, reg_lambda=1.0, **settings)
    assert forest_of(saved(penalized, tmp_path, ".txt")).kind == BOOSTING
    classifier = fit_lightgbm("classes", x, targets["classes"], **settings)
    forest = forest_of(saved(classifier, tmp_path, ".txt"))
    assert forest.kind == BOOSTING
    sums = classifier.predict(x, raw_score=True)
    assert np.allclose(8 * predict(forest, x), sums, atol=1e-10)


def test_random_forest_of_xgboost_stores_mean_targets(tmp_path: Path) -> None:
    x, targets = table()
    y = targets["regression"]
    settings = {"n_estimators": 10, "max_depth": 12, "n_jobs": 1}
    model = xgboost.XGBRFRegressor(**settings).fit(x, y)
    for suffix in (".ubj", ".pkl"):
        forest = forest_of(saved(model, tmp_path, suffix))
        assert forest.kind == AVERAGE
        assert np.allclose(predict(forest, x)[:, 0], model.predict(x), atol=ROUNDING)
        tree = forest.trees[0]
        assert tree.count is not None
        singles = tree.value[(tree.left == NO_CHILD) & (tree.count == 1), 0]
        assert len(singles) > 50
        assert np.abs(singles[:, None] - y).min(1).max() < 1e-4
    penalized = xgboost.XGBRFRegressor(reg_lambda=1.0, **settings).fit(x, y)
    forest = forest_of(saved(penalized, tmp_path, ".ubj"))
    assert forest.kind == BOOSTING
    assert np.allclose(predict(forest, x)[:, 0], penalized.predict(x), atol=ROUNDING)


def test_names_of_columns(tmp_path: Path) -> None:
    x, targets = table()
    frame = pd.DataFrame(x, columns=["age", "weight", "bmi", "dose", "sex"])
    y = targets["regression"]
    path = saved(fit_lightgbm("regression", frame, y), tmp_path, ".txt")
    assert forest_of(path).names == tuple(frame.columns)
    path = saved(fit_lightgbm("regression", x, y), tmp_path, ".txt")
    assert forest_of(path).names == ()
    path = saved(fit_xgboost("regression", frame, y), tmp_path, ".ubj")
    assert forest_of(path).names == tuple(frame.columns)
    path = saved(fit_xgboost("regression", x, y), tmp_path, ".ubj")
    assert forest_of(path).names == ()


@pytest.mark.parametrize("suffix", [".json", ".cbm"])
@pytest.mark.parametrize("name", ["regression", "binary", "classes", "lossguide"])
def test_catboost_predictions(name: str, suffix: str) -> None:
    x, predictions = catboost_predictions()
    assert np.isnan(x).any()
    forest = forest_of(CATBOOST / f"{name}{suffix}")
    assert np.allclose(predict(forest, x), predictions[name], atol=1e-12)
    assert forest.kind == BOOSTING
    assert forest.library == "catboost"
    assert forest.learning_rate is not None
    assert forest.regularization == 3.0
    assert sum(map(len, forest.bin_edges)) > 0
    for tree in forest.trees:
        assert tree.weight is not None
        leaf = find_leaf_nodes(tree, x)
        counts = np.bincount(leaf, minlength=len(tree.left))
        is_leaf = tree.left == NO_CHILD
        assert np.array_equal(tree.weight[is_leaf], counts[is_leaf])
    other_side = [replace(t, missing_left=~t.missing_left) for t in forest.trees]
    changed = predict(replace(forest, trees=tuple(other_side)), x)
    assert not np.allclose(changed, predictions[name], atol=1e-3)


def test_both_formats_of_catboost_hold_the_same_trees() -> None:
    for name in ("regression", "classes", "lossguide"):
        forests = [forest_of(CATBOOST / f"{name}{suffix}") for suffix in (".json", ".cbm")]
        leaves = [np.concatenate([t.value for t in f.trees]) for f in forests]
        assert np.allclose(*(np.sort(values[~np.isnan(values)]) for values in leaves))
        edges = [np.concatenate(f.bin_edges) for f in forests]
        assert np.allclose(*edges, atol=1e-7)


def unsupported_models() -> dict[str, tuple[str, str]]:
    return {
        "dart": (".json", "booster of the kind dart"),
        "gblinear": (".ubj", "booster of the kind gblinear"),
        "categorical xgboost": (".json", "categorical splits"),
        "vector leaves": (".ubj", "vector in each leaf"),
        "categorical lightgbm": (".txt", "categorical splits"),
        "linear trees": (".txt", "linear models"),
        "zero as missing": (".txt", "zeros as missing"),
    }


@pytest.mark.parametrize("name", unsupported_models())
def test_unsupported_models_are_refused_by_name(tmp_path: Path, name: str) -> None:
    x, targets = table()
    y = targets["regression"]
    x[:, 4] = np.nan_to_num(x[:, 4])
    categories = pd.DataFrame({"a": x[:, 0], "b": pd.Categorical(x[:, 4].astype(int))})
    model = {
        "dart": lambda: fit_xgboost("regression", x, y, booster="dart"),
        "gblinear": lambda: fit_xgboost("regression", x, y, booster="gblinear"),
        "categorical xgboost": lambda: fit_xgboost(
            "regression", categories, x[:, 4] == 1, enable_categorical=True
        ),
        "vector leaves": lambda: fit_xgboost(
            "regression", x, np.stack([y, -(y**2)], 1), multi_strategy="multi_output_tree"
        ),
        "categorical lightgbm": lambda: fit_lightgbm("regression", categories, x[:, 4] == 1),
        "linear trees": lambda: fit_lightgbm("regression", x, y, linear_tree=True),
        "zero as missing": lambda: fit_lightgbm("regression", x, y, zero_as_missing=True),
    }[name]()
    suffix, reason = unsupported_models()[name]
    with pytest.raises(CheckpointError, match=reason):
        forest_of(saved(model, tmp_path, suffix))
    with pytest.raises(CheckpointError, match=reason):
        forest_of(saved(model, tmp_path, ".pkl"))


@pytest.mark.parametrize("suffix", [".json", ".cbm"])
def test_categorical_splits_of_catboost_are_refused(suffix: str) -> None:
    with pytest.raises(CheckpointError, match="categorical columns"):
        forest_of(CATBOOST / f"categorical{suffix}")


@pytest.mark.parametrize("head", [b"binf\x00\x00\x00\x00", b"CONFIG-offset:\x10"])
def test_old_binary_models_of_xgboost_are_refused(tmp_path: Path, head: bytes) -> None:
    x, targets = table()
    booster = fit_xgboost("regression", x, targets["regression"]).get_booster()
    state = booster.__getstate__()
    path = tmp_path / "model.pkl"
    assert read_forests(read_release(saved(booster, tmp_path, ".pkl")))
    path.write_bytes(path.read_bytes().replace(bytes(state["handle"][: len(head)]), head))
    with pytest.raises(CheckpointError, match="older binary format"):
        forest_of(path)


def test_an_estimator_that_was_not_fitted_has_no_trees(tmp_path: Path) -> None:
    for model in (xgboost.XGBRegressor(), lightgbm.LGBMRegressor()):
        assert read_forests(read_release(saved(model, tmp_path, ".pkl"))) == ()


@pytest.mark.parametrize("suffix", [".json", ".ubj", ".txt", ".cbm"])
def test_scan_and_audit_open_model_files(tmp_path: Path, suffix: str) -> None:
    x, targets = table()
    if suffix == ".cbm":
        path, columns = CATBOOST / "regression.cbm", 4
    else:
        fit = fit_lightgbm if suffix == ".txt" else fit_xgboost
        path = saved(fit("regression", x, targets["regression"]), tmp_path, suffix)
        columns = 5
    release = rs.load(path)
    assert release.kind in ("xgboost", "lightgbm", "catboost")
    assert release.unsafe == ()
    (scanned,) = rs.scan(path).files
    assert any("decision trees" in finding.what for finding in scanned.findings)
    half = ROWS // 2
    samples = [
        (x[rows, :columns], targets["regression"][rows])
        for rows in (slice(half), slice(half, None))
    ]
    result = rs.audit(path, data=samples[0], holdout=samples[1], out=tmp_path / "audit")
    assert result.exit_code in (0, 1, 3)


def test_scan_reports_the_name_of_a_data_file_in_a_model(tmp_path: Path) -> None:
    x, targets = table()
    path = saved(fit_lightgbm("regression", x, targets["regression"]), tmp_path, ".txt")
    assert "names of files" not in [finding.what for finding in rs.scan(path).files[0].findings]
    path.write_text(path.read_text().replace("[data: ]", "[data: /home/ann/patients.csv]"))
    assert "names of files" in [finding.what for finding in rs.scan(path).files[0].findings]
