"""Read and write ``config.toml`` of an audit: its settings, its input files, and hashes of these files.

``residuum audit --config config.toml`` runs the same audit again. The settings are the fields of
:class:`~residuum.auditing.request.AuditRequest`. File names are relative to the folder of the configuration.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field

from residuum.auditing.request import AuditRequest
from residuum.errors import InputError, OutputError

MAX_BYTES = 1 << 20  # largest size of a configuration file, far more than its fields need
INPUTS = ("checkpoint", "data", "holdout", "base", "adapter", "tokenizer", "knowledge")
FACTS = (
    *("shape", "value_range", "mean", "mean_provenance", "sample_count", "label_balance"),
    *("init", "loss", "weight_decay", "columns", "column_ranges"),
)
# Facts about the training whose value in a configuration may be the name of a file.
FILE_FACTS = ("mean", "init")


class AuditConfig(AuditRequest):
    """A configuration file of an audit: its settings and the names of its input files.

    ``knowledge`` names a file with everything that the attacker knows. If ``knowledge`` is set, fields for
    single facts, such as ``mean``, must not be set. ``sha256`` holds the hashes of checkpoint, data and
    holdout. If the hash of a file differs, an error is raised.
    """

    checkpoint: str | None = None
    data: str | None = None
    holdout: str | None = None
    base: str | None = None
    adapter: str | None = None
    tokenizer: str | None = None
    knowledge: str | None = None
    shape: str | None = None
    value_range: str | None = None
    mean: str | float | None = None
    mean_provenance: str | None = None
    sample_count: int | None = Field(default=None, ge=1, le=10**9)
    label_balance: str | None = None
    init: str | None = None
    loss: str | None = None
    weight_decay: float | None = None
    columns: str | None = None
    column_ranges: str | None = None
    sha256: dict[str, str] = Field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as keyword arguments of ``rs.audit``."""
        return self.model_dump(exclude_defaults=True, include=set(AuditRequest.model_fields))

    def knowledge_or_facts(self) -> str | dict[str, Any]:
        """Return the path of the file with the attacker's knowledge, or the known facts without such a file.

        The knowledge file holds everything that the attacker knows.

        Raises:
            InputError: If the configuration has a knowledge file and also single facts.
        """
        fact_values = {name: getattr(self, name) for name in FACTS}
        single_facts = {name: value for name, value in fact_values.items() if value is not None}
        if self.knowledge is None:
            return single_facts
        if single_facts:
            raise InputError(
                "If a file with the attacker's knowledge is passed, single facts about the training must "
                "not be passed as well; got a file and the facts "
                f"{', '.join(single_facts)}.",
                "Remove the file (--knowledge, or the line 'knowledge' of the configuration) or the "
                "single facts.",
            )
        return self.knowledge


def read_config(path: str | Path) -> AuditConfig:
    """Read a configuration.

    Args:
        path: The TOML file.

    Returns:
        The configuration. Its file names are converted to be relative to the working folder.

    Raises:
        InputError: If the file is no configuration of an audit.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(
                f"A configuration file must have at most {MAX_BYTES} bytes.", "Shorten the file."
            )
        config = AuditConfig.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, InputError) as problem:
        raise InputError(
            f"The file {str(path)!r} must be a configuration of residuum audit; reading the file failed "
            f"({_reason(problem)}).",
            "Start from the file config.toml in the folder of a finished audit.",
        ) from problem
    file_fields = (*INPUTS, *FILE_FACTS)
    return config.model_copy(
        update={name: _next_to(path, getattr(config, name)) for name in file_fields}
    )


def write_config(values: dict[str, Any], needs_code: bool) -> str:
    """Return the text of a configuration.

    Args:
        values: Settings, input files and hashes. Values that are None are left out, because TOML has no
            such value.
        needs_code: Whether the audit runs code of the user.

    Returns:
        TOML text, whose first line is the command that repeats the audit.

    Raises:
        OutputError: If a file name is not valid text.
    """
    set_values = {name: value for name, value in values.items() if value is not None}
    first_line = "# Repeats this audit: residuum audit --config config.toml --out ANOTHER_RUN"
    first_line += " --trust-code" if needs_code else ""
    toml_text = f"{first_line}\n{tomli_w.dumps(set_values)}"
    try:
        toml_text.encode()
    except UnicodeEncodeError as problem:
        invalid_line = toml_text[: problem.end].splitlines()[-1]
        raise OutputError(
            f"File names in a configuration must be valid Unicode text; {invalid_line!r} is not.",
            "Rename the file.",
        ) from problem
    return toml_text


def _next_to(path: Path, name: Any) -> Any:
    """Return the path of a file relative to the folder of the configuration, if this file exists.

    Otherwise the value is returned unchanged.
    """
    if not isinstance(name, str) or Path(name).is_absolute():
        return name
    path_next_to_config = path.parent / name
    return str(path_next_to_config) if path_next_to_config.exists() else name


def _reason(problem: Exception) -> str:
    if isinstance(problem, InputError):
        return problem.message.rstrip(".")
    return str(problem).splitlines()[0][:120] if str(problem) else type(problem).__name__
