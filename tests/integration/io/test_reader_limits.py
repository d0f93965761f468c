"""Limits of the reader of pickles, each from both sides: what is just allowed, and what is not."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from residuum.cli.main import main
from residuum.errors import CheckpointError, UnsafeFileError
from residuum.io.release import open_release
from tests.program import Capture, one_line


def nested_arrays(depth: int) -> bytes:
    """Write arrays of objects as joblib does: each is followed by a pickle, which is one of them again."""
    attributes = {"shape": (1,), "dtype": np.dtype(object), "order": "C"}
    state = pickle.dumps(attributes, 2)[2:-1]
    head = b"\x80\x02cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81" + state + b"b"
    return head * depth + pickle.dumps(np.array([None], dtype=object), 2) + b"." * depth


def test_pickles_lie_eight_deep_in_each_other(tmp_path: Path) -> None:
    path = tmp_path / "m.joblib"
    path.write_bytes(nested_arrays(8))
    assert open_release(path).content.objects == [None]
    for depth in (9, 3000):
        path.write_bytes(nested_arrays(depth))
        with pytest.raises(CheckpointError, match="nested too deeply"):
            open_release(path)


def array_of(dimensions: int) -> bytes:
    """A number as an array of shape (1, 1, ...), which numpy itself makes up to 64 dimensions of."""
    return pickle.dumps(np.ones((1,) * dimensions), 2)


def test_arrays_have_at_most_32_dimensions(tmp_path: Path) -> None:
    (tmp_path / "m.pkl").write_bytes(array_of(32))
    assert open_release(tmp_path / "m.pkl").content.tensor().shape == (1,) * 32
    (tmp_path / "m.pkl").write_bytes(array_of(33))
    with pytest.raises(CheckpointError, match="at most 32 dimensions"):
        open_release(tmp_path / "m.pkl")


def table(entries: int) -> bytes:
    """A dict of whole numbers, ten bytes for each entry."""
    rows = (b"J" + struct.pack("<i", i) + b"J" + struct.pack("<i", i) for i in range(entries))
    return b"\x80\x02}(" + b"".join(rows) + b"u."


def test_entries_of_dicts_count_as_memory(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "m.pkl").write_bytes(table(300_000))
    assert main(["scan", str(tmp_path / "m.pkl")]) == 0
    capsys.readouterr()
    (tmp_path / "m.pkl").write_bytes(table(460_000))
    assert main(["scan", str(tmp_path / "m.pkl")]) == 4
    assert "48 MB of memory in addition to the size" in one_line(capsys)


def two_claims(first: int, second: int) -> bytes:
    """Two tensors of one number over the storage "0", with the size that each of them claims."""

    def tensor(numel: int) -> bytes:
        claim = (
            b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        )
        size = b"J" + struct.pack("<i", numel)
        view = b"K\x00" + size + b"\x85K\x01\x85\x89}"
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + claim + size + b"tQ" + view + b"tR"

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + tensor(first) + tensor(second) + b"\x86.")
        archive.writestr("a/data/0", bytes(4))
    return buffer.getvalue()


def test_a_storage_has_one_size(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(two_claims(1, 1))
    assert [block.numel for block in open_release(tmp_path / "m.pt").content] == [1, 1]
    (tmp_path / "m.pt").write_bytes(two_claims(1, 10**6))
    with pytest.raises(UnsafeFileError, match="states two sizes of the storage"):
        open_release(tmp_path / "m.pt")
