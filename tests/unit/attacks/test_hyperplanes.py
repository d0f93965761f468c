"""Rows where hyperplanes meet: a planted table is recovered, an accidental arrangement is not."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import residuum as rs
from residuum.attacks import every_attack
from residuum.attacks.tabular.hyperplanes import (
    Hyperplanes,
    Planes,
    count_excess,
    find_crossings,
    make_upper_counter,
    search_corners,
)
from residuum.errors import InputError
from residuum.networks import Architecture
from residuum.surfaces.surface import SURFACES

COLUMNS, NEURONS = 5, 80


def planted(rows: int, through: int = 12, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and biases of a layer, ``through`` of its hyperplanes on each of the rows, and these."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(max(rows, 1), COLUMNS, generator=generator).double()
    weight = torch.randn(NEURONS, COLUMNS, generator=generator).double()
    bias = -(weight * torch.rand(NEURONS, COLUMNS, generator=generator).double()).sum(1)
    for row in range(rows):
        neurons = slice(row * through, (row + 1) * through)
        bias[neurons] = -(weight[neurons] @ x[row])
    return weight, bias, x


def network(weight: Tensor, bias: Tensor) -> rs.Network:
    theta = {
        "layers.0.weight": weight,
        "layers.0.bias": bias,
        "layers.1.weight": torch.ones(1, NEURONS).double(),
    }
    return rs.Network(theta, f"mlp:{COLUMNS}-{NEURONS}-1")


def hits(points_found: Tensor, rows: Tensor, tolerance: float = 0.05) -> int:
    """Rows that some candidate is within the tolerance of, in all columns."""
    return int(((points_found[:, None] - rows).abs().amax(2) < tolerance).any(0).sum())


CONFIG = rs.attacks.Hyperplanes(seconds=1)


def test_rows_on_which_hyperplanes_meet_are_recovered_and_are_no_accident() -> None:
    weight, bias, x = planted(5)
    reconstruction = rs.attack(network(weight, bias), rs.Knowledge(value_range=(0, 1)), CONFIG)
    assert hits(reconstruction.x, x, 1e-3) == 5
    assert reconstruction.selection is not None
    sure = reconstruction.selection.x[reconstruction.selection.confidence > 0.5]
    assert hits(sure, x, 1e-3) == len(sure) == 5


def test_an_arrangement_by_accident_gives_nothing_to_believe() -> None:
    weight, bias, _ = planted(0)
    selection = rs.attack(network(weight, bias), rs.Knowledge(value_range=(0, 1)), CONFIG).selection
    assert selection is not None
    assert float(selection.confidence.max()) < 0.1


def test_ranges_and_means_are_taken_into_account() -> None:
    weight, bias, x = planted(4)
    mean = torch.linspace(0.3, 0.6, COLUMNS).double()
    shifted = bias + weight @ mean  # the network is given x - mean
    knowledge = rs.Knowledge(value_range=(0, 1), mean=mean)
    reconstruction = rs.attack(network(weight, shifted), knowledge, CONFIG)
    plain = rs.attack(network(weight, bias), rs.Knowledge(value_range=(0, 1)), CONFIG)
    assert hits(reconstruction.x, x - mean, 1e-3) >= 3
    assert torch.allclose(reconstruction.x[:3] + mean, plain.x[:3])


def test_corners_are_those_of_a_plain_loop() -> None:
    weight, bias, _ = planted(1, seed=3)
    planes = Planes.from_layer(
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
    assert torch.allclose(planes.intersect(picked), torch.stack(naive))


def test_points_on_lines_are_those_where_more_hyperplanes_meet_than_anywhere() -> None:
    """Against a plain loop; one of them is the planted row."""
    weight, bias, x = planted(1)
    planes = Planes.from_layer(
        weight, bias, torch.zeros(COLUMNS).double(), torch.ones(COLUMNS).double()
    )
    around = x + 0.05 * torch.randn(20, COLUMNS, generator=torch.Generator().manual_seed(1))
    crossings = find_crossings(planes, around, torch.Generator().manual_seed(2))
    assert hits(crossings, x, 1e-3) == 1
    for point in crossings:
        passing = sum(
            abs(float(n @ point + o)) < 1e-3 * float(n.norm())
            for n, o in zip(weight, bias, strict=True)
        )
        assert passing >= COLUMNS + 2
    assert int(count_excess(planes, x)[0, 0]) >= 12 - COLUMNS


def test_hyperplanes_that_hold_a_line_need_fewer_that_cross_it() -> None:
    """Ten hyperplanes through two rows, and one more through the first alone."""
    generator = torch.Generator().manual_seed(4)
    weight, bias, _ = planted(0, seed=4)
    point, other = torch.rand(2, COLUMNS, generator=generator).double()
    along = torch.nn.functional.normalize(other - point, dim=0)
    weight[:10] -= (weight[:10] @ along)[:, None] * along
    bias[:11] = -(weight[:11] @ point)
    planes = Planes.from_layer(
        weight, bias, torch.zeros(COLUMNS).double(), torch.ones(COLUMNS).double()
    )
    between = (point + other) / 2 + 1e-3 * torch.randn(40, COLUMNS, generator=generator)
    assert hits(find_crossings(planes, between, generator), point[None], 1e-3) == 1


def test_counts_of_layers_above_are_those_of_a_plain_loop() -> None:
    """At points on which a neuron of the second layer switches; its slope by differences."""
    torch.manual_seed(0)
    model = Architecture.parse(f"mlp:{COLUMNS}-12-9-7-1").build().double()
    low, high = -torch.ones(COLUMNS).double(), 2 * torch.ones(COLUMNS).double()

    def pre(x: Tensor, layer: int) -> Tensor:
        return model.trace(low + (high - low) * x[None]).pre[layer][0].detach()

    points = []
    for a, b in torch.rand(12, 2, COLUMNS).double():
        j = int((pre(a, 1) * pre(b, 1)).argmin())  # of the most opposite signs
        if float(pre(a, 1)[j] * pre(b, 1)[j]) < 0:
            for _ in range(50):
                middle = (a + b) / 2
                a, b = (middle, b) if pre(middle, 1)[j] * pre(a, 1)[j] > 0 else (a, middle)
            points.append(a + 2e-4 * torch.rand(COLUMNS).double())
    assert len(points) > 3
    counts_found = make_upper_counter(model, low, high)(torch.stack(points))
    for layer, counts in enumerate(counts_found, 1):
        for x, count in zip(points, counts, strict=True):
            steps = [pre(x + 1e-7 * e, layer) for e in torch.eye(COLUMNS).double()]
            slope = ((torch.stack(steps) - pre(x, layer)) / 1e-7).norm(dim=0)
            distances = pre(x, layer).abs() / slope
            assert count.tolist() == [int((distances < eps).sum()) for eps in (1e-4, 3e-4, 1e-3)]
    assert int(counts_found[0][:, -1].min()) >= 1


def test_a_hyperplane_counts_once() -> None:
    weight, bias, _ = planted(0)
    twice = torch.cat([weight, -2 * weight]), torch.cat([bias, -2 * bias])
    box = torch.zeros(COLUMNS).double(), torch.ones(COLUMNS).double()
    assert len(Planes.from_layer(*twice, *box).offsets) == len(
        Planes.from_layer(weight, bias, *box).offsets
    )
    same = [
        search_corners(Planes.from_layer(*layer, *box), 4000, 1).x
        for layer in (twice, (weight, bias))
    ]
    assert torch.allclose(*same)


def test_what_it_refuses() -> None:
    weight, bias, _ = planted(1)
    checkpoint = network(weight, bias)

    def why_not(checkpoint: rs.Network, **knowledge_options: object) -> str:
        knowledge = rs.Knowledge(**knowledge_options)  # type: ignore[arg-type]
        return every_attack()["corners"]().why_not(
            SURFACES["weights"](checkpoint, knowledge), knowledge
        )

    assert "value-range" in why_not(checkpoint)
    assert why_not(checkpoint, value_range=(0, 1)) == ""
    wide = rs.Network({"layers.0.weight": torch.ones(3, 64)}, "mlp:64-3,bias=none")
    assert "4 to 10 columns; samples here have 64" in why_not(wide)
    bare = {n: t for n, t in checkpoint.theta.items() if "bias" not in n}
    assert "bias" in why_not(checkpoint.replace(theta=bare, arch=f"{checkpoint.arch},bias=none"))
    with pytest.raises(InputError, match="value-range"):
        rs.attack(checkpoint, None, CONFIG)
    assert every_attack()["corners"] is Hyperplanes
