"""Fine-tuned networks from files: adapters on their base, heads on frozen layers, what each surface gives."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import residuum as rs
from residuum.attacks import make_attack
from residuum.attacks.run import adapt_to_surface as configured_on
from residuum.auditing.outcomes import AttackOutcome, Findings
from residuum.auditing.power import ControlSize, PositiveControls
from residuum.auditing.request import AuditRequest
from residuum.auditing.schedule import select_attacks
from residuum.auditing.verdict import MOMENT_ATTACKED, Checks, decide
from residuum.cli.main import main
from residuum.errors import CheckpointError, InputError
from residuum.io.adapters import load_tuned
from residuum.io.release import open_release
from residuum.io.release_knowledge import add_stored_knowledge
from residuum.records import Dataset
from residuum.surfaces.head import extract_head
from tests.program import Capture, one_line, printed


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 1)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base.pt, all.pt (all layers tuned), head.pt (the first frozen), an adapter, data."""
    here, split = tmp_path_factory.mktemp("tuned"), rs.load_dataset("digits", 20)
    split.train.to_npz(here / "train.npz")
    few = split.holdout.replace(x=split.holdout.x[:200], y=split.holdout.y[:200])
    few.to_npz(here / "holdout.npz")
    x, y = split.train.x.flatten(1).float(), split.train.y.float()
    base = network()
    torch.save(base.state_dict(), here / "base.pt")
    for name, layers in (("all", (0, 2, 4)), ("head", (2, 4))):
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD([p for i in layers for p in model[i].parameters()], 0.1, 0.9)
        for _ in range(300):
            optimizer.zero_grad()
            nn.functional.softplus(-y * model(x)[:, 0]).mean().backward()
            optimizer.step()
        torch.save(model.state_dict(), here / f"{name}.pt")
        training_checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(training_checkpoint, here / f"{name}-saved.pt")
    factors = {"A": torch.randn(3, 64), "B": 0.1 * torch.randn(30, 3)}
    names = {f"base_model.model.0.lora_{k}.weight": t for k, t in factors.items()}
    save_file(names, here / "adapter_model.safetensors")
    (here / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 6}))
    return here


def test_an_adapter_is_read_as_what_it_makes_of_its_base(folder: Path) -> None:
    base = torch.load(folder / "base.pt", weights_only=True)
    checkpoint = load_tuned(open_release(folder / "adapter_model.safetensors"), folder / "base.pt")
    release = _adapter(folder)
    expected = base["0.weight"] + 2 * release["B"] @ release["A"]
    assert torch.allclose(checkpoint.theta["layers.0.weight"], expected, atol=1e-6)
    assert torch.equal(checkpoint.theta["layers.1.weight"], base["2.weight"])
    assert any("added to its base" in note for note in checkpoint.assumptions)


def _adapter(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    adapter = load_file(folder / "adapter_model.safetensors")
    return {name.split("lora_")[1][0]: t for name, t in adapter.items()}


def test_an_adapter_of_another_base_is_refused(folder: Path, tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(32, 30), nn.ReLU(), nn.Linear(30, 1))
    torch.save(other.state_dict(), tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="must have the same shapes as its base"):
        load_tuned(open_release(folder / "adapter_model.safetensors"), tmp_path / "other.pt")


def test_a_head_on_frozen_layers_is_a_network_on_their_features(folder: Path) -> None:
    released = rs.load_checkpoint(folder / "head.pt")
    start = rs.load_checkpoint(folder / "base.pt").theta
    head = extract_head(released, rs.Knowledge(theta0=start, shape=(1, 8, 8), value_range=(0, 1)))
    assert head is not None
    assert head.frozen == ("layers.0",)
    assert head.checkpoint.arch == "mlp:30-20-1,bias=all"
    data = Dataset.from_npz(folder / "train.npz")
    features = head.compute_features(data)
    model, full_model = head.checkpoint.copy_module(), released.copy_module()
    x = data.x.flatten(1).to(next(full_model.parameters()))
    assert torch.allclose(model(features.x.to(x)), full_model(x), atol=1e-6)
    head_knowledge = head.translate_knowledge(
        rs.Knowledge(theta0=start, shape=(1, 8, 8), value_range=(0, 1))
    )
    assert head_knowledge.known_names == ("theta0",)
    assert torch.equal((head_knowledge.theta0 or {})["layers.0.weight"], start["layers.1.weight"])
    assert "compared with the features of the data" in head.note


def test_where_the_first_layer_moved_there_is_no_head(folder: Path) -> None:
    start = rs.load_checkpoint(folder / "base.pt").theta
    assert extract_head(rs.load_checkpoint(folder / "all.pt"), rs.Knowledge(theta0=start)) is None
    assert extract_head(rs.load_checkpoint(folder / "head.pt"), rs.Knowledge()) is None
    unmoved = rs.load_checkpoint(folder / "base.pt")
    assert extract_head(unmoved, rs.Knowledge(theta0=start)) is None


QUICK = ["--effort", "quick", "--steps", "20", "--subsets", "200", "--no-baselines"]


def test_audits_of_tuned_networks_judge_what_moved_and_never_pass_unexplained(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    data = ["--data", str(folder / "train.npz"), "--holdout", str(folder / "holdout.npz")]
    base, adapter = str(folder / "base.pt"), str(folder / "adapter_model.safetensors")
    cases = {
        "all": ["all.pt", "--base", base],
        "head": ["head.pt", "--base", base],
        "adapter": ["base.pt", "--adapter", adapter],
    }
    results = {}
    for name, (file, *more) in cases.items():
        command = ["audit", str(folder / file), *more, *data, *QUICK, "--json"]
        code = main([*command, "--out", str(tmp_path / name)])
        results[name] = printed(capsys)
        assert code in (1, 3), name
        ntk = next(row for row in results[name]["attacks"] if row["name"] == "ntk")
        assert ntk["ran"], name
        results[name]["judged"] = ntk["judged"]
    assert results["all"]["judged"] == ["layers.0", "layers.1", "layers.2"]
    assert results["head"]["judged"] == ["layers.0", "layers.1"]  # of the head
    assert results["head"]["network"]["arch"] == "mlp:30-20-1,bias=all"
    assert any("features" in reason for reason in results["head"]["verdict"]["reasons"])
    assert results["adapter"]["judged"] == ["layers.0"]
    repeat_command = ["audit", "--config", str(tmp_path / "head" / "config.toml"), "--json"]
    assert main([*repeat_command, "--out", str(tmp_path / "again")]) in (1, 3)
    assert printed(capsys)["network"] == results["head"]["network"]


def test_one_surface_can_be_asked_for(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    data = ["--data", str(folder / "train.npz"), "--holdout", str(folder / "holdout.npz")]
    command = ["audit", str(folder / "all-saved.pt"), *data, *QUICK, "--json"]
    assert main([*command, "--surface", "moment", "--out", str(tmp_path / "m")]) in (1, 3)
    ran = {row["name"]: row["surface"] for row in printed(capsys)["attacks"] if row["ran"]}
    assert ran == {"moment": "moment", "unmix-moment": "moment"}
    with pytest.raises(InputError, match="--surface change needs initial weights"):
        select_attacks(AuditRequest(surface="change"), rs.Knowledge())
    file = str(folder / "all-saved.pt")
    knowledge = add_stored_knowledge(
        open_release(file), rs.load_checkpoint(file), rs.Knowledge(theta0={})
    )
    attack_of_request = {
        ("", "auto"): "auto",
        ("weights", "auto"): "auto",
        ("change", "auto"): "ntk",
        ("moment", "auto"): "moment",
        ("weights", "weight-decay"): "weight-decay",
        ("change", "unmix"): "unmix",
        ("moment", "unmix"): "unmix-moment",
        ("weights", "unmix-moment"): "unmix",
    }
    for (surface, choice), attack in attack_of_request.items():
        config = configured_on(surface, knowledge, make_attack(choice))
        assert config.name == attack
    few = ["--steps", "3", "--candidates", "5", "--json"]
    for surface, code in (("weights", False), ("moment", True)):
        out = ["--out", str(tmp_path / surface)]
        assert main(["attack", file, "--surface", surface, *few, *out]) == 0
        output = printed(capsys)
        assert (output["attack"] == "moment") is code
        assert ("--surface moment" in "".join(output["notes"])) is not code
    wrong = ["attack", file, "--surface", "moment", "--preset", "ntk", "--dry-run"]
    assert main(wrong) == 2
    assert "The attack 'ntk' needs --surface change; got --surface moment." in one_line(capsys)
    two_bases = ["audit", str(folder / "base.pt"), "--base", "a", "--adapter", "b", "--out", "x"]
    assert main(two_bases) == 2
    assert "Omit --base or --adapter" in one_line(capsys)


def row(name: str, surface: str) -> AttackOutcome:
    return AttackOutcome(
        name,
        True,
        True,
        True,
        "",
        surface=surface,
        recovered=0,
        expected_by_chance=0.4,
        p_value=0.5,
        adjusted=0.9,
    )


def test_optimizer_state_is_never_passed_over() -> None:
    """There is no positive control for optimizer state, so finding nothing there rules nothing out."""
    finding_counts = Findings(n=20, tests=2, recovered=0, expected_by_chance=0.5, p_value=0.9)
    detected = ControlSize(20, (9, 9, 9), 3, 0.01)
    checks = Checks(positive_controls=(PositiveControls("reconstruction", (detected,)),))
    weights = row("binary-kkt", "weights")
    assert decide(finding_counts, (weights,), checks).outcome == "no-leak-found"
    verdict = decide(finding_counts, (weights, row("moment", "moment")), checks)
    assert verdict.outcome == "inconclusive"
    assert MOMENT_ATTACKED in verdict.reasons


@pytest.mark.parametrize("kind", ["difference", "gradient"])
def test_a_difference_has_no_base_subtracted_again(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A federated update is a difference already, so it is audited as an update of the base."""
    torch.manual_seed(0)
    split = rs.load_dataset("digits", 20, seed=3, holdout=200)
    net = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 1))
    base = {name: t.clone() for name, t in net.state_dict().items()}
    x, y = split.train.x.flatten(1).float(), split.train.y.float()
    descent = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(20):
        descent.zero_grad()
        nn.functional.softplus(-y * net(x)[:, 0]).mean().backward()
        gradient = {name: p.grad.clone() for name, p in net.named_parameters()}
        descent.step()
    tuned = net.state_dict()
    difference = {name: t - base[name] for name, t in tuned.items()}
    torch.save(base, tmp_path / "base.pt")
    torch.save(tuned, tmp_path / "tuned.pt")
    file = tmp_path / f"{kind}.pt"
    torch.save(difference if kind == "difference" else gradient, file)
    split.train.to_npz(tmp_path / "train.npz")
    split.holdout.to_npz(tmp_path / "test.npz")
    files = ["--data", str(tmp_path / "train.npz"), "--holdout", str(tmp_path / "test.npz")]
    options = [*files, "--base", str(tmp_path / "base.pt"), *QUICK]
    code = main(["audit", str(file), *options, "--out", str(tmp_path / "a")])
    assert code in (1, 3)
    text = " ".join(capsys.readouterr().out.split())
    assert "the update, by" in text
    assert f"the file holds a {'weight ' if kind == 'difference' else ''}{kind}" in text
    code = main(["audit", str(tmp_path / "tuned.pt"), *options, "--out", str(tmp_path / "b")])
    assert code in (1, 3)  # trained weights are taken as before
