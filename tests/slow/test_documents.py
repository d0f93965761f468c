"""The reader of documentation pages notices what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import Block, anchors, blocks, command_lines, links, run_console, run_python

PAGE = """# A page, with *two* words

[here](#a-page-with-two-words) ![picture](a.png)

```python
x = 1
```

<!-- not run: needs data of the reader -->
```python
import nothing
```

```sh
residuum audit m.pt --out a \\
    --quiet || [ $? -eq 3 ]   # a comment
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    return path


def test_a_page_is_taken_apart(page: Path) -> None:
    first, second, third = blocks(page)
    assert (first.language, first.text, first.line, first.reason) == ("python", "x = 1\n", 5, "")
    assert second.reason == "needs data of the reader"
    assert command_lines(third) == [["audit", "m.pt", "--out", "a", "--quiet"]]
    assert links(page) == ["#a-page-with-two-words", "a.png"]
    assert anchors(page) == {"a-page-with-two-words"}


def test_a_failing_block_points_at_its_line(page: Path) -> None:
    with pytest.raises(ZeroDivisionError) as problem:
        run_python(page, Block("python", "1 / 0\n", 5, ""), {})
    assert problem.traceback[-1].lineno == 5  # counted from 0: the sixth line of the page


@pytest.mark.parametrize(
    "text",
    [
        "$ residuum --version\nwords that it does not print\n",
        "$ residuum scan missing.pt\n",
        "$ residuum scan missing.pt\n$ echo $?\n1\n",
        "$ residuum scan missing.pt\n$ residuum --version\n",
        "$ rm -r runs\n",
        "residuum --version\n",
    ],
    ids=[
        "output",
        "code not shown",
        "other code",
        "code not shown before the next",
        "other program",
        "no prompt",
    ],
)
def test_wrong_transcripts_are_noticed(
    text: str, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        run_console(page, Block("console", text, 1, ""), capsys)


def test_figures_and_widths_of_columns_may_differ(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "$ residuum --version\n99.9.9\n$ residuum scan missing.pt\n$ echo $?\n2\n"
    run_console(page, Block("console", text, 1, ""), capsys)
