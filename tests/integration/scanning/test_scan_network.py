"""The network section of a scan: what it measures, and when it is left out."""

from __future__ import annotations

import json
import pickle
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import residuum as rs
from residuum.cli.main import main
from residuum.surfaces.inspection import inspect_network
from tests import estimators, schemas
from tests.program import Capture, printed


class Runs:
    """An object that runs a function as soon as it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1",)


def network(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def saved(path: Path, *sizes: int) -> Path:
    torch.save(network(*sizes).state_dict(), path)
    return path


def test_a_scan_measures_the_network_in_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", 4, 6, 2)
    (file,) = rs.scan(path).files
    assert file.network_reason == ""
    assert file.network is not None
    expected = inspect_network(rs.load_checkpoint(path))
    assert rs.same(file.network, expected)
    assert (file.network.arch, file.network.parameters) == ("mlp:4-6-2,bias=all", 44)
    assert (file.network.inputs, file.network.outputs) == (4, 2)
    assert file.network.assumptions


def test_the_network_follows_the_findings(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "m.pt"
    torch.save({"model": network(4, 6, 2).state_dict(), "data": "/data/a.csv"}, path)
    assert main(["scan", str(path)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    order = ["names of files", "network mlp:4-6-2,bias=all", "inputs: 4, outputs: 2, weights: 44"]
    order += ["not homogeneous", "directions that training left", "above 10%", "assumed: "]
    places = [output.index(words) for words in order]
    assert places == sorted(places)
    assert main(["scan", str(path), "--json"]) == 0
    document = printed(capsys)
    schemas.check("scan", document)
    assert document["files"][0]["network"]["ranks"]["0.1"] >= 1
    assert document["schema_version"] == "2.0"


def test_lines_fit_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["scan", str(saved(tmp_path / "m.pt", 4, 6, 2)), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["scan", str(tmp_path / "m.pt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("/")) <= 80


def test_an_estimator_with_a_network_is_measured(tmp_path: Path) -> None:
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(estimators.fitted()["adam"]))
    (file,) = rs.scan(tmp_path / "m.pkl").files
    assert file.network is not None
    assert file.network.arch.startswith("mlp:")


@pytest.mark.parametrize(
    ("name", "words", "code"),
    [("knn", "residuum has no attack", 1), ("scaler", "residuum has no attack", 0)],
)
def test_a_file_without_a_network_is_scanned_as_before(
    tmp_path: Path, name: str, words: str, code: int, capsys: Capture
) -> None:
    from sklearn.preprocessing import StandardScaler

    fitted = estimators.fitted()["knn"] if name == "knn" else StandardScaler().fit([[0.0], [1.0]])
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(fitted))
    result = rs.scan(tmp_path / "m.pkl")
    assert result.exit_code == code
    assert result.files[0].network is None
    assert words in result.files[0].network_reason
    assert main(["scan", str(tmp_path / "m.pkl")]) == code
    assert "network not measured: " in capsys.readouterr().out


def test_weights_that_fit_no_network_are_no_error(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, 3), "b": torch.ones(5, 7)}, tmp_path / "m.pt")
    result = rs.scan(tmp_path / "m.pt")
    assert result.exit_code == 0
    assert result.files[0].network is None
    assert "these weights hold" in result.files[0].network_reason


def test_no_network_is_read_from_a_file_that_is_not_safe(tmp_path: Path, capsys: Capture) -> None:
    torch.save({"model": network(4, 6, 2).state_dict(), "more": Runs()}, tmp_path / "m.pt")
    result = rs.scan(tmp_path / "m.pt")
    assert result.exit_code == 4
    assert result.files[0].network is None
    assert "not safe to load" in result.files[0].network_reason
    assert main(["scan", str(tmp_path / "m.pt")]) == 4
    assert "network not measured: the file is not safe" in capsys.readouterr().out


def test_exit_codes_do_not_depend_on_the_network(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"model": network(4, 6, 2).state_dict(), "data": "/data/a.csv"}, path)
    assert main(["scan", str(path), "--quiet"]) == 0
    assert main(["scan", str(path), "--quiet", "--fail-on", "paths"]) == 1
    assert main(["scan", str(tmp_path / "gone.pt"), "--quiet"]) == 2


def test_a_large_network_is_not_measured(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", 2500, 2500, 1)
    begun = time.process_time()
    (file,) = rs.scan(path).files
    assert time.process_time() - begun < 2
    assert file.network is None
    assert "at most 5000000 weights, and this file has 6255001" in file.network_reason


def test_optimizer_state_does_not_count_as_weights(tmp_path: Path) -> None:
    model = network(900, 2000, 1)  # 1.8 million weights, 5.4 million with Adam's state
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 900)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "o": optimizer.state_dict()}, tmp_path / "m.pt")
    assert rs.scan(tmp_path / "m.pt").files[0].network is not None


def test_a_folder_is_measured_until_its_weights_are_too_many(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        saved(tmp_path / name, 900, 3000, 1)
    saved(tmp_path / "c.pt", 4, 6, 2)
    files = {file.file: file.network for file in rs.scan(tmp_path).files}
    assert files["a.pt"] is not None
    assert files["b.pt"] is None
    assert files["c.pt"] is not None


def test_sarif_holds_findings_alone(tmp_path: Path) -> None:
    path, log = saved(tmp_path / "m.pt", 4, 6, 2), tmp_path / "scan.sarif"
    assert main(["scan", str(path), "--quiet", "--sarif", str(log)]) == 0
    assert json.loads(log.read_text())["runs"][0]["results"] == []
