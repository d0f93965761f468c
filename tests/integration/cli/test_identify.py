"""``residuum identify``: the published keys, the files it reads and writes, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from residuum.attacks import every_attack
from residuum.attacks.exact.polynomial import POWERS, parse_activation
from residuum.cli.main import main
from residuum.io.checkpoints import save_checkpoint
from residuum.io.modules import checkpoint_from_module
from residuum.networks import MLP, Polynomial, PolynomialNetwork
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.records.identification import Identification
from residuum.report.figures import identified_figure
from residuum.surfaces.surface import build_weights_surface
from tests.cases import ExactPoint, polynomial_point

KEYS = {"order", "r", "N_r", "rank_K", "cond_K", "samples", "aggregates", "notes"}
PNG = b"\x89PNG"


def saved(model: torch.nn.Module, path: Path, shape: tuple[int, ...] = ()) -> str:
    save_checkpoint(checkpoint_from_module(model, input_shape=shape), path)
    return str(path)


def identify(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["identify", *arguments, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output.keys() >= KEYS
    return output


def worst(point: ExactPoint, output: dict[str, Any]) -> float:
    """Relative distance of the worst sample from the nearest recovered one, sign included."""
    x = torch.tensor([sample["x"] for sample in output["samples"]], dtype=torch.float64)
    distance = (x[:, None] - point.y.sign()[:, None] * point.x).norm(dim=2)
    return float((distance.amin(0) / point.x.norm(dim=1)).max())


def test_an_exact_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = polynomial_point(5, 16, 3)
    ckpt = saved(point.model, tmp_path / "a.safetensors", (4, 4))
    Dataset(point.x, point.y).to_npz(tmp_path / "train.npz")
    output = identify(capsys, ckpt, "--data", str(tmp_path / "train.npz"), "--norm", "1")
    assert worst(point, output) <= 1e-9
    assert (output["order"], output["r"], output["N_r"], output["rank_K"]) == (4, 5, 15, 15)
    assert all(sample["certified"] for sample in output["samples"])
    assert output["min_margin"] == pytest.approx(1, abs=1e-9)
    assert output["normalized_margin"] == pytest.approx(output["theta_norm"] ** -4, rel=1e-6)
    assert output["aggregates"] == {}
    assert output["notes"] == []


def test_files_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = polynomial_point(4, 16, 3)
    ckpt = saved(point.model, tmp_path / "a.safetensors", (4, 4))
    assert main(["identify", ckpt, "--out", str(tmp_path / "o")]) == 0
    text = capsys.readouterr().out
    for word in ("rank of K", "10 of N_r = 10", "balance gap", "certified", "not determined"):
        assert word in text
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == [
        ".gitignore",
        "identification.safetensors",
        "identified.png",
        "identify.json",
    ]
    record = Identification.load(tmp_path / "o" / "identification.safetensors")
    assert record.to_json() == json.loads((tmp_path / "o" / "identify.json").read_text())
    assert (tmp_path / "o" / "identified.png").read_bytes().startswith(PNG)
    figure = identified_figure(record, point.x)
    assert figure is not None
    assert figure != identified_figure(record)
    assert main(["identify", ckpt, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("layout", ["tensors", "layers", "bias"])
def test_weights_that_do_not_say_what_they_are(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    point = polynomial_point(4, 6, 3)
    w, a = point.model.weight.detach().clone(), point.model.coefficient.detach().clone()
    tensors: dict[str, dict[str, Tensor]] = {
        "tensors": {"w": w, "a": a},
        "layers": {"0.weight": w, "2.weight": a[None].clone()},
        "bias": {
            "0.weight": w[:, :-1].clone(),
            "0.bias": w[:, -1].clone(),
            "2.weight": a[None].clone(),
        },
    }
    path = tmp_path / "w.safetensors"
    save_file(tensors[layout], path)
    assert main(["identify", str(path)]) == 2
    assert "--activation cubic" in capsys.readouterr().err
    output = identify(capsys, str(path), "--activation", "cubic")
    if layout == "bias":
        assert output["scale"] == "fixed by the constant coordinate"
        x = torch.tensor([sample["x"] for sample in output["samples"]], dtype=torch.float64)
        assert (x[:, -1] - 1).abs().max() <= 1e-12
        truth = point.x / point.x[:, -1:]
        assert (x[:, None] - truth).norm(dim=2).amin(0).max() <= 1e-7 * truth.norm(dim=1).max()
    else:
        assert worst(point, output) <= 1e-9


def test_the_activation_overrides_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The factor c counts, its sign too: left out, the weights come out wrong."""
    point = polynomial_point(5, 8, 4, "one", leading=0.5)
    model = PolynomialNetwork(8, len(point.model.weight), Polynomial((0, 0, 0, 0, 1))).double()
    a = -point.model.coefficient.detach()
    model.load_state_dict({"weight": point.model.weight.detach(), "coefficient": a})
    ckpt = saved(model, tmp_path / "a.safetensors")
    right = identify(capsys, ckpt, "--activation", "poly:0.2,0,0,0.1,-0.5")
    wrong = identify(capsys, ckpt)
    truth = sorted(point.lam.tolist())
    assert sorted(s["weight"] for s in right["samples"]) == pytest.approx(truth, rel=1e-8)
    assert all(s["weight"] < 0 for s in wrong["samples"])
    assert "|theta|" in " ".join(right["notes"])


def test_aggregates_below_degree_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples turned within one eigenspace have the same moment matrix, hence the same output."""
    rng = torch.Generator().manual_seed(0)
    x = torch.linalg.qr(torch.randn(6, 6, generator=rng, dtype=torch.float64))[0][:2]
    c, s = math.cos(1.0), math.sin(1.0)
    turned = torch.tensor([[c, s], [-s, c]], dtype=torch.float64) @ x
    b = 0.25 ** (1 / 3)  # one neuron x_i / (sqrt(2) b) per sample, a = 1 / (2 b)
    moments = []
    for data in (x, turned):
        model = PolynomialNetwork(6, 2, Polynomial((0, 0, 1))).double()
        model.load_state_dict(
            {
                "weight": data / (2**0.5 * b),
                "coefficient": torch.full((2,), 1 / (2 * b), dtype=x.dtype),
            }
        )
        output = identify(capsys, saved(model, tmp_path / "q.safetensors"))
        values = torch.tensor(output["aggregates"]["eigenvalues"], dtype=torch.float64)
        vectors = torch.tensor(output["aggregates"]["eigenvectors"], dtype=torch.float64)
        moments.append((vectors.T * values) @ vectors)
        assert (moments[-1] - b * data.T @ data).abs().max() <= 1e-10
        assert output["samples"] == []
        assert "and not the samples x_i" in output["notes"][0]
    assert (moments[0] - moments[1]).abs().max() <= 1e-10
    linear = PolynomialNetwork(6, 2, Polynomial((0, 1))).double()
    linear.load_state_dict(
        {"weight": torch.stack([x[0], 2 * x[0]]), "coefficient": torch.tensor([1.0, 2]).double()}
    )
    ckpt = saved(linear, tmp_path / "l.safetensors")
    output = identify(capsys, ckpt, "--out", str(tmp_path / "l"))
    assert output["aggregates"]["sum"] == pytest.approx(x[0].tolist(), abs=1e-10)
    assert (tmp_path / "l" / "identified.png").read_bytes().startswith(PNG)


def test_a_trained_network_collapses_and_nothing_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    train = ["train", "--data", "digits", "--n", "6", "--arch", "polynomial:64-20-1"]
    assert main([*train, "--steps", "2000", "--out", run, "--quiet"]) == 0
    output = identify(capsys, run, "--data", f"{run}/private/train.npz")
    assert output["min_margin"] > 0
    assert output["rank_K"] <= 20 < output["N_r"]
    assert (
        f"matrix K of the neurons has rank {output['rank_K']} of {output['N_r']}"
        in output["notes"][0]
    )
    assert output["neurons"]["carrying"] < 10
    assert output["samples"]
    assert not any(sample["certified"] for sample in output["samples"])
    for rank in ("1", "3"):  # few enough dimensions for the rank condition
        identified = identify(capsys, run, "--rank", rank)
        assert identified["rank_K"] == identified["N_r"]
        assert not any(sample["certified"] for sample in identified["samples"])
        assert identified["notes"]


@pytest.mark.parametrize(("width", "inputs"), [(40, 6), (12, 20)])
def test_a_random_network_claims_nothing(
    width: int, inputs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(width)
    model = PolynomialNetwork(inputs, width, Polynomial((0, 0, 0, 1))).double()
    output = identify(capsys, saved(model, tmp_path / "r.safetensors"))
    assert not any(sample["certified"] for sample in output["samples"])
    assert any("not a KKT point" in note for note in output["notes"])


def refused(capsys: pytest.CaptureFixture[str], message: str, *arguments: str) -> None:
    assert main(["identify", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = polynomial_point(3, 5, 3)
    good = saved(point.model, tmp_path / "good.safetensors")
    relu = saved(MLP((4, 3, 1)), tmp_path / "relu.safetensors")
    deep = saved(MLP((4, 3, 3, 1)), tmp_path / "deep.safetensors")
    refused(capsys, "this network is mlp:4-3-1", relu)
    refused(capsys, "this network is mlp:4-3-3-1", deep, "--activation", "cubic")
    for zero in ("weight", "coefficient"):
        state = {name: t.clone() for name, t in point.model.state_dict().items()}
        state[zero].zero_()
        model = PolynomialNetwork(5, len(state["weight"]), Polynomial((0, 0, 0, 1))).double()
        model.load_state_dict(state)
        refused(capsys, "zero output", saved(model, tmp_path / "zero.safetensors"))
    for rank in ("0", "6", "100"):
        refused(capsys, "between 1 and 5", good, "--rank", rank)
    narrow = PolynomialNetwork(9, 2, Polynomial((0, 0, 0, 1)))
    wide = saved(narrow, tmp_path / "narrow.safetensors")
    refused(capsys, "between 1 and 2", wide, "--rank", "3")
    refused(capsys, "rank is lower", good, "--rank", "4")
    refused(capsys, "positive and finite", good, "--norm", "0")
    refused(capsys, "cannot be combined", good, "--norm", "1", "--augmented")
    for text in ("relu", "poly:", "poly:1", "poly:0,0,nan", "poly:0,1,0", "poly:a,b"):
        refused(capsys, "An activation must be", good, "--activation", text)
    Dataset(torch.ones(2, 3), torch.tensor([1, -1])).to_npz(tmp_path / "off.npz")
    refused(capsys, "The smallest margin is computed", good, "--data", str(tmp_path / "off.npz"))
    refused(capsys, "A data file must exist", good, "--data", str(tmp_path / "none.npz"))


@pytest.mark.parametrize("name", POWERS)
def test_named_activations(name: str) -> None:
    assert Polynomial(parse_activation(name)).degree == POWERS[name]
    assert parse_activation("poly:0,1,0,-0.5") == (0, 1, 0, -0.5)


def test_inspect_names_the_command() -> None:
    attack = every_attack()["polynomial"]()
    cubic, relu = (
        build_weights_surface(Network({"layers.0.weight": torch.ones(2, 3)}, arch), Knowledge())
        for arch in ("polynomial:3-2-1,coefficients=0/0/0/1", "mlp:3-2-1")
    )
    assert attack.why_not(cubic, Knowledge()) == ""
    assert "residuum identify" in attack.why_applies(cubic)
    assert "not mlp" in attack.why_not(relu, Knowledge())
