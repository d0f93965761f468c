"""The directory of an attack: entered by its owner alone, written atomically, taken up again.

``attack.json`` is written last and marks a run as complete; ``attack_state.safetensors`` is there
while one can be continued.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residuum.cli.paths import weights_hash
from residuum.errors import InputError

if TYPE_CHECKING:
    from residuum.attacks import AttackConfig
    from residuum.records import Checkpoint, Knowledge, Reconstruction

WHAT = "an attack"
SUMMARY = "attack.json"
STATE = "attack_state.safetensors"
RECONSTRUCTION = "reconstruction.safetensors"


@contextmanager
def open_run(out: Path) -> Iterator[None]:
    """A folder that only its owner may enter; a new one goes again if nothing was kept in it."""
    from residuum.records.folders import claimed

    with claimed(out, WHAT, {SUMMARY, STATE, RECONSTRUCTION}):
        yield


def request_of(path: Path, released: Checkpoint, config: AttackConfig) -> dict[str, Any]:
    """All that was asked for, but the wall clock: what decides whether two attacks are the same."""
    settings = {name: value for name, value in config.to_json().items() if name != "seconds"}
    return {
        "settings": settings, "arch": released.arch, "checkpoint_sha256": weights_hash(path)
    }  # fmt: skip


def finished(out: Path, request: dict[str, Any], knowledge: Knowledge) -> Reconstruction | None:
    """The complete run in this folder, None when there is work left; another attack is refused."""
    from residuum.records import same
    from residuum.records.folders import another

    if not (out / SUMMARY).is_file():
        return None
    found = load_run(out)
    if read_summary(out).get("request") != request or not same(found.knowledge, knowledge):
        raise another(out, WHAT, "settings or on other weights")
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
    from residuum.records import read_json

    return read_json(out / SUMMARY)


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
