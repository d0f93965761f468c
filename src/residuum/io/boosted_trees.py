"""Check the boosted trees that a model file describes, and sort their nodes so that parents come first.

The readers of XGBoost, LightGBM and CatBoost get arrays of nodes from an untrusted file. :func:`build_tree`
accepts them only if the nodes that can be reached from the root form one tree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.safetensors_files import COPY_AGAIN
from residuum.trees.forest import NO_CHILD, Booleans, Floats, Integers, Tree

MAX_NODES = 50_000_000  # largest number of nodes of all trees of a model
MAX_TREES = 1_000_000  # largest number of trees of a model
# Largest number of columns. A table of hashed words has up to a million columns.
MAX_COLUMNS = 1 << 22
MAX_OUTPUTS = 100_000  # largest number of classes or targets
MAX_INTEGER = 2**31 - 1  # largest index of a node or of a column
MAX_NAME = 200  # longest name of a column that is kept, in characters
MAX_JSON_BYTES = 256 << 20  # largest JSON file
# Largest number of lists and objects in a JSON file. Python needs up to 230 bytes of memory for an empty list
# or object, which takes only two bytes of a file.
MAX_CONTAINERS = 2_000_000


@dataclass(frozen=True)
class Nodes:
    """The nodes of a tree as a model file describes them, with node 0 as the root.

    Attributes:
        left_child: Index of the left child of each node, -1 for a leaf.
        right_child: Index of the right child of each node, -1 for a leaf.
        feature: Column that each node splits.
        threshold: Threshold of each split.
        value: (nodes,) value of each node, NaN for inner nodes without values.
        missing_left: Whether missing values go to the left child.
        weight: Sum of weights or second derivatives below each node, None if the file stores none.
        count: Number of records below each node, None if the file stores none.
        unused: Number of nodes that the library may have deleted. The arrays still list deleted nodes, but
            no path from the root leads to them.
    """

    left_child: Integers
    right_child: Integers
    feature: Integers
    threshold: Floats
    value: Floats
    missing_left: Booleans
    weight: Floats | None = None
    count: Integers | None = None
    unused: int = 0


def describe_damage(library: str, what: str) -> tuple[str, str]:
    """Return the error message and the remedy for a model file that lacks something or is damaged.

    Args:
        library: Name of the library that wrote the file.
        what: What the file must hold, such as "leaf values".

    Returns:
        The message and the remedy.
    """
    return f"A model of {library} must hold {what}; this file does not.", COPY_AGAIN


def describe_unsupported(library: str, what: str) -> tuple[str, str]:
    """Return the error message and the remedy for a model of a kind that residuum does not read.

    Args:
        library: Name of the library that wrote the file.
        what: What the file holds, such as "categorical splits".

    Returns:
        The message and the remedy.
    """
    return (
        f"residuum reads models of {library} whose trees split numeric columns and store one number per "
        f"leaf; this file holds {what}.",
        "This model cannot be scanned or audited by its trees.",
    )


def read_json(raw: bytes, library: str) -> Any:
    """Return the content of a JSON text of limited size.

    Args:
        raw: The text.
        library: Name of the library that wrote the text.

    Returns:
        The content.

    Raises:
        UnsafeFileError: If the text has too many bytes, or too many lists and objects.
        CheckpointError: If the text is not JSON.
    """
    if len(raw) > MAX_JSON_BYTES or raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS:
        raise UnsafeFileError(
            f"A JSON file of a model may have at most {MAX_JSON_BYTES >> 20} MB, with at most "
            f"{MAX_CONTAINERS:,} lists and objects; this file has more.",
            "Save the model in a binary format, or with fewer trees.",
        )
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(*describe_damage(library, "a complete JSON text")) from problem


def get_member(value: Any, *keys: str, library: str) -> Any:
    """Return a member of nested JSON objects.

    Args:
        value: The outer object.
        *keys: The names of the members, from the outermost to the innermost.
        library: Name of the library that wrote the file.

    Returns:
        The member.

    Raises:
        CheckpointError: If a member is missing.
    """
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            raise CheckpointError(*describe_damage(library, f"the member {key!r}"))
        value = value[key]
    return value


def as_floats(value: Any, what: str, library: str, length: int | None = None) -> Floats:
    """Return numbers of a model file as an array.

    Args:
        value: A list of numbers or texts, or an array.
        what: What the numbers are, for the error message.
        library: Name of the library that wrote the file.
        length: Expected number of values, None for any number.

    Returns:
        (length,) the numbers.

    Raises:
        CheckpointError: If the value does not hold this many numbers.
    """
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as problem:
        raise CheckpointError(*describe_damage(library, f"numbers as {what}")) from problem
    if numbers.ndim != 1 or (length is not None and len(numbers) != length):
        expected_values = "a list of numbers" if length is None else f"{length} numbers"
        raise CheckpointError(*describe_damage(library, f"{expected_values} as {what}"))
    return numbers


def as_integers(value: Any, what: str, library: str, length: int | None = None) -> Integers:
    """Return integers of a model file as an array.

    Args:
        value: A list of numbers or texts, or an array.
        what: What the numbers are, for the error message.
        library: Name of the library that wrote the file.
        length: Expected number of values, None for any number.

    Returns:
        (length,) the integers.

    Raises:
        CheckpointError: If the value does not hold this many integers of 32 bits.
    """
    numbers = as_floats(value, what, library, length)
    if not (np.abs(numbers) <= MAX_INTEGER).all() or (numbers != np.round(numbers)).any():
        raise CheckpointError(*describe_damage(library, f"integers of 32 bits as {what}"))
    return numbers.astype(np.int64)


def as_count(value: Any, what: str, library: str, limit: int) -> int:
    """Return a count or an index in a model file, such as a number of columns, as an integer.

    Args:
        value: A number, or its text.
        what: Name of the count or index, for the error message.
        library: Name of the library that wrote the file.
        limit: The largest allowed number.

    Returns:
        The number.

    Raises:
        CheckpointError: If the value is not an integer of at least 0.
        UnsafeFileError: If the number exceeds the limit.
    """
    number = int(as_integers([value], what, library, 1)[0])
    if number < 0:
        raise CheckpointError(*describe_damage(library, f"no negative {what}"))
    if number > limit:
        raise UnsafeFileError(
            f"A model file of {library} may state at most {limit:,} as the {what}; this file states "
            f"{number:,}.",
            COPY_AGAIN,
        )
    return number


def column_names(names: Iterable[Any], columns: int) -> tuple[str, ...]:
    """Return the names of the columns, or () if the file does not hold one text for each column.

    Args:
        names: The names in the file.
        columns: Number of columns.

    Returns:
        The names without characters that cannot be written as UTF-8.
    """
    texts = list(names)
    if len(texts) != columns or not all(isinstance(name, str) and name for name in texts):
        return ()
    return tuple(name[:MAX_NAME].encode("utf-8", "replace").decode() for name in texts)


def build_tree(nodes: Nodes, columns: int, library: str) -> Tree:
    """Return the tree that the nodes in a model file form. Every parent comes before its children.

    Args:
        nodes: The nodes.
        columns: Number of columns of the table.
        library: Name of the library that wrote the file.

    Returns:
        The tree.

    Raises:
        CheckpointError: If the nodes do not form one tree.
    """
    nodes_in_order = _reachable_nodes(nodes.left_child, nodes.right_child)
    node_count = len(nodes.left_child)
    if nodes_in_order is None or node_count - len(nodes_in_order) > nodes.unused:
        raise CheckpointError(*describe_damage(library, "nodes that form trees"))
    # A leaf has the child -1. This index selects the last entry of ``new_index``, which is also -1.
    new_index = np.full(node_count + 1, NO_CHILD)
    new_index[nodes_in_order] = np.arange(len(nodes_in_order))
    left_child = new_index[nodes.left_child[nodes_in_order]]
    is_inner = left_child != NO_CHILD
    feature, threshold, value = (
        nodes.feature[nodes_in_order],
        nodes.threshold[nodes_in_order],
        nodes.value[nodes_in_order],
    )
    if ((feature[is_inner] < 0) | (feature[is_inner] >= columns)).any():
        raise CheckpointError(*describe_damage(library, "splits of columns that exist"))
    if np.isnan(threshold[is_inner]).any() or not np.isfinite(value[~is_inner]).all():
        raise CheckpointError(
            *describe_damage(library, "finite values of leaves, and numbers as thresholds")
        )
    weight = None if nodes.weight is None else nodes.weight[nodes_in_order]
    if weight is not None and not np.isfinite(weight).all():
        raise CheckpointError(*describe_damage(library, "finite weights of nodes"))
    return Tree(
        left=left_child,
        right=new_index[nodes.right_child[nodes_in_order]],
        feature=feature,
        threshold=threshold,
        value=value[:, None],
        weight=weight,
        count=None if nodes.count is None else nodes.count[nodes_in_order],
        missing_left=nodes.missing_left[nodes_in_order],
    )


def check_size(trees: int, nodes: int, library: str) -> None:
    """Raise an error if a model of boosted trees has too many trees or nodes, or no trees.

    Args:
        trees: Number of trees.
        nodes: Number of nodes of all trees.
        library: Name of the library that wrote the file.

    Raises:
        UnsafeFileError: If the model has too many trees or nodes.
        CheckpointError: If the model has no trees.
    """
    if trees > MAX_TREES or nodes > MAX_NODES:
        raise UnsafeFileError(
            f"A model of {library} may have at most {MAX_TREES:,} trees and {MAX_NODES:,} nodes; this file "
            "has more.",
            "Save the model with fewer trees.",
        )
    if not trees:
        raise CheckpointError(*describe_damage(library, "at least one tree"))


def _reachable_nodes(left_child: Integers, right_child: Integers) -> Integers | None:
    """Return the indices of all nodes of a tree from the root down, or None if the nodes form no tree."""
    node_count = len(left_child)
    inner_nodes = np.flatnonzero(left_child != NO_CHILD)
    children = np.concatenate([left_child[inner_nodes], right_child[inner_nodes]])
    has_single_child = ((left_child == NO_CHILD) != (right_child == NO_CHILD)).any()
    if not node_count or has_single_child or ((children < 0) | (children >= node_count)).any():
        return None
    is_ordered = bool(
        (left_child[inner_nodes] > inner_nodes).all()
        and (right_child[inner_nodes] > inner_nodes).all()
    )
    if is_ordered and len(np.unique(children)) == len(children) == node_count - 1:
        return np.arange(node_count)
    return _traverse(left_child.tolist(), right_child.tolist())


def _traverse(left_child: list[int], right_child: list[int]) -> Integers | None:
    """Return the indices of all nodes of a tree in depth-first order, or None if a node has two parents."""
    is_visited = bytearray(len(left_child))
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        if is_visited[node]:
            return None
        is_visited[node] = 1
        order.append(node)
        if left_child[node] != NO_CHILD:
            stack += [right_child[node], left_child[node]]
    return np.array(order, dtype=np.int64)
