"""Which leaves the training records of a classification forest may fill: a constraint model.

The labels Y and the bootstrap counts c_ti are known (:mod:`.labels`, :mod:`.bootstrap`). The thresholds of
column f cut the column into intervals 0, 1, ..., K_f. A table is a number z_if for each record and column,
and a leaf is a box of intervals. Let ``l_itv`` be 1 if record i lies in leaf v of tree t. A table fits the
forest if every leaf holds its stored weight of every class and its stored number of distinct records:

    sum_v l_itv = 1                                    for every record i that tree t drew
    sum_i c_ti l_itv [Y_i = k] = weight of class k     for every leaf v and class k
    sum_i l_itv = number of distinct records           for every leaf v
    l_itv = 1  implies  low_vf <= z_if <= high_vf      for every column f

The value z_if is stored as order literals ``b_ifc = [z_if <= c]``, so each implication has two literals. The
CP-SAT solver of or-tools solves the model. Most models are small: the leaves of a fully grown tree hold one
class, so the classes are independent, and a step of a walk moves only a few records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from residuum.errors import MissingExtraError
from residuum.trees.forest import Booleans, Floats, Forest, Integers

UNPLACED = -1  # leaf of a record that has no place yet
ROUNDING = 1e-3  # weights of a class are whole numbers up to this error
COST_STEPS = 100  # the solver minimizes whole numbers, so costs are multiplied by this number


def import_solver() -> Any:
    """Return the module of the constraint solver.

    Raises:
        MissingExtraError: If or-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise MissingExtraError(
            "The rows of a classification forest need the extra 'trees', which is not installed.",
            'In a clone of residuum, run pip install ".[trees]".',
        ) from None
    return cp_model


class NoTableError(Exception):
    """No places of the records agree with what the leaves hold."""


@dataclass(frozen=True)
class ClassLeaves:
    """The leaves of a classification forest as boxes of intervals, with what they hold.

    Attributes:
        thresholds: For each column, its distinct thresholds in increasing order.
        low: (leaves, columns) first interval of each leaf.
        high: (leaves, columns) last interval of each leaf.
        class_weight: (leaves, classes) weight of each class in each leaf.
        size: (leaves,) number of distinct records in each leaf, None if the file does not say.
        tree_starts: Number of the first leaf of each tree, then the number of all leaves.
        counts: (trees, records) how often each tree drew each record.
        labels: (records,) class numbers.
    """

    thresholds: tuple[Floats, ...]
    low: Integers
    high: Integers
    class_weight: Integers
    size: Integers | None
    tree_starts: Integers
    counts: Integers
    labels: Integers

    @classmethod
    def build(cls, forest: Forest, counts: Integers, labels: Integers) -> ClassLeaves | None:
        """Collect the leaves of a forest.

        Args:
            forest: The forest, which stores the weights of its leaves.
            counts: (trees, records) how often each tree drew each record.
            labels: (records,) class numbers.

        Returns:
            The leaves, or None if the weights of classes in the leaves are not whole numbers.
        """
        structure, columns = forest.structure, forest.columns
        thresholds = tuple(
            np.unique(structure.threshold[structure.feature == f]) for f in range(columns)
        )
        leaves = len(structure.leaf_tree)
        low = np.zeros((leaves, columns), dtype=np.int64)
        high = np.tile([len(values) for values in thresholds], (leaves, 1))
        for first, middle, last, f, threshold in zip(
            structure.first,
            structure.middle,
            structure.last,
            structure.feature,
            structure.threshold,
            strict=True,
        ):
            cut = int(np.searchsorted(thresholds[f], threshold))
            high[first:middle, f] = np.minimum(high[first:middle, f], cut)
            low[middle:last, f] = np.maximum(low[middle:last, f], cut + 1)
        nodes = list(zip(structure.leaf_tree.tolist(), structure.leaf_node.tolist(), strict=True))
        trees = forest.trees
        weight = [0.0 if (w := trees[t].weight) is None else float(w[v]) for t, v in nodes]
        values = np.stack([trees[t].value[v] for t, v in nodes])
        with np.errstate(invalid="ignore", divide="ignore"):
            class_weight = values / values.sum(1, keepdims=True) * np.asarray(weight)[:, None]
        if not (np.abs(class_weight - np.rint(class_weight)) <= ROUNDING).all():  # also if NaN
            return None
        sizes = [-1 if (c := trees[t].count) is None else int(c[v]) for t, v in nodes]
        return cls(
            thresholds=thresholds,
            low=low,
            high=high,
            class_weight=np.rint(class_weight).astype(np.int64),
            size=None if -1 in sizes else np.asarray(sizes),
            tree_starts=structure.leaf_starts,
            counts=counts,
            labels=labels,
        )

    @property
    def records(self) -> int:
        """Number of training records."""
        return len(self.labels)

    @property
    def columns(self) -> int:
        """Number of columns."""
        return len(self.thresholds)

    @property
    def groups(self) -> list[Integers]:
        """Groups of records that share no leaf: the classes, or all records if leaves are mixed."""
        if ((self.class_weight > 0).sum(1) > 1).any():
            return [np.arange(self.records)]
        return [np.flatnonzero(self.labels == k) for k in np.unique(self.labels)]

    def place(self, intervals: Integers) -> Integers:
        """Return the leaves that hold records.

        Args:
            intervals: (m, columns) the interval of each value.

        Returns:
            (m, trees) numbers of the leaves.
        """
        trees = len(self.tree_starts) - 1
        leaves = np.empty((len(intervals), trees), dtype=np.int64)
        for row, z in enumerate(intervals):
            is_inside = ((self.low <= z) & (z <= self.high)).all(1)
            leaves[row] = np.flatnonzero(is_inside)  # one leaf of each tree
        return leaves

    def fits(self, intervals: Integers) -> bool:
        """Return whether a table reproduces the weights and the sizes of all leaves.

        Args:
            intervals: (records, columns) the interval of each value.

        Returns:
            Whether it does.
        """
        weight, size = self.free_places(self.place(intervals))
        return not weight.any() and (size is None or not size.any())

    def free_places(self, leaves: Integers) -> tuple[Integers, Integers | None]:
        """Return what the leaves hold in addition to the records that have a place.

        Args:
            leaves: (records, trees) the leaves of each record, ``UNPLACED`` for records without a place.

        Returns:
            (leaves, classes) remaining weights and (leaves,) remaining numbers of distinct records.
        """
        weight = self.class_weight.copy()
        size = None if self.size is None else self.size.copy()
        placed = np.flatnonzero(leaves[:, 0] != UNPLACED)
        draws = self.counts[:, placed].T
        np.subtract.at(weight, (leaves[placed], self.labels[placed][:, None]), draws)
        if size is not None:
            np.subtract.at(size, leaves[placed], (draws > 0).astype(np.int64))
        return weight, size


@dataclass
class Choices:
    """The leaves that some records may fill, next to all other records, which have their places.

    The rows of the flat arrays are triples of a record, a tree that drew it, and a leaf of this tree.

    Attributes:
        leaves: The leaves of the forest.
        members: (m,) the records.
        member: Position of each row's record among the members.
        slot: Number of each row's pair of a record and a tree.
        leaf: Leaf of each row.
        draws: How often each row's tree drew the record.
        weight: (leaves, classes) weights that the members must fill.
        size: (leaves,) numbers of distinct records that the members must fill, or None.
        low: (m, columns) first interval of each value.
        high: (m, columns) last interval of each value.
    """

    leaves: ClassLeaves
    members: Integers
    member: Integers
    slot: Integers
    leaf: Integers
    draws: Integers
    weight: Integers
    size: Integers | None
    low: Integers
    high: Integers

    @classmethod
    def build(cls, leaves: ClassLeaves, members: Integers, places: Integers) -> Choices:
        """Collect the leaves that records may fill.

        Args:
            leaves: The leaves of the forest.
            members: (m,) the records.
            places: (records, trees) the leaves of all records, ``UNPLACED`` for records without a place.

        Returns:
            The choices.

        Raises:
            NoTableError: If a record has no leaf in a tree.
        """
        places = places.copy()
        places[members] = UNPLACED
        weight, size = leaves.free_places(places)
        has_place = np.ones(len(weight), dtype=bool) if size is None else size > 0
        tree_of_leaf = np.repeat(np.arange(len(leaves.counts)), np.diff(leaves.tree_starts))
        draws = leaves.counts[tree_of_leaf][:, members].T  # (m, leaves)
        room = weight[:, leaves.labels[members]].T
        member, leaf = np.nonzero((draws > 0) & (room >= draws) & has_place)
        slot_of_pair = member * len(leaves.counts) + tree_of_leaf[leaf]
        choices = cls(
            leaves=leaves,
            members=members,
            member=member,
            slot=slot_of_pair,
            leaf=leaf,
            draws=draws[member, leaf],
            weight=weight,
            size=size,
            low=np.zeros((len(members), leaves.columns), dtype=np.int64),
            high=np.tile([len(values) for values in leaves.thresholds], (len(members), 1)),
        )
        slots = int((leaves.counts[:, members] > 0).sum())
        if not choices.narrow() or len(np.unique(choices.slot)) < slots:
            raise NoTableError
        return choices

    def narrow(self) -> bool:
        """Narrow the intervals of the values to those of the leaves, and drop leaves outside, repeatedly.

        Returns:
            False if a record has no leaf left in a tree.
        """
        slots = len(np.unique(self.slot))
        while len(self.leaf):
            starts = np.flatnonzero(np.diff(self.slot, prepend=-1))
            low = np.minimum.reduceat(self.leaves.low[self.leaf], starts)
            high = np.maximum.reduceat(self.leaves.high[self.leaf], starts)
            np.maximum.at(self.low, self.member[starts], low)
            np.minimum.at(self.high, self.member[starts], high)
            is_possible = (
                (self.leaves.low[self.leaf] <= self.high[self.member])
                & (self.leaves.high[self.leaf] >= self.low[self.member])
            ).all(1)
            if is_possible.all():
                break
            self.member, self.slot, self.leaf, self.draws = (
                rows[is_possible] for rows in (self.member, self.slot, self.leaf, self.draws)
            )
        return len(np.unique(self.slot)) == slots

    @property
    def is_open(self) -> Booleans:
        """(rows,) whether the record of a row has several leaves in the tree."""
        _, inverse, number = np.unique(self.slot, return_inverse=True, return_counts=True)
        return np.asarray(number[inverse] > 1)

    def remaining(self, rows: Booleans) -> tuple[Integers, Integers | None]:
        """Return what the leaves hold in addition to the records of some rows.

        Args:
            rows: (rows,) whether the record of a row lies in its leaf.

        Returns:
            (leaves, classes) remaining weights and (leaves,) remaining numbers of distinct records.
        """
        weight, size = self.weight.copy(), None if self.size is None else self.size.copy()
        label = self.leaves.labels[self.members[self.member[rows]]]
        np.subtract.at(weight, (self.leaf[rows], label), self.draws[rows])
        if size is not None:
            np.subtract.at(size, self.leaf[rows], 1)
        return weight, size

    def cuts(self) -> tuple[Integers, Integers, Integers]:
        """Return the order literals that matter: [z <= cut] for a record and a column.

        Returns:
            Position of the record, column, and cut of each literal, in this order.
        """
        rows = np.flatnonzero(self.is_open)
        member, leaf = self.member[rows], self.leaf[rows]
        candidates = []
        for cut in (self.leaves.high[leaf], self.leaves.low[leaf] - 1):
            is_cut = (cut >= self.low[member]) & (cut < self.high[member])
            row, column = np.nonzero(is_cut)
            candidates.append(np.stack([member[row], column, cut[row, column]], 1))
        literals = np.unique(np.concatenate(candidates), axis=0)
        return literals[:, 0], literals[:, 1], literals[:, 2]


@dataclass(frozen=True)
class Segments:
    """Ranges of intervals, between neighboring cuts, in which a value may lie.

    Attributes:
        member: Position of each segment's record.
        column: Column of each segment.
        first: First interval of each segment.
        last: Last interval of each segment.
    """

    member: Integers
    column: Integers
    first: Integers
    last: Integers

    @classmethod
    def build(cls, choices: Choices, cuts: tuple[Integers, Integers, Integers]) -> Segments:
        """Divide the intervals of every value at its cuts.

        Args:
            choices: The leaves that the records may fill.
            cuts: Position of the record, column, and cut of each order literal.

        Returns:
            The segments, ordered by record, column and interval.
        """
        member, column, cut = cuts
        members, columns = choices.low.shape
        every_member, every_column = (index.ravel() for index in np.indices((members, columns)))
        first = np.concatenate([choices.low.ravel(), cut + 1])
        member = np.concatenate([every_member, member])
        column = np.concatenate([every_column, column])
        order = np.lexsort((first, column, member))
        member, column, first = member[order], column[order], first[order]
        is_last = np.ones(len(first), dtype=bool)
        is_last[:-1] = (np.diff(member) != 0) | (np.diff(column) != 0)
        last = np.append(first[1:] - 1, 0)
        last[is_last] = choices.high[member[is_last], column[is_last]]
        return cls(member, column, first, last)


@dataclass(frozen=True)
class Effort:
    """Limits of one call of the solver.

    Attributes:
        seconds: Wall-clock time.
        work: Time in the solver's own unit, which does not depend on the load of the machine.
        seed: Seed of the solver.
    """

    seconds: float
    work: float
    seed: int


def solve(
    choices: Choices,
    segments: Segments,
    costs: Floats | None,
    effort: Effort,
    hint: Integers | None = None,
) -> Integers | None:
    """Find places for records, so that every leaf holds what the file stores.

    Args:
        choices: The leaves that the records may fill.
        segments: The segments of the values of these records.
        costs: (segments,) cost of each segment. The solver minimizes their sum. None: any places will do.
        effort: Limits of the search.
        hint: (m, columns) intervals of the records in a table that fits.

    Returns:
        (m, columns) number of the segment of each value, or None if no places were found in time.

    Raises:
        NoTableError: If no places agree with what the leaves hold.
    """
    cp_model = import_solver()
    model = cp_model.CpModel()
    literals = _order_literals(model, segments)
    if not _add_leaves(model, choices, literals):
        raise NoTableError
    if costs is not None:
        _add_costs(model, segments, literals, costs)
    if hint is not None:
        for (member, column, cut), literal in literals.items():
            model.add_hint(literal, int(hint[member, column] <= cut))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 0
    solver.parameters.symmetry_level = 0
    solver.parameters.random_seed = effort.seed
    solver.parameters.max_time_in_seconds = max(effort.seconds, 0.01)
    solver.parameters.max_deterministic_time = effort.work
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise NoTableError
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    is_below = np.ones(len(segments.first), dtype=bool)  # the value is not above the segment
    for s, key in _with_literals(segments):
        is_below[s] = solver.boolean_value(literals[key])
    # The segment of a value is the first whose upper end the value does not exceed.
    result = np.full(choices.low.shape, -1)
    rows = np.flatnonzero(is_below)[::-1]
    result[segments.member[rows], segments.column[rows]] = rows
    return result


def _with_literals(segments: Segments) -> Iterable[tuple[int, tuple[int, int, int]]]:
    """Yield each segment that is followed by another of the same value, with the cut between them."""
    member, column, last = segments.member, segments.column, segments.last
    is_followed = (member[1:] == member[:-1]) & (column[1:] == column[:-1])
    for s in np.flatnonzero(is_followed).tolist():
        yield s, (int(member[s]), int(column[s]), int(last[s]))


def _order_literals(model: Any, segments: Segments) -> dict[tuple[int, int, int], Any]:
    literals: dict[tuple[int, int, int], Any] = {}
    previous: tuple[int, int, int] | None = None
    for _, key in _with_literals(segments):
        literals[key] = model.new_bool_var("")
        if previous is not None and previous[:2] == key[:2]:
            model.add_implication(literals[previous], literals[key])
        previous = key
    return literals


def _add_leaves(model: Any, choices: Choices, literals: dict[tuple[int, int, int], Any]) -> bool:
    """Add one literal for each leaf that a record may fill, and what the leaves hold.

    Args:
        model: The model.
        choices: The leaves that the records may fill.
        literals: The order literals by record, column and cut.

    Returns:
        False if a leaf cannot hold what the file stores.
    """
    leaves = choices.leaves
    is_open = choices.is_open
    weight, size = choices.remaining(~is_open)
    label = leaves.labels[choices.members[choices.member]]
    below_high = leaves.high[choices.leaf] < choices.high[choices.member]
    above_low = leaves.low[choices.leaf] > choices.low[choices.member]
    terms: dict[tuple[int, int], list[tuple[Any, int]]] = {}
    slots: dict[int, list[Any]] = {}
    for row in np.flatnonzero(is_open).tolist():
        i, v = int(choices.member[row]), int(choices.leaf[row])
        literal = model.new_bool_var("")
        slots.setdefault(int(choices.slot[row]), []).append(literal)
        terms.setdefault((v, int(label[row])), []).append((literal, int(choices.draws[row])))
        below, above = np.flatnonzero(below_high[row]), np.flatnonzero(above_low[row])
        box = [literals[i, f, int(leaves.high[v, f])] for f in below.tolist()]
        box += [literals[i, f, int(leaves.low[v, f]) - 1].negated() for f in above.tolist()]
        if box:
            model.add_bool_and(box).only_enforce_if(literal)
    for slot in slots.values():
        model.add_exactly_one(slot)
    in_leaf: dict[int, list[Any]] = {}
    for (v, k), pairs in terms.items():
        variables, draws = ([pair[j] for pair in pairs] for j in (0, 1))
        model.add(import_solver().LinearExpr.weighted_sum(variables, draws) == int(weight[v, k]))
        weight[v, k] = 0
        in_leaf.setdefault(v, []).extend(variables)
    is_full = not weight[:, np.unique(label)].any()
    if size is not None:
        for v, variables in in_leaf.items():
            model.add(import_solver().LinearExpr.sum(variables) == int(size[v]))
            size[v] = 0
        has_member_class = choices.weight[:, np.unique(label)].any(1)
        is_full = is_full and not size[has_member_class].any()
    return is_full


def _add_costs(
    model: Any, segments: Segments, literals: dict[tuple[int, int, int], Any], costs: Floats
) -> None:
    scaled = np.rint(COST_STEPS * costs).astype(np.int64)
    variables: list[Any] = []
    coefficients: list[int] = []
    for s, key in _with_literals(segments):
        variables.append(literals[key])
        coefficients.append(int(scaled[s] - scaled[s + 1]))
    if variables:
        cp_model = import_solver()
        model.minimize(cp_model.LinearExpr.weighted_sum(variables, coefficients))


def to_intervals(values: ArrayLike, thresholds: Sequence[Floats]) -> Integers:
    """Return the interval of every value of a table.

    Args:
        values: (records, columns) values.
        thresholds: For each column, its distinct thresholds in increasing order.

    Returns:
        (records, columns) numbers of intervals.
    """
    columns = np.asarray(values, dtype=np.float64).T
    # A value that equals a threshold goes to the left, so it lies in the interval below the threshold.
    intervals = [
        np.searchsorted(t, x, side="left") for t, x in zip(thresholds, columns, strict=True)
    ]
    return np.stack(intervals, 1)
