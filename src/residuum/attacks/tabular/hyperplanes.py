"""Corners: rows of a table where more switching surfaces meet than can be by accident.

Training moves the hyperplanes w_j x + b_j = 0 on which neurons of the first layer switch onto training
samples (*kinks*), and the surfaces on which those of the layers above do. In d dimensions d of them meet
in a point wherever they are; one more that passes through it is no accident. Without labels and multipliers:

    draw    d - 1 hyperplanes among the nearest of a random point of the known range: they meet in a line.
            Hyperplanes that pass through the same two samples hold the line between these: l more hold it
    cross   it with the others near by; where m of them cross within WIDTH of each other and m + l >= GROUP
            lies a corner
    settle  it by least squares on the hyperplanes that pass it
    count   surfaces within eps of it, of the first layer beyond d, and of every other layer: k_eps; at
            corners of any d hyperplanes their mean is lam_eps
    rank    by  s = sum over layers of  max_eps -log P(Poisson(lam_eps) >= k_eps),  less UNEQUAL times how far
            the margin there is from that of the best (samples of a network at its margin share it)

What comes back is within a percent of its sample, all columns together. Few rows are the hard case: their
hyperplanes are few. Below four dimensions every point of the range is near some corner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from scipy.special import gammainc
from torch import Tensor, nn
from torch.nn import functional as F

from residuum.attacks.base import OneShotAttack, predicted_labels
from residuum.attacks.random_streams import stream
from residuum.errors import InputError
from residuum.networks.kinds import MLP
from residuum.records import Knowledge, Reconstruction, Selection
from residuum.surfaces.surface import Surface
from residuum.theory.rows import margins

LEAST, MOST = 4, 10  # columns
EPS = (1e-4, 3e-4, 1e-3)  # of the range: how exactly surfaces pass through a sample
GROUP, WIDTH = 3, 4e-4  # hyperplanes that cross a line so close to each other, in the range
SPARE, PASSING = (
    7,
    60,
)  # hyperplanes to draw from beyond d, and to cross, of those nearest to a point
DRAWS, BATCH = 8, 500  # lines at a point, points at a time
RATE = 60_000  # lines a second of one core; the same for the same seconds
MOST_LINES, MOST_POINTS = (
    3_000_000,
    30_000,
)  # bound time and memory; of the points the most telling,
LINES_A_POINT = 40  # and so few that scoring takes no longer than drawing, whatever the seconds
FLAT = 0.05  # sine of the angle with a line below which where a hyperplane crosses it is not known
HELD = 5e-3  # likewise, below which it holds the line that it passes within the last of EPS
FAR, AWAY = 1.5, 1e9  # of a crossing from the point, in the range; stands for one that is none
STEEP = 1e-3  # determinant of unit normals below which a corner is no point
DEAD = 1e-3  # of the longest row: neurons that hold nothing
SAME = 1e-4  # 1 - cosine of two hyperplanes that are one
CELL, APART = 0.01, 0.05  # of the range: of corners in a cell one is scored, closer ones are one
OUTSIDE = 0.02  # of the range, that a corner may lie outside of it
UNEQUAL, LARGEST = (
    20.0,
    0.5,
)  # off the score for margins that are so far from the median of the best
BEST, SHARED = 12, 0.15  # corners, which must be so close to it themselves, or margins say nothing
CANDIDATES = 240
# Probability that a corner is within 5% of a row in every column: sigmoid(a + b s), fitted on 960 corners of
# four networks (80 rows of five columns) that no claim uses; of the 29 above 0.95, 28 were.
CONFIDENCE = (-5.2, 0.18)
ASSUMES = (
    "corners assumes that a ReLU network was trained on samples until surfaces on which its neurons "
    "switch lie on them, and knows the range of the columns."
)


@dataclass(frozen=True, eq=False)
class Planes:
    """Unit normals (N, d) and offsets (N,) of hyperplanes in the range, which is [0, 1] in each column."""

    normals: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, low: Tensor, high: Tensor) -> Planes:
        """Of the neurons of a layer (h, d), each hyperplane once."""
        alive = weight.norm(dim=1) > DEAD * weight.norm(dim=1).max()
        weight, bias = weight[alive], bias[alive]
        rows = torch.cat([weight * (high - low), (bias + weight @ low)[:, None]], 1)
        rows = rows / rows[:, :-1].norm(dim=1, keepdim=True).clamp(min=1e-30)
        unit = F.normalize(rows)
        alike = (unit @ unit.T).abs() > 1 - SAME
        first = alike.int().argmax(1) == torch.arange(len(rows))  # of every bundle the first
        return cls(rows[first, :-1], rows[first, -1])

    def distances(self, x: Tensor) -> Tensor:
        """(n, N) of points (n, d)."""
        return (x @ self.normals.T + self.offsets).abs()

    def nearest(self, x: Tensor, count: int) -> Tensor:
        """(n, count) of those that pass points (n, d) closest, or all of them, closest first."""
        return self.distances(x).topk(min(count, len(self.offsets)), 1, largest=False).indices

    def corners(self, picked: Tensor) -> Tensor:
        """(k, d) where the hyperplanes picked (n, d) meet in one point inside of the range."""
        normals, offsets = self.normals[picked], self.offsets[picked]
        steep = torch.linalg.det(normals).abs() > STEEP
        x = torch.linalg.solve(normals[steep], -offsets[steep])
        return x[inside(x)]

    def settled(self, x: Tensor) -> Tensor:
        """Points (n, d) by least squares on the hyperplanes that pass them, nearer ones in each round."""
        d, widest = x.shape[1], EPS[-1]
        squares = (self.normals[:, :, None] * self.normals[:, None]).flatten(1)
        for share in (1, 2, 3):
            far = x @ self.normals.T + self.offsets
            on = (far.abs() < widest / share).double()
            normal = (on @ squares).reshape(-1, d, d) + 1e-4 * torch.eye(d, dtype=x.dtype)
            step = torch.linalg.solve(normal, -(on * far) @ self.normals)
            x = x + step.clamp(-widest, widest)
        return x


Counts = Callable[[Tensor], list[Tensor]]


def upper(chain: MLP, low: Tensor, high: Tensor) -> Counts:
    """Points (n, d) of the range to (n, len(EPS)) of each hidden layer above the first: surfaces on
    which its neurons switch within each eps, by |z| / |dz/dx| at the point.
    """
    layers = [
        (
            layer.weight.detach().double(),
            0.0 if layer.bias is None else layer.bias.detach().double(),
        )
        for layer in chain.linears[:-1]
    ]
    leaving = [layer.weight.detach().double().norm(dim=0) for layer in chain.linears[1:]]

    def counts(x: Tensor) -> list[Tensor]:
        if len(x) > BATCH:
            parts = [counts(part) for part in x.split(BATCH)]
            return [torch.cat(layer) for layer in zip(*parts, strict=True)]
        (first, bias), found = layers[0], []
        z = (low + (high - low) * x) @ first.T + bias
        slope = (first * (high - low)).expand(len(x), *first.shape)
        for (weight, bias), out in zip(layers[1:], leaving[1:], strict=True):
            slope = weight @ (slope * (z > 0)[..., None])
            z = z.relu() @ weight.T + bias
            size = weight.norm(dim=1) * out
            far = (z.abs() / slope.norm(dim=2).clamp(min=1e-30))[:, size > DEAD * size.max()]
            found.append(torch.stack([(far < eps).sum(1) for eps in EPS], 1))
        return found

    return counts


@dataclass(frozen=True, eq=False)
class Found:
    """Corners (k, d), most telling first; score: (k,) s; lines: that were drawn."""

    x: Tensor
    score: Tensor
    lines: int


def search(
    planes: Planes,
    lines: int,
    seed: int,
    above: Counts | None = None,
    margin: Callable[[Tensor], Tensor] | None = None,
) -> Found:
    """What ranks on at least so many lines, each place once.

    A row of the table lies on more surfaces than accident brings together: corners rank by tails of
    Poisson distributions with the rates of accidents (:func:`by_accident`).

    above: counts of the layers above (``upper``).
    margin: of points (n, d), (n,), where samples share it.
    """
    generator, drawn, d = stream("corners", seed), 0, planes.normals.shape[1]
    points = [planes.normals[:0]]
    while drawn < lines:
        around = torch.rand(BATCH, d, generator=generator, dtype=torch.float64)
        points.append(on_lines(planes, around, generator))
        drawn += BATCH * DRAWS
    x = _thinned(planes, torch.cat(points), min(MOST_POINTS, drawn // LINES_A_POINT))
    x = planes.settled(x)
    x = x[inside(x)]

    def counted(x: Tensor) -> list[Tensor]:
        return [beyond(planes, x), *(above(x) if above is not None else [])]

    chance = counted(by_accident(planes, generator))
    score = torch.zeros(len(x), dtype=torch.float64)
    for found, anywhere in zip(counted(x), chance, strict=True):
        # What samples add to the mean is cut off.
        rates = anywhere.clamp(max=3).double().sum(0) / max(1, len(anywhere))
        # The chance that a Poisson number of this rate is as large as what was found.
        tails = torch.from_numpy(gammainc(found.numpy(), rates.clamp(min=1e-6).numpy()))
        score -= tails.log().amin(1).clamp(min=-700.0)
    if margin is not None and len(x):
        here, best = margin(x), _apart(x, score)[:BEST]
        off = (here / here[best].median().clamp(min=1e-30) - 1).abs()
        if off[best].median() < SHARED:
            score -= UNEQUAL * off.clamp(max=LARGEST)
    kept = _apart(x, score)
    return Found(x[kept], score[kept], drawn)


def _thinned(planes: Planes, x: Tensor, most: int) -> Tensor:
    """The point of every cell that most hyperplanes pass: a row with many is found thousands of times."""
    passing = [(planes.distances(part) < EPS[-1]).sum(1) for part in x.split(20 * BATCH)]
    x = x[torch.cat(passing).argsort(descending=True, stable=True)]
    cell = (x / CELL).floor().unique(dim=0, return_inverse=True)[1]
    best = torch.full((len(x),), len(x)).scatter_reduce(0, cell, torch.arange(len(x)), "amin")
    return x[best[best < len(x)].sort().values[:most]]


def beyond(planes: Planes, x: Tensor) -> Tensor:
    """(k, len(EPS)) hyperplanes within each eps of points (k, d) beyond the d that meet anywhere."""
    far, d = planes.distances(x), x.shape[1]
    return torch.stack([(far < eps).sum(1) - d for eps in EPS], 1).clamp(min=0)


def by_accident(planes: Planes, generator: torch.Generator) -> Tensor:
    """(k, d) corners of any d hyperplanes that pass a point closely."""
    d = planes.normals.shape[1]
    around = torch.rand(BATCH, d, generator=generator, dtype=torch.float64)
    near = planes.nearest(around, PASSING)
    order = [torch.rand(near.shape, generator=generator).argsort(1)[:, :d] for _ in range(DRAWS)]
    return torch.cat([planes.corners(near.gather(1, some)) for some in order])


def on_lines(planes: Planes, around: Tensor, generator: torch.Generator) -> Tensor:
    """Points (k, d) of the range at which others cross DRAWS lines near each of ``around`` (B, d).

    A line is x + t u: of d - 1 hyperplanes, x nearest to the point in a random direction in which u has
    no component of zero.
    """
    n, d = around.shape
    near = planes.nearest(around, PASSING)
    A = planes.normals[near]
    c = planes.offsets[near] + (A @ around[..., None])[..., 0]  # seen from the point
    spare = min(d + SPARE, near.shape[1])
    picked = torch.rand(n, DRAWS, spare, generator=generator).topk(d - 1, 2).indices
    each = torch.arange(n)[:, None, None]
    across = torch.randn(n, DRAWS, 1, d, generator=generator, dtype=torch.float64)
    sides = torch.zeros(n, DRAWS, d, 2, dtype=torch.float64)
    sides[:, :, :-1, 0], sides[:, :, -1, 1] = -c[each, picked], 1
    line = torch.linalg.solve_ex(torch.cat([A[each, picked], across], 2), sides).result
    x, u = line[..., 0], F.normalize(line[..., 1], dim=2)
    slope, far = u @ A.mT, x @ A.mT + c[:, None]
    held = ((slope.abs() < HELD) & (far.abs() < EPS[-1])).sum(2) - (d - 1)
    t = -far / slope
    none = AWAY * (1 + torch.arange(t.shape[2], dtype=torch.float64))  # apart: they form no group
    t = torch.where((slope.abs() > FLAT) & (t.abs() < FAR), t, none).sort(2).values
    found = [around[:0]]
    for crossing in range(1, GROUP + 1):
        i, k = (crossing + held.clamp(min=0) >= GROUP).nonzero(as_tuple=True)
        first = t[i, k][:, : t.shape[2] + 1 - crossing]
        last = t[i, k][:, crossing - 1 :]
        row, j = ((last - first < WIDTH) & (first < FAR)).nonzero(as_tuple=True)
        at = (first[row, j] + last[row, j]) / 2
        i, k = i[row], k[row]
        found.append(around[i] + x[i, k] + u[i, k] * at[:, None])
    points = torch.cat(found)
    return points[inside(points)]


def inside(x: Tensor) -> Tensor:
    """(n,) points of the range, or about."""
    return ((x > -OUTSIDE) & (x < 1 + OUTSIDE)).all(1)


def _apart(x: Tensor, score: Tensor) -> Tensor:
    """Indices, best score first, none within APART of one before it in every column."""
    free, kept = torch.ones(len(x), dtype=torch.bool), []
    for i in score.argsort(descending=True, stable=True).tolist():
        if free[i]:
            kept.append(i)
            free &= (x - x[i]).abs().amax(1) > APART
            if len(kept) == CANDIDATES:
                break
    return torch.tensor(kept, dtype=torch.long)


class Hyperplanes(OneShotAttack):
    """Corners of the first layer's hyperplanes that too many others pass through."""

    name: ClassVar[str] = "corners"
    pace: ClassVar[str] = "sized"
    effort_share: ClassVar[float] = 0.25
    assumes: ClassVar[str] = ASSUMES

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply."""
        columns = math.prod(surface.shape(knowledge))
        if not LEAST <= columns <= MOST:
            return f"needs {LEAST} to {MOST} columns; samples here have {columns} values"
        chain = surface.chain
        if chain is None or not any(isinstance(part, nn.ReLU) for part in chain.modules()):
            return "needs a chain of dense layers with ReLU between them"
        if chain.hidden < 1 or chain.linears[0].bias is None:
            return (
                "needs a hidden layer with a bias: without one all hyperplanes meet in the origin"
            )
        if len(chain.linears[0].weight) <= columns + 1:
            return f"needs more neurons than {columns + 1}: fewer hyperplanes meet anywhere"
        if knowledge.value_range is None:
            return "needs the range of the columns; grant it with --value-range"
        return ""

    def why_applies(self, surface: Surface) -> str:
        """Return why the attack applies."""
        return "in few dimensions hyperplanes of the first layer meet on training samples"

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Search as many lines as ``seconds`` allow by RATE. The highest scores come first."""
        chain, shape = surface.chain, surface.shape(knowledge)
        assert chain is not None
        first = chain.linears[0]
        assert first.bias is not None
        box = knowledge.box(torch.zeros(shape, dtype=torch.float64))
        assert box is not None
        low, high = (part.flatten().expand(math.prod(shape)) for part in box)
        planes = Planes.of(first.weight.detach().double(), first.bias.detach().double(), low, high)
        model = surface.model().double()

        def outputs(x: Tensor) -> Tensor:
            with torch.no_grad():
                return model((low + (high - low) * x).reshape(-1, *shape))

        def margin(x: Tensor) -> Tensor:
            return margins(out := outputs(x), predicted_labels(out).long()).amin(1)

        lines = int(min(MOST_LINES, RATE * self.seconds))
        shared = margin if surface.task != "regression" else None
        found = search(planes, lines, self.seed, upper(chain, low, high), shared)
        if not len(found.x):
            raise InputError("corners found none that others pass through.", "Use another attack.")
        most = 3 * knowledge.sample_count if knowledge.sample_count else CANDIDATES
        x = (low + (high - low) * found.x[:most]).reshape(-1, *shape)
        labels = predicted_labels(outputs(found.x[:most]))
        sure = torch.sigmoid(CONFIDENCE[0] + CONFIDENCE[1] * found.score[:most]).float()
        chosen = Selection.plain(x, labels, torch.arange(len(x)), sure)
        note = (
            f"corners: {found.lines} lines of {len(planes.offsets)} hyperplanes; by their scores "
            f"{float(sure.sum()):.0f} of those brought back are rows"
        )
        return Reconstruction.at_once(
            self.name, x, labels, torch.ones(len(x)), knowledge, selection=chosen, notes=(note,)
        )
