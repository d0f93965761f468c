"""What a caller hands to an audit, as the project's own records, and whether it all fits together.

Do samples and granted facts speak of the same scale? Attacks keep candidates inside the granted value
range, less the granted mean. Training samples outside it cannot come back, so that "no leak found"
would say nothing of the network; held-out samples on another scale make chance look weaker or
stronger than it is.

Was the network read rightly? A file says little of what a network is: pooling can pass for stride, an
adapter for a network, labels may be shifted. All of these show in the accuracy on the training
samples, so every audit begins with it. It does not show an activation read wrongly: small networks
fit either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from residuum.datasets.given import is_one_hot
from residuum.errors import CheckpointError, DataError, ResiduumError, require_known
from residuum.evaluation.matching import prepare_scoring_data
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Record
from residuum.records.inputs import add_mean
from residuum.theory.kkt import evaluate
from residuum.theory.rows import accuracy, choose_task, normalize_labels

NEAR = 0.01  # of the range's width: rounding, no contradiction
FAR = 1.0  # of the range's width: no sample of this range
LOOKS_LIKE = {64: "1,8,8", 256: "1,16,16", 784: "1,28,28", 1024: "1,32,32", 3072: "3,32,32"}
BYTES = 255.0  # the largest value of a pixel in a file
SPREAD, SHIFT = 2.0, 0.5  # ratio of standard deviations; difference of means over the larger one
DOUBTFUL = 0.5  # of the way from naming the commonest class, or the mean, to being always right
MAX_WEIGHT = torch.finfo(torch.float32).max
LARGEST = 1e12  # squares and sums of such values stay far inside the finite numbers of float32


def as_knowledge(given: Knowledge | Mapping[str, Any] | None) -> Knowledge:
    """What is granted; a dictionary is read as the fields of Knowledge, numbers and arrays as they are."""
    if not isinstance(given, Mapping):
        return given or Knowledge()
    known = tuple(f.name for f in fields(Knowledge))
    for name in given:
        require_known(str(name), known, "Nothing is granted as")
    facts = dict(given)
    for name in ("mean", "norms"):
        if facts.get(name) is not None:
            facts[name] = torch.as_tensor(facts[name], dtype=torch.float64)
    for name in ("shape", "value_range", "label_balance"):
        if facts.get(name) is not None:
            facts[name] = tuple(facts[name])
    return Knowledge(**facts)


def with_source_of_mean(knowledge: Knowledge, train: Dataset | None) -> Knowledge:
    """Return the knowledge with the source "train" for a mean that is the mean of the training samples.

    Such a mean makes a stronger attacker than one of public samples, so reports must name its source.
    """
    mean = knowledge.mean
    if mean is None or train is None or knowledge.provenance.get("mean", "user") != "user":
        return knowledge
    samples = train.images.double()
    means = [samples.mean(0)] + ([] if train.mean is None else [train.mean.double()])
    if not any(_same_values(mean.double(), other) for other in means):
        return knowledge
    return knowledge.replace(provenance={**knowledge.provenance, "mean": "train"})


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors hold the same values in the same order, up to rounding to float32."""
    if a.numel() != b.numel() or a.numel() < 2:
        return False
    scale = float(b.abs().max())
    return bool((a.flatten() - b.flatten()).abs().max() <= 1e-5 * scale)


def suited(
    checkpoint: Network,
    train: Dataset | None,
    control: Dataset | None,
    knowledge: Knowledge,
    task: str = "auto",
) -> tuple[Dataset | None, Dataset | None]:
    """The samples as this network receives them, where they were given in another common form.

    Recognized are labels as one column of ones among zeros for each class, channels last, pixels from
    0 to 255, and a table on its own scale where the network knows it standardized. Whatever is changed
    is a note of the training samples. Samples that already suit stay as they are.
    """
    if train is None or (control is not None and control.shape != train.shape):
        return train, control
    notes: list[str] = []
    sets = [train] if control is None else [train, control]
    sets = _channels_first(checkpoint, sets, notes)
    outputs = checkpoint.architecture.outputs
    if task_of(checkpoint, task) != "regression":
        sets = [_plain_labels(one, outputs, notes) for one in sets]
    sets = _scaled(checkpoint, sets, knowledge, task_of(checkpoint, task), notes)
    flat = sets[0].x.ndim == 2 and not sets[0].features and knowledge.shape is None
    if flat and (looks := LOOKS_LIKE.get(sets[0].shape[0])):
        row = f"rows of {sets[0].shape[0]} values"
        notes.append(f"{row} may be images: --shape {looks} shows them so")
    first = sets[0].replace(notes=tuple(dict.fromkeys((*sets[0].notes, *notes))))
    return first, None if control is None else sets[1]


def shape_for(model: Any, given: Dataset | None) -> tuple[int, ...] | None:
    """Of one sample as ``model`` takes it: with channels first where only that goes through its forward."""
    if given is None:
        return None
    shape = given.shape
    if not isinstance(model, nn.Module) or len(shape) != 3 or shape[-1] not in (1, 3, 4):
        return shape
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    one = given.x[:1].to(dtype)
    for x in (one, one.movedim(-1, 1)):
        with torch.no_grad(), suppress(RuntimeError):
            model(x)
            return tuple(x.shape[1:])
    return shape


def _channels_first(checkpoint: Network, sets: list[Dataset], notes: list[str]) -> list[Dataset]:
    """Images with their channels last turned round, where nothing else can be meant.

    One channel may stand anywhere. Three or four are turned only if the network names that very shape:
    a table of (28, 28, 3) could be meant as it is.
    """
    arch, shape = checkpoint.architecture, sets[0].shape
    wanted = arch.image_shape if arch.image_shape and len(arch.image_shape) == 3 else None
    last = len(shape) == 3 and shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4)
    turned = (shape[-1], *shape[:-1])
    # One channel lies in memory alike either way; more do not, so only a known shape may turn them.
    if not last or not (shape[-1] == 1 or turned == wanted or turned == checkpoint.input_shape):
        return sets
    notes.append(f"images of shape {shape} have their channels last; they are read as {turned}")
    mean = (
        {}
        if sets[0].mean is None or sets[0].mean.ndim != 3
        else {"mean": sets[0].mean.movedim(-1, 0)}
    )
    return [one.replace(x=one.x.movedim(-1, 1).contiguous(), **mean) for one in sets]


def _plain_labels(one: Dataset, outputs: int, notes: list[str]) -> Dataset:
    if is_one_hot(one.y) and one.y.shape[1] in (outputs, 2):
        notes.append("labels of one column for each class are read as class indices")
        return one.replace(y=one.y.argmax(1))
    return one.replace(y=one.y[:, 0]) if one.y.ndim == 2 and one.y.shape[1] == 1 else one


def _scaled(
    checkpoint: Network, sets: list[Dataset], knowledge: Knowledge, task: str, notes: list[str]
) -> list[Dataset]:
    """Pixels of files divided by 255, a table standardized: where the network is right on them so.

    The names of two classes say nothing of their order, so both are tried.
    """
    train, span = sets[0], knowledge.value_range

    def known(one: Dataset) -> bool | None:
        """Whether the network fits the training samples when they are read so; None: it takes none such."""
        try:
            fit = fit_of(checkpoint, one, None, task)
        except (ResiduumError, RuntimeError, ValueError):  # said by ``check_fit``
            return None
        return fit is not None and not fit.doubtful

    def pixels(one: Dataset) -> Dataset:
        return one.replace(x=one.x / BYTES, mean=None if one.mean is None else one.mean / BYTES)

    if _bytes(train) and (span is None or span[1] <= 2) and known(pixels(train)):
        notes.append(
            f"values up to {float(train.x.max()):g} are read as pixels and divided by 255, as most "
            "networks receive them; grant --value-range 0,255 where this one does not"
        )
        return [pixels(one) for one in sets]
    if train.x.ndim != 2 or train.scale is not None or train.mean is not None:
        return sets
    if known(train) is not False:  # no other scale makes a network take samples that it does not
        return sets
    offset, spread = train.x.mean(0), torch.std(train.x, dim=0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)

    def standardized(one: Dataset) -> Dataset:
        return one.replace(x=(one.x - offset) / spread, scale=spread, offset=offset)

    def turned(one: Dataset) -> Dataset:
        return one.replace(y=1 - one.y, classes=one.classes[::-1])

    first = (
        "the columns of your samples were standardized with the mean and deviation of your "
        "training samples"
    )
    ways = {first: [standardized]}
    if len(train.classes) == 2 and set(train.y.unique().tolist()) == {0, 1}:
        other = f"{train.classes[1]!r} is read as class 0 and {train.classes[0]!r} as class 1"
        ways |= {other: [turned], f"{first}, and {other}": [standardized, turned]}
    for said, steps in ways.items():
        read = sets
        for step in steps:
            read = [step(one) for one in read]
        if known(read[0]):
            notes.append(f"{said}: the network predicts their labels that way, and not without it")
            return read
    return sets


def task_of(checkpoint: Network, task: str) -> str:
    """The task that was said, else the one that the checkpoint names; "auto" where neither does."""
    return checkpoint.task if task == "auto" and checkpoint.task else task


def check_fit(
    checkpoint: Network, train: Dataset | None, control: Dataset | None, task: str = "auto"
) -> None:
    """Refuse before the attack whatever scoring and certificate would refuse after it.

    An attack takes minutes, and its folder would be left without a result.
    """
    for name, weight in checkpoint.theta.items():
        if weight.numel() and (largest := float(weight.abs().max())) > MAX_WEIGHT:
            raise CheckpointError(
                f"Weights must fit into float32, in which attacks compute; {name} reaches {largest:.3g}.",
                "Check that the file holds the trained weights.",
            )
    for name, data in (("data", train), ("holdout", control)):
        if data is not None and (largest := float(data.x.abs().max())) > LARGEST:
            raise DataError(
                f"Values of samples must lie within +-{LARGEST:g}; {name} reaches {largest:.3g}.",
                "Give x as the network receives it.",
            )
    if train is None:
        return
    model = checkpoint.module
    outputs = evaluate(model, train.x[:1].to(next(model.parameters()).dtype)).shape[1]
    if choose_task(task_of(checkpoint, task), outputs) != "regression" and not train.y.any():
        raise DataError(
            f"Training samples need the labels they were trained with; all {len(train)} are 0, as where "
            "none are given.",
            "Say audit(model, data=(x, y)), or save 'y' beside 'x'.",
        )
    normalize_labels(train.y, choose_task(task_of(checkpoint, task), outputs), outputs)
    prepare_scoring_data(torch.zeros_like(train.x[:1]), train, control, [])


def scale_notes(
    train: Dataset | None, control: Dataset | None, knowledge: Knowledge
) -> tuple[str, ...]:
    """What contradicts, one sentence each; refused where the range cannot be meant for these data."""
    if train is None:
        return ()
    return (*_bytes(train), *_range(train, knowledge), *_scales(train, control))


def _bytes(train: Dataset) -> tuple[str, ...]:
    """Pixels as files have them: most networks receive them divided by 255."""
    least, most = float(train.x.min()), float(train.x.max())
    if not (least >= 0 and BYTES / 2 < most <= BYTES):
        return ()
    return (f"The training samples have values up to {most:g}: is this what the network receives?",)


def _range(train: Dataset, knowledge: Knowledge) -> tuple[str, ...]:
    """What lies outside the granted range, as a note; far outside is refused.

    Candidates are kept inside the range, so samples beyond it could not come back: an audit would find
    nothing and the range would be at fault.
    """
    if knowledge.value_range is None:
        return ()
    x = train.x.double()
    if (mean := knowledge.mean) is not None:
        if mean.numel() not in (1, x[0].numel()):
            raise DataError(
                f"The mean must be one number or have {x[0].numel()} values; got {mean.numel()}.",
                "Grant the mean image of the data.",
            )
        x = add_mean(x, mean)
    low, high = knowledge.value_range
    least, most = float(x.min()), float(x.max())
    beyond = max(low - least, most - high) / (high - low)
    if beyond <= NEAR:
        return ()
    added = "with the granted mean added" if mean is not None else "no mean being granted"
    said = (
        f"The training samples run from {least:.3g} to {most:.3g}, {added}, outside the granted "
        f"value range {low:g} to {high:g}"
    )
    remedy = "Grant the range of the data before a mean was subtracted, and that mean (--mean)."
    if beyond > FAR:
        raise DataError(f"{said}, by more than its width.", remedy)
    share = float(((x < low) | (x > high)).double().mean())
    return (f"{said} ({share:.0%} of the values): attacks cannot bring these back. {remedy}",)


def _scales(train: Dataset, control: Dataset | None) -> tuple[str, ...]:
    """A note where held-out samples differ from training samples in scale; the control then compares
    nothing.
    """
    if control is None:
        return ()
    mean, other_mean = (float(data.x.double().mean()) for data in (train, control))
    spread, other = (float(data.x.double().std(correction=0)) for data in (train, control))
    larger, smaller = max(spread, other), min(spread, other)
    if larger <= SPREAD * smaller and abs(mean - other_mean) <= SHIFT * larger:
        return ()
    return (
        "Held-out samples seem to be on another scale than training samples (mean and standard "
        f"deviation {other_mean:.2g} and {other:.2g} against {mean:.2g} and {spread:.2g}): the "
        "control holds only where both were preprocessed alike.",
    )


@dataclass(frozen=True, eq=False)
class Fit(Record):
    """measure: "accuracy" or "R^2"; train, holdout: of the network as read, None without labels;
    base: what naming the commonest class, or the mean, would reach on the training samples.
    """

    derived = ("line",)

    measure: str
    train: float
    holdout: float | None
    base: float

    @property
    def doubtful(self) -> bool:
        """Whether the network hardly fits its own training samples."""
        return self.train - self.base < DOUBTFUL * (1 - self.base)

    @property
    def line(self) -> str:
        """What every audit says first."""
        seen = "-" if self.holdout is None else self.figure(self.holdout)
        return (
            f"{self.measure} of the network as read: {self.figure(self.train)} on the training "
            f"samples, {seen} on the held-out ones"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """A warning where the network does not know the samples it is said to have learned."""
        if not self.doubtful:
            return ()
        trivial = "the mean" if self.measure == "R^2" else "the commonest class"
        return (
            f"The network as read reaches an {self.measure} of {self.figure(self.train)} on its training "
            f"samples, where always naming {trivial} reaches {self.figure(self.base)}: it may not have "
            "been read as what it is, or the samples or labels are not those it learned. Check "
            "architecture, preprocessing and labels.",
        )

    def figure(self, value: float) -> str:
        """A value of the measure, as a person reads it."""
        return f"{value:.3g}" if self.measure == "R^2" else f"{value:.1%}"


def fit_of(
    checkpoint: Network, train: Dataset | None, control: Dataset | None, task: str
) -> Fit | None:
    """Measured on samples that :func:`~residuum.auditing.inputs.check_fit` let pass."""
    if train is None:
        return None
    model = checkpoint.double_module
    outputs = evaluate(model, train.x.double())
    task = choose_task(task, outputs.shape[1])
    y = normalize_labels(train.y, task, outputs.shape[1])
    holdout = None
    # Held-out samples may come without labels, which reads as one label that says nothing.
    if control is not None and (len(control.y.unique()) > 1 or task == "regression"):
        known = task == "regression" or set(control.y.tolist()) <= set(train.y.tolist())
        if known and control.y.shape[1:] == train.y.shape[1:]:
            wanted = normalize_labels(control.y, task, outputs.shape[1])
            holdout = accuracy(evaluate(model, control.x.double()), wanted, task)
    if task == "regression":
        return Fit("R^2", accuracy(outputs, y, task), holdout, 0.0)
    base = float(y.unique(return_counts=True)[1].max()) / len(y)
    return Fit("accuracy", accuracy(outputs, y, task), holdout, base)
