"""Find models made of trees, whose leaves, roots and seeds reveal training records."""

from __future__ import annotations

from collections.abc import Iterator

from residuum.errors import CheckpointError
from residuum.io.boosted_files import find_boosted_forests
from residuum.io.forest_files import READERS
from residuum.io.forests import read_forests
from residuum.io.inert import InertObject
from residuum.io.release import Release
from residuum.io.tree import walk
from residuum.io.trees import SAVE_AGAIN, TreeModel, read_tree_model
from residuum.scanning.finding import STATISTICS, STORED, Finding
from residuum.scanning.forests import ADVICE, LIMIT_LEAVES, describe_trees
from residuum.trees.forest import Forest

# Formats of files, other than pickles, that can hold decision trees.
KINDS_OF_TREES = ("onnx", "xgboost", "lightgbm", "catboost")


def find_tree_models(release: Release) -> Iterator[Finding]:
    """Find models made of trees, whose leaves, roots and seeds reveal training records."""
    inner: set[int] = set()
    for place in walk(release.content):
        if not isinstance(place.value, InertObject):
            continue
        tree_model = read_tree_model(place.value, inner)
        if tree_model is None:
            continue
        where = place.path or name_of(release)
        recovered = [*_recover(place.value, where)]
        yield from recovered or _by_structure(tree_model, where)
        if tree_model.may_contain_memory:
            yield _uninitialized_memory(tree_model, where)
    if release.kind in KINDS_OF_TREES:
        try:
            for read_model in read_forests(release):
                yield from _describe_forest(read_model.name, read_model.forest, "the trees")
        except CheckpointError:  # the trees are damaged, or residuum does not read their kind
            return


def _recover(model: InertObject, where: str) -> Iterator[Finding]:
    """Yield findings about the training table that follow from a tree model.

    There are no findings if residuum does not read this model, or if the model is too large for a scan.
    """
    read_trees = READERS.get(model.class_name)
    try:
        if read_trees is None:
            forests = [*find_boosted_forests(model)]
        else:
            forest = read_trees(model)
            forests = [] if forest is None else [(model.class_name, forest)]
    except CheckpointError:
        return
    for name, forest in forests:
        yield from _describe_forest(name, forest, where)


def _describe_forest(name: str, forest: Forest, where: str) -> Iterator[Finding]:
    """Yield findings about the training table that follow from the trees of a forest."""
    for trees in describe_trees(name, forest):
        kind, severity = (STORED, "high") if trees.reveals_records else (STATISTICS, "medium")
        remedy = ADVICE if trees.reveals_records else LIMIT_LEAVES
        yield Finding(kind, severity, trees.what, where, trees.reason, remedy, count=trees.count)


def _by_structure(model: TreeModel, where: str) -> Iterator[Finding]:
    """Yield findings about a tree model from its numbers of leaves and seeds, without recovering records."""
    if model.stores_targets:
        reason = (
            f"{model.single_leaves} of {model.leaves} leaves hold a single training record. Each stores "
            "the target of that record exactly, and its bounds enclose the record's columns"
        )
        finding_title = f"training targets in the leaves of {model.name}"
        yield Finding(
            STORED, "high", finding_title, where, reason, ADVICE, count=model.single_leaves
        )
    if model.determines_targets:
        reason = (
            f"{model.trees} trees store the seeds of their bootstrap samples of {model.records} records. "
            "The value in the root of each tree is a linear equation for the targets or labels. There "
            "are at least as many trees as records, so these equations determine all targets or labels. "
            "The depth of the trees does not matter"
        )
        finding_title = f"targets that follow from the seeds of {model.name}"
        yield Finding(STORED, "high", finding_title, where, reason, ADVICE, count=model.records)
    if not (model.stores_targets or model.determines_targets):
        reason = (
            "thresholds lie between two values of training records, and leaves count their records"
            if model.is_direct
            else "thresholds lie between two values of training records. Leaves store residuals, "
            "gradients or depths, and no targets"
        )
        finding_title, remedy = f"decision trees of {model.name}", LIMIT_LEAVES
        if model.name == "IsolationForest":
            reason = (
                "thresholds are random numbers between the smallest and largest value of a column among some "
                "training records, and leaves count records"
            )
            remedy = "Train each tree on fewer records (max_samples) if the ranges of columns are secret."
        yield Finding(STATISTICS, "medium", finding_title, where, reason, remedy)


def _uninitialized_memory(model: TreeModel, where: str) -> Finding:
    memory_sentence = (
        f"{model.memory} unused bytes of this file are not zero"
        if model.memory
        else "all unused bytes of this file are zero"
    )
    reason = (
        f"the file was written by scikit-learn {model.version}. Before 1.3.2 tree files could "
        f"contain uninitialized memory, which may include training data; {memory_sentence}"
    )
    severity = "high" if model.memory else "low"
    finding_title = f"uninitialized memory in {model.name}"
    return Finding(
        STATISTICS, severity, finding_title, where, reason, SAVE_AGAIN, count=model.memory or None
    )


def name_of(release: Release) -> str:
    """Return the class name of the object in a file, or "" if the content of the file is not an object."""
    return release.content.class_name if isinstance(release.content, InertObject) else ""
