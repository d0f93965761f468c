r"""Find samples of the user in the rows of an array, in one pass over the array.

Each row r of an array and each sample q is projected on a few random vectors. Only rows and samples with the
same projections, up to rounding errors, are compared value by value. There are two comparisons.

**Up to scale.** A sample of many distinct values is found however it was scaled. The mean is subtracted from
the row, and the row is divided by its norm:

    key(r) = R^T (r - mean(r)) / |r - mean(r)|,   the same for  a r + b  with  a > 0

For color images the same is done for each channel. A row matches a sample if r = a q + b with the best a and
b, up to rounding errors.

**By value.** Samples of few distinct values, and tables whose columns have different scales, are compared as
they are after each change in a list of common changes (:mod:`.sample_forms`). Each column is divided by its
largest value before the projection.

The tolerances follow from the dtype of the array: half a unit for integers, the relative rounding error for
floating-point numbers, and in both cases the error of a computation in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from residuum.io.inert import NumberReader
from residuum.scanning.sample_forms import Layout, Rows, Scaling, split_rows

KEYS = 6  # number of random vectors on which rows are projected
MIN_DISTINCT = 16  # smallest number of distinct values of a sample that is compared up to scale
CHUNK = 1 << 21  # largest number of values of an array that are read together
MAX_EXTRA = 8  # largest number of further columns, such as labels, in the rows of an array
CANDIDATES = 3  # number of samples that are compared with a row value by value
# The error of a computation in float32, relative to the largest value.
ROUNDING = 16 * torch.finfo(torch.float32).eps
# Rows whose mean is larger than this multiple of their deviation are constant, up to rounding errors.
MAX_MEAN_RATIO = 100.0
# A projection of rounding errors has a normal distribution. It is below this many deviations.
DEVIATIONS = 6.0
ROUNDED = 0.29  # standard deviation of the rounding error of integers, 1 / sqrt(12)
# Rows of integers with a smaller deviation have too few levels to tolerate rounding.
MIN_LEVELS = 4.0
MAX_RADIUS = 0.3  # largest tolerance of a projection, where projections have a deviation of about 1


@dataclass(frozen=True)
class Precision:
    """How exactly an array stores numbers.

    Attributes:
        relative: Distance of neighboring floating-point numbers near 1. 0 for integers.
        has_integers: Whether all numbers are integers, so that they may be rounded.
    """

    relative: float
    has_integers: bool = False


def measure_precision(numbers: Tensor) -> Precision:
    """Return the relative rounding error of stored numbers, from their dtype and the values themselves.

    Values in float32 may have been rounded to integers or to 16 bits before.
    """
    if not numbers.is_floating_point():
        return Precision(0.0, has_integers=True)
    first_values = numbers.flatten()[:4096]
    if bool((first_values == first_values.round()).all()) and bool((first_values.abs() > 1).any()):
        return Precision(0.0, has_integers=True)
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(first_values.to(dtype).to(first_values.dtype), first_values):
            return Precision(torch.finfo(dtype).eps)
    return Precision(torch.finfo(numbers.dtype).eps)


class ScaleFreeKeys:
    """Projections of rows on random vectors, which do not depend on the scale and the mean of the row.

    Args:
        groups: Channel of each value, (d,). All zero for one scale per row.
    """

    def __init__(self, groups: Tensor) -> None:
        self.groups = groups
        self.count = int(groups.max()) + 1
        indicator = torch.nn.functional.one_hot(groups, self.count).double()
        self._sizes = indicator.sum(0)
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(len(groups), KEYS, generator=generator, dtype=torch.float64)
        vectors = vectors - indicator @ ((indicator.T @ vectors) / self._sizes[:, None])
        blocks = (indicator[:, :, None] * vectors[:, None, :]).flatten(1)
        matrix = torch.cat([blocks, indicator], 1)
        self._matrices = {torch.float64: matrix, torch.float32: matrix.float()}
        self._indicators = {torch.float64: indicator, torch.float32: indicator.float()}

    def project(self, rows: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
        """Project rows.

        Args:
            rows: The rows (m, d).
            precision: How exactly the rows are stored.

        Returns:
            The keys (m, k), and by how much rounding may change the keys of each row, (m,).
        """
        products = (rows @ self._matrices[rows.dtype]).double()
        projections = products[:, : self.count * KEYS].view(len(rows), self.count, KEYS)
        squares = (
            torch.linalg.vector_norm(rows, dim=1, keepdim=True) ** 2
            if self.count == 1
            else rows.square() @ self._indicators[rows.dtype]
        ).double() / self._sizes
        means = products[:, self.count * KEYS :] / self._sizes
        variances = squares - means**2
        is_varied = variances > squares / MAX_MEAN_RATIO**2
        inverse = torch.where(is_varied, variances.clamp(min=1e-300) ** -0.5, 0.0)
        keys = (projections * (inverse / self._sizes.sqrt())[:, :, None]).sum(1)
        keys /= math.sqrt(self.count)
        keys[~is_varied.any(1)] = torch.nan
        ratios = squares * inverse**2  # (root mean square / standard deviation)^2 of each row
        absolute = ROUNDED * inverse if precision.has_integers else 0.0
        # The error of a sum of d products in float32 grows with the square root of d.
        summation = torch.finfo(torch.float32).eps * math.sqrt(len(self.groups))
        relative = precision.relative + ROUNDING + summation
        noise = (relative**2 * ratios + absolute**2).mean(1).sqrt()
        cancellation = torch.finfo(torch.float32).eps * ratios.mean(1)
        return keys, (DEVIATIONS * noise + 8 * cancellation).clamp(max=MAX_RADIUS)

    def agree(self, rows: Tensor, samples: Tensor, precision: Precision) -> Tensor:
        """Return which rows (m, d) are ``a * sample + b`` up to rounding, with one a and b per channel.

        Args:
            rows: The rows (m, d).
            samples: The sample (m, d) of each row.
            precision: How exactly the rows are stored.

        Returns:
            One boolean per row.
        """
        agreement = torch.ones(len(rows), dtype=torch.bool)
        for group in range(self.count):
            columns = self.groups == group
            r, q = rows[:, columns], samples[:, columns]
            error = (r - _fit(r, q)[2]).abs()
            largest = r.abs().amax(1, keepdim=True)
            if precision.has_integers:
                tolerance = torch.where(r.std(1, keepdim=True) >= MIN_LEVELS, 0.61, 1e-3)
            else:
                # Bound on the change of the fitted factor and shift by the rounding errors of all values.
                fit_error = 4 * precision.relative / math.sqrt(r.shape[1])
                tolerance = precision.relative * r.abs() + (ROUNDING + fit_error) * largest
            agreement &= (error <= tolerance).all(1)
        return agreement


class ValueKeys:
    """Projections of rows on random vectors, after each column was divided by its largest value.

    Args:
        magnitude: Largest value of each column, (d,).
    """

    def __init__(self, magnitude: Tensor) -> None:
        self.magnitude = magnitude

    @cached_property
    def _vectors(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(len(self.magnitude), KEYS, generator=generator, dtype=torch.float64)

    @cached_property
    def _matrices(self) -> dict[torch.dtype, Tensor]:
        matrix = self._vectors / self.magnitude[:, None]
        return {torch.float64: matrix, torch.float32: matrix.float()}

    @cached_property
    def _bounds(self) -> tuple[float, float]:
        """The largest change of a key if each value changes by its magnitude, and if it changes by 1."""
        sizes = self._vectors.abs()
        return float(sizes.sum(0).max()), float((sizes / self.magnitude[:, None]).sum(0).max())

    def project(self, rows: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
        """Project rows.

        Args:
            rows: The rows (m, d).
            precision: How exactly the rows are stored.

        Returns:
            The keys (m, k), and by how much rounding may change the keys of each row, (m,).
        """
        keys = (rows @ self._matrices[rows.dtype]).double()
        radius = (2 * precision.relative + ROUNDING) * self._bounds[0]
        if precision.has_integers:
            radius += self._bounds[1]
        return keys, torch.full((len(rows),), min(radius, MAX_RADIUS), dtype=torch.float64)

    def agree(self, rows: Tensor, samples: Tensor, precision: Precision) -> Tensor:
        """Return for each of m rows whether it equals its sample of d values, up to rounding errors.

        Args:
            rows: The rows (m, d).
            samples: The sample (m, d) of each row.
            precision: How exactly the rows are stored.

        Returns:
            One boolean per row.
        """
        if precision.has_integers:
            slack = ROUNDING * self.magnitude
            is_rounded = (rows - samples).abs() <= 0.5 + slack
            is_truncated = (rows - samples.trunc()).abs() <= slack
            is_whole = (samples - samples.round()).abs() <= slack
            is_equal = (rows - samples).abs() <= slack
            return torch.where(
                is_whole.all(1, keepdim=True), is_equal, is_rounded | is_truncated
            ).all(1)
        tolerance = precision.relative * samples.abs() + ROUNDING * self.magnitude
        return ((rows - samples).abs() <= tolerance).all(1)


@dataclass(frozen=True, eq=False)
class Form:
    """A form in which a file may store samples, and how rows are compared with samples in this form.

    Attributes:
        scaling: The change of the values.
        layout: The order of the values.
        keys: The comparison.
        has_few_values: Whether only samples with few distinct values have this form.
    """

    scaling: Scaling
    layout: Layout
    keys: ScaleFreeKeys | ValueKeys
    has_few_values: bool = False

    @property
    def is_unchanged(self) -> bool:
        """Whether this form leaves samples unchanged: the same values in the same order."""
        return not self.scaling.name and not self.layout.name

    def apply(self, samples: Tensor) -> Tensor:
        """Return n samples with d values in this form, such as divided by 255."""
        scaled = self.scaling.apply(samples)
        return scaled if self.layout.order is None else scaled[:, self.layout.order]

    def accepts(self, samples: Tensor) -> Tensor:
        """Return for each of n samples with d values whether it can be compared. Constant samples cannot."""
        has_many = _count_reaches(samples, MIN_DISTINCT)
        if isinstance(self.keys, ScaleFreeKeys):
            return has_many
        return _count_reaches(samples, 2) & ~(has_many & self.has_few_values)


def list_forms(scalings: Sequence[Scaling], layouts: Sequence[Layout]) -> list[Form]:
    """Return all forms of samples, in the order in which they are preferred in a description.

    Args:
        scalings: The changes of the values, the unchanged samples first.
        layouts: The orders of the values, the given order first.

    Returns:
        The forms.
    """
    d = len(scalings[0].factor)
    one_scale = ScaleFreeKeys(torch.zeros(d, dtype=torch.long))
    forms = [
        Form(scaling, layout, one_scale)
        for scaling in scalings
        for layout in layouts
        # A comparison up to scale already finds samples that were changed by one factor and one shift.
        if scaling.is_homogeneous and (not scaling.name or not scaling.is_scalar)
    ]
    forms += [
        Form(scalings[0], layout, ScaleFreeKeys(layout.channels))
        for layout in layouts
        if layout.channels is not None
    ]
    for scaling in scalings:
        for layout in layouts:
            order = slice(None) if layout.order is None else layout.order
            keys = ValueKeys(scaling.magnitude[order])
            has_scale_free_form = scaling.is_homogeneous or (
                scaling.is_scalar and scalings[0].is_homogeneous
            )
            forms.append(Form(scaling, layout, keys, has_few_values=has_scale_free_form))
    return forms


@dataclass
class RowMatches:
    """Rows of an array that match samples.

    Attributes:
        rows: Number of each row in the array.
        samples: Number of the sample that the row matches.
        forms: Number of the form of the sample.
        equal: Whether all values of the row are exactly those of the given sample.
        factors: Factor of the row relative to the sample in its form.
        shifts: Shift of the row relative to the sample in its form.
    """

    rows: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    forms: list[int] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    shifts: list[float] = field(default_factory=list)


class SampleIndex:
    """The projections of samples in all of their forms, which finds the samples that equal rows of an array.

    Args:
        samples: The samples.
        forms: The forms.
        chosen: Numbers of the forms to use, None for all.
    """

    def __init__(
        self, samples: Rows, forms: Sequence[Form], chosen: set[int] | None = None
    ) -> None:
        self._samples, self.forms = samples, forms
        self._trees: list[tuple[ScaleFreeKeys | ValueKeys, cKDTree, np.ndarray, np.ndarray]] = []
        groups: dict[int, list[int]] = {}
        for number, form in enumerate(forms):
            if chosen is None or number in chosen:
                groups.setdefault(id(form.keys), []).append(number)
        for form_numbers in groups.values():
            keys = forms[form_numbers[0]].keys
            projected = [self._project(i) for i in form_numbers]
            sample_numbers = np.concatenate([positions for _, positions in projected])
            if len(sample_numbers):
                forms_of_keys = np.repeat(
                    form_numbers, [len(positions) for _, positions in projected]
                )
                tree = cKDTree(np.concatenate([projections for projections, _ in projected]))
                self._trees.append((keys, tree, sample_numbers, forms_of_keys))

    def _project(self, form_number: int) -> tuple[np.ndarray, np.ndarray]:
        """Project all samples in one form on random vectors. Return projections and sample indices."""
        form = self.forms[form_number]
        projections, positions = [np.empty((0, KEYS))], [np.empty(0, np.int64)]
        for chunk in split_rows(len(self._samples), len(form.scaling.factor)):
            samples = form.apply(self._samples.take(chunk))
            accepted = form.accepts(samples).nonzero().flatten()
            if not len(accepted):
                continue
            keys, _ = form.keys.project(samples[accepted], Precision(0.0))
            is_usable = keys.isfinite().all(1)
            projections.append(keys[is_usable].numpy())
            positions.append(chunk[accepted[is_usable]].numpy())
        return np.concatenate(projections), np.concatenate(positions)

    def match(
        self, rows: Tensor, precision: Precision, matches: RowMatches, first_row: int
    ) -> None:
        """Find the rows that match a sample of the user, and add them to ``matches``.

        Args:
            rows: The rows.
            precision: How exactly the rows are stored.
            matches: The matches so far.
            first_row: Number of the first of these rows in the array.
        """
        float_rows = rows if rows.dtype == torch.float32 else rows.float()
        first_match = len(matches.rows)
        for keys, tree, sample_numbers, form_numbers in self._trees:
            projections, radii = keys.project(float_rows, precision)
            reach = float(radii.max())
            low, high = torch.from_numpy(tree.mins) - reach, torch.from_numpy(tree.maxes) + reach
            is_near = ((projections >= low) & (projections <= high)).all(1)
            # A row that matches in one form is not compared again in the next form.
            is_near[torch.tensor(matches.rows[first_match:], dtype=torch.long) - first_row] = False
            near_rows = is_near.nonzero().flatten()
            if not len(near_rows):
                continue
            candidate_count = min(CANDIDATES, len(sample_numbers))
            distances, neighbors = tree.query(
                projections[near_rows].numpy(),
                list(range(1, candidate_count + 1)),
                p=np.inf,
                distance_upper_bound=reach,
            )
            is_candidate = distances <= radii[near_rows].numpy()[:, None]
            candidates = np.nonzero(is_candidate.any(1))[0]
            for batch in np.array_split(
                candidates, max(1, -(-len(candidates) * rows.shape[1] // CHUNK))
            ):
                if len(batch):
                    numbers = near_rows[torch.from_numpy(batch)]
                    candidate_pairs = np.where(is_candidate[batch], neighbors[batch], -1)
                    self._compare(
                        keys, rows[numbers].double(), numbers + first_row, candidate_pairs, precision,
                        matches, sample_numbers, form_numbers,
                    )  # fmt: skip

    def _compare(
        self,
        keys: ScaleFreeKeys | ValueKeys,
        rows: Tensor,
        row_numbers: Tensor,
        pairs: np.ndarray,
        precision: Precision,
        matches: RowMatches,
        sample_numbers: np.ndarray,
        form_numbers: np.ndarray,
    ) -> None:
        """Compare rows with samples of similar projections value by value, and add the matching pairs."""
        is_open = np.ones(len(rows), bool)
        used_forms = sorted(set(form_numbers[pairs[pairs >= 0]].tolist()))
        for form_number in used_forms:
            for candidate in range(pairs.shape[1]):
                form = self.forms[form_number]
                chosen = np.nonzero(
                    is_open
                    & (pairs[:, candidate] >= 0)
                    & (form_numbers[pairs[:, candidate]] == form_number)
                )[0]
                if not len(chosen):
                    continue
                positions = torch.from_numpy(sample_numbers[pairs[chosen, candidate]])
                originals = self._samples.take(positions)
                samples, stored = form.apply(originals), rows[torch.from_numpy(chosen)]
                agreement = keys.agree(stored, samples, precision)
                factors, shifts, _ = _fit(stored, samples)
                is_equal = (
                    (stored == samples).all(1) if form.is_unchanged else torch.zeros_like(agreement)
                )
                matching_rows = agreement.nonzero().flatten()
                is_open[chosen[matching_rows.numpy()]] = False
                matches.rows += row_numbers[torch.from_numpy(chosen)][matching_rows].tolist()
                matches.samples += positions[matching_rows].tolist()
                matches.forms += [form_number] * len(matching_rows)
                matches.equal += is_equal[matching_rows].tolist()
                matches.factors += factors[matching_rows].tolist()
                matches.shifts += shifts[matching_rows].tolist()


@dataclass(frozen=True)
class Arrangement:
    """A way in which the numbers of an array may be cut into rows, such as rows along the first dimension.

    Attributes:
        name: The arrangement in words, "" for rows in the last dimensions.
        width: Number of values of a row.
        count: Number of rows.
        is_transposed: Whether the numbers of a row have the distance ``count`` in the array.
    """

    name: str
    width: int
    count: int
    is_transposed: bool = False


def arrangements(shape: tuple[int, ...], d: int) -> list[Arrangement]:
    """Return the ways in which an array may hold rows of d values, or of up to ``MAX_EXTRA`` values more.

    Args:
        shape: Shape of the array in the order of storage.
        d: Number of values of a sample.

    Returns:
        The arrangements, () if the array cannot hold such rows.
    """
    sizes = [size for size in shape if size != 1]
    number_count = math.prod(sizes)
    if number_count < d or d < 2:
        return []
    ways = []
    for i in range(len(sizes)):
        width = math.prod(sizes[i:])
        if d <= width <= d + MAX_EXTRA:
            ways.append(Arrangement("", width, number_count // width))
    if len(sizes) == 1 and number_count > d and number_count % d == 0:
        ways.append(Arrangement("flattened", d, number_count // d))
    for i in range(1, len(sizes)):
        width = math.prod(sizes[:i])
        if d <= width <= d + MAX_EXTRA:
            ways.append(Arrangement("transposed", width, number_count // width, is_transposed=True))
    return ways


def read_rows(reader: NumberReader, way: Arrangement) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of an array in chunks, each with the index of its first row.

    Args:
        reader: Reads parts of the array.
        way: How the numbers form rows.

    Yields:
        Number of the first row, and the rows (m, width).
    """
    rows_per_chunk = max(1, CHUNK // way.width)
    for first in range(0, way.count, rows_per_chunk):
        chunk_end = min(first + rows_per_chunk, way.count)
        if not way.is_transposed:
            yield first, reader.read(first * way.width, chunk_end * way.width).view(-1, way.width)
        elif rows_per_chunk >= way.count:
            yield first, reader.read(0, way.count * way.width).view(way.width, -1).T
        else:
            starts = range(0, way.count * way.width, way.count)
            yield first, torch.stack([reader.read(s + first, s + chunk_end) for s in starts]).T


def match_array(
    index: SampleIndex, reader: NumberReader, d: int
) -> dict[tuple[Arrangement, int], RowMatches]:
    """Find samples in an array, for every way in which the array may be cut into rows.

    Args:
        index: The samples.
        reader: Reads parts of the array.
        d: Number of values of a sample.

    Returns:
        The matches. Arrangements without matches are left out.
    """
    matches: dict[tuple[Arrangement, int], RowMatches] = {}
    for way in arrangements(reader.shape, d):
        for first_row, numbers in read_rows(reader, way):
            if numbers.is_complex():
                return {}
            rows = numbers if numbers.dtype in (torch.float32, torch.float64) else numbers.float()
            if numbers.dtype in (torch.int64, torch.int32):
                rows = numbers.double()
            precision = measure_precision(numbers)
            for start in range(way.width - d + 1):
                window = matches.setdefault((way, start), RowMatches())
                index.match(rows[:, start : start + d], precision, window, first_row)
    return {key: window for key, window in matches.items() if window.rows}


def _fit(rows: Tensor, samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fit ``row = a * sample + b`` by least squares for each row and its sample. Return a, b and fit."""
    row_means, sample_means = rows.mean(1, keepdim=True), samples.mean(1, keepdim=True)
    centered = samples - sample_means
    squares = centered.square().sum(1, keepdim=True)
    factors = (centered * (rows - row_means)).sum(1, keepdim=True) / squares.clamp(min=1e-300)
    shifts = row_means - factors * sample_means
    return factors[:, 0], shifts[:, 0], factors * samples + shifts


def _count_reaches(samples: Tensor, limit: int) -> Tensor:
    """Return for each of n samples with d values whether it has at least ``limit`` distinct values."""
    # Most samples have enough distinct values in a few dozen columns, and sorting all columns is slow.
    column_step = max(1, samples.shape[1] // 64)
    is_enough = _count_distinct(samples[:, ::column_step]) >= limit
    if column_step > 1 and not is_enough.all():
        is_enough[~is_enough] = _count_distinct(samples[~is_enough]) >= limit
    return is_enough


def _count_distinct(samples: Tensor) -> Tensor:
    return (samples.sort(1).values.diff(dim=1) != 0).sum(1) + 1
