"""Test whether the embedding rows that training moved are the tokens of the training texts.

An embedding row receives a gradient only if its token occurs in a training text. So the rows that differ from
the base name the tokens of the training texts (:mod:`residuum.scanning.base_comparison`). Held-out texts show
the chance level, in two ways:

- Precision: the share of the moved rows whose tokens occur in the training texts, compared with random
  held-out texts of the same number.
- Covered texts: a text is covered if the rows of all its tokens moved. Every training text is covered. If the
  samples are no training samples, they and the held-out samples are equally likely to be covered. Then the
  number of covered samples has a hypergeometric distribution given the total, which gives Fisher's exact
  test.

A covered text is a candidate for a member: T is its number of different tokens, and 0 if the text is not
covered. Its p-value is its rank among the held-out texts. A finding needs what every membership finding needs
(:mod:`residuum.risk.membership`), with the exact test as the group test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.stats import hypergeom

from residuum.conformal import rank_p_values
from residuum.evaluation.null import format_p
from residuum.records import Record
from residuum.records.tokens import TokenDataset
from residuum.risk.membership import (
    GROUP_LEVEL,
    MIN_BOUNDARIES,
    MOVED_ROWS,
    LossSeparation,
    MembershipTest,
    accept_members,
    holdout_needed,
    min_named,
)
from residuum.scanning.base_comparison import NONE, TouchedRows

SUBSETS = 200  # number of random sets of held-out texts from which the chance level is computed
MAX_WORDS = 40  # largest number of words that a report lists
# Marks with which tokenizers join pieces of words: WordPiece, byte-level BPE and SentencePiece.
PIECE_MARKS = "#Ġ▁Ċ"


@dataclass(frozen=True, eq=False)
class MovedRows(Record):
    """The rows of a token embedding that training moved, compared with the tokens of texts.

    Attributes:
        table: Name of the embedding.
        moved: Number of rows that moved.
        total: Number of rows of the embedding.
        rule: What happened to the other rows, in a sentence.
        n: Number of training texts, 0 if there are none.
        holdout: Number of held-out texts, 0 if there are none.
        precision: Share of the moved rows whose tokens occur in the training texts, None without texts.
        precision_by_chance: The same share for random held-out texts of the same number, None without them.
        recall: Share of the tokens of the training texts whose rows moved, None without texts.
        covered: Number of training texts of which all tokens moved.
        holdout_covered: Number of held-out texts of which all tokens moved.
        p_value: P-value of Fisher's exact test of these two numbers, None without both kinds of texts.
        words: Tokens of moved rows, the rarest first. They are words of the training texts, so they are not
            in ``result.json``.
    """

    derived: ClassVar[tuple[str, ...]] = ("line",)
    unpublished: ClassVar[tuple[str, ...]] = ("words",)

    table: str
    moved: int
    total: int
    rule: str
    n: int = 0
    holdout: int = 0
    precision: float | None = None
    precision_by_chance: float | None = None
    recall: float | None = None
    covered: int = 0
    holdout_covered: int = 0
    p_value: float | None = None
    words: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Sentences about the moved rows of the embedding and the covered texts, with the chance levels."""
        if not self.moved:
            return f"Embedding {self.table}: {self.rule}."
        line = f"{self.moved} of {self.total} rows of the embedding {self.table} moved in training."
        if self.precision is not None:
            chance = (
                ""
                if self.precision_by_chance is None
                else f" (chance, from held-out texts: {self.precision_by_chance:.0%})"
            )
            line += f" {self.precision:.0%} of them are tokens of the training texts{chance}."
        if self.p_value is not None:
            expected = self.n * self.holdout_covered / self.holdout
            line += (
                f" In {self.covered} of {self.n} training texts all tokens moved ({expected:.3g} expected by "
                f"chance from {self.holdout} held-out texts, {format_p(self.p_value)})."
            )
        return line


def compare_moved_rows(
    table: str,
    touched: TouchedRows,
    train: TokenDataset | None,
    holdout: TokenDataset | None,
    words: Sequence[str] = (),
    seed: int = 0,
) -> MovedRows:
    """Compare the moved rows of a token embedding with the tokens of training and held-out texts.

    Args:
        table: Name of the embedding.
        touched: The rows that moved.
        train: Training texts, None if there are none.
        holdout: Held-out texts, None if there are none.
        words: The words of the moved rows, the rarest first.
        seed: Seed of the random held-out texts.

    Returns:
        The numbers with their chance levels.
    """
    moved = frozenset(touched.rows)
    result = MovedRows(table, len(moved), touched.total, touched.sentence, words=tuple(words))
    if train is None or not moved or touched.rule == NONE:
        return result
    train_sets = train.token_sets
    train_tokens = frozenset[int]().union(*train_sets)
    result = result.replace(
        n=len(train),
        precision=len(moved & train_tokens) / len(moved),
        recall=len(moved & train_tokens) / len(train_tokens),
        covered=_count_covered(train_sets, moved),
    )
    if holdout is None:
        return result
    holdout_sets = holdout.token_sets
    holdout_covered = _count_covered(holdout_sets, moved)
    p_value = hypergeom.sf(
        result.covered - 1,
        len(train) + len(holdout),
        result.covered + holdout_covered,
        len(train),
    )
    return result.replace(
        holdout=len(holdout),
        precision_by_chance=_mean_precision(holdout_sets, moved, len(train), seed),
        holdout_covered=holdout_covered,
        p_value=float(p_value),
    )


def find_members(
    touched: TouchedRows,
    train: TokenDataset,
    holdout: TokenDataset | None,
    evidence: MovedRows,
    loss: LossSeparation | None,
) -> MembershipTest:
    """Test whether the moved rows of an embedding distinguish training texts from held-out texts.

    Args:
        touched: The rows that moved.
        train: Training texts.
        holdout: Held-out texts, None if there are none.
        evidence: The comparison of the same rows and texts.
        loss: How well losses separate members from non-members.

    Returns:
        The test of membership.
    """
    n, reason = len(train), _why_not_tested(touched, train, holdout)
    test = MembershipTest.by_loss_alone(train, holdout, loss, reason).replace(
        signal=MOVED_ROWS, holdout_needed=holdout_needed(n)
    )
    if reason or holdout is None or evidence.p_value is None:
        return test
    moved_token_ids = frozenset(touched.rows)
    statistic, holdout_statistic = (
        torch.tensor([_statistic(tokens, moved_token_ids) for tokens in texts.token_sets]).double()
        for texts in (train, holdout)
    )
    p_values = rank_p_values(statistic, holdout_statistic)
    named, q_values = accept_members(p_values, statistic)
    if evidence.p_value > GROUP_LEVEL:
        named = named[:0]
    return test.replace(
        statistic=statistic,
        holdout_statistic=holdout_statistic,
        boundaries=statistic.long(),
        holdout_boundaries=holdout_statistic.long(),
        p=p_values,
        q=q_values,
        above_tail=evidence.covered,
        group_p=evidence.p_value,
        named=named,
        is_finding=len(named) >= min_named(n),
    )


def name_words(rows: Sequence[int], tokenizer: Callable[..., Any] | None) -> tuple[str, ...]:
    """Return the words of embedding rows, the largest row first, because tokenizers list rare words last.

    Args:
        rows: Rows of the embedding.
        tokenizer: The tokenizer of the model.

    Returns:
        At most ``MAX_WORDS`` words. () if the tokenizer cannot name its tokens.
    """
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    if not callable(convert):
        return ()
    special_ids = set(getattr(tokenizer, "all_special_ids", ()))
    words: dict[str, None] = {}
    for row in sorted(set(rows) - special_ids, reverse=True):
        try:
            word = str(convert(int(row))).strip(PIECE_MARKS)
        except Exception:  # noqa: BLE001  a tokenizer of the user may raise anything
            continue
        if len(word) > 1:
            words[word] = None
        if len(words) == MAX_WORDS:
            break
    return tuple(words)


def _statistic(tokens: frozenset[int], moved: frozenset[int]) -> int:
    return len(tokens) if len(tokens) >= MIN_BOUNDARIES and tokens <= moved else 0


def _count_covered(token_sets: Sequence[frozenset[int]], moved: frozenset[int]) -> int:
    return sum(_statistic(tokens, moved) > 0 for tokens in token_sets)


def _mean_precision(
    token_sets: Sequence[frozenset[int]], moved: frozenset[int], n: int, seed: int
) -> float:
    """Return the share of moved embedding rows whose tokens occur in ``n`` random texts, on average."""
    rng, size = np.random.default_rng((seed, 7)), min(n, len(token_sets))
    subset_count = 1 if size == len(token_sets) else SUBSETS
    precisions = []
    for _ in range(subset_count):
        chosen = rng.choice(len(token_sets), size, replace=False)
        tokens_of_chosen_texts = frozenset[int]().union(*(token_sets[i] for i in chosen))
        precisions.append(len(moved & tokens_of_chosen_texts) / len(moved))
    return math.fsum(precisions) / len(precisions)


def _why_not_tested(touched: TouchedRows, train: TokenDataset, holdout: TokenDataset | None) -> str:
    if touched.rule == NONE:
        return "every row of the embedding moved, so moved rows name no texts"
    if not touched.rows:
        return "no row of the embedding moved, so moved rows name no texts"
    if holdout is None:
        return "there are no held-out texts"
    if len(holdout) < (needed := holdout_needed(len(train))):
        return (
            f"naming {min_named(len(train))} of {len(train)} texts needs {needed} held-out texts, and there "
            f"are {len(holdout)}"
        )
    return ""
