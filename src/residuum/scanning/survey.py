"""Collect facts about a model file in one pass, such as the number of values of a sample.

A sample of a network has as many values as the first layer has inputs. The first layer is not marked in a
file, and the order of tensors is not reliable. But no other layer computes the inputs of the first layer. So
we compare the numbers of inputs of all layers with the numbers of outputs of all layers:

- A dense layer whose number of inputs no layer has as its number of outputs reads the samples, or features
  that a reshape made from them.
- If a network consists of dense layers only and every number of inputs is also a number of outputs, such as
  in an autoencoder, every layer may be the first one.
- A convolution reads images if it has 1, 3 or 4 input channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from residuum.io.inert import Block, InertObject
from residuum.io.release import Release
from residuum.io.tree import Place, walk

# Parts of the names of trainable arrays and of buffers whose values are no samples.
PARAMETERS = re.compile(
    r"weight(?!ed)|bias|kernel|gamma|beta|embed|coef|intercept|codebook|lora_|^(w[a-z]?|[abcdkquv])\d*$|"
    r"(^|_)(mean|var|std|scale|shift|sigma|stat|stats|grad|exp_avg|moment|norm|fisher|cov|"
    r"covariance|token|tokens|cls|query|queries|latents?|slots?|pos|position|positions|positional|rel|"
    r"relative|pe|freqs?|rotary|cos|sin|masks?|anchors?|grid|coords?|window|filt|filters?|basis|fb|params?|"
    r"proj|projection|matrix|table|lut|hidden|state|ids|index|indices|log|alpha|layer|heads?|out|outputs?|"
    r"att|attn|attention)(_|\d|$)",
    re.IGNORECASE,
)
# Names of the weights of layers. In a layer of Flax or Keras, a "kernel" has the shape (inputs, outputs).
LAYER_WEIGHTS = re.compile(r"(weight|kernel)(_[ih]h_l\d+(_reverse)?|_orig|_v)?$")
EMBEDDINGS = re.compile(r"emb|wte|wpe|vocab|lookup|token", re.IGNORECASE)
# Attributes of estimators that count the training records.
SAMPLE_COUNTS = ("n_samples_seen_", "n_samples_fit_")
MAX_SAMPLES = 1e15  # a larger number of training records is no number of records
# Packages whose estimators store records only in the attributes that ``stored_rules`` lists.
KNOWN_PACKAGES = re.compile(
    r"(sklearn|scipy|numpy|pandas|xgboost|lightgbm|catboost|torch\.optim)\."
)


@dataclass(eq=False)
class Survey:
    """Facts about the model in a model file, which several rules of a scan need.

    Attributes:
        widths: Possible numbers of values of a sample.
        channels: Possible numbers of channels of an image, by number of dimensions of the image.
        known_classes: Names of classes whose arrays are known, because their package is.
        weights: The weights of layers by their shape.
        sample_count: Number of training records, None if no estimator counts them.
    """

    widths: frozenset[int] = frozenset()
    channels: dict[int, frozenset[int]] = field(default_factory=dict)
    known_classes: frozenset[str] = frozenset()
    weights: dict[tuple[int, ...], list[Block]] = field(default_factory=dict)
    sample_count: int | None = None


def survey_release(release: Release) -> Survey:
    """Collect facts about a model file in one pass, such as the number of values of a sample."""
    # The numbers of inputs of layers, by the number of dimensions of the weight.
    inputs: dict[int, set[int]] = {}
    outputs: set[int] = set()
    column_counts: set[int] = set()
    sample_counts: list[int] = []
    known_classes: set[str] = set()
    weights: dict[tuple[int, ...], list[Block]] = {}
    for place in walk(release.content):
        value = place.value
        if isinstance(value, InertObject) and KNOWN_PACKAGES.match(value.name):
            known_classes.add(value.class_name)
        elif type(value) is int and place.name == "n_features_in_":
            column_counts.add(value)
        elif place.name in SAMPLE_COUNTS and isinstance(value, int | float):
            if 0 < value < MAX_SAMPLES:  # scikit-learn stores this number as a float
                sample_counts.append(int(value))
        elif isinstance(value, Block) and len(value.shape) >= 2 and _is_layer_weight(place):
            weights.setdefault(value.shape, []).append(value)
            layer_inputs, layer_outputs = _read_layer(place.path, value.shape)
            inputs.setdefault(len(value.shape), set()).update(layer_inputs)
            outputs.update(layer_outputs)
    dense_inputs = inputs.get(2, set())
    widths = dense_inputs - outputs
    if not widths and set(inputs) == {2}:
        widths = dense_inputs
    return Survey(
        frozenset(width for width in widths | column_counts if width > 1),
        {dimensions - 1: frozenset(n) for dimensions, n in inputs.items() if dimensions > 2},
        frozenset(known_classes),
        weights,
        max(sample_counts, default=None),
    )


def is_parameter(place: Place) -> bool:
    """Return True if the name of an array says that it is a weight, a statistic, a mask or a position."""
    # A pickled torch module stores its weights in the dict "_parameters".
    return "_parameters." in place.path or bool(PARAMETERS.search(place.leaf))


def _is_layer_weight(place: Place) -> bool:
    return not place.section and bool(LAYER_WEIGHTS.search(place.leaf))


def _read_layer(path: str, shape: tuple[int, ...]) -> tuple[Iterable[int], Iterable[int]]:
    """Return the numbers of inputs and of outputs of a layer with a weight of this shape."""
    name = path.rpartition(".")[2]
    if len(shape) == 2 and EMBEDDINGS.search(path):
        return (), (shape[1],)
    if name.startswith("weight_hh"):  # the inputs of this weight are the outputs of the same layer
        return (), (shape[1],)
    if len(shape) == 2 and "kernel" in name:
        return (shape[0],), (shape[1],)
    if "kernel" in name:
        return (shape[-2],), (shape[-1],)
    # A transposed convolution has the shape (inputs, outputs, ...), so we count both as outputs.
    return (shape[1],), (shape[0],)
