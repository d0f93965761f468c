"""What the weights alone say about a network, before any attack: size, order, balance, spectrum.

Directions of the first layer: see :mod:`residuum.checkpoints.spectrum`. Balance: see
:func:`residuum.networks.balance`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residuum.checkpoints.modules import build_model
from residuum.checkpoints.spectrum import directions, rank_above, singular_values
from residuum.networks import Architecture, balance, homogeneity_order, probe_inputs
from residuum.records import Checkpoint
from residuum.records.base import Record

TOLERANCES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4)


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
    homogeneous; directions: of the first layer, None where they cannot be told, directions_of: above
    what, or why not; ranks: (tolerance, rank) pairs of the first layer, whatever it is; balance: for
    MLPs with a hidden layer, else None.
    """

    arch: str
    input_shape: tuple[int, ...]
    outputs: int
    layers: tuple[ParameterSummary, ...]
    parameters: int
    bytes: int
    dtype: str
    homogeneity_order: float | None
    directions: int | None
    directions_of: str
    ranks: tuple[tuple[float, int], ...]
    balance: float | None
    assumptions: tuple[str, ...] = ()

    def directions_given(self, samples: int | None) -> tuple[int | None, str]:
        """Directions and what they are of, where the network is known to have had ``samples``.

        More samples than inputs fill every direction, and their number says nothing.
        """
        inputs = Architecture.parse(self.arch).inputs
        if self.directions is not None and samples is not None and samples > inputs:
            return None, f"more samples ({samples}) than inputs ({inputs})"
        return self.directions, self.directions_of

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
            "directions": self.directions,
            "directions_of": self.directions_of,
            "ranks": {f"{tolerance:g}": rank for tolerance, rank in self.ranks},
            "balance": self.balance,
            "assumptions": list(self.assumptions),
        }


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Measure a checkpoint; needs no data."""
    arch = Architecture.parse(checkpoint.arch)
    model = build_model(checkpoint, torch.float64)
    theta = checkpoint.theta
    weight = first_layer(theta)
    values = singular_values(weight)
    if checkpoint.module is not None:
        count, of = None, "which layer of a network kept as given meets the input is not known"
    elif weight.ndim > 2:
        count, of = None, "the first layer is a convolution: its filters see patches"
    else:
        count, of = directions(values, *weight.shape)
    return Inspection(
        arch=checkpoint.arch,
        input_shape=checkpoint.input_shape,
        outputs=arch.outputs,
        layers=tuple(_summary(name, t) for name, t in theta.items()),
        parameters=sum(t.numel() for t in theta.values()),
        bytes=sum(t.numel() * t.element_size() for t in theta.values()),
        dtype=str(next(iter(theta.values())).dtype).removeprefix("torch."),
        homogeneity_order=order_of(checkpoint),
        directions=count,
        directions_of=of,
        ranks=tuple((tolerance, rank_above(values, tolerance)) for tolerance in TOLERANCES),
        balance=balance(model),
        assumptions=checkpoint.assumptions,
    )


@torch.no_grad()
def order_of(checkpoint: Checkpoint) -> float | None:
    """The homogeneity order of a network, None when it is not homogeneous."""
    inputs = probe_inputs(Architecture.parse(checkpoint.arch).inputs)
    return homogeneity_order(build_model(checkpoint, torch.float64), inputs)


def first_layer(theta: dict[str, Tensor]) -> Tensor:
    """The weight that meets the input: the first tensor that is not a vector."""
    return next(t for t in theta.values() if t.ndim >= 2)


def _summary(name: str, tensor: Tensor) -> ParameterSummary:
    norm = float(torch.linalg.vector_norm(tensor.double()))
    return ParameterSummary(name, tuple(tensor.shape), tensor.numel(), norm)
