"""What a checkpoint shows: surfaces, on which a sum over samples must equal something, and its figures.

A surface is what in a release can give training data away:

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

What the weights alone say before any attack is measured: size, homogeneity, balance, spectrum.
Directions of the first layer are singular values that stand out of the noise of the initialisation.
Gradient descent adds combinations of the training samples to the first layer, W1 = W0 + C X. Where
W0 is iid noise of scale s, the rest of the spectrum is that of noise: the squares lie between
s^2 (sqrt h - sqrt d)^2 and s^2 (sqrt h + sqrt d)^2, distributed as Marchenko and Pastur say, and the
upper end is the noise edge. The scale is read off the spectrum itself: after r directions are taken
away, s^2 = sum_{i>r} sigma_i^2 / ((h - r)(d - r)), and r is the least number for which the largest
of the rest does not exceed the edge that this scale gives.

Any decreasing spectrum has such an r, so the rest must also have the shape of noise. The count says
how many directions training left in W1. It bounds no number of samples: two inputs can give back
twenty, for gates tell samples apart as well.
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
from residuum.networks import Architecture, balance, dense_chain, homogeneity_order, probe_inputs
from residuum.networks.kinds import bias_rule
from residuum.records import Checkpoint, Dataset, Knowledge, Record
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
TOLERANCES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4)  # of the ranks that are shown
VISIBLE = 1e-2  # of the largest singular value
FEWEST_OF_NOISE = 20  # singular values that show a shape
MISFIT = 0.05  # relative distance of what is left from the quantiles of noise
TRACY_WIDOM = 3.2724  # 99.9% of the largest eigenvalue of real noise lie below


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
    if (last := max((one.last for one in knowledge.typed_columns), default=0)) >= arch.inputs:
        raise InputError(
            f"Types are granted of columns up to {last}; a sample has {arch.inputs}, counted from 0.",
            "Correct --columns.",
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

        gone = ("shape", "value_range", "mean", "norms", "columns")
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


@dataclass(frozen=True, eq=False)
class ParameterSummary(Record):
    """One parameter tensor: its name, shape, number of entries and Euclidean norm."""

    name: str
    shape: tuple[int, ...]
    parameters: int
    norm: float


@dataclass(frozen=True, eq=False)
class Inspection(Record):
    """What a checkpoint is, measured from its weights.

    bytes: of the weights in memory.
    homogeneity_order: measured, None when the network is not homogeneous.
    directions: of the first layer, None where they cannot be told, directions_of: above what, or
        why not.
    ranks: (tolerance, rank) pairs of the first layer, whatever it is.
    balance: for MLPs with a hidden layer, else None.
    layers: name, shape, size and norm of every parameter.
    parameters: how many numbers.
    assumptions: what had to be guessed while reading.
    """

    arch: str
    input_shape: tuple[int, ...]
    outputs: int
    layers: tuple[ParameterSummary, ...]
    parameters: int
    bytes: int
    dtype: str
    homogeneity_order: float | None
    directions: int | None
    directions_of: str
    ranks: tuple[tuple[float, int], ...]
    balance: float | None
    assumptions: tuple[str, ...] = ()

    def directions_given(self, samples: int | None) -> tuple[int | None, str]:
        """Directions and what they are of, where the network is known to have had ``samples``.

        More samples than inputs fill every direction, and their number says nothing.
        """
        if self.directions is not None and samples is not None:
            inputs = Architecture.parse(self.arch).inputs
            if samples > inputs:
                return None, f"more samples ({samples}) than inputs ({inputs})"
        return self.directions, self.directions_of

    def to_json(self) -> dict[str, Any]:
        """The published form (``residuum inspect --json``)."""
        ranks = {f"{tolerance:g}": rank for tolerance, rank in self.ranks}
        return super().to_json() | {"ranks": ranks}


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Measure a checkpoint; needs no data.

    Homogeneity and balance say whether the theory of the attacks applies, directions of the first layer
    how many stand out of the noise of its start. None of it predicts how many samples come back.
    """
    arch = Architecture.parse(checkpoint.arch)
    model = build_model(checkpoint, torch.float64)
    theta = checkpoint.theta
    weight = first_layer(theta)
    values = singular_values(weight)
    if checkpoint.module is not None:
        count, of = None, "which layer of a network kept as given meets the input is not known"
    elif weight.ndim > 2:
        count, of = None, "the first layer is a convolution: its filters see patches"
    else:
        count, of = directions(values, *weight.shape)
    return Inspection(
        arch=checkpoint.arch,
        input_shape=checkpoint.input_shape,
        outputs=arch.outputs,
        layers=tuple(
            ParameterSummary(name, tuple(t.shape), t.numel(), float(t.double().norm()))
            for name, t in theta.items()
        ),
        parameters=sum(t.numel() for t in theta.values()),
        bytes=sum(t.numel() * t.element_size() for t in theta.values()),
        dtype=str(next(iter(theta.values())).dtype).removeprefix("torch."),
        homogeneity_order=order_of(checkpoint),
        directions=count,
        directions_of=of,
        ranks=tuple((tolerance, rank_above(values, tolerance)) for tolerance in TOLERANCES),
        balance=balance(model),
        assumptions=checkpoint.assumptions,
    )


@torch.no_grad()
def order_of(checkpoint: Checkpoint) -> float | None:
    """The homogeneity order of a network, None when it is not homogeneous."""
    inputs = probe_inputs(Architecture.parse(checkpoint.arch).inputs)
    if checkpoint.module is not None and math.prod(checkpoint.input_shape) == inputs.shape[1]:
        inputs = inputs.reshape(len(inputs), *checkpoint.input_shape)  # a forward of the user's own
    return homogeneity_order(build_model(checkpoint, torch.float64), inputs)


def directions(values: Tensor, h: int, d: int) -> tuple[int | None, str]:
    """How many singular values of an (h, d) layer stand out, and above what; or None and why.

    None where the initialisation is visible: nothing stands out of it, or its edge lies above 1% of
    the largest singular value, or the rank at 1% is full.
    """
    r, edge = noise_edge(values, h, d)
    if r == 0:
        return None, "the initialisation is visible: no direction stands out of it"
    if is_noise(values[r:], h - r, d - r):
        if edge > VISIBLE:
            return None, f"the initialisation is visible: its noise reaches {100 * edge:.2g}%"
        return r, f"above the noise edge, {100 * edge:.2g}% of the largest singular value"
    rank = rank_above(values, VISIBLE)
    if rank == min(h, d):
        return None, f"all {rank} lie above {VISIBLE:.0%}: the initialisation may fill them"
    return rank, f"above {VISIBLE:.0%} of the largest singular value; no noise edge"


def singular_values(weight: Tensor) -> Tensor:
    """Largest first, up to a common factor; a convolution's of its (out, in * k * k) filters.

    Those of the small triangle R of W = QR, three times as fast.
    """
    matrix = weight.detach().double().flatten(1)
    largest = matrix.abs().max()
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    return torch.linalg.svdvals(torch.linalg.qr(tall / (largest if largest > 0 else 1), mode="r").R)


def rank_above(values: Tensor, tolerance: float) -> int:
    """Number of singular values above ``tolerance`` times the largest."""
    return int((values > tolerance * values.max()).sum())


def noise_edge(values: Tensor, h: int, d: int) -> tuple[int, float]:
    """(r, edge): r of the ``values`` stand out; the edge as a share of the largest value.

    The largest square of (h, d) noise varies about (sqrt h + sqrt d)^2 by Tracy and Widom's law in
    units of (sqrt h + sqrt d)(1/sqrt h + 1/sqrt d)^(1/3) (Johnstone 2001): one matrix of noise in a
    thousand exceeds the edge.
    """
    squares = values.square()
    taken = torch.arange(len(values), dtype=torch.float64)
    rows, columns = (h - taken).sqrt(), (d - taken).sqrt()
    left = squares.flip(0).cumsum(0).flip(0)
    ends, unit = rows + columns, (rows + columns) * (1 / rows + 1 / columns) ** (1 / 3)
    edges = left / (rows * columns).square() * (ends.square() + TRACY_WIDOM * unit)
    r = int((squares <= edges).nonzero()[0])  # the last value is always below its own edge
    return r, math.sqrt(float(edges[r] / squares[0])) if squares[0] > 0 else 0.0


def is_noise(values: Tensor, h: int, d: int) -> bool:
    """Whether ``values`` are distributed as the singular values of (h, d) noise of some scale.

    Those of noise hardly vary: a square matrix of k comes closer than 2/k in 999 of 1000 draws.
    """
    if len(values) < FEWEST_OF_NOISE:
        return False
    expected = noise_quantiles(h, d)
    scale = values.norm() / math.sqrt(h * d)
    misfit = (values - scale * expected).norm() / values.norm()
    return float(misfit) <= max(MISFIT, 2 / len(values))


def noise_quantiles(h: int, d: int, grid: int = 20_000) -> Tensor:
    """(min(h, d),) singular values of (h, d) noise of scale 1, by Marchenko and Pastur, largest first.

    Squares t have the density sqrt((b - t)(t - a))/t on [a, b], up to a factor; with
    t = (a + b)/2 + (b - a)/2 cos u it is sin(u)^2/t in u.
    """
    a, b = (math.sqrt(h) - math.sqrt(d)) ** 2, (math.sqrt(h) + math.sqrt(d)) ** 2
    u = (torch.arange(grid, dtype=torch.float64) + 0.5) * (math.pi / grid)
    t = (a + b) / 2 + (b - a) / 2 * u.cos()
    share = (u.sin().square() / t).cumsum(0)
    count = min(h, d)
    wanted = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return t[torch.searchsorted(share, wanted * share[-1])].sqrt()
