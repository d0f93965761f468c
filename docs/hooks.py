"""What mkdocs does besides its defaults: links to files of the repository, listings, tables of settings."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from residuum.settings import MODELS, Settings, TrainingConfig, bounds_in_words, choices_of

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
    A line `# listing: path` becomes the file at that path of the repository. `# settings: attack` becomes
    the tables of the settings of all attacks, `# settings: training` those of a training run.

    Args:
        markdown: Text of the page.
        page: The page.
        config: Configuration of the site.
        files: All files of the site.

    Returns:
        The changed text.
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
    return TABLES.sub(lambda line: settings_tables(*MODELS_OF[line[1]]), whole)


def settings_tables(*models: type[Settings]) -> str:
    """Return a heading and a table for each model, with the settings that it adds to its base."""
    tables = []
    for model in models:
        base = model.__mro__[1]
        names = [name for name in model.model_fields if name in model.__annotations__]
        rows = [_row(name, model.model_fields[name]) for name in names]
        attacks = ", ".join(f"`{name}`" for name, kind in MODELS.items() if kind is model)
        text = [model.__doc__ or ""]
        text += [f"It has all settings of `{base.__name__}`, too."] if base is not Settings else []
        text += [f"Attacks with these settings and no others: {attacks}."] if attacks else []
        head = "| setting | default | takes | |\n|---|---|---|---|"
        tables.append("\n".join([f"## {model.__name__}\n", " ".join(text), "", head, *rows]))
    return "\n\n".join(tables)


def attack_models() -> list[type[Settings]]:
    """Return the models of all attacks and their bases, bases first."""
    found = [kind for model in MODELS.values() for kind in reversed(model.__mro__)]
    models = [kind for kind in found if issubclass(kind, Settings) and kind is not Settings]
    return list(dict.fromkeys(models))


def _row(name: str, field: FieldInfo) -> str:
    default = "" if field.default in (None, "", math.inf) else f"`{field.default}`"
    choices = ", ".join(f"`{choice}`" for choice in choices_of(field) if choice)
    values = choices or bounds_in_words(field)
    option = f"`--{name.replace('_', '-')}` {values}".strip()
    return f"| `{name}` | {default} | {option} | {field.description} |"


MODELS_OF = {"attack": attack_models(), "training": [TrainingConfig]}


def _present(entries: list[Any], folder: Path) -> list[Any]:
    kept: list[Any] = []
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: _present(target, folder)})
        elif (folder / target).is_file():
            kept.append(entry)
    return kept
