"""Attributes are tested for tables: samples with named columns, or with columns that the user asks for."""

from __future__ import annotations

import torch

from residuum.auditing.attribute_stage import is_table
from residuum.records import Dataset, Knowledge

ROWS = Dataset(torch.rand(5, 3), torch.zeros(5))


def test_rows_without_names_are_a_table_only_if_columns_are_requested() -> None:
    assert not is_table(ROWS, Knowledge())
    assert is_table(ROWS, Knowledge(), is_requested=True)
    assert is_table(ROWS.replace(features=("a", "b", "c")), Knowledge())


def test_images_and_embeddings_of_texts_are_no_tables() -> None:
    images = Dataset(torch.rand(5, 1, 2, 2), torch.zeros(5))
    assert not is_table(images, Knowledge(), is_requested=True)
    assert not is_table(ROWS, Knowledge(shape=(1, 1, 3)), is_requested=True)
    assert not is_table(ROWS.replace(texts=tuple("abcde")), Knowledge(), is_requested=True)
