"""The weights of a checkpoint alone: every bit of them, nothing else, and never half a file."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import residuum as rs
from residuum.cli.main import main
from residuum.errors import CheckpointError, InputError, OutputError
from residuum.io.release import open_release
from residuum.scanning.findings import findings
from tests.integration.scanning.test_scan import checkpoints, network
from tests.program import Capture, listing, one_line, printed


class TrainingArguments:
    """The settings of a training run, as a trainer pickles them."""

    def __init__(self) -> None:
        self.output_dir, self.seed = "/home/ann/runs", 3


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN and the sign of zero included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*bits)


@pytest.mark.parametrize("name", ["plain", "lightning", "arguments", "bare"])
def test_what_is_left_is_the_weights_bit_for_bit(tmp_path: Path, name: str) -> None:
    for suffix in [".pt", ".safetensors"]:
        for zipped in [True, False]:
            content = checkpoints()[name]
            torch.save(content, tmp_path / "full.pt", _use_new_zipfile_serialization=zipped)
            out = tmp_path / f"clean-{zipped}{suffix}"
            stripped = rs.strip(tmp_path / "full.pt", out)
            wrappers = ("model_state_dict", "state_dict", "model")
            weights = next((content[k] for k in wrappers if k in content), content)
            tensors_left = {n: b.tensor() for n, b in open_release(out).content.items()}
            assert {*tensors_left} == {*weights}
            assert all(equal_bits(tensors_left[n], t) for n, t in weights.items())
            assert {finding.kind for finding in findings(open_release(out))} == {"statistics"}
            assert {finding.kind for finding in stripped.remaining} == {"statistics"}
            assert bool(stripped.dropped) == (name != "bare")
            if suffix == ".pt":
                assert {*torch.load(out, weights_only=True)} == {*weights}


def test_odd_bits_survive(tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    content = {"a": odd, "b": odd.bfloat16(), "c": torch.arange(6).reshape(2, 3).T}
    torch.save(content, tmp_path / "m.pt")
    for out in (tmp_path / "c.pt", tmp_path / "c.safetensors"):
        rs.strip(tmp_path / "m.pt", out)
        content_left = open_release(out).content
        assert all(equal_bits(content_left[n].tensor(), t) for n, t in content.items())


def test_safetensors_keep_what_readers_need_and_lose_the_rest(tmp_path: Path) -> None:
    state = {**network().state_dict(), "ema.0.weight": torch.zeros(6, 4)}
    metadata = {"format": "pt", "dataset": "/data/patients.csv", "seed": "1"}
    save_file(state, tmp_path / "m.safetensors", metadata=metadata)
    rs.strip(tmp_path / "m.safetensors", tmp_path / "c.safetensors")
    with safe_open(tmp_path / "c.safetensors", framework="pt") as archive:
        assert archive.metadata() == {"format": "pt"}
        assert {*archive.keys()} == {*network().state_dict()}


def test_two_networks_in_one_file_stay_two(tmp_path: Path) -> None:
    checkpoints = {"generator": {"w": torch.randn(2)}, "critic": {"w": torch.randn(3)}, "epoch": 3}
    torch.save(checkpoints, tmp_path / "gan.pt")
    rs.strip(tmp_path / "gan.pt", tmp_path / "c.pt")
    checkpoint = torch.load(tmp_path / "c.pt", weights_only=True)
    assert {*checkpoint} == {"generator", "critic"}
    assert torch.equal(checkpoint["critic"]["w"], checkpoints["critic"]["w"])  # type: ignore[index]
    assert main(["strip", str(tmp_path / "gan.pt"), "--out", str(tmp_path / "c.safetensors")]) == 2


def test_nothing_is_overwritten(tmp_path: Path, capsys: Capture) -> None:
    torch.save(checkpoints()["plain"], tmp_path / "m.pt")
    before = (tmp_path / "m.pt").read_bytes()
    assert main(["strip", str(tmp_path / "m.pt"), "--out", str(tmp_path / "m.pt")]) == 2
    assert "exists already" in one_line(capsys)
    (tmp_path / "link.pt").symlink_to(tmp_path / "nowhere.pt")
    with pytest.raises(OutputError):
        rs.strip(tmp_path / "m.pt", tmp_path / "link.pt")
    assert (tmp_path / "m.pt").read_bytes() == before
    assert listing(tmp_path) == ["link.pt", "m.pt"]


@pytest.mark.parametrize(
    "place", [(os, "fsync"), (os, "replace"), (Path, "rename")], ids=lambda place: place[1]
)
def test_an_interrupted_strip_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    torch.save(checkpoints()["plain"], tmp_path / "m.pt")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        rs.strip(tmp_path / "m.pt", tmp_path / "c.pt")
    assert listing(tmp_path) == ["m.pt"]


def test_a_result_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(checkpoints()["plain"], tmp_path / "m.pt")
    write = torch.save

    def write_less(tensors: dict[str, Any], *arguments: Any, **options: Any) -> None:
        write(dict([*tensors.items()][:-1]), *arguments, **options)

    monkeypatch.setattr(torch, "save", write_less)
    with pytest.raises(OutputError, match="some weights differ"):
        rs.strip(tmp_path / "m.pt", tmp_path / "c.pt")
    assert listing(tmp_path) == ["m.pt"]


def test_a_pickle_is_left_alone_and_the_lines_to_run_are_printed(
    tmp_path: Path, capsys: Capture
) -> None:
    from tests.estimators import fitted

    model = fitted()["adam"]
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(model))
    arguments = ["strip", str(tmp_path / "m.pkl"), "--out", str(tmp_path / "c.pkl")]
    assert main(arguments) == 0
    script = capsys.readouterr().out
    assert not (tmp_path / "c.pkl").exists()
    assert main([*arguments, "--json"]) == 0
    assert printed(capsys)["script"].strip() == script.strip()
    assert 'remove(model, "_optimizer")' in script
    exec(script, {})
    findings_left = findings(open_release(tmp_path / "c.pkl"))
    assert not {finding.kind for finding in findings_left} & {"optimizer-state", "start"}
    loaded = pickle.loads((tmp_path / "c.pkl").read_bytes())
    x = [[0.1, 0.2, 0.3, 0.4, 0.5]]
    assert (loaded.predict_proba(x) == model.predict_proba(x)).all()
    with pytest.raises(InputError, match=r"needs a file of torch.save or safetensors"):
        rs.strip(tmp_path / "m.pkl", tmp_path / "c2.pkl", weights="ema")


# Files of a training folder that hold no weights, and what strip must say about each.
WITHOUT_WEIGHTS = {
    "optimizer": (lambda: checkpoints()["optimizer"], "only optimizer state"),
    "scheduler": (lambda: {"last_epoch": 3, "base_lrs": [0.1]}, "no tensors"),
    "generators": (
        lambda: {"python": (3, (1, 2), None), "cpu": torch.random.get_rng_state()},
        "only states of random generators",
    ),
    "settings": (lambda: TrainingArguments(), "only an object of the class TrainingArguments"),
}


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_a_file_without_weights_should_be_deleted(tmp_path: Path, name: str) -> None:
    make, expected = WITHOUT_WEIGHTS[name]
    torch.save(make(), tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=expected) as refusal:
        rs.strip(tmp_path / "m.pt", tmp_path / "c.pt")
    assert "Delete this file from the release" in refusal.value.remedy
    assert listing(tmp_path) == ["m.pt"]


def test_averaged_weights_are_chosen_by_their_place(tmp_path: Path, capsys: Capture) -> None:
    weights, average = network().state_dict(), {"w": torch.arange(3.0)}
    file, out = tmp_path / "m.pt", tmp_path / "c.pt"
    torch.save({"model": weights, "ema": {"module": average, "decay": 0.99}}, file)
    assert main(["strip", str(file), "--out", str(out), "--weights", "ema"]) == 0
    assert torch.equal(torch.load(out)["w"], average["w"])
    rs.strip(file, tmp_path / "model.pt")
    assert {*torch.load(tmp_path / "model.pt")} == {*weights}
    with pytest.raises(CheckpointError, match="no state dict at 'swa'"):
        rs.strip(file, tmp_path / "d.pt", weights="swa")
    torch.save({"ema": {"module": average}}, tmp_path / "average.pt")
    capsys.readouterr()
    assert main(["strip", str(tmp_path / "average.pt"), "--out", str(tmp_path / "d.pt")]) == 2
    assert "add --weights ema" in one_line(capsys)
    flat = {**weights, "ema.w": average["w"]}
    save_file(flat, tmp_path / "m.safetensors")
    rs.strip(tmp_path / "m.safetensors", tmp_path / "c.safetensors", weights="ema")
    assert {*open_release(tmp_path / "c.safetensors").content} == {"w"}


def test_records_in_the_state_dict_are_named_and_dropped_on_request(
    tmp_path: Path, capsys: Capture
) -> None:
    weights = {**network().state_dict(), "memory.x_train": torch.rand(9, 4)}
    file, out = tmp_path / "m.pt", tmp_path / "c.pt"
    torch.save({"model": weights, "args": {"lr": 0.1}}, file)
    assert main(["strip", str(file), "--out", str(out)]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "--drop memory.x_train" in output
    assert "a finding of severity high remains" in output
    assert {*torch.load(out)} == {*weights}
    for place in ("memory.x_train", "model.memory.x_train"):  # as strip and as scan print it
        dropped_out = tmp_path / f"{place}.pt"
        arguments = ["strip", str(file), "--out", str(dropped_out), "--drop", place]
        assert main(arguments) == 0
        assert {*torch.load(dropped_out)} == {*network().state_dict()}
    with pytest.raises(InputError, match="no tensor 'weight'"):
        rs.strip(file, tmp_path / "d.pt", drop=["weight"])


def test_parameters_with_names_of_moments_are_weights(tmp_path: Path) -> None:
    weights = {"layer.mu": torch.rand(3), "layer.nu": torch.rand(3), "trace": torch.rand(2)}
    torch.save({"model": weights}, tmp_path / "m.pt")
    rs.strip(tmp_path / "m.pt", tmp_path / "c.pt")
    assert {*torch.load(tmp_path / "c.pt")} == {*weights}


def test_tensors_that_cannot_be_copied_are_refused(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8)
    for tensor, what in ((quantized, "quantized"), (torch.eye(2).to_sparse(), "sparse")):
        torch.save({"model": {"a": torch.rand(2), "b": tensor}}, tmp_path / "m.pt")
        with pytest.raises(CheckpointError, match=f"'model.b' is a {what} tensor"):
            rs.strip(tmp_path / "m.pt", tmp_path / "c.pt")


def test_what_cannot_be_stripped_is_refused_with_advice(tmp_path: Path) -> None:
    torch.save(network(), tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match="state_dict"):
        rs.strip(tmp_path / "whole.pt", tmp_path / "c.pt")
    assert listing(tmp_path) == ["whole.pt"]


def test_json_names_what_was_left_out(tmp_path: Path, capsys: Capture) -> None:
    torch.save(checkpoints()["plain"], tmp_path / "m.pt")
    out = tmp_path / "c.pt"
    assert main(["strip", str(tmp_path / "m.pt"), "--out", str(out), "--json"]) == 0
    output = printed(capsys)
    assert output["tensors"] == len(network().state_dict())
    assert output["bytes"] == out.stat().st_size
    assert {finding["kind"] for finding in output["dropped"]} == {"optimizer-state"}
