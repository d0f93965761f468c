"""What is released: weights, and what the network is."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from residuum.records.base import UNSAVED, Record


@dataclass(frozen=True, eq=False)
class Checkpoint(Record):
    """Weights under the parameter names of the network that ``arch`` describes.

    arch: description such as ``mlp:784-1000-1000-1``; input_shape: shape of one sample, () when it
    is not known; labels: class names by output; task: "binary", "multiclass" or "regression" where
    the releaser said so; assumptions: what had to be guessed while reading; module: a live network that
    no string describes, kept as given. It is code and is never saved: only its weights are.
    """

    theta: dict[str, Tensor]
    arch: str
    input_shape: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    task: str = ""
    assumptions: tuple[str, ...] = ()
    source_names: dict[str, str] = field(default_factory=dict)
    module: nn.Module | None = field(default=None, metadata=UNSAVED)
