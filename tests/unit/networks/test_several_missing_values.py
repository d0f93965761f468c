"""Several missing values that activation boundaries reveal, against a naive search over all intersections."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from residuum.errors import InputError
from residuum.networks.kinks import BACKGROUND
from residuum.networks.missing_values import EQUAL_VALUES, RecordLines
from residuum.networks.network import Network
from residuum.networks.several_missing_values import infer_several
from tests.unit.networks.test_missing_values import (
    HIGH,
    LOW,
    log_ratio,
    network,
    pre_activations,
    records,
)


def intersections(weight: Tensor, without_columns: Tensor, k: int) -> list[Tensor]:
    """Return every point inside the bounds at which k boundaries meet."""
    points = []
    for members in itertools.combinations(range(len(weight)), k):
        index = list(members)
        point = torch.linalg.solve(weight[index], -without_columns[index])
        if ((point > LOW) & (point < HIGH)).all():
            points.append(point)
    return points


def best_intersection(
    model: Network, x: Tensor, columns: list[int], pool: Tensor
) -> tuple[Tensor, float]:
    """Return the intersection on the most boundaries, and its sum of log likelihood ratios."""
    weight, bias = model.theta["layers.0.weight"], model.theta["layers.0.bias"]
    scale = pre_activations(model, pool)[0].square().mean(0).sqrt()
    row = x.clone()
    row[columns] = 0
    without_columns = weight @ row + bias
    best, largest = torch.empty(0), -math.inf
    for point in intersections(weight[:, columns], without_columns, len(columns)):
        distance = (without_columns + weight[:, columns] @ point).abs() / scale
        total = sum(log_ratio(float(r)) for r in distance)
        if total > largest:
            best, largest = point, total
    return best, largest


def move_boundaries(model: Network, x: Tensor, count: int) -> Network:
    """Move the boundaries of some neurons of the first layer onto a record."""
    weight, bias = model.theta["layers.0.weight"], model.theta["layers.0.bias"].clone()
    bias[:count] = -(weight[:count] @ x)
    return model.replace(theta={**model.theta, "layers.0.bias": bias})


@pytest.mark.parametrize("columns", [[0, 3], [1, 2], [0, 2, 4]])
def test_moved_boundaries_reveal_several_values(columns: list[int]) -> None:
    x = records(2, 5, seed=9)
    model = move_boundaries(network(5, 24, 1, seed=3), x[0], 7)
    pool, k = records(200, 5), len(columns)
    lines, bound = RecordLines.measure(model, pool), torch.full((k,), HIGH).double()
    tolerance = torch.full((k,), EQUAL_VALUES).double()
    evidence = infer_several(lines, x, torch.tensor(columns), -bound, bound, tolerance)
    point, total = best_intersection(model, x[0], columns, pool)
    torch.testing.assert_close(evidence.value[0], x[0, columns], atol=1e-9, rtol=0)
    torch.testing.assert_close(point, x[0, columns], atol=1e-9, rtol=0)
    # No other point is on more than k boundaries, so the evidence is close to the likelihood ratio alone.
    floor = 24 * BACKGROUND + k * math.log(24)
    assert float(evidence.statistic[0]) <= total - floor + 1e-6
    assert float(evidence.statistic[0]) > 10 > float(evidence.statistic[1])


def test_unknown_values_do_not_influence_the_result() -> None:
    x = records(3, 5, seed=9)
    model = move_boundaries(network(5, 24, 1, seed=3), x[0], 7)
    lines, bound = RecordLines.measure(model, records(200, 5)), torch.full((2,), HIGH).double()
    changed = x.clone()
    changed[:, [1, 4]] = 0.5
    columns, tolerance = torch.tensor([1, 4]), torch.full((2,), EQUAL_VALUES).double()
    results = [
        infer_several(lines, rows, columns, -bound, bound, tolerance) for rows in (x, changed)
    ]
    torch.testing.assert_close(results[0].value, results[1].value, atol=1e-9, rtol=0)
    torch.testing.assert_close(results[0].statistic, results[1].statistic, atol=1e-9, rtol=0)


def test_a_single_column_is_refused() -> None:
    lines, bound = RecordLines.measure(network(5, 24, 1), records(50, 5)), torch.ones(1).double()
    with pytest.raises(InputError, match="Two or three"):
        infer_several(lines, records(2, 5), torch.tensor([1]), -bound, bound, bound)
