"""One defense tried: train, release, attack unaware and adaptively, score, certify.

Everything but the defense is the same for all trials: data, seeds, knowledge, attack settings.
Training samples are scored as they are, without any shift: what counts is whether they come back.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from residuum.attacks import AttackConfig, attack
from residuum.attacks.adaptive import Released, adaptive_attack
from residuum.checkpoints import build_model
from residuum.defenses.base import Defense, Facts, Secret, Training, per_pixel_and_norm
from residuum.defenses.certificates import certificate_of, determined, rewritten_certificate
from residuum.defenses.outcome import Attacked, Outcome, attacked
from residuum.errors import InconclusiveError
from residuum.evaluation import score
from residuum.evaluation.scoring import whole_pool
from residuum.records import Checkpoint, Dataset, Knowledge, Reconstruction, Split
from residuum.theory.rows import accuracy, normalise_labels
from residuum.training import TrainingState, released
from residuum.training.losses import LOSSES, choose_loss

NONE, TOLD = "none", "told-the-shift"
REWRITTEN = "rewrite: biases changed after training"
RETRAINED = "retrain: training data shifted before training"
Stage = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """What all trials share.

    releases: noisy ones that an adaptive attacker collects; certify: compute what equal pairs
    keep of a sample; kinks: at most so many are freed for the Clarke residual.
    """

    arch: str
    split: Split
    task: str
    training: Training
    attack: AttackConfig
    knowledge: Knowledge
    seed: int = 0
    subsets: int = 500
    releases: int = 16
    device: str = "cpu"
    certify: bool = True
    kinks: int = 60


def release(
    setting: Setting, name: str, defense: Defense | None, strength: float | None
) -> tuple[Checkpoint, Checkpoint, Secret, TrainingState, Facts, Training]:
    """Train and defend: the released weights, those before the last hook, the secret, the run."""
    on = defense is not None and strength is not None and strength != defense.off
    shape = setting.split.train.shape
    secret = Secret(0)
    training, data = setting.training, setting.split.train
    if on:
        assert defense is not None
        assert strength is not None
        secret = defense.draw(strength, shape, setting.seed, name)
        data = defense.data(data, secret) if defense.data else data
        training = (
            defense.training(training, strength, secret.seed) if defense.training else training
        )
    state, facts = training.loop(setting.arch, data, training.config, setting.task, setting.device)
    if state.status == "diverged":
        raise InconclusiveError(
            f"Training with {name} diverged: there are no weights to release.",
            "Lower --lr or the strength.",
        )
    before = after = released(state, setting.arch, data, setting.task)
    if on and defense is not None and strength is not None and defense.release:
        after = defense.release(before, strength, secret)
    return after, before, secret, state, facts, training


def run_trial(
    setting: Setting, name: str = NONE, defense: Defense | None = None,
    strength: float | None = None, stage: Stage = lambda _: None,
) -> tuple[Outcome, Checkpoint, Secret]:  # fmt: skip
    """One defense at one strength: what it did, what is released, and what the owner keeps."""
    seconds: dict[str, float] = {}
    stage("training")
    start = time.monotonic()
    checkpoint, before, secret, state, facts, training = release(setting, name, defense, strength)
    seconds["train"] = time.monotonic() - start
    stage("unaware attack")
    attacks = [_attacked(setting, "unaware", *_unaware(setting, checkpoint))]
    seconds["unaware"] = attacks[0].seconds
    if defense is not None:
        stage(f"adaptive attack, {defense.adaptive}")
        known = _Known(state.theta0, training, secret, defense.release is not None)
        strategies = (defense.adaptive, *([TOLD] if secret.shift is not None else []))
        releases = _releases(setting, name, defense, strength, checkpoint, before)
        attacks += [_adaptive(setting, each, releases, known) for each in strategies]
        seconds["adaptive"] = attacks[1].seconds
    stage("certificates")
    start = time.monotonic()
    measured = _measured(setting, checkpoint, secret)
    rewrite = _rewrite(setting, defense, before, checkpoint, secret)
    seconds["certify"] = time.monotonic() - start
    outcome = Outcome(
        name=name, strength=strength, n=len(setting.split.train),
        changes=defense.changes if defense else "nothing", secret=defense.secret if defense else "",
        shift=_shift(defense, secret), rewrite=rewrite, attacks=tuple(attacks), facts=facts,
        seconds={key: round(value, 3) for key, value in seconds.items()},
        theta_sha256=hashlib.sha256(save(checkpoint.theta)).hexdigest(), **measured,
    )  # fmt: skip
    return outcome, checkpoint, secret


def _measured(setting: Setting, checkpoint: Checkpoint, secret: Secret) -> dict[str, Any]:
    """Accuracy, losses, KKT residuals and determined energy, inputs as the network is given them."""
    model = build_model(checkpoint, torch.float64)
    train, holdout = (part.replace(x=secret.inputs(part.x.double()))
                      for part in (setting.split.train, setting.split.holdout))  # fmt: skip
    certificate = certificate_of(model, train, setting.task, setting.kinks)
    kept: dict[str, Any] = {"determined_energy": None, "uniqueness_note": "not asked for"}
    if setting.certify:
        kept = determined(model, train, certificate, setting.knowledge, secret)
    accuracy, loss = _held_out(model, holdout, setting.task)
    return {
        "accuracy": accuracy, "loss": loss, "train_loss": _held_out(model, train, setting.task)[1],
        "kkt_plain": certificate.residual_plain, "kkt_clarke": certificate.residual_clarke,
        "margin": certificate.margin, **kept,
    }  # fmt: skip


def _rewrite(
    setting: Setting, defense: Defense | None, before: Checkpoint, after: Checkpoint, secret: Secret
) -> dict[str, float]:
    if defense is None or defense.release is None or secret.shift is None:
        return {}
    return rewritten_certificate(before, after, setting.split.train, setting.task, secret.shift)


def _unaware(
    setting: Setting, checkpoint: Checkpoint
) -> tuple[Reconstruction, dict[str, Any], float]:
    found = attack(checkpoint, setting.knowledge, setting.attack)
    return found, {}, found.seconds


@dataclass(frozen=True)
class _Known:
    """What may be public besides the weights, and the secret, for the attacker who is told it."""

    theta0: dict[str, Tensor]
    training: Training
    secret: Secret
    rewritten: bool


def _releases(
    setting: Setting, name: str, defense: Defense, strength: float | None, checkpoint: Checkpoint,
    before: Checkpoint,
) -> tuple[Checkpoint, ...]:  # fmt: skip
    """The release, and others of the same weights where they differ."""
    if not defense.releases or not defense.release or strength in (None, defense.off):
        return (checkpoint,)
    assert strength is not None
    seeds = [setting.seed + 7919 * k for k in range(1, setting.releases)]
    secrets = [defense.draw(strength, (), seed, name) for seed in seeds]
    return (checkpoint, *(defense.release(before, strength, secret) for secret in secrets))


def _adaptive(
    setting: Setting, strategy: str, releases: tuple[Checkpoint, ...], known: _Known
) -> Attacked:
    """The attacker who knows the defense; told: who knows its secret too."""
    config = known.training.config
    facts: dict[str, Any] = {
        "theta0": known.theta0,
        "weight_decay": config.weight_decay,
        "loss": choose_loss(config.loss, setting.task),
    }
    if strategy == TOLD:
        facts |= {"shift": known.secret.shift, "rewritten": known.rewritten}
    start = time.monotonic()
    handed = Released(releases, setting.knowledge, setting.attack, facts)
    found, adapted, _ = adaptive_attack(strategy, handed)
    spent = time.monotonic() - start
    return _attacked(setting, strategy, found, adapted.findings, spent)


def _attacked(
    setting: Setting, attacker: str, found: Reconstruction, findings: dict[str, Any], seconds: float
) -> Attacked:
    pool, split = whole_pool(found), setting.split
    scores = score(
        pool.x, split.train, split.holdout, candidate_labels=pool.labels, metrics=["ncc"],
        seed=setting.seed, subsets=setting.subsets,
    )  # fmt: skip
    return attacked(
        attacker, pool.x, split.train, scores, _first_residual(found), seconds, findings
    )


def _first_residual(found: Reconstruction) -> float | None:
    """Best first-layer residual of all restarts, relative where the attack normalises."""
    if not found.layers.numel():
        return None
    best = float(found.layers[:, :, 0].nan_to_num(nan=math.inf).min())
    return math.sqrt(max(best, 0.0)) if math.isfinite(best) else None


def _held_out(model: nn.Module, data: Dataset, task: str) -> tuple[float | None, float]:
    """Accuracy and loss on samples as the network is given them."""
    with torch.no_grad():
        outputs = model(data.x.double())
    y = normalise_labels(data.y, task, outputs.shape[1])
    loss = float(LOSSES[choose_loss("", task)](outputs, y))
    return None if task == "regression" else accuracy(outputs, y, task), loss


def _shift(defense: Defense | None, secret: Secret) -> dict[str, Any]:
    if defense is None or not defense.shift or secret.shift is None:
        return {}
    kind = REWRITTEN if defense.release else RETRAINED
    return {"kind": kind, "form": defense.shift, **per_pixel_and_norm(secret.shift)}


def at_seed(setting: Setting, seed: int) -> Setting:
    """The same setting with another seed for weights, attack and secret."""
    training = replace(
        setting.training,
        config=replace(setting.training.config, seed=seed),
        descent=replace(setting.training.descent, seed=seed),
    )
    return replace(setting, training=training, attack=replace(setting.attack, seed=seed), seed=seed)
