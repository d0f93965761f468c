"""Read decision trees from an ONNX graph: TreeEnsembleRegressor, TreeEnsembleClassifier and TreeEnsemble.

A node of these operators compares one column with a threshold. A leaf has weights, which are added to the
outputs. An ONNX file stores no seeds, no numbers of records, and no values of inner nodes.

The operators add the trees. So a converter divides the leaf values of a random forest by the number of trees
T. We multiply by T, so that leaf values are targets again. Three things tell a random forest from boosting:

- A random forest has no base values, which are the offset of boosting.
- The leaf values of a classification forest are shares of classes: they lie between 0 and 1/T, and no
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
# Operators that may follow the trees. Others change the meaning of the leaf values, as in isolation forests.
HARMLESS = (
    "Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Concat", "ReduceMean", "ZipMap",
    "ArgMax", "ArrayFeatureExtractor", "Normalizer",
)  # fmt: skip
MAX_VALUES = 50_000_000  # largest number of leaf values of all trees
MAX_TARGETS = 10_000  # largest number of targets or classes
SAME_RANGE = (
    0.3  # the smallest range of leaf values in a tree of a random forest, as a share of the largest
)
SHARED_VALUES = (
    0.2  # smallest share of leaf values that occur in several trees of a fully grown forest
)
SHARE_ERROR = 1e-3  # rounding error of the share of a class
# Exceptions that attributes of the wrong type can raise.
MALFORMED = (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, RuntimeError)
NOT_A_TREE = "the nodes of a tree do not form one tree"
EQUAL_MODES = {"BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER"}
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


@dataclass(frozen=True)
class NodeTable:
    """The nodes of all trees of an operator.

    Attributes:
        roots: Position of the root of each tree.
        left_child: Position of the left child of each node, -1 for a leaf.
        right_child: Position of the right child of each node, -1 for a leaf.
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
        tree_of = _number_trees(self.roots, self.left_child, self.right_child)
        if tree_of is None:
            raise ValueError(NOT_A_TREE)
        by_tree = np.argsort(tree_of, kind="stable")
        starts = np.searchsorted(tree_of[by_tree], np.arange(len(self.roots) + 1))
        position = np.zeros(len(tree_of), dtype=np.int64)
        trees = []
        for t, root in enumerate(self.roots.tolist()):
            members = by_tree[starts[t] : starts[t + 1]]
            members = np.concatenate([[root], members[members != root]])
            position[members] = np.arange(len(members))
            trees.append(self._tree(members, position))
        return trees

    def _tree(self, members: Integers, position: Integers) -> Tree:
        """Return one tree.

        Args:
            members: Positions of the nodes of the tree, the root first.
            position: Number of each node in its tree.

        Returns:
            The tree.

        Raises:
            ValueError: If the nodes do not form one tree.
        """
        is_leaf = self.left_child[members] == NO_CHILD
        left_child, right_child = (
            np.where(is_leaf, NO_CHILD, position[child[members]])
            for child in (self.left_child, self.right_child)
        )
        order = order_nodes(left_child, right_child)
        if order is None:
            raise ValueError(NOT_A_TREE)
        number = np.argsort(order)
        members, is_leaf = members[order], is_leaf[order]
        return Tree(
            left=np.where(is_leaf, NO_CHILD, number[left_child[order]]),
            right=np.where(is_leaf, NO_CHILD, number[right_child[order]]),
            feature=self.feature[members],
            threshold=self.threshold[members].astype(np.float64),
            value=np.where(is_leaf[:, None], self.weights[members], np.nan),
            missing_left=self.missing_left[members],
        )


def _number_trees(roots: Integers, left_child: Integers, right_child: Integers) -> Integers | None:
    """Return the number of each node's tree, None if a node belongs to no tree or to several."""
    tree_of = np.full(len(left_child), -1)
    if len(np.unique(roots)) < len(roots):
        return None
    level, tree = roots, np.arange(len(roots))
    reached = 0
    while len(level):
        reached += len(level)
        if reached > len(left_child):
            return None
        tree_of[level] = tree
        inner = left_child[level] != NO_CHILD
        parents = level[inner]
        tree = np.repeat(tree[inner], 2)
        level = np.stack([left_child[parents], right_child[parents]], 1).ravel()
    return tree_of if (tree_of >= 0).all() and reached == len(left_child) else None


def find_onnx_forests(graph: Any, producer: str) -> Iterator[tuple[str, Forest]]:
    """Yield the operator and the structure of every forest in an ONNX graph.

    Args:
        graph: The graph.
        producer: Name of the program that wrote the file, "" if the file does not say.

    Yields:
        The name of the operator and the forest.

    Raises:
        CheckpointError: If a forest is damaged.
    """
    try:
        yield from _find_forests(graph, producer)
    except MALFORMED as problem:
        raise CheckpointError(
            "The attributes of a tree ensemble in ONNX must agree with each other; in this file they do not "
            f"({type(problem).__name__}: {str(problem)[:100]}).",
            COPY_AGAIN,
        ) from problem


def _find_forests(graph: Any, producer: str) -> list[tuple[str, Forest]]:
    forests: list[tuple[str, Forest]] = []
    members: list[tuple[str, Forest]] = []
    columns_of_graph = _graph_columns(graph)
    for node in graph.node:
        if node.op_type not in (REGRESSOR, CLASSIFIER, ENSEMBLE) or node.domain not in DOMAINS:
            continue
        operators = _following_operators(graph, list(node.output))
        if not operators.issubset(HARMLESS):
            continue
        subset = _column_subset(graph, node.input[0])
        columns = columns_of_graph if subset is None else len(subset)
        forest = _read_operator(node, columns, producer)
        if subset is not None:
            forest = _map_columns(forest, subset, columns_of_graph)
        check_forest(forest)
        is_member = "ReduceMean" in operators and forest.kind == AVERAGE
        (members if is_member else forests).append((node.op_type, forest))
    if members:
        forests.append((members[0][0], _join([forest for _, forest in members])))
    return forests


def _join(members: list[Forest]) -> Forest:
    """Return the forest of several operators, whose outputs a graph averages, as for bagging."""
    first = members[0]
    widths = {tree.value.shape[1] for forest in members for tree in forest.trees}
    flags = {(forest.is_strict, forest.compares_doubles) for forest in members}
    if len(widths) > 1 or len(flags) > 1:
        raise CheckpointError(
            "Trees whose outputs a graph averages must have the same outputs; the trees in this file do not.",
            COPY_AGAIN,
        )
    return replace(
        first,
        trees=tuple(tree for forest in members for tree in forest.trees),
        columns=max(forest.columns for forest in members),
    )


def _graph_columns(graph: Any) -> int:
    """Return the number of columns of the input of a graph, 0 if the file does not say."""
    if len(graph.input) != 1:
        return 0
    shape = graph.input[0].type.tensor_type.shape
    columns = shape.dim[-1].dim_value if len(shape.dim) == 2 else 0
    return int(columns) if 0 < columns <= MAX_COLUMNS else 0


def _following_operators(graph: Any, outputs: list[str]) -> set[str]:
    """Return the names of all operators that use an output, directly or through other operators."""
    operators: set[str] = set()
    users: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    seen: set[str] = set()
    stack = list(outputs)
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in users.get(name, ()):
            operators.add(node.op_type)
            stack += node.output
    return operators


def _column_subset(graph: Any, name: str) -> Integers | None:
    """Return the columns that the input of an operator takes from the input of the graph, None for all."""
    maker = next((node for node in graph.node if name in node.output), None)
    if maker is None or maker.op_type in ("Identity", "Cast"):
        return None
    tensor = None
    if maker.op_type in ("Gather", "ArrayFeatureExtractor") and len(maker.input) == 2:
        tensor = next((t for t in graph.initializer if t.name == maker.input[1]), None)
    if tensor is None:
        raise CheckpointError(
            "The trees of an ONNX graph must read the columns of its input; in this graph the operator "
            f"{maker.op_type[:60]!r} changes them first.",
            "Export the trees alone, without transformers.",
        )
    return _to_array(tensor).ravel().astype(np.int64)


def _map_columns(forest: Forest, subset: Integers, columns: int) -> Forest:
    """Return a forest that reads some columns with the numbers of these columns in the table."""
    in_range = bool(((subset >= 0) & (subset < (columns or MAX_COLUMNS))).all())
    inner_features = [tree.feature[tree.left != NO_CHILD] for tree in forest.trees]
    if not in_range or any((f < 0).any() or (f >= len(subset)).any() for f in inner_features):
        raise CheckpointError(
            "The trees of an ONNX graph must split columns of its input; a tree in this file does not.",
            COPY_AGAIN,
        )
    trees = tuple(
        replace(
            tree,
            feature=np.where(
                tree.left == NO_CHILD, 0, subset[tree.feature.clip(0, len(subset) - 1)]
            ),
        )
        for tree in forest.trees
    )
    return replace(forest, trees=trees, columns=columns or int(subset.max()) + 1)


def _to_array(tensor: Any) -> np.ndarray:
    """Return the numbers of a tensor that are in the file itself."""
    from onnx import TensorProto, numpy_helper

    if tensor.data_location == TensorProto.EXTERNAL:
        raise ValueError("the numbers are in another file")
    array = numpy_helper.to_array(tensor)
    if array.dtype.kind not in "fiub":
        raise ValueError("a tensor does not hold numbers")
    return array


def _attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of an operator: numbers, texts, or arrays."""
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
    """Return an array of float32 numbers, or of doubles if the file stores them as a tensor."""
    return attributes.get(name, attributes.get(f"{name}_as_tensor"))


def _read_operator(node: Any, columns: int, producer: str) -> Forest:
    """Return the forest of an operator."""
    attributes = _attributes(node)
    is_classifier = node.op_type == CLASSIFIER
    if node.op_type == ENSEMBLE:
        table = _read_new_table(attributes)
        base = None
    else:
        prefix = "class" if is_classifier else "target"
        table = _read_table(attributes, prefix, _output_count(attributes, is_classifier))
        base = _numbers(attributes, "base_values")
    if base is not None and not np.isfinite(base).all():
        raise ValueError("a base value is not a finite number")
    average, added = ("AVERAGE", "SUM") if node.op_type != ENSEMBLE else (0, 1)
    aggregate = attributes.get("aggregate_function", added)
    if aggregate not in (average, added):
        raise ValueError("the outputs of the trees are neither added nor averaged")
    transform = attributes.get("post_transform", "NONE")
    trees = table.trees()
    inner_features = np.concatenate([tree.feature[tree.left != NO_CHILD] for tree in trees])
    forest = Forest(
        trees=tuple(trees),
        columns=columns or int(inner_features.max(initial=0)) + 1,
        is_classifier=is_classifier,
        library=producer[:60],
        is_strict=table.is_strict,
        compares_doubles=table.threshold.dtype == np.float64,
        has_rounded_thresholds=True,
    )
    has_base = base is not None and bool((base != 0).any())
    factor = 1 if aggregate == average else len(trees)
    if is_classifier:
        is_average = not has_base and transform == "NONE"
        shares = _class_shares(forest, attributes, factor) if is_average else None
        if shares is not None:
            return shares
    elif not has_base and transform in ("NONE", 0):
        is_sum = aggregate == added
        if not is_sum or _is_fitted_to_targets(trees, producer):
            return _scale(forest, factor)
    return _as_boosting(forest, base)


def _output_count(attributes: dict[str, Any], is_classifier: bool) -> int:
    """Return the number of targets, or the number of classes that the leaves name."""
    classes = int(attributes["class_ids"].max()) + 1 if is_classifier else 0
    count = classes if is_classifier else attributes.get("n_targets", 1)
    if not 1 <= count <= MAX_TARGETS:
        raise ValueError("the number of targets or classes is out of range")
    return count


def _read_table(attributes: dict[str, Any], prefix: str, outputs: int) -> NodeTable:
    """Read the nodes of a TreeEnsembleRegressor or a TreeEnsembleClassifier."""
    modes = np.array(attributes["nodes_modes"])
    threshold = _numbers(attributes, "nodes_values")
    leaf_weights = _numbers(attributes, f"{prefix}_weights")
    tree_numbers, node_numbers = attributes["nodes_treeids"], attributes["nodes_nodeids"]
    if threshold is None or leaf_weights is None or not 0 < len(modes) <= MAX_NODES:
        raise ValueError("the nodes or the leaf values are missing")
    if len(modes) * outputs > MAX_VALUES:
        raise ValueError("the leaves have too many values")
    trees = np.unique(tree_numbers)
    keys = _keys(trees, tree_numbers, node_numbers)
    by_key = np.argsort(keys, kind="stable")
    if (np.diff(keys[by_key]) == 0).any():
        raise ValueError("two nodes of a tree have the same number")

    def find(tree_ids: Any, node_ids: Any) -> Integers:
        wanted_keys = _keys(trees, tree_ids, node_ids)
        position = np.searchsorted(keys[by_key], wanted_keys).clip(max=len(keys) - 1)
        if (keys[by_key][position] != wanted_keys).any():
            raise ValueError("a number of a node belongs to no node")
        return by_key[position]

    is_leaf = modes == "LEAF"
    inner = np.flatnonzero(~is_leaf)
    true_child, false_child = np.full(len(modes), NO_CHILD), np.full(len(modes), NO_CHILD)
    true_child[inner] = find(tree_numbers[inner], attributes["nodes_truenodeids"][inner])
    false_child[inner] = find(tree_numbers[inner], attributes["nodes_falsenodeids"][inner])
    weights = np.zeros((len(modes), outputs))
    leaves = find(attributes[f"{prefix}_treeids"], attributes[f"{prefix}_nodeids"])
    outputs_of_leaves = attributes[f"{prefix}_ids"]
    if (outputs_of_leaves < 0).any() or (outputs_of_leaves >= outputs).any():
        raise ValueError("a leaf names an output that does not exist")
    np.add.at(weights, (leaves, outputs_of_leaves), leaf_weights.astype(np.float64))
    has_parent = np.zeros(len(modes), dtype=bool)
    has_parent[true_child[inner]] = has_parent[false_child[inner]] = True
    roots = np.flatnonzero(~has_parent)
    roots = roots[np.argsort(tree_numbers[roots], kind="stable")]
    if len(roots) != len(trees):
        raise ValueError("a tree must have one root")
    return _turn(
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
    """Return one number for each pair of a tree and a node."""
    if not ((node_ids >= 0) & (node_ids < 2**31)).all():
        raise ValueError("a number of a node is out of range")
    tree = np.searchsorted(trees, tree_ids).clip(max=len(trees) - 1)
    if (trees[tree] != tree_ids).any():
        raise ValueError("a number of a tree belongs to no tree")
    return tree * 2**31 + node_ids


def _read_new_table(attributes: dict[str, Any]) -> NodeTable:
    """Read the nodes of a TreeEnsemble, which numbers inner nodes and leaves separately."""
    threshold = attributes["nodes_splits"]
    leaf_weights, leaf_targets = attributes["leaf_weights"], attributes["leaf_targetids"]
    inner, leaves = len(threshold), len(leaf_weights)
    outputs = attributes.get("n_targets", 1)
    if not 0 < inner + leaves <= MAX_NODES or not 1 <= outputs <= MAX_TARGETS:
        raise ValueError("the number of nodes or targets is out of range")
    if (inner + leaves) * outputs > MAX_VALUES or len(leaf_targets) != leaves:
        raise ValueError("the leaves have too many values")
    if (leaf_targets < 0).any() or (leaf_targets >= outputs).any():
        raise ValueError("a leaf names an output that does not exist")
    children = []
    for side in ("true", "false"):
        child, is_leaf = attributes[f"nodes_{side}nodeids"], attributes[f"nodes_{side}leafs"] != 0
        if ((child < 0) | (child >= np.where(is_leaf, leaves, inner))).any() or len(child) != inner:
            raise ValueError("a number of a node belongs to no node")
        children.append(
            np.concatenate([np.where(is_leaf, inner + child, child), np.full(leaves, NO_CHILD)])
        )
    roots = attributes["tree_roots"]
    if not len(roots) or (roots < 0).any() or (roots >= inner).any():
        raise ValueError("a root belongs to no node")
    weights = np.zeros((inner + leaves, outputs))
    weights[inner + np.arange(leaves), leaf_targets] = leaf_weights
    modes = attributes["nodes_modes"].astype(np.int64)
    if ((modes < 0) | (modes >= len(MODES))).any():
        raise ValueError("a node compares with a set of values")
    padding = np.zeros(leaves, dtype=threshold.dtype)
    missing_true = attributes.get("nodes_missing_value_tracks_true")
    return _turn(
        modes=np.concatenate([np.array(MODES)[modes], np.full(leaves, "LEAF")]),
        roots=roots.astype(np.int64),
        true_child=children[0],
        false_child=children[1],
        feature=np.concatenate([attributes["nodes_featureids"], np.zeros(leaves, dtype=np.int64)]),
        threshold=np.concatenate([threshold, padding]),
        missing_true=None
        if missing_true is None
        else np.concatenate([missing_true, np.zeros(leaves, dtype=np.int64)]),
        weights=weights,
    )


def _turn(
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
    """Return the nodes with the child for small values at the left.

    Args:
        modes: How each node compares, such as "BRANCH_LEQ", and "LEAF" for a leaf.
        roots: Position of the root of each tree.
        true_child: Position of the child for values that satisfy the comparison.
        false_child: Position of the other child.
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
    nodes = len(modes)
    is_leaf = modes == "LEAF"
    comparisons = set(modes[~is_leaf].tolist())
    if EQUAL_MODES & comparisons or not comparisons.issubset(MODES):
        raise CheckpointError(
            "The nodes of a tree must compare values with thresholds (<=, <, >=, >); a node in this file "
            "compares in another way.",
            "Encode the categories as numbers and train the model again.",
        )
    # x < t and x >= t send a value that equals the threshold to the side of large values.
    is_strict = comparisons.issubset({"BRANCH_LT", "BRANCH_GTE"}) and bool(comparisons)
    if not is_strict and not comparisons.issubset({"BRANCH_LEQ", "BRANCH_GT"}):
        raise CheckpointError(
            "All nodes of an ensemble must compare in the same way; in this file some send a value that "
            "equals the threshold to the left and some to the right.",
            "Export the model again with skl2onnx or onnxmltools.",
        )
    if any(len(array) != nodes for array in (feature, threshold)):
        raise ValueError("a node has no column or no threshold")
    is_turned = np.isin(modes, ["BRANCH_GT", "BRANCH_GTE"])
    follows_true = np.zeros(nodes, dtype=bool) if missing_true is None else missing_true != 0
    if len(follows_true) != nodes:
        raise ValueError("a node has no direction for missing values")
    inner_thresholds = threshold[~is_leaf]
    if inner_thresholds.dtype.kind != "f" or np.isnan(inner_thresholds).any():
        raise ValueError("a threshold is not a number")
    return NodeTable(
        roots=roots,
        left_child=np.where(is_turned, false_child, true_child),
        right_child=np.where(is_turned, true_child, false_child),
        feature=feature,
        threshold=threshold,
        missing_left=follows_true != is_turned,
        weights=weights,
        is_strict=is_strict,
    )


def _scale(forest: Forest, factor: float) -> Forest:
    trees = (replace(tree, value=tree.value * factor) for tree in forest.trees)
    return replace(forest, trees=tuple(trees))


def _class_shares(forest: Forest, attributes: dict[str, Any], factor: int) -> Forest | None:
    """Return a classification forest whose leaf values are shares of classes, None if they are not shares.

    A forest for two classes may only store the share of the second class.

    Args:
        forest: The trees with the leaf values of the file.
        attributes: The attributes of the operator.
        factor: Number by which the converter has divided the shares.

    Returns:
        The forest.
    """
    labels = attributes.get("classlabels_int64s", attributes.get("classlabels_strings", ()))
    is_binary = len(labels) == 2 and not attributes["class_ids"].any()
    trees = []
    for tree in forest.trees:
        share = tree.value * factor
        if is_binary:
            share = np.stack([1 - share[:, 0], share[:, 0]], 1)
        leaf_shares = share[tree.left == NO_CHILD]
        if not (
            (leaf_shares >= -SHARE_ERROR).all()
            and (np.abs(leaf_shares.sum(1) - 1) <= SHARE_ERROR).all()
        ):
            return None
        trees.append(replace(tree, value=np.maximum(share, 0.0)))
    return replace(forest, trees=tuple(trees))


def _is_fitted_to_targets(trees: list[Tree], producer: str) -> bool:
    """Return True if the leaf values show that all trees are fitted to the same targets."""
    leaf_values = [tree.value[tree.left == NO_CHILD] for tree in trees]
    if len(trees) == 1:
        return True
    values = np.concatenate([np.unique(rows, axis=0) for rows in leaf_values])
    _, group, counts = np.unique(values, axis=0, return_inverse=True, return_counts=True)
    if (counts[group.ravel()] > 1).mean() >= SHARED_VALUES:
        return True
    ranges = np.array([np.ptp(rows) for rows in leaf_values])
    return producer == "skl2onnx" and bool(ranges.min() >= SAME_RANGE * ranges.max())


def _as_boosting(forest: Forest, base: Any) -> Forest:
    """Return the trees as boosting, with one output for each tree."""
    width = forest.trees[0].value.shape[1]
    outputs = []
    trees = []
    for tree in forest.trees:
        leaf_values = tree.value[tree.left == NO_CHILD]
        used = np.flatnonzero((leaf_values != 0).any(0))
        if len(used) > 1:
            raise CheckpointError(
                "A tree of boosting must have one output; a tree in this file has several.",
                "Export the model again with one tree for each class.",
            )
        output = int(used[0]) if len(used) else 0
        outputs.append(output)
        trees.append(replace(tree, value=tree.value[:, [output]]))
    offset = np.zeros(width)
    if base is not None:
        if len(base) != width:
            raise ValueError("the number of base values is not the number of outputs")
        offset = base.astype(np.float64)
    numbers = np.array(outputs, dtype=np.int64)
    return replace(
        forest,
        trees=tuple(trees),
        kind=BOOSTING,
        offset=offset,
        outputs=numbers,
        has_midpoints=False,
    )
