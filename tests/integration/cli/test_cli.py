"""The command line: end to end, exit codes, one-line errors, nothing half written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import residuum
from residuum.attacks import every_attack
from residuum.cli.main import COMMANDS, app, main
from residuum.cli.options import option_name
from residuum.io.checkpoints import load_checkpoint
from residuum.records import Dataset, same
from residuum.records.rundir import sha256
from residuum.settings import MODELS, PRESETS
from tests.documents import ROOT, blocks, command_lines, ignore_the_clock
from tests.integration.cli.test_demo import shrink
from tests.program import arguments_of, interrupt, listing, one_line, options_of, start

TRAIN = ["train", "--data", "digits", "--n", "10", "--arch", "mlp:64-8-1", "--steps", "60"]
LAYOUT = [
    ".gitignore",
    ".lock",
    "init.safetensors",
    "model.safetensors",
    "private",
    "private/holdout.npz",
    "private/state.safetensors",
    "private/train.npz",
    "training.json",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained network in its directory."""
    out = tmp_path_factory.mktemp("cli") / "run"
    assert main([*TRAIN, "--out", str(out), "--quiet"]) == 0
    return out


# What commands do


def test_a_training_directory(run: Path) -> None:
    assert listing(run) == LAYOUT
    assert (run / ".gitignore").read_text() == "*\n"
    protocol = json.loads((run / "training.json").read_text())
    assert protocol["status"] == "steps"
    assert protocol["steps"] == 60
    assert protocol["config"]["method"] == "margin"
    assert protocol["arch"] == "mlp:64-8-1"
    assert protocol["train_accuracy"] == 1.0
    assert protocol["history"][-1]["step"] == 60
    hashes = {
        name: sha256(run / name) for name in LAYOUT if name.endswith((".npz", "l.safetensors"))
    }
    assert hashes.items() <= protocol["sha256"].items()
    assert len(protocol["sha256"]) == 4
    train, holdout = (
        Dataset.from_npz(run / "private" / f"{split_name}.npz")
        for split_name in ("train", "holdout")
    )
    assert train.shape == holdout.shape == (1, 8, 8)
    assert len(train) == 10
    assert set(train.y.tolist()) == {-1, 1}
    assert train.mean is not None
    assert float(train.images.min()) >= 0
    released, start = load_checkpoint(run), load_checkpoint(run / "init.safetensors")
    assert released.input_shape == (1, 8, 8)
    assert (released.task, released.labels) == ("binary", train.classes)
    assert not same(released.theta, start.theta)
    assert float(start.theta["layers.0.weight"].std()) == pytest.approx(1e-4, rel=0.2)


def test_released_weights_hold_nothing_private(run: Path) -> None:
    content = (run / "model.safetensors").read_bytes()
    tensors = load_file(run / "model.safetensors")
    assert sorted(tensors) == ["layers.0.bias", "layers.0.weight", "layers.1.weight"]
    with safe_open(run / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert sorted(metadata) == [
        "architecture",
        "assumptions",
        "format",
        "input_shape",
        "labels",
        "residuum_format",
        "task",
    ]
    header = int.from_bytes(content[:8], "little")
    assert len(content) == 8 + header + sum(t.numel() * t.element_size() for t in tensors.values())
    private = np.load(run / "private" / "train.npz")
    for sample in private["x"]:
        for dtype in (np.float64, np.float32):
            assert sample.astype(dtype).tobytes() not in content
    assert private["mean"].tobytes() not in content


def test_the_attacks_that_apply_are_listed_by_a_dry_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(*arguments: str) -> dict[str, tuple[str, str]]:
        assert (
            main(["audit", str(run / "model.safetensors"), "--dry-run", "--json", *arguments]) == 0
        )
        rows_listed = json.loads(capsys.readouterr().out)["applies"]
        return {row["what"]: (row["status"], row["reason"]) for row in rows_listed}

    alone, started = rows(), rows("--init", str(run / "init.safetensors"))
    assert {*every_attack()} <= {*alone}
    assert alone["binary-kkt"][0] == started["ntk"][0] == "to be tried"
    assert alone["ntk"][0] == alone["multiclass-kkt"][0] == "not tried"
    assert "--init" in alone["ntk"][1]


CERTIFICATE = [
    "residual_plain",
    "residual_clarke",
    "eps",
    "delta",
    "margin",
    "normalized_margin",
    "homogeneity_order",
    "kinks",
    "layers",
    "multipliers",
    "status",
]
BESIDE = [
    "task",
    "samples",
    "kinks_freed",
    "balance",
    "identity",
    "condition",
    "theta_norm",
    "notes",
]


def test_certify(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(run / "private" / "train.npz")
    command = ["certify", str(run / "model.safetensors"), "--data", data, "--json"]
    assert main([*command, "--out", str(tmp_path / "c")]) == 0
    output = json.loads(capsys.readouterr().out)
    assert sorted(output) == sorted(CERTIFICATE + BESIDE)
    assert sorted(output["multipliers"]) == ["active", "max", "sum"]
    assert [sorted(layer) for layer in output["layers"]] == [["name", "residual"]] * 2
    assert output["residual_clarke"] <= output["residual_plain"] < 1
    assert output["eps"] == pytest.approx(
        output["residual_plain"] * output["theta_norm"], rel=1e-12
    )
    assert output["margin"] > 0
    assert listing(tmp_path / "c") == ["certificate.json"]
    assert json.loads((tmp_path / "c" / "certificate.json").read_text()) == output
    for more in ([], ["--data", str(run)]):  # a training directory names its own samples
        assert main(["certify", str(run), *more, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == output
    assert main(["certify", str(run)]) == 0
    text = capsys.readouterr().out
    for words in (
        "KKT residual, plain",
        "KKT residual, Clarke",
        "margin",
        "multipliers",
        output["status"],
    ):
        assert words in text


def test_multiclass_and_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arch, more, task in (
        ("mlp:64-8-10", ["--method", "sgd", "--batch", "5", "--lr", "0.1"], "multiclass"),
        (
            "mlp:64-8-1",
            ["--task", "regression", "--method", "gd", "--weight-decay", "0.01"],
            "regression",
        ),
    ):
        out = tmp_path / task
        command = ["train", "--data", "digits", "--n", "20", "--arch", arch, "--steps", "30", *more]
        assert main([*command, "--out", str(out), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["task"] == task
        assert main(["certify", str(out), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["task"] == task


def test_the_command_of_the_readme_needs_x_and_y_alone(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line for block in blocks(ROOT / "README.md") for line in command_lines(block)]
    audit = next(line for line in lines if line[0] == "audit")
    monkeypatch.chdir(tmp_path)
    ignore_the_clock(monkeypatch)
    (tmp_path / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    for split_name, name in (("train", "train"), ("holdout", "test")):
        arrays = np.load(run / "private" / f"{split_name}.npz")
        np.savez(tmp_path / f"{name}.npz", x=arrays["x"], y=arrays["y"])
    assert main([*audit, "--steps", "50", "--effort", "quick", "--quiet"]) in (0, 1, 3)
    assert (tmp_path / "runs" / "a" / "report.html").is_file()


def test_the_same_command_gives_the_same_weights(run: Path, tmp_path: Path) -> None:
    assert main([*TRAIN, "--out", str(tmp_path / "again"), "--quiet"]) == 0
    for name in ("model.safetensors", "init.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (run / name).read_bytes()


def test_a_finished_run_is_kept_and_made_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main([*TRAIN, "--out", str(out), "--quiet"]) == 0
    before = (out / "model.safetensors").read_bytes()
    assert main([*TRAIN, "--out", str(out), "--quiet"]) == 0
    assert (out / "model.safetensors").read_bytes() == before
    assert main([*TRAIN[:-1], "80", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 80
    assert main([*TRAIN[:-1], "80", "--out", str(tmp_path / "whole"), "--quiet"]) == 0
    weights_whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() == weights_whole != before
    assert main([*TRAIN, "--seed", "1", "--out", str(out)]) == 2
    assert (out / "model.safetensors").read_bytes() == weights_whole


def test_samples_that_are_not_trained_on_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=rng.normal(size=(100, 6)), y=np.arange(100) % 5 // 3)
    command = ["train", "--data", str(tmp_path / "own.npz"), "--arch", "mlp:6-4-1", "--steps", "3"]
    assert main([*command, "--out", str(tmp_path / "a")]) == 0
    output = capsys.readouterr().out
    assert "note: the network was trained on 40 of 100 samples" in output
    assert "60 are held out or unused. --n sets" in output
    assert main([*command, "--out", str(tmp_path / "b"), "--n", "20"]) == 0
    assert "note:" not in capsys.readouterr().out  # asked for
    assert main([*command, "--out", str(tmp_path / "c"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["samples"], document["available_samples"]) == (40, 100)


def test_training_leaves_the_files_of_others_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("notes.txt", "model.safetensors", "private/keys"):
        out = tmp_path / name.replace("/", "-")
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text("mine")
        before = listing(out)
        assert main([*TRAIN, "--out", str(out)]) == 2
        assert "holds other files" in one_line(capsys)
        assert listing(out) == before


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


# Help and output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    output = capsys.readouterr().out
    assert "--json" in output
    assert "--quiet" in output
    assert not re.search(r"\w-\n", output)  # no name is broken at its hyphens
    _, text_before, examples = output.partition("Examples:")
    assert text_before
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    assert lines
    assert lines[0].startswith(f"residuum {name}")
    for line in " ".join(lines).split("residuum ")[1:]:
        words = line.split()
        subcommand = words[1:2] if words[0] == "attack" and words[1] in (*MODELS, "fill") else []
        options = {word for word in words if word.startswith("--")}
        assert options <= options_of(name, *subcommand)


def test_every_option_has_help_a_group_and_says_what_it_takes() -> None:
    wrong = []
    groups = {"Basic", "Attacker knowledge", "Settings of the attack", "Training", "Expert"}
    for command in [*((name,) for name in COMMANDS), *(("attack", name) for name in MODELS)]:
        for argument in arguments_of(*command):
            if not argument.show:
                continue
            name, text = " ".join((*command, argument.name)), argument.parameter.help or ""
            wrong += [] if text.endswith(".") else [f"{name}: no help"]
            titles = {group.name for group in argument.parameter.group or ()}
            if argument.name.startswith("-"):
                wrong += [] if titles <= groups else [f"{name}: {titles}"]
    assert wrong == []


def test_completion_offers_what_can_be_chosen() -> None:
    assert arguments_of("attack", "kkt")["--optimizer"].get_choices() == ("adam", "sgd")
    assert arguments_of("attack")["--preset"].get_choices() == (*PRESETS,)
    script = app.generate_completion(shell="bash")
    assert '("adam" "sgd")' in script
    for name in (*COMMANDS, *MODELS):
        assert name in script
    done = subprocess.run(
        [sys.executable, "-m", "residuum", "__complete", "audit", "--attacks", ""],
        capture_output=True,
        text=True,
    )
    assert {*MODELS} <= {*done.stdout.split()}


def test_help_is_light() -> None:
    code = (
        "import sys; from residuum.cli.main import main; main(['--help']);"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'kornia', 'pydantic', 'matplotlib'};"
        "sys.exit(str(sorted(heavy & sys.modules.keys())) if heavy & sys.modules.keys() else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for name, words in COMMANDS.items():
        assert any(f" {name} " in line and words in line for line in lines)


def test_help_of_an_attack_needs_no_torch_and_shows_no_setting_of_another_attack() -> None:
    code = (
        "import sys; from residuum.cli.main import main; from residuum.settings import MODELS;"
        "codes = [main(['attack', name, '--help']) for name in MODELS];"
        "sys.exit(str(codes) if any(codes) or 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    all_options = {
        option_name(setting) for model in MODELS.values() for setting in model.model_fields
    }
    for name, model in MODELS.items():
        own_options = {option_name(setting) for setting in model.model_fields}
        assert options_of("attack", name) & all_options == own_options, name
    assert "--rivals" in options_of("attack", "kkt")
    assert "--gradients" not in options_of("attack", "kkt")
    assert options_of("attack") == options_of("attack", "auto")


def test_quiet_prints_nothing(
    run: Path, tmp_path: Path, small_demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        [*TRAIN, "--out", str(tmp_path / "q")],
        ["scan", str(run), "--fail-on", "none"],  # the folder holds the training samples
        ["certify", str(run)],
        ["demo", "--out", str(tmp_path / "d")],
    ):
        assert main([*command, "--quiet"]) == 0
        assert capsys.readouterr() == ("", "")


def test_json_is_all_that_is_printed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        [*TRAIN, "--out", str(tmp_path / "j")],
        ["scan", str(run), "--fail-on", "none"],  # the folder holds the training samples
        ["certify", str(run)],
    ):
        assert main([*command, "--json"]) == 0
        out, err = capsys.readouterr()
        assert isinstance(json.loads(out), dict)
        assert err == ""
    assert main(["scan", str(tmp_path / "gone"), "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": err.strip().removeprefix("residuum: "), "exit_code": 2}


def test_the_verbose_version_is_what_a_bug_report_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESIDUUM_DATA", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["--version", "--verbose"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == residuum_version()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]
    versions = dict(row for row in rows if len(row) == 2)
    assert versions["torch"] == version("torch")
    assert versions["device"].startswith(("cpu", "cuda"))
    assert versions["self-test"].startswith("one attack step takes")
    assert versions["data digits"].startswith("found")
    assert not versions["data mnist"].startswith("found")
    assert {name for name in versions if name.startswith("extra ")} == {
        f"extra {name}" for name in ("cluster", "dp", "onnx", "trees")
    }


def test_verbose_belongs_to_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--verbose"], ["--verbose", "scan", "m.pt"]):
        assert main(arguments) == 2
        assert "residuum --version --verbose" in one_line(capsys)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == residuum_version() + "\n"
    assert main([]) == 0
    assert "Usage: residuum" in capsys.readouterr().out


def residuum_version() -> str:
    return version(residuum.__name__)


# Bad input: files


class Payload:
    """Would leave a mark if it were unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def disallowed_global(path: Path) -> None:
    torch.save({"w": torch.ones(1, 64), "extra": Payload()}, path)


def pickled_module(path: Path) -> None:
    torch.save(nn.Linear(64, 1), path)


def zip_bomb(path: Path) -> None:
    torch.save({"w": torch.ones(1, 64)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, bytes(2 * 10**7) if name.endswith("data/0") else content)
    assert path.stat().st_size < 10**5


def oversized_tensor(path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(10**5, 10**4)}, path)


def truncated(path: Path) -> None:
    torch.save({"w": torch.ones(1, 64)}, path)
    path.write_bytes(path.read_bytes()[:-200])


def truncated_safetensors(path: Path) -> None:
    save_file({"w": torch.ones(1, 64)}, path)
    path.write_bytes(path.read_bytes()[:-10])


def nan_weights(path: Path) -> None:
    torch.save({"w": torch.full((1, 64), float("nan"))}, path)


def adapter(path: Path) -> None:
    torch.save({"fc.lora_A.weight": torch.ones(4, 64), "fc.lora_B.weight": torch.ones(8, 4)}, path)


def no_mlp(path: Path) -> None:
    torch.save({"a": torch.ones(3, 64), "b": torch.ones(5, 7)}, path)


def _data(save: Callable[..., None], path: Path) -> None:
    with path.open("wb") as stream:  # numpy would add a suffix to a path
        save(stream, x=np.ones((4, 64)), y=np.array([0, 1, 0, 1]))


BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "disallowed global": (disallowed_global, 4, "Do not load this file"),
    "pickled module": (pickled_module, 2, "torch.save(model.state_dict(), path)"),
    "zip bomb": (zip_bomb, 4, ""),
    "oversized tensor": (oversized_tensor, 4, ".clone()"),
    "truncated": (truncated, 2, ""),
    "truncated safetensors": (truncated_safetensors, 2, ""),
    "NaN weights": (nan_weights, 2, "earlier checkpoint"),
    "not a network": (no_mlp, 2, "no chain of layers"),
    "adapter": (adapter, 2, "merge_and_unload()"),
    "data": (lambda path: _data(np.savez, path), 2, "Pass an archive of samples with --data"),
    "packed data": (
        lambda path: _data(np.savez_compressed, path),
        2,
        "Pass an archive of samples with --data",
    ),
    "missing": (lambda path: None, 2, "Check the path"),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoints(
    name: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, code, remedy = BAD_CHECKPOINTS[name]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "m.pt"
    write(path)
    data = str(run / "private" / "train.npz")
    for command in (
        ["attack", str(path), "--dry-run"],
        ["certify", str(path), "--data", data, "--out", str(tmp_path / "out")],
    ):
        assert main(command) == code
        assert remedy in one_line(capsys)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "ran").exists()


def test_a_wrong_architecture(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arch in ("mlp:64-9-1", "mlp:64-8-2", "mlp", "mpl:64-8-1", "convnet:1x8x8-4-1"):
        assert main(["attack", str(run), "--dry-run", "--arch", arch]) == 2
        one_line(capsys)


# Bad input: data

X, Y = np.random.default_rng(0).normal(size=(6, 64)), np.array([0, 1] * 3)
BAD_DATA: dict[str, dict[str, Any] | bytes | None] = {
    "single class": {"x": X, "y": np.zeros(6)},
    "empty": {"x": np.zeros((0, 64)), "y": np.zeros(0)},
    "wrong width": {"x": X[:, :63], "y": Y},
    "unequal lengths": {"x": X, "y": Y[:4]},
    "no labels": {"x": X},
    "a vector": {"x": X[:, 0], "y": Y},
    "NaN": {"x": np.full((6, 64), np.nan), "y": Y},
    "objects": {"x": np.array([{}] * 6), "y": Y},
    "truncated": b"PK\x03\x04" + bytes(50),
    "text": b"x,y\n1,2\n",
    "missing": None,
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data(name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, content = tmp_path / "d.npz", BAD_DATA[name]
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, **content)
    out = tmp_path / "out"
    train = ["train", "--data", str(path), "--arch", "mlp:64-8-1", "--steps", "5"]
    for command in (train, ["certify", str(run), "--data", str(path)]):
        assert main([*command, "--out", str(out)]) == 2
        one_line(capsys)
        assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "digitz"], "Did you mean 'digits'?"),
        (["--data", "no/such.npz"], "A data file must exist"),
        (["--data", "mnist", "--data-root", "/nonexistent"], ""),
        (["--n", "11"], "Use n=10"),
        (["--n", "99999"], "Use n=1782"),
        (["--n", "0"], ""),
        (["--n", "100000"], ""),
        (["--holdout", "0"], ""),
        (["--arch", "mlp:63-8-1"], "shape that the network takes as input"),
        (
            ["--arch", "mlp:64"],
            "Example: --arch mlp:784-1000-1000-1, convnet:1x8x8-16-32-1 or poly",
        ),
        (["--arch", "conv:1x8x8-4-1"], "convnet:1x8x8-16-32-1"),
        (["--arch", "mlp:64-8-1,bias=som"], ""),
        (["--method", "adam"], "Known: gd, margin, sgd"),
        (["--method", "sgd"], "--batch"),
        (["--method", "gd", "--weight-decay", "nan"], "finite"),
        (["--method", "gd", "--loss", "cross_entropy"], "Use one of"),
        (["--loss", "squared"], "--method gd"),
        (["--task", "multiclass"], "--task binary"),
        (["--task", "ternary"], "--task cannot be 'ternary'"),
        (["--lr", "0"], "--lr must be positive; got 0.0. The default is 0.01"),
        (["--steps", "0"], "--steps must be positive"),
        (["--steps", "many"], "--help"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--device", "tpu"], "Known: cpu, cuda"),
        (["--dtype", "float16"], "Known: float32, float64"),
        (["--bogus"], "--help"),
    ],
)
def test_bad_training_requests(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*TRAIN, "--out", str(out), *arguments]) == 2
    assert words in one_line(capsys)
    assert not out.exists()


def test_bad_certificate_requests(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    released = str(run / "model.safetensors")
    for arguments, words in (
        ([released], "--data FILE.npz"),
        ([str(run), "--rivals", "worst"], "Known: best, tied"),
        ([str(run), "--task", "multiclass"], "--task binary"),
        ([str(run), "--task", "regresion"], "Did you mean 'regression'?"),
    ):
        assert main(["certify", *arguments]) == 2
        assert words in one_line(capsys)


def test_unwritable_output(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("here")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "private").write_text("here")
    for command, out in (
        (TRAIN, file),
        (TRAIN, file / "deep"),
        (TRAIN, tmp_path / "half"),
        (["certify", str(run)], file),
        (["certify", str(run)], file / "deep"),
    ):
        assert main([*command, "--out", str(out)]) == 2
        assert "Pass another folder with --out" in one_line(capsys)
    assert file.read_text() == "here"
    assert listing(tmp_path) == ["file", "half", "half/private"]


@pytest.mark.parametrize(
    "arguments", [["bogus"], ["--bogus"], ["train"], ["scan"], ["scan", "a", "b"]]
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "--help" in one_line(capsys)


# When things go wrong


def test_a_diverged_run_releases_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    gd = [*TRAIN, "--method", "gd", "--out", str(out)]
    assert main([*gd, "--lr", "1e9"]) == 3
    assert "Lower --lr" in one_line(capsys)
    assert listing(out) == [
        name for name in LAYOUT if name not in ("model.safetensors", "private/state.safetensors")
    ]
    protocol = json.loads((out / "training.json").read_text())
    assert protocol["status"] == "diverged"
    assert protocol["train_accuracy"] is None
    assert sorted(protocol["sha256"]) == [
        "init.safetensors",
        "private/holdout.npz",
        "private/train.npz",
    ]
    for command in (["attack", str(out), "--dry-run"], ["certify", str(out)]):
        assert main(command) == 2
        assert "model.safetensors" in one_line(capsys)
    assert main([*gd, "--lr", "0.01", "--quiet"]) == 0
    assert listing(out) == LAYOUT


@pytest.mark.parametrize(
    ("problem", "code"), [(ZeroDivisionError("a\nb"), 70), (KeyboardInterrupt(), 130)]
)
def test_bugs_and_interrupts_have_their_own_codes(
    problem: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise problem

    # No input is known to raise an internal error, so a function is replaced by one that does.
    monkeypatch.setattr("residuum.io.release.open_release", fail)
    monkeypatch.delenv("RESIDUUM_DEBUG", raising=False)
    assert main(["attack", "anything"]) == code
    out, err = capsys.readouterr()
    assert out.strip() == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1
    assert ("RESIDUUM_DEBUG" if code == 70 else "The command was interrupted") in lines[0]


def test_debugging_shows_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    # As above: no input is known to raise an internal error.
    monkeypatch.setattr("residuum.io.release.open_release", fail)
    monkeypatch.setenv("RESIDUUM_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["attack", "anything"])


def test_ctrl_c_keeps_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    endless = [*TRAIN[:-1], "100000000", "--method", "gd"]
    code, err = interrupt(*endless, "--out", str(out), once=out / "private")
    assert code == 130
    assert err.splitlines()[-1].startswith("residuum: The command was interrupted")
    assert listing(out) == [".gitignore", ".lock", "private", "private/state.safetensors"]
    from residuum.training import TrainingState

    steps = TrainingState.load(out / "private" / "state.safetensors").step
    assert steps > 0
    arguments = [*TRAIN[:-1], str(steps + 20), "--method", "gd", "--quiet"]
    assert main([*arguments, "--out", str(out)]) == 0
    assert main([*arguments, "--out", str(tmp_path / "whole")]) == 0
    assert listing(out) == LAYOUT
    resumed, uninterrupted = (load_checkpoint(folder).theta for folder in (out, tmp_path / "whole"))
    assert same(resumed, uninterrupted)


def test_as_a_program(run: Path, tmp_path: Path) -> None:
    process = start("scan", str(run / "model.safetensors"), "--json")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["files"][0]["network"]["arch"] == "mlp:64-8-1"
    process = start("scan", "gone.pt", cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
