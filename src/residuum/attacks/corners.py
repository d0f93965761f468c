"""Corners: rows of a table where more switching hyperplanes meet than can be by accident.

Training moves the hyperplanes w_j x + b_j = 0 on which neurons switch onto training samples
(``kinks.py``). In d dimensions d of them meet in a point wherever they are; one more that passes through
it is no accident, and where several do, a sample lies. So without labels, multipliers or upper layers:

    draw   d - 1 hyperplanes among those nearest to a random point of the known range: they meet in a line
    cross  it with all others; where GROUP of them cross within WIDTH of each other lies a corner
    count  hyperplanes within eps of it beyond d:  k_eps,  by accident Poisson(lam_eps), the mean of
           corners of any d hyperplanes
    rank   by  s = max_eps  -log P(Poisson(lam_eps) >= k_eps);  of T corners T exp(-s) rank so by accident

A line looks at as many corners as there are hyperplanes in the time of one. What comes back is within a
percent of its sample, all columns together. Few rows are the hard case: their hyperplanes are few. Below
four dimensions every point of the range is near some corner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from scipy.stats import poisson
from torch import Tensor, nn
from torch.nn import functional as F

from residuum.attacks.contract import AtOnce, said_labels, stream
from residuum.checkpoints.surfaces import Surface
from residuum.errors import InputError
from residuum.networks import dense_chain
from residuum.records import Knowledge, Reconstruction, Selection
from residuum.settings import AttackConfig

LEAST, MOST = 4, 10  # columns
EPS = (1e-4, 3e-4, 1e-3)  # of the range: how exactly hyperplanes pass through a sample
GROUP, WIDTH = 3, 4e-4  # hyperplanes that cross a line so close to each other, in the range
NEAREST, DRAWS, BATCH = 40, 8, 1000  # hyperplanes to draw from, draws of each of so many points
RATE = 20_000  # lines a second of one core; the same for the same seconds
MOST_LINES, MOST_POINTS = 1_000_000, 4_000  # bound time and memory; of the points the most telling
FLAT = 0.05  # sine of the angle with a line below which where a hyperplane crosses it is not known
AWAY = 1e9  # stands for a crossing outside of the range
STEEP = 1e-3  # determinant of unit normals below which a corner is no point
DEAD = 1e-3  # of the longest row: neurons that hold nothing
SAME = 1e-4  # 1 - cosine of two hyperplanes that are one
APART = 0.02  # of the range: closer corners are one
MARGIN = 0.02  # of the range, that a corner may lie outside of it
CANDIDATES = 240
ASSUMES = (
    "corners assumes that a ReLU network was trained on samples until hyperplanes on which its first "
    "layer switches lie on them, and knows the range of the columns. It convicts and never acquits."
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

    def corners(self, picked: Tensor) -> Tensor:
        """(k, d) where the hyperplanes picked (n, d) meet in one point inside of the range."""
        normals, offsets = self.normals[picked], self.offsets[picked]
        steep = torch.linalg.det(normals).abs() > STEEP
        x = torch.linalg.solve(normals[steep], -offsets[steep])
        return x[inside(x)]


@dataclass(frozen=True, eq=False)
class Found:
    """Corners (k, d), most telling first; score: (k,) s; tried: T."""

    x: Tensor
    score: Tensor
    tried: int


def search(planes: Planes, lines: int, seed: int) -> Found:
    """What ranks on at least so many lines, each place once.

    A line is where d - 1 hyperplanes meet, a corner where another crosses it. A row of the table lies
    on more hyperplanes than accident brings together: corners rank by the tail of a Poisson
    distribution with the rate of accidents (:func:`accidents`).
    """
    generator, drawn, d = stream("corners", seed), 0, planes.normals.shape[1]
    rates = accidents(planes, generator)
    points = [planes.normals[:0]]
    while drawn < lines:
        around, near = _near(planes, generator)
        for _ in range(DRAWS):
            found, n = on_lines(planes, around, _some(near, d - 1, generator), generator)
            points.append(found)
            drawn += n
    x = torch.cat(points)
    tails = poisson.logsf(beyond(planes, x).numpy() - 1, rates.numpy())
    score = -torch.from_numpy(tails).amin(1).clamp(min=-700.0)
    order = score.argsort(descending=True, stable=True)
    # A row with many hyperplanes is found thousands of times: first the best of every cell.
    cell = (x[order] / APART).floor().unique(dim=0, return_inverse=True)[1]
    best = torch.full((len(x),), len(x)).scatter_reduce(0, cell, torch.arange(len(x)), "amin")
    some = order[best[best < len(x)].sort().values[:MOST_POINTS]]
    kept = some[_apart(x[some], score[some])]
    return Found(x[kept], score[kept], drawn * len(planes.offsets))


def _near(planes: Planes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random points (B, d) of the range and the hyperplanes (B, NEAREST) that pass them closest."""
    d = planes.normals.shape[1]
    around = torch.rand(BATCH, d, generator=generator, dtype=torch.float64)
    nearest = min(NEAREST, len(planes.offsets))
    return around, planes.distances(around).topk(nearest, 1, largest=False).indices


def _some(near: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(B, count) of the hyperplanes near each point."""
    order = torch.rand(near.shape, generator=generator).argsort(1)
    return near.gather(1, order[:, :count])


def beyond(planes: Planes, x: Tensor) -> Tensor:
    """(k, len(EPS)) hyperplanes within each eps of points (k, d) beyond the d that meet anywhere."""
    far, d = planes.distances(x), x.shape[1]
    return torch.stack([(far < eps).sum(1) - d for eps in EPS], 1).clamp(min=0)


def accidents(planes: Planes, generator: torch.Generator) -> Tensor:
    """(len(EPS),) mean of ``beyond`` over corners of any d hyperplanes; what samples add is cut off."""
    d, (_, near) = planes.normals.shape[1], _near(planes, generator)
    every = [planes.corners(_some(near, d, generator)) for _ in range(4 * DRAWS)]
    found = beyond(planes, torch.cat(every)).clamp(max=3).double()
    return (found.sum(0) / max(1, len(found))).clamp(min=1e-6)


def on_lines(
    planes: Planes, around: Tensor, picked: Tensor, generator: torch.Generator
) -> tuple[Tensor, int]:
    """Points (k, d) of the range at which GROUP others cross lines of picked hyperplanes (B, d - 1).

    Also the number of lines. A line is x + t u: of the picked hyperplanes, x nearest to a point in a
    random direction in which u has no component of zero.
    """
    (n, d), A, c = around.shape, planes.normals, planes.offsets
    across = torch.randn(n, 1, d, generator=generator, dtype=torch.float64)
    rows = torch.cat([A[picked], across], 1)
    sides = torch.zeros(n, d, 2, dtype=torch.float64)
    sides[:, :-1, 0], sides[:, -1, 0] = -c[picked], (across[:, 0] * around).sum(1)
    sides[:, -1, 1] = 1
    steep = torch.linalg.det(rows).abs() > STEEP
    line = torch.linalg.solve(rows[steep], sides[steep])
    x, u = line[..., 0], F.normalize(line[..., 1])
    slope = (u @ A.T).scatter(1, picked[steep], 0.0)  # the line lies in those picked
    t = -(x @ A.T + c) / torch.where(slope.abs() < FLAT, FLAT, slope)
    away = AWAY * (
        1 + torch.arange(len(c), dtype=torch.float64)
    )  # each by itself, so that they form no group
    t = torch.where((slope.abs() >= FLAT) & (t.abs() < d), t, away)
    t = t.sort(1).values
    i, j = (t[:, GROUP - 1 :] - t[:, : 1 - GROUP] < WIDTH).nonzero(as_tuple=True)
    found = x[i] + u[i] * ((t[i, j] + t[i, j + GROUP - 1]) / 2)[:, None]
    return found[inside(found)], len(x)


def inside(x: Tensor) -> Tensor:
    """(n,) points of the range, or about."""
    return ((x > -MARGIN) & (x < 1 + MARGIN)).all(1)


def _apart(x: Tensor, score: Tensor) -> Tensor:
    """Indices, best score first, none within APART of one before it in every column."""
    free, kept = torch.ones(len(x), dtype=torch.bool), []
    for i in score.argsort(descending=True, stable=True).tolist():
        if free[i]:
            kept.append(i)
            free &= (x - x[i]).abs().amax(1) > APART
    return torch.tensor(kept, dtype=torch.long)


class Corners(AtOnce):
    """Corners of the first layer's hyperplanes that too many others pass through."""

    name = "corners"
    pace: ClassVar[str] = "sized"
    part: ClassVar[float] = 0.25
    assumes: ClassVar[str] = ASSUMES

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Conditions, cheapest first."""
        columns = math.prod(surface.shape(knowledge))
        if not LEAST <= columns <= MOST:
            return f"needs {LEAST} to {MOST} columns; samples here have {columns} values"
        chain = dense_chain(surface.model())
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

    def why(self, surface: Surface) -> str:
        """In a few words."""
        return "in few dimensions hyperplanes of the first layer meet on training samples"

    def find(self, surface: Surface, knowledge: Knowledge, config: AttackConfig) -> Reconstruction:
        """As many lines as ``config.seconds`` allow by RATE; candidates: most telling first."""
        chain, shape = dense_chain(surface.model()), surface.shape(knowledge)
        assert chain is not None
        first = chain.linears[0]
        assert first.bias is not None
        box = knowledge.box(torch.zeros(shape, dtype=torch.float64))
        assert box is not None
        low, high = (part.flatten().expand(math.prod(shape)) for part in box)
        planes = Planes.of(first.weight.detach().double(), first.bias.detach().double(), low, high)
        found = search(planes, int(min(MOST_LINES, RATE * config.seconds)), config.seed)
        if not len(found.x):
            raise InputError("corners found none that others pass through.", "Use another attack.")
        most = 3 * knowledge.sample_count if knowledge.sample_count else CANDIDATES
        x = (low + (high - low) * found.x[:most]).reshape(-1, *shape)
        with torch.no_grad():
            outputs = surface.model().double()(x)
        labels = said_labels(outputs)
        accident = found.tried * (-found.score[:most]).exp()
        sure = (1 / (1 + accident)).float()
        chosen = Selection.plain(x, labels, torch.arange(len(x)), sure)
        note = (
            f"corners: {found.tried} corners of {len(planes.offsets)} hyperplanes; "
            f"{int((accident < 0.05).sum())} of those brought back are no accident at 5%"
        )
        return Reconstruction.at_once(
            self.name, x, labels, torch.ones(len(x)), knowledge, selection=chosen, notes=(note,)
        )
