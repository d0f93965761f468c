"""Samples with few levels, such as pixels that are multiples of 1/16, are searched as whole numbers too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from residuum.scanning.sample_forms import list_scalings

LEVELS = torch.arange(17).repeat(4, 1)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (LEVELS / 16, "multiplied by 16"),
        (LEVELS.float() / 16, "multiplied by 16"),
        (LEVELS / 16 - 0.3, ""),  # no factor makes these values whole numbers
        (LEVELS.double(), ""),  # these values are whole numbers
        (torch.rand(4, 17, generator=torch.Generator().manual_seed(0)), ""),
    ],
)
def test_levels_give_one_more_form(samples: Tensor, expected: str) -> None:
    names = {scaling.name for scaling in list_scalings(samples)}
    multiples = {name for name in names if name.startswith("multiplied by")}
    assert multiples - {"multiplied by 255"} == ({expected} if expected else set())
