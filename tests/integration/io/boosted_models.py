"""Small models of XGBoost and LightGBM, and the stored models of CatBoost, for the tests of their readers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import xgboost

from residuum.io.forests import read_forests
from residuum.io.release import read_release
from residuum.trees.forest import Forest

CATBOOST = Path(__file__).parents[2] / "data" / "catboost"
TASKS = ("regression", "binary", "classes")
ROWS = 200


def table(missing: float = 0.0, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a table with continuous, rounded and integer columns, and targets for each task."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(ROWS, 5))
    x[:, 3] = np.round(x[:, 3], 1)
    x[:, 4] = generator.integers(0, 3, ROWS)
    y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 4] + 0.3 * generator.normal(size=ROWS)
    x[generator.random(x.shape) < missing] = np.nan
    return x, {"regression": y, "binary": (y > 0) * 1, "classes": np.digitize(y, [-0.5, 0.5])}


def fit_xgboost(task: str, x: np.ndarray, y: np.ndarray, **settings: Any) -> Any:
    kind = xgboost.XGBRegressor if task == "regression" else xgboost.XGBClassifier
    return kind(**{"n_estimators": 8, "max_depth": 4, "n_jobs": 1, **settings}).fit(x, y)


def fit_lightgbm(task: str, x: np.ndarray, y: np.ndarray, **settings: Any) -> Any:
    kind = lightgbm.LGBMRegressor if task == "regression" else lightgbm.LGBMClassifier
    return kind(**{"n_estimators": 8, "verbose": -1, "n_jobs": 1, **settings}).fit(x, y)


def saved(model: Any, folder: Path, suffix: str) -> Path:
    """Save a model as a pickle (".pkl"), or in the format of its library with this suffix."""
    path = folder / f"model{suffix}"
    if suffix.startswith(".pkl"):
        protocol = int(suffix.removeprefix(".pkl") or pickle.DEFAULT_PROTOCOL)
        path = folder / "model.pkl"
        path.write_bytes(pickle.dumps(model, protocol=protocol))
    elif isinstance(model, lightgbm.LGBMModel):
        model.booster_.save_model(path)
    else:
        model.save_model(path)
    return path


def forest_of(path: Path) -> Forest:
    (named,) = read_forests(read_release(path))
    return named.forest


def catboost_predictions() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the samples and the predictions of CatBoost for the stored models."""
    content = json.loads((CATBOOST / "predictions.json").read_text())
    x = np.array(content.pop("x"), dtype=np.float64)
    return x, {name: np.array(values).reshape(len(x), -1) for name, values in content.items()}
