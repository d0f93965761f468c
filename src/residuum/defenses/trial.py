"""Trials of defenses: train, release, run all attacks, score, certify.

All trials share the data, the seeds, the knowledge of the attacker and the settings of the attack. The
candidates are compared with the original training samples, without any shift, because a leak of these
samples is what counts.
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
from residuum.defenses.attackers import (
    INFORMED,
    add_negated,
    find_strongest,
    make_attackers,
    run_attacker,
)
from residuum.defenses.catalog import Defense, Secret, Training
from residuum.defenses.loops import Job, TrainingFacts
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
CERTIFIED_SAMPLES, CERTIFICATE_SECONDS = (
    4,
    3.0,
)  # samples and time limit of the uniqueness certificate
NO_KINKS = -1.0  # a kink tolerance that no neuron is within
MAX_PAIRS = 8  # pairs of images that an outcome stores
Stage = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Attacked(Record):
    """The scored result of an attack on the released weights.

    Attributes:
        attacker: Name of the attacker, as in :func:`make_attackers`.
        images: (k, 2, *shape) the best pairs of a candidate and its training sample.
        recovered: Number of recovered samples.
        expected_by_chance: Number of samples expected by chance.
        p_value: P-value of the number of recovered samples.
        first_layer_residual: Relative residual of the first layer, if the attack has one.
        seconds: Duration of the attack.
        values: (k,) score of each pair.
        beyond_chance: Whether each pair is above the chance level.
        findings: Plain values that the adapted attacker inferred.
        rule: When a sample counts as recovered, such as "ncc > 0.83".
        refused: Why there is nothing to score, "" if there is a result.
        tried: Number of attacks of which this is the strongest. The p-value is multiplied by it.
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
    """The outcome of a defense at one strength. The name "none" is the undefended network.

    Attributes:
        name: Name of the defense.
        strength: Its strength, None for the undefended network.
        n: Number of training samples.
        changes: What the defense changes.
        secret: What stays with the owner.
        strategy: Strategy of the adapted attacker, "" for the undefended network.
        shift: The shift of the inputs: its kind, its form, its size per pixel and its norm.
        accuracy: Accuracy on held-out samples as the defended network receives them.
        loss: Loss on these samples.
        train_loss: Loss on the training samples.
        kkt_plain: Plain KKT residual at the training samples as the network receives them, relative.
        kkt_clarke: Clarke KKT residual at these samples, relative.
        margin: Margin at these samples.
        rewrite: The KKT residuals of bias rewriting.
        determined_energy: Like ``determined_at_least``, the smallest share that was found.
        uniqueness_note: How the two shares were computed, or why they were not.
        attacks: Results of all attackers, the unaware one first and those who know the secret last.
        seconds: Duration of each stage.
        training_facts: Facts about the training, as plain values.
        theta_sha256: Hash of the released weights.
        determined_at_least: Mean share of the energy of a training sample that every other training set
            with the same patterns and labels shares, a proved bound (:class:`residuum.records.Uniqueness`).
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
    training_facts: dict[str, Any] = field(default_factory=dict)
    theta_sha256: str = ""
    determined_at_least: float | None = None

    @property
    def label(self) -> str:
        """The defense as NAME:STRENGTH."""
        return self.name if self.strength is None else f"{self.name}:{self.strength:g}"

    @property
    def unaware(self) -> Attacked:
        """The result of the attacker who does not know of the defense."""
        return self.attacks[0]

    @property
    def adaptive(self) -> Attacked | None:
        """The strongest attack of an attacker who knows the defense, None if all were refused."""
        return _find_best(result for result in self.attacks if result.attacker not in INFORMED)

    @property
    def informed(self) -> Attacked | None:
        """The strongest attack of an attacker who knows the secret too, None if there is no secret."""
        has_run = any(result.attacker in INFORMED and not result.refused for result in self.attacks)
        return _find_best(self.attacks) if has_run else None

    def to_json(self) -> dict[str, Any]:
        """Return the published form, without images and without the secret."""
        names = {"training_facts": "facts"}  # whose key in the file differs
        skipped = ("attacks", "strength", "name")
        rows = {names.get(k, k): v for k, v in vars(self).items() if k not in skipped}
        strongest = {"adaptive": self.adaptive, "told": self.informed}
        return {
            "defense": self.label,
            "name": self.name,
            "strength": "inf" if self.strength == math.inf else self.strength,
            **rows,
            "unaware": self.unaware.to_json(),
            **{
                key: None if result is None else result.to_json()
                for key, result in strongest.items()
            },
            "attacks": [result.to_json() for result in self.attacks],
        }


@dataclass(frozen=True)
class Conditions:
    """The conditions that all trials share.

    Attributes:
        arch: Architecture of the network.
        split: Training and held-out samples.
        task: "binary", "multiclass" or "regression".
        training: How networks are trained.
        attack: The attack that the stationarity attackers run.
        knowledge: What the attacker knows.
        seed: Seed of weights, attack and secret.
        subsets: Number of held-out subsets, to calibrate the scores.
        releases: Number of releases that an attacker collects if they differ.
        device: Where to compute.
        certify: Whether to compute what other training sets share with the samples.
        kinks: Maximal number of kinks that are freed for the Clarke residual.
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

    Attributes:
        released: The network that may be released.
        before: The network before the hook on the weights.
        secret: The secret of the owner.
        state: The final state of the training.
        training_facts: Facts about the training, as plain values.
        training: The training.
    """

    released: Network
    before: Network
    secret: Secret
    state: TrainingState
    training_facts: TrainingFacts
    training: Training


def release(
    conditions: Conditions, name: str, defense: Defense, strength: float | None
) -> Defended:
    """Train and defend a network.

    A defense acts on the data, on the training, and on the weights, in this order. At the strength
    ``off`` no hook is called, so an undefended network runs through the same code.

    Args:
        conditions: The conditions of the trial.
        name: Name of the defense.
        defense: The defense.
        strength: Its strength, None for ``off``.

    Returns:
        The defended network.

    Raises:
        InconclusiveError: If the training diverged.
    """
    training, data, secret = conditions.training, conditions.split.train, Secret(0)
    level = defense.off if strength is None else strength
    active = level != defense.off
    if active:
        secret = defense.draw(level, data.shape, conditions.seed, name)
        data = defense.data(data, secret) if defense.data else data
        if defense.training:
            training = defense.training(training, level, secret.seed)
    job = Job(conditions.arch, data, training.config, conditions.task, conditions.device)
    state, training_facts = training.loop(job)
    if state.status == "diverged":
        raise InconclusiveError(
            f"The training with {name} diverged, so there are no weights to release.",
            "Lower --lr or the strength.",
        )
    before = after = job.release(state)
    if active and defense.release:
        after = defense.release(before, level, secret)
    return Defended(after, before, secret, state, training_facts, training)


def run_trial(
    conditions: Conditions,
    name: str = NONE,
    defense: Defense | None = None,
    strength: float | None = None,
    stage: Stage = lambda _: None,
) -> tuple[Outcome, Network, Secret]:
    """Try a defense at one strength.

    All attackers (:func:`make_attackers`) attack the network. The certificates are computed for the
    released network, on samples as it receives them. If no attack applies, an ``InputError`` is raised,
    and if the training diverges, an ``InconclusiveError``.

    Args:
        conditions: The conditions of the trial.
        name: Name of the defense.
        defense: The defense, None for the undefended network.
        strength: Its strength.
        stage: Receives the name of each stage.

    Returns:
        The outcome, the network that may be released, and the secret of the owner.
    """
    defense = defense or UNDEFENDED
    stage("training")
    start = time.monotonic()
    defended = release(conditions, name, defense, strength)
    network, secret = defended.released, defended.secret
    trained = time.monotonic()
    released = Released(
        checkpoints=(network, *_other_releases(conditions, defended, name, defense, strength)),
        knowledge=conditions.knowledge,
        attack=conditions.attack,
        public_facts={
            "theta0": defended.state.theta0,
            "large": defended.training.config.init != "small",
            "weight_decay": defended.training.config.weight_decay,
            "loss": choose_loss(defended.training.config.loss, conditions.task),
        },
    )
    attacks, strategy_seconds = _run_attacks(conditions, released, defense, secret, stage)
    stage("certificates")
    attacked = time.monotonic()
    figures = _measure(conditions, network, secret)
    shift, rewrite = _measure_shift(conditions, defended, defense)
    seconds = {
        "train": trained - start,
        "strategy": strategy_seconds,
        "unaware": attacks[0].seconds,
        "adaptive": sum(result.seconds for result in attacks[1:]),
        "certify": time.monotonic() - attacked,
    }
    outcome = Outcome(
        name=name,
        strength=strength,
        n=len(conditions.split.train),
        changes=defense.changes,
        secret=defense.secret,
        strategy=defense.adaptive,
        shift=shift,
        rewrite=rewrite,
        attacks=attacks,
        training_facts=defended.training_facts,
        seconds={key: round(value, 3) for key, value in seconds.items()},
        theta_sha256=hashlib.sha256(save(network.theta)).hexdigest(),
        **figures,
    )
    return outcome, network, secret


def _other_releases(
    conditions: Conditions, defended: Defended, name: str, defense: Defense, strength: float | None
) -> list[Network]:
    """Return further releases of the same weights, if the defense makes releases differ."""
    hook = defense.release
    if not defense.releases_differ or hook is None or strength is None or strength == defense.off:
        return []
    seeds = [conditions.seed + 7919 * k for k in range(1, conditions.releases)]
    secrets = [defense.draw(strength, (), seed, name) for seed in seeds]
    return [hook(defended.before, strength, secret) for secret in secrets]


def _measure_shift(
    conditions: Conditions, defended: Defended, defense: Defense
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the size of the secret shift, and the residuals of rewriting if it is in the biases."""
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
    train, task = conditions.split.train, conditions.task
    rewrite = certify_rewriting(defended.before, defended.released, train, task, shift)
    return figures, rewrite


def _find_best(attacks: Iterable[Attacked]) -> Attacked | None:
    """Return the strongest attack with its corrected p-value, None if no attack was run."""
    results = {result.attacker: result for result in attacks if not result.refused}
    best = find_strongest(
        {name: (result.recovered, result.p_value) for name, result in results.items()}
    )
    return None if best is None else results[best[0]].replace(p_value=best[1], tried=best[2])


def _run_attacks(
    conditions: Conditions, released: Released, defense: Defense, secret: Secret, stage: Stage
) -> tuple[tuple[Attacked, ...], float]:
    """Run and score every attack. Return the results, and the seconds that the strategies took."""
    # A strategy can end in an attack that was already run. If its seconds were not separate, its short
    # trials would count for the next attack.
    shape = conditions.split.train.shape
    attacks, strategy_seconds = [], 0.0
    stage("attacks")
    end = time.monotonic()
    in_biases = defense.release is not None
    for name, attacker in make_attackers(released, defense.adaptive, secret, in_biases):
        start = time.monotonic()
        strategy_seconds += start - end
        stage(f"attack {name}")
        result = run_attacker(attacker, shape)
        seconds = time.monotonic() - start
        if isinstance(result, str):
            empty = torch.zeros(0, 2, *shape)
            attacks.append(Attacked(name, empty, seconds=seconds, refused=result))
        else:
            findings = attacker.findings if isinstance(attacker, Adapted) else {}
            attack = _score_attack(conditions, name, result)
            attacks.append(attack.replace(findings=dict(findings), seconds=seconds))
        end = time.monotonic()
    if all(attack.refused for attack in attacks):
        # Settings that no attack accepts must not look like a defense that stops all attacks.
        raise InputError(f"No attack applies: {attacks[0].refused}", "Choose other settings.")
    return tuple(attacks), strategy_seconds


def _score_attack(conditions: Conditions, attacker: str, result: Reconstruction) -> Attacked:
    """Count the recovered samples, and store the best pairs of a candidate and a training sample."""
    x, train = add_negated(attacker, all_candidates(result).x), conditions.split.train
    settings: dict[str, Any] = {"metrics": ["ncc"], "seed": conditions.seed}
    scores = score(x, train, conditions.split.holdout, subsets=conditions.subsets, **settings)
    matches = [(row.index, row.matches[scores.deciding]) for row in scores.per_sample]
    pairs = [(i, m) for i, m in matches if m.score is not None and m.candidate is not None]
    best = sorted(pairs, key=lambda pair: -float(pair[1].score or 0.0))[:MAX_PAIRS]
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


def _measure(conditions: Conditions, network: Network, secret: Secret) -> dict[str, Any]:
    """Measure accuracy, losses, KKT residuals and determined energy on samples as the network gets them."""
    model = network.double_module
    train, holdout = (
        samples.replace(x=secret.inputs(samples.x.double()))
        for samples in (conditions.split.train, conditions.split.holdout)
    )
    certificate = certify_network(model, train, conditions.task, conditions.kinks)
    uniqueness: dict[str, Any] = {"determined_energy": None, "uniqueness_note": "not requested"}
    if conditions.certify:
        uniqueness = measure_determined_energy(
            model, train, certificate, conditions.knowledge, secret
        )
    accuracy, loss = _accuracy_and_loss(model, holdout, conditions.task)
    return {
        "accuracy": accuracy,
        "loss": loss,
        "train_loss": _accuracy_and_loss(model, train, conditions.task)[1],
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


def certify_network(model: nn.Module, data: Dataset, task: str, kinks: int = 0) -> Certificate:
    """Compute the KKT certificate of a network at samples.

    Args:
        model: The network.
        data: The samples.
        task: The task, or "auto".
        kinks: Maximal number of kinks to free. With 0, kinks are not searched.

    Returns:
        The certificate.
    """
    options: dict[str, Any] = {"kink_limit": kinks} if kinks else {"kink_tolerance": NO_KINKS}
    return certify(model, data.x, data.y, task=task, **options)


def measure_rewrite_residuals(
    before: nn.Module, after: nn.Module, x: Tensor, y: Tensor, lam: Tensor, rows: Rows, u: Tensor
) -> dict[str, float]:
    """Measure the KKT residuals after the biases were rewritten, relative to the norm of the weights before.

    If the network is a KKT point, the residual at the original multipliers has a closed form. It is
    b u^T in the weight of the first layer, W u in its bias, and zero elsewhere. The relative norm is
    sqrt(|b|^2 |u|^2 + |W u|^2) / |theta|. Refitted multipliers give a smaller residual.

    Args:
        before: The network before rewriting.
        after: The network after rewriting.
        x: Samples as the network before receives them.
        y: Labels.
        lam: Multipliers of the network before.
        rows: Rows of the residual, which combine with the multipliers.
        u: The shift.

    Returns:
        The residual at the original multipliers, its closed form, the refitted residual, and the residual
        of the network before.
    """
    theta, z = parameters(before), x + u
    size = norm(theta)
    weight, bias = theta["layers.0.weight"], theta["layers.0.bias"]
    flat = u.flatten().to(weight)
    original = norm(residual(after, parameters(after), z, rows.combine(lam, len(z))))
    squares = bias.square().sum() * flat.square().sum() + (weight @ flat).square().sum()
    closed = math.sqrt(float(squares))
    refitted = certify_network(after, Dataset(z, y), "auto")
    return {
        "original_multipliers": original / size,
        "closed_form": closed / size,
        "refitted": refitted.eps / size,
        "before": norm(residual(before, theta, x, rows.combine(lam, len(x)))) / size,
    }


def certify_rewriting(
    before: Network, after: Network, train: Dataset, task: str, shift: Tensor
) -> dict[str, float]:
    """Measure the KKT residuals of rewritten biases at the best multipliers of the network before.

    Args:
        before: The network before rewriting.
        after: The network after rewriting.
        train: Training samples as the network before receives them.
        task: The task.
        shift: The shift.

    Returns:
        The residuals of :func:`measure_rewrite_residuals`.
    """
    old, x, _, _, task, rows = pose_problem(before.copy_module(), train.x, train.y, task)
    lam = fit_multipliers(old, x, rows, free=task == "regression")[0]
    new = after.copy_module(torch.float64).requires_grad_(False)
    return measure_rewrite_residuals(old, new, x, train.y, lam, rows, shift)


def measure_determined_energy(
    model: nn.Module, train: Dataset, certificate: Certificate, knowledge: Knowledge, secret: Secret
) -> dict[str, Any]:
    """Measure what every other training set of the same weights shares with the heaviest samples.

    Args:
        model: The network.
        train: Training samples as the network receives them.
        certificate: The KKT certificate of the network, with the multipliers.
        knowledge: What the attacker knows, with the range of the samples.
        secret: The secret of the owner, with the shift of the samples.

    Returns:
        The mean shares of the energy, proved and smallest found, with a note. If they cannot be computed,
        the note says why.
    """
    if certificate.task != "binary":
        return {"determined_energy": None, "uniqueness_note": "computed for one output only"}
    lam = certificate.multipliers
    order = lam.argsort(descending=True)
    box = knowledge.box(train.x[0].double())  # of samples without the shift
    try:
        unique = uniqueness(
            KKTSet.from_samples(model, train.x[order], train.y[order], lam[order], task="binary"),
            box=box and (secret.inputs(box[0]), secret.inputs(box[1])),
            samples=CERTIFIED_SAMPLES,
            seconds=CERTIFICATE_SECONDS,
        )
    except ResiduumError as problem:
        return {"determined_energy": None, "uniqueness_note": f"not computed: {problem.message}"}
    return {
        "determined_energy": float(unique.determined_energy.mean()),
        "determined_at_least": float(unique.determined_at_least.mean()),
        "uniqueness_note": f"mean of {len(unique)} samples, heaviest first, {unique.share:.0%} of their "
        "weight",
    }


def with_seed(conditions: Conditions, seed: int) -> Conditions:
    """Return the same conditions with another seed.

    Args:
        conditions: The conditions.
        seed: Seed of weights, attack and secret.

    Returns:
        The new conditions.
    """
    training = replace(
        conditions.training,
        config=conditions.training.config.changed(seed=seed),
        descent=conditions.training.descent.changed(seed=seed),
    )
    attack = replace(conditions.attack, seed=seed)
    return replace(conditions, training=training, attack=attack, seed=seed)
