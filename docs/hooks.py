"""What mkdocs does beside its defaults: links to files of the repository, listings, pages still to come."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PRODUCT = re.compile(r"<(?=[\w']+, )")  # <nu, x>: an inner product, and no tag in any other reader
CODE = re.compile(r"(^```.*?^```$|^ {4}.*?$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
LISTING = re.compile(r"^# listing: (\S+)$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Leave pages without a file out of the navigation; a file without an entry is a warning."""
    folder = Path(config["docs_dir"])
    config["nav"] = _present(config["nav"], folder)
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links that leave ``docs/`` into text, since the site does not hold those files.

    A link to nothing stays as it is, for mkdocs to refuse it. Inner products outside code are kept.
    A line `# listing: path` becomes the file at that path of the repository.
    """
    folder = Path(config["docs_dir"]) / Path(page.file.src_path).parent

    def text(link: re.Match[str]) -> str:
        target = folder / link[2].partition("#")[0]
        return link[1] if target.exists() else link[0]

    parts = CODE.split(LINK.sub(text, markdown))  # prose and code in turn
    parts[::2] = [PRODUCT.sub("&lt;", prose) for prose in parts[::2]]
    root = Path(config["config_file_path"]).parent
    return LISTING.sub(lambda line: (root / line[1]).read_text("utf-8"), "".join(parts))


def _present(entries: list[Any], folder: Path) -> list[Any]:
    kept: list[Any] = []
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: _present(target, folder)})
        elif (folder / target).is_file():
            kept.append(entry)
    return kept
