"""Find tables whose records fill the leaves of a classification forest as the file states, with a solver.

The class Y_i of every record i is known (:mod:`.labels`). The number of times c_ti that tree t drew record i
is known as well (:mod:`.bootstrap`). The thresholds of column f cut the column into intervals 0, 1, ..., K_f.
A table is represented by the numbers z_if of the intervals in which the values of its records i lie. The
thresholds above a leaf v allow the intervals low_vf, ..., high_vf of each column f. Let ``l_itv`` be 1 if
record i lies in leaf v of tree t. A table fits the forest if every leaf holds its stored weight of every
class and its stored number of distinct records:

    sum_v l_itv = 1                                    for every record i that tree t drew
    sum_i c_ti l_itv [Y_i = k] = weight of class k     for every leaf v and class k
    sum_i l_itv = number of distinct records           for every leaf v
    l_itv = 1  implies  low_vf <= z_if <= high_vf      for every column f

The CP-SAT solver of or-tools finds such a table. Its variables are the ``l_itv`` and the truth values of the
statements ``z_if <= c``, which are called order literals. Most problems are small for two reasons. The leaves
of a fully grown tree hold one class each, so the classes are independent. And the random walk that calls the
solver (:mod:`.class_tables`) moves only a few records in each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from residuum.errors import MissingExtraError
from residuum.trees.forest import Booleans, Floats, Forest, Integers

UNPLACED = -1  # this number stands for the leaf of a record whose leaf is not determined yet
# The weight of a class in a leaf is the number of its records. It counts as a whole number up to this
# rounding error.
ROUNDING = 1e-3
COST_STEPS = 100  # the solver minimizes whole numbers, so costs are multiplied by this number


def import_solver() -> Any:
    """Return the module of the constraint solver, which belongs to the package or-tools.

    Raises:
        MissingExtraError: If or-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise MissingExtraError(
            "To reconstruct the training table of a classification forest, the package ortools (the extra "
            "'trees' of residuum) must be installed; it is not installed.",
            'In a clone of residuum, run pip install ".[trees]".',
        ) from None
    return cp_model


class NoTableError(Exception):
    """Raised if the records cannot be put into the leaves so that every leaf holds what the file stores."""


@dataclass(frozen=True)
class ClassLeaves:
    """The leaves of a classification forest: the intervals of values that lead to them, and their contents.

    The thresholds of a column cut it into intervals, which are numbered from 0.

    Attributes:
        thresholds: For each column, its distinct thresholds in increasing order.
        low: (leaves, columns) first interval of each column that leads to each leaf.
        high: (leaves, columns) last interval of each column that leads to each leaf.
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
        """Collect the leaves of a classification forest and their contents.

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
        leaf_count = len(structure.leaf_tree)
        low = np.zeros((leaf_count, columns), dtype=np.int64)
        high = np.tile(
            [len(column_thresholds) for column_thresholds in thresholds], (leaf_count, 1)
        )
        for first, middle, last, f, threshold in zip(
            structure.first,
            structure.middle,
            structure.last,
            structure.feature,
            structure.threshold,
            strict=True,
        ):
            threshold_number = int(np.searchsorted(thresholds[f], threshold))
            high[first:middle, f] = np.minimum(high[first:middle, f], threshold_number)
            low[middle:last, f] = np.maximum(low[middle:last, f], threshold_number + 1)
        tree_and_node = list(
            zip(structure.leaf_tree.tolist(), structure.leaf_node.tolist(), strict=True)
        )
        forest_trees = forest.trees
        leaf_weights = [
            0.0 if (w := forest_trees[t].weight) is None else float(w[v]) for t, v in tree_and_node
        ]
        class_shares = np.stack([forest_trees[t].value[v] for t, v in tree_and_node])
        with np.errstate(invalid="ignore", divide="ignore"):
            class_weight = (
                class_shares
                / class_shares.sum(1, keepdims=True)
                * np.asarray(leaf_weights)[:, None]
            )
        is_whole = np.abs(class_weight - np.rint(class_weight)) <= ROUNDING  # False for NaN
        if not is_whole.all():
            return None
        leaf_sizes = [
            -1 if (c := forest_trees[t].count) is None else int(c[v]) for t, v in tree_and_node
        ]
        return cls(
            thresholds=thresholds,
            low=low,
            high=high,
            class_weight=np.rint(class_weight).astype(np.int64),
            size=None if -1 in leaf_sizes else np.asarray(leaf_sizes),
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
        """Groups of records whose leaves can be found one group after the other.

        These are the classes if every leaf holds one class. Otherwise all records form one group.
        """
        if ((self.class_weight > 0).sum(1) > 1).any():
            return [np.arange(self.records)]
        return [np.flatnonzero(self.labels == k) for k in np.unique(self.labels)]

    def place(self, intervals: Integers) -> Integers:
        """Find the leaf of each tree that each record reaches.

        Args:
            intervals: (m, columns) number of the interval of each value of the m records.

        Returns:
            (m, trees) number of the leaf that each record reaches in each tree.
        """
        tree_count = len(self.tree_starts) - 1
        leaves = np.empty((len(intervals), tree_count), dtype=np.int64)
        for row, z in enumerate(intervals):
            is_inside = ((self.low <= z) & (z <= self.high)).all(1)
            leaves[row] = np.flatnonzero(is_inside)  # the record reaches one leaf of each tree
        return leaves

    def fits(self, intervals: Integers) -> bool:
        """Return True if a table reproduces the contents of all leaves: class weights and numbers of records.

        Args:
            intervals: (records, columns) number of the interval of each value of the table.

        Returns:
            True if every leaf holds the weights and the number of records that the file stores.
        """
        weight, size = self.free_places(self.place(intervals))
        return not weight.any() and (size is None or not size.any())

    def free_places(self, leaves: Integers) -> tuple[Integers, Integers | None]:
        """Compute which records each leaf still lacks, after some records have been put into leaves.

        Args:
            leaves: (records, trees) leaf of each record in each tree. ``UNPLACED`` for records that have not
                been put into leaves.

        Returns:
            (leaves, classes) stored weights minus the weights of these records, and (leaves,) stored numbers
            of distinct records minus the numbers of these records.
        """
        weight = self.class_weight.copy()
        free_counts = None if self.size is None else self.size.copy()
        placed_records = np.flatnonzero(leaves[:, 0] != UNPLACED)
        draws_of_placed = self.counts[:, placed_records].T
        np.subtract.at(
            weight, (leaves[placed_records], self.labels[placed_records][:, None]), draws_of_placed
        )
        if free_counts is not None:
            np.subtract.at(
                free_counts, leaves[placed_records], (draws_of_placed > 0).astype(np.int64)
            )
        return weight, free_counts


@dataclass
class Choices:
    """The leaves into which m records may be put, if all other records stay in their leaves.

    The m records are called members. A choice is a triple of a member, a tree that drew this member, and a
    leaf of this tree that may hold the member. The arrays ``member``, ``pair``, ``leaf`` and ``draws`` have
    one entry for each choice.

    Attributes:
        leaves: The leaves of the forest.
        members: (m,) numbers of the m records.
        member: (choices,) position in ``members`` of the record of each choice.
        pair: (choices,) number of the pair of a record and a tree to which each choice belongs.
        leaf: (choices,) leaf of each choice.
        draws: (choices,) how often the tree of each choice drew the record.
        weight: (leaves, classes) weight of each class that the members must have together in each leaf.
        size: (leaves,) number of members that each leaf must hold, None if the file stores no numbers.
        low: (m, columns) first interval in which each value of the members may lie.
        high: (m, columns) last interval in which each value of the members may lie.
    """

    leaves: ClassLeaves
    members: Integers
    member: Integers
    pair: Integers
    leaf: Integers
    draws: Integers
    weight: Integers
    size: Integers | None
    low: Integers
    high: Integers

    @classmethod
    def build(cls, leaves: ClassLeaves, members: Integers, places: Integers) -> Choices:
        """Collect the leaves into which some records may be put.

        Args:
            leaves: The leaves of the forest.
            members: (m,) numbers of the m records.
            places: (records, trees) leaf of every record of the table in each tree. ``UNPLACED`` for records
                that have not been put into leaves.

        Returns:
            The possible leaves of the m records.

        Raises:
            NoTableError: If no leaf of a tree can hold one of the m records.
        """
        places = places.copy()
        places[members] = UNPLACED
        weight, size = leaves.free_places(places)
        may_hold_members = np.ones(len(weight), dtype=bool) if size is None else size > 0
        tree_of_leaf = np.repeat(np.arange(len(leaves.counts)), np.diff(leaves.tree_starts))
        draws = leaves.counts[tree_of_leaf][:, members].T  # (m, leaves)
        free_weight = weight[:, leaves.labels[members]].T
        member, leaf = np.nonzero((draws > 0) & (free_weight >= draws) & may_hold_members)
        pair_of_choice = member * len(leaves.counts) + tree_of_leaf[leaf]
        choices = cls(
            leaves=leaves,
            members=members,
            member=member,
            pair=pair_of_choice,
            leaf=leaf,
            draws=draws[member, leaf],
            weight=weight,
            size=size,
            low=np.zeros((len(members), leaves.columns), dtype=np.int64),
            high=np.tile([len(values) for values in leaves.thresholds], (len(members), 1)),
        )
        pair_count = int((leaves.counts[:, members] > 0).sum())
        if not choices.narrow() or len(np.unique(choices.pair)) < pair_count:
            raise NoTableError
        return choices

    def narrow(self) -> bool:
        """Remove impossible leaves and impossible values in turn, until nothing changes.

        A value is impossible if no possible leaf of some tree allows this value. A leaf is impossible if it
        allows no possible value of some column.

        Returns:
            False if a tree has no possible leaf for one of the members that it drew.
        """
        pair_count = len(np.unique(self.pair))
        while len(self.leaf):
            pair_starts = np.flatnonzero(np.diff(self.pair, prepend=-1))
            pair_low = np.minimum.reduceat(self.leaves.low[self.leaf], pair_starts)
            pair_high = np.maximum.reduceat(self.leaves.high[self.leaf], pair_starts)
            np.maximum.at(self.low, self.member[pair_starts], pair_low)
            np.minimum.at(self.high, self.member[pair_starts], pair_high)
            is_possible = (
                (self.leaves.low[self.leaf] <= self.high[self.member])
                & (self.leaves.high[self.leaf] >= self.low[self.member])
            ).all(1)
            if is_possible.all():
                break
            self.member, self.pair, self.leaf, self.draws = (
                entries[is_possible] for entries in (self.member, self.pair, self.leaf, self.draws)
            )
        return len(np.unique(self.pair)) == pair_count

    @property
    def is_open(self) -> Booleans:
        """Mask (choices,): whether the record of each choice has several possible leaves in the same tree."""
        _, inverse, number = np.unique(self.pair, return_inverse=True, return_counts=True)
        return np.asarray(number[inverse] > 1)

    def remaining(self, is_chosen: Booleans) -> tuple[Integers, Integers | None]:
        """Compute which records each leaf still lacks if some records are put into chosen leaves.

        Args:
            is_chosen: (choices,) whether the record of each choice is put into the leaf of the choice.

        Returns:
            (leaves, classes) weights minus the weights of the chosen records, and (leaves,) numbers of
            members minus the numbers of the chosen records.
        """
        weight, size = self.weight.copy(), None if self.size is None else self.size.copy()
        labels = self.leaves.labels[self.members[self.member[is_chosen]]]
        np.subtract.at(weight, (self.leaf[is_chosen], labels), self.draws[is_chosen])
        if size is not None:
            np.subtract.at(size, self.leaf[is_chosen], 1)
        return weight, size

    def cuts(self) -> tuple[Integers, Integers, Integers]:
        """Find the cuts (positions between intervals) that separate the possible leaves of each value.

        Let z be the interval number of a value. A cut c separates the intervals up to c from the intervals
        above c, so each cut gives an order literal ``z <= c``. Cuts at the ends of the possible leaves
        suffice.

        Returns:
            Position of the record among the members, column, and number c of each cut, in this order.
        """
        open_choices = np.flatnonzero(self.is_open)
        member, leaf = self.member[open_choices], self.leaf[open_choices]
        cuts_of_ends = []
        for cut in (self.leaves.high[leaf], self.leaves.low[leaf] - 1):
            is_inside_range = (cut >= self.low[member]) & (cut < self.high[member])
            row, column = np.nonzero(is_inside_range)
            cuts_of_ends.append(np.stack([member[row], column, cut[row, column]], 1))
        distinct_cuts = np.unique(np.concatenate(cuts_of_ends), axis=0)
        return distinct_cuts[:, 0], distinct_cuts[:, 1], distinct_cuts[:, 2]


@dataclass(frozen=True)
class Segments:
    """Segments: ranges of intervals in which the values of some records may lie.

    The cuts of a value (see ``Choices.cuts``) divide the possible intervals of this value into segments. The
    possible leaves are the same for all intervals of a segment.

    Attributes:
        member: Position of each segment's record among the members.
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
        """Divide the possible intervals of every value of the members at the cuts of this value.

        Args:
            choices: The possible leaves of the members.
            cuts: Position of the record, column, and number of each cut, from :meth:`Choices.cuts`.

        Returns:
            The segments, ordered by record, column and interval.
        """
        member, column, cut = cuts
        members, columns = choices.low.shape
        every_member, every_column = (index.ravel() for index in np.indices((members, columns)))
        first_interval = np.concatenate([choices.low.ravel(), cut + 1])
        member = np.concatenate([every_member, member])
        column = np.concatenate([every_column, column])
        segment_order = np.lexsort((first_interval, column, member))
        member, column, first_interval = (
            member[segment_order],
            column[segment_order],
            first_interval[segment_order],
        )
        is_last_of_value = np.ones(len(first_interval), dtype=bool)
        is_last_of_value[:-1] = (np.diff(member) != 0) | (np.diff(column) != 0)
        last_interval = np.append(first_interval[1:] - 1, 0)
        last_interval[is_last_of_value] = choices.high[
            member[is_last_of_value], column[is_last_of_value]
        ]
        return cls(member, column, first_interval, last_interval)


@dataclass(frozen=True)
class Effort:
    """Limits of one call of the constraint solver CP-SAT, and its seed.

    Attributes:
        seconds: Maximum wall-clock time.
        work: Maximum deterministic time, a unit of the solver that does not depend on the load of the
            machine.
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
    """Choose a segment for every value of m records, so that every leaf holds what the file stores.

    Args:
        choices: The possible leaves of the m records.
        segments: The segments in which the values of these records may lie.
        costs: (segments,) cost of each segment. The solver minimizes the sum over the chosen segments. If
            None, the solver returns the first solution that it finds.
        effort: Limits of the search.
        hint: (m, columns) intervals of the values of the m records in a table that fits, where the search
            begins.

    Returns:
        (m, columns) number of the segment of each value, or None if no solution was found in time.

    Raises:
        NoTableError: If there is no solution.
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
    # For each segment (range of possible values): whether the value of its record is at most its upper end.
    is_below = np.ones(len(segments.first), dtype=bool)
    for s, key in _with_literals(segments):
        is_below[s] = solver.boolean_value(literals[key])
    # The possible values are divided into segments. A value lies in the first segment whose upper end it
    # does not exceed.
    segment_of_value = np.full(choices.low.shape, -1)
    reached = np.flatnonzero(is_below)[::-1]
    segment_of_value[segments.member[reached], segments.column[reached]] = reached
    return segment_of_value


def _with_literals(segments: Segments) -> Iterable[tuple[int, tuple[int, int, int]]]:
    """Yield the segments (ranges of a value) except the last of each value, each with its Boolean variable.

    The variable states that the value does not exceed the upper end. It is given as record, column and cut.
    """
    member, column, last = segments.member, segments.column, segments.last
    has_next_segment = (member[1:] == member[:-1]) & (column[1:] == column[:-1])
    for s in np.flatnonzero(has_next_segment).tolist():
        yield s, (int(member[s]), int(column[s]), int(last[s]))


def _order_literals(model: Any, segments: Segments) -> dict[tuple[int, int, int], Any]:
    literals: dict[tuple[int, int, int], Any] = {}
    previous_key: tuple[int, int, int] | None = None
    for _, key in _with_literals(segments):
        literals[key] = model.new_bool_var("")
        if previous_key is not None and previous_key[:2] == key[:2]:
            model.add_implication(literals[previous_key], literals[key])
        previous_key = key
    return literals


def _add_leaves(model: Any, choices: Choices, literals: dict[tuple[int, int, int], Any]) -> bool:
    """Add one Boolean variable for each choice of a leaf, and the constraints on the contents of the leaves.

    Args:
        model: The constraint model of the solver.
        choices: The possible leaves of the records.
        literals: The Boolean variables of the order literals, by record, column and cut.

    Returns:
        False if the records cannot fill a leaf with what the file stores.
    """
    leaves = choices.leaves
    has_several_leaves = choices.is_open
    weight, size = choices.remaining(~has_several_leaves)
    labels = leaves.labels[choices.members[choices.member]]
    ends_before_value_range = leaves.high[choices.leaf] < choices.high[choices.member]
    starts_after_value_range = leaves.low[choices.leaf] > choices.low[choices.member]
    terms: dict[tuple[int, int], list[tuple[Any, int]]] = {}
    choices_by_pair: dict[int, list[Any]] = {}
    for choice in np.flatnonzero(has_several_leaves).tolist():
        member, leaf = int(choices.member[choice]), int(choices.leaf[choice])
        is_chosen = model.new_bool_var("")
        choices_by_pair.setdefault(int(choices.pair[choice]), []).append(is_chosen)
        terms.setdefault((leaf, int(labels[choice])), []).append(
            (is_chosen, int(choices.draws[choice]))
        )
        upper_columns, lower_columns = (
            np.flatnonzero(ends_before_value_range[choice]),
            np.flatnonzero(starts_after_value_range[choice]),
        )
        box_literals = [
            literals[member, f, int(leaves.high[leaf, f])] for f in upper_columns.tolist()
        ]
        box_literals += [
            literals[member, f, int(leaves.low[leaf, f]) - 1].negated()
            for f in lower_columns.tolist()
        ]
        if box_literals:
            model.add_bool_and(box_literals).only_enforce_if(is_chosen)
    for pair_choices in choices_by_pair.values():
        model.add_exactly_one(pair_choices)
    choices_by_leaf: dict[int, list[Any]] = {}
    for (leaf, class_number), leaf_terms in terms.items():
        variables, draws = ([term[j] for term in leaf_terms] for j in (0, 1))
        model.add(
            import_solver().LinearExpr.weighted_sum(variables, draws)
            == int(weight[leaf, class_number])
        )
        weight[leaf, class_number] = 0
        choices_by_leaf.setdefault(leaf, []).extend(variables)
    is_filled = not weight[:, np.unique(labels)].any()
    if size is not None:
        for leaf, variables in choices_by_leaf.items():
            model.add(import_solver().LinearExpr.sum(variables) == int(size[leaf]))
            size[leaf] = 0
        has_member_class = choices.weight[:, np.unique(labels)].any(1)
        is_filled = is_filled and not size[has_member_class].any()
    return is_filled


def _add_costs(
    model: Any, segments: Segments, literals: dict[tuple[int, int, int], Any], costs: Floats
) -> None:
    integer_costs = np.rint(COST_STEPS * costs).astype(np.int64)
    variables: list[Any] = []
    coefficients: list[int] = []
    for s, key in _with_literals(segments):
        variables.append(literals[key])
        coefficients.append(int(integer_costs[s] - integer_costs[s + 1]))
    if variables:
        cp_model = import_solver()
        model.minimize(cp_model.LinearExpr.weighted_sum(variables, coefficients))


def to_intervals(values: ArrayLike, thresholds: Sequence[Floats]) -> Integers:
    """Find the interval between thresholds in which each value of a table lies.

    Args:
        values: (records, columns) values.
        thresholds: For each column, its distinct thresholds in increasing order.

    Returns:
        (records, columns) numbers of intervals.
    """
    values_by_column = np.asarray(values, dtype=np.float64).T
    # A value that equals a threshold goes to the left child, so the value lies in the interval below the
    # threshold.
    intervals = [
        np.searchsorted(t, x, side="left")
        for t, x in zip(thresholds, values_by_column, strict=True)
    ]
    return np.stack(intervals, 1)
