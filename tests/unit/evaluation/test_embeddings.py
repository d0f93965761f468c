from __future__ import annotations

import math

import pytest
import torch

from residuum.evaluation.embeddings import are_embeddings, match_embeddings
from residuum.records import Dataset

GENERATOR = torch.Generator().manual_seed(0)


def unit_rows(n: int, columns: int = 80) -> torch.Tensor:
    rows = torch.randn(n, columns, generator=GENERATOR, dtype=torch.float64)
    return rows / rows.norm(dim=1, keepdim=True)


def samples(x: torch.Tensor, **fields: object) -> Dataset:
    return Dataset(x, torch.zeros(len(x)), **fields)  # type: ignore[arg-type]


def test_rows_of_equal_norm_or_with_texts_are_embeddings() -> None:
    rows = unit_rows(20)
    standardized = samples(
        (rows - 0.01) / 0.05, scale=torch.full((80,), 0.05), offset=torch.full((80,), 0.01)
    )
    assert are_embeddings(samples(rows))
    assert are_embeddings(standardized)
    assert are_embeddings(samples(rows * torch.arange(1, 21)[:, None], texts=("a",) * 20))


@pytest.mark.parametrize(
    "x",
    [
        unit_rows(20) * torch.linspace(1, 1.1, 20)[:, None],  # norms differ
        unit_rows(20, 30),  # few columns
        unit_rows(20).reshape(20, 8, 10),  # images
    ],
)
def test_other_samples_are_no_embeddings(x: torch.Tensor) -> None:
    assert not are_embeddings(samples(x))
    assert not are_embeddings(samples(unit_rows(2), features=tuple(map(str, range(80)))))


def test_cosines_equal_a_naive_search() -> None:
    train = samples(unit_rows(5), texts=tuple("abcde"))
    holdout = samples(unit_rows(40), texts=tuple(f"h{i}" for i in range(40)))
    candidates = 3.0 * train.x[[2, 0]] + 0.3 * unit_rows(2)
    matches = match_embeddings(candidates, [1, None, 0], train, torch.tensor([0, 1, 2]), holdout)

    def naive(a: torch.Tensor, b: torch.Tensor) -> float:
        return sum(map(float, a * b)) / math.dist(a, a * 0) / math.dist(b, b * 0)

    assert float(matches.cosine[0]) == pytest.approx(naive(candidates[1], train.x[0]))
    assert float(matches.cosine[2]) == pytest.approx(naive(candidates[0], train.x[2]))
    assert math.isnan(matches.cosine[1])
    assert math.isnan(matches.holdout_cosine[1])
    best = [max((naive(c, h), i) for i, h in enumerate(holdout.x)) for c in candidates[[1, 0]]]
    assert matches.holdout_cosine[[0, 2]].tolist() == pytest.approx([cosine for cosine, _ in best])
    assert (matches.holdout_texts[0], matches.holdout_texts[2]) == tuple(f"h{i}" for _, i in best)
    assert matches.texts == ("a", "b", "c")
    nearest = sorted(max(naive(c, h) for c in candidates) for h in holdout.x)
    assert matches.chance is not None
    assert nearest[-2] <= matches.chance <= nearest[-1]


def test_without_held_out_samples_there_is_no_chance_level() -> None:
    train = samples(unit_rows(3))
    matches = match_embeddings(train.x, [0, 1, 2], train, torch.arange(3), None)
    assert matches.chance is None
    assert matches.cosine.tolist() == pytest.approx([1, 1, 1])
    assert matches.holdout_cosine.isnan().all()
