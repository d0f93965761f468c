"""Attackers who know which defense was used, and not its secret.

A defense that is tried against an unaware attacker alone proves nothing. Every strategy here gets
the released weights, what was granted, and the public facts of the defense, and returns the attack
to run instead: weights with a shift undone, a box moved to where the inputs are, noise averaged or
cut off, multipliers freed. The attack itself then has the same steps and restarts as the unaware
one; what a strategy spends before comes on top.
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

PROBE = 4  # a probing attack has this share of the steps, and one restart
ROUNDS = 2  # of fitting the shift to candidates and the candidates to the shift
SIGNED = (-0.5, 0.5)  # stored multipliers at the start, where their sign is free


@dataclass(frozen=True)
class Released:
    """What the attacker has: one release or several of the same weights, knowledge, settings.

    facts: what is public about the defense, such as its weight decay or the initial weights.
    """

    checkpoints: tuple[Network, ...]
    knowledge: Knowledge
    attack: Attack
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapted:
    """The attack to run.

    findings: what was inferred, plain values.
    shift: (d,) taken off inputs that were shifted during training, inferred or told; else None.
    """

    checkpoint: Network
    knowledge: Knowledge
    attack: Attack
    findings: dict[str, Any] = field(default_factory=dict)
    shift: Tensor | None = None


Strategy = Callable[[Released], Adapted]


def undo_constant_shift(released: Released) -> Adapted:
    """Balance the neurons by one constant; where they do not agree, let short attacks decide."""
    return _undo(released, infer_constant_shift(released.checkpoints[0]), constant=True)


def undo_vector_shift(released: Released) -> Adapted:
    """Balance the neurons by any vector; where signs are open, let short attacks decide."""
    return _undo(released, infer_vector_shift(released.checkpoints[0]), constant=False)


def follow_mean(released: Released) -> Adapted:
    """Take one constant off the inputs: where the first layer says that they were."""
    mean = infer_mean(released.checkpoints[0])
    return _recentered(released, torch.full_like(mean, float(mean.mean())), "constant")


def follow_mean_image(released: Released) -> Adapted:
    """Take the inferred mean of every pixel off the inputs."""
    return _recentered(released, infer_mean(released.checkpoints[0]), "vector")


def average_releases(released: Released) -> Adapted:
    """The mean of several noisy releases; one alone has its first layer's noise cut off."""
    if len(released.checkpoints) == 1:
        return cut_noise(released)
    first = released.checkpoints[0]
    theta = {
        name: torch.stack([part.theta[name].double() for part in released.checkpoints])
        .mean(0)
        .to(t)
        for name, t in first.theta.items()
    }
    findings = {"releases": len(released.checkpoints)}
    return _adapted(released, checkpoint=first.replace(theta=theta), findings=findings)


def cut_noise(released: Released) -> Adapted:
    """The first layer without what looks like noise, where short tries explain it better so."""
    cut, kept, of = without_noise(released.checkpoints[0])
    findings = {"kept_directions": kept, "of": of}
    return _better(released, checkpoint=cut, findings=findings)


def without_noise(checkpoint: Network) -> tuple[Network, int, int]:
    """First-layer singular values below those of noise set to zero; how many are kept, and of how many.

    Gavish and Donoho 2014, unknown noise level: threshold omega(beta) times the median singular
    value, beta the aspect ratio, omega by its published cubic.
    """
    weight = first_layer(checkpoint.theta)
    name = next(key for key, t in checkpoint.theta.items() if t is weight)
    u, values, rows = torch.linalg.svd(weight.double().flatten(1), full_matrices=False)
    beta = min(u.shape[0], rows.shape[1]) / max(u.shape[0], rows.shape[1])
    omega = 0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43
    kept = values > omega * values.median()
    kept[0] = True  # nothing left is nothing to attack
    cut = (u * torch.where(kept, values, 0.0)) @ rows
    theta = {**checkpoint.theta, name: cut.reshape(weight.shape).to(weight)}
    return checkpoint.replace(theta=theta), int(kept.sum()), len(values)


def free_multipliers(released: Released) -> Adapted:
    """No sign of the multipliers and no margin is assumed: right for any loss at any time."""
    attack = WeightDecay.like(released.attack, lam_init=SIGNED)
    findings = {"objective": "weight-decay, free multipliers"}
    return _better(released, attack=attack, findings=findings)


def tied_multipliers(released: Released) -> Adapted:
    """Weight decay and loss are public: multipliers follow from the candidates' outputs."""
    if not released.facts["weight_decay"]:
        return free_multipliers(released)  # nothing to tie them by
    granted = {name: released.facts[name] for name in ("weight_decay", "loss")}
    return _better(
        released,
        knowledge=_told(released, "user", **granted),
        attack=WeightDecay.like(released.attack),
        findings={"objective": "weight-decay, multipliers tied", **granted},
    )


def known_start(released: Released) -> Adapted:
    """The initial weights are taken off: their seed is often public, and then they are."""
    return _better(
        released,
        knowledge=_told(released, "train", theta0=released.facts["theta0"]),
        attack=NTK.like(released.attack, lam_init=SIGNED),
        findings={"objective": "ntk, initial weights granted"},
    )


def told_the_shift(released: Released) -> Adapted:
    """The secret itself is out: what is left of the defense then is what the secret did not do."""
    shift = released.facts["shift"].double().flatten()
    if released.facts["rewritten"]:
        return _moved(released, shift)
    return _recentered(released, shift, "told")


def without_shift(checkpoint: Network, theta0: dict[str, Tensor], shift: Tensor) -> Network:
    """W - (b - b0) u^T in place of W: what the first layer would mix had there been no shift.

    Trained on x + u, W - W0 = C (X + 1 u^T) and b - b0 = C 1, so C X is left, whatever C. The bias stays:
    it says C 1 as it is. Gates are those of x + u still, which matter to stationarity and not to C X.
    """
    weight, change = checkpoint.theta[WEIGHT], checkpoint.theta[BIAS].double()
    change = change - theta0[BIAS].to(change)
    less = weight.double() - torch.outer(change, shift.to(change).flatten())
    return checkpoint.replace(theta={**checkpoint.theta, WEIGHT: less.to(weight)})


def _undo(released: Released, balance: ShiftInference, constant: bool) -> Adapted:
    """Undo what balance says; without consensus keep, of several guesses, the best explained one."""
    findings: dict[str, Any] = {"balance": balance.to_json()}
    if balance.consensus:
        return _moved(released, balance.shift, findings=findings)
    guesses: dict[str, float | Tensor] = {"released as it is": 0.0, "balance": balance.shift}
    if constant:
        guesses["fitted to candidates"] = _jointly(released, balance.shift)
    tried = {name: _short(_moved(released, guess))[0] for name, guess in guesses.items()}
    best = min(tried, key=lambda name: tried[name])
    findings |= {"first_layer_residual_by_guess": tried, "chosen": best}
    return _moved(released, guesses[best], findings=findings)


def _jointly(released: Released, start: float | Tensor) -> float:
    """A constant shift and the candidates in turn: short attack, closed-form shift, again."""
    c = float(torch.as_tensor(start).mean())
    for _ in range(ROUNDS):
        moved = _moved(released, c)
        _, found = _short(moved)
        if found.lam.ndim != 1:
            return c
        more, _ = fit_shift(moved.checkpoint, found.x, found.labels, found.lam)
        c += float(more.mean())
    return c


def _recentered(released: Released, shift: Tensor, kind: str) -> Adapted:
    """The same stationarity in x = z - u: W - b u^T = sum_i d_i x_i^T, b = sum_i d_i.

    Gates are those of the network with bias b + W u. Weights and target differ, which is what the
    NTK objective provides: target = theta - theta0 with theta0 = (b u^T, W u). Its multipliers are
    free, and candidates keep the box they had without a shift.
    """
    first = released.checkpoints[0]
    moved = move_biases(first, shift)  # refuses a network without a bias on the input
    weight, bias = (first.theta[part].double() for part in (WEIGHT, BIAS))
    u = shift.double().flatten()
    theta0 = {name: torch.zeros_like(t) for name, t in first.theta.items()}
    theta0[WEIGHT] = torch.outer(bias, u).to(first.theta[WEIGHT])
    theta0[BIAS] = (weight @ u).to(first.theta[BIAS])
    rms = float(u.norm()) / math.sqrt(u.numel())
    mean = {"kind": kind, "shift_per_pixel": float(u.mean()), "rms_per_pixel": rms}
    knowledge = _told(released, "user", theta0=theta0)
    attack = NTK.like(released.attack, lam_init=SIGNED)
    changes = {"knowledge": knowledge, "attack": attack, "findings": {"mean": mean}, "shift": u}
    return _adapted(released, checkpoint=moved, **changes)


def _better(released: Released, **changes: Any) -> Adapted:
    """The attack as it was or the changed one, by the first-layer residual of a short try each."""
    other = _adapted(released, **changes)
    options = {"unaware": _adapted(released), "adapted": other}
    tried = {name: _short(option)[0] for name, option in options.items()}
    best = min(tried, key=lambda name: tried[name])
    findings = {**other.findings, "first_layer_residual_by_try": tried, "chosen": best}
    return replace(options[best], findings=findings)


def _short(option: Adapted) -> tuple[float, Reconstruction]:
    """First-layer residual that a short attack reaches, relative as the attack's own loss is."""
    attack = option.attack.resolve_settings(option.checkpoint, option.knowledge)
    assert isinstance(attack, RestartSettings)
    short = attack.changed(restarts=1, steps=max(1, attack.steps // PROBE))
    found = short.run(option.checkpoint, option.knowledge)
    reached = first_residual(found)
    return math.inf if reached is None else reached, found


def first_residual(found: Reconstruction) -> float | None:
    """Best first-layer residual of all restarts, relative where the attack normalizes."""
    if not found.layers.numel():
        return None
    best = float(found.layers[:, :, 0].nan_to_num(nan=math.inf).min())
    return math.sqrt(max(best, 0.0)) if math.isfinite(best) else None


def _told(released: Released, source: str, **facts: Any) -> Knowledge:
    """What is known with these facts added, and where they are from."""
    known = released.knowledge
    return known.replace(**facts, provenance={**known.provenance, **dict.fromkeys(facts, source)})


def _moved(released: Released, shift: float | Tensor, **changes: Any) -> Adapted:
    """With this shift undone."""
    return _adapted(released, checkpoint=move_biases(released.checkpoints[0], shift), **changes)


def _adapted(released: Released, **changes: Any) -> Adapted:
    start = Adapted(released.checkpoints[0], released.knowledge, released.attack)
    return replace(start, **changes)


# A strategy goes by the name of its function.
ADAPTIVE: dict[str, Strategy] = {
    strategy.__name__.replace("_", "-"): strategy
    for strategy in (
        *(undo_constant_shift, undo_vector_shift, follow_mean, follow_mean_image),
        *(average_releases, cut_noise, free_multipliers, tied_multipliers),
        *(known_start, told_the_shift),
    )
}
