"""The glossary: the words of reports and commands, each explained in one or two sentences.

The explanations are in ``glossary.toml``. A report ends with all explanations, and its first screen links to
them. ``residuum audit --explain`` prints the entries that its output uses, and the documentation lists all of
them.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

GLOSSARY: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


@cache
def compile_pattern() -> re.Pattern[str]:
    """Return a pattern that matches the words of the glossary and their plurals, the longest first."""
    longest_words_first = sorted(GLOSSARY, key=len, reverse=True)
    return re.compile(rf"\b(?:{'|'.join(map(_make_form, longest_words_first))})\b")


def _make_form(word: str) -> str:
    """Return a pattern for a word and its plural, case-sensitive for abbreviations and single letters."""
    if word.isupper() or len(word) < 2:
        return rf"{re.escape(word)}s?"
    word_pattern = (
        f"{re.escape(word[:-1])}(?:y|ies)" if word.endswith("y") else f"{re.escape(word)}(?:e?s)?"
    )
    return f"(?i:{word_pattern})"


def find_entry(text: str) -> str:
    """Return the glossary word of a text that :func:`compile_pattern` matched, such as a plural."""
    lowercase_text = text.lower()
    forms = (
        lowercase_text,
        lowercase_text.removesuffix("s"),
        lowercase_text.removesuffix("es"),
        f"{lowercase_text[:-3]}y",
    )
    return next(word for form in forms for word in GLOSSARY if word.lower() == form)


def find_used_words(text: str) -> tuple[str, ...]:
    """Return the glossary words that occur in a text, in the order of the glossary."""
    used_words = {find_entry(match[0]) for match in compile_pattern().finditer(text)}
    return tuple(word for word in GLOSSARY if word in used_words)
