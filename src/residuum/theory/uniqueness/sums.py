"""Which sums the weights pin down: the mass and the moment of every activation pattern.

Inside a pattern and label (a *group* g) the gradient is affine in x. So samples enter the equation only
through L_g = sum lam_j and M_g = sum lam_j x_j. With several classes there is one such pair per rival
class. Sets with the same patterns fit the weights equally well if all these sums together give the same
parameters. If this linear map has no null space, the sums of every group are fixed. If it has a null space,
mass and moment can move across patterns.

    first layer   its rows of the map are D^T (M, L), with D the backward signals, one row per group and
                  rival: the total of group g is fixed if its indicator lies in the range of D
    dense         singular vectors of the full map, if it fits into memory

A sum counts as free unless one of the two shows that it is fixed.

Moves across patterns: if the system has a null space, a set with the same patterns may take mass and moment
from some groups and give them to others. Let N be a basis of the null space. Then the sums are S + N z, each
must stay in the cone of its cell, and the image x' takes w of its own group's sums. All this is linear in
(x', z). So the smallest image that can be reached this way solves another quadratic program (Clarabel). It
serves as an example: the set is computed, and its sum of gradients is measured. The proved bound does not
depend on it.
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
from residuum.theory.patterns import compute_switches

if TYPE_CHECKING:
    from residuum.theory.uniqueness.certificate import Cells

RANK_TOLERANCE = 1e-10  # relative to the largest singular value: smaller values count as zero
FIXED_TOLERANCE = 1e-8  # relative to an indicator's length: largest part outside the range
MAX_UNKNOWNS, MAX_ENTRIES = 3000, 5 * 10**7  # larger linear maps are not decomposed
MAX_MATRIX_ENTRIES = 4 * 10**6  # numbers in the matrix of the quadratic program of a move
TOUCHED_TOLERANCE = 1e-9  # relative to a basis vector's length: rows with more are moved
STEP_FRACTION = 1 - 1e-7  # share of the allowed step, so that no wall is touched
# Accuracy of the solver's walls. Patterns and value range are checked afterwards.
WALL_TOLERANCE = 1e-9
EMPTY_TOLERANCE = 1e-12  # relative to the largest multiplier: a group with less is empty
SIGNED = ("binary", "multiclass")  # tasks whose multipliers are nonnegative


@dataclass(frozen=True)
class Groups:
    """Candidates grouped by activation pattern and label.

    Attributes:
        index: (m,) group of each candidate.
        first: (G,) first member of each group.
    """

    index: Tensor
    first: Tensor

    @classmethod
    def build(cls, kkt_set: KKTSet) -> Groups:
        """Group the candidates. Labels are ignored if multipliers have no sign."""
        label = kkt_set.y if kkt_set.task in SIGNED else torch.zeros_like(kkt_set.lam)
        keys = torch.cat([kkt_set.switches.pattern.double(), label[:, None].double()], 1)
        index = torch.unique(keys, dim=0, return_inverse=True)[1]
        count = int(index.max()) + 1
        order = torch.arange(len(index) - 1, -1, -1, device=index.device)
        return cls(index, order.new_zeros(count).scatter(0, index[order], order))

    def __len__(self) -> int:
        return len(self.first)

    def total(self, values: Tensor) -> Tensor:
        """Return the (G, ...) sums over the members of each group."""
        return values.new_zeros(len(self), *values.shape[1:]).index_add(0, self.index, values)

    def members(self, g: int) -> Tensor:
        """Return the candidates of one group."""
        return (self.index == g).nonzero()[:, 0]


@dataclass(frozen=True)
class Pinned:
    """Which groups have sums that the weights fix.

    Attributes:
        groups: (G,) whether every set with these patterns has the same mass and moment in the group.
        what: The record of how this is known.
        rows: One row per group and rival. Their index is the group.
        null: (Q (d + 1), k) moves of the sums that no parameter depends on, if they were computed.
    """

    groups: Tensor
    what: Sums
    rows: Rows | None = None
    null: Tensor | None = None


def find_pinned_sums(kkt_set: KKTSet, groups: Groups) -> Pinned:
    """Return which sums are fixed, so that any change of a group's (moment, mass) changes a parameter.

    The first test is cheap and sufficient: with a bias, the backward signals at the first layer are
    independent. Otherwise the full linear system is decomposed if it fits into memory. It has one column per
    number in the sums of every group. A group is fixed if no vector of the null space moves it. Multipliers
    of either sign can cancel, so they fix nothing.

    Args:
        kkt_set: The candidates.
        groups: Their groups.

    Returns:
        The groups with fixed sums.
    """
    count = len(groups)
    if kkt_set.task not in SIGNED:
        none_pinned = torch.zeros(count, dtype=torch.bool, device=kkt_set.x.device)
        return Pinned(none_pinned, Sums(count, 0, None, None, "multipliers of either sign"))
    rows = _rows(kkt_set, groups)
    fixed, least = _by_first_layer(kkt_set, groups, rows)
    if bool(fixed.all()):
        return Pinned(fixed, Sums(count, count, 0, least, "first layer"), rows)
    unknowns = len(rows) * (kkt_set.x[0].numel() + 1)
    size = sum(t.numel() for t in kkt_set.target.values())
    if unknowns > MAX_UNKNOWNS or unknowns * size > MAX_ENTRIES:
        return Pinned(fixed, Sums(count, int(fixed.sum()), None, least, "first layer"), rows)
    null, least = null_space(kkt_set, groups, rows)
    per_row = null.reshape(len(rows), kkt_set.x[0].numel() + 1, null.shape[1])
    row_moves = per_row.new_zeros(count, *per_row.shape[1:]).index_add(0, rows.index, per_row)
    fixed = row_moves.flatten(1).norm(dim=1) <= FIXED_TOLERANCE
    what = Sums(count, int(fixed.sum()), null.shape[1], least, "dense")
    return Pinned(fixed, what, rows, null)


def _rows(kkt_set: KKTSet, groups: Groups) -> Rows:
    """Return one row per group, or per group and rival, at the group's first member. Index: the group."""
    y, outputs = kkt_set.y[groups.first], kkt_set.outputs.shape[1]
    if kkt_set.task == "binary":
        return Rows(torch.arange(len(groups), device=y.device), y[:, None])
    is_label = torch.nn.functional.one_hot(y, outputs)
    group, rival = (is_label == 0).nonzero(as_tuple=True)
    return Rows(
        group, (is_label[group] - torch.nn.functional.one_hot(rival, outputs)).to(kkt_set.x)
    )


def _by_first_layer(kkt_set: KKTSet, groups: Groups, rows: Rows) -> tuple[Tensor, float | None]:
    """Return the (G,) groups whose indicator lies in the range of D, and the condition of D.

    Args:
        kkt_set: The candidates.
        groups: Their groups.
        rows: One row per group and rival.

    Returns:
        The groups, and the smallest nonzero singular value of D relative to the largest, or None.
    """
    chain = dense_chain(kkt_set.models[0])
    if chain is None or chain.linears[0].bias is None:
        return torch.zeros(len(groups), dtype=torch.bool, device=kkt_set.x.device), None
    trace = chain.trace(kkt_set.x[groups.first])
    left_vectors, values, _ = torch.linalg.svd(
        chain.signals(trace, rows.covectors, rows.index)[0].detach(), full_matrices=False
    )
    is_nonzero = values > RANK_TOLERANCE * values[0]
    if not bool(is_nonzero.any()):  # no neuron is active for any candidate: D is zero
        return torch.zeros(len(groups), dtype=torch.bool, device=kkt_set.x.device), None
    basis = left_vectors[:, is_nonzero]
    indicator = torch.nn.functional.one_hot(rows.index, len(groups)).to(basis)
    missing = (indicator - basis @ (basis.T @ indicator)).norm(dim=0) / indicator.norm(dim=0)
    return missing <= FIXED_TOLERANCE, float(values[is_nonzero].min() / values[0])


def null_space(kkt_set: KKTSet, groups: Groups, rows: Rows) -> tuple[Tensor, float]:
    """Return the moves of the sums that no parameter depends on.

    Each row has d coordinates for M - L x and one for L, where x is the group's first member.

    Args:
        kkt_set: The candidates.
        groups: Their groups.
        rows: One row per group and rival.

    Returns:
        A basis (Q (d + 1), k) of these moves, and the smallest singular value that is not zero, relative
        to the largest.
    """
    model, theta = kkt_set.models[0], parameters(kkt_set.models[0])
    x = kkt_set.x[groups.first][rows.index].flatten(1)

    def total(x: Tensor, lam: Tensor) -> Tensor:
        def value(t: Theta) -> Tensor:
            outputs = functional_call(model, t, (x.reshape(len(x), *kkt_set.x.shape[1:]),))
            return (lam * rows.covectors * outputs).sum()

        return torch.cat([gradient.flatten() for gradient in grad(value)(theta).values()])

    ones = torch.ones(len(rows), 1, dtype=x.dtype, device=x.device)
    eye = torch.eye(x.numel() + len(x), dtype=x.dtype, device=x.device)
    moves = eye.reshape(len(eye), len(x), -1)  # per row: d of its moment, one of its mass

    def parameter_change(move: Tensor) -> Tensor:
        return jvp(total, (x, ones), (move[:, :-1], move[:, -1:]))[1]

    matrix = vmap(parameter_change, chunk_size=64)(moves).T  # (P, Q (d + 1))
    triangular = torch.linalg.qr(matrix, mode="r")[1]  # same singular values and right vectors
    _, values, right = torch.linalg.svd(
        triangular, full_matrices=len(triangular) < triangular.shape[1]
    )
    rank = int((values > RANK_TOLERANCE * values[0]).sum())
    return right[rank:].T, float(values[rank - 1] / values[0]) if rank else 0.0


Array = np.ndarray[Any, Any]


def across_patterns(cells: Cells, i: int, seconds: float = math.inf) -> tuple[Tensor, float] | None:
    """Find the smallest image in place of candidate i if sums may move across patterns.

    If the linear system has a null space, the sums (moment, mass) of several groups can move together without
    a change of the weights. The unknowns are the image a' relative to its group's first member, and k
    coordinates c of the null space. The sums of every group, minus the image's share in its own group, must
    be those of samples inside the cell. For the pair (moment, mass) this is a cone, so the constraints are
    linear in (a', c).

    The result is an example, not a bound: the set is computed and checked from scratch. If ``seconds`` cut
    the search short, it is still an example, but not the smallest.

    Args:
        cells: The cells of all candidates.
        i: A candidate.
        seconds: Time limit of the solver.

    Returns:
        The (d,) image and the relative change of the sum of gradients. None if there is no null space, if
        the problem does not fit into memory, or if the set leaves its patterns.
    """
    null, rows = cells.sums.null, cells.sums.rows
    if null is None or rows is None or not null.shape[1]:
        return None
    d = cells.low.shape[1]
    basis = null.reshape(len(rows), d + 1, -1).cpu().numpy()
    group = rows.index.cpu().numpy()
    own_group = int(cells.groups.index[i])
    moved_rows = np.flatnonzero(
        (np.abs(basis).max((1, 2)) > TOUCHED_TOLERANCE) | (group == own_group)
    )
    cones = {int(g): _cone(cells, int(g)) for g in np.unique(group[moved_rows])}
    k = basis.shape[2]
    if sum(len(cones[int(g)]) for g in group[moved_rows]) * (d + k) > MAX_MATRIX_ENTRIES:
        return None
    x0 = {g: cells.kkt_set.x[cells.groups.first[g]].flatten().cpu().numpy() for g in cones}
    # The share of candidate i's multipliers that the image takes, per row of its group.
    share = {
        int(q): cells.share * float(_row_multipliers(cells.kkt_set, i, rows.covectors[q]))
        for q in np.flatnonzero(group == own_group)
    }
    start = cells.kkt_set.x[i].flatten().cpu().numpy() - x0[own_group]
    matrix, level, sums = [], [], {}
    for q in moved_rows.tolist():
        g = int(group[q])
        cone, total = cones[g], _total(cells, g, rows.covectors[q])
        sums[q] = total
        # The image takes (w a', w) of this row's (moment, mass).
        w = share[q] if g == own_group else 0.0
        matrix.append(np.concatenate([-w * cone[:, :-1], cone @ basis[q]], 1))
        level.append(cone @ total - w * cone[:, -1])
    cone = cones[own_group]  # the image itself
    matrix.append(np.concatenate([cone[:, :-1], np.zeros((len(cone), k))], 1))
    level.append(cone[:, -1])
    y = _solve(np.concatenate(matrix), np.concatenate(level), x0[own_group], start, k, seconds)
    images, u = [x0[own_group] + y[:d]], [sum(share[q] * rows.covectors[q] for q in share)]
    for q in moved_rows.tolist():
        g = int(group[q])
        w = share[q] if g == own_group else 0.0
        remaining = sums[q] + basis[q] @ y[d:] - w * np.append(y[:d], 1.0)
        if remaining[-1] > EMPTY_TOLERANCE * float(cells.kkt_set.lam.max()):
            images.append(x0[g] + remaining[:-1] / remaining[-1])
            u.append(remaining[-1] * rows.covectors[q])
    return _check_example(cells, np.array(sorted(cones)), images, u)


def _cone(cells: Cells, g: int) -> Array:
    """Return rows H (c, d + 1) with H (M - L x, L) >= 0 for all sums of the cell.

    Here x is the group's first member. A sample z of the cell has r(z) >= 0 for every switch r, which is
    affine in z, and lies within the box. Summed with weights lam >= 0, each inequality becomes one of
    (sum lam (z - x), sum lam). It is homogeneous, so an empty group satisfies it too. Rows have length 1 to
    suit the tolerances of the solver.

    Args:
        cells: The cells of all candidates.
        g: A group.

    Returns:
        The rows.
    """
    member = cells.groups.first[g : g + 1]
    rows = cells.rows(member)[0, : cells.switches].cpu().numpy()
    values = cells.values[member][0, : cells.switches].cpu().numpy()
    x = cells.kkt_set.x[member].flatten().cpu().numpy()
    blocks = [np.concatenate([rows, values[:, None]], 1)]
    for sign, end in ((1, cells.low), (-1, cells.high)):
        if cells.boxed:
            ends = sign * (x - end[member][0].cpu().numpy())
            blocks.append(np.concatenate([sign * np.eye(len(x)), ends[:, None]], 1))
    blocks.append(np.append(np.zeros(len(x)), 1.0)[None])
    cone = np.concatenate(blocks)
    size = np.linalg.norm(cone, axis=1)
    return cone[size > 0] / size[size > 0, None]


def _total(cells: Cells, g: int, covector: Tensor) -> Array:
    """Return (d + 1,): moment about the first member, and mass, of one row of a group."""
    members, kkt_set = cells.groups.members(g), cells.kkt_set
    lam = _row_multipliers(kkt_set, members, covector)
    offsets = kkt_set.x[members].flatten(1) - kkt_set.x[cells.groups.first[g]].flatten()
    return torch.cat([lam @ offsets, lam.sum()[None]]).cpu().numpy()


def _row_multipliers(kkt_set: KKTSet, samples: Tensor | int, covector: Tensor) -> Tensor:
    """Return the multipliers of some samples for one row.

    With several classes a row belongs to one rival. Its multipliers are minus the entries of u where the
    row's covector is negative.

    Args:
        kkt_set: The candidates.
        samples: Which of them.
        covector: (C,) covector of the row.

    Returns:
        The multipliers.
    """
    if kkt_set.task == "binary":
        return kkt_set.lam[samples]
    return -kkt_set.u[samples, 0] @ (covector < 0).to(kkt_set.u)


def _solve(a: Array, b: Array, x: Array, start: Array, k: int, seconds: float) -> Array:
    """Minimize |x + y_1|^2 subject to a y + b >= 0, starting from the unchanged set.

    y = (image relative to x, coordinates of the null space) has shape (d + k,). The solver may return a point
    that lies outside by rounding, and then a sample would leave its pattern. So the step from the unchanged
    set is cut a little before the first constraint would break.

    Args:
        a: (c, d + k) constraints.
        b: (c,) their constants.
        x: (d,) first member of the group.
        start: (d,) image of the unchanged set, relative to x.
        k: Dimension of the null space.
        seconds: Time limit of the solver.

    Returns:
        The vector y.
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
    origin = np.concatenate([start, np.zeros(k)])
    step = np.nan_to_num(np.asarray(solver.solve().x)) - origin
    slack, rate = np.maximum(a @ origin + b, 0) + WALL_TOLERANCE, a @ step
    room = float(np.where(rate < 0, slack / np.maximum(-rate, 1e-300), np.inf).min())
    return origin + STEP_FRACTION * min(room, 1.0) * step


def _check_example(
    cells: Cells, groups: Array, images: list[Array], u: list[Any]
) -> tuple[Tensor, float] | None:
    """Return the first image and the relative change of the sum, or None if an image leaves the cells."""
    kkt_set = cells.kkt_set
    replaced = torch.isin(cells.groups.index, torch.as_tensor(groups).to(cells.groups.index))
    x = torch.as_tensor(np.stack(images)).to(kkt_set.x).reshape(-1, *kkt_set.x.shape[1:])
    allowed_patterns = {row.tobytes() for row in kkt_set.switches.pattern[replaced].cpu().numpy()}
    patterns = compute_switches(kkt_set.models, x).pattern.cpu().numpy()
    if any(row.tobytes() not in allowed_patterns for row in patterns):
        return None
    low, high = (end[replaced] for end in (cells.low, cells.high))
    room = WALL_TOLERANCE * x.flatten(1).norm(dim=1).max()
    if bool((x.flatten(1) < low.amin(0) - room).any() | (x.flatten(1) > high.amax(0) + room).any()):
        return None
    weights = torch.cat(
        [-kkt_set.u[replaced, 0], torch.stack([torch.as_tensor(v) for v in u]).to(kkt_set.u)]
    )
    change = weighted_gradient(kkt_set.models[0], torch.cat([kkt_set.x[replaced], x]), weights)
    return x[0].flatten(), norm(change) / norm(kkt_set.target)
