"""The defenses: each one record, its hooks above it; a new one is a line in ``DEFENSES``.

A defense has up to three hooks, says what it changes, and what stays with the owner. Some need training
loops that the usual one has no room for: smoothed labels, DP-SGD through Opacus, and two that look at
records by their exposure (``residuum.risk``).
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residuum.attacks.defense_aware.shift import move_biases
from residuum.errors import InputError, MissingExtraError, did_you_mean
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.plugins import Table
from residuum.records import Dataset
from residuum.risk.run import expose
from residuum.theory.rows import margins, normalise_labels
from residuum.training import TrainingConfig, TrainingState, initialise, released, train
from residuum.training.loop import snapshot

DP_STEPS, DP_RATE = 0.05, 0.6  # see ``private_descent``
CLIP = 1.0  # of per-sample gradients
BATCHES = 4  # expected batches per epoch of DP-SGD
POINTS = 100  # of a history: what a curve needs


@dataclass(frozen=True)
class Secret:
    """What the owner keeps: the shift of the inputs (*shape), absent without one, and a seed."""

    seed: int
    shift: Tensor | None = None

    def inputs(self, x: Tensor) -> Tensor:
        """Samples as the defended network is given them."""
        return x if self.shift is None else x + self.shift.to(x)

    def to_json(self) -> dict[str, Any]:
        """For the owner's private folder."""
        shift = None if self.shift is None else self.shift.flatten().tolist()
        return {"seed": self.seed, "shift": shift}


Facts = dict[str, Any]
Loop = Callable[[str, Dataset, TrainingConfig, str, str], tuple[TrainingState, Facts]]


def usual(
    arch: str, data: Dataset, config: TrainingConfig, task: str, device: str
) -> tuple[TrainingState, Facts]:
    """Training as :func:`residuum.training.train` does it, with nothing to say about itself."""
    return train(arch, data, config, task=task, device=device), {}


@dataclass(frozen=True)
class Training:
    """How the network is trained, on how many samples; descent: where gradient descent is needed."""

    config: TrainingConfig
    descent: TrainingConfig
    samples: int
    loop: Loop = usual


@dataclass(frozen=True)
class Defense:
    """One defense. Every hook is left alone at the strength ``off``, which is the identity.

    changes: what it changes.
    secret: what stays with the owner.
    unit: what the strength is.
    data, training, release: the hooks.
    shift: how the secret shift of the inputs is drawn, "" for none; rewrites: the shift goes into
        the biases after training (App. D of Refael et al. 2025) instead of into the training data.
    adaptive: the attacker who knows, a key of ``ADAPTIVE``.
    releases: whether several releases of the same weights differ.
    extra: of the package, needed.
    most: largest strength.
    switch: 0 or 1 and nothing between.
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
        """Whether what it needs is installed."""
        return not self.module or find_spec(self.module) is not None

    @property
    def install(self) -> str:
        """The exact line that installs what it needs; "" when nothing."""
        return f'pip install ".[{self.extra}]"' if self.extra else ""

    def check(self, name: str, strength: float) -> None:
        """Refuse a strength that means nothing, and a defense that cannot run here."""
        positive = self.off == math.inf
        wrong_switch, remedy = self.switch and strength not in (0, 1), ""
        if math.isnan(strength) or strength < 0 or (positive and strength == 0):
            remedy = f"It starts above 0; {self.off:g} leaves the network as it is."
        elif strength > self.most or wrong_switch or (strength == math.inf and not positive):
            remedy = "Use 1." if self.switch else f"It is finite and at most {self.most:g}."
        if remedy:
            raise InputError(f"The strength of {name} is {self.unit}; got {strength:g}.", remedy)
        if not self.available:
            raise MissingExtraError(
                f"{name} needs the extra {self.extra!r}, which is not installed.",
                f"Install it with: {self.install}",
            )

    def draw(self, strength: float, shape: tuple[int, ...], seed: int, name: str) -> Secret:
        """The secret of this strength; another for every seed."""
        digest = hashlib.sha256(f"{name}:{seed}".encode()).digest()
        own = int.from_bytes(digest[:7], "little")
        if not self.shift:
            return Secret(own)
        if self.shift == "constant":
            return Secret(own, torch.full(shape, strength, dtype=torch.float64))
        generator = torch.Generator().manual_seed(own)
        return Secret(own, strength * torch.randn(shape, generator=generator, dtype=torch.float64))


def smoothed(
    arch: str, data: Dataset, config: TrainingConfig, task: str, device: str, *, strength: float
) -> tuple[TrainingState, Facts]:
    """Gradient descent on the loss of labels that are right with probability 1 - strength / 2.

    One output: (1 - s/2) softplus(-m) + (s/2) softplus(m) with m = y Phi; more: cross-entropy with
    the share s spread over all classes.
    """
    model, x, y = _begin(arch, data, config, task, device)
    optimiser = _descent(model, config)
    theta0, history = snapshot(model), []
    for step in range(config.steps):
        optimiser.zero_grad()
        loss = _smoothed_loss(model(x), y, strength)
        loss.backward()
        optimiser.step()
        if (step + 1) % max(1, config.steps // POINTS) == 0:
            history.append({"step": float(step + 1), "loss": float(loss.detach())})
    return _state(model, theta0, config.steps, history), {}


def without_exposed(
    arch: str, data: Dataset, config: TrainingConfig, task: str, device: str, *, strength: float
) -> tuple[TrainingState, Facts]:
    """Trained twice: records exposed most in the first network are not in the data of the second."""
    count = int(strength)
    if count != strength or not 1 <= count <= len(data) - 2:
        raise InputError(
            f"Of {len(data)} records a whole number from 1 to {len(data) - 2} can be left out; got "
            f"{strength:g}.",
            "Correct the strength.",
        )
    first = train(arch, data, config, task=task, device=device)
    found = expose(released(first, arch, data, task), data, task=task, device=device)
    kept = found.order[count:].sort().values
    rest = data.take(kept)
    second = train(arch, rest, config, task=task, device=device)
    again = expose(released(second, arch, rest, task), rest, task=task, device=device)
    facts: Facts = {
        "left_out": sorted(found.order[:count].tolist()),
        "mean_score_before": float(found.score.mean()),
        "mean_score_of_left_out": float(found.score[found.order[:count]].mean()),
        "mean_score_after": float(again.score.mean()),
    }
    return second, facts


def capped(
    arch: str, data: Dataset, config: TrainingConfig, task: str, device: str, *, cap: float
) -> tuple[TrainingState, Facts]:
    """Gradient descent in which no record pulls more than ``cap`` times as much as the mean record.

    What a record adds to the weights is its gradients times the derivatives of its loss; their sum over
    the steps, lam_i, is what attacks read. A record beyond its share stands still until others catch up.
    A factor on its loss would not do: descent to a vanishing loss forgets such factors.
    """
    model, x, y = _begin(arch, data, config, task, device)
    optimiser = _descent(model, config)
    theta0, history = snapshot(model), []
    pulled = torch.zeros(len(x), dtype=x.dtype, device=device)
    held = 0
    for step in range(config.steps):
        optimiser.zero_grad()
        moving = pulled <= cap * pulled.mean()
        losses = _smoothed_loss(model(x), y, 0.0, lambda each: each.flatten())
        (losses * moving).mean().backward()
        optimiser.step()
        with torch.no_grad():
            pulled += moving * -torch.expm1(-losses)  # 1 - p of the right label, which is |l'|
        held += int((~moving).sum())
        if (step + 1) % max(1, config.steps // POINTS) == 0:
            history.append({"step": float(step + 1), "loss": float(losses.detach().mean())})
    facts: Facts = {"held_share": held / (config.steps * len(x))}
    return _state(model, theta0, config.steps, history), facts


def private(
    arch: str, data: Dataset, config: TrainingConfig, task: str, device: str, *, epsilon: float
) -> tuple[TrainingState, Facts]:
    """DP-SGD: per-sample gradients clipped, noise for (epsilon, 1/(10 n)) by Opacus' accountant.

    The noise is searched for the epochs that ``config.steps`` amount to; what was spent is in the
    facts. Seeds make it repeatable for measurements and unfit for a release, which the facts say too.
    """
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model, x, y = _begin(arch, data, config, task, device)
    theta0, n = snapshot(model), len(data)
    batch = config.batch or math.ceil(n / BATCHES)
    epochs, delta = max(1, round(config.steps * batch / n)), 1 / (10 * n)
    order = torch.Generator().manual_seed(config.seed)
    noise = torch.Generator(device=device).manual_seed(config.seed + 1)
    history, step = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the generator is not a cryptographic one: said below
        engine = PrivacyEngine(accountant="rdp")
        wrapped, optimiser, loader = engine.make_private_with_epsilon(
            module=model,
            loss_reduction="sum",
            noise_generator=noise,
            max_grad_norm=CLIP,
            optimizer=torch.optim.SGD(model.parameters(), config.lr / batch, config.momentum),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=batch, generator=order),
            target_epsilon=epsilon,
            target_delta=delta,
            epochs=epochs,
        )
        for _ in range(epochs):
            for inputs, labels in loader:
                optimiser.zero_grad()
                outputs = wrapped(inputs.to(device))  # Opacus makes empty batches on the CPU
                loss = _smoothed_loss(outputs, labels.to(device), 0.0, torch.sum)
                loss.backward()
                optimiser.step()
                step += 1
            history.append({"step": float(step), "loss": float(loss.detach()) / batch})
        spent = float(engine.get_epsilon(delta))
    facts: Facts = {
        "epsilon": spent,
        "epsilon_wanted": epsilon,
        "delta": delta,
        "accountant": "rdp",
        "noise_multiplier": float(optimiser.noise_multiplier),
        "clip": CLIP,
        "epochs": epochs,
        "batch": batch,
        "generator": "seeded, for repeatable measurements: not for a release",
    }
    return _state(model, theta0, step, history), facts


def _begin(
    arch: str, data: Dataset, config: TrainingConfig, task: str, device: str
) -> tuple[nn.Module, Tensor, Tensor]:
    """Model, samples and labels on the device; only classification has labels to smooth."""
    if task == "regression":
        raise InputError(
            "Label smoothing and DP-SGD are for classification; this is a regression.",
            "Choose other defenses.",
        )
    network = Architecture.parse(arch)
    model, dtype = initialise(network, config).to(device), getattr(torch, config.dtype)
    y = normalise_labels(data.y, task, network.outputs)
    kind = torch.long if task == "multiclass" else dtype
    return model, data.x.to(device, dtype), y.to(device, kind)


def _descent(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    decay = config.weight_decay
    return torch.optim.SGD(model.parameters(), config.lr, config.momentum, weight_decay=decay)


def _smoothed_loss(
    outputs: Tensor, y: Tensor, strength: float, reduce: Callable[[Tensor], Tensor] = torch.mean
) -> Tensor:
    if outputs.shape[1] > 1:
        return reduce(F.cross_entropy(outputs, y, label_smoothing=strength, reduction="none"))
    m = margins(outputs, y)
    wrong = F.softplus(m, threshold=40) * (strength / 2) if strength else 0.0
    return reduce(F.softplus(-m, threshold=40) * (1 - strength / 2) + wrong)


def _state(
    model: nn.Module, theta0: dict[str, Tensor], steps: int, history: list[dict[str, float]]
) -> TrainingState:
    theta = snapshot(model)
    fine = all(bool(torch.isfinite(t).all()) for t in theta.values())
    status = "steps" if fine else "diverged"
    return TrainingState(theta, theta0, steps, "", status, history=tuple(history))


def shifted_data(data: Dataset, secret: Secret) -> Dataset:
    """x + u; what was subtracted before is not changed by it."""
    return data.replace(x=secret.inputs(data.x))


def rewritten(checkpoint: Network, strength: float, secret: Secret) -> Network:
    """b - W u: on x + u the network says what it said on x (Refael et al. 2025, App. D)."""
    assert secret.shift is not None
    return move_biases(checkpoint, -secret.shift)


def noisy(checkpoint: Network, strength: float, secret: Secret) -> Network:
    """Every tensor plus noise of ``strength`` times its root mean square."""
    generator = torch.Generator().manual_seed(secret.seed)
    theta = {}
    for name, t in checkpoint.theta.items():
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
        size = t.double().norm() / math.sqrt(t.numel())
        theta[name] = t + strength * size.to(t) * noise
    return checkpoint.replace(theta=theta)


def batched(training: Training, strength: float, seed: int) -> Training:
    """Mini-batches of ``strength`` samples, the rate smaller in proportion, as many steps."""
    size = min(max(1, round(strength)), training.samples)
    rate = training.descent.lr * size / training.samples
    config = replace(training.descent, method="sgd", batch=size, lr=rate)
    return replace(training, config=config)


def private_descent(training: Training, strength: float, seed: int) -> Training:
    """DP-SGD from the framework's own initial weights: tiny ones drown in the noise.

    Fewer and smaller steps than plain descent: noise adds up over steps, clipped gradients are at
    most one long. Both factors were chosen on digits, data seed 10, by held-out accuracy.
    """
    descent = training.descent
    steps, rate = max(1, round(descent.steps * DP_STEPS)), descent.lr * DP_RATE
    config = replace(descent, init="default", dtype="float32", weight_decay=0.0, momentum=0.0)
    config = replace(config, steps=steps, lr=rate)
    return replace(training, config=config, loop=partial(private, epsilon=strength))


def find(text: str) -> tuple[str, Defense, float]:
    """``NAME:STRENGTH``, checked."""
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
        training=lambda t, loss, _: replace(t, config=replace(t.config, stop_loss=loss)),
    ),
    "default-init": Defense(
        "the initial weights: the framework's own instead of small ones",
        "the initial weights, where their seed is not public",
        "1 for on, 0 for off",
        "known-start",
        training=lambda t, *_: replace(t, config=replace(t.config, init="default")),
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
        training=lambda t, decay, _: replace(t, config=replace(t.descent, weight_decay=decay)),
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
