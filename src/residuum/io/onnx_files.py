"""Read the weights of ONNX graphs, which ONNX calls initializers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residuum.errors import CheckpointError, MissingExtraError, UnsafeFileError
from residuum.io.inert import Block
from residuum.io.safetensors_files import COPY_AGAIN
from residuum.io.streams import MAX_PICKLE_BYTES


def read_onnx(path: Path) -> tuple[dict[str, Block], dict[str, str], Any]:
    """Return the initializers of an ONNX graph by name, the metadata, and the graph itself.

    Numbers that are stored in other files are not read.

    Args:
        path: The file.

    Returns:
        The initializers as blocks, the metadata, and the graph as onnx parses it.

    Raises:
        MissingExtraError: If the package onnx is not installed.
        UnsafeFileError: If the file is too large.
        CheckpointError: If the file is not an ONNX graph.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError:
        raise MissingExtraError(
            "Reading an ONNX graph needs the Python package onnx, which is not installed.",
            'In a clone of residuum, run pip install ".[onnx]".',
        ) from None
    if path.stat().st_size > MAX_PICKLE_BYTES:
        raise UnsafeFileError(
            f"An ONNX file may have at most {MAX_PICKLE_BYTES} bytes; the file {path.name!r} has more.",
            "Split the model into several files.",
        )
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as problem:  # the exceptions of protobuf have no common base class
        raise CheckpointError(
            f"The file {path.name!r} must be an ONNX graph; the file cannot be read "
            f"({type(problem).__name__}).",
            COPY_AGAIN,
        ) from problem

    def make_block(tensor: Any) -> Block:
        def read() -> Tensor:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                raise ValueError("the numbers are in another file")
            return torch.from_numpy(numpy_helper.to_array(tensor).copy())

        dtype_name = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        return Block(
            tuple(tensor.dims),
            {"float": "float32", "double": "float64"}.get(dtype_name, dtype_name),
            read,
        )

    metadata = {entry.key: entry.value for entry in model.metadata_props}
    metadata |= {k: v for k in ("producer_name", "doc_string") if (v := getattr(model, k, ""))}
    blocks = {tensor.name: make_block(tensor) for tensor in model.graph.initializer}
    return blocks, metadata, model.graph
