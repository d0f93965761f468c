"""Surfaces: what in a release can give training data away, and what a sum over samples must equal.

    target = sum_i grad_theta <u_i, Phi(theta; x_i)>

===============  ===============  =================================================================
surface          target           why it is such a sum
===============  ===============  =================================================================
weights          theta            in the limit: training has come to rest (KKT, weight decay)
weights - start  theta - theta0   every step of training added gradients at the samples
moment           m                momentum and Adam keep a mean of the last gradients
===============  ===============  =================================================================

An attack that found nothing is evidence of absence only where it explains the layers that carry
information. With a start these are the layers that moved by more than rounding: a frozen layer has a
gradient that nobody followed, so no candidate can explain it and none has to. Where the first layer
itself was frozen, inputs are seen through fixed features only and many images share one feature:
explaining the layers above says little about images. Without a start only the first layer of a
network is known to have come far from its own; the others are measured, not judged.

Where the layers next to the input of an MLP kept their start, the layers above are a network of its own
(:class:`Head`), whose inputs are those features. Candidates live in feature space, and are compared with
the features of the data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from residuum.checkpoints.reading import build_model, checkpoint_from_module
from residuum.errors import ArchitectureError, InputError, require_known
from residuum.networks import Architecture, dense_chain
from residuum.networks.kinds import bias_rule
from residuum.records import Checkpoint, Dataset, Knowledge
from residuum.stationarity import Theta, by_layer, moved_layers

WEIGHTS, CHANGE, MOMENT = "weights", "weights - start", "moment"
FROZEN_FIRST = (
    "the first layer did not move from its start, so images were seen through fixed features only"
)
NOTHING_MOVED = "no layer moved from its start"
FEATURES = (
    "{} kept their start, so samples were seen through fixed features only: candidates are features, "
    "compared with those of the data ({} numbers each); features are not samples, though inverting them "
    "may be possible; layers are counted from the first one that moved"
)


@dataclass(frozen=True, eq=False)
class Surface:
    """One thing in a release that training samples left their trace in.

    checkpoint: the weights at which gradients are taken, and the network they belong to.
    target: by parameter name, in their numbers.
    layers: those that carry information.
    silent: why even a small residual there would say nothing, "" where it speaks.
    """

    name: str
    checkpoint: Checkpoint
    target: Theta
    layers: tuple[str, ...]
    silent: str = ""

    @property
    def equations(self) -> tuple[str, ...]:
        """Layers in which the sum must equal the target: those that moved, or that kept a moment."""
        if self.name == MOMENT:
            own = by_layer(self.target).items()
            return tuple(layer for layer, names in own if any(self.target[n].any() for n in names))
        return self.layers if self.name == CHANGE else tuple(by_layer(self.target))

    def model(self) -> nn.Module:
        """The network at these weights."""
        return build_model(self.checkpoint)

    @property
    def outputs(self) -> int:
        """Of the network."""
        return Architecture.parse(self.checkpoint.arch).outputs

    @property
    def task(self) -> str:
        """Of the network."""
        return task_of(self.checkpoint)

    def shape(self, knowledge: Knowledge) -> tuple[int, ...]:
        """Of one sample."""
        return sample_shape(self.checkpoint, knowledge)


def weights(checkpoint: Checkpoint, knowledge: Knowledge) -> Surface:
    """The weights themselves."""
    target = {name: t.detach() for name, t in checkpoint.theta.items()}
    # Which layer of a network kept as given meets the input is not known: none may be left out.
    first = tuple(by_layer(target))[: 1 if checkpoint.module is None else None]
    if knowledge.theta0 is None:
        return Surface(WEIGHTS, checkpoint, target, first)
    moved = _moved(checkpoint, knowledge.theta0)
    silent = "" if moved[: len(first)] == first else FROZEN_FIRST if moved else NOTHING_MOVED
    return Surface(WEIGHTS, checkpoint, target, moved, silent)


def change(checkpoint: Checkpoint, knowledge: Knowledge) -> Surface:
    """What training added to the start that was granted."""
    if (start := knowledge.theta0) is None:
        raise InputError(
            "The change of the weights needs the initial weights theta0; none were granted.",
            "Say --init init.safetensors, or use another objective.",
        )
    whole = weights(checkpoint, knowledge)
    if not whole.layers:
        raise InputError(
            "An attack on the change of the weights explains how far they moved; these equal the "
            "start that was granted.",
            "Grant the weights before training, not those after it.",
        )
    target = {name: t - start[name].to(t) for name, t in whole.target.items()}
    return Surface(CHANGE, checkpoint, target, whole.layers, whole.silent)


def moment(checkpoint: Checkpoint, knowledge: Knowledge) -> Surface:
    """What the optimiser kept of the gradients."""
    if (kept := knowledge.moment) is None:
        raise InputError(
            "The moment of an optimiser must be in the file or handed over; there is none.",
            "Give the training checkpoint, or Knowledge(moment=rs.moment_of(optimiser, model)).",
        )
    shapes = {name: t.shape for name, t in checkpoint.theta.items()}
    if wrong := [name for name, t in kept.items() if t.shape != shapes.get(name)]:
        raise InputError(
            f"A moment has the names and shapes of the weights; {wrong[0]!r} has others.",
            "Grant that of the optimiser of this very network.",
        )
    # A parameter without state was frozen: nothing is asked of it.
    there = {name: kept.get(name, torch.zeros(())).expand(shapes[name]) for name in shapes}
    target = {name: t.detach().to(checkpoint.theta[name]) for name, t in there.items()}
    layers = tuple(name for name, own in by_layer(target).items() if {*own} & {*kept})
    # As of weights without a start, only the first layer of a network is judged.
    return Surface(MOMENT, checkpoint, target, layers[: 1 if checkpoint.module is None else None])


SURFACES: dict[str, Callable[[Checkpoint, Knowledge], Surface]] = {
    WEIGHTS: weights,
    CHANGE: change,
    MOMENT: moment,
}


CHOICES = {"weights": WEIGHTS, "change": CHANGE, "moment": MOMENT}  # as a user names them


def chosen(name: str, knowledge: Knowledge) -> str:
    """The surface that a user names, which must be there."""
    require_known(name, CHOICES, "No surface")
    missing = {"change": knowledge.theta0, "moment": knowledge.moment}
    if name in missing and missing[name] is None:
        what = "a start (--init, --base)" if name == "change" else "the state of an optimiser"
        raise InputError(f"--surface {name} needs {what}; there is none.", "Leave --surface out.")
    return CHOICES[name]


def surfaces(checkpoint: Checkpoint, knowledge: Knowledge) -> dict[str, Surface]:
    """All that a release has, with what is granted."""
    needs = {CHANGE: knowledge.theta0, MOMENT: knowledge.moment}
    names = [name for name in SURFACES if name not in needs or needs[name] is not None]
    return {name: SURFACES[name](checkpoint, knowledge) for name in names}


def moment_of(trained: Any, model: nn.Module | None = None) -> dict[str, Tensor]:
    """The mean of the last gradients that a live optimiser keeps, weight decay taken out.

    trained: a torch optimiser with momentum or a first moment, of ``model``; or a fitted
    MLPClassifier or MLPRegressor of scikit-learn, whose optimiser stays in it.
    """
    if isinstance(trained, optim.Optimizer) and model is not None:
        found = _torch_moment(trained, model)
    else:
        found = _sklearn_moment(trained)
    if not found:
        raise InputError(
            "A moment is kept by an optimiser with momentum, or Adam, that has taken a step, and by "
            f"an MLPClassifier fitted with one; {type(trained).__name__} shows none.",
            "Say moment_of(optimiser, model) or moment_of(estimator).",
        )
    return found


def _torch_moment(optimiser: optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """By our names."""
    own = dict(model.named_parameters())
    try:
        checkpoint = checkpoint_from_module(model)
        names = {name: checkpoint.source_names.get(name, name) for name in checkpoint.theta}
    except ArchitectureError:  # kept as given once its shape is said, under its own names
        names = {name: name for name in own}
    group_of = {p: group for group in optimiser.param_groups for p in group["params"]}
    found = {}
    for name, source in names.items():
        p = own[source]
        group = group_of.get(p, {})
        apart = isinstance(optimiser, optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        kept = without_decay(optimiser.state.get(p, {}), group, p.detach(), apart)
        if kept is not None:
            found[name] = kept.detach().cpu()
    return found


def without_decay(
    state: Mapping[str, Any], group: Mapping[str, Any], weight: Tensor, apart: bool
) -> Tensor | None:
    """The moment of one parameter; None where none is kept. apart: decay is no part of the gradients.

    Decay that is part of the gradients is part of their mean: w W, or w W / (1 - momentum).
    """
    numbers = (group.get(name) for name in ("weight_decay", "momentum", "dampening"))
    decay, momentum, dampening = (v if isinstance(v, int | float) else 0.0 for v in numbers)
    if (adam := state.get("exp_avg")) is not None:
        return adam - (0.0 if apart else decay) * weight
    if (buffer := state.get("momentum_buffer")) is not None:
        return buffer - decay * (1 - dampening) / max(1 - momentum, 1e-6) * weight
    return None


def _sklearn_moment(estimator: Any) -> dict[str, Tensor]:
    """By our parameter names: the mean of the last gradients in a fitted MLP of scikit-learn.

    Its gradients hold alpha W / batch of weight decay, which is taken out; its SGD keeps a velocity,
    the mean gradient times minus the rate over 1 - momentum. Its matrices are transposed to ours.
    """
    kept = getattr(estimator, "_optimizer", None)
    moments = getattr(kept, "ms", None) or getattr(kept, "velocities", None)
    if kept is None or not moments:
        return {}
    batch, samples = estimator.batch_size, round(estimator.t_ / estimator.n_iter_)
    batch = min(200, samples) if batch == "auto" else min(batch, samples)
    factor = 1.0
    if hasattr(kept, "velocities"):
        factor = -estimator.learning_rate_init / (1 - kept.momentum)
    found = {}
    for l, (m, weight) in enumerate(zip(moments, estimator.coefs_, strict=False)):
        found[f"layers.{l}.weight"] = torch.tensor(
            (m / factor - estimator.alpha * weight / batch).T
        )
    for l, m in enumerate(moments[len(estimator.coefs_) :]):
        found[f"layers.{l}.bias"] = torch.tensor(m / factor)
    return found


def task_of(checkpoint: Checkpoint) -> str:
    """binary, multiclass or regression: as the releaser said, else by the outputs."""
    if checkpoint.task == "regression":
        return "regression"
    return "binary" if Architecture.parse(checkpoint.arch).outputs == 1 else "multiclass"


def first_layer(theta: Theta) -> Tensor:
    """The weight that meets the input: the first tensor that is not a vector."""
    return next(t for t in theta.values() if t.ndim >= 2)


def sample_shape(checkpoint: Checkpoint, knowledge: Knowledge) -> tuple[int, ...]:
    """Shape of one sample: what the attacker says, else the file, else the architecture; it must fit the
    network.
    """
    arch = Architecture.parse(checkpoint.arch)
    own = checkpoint.input_shape or arch.image_shape or (arch.inputs,)
    shape = tuple(knowledge.shape or own)
    if math.prod(shape) != arch.inputs:
        raise InputError(
            f"A sample must have the network's {arch.inputs} values; shape {shape} has "
            f"{math.prod(shape)}.",
            "Correct --shape.",
        )
    mean = knowledge.mean
    if mean is not None and mean.numel() not in (1, arch.inputs):
        raise InputError(
            f"The mean must be one number or have {arch.inputs} values; got {mean.numel()}.",
            "Grant the mean image of the data.",
        )
    return shape


def _moved(checkpoint: Checkpoint, start: Theta) -> tuple[str, ...]:
    """Layers that left a start of the same network."""
    shapes = {name: t.shape for name, t in checkpoint.theta.items()}
    if {name: t.shape for name, t in start.items()} != shapes:
        raise InputError(
            f"The initial weights must be weights of {checkpoint.arch or 'the same network'}; "
            "theirs have other names or shapes.",
            "Grant the initial weights of this very network.",
        )
    return moved_layers(checkpoint.theta, start)


@dataclass(frozen=True, eq=False)
class Head:
    """The layers above those that were frozen, as a network: its weights, and what it is fed with."""

    checkpoint: Checkpoint
    body: nn.Module
    frozen: tuple[str, ...]

    @property
    def note(self) -> str:
        """What it means for candidates and scores."""
        inputs = Architecture.parse(self.checkpoint.arch).inputs
        return FEATURES.format(", ".join(self.frozen), inputs)

    @torch.no_grad()
    def features(self, data: Dataset) -> Dataset:
        """The same records as the head receives them."""
        kind = next(self.body.parameters()).dtype
        parts = [self.body(part.flatten(1).to(kind)) for part in data.x.split(1000)]
        return data.replace(x=torch.cat(parts).to(data.x.dtype), mean=None)

    def knowledge(self, whole: Knowledge) -> Knowledge:
        """What is granted of the whole network, in the head's names; samples' shape and range are not."""
        first = len(self.frozen)

        def mine(theta: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
            return None if theta is None else renamed(theta, first)

        gone = ("shape", "value_range", "mean", "norms")
        facts = {"theta0": mine(whole.theta0), "moment": mine(whole.moment) or None}
        provenance = {k: v for k, v in whole.provenance.items() if k not in gone}
        if facts["moment"] is None:
            provenance.pop("moment", None)
        return whole.replace(**facts, **dict.fromkeys(gone), provenance=provenance)


def head_of(checkpoint: Checkpoint, knowledge: Knowledge) -> Head | None:
    """The head that was trained on frozen layers of an MLP, None where the first layer moved.

    Samples were then seen through fixed features only: the layers above are a network of their own,
    whose samples are the outputs of ``body``. Anything an attack finds lives in that space.
    """
    start = knowledge.theta0
    if start is None or checkpoint.module is not None:
        return None
    arch = Architecture.parse(checkpoint.arch)
    chain = dense_chain(build_model(checkpoint))
    if arch.kind != "mlp" or chain is None:
        return None
    layers = tuple(by_layer(checkpoint.theta))
    moved = moved_layers(checkpoint.theta, start)
    if not moved or layers[0] in moved:
        return None
    first = layers.index(moved[0])
    widths = [len(checkpoint.theta[f"{name}.weight"]) for name in layers]
    theta = renamed(checkpoint.theta, first)
    has_bias = [f"layers.{l}.bias" in theta for l in range(len(layers) - first)]
    options = {**arch.options, "bias": bias_rule(has_bias)}
    said = str(Architecture("mlp", tuple(widths[first - 1 :]), None, options))
    head = checkpoint.replace(theta=theta, arch=said, input_shape=(), source_names={})
    body = nn.Sequential()
    for linear in chain.linears[:first]:
        body.append(linear)
        body.append(chain.activation)
    return Head(head, body.eval(), layers[:first])


def renamed(theta: dict[str, Tensor], first: int) -> dict[str, Tensor]:
    """Layers from ``first`` on, counted anew."""
    found = {}
    for name, t in theta.items():
        match = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
        if match and int(match[1]) >= first:
            found[f"layers.{int(match[1]) - first}.{match[2]}"] = t
    return found
