"""What asking whether an audit can be believed may cost: a third of the budget, and once per twin."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import residuum as rs
from residuum.auditing import twin
from residuum.auditing.budget import CHECK_SHARE, Allowance, Batch
from residuum.auditing.controls import Claim, ControlRow, run_controls
from residuum.auditing.result import next_step
from residuum.auditing.run import attack_config
from residuum.auditing.stages import AttackStage
from residuum.auditing.twin import TwinNetwork, _no_harder
from residuum.auditing.verdict import INCONCLUSIVE, NO_LEAK_FOUND, Twin
from residuum.records import Knowledge
from residuum.records.base import same
from tests.victims import knowledge, tight

BATCH = (Batch("binary-kkt", 1, 400, 0),)


class Clock:
    """Tells a later time at every look, by so much."""

    def __init__(self, tick: float = 0.0) -> None:
        self.tick, self.now = tick, 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def audited(**options: Any) -> rs.AuditResult:
    checkpoint, split = tight()
    known = options.pop("known", knowledge(split))
    return rs.audit(
        checkpoint,
        data=split.train,
        holdout=split.holdout,
        knowledge=known,
        budget=5,
        batches=BATCH,
        baselines=False,
        **options,
    )


def test_an_allowance_counts_what_runs_inside_it_and_nothing_else() -> None:
    clock = Clock()
    allowance = Allowance(10.0, clock)
    clock.now = 5.0
    assert allowance.left == 10.0
    with allowance:
        clock.now = 8.0
        assert allowance.left == 7.0
    clock.now = 100.0
    assert allowance.left == 7.0
    with allowance:
        clock.now = 108.0
    assert (allowance.spent, allowance.left) == (11.0, -1.0)


@pytest.mark.parametrize(
    ("out_in", "said"),
    [
        ("controls", "was not tried, for want of time"),
        ("permuted", "what it leaves on a permuted target is not known: no time was left"),
        ("twin", "no twin: no time was left for it"),
    ],
)
def test_what_there_is_no_time_for_is_said_and_never_passes(
    monkeypatch: pytest.MonkeyPatch, out_in: str, said: str
) -> None:
    """The same network is acquitted where there is time: see test_controls.py."""
    monkeypatch.setenv("RESIDUUM_CACHE", "")
    clock = Clock()

    def begun(stage: str) -> None:
        clock.tick = 1e6 if stage == out_in else 0.0

    monkeypatch.setattr(
        "residuum.auditing.run.Allowance", lambda seconds: Allowance(CHECK_SHARE * 5, clock)
    )
    found = audited(stage=begun)
    assert found.verdict.outcome == INCONCLUSIVE
    assert found.exit_code == 3
    assert any(said in reason for reason in found.verdict.reasons), found.verdict.reasons
    if out_in == "controls":
        assert any("longer --budget" in reason for reason in found.verdict.reasons)
    else:
        assert any("--budget" in command for command in next_step(found).commands)


def test_controls_are_tried_in_turn_until_the_time_is_over() -> None:
    split = tight()[1]
    claim, known = Claim(split.train, split.holdout), knowledge(split)
    every = run_controls(claim, known, 0)
    assert len(every.rows) == 4
    assert not every.failures
    # A control looks at this clock three times, and looking is all that takes time.
    for seconds, tried, missing in ((0.0, 0, 5), (8.0, 1, 4), (10.0, 2, 3), (30.0, 4, 0)):
        with Allowance(seconds, Clock(1.0)) as allowance:
            found = run_controls(claim, known, 0, allowance=allowance)
        assert len(found.rows) == tried
        assert len(found.failures) == missing  # of four controls and a classifier
        assert all("for want of time" in why for why in found.failures)


def test_one_subset_clears_a_control_and_no_more_are_drawn() -> None:
    split = tight()[1]
    found = run_controls(Claim(split.train, split.holdout), Knowledge(), 0)
    assert [row.subsets for row in found.rows] == [200]
    copies = split.holdout.replace(
        x=torch.cat([split.train.x + 1e-4, split.holdout.x]),
        y=torch.cat([split.train.y, split.holdout.y]),
    )
    order = np.random.default_rng((0, 5)).permutation(len(copies))  # as the control draws them
    placed = copies.replace(
        x=copies.x[np.argsort(order, kind="stable")], y=copies.y[np.argsort(order, kind="stable")]
    )
    (row, *_) = run_controls(Claim(split.train, placed), Knowledge(), 0).rows
    assert row.subsets == 1000  # 200 could not have said 0.1%
    assert row.failed
    assert row.p_value == pytest.approx(1 / 1001)
    assert ControlRow("few", 1, 1, 0.0, 1 / 201, subsets=200).undecided
    assert not ControlRow("few", 1, 1, 0.0, 2 / 201, subsets=200).undecided


def test_a_permuted_target_that_the_clock_cuts_short_says_nothing() -> None:
    checkpoint, split = tight()
    config = replace(attack_config("residuum", 400, 0, "cpu"))
    stage = AttackStage(checkpoint, knowledge(split), config, 5.0)
    assert stage.left_on_permuted("binary-kkt", 400, 1e-9) is None
    assert stage.left_on_permuted("binary-kkt", 25, 1e9) is not None


def test_a_twin_cut_short_or_of_a_part_of_the_samples_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RESIDUUM_CACHE", "")
    original = AttackStage.once_more

    def cut(self: AttackStage, name: str, batch: Batch | None, seconds: float) -> Any:
        return original(self, name, batch, 1e-9 if batch is not None else seconds)

    monkeypatch.setattr(AttackStage, "once_more", cut)
    found = audited(known=knowledge(tight()[1]).replace(sample_count=30)).checks.twin
    assert found is not None
    assert "holds these 20 alone, where the audited network holds 30 samples" in found.sentence
    assert any("(1 of 1 restarts, 25 of 400 steps)" in one for one in found.attacked)
    assert "25 of 400 steps" in found.sentence
    assert [batch.steps for batch in found.batches] == [25]


# Twins that are kept


@pytest.fixture
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RESIDUUM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "twins"


def network(fill: float, size: int = 3) -> TwinNetwork:
    return TwinNetwork({"w": torch.full((size,), fill)}, {"w": torch.zeros(size)}, 0.1, "by hand")


def test_what_is_kept_comes_back_and_is_its_owners_alone(cache: Any) -> None:
    twin.keep("a", network(1.0))
    found = twin.recall(TwinNetwork, "a")
    assert same(found, network(1.0))
    assert twin.recall(TwinNetwork, "b") is None
    assert twin.recall(Twin, "a") is None  # of another kind: not believed
    twin.keep("a", network(1.0))
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in cache.iterdir()] == [0o600]
    cache.chmod(0o777)
    twin.recall(TwinNetwork, "a")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "nonsense"])
def test_a_damaged_entry_is_removed_and_never_believed(cache: Any, damage: str) -> None:
    twin.keep("a", network(1.0))
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    at = len(whole) - 2  # in the last number: a file that reads well and says something else
    path.write_bytes(
        {
            "cut": whole[:-5],
            "flipped": whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
            "empty": b"",
            "nonsense": b"\x80\x04pickle",
        }[damage]
    )
    assert twin.recall(TwinNetwork, "a") is None
    assert not path.exists()
    twin.keep("a", network(2.0))
    assert same(twin.recall(TwinNetwork, "a"), network(2.0))


def test_the_oldest_go_when_there_are_too_many(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "MOST_FILES", 3)
    for i, name in enumerate("abcd"):
        twin.keep(name, network(float(i)))
        for path in cache.glob(f"{name}-*"):
            os.utime(path, (i, i))
        if name == "c":
            assert twin.recall(TwinNetwork, "a") is not None  # used: no longer the oldest
    assert [twin.recall(TwinNetwork, name) is None for name in "abcd"] == [
        False,
        True,
        False,
        False,
    ]
    monkeypatch.setattr(twin, "MOST_BYTES", 4000)
    twin.keep("large", network(0.0, 1000))
    assert twin.recall(TwinNetwork, "large") is None
    assert not list(cache.glob(".*"))


def test_an_empty_name_turns_it_off_and_a_place_nobody_can_write_to_is_no_error(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    for place in ("", str(tmp_path / "file")):
        monkeypatch.setenv("RESIDUUM_CACHE", place)
        twin.keep("a", network(1.0))
        assert twin.recall(TwinNetwork, "a") is None
    monkeypatch.delenv("RESIDUUM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert twin.folder() == tmp_path / "xdg" / "residuum" / "twins"


def test_a_twin_is_made_once_and_anew_where_its_entry_is_damaged(
    cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = audited()
    assert first.verdict.outcome == NO_LEAK_FOUND
    trained = twin._trained
    made = []
    monkeypatch.setattr(twin, "_trained", lambda *a: made.append(a) or trained(*a))
    again = audited()
    assert same(again.checks.twin, first.checks.twin)
    assert not made
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    third = audited()
    assert len(made) == 1
    assert same(third.checks.twin.replace(seconds=0.0), first.checks.twin.replace(seconds=0.0))
    audited(recipe="epochs=7")  # made otherwise
    assert len(made) == 2


@pytest.mark.parametrize(
    ("restarts", "steps", "again"),
    [(12, 400, True), (12, 364, True), (12, 300, False), (4, 400, False), (24, 900, True)],
)
def test_an_earlier_twin_counts_where_its_attacks_tried_no_harder(
    restarts: int, steps: int, again: bool
) -> None:
    before = Twin(n=20, recovered=9, batches=(Batch("binary-kkt", 2, 400, 0),))
    halves = [Batch("binary-kkt", restarts // 2, steps, seed) for seed in (0, 1)]
    assert _no_harder(before, halves) is again
    assert not _no_harder(before, [Batch("ntk", restarts, steps, 0)])
