"""The candidates of an attack as one solution of its equation, and how well an attack fits the weights.

The set ``selected`` holds the candidates that the attack selected. If several restarts agree on some of these
candidates, the set holds only the candidates with agreement. A selected candidate is the mean of a group, and
it has the multiplier of the candidate with the largest weight in this group. The set ``best`` holds all
candidates of the restart with the smallest loss, largest multiplier first. Together the candidates of
``best`` are one solution of the stationarity equation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from residuum.attacks.registry import rebuild_attack
from residuum.attacks.stationarity.attack import Stationarity
from residuum.attacks.stationarity.objectives import BinaryKKT, MulticlassKKT, Objective
from residuum.attacks.stationarity.problem import Problem
from residuum.attacks.stationarity.solver import sharpness_at
from residuum.errors import InputError, require_known
from residuum.records import Reconstruction, Record
from residuum.stationarity import parameters
from residuum.surfaces.surface import Surface
from residuum.theory.kkt import evaluate
from residuum.theory.kkt_sets import KKTSet

CANDIDATE_SETS = ("selected", "best")


@dataclass(frozen=True, eq=False)
class Solution:
    """A set of candidates that together roughly solve the equation of an attack for the weights.

    Attributes:
        kkt: The candidates with their multipliers, and the residual of their stationarity equation.
        index: Row numbers of the k candidates in the reconstruction (k,).
        support: Number of restarts that found each candidate (k,), None unless the set is "selected".
        confidence: Confidence of each candidate (k,), None unless the set is "selected".
    """

    kkt: KKTSet
    index: Tensor
    support: Tensor | None = None
    confidence: Tensor | None = None

    @property
    def x(self) -> Tensor:
        """The k candidates of the solution (k, *shape), in the form that the network receives."""
        return self.kkt.x


def build_solution(
    model: nn.Module, reconstruction: Reconstruction, which: str = "selected"
) -> Solution:
    """Build a solution from the candidates of a reconstruction. Candidates that are not finite are left out.

    Args:
        model: The network that is attacked.
        reconstruction: The result of an attack.
        which: Name of the set of candidates: "selected", or "best" for all candidates of the best restart.

    Returns:
        The solution. If there is no selection, the solution has the candidates of the best restart.

    Raises:
        InputError: If no restart has finite candidates.
    """
    require_known(which, CANDIDATE_SETS, "No candidates")
    selection = reconstruction.selection
    if which == "selected" and selection is not None and len(selection):
        has_agreement = selection.support > 1
        is_kept = has_agreement if bool(has_agreement.any()) else torch.ones_like(has_agreement)
        row_numbers = selection.index[is_kept]
        candidate_set = build_kkt_set(
            model,
            reconstruction,
            selection.x[is_kept],
            selection.labels[is_kept],
            reconstruction.lam[row_numbers],
        )
        return Solution(
            candidate_set, row_numbers, selection.support[is_kept], selection.confidence[is_kept]
        )
    best_row_numbers = select_best_rows(reconstruction)
    if best_row_numbers is None:
        raise InputError(
            "A reconstruction must have at least one finite candidate whose multiplier (weight) is not "
            "zero; this reconstruction has none.",
            "Run the attack again.",
        )
    return Solution(_kkt_set_of_rows(model, reconstruction, best_row_numbers), best_row_numbers)


def select_best_rows(reconstruction: Reconstruction) -> Tensor | None:
    """Return the row numbers of the candidates of the best restart (run), largest multiplier first.

    The best restart has the smallest loss.

    Args:
        reconstruction: The result of an attack.

    Returns:
        Row numbers in the reconstruction (k,), None if no finite candidate has a nonzero multiplier.
    """
    if (run := reconstruction.best_restart) is None:
        return None
    weight = reconstruction.weight
    is_finite = reconstruction.x.flatten(1).isfinite().all(1)
    is_in_best_restart = (reconstruction.run == run) & is_finite & (weight > 0)
    row_numbers = is_in_best_restart.nonzero().flatten()
    return (
        row_numbers[weight[row_numbers].argsort(descending=True, stable=True)]
        if len(row_numbers)
        else None
    )


def find_best_residual(
    model: nn.Module, reconstructions: Sequence[Reconstruction]
) -> dict[str, float]:
    """Find the attack whose best restart (run) explains the weights of the first layer best.

    Args:
        model: The network that is attacked.
        reconstructions: Results of attacks.

    Returns:
        Residuals of the layers at the best restart of this attack. The result is {} if no attack solves an
        equation for the released weights with fixed multipliers.
    """
    best_residuals: dict[str, float] = {}
    for reconstruction in reconstructions:
        row_numbers = select_best_rows(reconstruction)
        if row_numbers is None:
            continue
        objective = restore_objective(model, reconstruction)
        if objective.follows_outputs:
            continue
        candidate_set = _kkt_set_of_rows(model, reconstruction, row_numbers)
        residuals = candidate_set.layer_residuals
        first_layer_name = next(iter(residuals))
        fits_released_weights = objective.surface == BinaryKKT.surface
        if fits_released_weights and (
            not best_residuals or residuals[first_layer_name] < best_residuals[first_layer_name]
        ):
            best_residuals = residuals
    return best_residuals


def restore_objective(model: nn.Module, reconstruction: Reconstruction) -> Objective:
    """Return the objective (equation) of the attack that made a reconstruction.

    Args:
        model: The network that is attacked.
        reconstruction: The result of an attack.

    Returns:
        The objective. If the attack is not known, the KKT objective for the network's number of outputs.
    """
    attack = rebuild_attack(reconstruction)
    if isinstance(attack, Stationarity):
        return attack.objective.from_settings(attack, reconstruction.knowledge)
    sample = reconstruction.x[:1].to(next(model.parameters()))
    output_count = evaluate(model, sample).shape[1]
    objective_class = BinaryKKT if output_count == 1 else MulticlassKKT
    return objective_class.from_settings(attack, reconstruction.knowledge)


def build_kkt_set(
    model: nn.Module, reconstruction: Reconstruction, x: Tensor, labels: Tensor, lam: Tensor
) -> KKTSet:
    """Build the set of candidates that solves the equation of an attack, with a residual per layer.

    The residuals are computed in float64 and with the true activations of the network. The attack may have
    used smooth surrogates, but a certificate (a proof about the candidates) must describe the network
    itself.

    Args:
        model: The network that is attacked.
        reconstruction: The result of the attack, with its knowledge and settings.
        x: Candidates (k, *shape).
        labels: Labels (k,).
        lam: Multipliers (weights) of the candidates (k, ...), as they appear in the equation.

    Returns:
        The set of candidates with multipliers, target and residuals.

    Raises:
        InputError: If the network's outputs decide the multipliers, because the certificate compares
            candidates with fixed multipliers.
    """
    objective = restore_objective(model, reconstruction)
    knowledge = reconstruction.knowledge
    if objective.follows_outputs:
        raise InputError(
            "A certificate (a proof about the candidates) needs multipliers (weights of the candidates) "
            "that are fixed; this attack computes the multipliers from the loss at each candidate.",
            "Run the attack without --weight-decay.",
        )
    model = copy.deepcopy(model).double().requires_grad_(False)
    theta, x, lam = parameters(model), x.double(), lam.double()
    models = []
    for point in objective.gradient_points():
        model_at_point = copy.deepcopy(model)
        if point == "theta0":
            initial_weights = {k: t.clone() for k, t in (knowledge.theta0 or {}).items()}
            model_at_point.load_state_dict(initial_weights)
        models.append(model_at_point)
    output_weights = torch.stack(
        [objective.covectors(p, evaluate(m, x), labels, lam) for p, m in enumerate(models)], 1
    )
    target = {k: t.double() for k, t in objective.create_surface(theta, knowledge).target.items()}
    task = objective.task or ("binary" if output_weights.shape[2] == 1 else "multiclass")
    return KKTSet.from_covectors(tuple(models), target, x, labels, output_weights.detach(), task)


def _kkt_set_of_rows(model: nn.Module, reconstruction: Reconstruction, rows: Tensor) -> KKTSet:
    x, labels = reconstruction.x[rows], reconstruction.labels[rows]
    return build_kkt_set(model, reconstruction, x, labels, reconstruction.lam[rows])


@dataclass(frozen=True, eq=False)
class WeightFit(Record):
    """Errors (residuals) that say how well the result of an attack explains the weights of a network.

    Attributes:
        residuals: Norm of the residual over norm of the target, for every layer, at the best restart.
        judged: Names of the layers that decide whether the attack fits the weights.
    """

    residuals: dict[str, float] = field(default_factory=dict)
    judged: tuple[str, ...] = ()

    @property
    def worst(self) -> float | None:
        """Largest error among the layers that decide whether an attack fits the weights (``judged``).

        The value is None if one of these layers was not measured.
        """
        judged_residuals = [self.residuals[name] for name in self.judged if name in self.residuals]
        return (
            max(judged_residuals)
            if len(judged_residuals) == len(self.judged) and judged_residuals
            else None
        )


def measure_fit(surface: Surface, reconstruction: Reconstruction) -> WeightFit:
    """Measure how well the best restart (run) of an attack explains the weights.

    The residual of a layer is the norm of the target minus the weighted sum of the candidates' gradients,
    divided by the norm of the target. The best restart has the smallest residual of all restarts that did not
    diverge. The computation uses float64 and the surrogate derivatives with which the attack ran.

    Args:
        surface: The attack surface, which also decides the layers that are judged.
        reconstruction: The result of an attack.

    Returns:
        The residuals by layer, which are empty if all restarts diverged.
    """
    judged_layers = surface.layers
    best_record = _best_restart(reconstruction, judged_layers)
    if best_record is None:
        return WeightFit({}, judged_layers)
    attack = rebuild_attack(reconstruction)
    if not isinstance(attack, Stationarity):
        # An attack that computes a solution in closed form records only one error, for all equations
        # together.
        return WeightFit(
            {reconstruction.layer_names[0]: best_record[2]}, reconstruction.layer_names[:1]
        )
    run, step, _ = best_record
    objective = attack.objective.from_settings(attack, reconstruction.knowledge)
    is_in_best_restart = reconstruction.run == run
    fit_problem = Problem(
        surface.copy_module(),
        objective,
        reconstruction.knowledge,
        reconstruction.labels[is_in_best_restart],
        surrogate=attack.surrogate,
        layers="all",
        dtype=torch.float64,
    )
    x, lam = (
        reconstruction.x[is_in_best_restart].double()[None],
        reconstruction.lam[is_in_best_restart].double()[None],
    )
    squared_residuals = fit_problem.evaluate(x, lam, sharpness_at(attack, step)).layers[0].tolist()
    squares_by_layer = dict(zip(fit_problem.layer_names, squared_residuals, strict=True))
    finite_residuals = {
        name: math.sqrt(max(v, 0.0)) for name, v in squares_by_layer.items() if math.isfinite(v)
    }
    return WeightFit(finite_residuals, judged_layers)


def _best_restart(
    reconstruction: Reconstruction, judged: tuple[str, ...]
) -> tuple[int, int, float] | None:
    """Return the restart (run of the attack) with the smallest recorded error.

    Args:
        reconstruction: The result of an attack.
        judged: Names of the layers whose residuals are compared. The largest residual of a restart counts.

    Returns:
        The tuple (restart, step, residual), None if all restarts diverged.
    """
    layer_names = reconstruction.layer_names
    judged_indices = [i for i, name in enumerate(layer_names) if name in judged] or [0]
    best_record: tuple[int, int, float] | None = None
    for run, status in enumerate(reconstruction.status):
        if status == "diverged" or not reconstruction.loss.shape[1]:
            continue
        loss = reconstruction.loss[run].nan_to_num(nan=math.inf)
        best_index = int(loss.argmin())
        largest_squared_residual = float(
            reconstruction.layers[run, best_index, judged_indices].max()
        )
        if math.isfinite(largest_squared_residual) and (
            best_record is None or largest_squared_residual < best_record[2] ** 2
        ):
            best_record = (
                run,
                int(reconstruction.steps[best_index]),
                math.sqrt(max(largest_squared_residual, 0.0)),
            )
    return best_record
