"""Find values of single columns that a file stores: vocabularies and categories."""

from __future__ import annotations

from collections.abc import Iterator

from residuum.io.inert import Block
from residuum.io.tree import Place
from residuum.scanning.finding import STATISTICS, STORED, Finding

# A list of categories with more entries than this can hold values of single records, and not only class
# labels.
MAX_LABELS = 50


def find_vocabularies(place: Place) -> Iterator[Finding]:
    """Find vocabularies and lists of categories."""
    value, name, where = place.value, place.name, place.path
    is_vocabulary = name in ("vocabulary_", "vocab", "token2id", "item2id", "user2id", "word2idx")
    if is_vocabulary and isinstance(value, dict) and value:
        what = f"a vocabulary in {place.owner or 'the file'}"
        reason = "a vocabulary lists every word, user or item in the training data by name"
        remedy = "Drop rare words (min_df), or hash all words (HashingVectorizer)."
        yield Finding(STORED, "medium", what, where, reason, remedy, count=len(value))
    if name in ("categories_", "classes_") and isinstance(value, Block):
        first_categories = value.objects[:1000] if isinstance(value.objects, list) else []
        if value.kind != "text" and not any(
            isinstance(category, str) for category in first_categories
        ):
            return
        kind_and_severity = (STORED, "medium") if value.numel > MAX_LABELS else (STATISTICS, "low")
        what = f"values of a column in {place.owner}.{name}"
        reason = "this list holds the exact values of one column in the training records"
        remedy = "Group rare values (min_frequency), or encode the values before fitting."
        yield Finding(*kind_and_severity, what, where, reason, remedy, count=value.numel)
