r"""Read two or three missing values of a training record from the activation boundaries of a network.

With one unknown column, a record moves along a line, and the true value is where several boundaries cross
this line (:mod:`.missing_values`, which also explains the symbols). With k unknown columns, the record moves
in a space of dimension k. There the boundary of neuron j of the first layer is

    a_j + w_j v = 0,     a_j = pre-activation without the unknown columns,  w_j = weights of these columns.

Any k - 1 boundaries meet in a line. Along each such line we search for crossings with the other boundaries,
as with one unknown column. Points where more than k boundaries meet are unlikely by chance.

    S(v) = evidence of all boundaries that pass close to v
    v*   = argmax of S over the crossings on all lines
    T    = S(v*) - log(exp(S_0) + sum of exp(S(v)) over crossings that differ from v* in some column)

S_0 = h log(1 - pi) + k log h stands for points without crossings, where h is the number of boundaries. Values
are measured in standard deviations of their columns, so that distances in different columns are comparable.
The point v* is then refined by two steps of weighted least squares on the boundaries close to it.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from residuum.errors import InputError
from residuum.networks.kinks import BACKGROUND, R0, R
from residuum.networks.missing_values import (
    MAX_BLOCK,
    NO_EVIDENCE,
    Crossings,
    Evidence,
    RecordLines,
    add_neighbors,
    gain,
)

MAX_UNKNOWN = 3  # with four unknown columns, there are too many lines to search
REFINEMENTS = 2  # steps of weighted least squares
# Boundaries are parallel to a line if the sine of their angle is below this value. Their crossings are not
# determined well.
MIN_SINE = 1e-3


def infer_several(
    lines: RecordLines, x: Tensor, columns: Tensor, low: Tensor, high: Tensor, tolerance: Tensor
) -> Evidence:
    """Infer the values of two or three unknown columns of every record.

    Args:
        lines: The hidden layers of the network. Only the first layer is used.
        x: Records (n, d). The values of the unknown columns do not influence the result.
        columns: Indices of the k unknown columns, (k,).
        low: Smallest possible value of each unknown column, (k,).
        high: Largest possible value of each unknown column, (k,).
        tolerance: Difference up to which two values of an unknown column count as equal, (k,).

    Returns:
        The inferred values (n, k) and their evidence (n,).

    Raises:
        InputError: If the number of unknown columns is not 2 or 3.
    """
    k = len(columns)
    if not 2 <= k <= MAX_UNKNOWN:
        raise InputError(
            f"Two or three values of a record can be inferred together; got {k} unknown columns.",
            "Fill in some of the unknown columns.",
        )
    first = lines.layers[0]
    is_used = first.share > 0
    inverse_scale, share = first.inverse_scale[is_used], first.share[is_used]
    # The columns are measured in units in which their tolerances are equal.
    unit = tolerance.double() / tolerance.double().min()
    without_columns = x.double().clone()
    without_columns[:, columns] = 0
    a = (without_columns @ first.weight.T + first.bias)[:, is_used] * inverse_scale
    w = first.weight[is_used][:, columns] * unit * inverse_scale[:, None]
    bounds = torch.stack([low, high]).double() / unit
    block_size = max(1, MAX_BLOCK // max(1, math.comb(len(w), k - 1) * len(w)))
    values, statistics = [], []
    for block in a.split(block_size):
        evidence = _search_block(block, w, share, bounds, float(tolerance.double().min()))
        values.append(evidence.value * unit)
        statistics.append(evidence.statistic)
    return Evidence(torch.cat(values), torch.cat(statistics))


def _search_block(
    a: Tensor, w: Tensor, share: Tensor, bounds: Tensor, tolerance: float
) -> Evidence:
    """Return the best points of n records and their evidence.

    Args:
        a: Scaled pre-activations without the unknown columns, (n, h).
        w: Scaled weights of the unknown columns, (h, k).
        share: Weight of each neuron in the evidence, (h,).
        bounds: Smallest and largest values of the columns, (2, k).
        tolerance: Difference up to which two values count as equal.

    Returns:
        The points (n, k) and their evidence (n,).
    """
    n, (h, k) = len(a), w.shape
    base, direction, members = _intersect(a, w)  # (n, L, k), (L, k), (L, k - 1)
    slope = w @ direction.T  # (h, L), signed slope of each neuron along each line
    is_steep = slope.abs() > MIN_SINE * w.norm(dim=1)[:, None].clamp(min=1e-300)
    is_steep[members, torch.arange(len(members))[:, None]] = False
    height = a[:, :, None] + torch.einsum("hk,nlk->nhl", w, base)
    position = torch.where(is_steep, -height / slope, torch.inf).transpose(1, 2)  # (n, L, h)
    points = base[:, :, None] + position.nan_to_num(posinf=0.0)[..., None] * direction[:, None]
    is_inside = ((points >= bounds[0]) & (points <= bounds[1])).all(-1)
    position = torch.where(is_inside, position, torch.inf).reshape(n * len(members), h)
    order = position.argsort(1)
    crossings = Crossings(
        position.gather(1, order),
        slope.abs().T.repeat(n, 1).gather(1, order),
        share.expand_as(position).gather(1, order),
    )
    h_effective = float(share.sum())
    null = h_effective * BACKGROUND
    own_gain = gain(torch.zeros(1, dtype=torch.float64))
    total = (
        null + (share[members].sum(1) * own_gain).repeat(n)[:, None] + crossings.share * own_gain
    )
    for step in (1, -1):
        add_neighbors(total, crossings, step)
    total = torch.where(crossings.value < torch.inf, total, NO_EVIDENCE).reshape(n, -1)
    sorted_points = points.reshape(n * len(members), h, k).gather(
        1, order[..., None].expand(-1, -1, k)
    )
    sorted_points = sorted_points.reshape(n, -1, k)
    best_total, best = total.max(1)
    best_point = sorted_points[torch.arange(n), best]
    is_other = ((sorted_points - best_point[:, None]).abs() > tolerance).any(-1)
    rivals = torch.where(is_other, total, NO_EVIDENCE).logsumexp(1)
    floor = total.new_full((n,), null + k * math.log(h_effective))
    has_point = best_total > NO_EVIDENCE
    statistic = torch.where(has_point, best_total - torch.logaddexp(rivals, floor), NO_EVIDENCE)
    refined = _refine(best_point, a, w, share)
    is_near = ((refined - best_point).abs() <= tolerance).all(1, keepdim=True)
    point = torch.where(is_near, refined, best_point)
    return Evidence(torch.where(has_point[:, None], point, torch.nan), statistic)


def _intersect(a: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lines in which k - 1 boundaries meet.

    Args:
        a: Scaled pre-activations without the unknown columns, (n, h).
        w: Scaled weights of the unknown columns, (h, k).

    Returns:
        A point of each of L lines for each record (n, L, k), the unit directions of the lines (L, k), and the
        neurons that meet there (L, k - 1).
    """
    h, k = w.shape
    members = torch.tensor([*itertools.combinations(range(h), k - 1)]).reshape(-1, k - 1)
    normals = w[members]  # (L, k - 1, k)
    if k == 2:
        direction = torch.stack([-normals[:, 0, 1], normals[:, 0, 0]], 1)
    else:
        direction = torch.linalg.cross(normals[:, 0], normals[:, 1])
    length = direction.norm(dim=1)
    norms = normals.norm(dim=2)
    is_line = length > MIN_SINE * norms.prod(1).clamp(min=1e-300)
    members, normals = members[is_line], normals[is_line]
    direction = direction[is_line] / length[is_line, None]
    # The point of the line that is closest to the origin is the solution of least norm.
    inverse = torch.linalg.pinv(normals)  # (L, k, k - 1)
    base = -torch.einsum("lkm,nlm->nlk", inverse, a[:, members])
    return base, direction, members


def _refine(point: Tensor, a: Tensor, w: Tensor, share: Tensor) -> Tensor:
    """Move points (n, k) by weighted least squares onto the boundaries that pass close to them."""
    k = w.shape[1]
    eye = 1e-12 * torch.eye(k, dtype=w.dtype)
    for _ in range(REFINEMENTS):
        height = a + point @ w.T
        weight = torch.where(height.abs() < R, share / (height.abs() + R0).square(), 0.0)
        normal_matrix = torch.einsum("nh,hi,hj->nij", weight, w, w)
        right_side = torch.einsum("nh,nh,hi->ni", weight, height, w)
        scale = normal_matrix.diagonal(dim1=1, dim2=2).sum(1).clamp(min=1e-300)[:, None, None]
        point = point - torch.linalg.solve(normal_matrix / scale + eye, right_side / scale[:, 0])
    return point
