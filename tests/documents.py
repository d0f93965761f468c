"""Documentation pages taken apart: code blocks, command lines, links, and how to run them.

```python blocks run in one namespace per page. In ```console blocks every `$ residuum ...` runs in this
process; its exit code must be 0, or what a following `$ echo $?` shows; lines of output that are shown must
appear in the output, numbers and spacing apart. A block below `<!-- not run: reason -->` is not executed.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from residuum.auditing import plan
from residuum.cli.main import main

ATTACK_SECONDS = 3.0  # reference seconds of all attacks of an audit
ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block; line: where it begins; reason: why it is not run, "" when it is."""

    language: str
    text: str
    line: int
    reason: str


def blocks(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    return [
        Block(m["language"], m["text"], source[: m.start("text")].count("\n"), m["reason"] or "")
        for m in FENCE.finditer(source)
    ]


def prose(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[str]:
    return LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """Anchors of headings, as mkdocs and others make them of plain words."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title).strip().lower() for title in titles]
    return {re.sub(r"[\s-]+", "-", title) for title in plain}


def command_lines(block: Block) -> list[list[str]]:
    """Arguments of every `residuum ...` line, with or without a prompt; comments are dropped."""
    text = block.text.replace("\\\n", " ")
    lines = re.findall(r"^\s*(?:\$ )?residuum +(.+)$", text, re.MULTILINE)
    return [shlex.split(re.sub(r" \|\|? .*", "", line), comments=True) for line in lines]


def ignore_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every effort plan a few seconds of attacks, so that audits in pages and examples are quick."""
    short = {
        name: effort._replace(attack_seconds=min(effort.attack_seconds, ATTACK_SECONDS))
        for name, effort in plan.EFFORTS.items()
    }
    monkeypatch.setattr(plan, "EFFORTS", short)


def run_python(page: Path, block: Block, namespace: dict[str, Any]) -> None:
    """Run at its own line numbers, so that a trace points into the page."""
    code = compile("\n" * block.line + block.text, str(page), "exec")
    exec(code, namespace)


def run_console(page: Path, block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the commands of a transcript and compare what is shown."""
    steps = re.split(r"^\$ ", block.text.replace("\\\n", " "), flags=re.MULTILINE)
    assert not steps[0].strip(), f"{page.name}:{block.line}: a transcript begins with a command"
    code, judged = 0, True
    for step in steps[1:]:
        line, _, printed = step.partition("\n")
        if line.strip() == "echo $?":
            assert code == int(printed), f"{page.name}:{block.line}: exit code {code}"
            judged = True
            continue
        assert judged, f"{page.name}:{block.line}: exit code {code} is not shown"
        program, *arguments = shlex.split(line, comments=True)
        assert program == "residuum", f"{page.name}:{block.line}: {program} is not run by the tests"
        code = main(arguments)
        judged = code == 0
        captured = capsys.readouterr()
        for line_expected in printed.splitlines():
            if line_expected.strip() not in ("", "..."):
                assert _bare(line_expected) in _bare(captured.out + captured.err), (
                    f"{page.name}: {line_expected}"
                )
    assert judged, f"{page.name}:{block.line}: exit code {code} is not shown"


def _bare(text: str) -> str:
    """Words alone: figures differ between machines, and with them the width of columns."""
    return re.sub(r"[\s━─]+", "", NUMBER.sub("#", text))
