"""Try one defense: train, release, attack in every way, score, certify.

Everything but the defense is the same for all trials: data, seeds, knowledge, attack settings. Training
samples are scored as they are, without any shift, because a leak of them is what counts.
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

from residuum.attacks import Attack
from residuum.attacks.defense_aware.strategies import Adapted, Released, find_first_residual
from residuum.defenses.attackers import TOLD, attackers, attempt, either_sign, strongest
from residuum.defenses.catalog import Defense, Secret, Training
from residuum.defenses.loops import Facts, Job
from residuum.errors import InconclusiveError, InputError, ResiduumError
from residuum.evaluation import score
from residuum.evaluation.scoring import all_candidates
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
from residuum.theory.kkt import fit_multipliers, pose_problem
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.rows import accuracy, normalize_labels
from residuum.theory.uniqueness import uniqueness
from residuum.training import TrainingState
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
    images: Tensor
    recovered: int | None = None
    expected_by_chance: float | None = None
    p_value: float | None = None
    first_layer_residual: float | None = None
    seconds: float = 0.0
    values: Tensor = field(default_factory=lambda: torch.zeros(0))
    beyond_chance: tuple[bool, ...] = ()
    findings: dict[str, Any] = field(default_factory=dict)
    rule: str = ""
    refused: str = ""
    tried: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return everything but the images."""
        hidden = ("images", "values", "beyond_chance")
        return {name: value for name, value in vars(self).items() if name not in hidden}


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
    attack: Attack
    knowledge: Knowledge
    seed: int = 0
    subsets: int = 500
    releases: int = 16
    device: str = "cpu"
    certify: bool = True
    kinks: int = 60


@dataclass(frozen=True)
class Defended:
    """A defended network.

    released: with the weights that may be released.
    before: with those before the last hook.
    secret: what the owner keeps.
    state, facts, training: how it was trained.
    """

    released: Network
    before: Network
    secret: Secret
    state: TrainingState
    facts: Facts
    training: Training


def release(setting: Conditions, name: str, defense: Defense, strength: float | None) -> Defended:
    """Train and defend a network.

    A defense may act on the data, on the training, and on the weights, in this order. At the strength
    ``off`` no hook is called, so that an undefended network takes the same code.

    Raises:
        InconclusiveError: If the training diverged.
    """
    training, data, secret = setting.training, setting.split.train, Secret(0)
    level = defense.off if strength is None else strength
    active = level != defense.off
    if active:
        secret = defense.draw(level, data.shape, setting.seed, name)
        data = defense.data(data, secret) if defense.data else data
        if defense.training:
            training = defense.training(training, level, secret.seed)
    job = Job(setting.arch, data, training.config, setting.task, setting.device)
    state, facts = training.loop(job)
    if state.status == "diverged":
        raise InconclusiveError(
            f"Training with {name} diverged: there are no weights to release.",
            "Lower --lr or the strength.",
        )
    before = after = job.release(state)
    if active and defense.release:
        after = defense.release(before, level, secret)
    return Defended(after, before, secret, state, facts, training)


def run_trial(
    setting: Conditions,
    name: str = NONE,
    defense: Defense | None = None,
    strength: float | None = None,
    stage: Stage = lambda _: None,
) -> tuple[Outcome, Network, Secret]:
    """Try one defense at one strength.

    The network is attacked in every way (:func:`attackers`). Certificates are of the network as
    released, on samples as it receives them.

    Args:
        setting: What all trials share.
        name: Of the defense.
        defense: The defense, None for the undefended network.
        strength: Of the defense.
        stage: Receives what is being done.

    Returns:
        What the defense did, the network that is released, and what the owner keeps.

    Raises:
        InputError: If no attack applies.
        InconclusiveError: If the training diverged.
    """
    defense = defense or UNDEFENDED
    stage("training")
    start = time.monotonic()
    defended = release(setting, name, defense, strength)
    network, secret = defended.released, defended.secret
    trained = time.monotonic()
    handed = Released(
        checkpoints=(network, *_other_releases(setting, defended, name, defense, strength)),
        knowledge=setting.knowledge,
        attack=setting.attack,
        public_facts={
            "theta0": defended.state.theta0,
            "large": defended.training.config.init != "small",
            "weight_decay": defended.training.config.weight_decay,
            "loss": choose_loss(defended.training.config.loss, setting.task),
        },
    )
    attacks, inferring = _attacks(setting, handed, defense, secret, stage)
    stage("certificates")
    attacked = time.monotonic()
    measured = _measured(setting, network, secret)
    shift, rewrite = _shift_figures(setting, defended, defense)
    seconds = {
        "train": trained - start,
        "strategy": inferring,
        "unaware": attacks[0].seconds,
        "adaptive": sum(one.seconds for one in attacks[1:]),
        "certify": time.monotonic() - attacked,
    }
    outcome = Outcome(
        name=name,
        strength=strength,
        n=len(setting.split.train),
        changes=defense.changes,
        secret=defense.secret,
        strategy=defense.adaptive,
        shift=shift,
        rewrite=rewrite,
        attacks=attacks,
        facts=defended.facts,
        seconds={key: round(value, 3) for key, value in seconds.items()},
        theta_sha256=hashlib.sha256(save(network.theta)).hexdigest(),
        **measured,
    )
    return outcome, network, secret


def _other_releases(
    setting: Conditions, defended: Defended, name: str, defense: Defense, strength: float | None
) -> list[Network]:
    """Return further releases of the same weights, if what the defense draws anew makes them differ."""
    hook = defense.release
    if not defense.releases or hook is None or strength is None or strength == defense.off:
        return []
    seeds = [setting.seed + 7919 * k for k in range(1, setting.releases)]
    secrets = [defense.draw(strength, (), seed, name) for seed in seeds]
    return [hook(defended.before, strength, secret) for secret in secrets]


def _shift_figures(
    setting: Conditions, defended: Defended, defense: Defense
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the size of the secret shift and, if it is in the biases, the residuals of rewriting."""
    shift = defended.secret.shift
    if shift is None:
        return {}, {}
    figures = {
        "kind": REWRITTEN if defense.release else RETRAINED,
        "form": defense.shift,
        "per_pixel": float(shift.norm()) / math.sqrt(max(1, shift.numel())),
        "norm": float(shift.norm()),
    }
    if not defense.release:
        return figures, {}
    train, task = setting.split.train, setting.task
    rewrite = rewritten_certificate(defended.before, defended.released, train, task, shift)
    return figures, rewrite


def _best(attacks: Iterable[Attacked]) -> Attacked | None:
    """Return the record of the :func:`strongest`, its p-value corrected; None if no attack ran."""
    ran = {one.attacker: one for one in attacks if not one.refused}
    best = strongest({name: (one.recovered, one.p_value) for name, one in ran.items()})
    return None if best is None else ran[best[0]].replace(p_value=best[1], tried=best[2])


def _attacks(
    setting: Conditions, handed: Released, defense: Defense, secret: Secret, stage: Stage
) -> tuple[tuple[Attacked, ...], float]:
    """Run and score every attack, and measure the seconds that strategies took to adapt theirs.

    These seconds are separate, because a strategy may end in an attack that ran already. Its short tries
    would otherwise be charged to the next attack.
    """
    shape = setting.split.train.shape
    attacks, inferring = [], 0.0
    stage("attacks")
    ended = time.monotonic()
    for name, way in attackers(handed, defense.adaptive, secret, defense.release is not None):
        begun = time.monotonic()
        inferring += begun - ended
        stage(f"attack {name}")
        result = attempt(way, shape)
        seconds = time.monotonic() - begun
        if isinstance(result, str):
            empty = torch.zeros(0, 2, *shape)
            attacks.append(Attacked(name, empty, seconds=seconds, refused=result))
        else:
            findings = way.findings if isinstance(way, Adapted) else {}
            attack = _score_attack(setting, name, result)
            attacks.append(attack.replace(findings=dict(findings), seconds=seconds))
        ended = time.monotonic()
    if all(one.refused for one in attacks):
        # A setting that no attack accepts must not read as a defense that no attack gets past.
        raise InputError(f"No attack applies: {attacks[0].refused}", "Choose other settings.")
    return tuple(attacks), inferring


def _score_attack(setting: Conditions, attacker: str, result: Reconstruction) -> Attacked:
    """Count what an attack recovered, and keep its best pairs of candidate and training sample."""
    x, train = either_sign(attacker, all_candidates(result).x), setting.split.train
    settings: dict[str, Any] = {"metrics": ["ncc"], "seed": setting.seed}
    scores = score(x, train, setting.split.holdout, subsets=setting.subsets, **settings)
    matches = [(row.index, row.matches[scores.deciding]) for row in scores.per_sample]
    pairs = [(i, m) for i, m in matches if m.score is not None and m.candidate is not None]
    best = sorted(pairs, key=lambda pair: -float(pair[1].score or 0.0))[:SHOWN]
    images = [torch.stack([x[m.candidate].double(), train.x[i].double()]) for i, m in best]
    mean = 0.0 if train.mean is None else train.mean.double()
    return Attacked(
        attacker=attacker,
        images=torch.stack(images) + mean if images else torch.zeros(0, 2, *train.shape),
        recovered=scores.recovered,
        expected_by_chance=scores.expected_by_chance,
        p_value=scores.p_value,
        first_layer_residual=find_first_residual(result),
        values=torch.tensor([float(m.score or 0.0) for _, m in best]),
        beyond_chance=tuple(bool(m.recovered) for _, m in best),
        rule=scores.rule,
    )


def _measured(setting: Conditions, network: Network, secret: Secret) -> dict[str, Any]:
    """Measure accuracy, losses, KKT residuals and determined energy, on inputs as the network gets them."""
    model = network.double_module
    train, holdout = (
        samples.replace(x=secret.inputs(samples.x.double()))
        for samples in (setting.split.train, setting.split.holdout)
    )
    certificate = certificate_of(model, train, setting.task, setting.kinks)
    uniqueness: dict[str, Any] = {"determined_energy": None, "uniqueness_note": "not asked for"}
    if setting.certify:
        uniqueness = determined(model, train, certificate, setting.knowledge, secret)
    accuracy, loss = _accuracy_and_loss(model, holdout, setting.task)
    return {
        "accuracy": accuracy,
        "loss": loss,
        "train_loss": _accuracy_and_loss(model, train, setting.task)[1],
        "kkt_plain": certificate.residual_plain,
        "kkt_clarke": certificate.residual_clarke,
        "margin": certificate.margin,
        **uniqueness,
    }


def _accuracy_and_loss(model: nn.Module, data: Dataset, task: str) -> tuple[float | None, float]:
    with torch.no_grad():
        outputs = model(data.x.double())
    y = normalize_labels(data.y, task, outputs.shape[1])
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
    old, x, _, _, task, rows = pose_problem(before.copy_module(), train.x, train.y, task)
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
            KKTSet.from_samples(model, train.x[order], train.y[order], lam[order], task="binary"),
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
        part.changed(seed=seed) for part in (setting.training.config, setting.training.descent)
    )
    training = replace(setting.training, config=config, descent=descent)
    return replace(setting, training=training, attack=replace(setting.attack, seed=seed), seed=seed)
