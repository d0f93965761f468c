"""Fitted scikit-learn estimators as plain scripts pickle them, and the surfaces that each must show.

``python -m tests.estimators FOLDER`` writes them with pickle and joblib: the files in
``data/sklearn-1.4.2.zip`` came from it under that version.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KernelDensity, KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import LabelSpreading
from sklearn.svm import SVC

RECORDS = 12
# Kinds and a word of each finding that must be there; nothing may be "stored" that is not named here.
SURFACES: dict[str, set[tuple[str, str]]] = {
    "knn": {("stored", "_fit_X")},
    "knn-tree": {("stored", "_fit_X"), ("stored", "KDTree")},
    "svc": {("stored", "support_vectors_")},
    "gp": {("stored", "X_train_")},
    "kde": {("stored", "KDTree")},
    "spread": {("stored", "X_")},
    "adam": {
        ("optimizer-state", "ms"),
        ("optimizer-state", "vs"),
        ("start", "the initial weights"),
    },
    "sgd": {("optimizer-state", "velocities"), ("start", "the initial weights")},
    "adam-32": {
        ("optimizer-state", "ms"),
        ("start", "the initial weights"),
        ("statistics", "loss curve"),
    },
    "forest": {("statistics", "decision trees"), ("start", "a seed")},
    "scaled": {
        ("statistics", "StandardScaler"),
        ("optimizer-state", "ms"),
        ("start", "the initial weights"),
    },
    "logistic": {("statistics", "StandardScaler")},
    "words": {("stored", "vocabulary")},
}


def fitted() -> dict[str, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(RECORDS, 5))
    y = (x[:, 0] > 0).astype(int)
    network = {"hidden_layer_sizes": (20,), "max_iter": 3}
    models = {
        "knn": KNeighborsClassifier(3, algorithm="brute"),
        "knn-tree": KNeighborsClassifier(3, algorithm="kd_tree"),
        "svc": SVC(),
        "gp": GaussianProcessRegressor(),
        "kde": KernelDensity(),
        "spread": LabelSpreading(),
        "adam": MLPClassifier(random_state=7, **network),
        "sgd": MLPClassifier(random_state=7, solver="sgd", **network),
        "adam-32": MLPClassifier(batch_size=32, **network),
        "forest": RandomForestClassifier(3, random_state=1),
        "scaled": make_pipeline(StandardScaler(), MLPClassifier(**network)),
        "logistic": make_pipeline(StandardScaler(), LogisticRegression()),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # three epochs do not converge, batches are clipped
        models_fitted = {name: model.fit(x, y) for name, model in models.items()}
    texts = [f"word{i} hello patient{i}" for i in range(RECORDS)]
    models_fitted["words"] = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, y)
    return models_fitted


def write(folder: Path) -> None:
    for name, model in fitted().items():
        (folder / f"{name}.pkl").write_bytes(pickle.dumps(model))
        joblib.dump(model, folder / f"{name}.joblib")
    joblib.dump(model, folder / f"{name}-packed.joblib", compress=3)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
