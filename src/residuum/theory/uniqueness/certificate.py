"""Bound how different a reconstructed image can be in other training sets that fit the weights equally well.

The reconstructed images are called candidates. A training set fits the weights as well as the candidates if
it has the same sum of gradients, weighted by multipliers. We consider all such sets whose samples lie in the
activation patterns of candidates with the same label and a positive multiplier. The certificate bounds how
different an image can be that replaces a candidate in such a set.

A group consists of all candidates with the same activation pattern and label. The mass L of a group is the
sum of its multipliers. Its moment M is the sum of its images times multipliers. The weights may determine L
and M, depending on the network (residuum.theory.uniqueness.sums). Let K be the set of all images within the
value range that have the pattern of the group (with its boundary). An image x' replaces candidate i if it
gets the multiplier w = t lam_i in an alternative set, for a given share t. This is possible if and only if

    x' in K   and   (M - w x') / (L - w) in K.

Let r be an affine function with r >= 0 on K, for example the distance from an activation boundary, or a
margin minus the smallest margin. Then 0 <= r(x') <= sum_j lam_j r(x_j) / w. The condition covers sets in
which samples are split, samples exchange parts, or multipliers change. For a group of one sample x, t = 1/2
allows the pairs x +- a, and in the limit t -> 0 every image of K is allowed. If the weights do not determine
L and M, we only know that x' is in K. With several rival classes, L and M are totals over the rivals. The
condition is then necessary, and it is sufficient if the multipliers of the rivals are proportional.

    determined_at_least   proved: |x'|^2 >= this number times |x_i|^2, for every x' that replaces candidate i
    determined_energy     |x'|^2 / |x_i|^2 of the smallest x' that was found. Its training set is computed,
                          and so is the residual of this set
    full_...              the same for sets that also keep the margins (full KKT, not only stationary)
    radius_most, pixels   proved: the largest distance of x' from x_i that value range and sums allow

The bounds do not hold for sets with samples in other activation patterns. They also do not hold for sets with
pairs of samples of opposite labels whose gradients cancel (docs/uniqueness.md).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residuum.errors import InconclusiveError, InputError
from residuum.networks import dense_chain
from residuum.records import Uniqueness
from residuum.stationarity import norm, weighted_gradient
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.patterns import compute_slope_matrix
from residuum.theory.uniqueness.polytope import Polytope, eliminates_rows, minimize_energy
from residuum.theory.uniqueness.sums import Groups, Pinned, across_patterns, find_pinned_sums

# A certificate considers images that could replace a candidate (reconstruction). By default, their
# multiplier (weight) must be at least this share of the candidate's multiplier.
SHARE = 0.1
# Candidates (reconstructions) whose multiplier is below this share of the largest multiplier are ignored.
MIN_MULTIPLIER = 1e-9
# An activation boundary is the set of images at which a function, such as the input of a ReLU, is zero. An
# image lies on the boundary if the function's value is at most this number times the function's slope times
# (1 + norm of the image).
KINK_TOLERANCE = 1e-10
# The certificate proves a lower bound for the relative squared norm of images that could replace a
# candidate, and searches for the smallest one. A note counts the candidates for which the two differ by
# more than this number.
WIDE_GAP = 0.05
# The output weights (covectors) of two candidates count as equal if they differ by less than this share of
# their length.
PROPORTIONAL = 1e-9
# Largest number of entries in the matrices of one batch of candidates, by kind of device, to limit the
# memory.
ENTRIES = {"cpu": 2**21, "cuda": 2**25}
SIDE = 512  # number of rows of the square matrices whose product measures the speed of the machine
REPEATS = 3  # number of products that are timed to measure the speed of the machine
# Expected number of steps of the solver for each candidate: two problems of about 13 steps each, with and
# without constraints on margins.
FACTORS = 26
# Seconds per candidate for everything except the products and factorizations of matrices.
OVERHEAD = 0.01
Watch = Callable[[int, int], None]
Box = tuple[float | Tensor, float | Tensor]


def uniqueness(
    kkt_set: KKTSet,
    *,
    box: Box | None = None,
    share: float = SHARE,
    samples: int | None = None,
    seconds: float = math.inf,
    device: str = "cpu",
    watch: Watch | None = None,
) -> Uniqueness:
    """Bound how different each candidate image can be in other training sets that fit the weights as well.

    Args:
        kkt_set: Reconstructed images (candidates), multipliers and network. Candidates without a positive
            multiplier are ignored.
        box: Lowest and highest value of a pixel as the network receives it, or None.
        share: Smallest share of a candidate's multiplier that an image must have to replace the candidate.
        samples: Number of candidates to certify. The first candidates are chosen. By default all candidates.
        seconds: Time limit. No further batch starts after this time, and finished batches are kept.
        device: Device to compute on.
        watch: Function that is called before each batch with the number of finished candidates and the number
            of all candidates.

    Returns:
        The certificate of the candidates that were finished.

    Raises:
        InputError: If the share is not between 0 and 1.
        InconclusiveError: If all weights are zero.
    """
    start_time = time.monotonic()
    if not 0 < share < 1:
        raise InputError(
            "The option --share must lie between 0 and 1, because it is the share of a candidate's "
            f"multiplier (weight) that another image must have to count as its replacement; got {share}.",
            "Pass --share 0.1.",
        )
    if not norm(kkt_set.target):
        raise InconclusiveError(
            "At least one weight of the network must not be zero; all weights are zero.",
            "Check that the file contains the trained weights.",
        )
    used, active_index = _select_active(_move_to_device(kkt_set, device))
    constraints = Cells.build(used, share, box)
    requested_count = len(used) if samples is None else min(samples, len(used))
    batches: list[dict[str, Tensor]] = []
    batch_size = max(1, ENTRIES[torch.device(device).type] // max(constraints.entries, 1))
    for indices in torch.arange(requested_count, device=used.x.device).split(batch_size):
        if batches and time.monotonic() - start_time > seconds:
            break
        if watch is not None:
            watch(int(indices[0]), requested_count)
        batches.append(_certify(constraints, indices, start_time + seconds))
    certificate = _collect(constraints, batches, active_index)
    notes = _notes(kkt_set, certificate, constraints, requested_count)
    return certificate.replace(notes=notes, seconds=time.monotonic() - start_time)


@dataclass(frozen=True)
class Cells:
    """The constraints that an image must meet to replace a candidate, for each of m candidates.

    A candidate is a reconstructed image. A group consists of all candidates with the same activation
    pattern and label. The sums of a group are its mass (sum of multipliers) and its moment (sum of images
    times multipliers).

    Attributes:
        kkt_set: The candidates (reconstructed images) with their multipliers (weights).
        groups: Candidates grouped by pattern and label.
        sums: Which sums of the groups are determined by the weights.
        pinned: (m,) whether the weights determine the sums of the candidate's group.
        share: Share of a candidate's multiplier that an image must have to replace the candidate.
        switches: Number of activation boundaries. They belong to the first columns of ``values``.
        values: (m, J) values at the candidates of J functions that must stay nonnegative. The first
            functions are the absolute values of pre-activations (and of differences in pooling windows).
            The other functions are margins minus the smallest margin.
        moves_alone: (m,) whether the candidate's group has candidates with different covectors (weights of
            the outputs). Then an example replaces only the candidate and not its group.
        low: (m, d) lowest values of the pixels, widened to contain all candidates of the group.
        high: (m, d) highest values of the pixels, widened to contain all candidates of the group.
        beyond: Number of candidates outside the value range, for which the range was widened.
        boxed: Whether a value range is known.
    """

    kkt_set: KKTSet
    groups: Groups
    sums: Pinned
    pinned: Tensor
    share: float
    switches: int
    values: Tensor
    moves_alone: Tensor
    low: Tensor
    high: Tensor
    beyond: int
    boxed: bool

    @classmethod
    def build(cls, kkt_set: KKTSet, share: float, box: Box | None) -> Cells:
        """Group the candidates, and compute the sums and the value range of each group.

        The value range of a group is widened to contain all candidates of the group. Otherwise no image
        could replace a candidate that lies outside the range.

        Args:
            kkt_set: The candidates (reconstructed images) with their multipliers (weights).
            share: Share of a candidate's multiplier that an image must have to replace the candidate.
            box: Lowest and highest value of a pixel, or None.

        Returns:
            The constraints of all candidates.
        """
        groups, flat = Groups.build(kkt_set), kkt_set.x.flatten(1)
        pinned_sums = find_pinned_sums(kkt_set, groups)
        nonnegative_values = [kkt_set.switches.values.abs()]
        if kkt_set.margins is not None:
            nonnegative_values.append(kkt_set.margins - kkt_set.margins.min())
        covectors = kkt_set.covectors.flatten(1)
        # A candidate's covector is the vector of weights for the network's outputs. If the candidates of a
        # group have different covectors, images with the same covector cannot replace the whole group.
        covector_differences = (covectors - covectors[groups.first][groups.index]).norm(dim=1)
        differs_from_first = covector_differences > PROPORTIONAL * covectors.norm(dim=1)
        has_several_covectors = groups.total(differs_from_first.double()) > 0
        low, high = torch.full_like(flat, -torch.inf), torch.full_like(flat, torch.inf)
        outside_count = 0
        if box is not None:
            options: dict[str, Any] = {"dtype": flat.dtype, "device": flat.device}
            range_ends = [
                torch.as_tensor(end, **options).expand_as(kkt_set.x[0]).flatten() for end in box
            ]
            outside_count = int(((flat < range_ends[0]) | (flat > range_ends[1])).any(1).sum())
            index, first_rows = groups.index[:, None].expand_as(flat), flat[: len(groups)]
            group_lowest = first_rows.scatter_reduce(0, index, flat, "amin", include_self=False)
            group_highest = first_rows.scatter_reduce(0, index, flat, "amax", include_self=False)
            low = torch.minimum(group_lowest, range_ends[0])[groups.index]
            high = torch.maximum(group_highest, range_ends[1])[groups.index]
        return cls(
            kkt_set,
            groups,
            pinned_sums,
            pinned_sums.groups[groups.index],
            share,
            nonnegative_values[0].shape[1],
            torch.cat(nonnegative_values, 1),
            has_several_covectors[groups.index],
            low,
            high,
            outside_count,
            box is not None,
        )

    @property
    def entries(self) -> int:
        """The number of entries in the matrix of constraints for one reconstructed image."""
        return self.values.shape[1] * self.low.shape[1]

    def rows(self, indices: Tensor) -> Tensor:
        """Compute the gradients of the constraints (J nonnegative functions) at b candidates, (b, J, d)."""
        pattern_signs = torch.where(self.kkt_set.switches.pattern[indices], 1.0, -1.0).to(
            self.values
        )
        slopes = torch.stack(
            [compute_slope_matrix(self.kkt_set.models, x) for x in self.kkt_set.x[indices]]
        )
        gradient_blocks = [pattern_signs[:, :, None] * slopes]
        if self.kkt_set.margins is not None:
            gradient_blocks.append(self.kkt_set.margin_slopes[indices])
        return torch.cat(gradient_blocks, 1)

    def polytope(
        self, indices: Tensor, rows: Tensor, free: Tensor, moves_alone: Tensor
    ) -> Polytope:
        """Describe the sets of images that can replace the candidates, as polytopes.

        Args:
            indices: (b,) indices of the candidates.
            rows: (b, J, d) gradients of the functions that must stay nonnegative.
            free: (b,) whether the weights do not determine the sums (mass and moment) of the candidate's
                group. Then only the activation pattern and the value range limit an image.
            moves_alone: (b,) whether an image replaces only the candidate and not its group. Then the mass
                and the moment of the candidate are used instead of those of its group.

        Returns:
            A polytope for each candidate. Its points are differences between an image and the candidate.
        """
        # Let x' be an image with multiplier w that replaces a candidate. It must meet two conditions. First,
        # let r be a function in ``values``, such as the absolute input of a ReLU, and let x_j be the
        # candidates of the group. Then 0 <= r(x') <= sum_j lam_j r(x_j) / w. Second, x' and the weighted mean
        # of the rest of the group must lie in the value range. This mean is (M - w x') / (L - w) with the
        # moment M and the mass L of the group.
        count, lam = rows.shape[1], self.kkt_set.lam[:, None]
        r, x = self.values[indices, :count], self.kkt_set.x[indices].flatten(1)
        group_index, w = self.groups.index[indices], self.share * lam[indices]

        def total(values: Tensor) -> Tensor:
            group_total = self.groups.total(lam * values)[group_index]
            return torch.where(moves_alone[:, None], lam[indices] * values[indices], group_total)

        # First condition: let a = x' - x be the difference of image and candidate. The function r has the
        # value r + <row, a> at x', where the row is its gradient. So -r <= <row, a> <= total / w - r. Both
        # sides are divided by the length of the row. A function whose gradient is zero gives no constraint.
        slopes = rows.norm(dim=2)
        has_slope = slopes > 0
        unit_lengths = torch.where(has_slope, slopes, 1.0)
        largest_values = torch.where(free[:, None], torch.inf, total(self.values[:, :count]) / w)
        # Second condition: low <= (M - w x') / (L - w) <= high is solved for x'. M is the moment and L is the
        # mass of the group, and w is the multiplier of the image x'.
        moment, remaining_weight = total(self.kkt_set.x.flatten(1)), total(torch.ones_like(lam)) - w
        low_x, high_x = self.low[indices], self.high[indices]
        lowest_image = torch.where(
            free[:, None], low_x, torch.maximum(low_x, (moment - remaining_weight * high_x) / w)
        )
        highest_image = torch.where(
            free[:, None], high_x, torch.minimum(high_x, (moment - remaining_weight * low_x) / w)
        )
        return Polytope(
            rows / unit_lengths[..., None],
            x,
            torch.where(has_slope, -r / unit_lengths, -torch.inf),
            torch.where(has_slope, (largest_values - r).clamp(min=0) / unit_lengths, torch.inf),
            (lowest_image - x).clamp(max=0),
            (highest_image - x).clamp(min=0),
        )


def _certify(cells: Cells, indices: Tensor, end: float) -> dict[str, Tensor]:
    """Bound which images can replace each candidate (reconstructed image), for one batch of candidates.

    Args:
        cells: The constraints that an image must meet to replace each candidate (reconstructed image).
        indices: (b,) indices of the candidates in the batch.
        end: Value of ``time.monotonic()`` after which the search for examples that change the sums of several
            groups is skipped.

    Returns:
        Name and value of every field of the certificate. Images are flat vectors.
    """
    constraint_gradients = cells.rows(indices)
    flat_candidates = cells.kkt_set.x[indices].flatten(1)
    energy = flat_candidates.square().sum(1).clamp(min=1e-300)
    free, moves_alone = ~cells.pinned[indices], cells.moves_alone[indices]
    false_mask = torch.zeros_like(free)

    def solve(count: int) -> tuple[Tensor, Tensor]:
        """Return bounds of the relative energy of images that can replace the candidates, and examples.

        The relative energy of an image is its squared norm over that of the candidate. A bound is a lower
        bound that holds for all such images. Only the first ``count`` columns of the constraints are used.
        For each example, a training set exists that contains it and fits the weights as well.
        """
        minimum = minimize_energy(
            cells.polytope(indices, constraint_gradients[:, :count], free, false_mask)
        )
        # The images in this polytope do not all belong to a training set with the same weights, if the
        # weights do not determine the sums of a group. Then a smaller polytope is used to find an example
        # that does.
        example_indices = (free | moves_alone).nonzero()[:, 0]
        if len(example_indices):
            inner_polytope = cells.polytope(
                indices[example_indices],
                constraint_gradients[example_indices, :count],
                false_mask[example_indices],
                moves_alone[example_indices],
            )
            minimum.example[example_indices] = minimize_energy(inner_polytope).example
        return minimum.bound / energy, flat_candidates + minimum.example

    bound, images = solve(cells.switches)
    pixel_limits = cells.polytope(indices, constraint_gradients[:, :0], free, false_mask).widened()
    bound_and_images_with_margins = (
        solve(constraint_gradients.shape[1])
        if constraint_gradients.shape[1] > cells.switches
        else (bound, images)
    )
    relative_changes = [
        _relative_change(cells, int(i), flat_candidates)
        for i, flat_candidates in zip(indices, images, strict=True)
    ]
    for k in free.nonzero()[:, 0].tolist():
        seconds_left = end - time.monotonic()
        example = (
            across_patterns(cells, int(indices[k]), seconds_left) if seconds_left > 0 else None
        )
        if example is not None and float(example[0].square().sum() - images[k].square().sum()) < 0:
            images[k], relative_changes[k] = example
    slopes = constraint_gradients[:, : cells.switches].norm(dim=2)
    is_kink = (
        cells.values[indices, : cells.switches]
        <= KINK_TOLERANCE * slopes * (1 + flat_candidates.norm(dim=1))[:, None]
    )
    return {
        "determined_at_least": bound,
        "determined_energy": images.square().sum(1) / energy,
        "full_at_least": bound_and_images_with_margins[0],
        "full_energy": bound_and_images_with_margins[1].square().sum(1) / energy,
        "least": images,
        "change": flat_candidates.new_tensor(relative_changes),
        "radius": (images - flat_candidates).norm(dim=1),
        "radius_most": torch.maximum(-pixel_limits.lower, pixel_limits.upper).norm(dim=1),
        "low": flat_candidates + pixel_limits.lower,
        "high": flat_candidates + pixel_limits.upper,
        "kinks": (is_kink & (slopes > 0)).sum(1),
    }


def _relative_change(cells: Cells, i: int, image: Tensor) -> float:
    """Check that an image can replace a candidate without a change of the weighted sum of gradients.

    The image gets a share of the candidate's multiplier. A second image replaces the rest of the candidate's
    group.

    Args:
        cells: The constraints that an image must meet to replace each candidate (reconstructed image).
        i: Index of the candidate.
        image: (d,) image that replaces the candidate.

    Returns:
        The norm of the change of the sum over the norm of the target, i.e. of the vector that the sum must
        equal. Without rounding errors, the value is 0.
    """
    kkt_set = cells.kkt_set
    group_members = cells.groups.members(int(cells.groups.index[i]))
    replaced_members = (
        group_members[group_members == i] if bool(cells.moves_alone[i]) else group_members
    )
    w, lam = cells.share * kkt_set.lam[i], kkt_set.lam[replaced_members]
    mean_of_others = (lam @ kkt_set.x[replaced_members].flatten(1) - w * image) / (lam.sum() - w)
    images = torch.stack([image, mean_of_others]).reshape(2, *kkt_set.x.shape[1:])
    replacement_u = torch.stack([w, lam.sum() - w])[:, None, None] * kkt_set.covectors[[i, i]]
    samples, u = (
        torch.cat([kkt_set.x[replaced_members], images]),
        torch.cat([-kkt_set.u[replaced_members], replacement_u]),
    )
    gradients = [
        weighted_gradient(model, samples, u[:, p]) for p, model in enumerate(kkt_set.models)
    ]
    sum_change = {n: torch.stack([term[n] for term in gradients]).sum(0) for n in kkt_set.target}
    return norm(sum_change) / norm(kkt_set.target)


def _select_active(kkt_set: KKTSet) -> tuple[KKTSet, Tensor]:
    """Select the reconstructed images with a positive multiplier (weight), and return their indices too."""
    is_active = (
        kkt_set.lam > MIN_MULTIPLIER * kkt_set.lam.max() if len(kkt_set) else kkt_set.lam > 0
    )
    if not bool(is_active.any()):
        raise InputError(
            "At least one candidate (reconstructed image) must have a positive multiplier (weight in the "
            "sum that gives the network's weights); no candidate has one.",
            "Check that the reconstruction belongs to this network.",
        )
    active_index = is_active.nonzero()[:, 0]
    return dataclasses.replace(kkt_set.take(active_index), parent=None), active_index


def _move_to_device(kkt_set: KKTSet, device: str) -> KKTSet:
    if torch.device(device) == kkt_set.x.device:
        return kkt_set
    moved_tensors = {
        name: getattr(kkt_set, name).to(device) for name in ("x", "y", "lam", "covectors")
    }
    models = tuple(copy.deepcopy(model).to(device) for model in kkt_set.models)
    target = {name: t.to(device) for name, t in kkt_set.target.items()}
    return dataclasses.replace(kkt_set, models=models, target=target, parent=None, **moved_tensors)


def _notes(
    kkt_set: KKTSet, certificate: Uniqueness, cells: Cells, requested: int
) -> tuple[str, ...]:
    ignored_count = len(kkt_set) - len(cells.kkt_set)
    wide_gap_count = int(
        (certificate.determined_energy - certificate.determined_at_least > WIDE_GAP).sum()
    )
    undetermined_count = int((~certificate.pinned).sum())
    boundary_count = int((certificate.kinks > 0).sum())
    counts_by_note = {
        f"{ignored_count} candidates without a positive multiplier were ignored": ignored_count,
        f"time budget exhausted: {len(certificate)} of {requested} candidates certified": len(
            certificate
        )
        < requested,
        "no value range was given: only activation boundaries bound an image": not cells.boxed,
        f"{cells.beyond} candidates are outside the value range, which was widened": cells.beyond,
        f"{undetermined_count} candidates may exchange parts with other activation patterns: the bound only "
        "uses pattern and value range": undetermined_count,
        f"{boundary_count} candidates lie on an activation boundary: rounding decides on which "
        "side": boundary_count,
        f"the bound and the best example of {wide_gap_count} candidates differ by more than "
        f"{WIDE_GAP:g}": wide_gap_count,
    }
    return tuple(text for text, count in counts_by_note.items() if count)


def _collect(cells: Cells, batches: list[dict[str, Tensor]], active_index: Tensor) -> Uniqueness:
    """Combine the results of all batches into one certificate, with its tensors on the CPU."""
    kkt_set, groups = cells.kkt_set, cells.groups
    fields: dict[str, Any] = {
        name: torch.cat([batch[name] for batch in batches]).cpu() for name in batches[0]
    }
    finished_count = len(fields["least"])
    for name in ("least", "low", "high"):
        fields[name] = fields[name].reshape(finished_count, *kkt_set.x.shape[1:])
    group_sizes = groups.total(torch.ones_like(kkt_set.lam))[groups.index].long()
    columns = {
        "labels": kkt_set.y,
        "lam": kkt_set.lam,
        "members": group_sizes,
        "pinned": cells.pinned,
    }
    columns |= {"index": active_index, "size": kkt_set.x.flatten(1).norm(dim=1)}
    fields |= {name: value[:finished_count].cpu() for name, value in columns.items()}
    return Uniqueness(
        task=kkt_set.task,
        samples=len(kkt_set),
        share=cells.share,
        box=cells.boxed,
        margins=kkt_set.margins is not None,
        sums=cells.sums.what,
        residual=kkt_set.layer_residuals,
        seconds=0.0,
        **fields,
    )


@dataclass(frozen=True)
class Cost:
    """Estimated cost of a uniqueness certificate (bounds of how different reconstructed images can be).

    Attributes:
        samples: Number of candidates to certify.
        operations: Number of floating point operations in matrix products.
        seconds: Estimated time in seconds.
        memory: Estimated memory in bytes.
    """

    samples: int
    operations: float
    seconds: float
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.samples} candidates, {self.operations / 1e9:.3g} GFlop, about "
            f"{self.seconds:.2g} s, {self.memory / 2**20:.0f} MiB"
        )


def estimate_cost(
    kkt_set: KKTSet, *, box: Box | None = None, samples: int | None = None, device: str = "cpu"
) -> Cost:
    """Estimate the cost of a uniqueness certificate from the size of its problems and the machine's speed.

    Let K be the number of activation boundaries, and let k be the number of pixels that can change. The
    solver factorizes s x s matrices, with s = K if there are few boundaries (:func:`eliminates_rows`), and
    s = k otherwise. For each candidate, the gradients of the boundaries are computed. Then follow
    ``FACTORS`` steps, each with a product of K s^2 operations and a factorization of s^3 operations. If
    there are few boundaries, an orthonormal basis of their gradients needs K^2 k further operations. This
    basis is computed in every step if a value range limits the pixels, and once otherwise.

    Args:
        kkt_set: The candidates (reconstructed images) with their multipliers (weights).
        box: Lowest and highest value of a pixel, or None.
        samples: Number of candidates to certify, by default all candidates.
        device: Device to compute on.

    Returns:
        The estimated cost.
    """
    candidate_count = len(kkt_set) if samples is None else min(samples, len(kkt_set))
    d, rows = kkt_set.x[0].numel(), kkt_set.switches.values.shape[1]
    movable_pixels = d
    if box is not None:
        low, high = (torch.as_tensor(end).to(kkt_set.x).expand_as(kkt_set.x) for end in box)
        movable_pixels = (
            int(((kkt_set.x > low) & (kkt_set.x < high)).flatten(1).double().sum(1).mean()) + 1
        )
    dense_networks = [
        chain for model in kkt_set.models if (chain := dense_chain(model)) is not None
    ]
    widths = [[layer.out_features for layer in chain.linears[:-1]] for chain in dense_networks]
    gradient_operations = (
        2.0 * d * sum(a * b for layer_widths in widths for a, b in itertools.pairwise(layer_widths))
    )
    factorizes_row_matrix = eliminates_rows(rows, movable_pixels, walled=box is not None)
    side, bases = (
        (rows, 2 if box is None else FACTORS) if factorizes_row_matrix else (movable_pixels, 0)
    )
    step_operations = (
        FACTORS * (2.0 * rows * side**2 + side**3) + bases * 4.0 * rows**2 * movable_pixels
    )
    operations = candidate_count * (gradient_operations + step_operations)
    speed = _speed(device)
    batch_entries = max(ENTRIES[torch.device(device).type], rows * d)
    return Cost(
        candidate_count,
        operations,
        operations / speed + OVERHEAD * candidate_count,
        8 * 5 * batch_entries,
    )


def _speed(device: str) -> float:
    """Measure the speed of float64 matrix products, and return the operations per second."""
    random_matrix = torch.rand(SIDE, SIDE, dtype=torch.float64, device=device)
    least_seconds = float("inf")
    for _ in range(REPEATS):
        start_time = time.perf_counter()
        random_matrix @ random_matrix
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        least_seconds = min(least_seconds, time.perf_counter() - start_time)
    return 2 * SIDE**3 / least_seconds
