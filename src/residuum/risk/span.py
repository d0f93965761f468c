"""What the layer on the input holds of a record: its row space, and the dual vector of the record.

Gradient descent from a small or known start makes the rows of that layer mixtures of samples,
W - c W0 = C X = U S V^T, of which r directions stand out of the noise. Of weights r counts all above the
noise edge: unmixing looks at those before a cliff in the spectrum, but its clusters of neurons have cliffs
of their own, elsewhere. Of a change or a moment, whose rest is no noise, the cliff is where samples end.

    reach      |V_r x| / |x|        cosine that a candidate in the span of the r clean directions can have
                                    with x at most: what any attack that stays in that span can reach
    reach_ncc  the same for the normalised cross-correlation: x and the directions are centred, channel by
               channel; the mean over channels of |P x_c| / |x_c|
    heard      sum_k (v_k . x)^2 / |x|^2  S_k^2 / (S_k^2 + (t S_1)^2),  t = 1e-2
               the same square with weak directions counted less: an attack fits strong ones first
    dual       |NCC(x^, x)|,  x^ = V diag(S / (S^2 + (e S_1)^2)) U^T delta(x),  e = 5e-3
               delta(x): the backward signal of the record. For a training sample that is near the dual
               vector z of x (z . x_k = 1 for its own, 0 for all others), for others it is not
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.attacks.unmix import ROUNDING, Layer
from residuum.checkpoints.inspection import noise_edge
from residuum.risk.gradients import blocks
from residuum.similarity import standardise

SOFT = 1e-2
RIDGE = 5e-3


@dataclass(frozen=True, eq=False)
class Span:
    """A layer taken apart, the shape of samples, and r, the number of its clean directions."""

    layer: Layer
    shape: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, rows: Tensor, shape: tuple[int, ...], noise: bool) -> Span:
        """Of rows (h, d); noise: whether that of a start is in them."""
        layer = Layer.of(rows)
        above = noise_edge(layer.S.cpu(), *rows.shape)[0]
        sound = int((ROUNDING * layer.S[0] < layer.S).sum())
        return cls(layer, shape, min(above, sound) if noise else layer.rank)

    def reach(self, x: Tensor) -> Tensor:
        """(n,) of samples (n, *shape); 0 of a sample that is zero."""
        flat = x.flatten(1)
        V = self.layer.V[: self.rank].to(flat)
        size = flat.norm(dim=1).clamp(min=1e-300)
        return ((flat @ V.T).norm(dim=1) / size).clamp(max=1)

    def reach_ncc(self, x: Tensor) -> Tensor:
        """(n,) likewise; a channel that is constant correlates with nothing and adds 0."""
        channels = self.shape[0] if len(self.shape) == 3 else 1
        V = self.layer.V[: self.rank].to(x).reshape(self.rank, channels, -1)
        parts = standardise(x.reshape(len(x), *self.shape)).reshape(len(x), channels, -1)
        total = x.new_zeros(len(x))
        for c in range(channels):
            centred = V[:, c] - V[:, c].mean(1, keepdim=True)
            _, sigma, basis = torch.linalg.svd(centred, full_matrices=False)
            basis = basis[sigma > 1e-6 * sigma.max().clamp(min=1e-300)]
            # A channel of a standardised sample has length 1/sqrt(c), and their correlations are averaged.
            total += (parts[:, c] @ basis.T).norm(dim=1) / channels**0.5
        return total.clamp(max=1)

    def heard(self, x: Tensor) -> Tensor:
        """(n,) of samples (n, *shape)."""
        flat, S = x.flatten(1), self.layer.S.to(x)
        weight = S.square() / (S.square() + (SOFT * S[0]) ** 2)
        energy = flat.square().sum(1).clamp(min=1e-300)
        V = self.layer.V.to(flat)
        parts = [(flat[some] @ V.T).square() @ weight for some in blocks(len(flat), len(V))]
        return (torch.cat(parts) / energy).clamp(max=1)

    def dual(self, x: Tensor, signals: Tensor) -> Tensor:
        """(n,) of samples and their backward signals (n, h)."""
        S, U, V = (part.to(x) for part in (self.layer.S, self.layer.U, self.layer.V))
        inverse = S / (S.square() + (RIDGE * S[0]) ** 2)
        found = []
        for some in blocks(len(x), x[0].numel()):
            estimate = ((signals[some] @ U) * inverse) @ V
            a, b = (standardise(part.reshape(-1, *self.shape)) for part in (estimate, x[some]))
            found.append((a * b).sum(1).abs().clamp(max=1))
        return torch.cat(found)
