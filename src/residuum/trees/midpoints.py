"""What the thresholds of a column determine about its values.

A tree with best splits puts a threshold t halfway between two neighboring values of its training records.
Let M be the largest value left of the threshold and m the smallest value right of it. Then

    M + m = 2 t,   M < t < m.

Every value x has an interval [low, high]. Each node narrows the intervals of the records below it: the
largest lower end on the left side is a lower end of M, and so on. If only one record can have the value
M, and only one the value m, then the node is an equation x_a + x_b = 2 t between two records.

The equations of a column are the edges of a graph. In a connected part all values depend on one number z, as
x_a = s_a z + c_a with s_a = 1 or -1. A cycle of odd length determines z, and with it all values of the part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

from residuum.trees.forest import Booleans, Floats, Integers

# A record that went the way of missing values this often, but has a common box, counts as present.
MIN_STEPS = 12
LATTICE_ERROR = 1e-3  # of a value on a lattice, in steps
ROUNDING = 8 * float(np.finfo(np.float32).eps)  # of values, times the size of the column


@dataclass(frozen=True)
class ColumnNodes:
    """The nodes that split on one column, and the members below each of them.

    A member is a record, or a leaf whose records are not all known.

    Attributes:
        threshold: (nodes,) thresholds.
        members: Members of the left side of the first node, then of its right side, then of the next node.
        starts: (2 nodes,) where each side begins.
        side: For every entry of ``members`` the number of its side: 2 v for the left one of node v, else
            2 v + 1.
        missing_left: (nodes,) whether missing values go to the left side.
    """

    threshold: Floats
    members: Integers
    starts: Integers
    side: Integers
    missing_left: Booleans

    def missing_values(self, records: int) -> tuple[Booleans, Booleans]:
        """Tell which values are missing, from the sides that the records are on.

        A missing value always goes to the side of missing values. Usually these sides have no value in
        common.
        A threshold of infinity puts the missing values on the right side and all others on the left.

        Returns:
            (records,) whether the value is missing, and whether it may be missing.
        """
        low, high = self.boxes(records)
        is_record = self.members < records
        members, side = self.members[is_record], self.side[is_record]
        is_left = side % 2 == 0
        agrees = is_left == self.missing_left[side // 2]
        is_present = np.zeros(records, dtype=bool)
        is_present[members[~agrees]] = True
        steps = np.bincount(members, minlength=records)
        may_be_missing = ~is_present & (steps < MIN_STEPS)
        return ~is_present & (low >= high), may_be_missing & (low < high)

    def without(self, missing: Booleans) -> ColumnNodes | None:
        """Return the nodes without members whose value is missing, None if no node is left."""
        is_record = self.members < len(missing)
        stays = np.ones(len(self.members), dtype=bool)
        stays[is_record] = ~missing[self.members[is_record]]
        sides = 2 * len(self.threshold)
        sizes = np.bincount(self.side[stays], minlength=sides)
        is_whole = (sizes[0::2] > 0) & (sizes[1::2] > 0) & np.isfinite(self.threshold)
        if not is_whole.any():
            return None
        stays &= is_whole[self.side // 2]
        number = np.cumsum(is_whole) - 1
        lengths = sizes.reshape(-1, 2)[is_whole].ravel()
        side = self.side[stays]
        return ColumnNodes(
            threshold=self.threshold[is_whole],
            members=self.members[stays],
            starts=np.concatenate([[0], np.cumsum(lengths)])[:-1],
            side=2 * number[side // 2] + side % 2,
            missing_left=self.missing_left[is_whole],
        )

    def boxes(self, records: int) -> tuple[Floats, Floats]:
        """Return the lower and upper ends, (records,) each, that the leaves of the records have in common."""
        low, high = np.full(records, -np.inf), np.full(records, np.inf)
        threshold, is_record = self.threshold[self.side // 2], self.members < records
        is_left, is_right = is_record & (self.side % 2 == 0), is_record & (self.side % 2 == 1)
        np.minimum.at(high, self.members[is_left], threshold[is_left])
        np.maximum.at(low, self.members[is_right], threshold[is_right])
        return low, high


@dataclass
class Column:
    """Intervals and equations of the values of one column.

    Attributes:
        nodes: Nodes that split on the column.
        records: Number of records. Members with higher numbers are leaves with unknown records.
        low: (members,) lower ends.
        high: (members,) upper ends.
        origin: A value of the lattice that the values form.
        step: Distance between two values of the lattice, 0 if the values form none.
        tolerance: Rounding error of a value.
        is_exact: (records,) whether the value is determined.
        is_doubtful: (members,) whether the value may be missing, so that it bounds no other value.
        edges: Equations by the pair of their records: twice the threshold.
        is_contradictory: Whether equations of the column disagree.
    """

    nodes: ColumnNodes
    records: int
    low: Floats
    high: Floats
    origin: float
    step: float
    tolerance: float
    is_exact: Booleans
    is_doubtful: Booleans
    edges: dict[tuple[int, int], float]
    is_contradictory: bool = False

    def narrow(self) -> bool:
        """Use all nodes once. Return whether an interval became smaller or a value exact."""
        before = self.low.copy(), self.high.copy()
        new_edges = self._use_nodes()
        if new_edges or not (
            np.array_equal(before[0], self.low) and np.array_equal(before[1], self.high)
        ):
            self._use_edges()
        if self.step:
            self._round_to_lattice()
        return not (np.array_equal(before[0], self.low) and np.array_equal(before[1], self.high))

    def _use_nodes(self) -> bool:
        """Narrow intervals by all nodes, and add equations. Return whether there are new equations."""
        nodes, low, high = self.nodes, self.low, self.high
        threshold, starts, side, members = nodes.threshold, nodes.starts, nodes.side, nodes.members
        node, is_left = side // 2, side % 2 == 0
        member_low, member_high = low[members], high[members]
        doubtful = self.is_doubtful[members]
        sure_low = np.where(doubtful, -np.inf, member_low)
        sure_high = np.where(doubtful, np.inf, member_high)
        largest_low = np.maximum.reduceat(sure_low, starts)[0::2]
        largest_high = np.maximum.reduceat(member_high, starts)[0::2]
        smallest_low = np.minimum.reduceat(member_low, starts)[1::2]
        smallest_high = np.minimum.reduceat(sure_high, starts)[1::2]
        gap = self.step / 2
        left_low = np.maximum(largest_low, 2 * threshold - smallest_high)
        left_high = np.minimum(largest_high, 2 * threshold - smallest_low)
        left_high = np.minimum(left_high, threshold - gap)
        right_low, right_high = 2 * threshold - left_high, 2 * threshold - left_low
        np.minimum.at(high, members[is_left], left_high[node[is_left]])
        np.maximum.at(low, members[~is_left], right_low[node[~is_left]])
        # Who can be the largest on the left, and the smallest on the right?
        slack = self.tolerance
        reaches = np.where(
            is_left,
            high[members] >= left_low[node] - slack,
            low[members] <= right_high[node] + slack,
        )
        number = np.add.reduceat(reaches.astype(np.int64), starts)
        candidate = np.add.reduceat(np.where(reaches, members, 0), starts)
        is_known = (number == 1) & (candidate < self.records)
        largest, smallest = candidate[0::2], candidate[1::2]
        knows_largest, knows_smallest = is_known[0::2], is_known[1::2]
        np.maximum.at(low, largest[knows_largest], left_low[knows_largest])
        np.minimum.at(high, smallest[knows_smallest], right_high[knows_smallest])
        is_equation = knows_largest & knows_smallest
        size = len(self.edges)
        pairs = np.sort(np.stack([largest[is_equation], smallest[is_equation]], 1), axis=1)
        for (a, b), total in zip(
            pairs.tolist(), (2 * threshold[is_equation]).tolist(), strict=True
        ):
            self.edges[a, b] = total
        return len(self.edges) > size

    def _use_edges(self) -> None:
        """Solve connected parts of the graph with an odd cycle or an exact value, and narrow the others."""
        if not self.edges:
            return
        graph = EquationGraph.build(self.edges, self.records)
        member = graph.records
        # The interval of z that each record allows, and what all records of a part allow together.
        ends = graph.sign * (np.stack([self.low[member], self.high[member]]) - graph.constant)
        z_low = np.full(graph.components, -np.inf)
        z_high = np.full(graph.components, np.inf)
        np.maximum.at(z_low, graph.component, ends.min(0))
        np.minimum.at(z_high, graph.component, ends.max(0))
        odd_low, odd_high = graph.odd_cycles()
        is_odd = odd_low <= odd_high
        tolerance = 4 * self.tolerance
        agrees = graph.even_cycles_agree(tolerance)
        disagrees = is_odd & (odd_high - odd_low > tolerance)
        middle = np.where(is_odd, odd_low, 0.0)
        outside = is_odd & ((middle < z_low - tolerance) | (middle > z_high + tolerance))
        bad = ~agrees | disagrees | outside | (z_low > z_high + tolerance)
        if bad.any():
            self.is_contradictory = True
        has_exact = np.zeros(graph.components, dtype=bool)
        np.logical_or.at(has_exact, graph.component, self.is_exact[member])
        solved = ~bad & (is_odd | has_exact | (np.abs(z_high - z_low) <= self.tolerance))
        z = np.where(is_odd, middle, np.clip((z_low + z_high) / 2, z_low, z_high))
        is_solved = solved[graph.component]
        values = (graph.sign * z[graph.component] + graph.constant)[is_solved]
        values = values.astype(np.float32).astype(np.float64)  # trees see float32 values
        self.low[member[is_solved]] = self.high[member[is_solved]] = values
        self.is_exact[member[is_solved]] = True
        is_open = ~is_solved & ~bad[graph.component]
        allowed = graph.sign * np.stack([z_low, z_high])[:, graph.component] + graph.constant
        self.low[member[is_open]] = np.maximum(self.low[member[is_open]], allowed.min(0)[is_open])
        self.high[member[is_open]] = np.minimum(self.high[member[is_open]], allowed.max(0)[is_open])

    def _round_to_lattice(self) -> None:
        origin, step, n = self.origin, self.step, self.records
        low = np.ceil((self.low[:n] - origin) / step - LATTICE_ERROR) * step + origin
        high = np.floor((self.high[:n] - origin) / step + LATTICE_ERROR) * step + origin
        self.low[:n], self.high[:n] = np.maximum(self.low[:n], low), np.minimum(self.high[:n], high)
        self.is_exact |= np.abs(self.high[:n] - self.low[:n]) <= LATTICE_ERROR * step


@dataclass(frozen=True)
class EquationGraph:
    """Equations x_a + x_b = total, solved up to one number z for each connected part.

    Attributes:
        records: Records that occur in an equation.
        component: Connected part of each of them.
        sign: s in x = s z + c.
        constant: c in x = s z + c.
        components: Number of connected parts.
        first: Positions of the first records of the equations.
        second: Positions of the second records.
        total: Right-hand sides.
    """

    records: Integers
    component: Integers
    sign: Floats
    constant: Floats
    components: int
    first: Integers
    second: Integers
    total: Floats

    @classmethod
    def build(cls, edges: dict[tuple[int, int], float], records: int) -> EquationGraph:
        """Walk through every connected part from one of its records.

        Args:
            edges: Right-hand sides by pairs of records.
            records: Number of all records.

        Returns:
            The graph with its solution up to one number for each part.
        """
        pairs = np.array(list(edges), dtype=np.int64)
        total = np.array(list(edges.values()))
        present, inverse = np.unique(pairs, return_inverse=True)
        first, second = inverse.reshape(pairs.shape).T
        size = len(present)
        matrix = coo_array((np.ones(len(first)), (first, second)), shape=(size, size)).tocsr()
        components, component = connected_components(matrix, directed=False)
        sign, constant = np.ones(size), np.zeros(size)
        by_pair = dict(zip(zip(first.tolist(), second.tolist(), strict=True), total, strict=True))
        roots = np.unique(component, return_index=True)[1]
        extended = _with_common_root(first, second, roots, size)
        order, parent = breadth_first_order(extended, size, directed=False)
        for node in order[1:].tolist():
            above = int(parent[node])
            if above == size:
                continue
            edge = by_pair.get((above, node))
            if edge is None:
                edge = by_pair[node, above]
            sign[node] = -sign[above]
            constant[node] = edge - constant[above]
        return cls(present, component, sign, constant, components, first, second, total)

    def odd_cycles(self) -> tuple[Floats, Floats]:
        """Return the smallest and the largest z that odd cycles of each part give.

        Returns:
            (components,) each. Without an odd cycle they are inf and -inf.
        """
        odd = self.sign[self.first] == self.sign[self.second]
        a, b = self.first[odd], self.second[odd]
        z = (self.total[odd] - self.constant[a] - self.constant[b]) / (2 * self.sign[a])
        low, high = np.full(self.components, np.inf), np.full(self.components, -np.inf)
        np.minimum.at(low, self.component[a], z)
        np.maximum.at(high, self.component[a], z)
        return low, high

    def even_cycles_agree(self, tolerance: float) -> Booleans:
        """Return for each part whether all its even cycles agree."""
        even = self.sign[self.first] != self.sign[self.second]
        a, b = self.first[even], self.second[even]
        error = np.abs(self.total[even] - self.constant[a] - self.constant[b])
        largest = np.zeros(self.components)
        np.maximum.at(largest, self.component[a], error)
        return largest <= tolerance


def _with_common_root(first: Integers, second: Integers, roots: Integers, size: int) -> object:
    """Return the graph with one more node, ``size``, that is connected with one record of each part."""
    rows = np.concatenate([first, np.full(len(roots), size)])
    columns = np.concatenate([second, roots])
    shape = (size + 1, size + 1)
    return coo_array((np.ones(len(rows)), (rows, columns)), shape=shape).tocsr()
