"""Training loops of defenses that the usual loop has no room for.

Every loop trains the network of a job and returns the final state with facts about the training.
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
from residuum.training import TrainingConfig, TrainingState, initialize, released, train
from residuum.training.loop import snapshot

CLIP = 1.0  # of per-sample gradients
BATCHES = 4  # expected batches per epoch of DP-SGD
POINTS = 100  # of a history: what a curve needs
Facts = dict[str, Any]


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
        return released(state, self.arch, self.data, self.task)


def usual(job: Job) -> tuple[TrainingState, Facts]:
    """Train as :func:`residuum.training.train` does, without facts."""
    return job.train(), {}


def smoothed(job: Job, *, strength: float) -> tuple[TrainingState, Facts]:
    """Descend on the loss of labels that are right with probability 1 - strength / 2."""

    def objective(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = smoothed_losses(outputs, y, strength).mean()
        return loss, loss

    return _descend(job, objective), {}


def capped(job: Job, *, cap: float) -> tuple[TrainingState, Facts]:
    """Descend so that no record pulls more than ``cap`` times as much as the mean record.

    A record adds to the weights its gradients times the derivatives of its loss. Attacks read their sum
    over the steps, lam_i. A record beyond its share stands still until the others catch up. A factor on
    its loss would not help, because descent to a vanishing loss forgets such factors.
    """
    n, dtype = len(job.data), getattr(torch, job.config.dtype)
    pull = torch.zeros(n, dtype=dtype, device=job.device)
    still = torch.zeros(n, dtype=torch.long, device=job.device)

    def objective(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        moving = pull <= cap * pull.mean()
        losses = smoothed_losses(outputs, y, 0.0)
        pull.add_(
            moving * -torch.expm1(-losses.detach())
        )  # 1 - p of the right label, which is |l'|
        still.add_(~moving)
        return (losses * moving).mean(), losses.mean()

    state = _descend(job, objective)
    return state, {"held_share": int(still.sum()) / (job.config.steps * n)}


def without_exposed(job: Job, *, strength: float) -> tuple[TrainingState, Facts]:
    """Train twice. The records most exposed in the first network are left out of the second.

    Raises:
        InputError: If ``strength`` is not a number of records that can be left out.
    """
    n, count = len(job.data), int(strength)
    if count != strength or not 1 <= count <= n - 2:
        raise InputError(
            f"Of {n} records a whole number from 1 to {n - 2} can be left out; got {strength:g}.",
            "Correct the strength.",
        )
    first = _exposure(job, job.train())
    omitted = first.order[:count]
    second_job = replace(job, data=job.data.take(first.order[count:].sort().values))
    state = second_job.train()
    return state, {
        "left_out": sorted(omitted.tolist()),
        "mean_score_before": float(first.score.mean()),
        "mean_score_of_left_out": float(first.score[omitted].mean()),
        "mean_score_after": float(_exposure(second_job, state).score.mean()),
    }


def _exposure(job: Job, state: TrainingState) -> Exposure:
    return expose(job.release(state), job.data, task=job.task, device=job.device)


def private(job: Job, *, epsilon: float) -> tuple[TrainingState, Facts]:
    """Train by DP-SGD: per-sample gradients clipped, noise for (epsilon, 1/(10 n)) by Opacus' accountant.

    The noise is searched for the epochs that ``config.steps`` amount to. The facts say what epsilon was
    spent. Seeds make the training repeatable for measurements and unfit for a release, which the facts
    say too.
    """
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    config, n = job.config, len(job.data)
    model, x, y = _begin(job)
    theta0 = snapshot(model)
    batch = config.batch or math.ceil(n / BATCHES)
    epochs, delta = max(1, round(config.steps * batch / n)), 1 / (10 * n)
    order = torch.Generator().manual_seed(config.seed)
    noise = torch.Generator(device=job.device).manual_seed(config.seed + 1)
    history, step = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generator is not a cryptographic one: see the facts
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
                loss = smoothed_losses(outputs, labels.to(job.device), 0.0).sum()
                loss.backward()
                optimizer.step()
                step += 1
            history.append({"step": float(step), "loss": float(loss.detach()) / batch})
        spent = float(engine.get_epsilon(delta))
    facts: Facts = {
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
    return _state(model, theta0, step, history), facts


def smoothed_losses(outputs: Tensor, y: Tensor, strength: float) -> Tensor:
    """Return the loss (n,) of every record for labels of which the share ``strength`` is spread.

    One output: (1 - s/2) softplus(-m) + (s/2) softplus(m) with m = y Phi. Several: the cross-entropy with
    the share s spread over all classes.
    """
    if outputs.shape[1] > 1:
        return F.cross_entropy(outputs, y, label_smoothing=strength, reduction="none")
    m = margins(outputs, y).flatten()
    wrong = F.softplus(m, threshold=40) * (strength / 2) if strength else 0.0
    return F.softplus(-m, threshold=40) * (1 - strength / 2) + wrong


def _descend(
    job: Job, objective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> TrainingState:
    """Run gradient descent. ``objective`` returns the loss to minimize and the loss of the history."""
    config = job.config
    model, x, y = _begin(job)
    optimizer = torch.optim.SGD(
        model.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay
    )
    theta0, history = snapshot(model), []
    for step in range(1, config.steps + 1):
        optimizer.zero_grad()
        loss, plain = objective(model(x), y)
        loss.backward()
        optimizer.step()
        if step % max(1, config.steps // POINTS) == 0:
            history.append({"step": float(step), "loss": float(plain.detach())})
    return _state(model, theta0, config.steps, history)


def _begin(job: Job) -> tuple[nn.Module, Tensor, Tensor]:
    """Return model, samples and labels on the device. Only classification has labels to smooth."""
    if job.task == "regression":
        raise InputError(
            "Label smoothing and DP-SGD are for classification; this is a regression.",
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
    theta = snapshot(model)
    finite = all(bool(torch.isfinite(t).all()) for t in theta.values())
    status = "steps" if finite else "diverged"
    return TrainingState(theta, theta0, steps, "", status, history=tuple(history))
