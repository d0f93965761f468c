"""Artifacts of scikit-learn: estimators, pipelines and bundles as pickle, joblib, skops and ONNX."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
from sklearn.cluster import Birch, KMeans
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import IsolationForest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import (
    OneHotEncoder,
    OrdinalEncoder,
    QuantileTransformer,
    StandardScaler,
    TargetEncoder,
)
from sklearn.svm import SVC, LinearSVC

from experiments.zoo import Check, artifact
from experiments.zoo.samples import cancer, diabetes, letters, people, write_tables

AUDIT = "--data train.csv --holdout test.csv --out run --effort quick"
warnings.filterwarnings("ignore", category=UserWarning, module="sklearn")


def _save(model: Any, folder: Path, name: str = "model.pkl") -> None:
    if name.endswith(".joblib"):
        joblib.dump(model, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(model))


def _fit_on_cancer(model: Any, folder: Path, name: str = "model.pkl") -> None:
    data = cancer()
    write_tables(folder, data)
    _save(model.fit(data[0], data[1]), folder, name)


@artifact(
    "A pickled nearest-neighbor classifier in a pipeline with a scaler, fitted on 100 rows of a"
    " medical table.",
    Check(
        "residuum scan model.pkl",
        "The model stores its 100 training records (scaled). It must not be released.",
        1,
        ("KNeighborsClassifier", "100", "records"),
    ),
    Check(
        f"residuum audit model.pkl {AUDIT}",
        "All 100 training records are stored in the file.",
        1,
        ("100",),
    ),
    Check(
        "residuum strip model.pkl --out clean.pkl",
        "The model cannot be stripped, because it consists of its training records.",
        2,
        ("cannot be stripped", "KNeighbors"),
    ),
)
def nearest_neighbors(folder: Path) -> None:
    _fit_on_cancer(make_pipeline(StandardScaler(), KNeighborsClassifier(3)), folder)


@artifact(
    "A pickled support vector machine in a pipeline with a scaler, fitted on 100 rows of a medical"
    " table.",
    Check(
        "residuum scan model.pkl",
        "The model stores some of its training records (scaled).",
        1,
        ("support_vectors_",),
    ),
    Check(
        f"residuum audit model.pkl {AUDIT}",
        "Some training records are stored in the file.",
        1,
        ("stored",),
    ),
    Check(
        "residuum strip model.pkl --out clean.pkl",
        "The model cannot be stripped, because its support vectors are training records.",
        2,
        ("cannot be stripped", "SVC"),
    ),
)
def support_vectors(folder: Path) -> None:
    _fit_on_cancer(make_pipeline(StandardScaler(), SVC()), folder)


@artifact(
    "A grid search over a support vector machine, fitted on 100 rows and saved with joblib.",
    Check(
        "residuum scan model.joblib",
        "The best estimator stores training records.",
        1,
        ("support_vectors_",),
    ),
    Check(
        "residuum strip model.joblib --out clean.joblib",
        "It cannot be stripped.",
        2,
        ("cannot be stripped",),
    ),
)
def grid_search(folder: Path) -> None:
    search = GridSearchCV(make_pipeline(StandardScaler(), SVC()), {"svc__C": [0.1, 1]}, cv=3)
    _fit_on_cancer(search, folder, "model.joblib")


@artifact(
    "A Gaussian process fitted on 60 rows of a diabetes table.",
    Check(
        "residuum scan model.pkl",
        "The model stores all of its 60 training records.",
        1,
        ("X_train_", "60"),
    ),
    Check(
        "residuum strip model.pkl --out clean.pkl",
        "It cannot be stripped.",
        2,
        ("cannot be stripped",),
    ),
)
def gaussian_process(folder: Path) -> None:
    x, y, *_ = diabetes(60)
    _save(GaussianProcessRegressor().fit(x, y), folder)


@artifact(
    "A pipeline of a scaler and an MLPClassifier, fitted on 100 rows of a medical table and pickled"
    " as it is.",
    Check(
        "residuum scan model.pkl",
        "The pickle holds the optimizer state and perhaps the initial weights of the network, which"
        " reveal records.",
        1,
        ("_optimizer|moment", "steps"),
    ),
    Check(
        "residuum strip model.pkl --out clean.pkl --script strip_model.py && python strip_model.py"
        " && residuum scan clean.pkl",
        "The script removes the optimizer and the initial weights. The new file has no finding of"
        " high severity, and its predictions are those of the old file.",
        0,
        (),
        ("moments \\(", "initial weights of"),
    ),
)
def pipeline_with_network(folder: Path) -> None:
    network = MLPClassifier((50,), max_iter=300, random_state=1)
    _fit_on_cancer(make_pipeline(StandardScaler(), network), folder)


@artifact(
    "An MLPRegressor in a dict with its training table as a DataFrame of 100 rows: {'model': ...,"
    " 'X_train': ...}.",
    Check(
        "residuum scan bundle.joblib",
        "The file stores the training table: 100 rows.",
        1,
        ("X_train", "100"),
    ),
    Check(
        f"residuum audit bundle.joblib {AUDIT}",
        "All 100 training samples are stored in the file.",
        1,
        ("100 of (the )?100|100 stored|stores 100|all 100",),
    ),
    Check(
        "residuum strip bundle.joblib --out clean.joblib --script s.py && python s.py && residuum"
        " scan clean.joblib",
        "The script removes the table and the optimizer state.",
        0,
        (),
        ("X_train",),
    ),
)
def bundle_with_table(folder: Path) -> None:
    x, y, *_ = cancer()
    write_tables(folder, cancer())
    frame = pd.DataFrame(x, columns=[f"c{i}" for i in range(x.shape[1])])
    network = MLPRegressor(hidden_layer_sizes=(20,), max_iter=200, random_state=0).fit(
        StandardScaler().fit_transform(x), y
    )
    _save({"model": network, "X_train": frame}, folder, "bundle.joblib")


def _people_pipeline(categories: Any) -> Pipeline:
    columns = ColumnTransformer(
        [("who", categories, ["surname"]), ("numbers", StandardScaler(), ["age", "glucose"])]
    )
    return make_pipeline(columns, LogisticRegression())


@artifact(
    "A pipeline that one-hot encodes the surnames of 80 patients and classifies them with logistic"
    " regression. people.csv is the training table with IDs and streets; others.csv has patients"
    " that were not used.",
    Check(
        "residuum scan model.pkl",
        "The encoder stores the surnames of the patients.",
        0,
        ("OneHotEncoder|categories_", "surname|values"),
        ("no finding",),
    ),
    Check(
        "residuum scan model.pkl --data people.csv --holdout others.csv",
        "The surnames of the patients are stored as values of a column. Their ages and other"
        " columns are not.",
        1,
        ("surname",),
    ),
    Check(
        "residuum audit model.pkl --data people.csv --holdout others.csv --out run",
        "residuum cannot run a pickled pipeline. A right answer says so, and what works: a scan with"
        " the data, or an audit of the live model.",
        2,
        ("residuum.audit",),
    ),
)
def one_hot_surnames(folder: Path) -> None:
    table = people(80, 0)
    table.to_csv(folder / "people.csv", index=False)
    other_people = people(200, 1)
    other_people["surname"] = [f"{name}son" for name in other_people["surname"]]
    other_people.to_csv(folder / "others.csv", index=False)
    model = _people_pipeline(OneHotEncoder(handle_unknown="ignore")).fit(table, table["label"])
    _save(model, folder)


@artifact(
    "A text classifier: TfidfVectorizer and LinearSVC, fitted on 60 letters of patients.",
    Check(
        "residuum scan model.pkl",
        "The vocabulary lists the words of the letters, with surnames.",
        0,
        ("vocabulary",),
    ),
)
def text_classifier(folder: Path) -> None:
    table = letters(60, 0)
    _save(make_pipeline(TfidfVectorizer(), LinearSVC()).fit(table["text"], table["label"]), folder)


@artifact(
    "A nearest-neighbor classifier in the safe format of skops, fitted on 100 rows.",
    Check(
        "residuum scan model.skops", "The file stores 100 training records.", 1, ("100", "records")
    ),
    Check(
        "residuum scan model.skops --data train.csv --holdout test.csv",
        "All 100 are stored.",
        1,
        ("100 of (the )?100",),
    ),
)
def skops_neighbors(folder: Path) -> None:
    import skops.io

    data = cancer()
    write_tables(folder, data)
    skops.io.dump(KNeighborsClassifier(3).fit(data[0], data[1]), folder / "model.skops")


def _to_onnx(model: Any, folder: Path, columns: int) -> None:
    from skl2onnx import to_onnx

    graph = to_onnx(model, np.zeros((1, columns), np.float32))
    (folder / "model.onnx").write_bytes(graph.SerializeToString())


@artifact(
    "The ONNX export of a nearest-neighbor classifier that was fitted on 100 rows of 30 columns.",
    Check(
        "residuum scan model.onnx",
        "An initializer of the graph holds the 100 training records.",
        1,
        ("100",),
        ("no finding",),
    ),
    Check(
        "residuum scan model.onnx --data train.csv --holdout test.csv",
        "All 100 are stored.",
        1,
        ("100 of (the )?100",),
    ),
)
def onnx_neighbors(folder: Path) -> None:
    data = cancer()
    write_tables(folder, data)
    _to_onnx(KNeighborsClassifier(3).fit(data[0], data[1]), folder, 30)


@artifact(
    "The ONNX export of a support vector machine that was fitted on 100 rows. The attribute"
    " support_vectors of the graph holds some of these rows.",
    Check(
        "residuum scan model.onnx",
        "The graph stores training records as support vectors.",
        1,
        ("support_vectors",),
    ),
)
def onnx_support_vectors(folder: Path) -> None:
    x, y, *_ = cancer()
    _to_onnx(SVC().fit(x, y), folder, 30)


@artifact(
    "KMeans with 30 clusters, fitted on 100 rows. Some clusters have a single row, so their center"
    " is this row.",
    Check(
        "residuum scan model.pkl",
        "Centers of clusters with a single member are training records.",
        1,
        ("center",),
    ),
    Check(
        "residuum scan model.pkl --data train.csv --holdout test.csv",
        "Some centers equal given rows.",
        1,
        ("of (the )?100",),
    ),
)
def many_clusters(folder: Path) -> None:
    _fit_on_cancer(KMeans(30, n_init=1, random_state=0), folder)


@artifact(
    "Birch clustering of 60 rows. Its tree stores each row.",
    Check(
        "residuum scan model.pkl",
        "The tree of Birch stores training records.",
        1,
        ("Birch", "record"),
    ),
)
def birch(folder: Path) -> None:
    _save(Birch(n_clusters=3, threshold=0.01).fit(cancer(60)[0]), folder)


@artifact(
    "An isolation forest fitted on 100 rows. Its thresholds are random numbers between values of"
    " the data.",
    Check(
        "residuum scan model.pkl",
        "The trees hold no single record. At most thresholds are named.",
        0,
    ),
)
def isolation_forest(folder: Path) -> None:
    _fit_on_cancer(IsolationForest(n_estimators=20, random_state=0), folder)


@artifact(
    "A quantile transformer and logistic regression, fitted on 100 rows. With 100 rows, the"
    " quantiles are all values of every column.",
    Check(
        "residuum scan model.pkl",
        "The transformer stores every value of every column, sorted.",
        1,
        ("QuantileTransformer", "value"),
    ),
    Check(
        "residuum scan model.pkl --data train.csv --holdout test.csv",
        "The values of all columns are stored, but no row.",
        1,
        ("values of",),
    ),
)
def quantiles(folder: Path) -> None:
    _fit_on_cancer(
        make_pipeline(QuantileTransformer(n_quantiles=100), LogisticRegression()), folder
    )


@artifact(
    "A target encoder for the street of 80 patients, most of them unique. It stores each street"
    " and, for unique streets, a shrunken mean of the target.",
    Check(
        "residuum scan model.pkl",
        "The encoder stores the values of the column.",
        1,
        ("TargetEncoder", "value"),
        ("no finding",),
    ),
)
def target_encoder(folder: Path) -> None:
    table = people(80, 0)
    _save(TargetEncoder().fit(table[["street"]], table["glucose"]), folder)


@artifact(
    "An ordinal encoder of numbers (blood sugar values of 80 patients).",
    Check(
        "residuum scan model.pkl",
        "The encoder stores the values of the column.",
        1,
        ("OrdinalEncoder", "value"),
        ("no finding",),
    ),
)
def ordinal_encoder(folder: Path) -> None:
    _save(OrdinalEncoder().fit(people(80, 0)[["glucose"]]), folder)


@artifact(
    "An isotonic regression fitted on 100 values of one column. Its thresholds are values of the"
    " column.",
    Check(
        "residuum scan model.pkl",
        "The thresholds are values of training records.",
        0,
        ("X_thresholds_|values",),
        ("no finding",),
    ),
)
def isotonic(folder: Path) -> None:
    x, y, *_ = diabetes(100)
    _save(IsotonicRegression().fit(x[:, 2], y), folder)


@artifact(
    "Logistic regression behind a scaler, fitted on 100 rows. It holds coefficients, means and"
    " deviations.",
    Check(
        "residuum scan model.pkl",
        "No record is stored. Means and scales of the columns are.",
        0,
        ("statistics",),
    ),
    Check(
        "residuum scan model.pkl --data train.csv --holdout test.csv", "No given row is stored.", 0
    ),
    Check(
        f"residuum audit model.pkl {AUDIT}",
        "The model stores no record. The audit compares its losses on training and held-out rows.",
        3,
        ("loss",),
    ),
)
def logistic_regression(folder: Path) -> None:
    _fit_on_cancer(make_pipeline(StandardScaler(), LogisticRegression()), folder)


@artifact(
    "Gaussian naive Bayes, fitted on 100 rows: means and variances of two classes.",
    Check(
        "residuum scan model.pkl",
        "Only means and variances are stored.",
        0,
        ("statistics",),
        ("stored",),
    ),
)
def naive_bayes(folder: Path) -> None:
    _fit_on_cancer(GaussianNB(), folder)


@artifact(
    "An MLPClassifier of a medical table (100 rows) with the training table in four other formats:"
    " .tsv, .jsonl, .npy without labels, and .csv with semicolons, an ID column and a text column.",
    Check("residuum scan model.pkl --data train.tsv", "No given row is stored.", 1, ("moment",)),
    Check("residuum scan model.pkl --data train.jsonl", "No given row is stored.", 1, ("moment",)),
    Check(
        "residuum audit model.pkl --data messy.csv --holdout messy_test.csv --label diagnosis"
        " --drop note --out run --effort quick",
        "The columns patient_id and note are not used. The network is audited on the other 30"
        " columns.",
        1,
        (),
    ),
)
def tables_in_other_formats(folder: Path) -> None:
    x, y, held_x, held_y = cancer()
    network = MLPClassifier((50,), max_iter=300, random_state=1)
    _save(make_pipeline(StandardScaler(), network).fit(x, y), folder)
    frame = pd.DataFrame(x, columns=[f"c{i}" for i in range(30)]).assign(label=y)
    frame.to_csv(folder / "train.tsv", sep="\t", index=False)
    frame.to_json(folder / "train.jsonl", orient="records", lines=True)
    np.save(folder / "train.npy", x)
    for name, values, labels in (("messy", x, y), ("messy_test", held_x, held_y)):
        table = pd.DataFrame(values, columns=[f"c{i}" for i in range(30)])
        table.insert(0, "patient_id", np.arange(len(table)) + 5000)
        table["note"] = [f"seen by doctor {i % 7}" for i in range(len(table))]
        table["diagnosis"] = labels
        table.to_csv(folder / f"{name}.csv", sep=";", index=False)
