"""Read from the structure of a tree model what it reveals about its training records, without an attack.

A regression tree stores the mean target of the records in each leaf. A leaf with one record therefore
stores the target of this record exactly. The thresholds on the path to the leaf bound the columns of the
record. A forest with bootstrap also stores one integer seed for each tree. The seed determines c_it, how
often record i was drawn for tree t. The value of the root of tree t gives sum_i c_it y_i, where y_i is the
target of record i. If there are at least as many trees
as records, these linear equations determine all targets, for any depth and leaf size.

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
# Models whose trees are fitted to residuals, gradients or random numbers instead of the targets.
INDIRECT = re.compile(
    r"(Hist)?GradientBoosting|AdaBoostClassifier|IsolationForest|RandomTreesEmbedding|"
    r"XGB|LGBM|Booster$|CatBoost"
)
LEAF_CHILD = -1  # scikit-learn stores this number in place of the children of a leaf
PADDING_START = 57  # position of the first padding (unused) byte in a node, counted from 0
SAFE_SINCE = (1, 3, 2)  # first version of scikit-learn that clears the padding of nodes

SAVE_AGAIN = "Load the model with scikit-learn 1.3.2 or later and save it again."


@dataclass(frozen=True)
class TreeModel:
    """What the nodes and the seeds of a tree model show about its training records, without an attack.

    Attributes:
        name: Class of the model.
        is_direct: Whether the trees are fitted to the targets, and not to residuals or random numbers.
        is_regressor: Whether the leaves store numbers, not class counts.
        trees: Number of trees.
        leaves: Number of leaves of all trees.
        single_leaves: Number of leaves with one training record.
        records: Number of training records, None if the model does not store it.
        seeds: Number of trees whose bootstrap sample can be drawn again.
        memory: Number of nonzero bytes in the unused part of the nodes, which can be uninitialized memory.
        version: Version of scikit-learn that wrote the model, "" if the model does not store it.
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
        """Whether leaves with a single record store the target of this record."""
        return self.is_direct and self.is_regressor and self.single_leaves > 0

    @property
    def determines_targets(self) -> bool:
        """Whether the seeds of the trees and the values in their roots determine all training targets."""
        return self.is_direct and self.records is not None and self.seeds >= self.records > 0

    @property
    def may_contain_memory(self) -> bool:
        """Whether the model is from a version of scikit-learn that wrote uninitialized memory into files."""
        version_parts = re.findall(r"\d+", self.version)[:3]
        return bool(self.trees and version_parts) and tuple(map(int, version_parts)) < SAFE_SINCE


def read_tree_model(candidate: InertObject, inner: set[int]) -> TreeModel | None:
    """Read what the structure of a tree model shows about its training records.

    Args:
        candidate: An object of a model file, which may be a tree model.
        inner: The ``id`` of every tree that belongs to a model that was read before. If the object is a tree
            model, the ids of its trees are added to this set.

    Returns:
        The tree model, or None if the object is not a tree model or is part of another tree model.
    """
    if id(candidate) in inner:
        return None
    attributes = candidate.attributes
    is_tree = "tree_" in attributes
    member_trees = [
        *_iterate_objects(attributes.get("estimators_")),
        *([candidate] if is_tree else []),
    ]
    trees = [tree for member in member_trees if (tree := _find_tree(member)) is not None]
    is_indirect = bool(INDIRECT.match(candidate.class_name))
    if not trees and not is_indirect:
        return None
    inner.update(map(id, member_trees))
    seeds = attributes.get("_seeds")
    has_bootstrap = attributes.get("bootstrap") is True
    leaf_counts = [_count_leaves(tree) for tree in trees]
    records, version = attributes.get("_n_samples"), attributes.get("_sklearn_version")
    return TreeModel(
        candidate.class_name,
        is_direct=not is_indirect,
        is_regressor="Regressor" in candidate.class_name,
        trees=len(trees),
        leaves=sum(leaves for leaves, _, _ in leaf_counts),
        single_leaves=sum(single for _, single, _ in leaf_counts),
        records=records if type(records) is int else None,
        seeds=_count_seeds(member_trees, seeds) if has_bootstrap else 0,
        memory=sum(memory for _, _, memory in leaf_counts),
        version=version if isinstance(version, str) else "",
    )


def _iterate_objects(value: Any) -> Iterator[InertObject]:
    """Yield the objects in a nested list or in an array of objects."""
    values = value.objects if isinstance(value, Block) else value
    for entry in values if isinstance(values, list | tuple) else ():
        if isinstance(entry, InertObject):
            yield entry
        else:
            yield from _iterate_objects(entry)


def _find_tree(member: InertObject) -> InertObject | None:
    tree = member.attributes.get("tree_")
    return tree if isinstance(tree, InertObject) and tree.name == TREE else None


def _count_seeds(members: list[InertObject], seeds: Any) -> int:
    """Return the number of trees whose seed is stored, in the tree itself or in a list of the model."""
    if isinstance(seeds, Block) and seeds.shape:
        return seeds.shape[0]
    return sum(type(member.attributes.get("random_state")) is int for member in members)


def _count_leaves(tree: InertObject) -> tuple[int, int, int]:
    """Return the number of leaves, of leaves with one record, and of nonzero padding bytes of a tree."""
    nodes = tree.attributes.get("nodes")
    node_bytes = nodes.raw() if isinstance(nodes, Block) else None
    if node_bytes is None or node_bytes.shape[1] not in (56, 64):
        return 0, 0, 0
    left_child = node_bytes[:, :8].copy().view("<i8")[:, 0]
    record_counts = node_bytes[:, 40:48].copy().view("<i8")[:, 0]
    is_leaf = left_child == LEAF_CHILD
    nonzero_padding = (
        int((node_bytes[:, PADDING_START:] != 0).sum()) if node_bytes.shape[1] == 64 else 0
    )
    return int(is_leaf.sum()), int((is_leaf & (record_counts == 1)).sum()), nonzero_padding
