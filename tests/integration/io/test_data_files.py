"""Data files are read as inert blocks, with the values that plain readers give."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.data_files import find_data_kind, read_data_file, read_images
from residuum.io.folders import is_inner_file, list_folder, locate_weights, read_shard_index
from residuum.io.inert import Block
from residuum.io.tree import walk
from residuum.io.vocabularies import Vocabulary, find_vocabulary, read_vocabulary


def texts_of(content: dict[str, Any], name: str = "texts") -> list[str]:
    return list(content[name].objects)


# Tables


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".csv.gz"])
def test_tables_have_the_numbers_and_texts_of_the_csv_module(tmp_path: Path, ending: str) -> None:
    numbers = np.random.default_rng(0).normal(size=(50, 3))
    rows = [[f'note "{i}",\nline two', *map(repr, map(float, numbers[i]))] for i in range(50)]
    rows[4][2] = ""  # a missing value
    path = tmp_path / f"t{ending}"
    open_file = gzip.open if ending.endswith(".gz") else open
    with open_file(path, "wt", newline="") as stream:
        delimiter = "\t" if ending == ".tsv" else ","
        csv.writer(stream, delimiter=delimiter).writerows([["note", "a", "b", "c"], *rows])
    release = read_data_file(path)
    assert release.kind == "table"
    assert release.content["columns"] == ["note", "a", "b", "c"]
    numbers[4, 1] = np.nan
    block = release.content["numbers"]
    assert block.shape == (50, 3)
    assert np.array_equal(block.tensor().numpy(), numbers, equal_nan=True)
    assert texts_of(release.content) == [row[0] for row in rows]
    assert len(release.content["texts"].objects) == 50


def test_a_table_without_a_header_loses_no_row(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("1;2\n3;4\n5;6\n")
    content = read_data_file(tmp_path / "t.csv").content
    assert content["numbers"].tensor().tolist() == [[1, 2], [3, 4], [5, 6]]
    assert content["columns"] == ["column 1", "column 2"]


def test_lines_of_json_are_a_table(tmp_path: Path) -> None:
    rows = [
        {"text": f"t{i}", "label": i, "chat": [{"role": "user", "content": f"c{i}"}]}
        for i in range(5)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join([*map(json.dumps, rows), "not json"]))
    content = read_data_file(tmp_path / "t.jsonl").content
    assert content["numbers"].tensor()[:5, 0].tolist() == [0, 1, 2, 3, 4]
    texts = texts_of(content)
    assert {"t0", "user\nc4"} <= {*texts}
    assert "not json" in texts  # in a column of its own
    (tmp_path / "t.json").write_text(json.dumps(rows))
    assert texts_of(read_data_file(tmp_path / "t.json").content) == [
        text for i in range(5) for text in (f"t{i}", f"user\nc{i}")
    ]


# Arrays, texts, JSON, images


def test_arrays_are_those_that_numpy_loads(tmp_path: Path) -> None:
    arrays = {
        "x": np.random.default_rng(0).normal(size=(4, 3)),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "names": np.array(["a", "bc"]),
    }
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    content = read_data_file(tmp_path / "a.npz").content
    for name in ("x", "fortran", "big"):
        assert np.array_equal(content[name].tensor().numpy(), arrays[name])
        assert content[name].shape == arrays[name].shape
    assert texts_of(content, "names") == ["a", "bc"]
    np.save(tmp_path / "a.npy", arrays["x"])
    block = read_data_file(tmp_path / "a.npy").content["array"]
    assert np.array_equal(block.tensor().numpy(), arrays["x"])


class Exits:
    def __reduce__(self) -> tuple[Any, ...]:
        return exit, (9,)


def test_pickled_arrays_are_not_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([Exits()], dtype=object), allow_pickle=True)
    release = read_data_file(tmp_path / "a.npy")
    assert release.notes == ("pickled Python objects were not read",)
    with pytest.raises(CheckpointError, match="arrays of numbers"):
        release.content["array"].tensor()
    with pytest.raises(SystemExit):  # the test would notice
        pickle.loads((tmp_path / "a.npy").read_bytes()[128:])


def test_pieces_of_a_long_text_overlap(tmp_path: Path) -> None:
    text = "".join(f"word{i} " for i in range(400_000))
    (tmp_path / "t.txt").write_text(text)
    pieces = texts_of(read_data_file(tmp_path / "t.txt").content, "text")
    assert 1 < len(pieces) < 6
    for start in range(0, len(text) - 5000, 99_991):  # no passage is cut by a border
        assert any(text[start : start + 5000] in piece for piece in pieces)
    (tmp_path / "short.txt").write_bytes("ä b".encode("utf-16"))
    assert texts_of(read_data_file(tmp_path / "short.txt").content, "text") == ["ä b"]


def test_lists_of_numbers_in_json_are_blocks(tmp_path: Path) -> None:
    value = {"rows": [[1, 2.5], [3, 4]], "deep": {"v": [1, 2, 3]}, "odd": [[1, 2], [3]], "t": ["a"]}
    (tmp_path / "v.json").write_text(json.dumps(value))
    content = read_data_file(tmp_path / "v.json").content
    assert content["rows"].tensor().tolist() == [[1, 2.5], [3, 4]]
    assert content["deep"]["v"].tensor().tolist() == [1, 2, 3]
    assert content["odd"][1] == [3]
    assert content["t"] == ["a"]
    assert {place.path for place in walk(content)} >= {"rows", "deep.v"}


def test_images_have_their_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (5, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    release = read_images(tmp_path, sorted(tmp_path.iterdir()))
    assert np.array_equal(release.content["a.png"].tensor().numpy(), pixels)
    assert release.content["b.png"].shape == (5, 6, 1)
    assert release.notes == ("1 images could not be decoded",)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("a.csv", "table"), ("A.CSV.GZ", "table"), ("a.npz", "arrays"), ("a.npz.gz", "")),
        *(("a.json", "json"), ("a.jpeg", "images"), ("a.pt", ""), ("LICENSE", "")),
    ],
)
def test_kinds_follow_from_names(name: str, kind: str) -> None:
    assert find_data_kind(name) == kind


# Vocabularies


def piece(text: str) -> bytes:
    message = b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15" + bytes(4)
    return b"\x0a" + bytes([len(message)]) + message


def test_vocabularies_of_every_format(tmp_path: Path) -> None:
    expected = {0: "[UNK]", 1: "pereira", 2: "é"}
    wordpiece = {"model": {"type": "WordPiece", "vocab": {"[UNK]": 0, "pereira": 1, "é": 2}}}
    byte_level = {
        "model": {"type": "BPE", "vocab": {"[UNK]": 0, "Ġpereira": 1, "Ã©": 2}},
        "decoder": {"type": "ByteLevel"},
    }
    unigram = {"model": {"type": "Unigram", "vocab": [["[UNK]", 0], ["▁pereira", -1.5], ["é", -2]]}}
    for content in (wordpiece, byte_level, unigram):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        assert read_vocabulary(tmp_path / "tokenizer.json").tokens == expected
    (tmp_path / "vocab.txt").write_text("[UNK]\npereira\né\n")
    assert read_vocabulary(tmp_path / "vocab.txt").tokens == expected
    (tmp_path / "vocab.json").write_text(json.dumps({"[UNK]": 0, "Ġpereira": 1, "Ã©": 2}))
    assert read_vocabulary(tmp_path / "vocab.json").tokens == expected
    pieces = b"".join(map(piece, ("[UNK]", "▁pereira", "é"))) + b"\x12\x02ab"
    (tmp_path / "spiece.model").write_bytes(pieces)
    assert read_vocabulary(tmp_path / "spiece.model").tokens == expected
    (tmp_path / "spiece.model").write_bytes(pieces[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        read_vocabulary(tmp_path / "spiece.model")


def test_rare_whole_words_come_first(tmp_path: Path) -> None:
    tokens = {"[UNK]": 0, "the": 5, "##ing": 6, "pereira": 7, "2024": 8}
    model = {"type": "WordLevel", "vocab": tokens}
    added = [{"id": 9, "content": "galloway"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    vocabulary = find_vocabulary(tmp_path)
    assert isinstance(vocabulary, Vocabulary)
    assert vocabulary.words([5, 6, 7, 8, 9, 100]) == ("galloway", "pereira", "the", "2024", "##ing")
    assert vocabulary.has_whole_words
    assert vocabulary.fits(10)
    assert vocabulary.fits(16)  # rows that nobody uses
    assert not vocabulary.fits(9)
    assert find_vocabulary(tmp_path / "model.safetensors") is not None  # the folder of a file


# Folders


def test_links_are_followed_only_into_the_cache_of_hugging_face(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1f").write_bytes(b"weights")
    (tmp_path / "outside").write_bytes(b"secret")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1f")
    (snapshot / "vocab.txt").symlink_to(tmp_path / "outside")
    (snapshot / "loop").symlink_to("loop")
    (blobs / "2e").symlink_to(tmp_path / "outside")
    (snapshot / "vocab.json").symlink_to("../../blobs/2e")
    listing = list_folder(snapshot)
    assert [path.name for path in listing.files] == ["model.safetensors"]
    assert {path.name for path in listing.links} == {"vocab.txt", "vocab.json", "loop"}
    assert locate_weights(snapshot) == snapshot / "model.safetensors"
    assert find_vocabulary(snapshot) is None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").symlink_to(blobs / "1f")
    assert not is_inner_file(tmp_path / "other" / "model.safetensors")
    with pytest.raises(CheckpointError, match="is a link"):
        locate_weights(tmp_path / "other")


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ({"weight_map": {"w": "../out.safetensors"}}, UnsafeFileError, "its own folder"),
        ({"weight_map": {"w": "/etc/passwd"}}, UnsafeFileError, "its own folder"),
        ({"weight_map": {"w": "sub/a.safetensors"}}, UnsafeFileError, "its own folder"),
        ({"weight_map": {"w": "a\\b"}}, UnsafeFileError, "its own folder"),
        ({"weight_map": {"w": ".."}}, UnsafeFileError, "its own folder"),
        ({"weight_map": {"w": "link.safetensors"}}, UnsafeFileError, "its own folder"),
        ({"weight_map": {"w": "missing.safetensors"}}, CheckpointError, "must exist"),
        ({"weight_map": {str(i): f"{i}.bin" for i in range(1001)}}, UnsafeFileError, "at most"),
        ({"weight_map": {"w": 3}}, CheckpointError, "weight_map"),
        ({"weight_map": {}}, CheckpointError, "weight_map"),
        ([1], CheckpointError, "weight_map"),
    ],
)
def test_an_index_names_files_of_its_own_folder(
    tmp_path: Path, content: Any, error: type[Exception], words: str
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "out.safetensors").write_bytes(b"x")
    (folder / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(content))
    with pytest.raises(error, match=words):
        read_shard_index(index)


def test_blocks_of_a_description_take_no_memory() -> None:
    tensor = Block((1000, 1000, 1000), "float32").meta()
    assert tensor.shape == (1000, 1000, 1000)
    assert tensor.device == torch.device("meta")
