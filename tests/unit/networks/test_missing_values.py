"""Missing values that activation boundaries reveal, against a naive computation."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from residuum.errors import ArchitectureError
from residuum.networks.kinks import BACKGROUND, PI, R0, A, R
from residuum.networks.missing_values import EQUAL_VALUES, RecordLines
from residuum.networks.network import Network

LOW, HIGH = -3.0, 3.0


def network(*widths: int, seed: int = 0, activation: str = "relu") -> Network:
    generator = torch.Generator().manual_seed(seed)
    theta = {}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        scale = inputs**-0.5
        theta[f"layers.{i}.weight"] = (
            scale * torch.randn(outputs, inputs, generator=generator).double()
        )
        theta[f"layers.{i}.bias"] = scale * torch.randn(outputs, generator=generator).double()
    arch = f"mlp:{'-'.join(map(str, widths))},bias=all,activation={activation}"
    return Network(theta, arch)


def records(n: int, d: int, seed: int = 1) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).double()


def pre_activations(model: Network, x: Tensor) -> list[Tensor]:
    """Pre-activations of all hidden layers, with one loop over the layers."""
    values, inputs = [], x
    depth = len(model.theta) // 2
    for i in range(depth - 1):
        weight, bias = (model.theta[f"layers.{i}.{name}"] for name in ("weight", "bias"))
        values.append(inputs @ weight.T + bias)
        inputs = values[-1].clamp(min=0)
    return values


def log_ratio(distance: float) -> float:
    return math.log(1 - PI + A / (distance + R0)) if distance < R else BACKGROUND


def naive_evidence(
    model: Network, x: Tensor, column: int, pool: Tensor, steps: int = 6000
) -> tuple[list[float], float]:
    """Find zeros of all pre-activations on a fine grid with bisection, and add up the ratios one by one."""
    grid = torch.linspace(LOW, HIGH, steps, dtype=torch.float64)
    scales = [z.square().mean(0).sqrt() for z in pre_activations(model, pool)]

    def along(values: Tensor) -> list[Tensor]:
        rows = x.repeat(len(values), 1)
        rows[:, column] = values
        return pre_activations(model, rows)

    zeros: list[tuple[float, float]] = []  # value and slope
    layers = along(grid)
    for depth, (z, scale) in enumerate(zip(layers, scales, strict=True)):
        for k, j in ((z[:-1] > 0) != (z[1:] > 0)).nonzero().tolist():
            a, b = float(grid[k]), float(grid[k + 1])
            for _ in range(60):
                middle = (a + b) / 2
                if (along(torch.tensor([middle], dtype=torch.float64))[depth][0, j] > 0) == (
                    z[k, j] > 0
                ):
                    a = middle
                else:
                    b = middle
            eps = 1e-7
            ends = along(torch.tensor([a - eps, a + eps], dtype=torch.float64))[depth][:, j]
            zeros.append((a, float((ends[1] - ends[0]).abs() / (2 * eps * scale[j]))))
    h = sum(len(scale) for scale in scales)
    scores = [
        sum(log_ratio(slope * abs(v - other)) for other, slope in zeros)
        + (h - len(zeros)) * BACKGROUND
        for v, _ in zeros
    ]
    largest = max(scores)
    best = [v for score, (v, _) in zip(scores, zeros, strict=True) if score > largest - 1e-9]
    rivals = [
        score
        for score, (v, _) in zip(scores, zeros, strict=True)
        if abs(v - best[0]) > EQUAL_VALUES
    ]
    total = sum(map(math.exp, rivals)) + math.exp(h * BACKGROUND + math.log(h))
    return best, largest - math.log(total)


@pytest.mark.parametrize("widths", [(4, 20, 1), (3, 12, 10, 2), (3, 8, 7, 6, 1)])
def test_values_and_evidence_equal_the_naive_computation(widths: tuple[int, ...]) -> None:
    model, pool = network(*widths), records(40, widths[0])
    lines = RecordLines.measure(model, pool)
    d = widths[0]
    bounds = torch.full((d,), LOW).double(), torch.full((d,), HIGH).double()
    x = records(2, d, seed=5)
    evidence = lines.infer_values(x, *bounds, torch.full((d,), EQUAL_VALUES).double())
    for record in range(2):
        for column in range(d):
            values, statistic = naive_evidence(model, x[record], column, pool)
            cell = record * d + column
            assert min(abs(float(evidence.value[cell]) - value) for value in values) < 1e-9
            assert float(evidence.statistic[cell]) == pytest.approx(statistic, abs=1e-5)


def test_a_value_on_several_boundaries_is_inferred_exactly() -> None:
    """The values of a record follow from boundaries that were moved onto it."""
    model, pool = network(5, 60, 1, seed=3), records(200, 5)
    member, other = records(2, 5, seed=9)
    weight, bias = model.theta["layers.0.weight"], model.theta["layers.0.bias"].clone()
    bias[:6] = -(weight[:6] @ member)
    moved = model.replace(theta={**model.theta, "layers.0.bias": bias})
    lines = RecordLines.measure(moved, pool)
    bounds = torch.full((5,), LOW).double(), torch.full((5,), HIGH).double()
    tolerance = torch.full((5,), EQUAL_VALUES).double()
    inside, outside = (lines.infer_values(x[None], *bounds, tolerance) for x in (member, other))
    torch.testing.assert_close(inside.value, member, atol=1e-9, rtol=0)
    assert inside.statistic.min() > 10 > outside.statistic.max()


def test_the_value_of_a_cell_does_not_influence_what_is_inferred_for_it() -> None:
    model, pool = network(4, 30, 20, 1), records(50, 4)
    lines = RecordLines.measure(model, pool)
    bounds = torch.full((4,), LOW).double(), torch.full((4,), HIGH).double()
    tolerance = torch.full((4,), EQUAL_VALUES).double()
    x = records(3, 4, seed=7)
    evidence = lines.infer_values(x, *bounds, tolerance)
    for column in range(4):
        changed = x.clone()
        changed[:, column] += torch.tensor([0.7, -1.1, 2.0])
        repeated = lines.infer_values(changed, *bounds, tolerance)
        cells = torch.arange(3) * 4 + column
        torch.testing.assert_close(evidence.value[cells], repeated.value[cells], atol=1e-9, rtol=0)
        torch.testing.assert_close(
            evidence.statistic[cells], repeated.statistic[cells], atol=1e-6, rtol=0
        )


def test_rescaled_neurons_give_the_same_evidence() -> None:
    model, pool = network(4, 30, 20, 1), records(50, 4)
    factor = torch.rand(30).double() + 0.1
    theta = dict(model.theta)
    theta["layers.0.weight"] = factor[:, None] * theta["layers.0.weight"]
    theta["layers.0.bias"] = factor * theta["layers.0.bias"]
    theta["layers.1.weight"] = theta["layers.1.weight"] / factor
    x, bound = records(3, 4, seed=7), torch.full((4,), HIGH).double()
    results = [
        RecordLines.measure(m, pool).infer_values(
            x, -bound, bound, EQUAL_VALUES * torch.ones(4).double()
        )
        for m in (model, model.replace(theta=theta))
    ]
    torch.testing.assert_close(results[0].value, results[1].value)
    torch.testing.assert_close(results[0].statistic, results[1].statistic, atol=1e-6, rtol=1e-6)


def test_choices_equal_the_naive_computation() -> None:
    model, pool = network(5, 25, 15, 1), records(60, 5)
    lines = RecordLines.measure(model, pool)
    columns, choices = torch.tensor([1, 2, 4]), torch.eye(3).double()
    x = records(6, 5, seed=11)
    evidence = lines.infer_choices(x, columns, choices)
    scales = [z.square().mean(0).sqrt() for z in pre_activations(model, pool)]
    for i, row in enumerate(x):
        totals = []
        for choice in choices:
            filled = row.clone()
            filled[columns] = choice
            layers = pre_activations(model, filled[None])
            ratios = [
                log_ratio(float(z.abs() / s))
                for layer, scale in zip(layers, scales, strict=True)
                for z, s in zip(layer[0], scale, strict=True)
            ]
            totals.append(sum(ratios))
        best = max(range(3), key=lambda k: totals[k])
        assert int(evidence.value[i]) == best
        rival = math.log(sum(math.exp(t) for k, t in enumerate(totals) if k != best))
        assert float(evidence.statistic[i]) == pytest.approx(totals[best] - rival, abs=1e-6)


def test_smooth_networks_are_refused() -> None:
    with pytest.raises(ArchitectureError, match="ReLU"):
        RecordLines.measure(network(4, 10, 1, activation="gelu"), records(20, 4))
