"""The defenses, each a record with up to three hooks: on the data, on the training, on the weights.

A new defense is one entry in ``DEFENSES``. Training loops of their own are in ``loops.py``.
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
from residuum.defenses.loops import Facts, Job, capped, private, smoothed, usual, without_exposed
from residuum.errors import InputError, MissingExtraError, did_you_mean
from residuum.networks.network import Network
from residuum.plugins import Table
from residuum.records import Dataset
from residuum.training import TrainingConfig, TrainingState

DP_STEPS, DP_RATE = 0.05, 0.6  # see ``private_descent``


@dataclass(frozen=True)
class Secret:
    """What the owner keeps: the shift of the inputs (*shape), absent without one, and a seed."""

    seed: int
    shift: Tensor | None = None

    def inputs(self, x: Tensor) -> Tensor:
        """Return samples as the defended network receives them."""
        return x if self.shift is None else x + self.shift.to(x)

    def to_json(self) -> dict[str, Any]:
        """Return the form in the owner's private folder."""
        shift = None if self.shift is None else self.shift.flatten().tolist()
        return {"seed": self.seed, "shift": shift}


@dataclass(frozen=True)
class Training:
    """How the network is trained, and on how many samples; descent: if gradient descent is needed."""

    config: TrainingConfig
    descent: TrainingConfig
    samples: int
    loop: Callable[[Job], tuple[TrainingState, Facts]] = usual


@dataclass(frozen=True)
class Defense:
    """One defense. At the strength ``off`` no hook is called.

    changes: what it changes.
    secret: what stays with the owner.
    unit: what the strength measures.
    adaptive: the attacker who knows of the defense, a key of ``ADAPTIVE``.
    data, training, release: the hooks.
    shift: how the secret shift of the inputs is drawn, "" for none.
    most: largest strength.
    switch: the strength is 0 or 1.
    releases: several releases of the same weights differ.
    extra, module: extra of this package that the defense needs, and a module that the extra installs.
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
    most: float = math.inf
    switch: bool = False
    releases: bool = False
    extra: str = ""
    module: str = ""

    @property
    def available(self) -> bool:
        """Return True if everything that it needs is installed."""
        return not self.module or find_spec(self.module) is not None

    @property
    def install(self) -> str:
        """Return the command that installs what it needs, "" for nothing."""
        return f'pip install ".[{self.extra}]"' if self.extra else ""

    def check(self, name: str, strength: float) -> None:
        """Check the strength, and that the defense can run here.

        Raises:
            InputError: If the strength is out of range.
            MissingExtraError: If an extra of the package is missing.
        """
        unbounded, remedy = self.off == math.inf, ""
        if strength < 0 or (unbounded and strength == 0):
            remedy = f"It starts above 0; {self.off:g} leaves the network as it is."
        elif self.switch and strength not in (0, 1):
            remedy = "Use 1."
        elif strength > self.most or (strength == math.inf and not unbounded):
            remedy = f"It is finite and at most {self.most:g}."
        if remedy:
            raise InputError(f"The strength of {name} is {self.unit}; got {strength:g}.", remedy)
        if not self.available:
            raise MissingExtraError(
                f"{name} needs the extra {self.extra!r}, which is not installed.",
                f"Install it with: {self.install}",
            )

    def draw(self, strength: float, shape: tuple[int, ...], seed: int, name: str) -> Secret:
        """Draw the secret of this strength, a different one for every seed."""
        digest = hashlib.sha256(f"{name}:{seed}".encode()).digest()
        secret = Secret(int.from_bytes(digest[:7], "little"))
        if not self.shift:
            return secret
        if self.shift == "constant":
            return replace(secret, shift=torch.full(shape, strength, dtype=torch.float64))
        generator = torch.Generator().manual_seed(secret.seed)
        shift = strength * torch.randn(shape, generator=generator, dtype=torch.float64)
        return replace(secret, shift=shift)


def shifted_data(data: Dataset, secret: Secret) -> Dataset:
    """Return x + u. The mean that was subtracted before does not change."""
    return data.replace(x=secret.inputs(data.x))


def rewritten(checkpoint: Network, strength: float, secret: Secret) -> Network:
    """Return b - W u: the outputs on x + u are those on x before (Refael et al. 2025, App. D)."""
    assert secret.shift is not None
    return move_biases(checkpoint, -secret.shift)


def noisy(checkpoint: Network, strength: float, secret: Secret) -> Network:
    """Add noise of ``strength`` times its root mean square to every tensor."""
    generator = torch.Generator().manual_seed(secret.seed)
    theta = {}
    for name, t in checkpoint.theta.items():
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
        size = t.double().norm() / math.sqrt(t.numel())
        theta[name] = t + strength * size.to(t) * noise
    return checkpoint.replace(theta=theta)


def batched(training: Training, strength: float, seed: int) -> Training:
    """Use mini-batches of ``strength`` samples, a rate smaller in proportion, and as many steps."""
    size = min(max(1, round(strength)), training.samples)
    rate = training.descent.lr * size / training.samples
    config = training.descent.changed(method="sgd", batch=size, lr=rate)
    return replace(training, config=config)


def private_descent(training: Training, strength: float, seed: int) -> Training:
    """Use DP-SGD from the framework's own initial weights, because tiny ones drown in the noise.

    It takes fewer and smaller steps than plain descent, because noise adds up over steps and clipped
    gradients have at most length one. Both factors were chosen on digits, data seed 10, by held-out
    accuracy.
    """
    descent = training.descent
    steps, rate = max(1, round(descent.steps * DP_STEPS)), descent.lr * DP_RATE
    config = descent.changed(init="default", dtype="float32", weight_decay=0.0, momentum=0.0)
    config = config.changed(steps=steps, lr=rate)
    return replace(training, config=config, loop=partial(private, epsilon=strength))


def find(text: str) -> tuple[str, Defense, float]:
    """Read and check ``NAME:STRENGTH``.

    Raises:
        InputError: If the name is unknown or the strength is out of range.
    """
    name, colon, number = text.strip().partition(":")
    if name not in DEFENSES:
        raise InputError(f"No defense {name[:40]!r}.", did_you_mean(name, tuple(DEFENSES)))
    defense = DEFENSES[name]
    try:
        strength = float(number) if colon else math.nan
    except ValueError:
        strength = math.nan
    if math.isnan(strength):
        raise InputError(
            f"A defense is NAME:STRENGTH; got {text[:40]!r}.",
            f"The strength of {name} is {defense.unit}.",
        )
    defense.check(name, strength)
    return name, defense, strength


_KNOWN_BY_OWNER = "the shift u; users add it to their inputs, or the owner does it for them"
DEFENSES: dict[str, Defense] = {
    "shift-rewrite": Defense(
        "the first layer's biases, after training: b - W u with u = c in every pixel",
        _KNOWN_BY_OWNER,
        "c, added to every pixel",
        "undo-constant-shift",
        release=rewritten,
        shift="constant",
    ),
    "shift-rewrite-vector": Defense(
        "the first layer's biases, after training: b - W u with u random",
        _KNOWN_BY_OWNER,
        "standard deviation of u per pixel",
        "undo-vector-shift",
        release=rewritten,
        shift="vector",
    ),
    "shift-retrain": Defense(
        "the training data: x + u with u = c in every pixel, before training",
        _KNOWN_BY_OWNER,
        "c, added to every pixel",
        "follow-mean",
        data=shifted_data,
        shift="constant",
    ),
    "shift-retrain-vector": Defense(
        "the training data: x + u with u random, before training",
        _KNOWN_BY_OWNER,
        "standard deviation of u per pixel",
        "follow-mean-image",
        data=shifted_data,
        shift="vector",
    ),
    "noise": Defense(
        "every released tensor: Gaussian noise added",
        "the weights before noise and its seed",
        "noise over the tensor's root mean square",
        "average-releases",
        release=noisy,
        releases=True,
    ),
    "early-stop": Defense(
        "the length of training",
        "nothing",
        "training loss to stop at",
        "free-multipliers",
        training=lambda t, loss, _: replace(t, config=t.config.changed(stop_loss=loss)),
    ),
    "default-init": Defense(
        "the initial weights: the framework's own instead of small ones",
        "the initial weights, where their seed is not public",
        "1 for on, 0 for off",
        "known-start",
        training=lambda t, *_: replace(t, config=t.config.changed(init="default")),
        switch=True,
    ),
    "plain-gd": Defense(
        "the training method: gradient descent, what the next ones are to be compared with",
        "nothing",
        "1 for on, 0 for off",
        "free-multipliers",
        training=lambda t, *_: replace(t, config=t.descent),
        switch=True,
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
        "share of the label that is spread",
        "free-multipliers",
        training=lambda t, s, _: replace(t, config=t.descent, loop=partial(smoothed, strength=s)),
        most=1.0,
    ),
    "sgd": Defense(
        "gradient descent in mini-batches",
        "the order of the samples",
        "samples per batch",
        "free-multipliers",
        training=batched,
    ),
    "without-top": Defense(
        "the training data: trained once, ranked by exposure, trained again without the first",
        "which records were left out",
        "records left out",
        "free-multipliers",
        training=lambda t, s, _: replace(t, loop=partial(without_exposed, strength=s)),
    ),
    "cap": Defense(
        "gradient descent: a record that has pulled the weights too much stands still",
        "nothing",
        "most that a record pulls, over the mean",
        "free-multipliers",
        training=lambda t, cap, _: replace(t, config=t.descent, loop=partial(capped, cap=cap)),
        off=math.inf,
    ),
    "dp": Defense(
        "training: DP-SGD, clipped per-sample gradients plus noise",
        "the noise and the batches",
        "epsilon, at delta = 1/(10 n)",
        "cut-noise",
        training=private_descent,
        off=math.inf,
        extra="dp",
        module="opacus",
    ),
}
DEFENSES = Table("defense", DEFENSES)
