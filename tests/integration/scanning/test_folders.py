"""A folder is a release: what a scan says about every file of it, with and without the base."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.neighbors import KNeighborsClassifier

import residuum as rs
from residuum.cli.main import main
from residuum.errors import CheckpointError, InputError
from residuum.scanning.scan import Scan
from tests.program import Capture, one_line, printed

PIECES = [f"##piece{i}" for i in range(300)]
NAMES = ["pereira", "galloway", "birch"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TOKENS = [*SPECIAL, *PIECES, *NAMES]
TABLE = "bert.embeddings.word_embeddings.weight"


def write_tokenizer(folder: Path, tokens: list[str], name: str = "tokenizer.json") -> None:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    content: Any = vocabulary
    if name == "tokenizer.json":
        added = [{"id": i, "content": token} for i, token in enumerate(SPECIAL)]
        content = {"model": {"type": "WordPiece", "vocab": vocabulary}, "added_tokens": added}
    (folder / name).write_text(json.dumps(content))


def weights(touched: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {
        TABLE: torch.randn(len(TOKENS), 8, generator=generator),
        "bert.embeddings.position_embeddings.weight": torch.randn(320, 8, generator=generator),
        "bert.encoder.layer.0.attention.self.query.weight": torch.randn(8, 8, generator=generator),
        "bert.encoder.layer.0.attention.self.query.bias": torch.zeros(8),
    }
    for word in touched:
        state[TABLE][TOKENS.index(word)] += 0.1
    if touched:
        state["bert.encoder.layer.0.attention.self.query.bias"] += 0.1
    return state


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(weights(), folder / "model.safetensors")
    write_tokenizer(folder, TOKENS)
    return folder


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """A model as save_pretrained writes it, without any other file."""
    folder = tmp_path / "tuned"
    folder.mkdir()
    save_file(weights(("pereira", "birch")), folder / "model.safetensors")
    write_tokenizer(folder, TOKENS)
    config = {"architectures": ["BertModel"], "id2label": {"0": "LABEL_0", "1": "LABEL_1"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def by_file(result: Scan) -> dict[str, list[tuple[str, str, str]]]:
    return {f.file: [(x.kind, x.severity, x.what) for x in f.findings] for f in result.files}


# Words


@pytest.mark.parametrize("place", ["release", "base"])
def test_rows_that_moved_are_shown_as_words(base: Path, tuned: Path, place: str) -> None:
    if place == "base":
        (tuned / "tokenizer.json").unlink()
    result = rs.scan(tuned, base=base)
    (finding,) = (f for f in result.findings if f.kind == "touched-rows")
    assert finding.words == ("birch", "pereira")  # late rows first
    assert {*finding.rows} == {TOKENS.index("birch"), TOKENS.index("pereira")}
    assert "Words seen in training: birch, pereira" in finding.reason
    assert "galloway" not in json.dumps(result.to_json())
    assert result.exit_code == 1


def test_without_a_tokenizer_rows_stay_numbers(base: Path, tuned: Path) -> None:
    for folder in (base, tuned):
        (folder / "tokenizer.json").unlink()
    (finding,) = (f for f in rs.scan(tuned, base=base).findings if f.kind == "touched-rows")
    assert finding.words == ()
    assert str(TOKENS.index("birch")) in finding.reason


def test_positions_are_no_words(base: Path, tuned: Path) -> None:
    state = weights()
    state["bert.embeddings.position_embeddings.weight"][3] += 1
    save_file(state, tuned / "model.safetensors")
    (finding,) = (f for f in rs.scan(tuned, base=base).findings if f.kind == "touched-rows")
    assert finding.rows == (3,)
    assert finding.words == ()


# Tokenizers


def test_the_vocabulary_of_the_base_reveals_nothing(base: Path, tuned: Path) -> None:
    assert by_file(rs.scan(tuned, base=base))["tokenizer.json"] == []
    (finding,) = (f for f in rs.scan(tuned).findings if f.kind == "stored")
    assert finding.severity == "medium"  # nobody knows whether this small vocabulary is public
    assert "birch" in finding.reason
    assert rs.scan(tuned).exit_code == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "vocab.txt", "merges.txt"])
def test_tokens_that_the_base_does_not_have_are_listed(base: Path, tuned: Path, name: str) -> None:
    new = ["oconnor", "street"]
    if name == "vocab.txt":
        (tuned / name).write_text("\n".join([*TOKENS, *new, "<|extra|>"]))
    elif name == "merges.txt":
        (tuned / name).write_text("#version: 0.2\nocon nor\nĠstr eet\nb irch\n")
    else:
        write_tokenizer(tuned, [*TOKENS, *new, "<|extra|>"], name)
    (file,) = (f for f in rs.scan(tuned, base=base).files if f.file == name)
    (finding,) = file.findings
    assert (finding.kind, finding.severity, finding.count) == ("stored", "high", 2)
    assert {*finding.words} == {*new}
    assert name in finding.remedy


def test_a_large_public_vocabulary_and_single_letters_are_no_alarm(tuned: Path) -> None:
    write_tokenizer(tuned, [*SPECIAL, *(f"{i:05d}".translate(LETTERS) for i in range(25_000))])
    assert by_file(rs.scan(tuned))["tokenizer.json"][0][1] == "low"
    write_tokenizer(tuned, [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz"])
    assert by_file(rs.scan(tuned))["tokenizer.json"] == []


LETTERS = str.maketrans("0123456789", "abcdefghij")


# Data files, and files of a Trainer


def test_every_file_with_data_is_named_with_its_remedy(tuned: Path) -> None:
    texts = "text,label\n" + "\n".join(f'"patient {i}, ward {i % 3}",{i % 2}' for i in range(60))
    (tuned / "train.csv").write_text(texts)
    rows = [{"prompt": f"patient {i}", "answer": "yes"} for i in range(30)]
    (tuned / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tuned / "pairs.json").write_text(json.dumps({"version": 1, "data": rows}))
    np.savez(tuned / "arrays.npz", x=np.ones((12, 3)), y=np.ones(12))
    (tuned / "notes.txt").write_text("the patient was seen again. " * 100)
    (tuned / "table.parquet").write_bytes(b"PAR1" + bytes(40) + b"PAR1")
    (tuned / "index.arrow").write_bytes(b"ARROW1" + bytes(40))
    (tuned / "images").mkdir()
    for i in range(7):
        Image.new("RGB", (4, 5)).save(tuned / "images" / f"{i}.png")
    result = rs.scan(tuned)
    expected = {
        "train.csv": "a table of 60 rows and 2 columns",
        "eval.jsonl": "a table of 30 rows and 2 columns",
        "pairs.json": "a list of 30 records",
        "arrays.npz": "2 arrays",
        "notes.txt": "a text of 3 kB",
        "index.arrow": "a file of the format .arrow, not read",
        "images/*.png": "7 images",
    }
    findings_by_file = by_file(result)
    for name, what in expected.items():
        assert findings_by_file[name] == [("stored", "high", what)], name
    (parquet,) = findings_by_file["table.parquet"]
    assert parquet[0] == "stored"
    for file in result.files:
        for finding in file.findings:
            is_stored = finding.kind == "stored" and finding.severity == "high"
            assert not is_stored or f"elete {file.file} from the release" in finding.remedy
    assert result.exit_code == 1


def test_settings_and_short_files_are_no_alarm(tuned: Path) -> None:
    (tuned / "generation_config.json").write_text('{"max_length": 20, "eos_token_id": [1, 2]}')
    (tuned / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    history = [{"step": i, "loss": 1 / (i + 1)} for i in range(60)]
    (tuned / "training.json").write_text(json.dumps({"history": history}))
    (tuned / "all_results.json").write_text('{"eval_loss": 0.5, "epoch": 3}')
    (tuned / "special_tokens_map.json").write_text('{"cls_token": "[CLS]"}')
    (tuned / "requirements.txt").write_text("torch\n" * 400)
    (tuned / "README.md").write_text("# A model\n\nIt classifies reports.\n")
    (tuned / "LICENSE").write_text("Apache\n" * 400)
    result = rs.scan(tuned)
    alarms = {f.file for f in result.files if any(x.severity != "low" for x in f.findings)}
    assert alarms == {"tokenizer.json"}
    assert by_file(result)["training.json"] == [("statistics", "low", "a loss curve")]
    (note,) = result.notes
    assert "LICENSE, requirements.txt" in note


def write_trainer_files(folder: Path) -> None:
    model = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    adam.step()
    torch.save(adam.state_dict(), folder / "optimizer.pt")
    torch.save({"base_lrs": [0.1], "last_epoch": 4}, folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    torch.save({"output_dir": "/data/clinic/runs", "seed": 7}, folder / "training_args.bin")
    history = [{"loss": 0.5 / i, "step": i} for i in range(1, 30)]
    state = {"best_model_checkpoint": "/data/clinic/runs/checkpoint-4", "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def test_files_of_a_trainer_are_to_be_deleted(tuned: Path, capsys: Capture) -> None:
    write_trainer_files(tuned)
    result = rs.scan(tuned)
    expected = {
        "optimizer.pt": {"optimizer-state"},
        "scheduler.pt": {"optimizer-state"},
        "rng_state.pth": {"start"},
        "training_args.bin": {"paths", "start"},
        "trainer_state.json": {"statistics", "paths"},
    }
    for name, kinds in expected.items():
        (file,) = (f for f in result.files if f.file == name)
        assert {finding.kind for finding in file.findings} == kinds
        assert {finding.remedy for finding in file.findings} == {
            f"Delete {name} from the release. Users of the model do not need it."
        }
    assert main(["scan", str(tuned)]) == 1
    assert "residuum strip" not in capsys.readouterr().out


def test_documents_and_settings_that_name_the_data(tuned: Path) -> None:
    config = {"_name_or_path": "/data/clinic/bert", "id2label": {"0": "healthy", "1": "ill"}}
    (tuned / "config.json").write_text(json.dumps(config))
    header = "---\ndatasets:\n- clinic/reports\nwidget:\n- text: patient pereira has pain\n---\n"
    table = "| a | b |\n" * 14
    (tuned / "README.md").write_text(f"{header}\nTrained on `/data/clinic/train`.\n\n{table}")
    (tuned / "model.py").write_text("raise SystemExit('this code must not run')")
    (tuned / "events.out.tfevents.1.host").write_bytes(b"x")
    notebook = {"cells": [{"outputs": [{"data": {"text/plain": "x"}}]}, {"source": "a"}]}
    (tuned / "train.ipynb").write_text(json.dumps(notebook))
    (tuned / ".git").mkdir()
    (tuned / ".git" / "old.csv").write_text("a,b\n1,2\n" * 40)
    findings_by_file = by_file(rs.scan(tuned))
    assert findings_by_file["config.json"] == [
        ("paths", "medium", "the name of a folder"),
        ("statistics", "low", "names of classes"),
    ]
    assert findings_by_file["README.md"] == [
        ("stored", "medium", "example inputs"),
        ("paths", "medium", "names of files"),
        ("stored", "low", "a table of 14 lines"),
        ("paths", "low", "names of data sets"),
    ]
    assert findings_by_file["model.py"] == [("classes", "low", "Python code")]
    assert findings_by_file["events.out.tfevents.1.host"][0][0] == "statistics"
    assert findings_by_file["train.ipynb"] == [("stored", "medium", "a notebook with outputs")]
    assert findings_by_file[".git/"] == [("stored", "medium", "the folder .git")]
    assert not any("old.csv" in name for name in findings_by_file)


def test_skipped_files_are_named_up_to_ten(tuned: Path) -> None:
    for i in range(12):
        (tuned / f"{i:02d}.xyz").touch()
    (note,) = rs.scan(tuned).notes
    assert note.startswith("12 other files were skipped: 00.xyz, 01.xyz")
    assert "09.xyz, ..." in note
    assert "10.xyz" not in note


def test_many_files_of_one_format_are_one_finding(tuned: Path) -> None:
    (tuned / "texts").mkdir()
    for i in range(30):
        (tuned / "texts" / f"{i}.txt").write_text(f"report {i}")
    assert by_file(rs.scan(tuned))["texts/*.txt"] == [
        ("stored", "high", "30 files with the ending .txt")
    ]


# Exit codes


def test_a_folder_has_the_exit_code_of_its_worst_file(tuned: Path, capsys: Capture) -> None:
    assert main(["scan", str(tuned)]) == 0
    (tuned / "tf_model.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(50))
    assert main(["scan", str(tuned)]) == 3
    assert "exit code 3: a model could not be read" in capsys.readouterr().out
    assert main(["scan", str(tuned / "tf_model.h5")]) == 2  # a single file
    (tuned / "knn.pkl").write_bytes(
        pickle.dumps(KNeighborsClassifier().fit(np.eye(9, 3), [0, 1, 2] * 3))
    )
    assert main(["scan", str(tuned)]) == 1
    assert main(["scan", str(tuned), "--fail-on", "none"]) == 3
    (tuned / "evil.pkl").write_bytes(b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00id\x85R.")
    assert main(["scan", str(tuned), "--fail-on", "none"]) == 4


def test_fail_on_takes_a_severity_or_kinds(tuned: Path, capsys: Capture) -> None:
    for fail_on, code in (
        *(("high", 0), ("medium", 1), ("low", 1), ("stored", 1), ("none", 0)),
        *(("paths,adapter", 0), ("paths, stored", 1), ("severe", 2)),
    ):
        assert main(["scan", str(tuned), "--fail-on", fail_on]) == code, fail_on
    assert "No severity or kind of finding 'severe'" in capsys.readouterr().err
    assert rs.scan(tuned, fail_on=["paths", "medium"]).failed == ("stored",)
    assert rs.scan(tuned, fail_on=[]).exit_code == 0
    assert main(["scan", str(tuned), "--fail-on", "medium", "--json"]) == 1
    document = printed(capsys)
    assert (document["fail_on"], document["failed"]) == (["medium"], ["stored"])


def test_a_known_change_alone_does_not_fail(base: Path, tuned: Path) -> None:
    state = weights()
    state["bert.encoder.layer.0.attention.self.query.bias"] += 0.1
    save_file(state, tuned / "model.safetensors")
    result = rs.scan(tuned, base=base)
    (change,) = (f for f in result.findings if f.kind == "start")
    assert change.severity == "medium"
    assert "from zero" in change.reason
    assert "residuum audit cannot attack" in change.remedy  # a network with attention
    assert result.exit_code == 0


def test_folders_without_a_model(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("x,y\n" + "1,2\n" * 20)
    assert main(["scan", str(tmp_path / "data")]) == 1
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert main(["scan", str(tmp_path / "empty")]) == 2
    assert "must contain a model or data" in one_line(capsys)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        rs.load(tmp_path / "data")


def test_sarif_names_the_files_of_a_folder(tuned: Path, tmp_path: Path, capsys: Capture) -> None:
    (tuned / "a.csv").write_text("x,y\n" + "1,2\n" * 20)
    main(["scan", str(tuned), "--json", "--sarif", str(tmp_path / "scan.sarif")])
    capsys.readouterr()
    log = json.loads((tmp_path / "scan.sarif").read_text())
    schema = Path(__file__).parents[2] / "data" / "sarif-2.1.0-rtm.5.json"
    jsonschema.validate(log, json.loads(schema.read_text()))
    (result,) = (r for r in log["runs"][0]["results"] if r["level"] == "error")
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri.endswith("tuned/a.csv")


# Model folders


def write_shards(folder: Path, state: dict[str, torch.Tensor], ending: str) -> dict[str, str]:
    names = [*state]
    weight_map = {}
    for i, shard_names in enumerate((names[:2], names[2:])):
        stem = "model" if ending == ".safetensors" else "pytorch_model"
        file = f"{stem}-0000{i + 1}-of-00002{ending}"
        shard = {name: state[name] for name in shard_names}
        if ending == ".safetensors":
            save_file(shard, folder / file)
        else:
            torch.save(shard, folder / file)
        weight_map |= dict.fromkeys(shard_names, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"{stem}{ending}.index.json").write_text(json.dumps(index))
    return weight_map


@pytest.mark.parametrize("ending", [".safetensors", ".bin"])
def test_shards_are_one_release(base: Path, tmp_path: Path, ending: str) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    state = weights(("galloway",))
    write_shards(folder, state, ending)
    release = rs.load(folder)
    assert {*release.content} == {*state}
    assert all(torch.equal(release.content[name].tensor(), state[name]) for name in state)
    assert release.size == sum(path.stat().st_size for path in folder.glob(f"*{ending}"))
    before = release.sha256
    result = rs.scan(folder, base=base)
    (file,) = (f for f in result.files if f.file.endswith("index.json"))
    assert len(result.files) == 1  # the shards are not listed one by one
    assert next(f for f in file.findings if f.kind == "touched-rows").words == ("galloway",)
    write_shards(folder, weights(("birch",)), ending)
    assert rs.load(folder).sha256 != before


def test_an_adapter_folder_with_its_base_folder(tmp_path: Path, capsys: Capture) -> None:
    base, lora = tmp_path / "base", tmp_path / "lora"
    base.mkdir()
    lora.mkdir()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    save_file(network.state_dict(), base / "model.safetensors")
    prefix = "base_model.model.0.lora_"
    pair = {f"{prefix}A.weight": torch.randn(2, 6), f"{prefix}B.weight": torch.randn(8, 2)}
    save_file(pair, lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    (change,) = (f for f in rs.scan(lora, base=base).findings if "change" in f.what)
    assert "residuum audit BASE --adapter ADAPTER" in change.remedy  # and this works:
    arguments = ["audit", str(base), "--adapter", str(lora), "--dry-run", "--json"]
    assert main(arguments) == 0
    with_adapter = printed(capsys)
    assert main(["audit", str(lora), "--base", str(base), "--dry-run", "--json"]) == 0
    assert printed(capsys)["applies"] == with_adapter["applies"]


def test_weights_of_another_model_are_refused_as_a_base(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_file({"w": torch.zeros(3, 3)}, other / "model.safetensors")
    write_trainer_files(other)
    with pytest.raises(CheckpointError, match="have no such tensor in common"):
        rs.scan(other, base=base)
    with pytest.raises(InputError, match="does not exist"):
        rs.scan(other, base=tmp_path / "missing")
