"""Set up the equation between training records and released weights, from which exposure is measured.

The exposure of a record is its risk to be reconstructed. The left side of the equation is the target: the
final weights, the weight update or an optimizer state of the released network. In the first layer, the target
is a weighted sum over records x_i, up to a residual E. Record x_i has a multiplier lam_i. Its backward signal
delta(x_i) is the gradient of its margin (or negative loss) with respect to the layer's pre-activations:

    target = sum_i c_i x_i^T + E,   c_i = lam_i delta(x_i)

If the target is the final weights, only the first layer is fitted, because the weights of other layers stay
close to their initial weights. If the target is a weight update or an optimizer state, all layers are fitted.
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
    """Samples x (n, *shape) in float64, and their labels y in the format of the network's task."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class Case:
    """A network, its training records, and the target that the records' weighted gradients must add up to.

    Attributes:
        model: The network in float64 on the device of the computation.
        surface: The attack surface, from which the target is read: final weights, weight update or optimizer
            state.
        knowledge: What the attacker knows.
        data: The training records as the user passed them.
        task: "binary", "multiclass" or "regression".
        records: The training records in float64 with labels for the task.
        holdout: The held-out records in the same format, None without held-out records.
        input_weight: Name of the weight matrix that is multiplied with whole samples, "" if there is none.
        layers: The layers whose gradients are fitted to the target.
        target: The tensors that the weighted sum of gradients must equal, by parameter name.
        row_space: Singular vectors of the rows of the weight ``input_weight``, None if these rows are not
            linear combinations of samples.
        no_row_space: Why ``row_space`` is None, "" if it is not None.
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
        """Check that network, records and attacker knowledge are consistent, and compute the target.

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
        attack_surface = SURFACES[_surface_name(surface, knowledge)](network, knowledge)
        model = network.copy_module(torch.float64).to(device).requires_grad_(False).eval()
        output_count = evaluate(model, data.x[:1].to(device, torch.float64)).shape[1]
        task = choose_task(network.task if task == "auto" and network.task else task, output_count)
        records = _samples(data, task, output_count, device)
        holdout_samples = None
        if holdout is not None:
            try:
                holdout_samples = _samples(holdout, task, output_count, device)
            except InputError as problem:
                raise InputError(f"Held-out samples: {problem.message}", problem.remedy) from None
        name, _, sees_samples = find_input_layer(model, data.shape)
        input_layer = name if sees_samples else ""
        input_rows = _read_input_rows(attack_surface, network, knowledge, data.shape)
        row_space, initial_factor = None, 1.0
        if isinstance(input_rows, InputLayer):
            contains_initial_weights = attack_surface.name == WEIGHTS and knowledge.theta0 is None
            initial_factor = input_rows.initial_share
            row_space = RowSpace.from_rows(
                input_rows.rows.to(device), tuple(data.shape), contains_initial_weights
            )
        return cls(
            model=model,
            surface=attack_surface,
            knowledge=knowledge,
            data=data,
            task=task,
            records=records,
            holdout=holdout_samples,
            input_weight=input_layer and f"{input_layer}.weight",
            layers=_fitted_layers(attack_surface, input_layer),
            target=_target(attack_surface, knowledge, initial_factor, device),
            row_space=row_space,
            no_row_space=input_rows if isinstance(input_rows, str) else "",
        )

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs (n, C) of the network for the samples x, computed block by block."""
        # Assumed upper limit of the number of float64 values that a pass through the network stores for one
        # sample.
        values_per_sample = 8 * x[0].numel() + 4096
        return torch.cat(
            [evaluate(self.model, x[block]) for block in split_blocks(len(x), values_per_sample)]
        )

    def rows(self, samples: Samples) -> Rows:
        """Return the terms of the sum of gradients that should equal the weights, one for each record.

        A term has a sample and a covector. The covector has the weights of the network's outputs whose
        weighted sum is differentiated. Usually this weighted sum is a margin, or one output of a regression.
        For several classes, the covector is instead the direction of the loss gradient, except if the target
        is the final weights without weight decay.
        """
        outputs = self.outputs(samples.x)
        uses_margins = self.surface.name == WEIGHTS and self.knowledge.weight_decay is None
        if uses_margins or self.task != "multiclass":
            constraints = constraint_rows(outputs.cpu(), samples.y.cpu(), self.task)
            return Rows(constraints.index.to(outputs.device), constraints.covectors.to(samples.x))
        return make_loss_rows(outputs, samples.y, self.task)

    def signals(self, samples: Samples) -> Tensor:
        """Return the backward signals of the samples at the first layer, (n, h) for h neurons.

        The backward signal is the gradient of the weighted sum of the outputs with respect to the layer's
        pre-activations. The weights of the outputs come from :func:`compute_covectors`.
        """
        x, y = samples
        loss_rows = make_loss_rows(self.outputs(x), y, self.task)
        input_layer = self.input_weight.removesuffix(".weight")
        gradients = compute_gradients(self.model, x, loss_rows, (input_layer,))
        return gradients.columns(x.new_ones(len(x)), self.input_weight)


def _surface_name(choice: str, knowledge: Knowledge) -> str:
    require_known(choice, ("auto", *SURFACE_CHOICES), "No surface")
    if choice != "auto":
        return SURFACE_CHOICES[choice]
    if knowledge.moment is not None:
        return MOMENT
    return WEIGHTS if knowledge.theta0 is None else CHANGE


def _samples(data: Dataset, task: str, output_count: int, device: str) -> Samples:
    labels = normalize_labels(data.y, task, output_count)
    return Samples(data.x.to(device, torch.float64), labels.to(device))


def _read_input_rows(
    surface: Surface, network: Network, knowledge: Knowledge, shape: tuple[int, ...]
) -> InputLayer | str:
    """Return the rows of the first layer's weight matrix minus the initial weights.

    These rows are linear combinations of samples. If the rows are no such combinations, the function returns
    the reason as a text.
    """
    # ``read_input_layer`` needs the trained weights and not the weight update, because it subtracts the
    # initial weights itself, after scaling them by the factor by which weight decay shrank them.
    surface_to_read = SURFACES[WEIGHTS](network, knowledge) if surface.name == CHANGE else surface
    input_rows = read_input_layer(surface_to_read, knowledge.replace(shape=shape, provenance={}))
    if isinstance(input_rows, InputLayer) and not input_rows.is_sample:
        return "the layer on the input sees patches of a sample"
    return input_rows


def _fitted_layers(surface: Surface, input_layer: str) -> tuple[str, ...]:
    if surface.name == WEIGHTS and input_layer:
        return (input_layer,)
    if surface.name == MOMENT:  # The optimizer may store no state for some parameters.
        names_by_layer = by_layer(surface.checkpoint.theta).items()
        return tuple(layer for layer, names in names_by_layer if {*names} <= surface.target.keys())
    return surface.layers


def _target(surface: Surface, knowledge: Knowledge, initial_factor: float, device: str) -> Theta:
    """Return the tensors that the weighted sum of gradients must equal.

    Args:
        surface: The attack surface.
        knowledge: What the attacker knows.
        initial_factor: The factor, at most 1, by which weight decay shrank the initial weights during
            training.
        device: Device of the computation.

    Returns:
        The tensors by parameter name.
    """
    target = {name: t.to(device, torch.float64) for name, t in surface.target.items()}
    # An optimizer state is a sum of gradients of the loss, and the sum over the records uses gradients of
    # the negative loss. So the sign is changed.
    if surface.name == MOMENT:
        return {name: -t for name, t in target.items()}
    if surface.name == CHANGE and knowledge.theta0 is not None and knowledge.weight_decay:
        initial_weights = {
            name: t.to(device, torch.float64) for name, t in knowledge.theta0.items()
        }
        return {
            name: t + (1 - initial_factor) * initial_weights[name] for name, t in target.items()
        }
    return target


def make_loss_rows(outputs: Tensor, y: Tensor, task: str) -> Rows:
    """Return one term of the weighted sum of gradients for each record: the record and a covector.

    The covector has the weights of the network's outputs whose weighted sum is differentiated. It is the
    direction in which a gradient step on the record's loss moves the outputs.

    Args:
        outputs: Outputs of the network, (n, C).
        y: Labels of the records.
        task: "binary", "multiclass" or "regression".

    Returns:
        The index and the covector of each record.
    """
    record_index = torch.arange(len(outputs), device=outputs.device)
    return Rows(record_index, compute_covectors(outputs, y, task))


def compute_covectors(outputs: Tensor, y: Tensor, task: str) -> Tensor:
    """Return the direction in which a gradient step on the loss of each record moves the record's outputs.

    The direction does not shrink to zero when the loss does. For one output the direction is the label y. For
    several classes the direction is e_y, the unit vector of the label, minus the softmax over the other
    classes. This is the negative gradient of the cross-entropy divided by 1 - p_y, where p_y is the
    probability of the label. For a regression the direction is the label minus the output, divided by the
    length of this difference.

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
    one_hot_labels = nn.functional.one_hot(y, outputs.shape[1]).to(outputs)
    return one_hot_labels - outputs.masked_fill(one_hot_labels.bool(), -torch.inf).softmax(1)
