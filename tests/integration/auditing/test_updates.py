"""Audits of federated updates: the report names the update, and more knowledge recovers no less."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import residuum as rs
from residuum.attacks.unmixing.attack import Unmix, UnmixOptimizerState
from residuum.auditing.dryrun import dry_run
from residuum.cli.main import main
from residuum.errors import InputError
from residuum.io.checkpoints import as_network
from residuum.io.updates import read_update
from residuum.records import Knowledge, Split
from residuum.similarity import cosine

QUICK = ["--budget", "10s", "--no-positive-controls", "--shape", "1,8,8"]
State = dict[str, Tensor]


def draw_digits(n: int, seed: int) -> Split:
    """Return n digits and 200 held-out digits."""
    split = rs.load_dataset("digits", 20, seed=seed, holdout=200, task="multiclass")
    return split.replace(train=split.train.take(torch.arange(20)[:: 20 // n][:n]))


def make_update(n: int, steps: int, seed: int, momentum: float = 0.0) -> tuple[Split, State, State]:
    """Return digits, the weights before, and the gradient (steps = 0) or difference of one client."""
    split = draw_digits(n, seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    before = copy.deepcopy(model.state_dict())
    x, y = split.train.x.flatten(1).float(), split.train.y.long()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum)
    for _ in range(max(1, steps)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if steps:
            optimizer.step()
    after = model.state_dict()
    if steps:
        return split, before, {name: after[name] - before[name] for name in after}
    return split, before, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """g.pt (a gradient of six digits), base.pt, train.npz and test.npz."""
    here = tmp_path_factory.mktemp("update")
    split, before, gradient = make_update(6, 0, seed=0)
    torch.save(before, here / "base.pt")
    torch.save(gradient, here / "g.pt")
    split.train.to_npz(here / "train.npz")
    split.holdout.to_npz(here / "test.npz")
    return here


@pytest.mark.parametrize("form", ["recognized", "recognized with its base", "given"])
def test_an_audit_says_update_and_recovers_all_of_a_small_batch(
    form: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(folder / "base.pt")
    update = str(folder / "g.pt")
    model = {
        "recognized": [update],
        "recognized with its base": [update, "--base", base],
        "given": ["--update", update, "--base", base],
    }[form]
    samples = ["--data", str(folder / "train.npz"), "--holdout", str(folder / "test.npz")]
    out = tmp_path / "out"
    assert main(["audit", *model, *samples, *QUICK, "--out", str(out)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "6 of 6 training samples were reconstructed" in text
    assert "the update, by 1 attack" in text
    assert "secure aggregation" in text
    assert "etrain" not in text
    assert "residuum strip" not in text
    assert "optimizer state" not in text
    result = json.loads((out / "result.json").read_text())
    assert {row["surface"] for row in result["attacks"] if row["ran"]} <= {
        "update",
        "records in the file",  # rows of neurons that are active for one sample
    }
    assert "update" in (out / "config.toml").read_text() or form != "given"


def test_a_repeated_audit_reads_the_update_again(folder: Path, tmp_path: Path) -> None:
    arguments = ["--update", str(folder / "g.pt"), "--base", str(folder / "base.pt")]
    samples = ["--data", str(folder / "train.npz"), "--holdout", str(folder / "test.npz")]
    first, second = tmp_path / "a", tmp_path / "b"
    assert main(["audit", *arguments, *samples, *QUICK, "--out", str(first), "--quiet"]) == 1
    command = ["audit", "--config", str(first / "config.toml"), "--out", str(second), "--quiet"]
    assert main(command) == 1
    verdicts = [json.loads((out / "result.json").read_text())["verdict"] for out in (first, second)]
    assert verdicts[0] == verdicts[1]


def test_other_samples_are_not_reported(folder: Path) -> None:
    """The negative control: digits that the client does not have."""
    strangers = draw_digits(6, seed=5)
    result = rs.audit(
        folder / "base.pt",
        update=folder / "g.pt",
        data=strangers.train,
        holdout=strangers.holdout,
        knowledge={"shape": (1, 8, 8)},
        budget=10,
    )
    assert result.verdict.outcome == "inconclusive"
    assert result.verdict.recovered == 0
    assert any("holds an update" in reason for reason in result.verdict.reasons)


def test_a_dry_run_lists_what_is_attacked(folder: Path) -> None:
    split = draw_digits(6, seed=0)
    samples: dict[str, Any] = {"data": split.train, "holdout": split.holdout}
    alone = dry_run(None, update=folder / "g.pt", **samples)
    with_base = dry_run(folder / "base.pt", update=folder / "g.pt", **samples)
    assert not alone.obstacles
    assert not with_base.obstacles
    status = {row.what: row.status for row in alone.applies}
    assert status["unmix-moment"] == "to be tried"
    assert status["moment"] == "not tried"
    assert "binary-kkt" not in status
    assert {row.what: row.status for row in with_base.applies}["moment"] == "to be tried"
    assert alone.verdicts["no-leak-found"] != alone.verdicts["leak"]


def test_attacks_on_weights_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="applies to an update"):
        rs.audit(folder / "base.pt", update=folder / "g.pt", attacks=("kkt",))


def test_live_networks_and_tensors_are_taken(folder: Path) -> None:
    split, before, gradient = make_update(6, 0, seed=0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model.load_state_dict(before)
    result = rs.audit(model, update=gradient, data=split.train, holdout=split.holdout, budget=10)
    assert result.verdict.recovered == 6


@pytest.mark.parametrize(("n", "steps", "momentum"), [(5, 0, 0.0), (5, 4, 0.9)])
def test_more_knowledge_recovers_no_less(n: int, steps: int, momentum: float) -> None:
    """From the update alone to base, value range and kind, and to the local weights with their base."""
    for seed in (1,):
        split, before, update = make_update(n, steps, seed, momentum)
        base, kind = as_network(before), "difference" if steps else "gradient"
        counts = []
        for has_base, value_range in ((False, None), (True, None), (True, (0.0, 1.0))):
            read = read_update(update, base if has_base else None, kind)
            knowledge = read.add_to(Knowledge(shape=(1, 8, 8), value_range=value_range))
            result = UnmixOptimizerState(seconds=0.2).run(read.network, knowledge)
            counts.append(count_recovered(split, result.x))
        if steps:
            local = as_network({name: before[name] + update[name] for name in before})
            knowledge = Knowledge(shape=(1, 8, 8), theta0=base.theta)
            counts.append(count_recovered(split, Unmix(seconds=0.2).run(local, knowledge).x))
        assert min(counts) == counts[0], counts
        assert counts[0] >= 0.5 * n


def count_recovered(split: Split, candidates: Tensor) -> int:
    x, y = (t.flatten(1).double() for t in (split.train.x, candidates))
    ncc = cosine(x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True))
    return int((ncc.amax(1) > 0.95).sum())
