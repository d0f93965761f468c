"""The exact factorization of the gradient of a ReLU layer into samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from residuum.attacks.unmixing.sparse_factors import count_samples, factor_gradient


def gradient_by_sample(
    x: Tensor, y: Tensor, activation: nn.Module, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """The naive reference: the sum over samples of (g_i x_i, g_i), one backward pass for each sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(x.shape[1], 60), activation, nn.Linear(60, 5)).to(dtype)
    rows, bias = torch.zeros(60, x.shape[1]).to(dtype), torch.zeros(60).to(dtype)
    for sample, label in zip(x.to(dtype), y, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(sample[None]), label[None]).backward()
        rows += model[0].weight.grad
        bias += model[0].bias.grad
    return rows, bias


def samples(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 40, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, (n,), generator=generator)


def errors(x: Tensor, candidates: Tensor) -> Tensor:
    """Relative distance of every sample to its nearest candidate."""
    return torch.cdist(x, candidates).amin(1) / x.norm(dim=1)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("factor", [1.0, -0.01])
def test_every_sample_of_a_small_batch_is_exact(n: int, factor: float) -> None:
    x, y = samples(n)
    rows, bias = gradient_by_sample(x, y, nn.ReLU())
    candidates = factor_gradient(factor * rows, factor * bias)
    assert len(candidates) == n
    assert errors(x, candidates).max() < 1e-6


def test_single_precision_gives_close_samples() -> None:
    x, y = samples(4)
    candidates = factor_gradient(*gradient_by_sample(x, y, nn.ReLU(), torch.float32))
    assert errors(x, candidates).max() < 1e-3
    strangers, _ = samples(50, seed=1)
    assert (
        errors(strangers, candidates).min() > 0.1
    )  # samples of others are not among the candidates


def test_a_smooth_activation_has_no_inactive_neurons() -> None:
    x, y = samples(5)
    assert len(factor_gradient(*gradient_by_sample(x, y, nn.Tanh()))) == 0


def test_weights_are_no_sum_over_few_samples() -> None:
    torch.manual_seed(0)
    assert len(factor_gradient(torch.randn(60, 40), torch.randn(60))) == 0
    assert len(factor_gradient(torch.zeros(60, 40), torch.zeros(60))) == 0


def test_the_drop_to_rounding_counts_the_samples() -> None:
    s = torch.tensor([3.0, 2.0, 1.0, 1e-6, 9e-7, 8e-7])
    assert count_samples(s, (60, 6))[0] == 3
    assert count_samples(torch.tensor([3.0, 2.0, 1.0, 0.5]), (60, 4))[0] == 0
