"""What the weights alone say about a network, before any attack: size, order, balance, capacity.

Leak capacity: the rank of the first-layer weight W1 at a tolerance relative to its largest singular
value. Stationarity makes the rows of W1 combinations of the training samples, so the rank bounds
how many independent samples the first layer can reveal. A convolution's filters are combinations of
patches; their rank bounds no number of samples, and there is no capacity.

Balance: see :func:`residuum.networks.balance`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residuum.checkpoints.modules import build_model
from residuum.networks import MLP, Architecture, balance, homogeneity_order, probe_inputs
from residuum.records import Checkpoint
from residuum.records.base import Record

TOLERANCES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4)
HEADLINE = 1e-2


@dataclass(frozen=True, eq=False)
class ParameterSummary(Record):
    """One parameter tensor: its name, shape, number of entries and Euclidean norm."""

    name: str
    shape: tuple[int, ...]
    parameters: int
    norm: float


@dataclass(frozen=True, eq=False)
class Inspection(Record):
    """What a checkpoint is, measured from its weights.

    bytes: of the weights in memory; homogeneity_order: measured, None when the network is not
    homogeneous; capacity: rank of the first layer at 1e-2, None where it is a convolution; capacities:
    (tolerance, rank) pairs of the first layer, whatever it is;
    balance: for MLPs with a hidden layer, else None.
    """

    arch: str
    input_shape: tuple[int, ...]
    outputs: int
    layers: tuple[ParameterSummary, ...]
    parameters: int
    bytes: int
    dtype: str
    homogeneity_order: float | None
    capacity: int | None
    capacities: tuple[tuple[float, int], ...]
    balance: float | None
    assumptions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The published form (``residuum inspect --json``)."""
        return {
            "arch": self.arch,
            "input_shape": list(self.input_shape),
            "outputs": self.outputs,
            "layers": [
                {
                    "name": layer.name,
                    "shape": list(layer.shape),
                    "parameters": layer.parameters,
                    "norm": layer.norm if math.isfinite(layer.norm) else None,
                }
                for layer in self.layers
            ],
            "parameters": self.parameters,
            "bytes": self.bytes,
            "dtype": self.dtype,
            "homogeneity_order": self.homogeneity_order,
            "capacity": self.capacity,
            "capacities": {f"{tolerance:g}": rank for tolerance, rank in self.capacities},
            "balance": self.balance,
            "assumptions": list(self.assumptions),
        }


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Measure a checkpoint; needs no data."""
    arch = Architecture.parse(checkpoint.arch)
    model = build_model(checkpoint, torch.float64)
    with torch.no_grad():
        order = homogeneity_order(model, probe_inputs(arch.inputs))
    theta = checkpoint.theta
    values = _singular_values(first_layer(theta))
    capacities = tuple((tolerance, _rank(values, tolerance)) for tolerance in TOLERANCES)
    return Inspection(
        arch=checkpoint.arch,
        input_shape=checkpoint.input_shape,
        outputs=arch.outputs,
        layers=tuple(_summary(name, t) for name, t in theta.items()),
        parameters=sum(t.numel() for t in theta.values()),
        bytes=sum(t.numel() * t.element_size() for t in theta.values()),
        dtype=str(next(iter(theta.values())).dtype).removeprefix("torch."),
        homogeneity_order=order,
        capacity=sample_capacity(theta),
        capacities=capacities,
        balance=balance(model) if isinstance(model, MLP) else None,
        assumptions=checkpoint.assumptions,
    )


def leak_capacity(weight: Tensor, tolerance: float = HEADLINE) -> int:
    """Number of singular values of W1 above ``tolerance`` times the largest.

    weight: (out, ...), flattened to (out, in); for a convolution (out, in * k * k).
    """
    return _rank(_singular_values(weight), tolerance)


def sample_capacity(theta: dict[str, Tensor]) -> int | None:
    """The leak capacity of a network; None where the first layer is a convolution."""
    weight = first_layer(theta)
    return leak_capacity(weight) if weight.ndim == 2 else None


def first_layer(theta: dict[str, Tensor]) -> Tensor:
    """The weight that meets the input: the first tensor that is not a vector."""
    return next(t for t in theta.values() if t.ndim >= 2)


def _singular_values(weight: Tensor) -> Tensor:
    """Up to a common factor; those of the small triangle R of W = QR, three times as fast."""
    matrix = weight.detach().double().flatten(1)
    largest = matrix.abs().max()
    if largest == 0:
        return matrix.new_zeros(1)
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    return torch.linalg.svdvals(torch.linalg.qr(tall / largest, mode="r").R)


def _rank(values: Tensor, tolerance: float) -> int:
    return int((values > tolerance * values.max()).sum())


def _summary(name: str, tensor: Tensor) -> ParameterSummary:
    norm = float(torch.linalg.vector_norm(tensor.double()))
    return ParameterSummary(name, tuple(tensor.shape), tensor.numel(), norm)
