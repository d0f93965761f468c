"""A scan is shown in a notebook and printed from Python with the content of the command."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import residuum as rs
from residuum.cli.main import main

NAMES = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "a\u202etxt.exe",
    "a\x1b[31m",
    "x" * 5000,
)


class Elements(HTMLParser):
    """The elements, the attributes and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    names = {name: f"/home/ana/{name}.csv" for name in NAMES}
    torch.save(
        {"model": network.state_dict(), "x_train": torch.rand(9, 3), **names}, tmp_path / "a.pt"
    )
    torch.save(network.state_dict(), tmp_path / "<b onclick=alert(1)>.pt")
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    return tmp_path


def test_show_prints_what_the_command_prints(folder: Path, capsys: Any) -> None:
    main(["scan", str(folder)])
    printed = capsys.readouterr().out
    rs.scan(folder).show()
    assert capsys.readouterr().out == printed
    assert "stored: an array named x_train" in printed


def test_a_notebook_shows_every_finding(folder: Path, capsys: Any) -> None:
    result = rs.scan(folder)
    text = " ".join(Elements(result._repr_html_()).text.split())
    for finding in result.findings:
        for value in (finding.severity, finding.remedy, finding.what):
            assert " ".join(value.split()) in text
    assert "severity file place what why what to do" in text
    result.show()
    lines = capsys.readouterr().out
    for sentence in ("inputs: 3, outputs: 1", "not read: broken.pt", "exit code 1:"):
        assert sentence in " ".join(lines.split())
        assert sentence in text


def test_names_from_a_file_are_only_text(folder: Path) -> None:
    page = rs.scan(folder)._repr_html_()
    elements = Elements(page)
    assert set(elements.tags) <= {
        *("div", "table", "thead", "tbody", "tr", "th", "td", "bdi", "caption")
    }
    assert elements.attributes <= {"style", "scope"}
    assert not elements.open
    assert "<b onclick=alert(1)>.pt" in elements.text
    assert all(letter.isprintable() or letter == "\n" for letter in unescape(page))
    assert not re.search(r"https?:|url\(|background|[^-]color:", page)  # light and dark, no network
    assert len(page) < 20_000


def test_a_notebook_shows_an_exposure(capsys: Any) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    x = torch.rand(12, 3, generator=torch.Generator().manual_seed(0))
    groups = ["<b>north</b>", "south"] * 6
    result = rs.exposure(
        network, (x, torch.arange(12) % 2), groups=groups, grouped_by="site", top=4
    )
    elements = Elements(result._repr_html_())
    assert "b" not in elements.tags
    assert elements.tags.count("table") == 2
    result.show()
    printed = " ".join(capsys.readouterr().out.split())
    text = " ".join(elements.text.split())
    assert "<b>north</b>" in text
    for line in result.lines:
        assert " ".join(line.split()) in text
        assert " ".join(line.split()) in printed
    for row in result.rows(4):
        assert f" {row['index']} {row['group']} " in text
