"""A kind of network in one file: one hidden layer and a connection around it, Phi(x) = v.relu(W x) + a.x.

Its files name no kind, so they are read with ``--arch skip:64-30-1``.
"""

from torch import nn

from residuum.networks.kinds import KINDS, Architecture, Kind


class SkipNetwork(nn.Module):
    """Any module will do; attacks differentiate it."""

    def __init__(self, inputs, width, outputs):
        super().__init__()
        self.first = nn.Linear(inputs, width, bias=False)
        self.activation = nn.ReLU()
        self.last = nn.Linear(width, outputs, bias=False)
        self.around = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x):
        """(n, *shape) -> (n, outputs)."""
        x = x.flatten(1)
        return self.last(self.activation(self.first(x))) + self.around(x)


class Skip(Kind):
    """How its strings are read and written."""

    module, example = SkipNetwork, "skip:64-30-1"

    def build(self, arch):
        """From widths."""
        return SkipNetwork(*arch.widths)

    def describe(self, model):
        """To widths."""
        first, last = model.first, model.last
        widths = (first.in_features, first.out_features, last.out_features)
        return Architecture("skip", widths)


KINDS["skip"] = Skip()
