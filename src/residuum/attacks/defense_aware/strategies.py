"""Attackers who know which defense was used, but not its secret, such as a secret shift of the inputs.

An unaware attacker does not know the defense. A test against an unaware attacker alone overstates what a
defense protects. Every strategy here gets the released weights, the attacker knowledge, and the public facts
of the defense. The strategy adapts the attack of an unaware attacker to the defense. The adapted attack
undoes a secret shift of the inputs, subtracts the mean of the inputs, reduces noise in the weights, or allows
multipliers of any sign. The adapted attack has as many steps and restarts as the unaware attack. The strategy
itself takes additional time before the attack.
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

# To compare settings, short attacks are run. Their number of steps is that of the full attack divided by
# this number.
TRIAL_DIVISOR = 4
# Number of rounds in which a secret shift of the inputs is estimated. Each round searches for training
# samples with the current estimate, and then fits the shift to these samples.
FIT_ROUNDS = 2
# Range of the random initial multipliers (weights of the candidates), if multipliers may be negative.
SIGNED_RANGE = (-0.5, 0.5)


@dataclass(frozen=True)
class Released:
    """The inputs of a strategy: released networks, and what the attacker knows about the defense.

    Attributes:
        checkpoints: One released network, or several noisy releases of the same weights.
        knowledge: What the attacker knows in addition to the release.
        attack: The attack of an attacker who does not know the defense, with its settings.
        public_facts: Public facts about training and the defense, such as the weight decay or the initial
            weights, by name.
    """

    checkpoints: tuple[Network, ...]
    knowledge: Knowledge
    attack: Attack
    public_facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapted:
    """The attack that a strategy returns, adapted to a defense.

    Attributes:
        checkpoint: The network to attack.
        knowledge: What the attacker knows, extended by the strategy.
        attack: The attack and its settings.
        findings: What the strategy has inferred, as plain values by name.
        shift: (d,) inferred or known shift of the inputs during training, None if the strategy uses no shift.
    """

    checkpoint: Network
    knowledge: Knowledge
    attack: Attack
    findings: dict[str, Any] = field(default_factory=dict)
    shift: Tensor | None = None


Strategy = Callable[[Released], Adapted]


def undo_constant_shift(released: Released) -> Adapted:
    """Undo a constant shift of the inputs, which is inferred from the balance of the neurons.

    A neuron is balanced if its incoming weights and bias have the same norm as its outgoing weights. If no
    constant shift balances all neurons, the strategy runs short attacks with several shifts. The strategy
    then undoes the shift with the smallest residual.

    Returns:
        The attack on the network with the shift undone.
    """
    return _undo_with_consensus(
        released, infer_constant_shift(released.checkpoints[0]), constant=True
    )


def undo_vector_shift(released: Released) -> Adapted:
    """Undo a vector shift of the inputs, which is inferred from the balance of the neurons.

    A neuron is balanced if its incoming weights and bias have the same norm as its outgoing weights. If the
    inferred shift is not unique, the strategy runs a short attack with this shift and one without a shift.
    The attack with the smaller residual decides whether to undo the shift.

    Returns:
        The attack on the network with the shift undone.
    """
    return _undo_with_consensus(
        released, infer_vector_shift(released.checkpoints[0]), constant=False
    )


def follow_mean(released: Released) -> Adapted:
    """Subtract the mean pixel value, which is inferred from the first layer, from all inputs."""
    inferred_mean = infer_mean(released.checkpoints[0])
    return _recenter(
        released, torch.full_like(inferred_mean, float(inferred_mean.mean())), "constant"
    )


def follow_mean_image(released: Released) -> Adapted:
    """Subtract the mean image, which is inferred from the first layer, from all inputs."""
    return _recenter(released, infer_mean(released.checkpoints[0]), "vector")


def average_releases(released: Released) -> Adapted:
    """Return an attack on the average of several noisy copies of the same weights.

    If there is one copy, reduce the noise of its first layer.
    """
    if len(released.checkpoints) == 1:
        return cut_noise(released)
    network = released.checkpoints[0]
    mean_weights = {
        name: torch.stack([release.theta[name].double() for release in released.checkpoints])
        .mean(0)
        .to(t)
        for name, t in network.theta.items()
    }
    findings = {"releases": len(released.checkpoints)}
    return _adapt(released, checkpoint=network.replace(theta=mean_weights), findings=findings)


def cut_noise(released: Released) -> Adapted:
    """Remove small singular values from the first layer, if a short attack then fits the weights better."""
    network, directions, total = cut_singular_values(released.checkpoints[0])
    findings = {"kept_directions": directions, "of": total}
    return _choose_better(released, checkpoint=network, findings=findings)


def cut_singular_values(checkpoint: Network) -> tuple[Network, int, int]:
    """Set singular values of the first layer's weights to zero if they are as small as noise.

    The threshold is that of Gavish and Donoho 2014 for noise of unknown size: omega(beta) times the median
    singular value. Here beta is the aspect ratio of the weight matrix, and omega a published cubic.

    Args:
        checkpoint: The network.

    Returns:
        The network, the number of nonzero singular values, and the number of all singular values.
    """
    weight = first_layer(checkpoint.theta)
    parameter_name = next(key for key, t in checkpoint.theta.items() if t is weight)
    u, values, rows = torch.linalg.svd(weight.double().flatten(1), full_matrices=False)
    beta = min(u.shape[0], rows.shape[1]) / max(u.shape[0], rows.shape[1])
    omega = 0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43
    is_signal = values > omega * values.median()
    is_signal[0] = True  # keep at least one singular value, because attacks need nonzero weights
    denoised_matrix = (u * torch.where(is_signal, values, 0.0)) @ rows
    denoised_weights = {
        **checkpoint.theta,
        parameter_name: denoised_matrix.reshape(weight.shape).to(weight),
    }
    return checkpoint.replace(theta=denoised_weights), int(is_signal.sum()), len(values)


def free_multipliers(released: Released) -> Adapted:
    """Allow multipliers (weights of the candidates in the attacked equation) of any sign.

    The adapted attack does not assume that training maximized the margin, converged, or used a particular
    loss.

    Returns:
        The adapted attack, or the attack that ignores the defense, whichever fits the weights better in a
        short run.
    """
    attack = WeightDecay.like(released.attack, lam_init=SIGNED_RANGE)
    findings = {"objective": "weight-decay, free multipliers"}
    return _choose_better(released, attack=attack, findings=findings)


def tied_multipliers(released: Released) -> Adapted:
    """Compute the multipliers (weights of the candidates) from the public weight decay and the public loss.

    The formula for the multiplier of a candidate also needs the network output at this candidate.

    Returns:
        The adapted attack, or the attack that ignores the defense, whichever fits the weights better in a
        short run.
    """
    if not released.public_facts["weight_decay"]:
        # Multipliers (weights of the samples) follow from the outputs of the network only if it was trained
        # with weight decay.
        return free_multipliers(released)
    training_facts = {name: released.public_facts[name] for name in ("weight_decay", "loss")}
    return _choose_better(
        released,
        knowledge=_add_knowledge(released, "user", **training_facts),
        attack=WeightDecay.like(released.attack),
        findings={"objective": "weight-decay, multipliers tied", **training_facts},
    )


def known_start(released: Released) -> Adapted:
    """Subtract the initial weights from the released weights, and attack this weight update.

    The initial weights are public if the seed of the initialization is public.

    Returns:
        The adapted attack, or the attack that ignores the defense, whichever fits the weights better in a
        short run.
    """
    return _choose_better(
        released,
        knowledge=_add_knowledge(released, "train", theta0=released.public_facts["theta0"]),
        attack=NTK.like(released.attack, lam_init=SIGNED_RANGE),
        findings={"objective": "ntk, initial weights known"},
    )


def told_the_shift(released: Released) -> Adapted:
    """Undo the secret shift of the inputs, as an attacker can who has learned the secret of the defense."""
    shift = released.public_facts["shift"].double().flatten()
    if released.public_facts["rewritten"]:
        return _undo_shift(released, shift)
    return _recenter(released, shift, "told")


def remove_shift(checkpoint: Network, theta0: dict[str, Tensor], shift: Tensor) -> Network:
    """Remove a known shift u of the training inputs from the first layer.

    Training on shifted samples X + 1 u^T gives the weight update W - W0 = C (X + 1 u^T) and the bias update b
    - b0 = C 1, for some coefficients C. The function replaces W by W - (b - b0) u^T, so that the weight
    update becomes C X. The bias update C 1 does not depend on the shift, so the bias stays. The activation
    patterns are still those of the shifted samples x + u. This affects the stationarity equations, but not C
    X.

    Args:
        checkpoint: The network, with first-layer weights W and biases b.
        theta0: Initial weights, with W0 and b0 in the first layer.
        shift: (d,) shift u.

    Returns:
        The network without the shift.
    """
    weight, bias_update = checkpoint.theta[WEIGHT], checkpoint.theta[BIAS].double()
    bias_update = bias_update - theta0[BIAS].to(bias_update)
    unshifted = weight.double() - torch.outer(bias_update, shift.to(bias_update).flatten())
    return checkpoint.replace(theta={**checkpoint.theta, WEIGHT: unshifted.to(weight)})


def _undo_with_consensus(released: Released, balance: ShiftInference, constant: bool) -> Adapted:
    """Undo the inferred shift of the inputs, if exactly one shift balances the neurons.

    A neuron is balanced if its incoming weights and bias have the same norm as its outgoing weights.

    Otherwise, run a short attack for every guess of the shift, and undo the guess with the smallest residual.

    Returns:
        The attack on the network with the shift undone.
    """
    findings: dict[str, Any] = {"balance": balance.to_json()}
    if balance.consensus:
        return _undo_shift(released, balance.shift, findings=findings)
    guesses: dict[str, float | Tensor] = {"released as it is": 0.0, "balance": balance.shift}
    if constant:
        guesses["fitted to candidates"] = _fit_shift_jointly(released, balance.shift)
    residuals = {
        name: _try_briefly(_undo_shift(released, guess))[0] for name, guess in guesses.items()
    }
    best_name = min(residuals, key=lambda name: residuals[name])
    findings |= {"first_layer_residual_by_guess": residuals, "chosen": best_name}
    return _undo_shift(released, guesses[best_name], findings=findings)


def _fit_shift_jointly(released: Released, start: float | Tensor) -> float:
    """Infer a constant shift of the inputs in several rounds.

    Each round reconstructs samples by a short attack, and then computes the shift that fits these samples
    best.

    Returns:
        The constant shift.
    """
    constant_shift = float(torch.as_tensor(start).mean())
    for _ in range(FIT_ROUNDS):
        adapted = _undo_shift(released, constant_shift)
        _, reconstruction = _try_briefly(adapted)
        if reconstruction.lam.ndim != 1:
            return constant_shift
        correction, _ = fit_shift(
            adapted.checkpoint, reconstruction.x, reconstruction.labels, reconstruction.lam
        )
        constant_shift += float(correction.mean())
    return constant_shift


def _recenter(released: Released, shift: Tensor, kind: str) -> Adapted:
    """Adapt the attack to inputs z = x + u, so that candidates are the unshifted samples x.

    The first layer has weights W and biases b. Its stationarity equations in x are W - b u^T = sum_i d_i
    x_i^T and b = sum_i d_i. Here d_i is the multiplier of sample i times the derivative of the output in the
    pre-activations of this layer. The activation patterns are those of the network with the biases b + W u.
    The attack on the weight update (:class:`NTK`) solves these equations: the sum of gradients must equal
    theta - theta0 with theta0 = (b u^T, W u). The multipliers may have any sign, and candidates keep the
    value range of unshifted samples.

    Args:
        released: The released networks, and what the attacker knows.
        shift: (d,) shift u.
        kind: Name of the kind of shift for the report, such as "constant" or "vector".

    Returns:
        The attack to run.
    """
    network = released.checkpoints[0]
    moved_network = move_biases(network, shift)  # raises an error if the first layer has no bias
    weight, bias = (network.theta[name].double() for name in (WEIGHT, BIAS))
    shift_vector = shift.double().flatten()
    zero_weights = {name: torch.zeros_like(t) for name, t in network.theta.items()}
    zero_weights[WEIGHT] = torch.outer(bias, shift_vector).to(network.theta[WEIGHT])
    zero_weights[BIAS] = (weight @ shift_vector).to(network.theta[BIAS])
    rms = float(shift_vector.norm()) / math.sqrt(shift_vector.numel())
    findings = {"kind": kind, "shift_per_pixel": float(shift_vector.mean()), "rms_per_pixel": rms}
    knowledge = _add_knowledge(released, "user", theta0=zero_weights)
    attack = NTK.like(released.attack, lam_init=SIGNED_RANGE)
    changed_fields = {
        "knowledge": knowledge,
        "attack": attack,
        "findings": {"mean": findings},
        "shift": shift_vector,
    }
    return _adapt(released, checkpoint=moved_network, **changed_fields)


def _choose_better(released: Released, **changes: Any) -> Adapted:
    """Run short attacks with and without changed settings. Return the one that fits the weights better."""
    adapted = _adapt(released, **changes)
    attacks = {"unaware": _adapt(released), "adapted": adapted}
    residuals = {name: _try_briefly(option)[0] for name, option in attacks.items()}
    best_name = min(residuals, key=lambda name: residuals[name])
    findings = {**adapted.findings, "first_layer_residual_by_try": residuals, "chosen": best_name}
    return replace(attacks[best_name], findings=findings)


def _try_briefly(option: Adapted) -> tuple[float, Reconstruction]:
    """Run a short attack. Return its relative error in fitting the first layer, and its reconstruction."""
    attack = option.attack.resolve_settings(option.checkpoint, option.knowledge)
    assert isinstance(attack, RestartSettings)
    short_attack = attack.changed(restarts=1, steps=max(1, attack.steps // TRIAL_DIVISOR))
    reconstruction = short_attack.run(option.checkpoint, option.knowledge)
    residual = find_first_residual(reconstruction)
    return math.inf if residual is None else residual, reconstruction


def find_first_residual(reconstruction: Reconstruction) -> float | None:
    """Return the smallest error in fitting the first layer's weights over all restarts of an attack.

    The result is None if no error is finite.
    """
    if not reconstruction.layers.numel():
        return None
    smallest_squared_residual = float(reconstruction.layers[:, :, 0].nan_to_num(nan=math.inf).min())
    if not math.isfinite(smallest_squared_residual):
        return None
    return math.sqrt(max(smallest_squared_residual, 0.0))


def _add_knowledge(released: Released, source: str, **values: Any) -> Knowledge:
    """Add values to what the attacker knows, and record ``source`` as their origin."""
    knowledge = released.knowledge
    return knowledge.replace(
        **values, provenance={**knowledge.provenance, **dict.fromkeys(values, source)}
    )


def _undo_shift(released: Released, shift: float | Tensor, **changes: Any) -> Adapted:
    return _adapt(released, checkpoint=move_biases(released.checkpoints[0], shift), **changes)


def _adapt(released: Released, **changes: Any) -> Adapted:
    unaware_attack = Adapted(released.checkpoints[0], released.knowledge, released.attack)
    return replace(unaware_attack, **changes)


# All strategies by name. The name of a strategy is the name of its function, with hyphens.
ADAPTIVE: dict[str, Strategy] = {
    strategy.__name__.replace("_", "-"): strategy
    for strategy in (
        *(undo_constant_shift, undo_vector_shift, follow_mean, follow_mean_image),
        *(average_releases, cut_noise, free_multipliers, tied_multipliers),
        *(known_start, told_the_shift),
    )
}
