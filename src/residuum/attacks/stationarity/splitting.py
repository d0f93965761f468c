"""Sample splitting: replace unstable candidates by two new ones (Shen et al. 2026, section 5).

This file decides which candidates split, in which direction, and how far.

A candidate x_i is unstable if its splitting matrix S(x_i) has a negative eigenvalue (``curvature.py``). The
candidate is split along the eigenvector v: x_i becomes x_i + eta v and x_i - eta v, each with half the
multiplier. The loss is even in the step length eta and changes by

    eta^2 / 2 v'S v + O(eta^4)

so a split along negative curvature lowers the loss, even if the Hessian of the loss is positive definite.

All splits of a round share one residual. Their gains do not add up, so their step lengths are found jointly.
Let f(x_i) be the weighted gradient of candidate x_i, and r the residual. If f is a polynomial of degree at
most 3 in x, the loss is exactly

    L(eta) = || r - 1/2 sum_i eta_i^2 f''(x_i)[v_i, v_i] ||_w^2

This is a nonnegative least-squares problem in eta_i^2. For one candidate its solution is
eta^2 = -v'S v / |f''[v, v]|_w^2, and the gain is the share cos^2(r, f''[v, v]) of the loss. For any other f
there is one line search along eta_i^2 ~ -v_i'S v_i, the steepest descent in eta^2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from residuum.attacks.stationarity.curvature import Curvature, find_lowest_pairs, weighted_residuals
from residuum.attacks.stationarity.growth import GrowthStrategy, Proposal, Round
from residuum.attacks.stationarity.problem import Problem
from residuum.attacks.stationarity.slots import Newcomer
from residuum.attacks.stationarity.solver import Solver
from residuum.errors import InputError
from residuum.networks import Polynomial, SigmoidReLU, Softplus
from residuum.theory.multipliers import factor_dense, solve

MAX_HALVINGS = 14  # maximum number of times that a line search halves the length of its step
# The second derivative of a smoothed ReLU is almost zero if its sharpness times its input exceeds this
# value.
MAX_CURVED = 20.0


class SampleSplitting(GrowthStrategy):
    """Method that splits candidates in two: in every run, those whose split lowers the loss most.

    A candidate is unstable if the smallest eigenvalue of its splitting matrix (second derivative of the loss
    under a split) is below minus a threshold. The published threshold is the setting ``split_threshold``. If
    the setting ``split_relative`` is set, the threshold is multiplied by the loss and divided by the squared
    length of the candidates, because the eigenvalues scale in this way. If the loss of a run would not fall,
    no candidate of the run is split.
    """

    event: ClassVar[str] = "split"

    def check(self, solver: Solver) -> None:
        """Raise an error for a network with ReLUs, unless a smooth function replaces their derivative.

        Raises:
            InputError: If the network has ReLUs and no surrogate replaces their derivative.
        """
        has_relu = any(isinstance(module, nn.ReLU) for module in solver.model.modules())
        if solver.problem.surrogate == "none" and has_relu:
            raise InputError(
                "Splitting candidates needs second derivatives of the network; with the true derivative of "
                "the ReLU there are none.",
                "Pass --surrogate sigmoid or --surrogate softplus.",
            )

    def propose(self, now: Round) -> Proposal:
        """Split candidates (guesses of samples) in two. Return one new candidate for each of them."""
        settings, is_exact = now.config, has_exact_degree(now.solver.model)
        curvature = Curvature(now.problem, now.x, now.lam, now.sharpness)
        lowest_pairs = find_lowest_pairs(curvature, now.noise, now.free)
        eigenvalues = lowest_pairs.values.masked_fill(~now.active, torch.inf)
        eigenvalues = torch.where(torch.isfinite(eigenvalues) | ~now.active, eigenvalues, torch.inf)
        threshold = now.x.new_full((now.runs,), settings.split_threshold)
        if settings.split_relative:
            loss = now.problem.evaluate(now.x, now.lam, now.sharpness).loss
            threshold = threshold * loss / now.median_length().square().clamp(min=1e-12)
        # Rank of each eigenvalue in its run, 0 for the smallest.
        eigenvalue_ranks = eigenvalues.argsort(1).argsort(1)
        quota = torch.tensor(now.quota, device=now.x.device)
        is_chosen = (eigenvalues < -threshold[:, None]) & (eigenvalue_ranks < quota[:, None])
        max_step = torch.full_like(threshold, torch.inf) if is_exact else now.median_length() / 2
        if settings.split_eta > 0:
            max_step = torch.full_like(threshold, settings.split_eta)
        curvatures = eigenvalues.nan_to_num(posinf=0.0)
        split_step = joint_step(
            curvature, lowest_pairs.vectors, curvatures, is_chosen, max_step, is_exact, now.clamp
        )
        newcomers: list[list[Newcomer]] = [[] for _ in range(now.runs)]
        for run, slot in split_step.eta.nonzero().tolist():
            eta, value = split_step.eta[run, slot], eigenvalues[run, slot]
            x, shift = now.x[run, slot], eta * lowest_pairs.vectors[run, slot]
            plus, minus = (now.clamp((x + sign * shift)[None, None])[0, 0] for sign in (1, -1))
            half, label = now.lam[run, slot] / 2, now.problem.labels_of(run)[slot]
            predicted_change = eta**2 * value / 2
            figures = {
                "eigenvalue": float(value),
                "eta": float(eta),
                "predicted": float(predicted_change),
            }
            newcomers[run].append(Newcomer(minus, half, label, slot, plus, figures))
        return Proposal(
            newcomers,
            split_step.before,
            split_step.after,
            eigenvalues.amin(1),
            note_vanishing_curvature(now),
        )


def note_vanishing_curvature(now: Round) -> str:
    """Return a note for users if most candidates cannot be split in two, "" otherwise.

    A smooth surrogate replaces the derivative of the ReLUs. If the surrogate is too sharp, its second
    derivative vanishes at most candidates, and these candidates cannot split.
    """
    mlp_equation = now.problem.explicit
    if mlp_equation is None:
        return ""
    surrogate = now.problem.activation(now.sharpness)
    if not isinstance(surrogate, SigmoidReLU | Softplus):
        return ""
    pre_activations = mlp_equation.pre_activations(now.x.flatten(2), surrogate)
    smallest_inputs = torch.stack(
        [(z * now.sharpness).abs().amin(2) for z in pre_activations]
    ).amin(0)
    has_no_curvature = smallest_inputs[now.active] > MAX_CURVED
    if not bool(has_no_curvature.double().mean() > 0.5):
        return ""
    return (
        f"splitting: at step {now.step} the surrogate is so sharp that {int(has_no_curvature.sum())} of "
        f"{len(has_no_curvature)} candidates have no curvature and cannot split (sharpness times the nearest "
        f"pre-activation is above {MAX_CURVED:g}); pass a smaller --sharpness to split them"
    )


def has_exact_degree(model: nn.Module) -> bool:
    """Return True if the gradients of a network are polynomials of degree at most 3 in a sample.

    The loss is then quadratic in the squared step length of a split.
    """
    activation = getattr(model, "activation", None)
    has_one_layer = getattr(model, "hidden", 0) == 1
    return isinstance(activation, Polynomial) and activation.degree <= 3 and has_one_layer


@dataclass(frozen=True)
class JointStep:
    """The distances by which the halves of split candidates move, and the loss before and after the splits.

    Attributes:
        eta: Step lengths (R, m), 0 for candidates that are not split.
        before: Loss of each run before the splits (R,).
        after: Loss of each run after the splits (R,).
    """

    eta: Tensor
    before: Tensor
    after: Tensor


def joint_step(
    curvature: Curvature,
    v: Tensor,
    bend: Tensor,
    chosen: Tensor,
    longest: Tensor,
    exact: bool = False,
    clamp: Callable[[Tensor], Tensor] = lambda x: x,
) -> JointStep:
    """Find how far the halves of all split candidates move, jointly for all splits.

    Args:
        curvature: The splitting matrices S, with the candidates and their multipliers.
        v: Directions of the splits, with the shape of x.
        bend: Curvature v'Sv of every candidate along its direction v (R, m).
        chosen: Mask of the candidates to split (R, m).
        longest: Largest step length of each run (R,).
        exact: Whether the gradients are polynomials of degree at most 3 in a sample, so that there is a
            closed form.
        clamp: Projects candidates into the value range that the attacker knows.

    Returns:
        The step lengths of the splits. If the loss of a run would not fall, its step lengths are 0.
    """
    x, lam, problem = curvature.x, curvature.lam, curvature.problem
    negative_curvature = (-bend).clamp(min=0) * chosen
    if exact:
        longest_steps = torch.stack(
            [_closed_form(curvature, run, v, chosen[run]) for run in range(len(x))]
        )
        longest_steps = torch.minimum(longest_steps, longest[:, None])
    else:
        largest_descent = negative_curvature.amax(1, keepdim=True)
        longest_steps = (
            longest[:, None]
            * (negative_curvature / torch.where(largest_descent > 0, largest_descent, 1.0)).sqrt()
        )
    loss_before = problem.evaluate(x, lam, curvature.sharpness).loss
    best, eta = loss_before.clone(), torch.zeros_like(longest_steps)
    for halving in range(MAX_HALVINGS):
        trial_steps = longest_steps / 2**halving
        split_result = split_candidates(problem, x, lam, v, trial_steps, clamp)
        loss = split_result[2].evaluate(split_result[0], split_result[1], curvature.sharpness).loss
        is_better = (loss < best) & (trial_steps > 0).any(1)
        best, eta = (
            torch.where(is_better, loss, best),
            torch.where(is_better[:, None], trial_steps, eta),
        )
        if exact and bool((is_better | ~chosen.any(1)).all()):
            break  # these step lengths minimize the loss, so shorter steps are not tried
    return JointStep(eta, loss_before, best)


def split_candidates(
    problem: Problem,
    x: Tensor,
    lam: Tensor,
    v: Tensor,
    eta: Tensor,
    clamp: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, Tensor, Problem]:
    """Split candidates into x + eta v and x - eta v, each with half the multiplier.

    A candidate that is not split (eta = 0) keeps its multiplier, and the multiplier of its second half is
    zero. All runs then have 2m candidates, so that runs with different splits can be evaluated in one
    batch.

    Args:
        problem: The loss of the attack as a function of candidates and multipliers (weights of candidates).
        x: Candidates for training samples (R, m, *shape), m in each of R runs.
        lam: Multipliers (weights) of the candidates (R, m, ...).
        v: Directions of the splits, with the shape of x.
        eta: Step lengths of the splits (R, m), 0 for candidates that are not split.
        clamp: Projects candidates into the value range that the attacker knows.

    Returns:
        The candidates after the splits (R, 2m, *shape), their multipliers, and the problem with their
        labels.
    """
    shift = eta.view(*eta.shape, *[1] * (x.ndim - 2)) * v
    is_split = (eta > 0).view(*eta.shape, *[1] * (lam.ndim - 2))
    half_lam = lam / 2
    labels = problem.labels.expand(len(x), -1)
    return (
        torch.cat([clamp(x + shift), clamp(x - shift)], 1),
        torch.cat([torch.where(is_split, half_lam, lam), torch.where(is_split, half_lam, 0.0)], 1),
        problem.with_labels(torch.cat([labels, labels], 1)),
    )


def _closed_form(curvature: Curvature, run: int, v: Tensor, chosen: Tensor) -> Tensor:
    """Find how far the halves of split candidates move in one run, by nonnegative least squares.

    The gradients f must be polynomials of degree at most 3 in a sample x. For such polynomials, f''[v, v] =
    f(x + v) + f(x - v) - 2 f(x) exactly. The function evaluates each candidate as a separate run.

    Args:
        curvature: The splitting matrices S, with the candidates and their multipliers.
        run: Index of the run (restart).
        v: Directions of the splits (R, m, *shape).
        chosen: Mask of the candidates to split (m,).

    Returns:
        The step lengths (m,) of the run's candidates, 0 for candidates that are not split.
    """
    eta, index = chosen.to(v.dtype) * 0, chosen.nonzero()[:, 0]
    if not len(index):
        return eta
    x, lam = curvature.x[run, index][:, None], curvature.lam[run, index][:, None]
    problem, labels = curvature.problem, curvature.problem.labels_of(run)
    candidate_problem, step = problem.with_labels(labels[index][:, None]), v[run, index][:, None]
    minus, center, plus = (
        weighted_residuals(candidate_problem, x + t * step, lam, curvature.sharpness)
        for t in (-1, 0, 1)
    )
    columns = -(minus + plus - 2 * center) / 2
    run_problem = problem.with_labels(labels[None])
    run_x, run_lam = curvature.x[run][None], curvature.lam[run][None]
    run_residual = weighted_residuals(run_problem, run_x, run_lam, curvature.sharpness)[0]
    squared_steps = solve(
        factor_dense(columns.cpu().double(), run_residual.cpu().double()), free=False
    )
    eta[index] = squared_steps.clamp(min=0).sqrt().to(eta)
    return eta
