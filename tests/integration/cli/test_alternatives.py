"""``residuum alternatives``: what it writes, what it claims, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from residuum.cli.main import main
from residuum.io.checkpoints import load_checkpoint
from residuum.records import Dataset
from residuum.theory import certify
from tests.cases import multiclass_point, relu_point
from tests.program import listing

KEYS = [
    "residual_before",
    "residual_after",
    "min_distance",
    "on_margin",
    "stationary_set",
    "full_kkt_set",
    "n_before",
    "n_after",
]


def save_point(point, folder: Path) -> list[str]:
    """An exact point as a user would have it: a weights file and an .npz."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(point.model.state_dict()), folder / "model.safetensors")
    Dataset(point.x, point.y).to_npz(folder / "train.npz")
    widths = [layer.in_features for layer in point.model.linears]
    arch = "mlp:" + "-".join(map(str, [*widths, point.model.linears[-1].out_features]))
    return [str(folder / "model.safetensors"), "--data", str(folder / "train.npz"), "--arch", arch]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alternatives") / "m"
    options = ["--data", "digits", "--n", "10", "--arch", "mlp:64-80-1", "--steps", "500"]
    assert main(["train", *options, "--out", str(out), "--quiet"]) == 0
    return out


def answer(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict:
    assert main(["alternatives", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_far_sets_of_exact_points(depth, tmp_path, capsys):
    point = relu_point(depth)
    options = save_point(point, tmp_path / "in")
    out = tmp_path / "far"
    output = answer(capsys, [*options, "--far", "1e6", "--out", str(out)])
    assert list(output)[: len(KEYS)] == KEYS
    assert output["residual_after"] < 1e-9
    assert output["min_distance"] >= 1e6
    assert output["stationary_set"] is output["full_kkt_set"] is output["on_margin"] is True
    assert (output["n_before"], output["n_after"]) == (6, 12)
    assert listing(out) == [
        ".gitignore",
        "alternative.npz",
        "alternatives.json",
        "alternatives.png",
    ]
    assert json.loads((out / "alternatives.json").read_text()) == output
    with np.load(out / "alternative.npz") as arrays:
        x, y, lam = (torch.from_numpy(arrays[name]) for name in ("x", "y", "lam"))
    assert torch.allclose(lam.reshape(6, 2).sum(1), point.lam, rtol=1e-6)
    certificate = certify(point.model, x, y)  # the written file, judged by the certificate
    assert certificate.residual_plain < 1e-9
    assert certificate.margin == pytest.approx(1, abs=1e-9)


def test_multiclass_merging_and_splitting(tmp_path, capsys):
    options = save_point(multiclass_point(), tmp_path / "in")
    merged = answer(capsys, [*options, "--merge", "--out", str(tmp_path / "a")])
    assert (merged["n_before"], merged["n_after"], merged["changed"]) == (6, 3, 6)
    assert merged["residual_after"] < 1e-9
    assert merged["full_kkt_set"] is True
    split = answer(capsys, [*options, "--budget-frac", "0.5", "--out", str(tmp_path / "b")])
    assert split["n_after"] == 12
    assert split["full_kkt_set"] is True


def test_multipliers_of_every_rival_are_kept(tmp_path, capsys):
    """From the file alone: theta - sum lam_ic grad (Phi_y - Phi_c), on a network where rivals differ."""
    out = tmp_path / "m"
    options = ["--data", "digits", "--n", "20", "--arch", "mlp:64-40-10", "--steps", "200"]
    assert main(["train", *options, "--task", "multiclass", "--out", str(out), "--quiet"]) == 0
    capsys.readouterr()
    output = answer(capsys, [str(out), "--budget-frac", "0.5", "--out", str(tmp_path / "alt")])
    model = load_checkpoint(out).copy_module().double()
    with np.load(tmp_path / "alt" / "alternative.npz") as arrays:
        x, y, lam = (torch.from_numpy(arrays[name]) for name in ("x", "y", "lam"))
    assert lam.shape == (output["n_after"], 10)
    assert float(lam[torch.arange(len(y)), y].abs().max()) == 0
    assert float((lam.sort(dim=1).values[:, -2] / lam.sum(1)).max()) > 0.01  # more than one rival
    outputs = model(x.double())
    margins = outputs.gather(1, y[:, None]) - outputs
    theta = list(model.parameters())
    gradients = torch.autograd.grad((lam * margins).sum(), theta)
    residual = torch.cat([(t - g).flatten() for t, g in zip(theta, gradients, strict=True)]).norm()
    size = torch.cat([t.flatten() for t in theta]).norm()
    assert float(residual / size) == pytest.approx(output["residual_after"], rel=1e-6)


def test_a_trained_network_is_reported_as_it_is(trained, tmp_path, capsys):
    out = tmp_path / "alt"
    output = answer(capsys, [str(trained), "--out", str(out)])
    assert output["residual_before"] > 1e-3
    assert output["exact_kkt_point"] is False
    assert output["residual_after"] == pytest.approx(output["residual_before"], abs=1e-9)
    assert output["stationary_set"] is True
    assert output["min_distance"] > 0.1 or output["blocked"]
    assert output["n_after"] == 2 * output["in_use"] - len(output["blocked"])
    repeated = answer(capsys, [str(trained), "--out", str(out), "--direction", "tangent"])
    assert repeated["budget_median"] < output["budget_median"]
    assert main(["certify", str(trained), "--data", str(out / "alternative.npz"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["residual_plain"] <= output["residual_before"] + 1e-9


def test_samples_on_kinks_stay_and_their_neurons_are_named(tmp_path, capsys):
    point = relu_point(width=2)
    w, b = (p.detach() for p in (point.model.linears[0].weight[2], point.model.linears[0].bias[2]))
    x = point.x.clone()
    x[0] -= (x[0] @ w + b) / w.square().sum() * w
    options = save_point(
        type(point)(point.model, x, point.y, point.lam, point.group), tmp_path / "in"
    )
    output = answer(
        capsys,
        [*options, "--budget-frac", "0.9", "--direction", "tangent", "--out", str(tmp_path / "o")],
    )
    stays = [sample for sample in output["blocked"] if sample["sample"] == 0]
    assert len(stays) == 1
    assert stays[0]["neurons"] == 2
    assert stays[0]["names"] == "layers.0[2], layers.0[3]"
    assert output["min_distance"] == 0
    assert (
        main(["alternatives", *options, "--direction", "tangent", "--out", str(tmp_path / "o")])
        == 0
    )
    assert (
        "sample 0 cannot move: blocked by 2 neurons, layers.0[2], layers.0[3]"
        in capsys.readouterr().out
    )


def test_labels_keep_their_form(tmp_path, capsys):
    point = relu_point()
    options = save_point(point, tmp_path / "in")
    Dataset(point.x, (point.y > 0).long()).to_npz(tmp_path / "in" / "train.npz")
    answer(capsys, [*options, "--far", "2", "--out", str(tmp_path / "o")])
    with np.load(tmp_path / "o" / "alternative.npz") as arrays:
        assert set(arrays["y"].tolist()) == {0, 1}
        assert arrays["y"].dtype == np.int64


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        (["--far", "1", "--merge"], 2, "--far and --merge"),
        (["--far", "1", "--budget-frac", "0.5"], 2, "--far and --budget-frac"),
        (["--budget-frac", "1.5"], 2, "between 0 and 1"),
        (["--budget-frac", "nan"], 2, "between 0 and 1"),
        (["--far", "-3"], 2, "positive and finite"),
        (["--far", "inf"], 2, "positive and finite"),
        (["--direction", "softes"], 2, "Did you mean 'softest'?"),
        (["--far", "1e9"], 3, "10 samples can move by at most"),
        (["--data", "nowhere.npz"], 2, "nowhere.npz"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_its_code(
    trained, tmp_path, capsys, extra, code, words
):
    assert main(["alternatives", str(trained), "--out", str(tmp_path / "x"), *extra]) == code
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_folder_of_something_else_is_left_alone(trained, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("x")
    assert main(["alternatives", str(trained), "--out", str(tmp_path)]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert listing(tmp_path) == ["thesis.tex"]
