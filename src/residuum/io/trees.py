"""What a file of trees reveals about its training records, read from its structure without an attack.

A regression tree stores the mean target of the records in each leaf. A leaf with one record therefore
stores that record's target exactly, and its bounds enclose the record's columns. A forest with bootstrap
also stores one integer seed per tree. The seed tells how often each record i was drawn for tree t, c_it,
and the root of tree t stores sum_i c_it y_i. If there are at least as many trees as records, these are
enough linear equations for all targets, whatever the depth and the leaf size.

Trees of boosting are fitted to residuals or gradients, and isolation forests to random numbers. Their
thresholds still lie between two values of the training data.

Nodes of scikit-learn are records of 56 bytes, or of 64 since version 1.3::

    left_child i8, right_child i8, feature i8, threshold f8, impurity f8, n_node_samples i8,
    weighted_n_node_samples f8, missing_go_to_left u1, padding
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from residuum.io.inert import Block, InertObject

TREE = "sklearn.tree._tree.Tree"
# Models whose trees are not fitted to the targets themselves.
INDIRECT = re.compile(
    r"(Hist)?GradientBoosting|AdaBoostClassifier|IsolationForest|RandomTreesEmbedding|"
    r"XGB|LGBM|Booster$|CatBoost"
)
LEAF_CHILD = -1  # the left child of a leaf
PADDING_SINCE, SAFE_SINCE = 57, (1, 3, 2)  # byte of a node; version of scikit-learn

WHAT_PROTECTS = (
    "Do not release this file. To make such a model safer, set min_samples_leaf to at least 5, use fewer "
    "trees than records, and remove the seeds of the trees (random_state) before saving. Bagging and "
    "leaving out the counts do not protect."
)
LIMIT_TREES = (
    "Set min_samples_leaf to at least 5 and limit the number of trees. Bagging and leaving out the counts "
    "do not protect."
)
SAVE_AGAIN = "Load the model with scikit-learn 1.3.2 or later and save it again."


@dataclass(frozen=True)
class TreeModel:
    """A model made of trees, as far as its structure shows.

    name: its class.
    is_direct: whether its trees are fitted to the targets, and not to residuals or random numbers.
    is_regressor: whether its leaves store numbers and not class counts.
    trees: how many there are.
    leaves, single_leaves: of all trees, and those with one training record.
    records: training records, None if the model does not say.
    seeds: trees whose bootstrap sample can be drawn again.
    memory: bytes of uninitialized memory that the node arrays contain.
    version: of scikit-learn that wrote the model, "" if it is not stored.
    """

    name: str
    is_direct: bool
    is_regressor: bool
    trees: int = 0
    leaves: int = 0
    single_leaves: int = 0
    records: int | None = None
    seeds: int = 0
    memory: int = 0
    version: str = ""

    @property
    def stores_targets(self) -> bool:
        """Whether leaves store targets of single records."""
        return self.is_direct and self.is_regressor and self.single_leaves > 0

    @property
    def determines_targets(self) -> bool:
        """Whether the roots and seeds are enough equations for all targets."""
        return self.is_direct and self.records is not None and self.seeds >= self.records > 0

    @property
    def may_contain_memory(self) -> bool:
        """Whether scikit-learn of this version wrote uninitialized memory into tree files."""
        numbers = re.findall(r"\d+", self.version)[:3]
        return bool(self.trees and numbers) and tuple(map(int, numbers)) < SAFE_SINCE


def read_tree_model(thing: InertObject, inner: set[int]) -> TreeModel | None:
    """Return the tree model that ``thing`` is, or None if it is none.

    Args:
        thing: An object of a release.
        inner: Identities of trees that belong to a model that was seen before. The trees of this model
            are added.
    """
    if id(thing) in inner:
        return None
    parts = thing.attributes
    members = [*_things(parts.get("estimators_")), *([thing] if "tree_" in parts else [])]
    trees = [tree for member in members if (tree := _tree_of(member)) is not None]
    indirect = bool(INDIRECT.match(thing.class_name))
    if not trees and not indirect:
        return None
    inner.update(map(id, members))
    seeds = parts.get("_seeds")
    drawn = parts.get("bootstrap") is True
    counts = [_count_leaves(tree) for tree in trees]
    records, version = parts.get("_n_samples"), parts.get("_sklearn_version")
    return TreeModel(
        thing.class_name,
        is_direct=not indirect,
        is_regressor="Regressor" in thing.class_name,
        trees=len(trees),
        leaves=sum(leaves for leaves, _, _ in counts),
        single_leaves=sum(single for _, single, _ in counts),
        records=records if type(records) is int else None,
        seeds=_count_seeds(members, seeds) if drawn else 0,
        memory=sum(memory for _, _, memory in counts),
        version=version if isinstance(version, str) else "",
    )


def _things(value: Any) -> Iterator[InertObject]:
    """Yield the objects of a list, or of an array of objects, of any number of dimensions."""
    values = value.objects if isinstance(value, Block) else value
    for one in values if isinstance(values, list | tuple) else ():
        if isinstance(one, InertObject):
            yield one
        else:
            yield from _things(one)


def _tree_of(member: InertObject) -> InertObject | None:
    tree = member.attributes.get("tree_")
    return tree if isinstance(tree, InertObject) and tree.name == TREE else None


def _count_seeds(members: list[InertObject], seeds: Any) -> int:
    """Return how many trees have a seed of their own, in the tree or in a list of the model."""
    if isinstance(seeds, Block) and seeds.shape:
        return seeds.shape[0]
    return sum(type(member.attributes.get("random_state")) is int for member in members)


def _count_leaves(tree: InertObject) -> tuple[int, int, int]:
    """Return leaves, leaves with one record, and bytes of padding that are not zero; 0 if not known."""
    nodes = tree.attributes.get("nodes")
    raw = nodes.raw() if isinstance(nodes, Block) else None
    if raw is None or raw.shape[1] not in (56, 64):
        return 0, 0, 0
    left = raw[:, :8].copy().view("<i8")[:, 0]
    samples = raw[:, 40:48].copy().view("<i8")[:, 0]
    is_leaf = left == LEAF_CHILD
    memory = int((raw[:, PADDING_SINCE:] != 0).sum()) if raw.shape[1] == 64 else 0
    return int(is_leaf.sum()), int((is_leaf & (samples == 1)).sum()), memory
