"""Networks of scikit-learn, live or in a pickle that nobody runs: weights, scalers, moment, start.

A pickle holds the attributes of the fitted estimator; a look-alike with them and no methods is read as the
live one would be.

The start is kept in the file, or drawn again from an integer seed. Glorot's rule, layer after layer from
one generator (``MLPClassifier._initialize``):

    W_l, b_l ~ U(-s, s),   s = sqrt(6 / (fan_in + fan_out)),  2 instead of 6 for logistic units

Without early stopping the estimator also keeps a copy of the start, under ``_best_coefs``.

A start is believed when it is proved: training moves W within the span of few samples, so most of the
start stays in W. Of two independent matrices of hd entries the cosine is 0 +- 1/sqrt(hd); the start has
one of many times that. Where W - c W0 shows fewer directions than W itself, that is said as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residuum.errors import CheckpointError, InputError
from residuum.io.inert import Block, InertObject
from residuum.io.metadata import MAX_TEXT
from residuum.io.optimizer_state import read_moment
from residuum.io.release import Release
from residuum.io.state_dicts import MAX_DEPTH, clean_state
from residuum.io.tree import walk
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.networks.spectrum import noise_edge

NETWORKS = ("MLPClassifier", "MLPRegressor")
# The attribute that holds the shift of each scaler.
CENTERS = {"StandardScaler": "mean_", "RobustScaler": "center_", "MinMaxScaler": "min_"}
CENTERS |= {"MaxAbsScaler": "none"}
# What arithmetic on values of any kind can raise.
VALUE_ERRORS = (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, RuntimeError)
MIN_DEVIATIONS = 6.0  # standard deviations
MAX_VALUES = 50_000_000  # of a network whose start is drawn again
CHUNK_ROWS = 64  # of a matrix that are taken as float64 at a time
MAX_SPECTRUM = 1_000_000  # of a layer whose singular values are counted: half a second


def convert_estimator(model: Any) -> Network:
    """A fitted MLPClassifier or MLPRegressor; its outputs before softmax or sigmoid.

    Its activation is known, so nothing is assumed; labels are numbers of classes, in its order.
    """
    theta: dict[str, Tensor] = {}
    for i, (weight, bias) in enumerate(zip(model.coefs_, model.intercepts_, strict=True)):
        theta[f"layers.{i}.weight"] = torch.from_numpy(weight.T.copy())
        theta[f"layers.{i}.bias"] = torch.from_numpy(bias.copy())
    widths = [len(model.coefs_[0]), *(len(bias) for bias in model.intercepts_)]
    activation = model.activation.replace("identity", "linear")
    said = f"mlp:{'-'.join(map(str, widths))},bias=all,activation={activation}"
    classes = tuple(str(c)[:MAX_TEXT] for c in getattr(model, "classes_", ()))
    theta, _, notes = clean_state(theta)
    task = "binary" if widths[-1] == 1 else "multiclass"
    task, arch = task if classes else "regression", str(Architecture.parse(said))
    return Network(theta, arch, (), classes, task, tuple(notes))


def read_estimator(release: Release) -> Network | None:
    """Return the network in a pickle, or None if the pickle holds none.

    Raises:
        CheckpointError: If the pickle is another estimator of scikit-learn, or a damaged network.
    """
    thing = _find_network(release)
    if thing is None or "coefs_" not in thing.attributes:
        _refuse(release)
        return None
    kinds = ("Scaler", "Transformer", "PCA")
    before = [thing.class_name for thing in _things(release) if thing.class_name.endswith(kinds)]
    steps = ", ".join(dict.fromkeys(before))
    note = f"the model file applies {steps} to samples before the network"
    try:
        network = convert_estimator(_to_namespace(thing))
        network.check_weights()
    except VALUE_ERRORS as problem:
        raise CheckpointError(
            f"A fitted MLPClassifier or MLPRegressor must be whole; {release.path.name!r} holds one that "
            f"is not ({type(problem).__name__}).",
            "Save it again.",
        ) from problem
    return network.replace(assumptions=(*network.assumptions, *([note] if before else [])))


def _refuse(release: Release) -> None:
    """Say which estimator it is, and what can be done with it."""
    content = release.content
    if isinstance(content, InertObject) and content.name.startswith("sklearn."):
        raise CheckpointError(
            f"residuum attacks neural networks; {release.path.name[:80]!r} is a pickle of a "
            f"{content.class_name[:60]}, for which it has no attack.",
            "Go by the findings of the scan alone, or train an MLPClassifier or MLPRegressor and audit that.",
        )


def read_training_state(
    release: Release,
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor] | None, tuple[str, ...]]:
    """What a pickle holds beside the weights of its network, and how the start was found."""
    thing = _find_network(release)
    if thing is None:
        return None, None, ()
    start, moment = find_initial_weights(thing), None
    try:
        moment = read_moment(_to_namespace(thing))
    except InputError:  # no optimizer was kept
        pass
    except VALUE_ERRORS as problem:
        raise CheckpointError(
            f"The optimizer of an estimator must fit its weights; this one does not "
            f"({type(problem).__name__}).",
            "Save the estimator again.",
        ) from problem
    if moment is not None and not all(bool(t.isfinite().all()) for t in moment.values()):
        moment = None
    if start is None:
        return moment, None, ()
    return moment, start.theta0, (f"the start of the network was {start.evidence}",)


def read_scalings(release: Release) -> list[tuple[Tensor, Tensor]]:
    """(factor, shift) of the scalers of a pipeline, in their order: each hands on factor x + shift."""
    found = []
    for thing in _things(release):
        own = thing.attributes
        names = ("scale_", CENTERS.get(thing.class_name, "none"))
        scale, center = (
            b.tensor().double() if isinstance(b := own.get(n), Block) else None for n in names
        )
        if thing.class_name == "MinMaxScaler" and scale is not None and center is not None:
            found.append((scale, center))
        elif thing.class_name in CENTERS and (scale is not None or center is not None):
            factor = torch.ones(()) if scale is None else 1 / scale
            found.append((factor, torch.zeros(()) if center is None else -center * factor))
    return found


def _things(release: Release) -> Iterator[InertObject]:
    return (place.value for place in walk(release.content) if isinstance(place.value, InertObject))


def _find_network(release: Release) -> InertObject | None:
    return next((thing for thing in _things(release) if thing.class_name in NETWORKS), None)


def _to_namespace(value: Any, depth: int = 0) -> Any:
    """Numbers of arrays, lists of them, and what belongs to an object as attributes."""
    if isinstance(value, Block):
        return value.tensor().numpy() if value.read is not None else list(value.objects or ())
    if isinstance(value, list | tuple) and depth < MAX_DEPTH:
        return [_to_namespace(part, depth + 1) for part in value]
    if isinstance(value, InertObject) and depth < MAX_DEPTH:
        wanted = value.attributes.items()
        return SimpleNamespace(**{name: _to_namespace(part, depth + 1) for name, part in wanted})
    return value


@dataclass(frozen=True, eq=False)
class StoredInitialization:
    """theta0 by our names; where it was found, why it is believed, and what to do about it."""

    theta0: dict[str, Tensor]
    attribute: str
    evidence: str
    remedy: str

    @property
    def value_count(self) -> int:
        """How many numbers it has."""
        return sum(t.numel() for t in self.theta0.values())


def read_layers(weights: Any, biases: Any) -> dict[str, Tensor] | None:
    """``coefs_`` and ``intercepts_`` by our names, (out, in); None where they are not there."""
    if not isinstance(weights, list) or not isinstance(biases, list):
        return None
    blocks = [w for w in weights if isinstance(w, Block)]
    others = [b for b in biases if isinstance(b, Block)]
    if not blocks or len(blocks) != len(others) or sum(b.numel for b in blocks) > MAX_VALUES:
        return None
    found: dict[str, Tensor] = {}
    for l, (weight, bias) in enumerate(zip(blocks, others, strict=True)):
        if len(weight.shape) != 2 or bias.shape != weight.shape[1:]:
            return None
        found[f"layers.{l}.weight"] = weight.tensor().T.contiguous()
        found[f"layers.{l}.bias"] = bias.tensor()
    return found


def draw_initial_weights(
    shapes: list[tuple[int, int]], seed: int, activation: str
) -> dict[str, Tensor]:
    """The start that scikit-learn draws for layers (out, in) from an integer ``random_state``."""
    random, found = np.random.RandomState(seed), {}
    for l, (fan_out, fan_in) in enumerate(shapes):
        bound = math.sqrt((2.0 if activation == "logistic" else 6.0) / (fan_in + fan_out))
        weight = random.uniform(-bound, bound, (fan_in, fan_out))
        found[f"layers.{l}.weight"] = torch.from_numpy(weight.T.copy())
        found[f"layers.{l}.bias"] = torch.from_numpy(random.uniform(-bound, bound, fan_out))
    return found


def find_initial_weights(estimator: InertObject) -> StoredInitialization | None:
    """The start of a fitted MLP in a pickle, where one is at hand and the weights bear it out.

    A seed alone proves nothing: the file may have been fitted on, or by another release. The start it
    draws counts only if the weights correlate with it more than independent matrices would.
    """
    said = estimator.attributes
    try:
        theta = read_layers(said.get("coefs_"), said.get("intercepts_"))
        kept = read_layers(said.get("_best_coefs"), said.get("_best_intercepts"))
    except CheckpointError:
        return None
    if theta is None:
        return None
    shapes = [tuple(t.shape) for t in theta.values() if t.ndim == 2]
    seed, activation = said.get("random_state"), said.get("activation")
    tries = list[tuple[str, str, dict[str, Tensor], str]]()
    if type(seed) is int and 0 <= seed < 2**32 and isinstance(activation, str):
        again = draw_initial_weights(shapes, seed, activation)  # type: ignore[arg-type]
        remedy = "Fit with random_state=None; before saving: model.random_state = None."
        tries.append(("random_state", "drawn again from random_state", again, remedy))
    if kept is not None and not said.get("early_stopping"):
        remedy = "Before saving: del model._best_coefs, model._best_intercepts."
        tries.append(("_best_coefs", "kept in _best_coefs", kept, remedy))
    for where, how, start, remedy in tries:
        if (proof := describe_evidence(theta, start)) is not None:
            return StoredInitialization(start, where, f"{how}, {proof}", remedy)
    return None


def describe_evidence(theta: dict[str, Tensor], start: dict[str, Tensor]) -> str | None:
    """Why ``start`` is that of ``theta``, None where it is not or where they are equal."""
    now, then = theta["layers.0.weight"], start["layers.0.weight"].to(theta["layers.0.weight"])
    if now.shape != then.shape or not bool(now.isfinite().all()) or torch.equal(now, then):
        return None
    inner, squares = _inner(now, then), _inner(then, then)
    cosine = inner / max((_inner(now, now) * squares) ** 0.5, 1e-30)
    deviations = cosine * math.sqrt(now.numel())
    if not deviations > MIN_DEVIATIONS:
        return None
    text = f"cosine {cosine:.2f} with the weights ({deviations:.0f} standard deviations)"
    kept = inner / max(squares, 1e-30)
    if min(now.shape) > 2 and now.numel() <= MAX_SPECTRUM:
        before = noise_edge(_spectrum(now), *now.shape)[0]
        after = noise_edge(_spectrum(now - kept * then), *now.shape)[0]
        text += f"; W - {kept:.2f} W0 shows {after} directions, W shows {before}"
    return text


def _inner(a: Tensor, b: Tensor) -> float:
    """<a, b> in float64, a few rows at a time: a scan has little memory."""
    parts = zip(a.split(CHUNK_ROWS), b.split(CHUNK_ROWS), strict=True)
    return sum(float((x.double() * y.double()).sum()) for x, y in parts)


def _spectrum(weight: Tensor) -> Tensor:
    """Singular values, largest first, from the smaller Gram matrix, likewise."""
    tall = weight if weight.shape[0] >= weight.shape[1] else weight.T
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64)
    for part in tall.split(CHUNK_ROWS):
        gram += part.double().T @ part.double()
    return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0).sqrt()
