"""Describe, build, recognize and check networks, and smooth their activation functions."""

from residuum.networks.activations import (
    ACTIVATIONS,
    SURROGATES,
    Activation,
    Linear,
    Polynomial,
    ReLU,
    SigmoidReLU,
    Softplus,
    Surrogate,
)
from residuum.networks.kinds import (
    KINDS,
    MLP,
    Architecture,
    ConvNet,
    Kind,
    PolynomialNetwork,
    Trace,
    dense_chain,
    kind_of,
)
from residuum.networks.probing import balance, homogeneity_order, probe_inputs
from residuum.networks.recognition import (
    match_architecture,
    recognize,
    refuse_by_name,
    same_function,
)
from residuum.networks.surrogates import Kinks, with_surrogate
