"""Slots of candidates: inheritance, merging candidates that one can replace, dropping unused ones."""

from __future__ import annotations

import torch

from residuum.attacks.stationarity.merging import activation_patterns, merge, prune
from residuum.attacks.stationarity.objectives import BinaryKKT
from residuum.attacks.stationarity.slots import (
    Newcomer,
    get_population,
    place_newcomers,
    remove_candidates,
)
from residuum.attacks.stationarity.solver import Population, Solver
from residuum.records import Knowledge
from tests.cases import relu_point
from tests.integration.attacks.test_growth import SMALL, small_solver


def test_optimizer_state_goes_to_both_children():
    s = small_solver()
    state = s.solve(s.start(), s.next_evaluation_step(0))
    parent, slots = 2, state.x.shape[1]
    moved = state.x[0, parent] + 0.1
    new = Newcomer(
        state.x[0, parent] - 0.1, state.lam[0, parent] / 2, torch.tensor(-1.0), parent, moved
    )
    grown, numbers = place_newcomers(state, [[new], []])
    assert numbers == [[(5, 4)], []]
    assert grown.x.shape[1] == slots + 1
    assert torch.equal(grown.x[0, parent], moved)
    assert torch.equal(grown.lam[0, parent], grown.lam[0, slots])
    for name, moment in grown.moments.items():
        assert torch.equal(moment[0, slots], state.moments[name][0, parent])
        assert torch.equal(moment[0, parent], state.moments[name][0, parent])
        assert (moment[1, slots] == 0).all()
    assert grown.population.active.tolist() == [[True] * 5, [True] * 4 + [False]]
    freed = remove_candidates(grown, torch.tensor([[True, *[False] * 4], [False] * 5]))
    second_state, _ = place_newcomers(freed, [[new], []])
    assert second_state.x.shape[1] == slots + 1  # the freed slot is used first
    assert second_state.population.ident[0].tolist() == [6, 1, 7, 3, 4]


def exact_state(point, copies):
    """Every candidate of an exact point ``copies`` times, slightly apart, with shared multipliers."""
    m = copies * len(point.x)
    config = SMALL.changed(restarts=1, candidates=m, surrogate="none", lam_scale="one")
    s = Solver(point.model, BinaryKKT(), Knowledge(), config, (point.x.shape[1],), 1, m)
    direction = torch.randn(point.x.shape, generator=torch.Generator().manual_seed(0)).double()
    shifts = [1e-3 * (2 * k / max(1, copies - 1) - 1) * direction for k in range(copies)]
    x = torch.cat([point.x + shift for shift in shifts])[None]
    lam = (point.lam / copies).repeat(copies)[None]
    labels = point.y.repeat(copies)
    state = s.start().replace(x=x, lam=lam, population=Population.start(1, labels))
    return s.problem.with_labels(labels.expand(1, -1)), state


def test_a_split_that_brought_nothing_is_merged_again():
    """True gates: pairs of one pattern merge exactly; samples of other patterns stay apart."""
    point = relu_point(2, groups=2, size=1, dim=6)
    problem, state = exact_state(point, 2)
    gates = activation_patterns(problem, state.x[0])
    assert torch.equal(gates[0], gates[2])
    assert not torch.equal(gates[0], gates[1])
    before = problem.evaluate(state.x, state.lam, 150.0).loss
    merged, done = merge(problem, state, 1.0, 150.0, [0])
    assert {(run, *sorted(pair)) for run, *pair, _, _ in done} == {(0, 0, 2), (0, 1, 3)}
    assert all(after <= start + 1e-28 for *_, start, after in done)
    candidates_left = merged.population.active[0]
    assert candidates_left.tolist() == [True, True, False, False]
    assert torch.allclose(merged.x[0, candidates_left], point.x, atol=1e-12)
    assert torch.allclose(merged.lam[0, candidates_left], point.lam, atol=1e-12)
    assert float(problem.evaluate(merged.x, merged.lam, 150.0).loss) <= float(before) + 1e-28


def test_candidates_of_two_labels_or_patterns_are_never_merged():
    point = relu_point(2, groups=2, size=2, dim=8)
    problem, state = exact_state(point, 1)
    _, done = merge(problem, state, 1.0, 150.0, [0])
    for _, i, j, _, _ in done:
        assert point.group[i] == point.group[j]
    labels = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    population = state.population.replace(labels=labels[None])
    x = point.x[:1].expand(4, -1)[None].clone()
    _, done = merge(problem, state.replace(x=x, population=population), 1.0, 150.0, [0])
    assert all(labels[i] == labels[j] for _, i, j, _, _ in done)


def test_zero_multipliers_that_stay_zero_are_dropped():
    point = relu_point(2, groups=2, size=1, dim=6)
    problem, state = exact_state(point, 1)
    lam = state.lam.clone()
    lam[0, 0] = 0.0
    pruned, dropped = prune(problem, state.replace(lam=lam), 1.0, 150.0, [0])
    assert not dropped.any()  # the gradient pulls it up again
    x = state.x.clone()
    first = point.model.linears[0]
    x[0, 0] = torch.linalg.pinv(first.weight.data) @ (-1 - first.bias.data)  # every neuron is off
    pruned, dropped = prune(problem, state.replace(lam=lam, x=x), 1.0, 150.0, [0])
    assert dropped.tolist() == [[True, False]]
    assert get_population(pruned).active.tolist() == [[False, True]]
    _, other = prune(problem, state.replace(lam=lam, x=x), 1.0, 150.0, [])
    assert not other.any()
