"""Read the vocabulary of a tokenizer: the token of each row of an embedding table.

=====================================  ============================================================
file                                   content
=====================================  ============================================================
``tokenizer.json``                     the fast tokenizers of Hugging Face: words or pieces of words
``vocab.json``, ``added_tokens.json``  ids by token
``vocab.txt``                          one token in each line, in the order of the ids
``*.model``, ``*.spm``                 SentencePiece: pieces in the order of the ids
=====================================  ============================================================

Pieces are shown as a person would write them: "Ġpereira" and "▁pereira" become "pereira", and the letters
with which byte-level vocabularies write single bytes are decoded. "##a", the inner piece of a word, is not
changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residuum.errors import CheckpointError, ResiduumError
from residuum.io.folders import is_inner_file
from residuum.io.json_files import read_json

# Names of vocabularies, the preferred names first.
VOCABULARY_FILES = (
    *("tokenizer.json", "vocab.json", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model", "source.spm"),
)
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
PIECE_SUFFIXES = (".model", ".spm")
MAX_VOCABULARY_BYTES = (
    32 << 20
)  # largest size of vocab.txt or a SentencePiece model; most have 5 MB
MAX_TOKENS = 1_000_000  # largest number of tokens; the largest public vocabularies have 500 000
MAX_TOKEN_LENGTH = 200  # longer tokens are shortened


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a tokenizer.

    Attributes:
        file: Name of the file.
        tokens: The tokens by id, as a person would write them.
        added: The tokens by id that were added to the vocabulary, such as "[CLS]" or words of a user.
        has_whole_words: Whether every token is a whole word, so that the vocabulary lists the words of the
            texts on which it was trained.
    """

    file: str
    tokens: dict[int, str] = field(default_factory=dict)
    added: dict[int, str] = field(default_factory=dict)
    has_whole_words: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def words(self, rows: Iterable[int]) -> tuple[str, ...]:
        """Return the tokens of rows of an embedding table, the rarest whole words first.

        Most vocabularies list common words before rare words, so the order is descending by id. Pieces of
        words, numbers and signs come last.

        Args:
            rows: Ids of tokens. Ids without a token are skipped.

        Returns:
            The tokens.
        """
        known_rows = sorted((row for row in rows if row in self.tokens), reverse=True)
        is_part = {row: not self.tokens[row].isalpha() for row in known_rows}
        return tuple(self.tokens[row] for row in sorted(known_rows, key=is_part.__getitem__))

    def fits(self, rows: int) -> bool:
        """Return True if a table with this number of rows can be the embedding of these tokens.

        Args:
            rows: Number of rows of the table. Some libraries add unused rows to get a round number.

        Returns:
            Whether the table has a row for every token, and few others.
        """
        if not self.tokens:
            return False
        needed_rows = max(self.tokens) + 1
        return needed_rows <= rows <= needed_rows + max(1024, needed_rows // 4)


def find_vocabulary(folder: str | Path) -> Vocabulary | None:
    """Return the vocabulary of the tokenizer in a folder, or None if the folder holds none that we can read.

    Args:
        folder: A folder, or a file, whose folder is searched.

    Returns:
        The vocabulary.
    """
    folder = Path(folder)
    folder = folder if folder.is_dir() else folder.parent
    for name in VOCABULARY_FILES:
        if is_inner_file(folder / name):
            try:
                vocabulary = read_vocabulary(folder / name)
            except ResiduumError:  # the scan of the file itself reports why it is unreadable
                continue
            if vocabulary.tokens:
                return vocabulary
    return None


def read_vocabulary(path: Path) -> Vocabulary:
    """Read the tokens in one file of a tokenizer.

    Args:
        path: The file.

    Returns:
        The vocabulary. It is empty if a JSON file holds no tokens.

    Raises:
        CheckpointError: If the file is damaged or too large.
    """
    if path.suffix == ".json":
        return _read_json_vocabulary(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_VOCABULARY_BYTES + 1)
    except OSError as problem:
        raise CheckpointError(
            f"The vocabulary file of a tokenizer must be readable; reading the file {path.name!r} failed "
            f"({problem.strerror}).",
            "Check the file.",
        ) from problem
    if len(raw) > MAX_VOCABULARY_BYTES or raw.count(b"\n") > MAX_TOKENS:
        raise CheckpointError(
            f"The vocabulary file of a tokenizer may have at most {MAX_VOCABULARY_BYTES} bytes and "
            f"{MAX_TOKENS} tokens; the file {path.name!r} has more.",
            "Delete this file, because no real tokenizer is this large.",
        )
    if path.suffix in PIECE_SUFFIXES:
        return Vocabulary(path.name, _clean(enumerate(_read_pieces(raw, path.name))))
    lines = raw.decode("utf-8", "replace").split("\n")
    tokens = _clean((i, line.strip()) for i, line in enumerate(lines) if line.strip())
    has_pieces = any(token.startswith("##") for token in tokens.values())
    return Vocabulary(path.name, tokens, has_whole_words=not has_pieces)


def _read_json_vocabulary(path: Path) -> Vocabulary:
    content = read_json(path)
    if not isinstance(content, dict):
        return Vocabulary(path.name)
    model = content.get("model")
    if isinstance(model, dict):  # tokenizer.json
        vocab = model.get("vocab")
        if isinstance(vocab, list):  # pairs of a token and its score, in the order of the ids
            ids_and_tokens = [
                (i, row[0]) for i, row in enumerate(vocab) if isinstance(row, list) and row
            ]
        else:
            ids_and_tokens = _invert(vocab)
        added = _clean(_read_added_tokens(content.get("added_tokens")))
        tokens = _clean(ids_and_tokens, is_byte_level=_is_byte_level(content)) | added
        return Vocabulary(path.name, tokens, added, model.get("type") == "WordLevel")
    if path.name == SPECIAL_TOKENS_FILE:
        special_tokens = _clean(enumerate(_collect_texts(content)))
        return Vocabulary(path.name, special_tokens, special_tokens)
    ids_and_tokens = _invert(content)
    is_byte_level = any(
        isinstance(token, str) and token.startswith("Ġ") for _, token in ids_and_tokens
    )
    tokens = _clean(ids_and_tokens, is_byte_level=is_byte_level)
    added = tokens if path.name == "added_tokens.json" else {}
    return Vocabulary(path.name, tokens, added)


def _invert(ids_by_token: Any) -> list[tuple[Any, Any]]:
    return (
        [(i, token) for token, i in ids_by_token.items()] if isinstance(ids_by_token, dict) else []
    )


def _read_added_tokens(entries: Any) -> Iterator[tuple[Any, Any]]:
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            yield entry.get("id"), entry.get("content")


def _collect_texts(content: dict[str, Any]) -> Iterator[Any]:
    """Yield the tokens in special_tokens_map.json: texts, lists of texts, or dicts with a text."""
    for value in content.values():
        for entry in value if isinstance(value, list) else (value,):
            yield entry.get("content") if isinstance(entry, dict) else entry


def _is_byte_level(content: dict[str, Any]) -> bool:
    decoder_and_pre_tokenizer = (content.get("decoder"), content.get("pre_tokenizer"))
    return any("ByteLevel" in str(setting)[:2000] for setting in decoder_and_pre_tokenizer)


def _clean(entries: Iterable[tuple[Any, Any]], *, is_byte_level: bool = False) -> dict[int, str]:
    """Return the tokens by id as a person would write them, such as "house" for "Ġhouse"."""
    tokens: dict[int, str] = {}
    for i, token in entries:
        if type(i) is not int or not isinstance(token, str) or not 0 <= i < MAX_TOKENS:
            continue
        readable_token = token[:MAX_TOKEN_LENGTH]
        if is_byte_level:
            readable_token = decode_bytes(readable_token)
        tokens[i] = readable_token.replace("▁", " ").strip() or token[:MAX_TOKEN_LENGTH]
    return tokens


def decode_bytes(text: str) -> str:
    """Decode the letters with which byte-level vocabularies write single bytes, such as "Ġ" for a space.

    Args:
        text: A token of the vocabulary.

    Returns:
        The token as a person would write it, or ``text`` itself if it has other letters.
    """
    raw = bytes(BYTE_LETTERS[letter] for letter in text if letter in BYTE_LETTERS)
    is_encoded = all(letter in BYTE_LETTERS for letter in text)
    return raw.decode("utf-8", "replace") if is_encoded else text


def _byte_letters() -> dict[str, int]:
    # GPT-2 writes printable bytes as the same letters, and other bytes as letters from code point 256 on.
    printable_bytes = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = [byte for byte in range(256) if byte not in printable_bytes]
    letters = {chr(byte): byte for byte in printable_bytes}
    return letters | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


BYTE_LETTERS = _byte_letters()


def _read_pieces(raw: bytes, name: str) -> Iterator[str]:
    # A model of SentencePiece is a message of protocol buffers. Field 1 of the model is a piece. Field 1 of a
    # piece is its text.
    try:
        for number, value in _read_fields(raw):
            if number == 1 and isinstance(value, bytes):
                texts = [
                    text for n, text in _read_fields(value) if n == 1 and isinstance(text, bytes)
                ]
                yield texts[0].decode("utf-8", "replace") if texts else ""
    except (ValueError, IndexError) as problem:
        raise CheckpointError(
            f"A vocabulary file of SentencePiece must be complete; the file {name!r} is damaged.",
            "Copy or save the file again.",
        ) from problem


def _read_fields(raw: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number and the value of each field of a message of protocol buffers."""
    position = 0
    while position < len(raw):
        tag, position = _read_varint(raw, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, position = _read_varint(raw, position)
            yield number, value
            continue
        byte_count = {1: 8, 5: 4}.get(wire_type)
        if wire_type == 2:
            byte_count, position = _read_varint(raw, position)
        if byte_count is None or position + byte_count > len(raw):
            raise ValueError("the message ends too early")
        yield number, raw[position : position + byte_count]
        position += byte_count


def _read_varint(raw: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = raw[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError("a number is too long")
