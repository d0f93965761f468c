"""The whole attack in one file: any ``nn.Module``, automatic differentiation, torch's own Adam.

Training that has come to rest leaves weights that are a weighted sum of gradients at the training
samples (Haim et al. 2022; ``objectives.py`` holds the relatives of this equation):

    theta = sum_i lam_i y_i grad_theta Phi(theta; x_i)

The attacker has theta and looks for the rest. With the target and the covectors u of the objective
(here theta, and u_i = lam_i y_i) candidates x and multipliers lam descend on

    L(x, lam) = sum_l |r_l|^2 / |target_l|^2 + priors(x, lam)                      over layers l
    r(x, lam) = target - sum_i grad_theta <u_i, Phi(theta; x_i)>

Phi: the network, (m, *shape) -> (m, C); theta: its parameters by name; x: (m, *shape); y: (m,) the
labels that candidates are given; lam: (m, ...), searched as mu = lam / scale, which is of order one.

L holds gradients of Phi, so descent needs the derivative of a ReLU's gate 1[z > 0], which is zero
wherever it exists. The gate is therefore sigmoid(alpha z), sharper with every step.

``residuum.attack`` equals this file to rounding. It adds speed (explicit derivatives, restarts side
by side, a GPU), resuming, and candidates that grow in number.
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

LOOK = 25  # steps between looks at the loss; what was best at a look is brought back


def residual(
    Phi: nn.Module,
    thetas: Sequence[Theta],
    target: Theta,
    objective: Objective,
    x: Tensor,
    y: Tensor,
    lam: Tensor,
) -> Theta:
    """r(x, lam) by parameter name, differentiable in both; gradients are summed over ``thetas``."""
    r = target
    for k, theta in enumerate(thetas):
        outputs = functional_call(Phi, theta, (x,))
        u = objective.covectors(k, outputs, y, lam)
        # One vector-Jacobian product is the whole sum over i; u is not differentiated in theta.
        terms = torch.autograd.grad(
            outputs, list(theta.values()), u, create_graph=True, materialize_grads=True
        )
        r = {name: r[name] - term for name, term in zip(theta, terms, strict=True)}
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
    """Candidates and multipliers that explain the weights of ``Phi``: one descent, its best point.

    Args:
        Phi: any module; its kinks are smoothed wherever they are called (``networks/surrogates.py``).
        objective: target, covectors, labels and shape of the multipliers.
        knowledge: what the attacker is told; the shape of a sample is needed.
        candidates: m; twice the number of training samples is a good choice.
        steps: of Adam.
        lr_x, lr_lam: its first rates; a cosine brings both down to the share lr_decay.
        sigma: standard deviation of the random candidates at the start.
        sharpness: alpha at the first and at the last step, geometric in between.
        layers: "all", or "first" where the others hardly left their initialization.
        priors: names in ``PRIORS`` with their weights.
        seed, restart: which random start; restarts of one seed differ in nothing else.
    """
    if (shape := knowledge.shape) is None:
        raise InputError("An attack needs the shape of a sample.", "Grant it: shape=(1, 8, 8).")
    m, real, released = candidates, torch.float64, parameters(Phi)
    Phi = copy.deepcopy(Phi).to("cpu", real).eval()
    C = Phi(torch.zeros(1, *shape, dtype=real)).shape[-1]
    objective.check(C, knowledge)
    y = objective.labels(m, C, knowledge)

    # What the sum must equal, and the weights at which its gradients are taken.
    theta = parameters(Phi)
    target = objective.create_surface(theta, knowledge).target
    sizes = squares(target)
    sizes[sizes == 0] = 1.0  # a layer whose target is zero counts absolutely
    # A change of the weights is explained where they moved: a frozen layer's gradient led nowhere.
    names = tuple(by_layer(target))
    moved = objective.create_surface(released, knowledge).equations
    counted = [l for l, name in enumerate(names) if name in moved and (layers == "all" or l == 0)]
    if not counted:
        raise InputError("The first layer did not move.", 'Explain the others: layers="all".')
    known = {"theta": theta, "theta0": knowledge.theta0 or {}}
    thetas = [
        {name: known[point][name].to(theta[name], copy=True).requires_grad_() for name in theta}
        for point in objective.gradient_points()
    ]

    def gated(alpha: float) -> nn.Module:
        return with_surrogate(Phi, SigmoidReLU(alpha))

    def r(x: Tensor, lam: Tensor, alpha: float) -> Theta:
        return residual(gated(alpha), thetas, target, objective, x, y, lam)

    # The scale of lam: at mu = 1 the sum over random samples is as large as its target.
    low, high = knowledge.value_range or (0.0, 1.0)
    x = (high - low) / 4 * torch.randn(m, *shape, generator=stream("scale"), dtype=real)
    mu = torch.ones(m, *objective.multiplier_shape(C), dtype=real)
    rest = r(x, mu, sharpness[1])
    sums = squares({name: target[name] - rest[name].detach() for name in rest})[counted]
    scale = float(sizes[counted][0] / sums[0]) ** 0.5 if sums[0] > 0 else 1.0

    # The start.
    generator = stream("candidates", seed, restart)
    x = sigma * torch.randn(x.shape, generator=generator, dtype=real)
    mu = torch.rand(mu.shape, generator=generator, dtype=real)
    x, mu = x.requires_grad_(), mu.requires_grad_()
    adam = torch.optim.Adam(
        [{"params": [x], "lr": lr_x}, {"params": [mu], "lr": lr_lam}], eps=1e-12
    )
    cosine = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda t: lr_decay + (1 - lr_decay) * (1 + math.cos(math.pi * t / steps)) / 2
    )
    penalties = [PRIORS[name](weight, knowledge=knowledge) for name, weight in priors]

    best = math.inf
    looks: list[tuple[int, Tensor, Tensor]] = []
    for t in range(steps + 1):
        # Loss.
        share = min(t / max(1, steps - 1), 1.0)
        alpha = sharpness[0] * (sharpness[1] / sharpness[0]) ** share
        parts = squares(r(x, scale * mu, alpha)) / sizes
        loss = parts[counted].sum() + penalty(penalties, x[None], mu[None], share)[0]
        # The best so far.
        if t % LOOK == 0 or t == steps:
            looks.append((t, loss.detach(), parts.detach()))
            if t == 0 or loss < best:
                best, best_x, best_lam = loss.item(), x.detach().clone(), scale * mu.detach()
        # Step.
        adam.zero_grad()
        loss.backward(inputs=[x, mu])
        adam.step()
        cosine.step()
        # Projection.
        with torch.no_grad():
            if knowledge.value_range is not None:
                x.clamp_(*box(knowledge, x[None]))
            if objective.nonnegative:
                mu.clamp_(min=0)

    seen, losses, relative = zip(*looks, strict=True)
    return Reconstruction(
        attack=objective.name,
        x=best_x,
        labels=y,
        lam=best_lam,
        run=torch.zeros(m, dtype=torch.long),
        steps=torch.tensor(seen),
        loss=torch.stack(losses)[None],
        layers=torch.stack(relative)[None],
        layer_names=names,
        status=("finished" if losses[-1].isfinite() else "diverged",),
        knowledge=knowledge,
    )


def squares(r: Theta) -> Tensor:
    """(L,) |r_l|^2 of every layer."""
    groups = by_layer(r).values()
    return torch.stack(
        [torch.cat([r[n].flatten() for n in names]).square().sum() for names in groups]
    )
