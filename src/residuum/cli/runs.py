"""The directory of an attack: opened for one run alone, written atomically, taken up again.

``attack.json`` is written last and marks a run as complete; ``attack_state.safetensors`` is there
while one can be continued.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residuum.errors import InputError, OutputError

if TYPE_CHECKING:
    from residuum.attacks import AttackConfig
    from residuum.records import Checkpoint, Knowledge, Reconstruction

SUMMARY = "attack.json"
STATE = "attack_state.safetensors"
RECONSTRUCTION = "reconstruction.safetensors"
IGNORE = ".gitignore"


@contextmanager
def open_run(out: Path) -> Iterator[None]:
    """A folder that only its owner may enter; a new one goes again if nothing was kept in it."""
    from residuum.records import make_directory, write_atomic

    content = _names(out)
    if content - {IGNORE} and not content & {SUMMARY, STATE, RECONSTRUCTION}:
        raise OutputError(
            f"--out must be a new or empty folder, or one of an attack; {str(out)!r} holds other files.",
            "Choose another folder with --out.",
        )
    fresh = not out.exists()
    make_directory(out)
    with suppress(OSError):  # a folder of somebody else's: writing decides
        out.chmod(0o700)
    write_atomic(out / IGNORE, "*\n")
    try:
        yield
    finally:
        if fresh and _names(out) == {IGNORE}:
            (out / IGNORE).unlink()
            out.rmdir()


def request_of(path: Path, released: Checkpoint, config: AttackConfig) -> dict[str, Any]:
    """All that was asked for, but the wall clock: what decides whether two attacks are the same."""
    from residuum.checkpoints.reading import RUN_FILE
    from residuum.records.environment import sha256

    settings = {name: value for name, value in config.to_json().items() if name != "seconds"}
    file = path / RUN_FILE if path.is_dir() else path
    return {"settings": settings, "arch": released.arch, "checkpoint_sha256": sha256(file)}


def finished(out: Path, request: dict[str, Any], knowledge: Knowledge) -> Reconstruction | None:
    """The complete run in this folder, None when there is work left; another attack is refused."""
    from residuum.records import same

    if not (out / SUMMARY).is_file():
        return None
    found = load_run(out)
    if read_summary(out).get("request") != request or not same(found.knowledge, knowledge):
        raise InputError(
            f"{str(out)!r} holds an attack with other settings or on other weights.",
            "Choose another --out, or remove that folder.",
        )
    return None if "time" in found.status and (out / STATE).is_file() else found


def load_run(out: Path) -> Reconstruction:
    """The reconstruction in an attack's folder."""
    from residuum.records import Reconstruction

    if not (out / RECONSTRUCTION).is_file():
        raise InputError(
            f"An attack's folder must hold {RECONSTRUCTION}; {str(out)!r} does not.",
            "Write one with residuum attack CKPT --out RUN.",
        )
    return Reconstruction.load(out / RECONSTRUCTION)


def read_summary(out: Path) -> dict[str, Any]:
    """What ``attack.json`` says; empty where it is missing or damaged."""
    try:
        found = json.loads((out / SUMMARY).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_run(out: Path, found: Reconstruction, request: dict[str, Any], preset: str) -> None:
    """Write everything, the summary last; the state stays only where time ran out."""
    from residuum.records import write_atomic, write_json
    from residuum.records.environment import environment, sha256
    from residuum.report import loss_figure, selected_figure
    from residuum.report.family import family_figure

    found.save(out / RECONSTRUCTION)
    for name, figure in (
        ("selected.png", selected_figure(found)),
        ("loss.png", loss_figure(found)),
        ("family.png", family_figure(found)),
    ):
        if figure is not None:
            write_atomic(out / name, figure)
    summary = {
        **found.to_json(),
        "preset": preset,
        "request": request,
        "sha256": {RECONSTRUCTION: sha256(out / RECONSTRUCTION)},
        "environment": environment(found.settings["device"]),
    }
    write_json(out / SUMMARY, summary)
    if "time" not in found.status:
        (out / STATE).unlink(missing_ok=True)


def _names(folder: Path) -> set[str]:
    """Files of a folder, less what an interrupted write may have left."""
    from residuum.records import make_directory

    if not folder.exists():
        return set()
    if not folder.is_dir():
        make_directory(folder)  # says why not
    names = {path.name for path in folder.iterdir()}
    return {name for name in names if not name.startswith((f".{RECONSTRUCTION}", f".{STATE}"))}
