"""Check the inputs of an exposure against each other and pose its equation.

The target is what training left in the release. The records are fitted to it:

    target = sum_i c_i x_i^T + E           in the layer on the input, c_i = lam_i delta(x_i)

If the target is the final weights, only the layer on the input is fitted, because other layers hardly leave
their initial weights. If it is a weight update or an optimizer state, all its layers are fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from residuum.attacks.unmixing.layers import InputLayer, find_input_layer, read_input_layer
from residuum.errors import InputError, require_known
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.risk.gradients import compute_gradients, split_blocks
from residuum.risk.row_space import RowSpace
from residuum.stationarity import Rows, Theta, by_layer
from residuum.surfaces.surface import CHANGE, MOMENT, SURFACE_CHOICES, SURFACES, WEIGHTS, Surface
from residuum.theory.kkt import evaluate
from residuum.theory.rows import choose_task, constraint_rows, normalize_labels


class Samples(NamedTuple):
    """Samples (n, *shape) in float64 on the device, and their labels in the form of the equations."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class Case:
    """A network, its training records, and the target that they are fitted to.

    Attributes:
        model: The network in float64 on the device.
        surface: The attack surface that the target comes from.
        knowledge: What the attacker knows.
        data: The training records as passed.
        task: "binary", "multiclass" or "regression".
        records: The training records.
        holdout: The held-out records.
        input_weight: Name of the weight that receives the input, "" if there is none.
        layers: The layers whose gradients are fitted to the target.
        target: The target by parameter name, signed so that covectors ascend.
        row_space: The row space of ``input_weight``, None if its rows are not mixtures of samples.
        no_row_space: Why there is no row space, "" if there is one.
    """

    model: nn.Module
    surface: Surface
    knowledge: Knowledge
    data: Dataset
    task: str
    records: Samples
    holdout: Samples | None
    input_weight: str
    layers: tuple[str, ...]
    target: Theta
    row_space: RowSpace | None
    no_row_space: str

    @classmethod
    def create(
        cls,
        network: Network,
        data: Dataset,
        holdout: Dataset | None,
        knowledge: Knowledge,
        surface: str,
        task: str,
        device: str,
    ) -> Case:
        """Check the inputs against each other and pose the equation.

        Args:
            network: The released network.
            data: The training records.
            holdout: Held-out records, or None.
            knowledge: What the attacker knows.
            surface: "weights", "change", "moment" or "auto".
            task: "binary", "multiclass", "regression" or "auto".
            device: Where to compute.

        Returns:
            The case.

        Raises:
            InputError: If the labels of held-out records do not fit the task, or if the surface or the task
                does not fit the network, the labels or the knowledge.
        """
        fitted_surface = SURFACES[_surface_name(surface, knowledge)](network, knowledge)
        model = network.copy_module(torch.float64).to(device).requires_grad_(False).eval()
        outputs = evaluate(model, data.x[:1].to(device, torch.float64)).shape[1]
        task = choose_task(network.task if task == "auto" and network.task else task, outputs)
        records = _samples(data, task, outputs, device)
        held_out = None
        if holdout is not None:
            try:
                held_out = _samples(holdout, task, outputs, device)
            except InputError as problem:
                raise InputError(f"Held-out samples: {problem.message}", problem.remedy) from None
        name, _, sees_samples = find_input_layer(model, data.shape)
        input_layer = name if sees_samples else ""
        rows = _mixtures(fitted_surface, network, knowledge, data.shape)
        row_space, share = None, 1.0
        if isinstance(rows, InputLayer):
            has_noise = fitted_surface.name == WEIGHTS and knowledge.theta0 is None
            share = rows.initial_share
            row_space = RowSpace.from_rows(rows.rows.to(device), tuple(data.shape), has_noise)
        return cls(
            model=model,
            surface=fitted_surface,
            knowledge=knowledge,
            data=data,
            task=task,
            records=records,
            holdout=held_out,
            input_weight=input_layer and f"{input_layer}.weight",
            layers=_fitted_layers(fitted_surface, input_layer),
            target=_target(fitted_surface, knowledge, share, device),
            row_space=row_space,
            no_row_space=rows if isinstance(rows, str) else "",
        )

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs (n, C) of the network, computed block by block."""
        width = 8 * x[0].numel() + 4096
        return torch.cat([evaluate(self.model, x[block]) for block in split_blocks(len(x), width)])

    def rows(self, samples: Samples) -> Rows:
        """Return the rows of the equation, from the margin problem for final weights, else from the loss."""
        outputs = self.outputs(samples.x)
        in_the_limit = self.surface.name == WEIGHTS and self.knowledge.weight_decay is None
        if in_the_limit or self.task != "multiclass":
            rows = constraint_rows(outputs.cpu(), samples.y.cpu(), self.task)
            return Rows(rows.index.to(outputs.device), rows.covectors.to(samples.x))
        return make_loss_rows(outputs, samples.y, self.task)

    def signals(self, samples: Samples) -> Tensor:
        """Return the backward signals (n, h) of the input layer in the direction of the loss."""
        x, y = samples
        rows = make_loss_rows(self.outputs(x), y, self.task)
        layer = self.input_weight.removesuffix(".weight")
        gradients = compute_gradients(self.model, x, rows, (layer,))
        return gradients.columns(x.new_ones(len(x)), self.input_weight)


def _surface_name(choice: str, knowledge: Knowledge) -> str:
    require_known(choice, ("auto", *SURFACE_CHOICES), "No surface")
    if choice != "auto":
        return SURFACE_CHOICES[choice]
    if knowledge.moment is not None:
        return MOMENT
    return WEIGHTS if knowledge.theta0 is None else CHANGE


def _samples(data: Dataset, task: str, outputs: int, device: str) -> Samples:
    labels = normalize_labels(data.y, task, outputs)
    return Samples(data.x.to(device, torch.float64), labels.to(device))


def _mixtures(
    surface: Surface, network: Network, knowledge: Knowledge, shape: tuple[int, ...]
) -> InputLayer | str:
    """Return the rows of the input layer minus the initial weights, or why they mix no samples."""
    # ``read_input_layer`` subtracts the share of the initial weights that weight decay left.
    source = SURFACES[WEIGHTS](network, knowledge) if surface.name == CHANGE else surface
    rows = read_input_layer(source, knowledge.replace(shape=shape, provenance={}))
    if isinstance(rows, InputLayer) and not rows.is_sample:
        return "the layer on the input sees patches of a sample"
    return rows


def _fitted_layers(surface: Surface, input_layer: str) -> tuple[str, ...]:
    if surface.name == WEIGHTS and input_layer:
        return (input_layer,)
    if surface.name == MOMENT:  # The state of some parameters may be missing.
        layers = by_layer(surface.checkpoint.theta).items()
        return tuple(layer for layer, names in layers if {*names} <= surface.target.keys())
    return surface.layers


def _target(surface: Surface, knowledge: Knowledge, share: float, device: str) -> Theta:
    """Return the signed target. ``share`` is what weight decay left of the initial weights."""
    target = {name: t.to(device, torch.float64) for name, t in surface.target.items()}
    if surface.name == MOMENT:  # The loss descends where covectors ascend.
        return {name: -t for name, t in target.items()}
    if surface.name == CHANGE and knowledge.theta0 is not None and knowledge.weight_decay:
        theta0 = {name: t.to(device, torch.float64) for name, t in knowledge.theta0.items()}
        return {name: t + (1 - share) * theta0[name] for name, t in target.items()}
    return target


def make_loss_rows(outputs: Tensor, y: Tensor, task: str) -> Rows:
    """Return one row per record, whose covector points where the loss pulls the outputs.

    Args:
        outputs: Outputs of the network, (n, C).
        y: Labels.
        task: "binary", "multiclass" or "regression".

    Returns:
        The rows.
    """
    index = torch.arange(len(outputs), device=outputs.device)
    return Rows(index, compute_covectors(outputs, y, task))


def compute_covectors(outputs: Tensor, y: Tensor, task: str) -> Tensor:
    """Return the direction in which the loss of each record pulls its outputs, scaled not to vanish.

    For one output it is y. For several classes it is e_y minus the softmax over the other classes, which
    is the gradient of the cross-entropy divided by 1 - p_y. For a regression it is the error divided by
    its length.

    Args:
        outputs: Outputs of the network, (n, C).
        y: Labels.
        task: "binary", "multiclass" or "regression".

    Returns:
        The covectors, (n, C).
    """
    if task == "binary":
        return y[:, None].to(outputs)
    if task == "regression":
        return nn.functional.normalize(y.to(outputs) - outputs, dim=1)
    label = nn.functional.one_hot(y, outputs.shape[1]).to(outputs)
    return label - outputs.masked_fill(label.bool(), -torch.inf).softmax(1)
