"""The inputs of an exposure, checked against each other and posed as one equation.

What training left in the release is the target that the records must explain:

    target = sum_i c_i x_i^T + E           in the layer on the input, c_i = lam_i delta(x_i)

Final weights are explained in the layer on the input, because other layers hardly leave their initial
weights. A weight update or an optimizer state is explained in every layer that holds something.
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
from residuum.risk.gradients import blocks, gradients_of
from residuum.risk.row_space import RowSpace
from residuum.stationarity import Rows, Theta, by_layer
from residuum.surfaces.surface import CHANGE, MOMENT, SURFACE_CHOICES, SURFACES, WEIGHTS, Surface
from residuum.theory.kkt import evaluate
from residuum.theory.rows import choose_task, constraint_rows, normalize_labels


class Samples(NamedTuple):
    """Samples (n, *shape) in float64 on the device, and their labels as the equations need them."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class Case:
    """A network, its training records, and what the records must explain.

    surface: what of the release is explained.
    records, holdout: training records and held-out records.
    input_weight: name of the weight that receives the input, "" if there is none.
    layers: whose gradients must explain the target.
    target: by parameter name, signed so that covectors ascend.
    row_space: of ``input_weight``, None if its rows are not mixtures of samples.
    no_row_space: why there is none.
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
    def of(
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

        Raises:
            InputError: If the surface or the task does not fit the network, the labels or the knowledge.
        """
        explained = SURFACES[_surface_name(surface, knowledge)](network, knowledge)
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
        name, _, whole = find_input_layer(model, data.shape)
        input_layer = name if whole else ""
        rows = _mixtures(explained, network, knowledge, data.shape)
        row_space, share = None, 1.0
        if isinstance(rows, InputLayer):
            noise, share = (
                explained.name == WEIGHTS and knowledge.theta0 is None,
                rows.initial_share,
            )
            row_space = RowSpace.of(rows.rows.to(device), tuple(data.shape), noise)
        return cls(
            model=model,
            surface=explained,
            knowledge=knowledge,
            data=data,
            task=task,
            records=records,
            holdout=held_out,
            input_weight=input_layer and f"{input_layer}.weight",
            layers=_explained_layers(explained, input_layer),
            target=_target(explained, knowledge, share, device),
            row_space=row_space,
            no_row_space=rows if isinstance(rows, str) else "",
        )

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs (n, C) of the network, block by block."""
        width = 8 * x[0].numel() + 4096
        return torch.cat([evaluate(self.model, x[block]) for block in blocks(len(x), width)])

    def rows(self, samples: Samples) -> Rows:
        """Return the rows of the equation: of the margin problem for final weights, else of the loss."""
        outputs = self.outputs(samples.x)
        in_the_limit = self.surface.name == WEIGHTS and self.knowledge.weight_decay is None
        if in_the_limit or self.task != "multiclass":
            rows = constraint_rows(outputs.cpu(), samples.y.cpu(), self.task)
            return Rows(rows.index.to(outputs.device), rows.covectors.to(samples.x))
        return loss_rows(outputs, samples.y, self.task)

    def signals(self, samples: Samples) -> Tensor:
        """Return the backward signals (n, h) of the input layer, in the direction of the loss."""
        x, y = samples
        rows = loss_rows(self.outputs(x), y, self.task)
        layer = self.input_weight.removesuffix(".weight")
        gradients = gradients_of(self.model, x, rows, (layer,))
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
    """Return the rows of the input layer less the initial weights, or why they mix no whole samples."""
    # ``read_input_layer`` subtracts the share of the initial weights that weight decay left.
    source = SURFACES[WEIGHTS](network, knowledge) if surface.name == CHANGE else surface
    rows = read_input_layer(source, knowledge.replace(shape=shape, provenance={}))
    if isinstance(rows, InputLayer) and not rows.is_sample:
        return "the layer on the input sees patches of a sample"
    return rows


def _explained_layers(surface: Surface, input_layer: str) -> tuple[str, ...]:
    if surface.name == WEIGHTS and input_layer:
        return (input_layer,)
    if surface.name == MOMENT:  # some of its parameters may be missing
        layers = by_layer(surface.checkpoint.theta).items()
        return tuple(layer for layer, names in layers if {*names} <= surface.target.keys())
    return surface.layers


def _target(surface: Surface, knowledge: Knowledge, share: float, device: str) -> Theta:
    """Return the signed target; ``share``: what weight decay left of the initial weights."""
    target = {name: t.to(device, torch.float64) for name, t in surface.target.items()}
    if surface.name == MOMENT:  # gradients of the loss descend where covectors ascend
        return {name: -t for name, t in target.items()}
    if surface.name == CHANGE and knowledge.theta0 is not None and knowledge.weight_decay:
        theta0 = {name: t.to(device, torch.float64) for name, t in knowledge.theta0.items()}
        return {name: t + (1 - share) * theta0[name] for name, t in target.items()}
    return target


def loss_rows(outputs: Tensor, y: Tensor, task: str) -> Rows:
    """Return one row per record, whose covector points where the loss pulls the outputs."""
    index = torch.arange(len(outputs), device=outputs.device)
    return Rows(index, covectors(outputs, y, task))


def covectors(outputs: Tensor, y: Tensor, task: str) -> Tensor:
    """Return the direction (n, C) in which each record's loss pulls its outputs, scaled not to vanish.

    For one output it is y. For several classes it is e_y minus the softmax over the other classes, which
    is the gradient of the cross-entropy divided by 1 - p_y. For a regression it is the error divided by
    its length.
    """
    if task == "binary":
        return y[:, None].to(outputs)
    if task == "regression":
        return nn.functional.normalize(y.to(outputs) - outputs, dim=1)
    label = nn.functional.one_hot(y, outputs.shape[1]).to(outputs)
    return label - outputs.masked_fill(label.bool(), -torch.inf).softmax(1)
