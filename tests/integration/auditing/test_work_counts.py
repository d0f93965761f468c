"""An audit reads its file once, parses the architecture once and builds the module a few times."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import residuum as rs
from residuum.io import release
from residuum.networks import Architecture

ARCH = "mlp:64-40-1"


def calls_of(run: Any, names: dict[Any, str]) -> Counter[str]:
    """Count the calls of functions, by their code objects, while ``run`` runs in this thread."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in names:
            counts[names[frame.f_code]] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts


def test_a_small_audit_parses_and_builds_little(tmp_path: Path) -> None:
    split = rs.load_dataset("digits", 20, seed=3, holdout=300)
    state = rs.train(ARCH, split.train, rs.TrainingConfig(steps=300, seed=3))
    torch.save(state.theta, tmp_path / "model.pt")
    names = {
        release.read_release.__code__: "file parsed",
        Architecture.parse.__func__.__code__: "architecture parsed",  # type: ignore[attr-defined]
        Architecture.build.__code__: "module built",
    }

    def audit() -> None:
        rs.audit(
            tmp_path / "model.pt",
            data=split.train,
            holdout=split.holdout,
            knowledge={"shape": (1, 8, 8), "value_range": (0, 1)},
            effort="quick",
            steps=30,
        )

    counts = calls_of(audit, names)
    assert counts["file parsed"] == 1
    assert counts["architecture parsed"] <= 3
    assert counts["module built"] <= 3
