"""Records that are stored in the file: an audit reports them, and it needs no attack."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn

import residuum as rs
from residuum.auditing.stored_records import find_records
from residuum.cli.main import main
from residuum.errors import CheckpointError
from residuum.io.release import open_release
from tests.program import printed

N, HELD = 30, 120
Samples = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def samples() -> Samples:
    x = np.random.default_rng(0).normal(size=(N + HELD, 6)).astype(np.float32)
    return x, np.where(x[:, 0] > 0, 1, -1)


@pytest.fixture(scope="module")
def files(
    samples: Samples,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, str]:
    here, (x, y) = tmp_path_factory.mktemp("samples"), samples
    np.savez(here / "train.npz", x=x[:N], y=y[:N])
    np.savez(here / "held.npz", x=x[N:], y=y[N:])
    return str(here / "train.npz"), str(here / "held.npz")


def saved(model: Any, path: Path) -> Path:
    path.write_bytes(pickle.dumps(model))
    return path


MODELS: dict[str, tuple[Any, bool]] = {  # and whether records stand there to the last bit
    "neighbors": (KNeighborsClassifier(3), True),
    "tree": (KNeighborsClassifier(3, algorithm="kd_tree"), True),
    "vectors": (SVC(C=1e-3), True),
    "process": (GaussianProcessRegressor(), True),
    "standard": (make_pipeline(StandardScaler(), KNeighborsClassifier(3)), False),
    "robust": (make_pipeline(RobustScaler(), KNeighborsClassifier(3)), False),
    "twice": (make_pipeline(MinMaxScaler(), MaxAbsScaler(), KNeighborsClassifier(3)), False),
}


@pytest.mark.parametrize("name", MODELS)
def test_records_in_a_pickle_are_the_verdict(
    name: str,
    samples: Samples,
    files: tuple[str, str],
    tmp_path: Path,
) -> None:
    (model, exact), (x, y) = MODELS[name], samples
    path = saved(model.fit(x[:N], y[:N]), tmp_path / "m.pkl")
    result = rs.audit(path, data=files[0], holdout=files[1])
    (row,) = result.attacks
    count = len(model.support_vectors_) if name == "vectors" else N
    assert (result.verdict.outcome, result.exit_code, result.verdict.grade) == (
        "leak",
        1,
        "verbatim",
    )
    assert (row.name, row.status, row.recovered, row.sample_count) == (
        "stored outright",
        "found",
        count,
        N,
    )
    assert (row.expected_by_chance, result.verdict.recovered) == (0.0, count)
    assert row.p_value is not None
    assert row.p_value < 1e-12
    exactly = count if exact else 0
    assert f"{exactly} of {N} training samples are stored there bit for bit" in row.reason
    assert f"0 of {HELD} held-out samples are stored there" in row.reason
    sentence = f"{count} of {N} training samples are stored in the file, 0 expected by chance."
    assert result.verdict.sentence == sentence
    assert result.verdict.answers[0].answer == "yes"
    assert {answer.answer for answer in result.verdict.answers[1:]} == {"unknown"}


def test_sparse_records_are_compared_as_well(
    samples: Samples,
    files: tuple[str, str],
    tmp_path: Path,
) -> None:
    x, y = samples
    for make in (sparse.csr_matrix, sparse.csc_array):
        model = KNeighborsClassifier(3).fit(make(x[:N]), y[:N])
        result = rs.audit(saved(model, tmp_path / "m.pkl"), data=files[0], holdout=files[1])
        assert result.attacks[0].recovered == N
    wrong = model._fit_X
    wrong.indices = wrong.indices + 10**6  # beyond the columns: not read outside of memory
    records = find_records(open_release(saved(model, tmp_path / "m.pkl")))
    assert records is not None
    assert records.arrays[0].records is None


def test_without_samples_the_records_still_decide(samples: Samples, tmp_path: Path) -> None:
    x, y = samples
    result = rs.audit(saved(SVC().fit(x[:N], y[:N]), tmp_path / "m.pkl"))
    assert (result.exit_code, result.verdict.recovered) == (1, None)
    assert result.verdict.sentence.startswith("The file stores 24 records")
    assert result.verdict.headline == "Leak found: 24 stored records"
    assert "no attack is needed" in result.attacks[0].meaning


def test_records_of_others_are_a_leak_that_says_they_are_not_these(
    samples: Samples,
    files: tuple[str, str],
    tmp_path: Path,
) -> None:
    x, y = samples
    path = saved(KNeighborsClassifier(3).fit(x[:N] + 1, y[:N]), tmp_path / "m.pkl")
    result = rs.audit(path, data=files[0], holdout=files[1])
    assert (result.exit_code, result.verdict.recovered) == (1, 0)


@pytest.fixture
def network() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 1)).state_dict()


@pytest.mark.parametrize("is_training_data", [True, False], ids=["these", "others"])
def test_an_array_stored_with_a_network_counts_if_it_contains_samples(
    is_training_data: bool,
    network: dict[str, Tensor],
    samples: Samples,
    files: tuple[str, str],
    tmp_path: Path,
) -> None:
    held = torch.from_numpy(samples[0][:N]) + (0.0 if is_training_data else 1.0)
    torch.save({"model": network, "X_train": held}, tmp_path / "m.pt")
    result = rs.audit(tmp_path / "m.pt", data=files[0], holdout=files[1], effort="quick", steps=5)
    row = result.attacks[0]
    assert (row.name, row.recovered) == ("stored outright", N if is_training_data else 0)
    assert row.is_stored is is_training_data
    assert len(result.attacks) > 1
    assert (result.exit_code == 1) is is_training_data
    assert is_training_data or any(
        reason.startswith("not confirmed: an array") for reason in result.verdict.reasons
    )


def test_a_name_alone_decides_only_what_the_network_could_be_fed_with(
    network: dict[str, Tensor], tmp_path: Path
) -> None:
    for shape, code in (((N, 6), 1), ((3, 1, 1), 3)):
        torch.save({"model": network, "dataset": {"mean": torch.ones(shape)}}, tmp_path / "m.pt")
        result = rs.audit(tmp_path / "m.pt", effort="quick", steps=5)
        assert result.exit_code == code
        assert any("an array named mean" in reason for reason in result.verdict.reasons)
    result = rs.audit(saved({"dataset": {"mean": np.ones((3, 1, 1))}}, tmp_path / "m.pkl"))
    assert result.exit_code == 3  # there is no network to tell
    assert any("not confirmed" in reason for reason in result.verdict.reasons)


def test_damaged_records_are_an_error_that_says_so_or_said_to_be_there(
    network: dict[str, Tensor], tmp_path: Path
) -> None:
    held = torch.full((N, 6), 3.0)
    torch.save({"model": network, "X_train": held}, tmp_path / "m.pt")
    raw, numbers = (tmp_path / "m.pt").read_bytes(), held.numpy().tobytes()
    assert numbers in raw
    (tmp_path / "m.pt").write_bytes(raw.replace(numbers, b"\1" + numbers[1:]))  # no longer its sum
    records = find_records(open_release(tmp_path / "m.pt"))
    assert records is not None
    assert (records.count, records.arrays[0].records) == (N, None)
    block = open_release(tmp_path / "m.pt").content["X_train"]
    with pytest.raises(CheckpointError, match="CRC"):
        block.tensor()


def test_a_parameter_is_no_record_whatever_it_is_called(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dataset = nn.Linear(6, 20)
            self.head = nn.Linear(20, 1)

    torch.save(Named().state_dict(), tmp_path / "m.pt")
    assert rs.audit(tmp_path / "m.pt", effort="quick", steps=5).exit_code == 3
    assert find_records(open_release(tmp_path / "m.pt")) is None  # the weight of a layer


def test_the_command_writes_every_artifact_and_repeats_itself(
    samples: Samples,
    files: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, y = samples
    path = saved(KNeighborsClassifier(3).fit(x[:N], y[:N]), tmp_path / "knn.pkl")
    out = tmp_path / "a"
    arguments = ["audit", str(path), "--data", files[0], "--holdout", files[1], "--out", str(out)]
    assert main([*arguments, "--quiet"]) == 1
    output = json.loads((out / "result.json").read_text())
    assert output["verdict"]["stored"] == f"{N} records"
    assert output["attacks"][0]["name"] == "stored outright"
    page = (out / "report.html").read_text()
    sentence = f"{N} of {N} training samples are stored in the file"
    assert sentence in " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert page.count('<li class="card') == N
    assert sentence in (out / "model_card.md").read_text()
    assert f"{N} stored records" in (out / "report.sarif").read_text()
    assert main([*arguments, "--fail-on", "recovered>=31", "--quiet"]) == 0  # shown again
    second = tmp_path / "b"
    assert main(["audit", "--config", str(out / "config.toml"), "--out", str(second), "-q"]) == 1
    assert rs.AuditResult.load(second).verdict.sentence == rs.AuditResult.load(out).verdict.sentence
    rs.audit(path, data=files[0]).save(tmp_path / "c")
    assert f'checkpoint = "{path}"' in (tmp_path / "c" / "config.toml").read_text()


def test_a_dry_run_foretells_it(
    samples: Samples,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, y = samples
    path = saved(SVC().fit(x[:N], y[:N]), tmp_path / "m.pkl")
    assert main(["audit", str(path), "--dry-run", "--json"]) == 0
    output = printed(capsys)
    assert output["verdicts"]["leak"].startswith("certain")
    assert not output["obstacles"]
    missing = ["audit", str(path), "--dry-run", "--json", "--data", str(tmp_path / "none.npz")]
    assert main(missing) == 2
    assert "none.npz" in printed(capsys)["obstacles"][0]


@pytest.mark.parametrize("container", ["pickle", "joblib"])
@pytest.mark.parametrize("kind", ["float", "mixed"])
def test_a_stored_data_frame_is_compared_by_rows(kind: str, container: str, tmp_path: Path) -> None:
    """pandas stores columns of one type together, so the array in the file has columns as rows."""
    x = np.random.default_rng(0).normal(size=(100, 30))
    frame = pd.DataFrame(x, columns=[f"c{i}" for i in range(30)])
    if kind == "mixed":
        x[:, 7] = frame["c7"] = np.arange(100)
        frame["c7"] = frame["c7"].astype("int32")
        frame["c9"] = frame["c9"].astype("float32")
        x[:, 9] = frame["c9"]
        frame.insert(3, "name", [f"n{i}" for i in range(100)])
    path = tmp_path / "bundle.pkl"
    bundle = {"model": KNeighborsClassifier(), "X_train": frame}
    path.write_bytes(pickle.dumps(bundle)) if container == "pickle" else joblib.dump(bundle, path)
    y = np.arange(100) % 2
    nonmembers = np.random.default_rng(1).normal(size=(120, 30))
    result = rs.audit(path, data=(x, y), holdout=(nonmembers, np.arange(120) % 2))
    assert result.exit_code == 1
    assert (result.verdict.recovered, result.verdict.n) == (100, 100)
    assert result.verdict.expected_by_chance == 0
    assert "100 stored records" in result.verdict.headline


class WithSupportSet(nn.Module):
    """A network with a buffer that holds normalized samples."""

    def __init__(self, support: Tensor) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))
        self.register_buffer("support", support)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def test_samples_are_found_in_arrays_of_any_name(tmp_path: Path) -> None:
    """The file, a live module and a file without a network hold some of the given images."""
    torch.manual_seed(0)
    x, non_members, y = torch.rand(60, 64), torch.rand(60, 64), torch.arange(60) % 2
    model = WithSupportSet((x[:20] - 0.5) / 0.3)
    layers = {k: v for k, v in model.state_dict().items() if k != "support"}
    torch.save({"model": layers, "example_inputs": x[:16]}, tmp_path / "m.pt")
    joblib.dump({"background": x[:10].numpy()}, tmp_path / "m.joblib")
    torch.save({"model": layers, "example_inputs": torch.rand(16, 64)}, tmp_path / "clean.pt")

    def audit(subject: Any) -> rs.AuditResult:
        return rs.audit(subject, data=(x, y), holdout=(non_members, y), effort="quick", steps=1)

    for subject, count, place in (
        (tmp_path / "m.pt", 16, "example_inputs"),
        (model, 20, "support"),
        (tmp_path / "m.joblib", 10, "background"),
    ):
        result = audit(subject)
        assert (result.verdict.outcome, result.verdict.grade) == ("leak", "verbatim")
        assert (result.exit_code, result.verdict.recovered, result.verdict.n) == (1, count, 60)
        reason = result.attacks[0].reason
        assert place in reason
        assert "0 of 6000 shuffled samples" in reason
        assert "0 of 60 held-out samples" in reason
    clean = audit(tmp_path / "clean.pt")
    assert not any(row.is_stored for row in clean.attacks)
    evidence = clean.verdict.answers[0].evidence
    assert evidence == "0 of 60 training samples are stored in the file, 0 expected by chance."


def test_an_audit_does_not_deny_what_a_scan_finds(
    network: dict[str, Tensor], samples: Samples, files: tuple[str, str], tmp_path: Path
) -> None:
    torch.save({"model": network, "prototypes": torch.rand(5, 6)}, tmp_path / "m.pt")
    result = rs.audit(tmp_path / "m.pt", data=files[0], holdout=files[1], effort="quick", steps=1)
    assert any(f.kind == "stored" for f in rs.scan(tmp_path / "m.pt").findings)
    evidence = result.verdict.answers[0].evidence
    assert "A scan finds values of training records in the file" in evidence
    assert "prototypes" in evidence
