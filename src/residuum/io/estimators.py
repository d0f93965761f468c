"""Read scikit-learn networks from memory or a pickle: weights, scalers, optimizer state, initial weights.

The pickle is not run. We copy the attributes of the fitted estimator to a plain namespace without methods. We
read this namespace in the same way as an estimator in memory.

The initial weights are stored in the file, or they can be drawn again from an integer seed. scikit-learn
draws them with Glorot's rule, layer after layer from one generator (``MLPClassifier._initialize``):

    W_l, b_l ~ U(-s, s),   s = sqrt(6 / (fan_in + fan_out))

for the weight W_l and the bias b_l of layer l. For logistic units the 6 is replaced by 2.

Without early stopping, the estimator also stores a copy of its initial weights in ``_best_coefs``.

We report initial weights W0 only if they correlate with the trained weights W. Training changes W only within
the span of few samples, so most of W0 remains in W. The cosine of two independent matrices with n entries is
0 +- 1/sqrt(n). The cosine of W and the true W0 is many times larger. The evidence also says how many singular
values of W exceed the noise edge (the largest singular value of a random matrix). It says the same for
W - c W0, where c is the factor with which c W0 is closest to W.
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
# For each scaler class of scikit-learn, the attribute that stores the shift.
CENTERS = {"StandardScaler": "mean_", "RobustScaler": "center_", "MinMaxScaler": "min_"}
CENTERS |= {"MaxAbsScaler": "none"}
# Exceptions that arithmetic on values of unknown type can raise.
VALUE_ERRORS = (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, RuntimeError)
# Initial weights are accepted if their cosine with the trained weights exceeds this many standard deviations.
MIN_DEVIATIONS = 6.0
# Largest number of weights of a network whose initial weights are drawn again.
MAX_VALUES = 50_000_000
# Number of rows of a weight matrix that are converted to float64 together, to save memory.
CHUNK_ROWS = 64
# Singular values are computed only for layers of at most this many weights. This takes half a second.
MAX_SPECTRUM = 1_000_000


def convert_estimator(model: Any) -> Network:
    """Return the network of a fitted MLPClassifier or MLPRegressor, without its softmax or sigmoid.

    The estimator names its activation, so no assumption about the activation is needed. The labels of the
    network are the classes in the order of the estimator.

    Args:
        model: The fitted estimator, or a namespace with its attributes.

    Returns:
        The network.
    """
    theta: dict[str, Tensor] = {}
    for i, (weight, bias) in enumerate(zip(model.coefs_, model.intercepts_, strict=True)):
        theta[f"layers.{i}.weight"] = torch.from_numpy(weight.T.copy())
        theta[f"layers.{i}.bias"] = torch.from_numpy(bias.copy())
    widths = [len(model.coefs_[0]), *(len(bias) for bias in model.intercepts_)]
    activation = model.activation.replace("identity", "linear")
    arch_text = f"mlp:{'-'.join(map(str, widths))},bias=all,activation={activation}"
    classes = tuple(str(c)[:MAX_TEXT] for c in getattr(model, "classes_", ()))
    theta, _, notes = clean_state(theta)
    task = "binary" if widths[-1] == 1 else "multiclass"
    task, arch = task if classes else "regression", str(Architecture.parse(arch_text))
    return Network(theta, arch, (), classes, task, tuple(notes))


def read_estimator(release: Release) -> Network | None:
    """Return the network in a pickle, or None if the pickle holds no network.

    Args:
        release: The content of the pickle.

    Returns:
        The network, or None.

    Raises:
        CheckpointError: If the pickle holds another estimator of scikit-learn, or a damaged network.
    """
    estimator = _find_network(release)
    if estimator is None or "coefs_" not in estimator.attributes:
        _refuse_other_estimators(release)
        return None
    preprocessor_suffixes = ("Scaler", "Transformer", "PCA")
    preprocessor_names = [
        obj.class_name
        for obj in _iterate_objects(release)
        if obj.class_name.endswith(preprocessor_suffixes)
    ]
    preprocessor_list = ", ".join(dict.fromkeys(preprocessor_names))
    preprocessing_note = f"the model file applies {preprocessor_list} to samples before the network"
    try:
        network = convert_estimator(_to_namespace(estimator))
        network.check_weights()
    except VALUE_ERRORS as problem:
        raise CheckpointError(
            "A fitted MLPClassifier or MLPRegressor must have all its weights; the estimator in the file "
            f"{release.path.name!r} does not ({type(problem).__name__}).",
            "Save the estimator again.",
        ) from problem
    return network.replace(
        assumptions=(*network.assumptions, *([preprocessing_note] if preprocessor_names else []))
    )


def _refuse_other_estimators(release: Release) -> None:
    """Raise an error if the pickle holds an estimator of scikit-learn that is not an MLP."""
    estimator = release.content
    if isinstance(estimator, InertObject) and estimator.name.startswith("sklearn."):
        raise CheckpointError(
            f"residuum attacks neural networks and decision trees; the file {release.path.name[:80]!r} "
            f"is a file of {release.kind} with the class {estimator.class_name[:60]}, for which residuum has "
            "no attack.",
            "If you trust the file, load it in Python and pass the model object to residuum.audit. The "
            "audit then compares the losses of training samples with those of held-out samples.",
        )


def read_training_state(
    release: Release,
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor] | None, tuple[str, ...]]:
    """Return the optimizer state and the initial weights that a pickle stores with its network.

    Args:
        release: The content of the pickle.

    Returns:
        The mean of recent gradients (or None), the initial weights (or None), both by parameter name, and
        notes that say where the initial weights come from.

    Raises:
        CheckpointError: If the optimizer does not fit the weights.
    """
    estimator = _find_network(release)
    if estimator is None:
        return None, None, ()
    initialization, moment = find_initial_weights(estimator), None
    try:
        moment = read_moment(_to_namespace(estimator))
    except InputError:  # raised by ``read_moment`` if the file holds no optimizer state
        pass
    except VALUE_ERRORS as problem:
        raise CheckpointError(
            "The optimizer state of an estimator must have the shapes of its weights; the optimizer "
            f"state in this file does not ({type(problem).__name__}).",
            "Save the estimator again.",
        ) from problem
    if moment is not None and not all(bool(t.isfinite().all()) for t in moment.values()):
        moment = None
    if initialization is None:
        return moment, None, ()
    return moment, initialization.theta0, (f"the initial weights were {initialization.evidence}",)


def read_scalings(release: Release) -> list[tuple[Tensor, Tensor]]:
    """Return the pair (factor, shift) of each scaler of a scikit-learn pipeline, first scaler first.

    A scaler converts a sample x to factor * x + shift.

    Args:
        release: The content of the pickle.

    Returns:
        One pair of tensors for each scaler.
    """
    scalings = (read_scaling(pickled_object) for pickled_object in _iterate_objects(release))
    return [scaling for scaling in scalings if scaling is not None]


def read_scaling(scaler: InertObject) -> tuple[Tensor, Tensor] | None:
    """Return factor and shift of a scaler of scikit-learn.

    Args:
        scaler: An object of a pickle.

    Returns:
        The pair (factor, shift), or None if the object is not a fitted scaler of scikit-learn.
    """
    attributes = scaler.attributes
    attribute_names = ("scale_", CENTERS.get(scaler.class_name, "none"))
    scale, center = (
        b.tensor().double() if isinstance(b := attributes.get(n), Block) else None
        for n in attribute_names
    )
    if attributes.get("with_mean") is False:  # StandardScaler keeps a mean that it does not use
        center = None
    if scaler.class_name == "MinMaxScaler" and scale is not None and center is not None:
        return scale, center
    if scaler.class_name in CENTERS and (scale is not None or center is not None):
        factor = torch.ones(()) if scale is None else 1 / scale
        return factor, torch.zeros(()) if center is None else -center * factor
    return None


def _iterate_objects(release: Release) -> Iterator[InertObject]:
    return (place.value for place in walk(release.content) if isinstance(place.value, InertObject))


def _find_network(release: Release) -> InertObject | None:
    return next((obj for obj in _iterate_objects(release) if obj.class_name in NETWORKS), None)


def _to_namespace(value: Any, depth: int = 0) -> Any:
    """Convert a value of a pickle: arrays to numpy arrays, objects to namespaces of their attributes."""
    if isinstance(value, Block):
        return value.tensor().numpy() if value.read is not None else list(value.objects or ())
    if isinstance(value, list | tuple) and depth < MAX_DEPTH:
        return [_to_namespace(entry, depth + 1) for entry in value]
    if isinstance(value, InertObject) and depth < MAX_DEPTH:
        attributes = value.attributes.items()
        return SimpleNamespace(
            **{name: _to_namespace(entry, depth + 1) for name, entry in attributes}
        )
    return value


@dataclass(frozen=True, eq=False)
class StoredInitialization:
    """Initial weights of a network that a pickle of an estimator reveals.

    Attributes:
        theta0: The initial weights by parameter name.
        attribute: The attribute of the estimator that reveals the initial weights.
        evidence: Why ``theta0`` are the initial weights of this network.
        remedy: How to save the estimator without revealing its initial weights.
    """

    theta0: dict[str, Tensor]
    attribute: str
    evidence: str
    remedy: str

    @property
    def value_count(self) -> int:
        """Number of initial weights."""
        return sum(t.numel() for t in self.theta0.values())


def read_layers(weights: Any, biases: Any) -> dict[str, Tensor] | None:
    """Return the weights and biases of a pickled estimator by parameter name, such as "layers.0.weight".

    Args:
        weights: The list ``coefs_`` of the estimator as the pickle holds it, with matrices (in, out).
        biases: The list ``intercepts_`` of the estimator.

    Returns:
        The parameters with matrices (out, in), or None if the lists form no network or are too large.
    """
    if not isinstance(weights, list) or not isinstance(biases, list):
        return None
    weight_blocks = [block for block in weights if isinstance(block, Block)]
    bias_blocks = [block for block in biases if isinstance(block, Block)]
    if (
        not weight_blocks
        or len(weight_blocks) != len(bias_blocks)
        or sum(block.numel for block in weight_blocks) > MAX_VALUES
    ):
        return None
    theta: dict[str, Tensor] = {}
    for l, (weight, bias) in enumerate(zip(weight_blocks, bias_blocks, strict=True)):
        if len(weight.shape) != 2 or bias.shape != weight.shape[1:]:
            return None
        theta[f"layers.{l}.weight"] = weight.tensor().T.contiguous()
        theta[f"layers.{l}.bias"] = bias.tensor()
    return theta


def draw_initial_weights(
    shapes: list[tuple[int, int]], seed: int, activation: str
) -> dict[str, Tensor]:
    """Draw the initial weights that scikit-learn draws from an integer ``random_state``.

    Args:
        shapes: Shape (out, in) of each layer.
        seed: The seed ``random_state``.
        activation: The activation of the hidden layers, as scikit-learn names it.

    Returns:
        The initial weights by parameter name.
    """
    random, theta0 = np.random.RandomState(seed), {}
    for l, (fan_out, fan_in) in enumerate(shapes):
        bound = math.sqrt((2.0 if activation == "logistic" else 6.0) / (fan_in + fan_out))
        weight = random.uniform(-bound, bound, (fan_in, fan_out))
        theta0[f"layers.{l}.weight"] = torch.from_numpy(weight.T.copy())
        theta0[f"layers.{l}.bias"] = torch.from_numpy(random.uniform(-bound, bound, fan_out))
    return theta0


def find_initial_weights(estimator: InertObject) -> StoredInitialization | None:
    """Return the initial weights of a fitted MLP if the pickle reveals them and the evidence supports them.

    A seed alone proves nothing, because the network may have been fitted further or by another version of
    scikit-learn. We return initial weights only if they correlate with the trained weights more than
    independent matrices do.

    Args:
        estimator: The fitted MLP in the pickle.

    Returns:
        The initial weights and their evidence, or None.
    """
    attributes = estimator.attributes
    try:
        theta = read_layers(attributes.get("coefs_"), attributes.get("intercepts_"))
        stored_weights = read_layers(
            attributes.get("_best_coefs"), attributes.get("_best_intercepts")
        )
    except CheckpointError:
        return None
    if theta is None:
        return None
    shapes = [tuple(t.shape) for t in theta.values() if t.ndim == 2]
    seed, activation = attributes.get("random_state"), attributes.get("activation")
    candidates = list[tuple[str, str, dict[str, Tensor], str]]()
    if type(seed) is int and 0 <= seed < 2**32 and isinstance(activation, str):
        redrawn_weights = draw_initial_weights(shapes, seed, activation)  # type: ignore[arg-type]
        remedy = "Fit with random_state=None; before saving: model.random_state = None."
        candidates.append(
            ("random_state", "drawn again from random_state", redrawn_weights, remedy)
        )
    if stored_weights is not None and not attributes.get("early_stopping"):
        remedy = "Before saving: del model._best_coefs, model._best_intercepts."
        candidates.append(("_best_coefs", "stored in _best_coefs", stored_weights, remedy))
    for attribute, source, theta0, remedy in candidates:
        if (evidence := describe_evidence(theta, theta0)) is not None:
            return StoredInitialization(theta0, attribute, f"{source}, {evidence}", remedy)
    return None


def describe_evidence(theta: dict[str, Tensor], theta0: dict[str, Tensor]) -> str | None:
    """Describe the evidence that ``theta0`` are the initial weights of a network.

    Args:
        theta: The trained weights.
        theta0: The initial weights that a file may reveal.

    Returns:
        The evidence, or None if the trained and initial weights are equal or do not correlate.
    """
    first_weight = theta["layers.0.weight"]
    first_initial_weight = theta0["layers.0.weight"].to(first_weight)
    if (
        first_weight.shape != first_initial_weight.shape
        or not bool(first_weight.isfinite().all())
        or torch.equal(first_weight, first_initial_weight)
    ):
        return None
    inner_product, squared_initial_norm = (
        _inner_product(first_weight, first_initial_weight),
        _inner_product(first_initial_weight, first_initial_weight),
    )
    cosine = inner_product / max(
        (_inner_product(first_weight, first_weight) * squared_initial_norm) ** 0.5, 1e-30
    )
    standard_deviations = cosine * math.sqrt(first_weight.numel())
    if not standard_deviations > MIN_DEVIATIONS:
        return None
    evidence = (
        f"cosine {cosine:.2f} with the weights ({standard_deviations:.0f} standard deviations)"
    )
    best_factor = inner_product / max(squared_initial_norm, 1e-30)
    if min(first_weight.shape) > 2 and first_weight.numel() <= MAX_SPECTRUM:
        singular_value_count = noise_edge(_singular_values(first_weight), *first_weight.shape)[0]
        count_without_initialization = noise_edge(
            _singular_values(first_weight - best_factor * first_initial_weight), *first_weight.shape
        )[0]
        evidence += (
            f"; W - {best_factor:.2f} W0 shows {count_without_initialization} directions, W shows "
            f"{singular_value_count}"
        )
    return evidence


def _inner_product(a: Tensor, b: Tensor) -> float:
    """Return the inner product (sum of products of entries) of two matrices, a few rows at a time."""
    chunk_pairs = zip(a.split(CHUNK_ROWS), b.split(CHUNK_ROWS), strict=True)
    return sum(float((x.double() * y.double()).sum()) for x, y in chunk_pairs)


def _singular_values(weight: Tensor) -> Tensor:
    """Return the singular values of a weight matrix, largest first, from its smaller Gram matrix."""
    tall = weight if weight.shape[0] >= weight.shape[1] else weight.T
    gram_matrix = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64)
    for rows in tall.split(CHUNK_ROWS):
        gram_matrix += rows.double().T @ rows.double()
    return torch.linalg.eigvalsh(gram_matrix).flip(0).clamp(min=0).sqrt()
