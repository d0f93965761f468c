"""Read models of CatBoost: JSON, the binary format cbm, and the bytes of a model in a pickle of CatBoost.

A symmetric tree asks the same question at all nodes of a level. The answer to question i is bit i of the
number of the leaf, so the root of the tree asks the last question. Trees of other shapes are stored node by
node. A record goes to the right child if its value, rounded to float32, is above the border. For each
column, CatBoost also stores whether a missing value counts as smaller or larger than all numbers.

A tree for several classes stores several numbers in each leaf. It becomes one tree for each class.
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
MAX_BORDERS = 10_000_000  # largest number of borders of all columns
MAX_INFO = 1000  # largest number of properties of a model that are searched for its settings
NUMERIC_SPLIT = "FloatFeature"
NOT_NUMERIC = "splits of categorical columns, texts or embeddings"
RIGHT = "AsTrue"  # missing values count as larger than all numbers
AS_TRUE = 2  # the number of the same treatment in the binary format
# Numbers of fields in the tables of the binary format.
MODEL, INFO = 1, 2
DIMENSION, SPLITS, SIZES, STARTS, FLOAT_FEATURES = 0, 1, 2, 3, 5
LEAF_VALUES, LEAF_WEIGHTS, STEPS, LEAF_NUMBERS, SCALE, BIAS, BIASES = 8, 9, 10, 11, 14, 15, 16
FLAT_INDEX, BORDERS, NAME, TREATMENT = 2, 3, 4, 5


@dataclass(frozen=True)
class Column:
    """A numeric column.

    Attributes:
        number: Number of the column in the table.
        borders: (borders,) the borders between the bins of the column.
        missing_left: Whether missing values count as smaller than all numbers.
        name: Name of the column, "" if the file stores none.
    """

    number: int
    borders: Floats
    missing_left: bool
    name: str


@dataclass(frozen=True)
class Shape:
    """The nodes of a tree, with node 0 as the root. Arrays have one entry for each node.

    Attributes:
        left_child: Number of the left child, -1 for a leaf.
        right_child: Number of the right child, -1 for a leaf.
        column: Position of the split column in the list of numeric columns.
        border: Border of the split.
        leaf: Position of the leaf among the leaf values, -1 for an inner node.
    """

    left_child: Integers
    right_child: Integers
    column: Integers
    border: Floats
    leaf: Integers


def is_catboost_json(head: bytes) -> bool:
    """Return True if the first bytes of a file are those of a JSON model of CatBoost."""
    names = (b"features_info", b"ctr_data", b"model_info", b"oblivious_trees")
    return b"".join(head.split()).startswith(tuple(b'{"' + name + b'":' for name in names))


@np.errstate(all="ignore")  # damaged numbers may be of any size
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
    """Return the tables of a binary model, which follow the magic number and their size."""
    (size,) = struct.unpack_from("<I", raw, len(MAGIC))
    core = raw[len(MAGIC) + 4 :][:size]
    if len(core) < size:
        raise ValueError("the file ends too early")
    return core


def _read_json_model(content: Any) -> Forest:
    features = get_member(content, "features_info", library=LIBRARY)
    entries = features.get("float_features", []) if isinstance(features, dict) else None
    if not isinstance(entries, list):
        raise CheckpointError(*describe_damage(LIBRARY, "a list of numeric columns"))
    columns = [_read_json_column(entry) for entry in entries]
    scale_and_bias = content.get("scale_and_bias", [1, [0]])
    if not isinstance(scale_and_bias, list) or len(scale_and_bias) != 2:
        raise CheckpointError(*describe_damage(LIBRARY, "a scale and a bias"))
    scale = as_floats(scale_and_bias[:1], "the scale", LIBRARY)[0]
    bias = scale_and_bias[1] if isinstance(scale_and_bias[1], list) else scale_and_bias[1:]
    offset = as_floats(bias, "the bias", LIBRARY)
    outputs = as_count(len(offset), "outputs", LIBRARY, MAX_OUTPUTS)
    places = {column.number: place for place, column in enumerate(columns)}
    feature_places = {
        _index(entry, "feature_index"): places[_index(entry, "flat_feature_index")]
        for entry in entries
    }
    if "oblivious_trees" in content:
        read_tree, trees = _read_json_symmetric, content["oblivious_trees"]
    else:
        read_tree, trees = _read_json_nested, get_member(content, "trees", library=LIBRARY)
    if not isinstance(trees, list):
        raise CheckpointError(*describe_damage(LIBRARY, "a list of trees"))
    shapes, values, weights, start = [], [], [], 0
    for tree in trees:
        shape, tree_values, tree_weights = read_tree(tree, feature_places, outputs)
        if len(tree_values) != len(tree_weights) or (shape.leaf >= len(tree_values)).any():
            raise CheckpointError(*describe_damage(LIBRARY, "a value and a weight for each leaf"))
        leaf = np.where(shape.leaf < 0, -1, shape.leaf + start)
        shapes.append(Shape(shape.left_child, shape.right_child, shape.column, shape.border, leaf))
        values.append(tree_values)
        weights.append(tree_weights)
        start += len(tree_values)
    if not shapes:
        raise CheckpointError(*describe_damage(LIBRARY, "at least one tree"))
    info = content.get("model_info")
    settings = info.get("params") if isinstance(info, dict) else None
    return _make_forest(
        columns, shapes, np.concatenate(values), np.concatenate(weights), scale, offset, settings
    )


def _read_json_column(entry: Any) -> Column:
    borders = get_member(entry, "borders", library=LIBRARY)
    name = entry.get("feature_id", "")
    return Column(
        _index(entry, "flat_feature_index"),
        as_floats([] if borders is None else borders, "borders", LIBRARY),
        entry.get("nan_value_treatment") != RIGHT,
        name if isinstance(name, str) else "",
    )


def _index(entry: Any, name: str) -> int:
    return as_count(get_member(entry, name, library=LIBRARY), name, LIBRARY, MAX_COLUMNS - 1)


def _read_json_split(split: Any, places: dict[int, int]) -> tuple[int, float]:
    """Return the position of the column of a split among the numeric columns, and the border."""
    if not isinstance(split, dict) or split.get("split_type", NUMERIC_SPLIT) != NUMERIC_SPLIT:
        raise CheckpointError(*describe_unsupported(LIBRARY, NOT_NUMERIC))
    place = places.get(_index(split, "float_feature_index"))
    border = get_member(split, "border", library=LIBRARY)
    if place is None:
        raise CheckpointError(*describe_damage(LIBRARY, "splits of columns that exist"))
    return place, float(as_floats([border], "the border", LIBRARY)[0])


def _read_json_symmetric(
    tree: Any, places: dict[int, int], outputs: int
) -> tuple[Shape, Floats, Floats]:
    """Return the shape of a symmetric tree, (leaves, outputs) values and (leaves,) weights."""
    splits = get_member(tree, "splits", library=LIBRARY)
    splits = [] if splits is None else splits
    if not isinstance(splits, list) or len(splits) > MAX_DEPTH:
        raise CheckpointError(
            *describe_damage(LIBRARY, f"at most {MAX_DEPTH} splits in each symmetric tree")
        )
    pairs = [_read_json_split(split, places) for split in splits]
    leaves = 1 << len(pairs)
    values = as_floats(
        get_member(tree, "leaf_values", library=LIBRARY), "leaf values", LIBRARY, leaves * outputs
    )
    weights = tree.get("leaf_weights")
    if not weights:
        weights = np.full(leaves, np.nan)
    shape = _symmetric_shape([place for place, _ in pairs], [border for _, border in pairs])
    return (
        shape,
        values.reshape(leaves, outputs),
        as_floats(weights, "leaf weights", LIBRARY, leaves),
    )


def _symmetric_shape(columns: Iterable[int], borders: Iterable[float]) -> Shape:
    """Return the shape of a tree whose levels ask the questions, the first question at the bottom."""
    column = np.array([*columns], dtype=np.int64)[::-1]
    border = np.array([*borders], dtype=np.float64)[::-1]
    depth = len(column)
    inner, leaves = (1 << depth) - 1, 1 << depth
    number = np.arange(inner)
    no_child = np.full(leaves, NO_CHILD)
    level_sizes = 1 << np.arange(depth)
    return Shape(
        np.concatenate([2 * number + 1, no_child]),
        np.concatenate([2 * number + 2, no_child]),
        np.concatenate([np.repeat(column, level_sizes), np.zeros(leaves, dtype=np.int64)]),
        np.concatenate([np.repeat(border, level_sizes), np.zeros(leaves)]),
        np.concatenate([np.full(inner, -1), np.arange(leaves)]),
    )


def _read_json_nested(
    tree: Any, places: dict[int, int], outputs: int
) -> tuple[Shape, Floats, Floats]:
    """Return the shape of a tree of nested objects, (leaves, outputs) values and (leaves,) weights."""
    rows: list[list[float]] = []  # left child, right child, column, border, leaf
    values: list[Any] = []
    weights: list[Any] = []
    stack: list[tuple[Any, int, int]] = [(tree, -1, 0)]
    while stack:
        node, parent, side = stack.pop()
        if not isinstance(node, dict):
            raise CheckpointError(*describe_damage(LIBRARY, "trees of objects"))
        if parent >= 0:
            rows[parent][side] = len(rows)
        if "split" in node:
            place, border = _read_json_split(node["split"], places)
            stack += [(node.get("right"), len(rows), 1), (node.get("left"), len(rows), 0)]
            rows.append([NO_CHILD, NO_CHILD, place, border, -1])
        else:
            value = get_member(node, "value", library=LIBRARY)
            value = value if isinstance(value, list) else [value]
            values.append(as_floats(value, "leaf values", LIBRARY, outputs))
            weights.append(node.get("weight"))
            rows.append([NO_CHILD, NO_CHILD, 0, 0.0, len(values) - 1])
    table = np.array(rows)
    left_child, right_child, column, leaf = table[:, [0, 1, 2, 4]].T.astype(np.int64)
    shape = Shape(left_child, right_child, column, table[:, 3], leaf)
    return shape, np.array(values), as_floats(weights, "leaf weights", LIBRARY)


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
    """Yield the numeric columns. Several entries of a hostile file can share the same borders."""
    borders = 0
    for entry in islice(model.tables(FLOAT_FEATURES), MAX_COLUMNS):
        column = Column(
            as_count(
                entry.number(FLAT_INDEX, "<i", -1), "flat_feature_index", LIBRARY, MAX_COLUMNS - 1
            ),
            entry.array(BORDERS, "<f4").astype(np.float64),
            entry.number(TREATMENT, "<b", 0) != AS_TRUE,
            entry.text(NAME)[:1000],
        )
        borders += len(column.borders) + len(column.name)
        if borders > MAX_BORDERS:
            raise UnsafeFileError(
                f"A model of CatBoost may have at most {MAX_BORDERS:,} borders; this file has more.",
                COPY_AGAIN,
            )
        yield column


def _read_binary_trees(
    model: Table, columns: list[Column], leaves: int, outputs: int
) -> Iterator[Shape]:
    """Yield the shapes of all trees. The splits number the borders of all columns one after another."""
    splits = model.array(SPLITS, "<i4").astype(np.int64)
    sizes = model.array(SIZES, "<i4").astype(np.int64)
    starts = model.array(STARTS, "<i4").astype(np.int64)
    if not len(sizes):  # a model of constant trees stores neither sizes nor starts
        raise ValueError("the trees are missing")
    is_inside = (sizes >= 0) & (starts >= 0) & (starts + sizes <= len(splits))
    if len(sizes) != len(starts) or not is_inside.all() or sizes.sum() > len(splits):
        raise ValueError("a tree is incomplete")
    counts = [len(column.borders) for column in columns]
    borders = np.concatenate([np.zeros(0), *(column.borders for column in columns)])
    places = np.repeat(np.arange(len(columns)), counts)
    # The steps of a node to its children are two numbers of 16 bits, which are read as a single number.
    steps = model.array(STEPS, "<u4").astype(np.int64)
    if not len(steps):
        yield from _read_binary_symmetric(splits, sizes, starts, places, borders, leaves)
        return
    leaf_numbers = model.array(LEAF_NUMBERS, "<u4").astype(np.int64)
    if not len(splits) == len(steps) == len(leaf_numbers):
        raise ValueError("the nodes of a tree are incomplete")
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        span = slice(start, start + size)
        if not size:
            raise ValueError("a tree has no nodes")
        yield _read_binary_nodes(
            steps[span], splits[span], leaf_numbers[span], places, borders, (leaves, outputs)
        )


def _read_binary_nodes(
    steps: Integers,
    splits: Integers,
    leaf_numbers: Integers,
    places: Integers,
    borders: Floats,
    value_shape: tuple[int, int],
) -> Shape:
    """Return the shape of a tree whose nodes state the steps to their children."""
    # If only one step is 0, this child is a leaf without a node, and the node states the number of this leaf.
    to_left, to_right = steps & 0xFFFF, steps >> 16
    is_inner = (to_left > 0) | (to_right > 0)
    lacks_left, lacks_right = is_inner & (to_left == 0), is_inner & (to_right == 0)
    states_leaf = ~is_inner | lacks_left | lacks_right
    leaf, remainder = np.divmod(np.where(states_leaf, leaf_numbers, 0), value_shape[1])
    if (leaf >= value_shape[0]).any() or remainder.any():
        raise ValueError("a leaf has no value")
    _check_splits(splits[is_inner], len(borders))
    number = np.arange(len(steps))
    new_leaves = np.flatnonzero(lacks_left | lacks_right)
    new_numbers = np.zeros_like(number)
    new_numbers[new_leaves] = len(number) + np.arange(len(new_leaves))
    left_child = np.where(lacks_left, new_numbers, number + to_left)
    right_child = np.where(lacks_right, new_numbers, number + to_right)
    column = np.zeros_like(number)
    border = np.zeros(len(number))
    column[is_inner], border[is_inner] = places[splits[is_inner]], borders[splits[is_inner]]
    no_child, no_column = np.full(len(new_leaves), NO_CHILD), np.zeros_like(new_leaves)
    return Shape(
        np.concatenate([np.where(is_inner, left_child, NO_CHILD), no_child]),
        np.concatenate([np.where(is_inner, right_child, NO_CHILD), no_child]),
        np.concatenate([column, no_column]),
        np.concatenate([border, no_column]),
        np.concatenate([np.where(is_inner, -1, leaf), leaf[new_leaves]]),
    )


def _read_binary_symmetric(
    splits: Integers,
    sizes: Integers,
    starts: Integers,
    places: Integers,
    borders: Floats,
    leaves: int,
) -> Iterator[Shape]:
    if (sizes > MAX_DEPTH).any() or (1 << sizes).sum() != leaves:
        raise ValueError("the leaf values do not belong to the trees")
    _check_splits(splits, len(borders))
    first_leaf = 0
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        split = splits[start : start + size]
        shape = _symmetric_shape(places[split], borders[split])
        leaf = np.where(shape.leaf < 0, -1, shape.leaf + first_leaf)
        yield Shape(shape.left_child, shape.right_child, shape.column, shape.border, leaf)
        first_leaf += 1 << size


def _check_splits(splits: Integers, borders: int) -> None:
    """Refuse splits that are not numbers of borders, as those of categorical columns."""
    if (splits < 0).any():
        raise ValueError("a split is negative")
    if (splits >= borders).any():
        raise CheckpointError(*describe_unsupported(LIBRARY, NOT_NUMERIC))


def _read_settings(core: Table) -> Any:
    """Return the settings of the training that a binary model stores as JSON, None if there are none."""
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
    """Return the forest of all trees, one tree for each output of a tree.

    Args:
        columns: The numeric columns.
        shapes: The trees.
        values: (leaves, outputs) values of all leaves.
        weights: (leaves,) weights of all leaves, NaN if they are not stored.
        scale: Factor of the sum of the trees.
        offset: (outputs,) number that is added to the sum.
        settings: Settings of the training.

    Returns:
        The forest.

    Raises:
        CheckpointError: If the model is damaged.
    """
    outputs = values.shape[1]
    numbers = np.array([column.number for column in columns], dtype=np.int64)
    if len(offset) != outputs or not np.isfinite([scale, *offset]).all():
        raise CheckpointError(*describe_damage(LIBRARY, "a scale and a bias for each output"))
    if len(np.unique(numbers)) != len(numbers):
        raise CheckpointError(*describe_damage(LIBRARY, "numeric columns with different numbers"))
    check_size(len(shapes) * outputs, sum(len(s.leaf) for s in shapes) * outputs, LIBRARY)
    width = int(numbers.max(initial=-1)) + 1
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
            nodes = Nodes(
                shape.left_child,
                shape.right_child,
                numbers[shape.column] if has_columns else np.zeros_like(shape.column),
                shape.border,
                np.where(is_leaf, scale * values[shape.leaf, k], np.nan),
                missing_left[shape.column] if has_columns else is_leaf,
                weight=_sum_up(shape, leaf_weights) if has_weights else None,
            )
            trees.append(build_tree(nodes, width, LIBRARY))
    names = [""] * width
    edges = [np.zeros(0)] * width
    for column in columns:
        names[column.number], edges[column.number] = column.name, column.borders
    return Forest(
        trees=tuple(trees),
        columns=width,
        has_midpoints=False,
        names=column_names(names, width),
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
    """Return the sum of the weights of the leaves below each node. Children come after their parents."""
    weights = leaf_weights.copy()
    inner = np.flatnonzero(shape.left_child != NO_CHILD)[::-1]
    children = np.stack([shape.left_child[inner], shape.right_child[inner]], 1)
    if ((children <= inner[:, None]) | (children >= len(weights))).any():
        raise CheckpointError(*describe_damage(LIBRARY, "nodes that form trees"))
    for node, (low_child, high_child) in zip(inner.tolist(), children.tolist(), strict=True):
        weights[node] = weights[low_child] + weights[high_child]
    return weights


def _member_of(settings: Any, *keys: str) -> Any:
    for key in keys:
        settings = settings.get(key) if isinstance(settings, dict) else None
    return settings


def _number_of(settings: Any, *keys: str) -> float | None:
    value = _member_of(settings, *keys)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None
