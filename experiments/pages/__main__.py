"""Write every page that has a table or a number of a result file: ``python -m experiments.pages``."""

from __future__ import annotations

from pathlib import Path

import experiments.pages
from experiments.pages.filling import filled
from experiments.programs import parse_paths

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Write the pages whose text changes."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"written: {page.name}")


if __name__ == "__main__":
    parse_paths(experiments.pages.__doc__)
    main()
