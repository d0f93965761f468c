"""Find what the files around a model reveal about the training data, and say what to do with each file.

A tokenizer that was trained on private texts lists their words. So the tokens of a vocabulary are compared
with the vocabulary of the base, if there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residuum.errors import ResiduumError
from residuum.io.data_files import find_data_kind
from residuum.io.inert import Block
from residuum.io.release import ARRAYS, IMAGES, JSON, OTHER, TABLE, TEXT, Release
from residuum.io.tree import walk
from residuum.io.vocabularies import Vocabulary, find_vocabulary
from residuum.scanning.finding import (
    CLASSES,
    PATHS,
    START,
    STATE,
    STATISTICS,
    STORED,
    Finding,
    list_examples,
    printable,
    rank,
)
from residuum.scanning.findings import findings
from residuum.scanning.folder_files import (
    CODE_SUFFIX,
    EVENTS,
    NAMED,
    VOCABULARY,
    FolderItem,
    read_tokens,
)
from residuum.scanning.folder_files import STATE as STATE_ROLE
from residuum.scanning.path_rules import PATH

MIN_TABLE_ROWS = 5  # a table with fewer rows can be a table of results
HISTORIES = ("history", "log_history")  # names of lists that training code fills with losses
MIN_LIST = 20  # smallest number of records or texts in a JSON file that is reported
MIN_TEXT_LENGTH = 20  # smallest mean length of the texts in such a list
MIN_TEXT_BYTES = 1000  # smallest size of a text file that is reported
# Vocabularies with fewer tokens are rarely public. BERT for Chinese has 21 128 tokens, most others more.
MAX_SMALL_VOCABULARY = 20_000
MIN_WORDS = 10  # a vocabulary with fewer words, such as one of single letters, is not reported
MIN_WORD_LENGTH = 3
SPECIAL_TOKEN = re.compile(r"^([<\[({|].*[>\])}|]|▁+|[^\w]*)$")
MAX_LABELS = 50  # more classes than this can be persons or products
MAX_README = 500_000  # largest number of characters of a README that are searched
MAX_PATH = 1000  # largest length of the name of a file in a README
MAX_QUOTED_LINES = 10  # a longer table or quotation in a README can hold records
NOT_NEEDED = "Delete {file} from the release. Users of the model do not need it."
DELETE = "Delete {file} from the release."


@dataclass(frozen=True, eq=False)
class BaseFolder:
    """What is known about a base (the model before training), to which the files of a folder are compared.

    Attributes:
        tokens: All tokens of the tokenizer of the base. Empty if the base has none.
    """

    tokens: frozenset[str] = frozenset()

    @classmethod
    def read(cls, path: str | Path) -> BaseFolder:
        """Read the tokenizer in the folder of the base.

        Args:
            path: The base: a folder, or a file, whose folder is searched.

        Returns:
            The tokens.
        """
        vocabulary = find_vocabulary(path)
        return cls(frozenset(() if vocabulary is None else vocabulary.tokens.values()))


def examine_file(item: FolderItem, release: Release, base: BaseFolder) -> list[Finding]:
    """Return what a file of a folder reveals about the training data.

    Args:
        item: The file, or many files of one format.
        release: The content of the file.
        base: What is known about the base (the model before training).

    Returns:
        The findings, the most severe first. Every remedy names the file.
    """
    examine = _choose_rule(item, release)
    cleaned_findings = [
        finding.replace(
            what=printable(finding.what),
            where=printable(finding.where or item.name),
            reason=printable(finding.reason),
            remedy=printable(finding.remedy.replace("{file}", item.name)),
        )
        for finding in examine(item, release, base)
    ]
    return sorted(cleaned_findings, key=rank)


Rule = Callable[[FolderItem, Release, BaseFolder], Iterator[Finding]]


def _choose_rule(item: FolderItem, release: Release) -> Rule:
    if item.role == STATE_ROLE:
        return _examine_trainer_file
    if item.role == VOCABULARY:
        return _examine_vocabulary
    if item.role == NAMED:
        return _examine_named_file
    if item.is_group:
        return _examine_group
    if item.path.name.lower().startswith("readme"):
        return _examine_readme
    if item.path.name in NAMED_JSON and not release.notes:
        return NAMED_JSON[item.path.name]
    return RULES_BY_KIND[release.kind]


def examine_unread_data(item: FolderItem, problem: ResiduumError) -> Finding:
    """Return the finding about a data file that could not be read.

    Args:
        item: The file.
        problem: Why the file could not be read.

    Returns:
        The finding.
    """
    kind = find_data_kind(item.path.name)
    reason = f"nobody knows what it holds: {problem.message}"
    finding_title = (
        f"a file of {kind} that was not read" if kind != TABLE else "a table that was not read"
    )
    remedy = DELETE.replace("{file}", item.name)
    return Finding(STORED, "medium", finding_title, item.name, printable(reason), remedy)


# Files that a Trainer saves


def _examine_trainer_file(item: FolderItem, release: Release, _: BaseFolder) -> Iterator[Finding]:
    file_name = item.path.name
    findings_in_file = findings(release)
    for finding in findings_in_file:
        yield finding if finding.kind == "code" else finding.replace(remedy=NOT_NEEDED)
    if findings_in_file:
        return
    if file_name.startswith(("rng_state", "random_states")):
        reason = "the states reveal the random numbers that were drawn before and after saving"
        yield Finding(START, "low", "states of random generators", "", reason, NOT_NEEDED)
    else:
        reason = "it shows how far training had progressed"
        finding_title = f"the state of the {file_name.partition('.')[0].replace('_', ' ')}"
        yield Finding(STATE, "low", finding_title, "", reason, NOT_NEEDED)


def _examine_trainer_state(item: FolderItem, release: Release, _: BaseFolder) -> Iterator[Finding]:
    content = release.content if isinstance(release.content, dict) else {}
    history = content.get("log_history")
    if isinstance(history, list) and history:
        yield _describe_curve("log_history", len(history))
    yield from _find_paths(release, NOT_NEEDED)


def _describe_curve(where: str, count: int) -> Finding:
    reason = "the curve shows the course of training, step by step, and scores on validation data"
    return Finding(STATISTICS, "low", "a loss curve", where, reason, NOT_NEEDED, count=count)


# Tokenizers


def _examine_vocabulary(item: FolderItem, _: Release, base: BaseFolder) -> Iterator[Finding]:
    vocabulary = read_tokens(item.path)
    tokens = {i: token for i, token in vocabulary.tokens.items() if not SPECIAL_TOKEN.match(token)}
    plain = Vocabulary(vocabulary.file, tokens)
    if base.tokens:
        bare_base = {_bare(token) for token in base.tokens}
        new_rows = [i for i, token in tokens.items() if _bare(token) not in bare_base]
        if new_rows:
            listed_words = plain.words(new_rows)
            reason = (
                "the tokenizer of the base does not have these tokens: "
                f"{list_examples(listed_words)}. Someone added them for this model, or trained the "
                "tokenizer on the texts of this model"
            )
            remedy = "Release the tokenizer of the base, or remove these tokens from {file}."
            finding_title = f"{len(listed_words)} tokens that the base does not have"
            yield Finding(
                STORED,
                "high",
                finding_title,
                "",
                reason,
                remedy,
                count=len(listed_words),
                words=listed_words,
            )
        return
    listed_words = tuple(word for word in plain.words(tokens) if _is_word(word))
    if len(listed_words) < MIN_WORDS and not (
        vocabulary.added and listed_words and item.path.suffix == ".json"
    ):
        return
    is_small = vocabulary.has_whole_words or len(tokens) < MAX_SMALL_VOCABULARY
    reason = (
        "words of the training texts may be in it. A tokenizer that was trained on private texts lists their "
        f"words: {list_examples(listed_words)}"
    )
    remedy = (
        "If this tokenizer is that of a public model, compare the two: residuum scan FOLDER --base "
        "BASE_FOLDER. If it was trained on private texts, release the model with a public tokenizer."
    )
    finding_title = f"a vocabulary of {len(vocabulary)} tokens"
    yield Finding(
        STORED,
        "medium" if is_small else "low",
        finding_title,
        "",
        reason,
        remedy,
        count=len(vocabulary),
    )


def _bare(token: str) -> str:
    return token.removeprefix("##").strip().lower()


def _is_word(token: str) -> bool:
    return len(token) >= MIN_WORD_LENGTH and token.isalpha()


# Data


def _examine_table(item: FolderItem, release: Release, _: BaseFolder) -> Iterator[Finding]:
    if not release.content:  # a Parquet file without pyarrow
        finding_title = release.notes[0] if release.notes else "an empty table"
        reason = "files of this format are tables of records"
        yield Finding(STORED, "high", finding_title, "", reason, DELETE)
        return
    yield from _describe_table(release.content, release.notes)


def _describe_table(content: dict[str, Any], notes: tuple[str, ...]) -> Iterator[Finding]:
    blocks = [block for block in content.values() if isinstance(block, Block)]
    row_count = max((block.shape[0] for block in blocks), default=0)
    if not row_count:
        return
    columns = content["columns"]
    severity = "high" if row_count >= MIN_TABLE_ROWS else "medium"
    names = list_examples(columns, 5)
    notes_text = _describe_notes(notes)
    reason = f"its rows can be training records. Its columns are {names}{notes_text}"
    finding_title = f"a table of {row_count} rows and {len(columns)} columns"
    yield Finding(STORED, severity, finding_title, "", reason, DELETE, count=row_count)


def _examine_arrays(item: FolderItem, release: Release, _: BaseFolder) -> Iterator[Finding]:
    blocks = {name: block for name, block in release.content.items() if block.numel > 1}
    if not blocks:
        return
    has_rows = any(len(b.shape) > 1 and b.shape[0] >= MIN_TABLE_ROWS for b in blocks.values())
    shapes = list_examples(
        [f"{name[:20]} of shape {' x '.join(map(str, b.shape))}" for name, b in blocks.items()], 3
    )
    notes_text = _describe_notes(release.notes)
    finding_title = f"{len(blocks)} arrays" if len(blocks) > 1 else "an array"
    reason = f"arrays next to a model can be training records: {shapes}{notes_text}"
    largest_row_count = max(block.shape[0] for block in blocks.values())
    yield Finding(
        STORED,
        "high" if has_rows else "medium",
        finding_title,
        "",
        reason,
        DELETE,
        count=largest_row_count,
    )


def _describe_notes(notes: tuple[str, ...]) -> str:
    return "".join(f". {note[:1].upper()}{note[1:]}" for note in notes[:3])


def _examine_text(item: FolderItem, release: Release, _: BaseFolder) -> Iterator[Finding]:
    if release.size < MIN_TEXT_BYTES:
        return
    severity = "high" if item.path.suffix.lower() == ".txt" else "medium"
    notes_text = _describe_notes(release.notes)
    reason = f"a long text next to a model can be training data{notes_text}"
    finding_title = f"a text of {_describe_size(release.size)}"
    remedy = "If the text is from the training data, delete {file} from the release."
    yield Finding(STORED, severity, finding_title, "", reason, remedy)


def _describe_size(size: int) -> str:
    return f"{size / 1000:.0f} kB" if size < 1_000_000 else f"{size / 1_000_000:.0f} MB"


def _examine_json(item: FolderItem, release: Release, _: BaseFolder) -> Iterator[Finding]:
    content = release.content
    if isinstance(content, dict) and isinstance(content.get("columns"), list) and len(content) > 1:
        blocks = [value for name, value in content.items() if name != "columns"]
        if all(isinstance(block, Block) for block in blocks):
            yield from _describe_table(content, release.notes)
            return
    for note in release.notes:
        yield Finding(STORED, "high", note, "", "large JSON files are usually data sets", DELETE)
    largest, count = "", 0
    for place in walk(content):
        description = _describe_list(place.value)
        if description and place.name in HISTORIES:
            yield _describe_curve(place.path, len(place.value))
        elif description and len(place.value) > count:
            largest, count, where = description, len(place.value), place.path
    if largest:
        reason = "lists of this length can be training data"
        yield Finding(
            STORED, "high", f"a list of {count} {largest}", where, reason, DELETE, 1, count
        )
    yield from _find_paths(release, "Remove the names of files from {file}.")


def _describe_list(value: Any) -> str:
    if not isinstance(value, list) or len(value) < MIN_LIST:
        return ""
    if all(isinstance(entry, dict) for entry in value):
        return "records"
    if not all(isinstance(entry, str) for entry in value):
        return ""
    return "texts" if sum(map(len, value)) >= MIN_TEXT_LENGTH * len(value) else ""


def _find_paths(release: Release, remedy: str) -> Iterator[Finding]:
    for finding in findings(release):
        if finding.kind == PATHS:
            yield finding.replace(remedy=remedy)


def _examine_images(item: FolderItem, release: Release, _: BaseFolder) -> Iterator[Finding]:
    is_group = item.is_group and len(item.paths) > 1
    image_count = len(item.paths) if is_group else None
    notes_text = _describe_notes(release.notes)
    finding_title = f"{image_count} images" if is_group else "an image"
    is_large_group = is_group and len(item.paths) >= MIN_TABLE_ROWS
    reason = f"images next to a model can be training data{notes_text}"
    remedy = DELETE if is_large_group else "If {file} is from the training data, delete it."
    severity = "high" if is_large_group else "low"
    yield Finding(STORED, severity, finding_title, "", reason, remedy, count=image_count)


def _examine_group(item: FolderItem, release: Release, base: BaseFolder) -> Iterator[Finding]:
    if release.kind == IMAGES:
        yield from _examine_images(item, release, base)
        return
    finding_title = f"{len(item.paths)} files with the ending {item.path.suffix}"
    reason = "many data files of the same format next to a model are usually a data set"
    notes_text = _describe_notes(release.notes)
    yield Finding(
        STORED, "high", finding_title, "", reason + notes_text, DELETE, count=len(item.paths)
    )


# Documents and settings


def _examine_config(item: FolderItem, release: Release, base: BaseFolder) -> Iterator[Finding]:
    content = release.content if isinstance(release.content, dict) else {}
    base_model_name = content.get("_name_or_path")
    if isinstance(base_model_name, str) and PATH.match(base_model_name):
        reason = f"the folder {base_model_name[:60]!r} tells where the model was trained"
        remedy = "Replace the value of _name_or_path in {file} by the name of the public base."
        yield Finding(PATHS, "medium", "the name of a folder", "_name_or_path", reason, remedy)
    labels = content.get("id2label")
    class_names = (
        [text for text in labels.values() if isinstance(text, str)]
        if isinstance(labels, dict)
        else []
    )
    named_labels = [text for text in class_names if not re.match(r"^(LABEL_)?\d+$", text)]
    if named_labels:
        is_long = len(named_labels) > MAX_LABELS
        examples = list_examples(tuple(named_labels))
        reason = f"the names of the classes tell what the model was trained on: {examples}"
        remedy = "If these names are confidential, replace them by numbers in {file}."
        kind, severity = (STORED, "medium") if is_long else (STATISTICS, "low")
        finding_title, count = "names of classes", len(named_labels)
        yield Finding(kind, severity, finding_title, "id2label", reason, remedy, count=count)
    yield from (
        finding
        for finding in _find_paths(release, "Remove the names of files from {file}.")
        if finding.where != "_name_or_path"
    )


def _examine_readme(item: FolderItem, release: Release, _: BaseFolder) -> Iterator[Finding]:
    readme_text = next(iter(release.content["text"].objects), "")[:MAX_README]
    header = readme_text.split("\n---", 1)[0] if readme_text.startswith("---") else ""
    if datasets := re.findall(r"^datasets:[ ]{0,9}\n((?:[ ]{0,9}- .*\n?)+)", header, re.MULTILINE):
        dataset_names = tuple(re.findall(r"-\s+(\S+)", datasets[0]))
        reason = f"the page names the training data: {list_examples(dataset_names)}"
        remedy = "If the names are confidential, remove them from {file}."
        yield Finding(
            PATHS, "low", "names of data sets", "datasets", reason, remedy, count=len(dataset_names)
        )
    example_lines = r"^[ ]{0,9}-?[ ]{0,9}(?:text|source_sentence): (.+)$"
    if examples := re.findall(example_lines, header, re.MULTILINE):
        reason = f"example inputs can be training records: {examples[0][:60]}"
        remedy = "If the examples are from the training data, remove them from {file}."
        yield Finding(
            STORED, "medium", "example inputs", "widget", reason, remedy, count=len(examples)
        )
    words = re.split(r"[\s`'\"()<>\[\]]+", readme_text)
    path_like_words = [word for word in words if len(word) < MAX_PATH and PATH.match(word)]
    local_paths = [
        path for path in path_like_words if path.startswith(("/", "~", "\\", "s3:", "gs:", "file:"))
    ]
    local_paths = [path for path in local_paths if path.count("/") > 1 or "\\" in path]
    if local_paths:
        reason = f"names such as {local_paths[0][:60]!r} tell what the model was trained on"
        remedy = "Remove the names of files from {file}."
        yield Finding(
            PATHS, "medium", "names of files", "", reason, remedy, places=len(local_paths)
        )
    for mark, finding_title in (("|", "a table"), (">", "a quotation")):
        blocks = re.findall(rf"(?:^[ ]*{re.escape(mark)}.*\n?)+", readme_text, re.MULTILINE)
        longest = max((block.count("\n") for block in blocks), default=0)
        if longest > MAX_QUOTED_LINES:
            reason = "long tables and quotations in a description can be training records"
            remedy = "If these lines are from the training data, remove them from {file}."
            yield Finding(
                STORED,
                "low",
                f"{finding_title} of {longest} lines",
                "",
                reason,
                remedy,
                count=longest,
            )


def _examine_notebook(item: FolderItem, release: Release, _: BaseFolder) -> Iterator[Finding]:
    content = release.content if isinstance(release.content, dict) else {}
    cells = content.get("cells")
    outputs = [
        output
        for cell in (cells if isinstance(cells, list) else ())
        if isinstance(cell, dict) and isinstance(cell.get("outputs"), list)
        for output in cell["outputs"]
    ]
    if outputs:
        reason = "outputs of a notebook often show records, images and names of files"
        remedy = "Delete {file} from the release, or clear its outputs."
        finding_title = "a notebook with outputs"
        yield Finding(STORED, "medium", finding_title, "", reason, remedy, count=len(outputs))
    else:
        yield Finding(CLASSES, "low", "a notebook", "", "it is code, which was not run", DELETE)


# Files that a scan names and does not read


def _examine_named_file(item: FolderItem, release: Release, _: BaseFolder) -> Iterator[Finding]:
    name, ending = item.path.name, item.path.suffix.lower()
    if item.name.endswith("/"):
        reason = (
            "the history of a repository keeps every version of every file, also of deleted files"
        )
        remedy = "Delete {file} from the release. Publish the files without their history."
        yield Finding(STORED, "medium", f"the folder {name}", "", reason, remedy)
    elif name.startswith(EVENTS):
        reason = "logs of TensorBoard hold loss curves, and can hold texts and images of the training data"
        yield Finding(STATISTICS, "medium", "a log of training", "", reason, NOT_NEEDED)
    elif ending == CODE_SUFFIX:
        reason = "a library can run this code when it loads the model; the scan did not run it"
        remedy = "Read {file} before you release it or load the model."
        yield Finding(CLASSES, "low", "Python code", "", reason, remedy)
    else:
        is_group = len(item.paths) > 1
        finding_title = (
            f"{len(item.paths)} {ending} files" if is_group else f"a file of the format {ending}"
        )
        reason = "files of this format usually hold data; the scan does not read them"
        yield Finding(
            *(STORED, "high", f"{finding_title}, not read", "", reason, DELETE),
            count=len(item.paths) if is_group else None,
        )


def _find_nothing(item: FolderItem, release: Release, _: BaseFolder) -> Iterator[Finding]:
    return iter(())


NAMED_JSON: dict[str, Rule] = {
    "trainer_state.json": _examine_trainer_state,
    "config.json": _examine_config,
}
RULES_BY_KIND: dict[str, Rule] = {
    TABLE: _examine_table,
    ARRAYS: _examine_arrays,
    TEXT: _examine_text,
    JSON: lambda item, release, base: (
        _examine_notebook if item.path.suffix == ".ipynb" else _examine_json
    )(item, release, base),
    IMAGES: _examine_images,
    OTHER: _find_nothing,
}
