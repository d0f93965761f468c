"""The audit: what it runs, what it writes, how it ends, and that nothing stops it half-way."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import residuum as rs
from residuum.attacks.base import AttackProgress
from residuum.auditing.inputs import check_scales
from residuum.auditing.listener import SILENT, AuditListener
from residuum.auditing.plan import Batch
from residuum.auditing.published import publish
from residuum.auditing.schedule import merge_batches
from residuum.auditing.store import AuditRun
from residuum.auditing.verdict import INCONCLUSIVE
from residuum.cli.audit import STAGE_MESSAGES, listener_for
from residuum.cli.main import main
from residuum.errors import DataError, OutputError
from residuum.records import Dataset, same
from residuum.records.rundir import sha256
from residuum.report.html import items_of
from tests.program import interrupt, listing, start
from tests.victims import knowledge, leaky, tight, untrained, write

KKT = {"attack": "kkt", "steps": 400, "restarts": 2}
SHORT = {"attack": "kkt", "steps": 20, "restarts": 1}
FILES = [
    ".gitignore",
    ".lock",
    "audit.safetensors",
    "certificate.json",
    "config.toml",
    "environment.json",
    "knowledge.safetensors",
    "model_card.md",
    "reconstruction-1-unmix.safetensors",
    "reconstruction.safetensors",
    "report.html",
    "report.sarif",
    "result.json",
    "scores.json",
]
FILES_OF_ONE_ATTACK = [name for name in FILES if not name.startswith("reconstruction-1")]


def audit(name: str, **options: Any) -> rs.AuditResult:
    checkpoint, split = {"leaky": leaky, "tight": tight, "untrained": untrained}[name]()
    arguments = {
        "data": split.train,
        "holdout": split.holdout,
        "knowledge": knowledge(split),
        "effort": "quick",
        "attacks": (KKT, "unmix"),
        "subsets": 300,
        **options,
    }
    return rs.audit(checkpoint, **arguments)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Arguments of ``residuum audit`` for every victim. "quick" has no attack that takes seconds."""
    folder = tmp_path_factory.mktemp("victims")
    quick = ["--effort", "quick", "--subsets", "300", "--attacks", "unmix"]
    commands = {name: [*write(folder / name, name), *quick] for name in ("tight", "untrained")}
    kkt = ["--attacks", json.dumps(KKT)]
    leaky = [*write(folder / "leaky", "leaky"), *quick, *kkt]
    return {**commands, "leaky": leaky, "kkt": [*commands["tight"], *kkt]}


@pytest.fixture(scope="module")
def finished(files: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished audit of the leaky network."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert main([*files["leaky"], "--out", str(out), "--quiet"]) == 1
    return out


# From Python


def test_without_data_candidates_are_ranked_and_certified() -> None:
    result = audit("tight", data=None, holdout=None)
    assert result.verdict.outcome == INCONCLUSIVE
    assert result.scores is None
    assert result.certificate is not None
    assert result.certificate_of.startswith("candidates")
    assert result.certificate.residual_plain < 1
    ranked = publish(result, None, {}).candidates
    assert ranked
    single = [row.support < 2 for row in ranked]
    assert single == sorted(single)  # what several restarts hold comes first
    shared = [row.confidence or 0.0 for row in ranked if row.support > 1]
    assert shared == sorted(shared, reverse=True)


def test_data_never_reaches_the_attack() -> None:
    """Swapping the training set changes the scores alone."""
    split = tight()[1]
    a = audit("tight", attacks=(SHORT,))
    rows = torch.arange(40, 60)
    other = split.holdout.replace(x=split.holdout.x[rows], y=split.holdout.y[rows])
    b = audit("tight", data=other, attacks=(SHORT,))
    assert same(a.reconstructions[0].x, b.reconstructions[0].x)
    assert a.scores is not None
    assert b.scores is not None
    assert a.scores.metrics["ncc"].median != b.scores.metrics["ncc"].median


def test_plain_arrays_and_a_live_network_will_do() -> None:
    checkpoint, split = tight()
    result = rs.audit(
        checkpoint.copy_module(),
        data=(split.train.x.numpy(), split.train.y.numpy()),
        holdout=split.holdout.x.numpy(),
        attacks=(SHORT, "unmix"),
        effort="quick",
        subsets=200,
    )
    assert result.scores is not None
    assert result.scores.calibrated
    assert [row.name for row in result.attacks if row.ran] == ["binary-kkt", "unmix"]
    assert result.membership is not None
    assert result.membership.loss is None  # held-out samples without labels have no losses
    assert any("sparse in their differences" in assumption for assumption in result.assumptions)
    assert all(row.reason for row in result.attacks)


def test_what_does_not_fit_is_refused_before_the_attack() -> None:
    checkpoint, split = tight()
    with pytest.raises(DataError, match="must have the shape that the network takes"):
        rs.audit(checkpoint, data=(torch.zeros(5, 3), torch.ones(5)))
    with pytest.raises(DataError, match="Held-out samples must have"):
        rs.audit(checkpoint, data=split.train, holdout=torch.zeros(200, 3))
    with pytest.raises(DataError, match="one row per sample"):
        rs.audit(checkpoint, data=(torch.zeros(5), torch.ones(5)))


def test_the_plan_is_recorded_and_does_not_depend_on_the_budget() -> None:
    first = audit("tight", attacks=({"attack": "kkt", "steps": 20},), budget="2min")
    repeated = audit("tight", attacks=({"attack": "kkt", "steps": 20},), budget="1h")
    assert first.batches
    assert [vars(batch) for batch in first.batches] == [vars(batch) for batch in repeated.batches]
    assert same(repeated.reconstructions[0].x, first.reconstructions[0].x)
    assert first.verdict.outcome == repeated.verdict.outcome


def test_what_a_budget_leaves_out_is_named_and_rules_nothing_out() -> None:
    result = audit("tight", attacks=("kkt", "unmix"), budget=0.05, effort="standard")
    rows = {row.name: row for row in result.attacks}
    assert not rows["binary-kkt"].ran
    assert rows["binary-kkt"].reason.startswith("left out: a single restart takes about")
    assert rows["unmix"].unfinished.endswith("of the planned work ran")
    assert result.verdict.outcome == INCONCLUSIVE
    reasons = [
        r
        for r in result.verdict.reasons
        if r.startswith("the budget was too small for all work of")
    ]
    assert [reason.split(": ")[0].split()[-1] for reason in reasons] == ["binary-kkt", "unmix"]
    assert (result.checks.budget_needed or 0) >= 600
    complete = audit("tight", attacks=(SHORT, "unmix"))
    assert complete.checks.budget_needed is None
    assert not any("budget" in reason for reason in complete.verdict.reasons)


def test_initial_weights_bring_the_ntk_attack_as_a_test_of_its_own() -> None:
    checkpoint, split = tight()
    granted = knowledge(split).replace(theta0={k: 0.9 * t for k, t in checkpoint.theta.items()})
    attacks = tuple({"attack": name, "steps": 30, "restarts": 1} for name in ("binary-kkt", "ntk"))
    result = audit("tight", knowledge=granted, attacks=attacks, subsets=200)
    assert [reconstruction.attack for reconstruction in result.reconstructions] == [
        "binary-kkt",
        "ntk",
    ]
    assert result.findings is not None
    assert result.findings.tests == 2
    assert all(row.p_value <= row.adjusted for row in result.attacks if row.ran)
    displayed = next(
        reconstruction
        for reconstruction in result.reconstructions
        if reconstruction.attack == result.displayed_attack
    )
    assert result.scores is not None
    assert result.scores.m >= len(displayed.x)


def test_rows_that_hold_samples_are_said_though_no_attack_finds_them() -> None:
    """Samples with noise in the first layer, an attack of five steps that finds nothing, no unmix.

    Without the noise, the samples would be stored in the file.
    """
    checkpoint, split = tight()
    name = next(iter(checkpoint.theta))
    rows = checkpoint.theta[name].clone()
    samples = split.train.x.flatten(1).to(rows.dtype)
    noise = torch.randn(samples.shape, generator=torch.Generator().manual_seed(0))
    rows[: len(samples)] = samples + 0.02 * noise.to(rows.dtype)
    planted = checkpoint.replace(theta={**checkpoint.theta, name: rows})
    result = rs.audit(
        planted,
        data=split.train,
        holdout=split.holdout,
        knowledge=knowledge(split),
        effort="quick",
        attacks=({"attack": "kkt", "steps": 5, "restarts": 1}, "first-layer-weights"),
        subsets=300,
    )
    assert result.verdict.outcome == INCONCLUSIVE
    sentence = "the baseline first-layer-weights matches 20 samples"
    assert [sentence in reason for reason in result.verdict.reasons].count(True) == 1
    assert sentence in result.html()


def test_batches_are_selected_anew_together() -> None:
    batch = audit("tight", attacks=(KKT,), subsets=200).reconstructions[0]
    merged = merge_batches([batch, batch])
    assert merged.restarts == 4
    assert merged.run.tolist() == [*batch.run.tolist(), *(batch.run + 2).tolist()]
    assert merged.selection is not None
    assert batch.selection is not None
    assert int(merged.selection.support.max()) == 2 * int(batch.selection.support.max())


def test_save_load_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = audit("tight", subsets=200)
    assert result.save(tmp_path / "a") == tmp_path / "a"
    assert listing(tmp_path / "a") == sorted([*FILES, "model.safetensors"])
    assert same(rs.AuditResult.load(tmp_path / "a").verdict, result.verdict)
    result.show()
    assert "INCONCLUSIVE" in capsys.readouterr().out
    assert "<img" not in result._repr_html_()
    with pytest.raises(OutputError, match="holds an audit already"):
        result.save(tmp_path / "a")


def test_uniqueness_is_certified_if_an_attack_has_restarts() -> None:
    checkpoint, split = tight()
    granted = knowledge(split).replace(sample_count=5)
    attacks = ({"attack": "kkt", "steps": 100, "restarts": 1},)
    result = rs.audit(checkpoint, knowledge=granted, attacks=attacks, effort="quick")
    assert result.uniqueness is not None, result.uniqueness_reason
    rows = result.uniqueness.index
    assert (result.reconstructions[0].weight[rows] > 0).all()
    # Each sample's data: its multiplier stands under the candidate that the index names.
    lam = result.reconstructions[0].weight[rows]
    assert torch.allclose(lam.double(), result.uniqueness.lam.double())
    cards = [item for item in items_of(result) if item.certificate]
    assert cards
    for item in cards:
        assert 0 <= item.determined_at_least <= item.determined_energy + 1e-9
        assert (item.certificate == "others keep it") == (item.determined_at_least >= 0.9)
    assert "Not covered, and may keep less" in result.html()
    assert publish(result, None, {}).uniqueness is not None
    without = audit("tight", attacks=("unmix",))
    assert without.uniqueness is None
    assert "no restart converged" in without.uniqueness_reason


# Exit codes


def test_a_leak_is_1_and_everything_is_written_before(finished: Path) -> None:
    assert listing(finished) == FILES
    assert (finished / ".gitignore").read_text() == "*\n"
    assert finished.stat().st_mode & 0o777 == 0o700
    result = json.loads((finished / "result.json").read_text())
    assert result["verdict"]["exit_code"] == 1
    assert result["verdict"]["recovered"] >= 5
    assert sorted([*result["artifacts"], "result.json", ".gitignore", ".lock"]) == FILES
    for name, digest in result["artifacts"].items():
        assert sha256(finished / name) == digest


def test_an_untrained_network_is_3(
    files: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*files["untrained"], "--out", str(tmp_path / "u")]) == 3
    output = capsys.readouterr().out
    assert "INCONCLUSIVE" in output
    assert "the network as read hardly fits these samples" in " ".join(output.split())
    assert output.splitlines()[-1] == f"report: {tmp_path / 'u' / 'report.html'}"


def test_no_held_out_set_is_3(files: dict[str, list[str]], tmp_path: Path) -> None:
    command = files["leaky"]
    position = command.index("--holdout")
    out = tmp_path / "run"
    assert main([*command[:position], *command[position + 2 :], "--out", str(out), "--quiet"]) == 3
    assert json.loads((out / "result.json").read_text())["verdict"]["recovered"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"--data": "gone.npz"},
        {"--budget": "soon"},
        {"--effort": "slow"},
        {"--value-range": "1"},
        {"--mean": "nothing"},
        {"--mean": "train", "--mean-provenance": "holdout"},
        {"--fail-on": "recovered>>3"},
        {"--fail-on": "attributes"},
        {"--device": "tpu"},
        {"--preset": "none"},
        {"--arch": "mlp:3-1"},
        {"--config": "gone.toml"},
        {"--steps": "0"},
    ],
)
def test_bad_input_is_2_and_leaves_nothing(
    files: dict[str, list[str]], change: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = [*files["tight"], "--out", str(out), "--quiet"]
    assert main([*command, *(word for pair in change.items() for word in pair)]) == 2
    assert not out.exists()


def test_an_unsafe_file_is_4(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "bad.pt"
    torch.save({"w": pickle.PickleBuffer}, path)
    assert main(["audit", str(path), "--out", str(tmp_path / "run"), "--quiet"]) == 4
    assert not (tmp_path / "run").exists()


def test_an_internal_error_is_70_and_never_a_leak(
    files: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    # No input is known to raise an internal error, so a stage is replaced by one that does.
    monkeypatch.setattr("residuum.auditing.run.decide", broken)
    monkeypatch.delenv("RESIDUUM_DEBUG", raising=False)
    assert main([*files["tight"], "--out", str(tmp_path / "run"), "--quiet"]) == 70
    assert not (tmp_path / "run" / "result.json").exists()


def test_gates_on_top(finished: Path, files: dict[str, list[str]]) -> None:
    command = [*files["leaky"], "--out", str(finished), "--quiet"]
    assert main([*command, "--fail-on", "recovered>=1000"]) == 0
    assert main([*command, "--fail-on", "recovered>=5"]) == 1
    assert main([*command, "--fail-on", "recovered>=1000", "--fail-on", "leak"]) == 1
    assert main([*command, "--fail-on", "recovered>=1000", "--fail-on", "named>=1"]) == 1
    assert main([*command, "--exit-zero"]) == 0


def test_data_that_do_not_fit_are_2_and_leave_nothing(
    files: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is free for the corrected command."""
    command, out = list(files["tight"]), tmp_path / "run"
    data, test = (Dataset.from_npz(command[command.index(k) + 1]) for k in ("--data", "--holdout"))
    ten = torch.arange(len(data)) % 10
    assert data.mean is not None
    for name, changed, message in (
        (
            "--data",
            data.replace(x=torch.zeros(20, 5), mean=None),
            "must have the shape that the network takes",
        ),
        ("--data", data.replace(y=ten), "For a network with one output, the labels"),
        ("--data", data.replace(x=data.x * 255), "outside the known value range"),
        (
            "--holdout",
            test.replace(x=torch.zeros(400, 5), mean=None),
            "must have the shape of the training samples",
        ),
        ("--holdout", test.replace(mean=test.mean + 1), "centered by the same mean"),
    ):
        changed.to_npz(tmp_path / "bad.npz")
        grants = ["--mean", "0.3"] if changed.mean is None else []
        assert main([*command, name, str(tmp_path / "bad.npz"), *grants, "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()


def test_a_mean_of_another_size_is_2_and_leaves_nothing(
    files: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "mean.npy", np.zeros((3, 5)))
    command = [
        *files["tight"],
        "--mean",
        str(tmp_path / "mean.npy"),
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(command) == 2
    assert "(64); got 15" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_request_without_work_blocks_no_later_request(
    files: dict[str, list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    (out / "work").mkdir(parents=True)
    (out / "work" / "request.json").write_text('{"seed": 7}')
    (out / "work" / "state.safetensors").write_bytes(b"under way")
    assert main([*files["tight"], "--out", str(out), "--quiet"]) == 2
    (out / "work" / "state.safetensors").unlink()
    assert main([*files["tight"], "--out", str(out), "--quiet"]) == 3
    assert listing(out) == FILES_OF_ONE_ATTACK


def test_samples_on_another_scale_are_said_loudly(
    files: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once for a range that the samples leave, once for a control preprocessed otherwise."""
    command = list(files["tight"])
    other = Dataset.from_npz(command[command.index("--holdout") + 1])
    other.replace(x=other.x * 10).to_npz(tmp_path / "scaled.npz")
    out = tmp_path / "run"
    scaled = ["--holdout", str(tmp_path / "scaled.npz"), "--value-range", "0,0.9"]
    assert main([*command, *scaled, "--out", str(out)]) in (0, 1, 3)
    output = capsys.readouterr().out
    for text in ("outside the known value range 0 to 0.9", "on another scale than training"):
        warnings = json.loads((out / "result.json").read_text())["warnings"]
        (warning,) = (line for line in warnings if text in line)
        assert f"note: {warning}" in " ".join(output.split())
        assert text in (out / "report.html").read_text()


def test_samples_on_one_scale_are_not_remarked_on() -> None:
    for victim in (leaky, tight):
        split = victim()[1]
        assert check_scales(split.train, split.holdout, knowledge(split)) == ()
        first = split.train.replace(x=split.train.x[:4], y=split.train.y[:4])
        assert check_scales(first, split.holdout, knowledge(split)) == ()


def test_a_control_of_training_samples_is_called_that(
    files: dict[str, list[str]], tmp_path: Path
) -> None:
    command, out, several = files["tight"], tmp_path / "run", tmp_path / "several.npz"
    train = Dataset.from_npz(command[command.index("--data") + 1])
    train.take(list(range(len(train))) * 8).to_npz(several)
    assert main([*command, "--holdout", str(several), "--out", str(out), "--quiet"]) == 3
    result = json.loads((out / "result.json").read_text())
    assert result["verdict"]["reasons"] == [
        "20 of 20 training samples also occur in the held-out set. At most a tenth may. Pass held-out "
        "samples that were not trained on",
        "the chance level is unknown: all samples of the held-out set are training samples",
    ]
    assert result["next_step"]["text"].startswith("Pass other held-out samples (--holdout)")


def test_stages_are_reported_when_they_begin() -> None:
    begun: list[str] = []

    class Names(AuditListener):
        def stage(self, name: str) -> None:
            begun.append(name)

    result = audit("tight", attacks=("unmix",), listener=Names())
    assert begun == list(result.seconds)
    assert begun == [
        *("membership", "attacks", "negative controls", "scores", "certificates", "exposure"),
    ]


def test_every_stage_is_said_unless_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for visible, stream in ((True, Terminal()), (False, Terminal()), (True, io.StringIO())):
        monkeypatch.setattr("sys.stderr", stream)
        with listener_for(visible) as listener:
            assert (listener is not SILENT) == visible
            for name in ("attacks", *STAGE_MESSAGES):
                listener.stage(name)
        assert {text in stream.getvalue() for text in STAGE_MESSAGES.values()} == {visible}
        assert stream.isatty() or "\x1b" not in stream.getvalue()


def test_progress_counts_restarts_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the log of a pipeline a plain line now and then, no more than one in ten seconds."""
    stream, clock = io.StringIO(), iter([0.0, 0.0, 5.0, *[72.0] * 5])
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    progress = AttackProgress(500, 2000, torch.ones(4), torch.ones(4, 1), ("layers.0",))
    with listener_for(True) as listener:
        watcher = listener.watch_attack("binary-kkt", 4, 12)
        assert watcher is not None
        watcher(progress)
        watcher(progress)
    line = "attacking: 25%  binary-kkt  restart 5-8 of 12  step 500 of 2000  1m12s\n"
    assert stream.getvalue() == line


def test_an_audits_folder_is_not_scored_over(
    finished: Path, files: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: sha256(finished / name) for name in FILES}
    position = files["leaky"].index("--data")
    command = [
        "score",
        str(finished),
        *files["leaky"][position : position + 4],
        "--ckpt",
        files["leaky"][1],
    ]
    assert main(command) == 2
    assert "is the folder of an audit" in capsys.readouterr().err
    assert listing(finished) == FILES
    assert before == {name: sha256(finished / name) for name in FILES}


# Run directories


def test_the_same_command_shows_the_finished_audit_again(
    finished: Path, files: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: (finished / name).stat().st_mtime_ns for name in FILES if name[0] != "."}
    assert main([*files["leaky"], "--out", str(finished), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == json.loads((finished / "result.json").read_text())
    assert before == {name: (finished / name).stat().st_mtime_ns for name in before}
    assert main([*files["leaky"], "--seed", "1", "--out", str(finished)]) == 2
    assert main([*files["tight"], "--out", str(finished)]) == 2
    assert "other settings or inputs" in capsys.readouterr().err


def test_config_repeats_the_audit(finished: Path, tmp_path: Path) -> None:
    config = tomllib.loads((finished / "config.toml").read_text())
    assert config["attacks"] == ["unmix", KKT]
    assert "batches" not in config
    repeat_folder = tmp_path / "again"
    command = [
        "audit",
        "--config",
        str(finished / "config.toml"),
        "--out",
        str(repeat_folder),
        "--quiet",
    ]
    assert main(command) == 1
    for name in ("scores.json", "reconstruction.safetensors"):
        a, b = ((folder / name).read_bytes() for folder in (finished, repeat_folder))
        if name.endswith("json"):
            assert json.loads(a)["recovered"] == json.loads(b)["recovered"]
            assert json.loads(a)["per_sample"] == json.loads(b)["per_sample"]
    first, second = (rs.AuditResult.load(folder) for folder in (finished, repeat_folder))
    assert same(first.reconstructions[0].x, second.reconstructions[0].x)
    assert first.verdict.reasons == second.verdict.reasons
    assert first.uniqueness_reason == second.uniqueness_reason
    assert first.settings == second.settings


def test_a_config_for_other_files_is_refused(
    finished: Path, tmp_path: Path, files: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["audit", files["untrained"][1], "--config", str(finished / "config.toml")]
    assert main([*command, "--out", str(tmp_path / "x")]) == 2
    assert (
        "must be the same file as in the audit that wrote the configuration"
        in capsys.readouterr().err
    )


def test_reports_again_from_the_folder_alone(finished: Path, tmp_path: Path) -> None:
    assert main(["report", str(finished), "--redact", "--quiet"]) == 0
    redacted = (finished / "report-redacted.html").read_text()
    (finished / "report-redacted.html").unlink()
    assert "data:image" not in redacted
    assert "data:image" in (finished / "report.html").read_text()
    out = tmp_path / "r.html"
    assert main(["report", str(finished), "--blur", "--out", str(out), "--quiet"]) == 0
    assert out.read_text() != redacted
    assert main(["report", str(tmp_path), "--quiet"]) == 2


def test_a_changed_artifact_is_refused(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    data = bytearray((copy / "audit.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "audit.safetensors").write_bytes(bytes(data))
    assert main(["report", str(copy), "--quiet"]) == 2


def test_an_audit_of_an_older_version_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    result = json.loads((copy / "result.json").read_text())
    (copy / "result.json").write_text(json.dumps({**result, "schema_version": "4.0"}))
    assert main(["report", str(copy)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "has schema version 4.0, and" in message
    assert message.endswith("Run the audit again.")


@pytest.mark.parametrize("line", ["[[batches]]\nattack = 'kkt'", "vouch = true", "twin = false"])
def test_a_configuration_of_an_older_version_is_refused(
    tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"checkpoint = 'm.pt'\n{line}\n")
    assert main(["audit", "--config", str(config), "--out", str(tmp_path / "run")]) == 2
    assert f"no setting '{line.strip('[').split(' ')[0].split(']')[0]}'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_two_audits_into_one_folder_refuse(
    files: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with AuditRun.open(out):
        assert main([*files["tight"], "--out", str(out)]) == 2
        assert "another audit is writing" in capsys.readouterr().err
    assert not out.exists()


def test_other_folders_and_files_are_left_alone(
    files: dict[str, list[str]], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file", "file/below"):
        assert main([*files["tight"], "--out", str(tmp_path / name), "--quiet"]) == 2
    assert listing(tmp_path) == ["file", "mine", "mine/thesis.tex"]


def test_after_a_full_disk_and_kills_at_any_moment_the_same_command_ends_with_its_verdict(
    files: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file may exceed 20 kB: the reconstruction does not fit, the request does."""
    out = tmp_path / "run"
    command = [*files["kkt"], "--out", str(out), "--json"]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    def opened() -> int:
        return (
            (out / ".gitignore").stat().st_mtime_ns
        )  # written whenever a process takes the folder

    process = start(*files["kkt"], "--out", str(out), preexec_fn=limit)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert "File too large" in err
    assert "Traceback" not in err
    assert not (out / "result.json").exists()
    for after in (0.0, 0.7, 1.5):
        before, process = opened(), start(*command)
        wait_for(lambda before=before: opened() != before)
        time.sleep(after)
        process.kill()
        process.communicate(timeout=30)
    assert main(command) == 3
    assert json.loads(capsys.readouterr().out)["verdict"]["outcome"] == INCONCLUSIVE
    assert listing(out) == FILES


# Interruptions


def test_an_interrupted_attack_continues_in_the_middle(tmp_path: Path) -> None:
    """The plan is fixed, so the result is that of an audit in one piece."""

    class InterruptAtStep(AuditListener):
        def watch_attack(self, *_: Any) -> Any:
            def stop(progress: AttackProgress) -> None:
                if progress.step >= 200:
                    raise KeyboardInterrupt

            return stop

    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        audit("tight", attacks=(KKT,), out=out, listener=InterruptAtStep())
    state = out / "work" / "state-binary-kkt-0-2x400.safetensors"
    assert state.is_file()
    assert not state.with_name(state.name.removeprefix("state-")).exists()
    begun: list[int] = []

    class Steps(AuditListener):
        def watch_attack(self, *_: Any) -> Any:
            return lambda progress: begun.append(progress.step)

    result = audit("tight", attacks=(KKT,), out=out, listener=Steps())
    assert min(begun) > 200
    assert listing(out) == sorted([*FILES_OF_ONE_ATTACK, "model.safetensors"])
    uninterrupted = audit("tight", attacks=(KKT,))
    assert same(result.reconstructions[0].x, uninterrupted.reconstructions[0].x)
    assert result.verdict.reasons == uninterrupted.verdict.reasons


def test_ctrl_c_is_130_and_the_same_command_goes_on(
    files: dict[str, list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = [*files["kkt"], "--out", str(out), "--quiet"]
    stage_file = out / "work" / "stage-membership.safetensors"
    code, err = interrupt(*command, once=stage_file, after=0.2)
    # Python ends by the signal itself if Ctrl-C interrupts an import; a shell shows 130 for both.
    assert code in (130, -signal.SIGINT), err
    assert err.endswith("The command was interrupted. Finished work is kept.\n")
    assert stage_file.is_file()
    assert main(command) == 3
    assert listing(out) == FILES


def test_a_leftover_state_of_a_finished_batch_is_harmless(tmp_path: Path) -> None:
    """A stop between the two halves of ``save`` leaves the state of a batch that is done."""
    run = AuditRun(tmp_path)
    first, second = Batch("binary-kkt", 1, 20, 0), Batch("binary-kkt", 1, 20, 1)
    run.work.mkdir(exist_ok=True)
    run.state(first).write_bytes(b"left behind")
    assert not run.state(second).exists()
    assert run.load(first) is None


def test_what_a_killed_write_left_is_cleared(files: dict[str, list[str]], tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / ".result.json.abcd1234").write_text("{")
    (out / "work").mkdir()
    (out / "work" / "request.json").write_text('{"half": ')
    (out / "work" / "binary-kkt-9-2x400.safetensors").write_bytes(b"of which audit?")
    assert main([*files["kkt"], "--out", str(out), "--quiet"]) == 2  # damaged: cleanly refused
    (out / "work" / "request.json").unlink()
    (out / "work" / "binary-kkt-9-2x400.safetensors").unlink()
    (out / "work" / "binary-kkt-0-2x400.safetensors").write_bytes(b"half")
    assert main([*files["kkt"], "--out", str(out), "--quiet"]) == 3
    assert listing(out) == FILES


def wait_for(ready: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ready()


def test_odd_names_are_text_everywhere(files: dict[str, list[str]], tmp_path: Path) -> None:
    folder = tmp_path / 'a"b\\c<script>\n'
    folder.mkdir()
    command = list(files["tight"])
    data = Dataset.from_npz(command[3]).replace(classes=("<script>alert(1)</script>", "a|b"))
    data.to_npz(folder / "train.npz")
    command[3] = str(folder / "train.npz")
    out = folder / "run"
    assert main([*command, "--out", str(out), "--quiet"]) == 3
    assert tomllib.loads((out / "config.toml").read_text())["data"] == str(folder / "train.npz")
    assert "<script>alert(1)" not in (out / "report.html").read_text()
    assert "<script>alert(1)" not in (out / "model_card.md").read_text()


def test_a_name_that_is_no_text_is_refused(files: dict[str, list[str]], tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(str(tmp_path)) + b"/\xff.npz")
    Dataset(torch.zeros(20, 64), torch.ones(20)).to_npz(name)
    command = list(files["tight"])
    command[3] = name
    assert main([*command, "--mean", "0.5", "--out", str(tmp_path / "run"), "--quiet"]) == 2


def test_arrays_of_the_report_are_finite(finished: Path) -> None:
    result = rs.AuditResult.load(finished)
    assert result.evidence is not None
    assert np.isfinite(result.evidence.null.numpy()).all()
    assert len(result.evidence.null) == result.evidence.null_sets * 40
