"""The attack "trunk": recover training images whose features lie in the span of the first dense layer.

Convolutions and pooling form the backbone t of a network. Behind the backbone, the rows of the first dense
layer mix the features of training images, in the same way as the rows of an input layer mix samples
(``ica.py``). These mixtures appear in the weights minus their initial weights, and in an optimizer state. The
features have thousands of directions, but the rows span only a few dozen of these directions:

    rows = C t(X),     t(x_i) in span(V),   V (r, D) the leading right singular vectors

Few images have features in this span, because a mixture of features is not the feature map of any image.
This identifies the training images:

    1. unmix     separate the rows into sources: nonnegative, sparse in spatial differences
    2. invert    minimize 1 - NCC(t(x), source) over x, with a sparse prior that fades out
    3. settle    minimize 1 - |V t(x)|^2 / |t(x)|^2, the share of the features outside the span

NCC is the normalized cross-correlation. The sources are only approximately right, but they are good starting
points for the third step. That step uses no source and ends at training images. The share of the features
that remains outside the span shows how reliable an image is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from residuum.attacks.base import OneShotAttack, predict_labels
from residuum.attacks.random_streams import stream
from residuum.attacks.stationarity.objectives import UNKNOWN_WEIGHTS
from residuum.attacks.stationarity.priors import Prior, SparseGradients
from residuum.attacks.unmixing.attack import choose_effort
from residuum.attacks.unmixing.ica import ROUNDING, Layer, find_distinct, unmix
from residuum.attacks.unmixing.layers import (
    MAX_BYTES,
    VISIBLE,
    estimate_initial_share,
    estimate_layer_bytes,
)
from residuum.attacks.work import REFERENCE, count_work
from residuum.errors import InputError
from residuum.records import Knowledge, Reconstruction, Selection
from residuum.surfaces.surface import MOMENT, WEIGHTS, Surface

# The attack separates the leading right singular vectors of the weight matrix of the first dense layer.
# A singular vector is leading if its singular value exceeds this share of the largest singular value.
LEADING = 0.03
# The features of an image change during training, so the trained features lie in a wider span of directions.
# The last step of the attack moves images onto this span.
# The span contains the singular vectors with singular values above this share of the largest singular value.
DRIFT = 3e-4
# Maximum number of leading singular vectors, as a share of the number of neurons of the layer.
# In layers with more leading singular vectors, the samples cannot be separated.
MAX_RANK_SHARE = 0.5
CANDIDATES = 32  # maximum number of separated feature vectors that the attack inverts to images
UNMIXING = 0.3  # share of the time limit that the attack spends on separating feature vectors
SAME = 0.9  # minimum cosine similarity of two versions of the same image
# Constants (a, b) of the probability that an image has NCC > 0.8 with a training image. This probability is
# sigmoid(a + b log10(s)), where s is the share of the image's features outside the span of the dense layer.
# The constants were fitted on 61 images (54 of them training images) of four networks that appear in no
# published result. The networks were trained on 20 and 50 CIFAR images and on 20 digits.
CONFIDENCE = (-18.2, -5.9)
ASSUMES = (
    "trunk assumes that the first dense layer behind the convolutions had small or known initial weights, "
    "or that the optimizer state contains the last gradients of this layer. The attack also assumes that the "
    "number of samples is less than half the number of neurons in this layer."
)


@dataclass(frozen=True)
class Descent:
    """Settings of a search for images by gradient descent with Adam.

    Attributes:
        steps: Number of steps.
        rate: Learning rate at the start. The rate falls to a tenth at the end.
        prior: Weight of the sparse image prior at the start. The weight falls to a tenth at the end.
        noise: Standard deviation of the random initial images, as a share of the value range.
    """

    steps: int
    rate: float
    prior: float
    noise: float = 0.05


INVERT, SETTLE = Descent(150, 0.05, 0.3), Descent(250, 0.03, 0.03)
# Weight of the penalty on images at the end of a gradient descent, as a share of its initial weight.
PRIOR_DECAY = 0.1


@dataclass(frozen=True, eq=False)
class BackboneLayer:
    """A dense layer behind the convolutions and pooling (backbone) of a network.

    Attributes:
        name: Name of the layer.
        rows: (h, D) rows of the weight matrix minus their initial weights.
        shape: Shape of the features that the layer receives: (channels, height, width) for feature maps.
        rank: Number of leading right singular vectors of ``rows``.
        span: (r, D) right singular vectors that span the features of training images.
        initial_share: Factor with which the initial weights were subtracted.
    """

    name: str
    rows: Tensor
    shape: tuple[int, ...]
    rank: int
    span: Tensor
    initial_share: float


class Backbone:
    """The backbone of a network: its layers up to the input of the first dense layer.

    A call maps samples (n, *shape) to the inputs (n, D) of the dense layer. The dense layer and the layers
    after it do not run.
    """

    class _Reached(Exception):
        """Exception that stops a forward pass at a layer and carries the features of this layer."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.layer = model, model.get_submodule(name)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the features of samples: the inputs of the dense layer in a forward pass of the network."""

        def stop(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            raise Backbone._Reached(inputs[0])

        hook = self.layer.register_forward_pre_hook(stop)
        try:
            self.model(x)
        except Backbone._Reached as reached:
            return reached.args[0]
        finally:
            hook.remove()
        raise InputError(
            "The forward pass of the network must use the dense layer behind the backbone (the first "
            "layers); it did not.",
            "Use another attack.",
        )


class _FeatureMaps(TorchFunctionMode):
    """A context that records the feature maps (n, channels, height, width) of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if type(output) is Tensor and output.ndim == 4 and min(output.shape[2:]) > 1:
            self.maps.append(output)
        return output


def find_dense_layer(model: nn.Module, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Find the first dense layer behind the convolutions and pooling of a network.

    This layer receives one feature vector for each sample, and not the sample itself.

    Args:
        model: The network.
        shape: Shape of a sample.

    Returns:
        The name of the layer, and the shape of the feature maps that form its input. The result is ("", ())
        if the network has no dense layer behind a backbone.
    """
    random_samples = torch.randn(2, *shape, generator=stream("probe")).to(next(model.parameters()))
    inputs: dict[str, Tensor] = {}

    def record(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, args: inputs.update({name: args[0]} if name not in inputs else {})

    hooks = [
        layer.register_forward_pre_hook(record(name))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        with torch.no_grad(), _FeatureMaps() as recorded:
            model(random_samples)
    finally:
        for hook in hooks:
            hook.remove()
    for name, x in inputs.items():
        # Skip layers that receive several vectors for each sample, such as one vector for each token of a
        # text.
        if x.ndim != 2 or len(x) != len(random_samples):
            continue
        if x.numel() == random_samples.numel() and torch.equal(
            x.flatten(), random_samples.flatten()
        ):
            return "", ()
        for feature_map in reversed(recorded.maps):
            if feature_map.numel() == x.numel() and torch.equal(feature_map.flatten(), x.flatten()):
                return name, tuple(feature_map.shape[1:])
        return name, tuple(x.shape[1:])
    return "", ()


@lru_cache(maxsize=2)  # the result is cached, because the methods why_not and find both need it
def read_backbone_layer(surface: Surface, knowledge: Knowledge) -> BackboneLayer | str:
    """Read the dense layer behind the backbone and subtract its initial weights.

    The layer must fit into memory, and its initial weights must be small or known. The number of leading
    right singular vectors must be at most half the number of neurons. Otherwise these vectors also span
    noise, and not only the features of training images.

    Args:
        surface: The attack surface: the weights, the weight update or an optimizer state.
        knowledge: What the attacker knows.

    Returns:
        The layer, or a text that names the first condition that fails.
    """
    sample_shape = surface.sample_shape(knowledge)
    if len(sample_shape) < 3:
        return "needs images with channels, height and width"
    name, shape = find_dense_layer(surface.copy_module(), sample_shape)
    if not name:
        return (
            "no dense layer lies behind a backbone: the first dense layer receives the input, or the "
            "network has no dense layer"
        )
    if name not in surface.equations:
        return f"the optimizer state lacks {name}, the first dense layer"
    weight_rows = surface.target[f"{name}.weight"].float()
    if (needed := estimate_layer_bytes(*weight_rows.shape)) > MAX_BYTES:
        return (
            f"the attack would need about {needed / 2**30:.1f} GiB of memory; the limit is "
            f"{MAX_BYTES / 2**30:.0f} GiB"
        )
    initial_share, theta0 = 1.0, knowledge.theta0
    if theta0 is not None and surface.name == WEIGHTS:
        initial_weights = theta0[f"{name}.weight"].to(weight_rows)
        initial_share, size = (
            estimate_initial_share(weight_rows, initial_weights),
            weight_rows.norm(),
        )
        weight_rows = weight_rows - initial_share * initial_weights
        if weight_rows.norm() <= 10 * ROUNDING * size:
            return "the first dense layer equals its initial weights up to a factor and rounding"
    if not bool(weight_rows.any()):
        return "the first dense layer was not trained"
    layer = Layer.from_rows(weight_rows)
    if theta0 is None and surface.name == WEIGHTS and layer.edge > VISIBLE:
        return (
            f"the initial weights of {name} are neither small nor known: their noise reaches "
            f"{layer.edge:.0%} of the largest singular value"
        )
    rank, wide = (int((share * layer.S[0] < layer.S).sum()) for share in (LEADING, DRIFT))
    if not 2 <= rank <= MAX_RANK_SHARE * len(weight_rows):
        return (
            f"the {len(weight_rows)} neurons of {name} use {rank} directions; the attack needs at least 2, "
            f"and at most {MAX_RANK_SHARE:.0%} of the number of neurons"
        )
    return BackboneLayer(name, weight_rows, shape, rank, layer.V[:wide].float(), initial_share)


def invert_features(
    backbone: Callable[[Tensor], Tensor],
    x: Tensor,
    distance: Callable[[Tensor], Tensor],
    descent: Descent,
    prior: Prior,
    box: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Find images with given features by gradient descent on a distance that depends on the features.

    Args:
        backbone: Function from images (k, *shape) to features (k, D).
        x: (k, *shape) initial images.
        distance: Function from features (k, D) to distances (k,).
        descent: Settings of the descent.
        prior: Prior for images.
        box: Lower and upper bounds of the pixel values, None if the bounds are not known.

    Returns:
        The images (k, *shape), and the distances (k,) of their features.
    """
    x = x.detach().clone().requires_grad_()
    ones, adam = x.new_ones(1, len(x)), torch.optim.Adam([x], descent.rate)
    for step in range(descent.steps):
        share_of_steps = step / descent.steps
        cosine_factor = (1 + math.cos(math.pi * share_of_steps)) / 2
        adam.param_groups[0]["lr"] = descent.rate * (0.1 + 0.9 * cosine_factor)
        prior_weight = descent.prior * PRIOR_DECAY**share_of_steps
        loss = distance(backbone(x)).mean() + prior_weight * prior.penalty(x[None], ones)[0]
        adam.zero_grad()
        loss.backward(inputs=[x])
        adam.step()
        if box is not None:
            with torch.no_grad():
                x.copy_(x.clamp(*box))
    with torch.no_grad():
        return x.detach(), distance(backbone(x))


def distance_from_source(source: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function from features to their distances from the sources.

    The distance of each row of features from the same row of ``source`` is 1 minus their normalized
    cross-correlation.
    """
    unit_source = F.normalize(source - source.mean(1, keepdim=True))
    return lambda f: 1 - (F.normalize(f - f.mean(1, keepdim=True)) * unit_source).sum(1)


def distance_from_span(V: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function from features to their distances from the span of the rows of V.

    The distance of features f is the share 1 - |V f|^2 / |f|^2 of their energy outside the span.
    """
    return lambda f: 1 - (F.normalize(f) @ V.T).square().sum(1)


def orient_sources(sources: Tensor) -> Tensor:
    """Choose the signs of feature vectors so that large values are positive, as after a ReLU."""
    return sources * sources.pow(3).sum(1, keepdim=True).sign()


class BehindBackbone(OneShotAttack):
    """The attack "trunk": recover features of single samples from a dense layer, and then their images."""

    name: ClassVar[str] = "trunk"
    pace: ClassVar[str] = "sized"
    assumes: ClassVar[str] = ASSUMES

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply to a network.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The reason, or "" if the attack applies.
        """
        if surface.name != self.surface:
            return "needs an optimizer state, from the file or from a live optimizer"
        if not surface.has_weights:
            return UNKNOWN_WEIGHTS
        layer = read_backbone_layer(surface, knowledge)
        return layer if isinstance(layer, str) else ""

    def why_applies(self, surface: Surface) -> str:
        """Return a short reason why the attack applies to a network."""
        return "the first dense layer spans the features of training images, which few images share"

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Recover features of training images from the rows of a dense layer, and then the images.

        The time limit ``seconds`` of the settings decides the number of steps.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The candidates. Images whose features lie closest to the span of the dense layer come first.
        """
        layer = read_backbone_layer(surface, knowledge)
        assert isinstance(layer, BackboneLayer)
        shape, device = surface.sample_shape(knowledge), self.device
        layer_rows = layer.rows.to(device)
        value_count = 2 * math.prod(layer.shape)
        computation_plan = choose_effort(UNMIXING * self.seconds, layer.rank, value_count, device)
        separated = unmix(
            layer_rows, layer.shape, computation_plan, rank=layer.rank, seed=self.seed
        )
        centers = separated.centers
        is_group_member = torch.ones(len(separated.x), dtype=torch.bool)
        is_group_member[centers] = False
        # Sources (recovered vectors) from several runs that are similar form a group, and each group is
        # represented by its mean. The means of all groups come first, and the other sources follow.
        source_order = torch.cat([centers, is_group_member.nonzero().flatten()])
        sources = orient_sources(separated.x[source_order[:CANDIDATES]].to(device))
        model = surface.copy_module().to(device, torch.float32).requires_grad_(False)
        backbone = Backbone(model, layer.name)
        low, high = knowledge.value_range or (0.0, 1.0)
        prior = SparseGradients(1.0, knowledge=Knowledge(shape=shape, value_range=(low, high)))
        images = torch.randn(len(sources), *shape, generator=stream("trunk", self.seed)).to(device)
        images = INVERT.noise * (high - low) * images
        pixel_bounds = knowledge.box(images[0])
        distance_functions = {
            INVERT: distance_from_source(sources),
            SETTLE: distance_from_span(layer.span.to(device)),
        }
        step_share = self._share_of_steps(backbone, images)
        for descent, distance in distance_functions.items():
            shortened_descent = replace(descent, steps=max(1, int(step_share * descent.steps)))
            images, share_outside = invert_features(
                backbone, images, distance, shortened_descent, prior, pixel_bounds
            )
        share_outside, source_order = share_outside.double().cpu().clamp(min=1e-12).sort()
        images = images.double().cpu()[source_order]
        with torch.no_grad():
            labels = predict_labels(model(images.to(device, torch.float32))).cpu()
        result = Reconstruction.from_candidates(
            self.name, images, labels, torch.ones(len(images)), knowledge
        )
        notes = self._notes(layer, separated.runs, share_outside)
        return result.replace(selection=select_images(images, labels, share_outside), notes=notes)

    def _share_of_steps(self, backbone: Backbone, x: Tensor) -> float:
        """Return the share of the planned gradient steps that fit into the time limit ``seconds``."""
        if self.seconds == math.inf:
            return 1.0

        def step() -> None:
            images = x.detach().clone().requires_grad_()
            backbone(images).sum().backward(inputs=[images])

        speed = REFERENCE["cuda" if self.device.startswith("cuda") else "cpu"]
        full_seconds = (INVERT.steps + SETTLE.steps) * count_work(step).seconds(speed)
        return min(1.0, (1 - UNMIXING) * self.seconds / full_seconds)

    def _notes(
        self, layer: BackboneLayer, runs: tuple[int, int], share_outside: Tensor
    ) -> tuple[str, ...]:
        feature_shape = "x".join(map(str, layer.shape))
        span_note = (
            f"{self.name}: {layer.name} receives features {feature_shape}, which span {len(layer.span)} "
            f"directions, {layer.rank} of them leading; unmix ran {runs[0]} times on the leading directions"
        )
        if layer.initial_share != 1:
            span_note += f"; {layer.initial_share:.3g} times the initial weights were subtracted"
        return (
            span_note,
            f"{self.name}: the features of the recovered images have at least "
            f"{float(share_outside[0]):.1e} of their energy outside the span of {layer.name}, "
            f"{float(share_outside.median()):.1e} in the median",
        )


class BehindBackboneOptimizerState(BehindBackbone):
    """The attack "trunk" on an optimizer state instead of the weights."""

    name: ClassVar[str] = "trunk-moment"
    surface: ClassVar[str] = MOMENT


def select_images(x: Tensor, labels: Tensor, share_outside: Tensor) -> Selection:
    """Select images that differ from each other, those with the most reliable features first.

    Args:
        x: (k, *shape) images, sorted by ``share_outside``.
        labels: (k,) labels.
        share_outside: (k,) share of the energy of the features outside the span of the dense layer.

    Returns:
        The selection. Images with the smallest ``share_outside`` come first.
    """
    unit_images = F.normalize(x.flatten(1))
    distinct = find_distinct(unit_images, SAME)
    member_counts = torch.zeros(len(distinct), dtype=torch.long)
    nearest_distinct = (unit_images @ unit_images[distinct].T).abs().argmax(1)
    member_counts.index_add_(0, nearest_distinct, torch.ones_like(nearest_distinct))
    log_share = share_outside[distinct].log10()
    confidence = torch.sigmoid(CONFIDENCE[0] + CONFIDENCE[1] * log_share).float()
    return Selection.from_candidates(x, labels, distinct, confidence, members=member_counts)
