"""Write the command line that repeats an audit, from the settings of the audit and the attacker's knowledge.

Reports print such commands as next steps. A command gives the attacker the same knowledge as the audit had,
even if the audit was started from a configuration or from Python.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residuum.auditing.durations import duration, seconds_of
from residuum.auditing.request import AuditRequest
from residuum.io.release_knowledge import remove_stored_knowledge
from residuum.records import Knowledge

if TYPE_CHECKING:
    from residuum.auditing.result import AuditResult

KNOWLEDGE_FILE = "knowledge.safetensors"  # name of the knowledge file in the run directory
OPTION_NAMES = {"model_code": "model"}  # settings whose option has another name


def audit_command(
    result: AuditResult, *, checkpoint: str = "", out: str = "-again", **changes: Any
) -> str:
    """Return the command that runs an audit again with the same settings and the same knowledge.

    Args:
        result: The audit.
        checkpoint: The file to audit. By default the file that was audited.
        out: Text that is appended to the name of the run directory.
        **changes: Settings of the new audit that differ from those of ``result``.

    Returns:
        The command, "" if the audit was not saved or if its inputs were not files.
    """
    path_by_input = result.files
    if not all(path_by_input.get(name) for name in ("checkpoint", "data", "out")):
        return ""
    command_words = ["residuum", "audit", checkpoint or path_by_input["checkpoint"]]
    for name in ("data", "holdout", "base"):
        command_words += [f"--{name}", path_by_input[name]] if path_by_input.get(name) else []
    command_words += knowledge_options(remove_stored_knowledge(result.knowledge), path_by_input)
    command_words += setting_options({**result.settings.get("requested", {}), **changes})
    return shlex.join([*command_words, "--out", f"{path_by_input['out']}{out}"])


def knowledge_options(knowledge: Knowledge, files: dict[str, str]) -> list[str]:
    """Return the command-line options for what the attacker knows in addition to the release.

    If every known fact can be written as an option, each fact becomes an option. If some fact cannot be
    written as an option, such as a mean image, the command reads all facts from the knowledge file in the run
    directory.

    Args:
        knowledge: What the attacker knows, without the facts in the release.
        files: Files of the audit, by name. Initial weights need no option if ``files`` has a "base".

    Returns:
        Names and values of the options, as words of a command line.
    """
    text_by_fact: dict[str, str] = {}
    for name in knowledge.known_names:
        fact_value = getattr(knowledge, name)
        if name == "theta0" and files.get("base"):
            continue
        if name == "mean" and fact_value.numel() == 1:
            text_by_fact["mean"] = repr(float(fact_value))
            text_by_fact["mean_provenance"] = knowledge.provenance["mean"]
        elif name in ("shape", "value_range", "label_balance"):
            text_by_fact[name] = ",".join(f"{number:g}" for number in fact_value)
        elif name in ("sample_count", "loss", "weight_decay", "columns"):
            text_by_fact[name] = str(fact_value)
        else:
            return ["--knowledge", str(Path(files["out"]) / KNOWLEDGE_FILE)]
    return [word for name, text in text_by_fact.items() for word in (_option(name), text)]


def setting_options(settings: dict[str, Any]) -> list[str]:
    """Return the command-line options for the settings that differ from their defaults."""
    option_words: list[str] = []
    for name, field in AuditRequest.model_fields.items():
        setting_value = settings.get(name, field.default)
        if name == "budget":
            option_words += (
                []
                if setting_value is None
                else [_option(name), duration(seconds_of(setting_value))]
            )
        elif name in ("attacks", "drop", "sensitive"):
            for value in setting_value:
                option_words += [
                    _option(name),
                    value if isinstance(value, str) else json.dumps(value),
                ]
        elif setting_value == field.default:
            continue
        elif isinstance(setting_value, bool):
            option_words.append(_option(name if setting_value else f"no_{name}"))
        else:
            option_words += [_option(name), str(setting_value)]
    return [*option_words, "--trust-code"] if settings.get("model_code") else option_words


def _option(name: str) -> str:
    return "--" + OPTION_NAMES.get(name, name).replace("_", "-")
