"""Attackers who know which defense was used, but not its secret.

A test of a defense against an unaware attacker alone proves nothing. Every strategy here gets the released
weights, the attacker knowledge, and the public facts of the defense. It returns the attack to run instead: on
weights with the shift undone, with a moved value range, with averaged or reduced noise, or with free
multipliers. The attack has the same steps and restarts as the unaware attack. The cost of a strategy before
the attack comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from residuum.attacks.base import Attack
from residuum.attacks.defense_aware.shift import (
    BIAS,
    WEIGHT,
    ShiftInference,
    fit_shift,
    infer_constant_shift,
    infer_mean,
    infer_vector_shift,
    move_biases,
)
from residuum.attacks.stationarity.attack import NTK, WeightDecay
from residuum.networks.network import Network, first_layer
from residuum.records import Knowledge, Reconstruction
from residuum.settings import RestartSettings

TRIAL_DIVISOR = 4  # a trial attack has the steps divided by this number, and one restart
FIT_ROUNDS = 2  # rounds of fitting the candidates to the shift and the shift to the candidates
SIGNED_RANGE = (-0.5, 0.5)  # initial multipliers, if their sign is free


@dataclass(frozen=True)
class Released:
    """What the attacker has.

    Attributes:
        checkpoints: One release, or several releases of the same weights.
        knowledge: What the attacker knows.
        attack: The attack and its settings.
        public_facts: What is public about the defense, such as its weight decay or the initial weights.
    """

    checkpoints: tuple[Network, ...]
    knowledge: Knowledge
    attack: Attack
    public_facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapted:
    """The attack to run.

    Attributes:
        checkpoint: The network to attack.
        knowledge: What the attacker knows.
        attack: The attack and its settings.
        findings: Plain values that were inferred.
        shift: (d,) inferred or known shift of the inputs during training, or None.
    """

    checkpoint: Network
    knowledge: Knowledge
    attack: Attack
    findings: dict[str, Any] = field(default_factory=dict)
    shift: Tensor | None = None


Strategy = Callable[[Released], Adapted]


def undo_constant_shift(released: Released) -> Adapted:
    """Balance the neurons by a constant. If they do not agree, short attacks decide."""
    return _undo_with_consensus(
        released, infer_constant_shift(released.checkpoints[0]), constant=True
    )


def undo_vector_shift(released: Released) -> Adapted:
    """Balance the neurons by any vector. If their signs are unclear, short attacks decide."""
    return _undo_with_consensus(
        released, infer_vector_shift(released.checkpoints[0]), constant=False
    )


def follow_mean(released: Released) -> Adapted:
    """Subtract the mean pixel value, inferred from the first layer, from the inputs."""
    mean = infer_mean(released.checkpoints[0])
    return _recenter(released, torch.full_like(mean, float(mean.mean())), "constant")


def follow_mean_image(released: Released) -> Adapted:
    """Subtract the inferred mean of every pixel from the inputs."""
    return _recenter(released, infer_mean(released.checkpoints[0]), "vector")


def average_releases(released: Released) -> Adapted:
    """Average several noisy releases. If there is only one, reduce the noise of its first layer."""
    if len(released.checkpoints) == 1:
        return cut_noise(released)
    network = released.checkpoints[0]
    theta = {
        name: torch.stack([release.theta[name].double() for release in released.checkpoints])
        .mean(0)
        .to(t)
        for name, t in network.theta.items()
    }
    findings = {"releases": len(released.checkpoints)}
    return _adapt(released, checkpoint=network.replace(theta=theta), findings=findings)


def cut_noise(released: Released) -> Adapted:
    """Remove what looks like noise from the first layer, if a short attack then fits it better."""
    network, directions, total = cut_singular_values(released.checkpoints[0])
    findings = {"kept_directions": directions, "of": total}
    return _choose_better(released, checkpoint=network, findings=findings)


def cut_singular_values(checkpoint: Network) -> tuple[Network, int, int]:
    """Set the singular values of the first layer that are as small as noise to zero.

    Gavish and Donoho 2014, unknown noise level: the threshold is omega(beta) times the median singular
    value. beta is the aspect ratio, and omega its published cubic.

    Args:
        checkpoint: The network.

    Returns:
        The network, the number of nonzero singular values, and the number of all.
    """
    weight = first_layer(checkpoint.theta)
    name = next(key for key, t in checkpoint.theta.items() if t is weight)
    u, values, rows = torch.linalg.svd(weight.double().flatten(1), full_matrices=False)
    beta = min(u.shape[0], rows.shape[1]) / max(u.shape[0], rows.shape[1])
    omega = 0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43
    is_signal = values > omega * values.median()
    is_signal[0] = True  # an attack needs at least one direction
    matrix = (u * torch.where(is_signal, values, 0.0)) @ rows
    theta = {**checkpoint.theta, name: matrix.reshape(weight.shape).to(weight)}
    return checkpoint.replace(theta=theta), int(is_signal.sum()), len(values)


def free_multipliers(released: Released) -> Adapted:
    """Assume no sign of the multipliers and no margin, which holds for any loss at any time."""
    attack = WeightDecay.like(released.attack, lam_init=SIGNED_RANGE)
    findings = {"objective": "weight-decay, free multipliers"}
    return _choose_better(released, attack=attack, findings=findings)


def tied_multipliers(released: Released) -> Adapted:
    """Compute multipliers from the candidates' outputs, because weight decay and loss are public."""
    if not released.public_facts["weight_decay"]:
        return free_multipliers(released)  # without weight decay, nothing ties them
    public = {name: released.public_facts[name] for name in ("weight_decay", "loss")}
    return _choose_better(
        released,
        knowledge=_add_knowledge(released, "user", **public),
        attack=WeightDecay.like(released.attack),
        findings={"objective": "weight-decay, multipliers tied", **public},
    )


def known_start(released: Released) -> Adapted:
    """Subtract the initial weights. Their seed is often public, and then the weights are too."""
    return _choose_better(
        released,
        knowledge=_add_knowledge(released, "train", theta0=released.public_facts["theta0"]),
        attack=NTK.like(released.attack, lam_init=SIGNED_RANGE),
        findings={"objective": "ntk, initial weights known"},
    )


def told_the_shift(released: Released) -> Adapted:
    """Use the secret shift itself, to see what the defense is worth if the secret leaks."""
    shift = released.public_facts["shift"].double().flatten()
    if released.public_facts["rewritten"]:
        return _undo_shift(released, shift)
    return _recenter(released, shift, "told")


def remove_shift(checkpoint: Network, theta0: dict[str, Tensor], shift: Tensor) -> Network:
    """Return W - (b - b0) u^T in place of W, which the first layer would mix without a shift.

    After training on x + u, W - W0 = C (X + 1 u^T) and b - b0 = C 1. So C X remains, for any C. The bias
    does not change, because it equals C 1. The gates are still those of x + u, which matter for
    stationarity but not for C X.

    Args:
        checkpoint: The network.
        theta0: Initial weights.
        shift: (d,) shift u.

    Returns:
        The network without the shift.
    """
    weight, bias_update = checkpoint.theta[WEIGHT], checkpoint.theta[BIAS].double()
    bias_update = bias_update - theta0[BIAS].to(bias_update)
    unshifted = weight.double() - torch.outer(bias_update, shift.to(bias_update).flatten())
    return checkpoint.replace(theta={**checkpoint.theta, WEIGHT: unshifted.to(weight)})


def _undo_with_consensus(released: Released, balance: ShiftInference, constant: bool) -> Adapted:
    """Undo the inferred shift. Without consensus, use the guess that a short attack fits best."""
    findings: dict[str, Any] = {"balance": balance.to_json()}
    if balance.consensus:
        return _undo_shift(released, balance.shift, findings=findings)
    guesses: dict[str, float | Tensor] = {"released as it is": 0.0, "balance": balance.shift}
    if constant:
        guesses["fitted to candidates"] = _fit_shift_jointly(released, balance.shift)
    residuals = {
        name: _try_briefly(_undo_shift(released, guess))[0] for name, guess in guesses.items()
    }
    best = min(residuals, key=lambda name: residuals[name])
    findings |= {"first_layer_residual_by_guess": residuals, "chosen": best}
    return _undo_shift(released, guesses[best], findings=findings)


def _fit_shift_jointly(released: Released, start: float | Tensor) -> float:
    """Fit a constant shift and candidates in turn: a short attack, then the shift in closed form."""
    c = float(torch.as_tensor(start).mean())
    for _ in range(FIT_ROUNDS):
        moved = _undo_shift(released, c)
        _, reconstruction = _try_briefly(moved)
        if reconstruction.lam.ndim != 1:
            return c
        correction, _ = fit_shift(
            moved.checkpoint, reconstruction.x, reconstruction.labels, reconstruction.lam
        )
        c += float(correction.mean())
    return c


def _recenter(released: Released, shift: Tensor, kind: str) -> Adapted:
    """Pose the same stationarity in x = z - u: W - b u^T = sum_i d_i x_i^T, b = sum_i d_i.

    The gates are those of the network with bias b + W u. So weights and target differ, as in the NTK
    objective: target = theta - theta0 with theta0 = (b u^T, W u). Its multipliers are free, and
        candidates keep
    the value range that they had without a shift.

    Args:
        released: What the attacker has.
        shift: (d,) shift u.
        kind: Name of the shift in the findings.

    Returns:
        The attack to run.
    """
    first = released.checkpoints[0]
    moved = move_biases(first, shift)  # raises an error if the first layer has no bias
    weight, bias = (first.theta[name].double() for name in (WEIGHT, BIAS))
    u = shift.double().flatten()
    theta0 = {name: torch.zeros_like(t) for name, t in first.theta.items()}
    theta0[WEIGHT] = torch.outer(bias, u).to(first.theta[WEIGHT])
    theta0[BIAS] = (weight @ u).to(first.theta[BIAS])
    rms = float(u.norm()) / math.sqrt(u.numel())
    findings = {"kind": kind, "shift_per_pixel": float(u.mean()), "rms_per_pixel": rms}
    knowledge = _add_knowledge(released, "user", theta0=theta0)
    attack = NTK.like(released.attack, lam_init=SIGNED_RANGE)
    changes = {"knowledge": knowledge, "attack": attack, "findings": {"mean": findings}, "shift": u}
    return _adapt(released, checkpoint=moved, **changes)


def _choose_better(released: Released, **changes: Any) -> Adapted:
    """Return the unchanged or the changed attack, whichever has the smaller residual in a short attack."""
    changed = _adapt(released, **changes)
    options = {"unaware": _adapt(released), "adapted": changed}
    residuals = {name: _try_briefly(option)[0] for name, option in options.items()}
    best = min(residuals, key=lambda name: residuals[name])
    findings = {**changed.findings, "first_layer_residual_by_try": residuals, "chosen": best}
    return replace(options[best], findings=findings)


def _try_briefly(option: Adapted) -> tuple[float, Reconstruction]:
    """Return the relative first-layer residual of a short attack, and its reconstruction."""
    attack = option.attack.resolve_settings(option.checkpoint, option.knowledge)
    assert isinstance(attack, RestartSettings)
    short = attack.changed(restarts=1, steps=max(1, attack.steps // TRIAL_DIVISOR))
    reconstruction = short.run(option.checkpoint, option.knowledge)
    residual = find_first_residual(reconstruction)
    return math.inf if residual is None else residual, reconstruction


def find_first_residual(reconstruction: Reconstruction) -> float | None:
    """Return the best first-layer residual of all restarts, relative if the attack normalizes."""
    if not reconstruction.layers.numel():
        return None
    best = float(reconstruction.layers[:, :, 0].nan_to_num(nan=math.inf).min())
    return math.sqrt(max(best, 0.0)) if math.isfinite(best) else None


def _add_knowledge(released: Released, source: str, **values: Any) -> Knowledge:
    """Return the attacker knowledge with more values, and their source."""
    knowledge = released.knowledge
    return knowledge.replace(
        **values, provenance={**knowledge.provenance, **dict.fromkeys(values, source)}
    )


def _undo_shift(released: Released, shift: float | Tensor, **changes: Any) -> Adapted:
    return _adapt(released, checkpoint=move_biases(released.checkpoints[0], shift), **changes)


def _adapt(released: Released, **changes: Any) -> Adapted:
    unchanged = Adapted(released.checkpoints[0], released.knowledge, released.attack)
    return replace(unchanged, **changes)


# The key of a strategy is the name of its function.
ADAPTIVE: dict[str, Strategy] = {
    strategy.__name__.replace("_", "-"): strategy
    for strategy in (
        *(undo_constant_shift, undo_vector_shift, follow_mean, follow_mean_image),
        *(average_releases, cut_noise, free_multipliers, tied_multipliers),
        *(known_start, told_the_shift),
    )
}
