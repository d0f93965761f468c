"""Check the inputs of an exposure against each other, and set up the equation that records must fit.

The target is what training left in the release: the final weights, the weight update or an optimizer state.
In the layer on the input, records x_i with multipliers lam_i and backward signals delta(x_i) fit the target
up to a residual E:

    target = sum_i c_i x_i^T + E,   c_i = lam_i delta(x_i)

If the target is the final weights, only the layer on the input is fitted, because other layers hardly leave
their initial weights. If the target is a weight update or an optimizer state, all its layers are fitted.
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
    """Samples x (n, *shape) in float64, and their labels y in the format that the task needs."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class Case:
    """A network, its training records, and the target that the gradients of the records must fit.

    Attributes:
        model: The network in float64 on the device of the computation.
        surface: The attack surface that the target comes from.
        knowledge: What the attacker knows.
        data: The training records as the user passed them.
        task: "binary", "multiclass" or "regression".
        records: The training records in float64 with labels for the task.
        holdout: The held-out records in the same format, None without held-out records.
        input_weight: Name of the weight that receives the input, "" if there is none.
        layers: The layers whose gradients are fitted to the target.
        target: The tensors that the weighted sum of gradients must equal, by parameter name.
        row_space: The row space of the weight ``input_weight``, None if the rows of this weight are not
            mixtures of samples.
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
        """Check network, records and knowledge against each other, and set up the equation.

        Args:
            network: The released network.
            data: The training records.
            holdout: Held-out records, or None.
            knowledge: What the attacker knows.
            surface: The attack surface: "weights", "change", "moment" or "auto".
            task: What the network predicts: "binary", "multiclass", "regression" or "auto".
            device: Device of the computation, such as "cpu".

        Returns:
            The network, the records and the target that they must fit.

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
        """Return the outputs (n, C) of the network for the samples x, computed block by block."""
        width = 8 * x[0].numel() + 4096
        return torch.cat([evaluate(self.model, x[block]) for block in split_blocks(len(x), width)])

    def rows(self, samples: Samples) -> Rows:
        """Return a covector on the outputs for each gradient in the equation.

        Covectors come from the constraints of the margin problem, or from the loss of a network with several
        classes if its training was finite or had weight decay.
        """
        outputs = self.outputs(samples.x)
        in_the_limit = self.surface.name == WEIGHTS and self.knowledge.weight_decay is None
        if in_the_limit or self.task != "multiclass":
            rows = constraint_rows(outputs.cpu(), samples.y.cpu(), self.task)
            return Rows(rows.index.to(outputs.device), rows.covectors.to(samples.x))
        return make_loss_rows(outputs, samples.y, self.task)

    def signals(self, samples: Samples) -> Tensor:
        """Return how the loss of each sample pulls the h neurons of the input layer, (n, h)."""
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
    """Return the rows of the input layer minus the initial weights, or why the rows mix no samples."""
    # ``read_input_layer`` subtracts the share of the initial weights that weight decay left.
    row_surface = SURFACES[WEIGHTS](network, knowledge) if surface.name == CHANGE else surface
    rows = read_input_layer(row_surface, knowledge.replace(shape=shape, provenance={}))
    if isinstance(rows, InputLayer) and not rows.is_sample:
        return "the layer on the input sees patches of a sample"
    return rows


def _fitted_layers(surface: Surface, input_layer: str) -> tuple[str, ...]:
    if surface.name == WEIGHTS and input_layer:
        return (input_layer,)
    if surface.name == MOMENT:  # The optimizer may store no state for some parameters.
        layers = by_layer(surface.checkpoint.theta).items()
        return tuple(layer for layer, names in layers if {*names} <= surface.target.keys())
    return surface.layers


def _target(surface: Surface, knowledge: Knowledge, share: float, device: str) -> Theta:
    """Return the tensors that the weighted sum of gradients must equal.

    Args:
        surface: The attack surface.
        knowledge: What the attacker knows.
        share: The share of the initial weights that weight decay left.
        device: Device of the computation.

    Returns:
        The tensors by parameter name.
    """
    target = {name: t.to(device, torch.float64) for name, t in surface.target.items()}
    # An optimizer state holds gradients of the loss, but the equation holds negative gradients.
    if surface.name == MOMENT:
        return {name: -t for name, t in target.items()}
    if surface.name == CHANGE and knowledge.theta0 is not None and knowledge.weight_decay:
        theta0 = {name: t.to(device, torch.float64) for name, t in knowledge.theta0.items()}
        return {name: t + (1 - share) * theta0[name] for name, t in target.items()}
    return target


def make_loss_rows(outputs: Tensor, y: Tensor, task: str) -> Rows:
    """Return one covector per record: the direction in which the loss pulls the network's outputs.

    Args:
        outputs: Outputs of the network, (n, C).
        y: Labels of the records.
        task: "binary", "multiclass" or "regression".

    Returns:
        The records' indices and covectors.
    """
    index = torch.arange(len(outputs), device=outputs.device)
    return Rows(index, compute_covectors(outputs, y, task))


def compute_covectors(outputs: Tensor, y: Tensor, task: str) -> Tensor:
    """Return the direction in which the loss of each record pulls the record's outputs.

    Its length does not vanish when the loss does. For one output the direction is the label y. For several
    classes it is e_y, the unit vector of the label, minus the softmax over the other classes. This is the
    negative gradient of the cross-entropy divided by 1 - p_y, where p_y is the probability of the label. For
    a regression the direction is the label minus the output, divided by the length of this difference.

    Args:
        outputs: Outputs of the network, (n, C).
        y: Labels of the records.
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
