"""Texts as a token model receives them: rows of token ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from residuum.errors import DataError
from residuum.records.inputs import Dataset

# Fills the rows of shorter texts up to the length of the longest text. No token has this id.
PADDING = -1


@dataclass(frozen=True, eq=False)
class TokenDataset(Dataset):
    """Texts as token ids, with labels.

    ``x`` has the shape (n, length of the longest text) and holds integers. Behind the last token of a shorter
    text, it holds ``PADDING``. ``texts`` holds the texts themselves, if they are known.
    """

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each text, (n,)."""
        return (self.x != PADDING).sum(1)

    @property
    def token_sets(self) -> list[frozenset[int]]:
        """The different tokens of each text."""
        return [frozenset(row[row != PADDING].tolist()) for row in self.x]

    def padded_to(self, length: int) -> TokenDataset:
        """Return the texts with more padding, so that ``x`` has ``length`` columns."""
        padding = self.x.new_full((len(self), length - self.x.shape[1]), PADDING)
        return self.replace(x=torch.cat([self.x, padding], dim=1))


def pack_tokens(rows: list[list[int]], name: str, remedy: str) -> Tensor:
    """Return token ids of texts of different lengths as one tensor, filled up with ``PADDING``.

    Args:
        rows: The token ids of each text.
        name: Name of the texts, for messages.
        remedy: What to do if a text has no token.

    Returns:
        (n, length of the longest text) token ids.

    Raises:
        DataError: If there is no text, if a text has no token, or if a token id is negative.
    """
    empty_rows = [i for i, row in enumerate(rows) if not row]
    if not rows or empty_rows:
        defect = f"row {empty_rows[0]} has none" if rows else "there is no text"
        raise DataError(
            f"Every text must have at least one token; the texts {name!r} do not: {defect}.", remedy
        )
    if min(min(row) for row in rows) < 0:
        raise DataError(
            f"Token ids must be 0 or larger; {name!r} contains a negative number.", remedy
        )
    packed = torch.full((len(rows), max(map(len, rows))), PADDING, dtype=torch.long)
    for i, row in enumerate(rows):
        packed[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return packed
