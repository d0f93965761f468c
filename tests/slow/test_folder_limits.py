"""A disk is no release: a folder of 100 000 files is refused in seconds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import residuum as rs
from residuum.errors import InputError
from residuum.io.folders import MAX_ENTRIES

MAX_SECONDS = 5


def test_a_disk_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "0"
    source.touch()
    for i in range(1, MAX_ENTRIES + 1):
        if i % 50_000 == 0:  # a file can have 65 000 names
            source = tmp_path / f"next{i}"
            source.touch()
        os.link(source, tmp_path / str(i))
    start = time.process_time()
    with pytest.raises(InputError, match=f"at most {MAX_ENTRIES} files and folders"):
        rs.scan(tmp_path)
    assert time.process_time() - start < MAX_SECONDS
