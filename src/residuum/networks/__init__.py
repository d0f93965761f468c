"""Networks: families, activations and their surrogates, recognition, homogeneity."""

from residuum.networks.activations import (
    ACTIVATIONS,
    SURROGATES,
    Activation,
    Linear,
    Polynomial,
    ReLU,
    SigmoidReLU,
    Softplus,
    with_surrogate,
)
from residuum.networks.architecture import Architecture
from residuum.networks.homogeneity import balance, homogeneity_order, probe_inputs
from residuum.networks.modules import MLP, ConvNet, PolynomialNetwork, Trace
from residuum.networks.obstacles import refuse_by_name
from residuum.networks.recognition import match_architecture, recognise_mlp

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "SURROGATES",
    "Activation",
    "Architecture",
    "ConvNet",
    "Linear",
    "Polynomial",
    "PolynomialNetwork",
    "ReLU",
    "SigmoidReLU",
    "Softplus",
    "Trace",
    "balance",
    "homogeneity_order",
    "match_architecture",
    "probe_inputs",
    "recognise_mlp",
    "refuse_by_name",
    "with_surrogate",
]
