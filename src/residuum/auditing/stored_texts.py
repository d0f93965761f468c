"""Search the files in the folder of a model for the training texts, and for held-out texts as a control."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scipy.stats import hypergeom

from residuum.auditing.outcomes import STORED, AttackOutcome
from residuum.auditing.stored_records import NAME
from residuum.evaluation.null import SIGNIFICANCE
from residuum.io.folders import list_folder
from residuum.records import Dataset
from residuum.scanning.text_search import TextIndex, TextMatches

# Suffixes of files that hold no texts as they are: weights and archives.
BINARY_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".onnx",
    ".h5",
    ".gguf",
    ".npz",
    ".zip",
)
MAX_FILE_BYTES = 256 << 20  # largest file that is searched
MAX_LINE = 1 << 20  # characters of a line that are searched at once
MAX_NAMED_FILES = 3  # files that the result names


def search_folder(folder: Path, train: Dataset, holdout: Dataset | None) -> AttackOutcome | None:
    """Search the files of a folder for training texts.

    Args:
        folder: The folder of the model.
        train: Training texts.
        holdout: Held-out texts, None if there are none.

    Returns:
        The row of the table of attacks, None if the texts are unknown or none was found.
    """
    if not train.texts:
        return None
    holdout_texts = () if holdout is None else holdout.texts
    matches_by_file = dict(_search_files(folder, (*train.texts, *holdout_texts)))
    n, stored_numbers = len(train), set[int]().union(*matches_by_file.values())
    matched = sum(number < n for number in stored_numbers)
    if not matched:
        return None
    largest_first = sorted(matches_by_file, key=lambda name: -len(matches_by_file[name]))
    reason = f"{matched} of {n} training texts are stored in {', '.join(largest_first[:MAX_NAMED_FILES])}"
    row = AttackOutcome(
        NAME,
        True,
        True,
        True,
        reason,
        STORED,
        candidates=matched,
        recovered=matched,
        sample_count=n,
    ).replace(rule="stored in the folder")
    if not holdout_texts:
        return row
    held_out_matched, held_out = len(stored_numbers) - matched, len(holdout_texts)
    p_value = float(hypergeom.sf(matched - 1, n + held_out, len(stored_numbers), n))
    return row.replace(
        decides=p_value <= SIGNIFICANCE,
        reason=f"{reason}; {held_out_matched} of {held_out} held-out texts are stored there",
        expected_by_chance=n * held_out_matched / held_out,
        p_value=p_value,
    )


def _search_files(folder: Path, texts: tuple[str, ...]) -> Iterator[tuple[str, set[int]]]:
    """Yield the name of each file that holds texts, with the numbers of these texts."""
    index = TextIndex(texts)
    for file in list_folder(folder).files:
        if file.suffix.lower() in BINARY_SUFFIXES or file.stat().st_size > MAX_FILE_BYTES:
            continue
        matches = TextMatches()
        with file.open(encoding="utf-8", errors="replace") as stream:
            while (line := stream.readline(MAX_LINE)) and not index.is_exhausted:
                index.match(line, matches)
        numbers = matches.long | matches.short
        if numbers:
            yield file.name, numbers
