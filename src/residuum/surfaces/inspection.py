"""Measure what the weights of a network show before any attack: size, homogeneity, balance, spectrum.

A network is homogeneous of order k if scaling all weights by a > 0 scales the outputs by a^k. A hidden
neuron is balanced if its incoming weights (with the bias) and its outgoing weights have equal norms. The
spectrum is the list of singular values of the first layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from residuum.networks import balance
from residuum.networks.network import Network, first_layer
from residuum.networks.spectrum import count_directions, rank_above, singular_values
from residuum.records import Record
from residuum.records.published import Count

# For each of these fractions, ``Inspection.ranks`` counts the singular values of the first layer that
# exceed this fraction of the largest one.
TOLERANCES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4)


@dataclass(frozen=True, eq=False)
class ParameterSummary(Record):
    """One parameter tensor: its name, shape, number of entries and Euclidean norm.

    In JSON the norm is null if the norm is too large for a JSON number.
    """

    name: str
    shape: tuple[int, ...]
    parameters: Count
    norm: float | None


@dataclass(frozen=True, eq=False)
class Inspection(Record):
    """What the weights of a network show before any attack.

    Args:
        arch: Architecture string.
        input_shape: Shape of one sample, () if it is not known.
        inputs: Number of values of one sample.
        outputs: Number of outputs.
        layers: Name, shape, size and norm of every parameter tensor.
        parameters: Number of weights.
        bytes: Size of the weights in memory.
        dtype: Number format of the weights.
        homogeneity_order: The order k for which scaling all weights by a scales the outputs by a^k. None if
            the network is not homogeneous.
        directions: Number of singular vectors of the first layer that come from training and not from the
            random initialization, None if the number is not known.
        directions_of: The threshold above which singular values count for ``directions``, or why the number
            is not known.
        ranks: Number of singular values of the first layer above each share of the largest singular value.
        balance: Gap between the incoming and outgoing norms of the hidden neurons of an MLP (0 if all
            neurons are balanced), None for other networks.
        assumptions: Sentences about what had to be guessed while reading the file.
    """

    arch: str
    input_shape: tuple[int, ...]
    inputs: Count
    outputs: Count
    layers: tuple[ParameterSummary, ...]
    parameters: Count
    bytes: Count
    dtype: str
    homogeneity_order: float | None
    directions: Count | None
    directions_of: str
    ranks: dict[str, Count]
    balance: float | None
    assumptions: tuple[str, ...] = ()

    def directions_for(self, samples: int | None) -> tuple[int | None, str]:
        """Return how many directions (singular vectors) of the first layer come from training.

        If there are more samples than inputs, training can change every singular vector. Then the number says
        nothing about the samples, and it is not returned.

        Args:
            samples: Number of training samples, None if the number is not known.

        Returns:
            The number of singular vectors, or None, and an explanation.
        """
        if self.directions is not None and samples is not None and samples > self.inputs:
            return None, f"more samples ({samples}) than inputs ({self.inputs})"
        return self.directions, self.directions_of


def inspect_network(network: Network) -> Inspection:
    """Measure what the weights of a network show. No data is needed.

    Homogeneity (scaling the weights scales the outputs by a power) and balance (equal norms of the incoming
    and outgoing weights of each neuron) show whether the theory of the attacks applies. The directions of the
    first layer are the singular vectors whose singular values exceed those of a random initialization. None
    of these numbers predicts how many samples can be reconstructed.

    Args:
        network: The network to measure.

    Returns:
        The measurements.
    """
    architecture = network.architecture
    weights_by_name = network.theta
    weight = first_layer(weights_by_name)
    spectrum = singular_values(weight)
    if network.live is not None:
        direction_count, explanation = None, "it is not known which layer receives the input"
    elif weight.ndim > 2:
        direction_count, explanation = (
            None,
            "the first layer is a convolution: its filters see patches",
        )
    else:
        direction_count, explanation = count_directions(spectrum, *weight.shape)
    return Inspection(
        arch=network.arch,
        input_shape=network.input_shape,
        inputs=architecture.inputs,
        outputs=architecture.outputs,
        layers=tuple(
            ParameterSummary(name, tuple(t.shape), t.numel(), float(t.double().norm()))
            for name, t in weights_by_name.items()
        ),
        parameters=sum(t.numel() for t in weights_by_name.values()),
        bytes=sum(t.numel() * t.element_size() for t in weights_by_name.values()),
        dtype=str(next(iter(weights_by_name.values())).dtype).removeprefix("torch."),
        homogeneity_order=network.homogeneity_order,
        directions=direction_count,
        directions_of=explanation,
        ranks={f"{share:g}": rank_above(spectrum, share) for share in TOLERANCES},
        balance=balance(network.double_module),
        assumptions=network.assumptions,
    )
