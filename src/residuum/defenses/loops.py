"""Training loops of defenses that need more than the usual training loop.

Every training loop trains the network of a :class:`Job`. A loop returns the final state of the training, and
a dictionary of facts about the training for the report, such as the privacy budget that was spent.
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

CLIP = 1.0  # DP-SGD (private training) scales the gradient of each sample down to at most this norm
BATCHES = 4  # expected number of batches per epoch of DP-SGD
POINTS = 100  # number of steps at which the training loss is recorded, to draw a curve
TrainingFacts = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A network to train: its architecture, data, settings, task and device."""

    arch: str
    data: Dataset
    config: TrainingConfig
    task: str
    device: str = "cpu"

    def train(self) -> TrainingState:
        """Train the network with the usual training loop. Return the final state."""
        return train(self.arch, self.data, self.config, task=self.task, device=self.device)

    def release(self, state: TrainingState) -> Network:
        """Return the trained network with the weights of the final state."""
        return make_release(state, self.arch, self.data, self.task)


def train_plain(job: Job) -> tuple[TrainingState, TrainingFacts]:
    """Train without a defense. Return the final state, and an empty dictionary of facts."""
    return job.train(), {}


def train_smoothed(job: Job, *, strength: float) -> tuple[TrainingState, TrainingFacts]:
    """Train by gradient descent on smoothed labels.

    Args:
        job: The network to train, with its data and settings.
        strength: Share of each label that is spread over all classes.

    Returns:
        The final state of the training, and an empty dictionary of facts.
    """

    def objective(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = compute_smoothed_losses(outputs, y, strength).mean()
        return loss, loss

    return _descend(job, objective), {}


def train_capped(job: Job, *, cap: float) -> tuple[TrainingState, TrainingFacts]:
    """Train by gradient descent with a limit on the influence of each record on the weights.

    In each step, record i adds its gradient times the derivative of its loss to the weights. The sum of
    these derivatives over all steps is the multiplier lam_i of the record, which attacks reconstruct. A
    record whose multiplier exceeds the limit is left out of the steps until the multipliers of the other
    records catch up. It would not help to give the loss of this record a smaller weight. If the loss goes
    to zero, gradient descent ends at the same network with any weights of the losses.

    Args:
        job: The network to train, with its data and settings.
        cap: The limit: largest multiplier of a record, relative to the mean multiplier of all records.

    Returns:
        The final state of the training, and a dictionary. Its entry "held_share" is the share of the steps
        in which a record was left out, on average over the records.
    """
    n, dtype = len(job.data), getattr(torch, job.config.dtype)
    multipliers = torch.zeros(n, dtype=dtype, device=job.device)
    skipped_steps = torch.zeros(n, dtype=torch.long, device=job.device)

    def objective(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_used = multipliers <= cap * multipliers.mean()
        losses = compute_smoothed_losses(outputs, y, 0.0)
        # The absolute derivative of the loss is 1 - exp(-loss). exp(-loss) is the probability of the label.
        multipliers.add_(is_used * -torch.expm1(-losses.detach()))
        skipped_steps.add_(~is_used)
        return (losses * is_used).mean(), losses.mean()

    training_state = _descend(job, objective)
    return training_state, {"held_share": int(skipped_steps.sum()) / (job.config.steps * n)}


def train_without_exposed(job: Job, *, strength: float) -> tuple[TrainingState, TrainingFacts]:
    """Train twice, the second time without the records that are most exposed in the first network.

    Args:
        job: The network to train, with its data and settings.
        strength: Number of records to leave out.

    Returns:
        The final state of the second training, and a dictionary. Its entries are the indices of the records
        that were left out, and the mean exposure scores of the records in both trainings.

    Raises:
        InputError: If ``strength`` is not an integer, or if fewer than two records would remain.
    """
    n, count = len(job.data), int(strength)
    if count != strength or not 1 <= count <= n - 2:
        raise InputError(
            f"A defense that trains without the most exposed records leaves out some of the {n} records; "
            f"their number must be an integer from 1 to {n - 2}; got "
            f"{strength:g}.",
            "Change the strength, such as --defenses without-top:5.",
        )
    first_exposure = _expose(job, job.train())
    omitted_records = first_exposure.order[:count]
    second_job = replace(job, data=job.data.take(first_exposure.order[count:].sort().values))
    second_state = second_job.train()
    training_facts = {
        "left_out": sorted(omitted_records.tolist()),
        "mean_score_before": float(first_exposure.score.mean()),
        "mean_score_of_left_out": float(first_exposure.score[omitted_records].mean()),
        "mean_score_after": float(_expose(second_job, second_state).score.mean()),
    }
    return second_state, training_facts


def _expose(job: Job, state: TrainingState) -> Exposure:
    return expose(job.release(state), job.data, task=job.task, device=job.device)


def train_privately(job: Job, *, epsilon: float) -> tuple[TrainingState, TrainingFacts]:
    """Train by DP-SGD, which clips the gradient of each sample and adds noise, with Opacus.

    The noise is as large as needed for (epsilon, delta) differential privacy of the whole training, with
    delta = 1/(10 n) for n records. The noise is seeded. This makes measurements repeatable, but a network
    trained with seeded noise must not be released.

    Args:
        job: The network to train, with its data and settings.
        epsilon: The privacy budget.

    Returns:
        The final state of the training, and a dictionary with the epsilon that was spent and the settings
        of DP-SGD.
    """
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    config, n = job.config, len(job.data)
    model, x, y = _begin(job)
    initial_weights = copy_weights(model)
    batch_size = config.batch or math.ceil(n / BATCHES)
    epochs, delta = max(1, round(config.steps * batch_size / n)), 1 / (10 * n)
    order_generator = torch.Generator().manual_seed(config.seed)
    noise_generator = torch.Generator(device=job.device).manual_seed(config.seed + 1)
    history, step = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Opacus warns that a seeded generator is not cryptographically secure
        privacy_engine = PrivacyEngine(accountant="rdp")
        private_model, optimizer, loader = privacy_engine.make_private_with_epsilon(
            module=model,
            loss_reduction="sum",
            noise_generator=noise_generator,
            max_grad_norm=CLIP,
            optimizer=torch.optim.SGD(model.parameters(), config.lr / batch_size, config.momentum),
            data_loader=DataLoader(
                TensorDataset(x, y), batch_size=batch_size, generator=order_generator
            ),
            target_epsilon=epsilon,
            target_delta=delta,
            epochs=epochs,
        )
        for _ in range(epochs):
            for inputs, labels in loader:
                optimizer.zero_grad()
                outputs = private_model(
                    inputs.to(job.device)
                )  # if Opacus draws an empty batch, the batch is on the CPU
                loss = compute_smoothed_losses(outputs, labels.to(job.device), 0.0).sum()
                loss.backward()
                optimizer.step()
                step += 1
            history.append({"step": float(step), "loss": float(loss.detach()) / batch_size})
        spent_epsilon = float(privacy_engine.get_epsilon(delta))
    training_facts: TrainingFacts = {
        "epsilon": spent_epsilon,
        "epsilon_wanted": epsilon,
        "delta": delta,
        "accountant": "rdp",
        "noise_multiplier": float(optimizer.noise_multiplier),
        "clip": CLIP,
        "epochs": epochs,
        "batch": batch_size,
        "generator": "seeded, for repeatable measurements: not for a release",
    }
    return _state(model, initial_weights, step, history), training_facts


def compute_smoothed_losses(outputs: Tensor, y: Tensor, strength: float) -> Tensor:
    """Compute the loss of every record with smoothed labels.

    A network with one output Phi has the loss (1 - s/2) softplus(-m) + (s/2) softplus(m), with the margin
    m = y Phi of the record and its label y in {-1, 1}. A network with several outputs has the cross-entropy
    with the share s of each label spread over all classes.

    Args:
        outputs: (n, classes) outputs of the network, or (n, 1) for one output.
        y: (n,) labels.
        strength: The share s of each label that is spread over all classes.

    Returns:
        (n,) loss of each record.
    """
    if outputs.shape[1] > 1:
        return F.cross_entropy(outputs, y, label_smoothing=strength, reduction="none")
    sample_margins = margins(outputs, y).flatten()
    wrong_label_loss = (
        F.softplus(sample_margins, threshold=40) * (strength / 2) if strength else 0.0
    )
    return F.softplus(-sample_margins, threshold=40) * (1 - strength / 2) + wrong_label_loss


def _descend(
    job: Job, objective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> TrainingState:
    """Train by gradient descent.

    Args:
        job: The network to train, with its data and settings.
        objective: Function of the outputs and the labels. It returns the loss to minimize, and the loss
            that is recorded to draw a curve.

    Returns:
        The final state of the training.
    """
    config = job.config
    model, x, y = _begin(job)
    optimizer = torch.optim.SGD(
        model.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay
    )
    theta0, history = copy_weights(model), []
    for step in range(1, config.steps + 1):
        optimizer.zero_grad()
        loss, recorded_loss = objective(model(x), y)
        loss.backward()
        optimizer.step()
        if step % max(1, config.steps // POINTS) == 0:
            history.append({"step": float(step), "loss": float(recorded_loss.detach())})
    return _state(model, theta0, config.steps, history)


def _begin(job: Job) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the initialized network, its samples and their labels, on the device for the training."""
    if job.task == "regression":
        raise InputError(
            "The defenses 'label-smoothing', 'cap' and 'dp' need a network for classification; got a "
            "network for regression.",
            "Choose other defenses.",
        )
    network, dtype = Architecture.parse(job.arch), getattr(torch, job.config.dtype)
    model = initialize(network, job.config).to(job.device)
    normalized_labels = normalize_labels(job.data.y, job.task, network.outputs)
    normalized_labels = normalized_labels.to(
        job.device, torch.long if job.task == "multiclass" else dtype
    )
    return model, job.data.x.to(job.device, dtype), normalized_labels


def _state(
    model: nn.Module, theta0: dict[str, Tensor], steps: int, history: list[dict[str, float]]
) -> TrainingState:
    current_weights = copy_weights(model)
    is_finite = all(bool(torch.isfinite(t).all()) for t in current_weights.values())
    stop_reason = "steps" if is_finite else "diverged"
    return TrainingState(current_weights, theta0, steps, "", stop_reason, history=tuple(history))
