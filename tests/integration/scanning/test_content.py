"""Given samples, values and texts are found by content in any file, and nothing is found in clean files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestRegressor
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    KBinsDiscretizer,
    OrdinalEncoder,
    PolynomialFeatures,
    QuantileTransformer,
    StandardScaler,
    TargetEncoder,
)
from sklearn.tree import DecisionTreeRegressor
from torch import Tensor, nn

import residuum as rs
from residuum.cli.main import main
from residuum.scanning.findings import Finding
from tests.program import printed

N = 60
Pair = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def make_images(seed: int) -> Tensor:
    return torch.rand(N, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def make_table(seed: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    columns = [
        random.integers(18, 90, N),
        random.normal(170, 10, N),
        np.round(random.gamma(2, 20_000, N)),
        random.integers(0, 2, N),
        random.normal(size=N) / 100,
        random.normal(size=N),
    ]
    return np.stack(columns, 1).astype(np.float64)


IMAGES, OTHER_IMAGES = make_images(0), make_images(1)
TABLE, OTHER_TABLE = make_table(0), make_table(1)
LABELS = np.arange(N) % 2
TARGETS = np.random.default_rng(5).normal(50, 10, N)
LAYERS = {
    "fc.weight": torch.randn(32, 192),
    "fc.bias": torch.randn(32),
    "bn.running_mean": torch.ones(32),
}
IMAGE_DATA = ((IMAGES.numpy(), LABELS), (OTHER_IMAGES.numpy(), LABELS))
TABLE_DATA = ((TABLE, LABELS), (OTHER_TABLE, LABELS))


def write(value: Any, path: Path) -> Path:
    if path.suffix == ".pt":
        torch.save(value, path)
    elif path.suffix == ".safetensors":
        save_file(value, path)
    elif path.suffix == ".onnx":
        write_onnx(value, path)
    elif path.suffix == ".skops":
        pytest.importorskip("skops.io").dump(value, path)
    else:
        joblib.dump(value, path)
    return path


def write_onnx(array: np.ndarray[Any, Any], path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    weights = [onnx.numpy_helper.from_array(array, "background")]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    node = onnx.helper.make_node("Identity", ["background"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [], [output], weights)
    onnx.save(onnx.helper.make_model(graph), str(path))


def content_findings(path: Path, data: Any, holdout: Any = None) -> list[Finding]:
    """Return the findings of a scan with data that a scan without data does not have."""
    usual = {f.what for f in rs.scan(path).findings}
    return [f for f in rs.scan(path, data=data, holdout=holdout).findings if f.what not in usual]


BYTES = (IMAGES[:16].permute(0, 2, 3, 1) * 255).round().to(torch.uint8).contiguous()
MEAN, DEVIATION = torch.tensor([[0.48, 0.46, 0.41], [0.23, 0.22, 0.23]])[:, :, None, None]
STANDARD = StandardScaler().fit_transform(TABLE)
# Name: file name, content, samples, numbers of the stored samples, and words about how they are stored.
PLANTED: dict[str, tuple[str, Any, Any, range, str]] = {
    "tensor": ("m.pt", {"model": LAYERS, "extra": IMAGES[5:21]}, IMAGE_DATA, range(5, 21), "as given"),
    "normalized buffer": (
        "m.safetensors",
        {**LAYERS, "buffer": ((IMAGES - MEAN) / DEVIATION)[:20].contiguous()},
        IMAGE_DATA,
        range(20),
        "scaled by channel",
    ),
    "float16": ("m.pt", {**LAYERS, "z": IMAGES[:9].half()}, IMAGE_DATA, range(9), "as given"),
    "bytes": ("m.pt", {"z": BYTES}, IMAGE_DATA, range(16), "channels last, multiplied by 255"),
    "flat": ("m.pt", {"z": IMAGES[:7].flatten()}, IMAGE_DATA, range(7), "flattened"),
    "transposed": ("m.joblib", {"z": TABLE.T.copy()}, TABLE_DATA, range(N), "transposed"),
    "background": ("m.joblib", {"z": TABLE[30:50].astype(np.float32)}, TABLE_DATA, range(30, 50), "as given"),
    "data frame": ("m.joblib", {"m": 1, "z": pd.DataFrame(TABLE)}, TABLE_DATA, range(N), "as given"),
    "pipeline": (
        "m.joblib",
        make_pipeline(StandardScaler(), KNeighborsClassifier()).fit(TABLE, LABELS),
        TABLE_DATA,
        range(N),
        "after StandardScaler",
    ),
    "standardized": ("m.joblib", {"z": STANDARD[:40]}, TABLE_DATA, range(40), "standardized by column"),
    "with columns": (
        "m.joblib",
        {"z": np.column_stack([np.arange(N), TABLE, LABELS])},
        TABLE_DATA,
        range(N),
        "in columns 2 to 7 of 8",
    ),
    "lists": ("m.joblib", {"z": TABLE[:12].tolist()}, TABLE_DATA, range(12), "as given"),
    "onnx": ("m.onnx", TABLE[:25].astype(np.float32), TABLE_DATA, range(25), "as given"),
    "skops": (
        "m.skops",
        KNeighborsClassifier().fit(TABLE, LABELS),
        TABLE_DATA,
        range(N),
        "as given",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_samples_are_found(name: str, tmp_path: Path) -> None:
    file, content, (data, holdout), expected, wording = PLANTED[name]
    result = rs.scan(write(content, tmp_path / file), data=data, holdout=holdout)
    finding = next(f for f in result.findings if f.what.endswith("given samples"))
    assert finding.what == f"{len(expected)} of {N} given samples"
    assert (finding.kind, finding.severity, finding.count) == ("stored", "high", len(expected))
    assert finding.rows == tuple(expected)
    assert wording in finding.reason
    assert f"0 of {N} held-out samples and 0 of {100 * N} shuffled samples" in finding.reason
    assert result.exit_code == 1
    searched = result.files[0].searched
    assert searched is not None
    assert (searched.samples, searched.found_samples) == (N, len(expected))


def train_network() -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(192, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(IMAGES), torch.from_numpy(LABELS)).backward()
        optimizer.step()
    return {
        **net.state_dict(),
        **{f"adam.{i}": s["exp_avg"] for i, s in enumerate(optimizer.state.values())},
    }


FLAT = IMAGES.flatten(1).numpy()
CLEAN: dict[str, tuple[Any, Any]] = {
    "trained network": (train_network, IMAGE_DATA),
    "mean image": (lambda: {"mean": IMAGES.mean(0), "std": IMAGES.std(0)}, IMAGE_DATA),
    "held-out images": (lambda: {"z": OTHER_IMAGES}, IMAGE_DATA),
    "random table": (
        lambda: {"emb.weight": torch.randn(2000, 6), "pos": torch.arange(6)},
        TABLE_DATA,
    ),
    "identity": (lambda: {"eye": torch.eye(192), "zeros": torch.zeros(50, 192)}, IMAGE_DATA),
    "clusters": (lambda: KMeans(4, n_init=1, random_state=0).fit(FLAT), IMAGE_DATA),
    "components": (lambda: PCA(10).fit(FLAT), IMAGE_DATA),
    "linear": (lambda: LogisticRegression().fit(STANDARD, LABELS), TABLE_DATA),
    "scaler": (lambda: StandardScaler().fit(TABLE), TABLE_DATA),
    "mlp": (lambda: MLPClassifier((20,), max_iter=50).fit(STANDARD, LABELS), TABLE_DATA),
    "forest": (
        lambda: RandomForestRegressor(5, min_samples_leaf=4, random_state=0).fit(TABLE, TARGETS),
        ((TABLE, TARGETS), (OTHER_TABLE, TARGETS[::-1].copy() + 0.5)),
    ),
    "polynomials": (lambda: PolynomialFeatures(2).fit(TABLE), TABLE_DATA),
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_in_clean_files(name: str, tmp_path: Path) -> None:
    make, (data, holdout) = CLEAN[name]
    content = make()
    path = write(content, tmp_path / ("m.pt" if isinstance(content, dict) else "m.joblib"))
    assert content_findings(path, data, holdout) == []
    assert content_findings(path, data) == []


def test_samples_of_few_values_are_no_evidence(tmp_path: Path) -> None:
    """Binary rows and one-hot rows are in many arrays. Distinct records among them are found."""
    random = np.random.default_rng(0)
    binary = random.integers(0, 2, (N, 3)).astype(np.float32)
    path = write(
        {"w": torch.from_numpy(random.integers(0, 2, (50, 3)).astype(np.float32))},
        tmp_path / "m.pt",
    )
    assert content_findings(path, (binary, LABELS)) == []
    path = write({"eye": torch.eye(100)}, tmp_path / "eye.pt")
    assert content_findings(path, (np.eye(100, dtype=np.float32)[:N], LABELS)) == []
    fingerprints = random.integers(0, 2, (N, 128)).astype(np.float32)
    path = write({"z": torch.from_numpy(fingerprints[:20]).bool()}, tmp_path / "bits.pt")
    (finding,) = content_findings(path, (fingerprints, LABELS))
    assert finding.what == f"20 of {N} given samples"


def test_data_of_the_same_kind_is_reported_as_such(tmp_path: Path) -> None:
    """A file with training and held-out samples holds the given samples, but shows nothing about training."""
    path = write({"z": torch.cat([IMAGES, OTHER_IMAGES])}, tmp_path / "m.pt")
    (finding,) = content_findings(path, *IMAGE_DATA)
    assert (finding.severity, finding.count) == ("medium", N)
    assert f"{N} of {N} held-out samples and 0 of" in finding.reason


VALUES: dict[str, tuple[Any, str, str]] = {
    "quantiles": (lambda: QuantileTransformer(n_quantiles=N).fit(TABLE), "values of 5 columns", "high"),
    "categories": (lambda: OrdinalEncoder().fit(TABLE[:, [2]]), "values of column 2", "high"),
    "columns": (lambda: OrdinalEncoder().fit(TABLE[:, [2, 5]]), "120 of 120 values of 2 columns", "high"),
    "targets": (lambda: DecisionTreeRegressor().fit(TABLE, TARGETS), "values of the targets", "high"),
    "encoder": (
        lambda: TargetEncoder(smooth=0).fit(np.round(TABLE[:, [2]]), TARGETS),
        "values of the targets",
        "high",
    ),
    "half": (lambda: {"edges": np.sort(TABLE[::2, 1])}, "30 of 60 values of column 1", "medium"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_single_values_are_found(name: str, tmp_path: Path) -> None:
    make, what, severity = VALUES[name]
    value_findings = content_findings(write(make(), tmp_path / "m.joblib"), (TABLE, TARGETS))
    assert any(what in f.what and f.severity == severity for f in value_findings)
    assert all("expected by chance" in f.reason for f in value_findings)


def test_bins_of_held_out_records_hold_no_values(tmp_path: Path) -> None:
    bins = KBinsDiscretizer(5, strategy="uniform").fit(OTHER_TABLE)
    path = write(
        {"bins": bins, "q": QuantileTransformer(n_quantiles=N).fit(OTHER_TABLE)},
        tmp_path / "m.joblib",
    )
    assert content_findings(path, (TABLE, TARGETS)) == []


PROMPTS = [f"Patient number {i} came on day {i * 7} with a cough." for i in range(20)]


@pytest.mark.parametrize("suffix", [".csv", ".txt", ".jsonl"])
def test_texts_are_found_in_strings(suffix: str, tmp_path: Path) -> None:
    data = tmp_path / f"train{suffix}"
    lines = {
        ".csv": ["text,label", *(f"{prompt},{i % 2}" for i, prompt in enumerate(PROMPTS))],
        ".txt": PROMPTS,
        ".jsonl": [json.dumps({"text": prompt, "id": i}) for i, prompt in enumerate(PROMPTS)],
    }[suffix]
    data.write_text("\n".join(lines))
    few_shot = [f"Q: {prompt.upper()} Diagnosis?" for prompt in PROMPTS[3:9]]
    vectorizer = CountVectorizer().fit(PROMPTS)
    array = np.array([f"{'x ' * 150}{PROMPTS[15]}", "y"])
    path = write({"prompts": few_shot, "v": vectorizer, "array": array}, tmp_path / "m.joblib")
    finding, in_array = [f for f in content_findings(path, data) if "texts" in f.what]
    assert (in_array.where, in_array.rows) == ("array", (15,))
    assert finding.what == "6 of 20 given texts"
    assert (finding.severity, finding.where, finding.rows) == (
        "high",
        "prompts[0]",
        tuple(range(3, 9)),
    )
    clean = write({"v": vectorizer}, tmp_path / "clean.joblib")
    assert content_findings(clean, data) == []


def test_the_command_prints_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write({"z": torch.from_numpy(TABLE[:12])}, tmp_path / "m.pt")
    np.savez(tmp_path / "train.npz", x=TABLE, y=LABELS)
    np.savez(tmp_path / "test.npz", x=OTHER_TABLE, y=LABELS)
    samples = ["--data", str(tmp_path / "train.npz"), "--holdout", str(tmp_path / "test.npz")]
    assert main(["scan", str(path), *samples]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "12 of 60 given samples" in text
    assert "rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ... of the data" in text
    assert "searched by content: found 12 of 60 given samples" in text
    assert main(["scan", str(path), *samples, "--json"]) == 1
    (file,) = printed(capsys)["files"]
    assert file["searched"]["found_samples"] == 12
    assert file["findings"][0]["rows"] == list(range(12))
    assert main(["scan", str(path), "--data", str(tmp_path / "none.npz")]) == 2
