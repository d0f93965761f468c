"""Rows where hyperplanes meet: a planted table comes back, an arrangement by accident does not."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import residuum as rs
from residuum.attacks import every_attack
from residuum.attacks.corners import Corners, Planes, beyond, on_lines, search
from residuum.checkpoints.surfaces import SURFACES
from residuum.errors import InputError

COLUMNS, NEURONS = 5, 80


def planted(rows: int, through: int = 12, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and biases of a layer, ``through`` of its hyperplanes on each of the rows, and these."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(max(rows, 1), COLUMNS, generator=generator).double()
    weight = torch.randn(NEURONS, COLUMNS, generator=generator).double()
    bias = -(weight * torch.rand(NEURONS, COLUMNS, generator=generator).double()).sum(1)
    for row in range(rows):
        mine = slice(row * through, (row + 1) * through)
        bias[mine] = -(weight[mine] @ x[row])
    return weight, bias, x


def network(weight: Tensor, bias: Tensor) -> rs.Checkpoint:
    theta = {
        "layers.0.weight": weight,
        "layers.0.bias": bias,
        "layers.1.weight": torch.ones(1, NEURONS).double(),
    }
    return rs.Checkpoint(theta, f"mlp:{COLUMNS}-{NEURONS}-1")


def hits(found: Tensor, rows: Tensor, tolerance: float = 0.05) -> int:
    """Rows that some candidate is within the tolerance of, in all columns."""
    return int(((found[:, None] - rows).abs().amax(2) < tolerance).any(0).sum())


CONFIG = rs.AttackConfig(objective="corners", seconds=2)


def test_rows_on_which_hyperplanes_meet_come_back_and_are_no_accident() -> None:
    weight, bias, x = planted(5)
    found = rs.attack(network(weight, bias), rs.Knowledge(value_range=(0, 1)), CONFIG)
    assert hits(found.x, x, 1e-3) == 5
    assert found.selection is not None
    sure = found.selection.x[found.selection.confidence > 0.95]
    assert hits(sure, x, 1e-3) == len(sure) == 5


def test_an_arrangement_by_accident_gives_nothing_to_believe() -> None:
    weight, bias, _ = planted(0)
    found = rs.attack(network(weight, bias), rs.Knowledge(value_range=(0, 1)), CONFIG).selection
    assert found is not None
    assert float(found.confidence.max()) < 0.95


def test_ranges_and_means_are_taken_into_account() -> None:
    weight, bias, x = planted(4)
    mean = torch.linspace(0.3, 0.6, COLUMNS).double()
    shifted = bias + weight @ mean  # the network is given x - mean
    known = rs.Knowledge(value_range=(0, 1), mean=mean)
    found = rs.attack(network(weight, shifted), known, CONFIG)
    plain = rs.attack(network(weight, bias), rs.Knowledge(value_range=(0, 1)), CONFIG)
    assert hits(found.x, x - mean, 1e-3) >= 3
    assert torch.allclose(found.x[:3] + mean, plain.x[:3])


def test_corners_are_those_of_a_plain_loop() -> None:
    weight, bias, _ = planted(1, seed=3)
    planes = Planes.of(
        weight[:8], bias[:8], torch.zeros(COLUMNS).double(), torch.ones(COLUMNS).double()
    )
    picked = torch.tensor(list(itertools.combinations(range(8), COLUMNS)))
    naive = []
    for rows in picked.tolist():
        unit = weight[rows] / weight[rows].norm(dim=1, keepdim=True)
        if abs(float(torch.linalg.det(unit))) > 1e-3:
            x = torch.linalg.lstsq(weight[rows], -bias[rows, None]).solution[:, 0]
            naive += [x] if bool(((x > -0.02) & (x < 1.02)).all()) else []
    assert len(naive) > 3
    assert torch.allclose(planes.corners(picked), torch.stack(naive))


def test_points_on_lines_lie_on_the_picked_hyperplanes_and_on_a_group_of_others() -> None:
    weight, bias, x = planted(1)
    planes = Planes.of(weight, bias, torch.zeros(COLUMNS).double(), torch.ones(COLUMNS).double())
    picked = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [60, 61, 62, 63]])
    around = torch.full((3, COLUMNS), 0.5).double()
    found, lines = on_lines(planes, around, picked, torch.Generator().manual_seed(1))
    assert lines == 3
    assert len(found)
    assert torch.allclose(found, x.expand_as(found), atol=1e-3)
    assert int(beyond(planes, x)[0, 0]) >= 12 - COLUMNS


def test_a_hyperplane_counts_once() -> None:
    weight, bias, _ = planted(0)
    twice = torch.cat([weight, -2 * weight]), torch.cat([bias, -2 * bias])
    box = torch.zeros(COLUMNS).double(), torch.ones(COLUMNS).double()
    assert len(Planes.of(*twice, *box).offsets) == len(Planes.of(weight, bias, *box).offsets)
    same = [search(Planes.of(*part, *box), 4000, 1).x for part in (twice, (weight, bias))]
    assert torch.allclose(*same)


def test_what_it_refuses() -> None:
    weight, bias, _ = planted(1)
    checkpoint = network(weight, bias)

    def why_not(checkpoint: rs.Checkpoint, **known: object) -> str:
        knowledge = rs.Knowledge(**known)  # type: ignore[arg-type]
        return every_attack()["corners"].why_not(
            SURFACES["weights"](checkpoint, knowledge), knowledge
        )

    assert "value-range" in why_not(checkpoint)
    assert why_not(checkpoint, value_range=(0, 1)) == ""
    wide = rs.Checkpoint({"layers.0.weight": torch.ones(3, 64)}, "mlp:64-3,bias=none")
    assert "4 to 10 columns; samples here have 64" in why_not(wide)
    bare = {n: t for n, t in checkpoint.theta.items() if "bias" not in n}
    assert "bias" in why_not(checkpoint.replace(theta=bare, arch=f"{checkpoint.arch},bias=none"))
    with pytest.raises(InputError, match="value-range"):
        rs.attack(checkpoint, None, CONFIG)
    assert isinstance(every_attack()["corners"], Corners)
