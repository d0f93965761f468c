"""Estimate the training rows of a classification forest by the mean of many tables that fit the forest.

A table fits if its records give every leaf the class weights and the number of records that the file stores.
Many tables fit the same forest, so no value is exact. A random walk visits tables that fit:

1. Find a table that fits (:mod:`.assignment`). If every leaf holds one class, search class by class.
2. Choose a few records of a class, and keep the values of all other records. Draw new values for the chosen
   records so that the table still fits. Repeat this for all records, many times.
3. Estimate each cell of the table by its mean over the visited tables. Round the value of a binary column.

Step 2 draws the values with perturb and maximize (Papandreou and Yuille 2011). A segment is a range of
possible values of a cell. The cost of a segment is ``-log(mass) - g``, where ``mass`` is the probability of
the segment and g is a Gumbel random variable. The solver chooses segments with the smallest sum of costs. If
no leaf restricts a cell, this rule draws each segment with probability ``mass``. Two estimates give the
probabilities:

- The thresholds of a column lie between its values, so values and thresholds have similar distributions. The
  distribution function of the thresholds maps a value to a coordinate u in [0, 1].
- The values of a class resemble each other. The density of u in a class is a mixture of three parts: Gaussian
  bumps at the records of the class in the current table, bumps at all other records, and the uniform density.

The walk needs no data. It learns the densities from the tables that it visits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from residuum.trees.assignment import (
    UNPLACED,
    Choices,
    ClassLeaves,
    Effort,
    NoTableError,
    Segments,
    solve,
)
from residuum.trees.forest import Booleans, Floats, Forest, Integers

SECONDS = 60.0  # default time limit in seconds of the search for tables that fit a forest
# The rows of the training table are not estimated if the number of records times the number of trees
# exceeds this.
MAX_ASSIGNMENTS = 50_000
# The rows of the training table are not estimated if the number of nodes times the number of columns
# exceeds this.
MAX_BOX_SIDES = 10_000_000
SWEEPS = 100  # default number of times that the random walk draws new values for all records
BURN_IN = 1 / 3  # the first tables of the random walk, this share of all, are left out of the mean
BLOCK = 3  # number of records for which one step of the walk draws new values
# Limit of the solver's work (in its own deterministic unit) in one step of the random walk.
STEP_WORK = 0.2
# Limit of the solver's work (in its own deterministic unit) in the first attempt to find a table. Each
# further attempt has twice the limit of the attempt before.
FIRST_WORK = 4.0
BINS = 64  # number of bins of the density of a column on [0, 1]
# Standard deviation of the Gaussian that each record adds to the density of a column, which is scaled to
# [0, 1].
BUMP = 0.1
# The density of a column is estimated for each class. All records of other classes together count as much
# as this number of records of the class.
CLASS_PRIOR = 2.0
# The density of a column is estimated from the records of the other classes, plus a uniform density. The
# uniform density counts as much as this number of records.
UNIFORM_PRIOR = 2.0
GRID = 1000  # number of points at which the density of a column's thresholds is computed
# Smallest bandwidth of the kernel density estimate of a column's thresholds, as a share of the column's
# range.
MIN_WIDTH = 0.05
# A uniform density is mixed into the density of a column's thresholds with this weight.
UNIFORM_SHARE = 0.1
BINARY_THRESHOLD = 0.5  # threshold of a column whose values are 0 and 1
MIN_MASS = 1e-9  # smallest probability of a range of values, so that its logarithm is finite


@dataclass(frozen=True)
class ClassTable:
    """Estimates of the training rows of a classification forest.

    Attributes:
        values: (records, columns) estimates, NaN if the forest has no threshold in the column and the range
            of the column is unknown.
        low: (records, columns) smallest value of each cell that agrees with one of the averaged tables.
        high: (records, columns) largest value of each cell that agrees with one of the averaged tables.
        tables: Number of tables over which the values are averaged. Each of them fits the forest.
    """

    values: Floats
    low: Floats
    high: Floats
    tables: int


def why_no_rows(forest: Forest, labels: Integers) -> str:
    """Return why the rows of a classification forest cannot be estimated, "" if they can be estimated.

    Args:
        forest: The forest.
        labels: (records,) class numbers, -1 for a label that is not determined.

    Returns:
        The reason as a clause without a period, or "".
    """
    if not len(labels):
        return "the file does not say which records each tree drew"
    if (labels < 0).any():
        return "the file does not determine all labels"
    draw_pairs = len(labels) * len(forest.trees)
    if draw_pairs > MAX_ASSIGNMENTS:
        return (
            f"the search handles at most {MAX_ASSIGNMENTS} pairs of a record and a tree; this forest has "
            f"{draw_pairs}"
        )
    node_column_pairs = sum(len(tree.left) for tree in forest.trees) * forest.columns
    if node_column_pairs > MAX_BOX_SIDES:
        return (
            f"the search handles at most {MAX_BOX_SIDES} pairs of a node and a column; this forest has "
            f"{node_column_pairs}"
        )
    return ""


def recover_class_table(
    forest: Forest,
    counts: Integers,
    labels: Integers,
    ranges: tuple[Floats, Floats] | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    sweeps: int = SWEEPS,
) -> ClassTable | None:
    """Estimate the training rows of a classification forest.

    The estimates are means over tables that fit the forest, which a random walk visits. If the walk ends
    before the time is over, the seed determines the result. If or-tools is not installed, the search raises a
    ``MissingExtraError``.

    Args:
        forest: The forest.
        counts: (trees, records) how often each tree drew each record.
        labels: (records,) class numbers, all of which are determined.
        ranges: Smallest and largest value of each column, if they are known to the attacker.
        seconds: Maximum wall-clock time of the search.
        seed: Seed of the random walk.
        progress: Function that is called with a line of text after each class and from time to time.
        sweeps: Number of times that the walk draws new values for all records, if the time allows.

    Returns:
        The estimates, or None if no table that fits the forest was found in time.
    """
    deadline = time.monotonic() + seconds
    leaves = ClassLeaves.build(forest, counts, labels)
    if leaves is None:
        return None
    scales = Scales.build(leaves.thresholds, ranges)
    try:
        walk = Walk.begin(leaves, scales, seed, deadline, progress)
    except NoTableError:
        return None
    if walk is None:
        return None
    visited_tables = walk.run(sweeps, deadline, progress)
    tables = np.stack(visited_tables[int(BURN_IN * len(visited_tables)) :])
    columns = np.arange(leaves.columns)
    mean_values = scales.value[columns, tables].mean(0)
    estimates = np.where(scales.is_binary, np.rint(mean_values), mean_values)
    first, last = tables.min(0), tables.max(0)
    return ClassTable(
        values=estimates,
        low=scales.low[columns, first],
        high=scales.high[columns, last],
        tables=len(tables),
    )


@dataclass(frozen=True)
class Scales:
    """The intervals between the thresholds of every column, with coordinates u in [0, 1].

    The coordinate u of a value is the estimated share of the column's values that are smaller. All columns
    have as many entries as the column with the most intervals.

    Attributes:
        u: (columns, intervals + 1) coordinates of the ends of the intervals.
        value: (columns, intervals) estimated mean of the values in each interval.
        low: (columns, intervals) smallest value in each interval.
        high: (columns, intervals) largest value in each interval.
        is_binary: (columns,) whether the values are 0 and 1.
    """

    u: Floats
    value: Floats
    low: Floats
    high: Floats
    is_binary: Booleans

    @classmethod
    def build(cls, thresholds: tuple[Floats, ...], ranges: tuple[Floats, Floats] | None) -> Scales:
        """Estimate the distribution of the values of every column by the density of its thresholds.

        Args:
            thresholds: For each column, its distinct thresholds in increasing order.
            ranges: Smallest and largest value of each column, if known.

        Returns:
            The intervals of all columns with their coordinates.
        """
        shape = len(thresholds), max((len(t) for t in thresholds), default=0) + 1
        coordinates = np.ones((shape[0], shape[1] + 1))
        value, low, high = (np.zeros(shape) for _ in range(3))
        is_binary = np.zeros(shape[0], dtype=bool)
        for f, cuts in enumerate(thresholds):
            interval_count = len(cuts) + 1
            known_range = None if ranges is None else (float(ranges[0][f]), float(ranges[1][f]))
            lower, upper = _ends(cuts, known_range)
            mass, value[f, :interval_count] = _interval_masses(cuts, lower, upper)
            coordinates[f, : interval_count + 1] = np.concatenate([[0.0], np.cumsum(mass)])
            coordinates[f, interval_count] = 1.0
            value_limits = (-np.inf, np.inf) if known_range is None else (lower, upper)
            low[f, :interval_count] = np.concatenate([value_limits[:1], cuts])
            high[f, :interval_count] = np.concatenate([cuts, value_limits[1:]])
            is_binary[f] = (
                interval_count == 2 and cuts[0] == BINARY_THRESHOLD and lower >= 0 and upper <= 1
            )
            if is_binary[f]:
                for array in (value, low, high):
                    array[f, :2] = 0.0, 1.0
        return cls(coordinates, value, low, high, is_binary)

    def interval(self, column: Integers, u: Floats) -> Integers:
        """Return the interval of a column in which each of m coordinates lies.

        Args:
            column: (m,) number of the column of each coordinate.
            u: (m,) coordinates in [0, 1].

        Returns:
            (m,) number of the interval between thresholds of the column.
        """
        return np.asarray((self.u[column, 1:-1] <= u[:, None]).sum(1))


def _ends(cuts: Floats, ends: tuple[float, float] | None) -> tuple[float, float]:
    """Return the smallest and the largest value of a column with the thresholds ``cuts``.

    If these values are unknown, assume that each lies half the range of the thresholds beyond the last
    threshold.
    """
    if not len(cuts):
        return ends or (np.nan, np.nan)
    margin = (cuts[-1] - cuts[0]) / 2 or BINARY_THRESHOLD
    lower, upper = ends or (cuts[0] - margin, cuts[-1] + margin)
    return min(lower, cuts[0]), max(upper, cuts[-1])


def _interval_masses(cuts: Floats, lower: float, upper: float) -> tuple[Floats, Floats]:
    """Return the probability of each interval between thresholds, and the mean value in each interval.

    The probabilities come from a kernel density estimate of the thresholds.

    Args:
        cuts: The thresholds of a column, ascending.
        lower: Smallest value of the column.
        upper: Largest value of the column.

    Returns:
        (intervals,) probabilities and (intervals,) mean values.
    """
    value_range = upper - lower
    if not len(cuts) or not value_range > 0:
        midpoints = (np.concatenate([[lower], cuts]) + np.concatenate([cuts, [upper]])) / 2
        return np.full(len(cuts) + 1, 1 / (len(cuts) + 1)), midpoints
    grid = lower + value_range * (np.arange(GRID) + 0.5) / GRID
    quarter, three_quarters = np.quantile(cuts, [0.25, 0.75])
    threshold_spread = min(cuts.std(), (three_quarters - quarter) / 1.34) or cuts.std()
    bandwidth = max(threshold_spread * len(cuts) ** -0.2, MIN_WIDTH * value_range)
    density = np.full(GRID, UNIFORM_SHARE / value_range)
    for cut in cuts:
        gaussian_kernel = np.exp(-0.5 * ((grid - cut) / bandwidth) ** 2)
        density += gaussian_kernel / (bandwidth * np.sqrt(2 * np.pi) * len(cuts))
    interval_of_point = np.searchsorted(cuts, grid)
    mass = np.bincount(interval_of_point, density, len(cuts) + 1)
    weighted_sum = np.bincount(interval_of_point, density * grid, len(cuts) + 1)
    interval_edges = np.concatenate([[lower], cuts, [upper]])
    value = np.where(
        mass > 0,
        weighted_sum / np.where(mass > 0, mass, 1.0),
        (interval_edges[1:] + interval_edges[:-1]) / 2,
    )
    mass = np.maximum(mass, 1e-6 * mass.sum())
    return mass / mass.sum(), value


def _bumps() -> Floats:
    """Return Gaussian distributions on [0, 1] as probabilities (bins, bins), one row centered at each bin."""
    center = (np.arange(BINS) + 0.5) / BINS
    bump = np.exp(-0.5 * ((center[:, None] - center) / BUMP) ** 2)
    return np.asarray(bump / bump.sum(1, keepdims=True))


@dataclass
class Walk:
    """A random walk among training tables that fit a forest.

    Attributes:
        leaves: The leaves of the forest.
        scales: The intervals of the columns.
        rng: Generator of the random numbers.
        intervals: (records, columns) number of the interval of each value in the current table.
        places: (records, trees) leaf of each record in each tree.
        bumps: (bins, bins) Gaussian bump at each of the equal bins that divide [0, 1]. Each row sums to 1.
        bins: (records, columns) bin that contains the coordinate of each value.
        densities: (classes, columns, bins) sum of the bumps of the records of each class.
    """

    leaves: ClassLeaves
    scales: Scales
    rng: np.random.Generator
    intervals: Integers
    places: Integers
    bumps: Floats
    bins: Integers
    densities: Floats

    @classmethod
    def begin(
        cls,
        leaves: ClassLeaves,
        scales: Scales,
        seed: int,
        deadline: float,
        progress: Callable[[str], None],
    ) -> Walk | None:
        """Find a training table that fits the forest, and begin a random walk at this table.

        Args:
            leaves: The leaves of the forest.
            scales: The intervals of the columns.
            seed: Seed of the walk.
            deadline: Value of ``time.monotonic()`` at which the search ends.
            progress: Function that is called with a line of text.

        Returns:
            The walk, or None if no table was found in time.
        """
        shape = leaves.records, leaves.columns
        walk = cls(
            leaves=leaves,
            scales=scales,
            rng=np.random.default_rng(seed),
            intervals=np.zeros(shape, dtype=np.int64),
            places=np.full((leaves.records, len(leaves.counts)), UNPLACED),
            bumps=_bumps(),
            bins=np.zeros(shape, dtype=np.int64),
            densities=np.zeros((leaves.class_weight.shape[1], leaves.columns, BINS)),
        )
        record_groups = leaves.groups
        for number, members in enumerate(record_groups):
            work_limit = FIRST_WORK
            # The time of the solver depends strongly on its seed, so several short attempts are faster than a
            # long one.
            while not walk.place(members, deadline, work_limit):
                if time.monotonic() >= deadline:
                    return None
                work_limit *= 2
            progress(
                f"group {number + 1} of {len(record_groups)}: the places of {len(members)} records fit"
            )
        return walk if leaves.fits(walk.intervals) else None

    def run(self, sweeps: int, deadline: float, progress: Callable[[str], None]) -> list[Integers]:
        """Visit tables that fit the forest, until the time is over.

        Args:
            sweeps: Number of times that the walk draws new values for all records, if the time allows.
            deadline: Value of ``time.monotonic()`` at which the walk ends.
            progress: Function that is called with a line of text.

        Returns:
            The visited tables. Each is a (records, columns) array of the intervals in which the values lie.
        """
        tables = [self.intervals.copy()]
        while len(tables) <= sweeps:
            for members in self.leaves.groups:
                member_order = self.rng.permutation(members)
                for start in range(0, len(member_order), BLOCK):
                    if time.monotonic() >= deadline:
                        return tables
                    self.place(np.sort(member_order[start : start + BLOCK]), deadline)
            tables.append(self.intervals.copy())
            if len(tables) % 10 == 0:
                progress(f"{len(tables)} tables that fit the forest")
        return tables

    def place(self, members: Integers, deadline: float, work: float = STEP_WORK) -> bool:
        """Draw new values for some records of the table, and keep the values of all other records.

        Args:
            members: Numbers of the records that receive new values.
            deadline: Value of ``time.monotonic()`` at which the search ends.
            work: Limit of the solver's deterministic time.

        Returns:
            Whether the solver found values with which the table fits the forest.
        """
        is_first_table = bool((self.places[members] == UNPLACED).any())
        choices = Choices.build(self.leaves, members, self.places)
        segments = Segments.build(choices, choices.cuts())
        distribution_functions = self.cumulative_densities(members)
        function_index = segments.member, segments.column
        start_level = _value_at(
            distribution_functions, *function_index, self.scales.u[segments.column, segments.first]
        )
        end_level = _value_at(
            distribution_functions,
            *function_index,
            self.scales.u[segments.column, segments.last + 1],
        )
        gumbel_noise = self.rng.gumbel(size=len(start_level))
        costs = -np.log(np.maximum(end_level - start_level, MIN_MASS)) - gumbel_noise
        solver_limits = Effort(
            seconds=deadline - time.monotonic(),
            work=work,
            seed=int(self.rng.integers(2**31 - 1)),
        )
        hint = None if is_first_table else self.intervals[members]
        segment_of_value = solve(
            choices, segments, None if is_first_table else costs, solver_limits, hint
        )
        if segment_of_value is None:
            return False
        chosen_segments = segment_of_value.ravel()
        member, column = segments.member[chosen_segments], segments.column[chosen_segments]
        drawn_levels = self.rng.uniform(start_level[chosen_segments], end_level[chosen_segments])
        coordinates = _inverse(distribution_functions, member, column, drawn_levels)
        interval = self.scales.interval(column, coordinates)
        interval = np.clip(
            interval, segments.first[chosen_segments], segments.last[chosen_segments]
        )
        self._move(members, interval.reshape(segment_of_value.shape))
        return True

    def cumulative_densities(self, members: Integers) -> Floats:
        """Compute the distribution functions from which new values of some records are drawn.

        Args:
            members: Numbers of these records. The densities are computed from all other records.

        Returns:
            (members, columns, bins + 1) values of each distribution function at the ends of the bins.
        """
        densities = self.densities.copy()
        for i in members:
            label = self.leaves.labels[i]
            if self.places[i, 0] != UNPLACED:
                densities[label] -= self.bumps[self.bins[i]]
        cumulative = np.empty((len(members), self.leaves.columns, BINS + 1))
        for label in np.unique(self.leaves.labels[members]):
            other_classes = densities.sum(0) - densities[label] + UNIFORM_PRIOR / BINS
            other_classes /= other_classes.sum(-1, keepdims=True)
            density = densities[label] + CLASS_PRIOR * other_classes
            density /= density.sum(-1, keepdims=True)
            has_label = self.leaves.labels[members] == label
            cumulative[has_label] = np.concatenate(
                [np.zeros((len(density), 1)), np.cumsum(density, 1)], 1
            )
        return cumulative

    def _move(self, members: Integers, intervals: Integers) -> None:
        """Change the values of some records in the current table, and update leaves and densities."""
        columns = np.arange(self.leaves.columns)
        coordinates = (
            self.scales.u[columns, intervals] + self.scales.u[columns, intervals + 1]
        ) / 2
        bins = np.minimum((coordinates * BINS).astype(np.int64), BINS - 1)
        for i, new_bins in zip(members, bins, strict=True):
            label = self.leaves.labels[i]
            if self.places[i, 0] != UNPLACED:
                self.densities[label] -= self.bumps[self.bins[i]]
            self.densities[label] += self.bumps[new_bins]
        self.bins[members] = bins
        self.intervals[members] = intervals
        self.places[members] = self.leaves.place(intervals)


def _value_at(cumulative: Floats, member: Integers, column: Integers, u: Floats) -> Floats:
    """Evaluate distribution functions at m coordinates, one function for each coordinate.

    Args:
        cumulative: (members, columns, bins + 1) values of distribution functions at the ends of the
            bins of [0, 1].
        member: (m,) first index into ``cumulative`` of each coordinate.
        column: (m,) second index into ``cumulative`` of each coordinate.
        u: (m,) coordinates in [0, 1].

    Returns:
        (m,) values, interpolated within the bins.
    """
    bin_position = u * BINS
    bin_number = np.clip(bin_position.astype(np.int64), 0, BINS - 1)
    lower, upper = (
        cumulative[member, column, bin_number],
        cumulative[member, column, bin_number + 1],
    )
    return np.asarray(lower + (bin_position - bin_number) * (upper - lower))


def _inverse(cumulative: Floats, member: Integers, column: Integers, level: Floats) -> Floats:
    """Invert distribution functions: find the coordinates at which they have given values.

    Args:
        cumulative: (members, columns, bins + 1) values of distribution functions at the ends of the
            bins of [0, 1].
        member: (m,) first index into ``cumulative`` of each value.
        column: (m,) second index into ``cumulative`` of each value.
        level: (m,) values of the distribution functions.

    Returns:
        (m,) coordinates in [0, 1], interpolated within the bins.
    """
    functions = cumulative[member, column]
    bin_number = np.clip((functions <= level[:, None]).sum(1) - 1, 0, BINS - 1)
    function_numbers = np.arange(len(functions))
    lower, upper = (
        functions[function_numbers, bin_number],
        functions[function_numbers, bin_number + 1],
    )
    share_of_bin = np.clip((level - lower) / np.maximum(upper - lower, 1e-300), 0.0, 1.0)
    return np.asarray((bin_number + share_of_bin) / BINS)
