"""``config.toml``: everything that was asked for, and the batches that repeat it exactly."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from residuum.errors import InputError, OutputError

MAX_BYTES = 1 << 20
Positive = Annotated[int, Field(ge=1, le=10**9)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]


class BatchSettings(BaseModel):
    """One batch of restarts; see ``budget.Batch``."""

    model_config = ConfigDict(extra="forbid")
    attack: str
    restarts: Positive
    steps: Positive
    seed: Seed


class AuditSettings(BaseModel):
    """The options of ``residuum audit`` under their names; paths are relative to the file.

    knowledge: a file with all that is granted, in place of shape, value_range and so on; batches:
    what to run in place of a budget; sha256: of the files that were read, refused when they differ.
    """

    model_config = ConfigDict(extra="forbid")
    checkpoint: str | None = None
    data: str | None = None
    holdout: str | None = None
    arch: str | None = None
    task: str | None = None
    preset: str | None = None
    budget: str | float | None = None
    steps: Positive | None = None
    seed: Seed | None = None
    subsets: Annotated[int, Field(ge=200, le=100_000)] | None = None
    device: str | None = None
    baselines: bool | None = None
    knowledge: str | None = None
    shape: str | None = None
    value_range: str | None = None
    mean: str | None = None
    sample_count: Positive | None = None
    label_balance: str | None = None
    init: str | None = None
    loss: str | None = None
    weight_decay: float | None = None
    sha256: dict[str, str] = Field(default_factory=dict)
    batches: Annotated[list[BatchSettings], Field(max_length=10_000)] = Field(default_factory=list)


def read_settings(path: Path) -> AuditSettings:
    """The settings in a TOML file, checked; file names in it are made relative to its folder."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"A configuration file has at most {MAX_BYTES} bytes.", "Shorten it.")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        found = AuditSettings.model_validate(values)
    except (OSError, ValueError, RecursionError) as problem:
        raise InputError(
            f"{str(path)!r} must be a configuration of residuum audit; reading it failed "
            f"({_reason(problem)}).",
            "Take config.toml of a finished run as a pattern.",
        ) from problem
    names = ("checkpoint", "data", "holdout", "knowledge", "mean", "init")
    placed = {name: _beside(path, getattr(found, name)) for name in names}
    return found.model_copy(update=placed)


def write_toml(values: dict[str, Any], comments: tuple[str, ...] = ()) -> str:
    """TOML of strings, numbers, truth values, one level of tables, and lists of tables."""
    lines = [f"# {' '.join(line.split())}" for line in comments]
    tables: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, dict):
            tables += ["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in value.items())]
        elif isinstance(value, list):
            for row in value:
                tables += ["", f"[[{name}]]", *(f"{k} = {_toml(v)}" for k, v in row.items())]
        else:
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _beside(path: Path, name: str | None) -> str | None:
    """A file beside the configuration where there is one of that name; anything else as it is."""
    if name is None or Path(name).is_absolute():
        return name
    beside = path.parent / name
    return str(beside) if beside.exists() else name


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _text(str(value)) if isinstance(value, str | Path) else repr(value)


def _text(text: str) -> str:
    """A basic string: quotes, backslashes and control characters escaped."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise OutputError(
            f"Names in a configuration must be Unicode text; {text!r} is not.", "Rename the file."
        ) from problem
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    plain = (c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped)
    return f'"{"".join(plain)}"'


def _reason(problem: Exception) -> str:
    if isinstance(problem, ValidationError):
        first = problem.errors()[0]
        return f"{'.'.join(map(str, first['loc']))[:60]}: {first['msg']}"
    return str(problem).splitlines()[0][:120] if str(problem) else type(problem).__name__
