"""A baseline attack: use the rows of the first weight matrix as guesses of training samples."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from residuum.attacks.inversion.model_inversion import Baseline
from residuum.networks.network import first_layer
from residuum.records import Knowledge, Reconstruction
from residuum.surfaces.surface import Surface


class FirstLayerWeights(Baseline):
    """Baseline attack that uses the rows of the first weight matrix as guesses of samples, longest first.

    All labels are 0 (unknown).
    """

    name: ClassVar[str] = "first-layer-weights"

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply: a row of the first layer must be as long as a sample.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The reason, or "" if the attack applies.
        """
        row_size = first_layer(surface.checkpoint.theta)[0].numel()
        is_sample_size = row_size == math.prod(surface.sample_shape(knowledge))
        return "" if is_sample_size else "needs a first layer that is connected to the full input"

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Return the rows of the first weight matrix as guesses of training samples, longest first.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The rows as candidates.
        """
        first_layer_rows = first_layer(surface.checkpoint.theta).detach().flatten(1).double().cpu()
        order_by_norm = first_layer_rows.norm(dim=1).argsort(descending=True)
        candidates = first_layer_rows[order_by_norm].reshape(-1, *surface.sample_shape(knowledge))
        row_norms = first_layer_rows.norm(dim=1)[order_by_norm]
        return Reconstruction.from_candidates(
            self.name, candidates, torch.zeros(len(candidates)), row_norms, knowledge
        )
