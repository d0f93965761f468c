"""Drop and merge candidates, to make room before a round of growth.

A candidate is dropped if its multiplier is zero and would stay so.

Inside an activation pattern f is affine in x (Refael et al. 2025, Lemma 2). Two candidates of one label and
one pattern therefore equal one candidate at their weighted mean, with the sum of their multipliers:

    lam' = lam_1 + lam_2,   x' = (lam_1 x_1 + lam_2 x_2) / lam'

With surrogates and smooth activations this holds only nearly, so a merge is kept only if the loss does not
rise. Networks without ReLUs have no activation patterns. Their candidates merge only if they are close.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residuum.attacks.stationarity.problem import Problem
from residuum.attacks.stationarity.slots import population_of, remove
from residuum.attacks.stationarity.solver import SolverState
from residuum.networks import ReLU

TRIES = 8  # pairs per round and run
CLOSE = 0.1  # largest distance of a pair over its smaller length, for networks without patterns


def prune(
    problem: Problem,
    state: SolverState,
    scale: float | Tensor,
    sharpness: float | Tensor,
    due: list[int],
) -> tuple[SolverState, Tensor]:
    """Empty the slots whose multipliers are zero and would stay so, in the runs that are due.

    Returns:
        The new state, and which slots (R, m) were emptied.
    """
    active = torch.zeros_like(population_of(state).active)
    active[due] = population_of(state).active[due]
    gradient = problem.evaluate(state.x, state.lam * scale, sharpness).grad_lam
    zero = (state.lam == 0).reshape(*active.shape, -1).all(2)
    stays = gradient >= 0 if problem.objective.nonnegative else gradient == 0
    stays = stays.reshape(*active.shape, -1).all(2)
    dropped = active & zero & stays
    return (remove(state, dropped) if bool(dropped.any()) else state), dropped


def merge(
    problem: Problem,
    state: SolverState,
    scale: float | Tensor,
    sharpness: float | Tensor,
    due: list[int],
) -> tuple[SolverState, list[tuple[int, int, int, float, float]]]:
    """Merge pairs of the runs that are due, as long as no loss rises.

    Returns:
        The new state, and (run, slot kept, slot emptied, loss before, loss after) of every merge.
    """
    # An exact fit has a loss of rounding errors alone, which say nothing about a merge.
    rounding = 64 * torch.finfo(state.x.dtype).eps ** 2 * problem.empty_loss
    queues = {run: _pairs(problem, state, run) for run in due}
    merges = []
    for _ in range(TRIES):
        before = problem.evaluate(state.x, state.lam * scale, sharpness).loss
        x, lam = state.x.clone(), state.lam.clone()
        tried: dict[int, tuple[int, int]] = {}
        for run, queue in queues.items():
            if queue:
                tried[run] = i, j = queue.pop(0)
                weight = torch.stack([state.lam[run, k].abs().sum() for k in (i, j)])
                share = weight / weight.sum()
                x[run, i] = share[0] * state.x[run, i] + share[1] * state.x[run, j]
                lam[run, i] = state.lam[run, i] + state.lam[run, j]
                lam[run, j] = 0.0
        if not tried:
            break
        after = problem.evaluate(x, lam * scale, sharpness).loss
        dropped = torch.zeros_like(population_of(state).active)
        for run, (i, j) in tried.items():
            if not bool(after[run] <= before[run] + rounding):
                x[run], lam[run] = state.x[run], state.lam[run]
                continue
            dropped[run, j] = True
            merges.append((run, i, j, float(before[run]), float(after[run])))
            queues[run] = [pair for pair in queues[run] if not {i, j} & set(pair)]
        if bool(dropped.any()):
            state = remove(state.replace(x=x, lam=lam), dropped)
    return state, merges


def _pairs(problem: Problem, state: SolverState, run: int) -> list[tuple[int, int]]:
    """Return the pairs that may merge, nearest first: same label, same signs of multipliers, same pattern."""
    population = population_of(state)
    slots = population.active[run].nonzero()[:, 0]
    x = state.x[run, slots].flatten(1)
    lam = state.lam[run, slots].reshape(len(x), -1)
    signs, labels = lam.sign(), population.labels[run, slots]
    fits = (labels[:, None] == labels[None]) & ((signs[:, None] * signs[None]) >= 0).all(2)
    fits &= (lam != 0).any(1)[:, None] & (lam != 0).any(1)[None]
    distance = torch.cdist(x, x)
    gates = patterns(problem, state.x[run, slots])
    if gates is None:
        lengths = x.norm(dim=1)
        fits &= distance <= CLOSE * torch.minimum(lengths[:, None], lengths[None])
    else:
        fits &= gates @ gates.T >= gates.shape[1] - 0.5
    index = torch.triu(fits, 1).nonzero()
    order = distance[index[:, 0], index[:, 1]].argsort()[: 4 * TRIES]
    return [(int(slots[a]), int(slots[b])) for a, b in index[order].tolist()]


def patterns(problem: Problem, x: Tensor) -> Tensor | None:
    """Return the signs (m, neurons) of all pre-activations of a ReLU MLP; None for other networks."""
    equation = problem.explicit
    if equation is None or not isinstance(problem.true_activation, ReLU):
        return None
    hidden = equation.pre_activations(x.flatten(1), problem.true_activation)
    signs = (torch.where(z > 0, 1.0, -1.0).to(x) for z in hidden)
    return torch.cat([x[:, :0].flatten(1), *signs], 1)
