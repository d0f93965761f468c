"""A scan finds samples by shape and name and texts by their words, and mistakes no weight for a sample."""

from __future__ import annotations

import pickle
import re
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file
from sklearn.cluster import KMeans
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.svm import SVC
from torch import Tensor, nn

from residuum.io.release import open_release
from residuum.scanning.findings import Finding, findings, records_in


def stored_in(path: Path) -> list[Finding]:
    return [finding for finding in findings(open_release(path)) if finding.kind == "stored"]


def with_tensors(module: nn.Module, buffers: bool = True, **tensors: Tensor) -> nn.Module:
    for name, tensor in tensors.items():
        if buffers:
            module.register_buffer(name, tensor)
        else:
            module.register_parameter(name, nn.Parameter(tensor))
    return module


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def vision_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(24, 2, 24, batch_first=True)
    module = nn.Sequential(
        nn.Conv2d(3, 24, 4, 4), nn.TransformerEncoder(layer, 2), nn.Linear(24, 5)
    )
    tokens = {"cls_token": torch.randn(1, 1, 24), "pos_embed": torch.randn(1, 65, 24)}
    return with_tensors(module, buffers=False, mask_token=torch.randn(1, 24), **tokens)


def language_model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True)
    module = nn.ModuleDict(
        {
            "wte": nn.Embedding(50, 24),
            "h": nn.TransformerEncoder(layer, 1),
            "lm_head": nn.Linear(24, 50),
        }
    )
    module["lm_head"].weight = module["wte"].weight
    masks = {"causal_mask": torch.ones(1, 1, 16, 16).tril(), "position_ids": torch.arange(16)[None]}
    return with_tensors(module, rotary=torch.randn(16, 24), **masks)


def autoencoder_of_images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 8, 2), nn.Conv2d(8, 3, 1)
    )


def averaged() -> nn.Module:
    module = nn.Linear(20, 16)
    copy = module.weight.detach() * 0.99 + 0.001 * torch.randn(16, 20)
    return with_tensors(nn.Sequential(module, nn.Linear(16, 2)), shadow0=copy)


# For each architecture, a network and the shape of a batch of its samples, or None if it takes no numbers.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "linear": (lambda: nn.Linear(30, 3), (9, 30)),
    "perceptron": (lambda: mlp(12, 8, 3), (9, 12)),
    "equal widths": (lambda: mlp(12, 12, 12, 12), (12, 12)),
    "autoencoder": (lambda: mlp(64, 16, 4, 16, 64), (16, 8, 8)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Linear(36, 3)),
        (9, 1, 28, 28),
    ),
    "images last": (lambda: nn.Sequential(nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4)), (9, 32, 32, 3)),
    "image to image": (autoencoder_of_images, (2, 3, 16, 16)),
    "vision transformer": (vision_transformer, (4, 3, 32, 32)),
    "recurrent": (lambda: nn.Sequential(nn.LSTM(6, 10, 2), nn.Linear(10, 2)), (5, 7, 6)),
    "signals": (lambda: nn.Sequential(nn.Conv1d(1, 4, 10), nn.Conv1d(4, 4, 3)), (3, 1, 400)),
    "language model": (language_model, None),
    "averaged": (averaged, (16, 20)),
    "statistics of inputs": (
        lambda: with_tensors(
            mlp(12, 4), input_mean=torch.randn(2, 12), input_std=torch.rand(2, 12)
        ),
        (9, 12),
    ),
    "kernels": (
        lambda: with_tensors(nn.Sequential(nn.Conv2d(3, 4, 3)), blur=torch.rand(3, 3, 11, 11)),
        (3, 3, 12, 12),
    ),
    "class means": (
        lambda: with_tensors(mlp(12, 4), prototypes=torch.randn(5, 4)),
        (9, 12),
    ),
    "attention": (lambda: nn.MultiheadAttention(16, 2, kdim=12, vdim=12), None),
}


def write_network(folder: Path, module: nn.Module) -> list[Path]:
    """Write a network as a state dict, a checkpoint with Adam's state, a module and as safetensors."""
    state = module.state_dict()
    moments = [
        {
            "step": 1,
            "exp_avg": torch.randn_like(parameter),
            "exp_avg_sq": torch.rand_like(parameter),
        }
        for parameter in module.parameters()
    ]
    adam = {"state": dict(enumerate(moments)), "param_groups": [{"params": [*range(len(moments))]}]}
    torch.save(state, folder / "state.pt")
    averages = {name: tensor.clone() for name, tensor in state.items()}
    checkpoint = {"model": state, "optimizer": adam, "ema": averages}
    torch.save(checkpoint, folder / "checkpoint.pt")
    torch.save(module, folder / "module.pt")
    save_file(averages, folder / "model.safetensors")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_not_mistaken_for_samples(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    for path in write_network(tmp_path, NETWORKS[name][0]()):
        assert stored_in(path) == [], path.name


@pytest.mark.parametrize("name", [name for name, (_, shape) in NETWORKS.items() if shape])
def test_a_buffer_of_samples_is_found_by_its_shape(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    assert shape is not None
    for buffer, severity in (("h", "medium"), ("h_buffer", "medium"), ("example_inputs", "high")):
        state = make().state_dict() | {buffer: torch.randn(shape)}
        torch.save(state, tmp_path / "state.pt")
        (finding,) = stored_in(tmp_path / "state.pt")
        assert (finding.severity, finding.where, finding.count) == (severity, buffer, shape[0])


@pytest.mark.parametrize(
    ("name", "is_reported"),
    [
        ("example_input", True),
        ("few_shot", True),
        ("calibration_data", True),
        ("replay_samples", True),
        ("coreset", True),
        ("support", True),
        ("input_mean", False),
        ("sample_weight", False),
        ("data", False),  # says little, and the shape is not that of a sample
        ("thresholds", False),
    ],
)
def test_a_name_alone_is_a_weaker_hint(tmp_path: Path, name: str, is_reported: bool) -> None:
    torch.save({"weight": torch.randn(3, 7), name: torch.randn(5, 4)}, tmp_path / "state.pt")
    assert [finding.severity for finding in stored_in(tmp_path / "state.pt")] == [
        "medium"
    ] * is_reported


def test_samples_next_to_an_estimator_are_found_by_the_number_of_its_columns(
    tmp_path: Path,
) -> None:
    x = np.random.default_rng(0).normal(size=(30, 6))
    model = LogisticRegression().fit(x, x[:, 0] > 0)
    path = tmp_path / "bundle.pkl"
    path.write_bytes(pickle.dumps({"model": model, "bg": x[:8], "cutoffs": x[:8, :3]}))
    (finding,) = stored_in(path)
    assert (finding.where, finding.count) == ("bg", 8)


def test_the_background_of_an_explainer_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("shap.maskers._tabular")
    independent = type("Independent", (), {"__module__": module.__name__})
    monkeypatch.setattr(module, "Independent", independent, raising=False)
    for name in ("shap", "shap.maskers", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    masker: Any = independent()
    masker.data = np.random.default_rng(0).normal(size=(20, 4))
    (tmp_path / "explainer.pkl").write_bytes(pickle.dumps({"masker": masker}))
    release = open_release(tmp_path / "explainer.pkl")
    (array,) = records_in(release)
    assert array.records is not None
    assert np.array_equal(array.records.numpy(), masker.data)


# ONNX


def write_onnx(path: Path, model: Any, x: np.ndarray) -> Path:
    from skl2onnx import to_onnx

    path.write_bytes(to_onnx(model, x[:1]).SerializeToString())
    return path


@pytest.mark.parametrize(
    ("model", "count"),
    [(KNeighborsClassifier(3), 40), (GaussianProcessRegressor(), 40), (SVC(), None)],
    ids=["neighbors", "Gaussian process", "support vectors"],
)
def test_records_in_onnx_are_the_training_rows(
    tmp_path: Path, model: Any, count: int | None
) -> None:
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    model.fit(x, np.arange(40) % 2)
    release = open_release(write_onnx(tmp_path / "model.onnx", model, x))
    (array,) = records_in(release)
    assert array.records is not None
    assert len(array.records) == array.finding.count == (count or len(model.support_vectors_))
    distances = np.abs(array.records.numpy()[:, None] - x[None]).max(2).min(1)
    assert distances.max() < 1e-6


def test_weights_in_onnx_are_no_records(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    y = np.arange(40) % 2
    network = MLPClassifier((6, 6), max_iter=500, tol=1.0).fit(x, y)
    for model in (LogisticRegression().fit(x, y), KMeans(3, n_init=1).fit(x), network):
        assert stored_in(write_onnx(tmp_path / "model.onnx", model, x)) == []
    # An exporter gives transposed weights names such as onnx::MatMul_7, which are no names of weights.
    node, weights = onnx.helper.make_node, np.ones((6, 6), np.float32)
    graph = onnx.helper.make_graph(
        [node("MatMul", ["x", "onnx::MatMul_7"], ["h"]), node("Gemm", ["h", "fc.weight"], ["y"])],
        "network",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 6])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(weights, name) for name in ("onnx::MatMul_7", "fc.weight")],
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "network.onnx")
    assert stored_in(tmp_path / "network.onnx") == []


# Texts

PROMPTS = [f"Patient {name} came to the ward with a high fever." for name in ("Ana", "Jo", "Li")]
PEOPLE = [
    f"{first} {last}"
    for first in ("Ana", "Jo", "Li", "Max")
    for last in ["Abel", "Birch", "Cole", "Dahl", "Ek"]
]
SURNAMES = [name.replace(" ", "").lower() for name in PEOPLE]
TEXTS: dict[str, tuple[Any, int]] = {
    "prompts": ({"few_shot": PROMPTS}, 3),
    "questions": ([{"question": prompt, "answer": "yes"} for prompt in PROMPTS], 3),
    "an array of prompts": (np.array(PROMPTS), 3),
    "Japanese": ({"prompt": "患者の田中さんは月曜日に重い胸の痛みと発熱で入院しました。"}, 1),
    "people": ({"patients": PEOPLE}, 20),
    "people by number": (dict(enumerate(PEOPLE)), 20),
    "an array of surnames": (np.array(SURNAMES, dtype=object), 20),
    "addresses": ([f"{i} Main Street" for i in range(20)], 20),
    "numbered surnames": ({"lookup": {name: i for i, name in enumerate(SURNAMES)}}, 20),
}
LICENSE = (
    "Licensed under the Apache License; you may not use this file except in compliance with it."
)
CLEAN_TEXTS: dict[str, Any] = {
    "license": {"license": LICENSE, "terms": LICENSE},
    "template": ["{% for message in messages %} the user asks for help with a text {% endfor %}"],
    "code": ["def forward(self, x):\n    return one two three four five six seven eight nine"],
    "architecture": [repr(mlp(3, 4, 5))],
    "settings": {f"option_{i}": f"value_{i}" for i in range(30)},
    "command": ["python train.py --lr 0.1 --epochs 10 --batch-size 32 --seed 1 --out x"],
    "columns": {"columns": PEOPLE, "feature_names_in_": np.array(PEOPLE, dtype=object)},
    "labels": {
        "id2label": dict(enumerate(PEOPLE)),
        "label2id": {n: i for i, n in enumerate(PEOPLE)},
    },
    "layers": [f"layer{i}.{j}.weight" for i in range(6) for j in range(6)],
    "description": {"description": "A classifier of images that was trained with great care."},
    "few names": {"authors": PEOPLE[:5]},
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_can_be_records_are_counted(tmp_path: Path, name: str) -> None:
    content, count = TEXTS[name]
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(content))
    (finding,) = stored_in(tmp_path / "m.pkl")
    # The names "few_shot" and "prompt" say that the texts are examples of the training.
    severity = "high" if re.search("few_shot|prompt", finding.where) else "medium"
    assert (finding.severity, finding.count) == (severity, count)


@pytest.mark.parametrize("name", CLEAN_TEXTS)
def test_other_texts_raise_no_alarm(tmp_path: Path, name: str) -> None:
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(CLEAN_TEXTS[name]))
    assert stored_in(tmp_path / "m.pkl") == []


def test_prompts_in_metadata_are_found(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "m.safetensors", metadata={"prompt": PROMPTS[0]})
    (finding,) = stored_in(tmp_path / "m.safetensors")
    assert "Patient Ana" in finding.reason
