"""What mkdocs does beside its defaults: links to files of the repository, listings, pages still to come."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

from residuum.settings import AttackConfig, Setting, Settings, TrainingConfig, settings_of

CONFIGS: dict[str, type[Settings]] = {"attack": AttackConfig, "training": TrainingConfig}

PRODUCT = re.compile(r"<(?=[\w']+, )")  # <nu, x>: an inner product, and no tag in any other reader
CODE = re.compile(r"(^```.*?^```$|^ {4}.*?$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
LISTING = re.compile(r"^# listing: (\S+)$", re.MULTILINE)
TABLES = re.compile(r"^# settings: (\w+)$", re.MULTILINE)
SCHEMAS = "../src/residuum/schemas/"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Leave pages without a file out of the navigation; a file without an entry is a warning."""
    folder = Path(config["docs_dir"])
    config["nav"] = _present(config["nav"], folder)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the JSON Schemas of the package to the site."""
    from mkdocs.structure.files import File

    for path in sorted((Path(config["docs_dir"]) / SCHEMAS).glob("*.json")):
        files.append(File.generated(config, f"schemas/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links that leave ``docs/`` into text, since the site does not hold those files.

    The site holds the JSON Schemas, so a link to one of them leads to the copy. A link to nothing stays as
    it is, for mkdocs to refuse it. Inner products outside code are kept.
    A line `# listing: path` becomes the file at that path of the repository, `# settings: attack` the
    tables of an attack's settings.
    """
    folder = Path(config["docs_dir"]) / Path(page.file.src_path).parent

    def text(link: re.Match[str]) -> str:
        if link[2].startswith(SCHEMAS):
            return f"[{link[1]}](schemas/{link[2].removeprefix(SCHEMAS)})"
        target = folder / link[2].partition("#")[0]
        return link[1] if target.exists() else link[0]

    parts = CODE.split(LINK.sub(text, markdown))  # prose and code in turn
    parts[::2] = [PRODUCT.sub("&lt;", prose) for prose in parts[::2]]
    root = Path(config["config_file_path"]).parent
    whole = LISTING.sub(lambda line: (root / line[1]).read_text("utf-8"), "".join(parts))
    return TABLES.sub(lambda line: settings_tables(CONFIGS[line[1]]), whole)


def settings_tables(config: type[Settings]) -> str:
    """A heading and a table for a configuration and for every group inside it."""
    known, found = settings_of(config), []
    inside = [f.default for f in dataclasses.fields(config) if isinstance(f.default, Settings)]
    for group in (config(), *inside):
        own = [known[n] for n, one in settings_of(type(group)).items() if len(one.path) == 1]
        rows = [f"| `{one.name}` | {_said(one)} | {_takes(one)} | {one.rule.help} |" for one in own]
        title = f"## {type(group).__name__}\n\n{type(group).__doc__}\n\n"
        found.append(
            title + "| setting | default | takes | |\n|---|---|---|---|\n" + "\n".join(rows)
        )
    return "\n\n".join(found)


def _said(one: Setting) -> str:
    return "" if one.default in (None, "", math.inf) else f"`{one.default}`"


def _takes(one: Setting) -> str:
    """Choices or bounds, and the option where it has one."""
    words = ", ".join(f"`{word}`" for word in one.rule.choices if word) or one.bounds_in_words
    option = f"`--{one.name.replace('_', '-')}` " if one.rule.place else ""
    return f"{option}{words}"


def _present(entries: list[Any], folder: Path) -> list[Any]:
    kept: list[Any] = []
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: _present(target, folder)})
        elif (folder / target).is_file():
            kept.append(entry)
    return kept
