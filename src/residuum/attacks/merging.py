"""Fewer candidates for the same loss: merge what one candidate can stand for, drop what is unused.

Inside an activation pattern f is affine in x (Refael et al. 2025, Lemma 2), so two candidates of one
label and one pattern equal one candidate at their weighted mean with the sum of their multipliers:

    lam' = lam_1 + lam_2,   x' = (lam_1 x_1 + lam_2 x_2) / lam'

With surrogates and smooth activations that holds nearly, so a merge is kept only where the loss
does not rise. Networks without gates have no pattern; there two candidates must be close.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residuum.attacks.problem import Problem
from residuum.attacks.slots import population_of, remove
from residuum.attacks.state import SolverState
from residuum.networks import ReLU

TRIES = 8  # pairs per round and run
CLOSE = 0.1  # distance over length, for networks without gates
BLOCK = 1 << 28  # bytes of patterns compared at once


def prune(
    problem: Problem, state: SolverState, scale: float | Tensor, sharpness: float | Tensor,
    due: list[int],
) -> tuple[SolverState, Tensor]:  # fmt: skip
    """Empty the slots whose multipliers are zero and would stay so; returns (R, m) which."""
    active = torch.zeros_like(population_of(state).active)
    active[due] = population_of(state).active[due]
    found = problem.evaluate(state.x, state.lam * scale, sharpness)
    zero = (state.lam == 0).reshape(*active.shape, -1).all(2)
    stays = found.grad_lam >= 0 if problem.objective.nonnegative else found.grad_lam == 0
    stays = stays.reshape(*active.shape, -1).all(2)
    gone = active & zero & stays
    return (remove(state, gone) if bool(gone.any()) else state), gone


def merge(
    problem: Problem, state: SolverState, scale: float | Tensor, sharpness: float | Tensor,
    due: list[int],
) -> tuple[SolverState, list[tuple[int, int, int, float, float]]]:  # fmt: skip
    """Merge pairs of the runs that are due while no loss rises.

    Returns (run, slot kept, slot emptied, loss before, loss after) of every merge.
    """
    # An exact fit has a loss of rounding errors alone, which say nothing about a merge.
    rounding = 64 * torch.finfo(state.x.dtype).eps ** 2 * problem.empty_loss
    queues = {run: _pairs(problem, state, run) for run in due}
    done = []
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
        gone = torch.zeros_like(population_of(state).active)
        for run, (i, j) in tried.items():
            if not bool(after[run] <= before[run] + rounding):
                x[run], lam[run] = state.x[run], state.lam[run]
                continue
            gone[run, j] = True
            done.append((run, i, j, float(before[run]), float(after[run])))
            queues[run] = [pair for pair in queues[run] if not {i, j} & set(pair)]
        if bool(gone.any()):
            state = remove(state.replace(x=x, lam=lam), gone)
    return state, done


def _pairs(problem: Problem, state: SolverState, run: int) -> list[tuple[int, int]]:
    """Pairs that may merge, nearest first: one label, one sign of all multipliers, one pattern."""
    population = population_of(state)
    slots = population.index(run)
    x = state.x[run, slots].flatten(1)
    lam = state.lam[run, slots].reshape(len(x), -1)
    signs = lam.sign()
    alike = population.labels[run, slots]
    fits = (alike[:, None] == alike[None]) & ((signs[:, None] * signs[None]) >= 0).all(2)
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
    """(m, neurons) signs of all pre-activations of a ReLU MLP at theta; None for other networks."""
    equation = problem.explicit
    if equation is None or not isinstance(problem.true_activation, ReLU):
        return None
    signs, a = [], x.flatten(1)
    for weight, bias in equation.points[0][:-1]:
        z = a @ weight.T if bias is None else a @ weight.T + bias
        signs.append(torch.where(z > 0, 1.0, -1.0).to(x))
        a = z.clamp(min=0)
    return torch.cat(signs, 1) if signs else x.new_zeros(len(x), 0)
