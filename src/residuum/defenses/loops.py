"""Training loops of defenses that need more than the usual loop.

Every loop trains the network of a job. It returns the final state and facts about the training, as plain
values by name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residuum.errors import InputError
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.records.exposure import Exposure
from residuum.risk.run import expose
from residuum.theory.rows import margins, normalize_labels
from residuum.training import TrainingConfig, TrainingState, initialize, make_release, train
from residuum.training.loop import copy_weights

CLIP = 1.0  # norm to which per-sample gradients are clipped
BATCHES = 4  # expected batches per epoch of DP-SGD
POINTS = 100  # points of a history, enough to draw a curve
TrainingFacts = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A network to train on the owner's data."""

    arch: str
    data: Dataset
    config: TrainingConfig
    task: str
    device: str = "cpu"

    def train(self) -> TrainingState:
        """Train with the usual loop."""
        return train(self.arch, self.data, self.config, task=self.task, device=self.device)

    def release(self, state: TrainingState) -> Network:
        """Return the network with the final weights."""
        return make_release(state, self.arch, self.data, self.task)


def train_plain(job: Job) -> tuple[TrainingState, TrainingFacts]:
    """Train as :func:`residuum.training.train` does. There are no facts about the training."""
    return job.train(), {}


def train_smoothed(job: Job, *, strength: float) -> tuple[TrainingState, TrainingFacts]:
    """Run gradient descent on smoothed labels.

    Args:
        job: The network to train.
        strength: Share of each label that is spread over all classes.

    Returns:
        The final state and no facts.
    """

    def objective(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = compute_smoothed_losses(outputs, y, strength).mean()
        return loss, loss

    return _descend(job, objective), {}


def train_capped(job: Job, *, cap: float) -> tuple[TrainingState, TrainingFacts]:
    """Run gradient descent with a limit on the influence of each record on the weights.

    In each step, a record adds its gradient times the derivative of its loss to the weights. The sum of
    these derivatives over the steps is lam_i, which attacks reconstruct. A record whose lam_i exceeds the
    limit is left out of the steps until the others catch up. A factor on its loss would not help, because
    descent to a vanishing loss forgets such factors.

    Args:
        job: The network to train.
        cap: The limit, relative to the mean of all lam_i.

    Returns:
        The final state, and the share of records and steps that were left out.
    """
    n, dtype = len(job.data), getattr(torch, job.config.dtype)
    lam = torch.zeros(n, dtype=dtype, device=job.device)
    skipped_steps = torch.zeros(n, dtype=torch.long, device=job.device)

    def objective(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_used = lam <= cap * lam.mean()
        losses = compute_smoothed_losses(outputs, y, 0.0)
        # |l'| is 1 minus the probability of the right label.
        lam.add_(is_used * -torch.expm1(-losses.detach()))
        skipped_steps.add_(~is_used)
        return (losses * is_used).mean(), losses.mean()

    state = _descend(job, objective)
    return state, {"held_share": int(skipped_steps.sum()) / (job.config.steps * n)}


def train_without_exposed(job: Job, *, strength: float) -> tuple[TrainingState, TrainingFacts]:
    """Train twice, the second time without the records that are most exposed in the first network.

    Args:
        job: The network to train.
        strength: Number of records to leave out.

    Returns:
        The state of the second network, with the records that were left out and the mean exposures.

    Raises:
        InputError: If ``strength`` is not a number of records that can be left out.
    """
    n, count = len(job.data), int(strength)
    if count != strength or not 1 <= count <= n - 2:
        raise InputError(
            f"The number of records to leave out of {n} must be an integer from 1 to {n - 2}; got "
            f"{strength:g}.",
            "Change the strength.",
        )
    first = _expose(job, job.train())
    omitted = first.order[:count]
    second_job = replace(job, data=job.data.take(first.order[count:].sort().values))
    state = second_job.train()
    training_facts = {
        "left_out": sorted(omitted.tolist()),
        "mean_score_before": float(first.score.mean()),
        "mean_score_of_left_out": float(first.score[omitted].mean()),
        "mean_score_after": float(_expose(second_job, state).score.mean()),
    }
    return state, training_facts


def _expose(job: Job, state: TrainingState) -> Exposure:
    return expose(job.release(state), job.data, task=job.task, device=job.device)


def train_privately(job: Job, *, epsilon: float) -> tuple[TrainingState, TrainingFacts]:
    """Train by DP-SGD, with clipped per-sample gradients and noise, and with the accountant of Opacus.

    The noise is chosen such that the epochs of ``config.steps`` spend (epsilon, 1/(10 n)). The noise is
    seeded. This makes measurements repeatable, but such a network must not be released.

    Args:
        job: The network to train.
        epsilon: The privacy budget.

    Returns:
        The final state, with the epsilon that was spent and the settings of DP-SGD.
    """
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    config, n = job.config, len(job.data)
    model, x, y = _begin(job)
    theta0 = copy_weights(model)
    batch = config.batch or math.ceil(n / BATCHES)
    epochs, delta = max(1, round(config.steps * batch / n)), 1 / (10 * n)
    order = torch.Generator().manual_seed(config.seed)
    noise = torch.Generator(device=job.device).manual_seed(config.seed + 1)
    history, step = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns that the generator is not cryptographic
        engine = PrivacyEngine(accountant="rdp")
        wrapped, optimizer, loader = engine.make_private_with_epsilon(
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
                optimizer.zero_grad()
                outputs = wrapped(inputs.to(job.device))  # Opacus makes empty batches on the CPU
                loss = compute_smoothed_losses(outputs, labels.to(job.device), 0.0).sum()
                loss.backward()
                optimizer.step()
                step += 1
            history.append({"step": float(step), "loss": float(loss.detach()) / batch})
        spent = float(engine.get_epsilon(delta))
    training_facts: TrainingFacts = {
        "epsilon": spent,
        "epsilon_wanted": epsilon,
        "delta": delta,
        "accountant": "rdp",
        "noise_multiplier": float(optimizer.noise_multiplier),
        "clip": CLIP,
        "epochs": epochs,
        "batch": batch,
        "generator": "seeded, for repeatable measurements: not for a release",
    }
    return _state(model, theta0, step, history), training_facts


def compute_smoothed_losses(outputs: Tensor, y: Tensor, strength: float) -> Tensor:
    """Compute the loss of every record with smoothed labels.

    One output: (1 - s/2) softplus(-m) + (s/2) softplus(m) with m = y Phi. Several outputs: the
    cross-entropy with the share s spread over all classes.

    Args:
        outputs: (n, outputs) outputs of the network.
        y: Labels.
        strength: The share s of each label that is spread.

    Returns:
        (n,) losses.
    """
    if outputs.shape[1] > 1:
        return F.cross_entropy(outputs, y, label_smoothing=strength, reduction="none")
    m = margins(outputs, y).flatten()
    wrong = F.softplus(m, threshold=40) * (strength / 2) if strength else 0.0
    return F.softplus(-m, threshold=40) * (1 - strength / 2) + wrong


def _descend(
    job: Job, objective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> TrainingState:
    """Run gradient descent. ``objective`` returns the loss to minimize and the loss to record."""
    config = job.config
    model, x, y = _begin(job)
    optimizer = torch.optim.SGD(
        model.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay
    )
    theta0, history = copy_weights(model), []
    for step in range(1, config.steps + 1):
        optimizer.zero_grad()
        loss, plain = objective(model(x), y)
        loss.backward()
        optimizer.step()
        if step % max(1, config.steps // POINTS) == 0:
            history.append({"step": float(step), "loss": float(plain.detach())})
    return _state(model, theta0, config.steps, history)


def _begin(job: Job) -> tuple[nn.Module, Tensor, Tensor]:
    """Return model, samples and labels on the device. Regression has no labels to smooth."""
    if job.task == "regression":
        raise InputError(
            "Label smoothing, caps and DP-SGD need a classification task; got a regression.",
            "Choose other defenses.",
        )
    network, dtype = Architecture.parse(job.arch), getattr(torch, job.config.dtype)
    model = initialize(network, job.config).to(job.device)
    y = normalize_labels(job.data.y, job.task, network.outputs)
    y = y.to(job.device, torch.long if job.task == "multiclass" else dtype)
    return model, job.data.x.to(job.device, dtype), y


def _state(
    model: nn.Module, theta0: dict[str, Tensor], steps: int, history: list[dict[str, float]]
) -> TrainingState:
    theta = copy_weights(model)
    finite = all(bool(torch.isfinite(t).all()) for t in theta.values())
    status = "steps" if finite else "diverged"
    return TrainingState(theta, theta0, steps, "", status, history=tuple(history))
