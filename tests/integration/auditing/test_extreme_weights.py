"""Legal but extreme weights end in a verdict with all artifacts, or are refused. They never crash."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import residuum as rs
from residuum.cli.main import main
from residuum.errors import InconclusiveError
from residuum.report.charts import draw_scatter
from tests import pages
from tests.victims import tight

Weights = dict[str, Tensor]


def with_weight(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Weights], Weights]:
    """Return a function that sets one weight of the first layer."""

    def change(theta: Weights) -> Weights:
        changed = {name: t.to(dtype).clone() for name, t in theta.items()}
        changed["layers.0.weight"][0, 0] = value
        return changed

    return change


def scaled(factors: dict[str, float]) -> Callable[[Weights], Weights]:
    """Return a function that multiplies the tensors whose name begins with a key; "" is all of them."""

    def change(theta: Weights) -> Weights:
        return {
            name: t * next((f for start, f in factors.items() if name.startswith(start)), 1.0)
            for name, t in theta.items()
        }

    return change


CASES = {
    "all zero": (scaled({"": 0.0}), 3),
    "one weight of 1e38": (with_weight(1e38), 3),
    "one weight of 1e300": (with_weight(1e300, torch.float64), 2),
    "denormal": (scaled({"": 1e-42}), 3),
    "tiny": (scaled({"": 1e-30}), 3),
    "first layer zero": (scaled({"layers.0": 0.0}), 3),
    "last layer zero": (scaled({"layers.1": 0.0}), 3),
}


@pytest.mark.parametrize("name", CASES)
def test_extreme_weights_end_in_a_verdict(name: str, tmp_path: Path) -> None:
    change, code = CASES[name]
    checkpoint, split = tight()
    changed = checkpoint.replace(theta=change(checkpoint.theta))
    rs.save_checkpoint(changed, tmp_path / "m.safetensors")
    split.train.to_npz(tmp_path / "train.npz")
    split.holdout.to_npz(tmp_path / "test.npz")
    files = ["--data", str(tmp_path / "train.npz"), "--holdout", str(tmp_path / "test.npz")]
    options = ["--effort", "quick", "--steps", "30", "--subsets", "200", "--quiet"]
    out = tmp_path / "run"
    exit_code = main(
        ["audit", str(tmp_path / "m.safetensors"), *files, *options, "--out", str(out)]
    )
    assert exit_code == code
    if code == 3:
        assert {"result.json", "report.html", "report.sarif"} <= {p.name for p in out.iterdir()}


def test_a_certificate_of_zero_weights_is_inconclusive() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with pytest.raises(InconclusiveError, match="all weights are zero"):
        rs.certify(model, torch.ones(4, 3), torch.tensor([1.0, -1.0, 1.0, -1.0]))


@pytest.mark.parametrize("high", [1e-300, 1.0, 1e38, 1e250])
def test_axes_of_any_size_have_finite_ticks(high: float) -> None:
    result = pages.audited(20)
    assert result.evidence is not None
    outputs = torch.linspace(0, high, 20, dtype=torch.float64)
    chart = draw_scatter(result.evidence.replace(outputs=outputs), result.control)
    assert chart is not None
    ticks = re.findall(r'<text [^>]*x="([^"]*)" y="([^"]*)">', chart.drawing)
    assert 6 <= len(ticks) <= 14
    assert np.isfinite([[float(x), float(y)] for x, y in ticks]).all()
    assert chart.drawing.count("<use") == 20
