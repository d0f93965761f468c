"""Measure how well each record is a combination of the rows of the first layer's weight matrix.

If gradient descent starts from small or known initial weights W0, the rows of the first layer's weight W are
linear combinations C X of the samples X. Weight decay shrinks the initial weights by a factor c, so

    W - c W0 = C X = U S V^T

is a singular value decomposition with right singular vectors v_k. The r vectors above the noise are called
clean directions. For final weights, these are all vectors whose singular value is above the noise edge. The
unmixing attack uses fewer vectors, those before a sharp drop in the singular values. This rule is not
used for final weights, because clusters of neurons cause sharp drops too. A weight update or an optimizer
state contains no noise from unknown initial weights, so r is the number of vectors before the sharp drop.

    reach         |V_r x| / |x|        largest cosine of x with a vector in the span of the r directions
    reach_ncc     the largest normalized cross-correlation (NCC) of x with a vector in that span: channel by
                  channel, x and the directions are centered to x_c and v_kc, and |P x_c| / |x_c| is averaged
                  over the channels, where P projects onto the span of the v_kc
    signal share  sum_k (v_k . x)^2 / |x|^2  S_k^2 / (S_k^2 + (t S_1)^2),  t = 1e-2
                  the squared reach with less weight on weak directions, because attacks fit strong
                  directions first (in the results: ``heard``)
    dual          |NCC(x^, x)|,  x^ = V diag(S / (S^2 + (e S_1)^2)) U^T delta(x),  e = 5e-3
                  x^ is an estimate of the dual vector of x, which has the inner product 1 with x and 0 with
                  all other training samples. delta(x) is the backward signal of the record, i.e. the gradient
                  with respect to the pre-activations. For a training sample, delta(x) is nearly proportional
                  to the column of C that belongs to x
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.attacks.unmixing.ica import ROUNDING, Layer
from residuum.networks.spectrum import noise_edge
from residuum.risk.gradients import split_blocks
from residuum.similarity import standardize

# The signal share of a sample is a weighted sum over singular vectors. Vectors whose singular value is
# below this share of the largest one get a weight below 1/2. It is t in the docstring of this module.
SOFT = 1e-2
# The computation divides by singular values. Values below this share of the largest one are damped, because
# dividing by them would amplify noise. It is e in the docstring of this module.
RIDGE = 5e-3


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The singular value decomposition of the first layer's weight matrix.

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
            noise: Whether the rows still contain unknown initial weights, which act as noise.

        Returns:
            The decomposition.
        """
        layer = Layer.from_rows(rows)
        rank_above_noise = noise_edge(layer.S.cpu(), *rows.shape)[0]
        nonzero_rank = int((ROUNDING * layer.S[0] < layer.S).sum())
        return cls(layer, shape, min(rank_above_noise, nonzero_rank) if noise else layer.rank)

    def reach(self, x: Tensor) -> Tensor:
        """Compute how close an attack can get to each sample: its largest cosine with clean directions.

        Clean directions are the singular vectors of the first layer's weight with singular values above the
        noise.

        Args:
            x: The samples (n, *shape).

        Returns:
            The cosines (n,), 0 for a sample of zeros.
        """
        flat_samples = x.flatten(1)
        clean_directions = self.layer.V[: self.rank].to(flat_samples)
        sample_norms = flat_samples.norm(dim=1).clamp(min=1e-300)
        return ((flat_samples @ clean_directions.T).norm(dim=1) / sample_norms).clamp(max=1)

    def reach_ncc(self, x: Tensor) -> Tensor:
        """Compute the largest NCC of each sample with a vector in the span of the clean directions.

        NCC is the normalized cross-correlation. Clean directions are the singular vectors of the first
        layer's weight with singular values above the noise.

        Args:
            x: The samples (n, *shape).

        Returns:
            The values of the NCC, (n,). A constant channel contributes 0 to the NCC.
        """
        channels = self.shape[0] if len(self.shape) == 3 else 1
        clean_directions = self.layer.V[: self.rank].to(x).reshape(self.rank, channels, -1)
        standardized = standardize(x.reshape(len(x), *self.shape)).reshape(len(x), channels, -1)
        mean_ncc = x.new_zeros(len(x))
        for c in range(channels):
            centered_directions = clean_directions[:, c] - clean_directions[:, c].mean(
                1, keepdim=True
            )
            _, sigma, span_basis = torch.linalg.svd(centered_directions, full_matrices=False)
            span_basis = span_basis[sigma > 1e-6 * sigma.max().clamp(min=1e-300)]
            # The NCC of a sample is the mean of the NCCs of its channels. Each channel of a standardized
            # sample has length 1 / sqrt(channels). So the mean needs only one further factor 1 /
            # sqrt(channels).
            mean_ncc += (standardized[:, c] @ span_basis.T).norm(dim=1) / channels**0.5
        return mean_ncc.clamp(max=1)

    def signal_share(self, x: Tensor) -> Tensor:
        """Return the share of each sample's squared norm along strong directions of the first layer, (n,).

        The squared component of sample x (n, *shape) along each singular vector of the layer's weight is
        weighted by a factor from 0 to 1. The factor grows with the singular value. The weighted sum is
        divided by the squared norm of the sample.
        """
        flat_samples, S = x.flatten(1), self.layer.S.to(x)
        direction_weights = S.square() / (S.square() + (SOFT * S[0]) ** 2)
        squared_norms = flat_samples.square().sum(1).clamp(min=1e-300)
        right_singular_vectors = self.layer.V.to(flat_samples)
        weighted_square_sums = [
            (flat_samples[block] @ right_singular_vectors.T).square() @ direction_weights
            for block in split_blocks(len(flat_samples), len(right_singular_vectors))
        ]
        return (torch.cat(weighted_square_sums) / squared_norms).clamp(max=1)

    def dual(self, x: Tensor, signals: Tensor) -> Tensor:
        """Compute the normalized cross-correlation of each sample with an estimate of its dual vector.

        The dual vector of a training sample has the inner product 1 with this sample and 0 with all other
        training samples. Samples outside the training set usually have a smaller NCC.

        Args:
            x: The samples (n, *shape).
            signals: The backward signals of the samples at this layer, (n, h).

        Returns:
            The absolute values of the NCC, (n,).
        """
        S, U, V = (factor.to(x) for factor in (self.layer.S, self.layer.U, self.layer.V))
        damped_inverse = S / (S.square() + (RIDGE * S[0]) ** 2)
        ncc_blocks = []
        for block in split_blocks(len(x), x[0].numel()):
            estimates = ((signals[block] @ U) * damped_inverse) @ V
            standardized_estimate, standardized_sample = (
                standardize(images.reshape(-1, *self.shape)) for images in (estimates, x[block])
            )
            ncc_blocks.append(
                (standardized_estimate * standardized_sample).sum(1).abs().clamp(max=1)
            )
        return torch.cat(ncc_blocks)
