"""Results of the papers at paper scale: what their files say of themselves, and what the page shows."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from experiments.pages import papers as tables_of_papers
from papers.figures import FIGURES
from papers.shen2026 import CASES
from tests.documents import ROOT

FILES = sorted((ROOT / "experiments" / "results" / "papers").glob("*.json"))
PICTURES = sorted((ROOT / "docs" / "figures" / "papers").glob("*.png"))
PAGE = ROOT / "docs" / "papers.md"


def results() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}


def test_a_result_says_what_was_run() -> None:
    for path in FILES:
        result = json.loads(path.read_text(encoding="utf-8"))
        assert result["id"] in FIGURES
        stem = result["id"].replace(":", "-")
        assert path.stem == (f"{stem}-seed{result['seed']}" if result["seed"] else stem)
        assert result["title"] == FIGURES[result["id"]].title
        assert result["scale"] == "paper"
        assert result["device"] in ("cuda", "cpu")
        assert result["seconds"] > 0
        assert {"torch", "numpy"} <= result["environment"]["packages"].keys()
        assert result["details"]
        assert {row["what"] for row in result["rows"]} >= result["measured"].keys() > set()
        assert path.stat().st_size < 40_000


def test_what_was_not_run_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    stated = re.search("Not run at this scale: ([^\n]+)", text)
    missing = {*re.findall(r"`(\w+:[\w-]+)`", stated[1])} if stated else set()
    here = {result["id"] for result in results().values()}
    stored_files = (ROOT / "experiments" / "results").glob("uniqueness-*.json")
    elsewhere = {path.stem.replace("-", ":") for path in stored_files} - here
    elsewhere |= {"shen2026:growth-ntk", "shen2026:growth-kkt"}  # growth-*.json
    # Figures that draw, in another way, cases which the file of another figure has.
    cases_run = [{*result["details"].get("cases", {})} for result in results().values()]
    runs_asked = {
        f"shen2026:{name}": {run.name for run in runs} for name, (*_, runs) in CASES.items()
    }
    elsewhere |= {
        name for name, runs in runs_asked.items() if any(runs <= cases for cases in cases_run)
    } - here
    assert {*FIGURES} == here | missing | elsewhere
    assert len(FIGURES) == len(here) + len(missing) + len(elsewhere)


def test_every_published_picture_is_shown_and_small() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert {*re.findall(r"\]\(figures/papers/([\w-]+\.png)\)", text)} == {p.name for p in PICTURES}
    assert sum(path.stat().st_size for path in PICTURES) < 3_000_000


def test_a_figure_without_a_file_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A published accuracy alone is no measurement."""
    table_text, victims = tables_of_papers.paper_training(), tables_of_papers.victims

    def without(*missing: str) -> Any:
        return lambda figure: [] if figure in missing else victims(figure)

    monkeypatch.setattr(tables_of_papers, "victims", without("haim2022-fig19", "haim2022-fig4"))
    assert tables_of_papers.accuracies("haim2022-fig19", "SGD batch 50", "haim2022-table2") == ""
    lines_left = [line for line in table_text.splitlines() if "SGD batch 50" not in line]
    assert len(lines_left) == len(table_text.splitlines()) - 1
    assert tables_of_papers.paper_training().splitlines() == lines_left
    assert len(tables_of_papers.paper_who().splitlines()) == 2  # head and dashes
