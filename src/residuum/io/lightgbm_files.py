"""Read models of LightGBM: text files, and the text of a model in a pickle of LightGBM.

The text has one line ``name=value`` for each property of the model, and then one block of such lines for each
tree. The inner nodes of a tree have the numbers 0, 1, 2 and so on, and its leaves -1, -2, -3 and so on. The
property ``feature_infos`` holds the smallest and the largest value of each column of the training table.

A record goes to the left child if its float64 value is at most the threshold. The number ``decision_type`` of
a node states where missing values go: to the left, to the right, or to the same child as the value 0.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.boosted_trees import (
    MAX_COLUMNS,
    MAX_NODES,
    MAX_OUTPUTS,
    Nodes,
    as_count,
    as_floats,
    as_integers,
    build_tree,
    check_size,
    column_names,
    describe_damage,
    describe_unsupported,
)
from residuum.trees.forest import AVERAGE, BOOSTING, NO_CHILD, Floats, Forest

LIBRARY = "lightgbm"
MAGIC = b"tree\n"
MAX_TEXT_BYTES = 512 << 20  # largest size of a model as text, in bytes
# Bits of the number ``decision_type`` of a node. The next two bits are the missing type of the node.
IS_CATEGORICAL, DEFAULT_LEFT = 1, 2
# Missing types of a node. For MISSING_NONE, NaN counts as 0. For MISSING_ZERO, 0 counts as a missing value.
MISSING_NONE, MISSING_ZERO = 0, 1
RANGE = re.compile(r"\[([^:\[\]]+):([^:\[\]]+)\]")
PARAMETER = re.compile(r"^\[(\w+): (.+)\]$", re.MULTILINE)
# Settings that make the value of a leaf differ from the mean target of its records.
CHANGES_OF_MEANS = ("lambda_l1", "lambda_l2", "path_smooth", "max_delta_step", "reg_sqrt")
DEFAULT_NAME = re.compile(r"Column_\d+")


@np.errstate(all="ignore")  # numbers of a damaged file may overflow
def read_lightgbm(text: str) -> Forest:
    """Return the trees of a model of LightGBM. Nothing in the model is executed.

    Args:
        text: The text of the model.

    Returns:
        The trees.

    Raises:
        UnsafeFileError: If the text is too long.
        CheckpointError: If the model is damaged, or of a kind that residuum does not read.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise UnsafeFileError(
            f"A model of LightGBM may have at most {MAX_TEXT_BYTES >> 20} MB as text; this model has more.",
            "Save the model with fewer trees.",
        )
    text = text.replace("\r\n", "\n")
    body, end, _ = text.partition("\nend of trees")
    if not text.startswith("tree\n") or not end:
        raise CheckpointError(*describe_damage(LIBRARY, "the lines from 'tree' to 'end of trees'"))
    tree_starts = [match.start() for match in re.finditer(r"^Tree=", body, re.MULTILINE)]
    properties = _read_properties(body[: tree_starts[0]] if tree_starts else body)
    column_count = (
        as_count(properties.get("max_feature_idx"), "max_feature_idx", LIBRARY, MAX_COLUMNS) + 1
    )
    output_count = as_count(
        properties.get("num_tree_per_iteration"), "num_tree_per_iteration", LIBRARY, MAX_OUTPUTS
    )
    tree_blocks = [_read_properties(body[a:b]) for a, b in pairwise([*tree_starts, len(body)])]
    tree_sizes = properties.get("tree_sizes", "").split()
    if output_count < 1 or len(tree_sizes) not in (0, len(tree_blocks)):
        raise CheckpointError(*describe_damage(LIBRARY, "as many trees as it states"))
    nodes_of_trees = [_read_nodes(block) for block in tree_blocks]
    if any(nodes.weight is None for nodes in nodes_of_trees):
        nodes_of_trees = [replace(nodes, weight=None) for nodes in nodes_of_trees]
    if any(nodes.count is None for nodes in nodes_of_trees):
        nodes_of_trees = [replace(nodes, count=None) for nodes in nodes_of_trees]
    check_size(len(nodes_of_trees), sum(len(nodes.left_child) for nodes in nodes_of_trees), LIBRARY)
    trees = tuple(build_tree(nodes, column_count, LIBRARY) for nodes in nodes_of_trees)
    names = properties.get("feature_names", "").split(" ")
    has_default_names = all(map(DEFAULT_NAME.fullmatch, names))
    forest = Forest(
        trees=trees,
        columns=column_count,
        has_midpoints=False,
        names=() if has_default_names else column_names(names, column_count),
        kind=BOOSTING,
        library=LIBRARY,
        offset=np.zeros(output_count),
        outputs=np.arange(len(trees)) % output_count,
        learning_rate=_learning_rate(tree_blocks, text),
        regularization=_setting(text, "lambda_l2"),
        objective=properties.get("objective", "").partition(" ")[0][:100],
        compares_doubles=True,
        stored_ranges=_read_ranges(properties.get("feature_infos", "").split(" "), column_count),
    )
    return _as_mean(forest, output_count, text) if "average_output" in properties else forest


def read_parameters(text: str) -> dict[str, str]:
    """Return the settings that a model of LightGBM stores after its trees, such as the name of a data file.

    Args:
        text: The text of the model.

    Returns:
        The settings that are not empty.
    """
    settings_text = text.partition("\nparameters:")[2].partition("\nend of parameters")[0]
    return {name: value[:1000] for name, value in PARAMETER.findall(settings_text)}


def _read_properties(block: str) -> dict[str, str]:
    """Return the properties in the lines ``name=value`` of a text, by name."""
    properties: dict[str, str] = {}
    for line in block.split("\n"):
        name, _, value = line.partition("=")
        properties[name] = value
    return properties


def _read_nodes(block: dict[str, str]) -> Nodes:
    """Return the nodes of a tree from its properties in the file. Inner nodes come before leaves."""
    leaf_count = as_count(block.get("num_leaves"), "num_leaves", LIBRARY, MAX_NODES)
    if leaf_count < 1:
        raise CheckpointError(*describe_damage(LIBRARY, "at least one leaf in each tree"))
    if block.get("is_linear", "0") != "0":
        raise CheckpointError(
            *describe_unsupported(LIBRARY, "leaves with linear models (linear_tree)")
        )
    inner_count = leaf_count - 1

    def numbers(name: str, length: int) -> Floats:
        return as_floats(block.get(name, "").split(), name, LIBRARY, length)

    def numbers_of_all_nodes(name: str) -> Floats | None:
        """Return a property of all nodes, such as "count", or None if the file does not store it."""
        # A tree with a single leaf stores no weight.
        has_inner_values = not inner_count or f"internal_{name}" in block
        if not block.get(f"leaf_{name}") or not has_inner_values:
            return None
        leaf_values = numbers(f"leaf_{name}", leaf_count)
        return np.concatenate(
            [numbers(f"internal_{name}", inner_count) if inner_count else [], leaf_values]
        )

    def integers(name: str) -> Any:
        return as_integers(
            block.get(name, "").split() if inner_count else [], name, LIBRARY, inner_count
        )

    decision_type = integers("decision_type")
    if (decision_type & IS_CATEGORICAL).any() or block.get("num_cat", "0") != "0":
        raise CheckpointError(*describe_unsupported(LIBRARY, "categorical splits"))
    missing_type = (decision_type >> 2) & 3
    if (missing_type == MISSING_ZERO).any():
        raise CheckpointError(
            *describe_unsupported(LIBRARY, "splits that treat zeros as missing (zero_as_missing)")
        )
    threshold = numbers("threshold", inner_count) if inner_count else np.zeros(0)
    missing_goes_left = np.where(
        missing_type == MISSING_NONE, threshold >= 0, decision_type & DEFAULT_LEFT != 0
    )
    children = [integers(name) for name in ("left_child", "right_child")]
    # The file refers to leaf k by the number -k - 1. In our arrays, leaf k is node ``inner_count + k``.
    left_child, right_child = (
        np.concatenate([np.where(c < 0, inner_count - 1 - c, c), np.full(leaf_count, NO_CHILD)])
        for c in children
    )
    leaf_zeros = np.zeros(leaf_count)
    value = numbers_of_all_nodes("value")
    if value is None:
        value = np.concatenate([np.full(inner_count, np.nan), numbers("leaf_value", leaf_count)])
    count = numbers_of_all_nodes("count")
    return Nodes(
        left_child.astype(np.int64),
        right_child.astype(np.int64),
        np.concatenate([integers("split_feature"), leaf_zeros]).astype(np.int64),
        threshold=np.concatenate([threshold, leaf_zeros]),
        value=value,
        missing_left=np.concatenate([missing_goes_left, leaf_zeros]).astype(bool),
        weight=numbers_of_all_nodes("weight"),
        count=None if count is None else as_integers(count, "counts", LIBRARY),
    )


def _read_ranges(infos: list[str], columns: int) -> tuple[Floats, Floats] | None:
    """Return the smallest and the largest training value of each column, NaN for a column without them."""
    if len(infos) != columns:
        return None
    range_matches = [RANGE.fullmatch(info) for info in infos]
    low, high = (
        as_floats(["nan" if m is None else m[k] for m in range_matches], "feature_infos", LIBRARY)
        for k in (1, 2)
    )
    if (low > high).any():
        raise CheckpointError(
            *describe_damage(LIBRARY, "ranges of columns whose ends are in order")
        )
    return low, high


def _learning_rate(blocks: list[dict[str, str]], text: str) -> float | None:
    """Return the learning rate if all trees state the same learning rate ``shrinkage``, otherwise None."""
    # LightGBM adds the mean target to the first trees and then states the learning rate 1 for these trees.
    rates = {block.get("shrinkage", "") for block in blocks}
    if len(rates) > 1:
        rates.discard("1")
    elif rates == {"1"} and _setting(text, "boosting") != "rf":
        return _setting(text, "learning_rate")
    rate = as_floats([*rates], "shrinkage", LIBRARY) if "" not in rates else np.zeros(0)
    return float(rate[0]) if len(rate) == 1 and np.isfinite(rate[0]) else None


def _setting(text: str, name: str) -> Any:
    """Return a training setting as a number, or as a text if it is not a number, or None if it is missing."""
    value = read_parameters(text).get(name)
    try:
        return None if value is None else float(value)
    except ValueError:
        return value


def _as_mean(forest: Forest, output_count: int, text: str) -> Forest:
    """Return a model of LightGBM with ``boosting=rf`` as a random forest, which averages its trees.

    A leaf of a regression tree stores the mean target of its records, unless a setting changes this value.
    Other forests are returned as boosting, with leaf values divided by the number of trees of each output.

    Args:
        forest: The trees as boosting.
        output_count: Number of outputs of the model.
        text: The text of the model, which holds its settings.

    Returns:
        The forest.
    """
    has_changed_means = any(_setting(text, name) != 0 for name in CHANGES_OF_MEANS)
    if forest.objective == "regression" and output_count == 1 and not has_changed_means:
        return replace(forest, kind=AVERAGE, offset=None, outputs=None, learning_rate=None)
    trees_per_output = max(len(forest.trees) // output_count, 1)
    trees = tuple(replace(t, value=t.value / trees_per_output) for t in forest.trees)
    return replace(forest, trees=trees)
