"""Measure what the weights alone show before any attack: size, homogeneity, balance, spectrum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from residuum.networks import balance
from residuum.networks.network import Network, first_layer
from residuum.networks.spectrum import directions, rank_above, singular_values
from residuum.records import Record

TOLERANCES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4)  # of the ranks that are shown


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

    bytes: of the weights in memory.
    homogeneity_order: measured, None when the network is not homogeneous.
    directions: of the first layer, None where they cannot be told, directions_of: above what, or
        why not.
    ranks: (tolerance, rank) pairs of the first layer, whatever it is.
    balance: for MLPs with a hidden layer, else None.
    layers: name, shape, size and norm of every parameter.
    parameters: how many numbers.
    assumptions: what had to be guessed while reading.
    """

    arch: str
    input_shape: tuple[int, ...]
    inputs: int
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
        if self.directions is not None and samples is not None and samples > self.inputs:
            return None, f"more samples ({samples}) than inputs ({self.inputs})"
        return self.directions, self.directions_of

    def to_json(self) -> dict[str, Any]:
        """The published form (``residuum inspect --json``)."""
        ranks = {f"{tolerance:g}": rank for tolerance, rank in self.ranks}
        return super().to_json() | {"ranks": ranks}


def inspect_checkpoint(checkpoint: Network) -> Inspection:
    """Measure a checkpoint; needs no data.

    Homogeneity and balance say whether the theory of the attacks applies, directions of the first layer
    how many stand out of the noise of its start. None of it predicts how many samples come back.
    """
    arch = checkpoint.architecture
    model = checkpoint.double_module
    theta = checkpoint.theta
    weight = first_layer(theta)
    values = singular_values(weight)
    if checkpoint.live is not None:
        count, of = None, "which layer of a network kept as given meets the input is not known"
    elif weight.ndim > 2:
        count, of = None, "the first layer is a convolution: its filters see patches"
    else:
        count, of = directions(values, *weight.shape)
    return Inspection(
        arch=checkpoint.arch,
        input_shape=checkpoint.input_shape,
        inputs=arch.inputs,
        outputs=arch.outputs,
        layers=tuple(
            ParameterSummary(name, tuple(t.shape), t.numel(), float(t.double().norm()))
            for name, t in theta.items()
        ),
        parameters=sum(t.numel() for t in theta.values()),
        bytes=sum(t.numel() * t.element_size() for t in theta.values()),
        dtype=str(next(iter(theta.values())).dtype).removeprefix("torch."),
        homogeneity_order=checkpoint.homogeneity_order,
        directions=count,
        directions_of=of,
        ranks=tuple((tolerance, rank_above(values, tolerance)) for tolerance in TOLERANCES),
        balance=balance(model),
        assumptions=checkpoint.assumptions,
    )
