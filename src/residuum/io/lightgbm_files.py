"""Read models of LightGBM: text files, and the text of a model in a pickle of LightGBM.

The text has one line ``name=value`` for each property of the model, and then one block of such lines for each
tree. The inner nodes of a tree are numbered from 0 and its leaves from -1 downward. The property
``feature_infos`` holds the smallest and the largest value of each column of the training table.

A record goes to the left child if its float64 value is at most the threshold. For a missing value, the
decision type of a node states the direction, or that the value counts as 0.
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
MAX_TEXT_BYTES = 512 << 20  # largest text of a model
IS_CATEGORICAL, DEFAULT_LEFT = (
    1,
    2,
)  # bits of a decision type; the next two bits are the missing type
MISSING_NONE, MISSING_ZERO = 0, 1  # missing types: NaN counts as 0; zeros count as missing
RANGE = re.compile(r"\[([^:\[\]]+):([^:\[\]]+)\]")
PARAMETER = re.compile(r"^\[(\w+): (.+)\]$", re.MULTILINE)
# Settings that make the value of a leaf differ from the mean target of its records.
CHANGES_OF_MEANS = ("lambda_l1", "lambda_l2", "path_smooth", "max_delta_step", "reg_sqrt")
DEFAULT_NAME = re.compile(r"Column_\d+")


@np.errstate(all="ignore")  # damaged numbers may be of any size
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
            f"A model of LightGBM may have at most {MAX_TEXT_BYTES >> 20} MB; this model has more.",
            "Save the model with fewer trees.",
        )
    text = text.replace("\r\n", "\n")
    body, end, _ = text.partition("\nend of trees")
    if not text.startswith("tree\n") or not end:
        raise CheckpointError(*describe_damage(LIBRARY, "the lines from 'tree' to 'end of trees'"))
    starts = [match.start() for match in re.finditer(r"^Tree=", body, re.MULTILINE)]
    model = _read_properties(body[: starts[0]] if starts else body)
    columns = as_count(model.get("max_feature_idx"), "max_feature_idx", LIBRARY, MAX_COLUMNS) + 1
    outputs_of_model = as_count(
        model.get("num_tree_per_iteration"), "num_tree_per_iteration", LIBRARY, MAX_OUTPUTS
    )
    blocks = [_read_properties(body[a:b]) for a, b in pairwise([*starts, len(body)])]
    sizes = model.get("tree_sizes", "").split()
    if outputs_of_model < 1 or len(sizes) not in (0, len(blocks)):
        raise CheckpointError(*describe_damage(LIBRARY, "as many trees as it states"))
    nodes = [_read_nodes(block) for block in blocks]
    if any(n.weight is None for n in nodes):
        nodes = [replace(n, weight=None) for n in nodes]
    if any(n.count is None for n in nodes):
        nodes = [replace(n, count=None) for n in nodes]
    check_size(len(nodes), sum(len(n.left_child) for n in nodes), LIBRARY)
    trees = tuple(build_tree(n, columns, LIBRARY) for n in nodes)
    names = model.get("feature_names", "").split(" ")
    has_default_names = all(map(DEFAULT_NAME.fullmatch, names))
    forest = Forest(
        trees=trees,
        columns=columns,
        has_midpoints=False,
        names=() if has_default_names else column_names(names, columns),
        kind=BOOSTING,
        library=LIBRARY,
        offset=np.zeros(outputs_of_model),
        outputs=np.arange(len(trees)) % outputs_of_model,
        learning_rate=_learning_rate(blocks, text),
        regularization=_setting(text, "lambda_l2"),
        objective=model.get("objective", "").partition(" ")[0][:100],
        compares_doubles=True,
        stored_ranges=_read_ranges(model.get("feature_infos", "").split(" "), columns),
    )
    return _as_mean(forest, outputs_of_model, text) if "average_output" in model else forest


def read_parameters(text: str) -> dict[str, str]:
    """Return the settings that a model of LightGBM stores after its trees, such as the name of a data file.

    Args:
        text: The text of the model.

    Returns:
        The settings that are not empty.
    """
    settings = text.partition("\nparameters:")[2].partition("\nend of parameters")[0]
    return {name: value[:1000] for name, value in PARAMETER.findall(settings)}


def _read_properties(block: str) -> dict[str, str]:
    """Return the properties in lines ``name=value``."""
    properties: dict[str, str] = {}
    for line in block.split("\n"):
        name, _, value = line.partition("=")
        properties[name] = value
    return properties


def _read_nodes(block: dict[str, str]) -> Nodes:
    """Return the nodes of a tree: its inner nodes, then its leaves."""
    leaves = as_count(block.get("num_leaves"), "num_leaves", LIBRARY, MAX_NODES)
    if leaves < 1:
        raise CheckpointError(*describe_damage(LIBRARY, "at least one leaf in each tree"))
    if block.get("is_linear", "0") != "0":
        raise CheckpointError(
            *describe_unsupported(LIBRARY, "leaves with linear models (linear_tree)")
        )
    inner = leaves - 1

    def numbers(name: str, length: int) -> Floats:
        return as_floats(block.get(name, "").split(), name, LIBRARY, length)

    def joined(name: str) -> Floats | None:
        """Return a property of inner nodes and leaves, None if the file does not store it."""
        has_inner = not inner or f"internal_{name}" in block
        if not block.get(f"leaf_{name}") or not has_inner:  # a tree of one leaf states no weight
            return None
        leaf_values = numbers(f"leaf_{name}", leaves)
        return np.concatenate([numbers(f"internal_{name}", inner) if inner else [], leaf_values])

    def integers(name: str) -> Any:
        return as_integers(block.get(name, "").split() if inner else [], name, LIBRARY, inner)

    decision_type = integers("decision_type")
    if (decision_type & IS_CATEGORICAL).any() or block.get("num_cat", "0") != "0":
        raise CheckpointError(*describe_unsupported(LIBRARY, "categorical splits"))
    missing_type = (decision_type >> 2) & 3
    if (missing_type == MISSING_ZERO).any():
        raise CheckpointError(
            *describe_unsupported(LIBRARY, "splits that treat zeros as missing (zero_as_missing)")
        )
    threshold = numbers("threshold", inner) if inner else np.zeros(0)
    goes_left = np.where(
        missing_type == MISSING_NONE, threshold >= 0, decision_type & DEFAULT_LEFT != 0
    )
    children = [integers(name) for name in ("left_child", "right_child")]
    # Leaf number k is stored as -k - 1, and becomes node number inner + k.
    left_child, right_child = (
        np.concatenate([np.where(c < 0, inner - 1 - c, c), np.full(leaves, NO_CHILD)])
        for c in children
    )
    of_leaf = np.zeros(leaves)
    value = joined("value")
    if value is None:
        value = np.concatenate([np.full(inner, np.nan), numbers("leaf_value", leaves)])
    count = joined("count")
    return Nodes(
        left_child.astype(np.int64),
        right_child.astype(np.int64),
        np.concatenate([integers("split_feature"), of_leaf]).astype(np.int64),
        threshold=np.concatenate([threshold, of_leaf]),
        value=value,
        missing_left=np.concatenate([goes_left, of_leaf]).astype(bool),
        weight=joined("weight"),
        count=None if count is None else as_integers(count, "counts", LIBRARY),
    )


def _read_ranges(infos: list[str], columns: int) -> tuple[Floats, Floats] | None:
    """Return the smallest and the largest training value of each column, NaN where the file has none."""
    if len(infos) != columns:
        return None
    matches = [RANGE.fullmatch(info) for info in infos]
    low, high = (
        as_floats(["nan" if m is None else m[k] for m in matches], "feature_infos", LIBRARY)
        for k in (1, 2)
    )
    if (low > high).any():
        raise CheckpointError(
            *describe_damage(LIBRARY, "ranges of columns whose ends are in order")
        )
    return low, high


def _learning_rate(blocks: list[dict[str, str]], text: str) -> float | None:
    """Return the factor that all trees state, None if they differ."""
    # LightGBM adds the mean target to the first trees and then states the factor 1 for them.
    factors = {block.get("shrinkage", "") for block in blocks}
    if len(factors) > 1:
        factors.discard("1")
    elif factors == {"1"} and _setting(text, "boosting") != "rf":
        return _setting(text, "learning_rate")
    factor = as_floats([*factors], "shrinkage", LIBRARY) if "" not in factors else np.zeros(0)
    return float(factor[0]) if len(factor) == 1 and np.isfinite(factor[0]) else None


def _setting(text: str, name: str) -> Any:
    """Return a setting of the training as a number, as a text if it is none, and None if it is missing."""
    value = read_parameters(text).get(name)
    try:
        return None if value is None else float(value)
    except ValueError:
        return value


def _as_mean(forest: Forest, outputs: int, text: str) -> Forest:
    """Return a random forest, whose trees are averaged. Leaves of a regression store mean targets."""
    changes_values = any(_setting(text, name) != 0 for name in CHANGES_OF_MEANS)
    if forest.objective == "regression" and outputs == 1 and not changes_values:
        return replace(forest, kind=AVERAGE, offset=None, outputs=None, learning_rate=None)
    iterations = max(len(forest.trees) // outputs, 1)
    trees = tuple(replace(t, value=t.value / iterations) for t in forest.trees)
    return replace(forest, trees=trees)
