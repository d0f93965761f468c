"""The forms in which a file may store given samples, and samples for comparison that no file stores.

A program that saves samples with a model may have scaled them first, or moved the channels of images to the
end. A :class:`Scaling` describes one such change. An array of shuffled samples has the same values in every
column as the given samples, but in other rows. So a shuffled sample in a file is a match by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Shuffled samples per given sample. If no shuffled sample matches, one match has a p-value of 1 in 101.
SHUFFLES = 100
# Largest number of shuffled samples, to limit the time. There is at least one per given sample.
MAX_SHUFFLED = 100_000
# Largest number of shifts (shuffles times columns), to limit the memory to 64 MB.
MAX_SHIFTS = 1 << 24
# The values of a sample have comparable scales if the root mean square of no column exceeds that of the
# median column by this factor. Otherwise a few columns would decide a comparison of whole rows.
MAX_SCALE_RATIO = 100.0
CHANNELS = (3, 4)  # numbers of channels of color images
MIN_SIDE = 8  # smallest height and width of a color image that is given as a flat row
CHUNK = (
    1 << 21
)  # largest number of values that are converted to float64 together, to limit the memory
# Largest number of levels of a pixel, and number of samples whose values are looked at to find the levels.
MAX_LEVELS, MAX_LEVEL_SAMPLES = 4096, 100
BYTES = 255.0  # largest pixel value of an image with 8 bits


@dataclass(frozen=True, eq=False)
class Scaling:
    """A change of the values of a sample x to ``factor * x + shift``, column by column.

    Attributes:
        name: The change in words, "" for samples as given.
        factor: Factor of each column, (d,).
        shift: Summand of each column, (d,).
        magnitude: Largest value that occurs in the computation of each column, (d,). Rounding errors are a
            small share of it.
        is_homogeneous: Whether the columns have comparable scales after the change.
        is_scalar: Whether all columns have the same factor and the same shift.
    """

    name: str
    factor: Tensor
    shift: Tensor
    magnitude: Tensor
    is_homogeneous: bool
    is_scalar: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """Return n samples with d values after this change of values, such as a division by 255."""
        return x * self.factor + self.shift


@dataclass(frozen=True, eq=False)
class Layout:
    """An order of the values of a sample.

    Attributes:
        name: The order in words, "" for the order as given.
        order: Position in the given sample of each value, (d,). None for the order as given.
        channels: Channel of each value, (d,), None if the samples are no color images.
    """

    name: str = ""
    order: Tensor | None = None
    channels: Tensor | None = None


ALL = slice(None)  # all columns


class Rows(Protocol):
    """Samples as rows of a matrix. The rows are computed when they are needed."""

    def __len__(self) -> int: ...

    def take(self, positions: Tensor, columns: Tensor | slice = ALL) -> Tensor:
        """Return samples as the rows of a matrix.

        Args:
            positions: Numbers of the samples, (m,).
            columns: The columns to return, by default all.

        Returns:
            The rows (m, d) in float64.
        """
        ...


def split_rows(count: int, d: int) -> tuple[Tensor, ...]:
    """Split row indices into chunks, such that a chunk of rows with d values needs little memory.

    Args:
        count: Number of rows.
        d: Number of values of a row.

    Returns:
        The chunks, () if there are no rows.
    """
    return torch.arange(count).split(max(1, CHUNK // d)) if count else ()


class GivenRows:
    """The user's samples as rows of a matrix.

    Args:
        samples: The samples (n, *shape).
    """

    def __init__(self, samples: Tensor) -> None:
        self._flat = samples.detach().flatten(1)

    def __len__(self) -> int:
        return len(self._flat)

    def take(self, positions: Tensor, columns: Tensor | slice = ALL) -> Tensor:
        """Return samples as the rows of a matrix.

        Args:
            positions: Numbers of the samples, (m,).
            columns: The columns to return, by default all.

        Returns:
            The rows (m, d) in float64.
        """
        return self._flat[:, columns][positions].double()


class ShuffledRows:
    """Samples made by shuffling each column of the user's samples, so that no row is a real sample.

    Row i of a shuffle takes its column j from the given sample (i + s_j) mod n. If there are at least as many
    samples as columns, all s_j differ. Otherwise each s_j occurs equally often. The values of a single sample
    are permuted within the sample.

    Args:
        samples: The given samples (n, *shape).
        seed: Seed of the random shifts.
    """

    def __init__(self, samples: Tensor, seed: int = 0) -> None:
        self._flat = samples.detach().flatten(1)
        n, d = self._flat.shape
        generator = torch.Generator().manual_seed(seed)
        shuffles = max(1, min(SHUFFLES, MAX_SHUFFLED // n, MAX_SHIFTS // d))
        choices = d if n == 1 else n
        permutations = -(-d // choices)
        self._shifts = torch.stack(
            [
                torch.cat(
                    [
                        torch.randperm(choices, generator=generator, dtype=torch.int32)
                        for _ in range(permutations)
                    ]
                )[:d]
                for _ in range(shuffles)
            ]
        )

    def __len__(self) -> int:
        return len(self._shifts) * len(self._flat)

    def take(self, positions: Tensor, columns: Tensor | slice = ALL) -> Tensor:
        """Return samples as the rows of a matrix.

        Args:
            positions: Numbers of the samples, (m,).
            columns: The columns to return, by default all.

        Returns:
            The rows (m, d) in float64.
        """
        n = len(self._flat)
        if n == 1:
            return self._flat[0][self._shifts[:, columns][positions].long()].double()
        rows = (positions[:, None] % n + self._shifts[:, columns][positions // n]) % n
        return self._flat[:, columns].gather(0, rows).double()


def _count_levels(samples: Tensor) -> int:
    """Return the number that turns all values of samples into whole numbers, 1 if there is no small one.

    For example, the values 0, 1/16, ..., 1 are whole numbers after a multiplication by 16.
    """
    values = samples[:MAX_LEVEL_SAMPLES].double().unique()
    steps = values.diff()
    step = float(steps.min()) if len(steps) else 0.0
    if not 1 / MAX_LEVELS <= step < 1:
        return 1
    count = round(1 / step)
    scaled_values = values * count
    return count if bool(((scaled_values - scaled_values.round()).abs() <= 1e-4).all()) else 1


def list_scalings(
    samples: Tensor,
    scalers: Iterable[tuple[str, Tensor, Tensor]] = (),
    original_units: tuple[Tensor, Tensor] | None = None,
) -> list[Scaling]:
    """Return the changes of values with which a file may store samples, "no change" first.

    Args:
        samples: The given samples (n, *shape).
        scalers: Name, factor and shift of every scaler in the file, in the order of a pipeline.
        original_units: Factor and shift that convert the samples to their original units, None if they are
            not known.

    Returns:
        The changes.
    """
    flat_samples = samples.flatten(1)
    d = flat_samples.shape[1]
    column_statistics = _measure_columns(flat_samples)
    is_image = samples.ndim > 2
    scalings: list[Scaling] = []

    def add(name: str, factor: Tensor | float, shift: Tensor | float) -> None:
        full_factor = torch.as_tensor(factor, dtype=torch.float64).flatten().expand(d)
        full_shift = torch.as_tensor(shift, dtype=torch.float64).flatten().expand(d)
        magnitude = column_statistics.largest * full_factor.abs() + full_shift.abs()
        # The mean of (f x + s)^2 follows from the mean and the standard deviation of x.
        scaled_mean = column_statistics.mean * full_factor + full_shift
        sizes = (scaled_mean**2 + (column_statistics.deviation * full_factor) ** 2).sqrt()
        sizes = sizes[sizes > 0]
        is_homogeneous = is_image or bool(
            len(sizes) and sizes.max() <= MAX_SCALE_RATIO * sizes.median()
        )
        is_scalar = isinstance(factor, float) and isinstance(shift, float)
        scalings.append(
            Scaling(
                name,
                full_factor,
                full_shift,
                torch.where(magnitude > 0, magnitude, 1.0),
                is_homogeneous,
                is_scalar,
            )
        )

    add("", 1.0, 0.0)
    if original_units is not None:
        add("in original units", *original_units)
    for name, factor, shift in _compose(scalers, d):
        add(f"after {name}", factor, shift)
    add(f"divided by {BYTES:g}", 1 / BYTES, 0.0)
    add(f"multiplied by {BYTES:g}", BYTES, 0.0)
    add("scaled to [-1, 1]", 2.0, -1.0)
    add("scaled from 0 ... 255 to [-1, 1]", 2 / BYTES, -1.0)
    levels = _count_levels(flat_samples)
    if levels not in (1, BYTES):
        add(f"multiplied by {levels}", float(levels), 0.0)
    if len(flat_samples) < 2:
        return scalings
    overall_mean, overall_deviation = column_statistics.overall
    if overall_deviation > 0:
        name = "standardized with one mean and deviation"
        add(name, 1 / overall_deviation, -overall_mean / overall_deviation)
    deviation = torch.where(column_statistics.deviation > 0, column_statistics.deviation, 1.0)
    column_span = torch.where(
        column_statistics.high > column_statistics.low,
        column_statistics.high - column_statistics.low,
        1.0,
    )
    add("standardized by column", 1 / deviation, -column_statistics.mean / deviation)
    sample_deviation = deviation * math.sqrt(len(flat_samples) / (len(flat_samples) - 1))
    add(
        "standardized by column (n - 1)",
        1 / sample_deviation,
        -column_statistics.mean / sample_deviation,
    )
    add("scaled to [0, 1] by column", 1 / column_span, -column_statistics.low / column_span)
    add(
        "scaled to [-1, 1] by column", 2 / column_span, -2 * column_statistics.low / column_span - 1
    )
    add("minus the mean of each column", torch.ones(d), -column_statistics.mean)
    return scalings


def list_layouts(shape: tuple[int, ...]) -> list[Layout]:
    """Return the orders in which a file may store the values of a sample, the given order first.

    Args:
        shape: Shape of a sample.

    Returns:
        The orders.
    """
    d = math.prod(shape)
    positions = torch.arange(d)
    if len(shape) == 3 and shape[0] in CHANNELS:
        channels_first, channels_last = True, False
        channel_count = shape[0]
    elif len(shape) == 3 and shape[2] in CHANNELS:
        channels_first, channels_last = False, True
        channel_count = shape[2]
    elif len(shape) == 1 and d % 3 == 0 and math.isqrt(d // 3) ** 2 == d // 3 >= MIN_SIDE**2:
        channels_first = channels_last = True
        channel_count = 3
    else:
        return [Layout()]
    pixels = d // channel_count
    first, last = positions // pixels, positions % channel_count
    layouts = [Layout("", None, first if channels_first else last)]
    if channels_first:
        layouts.append(
            Layout("channels last", positions.view(channel_count, pixels).T.flatten(), last)
        )
    if channels_last:
        layouts.append(
            Layout("channels first", positions.view(pixels, channel_count).T.flatten(), first)
        )
    return layouts


@dataclass(frozen=True, eq=False)
class _Columns:
    mean: Tensor
    deviation: Tensor
    low: Tensor
    high: Tensor
    overall: tuple[float, float]

    @property
    def largest(self) -> Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())


def _measure_columns(flat: Tensor) -> _Columns:
    """Return the moments and ranges of the columns, computed in float64 a few rows at a time."""
    n, d = flat.shape
    mean, variance = torch.zeros(2, d, dtype=torch.float64)
    for chunk in split_rows(n, d):
        mean = mean + flat[chunk].double().sum(0) / n
    for chunk in split_rows(n, d):
        variance = variance + (flat[chunk].double() - mean).square().sum(0) / n
    overall_mean = float(mean.mean())
    overall_variance = float((variance + (mean - overall_mean) ** 2).mean())
    return _Columns(
        mean,
        variance.sqrt(),
        flat.amin(0).double(),
        flat.amax(0).double(),
        (overall_mean, math.sqrt(overall_variance)),
    )


def _compose(
    scalers: Iterable[tuple[str, Tensor, Tensor]], d: int
) -> list[tuple[str, Tensor, Tensor]]:
    """Return the changes of values that scalers make: each scaler alone, and all scalers of a pipeline."""
    fitting = [scaler for scaler in scalers if {scaler[1].numel(), scaler[2].numel()} <= {1, d}]
    composed_scalings = []
    total_name, total_factor, total_shift = "", torch.ones(()), torch.zeros(())
    for name, factor, shift in fitting:
        composed_scalings.append((name, factor, shift))
        total_factor, total_shift = total_factor * factor, total_shift * factor + shift
        if total_name:
            composed_scalings.append((f"{total_name} and {name}", total_factor, total_shift))
        total_name = f"{total_name} and {name}" if total_name else name
    return composed_scalings
