"""The rows of a classification forest: tables that reproduce every leaf, and their mean.

Many tables fit the same forest, so no value is exact. A random walk among fitting tables shows what they have
in common:

1. Find a table that fits (:mod:`.assignment`), class by class if every leaf holds one class.
2. Choose a few records of a class, and keep all others. Among all ways to place these records, so that every
   leaf keeps its weights and its size, draw one. Repeat this for all records, many times.
3. The estimate of a cell is its mean over the tables of the walk. The value of a binary column is rounded.

Step 2 draws places by their probability (perturb and maximize, Papandreou and Yuille 2011): the cost of a
segment is ``-log(mass) - g`` with a Gumbel variable g, and the solver minimizes the sum. If no leaf restricts
a value, this draws its segment with probability ``mass``. The mass says where values of a class lie:

- Thresholds are midpoints between values, so the distribution of values resembles that of the thresholds. The
  coordinate u of a column is its estimated distribution function, in which values are uniform on [0, 1].
- Values of a class resemble each other. The density of u in a class is a mixture of bumps at the records of
  the class in the current table, of bumps at all other records, and of the uniform density.

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

SECONDS = 60.0  # default time of the search
MAX_ASSIGNMENTS = 50_000  # maximum number of records times trees
MAX_BOX_SIDES = 10_000_000  # maximum number of leaves times columns
SWEEPS = 100  # default number of times that the walk moves all records
BURN_IN = 1 / 3  # share of the first tables of the walk that the mean omits
BLOCK = 3  # number of records that the walk moves together
STEP_WORK = 0.2  # limit of one step of the walk in the solver's unit of work
# Limit of the first attempt at a first table, in the same unit. Further attempts have twice as much each.
FIRST_WORK = 4.0
BINS = 64  # bins of the densities of u
BUMP = 0.1  # standard deviation of a bump in u
CLASS_PRIOR = 2.0  # weight of the records of other classes in the density of a class, in records
UNIFORM_PRIOR = 2.0  # weight of the uniform density among the records of other classes, in records
GRID = 1000  # points at which the density of thresholds is computed
MIN_WIDTH = (
    0.05  # smallest bandwidth of the density of thresholds, as a share of the column's range
)
UNIFORM_SHARE = 0.1  # weight of the uniform density, compared with that of the thresholds
BINARY_THRESHOLD = 0.5
MIN_MASS = 1e-9


@dataclass(frozen=True)
class ClassTable:
    """Estimates of the training rows of a classification forest.

    Attributes:
        values: (records, columns) estimates, NaN if neither the file nor the known ranges limit the column.
        low: (records, columns) smallest values that fitting tables of the walk allow.
        high: (records, columns) largest values that fitting tables of the walk allow.
        tables: Number of fitting tables over which the values are averaged.
    """

    values: Floats
    low: Floats
    high: Floats
    tables: int


def why_no_rows(forest: Forest, labels: Integers) -> str:
    """Return why the rows of a classification forest are not searched, "" if they are.

    Args:
        forest: The forest.
        labels: (records,) class numbers, -1 for a label that is not determined.

    Returns:
        The reason.
    """
    if not len(labels):
        return "the file does not say which records each tree drew"
    if (labels < 0).any():
        return "the file does not determine all labels"
    assignments = len(labels) * len(forest.trees)
    if assignments > MAX_ASSIGNMENTS:
        return (
            f"the search handles at most {MAX_ASSIGNMENTS} pairs of a record and a tree; this forest has "
            f"{assignments}"
        )
    sides = sum(len(tree.left) for tree in forest.trees) * forest.columns
    if sides > MAX_BOX_SIDES:
        return (
            f"the search handles at most {MAX_BOX_SIDES} pairs of a node and a column; this forest has "
            f"{sides}"
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

    The result depends on the seed alone if the walk ends before the time is over. Without or-tools the search
    raises a ``MissingExtraError``.

    Args:
        forest: The forest.
        counts: (trees, records) how often each tree drew each record.
        labels: (records,) class numbers, all of which are determined.
        ranges: Smallest and largest value of each column, if they are known to the attacker.
        seconds: Wall-clock time of the search.
        seed: Seed of the walk.
        progress: Function that is called with a line of text after each class and from time to time.
        sweeps: Number of times that the walk moves all records, if the time allows.

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
    mean = scales.value[columns, tables].mean(0)
    values = np.where(scales.is_binary, np.rint(mean), mean)
    first, last = tables.min(0), tables.max(0)
    return ClassTable(
        values=values,
        low=scales.low[columns, first],
        high=scales.high[columns, last],
        tables=len(tables),
    )


@dataclass(frozen=True)
class Scales:
    """The intervals of all columns. Rows have the length of the longest column.

    Attributes:
        u: (columns, intervals + 1) coordinates of the ends of the intervals.
        value: (columns, intervals) estimate of a value in each interval.
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
        """Estimate where the values of columns lie, by the density of their thresholds.

        Args:
            thresholds: For each column, its distinct thresholds in increasing order.
            ranges: Smallest and largest value of each column, if known.

        Returns:
            The scales.
        """
        shape = len(thresholds), max((len(t) for t in thresholds), default=0) + 1
        u = np.ones((shape[0], shape[1] + 1))
        value, low, high = (np.zeros(shape) for _ in range(3))
        is_binary = np.zeros(shape[0], dtype=bool)
        for f, cuts in enumerate(thresholds):
            n = len(cuts) + 1
            ends = None if ranges is None else (float(ranges[0][f]), float(ranges[1][f]))
            lower, upper = _ends(cuts, ends)
            mass, value[f, :n] = _interval_masses(cuts, lower, upper)
            u[f, : n + 1] = np.concatenate([[0.0], np.cumsum(mass)])
            u[f, n] = 1.0
            outer = (-np.inf, np.inf) if ends is None else (lower, upper)
            low[f, :n] = np.concatenate([outer[:1], cuts])
            high[f, :n] = np.concatenate([cuts, outer[1:]])
            is_binary[f] = n == 2 and cuts[0] == BINARY_THRESHOLD and lower >= 0 and upper <= 1
            if is_binary[f]:
                for array in (value, low, high):
                    array[f, :2] = 0.0, 1.0
        return cls(u, value, low, high, is_binary)

    def interval(self, column: Integers, u: Floats) -> Integers:
        """Return the interval of each coordinate in its column.

        Args:
            column: (m,) columns.
            u: (m,) coordinates.

        Returns:
            (m,) numbers of intervals.
        """
        return np.asarray((self.u[column, 1:-1] <= u[:, None]).sum(1))


def _ends(cuts: Floats, ends: tuple[float, float] | None) -> tuple[float, float]:
    """Return the ends of a column. If they are unknown, the thresholds are extended by half a column."""
    if not len(cuts):
        return ends or (np.nan, np.nan)
    margin = (cuts[-1] - cuts[0]) / 2 or BINARY_THRESHOLD
    lower, upper = ends or (cuts[0] - margin, cuts[-1] + margin)
    return min(lower, cuts[0]), max(upper, cuts[-1])


def _interval_masses(cuts: Floats, lower: float, upper: float) -> tuple[Floats, Floats]:
    """Return the probability of each interval of a column, and the mean value in each interval."""
    width = upper - lower
    if not len(cuts) or not width > 0:
        middle = (np.concatenate([[lower], cuts]) + np.concatenate([cuts, [upper]])) / 2
        return np.full(len(cuts) + 1, 1 / (len(cuts) + 1)), middle
    grid = lower + width * (np.arange(GRID) + 0.5) / GRID
    quarter, three_quarters = np.quantile(cuts, [0.25, 0.75])
    deviation = min(cuts.std(), (three_quarters - quarter) / 1.34) or cuts.std()
    bandwidth = max(deviation * len(cuts) ** -0.2, MIN_WIDTH * width)
    density = np.full(GRID, UNIFORM_SHARE / width)
    for cut in cuts:
        bump = np.exp(-0.5 * ((grid - cut) / bandwidth) ** 2)
        density += bump / (bandwidth * np.sqrt(2 * np.pi) * len(cuts))
    interval = np.searchsorted(cuts, grid)
    mass = np.bincount(interval, density, len(cuts) + 1)
    total = np.bincount(interval, density * grid, len(cuts) + 1)
    edges = np.concatenate([[lower], cuts, [upper]])
    value = np.where(mass > 0, total / np.where(mass > 0, mass, 1.0), (edges[1:] + edges[:-1]) / 2)
    mass = np.maximum(mass, 1e-6 * mass.sum())
    return mass / mass.sum(), value


def _bumps() -> Floats:
    """Return (bins, bins) the density of u around each bin."""
    center = (np.arange(BINS) + 0.5) / BINS
    bump = np.exp(-0.5 * ((center[:, None] - center) / BUMP) ** 2)
    return np.asarray(bump / bump.sum(1, keepdims=True))


@dataclass
class Walk:
    """A random walk among tables that fit a forest.

    Attributes:
        leaves: The leaves of the forest.
        scales: The intervals of the columns.
        rng: Generator of the random numbers.
        intervals: (records, columns) the interval of each value in the current table.
        places: (records, trees) the leaves of each record.
        bumps: (bins, bins) the density of u around each bin.
        bins: (records, columns) the bin of each value.
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
        """Find a table that fits.

        Args:
            leaves: The leaves of the forest.
            scales: The intervals of the columns.
            seed: Seed of the walk.
            deadline: Time at which the search ends.
            progress: Function that is called with a line of text.

        Returns:
            The walk at this table, or None if no table was found in time.
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
        groups = leaves.groups
        for number, members in enumerate(groups):
            work = FIRST_WORK
            # The time of the solver varies much with its seed, so several short attempts are faster.
            while not walk.place(members, deadline, work):
                if time.monotonic() >= deadline:
                    return None
                work *= 2
            progress(
                f"group {number + 1} of {len(groups)}: the places of {len(members)} records fit"
            )
        return walk if leaves.fits(walk.intervals) else None

    def run(self, sweeps: int, deadline: float, progress: Callable[[str], None]) -> list[Integers]:
        """Walk, until the time is over.

        Args:
            sweeps: Number of times that the walk moves all records, if the time allows.
            deadline: Time at which the walk ends.
            progress: Function that is called with a line of text.

        Returns:
            (records, columns) the intervals of the values in each table, which fits the forest.
        """
        tables = [self.intervals.copy()]
        while len(tables) <= sweeps:
            for members in self.leaves.groups:
                order = self.rng.permutation(members)
                for start in range(0, len(order), BLOCK):
                    if time.monotonic() >= deadline:
                        return tables
                    self.place(np.sort(order[start : start + BLOCK]), deadline)
            tables.append(self.intervals.copy())
            if len(tables) % 10 == 0:
                progress(f"{len(tables)} tables that fit the forest")
        return tables

    def place(self, members: Integers, deadline: float, work: float = STEP_WORK) -> bool:
        """Draw places of records, and keep all others.

        Args:
            members: The records.
            deadline: Time at which the search for places ends.
            work: Limit of the search in the solver's unit of work.

        Returns:
            Whether places were found.
        """
        is_first = bool((self.places[members] == UNPLACED).any())
        choices = Choices.build(self.leaves, members, self.places)
        segments = Segments.build(choices, choices.cuts())
        cumulative = self.cumulative_densities(members)
        row = segments.member, segments.column
        start = _value_at(cumulative, *row, self.scales.u[segments.column, segments.first])
        end = _value_at(cumulative, *row, self.scales.u[segments.column, segments.last + 1])
        noise = self.rng.gumbel(size=len(start))
        costs = -np.log(np.maximum(end - start, MIN_MASS)) - noise
        effort = Effort(
            seconds=deadline - time.monotonic(),
            work=work,
            seed=int(self.rng.integers(2**31 - 1)),
        )
        hint = None if is_first else self.intervals[members]
        places = solve(choices, segments, None if is_first else costs, effort, hint)
        if places is None:
            return False
        segment = places.ravel()
        member, column = segments.member[segment], segments.column[segment]
        level = self.rng.uniform(start[segment], end[segment])
        u = _inverse(cumulative, member, column, level)
        interval = self.scales.interval(column, u)
        interval = np.clip(interval, segments.first[segment], segments.last[segment])
        self._move(members, interval.reshape(places.shape))
        return True

    def cumulative_densities(self, members: Integers) -> Floats:
        """Return the distribution functions from which values of records are drawn.

        Args:
            members: The records, which have no influence on their own densities.

        Returns:
            (members, columns, bins + 1) values of the distribution function at the ends of the bins.
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
            rows = self.leaves.labels[members] == label
            cumulative[rows] = np.concatenate(
                [np.zeros((len(density), 1)), np.cumsum(density, 1)], 1
            )
        return cumulative

    def _move(self, members: Integers, intervals: Integers) -> None:
        """Put new intervals of records into the current table."""
        columns = np.arange(self.leaves.columns)
        u = (self.scales.u[columns, intervals] + self.scales.u[columns, intervals + 1]) / 2
        bins = np.minimum((u * BINS).astype(np.int64), BINS - 1)
        for i, row in zip(members, bins, strict=True):
            label = self.leaves.labels[i]
            if self.places[i, 0] != UNPLACED:
                self.densities[label] -= self.bumps[self.bins[i]]
            self.densities[label] += self.bumps[row]
        self.bins[members] = bins
        self.intervals[members] = intervals
        self.places[members] = self.leaves.place(intervals)


def _value_at(cumulative: Floats, member: Integers, column: Integers, u: Floats) -> Floats:
    """Return the values of distribution functions at coordinates."""
    position = u * BINS
    index = np.clip(position.astype(np.int64), 0, BINS - 1)
    lower, upper = cumulative[member, column, index], cumulative[member, column, index + 1]
    return np.asarray(lower + (position - index) * (upper - lower))


def _inverse(cumulative: Floats, member: Integers, column: Integers, level: Floats) -> Floats:
    """Return the coordinates at which distribution functions have the values ``level``."""
    rows = cumulative[member, column]
    index = np.clip((rows <= level[:, None]).sum(1) - 1, 0, BINS - 1)
    number = np.arange(len(rows))
    lower, upper = rows[number, index], rows[number, index + 1]
    share = np.clip((level - lower) / np.maximum(upper - lower, 1e-300), 0.0, 1.0)
    return np.asarray((index + share) / BINS)
