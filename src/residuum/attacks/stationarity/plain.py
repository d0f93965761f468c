"""A complete attack in one file, for any ``nn.Module``, with automatic differentiation and torch's Adam.

The weights of a network whose training converged are a weighted sum of gradients at the training samples
(Haim et al. 2022). The file ``objectives.py`` lists related equations. For a binary classifier, the equation
is:

    theta = sum_i lam_i y_i grad_theta Phi(theta; x_i)

The attacker knows theta and searches for the samples. An objective defines the target, which the sum must
equal, and the covectors u_i, which weight the gradients. In this equation the target is theta, and u_i =
lam_i y_i. The attack minimizes

    L(x, lam) = sum_l |r_l|^2 / |target_l|^2 + priors(x, lam)                      over layers l
    r(x, lam) = target - sum_i grad_theta <u_i, Phi(theta; x_i)>

over candidates x and multipliers lam:

    Phi      the network, (m, *shape) -> (m, C)
    theta    parameters of the network by name
    x        candidates (m, *shape)
    y        labels of the candidates (m,)
    lam      multipliers (m, ...), searched as mu = lam / scale, which is of order one

L contains gradients of Phi, so its gradient contains the derivative of a ReLU's gate 1[z > 0]. That
derivative is zero wherever it exists. The gate is therefore replaced by sigmoid(alpha z), with a sharpness
alpha that increases with every step.

``residuum.attack`` gives the same results as this file, up to rounding. It adds speed (explicit derivatives,
restarts side by side, GPUs), resuming, and candidates that split and merge.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from residuum.attacks.random_streams import stream
from residuum.attacks.stationarity.objectives import Objective
from residuum.attacks.stationarity.priors import PRIORS, box, penalty
from residuum.errors import InputError
from residuum.networks import SigmoidReLU, with_surrogate
from residuum.networks.probing import second_derivatives
from residuum.records import Knowledge, Reconstruction
from residuum.stationarity import Theta, by_layer, parameters

CHECK_EVERY = 25  # number of steps of Adam between two evaluations of the loss


def residual(
    Phi: nn.Module,
    thetas: Sequence[Theta],
    target: Theta,
    objective: Objective,
    x: Tensor,
    y: Tensor,
    lam: Tensor,
) -> Theta:
    """Compute the residual of the attacked equation: the target minus the weighted sum of gradients.

    The residual r(x, lam) is differentiable in the candidates x and the multipliers lam.

    Args:
        Phi: The network.
        thetas: Weights at which gradients are taken. The gradients at all of these weights are added.
        target: Tensors by parameter name that the weighted sum of gradients must equal.
        objective: Defines the covectors u, which weight the gradients of the outputs.
        x: Candidates (m, *shape) of one run.
        y: Labels of the candidates (m,).
        lam: Multipliers (weights) of the candidates (m, ...).

    Returns:
        The residual by parameter name.
    """
    r = target
    for k, theta in enumerate(thetas):
        outputs = functional_call(Phi, theta, (x,))
        u = objective.covectors(k, outputs, y, lam)
        # One backward pass with the output weights u computes the weighted sum of the gradients of all
        # candidates. It treats u as a constant.
        gradients = torch.autograd.grad(
            outputs, list(theta.values()), u, create_graph=True, materialize_grads=True
        )
        r = {name: r[name] - term for name, term in zip(theta, gradients, strict=True)}
    return r


@second_derivatives()
def attack(
    Phi: nn.Module,
    objective: Objective,
    knowledge: Knowledge,
    *,
    candidates: int,
    steps: int = 3000,
    lr_x: float = 0.01,
    lr_lam: float = 0.01,
    lr_decay: float = 0.1,
    sigma: float = 0.1,
    sharpness: tuple[float, float] = (10.0, 150.0),
    layers: str = "all",
    priors: Sequence[tuple[str, float]] = (),
    seed: int = 0,
    restart: int = 0,
) -> Reconstruction:
    """Reconstruct training samples by gradient descent on the error of the equation.

    The result is the point with the smallest loss.

    Args:
        Phi: Any network. Its ReLUs and other kinks get smooth surrogate derivatives
            (``networks/surrogates.py``).
        objective: Defines the target, the covectors, the labels and the shape of the multipliers.
        knowledge: What the attacker knows. The shape of a sample is required.
        candidates: Number of candidates m. Twice the number of training samples is a good choice.
        steps: Number of steps of Adam.
        lr_x: Learning rate of the candidates at the first step.
        lr_lam: Learning rate of the multipliers at the first step.
        lr_decay: Ratio of the last to the first learning rate. The rates fall along a cosine.
        sigma: Standard deviation of the random initial candidates.
        sharpness: Sharpness alpha of the ReLU's surrogate at the first and at the last step, geometric in
            between.
        layers: Layers in the loss: "all", or "first" if the other layers hardly changed since initialization.
        priors: Names and weights of penalties on the candidates, from the table ``PRIORS``.
        seed: Seed of the random numbers.
        restart: Number of the restart. Restarts with the same seed differ in their random numbers only.

    Returns:
        Candidates and multipliers at the evaluated step with the smallest loss.

    Raises:
        InputError: If the shape of a sample is not known, or if training did not change any of the layers
            that ``layers`` selects.
    """
    if (shape := knowledge.shape) is None:
        raise InputError(
            "An attack needs the shape of one training sample; the shape is not known.",
            "Pass the shape, for example Knowledge(shape=(1, 8, 8)).",
        )
    m, dtype, released_weights = candidates, torch.float64, parameters(Phi)
    Phi = copy.deepcopy(Phi).to("cpu", dtype).eval()
    C = Phi(torch.zeros(1, *shape, dtype=dtype)).shape[-1]
    objective.check(C, knowledge)
    y = objective.labels(m, C, knowledge)

    # Compute the target, which the weighted sum of gradients must equal.
    theta = parameters(Phi)
    target = objective.create_surface(theta, knowledge).target
    squared_target_norms = squares(target)
    # Avoid a division by zero for layers whose target is zero.
    squared_target_norms[squared_target_norms == 0] = 1.0
    # Fit only layers that training changed. Frozen layers say nothing about the training samples.
    names = tuple(by_layer(target))
    changed_layers = objective.create_surface(released_weights, knowledge).equations
    fitted_layers = [
        l for l, name in enumerate(names) if name in changed_layers and (layers == "all" or l == 0)
    ]
    if not fitted_layers:
        raise InputError(
            "The attack must fit a layer that training changed; this attack fits only the first layer, "
            "and training did not change the first layer.",
            'Pass layers="all" to fit the other layers.',
        )
    # Collect the weights at which gradients are taken.
    weights = {"theta": theta, "theta0": knowledge.theta0 or {}}
    thetas = [
        {name: weights[point][name].to(theta[name], copy=True).requires_grad_() for name in theta}
        for point in objective.gradient_points()
    ]

    def gated(alpha: float) -> nn.Module:
        return with_surrogate(Phi, SigmoidReLU(alpha))

    def r(x: Tensor, lam: Tensor, alpha: float) -> Theta:
        return residual(gated(alpha), thetas, target, objective, x, y, lam)

    # The optimizer works with mu = lam / scale instead of the multipliers lam. With this scale, mu = 1
    # makes the sum of gradients at random samples as large as the target.
    low, high = knowledge.value_range or (0.0, 1.0)
    x = (high - low) / 4 * torch.randn(m, *shape, generator=stream("scale"), dtype=dtype)
    mu = torch.ones(m, *objective.multiplier_shape(C), dtype=dtype)
    r_random = r(x, mu, sharpness[1])
    squared_sum_norms = squares(
        {name: target[name] - r_random[name].detach() for name in r_random}
    )[fitted_layers]
    scale = (
        float(squared_target_norms[fitted_layers][0] / squared_sum_norms[0]) ** 0.5
        if squared_sum_norms[0] > 0
        else 1.0
    )

    # Draw the initial candidates and multipliers.
    generator = stream("candidates", seed, restart)
    x = sigma * torch.randn(x.shape, generator=generator, dtype=dtype)
    mu = torch.rand(mu.shape, generator=generator, dtype=dtype)
    x, mu = x.requires_grad_(), mu.requires_grad_()
    adam = torch.optim.Adam(
        [{"params": [x], "lr": lr_x}, {"params": [mu], "lr": lr_lam}], eps=1e-12
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda t: lr_decay + (1 - lr_decay) * (1 + math.cos(math.pi * t / steps)) / 2
    )
    penalties = [PRIORS[name](weight, knowledge=knowledge) for name, weight in priors]

    best_loss = math.inf
    history: list[tuple[int, Tensor, Tensor]] = []
    for t in range(steps + 1):
        # Compute the loss of this step.
        progress = min(t / max(1, steps - 1), 1.0)
        alpha = sharpness[0] * (sharpness[1] / sharpness[0]) ** progress
        relative_squares = squares(r(x, scale * mu, alpha)) / squared_target_norms
        loss = (
            relative_squares[fitted_layers].sum()
            + penalty(penalties, x[None], mu[None], progress)[0]
        )
        # Store the point with the smallest loss so far.
        if t % CHECK_EVERY == 0 or t == steps:
            history.append((t, loss.detach(), relative_squares.detach()))
            if t == 0 or loss < best_loss:
                best_loss, best_x, best_lam = loss.item(), x.detach().clone(), scale * mu.detach()
        # Take a step of Adam.
        adam.zero_grad()
        loss.backward(inputs=[x, mu])
        adam.step()
        scheduler.step()
        # Project candidates into the known value range, and multipliers onto nonnegative numbers.
        with torch.no_grad():
            if knowledge.value_range is not None:
                x.clamp_(*box(knowledge, x[None]))
            if objective.nonnegative:
                mu.clamp_(min=0)

    evaluated_steps, losses, residuals = zip(*history, strict=True)
    return Reconstruction(
        attack=objective.name,
        x=best_x,
        labels=y,
        lam=best_lam,
        run=torch.zeros(m, dtype=torch.long),
        steps=torch.tensor(evaluated_steps),
        loss=torch.stack(losses)[None],
        layers=torch.stack(residuals)[None],
        layer_names=names,
        status=("finished" if losses[-1].isfinite() else "diverged",),
        knowledge=knowledge,
    )


def squares(r: Theta) -> Tensor:
    """Return the squared norm of the equation's error (residual) in each of L layers."""
    names_by_layer = by_layer(r).values()
    return torch.stack(
        [torch.cat([r[n].flatten() for n in names]).square().sum() for names in names_by_layer]
    )
