"""Trials of defenses: train a network, defend it, run all attacks on it, and score the attacks.

All trials share the data, the seeds, the knowledge of the attacker and the settings of the attack. Some
defenses add a shift to the training samples. The candidates of an attack are compared with the original
samples without this shift, because a leak of the original samples is what counts.
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
# A uniqueness certificate proves how much every other training set that fits the weights must share with a
# sample. These are the number of training samples for which it is computed, and the time limit in seconds.
CERTIFIED_SAMPLES, CERTIFICATE_SECONDS = 4, 3.0
# A kink is an input of a ReLU that is zero within a tolerance. With a negative tolerance, no input counts
# as a kink.
NO_KINKS = -1.0
# Maximal number of stored pairs of a reconstruction and the training sample that it matches.
MAX_PAIRS = 8
Stage = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Attacked(Record):
    """The result of one attack on the weights that a defense protects, compared with the training samples.

    Attributes:
        attacker: Name of the attacker, as in :func:`make_attackers`.
        images: (k, 2, *shape) the k best matches, each a candidate and its training sample.
        recovered: Number of recovered training samples.
        expected_by_chance: Number of recovered training samples expected by chance.
        p_value: P-value of the number of recovered training samples.
        first_layer_residual: Relative residual of the first layer, None if the attack has no residual.
        seconds: Duration of the attack.
        values: (k,) score of each match in ``images``.
        beyond_chance: For each match in ``images``, whether its score is above the chance level.
        findings: What an attacker who knows the defense inferred, such as the shift, as plain values.
        rule: When a training sample counts as recovered, such as "ncc > 0.83".
        refused: Why the attack has no candidates to score, "" if the attack has a result.
        tried: Number of attacks among which this attack is the strongest. The p-value is multiplied by
            this number.
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
        """Return all attributes as plain values, except the images and scores of the best matches."""
        omitted = ("images", "values", "beyond_chance")
        return {name: value for name, value in vars(self).items() if name not in omitted}


@dataclass(frozen=True, eq=False)
class Outcome(Record):
    """The outcome of a defense at one strength.

    Attributes:
        name: Name of the defense, "none" for the undefended network.
        strength: Strength of the defense, None for the undefended network.
        n: Number of training samples.
        changes: What the defense changes.
        secret: What the owner keeps secret, as text.
        strategy: Strategy of the attacker who knows the defense, "" for the undefended network.
        shift: Kind, form, size per pixel and norm of the shift of the inputs. Empty without a shift.
        accuracy: Accuracy on held-out samples, with the shift if there is one.
        loss: Loss on held-out samples, with the shift if there is one.
        train_loss: Loss on the training samples, with the shift if there is one.
        kkt_plain: Plain KKT residual at the training samples, relative to the norm of the weights.
        kkt_clarke: KKT residual at the training samples if a neuron with a kink at a sample counts partly
            (Clarke subgradients), relative to the norm of the weights.
        margin: Margin of the network at the training samples.
        rewrite: KKT residuals of the network with rewritten biases, empty for other defenses.
        determined_energy: Mean share of the energy (squared norm) of a training sample that the farthest
            other training set shares, among the training sets that a search found. The smallest share of all
            other training sets is between this number and ``determined_at_least``.
        uniqueness_note: How ``determined_at_least`` and ``determined_energy`` were computed, or why not.
        attacks: Results of all attackers: first the unaware one, last those who know the secret.
        seconds: Duration of each stage of the trial.
        training_facts: Facts about the training, as plain values.
        theta_sha256: Hash of the released weights.
        determined_at_least: Mean share of the energy (squared norm) of a training sample that every other
            training set with the same activation patterns and labels shares. This is a proved lower bound
            (:class:`residuum.records.Uniqueness`).
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
        """Text of the form NAME:STRENGTH, such as "noise:0.5", or "none" for the undefended network."""
        return self.name if self.strength is None else f"{self.name}:{self.strength:g}"

    @property
    def unaware(self) -> Attacked:
        """The result of the attacker who does not know of the defense."""
        return self.attacks[0]

    @property
    def adaptive(self) -> Attacked | None:
        """The strongest attack of an attacker who knows the defense, None if all attacks were refused."""
        return _find_best(result for result in self.attacks if result.attacker not in INFORMED)

    @property
    def informed(self) -> Attacked | None:
        """The strongest attack of an attacker who also knows the secret, None if there is no secret."""
        has_informed_result = any(
            result.attacker in INFORMED and not result.refused for result in self.attacks
        )
        return _find_best(self.attacks) if has_informed_result else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``result.json``, without images and without the secret of the owner."""
        json_keys = {
            "training_facts": "facts"
        }  # keys of attributes that have another name in the JSON file
        attributes_added_below = ("attacks", "strength", "name")
        plain_values = {
            json_keys.get(k, k): v for k, v in vars(self).items() if k not in attributes_added_below
        }
        strongest_attacks = {"adaptive": self.adaptive, "told": self.informed}
        return {
            "defense": self.label,
            "name": self.name,
            "strength": "inf" if self.strength == math.inf else self.strength,
            **plain_values,
            "unaware": self.unaware.to_json(),
            **{
                key: None if result is None else result.to_json()
                for key, result in strongest_attacks.items()
            },
            "attacks": [result.to_json() for result in self.attacks],
        }


@dataclass(frozen=True)
class Conditions:
    """The data and settings that all tests of defenses share.

    Attributes:
        arch: Architecture of the network.
        split: Training and held-out samples.
        task: "binary", "multiclass" or "regression".
        training: How the networks are trained.
        attack: The stationarity attack, with its settings.
        knowledge: What the attacker knows.
        seed: Seed of the initial weights, the attack and the secret of the owner.
        subsets: Number of random held-out subsets, from which chance levels are estimated.
        releases: Number of releases that an attacker collects, if the defense adds new noise to the same
            weights in every release.
        device: Device to compute on.
        certify: Whether to compute how much every other training set that fits the weights shares with the
            samples.
        kinks: Maximal number of kinks in the Clarke KKT residual. A kink is a neuron whose input is zero at a
            sample. Its derivative may have any value from 0 to 1.
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
    """A defended network, with what its owner knows.

    Attributes:
        released: The network that may be released.
        before: The trained network before the defense changed its weights.
        secret: The secret of the owner.
        state: The final state of the training.
        training_facts: Facts about the training, as plain values.
        training: How the network was trained.
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
    """Train a network with a defense.

    A defense acts on the data, on the training, and on the weights, in this order. At the strength
    ``defense.off``, the defense does nothing. So an undefended network runs through the same code.

    Args:
        conditions: The data and settings under which the defense is tested.
        name: Name of the defense.
        defense: The defense.
        strength: Strength of the defense, None for ``defense.off``.

    Returns:
        The defended network.

    Raises:
        InconclusiveError: If the training diverged.
    """
    training, data, secret = conditions.training, conditions.split.train, Secret(0)
    used_strength = defense.off if strength is None else strength
    is_active = used_strength != defense.off
    if is_active:
        secret = defense.draw(used_strength, data.shape, conditions.seed, name)
        data = defense.data(data, secret) if defense.data else data
        if defense.training:
            training = defense.training(training, used_strength, secret.seed)
    training_job = Job(conditions.arch, data, training.config, conditions.task, conditions.device)
    state, training_facts = training.loop(training_job)
    if state.status == "diverged":
        raise InconclusiveError(
            f"A defense is tested on the network that it trained; the training with {name} diverged, so "
            f"there is no network.",
            "Lower --lr or the strength of the defense.",
        )
    trained_network = released_network = training_job.release(state)
    if is_active and defense.release:
        released_network = defense.release(trained_network, used_strength, secret)
    return Defended(released_network, trained_network, secret, state, training_facts, training)


def run_trial(
    conditions: Conditions,
    name: str = NONE,
    defense: Defense | None = None,
    strength: float | None = None,
    stage: Stage = lambda _: None,
) -> tuple[Outcome, Network, Secret]:
    """Try a defense at one strength.

    All attackers (:func:`make_attackers`) attack the released network. The KKT residuals of the released
    network are measured at the samples with the shift of the defense. If no attack applies, an
    ``InputError`` is raised. If the training diverges, an ``InconclusiveError`` is raised.

    Args:
        conditions: The data and settings under which the defense is tested.
        name: Name of the defense.
        defense: The defense, None for the undefended network.
        strength: Strength of the defense, None for the undefended network.
        stage: Function that receives the name of each stage of the trial when it begins.

    Returns:
        The outcome, the network that may be released, and the secret of the owner.
    """
    defense = defense or UNDEFENDED
    stage("training")
    start_time = time.monotonic()
    defended = release(conditions, name, defense, strength)
    network, secret = defended.released, defended.secret
    training_end = time.monotonic()
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
    attacks_end = time.monotonic()
    measurements = _measure(conditions, network, secret)
    shift_facts, rewrite_residuals = _measure_shift(conditions, defended, defense)
    seconds = {
        "train": training_end - start_time,
        "strategy": strategy_seconds,
        "unaware": attacks[0].seconds,
        "adaptive": sum(result.seconds for result in attacks[1:]),
        "certify": time.monotonic() - attacks_end,
    }
    outcome = Outcome(
        name=name,
        strength=strength,
        n=len(conditions.split.train),
        changes=defense.changes,
        secret=defense.secret,
        strategy=defense.adaptive,
        shift=shift_facts,
        rewrite=rewrite_residuals,
        attacks=attacks,
        training_facts=defended.training_facts,
        seconds={key: round(value, 3) for key, value in seconds.items()},
        theta_sha256=hashlib.sha256(save(network.theta)).hexdigest(),
        **measurements,
    )
    return outcome, network, secret


def _other_releases(
    conditions: Conditions, defended: Defended, name: str, defense: Defense, strength: float | None
) -> list[Network]:
    """Return further noisy copies of the same trained weights, if the defense adds new noise each time."""
    change_weights = defense.release
    if (
        not defense.releases_differ
        or change_weights is None
        or strength is None
        or strength == defense.off
    ):
        return []
    seeds = [conditions.seed + 7919 * k for k in range(1, conditions.releases)]
    secrets = [defense.draw(strength, (), seed, name) for seed in seeds]
    return [change_weights(defended.before, strength, secret) for secret in secrets]


def _measure_shift(
    conditions: Conditions, defended: Defended, defense: Defense
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the kind and size of the secret shift of a defense, and KKT residuals of the defended network.

    The residuals are measured only if the defense rewrote the shift into the biases. Otherwise the second
    dictionary is empty. Without a shift, both dictionaries are empty.
    """
    shift = defended.secret.shift
    if shift is None:
        return {}, {}
    shift_facts = {
        "kind": REWRITTEN if defense.release else RETRAINED,
        "form": defense.shift,
        "per_pixel": float(shift.norm()) / math.sqrt(max(1, shift.numel())),
        "norm": float(shift.norm()),
    }
    if not defense.release:
        return shift_facts, {}
    train, task = conditions.split.train, conditions.task
    rewrite_residuals = certify_rewriting(defended.before, defended.released, train, task, shift)
    return shift_facts, rewrite_residuals


def _find_best(attacks: Iterable[Attacked]) -> Attacked | None:
    """Find the strongest attack. Return it with a p-value that is corrected for the number of attacks."""
    result_of_attacker = {result.attacker: result for result in attacks if not result.refused}
    strongest = find_strongest(
        {name: (result.recovered, result.p_value) for name, result in result_of_attacker.items()}
    )
    return (
        None
        if strongest is None
        else result_of_attacker[strongest[0]].replace(p_value=strongest[1], tried=strongest[2])
    )


def _run_attacks(
    conditions: Conditions, released: Released, defense: Defense, secret: Secret, stage: Stage
) -> tuple[tuple[Attacked, ...], float]:
    """Run every attack on a defended network, and count the samples that each recovers.

    Args:
        conditions: The data and settings under which the defense is tested.
        released: The defended network, with what is public about its training.
        defense: The defense.
        secret: The secret of the owner.
        stage: Function that receives the name of each attack when the attack begins.

    Returns:
        The results, and the seconds in which the strategies against the defense prepared the attacks.

    Raises:
        InputError: If no attack can run.
    """
    shape = conditions.split.train.shape
    attacks, strategy_seconds = [], 0.0
    stage("attacks")
    previous_end = time.monotonic()
    in_biases = defense.release is not None
    for name, attacker in make_attackers(released, defense.adaptive, secret, in_biases):
        attack_start = time.monotonic()
        strategy_seconds += attack_start - previous_end
        stage(f"attack {name}")
        result_or_reason = run_attacker(attacker, shape)
        seconds = time.monotonic() - attack_start
        if isinstance(result_or_reason, str):
            no_images = torch.zeros(0, 2, *shape)
            attacks.append(Attacked(name, no_images, seconds=seconds, refused=result_or_reason))
        else:
            findings = attacker.findings if isinstance(attacker, Adapted) else {}
            attacked = _score_attack(conditions, name, result_or_reason)
            attacks.append(attacked.replace(findings=dict(findings), seconds=seconds))
        previous_end = time.monotonic()
    if all(attacked.refused for attacked in attacks):
        # If no attack can run, raise an error. Otherwise the defense would look perfect.
        raise InputError(
            f"At least one attack must apply to the network. No attack applies: {attacks[0].refused}",
            "Choose another architecture, or other attacks.",
        )
    return tuple(attacks), strategy_seconds


def _score_attack(conditions: Conditions, attacker: str, result: Reconstruction) -> Attacked:
    """Count the training samples that an attack recovered, and store its best matches."""
    x, train = add_negated(attacker, all_candidates(result).x), conditions.split.train
    settings: dict[str, Any] = {"metrics": ["ncc"], "seed": conditions.seed}
    scores = score(x, train, conditions.split.holdout, subsets=conditions.subsets, **settings)
    best_match_of_sample = [(row.index, row.matches[scores.deciding]) for row in scores.per_sample]
    matched_pairs = [
        (i, m) for i, m in best_match_of_sample if m.score is not None and m.candidate is not None
    ]
    best_pairs = sorted(matched_pairs, key=lambda pair: -float(pair[1].score or 0.0))[:MAX_PAIRS]
    images = [torch.stack([x[m.candidate].double(), train.x[i].double()]) for i, m in best_pairs]
    data_mean = 0.0 if train.mean is None else train.mean.double()
    return Attacked(
        attacker=attacker,
        images=torch.stack(images) + data_mean if images else torch.zeros(0, 2, *train.shape),
        recovered=scores.recovered,
        expected_by_chance=scores.expected_by_chance,
        p_value=scores.p_value,
        first_layer_residual=find_first_residual(result),
        values=torch.tensor([float(m.score or 0.0) for _, m in best_pairs]),
        beyond_chance=tuple(bool(m.recovered) for _, m in best_pairs),
        rule=scores.rule,
    )


def _measure(conditions: Conditions, network: Network, secret: Secret) -> dict[str, Any]:
    """Return accuracy, losses and KKT residuals of a network at samples with the defense's secret shift.

    If the conditions ask for it, also return how much of the samples every other training set must share.
    """
    model = network.double_module
    train, holdout = (
        samples.replace(x=secret.inputs(samples.x.double()))
        for samples in (conditions.split.train, conditions.split.holdout)
    )
    certificate = certify_network(model, train, conditions.task, conditions.kinks)
    shared_energy: dict[str, Any] = {"determined_energy": None, "uniqueness_note": "not requested"}
    if conditions.certify:
        shared_energy = measure_determined_energy(
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
        **shared_energy,
    }


def _accuracy_and_loss(model: nn.Module, data: Dataset, task: str) -> tuple[float | None, float]:
    with torch.no_grad():
        outputs = model(data.x.double())
    normalized_labels = normalize_labels(data.y, task, outputs.shape[1])
    loss = float(LOSSES[choose_loss("", task)](outputs, normalized_labels))
    return None if task == "regression" else accuracy(outputs, normalized_labels, task), loss


def certify_network(model: nn.Module, data: Dataset, task: str, kinks: int = 0) -> Certificate:
    """Measure how exactly samples solve the KKT equation (of margin maximization) for a network.

    Args:
        model: The network.
        data: The samples.
        task: "binary", "multiclass", "regression", or "auto" to infer the task from the outputs.
        kinks: Maximal number of kinks. A kink is a neuron whose input is zero at a sample. Its derivative
            may have any value from 0 to 1. With 0, no neuron is treated as a kink.

    Returns:
        The KKT certificate: residuals, margins and multipliers of the network at the samples.
    """
    options: dict[str, Any] = {"kink_limit": kinks} if kinks else {"kink_tolerance": NO_KINKS}
    return certify(model, data.x, data.y, task=task, **options)


def measure_rewrite_residuals(
    before: nn.Module, after: nn.Module, x: Tensor, y: Tensor, lam: Tensor, rows: Rows, u: Tensor
) -> dict[str, float]:
    """Measure the errors in the KKT equation after the biases were rewritten for a shift u of the inputs.

    The first layer has the weights W and the biases b. Rewriting replaces b by b - W u. If the network, with
    the weights theta, was a KKT point, the residual of the rewritten network at the original multipliers has
    a closed form. The residual is b u^T in W, W u in b, and zero in the other layers. The relative norm is
    sqrt(|b|^2 |u|^2 + |W u|^2) / |theta|. Refitted multipliers give a smaller residual.

    Args:
        before: The network before its biases were rewritten.
        after: The network with rewritten biases.
        x: Samples without the shift, which the network ``before`` receives.
        y: Labels of the samples.
        lam: Multipliers of the samples for the network ``before``.
        rows: The terms of the weighted sum of gradients. Each term has the index of its sample and the
            weights of the outputs whose gradient is taken.
        u: Shift of the inputs.

    Returns:
        Residuals relative to the norm of theta, by name: after rewriting at the original multipliers, the
        closed form of this residual, after rewriting at refitted multipliers, and before rewriting.
    """
    theta, z = parameters(before), x + u
    theta_norm = norm(theta)
    weight, bias = theta["layers.0.weight"], theta["layers.0.bias"]
    flat_shift = u.flatten().to(weight)
    original_residual = norm(residual(after, parameters(after), z, rows.combine(lam, len(z))))
    squared_norm = (
        bias.square().sum() * flat_shift.square().sum() + (weight @ flat_shift).square().sum()
    )
    closed_form = math.sqrt(float(squared_norm))
    refitted_certificate = certify_network(after, Dataset(z, y), "auto")
    return {
        "original_multipliers": original_residual / theta_norm,
        "closed_form": closed_form / theta_norm,
        "refitted": refitted_certificate.eps / theta_norm,
        "before": norm(residual(before, theta, x, rows.combine(lam, len(x)))) / theta_norm,
    }


def certify_rewriting(
    before: Network, after: Network, train: Dataset, task: str, shift: Tensor
) -> dict[str, float]:
    """Measure how rewriting the biases of a network changes its errors in the KKT equation.

    Args:
        before: The network before its biases were rewritten.
        after: The network with rewritten biases.
        train: Training samples without the shift, which the network ``before`` receives.
        task: "binary", "multiclass" or "regression".
        shift: Shift of the inputs, which the rewritten biases undo.

    Returns:
        The residuals of :func:`measure_rewrite_residuals`.
    """
    old_module, x, _, _, task, rows = pose_problem(before.copy_module(), train.x, train.y, task)
    multipliers = fit_multipliers(old_module, x, rows, free=task == "regression")[0]
    new_module = after.copy_module(torch.float64).requires_grad_(False)
    return measure_rewrite_residuals(old_module, new_module, x, train.y, multipliers, rows, shift)


def measure_determined_energy(
    model: nn.Module, train: Dataset, certificate: Certificate, knowledge: Knowledge, secret: Secret
) -> dict[str, Any]:
    """Measure how much every other training set that fits the weights shares with the training samples.

    Only the ``CERTIFIED_SAMPLES`` samples with the largest multipliers are measured.

    Args:
        model: The network.
        train: Training samples as the network receives them, with the shift of the defense.
        certificate: The KKT certificate of the network, with the multipliers of the samples.
        knowledge: What the attacker knows, with the range of the pixel values.
        secret: The secret of the owner, with the shift of the samples.

    Returns:
        Two mean shares of the energy (squared norm) of a sample, and a note. ``determined_at_least`` is a
        proved lower bound on the share that every other training set has. ``determined_energy`` is the
        smallest share that a search found. If the shares cannot be computed, the note says why.
    """
    if certificate.task != "binary":
        return {
            "determined_energy": None,
            "uniqueness_note": "not computed: only networks with one output are certified",
        }
    multipliers = certificate.multipliers
    order_by_multiplier = multipliers.argsort(descending=True)
    # Compute the lowest and the highest pixel values without the shift that the defense adds to the inputs.
    pixel_bounds = knowledge.box(train.x[0].double())
    try:
        uniqueness_certificate = uniqueness(
            KKTSet.from_samples(
                model,
                train.x[order_by_multiplier],
                train.y[order_by_multiplier],
                multipliers[order_by_multiplier],
                task="binary",
            ),
            box=pixel_bounds and (secret.inputs(pixel_bounds[0]), secret.inputs(pixel_bounds[1])),
            samples=CERTIFIED_SAMPLES,
            seconds=CERTIFICATE_SECONDS,
        )
    except ResiduumError as problem:
        return {"determined_energy": None, "uniqueness_note": f"not computed: {problem.message}"}
    return {
        "determined_energy": float(uniqueness_certificate.determined_energy.mean()),
        "determined_at_least": float(uniqueness_certificate.determined_at_least.mean()),
        "uniqueness_note": f"mean of the {len(uniqueness_certificate)} samples with the largest "
        "multipliers, compared with images that take over at least "
        f"{uniqueness_certificate.share:.0%} of the multiplier of a sample",
    }


def with_seed(conditions: Conditions, seed: int) -> Conditions:
    """Return the same data and settings with another seed.

    Args:
        conditions: The conditions of the trials.
        seed: Seed of the initial weights, the attack and the secret of the owner.

    Returns:
        The conditions with the new seed.
    """
    training = replace(
        conditions.training,
        config=conditions.training.config.changed(seed=seed),
        descent=conditions.training.descent.changed(seed=seed),
    )
    attack = replace(conditions.attack, seed=seed)
    return replace(conditions, training=training, attack=attack, seed=seed)
