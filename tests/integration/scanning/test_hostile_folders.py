"""Folders from anywhere: bombs, links, pipes and lies about sizes take little time and memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import residuum as rs
from residuum.errors import CheckpointError
from tests.confined import confined

MAX_SECONDS, MAX_BYTES = 5, 300 << 20


def npz_bomb(folder: Path) -> None:
    """Write an archive of a megabyte whose array unpacks to 192 MB."""
    header = (
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (25165824,), }"
    )
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w", force_zip64=True) as member,
    ):
        member.write(header.ljust(127) + b"\n")
        for _ in range(192):
            member.write(bytes(1 << 20))
    (folder / "x.npz").write_bytes(buffer.getvalue())


def gzip_bomb(folder: Path) -> None:
    """Write tables that unpack to 64 MB, with one line and with many lines."""
    for name, block in (("line.csv.gz", b"1" * (1 << 20)), ("lines.csv.gz", b"1,2\n" * (1 << 18))):
        with gzip.open(folder / name, "wb", compresslevel=1) as stream:
            for _ in range(64):
                stream.write(block)


def png_bomb(folder: Path) -> None:
    """Write an image of some kilobytes that claims 60 000 x 60 000 pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1 << 20))
    image = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )
    (folder / "x.png").write_bytes(image)
    (folder / "y.png").write_bytes(image)


def nested_json(folder: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "a.json"):
        (folder / name).write_text("[" * 1_000_000)
    (folder / "b.json").write_text('{"a":' * 900 + "1" + "}" * 900)
    (folder / "c.jsonl").write_text(("[" * 100_000 + "\n") * 50)


def wide_json(folder: Path) -> None:
    for name in ("config.json", "tokenizer.json", "a.json"):
        (folder / name).write_text("[" + "[]," * 10_000_000 + "[]]")
    (folder / "vocab.json").write_text("{" + ",".join(f'"{i}":{i}' for i in range(400_000)) + "}")


def lying_shards(folder: Path) -> None:
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}})
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    save_file({"v": torch.zeros(3)}, folder / "b.safetensors")


def long_lines(folder: Path) -> None:
    (folder / "a.csv").write_text('"' + "x" * 20_000_000)
    (folder / "b.csv").write_text("," * 20_000_000)
    (folder / "c.txt").write_text("x" * 20_000_000)
    header = "---\ndatasets:" + "\n" * 100_000 + " " * 100_000 + "- -" * 100_000 + "\n---\n"
    (folder / "README.md").write_text(header + "> " * 1_000_000 + "| " * 1_000_000)
    (folder / "vocab.txt").write_text("a\n" * 5_000_000)


def pipes(folder: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "a.csv", "b.png"):
        os.mkfifo(folder / name)
    (folder / "passwd.csv").symlink_to("/etc/passwd")
    (folder / "up").symlink_to(folder, target_is_directory=True)
    (folder / "zero.npy").symlink_to("/dev/zero")
    (folder / "a.jsonl").write_text("{}\n")


def claimed_arrays(folder: Path) -> None:
    header = (
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999,), }"
    )
    (folder / "a.npy").write_bytes(header.ljust(127) + b"\n" + bytes(100))
    (folder / "b.npz").write_bytes(b"PK\x03\x04" + bytes(1000))
    (folder / "training_args.bin").write_bytes(b"PK\x03\x04" + bytes(1000))


# Each folder with its exit code. A data file that is a bomb is refused or noted; the model decides the rest.
HOSTILE: dict[Callable[[Path], None], int] = {
    npz_bomb: 4,
    gzip_bomb: 1,
    png_bomb: 0,
    nested_json: 1,
    wide_json: 4,
    lying_shards: 3,
    long_lines: 1,
    pipes: 0,
    claimed_arrays: 3,
}


def test_hostile_folders_take_little(tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    for name in ("a.csv", "b.csv"):
        (tmp_path / "warm" / name).write_text("1,2\n")
    (tmp_path / "warm" / "README.md").write_text("text")
    (tmp_path / "warm" / "a.json").write_text("{}")
    save_file({"w": torch.zeros(3)}, tmp_path / "warm" / "model.safetensors")
    commands = []
    for write in HOSTILE:
        folder = tmp_path / write.__name__
        folder.mkdir()
        write(folder)
        commands.append(["scan", str(folder)])
    results = confined([["scan", str(tmp_path / "warm")]], commands)
    for (write, code), usage in zip(HOSTILE.items(), results, strict=True):
        assert usage.code == code, (write.__name__, usage)
        assert usage.seconds < MAX_SECONDS, (write.__name__, usage)
        assert usage.bytes < MAX_BYTES, (write.__name__, usage)


def test_links_and_pipes_are_counted_and_not_opened(tmp_path: Path) -> None:
    pipes(tmp_path)
    result = rs.scan(tmp_path)
    assert [file.file for file in result.files] == ["a.jsonl"]
    assert "3 links were not followed; scan their targets" in result.notes
    assert "5 pipes, sockets or devices were not opened" in result.notes
    with pytest.raises(CheckpointError, match="is a link or a special file"):
        rs.load(tmp_path)  # the weights are a pipe


def test_an_index_cannot_name_a_file_of_another_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"w": torch.zeros(3)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"w": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (unread,) = rs.scan(folder).unread
    assert "its own folder" in unread.reason
    assert rs.scan(folder).exit_code == 4
