"""Rows of embeddings that training touched, layers that moved, adapters: compared with the base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import residuum as rs
from experiments.embedding_rows import OPTIMIZERS, SEEN, train_table
from residuum.cli.main import main
from residuum.errors import CheckpointError
from residuum.scanning.base_comparison import CURVE, NONE, find_touched_rows
from tests.program import Capture, one_line, printed


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_that_were_seen_are_listed(name: str) -> None:
    rule, optimizer = OPTIMIZERS[name]
    table, base, seen = train_table(optimizer, steps=150)
    touched = find_touched_rows(table, base)
    assert touched.rule == rule
    assert len(seen) == SEEN
    right = len(seen & {*touched.rows})
    assert right / len(touched.rows) > 0.99
    assert right / len(seen) > 0.99


def test_in_16_bits_no_row_is_listed_that_was_not_seen() -> None:
    for name, (_, optimizer) in OPTIMIZERS.items():
        for kind in (torch.bfloat16, torch.float32):  # training in 16 bits, or in more
            table, base, seen = train_table(optimizer, kind=kind, steps=150)
            touched = find_touched_rows(table.bfloat16(), base.bfloat16())
            assert {*touched.rows} <= seen, name
            assert touched.coarse
            assert len(touched.rows) >= 0.5 * len(seen), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_a_tied_head_it_says_that_it_cannot_tell(name: str) -> None:
    table, base, _ = train_table(OPTIMIZERS[name][1], tokens=1000, steps=150, tied=True)
    touched = find_touched_rows(table, base)
    assert (touched.rule, touched.rows) == (NONE, ())
    assert "nobody can tell" in touched.sentence


def test_a_table_that_nobody_trained_has_no_touched_rows() -> None:
    base = torch.randn(300, 16)
    assert find_touched_rows(base.clone(), base).rows == ()
    assert find_touched_rows(0.9 * base, base).rows == ()
    assert find_touched_rows(torch.randn(300, 16), base).rule == NONE


def test_the_curve_is_that_of_the_recursion_itself() -> None:
    """The naive reference: Adam with coupled decay and no gradient, entry by entry in float64."""
    w0 = torch.randn(2000, 8, dtype=torch.float64)
    w, m, v = w0.clone(), torch.zeros_like(w0), torch.zeros_like(w0)
    for t in range(1, 101):
        g = 1e-2 * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    table = nn.Parameter(w0.float().clone())
    optimizer = torch.optim.Adam([table], 1e-3, weight_decay=1e-2)
    for _ in range(100):
        table.grad = torch.zeros_like(table)
        optimizer.step()
    assert torch.allclose(table.detach().double(), w, atol=1e-5)
    moved = table.detach().clone()
    moved[:50] += 0.01 * torch.randn(50, 8)
    touched = find_touched_rows(moved, w0.float())
    assert (touched.rule, touched.rows) == (CURVE, tuple(range(50)))


# From files


def files(folder: Path, **more: Tensor) -> tuple[Path, Path, set[int]]:
    table, base, seen = train_table(OPTIMIZERS["Adam"][1], tokens=1000, steps=150)
    head = torch.randn(2, 32)
    save_file({"embeddings.weight": base, "head.weight": head}, folder / "base.safetensors")
    after = {"module.embeddings.weight": table, "module.head.weight": head + 1, **more}
    torch.save({"model": after}, folder / "tuned.pt")
    return folder / "tuned.pt", folder / "base.safetensors", seen


def test_a_scan_with_the_base_lists_rows_and_layers(tmp_path: Path, capsys: Capture) -> None:
    tuned_file, base, seen = files(tmp_path)
    assert main(["scan", str(tuned_file), "--base", str(base), "--json"]) == 1  # words were seen
    (file,) = printed(capsys)["files"]
    rows = next(finding for finding in file["findings"] if finding["kind"] == "touched-rows")
    assert {*rows["rows"]} == seen
    assert rows["count"] == len(seen)
    change = next(finding for finding in file["findings"] if finding["kind"] == "start")
    assert change["places"] == 2
    assert (rows["severity"], change["severity"]) == ("high", "medium")
    command = ["scan", str(tuned_file), "--base", str(base), "--fail-on", "touched-rows"]
    assert main(command) == 1
    assert not [f for f in rs.scan(tuned_file).findings if f.kind == "touched-rows"]


def test_a_head_that_is_the_table_is_seen_in_the_file(tmp_path: Path) -> None:
    table, base, _ = train_table(OPTIMIZERS["Adam"][1], tokens=1000, steps=150)
    save_file({"wte.weight": base}, tmp_path / "base.safetensors")
    torch.save({"wte.weight": table, "lm_head.weight": table}, tmp_path / "tied.pt")
    (finding,) = (
        f
        for f in rs.scan(tmp_path / "tied.pt", base=tmp_path / "base.safetensors").findings
        if f.kind == "touched-rows"
    )
    assert "lm_head" in finding.reason
    assert "nobody can tell" in finding.reason
    assert finding.rows == ()


def test_an_adapter_with_its_base_tells_the_change_of_each_layer(tmp_path: Path) -> None:
    a, b, base = torch.randn(2, 8), torch.randn(6, 2), torch.randn(6, 8)
    name = "base_model.model.fc1.lora_"
    save_file({f"{name}A.weight": a, f"{name}B.weight": b}, tmp_path / "adapter.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 8}))
    save_file({"fc1.weight": base}, tmp_path / "base.safetensors")
    findings = rs.scan(
        tmp_path / "adapter.safetensors", base=tmp_path / "base.safetensors"
    ).findings
    change = next(f for f in findings if f.what == "the change of each layer")
    size = float((4 * b @ a).norm() / base.norm())
    assert f"fc1.weight by {size:.2g}" in change.reason


def test_a_base_of_another_network_is_refused(tmp_path: Path, capsys: Capture) -> None:
    tuned_file, _, _ = files(tmp_path)
    save_file({"other.weight": torch.zeros(3, 3)}, tmp_path / "other.safetensors")
    assert main(["scan", str(tuned_file), "--base", str(tmp_path / "other.safetensors")]) == 2
    assert "have no such tensor in common" in one_line(capsys)
    with pytest.raises(CheckpointError):
        rs.scan(tuned_file, base=tmp_path / "missing.safetensors")


def test_a_tensor_that_was_zero_in_the_base_moved_from_zero(tmp_path: Path) -> None:
    base = {"fc.weight": torch.ones(3, 2), "fc.bias": torch.zeros(3)}
    tuned = {"fc.weight": torch.ones(3, 2) * 1.1, "fc.bias": torch.ones(3)}
    torch.save(base, tmp_path / "base.pt")
    torch.save(tuned, tmp_path / "tuned.pt")
    findings = rs.scan(tmp_path / "tuned.pt", base=tmp_path / "base.pt").findings
    (finding,) = [item for item in findings if item.what == "the weights before training"]
    assert "fc.bias from zero" in finding.reason
    assert "fc.weight by 0.1 of its norm" in finding.reason
    assert "e+" not in finding.reason


def test_an_update_is_named_and_not_compared_with_its_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))
    torch.save(model.state_dict(), tmp_path / "base.pt")
    labels = torch.randint(0, 5, (6,))
    nn.functional.cross_entropy(model(torch.randn(6, 40)), labels).backward()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    torch.save(gradient, tmp_path / "round.pt")
    for base in (None, tmp_path / "base.pt"):
        result = rs.scan(tmp_path / "round.pt", base=base)
        assert [(f.kind, f.severity) for f in result.findings] == [("update", "high")]
        command = "residuum audit --update " + str(tmp_path / "round.pt")
        assert command in result.findings[0].remedy
    assert not rs.scan(tmp_path / "base.pt").findings
    assert rs.scan(tmp_path / "round.pt", fail_on=("update",)).exit_code == 1
