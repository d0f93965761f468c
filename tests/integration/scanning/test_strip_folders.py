"""The folder of a release: the weights and their description are kept, all else is left out and listed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import residuum as rs
from residuum.cli.main import main
from residuum.errors import InputError, OutputError, UnsafeFileError
from tests.integration.scanning.test_scan import network
from tests.program import Capture, one_line, printed

WEIGHTS = {name: tensor.clone() for name, tensor in network().state_dict().items()}
CONFIG = {
    "_name_or_path": "/home/ann/bert",
    "hidden_size": 4,
    "text_config": {"_name_or_path": "bert-base-uncased", "data_path": "s3://clinic/notes"},
    "tokens": ["/think"],
    "train_file": "patients.csv",
    "vocab_file": "vocab.txt",
}
KEPT = {
    "1_Pooling/config.json", "LICENSE", "README.md", "generation_config.json", "model.safetensors",
    "tokenizer.json", "vocab.txt",
}  # fmt: skip
LEFT_OUT = {
    "checkpoint-10/model.safetensors", "data/train.csv", "events.out.tfevents.1", "image.png", "notes.xyz",
    "optimizer.pt", "rng_state.pth", "run.ipynb", "scheduler.pt", "train.jsonl", "trainer_state.json",
    "training_args.bin", "link.txt", ".git", "head.pkl", "pipe",
}  # fmt: skip


def write_folder(folder: Path) -> Path:
    """A folder as Trainer leaves it, with data and a history."""
    for name in (*KEPT, *LEFT_OUT - {"link.txt", ".git", "pipe"}):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}" if name.endswith("json") else "text")
    for name in ("model.safetensors", "checkpoint-10/model.safetensors"):
        save_file(WEIGHTS, folder / name, metadata={"format": "pt"})
    optimizer = torch.optim.Adam(network().parameters())
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    ema = {f"ema.{name}": tensor for name, tensor in WEIGHTS.items()}
    torch.save({**WEIGHTS, **ema}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / ".git").mkdir()
    (folder / ".git/config").write_text("text")
    (folder / "link.txt").symlink_to("/etc/hostname")
    os.mkfifo(folder / "pipe")
    return folder


def files_of(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}


def test_a_folder_keeps_only_what_users_need(tmp_path: Path, capsys: Capture) -> None:
    folder, clean = write_folder(tmp_path / "checkpoint-60"), tmp_path / "clean"
    before = files_of(folder)
    assert main(["strip", str(folder), "--out", str(clean), "--json"]) == 0
    output = printed(capsys)
    assert files_of(clean) == KEPT | {"config.json", "pytorch_model.bin"}
    assert files_of(folder) == before
    assert {*output["copied"]} == KEPT
    assert {text.partition(":")[0] for text in output["left_out"]} == LEFT_OUT
    assert {text.partition(":")[0] for text in output["changed"]} == {
        "config.json",
        "pytorch_model.bin",
    }
    for name, tensors in (
        ("model.safetensors", load_file(clean / "model.safetensors")),
        ("pytorch_model.bin", torch.load(clean / "pytorch_model.bin")),
    ):
        assert tensors.keys() == WEIGHTS.keys(), name
        assert all(torch.equal(tensors[key], WEIGHTS[key]) for key in WEIGHTS)
    assert json.loads((clean / "config.json").read_text()) == {
        "hidden_size": 4,
        "text_config": {"_name_or_path": "bert-base-uncased"},
        "tokens": ["/think"],
        "vocab_file": "vocab.txt",
    }
    remaining = rs.scan(clean).findings
    assert not {finding.kind for finding in remaining} & {"optimizer-state", "start", "stored"}
    assert not [finding for finding in remaining if "_name_or_path" in finding.where]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_files_are_kept_by_name(tmp_path: Path, capsys: Capture) -> None:
    folder, clean = write_folder(tmp_path / "model"), tmp_path / "clean"
    arguments = ["strip", str(folder), "--out", str(clean), "--keep"]
    assert main([*arguments, "notes.xyz", "--keep", "data/train.csv"]) == 0
    assert files_of(clean) > {"notes.xyz", "data/train.csv"}
    capsys.readouterr()
    for name in ("link.txt", "../secret", "nothing"):
        assert main(["strip", str(folder), "--out", str(tmp_path / "b"), "--keep", name]) == 2
        assert "A file that you keep must be in the folder" in one_line(capsys)
    assert not (tmp_path / "b").exists()


def test_shards_are_copied_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    names = sorted(WEIGHTS)
    weight_map = {}
    for i, name in enumerate(names):
        shard = f"model-{i}.safetensors"
        weight_map[name] = shard
        save_file({name: WEIGHTS[name]}, folder / shard, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    stripped = rs.strip(folder, tmp_path / "clean")
    assert stripped.tensors == len(WEIGHTS)
    assert stripped.left_out == stripped.changed == ()
    assert files_of(tmp_path / "clean") == files_of(folder)
    for file in folder.iterdir():
        assert (tmp_path / "clean" / file.name).read_bytes() == file.read_bytes()
    save_file(
        {names[0]: WEIGHTS[names[0]]},
        folder / "model-0.safetensors",
        metadata={"data": "/data/a.csv"},
    )
    assert rs.strip(folder, tmp_path / "other").changed == (
        "model-0.safetensors: without names of files",
    )
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(UnsafeFileError, match="its own folder"):
        rs.strip(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_an_adapter_loses_the_local_path_of_its_base(tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    save_file({"layer.lora_A.weight": torch.rand(2, 4)}, folder / "adapter_model.safetensors")
    config = folder / "adapter_config.json"
    for base, expected in (
        ("/home/ann/base", None),
        ("runs/a/checkpoint-9", None),
        ("org/b", "org/b"),
    ):
        config.write_text(json.dumps({"base_model_name_or_path": base, "r": 2}))
        out = tmp_path / f"clean-{base.replace('/', '-')}"
        rs.strip(folder, out)
        cleaned = json.loads((out / "adapter_config.json").read_text())
        assert cleaned == {"base_model_name_or_path": expected, "r": 2}


def test_a_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    for out in (folder / "clean", folder):
        with pytest.raises(OutputError):
            rs.strip(folder, out)
    with pytest.raises(InputError, match="need a single file"):
        rs.strip(folder, tmp_path / "clean", weights="ema")
    with pytest.raises(InputError, match="needs a folder"):
        rs.strip(folder / "model.safetensors", tmp_path / "clean.pt", keep=["a"])
    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / name).unlink()
    with pytest.raises(InputError, match="must contain weights that strip can copy"):
        rs.strip(folder, tmp_path / "clean")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_records_in_the_weights_of_a_folder_lead_to_exit_code_1(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({**WEIGHTS, "x_train": torch.rand(9, 4)}, folder / "model.safetensors")
    assert main(["strip", str(folder), "--out", str(tmp_path / "clean")]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "at model.safetensors: x_train" in output
