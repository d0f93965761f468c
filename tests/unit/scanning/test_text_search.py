"""Given texts are found in strings, and short texts only as whole strings."""

from __future__ import annotations

import pytest

from residuum.scanning.text_search import TextIndex, TextMatches

TEXTS = (
    "Maria Pereira was seen on 12 March.",
    "Pereira",
    "患者は三月に来院しました。検査は正常",
    "P-00123",
)


def find(string: str) -> set[int]:
    matches = TextMatches()
    TextIndex(TEXTS).match(string, matches)
    return matches.long | matches.short


@pytest.mark.parametrize(
    ("string", "expected"),
    [
        (TEXTS[0], {0}),
        ('{"text": "maria  pereira WAS seen\\non 12 March", "x": 1}'.replace("\\n", "\n"), {0}),
        ("Maria Pereira was seen on 13 March.", set()),
        (" pereira\n", {1}),
        ("Pereira, Galloway", set()),
        ("p-00123", {3}),
        ("記録:患者は三月に来院しました。検査は正常です", {2}),
        ("", set()),
    ],
)
def test_texts_are_found(string: str, expected: set[int]) -> None:
    assert find(string) == expected
