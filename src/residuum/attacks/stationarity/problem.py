"""The loss of an attack as a function of candidates x and multipliers lam, with residuals and gradients.

MLPs use the explicit derivatives of ``engine/explicit.py``. Any other ``nn.Module`` uses automatic
differentiation of the same equation. Shapes: x is (R, m, *shape) for R independent runs, and lam is (R, m,
*multiplier_shape).

For fixed candidates the best multipliers solve a (nonnegative) least-squares problem:

    min_{lam >= floor} sum_l w_l || target_l - sum_i lam_i g_i,l ||^2

Here g_i,l is the gradient of candidate i in layer l, and floor is the smallest permitted multiplier. With lam
= floor + nu, the constraint becomes nu >= 0. The product of the Gram matrix and the floor is then subtracted
from the right side of the normal equations. The gradient of the loss in lam gives the right side and the
columns of the Gram matrix. The method therefore works for every objective that is linear in lam.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from residuum.attacks.stationarity.objectives import Objective
from residuum.engine.explicit import Candidates, ExplicitEquation
from residuum.engine.generic import GenericEquation
from residuum.errors import InputError, require_known
from residuum.networks import SURROGATES, Activation, dense_chain, with_surrogate
from residuum.records import Knowledge
from residuum.stationarity import Theta, by_layer, layer_squares, parameters
from residuum.surfaces.surface import CHANGE
from residuum.theory.multipliers import factor_gram, solve

# Largest number of multipliers (weights of the candidates) that are computed by least squares, because each
# multiplier needs one more evaluation of the loss.
MAX_UNKNOWNS = 2000


@dataclass(frozen=True)
class Evaluation:
    """Loss of an attack, and its gradients, for given candidates x and multipliers (weights) lam.

    Attributes:
        loss: Loss of every run (R,).
        layers: Squared norm of the residual over squared norm of the target, for every run and layer (R, L).
        grad_x: Gradient of the loss in the candidates.
        grad_lam: Gradient of the loss in the multipliers.
    """

    loss: Tensor
    layers: Tensor
    grad_x: Tensor
    grad_lam: Tensor


class Problem:
    """Loss of an attack on one network, as a function of candidates and multipliers.

    Args:
        model: The network that is attacked.
        objective: Defines the equation that the attack solves.
        knowledge: What the attacker knows.
        labels: Labels of the candidates (m,), or (R, m) if the labels differ between runs.
        surrogate: Name of the smooth function that replaces the derivative of ReLUs, "none" for the true
            derivative.
        normalize: Whether to divide the squared residual of each layer by ||target_l||^2.
        layers: Layers whose residuals enter the loss. "first" is the first layer only. "auto" is the first
            layer for MLPs and all layers for other networks. For a weight update, "auto" is every layer
            that training changed. Frozen layers never enter the loss, because training did not follow their
            gradients.
        dtype: Number format of the search.
        device: Where the loss is computed, such as "cpu" or "cuda".

    Raises:
        InputError: If training did not change any of the layers that ``layers`` selects.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        knowledge: Knowledge,
        labels: Tensor,
        *,
        surrogate: str = "sigmoid",
        normalize: bool = True,
        layers: str = "auto",
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> None:
        require_known(surrogate, (*SURROGATES, "none"), "No surrogate")
        converted_model = copy.deepcopy(model).to(device, dtype).requires_grad_(False)
        models_at_points = []
        for name in objective.gradient_points():
            model_at_point = copy.deepcopy(converted_model)
            if name == "theta0":
                assert knowledge.theta0 is not None
                initial_weights = {n: t.to(device, dtype) for n, t in knowledge.theta0.items()}
                # The initial weights are known without buffers, so the buffers of the trained network are
                # used.
                model_at_point.load_state_dict({**model_at_point.state_dict(), **initial_weights})
            models_at_points.append(model_at_point)
        self.objective = objective
        chain = dense_chain(converted_model)
        is_smooth = chain is not None and not isinstance(chain.activation, nn.ReLU)
        # A smooth activation needs no surrogate, because surrogates replace the derivatives of ReLUs.
        self.surrogate = "none" if is_smooth else surrogate
        self.labels = labels.to(device)
        # Decide which layers training changed before the weights are converted to the number format of the
        # search, because rounding could hide a change.
        surface = objective.create_surface(parameters(model), knowledge)
        self.target = objective.create_surface(parameters(converted_model), knowledge).target
        self.groups = by_layer(self.target)
        self.scales = self.squares(self.target).tolist()
        # Above the first layer, an MLP's weights stay near their initialization and reveal little.
        has_uninformative_layers = surface.name != CHANGE and chain is not None
        first_only = layers == "first" or (layers == "auto" and has_uninformative_layers)
        is_fitted = [
            (i == 0 or not first_only) and name in surface.equations
            for i, name in enumerate(self.groups)
        ]
        if not any(is_fitted):
            raise InputError(
                "The attack must fit a layer that training changed; this attack fits only the first "
                "layer, and training did not change the first layer.",
                'Pass layers="all" to fit the other layers.',
            )
        self.layer_weights = [
            (1 / scale if normalize and scale > 0 else 1.0) if fitted else 0.0
            for fitted, scale in zip(is_fitted, self.scales, strict=True)
        ]
        divisors = [scale if scale > 0 else 1.0 for scale in self.scales]
        self._scales = torch.tensor(divisors, dtype=dtype, device=device)
        self.weights = torch.tensor(self.layer_weights, dtype=dtype, device=device)
        self.explicit: ExplicitEquation | None = None
        chains = [
            chain
            for model_at_point in models_at_points
            if (chain := dense_chain(model_at_point)) is not None
        ]
        if chains:
            self.explicit = ExplicitEquation(chains, self.target, self.layer_weights)
            self.true_activation = chains[0].activation
        else:
            self.points = models_at_points
            layer_groups = list(self.groups.values())
            self.generic = GenericEquation(
                models_at_points, self.target, layer_groups, self.weights
            )

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers, in the order of the errors (residuals) in an :class:`Evaluation`."""
        return tuple(self.groups)

    @property
    def empty_loss(self) -> float:
        """Loss without any candidate (guess of a sample): the weighted squared norm of the target."""
        return sum(w * scale for w, scale in zip(self.layer_weights, self.scales, strict=True))

    def evaluate(
        self,
        x: Tensor,
        lam: Tensor,
        sharpness: float | Tensor = 150.0,
        measure: bool = True,
    ) -> Evaluation:
        """Compute the loss, its gradients, and the relative squared error of the equation in each layer.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), as they appear in the equation.
            sharpness: Sharpness of the smooth surrogate of the ReLU (alpha of the sigmoid, beta of the
                softplus), (R, 1, 1) if runs differ.
            measure: Whether to compute the loss and the residuals. If False, only the gradients are valid.

        Returns:
            The loss, the residuals and the gradients.
        """
        if self.explicit is None:
            return self._evaluate_generic(x, lam, sharpness)
        candidates, activation = self.candidates(x, lam), self.activation(sharpness)
        with torch.no_grad():
            squares, grad_x, grad_lam = self.explicit.evaluate(
                candidates, self.objective, activation, measure
            )
        grad_x = grad_x.view_as(x)
        if not measure:
            return Evaluation(squares[:, 0], squares, grad_x, grad_lam)
        return Evaluation(squares @ self.weights, squares / self._scales, grad_x, grad_lam)

    def with_labels(self, labels: Tensor) -> Problem:
        """Return a copy of the loss function with other labels for the candidates (guesses of samples)."""
        relabeled_problem = copy.copy(self)
        relabeled_problem.labels = labels.to(self.labels.device)
        return relabeled_problem

    def labels_of(self, run: int) -> Tensor:
        """Return the labels (m,) of the m candidates of one run."""
        return self.labels if self.labels.ndim == 1 else self.labels[run]

    def activation(self, sharpness: float | Tensor) -> Activation:
        """Return the activation function of an MLP.

        If the settings name a smooth surrogate, the surrogate replaces its derivative.
        """
        if self.surrogate == "none":
            return self.true_activation
        return SURROGATES[self.surrogate](sharpness)

    def candidates(self, x: Tensor, lam: Tensor) -> Candidates:
        """Return the candidates in the format of :class:`ExplicitEquation`, the explicit derivatives of MLPs.

        Args:
            x: Candidates for training samples (R, m, *shape), m in each of R runs.
            lam: Multipliers (weights) of the candidates (R, m, ...), as they appear in the equation.

        Returns:
            The candidates, with flattened samples, multipliers and labels.
        """
        return Candidates(x.flatten(2), lam, self.labels)

    def _evaluate_generic(self, x: Tensor, lam: Tensor, sharpness: float | Tensor) -> Evaluation:
        """Return the loss and its gradients, computed by automatic differentiation.

        The runs are evaluated one by one if they smooth the ReLU differently (sharpness).
        """
        differs_by_run = isinstance(sharpness, Tensor) and sharpness.ndim > 0
        results = []
        for run in range(len(x)) if differs_by_run else (0,):
            runs = slice(run, run + 1) if differs_by_run else slice(None)
            labels = self.labels if self.labels.ndim == 1 else self.labels[runs]
            candidates = Candidates(x[runs], lam[runs], labels)
            models = self.build_models(sharpness, run)
            results.append(self.generic.evaluate(models, self.objective, candidates))
        squares, *gradients = (torch.cat(tensors) for tensors in zip(*results, strict=True))
        return Evaluation(squares @ self.weights, squares / self._scales, *gradients)

    def build_models(self, sharpness: float | Tensor, run: int) -> list[nn.Module]:
        """Build one copy of the network for each set of weights at which gradients are taken.

        The ReLUs of the networks have the surrogate derivative of one run, with the sharpness of this run.

        Args:
            sharpness: Sharpness of the smooth surrogate of the ReLU (alpha of the sigmoid, beta of the
                softplus), (R, 1, 1) if runs differ.
            run: Index of the run (restart).

        Returns:
            One network for each of the weights where gradients are taken.
        """
        if self.surrogate == "none":
            return self.points
        if isinstance(sharpness, Tensor) and sharpness.ndim > 0:
            sharpness = sharpness.flatten()[run]
        surrogate = SURROGATES[self.surrogate](sharpness)
        return [with_surrogate(point, surrogate) for point in self.points]

    def residual(self, models: list[nn.Module], x: Tensor, lam: Tensor, labels: Tensor) -> Theta:
        """Compute the error of the equation in one run: the target minus the weighted sum of gradients.

        The residual is differentiable in x and lam.

        Args:
            models: One network for each of the weights where gradients are taken.
            x: Candidates (m, *shape) of one run.
            lam: Multipliers (weights) of the candidates (m, ...), as they appear in the equation.
            labels: Labels of the candidates (m,).

        Returns:
            The residual by parameter name.
        """
        residual = dict(self.target)
        for i, model in enumerate(models):
            for name, term in self.sum_of_gradients(model, i, x, lam, labels).items():
                residual[name] = residual[name] - term
        return residual

    def squares(self, residual: Theta) -> Tensor:
        """Return the squared norm of the equation's error in each of L layers, weight and bias together."""
        return layer_squares(residual, self.groups.values())

    def sum_of_gradients(
        self, model: nn.Module, point: int, x: Tensor, lam: Tensor, labels: Tensor
    ) -> Theta:
        """Compute the weighted sum of the gradients at all candidates of one run.

        For candidates x_i with outputs Phi(x_i), weights u_i of the outputs (covectors) give the sum sum_i
        grad <u_i, Phi(x_i)>. One backward pass computes this sum, without a gradient per candidate. The
        result is differentiable in x and lam.

        Args:
            model: The network with the weights at which gradients are taken.
            point: Index of the weights at which the gradients are taken: the trained weights theta or the
                initial weights theta0.
            x: Candidates (m, *shape) of one run.
            lam: Multipliers (weights) of the candidates (m, ...), as they appear in the equation.
            labels: Labels of the candidates (m,).

        Returns:
            The sum of gradients by parameter name.
        """
        fixed_weights = parameters(model)
        leaf_weights = {name: t.clone().requires_grad_() for name, t in fixed_weights.items()}
        # Each output of the network is weighted with a number u. The network weights require no gradient
        # here, so that derivatives with respect to them treat u as a constant.
        output_weights = self.objective.covectors(
            point, functional_call(model, fixed_weights, (x,)), labels, lam
        )
        inner_product = (output_weights * functional_call(model, leaf_weights, (x,))).sum()
        gradients = torch.autograd.grad(
            inner_product, list(leaf_weights.values()), create_graph=True, materialize_grads=True
        )
        return dict(zip(leaf_weights, gradients, strict=True))


def fit_multipliers(
    problem: Problem,
    x: Tensor,
    lam: Tensor,
    floor: float | None,
    scale: float,
    sharpness: float | Tensor,
) -> Tensor:
    """Compute the best multipliers (weights) of given candidates, separately for each run.

    The fit solves a least-squares problem: the weighted sum of the candidates' gradients must equal the
    target.

    A run keeps its multipliers if its gradients are not finite or all zero, or if it has more than
    MAX_UNKNOWNS multipliers.

    Args:
        problem: The loss of the attack as a function of candidates and multipliers (weights of candidates).
        x: Candidates for training samples (R, m, *shape), m in each of R runs.
        lam: Multipliers (weights) of the candidates (R, m, ...), in the units of the optimization.
        floor: Smallest permitted multiplier, None if multipliers can have any value.
        scale: Multipliers of the equation divided by stored multipliers.
        sharpness: Sharpness of the smooth surrogate of the ReLU (alpha of the sigmoid, beta of the
            softplus).

    Returns:
        The stored multipliers (R, m, ...) that minimize the loss for these candidates.
    """
    unknown_count, fitted_runs = lam[0].numel(), []
    if unknown_count > MAX_UNKNOWNS:
        return lam
    unit_vectors = torch.eye(unknown_count, dtype=x.dtype, device=x.device)
    for candidates, current in zip(x[:, None], lam[:, None], strict=True):

        def gradient(
            values: Tensor, candidates: Tensor = candidates, current: Tensor = current
        ) -> Tensor:
            evaluation = problem.evaluate(candidates, values.view_as(current) * scale, sharpness)
            return evaluation.grad_lam.flatten().double() * scale

        # For the matrix G of gradients, the loss is |target - G lam|^2 with layer weights.
        # The gradient of the loss is 2 (G'G lam - G'target).
        # The gradient at lam = 0 gives the right side G'target.
        # The gradient at the i-th unit vector gives the i-th column of the Gram matrix G'G.
        right_side = -gradient(torch.zeros_like(current)) / 2
        gram, shift = (
            torch.stack([gradient(e) / 2 + right_side for e in unit_vectors]).cpu(),
            floor or 0.0,
        )
        if not bool(gram.isfinite().all()) or float(gram.trace()) <= 0:
            fitted_runs.append(current)
            continue
        # The unknowns are the multipliers minus their smallest allowed value. So the contribution of this
        # value is subtracted from the right side of the equations.
        factored_problem = factor_gram(gram, right_side.cpu() - shift * gram.sum(1))
        fitted_runs.append(
            (shift + solve(factored_problem, free=floor is None)).to(lam).view_as(current)
        )
    return torch.cat(fitted_runs)


def balancing_scale(problem: Problem, x: Tensor, shape: tuple[int, ...], sharpness: float) -> float:
    """Return the weight at which the sum of gradients at the candidates x is as large as its target.

    The norms of the sum and the target are compared in the first layer that enters the loss.

    Args:
        problem: The loss of the attack as a function of candidates and multipliers (weights of candidates).
        x: Candidates (1, m, ...).
        shape: Shape of the multipliers of one candidate.
        sharpness: Sharpness of the smooth surrogate of the ReLU (alpha of the sigmoid, beta of the
            softplus).

    Returns:
        The multiplier, 1 if the sum of gradients is zero.
    """
    ones = torch.ones(*x.shape[:2], *shape, dtype=x.dtype, device=x.device)
    # Let T be the sum of the gradients of all candidates. The squared norms |target - s T|^2 for s = -1, 0
    # and 1 determine the norm of T.
    first_layer = next((i for i, weight in enumerate(problem.layer_weights) if weight > 0), 0)
    squared_residuals = [
        problem.evaluate(x, s * ones, sharpness).layers[0, first_layer] for s in (-1.0, 0.0, 1.0)
    ]
    minus, zero, plus = squared_residuals
    # |T|^2 / |target|^2, where T is the sum of gradients.
    squared_ratio = float((minus + plus) / 2 - zero)
    return 1 / math.sqrt(squared_ratio) if squared_ratio > 0 else 1.0
