from __future__ import annotations

from itertools import combinations

import pytest
import torch

from residuum.records.tokens import TokenDataset
from residuum.risk.membership import GROUP_LEVEL
from residuum.risk.moved_rows import compare_moved_rows, find_members, name_words
from residuum.scanning.base_comparison import TouchedRows

VOCABULARY = 600


def texts(n: int, seed: int, length: int = 6) -> TokenDataset:
    generator = torch.Generator().manual_seed(seed)
    return TokenDataset(
        torch.randint(0, VOCABULARY, (n, length), generator=generator), torch.zeros(n)
    )


def rows_of(dataset: TokenDataset) -> TouchedRows:
    return TouchedRows(tuple(sorted(frozenset().union(*dataset.token_sets))), "equal", VOCABULARY)


def test_the_exact_test_counts_all_divisions_of_the_texts() -> None:
    train = TokenDataset(torch.tensor([[1, 2], [2, 3], [7, 8]]), torch.zeros(3))
    holdout = TokenDataset(torch.tensor([[1, 3], [4, 5], [8, 9], [2, 9]]), torch.zeros(4))
    evidence = compare_moved_rows("e", TouchedRows((1, 2, 3), "equal", 10), train, holdout)
    assert (evidence.covered, evidence.holdout_covered) == (2, 1)
    is_covered = [True, True, False, True, False, False, False]
    divisions = list(combinations(range(7), 3))
    as_many = sum(sum(is_covered[i] for i in rows) >= 2 for rows in divisions)
    assert evidence.p_value == pytest.approx(as_many / len(divisions))
    assert evidence.precision == 1
    assert evidence.recall == pytest.approx(3 / 5)


def test_texts_that_were_not_trained_on_are_named_no_more_often_than_the_level() -> None:
    p_values = []
    for seed in range(100):
        touched = rows_of(texts(150, 3 * seed))
        train, holdout = texts(20, 3 * seed + 1), texts(133, 3 * seed + 2)
        evidence = compare_moved_rows("e", touched, train, holdout)
        assert evidence.p_value is not None
        p_values.append(evidence.p_value)
        assert not find_members(touched, train, holdout, evidence, None).is_finding
    assert sum(p <= 0.1 for p in p_values) <= 19  # 10 expected, standard deviation 3
    assert min(p_values) > GROUP_LEVEL / 10


def test_training_texts_are_named() -> None:
    trained, holdout = texts(60, 0), texts(399, 1)
    train = trained.take(torch.arange(20))
    touched = rows_of(trained)
    evidence = compare_moved_rows("e", touched, train, holdout)
    members = find_members(touched, train, holdout, evidence, None)
    assert members.is_finding
    assert len(members.named) == 20
    assert evidence.precision_by_chance is not None
    assert evidence.precision is not None
    assert evidence.precision < 1  # the other training texts were not given
    few = find_members(touched, train, texts(50, 2), evidence, None)
    assert "needs 133 held-out texts" in few.reason


def test_words_are_the_rarest_first_and_no_special_tokens() -> None:
    class Tokenizer:
        all_special_ids = (0,)

        def convert_ids_to_tokens(self, row: int) -> str:
            return ["[CLS]", "the", "##ville", "Ġpereira", "a"][row]

    assert name_words((0, 1, 2, 3, 4), Tokenizer()) == ("pereira", "ville", "the")  # type: ignore[arg-type]
    assert name_words((1, 2), None) == ()
