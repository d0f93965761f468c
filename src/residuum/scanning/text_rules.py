"""Find texts that can be training records: prompts, examples, and lists of names or addresses.

Prose is recognized by its words. Texts that describe a model are left out: licenses, templates, code and
descriptions. A list of short texts is reported if it has many different entries and is no list of names of
columns, classes, layers or tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from residuum.io.inert import Block
from residuum.io.tree import Place
from residuum.scanning.finding import STORED, Finding

MIN_WORDS = 8  # smallest number of words of a text that is reported as prose
MIN_SHARE = 0.7  # smallest share of ordinary words in prose
MIN_IDEOGRAPHS = 20  # Chinese and Japanese texts have no spaces, so we count their characters
MAX_READ = 2000  # number of characters at the beginning of a text that are examined
MIN_ENTRIES = 20  # smallest number of different short texts in a list that is reported
MAX_ENTRIES = 10_000  # largest number of entries of a list that are examined
MAX_SHORT = 200  # largest number of characters of a text that counts as short, such as a name
MAX_EXCERPT = 50  # number of characters of a text that a finding shows
WORD = re.compile(r"[\"'“‘(\[]*[^\W\d_]+(?:['’-][^\W\d_]+)*[\"'”’)\].,;:!?…]*")
IDEOGRAPH = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
# Names of texts that describe a model, and names of lists that hold no records.
DESCRIPTIONS = re.compile(
    r"licen[cs]e|description|citation|readme|author|usage|(^|[._])(doc|docs|doc_?string|__doc__|help|"
    r"comments?|notes?|title|producer_name|architecture|format|template|chat_template|framework|"
    r"model_?card|warning|message|repr|summary|config_str)$",
    re.IGNORECASE,
)
# Names of lists that hold examples or records.
EXAMPLES = re.compile(
    r"few_?shot|prompts?|examples?|demonstrations?|corpus|documents?|(train|raw)_?(texts?|data)|records?",
    re.IGNORECASE,
)
LABELS = re.compile(
    r"feature_?names|features?_?(in|out)_|columns?|class(es)?(_?names)?_?$|labels?|categories_|targets?_?names|"
    r"vocab|vocabulary_|merges|tokens?|stop_?words|param|keys|modules?|layers?|architectures|id2label|label2id|"
    r"class_to_idx|idx_to_class|_names_?$|dtypes?|metrics?|hyper|config|args|callbacks|"
    r"word2idx|itos|stoi|groups|operators",
    re.IGNORECASE,
)
NO_PROSE = re.compile(
    r"\{%|\{\{|</|=>|->|\(\)|\bdef \w+\(|^\s*(import|from) \w+|\breturn\b.*\n|^\s*[\[{<]|::|"
    r"copyright|licen[cs]ed? |without warranty|all rights reserved|permission is hereby",
    re.IGNORECASE | re.MULTILINE,
)
# Names of layers, columns and settings, such as "layer1.0.weight" and "max_iter".
IDENTIFIER = re.compile(r"[A-Za-z]\w*([._:/-]\w+)+|[a-z]{1,3}\d*|\d+|<.*>|\[.*\]|.")
PANDAS_PARTS = ("DataFrame", "_unpickle_block", "BlockManager", "_new_Index", "Index", "Series")
PROSE = "Texts of several words can be prompts, examples or records of the training data"
REMEDY = "Remove the texts from the file, or check that they hold nothing private."


def find_prose(place: Place) -> Iterator[Finding]:
    """Find texts of several words that can be prompts, examples or records."""
    text = place.value
    if is_prose(text) and not DESCRIPTIONS.search(place.path[-60:]):
        yield _report_prose([text], place.path)


def find_text_arrays(place: Place) -> Iterator[Finding]:
    """Find lists, dicts and arrays of texts that can be records."""
    texts = _read_texts(place.value)
    if len(texts) < 2 or place.owner in PANDAS_PARTS or LABELS.search(place.name):
        return
    # Another rule examines each text in a list or dict. Only arrays of texts are examined for prose here.
    if isinstance(place.value, Block) and (prose := [text for text in texts if is_prose(text)]):
        yield _report_prose(prose, place.path)
        return
    short_texts = {text for text in texts if 2 <= len(text) <= MAX_SHORT and not is_prose(text)}
    names = [text for text in short_texts if not IDENTIFIER.fullmatch(text)]
    if len(names) < MIN_ENTRIES or len(names) < 0.5 * len(texts):
        return
    example = min(names)
    reason = (
        f"the list holds {len(names)} different short texts such as {_excerpt(example)!r}. They can be "
        "names, addresses or other values of training records"
    )
    finding_title = f"a list of texts named {place.name[:40]}" if place.name else "a list of texts"
    yield Finding(STORED, "medium", finding_title, place.path, reason, REMEDY, count=len(names))


def is_prose(text: str) -> bool:
    """Return True if a text consists of ordinary words, and is neither code, a template nor a license."""
    if len(text) < MIN_IDEOGRAPHS:
        return False
    beginning = text[:MAX_READ]
    if NO_PROSE.search(beginning):
        return False
    words = beginning.split()
    ordinary = sum(1 for word in words if WORD.fullmatch(word))
    if ordinary >= MIN_WORDS and ordinary >= MIN_SHARE * len(words):
        return True
    return len(IDEOGRAPH.findall(beginning)) >= max(MIN_IDEOGRAPHS, len(beginning) // 2)


def _report_prose(texts: list[str], where: str) -> Finding:
    reason = f"{PROSE}, such as {_excerpt(texts[0])!r}"
    severity = "high" if EXAMPLES.search(where[-60:]) else "medium"
    return Finding(STORED, severity, "texts", where, reason, REMEDY, count=len(texts))


def _excerpt(text: str) -> str:
    return text if len(text) <= MAX_EXCERPT else f"{text[:MAX_EXCERPT].rstrip()}..."


def _read_texts(value: Any) -> list[str]:
    """Return the texts that a list, dict or array holds directly."""
    entries: Iterable[Any] = ()
    if isinstance(value, list | tuple):
        entries = value[:MAX_ENTRIES]
    elif isinstance(value, dict):
        entries = [entry for _, entry in zip(range(MAX_ENTRIES), value.values(), strict=False)]
    elif isinstance(value, Block) and value.objects is not None:
        entries = (entry for _, entry in zip(range(MAX_ENTRIES), value.objects, strict=False))
    return [entry for entry in entries if type(entry) is str]
