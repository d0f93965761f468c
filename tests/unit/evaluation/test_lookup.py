"""Embeddings looked up in a pool: records of the pool are named, non-members are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import residuum as rs
from residuum.errors import InputError
from residuum.evaluation import lookup

D, NEURONS = 120, 90


def pool(n: int, seed: int) -> Tensor:
    """Sparse nonnegative embeddings about a common direction."""
    generator = torch.Generator().manual_seed(seed)
    active = torch.rand(n, D, generator=generator) < 0.15
    return 0.3 + active * torch.rand(n, D, generator=generator).double() * 3


def head(x: Tensor) -> rs.Network:
    """A head whose first layer mixes these embeddings."""
    generator = torch.Generator().manual_seed(4)
    C = torch.randn(NEURONS, len(x), generator=generator).double()
    C = C * (torch.rand(NEURONS, len(x), generator=generator) < 0.5)
    last = torch.randn(1, NEURONS, generator=generator).double()
    theta = {"layers.0.weight": C @ x, "layers.0.bias": C.sum(1), "layers.1.weight": last}
    return rs.Network(theta, f"mlp:{D}-{NEURONS}-1")


def test_embeddings_of_a_head_name_their_records_in_a_pool() -> None:
    public = pool(300, seed=0)
    reconstruction = rs.attack(
        head(public[:8]), None, rs.attacks.Unmix(rank=1.0, strength=2.0, starts=2, restarts=2)
    )
    named = lookup(reconstruction.x, public)
    assert {*named.index[named.match].tolist()} <= {*range(8)}
    assert len({*named.index[named.match].tolist()}) >= 6
    strangers = lookup(reconstruction.x, pool(300, seed=1))
    assert int(strangers.match.sum()) <= 1


def test_a_record_itself_is_a_match_and_a_plain_loop_finds_the_same() -> None:
    public, queries = pool(40, seed=2), pool(3, seed=3)
    named = lookup(torch.cat([public[5:6], queries]), public)
    assert (int(named.index[0]), bool(named.match[0])) == (5, True)
    centered = public - public.mean(0)

    def cos(a: Tensor, b: Tensor) -> float:
        return float(a @ b / a.norm() / b.norm())

    for k, x in enumerate(queries, start=1):
        best = max(cos(sign * x - public.mean(0), p) for p in centered for sign in (1, -1))
        assert float(named.similarity[k]) == pytest.approx(best)
    best_similarity = [
        max(cos(centered[i], centered[j]) for j in range(40) if j != i) for i in range(40)
    ]
    assert named.threshold == pytest.approx(
        float(torch.tensor(best_similarity).double().quantile(0.99))
    )


def test_what_it_refuses() -> None:
    with pytest.raises(InputError, match="at least two embeddings"):
        lookup(pool(3, 0), pool(1, 0))
    with pytest.raises(InputError, match=r"shape \(120,\)"):
        lookup(pool(3, 0), pool(3, 0)[:, :7])
