"""One defense tried: train, release, attack in every way, score, certify.

Everything but the defense is the same for all trials: data, seeds, knowledge, attack settings.
Training samples are scored as they are, without any shift: what counts is whether they come back.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from residuum.attacks import AttackConfig
from residuum.attacks.defense_aware.strategies import Adapted, Released, first_residual
from residuum.defenses.attackers import TOLD, attackers, attempt, either_sign, strongest
from residuum.defenses.catalogue import Defense, Facts, Secret, Training
from residuum.errors import InconclusiveError, InputError, ResiduumError
from residuum.evaluation import score
from residuum.evaluation.scoring import whole_pool
from residuum.networks.network import Network
from residuum.records import (
    Certificate,
    Dataset,
    Knowledge,
    Reconstruction,
    Record,
    Split,
)
from residuum.stationarity import Rows, norm, parameters, residual
from residuum.theory import certify
from residuum.theory.kkt import fit_multipliers, posed
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.rows import accuracy, normalise_labels
from residuum.theory.uniqueness import uniqueness
from residuum.training import TrainingState, released
from residuum.training.methods import LOSSES, choose_loss

NONE = "none"
UNDEFENDED = Defense("nothing", "", "", "")
REWRITTEN = "rewrite: biases changed after training"
RETRAINED = "retrain: training data shifted before training"
CERTIFIED, CERTIFYING = 4, 3.0  # samples of the uniqueness certificate, and its seconds
NO_KINKS = -1.0  # a distance that nothing is within
SHOWN = 8  # pairs that an outcome keeps for its pictures
Stage = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Attacked(Record):
    """One attack on the released weights, scored; images (k, 2, *shape): found, and its sample.

    attacker: the way, as :func:`attackers` names it.
    values: (k,) score of each pair.
    rule: what a recovered sample had to beat, such as "ncc > 0.83".
    findings: what the adapted attacker inferred, plain values.
    refused: why there is nothing to score; "" where there is.
    tried: attacks of which this is the strongest; the p-value is multiplied by their number.
    """

    attacker: str
    recovered: int | None
    expected_by_chance: float | None
    p_value: float | None
    first_layer_residual: float | None
    seconds: float
    images: Tensor
    values: Tensor
    beyond_chance: tuple[bool, ...] = ()
    findings: dict[str, Any] = field(default_factory=dict)
    rule: str = ""
    refused: str = ""
    tried: int = 1

    def to_json(self) -> dict[str, Any]:
        """Everything but the images."""
        left_out = ("images", "values", "beyond_chance")
        return {name: value for name, value in vars(self).items() if name not in left_out}


@dataclass(frozen=True, eq=False)
class Outcome(Record):
    """A defense at one strength. name "none" is the undefended network, the "before" of all others.

    changes, secret: as the defense states them.
    strategy: of the adapted attacker, "" for the undefended network.
    shift: of the inputs, its kind (rewritten into the biases, or there during training), per pixel
        and as a norm.
    accuracy, loss: on held-out samples, as the defended network is given them; kkt: relative
        residuals at the training samples as the network is given them.
    rewrite: the three residuals of bias rewriting.
    determined_at_least: mean share of a training sample's energy that other sets of the same
        patterns and labels keep, proved (:class:`residuum.records.Uniqueness`), determined_energy
        the least found.
    facts: of the training.
    attacks: every way that was tried, the unaware attacker first, those told the secret last.
    theta_sha256: of the released weights, so that a kept trial is known again.
    """

    name: str
    strength: float | None
    n: int
    changes: str
    secret: str
    strategy: str
    shift: dict[str, Any]
    accuracy: float | None
    loss: float
    train_loss: float
    kkt_plain: float
    kkt_clarke: float
    margin: float | None
    rewrite: dict[str, float]
    determined_energy: float | None
    uniqueness_note: str
    attacks: tuple[Attacked, ...]
    seconds: dict[str, float]
    facts: dict[str, Any] = field(default_factory=dict)
    theta_sha256: str = ""
    determined_at_least: float | None = None

    @property
    def label(self) -> str:
        """NAME:STRENGTH, as it was asked for."""
        return self.name if self.strength is None else f"{self.name}:{self.strength:g}"

    @property
    def unaware(self) -> Attacked:
        """The attacker who does not know of the defense."""
        return self.attacks[0]

    @property
    def adaptive(self) -> Attacked | None:
        """The strongest attack of one who knows of the defense; None where all were refused."""
        return _best(one for one in self.attacks if one.attacker not in TOLD)

    @property
    def told(self) -> Attacked | None:
        """The strongest of one who was told the shift, who has every other way too; None without one."""
        ran = any(one.attacker in TOLD and not one.refused for one in self.attacks)
        return _best(self.attacks) if ran else None

    def to_json(self) -> dict[str, Any]:
        """The published form, without images and without the secret's value."""
        rows = {k: v for k, v in vars(self).items() if k not in ("attacks", "strength", "name")}
        known = {"adaptive": self.adaptive, "told": self.told}
        return {
            "defense": self.label,
            "name": self.name,
            "strength": "inf" if self.strength == math.inf else self.strength,
            **rows,
            "unaware": self.unaware.to_json(),
            **{key: None if part is None else part.to_json() for key, part in known.items()},
            "attacks": [one.to_json() for one in self.attacks],
        }


@dataclass(frozen=True)
class Conditions:
    """What all trials share.

    releases: noisy ones that an attacker who knows collects.
    certify: compute what other sets keep of a sample.
    kinks: at most so many are freed for the Clarke residual.
    split: training and held-out samples.
    training, attack, knowledge: how networks are trained, attacked, and what attackers are told.
    subsets: of the held-out control.
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
    setting: Conditions, name: str, defense: Defense, strength: float | None
) -> tuple[Network, Network, Secret, TrainingState, Facts, Training]:
    """Train and defend: the released weights, those before the last hook, the secret, the run.

    A defense may act on the data, on the training, on the weights, in this order. At the strength
    ``off`` no hook is called, so that "undefended" is the same code.
    """
    training, data, secret = setting.training, setting.split.train, Secret(0)
    level = defense.off if strength is None else strength
    if level != defense.off:
        secret = defense.draw(level, data.shape, setting.seed, name)
        data = defense.data(data, secret) if defense.data else data
        if defense.training:
            training = defense.training(training, level, secret.seed)
    state, facts = training.loop(setting.arch, data, training.config, setting.task, setting.device)
    if state.status == "diverged":
        raise InconclusiveError(
            f"Training with {name} diverged: there are no weights to release.",
            "Lower --lr or the strength.",
        )
    before = after = released(state, setting.arch, data, setting.task)
    if level != defense.off and defense.release:
        after = defense.release(before, level, secret)
    return after, before, secret, state, facts, training


def run_trial(
    setting: Conditions,
    name: str = NONE,
    defense: Defense | None = None,
    strength: float | None = None,
    stage: Stage = lambda _: None,
) -> tuple[Outcome, Network, Secret]:
    """One defense at one strength: what it did, what is released, and what the owner keeps.

    It is attacked in every way (:func:`attackers`), and so is the undefended network. Certificates are of
    the network as released, on samples as it is given them.
    """
    defense, seconds, split = defense or UNDEFENDED, dict[str, float](), setting.split
    stage("training")
    start = time.monotonic()
    checkpoint, before, secret, state, facts, training = release(setting, name, defense, strength)
    seconds["train"] = time.monotonic() - start
    releases: tuple[Network, ...] = (checkpoint,)
    again = defense.release
    if defense.releases and again and strength is not None and strength != defense.off:
        # Others of the same weights, which differ by what is drawn anew.
        seeds = [setting.seed + 7919 * k for k in range(1, setting.releases)]
        secrets = [defense.draw(strength, (), seed, name) for seed in seeds]
        releases += tuple(again(before, strength, one) for one in secrets)
    public: dict[str, Any] = {
        "theta0": state.theta0,
        "large": training.config.init != "small",
        "weight_decay": training.config.weight_decay,
        "loss": choose_loss(training.config.loss, setting.task),
    }
    handed = Released(releases, setting.knowledge, setting.attack, public)
    attacks, seconds["strategy"] = _attacks(setting, handed, defense, secret, stage)
    seconds["unaware"] = attacks[0].seconds
    seconds["adaptive"] = sum(one.seconds for one in attacks[1:])
    stage("certificates")
    start = time.monotonic()
    shift, rewrite, measured = {}, {}, _measured(setting, checkpoint, secret)
    if secret.shift is not None:
        shift = {
            "kind": REWRITTEN if defense.release else RETRAINED,
            "form": defense.shift,
            "per_pixel": float(secret.shift.norm()) / math.sqrt(max(1, secret.shift.numel())),
            "norm": float(secret.shift.norm()),
        }
        if defense.release:
            of = split.train, setting.task, secret.shift
            rewrite = rewritten_certificate(before, checkpoint, *of)
    seconds["certify"] = time.monotonic() - start
    outcome = Outcome(
        name=name,
        strength=strength,
        n=len(split.train),
        changes=defense.changes,
        secret=defense.secret,
        strategy=defense.adaptive,
        shift=shift,
        rewrite=rewrite,
        attacks=attacks,
        facts=facts,
        seconds={key: round(value, 3) for key, value in seconds.items()},
        theta_sha256=hashlib.sha256(save(checkpoint.theta)).hexdigest(),
        **measured,
    )
    return outcome, checkpoint, secret


def _best(attacks: Iterable[Attacked]) -> Attacked | None:
    """The record of the :func:`strongest`, its p-value corrected; None where none ran."""
    ran = {one.attacker: one for one in attacks if not one.refused}
    found = strongest({name: (one.recovered, one.p_value) for name, one in ran.items()})
    return None if found is None else ran[found[0]].replace(p_value=found[1], tried=found[2])


def _attacks(
    setting: Conditions, handed: Released, defense: Defense, secret: Secret, stage: Stage
) -> tuple[tuple[Attacked, ...], float]:
    """Every way tried and scored, and the seconds that strategies took to infer what they attack.

    Those are apart: a strategy may end in the attack that was tried already, and what it spent on short
    tries would else be charged to the next way.
    """
    attacks, inferring = [], 0.0
    stage("attacks")
    ways = attackers(handed, defense.adaptive, secret, defense.release is not None)
    while True:
        start = time.monotonic()
        name, way = next(ways, ("", None))
        begun = time.monotonic()
        inferring += begun - start
        if way is None:
            break
        stage(f"attack {name}")
        found = attempt(way, setting.split.train.shape)
        seconds = time.monotonic() - begun
        if isinstance(found, str):
            none = torch.zeros(0, 2, *setting.split.train.shape)
            counts = (None, None, None, None)
            attacks.append(Attacked(name, *counts, seconds, none, torch.zeros(0), refused=found))
        else:
            findings = way.findings if isinstance(way, Adapted) else {}
            attacks.append(_attacked(setting, name, found, findings, seconds))
    if all(one.refused for one in attacks):
        # A setting that no attack accepts must not read as a defense that none gets past.
        raise InputError(f"No attack applies: {attacks[0].refused}", "Choose other settings.")
    return tuple(attacks), inferring


def _attacked(
    setting: Conditions,
    attacker: str,
    found: Reconstruction,
    findings: dict[str, Any],
    seconds: float,
) -> Attacked:
    """The record of an attack: counts, and the best pairs of candidate and training sample."""
    x, train = either_sign(attacker, whole_pool(found).x), setting.split.train
    how: dict[str, Any] = {"metrics": ["ncc"], "seed": setting.seed, "subsets": setting.subsets}
    scores = score(x, train, setting.split.holdout, **how)
    rows = [(row.index, row.matches[scores.deciding]) for row in scores.per_sample]
    matched = [(i, m) for i, m in rows if m.score is not None and m.candidate is not None]
    best = sorted(matched, key=lambda pair: -float(pair[1].score or 0.0))[:SHOWN]
    pairs = [torch.stack([x[m.candidate].double(), train.x[i].double()]) for i, m in best]
    mean = 0.0 if train.mean is None else train.mean.double()
    counts = scores.recovered, scores.expected_by_chance, scores.p_value
    images = torch.stack(pairs) + mean if pairs else torch.zeros(0, 2, *train.shape)
    values = torch.tensor([float(m.score or 0.0) for _, m in best])
    beyond = tuple(bool(m.recovered) for _, m in best)
    made = Attacked(attacker, *counts, first_residual(found), seconds, images, values, beyond)
    return made.replace(findings=dict(findings), rule=scores.rule)


def _measured(setting: Conditions, checkpoint: Network, secret: Secret) -> dict[str, Any]:
    """Accuracy, losses, KKT residuals and determined energy, inputs as the network is given them."""
    model = checkpoint.double_module
    both = (setting.split.train, setting.split.holdout)
    train, holdout = (part.replace(x=secret.inputs(part.x.double())) for part in both)
    certificate = certificate_of(model, train, setting.task, setting.kinks)
    kept: dict[str, Any] = {"determined_energy": None, "uniqueness_note": "not asked for"}
    if setting.certify:
        kept = determined(model, train, certificate, setting.knowledge, secret)
    accuracy, loss = _held_out(model, holdout, setting.task)
    return {
        "accuracy": accuracy,
        "loss": loss,
        "train_loss": _held_out(model, train, setting.task)[1],
        "kkt_plain": certificate.residual_plain,
        "kkt_clarke": certificate.residual_clarke,
        "margin": certificate.margin,
        **kept,
    }


def _held_out(model: nn.Module, data: Dataset, task: str) -> tuple[float | None, float]:
    """Accuracy and loss on samples as the network is given them."""
    with torch.no_grad():
        outputs = model(data.x.double())
    y = normalise_labels(data.y, task, outputs.shape[1])
    loss = float(LOSSES[choose_loss("", task)](outputs, y))
    return None if task == "regression" else accuracy(outputs, y, task), loss


def certificate_of(model: nn.Module, data: Dataset, task: str, kinks: int = 0) -> Certificate:
    """KKT certificate; without kinks to free, none is looked for and no programme is solved."""
    gates: dict[str, Any] = {"kink_limit": kinks} if kinks else {"kink_tolerance": NO_KINKS}
    return certify(model, data.x, data.y, task=task, **gates)


def rewrite_residuals(
    before: nn.Module, after: nn.Module, x: Tensor, y: Tensor, lam: Tensor, rows: Rows, u: Tensor
) -> dict[str, float]:
    """Residuals of rewritten biases over the norm of the weights before: measured, closed form, refitted.

    At the original multipliers the first layer keeps b u^T and the bias W u, all else is zero at a KKT
    point: sqrt(|b|^2 |u|^2 + |W u|^2) / |theta|. Other multipliers can only do better.
    """
    theta, z = parameters(before), x + u
    size = norm(theta)
    weight, bias = theta["layers.0.weight"], theta["layers.0.bias"]
    flat = u.flatten().to(weight)
    left = norm(residual(after, parameters(after), z, rows.combine(lam, len(z))))
    squares = bias.square().sum() * flat.square().sum() + (weight @ flat).square().sum()
    closed = math.sqrt(float(squares))
    refitted = certificate_of(after, Dataset(z, y), "auto")
    return {
        "original_multipliers": left / size,
        "closed_form": closed / size,
        "refitted": refitted.eps / size,
        "before": norm(residual(before, theta, x, rows.combine(lam, len(x)))) / size,
    }


def rewritten_certificate(
    before: Network, after: Network, train: Dataset, task: str, shift: Tensor
) -> dict[str, float]:
    """:func:`rewrite_residuals` at the best multipliers of the network before."""
    old, x, _, _, task, rows = posed(before.copy_module(), train.x, train.y, task)
    lam = fit_multipliers(old, x, rows, free=task == "regression")[0]
    new = after.copy_module(torch.float64).requires_grad_(False)
    return rewrite_residuals(old, new, x, train.y, lam, rows, shift)


def determined(
    model: nn.Module, train: Dataset, certificate: Certificate, knowledge: Knowledge, secret: Secret
) -> dict[str, Any]:
    """Mean energy that others keep of the heaviest samples, proved and least found; or why none."""
    if certificate.task != "binary":
        return {"determined_energy": None, "uniqueness_note": "computed for one output only"}
    lam = certificate.multipliers
    order = lam.argsort(descending=True)
    box = knowledge.box(train.x[0].double())  # as the defended network receives it
    try:
        found = uniqueness(
            KKTSet.of(model, train.x[order], train.y[order], lam[order], task="binary"),
            box=box and (secret.inputs(box[0]), secret.inputs(box[1])),
            samples=CERTIFIED,
            seconds=CERTIFYING,
        )
    except ResiduumError as problem:
        return {"determined_energy": None, "uniqueness_note": f"not computed: {problem.message}"}
    return {
        "determined_energy": float(found.determined_energy.mean()),
        "determined_at_least": float(found.determined_at_least.mean()),
        "uniqueness_note": f"mean of {len(found)} samples, heaviest first, {found.share:.0%} of their weight",
    }


def at_seed(setting: Conditions, seed: int) -> Conditions:
    """The same setting with another seed for weights, attack and secret."""
    config, descent = (
        replace(part, seed=seed) for part in (setting.training.config, setting.training.descent)
    )
    training = replace(setting.training, config=config, descent=descent)
    return replace(setting, training=training, attack=replace(setting.attack, seed=seed), seed=seed)
