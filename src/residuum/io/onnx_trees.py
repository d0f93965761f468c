"""Read decision trees from an ONNX graph: TreeEnsembleRegressor, TreeEnsembleClassifier and TreeEnsemble.

A node of these operators compares one column with a threshold. A leaf has weights, which are added to the
outputs. An ONNX file stores no seeds, no numbers of records, and no values of inner nodes.

The operators add the trees. So a converter divides the leaf values of a random forest by the number of trees
T. We multiply by T, so that leaf values are targets again. Three things tell a random forest from boosting:

- A random forest has no base values (numbers that boosting adds to the sum of its trees).
- The leaf values of a classification forest are probabilities of classes: they lie between 0 and 1/T, and no
  function such as the softmax follows.
- The trees of a regression forest are fitted to the same targets. So many leaves of different trees have the
  same value, or at least the leaf values of all trees have similar ranges. Trees of boosting are fitted to
  residuals, which become smaller with every tree.

ONNX files usually store float32 numbers. A converter rounds a threshold t down to float32, because float32
values are then compared in the same way. So the stored number s satisfies s <= t < next float32 number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from residuum.errors import CheckpointError
from residuum.io.decision_trees import COPY_AGAIN, MAX_COLUMNS, MAX_NODES, check_forest
from residuum.trees.forest import AVERAGE, BOOSTING, NO_CHILD, Floats, Forest, Integers, Tree
from residuum.trees.nodes import order_nodes

REGRESSOR, CLASSIFIER, ENSEMBLE = (
    "TreeEnsembleRegressor",
    "TreeEnsembleClassifier",
    "TreeEnsemble",
)
DOMAINS = ("ai.onnx.ml", "com.microsoft", "")
# ONNX operators that may use the outputs of trees. After other operators, leaf values are no predictions, as
# in isolation forests.
HARMLESS = (
    "Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Concat", "ReduceMean", "ZipMap",
    "ArgMax", "ArrayFeatureExtractor", "Normalizer",
)  # fmt: skip
MAX_VALUES = 50_000_000  # largest number of leaf values of all trees
MAX_TARGETS = 10_000  # largest number of targets or classes
# We assume a random forest if, in every tree, the range of leaf values (largest minus smallest) is at least
# this fraction of the largest such range.
SAME_RANGE = 0.3
# We assume a random forest if at least this fraction of all leaf values occur in several trees.
SHARED_VALUES = 0.2
SHARE_ERROR = 1e-3  # largest rounding error of a class share that a file stores
# Exceptions that the code may raise if an attribute of an operator has a wrong type or value.
MALFORMED = (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, RuntimeError)
NOT_A_TREE = "the nodes of a tree do not form one tree"
EQUAL_MODES = {"BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER"}
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


@dataclass(frozen=True)
class NodeTable:
    """The nodes of all trees of an operator.

    Attributes:
        roots: Index of the root of each tree.
        left_child: Index of the left child of each node, -1 for a leaf.
        right_child: Index of the right child of each node, -1 for a leaf.
        feature: Column that each node splits.
        threshold: Threshold of each node.
        missing_left: Whether missing values go to the left child of each node.
        weights: (nodes, outputs) weights of the leaves.
        is_strict: Whether a value that equals a threshold goes to the right child.
    """

    roots: Integers
    left_child: Integers
    right_child: Integers
    feature: Integers
    threshold: Floats
    missing_left: np.ndarray
    weights: Floats
    is_strict: bool

    def trees(self) -> list[Tree]:
        """Return the trees, with the nodes of each tree in the order from the root to the leaves.

        Returns:
            The trees.

        Raises:
            ValueError: If the nodes do not form trees.
        """
        tree_of_node = _number_trees(self.roots, self.left_child, self.right_child)
        if tree_of_node is None:
            raise ValueError(NOT_A_TREE)
        nodes_by_tree = np.argsort(tree_of_node, kind="stable")
        tree_starts = np.searchsorted(tree_of_node[nodes_by_tree], np.arange(len(self.roots) + 1))
        index_in_tree = np.zeros(len(tree_of_node), dtype=np.int64)
        trees = []
        for tree, root in enumerate(self.roots.tolist()):
            tree_nodes = nodes_by_tree[tree_starts[tree] : tree_starts[tree + 1]]
            tree_nodes = np.concatenate([[root], tree_nodes[tree_nodes != root]])
            index_in_tree[tree_nodes] = np.arange(len(tree_nodes))
            trees.append(self._tree(tree_nodes, index_in_tree))
        return trees

    def _tree(self, tree_nodes: Integers, index_in_tree: Integers) -> Tree:
        """Return a tree with parents before children.

        Args:
            tree_nodes: Indices of the nodes of the tree in the table, the root first.
            index_in_tree: For each node of the table, its index in ``tree_nodes``.

        Returns:
            The tree.

        Raises:
            ValueError: If the nodes do not form one tree.
        """
        is_leaf = self.left_child[tree_nodes] == NO_CHILD
        left_child, right_child = (
            np.where(is_leaf, NO_CHILD, index_in_tree[child[tree_nodes]])
            for child in (self.left_child, self.right_child)
        )
        nodes_in_order = order_nodes(left_child, right_child)
        if nodes_in_order is None:
            raise ValueError(NOT_A_TREE)
        new_index = np.argsort(nodes_in_order)
        tree_nodes, is_leaf = tree_nodes[nodes_in_order], is_leaf[nodes_in_order]
        return Tree(
            left=np.where(is_leaf, NO_CHILD, new_index[left_child[nodes_in_order]]),
            right=np.where(is_leaf, NO_CHILD, new_index[right_child[nodes_in_order]]),
            feature=self.feature[tree_nodes],
            threshold=self.threshold[tree_nodes].astype(np.float64),
            value=np.where(is_leaf[:, None], self.weights[tree_nodes], np.nan),
            missing_left=self.missing_left[tree_nodes],
        )


def _number_trees(roots: Integers, left_child: Integers, right_child: Integers) -> Integers | None:
    """Return the index of the tree of each node, or None if a node belongs to no tree or to several trees."""
    tree_of_node = np.full(len(left_child), -1)
    if len(np.unique(roots)) < len(roots):
        return None
    level_nodes, level_trees = roots, np.arange(len(roots))
    visited_nodes = 0
    while len(level_nodes):
        visited_nodes += len(level_nodes)
        if visited_nodes > len(left_child):
            return None
        tree_of_node[level_nodes] = level_trees
        is_inner = left_child[level_nodes] != NO_CHILD
        parents = level_nodes[is_inner]
        level_trees = np.repeat(level_trees[is_inner], 2)
        level_nodes = np.stack([left_child[parents], right_child[parents]], 1).ravel()
    return tree_of_node if (tree_of_node >= 0).all() and visited_nodes == len(left_child) else None


def find_onnx_forests(graph: Any, producer: str) -> Iterator[tuple[str, Forest]]:
    """Yield the operator and the structure of every forest in an ONNX graph.

    Args:
        graph: The graph.
        producer: Name of the program that wrote the file, or "" if the file does not name it.

    Yields:
        The name of the operator and the forest.

    Raises:
        CheckpointError: If a forest is damaged.
    """
    try:
        yield from _find_forests(graph, producer)
    except MALFORMED as problem:
        raise CheckpointError(
            "The arrays of a tree ensemble in ONNX (such as nodes, leaves and thresholds) must have "
            "matching lengths and values; in this file, the arrays do not match "
            f"({type(problem).__name__}: {str(problem)[:100]}).",
            COPY_AGAIN,
        ) from problem


def _find_forests(graph: Any, producer: str) -> list[tuple[str, Forest]]:
    forests: list[tuple[str, Forest]] = []
    averaged_forests: list[tuple[str, Forest]] = []
    graph_column_count = _graph_columns(graph)
    for node in graph.node:
        if node.op_type not in (REGRESSOR, CLASSIFIER, ENSEMBLE) or node.domain not in DOMAINS:
            continue
        following_operators = _following_operators(graph, list(node.output))
        if not following_operators.issubset(HARMLESS):
            continue
        column_subset = _column_subset(graph, node.input[0])
        column_count = graph_column_count if column_subset is None else len(column_subset)
        forest = _read_forest(node, column_count, producer)
        if column_subset is not None:
            forest = _map_columns(forest, column_subset, graph_column_count)
        check_forest(forest)
        is_averaged = "ReduceMean" in following_operators and forest.kind == AVERAGE
        (averaged_forests if is_averaged else forests).append((node.op_type, forest))
    if averaged_forests:
        forests.append((averaged_forests[0][0], _join([forest for _, forest in averaged_forests])))
    return forests


def _join(averaged_forests: list[Forest]) -> Forest:
    """Return one forest with the trees of several ONNX operators whose outputs are averaged."""
    first_forest = averaged_forests[0]
    output_counts = {tree.value.shape[1] for forest in averaged_forests for tree in forest.trees}
    comparison_settings = {
        (forest.is_strict, forest.compares_doubles) for forest in averaged_forests
    }
    if len(output_counts) > 1 or len(comparison_settings) > 1:
        raise CheckpointError(
            "If an ONNX graph averages the outputs of trees, all trees must have the same number of outputs "
            "and compare values in the same way; the trees in this file do not.",
            COPY_AGAIN,
        )
    return replace(
        first_forest,
        trees=tuple(tree for forest in averaged_forests for tree in forest.trees),
        columns=max(forest.columns for forest in averaged_forests),
    )


def _graph_columns(graph: Any) -> int:
    """Return the number of columns of the input of an ONNX graph, or 0 if the file does not state it."""
    if len(graph.input) != 1:
        return 0
    input_shape = graph.input[0].type.tensor_type.shape
    columns = input_shape.dim[-1].dim_value if len(input_shape.dim) == 2 else 0
    return int(columns) if 0 < columns <= MAX_COLUMNS else 0


def _following_operators(graph: Any, outputs: list[str]) -> set[str]:
    """Return the types of all ONNX operators that use one of the outputs, directly or indirectly."""
    operators: set[str] = set()
    users: dict[str, list[Any]] = {}
    for node in graph.node:
        for value_name in node.input:
            users.setdefault(value_name, []).append(node)
    visited_names: set[str] = set()
    stack = list(outputs)
    while stack:
        value_name = stack.pop()
        if value_name in visited_names:
            continue
        visited_names.add(value_name)
        for node in users.get(value_name, ()):
            operators.add(node.op_type)
            stack += node.output
    return operators


def _column_subset(graph: Any, name: str) -> Integers | None:
    """Return the columns of the graph's input that an operator reads, or None if it reads all columns."""
    producing_node = next((node for node in graph.node if name in node.output), None)
    if producing_node is None or producing_node.op_type in ("Identity", "Cast"):
        return None
    index_tensor = None
    if (
        producing_node.op_type in ("Gather", "ArrayFeatureExtractor")
        and len(producing_node.input) == 2
    ):
        index_tensor = next(
            (t for t in graph.initializer if t.name == producing_node.input[1]), None
        )
    if index_tensor is None:
        raise CheckpointError(
            "The trees of an ONNX graph must receive the input columns unchanged; in this graph, the "
            f"operator {producing_node.op_type[:60]!r} changes the columns first.",
            "Export only the trees, without scalers or other transformers of the pipeline.",
        )
    return _to_array(index_tensor).ravel().astype(np.int64)


def _map_columns(forest: Forest, column_subset: Integers, columns: int) -> Forest:
    """Return a forest that reads some columns, with the column indices of the whole table."""
    in_range = bool(((column_subset >= 0) & (column_subset < (columns or MAX_COLUMNS))).all())
    inner_features = [tree.feature[tree.left != NO_CHILD] for tree in forest.trees]
    if not in_range or any(
        (f < 0).any() or (f >= len(column_subset)).any() for f in inner_features
    ):
        raise CheckpointError(
            "The splits of an ONNX tree must use input columns of the graph; a split in this file uses a "
            "column that does not exist.",
            COPY_AGAIN,
        )
    trees = tuple(
        replace(
            tree,
            feature=np.where(
                tree.left == NO_CHILD,
                0,
                column_subset[tree.feature.clip(0, len(column_subset) - 1)],
            ),
        )
        for tree in forest.trees
    )
    return replace(forest, trees=trees, columns=columns or int(column_subset.max()) + 1)


def _to_array(tensor: Any) -> np.ndarray:
    """Return the numbers of a tensor of an ONNX file. Numbers in another file are not read."""
    from onnx import TensorProto, numpy_helper

    if tensor.data_location == TensorProto.EXTERNAL:
        raise ValueError("the numbers are in another file")
    array = numpy_helper.to_array(tensor)
    if array.dtype.kind not in "fiub":
        raise ValueError("a tensor does not hold numbers")
    return array


def _attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of an operator by name: numbers, texts, arrays or lists of texts."""
    from onnx import AttributeProto

    attributes: dict[str, Any] = {}
    for attribute in node.attribute:
        match attribute.type:
            case AttributeProto.INT:
                attributes[attribute.name] = int(attribute.i)
            case AttributeProto.STRING:
                attributes[attribute.name] = attribute.s.decode("ascii", "replace")
            case AttributeProto.INTS:
                attributes[attribute.name] = np.array(attribute.ints, dtype=np.int64)
            case AttributeProto.FLOATS:
                attributes[attribute.name] = np.array(attribute.floats, dtype=np.float32)
            case AttributeProto.STRINGS:
                texts = [text.decode("ascii", "replace") for text in attribute.strings]
                attributes[attribute.name] = texts
            case AttributeProto.TENSOR:
                attributes[attribute.name] = _to_array(attribute.t)
    return attributes


def _numbers(attributes: dict[str, Any], name: str) -> np.ndarray | None:
    """Return the numbers of an ONNX attribute. Numbers in a tensor are float64, others float32."""
    return attributes.get(name, attributes.get(f"{name}_as_tensor"))


def _read_forest(node: Any, columns: int, producer: str) -> Forest:
    attributes = _attributes(node)
    is_classifier = node.op_type == CLASSIFIER
    if node.op_type == ENSEMBLE:
        node_table = _read_new_table(attributes)
        base_values = None
    else:
        attribute_prefix = "class" if is_classifier else "target"
        node_table = _read_table(
            attributes, attribute_prefix, _output_count(attributes, is_classifier)
        )
        base_values = _numbers(attributes, "base_values")
    if base_values is not None and not np.isfinite(base_values).all():
        raise ValueError("a base value is not a finite number")
    averaged, summed = ("AVERAGE", "SUM") if node.op_type != ENSEMBLE else (0, 1)
    aggregate = attributes.get("aggregate_function", summed)
    if aggregate not in (averaged, summed):
        raise ValueError("the outputs of the trees are neither added nor averaged")
    post_transform = attributes.get("post_transform", "NONE")
    trees = node_table.trees()
    inner_features = np.concatenate([tree.feature[tree.left != NO_CHILD] for tree in trees])
    forest = Forest(
        trees=tuple(trees),
        columns=columns or int(inner_features.max(initial=0)) + 1,
        is_classifier=is_classifier,
        library=producer[:60],
        is_strict=node_table.is_strict,
        compares_doubles=node_table.threshold.dtype == np.float64,
        has_rounded_thresholds=True,
    )
    has_base = base_values is not None and bool((base_values != 0).any())
    leaf_factor = 1 if aggregate == averaged else len(trees)
    if is_classifier:
        may_have_shares = not has_base and post_transform == "NONE"
        share_forest = _class_shares(forest, attributes, leaf_factor) if may_have_shares else None
        if share_forest is not None:
            return share_forest
    elif not has_base and post_transform in ("NONE", 0):
        is_sum = aggregate == summed
        if not is_sum or _is_fitted_to_targets(trees, producer):
            return _scale(forest, leaf_factor)
    return _as_boosting(forest, base_values)


def _output_count(attributes: dict[str, Any], is_classifier: bool) -> int:
    """Return the number of targets of a regressor, or the number of classes of a classifier."""
    classes = int(attributes["class_ids"].max()) + 1 if is_classifier else 0
    output_count = classes if is_classifier else attributes.get("n_targets", 1)
    if not 1 <= output_count <= MAX_TARGETS:
        raise ValueError("the number of targets or classes is out of range")
    return output_count


def _read_table(attributes: dict[str, Any], prefix: str, output_count: int) -> NodeTable:
    """Read the nodes of a TreeEnsembleRegressor or a TreeEnsembleClassifier."""
    modes = np.array(attributes["nodes_modes"])
    threshold = _numbers(attributes, "nodes_values")
    leaf_weights = _numbers(attributes, f"{prefix}_weights")
    tree_numbers, node_numbers = attributes["nodes_treeids"], attributes["nodes_nodeids"]
    if threshold is None or leaf_weights is None or not 0 < len(modes) <= MAX_NODES:
        raise ValueError("the nodes or the leaf values are missing")
    if len(modes) * output_count > MAX_VALUES:
        raise ValueError("the leaves have too many values")
    tree_numbers_in_order = np.unique(tree_numbers)
    node_keys = _keys(tree_numbers_in_order, tree_numbers, node_numbers)
    sorted_nodes = np.argsort(node_keys, kind="stable")
    if (np.diff(node_keys[sorted_nodes]) == 0).any():
        raise ValueError("two nodes of a tree have the same number")

    def find(tree_ids: Any, node_ids: Any) -> Integers:
        wanted_keys = _keys(tree_numbers_in_order, tree_ids, node_ids)
        position_in_order = np.searchsorted(node_keys[sorted_nodes], wanted_keys).clip(
            max=len(node_keys) - 1
        )
        if (node_keys[sorted_nodes][position_in_order] != wanted_keys).any():
            raise ValueError("a number of a node belongs to no node")
        return sorted_nodes[position_in_order]

    is_leaf = modes == "LEAF"
    inner_nodes = np.flatnonzero(~is_leaf)
    true_child, false_child = np.full(len(modes), NO_CHILD), np.full(len(modes), NO_CHILD)
    true_child[inner_nodes] = find(
        tree_numbers[inner_nodes], attributes["nodes_truenodeids"][inner_nodes]
    )
    false_child[inner_nodes] = find(
        tree_numbers[inner_nodes], attributes["nodes_falsenodeids"][inner_nodes]
    )
    weights = np.zeros((len(modes), output_count))
    leaf_nodes = find(attributes[f"{prefix}_treeids"], attributes[f"{prefix}_nodeids"])
    leaf_outputs = attributes[f"{prefix}_ids"]
    if (leaf_outputs < 0).any() or (leaf_outputs >= output_count).any():
        raise ValueError("a leaf names an output that does not exist")
    np.add.at(weights, (leaf_nodes, leaf_outputs), leaf_weights.astype(np.float64))
    has_parent = np.zeros(len(modes), dtype=bool)
    has_parent[true_child[inner_nodes]] = has_parent[false_child[inner_nodes]] = True
    roots = np.flatnonzero(~has_parent)
    roots = roots[np.argsort(tree_numbers[roots], kind="stable")]
    if len(roots) != len(tree_numbers_in_order):
        raise ValueError("a tree must have one root")
    return _make_node_table(
        modes=modes,
        roots=roots,
        true_child=true_child,
        false_child=false_child,
        feature=attributes["nodes_featureids"],
        threshold=threshold,
        missing_true=attributes.get("nodes_missing_value_tracks_true"),
        weights=weights,
    )


def _keys(trees: Integers, tree_ids: Any, node_ids: Any) -> Integers:
    """Return a different number (a key) for each pair of a tree and a node, for lookups in a sorted array."""
    if not ((node_ids >= 0) & (node_ids < 2**31)).all():
        raise ValueError("a number of a node is out of range")
    tree_index = np.searchsorted(trees, tree_ids).clip(max=len(trees) - 1)
    if (trees[tree_index] != tree_ids).any():
        raise ValueError("a number of a tree belongs to no tree")
    return tree_index * 2**31 + node_ids


def _read_new_table(attributes: dict[str, Any]) -> NodeTable:
    """Read the nodes of a TreeEnsemble, which numbers inner nodes and leaves separately."""
    threshold = attributes["nodes_splits"]
    leaf_weights, leaf_targets = attributes["leaf_weights"], attributes["leaf_targetids"]
    inner_count, leaf_count = len(threshold), len(leaf_weights)
    output_count = attributes.get("n_targets", 1)
    if not 0 < inner_count + leaf_count <= MAX_NODES or not 1 <= output_count <= MAX_TARGETS:
        raise ValueError("the number of nodes or targets is out of range")
    if (inner_count + leaf_count) * output_count > MAX_VALUES or len(leaf_targets) != leaf_count:
        raise ValueError("the leaves have too many values")
    if (leaf_targets < 0).any() or (leaf_targets >= output_count).any():
        raise ValueError("a leaf names an output that does not exist")
    true_and_false_children = []
    for side in ("true", "false"):
        child, is_leaf = attributes[f"nodes_{side}nodeids"], attributes[f"nodes_{side}leafs"] != 0
        if ((child < 0) | (child >= np.where(is_leaf, leaf_count, inner_count))).any() or len(
            child
        ) != inner_count:
            raise ValueError("a number of a node belongs to no node")
        true_and_false_children.append(
            np.concatenate(
                [np.where(is_leaf, inner_count + child, child), np.full(leaf_count, NO_CHILD)]
            )
        )
    roots = attributes["tree_roots"]
    if not len(roots) or (roots < 0).any() or (roots >= inner_count).any():
        raise ValueError("a root belongs to no node")
    weights = np.zeros((inner_count + leaf_count, output_count))
    weights[inner_count + np.arange(leaf_count), leaf_targets] = leaf_weights
    modes = attributes["nodes_modes"].astype(np.int64)
    if ((modes < 0) | (modes >= len(MODES))).any():
        raise ValueError("a node compares with a set of values")
    leaf_thresholds = np.zeros(leaf_count, dtype=threshold.dtype)
    missing_satisfies = attributes.get("nodes_missing_value_tracks_true")
    return _make_node_table(
        modes=np.concatenate([np.array(MODES)[modes], np.full(leaf_count, "LEAF")]),
        roots=roots.astype(np.int64),
        true_child=true_and_false_children[0],
        false_child=true_and_false_children[1],
        feature=np.concatenate(
            [attributes["nodes_featureids"], np.zeros(leaf_count, dtype=np.int64)]
        ),
        threshold=np.concatenate([threshold, leaf_thresholds]),
        missing_true=None
        if missing_satisfies is None
        else np.concatenate([missing_satisfies, np.zeros(leaf_count, dtype=np.int64)]),
        weights=weights,
    )


def _make_node_table(
    *,
    modes: np.ndarray,
    roots: Integers,
    true_child: Integers,
    false_child: Integers,
    feature: Integers,
    threshold: np.ndarray,
    missing_true: Any,
    weights: Floats,
) -> NodeTable:
    """Return the nodes with the child for values below the threshold as the left child.

    Args:
        modes: How each node compares, such as "BRANCH_LEQ", and "LEAF" for a leaf.
        roots: Index of the root of each tree.
        true_child: Index of the child for values that satisfy the comparison of the node.
        false_child: Index of the child for values that do not satisfy the comparison.
        feature: Column that each node splits.
        threshold: Threshold of each node.
        missing_true: Whether missing values satisfy the comparison, None if they never do.
        weights: (nodes, outputs) weights of the leaves.

    Returns:
        The nodes.

    Raises:
        CheckpointError: If a node does not compare a value with a threshold.
        ValueError: If the arrays have different lengths, or if a threshold is not a number.
    """
    node_count = len(modes)
    is_leaf = modes == "LEAF"
    comparisons = set(modes[~is_leaf].tolist())
    if EQUAL_MODES & comparisons or not comparisons.issubset(MODES):
        raise CheckpointError(
            "The nodes of a tree must compare values with thresholds (<=, <, >=, >); a node in this file "
            "compares in another way.",
            "Encode the categories as numbers and train the model again.",
        )
    # For the comparisons x < t and x >= t, a value x = t goes to the child for large values.
    is_strict = comparisons.issubset({"BRANCH_LT", "BRANCH_GTE"}) and bool(comparisons)
    if not is_strict and not comparisons.issubset({"BRANCH_LEQ", "BRANCH_GT"}):
        raise CheckpointError(
            "All nodes of a tree ensemble must treat a value that equals the threshold in the same way; in "
            "this file, some nodes send such a value to the left child and some to the right child.",
            "Export the model again with skl2onnx or onnxmltools.",
        )
    if any(len(array) != node_count for array in (feature, threshold)):
        raise ValueError("a node has no column or no threshold")
    is_left_false = np.isin(modes, ["BRANCH_GT", "BRANCH_GTE"])
    missing_satisfies = (
        np.zeros(node_count, dtype=bool) if missing_true is None else missing_true != 0
    )
    if len(missing_satisfies) != node_count:
        raise ValueError("a node has no direction for missing values")
    inner_thresholds = threshold[~is_leaf]
    if inner_thresholds.dtype.kind != "f" or np.isnan(inner_thresholds).any():
        raise ValueError("a threshold is not a number")
    return NodeTable(
        roots=roots,
        left_child=np.where(is_left_false, false_child, true_child),
        right_child=np.where(is_left_false, true_child, false_child),
        feature=feature,
        threshold=threshold,
        missing_left=missing_satisfies != is_left_false,
        weights=weights,
        is_strict=is_strict,
    )


def _scale(forest: Forest, factor: float) -> Forest:
    trees = (replace(tree, value=tree.value * factor) for tree in forest.trees)
    return replace(forest, trees=tuple(trees))


def _class_shares(forest: Forest, attributes: dict[str, Any], factor: int) -> Forest | None:
    """Return a classification forest if its leaf values are class probabilities, or None otherwise.

    The leaves of a forest for two classes may store only the share of the second class.

    Args:
        forest: The trees with the leaf values of the file.
        attributes: The attributes of the operator.
        factor: Number by which the program that wrote the ONNX file divided the class shares.

    Returns:
        The forest.
    """
    labels = attributes.get("classlabels_int64s", attributes.get("classlabels_strings", ()))
    is_binary = len(labels) == 2 and not attributes["class_ids"].any()
    trees = []
    for tree in forest.trees:
        node_shares = tree.value * factor
        if is_binary:
            node_shares = np.stack([1 - node_shares[:, 0], node_shares[:, 0]], 1)
        leaf_shares = node_shares[tree.left == NO_CHILD]
        if not (
            (leaf_shares >= -SHARE_ERROR).all()
            and (np.abs(leaf_shares.sum(1) - 1) <= SHARE_ERROR).all()
        ):
            return None
        trees.append(replace(tree, value=np.maximum(node_shares, 0.0)))
    return replace(forest, trees=tuple(trees))


def _is_fitted_to_targets(trees: list[Tree], producer: str) -> bool:
    """Return True if all trees seem to be fitted to the same targets, as in a random forest."""
    # Trees of a random forest share many leaf values, or their leaf values have similar ranges.
    leaf_values = [tree.value[tree.left == NO_CHILD] for tree in trees]
    if len(trees) == 1:
        return True
    distinct_values = np.concatenate(
        [np.unique(tree_values, axis=0) for tree_values in leaf_values]
    )
    _, group, counts = np.unique(distinct_values, axis=0, return_inverse=True, return_counts=True)
    if (counts[group.ravel()] > 1).mean() >= SHARED_VALUES:
        return True
    value_ranges = np.array([np.ptp(tree_values) for tree_values in leaf_values])
    return producer == "skl2onnx" and bool(value_ranges.min() >= SAME_RANGE * value_ranges.max())


def _as_boosting(forest: Forest, base: Any) -> Forest:
    """Return the trees as a boosted model, in which each tree contributes to one output.

    Args:
        forest: The trees with the leaf values of the file.
        base: Numbers that the model adds to the sum of the trees, one for each output, or None.

    Returns:
        The boosted model.

    Raises:
        CheckpointError: If a tree contributes to several outputs.
        ValueError: If ``base`` has a wrong length.
    """
    output_count = forest.trees[0].value.shape[1]
    tree_outputs = []
    trees = []
    for tree in forest.trees:
        leaf_values = tree.value[tree.left == NO_CHILD]
        nonzero_outputs = np.flatnonzero((leaf_values != 0).any(0))
        if len(nonzero_outputs) > 1:
            raise CheckpointError(
                "A tree of boosting must have one output; a tree in this file has several.",
                "Export the model again with one tree for each class.",
            )
        output = int(nonzero_outputs[0]) if len(nonzero_outputs) else 0
        tree_outputs.append(output)
        trees.append(replace(tree, value=tree.value[:, [output]]))
    offset = np.zeros(output_count)
    if base is not None:
        if len(base) != output_count:
            raise ValueError("the number of base values is not the number of outputs")
        offset = base.astype(np.float64)
    return replace(
        forest,
        trees=tuple(trees),
        kind=BOOSTING,
        offset=offset,
        outputs=np.array(tree_outputs, dtype=np.int64),
        has_midpoints=False,
    )
