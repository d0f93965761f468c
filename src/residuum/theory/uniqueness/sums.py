"""The sums over samples that the weights determine: the mass and the moment of every activation pattern.

A *group* g has all candidates with the same activation pattern and label. Inside a group the gradient is
affine in x. So samples x_j with multipliers lam_j enter the KKT equation only through the mass L_g = sum
lam_j and the moment M_g = sum lam_j x_j. With several classes there is one such pair of sums for each rival
class. A linear map leads from these sums to the weights. If this map has no null space, the weights determine
the sums of every group. If it has a null space, mass and moment can move across patterns. There are two
tests:

    first layer   the map to the first layer is D^T (M, L), where D has the backward signals of one row per
                  group and rival. The sums of group g are fixed if its indicator lies in the range of D.
    dense         a singular value decomposition of the full map, if it fits into memory

A sum counts as not fixed unless one of the two tests shows that it is fixed.

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

RANK_TOLERANCE = (
    1e-10  # singular values below this share of the largest singular value count as zero
)
FIXED_TOLERANCE = (
    1e-8  # a group is fixed if at most this share of its indicator is outside the range
)
MAX_UNKNOWNS, MAX_ENTRIES = (
    3000,
    5 * 10**7,
)  # linear maps with more columns or entries are not decomposed
MAX_MATRIX_ENTRIES = 4 * 10**6  # largest number of entries in the matrix of the quadratic program
# A move of the sums changes a row if its entries there exceed this share of the length of the move.
TOUCHED_TOLERANCE = 1e-9
STEP_FRACTION = (
    1 - 1e-7
)  # share of the longest possible step that is taken, so that no wall is touched
WALL_TOLERANCE = 1e-9  # the solver may place an image outside a wall by this much
EMPTY_TOLERANCE = (
    1e-12  # a group is empty if its mass is below this share of the largest multiplier
)
SIGNED = ("binary", "multiclass")  # tasks whose multipliers are nonnegative


@dataclass(frozen=True)
class Groups:
    """Candidates grouped by activation pattern and label.

    Attributes:
        index: (m,) number of each candidate's group.
        first: (G,) number of the first candidate of each group.
    """

    index: Tensor
    first: Tensor

    @classmethod
    def build(cls, kkt_set: KKTSet) -> Groups:
        """Group candidates by pattern and label, or only by pattern if multipliers may be negative."""
        labels = kkt_set.y if kkt_set.task in SIGNED else torch.zeros_like(kkt_set.lam)
        keys = torch.cat([kkt_set.switches.pattern.double(), labels[:, None].double()], 1)
        index = torch.unique(keys, dim=0, return_inverse=True)[1]
        group_count = int(index.max()) + 1
        descending = torch.arange(len(index) - 1, -1, -1, device=index.device)
        return cls(
            index, descending.new_zeros(group_count).scatter(0, index[descending], descending)
        )

    def __len__(self) -> int:
        return len(self.first)

    def total(self, values: Tensor) -> Tensor:
        """Return the (G, ...) sums of (m, ...) values over the members of each group."""
        return values.new_zeros(len(self), *values.shape[1:]).index_add(0, self.index, values)

    def members(self, g: int) -> Tensor:
        """Return the numbers of the candidates in group ``g``."""
        return (self.index == g).nonzero()[:, 0]


@dataclass(frozen=True)
class Pinned:
    """Which groups of candidates have sums that the weights determine.

    The sums of a group are its mass, i.e. its total multiplier, and its moment, i.e. its total of images
    times multipliers.

    Attributes:
        groups: (G,) whether every training set with these patterns has the same sums in the group.
        what: Record of how many sums are determined, and how this was shown.
        rows: Q constraints, one for each group and rival class. Their index is the group.
        null: (Q (d + 1), k) basis of the changes of the sums that change no weight, or None if this basis was
            not computed.
    """

    groups: Tensor
    what: Sums
    rows: Rows | None = None
    null: Tensor | None = None


def find_pinned_sums(kkt_set: KKTSet, groups: Groups) -> Pinned:
    """Find the groups whose sums are fixed, i.e. every change of these sums changes the weights.

    The first test is cheap: if the first layer has a bias, its backward signals may show that all sums are
    fixed. Otherwise the full linear map from sums to weights is decomposed if it fits into memory. It has one
    column for each number in the sums of every group. The sums of a group are fixed if no vector of the null
    space changes them. Multipliers of either sign can cancel, so they fix nothing.

    Args:
        kkt_set: The candidates.
        groups: The groups of the candidates.

    Returns:
        The groups with fixed sums.
    """
    group_count = len(groups)
    if kkt_set.task not in SIGNED:
        none_pinned = torch.zeros(group_count, dtype=torch.bool, device=kkt_set.x.device)
        return Pinned(none_pinned, Sums(group_count, 0, None, None, "multipliers of either sign"))
    rows = _rows(kkt_set, groups)
    is_fixed, least_singular_value = _by_first_layer(kkt_set, groups, rows)
    if bool(is_fixed.all()):
        return Pinned(
            is_fixed, Sums(group_count, group_count, 0, least_singular_value, "first layer"), rows
        )
    unknowns = len(rows) * (kkt_set.x[0].numel() + 1)
    parameter_count = sum(t.numel() for t in kkt_set.target.values())
    if unknowns > MAX_UNKNOWNS or unknowns * parameter_count > MAX_ENTRIES:
        return Pinned(
            is_fixed,
            Sums(group_count, int(is_fixed.sum()), None, least_singular_value, "first layer"),
            rows,
        )
    null_basis, least_singular_value = null_space(kkt_set, groups, rows)
    null_by_row = null_basis.reshape(len(rows), kkt_set.x[0].numel() + 1, null_basis.shape[1])
    row_moves = null_by_row.new_zeros(group_count, *null_by_row.shape[1:]).index_add(
        0, rows.index, null_by_row
    )
    is_fixed = row_moves.flatten(1).norm(dim=1) <= FIXED_TOLERANCE
    sums_record = Sums(
        group_count, int(is_fixed.sum()), null_basis.shape[1], least_singular_value, "dense"
    )
    return Pinned(is_fixed, sums_record, rows, null_basis)


def _rows(kkt_set: KKTSet, groups: Groups) -> Rows:
    """Return a constraint for each group, or for each group and rival class. Its index is the group."""
    y, outputs = kkt_set.y[groups.first], kkt_set.outputs.shape[1]
    if kkt_set.task == "binary":
        return Rows(torch.arange(len(groups), device=y.device), y[:, None])
    is_label = torch.nn.functional.one_hot(y, outputs)
    group, rival = (is_label == 0).nonzero(as_tuple=True)
    return Rows(
        group, (is_label[group] - torch.nn.functional.one_hot(rival, outputs)).to(kkt_set.x)
    )


def _by_first_layer(kkt_set: KKTSet, groups: Groups, rows: Rows) -> tuple[Tensor, float | None]:
    """Find the groups whose sums are fixed by the first layer alone.

    These are the groups whose indicator lies in the range of the backward signals at the first layer.

    Args:
        kkt_set: The candidates.
        groups: The groups of the candidates.
        rows: A constraint for each group and rival class.

    Returns:
        (G,) whether the sums of each group are fixed, and the smallest nonzero singular value of the backward
        signals relative to the largest, or None if the first layer has no bias or no active neuron.
    """
    chain = dense_chain(kkt_set.models[0])
    if chain is None or chain.linears[0].bias is None:
        return torch.zeros(len(groups), dtype=torch.bool, device=kkt_set.x.device), None
    trace = chain.trace(kkt_set.x[groups.first])
    left_vectors, singular_values, _ = torch.linalg.svd(
        chain.signals(trace, rows.covectors, rows.index)[0].detach(), full_matrices=False
    )
    is_nonzero = singular_values > RANK_TOLERANCE * singular_values[0]
    if not bool(is_nonzero.any()):  # no neuron is active for any candidate
        return torch.zeros(len(groups), dtype=torch.bool, device=kkt_set.x.device), None
    basis = left_vectors[:, is_nonzero]
    indicators = torch.nn.functional.one_hot(rows.index, len(groups)).to(basis)
    outside_range = (indicators - basis @ (basis.T @ indicators)).norm(dim=0) / indicators.norm(
        dim=0
    )
    return outside_range <= FIXED_TOLERANCE, float(
        singular_values[is_nonzero].min() / singular_values[0]
    )


def null_space(kkt_set: KKTSet, groups: Groups, rows: Rows) -> tuple[Tensor, float]:
    """Return the changes of the groups' sums that change no weight.

    Each constraint has d coordinates for M - L x and one coordinate for L, where M and L are moment and mass
    of the group, and x is its first member.

    Args:
        kkt_set: The candidates.
        groups: The groups of the candidates.
        rows: Q constraints, one for each group and rival class.

    Returns:
        A basis (Q (d + 1), k) of these changes, and the smallest nonzero singular value of the linear map
        from sums to weights, relative to the largest singular value.
    """
    model, theta = kkt_set.models[0], parameters(kkt_set.models[0])
    x = kkt_set.x[groups.first][rows.index].flatten(1)

    def total(x: Tensor, lam: Tensor) -> Tensor:
        def value(t: Theta) -> Tensor:
            outputs = functional_call(model, t, (x.reshape(len(x), *kkt_set.x.shape[1:]),))
            return (lam * rows.covectors * outputs).sum()

        return torch.cat([gradient.flatten() for gradient in grad(value)(theta).values()])

    ones = torch.ones(len(rows), 1, dtype=x.dtype, device=x.device)
    unit_moves = torch.eye(x.numel() + len(x), dtype=x.dtype, device=x.device)
    moves = unit_moves.reshape(
        len(unit_moves), len(x), -1
    )  # for each row: d entries of the moment, one of the mass

    def parameter_change(move: Tensor) -> Tensor:
        return jvp(total, (x, ones), (move[:, :-1], move[:, -1:]))[1]

    linear_map = vmap(parameter_change, chunk_size=64)(moves).T  # (P, Q (d + 1))
    triangular = torch.linalg.qr(linear_map, mode="r")[
        1
    ]  # has the same singular values and right vectors as the map
    _, singular_values, right_vectors = torch.linalg.svd(
        triangular, full_matrices=len(triangular) < triangular.shape[1]
    )
    rank = int((singular_values > RANK_TOLERANCE * singular_values[0]).sum())
    return right_vectors[rank:].T, float(
        singular_values[rank - 1] / singular_values[0]
    ) if rank else 0.0


Array = np.ndarray[Any, Any]


def across_patterns(cells: Cells, i: int, seconds: float = math.inf) -> tuple[Tensor, float] | None:
    """Find the image of least energy that can replace candidate i if sums may move across patterns.

    The sums (moment, mass) of several groups may change together without a change of the weights. The
    unknowns are the image, relative to its group's first member, and k coordinates of these changes. The sums
    of every group, minus what the image takes from its group, must be sums of samples inside the group's
    cell. For the pair (moment, mass) this is a cone, so the constraints are linear in the unknowns.

    The result is an example and not a bound. The example is computed and checked from scratch. If the time
    limit stops the search, the result is still an example, but not the smallest.

    Args:
        cells: The constraints of all candidates.
        i: Number of the candidate.
        seconds: Time limit of the solver.

    Returns:
        The (d,) image and the relative change of the sum of gradients. The result is None if the weights
        determine all sums, if the problem does not fit into memory, or if a sample leaves its pattern.
    """
    null_basis, rows = cells.sums.null, cells.sums.rows
    if null_basis is None or rows is None or not null_basis.shape[1]:
        return None
    d = cells.low.shape[1]
    basis = null_basis.reshape(len(rows), d + 1, -1).cpu().numpy()
    group = rows.index.cpu().numpy()
    own_group = int(cells.groups.index[i])
    moved_rows = np.flatnonzero(
        (np.abs(basis).max((1, 2)) > TOUCHED_TOLERANCE) | (group == own_group)
    )
    cones = {int(g): _cone(cells, int(g)) for g in np.unique(group[moved_rows])}
    k = basis.shape[2]
    if sum(len(cones[int(g)]) for g in group[moved_rows]) * (d + k) > MAX_MATRIX_ENTRIES:
        return None
    first_images = {
        g: cells.kkt_set.x[cells.groups.first[g]].flatten().cpu().numpy() for g in cones
    }
    # This is the share of candidate i's multipliers that the image takes, for each row of its group.
    taken_shares = {
        int(q): cells.share * float(_row_multipliers(cells.kkt_set, i, rows.covectors[q]))
        for q in np.flatnonzero(group == own_group)
    }
    unchanged_image = cells.kkt_set.x[i].flatten().cpu().numpy() - first_images[own_group]
    constraint_blocks, constant_blocks, row_sums = [], [], {}
    for q in moved_rows.tolist():
        g = int(group[q])
        cone, total = cones[g], _total(cells, g, rows.covectors[q])
        row_sums[q] = total
        # The image takes moment and mass from the rows of its own group only.
        image_weight = taken_shares[q] if g == own_group else 0.0
        constraint_blocks.append(np.concatenate([-image_weight * cone[:, :-1], cone @ basis[q]], 1))
        constant_blocks.append(cone @ total - image_weight * cone[:, -1])
    cone = cones[own_group]  # the image itself must lie in the cell of its group
    constraint_blocks.append(np.concatenate([cone[:, :-1], np.zeros((len(cone), k))], 1))
    constant_blocks.append(cone[:, -1])
    solution = _solve(
        np.concatenate(constraint_blocks),
        np.concatenate(constant_blocks),
        first_images[own_group],
        unchanged_image,
        k,
        seconds,
    )
    images, u = (
        [first_images[own_group] + solution[:d]],
        [sum(taken_shares[q] * rows.covectors[q] for q in taken_shares)],
    )
    for q in moved_rows.tolist():
        g = int(group[q])
        image_weight = taken_shares[q] if g == own_group else 0.0
        remaining_sums = (
            row_sums[q] + basis[q] @ solution[d:] - image_weight * np.append(solution[:d], 1.0)
        )
        if remaining_sums[-1] > EMPTY_TOLERANCE * float(cells.kkt_set.lam.max()):
            images.append(first_images[g] + remaining_sums[:-1] / remaining_sums[-1])
            u.append(remaining_sums[-1] * rows.covectors[q])
    return _check_example(cells, np.array(sorted(cones)), images, u)


def _cone(cells: Cells, g: int) -> Array:
    """Return the linear inequalities that the sums of all samples in a group's cell obey.

    The cell of a group has all samples with its activation pattern within the value range. These samples obey
    linear inequalities. Added up with multipliers, each of them becomes a homogeneous inequality for the
    moment M - L x about the group's first member x and the mass L. So an empty group obeys the inequalities
    too. Rows have length 1 to suit the tolerances of the solver.

    Args:
        cells: The constraints of all candidates.
        g: Number of the group.

    Returns:
        (c, d + 1) rows H with H (M - L x, L) >= 0.
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
    row_lengths = np.linalg.norm(cone, axis=1)
    return cone[row_lengths > 0] / row_lengths[row_lengths > 0, None]


def _total(cells: Cells, g: int, covector: Tensor) -> Array:
    """Return the (d + 1,) sums of a group for one constraint: moment about the first member, then mass."""
    members, kkt_set = cells.groups.members(g), cells.kkt_set
    lam = _row_multipliers(kkt_set, members, covector)
    offsets = kkt_set.x[members].flatten(1) - kkt_set.x[cells.groups.first[g]].flatten()
    return torch.cat([lam @ offsets, lam.sum()[None]]).cpu().numpy()


def _row_multipliers(kkt_set: KKTSet, samples: Tensor | int, covector: Tensor) -> Tensor:
    """Return the multipliers of some candidates for one constraint.

    With several classes a constraint belongs to one rival class, and each candidate has a multiplier for each
    rival class.

    Args:
        kkt_set: The candidates.
        samples: Numbers of the candidates.
        covector: (C,) covector of the constraint, which is negative at the rival class.

    Returns:
        The multipliers of these candidates.
    """
    if kkt_set.task == "binary":
        return kkt_set.lam[samples]
    return -kkt_set.u[samples, 0] @ (covector < 0).to(kkt_set.u)


def _solve(a: Array, b: Array, x: Array, start: Array, k: int, seconds: float) -> Array:
    """Find the image of least energy under linear constraints.

    The unknowns y have shape (d + k,): the image relative to x, then coordinates of a change of sums. The
    solver may return a point that lies outside by rounding, and then a sample would leave its pattern. So the
    step from the unchanged image ends a little before the first constraint would be violated.

    Args:
        a: (c, d + k) matrix of the constraints a y + b >= 0.
        b: (c,) constants of the constraints.
        x: (d,) first member of the group.
        start: (d,) unchanged image, relative to x.
        k: Number of coordinates of the change of sums.
        seconds: Time limit of the solver.

    Returns:
        (d + k,) solution.
    """
    import clarabel

    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.time_limit = max(seconds, 0.1)
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    quadratic_term = sparse.block_diag([sparse.identity(len(x)), sparse.csc_matrix((k, k))], "csc")
    linear_term = np.concatenate([x, np.zeros(k)])
    cone = [clarabel.NonnegativeConeT(len(b))]
    solver = clarabel.DefaultSolver(
        quadratic_term, linear_term, sparse.csc_matrix(-a), b, cone, settings
    )
    origin = np.concatenate([start, np.zeros(k)])
    full_step = np.nan_to_num(np.asarray(solver.solve().x)) - origin
    distances_from_walls, rates = np.maximum(a @ origin + b, 0) + WALL_TOLERANCE, a @ full_step
    longest_step = float(
        np.where(rates < 0, distances_from_walls / np.maximum(-rates, 1e-300), np.inf).min()
    )
    return origin + STEP_FRACTION * min(longest_step, 1.0) * full_step


def _check_example(
    cells: Cells, groups: Array, images: list[Array], u: list[Any]
) -> tuple[Tensor, float] | None:
    """Check an example: a training set in which new images replace all candidates of some groups.

    Args:
        cells: The constraints of all candidates.
        groups: Numbers of the groups whose candidates are replaced.
        images: (d,) new images.
        u: (C,) products of multiplier and covector of each new image.

    Returns:
        The first image and the relative change of the sum of gradients, or None if an image leaves the
        activation patterns or the value range.
    """
    kkt_set = cells.kkt_set
    replaced = torch.isin(cells.groups.index, torch.as_tensor(groups).to(cells.groups.index))
    x = torch.as_tensor(np.stack(images)).to(kkt_set.x).reshape(-1, *kkt_set.x.shape[1:])
    allowed_patterns = {row.tobytes() for row in kkt_set.switches.pattern[replaced].cpu().numpy()}
    patterns = compute_switches(kkt_set.models, x).pattern.cpu().numpy()
    if any(row.tobytes() not in allowed_patterns for row in patterns):
        return None
    low, high = (end[replaced] for end in (cells.low, cells.high))
    tolerance = WALL_TOLERANCE * x.flatten(1).norm(dim=1).max()
    if bool(
        (x.flatten(1) < low.amin(0) - tolerance).any()
        | (x.flatten(1) > high.amax(0) + tolerance).any()
    ):
        return None
    weights = torch.cat(
        [-kkt_set.u[replaced, 0], torch.stack([torch.as_tensor(v) for v in u]).to(kkt_set.u)]
    )
    sum_change = weighted_gradient(kkt_set.models[0], torch.cat([kkt_set.x[replaced], x]), weights)
    return x[0].flatten(), norm(sum_change) / norm(kkt_set.target)
