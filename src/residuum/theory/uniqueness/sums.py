"""Find which sums over training samples the weights determine: the mass and the moment of every group.

Candidates are reconstructed samples. A *group* g consists of all candidates with the same activation pattern
and label. Inside a pattern, the gradient is affine in x. So the samples x_j of a group, with multipliers
lam_j, influence the weights only through two sums: the mass L_g = sum lam_j and the moment M_g = sum lam_j
x_j. With several classes there is one such pair of sums for each rival class.

The weights are a linear function of these sums. If this linear map has no null space, the weights determine
the sums of every group, i.e. the sums are fixed. If the map has a null space, other training sets with the
same patterns can have other sums. There are two tests:

    first layer   the map to the first layer is D^T (M, L), where D has one row of backward signals for each
                  pair of group and rival class. The sums of group g are fixed if the vector that is 1 in the
                  rows of g and 0 elsewhere (its indicator) lies in the range of D.
    dense         a singular value decomposition of the full map, if it fits into memory

A sum counts as not fixed unless one of the two tests shows that it is fixed.

If the map has a null space, an image x' may replace a candidate in a training set with other sums. Let N be a
basis of the null space. The sums of such a set are S + N z, with the sums S of the candidates. The sums of
each group must belong to samples that have the pattern of the group, i.e. they must lie in a cone. The image
x' has a share of the sums of its own group. All these conditions are linear in (x', z). So the image with the
smallest norm is the solution of a quadratic program, which Clarabel solves. This image is only an example.
Its training set is computed, and the sum of gradients of this set is checked. The proved bound does not use
the example.
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

# Singular values below this share of the largest singular value count as zero.
RANK_TOLERANCE = 1e-10
# The weights determine the sums over a group of samples if the vector with 1 for the group and 0 elsewhere
# is a combination of backward signals. This is the tolerance for its part outside their range.
FIXED_TOLERANCE = 1e-8
# To limit time and memory, the linear map from sums over samples to weights is not decomposed if it has
# more columns or more entries than this.
MAX_UNKNOWNS, MAX_ENTRIES = 3000, 5 * 10**7
MAX_MATRIX_ENTRIES = 4 * 10**6  # largest number of entries in the matrix of the quadratic program
# A change of the sums that leaves the weights unchanged counts as a change of a group if its entries for
# the group exceed this number.
TOUCHED_TOLERANCE = 1e-9
# Share of the longest possible step that is taken. It is below 1, so that the image stays inside its
# activation pattern despite rounding errors.
STEP_FRACTION = 1 - 1e-7
# Rounding errors may violate a constraint by this amount. For limits of pixel values, the amount is
# relative to the norm of the image.
WALL_TOLERANCE = 1e-9
# A group has no samples if its mass (sum of multipliers) is below this share of the largest multiplier.
EMPTY_TOLERANCE = 1e-12
# Tasks for which the multipliers of the samples cannot be negative.
NONNEGATIVE_TASKS = ("binary", "multiclass")


@dataclass(frozen=True)
class Groups:
    """Candidates grouped by activation pattern and label.

    Attributes:
        index: (m,) index of each candidate's group.
        first: (G,) index of the first candidate of each group.
    """

    index: Tensor
    first: Tensor

    @classmethod
    def build(cls, kkt_set: KKTSet) -> Groups:
        """Group candidates by activation pattern and label.

        If multipliers may be negative, candidates are grouped only by pattern.

        Args:
            kkt_set: The candidates (reconstructed images) with their multipliers (weights).

        Returns:
            The groups.
        """
        labels = kkt_set.y if kkt_set.task in NONNEGATIVE_TASKS else torch.zeros_like(kkt_set.lam)
        pattern_and_label = torch.cat(
            [kkt_set.switches.pattern.double(), labels[:, None].double()], 1
        )
        group_index = torch.unique(pattern_and_label, dim=0, return_inverse=True)[1]
        group_count = int(group_index.max()) + 1
        descending_indices = torch.arange(len(group_index) - 1, -1, -1, device=group_index.device)
        return cls(
            group_index,
            descending_indices.new_zeros(group_count).scatter(
                0, group_index[descending_indices], descending_indices
            ),
        )

    def __len__(self) -> int:
        return len(self.first)

    def total(self, values: Tensor) -> Tensor:
        """Return the (G, ...) sums of (m, ...) values over the members of each group."""
        return values.new_zeros(len(self), *values.shape[1:]).index_add(0, self.index, values)

    def members(self, g: int) -> Tensor:
        """Return the indices of the reconstructed images in group ``g``."""
        return (self.index == g).nonzero()[:, 0]


@dataclass(frozen=True)
class Pinned:
    """The groups of candidates whose sums the weights determine.

    A group consists of all candidates with the same activation pattern and label. The sums of a group are its
    mass (sum of multipliers) and its moment (sum of images times multipliers).

    Attributes:
        groups: (G,) True for a group whose sums are the same in every training set with these patterns.
        what: The number of determined sums, and the test that shows this.
        rows: Q constraints, one for each pair of group and rival class. ``rows.index`` is the group.
        null: (Q (d + 1), k) basis of the changes of the sums that change no weight, or None if this basis was
            not computed.
    """

    groups: Tensor
    what: Sums
    rows: Rows | None = None
    null: Tensor | None = None


def find_pinned_sums(kkt_set: KKTSet, groups: Groups) -> Pinned:
    """Find the groups whose sums are fixed, i.e. every change of these sums changes the weights.

    The sums of a group are its mass (sum of multipliers) and its moment (sum of images times multipliers).
    If the first layer has a bias, a cheap test of its backward signals may show that all sums are fixed.
    Otherwise the full linear map from sums to weights is decomposed if it fits into memory. The sums of a
    group are fixed if no vector in the null space of this map changes them. If multipliers may be negative,
    no sums count as fixed, because samples with multipliers of opposite signs can cancel.

    Args:
        kkt_set: The candidates (reconstructed images) with their multipliers (weights).
        groups: The candidates, in groups that activate the same neurons and have the same label.

    Returns:
        The groups with fixed sums.
    """
    group_count = len(groups)
    if kkt_set.task not in NONNEGATIVE_TASKS:
        nothing_fixed = torch.zeros(group_count, dtype=torch.bool, device=kkt_set.x.device)
        return Pinned(nothing_fixed, Sums(group_count, 0, None, None, "multipliers of either sign"))
    group_constraints = _rows(kkt_set, groups)
    is_fixed, least_singular_value = _by_first_layer(kkt_set, groups, group_constraints)
    if bool(is_fixed.all()):
        return Pinned(
            is_fixed,
            Sums(group_count, group_count, 0, least_singular_value, "first layer"),
            group_constraints,
        )
    unknown_count = len(group_constraints) * (kkt_set.x[0].numel() + 1)
    parameter_count = sum(t.numel() for t in kkt_set.target.values())
    if unknown_count > MAX_UNKNOWNS or unknown_count * parameter_count > MAX_ENTRIES:
        return Pinned(
            is_fixed,
            Sums(group_count, int(is_fixed.sum()), None, least_singular_value, "first layer"),
            group_constraints,
        )
    null_basis, least_singular_value = null_space(kkt_set, groups, group_constraints)
    null_basis_by_row = null_basis.reshape(
        len(group_constraints), kkt_set.x[0].numel() + 1, null_basis.shape[1]
    )
    group_changes = null_basis_by_row.new_zeros(
        group_count, *null_basis_by_row.shape[1:]
    ).index_add(0, group_constraints.index, null_basis_by_row)
    is_fixed = group_changes.flatten(1).norm(dim=1) <= FIXED_TOLERANCE
    determined_sums = Sums(
        group_count, int(is_fixed.sum()), null_basis.shape[1], least_singular_value, "dense"
    )
    return Pinned(is_fixed, determined_sums, group_constraints, null_basis)


def _rows(kkt_set: KKTSet, groups: Groups) -> Rows:
    """Return one constraint for each group of reconstructed images, or for each group and wrong class."""
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

    The matrix of backward signals has a row for each constraint. The indicator of a group is the vector
    that is 1 for the constraints of the group and 0 for all others. The sums of a group are fixed if its
    indicator lies in the range of this matrix.

    Args:
        kkt_set: The candidates (reconstructed images) with their multipliers (weights).
        groups: The candidates, in groups that activate the same neurons and have the same label.
        rows: A constraint for each group and rival class.

    Returns:
        (G,) whether the sums of each group are fixed. Then the smallest nonzero singular value of the
        backward signals relative to the largest. It is None if the first layer has no bias or no active
        neuron.
    """
    chain = dense_chain(kkt_set.models[0])
    if chain is None or chain.linears[0].bias is None:
        return torch.zeros(len(groups), dtype=torch.bool, device=kkt_set.x.device), None
    activations = chain.trace(kkt_set.x[groups.first])
    left_vectors, singular_values, _ = torch.linalg.svd(
        chain.signals(activations, rows.covectors, rows.index)[0].detach(), full_matrices=False
    )
    is_nonzero = singular_values > RANK_TOLERANCE * singular_values[0]
    # If no neuron is active for any candidate, all backward signals are zero.
    if not bool(is_nonzero.any()):
        return torch.zeros(len(groups), dtype=torch.bool, device=kkt_set.x.device), None
    range_basis = left_vectors[:, is_nonzero]
    indicators = torch.nn.functional.one_hot(rows.index, len(groups)).to(range_basis)
    outside_range = (indicators - range_basis @ (range_basis.T @ indicators)).norm(
        dim=0
    ) / indicators.norm(dim=0)
    return outside_range <= FIXED_TOLERANCE, float(
        singular_values[is_nonzero].min() / singular_values[0]
    )


def null_space(kkt_set: KKTSet, groups: Groups, rows: Rows) -> tuple[Tensor, float]:
    """Return the changes of the groups' sums that do not change the weights.

    The sums of a group are its mass L (sum of multipliers) and its moment M (sum of images times
    multipliers). Each constraint has d + 1 coordinates: the d entries of M - L x, where x is the first
    candidate of the group, and then L.

    Args:
        kkt_set: The candidates (reconstructed images) with their multipliers (weights).
        groups: The candidates, in groups that activate the same neurons and have the same label.
        rows: Q constraints, one for each group and rival class.

    Returns:
        A basis (Q (d + 1), k) of these changes, and the smallest nonzero singular value of the linear map
        from sums to weights, relative to the largest singular value.
    """
    model, theta = kkt_set.models[0], parameters(kkt_set.models[0])
    first_candidates = kkt_set.x[groups.first][rows.index].flatten(1)

    def weighted_gradients(x: Tensor, lam: Tensor) -> Tensor:
        def value(t: Theta) -> Tensor:
            outputs = functional_call(model, t, (x.reshape(len(x), *kkt_set.x.shape[1:]),))
            return (lam * rows.covectors * outputs).sum()

        return torch.cat([gradient.flatten() for gradient in grad(value)(theta).values()])

    unit_multipliers = torch.ones(
        len(rows), 1, dtype=first_candidates.dtype, device=first_candidates.device
    )
    unit_moves = torch.eye(
        first_candidates.numel() + len(first_candidates),
        dtype=first_candidates.dtype,
        device=first_candidates.device,
    )
    # Each row of ``unit_moves`` changes one entry of the sums over samples: for each constraint, d entries
    # of the weighted sum of samples (moment), and one entry for the sum of their multipliers (mass).
    moves_by_constraint = unit_moves.reshape(len(unit_moves), len(first_candidates), -1)

    def parameter_change(move: Tensor) -> Tensor:
        return jvp(
            weighted_gradients, (first_candidates, unit_multipliers), (move[:, :-1], move[:, -1:])
        )[1]

    # The linear map from sums to weights, (P, Q (d + 1)) for P weights and Q constraints.
    linear_map = vmap(parameter_change, chunk_size=64)(moves_by_constraint).T
    # The triangular factor is smaller than the linear map, and has the same singular values and right
    # vectors.
    triangular_factor = torch.linalg.qr(linear_map, mode="r")[1]
    _, singular_values, right_vectors = torch.linalg.svd(
        triangular_factor, full_matrices=len(triangular_factor) < triangular_factor.shape[1]
    )
    map_rank = int((singular_values > RANK_TOLERANCE * singular_values[0]).sum())
    return right_vectors[map_rank:].T, float(
        singular_values[map_rank - 1] / singular_values[0]
    ) if map_rank else 0.0


Array = np.ndarray[Any, Any]


def across_patterns(cells: Cells, i: int, seconds: float = math.inf) -> tuple[Tensor, float] | None:
    """Find the image of least norm that can replace candidate i if the sums of several groups may change.

    The mass and the moment of several groups may change together without a change of the weights. The
    unknowns are the image minus the first candidate of its group, and k coordinates of such changes. The
    image has a share of the sums of its group. The remaining sums of every group must be sums of samples that
    have the activation pattern of the group. The pairs (moment, mass) of such samples form a cone, so the
    constraints are linear in the unknowns.

    The result is an example and not a bound. The sum of gradients of its training set is computed and
    compared with the original sum. If the time limit stops the search, the result is still an example, but
    its norm is not the smallest.

    Args:
        cells: The constraints that an image must meet to replace each candidate (reconstructed image).
        i: Index of the candidate.
        seconds: Time limit of the solver.

    Returns:
        The (d,) image and the relative change of the sum of gradients. The result is None if the weights
        determine all sums, if the problem does not fit into memory, or if a sample leaves its pattern.
    """
    null_basis, rows = cells.sums.null, cells.sums.rows
    if null_basis is None or rows is None or not null_basis.shape[1]:
        return None
    pixel_count = cells.low.shape[1]
    null_basis_by_row = null_basis.reshape(len(rows), pixel_count + 1, -1).cpu().numpy()
    group_of_row = rows.index.cpu().numpy()
    own_group = int(cells.groups.index[i])
    changing_rows = np.flatnonzero(
        (np.abs(null_basis_by_row).max((1, 2)) > TOUCHED_TOLERANCE) | (group_of_row == own_group)
    )
    cones_by_group = {
        int(group_index): _cone(cells, int(group_index))
        for group_index in np.unique(group_of_row[changing_rows])
    }
    change_count = null_basis_by_row.shape[2]
    if (
        sum(len(cones_by_group[int(group_index)]) for group_index in group_of_row[changing_rows])
        * (pixel_count + change_count)
        > MAX_MATRIX_ENTRIES
    ):
        return None
    first_images = {
        group_index: cells.kkt_set.x[cells.groups.first[group_index]].flatten().cpu().numpy()
        for group_index in cones_by_group
    }
    # In each constraint of its group, the image gets a share of the multiplier of candidate i, which it
    # replaces.
    image_multipliers = {
        int(q): cells.share * float(_row_multipliers(cells.kkt_set, i, rows.covectors[q]))
        for q in np.flatnonzero(group_of_row == own_group)
    }
    unchanged_image = cells.kkt_set.x[i].flatten().cpu().numpy() - first_images[own_group]
    constraint_blocks, constant_blocks, row_sums = [], [], {}
    for q in changing_rows.tolist():
        group_index = int(group_of_row[q])
        inequalities, total = (
            cones_by_group[group_index],
            _total(cells, group_index, rows.covectors[q]),
        )
        row_sums[q] = total
        # The image contributes only to the constraints of its own group, so its multiplier is zero in
        # others.
        image_weight = image_multipliers[q] if group_index == own_group else 0.0
        constraint_blocks.append(
            np.concatenate(
                [-image_weight * inequalities[:, :-1], inequalities @ null_basis_by_row[q]], 1
            )
        )
        constant_blocks.append(inequalities @ total - image_weight * inequalities[:, -1])
    # These inequalities ensure that the image activates the same neurons as the samples of its group.
    inequalities = cones_by_group[own_group]
    constraint_blocks.append(
        np.concatenate([inequalities[:, :-1], np.zeros((len(inequalities), change_count))], 1)
    )
    constant_blocks.append(inequalities[:, -1])
    solution = _solve(
        np.concatenate(constraint_blocks),
        np.concatenate(constant_blocks),
        first_images[own_group],
        unchanged_image,
        change_count,
        seconds,
    )
    images, u = (
        [first_images[own_group] + solution[:pixel_count]],
        [sum(image_multipliers[q] * rows.covectors[q] for q in image_multipliers)],
    )
    for q in changing_rows.tolist():
        group_index = int(group_of_row[q])
        image_weight = image_multipliers[q] if group_index == own_group else 0.0
        remaining_sums = (
            row_sums[q]
            + null_basis_by_row[q] @ solution[pixel_count:]
            - image_weight * np.append(solution[:pixel_count], 1.0)
        )
        if remaining_sums[-1] > EMPTY_TOLERANCE * float(cells.kkt_set.lam.max()):
            images.append(first_images[group_index] + remaining_sums[:-1] / remaining_sums[-1])
            u.append(remaining_sums[-1] * rows.covectors[q])
    return _check_example(cells, np.array(sorted(cones_by_group)), images, u)


def _cone(cells: Cells, g: int) -> Array:
    """Return the linear inequalities that the mass and the moment of a group must obey.

    All samples of the group have its activation pattern and lie within the value range, so each sample obeys
    linear inequalities. The sum of these inequalities, weighted with the multipliers, is a homogeneous
    inequality for M - L x and L. Here M is the moment (sum of samples times multipliers), L is the mass (sum
    of multipliers), and x is the first candidate of the group. If the group has no samples, M and L are zero,
    and the inequalities hold. Rows are scaled to length 1 to suit the tolerances of the solver.

    Args:
        cells: The constraints that an image must meet to replace each candidate (reconstructed image).
        g: Index of the group.

    Returns:
        (c, d + 1) rows H with H (M - L x, L) >= 0.
    """
    first_member = cells.groups.first[g : g + 1]
    switch_gradients = cells.rows(first_member)[0, : cells.switches].cpu().numpy()
    boundary_values = cells.values[first_member][0, : cells.switches].cpu().numpy()
    first_candidate = cells.kkt_set.x[first_member].flatten().cpu().numpy()
    inequality_blocks = [np.concatenate([switch_gradients, boundary_values[:, None]], 1)]
    for sign, end in ((1, cells.low), (-1, cells.high)):
        if cells.boxed:
            distances_from_limit = sign * (first_candidate - end[first_member][0].cpu().numpy())
            inequality_blocks.append(
                np.concatenate(
                    [sign * np.eye(len(first_candidate)), distances_from_limit[:, None]], 1
                )
            )
    inequality_blocks.append(np.append(np.zeros(len(first_candidate)), 1.0)[None])
    inequalities = np.concatenate(inequality_blocks)
    row_lengths = np.linalg.norm(inequalities, axis=1)
    return inequalities[row_lengths > 0] / row_lengths[row_lengths > 0, None]


def _total(cells: Cells, g: int, covector: Tensor) -> Array:
    """Return the sums of a group of candidates for one constraint, as d + 1 numbers.

    The first d entries are the moment M - L x, where x is the first candidate of the group. The last entry is
    the mass L.
    """
    members, kkt_set = cells.groups.members(g), cells.kkt_set
    multipliers = _row_multipliers(kkt_set, members, covector)
    differences_from_first = (
        kkt_set.x[members].flatten(1) - kkt_set.x[cells.groups.first[g]].flatten()
    )
    return torch.cat([multipliers @ differences_from_first, multipliers.sum()[None]]).cpu().numpy()


def _row_multipliers(kkt_set: KKTSet, samples: Tensor | int, covector: Tensor) -> Tensor:
    """Return the multipliers (weights) of some candidates in one constraint.

    With several classes a constraint belongs to one rival class, and each candidate has a multiplier for
    each rival class.

    Args:
        kkt_set: The candidates (reconstructed images) with their multipliers (weights).
        samples: Indices of the candidates.
        covector: (C,) covector of the constraint, which is negative at the rival class.

    Returns:
        The multipliers of these candidates.
    """
    if kkt_set.task == "binary":
        return kkt_set.lam[samples]
    return -kkt_set.u[samples, 0] @ (covector < 0).to(kkt_set.u)


def _solve(a: Array, b: Array, x: Array, start: Array, k: int, seconds: float) -> Array:
    """Find the image of least norm under linear constraints.

    The unknowns y have shape (d + k,). The first d unknowns are the image minus x. The other k unknowns are
    coordinates of a change of the groups' sums. The solver may violate constraints by rounding errors, and
    then a sample would leave its activation pattern. So the result lies on the line from the unchanged image
    to the solver's point, a little before the first constraint would be violated.

    Args:
        a: (c, d + k) matrix of the constraints a y + b >= 0.
        b: (c,) constants of the constraints.
        x: (d,) first candidate of the group.
        start: (d,) unchanged image minus x.
        k: Number of coordinates of the change of the groups' sums.
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
    cones = [clarabel.NonnegativeConeT(len(b))]
    solver = clarabel.DefaultSolver(
        quadratic_term, linear_term, sparse.csc_matrix(-a), b, cones, settings
    )
    unchanged_unknowns = np.concatenate([start, np.zeros(k)])
    full_step = np.nan_to_num(np.asarray(solver.solve().x)) - unchanged_unknowns
    distances_from_walls, distance_changes = (
        np.maximum(a @ unchanged_unknowns + b, 0) + WALL_TOLERANCE,
        a @ full_step,
    )
    longest_step = float(
        np.where(
            distance_changes < 0,
            distances_from_walls / np.maximum(-distance_changes, 1e-300),
            np.inf,
        ).min()
    )
    return unchanged_unknowns + STEP_FRACTION * min(longest_step, 1.0) * full_step


def _check_example(
    cells: Cells, groups: Array, images: list[Array], u: list[Any]
) -> tuple[Tensor, float] | None:
    """Check an alternative training set in which new images replace all candidates of some groups.

    Args:
        cells: The constraints that an image must meet to replace each candidate (reconstructed image).
        groups: Indices of the groups whose candidates are replaced.
        images: (d,) new images.
        u: (C,) products of multiplier and covector of each new image.

    Returns:
        The first image and the relative change of the sum of gradients, or None if an image leaves the
        activation patterns or the value range.
    """
    kkt_set = cells.kkt_set
    is_replaced = torch.isin(cells.groups.index, torch.as_tensor(groups).to(cells.groups.index))
    image_samples = (
        torch.as_tensor(np.stack(images)).to(kkt_set.x).reshape(-1, *kkt_set.x.shape[1:])
    )
    allowed_patterns = {
        row.tobytes() for row in kkt_set.switches.pattern[is_replaced].cpu().numpy()
    }
    patterns = compute_switches(kkt_set.models, image_samples).pattern.cpu().numpy()
    if any(row.tobytes() not in allowed_patterns for row in patterns):
        return None
    low, high = (end[is_replaced] for end in (cells.low, cells.high))
    range_tolerance = WALL_TOLERANCE * image_samples.flatten(1).norm(dim=1).max()
    if bool(
        (image_samples.flatten(1) < low.amin(0) - range_tolerance).any()
        | (image_samples.flatten(1) > high.amax(0) + range_tolerance).any()
    ):
        return None
    weighted_covectors = torch.cat(
        [-kkt_set.u[is_replaced, 0], torch.stack([torch.as_tensor(v) for v in u]).to(kkt_set.u)]
    )
    sum_change = weighted_gradient(
        kkt_set.models[0], torch.cat([kkt_set.x[is_replaced], image_samples]), weighted_covectors
    )
    return image_samples[0].flatten(), norm(sum_change) / norm(kkt_set.target)
