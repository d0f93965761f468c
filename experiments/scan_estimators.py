"""Does a scan name every scikit-learn estimator that stores training records?

    python -m experiments.scan_estimators        a quarter of a minute on one core

Every estimator of ``sklearn.utils.all_estimators`` is fitted on 60 rows of unique numbers. Meta-estimators
are fitted twice: around an estimator that stores no rows, and around nearest neighbors. A walk over the live
object, which shares no code with residuum, counts what the object stores verbatim: training rows, the largest
share of the values of one column, and targets. Then the pickle and the joblib file are scanned.

An estimator stores values if it holds at least a tenth of the values of a column, or of the targets. Smallest
and largest values, medians and quartiles are fewer.

Results: ``experiments/results/scan_estimators.json``.
"""

from __future__ import annotations

import functools
import pickle
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import scipy.sparse
import sklearn
from sklearn.base import is_classifier, is_regressor
from sklearn.experimental import enable_halving_search_cv, enable_iterative_imputer  # noqa: F401
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.utils import all_estimators

import residuum as rs
from experiments import RESULTS
from experiments.programs import parse_paths
from residuum.records import write_json
from residuum.records.rundir import environment

ROWS, COLUMNS = 60, 6
# Smallest share of the values of a column, or of the targets, that counts as stored.
STORES_VALUES = 0.1
# Smallest share of the stored rows that a finding must count. Some centers of MeanShift are records although
# their clusters have more than one record.
COUNTED = 0.9
# Names of findings that follow from trees. What trees determine is more than what they store verbatim.
TREE_WORDS = ("in the trees of", "in the roots of", "in the leaves of", "from the seeds of")

random = np.random.default_rng(0)
X = random.normal(size=(ROWS, COLUMNS))
TARGETS = random.normal(size=ROWS)
CLASSES = np.arange(ROWS) % 3
WORDS = [f"{a}{b}" for a in ("mer", "tal", "bor", "vik", "sun", "hol") for b in "abcdefghij"]
TEXTS = [f"{word} was seen in ward {i % 4} with {WORDS[-i]}" for i, word in enumerate(WORDS)]


def walk_object(value: Any, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Yield every array and plain value that a live object holds, each once."""
    # Values that ``__reduce_ex__`` makes must stay alive, so that no other value gets their id.
    seen = {} if seen is None else seen
    if value is None or isinstance(value, str | int | float | complex | bool | np.generic):
        yield value
        return
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, np.ndarray):
        if value.dtype.names:
            for name in value.dtype.names:
                yield np.asarray(value[name])
        elif value.dtype == object:
            for entry in value.ravel():
                yield from walk_object(entry, seen)
        yield value
    elif scipy.sparse.issparse(value):
        yield value.toarray()
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from walk_object(key, seen)
            yield from walk_object(entry, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        if all(isinstance(entry, int | float | np.number) for entry in value) and value:
            yield np.asarray(list(value), float)
        for entry in value:
            yield from walk_object(entry, seen)
    elif isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return
    else:
        yield from walk_object(getattr(value, "__dict__", None) or {}, seen)
        if type(value).__module__.split(".")[0] in ("sklearn", "scipy", "numpy"):
            try:
                reduced = value.__reduce_ex__(4)
            except Exception:  # noqa: BLE001  an object that cannot be pickled cannot be released
                return
            if isinstance(reduced, tuple):
                yield from walk_object(reduced[1:3], seen)


def count_stored(model: Any, x: Any, targets: Any) -> dict[str, Any]:
    """Return what a fitted object stores verbatim.

    Args:
        model: The fitted object.
        x: The training rows: numbers (N, d), or texts.
        targets: The targets: numbers or texts, in which classes are left out.

    Returns:
        The number of rows, the largest share of the values of one column, and the share of the targets.
    """
    numbers: set[float] = set()
    texts: set[str] = set()
    is_stored_row = np.zeros(len(x), bool)
    is_numeric = isinstance(x, np.ndarray) and x.dtype.kind == "f"
    for value in walk_object(model):
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size:
            numbers.update(value.ravel().tolist())
            if is_numeric and x.ndim == 2 and x.shape[1] > 1:
                for matrix in (value, value.T):
                    if matrix.ndim >= 2 and matrix.shape[-1] == x.shape[1]:
                        rows = matrix.reshape(-1, x.shape[1])
                        is_equal = np.isclose(rows[None], x[:, None], rtol=1e-6, atol=0).all(2)
                        is_stored_row |= is_equal.any(1)
        elif isinstance(value, np.ndarray) and value.dtype.kind in "US":
            texts.update(map(str, value.ravel().tolist()))
        elif isinstance(value, str):
            texts.add(value)
        elif isinstance(value, float | np.floating):
            numbers.add(float(value))
    table = np.asarray(x, dtype=None if is_numeric else str).reshape(len(x), -1)
    shares = [np.mean([_is_stored(cell, numbers, texts) for cell in column]) for column in table.T]
    if not is_numeric:  # words of a text are values too
        words = {word for text in table.ravel() for word in text.split()}
        shares.append(np.mean([word in texts for word in words]))
    target_share = (
        np.mean([_is_stored(y, numbers, texts) for y in np.ravel(targets)])
        if targets is not None
        else 0
    )
    return {
        "rows": int(is_stored_row.sum()),
        "values": round(float(max(shares)), 3),
        "targets": round(float(target_share), 3),
    }


def _is_stored(cell: Any, numbers: set[float], texts: set[str]) -> bool:
    if isinstance(cell, str):
        return cell in texts
    return float(cell) in numbers or float(np.float32(cell)) in numbers


def scan_files(model: Any, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the findings in the pickle and the joblib file of an object."""
    (folder / "model.pkl").write_bytes(pickle.dumps(model))
    joblib.dump(model, folder / "model.joblib")
    return {
        file: [
            {"kind": f.kind, "severity": f.severity, "what": f.what, "count": f.count}
            for f in rs.scan(folder / file).findings
        ]
        for file in ("model.pkl", "model.joblib")
    }


def judge(stored: dict[str, Any], findings: list[dict[str, Any]]) -> str:
    """Return whether the findings are right: "named", "clean", "missed" or "false alarm"."""
    alarms = [finding for finding in findings if finding["kind"] == "stored"]
    is_tree = any(word in alarm["what"] for alarm in alarms for word in TREE_WORDS)
    holds = stored["rows"] > 0 or max(stored["values"], stored["targets"]) >= STORES_VALUES
    if holds:
        largest_count = max((finding["count"] or 0 for finding in alarms), default=0)
        return "named" if largest_count >= COUNTED * max(1, stored["rows"]) else "missed"
    return "false alarm" if alarms and not is_tree else "trees" if is_tree else "clean"


def _meta(name: str, build: Callable[[Any], Any]) -> dict[str, Callable[[], Any]]:
    """Return two cases of a meta-estimator: around one that stores no rows, and around one that does."""
    is_for_classes = (
        name.endswith(("Classifier", "ClassifierCV", "Chain")) and "Regressor" not in name
    )
    plain, neighbors = (
        (LogisticRegression(), KNeighborsClassifier(3))
        if is_for_classes
        else (Ridge(), KNeighborsRegressor(3))
    )
    return {
        f"{name} of {type(inner).__name__}": functools.partial(build, inner)
        for inner in (plain, neighbors)
    }


def cases() -> dict[str, Callable[[], Any]]:
    """Return functions that make every estimator, by a name that begins with the name of the class."""
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    classes = dict(all_estimators())
    two = {"n_components": 2}
    settings: dict[str, dict[str, Any]] = {
        "SparseCoder": {"dictionary": np.eye(COLUMNS)},
        "DBSCAN": {"eps": 2.0},
        "OPTICS": {"max_eps": 3.0},
        "MeanShift": {"bandwidth": 1.5},
        "GaussianRandomProjection": two,
        "SparseRandomProjection": two,
        "CCA": two,
        "PLSCanonical": two,
        "PLSRegression": two,
        "MiniBatchDictionaryLearning": {"max_iter": 20},
        "DictionaryLearning": {"max_iter": 20},
        "TSNE": {"perplexity": 10},
        "SpectralBiclustering": {"n_clusters": 3},
        "SpectralCoclustering": {"n_clusters": 3},
        "BayesianGaussianMixture": {"n_components": 3},
        "GaussianMixture": {"n_components": 3},
        "BernoulliRBM": {"n_iter": 2},
        "FeatureHasher": {"n_features": 16},
        "HashingVectorizer": {"n_features": 16},
        "AdditiveChi2Sampler": {},
        "PatchExtractor": {"patch_size": (2, 2)},
    }
    result: dict[str, Callable[[], Any]] = {}
    for name, kind in classes.items():
        if name in ("GridSearchCV", "HalvingGridSearchCV"):
            for label, inner, grid in (
                ("Ridge", Ridge(), {"alpha": [0.1, 1.0]}),
                ("KNeighborsRegressor", KNeighborsRegressor(), {"n_neighbors": [2, 3]}),
            ):
                result[f"{name} of {label}"] = functools.partial(kind, inner, grid)
        elif name in ("RandomizedSearchCV", "HalvingRandomSearchCV"):
            for label, inner, grid in (
                ("Ridge", Ridge(), {"alpha": [0.1, 1.0]}),
                ("KNeighborsRegressor", KNeighborsRegressor(), {"n_neighbors": [2, 3]}),
            ):
                extra = {"n_iter": 2} if name == "RandomizedSearchCV" else {"n_candidates": 2}
                result[f"{name} of {label}"] = functools.partial(kind, inner, grid, **extra)
        elif name == "Pipeline":
            result |= _meta(
                name,
                lambda inner: classes["Pipeline"]([("scale", StandardScaler()), ("model", inner)]),
            )
        elif name == "ColumnTransformer":
            result[f"{name} of StandardScaler"] = lambda: classes["ColumnTransformer"](
                [("s", StandardScaler(), [0, 1])]
            )
            result[f"{name} of OneHotEncoder"] = lambda: classes["ColumnTransformer"](
                [("e", OneHotEncoder(), [0])]
            )
        elif name == "FeatureUnion":
            result[f"{name} of StandardScaler"] = lambda: classes["FeatureUnion"](
                [("s", StandardScaler())]
            )
            result[f"{name} of KernelPCA"] = lambda: classes["FeatureUnion"](
                [("k", classes["KernelPCA"](kernel="rbf"))]
            )
        elif name.startswith(("Voting", "Stacking")):
            result |= _meta(name, lambda inner, kind=kind: kind([("model", inner)]))
        elif name == "FrozenEstimator":
            result[f"{name} of Ridge"] = lambda: classes["FrozenEstimator"](Ridge().fit(X, TARGETS))
            result[f"{name} of KNeighborsRegressor"] = lambda: classes["FrozenEstimator"](
                KNeighborsRegressor().fit(X, TARGETS)
            )
        elif name in ("RFE", "RFECV", "SelectFromModel"):
            result[f"{name} of Ridge"] = functools.partial(kind, Ridge())
        elif name in (
            *(
                "ClassifierChain",
                "FixedThresholdClassifier",
                "MultiOutputClassifier",
                "MultiOutputRegressor",
            ),
            *(
                "OneVsOneClassifier",
                "OneVsRestClassifier",
                "OutputCodeClassifier",
                "RegressorChain",
            ),
            *("SequentialFeatureSelector", "TunedThresholdClassifierCV"),
            *(
                "AdaBoostRegressor",
                "BaggingClassifier",
                "BaggingRegressor",
                "CalibratedClassifierCV",
            ),
            *(
                "MultiOutputRegressor",
                "SelfTrainingClassifier",
                "TransformedTargetRegressor",
            ),
        ):
            result |= _meta(name, kind)
        else:
            result[name] = functools.partial(kind, **settings.get(name, {}))
    result |= {
        "KNeighborsClassifier, ball tree": lambda: KNeighborsClassifier(3, algorithm="ball_tree"),
        "KNeighborsClassifier, brute force": lambda: KNeighborsClassifier(3, algorithm="brute"),
        "KMeans, 30 clusters": lambda: classes["KMeans"](30, n_init=1),
        "BisectingKMeans, 30 clusters": lambda: classes["BisectingKMeans"](30),
        "GaussianMixture, 30 components": lambda: classes["GaussianMixture"](30),
        "MiniBatchKMeans, 30 clusters": lambda: classes["MiniBatchKMeans"](30, n_init=1),
        "OneHotEncoder of texts": OneHotEncoder,
        "OrdinalEncoder of texts": classes["OrdinalEncoder"],
        "TargetEncoder of texts": classes["TargetEncoder"],
        "DecisionTreeRegressor, 3 leaves": lambda: classes["DecisionTreeRegressor"](
            max_leaf_nodes=3
        ),
    }
    return result


def fit(name: str, model: Any) -> tuple[Any, Any, Any]:
    """Fit an estimator on data of its kind, and return it with its rows and the unique targets or None."""
    base = name.split(" ")[0].rstrip(",")
    tags = model.__sklearn_tags__()
    if hasattr(model, "random_state"):
        model.random_state = 0
    positive = np.abs(X)
    if name.endswith("of texts"):
        texts = np.array(WORDS, dtype=object)[:, None]
        return model.fit(texts, TARGETS), texts, TARGETS if base == "TargetEncoder" else None
    if base in ("CountVectorizer", "HashingVectorizer", "TfidfVectorizer"):
        return model.fit(TEXTS), np.array(TEXTS), None
    if base in ("DictVectorizer", "FeatureHasher"):
        return model.fit([{word: 1.0} for word in WORDS]), np.array(WORDS), None
    if base in ("LabelEncoder", "LabelBinarizer"):
        return model.fit(WORDS), np.array(WORDS), None
    if base == "MultiLabelBinarizer":
        return model.fit([(word,) for word in WORDS]), np.array(WORDS), None
    if base == "PatchExtractor":
        return model.fit(X.reshape(10, 6, 6)), X, None
    if base == "KernelCenterer":
        return model.fit(X @ X.T), X, None
    if base == "IsotonicRegression":
        return model.fit(X[:, 0], TARGETS), X[:, :1], TARGETS
    if base == "CategoricalNB":
        return model.fit((positive * 2).astype(int), CLASSES), positive, None
    if base == "FrozenEstimator":
        return model, X, TARGETS
    if base in ("MultiOutputClassifier", "ClassifierChain"):
        return model.fit(X, np.stack([CLASSES % 2, (CLASSES > 1) * 1], 1)), X, None
    if base in ("FixedThresholdClassifier", "TunedThresholdClassifierCV"):
        return model.fit(X, CLASSES % 2), X, None
    if base == "SelfTrainingClassifier":
        return model.fit(X, np.where(np.arange(ROWS) % 5, CLASSES, -1)), X, None
    x = (
        positive
        if tags.input_tags.positive_only
        or base
        in (
            "ComplementNB",
            "MultinomialNB",
            "NMF",
            "MiniBatchNMF",
            "LatentDirichletAllocation",
            "AdditiveChi2Sampler",
            "SkewedChi2Sampler",
        )
        else X
    )
    if base.startswith("MultiTask") or base in (
        "CCA",
        "PLSCanonical",
        "MultiOutputRegressor",
        "RegressorChain",
    ):
        return model.fit(x, np.stack([TARGETS, TARGETS**3], 1)), x, TARGETS
    if is_classifier(model):
        return model.fit(x, CLASSES), x, None
    if is_regressor(model) or base in (
        "RFE",
        "RFECV",
        "SelectFromModel",
        "TargetEncoder",
        "PLSSVD",
        "GenericUnivariateSelect",
    ):
        y = (
            np.abs(TARGETS)
            if base in ("GammaRegressor", "PoissonRegressor", "TweedieRegressor")
            else TARGETS
        )
        if base == "PLSSVD":
            return model.fit(x, np.stack([TARGETS, TARGETS**3], 1)), x, TARGETS
        if base == "GenericUnivariateSelect":
            return model.fit(x, CLASSES), x, None
        return model.fit(x, y), x, y
    return model.fit(x, CLASSES), x, None


def measure(name: str, model: Any) -> dict[str, Any]:
    """Fit and scan an estimator, and return what it stores and what the scan reports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, x, targets = fit(name, model)
    stored = count_stored(model, x, targets)
    with tempfile.TemporaryDirectory() as folder:
        files = scan_files(model, Path(folder))
    first = files["model.pkl"]
    verdicts = {judge(stored, findings) for findings in files.values()}
    return {
        "estimator": name,
        "stored": stored,
        "verdict": verdicts.pop() if len(verdicts) == 1 else "pickle and joblib differ",
        "findings": [f"{f['kind']} {f['severity']}: {f['what']} ({f['count']})" for f in first],
    }


def main() -> int:
    """Measure every estimator, print those that store something, and write all results."""
    rows, skipped = [], {}
    for name, make in cases().items():
        try:
            rows.append(measure(name, make()))
        except Exception as problem:  # noqa: BLE001  the result file says which could not be fitted
            skipped[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
    for row in rows:
        if row["verdict"] != "clean":
            print(f"{row['verdict']:12} {row['estimator']:45} {row['stored']}")
    verdicts = Counter(row["verdict"] for row in rows)
    print(f"{len(rows)} fitted: {dict(verdicts)}; not fitted: {skipped}")
    classes = {row["estimator"].split(" ")[0].rstrip(",") for row in rows}
    summary = {
        "classes": len(classes),
        "fitted": len(rows),
        "verdicts": dict(verdicts),
        "not_fitted": skipped,
    }
    versions = {"sklearn": sklearn.__version__, **environment()}
    write_json(
        RESULTS / "scan_estimators.json",
        {"summary": summary, "estimators": rows, "environment": versions},
    )
    return int(bool(verdicts["missed"] or verdicts["false alarm"]))


if __name__ == "__main__":
    parse_paths(__doc__)
    sys.exit(main())
