"""Remove and merge candidates (guesses of samples) that are not needed, before new candidates are added.

A candidate is dropped if its multiplier is zero and a step of the solver would keep it at zero.

Among samples x with the same activation pattern, the gradient f(x) of the network's output is affine in x
(Refael et al. 2025, Lemma 2). Two candidates with the same label and pattern therefore equal one candidate at
their weighted mean, with the sum of their multipliers:

    lam' = lam_1 + lam_2,   x' = (lam_1 x_1 + lam_2 x_2) / lam'

If a smooth function replaces the derivative of the ReLUs, or the activation is smooth, this equality is only
approximate. A merge is therefore reverted if the loss rises. Networks without ReLUs have no activation
patterns. In these networks, only close candidates merge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residuum.attacks.stationarity.problem import Problem
from residuum.attacks.stationarity.slots import get_population, remove_candidates
from residuum.attacks.stationarity.solver import SolverState
from residuum.networks import ReLU

MAX_TRIES = 8  # maximum number of pairs of similar candidates that a run tries to merge at one time
# Networks without ReLUs: two candidates merge only if their distance is at most this share of the smaller
# norm of the two candidates.
MAX_DISTANCE = 0.1


def prune(
    problem: Problem,
    state: SolverState,
    scale: float | Tensor,
    sharpness: float | Tensor,
    due: list[int],
) -> tuple[SolverState, Tensor]:
    """Remove candidates whose multipliers (weights) are zero and would stay zero in the next step.

    Args:
        problem: The loss of the attack as a function of candidates and multipliers, with the candidates'
            labels.
        state: State of the search: the candidates and the optimizer.
        scale: Multipliers of the equation divided by the multipliers that the state stores.
        sharpness: Sharpness of the smooth surrogate of the ReLU (alpha of the sigmoid, beta of the
            softplus).
        due: Indices of the runs that may change their number of candidates at this step.

    Returns:
        The new state, and a mask of the dropped candidates (R, m).
    """
    may_drop = torch.zeros_like(get_population(state).active)
    may_drop[due] = get_population(state).active[due]
    gradient = problem.evaluate(state.x, state.lam * scale, sharpness).grad_lam
    is_zero = (state.lam == 0).reshape(*may_drop.shape, -1).all(2)
    stays_zero = gradient >= 0 if problem.objective.nonnegative else gradient == 0
    stays_zero = stays_zero.reshape(*may_drop.shape, -1).all(2)
    is_dropped = may_drop & is_zero & stays_zero
    return (remove_candidates(state, is_dropped) if bool(is_dropped.any()) else state), is_dropped


def merge(
    problem: Problem,
    state: SolverState,
    scale: float | Tensor,
    sharpness: float | Tensor,
    due: list[int],
) -> tuple[SolverState, list[tuple[int, int, int, float, float]]]:
    """Merge pairs of candidates into one candidate, if the loss of their run does not rise.

    Args:
        problem: The loss of the attack as a function of candidates and multipliers, with the candidates'
            labels.
        state: State of the search: the candidates and the optimizer.
        scale: Multipliers of the equation divided by the multipliers that the state stores.
        sharpness: Sharpness of the smooth surrogate of the ReLU (alpha of the sigmoid, beta of the
            softplus).
        due: Indices of the runs that may change their number of candidates at this step.

    Returns:
        The new state, and a tuple for every merge: index of the run, position of the merged candidate in
        the tensors, position of the removed candidate, loss before the merge, loss after the merge.
    """
    # If the fit is exact, the loss consists only of rounding errors. So an increase as large as rounding
    # errors is accepted.
    rounding_error = 64 * torch.finfo(state.x.dtype).eps ** 2 * problem.empty_loss
    pair_queues = {run: _pairs(problem, state, run) for run in due}
    done_merges = []
    for _ in range(MAX_TRIES):
        loss_before = problem.evaluate(state.x, state.lam * scale, sharpness).loss
        x, lam = state.x.clone(), state.lam.clone()
        tried_pairs: dict[int, tuple[int, int]] = {}
        for run, pair_queue in pair_queues.items():
            if pair_queue:
                tried_pairs[run] = i, j = pair_queue.pop(0)
                weight = torch.stack([state.lam[run, k].abs().sum() for k in (i, j)])
                weight_shares = weight / weight.sum()
                x[run, i] = weight_shares[0] * state.x[run, i] + weight_shares[1] * state.x[run, j]
                lam[run, i] = state.lam[run, i] + state.lam[run, j]
                lam[run, j] = 0.0
        if not tried_pairs:
            break
        loss_after = problem.evaluate(x, lam * scale, sharpness).loss
        is_dropped = torch.zeros_like(get_population(state).active)
        for run, (i, j) in tried_pairs.items():
            if not bool(loss_after[run] <= loss_before[run] + rounding_error):
                x[run], lam[run] = state.x[run], state.lam[run]
                continue
            is_dropped[run, j] = True
            done_merges.append((run, i, j, float(loss_before[run]), float(loss_after[run])))
            pair_queues[run] = [pair for pair in pair_queues[run] if not {i, j} & set(pair)]
        if bool(is_dropped.any()):
            state = remove_candidates(state.replace(x=x, lam=lam), is_dropped)
    return state, done_merges


def _pairs(problem: Problem, state: SolverState, run: int) -> list[tuple[int, int]]:
    """Return the pairs of candidates of a run that can be merged, closest first.

    Both candidates have the same label, the same signs of their multipliers, and the same activation
    pattern.

    Args:
        problem: The loss of the attack as a function of candidates and multipliers (weights of candidates).
        state: State of the search: the candidates and the optimizer.
        run: Index of the run (restart).

    Returns:
        The pairs, as positions of the candidates in the tensors of the state.
    """
    candidate_population = get_population(state)
    slots = candidate_population.active[run].nonzero()[:, 0]
    flat_candidates = state.x[run, slots].flatten(1)
    multipliers = state.lam[run, slots].reshape(len(flat_candidates), -1)
    signs, labels = multipliers.sign(), candidate_population.labels[run, slots]
    is_mergeable = (labels[:, None] == labels[None]) & ((signs[:, None] * signs[None]) >= 0).all(2)
    is_mergeable &= (multipliers != 0).any(1)[:, None] & (multipliers != 0).any(1)[None]
    distances = torch.cdist(flat_candidates, flat_candidates)
    patterns = activation_patterns(problem, state.x[run, slots])
    if patterns is None:
        lengths = flat_candidates.norm(dim=1)
        is_mergeable &= distances <= MAX_DISTANCE * torch.minimum(lengths[:, None], lengths[None])
    else:
        is_mergeable &= patterns @ patterns.T >= patterns.shape[1] - 0.5
    slot_pairs = torch.triu(is_mergeable, 1).nonzero()
    order_by_distance = distances[slot_pairs[:, 0], slot_pairs[:, 1]].argsort()[: 4 * MAX_TRIES]
    return [(int(slots[a]), int(slots[b])) for a, b in slot_pairs[order_by_distance].tolist()]


def activation_patterns(problem: Problem, x: Tensor) -> Tensor | None:
    """Return which neurons of a ReLU MLP are active for each sample (its activation pattern).

    Args:
        problem: The loss of the attack as a function of candidates and multipliers (weights of candidates).
        x: Candidates (m, *shape) of one run.

    Returns:
        The signs (m, neurons) as 1 and -1, None for networks that are not ReLU MLPs.
    """
    mlp_equation = problem.explicit
    if mlp_equation is None or not isinstance(problem.true_activation, ReLU):
        return None
    pre_activations = mlp_equation.pre_activations(x.flatten(1), problem.true_activation)
    signs = (torch.where(z > 0, 1.0, -1.0).to(x) for z in pre_activations)
    return torch.cat([x[:, :0].flatten(1), *signs], 1)
