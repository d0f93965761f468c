"""Factor the gradient of a ReLU layer into samples exactly (Dimitrov et al. 2024, "SPEAR").

The gradient of a dense layer with h neurons is a sum over the r samples of a batch:

    G = sum_i g_i (x_i, 1)^T = Y X,        Y = (g_1, ..., g_r),   X = rows (x_i, 1).

G holds the gradients of the weights, and those of the biases in its last column. The entry j of g_i is zero
if neuron j is not active at sample x_i. So every column of Y has many zeros, about half of h. Each column of
Y lies in the column space of G, of which U (h, r) is an orthonormal basis. Every other vector U q in that
space has few zeros: a generic one has at most r - 1. So the columns of Y are the vectors U q with the most
zeros.

Dimitrov et al. guess r - 1 zeros at random, which takes about 2^r guesses. We minimize sum_j log((U q)_j^2 +
e^2) over |q| = 1 by iteratively reweighted least squares (Chartrand and Yin 2008), from many random q, while
e goes to zero. With all r columns of Y, X = pinv(Y) G. The last column of G fixes the size and the sign.

A weight difference after several steps of SGD without weight decay has the same form, if a neuron is not
active at a sample in any step. The sign and the size of G do not matter, and neither do the network's
weights. Adam divides every entry by another number, which destroys the form.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from residuum.attacks.random_streams import stream

# A sum over r samples has r large singular values. The next one must be smaller by at least this factor.
MIN_DROP = 30.0
# Largest number of samples. With 256 neurons, all of 8 and most of 16 images were separated, and none of 24.
MAX_SAMPLES = 24
STARTS, ROUNDS, STEPS = (
    256,
    12,
    120,
)  # random vectors q of a round, number of rounds, steps of a round
PATIENCE = 3  # number of rounds without more zeros in the columns, after which the search ends
DECAY = 0.9  # factor by which the smoothing parameter e shrinks in each step
# A vector with more zeros than this, beyond the r - 1 zeros that any vector can have, is a column of Y.
MIN_EXTRA_ZEROS = 5
SAME = 1 - 1e-5  # two vectors with a larger absolute cosine are the same column
DEPENDENT = 1e-4  # a column must have at least this distance from the span of the columns before it


def count_operations(h: int, r: int) -> float:
    """Return the number of multiplications of one round of the search for sparse vectors.

    Args:
        h: Number of neurons.
        r: Number of samples.

    Returns:
        The number of multiplications.
    """
    return STARTS * STEPS * (h * (r * r + 2 * r) + r**3)


def factor_gradient(
    rows: Tensor, bias: Tensor, max_operations: float = math.inf, seed: int = 0
) -> Tensor:
    """Factor the gradient of a ReLU layer into the samples of the batch.

    Args:
        rows: (h, d) gradient of the weights, or weight update, up to any factor.
        bias: (h,) gradient of the biases, with the same factor.
        max_operations: Limit of the number of multiplications. The first two rounds always run.
        seed: Seed of the random starting points.

    Returns:
        (r, d) samples in float64, exact up to rounding. There are no samples, (0, d), if the layer is no sum
            over few samples with sparse factors.
    """
    no_samples = rows.new_zeros(0, rows.shape[1], dtype=torch.float64)
    gradient = torch.cat([rows, bias[:, None]], 1).double().cpu()
    row_norms = gradient.norm(dim=1)
    gradient = gradient[row_norms > 1e-7 * row_norms.max()]
    if min(gradient.shape) < 3:
        return no_samples
    U, s, _ = torch.linalg.svd(gradient, full_matrices=False)
    r, noise = count_samples(s, gradient.shape)
    if not 0 < r <= MAX_SAMPLES or len(U) < 2 * r:
        return no_samples
    rounds = max(2, min(ROUNDS, int(min(max_operations / count_operations(len(U), r), ROUNDS))))
    Y = U[:, :1] if r == 1 else find_sparse_vectors(U[:, :r], noise, rounds, seed)
    if Y.shape[1] < r:
        return no_samples
    X = torch.linalg.lstsq(Y, gradient, driver="gelsd").solution
    sizes = X[:, -1:]
    is_sound = (sizes.abs() > 1e-6 * sizes.abs().max()).flatten()
    return X[is_sound, :-1] / sizes[is_sound]


def count_samples(s: Tensor, shape: tuple[int, ...] | torch.Size) -> tuple[int, float]:
    """Count the singular values of a gradient that are larger than rounding errors: the number of samples.

    Args:
        s: Singular values, largest first.
        shape: Shape of the matrix.

    Returns:
        The number of singular values before the drop to rounding, 0 if there is no such drop, and the
            rounding error of an entry of U.
    """
    floor = 1e-9 * s[0]  # avoids a division by zero, because the smallest singular values can be 0
    values = s.clamp(min=float(floor))
    ratios = values[:-1] / values[1:]
    r = int(ratios.argmax()) + 1
    if float(ratios[r - 1]) < MIN_DROP or r + 1 >= len(s):
        return 0, 0.0
    entry_error = float(values[r]) / (math.sqrt(shape[0]) + math.sqrt(shape[1]))
    return r, entry_error / float(values[r - 1])


def find_sparse_vectors(U: Tensor, noise: float, rounds: int, seed: int) -> Tensor:
    """Find independent vectors with many zeros in the column space of U.

    Args:
        U: (h, r) orthonormal basis.
        noise: Rounding error of an entry of U.
        rounds: Largest number of rounds.
        seed: Seed of the random starting points.

    Returns:
        (h, k) vectors of length 1, those with the most zeros first. k is at most r.
    """
    h, r = U.shape
    zero = max(1e-6, 10 * noise * math.sqrt(h)) / math.sqrt(h)
    outer_products = (U[:, :, None] * U[:, None, :]).reshape(h, r * r)
    vectors, zeros = U.new_zeros(0, h), torch.zeros(0, dtype=torch.long)
    columns = U.new_zeros(h, 0)
    zeros_in_columns = rounds_without_gain = 0
    for number in range(rounds):
        generator = stream("sparse-factors", seed, number)
        q = torch.randn(STARTS, r, generator=generator, dtype=torch.float64)
        # In every second round, start away from the columns that are already found.
        if number % 2 and columns.shape[1]:
            basis = torch.linalg.qr(U.T @ columns).Q
            q = q - 0.9 * (q @ basis) @ basis.T
        new_vectors = _reweighted_least_squares(U, outer_products, q, zero)
        new_zeros = (new_vectors.abs() < zero).sum(1)
        is_sparse = new_zeros >= r - 1 + MIN_EXTRA_ZEROS
        vectors = torch.cat([vectors, new_vectors[is_sparse]])
        zeros = torch.cat([zeros, new_zeros[is_sparse]])
        chosen = _choose_independent(vectors, zeros, r)
        vectors, zeros = _drop_repeats(vectors, zeros)
        columns, zeros_before = chosen.T, zeros_in_columns
        zeros_in_columns = int((chosen.abs() < zero).sum())
        # The last columns that a round finds can still be sums of two columns, which have fewer zeros.
        rounds_without_gain = 0 if zeros_in_columns > zeros_before else rounds_without_gain + 1
        if columns.shape[1] == r and rounds_without_gain == PATIENCE:
            break
    return columns


def _reweighted_least_squares(U: Tensor, outer_products: Tensor, q: Tensor, zero: float) -> Tensor:
    """Find vectors with many zeros in the column space of U by minimizing sum_j log((U q)_j^2 + e^2)."""
    h, r = U.shape
    q = q / q.norm(dim=1, keepdim=True)
    for step in range(STEPS):
        e = max(DECAY**step / math.sqrt(h), zero / 10)
        weights = 1 / ((q @ U.T).square() + e * e)
        gram = (weights @ outer_products).reshape(-1, r, r)
        q = torch.linalg.solve(gram, q[..., None])[..., 0]
        q = q / q.norm(dim=1, keepdim=True)
    return q @ U.T


def _choose_independent(vectors: Tensor, zeros: Tensor, limit: int) -> Tensor:
    """Choose linearly independent vectors, starting with the vectors that have the most zeros."""
    chosen: list[Tensor] = []
    basis = vectors.new_zeros(0, vectors.shape[1])
    for i in zeros.argsort(descending=True, stable=True).tolist():
        residual = vectors[i] - (basis @ vectors[i]) @ basis
        residual = residual - (basis @ residual) @ basis
        if float(residual.norm()) > DEPENDENT:
            basis = torch.cat([basis, residual[None] / residual.norm()])
            chosen.append(vectors[i])
            if len(chosen) == limit:
                break
    return torch.stack(chosen) if chosen else basis


def _drop_repeats(vectors: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """Return every different vector once, with its number of entries that are zero."""
    if not len(vectors):
        return vectors, zeros
    is_repeat = ((vectors @ vectors.T).abs() > SAME).tril(-1).any(1)
    return vectors[~is_repeat], zeros[~is_repeat]
