"""Find the values of a pickled model that predictions do not need, and write code that removes them.

The model is read as inert values, so no code of the pickle runs. Every removal is a Python statement for the
owner of the file. The same removal is made in the inert values, so that a scan of them tells what will
remain.

Estimators can be nested at any depth: in pipelines, grid searches, ensembles, dicts, lists and attributes of
objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from residuum.errors import InputError
from residuum.io.estimators import NETWORKS
from residuum.io.inert import Block, InertObject
from residuum.io.tree import Place, join_path
from residuum.io.trees import PADDING_START, TREE
from residuum.scanning.finding import printable
from residuum.scanning.optimizer_rules import SEEDS
from residuum.scanning.path_rules import find_paths
from residuum.scanning.stored_rules import FRAMES

MAX_DEPTH = 60  # largest nesting depth of values that are searched for values to remove
# A dict with more entries than this is a vocabulary. Its entries are not settings such as seeds and paths.
MAX_SETTINGS = 50
FORESTS = (
    "RandomForestClassifier", "RandomForestRegressor", "ExtraTreesClassifier", "ExtraTreesRegressor",
    "BaggingClassifier", "BaggingRegressor",
)  # fmt: skip
CLUSTERINGS = (
    "AffinityPropagation", "Birch", "BisectingKMeans", "KMeans", "MeanShift", "MiniBatchKMeans",
)  # fmt: skip
PROJECTIONS = ("CCA", "PLSCanonical", "PLSRegression")
COVARIANCES = ("EllipticEnvelope", "MinCovDet")
BOOSTING = ("GradientBoostingClassifier", "GradientBoostingRegressor")
HISTOGRAM_BOOSTING = ("HistGradientBoostingClassifier", "HistGradientBoostingRegressor")

# Attributes of fitted scikit-learn estimators that no prediction reads: for each, the classes that have it,
# and what it holds. The integration tests compare the predictions with and without them.
UNNEEDED: dict[str, tuple[tuple[str, ...], str]] = {
    "_optimizer": (NETWORKS, "sums of the last gradients"),
    "_best_coefs": (NETWORKS, "earlier weights"),
    "_best_intercepts": (NETWORKS, "earlier weights"),
    "_random_state": (NETWORKS, "the state of a random generator"),
    "loss_curve_": (NETWORKS, "the loss of every epoch"),
    "validation_scores_": (NETWORKS, "the score of every epoch"),
    "labels_": (CLUSTERINGS, "the cluster of every training record"),
    "affinity_matrix_": (("AffinityPropagation",), "similarities of training records"),
    "root_": (("Birch",), "means of groups of training records"),
    "dummy_leaf_": (("Birch",), "means of groups of training records"),
    "_x_scores": (PROJECTIONS, "projections of the training records"),
    "_y_scores": (PROJECTIONS, "projections of the training targets"),
    "x_scores_": (PROJECTIONS, "projections of the training records"),
    "y_scores_": (PROJECTIONS, "projections of the training targets"),
    "support_": (COVARIANCES, "which training records were used"),
    "raw_support_": (COVARIANCES, "which training records were used"),
    "dist_": (COVARIANCES, "the distance of every training record"),
    "oob_decision_function_": (FORESTS, "predictions for the training records"),
    "oob_prediction_": (FORESTS, "predictions for the training records"),
    "_seeds": (FORESTS, "the seeds of the bootstrap samples"),
    "outliers_": (("HuberRegressor",), "which training records are outliers"),
    "inlier_mask_": (("RANSACRegressor",), "which training records are outliers"),
    "transduction_": (("SelfTrainingClassifier",), "the label of every training record"),
    "labeled_iter_": (("SelfTrainingClassifier",), "when every training record was labeled"),
    "cv_results_": (("RidgeCV", "RidgeClassifierCV"), "errors for the training records"),
    "stop_words_": (("CountVectorizer", "TfidfVectorizer"), "rare words of the training texts"),
    "_rng": (BOOSTING, "the state of a random generator"),
    "train_score_": ((*BOOSTING, *HISTOGRAM_BOOSTING), "the loss of every iteration"),
    "validation_score_": (HISTOGRAM_BOOSTING, "the loss of every iteration"),
    "oob_scores_": (BOOSTING, "the loss of every iteration"),
    "oob_improvement_": (BOOSTING, "the loss of every iteration"),
    "_random_seed": (HISTOGRAM_BOOSTING, "a seed"),
    "_feature_subsample_rng": (HISTOGRAM_BOOSTING, "the state of a random generator"),
}
# Classes that draw random numbers when they predict or score, so that they need their seed.
RANDOM_PREDICTIONS = ("DummyClassifier", "BernoulliRBM")
# Packages whose estimators keep the seed of the training in ``random_state``.
SEEDED_PACKAGES = ("sklearn.", "xgboost.", "lightgbm.", "imblearn.")
# Attributes that hold a list of (name, estimator) pairs.
NAMED_ESTIMATORS = ("steps", "transformers_", "transformer_list")
TREES_WITH_COUNTS = ("IsolationForest",)  # before scikit-learn 1.3, predictions needed node counts

REMOVE = '''

def remove(estimator, attribute):
    """Remove an attribute, unless it was removed from the same estimator at another place before."""
    vars(estimator).pop(attribute, None)
'''
CLEAR_TREE = '''

def clear_tree(estimator):
    """Remove seed, impurities, counts and values of inner nodes. Predictions read only the leaves."""
    estimator.random_state = None
    state = estimator.tree_.__getstate__()
    nodes = np.zeros_like(state["nodes"])
    for name in nodes.dtype.names:
        if name not in ("impurity", "n_node_samples", "weighted_n_node_samples"):
            nodes[name] = state["nodes"][name]
    state["nodes"] = nodes
    state["values"][nodes["left_child"] != -1] = 0
    estimator.tree_.__setstate__(state)
'''
CLEAR_HISTOGRAM_TREES = '''

def clear_histogram_trees(estimator):
    """Remove counts, gains, values of inner nodes and bins. Predictions read leaves and thresholds."""
    for stage in estimator._predictors:
        for predictor in stage:
            predictor.nodes["count"] = 0
            predictor.nodes["gain"] = 0
            predictor.nodes["value"][predictor.nodes["is_leaf"] == 0] = 0
    mapper = estimator._bin_mapper
    pairs = zip(mapper.bin_thresholds_, mapper.is_categorical_)
    mapper.bin_thresholds_ = [bins if is_category else bins[:0] for bins, is_category in pairs]
'''
# Source code of helper functions for the script of strip, by the name of the function.
HELPERS = {
    "remove": REMOVE,
    "clear_tree": CLEAR_TREE,
    "clear_histogram_trees": CLEAR_HISTOGRAM_TREES,
}


@dataclass
class Removals:
    """The values that strip removes from a pickled model, as Python statements.

    Attributes:
        statements: Python statements, in the order in which they run.
        owners: For each object in the model, its path and the full name of its class.
        labels: For each named part of the model, its path and a text such as "the step 'svc' of Pipeline".
    """

    statements: list[str] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


def remove_unneeded(
    content: Any, record_places: Collection[str] = (), drop: Collection[str] = ()
) -> Removals:
    """Remove from the inert values of a model what predictions do not need. The values are changed in place.

    Args:
        content: The content of a pickle.
        record_places: Paths of arrays and tables of training records. Such an entry of a dict is removed,
            unless the dict is part of an estimator.
        drop: Paths of values to remove, as a scan prints them.

    Returns:
        The Python statements that remove the same values from the model, which has the name ``model``.

    Raises:
        InputError: If no value is at a path in ``drop``, or the value cannot be removed.
    """
    remover = _Remover({*record_places}, {*drop})
    remover.visit(content, "model", "")
    if remover.drop:
        raise InputError(
            "A value that you drop must exist in the file, outside of tuples; there is no such value at "
            f"the place {min(remover.drop)!r}.",
            "Pass a place that `residuum scan FILE` prints.",
        )
    return remover.removals


class _Remover:
    def __init__(self, record_places: set[str], drop: set[str]) -> None:
        self.record_places, self.drop, self.removals = record_places, drop, Removals()
        self._visited_ids: set[int] = set()

    def visit(
        self, value: Any, expression: str, path: str, depth: int = 0, *, in_library: bool = False
    ) -> None:
        """Remove values that predictions do not need from a value and from everything that it contains.

        Args:
            value: The value.
            expression: Python code for the value, such as ``model.steps[1][1]``.
            path: Path of the value as a scan prints it.
            depth: Nesting depth of the value.
            in_library: Whether an object of scikit-learn contains the value.
        """
        is_container = isinstance(value, InertObject | dict | list | tuple | Block)
        if not is_container or id(value) in self._visited_ids or depth > MAX_DEPTH:
            return
        self._visited_ids.add(id(value))
        if isinstance(value, InertObject):
            if FRAMES.match(value.name):
                return
            self.removals.owners[path] = value.name
            is_sklearn = value.name.startswith("sklearn.")
            # A Bunch of scikit-learn is a dict. Users store values of their own in it.
            in_library = in_library or (is_sklearn and value.class_name != "Bunch")
            if is_sklearn:
                self._strip_estimator(value, expression)
            if value.name.startswith(SEEDED_PACKAGES):
                self._strip_seed(value, expression)
            for name, child in value.attributes.items():
                if not name.isidentifier():
                    continue
                child_path = join_path(path, name)
                if self._is_dropped(child_path, f"{expression}.{name}"):
                    _set_attribute(value, name, None)
                    continue
                self._label(value, name, child, child_path)
                self.visit(
                    child,
                    f"{expression}.{name}",
                    child_path,
                    depth + 1,
                    in_library=in_library,
                )
            self._visit_dict(value.entries, expression, path, depth, in_library=in_library)
            self._visit_list(value.items, expression, path, depth, in_library=in_library)
        elif isinstance(value, dict):
            self._visit_dict(value, expression, path, depth, in_library=in_library)
        elif isinstance(value, list | tuple):
            self._visit_list(value, expression, path, depth, in_library=in_library)
        elif isinstance(value, Block) and isinstance(value.objects, list):
            self._visit_list(
                value.objects, f"{expression}.flat", path, depth, in_library=in_library
            )

    def _visit_dict(
        self, entries: dict[Any, Any], expression: str, path: str, depth: int, *, in_library: bool
    ) -> None:
        is_small = len(entries) <= MAX_SETTINGS
        for key in [key for key in entries if isinstance(key, str | int)]:
            child, code = entries[key], f"{expression}[{key!r}]"
            child_path = join_path(path, str(key)[:200])
            if self._is_dropped(child_path, code):
                entries[key] = None
            elif not in_library and (
                child_path in self.record_places
                or (is_small and _is_setting_to_remove(str(key), child))
            ):
                self.removals.statements.append(f"{expression}.pop({key!r}, None)")
                del entries[key]
            else:
                self.visit(child, code, child_path, depth + 1, in_library=in_library)

    def _visit_list(
        self,
        values: list[Any] | tuple[Any, ...],
        expression: str,
        path: str,
        depth: int,
        *,
        in_library: bool,
    ) -> None:
        for i, child in enumerate(values):
            child_path = f"{path}[{i}]"[:120]
            if isinstance(values, list) and self._is_dropped(child_path, f"{expression}[{i}]"):
                values[i] = None
            else:
                self.visit(
                    child, f"{expression}[{i}]", child_path, depth + 1, in_library=in_library
                )

    def _is_dropped(self, path: str, expression: str) -> bool:
        """Return True if the user chose to remove the value at a path, and add the Python statement."""
        if not self.drop or printable(path) not in self.drop:
            return False
        self.drop.discard(printable(path))
        self.removals.statements.append(f"{expression} = None  # dropped by --drop")
        return True

    def _label(self, owner: InertObject, name: str, value: Any, path: str) -> None:
        """Store a description of each named step of a pipeline, such as "the step 'svc' of Pipeline"."""
        if name in NAMED_ESTIMATORS and isinstance(value, list):
            for i, entry in enumerate(value):
                if isinstance(entry, tuple | list) and entry and isinstance(entry[0], str):
                    step_description = f"the step {entry[0][:40]!r} of {owner.class_name}"
                    self.removals.labels[f"{path}[{i}]"] = printable(step_description)
        elif name == "best_estimator_":
            self.removals.labels[path] = f"the best estimator of {owner.class_name}"

    def _strip_estimator(self, estimator: InertObject, expression: str) -> None:
        add_statement = self.removals.statements.append
        for name, (classes, what) in UNNEEDED.items():
            attributes = estimator.attributes
            if estimator.class_name in classes and attributes.get(name) is not None:
                add_statement(f'remove({expression}, "{name}")  # {what}')
                _delete_attribute(estimator, name)
        members = [*_tree_members(estimator.attributes.get("estimators_"))]
        has_counts = estimator.class_name in TREES_WITH_COUNTS
        if members and not has_counts:
            is_array = isinstance(estimator.attributes["estimators_"], Block)
            trees = f"{expression}.estimators_{'.flat' if is_array else ''}"
            add_statement(f"for tree in {trees}:\n    clear_tree(tree)")
            for member in members:
                self._visited_ids.add(id(member))
                _clear_tree(member)
        elif members:
            add_statement(
                f"for tree in {expression}.estimators_:\n    tree.random_state = None  # a seed"
            )
            for member in members:
                self._visited_ids.add(id(member))
                _set_attribute(member, "random_state", None)
        elif _is_tree(estimator):
            add_statement(f"clear_tree({expression})")
            _clear_tree(estimator)
        has_predictors = {"_predictors", "_bin_mapper"} <= {*estimator.attributes}
        if estimator.class_name in HISTOGRAM_BOOSTING and has_predictors:
            add_statement(f"clear_histogram_trees({expression})")

    def _strip_seed(self, estimator: InertObject, expression: str) -> None:
        has_seed = estimator.attributes.get("random_state") is not None
        if has_seed and estimator.class_name not in RANDOM_PREDICTIONS:
            self.removals.statements.append(f"{expression}.random_state = None  # a seed")
            _set_attribute(estimator, "random_state", None)


def _is_setting_to_remove(name: str, value: Any) -> bool:
    """Return True if an entry of a dict next to a model is a seed or the name of a file."""
    if isinstance(value, str):
        return any(find_paths(Place(name, name, "", value)))
    return type(value) is int and bool(SEEDS.match(name))


def _is_tree(value: Any) -> bool:
    tree = value.attributes.get("tree_") if isinstance(value, InertObject) else None
    return isinstance(tree, InertObject) and tree.name == TREE


def _tree_members(members: Any) -> Iterator[InertObject]:
    """Yield the trees of an ensemble, or nothing if one of its members is not a tree."""
    member_trees = members.objects if isinstance(members, Block) else members
    if isinstance(member_trees, list) and all(map(_is_tree, member_trees)):
        yield from member_trees


def _states(inert_object: InertObject) -> Iterator[dict[Any, Any]]:
    state = inert_object.state
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, dict):
            yield attributes


def _set_attribute(inert_object: InertObject, name: str, value: Any) -> None:
    for attributes in _states(inert_object):
        if name in attributes:
            attributes[name] = value


def _delete_attribute(inert_object: InertObject, name: str) -> None:
    for attributes in _states(inert_object):
        attributes.pop(name, None)


def _clear_tree(estimator: InertObject) -> None:
    """Clear the node statistics of a tree in its description, as the script does in the model."""
    _set_attribute(estimator, "random_state", None)
    tree = estimator.attributes["tree_"]
    nodes, values = tree.attributes.get("nodes"), tree.attributes.get("values")
    if not isinstance(nodes, Block) or not isinstance(values, Block):
        return
    raw_nodes = nodes.raw()
    if raw_nodes is None or raw_nodes.shape[1] not in (56, 64) or values.read is None:
        return
    cleared_nodes = raw_nodes.copy()
    cleared_nodes[:, 32:56] = 0  # bytes of impurity, n_node_samples and weighted_n_node_samples
    cleared_nodes[:, PADDING_START:] = 0
    is_inner = cleared_nodes[:, :8].copy().view("<i8")[:, 0] != -1
    leaf_values = values.tensor().clone()
    if len(leaf_values) == len(is_inner):
        leaf_values[torch.from_numpy(is_inner)] = 0
    read: Callable[[], torch.Tensor] = lambda: leaf_values  # noqa: E731
    _set_attribute(tree, "nodes", Block(nodes.shape, nodes.kind, structures=lambda: cleared_nodes))
    _set_attribute(tree, "values", Block(values.shape, values.kind, read=read))
