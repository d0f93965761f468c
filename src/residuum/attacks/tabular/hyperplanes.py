"""The attack "corners": recover table rows as points where unexpectedly many activation boundaries meet.

The activation boundary of a neuron in the first layer is the hyperplane w_j x + b_j = 0. Training moves these
hyperplanes, and the boundaries of the layers above, onto training samples. A training sample on a boundary is
called a kink. Any d hyperplanes meet in a point in d dimensions. A further hyperplane through the same point
is unlikely by chance. The attack needs neither labels nor multipliers:

    draw    d - 1 of the hyperplanes closest to a random point of the known range. These hyperplanes meet in a
    line.
            Hyperplanes through the same two samples contain the line between the samples. Let l be the number
            of further hyperplanes that contain the line.
    cross   the line with the other hyperplanes nearby. If m hyperplanes cross the line within WIDTH of each
            other, and m + l >= GROUP, the crossing is a corner.
    settle  the corner by least squares on the hyperplanes that pass through it.
    count   the boundaries within eps of the corner, k_eps: the boundaries of the first layer in excess of d,
            and the boundaries of each other layer. Let lam_eps be the mean count at the corners of any d
            hyperplanes.
    rank    the corners by  s = sum over layers of  max_eps -log P(Poisson(lam_eps) >= k_eps),  minus
            MARGIN_PENALTY times the deviation of the margin from the margin of the best corners. If training
            ended at the maximum margin, the training samples share one margin.

A recovered row differs from its sample by less than a percent in all columns. Small tables are difficult,
because few hyperplanes lie on their rows. In fewer than four dimensions, every point of the range is close
to a corner.
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

from residuum.attacks.base import OneShotAttack, predict_labels
from residuum.attacks.random_streams import stream
from residuum.errors import InputError
from residuum.networks.kinds import MLP
from residuum.records import Knowledge, Reconstruction, Selection
from residuum.surfaces.surface import Surface
from residuum.theory.rows import margins

MIN_COLUMNS, MAX_COLUMNS = 4, 10  # limits of the number of columns of a table
# Tolerances. The activation boundary of a neuron (where its input is zero) counts as passing through a sample
# if their distance is below a tolerance. All distances are for columns that are scaled to [0, 1].
EPS = (1e-4, 3e-4, 1e-3)
GROUP = 3  # minimum number of hyperplanes that cross a line at the same point (a corner)
# A corner is a point where several hyperplanes meet. Their crossings with a line through the corner lie
# within this distance.
WIDTH = 4e-4
# Each line is the intersection of hyperplanes, which are chosen at random among the d + SPARE closest ones.
SPARE = 7
CROSSING = 60  # number of hyperplanes for which the crossing with a line is computed
DRAWS = 8  # number of random lines that are searched near each random point
BATCH = 500  # number of random points in each batch
# Assumed number of lines per second; it is fixed, so that results do not depend on the machine.
RATE = 60_000
# Maximum number of searched lines, which limits the time, and of corners (points where hyperplanes meet)
# that are scored, which limits the memory.
MAX_LINES, MAX_POINTS = 3_000_000, 30_000
# Number of searched lines for each scored corner, so that scoring takes no longer than the search.
LINES_PER_POINT = 40
FLAT = (
    0.05  # crossings count if the sine of the angle between line and hyperplane exceeds this value
)
# Maximum sine of the angle between a line and a hyperplane that contains the line.
CONTAINING = 5e-3
MAX_DISTANCE = 1.5  # maximum distance |t| of a crossing x + t u from the start x of its line
NO_CROSSING = 1e9  # position on a line that marks a missing crossing
STEEP = 1e-3  # d hyperplanes define a corner if the determinant of their unit normals exceeds this value
# Neurons count as dead if the norm of their weights is below this share of the largest norm.
DEAD = 1e-3
SAME = 1e-4  # two hyperplanes count as equal if 1 - cosine of their normals is below this value
# Side of the cells of a grid; at most one corner (point where hyperplanes meet) is scored in each cell.
CELL = 0.01
# Two corners count as different if they differ by more than this in at least one column.
MIN_SEPARATION = 0.05
OUTSIDE = 0.02  # a recovered table row may exceed the value range by this distance
# Training samples often have the same margin (output times label). If the margins of the best corners are
# similar (within SHARED_MARGIN), a corner with another margin gets a lower score: MARGIN_PENALTY times the
# relative deviation of its margin, at most MAX_DEVIATION, is subtracted.
MARGIN_PENALTY, MAX_DEVIATION = 20.0, 0.5
BEST_CORNERS, SHARED_MARGIN = 12, 0.15
CANDIDATES = 240  # maximum number of returned candidates
# Constants (a, b) of the probability that a corner is within 5% of a table row in every column.
# This probability is sigmoid(a + b s), where s is the score of the corner.
# The constants were fitted on 960 corners of four networks (80 rows of five columns) that appear in no
# published result.
# Of the 29 corners with a probability above 0.95, 28 were rows.
CONFIDENCE = (-5.2, 0.18)
ASSUMES = (
    "corners assumes that training moved the activation boundaries of a ReLU network onto training samples. "
    "The attack needs the value range of the columns."
)


@dataclass(frozen=True, eq=False)
class Planes:
    """Activation boundaries (hyperplanes) of a layer, with the value range scaled to [0, 1] in each column.

    Attributes:
        normals: (N, d) unit normals of the hyperplanes.
        offsets: (N,) offsets of the hyperplanes, which contain the points x with normal . x + offset = 0.
    """

    normals: Tensor
    offsets: Tensor

    @classmethod
    def from_layer(cls, weight: Tensor, bias: Tensor, low: Tensor, high: Tensor) -> Planes:
        """Create the hyperplanes of a layer: where the input of each neuron is zero. Equal ones appear once.

        Args:
            weight: (h, d) weights of the layer.
            bias: (h,) biases of the layer.
            low: (d,) lower bounds of the columns.
            high: (d,) upper bounds of the columns.

        Returns:
            The hyperplanes. Equal hyperplanes appear once.
        """
        is_alive = weight.norm(dim=1) > DEAD * weight.norm(dim=1).max()
        weight, bias = weight[is_alive], bias[is_alive]
        plane_rows = torch.cat([weight * (high - low), (bias + weight @ low)[:, None]], 1)
        plane_rows = plane_rows / plane_rows[:, :-1].norm(dim=1, keepdim=True).clamp(min=1e-30)
        unit_rows = F.normalize(plane_rows)
        is_equal = (unit_rows @ unit_rows.T).abs() > 1 - SAME
        # Keep only the first of several equal hyperplanes.
        is_first = is_equal.int().argmax(1) == torch.arange(len(plane_rows))
        return cls(plane_rows[is_first, :-1], plane_rows[is_first, -1])

    def distances(self, x: Tensor) -> Tensor:
        """Compute the distances (n, N) between n points (n, d) and all N hyperplanes."""
        return (x @ self.normals.T + self.offsets).abs()

    def nearest(self, x: Tensor, count: int) -> Tensor:
        """Return the closest hyperplanes of each point.

        Args:
            x: (n, d) points.
            count: Number of hyperplanes for each point.

        Returns:
            (n, count) indices of hyperplanes, closest first. If the layer has fewer than ``count``
            hyperplanes, the result contains all of them.
        """
        return self.distances(x).topk(min(count, len(self.offsets)), 1, largest=False).indices

    def intersect(self, index: Tensor) -> Tensor:
        """Return the points (k, d) inside the value range at which the d hyperplanes of each row meet.

        Args:
            index: (n, d) indices of hyperplanes.

        Returns:
            (k, d) points.
        """
        normals, offsets = self.normals[index], self.offsets[index]
        is_steep = torch.linalg.det(normals).abs() > STEEP
        intersections = torch.linalg.solve(normals[is_steep], -offsets[is_steep])
        return intersections[is_inside(intersections)]

    def settle(self, x: Tensor) -> Tensor:
        """Move points (n, d) by least squares onto nearby hyperplanes.

        The function runs three rounds. In each round, only hyperplanes within a smaller distance count as
        nearby.

        Returns:
            The moved points (n, d).
        """
        d, widest = x.shape[1], EPS[-1]
        outer_products = (self.normals[:, :, None] * self.normals[:, None]).flatten(1)
        for share in (1, 2, 3):
            distances = x @ self.normals.T + self.offsets
            is_close = (distances.abs() < widest / share).double()
            normal_matrix = (is_close @ outer_products).reshape(-1, d, d) + 1e-4 * torch.eye(
                d, dtype=x.dtype
            )
            least_squares_step = torch.linalg.solve(
                normal_matrix, -(is_close * distances) @ self.normals
            )
            x = x + least_squares_step.clamp(-widest, widest)
        return x


Counter = Callable[[Tensor], list[Tensor]]


def make_upper_counter(chain: MLP, low: Tensor, high: Tensor) -> Counter:
    """Return a function that counts activation boundaries near points, in all layers above the first.

    The distance of a point from the boundary of a neuron is estimated as |z| / |dz/dx|, where z is the
    pre-activation of the neuron.

    Args:
        chain: The network.
        low: (d,) lower bounds of the columns.
        high: (d,) upper bounds of the columns.

    Returns:
        A function from points (n, d) to one tensor (n, len(EPS)) for each hidden layer above the first. The
        tensor holds the number of boundaries within each of the distances in EPS.
    """
    layers = [
        (
            layer.weight.detach().double(),
            0.0 if layer.bias is None else layer.bias.detach().double(),
        )
        for layer in chain.linears[:-1]
    ]
    outgoing_norms = [layer.weight.detach().double().norm(dim=0) for layer in chain.linears[1:]]

    def counts(x: Tensor) -> list[Tensor]:
        if len(x) > BATCH:
            batches = [counts(batch) for batch in x.split(BATCH)]
            return [torch.cat(layer) for layer in zip(*batches, strict=True)]
        (first_weight, bias), result = layers[0], []
        pre_activations = (low + (high - low) * x) @ first_weight.T + bias
        z_gradient = (first_weight * (high - low)).expand(len(x), *first_weight.shape)
        for (weight, bias), outgoing_norm in zip(layers[1:], outgoing_norms[1:], strict=True):
            z_gradient = weight @ (z_gradient * (pre_activations > 0)[..., None])
            pre_activations = pre_activations.relu() @ weight.T + bias
            importance = weight.norm(dim=1) * outgoing_norm
            is_live = importance > DEAD * importance.max()
            distances = (pre_activations.abs() / z_gradient.norm(dim=2).clamp(min=1e-30))[
                :, is_live
            ]
            result.append(torch.stack([(distances < eps).sum(1) for eps in EPS], 1))
        return result

    return counts


@dataclass(frozen=True, eq=False)
class Corners:
    """Points where more activation boundaries meet than expected by chance, best first.

    Attributes:
        x: (k, d) corners.
        score: (k,) score of each corner, which is high if chance hardly explains its number of boundaries.
        lines: Number of random lines that the search has drawn.
    """

    x: Tensor
    score: Tensor
    lines: int


def search_corners(
    planes: Planes,
    lines: int,
    seed: int,
    count_upper: Counter | None = None,
    margin: Callable[[Tensor], Tensor] | None = None,
) -> Corners:
    """Search for corners, which are points on many activation boundaries, on random lines, and rank them.

    A row of the table lies on more boundaries than expected by chance. The score of a corner is the
    negative logarithm of the probability that a Poisson variable reaches its number of boundaries. The mean
    of the Poisson variable is the mean number at random corners (:func:`sample_chance_corners`).

    Args:
        planes: Activation boundaries of the first layer's neurons (hyperplanes).
        lines: Minimum number of random lines to draw.
        seed: Seed of the random lines.
        count_upper: Function that counts activation boundaries of higher layers near points
            (:func:`make_upper_counter`).
        margin: Function from points (n, d) to margins (n,) of the network. If None, margins do not change
            the score.

    Returns:
        The distinct corners, best first.
    """
    generator, lines_drawn, d = stream("corners", seed), 0, planes.normals.shape[1]
    crossings = [planes.normals[:0]]
    while lines_drawn < lines:
        random_points = torch.rand(BATCH, d, generator=generator, dtype=torch.float64)
        crossings.append(find_crossings(planes, random_points, generator))
        lines_drawn += BATCH * DRAWS
    corner_points = _thin(
        planes, torch.cat(crossings), min(MAX_POINTS, lines_drawn // LINES_PER_POINT)
    )
    corner_points = planes.settle(corner_points)
    corner_points = corner_points[is_inside(corner_points)]

    def count_layers(corner_points: Tensor) -> list[Tensor]:
        return [
            count_excess(planes, corner_points),
            *(count_upper(corner_points) if count_upper is not None else []),
        ]

    chance_counts = count_layers(sample_chance_corners(planes, generator))
    score = torch.zeros(len(corner_points), dtype=torch.float64)
    for counts, chance in zip(count_layers(corner_points), chance_counts, strict=True):
        # Some of the random corners may be training samples. Their large counts are limited, so that they
        # do not raise the mean.
        chance_rates = chance.clamp(max=3).double().sum(0) / max(1, len(chance))
        # Compute the probability that a Poisson variable with the mean ``chance_rates`` reaches the count.
        tail_probabilities = torch.from_numpy(
            gammainc(counts.numpy(), chance_rates.clamp(min=1e-6).numpy())
        )
        score -= tail_probabilities.log().amin(1).clamp(min=-700.0)
    if margin is not None and len(corner_points):
        margin_of_x, best_corners = (
            margin(corner_points),
            _select_distinct(corner_points, score)[:BEST_CORNERS],
        )
        margin_deviation = (
            margin_of_x / margin_of_x[best_corners].median().clamp(min=1e-30) - 1
        ).abs()
        if margin_deviation[best_corners].median() < SHARED_MARGIN:
            score -= MARGIN_PENALTY * margin_deviation.clamp(max=MAX_DEVIATION)
    distinct_index = _select_distinct(corner_points, score)
    return Corners(corner_points[distinct_index], score[distinct_index], lines_drawn)


def _thin(planes: Planes, x: Tensor, max_points: int) -> Tensor:
    """Keep one point in each grid cell, because many random lines lead to the same point.

    The returned point lies on more hyperplanes than the other points of the cell.

    Returns:
        The points (k, d), at most ``max_points``.
    """
    plane_counts = [(planes.distances(batch) < EPS[-1]).sum(1) for batch in x.split(20 * BATCH)]
    x = x[torch.cat(plane_counts).argsort(descending=True, stable=True)]
    cell_numbers = (x / CELL).floor().unique(dim=0, return_inverse=True)[1]
    first_in_cell = torch.full((len(x),), len(x)).scatter_reduce(
        0, cell_numbers, torch.arange(len(x)), "amin"
    )
    return x[first_in_cell[first_in_cell < len(x)].sort().values[:max_points]]


def count_excess(planes: Planes, x: Tensor) -> Tensor:
    """Count the hyperplanes near each point, minus the number of columns d.

    A corner in d dimensions is the intersection of at least d hyperplanes. Only further hyperplanes near
    the corner are a sign of a training sample.

    Args:
        planes: Activation boundaries of the first layer's neurons (hyperplanes).
        x: (k, d) points.

    Returns:
        (k, len(EPS)) number of hyperplanes within each of the distances in EPS, minus d, and at least 0.
    """
    distance, d = planes.distances(x), x.shape[1]
    return torch.stack([(distance < eps).sum(1) - d for eps in EPS], 1).clamp(min=0)


def sample_chance_corners(planes: Planes, generator: torch.Generator) -> Tensor:
    """Sample corners that are intersections of d randomly chosen hyperplanes, close to random points.

    The number of activation boundaries near these corners is the number that is expected by chance.

    Args:
        planes: Activation boundaries of the first layer's neurons (hyperplanes).
        generator: Random number generator.

    Returns:
        (k, d) corners.
    """
    column_count = planes.normals.shape[1]
    random_points = torch.rand(BATCH, column_count, generator=generator, dtype=torch.float64)
    near_planes = planes.nearest(random_points, CROSSING)
    random_orders = [
        torch.rand(near_planes.shape, generator=generator).argsort(1)[:, :column_count]
        for _ in range(DRAWS)
    ]
    return torch.cat([planes.intersect(near_planes.gather(1, index)) for index in random_orders])


def find_crossings(planes: Planes, around: Tensor, generator: torch.Generator) -> Tensor:
    """Find points on random lines near which several hyperplanes cross the line.

    A line x + t u is the intersection of d - 1 hyperplanes near a given point. The function chooses x as
    the point on the line for which the vector from the given point is orthogonal to a random direction.

    Args:
        planes: Activation boundaries of the first layer's neurons (hyperplanes).
        around: (B, d) random points. The function draws DRAWS lines near each point.
        generator: Random number generator.

    Returns:
        (k, d) points inside the value range.
    """
    n, d = around.shape
    near_planes = planes.nearest(around, CROSSING)
    near_normals = planes.normals[near_planes]
    # A hyperplane near the point p in ``around`` is {x: near_normals (x - p) + near_offsets = 0}.
    near_offsets = planes.offsets[near_planes] + (near_normals @ around[..., None])[..., 0]
    choice_count = min(d + SPARE, near_planes.shape[1])
    chosen_planes = torch.rand(n, DRAWS, choice_count, generator=generator).topk(d - 1, 2).indices
    point_index = torch.arange(n)[:, None, None]
    random_direction = torch.randn(n, DRAWS, 1, d, generator=generator, dtype=torch.float64)
    right_sides = torch.zeros(n, DRAWS, d, 2, dtype=torch.float64)
    right_sides[:, :, :-1, 0], right_sides[:, :, -1, 1] = (
        -near_offsets[point_index, chosen_planes],
        1,
    )
    solutions = torch.linalg.solve_ex(
        torch.cat([near_normals[point_index, chosen_planes], random_direction], 2), right_sides
    ).result
    crossing_points, u = solutions[..., 0], F.normalize(solutions[..., 1], dim=2)
    slope, distance = u @ near_normals.mT, crossing_points @ near_normals.mT + near_offsets[:, None]
    contains_line = (slope.abs() < CONTAINING) & (distance.abs() < EPS[-1])
    containing_count = contains_line.sum(2) - (d - 1)
    line_positions = -distance / slope
    # Missing crossings get positions that are far from each other, so that they are not taken for one
    # point.
    missing_positions = NO_CROSSING * (
        1 + torch.arange(line_positions.shape[2], dtype=torch.float64)
    )
    is_crossing = (slope.abs() > FLAT) & (line_positions.abs() < MAX_DISTANCE)
    line_positions = torch.where(is_crossing, line_positions, missing_positions).sort(2).values
    corner_points = [around[:0]]
    for crossing in range(1, GROUP + 1):
        i, k = (crossing + containing_count.clamp(min=0) >= GROUP).nonzero(as_tuple=True)
        first_crossing = line_positions[i, k][:, : line_positions.shape[2] + 1 - crossing]
        last_crossing = line_positions[i, k][:, crossing - 1 :]
        row, j = (
            (last_crossing - first_crossing < WIDTH) & (first_crossing < MAX_DISTANCE)
        ).nonzero(as_tuple=True)
        middle_position = (first_crossing[row, j] + last_crossing[row, j]) / 2
        i, k = i[row], k[row]
        corner_points.append(around[i] + crossing_points[i, k] + u[i, k] * middle_position[:, None])
    crossing_points = torch.cat(corner_points)
    return crossing_points[is_inside(crossing_points)]


def is_inside(x: Tensor) -> Tensor:
    """Return a mask (n,) of the points (n, d) that lie inside the value range, up to a tolerance."""
    return ((x > -OUTSIDE) & (x < 1 + OUTSIDE)).all(1)


def _select_distinct(x: Tensor, score: Tensor) -> Tensor:
    """Return the indices of corners (points where many boundaries meet) that are different, best first."""
    is_selectable, index = torch.ones(len(x), dtype=torch.bool), []
    for i in score.argsort(descending=True, stable=True).tolist():
        if is_selectable[i]:
            index.append(i)
            is_selectable &= (x - x[i]).abs().amax(1) > MIN_SEPARATION
            if len(index) == CANDIDATES:
                break
    return torch.tensor(index, dtype=torch.long)


class Hyperplanes(OneShotAttack):
    """The attack "corners": recovers table rows as points where many activation boundaries meet."""

    name: ClassVar[str] = "corners"
    pace: ClassVar[str] = "sized"
    effort_share: ClassVar[float] = 0.25
    assumes: ClassVar[str] = ASSUMES

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply to a network.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The reason, or "" if the attack applies.
        """
        columns = math.prod(surface.sample_shape(knowledge))
        if not MIN_COLUMNS <= columns <= MAX_COLUMNS:
            return (
                f"needs {MIN_COLUMNS} to {MAX_COLUMNS} columns; samples here have {columns} values"
            )
        chain = surface.chain
        if chain is None or not any(isinstance(layer, nn.ReLU) for layer in chain.modules()):
            return "needs a chain of dense layers with ReLU between them"
        if chain.hidden < 1 or chain.linears[0].bias is None:
            return (
                "needs a hidden layer with a bias, because all activation boundaries without a bias meet in "
                "the origin"
            )
        if len(chain.linears[0].weight) <= columns + 1:
            return (
                f"needs more than {columns + 1} neurons in the first layer, because any {columns} "
                "hyperplanes meet in a point"
            )
        if knowledge.value_range is None:
            return "needs the value range of the columns; pass --value-range"
        return ""

    def why_applies(self, surface: Surface) -> str:
        """Return a short reason why the attack applies to a network."""
        return "with few columns, activation boundaries of the first layer meet on training samples"

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Search on random lines for corners, which are points where many activation boundaries meet.

        The time limit ``seconds`` decides the number of lines.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The corners as candidates. Corners with the highest scores come first.

        Raises:
            InputError: If no corner was found.
        """
        chain, shape = surface.chain, surface.sample_shape(knowledge)
        assert chain is not None
        first_layer = chain.linears[0]
        assert first_layer.bias is not None
        value_box = knowledge.box(torch.zeros(shape, dtype=torch.float64))
        assert value_box is not None
        low, high = (bound.flatten().expand(math.prod(shape)) for bound in value_box)
        weight, bias = first_layer.weight.detach().double(), first_layer.bias.detach().double()
        planes = Planes.from_layer(weight, bias, low, high)
        model = surface.copy_module().double()

        def outputs(x: Tensor) -> Tensor:
            with torch.no_grad():
                return model((low + (high - low) * x).reshape(-1, *shape))

        def margin(x: Tensor) -> Tensor:
            return margins(out := outputs(x), predict_labels(out).long()).amin(1)

        line_count = int(min(MAX_LINES, RATE * self.seconds))
        margin_function = margin if surface.task != "regression" else None
        count_upper = make_upper_counter(chain, low, high)
        corners = search_corners(planes, line_count, self.seed, count_upper, margin_function)
        if not len(corners.x):
            raise InputError(
                "The attack 'corners' looks for points at which the activation boundaries of many neurons "
                "meet; there is no such point.",
                "Use another attack.",
            )
        max_candidates = 3 * knowledge.sample_count if knowledge.sample_count else CANDIDATES
        candidates = (low + (high - low) * corners.x[:max_candidates]).reshape(-1, *shape)
        labels = predict_labels(outputs(corners.x[:max_candidates]))
        confidence = torch.sigmoid(
            CONFIDENCE[0] + CONFIDENCE[1] * corners.score[:max_candidates]
        ).float()
        selection = Selection.from_candidates(
            candidates, labels, torch.arange(len(candidates)), confidence
        )
        note = (
            f"corners drew {corners.lines} lines from {len(planes.offsets)} hyperplanes. According to "
            f"the scores, about {float(confidence.sum()):.0f} of the candidates are table rows"
        )
        return Reconstruction.from_candidates(
            self.name,
            candidates,
            labels,
            torch.ones(len(candidates)),
            knowledge,
            selection=selection,
            notes=(note,),
        )
