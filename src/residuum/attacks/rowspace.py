"""Row-space mode: candidates as combinations of the leading right singular vectors of the target.

    target_1 = sum_i d_1(x_i) x_i^T,   so the x_i of independent terms lie in its row space

With V (d, r) orthonormal, x = V c, and every first layer W_1 replaced by W_1 V, the network, the sum
and the gradients in c are those of a smaller network, and

    || target_1 - sum_i d_i x_i^T ||^2 = || target_1 V - sum_i d_i c_i^T ||^2 + || target_1 (1 - V V^T) ||^2

whatever V is: the loss at c is exactly the full loss at V c. The last term is constant, ``outside``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.attacks.objectives import Objective
from residuum.errors import InputError
from residuum.networks import dense_chain
from residuum.records import Knowledge
from residuum.stationarity import parameters

FIRST = "layers.0.weight"


@dataclass(frozen=True)
class RowSpace:
    """basis V: (d, r) in float64; tolerance: what it was cut at; outside, total: squared norms."""

    basis: Tensor
    shape: tuple[int, ...]
    tolerance: float
    outside: float
    total: float

    @classmethod
    def of(
        cls,
        model: nn.Module,
        objective: Objective,
        knowledge: Knowledge,
        shape: tuple[int, ...],
        tolerance: float,
    ) -> RowSpace:
        """Singular vectors of the target's first layer above ``tolerance`` times the largest.

        At a KKT point the rows of the first layer are combinations of samples, so the equation sees
        candidates through these directions alone: fewer unknowns, and no noise that the weights cannot
        speak of. What of the target lies outside is a constant of the loss, kept so that residuals mean
        the same.
        """
        if dense_chain(model) is None:
            raise InputError(
                "Row-space mode needs a first layer that sees the whole input: an MLP; this "
                f"network is a {type(model).__name__}.",
                "Leave --rank-tolerance out.",
            )
        theta = {name: t.cpu().double() for name, t in parameters(model).items()}
        target = objective.surface_of(theta, knowledge).target[FIRST]
        _, values, rows = torch.linalg.svd(target, full_matrices=False)
        rank = int((values > tolerance * values[0]).sum())
        if rank == 0:
            raise InputError(
                "Row-space mode needs a first layer that is not zero everywhere.",
                "Leave --rank-tolerance out.",
            )
        basis = rows[:rank].T
        # A vector's sign is the library's choice; fixed, so that a saved attack can go on elsewhere.
        peaks = basis.gather(0, basis.abs().argmax(0, keepdim=True))
        outside, total = (float(part.square().sum()) for part in (values[rank:], values))
        return cls((basis * peaks.sign()).contiguous(), shape, tolerance, outside, total)

    @property
    def rank(self) -> int:
        """r, the dimension candidates are searched in."""
        return self.basis.shape[1]

    def reduce(self, x: Tensor) -> Tensor:
        """(..., *shape) -> (..., r): the coefficients of the projection."""
        return x.flatten(-len(self.shape)) @ self.basis.to(x)

    def lift(self, c: Tensor) -> Tensor:
        """(..., r) -> (..., *shape)."""
        return (c @ self.basis.to(c).T).unflatten(-1, self.shape)

    def reduce_model(self, model: nn.Module) -> nn.Module:
        """The same network on coefficients, in float64."""
        small = dense_chain(copy.deepcopy(model).cpu().double())
        assert small is not None
        first = small.linears[0]
        first.weight = nn.Parameter(first.weight.detach() @ self.basis)
        first.in_features = self.rank
        return small

    def reduce_knowledge(self, knowledge: Knowledge) -> Knowledge:
        """Initial weights and moment of the smaller network, where they are known."""
        known = {"theta0": knowledge.theta0, "moment": knowledge.moment}
        small = {
            name: {**part, FIRST: part[FIRST].cpu().double() @ self.basis}
            for name, part in known.items()
            if part is not None
        }
        return knowledge.replace(**small)

    def notes(self, box_dropped: bool) -> tuple[str, ...]:
        """What this mode did, for the reader of the result."""
        said = [
            f"row-space mode: {self.rank} of {len(self.basis)} directions, singular values above "
            f"{self.tolerance:g} of the largest; {self.outside / self.total:.3g} of the first "
            "layer's squared target lies outside and cannot be explained"
        ]
        if box_dropped:
            said.append(
                "row-space mode does not project candidates into the known value range; the prior "
                "value-box penalises what lies outside"
            )
        return tuple(said)
