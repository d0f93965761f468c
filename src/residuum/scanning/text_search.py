"""Find texts of the user in the strings of a model file.

Texts are compared without regard to case, white space and punctuation. A long text is found inside of longer
strings. A short text is found only if it is a whole string, because short words occur everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

MIN_LENGTH = 12  # smallest number of characters of a text that is searched inside of longer strings
MIN_WORDS = 3  # smallest number of words of a text that is searched inside of longer strings
# A word is a run of letters and digits. Characters of Chinese, Japanese and Korean are words of their own,
# because these languages do not separate words by spaces.
WORD = re.compile(
    r"[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]|[^\W\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]+"
)
# Largest number of characters of strings that are searched, to limit the time. This takes about 20 s.
MAX_CHARACTERS = 100_000_000


def split_words(text: str) -> tuple[str, ...]:
    """Return the words of a text in a form that does not depend on case, white space and punctuation."""
    return tuple(WORD.findall(text.casefold()))


@dataclass
class TextMatches:
    """The texts of the user that occur in the strings at one place of a model file.

    Attributes:
        long: Numbers of the long texts.
        short: Numbers of the short texts, which are whole strings.
    """

    long: set[int] = field(default_factory=set)
    short: set[int] = field(default_factory=set)


class TextIndex:
    """Finds texts of the user in strings.

    Args:
        texts: The texts.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._whole: dict[str, list[int]] = {}
        self._starts: dict[tuple[str, ...], list[tuple[int, tuple[str, ...]]]] = {}
        self.characters = 0
        for number, text in enumerate(texts):
            words = split_words(text)
            if len(words) >= MIN_WORDS and len(" ".join(words)) >= MIN_LENGTH:
                self._starts.setdefault(words[:MIN_WORDS], []).append((number, words))
            elif words:
                self._whole.setdefault(" ".join(text.casefold().split()), []).append(number)

    @property
    def is_exhausted(self) -> bool:
        """Whether the search has reached its limit of characters."""
        return self.characters >= MAX_CHARACTERS

    def match(self, string: str, matches: TextMatches) -> None:
        """Add the numbers of the texts in a string to ``matches``.

        Args:
            string: A string of the model file.
            matches: The texts that were found so far.
        """
        if self.is_exhausted:
            return
        self.characters += len(string)
        if len(string) < 1000:
            matches.short.update(self._whole.get(" ".join(string.casefold().split()), ()))
        if len(string) < MIN_LENGTH or not self._starts:
            return
        words = split_words(string)
        for i in range(len(words) - MIN_WORDS + 1):
            for number, text_words in self._starts.get(words[i : i + MIN_WORDS], ()):
                if words[i : i + len(text_words)] == text_words:
                    matches.long.add(number)
