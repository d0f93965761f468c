"""Moves across patterns: sets that change the sums of several groups and leave every parameter alike.

Where the linear system of the sums has a null space (residuum.theory.uniqueness.sums), a set of the same
patterns may take mass and moment from some groups and give them to others. With N a basis of it, the sums are
S + N z, each has to stay in the cone of its cell, and the image x' takes w of its own group's: linear
in (x', z), so the least image that can be had this way is one more quadratic programme, solved by Clarabel.
It serves as an example, written out as a set and judged by its own sum of gradients; the proved bound
does not rest on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from residuum.stationarity import norm, weighted_gradient
from residuum.theory.patterns import switches

if TYPE_CHECKING:
    from residuum.theory.uniqueness.certificate import Cells

ENTRIES = 4 * 10**6  # of the programme's matrix
TOUCHED = 1e-9  # of a basis vector's length: rows it moves
SAFE = 1 - 1e-7  # of the way from the set as it is
ACCURATE = 1e-9  # to what the solver holds a wall; patterns and value range are judged afterwards
EMPTY = 1e-12  # of the largest multiplier: a group without weight
Array = np.ndarray[Any, Any]


def across_patterns(cells: Cells, i: int) -> tuple[Tensor, float] | None:
    """(d,) the least image found in the place of candidate i, and the change of its set's sum."""
    null, rows = cells.sums.null, cells.sums.rows
    if null is None or rows is None or not null.shape[1]:
        return None
    d = cells.low.shape[1]
    basis = null.reshape(len(rows), d + 1, -1).cpu().numpy()
    group = rows.index.cpu().numpy()
    own = int(cells.groups.index[i])
    some = np.flatnonzero((np.abs(basis).max((1, 2)) > TOUCHED) | (group == own))
    cones = {int(g): _cone(cells, int(g)) for g in np.unique(group[some])}
    k = basis.shape[2]
    if sum(len(cones[int(g)]) for g in group[some]) * (d + k) > ENTRIES:
        return None
    x0 = {g: cells.given.x[cells.groups.first[g]].flatten().cpu().numpy() for g in cones}
    share = _shares(cells, i, own)
    start = cells.given.x[i].flatten().cpu().numpy() - x0[own]
    matrix, level, sums = [], [], {}
    for q in some.tolist():
        g = int(group[q])
        cone, total = cones[g], _total(cells, g, rows.covectors[q])
        sums[q] = total
        w = share[q] if g == own else 0.0  # the image takes (w a', w) of this row's (moment, mass)
        matrix.append(np.concatenate([-w * cone[:, :-1], cone @ basis[q]], 1))
        level.append(cone @ total - w * cone[:, -1])
    cone = cones[own]  # the image itself
    matrix.append(np.concatenate([cone[:, :-1], np.zeros((len(cone), k))], 1))
    level.append(cone[:, -1])
    y = _solve(np.concatenate(matrix), np.concatenate(level), x0[own], start, k)
    images, u = [x0[own] + y[:d]], [sum(share[q] * rows.covectors[q] for q in share)]
    for q in some.tolist():
        g = int(group[q])
        w = share[q] if g == own else 0.0
        left = sums[q] + basis[q] @ y[d:] - w * np.append(y[:d], 1.0)
        if left[-1] > EMPTY * float(cells.given.lam.max()):
            images.append(x0[g] + left[:-1] / left[-1])
            u.append(left[-1] * rows.covectors[q])
    return _judged(cells, np.array(sorted(cones)), images, u)


def _cone(cells: Cells, g: int) -> Array:
    """Rows H with H (M - L x, L) >= 0 for all sums of the cell, x the group's first member."""
    one = cells.groups.first[g : g + 1]
    rows = cells.rows(one)[0, : cells.switches].cpu().numpy()
    values = cells.values[one][0, : cells.switches].cpu().numpy()
    x = cells.given.x[one].flatten().cpu().numpy()
    parts = [np.concatenate([rows, values[:, None]], 1)]
    for sign, end in ((1, cells.low), (-1, cells.high)):
        if cells.boxed:
            ends = sign * (x - end[one][0].cpu().numpy())
            parts.append(np.concatenate([sign * np.eye(len(x)), ends[:, None]], 1))
    parts.append(np.append(np.zeros(len(x)), 1.0)[None])
    cone = np.concatenate(parts)
    size = np.linalg.norm(cone, axis=1)
    return cone[size > 0] / size[size > 0, None]


def _total(cells: Cells, g: int, covector: Tensor) -> Array:
    """(d + 1,) moment about the first member and mass, of one row of a group."""
    members = cells.groups.members(g)
    given = cells.given
    lam = (
        given.lam[members]
        if given.task == "binary"
        else -given.u[members, 0] @ (covector < 0).to(given.u)
    )
    away = given.x[members].flatten(1) - given.x[cells.groups.first[g]].flatten()
    return torch.cat([lam @ away, lam.sum()[None]]).cpu().numpy()


def _shares(cells: Cells, i: int, own: int) -> dict[int, float]:
    """What of candidate i's multiplier the image takes, per row of its group."""
    rows, given = cells.sums.rows, cells.given
    assert rows is not None
    mine = (rows.index == own).nonzero()[:, 0].tolist()
    if given.task == "binary":
        return {mine[0]: cells.share * float(given.lam[i])}
    return {
        q: cells.share * float(-given.u[i, 0] @ (rows.covectors[q] < 0).to(given.u)) for q in mine
    }


def _solve(a: Array, b: Array, x: Array, start: Array, k: int) -> Array:
    """min |x + y_1|^2 s.t. a y + b >= 0, drawn towards where the set is as it was."""
    import clarabel

    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    square = sparse.block_diag([sparse.identity(len(x)), sparse.csc_matrix((k, k))], "csc")
    linear = np.concatenate([x, np.zeros(k)])
    cone = [clarabel.NonnegativeConeT(len(b))]
    solver = clarabel.DefaultSolver(square, linear, sparse.csc_matrix(-a), b, cone, settings)
    before = np.concatenate([start, np.zeros(k)])
    step = np.nan_to_num(np.asarray(solver.solve().x)) - before
    slack, rate = np.maximum(a @ before + b, 0) + ACCURATE, a @ step
    room = float(np.where(rate < 0, slack / np.maximum(-rate, 1e-300), np.inf).min())
    return before + SAFE * min(room, 1.0) * step


def _judged(
    cells: Cells, groups: Array, images: list[Array], u: list[Any]
) -> tuple[Tensor, float] | None:
    """The first image where every image has a pattern of these groups, and the change of the sum."""
    given = cells.given
    replaced = torch.isin(cells.groups.index, torch.as_tensor(groups).to(cells.groups.index))
    x = torch.as_tensor(np.stack(images)).to(given.x).reshape(-1, *given.x.shape[1:])
    known = {row.tobytes() for row in given.switches.pattern[replaced].cpu().numpy()}
    there = switches(given.models, x).pattern.cpu().numpy()
    if any(row.tobytes() not in known for row in there):
        return None
    low, high = (end[replaced] for end in (cells.low, cells.high))
    room = ACCURATE * x.flatten(1).norm(dim=1).max()
    if bool((x.flatten(1) < low.amin(0) - room).any() | (x.flatten(1) > high.amax(0) + room).any()):
        return None
    weights = torch.cat(
        [-given.u[replaced, 0], torch.stack([torch.as_tensor(v) for v in u]).to(given.u)]
    )
    change = weighted_gradient(given.models[0], torch.cat([given.x[replaced], x]), weights)
    return x[0].flatten(), norm(change) / norm(given.target)
