"""Find training records in an ONNX graph.

Estimators that compare a sample with training records store the records in two ways:

- as attributes ``support_vectors`` of the operators SVMClassifier and SVMRegressor of ONNX-ML,
- as initializers (constants) that have the shape of the input and are no weight of a layer. A
  nearest-neighbor model passes them to a loop over records (Scan) or to an operator for distances (CDist).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from residuum.io.inert import Block
from residuum.io.release import Release
from residuum.scanning.finding import STORED, Finding
from residuum.scanning.stored_rules import KEEP_NONE, StoredArray

# Operators whose constant inputs are weights, tables, statistics or shapes.
WEIGHT_OPERATORS = {
    "Gemm", "MatMul", "MatMulInteger", "QLinearMatMul", "QGemm", "Conv", "ConvTranspose", "ConvInteger",
    "QLinearConv", "FusedConv", "FusedMatMul", "FusedGemm", "LSTM", "GRU", "RNN", "Gather", "GatherElements",
    "GatherND", "Embedding", "BatchNormalization", "LayerNormalization", "InstanceNormalization",
    "GroupNormalization", "SkipLayerNormalization", "EmbedLayerNormalization", "Attention", "Einsum",
    "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear", "Transpose", "Reshape", "PRelu",
    "ArrayFeatureExtractor", "Where", "Identity", "Cast", "Mul", "Add",
}  # fmt: skip
DISTANCE_OPERATORS = {"Scan", "Loop", "CDist"}
# A Gaussian process divides its records by a length scale, and reads their number from their shape.
SCALED_RECORDS = {"Shape", "Div"}
VECTOR_MACHINES = ("SVMClassifier", "SVMRegressor")


def find_onnx_records(release: Release) -> Iterator[StoredArray]:
    """Find the training records in an ONNX graph, and yield nothing for other files."""
    if release.graph is None:
        return
    yield from _find_support_vectors(release.graph)
    consumers = _read_consumers(release.graph)
    sample_shapes = {*_read_sample_shapes(release.graph)}
    for name, block in release.content.items():
        if not isinstance(block, Block) or len(block.shape) < 2 or block.shape[0] < 2:
            continue
        operators = consumers.get(name, set())
        is_like_samples = block.shape[1:] in sample_shapes and block.kind.startswith("float")
        if not is_like_samples or not operators or operators & WEIGHT_OPERATORS:
            continue
        is_certain = bool(operators & DISTANCE_OPERATORS) or operators >= SCALED_RECORDS
        finding_title = "training records in an ONNX graph"
        reason = (
            "the graph computes distances between each sample and the rows of this constant"
            if is_certain
            else "the rows of this constant have the shape of a sample, and no layer uses them as weights"
        )
        finding = Finding(
            STORED,
            "high" if is_certain else "medium",
            finding_title,
            name[:120],
            reason,
            KEEP_NONE,
            count=block.shape[0],
        )
        yield StoredArray(finding, block, is_certain)


def find_onnx_weights(release: Release) -> set[int]:
    """Return the ids of the constants that layers of an ONNX graph use as weights."""
    if release.graph is None:
        return set()
    consumers = _read_consumers(release.graph)
    return {
        id(block)
        for name, block in release.content.items()
        if consumers.get(name, set()) & WEIGHT_OPERATORS
    }


def _read_consumers(graph: Any) -> dict[str, set[str]]:
    """Return the operators that read each value of a graph, by the name of the value."""
    consumers: dict[str, set[str]] = {}
    for node in graph.node:
        # Other packages define operators for distances under their own domain.
        is_standard = node.domain in ("", "ai.onnx", "ai.onnx.ml")
        operator = node.op_type if is_standard or node.op_type in WEIGHT_OPERATORS else "CDist"
        for name in node.input:
            consumers.setdefault(name, set()).add(operator)
    return consumers


def _read_sample_shapes(graph: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shape of one sample for each input of a graph that takes real numbers."""
    float_types = (1, 10, 11, 16)  # FLOAT, FLOAT16, DOUBLE and BFLOAT16 of onnx.TensorProto
    initializers = {tensor.name for tensor in graph.initializer}
    for graph_input in graph.input:
        tensor_type = graph_input.type.tensor_type
        sample_shape = tuple(dimension.dim_value for dimension in tensor_type.shape.dim)[1:]
        if graph_input.name in initializers or tensor_type.elem_type not in float_types:
            continue
        if sample_shape and all(sample_shape) and math.prod(sample_shape) > 1:
            yield sample_shape
            yield (math.prod(sample_shape),)


def _find_support_vectors(graph: Any) -> Iterator[StoredArray]:
    for node in graph.node:
        if node.op_type not in VECTOR_MACHINES:
            continue
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if "support_vectors" not in attributes:
            continue
        flat_vectors = attributes["support_vectors"].floats
        vector_count = (
            sum(attributes["vectors_per_class"].ints)
            if "vectors_per_class" in attributes
            else attributes["n_supports"].i
            if "n_supports" in attributes
            else 0
        )
        if vector_count <= 0 or not flat_vectors or len(flat_vectors) % vector_count:
            continue
        shape = (vector_count, len(flat_vectors) // vector_count)
        block = Block(shape, "float32", functools.partial(_read_floats, flat_vectors, shape))
        finding_title = f"training records in the support vectors of {node.op_type}"
        reason = "support vectors are training records"
        where = f"{node.name or node.op_type}.support_vectors"[:120]
        finding = Finding(
            STORED, "high", finding_title, where, reason, KEEP_NONE, count=vector_count
        )
        yield StoredArray(finding, block)


def _read_floats(numbers: Any, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor(list(numbers)).reshape(shape)
