"""Which files a path on the command line names: a file, or a directory of ``residuum train``."""

from __future__ import annotations

from pathlib import Path


def weights_file(path: Path) -> Path:
    """The file of weights."""
    from residuum.checkpoints.reading import RUN_FILE

    return path / RUN_FILE if path.is_dir() else path


def weights_hash(path: Path) -> str:
    """What tells two checkpoints apart."""
    from residuum.records.environment import sha256

    return sha256(weights_file(path))


def samples_file(path: Path, name: str) -> Path:
    """An .npz, or ``private/name`` in a training directory."""
    from residuum.errors import DataError

    if not path.is_dir():
        return path
    if not (path / "private" / name).is_file():
        raise DataError(
            f"A training directory must hold private/{name}; {str(path)!r} does not.",
            "Name an .npz with x and y.",
        )
    return path / "private" / name


def own_data(checkpoint: Path, given: Path | None = None) -> Path:
    """The samples ``given``, or else those that a training directory was trained on."""
    from residuum.errors import DataError

    if given is not None:
        return samples_file(given, "train.npz")
    own = checkpoint / "private" / "train.npz"
    if not own.is_file():
        raise DataError(
            f"A certificate needs the samples; {str(checkpoint)!r} has no private/train.npz.",
            "Say --data FILE.npz.",
        )
    return own
