"""Every notebook from its first cell to its report. Only the attacks are shortened."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest

from residuum.auditing.result import AuditResult
from tests.documents import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
EFFORT = 'effort="quick"'
SHORT = 'effort="quick", steps=40, baselines=False, subsets=200'
FOREST = "forest"
NUMBER = re.compile(r"\d+(?:\.\d*)?")


def test_there_is_one_for_every_kind_of_model() -> None:
    names = {path.stem for path in NOTEBOOKS}
    assert names == {"my_pytorch_class", "fine_tuned", "table", "sklearn_pickle", FOREST}


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.stem != FOREST], ids=lambda path: path.stem
)
def test_a_notebook_leads_to_a_report(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in cells)  # training data does not belong in git
    assert sum(EFFORT in cell for cell in code) == 1
    assert max(len(cell.splitlines()) for cell in code if EFFORT in cell) <= 10
    names: dict[str, object] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's, of a training that is short on purpose
        for cell in code:
            exec(compile(cell.replace(EFFORT, SHORT), path.name, "exec"), names)
    result = names["result"]
    assert isinstance(result, AuditResult)
    assert result.fit is not None
    assert not result.fit.is_doubtful, result.fit.line
    assert result.verdict.headline.upper() in capsys.readouterr().out
    (report,) = tmp_path.glob("runs/*/report.html")
    assert "Next step" in report.read_text("utf-8")


def test_the_notebook_of_forests_has_its_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (path,) = (path for path in NOTEBOOKS if path.stem == FOREST)
    cells = [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in cells:
        exec(compile("".join(cell["source"]), path.name, "exec"), names)
        stored = "".join("".join(output["text"]) for output in cell["outputs"])
        assert words(capsys.readouterr().out) == words(stored)
    leak, result = names["leak"], names["result"]
    assert isinstance(leak, AuditResult)
    assert isinstance(result, AuditResult)
    assert (leak.exit_code, result.exit_code) == (1, 0)
    (report,) = tmp_path.glob("runs/*/report.html")
    assert "Next step" in report.read_text("utf-8")


def words(text: str) -> str:
    """Return a text without its numbers and spaces, which differ between machines."""
    return re.sub(r"\s+", "", NUMBER.sub("#", text))
