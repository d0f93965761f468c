"""Names from files are text: nothing in them may act on the page or reorder what stands around them.

Markup is escaped by the template engine. What escaping leaves alone is made visible here: control
characters, marks that turn the direction of writing, and characters that take no room.
"""

from __future__ import annotations

import unicodedata

from markupsafe import Markup, escape

MAX_LENGTH = 600
# Cc: controls; Cf: direction marks, zero-width; Cs: halves of a pair, no UTF-8; Co, Cn: without a meaning.
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def visible(text: str) -> str:
    """The text with unseen characters written as their code point."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_seen(character) for character in text)


def isolated(value: object) -> Markup:
    """The value as text of a bounded length, whose direction of writing ends where it ends."""
    text = str(value)
    if len(text) > MAX_LENGTH:
        text = f"{text[:MAX_LENGTH]}… ({len(text)} characters)"
    return Markup("<bdi>") + escape(visible(text)) + Markup("</bdi>")


def finalize(value: object) -> object:
    """Applied to every expression of a template: no string reaches the page with unseen characters."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _seen(character: str) -> str:
    unseen = unicodedata.category(character) in UNSEEN
    return f"‹U+{ord(character):04X}›" if unseen else character
