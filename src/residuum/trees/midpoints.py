"""Derive intervals and equations for the values of a column from the thresholds of its nodes.

If a tree searches for the best split, it puts the threshold t of a node halfway between two neighboring
values of the records below the node. Let M be the largest value left of the threshold and m the smallest
value right of the threshold. Then

    M + m = 2 t,   M < t < m.

Every value x of the table lies in an interval [low, high], which the nodes above the record narrow. For
example, M is at least the largest lower end of the records on the left side. If only record a can have the
value M, and only record b can have the value m, the node gives an equation x_a + x_b = 2 t.

The equations of a column are the edges of a graph between records. In a connected component of this graph,
all values depend on one number z: x_a = s_a z + c_a with s_a = 1 or -1. A cycle of odd length determines z,
and thus all values of the component.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

from residuum.trees.forest import Booleans, Floats, Integers

# Every node sends records with a missing value to one of its children. If a record went to this child at
# this many nodes or more, and a present value can explain all of these steps, the value is taken to be
# present.
MIN_STEPS = 12
# A value lies on a lattice of equally spaced numbers if its distance to the lattice is at most this share of
# the lattice step.
LATTICE_ERROR = 1e-3
# Largest rounding error of a value, as a share of the largest absolute threshold of its column.
ROUNDING = 8 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class ColumnNodes:
    """The nodes of a forest that split one column, and the members below each node.

    A member is a training record, or a leaf whose records are not all known.

    Attributes:
        threshold: (nodes,) threshold of each node.
        members: Members below the left child of the first node, then below its right child, then below the
            children of the next node, and so on.
        starts: (2 nodes,) position in ``members`` of the first member below each child.
        side: Number of the child for every entry of ``members``. The left child of node v has the number 2 v,
            and the right child has the number 2 v + 1.
        missing_left: (nodes,) whether missing values go to the left child.
    """

    threshold: Floats
    members: Integers
    starts: Integers
    side: Integers
    missing_left: Booleans

    def missing_values(self, records: int) -> tuple[Booleans, Booleans]:
        """Find the records whose value in this column is missing.

        Every node sends all missing values to one of its children. The value of a record is missing if two
        conditions hold. At every node, the record is below the child for missing values. And no value agrees
        with all thresholds of these nodes. A threshold of infinity sends missing values to the right child
        and all other values to the left child.

        Args:
            records: Number of training records. Members with higher numbers are leaves.

        Returns:
            (records,) whether the value is missing, and (records,) whether the value may be missing.
        """
        low, high = self.boxes(records)
        is_record = self.members < records
        members, side = self.members[is_record], self.side[is_record]
        is_left = side % 2 == 0
        is_on_missing_side = is_left == self.missing_left[side // 2]
        is_present = np.zeros(records, dtype=bool)
        is_present[members[~is_on_missing_side]] = True
        entry_counts = np.bincount(members, minlength=records)
        may_be_missing = ~is_present & (entry_counts < MIN_STEPS)
        return ~is_present & (low >= high), may_be_missing & (low < high)

    def without(self, missing: Booleans) -> ColumnNodes | None:
        """Return a copy without the records whose value is missing, None if no node remains.

        The copy leaves out nodes that have members below only one child after this.

        Args:
            missing: (records,) whether the value of each record is missing.
        """
        is_record = self.members < len(missing)
        is_kept = np.ones(len(self.members), dtype=bool)
        is_kept[is_record] = ~missing[self.members[is_record]]
        side_count = 2 * len(self.threshold)
        side_sizes = np.bincount(self.side[is_kept], minlength=side_count)
        has_both_sides = (
            (side_sizes[0::2] > 0) & (side_sizes[1::2] > 0) & np.isfinite(self.threshold)
        )
        if not has_both_sides.any():
            return None
        is_kept &= has_both_sides[self.side // 2]
        new_numbers = np.cumsum(has_both_sides) - 1
        kept_side_sizes = side_sizes.reshape(-1, 2)[has_both_sides].ravel()
        kept_sides = self.side[is_kept]
        return ColumnNodes(
            threshold=self.threshold[has_both_sides],
            members=self.members[is_kept],
            starts=np.concatenate([[0], np.cumsum(kept_side_sizes)])[:-1],
            side=2 * new_numbers[kept_sides // 2] + kept_sides % 2,
            missing_left=self.missing_left[has_both_sides],
        )

    def boxes(self, records: int) -> tuple[Floats, Floats]:
        """Find for each record the interval of values that lead to all of its leaves.

        Args:
            records: Number of training records. Members with higher numbers are leaves.

        Returns:
            (records,) lower ends and (records,) upper ends. If no value leads to all leaves, the lower end is
            not below the upper end.
        """
        low, high = np.full(records, -np.inf), np.full(records, np.inf)
        threshold, is_record = self.threshold[self.side // 2], self.members < records
        is_left, is_right = is_record & (self.side % 2 == 0), is_record & (self.side % 2 == 1)
        np.minimum.at(high, self.members[is_left], threshold[is_left])
        np.maximum.at(low, self.members[is_right], threshold[is_right])
        return low, high


@dataclass
class Column:
    """Intervals and equations for the values of one column of the training table.

    A member is a training record, or a leaf whose records are not all known.

    Attributes:
        nodes: The nodes that split the column.
        records: Number of records. Members with higher numbers are leaves with unknown records.
        low: (members,) lower ends of the intervals that hold the values.
        high: (members,) upper ends of these intervals.
        origin: Smallest value of the column, if all values have the form origin + k step with integers k.
            These numbers are called a lattice.
        step: Distance between neighboring values of the lattice, 0 if the values do not lie on a lattice.
        tolerance: Rounding error of a value.
        is_exact: (records,) whether the value is determined exactly.
        is_doubtful: (members,) whether the value may be missing. Such a value does not narrow other
            intervals.
        edges: Equations x_a + x_b = total between two records: the total for each pair (a, b).
        is_contradictory: Whether some equations contradict each other.
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
        """Narrow the intervals of the values with each node and equation. Return True if one has changed."""
        intervals_before = self.low.copy(), self.high.copy()
        new_edges = self._use_nodes()
        if new_edges or not (
            np.array_equal(intervals_before[0], self.low)
            and np.array_equal(intervals_before[1], self.high)
        ):
            self._use_edges()
        if self.step:
            self._round_to_lattice()
        interval_widths = self.high[: self.records] - self.low[: self.records]
        self.is_exact |= (interval_widths >= 0) & (interval_widths <= self.tolerance)
        return not (
            np.array_equal(intervals_before[0], self.low)
            and np.array_equal(intervals_before[1], self.high)
        )

    def _use_nodes(self) -> bool:
        """Narrow the intervals of the values with all nodes. Return True if a new equation was found."""
        nodes, low, high = self.nodes, self.low, self.high
        threshold, starts, side, members = nodes.threshold, nodes.starts, nodes.side, nodes.members
        node, is_left = side // 2, side % 2 == 0
        member_low, member_high = low[members], high[members]
        is_doubtful = self.is_doubtful[members]
        present_low = np.where(is_doubtful, -np.inf, member_low)
        present_high = np.where(is_doubtful, np.inf, member_high)
        largest_low = np.maximum.reduceat(present_low, starts)[0::2]
        largest_high = np.maximum.reduceat(member_high, starts)[0::2]
        smallest_low = np.minimum.reduceat(member_low, starts)[1::2]
        smallest_high = np.minimum.reduceat(present_high, starts)[1::2]
        half_step = self.step / 2
        left_low = np.maximum(largest_low, 2 * threshold - smallest_high)
        left_high = np.minimum(largest_high, 2 * threshold - smallest_low)
        left_high = np.minimum(left_high, threshold - half_step)
        right_low, right_high = 2 * threshold - left_high, 2 * threshold - left_low
        np.minimum.at(high, members[is_left], left_high[node[is_left]])
        np.maximum.at(low, members[~is_left], right_low[node[~is_left]])
        # Find the records that can have the largest value on the left side of a node, or the smallest value
        # on its right side.
        tolerance = self.tolerance
        can_be_extreme = np.where(
            is_left,
            high[members] >= left_low[node] - tolerance,
            low[members] <= right_high[node] + tolerance,
        )
        candidate_counts = np.add.reduceat(can_be_extreme.astype(np.int64), starts)
        candidates = np.add.reduceat(np.where(can_be_extreme, members, 0), starts)
        is_known_record = (candidate_counts == 1) & (candidates < self.records)
        largest, smallest = candidates[0::2], candidates[1::2]
        knows_largest, knows_smallest = is_known_record[0::2], is_known_record[1::2]
        np.maximum.at(low, largest[knows_largest], left_low[knows_largest])
        np.minimum.at(high, smallest[knows_smallest], right_high[knows_smallest])
        is_equation = knows_largest & knows_smallest
        equation_count = len(self.edges)
        equation_pairs = np.sort(np.stack([largest[is_equation], smallest[is_equation]], 1), axis=1)
        for (a, b), total in zip(
            equation_pairs.tolist(), (2 * threshold[is_equation]).tolist(), strict=True
        ):
            self.edges[a, b] = total
        return len(self.edges) > equation_count

    def _use_edges(self) -> None:
        """Solve the equations x_a + x_b = total between records, or narrow the intervals of their values."""
        if not self.edges:
            return
        graph = EquationGraph.build(self.edges, self.records)
        graph_records = graph.records
        # All values x of a connected component depend on one unknown z: x = sign z + constant. So the
        # interval of each record limits z.
        allowed_z = graph.sign * (
            np.stack([self.low[graph_records], self.high[graph_records]]) - graph.constant
        )
        z_low = np.full(graph.components, -np.inf)
        z_high = np.full(graph.components, np.inf)
        np.maximum.at(z_low, graph.component, allowed_z.min(0))
        np.minimum.at(z_high, graph.component, allowed_z.max(0))
        odd_low, odd_high = graph.odd_cycles()
        has_odd_cycle = odd_low <= odd_high
        tolerance = 4 * self.tolerance
        even_cycles_agree = graph.even_cycles_agree(tolerance)
        odd_cycles_disagree = has_odd_cycle & (odd_high - odd_low > tolerance)
        odd_z = np.where(has_odd_cycle, odd_low, 0.0)
        is_outside = has_odd_cycle & ((odd_z < z_low - tolerance) | (odd_z > z_high + tolerance))
        is_contradictory = (
            ~even_cycles_agree | odd_cycles_disagree | is_outside | (z_low > z_high + tolerance)
        )
        if is_contradictory.any():
            self.is_contradictory = True
        has_exact_value = np.zeros(graph.components, dtype=bool)
        np.logical_or.at(has_exact_value, graph.component, self.is_exact[graph_records])
        is_solved_component = ~is_contradictory & (
            has_odd_cycle | has_exact_value | (np.abs(z_high - z_low) <= self.tolerance)
        )
        component_values = np.where(
            has_odd_cycle, odd_z, np.clip((z_low + z_high) / 2, z_low, z_high)
        )
        is_solved_record = is_solved_component[graph.component]
        solved_values = (graph.sign * component_values[graph.component] + graph.constant)[
            is_solved_record
        ]
        # Trees compare float32 values with thresholds.
        solved_values = solved_values.astype(np.float32).astype(np.float64)
        self.low[graph_records[is_solved_record]] = self.high[graph_records[is_solved_record]] = (
            solved_values
        )
        self.is_exact[graph_records[is_solved_record]] = True
        is_unsolved_record = ~is_solved_record & ~is_contradictory[graph.component]
        allowed_values = graph.sign * np.stack([z_low, z_high])[:, graph.component] + graph.constant
        self.low[graph_records[is_unsolved_record]] = np.maximum(
            self.low[graph_records[is_unsolved_record]], allowed_values.min(0)[is_unsolved_record]
        )
        self.high[graph_records[is_unsolved_record]] = np.minimum(
            self.high[graph_records[is_unsolved_record]], allowed_values.max(0)[is_unsolved_record]
        )

    def _round_to_lattice(self) -> None:
        origin, step, n = self.origin, self.step, self.records
        low = np.ceil((self.low[:n] - origin) / step - LATTICE_ERROR) * step + origin
        high = np.floor((self.high[:n] - origin) / step + LATTICE_ERROR) * step + origin
        self.low[:n], self.high[:n] = np.maximum(self.low[:n], low), np.minimum(self.high[:n], high)
        self.is_exact |= np.abs(self.high[:n] - self.low[:n]) <= LATTICE_ERROR * step


@dataclass(frozen=True)
class EquationGraph:
    """Equations x_a + x_b = total between records, solved up to one number z for each connected component.

    The records are the nodes of a graph, and the equations are its edges.

    Attributes:
        records: The records that occur in an equation.
        component: Number of the connected component of each of these records.
        sign: The number s in the solution x = s z + c of each record, 1 or -1.
        constant: The number c in the solution x = s z + c of each record.
        components: Number of connected components.
        first: Position in ``records`` of the first record of each equation.
        second: Position in ``records`` of the second record of each equation.
        total: Right-hand side of each equation.
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
        """Solve the equations: express the values of each connected component by one unknown z.

        Args:
            edges: Equations x_a + x_b = total: the total for each pair (a, b).
            records: Number of all records.

        Returns:
            The graph with its solution up to one number for each component.
        """
        record_pairs = np.array(list(edges), dtype=np.int64)
        equation_totals = np.array(list(edges.values()))
        records_in_equations, inverse = np.unique(record_pairs, return_inverse=True)
        first, second = inverse.reshape(record_pairs.shape).T
        record_count = len(records_in_equations)
        adjacency_matrix = coo_array(
            (np.ones(len(first)), (first, second)), shape=(record_count, record_count)
        ).tocsr()
        components, component = connected_components(adjacency_matrix, directed=False)
        sign, constant = np.ones(record_count), np.zeros(record_count)
        totals_by_pair = dict(
            zip(zip(first.tolist(), second.tolist(), strict=True), equation_totals, strict=True)
        )
        root_nodes = np.unique(component, return_index=True)[1]
        extended_graph = _with_common_root(first, second, root_nodes, record_count)
        order, parent = breadth_first_order(extended_graph, record_count, directed=False)
        for node in order[1:].tolist():
            parent_node = int(parent[node])
            if parent_node == record_count:
                continue
            equation_total = totals_by_pair.get((parent_node, node))
            if equation_total is None:
                equation_total = totals_by_pair[node, parent_node]
            sign[node] = -sign[parent_node]
            constant[node] = equation_total - constant[parent_node]
        return cls(
            records_in_equations,
            component,
            sign,
            constant,
            components,
            first,
            second,
            equation_totals,
        )

    def odd_cycles(self) -> tuple[Floats, Floats]:
        """Compute the unknown z of each component from odd cycles of its equations.

        The result is the smallest and the largest z.

        Each cycle of an odd number of equations determines z. The values of z agree if the equations do.

        Returns:
            (components,) smallest and (components,) largest values. They are inf and -inf for a component
            without an odd cycle.
        """
        closes_odd_cycle = self.sign[self.first] == self.sign[self.second]
        a, b = self.first[closes_odd_cycle], self.second[closes_odd_cycle]
        z_values = (self.total[closes_odd_cycle] - self.constant[a] - self.constant[b]) / (
            2 * self.sign[a]
        )
        low, high = np.full(self.components, np.inf), np.full(self.components, -np.inf)
        np.minimum.at(low, self.component[a], z_values)
        np.maximum.at(high, self.component[a], z_values)
        return low, high

    def even_cycles_agree(self, tolerance: float) -> Booleans:
        """Return for each connected component of the graph whether its equations agree with each other.

        The equations of a cycle of even length do not determine z, but they can contradict each other.
        """
        closes_even_cycle = self.sign[self.first] != self.sign[self.second]
        a, b = self.first[closes_even_cycle], self.second[closes_even_cycle]
        equation_errors = np.abs(
            self.total[closes_even_cycle] - self.constant[a] - self.constant[b]
        )
        largest_errors = np.zeros(self.components)
        np.maximum.at(largest_errors, self.component[a], equation_errors)
        return largest_errors <= tolerance


def _with_common_root(first: Integers, second: Integers, roots: Integers, size: int) -> object:
    """Add a node to the graph of the equations from which a search reaches all components.

    The new node is connected with one record of each component.

    Args:
        first: (equations,) first record of each equation.
        second: (equations,) second record of each equation.
        roots: One record of each connected component.
        size: Number of records, which is also the number of the new node.

    Returns:
        The sparse adjacency matrix.
    """
    edge_starts = np.concatenate([first, np.full(len(roots), size)])
    edge_ends = np.concatenate([second, roots])
    shape = (size + 1, size + 1)
    return coo_array((np.ones(len(edge_starts)), (edge_starts, edge_ends)), shape=shape).tocsr()
