"""Read arrays of records: matrices, search trees, sparse matrices and tables of pandas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residuum.errors import CheckpointError
from residuum.io.inert import Block, InertObject
from residuum.records.inputs import is_size

MAX_DENSE = 1 << 24  # largest number of values of a sparse array that is converted to a dense array
# Names in a pickle of pandas: the class of a table, and the function that restores the columns of one type.
FRAME, FRAME_PART = "DataFrame", "_unpickle_block"


def rows_of(value: Any) -> int | None:
    """Return the number of rows of an array, a sparse array or a search tree, or None for other values."""
    if isinstance(value, Block):
        return value.shape[0] if len(value.shape) > 1 and value.shape[0] > 1 else None
    if isinstance(value, InertObject):
        sparse_shape = value.attributes.get("_shape")
        if isinstance(sparse_shape, tuple) and sparse_shape and isinstance(sparse_shape[0], int):
            return sparse_shape[0]
        return rows_of(_tree_data(value))
    return None


def _tree_data(tree: InertObject) -> Block | None:
    """Return the array of records in a search tree of scikit-learn, such as a KDTree."""
    state_values = tree.state if isinstance(tree.state, tuple) else ()
    return next(
        (value for value in state_values if isinstance(value, Block) and rows_of(value)), None
    )


def read_records(value: Any) -> Tensor | None:
    """Return the records in an array, table or search tree as a matrix (N, d), None for other values."""
    try:
        if isinstance(value, InertObject) and value.class_name == FRAME:
            return _frame_rows(value)
        if isinstance(value, InertObject) and "_shape" in value.attributes:
            return _dense(value)
        block = _tree_data(value) if isinstance(value, InertObject) else value
        if not isinstance(block, Block) or block.read is None:
            return None
        records = block.tensor().flatten(1)
    except CheckpointError:  # the records are damaged, so the finding is reported without them
        return None
    if records.is_complex() or not records.numel():
        return None
    return records if records.is_floating_point() else records.double()


def _frame_rows(frame: InertObject) -> Tensor | None:
    """Return the numeric columns of a DataFrame as N records (N, d), or None if no columns are readable.

    pandas stores all columns of the same type in one array (columns, rows), and their indices in the table.
    """
    manager = frame.attributes.get("_mgr")
    block_sources = (manager.state, manager.arguments) if isinstance(manager, InertObject) else ()
    columns: dict[int, Tensor] = {}
    for source in block_sources:
        frame_blocks = source[0] if isinstance(source, tuple) and source else ()
        for block in frame_blocks if isinstance(frame_blocks, tuple | list) else ():
            if isinstance(block, InertObject) and len(block.arguments) >= 2:
                values, column_places = block.arguments[:2]
                if isinstance(values, Block) and values.read and len(values.shape) == 2:
                    numbers = values.tensor()
                    indices = _column_indices(column_places)
                    columns |= dict(zip(indices, numbers.double(), strict=False))
    column_list = [columns[place] for place in sorted(columns)]
    return (
        torch.stack(column_list, 1)
        if column_list and len({len(row) for row in column_list}) == 1
        else None
    )


def _column_indices(stored_indices: Any) -> list[int]:
    """Return the column indices that pandas stores with an array of columns, as a slice or as an array."""
    if isinstance(stored_indices, Block) and stored_indices.read:
        return stored_indices.tensor().flatten().tolist()
    slice_arguments = stored_indices.arguments if isinstance(stored_indices, InertObject) else ()
    if (
        len(slice_arguments) == 3
        and all(type(end) is int and abs(end) < MAX_DENSE for end in slice_arguments)
        and slice_arguments[2]
    ):
        return list(range(*slice_arguments))
    return []


def _dense(sparse: InertObject) -> Tensor | None:
    """Return a sparse matrix of scipy as a dense matrix, or None for other formats and large matrices."""
    from scipy.sparse import csc_matrix, csr_matrix

    matrix_type = {"csr": csr_matrix, "csc": csc_matrix}.get(sparse.class_name[:3])
    attributes, shape = sparse.attributes, sparse.attributes["_shape"]
    blocks = [attributes.get(name) for name in ("data", "indices", "indptr")]
    arrays = [b.tensor().numpy() for b in blocks if isinstance(b, Block) and b.read]
    is_matrix = isinstance(shape, tuple) and len(shape) == 2 and all(map(is_size, shape))
    if matrix_type is None or len(arrays) < 3 or not is_matrix:
        return None
    if not 0 < shape[0] * shape[1] <= MAX_DENSE:
        return None
    try:
        matrix = matrix_type(tuple(arrays), shape)
        matrix.check_format(full_check=True)  # check the indices, which come from an untrusted file
        return torch.from_numpy(matrix.toarray()).double()
    except (TypeError, ValueError):
        return None
