"""``attack`` and ``score``: end to end, the leak guard, resuming, one-line errors, exit codes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from residuum.attacks import PRESETS, make_attack
from residuum.cli.main import main
from residuum.evaluation import METRICS
from residuum.io.checkpoints import save_checkpoint
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Dataset, Reconstruction, same
from residuum.records.rundir import sha256
from residuum.verbs.attacking import AttackRun, load_run
from tests.program import arguments_of, interrupt, listing, one_line, printed

SMALL = ["--steps", "200", "--restarts", "2", "--candidates", "16"]
LAYOUT = [
    ".gitignore",
    ".lock",
    "attack.json",
    "loss.png",
    "reconstruction.safetensors",
    "selected.png",
]
Capture = pytest.CaptureFixture[str]


def reconstruction(out: Path) -> Reconstruction:
    return load_run(out).replace(seconds=0.0)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network trained on twelve digits."""
    out = tmp_path_factory.mktemp("victim") / "v"
    train = ["train", "--data", "digits", "--n", "12", "--arch", "mlp:64-30-1", "--steps", "300"]
    assert main([*train, "--out", str(out), "--quiet"]) == 0
    return out


@pytest.fixture(scope="module")
def run(victim: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An attack on it."""
    out = tmp_path_factory.mktemp("attack") / "r"
    assert main(["attack", str(victim), *SMALL, "--out", str(out), "--quiet"]) == 0
    return out


@pytest.fixture
def scored(run: Path, tmp_path: Path) -> Path:
    """A copy of that attack, to be scored."""
    return Path(shutil.copytree(run, tmp_path / "scored"))


# Attack


def test_an_attack_directory(run: Path, victim: Path) -> None:
    assert listing(run) == LAYOUT
    assert (run / ".gitignore").read_text() == "*\n"
    assert run.stat().st_mode & 0o777 == 0o700
    reconstruction, summary = load_run(run), json.loads((run / "attack.json").read_text())
    assert reconstruction.x.shape == (32, 1, 8, 8)
    assert summary["status"] == list(reconstruction.status) == ["finished"] * 2
    assert summary["request"]["checkpoint_sha256"] == sha256(victim / "model.safetensors")
    assert summary["sha256"]["reconstruction.safetensors"] == sha256(
        run / "reconstruction.safetensors"
    )
    assert summary["settings"]["steps"] == 200
    assert summary["preset"] == "residuum"
    assert summary["knowledge"] == {}
    assert summary["environment"]["packages"]["torch"]
    for run_summary in summary["runs"]:
        assert run_summary["loss"] <= run_summary["final_loss"]
        assert list(run_summary["residuals"]) == ["layers.0", "layers.1"]
        assert all(0 <= value < 1 for value in run_summary["residuals"].values())
    for name in ("selected.png", "loss.png"):
        assert Image.open(run / name).size[0] > 300


def test_attacker_knowledge_is_recorded_and_shown(
    victim: Path, tmp_path: Path, capsys: Capture
) -> None:
    np.save(tmp_path / "mean.npy", np.full((1, 8, 8), 0.3))
    out = tmp_path / "r"
    command = [
        "attack",
        str(victim),
        "--steps",
        "5",
        "--restarts",
        "1",
        "--out",
        str(out),
        "--shape",
        "1,8,8",
        "--value-range",
        "0,1",
        "--mean",
        str(tmp_path / "mean.npy"),
        "--mean-provenance",
        "holdout",
        "--sample-count",
        "12",
        "--label-balance",
        "0.25,0.75",
        "--init",
        "own",
        "--loss",
        "logistic",
        "--weight-decay",
        "0.01",
        "--priors",
        "value-box",
        "0.5",
        "--priors",
        "high-frequency",
        "1e-6",
        "--constraint",
        "penalty",
        "--lam-init",
        "0",
        "2",
        "--no-normalize",
        "--optimizer",
        "sgd",
        "--lr-x",
        "1e-4",
        "--lr-lam",
        "1e-5",
        "--sigma",
        "0.02",
        "--lam-min",
        "0.1",
        "--lam-every",
        "3",
        "--surrogate",
        "softplus",
        "--sharpness",
        "50",
        "--anneal",
        "none",
        "--layers",
        "first",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--seed",
        "7",
    ]
    assert main(command) == 0
    output = capsys.readouterr().out
    for words in (
        "restart",
        "final loss",
        "layers.0",
        "layers.1",
        "finished",
        "selected",
        "mean (holdout)",
        "shape 1,8,8 (user)",
        "value_range 0,1 (user)",
        "theta0 (user)",
        "seconds",
        str(out),
    ):
        assert " ".join(words.split()) in " ".join(output.split())
    reconstruction = load_run(out)
    assert len(reconstruction.x) == 24
    assert (reconstruction.labels < 0).sum() == 6
    assert float(reconstruction.knowledge.mean.mean()) == pytest.approx(0.3)  # type: ignore[union-attr]
    assert reconstruction.settings["priors"] == [["value-box", 0.5], ["high-frequency", 1e-6]]
    assert reconstruction.settings["lam_init"] == [0.0, 2.0]
    assert reconstruction.settings["normalize"] is False
    summary = json.loads((out / "attack.json").read_text())
    assert summary["knowledge"]["mean"] == "holdout"
    assert len(summary["knowledge"]) == 8


def test_json_and_quiet(victim: Path, tmp_path: Path, capsys: Capture) -> None:
    command = ["attack", str(victim), "--steps", "3", "--restarts", "1"]
    assert main([*command, "--out", str(tmp_path / "q"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*command, "--out", str(tmp_path / "j"), "--json"]) == 0
    output = printed(capsys)
    assert output == json.loads((tmp_path / "j" / "attack.json").read_text())
    assert sorted(output) == [
        "attack",
        "candidates",
        "consensus",
        "environment",
        "events",
        "final_loss",
        "knowledge",
        "layer_residuals_squared",
        "notes",
        "preset",
        "request",
        "restarts",
        "runs",
        "second_order",
        "seconds",
        "selected",
        "settings",
        "sha256",
        "status",
    ]


@pytest.mark.parametrize("private", ["deleted", "garbage"])
def test_the_data_is_never_opened(private: str, victim: Path, run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(victim, tmp_path / "v"))
    (copy / "training.json").write_text("nothing here")
    shutil.rmtree(copy / "private")
    if private == "garbage":
        (copy / "private").mkdir()
        for name in ("train.npz", "holdout.npz", "state.safetensors"):
            (copy / "private" / name).write_bytes(b"\x80garbage")
    assert main(["attack", str(copy), *SMALL, "--out", str(tmp_path / "r"), "--quiet"]) == 0
    assert same(reconstruction(tmp_path / "r"), reconstruction(run))


def test_a_finished_attack_is_reused_and_never_overwritten(
    victim: Path, run: Path, capsys: Capture
) -> None:
    before = {name: (run / name).read_bytes() for name in LAYOUT}
    assert main(["attack", str(victim), *SMALL, "--out", str(run)]) == 0
    assert "finished" in capsys.readouterr().out
    assert main(["attack", str(victim), *SMALL, "--out", str(run), "--seconds", "99"]) == 0
    capsys.readouterr()
    for other in (["--seed", "1"], ["--value-range", "0,1"], ["--momentum", "0.5"]):
        assert main(["attack", str(victim), *SMALL, *other, "--out", str(run)]) == 2
        assert "other settings" in one_line(capsys)
    assert main(["attack", str(victim / "init.safetensors"), *SMALL, "--out", str(run)]) == 2
    assert "settings or weights" in one_line(capsys)
    assert {name: (run / name).read_bytes() for name in LAYOUT} == before


def test_two_attacks_never_share_a_folder(victim: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "r"
    command = ["attack", str(victim), *SMALL, "--out", str(out)]
    with AttackRun.open(out):
        assert main(command) == 2
        assert "another attack is writing" in one_line(capsys)
    assert main(command) == 0


def test_ctrl_c_keeps_the_state_and_the_same_command_resumes(victim: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    command = ["attack", str(victim), "--steps", "20000", "--restarts", "1", "--candidates", "12"]
    # Three seconds of steps: neither a slow machine is before the first look, nor a fast one through.
    code, err = interrupt(*command, "--out", str(out), once=out / ".gitignore", after=0.6)
    assert code == 130
    assert err.splitlines()[-1].startswith("residuum: The command was interrupted")
    assert listing(out) == [".gitignore", ".lock", "attack_state.safetensors"]
    assert out.stat().st_mode & 0o777 == 0o700
    from residuum.attacks.stationarity.solver import SolverState

    assert 0 < SolverState.load(out / "attack_state.safetensors").step < 20000
    assert main([*command, "--seed", "5", "--out", str(out), "--quiet"]) == 2
    assert main([*command, "--out", str(out), "--quiet"]) == 0
    assert main([*command, "--out", str(tmp_path / "whole"), "--quiet"]) == 0
    assert listing(out) == LAYOUT
    assert same(reconstruction(out), reconstruction(tmp_path / "whole"))


def test_out_of_time(victim: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "r"
    command = ["attack", str(victim), "--steps", "5000", "--seconds", "0.001", "--out", str(out)]
    last = -1
    for _ in range(2):
        assert main([*command, "--json"]) == 0
        output = printed(capsys)
        assert set(output["status"]) == {"time"}
        assert (out / "attack_state.safetensors").is_file()
        assert int(load_run(out).steps[-1]) > last
        last = int(load_run(out).steps[-1])


@pytest.mark.parametrize("rate", ["1e30", "1e300"])
def test_absurd_learning_rates_diverge(
    rate: str, victim: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "r"
    command = ["attack", str(victim), *SMALL, "--lr-x", rate, "--out", str(out)]
    for _ in range(2):  # the second time the finished run is read
        assert main(command) == 3
        assert "Lower --lr-x" in one_line(capsys)
        assert listing(out) == LAYOUT
    summary = json.loads((out / "attack.json").read_text())
    assert summary["status"] == ["diverged"] * 2
    assert torch.isfinite(load_run(out).x).all()
    assert main([*command, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["exit_code"] == 3


# Presets and help


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs(preset: str, tmp_path: Path, capsys: Capture) -> None:
    outputs = 3 if "multiclass" in preset else 1
    for seed, name in enumerate(("model", "init")):
        torch.manual_seed(seed)
        network = Architecture.parse(f"mlp:6-5-{outputs}")
        theta = network.build().double().state_dict()
        save_checkpoint(Network(theta, str(network)), tmp_path / f"{name}.safetensors")
    command = ["attack", str(tmp_path / "model.safetensors"), "--preset", preset, "--steps", "2"]
    if preset in ("loo2024", "ntk"):
        command += ["--init", str(tmp_path / "init.safetensors"), "--value-range", "0,1"]
    assert main([*command, "--out", str(tmp_path / "r"), "--json"]) == 0
    output = printed(capsys)
    assert output["preset"] == preset
    attack = make_attack(preset=preset, steps=2)
    expected = {k: v for k, v in attack.to_json().items() if k != "seconds"}
    assert output["request"]["settings"] == expected
    assert output["status"] == ["finished"] * attack.restarts


def test_options_override_a_preset(victim: Path, tmp_path: Path, capsys: Capture) -> None:
    command = ["attack", "kkt", str(victim), "--preset", "haim2022-mnist-rbijxft7", "--steps", "2"]
    assert main([*command, "--lr-x", "0.5", "--out", str(tmp_path / "r"), "--json"]) == 0
    settings = printed(capsys)["settings"]
    preset = PRESETS["haim2022-mnist-rbijxft7"].settings
    assert (settings["steps"], settings["lr_x"]) == (2, 0.5)
    assert (settings["sigma"], settings["momentum"]) == (preset["sigma"], preset["momentum"])


def test_a_preset_of_another_attack_is_refused(victim: Path, capsys: Capture) -> None:
    for name in ("kkt", "unmix"):
        assert main(["attack", name, str(victim), "--preset", "loo2024", "--dry-run"]) == 2
        assert "holds settings of the attack ntk" in one_line(capsys)
    assert main(["attack", "ntk", str(victim), "--preset", "loo2024", "--dry-run"]) == 2
    assert "--init" in one_line(capsys)


def test_a_file_that_has_the_name_of_an_attack(
    victim: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(victim / "model.safetensors", tmp_path / "kkt")
    assert main(["attack", "kkt", "--dry-run"]) == 2
    assert "needs a checkpoint" in one_line(capsys)
    assert main(["attack", "./kkt", "--dry-run", "--json"]) == 0
    assert printed(capsys)["arch"] == "mlp:64-30-1"


def test_the_metrics_are_listed() -> None:
    assert set(METRICS) <= set(
        re.findall(r"\w+", arguments_of("score")["--metrics"].parameter.help)
    )


# Bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--candidates", "-1"], "--candidates must be at least 0"),
        (["--shape", "1,8,9"], "Correct the option --shape"),
        (["--shape", "0,64"], "Correct the option --shape"),
        (["--shape", "8x8"], "--shape 1,28,28"),
        (["--value-range", "1,0"], "a smaller number and a larger number"),
        (["--value-range", "0"], "--value-range 0,1"),
        (["--value-range", "0,inf"], "finite"),
        (["--value-range", "0,1", "--mean", "3"], "must lie inside their value range"),
        (["--mean", "nan"], "finite"),
        (["--mean", "gone.npz"], "Check the path"),
        (["--mean", "gone.npy"], "Check the path"),
        (["--mean", "0", "--mean-provenance", "me"], "Known: holdout"),
        (["--sample-count", "many"], "takes a whole number; got 'many'"),
        (["--sample-count", "0"], "--sample-count"),
        (["--label-balance", "0.5"], "0.5,0.5"),
        (["--label-balance", "0.9,0.9"], "add up to 1"),
        (["--preset", "ntk"], "--init"),
        (["--preset", "ntk", "--init", "gone.pt"], "Check the path"),
        (["--preset", "buzaglo2023-multiclass"], "at least 2 outputs"),
        (["--preset", "haim2022"], "haim2022-cifar-b9dfyspx"),
        (["--priors", "smooth", "1"], "No prior"),
        (["--priors", "value-box", "1"], "--value-range"),
        (["--priors", "none", "-1"], "--priors"),
        (["--priors", "none", "much"], "takes a number; got 'much'"),
        (["--priors", "none"], "--priors needs 2 values"),
        (["--priors", "none", "0", "--priors", "none"], "--priors"),
        (["--momentun", "1"], "Did you mean --momentum?"),
        (["--normalize=maybe"], "--normalize"),
        (["--lam-init", "1"], "--lam-init needs 2 values"),
        (["--momentum", "nan"], "--momentum must be finite"),
        (["--lam-scale", "two"], "Known: auto"),
        (["--lr-x", "nan"], "--lr-x must be finite"),
        (["--lr-x", "0"], "--lr-x must be positive"),
        (["--lr-lam", "-1"], "at least 0"),
        (["--seconds", "0"], "--seconds must be positive"),
        (["--steps", "0"], "--steps must be positive"),
        (["--restarts", "-1"], "--restarts must be positive"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--optimizer", "rmsprop"], "Known: adam, sgd"),
        (["--rivals", "tied"], "has no option --rivals"),
        (["--surrogate", "relu"], "--surrogate cannot be"),
        (["--anneal", "slowly"], "--anneal cannot be"),
        (["--layers", "second"], "--layers cannot be"),
        (["--constraint", "none"], "--constraint cannot be"),
        (["--dtype", "float16"], "Did you mean 'float64'"),
        (["--device", "tpu"], "--device cpu"),
        (["--loss", "hinge"], "--loss cannot be"),
        (["--weight-decay", "-1"], "at least 0"),
        (["--columns", "0-2:color"], "FIRST-LAST:onehot"),
        (["--columns", "0-99:integer"], "Correct --columns"),
        (["--priors", "columns", "1"], "values that are not known: columns"),
        (["--arch", "mlp:64-9-1"], ""),
    ],
    ids=" ".join,
)
def test_bad_attack_requests(
    arguments: list[str], words: str, victim: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "r"
    assert main(["attack", str(victim), "--out", str(out), *arguments]) == 2
    assert words in one_line(capsys)
    assert not out.exists()


def test_bad_files_of_attacker_knowledge(victim: Path, tmp_path: Path, capsys: Capture) -> None:
    released, out = str(tmp_path / "alone.safetensors"), tmp_path / "r"
    shutil.copy(victim / "model.safetensors", released)
    np.savez(tmp_path / "x.npz", x=np.ones((3, 64)))
    np.save(tmp_path / "wide.npy", np.ones(63))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("0.5")
    for arguments, words in (
        ([released, "--init", "own"], "in the directory of the model"),
        ([str(tmp_path / "gone")], "Check the path"),
        ([released, "--mean", str(tmp_path / "x.npz")], "'mean'"),
        ([released, "--mean", str(tmp_path / "wide.npy")], "64 values"),
        ([released, "--mean", str(tmp_path / "objects.npy")], "numpy.save"),
        ([released, "--mean", str(tmp_path / "text.npy")], "numpy.save"),
    ):
        assert main(["attack", *arguments, "--out", str(out)]) == 2
        assert words in one_line(capsys)
        assert not out.exists()


def test_other_folders_stay_as_they_are(victim: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "work", tmp_path / "file", tmp_path / "file" / "deep", victim):
        before = listing(tmp_path), listing(victim)
        assert main(["attack", str(victim), *SMALL, "--out", str(out)]) == 2
        assert "Pass another folder with --out" in one_line(capsys)
        assert (listing(tmp_path), listing(victim)) == before


# Score


def test_scores(scored: Path, victim: Path, capsys: Capture) -> None:
    command = ["score", str(scored), "--data", str(victim / "private" / "train.npz")]
    command += ["--holdout", str(victim / "private" / "holdout.npz"), "--ckpt", str(victim)]
    assert main([*command, "--json", "--subsets", "200"]) == 0
    output = printed(capsys)
    assert output == json.loads((scored / "scores.json").read_text())
    assert output["n"] == len(output["per_sample"]) == 12
    assert output["m"] >= 32
    assert output["calibrated"]
    assert set(output["metrics"]) == set(METRICS)
    for figures in output["metrics"].values():
        assert figures.keys() >= {
            "recovered",
            "expected_by_chance",
            "threshold_null99",
            "above_published_threshold",
            "top10_mean",
        }
        assert 0 <= figures["recovered"] <= 12
        assert 0 <= figures["expected_by_chance"] < 3
    row = output["per_sample"][0]
    assert row.keys() >= {"margin", "multiplier", "recovered", "matches"}
    assert row["margin"] > 0
    assert output["selected"]["m"] <= output["m"]
    assert set(output["selected"]["metrics"]) == set(METRICS)
    assert output["knowledge"] == {}
    for name in ("matches.png", "output_score.png"):
        assert Image.open(scored / name).size[0] > 300


def test_scores_for_a_person(scored: Path, victim: Path, capsys: Capture) -> None:
    data = ["--data", str(victim), "--holdout", str(victim), "--subsets", "200"]
    command = ["score", str(scored), *data, "--metrics", "ncc,l2"]
    assert main([*command, "--ckpt", str(victim)]) == 0
    output = capsys.readouterr().out
    for words in ("ncc *", "threshold", "> 0.", "nothing but the weights", "selected"):
        assert words in output
    assert max(map(len, output.splitlines()[:-1])) <= 110
    assert "not the checkpoint" not in output
    assert main([*command, "--ckpt", str(victim / "init.safetensors")]) == 0
    assert "not the checkpoint that was attacked" in capsys.readouterr().out
    assert main([*command, "--candidates", "selected", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    scores = json.loads((scored / "scores.json").read_text())
    assert (scores["candidates"], scores["selected"]) == ("selected", None)


@pytest.mark.parametrize("pool", [None, 50])
def test_without_a_control(
    pool: int | None, scored: Path, victim: Path, tmp_path: Path, capsys: Capture
) -> None:
    command = ["score", str(scored), "--data", str(victim), "--metrics", "ncc"]
    if pool:
        holdout = Dataset.from_npz(victim / "private" / "holdout.npz")
        subset = holdout.replace(x=holdout.x[:pool], y=holdout.y[:pool])
        command += ["--holdout", str(subset.to_npz(tmp_path / "few.npz"))]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "not calibrated" in output
    assert ("at least 100" if pool else "no held-out set") in output
    assert main([*command, "--json"]) == 0
    scores = printed(capsys)
    assert (scores["calibrated"], scores["recovered"], scores["p_value"]) == (False, None, None)
    assert scores["metrics"]["ncc"]["threshold_null99"] is None
    assert scores["metrics"]["ncc"]["top10_mean"] is not None


def test_no_checkpoint_is_called_another_where_the_attacked_one_is_unknown(
    scored: Path, victim: Path, capsys: Capture
) -> None:
    command = ["score", str(scored), "--data", str(victim), "--metrics", "ncc", "--json"]
    note = "the checkpoint passed as --ckpt is not the checkpoint that was attacked"
    assert main([*command, "--ckpt", str(victim / "init.safetensors")]) == 0
    assert note in printed(capsys)["notes"]
    (scored / "attack.json").unlink()
    assert main([*command, "--ckpt", str(victim)]) == 0
    assert note not in printed(capsys)["notes"]


def test_perfect_copies_are_recovered(scored: Path, victim: Path, capsys: Capture) -> None:
    truth = Dataset.from_npz(victim / "private" / "train.npz")
    reconstruction = load_run(scored)
    x = torch.cat([truth.x, reconstruction.x[len(truth) :]])
    reconstruction.replace(x=x).save(scored / "reconstruction.safetensors")
    command = ["score", str(scored), "--data", str(victim), "--holdout", str(victim)]
    assert main([*command, "--metrics", "ncc", "--subsets", "200", "--json"]) == 0
    judged = printed(capsys)
    assert judged["recovered"] == 12
    assert judged["p_value"] < 0.01


def test_bad_score_requests(scored: Path, victim: Path, tmp_path: Path, capsys: Capture) -> None:
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "wide.npz", x=generator.normal(size=(12, 1, 9, 9)), y=np.array([-1, 1] * 6))
    (tmp_path / "empty").mkdir()
    data = ["--data", str(victim)]
    for arguments, words in (
        ([str(scored), "--data", str(tmp_path / "wide.npz")], "shape"),
        ([str(scored), *data, "--holdout", str(tmp_path / "wide.npz")], "shape"),
        ([str(scored), *data, "--holdout", str(tmp_path / "gone.npz")], "Check the path"),
        ([str(scored), "--data", str(tmp_path / "empty")], "private/train.npz"),
        ([str(tmp_path / "empty"), *data], "residuum attack CKPT"),
        ([str(victim), *data], "residuum attack CKPT"),
        ([str(scored), *data, "--metrics", "nccc"], "Did you mean 'ncc'?"),
        ([str(scored), *data, "--candidates", "best"], "Known: all, selected"),
        ([str(scored), *data, "--ckpt", str(tmp_path / "gone")], "Check the path"),
        ([str(scored), *data, "--holdout", str(victim), "--subsets", "0"], ""),
        ([str(scored)], "--help"),
    ):
        assert main(["score", *arguments]) == 2
        assert words in one_line(capsys)
    (scored / "reconstruction.safetensors").write_bytes(b"garbage")
    assert main(["score", str(scored), *data]) == 2
    one_line(capsys)
    assert listing(scored) == LAYOUT
