"""Read models of CatBoost: JSON, the binary format cbm, and the bytes of a model in a pickle of CatBoost.

A symmetric tree has the same split (a column and a border) at all nodes of a level. The model lists one split
for each level, from the lowest level to the root. Bit i of the index of a leaf says on which side of split i
the leaf is. Trees of other shapes are stored node by node. A record goes to the right child if its value,
rounded to float32, is above the border. For each column, CatBoost also stores whether a missing value counts
as smaller or larger than all numbers.

A tree for several classes stores several numbers in each leaf. We convert such a tree to one tree for each
class.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.boosted_trees import (
    MAX_COLUMNS,
    MAX_OUTPUTS,
    Nodes,
    as_count,
    as_floats,
    build_tree,
    check_size,
    column_names,
    describe_damage,
    describe_unsupported,
    get_member,
    read_json,
)
from residuum.io.flatbuffers import Table
from residuum.io.safetensors_files import COPY_AGAIN
from residuum.trees.forest import BOOSTING, NO_CHILD, Floats, Forest, Integers

LIBRARY = "catboost"
MAGIC = b"CBM1"
MAX_DEPTH = 16  # largest depth of symmetric trees in CatBoost
MAX_BORDERS = 10_000_000  # largest number of borders (thresholds) of all columns
# Largest number of metadata entries of a model that are searched for the training settings.
MAX_INFO = 1000
NUMERIC_SPLIT = "FloatFeature"
NOT_NUMERIC = "splits of categorical columns, texts or embeddings"
# If missing values of a column count as larger than all numbers, a JSON model stores this text for it, and a
# binary model stores this number.
RIGHT, AS_TRUE = "AsTrue", 2
# The index of each field in its FlatBuffers table: the fields of a file, of a model (two lines), and of a
# numeric column.
MODEL, INFO = 1, 2
DIMENSION, SPLITS, SIZES, STARTS, FLOAT_FEATURES = 0, 1, 2, 3, 5
LEAF_VALUES, LEAF_WEIGHTS, STEPS, LEAF_NUMBERS, SCALE, BIAS, BIASES = 8, 9, 10, 11, 14, 15, 16
FLAT_INDEX, BORDERS, NAME, TREATMENT = 2, 3, 4, 5


@dataclass(frozen=True)
class Column:
    """A numeric column of the training table.

    Attributes:
        number: Index of the column in the table.
        borders: (borders,) the borders between the histogram bins of the column.
        missing_left: Whether missing values count as smaller than all numbers.
        name: Name of the column, "" if the file stores none.
    """

    number: int
    borders: Floats
    missing_left: bool
    name: str


@dataclass(frozen=True)
class Shape:
    """The nodes of a tree, with node 0 as the root. Every array has one entry for each node.

    Attributes:
        left_child: Index of the left child, -1 for a leaf.
        right_child: Index of the right child, -1 for a leaf.
        column: Index of the split column in the list of numeric columns.
        border: Border (threshold) of the split.
        leaf: Index of the leaf in the list of leaf values, -1 for an inner node.
    """

    left_child: Integers
    right_child: Integers
    column: Integers
    border: Floats
    leaf: Integers


def is_catboost_json(head: bytes) -> bool:
    """Return True if the first bytes of a file are those of a JSON model of CatBoost."""
    required_names = (b"features_info", b"ctr_data", b"model_info", b"oblivious_trees")
    return b"".join(head.split()).startswith(tuple(b'{"' + name + b'":' for name in required_names))


@np.errstate(all="ignore")  # numbers of a damaged file may overflow
def read_catboost(raw: bytes) -> Forest:
    """Return the trees of a model of CatBoost. Nothing in the model is executed.

    Args:
        raw: The bytes of a file, or of a model in a pickle.

    Returns:
        The trees.

    Raises:
        CheckpointError: If the model is damaged, or of a kind that residuum does not read.
    """
    if not raw.startswith(MAGIC):
        return _read_json_model(read_json(raw, LIBRARY))
    try:
        return _read_binary_model(Table.root(_read_core(raw)))
    except (ValueError, struct.error) as problem:
        raise CheckpointError(
            *describe_damage(LIBRARY, f"a complete binary model ({problem})")
        ) from problem


def _read_core(raw: bytes) -> bytes:
    """Return the bytes of a binary model after its magic number and its length field."""
    (size,) = struct.unpack_from("<I", raw, len(MAGIC))
    model_bytes = raw[len(MAGIC) + 4 :][:size]
    if len(model_bytes) < size:
        raise ValueError("the file ends too early")
    return model_bytes


def _read_json_model(content: Any) -> Forest:
    features = get_member(content, "features_info", library=LIBRARY)
    column_entries = features.get("float_features", []) if isinstance(features, dict) else None
    if not isinstance(column_entries, list):
        raise CheckpointError(*describe_damage(LIBRARY, "a list of numeric columns"))
    columns = [_read_json_column(entry) for entry in column_entries]
    scale_and_bias = content.get("scale_and_bias", [1, [0]])
    if not isinstance(scale_and_bias, list) or len(scale_and_bias) != 2:
        raise CheckpointError(*describe_damage(LIBRARY, "a scale and a bias"))
    scale = as_floats(scale_and_bias[:1], "the scale", LIBRARY)[0]
    bias = scale_and_bias[1] if isinstance(scale_and_bias[1], list) else scale_and_bias[1:]
    offset = as_floats(bias, "the bias", LIBRARY)
    outputs = as_count(len(offset), "outputs", LIBRARY, MAX_OUTPUTS)
    column_positions = {column.number: position for position, column in enumerate(columns)}
    feature_positions = {
        _index(entry, "feature_index"): column_positions[_index(entry, "flat_feature_index")]
        for entry in column_entries
    }
    if "oblivious_trees" in content:
        read_tree, trees = _read_json_symmetric, content["oblivious_trees"]
    else:
        read_tree, trees = _read_json_nested, get_member(content, "trees", library=LIBRARY)
    if not isinstance(trees, list):
        raise CheckpointError(*describe_damage(LIBRARY, "a list of trees"))
    shapes, values, weights, first_leaf = [], [], [], 0
    for tree in trees:
        shape, tree_values, tree_weights = read_tree(tree, feature_positions, outputs)
        if len(tree_values) != len(tree_weights) or (shape.leaf >= len(tree_values)).any():
            raise CheckpointError(*describe_damage(LIBRARY, "a value and a weight for each leaf"))
        leaf_index = np.where(shape.leaf < 0, -1, shape.leaf + first_leaf)
        shapes.append(
            Shape(shape.left_child, shape.right_child, shape.column, shape.border, leaf_index)
        )
        values.append(tree_values)
        weights.append(tree_weights)
        first_leaf += len(tree_values)
    if not shapes:
        raise CheckpointError(*describe_damage(LIBRARY, "at least one tree"))
    model_info = content.get("model_info")
    settings = model_info.get("params") if isinstance(model_info, dict) else None
    return _make_forest(
        columns, shapes, np.concatenate(values), np.concatenate(weights), scale, offset, settings
    )


def _read_json_column(entry: Any) -> Column:
    borders = get_member(entry, "borders", library=LIBRARY)
    column_name = entry.get("feature_id", "")
    return Column(
        _index(entry, "flat_feature_index"),
        as_floats([] if borders is None else borders, "borders", LIBRARY),
        entry.get("nan_value_treatment") != RIGHT,
        column_name if isinstance(column_name, str) else "",
    )


def _index(entry: Any, name: str) -> int:
    return as_count(get_member(entry, name, library=LIBRARY), name, LIBRARY, MAX_COLUMNS - 1)


def _read_json_split(split: Any, positions: dict[int, int]) -> tuple[int, float]:
    """Return the border of a split and its column, as an index in the list of numeric columns."""
    if not isinstance(split, dict) or split.get("split_type", NUMERIC_SPLIT) != NUMERIC_SPLIT:
        raise CheckpointError(*describe_unsupported(LIBRARY, NOT_NUMERIC))
    position = positions.get(_index(split, "float_feature_index"))
    border = get_member(split, "border", library=LIBRARY)
    if position is None:
        raise CheckpointError(*describe_damage(LIBRARY, "splits of columns that exist"))
    return position, float(as_floats([border], "the border", LIBRARY)[0])


def _read_json_symmetric(
    tree: Any, positions: dict[int, int], outputs: int
) -> tuple[Shape, Floats, Floats]:
    """Return the nodes of a symmetric tree, (leaves, outputs) leaf values and (leaves,) leaf weights."""
    splits = get_member(tree, "splits", library=LIBRARY)
    splits = [] if splits is None else splits
    if not isinstance(splits, list) or len(splits) > MAX_DEPTH:
        raise CheckpointError(
            *describe_damage(LIBRARY, f"at most {MAX_DEPTH} splits in each symmetric tree")
        )
    columns_and_borders = [_read_json_split(split, positions) for split in splits]
    leaf_count = 1 << len(columns_and_borders)
    values = as_floats(
        get_member(tree, "leaf_values", library=LIBRARY),
        "leaf values",
        LIBRARY,
        leaf_count * outputs,
    )
    weights = tree.get("leaf_weights")
    if not weights:
        weights = np.full(leaf_count, np.nan)
    nodes = _make_symmetric_nodes(
        [column for column, _ in columns_and_borders], [border for _, border in columns_and_borders]
    )
    return (
        nodes,
        values.reshape(leaf_count, outputs),
        as_floats(weights, "leaf weights", LIBRARY, leaf_count),
    )


def _make_symmetric_nodes(columns: Iterable[int], borders: Iterable[float]) -> Shape:
    """Return the nodes of a symmetric tree from the split of each level, the lowest level first."""
    level_columns = np.array([*columns], dtype=np.int64)[::-1]
    level_borders = np.array([*borders], dtype=np.float64)[::-1]
    depth = len(level_columns)
    inner_count, leaf_count = (1 << depth) - 1, 1 << depth
    inner_index = np.arange(inner_count)
    no_child = np.full(leaf_count, NO_CHILD)
    level_sizes = 1 << np.arange(depth)
    return Shape(
        np.concatenate([2 * inner_index + 1, no_child]),
        np.concatenate([2 * inner_index + 2, no_child]),
        np.concatenate(
            [np.repeat(level_columns, level_sizes), np.zeros(leaf_count, dtype=np.int64)]
        ),
        np.concatenate([np.repeat(level_borders, level_sizes), np.zeros(leaf_count)]),
        np.concatenate([np.full(inner_count, -1), np.arange(leaf_count)]),
    )


def _read_json_nested(
    tree: Any, positions: dict[int, int], outputs: int
) -> tuple[Shape, Floats, Floats]:
    """Return the nodes, (leaves, outputs) leaf values and (leaves,) leaf weights of nested tree objects."""
    # Each row is a node: index of the left child, the right child and the column, border, index of the leaf.
    node_rows: list[list[float]] = []
    values: list[Any] = []
    weights: list[Any] = []
    stack: list[tuple[Any, int, int]] = [(tree, -1, 0)]
    while stack:
        node, parent, side = stack.pop()
        if not isinstance(node, dict):
            raise CheckpointError(*describe_damage(LIBRARY, "trees of objects"))
        if parent >= 0:
            node_rows[parent][side] = len(node_rows)
        if "split" in node:
            position, border = _read_json_split(node["split"], positions)
            stack += [(node.get("right"), len(node_rows), 1), (node.get("left"), len(node_rows), 0)]
            node_rows.append([NO_CHILD, NO_CHILD, position, border, -1])
        else:
            leaf_values = get_member(node, "value", library=LIBRARY)
            leaf_values = leaf_values if isinstance(leaf_values, list) else [leaf_values]
            values.append(as_floats(leaf_values, "leaf values", LIBRARY, outputs))
            weights.append(node.get("weight"))
            node_rows.append([NO_CHILD, NO_CHILD, 0, 0.0, len(values) - 1])
    node_table = np.array(node_rows)
    left_child, right_child, column, leaf = node_table[:, [0, 1, 2, 4]].T.astype(np.int64)
    nodes = Shape(left_child, right_child, column, node_table[:, 3], leaf)
    return nodes, np.array(values), as_floats(weights, "leaf weights", LIBRARY)


def _read_binary_model(core: Table) -> Forest:
    model = core.table(MODEL)
    if model is None:
        raise ValueError("the model is missing")
    columns = [*_read_binary_columns(model)]
    outputs = as_count(model.number(DIMENSION, "<i", 0), "outputs", LIBRARY, MAX_OUTPUTS)
    values, weights = model.array(LEAF_VALUES, "<f8"), model.array(LEAF_WEIGHTS, "<f8")
    if outputs < 1 or not len(values) or len(values) % outputs:
        raise ValueError("the leaf values are incomplete")
    values = values.reshape(-1, outputs)
    if len(weights) != len(values):
        weights = np.full(len(values), np.nan)
    biases = model.array(BIASES, "<f8")
    offset = biases if len(biases) else np.full(outputs, model.number(BIAS, "<d", 0.0))
    shapes = [*_read_binary_trees(model, columns, len(values), outputs)]
    return _make_forest(
        columns,
        shapes,
        values,
        weights,
        model.number(SCALE, "<d", 1.0),
        offset,
        _read_settings(core),
    )


def _read_binary_columns(model: Table) -> Iterator[Column]:
    """Yield the numeric columns of a binary model, and raise an error if they have too many borders."""
    # A hostile file can store borders once for many columns, so we count the borders of every column.
    border_count = 0
    for entry in islice(model.tables(FLOAT_FEATURES), MAX_COLUMNS):
        column = Column(
            as_count(
                entry.number(FLAT_INDEX, "<i", -1), "flat_feature_index", LIBRARY, MAX_COLUMNS - 1
            ),
            entry.array(BORDERS, "<f4").astype(np.float64),
            entry.number(TREATMENT, "<b", 0) != AS_TRUE,
            entry.text(NAME)[:1000],
        )
        border_count += len(column.borders) + len(column.name)
        if border_count > MAX_BORDERS:
            raise UnsafeFileError(
                f"A model of CatBoost may have at most {MAX_BORDERS:,} borders (thresholds of splits); "
                "this file has more.",
                COPY_AGAIN,
            )
        yield column


def _read_binary_trees(
    model: Table, columns: list[Column], leaves: int, outputs: int
) -> Iterator[Shape]:
    """Yield the nodes of each tree of a binary model."""
    # A split is stored as an index in the list of the borders of all columns.
    splits = model.array(SPLITS, "<i4").astype(np.int64)
    tree_sizes = model.array(SIZES, "<i4").astype(np.int64)
    tree_starts = model.array(STARTS, "<i4").astype(np.int64)
    if not len(tree_sizes):  # the file lists no trees
        raise ValueError("the trees are missing")
    is_tree_inside = (
        (tree_sizes >= 0) & (tree_starts >= 0) & (tree_starts + tree_sizes <= len(splits))
    )
    if (
        len(tree_sizes) != len(tree_starts)
        or not is_tree_inside.all()
        or tree_sizes.sum() > len(splits)
    ):
        raise ValueError("a tree is incomplete")
    border_counts = [len(column.borders) for column in columns]
    borders = np.concatenate([np.zeros(0), *(column.borders for column in columns)])
    border_columns = np.repeat(np.arange(len(columns)), border_counts)
    # A node states its children by two steps (differences of node indices) of 16 bits, read as one number.
    child_steps = model.array(STEPS, "<u4").astype(np.int64)
    if not len(child_steps):
        yield from _read_binary_symmetric(
            splits, tree_sizes, tree_starts, border_columns, borders, leaves
        )
        return
    leaf_numbers = model.array(LEAF_NUMBERS, "<u4").astype(np.int64)
    if not len(splits) == len(child_steps) == len(leaf_numbers):
        raise ValueError("the nodes of a tree are incomplete")
    for start, size in zip(tree_starts.tolist(), tree_sizes.tolist(), strict=True):
        tree_slice = slice(start, start + size)
        if not size:
            raise ValueError("a tree has no nodes")
        yield _read_binary_nodes(
            child_steps[tree_slice],
            splits[tree_slice],
            leaf_numbers[tree_slice],
            border_columns,
            borders,
            (leaves, outputs),
        )


def _read_binary_nodes(
    child_steps: Integers,
    splits: Integers,
    leaf_numbers: Integers,
    border_columns: Integers,
    borders: Floats,
    value_shape: tuple[int, int],
) -> Shape:
    """Return the nodes of a tree from the steps (differences of node indices) from each node to its children.

    Args:
        child_steps: Both steps of each node: the lower 16 bits to the left child, the upper 16 to the right.
        splits: Index of the border of each node in ``borders``.
        leaf_numbers: Index of the first value of each leaf.
        border_columns: Column of each border, as an index in the list of numeric columns.
        borders: The borders of all columns.
        value_shape: Shape (leaves, outputs) of the leaf values.

    Returns:
        The nodes.

    Raises:
        ValueError: If a leaf has no value.
    """
    # A node with both steps 0 is a leaf. If only one step is 0, the child at this side is a leaf that is not
    # stored as a node, and ``leaf_numbers`` of the parent belongs to this leaf.
    to_left, to_right = child_steps & 0xFFFF, child_steps >> 16
    is_inner = (to_left > 0) | (to_right > 0)
    lacks_left, lacks_right = is_inner & (to_left == 0), is_inner & (to_right == 0)
    has_leaf_number = ~is_inner | lacks_left | lacks_right
    leaf_index, remainder = np.divmod(np.where(has_leaf_number, leaf_numbers, 0), value_shape[1])
    if (leaf_index >= value_shape[0]).any() or remainder.any():
        raise ValueError("a leaf has no value")
    _check_splits(splits[is_inner], len(borders))
    node_index = np.arange(len(child_steps))
    parents_of_new_leaves = np.flatnonzero(lacks_left | lacks_right)
    index_of_new_leaf = np.zeros_like(node_index)
    index_of_new_leaf[parents_of_new_leaves] = len(node_index) + np.arange(
        len(parents_of_new_leaves)
    )
    left_child = np.where(lacks_left, index_of_new_leaf, node_index + to_left)
    right_child = np.where(lacks_right, index_of_new_leaf, node_index + to_right)
    column_of_node = np.zeros_like(node_index)
    border = np.zeros(len(node_index))
    column_of_node[is_inner], border[is_inner] = (
        border_columns[splits[is_inner]],
        borders[splits[is_inner]],
    )
    no_child, no_column = (
        np.full(len(parents_of_new_leaves), NO_CHILD),
        np.zeros_like(parents_of_new_leaves),
    )
    return Shape(
        np.concatenate([np.where(is_inner, left_child, NO_CHILD), no_child]),
        np.concatenate([np.where(is_inner, right_child, NO_CHILD), no_child]),
        np.concatenate([column_of_node, no_column]),
        np.concatenate([border, no_column]),
        np.concatenate([np.where(is_inner, -1, leaf_index), leaf_index[parents_of_new_leaves]]),
    )


def _read_binary_symmetric(
    splits: Integers,
    sizes: Integers,
    starts: Integers,
    border_columns: Integers,
    borders: Floats,
    leaves: int,
) -> Iterator[Shape]:
    if (sizes > MAX_DEPTH).any() or (1 << sizes).sum() != leaves:
        raise ValueError("the leaf values do not belong to the trees")
    _check_splits(splits, len(borders))
    first_leaf = 0
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        tree_splits = splits[start : start + size]
        nodes = _make_symmetric_nodes(border_columns[tree_splits], borders[tree_splits])
        leaf_index = np.where(nodes.leaf < 0, -1, nodes.leaf + first_leaf)
        yield Shape(nodes.left_child, nodes.right_child, nodes.column, nodes.border, leaf_index)
        first_leaf += 1 << size


def _check_splits(splits: Integers, border_count: int) -> None:
    """Raise an error if a split is not the index of a border, as for a split of a categorical column."""
    if (splits < 0).any():
        raise ValueError("a split is negative")
    if (splits >= border_count).any():
        raise CheckpointError(*describe_unsupported(LIBRARY, NOT_NUMERIC))


def _read_settings(core: Table) -> Any:
    """Return the settings of the training that a binary model stores as JSON, or None if it stores none."""
    for entry in islice(core.tables(INFO), MAX_INFO):
        if entry.text(0)[:100] == "params":
            try:
                return json.loads(entry.text(1)[: 1 << 20])
            except (ValueError, RecursionError):
                return None
    return None


def _make_forest(
    columns: list[Column],
    shapes: list[Shape],
    values: Floats,
    weights: Floats,
    scale: float,
    offset: Floats,
    settings: Any,
) -> Forest:
    """Return the forest of all trees. A tree with several outputs becomes one tree for each output.

    Args:
        columns: The numeric columns.
        shapes: The nodes of each tree.
        values: (leaves, outputs) values of all leaves.
        weights: (leaves,) weights of all leaves, NaN if they are not stored.
        scale: Factor of the sum of the trees.
        offset: (outputs,) numbers that are added to the sum of the trees.
        settings: Settings of the training.

    Returns:
        The forest.

    Raises:
        CheckpointError: If the model is damaged.
    """
    outputs = values.shape[1]
    column_indices = np.array([column.number for column in columns], dtype=np.int64)
    if len(offset) != outputs or not np.isfinite([scale, *offset]).all():
        raise CheckpointError(*describe_damage(LIBRARY, "a scale and a bias for each output"))
    if len(np.unique(column_indices)) != len(column_indices):
        raise CheckpointError(*describe_damage(LIBRARY, "numeric columns with different numbers"))
    check_size(len(shapes) * outputs, sum(len(s.leaf) for s in shapes) * outputs, LIBRARY)
    column_count = int(column_indices.max(initial=-1)) + 1
    missing_left = np.array([column.missing_left for column in columns], dtype=bool)
    trees = []
    for shape in shapes:
        is_leaf = shape.leaf >= 0
        leaf_weights = np.where(is_leaf, weights[shape.leaf], 0.0)
        has_weights = bool(np.isfinite(leaf_weights).all())
        has_columns = len(columns) > 0
        if not has_columns and not is_leaf.all():
            raise CheckpointError(*describe_damage(LIBRARY, "splits of columns that exist"))
        for k in range(outputs):
            output_nodes = Nodes(
                shape.left_child,
                shape.right_child,
                column_indices[shape.column] if has_columns else np.zeros_like(shape.column),
                shape.border,
                np.where(is_leaf, scale * values[shape.leaf, k], np.nan),
                missing_left[shape.column] if has_columns else is_leaf,
                weight=_sum_up(shape, leaf_weights) if has_weights else None,
            )
            trees.append(build_tree(output_nodes, column_count, LIBRARY))
    names = [""] * column_count
    edges = [np.zeros(0)] * column_count
    for column in columns:
        names[column.number], edges[column.number] = column.name, column.borders
    return Forest(
        trees=tuple(trees),
        columns=column_count,
        has_midpoints=False,
        names=column_names(names, column_count),
        kind=BOOSTING,
        library=LIBRARY,
        offset=np.array(offset),
        outputs=np.tile(np.arange(outputs), len(shapes)),
        learning_rate=_number_of(settings, "boosting_options", "learning_rate"),
        regularization=_number_of(settings, "tree_learner_options", "l2_leaf_reg"),
        objective=str(_member_of(settings, "loss_function", "type") or "")[:100],
        bin_edges=tuple(edges),
    )


def _sum_up(shape: Shape, leaf_weights: Floats) -> Floats:
    """Return for each node the sum of the weights of the leaves below it, if parents come before children."""
    weight_sums = leaf_weights.copy()
    inner_nodes = np.flatnonzero(shape.left_child != NO_CHILD)[::-1]
    children = np.stack([shape.left_child[inner_nodes], shape.right_child[inner_nodes]], 1)
    if ((children <= inner_nodes[:, None]) | (children >= len(weight_sums))).any():
        raise CheckpointError(*describe_damage(LIBRARY, "nodes that form trees"))
    for node, (low_child, high_child) in zip(inner_nodes.tolist(), children.tolist(), strict=True):
        weight_sums[node] = weight_sums[low_child] + weight_sums[high_child]
    return weight_sums


def _member_of(settings: Any, *keys: str) -> Any:
    inner_value = settings
    for key in keys:
        inner_value = inner_value.get(key) if isinstance(inner_value, dict) else None
    return inner_value


def _number_of(settings: Any, *keys: str) -> float | None:
    value = _member_of(settings, *keys)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None
