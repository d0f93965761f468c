"""Trunk: training images whose features lie in what the first dense layer of a network spans.

Behind convolutions and pooling (the trunk t) the rows of a dense layer, in a moment of the optimizer or
less their start, are mixtures of the samples' FEATURES, as those of a layer on the input are mixtures of
samples (``ica.py``). A few dozen directions of thousands:

    rows = C t(X),     t(x_i) in span(V),   V (r, D) the leading right singular vectors

That few images have such features is what tells the training images: a mixture of features is no image's.

    1. unmix     sources of the rows, sparse in the spatial differences of the feature maps, nonnegative
    2. invert    x by descent on 1 - NCC(t(x), source), a fading sparse prior beside it
    3. settle    x on by descent on   1 - |V t(x)|^2 / |t(x)|^2,   the share of its features outside

The sources are half right, which is enough for the third step to begin from: it knows no source and ends
at images that the layer was trained on. What it leaves outside says which to believe.
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

from residuum.attacks.base import OneShotAttack, predicted_labels
from residuum.attacks.random_streams import stream
from residuum.attacks.stationarity.priors import Prior, SparseGradients
from residuum.attacks.unmixing.attack import within
from residuum.attacks.unmixing.ica import ROUNDING, Layer, distinct, unmix
from residuum.attacks.unmixing.layers import MOST_BYTES, VISIBLE, layer_bytes, left_of
from residuum.attacks.work import REFERENCE, count_work
from residuum.errors import InputError
from residuum.records import Knowledge, Reconstruction, Selection
from residuum.surfaces.surface import MOMENT, WEIGHTS, Surface

LEADING = 0.03  # of the largest singular value: directions that sources are looked for in
DRIFT = 3e-4  # likewise: the wider span that features kept to while they changed in training
MOST_SHARE = 0.5  # of the neurons that leading directions may number: a full layer shows no samples
CANDIDATES = 32  # sources that are inverted
UNMIXING = 0.3  # of the seconds
SAME = 0.9  # cosine of two images that are one
# Probability that an image is above NCC 0.8 with a training image: sigmoid(a + b log10(share outside)),
# fitted on 61 images of four networks that no claim uses (20 and 50 CIFAR images, 20 digits; 54 are above).
CONFIDENCE = (-18.2, -5.9)
ASSUMES = (
    "trunk assumes that the first dense layer behind the convolutions was trained from a small or "
    "known start, or that an optimizer kept its last gradients, on fewer samples than half of its "
    "neurons."
)


@dataclass(frozen=True)
class Descent:
    """steps of Adam from ``rate`` down to a tenth of it; prior: weight of the sparse prior at first,
    of which a tenth is left at the end; noise: deviation of the first images, in the value range.
    """

    steps: int
    rate: float
    prior: float
    noise: float = 0.05


INVERT, SETTLE = Descent(150, 0.05, 0.3), Descent(250, 0.03, 0.03)
LEFT = 0.1


@dataclass(frozen=True, eq=False)
class Behind:
    """A dense layer behind a trunk.

    name: of the layer.
    rows: (h, D) less their start.
    shape: of the features, (channels, height, width) where they are maps.
    rank: leading directions of ``rows``.
    span: (r, D) all that features kept to.
    kept: how much of the start was taken off.
    """

    name: str
    rows: Tensor
    shape: tuple[int, ...]
    rank: int
    span: Tensor
    kept: float


class Trunk:
    """Samples (n, *shape) to what the layer called ``name`` is given (n, D); the rest is not run."""

    class _Reached(Exception):
        """Carries the features past the layers above."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.layer = model, model.get_submodule(name)

    def __call__(self, x: Tensor) -> Tensor:
        """By the network's own forward, up to the layer."""

        def stop(_: nn.Module, given: tuple[Any, ...]) -> None:
            raise Trunk._Reached(given[0])

        hook = self.layer.register_forward_pre_hook(stop)
        try:
            self.model(x)
        except Trunk._Reached as reached:
            return reached.args[0]
        finally:
            hook.remove()
        raise InputError("The layer behind the trunk was not reached.", "Use another attack.")


class _Maps(TorchFunctionMode):
    """Remembers the feature maps (n, channels, height, width) that a forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if type(out) is Tensor and out.ndim == 4 and min(out.shape[2:]) > 1:
            self.seen.append(out)
        return out


def dense_behind(model: nn.Module, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Name of the first dense layer that is given one vector a sample, not the sample itself, and the
    shape of the feature maps that this vector is; ("", ()) where there is none.
    """
    probe = torch.randn(2, *shape, generator=stream("probe")).to(next(model.parameters()))
    given: dict[str, Tensor] = {}

    def look(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, args: given.update({name: args[0]} if name not in given else {})

    hooks = [
        layer.register_forward_pre_hook(look(name))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        with torch.no_grad(), _Maps() as maps:
            model(probe)
    finally:
        for hook in hooks:
            hook.remove()
    for name, x in given.items():
        if x.ndim != 2 or len(x) != len(probe):  # tokens: its rows are sums over more than samples
            continue
        if x.numel() == probe.numel() and torch.equal(x.flatten(), probe.flatten()):
            return "", ()
        for one in reversed(maps.seen):
            if one.numel() == x.numel() and torch.equal(one.flatten(), x.flatten()):
                return name, tuple(one.shape[1:])
        return name, tuple(x.shape[1:])
    return "", ()


@lru_cache(maxsize=2)  # asked whether it applies, then run
def behind(surface: Surface, knowledge: Knowledge) -> Behind | str:
    """The dense layer behind the trunk less its start; or the first condition that it does not meet.

    As for the layer on the input, but what its rows mix are features. There must be fewer of them than
    half of the neurons: then their span is theirs, and not noise.
    """
    sample = surface.shape(knowledge)
    if len(sample) < 3:
        return "needs images: samples of a network with a trunk have channels, height and width"
    name, shape = dense_behind(surface.model(), sample)
    if not name:
        return "no dense layer lies behind a trunk: the first meets the input, or there is none"
    if name not in surface.equations:
        return f"the moment of {name}, the first dense layer, is not there"
    rows = surface.target[f"{name}.weight"].float()
    if (needed := layer_bytes(*rows.shape)) > MOST_BYTES:
        return f"it would take about {needed / 2**30:.1f} GiB, above {MOST_BYTES / 2**30:.0f}"
    kept, start = 1.0, knowledge.theta0
    if start is not None and surface.name == WEIGHTS:
        before = start[f"{name}.weight"].to(rows)
        kept, size = left_of(rows, before), rows.norm()
        rows = rows - kept * before
        if rows.norm() <= 10 * ROUNDING * size:
            return "the first dense layer is its start, but for a factor and rounding"
    if not bool(rows.any()):
        return "the first dense layer was not trained"
    layer = Layer.of(rows)
    if start is None and surface.name == WEIGHTS and layer.edge > VISIBLE:
        return (
            f"the start of {name} is neither small nor known: its noise reaches "
            f"{layer.edge:.0%} of the largest singular value"
        )
    rank, wide = (int((share * layer.S[0] < layer.S).sum()) for share in (LEADING, DRIFT))
    if not 2 <= rank <= MOST_SHARE * len(rows):
        return (
            f"{rank} directions of {name} are in use by {len(rows)} neurons: features show where "
            f"directions number from 2 to {MOST_SHARE:.0%} of the neurons"
        )
    return Behind(name, rows, shape, rank, layer.V[:wide].float(), kept)


def inverted(
    trunk: Callable[[Tensor], Tensor],
    x: Tensor,
    missed: Callable[[Tensor], Tensor],
    how: Descent,
    prior: Prior,
    box: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Images (k, *shape) after a descent on ``missed`` of their features, and what it is at the end."""
    x = x.detach().clone().requires_grad_()
    one, adam = x.new_ones(1, len(x)), torch.optim.Adam([x], how.rate)
    for step in range(how.steps):
        share = step / how.steps
        adam.param_groups[0]["lr"] = how.rate * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)
        loss = missed(trunk(x)).mean() + how.prior * LEFT**share * prior.penalty(x[None], one)[0]
        adam.zero_grad()
        loss.backward(inputs=[x])
        adam.step()
        if box is not None:
            with torch.no_grad():
                x.copy_(x.clamp(*box))
    with torch.no_grad():
        return x.detach(), missed(trunk(x))


def from_source(source: Tensor) -> Callable[[Tensor], Tensor]:
    """1 - NCC of features with the sources (k, D), row by row."""
    wanted = F.normalize(source - source.mean(1, keepdim=True))
    return lambda f: 1 - (F.normalize(f - f.mean(1, keepdim=True)) * wanted).sum(1)


def outside(V: Tensor) -> Callable[[Tensor], Tensor]:
    """1 - |V f|^2 / |f|^2: share of the features outside of the rows of V (r, D)."""
    return lambda f: 1 - (F.normalize(f) @ V.T).square().sum(1)


def nonnegative(sources: Tensor) -> Tensor:
    """Sources with the sign that features behind a ReLU have: their large values are positive."""
    return sources * sources.pow(3).sum(1, keepdim=True).sign()


class BehindBackbone(OneShotAttack):
    """Separate the features in the first dense layer behind a backbone, and invert them."""

    name: ClassVar[str] = "trunk"
    pace: ClassVar[str] = "sized"
    assumes: ClassVar[str] = ASSUMES

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply."""
        if surface.name != self.surface:
            return "needs the state of an optimizer, from the file or from a live one"
        found = behind(surface, knowledge)
        return found if isinstance(found, str) else ""

    def why_applies(self, surface: Surface) -> str:
        """Return why the attack applies."""
        return "the first dense layer spans the features of training images, which few images share"

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Run all three steps within ``seconds`` of a reference machine, candidates near the span first."""
        layer = behind(surface, knowledge)
        assert isinstance(layer, Behind)
        shape, device = surface.shape(knowledge), self.device
        rows = layer.rows.to(device)
        values = 2 * math.prod(layer.shape)
        setting = within(UNMIXING * self.seconds, layer.rank, values, device)
        found = unmix(rows, layer.shape, setting, rank=layer.rank, seed=self.seed)
        first = found.centers
        rest = torch.ones(len(found.x), dtype=torch.bool)
        rest[first] = False
        some = torch.cat([first, rest.nonzero().flatten()])[:CANDIDATES]  # distinct ones first
        sources = nonnegative(found.x[some].to(device))
        model = surface.model().to(device, torch.float32).requires_grad_(False)
        trunk = Trunk(model, layer.name)
        low, high = knowledge.value_range or (0.0, 1.0)
        prior = SparseGradients(1.0, knowledge=Knowledge(shape=shape, value_range=(low, high)))
        x = torch.randn(len(sources), *shape, generator=stream("trunk", self.seed)).to(device)
        x = INVERT.noise * (high - low) * x
        box = knowledge.box(x[0])
        parts = {INVERT: from_source(sources), SETTLE: outside(layer.span.to(device))}
        share = self._share_of_steps(trunk, x)
        for how, missed in parts.items():
            shorter = replace(how, steps=max(1, int(share * how.steps)))
            x, far = inverted(trunk, x, missed, shorter, prior, box)
        far, order = far.double().cpu().clamp(min=1e-12).sort()
        x = x.double().cpu()[order]
        with torch.no_grad():
            labels = predicted_labels(model(x.to(device, torch.float32))).cpu()
        result = Reconstruction.at_once(self.name, x, labels, torch.ones(len(x)), knowledge)
        notes = self._notes(layer, found.runs, far)
        return result.replace(selection=chosen(x, labels, far), notes=notes)

    def _share_of_steps(self, trunk: Trunk, x: Tensor) -> float:
        """Return the share of the steps of both descents that ``seconds`` allow."""
        if self.seconds == math.inf:
            return 1.0

        def step() -> None:
            images = x.detach().clone().requires_grad_()
            trunk(images).sum().backward(inputs=[images])

        speed = REFERENCE["cuda" if self.device.startswith("cuda") else "cpu"]
        cost = (INVERT.steps + SETTLE.steps) * count_work(step).seconds(speed)
        return min(1.0, (1 - UNMIXING) * self.seconds / cost)

    def _notes(self, layer: Behind, runs: tuple[int, int], far: Tensor) -> tuple[str, ...]:
        start = f"; {layer.kept:.3g} of the start was taken off" if layer.kept != 1 else ""
        maps = "x".join(map(str, layer.shape))
        return (
            f"{self.name}: {layer.name} is given features {maps}, which keep to {len(layer.span)} "
            f"directions, {layer.rank} of them leading; {runs[0]} runs of unmix on these{start}",
            f"{self.name}: features of its images lie outside of these by {float(far[0]):.1e} of their "
            f"energy at least, {float(far.median()):.1e} in the median",
        )


class BehindBackboneOptimizerState(BehindBackbone):
    """The same attack on an optimizer state."""

    name: ClassVar[str] = "trunk-moment"
    surface: ClassVar[str] = MOMENT


def chosen(x: Tensor, labels: Tensor, far: Tensor) -> Selection:
    """Distinct images, those whose features lie the least outside first."""
    unit = F.normalize(x.flatten(1))
    index = distinct(unit, SAME)
    members = torch.zeros(len(index), dtype=torch.long)
    nearest = (unit @ unit[index].T).abs().argmax(1)
    members.index_add_(0, nearest, torch.ones_like(nearest))
    sure = torch.sigmoid(CONFIDENCE[0] + CONFIDENCE[1] * far[index].log10()).float()
    return Selection.plain(x, labels, index, sure, members=members)
