"""Measure how much of each record the layer on the input contains.

Gradient descent from small or known initial weights W0 makes the rows of the layer's weight W mixtures C X of
samples X. With the share c of W0 that weight decay left,

    W - c W0 = C X = U S V^T,

of which r directions are above the noise. For final weights, r counts all directions above the noise edge.
Unmixing uses only the directions before a cliff in the spectrum, but clusters of neurons cause cliffs too. In
a weight update or an optimizer state the remainder is not noise, so r counts the directions before the cliff.

    reach         |V_r x| / |x|        largest cosine with x of any candidate in the span of the r directions
    reach_ncc     the largest normalized cross-correlation (NCC): x and the directions are centered channel
                  by channel, and |P x_c| / |x_c| is averaged over the channels
    signal share  sum_k (v_k . x)^2 / |x|^2  S_k^2 / (S_k^2 + (t S_1)^2),  t = 1e-2
                  the squared reach with less weight on weak directions, because attacks fit strong
                  directions first (in the results: ``heard``)
    dual          |NCC(x^, x)|,  x^ = V diag(S / (S^2 + (e S_1)^2)) U^T delta(x),  e = 5e-3
                  delta(x): the backward signal of the record. For a training sample delta(x) is near the
                  dual vector z of x (z . x_k = 1 for x itself, 0 for the other samples)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.attacks.unmixing.ica import ROUNDING, Layer
from residuum.networks.spectrum import noise_edge
from residuum.risk.gradients import split_blocks
from residuum.similarity import standardize

SOFT, RIDGE = (
    1e-2,
    5e-3,
)  # t of the signal share and e of the dual vector, over the largest singular value


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The singular value decomposition of the layer on the input.

    Attributes:
        layer: The singular vectors and singular values.
        shape: Shape of a sample.
        rank: Number r of clean directions, which are the singular vectors above the noise.
    """

    layer: Layer
    shape: tuple[int, ...]
    rank: int

    @classmethod
    def from_rows(cls, rows: Tensor, shape: tuple[int, ...], noise: bool) -> RowSpace:
        """Compute the singular value decomposition of the rows of a layer.

        Args:
            rows: The rows (h, d).
            shape: Shape of a sample.
            noise: Whether the rows include unknown initial weights.

        Returns:
            The decomposition.
        """
        layer = Layer.from_rows(rows)
        above_edge = noise_edge(layer.S.cpu(), *rows.shape)[0]
        above_rounding = int((ROUNDING * layer.S[0] < layer.S).sum())
        return cls(layer, shape, min(above_edge, above_rounding) if noise else layer.rank)

    def reach(self, x: Tensor) -> Tensor:
        """Return the largest cosine of each sample with a vector in the span of the clean directions.

        Args:
            x: The samples (n, *shape).

        Returns:
            The cosines (n,), 0 for a sample of zeros.
        """
        flat = x.flatten(1)
        V = self.layer.V[: self.rank].to(flat)
        size = flat.norm(dim=1).clamp(min=1e-300)
        return ((flat @ V.T).norm(dim=1) / size).clamp(max=1)

    def reach_ncc(self, x: Tensor) -> Tensor:
        """Return the largest NCC of each sample with a vector in the span of the clean directions.

        Args:
            x: The samples (n, *shape).

        Returns:
            The NCC (n,), to which a constant channel adds 0.
        """
        channels = self.shape[0] if len(self.shape) == 3 else 1
        V = self.layer.V[: self.rank].to(x).reshape(self.rank, channels, -1)
        standard = standardize(x.reshape(len(x), *self.shape)).reshape(len(x), channels, -1)
        total = x.new_zeros(len(x))
        for c in range(channels):
            centered = V[:, c] - V[:, c].mean(1, keepdim=True)
            _, sigma, basis = torch.linalg.svd(centered, full_matrices=False)
            basis = basis[sigma > 1e-6 * sigma.max().clamp(min=1e-300)]
            # Each of c channels of a standardized sample has length 1/sqrt(c). Correlations are averaged.
            total += (standard[:, c] @ basis.T).norm(dim=1) / channels**0.5
        return total.clamp(max=1)

    def signal_share(self, x: Tensor) -> Tensor:
        """Return how much of each sample (n, *shape) the strong directions of the layer contain, (n,)."""
        flat, S = x.flatten(1), self.layer.S.to(x)
        weight = S.square() / (S.square() + (SOFT * S[0]) ** 2)
        energy = flat.square().sum(1).clamp(min=1e-300)
        V = self.layer.V.to(flat)
        squares = [
            (flat[block] @ V.T).square() @ weight for block in split_blocks(len(flat), len(V))
        ]
        return (torch.cat(squares) / energy).clamp(max=1)

    def dual(self, x: Tensor, signals: Tensor) -> Tensor:
        """Return the NCC of each sample with the estimate that the dual vector gives for it.

        Args:
            x: The samples (n, *shape).
            signals: The backward signals of the samples at this layer, (n, h).

        Returns:
            The absolute NCC (n,).
        """
        S, U, V = (factor.to(x) for factor in (self.layer.S, self.layer.U, self.layer.V))
        inverse = S / (S.square() + (RIDGE * S[0]) ** 2)
        statistics = []
        for block in split_blocks(len(x), x[0].numel()):
            estimate = ((signals[block] @ U) * inverse) @ V
            a, b = (standardize(images.reshape(-1, *self.shape)) for images in (estimate, x[block]))
            statistics.append((a * b).sum(1).abs().clamp(max=1))
        return torch.cat(statistics)
