"""Which sums the weights pin down: the mass and the moment of every activation pattern.

Inside a pattern and label (a *group* g) the gradient is affine in x, so samples enter the equation through
L_g = sum lam_j and M_g = sum lam_j x_j alone; with several classes, through one such pair per rival. Sets
with the same patterns explain the weights alike when all these sums together give the same
parameters. Where that linear map has no null space the sums stay as they are, group by group; where it
has one, mass and moment can move across patterns.

    first layer   its part of the map is D^T (M, L), D the backward signals, one row per group and rival:
                  the total of group g is fixed as soon as its indicator lies in the range of D
    dense         singular vectors of the whole map, where it fits

What neither shows to be fixed counts as free.

Moves across patterns: where the system has a null space, a set of the same patterns may take mass and
moment from some groups and give them to others. With N a basis of it, the sums are S + N z, each has to stay
in the cone of its cell, and the image x' takes w of its own group's: linear in (x', z), so the least image
that can be had this way is one more quadratic programme, solved by Clarabel. It serves as an example, written
out as a set and judged by its own sum of gradients; the proved bound does not rest on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from residuum.networks import dense_chain
from residuum.records.uniqueness import Sums
from residuum.stationarity import Rows, Theta, norm, parameters, weighted_gradient
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.patterns import switches

if TYPE_CHECKING:
    from residuum.theory.uniqueness.certificate import Cells

NULL = 1e-10  # of the largest singular value: what is smaller counts as zero
FIXED = 1e-8  # of an indicator's length: what may be missing of it
UNKNOWNS, ENTRIES = 3000, 5 * 10**7  # of the whole map: above, its singular vectors are not asked
LARGEST = 4 * 10**6  # numbers in the matrix of a move's programme
TOUCHED = 1e-9  # of a basis vector's length: rows it moves
SAFE = 1 - 1e-7  # of the way from the set as it is
ACCURATE = 1e-9  # to what the solver holds a wall; patterns and value range are judged afterwards
EMPTY = 1e-12  # of the largest multiplier: a group without weight
SIGNED = ("binary", "multiclass")  # tasks whose multipliers are nonnegative


@dataclass(frozen=True)
class Groups:
    """Candidates by activation pattern and label. index: (m,) group of each; first: (G,) a member."""

    index: Tensor
    first: Tensor

    @classmethod
    def of(cls, given: KKTSet) -> Groups:
        """Without signs of the multipliers a label says nothing: patterns alone."""
        label = given.y if given.task in SIGNED else torch.zeros_like(given.lam)
        keys = torch.cat([given.switches.pattern.double(), label[:, None].double()], 1)
        index = torch.unique(keys, dim=0, return_inverse=True)[1]
        count = int(index.max()) + 1
        order = torch.arange(len(index) - 1, -1, -1, device=index.device)
        return cls(index, order.new_zeros(count).scatter(0, index[order], order))

    def __len__(self) -> int:
        return len(self.first)

    def total(self, values: Tensor) -> Tensor:
        """(G, ...) sum over the members of each group."""
        return values.new_zeros(len(self), *values.shape[1:]).index_add(0, self.index, values)

    def members(self, g: int) -> Tensor:
        """Candidates of one group."""
        return (self.index == g).nonzero()[:, 0]


@dataclass(frozen=True)
class Pinned:
    """groups: (G,) whose mass and moment every set of these patterns shares; what: how that is known.

    rows: one per group and rival, index the group.
    null: (Q (d + 1), k) moves of the sums that no parameter sees, where they were computed.
    """

    groups: Tensor
    what: Sums
    rows: Rows | None = None
    null: Tensor | None = None


def pinned(given: KKTSet, groups: Groups) -> Pinned:
    """Which sums are fixed: no change of (moment, mass) of this group leaves all parameters alike.

    First the cheap and sufficient condition: backward signals at the first layer that are independent,
    where there is a bias. Else the whole linear system, one column per number of every group's sums,
    where it fits into memory; a group is fixed when no vector of the null space moves it. Multipliers
    of either sign can cancel and fix nothing.
    """
    count = len(groups)
    if given.task not in SIGNED:
        nothing = torch.zeros(count, dtype=torch.bool, device=given.x.device)
        return Pinned(nothing, Sums(count, 0, None, None, "multipliers of either sign"))
    rows = _rows(given, groups)
    fixed, least = _by_first_layer(given, groups, rows)
    if bool(fixed.all()):
        return Pinned(fixed, Sums(count, count, 0, least, "first layer"), rows)
    unknowns = len(rows) * (given.x[0].numel() + 1)
    size = sum(t.numel() for t in given.target.values())
    if unknowns > UNKNOWNS or unknowns * size > ENTRIES:
        return Pinned(fixed, Sums(count, int(fixed.sum()), None, least, "first layer"), rows)
    null, least = null_space(given, groups, rows)
    per_row = null.reshape(len(rows), given.x[0].numel() + 1, null.shape[1])
    moved = per_row.new_zeros(count, *per_row.shape[1:]).index_add(0, rows.index, per_row)
    fixed = moved.flatten(1).norm(dim=1) <= FIXED
    what = Sums(count, int(fixed.sum()), null.shape[1], least, "dense")
    return Pinned(fixed, what, rows, null)


def _rows(given: KKTSet, groups: Groups) -> Rows:
    """One row per group, or per group and rival, at the group's first member; index: the group."""
    y, outputs = given.y[groups.first], given.outputs.shape[1]
    if given.task == "binary":
        return Rows(torch.arange(len(groups), device=y.device), y[:, None])
    own = torch.nn.functional.one_hot(y, outputs)
    group, rival = (own == 0).nonzero(as_tuple=True)
    return Rows(group, (own[group] - torch.nn.functional.one_hot(rival, outputs)).to(given.x))


def _by_first_layer(given: KKTSet, groups: Groups, rows: Rows) -> tuple[Tensor, float | None]:
    """(G,) groups whose indicator D reaches, and the least singular value of D over the largest."""
    chain = dense_chain(given.models[0])
    if chain is None or chain.linears[0].bias is None:
        return torch.zeros(len(groups), dtype=torch.bool, device=given.x.device), None
    trace = chain.trace(given.x[groups.first])
    left, values, _ = torch.linalg.svd(
        chain.signals(trace, rows.covectors, rows.index)[0].detach(), full_matrices=False
    )
    reached = values > NULL * values[0]
    if not bool(reached.any()):  # no neuron hears any candidate: D is zero
        return torch.zeros(len(groups), dtype=torch.bool, device=given.x.device), None
    basis = left[:, reached]
    indicator = torch.nn.functional.one_hot(rows.index, len(groups)).to(basis)
    missing = (indicator - basis @ (basis.T @ indicator)).norm(dim=0) / indicator.norm(dim=0)
    return missing <= FIXED, float(values[reached].min() / values[0])


def null_space(given: KKTSet, groups: Groups, rows: Rows) -> tuple[Tensor, float]:
    """(Q (d + 1), k) basis of the sums' moves that no parameter sees; least singular value left.

    Per row: d coordinates of M - L x and one of L, x the group's first member.
    """
    model, theta = given.models[0], parameters(given.models[0])
    x = given.x[groups.first][rows.index].flatten(1)

    def total(x: Tensor, lam: Tensor) -> Tensor:
        def value(t: Theta) -> Tensor:
            outputs = functional_call(model, t, (x.reshape(len(x), *given.x.shape[1:]),))
            return (lam * rows.covectors * outputs).sum()

        return torch.cat([part.flatten() for part in grad(value)(theta).values()])

    ones = torch.ones(len(rows), 1, dtype=x.dtype, device=x.device)
    eye = torch.eye(x.numel() + len(x), dtype=x.dtype, device=x.device)
    moves = eye.reshape(len(eye), len(x), -1)  # per row: d of its moment, one of its mass

    def seen(move: Tensor) -> Tensor:
        return jvp(total, (x, ones), (move[:, :-1], move[:, -1:]))[1]

    matrix = vmap(seen, chunk_size=64)(moves).T  # (P, Q (d + 1))
    small = torch.linalg.qr(matrix, mode="r")[1]  # same singular values and right vectors
    _, values, right = torch.linalg.svd(small, full_matrices=len(small) < small.shape[1])
    rank = int((values > NULL * values[0]).sum())
    return right[rank:].T, float(values[rank - 1] / values[0]) if rank else 0.0


Array = np.ndarray[Any, Any]


def across_patterns(cells: Cells, i: int, seconds: float = math.inf) -> tuple[Tensor, float] | None:
    """(d,) the least image found in the place of candidate i, and the change of its set's sum.

    Where the linear system leaves a null space, sums (moment, mass) of several groups may move together
    without moving the weights. Unknown are the image a' about its group's first member, and k coordinates
    c of the null space; every group's sums, the image's share taken off its own, must stay those of
    samples inside the cell, which for the pair (moment, mass) is a cone: linear in (a', c).

    An example, not a bound: the set is written out and judged from scratch, and None is said where it
    does not fit into memory or turns out to leave its patterns. So a search that ``seconds`` cut short
    is an example as well, only not the least.
    """
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
    if sum(len(cones[int(g)]) for g in group[some]) * (d + k) > LARGEST:
        return None
    x0 = {g: cells.given.x[cells.groups.first[g]].flatten().cpu().numpy() for g in cones}
    # What of candidate i's multipliers the image takes, per row of its group.
    share = {
        int(q): cells.share * float(_row_multipliers(cells.given, i, rows.covectors[q]))
        for q in np.flatnonzero(group == own)
    }
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
    y = _solve(np.concatenate(matrix), np.concatenate(level), x0[own], start, k, seconds)
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
    """Rows H (c, d + 1) with H (M - L x, L) >= 0 for all sums of the cell, x the group's first member.

    A sample z of the cell has r(z) >= 0 for every switch r, affine in z, and lies within the box. Summed
    with weights lam >= 0 each such inequality becomes one of (sum lam (z - x), sum lam), homogeneous,
    so that an empty group satisfies it as well. Rows have length 1, for the solver's tolerances.
    """
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
    """Return (d + 1,): moment about the first member, and mass, of one row of a group."""
    members, given = cells.groups.members(g), cells.given
    lam = _row_multipliers(given, members, covector)
    away = given.x[members].flatten(1) - given.x[cells.groups.first[g]].flatten()
    return torch.cat([lam @ away, lam.sum()[None]]).cpu().numpy()


def _row_multipliers(given: KKTSet, samples: Tensor | int, covector: Tensor) -> Tensor:
    """Return the multipliers of some samples for one row. With several classes a row belongs to one
    rival, whose multipliers are minus the entries of u where the row's covector is negative.
    """
    if given.task == "binary":
        return given.lam[samples]
    return -given.u[samples, 0] @ (covector < 0).to(given.u)


def _solve(a: Array, b: Array, x: Array, start: Array, k: int, seconds: float) -> Array:
    """min |x + y_1|^2 s.t. a y + b >= 0, drawn towards where the set is as it was.

    y = (image about x, coordinates of the null space): (d + k,). What the solver returns may lie a
    rounding outside, and then a sample would have left its pattern: the step from the set as it was is
    cut where the first constraint would break, a little before.
    """
    import clarabel

    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.time_limit = max(seconds, 0.1)
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
