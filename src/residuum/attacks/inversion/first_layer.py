"""The rows of the first layer as candidates. A baseline."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from residuum.attacks.inversion.model_inversion import Baseline
from residuum.networks.network import first_layer
from residuum.records import Knowledge, Reconstruction
from residuum.surfaces.surface import Surface


class FirstLayerWeights(Baseline):
    """Rows of the first weight matrix as images, heaviest first; labels are unknown (0)."""

    name: ClassVar[str] = "first-layer-weights"

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply: the rows of a convolution are no images."""
        whole = first_layer(surface.checkpoint.theta)[0].numel()
        fits = whole == math.prod(surface.shape(knowledge))
        return "" if fits else "needs a first layer that sees the whole input"

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Return the rows of the first layer as they are, longest first."""
        rows = first_layer(surface.checkpoint.theta).detach().flatten(1).double().cpu()
        order = rows.norm(dim=1).argsort(descending=True)
        x = rows[order].reshape(-1, *surface.shape(knowledge))
        weight = rows.norm(dim=1)[order]
        return Reconstruction.from_candidates(self.name, x, torch.zeros(len(x)), weight, knowledge)
