"""The run directory of a sweep: one driver at a time, a file per trial, a summary written last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from residuum.records import Reconstruction, make_directory, read_json, write_json
from residuum.records.folders import another, claimed

WHAT, REQUEST, TRIALS = "a sweep", "request.json", "trials"
SUMMARY, REPORT, POOLED = "sweep.json", "report.html", "reconstruction.safetensors"


class Folder:
    """Files of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def claim(self, request: dict[str, Any]) -> None:
        """Begin, or go on with, the sweep that ``request`` describes; any other is refused."""
        wanted = json.loads(json.dumps(request))
        file = self.path / REQUEST
        if file.is_file():
            if read_json(file) != wanted:
                raise another(self.path, WHAT, "settings or on other weights")
            return
        make_directory(self.path / TRIALS)
        write_json(file, wanted)

    def trial(self, number: int) -> Path:
        """Where a finished trial's candidates are."""
        return self.path / TRIALS / f"{number:06d}.safetensors"

    def state(self, number: int) -> Path:
        """Where a trial that successive halving paused goes on from."""
        return self.path / TRIALS / f"{number:06d}.state.safetensors"

    def load(self, number: int) -> Reconstruction | None:
        """A finished trial's candidates; None where there are none, or none that can be read."""
        return Reconstruction.load_or_none(self.trial(number))


def digest(values: Mapping[str, Any]) -> str:
    """Hash of plain values and tensors, by name: what tells two requests apart."""
    found = hashlib.sha256()
    for name in sorted(values):
        value = values[name]
        if isinstance(value, Tensor):
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        else:
            text = digest(value) if isinstance(value, Mapping) else repr(value)
            found.update(f"{name} {text}".encode())
    return found.hexdigest()


@contextmanager
def open_folder(path: Path) -> Iterator[Folder]:
    """``path`` for this sweep alone, entered by its owner alone."""
    with claimed(path, WHAT, {REQUEST}):
        yield Folder(path)
