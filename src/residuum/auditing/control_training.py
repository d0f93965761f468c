"""Train a positive control: a network of the audited architecture that memorizes its samples.

The user may say how the audited network was trained (:mod:`.training_recipe`). All other settings are
inferred from the audited network: its frozen layers, and its initialization. If the attacker knows the
initial weights, the control begins at these weights. Otherwise the spectrum of the first layer decides
between a small and a default initialization.

A network with a small initialization is trained by full-batch descent until its loss vanishes. Any other
network is trained by Adam in batches of 32 for a fixed number of epochs. This training goes on after the loss
has vanished, because only then do activation boundaries come to rest at training samples.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from residuum.attacks.random_streams import stream
from residuum.attacks.work import REFERENCE, count_work
from residuum.auditing.training_recipe import TrainingRecipe
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.settings.training import Initialization
from residuum.stationarity import by_layer, parameters
from residuum.surfaces.inspection import Inspection
from residuum.surfaces.surface import build_weights_surface
from residuum.theory.rows import choose_task, normalize_labels
from residuum.training import TrainingConfig, initialize, train
from residuum.training.methods import LOSSES, choose_loss

# Number of steps of full-batch training, if the training recipe does not name a number of epochs.
STEPS = 5000
# Number of epochs and batch size of mini-batch training, if the training recipe does not name them.
EPOCHS, BATCH = 400, 32
IN_BATCHES = ("adam", "sgd")  # optimizers that train in batches
VANISHED = 1e-5  # full-batch training ends when the loss is at most this value
MIN_SECONDS = 0.1  # shortest time limit of a training, even after the deadline of the audit
# Learning rates of gradient descent and of Adam, if the training recipe does not name a learning rate.
RATE, ADAM_RATE = 0.1, 1e-3
# Full-batch descent multiplies its learning rate by FASTER if a step lowers the loss, and by SLOWER if a step
# raises the loss.
FASTER, SLOWER = 1.05, 0.5


@dataclass(frozen=True)
class TrainedControl:
    """A trained positive control: a network that memorizes its training samples.

    Attributes:
        theta: Trained weights, by parameter name.
        theta0: Initial weights, by parameter name.
        loss: Training loss at the end.
        description: How the control was trained, in words.
    """

    theta: dict[str, Tensor]
    theta0: dict[str, Tensor]
    loss: float
    description: str


@dataclass(frozen=True)
class ControlTraining:
    """The settings with which a positive control (a network that memorizes its samples) is trained.

    Attributes:
        network: The audited network.
        knowledge: What the attacker knows about the audited network.
        inspection: Facts that were measured from the weights of the audited network.
        recipe: The settings with which the audited network was trained, as far as the user knows them.
        seconds: Time limit of the training.
        seed: Seed of initial weights and batches.
        task: Task of the network.
    """

    network: Network
    knowledge: Knowledge
    inspection: Inspection
    recipe: TrainingRecipe
    seconds: float
    seed: int
    task: str = field(init=False)

    def __post_init__(self) -> None:
        task = choose_task(self.network.task, self.network.architecture.outputs)
        object.__setattr__(self, "task", task)

    @property
    def initialization(self) -> str:
        """How the positive control (a network that memorizes its samples) is initialized.

        If the recipe names an initialization, the recipe decides. Otherwise, if the attacker knows the
        initial weights, the control begins at them ("granted"). Otherwise the spectrum of the first layer
        decides between "small" and "default".
        """
        inferred_initialization = "small" if self.inspection.directions else "default"
        return self.recipe.start or (
            inferred_initialization if self.knowledge.theta0 is None else "granted"
        )

    @property
    def initial_weights(self) -> Initialization:
        """Random initialization of the positive control (a network that is trained to memorize)."""
        initialization = "default" if self.initialization == "granted" else self.initialization
        return cast(Initialization, initialization)

    @property
    def begins_at_known_weights(self) -> bool:
        """Whether the positive control is trained from the same initial weights as the audited network."""
        return self.initialization == "granted" and self.knowledge.theta0 is not None

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the layers that stay frozen when the positive control is trained.

        If the recipe names frozen layers, these layers are returned. Otherwise, if the attacker knows the
        initial weights, the layers whose weights still equal the initial weights are returned.
        """
        if self.recipe.frozen or self.knowledge.theta0 is None:
            return self.recipe.frozen
        moved_layers = build_weights_surface(self.network, self.knowledge).layers
        return tuple(name for name in by_layer(self.network.theta) if name not in moved_layers)

    def train(self, data: Dataset) -> TrainedControl:
        """Train a network until it memorizes the samples, and return its weights."""
        frozen_layers = self.frozen
        may_maximize_margin = (
            self.task != "regression"
            and not self.begins_at_known_weights
            and not frozen_layers
            and self.network.live is None
        )
        has_small_init = may_maximize_margin and self.initialization == "small"
        optimizer = self.recipe.optimizer or ("margin" if has_small_init else "adam")
        description = f"trained by {optimizer} from a {self.initialization} initialization"
        description += f", {', '.join(frozen_layers)} frozen" if frozen_layers else ""
        if optimizer == "margin" and may_maximize_margin:
            return self._maximize_margin(data, description)
        model = self._initial_model(dtype_of(optimizer))
        initial_weights = {name: t.clone() for name, t in parameters(model).items()}
        _freeze(model, frozen_layers, initial_weights)
        loss = self._descend(model, data, optimizer)
        dtypes = {name: t.dtype for name, t in self.network.theta.items()}
        trained_weights = {
            n: t.detach().to(dtypes.get(n, t.dtype)) for n, t in parameters(model).items()
        }
        initial_weights = {
            name: t.to(trained_weights[name].dtype) for name, t in initial_weights.items()
        }
        return TrainedControl(trained_weights, initial_weights, loss, description)

    def _maximize_margin(self, data: Dataset, description: str) -> TrainedControl:
        config = TrainingConfig(
            init=self.initial_weights,
            steps=self.recipe.epochs or STEPS,
            seed=self.seed + 1,
            seconds=max(self.seconds, MIN_SECONDS),
            stop_loss=VANISHED,
        )
        training_state = train(self.network.arch, data, config, task=self.task)
        loss = training_state.history[-1]["loss"] if training_state.history else math.nan
        return TrainedControl(training_state.theta, training_state.theta0, loss, description)

    def _initial_model(self, dtype: torch.dtype) -> nn.Module:
        """Return the network with the initial weights that the attacker knows, or with random weights."""
        model = self.network.copy_module(dtype)
        if self.begins_at_known_weights:
            initial_weights = {
                name: t.to(dtype) for name, t in (self.knowledge.theta0 or {}).items()
            }
            model.load_state_dict({**model.state_dict(), **initial_weights})
        elif self.network.live is None:
            config = TrainingConfig(init=self.initial_weights, seed=self.seed + 1)
            model = initialize(self.network.architecture, config).to(dtype)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed + 1)
                for module in model.modules():
                    if callable(reset := getattr(module, "reset_parameters", None)):
                        reset()
        return model.requires_grad_(True)

    def _descend(self, model: nn.Module, data: Dataset, optimizer: str) -> float:
        """Train the model in place with the optimizer, and return the training loss at the end."""
        dtype = dtype_of(optimizer)
        targets = normalize_labels(data.y, self.task, self.network.architecture.outputs)
        return descend(
            model,
            data.x.to(dtype),
            targets.to(dtype) if targets.is_floating_point() else targets,
            loss=choose_loss("", self.task),
            recipe=self._complete_recipe(optimizer),
            target_loss=0.0 if optimizer in IN_BATCHES else VANISHED,
            seconds=self.seconds,
            seed=self.seed,
        )

    def _complete_recipe(self, optimizer: str) -> TrainingRecipe:
        """Complete the training recipe: set the optimizer, and replace missing settings by defaults.

        If the optimizer trains in batches, missing epochs and a missing batch size are replaced by defaults.

        Returns:
            The training recipe.
        """
        recipe = replace(self.recipe, optimizer=optimizer)
        if optimizer not in IN_BATCHES:
            return recipe
        return replace(recipe, epochs=recipe.epochs or EPOCHS, batch=recipe.batch or BATCH)

    def reference_seconds_per_sample(self, samples: Dataset) -> float:
        """Estimate how many seconds the training takes per training sample, on a fixed reference machine.

        The seconds are computed from the number of operations and the speed of the reference machine, so they
        do not depend on the machine that runs the audit.

        Returns:
            The estimated seconds per training sample.
        """
        batch = samples.x[:BATCH].float()
        initial_model = self._initial_model(torch.float32)
        counted_operations = count_work(lambda: initial_model(batch).sum().backward())
        return EPOCHS * counted_operations.seconds(REFERENCE["cpu"]) / len(batch)


def dtype_of(optimizer: str) -> torch.dtype:
    """Return the dtype in which an optimizer trains: float32 for batches, float64 for the full batch."""
    return torch.float32 if optimizer in IN_BATCHES else torch.float64


def _freeze(model: nn.Module, layers: tuple[str, ...], theta: dict[str, Tensor]) -> None:
    for layer, names in by_layer(theta).items():
        if layer in layers:
            for name, p in model.named_parameters():
                p.requires_grad_(p.requires_grad and name not in names)


def descend(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss: str,
    recipe: TrainingRecipe,
    target_loss: float,
    seconds: float,
    seed: int,
) -> float:
    """Train a model in place until it reaches a target loss, or until the epochs or the time are over.

    If the recipe has no learning rate, full-batch descent adapts the learning rate. The rate grows while the
    loss falls. If a step raises the loss, the step is undone and the rate is halved.

    Args:
        model: The model.
        x: (n, *shape) samples.
        y: (n,) labels.
        loss: Name of the loss.
        recipe: Optimizer, rate, epochs and batch size.
        target_loss: Training ends when the loss is at most this value.
        seconds: Time limit of the training.
        seed: Seed that draws the batches.

    Returns:
        The loss of the trained model on all samples.
    """
    trained_parameters = [p for p in model.parameters() if p.requires_grad]
    learning_rate = recipe.rate or (ADAM_RATE if recipe.optimizer == "adam" else RATE)
    optimizer_class = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.SGD
    optimizer = optimizer_class(trained_parameters, lr=learning_rate)
    batch_size = recipe.batch or len(x)
    end, last_loss = time.monotonic() + max(seconds, MIN_SECONDS), math.inf
    # The learning rate adapts only if every step uses all samples. The losses of two batches cannot be
    # compared, because the batches hold different samples.
    adapts_rate = not recipe.rate and recipe.optimizer in ("gd", "margin") and batch_size >= len(x)
    generator = stream("twin", seed)
    parameters_before_step = [p.detach().clone() for p in trained_parameters]
    for _ in range(recipe.epochs or STEPS):
        order, total = torch.randperm(len(x), generator=generator), 0.0
        for rows in order.split(batch_size) if batch_size < len(x) else (slice(None),):
            optimizer.zero_grad()
            batch_loss = LOSSES[loss](model(x[rows]), y[rows])
            batch_loss.backward()
            if adapts_rate and not float(batch_loss.detach()) < last_loss:
                with torch.no_grad():
                    for p, before in zip(trained_parameters, parameters_before_step, strict=True):
                        p.copy_(before)
                optimizer.param_groups[0]["lr"] *= SLOWER
                last_loss = math.inf
                continue
            if adapts_rate:
                parameters_before_step = [p.detach().clone() for p in trained_parameters]
                optimizer.param_groups[0]["lr"] *= FASTER
            last_loss = float(batch_loss.detach())
            total += last_loss * len(y[rows])
            optimizer.step()
        mean_loss = total / len(x) if batch_size < len(x) else last_loss
        if mean_loss <= target_loss or time.monotonic() > end:
            break
    with torch.no_grad():
        return float(LOSSES[loss](model(x), y))
