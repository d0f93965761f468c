"""List everything in a model file that holds numbers: arrays, tables, sparse matrices, lists, and trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residuum.errors import ResiduumError
from residuum.io.forests import read_forests
from residuum.io.inert import Block, InertObject, NumberReader
from residuum.io.pickle_reader import StoredTensor
from residuum.io.release import Release
from residuum.io.tree import Place, walk
from residuum.scanning.record_arrays import FRAME, read_records
from residuum.scanning.tree_rules import name_of
from residuum.trees.forest import NO_CHILD

MIN_NUMBERS = 5  # smallest number of numbers in a list or dict that is searched
MAX_LIST = 5_000_000  # largest number of entries of a list that is converted to an array


@dataclass(frozen=True, eq=False)
class NumberSource:
    """An array, table or list of numbers in a model file.

    Attributes:
        path: Place in the model file.
        kind: Dtype of the numbers, or what holds them, such as "DataFrame".
        reader: Reads the numbers.
        has_rows: Whether the numbers can form rows. If not, only single values are searched.
    """

    path: str
    kind: str
    reader: NumberReader
    has_rows: bool = True


def read_tensor(tensor: Tensor) -> NumberReader:
    """Return a reader of a tensor in memory."""
    flat_tensor = tensor.detach().reshape(-1).cpu()
    return NumberReader(tuple(tensor.shape), lambda first, last: flat_tensor[first:last])


def list_numbers(release: Release, *, rows_only: bool = False) -> Iterator[NumberSource]:
    """Yield everything in a model file that holds numbers. The numbers are not read yet.

    Args:
        release: The model file that was opened.
        rows_only: Whether to leave out numbers that cannot form rows, such as thresholds of trees.

    Yields:
        The sources of numbers, in the order of the release.
    """
    read_ids: set[int] = set()  # ids of lists that were read as rows of a list of lists
    # The last array that was read completely, which is kept for the next source of numbers.
    last_array: list[tuple[Block, Tensor]] = []
    tables: list[str] = []  # paths of tables, whose columns are not listed again
    for place in walk(release.content):
        value, path = place.value, place.path or name_of(release)
        if any(path.startswith(f"{table}.") for table in tables):
            continue
        if isinstance(value, Block):
            yield from _list_block(place, path, last_array)
        elif isinstance(value, InertObject):
            if value.class_name != FRAME and "_shape" not in value.attributes:
                continue
            records = read_records(value)
            if records is not None:
                tables.append(path)
                yield NumberSource(path, value.class_name, read_tensor(records))
        elif isinstance(value, list | tuple) and id(value) not in read_ids:
            if (numbers := _read_list(value, read_ids)) is not None:
                yield NumberSource(path, type(value).__name__, read_tensor(numbers))
        elif isinstance(value, dict) and not rows_only:
            for what, entries in (("keys", value), ("values", value.values())):
                if (numbers := _read_numbers(list(entries))) is not None:
                    reader = read_tensor(numbers)
                    yield NumberSource(path, f"{what} of a dict", reader, has_rows=False)
    if not rows_only:
        yield from _list_trees(release)


def _list_block(
    place: Place, path: str, last_array: list[tuple[Block, Tensor]]
) -> Iterator[NumberSource]:
    block = place.value
    if block.read is not None and block.numel:
        part_reader = block.part_reader
        if isinstance(block.read, StoredTensor):
            part_reader = block.read.make_part_reader()
        whole_reader = NumberReader(block.shape, _read_at_once(block, last_array))
        yield NumberSource(path, block.kind, part_reader or whole_reader)
    elif isinstance(block.objects, list) and (numbers := _read_numbers(block.objects)) is not None:
        yield NumberSource(path, "objects", read_tensor(numbers))


def _read_at_once(
    block: Block, last_array: list[tuple[Block, Tensor]]
) -> Callable[[int, int], Tensor]:
    """Return a function that reads the whole array and returns a part of it."""

    def read_part(first: int, last: int) -> Tensor:
        if not last_array or last_array[0][0] is not block:
            last_array[:] = []  # free the memory before the next array is read
            last_array.append((block, block.tensor().reshape(-1)))
        return last_array[0][1][first:last]

    return read_part


def _read_numbers(values: list[Any] | tuple[Any, ...]) -> Tensor | None:
    """Return the numbers in a list as a vector, or None if most of its entries are not numbers."""
    if not MIN_NUMBERS <= len(values) <= MAX_LIST:
        return None
    if type(values[0]) not in (int, float, bool, str, type(None)):
        return None
    numbers = [float(v) for v in values if type(v) is float or (type(v) is int and abs(v) < 2**53)]
    return torch.tensor(numbers, dtype=torch.float64) if 2 * len(numbers) > len(values) else None


def _read_list(values: list[Any] | tuple[Any, ...], read_ids: set[int]) -> Tensor | None:
    """Return a list of numbers as a vector, or a list of equally long lists of numbers as a matrix."""
    if not values or len(values) > MAX_LIST:
        return None
    lengths = {len(v) if isinstance(v, list | tuple) else -1 for v in values}
    if len(lengths) != 1:
        return None
    width = lengths.pop()
    if width == -1:
        return _read_numbers(values)
    if width < 1 or width * len(values) > MAX_LIST:
        return None
    if not all(type(v) in (int, float) and abs(v) < 2**53 for row in values for v in row):
        return None
    read_ids.update(map(id, values))
    return torch.tensor(values, dtype=torch.float64)


def _list_trees(release: Release) -> Iterator[NumberSource]:
    """Yield the thresholds and the leaf values of the trees in a model file."""
    try:
        forests = read_forests(release)
    except ResiduumError:
        return
    for named in forests:
        is_leaf = [tree.left == NO_CHILD for tree in named.forest.trees]
        trees_with_leaf_masks = list(zip(named.forest.trees, is_leaf, strict=True))
        thresholds = np.concatenate([tree.threshold[~leaf] for tree, leaf in trees_with_leaf_masks])
        leaf_values = np.concatenate(
            [tree.value[leaf].ravel() for tree, leaf in trees_with_leaf_masks]
        )
        for what, array in (("thresholds", thresholds), ("leaf values", leaf_values)):
            numbers = torch.from_numpy(np.asarray(array, dtype=np.float64))
            if len(numbers):
                path_of_numbers = f"{what} of {named.name}"
                yield NumberSource(path_of_numbers, "trees", read_tensor(numbers), has_rows=False)
