"""Training loops that the usual one has no room for: smoothed labels, and DP-SGD through Opacus."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residuum.defenses.base import Facts, Loop
from residuum.errors import InputError
from residuum.networks import Architecture
from residuum.records import Dataset
from residuum.stationarity import parameters
from residuum.theory.rows import normalise_labels
from residuum.training import TrainingConfig, TrainingState, initialise
from residuum.training.losses import margins

CLIP = 1.0  # of per-sample gradients
BATCHES = 4  # expected batches per epoch of DP-SGD
POINTS = 100


def smoothed(strength: float) -> Loop:
    """Gradient descent on the loss of labels that are right with probability 1 - strength / 2.

    One output: (1 - s/2) softplus(-m) + (s/2) softplus(m) with m = y Phi; more: cross-entropy with
    the share s spread over all classes.
    """

    def loop(
        arch: str, data: Dataset, config: TrainingConfig, task: str, device: str
    ) -> tuple[TrainingState, Facts]:
        model, x, y = _begin(arch, data, config, task, device)
        optimiser = torch.optim.SGD(
            model.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay
        )
        theta0, history = _cpu(model), []
        for step in range(config.steps):
            optimiser.zero_grad()
            loss = _smoothed_loss(model(x), y, strength)
            loss.backward()
            optimiser.step()
            if (step + 1) % max(1, config.steps // POINTS) == 0:
                history.append({"step": float(step + 1), "loss": float(loss.detach())})
        return _state(model, theta0, config.steps, history), {}

    return loop


def private(epsilon: float) -> Loop:
    """DP-SGD: per-sample gradients clipped, noise for (epsilon, 1/(10 n)) by Opacus' accountant."""
    return partial(_private, epsilon=epsilon)


def _private(
    arch: str, data: Dataset, config: TrainingConfig, task: str, device: str, *, epsilon: float
) -> tuple[TrainingState, Facts]:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model, x, y = _begin(arch, data, config, task, device)
    theta0, n = _cpu(model), len(data)
    batch = config.batch or math.ceil(n / BATCHES)
    epochs, delta = max(1, round(config.steps * batch / n)), 1 / (10 * n)
    order = torch.Generator().manual_seed(config.seed)
    noise = torch.Generator(device=device).manual_seed(config.seed + 1)
    history, step = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the generator is not a cryptographic one: said below
        engine = PrivacyEngine(accountant="rdp")
        wrapped, optimiser, loader = engine.make_private_with_epsilon(
            module=model, loss_reduction="sum", noise_generator=noise, max_grad_norm=CLIP,
            optimizer=torch.optim.SGD(model.parameters(), config.lr / batch, config.momentum),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=batch, generator=order),
            target_epsilon=epsilon, target_delta=delta, epochs=epochs,
        )  # fmt: skip
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
        "epsilon": spent, "epsilon_wanted": epsilon, "delta": delta, "accountant": "rdp",
        "noise_multiplier": float(optimiser.noise_multiplier), "clip": CLIP,
        "epochs": epochs, "batch": batch,
        "generator": "seeded, for repeatable measurements: not for a release",
    }  # fmt: skip
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


def _smoothed_loss(
    outputs: Tensor, y: Tensor, strength: float, reduce: Callable[[Tensor], Tensor] = torch.mean
) -> Tensor:
    if outputs.shape[1] > 1:
        return reduce(F.cross_entropy(outputs, y, label_smoothing=strength, reduction="none"))
    m = margins(outputs, y)
    wrong = F.softplus(m, threshold=40) * (strength / 2) if strength else 0.0
    return reduce(F.softplus(-m, threshold=40) * (1 - strength / 2) + wrong)


def _cpu(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.cpu().clone() for name, t in parameters(model).items()}


def _state(
    model: nn.Module, theta0: dict[str, Tensor], steps: int, history: list[dict[str, float]]
) -> TrainingState:
    theta = _cpu(model)
    fine = all(bool(torch.isfinite(t).all()) for t in theta.values())
    return TrainingState(
        theta, theta0, steps, "", "steps" if fine else "diverged", history=tuple(history)
    )
