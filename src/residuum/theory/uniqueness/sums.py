"""Which sums the weights pin down: the mass and the moment of every activation pattern.

Inside a pattern and label (a *group* g) the gradient is affine in x, so samples enter the equation through
L_g = sum lam_j and M_g = sum lam_j x_j alone; with several classes, through one such pair per rival. Sets
with the same patterns explain the weights alike when all these sums together give the same
parameters. Where that linear map has no null space the sums stay as they are, group by group; where it
has one, mass and moment can move across patterns.

    first layer   its part of the map is D^T (M, L), D the backward signals, one row per group and rival:
                  the total of group g is fixed as soon as its indicator lies in the range of D
    dense         singular vectors of the whole map, where it fits

What neither shows to be fixed counts as free.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from residuum.networks import dense_chain
from residuum.records.certificate import Sums
from residuum.stationarity import Rows, Theta, parameters
from residuum.theory.kkt_sets import KKTSet

NULL = 1e-10  # of the largest singular value: what is smaller counts as zero
FIXED = 1e-8  # of an indicator's length: what may be missing of it
UNKNOWNS, ENTRIES = 3000, 5 * 10**7
SIGNED = ("binary", "multiclass")  # tasks whose multipliers are nonnegative


@dataclass(frozen=True)
class Groups:
    """Candidates by activation pattern and label. index: (m,) group of each; first: (G,) a member."""

    index: Tensor
    first: Tensor

    @classmethod
    def of(cls, given: KKTSet) -> Groups:
        """Without signs of the multipliers a label says nothing: patterns alone."""
        label = given.y if given.task in SIGNED else torch.zeros_like(given.lam)
        keys = torch.cat([given.switches.pattern.double(), label[:, None].double()], 1)
        index = torch.unique(keys, dim=0, return_inverse=True)[1]
        count = int(index.max()) + 1
        order = torch.arange(len(index) - 1, -1, -1, device=index.device)
        return cls(index, order.new_zeros(count).scatter(0, index[order], order))

    def __len__(self) -> int:
        return len(self.first)

    def total(self, values: Tensor) -> Tensor:
        """(G, ...) sum over the members of each group."""
        return values.new_zeros(len(self), *values.shape[1:]).index_add(0, self.index, values)

    def members(self, g: int) -> Tensor:
        """Candidates of one group."""
        return (self.index == g).nonzero()[:, 0]


@dataclass(frozen=True)
class Pinned:
    """groups: (G,) whose mass and moment every set of these patterns shares; what: how that is known.

    rows: one per group and rival, index the group; null: (Q (d + 1), k) moves of the sums that no
    parameter sees, where they were computed.
    """

    groups: Tensor
    what: Sums
    rows: Rows | None = None
    null: Tensor | None = None


def pinned(given: KKTSet, groups: Groups) -> Pinned:
    """Which sums are fixed."""
    count = len(groups)
    if given.task not in SIGNED:
        nothing = torch.zeros(count, dtype=torch.bool, device=given.x.device)
        return Pinned(nothing, Sums(count, 0, None, None, "multipliers of either sign"))
    rows = _rows(given, groups)
    fixed, least = _by_first_layer(given, groups, rows)
    if bool(fixed.all()):
        return Pinned(fixed, Sums(count, count, 0, least, "first layer"), rows)
    unknowns = len(rows) * (given.x[0].numel() + 1)
    size = sum(t.numel() for t in given.target.values())
    if unknowns > UNKNOWNS or unknowns * size > ENTRIES:
        return Pinned(fixed, Sums(count, int(fixed.sum()), None, least, "first layer"), rows)
    null, least = null_space(given, groups, rows)
    per_row = null.reshape(len(rows), given.x[0].numel() + 1, null.shape[1])
    moved = per_row.new_zeros(count, *per_row.shape[1:]).index_add(0, rows.index, per_row)
    fixed = moved.flatten(1).norm(dim=1) <= FIXED
    what = Sums(count, int(fixed.sum()), null.shape[1], least, "dense")
    return Pinned(fixed, what, rows, null)


def _rows(given: KKTSet, groups: Groups) -> Rows:
    """One row per group, or per group and rival, at the group's first member; index: the group."""
    y, outputs = given.y[groups.first], given.outputs.shape[1]
    if given.task == "binary":
        return Rows(torch.arange(len(groups), device=y.device), y[:, None])
    own = torch.nn.functional.one_hot(y, outputs)
    group, rival = (own == 0).nonzero(as_tuple=True)
    return Rows(group, (own[group] - torch.nn.functional.one_hot(rival, outputs)).to(given.x))


def _by_first_layer(given: KKTSet, groups: Groups, rows: Rows) -> tuple[Tensor, float | None]:
    """(G,) groups whose indicator D reaches, and the least singular value of D over the largest."""
    chain = dense_chain(given.models[0])
    if chain is None or chain.linears[0].bias is None:
        return torch.zeros(len(groups), dtype=torch.bool, device=given.x.device), None
    trace = chain.trace(given.x[groups.first])
    left, values, _ = torch.linalg.svd(
        chain.signals(trace, rows.covectors, rows.index)[0].detach(), full_matrices=False
    )
    reached = values > NULL * values[0]
    if not bool(reached.any()):  # no neuron hears any candidate: D is zero
        return torch.zeros(len(groups), dtype=torch.bool, device=given.x.device), None
    basis = left[:, reached]
    indicator = torch.nn.functional.one_hot(rows.index, len(groups)).to(basis)
    missing = (indicator - basis @ (basis.T @ indicator)).norm(dim=0) / indicator.norm(dim=0)
    return missing <= FIXED, float(values[reached].min() / values[0])


def null_space(given: KKTSet, groups: Groups, rows: Rows) -> tuple[Tensor, float]:
    """(Q (d + 1), k) basis of the sums' moves that no parameter sees; least singular value left.

    Per row: d coordinates of M - L x and one of L, x the group's first member.
    """
    model, theta = given.models[0], parameters(given.models[0])
    x = given.x[groups.first][rows.index].flatten(1)

    def total(x: Tensor, lam: Tensor) -> Tensor:
        def value(t: Theta) -> Tensor:
            outputs = functional_call(model, t, (x.reshape(len(x), *given.x.shape[1:]),))
            return (lam * rows.covectors * outputs).sum()

        return torch.cat([part.flatten() for part in grad(value)(theta).values()])

    ones = torch.ones(len(rows), 1, dtype=x.dtype, device=x.device)
    eye = torch.eye(x.numel() + len(x), dtype=x.dtype, device=x.device)
    moves = eye.reshape(len(eye), len(x), -1)  # per row: d of its moment, one of its mass

    def seen(move: Tensor) -> Tensor:
        return jvp(total, (x, ones), (move[:, :-1], move[:, -1:]))[1]

    matrix = vmap(seen, chunk_size=64)(moves).T  # (P, Q (d + 1))
    small = torch.linalg.qr(matrix, mode="r")[1]  # same singular values and right vectors
    _, values, right = torch.linalg.svd(small, full_matrices=len(small) < small.shape[1])
    rank = int((values > NULL * values[0]).sum())
    return right[rank:].T, float(values[rank - 1] / values[0]) if rank else 0.0
