"""Draw the seeds of a claim from the entropy of the system, after its settings are committed."""

from __future__ import annotations

import secrets
import subprocess
from pathlib import Path

from residuum.errors import InputError
from residuum.records import write_json


def draw_seeds(path: Path, **counts: dict[str, int]) -> None:
    """Draw seeds once and write them to a file, together with the commit of the settings.

    Args:
        path: File of the seeds. It must not exist.
        **counts: For each part of the file, the number of seeds by name.

    Raises:
        InputError: If the file exists, or if the working tree has changes that are not committed.
    """
    if path.exists():
        raise InputError(f"{path.name} exists: seeds are drawn once.", "Run with these seeds.")
    if _git("status", "--porcelain"):
        raise InputError("Settings must be committed before seeds are drawn.", "Commit first.")
    seeds = {
        section: {name: [secrets.randbelow(2**31) for _ in range(k)] for name, k in names.items()}
        for section, names in counts.items()
    }
    write_json(path, {"commit": _git("rev-parse", "HEAD"), **seeds})


def _git(*words: str) -> str:
    done = subprocess.run(("git", *words), capture_output=True, text=True, check=True)
    return done.stdout.strip()
