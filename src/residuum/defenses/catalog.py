"""The list of defenses, which change the training data, the training or the trained weights.

Each change is a function in an attribute of :class:`Defense`.

To add a defense, add an entry to ``DEFENSES``. The training loops of special defenses are in ``loops.py``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from residuum.attacks.defense_aware.shift import move_biases
from residuum.defenses.loops import (
    Job,
    TrainingFacts,
    train_capped,
    train_plain,
    train_privately,
    train_smoothed,
    train_without_exposed,
)
from residuum.errors import InputError, MissingExtraError, did_you_mean
from residuum.networks.network import Network
from residuum.plugins import Table
from residuum.records import Dataset
from residuum.training import TrainingConfig, TrainingState

# Number of steps and learning rate of DP-SGD, as shares of those of plain gradient descent.
DP_STEPS, DP_RATE = 0.05, 0.6


@dataclass(frozen=True)
class Secret:
    """What the owner of a defended network keeps secret.

    Attributes:
        seed: Seed of all random numbers of the defense.
        shift: (*shape) image that is added to every input of the network. None if the defense adds none.
    """

    seed: int
    shift: Tensor | None = None

    def inputs(self, x: Tensor) -> Tensor:
        """Return the samples ``x`` as the defended network receives them, with the secret shift added."""
        return x if self.shift is None else x + self.shift.to(x)

    def to_json(self) -> dict[str, Any]:
        """Return the seed and the shift as plain values, for the private folder of the owner."""
        shift = None if self.shift is None else self.shift.flatten().tolist()
        return {"seed": self.seed, "shift": shift}


@dataclass(frozen=True)
class Training:
    """The settings and the function with which a network is trained.

    Attributes:
        config: Settings of the training.
        descent: Settings that replace ``config`` if a defense needs gradient descent.
        samples: Number of training samples.
        loop: Function that trains the network of a :class:`Job`.
    """

    config: TrainingConfig
    descent: TrainingConfig
    samples: int
    loop: Callable[[Job], tuple[TrainingState, TrainingFacts]] = train_plain


@dataclass(frozen=True)
class Defense:
    """A change of the data, the training or the weights that makes reconstruction harder.

    Attributes:
        changes: What the defense changes, as text for people.
        secret: What the owner keeps secret, as text for people.
        unit: What the strength of the defense measures, as text for people.
        adaptive: Name of the strategy of an attacker who knows the defense, a key of ``ADAPTIVE``.
        data: Hook that changes the training samples.
        training: Hook that changes the training.
        release: Hook that changes the weights after training.
        shift: Kind of the secret shift of the inputs: "constant", "vector", or "" if there is no shift.
        off: Strength at which the defense does nothing.
        max_strength: Largest strength that is allowed.
        is_switch: Whether the only strengths are 0 (off) and 1 (on).
        releases_differ: Whether the defense changes the same trained weights differently in every release, as
            with random noise.
        extra: Name of the extra (the optional packages) that the defense needs, "" if it needs none.
        module: Name of a module that the extra installs, to test whether it is installed.
    """

    changes: str
    secret: str
    unit: str
    adaptive: str
    data: Callable[[Dataset, Secret], Dataset] | None = None
    training: Callable[[Training, float, int], Training] | None = None
    release: Callable[[Network, float, Secret], Network] | None = None
    shift: str = ""
    off: float = 0.0
    max_strength: float = math.inf
    is_switch: bool = False
    releases_differ: bool = False
    extra: str = ""
    module: str = ""

    @property
    def is_available(self) -> bool:
        """True if everything that the defense needs is installed."""
        return not self.module or find_spec(self.module) is not None

    @property
    def install(self) -> str:
        """Command that installs the optional packages that the defense needs, "" if it needs none."""
        return f'pip install ".[{self.extra}]"' if self.extra else ""

    def check(self, name: str, strength: float) -> None:
        """Check that the strength is valid and that the defense can run on this machine.

        Args:
            name: Name of the defense.
            strength: Strength of the defense, in its unit.

        Raises:
            InputError: If the strength is out of range.
            MissingExtraError: If an extra of the package is missing.
        """
        unbounded, rule, remedy = self.off == math.inf, "", ""
        if strength < 0 or (unbounded and strength == 0):
            rule = "above 0" if unbounded else "at least 0"
            remedy = f"Use a number above 0. A strength of {self.off:g} switches the defense off."
        elif self.is_switch and strength not in (0, 1):
            rule, remedy = "0 or 1", "Use 1."
        elif strength > self.max_strength or (strength == math.inf and not unbounded):
            is_limited = self.max_strength < math.inf
            rule = f"at most {self.max_strength:g}" if is_limited else "finite"
            remedy = (
                f"Use a number from 0 to {self.max_strength:g}."
                if is_limited
                else "Use a finite number."
            )
        if rule:
            raise InputError(
                f"The strength of the defense {name!r} ({self.unit}) must be {rule}; got {strength:g}.",
                remedy,
            )
        if not self.is_available:
            raise MissingExtraError(
                f"The defense {name!r} needs the extra {self.extra!r}, which is not installed.",
                f"Install it with: {self.install}",
            )

    def draw(self, strength: float, shape: tuple[int, ...], seed: int, name: str) -> Secret:
        """Draw the owner's secret, such as a random shift of the inputs. Each seed gives another secret.

        Args:
            strength: Strength of the defense. The secret shift is proportional to the strength.
            shape: Shape of a sample.
            seed: Seed of the trial.
            name: Name of the defense, so that two defenses have different secrets.

        Returns:
            The secret seed, with a shift if the defense has one.
        """
        digest = hashlib.sha256(f"{name}:{seed}".encode()).digest()
        secret = Secret(int.from_bytes(digest[:7], "little"))
        if not self.shift:
            return secret
        if self.shift == "constant":
            return replace(secret, shift=torch.full(shape, strength, dtype=torch.float64))
        generator = torch.Generator().manual_seed(secret.seed)
        shift = strength * torch.randn(shape, generator=generator, dtype=torch.float64)
        return replace(secret, shift=shift)


def shift_data(data: Dataset, secret: Secret) -> Dataset:
    """Add the secret shift u (an image) to all samples x.

    Args:
        data: The samples x. The stored mean of the data set does not change.
        secret: The secret of the owner, with the shift u.

    Returns:
        The shifted samples.
    """
    return data.replace(x=secret.inputs(data.x))


def rewrite_biases(network: Network, strength: float, secret: Secret) -> Network:
    """Rewrite the biases b of the first layer, which has the weights W, to b - W u for a secret shift u.

    The new network computes on the input x + u what the old network computes on x (Refael et al. 2025,
    App. D).

    Args:
        network: The network.
        strength: Not used, because the secret shift already has the right size.
        secret: The secret of the owner, with the shift u.

    Returns:
        The network with the new biases.
    """
    assert secret.shift is not None
    return move_biases(network, -secret.shift)


def add_noise(network: Network, strength: float, secret: Secret) -> Network:
    """Add Gaussian noise to every tensor of a network.

    Args:
        network: The network.
        strength: Standard deviation of the noise, relative to the root mean square of the tensor.
        secret: The secret of the owner, with the seed of the noise.

    Returns:
        The noisy network.
    """
    generator = torch.Generator().manual_seed(secret.seed)
    noisy_theta = {}
    for name, t in network.theta.items():
        gaussian_noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
        root_mean_square = t.double().norm() / math.sqrt(t.numel())
        noisy_theta[name] = t + strength * root_mean_square.to(t) * gaussian_noise
    return network.replace(theta=noisy_theta)


def use_batches(training: Training, strength: float, seed: int) -> Training:
    """Train with mini-batches, a proportionally smaller learning rate and the same number of steps.

    Args:
        training: How the undefended network is trained.
        strength: Number of samples per batch.
        seed: Not used.

    Returns:
        The training with mini-batches.
    """
    batch_size = min(max(1, round(strength)), training.samples)
    learning_rate = training.descent.lr * batch_size / training.samples
    config = training.descent.changed(method="sgd", batch=batch_size, lr=learning_rate)
    return replace(training, config=config)


def use_dp_sgd(training: Training, strength: float, seed: int) -> Training:
    """Train with DP-SGD from the default initialization.

    Tiny initial weights would disappear in the noise that DP-SGD adds.

    DP-SGD takes fewer and smaller steps than plain gradient descent, because noise adds up over steps and
    the norm of clipped gradients is at most one. We chose the factors ``DP_STEPS`` and ``DP_RATE`` on the
    digits dataset with data seed 10, by the held-out accuracy.

    Args:
        training: How the undefended network is trained.
        strength: The privacy budget epsilon.
        seed: Not used.

    Returns:
        The training with DP-SGD.
    """
    descent_settings = training.descent
    steps, rate = max(1, round(descent_settings.steps * DP_STEPS)), descent_settings.lr * DP_RATE
    config = descent_settings.changed(
        init="default", dtype="float32", weight_decay=0.0, momentum=0.0
    )
    config = config.changed(steps=steps, lr=rate)
    return replace(training, config=config, loop=partial(train_privately, epsilon=strength))


def parse_defense(text: str) -> tuple[str, Defense, float]:
    """Read a defense and its strength from text, and check that the strength is valid.

    Args:
        text: Text of the form NAME:STRENGTH, such as ``noise:0.5``.

    Returns:
        The name of the defense, the defense and its strength.

    Raises:
        InputError: If no defense has the name, or if the strength is missing or out of range.
    """
    name, colon, number = text.strip().partition(":")
    if name not in DEFENSES:
        raise InputError(
            f"No defense has the name {name[:40]!r}.", did_you_mean(name, tuple(DEFENSES))
        )
    defense = DEFENSES[name]
    try:
        strength = float(number) if colon else math.nan
    except ValueError:
        strength = math.nan
    if math.isnan(strength):
        raise InputError(
            f"A defense must be NAME:STRENGTH, where STRENGTH is a number; got {text[:40]!r}.",
            f"Pass {name}:STRENGTH. For this defense, STRENGTH means: {defense.unit}.",
        )
    defense.check(name, strength)
    return name, defense, strength


_SHIFT_SECRET = "the shift u, which users add to their inputs, or the owner adds for them"
DEFENSES: dict[str, Defense] = {
    "shift-rewrite": Defense(
        "the first layer's biases, after training: b - W u with u = c in every pixel",
        _SHIFT_SECRET,
        "c, added to every pixel",
        "undo-constant-shift",
        release=rewrite_biases,
        shift="constant",
    ),
    "shift-rewrite-vector": Defense(
        "the first layer's biases, after training: b - W u with u random",
        _SHIFT_SECRET,
        "standard deviation of u per pixel",
        "undo-vector-shift",
        release=rewrite_biases,
        shift="vector",
    ),
    "shift-retrain": Defense(
        "the training data: x + u with u = c in every pixel, before training",
        _SHIFT_SECRET,
        "c, added to every pixel",
        "follow-mean",
        data=shift_data,
        shift="constant",
    ),
    "shift-retrain-vector": Defense(
        "the training data: x + u with u random, before training",
        _SHIFT_SECRET,
        "standard deviation of u per pixel",
        "follow-mean-image",
        data=shift_data,
        shift="vector",
    ),
    "noise": Defense(
        "every released tensor: Gaussian noise added",
        "the weights before noise and its seed",
        "standard deviation of the noise, relative to the root mean square of the tensor",
        "average-releases",
        release=add_noise,
        releases_differ=True,
    ),
    "early-stop": Defense(
        "the length of training",
        "nothing",
        "training loss to stop at",
        "free-multipliers",
        training=lambda t, loss, _: replace(t, config=t.config.changed(stop_loss=loss)),
    ),
    "default-init": Defense(
        "the initial weights: the default initialization instead of small weights",
        "the initial weights, if their seed is not public",
        "1 for on, 0 for off",
        "known-start",
        training=lambda t, *_: replace(t, config=t.config.changed(init="default")),
        is_switch=True,
    ),
    "plain-gd": Defense(
        "the training method: gradient descent, to compare other defenses with",
        "nothing",
        "1 for on, 0 for off",
        "free-multipliers",
        training=lambda t, *_: replace(t, config=t.descent),
        is_switch=True,
    ),
    "weight-decay": Defense(
        "gradient descent with weight decay",
        "nothing",
        "weight decay",
        "tied-multipliers",
        training=lambda t, decay, _: replace(t, config=t.descent.changed(weight_decay=decay)),
    ),
    "label-smoothing": Defense(
        "gradient descent on smoothed labels",
        "nothing",
        "share of each label that is spread over all classes",
        "free-multipliers",
        training=lambda t, s, _: replace(
            t, config=t.descent, loop=partial(train_smoothed, strength=s)
        ),
        max_strength=1.0,
    ),
    "sgd": Defense(
        "gradient descent in mini-batches",
        "the order of the samples",
        "samples per batch",
        "free-multipliers",
        training=use_batches,
    ),
    "without-top": Defense(
        "the training data: the most exposed records of a first training are left out of a second one",
        "which records were left out",
        "number of records to leave out",
        "free-multipliers",
        training=lambda t, s, _: replace(t, loop=partial(train_without_exposed, strength=s)),
    ),
    "cap": Defense(
        "gradient descent: a record with too much influence on the weights is left out of some steps",
        "nothing",
        "largest influence of a record, relative to the mean",
        "free-multipliers",
        training=lambda t, cap, _: replace(
            t, config=t.descent, loop=partial(train_capped, cap=cap)
        ),
        off=math.inf,
    ),
    "dp": Defense(
        "training: DP-SGD, with clipped per-sample gradients and noise",
        "the noise and the batches",
        "epsilon, at delta = 1/(10 n)",
        "cut-noise",
        training=use_dp_sgd,
        off=math.inf,
        extra="dp",
        module="opacus",
    ),
}
DEFENSES = Table("defense", DEFENSES)
